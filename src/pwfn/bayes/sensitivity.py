"""How sensitive a network is to noise on its weights, measured on the first batches of the training data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.method import DataProbe, Method
from pwfn.bayes.objective import Objective, autocast, evaluating
from pwfn.config.seeds import seed_from

_BATCHES = 8
_STREAM = "looking"  # the name of the random stream: another name would change every result


def probe(net: Method, train: Source, objective: Objective, distributed: Distributed) -> DataProbe:
    """What a method may ask of the training data; does not advance the run's own pass over it."""
    kept: list[Batch] = []  # read once: a loader that shuffles would give other batches at every call

    def loss() -> float:
        if not kept:
            batches = train.endless()
            kept[:] = [next(batches) for _ in range(_BATCHES)]
        return noisy_loss(net, kept, objective, distributed)

    return DataProbe(lambda module: next(train.endless()).through(module, "the first batch"), loss)


@torch.no_grad()
def noisy_loss(
    net: Method, batches: Sequence[Batch], objective: Objective, distributed: Distributed
) -> float:
    """Mean loss over batches with noise on the weights, the same noise at every call.

    BatchNorm normalises by the batch, as in training, and keeps its running statistics. Everything else
    is in evaluation mode.
    """
    seed = seed_from(_STREAM, net.settings.seed, distributed.rank)
    device, precision = distributed.device, net.settings.training.precision
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(net), _batch_statistics(net):
        for number, batch in enumerate(batches):
            with net.sampling(True, at=(seed, number)), autocast(device, precision):
                where = f"train_loader, batch {number + 1}"
                output = batch.through(net, where)
                objective.check_labels(output, batch, where)
                total += objective.of_output(output, batch, where).double()
    distributed.average_([total])
    return float(total) / len(batches)


@contextmanager
def _batch_statistics(net: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm is in training mode; afterwards its running statistics are restored."""
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    before = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
