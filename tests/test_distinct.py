"""Distinct values without a sort: what torch.unique finds."""

from __future__ import annotations

import pytest
import torch

from pwfn.fixing.unique import counted, distinct


def drawn(size: int, kinds: int, *, rare: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size + kinds)
    values = torch.randn(kinds, generator=generator)
    picked = torch.randint(0, kinds, (size,), generator=generator)
    if rare:  # all but a few are one value, so that a sample misses most of the others
        picked[torch.rand(size, generator=generator) < 0.9999] = 0
    return values[picked]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rare", [False, True])
@pytest.mark.parametrize("kinds", [1, 2, 300, 9000])
@pytest.mark.parametrize("size", [0, 1, 1025, 2**16 - 1, 2**16, 300_001])
def test_it_is_what_torch_finds(size: int, kinds: int, rare: bool, dtype: torch.dtype) -> None:
    values = drawn(size, kinds, rare=rare).to(dtype)
    book, index = distinct(values)
    expected = torch.unique(values, return_inverse=True)
    assert torch.equal(book, expected[0])
    assert torch.equal(index, expected[1])
    assert torch.equal(counted(values)[1], torch.unique(values, return_counts=True)[1])


def test_all_different() -> None:
    values = torch.randperm(2**17).float()
    book, index = distinct(values)
    assert torch.equal(book[index], values)
    assert book.numel() == 2**17


def test_both_zeros_are_one_value() -> None:
    values = torch.zeros(2**17)
    values[::2] = -0.0
    values[5] = 1.0
    assert distinct(values)[0].tolist() == [0.0, 1.0]
