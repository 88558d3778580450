"""Indices to bytes: exact inverses, sizes near the entropy, and tables chosen as by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwfn.errors import FileError
from pwfn.file import coder
from pwfn.file.coder import Table

counts_lists = st.lists(st.integers(0, 400), min_size=1, max_size=40).filter(any)


def drawn(counts: Any, seed: int = 0) -> np.ndarray:
    """Each symbol as often as its count says, shuffled."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


@settings(max_examples=100, deadline=None)
@given(counts_lists, st.sampled_from([np.uint8, np.int16, np.int32, np.int64]))
def test_decoding_gives_back_what_was_encoded(counts: list[int], dtype: Any) -> None:
    symbols = drawn(counts).astype(dtype)
    table = Table.of(coder.counts_of(symbols))
    assert table.symbols.tolist() == [i for i, n in enumerate(counts) if n]
    assert table.counts.tolist() == [n for n in counts if n]
    found = coder.decode(coder.encode(symbols, table), table, len(symbols), dtype)
    assert found.dtype == dtype
    assert found.tolist() == symbols.tolist()


@pytest.mark.parametrize("size", [1, 2, 2**16 - 1, 2**16, 2**16 + 1, 200_003])
def test_stream_is_as_small_as_the_entropy(size: int) -> None:
    """Within the 64 bits of the coder's state and what 24 bits of precision cost (far below 0.01 %)."""
    symbols = np.random.default_rng(size).geometric(0.4, size) - 1
    counts = coder.counts_of(symbols)
    assert counts.tolist() == np.bincount(symbols).tolist()
    table = Table.of(counts)
    shares = counts[counts > 0] / size
    entropy_bits = -size * float((shares * np.log2(shares)).sum())
    stream = coder.encode(symbols, table)
    assert coder.decode(stream, table, size).tolist() == symbols.tolist()
    assert math.floor(entropy_bits) <= 8 * len(stream) + 1e-6 * size + 1
    assert 8 * len(stream) <= entropy_bits * 1.0001 + 64


def test_stream_of_known_words() -> None:
    """The example in constriction's documentation, at 64 bits: a change of the coder would show here."""
    table = Table(np.arange(4, dtype=np.int32), np.array([2, 4, 1, 3]))
    stream = coder.encode(np.array([0, 3, 2, 3, 2, 0, 2, 1]), table)
    assert np.frombuffer(stream, "<u4").tolist() == [488222996, 175]


def test_very_rare_symbols_survive() -> None:
    """A share below 2^-24 still has a code."""
    symbols = np.zeros(2**25, np.uint8)
    symbols[12345] = 1
    table = Table.of(coder.counts_of(symbols))
    stream = coder.encode(symbols, table)
    assert len(stream) <= 16
    assert np.array_equal(coder.decode(stream, table, len(symbols), np.uint8), symbols)


def test_ideal_bits_by_hand() -> None:
    table = Table.of(np.array([2, 0, 1, 1]))
    assert table.ideal_bits(np.array([4, 0, 2, 2])) == 4 * 1 + 4 * 2
    assert table.ideal_bits(np.array([0, 0, 0, 0])) == 0
    assert table.ideal_bits(np.array([1, 1, 0, 0])) == math.inf


@given(st.lists(st.integers(0, 2**48), max_size=50))
def test_numbers_and_back(numbers: list[int]) -> None:
    assert coder.numbers_from_bytes(coder.numbers_to_bytes(numbers)).tolist() == numbers


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80",
        b"\x01\xff\xff",
        b"\x80" * 7 + b"\x01",
        b"\xff" * 6 + b"\x7f",
        coder.numbers_to_bytes([2**48 + 1]),
    ],
)
def test_bad_numbers(raw: bytes) -> None:
    with pytest.raises(FileError):
        coder.numbers_from_bytes(raw)


@given(counts_lists)
def test_table_and_back(counts: list[int]) -> None:
    table = Table.of(np.array(counts))
    numbers = coder.numbers_from_bytes(b"\x07" + table.to_bytes() + b"\x09")
    found, stop = Table.read(numbers, 1, len(counts), sum(counts))
    assert stop == len(numbers) - 1
    assert found.symbols.tolist() == table.symbols.tolist()
    assert found.counts.tolist() == table.counts.tolist()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], "0 symbols"),
        ([0], "0 symbols"),
        ([5, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1], "5 symbols"),
        ([2, 0, 1, 0], "cut off"),
        ([2, 0, 5, 3, 5], "beyond"),
        ([2, 4, 5, 0, 5], "beyond"),
        ([2, 0, 5, 0, 6], "add up to 10"),
        ([2, 0, 10, 0, 0], "positive"),
        ([2, 2**48, 5, 2**48, 5], "beyond"),
    ],
)
def test_bad_tables(numbers: list[int], message: str) -> None:
    with pytest.raises(FileError, match=message):
        Table.read(np.array(numbers, np.int64), 0, alphabet=4, total=10)


def test_counts_that_would_wrap_around_are_refused() -> None:
    """2^16 counts of 2^48 add up to 2^64, which is 0 in 64 bits."""
    numbers = np.full(1 + 2 * (2**16 + 1), 2**48, np.int64)
    numbers[0] = 2**16 + 1
    numbers[1::2] = 0
    numbers[2] = 10
    with pytest.raises(FileError, match="add up to 10"):
        Table.read(numbers, 0, alphabet=2**17, total=10)


def test_bad_streams() -> None:
    table, alone = Table.of(np.array([3, 5])), Table.of(np.array([0, 8]))
    good = coder.encode(drawn([3, 5]), table)
    for stream, used in (
        (good[:-1], table),
        (good + bytes(4), table),
        (good + b"\x01\0\0\0", table),
        (good, alone),
    ):
        with pytest.raises(FileError, match="the stream"):
            coder.decode(stream, used, 8)
    assert coder.encode(np.ones(8, np.uint8), alone) == b""
    assert coder.decode(b"", alone, 8).tolist() == [1] * 8


@given(st.binary(max_size=300), st.sampled_from([1, 2, 4, 8, 16]))
def test_blocks_and_shuffles(raw: bytes, width: int) -> None:
    assert coder.unsqueeze(coder.squeeze(raw), len(raw)) == raw
    assert len(coder.squeeze(raw)) <= len(raw) + 1
    whole = raw[: len(raw) // width * width]
    assert coder.unshuffled(coder.shuffled(whole, width), width) == whole


@pytest.mark.parametrize(
    ("block", "size", "message"),
    [
        (b"", 5, "kind none"),
        (b"\x02abc", 3, "kind 02"),
        (b"\x00abc", 4, "3 bytes instead of 4"),
        (coder.squeeze(bytes(1000)), 999, "999"),
        (coder.squeeze(bytes(1000))[:-2], 1000, "cannot be decompressed"),
        (coder.squeeze(bytes(1000)) + b"more", 1000, "cannot be decompressed"),
        (b"\x01nothing", 10, "cannot be decompressed"),
        (b"\x01", 10, "cannot be decompressed"),
        (b"\x01abc", 2**40, "too many"),
    ],
)
def test_bad_blocks(block: bytes, size: int, message: str) -> None:
    with pytest.raises(FileError, match=message):
        coder.unsqueeze(block, size)


def test_what_compresses_too_well_is_stored_within_the_limit() -> None:
    raw = bytes(2**23)
    block = coder.squeeze(raw)
    assert block[:1] == b"\x00"  # zstd makes some 600 bytes of it, which may claim at most 2^20
    assert coder.unsqueeze(block, len(raw)) == raw
    assert coder.squeeze(raw[: 2**20])[:1] == b"\x01"


def cost_bits(counts: list[np.ndarray], own: tuple[bool, ...]) -> float:
    """Streams and tables of one choice, at the entropy."""

    def table_bits(total: np.ndarray) -> int:
        return 8 * len(Table.of(total).to_bytes())

    def stream_bits(tensor: np.ndarray, total: np.ndarray) -> float:
        share = tensor[tensor > 0] * np.log2(total[tensor > 0] / total.sum())
        return -float(share.sum())

    sharing = [tensor for tensor, alone in zip(counts, own, strict=True) if not alone]
    pool = np.sum(sharing, axis=0) if sharing else None
    whole = table_bits(pool) if pool is not None else 0.0
    for tensor, alone in zip(counts, own, strict=True):
        used = tensor if alone else pool
        assert used is not None
        whole += stream_bits(tensor, used) + (table_bits(tensor) if alone else 0)
    return whole


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 12))
def test_each_tensor_uses_the_cheaper_table(seed: int, tensors: int, alphabet: int) -> None:
    """No tensor gains by changing sides alone, and the whole is never above one shared table."""
    rng = np.random.default_rng(seed)
    counts = []
    for _ in range(tensors):
        shares = rng.dirichlet(np.full(alphabet, 0.5))
        counts.append(rng.multinomial(int(10 ** rng.uniform(0, 4)), shares))
    shared, tables = coder.choose_tables(counts)
    own = tuple(table is not shared for table in tables)
    assert (shared is None) == all(own)
    for tensor, table in zip(counts, tables, strict=True):
        if table is not shared:
            assert table.counts.tolist() == tensor[tensor > 0].tolist()
        alone = Table.of(tensor)
        by_own = alone.ideal_bits(tensor) + 8 * len(alone.to_bytes())
        by_shared = shared.ideal_bits(tensor) if shared is not None else math.inf
        assert by_own <= by_shared + 1e-6 if table is not shared else by_shared <= by_own + 1e-6
    if shared is not None:
        pool = np.sum([t for t, alone in zip(counts, own, strict=True) if not alone], axis=0)
        assert shared.counts.tolist() == pool[pool > 0].tolist()
    assert cost_bits(counts, own) <= cost_bits(counts, (False,) * tensors) + 1e-6


def test_tensors_of_one_kind_share_and_others_do_not() -> None:
    alike = [np.array([1000, 500, 250, 250]) + i for i in range(4)]
    shared, tables = coder.choose_tables([*alike, np.array([0, 0, 10, 3000])])
    assert shared is not None
    assert [table is not shared for table in tables] == [False] * 4 + [True]
    assert shared.total == sum(int(tensor.sum()) for tensor in alike)
