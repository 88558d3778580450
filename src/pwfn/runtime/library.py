"""The operations on indices, as torch sees them.

``torch.ops.pwfn.expand``, ``indexed_linear`` and ``indexed_conv2d`` run the reference on every device, and
Triton kernels on CUDA where Triton is installed. Only the input gets a gradient: indices have none, and
palettes are fixed.

Where palettes have at most 16 values, two neighbours along axis 1 can share a byte (``reference.pack``). The
operations know packed indices by the length of that axis: it is half of what the input needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from pwfn.errors import WeightError
from pwfn.runtime import reference

MOST_INPUTS = 32
"""Largest number of inputs (rows of x) for a kernel; for more, a temporary dense weight is faster."""
FEW_INPUTS = 4
"""Up to this many inputs in any type; more need tensor cores, and therefore 16-bit numbers."""
MOST_PLACES = 1024
"""Largest number of places in the result of a convolution (batch times height times width) for a kernel."""
MOST_PACKED = 16
"""Largest palette whose indices can be packed."""

_INDEX_TYPES = (torch.uint8, torch.int16, torch.int32)
_LIBRARY = torch.library.Library("pwfn", "FRAGMENT")


def define(
    library: torch.library.Library, name: str, schema: str, reference: Callable[..., Any], kernels: str
) -> Any:  # torch has no public name for this class
    """Define ``torch.ops.pwfn.<name>`` and return it.

    ``reference`` runs on every device. Where Triton is installed, the function ``name`` of the module
    ``kernels`` runs on CUDA; that module, and Triton with it, is imported at the first call on a CUDA tensor.

    ``torch.library.custom_op`` is not used: its Python layers add about 0.1 ms to each call that writes in
    place, as long as the kernels themselves take.
    """

    def launch(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(kernels), name)(*args, **kwargs)

    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, reference, "CompositeExplicitAutograd")
    if find_spec("triton") is not None:  # does not import it
        library.impl(name, launch, "CUDA")
    return getattr(torch.ops.pwfn, name).default


def _define(function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """The operation of a reference; ``fake`` gives an empty result, for tracing."""
    name, schema = function.__name__, torch.library.infer_schema(function, mutates_args=())
    operation = define(_LIBRARY, name, schema, function, "pwfn.runtime.triton")
    torch.library.register_fake(f"pwfn::{name}", fake, lib=_LIBRARY)
    return operation


def _empty_output(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], indices.shape[0]))


def _empty_image(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    columns = reference.packed_columns(indices, x.shape[-3] // geometry[-1])
    return F.conv2d(x, reference.empty_weight(indices, palettes, 0, columns), bias, *geometry)


_expand = _define(reference.expand, reference.empty_weight)
_indexed_linear = _define(reference.indexed_linear, _empty_output)
_indexed_conv2d = _define(reference.indexed_conv2d, _empty_image)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices, palettes, _, *ctx.more = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(indices, palettes)


def _weight(ctx: Any, columns: int) -> Tensor:
    indices, palettes = ctx.saved_tensors
    made: Tensor = _expand(indices, palettes, 0, reference.packed_columns(indices, columns))
    return made


def _gradient_of_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """``g W`` for the input; the weight is dense during this product."""
    return grad @ _weight(ctx, ctx.shape[-1]), None, None, None


def _gradient_of_conv2d(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The transposed convolution of g with W, which is dense during it."""
    weight = _weight(ctx, ctx.shape[-3] // ctx.more[-1])
    return conv2d_input(ctx.shape, weight, grad, *ctx.more), *[None] * 7


for _name, _gradient in (("indexed_linear", _gradient_of_linear), ("indexed_conv2d", _gradient_of_conv2d)):
    torch.library.register_autograd(f"pwfn::{_name}", _gradient, setup_context=_remember, lib=_LIBRARY)


def index_dtype(count: int) -> torch.dtype:
    """The narrowest type for indices into ``count`` values.

    >>> index_dtype(256), index_dtype(257)
    (torch.uint8, torch.int16)
    """
    return next(dtype for dtype in _INDEX_TYPES if count - 1 <= torch.iinfo(dtype).max)


def expand(indices: Tensor, palettes: Tensor, axis: int = 0, columns: int | None = None) -> Tensor:
    """The dense tensor ``palette[indices]``, in the type of the palettes.

    ``palettes`` is one palette, or one row for each of the equal parts into which ``axis`` is cut. With
    ``columns`` the indices are packed, and axis 1 of the result has that length.

    >>> expand(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), torch.tensor([0.5, -2.0])).tolist()
    [[0.5, -2.0], [-2.0, -2.0]]
    >>> both = torch.tensor([[0.5, -2.0], [4.0, 8.0]])
    >>> expand(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), both).tolist()
    [[0.5, -2.0], [8.0, 8.0]]
    """
    palettes = _checked(indices, palettes)
    parts, shape = palettes.shape[0], list(indices.shape)
    if columns is not None:
        _check_packed(indices, palettes, columns)
        shape[1] = columns
    if parts > 1 and (not -len(shape) <= axis < len(shape) or shape[axis] % parts):
        raise WeightError(
            f"indices of shape {tuple(shape)} cannot be cut along axis {axis} into {parts} parts"
        )
    return _expand(indices, palettes, axis % max(1, len(shape)), columns)


def indexed_linear(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` with ``W = expand(indices, palettes)``.

    On the CPU the result is bit-identical to ``F.linear``. On CUDA, with uint8 indices and up to 32 inputs
    (rows of x; 4 in float32), weights are looked up inside the kernel, W is never dense, and sums are in
    float32. Otherwise W is dense during the product. x, palettes and bias must have one type. An index beyond
    its palette gives zero on CUDA and an error on the CPU. Packed indices are half as wide as x.

    >>> indices, palette = torch.tensor([[0, 1, 1]], dtype=torch.uint8), torch.tensor([0.5, 2.0])
    >>> indexed_linear(torch.tensor([2.0, 3.0, 4.0]), indices, palette, torch.tensor([1.0])).tolist()
    [16.0]
    """
    width = x.shape[-1] if x.dim() else None
    palettes = _checked_with_input(x, indices, palettes, bias, 2, width, "columns")
    return _indexed_linear(x, indices, palettes, bias)


def indexed_conv2d(
    x: Tensor,
    indices: Tensor,
    palettes: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """``F.conv2d`` with ``W = expand(indices, palettes)``.

    On the CPU the result is bit-identical. On CUDA W is never dense where image and indices are
    channels-last, x has 16 bits, there is one group and one palette, the channels are a multiple of 16 (32 if
    packed), and the result has at most 1,024 places (batch times height times width). Packed indices have
    half the channels of x. Types are as in :func:`indexed_linear`.

    >>> indices, palette = torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0.5])
    >>> indexed_conv2d(torch.ones(1, 1, 2, 2), indices, palette).tolist()
    [[[[2.0]]]]
    """
    width = x.shape[-3] // groups if x.dim() in (3, 4) and groups > 0 else None
    palettes = _checked_with_input(x, indices, palettes, bias, 4, width, "channels")
    return _indexed_conv2d(x, indices, palettes, bias, stride, padding, dilation, groups)


def _check_packed(indices: Tensor, palettes: Tensor, columns: int) -> None:
    if indices.dtype != torch.uint8 or indices.dim() < 2 or indices.shape[1] != (columns + 1) // 2:
        raise WeightError(
            f"indices are {indices.dtype} of shape {tuple(indices.shape)}: packed ones for {columns} columns "
            "are uint8, and half as many along axis 1"
        )
    if palettes.shape[1] > MOST_PACKED:
        raise WeightError(f"a palette of {palettes.shape[1]} values needs indices that are not packed")


def _checked_with_input(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, axes: int, width: int | None, what: str
) -> Tensor:
    """As :func:`_checked`, with input and bias; axis 1 of ``axes`` has ``width`` indices, or half of them."""
    palettes = _checked(indices, palettes)
    if indices.dim() != axes or width is None or indices.shape[1] not in (width, (width + 1) // 2):
        raise WeightError(
            f"an input of shape {tuple(x.shape)} does not fit indices of shape {tuple(indices.shape)}: "
            f"{axes} axes are needed, and as many {what} as the input has, or half of them if packed"
        )
    if indices.shape[1] != width:
        _check_packed(indices, palettes, width)
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
    return palettes


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
