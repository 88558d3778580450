"""What is found out about a network from its training data before a run begins, and changes nothing yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.objective import Objective, autocast, evaluating
from pwfn.bayes.train import diagonal_fisher
from pwfn.config import Config
from pwfn.config.seeds import seed_from
from pwfn.lab.baselines import Look, Method


@dataclass(frozen=True)
class Looking:
    """The first batches of the training data and the loss; the run's own batches stay where they are."""

    train: Source
    task: Objective  # by the labels
    scored: Objective  # what the run is scored by: the task, or a divergence in its place
    config: Config
    distributed: Distributed

    def look(self, net: Method) -> Look:
        """What a method may ask about its network."""

        def through(module: nn.Module) -> object:
            return next(self.train.endless()).through(module, "the first batch")

        def fisher(parameter: nn.Parameter, count: int) -> Tensor:
            batches, precision = self.train.endless(), self.config.training.precision
            where = "the curvature"
            return diagonal_fisher(
                net, parameter, batches, count, self.task, precision, where, self.distributed
            )

        kept: list[Batch] = []  # the same at every call, though the loader may shuffle, and read once

        def loss(count: int) -> float:
            if len(kept) < count:
                batches = self.train.endless()
                kept[:] = [next(batches) for _ in range(count)]
            return self.loss(net, kept[:count])

        return Look(through, fisher, loss)

    @torch.no_grad()
    def loss(self, net: Method, batches: Sequence[Batch]) -> float:
        """The mean loss over batches, each with a draw that is the same at every call.

        BatchNorm normalises by the batch, as in training, and keeps its statistics; all else is as in
        evaluation.
        """
        precision = self.config.training.precision
        seed = seed_from("looking", self.config.seed, self.distributed.rank)
        total = torch.zeros((), dtype=torch.float64, device=self.distributed.device)
        with evaluating(net), _by_batch(net):
            for number, batch in enumerate(batches):
                with net.sampling(True, at=(seed, number)), autocast(self.distributed.device, precision):
                    total += self.scored(net, batch, f"train_loader, batch {number + 1}").double()
        self.distributed.average_([total])
        return float(total) / len(batches)


@contextmanager
def _by_batch(net: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm goes by each batch's statistics; then it has those it had."""
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    kept = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    modes = [(layer, layer.training) for layer in layers]
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer, mode in modes:
            layer.train(mode)
        for buffer, value in kept:
            buffer.copy_(value)
