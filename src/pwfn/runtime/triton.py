"""Launches the Triton kernels for the operations of ``library``: weights are looked up where they are used.

| variant | how | for |
|---|---|---|
| ``mma`` | tensor cores, palette in shared memory | up to 32 inputs of 16 bits, columns in sixteens |
| ``gemv-table`` | sums of products, palette in shared memory | up to 8 inputs of 16 bits, columns in eights |
| ``gemv-load`` | the same, palettes read through the L1 cache | up to 8 inputs |
| ``dot-load`` | tensor cores, palettes read through the L1 cache | up to 32 inputs of 16 bits |
| ``dense`` | the weight is looked up into a temporary tensor, then ``F.linear`` | everything |

A table holds one palette; with several, each for a part of the rows, palettes are read through the cache.
``indexed_linear`` chooses by shape, see :func:`choose`. None waits for the device, none but ``dense`` takes
memory besides the result, so all can be captured in a CUDA graph.

Against ``F.linear`` with bf16 weights on an H200, layers of 4096 to 14336 rows and columns take about two
thirds of the time for one input, three quarters for up to 8 and somewhat less than all of it for 16; for 32
they take up to an eighth longer, where the gain is memory, not time. The look-ups bound it: a multiprocessor
makes them hardly faster than the indices come from memory.
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

VARIANTS = ("mma", "gemv-table", "gemv-load", "dot-load", "dense")

_NARROW = (torch.bfloat16, torch.float16)
_COPIED = 256  # entries of the table
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # where there is no assembly


_MANY_ROWS = 8192  # from here on programs of 16 rows are more than the multiprocessors hold at once


class Mma(NamedTuple):
    """The shape of an ``mma`` program.

    ``split`` of the warps share the columns of ``16 * tiles`` rows, ``64 * steps * split`` at a time.
    """

    tiles: int
    warps: int
    split: int
    steps: int

    def fits(self, inputs: int) -> bool:
        """Whether the sums of so many inputs have room beside the table, in the first 48 KiB."""
        return self.warps * -(-inputs // 8) <= 16


class Gemv(NamedTuple):
    """The shape of a ``gemv-table`` program: ``warps * rows`` rows, ``32 * steps`` words at a time."""

    rows: int
    warps: int
    steps: int


MMA_SHAPES = (
    Mma(1, 16, 16, 1),
    Mma(1, 8, 8, 1),
    Mma(1, 8, 8, 2),
    Mma(1, 16, 8, 1),
    Mma(1, 16, 4, 1),
    Mma(1, 8, 4, 1),
    Mma(1, 8, 2, 1),
    Mma(1, 4, 4, 2),
    Mma(2, 4, 4, 1),
    Mma(2, 4, 2, 1),
    Mma(2, 2, 2, 2),
)
GEMV_SHAPES = (Gemv(8, 8, 2), Gemv(2, 8, 8), Gemv(2, 16, 4), Gemv(4, 16, 2), Gemv(4, 4, 4))
"""Shapes worth timing, see ``benchmarks/inference.py --tune``."""


def mma_shape(inputs: int, rows: int) -> Mma:
    """The shape that was fastest on an H200 (4096 and 14336 rows; 4096 and 14336 columns agree).

    >>> mma_shape(1, 4096)
    Mma(tiles=1, warps=16, split=16, steps=1)
    """
    many = rows >= _MANY_ROWS
    if inputs <= 8:
        return Mma(1, 8, 8, 1) if many else Mma(1, 16, 16, 1)
    if inputs <= 16:
        return Mma(2, 4, 4, 1) if many else Mma(1, 8, 8, 1)
    return Mma(2, 2, 2, 2) if many else Mma(1, 4, 4, 2)


def gemv_shape(inputs: int, rows: int) -> Gemv:
    """The shape that was fastest on an H200; each input's sums take registers.

    >>> gemv_shape(1, 14336)
    Gemv(rows=8, warps=8, steps=2)
    """
    if inputs > FEW_INPUTS:
        return Gemv(1, 16, 4)
    if rows >= _MANY_ROWS:
        return Gemv(8, 8, 2) if inputs <= 2 else Gemv(4, 16, 2)
    return Gemv(2, 8, 8) if inputs <= 2 else Gemv(2, 16, 4)


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
    if inputs > (2 * FEW_INPUTS if variant.startswith("gemv") else MOST_INPUTS):
        return False
    if variant == "gemv-load":
        return True
    if x.dtype not in _NARROW:
        return False
    if variant == "dot-load":
        return True
    # So many bytes are read at once: a slice of a larger tensor may begin between two such words.
    word = 16 if variant == "mma" else 8
    aligned = columns > 0 and columns % word == 0 and (x.data_ptr() | indices.data_ptr()) % word == 0
    return aligned and palettes.shape[0] == 1 and palettes.shape[1] <= _COPIED


def choose(x: Tensor, indices: Tensor, palettes: Tensor) -> str:
    """The variant for these tensors: of those that fit, the one that was fastest on an H200."""
    inputs = x.shape[0]
    wanted = ["mma", "gemv-table"]
    if inputs == 1 and indices.shape[0] >= _MANY_ROWS:
        wanted.reverse()
    wanted = wanted if inputs <= FEW_INPUTS else ["mma"]
    wanted.append("gemv-load" if inputs <= FEW_INPUTS else "dot-load")
    return next((variant for variant in wanted if fits(variant, x, indices, palettes)), "dense")


def indexed_linear(
    x: Tensor,
    indices: Tensor,
    palettes: Tensor,
    bias: Tensor | None,
    *,
    variant: str | None = None,
    shape: Mma | Gemv | None = None,
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
            _run_load(matrix, indices, palettes, bias, out, variant)
    return out.view(*x.shape[:-1], rows)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _run_mma(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, out: Tensor, shape: Any
) -> None:
    inputs, columns = x.shape
    rows = indices.shape[0]
    shape = Mma(*shape) if shape is not None else mma_shape(inputs, rows)
    if not shape.fits(inputs):
        raise WeightError(f"{shape} has no room for {inputs} inputs")
    kernels.mma[(-(-rows // (16 * shape.tiles * (shape.warps // shape.split))),)](
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
        SPLIT=shape.split,
        STEPS=shape.steps,
        EVEN=columns % (64 * shape.split * shape.steps) == 0,
        ONE=inputs == 1,
        BIAS=bias is not None,
        num_warps=shape.warps,
    )


def _run_gemv_table(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, out: Tensor, shape: Any
) -> None:
    inputs, columns = x.shape
    rows = indices.shape[0]
    shape = Gemv(*shape) if shape is not None else gemv_shape(inputs, rows)
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


def _run_load(
    x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None, out: Tensor, variant: str
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
    kernels.dot_load[(-(-rows // 32),)](
        *tensors,
        *sizes,
        BATCH=max(16, _power_of_two(inputs)),
        ROWS=32,
        COLUMNS=256,
        BIAS=bias is not None,
        num_warps=4,
        num_stages=4,
    )
