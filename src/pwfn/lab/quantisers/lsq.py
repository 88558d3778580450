"""LSQ: a uniform quantiser with a learned step (Esser et al., ICLR 2020, arXiv 1902.08153)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pwfn.errors import ConfigError, WeightError
from pwfn.lab.quantisers.channels import along, by_channel, shared_count
from pwfn.lab.quantisers.slopes import with_slopes

SMALLEST_STEP = 1e-8
"""A learned step counts as at least this: at 0 nothing could be divided, below 0 the range would flip."""


class Codes(NamedTuple):
    """The whole numbers ``low, low + 1, …, high`` that a value is rounded to (-Q_N and Q_P)."""

    low: int
    high: int


def signed_codes(bits: int) -> Codes:
    """``-2^(k-1) … 2^(k-1) - 1``, for weights.

    >>> signed_codes(3)
    Codes(low=-4, high=3)
    """
    checked_bits(bits)
    return Codes(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def unsigned_codes(bits: int) -> Codes:
    """``0 … 2^k - 1``, for activations behind a ReLU.

    >>> unsigned_codes(3)
    Codes(low=0, high=7)
    """
    checked_bits(bits)
    return Codes(0, 2**bits - 1)


def checked_bits(bits: int) -> int:
    """``bits``, if a quantiser can have as many: 2 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ConfigError(f"bits is {bits!r}: allowed are whole numbers from 2 to 8")
    return bits


def initial_step(x: Tensor, codes: Codes, axis: int | None = None) -> Tensor:
    """The step to start from, ``s = 2 mean|x| / sqrt(Q_P)`` (section 2.1): one, or one per channel.

    >>> initial_step(torch.tensor([[1.0, -1.0], [3.0, 5.0]]), Codes(-8, 4)).item()
    2.5
    >>> initial_step(torch.tensor([[1.0, -1.0], [3.0, 5.0]]), Codes(-8, 4), axis=0).tolist()
    [1.0, 4.0]
    """
    rows = by_channel(x, axis)
    step = 2 * rows.detach().abs().mean(dim=1) / math.sqrt(codes.high)
    step = step.clamp(min=SMALLEST_STEP)
    return step[0] if axis is None else step


def gradient_scale(count: int, codes: Codes) -> float:
    """``g = 1 / sqrt(count Q_P)`` (section 2.2), with as many weights, or features, as share the step.

    >>> gradient_scale(25, Codes(-8, 4))
    0.1
    """
    return 1 / math.sqrt(count * codes.high)


def quantise(x: Tensor, step: Tensor, codes: Codes, axis: int | None = None, scale: float = 1.0) -> Tensor:
    """``round(clip(x / s, -Q_N, Q_P)) s`` (eqs. 1 and 2), with LSQ's gradients.

    With ``u = x / s`` and ``g`` the ``scale`` of the step's gradient:

    - d out / d x = 1 where ``-Q_N < u < Q_P``, else 0 (eq. 5);
    - d out / d s = g (round(u) - u) there, ``-g Q_N`` below and ``g Q_P`` above (eq. 3).

    >>> x, s = torch.tensor([-9.0, -0.75, 1.5], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    >>> y = quantise(x, s, signed_codes(3))
    >>> y.tolist()
    [-2.0, -1.0, 1.5]
    >>> y.sum().backward()
    >>> x.grad.tolist(), s.grad.item()  # (-4) + (-2 + 1.5) + (3), for u = -18, -1.5, 3
    ([0.0, 1.0, 0.0], -1.5)
    """
    s = along(step.detach().clamp(min=SMALLEST_STEP), x, axis)
    u = x.detach() / s
    code = u.clamp(codes.low, codes.high).round()
    inside = (u > codes.low) & (u < codes.high)
    by_step = torch.where(inside, code - u, code)
    return with_slopes(code * s, (x, inside), (along(step * scale, x, axis), by_step))


class LsqQuantiser(nn.Module):
    """One tensor's quantiser: its codes are fixed, its step or steps are learned.

    ``batched`` says that the tensor's first axis is the batch, which a step's share of the gradient
    does not count. Make one with :meth:`for_weights` or :meth:`for_activations`.

    >>> quantiser = LsqQuantiser.for_weights(torch.tensor([0.5, -0.5, 1.0, -2.0]), bits=2)
    >>> quantiser.step.item(), quantiser.codebook().tolist()
    (2.0, [-4.0, -2.0, 0.0, 2.0])
    """

    def __init__(self, step: Tensor, codes: Codes, axis: int | None = None, batched: bool = False) -> None:
        super().__init__()
        self.step = nn.Parameter(step.detach().clone())
        self.codes = codes
        self.axis = axis
        self.batched = batched

    @classmethod
    def for_weights(cls, weight: Tensor, bits: int, axis: int | None = None) -> LsqQuantiser:
        """Signed; the step, or one per channel along ``axis``, from the weights."""
        codes = signed_codes(bits)
        return cls(initial_step(weight, codes, axis), codes, axis)

    @classmethod
    def for_activations(
        cls, batch: Tensor, bits: int, axis: int | None = None, signed: bool = False
    ) -> LsqQuantiser:
        """Unsigned unless told; the step from a first batch of activations."""
        codes = signed_codes(bits) if signed else unsigned_codes(bits)
        if axis is not None and axis % batch.dim() == 0:
            raise WeightError("axis 0 of the activations is the batch: allowed are the axes behind it")
        return cls(initial_step(batch, codes, axis), codes, axis, batched=True)

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor; see :func:`quantise`."""
        scale = gradient_scale(shared_count(x, self.axis, self.batched), self.codes)
        return quantise(x, self.step, self.codes, self.axis, scale)

    @torch.no_grad()
    def codebook(self, weight: Tensor | None = None) -> Tensor:
        """Every value the output can take, ascending: ``2^k`` of them, or a row of them per channel.

        It depends on the step alone: the weight, which other quantisers need, is not looked at.
        """
        codes = torch.arange(self.codes.low, self.codes.high + 1, device=self.step.device)
        return codes.to(self.step) * self.step.clamp(min=SMALLEST_STEP).unsqueeze(-1)
