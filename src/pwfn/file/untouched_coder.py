"""The tensors that are not compressed as bytes, exact: section ``untouched`` of ``docs/format.md``.

Tensors of one type whose names end alike (all scales, all shifts) form a group. A floating-point number is
cut in two. Its *head*, the exponent relative to a base of its tensor, perhaps with the sign and the first
bits of the mantissa, has a Huffman code. Its *tail*, the other bits of the mantissa that the group uses, is
stored as it is; rounded numbers use few. Every code follows from integers alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder
from pwfn.file.header import Stored

Ints: TypeAlias = NDArray[np.int64]

_PLAIN, _CONSTANT, _CODED = range(3)
_FIELDS = {  # bytes of a number, bits of its exponent and of its mantissa
    torch.float16: (2, 5, 10),
    torch.bfloat16: (2, 8, 7),
    torch.float32: (4, 8, 23),
    torch.float64: (8, 11, 52),
    torch.complex64: (4, 8, 23),
    torch.complex128: (8, 11, 52),
}
_FREE_BYTES = 2**20
_MOST_CODED = 2**20  # numbers in a coded group; zstd decodes larger ones faster
_MOST_HEAD = 3  # bits of the mantissa in a head
_MOST_SYMBOL = 2**24
_CODE_BITS = 15  # of the longest code
_OFFSET = 2**12  # added to the smallest exponent, which may be negative
_STEP = 2**14  # symbols decoded at a time


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as bytes; :func:`decode` returns every bit of them.

    >>> tensors = {"a.scale": torch.ones(9), "b.scale": torch.tensor([1.5, -0.0])}
    >>> wanted = [Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    >>> decode(encode(tensors), wanted)["b.scale"]
    tensor([1.5000, -0.0000])
    """
    wanted = [Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    groups = [[coder.bytes_of(tensors[item.name]) for item in group] for group in _groups(wanted)]
    forms = (_smallest(raw, group[0].dtype) for raw, group in zip(groups, _groups(wanted), strict=True))
    return b"".join(forms).ljust(_fewest_bytes(wanted), b"\x00")


def decode(raw: bytes, wanted: Sequence[Stored]) -> dict[str, Tensor]:
    """The tensors, given their names, shapes and types; sizes are checked before memory is allocated."""
    size = sum(item.size for item in wanted)
    if len(raw) < _fewest_bytes(wanted):
        raise FileError(f"{len(raw):,} bytes claim to hold tensors of {size:,}: that is too many")
    source, found = _Source(raw), {}
    for group in _groups(wanted):
        plain, start = source.group(group), 0
        for item in group:
            found[item.name] = coder.tensor_of(plain[start : start + item.size], item.dtype, item.shape)
            start += item.size
    if source.take(len(raw) - source.at).strip(b"\x00"):
        raise FileError("there are bytes after the last number")
    return {item.name: found[item.name] if item.size else _empty(item) for item in wanted}


def _empty(item: Stored) -> Tensor:
    return torch.empty(item.shape, dtype=item.dtype)


def _groups(wanted: Sequence[Stored]) -> list[list[Stored]]:
    """Tensors of one type, not empty, whose names agree after the last dot; ordered by their first."""
    groups: dict[tuple[str, torch.dtype], list[Stored]] = {}
    for item in wanted:
        if item.size:
            groups.setdefault((item.name.rpartition(".")[2], item.dtype), []).append(item)
    return list(groups.values())


def _fewest_bytes(wanted: Sequence[Stored]) -> int:
    """A reader refuses a section that claims more than this ratio; constants are padded to it."""
    size = sum(item.size for item in wanted)
    return 0 if size <= _FREE_BYTES else -(-size // coder.WORST_RATIO)


def _smallest(parts: list[bytes], dtype: torch.dtype) -> bytes:
    plain, width = b"".join(parts), dtype.itemsize
    if plain == plain[:width] * (len(plain) // width):
        return bytes([_CONSTANT]) + plain[:width]
    block = coder.squeeze(coder.shuffled(plain, width))
    forms = [bytes([_PLAIN]) + coder.numbers_to_bytes([len(block)]) + block]
    if dtype in _FIELDS and len(plain) <= _MOST_CODED * _FIELDS[dtype][0]:
        forms += _coded(plain, [len(part) for part in parts], dtype)
    return min(forms, key=len)


def _coded(plain: bytes, sizes: list[int], dtype: torch.dtype) -> Iterator[bytes]:
    """The coded form, once for each choice of bases, place of the sign and bits of the head."""
    width, exponent_bits, fraction_bits = _FIELDS[dtype]
    bits = np.frombuffer(plain, f"<u{width}").astype(np.uint64)
    mantissa = (bits & np.uint64(2**fraction_bits - 1)).astype(np.int64)
    exponent = (bits >> np.uint64(fraction_bits)).astype(np.int64)
    sign, exponent = exponent >> exponent_bits, exponent & (2**exponent_bits - 1)
    lowest = np.frexp((mantissa & -mantissa).astype(np.float64))[1] - 1  # place of the last bit that is set
    used = np.where(mantissa == 0, 0, fraction_bits - lowest)
    most = int(used.max())
    ends = np.cumsum(sizes)[:-1] // width
    medians = [int(np.median(part)) for part in np.split(exponent, ends)]
    last = np.where(used > 0, exponent - used, 2**exponent_bits)  # no bit is used at this exponent
    lows = [int(part.min()) for part in np.split(last, ends)]
    for chosen in ([0] * len(sizes), medians, lows):
        bases = np.array(chosen) - min(chosen)
        steps = exponent - np.repeat(bases, np.array(sizes) // width)
        start = int(steps.min())
        steps -= start
        floor = max(int((steps - used).min(initial=2**_CODE_BITS, where=used > 0)), -most)
        tail = np.clip(steps - floor, 0, most)
        for head, with_sign in product(range(min(_MOST_HEAD, most) + 1), (0, 1)):
            heads = (steps << head) | (mantissa >> (fraction_bits - head))
            planes = [mantissa[tail > i] >> (fraction_bits - 1 - i) & 1 for i in range(head, most)]
            facts = (2 * head + with_sign, most, floor + most, start + _OFFSET)
            yield b"".join(
                (
                    bytes([_CODED]) + coder.numbers_to_bytes(facts),
                    _huffman(bases),
                    _huffman(2 * heads + sign if with_sign else heads),
                    np.packbits(np.concatenate((sign[: 0 if with_sign else None], *planes)) > 0).tobytes(),
                )
            )


def _huffman(symbols: Ints) -> bytes:
    """The table (number of symbols; for each the gap to the one before and its bits), then the codes."""
    present, rank, counts = np.unique(symbols, return_inverse=True, return_counts=True)
    lengths = _code_lengths(counts.tolist())
    gaps = np.diff(present, prepend=-1) - 1
    table = coder.numbers_to_bytes([len(present), *(16 * gaps + lengths).tolist()])
    order = np.argsort(lengths, kind="stable")
    spans = 1 << (_CODE_BITS - lengths[order])
    codes = np.empty_like(lengths)  # shifted to the top of 15 bits
    codes[order] = np.cumsum(spans) - spans
    places = np.arange(_CODE_BITS)
    bits = codes[rank][:, None] >> (_CODE_BITS - 1 - places) & 1
    return table + np.packbits(bits[places < lengths[rank][:, None]] > 0).tobytes()


def _code_lengths(counts: list[int]) -> Ints:
    """Bits of each symbol's Huffman code; from flatter counts where one has more than 15.

    >>> _code_lengths([5, 1, 2]).tolist()
    [1, 2, 2]
    """
    lengths = np.zeros(len(counts), np.int64)
    heap = [(count, symbol, [symbol]) for symbol, count in enumerate(counts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, first, left), (b, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (a + b, first, left + right))
    return lengths if lengths.max() <= _CODE_BITS else _code_lengths([(n + 1) // 2 for n in counts])


class _Source:
    """Bytes that are read from the front."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, size: int) -> bytes:
        if size > len(self.raw) - self.at:
            raise FileError(f"it ends {size - len(self.raw) + self.at:,} bytes too early")
        self.at += size
        return self.raw[self.at - size : self.at]

    def number(self, most: int = coder.MOST_NUMBER) -> int:
        """A LEB128 number."""
        size = next((i for i, byte in enumerate(self.raw[self.at : self.at + 8]) if byte < 128), 8) + 1
        number = int(coder.numbers_from_bytes(self.take(size))[0])
        if number > most:
            raise FileError(f"a number is {number:,} where at most {most:,} is allowed")
        return number

    def group(self, group: list[Stored]) -> bytes:
        """The numbers of a group."""
        dtype, size = group[0].dtype, sum(item.size for item in group)
        kind = self.number()
        if kind == _PLAIN:
            return coder.unshuffled(coder.unsqueeze(self.take(self.number()), size), dtype.itemsize)
        if kind == _CONSTANT:
            return self.take(dtype.itemsize) * (size // dtype.itemsize)
        if kind != _CODED or dtype not in _FIELDS:
            raise FileError(f"a group of {dtype} is of kind {kind}, which it cannot be")
        return self.coded([item.size for item in group], dtype)

    def coded(self, sizes: list[int], dtype: torch.dtype) -> bytes:
        """The inverse of :func:`_coded`."""
        width, exponent_bits, fraction_bits = _FIELDS[dtype]
        head, with_sign = divmod(self.number(2 * _MOST_HEAD + 1), 2)
        most = self.number(fraction_bits)
        floor, start = self.number(_MOST_SYMBOL) - most, self.number(_MOST_SYMBOL) - _OFFSET
        bases = np.repeat(self.symbols(len(sizes)), np.array(sizes) // width)
        heads = self.symbols(len(bases))
        sign, heads = (heads & 1, heads >> 1) if with_sign else (np.zeros_like(heads), heads)
        steps, mantissa = heads >> head, (heads & (2**head - 1)) << (fraction_bits - head)
        exponent = bases + steps + start
        if head > most or exponent.min() < 0 or exponent.max() >= 2**exponent_bits:
            raise FileError(f"an exponent is beyond the {exponent_bits} bits of {dtype}, or a head too long")
        tail = np.clip(steps - floor, 0, most)
        owners = [np.flatnonzero(tail > i) for i in range(head, most)]
        bits = self.bits(len(bases) * (1 - with_sign) + sum(map(len, owners)))
        if not with_sign:
            sign, bits = np.split(bits, [len(bases)])
        for i, owner in enumerate(owners, head):
            mantissa[owner] |= bits[: len(owner)] << (fraction_bits - 1 - i)
            bits = bits[len(owner) :]
        top = (sign << exponent_bits | exponent).astype(np.uint64) << np.uint64(fraction_bits)
        return (top | mantissa.astype(np.uint64)).astype(f"<u{width}").tobytes()

    def bits(self, count: int) -> Ints:
        """Bits, the top one of a byte first."""
        return np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8))[:count].astype(np.int64)

    def symbols(self, count: int) -> Ints:
        """The inverse of :func:`_huffman`."""
        size, symbols, sizes = self.number(_MOST_SYMBOL), [-1], []
        for _ in range(size):
            gap, length = divmod(self.number(16 * _MOST_SYMBOL), 16)
            symbols.append(symbols[-1] + 1 + gap)
            sizes.append(length)
        present, lengths = np.array(symbols[1:]), np.array(sizes)
        if size == 1 and sizes == [0] and symbols[1] <= _MOST_SYMBOL:
            return np.full(count, present[0])
        if size < 2 or symbols[-1] > _MOST_SYMBOL or min(sizes) < 1:
            raise FileError("a table of codes has no symbol, one that is too large, or one without bits")
        order = np.argsort(lengths, kind="stable")
        if sum(2 ** (_CODE_BITS - length) for length in sizes) != 2**_CODE_BITS:
            raise FileError("the codes of a table are not complete")
        rank = np.repeat(order, 1 << (_CODE_BITS - lengths[order]))  # of every 15 bits
        found, bit = np.empty(count, np.int64), 8 * self.at
        for start in range(0, count, _STEP):
            part = found[start : start + _STEP]
            ranks = rank[self._windows(bit // 8, (len(part) * _CODE_BITS + 7) // 8 + 1)]
            widths, places, place = lengths[ranks].tolist(), [], bit % 8
            for _ in range(len(part)):
                places.append(place)
                place += widths[place]
            part[:] = present[ranks[places]]
            bit = bit - bit % 8 + place
        self.take(-(-bit // 8) - self.at)
        return found

    def _windows(self, start: int, size: int) -> NDArray[np.uint32]:
        """The 15 bits from every bit of some bytes on; zeros follow the last byte."""
        part = self.raw[start : start + size + 2]
        here = np.frombuffer(part.ljust(size + 2, b"\x00"), np.uint8).astype(np.uint32)
        three = here[:-2] << 16 | here[1:-1] << 8 | here[2:]
        return (three[:, None] >> np.arange(9, 1, -1, np.uint32) & (2**_CODE_BITS - 1)).reshape(-1)
