"""Plain torch for weights stored as indices: every kernel is compared with these functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pwfn.errors import WeightError

_PIECE = 2**20  # indices widened at a time: torch needs int32 for a look-up, four bytes for each byte of ours


def pack(indices: Tensor) -> Tensor:
    """Two indices below 16 in one byte: neighbours along axis 1, the first in the lower half.

    The memory format is kept.

    >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8)).tolist()
    [[33, 3]]
    """
    if indices.dtype != torch.uint8 or indices.dim() < 2:
        raise WeightError(
            f"indices are {indices.dtype} with {indices.dim()} axes: packing needs uint8 and two axes"
        )
    first, second = indices[:, 0::2], indices[:, 1::2]
    packed = empty_in_order(indices, first.shape, indices.dtype).copy_(first)
    packed[:, : second.shape[1]] += second << 4
    return packed


def unpack(packed: Tensor, columns: int) -> Tensor:
    """The indices that :func:`pack` was given, ``columns`` of them along axis 1."""
    indices = empty_in_order(packed, (packed.shape[0], columns, *packed.shape[2:]), packed.dtype)
    indices[:, 0::2] = packed & 15
    indices[:, 1::2] = packed[:, : columns // 2] >> 4
    return indices


def empty_in_order(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor of another shape, with its axes in memory in the order of ``like``."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return torch.empty_permuted(tuple(shape), order, dtype=dtype, device=like.device)


def empty_weight(indices: Tensor, palettes: Tensor, axis: int, columns: int | None = None) -> Tensor:
    """What :func:`expand` gives, without its numbers."""
    if columns is None:
        return torch.empty_like(indices, dtype=palettes.dtype)
    return empty_in_order(indices, (indices.shape[0], columns, *indices.shape[2:]), palettes.dtype)


def expand(indices: Tensor, palettes: Tensor, axis: int, columns: int | None = None) -> Tensor:
    """``palettes[i * parts // length][index]``, i being the place along the axis and length its length.

    With ``columns`` the indices are packed, and axis 1 has that length.
    """
    parts, size = palettes.shape
    table = palettes.reshape(-1)
    source = indices if indices.dim() else indices.view(1)
    out = empty_weight(source, palettes, axis, columns)
    if parts > 1:
        length = out.shape[axis]
        place = torch.arange(length, device=indices.device)
        first = torch.div(place * parts, length, rounding_mode="floor").to(torch.int32) * size
        first = first.view([-1 if d == axis else 1 for d in range(out.dim())]).expand(out.shape)
    step = max(1, _PIECE * out.shape[0] // max(1, out.numel()))
    for start in range(0, out.shape[0], step):
        piece = slice(start, start + step)
        index = source[piece] if columns is None else unpack(source[piece], columns)
        index = index.to(torch.int32)
        out[piece] = table[index if parts == 1 else index + first[piece]]
    return out.view(indices.shape) if columns is None else out


def indexed_linear(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` with ``W[r, k] = palettes[r * parts // rows][indices[r, k]]``, packed if W is wider."""
    return F.linear(x, expand(indices, palettes, 0, packed_columns(indices, x.shape[-1])), bias)


def indexed_conv2d(
    x: Tensor,
    indices: Tensor,
    palettes: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """``F.conv2d`` with the same weight."""
    weight = expand(indices, palettes, 0, packed_columns(indices, x.shape[-3] // groups))
    return F.conv2d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def packed_columns(indices: Tensor, columns: int) -> int | None:
    """How long axis 1 is if indices are packed; None if they are not."""
    return None if indices.shape[1] == columns else columns
