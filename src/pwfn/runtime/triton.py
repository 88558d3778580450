"""Launches the Triton kernels of the operations.

| variant | how | for |
|---|---|---|
| ``mma`` | tensor cores, palette in shared memory | up to 32 inputs of 16 bits, rows in words of 16 bytes |
| ``gemv-table`` | sums of products, palette in shared memory | up to 8 inputs of 16 bits, columns in eights |
| ``gemv-load`` | sums of products, palettes read through the L1 cache | up to 8 inputs |
| ``dot-load`` | tensor cores, palettes read through the L1 cache | up to 32 inputs of 16 bits |
| ``dense`` | the weight is looked up into a temporary tensor, then ``F.linear`` | everything |

Shared memory holds one palette; several palettes, each for a part of the rows, are read through the cache.
:func:`choose` picks a variant by shape. No variant synchronises with the device, and only ``dense`` allocates
more than the result, so all can be captured in a CUDA graph. All but ``gemv-table`` take packed indices.
Convolutions use ``mma`` with the places of their result as inputs, or ``dense``.

Compared with ``F.linear`` and bf16 weights on an H200, layers of 4096 to 14336 rows and columns take about
2/3 of the time for one input, 3/4 for up to 8 and slightly less than all of it for 16. For 32 inputs they
take up to 1/8 longer: there the gain is memory. The look-ups are the bottleneck: a multiprocessor is hardly
faster at them than memory delivers the indices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pwfn.errors import WeightError
from pwfn.runtime import kernels
from pwfn.runtime.library import FEW_INPUTS, MOST_INPUTS, MOST_PACKED, MOST_PLACES
from pwfn.runtime.reference import empty_in_order, packed_columns

VARIANTS = ("mma", "gemv-table", "gemv-load", "dot-load", "dense")

_NARROW = (torch.bfloat16, torch.float16)
_TABLE_ENTRIES = 256
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has no inline assembly
_MANY_ROWS = 8192  # from here on, programs of 16 rows are more than the multiprocessors hold at once


class Mma(NamedTuple):
    """Shape of an ``mma`` program.

    ``split`` of the warps share the columns of ``16 * tiles`` rows, ``64 * steps * split`` bytes of indices
    at a time. ``depth`` such steps are prefetched, and one of x if ``x_ahead`` and there are at most 8
    inputs. ``groups`` of 8 inputs are in a program; with 0, all inputs are. With ``early`` a kernel is set up
    while the previous one ends (programmatic dependent launch); it still waits for all of its results.
    """

    tiles: int
    warps: int
    split: int
    steps: int
    depth: int = 1
    x_ahead: int = 1
    early: int = 0
    groups: int = 0

    def fits(self, inputs: int) -> bool:
        """Whether the sums of that many inputs fit beside the table, in the first 48 KiB."""
        groups = self.groups or -(-inputs // 8)
        return self.warps * groups <= (32 if inputs == 1 else 16)


class Gemv(NamedTuple):
    """Shape of a ``gemv-table`` program: ``warps * rows`` rows, ``32 * steps`` words at a time."""

    rows: int
    warps: int
    steps: int


def mma_shape(inputs: int, rows: int, packed: bool = False) -> Mma:
    """The fastest shape on an H200 (4096 and 14336 rows; 4096 and 14336 columns agree)."""
    many = rows >= _MANY_ROWS
    if inputs <= 8:
        if packed:
            return Mma(1, 8, 8, 1, 2, 0) if many else Mma(2, 16, 16, 1, 1, 0)
        return Mma(1, 8, 8, 1) if many else Mma(1, 16, 16, 1)
    if inputs <= 16:
        return Mma(2, 4, 4, 1) if many else Mma(1, 8, 8, 1)
    return Mma(2, 2, 2, 2) if many else Mma(1, 4, 4, 2)


def conv2d_shape(places: int, rows: int) -> Mma:
    """A shape for a convolution: as few groups of 8 places in a program as keep the programs few."""
    groups = next((g for g in (1, 2) if -(-rows // 16) * -(-places // (8 * g)) <= 160), 4)
    return Mma(1, 16 // groups, 16 // groups, 1, groups=groups)


def gemv_shape(inputs: int, rows: int) -> Gemv:
    """The fastest shape on an H200; the sums of each input take registers."""
    if inputs > FEW_INPUTS:
        return Gemv(1, 16, 4)
    if rows >= _MANY_ROWS:
        return Gemv(8, 8, 2) if inputs <= 2 else Gemv(4, 16, 2)
    return Gemv(2, 8, 8) if inputs <= 2 else Gemv(2, 16, 4)


def expand(indices: Tensor, palettes: Tensor, axis: int, columns: int | None = None) -> Tensor:
    """See :func:`pwfn.runtime.reference.expand`; works in the memory order of the indices."""
    order = sorted(range(indices.dim()), key=indices.stride, reverse=True)
    in_order = indices.permute(order)
    if not in_order.is_contiguous():  # a slice: use the plain order
        order = list(range(indices.dim()))
        indices = in_order = indices.contiguous()
    shape = list(indices.shape)
    if columns is not None:
        shape[1] = columns
    out = empty_in_order(indices, shape, palettes.dtype).permute(order)
    inner, length = (out.stride(order.index(axis)), shape[axis]) if order else (1, 1)
    inner_columns = 1 if columns is None else out.stride(order.index(1))
    parts, size = palettes.shape
    block = 1024
    if out.numel():
        with torch.cuda.device_of(indices):
            kernels.expand[(-(-out.numel() // block),)](
                *(in_order, palettes.contiguous(), out, out.numel(), size, inner, length, parts),
                *(inner_columns, columns or 1),
                PARTS=parts > 1,
                PACKED=columns is not None,
                EVEN=(columns or 0) % 2 == 0,
                WIDE=out.numel() + block >= 2**31,
                BLOCK=block,
            )
    return out.permute(sorted(range(len(order)), key=order.__getitem__))


def fits(variant: str, x: Tensor, indices: Tensor, palettes: Tensor) -> bool:
    """Whether a variant can take these tensors, x being a matrix with one input per row."""
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
    # This many bytes are read at once: a slice of a larger tensor may begin between two such words.
    word = 16 if variant == "mma" else 8
    packed = indices.shape[1] != columns
    if columns == 0 or columns % (2 * word if packed else word) or (packed and variant == "gemv-table"):
        return False
    return (x.data_ptr() | indices.data_ptr()) % word == 0 and _one_table(palettes, packed)


def _one_table(palettes: Tensor, packed: bool) -> bool:
    return palettes.shape[0] == 1 and palettes.shape[1] <= (MOST_PACKED if packed else _TABLE_ENTRIES)


def fits_conv2d(x: Tensor, indices: Tensor, palettes: Tensor, places: int, groups: int) -> bool:
    """Whether ``mma`` can take a convolution whose result has that many places."""
    last = torch.channels_last
    if x.dim() != 4 or groups != 1 or indices.dtype != torch.uint8 or x.dtype not in _NARROW:
        return False
    packed = indices.shape[1] != x.shape[1]
    if x.shape[1] == 0 or x.shape[1] % (32 if packed else 16) or not 0 < places <= MOST_PLACES:
        return False
    in_order = x.is_contiguous(memory_format=last) and indices.is_contiguous(memory_format=last)
    aligned = (x.data_ptr() | indices.data_ptr()) % 16 == 0
    return in_order and aligned and _one_table(palettes, packed) and x.numel() < 2**31


def choose(x: Tensor, indices: Tensor, palettes: Tensor) -> str:
    """The variant that was fastest on an H200, of those that can take these tensors."""
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
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """See :func:`pwfn.runtime.reference.indexed_linear`; chooses a variant and its shape if not given."""
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
        return F.linear(x, expand(indices, palettes, 0, packed_columns(indices, x.shape[-1])), bias)
    out = matrix.new_empty((inputs, rows))
    with torch.cuda.device_of(x):
        _launch(variant, shape, matrix, indices, palettes, bias, out)
    return out.view(*x.shape[:-1], rows)


def indexed_conv2d(
    x: Tensor,
    indices: Tensor,
    palettes: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """See :func:`pwfn.runtime.reference.indexed_conv2d`; ``mma`` where it fits, else a dense weight."""
    rows, kernel = indices.shape[0], indices.shape[2:]
    height, width = (
        (x.shape[i - 2] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    )
    places = x.shape[0] * height * width
    if not (height > 0 and width > 0 and fits_conv2d(x, indices, palettes, places, groups)):
        weight = expand(indices, palettes, 0, packed_columns(indices, x.shape[-3] // groups))
        return F.conv2d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)
    out = x.new_empty((x.shape[0], height, width, rows))
    mma = Mma(*shape) if shape is not None else conv2d_shape(places, rows)
    channels = x.shape[1]
    geometry = (*x.shape[2:], width, height * width, *padding, *stride, *dilation)
    with torch.cuda.device_of(x):
        _launch_mma(
            mma,
            (x, indices, palettes.contiguous(), bias, out),
            (places, channels * kernel.numel()),
            geometry,
            (channels, kernel[1]),
        )
    return out.permute(0, 3, 1, 2)


def _launch_mma(
    mma: Mma,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    size: tuple[int, int],
    geometry: Sequence[int] = (0,) * 10,
    kernel: tuple[int, int] = (0, 0),
) -> None:
    """``geometry`` and ``kernel`` (channels and width) are those of a convolution."""
    _, indices, palettes, bias, _ = tensors
    (inputs, columns), rows = size, indices.shape[0]
    if not mma.fits(inputs):
        raise WeightError(f"{mma} has no room for {inputs} inputs")
    packed = indices[0].numel() != columns
    groups = mma.groups or _power_of_two(-(-inputs // 8))
    kernels.mma[(-(-rows // (16 * mma.tiles * (mma.warps // mma.split))), -(-inputs // (8 * groups)))](
        *(*tensors, inputs, rows, columns, palettes.shape[1], *geometry),
        GROUPS=groups,
        TILES=mma.tiles,
        WARPS=mma.warps,
        SPLIT=mma.split,
        STEPS=mma.steps,
        DEPTH=mma.depth,
        X_AHEAD=bool(mma.x_ahead) and groups == 1,
        EARLY=bool(mma.early),
        PACKED=packed,
        CHANNELS=kernel[0],
        KERNEL_WIDTH=kernel[1],
        EVEN=kernel[0] == 0 and columns % ((128 if packed else 64) * mma.split * mma.steps) == 0,
        ONE=inputs == 1,
        BIAS=bias is not None,
        num_warps=mma.warps,
        **({} if _INTERPRETED else {"launch_pdl": bool(mma.early)}),
    )


def _launch(
    variant: str,
    shape: tuple[int, ...] | None,
    x: Tensor,
    indices: Tensor,
    palettes: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    (inputs, columns), rows, (parts, size) = x.shape, indices.shape[0], palettes.shape
    tensors, biased, packed = (x, indices, palettes, bias, out), bias is not None, indices.shape[1] != columns
    if variant == "mma":
        mma = Mma(*shape) if shape is not None else mma_shape(inputs, rows, packed)
        _launch_mma(mma, tensors, (inputs, columns))
    elif variant == "gemv-table":
        gemv = Gemv(*shape) if shape is not None else gemv_shape(inputs, rows)
        kernels.gemv_table[(-(-rows // (gemv.rows * gemv.warps)),)](
            *(*tensors, inputs, rows, columns // 4, size),
            BATCH=_power_of_two(inputs),
            ROWS=gemv.rows,
            WARPS=gemv.warps,
            STEPS=gemv.steps,
            BIAS=biased,
            TABLE=not _INTERPRETED,
            num_warps=gemv.warps,
        )
    elif variant == "gemv-load":
        block = 4 if inputs <= 4 else 2
        kernels.gemv_load[(-(-rows // block),)](
            *(*tensors, inputs, rows, columns, size, rows // parts),
            BATCH=_power_of_two(inputs),
            ROWS=block,
            COLUMNS=512,
            BIAS=biased,
            PACKED=packed,
        )
    else:
        kernels.dot_load[(-(-rows // 32),)](
            *(*tensors, inputs, rows, columns, size, rows // parts),
            BATCH=max(16, _power_of_two(inputs)),
            ROWS=32,
            COLUMNS=256,
            BIAS=biased,
            PACKED=packed,
            num_warps=4,
            num_stages=4,
        )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
