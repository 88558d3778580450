"""Entropy and counts of a network's values: in one pool, per layer, per input channel, per head.

Everything takes a layout and one value per weight, so that a run can be measured half way as
well as at its end: ``summarise(compressed.layout, compressed.values())``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pwfn.fixing import candidates as pow2
from pwfn.fixing.unique import unique, unique_counts
from pwfn.layout import Entry, Kind, Layout


def entropy_bits(values: Tensor) -> float:
    """Entropy of the distinct values, ``-sum p log2 p``, in bits per weight.

    >>> entropy_bits(torch.tensor([0.5, 0.5, 0.25, -0.25]))
    1.5
    """
    return _entropy_bits(unique_counts(values.reshape(-1))[1])


def _entropy_bits(counts: Tensor) -> float:
    """Of symbols that occur so often, each at least once."""
    if counts.numel() == 0:
        return 0.0
    p = counts.double() / counts.sum()
    return float(-(p * p.log2()).sum()) + 0.0


@dataclass(frozen=True)
class Pool:
    """Counts over one set of weights."""

    weights: int
    unique: int
    entropy_bits: float  # per weight
    zero_share: float
    power_of_two_share: float  # of weights that are zero or plus or minus a power of two

    @classmethod
    def of(cls, values: Tensor) -> Pool:
        """
        >>> Pool.of(torch.tensor([0.5, 0.5, 0.375, 0.0])).power_of_two_share
        0.75
        """
        return cls._counted(*unique_counts(values.reshape(-1)))

    @classmethod
    def _counted(cls, values: Tensor, counts: Tensor) -> Pool:
        """From distinct values, and how often each occurs; those that do not are left out."""
        values, counts = values[counts > 0], counts[counts > 0]
        weights = int(counts.sum())
        mantissa = torch.frexp(values).mantissa.abs()
        powers = int(counts[(mantissa == 0.5) | (mantissa == 0)].sum())
        return cls(
            weights=weights,
            unique=values.numel(),
            entropy_bits=_entropy_bits(counts),
            zero_share=int(counts[values == 0].sum()) / max(weights, 1),
            power_of_two_share=powers / max(weights, 1),
        )


@dataclass(frozen=True)
class Summary:
    """The whole network in one pool, the same without first and last layer and biases, by layer."""

    whole: Pool
    inner: Pool
    layers: dict[str, Pool]  # by name of the parameter
    orders: dict[int, int]  # weights by how many powers of two their value needs


def summarise(layout: Layout, values: Tensor) -> Summary:
    """Measure one value per weight.

    First and last are the first and the last layer in the order in which the model defines them.
    """
    # One sort for all pools: what is left is counting small integers.
    book, index = unique(values.detach())
    counts = {
        entry.name: torch.bincount(index[entry.span], minlength=book.numel()) for entry in layout.entries
    }
    whole = torch.stack(list(counts.values())).sum(0)
    inner = [counts[entry.name] for entry in inner_entries(layout)]
    return Summary(
        whole=Pool._counted(book, whole),
        inner=Pool._counted(book, torch.stack(inner).sum(0) if inner else torch.zeros_like(whole)),
        layers={name: Pool._counted(book, own) for name, own in counts.items()},
        orders=_orders(book, whole),
    )


def inner_entries(layout: Layout) -> list[Entry]:
    """The compressed weights without biases and without the first and the last layer."""
    return [e for e in layout.entries if e.kind is Kind.WEIGHT and e.layer not in layout.ends]


def orders(values: Tensor) -> dict[int, int]:
    """Number of weights by the order of their value: how many powers of two it needs.

    >>> orders(torch.tensor([0.0, 0.5, -0.25, 0.375]))
    {0: 1, 1: 2, 2: 1}
    """
    return _orders(*unique_counts(values.reshape(-1)))


def _orders(distinct: Tensor, counts: Tensor) -> dict[int, int]:
    found: dict[int, int] = {}
    for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        order = pow2.order(value)
        found[order] = found.get(order, 0) + count
    return dict(sorted(found.items()))


def per_input_channel(layout: Layout, values: Tensor, name: str) -> list[Pool]:
    """One pool for each input channel of a weight; empty where it has none (a bias, say)."""
    entry = layout.entry(name)
    if entry.input_axis is None:
        return []
    tensor = values[entry.span].view(entry.shape)
    if entry.input_axis == 0:  # transposed: the first axis is all input channels, whatever the groups
        columns = list(tensor.unbind(0))
    else:
        by_group = tensor.tensor_split(entry.groups, 0)
        columns = [column for group in by_group for column in group.unbind(entry.input_axis)]
    return [Pool.of(column.reshape(-1)) for column in columns]


def per_attention_part(layout: Layout, values: Tensor, name: str) -> dict[str, list[Pool]]:
    """For ``q``, ``k`` and ``v`` as far as the projection holds them: one pool per input channel.

    For a bias, which has no input channels, one pool per part. Empty for other parameters.
    """
    found: dict[str, list[Pool]] = {}
    for part, block in _attention_blocks(layout, values, name).items():
        axis = layout.entry(name).input_axis
        columns = block.unbind(axis) if axis is not None else (block,)
        found[part] = [Pool.of(column.reshape(-1)) for column in columns]
    return found


def per_head(layout: Layout, values: Tensor, name: str) -> dict[str, list[Pool]]:
    """For ``q``, ``k`` and ``v`` as far as the projection holds them: one pool per attention head."""
    entry = layout.entry(name)
    if entry.attention is None:
        return {}
    axis, heads = entry.attention.axis, entry.attention.heads
    return {
        part: [Pool.of(head.reshape(-1)) for head in block.tensor_split(heads, dim=axis)]
        for part, block in _attention_blocks(layout, values, name).items()
    }


def _attention_blocks(layout: Layout, values: Tensor, name: str) -> dict[str, Tensor]:
    entry = layout.entry(name)
    if entry.attention is None:
        return {}
    tensor = values[entry.span].view(entry.shape)
    blocks = tensor.tensor_split(len(entry.attention.parts), dim=entry.attention.axis)
    return dict(zip(entry.attention.parts, blocks, strict=True))
