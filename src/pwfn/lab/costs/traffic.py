"""Bytes of a network's weights in each storage, every weight read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
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
    """How the weights lie in memory."""

    FP32 = "fp32"
    INT8 = "int8"
    INDICES = "indices"
    CODED = "coded"


@dataclass(frozen=True)
class Traffic:
    """Bytes of the same weights in each storage."""

    fp32_bytes: int = 0  # 4 a weight
    int8_bytes: int = 0  # a byte a weight, and a scale of 4 bytes a tensor
    index_bytes: int = 0  # ceil(log2 K) bits a weight, K values in its codebook
    coded_bytes: int = 0  # entropy-coded

    def of(self, storage: Storage) -> int:
        """
        >>> Traffic(fp32_bytes=40, int8_bytes=14).of(Storage.INT8)
        14
        """
        match storage:
            case Storage.FP32:
                return self.fp32_bytes
            case Storage.INT8:
                return self.int8_bytes
            case Storage.INDICES:
                return self.index_bytes
            case Storage.CODED:
                return self.coded_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.fp32_bytes + other.fp32_bytes,
            self.int8_bytes + other.int8_bytes,
            self.index_bytes + other.index_bytes,
            self.coded_bytes + other.coded_bytes,
        )


def traffic_of(compressed: Compressed, file: str | Path | None = None) -> tuple[list[Traffic], Traffic]:
    """Of each entry of the layout, and of what all of them share: codebooks and frequency tables.

    Coded bytes are those of the file. Without one they are ``-sum log2 p`` bits over the entry's weights,
    p by the frequency table that a file would code it with.
    """
    entries = compressed.layout.entries
    coded, shared = _coded(compressed) if file is None else _coded_in(file, compressed)
    books = compressed.codebooks
    of_entries = [
        Traffic(
            fp32_bytes=4 * entry.size,
            int8_bytes=entry.size + 4,
            index_bytes=_index_bytes(entry, division, books),
            coded_bytes=size,
        )
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
    """``ceil(log2 K)`` bits for each weight, K the values of the codebook of its part; in whole bytes."""
    part = entry.size // len(division.codebooks)
    bits = sum(part * (books[book].numel() - 1).bit_length() for book in division.codebooks)
    return -(-bits // 8)


def _coded(compressed: Compressed) -> tuple[list[int], int]:
    counts = [
        torch.bincount(compressed.indices[entry.span].to(torch.int64)).numpy()
        for entry in compressed.layout.entries
    ]
    common, own = codec.choose_tables(counts)
    sizes = []
    for tensor, table in zip(counts, own, strict=True):
        used = table or common
        assert used is not None  # common is there for whoever has no table of its own
        # Forgives rounding: 12 bits are 1.5 bytes and so 2, where the sum is 12.000000000000002 or less.
        sizes.append(math.ceil(used.ideal_bits(tensor) / 8 - 1e-9))
    tables = sum(len(table.to_bytes()) for table in (common, *own) if table is not None)
    return sizes, tables + sum(book.nbytes for book in compressed.codebooks)


def _coded_in(file: str | Path, compressed: Compressed) -> tuple[list[int], int]:
    reader = Reader(file)
    books = reader.codebooks()
    alike = [(e.name, e.shape) for e in reader.header.layout.entries] == [
        (e.name, e.shape) for e in compressed.layout.entries
    ] and len(books) == len(compressed.codebooks)
    if not alike or not all(map(torch.equal, books, compressed.codebooks)):
        raise FileError(
            f"{file}: its layers or codebooks are not those of this network: pass the file it was saved to"
        )
    sizes = reader.sizes
    return [tensor.bytes for tensor in reader.header.tensors], sizes.codebooks + sizes.tables
