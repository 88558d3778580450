"""What is inside a .pwfn file, and what the same weights cost elsewhere. All sizes are in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from pwfn.evaluate.entropy import Pool
from pwfn.file.compressed import Compressed
from pwfn.file.format import Reader


@dataclass(frozen=True)
class TensorFacts:
    """One compressed tensor."""

    name: str
    shape: tuple[int, ...]
    weights: int
    unique: int
    entropy_bits: float  # a weight
    index_bytes: int
    table_bytes: int  # of its own frequency table, before compression; 0 where it uses the shared one
    bits_per_weight: float  # on disk: index and own table
    fp32_bytes: int
    fp16_bytes: int
    int8_bytes: int  # a byte a weight and a scale


@dataclass(frozen=True)
class FileFacts:
    """A whole file: its parts add up to ``file_bytes``."""

    path: str
    writer: str
    model: str | None  # as the record of the run names it
    posterior: str
    weights: int
    unique: int
    entropy_bits: float  # a weight, all in one pool
    power_of_two_share: float
    bits_per_weight: float  # on disk: indices and frequency tables
    header_bytes: int
    codebook_bytes: int
    table_bytes: int  # all frequency tables, as stored
    index_bytes: int
    posterior_bytes: int
    untouched_bytes: int
    padding_bytes: int
    file_bytes: int
    shared_table_bytes: int  # of ``table_bytes`` the shared one, before compression; 0 if there is none
    untouched_raw_bytes: int  # before compression, tied tensors once
    fp32_bytes: int  # weights in 4 bytes each, the other tensors as they are but not above fp32
    fp16_bytes: int  # every floating-point number in 2 bytes
    int8_bytes: int  # a byte a weight and a scale a tensor, the other tensors as in ``fp32_bytes``
    zstd19_bytes: int | None  # the fp32 bytes compressed by zstd -19, if that was measured
    tensors: tuple[TensorFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the ratio to each rival."""
        ratios = {f"ratio_{name}": size / self.file_bytes for name, size in self.rivals().items()}
        return {**asdict(self), **ratios}

    def rivals(self) -> dict[str, int]:
        """Bytes of the same network stored otherwise."""
        sizes = {
            "fp32": self.fp32_bytes,
            "fp16": self.fp16_bytes,
            "int8": self.int8_bytes,
            "zstd19": self.zstd19_bytes,
        }
        return {name: size for name, size in sizes.items() if size is not None}


def inspect(path: str | Path, *, zstd: bool = True) -> FileFacts:
    """Decode a file and measure it.

    The rival ``zstd -19`` gets the decoded weights as a plain fp32 file would hold them. That takes
    a while for large networks (about a second a megabyte), so that it can be left away.
    """
    reader = Reader(path)
    compressed = reader.compressed()
    values = compressed.values()
    sizes = reader.sizes
    pool = Pool.of(values)
    rest = list(_untouched_once(compressed))
    single, half = (sum(_bytes_at_most(tensor, width) for tensor in rest) for width in (4, 2))
    model = reader.header.record.get("model")
    tensors = tuple(_tensor_facts(reader, values))
    tables = next(section.raw for section in reader.header.sections if section.name == "tables")
    return FileFacts(
        path=str(path),
        writer=reader.header.writer,
        model=model if isinstance(model, str) else None,
        posterior=str(reader.header.posterior),
        weights=pool.weights,
        unique=pool.unique,
        entropy_bits=pool.entropy_bits,
        power_of_two_share=pool.power_of_two_share,
        bits_per_weight=8 * (sizes.indices + sizes.tables) / pool.weights,
        header_bytes=sizes.header,
        codebook_bytes=sizes.codebooks,
        table_bytes=sizes.tables,
        index_bytes=sizes.indices,
        posterior_bytes=sizes.posterior,
        untouched_bytes=sizes.untouched,
        padding_bytes=sizes.padding,
        file_bytes=reader.file_bytes,
        shared_table_bytes=tables - sum(tensor.table_bytes for tensor in tensors),
        untouched_raw_bytes=sum(tensor.nbytes for tensor in rest),
        fp32_bytes=4 * pool.weights + single,
        fp16_bytes=2 * pool.weights + half,
        int8_bytes=pool.weights + 4 * len(tensors) + single,
        zstd19_bytes=_zstd19_bytes(values, rest) if zstd else None,
        tensors=tensors,
    )


def fp32_bytes(compressed: Compressed) -> int:
    """Bytes of the whole network as plain float32 (what is narrower stays so)."""
    rest = _untouched_once(compressed)
    return 4 * compressed.layout.size + sum(_bytes_at_most(tensor, 4) for tensor in rest)


def _untouched_once(compressed: Compressed) -> Iterator[Tensor]:
    """The tensors that are not compressed, each once however many names it has."""
    aliases = {alias for left_out in compressed.layout.left_out for alias in left_out.aliases}
    return (tensor for name, tensor in compressed.untouched.items() if name not in aliases)


def _bytes_at_most(tensor: Tensor, width: int) -> int:
    """Bytes of a tensor whose floating-point numbers, if it holds any, are at most that wide."""
    size = tensor.element_size()
    return tensor.numel() * (min(size, width) if tensor.is_floating_point() else size)


def _tensor_facts(reader: Reader, values: Tensor) -> list[TensorFacts]:
    facts = []
    header = reader.header
    for entry, stream, own_bytes in zip(
        header.layout.entries, header.streams, reader.own_table_bytes(), strict=True
    ):
        pool = Pool.of(values[entry.span])
        facts.append(
            TensorFacts(
                name=entry.name,
                shape=entry.shape,
                weights=pool.weights,
                unique=pool.unique,
                entropy_bits=pool.entropy_bits,
                index_bytes=stream.size,
                table_bytes=own_bytes,
                bits_per_weight=8 * (stream.size + own_bytes) / pool.weights,
                fp32_bytes=4 * pool.weights,
                fp16_bytes=2 * pool.weights,
                int8_bytes=pool.weights + 4,
            )
        )
    return facts


def _zstd19_bytes(values: Tensor, rest: list[Tensor]) -> int:
    """The bytes that ``fp32_bytes`` counts, weights first, as one zstd frame."""
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    size = 0
    for tensor in (values.float(), *rest):
        narrow = tensor.float() if tensor.dtype is torch.float64 else tensor
        flat = narrow.contiguous().reshape(-1).view(torch.uint8)
        size += len(compressor.compress(flat.numpy().tobytes()))
    return size + len(compressor.flush())


def lines(facts: FileFacts) -> list[str]:
    """The facts for people, a line each; what speaks for the file is rounded down, what against it up."""
    bits = (
        f"entropy {_up(facts.entropy_bits)} bits a weight in one pool; on disk {_up(facts.bits_per_weight)}"
    )
    powers = math.floor(1000 * facts.power_of_two_share) / 10
    rows = [
        f"{facts.path}: {facts.file_bytes:,} bytes for {facts.weights:,} weights of {facts.unique} values",
        bits,
        f"{powers:.1f}% of the weights are zero or a power of two",
        f"model: {facts.model or 'not named'}; posterior: {facts.posterior}; written by {facts.writer}",
        "",
        f"{'where the bytes are':<24}{'bytes':>14}",
    ]
    notes = {
        "table": f"  (before compression the shared one has {facts.shared_table_bytes:,})",
        "untouched": f"  (before compression {facts.untouched_raw_bytes:,})",
    }
    parts = ("header", "codebook", "table", "index", "posterior", "untouched", "padding")
    rows += [
        f"{part:<24}{getattr(facts, part + '_bytes'):>14,}{notes.get(part, '')}" for part in (*parts, "file")
    ]
    rows += ["", f"{'the same network as':<24}{'bytes':>14}{'times this file':>18}"]
    labels = {"zstd19": "fp32 in zstd -19"}
    for name, size in facts.rivals().items():
        hundredths = 100 * size // facts.file_bytes
        rows.append(f"{labels.get(name, name):<24}{size:>14,}{hundredths / 100:>18.2f}")
    width = max(len(t.name) for t in facts.tensors)
    rows += [
        "",
        f"{'tensor':<{width}}  {'weights':>12}  {'unique':>6}  {'entropy':>8}  {'on disk':>8}  {'bytes':>10}",
    ]
    rows += [
        f"{t.name:<{width}}  {t.weights:>12,}  {t.unique:>6}  {_up(t.entropy_bits):>8}  "
        f"{_up(t.bits_per_weight):>8}  {t.index_bytes + t.table_bytes:>10,}"
        for t in facts.tensors
    ]
    # Names come from the file: nothing in them may steer the terminal.
    return ["".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in row) for row in rows]


def _up(bits: float) -> str:
    """Four decimals, never fewer bits than there are.

    >>> _up(2.00001), _up(2.5)
    ('2.0001', '2.5000')
    """
    return f"{math.ceil(Fraction(bits) * 10_000) / 10_000:.4f}"
