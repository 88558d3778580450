"""A section of settings: each declares what is allowed, and is checked when the section is made."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from pwfn.errors import ConfigError


@dataclass(frozen=True)
class Number:
    """A check for a number: its range, and whether it must be whole or may be off."""

    low: float
    high: float = math.inf
    above_low: bool = False
    whole: bool = False
    optional: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed, for messages."""
        kind = "a whole number" if self.whole else "a number"
        edge = "above" if self.above_low else "of at least"
        text = f"{kind} {edge} {self.low:g}"
        if self.high != math.inf:
            text += f" and at most {self.high:g}"
        return text + (', or "off"' if self.optional else "")

    def __call__(self, value: Any) -> Any:
        """The checked value; ValueError where it is not allowed."""
        if self.optional and (value is None or value == "off"):
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or (self.whole and value != int(value)):
            raise ValueError
        if value < self.low or value > self.high or (self.above_low and value == self.low):
            raise ValueError
        return int(value) if self.whole else float(value)


@dataclass(frozen=True)
class Choice:
    """A check for one of an enum's values, by name or as the enum itself."""

    enum: type[StrEnum]

    @property
    def allowed(self) -> str:
        """What is allowed, for messages."""
        return "one of " + ", ".join(f'"{member}"' for member in self.enum)

    def __call__(self, value: Any) -> StrEnum:
        """The checked value; ValueError where it is not allowed."""
        return self.enum(value)


@dataclass(frozen=True)
class Switch:
    """A check for true or false."""

    allowed = "true or false"

    def __call__(self, value: Any) -> bool:
        """The checked value; ValueError where it is not allowed."""
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class Fractions:
    """A check for fractions that rise to 1."""

    allowed = "an increasing list of numbers above 0 and at most 1, the last of them 1"

    def __call__(self, value: Any) -> tuple[float, ...]:
        """The checked value; ValueError where it is not allowed."""
        numbers = tuple(map(Number(0, 1, above_low=True), _items(value)))
        rising = all(a < b for a, b in itertools.pairwise(numbers))
        if not numbers or not rising or numbers[-1] != 1.0:
            raise ValueError
        return numbers


@dataclass(frozen=True)
class Epochs:
    """A check for one number of at least 0, or a list of such numbers."""

    allowed = "a number of at least 0, or a list with one such number per round"

    def __call__(self, value: Any) -> float | tuple[float, ...]:
        """The checked value; ValueError where it is not allowed."""
        if not isinstance(value, Iterable):
            return float(Number(0)(value))
        numbers = tuple(map(Number(0), _items(value)))
        if not numbers:
            raise ValueError
        return numbers


@dataclass(frozen=True)
class Selectors:
    """A check for patterns of names and types of modules."""

    allowed = 'a list of name patterns ("head.*"), "type:CLASS" strings or module classes'

    def __call__(self, value: Any) -> tuple[str, ...]:
        """The checked value; ValueError where it is not allowed."""
        selectors = tuple(
            f"type:{item.__module__}.{item.__qualname__}" if isinstance(item, type) else item
            for item in _items(value)
        )
        if not all(isinstance(item, str) and item for item in selectors):
            raise ValueError
        return selectors


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError
    return value


def hint(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest that is known, or all.

    >>> hint("trainning", ["training", "target"])
    ": did you mean 'training'?"
    """
    names = [str(each) for each in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    return f": did you mean {near[0]!r}?" if near else f": allowed is one of {', '.join(names)}"


Check: TypeAlias = Number | Choice | Switch | Fractions | Epochs | Selectors


def setting(default: Any, check: Check, help: str) -> Any:
    """A field of a section: its default, what is allowed, and what it is for."""
    return field(default=default, metadata={"check": check, "help": help})


class Section:
    """Checks every field against its declaration when the section is made."""

    _name = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, item.name)
            check: Check = item.metadata["check"]
            try:
                object.__setattr__(self, item.name, check(value))
            except (ValueError, TypeError, OverflowError):
                where = f"{self._name}.{item.name}" if self._name else item.name
                raise ConfigError(f"{where} is {value!r}: allowed is {check.allowed}") from None
