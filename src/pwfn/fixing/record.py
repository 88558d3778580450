"""What one fixing did: the centres it chose, and how far weights moved to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class FixStep(NamedTuple):
    """One choice of a centre; ``centre`` is nan for a sweep, where each weight has its own."""

    centre: float
    omega: int
    delta: float
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Move(NamedTuple):
    """How far the weights fixed at one centre moved, relative to where they were."""

    centre: float
    count: int  # type: ignore[assignment]  # as above
    mean: float  # of |mu - centre| / |mu|, over the weights that were not zero
    largest: float
    from_zero: int  # weights that were exactly zero, for which the ratio is not defined


@dataclass(frozen=True)
class FixRecord:
    """What one fixing did; for methods without fixings, how far training has come."""

    fraction: float  # of the weights, or of the training
    fixed: int  # weights fixed after it, in all
    steps: tuple[FixStep, ...] = ()
    moves: tuple[Move, ...] = ()  # by centre, of the weights it fixed


def relative_moves(before: Tensor, after: Tensor) -> list[Move]:
    """Relative distance moved, ``|mu - c| / |mu|``, for each centre, ascending.

    >>> [tuple(m) for m in relative_moves(torch.tensor([0.5, 0.25, 0.0]), torch.full((3,), 0.5))]
    [(0.5, 3, 0.5, 1.0, 1)]
    """
    if after.numel() == 0:
        return []
    # In order of the centre each one's weights lie together: plain sums, which every device adds in one
    # order, where scattered ones would come out otherwise each time.
    after, order = after.detach().sort(stable=True)
    before = before.detach()[order].double()
    centres, counts = torch.unique_consecutive(after, return_counts=True)
    zero = before == 0
    ratio = ((before - after.double()).abs_() / before.abs()).masked_fill_(zero, 0)
    zeros = zero.cumsum(0)[counts.cumsum(0) - 1].diff(prepend=counts.new_zeros(1))
    groups = ratio.split(counts.tolist())
    total = torch.stack([group.sum() for group in groups])
    largest = torch.stack([group.amax() for group in groups])
    means = total / (counts - zeros).clamp_min(1)
    columns = (centres.double(), counts, means, largest, zeros)
    return [Move(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
