"""The tensors that are not compressed as bytes: exact, small, and safe to read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed import DTYPES
from oracles import untouched as oracle
from torch import Tensor

from pwfn import FileError, load
from pwfn.config import FinishConfig, UncompressedDtype
from pwfn.file import coder, huffman, untouched_coder
from pwfn.file.content import name_of
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.file.header import Stored
from pwfn.zoo import models

MODELS = Path(__file__).parents[1] / "experiments/models"
SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-40, 5e-324, 65504.0, 6e-8, 3.4e38, 2.0**-126]
CONTENTS = ("any bits", "normal", "rounded", "scales", "special", "constant", "zeros", "sparse", "small")


def listed(tensors: dict[str, Tensor]) -> list[Stored]:
    return [Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def numbers_of(tensor: Tensor) -> bytes:
    return coder.bytes_of(tensor) if tensor.numel() else b""


def encoded(tensors: dict[str, Tensor]) -> bytes:
    """Their bytes, which decode to the same bits."""
    raw = untouched_coder.encode(tensors)
    found = untouched_coder.decode(raw, listed(tensors))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert numbers_of(found[name]) == numbers_of(tensor), name
    return raw


def of_bytes(raw: bytes, dtype: torch.dtype) -> Tensor:
    return coder.tensor_of(raw, dtype, (len(raw) // dtype.itemsize,))


def tensor(dtype: torch.dtype, count: int, content: str, source: np.random.Generator) -> Tensor:
    """Numbers of one kind."""
    if content == "any bits":
        raw = source.bytes(count * dtype.itemsize)
        return of_bytes(bytes(byte % 2 for byte in raw) if dtype is torch.bool else raw, dtype)
    numbers = torch.from_numpy(source.standard_normal(count))
    if content == "rounded":
        numbers = numbers.bfloat16().double()
    elif content == "scales":
        numbers = (0.5 + 0.1 * numbers).half().double()
    elif content == "special":
        numbers = torch.from_numpy(source.choice(SPECIAL, count))
    elif content == "constant":
        numbers = numbers[:1].expand(count)
    elif content == "zeros":
        numbers = torch.zeros(count)
    elif content == "sparse":
        numbers = numbers * (numbers > 1.5)
    elif content == "small":
        numbers = 5 + numbers.round()
    if not dtype.is_floating_point and not dtype.is_complex:
        numbers = numbers.nan_to_num(0, 9, 0).clamp(0, 9)
    return numbers.to(dtype)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_every_bit_of_any_tensors(data: st.DataObject, seed: int) -> None:
    source = np.random.default_rng(seed)
    tensors = {}
    for i in range(data.draw(st.integers(0, 6))):
        dtype = data.draw(st.sampled_from(DTYPES))
        count = data.draw(st.integers(0, 40))
        made = tensor(dtype, count, data.draw(st.sampled_from(CONTENTS)), source)
        name = f"{i}.{data.draw(st.sampled_from(['weight', 'bias']))}"
        tensors[name] = made.view(1, count, 1) if data.draw(st.booleans()) else made
    raw = encoded(tensors)
    plain = oracle.decode(raw, [(n, list(t.shape), name_of(t.dtype)) for n, t in tensors.items()])
    assert plain == {name: numbers_of(made) for name, made in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", CONTENTS)
def test_every_bit_of_many_numbers(dtype: torch.dtype, content: str) -> None:
    """More than are decoded at a time."""
    made = tensor(dtype, 20_011, content, np.random.default_rng(0))
    raw = encoded({"one": made, "scalar": made[0], "none": made[:0]})
    assert len(raw) < 20_011 * dtype.itemsize + 100


def test_no_tensor_and_no_number_take_no_byte() -> None:
    assert encoded({}) == b""
    assert encoded({"a": torch.empty(0, 3), "b": torch.empty(2, 0, dtype=torch.int8)}) == b""


def test_constants_by_hand() -> None:
    """Kind 2 + k as the bits of 3 + k, then the k last bytes of the number."""
    zeros = {"a.mean": torch.zeros(7), "b.mean": torch.zeros(2, 2)}
    assert encoded(zeros) == bytes([0b011_00000])
    assert encoded({"var": torch.ones(9)}) == bytes([0b00101_000, 0x80, 0x3F])
    assert encoded({"count": torch.tensor(2**56)}) == bytes([0b00100_000, 1])


def test_coded_numbers_by_hand() -> None:
    """1, 2, 1, -1: steps 0, 1, 0, 0 from exponent 127 on, no bit of a mantissa, signs in the heads."""
    facts = "010" + "010" + "1" + "010" + "0000000" + "10000000"  # coded, sign in head, m, f = 1, start
    base = "1" + "1" + "0000"  # one symbol, 0, without bits
    table = "011" + "1" + "0001" + "1" + "0010" + "1" + "0010"  # 0, 1 and 2: 1, 2 and 2 bits
    whole = facts + base + table + "0" + "11" + "0" + "10"
    raw = int(whole.ljust(-(-len(whole) // 8) * 8, "0"), 2).to_bytes(-(-len(whole) // 8), "big")
    wanted = [Stored("a", (4,), torch.float32)]
    assert untouched_coder.decode(raw, wanted)["a"].tolist() == [1, 2, 1, -1]
    many = torch.tensor([1.0, 2.0, 1.0, -1.0] * 50)
    assert len(encoded({"a": many})) < 50


def test_a_long_code_is_cut_to_15_bits() -> None:
    """Counts that double with each symbol would need a code of 19 bits."""
    symbols = np.repeat(np.arange(20), 2 ** np.arange(20).clip(0, 17)).astype(np.int64)
    raw = huffman.pack(*huffman.huffman(symbols))
    assert np.array_equal(huffman.Bits(raw).symbols(len(symbols)), symbols)


@given(st.lists(st.integers(0, 2**48), max_size=20))
def test_whole_numbers(numbers: list[int]) -> None:
    bits = huffman.Bits(huffman.pack(huffman.gamma(*numbers)))
    assert [bits.number(2**48) for _ in numbers] == numbers


@pytest.mark.parametrize(("bits", "used"), [(16, 7), (13, 10), (0, 23)])
def test_only_the_bits_that_are_used_take_space(bits: int, used: int) -> None:
    """Numbers from 1 to 2, positive: nothing but their mantissas."""
    mantissa = torch.from_numpy(np.random.default_rng(0).integers(0, 2**used, 8000)) << bits
    numbers = (mantissa + (127 << 23)).to(torch.int32).view(torch.float32)
    assert 1000 * used <= len(encoded({"a": numbers})) <= 1000 * used + 20


def test_a_constant_of_many_bytes_is_padded() -> None:
    raw = encoded({"a": torch.zeros(10**6)})
    assert len(raw) == -(-4 * 10**6 // 1024)


def valid() -> list[dict[str, Tensor]]:
    source = np.random.default_rng(0)
    return [
        {f"{i}.{content}": tensor(dtype, 20, content, source) for i in range(2) for content in CONTENTS}
        for dtype in (torch.float32, torch.float16, torch.complex128, torch.int64, torch.bool)
    ]


def read(raw: bytes, wanted: list[Stored]) -> None:
    """A file error or tensors of the right shapes, and nothing else."""
    try:
        found = untouched_coder.decode(raw, wanted)
    except FileError:
        return
    assert [found[item.name].shape for item in wanted] == [item.shape for item in wanted]


def test_mutated_bytes_are_an_error_or_other_numbers() -> None:
    chance = random.Random(0)
    for tensors in valid():
        raw, wanted = untouched_coder.encode(tensors), listed(tensors)
        for _ in range(500):
            changed = bytearray(raw)
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(changed))
                changed[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
            read(bytes(changed), wanted)
            read(chance.randbytes(chance.randint(0, 40)), wanted)


def test_truncated_bytes_are_an_error() -> None:
    for tensors in valid():
        raw, wanted = untouched_coder.encode(tensors), listed(tensors)
        for size in range(len(raw)):
            with pytest.raises(FileError):
                untouched_coder.decode(raw[:size], wanted)
        with pytest.raises(FileError):
            untouched_coder.decode(raw + b"\x01", wanted)


def test_a_shape_that_the_bytes_cannot_hold_is_an_error_before_memory_is_allocated() -> None:
    raw = untouched_coder.encode({"a": torch.zeros(9)})
    for shape in ((2**40,), (2**24, 2**20)):
        with pytest.raises(FileError, match="too many"):
            untouched_coder.decode(raw, [Stored("a", shape, torch.float32)])


@pytest.mark.parametrize(
    ("name", "dtype", "goal"),
    [
        ("resnet20_seed0", "tf32", 3_000),
        ("resnet20_small_seed0", "bfloat16", 1_600),  # as it was made
        ("resnet56_seed0", "tf32", 8_500),
        ("resnet18_seed0", "tf32", 22_000),
        ("vit_tiny_smoothed_averaged_seed1", "tf32", 35_000),
    ],
)
def test_bytes_of_the_committed_networks(name: str, dtype: str, goal: int) -> None:
    compressed = load(MODELS / f"{name}.pwfn")
    model = compressed.apply_to(models.create(compressed.record["model"]))
    shrink_uncompressed(model, FinishConfig(uncompressed_dtype=UncompressedDtype(dtype)))
    state = model.state_dict()
    assert len(encoded({key: state[key] for key in compressed.untouched})) <= goal
