"""Integers to bytes and back: entropy coding with integer frequency tables, and byte compression.

The coder is constriction's ANS coder (24 bits of precision, 32-bit words); a model is a table of
integer frequencies. A table knows how many symbols it describes, so that a count which a file
claims can be checked before anything of that size is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import constriction
import numpy as np
import zstandard
from numpy.typing import NDArray

from pwfn.errors import FileError

Integers: TypeAlias = NDArray[np.integer]

MOST_SYMBOLS = 2**16
"""Largest alphabet of a table."""

_WORST_RATIO = 1024  # a decompressed block is at most this many times its stored size, or 1 MiB
_SMALL_BLOCK = 2**20


@dataclass(frozen=True)
class Table:
    """Which symbols occur, ascending, and how often each of them does."""

    symbols: NDArray[np.int32]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, symbols: Integers, alphabet: int) -> Table:
        """
        >>> Table.of(np.array([3, 1, 3]), alphabet=5).counts.tolist()
        [1, 2]
        """
        return cls.of_counts(np.bincount(symbols.reshape(-1), minlength=alphabet))

    @classmethod
    def of_counts(cls, counts: Integers) -> Table:
        """From how often each symbol 0, 1, 2, … occurs."""
        present = np.flatnonzero(counts)
        return cls(present.astype(np.int32), counts[present].astype(np.int64))

    @property
    def total(self) -> int:
        """How many symbols were counted."""
        return int(self.counts.sum())

    def ideal_bits(self, counts: Integers) -> float:
        """Bits that ``counts`` of each symbol cost under this table: ``-sum n log2 p``.

        Infinite where a symbol occurs that the table does not have.
        """
        known = np.zeros(max(len(counts), int(self.symbols[-1]) + 1 if len(self.symbols) else 0))
        known[self.symbols] = self.counts / max(self.total, 1)
        wanted = np.flatnonzero(counts)
        with np.errstate(divide="ignore"):
            return float(-(counts[wanted] * np.log2(known[wanted])).sum()) + 0.0

    def to_bytes(self) -> bytes:
        """Number of symbols, then for each the gap to the one before and its count; all LEB128."""
        gaps = np.diff(self.symbols, prepend=-1) - 1
        pairs = np.stack((gaps, self.counts), 1).reshape(-1).tolist()
        return numbers_to_bytes((len(self.symbols), *pairs))

    @classmethod
    def read(cls, stream: Iterator[int], alphabet: int) -> Table:
        """The next table of a stream of bytes."""
        size = read_number(stream)
        if not 0 < size <= alphabet:
            raise FileError(f"a frequency table has {size} symbols, its codebook {alphabet} values")
        pairs = [(read_number(stream), read_number(stream)) for _ in range(size)]
        symbols = np.cumsum([gap + 1 for gap, _ in pairs], dtype=np.int64) - 1
        counts = np.array([count for _, count in pairs], dtype=np.int64)
        if symbols[-1] >= alphabet or counts.min() < 1 or counts.max() > 2**48:
            raise FileError("a frequency table names a symbol or a count that cannot be")
        return cls(symbols.astype(np.int32), counts)

    def model(self) -> constriction.stream.model.Categorical:
        """The coder's model: each symbol's place among those present, with its share as probability."""
        return constriction.stream.model.Categorical(self.counts / self.counts.sum(), perfect=False)


def encode(symbols: Integers, table: Table) -> bytes:
    """Symbols as little-endian 32-bit words of an ANS stream; none for a table of one symbol.

    >>> table = Table.of(np.array([0, 1, 0, 0]), 2)
    >>> decode(encode(np.array([0, 1, 0, 0]), table), table, 4).tolist()
    [0, 1, 0, 0]
    """
    if len(table.symbols) < 2 or symbols.size == 0:
        return b""
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(_ranks(symbols, table), table.model())
    return coder.get_compressed().astype("<u4").tobytes()


def decode(stream: bytes, table: Table, count: int) -> NDArray[np.int32]:
    """The ``count`` symbols of a stream; an error if it does not end exactly there."""
    if len(table.symbols) == 1 or count == 0:
        if stream:
            raise FileError("a stream has bytes where the table leaves nothing to code")
        return np.full(count, table.symbols[0] if count else 0, np.int32)
    if len(stream) % 4:
        raise FileError(f"a stream has {len(stream)} bytes: whole words of 4 are needed")
    words = np.frombuffer(stream, "<u4").astype(np.uint32)
    try:
        coder = constriction.stream.stack.AnsCoder(words)
    except ValueError as error:
        raise FileError(f"a stream is not one of the coder's: {error}") from None
    ranks = coder.decode(table.model(), count)
    if not coder.is_empty():
        raise FileError("a stream does not end after its last symbol")
    return table.symbols[ranks]


def _ranks(symbols: Integers, table: Table) -> NDArray[np.int32]:
    """Each symbol's place among those of the table."""
    place = np.zeros(int(table.symbols[-1]) + 1, np.int32)
    place[table.symbols] = np.arange(len(table.symbols), dtype=np.int32)
    return place[symbols.reshape(-1)]


def squeeze(raw: bytes) -> bytes:
    """Bytes, compressed; or as they are where that is not smaller (a first byte tells which).

    >>> unsqueeze(squeeze(b"abc" * 100), 300) == b"abc" * 100
    True
    """
    packed = zstandard.ZstdCompressor(level=19).compress(raw)
    if len(packed) < len(raw) <= max(_SMALL_BLOCK, _WORST_RATIO * len(packed)):
        return b"\x01" + packed
    return b"\x00" + raw


def unsqueeze(block: bytes, size: int) -> bytes:
    """The ``size`` bytes of a block; the size is checked before anything is allocated."""
    kind, body = block[:1], block[1:]
    if kind == b"\x00":
        if len(body) != size:
            raise FileError(f"a block holds {len(body)} bytes, {size} are expected")
        return body
    if kind != b"\x01":
        raise FileError(f"a block is of unknown kind {kind!r}")
    if size > max(_SMALL_BLOCK, _WORST_RATIO * len(body)):
        raise FileError(f"a block of {len(body)} bytes claims to hold {size}: that is out of proportion")
    try:
        if zstandard.frame_content_size(body) != size:
            raise FileError(f"a block does not hold the {size} bytes that are expected")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FileError(f"a block cannot be decompressed: {error}") from None
    if len(raw) != size:
        raise FileError(f"a block holds {len(raw)} bytes, {size} are expected")
    return raw


def shuffled(raw: bytes, width: int) -> bytes:
    """All first bytes of the ``width``-byte numbers, then all second ones, …: easier to compress.

    >>> shuffled(b"a1b2", 2)
    b'ab12'
    """
    return np.frombuffer(raw, np.uint8).reshape(-1, width).T.tobytes()


def unshuffled(raw: bytes, width: int) -> bytes:
    """What ``shuffled`` was given."""
    return np.frombuffer(raw, np.uint8).reshape(width, -1).T.tobytes()


def numbers_to_bytes(numbers: Iterable[int]) -> bytes:
    """Whole numbers in LEB128: seven bits a byte, lowest first, the top bit set on all but the last.

    >>> numbers_to_bytes([5, 300]).hex()
    '05ac02'
    """
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def read_number(stream: Iterator[int]) -> int:
    """The next number of a stream of LEB128 bytes."""
    number = shift = 0
    for byte in stream:
        number |= (byte & 127) << shift
        if byte < 128:
            return number
        shift += 7
        if shift > 56:
            break
    raise FileError("a number in a frequency table is cut off or too large")


def choose_tables(counts: Sequence[Integers]) -> tuple[Table | None, list[Table | None]]:
    """The shared table, and for each tensor its own where that is cheaper, its bytes counted in.

    The choice is made against all tensors in one pool; the shared table then describes just those
    that use it, which can only make it better. So the streams and tables are never more than the
    pooled entropy and one table.
    """
    alphabet = max(len(tensor) for tensor in counts)
    padded = [np.pad(tensor, (0, alphabet - len(tensor))) for tensor in counts]
    pool = Table.of_counts(np.sum(padded, axis=0))
    own: list[Table | None] = []
    for tensor in padded:
        table = Table.of_counts(tensor)
        cost = table.ideal_bits(tensor) + 8 * len(table.to_bytes())
        own.append(table if cost < pool.ideal_bits(tensor) else None)
    sharing = [tensor for tensor, table in zip(padded, own, strict=True) if table is None]
    return Table.of_counts(np.sum(sharing, axis=0)) if sharing else None, own
