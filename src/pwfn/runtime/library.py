"""The two operations of running from indices as torch sees them: plain torch, kernels over it for CUDA.

``torch.ops.pwfn.expand`` and ``torch.ops.pwfn.indexed_linear`` run the reference on every device. Where
Triton is installed, its kernels are registered over it for CUDA; Triton itself is imported with the first
call on a CUDA tensor. A gradient goes to the input alone: indices have none, and a palette is fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pwfn.dispatch import define
from pwfn.errors import WeightError
from pwfn.runtime import reference

SCHEMAS: dict[str, str] = {
    "expand": "(Tensor indices, Tensor palettes, int axis, int start, int length) -> Tensor",
    "indexed_linear": "(Tensor x, Tensor indices, Tensor palettes, Tensor? bias) -> Tensor",
}

MOST_INPUTS = 32
"""A kernel looks up for so many inputs (rows of x) at once; beyond, a dense temporary is the cheaper way."""
FEW_INPUTS = 4
"""Up to here in any type; beyond it takes tensor cores, and 16-bit numbers only."""

_LIBRARY = torch.library.Library("pwfn", "FRAGMENT")

_INDEX_TYPES = (torch.uint8, torch.int16, torch.int32)


def _define(name: str) -> Any:
    return define(_LIBRARY, name, SCHEMAS[name], getattr(reference, name), "pwfn.runtime.triton")


_expand = _define("expand")
_indexed_linear = _define("indexed_linear")


def _empty_weight(indices: Tensor, palettes: Tensor, axis: int, start: int, length: int) -> Tensor:
    return torch.empty_like(indices, dtype=palettes.dtype)


def _empty_output(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], indices.shape[0]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, palettes, _ = inputs
    ctx.save_for_backward(indices, palettes)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """``g W`` to the input; the weight is dense for as long as that takes."""
    indices, palettes = ctx.saved_tensors
    return grad @ _expand(indices, palettes, 0, 0, indices.shape[0]), None, None, None


torch.library.register_fake("pwfn::expand", _empty_weight, lib=_LIBRARY)
torch.library.register_fake("pwfn::indexed_linear", _empty_output, lib=_LIBRARY)
torch.library.register_autograd("pwfn::indexed_linear", _gradients, setup_context=_remember, lib=_LIBRARY)


def expand(indices: Tensor, palettes: Tensor, axis: int = 0, start: int = 0, length: int = 0) -> Tensor:
    """The dense tensor that indices and palettes stand for, in the palettes' type.

    ``palettes`` is one palette, or a row for each of the equal parts into which ``axis`` is cut. If the
    indices are only a slice of a longer tensor along it, say where it starts and how long that one is.

    >>> expand(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), torch.tensor([0.5, -2.0])).tolist()
    [[0.5, -2.0], [-2.0, -2.0]]
    >>> both = torch.tensor([[0.5, -2.0], [4.0, 8.0]])
    >>> expand(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), both).tolist()
    [[0.5, -2.0], [8.0, 8.0]]
    """
    palettes = _checked(indices, palettes)
    parts = palettes.shape[0]
    if parts > 1:
        here = indices.shape[axis] if -indices.dim() <= axis < indices.dim() else 0
        length = length or here
        if here == 0 or length % parts or start < 0 or start + here > length:
            raise WeightError(
                f"indices of shape {tuple(indices.shape)} cannot be places {start} to {start + here} of "
                f"{length} along axis {axis} in {parts} equal parts"
            )
    return _expand(indices, palettes, axis % max(1, indices.dim()), start, length)


def indexed_linear(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` where W is looked up: one palette, or a row of palettes for each equal part of W's rows.

    Equal to ``F.linear(x, expand(indices, palettes), bias)``: on the CPU bit for bit. On CUDA, with uint8
    indices and up to 32 inputs (rows of x; 4 in float32), the weight is looked up inside the kernel and
    never dense; sums are in float32. Otherwise W is dense for as long as the product takes. x, palettes
    and bias are of one type. An index beyond its palette reads zero on CUDA and is an error on the CPU.

    >>> indices, palette = torch.tensor([[0, 1, 1]], dtype=torch.uint8), torch.tensor([0.5, 2.0])
    >>> indexed_linear(torch.tensor([2.0, 3.0, 4.0]), indices, palette, torch.tensor([1.0])).tolist()
    [16.0]
    """
    palettes = _checked(indices, palettes)
    if indices.dim() != 2 or x.dim() == 0 or x.shape[-1] != indices.shape[1]:
        raise WeightError(
            f"an input of shape {tuple(x.shape)} does not fit indices of shape {tuple(indices.shape)}: "
            "its last axis must be as long as theirs"
        )
    if indices.shape[0] % palettes.shape[0]:
        raise WeightError(f"{indices.shape[0]} rows cannot be cut into {palettes.shape[0]} equal parts")
    for name, tensor in (("the input", x), ("the bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (palettes.dtype, palettes.device):
            raise WeightError(
                f"{name} is {tensor.dtype} on {tensor.device}, the palette {palettes.dtype} on "
                f"{palettes.device}: bring both to one type and device with .to()"
            )
    if bias is not None and bias.shape != indices.shape[:1]:
        raise WeightError(f"the bias has shape {tuple(bias.shape)} for {indices.shape[0]} outputs")
    return _indexed_linear(x, indices, palettes, bias)


def _checked(indices: Tensor, palettes: Tensor) -> Tensor:
    """The palettes as rows; a kernel reads memory as it is told to, so that nothing else may reach it."""
    if indices.dtype not in _INDEX_TYPES:
        raise WeightError(f"indices are {indices.dtype}: needed is uint8, int16 or int32")
    if palettes.dim() not in (1, 2) or palettes.numel() == 0 or not palettes.is_floating_point():
        raise WeightError(
            f"palettes are {palettes.dtype} of shape {tuple(palettes.shape)}: needed is a vector, or rows, "
            "of floating-point numbers"
        )
    if indices.device != palettes.device:
        raise WeightError(f"indices lie on {indices.device}, palettes on {palettes.device}: move one of them")
    return palettes if palettes.dim() == 2 else palettes.unsqueeze(0)
