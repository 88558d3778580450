"""BatchNorm statistics: gathered again at the point estimate, and found again where they were folded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.network import WeightNetwork
from pwfn.bayes.objective import evaluating
from pwfn.bayes.randomness import undisturbed
from pwfn.file.fold_batchnorm import is_folded

_EXAMPLES = 1024  # whose statistics a folded layer gets


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
    """Gather running statistics again at the point estimate; returns the number of layers done.

    Statistics gathered under noise do not fit the network without it. See :func:`gathering`.
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


@torch.no_grad()
def unfolded(model: nn.Module, source: Source, distributed: Distributed) -> nn.Module:
    """A model that can be trained: itself, or a copy in which BatchNorm that was folded has statistics again.

    A .pwfn file has folded layers by default. In training mode they would divide by the statistics of the
    batch, and multiply by a scale for a variance of 1. With the mean ``m`` and variance ``v`` of a layer's
    inputs, the same function in evaluation mode, and nearly the same in training mode, is ::

        gamma' = gamma * sqrt((v + eps) / (1 + eps))        mean' = m
        beta'  = beta + m * gamma / sqrt(1 + eps)           var'  = v
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if not any(isinstance(module, _BatchNorm) and is_folded(module) for module in modules):
        return model
    modes = [module.training for module in model.modules()]
    model = copy.deepcopy(model).to(distributed.device).eval()
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and is_folded(m)]
    sums: dict[nn.Module, Tensor] = {}  # number, sum and sum of squares of each channel

    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].double().transpose(0, 1).flatten(1)
        found = torch.stack([torch.full_like(x[:, 0], x.shape[1]), x.sum(1), x.square().sum(1)])
        sums[layer] = sums[layer] + found if layer in sums else found

    hooks = [layer.register_forward_pre_hook(add) for layer in layers]
    count = 0
    with undisturbed(source):
        for number, batch in enumerate(source.apart().batches(0)):
            batch.through(model, f"{source.name}, batch {number + 1}")
            count += batch.size
            if count >= _EXAMPLES:
                break
    for hook in hooks:
        hook.remove()
    for layer, (size, total, squares) in sums.items():
        assert isinstance(layer, _BatchNorm)
        mean, scale = total / size, layer.weight.double() / (1 + layer.eps) ** 0.5
        var = (squares / size - mean.square()).clamp_min(0)
        layer.bias.copy_(layer.bias.double() + mean * scale)
        layer.weight.copy_(scale * (var + layer.eps).sqrt())
        layer.load_state_dict({"running_mean": mean, "running_var": var}, strict=False)
        distributed.copy_first_([t for t in layer.state_dict().values() if t.is_floating_point()])
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return model
