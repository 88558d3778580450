"""A run with a target that is interrupted at any moment, and again after it resumed, ends in the same bytes.

A moment is a call of anything that a run does: a batch of training or test data, a fixing, a state, a choice,
a checkpoint, the end of a round. The run stops at each of them once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cases import Shuffled
from cases import normalised_classifier as network
from torch import Tensor

import pwfn
from pwfn import Config, Result
from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.grid.conditioned import ConditionedNetwork
from pwfn.bayes.randomness import seeded
from pwfn.compress import Run
from pwfn.file.format import dumps
from pwfn.progress import Progress
from pwfn.run.checkpoint import from_plain, to_plain

TRAINED = Config().override(
    {
        "posterior.init": "powers",
        "fixing.grid_exponent": 7,
        "schedule.fractions": [0.5, 1.0],
        "schedule.epochs_per_round": 1.5,
        "training.sigma_learning_rate": 0.5,
    }
)
RUNS = {
    "the smallest state is kept": TRAINED.override({"target.max_drop": 100.0}),
    "the best state is kept": TRAINED.override({"target.bits": 100.0, "training.learning_rate": 0.5}),
    "a target decides the step": Config.preset("quick").override(
        {"target.bits": 2.0, "options.images": 16, "options.step": 1.0}
    ),
}
MOMENTS = {
    GaussianNetwork: ("start", "fix"),
    ConditionedNetwork: ("fix",),  # every layer of it is a moment, too: before_batch is called there
    Run: ("_state", "_advance", "_reestimate", "_polish", "_result", "scores"),
}


class StoppedError(BaseException):
    """Stands for Ctrl-C: no part of a run catches it."""


class Clock:
    """Counts the moments of a run, and stops it at one of them."""

    def __init__(self, stop: int | None = None) -> None:
        self.now, self.stop = 0, stop
        self.names: list[str] = []

    def tick(self, name: str) -> None:
        self.names.append(name)
        self.now += 1
        if self.now == self.stop:
            raise StoppedError(name)


class Ticking(Shuffled):
    """Batches whose order is a function of the epoch; each is a moment."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(2)
        self.clock = clock

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().epoch(number, start):
            self.clock.tick("batch")
            yield batch


def ticking(clock: Clock, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        clock.tick(f"before {name}")
        found = function(*arguments, **named)
        clock.tick(f"after {name}")
        return found

    return called


def run(clock: Clock, config: Config, resume: Progress | None = None) -> tuple[Result | None, list[Progress]]:
    """The result, or None where the clock stopped it; every checkpoint, and the progress of the error."""
    taken: list[Progress] = []

    def keep(progress: Progress) -> None:
        clock.tick("before checkpoint")
        taken.append(progress)
        clock.tick("after checkpoint")

    with pytest.MonkeyPatch.context() as patched:
        for owner, names in MOMENTS.items():
            for name in names:
                patched.setattr(owner, name, ticking(clock, name, getattr(owner, name)))
        module = sys.modules["pwfn.compress"]
        for name in ("choose", "next_step", "dumps"):
            patched.setattr(module, name, ticking(clock, name, getattr(module, name)))
        try:
            result = pwfn.compress(
                *(network(), Ticking(clock), Ticking(clock), config),
                metric=lambda output, target: -output.abs().mean(),  # best before training
                resume=resume,
                keep=lambda progress, ends: keep(progress()),
                before_batch=lambda: clock.tick("test batch"),
                on_round=keep,
            )
        except StoppedError as error:
            taken.append(error.progress)  # type: ignore[attr-defined]
            return None, taken
    return result, taken


def outcome(result: Result) -> tuple[object, ...]:
    rounds = [repr(dataclasses.replace(done, seconds=0.0)) for done in result.rounds]
    return dumps(result.compressed), rounds, result.states, result.choice, result.after, result.epochs


def left(taken: list[Progress], number: int) -> Progress | None:
    """Of an interrupted run: what the error carries or, every other time, the newest checkpoint as read."""
    *checkpoints, carried = taken
    if number % 2:
        return carried
    return from_plain(to_plain(checkpoints[-1])) if checkpoints else None


@pytest.mark.parametrize("name", RUNS)
def test_interrupted_at_any_moment_and_once_more_a_run_ends_the_same(name: str) -> None:
    config, clock = RUNS[name], Clock()
    whole, _ = run(clock, config)
    assert whole is not None
    assert whole.choice is not None
    assert (whole.choice.round < len(whole.rounds)) == (name != "the smallest state is kept")
    for stop in range(1, clock.now + 1):
        result, taken = run(Clock(stop), config)
        assert result is None
        # Once more, after a number of moments that differs; where the end comes first, not at all.
        resume = left(taken, stop)
        result, taken = run(Clock(1 + 7 * stop % 23), config, resume)
        if result is None:
            result, _ = run(Clock(), config, left([resume or Progress(), *taken], stop // 2))
        assert result is not None
        assert outcome(result) == outcome(whole), (stop, clock.names[stop - 1])


def test_an_interrupt_when_all_is_done_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While random states are restored, say."""

    @contextmanager
    def interrupted(*arguments: Any) -> Iterator[None]:
        with seeded(*arguments):
            yield
        raise StoppedError

    config = RUNS["the best state is kept"]
    whole, _ = run(Clock(), config)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["pwfn.compress"], "seeded", interrupted)
        result, (*_, carried) = run(Clock(), config)
    assert result is None
    again, _ = run(clock := Clock(), config, carried)
    assert whole is not None
    assert again is not None
    assert outcome(again) == outcome(whole)
    assert not {"before fix", "before _state", "before _polish"} & set(clock.names)
