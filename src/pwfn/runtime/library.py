"""The two operations on indices, as torch sees them.

``torch.ops.pwfn.expand`` and ``torch.ops.pwfn.indexed_linear`` run the reference on every device, and Triton
kernels on CUDA where Triton is installed. Only the input gets a gradient: indices have none, and palettes are
fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pwfn.errors import WeightError
from pwfn.runtime import reference
from pwfn.runtime.dispatch import define

SCHEMAS: dict[str, str] = {
    "expand": "(Tensor indices, Tensor palettes, int axis) -> Tensor",
    "indexed_linear": "(Tensor x, Tensor indices, Tensor palettes, Tensor? bias) -> Tensor",
}

MOST_INPUTS = 32
"""Largest number of inputs (rows of x) for a kernel; for more, a temporary dense weight is faster."""
FEW_INPUTS = 4
"""Up to this many inputs in any type; more need tensor cores, and therefore 16-bit numbers."""

_INDEX_TYPES = (torch.uint8, torch.int16, torch.int32)
_LIBRARY = torch.library.Library("pwfn", "FRAGMENT")


def _define(name: str) -> Any:
    return define(_LIBRARY, name, SCHEMAS[name], getattr(reference, name), "pwfn.runtime.triton")


_expand = _define("expand")
_indexed_linear = _define("indexed_linear")


def _empty_weight(indices: Tensor, palettes: Tensor, axis: int) -> Tensor:
    return torch.empty_like(indices, dtype=palettes.dtype)


def _empty_output(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], indices.shape[0]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, palettes, _ = inputs
    ctx.save_for_backward(indices, palettes)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """``g W`` for the input; the weight is dense during this product."""
    return grad @ _expand(*ctx.saved_tensors, 0), None, None, None


torch.library.register_fake("pwfn::expand", _empty_weight, lib=_LIBRARY)
torch.library.register_fake("pwfn::indexed_linear", _empty_output, lib=_LIBRARY)
torch.library.register_autograd("pwfn::indexed_linear", _gradients, setup_context=_remember, lib=_LIBRARY)


def index_dtype(count: int) -> torch.dtype:
    """The narrowest type for indices into ``count`` values.

    >>> index_dtype(256), index_dtype(257)
    (torch.uint8, torch.int16)
    """
    return next(dtype for dtype in _INDEX_TYPES if count - 1 <= torch.iinfo(dtype).max)


def expand(indices: Tensor, palettes: Tensor, axis: int = 0) -> Tensor:
    """The dense tensor ``palette[indices]``, in the type of the palettes.

    ``palettes`` is one palette, or one row for each of the equal parts into which ``axis`` is cut.

    >>> expand(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), torch.tensor([0.5, -2.0])).tolist()
    [[0.5, -2.0], [-2.0, -2.0]]
    >>> both = torch.tensor([[0.5, -2.0], [4.0, 8.0]])
    >>> expand(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), both).tolist()
    [[0.5, -2.0], [8.0, 8.0]]
    """
    palettes = _checked(indices, palettes)
    parts = palettes.shape[0]
    if parts > 1 and (not -indices.dim() <= axis < indices.dim() or indices.shape[axis] % parts):
        raise WeightError(
            f"indices of shape {tuple(indices.shape)} cannot be cut along axis {axis} into {parts} parts"
        )
    return _expand(indices, palettes, axis % max(1, indices.dim()))


def indexed_linear(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` with ``W = expand(indices, palettes)``.

    On the CPU the result is bit-identical to ``F.linear``. On CUDA, with uint8 indices and up to 32 inputs
    (rows of x; 4 in float32), weights are looked up inside the kernel, W is never dense, and sums are in
    float32. Otherwise W is dense during the product. x, palettes and bias must have one type. An index beyond
    its palette gives zero on CUDA and an error on the CPU.

    >>> indices, palette = torch.tensor([[0, 1, 1]], dtype=torch.uint8), torch.tensor([0.5, 2.0])
    >>> indexed_linear(torch.tensor([2.0, 3.0, 4.0]), indices, palette, torch.tensor([1.0])).tolist()
    [16.0]
    """
    palettes = _checked(indices, palettes)
    if indices.dim() != 2 or x.dim() == 0 or x.shape[-1] != indices.shape[1]:
        raise WeightError(
            f"an input of shape {tuple(x.shape)} does not fit indices of shape {tuple(indices.shape)}: "
            "their last axes must have the same length"
        )
    if indices.shape[0] % palettes.shape[0]:
        raise WeightError(f"{indices.shape[0]} rows cannot be cut into {palettes.shape[0]} equal parts")
    for name, tensor in (("the input", x), ("the bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (palettes.dtype, palettes.device):
            raise WeightError(
                f"{name} is {tensor.dtype} on {tensor.device}, the palette {palettes.dtype} on "
                f"{palettes.device}: convert one of them with .to()"
            )
    if bias is not None and bias.shape != indices.shape[:1]:
        raise WeightError(f"the bias has shape {tuple(bias.shape)} for {indices.shape[0]} outputs")
    return _indexed_linear(x, indices, palettes, bias)


def _checked(indices: Tensor, palettes: Tensor) -> Tensor:
    """The palettes as rows. A kernel reads memory unchecked, so every argument is checked before it."""
    if indices.dtype not in _INDEX_TYPES:
        raise WeightError(f"indices are {indices.dtype}: uint8, int16 or int32 is needed")
    if palettes.dim() not in (1, 2) or palettes.numel() == 0 or not palettes.is_floating_point():
        raise WeightError(
            f"palettes are {palettes.dtype} of shape {tuple(palettes.shape)}: one or two axes of "
            "floating-point numbers are needed"
        )
    if indices.device != palettes.device:
        raise WeightError(f"indices are on {indices.device}, palettes on {palettes.device}: move one of them")
    return palettes if palettes.dim() == 2 else palettes.unsqueeze(0)
