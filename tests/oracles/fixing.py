"""One fixing round read off METHOD.md, section 4, as plainly as it can be written.

Lists, loops and Python's own float64; every weight is measured against every candidate. Slow on purpose:
nothing here is shared with `pwfn.fixing.fix_round` or `pwfn.fixing.candidates`.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations


@cache
def _sums(b: int, top: int, omega: int) -> tuple[Fraction, ...]:
    """Return all sums of at most omega distinct elements of R = {0} ∪ {±2^-b … ±2^top}, sorted."""
    units = [sign * 2 ** (k + b) for k in range(-b, top + 1) for sign in (1, -1)]  # R without 0, in 2^-b
    sums = {sum(chosen) for size in range(omega + 1) for chosen in combinations(units, size)}
    return tuple(Fraction(n, 2**b) for n in sorted(sums))


@cache
def candidates(max_abs: float, b: int, omega: int) -> tuple[Fraction, ...]:
    """Return C^omega: those sums with |c| <= max_abs; 0 and ±2^-b are always in."""
    limit = max(Fraction(max_abs), Fraction(1, 2**b))
    top = -b
    while Fraction(2) ** (top + 1) <= limit:
        top += 1
    return tuple(c for c in _sums(b, top, omega) if abs(c) <= limit)


@cache
def _with_floats(max_abs: float, b: int, omega: int) -> tuple[tuple[float, Fraction], ...]:
    return tuple((float(c), c) for c in candidates(max_abs, b, omega))


@cache
def nearest(value: float, max_abs: float, b: int, omega: int) -> float:
    """Return the candidate nearest to value; midway between two, the smaller one."""
    grid = _with_floats(max_abs, b, omega)
    least = min(abs(value - number) for number, _ in grid)
    # Rounding never reverses two differences but may make them equal: those are settled exactly.
    ties = [c for number, c in grid if abs(value - number) == least]
    return float(min(ties, key=lambda c: (abs(Fraction(value) - c), c)))


@cache
def fewest_powers(n: int) -> int:
    """Return the least number of signed powers of two that sum to the integer n.

    Doubling changes nothing, so an even n is halved until odd; an odd n needs a term of 1 or of -1.
    """
    if abs(n) <= 1:
        return abs(n)
    if n % 2 == 0:
        return fewest_powers(n // (n & -n))
    return 1 + min(fewest_powers(n - 1), fewest_powers(n + 1))


def is_sum_of_powers(value: float, b: int, omega: int) -> bool:
    """Tell whether value is a sum of at most omega powers of two, none of them below 2^-b."""
    units = Fraction(value) * 2**b
    return units.denominator == 1 and fewest_powers(units.numerator) <= omega


def _spread(moved: list[float]) -> float:
    """Return the population standard deviation."""
    if len(set(moved)) == 1:
        return 0.0
    mean = math.fsum(moved) / len(moved)
    return math.sqrt(math.fsum((m - mean) ** 2 for m in moved) / len(moved))


@dataclass
class Round:
    mu: list[float]
    sigma: list[float]
    fixed: list[bool]
    steps: list[tuple[float, int, float, int]]


def fix_round(
    mu: list[float],
    sigma: list[float],
    fixed: list[bool],
    fraction: float,
    *,
    rule: str,
    b: int,
    delta: float,
    omega_max: int,
    sweep: float | None,
    distance_floor: float,
) -> Round:
    mu, sigma, fixed = list(mu), list(sigma), list(fixed)
    steps: list[tuple[float, int, float, int]] = []
    goal = math.ceil(len(mu) * fraction - 1e-9)
    omega = 1

    def distance(i: int, c: float) -> float:
        return abs(mu[i] - c) / max(sigma[i], distance_floor)

    while sum(fixed) < goal:
        needed = goal - sum(fixed)
        free = [i for i in range(len(mu)) if not fixed[i]]
        max_abs = max(abs(mu[i]) for i in free)

        # 1. the most popular candidate; of equally popular ones the smallest
        voted = {i: nearest(mu[i], max_abs, b, omega) for i in free}
        votes: dict[float, int] = {}
        for c in voted.values():
            votes[c] = votes.get(c, 0) + 1
        centre = min(votes, key=lambda c: (-votes[c], c))

        # 2. the weights to fix there, by D (sorted() is stable: equal D keeps the order of the vector)
        eligible = [i for i in free if rule != "nearest" or voted[i] == centre]
        chosen: list[int] = []
        total = 0.0
        for i in sorted(eligible, key=lambda i: distance(i, centre)):
            total += distance(i, centre)
            close = distance(i, centre) if rule == "each" else total / (len(chosen) + 1)
            if close > delta or len(chosen) == needed:
                break
            chosen.append(i)

        # 3. fix them, or widen
        if chosen:
            spread = _spread([mu[i] for i in chosen])
            for i in chosen:
                mu[i], sigma[i], fixed[i] = centre, spread, True
            steps.append((centre, omega, delta, len(chosen)))
            continue
        omega = min(omega + 1, omega_max)
        delta *= 2
        if sweep is not None and delta > sweep:
            target = {i: nearest(mu[i], max_abs, b, omega_max) for i in free}
            swept = sorted(free, key=lambda i: distance(i, target[i]))[:needed]
            for i in swept:
                mu[i], sigma[i], fixed[i] = target[i], min(sigma[i], 2.0**-b / 4), True
            steps.append((math.nan, omega_max, delta, len(swept)))
    return Round(mu, sigma, fixed, steps)
