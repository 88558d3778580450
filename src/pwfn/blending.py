"""Batches blended with themselves: more examples than there are, for a network that learns from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pwfn.batches import Batch, Stream
from pwfn.data.epochs import generator_from
from pwfn.errors import DataError


def blended(batches: Stream, share: float, seed: int, where: str) -> Iterator[Batch]:
    """The stream, with that share of its batches blended.

    Whether a batch is, and how, depends on the seed and on its number in the stream alone, so that a run that
    goes on blends as if it had never stopped.
    """
    for batch in batches:
        dice = generator_from("blend", seed, batches.drawn)
        if float(torch.rand((), generator=dice)) < share:
            yield blend(batch, dice, f"{where}, batch {batches.drawn}")
        else:
            yield batch


def blend(batch: Batch, dice: torch.Generator, where: str = "the batch") -> Batch:
    """Every example with a share ``1 - t`` of another: ``t x_i + (1 - t) x_p(i)``.

    t is uniform between 0 and 1 and p a permutation, both the same for the whole batch. The inputs alone are
    blended, those that are numbers of floating point and as long as the batch; targets stay, and mean nothing
    any more.

    >>> batch = blend(Batch((torch.tensor([[0.0], [1.0]]),), {}, None), torch.Generator().manual_seed(1))
    >>> float(batch.args[0].sum())
    1.0
    """
    share = float(torch.rand((), generator=dice, dtype=torch.float64))
    order = torch.randperm(batch.size, generator=dice)
    found = 0

    def mixed(value: Any) -> Any:
        nonlocal found
        if isinstance(value, Mapping):
            return {key: mixed(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(mixed(item) for item in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dim() == 0 or len(value) != len(order):
            return value
        found += 1
        # Into a tensor like the first, whose order in memory a recorded step relies on.
        others = value[order.to(value.device, non_blocking=True)]
        return torch.add(value * share, others, alpha=1 - share, out=torch.empty_like(value))

    inputs, named = mixed(batch.args), mixed(batch.kwargs)
    if not found:
        raise DataError(
            f"{where}: inputs {batch.describe()} cannot be blended, none is of floating point and as long as "
            "the batch: set training.blend = 0"
        )
    return Batch(inputs, named, batch.target)
