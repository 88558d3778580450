"""Bytes of a network's weights in each storage, every weight read once."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import add
from pathlib import Path

import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder as codec
from pwfn.file.compressed import Compressed
from pwfn.file.content import Division
from pwfn.file.format import Reader
from pwfn.layout import Entry


class Storage(StrEnum):
    """How the weights are stored in memory."""

    FP32 = "fp32"
    INT8 = "int8"
    INDICES = "indices"
    CODED = "coded"


@dataclass(frozen=True)
class Traffic:
    """Bytes of the same weights in each storage, in the order of :class:`Storage`."""

    fp32_bytes: int = 0  # 4 per weight
    int8_bytes: int = 0  # 1 per weight, and a scale of 4 bytes per tensor
    index_bytes: int = 0  # ceil(log2 K) bits per weight, for K values in its codebook
    coded_bytes: int = 0  # entropy-coded

    def of(self, storage: Storage) -> int:
        """
        >>> Traffic(fp32_bytes=40, int8_bytes=14).of(Storage.INT8)
        14
        """
        return dict(zip(Storage, astuple(self), strict=True))[storage]

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))


def traffic_of(compressed: Compressed, file: str | Path | None = None) -> tuple[list[Traffic], Traffic]:
    """Of each entry of the layout, and of what all entries share: codebooks and frequency tables.

    Coded bytes are those of the file. Without one they are ``-sum log2 p`` bits over the entry's weights,
    with p from the frequency table that a file would use.
    """
    entries, books = compressed.layout.entries, compressed.codebooks
    coded, shared = _coded(compressed) if file is None else _coded_in(file, compressed)
    of_entries = [
        Traffic(4 * entry.size, entry.size + 4, _index_bytes(entry, division, books), size)
        for entry, division, size in zip(entries, compressed.divisions, coded, strict=True)
    ]
    return of_entries, Traffic(index_bytes=sum(book.nbytes for book in books), coded_bytes=shared)


def untouched_bytes(compressed: Compressed) -> int:
    """Of the uncompressed floating-point tensors, in fp32 or narrower; tied ones once."""
    aliases = {alias for left_out in compressed.layout.left_out for alias in left_out.aliases}
    return sum(
        tensor.numel() * min(tensor.element_size(), 4)
        for name, tensor in compressed.untouched.items()
        if name not in aliases and tensor.is_floating_point()
    )


def _index_bytes(entry: Entry, division: Division, books: tuple[Tensor, ...]) -> int:
    """``ceil(log2 K)`` bits per weight, K the size of the codebook of its part; in whole bytes."""
    part = entry.size // len(division.codebooks)
    bits = sum(part * (books[book].numel() - 1).bit_length() for book in division.codebooks)
    return -(-bits // 8)


def _coded(compressed: Compressed) -> tuple[list[int], int]:
    counts = [
        torch.bincount(compressed.indices[entry.span].to(torch.int64)).numpy()
        for entry in compressed.layout.entries
    ]
    _, used = codec.choose_tables(counts)
    # Rounding: 12 bits are 2 bytes even where the sum is 12.000000000000002.
    pairs = zip(used, counts, strict=True)
    sizes = [math.ceil(table.ideal_bits(tensor) / 8 - 1e-9) for table, tensor in pairs]
    tables = sum(len(table.to_bytes()) for table in {id(each): each for each in used}.values())
    return sizes, tables + sum(book.nbytes for book in compressed.codebooks)


def _coded_in(file: str | Path, compressed: Compressed) -> tuple[list[int], int]:
    reader = Reader(file)
    books, own_books = reader.codebooks(), compressed.codebooks
    theirs, ours = (
        [(entry.name, entry.shape) for entry in layout.entries]
        for layout in (reader.header.layout, compressed.layout)
    )
    if theirs != ours or len(books) != len(own_books) or not all(map(torch.equal, books, own_books)):
        raise FileError(
            f"{file}: its layers or codebooks are not those of this network: pass the file it was saved to"
        )
    sizes = reader.sizes
    return reader.index_bytes(), sizes.codebooks + sizes.tables
