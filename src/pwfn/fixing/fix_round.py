"""One fixing round: free weights move to a few popular centres until enough are fixed.

The nearest candidate of a weight does not depend on its sigma, so the weights nearest to a candidate
are those within one stretch of the line, and no table of weights by candidates is ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pwfn.config import ClusteringConfig, FixedSigma, Rule
from pwfn.errors import WeightError
from pwfn.fixing.rate import RatedWeights
from pwfn.fixing.select import FreeWeights


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


@dataclass(frozen=True)
class FixRecord:
    """What one fixing did; for methods without fixings, how far training has come."""

    fraction: float  # of the weights, or of the training
    fixed: int  # weights fixed after it, in all
    steps: tuple[FixStep, ...] = ()
    moves: tuple[Move, ...] = ()  # by centre, of the weights it fixed


def fix_round(
    mu: Tensor,
    sigma: Tensor,
    fixed: Tensor,
    fraction: float,
    *,
    rule: Rule | str = Rule.MEAN,
    b: int | None = 7,
    multiple: int = 1,
    delta: float = 1.0,
    omega_max: int = 4,
    rate: float = 0.0,
    zero_fix: bool = False,
    zero_first: float = 0.0,
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
        b: the smallest power of two is ``2^-b``; None: the b for which the smallest candidate is from one to
            two sigmas of the median (the lower one) free weight.
        multiple: candidates are so many times a sum of powers of two, the smallest ``multiple * 2^-b``; 3
            gives a step halfway between those of two b.
        delta: first threshold, in sigmas.
        omega_max: most powers of two in a centre.
        rate: where above 0, ``c*`` is the candidate that has the least ``D + rate * bits(c)`` for most free
            weights (and ``nearest`` admits those); a sweep goes by it too. With n weights fixed so far,
            n_c of them at c, ``bits(c) = log2(n / n_c)``, and ``log2(n + 1)`` for a c that has none.
        zero_fix: weights below the smallest candidate have D = 0 to candidate 0, which so is their nearest.
        zero_first: where above 0 and none is fixed yet, all weights within so many sigmas of 0 go there
            before any centre is chosen. They count towards the fraction, and may be more than it asks for.
        sweep: once delta would double past it, each weight still needed goes to its own nearest
            candidate of order omega_max, smallest D first, its sigma capped at a quarter of the smallest.
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
        multiple=multiple,
        delta=delta,
        omega_max=omega_max,
        rate=rate,
        zero_fix=zero_fix,
        zero_first=zero_first,
        sweep=sweep,
        distance_floor=distance_floor,
        fixed_sigma=fixed_sigma,  # type: ignore[arg-type]  # likewise
    )
    _check(mu, sigma, fixed, fraction)
    mu, sigma, fixed = (
        tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (mu, sigma, fixed)
    )
    steps: list[FixStep] = []
    already = int(fixed.count_nonzero())
    needed = target_count(mu.numel(), fraction) - already
    if needed <= 0:
        return FixResult(mu, sigma, fixed, steps)

    free = (RatedWeights if settings.rate else FreeWeights)(mu, sigma, fixed, settings)
    if settings.zero_first and not already:
        near, chosen = free.within(0.0, settings.zero_first)
        if chosen.length > 0:
            free.fix(near, chosen, 0.0)
            steps.append(FixStep(0.0, 1, settings.zero_first, chosen.length))
            needed -= chosen.length
    omega, delta = 1, settings.delta
    while needed > 0:
        centre, stretch = free.most_popular(omega)
        near, chosen = free.admitted(centre, stretch, delta, needed)
        if chosen.length > 0:
            free.fix(near, chosen, centre)
            steps.append(FixStep(centre, omega, delta, chosen.length))
            needed -= chosen.length
            continue
        omega, delta = min(omega + 1, settings.omega_max), 2 * delta
        if settings.sweep is not None and delta > settings.sweep:
            free.sweep(needed)
            steps.append(FixStep(math.nan, settings.omega_max, delta, needed))
            break
    free.finish()
    return FixResult(mu, sigma, fixed, steps)


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
    if mu.numel() == 0:
        return
    # One pass without a copy each: the smallest and the largest are nan where any is.
    low, high = torch.stack(torch.aminmax(mu.detach())).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        position = int(torch.nonzero(~torch.isfinite(mu))[0])
        raise WeightError(f"mu[{position}] is {float(mu[position])}: every mean must be finite")
    low, high = torch.stack(torch.aminmax(sigma.detach())).tolist()
    if not (low >= 0 and math.isfinite(high)):
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
