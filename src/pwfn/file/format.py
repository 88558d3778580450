"""Networks to and from .pwfn files. The specification is ``docs/format.md``.

compressed = load("net.pwfn")                 # written by compressed.save("net.pwfn")
loads(dumps(compressed))                      # the same as bytes
Reader("net.pwfn").sizes                      # where its bytes are
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder, index_streams, sigma_coder, untouched_coder
from pwfn.file.compressed import Compressed
from pwfn.file.content import check_sigma, within
from pwfn.file.header import SECTIONS, Header, Posterior
from pwfn.file.writer import (
    FREE_WEIGHTS,
    HEADER_LIMIT,
    HEADER_RATIO,
    MAGIC,
    PLAIN_SECTIONS,
    PREFIX,
    WEIGHTS_PER_BYTE,
    PathOrFile,
    check_machine,
    dumps,
)
from pwfn.runtime import index_dtype

__all__ = ["Reader", "Sizes", "dumps", "load", "loads"]

Readable: TypeAlias = PathOrFile | bytes | bytearray | memoryview
"""A path, a binary file object, or the bytes of a file."""


def load(source: Readable) -> Compressed:
    """Read a file, given as a path, a binary file object or its bytes: every number as saved, bit for bit.

    Nothing in the file is executed, and every size in it is checked before memory is allocated.

    >>> from pwfn.layout import Layout
    >>> layout = Layout.of(torch.nn.Linear(2, 1, bias=False))
    >>> load(Compressed.of(layout, torch.tensor([0.5, -0.25]), None, {}).dumps()).values().tolist()
    [0.5, -0.25]
    """
    with torch.device("cpu"):  # whatever the caller's default device
        return Reader(source).compressed()


def loads(data: bytes) -> Compressed:
    """Read the bytes that :meth:`Compressed.dumps` gave; the same as :func:`load`.

    >>> loads(b"something else")
    Traceback (most recent call last):
    pwfn.errors.FileError: this is not a .pwfn file
    """
    return load(data)


class Sizes(NamedTuple):
    """Bytes of each part of a file; they add up to its size."""

    header: int
    codebooks: int
    tables: int
    indices: int
    posterior: int
    untouched: int
    padding: int


class Reader:
    """A .pwfn file with a checked header; everything else is decoded when asked for.

    ``source`` is a path, a binary file object or the bytes of a file.
    """

    def __init__(self, source: Readable) -> None:
        self._name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
        self._index_bytes: list[int] = []
        with self._reading():
            check_machine()
            self._data = _read(source)
            self.file_bytes = len(self._data)
            _, self.version, _, size, raw_size, crc32 = PREFIX.unpack_from(self._data)
            start = PREFIX.size + size
            if start > self.file_bytes:
                raise FileError(f"the header claims {size:,} of {self.file_bytes:,} bytes: it is truncated")
            with within("header"):
                raw = coder.unsqueeze(self._bytes(PREFIX.size, size, crc32), raw_size, HEADER_RATIO)
            self.header = Header.from_json(raw, self.version)
            *starts, end = accumulate((section.size for section in self.header.sections), initial=start)
            self._starts = dict(zip(SECTIONS, starts, strict=True))
            self._check_sizes(end)

    @property
    def sizes(self) -> Sizes:
        """Bytes of each part."""
        parts = {section.name: section.size for section in self.header.sections}
        return Sizes(self.file_bytes - sum(parts.values()), **parts)

    def codebooks(self) -> tuple[Tensor, ...]:
        """The codebooks."""
        with self._reading(), within("section 'codebooks'"):
            return self._per_value(self._section("codebooks"))

    def _untouched(self) -> dict[str, Tensor]:
        """Every tensor that is not compressed."""
        raw, wanted = self._section("untouched"), self.header.untouched
        if self.version > 1:
            return untouched_coder.decode(raw, wanted)
        found: dict[str, Tensor] = {}
        start = 0
        for width in sorted({item.dtype.itemsize for item in wanted}):
            group = [item for item in wanted if item.dtype.itemsize == width]
            stop = start + sum(item.size for item in group)
            plain, place = coder.unshuffled(raw[start:stop], width), 0
            for item in group:
                found[item.name] = coder.tensor_of(plain[place : place + item.size], item.dtype, item.shape)
                place += item.size
            start = stop
        return {item.name: found[item.name] for item in wanted}

    @cached_property
    def streams(self) -> list[index_streams.Stream]:
        """The streams of the indices and their models."""
        with self._reading(), within("section 'tables'"):
            return index_streams.read(self.header, self._section("tables"))

    def index_bytes(self) -> list[int]:
        """Bytes of each tensor's indices; they add up to those of the section."""
        if not self._index_bytes:
            self.compressed()
        return self._index_bytes

    def compressed(self) -> Compressed:
        """Everything; every checksum is compared."""
        header = self.header
        with self._reading():
            with within("section 'indices'"):
                self._section("indices")  # its checksum, beside those of the streams
            indices = torch.empty(header.layout.size, dtype=index_dtype(max(header.codebooks.sizes)))
            pairs = [(stream, self._stream(stream)) for stream in self.streams]
            codebooks = self.codebooks()
            self._index_bytes = index_streams.decode_all(header, pairs, codebooks, indices)
            divisions = tuple(tensor.division for tensor in header.tensors)
            with within("section 'untouched'"):
                untouched = self._untouched()
            found = Compressed(header.layout, codebooks, divisions, indices, untouched, record=header.record)
            found.check()  # before anything is looked up by an index
            with within("section 'padding'"):
                if self._section("padding").strip(b"\x00"):
                    raise FileError("a byte is not zero")
            with within("section 'posterior'"):
                return self._with_posterior(found)

    def _check_sizes(self, end: int) -> None:
        """Check the sizes in the header against the file and each other."""
        header, size = self.header, self.file_bytes
        if end != size:
            what = "truncated" if end > size else "too long"
            raise FileError(f"the file has {size:,} bytes, its header says {end:,}: it is {what}")
        indices, streams = header.section("indices"), sum(tensor.bytes for tensor in header.tensors)
        if not streams == indices.size == indices.raw:
            raise FileError(
                f"section 'indices': {indices.size:,} bytes, {indices.raw:,} of content and {streams:,} of "
                "streams must be the same"
            )
        if header.layout.size > FREE_WEIGHTS + WEIGHTS_PER_BYTE[self.version] * size:
            raise FileError(
                f"{header.layout.size:,} weights are more than a file of {size:,} bytes may claim"
            )
        wanted, there = sum(item.size for item in header.untouched), header.section("untouched").raw
        if wanted != there:
            raise FileError(f"section 'untouched': its tensors have {wanted:,} bytes, its content {there:,}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file in an error, once; too little memory is an error that a caller can expect."""
        name = f"{self._name}: " if self._name else ""
        try:
            yield
        except FileError as error:
            if str(error).startswith(name):
                raise
            raise FileError(f"{name}{error}") from error.__cause__
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # torch's words
                raise
            raise FileError(f"{name}there is not enough memory to read it: free some, or use more") from error

    def _bytes(self, start: int, size: int, crc32: int) -> bytes:
        block = self._data[start : start + size]
        if zlib.crc32(block) != crc32:
            raise FileError("it is damaged: its checksum does not match")
        return block

    def _section(self, name: str) -> bytes:
        section = self.header.section(name)
        block = self._bytes(self._starts[name], section.size, section.crc32)
        if block and name not in PLAIN_SECTIONS[self.version]:
            return coder.unsqueeze(block, section.raw)
        # Of coded tensors the header has the size of their numbers.
        if len(block) != section.raw and (name, self.version) != ("untouched", 2):
            raise FileError(f"it has {len(block):,} bytes, the header says {section.raw:,}")
        return block

    def _per_value(self, raw: bytes) -> tuple[Tensor, ...]:
        """The content of a section with one number for each value of each codebook."""
        sizes = self.header.codebooks.sizes
        whole = coder.tensor_of(raw, self.header.layout.dtype, (-1,))
        if whole.numel() != sum(sizes):
            raise FileError(f"there are {whole.numel():,} numbers for {sum(sizes):,} values of codebooks")
        return tuple(part.clone() for part in whole.split(list(sizes)))

    def _stream(self, stream: index_streams.Stream) -> bytes:
        with within(f"tensor {self.header.tensors[stream.first].name!r}"):
            return self._bytes(self._starts["indices"] + stream.start, stream.size, stream.crc32)

    def _with_posterior(self, found: Compressed) -> Compressed:
        raw, kind = self._section("posterior"), self.header.posterior
        if kind is Posterior.CENTRE:
            found = replace(found, centre_sigma=self._per_value(raw))
        if kind is Posterior.WEIGHT:
            found = replace(found, weight_sigma=sigma_coder.decode(found, raw))
        if kind is Posterior.TENSOR:
            if len(raw) != len(self.header.tensors):
                raise FileError(f"it has {len(raw):,} bytes for {len(self.header.tensors):,} tensors")
            found = replace(found, sigma_codes=tuple(raw))
        if kind is Posterior.NONE and raw:
            raise FileError("it has bytes although the header says that there is no posterior")
        for sigma in (found.weight_sigma, *(found.centre_sigma or ())):
            if sigma is not None:
                check_sigma(sigma)
        return found


def _read(source: Readable) -> bytes:
    """All bytes of a file. The first few are checked before the rest is read, which may be large."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    try:
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb") as file:
                return _read(file)
        if not hasattr(source, "read"):
            raise FileError(f"a {type(source).__name__} is no path, no bytes and no binary file object")
        prefix = b""
        # A stream may give less than it is asked for, and nothing only at its end.
        while more := source.read(PREFIX.size - len(prefix)):
            if not isinstance(more, bytes):
                raise FileError(f"the file object gives {type(more).__name__}: open it in binary mode ('rb')")
            prefix += more
        _check_prefix(prefix)
        return prefix + source.read()
    except IsADirectoryError as error:
        raise FileError("is a folder: name a file in it, such as the model.pwfn of a run") from error
    except OSError as error:
        raise FileError(error.strerror or str(error)) from error
    except ValueError as error:  # a file object that is closed, a path with a null character
        raise FileError(str(error)) from error


def _check_prefix(prefix: bytes) -> None:
    if len(prefix) < PREFIX.size or prefix[:8] != MAGIC:
        raise FileError("this is not a .pwfn file")
    _, version, flags, size, raw_size, _ = PREFIX.unpack(prefix)
    if version not in WEIGHTS_PER_BYTE:
        known = " and ".join(map(str, WEIGHTS_PER_BYTE))
        raise FileError(f"version {version} of the format is not known here, only {known}: update pwfn")
    if flags != 0:
        raise FileError(f"the flags {flags:#06x} are not known here: update pwfn")
    if max(size, raw_size) > HEADER_LIMIT:
        raise FileError(f"the header claims {max(size, raw_size):,} bytes: 2^24 are allowed")
