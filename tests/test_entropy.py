"""Entropy and counts by hand, and what must hold of them for any values."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pwfn import Layout, LayoutError
from pwfn.evaluate.entropy import Pool, per_attention_part, per_input_channel, summarise
from pwfn.fixing.unique import entropy_bits
from pwfn.layout import Attention, Entry, Kind

FEW = st.lists(st.integers(-4, 4).map(lambda n: n / 8), min_size=1, max_size=40)


def entropy_of(values: list[Any]) -> float:
    """The textbook sum, ``sum p log2 (1 / p)``."""
    counts = Counter(values)
    return sum(n / len(values) * math.log2(len(values) / n) for n in counts.values())


def exact(value: float) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


# Pools


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ([], 0.0),
        ([0.3], 0.0),
        ([0.5] * 100, 0.0),
        ([0.5, -0.5], 1.0),
        ([0.5, 0.5, 0.25, -0.25], 1.5),
        ([0.0, 1.0, 1.0, 1.0], 2 - 0.75 * math.log2(3)),
        ([0.0, -0.0], 0.0),  # one zero
        ([n / 64 for n in range(300)] * 3, math.log2(300)),
    ],
)
def test_entropy_by_hand(values: list[float], bits: float) -> None:
    assert entropy_bits(torch.tensor(values)) == exact(bits)
    assert math.copysign(1, entropy_bits(torch.tensor(values))) == 1  # never "-0.000 bits"


@given(FEW)
@settings(deadline=None, max_examples=60)
def test_entropy_is_the_textbook_sum_and_independent_of_order_and_size(values: list[float]) -> None:
    bits = entropy_bits(torch.tensor(values))
    assert bits == exact(entropy_of(values))
    assert 0 <= bits <= math.log2(len(set(values))) + 1e-12
    assert entropy_bits(torch.tensor(values[::-1])) == exact(bits)
    assert entropy_bits(torch.tensor(values).mul(2).add(7)) == exact(bits)  # the values do not matter
    assert entropy_bits(torch.tensor(values * 3)) == exact(bits)
    assert entropy_bits(torch.tensor(values).abs()) <= bits + 1e-12  # merging values never adds


@given(FEW, FEW)
@settings(deadline=None, max_examples=60)
def test_a_pool_of_two_has_at_least_their_mean_entropy_and_at_most_the_label_more(
    left: list[float], right: list[float]
) -> None:
    share = len(left) / (len(left) + len(right))
    mean = share * entropy_of(left) + (1 - share) * entropy_of(right)
    label = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    bits = entropy_bits(torch.tensor(left + right))
    assert mean - 1e-12 <= bits <= mean + label + 1e-12


def test_a_pool_by_hand() -> None:
    pool = Pool.of(torch.tensor([0.0, 0.0, 0.5, -0.25, 0.375, 0.375, -3.0, 2.0]))
    assert (pool.weights, pool.unique) == (8, 6)
    assert pool.entropy_bits == exact(2 * 0.25 * 2 + 4 * 0.125 * 3)
    assert pool.zero_share == 2 / 8
    assert pool.power_of_two_share == 5 / 8  # 0, 0, 1/2, -1/4, 2; not 3/8, 3/8, -3
    assert Pool.of(torch.zeros(0)) == Pool(0, 0, 0.0, 0.0, 0.0)


@given(st.integers(-140, 120), st.sampled_from([1, -1]))
@settings(deadline=None, max_examples=50)
def test_every_power_of_two_counts_as_one_and_its_neighbours_do_not(exponent: int, sign: int) -> None:
    power = sign * torch.tensor(2.0**exponent, dtype=torch.float64)
    neighbours = torch.stack([torch.nextafter(power, power.new_tensor(x)) for x in (math.inf, -math.inf)])
    assert Pool.of(power[None]).power_of_two_share == 1
    assert Pool.of(neighbours).power_of_two_share == 0
    assert Pool.of(3 * power[None]).power_of_two_share == 0


# A whole network


def test_inner_is_without_first_and_last_layer_and_without_biases() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1),
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 3, 1),
        nn.Linear(3, 2, bias=False),
        nn.Linear(2, 2),
    )
    layout = Layout.of(model)
    values = torch.full((layout.size,), 9.0)
    for name in ("2.weight", "3.weight"):
        values[layout.entry(name).span] = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.0, 3.0])
    summary = summarise(layout, values.clone().requires_grad_())
    assert (summary.inner.weights, summary.inner.unique) == (12, 4)
    assert summary.inner.entropy_bits == exact(2 * (1 / 3) * math.log2(3) + 2 * (1 / 6) * math.log2(6))
    assert summary.inner.zero_share == 2 / 12
    assert summary.inner.power_of_two_share == 10 / 12
    assert summary.whole.weights == layout.size == 2 + 2 + 6 + 3 + 6 + 4 + 2
    assert summary.whole.unique == 5
    assert list(summary.layers) == [entry.name for entry in layout.entries]
    assert summary.layers["2.weight"] == summary.layers["3.weight"] == Pool.of(values[4:10])
    assert summary.layers["0.bias"] == Pool(2, 1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("model", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))])
def test_a_network_that_is_all_first_and_last_has_no_inner_weights(model: nn.Module) -> None:
    layout = Layout.of(model)
    summary = summarise(layout, layout.gather(model))
    assert summary.inner == Pool(0, 0, 0.0, 0.0, 0.0)
    assert summary.whole.weights == layout.size


# Parts of a parameter


@pytest.mark.parametrize(
    ("module", "channels", "weights_each", "axis"),
    [
        (nn.Conv1d(3, 5, 2), 3, 10, 1),
        (nn.Conv2d(3, 5, (2, 3)), 3, 30, 1),
        (nn.Conv3d(2, 4, 2), 2, 32, 1),
        (nn.ConvTranspose2d(3, 5, (2, 3)), 3, 30, 0),
        (nn.ConvTranspose1d(4, 2, 3), 4, 6, 0),
        (nn.Linear(4, 6), 4, 6, 1),
    ],
)
def test_one_pool_for_each_input_channel(
    module: nn.Module, channels: int, weights_each: int, axis: int
) -> None:
    """Every weight is the number of its input channel, so each pool has one value."""
    layout = Layout.of(nn.Sequential(nn.Linear(2, 2), module))
    entry = layout.entry("1.weight")
    values = torch.full((layout.size,), -1.0)
    shape = [channels if i == axis else 1 for i in range(len(entry.shape))]
    values[entry.span] = torch.arange(channels).float().view(shape).expand(entry.shape).reshape(-1)
    pools = per_input_channel(layout, values, "1.weight")
    assert [(pool.weights, pool.unique) for pool in pools] == [(weights_each, 1)] * channels
    assert [pool.zero_share for pool in pools] == [1.0] + [0.0] * (channels - 1)
    assert per_input_channel(layout, values, "1.bias") == []


def test_input_channels_of_grouped_convolutions() -> None:
    layout = Layout.of(nn.Conv2d(4, 6, 1, groups=2, bias=False))  # weight 6×2×1×1, three outputs per group
    weight = torch.tensor([[0, 10], [1, 11], [2, 12], [3, 13], [4, 14], [4, 15]], dtype=torch.float32)
    pools = per_input_channel(layout, weight.reshape(-1), "weight")
    # Channels 0 and 1 go to the first three outputs, 2 and 3 to the last three.
    assert [(pool.weights, pool.unique) for pool in pools] == [(3, 3), (3, 3), (3, 2), (3, 3)]
    layout = Layout.of(nn.ConvTranspose2d(4, 2, 1, groups=2, bias=False))  # weight 4×1×1×1
    pools = per_input_channel(layout, torch.tensor([1.0, 1.0, 2.0, 3.0]), "weight")
    assert [pool.weights for pool in pools] == [1, 1, 1, 1]
    with pytest.raises(LayoutError, match="'nothing'"):
        per_input_channel(layout, torch.zeros(4), "nothing")


class FusedAttention(nn.Module):
    """The usual fused projection: rows are q, k, v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


@pytest.mark.parametrize(
    ("model", "name"),
    [(FusedAttention(4, 2), "qkv.weight"), (nn.MultiheadAttention(4, 2), "in_proj_weight")],
)
def test_parts_of_a_fused_projection_by_hand(model: nn.Module, name: str) -> None:
    layout = Layout.of(model)
    values = torch.arange(layout.size) % 7.0
    weight = values[layout.entry(name).span].view(12, 4)
    parts = per_attention_part(layout, values, name)
    assert list(parts) == ["q", "k", "v"]
    for part, block in zip(parts, weight.split(4), strict=True):
        assert parts[part] == [Pool.of(block[:, column]) for column in range(4)]
    bias = name.replace("weight", "bias")
    own = values[layout.entry(bias).span]
    assert list(per_attention_part(layout, values, bias).values()) == [[Pool.of(b)] for b in own.split(4)]
    output = next(entry.name for entry in layout.entries if "proj.weight" in entry.name)
    assert per_attention_part(layout, values, output) == {}


def test_parts_of_projections_that_are_transposed_or_separate() -> None:
    """Inputs along axis 0, outputs along axis 1: the blocks lie side by side."""
    attention = Attention(("q", "k", "v"), 2, axis=1)
    entry = Entry(
        "c_attn.weight", (4, 12), torch.float32, 0, "c_attn", "Conv1D", Kind.WEIGHT, (), 0, attention
    )
    weight = torch.arange(48).remainder(5).float().view(4, 12)
    parts = per_attention_part(Layout((entry,)), weight.reshape(-1), "c_attn.weight")
    assert parts["k"] == [Pool.of(weight[row, 4:8]) for row in range(4)]
    assert per_input_channel(Layout((entry,)), weight.reshape(-1), "c_attn.weight") == [
        Pool.of(row) for row in weight
    ]
    model = nn.Module()
    model.num_heads, model.q_proj = 3, nn.Linear(4, 6, bias=False)
    assert list(per_attention_part(Layout.of(model), torch.zeros(24), "q_proj.weight")) == ["q"]
