"""How long a draw takes, against loading the file as it is; with data, also 20 draws over its test images.

python benchmarks/draws.py experiments/models/resnet18_seed0.pwfn --data npz:data/cifar10.npz
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from pwfn import load
from pwfn.evaluate.ensemble import ensemble, point
from pwfn.run.options import RunOptions
from pwfn.run.scores import open_file

_REPEATS = 7
_SAMPLES = 20


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call; predictions end on the CPU, so that nothing is left to wait for."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fastest(*works: Callable[[], object]) -> list[float]:
    """Seconds of the fastest of several calls of each; they take turns, so that a busy moment hits all."""
    rounds = [[seconds(work) for work in works] for _ in range(_REPEATS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    """Print the times and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", default=None)
    parser.add_argument("--device", default=None, help="of the predictions; CUDA if there is one")
    options = parser.parse_args()
    path = options.file
    compressed = load(path)
    if compressed.sigma_codes is None:  # any sigma takes as long
        compressed = replace(compressed, sigma_codes=(150,) * len(compressed.layout.entries))
    generator = torch.Generator().manual_seed(0)
    codes = compressed.sigma_codes
    plain, drawn, again = fastest(
        lambda: load(path).dense_state_dict(),
        lambda: replace(load(path), sigma_codes=codes).sample(generator),
        lambda: compressed.sample(generator),
    )
    print(f"{path}, {torch.get_num_threads()} threads: load {plain:.3f} s; load and draw {drawn:.3f} s,")
    print(f"{drawn / plain:.2f} times as long; one more draw {again:.3f} s, {again / plain:.2f} times")
    if options.data is None:
        return
    how = RunOptions("", options.data, Path(), "", device=options.device)
    file = open_file(path, how, 0)
    network, test, device = file.network, list(file.data.test), file.distributed.device
    first = point(network, test)  # also a warm-up
    once = seconds(lambda: point(network, test))
    many = seconds(lambda: ensemble([compressed], network, test, _SAMPLES))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}: {_SAMPLES} draws over {len(first.checksums):,} images {many:.2f} s, {many / once:.1f}")
    print(f"times as long as one pass of the point estimate, {once:.3f} s")


if __name__ == "__main__":
    main()
