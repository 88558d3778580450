"""What is attached to a model, as a value and as plain JSON, which a file keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pwfn.errors import LayoutError


class ActivationKind(StrEnum):
    """Whose quantisers the activations have; values as the methods' names."""

    LSQ = "lsq"  # a learned step for each layer
    LSQ_PLUS = "lsq+"  # a learned step and offset for each layer
    APOT = "apot"  # sums of powers of two up to a learned clip point for each layer
    QVIT = "q-vit"  # step and offset for each input channel of a layer, and for each head in attention


@dataclass(frozen=True)
class InputFacts:
    """One layer whose input is quantised."""

    layer: str
    bits: int
    channels: int | None = None  # a step for each of so many input channels; None: one for all
    signed: bool | None = None  # None: as the first batch shows


@dataclass(frozen=True)
class AttentionFacts:
    """One attention module, and what is done between its projections."""

    module: str
    heads: int  # of queries
    key_heads: int  # of keys and values
    rectified: bool = True
    bits: int | None = None  # of queries, keys, values and probabilities; None: as they are


@dataclass(frozen=True)
class Description:
    """All that is attached to a model: enough to make it again, ready for its tensors.

    >>> facts = Description(ActivationKind.LSQ, (InputFacts("conv1", 8),))
    >>> facts.to_plain()["inputs"]
    [{'layer': 'conv1', 'bits': 8, 'channels': None, 'signed': None}]
    >>> Description.from_plain(facts.to_plain()) == facts
    True
    """

    kind: ActivationKind
    inputs: tuple[InputFacts, ...] = ()
    attention: tuple[AttentionFacts, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it. Lists, not tables by name: their order is that of the tensors' names."""
        return {
            "kind": str(self.kind),
            "inputs": [dict(vars(facts)) for facts in self.inputs],
            "attention": [dict(vars(facts)) for facts in self.attention],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Description:
        """From JSON; what is not as :meth:`to_plain` writes it is an error that names the place."""
        where = "the description of the activations"
        table = _table(plain, ("kind", "inputs", "attention"), where)
        if table["kind"] not in set(ActivationKind):
            raise LayoutError(
                f"{where}: kind is {table['kind']!r}: allowed is one of {', '.join(ActivationKind)}"
            )
        inputs, attention = (_rows(table[name], f"{where}, {name}") for name in ("inputs", "attention"))
        return cls(
            ActivationKind(table["kind"]),
            tuple(
                InputFacts(**_checked(row, _INPUT, f"{where}, inputs[{i}]")) for i, row in enumerate(inputs)
            ),
            tuple(
                AttentionFacts(**_checked(row, _ATTENTION, f"{where}, attention[{i}]"))
                for i, row in enumerate(attention)
            ),
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_bits(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 2 <= value <= 8


_Check = tuple[Callable[[object], bool], str]
_INPUT: dict[str, _Check] = {
    "layer": (lambda v: isinstance(v, str), "a name"),
    "bits": (_is_bits, "a whole number from 2 to 8"),
    "channels": (lambda v: v is None or _is_count(v), "a whole number above 0, or null"),
    "signed": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
}
_ATTENTION: dict[str, _Check] = {
    "module": (lambda v: isinstance(v, str), "a name"),
    "heads": (_is_count, "a whole number above 0"),
    "key_heads": (_is_count, "a whole number above 0"),
    "rectified": (lambda v: isinstance(v, bool), "true or false"),
    "bits": (lambda v: v is None or _is_bits(v), "a whole number from 2 to 8, or null"),
}


def _table(value: object, names: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) != set(names):
        has = ", ".join(map(repr, value)) if isinstance(value, Mapping) else f"is a {type(value).__name__}"
        raise LayoutError(
            f"{where} must have {', '.join(map(repr, names))} and no more: it {has or 'is empty'}"
        )
    return value


def _rows(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise LayoutError(f"{where} is a {type(value).__name__}: allowed is a list")
    return value


def _checked(row: object, checks: dict[str, _Check], where: str) -> dict[str, Any]:
    table = _table(row, tuple(checks), where)
    for name, (is_right, allowed) in checks.items():
        if not is_right(table[name]):
            raise LayoutError(f"{where}: {name} is {table[name]!r}: allowed is {allowed}")
    return dict(table)
