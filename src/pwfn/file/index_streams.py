"""The indices of all tensors as streams: which tensors share a stream, how each is coded, and back.

In version 1 of the format each tensor has a stream of its own, coded with a frequency table. In version 2
consecutive tensors may share a stream that is coded with contexts; what is smaller is taken. Streams are
independent of each other, and are encoded and decoded in as many threads as torch uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, takewhile
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder
from pwfn.file.coder import Table
from pwfn.file.content import Content, within
from pwfn.file.contexts import coder as contexts
from pwfn.file.contexts.model import MOST_SYMBOLS, Shape, Tree
from pwfn.file.header import Header

_SHARED_WEIGHTS = 2**18
"""A stream of so many weights is closed: more would learn little, and could not be read side by side."""

_WORD = 4  # bytes that a stream with a table has beyond its ideal length, about
_T = TypeVar("_T")
_R = TypeVar("_R")


class Coded(NamedTuple):
    """How a tensor is coded, and its bytes in the section ``indices``."""

    stream: bytes
    own_table: bool = False
    contexts: bool = False
    continues: bool = False  # it is part of the stream before it, and has no bytes of its own


class Stream(NamedTuple):
    """A stream in a file: the tensors from ``first`` to before ``stop``, and its place in ``indices``."""

    first: int
    stop: int
    model: Table | Tree
    start: int
    size: int
    crc32: int


def encode(content: Content, *, with_contexts: bool) -> tuple[bytes, list[Coded]]:
    """The section ``tables``, and how each tensor is coded."""
    entries, divisions = content.layout.entries, content.divisions
    arrays = [content.indices[entry.span].numpy() for entry in entries]
    counts = [coder.counts_of(array) for array in arrays]
    shared, tables = coder.choose_tables(counts)
    models: dict[int, bytes] = {}  # of streams with contexts and of tables, by first tensor
    found: dict[int, Coded] = {}
    runs = list(_runs(content)) if with_contexts else []
    zeros = [int(book.abs().argmin()) for book in content.codebooks]

    def coded(run: list[int]) -> tuple[bytes, bytes]:
        total = np.zeros(MOST_SYMBOLS, np.int64)
        for n in run:
            total[: len(counts[n])] += counts[n]
        tree = Tree.of(total)
        symbols = np.concatenate([arrays[n] for n in run]).astype(np.uint8, copy=False)
        shapes = [Shape.of(entries[n].shape) for n in run]
        return tree.to_bytes(), contexts.encode(symbols, shapes, tree, zeros[divisions[run[0]].codebooks[0]])

    for run, (model, stream) in zip(runs, _side_by_side(coded, runs), strict=True):
        by_table = sum(_table_bytes(counts[n], tables[n], tables[n] is not shared) for n in run)
        if len(model) + len(stream) < by_table:
            models[run[0]] = model
            found |= {n: Coded(b"", contexts=True, continues=True) for n in run}
            found[run[0]] = Coded(stream, contexts=True)
    rest = [n for n in range(len(entries)) if n not in found]
    shared, tables = coder.choose_tables([counts[n] for n in rest]) if rest else (None, [])
    pairs = list(zip(rest, tables, strict=True))
    streams = _side_by_side(lambda pair: coder.encode(arrays[pair[0]], pair[1]), pairs)
    for (n, table), stream in zip(pairs, streams, strict=True):
        found[n] = Coded(stream, own_table=table is not shared)
        models |= {n: table.to_bytes()} if table is not shared else {}
    section = b"".join((shared.to_bytes() if shared else b"", *(models[n] for n in sorted(models))))
    return section, [found[n] for n in range(len(entries))]


def _runs(content: Content) -> Iterator[list[int]]:
    """Consecutive tensors that may share a stream: each has one codebook, the same and not a large one."""
    run: list[int] = []
    weights, last = 0, -1
    for n, (entry, division) in enumerate(zip(content.layout.entries, content.divisions, strict=True)):
        book = division.codebooks[0]
        fits = len(division.codebooks) == 1 and content.codebooks[book].numel() <= MOST_SYMBOLS
        if run and (not fits or book != last or weights >= _SHARED_WEIGHTS):
            yield run
            run, weights = [], 0
        if fits:
            run.append(n)
            weights, last = weights + entry.size, book
    if run:
        yield run


def _table_bytes(counts: coder.Integers, table: Table, is_own: bool) -> float:
    """About the bytes that a tensor takes with a frequency table."""
    return table.ideal_bits(counts) / 8 + (len(table.to_bytes()) if is_own else 0) + _WORD


def read(header: Header, raw: bytes) -> list[Stream]:
    """The streams of a file with their models, from the section ``tables``; sizes agree with the shapes."""
    tensors, books = header.tensors, header.codebooks.sizes
    numbers = coder.numbers_from_bytes(raw)
    sharing = sum(t.size for t in tensors if not t.own_table and not t.contexts)
    shared, at = Table.read(numbers, 0, max(books), sharing) if sharing else (None, 0)
    starts = list(accumulate((tensor.bytes for tensor in tensors), initial=0))
    found: list[Stream] = []
    for n, tensor in enumerate(tensors):
        with within(f"tensor {tensor.name!r}"):
            model: Table | Tree | None = shared
            alphabet = max(books[book] for book in tensor.codebooks)
            many = len(tensor.codebooks) > 1 or alphabet > MOST_SYMBOLS
            if tensor.contexts and (many or tensor.own_table):
                raise FileError(f"contexts need one codebook of at most {MOST_SYMBOLS} values, and no table")
            if tensor.continues:
                before = tensors[n - 1] if n else None
                if before is None or not before.contexts or before.codebooks != tensor.codebooks:
                    raise FileError("it continues a stream that does not exist, or has another codebook")
                if not tensor.contexts or tensor.bytes:
                    raise FileError("it continues a stream, and has one of its own")
                found[-1] = found[-1]._replace(stop=n + 1)
                continue
            if tensor.contexts:
                together = takewhile(lambda t: t.continues, tensors[n + 1 :])
                total = tensor.size + sum(other.size for other in together)
                model, at = Tree.read(numbers, at, alphabet, total)
            elif tensor.own_table:
                model, at = Table.read(numbers, at, alphabet, tensor.size)
        assert model is not None  # sharing is not zero if any tensor uses the shared table
        found.append(Stream(n, n + 1, model, starts[n], tensor.bytes, tensor.crc32))
    if at != len(numbers):
        raise FileError(f"{len(numbers) - at:,} numbers are left over after the last table")
    return found


def decode_all(
    header: Header, streams: Sequence[tuple[Stream, bytes]], codebooks: Sequence[Tensor], out: Tensor
) -> list[int]:
    """The indices of all streams into a vector of all weights; returns the bytes of each tensor."""
    offsets = [entry.offset for entry in header.layout.entries]
    sizes = [0] * len(offsets)

    def decoded(item: tuple[Stream, bytes]) -> None:
        stream, data = item
        tensors, ends = header.tensors[stream.first : stream.stop], [len(data)]
        with within(f"tensor {tensors[0].name!r}"):
            if isinstance(stream.model, Table):
                found = coder.decode(data, stream.model, tensors[0].size, out.numpy().dtype)
            else:
                zero = int(codebooks[tensors[0].codebooks[0]].abs().argmin())
                shapes = [Shape.of(tensor.shape) for tensor in tensors]
                found, ends = contexts.decode(data, shapes, stream.model, zero)
        out[offsets[stream.first] :][: len(found)] = torch.from_numpy(found)
        sizes[stream.first : stream.stop] = np.diff(ends, prepend=0).tolist()

    # Large ones first: the last to end then ends soon after the others.
    _side_by_side(decoded, sorted(streams, key=lambda item: -item[0].size))
    return sizes


def _side_by_side(function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Like ``map``, in as many threads as torch uses."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(function, items))
