"""``Compressed`` to and from a .pwfn file. The specification is ``docs/format.md``.

save(compressed, "net.pwfn")
compressed = load("net.pwfn")
Reader("net.pwfn").tensor("conv1.weight")     # one tensor, without decoding the others
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder as codec
from pwfn.file import sigma_coder as sigmacodec
from pwfn.file.coder import Table
from pwfn.file.compressed import Compressed, index_dtype
from pwfn.file.content import (
    bytes_of,
    check,
    check_ascending,
    check_machine,
    check_range,
    check_sigma,
    symbols,
    tensor_of,
    untouched_bytes,
    untouched_tensors,
    within,
)
from pwfn.file.header import Header, Posterior, Section, Stored, Stream
from pwfn.file.storage import replacing
from pwfn.version import __version__

MAGIC = b"\x89PWFN\r\n\x1a"
VERSION = 1
HEADER_LIMIT = 2**24
HEADER_RATIO = 64  # JSON grows once more when it is read: a header may be packed less tightly than a block
WRITER = f"pwfn {__version__}"

_PREFIX = struct.Struct("<8sHHIII")  # magic, version, flags, header bytes, once decompressed, CRC-32
_SECTIONS = ("codebooks", "tables", "indices", "posterior", "untouched", "padding")
_PLAIN_SECTIONS = ("indices", "padding")  # the others are blocks
_FREE_WEIGHTS = 2**20
_WEIGHTS_PER_BYTE = 64


def save(compressed: Compressed, path: str | Path, *, posterior: Posterior | str | None = None) -> int:
    """Write a file, whole or not at all, and return its size in bytes.

    ``posterior``: ``centre`` (one sigma per codebook value), ``weight`` (exact) or ``none``; ``centre``
    unless given, for a network that has one. The
    file is written beside its target and renamed, so that an error leaves what was there.
    """
    path = Path(path)
    try:
        kind = usual_posterior(compressed) if posterior is None else Posterior(posterior)
    except ValueError:
        raise FileError(f"posterior is {posterior!r}: allowed is one of {', '.join(Posterior)}") from None
    with _naming(path):
        blob = dumps(compressed, kind)
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    return len(blob)


def load(path: str | Path) -> Compressed:
    """Read a file: weights, buffers and posterior as they were saved, bit for bit.

    Nothing in the file is run, and every size in it is checked before memory is taken.
    """
    return Reader(path).compressed()


def usual_posterior(compressed: Compressed) -> Posterior:
    """What a file keeps of a posterior unless told: one sigma per centre, or nothing where there is none."""
    return Posterior.NONE if compressed.sigma is None else Posterior.CENTRE


def dumps(compressed: Compressed, posterior: Posterior | None = None) -> bytes:
    """The bytes of a file."""
    check(compressed)
    posterior = usual_posterior(compressed) if posterior is None else posterior
    if posterior is not Posterior.NONE and compressed.sigma is None:
        raise FileError("there is no posterior to save: pass posterior='none'")
    if posterior is Posterior.WEIGHT and compressed.weight_sigma is None:
        raise FileError("sigma is known per centre only: pass posterior='centre'")
    arrays = [symbols(compressed.indices[entry.span]) for entry in compressed.layout.entries]
    shared, own = codec.choose_tables([codec.counts_of(array) for array in arrays])
    coded: list[bytes] = []
    for array, table in zip(arrays, own, strict=True):
        used = table or shared
        assert used is not None  # shared is there for whoever has no table of its own
        coded.append(codec.encode(array, used))
    tables = ([shared] if shared else []) + [table for table in own if table]
    blocks = {
        "codebooks": b"".join(bytes_of(book) for book in compressed.codebooks),
        "tables": b"".join(table.to_bytes() for table in tables),
        "indices": b"".join(coded),
        "posterior": _posterior_bytes(compressed, posterior),
        "untouched": untouched_bytes(compressed.untouched),
        "padding": b"",
    }
    stored = {name: block if name in _PLAIN_SECTIONS else _squeezed(block) for name, block in blocks.items()}
    # The reader refuses more weights than a file of its size may claim; a network that is
    # smaller still (almost all zeros) is filled up with zero bytes.
    short = (compressed.layout.size - _FREE_WEIGHTS) // _WEIGHTS_PER_BYTE - sum(map(len, stored.values()))
    stored["padding"] = blocks["padding"] = bytes(max(short + 1, 0))
    header = Header(
        writer=WRITER,
        layout=compressed.layout,
        divisions=compressed.divisions,
        streams=tuple(
            Stream(len(stream), zlib.crc32(stream), table is not None)
            for stream, table in zip(coded, own, strict=True)
        ),
        codebook_dtype=compressed.codebooks[0].dtype,
        codebook_sizes=tuple(book.numel() for book in compressed.codebooks),
        posterior=posterior,
        untouched=tuple(
            Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in compressed.untouched.items()
        ),
        sections=tuple(
            Section(name, len(stored[name]), len(blocks[name]), zlib.crc32(stored[name]))
            for name in _SECTIONS
        ),
        record=compressed.record,
    )
    raw = header.to_json()
    packed = codec.squeeze(raw, HEADER_RATIO)
    if max(len(raw), len(packed)) > HEADER_LIMIT:
        raise FileError(f"the header would be {len(raw):,} bytes, 2^24 are allowed: shorten the record")
    Header.from_json(raw)  # what cannot be read is not written
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(packed), len(raw), zlib.crc32(packed))
    return b"".join((prefix, packed, *stored.values()))


class Sizes(NamedTuple):
    """Where a file's bytes are; they add up to its size."""

    header: int
    codebooks: int
    tables: int
    indices: int
    posterior: int
    untouched: int
    padding: int


class Reader:
    """A .pwfn file opened: its header is read and checked, the rest is read when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _naming(self.path):
            check_machine()
            with self.path.open("rb") as file:
                self.file_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                prefix = file.read(_PREFIX.size)
                raw_size, packed = _header_block(prefix, file, self.file_bytes)
            with within("header"):
                raw = codec.unsqueeze(packed, raw_size, HEADER_RATIO)
            self.header = Header.from_json(raw)
            self._starts = self._checked_starts(_PREFIX.size + len(packed))
            sizes = (stream.size for stream in self.header.streams)
            self._stream_starts = list(accumulate(sizes, initial=self._starts["indices"]))
            self._tables_read: list[Table] | None = None

    @property
    def sizes(self) -> Sizes:
        """Bytes of each part."""
        parts = {section.name: section.size for section in self.header.sections}
        return Sizes(self.file_bytes - sum(parts.values()), **parts)

    def own_table_bytes(self) -> list[int]:
        """For each tensor the bytes of its own frequency table, before compression; 0 for the shared one."""
        with _naming(self.path):
            pairs = zip(self.header.streams, self._tables(), strict=True)
            return [len(table.to_bytes()) if stream.own_table else 0 for stream, table in pairs]

    def codebooks(self) -> tuple[Tensor, ...]:
        """The codebooks, each ascending."""
        with _naming(self.path):
            raw = self._section("codebooks")
            with within("section 'codebooks'"):
                whole = tensor_of(raw, self.header.codebook_dtype, (-1,))
                wanted = sum(self.header.codebook_sizes)
                if whole.numel() != wanted:
                    raise FileError(f"there are {whole.numel():,} values, the header says {wanted:,}")
                books = tuple(book.clone() for book in whole.split(list(self.header.codebook_sizes)))
                check_ascending(books)
            return books

    def indices(self, name: str) -> Tensor:
        """The indices of one tensor, in its shape."""
        entry = self.header.layout.entry(name)
        with _naming(self.path):
            position = self.header.layout.entries.index(entry)
            tables = self._tables()
            with self.path.open("rb") as file:
                stream = self._stream(file, position)
            return torch.from_numpy(self._decoded(stream, position, tables)).view(entry.shape)

    def tensor(self, name: str) -> Tensor:
        """The values of one tensor; of the coded indices only its own stream is read."""
        entry = self.header.layout.entry(name)
        position = self.header.layout.entries.index(entry)
        alone = Compressed(
            replace(self.header.layout, entries=(replace(entry, offset=0),), left_out=()),
            self.codebooks(),
            (self.header.divisions[position],),
            self.indices(name).reshape(-1),
            {},
        )
        return alone.dense_state_dict()[entry.name]

    def untouched(self) -> dict[str, Tensor]:
        """Every tensor that is not compressed."""
        with _naming(self.path):
            raw = self._section("untouched")
            with within("section 'untouched'"):
                return untouched_tensors(raw, self.header.untouched)

    def compressed(self) -> Compressed:
        """Everything."""
        header = self.header
        with _naming(self.path):
            books = self.codebooks()
            tables = self._tables()
            indices = torch.empty(header.layout.size, dtype=index_dtype(max(header.codebook_sizes)))
            whole, crc32 = indices.numpy(), 0
            with self.path.open("rb") as file:
                for position, entry in enumerate(header.layout.entries):
                    stream = self._stream(file, position)
                    crc32 = zlib.crc32(stream, crc32)
                    whole[entry.span] = self._decoded(stream, position, tables)
            if crc32 != self._part("indices").crc32:
                raise FileError("section 'indices': it is damaged: its checksum does not match")
            found = Compressed(
                header.layout, books, header.divisions, indices, self.untouched(), record=header.record
            )
            if any(self._section("padding")):
                raise FileError("section 'padding': a byte is not zero")
            return self._with_posterior(found)

    def _checked_starts(self, start: int) -> dict[str, int]:
        sections = self.header.sections
        if tuple(section.name for section in sections) != _SECTIONS:
            raise FileError(f"the sections are not {', '.join(_SECTIONS)}")
        starts: dict[str, int] = {}
        for section in sections:
            starts[section.name] = start
            start += section.size
        if start != self.file_bytes:
            what = "truncated" if start > self.file_bytes else "longer than it should be"
            raise FileError(
                f"the file has {self.file_bytes:,} bytes, its header says {start:,}: it is {what}"
            )
        streams = sum(stream.size for stream in self.header.streams)
        indices = self._part("indices")
        if not streams == indices.size == indices.raw:
            raise FileError(
                f"section 'indices': it has {indices.size:,} bytes, its content {indices.raw:,} "
                f"and its streams {streams:,}: these must be the same"
            )
        weights = self.header.layout.size
        if weights > _FREE_WEIGHTS + _WEIGHTS_PER_BYTE * self.file_bytes:
            raise FileError(
                f"{weights:,} weights in {self.file_bytes:,} bytes are more than a file may claim"
            )
        wanted = sum(item.size for item in self.header.untouched)
        there = self._part("untouched").raw
        if wanted != there:
            raise FileError(f"section 'untouched': its tensors have {wanted:,} bytes, its content {there:,}")
        return starts

    def _part(self, name: str) -> Section:
        return self.header.sections[_SECTIONS.index(name)]

    def _section(self, name: str) -> bytes:
        section = self._part(name)
        with within(f"section {name!r}"):
            with self.path.open("rb") as file:
                block = _read(file, self._starts[name], section.size, section.crc32)
            if name in _PLAIN_SECTIONS or not block:
                if len(block) != section.raw:
                    raise FileError(f"it has {len(block):,} bytes, the header says {section.raw:,}")
                return block
            return codec.unsqueeze(block, section.raw)

    def _tables(self) -> list[Table]:
        """For each tensor the table that it uses, with totals that agree with the shapes."""
        if self._tables_read is not None:
            return self._tables_read
        entries, streams = self.header.layout.entries, self.header.streams
        books = self.header.codebook_sizes
        raw = self._section("tables")
        tables: list[Table] = []
        with within("section 'tables'"):
            numbers = codec.numbers_from_bytes(raw)
            sharing = sum(e.size for e, s in zip(entries, streams, strict=True) if not s.own_table)
            shared, at = Table.read(numbers, 0, max(books), sharing) if sharing else (None, 0)
            for entry, stream, division in zip(entries, streams, self.header.divisions, strict=True):
                table = shared
                if stream.own_table:
                    with within(f"tensor {entry.name!r}"):
                        alphabet = max(books[book] for book in division.codebooks)
                        table, at = Table.read(numbers, at, alphabet, entry.size)
                assert table is not None  # sharing is not zero if any tensor has no own table
                tables.append(table)
            if at != len(numbers):
                raise FileError(f"{len(numbers) - at:,} numbers are left over after the last table")
        self._tables_read = tables
        return tables

    def _stream(self, file: BinaryIO, position: int) -> bytes:
        stream = self.header.streams[position]
        with within(f"tensor {self.header.layout.entries[position].name!r}"):
            return _read(file, self._stream_starts[position], stream.size, stream.crc32)

    def _decoded(self, stream: bytes, position: int, tables: Sequence[Table]) -> codec.Integers:
        entry = self.header.layout.entries[position]
        books = np.array(self.header.codebook_sizes)
        dtype = torch.empty(0, dtype=index_dtype(int(books.max()))).numpy().dtype
        with within(f"tensor {entry.name!r}"):
            found = codec.decode(stream, tables[position], entry.size, dtype)
            check_range(found, entry.shape, self.header.divisions[position], books)
        return found

    def _with_posterior(self, found: Compressed) -> Compressed:
        kind = self.header.posterior
        raw = self._section("posterior")
        with within("section 'posterior'"):
            if kind is Posterior.CENTRE:
                sigma = tensor_of(raw, found.layout.dtype, (-1,))
                if sigma.numel() != sum(self.header.codebook_sizes):
                    raise FileError(f"there are {sigma.numel():,} sigmas, not one for each codebook value")
                check_sigma(sigma)
                books = tuple(part.clone() for part in sigma.split(list(self.header.codebook_sizes)))
                return replace(found, centre_sigma=books)
            if kind is Posterior.WEIGHT:
                return replace(found, weight_sigma=sigmacodec.decode(found, raw))
            if raw:
                raise FileError("it has bytes where the header says that there is no posterior")
            return found


def _header_block(prefix: bytes, file: BinaryIO, file_bytes: int) -> tuple[int, bytes]:
    if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
        raise FileError("this is not a .pwfn file")
    _, version, flags, size, raw_size, crc32 = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise FileError(f"it has version {version} of the format, known here is {VERSION}: use a newer pwfn")
    if flags != 0:
        raise FileError(f"it has flags {flags:#06x} that are not known here: use a newer pwfn")
    if max(size, raw_size) > HEADER_LIMIT:
        raise FileError(f"the header claims {max(size, raw_size):,} bytes: 2^24 are allowed")
    if size > file_bytes - _PREFIX.size:
        raise FileError(f"the header claims {size:,} bytes, the file has {file_bytes:,}: it is truncated")
    with within("header"):
        return raw_size, _read(file, _PREFIX.size, size, crc32)


def _read(file: BinaryIO, start: int, size: int, crc32: int) -> bytes:
    file.seek(start)
    block = file.read(size)
    if len(block) != size:
        raise FileError(f"it is cut off after {len(block):,} of {size:,} bytes")
    if zlib.crc32(block) != crc32:
        raise FileError("it is damaged: its checksum does not match")
    return block


def _posterior_bytes(compressed: Compressed, kind: Posterior) -> bytes:
    if kind is Posterior.NONE:
        return b""
    if kind is Posterior.WEIGHT:
        return sigmacodec.encode(compressed)
    sigmas = compressed.centre_sigmas()
    assert sigmas is not None  # checked before
    return b"".join(bytes_of(sigma) for sigma in sigmas)


def _squeezed(block: bytes) -> bytes:
    return codec.squeeze(block) if block else b""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name before every error, and turns the system's into ours."""
    try:
        yield
    except FileError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise FileError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error


def loads(data: bytes) -> Compressed:
    """Temporary."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pwfn"
        path.write_bytes(data)
        return load(path)
