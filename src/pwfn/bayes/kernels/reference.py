"""Plain torch, one line per formula: the truth that every kernel is compared with.

The noise of a step is made anew wherever it is needed, from a generator seeded by (seed, step); on
a CPU the latest is kept at hand. Arithmetic is in float32, or in float64 where a vector is float64.
An optimiser's state (momenta and the like) is of the free weights alone, in their order.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.errors import WeightError

SIGMA_FLOOR = 2.0**-30
"""The smallest sigma of a free weight."""

BLOCK = 1024
"""Weights that one program of a kernel looks after."""


def sample(mu: Tensor, sigma: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw of every weight, ``w = mu + sigma * eps`` with ``eps ~ N(0, 1)`` (paper, eq. 1).

    With g the gradient at w, autograd gives ``d/dmu = g`` and ``d/dsigma = g * eps``.

    >>> sample(torch.tensor([1.0, 2.0]), torch.zeros(2)).tolist()
    [1.0, 2.0]
    """
    if generator is None:
        noise = torch.randn_like(mu)
    else:
        noise = torch.randn(mu.shape, dtype=mu.dtype, device=mu.device, generator=generator)
    return torch.addcmul(mu, sigma, noise)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float64 for float64, else float32.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def free_offsets(fixed: Tensor, block: int = BLOCK) -> Tensor:
    """How many weights are free before each block of weights: where a block's state begins.

    Counted once for a mask, so that no step has to count the weights before its own.

    >>> free_offsets(torch.tensor([False, True, False, False, True]), block=2).tolist()
    [0, 1, 3]
    """
    blocks = -(-fixed.numel() // block)
    counts = F.pad(~fixed, (0, blocks * block - fixed.numel())).view(blocks, block).sum(1)
    return counts.cumsum(0) - counts


def generator_seed(seed: int, step: int) -> int:
    """64 bits for a generator, ``hash(seed, step // 2^32) + step * odd`` modulo 2^64.

    torch's generator for the CPU looks at the lower 32 bits only. A hash of both numbers would meet
    itself there after some 2^16 steps; this cannot within 2^32 steps of one seed.

    >>> len({generator_seed(7, step) % 2**32 for step in range(1000)})
    1000
    """
    words = seed.to_bytes(8, "little") + (step >> 32).to_bytes(4, "little")
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return (int.from_bytes(digest, "little") + step * 0x9E3779B97F4A7C15) % 2**64


def noise(size: int, seed: int, step: int, device: torch.device | str) -> Tensor:
    """Standard normal float32 numbers, the same whenever (size, seed, step, device) are.

    >>> torch.equal(noise(5, 0, 1, "cpu"), noise(5, 0, 1, "cpu"))
    True
    """
    if torch.device(device).type == "cpu":
        return _noise_on_cpu(size, seed, step)
    generator = torch.Generator(device).manual_seed(generator_seed(seed, step))
    return torch.randn(size, generator=generator, device=device)


@lru_cache(maxsize=1)
def _noise_on_cpu(size: int, seed: int, step: int) -> Tensor:
    """Kept until the next step: on a CPU making it is what a step's passes cost most."""
    generator = torch.Generator().manual_seed(generator_seed(seed, step))
    with torch.inference_mode(False):  # or the next one to use it could not go backward
        return torch.randn(size, generator=generator)


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
) -> Tensor:
    """``w = mu + sigma * eps``, with the fixed vectors' mu and sigma where fixed."""
    eps = noise(free_mu.numel(), seed, step, free_mu.device)
    mu = torch.where(fixed, fixed_mu, free_mu)
    sigma = torch.where(
        fixed, fixed_sigma if noise_on_fixed else torch.zeros_like(fixed_sigma), _floored(free_sigma)
    )
    return torch.addcmul(mu.to(wide(mu.dtype)), sigma.to(wide(mu.dtype)), eps).to(dtype)


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
) -> None:
    """The same, into a vector that is there already, in its type."""
    out.copy_(draw(free_mu, free_sigma, fixed, fixed_mu, fixed_sigma, seed, step, noise_on_fixed, out.dtype))


def draw_backward(grad_w: Tensor, fixed: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """``d/dmu = g`` and ``d/dsigma = g * eps``, zero where fixed."""
    eps = noise(grad_w.numel(), seed, step, grad_w.device)
    grad_mu = grad_w.to(wide(grad_w.dtype)).masked_fill(fixed, 0)
    return grad_mu, grad_mu * eps


def grad_squared_norm(grad_w: Tensor, fixed: Tensor, seed: int, step: int) -> Tensor:
    """``sum_i g_i^2 * (1 + eps_i^2)`` over the free weights, in float64."""
    grad_mu, grad_sigma = draw_backward(grad_w, fixed, seed, step)
    return grad_mu.double().square().sum() + grad_sigma.double().square().sum()


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
) -> None:
    """``m = momentum * m + g``, ``p = p - lr * m``, for mu and sigma, where not fixed.

    The mask says all that ``offsets`` says; it is for kernels.
    """
    mu, sigma, grad_mu, grad_sigma = _gradients(
        free_mu, free_sigma, grad_w, fixed, scale, alpha, cap, seed, step
    )
    grad_mu = grad_mu.add(mu, alpha=weight_decay)
    new_momentum_mu = _spread(momentum_mu, fixed).to(mu.dtype).mul(momentum).add(grad_mu)
    new_momentum_sigma = _spread(momentum_sigma, fixed).to(sigma.dtype).mul(momentum).add(grad_sigma)
    _write(free_mu, mu.add(new_momentum_mu, alpha=-lr), fixed)
    _write(free_sigma, _floored(sigma.add(new_momentum_sigma, alpha=-sigma_lr)), fixed)
    _keep(momentum_mu, new_momentum_mu, fixed)
    _keep(momentum_sigma, new_momentum_sigma, fixed)


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
) -> None:
    """``p = p - lr * m' / (sqrt(v') + epsilon)``, m' and v' corrected for their start at zero."""
    mu, sigma, grad_mu, grad_sigma = _gradients(
        free_mu, free_sigma, grad_w, fixed, scale, alpha, cap, seed, step
    )
    mu = mu.mul(1 - lr * weight_decay)
    for stored, value, mean, square, grad, rate in (
        (free_mu, mu, mean_mu, square_mu, grad_mu, lr),
        (free_sigma, sigma, mean_sigma, square_sigma, grad_sigma, sigma_lr),
    ):
        new_mean = _spread(mean, fixed).to(grad.dtype).lerp(grad, 1 - beta1)
        new_square = _spread(square, fixed).to(grad.dtype).mul(beta2)
        new_square = new_square.addcmul(grad, grad, value=1 - beta2)
        root = new_square.sqrt().div((1 - beta2**count) ** 0.5).add(epsilon)
        new = value.addcdiv(new_mean, root, value=-rate / (1 - beta1**count))
        _write(stored, _floored(new) if stored is free_sigma else new, fixed)
        _keep(mean, new_mean, fixed)
        _keep(square, new_square, fixed)


def _gradients(
    free_mu: Tensor,
    free_sigma: Tensor,
    grad_w: Tensor,
    fixed: Tensor,
    scale: Tensor,
    alpha: float,
    cap: float,
    seed: int,
    step: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mu and sigma in the wide type, and their gradients, the regulariser's part added unscaled."""
    mu, sigma = free_mu.to(wide(free_mu.dtype)), _floored(free_sigma.to(wide(free_sigma.dtype)))
    grad_mu, grad_sigma = draw_backward(grad_w, fixed, seed, step)
    # The derivative of max(0, cap - sigma) is -1 below the cap, and 0 at it as above it.
    short = (cap - sigma > 0).to(sigma.dtype)
    return (
        mu,
        sigma,
        grad_mu.mul(scale).to(mu.dtype),
        grad_sigma.mul(scale).to(sigma.dtype).sub(short, alpha=alpha),
    )


def _floored(sigma: Tensor) -> Tensor:
    return sigma.clamp_min(SIGMA_FLOOR)


def _write(stored: Tensor, value: Tensor, fixed: Tensor) -> None:
    """The new value where free; where fixed the stored bits, whatever they are."""
    stored.copy_(torch.where(fixed, stored, value.to(stored.dtype)))


def _spread(state: Tensor, fixed: Tensor) -> Tensor:
    """A vector of the free weights as one of all weights, zero where fixed."""
    free = ~fixed
    count = int(free.sum())
    if state.shape != (count,):
        raise WeightError(
            f"a vector of the state has shape {tuple(state.shape)}: needed is one entry for each of the "
            f"{count:,} free weights; was a weight fixed since it was made?"
        )
    return torch.zeros(fixed.shape, dtype=state.dtype, device=state.device).masked_scatter(free, state)


def _keep(state: Tensor, value: Tensor, fixed: Tensor) -> None:
    """The free weights' part of a vector."""
    state.copy_(value[~fixed])
