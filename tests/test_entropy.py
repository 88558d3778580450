"""Entropy and counts by hand, and what must hold of them for any values."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pwfn import Layout, LayoutError
from pwfn.evaluate.entropy import (
    Pool,
    entropy_bits,
    inner_entries,
    orders,
    per_attention_part,
    per_head,
    per_input_channel,
    summarise,
)
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
    ],
)
def test_entropy_by_hand(values: list[float], bits: float) -> None:
    assert entropy_bits(torch.tensor(values)) == exact(bits)
    assert math.copysign(1, entropy_bits(torch.tensor(values))) == 1  # never "-0.000 bits"


@given(st.integers(1, 300), st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_a_uniform_distribution_over_k_values_has_log2_k_bits(k: int, times: int) -> None:
    values = (torch.arange(k, dtype=torch.float32) / 64).repeat(times)
    assert entropy_bits(values) == exact(math.log2(k))


@given(FEW)
@settings(deadline=None, max_examples=60)
def test_entropy_is_the_textbook_sum_and_sees_neither_order_nor_size(values: list[float]) -> None:
    bits = entropy_bits(torch.tensor(values))
    assert bits == exact(entropy_of(values))
    assert 0 <= bits <= math.log2(len(set(values))) + 1e-12
    assert entropy_bits(torch.tensor(values[::-1])) == exact(bits)
    assert entropy_bits(torch.tensor(values).mul(2).add(7)) == exact(bits)  # the values' names do not matter
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
    values = torch.tensor([0.0, 0.0, 0.5, -0.25, 0.375, 0.375, -3.0, 2.0])
    pool = Pool.of(values)
    assert pool.weights == 8
    assert pool.unique == 6
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


def test_orders_by_hand() -> None:
    # 7/8 = 1 - 1/8 and 3/8 = 1/2 - 1/8 need two; 11/16 = 1/2 + 1/4 - 1/16 needs three.
    values = torch.tensor([0.0, 0.5, -0.5, 2.0, 0.375, 0.875, -0.875, 0.6875])
    assert orders(values) == {0: 1, 1: 3, 2: 3, 3: 1}
    assert list(orders(values)) == [0, 1, 2, 3]
    assert orders(torch.zeros(0)) == {}


@given(FEW)
@settings(deadline=None, max_examples=40)
def test_orders_count_every_weight_once_and_agree_with_the_share_of_powers_of_two(
    values: list[float],
) -> None:
    found = orders(torch.tensor(values))
    assert sum(found.values()) == len(values)
    powers = found.get(0, 0) + found.get(1, 0)
    assert Pool.of(torch.tensor(values)).power_of_two_share == powers / len(values)


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
    assert [entry.name for entry in inner_entries(layout)] == ["2.weight", "3.weight"]
    values = torch.full((layout.size,), 9.0)
    values[layout.entry("2.weight").span] = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.0, 3.0])
    values[layout.entry("3.weight").span] = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.0, 3.0])
    summary = summarise(layout, values)
    assert summary.inner.weights == 12
    assert summary.inner.unique == 4
    assert summary.inner.entropy_bits == exact(2 * (1 / 3) * math.log2(3) + 2 * (1 / 6) * math.log2(6))
    assert summary.inner.zero_share == 2 / 12
    assert summary.inner.power_of_two_share == 10 / 12
    assert summary.whole.weights == layout.size == 2 + 2 + 6 + 3 + 6 + 4 + 2
    assert summary.whole.unique == 5
    assert list(summary.layers) == [entry.name for entry in layout.entries]
    assert summary.layers["2.weight"] == summary.layers["3.weight"] == Pool.of(values[4:10])
    assert summary.layers["0.bias"] == Pool(2, 1, 0.0, 0.0, 0.0)
    assert sum(summary.orders.values()) == layout.size
    assert summary.orders == {0: 2, 1: 8, 2: layout.size - 10}  # 9 = 8 + 1 and 3 = 4 - 1


@pytest.mark.parametrize("model", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))])
def test_a_network_that_is_all_first_and_last_has_no_inner_weights(model: nn.Module) -> None:
    layout = Layout.of(model)
    summary = summarise(layout, layout.gather(model))
    assert summary.inner == Pool(0, 0, 0.0, 0.0, 0.0)
    assert summary.whole.weights == layout.size


def test_a_summary_takes_trained_values() -> None:
    layout = Layout.of(nn.Linear(3, 2))
    values = torch.randn(layout.size)
    assert summarise(layout, values.clone().requires_grad_()) == summarise(layout, values)


# Parts of a parameter


def numbered(entry: Entry) -> Tensor:
    return torch.arange(entry.size, dtype=torch.float32).view(entry.shape)


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
    """Every weight is set to the number of its input channel: each pool then has one value."""
    layout = Layout.of(nn.Sequential(nn.Linear(2, 2), module))
    entry = layout.entry("1.weight")
    values = torch.full((layout.size,), -1.0)
    shape = [1] * len(entry.shape)
    shape[axis] = channels
    numbers = torch.arange(channels, dtype=torch.float32).view(shape).expand(entry.shape)
    values[entry.span] = numbers.reshape(-1)
    pools = per_input_channel(layout, values, "1.weight")
    assert [pool.weights for pool in pools] == [weights_each] * channels
    assert [pool.unique for pool in pools] == [1] * channels
    assert pools[0].zero_share == 1
    assert all(pool.zero_share == 0 for pool in pools[1:])
    assert per_input_channel(layout, values, "1.bias") == []


def test_an_input_channel_by_hand() -> None:
    layout = Layout.of(nn.Linear(2, 4, bias=False))
    values = torch.tensor([[0.5, 0.0], [0.5, 0.25], [0.25, 0.5], [-0.25, 0.75]]).reshape(-1)
    first, second = per_input_channel(layout, values, "weight")
    assert (first.unique, first.entropy_bits, first.power_of_two_share) == (3, 1.5, 1.0)
    assert (second.unique, second.entropy_bits, second.power_of_two_share) == (4, 2.0, 0.75)
    with pytest.raises(LayoutError, match="'nothing'"):
        per_input_channel(layout, values, "nothing")


class FusedAttention(nn.Module):
    """The usual fused projection: rows are q, k, v, each cut into heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


def by_hand(part: int, head: int, rows: int, columns: int) -> Tensor:
    """A block whose number of distinct values tells part and head: 1 + 2 * part + head of them."""
    size = rows * columns
    return (torch.arange(size) % (1 + 2 * part + head)).float().view(rows, columns)


def check_heads(found: dict[str, list[Pool]], weights_each: int) -> None:
    assert list(found) == ["q", "k", "v"]
    for part, name in enumerate(found):
        assert [pool.weights for pool in found[name]] == [weights_each] * 2
        assert [pool.unique for pool in found[name]] == [1 + 2 * part, 2 + 2 * part]


def test_heads_and_parts_of_a_fused_projection_by_hand() -> None:
    """Width 4, two heads: rows 0-1 are head 0 of q, 2-3 head 1 of q, 4-5 head 0 of k, …"""
    layout = Layout.of(FusedAttention(4, 2))
    values = torch.zeros(layout.size)
    weight = torch.cat([by_hand(part, head, 2, 4) for part in range(3) for head in range(2)])
    values[layout.entry("qkv.weight").span] = weight.reshape(-1)
    values[layout.entry("qkv.bias").span] = torch.tensor([1, 1, 1, 2, 3, 3, 3, 3, 5, 6, 7, 8.0])
    check_heads(per_head(layout, values, "qkv.weight"), 8)

    bias = per_head(layout, values, "qkv.bias")
    assert {name: [pool.unique for pool in bias[name]] for name in bias} == {
        "q": [1, 2],
        "k": [1, 1],
        "v": [2, 2],
    }
    whole = per_attention_part(layout, values, "qkv.bias")
    assert {name: [pool.unique for pool in whole[name]] for name in whole} == {"q": [2], "k": [1], "v": [4]}

    parts = per_attention_part(layout, values, "qkv.weight")
    assert list(parts) == ["q", "k", "v"]
    for part, name in enumerate(parts):
        block = weight[4 * part : 4 * part + 4]
        assert parts[name] == [Pool.of(block[:, column]) for column in range(4)]
    for name in ("proj.weight", "proj.bias"):
        assert per_head(layout, values, name) == {}
        assert per_attention_part(layout, values, name) == {}


def test_heads_of_torchs_own_attention() -> None:
    layout = Layout.of(nn.MultiheadAttention(4, 2))
    values = torch.zeros(layout.size)
    weight = torch.cat([by_hand(part, head, 2, 4) for part in range(3) for head in range(2)])
    values[layout.entry("in_proj_weight").span] = weight.reshape(-1)
    check_heads(per_head(layout, values, "in_proj_weight"), 8)
    assert per_head(layout, values, "out_proj.weight") == {}


def test_heads_of_a_projection_stored_the_other_way_round() -> None:
    """Inputs along axis 0, outputs along axis 1: the blocks lie side by side."""
    attention = Attention(("q", "k", "v"), 2, axis=1)
    entry = Entry(
        "c_attn.weight", (4, 12), torch.float32, 0, "c_attn", "Conv1D", Kind.WEIGHT, (), 0, attention
    )
    layout = Layout((entry,))
    weight = torch.cat([by_hand(part, head, 4, 2) for part in range(3) for head in range(2)], dim=1)
    check_heads(per_head(layout, weight.reshape(-1), "c_attn.weight"), 8)
    parts = per_attention_part(layout, weight.reshape(-1), "c_attn.weight")
    assert parts["k"] == [Pool.of(weight[row, 4:8]) for row in range(4)]
    assert per_input_channel(layout, weight.reshape(-1), "c_attn.weight") == [Pool.of(row) for row in weight]


def test_heads_of_separate_projections() -> None:
    class Separate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 3
            self.q_proj = nn.Linear(4, 6, bias=False)

    layout = Layout.of(Separate())
    values = numbered(layout.entries[0])
    found = per_head(layout, values.reshape(-1), "q_proj.weight")
    assert found == {"q": [Pool.of(values[2 * head : 2 * head + 2].reshape(-1)) for head in range(3)]}
    assert list(per_attention_part(layout, values.reshape(-1), "q_proj.weight")) == ["q"]


def test_every_weight_is_in_exactly_one_pool_of_each_kind() -> None:
    layout = Layout.of(FusedAttention(6, 3))
    values = torch.randn(layout.size)
    entry = layout.entry("qkv.weight")
    for pools in (
        per_input_channel(layout, values, entry.name),
        [pool for part in per_head(layout, values, entry.name).values() for pool in part],
        [pool for part in per_attention_part(layout, values, entry.name).values() for pool in part],
    ):
        assert sum(pool.weights for pool in pools) == entry.size


def test_input_channels_of_a_grouped_convolution_are_those_of_its_groups() -> None:
    layout = Layout.of(nn.Conv2d(4, 6, 1, groups=2, bias=False))  # weight 6×2×1×1, three outputs a group
    weight = torch.tensor([[0, 10], [1, 11], [2, 12], [3, 13], [4, 14], [4, 15]], dtype=torch.float32)
    pools = per_input_channel(layout, weight.reshape(-1), "weight")
    # Channels 0 and 1 are seen by the first three outputs, 2 and 3 by the last three.
    assert [pool.weights for pool in pools] == [3, 3, 3, 3]
    assert [pool.unique for pool in pools] == [3, 3, 2, 3]


def test_input_channels_of_a_grouped_transposed_convolution_are_its_first_axis() -> None:
    layout = Layout.of(nn.ConvTranspose2d(4, 2, 1, groups=2, bias=False))  # weight 4×1×1×1
    pools = per_input_channel(layout, torch.tensor([1.0, 1.0, 2.0, 3.0]), "weight")
    assert [pool.weights for pool in pools] == [1, 1, 1, 1]
