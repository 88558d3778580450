"""Which activations of a model are quantised: as values, and as the JSON description that a file keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from torch import nn
from torch.nn.modules.conv import _ConvNd

from pwfn.errors import LayoutError
from pwfn.layout import Entry, Kind, Layout
from pwfn.layout.coverage import is_hf_conv1d

END_BITS = 8
"""Bits of the first and the last layer, weights and inputs, as in the papers of the methods."""


class ActivationKind(StrEnum):
    """The method whose quantisers the activations have."""

    LSQ = "lsq"  # one learned step per layer
    LSQ_PLUS = "lsq+"  # one learned step and offset per layer
    APOT = "apot"  # sums of powers of two up to a learned clip point per layer
    QVIT = "q-vit"  # one learned step and offset per input channel of a layer, and per attention head


@dataclass(frozen=True)
class QuantisedInput:
    """A layer whose input is quantised."""

    layer: str
    bits: int
    channels: int | None = None  # one step per input channel, of so many; None: one for all (all but Q-ViT)
    signed: bool | None = None  # None: signed if the first batch has a negative value


@dataclass(frozen=True)
class AttentionPlan:
    """An attention module, and what happens between its projections."""

    module: str
    heads: int  # of queries
    key_heads: int  # of keys and values
    rectified: bool = True
    bits: int | None = None  # of queries, keys, values and probabilities; None: not quantised


@dataclass(frozen=True)
class Description:
    """Everything that is attached to a model, in the order of the tensors' names.

    >>> description = Description(ActivationKind.LSQ, (QuantisedInput("conv1", 8),))
    >>> description.to_plain()["inputs"]
    [{'layer': 'conv1', 'bits': 8, 'channels': None, 'signed': None}]
    >>> Description.from_plain(description.to_plain()) == description
    True
    """

    kind: ActivationKind
    inputs: tuple[QuantisedInput, ...] = ()
    attention: tuple[AttentionPlan, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists instead of tuples
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Description:
        """Read what :meth:`to_plain` wrote; anything else is an error that names the place."""
        where = "the description of the activations"
        _check_keys(plain, ("kind", "inputs", "attention"), where)
        kind, inputs, attention = plain["kind"], plain["inputs"], plain["attention"]
        if kind not in set(ActivationKind):
            raise LayoutError(f"{where}: kind is {kind!r}: use one of {', '.join(ActivationKind)}")
        for name, rows in (("inputs", inputs), ("attention", attention)):
            if not isinstance(rows, list):
                raise LayoutError(f"{where}: {name} is a {type(rows).__name__}: it must be a list")
        made = cls(
            ActivationKind(kind),
            tuple(_row(QuantisedInput, row, f"{where}, inputs[{i}]") for i, row in enumerate(inputs)),
            tuple(_row(AttentionPlan, row, f"{where}, attention[{i}]") for i, row in enumerate(attention)),
        )
        if made.kind is not ActivationKind.QVIT and any(row.channels for row in made.inputs):
            raise LayoutError(f"{where}: {kind} has one step per layer: only q-vit may have channels")
        return made


_Row = TypeVar("_Row", QuantisedInput, AttentionPlan)


def _check_keys(value: object, names: tuple[str, ...], where: str) -> None:
    if not isinstance(value, Mapping) or set(value) != set(names):
        has = f"has {', '.join(map(repr, value))}" if isinstance(value, Mapping) else f"is {value!r}"
        raise LayoutError(f"{where} must have exactly {', '.join(map(repr, names))}: it {has}")


def _row(cls: type[_Row], row: Any, where: str) -> _Row:
    """A dataclass from a row of JSON: types as declared, bits from 2 to 8, other numbers above 0."""
    types = get_type_hints(cls)
    _check_keys(row, tuple(types), where)
    for name, hint in types.items():
        value, allowed = row[name], get_args(hint) or (hint,)
        numbers, limits = (range(2, 9), "from 2 to 8") if name == "bits" else (range(1, 2**63), "above 0")
        # type() and not isinstance(): True is an int.
        if type(value) not in allowed or (type(value) is int and value not in numbers):
            names = {int: f"an integer {limits}", str: "a string", bool: "true or false", NoneType: "null"}
            wanted = " or ".join(names[each] for each in allowed)
            raise LayoutError(f"{where}: {name} is {value!r}: it must be {wanted}")
    return cls(**row)


def plan(
    model: nn.Module, layout: Layout, kind: ActivationKind, bits: int | None, *, include_ends: bool = False
) -> dict[str, Any]:
    """A description for :func:`attach`: the input of every convolution and linear layer in ``bits`` bits.

    The inputs of the first and the last layer have 8 bits unless ``include_ends``. With ``bits`` None no
    input is quantised. Q-ViT always rectifies attention; a network without attention is an error.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> [row["bits"] for row in plan(model, Layout.of(model), ActivationKind.LSQ, 4)["inputs"]]
    [8, 4, 8]
    """
    inputs = []
    if bits is not None:
        for entry, name, module in _layers(model, layout):
            own = bits if include_ends or entry.layer not in layout.ends else END_BITS
            channels = input_channels(module) if kind is ActivationKind.QVIT else None
            inputs.append(QuantisedInput(name, own, channels))
    attention = _attention(layout, rectified=True, bits=bits) if kind is ActivationKind.QVIT else ()
    return Description(kind, tuple(inputs), attention).to_plain()


def plan_capture(layout: Layout) -> dict[str, Any]:
    """A description that changes nothing, but lets the queries and keys of a teacher be captured."""
    return Description(ActivationKind.QVIT, (), _attention(layout, rectified=False, bits=None)).to_plain()


def takes_input(module: nn.Module) -> bool:
    """Whether the input of the module can be quantised."""
    return isinstance(module, (_ConvNd, nn.Linear)) or is_hf_conv1d(module)


def input_channels(module: nn.Module) -> int:
    """Input channels of a convolution or a linear layer."""
    if isinstance(module, _ConvNd):
        return module.in_channels
    # transformers' Conv1D has nx; it is not imported here.
    return module.in_features if isinstance(module, nn.Linear) else int(module.nx)  # type: ignore[arg-type]


def channel_axis(module: nn.Module) -> int:
    """Channel axis of the input of a layer, counted from the end: the batch axis may be missing."""
    return -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1


def _layers(model: nn.Module, layout: Layout) -> Iterator[tuple[Entry, str, nn.Module]]:
    """Every layer that uses a compressed weight, once, with one of its names."""
    done: set[int] = set()
    for entry in layout.entries:
        if entry.kind is not Kind.WEIGHT:
            continue
        for parameter in (entry.name, *entry.aliases):
            name = parameter.rpartition(".")[0]
            module = model.get_submodule(name)
            if isinstance(module, (nn.MultiheadAttention, nn.Bilinear)):
                raise LayoutError(
                    f"{name or 'the model'} is a {type(module).__name__}, whose products are computed inside "
                    'torch, where inputs cannot be quantised: set options.activation_bits = "off"'
                )
            if id(module) not in done and takes_input(module):
                done.add(id(module))
                yield entry, name, module


def _attention(layout: Layout, *, rectified: bool, bits: int | None) -> tuple[AttentionPlan, ...]:
    """One row for every module that holds projections to queries, keys and values."""
    heads: dict[str, dict[str, int]] = {}
    for entry in layout.entries:
        if entry.attention is None or entry.kind is not Kind.WEIGHT:
            continue
        # nn.MultiheadAttention owns its packed projections; other modules hold linear layers.
        holder = entry.layer if entry.layer_type == "MultiheadAttention" else entry.layer.rpartition(".")[0]
        heads.setdefault(holder, {}).update(dict.fromkeys(entry.attention.parts, entry.attention.heads))
    found = tuple(
        AttentionPlan(holder, parts["q"], parts["k"], rectified, bits)
        for holder, parts in heads.items()
        if {"q", "k"} <= parts.keys()
    )
    if not found:
        raise LayoutError(
            "no attention is found in the network (projections called qkv, or q, k and v, in a module with "
            "num_heads): Q-ViT needs transformer blocks; choose another method, such as LSQ or LSQ+"
        )
    return found
