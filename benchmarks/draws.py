"""How long a draw takes, against loading the file as it is.

python benchmarks/draws.py model.pwfn
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from pwfn import load

_REPEATS = 7


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the two times and their ratio."""
    path = sys.argv[1]
    compressed = load(path)
    if compressed.sigma_codes is None:  # any sigma takes as long
        compressed = replace(compressed, sigma_codes=(150,) * len(compressed.layout.entries))
    generator = torch.Generator().manual_seed(0)
    codes = compressed.sigma_codes
    plain = fastest(lambda: load(path).dense_state_dict())
    drawn = fastest(lambda: replace(load(path), sigma_codes=codes).sample(generator))
    again = fastest(lambda: compressed.sample(generator))
    print(f"{path}, {torch.get_num_threads()} threads: load {plain:.3f} s; load and draw {drawn:.3f} s,")
    print(f"{drawn / plain:.2f} times as long; one more draw {again:.3f} s, {again / plain:.2f} times")


if __name__ == "__main__":
    main()
