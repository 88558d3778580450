"""Integers and tensors to bytes and back: entropy coding with integer frequency tables, and compression.

The coder is constriction's ANS coder (24 bits of precision, 32-bit words); a model is a table of integer
frequencies. A table states how many symbols it describes, so a count in a file can be checked before memory
of that size is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import constriction
import numpy as np
import torch
import zstandard
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import native

Integers: TypeAlias = NDArray[np.integer]

MOST_NUMBER = 2**48
"""Largest number of weights, bytes or anything else that is counted."""

WORST_RATIO = 1024
"""A decompressed block has at most this many times its stored size, or 1 MiB."""

_SMALL_BLOCK = 2**20
_NUMBER_BYTES = 7  # of the largest number in LEB128
_MOST_INTERVALS = 2**20
_ROUNDS = 1000  # of choosing tables; far fewer are needed
_STEP = 2**16  # symbols decoded at a time: they stay in the processor's cache until they are looked up


@dataclass(frozen=True)
class Table:
    """Which symbols occur, ascending, and how often."""

    symbols: NDArray[np.int32]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, counts: Integers) -> Table:
        """From the number of times that each symbol 0, 1, 2, … occurs.

        >>> Table.of(np.array([0, 1, 0, 2])).symbols.tolist()
        [1, 3]
        """
        present = np.flatnonzero(counts)
        return cls(present.astype(np.int32), counts[present].astype(np.int64))

    @cached_property
    def total(self) -> int:
        """Number of symbols counted."""
        return int(self.counts.sum())

    def ideal_bits(self, counts: Integers) -> float:
        """Bits that these counts cost under this table: ``-sum n log2 p``, infinite for an absent symbol."""
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
        """The table that begins at ``start`` of a list of numbers, and where it ends."""
        size = int(numbers[start]) if start < len(numbers) else 0
        if not 0 < size <= alphabet:
            raise FileError(f"a frequency table has {size:,} symbols, its codebook {alphabet:,} values")
        stop = start + 1 + 2 * size
        if stop > len(numbers):
            raise FileError(f"a frequency table of {size:,} symbols is cut off")
        gaps, counts = numbers[start + 1 : stop : 2], numbers[start + 2 : stop : 2]
        # Floating-point sums, because a forged integer sum could wrap around; below 2^53 they are exact.
        if int(gaps.max()) >= alphabet or size + float(gaps.sum(dtype=np.float64)) > alphabet:
            raise FileError(f"a frequency table has a symbol beyond the {alphabet:,} values of its codebook")
        counted = float(counts.sum(dtype=np.float64))
        if int(counts.min()) < 1 or counted != total:
            raise FileError(f"the counts of a frequency table must be positive and add up to {total:,}")
        return cls((np.cumsum(gaps + 1) - 1).astype(np.int32), counts.copy()), stop

    @cached_property
    def model(self) -> constriction.stream.model.Categorical:
        """The model of the coder: the rank of each symbol, with its share as probability."""
        return constriction.stream.model.Categorical(self.counts / self.total, perfect=False)

    @cached_property
    def intervals(self) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """What the model computes of 2^24: where the interval of each rank starts, and the rank at each 2^12.

        Every rank has at least one; the rest is shared out by probability, in float64, as constriction does.
        """
        size = len(self.counts)
        # accumulate adds one by one, as constriction does; sum would add in pairs.
        upto = np.add.accumulate(np.append(0.0, self.counts / self.total))
        left = (upto * ((2**24 - size) / upto[-1])).astype(np.uint32) + np.arange(size + 1, dtype=np.uint32)
        left[-1] = 2**24
        first = np.searchsorted(left, np.arange(0, 2**24, 2**12), side="right") - 1
        return left, first.astype(np.int32)


def counts_of(symbols: Integers) -> NDArray[np.int64]:
    """How often each symbol 0, 1, 2, … occurs; like ``np.bincount``, without a 64-bit copy of the symbols."""
    flat = symbols.reshape(-1)
    pieces = [np.bincount(flat[i : i + _STEP]) for i in range(0, len(flat), _STEP)]
    counts = np.zeros(max(map(len, pieces), default=0), np.int64)
    for piece in pieces:
        counts[: len(piece)] += piece
    return counts


def encode(symbols: Integers, table: Table) -> bytes:
    """Symbols as little-endian 32-bit words of an ANS stream; empty for a table of one symbol.

    >>> table = Table.of(np.array([3, 1]))
    >>> decode(encode(np.array([0, 1, 0, 0]), table), table, 4).tolist()
    [0, 1, 0, 0]
    """
    if len(table.symbols) < 2 or symbols.size == 0:
        return b""
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(_ranks(symbols, table), table.model)
    return coder.get_compressed().astype("<u4").tobytes()


def decode(stream: bytes, table: Table, count: int, dtype: DTypeLike = np.int32) -> Integers:
    """The ``count`` symbols of a stream, which must end exactly there."""
    if len(table.symbols) == 1 or count == 0:
        if stream:
            raise FileError("the stream has bytes where the table leaves nothing to code")
        return np.full(count, table.symbols[0] if count else 0, dtype)
    found = np.empty(count, dtype)
    lib = native.library()
    if lib is not None and found.itemsize <= 4 and len(table.symbols) < _MOST_INTERVALS:
        words = coder_words(stream)
        left, first = table.intervals
        where = (native.address(a) for a in (left, first, table.symbols))
        ended = lib.pwfn_ans_decode(
            native.address(words), len(words), *where, count, native.address(found), found.itemsize
        )
    else:
        symbols, coder = table.symbols.astype(dtype), coder_of(stream)
        for start in range(0, count, _STEP):
            part = found[start : start + _STEP]
            np.take(symbols, coder.decode(table.model, len(part)), out=part, mode="clip")
        ended = coder.is_empty()
    if not ended:
        raise FileError("the stream does not end after its last symbol")
    return found


def coder_of(stream: bytes) -> constriction.stream.stack.AnsCoder:
    """A coder that is about to decode a stream."""
    return constriction.stream.stack.AnsCoder(coder_words(stream))


def coder_words(stream: bytes) -> NDArray[np.uint32]:
    """The words of a stream."""
    if len(stream) % 4:
        raise FileError(f"the stream has {len(stream):,} bytes: a multiple of 4 is needed")
    words = np.frombuffer(stream, "<u4").astype(np.uint32)
    if len(words) and words[-1] == 0:
        raise FileError("the stream was not made by the coder: its last word is zero")
    return words


def _ranks(symbols: Integers, table: Table) -> NDArray[np.int32]:
    flat = symbols.reshape(-1)
    if len(table.symbols) == int(table.symbols[-1]) + 1:  # none is absent: each is its own rank
        return flat.astype(np.int32)
    rank = np.zeros(int(table.symbols[-1]) + 1, np.int32)
    rank[table.symbols] = np.arange(len(table.symbols), dtype=np.int32)
    return rank[flat]


def squeeze(raw: bytes, ratio: int = WORST_RATIO) -> bytes:
    """A block: a byte that says whether it is compressed, then the bytes; compressed where that is smaller.

    >>> unsqueeze(squeeze(b"abc" * 100), 300) == b"abc" * 100
    True
    """
    packed = zstandard.ZstdCompressor(level=19).compress(raw)
    if len(packed) < len(raw) <= max(_SMALL_BLOCK, ratio * len(packed)):
        return b"\x01" + packed
    return b"\x00" + raw


def unsqueeze(block: bytes, size: int, ratio: int = WORST_RATIO) -> bytes:
    """The ``size`` bytes of a block; the size is checked before memory is allocated."""
    kind, body = block[:1], block[1:]
    if kind == b"\x00":
        if len(body) != size:
            raise FileError(f"the block holds {len(body):,} bytes instead of {size:,}")
        return body
    if kind != b"\x01":
        raise FileError(f"the block is of unknown kind {kind.hex() or 'none'}: allowed are 00 and 01")
    if size > max(_SMALL_BLOCK, ratio * len(body)):
        raise FileError(f"the block of {len(body):,} bytes claims to hold {size:,}: that is too many")
    try:
        if zstandard.frame_content_size(body) != size:
            raise FileError(f"the block does not hold {size:,} bytes")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FileError(f"the block cannot be decompressed: {error}") from None
    if len(raw) != size:
        raise FileError(f"the block holds {len(raw):,} bytes instead of {size:,}")
    return raw


def shuffled(raw: bytes, width: int) -> bytes:
    """All first bytes of the ``width``-byte numbers, then all second ones, …: easier to compress.

    >>> shuffled(b"a1b2", 2)
    b'ab12'
    """
    return np.frombuffer(raw, np.uint8).reshape(-1, width).T.tobytes()


def unshuffled(raw: bytes, width: int) -> bytes:
    """The inverse of :func:`shuffled`."""
    return np.frombuffer(raw, np.uint8).reshape(width, -1).T.tobytes()


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a dense tensor in row-major order."""
    if tensor.layout != torch.strided:
        raise FileError(f"a tensor is stored as {tensor.layout}: make it dense first")
    if tensor.numel() == 0:  # its strides may be such that it cannot be viewed
        return b""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A new tensor from its bytes."""
    if len(raw) % dtype.itemsize:
        raise FileError(f"{len(raw)} bytes are not a whole number of {dtype}")
    # A copy, because frombuffer would share memory that cannot be written.
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if dtype is torch.bool and bool((flat.view(torch.uint8) > 1).any()):
        raise FileError("a boolean is neither 0 nor 1")
    return flat.view(shape)


def numbers_to_bytes(numbers: Iterable[int]) -> bytes:
    """Whole numbers in LEB128: seven bits per byte, lowest first, the top bit set on all but the last.

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
    """The inverse of :func:`numbers_to_bytes`."""
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


def choose_tables(counts: Sequence[Integers]) -> tuple[Table | None, list[Table]]:
    """The shared table, and for each tensor that or its own, which is cheaper, table bytes included.

    First all tensors share one table. Then, in rounds, tensors that gain most by their own table leave, and
    tensors return that the shared table, which describes only its users, would now serve better. No step
    makes the whole larger, so streams and tables never exceed the pooled entropy and one table.
    """
    tables = [Table.of(tensor) for tensor in counts]
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
            return None, tables
        shared = rows[sharing].sum(0)
    common = Table.of(shared)
    return common, [common if together else own for together, own in zip(sharing, tables, strict=True)]


def _bits(rows: NDArray[np.float64], shared: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits that each row of counts costs under the shares of ``shared``; infinite where one is 0."""
    absent = shared == 0
    shares = np.where(absent, 1.0, shared / shared.sum())
    return np.where(rows @ absent > 0, np.inf, -(rows @ np.log2(shares)))
