"""Plain torch for weights kept as indices: the truth that every kernel is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE = 2**20
"""Indices widened at a time: torch looks up by 32-bit integers, four bytes for each byte of ours."""


def expand(indices: Tensor, palettes: Tensor, axis: int, start: int, length: int) -> Tensor:
    """``palettes[(start + i) * parts // length][index]``, i being the index's place along the axis."""
    out = torch.empty_like(indices, dtype=palettes.dtype)
    parts, size = palettes.shape
    table = palettes.reshape(-1)
    whole = indices if indices.dim() else indices.view(1)
    room = out if out.dim() else out.view(1)
    step = max(1, _PIECE * whole.shape[0] // max(1, whole.numel()))
    for first in range(0, whole.shape[0], step):
        flat = whole[first : first + step].to(torch.int32)
        if parts > 1:
            # Along axis 0 this slice begins later than the indices do.
            origin = start + (first if axis == 0 else 0)
            place = torch.arange(origin, origin + flat.shape[axis], device=indices.device)
            part = torch.div(place * parts, length, rounding_mode="floor").to(torch.int32)
            flat = flat + (part * size).view([-1 if d == axis else 1 for d in range(flat.dim())])
        room[first : first + step] = table[flat]
    return out


def indexed_linear(x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` with ``W[r, k] = palettes[r * parts // rows][indices[r, k]]``."""
    return F.linear(x, expand(indices, palettes, 0, 0, indices.shape[0]), bias)
