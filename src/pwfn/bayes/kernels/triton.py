"""Launches the kernels of ``kernels``: one function for each operation of ``library``, with its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pwfn.bayes.kernels import kernels
from pwfn.bayes.kernels.reference import BLOCK, SIGMA_FLOOR, wide


def draw(
    free_mu: Tensor,
    free_sigma: Tensor,
    fixed: Tensor,
    fixed_mu: Tensor,
    fixed_sigma: Tensor,
    seed: int,
    step: int,
    noise_on_fixed: bool,
    dtype: torch.dtype,
    *,
    block: int = BLOCK,
) -> Tensor:
    """See :func:`pwfn.bayes.kernels.reference.draw`; equal in distribution to it, not in bits."""
    out = torch.empty_like(free_mu, dtype=dtype)
    draw_(out, free_mu, free_sigma, fixed, fixed_mu, fixed_sigma, seed, step, noise_on_fixed, block=block)
    return out


def draw_(
    out: Tensor,
    free_mu: Tensor,
    free_sigma: Tensor,
    fixed: Tensor,
    fixed_mu: Tensor,
    fixed_sigma: Tensor,
    seed: int,
    step: int,
    noise_on_fixed: bool,
    *,
    block: int = BLOCK,
) -> None:
    """See :func:`pwfn.bayes.kernels.reference.draw_`."""
    vectors = free_mu, free_sigma, fixed, fixed_mu, fixed_sigma, out
    numbers = free_mu.numel(), SIGMA_FLOOR, seed, step
    _launch(kernels.draw, vectors, numbers, block, WIDE=free_mu.dtype, NOISE_ON_FIXED=noise_on_fixed)
    increment_version(out)


def draw_backward(
    grad_w: Tensor, fixed: Tensor, seed: int, step: int, *, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """See :func:`pwfn.bayes.kernels.reference.draw_backward`."""
    grad_w = grad_w.contiguous()  # the gradient of a sum is one number seen many times
    grad_mu = torch.empty_like(grad_w, dtype=wide(grad_w.dtype))
    grad_sigma = torch.empty_like(grad_mu)
    vectors = grad_w, fixed, grad_mu, grad_sigma
    _launch(kernels.draw_backward, vectors, (grad_w.numel(), seed, step), block, WIDE=grad_w.dtype)
    return grad_mu, grad_sigma


def grad_squared_norm(grad_w: Tensor, fixed: Tensor, seed: int, step: int, *, block: int = BLOCK) -> Tensor:
    """See :func:`pwfn.bayes.kernels.reference.grad_squared_norm`.

    Each program sums its block into a place of its own, in float32 for a narrow gradient; then the
    places are summed in float64. There are no atomics: the same input gives the same bits.
    """
    grad_w = grad_w.contiguous()
    partial = torch.empty(-(-grad_w.numel() // block), dtype=torch.float64, device=grad_w.device)
    numbers = grad_w.numel(), seed, step
    _launch(kernels.grad_squared_norm, (grad_w, fixed, partial), numbers, block, WIDE=grad_w.dtype)
    return partial.sum()


def sgd_(
    free_mu: Tensor,
    free_sigma: Tensor,
    momentum_mu: Tensor,
    momentum_sigma: Tensor,
    grad_w: Tensor,
    fixed: Tensor,
    offsets: Tensor,
    scale: Tensor,
    lr: float,
    sigma_lr: float,
    momentum: float,
    weight_decay: float,
    alpha: float,
    cap: float,
    seed: int,
    step: int,
    *,
    block: int = BLOCK,
) -> None:
    """See :func:`pwfn.bayes.kernels.reference.sgd_`; the offsets are of the same block."""
    written = free_mu, free_sigma, momentum_mu, momentum_sigma
    vectors = *written, grad_w.contiguous(), fixed, offsets, scale
    sizes = free_mu.numel(), momentum_mu.numel()
    rates = lr, sigma_lr, momentum, weight_decay, alpha, cap, SIGMA_FLOOR
    _launch(kernels.sgd, vectors, (*sizes, *rates, seed, step), block, WIDE=free_mu.dtype)
    increment_version(written)


def adamw_(
    free_mu: Tensor,
    free_sigma: Tensor,
    mean_mu: Tensor,
    mean_sigma: Tensor,
    square_mu: Tensor,
    square_sigma: Tensor,
    grad_w: Tensor,
    fixed: Tensor,
    offsets: Tensor,
    scale: Tensor,
    lr: float,
    sigma_lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    alpha: float,
    cap: float,
    count: int,
    seed: int,
    step: int,
    *,
    block: int = BLOCK,
) -> None:
    """See :func:`pwfn.bayes.kernels.reference.adamw_`; the offsets are of the same block."""
    written = free_mu, free_sigma, mean_mu, mean_sigma, square_mu, square_sigma
    vectors = *written, grad_w.contiguous(), fixed, offsets, scale
    sizes = free_mu.numel(), mean_mu.numel()
    mean_bias, root_bias = 1 - beta1**count, (1 - beta2**count) ** 0.5
    rates = lr / mean_bias, sigma_lr / mean_bias, root_bias, 1 - beta1, 1 - beta2, epsilon, lr * weight_decay
    numbers = *sizes, *rates, alpha, cap, SIGMA_FLOOR, seed, step
    _launch(kernels.adamw, vectors, numbers, block, WIDE=free_mu.dtype)
    increment_version(written)


def _launch(
    kernel: Any,
    vectors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    block: int,
    *,
    WIDE: torch.dtype,  # noqa: N803 - the constants' names in the kernels
    **constants: Any,
) -> None:
    """Run a kernel over all weights, whose number is the first, on the first vector's device.

    A program has a block of them, a power of two from 4 on.
    """
    n = numbers[0]
    if n == 0:
        return
    width = kernels.wide_type(double=wide(WIDE) == torch.float64)
    with torch.cuda.device_of(vectors[0]):
        kernel[(-(-n // block),)](
            *vectors, *numbers, WIDE=width, BLOCK=block, enable_fp_fusion=False, **constants
        )
