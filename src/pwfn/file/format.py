"""Networks to and from .pwfn files. The specification is ``docs/format.md``.

save(compressed, "net.pwfn")                  # or compressed.save("net.pwfn")
compressed = load("net.pwfn")
loads(dumps(compressed))                      # the same as bytes
Reader("net.pwfn").sizes                      # where its bytes are
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
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
    save,
)
from pwfn.runtime import index_dtype

__all__ = ["Posterior", "Reader", "Sizes", "dumps", "load", "loads", "save"]


Readable: TypeAlias = PathOrFile | bytes | bytearray | memoryview
"""A path, a binary file object, or the bytes of a file."""


def load(source: Readable) -> Compressed:
    """Read a file, given as a path, a binary file object or its bytes: every number as saved, bit for bit.

    Nothing in the file is executed, and every size in it is checked before memory is allocated.

    >>> from pwfn.layout import Layout
    >>> layout = Layout.of(torch.nn.Linear(2, 1, bias=False))
    >>> small = Compressed.of(layout, torch.tensor([0.5, -0.25]), None, {})
    >>> file = io.BytesIO()
    >>> _ = save(small, file)
    >>> _ = file.seek(0)
    >>> load(file).values().tolist()
    [0.5, -0.25]
    """
    with torch.device("cpu"):  # whatever the caller's default device
        return Reader(source).compressed()


def loads(data: bytes) -> Compressed:
    """Read the bytes that :meth:`Compressed.dumps` gave; :func:`load` takes them, too.

    >>> from pwfn.layout import Layout
    >>> layout = Layout.of(torch.nn.Linear(2, 1, bias=False))
    >>> loads(dumps(Compressed.of(layout, torch.tensor([0.5, -0.25]), None, {}))).values().tolist()
    [0.5, -0.25]
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
        self._streams_read: list[index_streams.Stream] | None = None
        self._index_bytes: list[int] | None = None
        with _in_memory(self._name), self._within():
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
        self._index_dtype = index_dtype(max(self.header.codebooks.sizes))

    @property
    def sizes(self) -> Sizes:
        """Bytes of each part."""
        parts = {section.name: section.size for section in self.header.sections}
        return Sizes(self.file_bytes - sum(parts.values()), **parts)

    def codebooks(self) -> tuple[Tensor, ...]:
        """The codebooks."""
        return self._per_value("codebooks")

    def tensor(self, name: str) -> Tensor:
        """The values of one compressed tensor; of others only those before it in its stream are decoded."""
        entry = self.header.layout.entry(name)
        position = self.header.layout.entries.index(entry)
        alone = Compressed(
            replace(self.header.layout, entries=(replace(entry, offset=0),), left_out=()),
            self.codebooks(),
            (self.header.tensors[position].division,),
            self._indices(position, entry.size),
            {},
        )
        with self._within(f"tensor {name!r}"):
            alone.check()
        return alone.dense_state_dict()[entry.name]

    def untouched(self) -> dict[str, Tensor]:
        """Every tensor that is not compressed."""
        raw, wanted = self._section("untouched"), self.header.untouched
        found: dict[str, Tensor] = {}
        start = 0
        with self._within("section 'untouched'"):
            if self.version > 1:
                return untouched_coder.decode(raw, wanted)
            for width in sorted({item.dtype.itemsize for item in wanted}):
                group = [item for item in wanted if item.dtype.itemsize == width]
                stop = start + sum(item.size for item in group)
                plain, place = coder.unshuffled(raw[start:stop], width), 0
                for item in group:
                    found[item.name] = coder.tensor_of(
                        plain[place : place + item.size], item.dtype, item.shape
                    )
                    place += item.size
                start = stop
        return {item.name: found[item.name] for item in wanted}

    def compressed(self) -> Compressed:
        """Everything; every checksum is compared."""
        with _in_memory(self._name):
            return self._decoded()

    def _decoded(self) -> Compressed:
        header = self.header
        self._section("indices")  # its checksum, beside those of the streams
        indices = torch.empty(header.layout.size, dtype=self._index_dtype)
        with self._within():
            pairs = [(stream, self._stream(stream)) for stream in self.streams()]
            self._index_bytes = index_streams.decode_all(header, pairs, self.codebooks(), indices)
        found = Compressed(
            header.layout,
            self.codebooks(),
            tuple(tensor.division for tensor in header.tensors),
            indices,
            self.untouched(),
            record=header.record,
        )
        with self._within():
            found.check()  # before anything is looked up by an index
        if self._section("padding").strip(b"\x00"):
            with self._within("section 'padding'"):
                raise FileError("a byte is not zero")
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

    def _within(self, part: str = "") -> AbstractContextManager[None]:
        """Name the file and the part of it that is at fault in front of an error."""
        return within(": ".join(filter(None, (self._name, part))))

    def _bytes(self, start: int, size: int, crc32: int) -> bytes:
        block = self._data[start : start + size]
        if zlib.crc32(block) != crc32:
            raise FileError("it is damaged: its checksum does not match")
        return block

    def _section(self, name: str) -> bytes:
        section = self.header.section(name)
        with self._within(f"section {name!r}"):
            block = self._bytes(self._starts[name], section.size, section.crc32)
            if block and name not in PLAIN_SECTIONS[self.version]:
                return coder.unsqueeze(block, section.raw)
            # Of coded tensors the header has the size of their numbers.
            if len(block) != section.raw and (name, self.version) != ("untouched", 2):
                raise FileError(f"it has {len(block):,} bytes, the header says {section.raw:,}")
            return block

    def _per_value(self, name: str) -> tuple[Tensor, ...]:
        """A section with one number for each value of each codebook."""
        raw, sizes = self._section(name), self.header.codebooks.sizes
        with self._within(f"section {name!r}"):
            whole = coder.tensor_of(raw, self.header.layout.dtype, (-1,))
            if whole.numel() != sum(sizes):
                raise FileError(f"there are {whole.numel():,} numbers for {sum(sizes):,} values of codebooks")
        return tuple(part.clone() for part in whole.split(list(sizes)))

    def streams(self) -> list[index_streams.Stream]:
        """The streams of the indices and their models."""
        if self._streams_read is None:
            raw = self._section("tables")
            with self._within("section 'tables'"):
                self._streams_read = index_streams.read(self.header, raw)
        return self._streams_read

    def index_bytes(self) -> list[int]:
        """Bytes of each tensor's indices; they add up to those of the section."""
        if self._index_bytes is None:
            self.compressed()
        assert self._index_bytes is not None
        return self._index_bytes

    def _stream(self, stream: index_streams.Stream) -> bytes:
        with within(f"tensor {self.header.tensors[stream.first].name!r}"):
            return self._bytes(self._starts["indices"] + stream.start, stream.size, stream.crc32)

    def _indices(self, position: int, size: int) -> Tensor:
        """The indices of one tensor, as a vector."""
        stream = next(s for s in self.streams() if s.first <= position < s.stop)
        dtype = torch.empty(0, dtype=self._index_dtype).numpy().dtype
        with self._within():
            data = self._stream(stream)
            with within(f"tensor {self.header.tensors[position].name!r}"):
                found, _ = index_streams.decode(
                    self.header, stream, data, self.codebooks(), dtype, position + 1
                )
        return torch.from_numpy(found[-size:])

    def _with_posterior(self, found: Compressed) -> Compressed:
        if self.header.posterior is Posterior.CENTRE:
            found = replace(found, centre_sigma=self._per_value("posterior"))
        raw = self._section("posterior")
        with self._within("section 'posterior'"):
            if self.header.posterior is Posterior.WEIGHT:
                found = replace(found, weight_sigma=sigma_coder.decode(found, raw))
            if self.header.posterior is Posterior.TENSOR:
                if len(raw) != len(self.header.tensors):
                    raise FileError(f"it has {len(raw):,} bytes for {len(self.header.tensors):,} tensors")
                found = replace(found, sigma_codes=tuple(raw))
            if self.header.posterior is Posterior.NONE and raw:
                raise FileError("it has bytes although the header says that there is no posterior")
            for sigma in (found.weight_sigma, *(found.centre_sigma or ())):
                if sigma is not None:
                    check_sigma(sigma)
        return found


@contextmanager
def _in_memory(name: str) -> Iterator[None]:
    """A file that does not fit in memory is an error that a caller can expect."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # torch's words
            raise
        what = f"{name}: " if name else ""
        raise FileError(f"{what}there is not enough memory to read it: free some, or use more") from error


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
