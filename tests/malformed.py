"""Valid files of many kinds, and tools to take a file apart, change it and seal it again.

A changed file gets sizes and checksums that fit, so that a test reaches the check behind the checksum. Files
are taken apart with struct, json, zlib and zstandard only.
"""

from __future__ import annotations

import copy
import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import zstandard
from oracles.untouched import WIDTHS
from torch import Tensor, nn

from pwfn import Compressed, Layout
from pwfn.file.format import dumps
from pwfn.file.writer import VERSION
from pwfn.layout import untouched

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class Mixed(nn.Module):
    """Every kind of entry (channels last, grouped, tied, attention, scalar), and buffers of all types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.grouped = nn.Conv1d(4, 6, 3, groups=2)
        self.back = nn.ConvTranspose2d(4, 2, 2)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.25))
        self.shift = nn.Parameter(torch.tensor([0.5, -3.0]))
        generator = torch.Generator().manual_seed(5)
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            numbers = torch.randint(0, 100, (3, 2), generator=generator)
            self.register_buffer(f"kept_{name}", (numbers % 2 == 0) if name == "bool" else numbers.to(dtype))
        self.register_buffer("kept_empty", torch.zeros(0, 3))
        self.register_buffer("kept_bits", torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]))
        self.register_buffer("kept_turned", torch.arange(6.0).view(2, 3).t())


def drawn(layout: Layout, values: int, seed: int = 0) -> Tensor:
    """One value per weight, few of them likely, as after fixing: multiples of 1/16 about zero."""
    generator = torch.Generator().manual_seed(seed)
    spread = max(values / 6, 0.1)
    steps = (torch.randn(layout.size, generator=generator, dtype=torch.float64) * spread).round()
    return (steps.clamp(-(values // 2), values // 2) / 16).to(layout.dtype)


def sigmas(layout: Layout, kinds: int, seed: int = 1) -> Tensor:
    """One sigma per weight, of that many kinds; 0: each weight has its own."""
    generator = torch.Generator().manual_seed(seed)
    if kinds == 0:
        return torch.rand(layout.size, generator=generator, dtype=torch.float64).to(layout.dtype)
    some = torch.rand(kinds, generator=generator, dtype=torch.float64).to(layout.dtype)
    return some[torch.randint(0, kinds, (layout.size,), generator=generator)]


def mixed(
    values: int = 30,
    kinds: int = 3,
    dtype: torch.dtype = torch.float32,
    divide: Callable[[Any], tuple[int, int]] | None = None,
) -> Compressed:
    model = Mixed()
    model.load_state_dict({k: v.to(dtype) if v.is_floating_point() and "kept" not in k else v
                           for k, v in model.state_dict().items()}, assign=True)  # fmt: skip
    model.head.weight = model.embedding.weight
    layout = Layout.of(model, include=["scale"])
    record = {"epochs": 3, "loss": 0.125, "note": "größer: ×2", "nested": {"list": [1, None, True, "a\nb"]}}
    sigma = sigmas(layout, kinds)
    return Compressed.of(
        layout, drawn(layout, values), sigma, untouched(model, layout), divide=divide, record=record
    )


def fitted(dtype: torch.dtype = torch.float32) -> Compressed:
    """With a predictive sigma: one of the tensors has none."""
    made = mixed(dtype=dtype)
    return replace(made, sigma_codes=tuple(37 * n % 256 for n in range(len(made.layout.entries))))


def plain(*sizes: tuple[int, int], values: int, kinds: int = 3) -> Compressed:
    """Linear layers only."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))
    layout = Layout.of(model)
    return Compressed.of(layout, drawn(layout, values), sigmas(layout, kinds), {})


def one_flat_layer() -> Compressed:
    """Several layers, one with a single value and one with other values than the rest."""
    whole = plain((20, 30), (30, 20), (40, 50), values=20)
    values = whole.values()
    values[whole.layout.entries[1].span] = 2.0
    values[whole.layout.entries[2].span] += 7.0
    return Compressed.of(whole.layout, values, whole.weight_sigma, {})


def with_scales(*sizes: tuple[int, int]) -> Compressed:
    """Linear layers with rows of zeros, which are shorter with contexts, in streams that they share."""
    whole = plain(*sizes, values=20)
    values = whole.values()
    for entry in whole.layout.entries:
        values[entry.span].view(entry.shape)[::3] = 0.0
    return Compressed.of(whole.layout, values, whole.weight_sigma, {"kept": torch.arange(5.0)})


def per_axis(axis: int) -> Callable[[Any], tuple[int, int]]:
    return lambda entry: (axis, entry.shape[axis]) if len(entry.shape) > 1 else (0, 1)


def per_layer(entry: Any) -> tuple[int, int]:
    return 0, 1


CASES: dict[str, tuple[Callable[[], Compressed], str]] = {
    "centre": (mixed, "centre"),
    "weight": (mixed, "weight"),
    "none": (mixed, "none"),
    "tensor": (fitted, "tensor"),
    "float64_tensor": (lambda: fitted(torch.float64), "tensor"),
    "channels": (lambda: mixed(values=9, divide=per_axis(0)), "centre"),
    "channels_weight": (lambda: mixed(values=9, divide=per_axis(0)), "weight"),
    "input_channels": (lambda: mixed(values=9, divide=per_axis(1)), "weight"),
    "layers": (lambda: mixed(divide=per_layer), "centre"),
    "bfloat16": (lambda: mixed(dtype=torch.bfloat16), "centre"),
    "float64": (lambda: mixed(dtype=torch.float64), "weight"),
    "float64_centre": (lambda: mixed(dtype=torch.float64, divide=per_layer), "centre"),
    "one_value": (lambda: mixed(values=1), "weight"),
    "one_sigma": (lambda: mixed(kinds=1), "weight"),
    "one_flat_layer": (one_flat_layer, "centre"),
    "two_values": (lambda: plain((300, 301), values=2), "weight"),
    "many_values": (lambda: plain((100, 300), (300, 10), values=2_000), "weight"),
    "very_many_values": (lambda: plain((300, 400), values=80_000, kinds=0), "weight"),
    "own_sigmas": (lambda: plain((40, 50), values=20, kinds=0), "weight"),
    "one_weight": (lambda: plain((1, 1), values=20), "weight"),
    "contexts": (lambda: with_scales((20, 30), (30, 20), (40, 50)), "centre"),
    "padded": (lambda: plain((2_000, 1_000), values=1, kinds=1), "centre"),
}  # fmt: skip


CASES |= {f"{name}@1": made for name, made in CASES.items()}
"""With @1 the file has version 1 of the format."""


@cache
def case(name: str) -> tuple[Compressed, bytes]:
    """A network and the bytes of its file."""
    make, posterior = CASES[name]
    compressed = make()
    return compressed, dumps(compressed, posterior, version_of(name))


def version_of(name: str) -> int:
    return int(name.partition("@")[2] or VERSION)


SECTIONS = ("codebooks", "tables", "indices", "posterior", "untouched", "padding")
PLAIN = {1: ("indices", "padding"), 2: ("indices", "untouched", "padding")}  # by version: no blocks
PREFIX = struct.Struct("<8sHHIII")


@dataclass
class Parts:
    """A file taken apart: header as Python values, sections before compression."""

    version: int
    header: dict[str, Any]
    contents: dict[str, bytes]
    streams: list[bytes]
    blocks: dict[str, bytes] = field(default_factory=dict)  # stored instead of the compressed content
    late: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)  # last changes of the header

    @classmethod
    def of(cls, data: bytes) -> Parts:
        _, version, _, size, raw, _ = PREFIX.unpack(data[:24])
        header = json.loads(opened(data[24 : 24 + size], raw))
        at, contents = 24 + size, {}
        for name, stored, raw, _ in header["sections"]:
            block = data[at : at + stored]
            contents[name] = block if name in PLAIN[version] else opened(block, raw)
            at += stored
        at, streams = 0, []
        for tensor in header["tensors"]:
            streams.append(contents["indices"][at : at + tensor["bytes"]])
            at += tensor["bytes"]
        return cls(version, header, contents, streams)

    def sealed(self, text: bytes | None = None) -> bytes:
        """The file, with sizes and checksums that fit; ``text`` replaces the header."""
        header = copy.deepcopy(self.header)
        for tensor, stream in zip(header["tensors"], self.streams, strict=False):
            tensor |= {"bytes": len(stream), "crc32": zlib.crc32(stream)}
        raw = {**self.contents, "indices": b"".join(self.streams)}
        stored = {n: raw[n] if n in PLAIN[self.version] else closed(raw[n]) for n in SECTIONS}
        stored |= self.blocks
        sizes = {n: len(raw[n]) for n in SECTIONS}
        if self.version > 1:
            sizes["untouched"] = sum(
                math.prod(shape) * WIDTHS[dtype] for _, shape, dtype in header["untouched"]
            )
        header["sections"] = [[n, len(stored[n]), sizes[n], zlib.crc32(stored[n])] for n in SECTIONS]
        for change in self.late:
            change(header)
        text = json.dumps(header).encode() if text is None else text
        return with_header(closed(text), len(text), self.version) + b"".join(stored.values())


def with_header(block: bytes, raw: int, version: int = VERSION) -> bytes:
    return PREFIX.pack(b"\x89PWFN\r\n\x1a", version, 0, len(block), raw, zlib.crc32(block)) + block


def opened(block: bytes, raw: int) -> bytes:
    if block[:1] == b"\x01":
        return zstandard.ZstdDecompressor().decompress(block[1:], max_output_size=raw)
    return block[1:]


def closed(raw: bytes) -> bytes:
    """A block, compressed where that is smaller; no bytes for no content."""
    if not raw:
        return b""
    packed = zstandard.ZstdCompressor(level=3).compress(raw)
    return b"\x01" + packed if len(packed) < len(raw) else b"\x00" + raw


def leb128(*numbers: int) -> bytes:
    out = b""
    for number in numbers:
        while number > 127:
            out += bytes([number % 128 + 128])
            number //= 128
        out += bytes([number])
    return out
