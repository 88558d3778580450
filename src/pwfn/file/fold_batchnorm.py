"""Smaller uncompressed tensors: BatchNorm reduced to a scale and a shift, numbers rounded to 16 bits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pwfn.config import FinishConfig, UncompressedDtype
from pwfn.errors import WeightError

_WIDER = {
    UncompressedDtype.FLOAT16: UncompressedDtype.BFLOAT16,
    UncompressedDtype.BFLOAT16: UncompressedDtype.FLOAT32,
}
_SIGNIFICANT_BITS = {UncompressedDtype.TF32: 11, UncompressedDtype.FLOAT16: 11, UncompressedDtype.BFLOAT16: 8}
_FOLDED = ("weight", "bias", "running_mean", "running_var")
# Four times the rounding error of bfloat16: only a number outside the type's range is further off.
_DIVISOR_ERROR = 2.0**-7


def shrink_uncompressed(model: nn.Module, finish: FinishConfig) -> None:
    """Fold BatchNorm and round the uncompressed tensors in place, as the settings say."""
    if finish.fold_batchnorm:
        fold_batchnorm(model)
    round_uncompressed(model, finish.uncompressed_dtype)


@torch.no_grad()
def fold_batchnorm(model: nn.Module) -> int:
    """Move the statistics of every BatchNorm layer into its scale and shift; returns the number of layers.

    In evaluation mode ``y = (x - mean) / sqrt(var + eps) * gamma + beta`` remains the same function of x,
    up to rounding, with ::

        gamma' = gamma * sqrt((1 + eps) / (var + eps))        mean' = 0
        beta'  = beta - mean * gamma / sqrt(var + eps)        var'  = 1

    The variance is 1 and not ``1 - eps`` because every number type can represent 1. Computed in float64.
    Half of the numbers are then constant, and cost nothing in a file.

    Use the folded model for inference only: in training mode a layer divides by the statistics of the
    batch, for which the new scale and shift are wrong. Re-estimating the statistics breaks it too. A run that
    starts from such a model undoes it first: :func:`pwfn.bayes.batchnorm.unfolded`.

    Skipped are layers without statistics, layers whose scale or shift is missing, compressed or computed
    from other tensors, and layers that share a tensor with another module.

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
        # A quotient of tensors, which is exactly 1 where the layer is folded already.
        ratio = (torch.ones_like(var) + layer.eps) / (var + layer.eps)
        weight = (gamma * ratio.sqrt()).to(own["weight"].dtype)
        bias = (beta - mean * scale).to(own["bias"].dtype)
        if not bool(torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise WeightError(
                f"BatchNorm {name!r} cannot be folded: it divides by the square root of "
                f"{float((var + layer.eps).min()):.3g}, and the new scale or shift is not finite: set "
                "finish.fold_batchnorm = false"
            )
        own["weight"].copy_(weight)
        own["bias"].copy_(bias)
        own["running_mean"].zero_()
        own["running_var"].fill_(1)
        if "num_batches_tracked" in own:
            own["num_batches_tracked"].zero_()
    return len(layers)


@torch.no_grad()
def is_folded(layer: _BatchNorm) -> bool:
    """Whether a layer looks as :func:`fold_batchnorm` leaves it: mean 0, variance 1, trained scale or shift.

    No trained layer has these statistics by chance, and in an untrained one scale and shift are constants.

    >>> layer = nn.BatchNorm1d(2).eval()
    >>> _ = layer.running_var.copy_(torch.tensor([1.0, 4.0]))
    >>> is_folded(layer), fold_batchnorm(layer), is_folded(layer)
    (False, 1, True)
    """
    own = _own(layer)
    if not own.keys() >= set(_FOLDED):
        return False
    plain = bool((own["running_mean"] == 0).all() and (own["running_var"] == 1).all())
    return plain and any(bool((own[leaf] != own[leaf][:1]).any()) for leaf in ("weight", "bias"))


@torch.no_grad()
def round_uncompressed(model: nn.Module, dtype: UncompressedDtype) -> None:
    """Round every floating-point tensor of the state dict to the values of a smaller type, in place.

    Tensors keep their type, so that the model loads as before: the last bits of each number are zero and
    cost nothing in a file. Tensors of 16 bits or fewer do not change. The shift of a normalisation layer is
    added to numbers of its own size, so that its absolute error counts: its numbers below the root mean
    square of their tensor are multiples of the step that the type has there.

    ``tf32`` has no range: every number is rounded to 11 significant bits. For the other types it is an error
    if a number is too large, or a variance so small that its layer would divide by something else.

    >>> layer = nn.LayerNorm(2)
    >>> _ = layer.bias.data.copy_(torch.tensor([0.1, 1.0]))
    >>> round_uncompressed(layer, UncompressedDtype.BFLOAT16)
    >>> layer.bias.tolist(), layer.bias.dtype
    ([0.1015625, 1.0], torch.float32)
    """
    if dtype is UncompressedDtype.FLOAT32:
        return
    modules = [(f"{name}." if name else "", m) for name, m in model.named_modules(remove_duplicate=False)]
    epsilons = {f"{name}running_var": m.eps for name, m in modules if isinstance(m, _BatchNorm)}
    shifts = {f"{name}bias" for name, m in modules if isinstance(m, (_NormBase, nn.LayerNorm, nn.GroupNorm))}
    state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 2:
            state[name] = _rounded(value, dtype, name in shifts)
            _check_range(name, value, state[name], dtype)
            if name in epsilons:
                _check_divisor(name, value, state[name], dtype, epsilons[name])
    model.load_state_dict(state)


def _rounded(value: Tensor, dtype: UncompressedDtype, shift: bool) -> Tensor:
    """To the significant bits of the type; of a shift none is below the last bit of its root mean square."""
    exact, bits = _exact(value).numpy(), _SIGNIFICANT_BITS[dtype]
    power = np.frexp(exact)[1]
    finite = exact[np.isfinite(exact)]
    if shift and finite.any():
        power = np.maximum(power, np.frexp(np.sqrt(np.square(finite).mean()))[1])
    rounded = torch.as_tensor(np.ldexp(np.rint(np.ldexp(exact, bits - power)), power - bits))
    if dtype is not UncompressedDtype.TF32:
        return rounded.to(getattr(torch, dtype)).to(value)
    rounded = rounded.to(value)
    return torch.where(rounded.isfinite(), rounded, value)  # the largest numbers would become infinite


def _foldable(model: nn.Module) -> dict[str, _BatchNorm]:
    """By name, the layers that own all four tensors, none of them shared."""
    owners = Counter(id(tensor) for module in model.modules() for tensor in _own(module).values())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and _own(module).keys() >= set(_FOLDED)
        and all(owners[id(tensor)] == 1 for tensor in _own(module).values())
    }


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, without those that are None or parametrised."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _exact(tensor: Tensor) -> Tensor:
    # On the CPU: some devices lack float64, and the bits are the same for all.
    return tensor.detach().to("cpu", torch.float64)


def _check_range(name: str, value: Tensor, rounded: Tensor, dtype: UncompressedDtype) -> None:
    lost = torch.isfinite(value) & ~torch.isfinite(rounded)
    if bool(lost.any()):
        raise WeightError(
            f"{name} contains {float(value[lost][0]):.6g}, which is too large for {dtype}: set "
            f'finish.uncompressed_dtype = "{_WIDER[dtype]}"'
        )


def _check_divisor(name: str, var: Tensor, rounded: Tensor, dtype: UncompressedDtype, eps: float) -> None:
    """A layer divides by ``sqrt(var + eps)``: a tiny var may become 0 where eps is much larger."""
    before, after = _exact(var) + eps, _exact(rounded) + eps
    off = (after - before).abs() > _DIVISOR_ERROR * before.abs()
    if bool(off.any()):
        found, new = float(_exact(var)[off][0]), float(_exact(rounded)[off][0])
        raise WeightError(
            f"{name} contains {found:.3g}, which {dtype} rounds to {new:.3g}, and its layer divides by the "
            f'square root (eps = {eps:g}): set finish.uncompressed_dtype = "{_WIDER[dtype]}", or '
            "finish.fold_batchnorm = true"
        )
