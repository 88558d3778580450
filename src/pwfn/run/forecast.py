"""A dry run: memory, time and file size, estimated from a few real steps and a real fixing."""

from __future__ import annotations

import copy
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.method import METHODS, FixedNetwork
from pwfn.bayes.optimizer import optimizer_for
from pwfn.bayes.randomness import rank_seed, seeded
from pwfn.bayes.train import fit, steps_in
from pwfn.compress import Run
from pwfn.config import Config
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.targets import MAX_TRIES
from pwfn.evaluate.verdict import doubts
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.file.format import dumps
from pwfn.run.console import duration
from pwfn.run.options import RunOptions
from pwfn.run.resolve import resolve

_ENOUGH_SECONDS = 3.0  # of timed steps
_SLOW_SECONDS = 30.0  # the first step, which includes warm-up, is used only if it takes this long
_MOST_STEPS = 10
_SILENT_SECONDS = 20.0  # after so long it says that it is still at work


@dataclass(frozen=True)
class Forecast:
    """What a run will need. Bits and bytes are those of the weights fixed without training."""

    step_seconds: float
    epoch_seconds: float
    fixing_seconds: float  # of the slowest round
    scoring_seconds: float  # of all test data, once
    total_seconds: float
    steps: int  # of the whole run
    tries: int  # networks that a target asks for at most, where it decides the step; else 1
    try_seconds: float  # of the fixing of each but the first
    memory_bytes: int  # peak: of the device, or of the process on a CPU; 0 where the system does not tell
    device_bytes: int | None  # of the device in total
    file_bytes: int
    entropy_bits: float
    unique: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        of = f" of the device's {self.device_bytes / 2**30:.1f} GiB" if self.device_bytes else ""
        memory = f"{self.memory_bytes / 2**30:.2f} GiB{of} at the peak"
        return (
            f"memory: {memory if self.memory_bytes else 'not known on this system'}\n"
            f"time: {'up to ' if self.tries > 1 else ''}{duration(self.total_seconds)} in total, "
            f"{self.step_seconds:.3g} s per step "
            f"({self.steps:,} steps), {duration(self.epoch_seconds)} per epoch, "
            f"{duration(self.scoring_seconds)} per scoring, {duration(self.fixing_seconds)} per fixing\n"
            f"file: about {self.file_bytes:,} bytes, {self.entropy_bits:.2f} bits per weight, "
            f"{self.unique} values (estimated without training)"
            + "".join(f"\nWARNING: {sentence}" for sentence in doubts(None, [self.steps]))
        )


def forecast(
    options: RunOptions,
    config: Config,
    distributed: Distributed | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Forecast:
    """Do a few real steps at the full batch size and every fixing, and estimate the rest; writes nothing.

    Each measurement is announced to ``say``, since those of a large network take minutes. A missing folder,
    a label out of range or a batch too large is found here as the run would find it.
    """
    distributed = distributed or distributed_for(options.device)
    is_cuda = distributed.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(distributed.device)
    seed = rank_seed(config.seed, distributed.rank)
    with _heard(say if distributed.leads else lambda line: None) as say, seeded(seed, distributed.device):
        say("dry run: opening the network and the data")
        found = resolve(options, config, distributed)
        run = Run(
            *(found.model, found.data.train, found.data.test, config, distributed),
            *(F.cross_entropy, None, found.distill),
        )
        say("dry run: starting values, from a few batches")
        run.start_network(run.net)
        started = {name: copy.deepcopy(value) for name, value in run.net.state_dict().items()}
        step_seconds = 0.0
        if sum(run.phase_steps()):
            say("dry run: timing steps of training")
            step_seconds = _step_seconds(run)
        memory = _peak_bytes(distributed.device)
        say(f"dry run: {step_seconds:.3g} s per step; timing the scoring")
        scoring_seconds = _scoring_seconds(run)
        # A new network: the other one has been trained for a few steps.
        net = METHODS[config.method](found.model, config).to(distributed.device)
        net.load_state_dict(started)
        net.data, net.on_layer = run.net.data, None
        fixings = []
        for number, phase in enumerate(run.phases, 1):
            say(f"dry run: fixing {number} of {len(run.phases)}")
            fixings.append(_seconds(partial(net.fix, phase.fraction)))
        tries, try_seconds = MAX_TRIES if run.searches else 1, 0.0
        if run.searches:  # the first fixing has found a step; each further one has its own
            say("dry run: fixing at one more step, as the search for the target does")
            try_seconds = _seconds(partial(net.fix, 1.0))
        memory = max(memory, _peak_bytes(distributed.device)) if net.has_grid else memory
        say("dry run: the size of the file")
        fixed = FixedNetwork(net, net.finish())
        shrink_uncompressed(fixed.model, config.finish)
        compressed = fixed.finish()
    pool = Pool.of(compressed.values())
    rounds, steps, polish = len(run.phases), sum(run.phase_steps()), run.polish_steps > 0
    # Each state is fixed, re-estimated and scored like the end; a try is its own state.
    states = tries if run.searches else rounds if config.target.wanted else 0
    fixings_of_states = (tries - 1) * try_seconds if run.searches else states * max(fixings)
    scorings = 2 + states + (0 if run.searches else rounds)
    # A forward pass takes about a third of the time of a step, which goes forward and back.
    passes = (1 + polish + states) * steps_in(config.finish.reestimate_epochs or 0, run.batches_per_epoch)
    batch_seconds = step_seconds / config.training.accumulate
    return Forecast(
        step_seconds=step_seconds,
        epoch_seconds=batch_seconds * run.batches_per_epoch,
        fixing_seconds=max(fixings),
        scoring_seconds=scoring_seconds,
        total_seconds=steps * step_seconds
        + passes * batch_seconds / 3
        + rounds * max(fixings)
        + fixings_of_states
        + scorings * scoring_seconds,
        steps=steps,
        tries=tries,
        try_seconds=try_seconds,
        memory_bytes=memory,
        device_bytes=torch.cuda.get_device_properties(distributed.device).total_memory if is_cuda else None,
        file_bytes=len(dumps(compressed)),
        entropy_bits=pool.entropy_bits,
        unique=pool.unique,
    )


@contextmanager
def _heard(say: Callable[[str], object]) -> Iterator[Callable[[str], object]]:
    """Yields a function that says a line, and says it again with the time as long as the work goes on."""
    last, since, done = "", time.monotonic(), threading.Event()

    def tell(line: str) -> None:
        nonlocal last, since
        last, since = line, time.monotonic()
        say(line)

    def repeat() -> None:
        while not done.wait(_SILENT_SECONDS):
            say(f"{last}: {duration(time.monotonic() - since)} so far")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        done.set()
        thread.join()


def _step_seconds(run: Run) -> float:
    """The median of a few real steps, as the run takes them."""
    net, training, batches = run.net, run.config.training, run.train.endless()
    optimizer = optimizer_for(net, training, run.config.seed, run.distributed)

    def step() -> None:
        fit(
            *(net, batches, 1, run.objective, training),
            optimizer=optimizer,
            where="dry run",
            seed=run.config.seed,
            distributed=run.distributed,
        )

    first = _seconds(step)
    if first > _SLOW_SECONDS or run.distributed.world > 1:  # processes could not agree on the number
        return first
    timed: list[float] = []
    while len(timed) < _MOST_STEPS and sum(timed) < _ENOUGH_SECONDS:
        timed.append(_seconds(step))
    return statistics.median(timed)


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


def _seconds(work: Callable[[], object]) -> float:
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
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB
