"""Unique values without a sort: equal to torch.unique."""

from __future__ import annotations

import pytest
import torch

from pwfn.fixing.unique import unique, unique_counts


def drawn(size: int, kinds: int, *, rare: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size + kinds)
    values = torch.randn(kinds, generator=generator)
    picked = torch.randint(0, kinds, (size,), generator=generator)
    if rare:  # all but a few are one value, so that a sample misses most of the others
        picked[torch.rand(size, generator=generator) < 0.9999] = 0
    return values[picked]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rare", [False, True])
@pytest.mark.parametrize("kinds", [1, 300, 9000, 10**6])
@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 300_001])
def test_equal_to_torch_unique(size: int, kinds: int, rare: bool, dtype: torch.dtype) -> None:
    values = drawn(size, kinds, rare=rare).to(dtype)
    expected = torch.unique(values, return_inverse=True, return_counts=True)
    assert all(map(torch.equal, (*unique(values), unique_counts(values)[1]), expected))


def test_both_zeros_are_one_value() -> None:
    values = torch.zeros(2**17)
    values[::2] = -0.0
    values[5] = 1.0
    assert unique(values)[0].tolist() == [0.0, 1.0]
