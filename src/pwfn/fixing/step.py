"""The step of a grid whose multiples are the values of a network."""

from __future__ import annotations

import math
from collections.abc import Callable

from pwfn.errors import WeightError

_MANTISSA = 8  # a step has at most four significant bits: 8 to 15 times a power of two


def dyadic(step: float) -> float:
    """The largest ``m * 2^-b`` with ``m`` from 8 to 15 that is not above ``step``.

    Multiples of it are sums of a few powers of two.

    >>> dyadic(0.1), dyadic(1.0)
    (0.09375, 1.0)
    """
    if not (math.isfinite(step) and step > 0):
        raise WeightError(f"step is {step!r}: allowed is a finite number above 0")
    fraction, exponent = math.frexp(step)  # step = fraction * 2^exponent, fraction in [0.5, 1)
    return math.ldexp(math.floor(fraction * 2 * _MANTISSA) / _MANTISSA, exponent - 1)


def next_dyadic(step: float, places: int) -> float:
    """The step that many places further on the ladder of :func:`dyadic` steps; eight double it.

    >>> next_dyadic(1.0, 1), next_dyadic(1.0, 8), next_dyadic(1.0, -1)
    (1.125, 2.0, 0.9375)
    """
    fraction, exponent = math.frexp(dyadic(step))
    place = round(fraction * 2 * _MANTISSA) - _MANTISSA + places
    return math.ldexp(1 + place % _MANTISSA / _MANTISSA, exponent - 1 + place // _MANTISSA)


def bisected(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number above ``low`` that fits; ``high`` is taken to.

    >>> bisected(lambda places: places >= 3, -64, 64)
    3
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
