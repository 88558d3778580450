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

_PLAIN, _CODED, _CONSTANT = range(3)
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
_NUMBER_BITS = 97  # of the largest number, 2^48
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
    if source.take(len(raw) - source.bit // 8).strip(b"\x00"):
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
        ending = plain[:width].lstrip(b"\x00")
        return _packed(_numbers(_CONSTANT + len(ending))) + ending
    block = coder.squeeze(coder.shuffled(plain, width))
    forms = [_packed(_numbers(_PLAIN, len(block))) + block]
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
    last = np.where(used > 0, exponent - used, exponent.max())  # exponent at which no bit would be left
    for bases in (
        np.zeros(len(sizes), np.int64),
        np.array([int(np.median(part)) for part in np.split(exponent, ends)]),
        np.array([int(part.min()) for part in np.split(last, ends)]),
    ):
        bases = bases.max() - bases
        steps = exponent + np.repeat(bases, np.array(sizes) // width)
        start = int(steps.min())
        steps -= start
        floor = max(int((steps - used).min(initial=_MOST_SYMBOL, where=used > 0)), -most) if most else 0
        tail = np.clip(steps - floor, 0, most)
        for head, with_sign in product(range(min(_MOST_HEAD, most) + 1), (0, 1)):
            heads = (steps << head) | (mantissa >> (fraction_bits - head))
            yield _packed(
                _numbers(_CODED, 2 * head + with_sign, most, floor + most, start),
                *_huffman(bases),
                *_huffman(2 * heads + sign if with_sign else heads),
                sign[: 0 if with_sign else None],
                *(mantissa[tail > i] >> (fraction_bits - 1 - i) & 1 for i in range(head, most)),
            )


def _packed(*bits: Ints) -> bytes:
    """Bits to bytes, the first one at the top."""
    return np.packbits(np.concatenate(bits) > 0).tobytes()


def _numbers(*numbers: int) -> Ints:
    """The bits of each number plus one, behind as many zeros as follow its first bit (Elias gamma).

    >>> _numbers(0, 4).tolist()
    [1, 0, 0, 1, 0, 1]
    """
    return _bits("".join(f"{n + 1:0{2 * (n + 1).bit_length() - 1}b}" for n in numbers))


def _bits(text: str) -> Ints:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64) - ord("0")


def _huffman(symbols: Ints) -> tuple[Ints, Ints]:
    """The table (number of symbols; for each the gap to the one before and its bits), and the codes."""
    present, rank, counts = np.unique(symbols, return_inverse=True, return_counts=True)
    lengths = _code_lengths(counts.tolist())
    table = [_numbers(len(present) - 1)]
    for gap, length in zip((np.diff(present, prepend=-1) - 1).tolist(), lengths.tolist(), strict=True):
        table += _numbers(gap), _bits(f"{length:04b}")
    order = np.argsort(lengths, kind="stable")
    spans = 1 << (_CODE_BITS - lengths[order])
    codes = np.empty_like(lengths)  # shifted to the top of 15 bits
    codes[order] = np.cumsum(spans) - spans
    places = np.arange(_CODE_BITS)
    bits = codes[rank][:, None] >> (_CODE_BITS - 1 - places) & 1
    return np.concatenate(table), bits[places < lengths[rank][:, None]]


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
    """Bits and bytes that are read from the front."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.bit = raw, 0

    def skip(self, bits: int) -> None:
        self.bit += bits
        if self.bit > 8 * len(self.raw):
            raise FileError(f"it ends {-(-self.bit // 8) - len(self.raw):,} bytes too early")

    def take(self, size: int) -> bytes:
        """Whole bytes, from the next one on."""
        if self.field(-self.bit % 8):
            raise FileError("a bit between two parts is not zero")
        self.skip(8 * size)
        return self.raw[self.bit // 8 - size : self.bit // 8]

    def field(self, bits: int) -> int:
        """A number of so many bits, at most 97."""
        found = self._ahead() >> (_NUMBER_BITS - bits)
        self.skip(bits)
        return found

    def number(self, most: int = coder.MOST_NUMBER) -> int:
        """What :func:`_numbers` wrote."""
        zeros = _NUMBER_BITS - self._ahead().bit_length()
        number = self.field(min(2 * zeros + 1, _NUMBER_BITS)) - 1
        if not 0 <= number <= most:
            raise FileError(f"a number is not from 0 to {most:,}")
        return number

    def _ahead(self) -> int:
        """The next 97 bits; zeros follow the last byte."""
        start, gone = divmod(self.bit, 8)
        ahead = int.from_bytes(self.raw[start : start + 13].ljust(13, b"\x00"), "big")
        return (ahead >> (7 - gone)) % 2**_NUMBER_BITS

    def group(self, group: list[Stored]) -> bytes:
        """The numbers of a group."""
        dtype, size = group[0].dtype, sum(item.size for item in group)
        width, kind = dtype.itemsize, self.number(_CONSTANT + dtype.itemsize)
        if kind >= _CONSTANT:
            return self.take(kind - _CONSTANT).rjust(width, b"\x00") * (size // width)
        if kind == _PLAIN:
            block_bytes = self.number(len(self.raw))
            return coder.unshuffled(coder.unsqueeze(self.take(block_bytes), size), width)
        if dtype not in _FIELDS:
            raise FileError(f"numbers of {dtype} are coded as floating-point numbers are")
        found = self.coded([item.size for item in group], dtype)
        self.take(0)
        return found

    def coded(self, sizes: list[int], dtype: torch.dtype) -> bytes:
        """The inverse of :func:`_coded`."""
        width, exponent_bits, fraction_bits = _FIELDS[dtype]
        head, with_sign = divmod(self.number(2 * _MOST_HEAD + 1), 2)
        most = self.number(fraction_bits)
        floor, start = self.number(_MOST_SYMBOL) - most, self.number(_MOST_SYMBOL)
        bases = np.repeat(self.symbols(len(sizes)), np.array(sizes) // width)
        heads = self.symbols(len(bases))
        sign, heads = (heads & 1, heads >> 1) if with_sign else (np.zeros_like(heads), heads)
        steps, mantissa = heads >> head, (heads & (2**head - 1)) << (fraction_bits - head)
        exponent = steps + start - bases
        if head > most or exponent.min() < 0 or exponent.max() >= 2**exponent_bits:
            raise FileError(f"an exponent is beyond the {exponent_bits} bits of {dtype}, or a head too long")
        tail = np.clip(steps - floor, 0, most)
        owners = [np.flatnonzero(tail > i) for i in range(head, most)]
        if not with_sign:
            sign = self.bits(len(bases))
        for i, owner in enumerate(owners, head):
            mantissa[owner] |= self.bits(len(owner)) << (fraction_bits - 1 - i)
        top = (sign << exponent_bits | exponent).astype(np.uint64) << np.uint64(fraction_bits)
        return (top | mantissa.astype(np.uint64)).astype(f"<u{width}").tobytes()

    def bits(self, count: int) -> Ints:
        """Single bits."""
        start, gone = divmod(self.bit, 8)
        self.skip(count)
        part = np.frombuffer(self.raw[start : -(-self.bit // 8)], np.uint8)
        return np.unpackbits(part)[gone : gone + count].astype(np.int64)

    def symbols(self, count: int) -> Ints:
        """The inverse of :func:`_huffman`."""
        found, lengths = [-1], []
        for _ in range(self.number(_MOST_SYMBOL) + 1):
            found.append(found[-1] + 1 + self.number(_MOST_SYMBOL))
            lengths.append(self.field(4))
        if found[-1] > _MOST_SYMBOL or sum(2 ** (_CODE_BITS - n) for n in lengths) != 2**_CODE_BITS:
            raise FileError("a table has a symbol that is too large, or its codes are not complete")
        symbols, sizes = np.array(found[1:]), np.array(lengths)
        if len(symbols) == 1:
            return np.full(count, symbols[0])
        order = np.argsort(sizes, kind="stable")
        rank = np.repeat(order, 1 << (_CODE_BITS - sizes[order]))  # of any 15 bits
        whole = np.empty(count, np.int64)
        for start in range(0, count, _STEP):
            part = whole[start : start + _STEP]
            ranks = rank[self._windows(len(part))]
            steps, places, place = sizes[ranks].tolist(), [], 0
            for _ in range(len(part)):
                places.append(place)
                place += steps[place]
            part[:] = symbols[ranks[places]]
            self.skip(place)
        return whole

    def _windows(self, count: int) -> NDArray[np.uint32]:
        """From every bit on that so many codes may reach, the next 15; zeros follow the last byte."""
        start, gone = divmod(self.bit, 8)
        size = (count * _CODE_BITS + 7) // 8 + 3
        here = np.frombuffer(self.raw[start : start + size].ljust(size, b"\x00"), np.uint8).astype(np.uint32)
        three = here[:-2] << 16 | here[1:-1] << 8 | here[2:]
        return (three[:, None] >> np.arange(9, 1, -1, np.uint32) & (2**_CODE_BITS - 1)).reshape(-1)[gone:]
