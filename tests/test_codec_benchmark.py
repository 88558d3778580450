"""The benchmark of files: every coder gives back the indices, and the bound does not look ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pwfn import Compressed, Layout

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import codec  # noqa: E402  # a script of that folder
import mixing  # noqa: E402


def saved(path: Path) -> Compressed:
    """A small network of a few values, most of them 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 10))
    layout = Layout.of(model)
    compressed = Compressed.of(layout, torch.randn(layout.size).round() / 8, None, {})
    compressed.save(path)
    return compressed


def test_one_line_per_coder_and_tables_at_the_end(tmp_path: Path) -> None:
    saved(tmp_path / "small.pwfn")
    command = [sys.executable, str(ROOT / "benchmarks/codec.py"), "--quick", "--models", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["coder"]: line for line in lines}
    timed = ["pwfn 1", "pwfn 1, 2 threads", "pwfn 2", "pwfn 2, 2 threads", "constriction", "zstd -19"]
    assert all(found[name]["decode_s"] > 0 and found[name]["encode_s"] > 0 for name in timed)
    assert found["entropy per tensor"]["bytes"] <= found["pooled entropy"]["bytes"]
    assert found["entropy per tensor"]["bytes"] <= found["constriction"]["bytes"]
    assert all(line["commit"] and line["device"] for line in lines)
    assert "| small |" in done.stdout
    assert "NNCodec is skipped" in done.stderr


def test_a_coder_that_loses_something_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "small.pwfn")
    bench = codec.Bench(tmp_path / "small.pwfn", 1, tmp_path)
    with pytest.raises(SystemExit, match="does not give back"):
        bench.measured("all zeros", lambda: b"", lambda _: np.zeros_like(bench.whole), len)


def test_the_bound_of_random_numbers_is_not_below_their_entropy() -> None:
    symbols = np.random.default_rng(0).integers(0, 4, 16 * 32 * 9).astype(np.uint8)
    bits = mixing.ideal_bits([symbols], [(16, 32, 3, 3)], 2)
    assert 2 * symbols.size < bits < 2.2 * symbols.size


def test_the_bound_of_a_repeated_row_is_far_below_the_entropy() -> None:
    row = np.random.default_rng(0).integers(0, 2, 64)
    bits = mixing.ideal_bits([np.tile(row, 100).astype(np.uint8)], [(100, 64)], 0)
    assert bits < 0.5 * 6400
