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
def candidates(max_abs: float, b: int, omega: int, multiple: int = 1) -> tuple[Fraction, ...]:
    """Return C^omega: so many times those sums, with |c| <= max_abs; 0 and the smallest are always in."""
    smallest = Fraction(multiple, 2**b)
    limit = max(Fraction(max_abs), smallest)
    top = -b
    while multiple * Fraction(2) ** (top + 1) <= limit:
        top += 1
    return tuple(multiple * c for c in _sums(b, top, omega) if abs(multiple * c) <= limit)


@cache
def _with_floats(max_abs: float, b: int, omega: int, multiple: int) -> tuple[tuple[float, Fraction], ...]:
    return tuple((float(c), c) for c in candidates(max_abs, b, omega, multiple))


@cache
def nearest(value: float, max_abs: float, b: int, omega: int, multiple: int) -> float:
    """Return the candidate nearest to value; midway between two, the smaller one."""
    return nearest_of(value, _with_floats(max_abs, b, omega, multiple))


def nearest_of(value: float, grid: tuple[tuple[float, Fraction], ...]) -> float:
    """Return the same of a grid given as floats and exact numbers."""
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
    multiple: int = 1,
    delta: float,
    omega_max: int,
    rate: float = 0.0,
    zero_fix: bool,
    zero_first: float = 0.0,
    sweep: float | None,
    distance_floor: float,
) -> Round:
    mu, sigma, fixed = list(mu), list(sigma), list(fixed)
    steps: list[tuple[float, int, float, int]] = []
    goal = math.ceil(len(mu) * fraction - 1e-9)
    omega = 1

    def is_zero(i: int) -> bool:
        return zero_fix and abs(mu[i]) < multiple * 2.0**-b

    def distance(i: int, c: float) -> float:
        if is_zero(i) and c == 0:
            return 0.0
        return abs(mu[i] - c) / max(sigma[i], distance_floor)

    def bits(c: float) -> float:
        placed = [mu[j] for j in range(len(mu)) if fixed[j]]
        if c in placed:
            return math.log2(len(placed) / placed.count(c))
        return math.log2(len(placed) + 1)

    def cost(i: int, c: float, price: dict[float, float]) -> float:
        return distance(i, c) + (rate * price[c] if rate else 0.0)

    def prices(max_abs: float, order: int) -> tuple[dict[float, float], set[float]]:
        """Return the bits of every candidate, and which of them have no weight yet; none without a rate."""
        if not rate:
            return {}, set()
        placed = {mu[j] for j in range(len(mu)) if fixed[j]}
        new = bits(math.nan)
        found = {}
        for c, _ in _with_floats(max_abs, b, order, multiple):
            found[c] = bits(c) if c in placed else new
        return found, set(found) - placed

    def own(i: int, max_abs: float, order: int, priced: tuple[dict[float, float], set[float]]) -> float:
        if not rate:
            return 0.0 if is_zero(i) else nearest(mu[i], max_abs, b, order, multiple)
        # New centres all cost the same, and the nearest of them stands for them all.
        price, new = priced
        options = [c for c in price if c not in new]
        if is_zero(i) and 0.0 in new:
            options.append(0.0)
        elif new:
            grid = _with_floats(max_abs, b, order, multiple)
            options.append(nearest_of(mu[i], tuple(pair for pair in grid if pair[0] in new)))
        return min(options, key=lambda c: (cost(i, c, price), c))

    if zero_first and goal and not any(fixed):
        small = [i for i in range(len(mu)) if distance(i, 0.0) <= zero_first]
        if small:
            spread = _spread([mu[i] for i in small])
            for i in small:
                mu[i], sigma[i], fixed[i] = 0.0, spread, True
            steps.append((0.0, 1, zero_first, len(small)))

    while sum(fixed) < goal:
        needed = goal - sum(fixed)
        free = [i for i in range(len(mu)) if not fixed[i]]
        max_abs = max(abs(mu[i]) for i in free)

        # 1. the most popular candidate; of equally popular ones the smallest
        priced = prices(max_abs, omega)
        voted = {i: own(i, max_abs, omega, priced) for i in free}
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
            priced = prices(max_abs, omega_max)
            target = {i: own(i, max_abs, omega_max, priced) for i in free}
            swept = sorted(free, key=lambda i: cost(i, target[i], priced[0]))[:needed]
            for i in swept:
                mu[i], sigma[i], fixed[i] = target[i], min(sigma[i], multiple * 2.0**-b / 4), True
            steps.append((math.nan, omega_max, delta, len(swept)))
    return Round(mu, sigma, fixed, steps)
