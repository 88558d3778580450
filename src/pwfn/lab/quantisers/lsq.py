"""LSQ: a uniform quantiser with a learned step (Esser et al., ICLR 2020, arXiv 1902.08153)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

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
