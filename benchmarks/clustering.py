"""Time and memory of fixing rounds, against one torch.sort and against a table of weights by candidates.

    python benchmarks/clustering.py [--quick] [--device cpu|cuda]

Prints one JSON line per case; every time is a median of several runs. ``ratio`` is our time divided by the
rival's in the same run. Cases: all ten rounds of the paper's schedule without training between them, by each
rule, at 25 M weights (2 M with ``--quick``); on a GPU also one round of 10^9 weights, to 0.2 and to 1.0.

Rivals: ``torch.sort`` of as many float32 numbers; and the simplest program, which measures every free
weight against every candidate and sorts all distances (ten rounds of 1 M weights on a CPU; at that size
``same`` says whether both end with the same weights).

``ours_bytes`` is the largest memory of a round at any time beyond its inputs and its result;
``rival_bytes`` likewise, except that the result of the sort, values and indices, counts: it must be held to
work with it. On a CPU only tensors count, not what an operation of torch allocates inside.

Means are drawn like those of a ResNet: twenty layers with standard deviations from 0.01 to 0.2. Sigma is
uniform from 0.028 to 0.05, as seen in training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from machine import device_name, versions, wait
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pwfn import PAPER_FRACTIONS, candidates, fix_round
from pwfn.fixing.fix_round import target_count

RULES = ("each", "mean", "nearest")
LAYERS = 20
BILLION = 10**9

State = tuple[Tensor, Tensor, Tensor]
Round = Callable[[Tensor, Tensor, Tensor, float], State]


class Measured(NamedTuple):
    """Median seconds and peak extra bytes."""

    seconds: float
    bytes: int


def weights(size: int, device: torch.device) -> State:
    """Means of twenty layers, sigmas, and nothing fixed."""
    generator = torch.Generator(device).manual_seed(0)
    mu = torch.empty(size, device=device)
    for i, layer in enumerate(mu.tensor_split(LAYERS)):
        layer.normal_(0, 0.01 * 20 ** (i / (LAYERS - 1)), generator=generator)
    sigma = torch.empty_like(mu).uniform_(0.028, 0.05, generator=generator)
    return mu, sigma, torch.zeros(size, dtype=torch.bool, device=device)


class PeakBytes(TorchDispatchMode):
    """The largest memory of tensors made within the block, without what operations allocate inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.peak_bytes = 0
        self._alive: dict[StorageWeakRef, int] = {}
        self._given: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note its results."""
        given = {StorageWeakRef(t.untyped_storage()) for t in tree_iter(args) if isinstance(t, Tensor)}
        self._given |= given - self._alive.keys()  # made before the block; results may be views of them
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._given:
                    self._alive[reference] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return out


def peak_bytes(action: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """The peak of memory beyond what was in use before, and the result."""
    if device.type == "cpu":
        with PeakBytes() as watch:
            result = action()
        return watch.peak_bytes, result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def peak_extra_bytes(one: Round, state: State, fractions: tuple[float, ...]) -> int:
    """The largest peak of a round beyond its inputs and its result; this also warms up."""
    largest = 0
    for fraction in fractions:
        peak, state = peak_bytes(partial(one, *state, fraction), state[0].device)
        largest = max(largest, peak - sum(tensor.nbytes for tensor in state))
    return largest


def median_s(action: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, Any]:
    """Median seconds of several runs, and the last result."""
    times, result = [], None
    for _ in range(repeats):
        result = None  # so that two results are never held at once
        wait(device)
        start = time.perf_counter()
        result = action()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def rounds(one: Round, state: State, fractions: tuple[float, ...]) -> State:
    """Several rounds, each from the result of the one before."""
    for fraction in fractions:
        state = one(*state, fraction)
    return state


class Ours:
    """`pwfn.fix_round` by one rule; counts the centres chosen."""

    def __init__(self, rule: str) -> None:
        self.rule, self.choices = rule, 0

    def __call__(self, mu: Tensor, sigma: Tensor, fixed: Tensor, fraction: float) -> State:
        """One round."""
        done = fix_round(mu, sigma, fixed, fraction, rule=self.rule, sweep=16.0)
        self.choices += len(done.steps)
        return done.mu, done.sigma, done.fixed


def dense(mu: Tensor, sigma: Tensor, fixed: Tensor, fraction: float) -> State:
    """One round by ``each``, with a table of weights by candidates and all distances sorted."""
    mu, sigma, fixed = mu.clone(), sigma.clone(), fixed.clone()
    goal = target_count(mu.numel(), fraction)
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
            "versions": versions(),
        }
        print(json.dumps(facts), flush=True)

    def rounds(self, one: Round, state: State, fractions: tuple[float, ...]) -> tuple[Measured, State]:
        """Memory and time of several rounds."""
        peak = peak_extra_bytes(one, state, fractions)
        seconds, result = median_s(lambda: rounds(one, state, fractions), self.device, self.repeats)
        return Measured(seconds, peak), result

    def against_sort(self, size: int, cases: Sequence[tuple[str, tuple[float, ...]]], words: str) -> None:
        """Rounds by some rules against one sort of as many numbers."""
        state = weights(size, self.device)
        peak = peak_bytes(lambda: torch.sort(state[0]), self.device)[0]
        for rule, fractions in cases:
            ours = Ours(rule)
            done = self.rounds(ours, state, fractions)[0]
            # Measured again beside each case: the load of the machine changes.
            seconds = median_s(lambda: torch.sort(state[0]), self.device, self.repeats)[0]
            case = f"{words.format(fractions[-1])}, {size:,} weights, {rule}"
            more = {"weights": size, "choices": ours.choices // (self.repeats + 1)}
            self.line(case, done, "one torch.sort of them", Measured(seconds, peak), **more)

    def against_table(self, size: int) -> None:
        """All ten rounds against the simplest program."""
        state, ours = weights(size, self.device), Ours("each")
        theirs, expected = self.rounds(dense, state, PAPER_FRACTIONS)
        done, found = self.rounds(ours, state, PAPER_FRACTIONS)
        case = f"all ten rounds, {size:,} weights, each"
        same = all(map(torch.equal, found, expected))
        more = {"weights": size, "choices": ours.choices // (self.repeats + 1), "same": same}
        self.line(case, done, "a table of weights by candidates", theirs, **more)


def main() -> int:
    """Run all cases of a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer weights, fewer repeats; no billion")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
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
