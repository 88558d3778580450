"""LSQ: uniform quantisers with a learned step (Esser et al., ICLR 2020, arXiv 1902.08153)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pwfn.lab.quantisers.gradients import with_gradients

SMALLEST_STEP = 1e-8
"""Lower limit of a learned step: 0 cannot divide, and a negative step would swap the ends of the range."""


class Codes(NamedTuple):
    """The integers ``low, low + 1, …, high`` that values are rounded to: ``-Q_N`` and ``Q_P``."""

    low: int
    high: int

    @classmethod
    def of(cls, bits: int, *, signed: bool) -> Codes:
        """``-2^(k-1) … 2^(k-1) - 1`` if signed, else ``0 … 2^k - 1`` (section 2).

        >>> Codes.of(3, signed=True), Codes.of(3, signed=False)
        (Codes(low=-4, high=3), Codes(low=0, high=7))
        """
        half = 2 ** (bits - 1)
        return cls(-half, half - 1) if signed else cls(0, 2 * half - 1)


def channel_rows(x: Tensor, axis: int | None) -> Tensor:
    """``x`` as a matrix with one row per channel along ``axis``; a single row if ``axis`` is None.

    >>> channel_rows(torch.arange(6).view(2, 3), axis=1).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return x.reshape(1, -1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)


def initial_step(x: Tensor, codes: Codes, axis: int | None = None) -> Tensor:
    """Starting step ``s = 2 mean|x| / sqrt(Q_P)`` (section 2.1); one per channel if ``axis`` is given.

    >>> initial_step(torch.tensor([[1.0, -1.0], [3.0, 5.0]]), Codes(-8, 4)).item()
    2.5
    >>> initial_step(torch.tensor([[1.0, -1.0], [3.0, 5.0]]), Codes(-8, 4), axis=0).tolist()
    [1.0, 4.0]
    """
    means = channel_rows(x.detach(), axis).abs().mean(dim=1)
    step = (2 * means / math.sqrt(codes.high)).clamp(min=SMALLEST_STEP)
    return step[0] if axis is None else step


def gradient_scale(count: int, codes: Codes) -> float:
    """``g = 1 / sqrt(count Q_P)`` (section 2.2), with ``count`` the number of elements that share the step.

    >>> gradient_scale(25, Codes(-8, 4))
    0.1
    """
    return 1 / math.sqrt(count * codes.high)


def quantise(
    x: Tensor,
    step: Tensor,
    codes: Codes,
    axis: int | None = None,
    scale: float = 1.0,
    offset: Tensor | None = None,
) -> Tensor:
    """``round(clip((x - beta) / s, -Q_N, Q_P)) s + beta`` with LSQ's gradients; beta is LSQ+'s offset, or 0.

    With ``u = (x - beta) / s`` and ``g`` the ``scale`` of the gradients of step and offset
    (Esser et al., eqs. 1, 2, 3 and 5; Bhalgat et al., 2020, for beta):

    - d out / d x = 1 where ``-Q_N < u < Q_P``, else 0;
    - d out / d s = g (round(u) - u) there, ``-g Q_N`` below and ``g Q_P`` above;
    - d out / d beta = 0 there, ``g`` elsewhere.

    >>> x, s = torch.tensor([-9.0, -0.75, 1.5], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    >>> y = quantise(x, s, Codes(-4, 3))
    >>> y.tolist()
    [-2.0, -1.0, 1.5]
    >>> y.sum().backward()
    >>> x.grad.tolist(), s.grad.item()  # u = -18, -1.5, 3: -4 + (-2 + 1.5) + 3
    ([0.0, 1.0, 0.0], -1.5)
    >>> beta = torch.tensor(-0.25, requires_grad=True)
    >>> quantise(torch.tensor([-9.0, 0.0, 9.0]), s, Codes(0, 3), offset=beta).sum().backward()
    >>> beta.grad.item()  # two of the three are clipped
    2.0
    """
    s = _along(step.detach().clamp(min=SMALLEST_STEP), x, axis)
    beta = None if offset is None else _along(offset.detach(), x, axis)
    u = (x.detach() if beta is None else x.detach() - beta) / s
    code = u.clamp(codes.low, codes.high).round()
    inside = (u > codes.low) & (u < codes.high)
    by_step = _along(step * scale, x, axis), torch.where(inside, code - u, code)
    if beta is None or offset is None:
        return with_gradients(code * s, (x, inside), by_step)
    return with_gradients(code * s + beta, (x, inside), by_step, (_along(offset * scale, x, axis), ~inside))


def _along(vector: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """One number per channel, shaped to broadcast against ``x`` along ``axis``."""
    if axis is None:
        return vector
    shape = [1] * x.dim()
    shape[axis] = x.shape[axis]
    return vector.reshape(shape)


class LsqQuantiser(nn.Module):
    """Quantiser of one tensor, with a learned step (and offset) per tensor or per channel along ``axis``.

    ``batched`` tensors have the batch as their first axis, which the gradient scale does not count.

    >>> quantiser = LsqQuantiser.for_weights(torch.tensor([0.5, -0.5, 1.0, -2.0]), bits=2)
    >>> quantiser.step.item(), quantiser(torch.tensor([-9.0, 1.5, 9.0])).tolist()
    (2.0, [-4.0, 2.0, 2.0])
    """

    def __init__(
        self,
        step: Tensor,
        codes: Codes,
        axis: int | None = None,
        *,
        batched: bool = False,
        offset: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.step = nn.Parameter(step.detach().clone())
        self.offset = None if offset is None else nn.Parameter(offset.detach().clone())
        self.codes, self.axis, self.batched = codes, axis, batched

    @classmethod
    def for_weights(cls, weight: Tensor, bits: int, axis: int | None = None) -> LsqQuantiser:
        """Signed, with the starting step of the weights: one, or one per channel along ``axis``."""
        codes = Codes.of(bits, signed=True)
        return cls(initial_step(weight, codes, axis), codes, axis)

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor; see :func:`quantise`."""
        steps = self.step.numel() * (len(x) if self.batched else 1)
        scale = gradient_scale(max(x.numel() // max(steps, 1), 1), self.codes)
        return quantise(x, self.step, self.codes, self.axis, scale, self.offset)


class PartsQuantiser(nn.Module):
    """LSQ with one step per part, for an axis of the weight cut into equal parts: attention heads.

    >>> quantiser = PartsQuantiser(torch.tensor([[1.0], [-1.0], [2.0], [-6.0]]), bits=2, axis=0, parts=2)
    >>> quantiser.lsq.step.tolist()  # 2 mean|w| / sqrt(Q_P) with Q_P = 1
    [2.0, 8.0]
    """

    def __init__(self, weight: Tensor, bits: int, axis: int, parts: int) -> None:
        super().__init__()
        self.axis, self.parts = axis, parts
        self.lsq = LsqQuantiser.for_weights(weight.unflatten(axis, (parts, -1)), bits, axis)

    def forward(self, weight: Tensor) -> Tensor:
        """The quantised weight."""
        quantised: Tensor = self.lsq(weight.unflatten(self.axis, (self.parts, -1)))
        return quantised.flatten(self.axis, self.axis + 1)


class Part(NamedTuple):
    """A quantiser and the number of its weights, which follow those of the part before it."""

    quantiser: LsqQuantiser
    size: int


def parts_of(quantisers: Iterable[nn.Module], sizes: Iterable[int]) -> list[Part] | None:
    """The parts of a vector; None unless all are LSQ's and the weights of each step are contiguous.

    >>> len(parts_of([LsqQuantiser.for_weights(torch.ones(2, 3), bits=4, axis=0)], [6]))
    1
    >>> parts_of([LsqQuantiser.for_weights(torch.ones(2, 3), bits=4, axis=1)], [6]) is None
    True
    """
    found = []
    for quantiser, size in zip(quantisers, sizes, strict=True):
        own = quantiser.lsq if isinstance(quantiser, PartsQuantiser) else quantiser
        if not isinstance(own, LsqQuantiser) or own.axis not in (None, 0):
            return None
        found.append(Part(own, size))
    return found


class LsqTogether:
    """The output of each quantiser for its part of a vector, all at once, with the same gradients.

    ``round(clip(w / s, -Q_N, Q_P)) s``, with s the step of the part or channel that the weight is in.
    Values and the gradient of w equal those of the quantisers bit for bit; the gradient of a step is
    summed in float64. The steps stay parameters of the quantisers. A call has fixed shapes and never
    waits for the device, so it can be captured in a CUDA graph.

    >>> one = LsqQuantiser.for_weights(torch.tensor([0.5, -0.5, 1.0, -2.0]), bits=2)
    >>> other = LsqQuantiser.for_weights(torch.tensor([[3.0], [-5.0]]), bits=2, axis=0)
    >>> both = LsqTogether([Part(one, 4), Part(other, 2)], torch.device("cpu"))
    >>> both(torch.tensor([0.5, -0.5, 1.0, -2.0, 6.0, -11.0])).tolist()
    [0.0, 0.0, 0.0, -2.0, 6.0, -10.0]
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.device = device
        self._quantisers = [part.quantiser for part in parts]
        codes = [quantiser.codes for quantiser in self._quantisers]
        counts = torch.tensor([quantiser.step.numel() for quantiser in self._quantisers])
        lengths = [part.size // part.quantiser.step.numel() for part in parts]
        scales = [gradient_scale(length, own) for length, own in zip(lengths, codes, strict=True)]

        def by_step(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

        dtype = self._quantisers[0].step.dtype
        self._lengths = by_step(lengths, torch.int64)
        self._scales = by_step(scales, torch.float64)
        steps = torch.arange(len(self._lengths), dtype=torch.int32, device=device)
        self._which = steps.repeat_interleave(self._lengths)
        self._low = by_step([own.low for own in codes], dtype).repeat_interleave(self._lengths)
        self._high = by_step([own.high for own in codes], dtype).repeat_interleave(self._lengths)

    def __call__(self, weights: Tensor) -> Tensor:
        """The quantised vector."""
        steps = torch.cat([quantiser.step.reshape(-1) for quantiser in self._quantisers])
        result: Tensor = _Together.apply(weights, steps, self)  # type: ignore[no-untyped-call]
        return result


class _Together(Function):
    """:class:`LsqTogether`; see :func:`quantise` for the formulas."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, steps: Tensor, of: LsqTogether) -> Tensor:
        s = steps.clamp(min=SMALLEST_STEP).index_select(0, of._which)
        u = weights / s
        code = torch.minimum(torch.maximum(u, of._low), of._high).round_()
        inside = (u > of._low) & (u < of._high)
        ctx.of = of
        ctx.save_for_backward(inside, torch.where(inside, code - u, code))
        return code.mul_(s).add_(0.0)  # -0.0 becomes 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inside, by_step = ctx.saved_tensors
        for_weights = above * inside if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_weights, None, None
        of: LsqTogether = ctx.of
        # unsafe=True skips a check of the lengths that would wait for the device.
        sums = torch.segment_reduce(
            (above * by_step).double(), "sum", lengths=of._lengths, axis=0, unsafe=True
        )
        return for_weights, (sums * of._scales).to(above.dtype), None
