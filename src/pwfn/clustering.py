"""One fixing round: free weights move to a few popular centres until enough are fixed.

The nearest candidate of a weight does not depend on its sigma, so the free means are sorted
once a round; the weights nearest to a candidate are then one stretch of that order, found by
bisection, and no table of weights by candidates is ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pwfn.config import ClusteringConfig, FixedSigma, Rule
from pwfn.errors import WeightError
from pwfn.pow2 import candidates


class FixStep(NamedTuple):
    """One choice of a centre; ``centre`` is nan for a sweep (each weight to its own)."""

    centre: float
    omega: int
    delta: float
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


@dataclass(frozen=True)
class FixResult:
    """Means, sigmas and mask after a round, and the choices that led there."""

    mu: Tensor
    sigma: Tensor
    fixed: Tensor
    steps: list[FixStep]


def target_count(size: int, fraction: float) -> int:
    """``ceil(size * fraction)``, forgiving 1e-9 of rounding.

    >>> target_count(10, 0.7), target_count(3, 0.5)
    (7, 2)
    """
    return min(size, math.ceil(size * fraction - 1e-9))


def fix_round(
    mu: Tensor,
    sigma: Tensor,
    fixed: Tensor,
    fraction: float,
    *,
    rule: Rule | str = Rule.MEAN,
    b: int = 7,
    delta: float = 1.0,
    omega_max: int = 4,
    zero_fix: bool = False,
    sweep: float | None = None,
    distance_floor: float = 2**-30,
    fixed_sigma: FixedSigma | str = FixedSigma.STD,
) -> FixResult:
    """Fix weights until ``ceil(N * fraction)`` of them are fixed; the inputs stay as they are.

    From ``omega = 1``: the candidate ``c*`` to which most free weights are nearest takes those
    that ``rule`` admits, by distance ``D = |mu - c*| / max(sigma, distance_floor)``, nearest
    first, never more than still needed. They get ``mu = c*`` and ``sigma`` = the population
    standard deviation of the means just moved (or keep theirs). When none is admitted, omega
    rises by one (to ``omega_max``) and delta doubles.

    Args:
        mu, sigma, fixed: flat tensors of one length on one device (float32 or float64; bool).
        fraction: of all weights, 0 to 1.
        rule: ``mean`` (longest prefix by D whose mean D is at most delta), ``each`` (every D at
            most delta) or ``nearest`` (``mean`` among the weights nearest to ``c*``).
        b: the smallest power of two is ``2^-b``.
        delta: first threshold, in sigmas.
        omega_max: most powers of two in a centre.
        zero_fix: weights with ``|mu| < 2^-b`` have D = 0 to candidate 0, which so is their nearest.
        sweep: once delta would double past it, each weight still needed goes to its own nearest
            candidate of order omega_max, smallest D first, its sigma capped at ``2^-b / 4``.
        distance_floor: smallest sigma used in D.
        fixed_sigma: ``std`` or ``keep``.

    >>> mu = torch.tensor([0.5, 0.26, 0.24, -0.1])
    >>> done = fix_round(mu, torch.full((4,), 0.05), torch.zeros(4, dtype=torch.bool), 0.5)
    >>> done.mu.tolist()[1:3], done.steps[0].centre, done.steps[0].count
    ([0.25, 0.25], 0.25, 2)
    """
    settings = ClusteringConfig(
        rule=rule,  # type: ignore[arg-type]  # the section turns names into enums
        b=b,
        delta=delta,
        omega_max=omega_max,
        zero_fix=zero_fix,
        sweep=sweep,
        distance_floor=distance_floor,
        fixed_sigma=fixed_sigma,  # type: ignore[arg-type]  # likewise
    )
    _check(mu, sigma, fixed, fraction)
    mu, sigma, fixed = mu.detach().clone(), sigma.detach().clone(), fixed.clone()
    steps: list[FixStep] = []
    needed = target_count(mu.numel(), fraction) - int(fixed.sum())
    if needed <= 0:
        return FixResult(mu, sigma, fixed, steps)

    free = _Free.of(mu, sigma, fixed, settings)
    omega, delta = 1, settings.delta
    while needed > 0:
        centre, stretch = free.most_popular(omega)
        chosen = free.admitted(centre, stretch, delta, needed)
        if chosen.numel() > 0:
            at, means = free.index[chosen], free.means[chosen]
            mu[at] = centre
            if settings.fixed_sigma is FixedSigma.STD:
                sigma[at] = means.double().std(correction=0).to(sigma.dtype)
            fixed[at] = True
            steps.append(FixStep(centre, omega, delta, chosen.numel()))
            needed -= chosen.numel()
            free.remove(chosen)
            continue
        omega, delta = min(omega + 1, settings.omega_max), 2 * delta
        if settings.sweep is not None and delta > settings.sweep:
            chosen, centres = free.swept(needed)
            at = free.index[chosen]
            mu[at] = centres
            sigma[at] = sigma[at].clamp_max(2.0**-settings.b / 4)
            fixed[at] = True
            steps.append(FixStep(math.nan, settings.omega_max, delta, needed))
            break
    return FixResult(mu, sigma, fixed, steps)


class _Free:
    """The weights still free, in order of their means."""

    def __init__(self, means: Tensor, index: Tensor, spread: Tensor, config: ClusteringConfig):
        self.means = means  # ascending
        self.index = index  # position of each in the whole vector
        self.spread = spread  # max(sigma, distance_floor)
        self._config = config

    @classmethod
    def of(cls, mu: Tensor, sigma: Tensor, fixed: Tensor, config: ClusteringConfig) -> _Free:
        index = torch.nonzero(~fixed).squeeze(1)
        means, order = torch.sort(mu[index], stable=True)
        index = index[order]
        # A floor below what the number type can hold would leave D = 0 / 0 for a weight on its centre.
        floor = max(config.distance_floor, torch.finfo(sigma.dtype).tiny)
        return cls(means, index, sigma[index].clamp_min(floor), config)

    def most_popular(self, omega: int) -> tuple[float, slice]:
        """The candidate nearest to most weights (the smallest of equals), and which those are."""
        grid = self._grid(omega)
        ends = torch.searchsorted(self.means, self._edges(grid), right=True).cpu()
        size = torch.tensor([self.means.numel()])
        counts = torch.diff(torch.cat((ends, size)), prepend=torch.zeros(1, dtype=ends.dtype))
        k = int(counts.argmax())  # the first of equal maxima
        start = int(ends[k - 1]) if k > 0 else 0
        return float(grid[k]), slice(start, start + int(counts[k]))

    def admitted(self, centre: float, nearest: slice, delta: float, needed: int) -> Tensor:
        """Positions (among the free) of the weights that the rule fixes at the centre."""
        nearest_only = self._config.rule is Rule.NEAREST
        where = nearest if nearest_only else slice(None)
        distance = (self.means[where] - centre).abs() / self.spread[where]
        if self._config.zero_fix and centre == 0:
            distance[self.means[where].abs() < 2.0**-self._config.b] = 0
        if self._config.rule is Rule.EACH:
            length = int((distance <= delta).sum())
        else:
            length = _longest_prefix(distance, delta)
        chosen = _smallest(distance, self.index[where], min(length, needed))
        return chosen + nearest.start if nearest_only else chosen

    def swept(self, needed: int) -> tuple[Tensor, Tensor]:
        """Positions of the ``needed`` weights closest to their own candidate, and those candidates."""
        grid = self._grid(self._config.omega_max)
        centres = grid[torch.bucketize(self.means, self._edges(grid))]
        distance = (self.means - centres).abs() / self.spread
        if self._config.zero_fix:
            distance[(centres == 0) & (self.means.abs() < 2.0**-self._config.b)] = 0
        chosen = _smallest(distance, self.index, needed)
        return chosen, centres[chosen]

    def remove(self, chosen: Tensor) -> None:
        keep = torch.ones_like(self.means, dtype=torch.bool)
        keep[chosen] = False
        self.means, self.index, self.spread = self.means[keep], self.index[keep], self.spread[keep]

    def _grid(self, omega: int) -> Tensor:
        largest = max(-float(self.means[0]), float(self.means[-1]), 0.0)
        grid = candidates(largest, self._config.b, omega).to(self.means.dtype)
        # Above 2^24 times the unit float32 merges neighbours; what is left are still such sums.
        return torch.unique_consecutive(grid).to(self.means.device)

    def _edges(self, grid: Tensor) -> Tensor:
        """Upper ends of the stretches nearest to each candidate but the last; an end belongs below."""
        lower, upper = grid[:-1], grid[1:]
        edges = (lower + upper) / 2
        # A midpoint that was rounded up would claim the next number above, which is nearer to upper.
        edges = torch.where(edges - lower > upper - edges, torch.nextafter(edges, lower), edges)
        if self._config.zero_fix:
            unit = 2.0**-self._config.b
            zero = int((grid < 0).sum())
            edges[zero - 1] = -unit
            edges[zero] = torch.nextafter(grid.new_tensor(unit), grid.new_tensor(0.0))
        return edges


def _longest_prefix(distance: Tensor, delta: float) -> int:
    """Length of the longest prefix, in order of distance, whose mean is at most delta."""
    ascending = distance.sort().values.double()
    means = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1, device=distance.device)
    return int((means <= delta).sum())  # running means of an ascending list never fall


def _smallest(distance: Tensor, index: Tensor, length: int) -> Tensor:
    """Positions of the ``length`` smallest distances; of equal ones those with smaller index."""
    if length == 0:
        return index.new_empty(0)
    if length == distance.numel():
        return torch.arange(length, device=distance.device)
    last = distance.kthvalue(length).values
    below = torch.nonzero(distance < last).squeeze(1)
    level = torch.nonzero(distance == last).squeeze(1)
    first = index[level].argsort()[: length - below.numel()]
    return torch.cat((below, level[first]))


def _check(mu: Tensor, sigma: Tensor, fixed: Tensor, fraction: float) -> None:
    for name, tensor in (("mu", mu), ("sigma", sigma), ("fixed", fixed)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 1:
            raise WeightError(f"{name} is not a flat tensor: flatten it first")
    if not (mu.shape == sigma.shape == fixed.shape and mu.device == sigma.device == fixed.device):
        raise WeightError(
            f"mu, sigma and fixed have lengths {mu.numel()}, {sigma.numel()} and {fixed.numel()} on "
            f"{mu.device}, {sigma.device} and {fixed.device}: they must be alike"
        )
    if mu.dtype not in (torch.float32, torch.float64) or sigma.dtype != mu.dtype:
        raise WeightError(f"mu is {mu.dtype} and sigma {sigma.dtype}: both must be float32, or both float64")
    if fixed.dtype != torch.bool:
        raise WeightError(f"fixed is {fixed.dtype}: it must be bool")
    valid_fraction = isinstance(fraction, (int, float)) and 0 <= fraction <= 1
    if not valid_fraction:
        raise WeightError(f"fraction is {fraction!r}: allowed is a number from 0 to 1")
    if not bool(torch.isfinite(mu).all()):
        position = int(torch.nonzero(~torch.isfinite(mu))[0])
        raise WeightError(f"mu[{position}] is {float(mu[position])}: every mean must be finite")
    if not bool((torch.isfinite(sigma) & (sigma >= 0)).all()):
        position = int(torch.nonzero(~(torch.isfinite(sigma) & (sigma >= 0)))[0])
        raise WeightError(
            f"sigma[{position}] is {float(sigma[position])}: every sigma must be finite and not negative"
        )


class Move(NamedTuple):
    """How far the weights fixed at one centre moved, relative to where they were."""

    centre: float
    count: int  # type: ignore[assignment]  # as above
    mean: float  # of |mu - centre| / |mu|, over the weights that were not zero
    largest: float
    from_zero: int  # weights that were exactly zero, for which the ratio is not defined


def relative_moves(before: Tensor, after: Tensor) -> list[Move]:
    """Relative distance moved, ``|mu - c| / |mu|``, for each centre, ascending.

    >>> [tuple(m) for m in relative_moves(torch.tensor([0.5, 0.25, 0.0]), torch.full((3,), 0.5))]
    [(0.5, 3, 0.5, 1.0, 1)]
    """
    # On the CPU, where scattered sums have one order and so one result.
    before, after = before.detach().double().cpu(), after.detach().double().cpu()
    centres, group = torch.unique(after, return_inverse=True)
    counts = torch.bincount(group, minlength=centres.numel())
    zero = before == 0
    zeros = torch.bincount(group[zero], minlength=centres.numel())
    ratio, group = ((before - after).abs() / before.abs())[~zero], group[~zero]
    total = torch.zeros_like(centres).index_add_(0, group, ratio)
    largest = torch.zeros_like(centres).scatter_reduce_(0, group, ratio, "amax")
    means = total / (counts - zeros).clamp_min(1)
    columns = (centres, counts, means, largest, zeros)
    return [Move(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
