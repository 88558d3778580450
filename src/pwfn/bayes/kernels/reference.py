"""The hot operations on flat vectors in plain torch: the truth that every kernel is compared with.

Weights, sigmas and masks are vectors of one length on one device. A training step draws the weights,
measures the gradient and updates mu and sigma, each in one pass. The noise of a step is a function of
(seed, step, index). It is computed again where it is needed, so it takes no memory: pass the same seed and
step to the draw, the norm and the update of a step, and a new step to the next draw.

The reference and the CUDA kernels use different generators: the noise has the same distribution but not the
same bits. Both repeat exactly. That of the reference can depend on the length of the vector and the device.

The state of an optimiser (momenta and the like) has one entry per free weight, in their order; that of sigma
is empty where sigma is not trained, and sigma is then neither read nor written. The offsets
of ``free_offsets(fixed)`` say where the state of each block of weights begins. Mask, offsets and state
belong together: a new mask needs new offsets and a new state.

A sigma that is not trained can be a scalar, one number for all free weights. With the offsets, ``draw_``
takes the sigma of the fixed weights with one entry per fixed weight, in their order.

In a recorded step the numbers that change from step to step must be in the memory of the device: ``ahead``, a
whole number that is added to ``step`` (and ``count``), and ``rates``, which replaces ``lr`` and ``sigma_lr``.

Arithmetic is in float32, or in float64 where a vector is float64.
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
"""Number of weights that one program of a kernel processes."""


def sample(mu: Tensor, sigma: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw of every weight, ``w = mu + sigma * eps`` with ``eps ~ N(0, 1)`` (paper, eq. 1).

    With g the gradient at w, autograd gives ``d/dmu = g`` and ``d/dsigma = g * eps``.

    >>> sample(torch.tensor([1.0, 2.0]), torch.zeros(2)).tolist()
    [1.0, 2.0]
    """
    noise = torch.randn(mu.shape, dtype=mu.dtype, device=mu.device, generator=generator)
    return torch.addcmul(mu, sigma, noise)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float64 for float64, else float32.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def free_offsets(fixed: Tensor, block: int = BLOCK) -> Tensor:
    """The number of free weights before each block of weights: where the state of the block begins.

    Compute it once per mask, so that no step has to count the free weights again.

    >>> free_offsets(torch.tensor([False, True, False, False, True]), block=2).tolist()
    [0, 1, 3]
    """
    blocks = -(-fixed.numel() // block)
    counts = F.pad(~fixed, (0, blocks * block - fixed.numel())).view(blocks, block).sum(1)
    return counts.cumsum(0) - counts


def unpacked(values: Tensor, fixed: Tensor) -> Tensor:
    """One entry per weight from one per fixed weight; zero where free.

    >>> unpacked(torch.tensor([1.0, 2.0]), torch.tensor([False, True, False, True])).tolist()
    [0.0, 1.0, 0.0, 2.0]
    """
    count = int(fixed.count_nonzero())
    if values.numel() != count:
        raise WeightError(
            f"fixed_sigma has {values.numel():,} entries for {count:,} fixed weights: they must agree"
        )
    return values.new_zeros(fixed.shape).masked_scatter_(fixed, values)


def generator_seed(seed: int, step: int) -> int:
    """A 64-bit seed for a generator, ``hash(seed, step // 2^32) + step * odd`` modulo 2^64.

    torch's CPU generator uses the lower 32 bits only. A hash of both numbers would collide there after
    about 2^16 steps; this sum cannot collide within 2^32 steps of one seed.

    >>> len({generator_seed(7, step) % 2**32 for step in range(1000)})
    1000
    """
    words = seed.to_bytes(8, "little") + (step >> 32).to_bytes(4, "little")
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return (int.from_bytes(digest, "little") + step * 0x9E3779B97F4A7C15) % 2**64


def noise(size: int, seed: int, step: int, device: torch.device | str) -> Tensor:
    """Standard normal float32 numbers, the same for the same (size, seed, step, device).

    >>> torch.equal(noise(5, 0, 1, "cpu"), noise(5, 0, 1, "cpu"))
    True
    """
    if torch.device(device).type == "cpu":
        return _noise_on_cpu(size, seed, step)
    generator = torch.Generator(device).manual_seed(generator_seed(seed, step))
    return torch.randn(size, generator=generator, device=device)


@lru_cache(maxsize=1)
def _noise_on_cpu(size: int, seed: int, step: int) -> Tensor:
    """Cached until the next step: on a CPU the noise is the largest cost of the passes of a step."""
    generator = torch.Generator().manual_seed(generator_seed(seed, step))
    with torch.inference_mode(False):  # autograd cannot save an inference tensor for a later backward
        return torch.randn(size, generator=generator)


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

    (mu, sigma) is (fixed_mu, fixed_sigma) where fixed, else (free_mu, max(free_sigma, 2^-30)). Without
    ``noise_on_fixed`` a fixed weight is exactly its fixed_mu. The result is rounded once, at the end, to
    ``dtype`` (default: the type of free_mu).

    With g the gradient at w, autograd gives ``g`` to free_mu and ``g * eps`` to free_sigma (its sum to a
    scalar), zero where fixed. The floor is a projection: a sigma below it still gets its gradient.

    >>> mu, sigma, fixed = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([False, True])
    >>> draw(mu, sigma, fixed, torch.full((2,), 0.5), sigma, seed=0, step=0).tolist()
    [1.0, 0.5]
    """
    eps = noise(free_mu.numel(), seed, step, free_mu.device)
    mu = torch.where(fixed, fixed_mu, free_mu)
    held = fixed_sigma if noise_on_fixed else torch.zeros_like(fixed_sigma)
    sigma = torch.where(fixed, held, _floored(free_sigma))
    return torch.addcmul(mu.to(wide(mu.dtype)), sigma.to(wide(mu.dtype)), eps).to(dtype or free_mu.dtype)


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
    ahead: Tensor | None = None,
    noise_on_fixed: bool = True,
    offsets: Tensor | None = None,
) -> None:
    """``draw`` into an existing vector, rounded to its type; autograd does not record it.

    With ``offsets`` fixed_sigma has one entry per fixed weight.
    """
    fixed_sigma = fixed_sigma if offsets is None else unpacked(fixed_sigma, fixed)
    vectors = free_mu, free_sigma, fixed, fixed_mu, fixed_sigma
    step = _moved(step, ahead)
    out.copy_(draw(*vectors, seed=seed, step=step, noise_on_fixed=noise_on_fixed, dtype=out.dtype))


def draw_backward(grad_w: Tensor, fixed: Tensor, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The gradients ``g`` of mu and ``g * eps`` of sigma, zero where fixed, from g at the drawn weight.

    eps is the noise of ``draw`` for the same seed and step. Both are float32, or float64 if g is.

    >>> grad_mu, grad_sigma = draw_backward(torch.ones(2), torch.tensor([False, True]), seed=0, step=0)
    >>> grad_mu.tolist(), grad_sigma[1].item()
    ([1.0, 0.0], 0.0)
    """
    eps = noise(grad_w.numel(), seed, step, grad_w.device)
    grad_mu = grad_w.to(wide(grad_w.dtype)).masked_fill(fixed, 0)
    return grad_mu, grad_mu * eps


def grad_squared_norm(
    grad_w: Tensor, fixed: Tensor, *, seed: int, step: int, ahead: Tensor | None = None
) -> Tensor:
    """``sum_i g_i^2 * (1 + eps_i^2)`` over the free weights: the squared norm of both gradients.

    A float64 scalar that stays on the device of the vectors. The same input gives the same bits.
    """
    grad_mu, grad_sigma = draw_backward(grad_w, fixed, seed=seed, step=_moved(step, ahead))
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
    *,
    lr: float,
    sigma_lr: float,
    momentum: float,
    weight_decay: float,
    alpha: float,
    cap: float,
    seed: int,
    step: int,
    ahead: Tensor | None = None,
    rates: Tensor | None = None,
) -> None:
    """One step of SGD with momentum over mu and sigma, in place, from g at the drawn weight.

    ``g_mu = scale * g + weight_decay * mu`` and ``g_sigma = scale * g * eps - alpha * [sigma < cap]``,
    where the last term is the gradient of ``alpha * sum max(0, cap - sigma)`` and is not scaled. Then
    ``m = momentum * m + gradient`` and ``p = p - rate * m`` for each of the two, and sigma is kept at or
    above 2^-30. ``scale`` is a scalar on the device (clipping, unscaling of the loss). A fresh start has
    zero momenta. Entries of fixed weights are not written.

    >>> mu, sigma, fixed = torch.ones(2), torch.ones(2), torch.tensor([True, False])
    >>> m_mu, m_sigma, offsets = torch.zeros(1), torch.zeros(1), torch.tensor([0])
    >>> rates = {"lr": 0.5, "sigma_lr": 0.25, "momentum": 0.9, "weight_decay": 0.0}
    >>> g, half = torch.ones(2), torch.tensor(0.5)
    >>> sgd_(mu, sigma, m_mu, m_sigma, g, fixed, offsets, half, **rates, alpha=0.0, cap=0.05, seed=0, step=0)
    >>> mu.tolist(), m_mu.tolist(), sigma[0].item()
    ([1.0, 0.75], [0.5], 1.0)
    """
    lr, sigma_lr = (lr, sigma_lr) if rates is None else rates.tolist()
    free = _free(fixed, momentum_mu)
    (mu,) = _take(free, free_mu)
    grad_mu, grad_sigma = _take(free, *draw_backward(grad_w, fixed, seed=seed, step=_moved(step, ahead)))
    grad_mu = grad_mu.mul(scale).to(mu.dtype).add(mu, alpha=weight_decay)
    moved = [(free_mu, mu, momentum_mu, grad_mu, lr)]
    if momentum_sigma.numel():
        sigma = _floored(*_take(free, free_sigma))
        grad_sigma = _with_penalty(grad_sigma.mul(scale), sigma, alpha, cap)
        moved.append((free_sigma, sigma, momentum_sigma, grad_sigma, sigma_lr))
    for stored, value, buffer, grad, rate in moved:
        new = buffer.to(value.dtype).mul(momentum).add(grad)
        buffer.copy_(new)
        value = value.add(new, alpha=-rate)
        _write(stored, _floored(value) if stored is free_sigma else value, free)


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
    ahead: Tensor | None = None,
    rates: Tensor | None = None,
) -> None:
    """One step of AdamW over mu and sigma, in place, from g at the drawn weight.

    ``g_mu = scale * g`` and ``g_sigma = scale * g * eps - alpha * [sigma < cap]``. First
    ``mu = mu * (1 - lr * weight_decay)``; then for each of the two ``m = beta1 * m + (1 - beta1) * g``,
    ``v = beta2 * v + (1 - beta2) * g^2`` and
    ``p = p - rate * m / (1 - beta1^count) / (sqrt(v / (1 - beta2^count)) + epsilon)``, and sigma is kept
    at or above 2^-30. ``count`` is the number of steps that m and v have seen, this one included: 1 for
    a fresh start from zeros. Entries of fixed weights are not written.
    """
    lr, sigma_lr = (lr, sigma_lr) if rates is None else rates.tolist()
    count = _moved(count, ahead)
    free = _free(fixed, mean_mu)
    (mu,) = _take(free, free_mu)
    grad_mu, grad_sigma = _take(free, *draw_backward(grad_w, fixed, seed=seed, step=_moved(step, ahead)))
    grad_mu = grad_mu.mul(scale).to(mu.dtype)
    moved = [(free_mu, mu.mul(1 - lr * weight_decay), mean_mu, square_mu, grad_mu, lr)]
    if mean_sigma.numel():
        sigma = _floored(*_take(free, free_sigma))
        grad_sigma = _with_penalty(grad_sigma.mul(scale), sigma, alpha, cap)
        moved.append((free_sigma, sigma, mean_sigma, square_sigma, grad_sigma, sigma_lr))
    for stored, value, mean, square, grad, rate in moved:
        new_mean = mean.to(grad.dtype).lerp(grad, 1 - beta1)
        new_square = square.to(grad.dtype).mul(beta2).addcmul(grad, grad, value=1 - beta2)
        mean.copy_(new_mean)
        square.copy_(new_square)
        root = new_square.sqrt().div((1 - beta2**count) ** 0.5).add(epsilon)
        value = value.addcdiv(new_mean, root, value=-rate / (1 - beta1**count))
        _write(stored, _floored(value) if stored is free_sigma else value, free)


def _moved(step: int, ahead: Tensor | None) -> int:
    """The number of a step, counted on the device from ``step`` on."""
    return step if ahead is None else step + int(ahead)


def _free(fixed: Tensor, state: Tensor) -> Tensor:
    """The indices of the free weights; the state of an optimiser must have one entry for each."""
    free = (~fixed).nonzero().squeeze(1)
    if state.shape != free.shape:
        raise WeightError(
            f"the state of the optimiser has {state.numel():,} entries for {free.numel():,} free weights: "
            "create the state again after weights were fixed"
        )
    return free


def _take(at: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    return tuple(vector.index_select(0, at).to(wide(vector.dtype)) for vector in vectors)


def _floored(sigma: Tensor) -> Tensor:
    return sigma.clamp_min(SIGMA_FLOOR)


def _with_penalty(grad: Tensor, sigma: Tensor, alpha: float, cap: float) -> Tensor:
    """``g - alpha * [sigma < cap]``: the derivative of max(0, cap - sigma) is -1 below the cap, else 0."""
    return grad.to(sigma.dtype).sub((cap - sigma > 0).to(sigma.dtype), alpha=alpha)


def _write(stored: Tensor, value: Tensor, at: Tensor) -> None:
    stored.index_copy_(0, at, value.to(stored.dtype))
