"""Integers to bytes and back: entropy coding with integer frequency tables, and byte compression.

The coder is constriction's ANS coder (24 bits of precision, 32-bit words); a model is a table of
integer frequencies. A table knows how many symbols it describes, so that a count which a file
claims can be checked before anything of that size is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import constriction
import numpy as np
import zstandard
from numpy.typing import DTypeLike, NDArray

from pwfn.errors import FileError

Integers: TypeAlias = NDArray[np.integer]

MOST_NUMBER = 2**48
"""Largest number of weights, bytes or anything else that is counted."""

WORST_RATIO = 1024
"""A decompressed block is at most this many times its stored size, or 1 MiB."""

_SMALL_BLOCK = 2**20
_NUMBER_BYTES = 7  # of the largest number in LEB128
_ROUNDS = 1000  # of choosing tables; far fewer are needed
_STEP = 2**16  # symbols decoded at a time: they stay in the processor's cache until they are looked up


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
        return cls.of_counts(counts_of(symbols, alphabet))

    @classmethod
    def of_counts(cls, counts: Integers) -> Table:
        """From how often each symbol 0, 1, 2, … occurs."""
        present = np.flatnonzero(counts)
        return cls(present.astype(np.int32), counts[present].astype(np.int64))

    @cached_property
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
    def read(cls, numbers: NDArray[np.int64], start: int, alphabet: int, total: int) -> tuple[Table, int]:
        """The table that begins at ``start`` of a list of numbers, and where it ends.

        >>> Table.read(np.array([9, 2, 1, 1, 1, 2]), 1, alphabet=5, total=3)[0].symbols.tolist()
        [1, 3]
        """
        size = int(numbers[start]) if start < len(numbers) else 0
        if not 0 < size <= alphabet:
            raise FileError(f"a frequency table has {size:,} symbols, its codebook {alphabet:,} values")
        stop = start + 1 + 2 * size
        if stop > len(numbers):
            raise FileError(f"a frequency table of {size:,} symbols is cut off")
        gaps, counts = numbers[start + 1 : stop : 2], numbers[start + 2 : stop : 2]
        # In floating point, where a forged sum cannot wrap around to the right one; below 2^53 it is exact.
        if int(gaps.max()) >= alphabet or size + float(gaps.sum(dtype=np.float64)) > alphabet:
            raise FileError(f"a frequency table has a symbol beyond the {alphabet:,} values of its codebook")
        counted = float(counts.sum(dtype=np.float64))
        if int(counts.min()) < 1 or counted != total:
            raise FileError(
                f"a frequency table counts {counted:,.0f} weights or some symbol never: "
                f"it must add up to {total:,}"
            )
        return cls((np.cumsum(gaps + 1) - 1).astype(np.int32), counts.copy()), stop

    @cached_property
    def model(self) -> constriction.stream.model.Categorical:
        """The coder's model: each symbol's place among those present, with its share as probability."""
        return constriction.stream.model.Categorical(self.counts / self.total, perfect=False)


def counts_of(symbols: Integers, alphabet: int = 0) -> NDArray[np.int64]:
    """How often each symbol 0, 1, 2, … occurs; as many as the alphabet has, or as there are."""
    flat = symbols.reshape(-1)
    # Piece by piece: bincount works on 64-bit numbers, and makes a copy of any other.
    pieces = [np.bincount(flat[i : i + _STEP]) for i in range(0, len(flat), _STEP)]
    counts = np.zeros(max([alphabet, *map(len, pieces)]), np.int64)
    for piece in pieces:
        counts[: len(piece)] += piece
    return counts


def encode(symbols: Integers, table: Table) -> bytes:
    """Symbols as little-endian 32-bit words of an ANS stream; none for a table of one symbol.

    >>> table = Table.of(np.array([0, 1, 0, 0]), 2)
    >>> decode(encode(np.array([0, 1, 0, 0]), table), table, 4).tolist()
    [0, 1, 0, 0]
    """
    if len(table.symbols) < 2 or symbols.size == 0:
        return b""
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(_ranks(symbols, table), table.model)
    return coder.get_compressed().astype("<u4").tobytes()


def decode(stream: bytes, table: Table, count: int, dtype: DTypeLike = np.int32) -> Integers:
    """The ``count`` symbols of a stream; an error if it does not end exactly there."""
    if len(table.symbols) == 1 or count == 0:
        if stream:
            raise FileError("the stream has bytes where the table leaves nothing to code")
        return np.full(count, table.symbols[0] if count else 0, dtype)
    symbols = table.symbols.astype(dtype)
    found = np.empty(count, dtype)
    coder = coder_of(stream)
    for start in range(0, count, _STEP):
        part = found[start : start + _STEP]
        np.take(symbols, coder.decode(table.model, len(part)), out=part, mode="clip")
    if not coder.is_empty():
        raise FileError("the stream does not end after its last symbol")
    return found


def coder_of(stream: bytes) -> constriction.stream.stack.AnsCoder:
    """A coder that is about to decode a stream."""
    if len(stream) % 4:
        raise FileError(f"the stream has {len(stream):,} bytes: whole words of 4 are needed")
    try:
        return constriction.stream.stack.AnsCoder(np.frombuffer(stream, "<u4").astype(np.uint32))
    except ValueError:
        raise FileError("the stream is not one of the coder's: its last word is zero") from None


def _ranks(symbols: Integers, table: Table) -> NDArray[np.int32]:
    """Each symbol's place among those of the table."""
    flat = symbols.reshape(-1)
    if len(table.symbols) == int(table.symbols[-1]) + 1:  # none is absent: each is its own place
        return flat.astype(np.int32)
    place = np.zeros(int(table.symbols[-1]) + 1, np.int32)
    place[table.symbols] = np.arange(len(table.symbols), dtype=np.int32)
    return place[flat]


def squeeze(raw: bytes, ratio: int = WORST_RATIO) -> bytes:
    """Bytes, compressed; or as they are where that is not smaller (a first byte tells which).

    >>> unsqueeze(squeeze(b"abc" * 100), 300) == b"abc" * 100
    True
    """
    packed = zstandard.ZstdCompressor(level=19).compress(raw)
    if len(packed) < len(raw) <= max(_SMALL_BLOCK, ratio * len(packed)):
        return b"\x01" + packed
    return b"\x00" + raw


def unsqueeze(block: bytes, size: int, ratio: int = WORST_RATIO) -> bytes:
    """The ``size`` bytes of a block; the size is checked before anything is allocated."""
    kind, body = block[:1], block[1:]
    if kind == b"\x00":
        if len(body) != size:
            raise FileError(f"the block holds {len(body):,} bytes, {size:,} are expected")
        return body
    if kind != b"\x01":
        raise FileError(f"the block is of unknown kind {kind.hex() or 'none'}: allowed are 00 and 01")
    if size > max(_SMALL_BLOCK, ratio * len(body)):
        raise FileError(
            f"the block of {len(body):,} bytes claims to hold {size:,}: that is out of proportion"
        )
    try:
        if zstandard.frame_content_size(body) != size:
            raise FileError(f"the block does not hold the {size:,} bytes that are expected")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FileError(f"the block cannot be decompressed: {error}") from None
    if len(raw) != size:
        raise FileError(f"the block holds {len(raw):,} bytes, {size:,} are expected")
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


def numbers_from_bytes(raw: bytes) -> NDArray[np.int64]:
    """What ``numbers_to_bytes`` was given.

    >>> numbers_from_bytes(bytes.fromhex("05ac02")).tolist()
    [5, 300]
    """
    coded = np.frombuffer(raw, np.uint8)
    stops = np.flatnonzero(coded < 128) + 1
    if len(coded) and (not len(stops) or stops[-1] != len(coded)):
        raise FileError("the last number is cut off")
    lengths = np.diff(stops, prepend=0)
    if len(stops) == 0:
        return np.empty(0, np.int64)
    if lengths.max() > _NUMBER_BYTES:
        raise FileError(f"a number has {lengths.max():,} bytes: {_NUMBER_BYTES} are allowed")
    place = np.arange(len(coded)) - np.repeat(stops - lengths, lengths)
    numbers = np.add.reduceat((coded & 127).astype(np.int64) << (7 * place), stops - lengths)
    if numbers.max() > MOST_NUMBER:
        raise FileError(f"a number is {numbers.max():,}: at most 2^48 is allowed")
    return numbers


def choose_tables(counts: Sequence[Integers]) -> tuple[Table | None, list[Table | None]]:
    """The shared table, and for each tensor its own where that is cheaper, its bytes counted in.

    First all tensors share one table. Then, in rounds, those leave that gain most by a table of
    their own, and those come back that the shared table, which describes just its users, would now
    serve better. No step makes the whole larger, so the streams and tables are never more than the
    pooled entropy and one table.
    """
    tables = [Table.of_counts(tensor) for tensor in counts]
    own_bits = np.array(
        [t.ideal_bits(n) + 8 * len(t.to_bytes()) for t, n in zip(tables, counts, strict=True)]
    )
    rows = np.zeros((len(counts), max(len(tensor) for tensor in counts)))
    for row, tensor in zip(rows, counts, strict=True):
        row[: len(tensor)] = tensor
    sharing = np.full(len(counts), True)
    shared = rows.sum(0)
    for _ in range(_ROUNDS):
        gain = _bits(rows, shared) - own_bits
        joining = ~sharing & (gain <= 0)
        leaving = np.flatnonzero(sharing & (gain > 0))
        most = max(1, int(sharing.sum()) // 16)
        leaving = leaving[np.argsort(-gain[leaving], kind="stable")[:most]]
        if not len(leaving) and not joining.any():
            break
        sharing |= joining
        sharing[leaving] = False
        if not sharing.any():
            return None, list(tables)
        shared = rows[sharing].sum(0)
    chosen = [None if together else table for together, table in zip(sharing, tables, strict=True)]
    return Table.of_counts(shared), chosen


def _bits(rows: NDArray[np.float64], shared: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits that each row of counts costs under the shares of ``shared``; infinite where one is 0."""
    absent = shared == 0
    shares = np.where(absent, 1.0, shared / shared.sum())
    return np.where(rows @ absent > 0, np.inf, -(rows @ np.log2(shares)))
