"""How fast and how small: indices and whole files, against raw constriction, zstd -19 and safetensors.

    python benchmarks/codec.py [--quick]

One JSON line a case, all on one core, every time a median of several. ``ratio`` is our time
over the rival's; ``weights_per_s`` is ours. The network has the shapes of ResNet-18 for ten classes, 11.2 M
weights, drawn so that the pool has 1.8, 2.5 and 3.4 bits with 22, 155 and 325 values and every tensor
a spread of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import constriction
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from pwfn import Compressed, Layout
from pwfn.file import coder
from pwfn.file.format import Reader, load, save

SETTINGS = ((1.8, 22), (2.5, 155), (3.4, 325))
DECODE_TARGET, ENCODE_TARGET = 30e6, 60e6  # weights a second
ZSTD_SLICE = 2**20  # weights: zstd -19 packs about one megabyte a second

BOUNDS = ("within_half_percent", "within_one_percent_and_8_kib")

Result = TypeVar("Result")
Floats = NDArray[np.float64]


def resnet18(divisor: int) -> nn.Module:
    """Convolutions, norms and head, every width divided."""
    layers: list[nn.Module] = []

    def conv(outputs: int, inputs: int, size: int) -> None:
        layers.append(nn.Conv2d(inputs, outputs, size, bias=False))
        layers.append(nn.BatchNorm2d(outputs))

    width = 64 // divisor
    conv(width, 3, 7)
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        for block in range(2):
            conv(outputs, inputs, 3)
            conv(outputs, outputs, 3)
            if inputs != outputs and block == 0:
                conv(outputs, inputs, 1)
            inputs = outputs
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def shares(values: int, spread: float) -> Floats:
    """Two-sided geometric about the middle, over a thousandth that is even, so that each value occurs."""
    peaked = np.exp(-np.abs(np.arange(values) - values // 2) / spread)
    mixed: Floats = 0.999 * peaked / peaked.sum() + 0.001 / values
    return mixed


def entropy_bits(counts: NDArray[Any]) -> float:
    """Of all counted symbols together: ``-sum n log2(n / N)``."""
    present = counts[counts > 0].astype(np.float64)
    return float(-(present * np.log2(present / present.sum())).sum())


def drawn(layout: Layout, bits: float, values: int) -> Compressed:
    """Indices whose pool has so many bits a weight: the spread is found by bisection."""
    rng = np.random.default_rng(0)
    spreads = rng.uniform(0.7, 1.4, len(layout.entries))
    sizes = np.array([entry.size for entry in layout.entries], np.float64)

    def pooled(scale: float) -> float:
        each = np.stack([shares(values, scale * spread) for spread in spreads])
        pool = sizes @ each / sizes.sum()
        return float(-(pool * np.log2(pool)).sum())

    low, high = 0.01, float(values)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if pooled(middle) < bits else (low, middle)
    parts = [
        np.searchsorted(np.cumsum(shares(values, low * spread))[:-1], rng.random(entry.size))
        for entry, spread in zip(layout.entries, spreads, strict=True)
    ]
    steps = torch.from_numpy(np.concatenate(parts))
    sigma = torch.full((layout.size,), 0.01)
    return Compressed.of(layout, (steps - values // 2).float() / 64, sigma, {})


def median_s(action: Callable[[], Result], repeats: int) -> tuple[float, Result]:
    """Median seconds of several runs, and the last result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


class Bench:
    """One network drawn at some entropy, and its cases."""

    def __init__(self, model: nn.Module, bits: float, values: int, repeats: int) -> None:
        self.layout = Layout.of(model)
        covered = {entry.name for entry in self.layout.entries}
        self.compressed = drawn(self.layout, bits, values)
        rest = {name: tensor for name, tensor in model.state_dict().items() if name not in covered}
        self.compressed.untouched.update(rest)
        self.name = f"{bits} bits, {values} values"
        self.repeats = repeats
        self.sound = True  # no bound on size is broken
        self.arrays = [self.compressed.indices[entry.span].numpy() for entry in self.layout.entries]

    def line(self, case: str, ours_s: float, rival: str, rival_s: float, **more: Any) -> None:
        """Print one case."""
        facts = {
            "case": f"{case}: {self.name}",
            "ratio": round(ours_s / rival_s, 3),
            "ours_s": round(ours_s, 5),
            "rival_s": round(rival_s, 5),
            "rival": rival,
            **more,
            "weights": self.layout.size,
            "weights_per_s": round(self.layout.size / ours_s),
            "device": f"{processor()}, one core",
            "versions": versions(),
        }
        print(json.dumps(facts), flush=True)
        self.sound &= all(more.get(bound, True) for bound in BOUNDS)

    def encode(self) -> tuple[list[coder.Table], list[bytes]]:
        """Count, choose tables, code: from indices to streams."""
        shared, own = coder.choose_tables([coder.counts_of(array) for array in self.arrays])
        tables = [table or shared for table in own]
        used = [table for table in tables if table is not None]
        return used, [coder.encode(a, t) for a, t in zip(self.arrays, used, strict=True)]

    def indices(self) -> None:
        """Encoding and decoding of indices."""
        size, dtype = self.layout.size, self.arrays[0].dtype
        encode_s, (tables, streams) = median_s(self.encode, self.repeats)

        def decode() -> list[coder.Integers]:
            triples = zip(streams, tables, self.arrays, strict=True)
            return [coder.decode(stream, table, array.size, dtype) for stream, table, array in triples]

        decode_s, found = median_s(decode, self.repeats)
        for array, back in zip(self.arrays, found, strict=True):
            assert np.array_equal(array, back)
        ours_bytes = sum(map(len, streams))
        each = sum(entropy_bits(coder.counts_of(array)) for array in self.arrays) / 8
        above = ours_bytes / each - 1
        own = {
            "ours_bytes": ours_bytes,
            "bits_per_weight": round(8 * ours_bytes / size, 4),
            "entropy_bytes_per_tensor_sum": round(each),
            "above_entropy_percent": round(100 * above, 4),
            "within_half_percent": above <= 0.005,
        }

        whole = self.compressed.indices.numpy()
        plain = whole.astype(np.int32)
        counts = coder.counts_of(whole)
        model = constriction.stream.model.Categorical(counts / counts.sum(), perfect=False)

        def rival_encode() -> NDArray[np.uint32]:
            ans = constriction.stream.stack.AnsCoder()
            ans.encode_reverse(plain, model)
            words: NDArray[np.uint32] = ans.get_compressed()
            return words

        rival_s, words = median_s(rival_encode, self.repeats)
        more = own | {"rival_bytes": 4 * len(words)}
        target = {"target_per_s": ENCODE_TARGET, "reached": size / encode_s >= ENCODE_TARGET}
        self.line("encode", encode_s, "raw constriction, one stream of int32", rival_s, **more, **target)
        rival_s, _ = median_s(
            lambda: constriction.stream.stack.AnsCoder(words).decode(model, size), self.repeats
        )
        target = {"target_per_s": DECODE_TARGET, "reached": size / decode_s >= DECODE_TARGET}
        self.line("decode", decode_s, "raw constriction, one stream of int32", rival_s, **more, **target)
        self.zstd(whole, encode_s, decode_s, own)

    def zstd(self, whole: coder.Integers, encode_s: float, decode_s: float, own: dict[str, Any]) -> None:
        """A slice from the middle, scaled up to all weights."""
        start = max(0, (len(whole) - ZSTD_SLICE) // 2)
        raw = whole[start : start + ZSTD_SLICE].tobytes()
        scale = len(whole) * whole.itemsize / len(raw)
        packed_s, packed = median_s(lambda: zstandard.ZstdCompressor(level=19).compress(raw), 1)
        back_s, _ = median_s(lambda: zstandard.ZstdDecompressor().decompress(packed), self.repeats)
        rival = f"zstd -19 of {whole.dtype} indices, from {len(raw) // whole.itemsize:,} of them"
        more = own | {"rival_bytes": round(len(packed) * scale)}
        self.line("encode", encode_s, rival, packed_s * scale, **more)
        self.line("decode", decode_s, rival, back_s * scale, **more)

    def file(self, folder: Path) -> None:
        """Whole files: written and read, and how far above the pooled entropy."""
        ours, rival = folder / "net.pwfn", folder / "net.safetensors"
        dense = self.compressed.dense_state_dict()
        save_s, file_bytes = median_s(lambda: save(self.compressed, ours), self.repeats)
        load_s, found = median_s(lambda: load(ours), self.repeats)
        assert torch.equal(found.indices, self.compressed.indices)
        rival_save_s, _ = median_s(lambda: save_file(dense, rival), self.repeats)
        rival_load_s, _ = median_s(lambda: load_file(rival), self.repeats)
        sizes = Reader(ours).sizes
        pooled = entropy_bits(coder.counts_of(self.compressed.indices.numpy())) / 8
        ideal = pooled + sizes.untouched
        more = {
            "ours_bytes": file_bytes,
            "rival_bytes": rival.stat().st_size,
            "parts": sizes._asdict(),
            "pooled_entropy_bytes": round(pooled),
            "above_pooled_entropy_and_untouched_bytes": round(file_bytes - ideal),
            "within_one_percent_and_8_kib": file_bytes - ideal <= 0.01 * ideal + 8192,
        }
        self.line("save", save_s, "safetensors, fp32", rival_save_s, **more)
        self.line("load", load_s, "safetensors, fp32", rival_load_s, **more)


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Of everything that is timed."""
    packages = ("pwfn", "constriction", "zstandard", "numpy", "torch", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def main() -> int:
    """Run all cases; 1 if a bound on size is broken, which no slow machine excuses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the weights, fewer repeats")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    model = resnet18(4 if quick else 1)
    sound = True
    with tempfile.TemporaryDirectory() as folder:
        for bits, values in SETTINGS:
            bench = Bench(model, bits, values, repeats=3 if quick else 7)
            bench.indices()
            bench.file(Path(folder))
            sound &= bench.sound
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
