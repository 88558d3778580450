"""The exact posterior as bytes: groups where sigma is shared, plain numbers where it is not."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed import case, per_axis, plain
from torch import nn

from pwfn import Compressed, FileError, Layout
from pwfn.file import sigma_coder


def compressed(values: list[float], sigma: list[float]) -> Compressed:
    layout = Layout.of(nn.Linear(len(values), 1, bias=False))
    return Compressed.of(layout, torch.tensor(values), torch.tensor(sigma), {})


def encoded(found: Compressed) -> bytes:
    """Its bytes, which decode to the same sigmas."""
    assert found.weight_sigma is not None
    raw = sigma_coder.encode(found, found.weight_sigma)
    assert torch.equal(sigma_coder.decode(found, raw), found.weight_sigma)
    return raw


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(1, 5), st.integers(1, 5))
def test_exact_for_any_mixture(data: st.DataObject, size: int, centres: int, kinds: int) -> None:
    values = data.draw(st.lists(st.integers(0, centres), min_size=size, max_size=size))
    sigma = data.draw(st.lists(st.integers(0, kinds), min_size=size, max_size=size))
    encoded(compressed([float(v) for v in values], [s / 7 for s in sigma]))


def test_layout_of_the_bytes_by_hand() -> None:
    """Two centres, the first with sigmas 1 (twice) and 2, the second with 0.5 only: three groups."""
    raw = encoded(compressed([1, 1, 3, 1] * 10, [1, 2, 0.5, 1] * 10))
    assert raw[0] == 1
    assert struct.unpack("<II", raw[1:9]) == (3, 6)
    assert raw[9:15] == bytes([0, 20, 0, 10, 1, 10])
    assert struct.unpack("<3f", raw[15:27]) == (1, 2, 0.5)
    ideal_bits = 30 * (math.log2(3) - 2 / 3)  # of 30 weights one third has the second sigma
    assert ideal_bits / 8 <= len(raw) - 27 <= ideal_bits / 8 + 8


def test_one_sigma_at_each_centre_costs_no_stream() -> None:
    assert len(encoded(compressed([1, 2] * 500, [0.5, 0.25] * 500))) == 9 + 2 * (1 + 2) + 2 * 4


@pytest.mark.parametrize("kinds", [1, 2, 50, 0])
def test_the_smaller_of_the_two_ways(kinds: int) -> None:
    found = plain((50, 40), values=20, kinds=kinds)
    raw = encoded(found)
    assert raw[0] == (0 if kinds == 0 else 1)  # 0: each weight has its own
    assert len(raw) <= 1 + 4 * found.layout.size


def test_zero_and_the_smallest_numbers_are_kept() -> None:
    encoded(compressed([1, 1, 1, 1] * 9, [0.0, 1e-45, 3.4e38, 0.0] * 9))


def test_near_the_conditional_entropy() -> None:
    """Which of its centre's sigmas a weight has costs H(sigma | centre), within 64 bits and 0.01 %."""
    found, _ = case("many_values")
    raw = encoded(found)
    number, table_bytes = struct.unpack("<II", raw[1:9])
    stream = len(raw) - 9 - table_bytes - 4 * number
    ideal = 0.0
    indices, sigma = found.indices.numpy(), found.weight_sigma.numpy()
    for centre in np.unique(indices):
        counts = np.unique(sigma[indices == centre], return_counts=True)[1]
        ideal -= float((counts * np.log2(counts / counts.sum())).sum())
    assert ideal / 8 <= stream <= ideal / 8 * 1.0001 + 8


def test_several_codebooks_do_not_mix() -> None:
    """The same index in two codebooks is two centres."""
    layout = Layout.of(nn.Linear(4, 2, bias=False))
    values = torch.tensor([1.0, 2.0, 1.0, 2.0, 5.0, 6.0, 5.0, 6.0])
    sigma = torch.tensor([0.1, 0.2, 0.1, 0.2, 0.3, 0.4, 0.3, 0.4])
    encoded(Compressed.of(layout, values, sigma, {}, divide=per_axis(0)))


def test_steps_that_would_wrap_around_are_refused() -> None:
    """A step of 2^48, again and again, would come round to the first centre."""
    found = compressed([1, 1, 2, 2] * 5, [0.5, 0.5, 0.25, 0.25] * 5)
    table = (bytes([0x80] * 6 + [0x40]) + b"\x0a") * 2
    raw = b"\x01" + struct.pack("<II", 2, len(table)) + table + struct.pack("<2f", 0.5, 0.25)
    with pytest.raises(FileError, match="do not agree with the indices"):
        sigma_coder.decode(found, raw)
