"""The weights still free in a round: counted by candidate, taken nearest first.

How many are nearest to each candidate is counted once and kept up to date while the candidates stay the
same. A centre looks only at the weights within its reach, since ``D = |mu - c| / sigma`` is at least
``|mu - c|`` over the largest sigma. The last distance admitted is found by counting distances in ever finer
bins; only the few in the bin that decides are sorted.

:class:`FreeWeights` sorts no weights: they stay in the order of the vector, in blocks, so the working memory
does not grow with temporaries of the whole length. Every choice of a centre looks at all of them.
:class:`SortedWeights` first sorts each block by its means. A choice then looks at one slice of each block,
which is faster where sorting is fast, on a GPU, and takes more memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pwfn.config import Rule
from pwfn.fixing.candidates import candidates, grid_exponent
from pwfn.fixing.distance import Cut, Near, cut, distance, farthest, taken

_BLOCK = 2**25  # weights looked at together; positions within a block fit int32
_WORTH = 2**16  # a shorter vector is not worth compacting

Integers = NDArray[np.int64]


class FreeWeights:
    """The free weights of a vector. Fixing them writes into the tensors given; end with :meth:`finish`."""

    _even_bins = False  # see cut()

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
            return near, cut([part.distance for part in near], needed, delta, even=self._even_bins)
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
                found = cut(distances, needed, delta, even=self._even_bins)
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
        ends = torch.stack(torch.aminmax(values)).double()
        facts = torch.stack(torch.var_mean(values.double(), correction=0))
        # All at once: each copy waits for the device.
        variance, mean, low, high = torch.cat((facts, ends)).tolist()
        self.farthest = max(self.farthest, -low, high)
        share = values.numel() / (self._count + values.numel())  # of the new ones
        apart = mean - self._mean
        self._variance += share * (variance - self._variance + apart * apart * (1 - share))
        self._mean += share * apart
        self._count += values.numel()

    @property
    def std(self) -> float:
        return math.sqrt(self._variance)


class SortedWeights(FreeWeights):
    """The same weights with the means of each block sorted: those within a window are a slice.

    The means, sigmas and mask of the base class are copies of the free weights alone, in that order, and
    ``_order`` has their positions in the block of the vector. What is fixed is written to the vector at once.
    """

    _even_bins = True

    def __init__(self, mu: Tensor, sigma: Tensor, fixed: Tensor, **settings: Any) -> None:
        self._vector = mu, sigma, fixed
        free = mu.numel() - int(fixed.count_nonzero())
        means, spreads = mu.new_empty(free), mu.new_empty(free)
        self._order = torch.empty(free, dtype=torch.int32, device=mu.device)
        self._parts: list[tuple[slice, slice]] = []  # of the vector, and of what is sorted here
        start = 0
        for first in range(0, mu.numel(), _BLOCK):
            block = slice(first, min(first + _BLOCK, mu.numel()))
            at = torch.nonzero(~fixed[block]).squeeze(1)
            part = slice(start, start + at.numel())
            if at.numel() == block.stop - block.start:
                torch.sort(mu[block], out=(means[part], at))
            else:
                means[part], place = mu[block][at].sort()
                at = at[place]
            self._order[part] = at
            torch.index_select(sigma[block], 0, at, out=spreads[part])
            self._parts.append((block, part))
            start = part.stop
        super().__init__(means, spreads, torch.zeros_like(means, dtype=torch.bool), **settings)

    def fix(self, near: list[Near], chosen: Cut, centre: float) -> None:
        """Move the chosen ones to the centre; their sigma becomes the spread of the means just moved."""
        moving, moments, ties = [], _Moments(), chosen.ties
        near.reverse()
        while near:  # each part is taken out of the list, to free its memory
            part, order, away = near.pop()
            take = away < chosen.last
            if ties > 0:
                level = torch.nonzero(away == chosen.last).squeeze(1)
                if level.numel() > ties:  # in the order of the vector
                    level = level[order[level].argsort()[:ties]]
                take[level] = True
                ties -= level.numel()
            at = torch.nonzero(take).squeeze(1)
            if at.numel() == 0:
                continue
            moved = self._mu[part][at]
            ends = torch.searchsorted(moved, self._edges_here, right=True)  # it is sorted too
            self._votes -= np.diff(ends.cpu().numpy(), prepend=0, append=moved.numel())
            moments.add(moved)
            self._fixed[part] |= take
            moving.append((part, order[at]))
        blocks = self._blocks_of([part for part, _ in moving])
        for (_, order), block in zip(moving, blocks, strict=True):
            at = order.long()
            for tensor, value in zip(self._vector, (centre, moments.std, True), strict=True):
                tensor[block].index_fill_(0, at, value)
        self._size -= chosen.length
        self._compact()
        if moments.farthest == self._largest and self._size:
            self._largest = self._largest_mean()

    def sweep(self, needed: int) -> None:
        """Send the ``needed`` weights closest to their own candidate of the highest order there."""
        self._keep_free()
        self._set_grid(self._omega_max)
        grid = self._grid.to(self._mu.device)
        near = [
            Near(part, self._order[part], self._away(part, grid[self._nearest(self._mu[part])]))
            for _, part in self._parts
        ]
        chosen = cut([part.distance for part in near], needed)
        ties = chosen.ties
        mu, sigma, fixed = self._vector
        for (block, part), (_, order, away) in zip(self._parts, near, strict=True):
            take = away < chosen.last
            level = torch.nonzero(away == chosen.last).squeeze(1)
            level = level[order[level].argsort()[:ties]]
            take[level] = True
            ties -= level.numel()
            at = order[take].long()
            mu[block][at] = grid[self._nearest(self._mu[part][take])]
            sigma[block][at] = self._sigma[part][take].clamp_max(2.0**-self._b / 4)
            fixed[block].index_fill_(0, at, True)

    def finish(self) -> None:
        """Nothing is left to do: the vector has every change."""

    def _compact(self) -> None:
        if self._mu.numel() > max(_WORTH, 2 * self._size):
            self._keep_free()

    def _keep_free(self) -> None:
        """Drop what is fixed; what remains is still sorted."""
        held = self._mu, self._sigma, self._order
        made = tuple(tensor.new_empty(self._size) for tensor in held)
        parts, start = [], 0
        for block, old in self._parts:
            at = torch.nonzero(~self._fixed[old]).squeeze(1)
            part = slice(start, start + at.numel())
            for there, here in zip(made, held, strict=True):
                torch.index_select(here[old], 0, at, out=there[part])
            parts.append((block, part))
            start = part.stop
        self._mu, self._sigma, self._order = made
        self._parts, self._fixed = parts, torch.zeros_like(self._mu, dtype=torch.bool)
        self._widest = self._widest_spread()

    def _largest_mean(self) -> float:
        largest = 0.0
        for _, part in self._parts:
            free = (~self._fixed[part]).view(torch.uint8)
            if free.numel():  # argmax is the first of equals
                ends = torch.stack((free.argmax(), free.numel() - 1 - free.flip(0).argmax()))
                some = free.amax() * self._mu[part][ends].abs().amax()
                largest = max(largest, float(some))
        return largest

    def _widest_spread(self) -> float:
        return max(self._floor, float(self._sigma.amax())) if self._sigma.numel() else self._floor

    def _count(self) -> Integers:
        votes = np.zeros(self._grid.numel(), np.int64)
        for _, part in self._parts:
            free = (~self._fixed[part]).cumsum(0, dtype=torch.int32)  # up to each place
            if free.numel() == 0:
                continue
            ends = F.pad(torch.searchsorted(self._mu[part], self._edges_here, right=True), (0, 1))
            ends[-1] = free.numel()
            before = torch.where(ends > 0, free[(ends - 1).clamp_min_(0)], 0)
            votes += np.diff(before.cpu().numpy(), prepend=0)
        return votes

    def _blocks_of(self, slices: list[slice]) -> Iterator[slice]:
        """The blocks of the vector in which slices of the sorted parts lie; both ascend."""
        parts = iter(self._parts)
        block, part = next(parts)
        for wanted in slices:
            while wanted.start >= part.stop:
                block, part = next(parts)
            yield block

    def _away(self, part: slice, centre: float | Tensor) -> Tensor:
        return distance(self._mu[part], self._sigma[part], centre, self._floor)

    def _near(self, centre: float | Tensor, above: float, to: float) -> list[Near]:
        """As in the base class; a part has the fixed ones too, whose distance is nan: no rule admits it."""
        window = torch.tensor([above, to], dtype=self._mu.dtype, device=self._mu.device)
        ends = [torch.searchsorted(self._mu[part], window, right=True) for _, part in self._parts]
        near = []
        for (_, part), (low, high) in zip(self._parts, torch.stack(ends).tolist(), strict=True):
            if low < high:
                inside = slice(part.start + low, part.start + high)
                away = self._away(inside, centre).masked_fill_(self._fixed[inside], math.nan)
                near.append(Near(inside, self._order[inside], away))
        return near
