"""Bits to bytes and back: whole numbers, Huffman codes, single bits. Every code follows from integers."""

from __future__ import annotations

import heapq
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pwfn.errors import FileError

Integers: TypeAlias = NDArray[np.int64]

MOST_SYMBOL = 2**15 - 1

CODE_BITS = 15
"""Bits of the longest code."""

_NUMBER_BITS = 97  # of the largest number, 2^49 - 2
_STEP = 2**14  # symbols decoded at a time


def pack(*bits: Integers | str) -> bytes:
    """Bits to bytes, the first one at the top; zeros fill the last byte."""
    parts = [np.frombuffer(part.encode(), np.uint8) & 1 if isinstance(part, str) else part for part in bits]
    return np.packbits(np.concatenate(parts).astype(bool)).tobytes()


def gamma(*numbers: int) -> str:
    """Elias gamma codes: the bits of each number plus one, behind as many zeros as follow its first bit.

    >>> gamma(0, 4)
    '100101'
    """
    return "".join(f"{n + 1:0{2 * (n + 1).bit_length() - 1}b}" for n in numbers)


def huffman(symbols: Integers) -> tuple[str, Integers]:
    """Symbols from 0 to ``MOST_SYMBOL``: a table of the lengths of their codes, then the codes.

    >>> Bits(pack(*huffman(np.array([7, 2, 7])))).symbols(3).tolist()
    [7, 2, 7]
    """
    present, lengths, table = _table(np.bincount(symbols))
    order = np.argsort(lengths, kind="stable")
    spans = 1 << (CODE_BITS - lengths[order])
    codes = np.zeros((2, present[-1] + 1), np.int64)  # each with its length, shifted to the top of 15 bits
    codes[:, present[order]] = np.cumsum(spans) - spans, lengths[order]
    code, length = codes[:, symbols, None]
    places = np.arange(CODE_BITS)
    return table, (code >> (CODE_BITS - 1 - places) & 1)[places < length]


def huffman_bits(symbols: Integers) -> int:
    """How many bits :func:`huffman` gives."""
    counts = np.bincount(symbols)
    present, lengths, table = _table(counts)
    return len(table) + int(counts[present] @ lengths)


class Bits:
    """Bits and bytes that are read from the front; a :class:`FileError` where they end too early."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.place = raw, 0

    def skip(self, count: int) -> None:
        """Go on by so many bits."""
        self.place += count
        if self.place > 8 * len(self.raw):
            raise FileError(f"it ends {-(-self.place // 8) - len(self.raw):,} bytes too early")

    def align(self) -> None:
        """Go on to the next whole byte."""
        if self.field(-self.place % 8):
            raise FileError("a bit that only fills a byte is not zero")

    def take(self, size: int) -> bytes:
        """Whole bytes."""
        start = self.place // 8
        self.skip(8 * size)
        return self.raw[start : start + size]

    def field(self, width: int) -> int:
        """A number of a fixed width, at most 97 bits."""
        found = self._ahead() >> (_NUMBER_BITS - width)
        self.skip(width)
        return found

    def number(self, most: int) -> int:
        """A number that :func:`gamma` wrote."""
        zeros = _NUMBER_BITS - self._ahead().bit_length()
        number = self.field(min(2 * zeros + 1, _NUMBER_BITS)) - 1
        if not 0 <= number <= most:
            raise FileError(f"a number is not from 0 to {most:,}")
        return number

    def single(self, count: int) -> Integers:
        """Single bits."""
        start, gone = divmod(self.place, 8)
        self.skip(count)
        part = np.frombuffer(self.raw[start : -(-self.place // 8)], np.uint8)
        return np.unpackbits(part)[gone : gone + count].astype(np.int64)

    def symbols(self, count: int) -> Integers:
        """Symbols that :func:`huffman` wrote."""
        symbols, lengths = self._read_table()
        if len(symbols) == 1:
            return np.full(count, symbols[0])
        order = np.argsort(lengths, kind="stable")
        rank = np.repeat(order, 1 << (CODE_BITS - lengths[order]))  # of any 15 bits
        found = np.empty(count, np.int64)
        for start in range(0, count, _STEP):
            part = found[start : start + _STEP]
            ranks = rank[self._windows(len(part))]
            steps, places, place = lengths[ranks].tolist(), [], 0
            for _ in range(len(part)):
                places.append(place)
                place += steps[place]
            part[:] = symbols[ranks[places]]
            self.skip(place)
        return found

    def _read_table(self) -> tuple[Integers, Integers]:
        """Symbols, ascending, and the lengths of their codes."""
        symbols, lengths = [-1], []
        for _ in range(self.number(MOST_SYMBOL) + 1):
            symbols.append(symbols[-1] + 1 + self.number(MOST_SYMBOL))
            lengths.append(self.field(4))
        if symbols[-1] > MOST_SYMBOL or sum(2 ** (CODE_BITS - n) for n in lengths) != 2**CODE_BITS:
            raise FileError("the codes of a table are incomplete, or a symbol is too large")
        return np.array(symbols[1:]), np.array(lengths)

    def _ahead(self) -> int:
        """The next 97 bits; zeros follow the last byte."""
        start, gone = divmod(self.place, 8)
        ahead = int.from_bytes(self.raw[start : start + 13].ljust(13, b"\x00"), "big")
        return (ahead >> (7 - gone)) % 2**_NUMBER_BITS

    def _windows(self, count: int) -> Integers:
        """The next 15 bits from every place on that so many codes may reach; zeros follow the last byte."""
        start, gone = divmod(self.place, 8)
        size = (count * CODE_BITS + 7) // 8 + 3
        part = np.frombuffer(self.raw[start : start + size].ljust(size, b"\x00"), np.uint8).astype(np.int64)
        three = part[:-2] << 16 | part[1:-1] << 8 | part[2:]
        windows: Integers = three[:, None] >> np.arange(9, 1, -1) & (2**CODE_BITS - 1)
        return windows.reshape(-1)[gone:]


def _table(counts: Integers) -> tuple[Integers, Integers, str]:
    """The symbols that occur, the lengths of their codes, and both as bits."""
    present = np.flatnonzero(counts)
    lengths = code_lengths(counts[present].tolist())
    gaps = (np.diff(present, prepend=-1) - 1).tolist()
    pairs = (f"{gamma(gap)}{length:04b}" for gap, length in zip(gaps, lengths, strict=True))
    return present, np.array(lengths), gamma(len(present) - 1) + "".join(pairs)


def code_lengths(counts: list[int]) -> list[int]:
    """Bits of each symbol's Huffman code; from flatter counts where one would have more than 15.

    >>> code_lengths([5, 1, 2])
    [1, 2, 2]
    """
    parents = [0] * (2 * len(counts) - 1)  # a tree of the symbols and the pairs that are joined
    heap = [(count, node) for node, count in enumerate(counts)]
    heapq.heapify(heap)
    for pair in range(len(counts), len(parents)):
        (a, left), (b, right) = heapq.heappop(heap), heapq.heappop(heap)
        parents[left] = parents[right] = pair
        heapq.heappush(heap, (a + b, pair))
    depths = [0] * len(parents)
    for node in reversed(range(len(parents) - 1)):
        depths[node] = depths[parents[node]] + 1
    lengths = depths[: len(counts)]
    return lengths if max(lengths) <= CODE_BITS else code_lengths([(n + 1) // 2 for n in counts])
