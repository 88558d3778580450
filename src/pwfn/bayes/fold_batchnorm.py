"""Less to store beside the compressed weights: BatchNorm as a scale and a shift, numbers of 16 bits."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.config import FinishConfig, UncompressedDtype
from pwfn.errors import WeightError

_TYPES = {UncompressedDtype.FLOAT16: torch.float16, UncompressedDtype.BFLOAT16: torch.bfloat16}
_WIDER = {
    UncompressedDtype.FLOAT16: UncompressedDtype.BFLOAT16,
    UncompressedDtype.BFLOAT16: UncompressedDtype.FLOAT32,
}
_FOLDED = ("weight", "bias", "running_mean", "running_var")
_DIVISOR_SHARE = 2.0**-7  # four times what bfloat16 may be off by: only numbers out of range are off by more


def shrink_uncompressed(model: nn.Module, finish: FinishConfig) -> None:
    """Fold BatchNorm and round the uncompressed tensors of a model in place, as the settings say."""
    if finish.fold_batchnorm:
        fold_batchnorm(model)
    round_rest(model, finish.uncompressed_dtype)


@torch.no_grad()
def fold_batchnorm(model: nn.Module) -> int:
    """Put the statistics of every BatchNorm layer into its scale and shift; returns how many were done.

    ``y = (x - mean) / sqrt(var + eps) * gamma + beta`` stays the same function of x in evaluation mode,
    to rounding, with ::

        gamma' = gamma * sqrt((1 + eps) / (var + eps))        mean' = 0
        beta'  = beta - mean * gamma / sqrt(var + eps)        var'  = 1

    The variance is 1 rather than ``1 - eps``, since every number type has 1: one that rounds the other
    would multiply all layers by a little less. All is reckoned in float64. Half of the numbers are then
    alike, and a file stores them for nothing.

    Such a model is for inference. In training mode a layer divides by the batch's own statistics, for
    which the new scale and shift are wrong; gathering statistics again spoils it likewise.

    Left as it is: a layer without statistics, or without a scale and shift of its own (no affine ones,
    compressed ones, those that are computed from others), or that shares a tensor with another module.

    >>> layer = nn.BatchNorm1d(1, eps=0.25).eval()
    >>> layer.running_mean[0], layer.running_var[0] = 3.0, 0.75
    >>> layer(torch.tensor([[5.0]])).item()
    2.0
    >>> fold_batchnorm(layer), layer.running_mean.item(), layer.running_var.item(), layer.bias.item()
    (1, 0.0, 1.0, -3.0)
    >>> layer(torch.tensor([[5.0]])).item()
    2.0
    """
    layers = _foldable(model)
    for name, layer in layers.items():
        own = _own(layer)
        gamma, beta, mean, var = (_exact(own[leaf]) for leaf in _FOLDED)
        scale = gamma / (var + layer.eps).sqrt()
        weight = (scale * (1 + layer.eps) ** 0.5).to(own["weight"].dtype)
        bias = (beta - mean * scale).to(own["bias"].dtype)
        if not bool(torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise WeightError(
                f"BatchNorm {name!r} divides by the root of {float((var + layer.eps).min()):.3g}, and a "
                "scale and shift with that in them are not finite: set finish.fold_batchnorm = false"
            )
        own["weight"].copy_(weight)
        own["bias"].copy_(bias)
        own["running_mean"].zero_()
        own["running_var"].fill_(1)
        if "num_batches_tracked" in own:
            own["num_batches_tracked"].zero_()
    return len(layers)


@torch.no_grad()
def round_rest(model: nn.Module, rest: UncompressedDtype) -> None:
    """Round every floating-point tensor of a state dict to numbers that a smaller type holds, in place.

    Tensors keep their own type, so that the model loads as before: of each number the last bytes are
    zero, which a file stores for nothing. Tensors of 16 bits or fewer stay as they are. Errors name a
    tensor with a number too large, or a variance so small that it would be another to its layer.

    >>> layer = nn.LayerNorm(2)
    >>> _ = layer.bias.data.copy_(torch.tensor([0.1, 1.0]))
    >>> round_rest(layer, UncompressedDtype.BFLOAT16)
    >>> layer.bias.tolist(), layer.bias.dtype
    ([0.10009765625, 1.0], torch.float32)
    """
    if rest is UncompressedDtype.FLOAT32:
        return
    epsilons = {
        f"{name}.running_var" if name else "running_var": module.eps
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm)
    }
    state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 2:
            rounded = value.to(_TYPES[rest]).to(value.dtype)
            _check_range(name, value, rounded, rest)
            if name in epsilons:
                _check_divisor(name, value, rounded, rest, epsilons[name])
            state[name] = rounded
    model.load_state_dict(state)


def _foldable(model: nn.Module) -> dict[str, _BatchNorm]:
    """By name, the layers whose four tensors are plain and theirs alone."""
    owners = Counter(id(tensor) for module in model.modules() for tensor in _own(module).values())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and _own(module).keys() >= set(_FOLDED)
        and all(owners[id(tensor)] == 1 for tensor in _own(module).values())
    }


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers; an empty place, and one that is computed, is not among them."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _exact(tensor: Tensor) -> Tensor:
    # On the CPU: not every device has float64, and so all come to the same bits.
    return tensor.detach().to("cpu", torch.float64)


def _check_range(name: str, value: Tensor, rounded: Tensor, rest: UncompressedDtype) -> None:
    lost = torch.isfinite(value) & ~torch.isfinite(rounded)
    if bool(lost.any()):
        raise WeightError(
            f"{name} holds {float(value[lost][0]):.6g}, and {rest} ends at "
            f'{torch.finfo(_TYPES[rest]).max:.6g}: set finish.uncompressed_dtype = "{_WIDER[rest]}"'
        )


def _check_divisor(name: str, var: Tensor, rounded: Tensor, rest: UncompressedDtype, eps: float) -> None:
    """What counts is ``var + eps``, which the layer divides by: a var of 0 is as good as a tiny one."""
    before, after = _exact(var) + eps, _exact(rounded) + eps
    off = (after - before).abs() > _DIVISOR_SHARE * before.abs()
    if bool(off.any()):
        raise WeightError(
            f"{name} holds {float(_exact(var)[off][0]):.3g}, which {rest} has as "
            f"{float(_exact(rounded)[off][0]):.3g}, and the layer divides by its root (eps is {eps:g}): "
            f'set finish.uncompressed_dtype = "{_WIDER[rest]}", or finish.fold_batchnorm = true'
        )
