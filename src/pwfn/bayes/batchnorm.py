"""BatchNorm statistics: gathered again at the point estimate, after training under noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.bayes.batches import Batch
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.network import WeightNetwork
from pwfn.bayes.objective import evaluating


def tracked(model: nn.Module) -> dict[str, _BatchNorm]:
    """By name, the BatchNorm layers that update running statistics in training mode.

    A layer that the model's own ``train()`` leaves in evaluation mode does not.
    """
    with evaluating(model):
        model.train()
        return {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
            and module.track_running_stats
            and module.running_mean is not None
            and module.training
        }


@contextmanager
def gathering(model: nn.Module) -> Iterator[dict[str, _BatchNorm]]:
    """Within the block BatchNorm gathers new statistics, as plain means over the batches.

    Yields those layers by name; the rest of the model is in evaluation mode. Afterwards modes and momenta
    are restored. A layer that no batch passed through keeps its statistics; after an error all do.
    """
    layers = tracked(model)
    before = [(layer.momentum, {k: v.clone() for k, v in layer.named_buffers()}) for layer in layers.values()]
    whole = False
    with evaluating(model):
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
            layer.train()
        try:
            yield layers
            whole = True
        finally:
            for layer, (momentum, statistics) in zip(layers.values(), before, strict=True):
                layer.momentum = momentum
                if not whole or layer.num_batches_tracked == 0:
                    layer.load_state_dict(statistics, strict=False)


@torch.no_grad()
def reestimate_batchnorm(
    net: WeightNetwork,
    batches: Iterator[Batch],
    steps: int,
    where: str,
    distributed: Distributed | None = None,
) -> int:
    """Gather running statistics again at the point estimate, as plain means over all batches.

    Statistics gathered under noise do not fit the network without it. Returns the number of layers done.
    The rest of the network is in evaluation mode meanwhile. A layer that no batch passes through keeps
    its statistics; after an error every layer does.
    """
    with gathering(net) as layers, net.sampling(False):
        if not layers:
            return 0
        for _ in range(max(steps, 1)):
            next(batches).through(net, where)
        done = [layer for layer in layers.values() if layer.num_batches_tracked != 0]
    statistics = [b for layer in done for b in layer.buffers(recurse=False) if b.is_floating_point()]
    if distributed is not None:
        distributed.average_(statistics)
    return len(done)
