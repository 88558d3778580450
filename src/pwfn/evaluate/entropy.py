"""Entropy and counts of a network's values: whole network, per layer, per input channel, per attention part.

Every function takes a layout and one value per weight, so a run can be measured at any time:
``summarise(compressed.layout, compressed.values())``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pwfn.fixing.unique import entropy_of, unique, unique_counts
from pwfn.layout import Kind, Layout


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
        return cls.of_counts(*unique_counts(values.reshape(-1)))

    @classmethod
    def of_counts(cls, values: Tensor, counts: Tensor) -> Pool:
        """From unique values and how often each occurs; a count may be 0.

        >>> Pool.of_counts(torch.tensor([0.25, 0.5]), torch.tensor([4, 4])).entropy_bits
        1.0
        """
        values, counts = values[counts > 0], counts[counts > 0]
        weights = int(counts.sum())
        mantissa = torch.frexp(values).mantissa.abs()
        powers = int(counts[(mantissa == 0.5) | (mantissa == 0)].sum())
        return cls(
            weights=weights,
            unique=values.numel(),
            entropy_bits=entropy_of(counts),
            zero_share=int(counts[values == 0].sum()) / max(weights, 1),
            power_of_two_share=powers / max(weights, 1),
        )


@dataclass(frozen=True)
class Summary:
    """Counts of a whole network, of its inner weights, and of every layer."""

    whole: Pool
    inner: Pool  # without biases and without the first and the last layer, in the model's order
    layers: dict[str, Pool]  # by parameter name


def summarise(layout: Layout, values: Tensor) -> Summary:
    """Measure one value per weight.

    >>> from torch import nn
    >>> found = summarise(Layout.of(nn.Linear(4, 1, bias=False)), torch.tensor([0.0, 0.5, -0.25, 0.375]))
    >>> found.whole.unique, found.whole.power_of_two_share
    (4, 0.75)
    """
    # One sort for all pools: the rest is counting small integers.
    book, index = unique(values.detach())
    counts = {
        entry.name: torch.bincount(index[entry.span], minlength=book.numel()) for entry in layout.entries
    }
    none = torch.zeros(book.numel(), dtype=torch.int64, device=book.device)
    inner = [e.name for e in layout.entries if e.kind is Kind.WEIGHT and e.layer not in layout.ends]
    whole = sum(counts.values(), none)
    return Summary(
        whole=Pool.of_counts(book, whole),
        inner=Pool.of_counts(book, sum((counts[name] for name in inner), none)),
        layers={name: Pool.of_counts(book, own) for name, own in counts.items()},
    )


def per_input_channel(layout: Layout, values: Tensor, name: str) -> list[Pool]:
    """One pool per input channel of a weight; empty for parameters without input channels, such as biases."""
    entry = layout.entry(name)
    if entry.input_axis is None:
        return []
    tensor = values[entry.span].view(entry.shape)
    # The first axis of a transposed convolution holds the input channels of all groups.
    groups = (tensor,) if entry.input_axis == 0 else tensor.tensor_split(entry.groups, 0)
    return [Pool.of(channel) for group in groups for channel in group.unbind(entry.input_axis)]


def per_attention_part(layout: Layout, values: Tensor, name: str) -> dict[str, list[Pool]]:
    """One pool per input channel of each of ``q``, ``k`` and ``v`` that a projection holds.

    A bias has no input channels: one pool per part. Empty for other parameters.
    """
    entry = layout.entry(name)
    if entry.attention is None:
        return {}
    tensor, axis = values[entry.span].view(entry.shape), entry.input_axis
    blocks = tensor.tensor_split(len(entry.attention.parts), dim=entry.attention.axis)
    return {
        part: [Pool.of(channel) for channel in (block.unbind(axis) if axis is not None else (block,))]
        for part, block in zip(entry.attention.parts, blocks, strict=True)
    }
