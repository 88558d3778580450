"""Streams with contexts: the compiled coder, its plain twin and a decoder of the specification agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from malformed import with_scales
from oracles import contexts as oracle

from pwfn.errors import FileError
from pwfn.file import coder as table_coder
from pwfn.file import native
from pwfn.file.coder import Table
from pwfn.file.contexts import coder, reference
from pwfn.file.contexts.model import CONTEXTS, MOST_SYMBOLS, Shape, Tree, tables
from pwfn.file.format import Reader, dumps, loads

KINDS = ("peaked", "flat", "sparse", "one", "two", "waves")


def drawn(kind: str, count: int, size: int, zero: int, rng: np.random.Generator) -> np.ndarray:
    """Symbols below ``size`` about ``zero``."""
    if kind == "flat":
        return rng.integers(0, size, count).astype(np.uint8)
    if kind == "one":
        return np.full(count, rng.integers(0, size), np.uint8)
    spread = {"peaked": 2.0, "sparse": 0.3, "two": 1.0, "waves": 3.0}[kind]
    level = rng.standard_t(3, count) * spread
    if kind == "waves":  # neighbours alike, in size and sign
        level = np.convolve(level, np.ones(5) / 3)[:count] * (1 + np.sin(np.arange(count) / 30))
    low, high = (zero, zero + 1) if kind == "two" else (0, size - 1)
    return np.clip(np.round(level) + zero, low, min(high, size - 1)).astype(np.uint8)


def cases(count: int, seed: int, most: int = 7) -> Iterator[tuple[np.ndarray, list[list[int]], Tree, int]]:
    rng = np.random.default_rng(seed)
    for n in range(count):
        shapes = [rng.integers(1, most, rng.integers(0, 6)).tolist() for _ in range(rng.integers(1, 5))]
        size = int(rng.integers(1, 40)) if n % 7 else MOST_SYMBOLS
        zero = int(rng.integers(0, size))
        symbols = drawn(KINDS[n % len(KINDS)], sum(int(np.prod(s)) for s in shapes), size, zero, rng)
        yield symbols, shapes, Tree.of(np.bincount(symbols)), zero


def shapes_of(shapes: list[list[int]]) -> list[Shape]:
    return [Shape.of(shape) for shape in shapes]


needs_library = pytest.mark.skipif(native.library() is None, reason="no C compiler at installation")


@needs_library
def test_the_library_is_that_of_this_source() -> None:
    assert native.library().pwfn_contexts() == CONTEXTS  # type: ignore[union-attr]


def test_three_decoders_and_two_encoders_agree() -> None:
    for symbols, shapes, tree, zero in cases(105, seed=0):
        stream = coder.encode(symbols, shapes_of(shapes), tree, zero)
        found, ends = coder.decode(stream, shapes_of(shapes), tree, zero)
        assert np.array_equal(found, symbols)
        assert ends[-1] == len(stream)
        assert sorted(ends) == ends
        literal = oracle.decode(stream, shapes, list(tree.symbols), list(tree.lengths), zero)
        assert [index for tensor in literal for index in tensor] == symbols.tolist()
        if len(tree.symbols) > 1:
            assert reference.encode(symbols, shapes_of(shapes), tree, zero) == stream
            again, places = reference.decode(stream, shapes_of(shapes), tree, zero)
            assert np.array_equal(again, symbols)
            assert places == ends


@needs_library
def test_thousands_of_random_layouts() -> None:
    for symbols, shapes, tree, zero in cases(3000, seed=1, most=12):
        stream = coder.encode(symbols, shapes_of(shapes), tree, zero)
        assert np.array_equal(coder.decode(stream, shapes_of(shapes), tree, zero)[0], symbols)


@needs_library
def test_a_damaged_stream_decodes_alike_in_both_or_is_refused_by_both() -> None:
    rng = np.random.default_rng(2)
    for symbols, shapes, tree, zero in cases(60, seed=3):
        stream = bytearray(coder.encode(symbols, shapes_of(shapes), tree, zero))
        if len(stream) < 4:
            continue
        stream[rng.integers(0, len(stream))] ^= 1 << rng.integers(0, 8)
        found, ends = reference.decode(bytes(stream), shapes_of(shapes), tree, zero)
        if ends[-1] == len(stream):
            assert np.array_equal(coder.decode(bytes(stream), shapes_of(shapes), tree, zero)[0], found)
        else:
            with pytest.raises(FileError, match="does not end"):
                coder.decode(bytes(stream), shapes_of(shapes), tree, zero)


def test_without_the_library_the_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = with_scales((20, 30), (30, 20))
    data = dumps(whole)
    monkeypatch.setattr(native, "library", lambda: None)
    assert dumps(whole) == data
    assert torch.equal(loads(data).indices, whole.indices)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(native, "FILE", tmp_path / "none.so")
    with pytest.warns(UserWarning, match="C compiler"):
        assert native.library.__wrapped__() is None


def test_bytes_that_every_machine_writes() -> None:
    """A change of any constant, order or rounding of the coder would show here."""
    steps = np.arange(6 * 5 * 9)
    symbols = ((steps * steps // 7) % 11 // 2 + (steps // 50) % 3).astype(np.uint8)
    stream = coder.encode(symbols, [Shape(6, 5, 9, 3)], Tree.of(np.bincount(symbols)), 3)
    assert hashlib.sha256(stream).hexdigest()[:16] == "fa4f058fd743fb5d"


def test_predictions_that_fail_carry_far() -> None:
    """Long runs and then the improbable: the range ends near a power, and a carry runs through many words."""
    rng = np.random.default_rng(4)
    for _ in range(200):
        symbols = np.repeat(rng.integers(0, 2, 40), rng.integers(1, 60, 40)).astype(np.uint8)
        tree, shape = Tree.of(np.bincount(symbols, minlength=2)), [Shape(len(symbols), 1, 1, 1)]
        stream = coder.encode(symbols, shape, tree, 0)
        assert np.array_equal(coder.decode(stream, shape, tree, 0)[0], symbols)


@needs_library
def test_neighbours_and_scales_shorten_a_stream() -> None:
    """Kernels of one sign, and filters of very different size: far below the memoryless entropy."""
    rng = np.random.default_rng(5)
    scale = np.exp(rng.standard_normal((64, 1, 1)) * 1.2) * np.exp(rng.standard_normal((1, 32, 1)))
    sign = rng.choice([-1, 1], (64, 32, 1))
    levels = np.round(sign * np.abs(rng.standard_normal((64, 32, 9))) * scale).clip(-15, 15)
    symbols = (levels + 15).astype(np.uint8).reshape(-1)
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / len(symbols)
    entropy_bytes = -len(symbols) * float((shares * np.log2(shares)).sum()) / 8
    stream = coder.encode(symbols, [Shape(64, 32, 9, 3)], Tree.of(counts), 15)
    assert len(stream) < 0.75 * entropy_bytes


@needs_library
def test_noise_costs_little_more_than_its_entropy() -> None:
    symbols = np.random.default_rng(6).integers(0, 16, 200_000).astype(np.uint8)
    tree = Tree.of(np.bincount(symbols))
    assert len(coder.encode(symbols, [Shape(200, 1000, 1, 1)], tree, 8)) < 1.01 * 100_000


# Trees and constants


def test_trees_by_hand() -> None:
    assert Tree.of(np.array([0, 0, 7])).lengths == (0,)
    tree = Tree.of(np.array([1, 1, 4, 2]))
    assert tree.codes == {2: "0", 3: "10", 0: "110", 1: "111"}
    children, second = tree.nodes
    assert children.tolist() == [[~2, 1], [~3, 2], [~0, ~1]]
    assert second.tolist() == [2**21] * 3
    assert int(tree.paths[0]) == 0b011  # the first decision is the lowest bit


def test_trees_and_back() -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        counts = (rng.pareto(0.3, rng.integers(1, 257)) * 3).clip(0, 2**40).astype(np.int64)
        if not counts.any():
            continue
        tree = Tree.of(counts)
        numbers = table_coder.numbers_from_bytes(tree.to_bytes())
        assert Tree.read(numbers, 0, len(counts), int(counts.sum())) == (tree, len(numbers))
        assert sum(2.0**-n for n in tree.lengths) == 1


@pytest.mark.parametrize(
    "numbers",
    [
        [], [8], [8, 0], [7, 2, 0, 1, 0, 1], [8, 6, *[0, 1] * 6], [8, 2, 0, 1], [8, 2, 0, 1, 9, 1],
        [8, 2, 0, 1, 2**48, 1], [8, 2, 0, 1, 0, 2], [8, 2, 0, 0, 0, 0], [8, 3, 0, 1, 0, 1, 0, 40],
        [8, 1, 0, 1],
    ],
)  # fmt: skip
def test_bad_trees(numbers: list[int]) -> None:
    with pytest.raises(FileError, match="tree"):
        Tree.read(np.array(numbers, np.int64), 0, alphabet=5, total=8)


def test_constants_are_the_functions_they_stand_for() -> None:
    squash, stretch, share = (table.astype(float) for table in tables())
    x = np.arange(-2047, 2048)
    assert np.abs(squash - 65536 / (1 + np.exp(-x / 256))).max() < 1.5
    # Back and forth: within one step of x, which is 1 / 1024 where squash is steepest.
    there = squash[(stretch + 2047).astype(int)] / 65536
    assert np.abs(there - (np.arange(4096) + 0.5) / 4096).max() <= 1 / 1024
    assert np.abs(share - 65536 / (np.arange(256) + 1.5)).max() <= 1


# Streams of several tensors


def test_each_tensor_of_a_shared_stream_has_its_bytes() -> None:
    whole = with_scales((20, 30), (30, 20), (40, 50))
    reader = Reader(dumps(whole))
    assert [tensor.continues for tensor in reader.header.tensors] == [False, True, True]
    sizes = reader.index_bytes()
    assert sum(sizes) == reader.sizes.indices
    assert min(sizes) > 0


def test_threads_do_not_change_the_bytes() -> None:
    before = torch.get_num_threads()
    whole = with_scales(*[(300, 400)] * 6)
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(dumps(whole))
            assert torch.equal(loads(found[0]).indices, whole.indices)
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert len(Reader(found[0]).streams) > 1


# The compiled decoder of streams with a table


@needs_library
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_tables_decode_as_constriction_does(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    for size in rng.integers(1, 200, 60).tolist():
        counts = (rng.pareto(0.7, size) * rng.integers(1, 300)).clip(0, 3000).astype(np.int64)
        counts[rng.integers(0, size)] += 1
        symbols = rng.permutation(np.repeat(np.arange(size), counts))
        table = Table.of(counts)
        stream = table_coder.encode(symbols, table)
        damaged = bytearray(stream)
        if damaged:
            damaged[rng.integers(0, len(damaged))] ^= 1 << rng.integers(0, 8)
        for data in (stream, bytes(damaged)):
            ends = []
            for library in (native.library, lambda: None):
                with monkeypatch.context() as patch:
                    patch.setattr(native, "library", library)
                    try:
                        ends.append(table_coder.decode(data, table, len(symbols), dtype).tolist())
                    except FileError as error:
                        ends.append(str(error))
            assert ends[0] == ends[1]
        assert table_coder.decode(stream, table, len(symbols), dtype).tolist() == symbols.tolist()
