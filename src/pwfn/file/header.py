"""The header of a .pwfn file: JSON, declared here field by field and checked when it is read.

The specification is ``docs/format.md``. A header that violates it raises a :class:`FileError` that names the
field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import torch

from pwfn.errors import FileError
from pwfn.file.coder import MOST_NUMBER
from pwfn.file.content import Division, name_of
from pwfn.layout import Attention, Entry, Kind, Layout, LeftOut

SECTIONS = ("codebooks", "tables", "indices", "posterior", "untouched", "padding")
_SHARED = ("name", "shape", "dtype", "kind", "aliases", "input_axis", "groups", "attention", "channels_last")
"""What an entry of the layout and the header have under the same name."""

_PARENT = "\0"
"""Stands for a layer that is named by what precedes the last dot of the tensor's name; never in a file."""

_MOST_AXES = 16
_MOST_VALUES = 2**24  # of a codebook
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters and surrogates
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"),
        *("bool", "complex64", "complex128"),
    )
}


class Posterior(StrEnum):
    """Which sigmas a file holds."""

    NONE = "none"
    TENSOR = "tensor"  # the predictive sigma: one per tensor
    CENTRE = "centre"  # one sigma per value of a codebook
    WEIGHT = "weight"  # the exact sigma of every weight


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One compressed tensor: its entry of the layout, its division and its stream of indices."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: str = _PARENT
    type: str
    kind: Kind
    aliases: tuple[str, ...] = ()
    input_axis: int | None = None
    groups: int = 1
    attention: Attention | None = None
    channels_last: bool = False
    codebooks: tuple[int, ...] = (0,)
    axis: int = 0
    own_table: bool = False
    contexts: bool = False
    continues: bool = False
    bytes: int
    crc32: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def has_model(self) -> bool:
        """Whether a table or a tree is stored for it."""
        return self.own_table or (self.contexts and not self.continues)

    @property
    def division(self) -> Division:
        """The codebooks of its parts."""
        return Division(self.codebooks, self.axis)

    @classmethod
    def of(cls, entry: Entry, **stored: Any) -> TensorInfo:
        """From its entry of the layout, and how it is stored."""
        layer = entry.layer if entry.layer != entry.name.rpartition(".")[0] else _PARENT
        shared = {name: getattr(entry, name) for name in _SHARED}
        return cls(**shared, layer=layer, type=entry.layer_type, **stored)

    def entry(self, offset: int) -> Entry:
        """Its entry of the layout."""
        layer = self.name.rpartition(".")[0] if self.layer == _PARENT else self.layer
        shared = {name: getattr(self, name) for name in _SHARED}
        return Entry(**shared, offset=offset, layer=layer, layer_type=self.type)


@dataclass(frozen=True)
class Codebooks:
    """Type and number of values of each codebook."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


class Stored(NamedTuple):
    """One tensor of the section ``untouched``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Section(NamedTuple):
    """A part of the file after the header."""

    name: str
    size: int  # bytes in the file
    raw: int  # bytes after decompression; equal to size if the section is not compressed
    crc32: int


@dataclass(frozen=True)
class Header:
    """Everything except the sections."""

    writer: str
    tensors: tuple[TensorInfo, ...]
    left_out: tuple[LeftOut, ...]
    codebooks: Codebooks
    posterior: Posterior
    untouched: tuple[Stored, ...]
    record: dict[str, Any]
    sections: tuple[Section, ...]

    @cached_property
    def layout(self) -> Layout:
        """The layout of the vector."""
        offsets = accumulate((tensor.size for tensor in self.tensors), initial=0)
        return Layout(
            tuple(tensor.entry(offset) for tensor, offset in zip(self.tensors, offsets, strict=False)),
            self.left_out,
        )

    def section(self, name: str) -> Section:
        """A section by its name."""
        return self.sections[SECTIONS.index(name)]

    def to_json(self) -> bytes:
        """Compact JSON; fields with their default value are omitted."""
        try:
            text = json.dumps(
                self, default=_plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False
            )
            return text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise FileError(f"the record of the run cannot be written as JSON: {error}") from None

    @classmethod
    def from_json(cls, raw: bytes, version: int) -> Header:
        """The header, or an error that names the first invalid field."""
        header: Header = _typed(cls, _parsed(raw), "")
        if version == 1:  # which does not know these fields, and ignores them
            tensors = (replace(tensor, contexts=False, continues=False) for tensor in header.tensors)
            header = replace(header, tensors=tuple(tensors))
        _check(header)
        return header


def _check(header: Header) -> None:
    """Check what no single field can tell."""
    if tuple(section.name for section in header.sections) != SECTIONS:
        raise FileError(f"the sections are not {', '.join(SECTIONS)}")
    if not header.tensors:
        raise FileError("the header names no tensor")
    stored: list[TensorInfo | LeftOut | Stored] = [*header.tensors, *header.left_out, *header.untouched]
    for item in stored:
        # Axes of length 0 do not count: torch multiplies the others, and that must not overflow.
        if len(item.shape) > _MOST_AXES or math.prod(n for n in item.shape if n) > MOST_NUMBER:
            raise FileError(f"tensor {item.name!r} has more than {_MOST_AXES} axes or 2^48 elements")
    names = [name for tensor in header.tensors for name in (tensor.name, *tensor.aliases)]
    names += [item.name for item in header.untouched]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"the header names the tensor {twice!r} twice")
    layout, sizes = header.layout, header.codebooks.sizes
    if header.codebooks.dtype != layout.dtype:
        raise FileError(f"the codebooks are {header.codebooks.dtype}: these tensors need {layout.dtype}")
    if not sizes or not all(0 < size <= _MOST_VALUES for size in sizes):
        raise FileError("a codebook is empty or has more than 2^24 values")
    if layout.size > MOST_NUMBER:
        raise FileError(f"the header claims {layout.size:,} weights: at most 2^48 are allowed")
    for tensor in header.tensors:
        shape, heads = tensor.shape or (1,), tensor.attention
        what = f"tensor {tensor.name!r} of shape {tensor.shape}"
        if tensor.size == 0 or not tensor.dtype.is_floating_point:
            raise FileError(f"{what} is empty or not of a floating-point type")
        if not _cuts(shape, tensor.axis, len(tensor.codebooks)) or max(tensor.codebooks) >= len(sizes):
            raise FileError(f"{what}: its codebooks do not fit")
        if tensor.channels_last and len(shape) not in (4, 5):
            raise FileError(f"{what}: channels_last needs 4 or 5 axes")
        if tensor.input_axis is not None and tensor.input_axis >= len(tensor.shape):
            raise FileError(f"{what} has no input axis {tensor.input_axis}")
        if not _cuts(shape, 0, tensor.groups):
            raise FileError(f"{what}: its {tensor.groups} groups do not fit")
        if heads is not None and not _cuts(tensor.shape, heads.axis, len(heads.parts) * heads.heads):
            raise FileError(f"{what}: its attention heads do not fit")


def _cuts(shape: tuple[int, ...], axis: int, count: int) -> bool:
    """Whether a shape can be cut along an axis into that many equal parts."""
    return axis < len(shape) and count > 0 and shape[axis] % count == 0


def _plain(value: Any) -> Any:
    """A dataclass or a type of numbers as JSON has it."""
    if isinstance(value, torch.dtype):
        name = name_of(value)
        if name not in _DTYPES:
            raise FileError(f"tensors of type {name} cannot be stored: convert them first")
        return name
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not a type of JSON")
    found = {item.name: (getattr(value, item.name), item.default) for item in fields(value)}
    return {name: held for name, (held, default) in found.items() if held != default}


_SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    int: ("a whole number from 0 to 2^48", lambda value: type(value) is int and 0 <= value <= MOST_NUMBER),
    str: (
        "a string without control characters",
        lambda value: isinstance(value, str) and not _UNSEEN.search(value),
    ),
    torch.dtype: (f"one of {', '.join(_DTYPES)}", lambda value: isinstance(value, str) and value in _DTYPES),
}
_hints = cache(get_type_hints)


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as the type that is declared for it."""
    args, kind = get_args(kind), get_origin(kind) or kind
    if type(None) in args:
        return None if value is None else _typed(args[0], value, where)
    if is_dataclass(kind):
        return _object(kind, value, where)
    if kind is tuple:
        _need(isinstance(value, list), "a list", value, where)
        return tuple(_typed(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if issubclass(kind, tuple):  # a NamedTuple is a list with one item for each field
        kinds = _hints(kind)
        fits = isinstance(value, list) and len(value) == len(kinds)
        _need(fits, f"a list of {', '.join(kinds)}", value, where)
        pairs = zip(kinds.items(), value, strict=True)
        return kind(*(_typed(part, item, f"{where}.{name}") for (name, part), item in pairs))
    if issubclass(kind, StrEnum):
        _need(value in list(kind), f"one of {', '.join(kind)}", value, where)
        return kind(value)
    needed, test = _SIMPLE[kind]
    _need(test(value), needed, value, where)
    return _DTYPES[value] if kind is torch.dtype else value


def _object(kind: Any, value: Any, where: str) -> Any:
    _need(isinstance(value, dict), "an object", value, where)
    found, prefix = {}, f"{where}." if where else ""
    for item in fields(kind):
        if item.name in value:
            found[item.name] = _typed(_hints(kind)[item.name], value[item.name], f"{prefix}{item.name}")
        elif item.default is MISSING:
            raise FileError(f"the header has no {prefix}{item.name}")
    return kind(**found)


def _need(fits: bool, needed: str, value: Any, where: str) -> None:
    if not fits:
        shown = f"a {type(value).__name__}" if isinstance(value, (dict, list)) else repr(value)[:60]
        raise FileError(f"the header{f': {where}' if where else ''} is {shown}: {needed} is needed")


def _parsed(raw: bytes) -> Any:
    """JSON without NaN, infinities, lone surrogates and repeated keys: what is read can be written."""

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:20]} is not a finite number")
        return number

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object has a key twice")
        return found

    try:
        whole = json.loads(raw.decode(), parse_constant=finite, parse_float=finite, object_pairs_hook=once)
        if b"\\u" in raw:
            json.dumps(whole, ensure_ascii=False).encode()  # a lone surrogate can be escaped, not encoded
    except RecursionError:
        raise FileError("the header is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise FileError(f"the header is not JSON: {error}") from None
    return whole
