"""How fast and how large: fixing rounds, against one torch.sort and against a table of weights by candidates.

    python benchmarks/clustering.py [--quick] [--device cpu|cuda]

One JSON line a case, every time a median of several runs. ``ratio`` is our time over the rival's in the
same run. Cases: all ten rounds of the paper's schedule, without training in between, by each rule, at
25 M weights (2 M with ``--quick``); on a GPU one round of 10^9 weights besides, to 0.2 and to 1.0.

Rivals: ``torch.sort`` of as many float32 numbers; and the plainest program, which measures every free
weight against every candidate and sorts all distances (ten rounds of 1 M weights on a CPU; at that size
``same`` tells whether both end with the same weights).

``ours_bytes`` is the highest memory at any time less the inputs and the results; ``rival_bytes`` likewise,
but for the sort its result, values and indices, counts: it is what one would hold to work with it. On a
CPU it is read off the resident set, where the system tells it.

Means are drawn like a ResNet's, twenty layers with standard deviations from 0.01 to 0.2; sigma evenly from
0.028 to 0.05, as seen in training.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwfn import PAPER_FRACTIONS, FixResult, __version__, candidates, fix_round

RULES = ("each", "mean", "nearest")
LAYERS = 20
BILLION = 10**9

State = tuple[Tensor, Tensor, Tensor]
Round = Callable[[Tensor, Tensor, Tensor, float], State]


class Measured(NamedTuple):
    """Median seconds, highest extra bytes (None: not known), and the last result."""

    seconds: float
    bytes: int | None
    result: Any


def weights(size: int, device: torch.device) -> State:
    """Means of twenty layers, sigmas, and nothing fixed."""
    generator = torch.Generator(device).manual_seed(0)
    mu = torch.empty(size, device=device)
    for i, layer in enumerate(mu.tensor_split(LAYERS)):
        layer.normal_(0, 0.01 * 20 ** (i / (LAYERS - 1)), generator=generator)
    sigma = torch.empty_like(mu).uniform_(0.028, 0.05, generator=generator)
    return mu, sigma, torch.zeros(size, dtype=torch.bool, device=device)


def settle(device: torch.device) -> None:
    """Wait for the device; its work is only queued when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def resident(key: str) -> int | None:
    """Bytes resident now (VmRSS) or at most since the last reset (VmHWM); None where not told."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(key)]
    return 1024 * int(found[0]) if found else None


def extra_bytes(action: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a run holds beyond what there was before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high mark back
    except OSError:
        return None
    start = resident("VmRSS")
    action()
    peak = resident("VmHWM")
    return None if start is None or peak is None else max(0, peak - start)


def measure(action: Callable[[], Any], device: torch.device, repeats: int) -> Measured:
    """One run for the memory, which also warms up, then several for the time."""
    peak = extra_bytes(action, device)
    times, result = [], None
    for _ in range(repeats):
        result = None  # no two results at a time
        settle(device)
        start = time.perf_counter()
        result = action()
        settle(device)
        times.append(time.perf_counter() - start)
    return Measured(statistics.median(times), peak, result)


def rounds(one: Round, state: State, fractions: tuple[float, ...]) -> State:
    """Round after round, each from the result of the last."""
    for fraction in fractions:
        state = one(*state, fraction)
    return state


class Ours:
    """`pwfn.fix_round` by one rule; counts its choices of a centre."""

    def __init__(self, rule: str) -> None:
        self.rule, self.choices = rule, 0

    def __call__(self, mu: Tensor, sigma: Tensor, fixed: Tensor, fraction: float) -> State:
        done: FixResult = fix_round(mu, sigma, fixed, fraction, rule=self.rule, sweep=16.0)
        self.choices += len(done.steps)
        return done.mu, done.sigma, done.fixed


def dense(mu: Tensor, sigma: Tensor, fixed: Tensor, fraction: float) -> State:
    """One round by ``each``: a table of weights by candidates, and all distances sorted."""
    mu, sigma, fixed = mu.clone(), sigma.clone(), fixed.clone()
    goal = -int(-mu.numel() * fraction + 1e-9 // 1) if fraction < 1 else mu.numel()
    omega, delta = 1, 1.0
    while (needed := goal - int(fixed.sum())) > 0:
        free = torch.nonzero(~fixed).squeeze(1)
        means = mu[free]
        grid = candidates(float(means.abs().max()), 7, omega).to(means)
        table = (means[:, None] - grid).abs()
        centre = grid[torch.bincount(table.argmin(1), minlength=grid.numel()).argmax()]
        distance, order = ((means - centre).abs() / sigma[free]).sort(stable=True)
        chosen = free[order[distance <= delta][:needed]]
        if chosen.numel() == 0:
            omega, delta = min(omega + 1, 4), 2 * delta
            continue
        sigma[chosen] = mu[chosen].double().std(correction=0).float()
        mu[chosen], fixed[chosen] = centre, True
    return mu, sigma, fixed


class Bench:
    """The cases on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def line(self, case: str, ours: Measured, rival: str, theirs: Measured, **more: Any) -> None:
        """Print one case."""
        facts = {
            "case": f"clustering, {case}",
            "ratio": round(ours.seconds / theirs.seconds, 4),
            "ours_s": round(ours.seconds, 5),
            "rival_s": round(theirs.seconds, 5),
            "rival": rival,
            "ours_bytes": ours.bytes,
            "rival_bytes": theirs.bytes,
            **more,
            "device": device_name(self.device),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "pwfn": __version__,
            },
        }
        print(json.dumps(facts), flush=True)

    def ours(self, rule: str, state: State, fractions: tuple[float, ...]) -> tuple[Measured, int]:
        """Measure our rounds; the memory is without the result, and the choices are of one run."""
        one = Ours(rule)
        found = measure(lambda: rounds(one, state, fractions), self.device, self.repeats)
        # Between rounds the result of the last one is there too: an input of the next.
        held = min(len(fractions), 2) * sum(tensor.nbytes for tensor in state)
        extra = None if found.bytes is None else max(0, found.bytes - held)
        return found._replace(bytes=extra), one.choices // (self.repeats + 1)

    def against_sort(self, size: int, cases: list[tuple[str, tuple[float, ...]]], words: str) -> None:
        """Rounds by some rules against one sort of as many numbers."""
        state = weights(size, self.device)
        theirs = measure(lambda: torch.sort(state[0]), self.device, self.repeats)._replace(result=None)
        for rule, fractions in cases:
            done, choices = self.ours(rule, state, fractions)
            case = f"{words.format(fractions[-1])}, {size:,} weights, {rule}"
            self.line(case, done, "one torch.sort of them", theirs, weights=size, choices=choices)

    def against_table(self, size: int) -> None:
        """All ten rounds against the plainest program."""
        state = weights(size, self.device)
        theirs = measure(lambda: rounds(dense, state, PAPER_FRACTIONS), self.device, self.repeats)
        ours, choices = self.ours("each", state, PAPER_FRACTIONS)
        held = 2 * sum(tensor.nbytes for tensor in state)
        extra = None if theirs.bytes is None else max(0, theirs.bytes - held)
        same = all(map(torch.equal, ours.result, theirs.result))
        case = f"all ten rounds, {size:,} weights, each"
        rival = "a table of weights by candidates"
        more = {"weights": size, "choices": choices, "same": same}
        self.line(case, ours, rival, theirs._replace(bytes=extra), **more)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def main() -> int:
    """Run all cases of a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer weights, fewer repeats; no billion")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU, where there is one, unless told")
    arguments = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(arguments.device or found)
    bench = Bench(device, repeats=3 if arguments.quick or device.type == "cpu" else 5)
    ten = [(rule, PAPER_FRACTIONS) for rule in RULES]
    bench.against_table(200_000 if arguments.quick else 1_000_000)
    bench.against_sort(2_000_000 if arguments.quick else 25_000_000, ten, "all ten rounds")
    if device.type == "cuda" and not arguments.quick:
        one = [(rule, (0.2,)) for rule in RULES] + [(rule, (1.0,)) for rule in RULES]
        bench.against_sort(BILLION, one, "one round to {}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
