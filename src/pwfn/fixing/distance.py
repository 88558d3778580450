"""Distance of a weight from a centre, in sigmas, and where the smallest of many distances end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FEW = 2**16  # so few distances are sorted at once
_BIN_BITS = 12  # 4096 counters fit the shared memory of a GPU's multiprocessor
_INF_32, _INF_64 = 0x7F800000, 0x7FF0000000000000  # bits of infinity
_MARGIN = 1e-9  # far above the rounding of a float64 sum: a mean so close to delta is left to the sort

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Near(NamedTuple):
    """Free weights of one block, in the order of the vector, and their distances to a centre."""

    block: slice
    at: Tensor  # int32, within the block
    distance: Tensor


class Cut(NamedTuple):
    """The ``length`` smallest distances: all below ``last`` and the first ``ties`` of those equal to it."""

    last: float
    ties: int
    length: int


def distance(mu: Tensor, sigma: Tensor, centre: Tensor | float, floor: float = 2**-30) -> Tensor:
    """``D = |mu - c| / max(sigma, floor)`` (paper, eq. 6).

    >>> import torch
    >>> distance(torch.tensor([0.5, 0.375]), torch.tensor([0.25, 0.0]), 0.25, floor=0.25).tolist()
    [1.0, 0.5]
    """
    return (mu - centre).abs_().div_(sigma.clamp_min(floor))


def farthest(reach: float, largest_sigma: float) -> float:
    """The largest ``|mu - c|`` of a weight whose distance is at most ``reach``.

    >>> farthest(2.0, 0.25)
    0.5
    """
    return reach * largest_sigma


def taken(near: list[Near], chosen: Cut) -> Iterator[tuple[slice, Tensor]]:
    """Block and positions of the chosen ones. Takes the parts out of the list, to free their memory."""
    ties = chosen.ties
    near.reverse()
    while near:
        block, at, distance = near.pop()
        take = distance < chosen.last
        if ties > 0:
            level = torch.nonzero(distance == chosen.last).squeeze(1)[:ties]
            take[level] = True
            ties -= level.numel()
        at = at[take]
        if at.numel():
            yield block, at


def cut(distances: list[Tensor], needed: int, delta: float | None = None, *, even: bool = False) -> Cut:
    """Where the ``needed`` smallest distances end; with delta, while their running mean is at most that.

    With delta some may be nan, which come after all others. ``even`` is for a GPU, where a counter that many
    share is slow: it first tries to take all, then counts in bins of equal width, which spread the distances.

    >>> cut([torch.tensor([4.0, 1.0]), torch.tensor([1.0, 3.0])], needed=3)
    Cut(last=3.0, ties=1, length=3)
    >>> cut([torch.tensor([4.0, 1.0]), torch.tensor([1.0, 3.0])], needed=4, delta=1.0)
    Cut(last=1.0, ties=2, length=2)
    """
    needed = min(needed, sum(part.numel() for part in distances))
    if needed == 0:
        return Cut(0.0, 0, 0)
    parts = list(distances)
    # Distances are not negative, so their bits, read as integers, are in the same order.
    single = parts[0].dtype == torch.float32
    integer, first, last = (torch.int32, 0, _INF_32) if single else (torch.int64, 0, _INF_64)
    below, total = 0, 0.0  # number and sum of the distances left of those in question
    span = 0  # of the last look: where bins decide nothing more, as with a mean of just delta, the sort does
    scale = 0.0  # of the bins of equal width
    if even and delta is not None and sum(part.numel() for part in parts) > _FEW:
        count = sum(int((part >= 0).count_nonzero()) for part in parts)
        total_of_all = math.fsum(float(part.nansum(dtype=torch.float64)) for part in parts)
        if count <= needed and total_of_all <= delta * (1 - _MARGIN) * count:
            return Cut(math.inf, 0, count)
        # Up to 8 deltas. A power of two keeps the products exact.
        scale = 2.0 ** min(max(_BIN_BITS - math.ceil(math.log2(8 * delta)), -100), 100)
    while last - first != span and sum(part.numel() for part in parts) > _FEW:
        counts = np.zeros(2**_BIN_BITS, np.int64)
        numbers = np.arange(counts.size + 1)
        if scale:  # in the first look
            for part in parts:
                bins = (part * scale).clamp_max_(counts.size - 1).nan_to_num_(counts.size - 1).to(torch.int32)
                counts += torch.bincount(bins, minlength=counts.size).cpu().numpy()
            edges = torch.from_numpy(numbers / scale).to(parts[0].dtype)
            edges = torch.stack((edges[:-1], edges[1:].nextafter(edges.new_tensor(-1.0))))
            edges[1, -1] = math.inf
            ends, scale = edges.view(integer).long().numpy(), 0.0
        else:
            span = last - first
            shift = max(span.bit_length() - _BIN_BITS, 0)
            for part in parts:
                bins = (part.view(integer) - first) >> shift
                counts += torch.bincount(bins, minlength=counts.size).cpu().numpy()
            lowest = first + (numbers[:-1] << shift)
            ends = np.minimum(np.stack((lowest, lowest + (1 << shift) - 1)), last)
        lows, highs = torch.from_numpy(ends).to(integer).view(parts[0].dtype).double().numpy()
        start, stop = _deciding(counts, lows, highs, below, total, needed, delta)
        first, last = int(ends[0, start]), int(ends[1, stop])
        below += int(counts[:start].sum())
        low, high = float(lows[start]), float(highs[stop])
        if delta is not None and start > 0:
            left = [torch.where(part < low, part, 0).sum(dtype=torch.float64) for part in parts]
            total += math.fsum(map(float, left))
        parts = [part[(part >= low) & (part <= high)] for part in parts]
    rest = torch.cat(parts).sort().values[: needed - below]
    length = rest.numel()
    if length == 0:  # all that are numbers
        return Cut(math.inf, 0, below)
    if delta is not None:
        sums = rest.double().cumsum(0) + total
        places = torch.arange(below + 1, below + length + 1, device=rest.device)
        # Running means of an ascending list never fall.
        length = int((sums / places <= delta).count_nonzero())
    end = float(rest[max(length - 1, 0)])
    return Cut(end, length - int((rest[:length] < end).count_nonzero()), below + length)


def _deciding(
    counts: Integers,
    lows: Floats,
    highs: Floats,
    below: int,
    total: float,
    needed: int,
    delta: float | None,
) -> tuple[int, int]:
    """First and last of the bins in which the cut may lie, from how many there are in each.

    A bin's distances are only known to be within its ends, so the running mean after it lies between
    two bounds: the prefix surely holds the bin if the upper one is at most delta, and surely ends by
    it if the lower one is above.
    """
    present = np.flatnonzero(counts)
    counts, lows, highs = counts[present], lows[present], highs[present]
    numbers = below + np.cumsum(counts)
    # Not needed are those after the bin that has enough; if none has, an earlier look found the end.
    start = stop = min(int((numbers < needed).sum()), present.size - 1)
    if delta is not None:
        with np.errstate(over="ignore"):
            least, most = (total + np.cumsum(counts * ends) for ends in (lows, highs))
        stop = min(stop, int((least <= delta * (1 + _MARGIN) * numbers).sum()))
        start = min(stop, int((most <= delta * (1 - _MARGIN) * numbers).sum()))
    return int(present[start]), int(present[stop])
