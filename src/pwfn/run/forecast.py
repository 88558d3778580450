"""What a run will take, from one real step and one real clustering: memory, time and the file's size."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.fold_batchnorm import lighten
from pwfn.bayes.train import fit, steps_in
from pwfn.config import Config
from pwfn.evaluate.entropy import Pool
from pwfn.file.format import dumps
from pwfn.lab import baselines as methods
from pwfn.lab.baselines import Method
from pwfn.rounds import Run
from pwfn.run.console import duration
from pwfn.run.options import RunOptions
from pwfn.run.resolve import opened

_ENOUGH_SECONDS = 3.0  # of timed steps
_SLOW_SECONDS = 30.0  # the first step, which warms up, counts only where it takes so long
_MOST_STEPS = 10


@dataclass(frozen=True)
class Forecast:
    """What a run will take, as far as one step and one clustering can tell."""

    step_seconds: float
    epoch_seconds: float
    fixing_seconds: float  # of one round, at most
    scoring_seconds: float  # of all test data, once
    total_seconds: float
    steps: int  # in the whole run
    memory_bytes: int  # at its peak: of the device, or of the process on a CPU
    device_bytes: int | None  # in all
    file_bytes: int
    entropy_bits: float
    unique: int
    file_of: str  # what it was reckoned from

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        memory = f"{self.memory_bytes / 2**30:.2f} GiB"
        if self.device_bytes:
            memory += f" of the device's {self.device_bytes / 2**30:.1f}"
        return [
            f"memory: {memory} at the peak",
            f"time: {self.step_seconds:.3g} s a step, {duration(self.epoch_seconds)} an epoch, "
            f"{duration(self.scoring_seconds)} to score, {duration(self.fixing_seconds)} to fix; "
            f"{self.steps:,} steps, {duration(self.total_seconds)} in all",
            f"file: about {self.file_bytes:,} bytes, {self.entropy_bits:.2f} bits a weight, "
            f"{self.unique} values (of {self.file_of})",
        ]


def forecast(options: RunOptions, config: Config, distributed: Distributed | None = None) -> Forecast:
    """Do one real step at the full batch and the clustering, and reckon the rest; nothing is written.

    A missing folder, a label out of range or a batch too large is found here as the run would find it.
    """
    distributed = distributed or distributed_for(options.device)
    if distributed.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(distributed.device)
    found = opened(options, config, distributed)
    run = Run(
        found.model, found.data.train, found.data.test, config, distributed, F.cross_entropy, None, False
    )
    step_seconds = _step_seconds(run)
    memory = _peak_bytes(distributed.device)
    scoring_seconds = _scoring_seconds(run)
    fresh = methods.of(config)(found.model, config).to(distributed.device)
    run.begin(fresh)
    net, fixing_seconds = _fixed(fresh, run)
    lighten(net.model, config.finish)
    compressed = net.finish()
    pool = Pool.of(compressed.values())
    steps, finish = sum(run.stretches()), config.finish
    # A forward pass is about a third of a step, which goes forward and back.
    rounds = len(run.plan)
    times = 2 * finish.reestimate_batchnorm + rounds * config.schedule.reestimate_in_rounds
    gathered = times * steps_in(finish.reestimate_epochs, run.epoch)
    return Forecast(
        step_seconds=step_seconds,
        epoch_seconds=step_seconds * run.epoch / config.training.accumulate,
        fixing_seconds=fixing_seconds,
        scoring_seconds=scoring_seconds,
        total_seconds=steps * step_seconds
        + gathered * step_seconds / config.training.accumulate / 3
        + rounds * fixing_seconds
        + (rounds + 2) * scoring_seconds,
        steps=steps,
        memory_bytes=memory,
        device_bytes=_device_bytes(distributed.device),
        file_bytes=len(dumps(compressed)),
        entropy_bits=pool.entropy_bits,
        unique=pool.unique,
        file_of=net.forecast_of,
    )


def _step_seconds(run: Run) -> float:
    """Of a real step; the network trained on the way is not used for anything else."""
    batches = run.train.endless()
    run.begin(run.net)
    optimizer = torch.optim.SGD(run.net.parameters(), lr=0.0, momentum=run.config.training.momentum)

    def step() -> None:
        fit(
            run.net,
            batches,
            1,
            run.objective,
            run.config.training,
            optimizer=optimizer,
            where="dry run",
            distributed=run.distributed,
        )

    first = _seconds(step)
    if first > _SLOW_SECONDS or run.distributed.world > 1:  # several processes could not agree how often
        return first
    timed: list[float] = []
    while len(timed) < _MOST_STEPS and sum(timed) < _ENOUGH_SECONDS:
        timed.append(_seconds(step))
    return sorted(timed)[len(timed) // 2]


def _scoring_seconds(run: Run) -> float:
    """Of all test data, from its first batch."""
    if run.val is None:
        return 0.0
    batch = next(run.val.batches())

    def score() -> None:
        with torch.no_grad():
            float(run.scored(run.original, batch, "test data, batch 1"))

    score()
    count = len(run.val.loader)  # type: ignore[arg-type]  # sources by name have a length
    return _seconds(score) * count


def _fixed(net: Method, run: Run) -> tuple[Method, float]:
    """What comes between the stretches, on the weights as they are, and the seconds of the longest."""
    longest = 0.0
    for number, (steps, stretch) in enumerate(zip(run.stretches(), run.plan, strict=False), 1):
        net.rehearse(steps)

        def between(number: int = number, fraction: float = stretch.fraction) -> None:
            net.between(number, fraction)

        longest = max(longest, _seconds(between))
    return net, longest


def _seconds(work: Callable[[], None]) -> float:
    _wait()
    started = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def _device_bytes(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
