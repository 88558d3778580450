"""One fixing round: free weights move to a few popular centres until enough are fixed.

The nearest candidate of a weight does not depend on its sigma, so the weights nearest to a candidate
lie in one interval, and no table of weights by candidates is ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pwfn.config import Choice, Number, Rule
from pwfn.errors import ConfigError, WeightError
from pwfn.fixing.record import FixStep
from pwfn.fixing.select import FreeWeights


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
    b: int | None = 7,
    delta: float = 1.0,
    omega_max: int = 4,
    sweep: float | None = None,
    distance_floor: float = 2**-30,
) -> FixResult:
    """Fix weights until ``ceil(N * fraction)`` of them are fixed; the inputs stay as they are.

    From ``omega = 1``: the candidate ``c*`` that is nearest to most free weights takes those that
    ``rule`` admits, by distance ``D = |mu - c*| / max(sigma, distance_floor)``, nearest first, never more
    than still needed. They get ``mu = c*`` and ``sigma`` = the population standard deviation of the means
    just moved. When none is admitted, omega rises by one (up to ``omega_max``) and delta doubles.

    Ties are broken the same way on every machine: a weight midway between two candidates counts for the
    smaller one; of equally popular candidates the smallest wins; equal D keeps the order of the vector.

    Args:
        mu, sigma, fixed: flat tensors of one length on one device (float32 or float64; bool).
        fraction: of all weights, 0 to 1.
        rule: ``mean`` (longest prefix by D whose mean D is at most delta), ``each`` (every D at most
            delta) or ``nearest`` (``mean`` among the weights whose nearest candidate is ``c*``).
        b: the smallest power of two is ``2^-b``; None: the b for which ``2^-b`` is between one and two
            times the (lower) median sigma of the free weights.
        delta: first threshold, in sigmas.
        omega_max: largest number of powers of two in a centre, 1 to 6.
        sweep: once delta would double past it, each weight still needed goes to its own nearest candidate
            of order omega_max, smallest D first, its sigma capped at ``2^-b / 4``.
        distance_floor: smallest sigma used in D.

    >>> mu = torch.tensor([0.5, 0.26, 0.24, -0.1])
    >>> done = fix_round(mu, torch.full((4,), 0.05), torch.zeros(4, dtype=torch.bool), 0.5)
    >>> done.mu.tolist()[1:3], done.steps[0].centre, done.steps[0].count
    ([0.25, 0.25], 0.25, 2)
    """
    rule = _check_settings(rule, b, delta, omega_max, sweep, distance_floor)
    _check(mu, sigma, fixed, fraction)
    mu, sigma, fixed = (
        tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (mu, sigma, fixed)
    )
    steps: list[FixStep] = []
    needed = target_count(mu.numel(), fraction) - int(fixed.count_nonzero())
    if needed <= 0:
        return FixResult(mu, sigma, fixed, steps)

    free = FreeWeights(mu, sigma, fixed, rule=rule, b=b, omega_max=omega_max, distance_floor=distance_floor)
    omega = 1
    while needed > 0:
        centre, interval = free.most_popular(omega)
        near, chosen = free.admitted(centre, interval, delta, needed)
        if chosen.length > 0:
            free.fix(near, chosen, centre)
            steps.append(FixStep(centre, omega, delta, chosen.length))
            needed -= chosen.length
            continue
        omega, delta = min(omega + 1, omega_max), 2 * delta
        if sweep is not None and delta > sweep:
            free.sweep(needed)
            steps.append(FixStep(math.nan, omega_max, delta, needed))
            break
    free.finish()
    return FixResult(mu, sigma, fixed, steps)


_NUMBERS = {
    "b": Number(0, 30, whole=True, optional=True),
    "delta": Number(0, above_low=True),
    "omega_max": Number(1, 6, whole=True),
    "sweep": Number(0, above_low=True, optional=True),
    "distance_floor": Number(0, above_low=True),
}


def _check_settings(rule: Rule | str, *numbers: float | None) -> Rule:
    for (name, check), value in zip(_NUMBERS.items(), numbers, strict=True):
        try:
            check(value)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{name} is {value!r}: allowed is {check.allowed}") from None
    try:
        return Rule(rule)
    except ValueError:
        raise ConfigError(f"rule is {rule!r}: allowed is {Choice(Rule).allowed}") from None


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
