"""How far a run has come: what each round gave, and everything needed to resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pwfn.bayes.method import Method
from pwfn.bayes.train import PhaseState
from pwfn.errors import WeightError
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.score import Scores, finite
from pwfn.evaluate.targets import Choice, State
from pwfn.evaluate.trace import Trace
from pwfn.fixing.record import FixRecord


@dataclass(frozen=True)
class Round:
    """The facts of one round, after its fixing."""

    number: int  # from 1
    steps: int  # training steps before the fixing
    loss: float | None  # mean task loss over them; None for no steps
    fix: FixRecord
    fixed: Pool  # over the weights fixed so far
    sigma_quartiles: tuple[float, float, float] | None  # of the weights that were free in training
    scores: Scores | None  # of the point estimate on the validation data
    seconds: float
    traces: tuple[Trace, ...] = ()  # before and after the fixing
    rate_bytes: float | None = None  # of the file, as training counted them at its end; see Method

    def to_dict(self) -> dict[str, Any]:
        """Its figures as plain values."""
        return {
            "round": self.number,
            "fraction": self.fix.fraction,
            "steps": self.steps,
            "loss": finite(self.loss),
            "metric": finite(self.scores.metric) if self.scores else None,
            "validation_loss": finite(self.scores.loss) if self.scores else None,
            "entropy_bits": self.fixed.entropy_bits,
            "unique": self.fixed.unique,
            "power_of_two_share": self.fixed.power_of_two_share,
            "zero_share": self.fixed.zero_share,
            "sigma_quartiles": list(self.sigma_quartiles) if self.sigma_quartiles else None,
            "centres": len(self.fix.steps),
            "rate_bytes": self.rate_bytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class StepEvent:
    """A moment in training, reported a few times per second at most."""

    stage: str  # "round 3 of 10", "polish"
    round: int  # from 1; one more than there are for what comes after
    rounds: int
    step: int  # done in this phase
    steps: int
    epoch: float  # done in this phase
    epochs: float
    loss: float  # mean since the last event
    learning_rate: float
    done: float  # fraction of all training steps of the run
    batches: int = 0  # drawn in the whole run
    rate_bytes: float | None = None  # of the file, as training counts them; see Method

    @classmethod
    def at_layer(cls, layer: int, layers: int, round_number: int) -> StepEvent:
        """A moment in a fixing that goes layer by layer; there is no loss."""
        stage = f"network {round_number}"
        return cls(stage, round_number, round_number, layer, layers, 0.0, 0.0, math.nan, 0.0, layer / layers)


@dataclass(frozen=True)
class Progress:
    """How far a run has come, as one value: it changes only when a round or a finishing step is complete.

    An error raised in a run carries it as ``error.progress``; ``compress(..., resume=progress)`` resumes
    there, with the same settings or with others (a lower learning rate, say). With the same settings, and
    loaders that give the same epochs again (:class:`pwfn.zoo.data.Epochs`), the result is the same, bit
    for bit, as that of an uninterrupted run.
    """

    rounds: tuple[Round, ...] = ()
    states: tuple[State, ...] = ()  # after each round, where there is a target
    choice: Choice | None = None  # of a state, once it is made
    before: Scores | None = None
    network: dict[str, Any] | None = None  # state dict of the network in training, on the CPU
    uncompressed: dict[str, Any] | None = None  # after the last round: the other tensors, as trained further
    finished: int = 0  # finishing steps done
    batches: int = 0  # batches drawn from the training data
    random: list[dict[str, Any]] | None = None  # every random state of every process
    phase: PhaseState | None = None  # in the middle of a training phase
    scaler: dict[str, Any] = field(default_factory=dict)  # of the loss, for fp16; empty otherwise
    seconds: float = 0.0  # of work so far, in all processes that resumed it
    start: Trace | None = None  # the network before any training
    warnings: tuple[str, ...] = ()  # what looked wrong before any training
    threads: int = 0  # of torch, on a CPU; 0: not known

    def __repr__(self) -> str:
        step = f", step {self.phase.step}" if self.phase else ""
        return f"Progress({len(self.rounds)} rounds{step}, {self.batches} batches, {self.seconds:.0f} s)"

    @property
    def traces(self) -> list[Trace]:
        """Every trace so far, in order."""
        start = [self.start] if self.start is not None else []
        return start + [trace for done in self.rounds for trace in done.traces]

    def noted(self, sentences: Sequence[str]) -> tuple[str, ...]:
        """The warnings so far and these, each once."""
        return tuple(dict.fromkeys((*self.warnings, *sentences)))

    def restore(self, net: Method) -> None:
        """Put a network into the state after the last finished round."""
        if self.network is None:
            return
        try:
            net.load_state_dict(self.network)
        except (RuntimeError, TypeError, ValueError) as error:  # a method reads its own state as it likes
            raise WeightError(
                "the progress does not fit the model: it belongs to another network or method, to other "
                "layout.include and layout.exclude, or to another version of pwfn"
            ) from error


def on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state dict, with its tensors on the CPU."""
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


Keep = Callable[[Callable[[], Progress], bool], None]
"""Receives, after every step, a function that takes the progress at that step, and whether a phase ends
there: fixing and scoring, which follow, may take long."""
