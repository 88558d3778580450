"""The weights still free in a round: counted by candidate, taken nearest first.

Nothing here sorts the weights. How many are nearest to each candidate is counted once and kept up to
date while the candidates stay the same. A centre looks only at the weights within its reach, since
``D = |mu - c| / sigma`` is at least ``|mu - c|`` over the largest sigma. The last distance admitted is
found by counting distances in ever finer bins; only the few in the bin that decides are sorted. All work
goes block by block: no temporary has the length of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pwfn.config import Rule
from pwfn.fixing.candidates import candidates
from pwfn.fixing.distance import distance, farthest

_BLOCK = 2**25  # weights looked at together; positions within a block fit int32
_FEW = 2**16  # so few distances are sorted at once
_BIN_BITS = 12  # 4096 counters fit the shared memory of a GPU's multiprocessor
_WORTH = 2**16  # a shorter vector is not worth compacting
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


def grid_exponent(sigma: Tensor) -> int:
    """The b, from 0 to 30, for which ``2^-b`` is between one and two times the (lower) median sigma.

    Where candidates lie much closer to each other than sigma, popularity says little: the first centre
    would be any of the candidates near zero, instead of zero itself.

    >>> grid_exponent(torch.tensor([0.01, 0.04, 9.0]))
    4
    """
    middle = float(sigma.median()) if sigma.numel() else 1.0
    return min(max(math.floor(-math.log2(max(middle, 2.0**-30))), 0), 30)


class FreeWeights:
    """The free weights of a vector. Fixing them writes into the tensors given; end with :meth:`finish`."""

    def __init__(
        self,
        mu: Tensor,
        sigma: Tensor,
        fixed: Tensor,
        *,
        rule: Rule,
        b: int | None,
        omega_max: int,
        distance_floor: float,
    ) -> None:
        self._mu, self._sigma, self._fixed = mu, sigma, fixed
        self._rule, self._omega_max = rule, omega_max
        self._b = grid_exponent(sigma[~fixed]) if b is None else b
        # A floor below what the number type can hold would leave D = 0 / 0 for a weight on its centre.
        self._floor = max(distance_floor, torch.finfo(mu.dtype).tiny)
        self._outer: list[tuple[Tensor, Tensor, Tensor]] = []
        self._size = mu.numel() - int(fixed.count_nonzero())
        self._largest = self._largest_mean()
        self._widest = self._widest_spread()
        self._grid = self._edges = self._edges_here = mu.new_empty(0)
        self._grid_of = 0, 0.0
        self._votes = np.empty(0, np.int64)
        self._compact()

    def most_popular(self, omega: int) -> tuple[float, tuple[float, float]]:
        """The candidate nearest to most weights (the smallest of equals), and the interval nearest to it."""
        if self._set_grid(omega):
            self._votes = self._count()
        k = int(self._votes.argmax())  # the first of equal maxima
        ends = self._edges.numpy()
        above = float(ends[k - 1]) if k > 0 else -math.inf
        to = float(ends[k]) if k < ends.size else math.inf
        return float(self._grid[k]), (above, to)

    def admitted(
        self, centre: float, interval: tuple[float, float], delta: float, needed: int
    ) -> tuple[list[Near], Cut]:
        """The weights within reach of a centre, and how many of them the rule fixes there."""
        if self._rule is Rule.NEAREST:
            near = self._near(centre, *interval)
            return near, cut([part.distance for part in near], needed, delta)
        reach = delta
        while True:
            above, to, whole = self._window(centre, reach)
            near = self._near(centre, above, to)
            distances = [part.distance for part in near]
            within = sum(int((distance <= reach).count_nonzero()) for distance in distances)
            if self._rule is Rule.EACH:
                return near, Cut(delta, within, within) if within <= needed else cut(distances, needed)
            if within == 0:  # even the nearest is beyond delta
                return near, Cut(reach, 0, 0)
            # Everyone within delta is admitted, so the end of the prefix shows only when those suffice.
            if whole or within >= needed or reach > delta:
                found = cut(distances, needed, delta)
                if whole or found.length < within or found.length == needed <= within:
                    return near, found
            # No weight outside of the window is closer than reach, but the prefix may go beyond that.
            reach *= 4
            near.clear()  # its memory, before the wider window takes more
            distances.clear()

    def fix(self, near: list[Near], chosen: Cut, centre: float) -> None:
        """Move the chosen ones to the centre; their sigma becomes the spread of the means just moved."""
        moving = list(taken(near, chosen))
        moments = _Moments()
        for block, at in moving:
            moved = self._mu[block][at.long()]
            self._votes -= torch.bincount(self._nearest(moved), minlength=self._votes.size).cpu().numpy()
            moments.add(moved)
        for block, at in moving:
            at = at.long()
            self._mu[block].index_fill_(0, at, centre)
            self._fixed[block].index_fill_(0, at, True)
            self._sigma[block].index_fill_(0, at, moments.std)
        self._size -= chosen.length
        self._compact()
        if moments.farthest == self._largest and self._size:
            self._largest = self._largest_mean()

    def sweep(self, needed: int) -> None:
        """Send the ``needed`` weights closest to their own candidate of the highest order there."""
        self._set_grid(self._omega_max)
        grid = self._grid.to(self._mu.device)
        near = self._near(grid, -math.inf, math.inf)
        for block, at in taken(near, cut([part.distance for part in near], needed)):
            at = at.long()
            mu, sigma = self._mu[block], self._sigma[block]
            mu[at] = grid[self._nearest(mu[at])]
            sigma[at] = sigma[at].clamp_max(2.0**-self._b / 4)
            self._fixed[block].index_fill_(0, at, True)

    def finish(self) -> None:
        """Bring what was compacted back to its place."""
        while self._outer:
            inner = self._mu, self._sigma, self._fixed
            outer = self._mu, self._sigma, self._fixed = self._outer.pop()
            start = 0
            for block in self._blocks():
                at = torch.nonzero(~self._fixed[block]).squeeze(1)
                place = slice(start, start + at.numel())
                for there, here in zip(outer, inner, strict=True):
                    there[block][at] = here[place]
                start = place.stop

    def _blocks(self) -> Iterator[slice]:
        size = self._mu.numel()
        return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))

    def _compact(self) -> None:
        """Go on with the free weights alone, in the same order, once they are fewer than half."""
        if self._mu.numel() <= max(_WORTH, 2 * self._size):
            return
        mu, sigma = self._mu.new_empty(self._size), self._sigma.new_empty(self._size)
        start = 0
        for block in self._blocks():
            at = torch.nonzero(~self._fixed[block]).squeeze(1)
            place = slice(start, start + at.numel())
            mu[place], sigma[place] = self._mu[block][at], self._sigma[block][at]
            start = place.stop
        self._outer.append((self._mu, self._sigma, self._fixed))
        self._mu, self._sigma = mu, sigma
        self._fixed = torch.zeros_like(mu, dtype=torch.bool)
        self._widest = self._widest_spread()

    def _largest_mean(self) -> float:
        largest = 0.0
        for block in self._blocks():
            ends = torch.aminmax(self._mu[block].masked_fill(self._fixed[block], 0))
            low, high = torch.stack(ends).tolist()
            largest = max(largest, -low, high)
        return largest

    def _widest_spread(self) -> float:
        widest = self._floor
        for block in self._blocks():
            widest = max(widest, float(self._sigma[block].masked_fill(self._fixed[block], 0).amax()))
        return widest

    def _set_grid(self, omega: int) -> bool:
        """Take the candidates of an order within the largest mean; tell whether they are other ones."""
        if (omega, self._largest) == self._grid_of:
            return False
        self._grid_of = omega, self._largest
        grid = candidates(self._largest, self._b, omega).to(self._mu.dtype)
        # Above 2^24 times the unit float32 merges neighbours; what is left are still such sums.
        grid = torch.unique_consecutive(grid)
        if torch.equal(grid, self._grid.cpu()):
            return False
        self._grid, self._edges = grid, self._ends(grid)
        self._edges_here = self._edges.to(self._mu.device)
        return True

    def _ends(self, grid: Tensor) -> Tensor:
        """Upper ends of the intervals nearest to each candidate but the last; an end belongs below."""
        lower, upper = grid[:-1], grid[1:]
        edges = (lower + upper) / 2
        # A midpoint that was rounded up would claim the next number above, which is nearer to upper.
        return torch.where(edges - lower > upper - edges, torch.nextafter(edges, lower), edges)

    def _nearest(self, means: Tensor) -> Tensor:
        return torch.bucketize(means, self._edges_here, out_int32=True)

    def _count(self) -> Integers:
        """How many free weights are nearest to each candidate."""
        size = self._grid.numel()
        votes = np.zeros(size, np.int64)
        for block in self._blocks():
            # One more counter takes those that are fixed.
            nearest = self._nearest(self._mu[block]).masked_fill_(self._fixed[block], size)
            votes += torch.bincount(nearest, minlength=size + 1)[:size].cpu().numpy()
        return votes

    def _window(self, centre: float, reach: float) -> tuple[float, float, bool]:
        """A interval outside of which D is above reach, and whether it holds all free weights."""
        limits = torch.finfo(self._mu.dtype)
        # The slack outweighs every rounding of D and of the ends themselves.
        slack = 64 * limits.eps
        radius = farthest(max(reach, limits.tiny), self._widest) * (1 + slack) + abs(centre) * slack
        above, to = max(centre - radius, limits.min), min(centre + radius, limits.max)
        return above, to, above < -self._largest and to >= self._largest

    def _near(self, centre: float | Tensor, above: float, to: float) -> list[Near]:
        """Free weights with ``above < mu <= to``; a centre for all, or the grid: each to its own."""
        parts = []
        for block in self._blocks():
            mu = self._mu[block]
            inside = ((mu > above) & (mu <= to)).logical_and_(~self._fixed[block])
            at = torch.nonzero(inside).squeeze(1)
            if at.numel() == 0:
                continue
            means = mu[at]
            own = centre[self._nearest(means)] if isinstance(centre, Tensor) else centre
            away = distance(means, self._sigma[block][at], own, self._floor)
            parts.append(Near(block, at.to(torch.int32), away))
        return parts


class _Moments:
    """Variance and largest size of values that come in parts (Chan, Golub and LeVeque's update)."""

    def __init__(self) -> None:
        self.farthest = 0.0
        self._count, self._mean, self._variance = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        values = values.double()
        facts = (*torch.var_mean(values, correction=0), *torch.aminmax(values))
        variance, mean, low, high = torch.stack(facts).tolist()  # all at once: each copy waits for the device
        self.farthest = max(self.farthest, -low, high)
        share = values.numel() / (self._count + values.numel())  # of the new ones
        apart = mean - self._mean
        self._variance += share * (variance - self._variance + apart * apart * (1 - share))
        self._mean += share * apart
        self._count += values.numel()

    @property
    def std(self) -> float:
        return math.sqrt(self._variance)


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


def cut(distances: list[Tensor], needed: int, delta: float | None = None) -> Cut:
    """Where the ``needed`` smallest distances end; with delta, while their running mean is at most that.

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
    while last - first != span and sum(part.numel() for part in parts) > _FEW:
        span = last - first
        shift = max(span.bit_length() - _BIN_BITS, 0)
        counts = np.zeros(2**_BIN_BITS, np.int64)
        for part in parts:
            bins = (part.view(integer) - first) >> shift
            counts += torch.bincount(bins, minlength=counts.size).cpu().numpy()
        lowest = first + (np.arange(counts.size, dtype=np.int64) << shift)
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
    if delta is not None:
        sums = rest.double().cumsum(0) + total
        numbers = torch.arange(below + 1, below + length + 1, device=rest.device)
        # Running means of an ascending list never fall.
        length = int((sums / numbers <= delta).count_nonzero())
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
