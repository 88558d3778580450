"""The indices of every file in experiments/models by every coder: bytes, and speed of encoding and decoding.

    python benchmarks/codec.py [--quick] [--nncodec PYTHON] [--record]

Prints one JSON line per file and coder, then tables. Every time is a median of several, and every coder must
give back the same indices. Coders other than ours run on one core. ``--nncodec`` names the interpreter of an
environment with NNCodec (experiments/nncodec_files.py); without it, and without the module ``brotli``, these
coders are skipped. ``--record`` writes the lines to benchmarks/results and the tables to docs/performance.md.

The bytes are those of the indices and of what a coder needs to decode them: tables, trees, a dictionary. The
context mixing is a bound, not a coder: the ideal length of its predictions.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import constriction
import numpy as np
import table
import torch
import zstandard
from machine import processor
from mixing import ideal_bits

import pwfn
from pwfn import Compressed
from pwfn.file import coder, index_streams
from pwfn.file.contexts.model import MOST_SYMBOLS
from pwfn.file.format import Reader
from pwfn.lab.compare.runner import git_commit

ROOT = Path(__file__).resolve().parent.parent
QUICK_WEIGHTS = 2**20
ENOUGH_S = 5.0  # no more repeats after so long
SAMPLE_BYTES = 2**12  # of the samples for a dictionary
DICTIONARY_SHARE = 64  # it has at most one byte for so many weights

Categorical = constriction.stream.model.Categorical
AnsCoder = constriction.stream.stack.AnsCoder
T = TypeVar("T")
Arrays = list[coder.Integers]
Facts = dict[str, Any]


def median_s(action: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Median seconds of several runs, and the last result."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < ENOUGH_S:
        start = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


class Bench:
    """One file and its coders; each method yields the facts of its lines."""

    def __init__(self, path: Path, repeats: int, folder: Path) -> None:
        self.compressed = pwfn.load(path)
        self.repeats, self.folder = repeats, folder
        self.whole = self.compressed.indices.numpy()
        self.arrays: Arrays = [self.whole[entry.span] for entry in self.compressed.layout.entries]

    def measured(
        self,
        name: str,
        encode: Callable[[], T],
        decode: Callable[[T], coder.Integers],
        size: Callable[[T], int],
    ) -> Facts:
        """Bytes and times of a coder, which must give back the indices."""
        encode_s, coded = median_s(encode, self.repeats)
        decode_s, found = median_s(lambda: decode(coded), self.repeats)
        self.check(name, found)
        return {"coder": name, "bytes": size(coded), "encode_s": encode_s, "decode_s": decode_s}

    def check(self, name: str, found: coder.Integers) -> None:
        """End with an error if a coder lost something."""
        if not np.array_equal(found, self.whole):
            raise SystemExit(
                f"{name} does not give back the indices that it was given: its figures mean nothing"
            )

    def lines(self, nncodec: str | None) -> Iterator[Facts]:
        """All coders."""
        counts = [coder.counts_of(array) for array in self.arrays]
        pool = coder.counts_of(self.whole)
        pooled = coder.Table.of(pool).ideal_bits(pool)
        each = sum(coder.Table.of(count).ideal_bits(count) for count in counts)
        yield {"coder": "pooled entropy", "bytes": math.ceil(pooled / 8)}
        yield {"coder": "entropy per tensor", "bytes": math.ceil(each / 8)}
        for number in (1, 2):
            for threads in (1, 2):
                yield self.ours(number, threads)
        torch.set_num_threads(1)
        if nncodec:
            yield self.nncodec(nncodec)
        yield self.constriction()
        yield self.zstd()
        try:
            yield self.zstd_dictionary()
        except zstandard.ZstdError as error:
            print(f"zstd with a dictionary is skipped: {error}", file=sys.stderr)
        if find_spec("brotli"):
            yield self.brotli()
        if len(self.compressed.codebooks) == 1 and self.compressed.codebook.numel() <= MOST_SYMBOLS:
            yield self.mixing()
        else:
            print(f"context mixing needs one codebook of at most {MOST_SYMBOLS} values", file=sys.stderr)

    def ours(self, number: int, threads: int) -> Facts:
        """A version of the format; also loading the file."""
        torch.set_num_threads(threads)
        path = self.folder / "net.pwfn"
        self.compressed.save(path, version=number)
        reader = Reader(path)

        def decode(coded: tuple[bytes, list[index_streams.Coded]]) -> coder.Integers:
            data = b"".join(tensor.stream for tensor in coded[1])
            streams = index_streams.read(reader.header, coded[0])
            pairs = [(stream, data[stream.start : stream.start + stream.size]) for stream in streams]
            out = torch.empty_like(self.compressed.indices)
            index_streams.decode_all(reader.header, pairs, reader.codebooks(), out)
            return out.numpy()

        facts = self.measured(
            f"pwfn {number}" + (f", {threads} threads" if threads > 1 else ""),
            lambda: index_streams.encode(self.compressed, with_contexts=number > 1),
            decode,
            lambda _: reader.sizes.indices + reader.sizes.tables,
        )
        load_s, loaded = median_s(lambda: pwfn.load(path), self.repeats)
        self.check("pwfn.load", loaded.indices.numpy())
        # A process of its own, started anew: this one's memory was larger before.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            peak = pool.submit(peak_bytes, path, threads).result()
        memory = round(peak / self.whole.nbytes, 2) if peak is not None else None
        return {**facts, "file_bytes": reader.file_bytes, "load_s": load_s, "load_memory": memory}

    def constriction(self) -> Facts:
        """The library's own ANS coder with a table per tensor: the plain twin of version 1."""

        def encode() -> list[tuple[coder.Table, Any]]:
            found = []
            for array in self.arrays:
                each, ans = coder.Table.of(coder.counts_of(array)), AnsCoder()
                if len(each.counts) > 1:
                    ranks = np.searchsorted(each.symbols, array).astype(np.int32)
                    ans.encode_reverse(ranks, Categorical(each.counts / each.total, perfect=False))
                found.append((each, ans.get_compressed()))
            return found

        def decode(coded: list[tuple[coder.Table, Any]]) -> coder.Integers:
            found: Arrays = []
            for each, words in coded:
                ranks: coder.Integers = np.zeros(each.total, np.int32)
                if len(each.counts) > 1:
                    model = Categorical(each.counts / each.total, perfect=False)
                    ranks = AnsCoder(words).decode(model, each.total)
                found.append(each.symbols.astype(self.whole.dtype)[ranks])
            return np.concatenate(found)

        def size(coded: list[tuple[coder.Table, Any]]) -> int:
            return sum(len(each.to_bytes()) + words.nbytes for each, words in coded)

        return self.measured("constriction", encode, decode, size)

    def zstd(self) -> Facts:
        """All indices in one frame, at level 19."""
        raw = self.whole.tobytes()
        return self.measured(
            "zstd -19",
            lambda: zstandard.ZstdCompressor(level=19).compress(raw),
            lambda packed: self._integers(zstandard.ZstdDecompressor().decompress(packed)),
            len,
        )

    def zstd_dictionary(self) -> Facts:
        """A frame per tensor, with a dictionary trained on all of them, which counts."""
        whole = self.whole.tobytes()
        samples: list[Any] = [whole[i : i + SAMPLE_BYTES] for i in range(0, len(whole), SAMPLE_BYTES)]

        def encode() -> tuple[bytes, list[bytes]]:
            trained = zstandard.train_dictionary(max(256, len(whole) // DICTIONARY_SHARE), samples)
            packer = zstandard.ZstdCompressor(level=19, dict_data=trained)
            return trained.as_bytes(), [packer.compress(array.tobytes()) for array in self.arrays]

        def decode(coded: tuple[bytes, list[bytes]]) -> coder.Integers:
            trained = zstandard.ZstdCompressionDict(coded[0])
            unpacker = zstandard.ZstdDecompressor(dict_data=trained)
            return self._integers(b"".join(map(unpacker.decompress, coded[1])))

        return self.measured(
            "zstd -19, dictionary", encode, decode, lambda coded: len(coded[0]) + sum(map(len, coded[1]))
        )

    def brotli(self) -> Facts:
        """All indices, at quality 11."""
        library, raw = import_module("brotli"), self.whole.tobytes()
        return self.measured(
            "brotli -q 11",
            lambda: library.compress(raw, quality=11),
            lambda packed: self._integers(library.decompress(packed)),
            len,
        )

    def nncodec(self, python: str) -> Facts:
        """ISO/IEC 15938-17 on the levels, the distances of indices from that of 0; names are numbers."""
        places = [torch.arange(book.numel(), dtype=torch.int32) for book in self.compressed.codebooks]
        zeros = [int(book.abs().argmin()) for book in self.compressed.codebooks]
        levels = self.compressed.looked_up([n - zero for n, zero in zip(places, zeros, strict=True)])
        shapes = [(entry.span, entry.shape) for entry in self.compressed.layout.entries]
        given, out = self.folder / "levels.npz", self.folder / "decoded.npz"
        named = {str(n): levels[span].view(shape).numpy() for n, (span, shape) in enumerate(shapes)}
        np.savez(given, **named)  # type: ignore[arg-type]  # numpy's stub takes them for its options
        program, words = ROOT / "experiments/nncodec_files.py", ("--repeats", str(self.repeats))
        done = subprocess.run(
            [python, program, "--levels", given, "--out", out, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,  # NNCodec also writes its bitstream to a file
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise SystemExit(f"{python} cannot run NNCodec: {reason}")
        with np.load(out) as found:
            for name, wanted in named.items():
                if not np.array_equal(found[name], wanted):
                    raise SystemExit("NNCodec does not give back the levels that it was given")
            times = {name: float(found[name]) for name in ("encode_s", "decode_s")}
            facts = {"coder": "NNCodec", "bytes": int(found["file_bytes"]), **times}
            return {**facts, "nncodec": str(found["version"])}

    def mixing(self) -> Facts:
        """The bound, for a network with one codebook."""
        zero = int(self.compressed.codebook.abs().argmin())
        shapes = [entry.shape for entry in self.compressed.layout.entries]
        start = time.perf_counter()
        bits = ideal_bits(self.arrays, shapes, zero)
        seconds = time.perf_counter() - start
        return {"coder": "context mixing, ideal", "bytes": math.ceil(bits / 8), "model_s": seconds}

    def _integers(self, raw: bytes) -> coder.Integers:
        return np.frombuffer(raw, self.whole.dtype)


def peak_bytes(path: Path, threads: int) -> int | None:
    """How much this process grows while it loads a file; None where the system does not tell."""
    torch.set_num_threads(threads)
    layout = pwfn.Layout.of(torch.nn.Linear(64, 64))
    pwfn.loads(Compressed.of(layout, torch.ones(layout.size), None, {}).dumps())  # imports what is needed

    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = resident("VmRSS")
        loaded = pwfn.load(path)
        peak = resident("VmHWM")
        del loaded
    except OSError:
        return None
    return peak - before


def main() -> None:
    """Run all coders on all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "experiments/models", help="folder of files")
    parser.add_argument("--quick", action="store_true", help="small files only, fewer repeats")
    parser.add_argument("--nncodec", metavar="PYTHON", help="interpreter of an environment with NNCodec")
    parser.add_argument("--record", action="store_true", help="keep the results, and rewrite the page")
    options = parser.parse_args()
    nncodec = shutil.which(options.nncodec) if options.nncodec else None
    if options.nncodec and not nncodec:
        raise SystemExit(f"--nncodec {options.nncodec}: there is no such program")
    if not nncodec:
        print("NNCodec is skipped: --nncodec names the interpreter of its environment", file=sys.stderr)
    if not find_spec("brotli"):
        print("brotli is skipped: its module is not installed", file=sys.stderr)
    packages = ["pwfn", "constriction", "zstandard", "numpy", "torch"]
    packages += ["brotli"] if find_spec("brotli") else []
    where = {
        "device": f"{processor()}, {os.cpu_count()} cores",
        "commit": git_commit(Path(__file__)) or "unknown",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
    found: list[Facts] = []
    for path in sorted(options.models.glob("*.pwfn")):
        size = Reader(path).header.layout.size
        if options.quick and size > QUICK_WEIGHTS:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(path, 3 if options.quick else 7, Path(folder))
            for facts in bench.lines(nncodec and os.path.abspath(nncodec)):
                found.append({"file": path.stem, "weights": size, **facts, **where})
                print(json.dumps(found[-1]), flush=True)
    if not found:
        raise SystemExit(f"{options.models}: there is no .pwfn file here")
    print(table.codec_tables(found))
    if options.record:
        (table.RESULTS / "codec_cpu.jsonl").write_text("".join(json.dumps(facts) + "\n" for facts in found))
        table.PAGE.write_text(table.page(table.PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
