"""The header of a .pwfn file: JSON that says what is inside, every field checked when it is read.

``docs/format.md`` is the specification; a header that breaks it is a :class:`FileError` naming the
field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import torch

from pwfn.errors import FileError
from pwfn.file.coder import MOST_NUMBER
from pwfn.file.compressed import Division
from pwfn.layout import Attention, Entry, Kind, Layout, LeftOut

_Choice = TypeVar("_Choice", bound=StrEnum)

MOST_AXES = 16

_CHANNELS_LAST_AXES = (4, 5)
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, halves of characters

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


class Posterior(StrEnum):
    """How much of the posterior a file holds."""

    NONE = "none"
    CENTRE = "centre"  # one sigma for each value of a codebook
    WEIGHT = "weight"  # the exact sigma of every weight


@dataclass(frozen=True)
class Section:
    """A stretch of the file after the header."""

    name: str
    size: int  # bytes in the file
    raw: int  # bytes once decompressed; equal to size where nothing is compressed
    crc32: int


@dataclass(frozen=True)
class Stream:
    """The coded indices of one tensor, a stretch of the section ``indices``."""

    size: int
    crc32: int
    own_table: bool


@dataclass(frozen=True)
class Stored:
    """One tensor of the section ``untouched``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """Everything but the payload."""

    writer: str
    layout: Layout
    divisions: tuple[Division, ...]
    streams: tuple[Stream, ...]
    codebook_dtype: torch.dtype
    codebook_sizes: tuple[int, ...]
    posterior: Posterior
    untouched: tuple[Stored, ...]
    sections: tuple[Section, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Compact JSON; fields that have their usual value are left away."""
        tensors = [
            _without_none(
                name=entry.name,
                shape=list(entry.shape),
                dtype=_dtype_name(entry.dtype),
                layer=entry.layer if entry.layer != entry.name.rpartition(".")[0] else None,
                type=entry.layer_type,
                kind=str(entry.kind),
                aliases=list(entry.aliases) or None,
                input_axis=entry.input_axis,
                groups=entry.groups if entry.groups != 1 else None,
                attention=_attention_json(entry.attention),
                channels_last=entry.channels_last or None,
                codebooks=list(division.codebooks) if division.codebooks != (0,) else None,
                axis=division.axis or None,
                own_table=stream.own_table or None,
                bytes=stream.size,
                crc32=stream.crc32,
            )
            for entry, division, stream in zip(self.layout.entries, self.divisions, self.streams, strict=True)
        ]
        left_out = [
            _without_none(
                name=item.name,
                shape=list(item.shape),
                dtype=_dtype_name(item.dtype),
                reason=item.reason,
                aliases=list(item.aliases) or None,
            )
            for item in self.layout.left_out
        ]
        untouched = [[item.name, list(item.shape), _dtype_name(item.dtype)] for item in self.untouched]
        whole = {
            "writer": self.writer,
            "tensors": tensors,
            "left_out": left_out,
            "codebooks": {"dtype": _dtype_name(self.codebook_dtype), "sizes": list(self.codebook_sizes)},
            "posterior": str(self.posterior),
            "untouched": untouched,
            "record": dict(self.record),
            "sections": [[item.name, item.size, item.raw, item.crc32] for item in self.sections],
        }
        try:
            return json.dumps(whole, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise FileError(f"the record of the run cannot be written as JSON: {error}") from None

    @classmethod
    def from_json(cls, raw: bytes) -> Header:
        """The header, or an error that names the first field at fault."""
        try:
            whole = json.loads(
                raw.decode(), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_distinct
            )
            if b"\\u" in raw:
                json.dumps(whole, ensure_ascii=False).encode()  # half a character can be escaped, not written
        except RecursionError:
            raise FileError("the header is not JSON that can be read: it is nested too deeply") from None
        except ValueError as error:
            raise FileError(f"the header is not JSON: {error}") from None
        top = _Object(whole, "header")
        tensors = [_Object(item, f"tensors[{i}]") for i, item in enumerate(top.array("tensors"))]
        left_out = [_Object(item, f"left_out[{i}]") for i, item in enumerate(top.array("left_out"))]
        books = _Object(top.need("codebooks"), "codebooks")
        entries: list[Entry] = []
        offset = 0
        for tensor in tensors:
            entries.append(_entry(tensor, offset))
            offset += entries[-1].size
        if not entries:
            raise FileError("the header names no tensor")
        header = cls(
            writer=top.text("writer"),
            layout=Layout(tuple(entries), tuple(_left_out(item) for item in left_out)),
            divisions=tuple(
                Division(tuple(tensor.numbers("codebooks", [0])), tensor.number("axis", 0))
                for tensor in tensors
            ),
            streams=tuple(
                Stream(tensor.number("bytes"), tensor.number("crc32"), tensor.flag("own_table"))
                for tensor in tensors
            ),
            codebook_dtype=books.dtype("dtype"),
            codebook_sizes=tuple(books.numbers("sizes")),
            posterior=top.choice("posterior", Posterior),
            untouched=tuple(_stored(item, i) for i, item in enumerate(top.array("untouched"))),
            sections=tuple(_section(item, i) for i, item in enumerate(top.array("sections"))),
            record=_Object(top.need("record"), "record").value,
        )
        _check(header)
        return header


def _check(header: Header) -> None:
    """What no single field can tell."""
    names = [name for entry in header.layout.entries for name in (entry.name, *entry.aliases)]
    names += [item.name for item in header.untouched]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"the header names the tensor {twice!r} twice")
    if header.codebook_dtype not in (torch.float32, torch.float64):
        raise FileError(f"codebooks of {header.codebook_dtype}: allowed are float32 and float64")
    if header.codebook_dtype != header.layout.dtype:
        raise FileError("the codebooks' type does not fit the tensors'")
    if not header.codebook_sizes or not all(0 < size <= 2**24 for size in header.codebook_sizes):
        raise FileError("a codebook is empty or has more than 2^24 values")
    if header.layout.size > MOST_NUMBER:
        raise FileError(f"the header claims {header.layout.size:,} weights: at most 2^48 are allowed")
    for entry, division in zip(header.layout.entries, header.divisions, strict=True):
        shape = entry.shape or (1,)
        parts = len(division.codebooks)
        fits = division.axis < len(shape) and parts > 0 and shape[division.axis] % parts == 0
        if not fits or any(book >= len(header.codebook_sizes) for book in division.codebooks):
            raise FileError(f"tensor {entry.name!r}: its codebooks do not fit its shape {entry.shape}")
        if entry.size == 0 or not entry.dtype.is_floating_point:
            raise FileError(f"tensor {entry.name!r} is empty or not of a floating-point type")
        if entry.channels_last and len(shape) not in _CHANNELS_LAST_AXES:
            raise FileError(f"tensor {entry.name!r}: {len(shape)} axes have no order with the channels last")


def _entry(tensor: _Object, offset: int) -> Entry:
    name = tensor.text("name")
    shape = tensor.shape("shape")
    return Entry(
        name=name,
        shape=shape,
        dtype=tensor.dtype("dtype"),
        offset=offset,
        layer=tensor.text("layer", name.rpartition(".")[0]),
        layer_type=tensor.text("type"),
        kind=tensor.choice("kind", Kind),
        aliases=tuple(tensor.texts("aliases")),
        input_axis=tensor.axis("input_axis", shape),
        groups=_groups(tensor, shape),
        attention=_attention(tensor, shape),
        channels_last=tensor.flag("channels_last"),
    )


def _groups(tensor: _Object, shape: tuple[int, ...]) -> int:
    groups = tensor.number("groups", 1)
    if groups < 1 or (shape or (1,))[0] % groups:
        raise FileError(f"{tensor.where}: {groups} groups do not fit the shape {shape}")
    return groups


def _attention(tensor: _Object, shape: tuple[int, ...]) -> Attention | None:
    if tensor.value.get("attention") is None:
        return None
    item = _Object(tensor.need("attention"), f"{tensor.where}.attention")
    found = Attention(tuple(item.texts("parts")), item.number("heads"), item.number("axis"))
    whole = len(found.parts) * found.heads
    if not whole or found.axis >= len(shape) or shape[found.axis] % whole:
        raise FileError(f"{item.where} does not fit the shape {shape}")
    return found


def _attention_json(attention: Attention | None) -> dict[str, Any] | None:
    if attention is None:
        return None
    return {"parts": list(attention.parts), "heads": attention.heads, "axis": attention.axis}


def _left_out(item: _Object) -> LeftOut:
    return LeftOut(
        item.text("name"),
        item.shape("shape"),
        item.dtype("dtype"),
        item.text("reason"),
        tuple(item.texts("aliases")),
    )


def _stored(value: Any, position: int) -> Stored:
    row = _row(value, f"untouched[{position}]", ("name", "shape", "dtype"))
    return Stored(row.text("name"), row.shape("shape"), row.dtype("dtype"))


def _section(value: Any, position: int) -> Section:
    row = _row(value, f"sections[{position}]", ("name", "bytes", "raw", "crc32"))
    return Section(row.text("name"), row.number("bytes"), row.number("raw"), row.number("crc32"))


def _row(value: Any, where: str, names: tuple[str, ...]) -> _Object:
    if not isinstance(value, list) or len(value) != len(names):
        raise FileError(f"{where} of the header is not a list of {len(names)}")
    return _Object(dict(zip(names, value, strict=True)), where)


class _Object:
    """A JSON object with typed access; what is absent without a default, or ill-typed, is an error."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise FileError(f"{where} of the header is not an object")
        self.value: dict[str, Any] = value
        self.where = where

    def need(self, key: str) -> Any:
        if key not in self.value:
            raise FileError(f"{self.where} of the header has no {key!r}")
        return self.value[key]

    def _fault(self, key: str, wanted: str) -> FileError:
        value = self.value.get(key)
        shown = f"a {type(value).__name__}" if isinstance(value, (dict, list)) else repr(value)[:60]
        return FileError(f"{self.where}.{key} of the header is {shown}: {wanted} is needed")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value.get(key, default) if default is not None else self.need(key)
        if not isinstance(value, str) or _UNSEEN.search(value):
            raise self._fault(key, "a string without control characters")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.value.get(key, default) if default is not None else self.need(key)
        if type(value) is not int or not 0 <= value <= MOST_NUMBER:
            raise self._fault(key, "a whole number from 0 to 2^48")
        return value

    def flag(self, key: str) -> bool:
        value = self.value.get(key, False)
        if not isinstance(value, bool):
            raise self._fault(key, "true or false")
        return value

    def array(self, key: str) -> list[Any]:
        value = self.need(key)
        if not isinstance(value, list):
            raise self._fault(key, "a list")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.value.get(key, [])
        if not isinstance(value, list):
            raise self._fault(key, "a list of strings")
        return [_Object({key: item}, self.where).text(key) for item in value]

    def numbers(self, key: str, default: list[int] | None = None) -> list[int]:
        value = self.value.get(key, default) if default is not None else self.need(key)
        if not isinstance(value, list):
            raise self._fault(key, "a list of whole numbers")
        if not all(type(item) is int and 0 <= item <= MOST_NUMBER for item in value):
            raise self._fault(key, "a list of whole numbers from 0 to 2^48")
        return value

    def shape(self, key: str) -> tuple[int, ...]:
        axes = self.numbers(key)
        # Axes of length 0 do not count: torch multiplies the others, and that must not overflow.
        if len(axes) > MOST_AXES or math.prod(axis for axis in axes if axis) > MOST_NUMBER:
            raise self._fault(key, f"at most {MOST_AXES} axes and 2^48 elements")
        return tuple(axes)

    def axis(self, key: str, shape: tuple[int, ...]) -> int | None:
        if self.value.get(key) is None:
            return None
        axis = self.number(key)
        if axis >= len(shape):
            raise self._fault(key, f"an axis of {shape}")
        return axis

    def dtype(self, key: str) -> torch.dtype:
        name = self.text(key)
        if name not in DTYPES:
            raise self._fault(key, f"one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def choice(self, key: str, enum: type[_Choice]) -> _Choice:
        try:
            return enum(self.need(key))
        except ValueError:
            raise self._fault(key, f"one of {', '.join(enum)}") from None


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise FileError(f"tensors of type {name} cannot be stored: convert them first")
    return name


def _finite(text: str) -> float:
    """A number that is none (NaN) or too large for one is refused, so that what is read can be written."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key that occurs twice would mean different things to different readers."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found
