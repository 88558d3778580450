"""Triton kernels for the operations of ``reference``, one pass over the vectors each, and their launchers.

A launcher has the name and the arguments of its operation, and ``block`` besides: the number of weights
per program. ``library`` registers the launchers for CUDA.

The noise of weight i comes from Philox 4x32-10 with the seed as key and (i // 4, step) as its
128-bit counter: it depends on seed, step and i alone, not on the launch, and no two weights or
steps of a seed share a counter. The four words of a counter become the noise of four neighbours by
Box–Muller. Indices are 64-bit; a grid has at most 2^31 - 1 programs, so a vector can have up to
2^41 elements at the default block. The entries of a fixed weight in the trained vectors are neither read
nor written, and the optimiser state has no entry for it: a program finds its part of the state by the number
of free weights before its block (``offsets``), and each weight its entry by those before it in the block.

The launch does not change the results, except the last bits of the norm, which is summed by blocks. For that,
a multiplication and an addition are fused only where the code says ``fma``. The compiler alone would fuse
some of them, depending on the size of the block.

Coefficients (learning rates and the like) reach a kernel as float32, also where it computes in float64.
"""

# The parameters of a kernel are pointers and scalars of Triton, which have no Python types; the upper-case
# ones are constants, by Triton's convention.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pwfn.bayes.kernels.reference import BLOCK, SIGMA_FLOOR, wide

try:  # Only the CUDA builds of torch bring Triton, and it has no types.
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra
except ImportError:  # then nothing here is registered, but the module can still be imported and read
    triton = None


def draw(free_mu: Tensor, *others: Tensor, dtype: torch.dtype | None = None, **numbers: Any) -> Tensor:
    """See :func:`pwfn.bayes.kernels.reference.draw`: the same distribution, not the same bits."""
    out = torch.empty_like(free_mu, dtype=dtype)
    draw_(out, free_mu, *others, **numbers)
    return out


def draw_(
    out: Tensor,
    *vectors: Tensor,
    noise_on_fixed: bool = True,
    ahead: Tensor | None = None,
    offsets: Tensor | None = None,
    **numbers: int,
) -> None:
    """See :func:`pwfn.bayes.kernels.reference.draw_`; the offsets must be those of the same block."""
    given: dict[str, Any] = {"ahead": ahead, "floor": SIGMA_FLOOR, "NOISE_ON_FIXED": noise_on_fixed}
    given |= {"offsets": offsets, "length": vectors[4].numel(), "STRIDE": vectors[1].dim()}
    _launch(draw_kernel, *vectors, out, **given, **numbers)
    increment_version(out)


def draw_backward(grad_w: Tensor, fixed: Tensor, **numbers: int) -> tuple[Tensor, Tensor]:
    """See :func:`pwfn.bayes.kernels.reference.draw_backward`."""
    grad_w = grad_w.contiguous()  # the gradient of a sum is one number with stride 0
    grad_mu = torch.empty_like(grad_w, dtype=wide(grad_w.dtype))
    grad_sigma = torch.empty_like(grad_mu)
    _launch(draw_backward_kernel, grad_w, fixed, grad_mu, grad_sigma, **numbers)
    return grad_mu, grad_sigma


def grad_squared_norm(
    grad_w: Tensor, fixed: Tensor, *, ahead: Tensor | None = None, block: int = BLOCK, **numbers: int
) -> Tensor:
    """See :func:`pwfn.bayes.kernels.reference.grad_squared_norm`.

    Each program stores the sum of its block, in float32 for a narrow gradient; the stored sums are
    added in float64. There are no atomics: the same input gives the same bits.
    """
    partial = torch.empty(-(-grad_w.numel() // block), dtype=torch.float64, device=grad_w.device)
    given = grad_w.contiguous(), fixed, partial
    _launch(grad_squared_norm_kernel, *given, ahead=ahead, block=block, **numbers)
    return partial.sum()


def sgd_(
    *vectors: Tensor, ahead: Tensor | None = None, rates: Tensor | None = None, **numbers: float
) -> None:
    """See :func:`pwfn.bayes.kernels.reference.sgd_`; the offsets must be those of the same block."""
    _update(sgd_kernel, *vectors, ahead=ahead, rates=rates, **numbers)


def adamw_(
    *vectors: Tensor,
    lr: float,
    sigma_lr: float,
    weight_decay: float,
    count: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    ahead: Tensor | None = None,
    rates: Tensor | None = None,
    **numbers: float,
) -> None:
    """See :func:`pwfn.bayes.kernels.reference.adamw_`; the offsets must be those of the same block.

    What depends on the number of the step is computed on the device, by operations on one number each.
    """
    device = vectors[0].device
    steps = torch.full((), float(count), dtype=torch.float64, device=device)
    steps = steps if ahead is None else steps + ahead
    if rates is None:
        rates = torch.stack([torch.full((), rate, device=device) for rate in (lr, sigma_lr)])
    wide_rates, mean_bias = rates.double(), 1 - beta1**steps
    now = [*(wide_rates / mean_bias).unbind(), (1 - beta2**steps).sqrt(), wide_rates[0] * weight_decay]
    _update(
        adamw_kernel,
        *vectors,
        now=torch.stack(now).float(),
        keep_mean=1 - beta1,
        keep_square=1 - beta2,
        epsilon=epsilon,
        ahead=ahead,
        **numbers,
    )


def _update(kernel: Any, /, *vectors: Tensor, **numbers: Any) -> None:
    """Launch the step of an optimiser, which writes all but the last four; sigma only if it has state."""
    *written, grad_w, fixed, offsets, scale = vectors
    trains_sigma = written[3].numel() > 0
    numbers.update(length=written[2].numel(), floor=SIGMA_FLOOR, TRAIN_SIGMA=trains_sigma)
    _launch(kernel, *written, grad_w.contiguous(), fixed, offsets, scale, **numbers)
    increment_version(written)


def _launch(kernel: Any, first: Tensor, /, *others: Tensor, block: int = BLOCK, **numbers: Any) -> None:
    """Run a kernel over all weights, on the device and in the wide type of the first vector.

    One program processes one block of weights; a block is a power of two, at least 4.
    """
    n = first.numel()
    if n == 0:
        return
    width = tl.float64 if wide(first.dtype) == torch.float64 else tl.float32
    with torch.cuda.device_of(first):
        kernel[(-(-n // block),)](
            first, *others, n=n, **numbers, WIDE=width, BLOCK=block, enable_fp_fusion=False
        )


def _jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, compiled once for all numbers and alignments.

    For an aligned vector Triton would let a thread read several neighbours at once. Here each weight is
    read or skipped by its own mask, and such threads would read in strides. With one element per thread
    the reads of a warp are adjacent, and whole sectors of fixed weights stay unread.
    """
    if triton is None:
        return function
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    names = [name for name in parameters if not name.isupper()]  # upper case: constants
    numbers = [name for name in names if name in ("n", "length", "seed", "step")]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=names)


@_jit
def _normal_pair(x, y):
    """Two normal numbers from two 32-bit words, ``sqrt(-2 ln u) * (cos, sin)(2 pi v)``; |.| <= 6.77."""
    # u = (x + 1/2) / 2^32 is never zero. Near one an approximate logarithm can be positive.
    u = tl.fma(x.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    angle = y.to(tl.float32) * 1.4629180792671596e-09
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(u), 0.0))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@_jit
def _moved(step, ahead):
    """The number of a step, counted on the device from ``step`` on where there is a counter."""
    if ahead is None:
        return step.to(tl.int64)
    else:
        return step.to(tl.int64) + tl.load(ahead)


@_jit
def _noise(seed, step, start, BLOCK: tl.constexpr):
    """The noise of weights start, start + 1, …, start + BLOCK - 1; start is a multiple of four."""
    four = start // 4 + tl.arange(0, BLOCK // 4)
    low = four.to(tl.uint32)
    step_low = low * 0 + step.to(tl.uint32)
    step_high = low * 0 + (step.to(tl.uint64) >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, (four >> 32).to(tl.uint32), step_low, step_high)
    first, second = _normal_pair(a, b)
    third, fourth = _normal_pair(c, d)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@_jit
def _places(fixed, n, BLOCK: tl.constexpr):
    """The first index of this program, all its indices, and the masks of the fixed and the free ones."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    held = tl.load(fixed + at, mask=inside, other=0) != 0
    return start, at, held, inside & (held == 0)


@_jit
def _slots(offsets, free, length):
    """The entries of the free weights of this program in the state, and the mask of those that exist.

    All of them exist unless the state belongs to another mask; then it must not be written past its end.
    """
    slot = tl.load(offsets + tl.program_id(0)) + tl.cumsum(free.to(tl.int32), axis=0) - 1
    return slot, free & (slot < length)


@_jit
def _floored(sigma, floor):
    return tl.where(sigma < floor, floor, sigma)  # not maximum, which would hide a NaN


@_jit
def draw_kernel(
    free_mu,
    free_sigma,
    fixed,
    fixed_mu,
    fixed_sigma,
    out,
    n,
    floor,
    seed,
    step,
    ahead,
    offsets,
    length,
    NOISE_ON_FIXED: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``w = mu + sigma * eps``, with the fixed mu and sigma where fixed; stride 0: one free sigma for all."""
    start, at, held, free = _places(fixed, n, BLOCK)
    mu = tl.load(free_mu + at, mask=free, other=0.0).to(WIDE)
    mu = tl.where(held, tl.load(fixed_mu + at, mask=held, other=0.0).to(WIDE), mu)
    sigma = _floored(tl.load(free_sigma + at * STRIDE, mask=free, other=0.0).to(WIDE), floor)
    sigma = tl.where(held, 0.0, sigma)
    if NOISE_ON_FIXED:
        entry = at
        if offsets is not None:  # one entry per fixed weight, so without the free ones before it
            entry = at - tl.load(offsets + tl.program_id(0)) - tl.cumsum(free.to(tl.int32), axis=0)
        own = tl.load(fixed_sigma + entry, mask=held & (entry < length), other=0.0)
        sigma = tl.where(held, own.to(WIDE), sigma)
    w = tl.fma(sigma, _noise(seed, _moved(step, ahead), start, BLOCK), mu)
    tl.store(out + at, w, mask=held | free)


@_jit
def draw_backward_kernel(
    grad_w, fixed, grad_mu, grad_sigma, n, seed, step, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """``g`` and ``g * eps``, zero where fixed."""
    start, at, held, free = _places(fixed, n, BLOCK)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE)
    tl.store(grad_mu + at, grad, mask=held | free)
    tl.store(grad_sigma + at, tl.where(held, 0.0, grad * _noise(seed, step, start, BLOCK)), mask=held | free)


@_jit
def grad_squared_norm_kernel(
    grad_w, fixed, partial, n, seed, step, ahead, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """``sum g^2 (1 + eps^2)`` over the free weights of each block."""
    start, at, _, free = _places(fixed, n, BLOCK)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE)
    noise = _noise(seed, _moved(step, ahead), start, BLOCK)
    tl.store(partial + tl.program_id(0), tl.sum(grad * grad * tl.fma(noise, noise, 1.0), axis=0))


@_jit
def _sigma_and_gradient(
    free_sigma,
    at,
    free,
    seed,
    step,
    ahead,
    start,
    grad,
    alpha,
    cap,
    floor,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sigma and its gradient, with that of the regulariser, which is not scaled."""
    sigma = _floored(tl.load(free_sigma + at, mask=free, other=0.0).to(WIDE), floor)
    noise = _noise(seed, _moved(step, ahead), start, BLOCK)
    return sigma, tl.fma(grad, noise, -tl.where(sigma < cap, alpha, 0.0))


@_jit
def sgd_kernel(
    free_mu,
    free_sigma,
    momentum_mu,
    momentum_sigma,
    grad_w,
    fixed,
    offsets,
    scale,
    n,
    length,
    lr,
    sigma_lr,
    momentum,
    weight_decay,
    alpha,
    cap,
    floor,
    seed,
    step,
    ahead,
    rates,
    TRAIN_SIGMA: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of SGD with momentum, where free."""
    start, at, _, free = _places(fixed, n, BLOCK)
    slot, free = _slots(offsets, free, length)
    if rates is not None:
        lr, sigma_lr = tl.load(rates), tl.load(rates + 1)
    mu = tl.load(free_mu + at, mask=free, other=0.0).to(WIDE)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE) * tl.load(scale).to(WIDE)
    kept_mu = tl.load(momentum_mu + slot, mask=free, other=0.0).to(WIDE)
    kept_mu = tl.fma(momentum, kept_mu, tl.fma(weight_decay, mu, grad))
    tl.store(momentum_mu + slot, kept_mu, mask=free)
    tl.store(free_mu + at, tl.fma(-lr, kept_mu, mu), mask=free)
    if TRAIN_SIGMA:
        sigma, grad_sigma = _sigma_and_gradient(
            free_sigma, at, free, seed, step, ahead, start, grad, alpha, cap, floor, WIDE, BLOCK
        )
        kept_sigma = tl.load(momentum_sigma + slot, mask=free, other=0.0).to(WIDE)
        kept_sigma = tl.fma(momentum, kept_sigma, grad_sigma)
        tl.store(momentum_sigma + slot, kept_sigma, mask=free)
        tl.store(free_sigma + at, _floored(tl.fma(-sigma_lr, kept_sigma, sigma), floor), mask=free)


@_jit
def _adam_step(
    mean, square, grad, slot, free, rate, root_bias, keep_mean, keep_square, epsilon, WIDE: tl.constexpr
):
    """The step ``rate * m / (sqrt(v) / root_bias + epsilon)``; stores the new m and v."""
    old_mean = tl.load(mean + slot, mask=free, other=0.0).to(WIDE)
    old_square = tl.load(square + slot, mask=free, other=0.0).to(WIDE)
    new_mean = tl.fma(keep_mean, grad - old_mean, old_mean)
    new_square = tl.fma(keep_square, tl.fma(grad, grad, -old_square), old_square)
    tl.store(mean + slot, new_mean, mask=free)
    tl.store(square + slot, new_square, mask=free)
    return rate * new_mean / (tl.sqrt(new_square) / root_bias + epsilon)


@_jit
def adamw_kernel(
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
    now,
    n,
    length,
    keep_mean,
    keep_square,
    epsilon,
    alpha,
    cap,
    floor,
    seed,
    step,
    ahead,
    TRAIN_SIGMA: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of AdamW, where free. ``now`` is (rate, sigma's rate, root of the bias, weight decay)."""
    start, at, _, free = _places(fixed, n, BLOCK)
    slot, free = _slots(offsets, free, length)
    rate, sigma_rate, root_bias, decay = tl.load(now), tl.load(now + 1), tl.load(now + 2), tl.load(now + 3)
    mu = tl.load(free_mu + at, mask=free, other=0.0).to(WIDE)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE) * tl.load(scale).to(WIDE)
    mu = tl.fma(-decay, mu, mu) - _adam_step(
        mean_mu, square_mu, grad, slot, free, rate, root_bias, keep_mean, keep_square, epsilon, WIDE
    )
    tl.store(free_mu + at, mu, mask=free)
    if TRAIN_SIGMA:
        sigma, grad_sigma = _sigma_and_gradient(
            free_sigma, at, free, seed, step, ahead, start, grad, alpha, cap, floor, WIDE, BLOCK
        )
        sigma = sigma - _adam_step(
            mean_sigma,
            square_sigma,
            grad_sigma,
            slot,
            free,
            sigma_rate,
            root_bias,
            keep_mean,
            keep_square,
            epsilon,
            WIDE,
        )
        tl.store(free_sigma + at, _floored(sigma, floor), mask=free)
