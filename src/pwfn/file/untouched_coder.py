"""The tensors that are not compressed as bytes, exact: section ``untouched`` of ``docs/format.md``.

Tensors of one type whose names end alike (all scales, all shifts) form a group. A floating-point number is
cut in two. Its *head*, the exponent relative to a base of its tensor, perhaps with the sign and the first
bits of the mantissa, has a Huffman code. Its *tail*, the other bits of the mantissa that the group uses, is
stored as it is; rounded numbers use few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder
from pwfn.file.header import Stored
from pwfn.file.huffman import MOST_SYMBOL, Bits, gamma, huffman, huffman_bits, pack

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
_MOST_CODED = 2**18  # numbers in a coded group; zstd decodes larger ones faster
_MOST_HEAD = 3  # bits of the mantissa in a head


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as bytes; :func:`decode` returns every bit of them.

    >>> tensors = {"a.scale": torch.ones(9), "b.scale": torch.tensor([1.5, -0.0])}
    >>> wanted = [Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    >>> decode(encode(tensors), wanted)["b.scale"]
    tensor([1.5000, -0.0000])
    """
    wanted = [Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    forms = (
        _smallest([coder.bytes_of(tensors[item.name]) for item in group], group[0].dtype)
        for group in _groups(wanted)
    )
    return b"".join(forms).ljust(_fewest_bytes(wanted), b"\x00")


def decode(raw: bytes, wanted: Sequence[Stored]) -> dict[str, Tensor]:
    """The tensors, given their names, shapes and types; sizes are checked before memory is allocated."""
    if len(raw) < _fewest_bytes(wanted):
        size = sum(item.size for item in wanted)
        raise FileError(f"{len(raw):,} bytes claim to hold tensors of {size:,}: that is too many")
    source = Bits(raw)
    found = {item.name: b"" for item in wanted}
    for group in _groups(wanted):
        plain = _decoded(source, group)
        for item in group:
            found[item.name], plain = plain[: item.size], plain[item.size :]
    if source.take(len(raw) - source.place // 8).strip(b"\x00"):
        raise FileError("a byte after the last number is not zero")
    return {item.name: coder.tensor_of(found[item.name], item.dtype, item.shape) for item in wanted}


def _groups(wanted: Sequence[Stored]) -> list[list[Stored]]:
    """Tensors of one type, not empty, whose names agree after the last dot; ordered by their first."""
    groups: dict[tuple[str, torch.dtype], list[Stored]] = {}
    for item in wanted:
        if item.size:
            groups.setdefault((item.name.rpartition(".")[2], item.dtype), []).append(item)
    return list(groups.values())


def _fewest_bytes(wanted: Sequence[Stored]) -> int:
    """A section may not claim more than a block of its size; large constants are padded."""
    size = sum(item.size for item in wanted)
    return 0 if size <= _FREE_BYTES else -(-size // coder.WORST_RATIO)


def _smallest(parts: list[bytes], dtype: torch.dtype) -> bytes:
    """The smallest form of a group."""
    plain, width = b"".join(parts), dtype.itemsize
    if plain == plain[:width] * (len(plain) // width):
        ending = plain[:width].lstrip(b"\x00")
        return pack(gamma(_CONSTANT + len(ending))) + ending
    block = coder.squeeze(coder.shuffled(plain, width))
    forms = [pack(gamma(_PLAIN, len(block))) + block]
    if dtype in _FIELDS and len(plain) <= _MOST_CODED * _FIELDS[dtype][0]:
        forms.append(_coded(plain, [len(part) for part in parts], *_FIELDS[dtype]))
    return min(forms, key=len)


def _coded(plain: bytes, sizes: list[int], width: int, exponent_bits: int, fraction_bits: int) -> bytes:
    """The coded form with the best bases, place of the sign and bits of the head."""
    bits = np.frombuffer(plain, f"<u{width}").astype(np.uint64)
    mantissa = (bits & np.uint64(2**fraction_bits - 1)).astype(np.int64)
    exponent = (bits >> np.uint64(fraction_bits)).astype(np.int64)
    sign, exponent = exponent >> exponent_bits, exponent & (2**exponent_bits - 1)
    lowest = np.frexp((mantissa & -mantissa).astype(np.float64))[1] - 1  # place of the last bit that is set
    used = np.where(mantissa == 0, 0, fraction_bits - lowest)
    most = int(used.max())
    last = np.where(used > 0, exponent - used, exponent.max())  # exponent at which no bit would be left
    ends = np.cumsum(sizes)[:-1] // width
    choices = []
    for bases in (
        np.zeros(len(sizes), np.int64),
        np.array([int(np.median(part)) for part in np.split(exponent, ends)]),
        np.array([int(part.min()) for part in np.split(last, ends)]),
    ):
        below = bases.max() - bases
        steps = exponent + np.repeat(below, np.array(sizes) // width)
        start = int(steps.min())
        steps -= start
        floor = max(int((steps - used).min(initial=steps.max(), where=used > 0)), -most)
        tail = np.clip(steps - floor, 0, most)
        for head, with_sign in product(range(min(_MOST_HEAD, most) + 1), (0, 1)):
            heads = steps << head | mantissa >> (fraction_bits - head)
            heads = heads << with_sign | sign * with_sign
            if heads.max() <= MOST_SYMBOL:
                bits_left = (0 if with_sign else len(sign)) + int((tail - head).clip(0).sum())
                size = huffman_bits(below) + huffman_bits(heads) + bits_left
                choices.append((size, head, with_sign, floor, start, below, heads, tail))
    _, head, with_sign, floor, start, below, heads, tail = min(choices, key=lambda choice: choice[0])
    return pack(
        gamma(_CODED, 2 * head + with_sign, most, floor + most, start),
        *huffman(below),
        *huffman(heads),
        sign[: 0 if with_sign else None],
        *(mantissa[tail > i] >> (fraction_bits - 1 - i) & 1 for i in range(head, most)),
    )


def _decoded(source: Bits, group: list[Stored]) -> bytes:
    """The numbers of a group."""
    dtype, size = group[0].dtype, sum(item.size for item in group)
    width, kind = dtype.itemsize, source.number(_CONSTANT + dtype.itemsize)
    if kind == _CODED:
        if dtype not in _FIELDS:
            raise FileError(f"numbers of {dtype} cannot be coded as floating-point numbers")
        numbers = _floats(source, [item.size for item in group], *_FIELDS[dtype])
        source.align()
        return numbers
    block_bytes = source.number(len(source.raw)) if kind == _PLAIN else kind - _CONSTANT
    source.align()
    block = source.take(block_bytes)
    if kind == _PLAIN:
        return coder.unshuffled(coder.unsqueeze(block, size), width)
    return block.rjust(width, b"\x00") * (size // width)


def _floats(source: Bits, sizes: list[int], width: int, exponent_bits: int, fraction_bits: int) -> bytes:
    """The inverse of :func:`_coded`."""
    head, with_sign = divmod(source.number(2 * _MOST_HEAD + 1), 2)
    most = source.number(fraction_bits)
    floor, start = source.number(MOST_SYMBOL + fraction_bits) - most, source.number(MOST_SYMBOL)
    below = np.repeat(source.symbols(len(sizes)), np.array(sizes) // width)
    heads = source.symbols(len(below))
    sign = heads & with_sign
    heads >>= with_sign
    steps, mantissa = heads >> head, (heads & (2**head - 1)) << (fraction_bits - head)
    exponent = start + steps - below
    if exponent.min() < 0 or exponent.max() >= 2**exponent_bits:
        raise FileError(f"an exponent does not fit into {exponent_bits} bits")
    tail = np.clip(steps - floor, 0, most)
    if not with_sign:
        sign = source.single(len(below))
    for i in range(head, most):
        owner = np.flatnonzero(tail > i)
        mantissa[owner] |= source.single(len(owner)) << (fraction_bits - 1 - i)
    top = (sign << exponent_bits | exponent).astype(np.uint64) << np.uint64(fraction_bits)
    numbers = top | mantissa.astype(np.uint64)
    return numbers.astype(f"<u{width}").tobytes()
