"""What is inside a .pwfn file, and what the same weights cost elsewhere. All sizes are in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import zstandard

from pwfn.compressed import Compressed
from pwfn.fileformat import Reader
from pwfn.metrics import Pool


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


@dataclass(frozen=True)
class FileFacts:
    """A whole file: its parts add up to ``file_bytes``."""

    path: str
    writer: str
    posterior: str
    weights: int
    unique: int
    entropy_bits: float  # a weight, all in one pool
    power_of_two_share: float
    bits_per_weight: float  # on disk: indices and frequency tables
    header_bytes: int
    codebook_bytes: int
    table_bytes: int
    index_bytes: int
    posterior_bytes: int
    untouched_bytes: int
    padding_bytes: int
    file_bytes: int
    untouched_raw_bytes: int
    fp32_bytes: int  # weights in 4 bytes each, the other tensors as they are
    fp16_bytes: int  # every floating-point number in 2 bytes
    int8_bytes: int  # a byte a weight and a scale a tensor, the other tensors as they are
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
    raw = sum(tensor.numel() * tensor.element_size() for tensor in compressed.untouched.values())
    halved = sum(
        tensor.numel() * (2 if tensor.is_floating_point() else tensor.element_size())
        for tensor in compressed.untouched.values()
    )
    return FileFacts(
        path=str(path),
        writer=reader.header.writer,
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
        untouched_raw_bytes=raw,
        fp32_bytes=4 * pool.weights + raw,
        fp16_bytes=2 * pool.weights + halved,
        int8_bytes=pool.weights + 4 * len(compressed.layout.entries) + raw,
        zstd19_bytes=_zstd19_bytes(compressed) if zstd else None,
        tensors=tuple(_tensor_facts(reader, values)),
    )


def _tensor_facts(reader: Reader, values: torch.Tensor) -> list[TensorFacts]:
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
            )
        )
    return facts


def _zstd19_bytes(compressed: Compressed) -> int:
    aliases = {alias for entry in compressed.layout.entries for alias in entry.aliases}
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    size = 0
    for name, tensor in compressed.dense_state_dict().items():
        if name not in aliases:
            wide = tensor.float() if tensor.is_floating_point() else tensor
            size += len(
                compressor.compress(wide.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            )
    return size + len(compressor.flush())


def lines(facts: FileFacts) -> list[str]:
    """The facts for people, a line each; sizes in whole bytes, ratios cut off and not rounded up."""
    rows = [
        f"{facts.path}: {facts.file_bytes:,} bytes for {facts.weights:,} weights of {facts.unique} values",
        f"entropy {facts.entropy_bits:.4f} bits a weight in one pool; on disk {facts.bits_per_weight:.4f}",
        f"{facts.power_of_two_share:.1%} of the weights are zero or a power of two",
        f"posterior: {facts.posterior}",
        "",
        f"{'where the bytes are':<24}{'bytes':>14}",
    ]
    parts = ("header", "codebook", "table", "index", "posterior", "untouched", "padding")
    rows += [f"{part:<24}{getattr(facts, part + '_bytes'):>14,}" for part in parts]
    rows += ["", f"{'the same network as':<24}{'bytes':>14}{'times this file':>18}"]
    labels = {"zstd19": "fp32 in zstd -19"}
    for name, size in facts.rivals().items():
        times = int(100 * size / facts.file_bytes) / 100
        rows.append(f"{labels.get(name, name):<24}{size:>14,}{times:>18.2f}")
    width = max(len(t.name) for t in facts.tensors)
    rows += [
        "",
        f"{'tensor':<{width}}  {'weights':>12}  {'unique':>6}  {'entropy':>8}  {'on disk':>8}  {'bytes':>10}",
    ]
    rows += [
        f"{t.name:<{width}}  {t.weights:>12,}  {t.unique:>6}  {t.entropy_bits:>8.4f}  "
        f"{t.bits_per_weight:>8.4f}  {t.index_bytes + t.table_bytes:>10,}"
        for t in facts.tensors
    ]
    return rows
