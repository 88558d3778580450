"""Numbers and names as text, for the page and for its figures."""

from __future__ import annotations

import math
from typing import Any


def shown(value: Any, form: str = ",.0f") -> str:
    """A number by a format specification; a dash for anything else.

    >>> shown(74522), shown(0.5414, ".1%"), shown(None), shown(float("nan"))
    ('74,522', '54.1%', '–', '–')
    """
    return format(value, form) if isinstance(value, int | float) and math.isfinite(value) else "–"


def size(number: int) -> str:
    """Bytes in powers of a thousand.

    >>> size(999), size(45425), size(44_700_000)
    ('999 bytes', '45.4 kB', '44.7 MB')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"


def thousands(number: float) -> str:
    """A short label for an axis.

    >>> thousands(950), thousands(11_164_362), thousands(2000)
    ('950', '11.2 M', '2 k')
    """
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g}"


def power_of_two(exponent: int) -> str:
    """
    >>> power_of_two(-11), power_of_two(0), power_of_two(1)
    ('2⁻¹¹', '1', '2')
    """
    if exponent in (0, 1):
        return str(2**exponent)
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def clean(text: str) -> str:
    """Text from files with U+FFFD for what cannot be shown: control characters and lone surrogates.

    >>> clean("a" + chr(27) + "b")
    'a�b'
    """
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def short(text: str, most: int = 32) -> str:
    """The end of a name, which says more than its beginning.

    >>> short("layer1.0.conv1.weight", 12)
    '…onv1.weight'
    """
    text = clean(text).replace("\n", " ")
    return text if len(text) <= most else "…" + text[1 - most :]
