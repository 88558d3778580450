"""What a training loop calls: draw the weights, measure the gradient, step, each in one pass.

Weights, sigmas and masks are flat vectors of one length on one device. The noise of a step is a
function of (seed, step, index) and is made again wherever it is needed, so none is stored: give the
same seed and step to the draw, the norm and the update of a step, and a new step to the next draw.
Any seed is independent of any other; ranks that are to draw differently take ``seed + rank``, say.

The reference and the kernels for CUDA draw from different generators: their noise has the same
distribution, not the same bits. Each repeats itself exactly for the same seed and step. The kernels'
noise does not depend on the vector's length or the launch; the reference's may on length and device.

An optimiser's state is of the free weights alone, in their order: fixed ones need none. ``offsets``,
of ``free_offsets(fixed)``, says where each block of weights finds its part; mask, offsets and state
belong together, and a new mask needs new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pwfn.bayes.kernels import library
from pwfn.bayes.kernels.reference import BLOCK
from pwfn.errors import WeightError

_LARGEST = 2**63


def draw(
    free_mu: Tensor,
    free_sigma: Tensor,
    fixed: Tensor,
    fixed_mu: Tensor,
    fixed_sigma: Tensor,
    *,
    seed: int,
    step: int,
    noise_on_fixed: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One draw of every weight, ``w = mu + sigma * eps`` with ``eps ~ N(0, 1)`` (paper, eq. 1).

    (mu, sigma) is (fixed_mu, fixed_sigma) where fixed, else (free_mu, max(free_sigma, 2^-30));
    without ``noise_on_fixed`` a fixed weight is its fixed_mu. The result has the type ``dtype``
    (free_mu's own if None), rounded once at the end.

    With g the gradient at w, autograd gives ``g`` to free_mu and ``g * eps`` to free_sigma, zero
    where fixed. The floor is a projection: a sigma below it gets its gradient all the same.

    >>> mu, sigma, fixed = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([False, True])
    >>> draw(mu, sigma, fixed, torch.full((2,), 0.5), sigma, seed=0, step=0).tolist()
    [1.0, 0.5]
    """
    vectors = {"free_mu": free_mu, "free_sigma": free_sigma, "fixed_mu": fixed_mu, "fixed_sigma": fixed_sigma}
    _check(vectors, fixed, seed, step)
    kind = free_mu.dtype if dtype is None else dtype
    return library.draw(free_mu, free_sigma, fixed, fixed_mu, fixed_sigma, seed, step, noise_on_fixed, kind)


@torch.no_grad()
def draw_(
    out: Tensor,
    free_mu: Tensor,
    free_sigma: Tensor,
    fixed: Tensor,
    fixed_mu: Tensor,
    fixed_sigma: Tensor,
    *,
    seed: int,
    step: int,
    noise_on_fixed: bool = True,
) -> None:
    """The draw of ``draw``, into a vector that is there already, in its type; autograd sees none of it.

    >>> zeros, fixed, out = torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.empty(3)
    >>> draw_(out, torch.ones(3), zeros, fixed, zeros, zeros, seed=0, step=0)
    >>> out.tolist()
    [1.0, 1.0, 1.0]
    """
    vectors = {"free_mu": free_mu, "free_sigma": free_sigma, "fixed_mu": fixed_mu, "fixed_sigma": fixed_sigma}
    _check({"out": out, **vectors}, fixed, seed, step)
    library.draw_(out, free_mu, free_sigma, fixed, fixed_mu, fixed_sigma, seed, step, noise_on_fixed)


def draw_backward(grad_w: Tensor, fixed: Tensor, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The gradients ``g`` of mu and ``g * eps`` of sigma, zero where fixed, from g at the drawn weight.

    eps is the noise of ``draw`` for the same seed and step. Both are float32, or float64 if g is.

    >>> grad_mu, grad_sigma = draw_backward(torch.ones(2), torch.tensor([False, True]), seed=0, step=0)
    >>> grad_mu.tolist(), grad_sigma[1].item()
    ([1.0, 0.0], 0.0)
    """
    _check({"grad_w": grad_w}, fixed, seed, step, contiguous=False)
    return library.draw_backward(grad_w, fixed, seed, step)


def grad_squared_norm(grad_w: Tensor, fixed: Tensor, *, seed: int, step: int) -> Tensor:
    """``sum_i g_i^2 * (1 + eps_i^2)`` over the free weights: the squared norm of both gradients.

    A float64 scalar on the vectors' device, where nothing waits for it; the same input gives the
    same bits.

    >>> fixed = torch.tensor([False, True, True])
    >>> norm = grad_squared_norm(torch.tensor([3.0, 4.0, float("nan")]), fixed, seed=0, step=0)
    >>> eps = draw_backward(torch.ones(3), fixed, seed=0, step=0)[1][0].item()
    >>> abs(norm.item() - 9 * (1 + eps**2)) < 1e-5
    True
    """
    _check({"grad_w": grad_w}, fixed, seed, step, contiguous=False)
    return library.grad_squared_norm(grad_w, fixed, seed, step)


@torch.no_grad()
def sgd_(
    free_mu: Tensor,
    free_sigma: Tensor,
    momentum_mu: Tensor,
    momentum_sigma: Tensor,
    grad_w: Tensor,
    fixed: Tensor,
    offsets: Tensor,
    scale: Tensor,
    *,
    lr: float,
    sigma_lr: float,
    momentum: float,
    weight_decay: float,
    alpha: float,
    cap: float,
    seed: int,
    step: int,
) -> None:
    """One step of SGD with momentum over mu and sigma, in place, from g at the drawn weight.

    ``g_mu = scale * g + weight_decay * mu`` and ``g_sigma = scale * g * eps - alpha * [sigma < cap]``,
    the last term being the gradient of ``alpha * sum max(0, cap - sigma)``, which is not scaled. Then
    for each ``m = momentum * m + its gradient`` and ``p = p - its rate * m``, and sigma is at least
    2^-30. ``scale`` is a scalar on the device (clipping, unscaling of the loss). Zero momenta, one for
    each free weight, are a fresh start. Where fixed, nothing at all is written.

    >>> mu, sigma, fixed = torch.ones(2), torch.ones(2), torch.tensor([True, False])
    >>> m_mu, m_sigma, offsets = torch.zeros(1), torch.zeros(1), torch.tensor([0])
    >>> rates = {"lr": 0.5, "sigma_lr": 0.25, "momentum": 0.9, "weight_decay": 0.0}
    >>> g, half = torch.ones(2), torch.tensor(0.5)
    >>> sgd_(mu, sigma, m_mu, m_sigma, g, fixed, offsets, half, **rates, alpha=0.0, cap=0.05, seed=0, step=0)
    >>> mu.tolist(), m_mu.tolist(), sigma[0].item()
    ([1.0, 0.75], [0.5], 1.0)
    """
    _check({"free_mu": free_mu, "free_sigma": free_sigma}, fixed, seed, step)
    _check({"grad_w": grad_w}, fixed, seed, step, contiguous=False)
    _check_state({"momentum_mu": momentum_mu, "momentum_sigma": momentum_sigma}, fixed, offsets)
    _check_scale(scale, fixed)
    library.sgd_(
        free_mu,
        free_sigma,
        momentum_mu,
        momentum_sigma,
        grad_w,
        fixed,
        offsets,
        scale,
        lr,
        sigma_lr,
        momentum,
        weight_decay,
        alpha,
        cap,
        seed,
        step,
    )


@torch.no_grad()
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
    *,
    lr: float,
    sigma_lr: float,
    weight_decay: float,
    alpha: float,
    cap: float,
    count: int,
    seed: int,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> None:
    """One step of AdamW over mu and sigma, in place, from g at the drawn weight.

    ``g_mu = scale * g`` and ``g_sigma = scale * g * eps - alpha * [sigma < cap]``. First
    ``mu = mu * (1 - lr * weight_decay)``; then for each ``m = beta1 * m + (1 - beta1) * g``,
    ``v = beta2 * v + (1 - beta2) * g^2`` and
    ``p = p - rate * m / (1 - beta1^count) / (sqrt(v / (1 - beta2^count)) + epsilon)``, and sigma is at
    least 2^-30. ``count`` is how many steps the means have seen with this one: 1 after a fresh start
    from zeros, one for each free weight. Where fixed, nothing at all is written.

    >>> mu, sigma, fixed = torch.ones(2), torch.ones(2), torch.tensor([True, False])
    >>> means, offsets = [torch.zeros(1) for _ in range(4)], torch.tensor([0])
    >>> rates = {"lr": 0.5, "sigma_lr": 0.25, "weight_decay": 0.0, "alpha": 0.0, "cap": 0.05}
    >>> g, one = torch.full((2,), 8.0), torch.tensor(1.0)
    >>> adamw_(mu, sigma, *means, g, fixed, offsets, one, **rates, count=1, seed=0, step=0)
    >>> mu[0].item(), round(mu[1].item(), 6), sigma[0].item()
    (1.0, 0.5, 1.0)
    """
    state = {
        "mean_mu": mean_mu,
        "mean_sigma": mean_sigma,
        "square_mu": square_mu,
        "square_sigma": square_sigma,
    }
    _check({"free_mu": free_mu, "free_sigma": free_sigma}, fixed, seed, step)
    _check({"grad_w": grad_w}, fixed, seed, step, contiguous=False)
    _check_state(state, fixed, offsets)
    _check_scale(scale, fixed)
    if count < 1:
        raise WeightError(f"count is {count}: the first step of AdamW is number 1")
    library.adamw_(
        free_mu,
        free_sigma,
        mean_mu,
        mean_sigma,
        square_mu,
        square_sigma,
        grad_w,
        fixed,
        offsets,
        scale,
        lr,
        sigma_lr,
        beta1,
        beta2,
        epsilon,
        weight_decay,
        alpha,
        cap,
        count,
        seed,
        step,
    )


def _check(
    vectors: dict[str, Tensor], fixed: Tensor, seed: int, step: int, *, contiguous: bool = True
) -> None:
    """A kernel reads memory as it is told to; what does not fit must not reach it."""
    if fixed.dim() != 1 or fixed.dtype != torch.bool or not fixed.is_contiguous():
        raise WeightError(
            f"fixed is {fixed.dtype} of shape {tuple(fixed.shape)}: needed is one contiguous vector of bool"
        )
    for name, vector in vectors.items():
        if vector.shape != fixed.shape or vector.device != fixed.device:
            raise WeightError(
                f"{name} has shape {tuple(vector.shape)} on {vector.device}, fixed {tuple(fixed.shape)} on "
                f"{fixed.device}: give vectors of one length on one device"
            )
        if not vector.is_floating_point() or (contiguous and not vector.is_contiguous()):
            raise WeightError(f"{name} is not a contiguous vector of floating-point numbers: make it one")
    if not (0 <= seed < _LARGEST and 0 <= step < _LARGEST):
        raise WeightError(f"seed {seed} and step {step} must lie between 0 and 2^63 - 1")


def _check_state(state: dict[str, Tensor], fixed: Tensor, offsets: Tensor) -> None:
    """What can be seen without waiting for the device; how many weights are free cannot."""
    blocks = -(-fixed.numel() // BLOCK)
    if offsets.shape != (blocks,) or offsets.dtype != torch.int64 or offsets.device != fixed.device:
        raise WeightError(
            f"offsets is {offsets.dtype} of shape {tuple(offsets.shape)} on {offsets.device}, and {blocks} "
            f"int64 on {fixed.device} are needed: make it with free_offsets(fixed)"
        )
    first, *_ = state.values()
    for name, vector in state.items():
        if vector.dim() != 1 or vector.shape != first.shape or vector.device != fixed.device:
            raise WeightError(
                f"{name} has shape {tuple(vector.shape)} on {vector.device}: give vectors of one length, the "
                f"number of free weights, on {fixed.device}"
            )
        if vector.numel() > fixed.numel():
            raise WeightError(
                f"{name} has {vector.numel():,} entries for {fixed.numel():,} weights: too many"
            )
        if not vector.is_floating_point() or not vector.is_contiguous():
            raise WeightError(f"{name} is not a contiguous vector of floating-point numbers: make it one")


def _check_scale(scale: Tensor, fixed: Tensor) -> None:
    if scale.dim() != 0 or not scale.is_floating_point() or scale.device != fixed.device:
        raise WeightError(
            f"scale has shape {tuple(scale.shape)} and type {scale.dtype} on {scale.device}: "
            f"needed is a floating-point scalar on {fixed.device}"
        )
