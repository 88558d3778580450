"""What a run asks of a method, whichever it is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from pwfn.bayes.network import WeightNetwork
from pwfn.bayes.optimizer import FlatOptimizer
from pwfn.config import Config, Optimizer
from pwfn.errors import ConfigError
from pwfn.file.compressed import Compressed
from pwfn.fixing.fix_round import FixRecord


@dataclass(frozen=True)
class Look:
    """What a method may ask of the training data before the first step; computed only if it is called."""

    through: Callable[[nn.Module], object]  # puts the first batch through a module
    fisher: Callable[
        [nn.Parameter, int], Tensor
    ]  # diagonal, of the loss by a parameter, over so many batches
    loss: Callable[[int], float]  # of the network as it is, noise drawn, over so many batches


class Stretch(NamedTuple):
    """One stretch of training and where the network is after it."""

    epochs: float
    fraction: float  # of the weights that are fixed then or, without fixings, of the training; the last is 1


@dataclass(frozen=True)
class Between:
    """What came of the work between two stretches."""

    record: FixRecord
    fixed: Tensor  # the values of the weights that are in place
    sigma_quartiles: tuple[float, float, float] | None = None  # of the weights that were free in training


class InForce(NamedTuple):
    """The weights as they are at a moment, without noise."""

    mu: Tensor
    sigma: Tensor | None = None  # where weights are distributions
    fixed: Tensor | None = None  # which of them are in place; None: all


class Method(WeightNetwork):
    """One way to put a network's weights on few values while it is trained.

    A run calls, in this order and over and over: :meth:`plan` for the stretches of training;
    :meth:`begin` once; then for every step the weights of :meth:`views`, the loss and its
    :meth:`term`, and :meth:`penalty`; after every stretch :meth:`between`; after the last
    :meth:`finish`. Every file of this package defines them in that order.

    What a method needs to go on after a crash is its state dict.
    """

    keeps_optimizer: ClassVar[bool] = True  # through all stretches; else each begins with a fresh one
    has_posterior: ClassVar[bool] = False  # a sigma for every weight, in the end
    forecast_of: ClassVar[str] = "the weights as they are"  # what a size that is told beforehand is that of

    @classmethod
    def plan(cls, config: Config) -> tuple[Stretch, ...]:
        """The stretches of training: an epoch each, unless a method fixes weights in rounds.

        >>> config = Config().override({"schedule.epochs": 2.5})
        >>> [stretch.epochs for stretch in Method.plan(config)]
        [1.0, 1.0, 0.5]
        """
        epochs = config.schedule.epochs
        count = max(math.ceil(epochs), 1)
        done = [min(float(number), epochs) for number in range(count + 1)]
        return tuple(Stretch(done[i] - done[i - 1], i / count) for i in range(1, count + 1))

    def begin(self, look: Look) -> None:
        """Before the first step: a look at the data, with the weights as they came."""
        return

    def rehearse(self, steps: int) -> None:
        """Do what so many steps of training would, as far as that can be told without data."""
        return

    @abstractmethod
    def between(self, number: int, fraction: float) -> Between:
        """After a stretch, numbered from 1; after one whose fraction is 1 every weight is in place."""

    @torch.no_grad()
    def in_force(self) -> InForce:
        """The weights as they are now, for those who look on; here those of :meth:`views`, all in place."""
        views = self.views()
        pieces = [views[entry.name].detach().reshape(-1) for entry in self.layout.entries]
        return InForce(torch.cat([piece.to(self.layout.dtype) for piece in pieces]))

    @abstractmethod
    def rounded(self) -> Self:
        """A copy as it would be if the run ended here: every weight in place."""

    @abstractmethod
    def adopt(self, compressed: Compressed) -> None:
        """Take over a finished state: every weight in place, and the tensors beside them."""

    @abstractmethod
    def finish(self) -> Compressed:
        """The compressed network, once every weight is in place."""

    @abstractmethod
    def compared(self) -> Sequence[Tensor]:
        """Tensors that must be alike in all processes after every stretch."""

    def optimizer(self, seed: int, *, alone: bool) -> torch.optim.Optimizer | FlatOptimizer:
        """A fresh one, as the settings have it; ``alone``: for one process and one batch a step."""
        config = self.config.training
        return torch_optimizer(
            [{"params": list(self.parameters()), "weight_decay": config.weight_decay}], self.config
        )


def torch_optimizer(groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
    """Torch's optimiser for parameter groups, as ``training`` has it; in one kernel where there is one."""
    training = config.training
    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.is_cuda and p.is_floating_point() for p in parameters) or None
    if training.optimizer is Optimizer.ADAMW:
        betas = (training.momentum, 0.999)
        return torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, fused=fused)
    return torch.optim.SGD(groups, lr=training.learning_rate, momentum=training.momentum, fused=fused)


def rounds_of_fixing(config: Config) -> tuple[Stretch, ...]:
    """A stretch before every fixing: a short one first, then equal ones; or as long as the settings list.

    >>> changes = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_of_rounds": [0.5, 4]}
    >>> [tuple(stretch) for stretch in rounds_of_fixing(Config().override(changes))]
    [(0.5, 0.5), (4.0, 1.0)]
    """
    schedule = config.schedule
    rest = [schedule.epochs_per_round] * (len(schedule.fractions) - 1)
    listed = schedule.epochs_of_rounds
    epochs = (schedule.warmup_epochs, *rest) if listed is None else tuple(listed)
    if len(epochs) != len(schedule.fractions):
        raise ConfigError(
            f"schedule.epochs_of_rounds has {len(epochs)} numbers for the {len(schedule.fractions)} of "
            "schedule.fractions: give one for each"
        )
    return tuple(map(Stretch, epochs, schedule.fractions))
