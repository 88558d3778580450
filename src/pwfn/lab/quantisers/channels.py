"""A tensor cut into channels along an axis, or taken as one: the rows, the broadcast, the count."""

from __future__ import annotations

from torch import Tensor

from pwfn.errors import WeightError


def by_channel(x: Tensor, axis: int | None) -> Tensor:
    """``x`` as a matrix with one row per channel along ``axis``, or a single row without one.

    >>> import torch
    >>> by_channel(torch.arange(6).view(2, 3), axis=1).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    if x.numel() == 0:
        raise WeightError(f"a tensor of shape {tuple(x.shape)} is empty: there is nothing to quantise")
    if axis is None:
        return x.reshape(1, -1)
    if not -x.dim() <= axis < x.dim():
        raise WeightError(f"axis is {axis} for a tensor of {x.dim()} dimensions: allowed are its own")
    return x.movedim(axis, 0).reshape(x.shape[axis], -1)


def along(vector: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """One number per channel, shaped to broadcast against ``x`` along ``axis``.

    >>> import torch
    >>> along(torch.ones(3), torch.zeros(2, 3, 5), axis=1).shape
    torch.Size([1, 3, 1])
    """
    if axis is None:
        return vector
    shape = [1] * x.dim()
    shape[axis] = x.shape[axis]
    return vector.reshape(shape)


def shared_count(x: Tensor, axis: int | None, batched: bool) -> int:
    """How many of the elements of ``x`` share one step; of one sample's elements if ``batched``.

    >>> import torch
    >>> x = torch.zeros(4, 3, 5)
    >>> shared_count(x, None, False), shared_count(x, 1, False), shared_count(x, 1, True)
    (60, 20, 5)
    """
    parts = (1 if axis is None else x.shape[axis]) * (x.shape[0] if batched else 1)
    return max(x.numel() // max(parts, 1), 1)
