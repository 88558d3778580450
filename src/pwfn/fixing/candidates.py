"""Candidates: sums of a few distinct signed powers of two."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from pwfn.errors import WeightError

_MOST_CANDIDATES = 2**25  # 256 MB of float64; ordinary networks have a few hundred


def candidates(max_abs: float, b: int, omega: int) -> Tensor:
    """The sorted candidates of order omega, ``C^omega``, as float64 on the CPU.

    With ``R = {0} ∪ {±2^-b, …, ±2^top}`` and ``top = max(-b, floor(log2 max_abs))``: all sums of at most
    ``omega`` distinct elements of R with ``|c| <= max_abs``; 0 and ±2^-b are always among them.

    >>> candidates(1.0, b=1, omega=1).tolist()
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    >>> candidates(1.6, b=1, omega=2).tolist()
    [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    """
    try:
        valid = math.isfinite(max_abs) and max_abs >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not a number, or one no float can hold
        valid = False
    if not valid:
        raise WeightError(f"max_abs is {max_abs!r}: allowed is a finite number of at least 0")
    if not isinstance(b, int) or not isinstance(omega, int) or b < 0 or omega < 1:
        raise WeightError(
            f"b is {b!r} and omega {omega!r}: allowed are whole numbers, b at least 0, omega at least 1"
        )
    unit = 2.0**-b
    limit = max(float(max_abs), unit)
    # frexp: limit = m * 2^e with 1/2 <= m < 1, so that floor(log2 limit) = e - 1, without rounding.
    digits = math.frexp(limit)[1] + b
    count = sum(math.comb(digits, n) * 2**n for n in range(omega + 1))
    if digits > 53 or count > _MOST_CANDIDATES:
        raise WeightError(
            f"the largest weight is {limit:g}, which gives {digits} powers of two down to 2^-{b} and "
            f"{count:,} sums of at most {omega} of them: rescale or exclude that layer, or lower b "
            "or omega_max"
        )
    grid = _signed_sums(digits, omega).double() * unit
    return grid[grid.abs() <= limit]


@lru_cache(maxsize=64)
def _signed_sums(digits: int, omega: int) -> Tensor:
    """All integers that are sums of at most ``omega`` distinct elements of ±2^0 … ±2^(digits-1)."""
    # reach[n]: sums of exactly n signed powers among those seen so far, each power used once.
    reach = [torch.zeros(1, dtype=torch.int64)]
    reach += [torch.zeros(0, dtype=torch.int64) for _ in range(omega)]
    for digit in range(digits):
        for n in range(omega, 0, -1):
            fewer = reach[n - 1]
            reach[n] = torch.cat((reach[n], fewer + 2**digit, fewer - 2**digit))
    return torch.unique(torch.cat(reach))


def order(value: float) -> int:
    """The fewest signed powers of two that sum to ``value`` (0 needs none).

    The non-adjacent form of an integer n has ``popcount(n XOR 3n)`` digits and is minimal;
    a float is an integer times a power of two, which changes nothing.

    >>> [order(x) for x in (0.0, 0.25, -0.375, 0.875, 0.6875)]
    [0, 1, 2, 2, 3]
    """
    numerator = abs(float(value).as_integer_ratio()[0])
    return (numerator ^ (3 * numerator)).bit_count()
