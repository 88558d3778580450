"""Triton kernels for the operations of ``library``, one pass each over the vectors.

The noise of weight i comes from Philox 4x32-10 with the seed as key and (i // 4, step) as its
128-bit counter: it depends on seed, step and i alone, not on the launch, and no two weights or
steps of a seed share a counter. The four words of a counter become the noise of four neighbours by
Box–Muller. Offsets are 64-bit; a grid ends at 2^31 - 1 programs, so that a vector may have up to
2^41 elements at the default block. A fixed weight's entries of the vectors that are trained are
neither read nor written. Their state has no entry for it: a program finds its part by the number of
free weights before its block, given, and each weight its entry by those before it within the block.

Bits do not depend on the launch, save the last ones of the norm, whose sum is taken by blocks. To that
end a multiplication and an addition are one operation where the code says ``fma``, and nowhere else:
left to itself the compiler joins some and not others, as the block's size suits it.

Coefficients (learning rates and the like) reach a kernel as float32, also where it computes in float64.
"""

# A kernel's parameters are pointers and scalars of Triton's language, which has no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:  # It comes with torch's CUDA builds only, and brings no types.
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # library.py registers none of this then; the module still opens, for its reader
    triton = None


def wide_type(*, double: bool) -> Any:
    """Triton's name of the type to compute in."""
    return tl.float64 if double else tl.float32


def _jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, compiled once for any numbers and any alignment.

    Knowing that a vector is aligned, Triton would give a thread several neighbours to read at once.
    Here each of them is read or not by its own mask, and such threads would read in strides: one
    element a thread keeps a warp's reads side by side, and whole sectors of fixed weights unread.
    """
    if triton is None:
        return function
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    names = [name for name in parameters if not name.isupper()]  # the others are constants
    numbers = [name for name in names if name in ("n", "length", "seed", "step")]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=names)


@_jit
def _normal_pair(x, y):
    """Two normal numbers of two 32-bit words, ``sqrt(-2 ln u) * (cos, sin)(2 pi v)``; |.| <= 6.77."""
    # u = (x + 1/2) / 2^32 is never zero. Near one an approximate logarithm might come out positive.
    u = tl.fma(x.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    angle = y.to(tl.float32) * 1.4629180792671596e-09
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(u), 0.0))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@_jit
def _noise(seed, step, start, BLOCK: tl.constexpr):  # noqa: N803 - Triton's habit for constants
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
def _places(fixed, n, BLOCK: tl.constexpr):  # noqa: N803
    """This program's start and indices, and which of them are fixed, and which free."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    held = tl.load(fixed + at, mask=inside, other=0) != 0
    return start, at, held, inside & (held == 0)


@_jit
def _slots(offsets, free, length):
    """The entries of this program's free weights in the state's vectors, and which of them there are.

    All of them are there, unless the state is of another mask; it must not be written past its end.
    """
    slot = tl.load(offsets + tl.program_id(0)) + tl.cumsum(free.to(tl.int32), axis=0) - 1
    return slot, free & (slot < length)


@_jit
def _floored(sigma, floor):
    return tl.where(sigma < floor, floor, sigma)  # not maximum, which would hide a NaN


@_jit
def draw(
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
    NOISE_ON_FIXED: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """``w = mu + sigma * eps``, of the fixed vectors where fixed."""
    start, at, held, free = _places(fixed, n, BLOCK)
    mu = tl.load(free_mu + at, mask=free, other=0.0).to(WIDE)
    mu = tl.where(held, tl.load(fixed_mu + at, mask=held, other=0.0).to(WIDE), mu)
    sigma = _floored(tl.load(free_sigma + at, mask=free, other=0.0).to(WIDE), floor)
    if NOISE_ON_FIXED:
        sigma = tl.where(held, tl.load(fixed_sigma + at, mask=held, other=0.0).to(WIDE), sigma)
    else:
        sigma = tl.where(held, 0.0, sigma)
    w = tl.fma(sigma, _noise(seed, step, start, BLOCK), mu)
    tl.store(out + at, w, mask=held | free)


@_jit
def draw_backward(
    grad_w,
    fixed,
    grad_mu,
    grad_sigma,
    n,
    seed,
    step,
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """``g`` and ``g * eps``, zero where fixed."""
    start, at, held, free = _places(fixed, n, BLOCK)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE)
    tl.store(grad_mu + at, grad, mask=held | free)
    tl.store(grad_sigma + at, tl.where(held, 0.0, grad * _noise(seed, step, start, BLOCK)), mask=held | free)


@_jit
def grad_squared_norm(
    grad_w,
    fixed,
    partial,
    n,
    seed,
    step,
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A block's ``sum g^2 (1 + eps^2)`` over the free weights."""
    start, at, _, free = _places(fixed, n, BLOCK)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE)
    noise = _noise(seed, step, start, BLOCK)
    tl.store(partial + tl.program_id(0), tl.sum(grad * grad * tl.fma(noise, noise, 1.0), axis=0))


@_jit
def _gradients(
    free_mu,
    free_sigma,
    grad_w,
    scale,
    at,
    free,
    noise,
    alpha,
    cap,
    floor,
    WIDE: tl.constexpr,  # noqa: N803
):
    """mu, sigma and their gradients, the regulariser's part added unscaled."""
    mu = tl.load(free_mu + at, mask=free, other=0.0).to(WIDE)
    sigma = _floored(tl.load(free_sigma + at, mask=free, other=0.0).to(WIDE), floor)
    grad = tl.load(grad_w + at, mask=free, other=0.0).to(WIDE) * tl.load(scale).to(WIDE)
    return mu, sigma, grad, tl.fma(grad, noise, -tl.where(sigma < cap, alpha, 0.0))


@_jit
def sgd(
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
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A step of SGD with momentum, where free."""
    start, at, _, free = _places(fixed, n, BLOCK)
    slot, free = _slots(offsets, free, length)
    noise = _noise(seed, step, start, BLOCK)
    mu, sigma, grad_mu, grad_sigma = _gradients(
        free_mu, free_sigma, grad_w, scale, at, free, noise, alpha, cap, floor, WIDE
    )
    kept_mu = tl.load(momentum_mu + slot, mask=free, other=0.0).to(WIDE)
    kept_mu = tl.fma(momentum, kept_mu, tl.fma(weight_decay, mu, grad_mu))
    kept_sigma = tl.load(momentum_sigma + slot, mask=free, other=0.0).to(WIDE)
    kept_sigma = tl.fma(momentum, kept_sigma, grad_sigma)
    tl.store(momentum_mu + slot, kept_mu, mask=free)
    tl.store(momentum_sigma + slot, kept_sigma, mask=free)
    tl.store(free_mu + at, tl.fma(-lr, kept_mu, mu), mask=free)
    tl.store(free_sigma + at, _floored(tl.fma(-sigma_lr, kept_sigma, sigma), floor), mask=free)


@_jit
def _adam_step(
    mean,
    square,
    grad,
    slot,
    free,
    rate,
    root_bias,
    keep_mean,
    keep_square,
    epsilon,
    WIDE: tl.constexpr,  # noqa: N803
):
    """How far to go, ``rate * m / (sqrt(v) / root_bias + epsilon)``; m and v are stored."""
    old_mean = tl.load(mean + slot, mask=free, other=0.0).to(WIDE)
    old_square = tl.load(square + slot, mask=free, other=0.0).to(WIDE)
    new_mean = tl.fma(keep_mean, grad - old_mean, old_mean)
    new_square = tl.fma(keep_square, tl.fma(grad, grad, -old_square), old_square)
    tl.store(mean + slot, new_mean, mask=free)
    tl.store(square + slot, new_square, mask=free)
    return rate * new_mean / (tl.sqrt(new_square) / root_bias + epsilon)


@_jit
def adamw(
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
    n,
    length,
    rate,
    sigma_rate,
    root_bias,
    keep_mean,
    keep_square,
    epsilon,
    decay,
    alpha,
    cap,
    floor,
    seed,
    step,
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A step of AdamW, where free."""
    start, at, _, free = _places(fixed, n, BLOCK)
    slot, free = _slots(offsets, free, length)
    noise = _noise(seed, step, start, BLOCK)
    mu, sigma, grad_mu, grad_sigma = _gradients(
        free_mu, free_sigma, grad_w, scale, at, free, noise, alpha, cap, floor, WIDE
    )
    mu = tl.fma(-decay, mu, mu)
    mu = mu - _adam_step(
        mean_mu,
        square_mu,
        grad_mu,
        slot,
        free,
        rate,
        root_bias,
        keep_mean,
        keep_square,
        epsilon,
        WIDE,
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
    tl.store(free_mu + at, mu, mask=free)
    tl.store(free_sigma + at, _floored(sigma, floor), mask=free)
