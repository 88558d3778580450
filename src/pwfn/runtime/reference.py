"""Plain torch for weights stored as indices: every kernel is compared with these functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE = 2**20  # indices widened at a time: torch needs int32 for a look-up, four bytes for each byte of ours


def expand(indices: Tensor, palettes: Tensor, axis: int) -> Tensor:
    """``palettes[i * parts // length][index]``, i being the place along the axis and length its length."""
    out = torch.empty_like(indices, dtype=palettes.dtype)
    parts, size = palettes.shape
    table = palettes.reshape(-1)
    source, target = (tensor if tensor.dim() else tensor.view(1) for tensor in (indices, out))
    if parts > 1:
        length = source.shape[axis]
        place = torch.arange(length, device=indices.device)
        first = torch.div(place * parts, length, rounding_mode="floor").to(torch.int32) * size
        first = first.view([-1 if d == axis else 1 for d in range(source.dim())]).expand(source.shape)
    step = max(1, _PIECE * source.shape[0] // max(1, source.numel()))
    for start in range(0, source.shape[0], step):
        piece = slice(start, start + step)
        index = source[piece].to(torch.int32)
        target[piece] = table[index if parts == 1 else index + first[piece]]
    return out


def indexed_linear(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` with ``W[r, k] = palettes[r * parts // rows][indices[r, k]]``."""
    return F.linear(x, expand(indices, palettes, 0), bias)
