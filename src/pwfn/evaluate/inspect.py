"""What a .pwfn file holds, and the size of the same network in other formats. All sizes are in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from pwfn.config.changes import Settings
from pwfn.evaluate.entropy import Pool
from pwfn.file.coder import bytes_of
from pwfn.file.compressed import Compressed
from pwfn.file.content import NOTHING_TO_DRAW
from pwfn.file.format import Reader

PARTS = {
    "header": "header",
    "codebook": "codebooks",
    "table": "frequency tables",
    "index": "coded weights",
    "posterior": "sigmas",
    "untouched": "other tensors",
    "padding": "padding",
}
"""What a file consists of, in the order of :class:`pwfn.file.format.Sizes`, and how each part is called."""

_RIVALS = {"fp32": "fp32", "fp16": "fp16", "int8": "int8", "zstd19": "fp32 with zstd -19"}


@dataclass(frozen=True)
class TensorFacts:
    """One compressed tensor."""

    name: str
    shape: tuple[int, ...]
    weights: int
    unique: int
    entropy_bits: float  # per weight
    index_bytes: int
    table_bytes: int  # of its own frequency table, before compression; 0 if it uses the shared one
    bits_per_weight: float  # on disk: indices and own table


@dataclass(frozen=True)
class FileFacts:
    """A whole file: its parts add up to ``file_bytes``."""

    path: str
    content_sha256: str  # of the network, see docs/format.md
    writer: str
    model: str | None  # as the record of the run names it
    posterior: str  # which sigmas it has: none, tensor, centre or weight
    drawable: bool  # whether they are worth drawing from
    weights: int
    unique: int
    entropy_bits: float  # per weight, all weights in one pool
    power_of_two_share: float
    bits_per_weight: float  # on disk: indices and frequency tables
    parts: Mapping[str, int]  # bytes of each of PARTS, as stored
    file_bytes: int
    shared_table_bytes: int  # the shared frequency table before compression; 0 if there is none
    untouched_raw_bytes: int  # before compression, tied tensors once
    fp32_bytes: int  # weights in 4 bytes each, other tensors in their own type but at most fp32
    fp16_bytes: int  # every floating-point number in 2 bytes
    int8_bytes: int  # one byte per weight, one scale per tensor, other tensors as in ``fp32_bytes``
    zstd19_bytes: int | None  # ``fp32_bytes`` compressed by zstd -19; None if not measured
    tensors: tuple[TensorFacts, ...]
    record: Mapping[str, Any]  # facts of the run, as the file states them

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the ratio to each other format."""
        facts = asdict(self)
        parts = {f"{part}_bytes": size for part, size in facts.pop("parts").items()}
        ratios = {f"ratio_{name}": size / self.file_bytes for name, size in self.rivals().items()}
        return {**facts, **parts, **ratios}

    def rivals(self) -> dict[str, int]:
        """Size of the same network in other formats."""
        sizes = {name: getattr(self, f"{name}_bytes") for name in _RIVALS}
        return {name: size for name, size in sizes.items() if size is not None}


def inspect(path: str | Path, *, zstd: bool = True) -> FileFacts:
    """Decode a file and measure it.

    ``zstd=False`` skips the comparison with ``zstd -19``, which takes about one second per megabyte.
    """
    reader = Reader(path)
    header, sizes, compressed = reader.header, reader.sizes, reader.compressed()
    values = compressed.values()
    pool = Pool.of(values)
    rest = _untouched_once(compressed)
    single, half = (sum(_bytes_at_most(tensor, width) for tensor in rest) for width in (4, 2))
    tensors = tuple(_tensor_facts(reader, values))
    model = header.record.get("model")
    return FileFacts(
        path=str(path),
        content_sha256=compressed.content_sha256(),
        writer=header.writer,
        model=model if isinstance(model, str) else None,
        posterior=compressed.posterior,
        drawable=compressed.drawable,
        weights=pool.weights,
        unique=pool.unique,
        entropy_bits=pool.entropy_bits,
        power_of_two_share=pool.power_of_two_share,
        bits_per_weight=8 * (sizes.indices + sizes.tables) / pool.weights,
        parts=dict(zip(PARTS, sizes, strict=True)),
        file_bytes=reader.file_bytes,
        shared_table_bytes=header.section("tables").raw - sum(tensor.table_bytes for tensor in tensors),
        untouched_raw_bytes=sum(tensor.nbytes for tensor in rest),
        fp32_bytes=fp32_bytes(compressed),
        fp16_bytes=2 * pool.weights + half,
        int8_bytes=pool.weights + 4 * len(tensors) + single,
        zstd19_bytes=_zstd19_bytes([values, *rest]) if zstd else None,
        tensors=tensors,
        record=header.record,
    )


def fp32_bytes(compressed: Compressed) -> int:
    """Bytes of the network as plain float32; narrower tensors keep their own type."""
    rest = _untouched_once(compressed)
    return 4 * compressed.layout.size + sum(_bytes_at_most(tensor, 4) for tensor in rest)


def _untouched_once(compressed: Compressed) -> list[Tensor]:
    """The tensors that are not compressed, tied ones once."""
    aliases = {alias for item in compressed.layout.left_out for alias in item.aliases}
    return [tensor for name, tensor in compressed.untouched.items() if name not in aliases]


def _bytes_at_most(tensor: Tensor, width: int) -> int:
    """Size of a tensor whose floating-point numbers are stored in at most ``width`` bytes."""
    size = tensor.element_size()
    return tensor.numel() * (min(size, width) if tensor.is_floating_point() else size)


def _tensor_facts(reader: Reader, values: Tensor) -> list[TensorFacts]:
    tables = {
        stream.first: len(stream.model.to_bytes())
        for stream in reader.streams
        if reader.header.tensors[stream.first].has_model
    }
    facts = []
    for n, (entry, size) in enumerate(zip(reader.header.layout.entries, reader.index_bytes(), strict=True)):
        pool = Pool.of(values[entry.span])
        facts.append(
            TensorFacts(
                name=entry.name,
                shape=entry.shape,
                weights=pool.weights,
                unique=pool.unique,
                entropy_bits=pool.entropy_bits,
                index_bytes=size,
                table_bytes=tables.get(n, 0),
                bits_per_weight=8 * (size + tables.get(n, 0)) / pool.weights,
            )
        )
    return facts


def _zstd19_bytes(tensors: list[Tensor]) -> int:
    """Size of one zstd frame with the bytes that ``fp32_bytes`` counts."""
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    narrow = (tensor.float() if tensor.dtype is torch.float64 else tensor for tensor in tensors)
    return sum(len(compressor.compress(bytes_of(tensor))) for tensor in narrow) + len(compressor.flush())


def lines(facts: FileFacts) -> list[str]:
    """The facts as text. Figures in favour of the file are rounded down, all others up."""
    powers = math.floor(1000 * facts.power_of_two_share) / 10
    rows = [
        f"{facts.path}: {facts.file_bytes:,} bytes for {facts.weights:,} weights of {facts.unique:,} values",
        f"bits per weight: {_up(facts.bits_per_weight)} on disk, {_up(facts.entropy_bits)} entropy",
        f"zero or a power of two: {powers:.1f}% of the weights",
        f"model: {facts.model or 'not named'}; posterior: {_posterior(facts)}; written by {facts.writer}",
        f"content, SHA-256: {facts.content_sha256}",
        *_recorded(facts.record),
        "",
        f"{'part':<24}{'bytes':>14}",
    ]
    notes = {
        "table": f"  (shared table before compression: {facts.shared_table_bytes:,})",
        "untouched": f"  (before compression: {facts.untouched_raw_bytes:,})",
    }
    for part, size in facts.parts.items():
        rows.append(f"{PARTS[part]:<24}{size:>14,}{notes.get(part, '')}")
    rows.append(f"{'whole file':<24}{facts.file_bytes:>14,}")
    rows += ["", f"{'same network as':<24}{'bytes':>14}{'times as large':>18}"]
    for name, size in facts.rivals().items():
        rows.append(f"{_RIVALS[name]:<24}{size:>14,}{100 * size // facts.file_bytes / 100:>18.2f}")
    width = max(len(t.name) for t in facts.tensors)
    rows += ["", f"{'':<{width}}{'':>22}  {'bits per weight':^18}"]
    rows.append(
        f"{'tensor':<{width}}  {'weights':>12}  {'unique':>6}  {'entropy':>8}  {'on disk':>8}  {'bytes':>10}"
    )
    rows += [
        f"{t.name:<{width}}  {t.weights:>12,}  {t.unique:>6}  {_up(t.entropy_bits):>8}  "
        f"{_up(t.bits_per_weight):>8}  {t.index_bytes + t.table_bytes:>10,}"
        for t in facts.tensors
    ]
    # Names come from the file: no control character may reach the terminal.
    return [
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in row).rstrip() for row in rows
    ]


def _posterior(facts: FileFacts) -> str:
    fitted_to_zero = facts.posterior != "none" and not facts.drawable
    return f"{facts.posterior} ({NOTHING_TO_DRAW})" if fitted_to_zero else facts.posterior


def _recorded(record: Mapping[str, Any]) -> list[str]:
    """Accuracy, data and settings as the record of the run has them; what it does not have is left out.

    >>> _recorded({"after": {"metric": 0.5, "examples": 10}, "data": "5a"})
    ['accuracy: 50.00% on 10 examples', 'data: fingerprint 5a']
    """
    rows = []
    before, after = (record.get(key) for key in ("before", "after"))
    if isinstance(after, Mapping) and isinstance(metric := after.get("metric"), float):
        agrees = after.get("of") == "agreement"
        start = before.get("metric") if isinstance(before, Mapping) and not agrees else None
        was = f"{start:.2%} before, " if isinstance(start, float) else ""
        what = "agreement with the original network" if agrees else "accuracy"
        rows.append(f"{what}: {was}{metric:.2%}{' after' * bool(was)} on {after.get('examples')} examples")
    if record.get("data"):
        rows.append(f"data: fingerprint {record['data']}")
    if isinstance(settings := record.get("settings"), Mapping):
        rows.append(f"settings: {Settings.of(settings)}")
    return rows


def _up(bits: float) -> str:
    """Four decimals, rounded up.

    >>> _up(2.00001), _up(2.5)
    ('2.0001', '2.5000')
    """
    return f"{math.ceil(Fraction(bits) * 10_000) / 10_000:.4f}"
