"""Launches the Triton kernels for the operations of ``library``: weights are looked up where they are used.

| variant | how | for |
|---|---|---|
| ``gemv-table`` | sums of products, palette in shared memory | up to 8 inputs of 16 bits, columns in eights |
| ``gemv-load`` | the same, palettes read through the L1 cache | up to 8 inputs |
| ``dot-table`` | tensor cores, palette in shared memory | up to 32 inputs of 16 bits, columns in sixteens |
| ``dot-load`` | the same, palettes read through the L1 cache | up to 32 inputs of 16 bits |
| ``dense`` | the weight is looked up into a temporary tensor, then ``F.linear`` | everything |

A table holds one palette; with several, each for a part of the rows, palettes are read through the cache.
``indexed_linear`` chooses by shape, see :func:`choose`. None waits for the device, none but ``dense`` takes
memory besides the result, so all can be captured in a CUDA graph.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pwfn.errors import WeightError
from pwfn.runtime import kernels
from pwfn.runtime.library import FEW_INPUTS, MOST_INPUTS

VARIANTS = ("mma", "gemv-table", "gemv-load", "dot-table", "dot-load", "dense")

_NARROW = (torch.bfloat16, torch.float16)
_COPIED = 256  # entries of the table
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # where there is no assembly


class Gemv(NamedTuple):
    """The shape of a ``gemv-table`` program: ``warps * rows`` rows, ``32 * steps`` words at a time."""

    rows: int
    warps: int
    steps: int


class Dot(NamedTuple):
    """The shape of a ``dot`` program: its rows, the columns at a time, warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


class Mma(NamedTuple):
    """The shape of an ``mma`` program: ``16 * tiles`` rows, ``64 * warps * steps`` columns at a time."""

    tiles: int
    warps: int
    steps: int


MMA_SHAPES = (
    Mma(1, 8, 2),
    Mma(1, 8, 1),
    Mma(1, 16, 1),
    Mma(1, 16, 2),
    Mma(2, 8, 1),
    Mma(2, 8, 2),
    Mma(2, 16, 1),
    Mma(4, 8, 1),
    Mma(1, 8, 4),
    Mma(1, 4, 4),
    Mma(2, 4, 2),
    Mma(2, 4, 1),
    Mma(4, 4, 1),
    Mma(1, 32, 1),
)
GEMV_SHAPES = (
    Gemv(2, 16, 4),
    Gemv(2, 16, 8),
    Gemv(4, 8, 4),
    Gemv(2, 8, 8),
    Gemv(4, 16, 2),
    Gemv(4, 16, 4),
    Gemv(1, 16, 8),
    Gemv(1, 32, 8),
    Gemv(4, 4, 4),
    Gemv(8, 8, 2),
    Gemv(2, 32, 4),
)
DOT_SHAPES = (Dot(32, 256, 4, 4), Dot(16, 256, 4, 5), Dot(32, 256, 8, 4), Dot(64, 128, 4, 5))
"""Shapes worth timing; the first of each is the default. See ``benchmarks/inference.py --tune``."""


def expand(indices: Tensor, palettes: Tensor, axis: int, start: int, length: int) -> Tensor:
    """See :func:`pwfn.runtime.reference.expand`; in the order in which the indices lie in memory."""
    order = sorted(range(indices.dim()), key=indices.stride, reverse=True)
    indices_as_they_lie = indices.permute(order)
    if not indices_as_they_lie.is_contiguous():  # a slice: in the plain order
        order = list(range(indices.dim()))
        indices_as_they_lie = indices.contiguous()
    out = torch.empty_like(indices_as_they_lie, dtype=palettes.dtype)
    inner, here = 1, 1
    if indices.dim():
        inner = indices_as_they_lie.stride(order.index(axis))
        here = indices.shape[axis]
    parts, size = palettes.shape
    block = 1024
    if out.numel():
        with torch.cuda.device_of(indices):
            kernels.expand[(-(-out.numel() // block),)](
                indices_as_they_lie,
                palettes.contiguous(),
                out,
                out.numel(),
                size,
                inner,
                here,
                start,
                max(1, length),
                parts,
                PARTS=parts > 1,
                BLOCK=block,
            )
    back = sorted(range(len(order)), key=order.__getitem__)
    return out.permute(back)


def fits(variant: str, x: Tensor, indices: Tensor, palettes: Tensor) -> bool:
    """Whether a variant can take these tensors, x being a matrix of one input a row."""
    inputs, columns = x.shape
    if variant == "dense":
        return True
    if indices.dtype != torch.uint8 or x.dtype == torch.float64:
        return False
    if variant == "mma" and _INTERPRETED:
        return False
    dot = variant.startswith("dot") or variant == "mma"
    if inputs > (MOST_INPUTS if dot else 2 * FEW_INPUTS):
        return False
    if variant == "gemv-load":
        return True
    if x.dtype not in _NARROW:
        return False
    if variant == "dot-load":
        return True
    # So many bytes are read at once: a slice of a larger tensor may begin between two such words.
    word = 16 if dot else 8
    aligned = columns % word == 0 and (x.data_ptr() | indices.data_ptr()) % word == 0
    return aligned and palettes.shape[0] == 1 and palettes.shape[1] <= _COPIED


def choose(x: Tensor, indices: Tensor, palettes: Tensor) -> str:
    """The variant for these tensors: sums of products for a few inputs, tensor cores for more."""
    if x.shape[0] > MOST_INPUTS:
        return "dense"
    kind = "gemv" if x.shape[0] <= FEW_INPUTS else "dot"
    wanted = f"{kind}-table", f"{kind}-load"
    return next((variant for variant in wanted if fits(variant, x, indices, palettes)), "dense")


def indexed_linear(
    x: Tensor,
    indices: Tensor,
    palettes: Tensor,
    bias: Tensor | None,
    *,
    variant: str | None = None,
    shape: Gemv | Dot | None = None,
) -> Tensor:
    """See :func:`pwfn.runtime.reference.indexed_linear`; a variant and its shape are chosen if not given."""
    matrix = x.reshape(-1, x.shape[-1]).contiguous()
    indices, palettes = indices.contiguous(), palettes.contiguous()
    rows, inputs = indices.shape[0], matrix.shape[0]
    if variant is None:
        variant = choose(matrix, indices, palettes)
    elif variant not in VARIANTS or not fits(variant, matrix, indices, palettes):
        raise WeightError(
            f"{variant} cannot take these tensors: allowed are {', '.join(VARIANTS)}, see fits()"
        )
    if variant == "dense" or inputs == 0 or rows == 0:
        return F.linear(x, expand(indices, palettes, 0, 0, rows), bias)
    out = matrix.new_empty((inputs, rows))
    with torch.cuda.device_of(x):
        if variant == "mma":
            _run_mma(matrix, indices, palettes, bias, out, shape)
        elif variant == "gemv-table":
            _run_gemv_table(matrix, indices, palettes, bias, out, shape)
        else:
            _run_tiled(matrix, indices, palettes, bias, out, variant, shape)
    return out.view(*x.shape[:-1], rows)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


FEW = False


def _run_mma(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, out: Tensor, shape: Any
) -> None:
    inputs, columns = x.shape
    rows = indices.shape[0]
    depth, limit = 1, None
    if shape is not None and len(shape) > 3:
        depth, limit = shape[3], shape[4]
    shape = Mma(*shape[:3]) if shape is not None else MMA_SHAPES[0]
    kernels.mma[(-(-rows // (16 * shape.tiles)),)](
        x,
        indices,
        palettes,
        bias,
        out,
        inputs,
        rows,
        columns,
        palettes.shape[1],
        GROUPS=_power_of_two(-(-inputs // 8)),
        TILES=shape.tiles,
        WARPS=shape.warps,
        STEPS=shape.steps,
        EVEN=columns % (64 * shape.warps * shape.steps) == 0,
        DEPTH=depth,
        FEW=FEW,
        ONE=inputs == 1,
        BIAS=bias is not None,
        num_warps=shape.warps,
        **({"maxnreg": limit} if limit else {}),
    )


def _run_gemv_table(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, out: Tensor, shape: Any
) -> None:
    inputs, columns = x.shape
    rows = indices.shape[0]
    shape = Gemv(*shape) if shape is not None else gemv_shape(inputs, rows, columns)
    kernels.gemv_table[(-(-rows // (shape.rows * shape.warps)),)](
        x,
        indices,
        palettes,
        bias,
        out,
        inputs,
        rows,
        columns // 4,
        palettes.shape[1],
        BATCH=_power_of_two(inputs),
        ROWS=shape.rows,
        WARPS=shape.warps,
        STEPS=shape.steps,
        BIAS=bias is not None,
        TABLE=not _INTERPRETED,
        num_warps=shape.warps,
    )


def gemv_shape(inputs: int, rows: int, columns: int) -> Gemv:
    """A shape that keeps every multiprocessor reading: 32 rows to a program, fewer where rows are few.

    >>> gemv_shape(1, 4096, 4096)
    Gemv(rows=2, warps=16, steps=4)
    """
    if inputs > 2:  # the sums of each input take registers
        return Gemv(1, 16, 4) if rows < 8192 else Gemv(2, 16, 2)
    if rows < 2048:
        return Gemv(1, 8, 8)
    return GEMV_SHAPES[0]


def _run_tiled(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, out: Tensor, variant: str, shape: Any
) -> None:
    inputs, columns = x.shape
    rows = indices.shape[0]
    sizes = inputs, rows, columns, palettes.shape[1], rows // palettes.shape[0]
    tensors = x, indices, palettes, bias, out
    if variant == "gemv-load":
        block = 4 if inputs <= 4 else 2
        kernels.gemv_load[(-(-rows // block),)](
            *tensors, *sizes, BATCH=_power_of_two(inputs), ROWS=block, COLUMNS=512, BIAS=bias is not None
        )
        return
    shape = Dot(*shape) if shape is not None else DOT_SHAPES[0]
    kernels.dot[(-(-rows // shape.rows),)](
        *tensors,
        *sizes,
        BATCH=max(16, _power_of_two(inputs)),
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        BIAS=bias is not None,
        TABLE=variant == "dot-table" and not _INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
