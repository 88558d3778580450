"""How far a run has come: what each round gave, and all that it takes to go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.network import WeightNetwork
from pwfn.bayes.objective import Scores, finite
from pwfn.bayes.train import Fitting
from pwfn.config import Config
from pwfn.errors import WeightError
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.targets import Choice, State
from pwfn.evaluate.trace import Trace
from pwfn.fixing.fix_round import FixRecord


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
    observed: tuple[Trace, ...] = ()  # before and after the fixing

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
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class StepEvent:
    """A moment in training, told a few times a second at most."""

    stage: str  # "round 3 of 10", "polish"
    round: int  # from 1; one more than there are for what comes after
    rounds: int
    step: int  # done in this stretch of training
    steps: int
    epoch: float  # done in this stretch
    epochs: float
    loss: float  # mean since the last pulse
    learning_rate: float
    done: float  # share of all training steps of the run, 0 to 1
    batches: int = 0  # drawn in the whole run


@dataclass
class Progress:
    """How far a run has come: its rounds, and all that it takes to go on after the last of them.

    An error raised in mid-run carries it as ``error.progress``; ``compress(..., resume=progress)``
    goes on from there, with the same settings or with others (a lower learning rate, say). With the
    same settings, and loaders that give the same epochs again (:class:`pwfn.zoo.data.Epochs`), the result
    is the very one that the uninterrupted run would have had.
    """

    rounds: list[Round] = field(default_factory=list)
    states: list[State] = field(default_factory=list)  # after each round, where they are kept
    choice: Choice | None = None  # of a state, once there is one
    before: Scores | None = None
    state: dict[str, Any] | None = None  # state dict of the network in training, on the CPU
    finished: int = 0  # how many of the steps after the last round are done
    batches: int = 0  # batches drawn from the training data
    random: list[dict[str, Any]] | None = None  # every random state of every process
    fitting: Fitting | None = None  # a stretch of training that was begun, if in the midst of one
    seconds: float = 0.0  # of work so far, in all the processes that went on with it
    optimizer: dict[str, Any] | None = None  # its state, if the next stretch goes on with it
    start: Trace | None = None  # the network before any training

    @property
    def observed(self) -> list[Trace]:
        """All that was seen so far, in order."""
        start = [self.start] if self.start is not None else []
        return start + [seen for done in self.rounds for seen in done.observed]

    def network(self, model: nn.Module, config: Config | None = None) -> GaussianNetwork:
        """The network as it was after the last finished round, made from the original model."""
        net = GaussianNetwork(model, config)
        self.restore(net)
        return net

    def restore(self, net: WeightNetwork) -> None:
        """Put a network into the state after the last finished round."""
        if self.state is None:
            return
        try:
            net.load_state_dict(self.state)
        except RuntimeError as error:
            raise WeightError(
                "the progress does not fit the model: it is of another network, or of other "
                "layout.include and layout.exclude"
            ) from error


Keep = Callable[[Callable[[], Progress], bool], None]
"""Is given, after every step, a function that takes the progress at that step, and whether a stretch
of training ends there: what follows, clustering and scoring, may take long."""
