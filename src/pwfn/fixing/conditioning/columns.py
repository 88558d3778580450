"""Fixing a weight is conditioning on it: the weights that are still free take up its rounding error.

A layer computes ``y = W x``. To second order an error of one row costs ``dw H dw^T`` with ``H = E[x x^T]``,
so the posterior of a row is ``N(w, s^2 H^-1)``. Given the values ``c_F`` of some weights F, the others R have

    mean        w_R - H_RR^-1 H_RF (c_F - w_F)
    covariance  s^2 H_RR^-1

:func:`fix_columns` fixes one column after the other, all rows alike, with one Cholesky factor.

Weights have the shape groups × rows × columns and moments groups × columns × columns: a depthwise
convolution has one group per channel, most layers have one group.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01
"""Added to the diagonal of the moments, as a fraction of its mean."""

_FEW_INPUTS = 0.1  # damping of a layer with as many inputs as columns

_BLOCK = 64  # columns whose errors are passed on together


def damped(moments: Tensor, damping: float = DAMPING) -> Tensor:
    """The moments in float64 with ``damping`` times the mean of the diagonal added to it.

    Inputs that are always zero, and moments of too few examples, then have an inverse: without any
    information about a weight, the others do not move for it.
    """
    moments = moments.double()
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    # A layer whose inputs are all zero: any positive number keeps its weights independent.
    added = torch.where(mean > 0, damping * mean, 1.0)
    return moments + torch.diag_embed(added.expand_as(diagonal))


def damping_for(inputs: int, columns: int) -> float:
    """The damping of moments from so many inputs: ``0.1 * columns / inputs``, but at least ``DAMPING``.

    The last layer of a classifier has one input per image, often fewer than columns. Its weights could take
    up each other's errors nearly perfectly on these images, and all the worse on others.

    >>> damping_for(32_000, 1000), damping_for(1000, 1000), damping_for(250, 1000)
    (0.01, 0.1, 0.4)
    """
    return max(DAMPING, _FEW_INPUTS * columns / max(inputs, 1))


def fix_columns(weight: Tensor, moments: Tensor, step: float, damping: float = DAMPING) -> Tensor:
    """Every weight at a multiple of ``step``, one column after the other.

    Column j goes to its nearest multiples. Then all later columns move to their conditional mean: with
    the upper Cholesky factor U of ``H^-1``, by ``-e_j U_jk / U_jj`` for an error ``e_j = w_j - c_j``.

    >>> w, h = torch.tensor([[[0.6, 0.6]]]), torch.tensor([[[1.0, 1.0], [1.0, 1.0]]])
    >>> fix_columns(w, h, 1.0)        # the inputs are equal: only the sum of the weights counts
    tensor([[[1., 0.]]])
    """
    free = weight.to(torch.float64, copy=True)  # changed in place below
    factor = inverse_factor(moments, damping)
    fixed = torch.empty_like(free)
    columns = free.shape[2]
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        errors = torch.empty_like(free[:, :, first:last])
        for j in range(first, last):
            fixed[:, :, j] = torch.round(free[:, :, j] / step) * step
            error = (free[:, :, j] - fixed[:, :, j]) / factor[:, None, j, j]
            errors[:, :, j - first] = error
            free[:, :, j + 1 : last] -= error[:, :, None] * factor[:, None, j, j + 1 : last]
        free[:, :, last:] -= errors @ factor[:, first:last, last:]
    return fixed.to(weight.dtype)


def inverse_factor(moments: Tensor, damping: float = DAMPING) -> Tensor:
    """The upper triangular U with ``U^T U = (H + damping)^-1``, in float64."""
    lower = torch.linalg.cholesky(damped(moments, damping))
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


def best_linear(weight: Tensor, cross: Tensor, moments: Tensor, damping: float = DAMPING) -> Tensor:
    """The weight whose output on the inputs ``x'`` is nearest to ``weight`` on the original inputs ``x``.

    ``W + W (C - H) H^-1`` with ``C = E[x x'^T]`` and ``H = E[x' x'^T]``: the least squares solution. Layers
    before this one are compressed already, so its inputs have changed; this takes up their errors.
    """
    change = weight.double() @ (cross.double() - moments.double())
    solved = torch.linalg.solve(damped(moments, damping), change.transpose(1, 2)).transpose(1, 2)
    return (weight.double() + solved).to(weight.dtype)
