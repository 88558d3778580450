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


def probe(net: Method, train: Source, objective: Objective, distributed: Distributed) -> DataProbe:
    """What a method may ask of the training data; the run's own pass over the data is not advanced."""
    kept: list[Batch] = []  # read once: a loader that shuffles would give others at every call

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

    BatchNorm normalises by the batch, as in training, and its statistics are kept. Everything else is in
    evaluation mode.
    """
    seed = seed_from("looking", net.config.seed, distributed.rank)
    total = torch.zeros((), dtype=torch.float64, device=distributed.device)
    with evaluating(net), _batch_statistics(net):
        for number, batch in enumerate(batches):
            where = f"train_loader, batch {number + 1}"
            with (
                net.sampling(True, at=(seed, number)),
                autocast(distributed.device, net.config.training.precision),
            ):
                total += objective(net, batch, where).double()
    distributed.average_([total])
    return float(total) / len(batches)


@contextmanager
def _batch_statistics(net: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm normalises by the batch; afterwards its statistics are as before."""
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
