"""LSQ+: LSQ with a learned offset and better starting values (Bhalgat et al., 2020, arXiv 2004.09576).

Weights are symmetric: LSQ's own quantiser, other starting steps. Activations have a learned offset.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.errors import WeightError
from pwfn.lab.quantisers.channels import along, by_channel, shared_count
from pwfn.lab.quantisers.lsq import (
    SMALLEST_STEP,
    Codes,
    LsqQuantiser,
    gradient_scale,
    signed_codes,
    unsigned_codes,
)
from pwfn.lab.quantisers.slopes import with_slopes

_CUTS = tuple(
    (below / 20, above / 20) for below in range(0, 20, 2) for above in range(0, 20, 2) if below + above < 20
)
"""Shares of the range of the activations that a start leaves out below and above."""
_REFINED = 5
"""So many of the best starts are refined."""
_MOST_REFITS = 50


def initial_step(weight: Tensor, bits: int, axis: int | None = None) -> Tensor:
    """The weights' first step, ``s = max(|mu - 3 sigma|, |mu + 3 sigma|) / 2^(b-1)``.

    Mean and standard deviation are the layer's, or with ``axis`` each channel's own.

    >>> initial_step(torch.tensor([1.0, 3.0]), bits=3).item()  # mu = 2, sigma = 1
    1.25
    """
    rows = by_channel(weight, axis).detach()
    mu, sigma = rows.mean(dim=1), rows.std(dim=1, correction=0)
    widest = torch.maximum((mu - 3 * sigma).abs(), (mu + 3 * sigma).abs())
    step = (widest / -signed_codes(bits).low).clamp(min=SMALLEST_STEP)
    return step[0] if axis is None else step


@torch.no_grad()
def initial_step_and_offset(batch: Tensor, codes: Codes, axis: int | None = None) -> tuple[Tensor, Tensor]:
    """The activations' first ``s, beta = argmin sum (x_hat - x)^2``: one pair, or one per channel.

    The starts are ``s = (max - min) / (Q_P + Q_N)`` and ``beta = min + Q_N s`` on the whole range and on
    parts of it. The best few are refined: with the codes held, s and beta are a straight line's least
    squares; with those held, the nearest codes are best; the error only falls.

    >>> step, offset = initial_step_and_offset(torch.tensor([-0.5, 0.0, 1.0, 0.5]), unsigned_codes(2))
    >>> step.item(), offset.item()
    (0.5, -0.5)
    """
    pairs = [_fitted(row, codes) for row in by_channel(batch, axis).double()]
    step = torch.stack([pair[0] for pair in pairs]).to(batch.dtype)
    offset = torch.stack([pair[1] for pair in pairs]).to(batch.dtype)
    return (step[0], offset[0]) if axis is None else (step, offset)


class _Row:
    """Sorted values and their running sums: an error takes ``2^k`` look-ups, not a pass over the values."""

    def __init__(self, x: Tensor, codes: Codes) -> None:
        self.x = x.sort().values
        self.sums = F.pad(self.x.cumsum(0), (1, 0))
        self.squares = self.x.square().sum()
        self.codes = torch.arange(codes.low, codes.high + 1, dtype=x.dtype, device=x.device)

    def members(self, step: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """How many values each code has, and their sum."""
        borders = torch.searchsorted(self.x, (self.codes[:-1] + 0.5) * step + offset)
        borders = F.pad(F.pad(borders, (1, 0)), (0, 1), value=len(self.x))
        return borders.diff(), self.sums[borders].diff()

    def error(self, pair: tuple[Tensor, Tensor]) -> float:
        """``sum (x_hat - x)^2 = sum x^2 - 2 sum_c x_hat_c sum_c x + sum_c n_c x_hat_c^2``."""
        counts, sums = self.members(*pair)
        values = self.codes * pair[0] + pair[1]
        return float(self.squares - 2 * (values * sums).sum() + (counts * values.square()).sum())

    def line(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The least-squares step and offset for the codes that a step and offset give."""
        counts, sums = self.members(*pair)
        mean_code = (counts * self.codes).sum() / len(self.x)
        spread = self.codes - mean_code
        variance = (counts * spread.square()).sum()
        if variance == 0:  # one code for all: no line goes through it
            return pair
        step = ((spread * sums).sum() / variance).clamp(min=SMALLEST_STEP)
        return step, self.sums[-1] / len(self.x) - step * mean_code


def _fitted(x: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
    """Step and offset of the least squared error found for one row."""
    mean = x.mean()
    row = _Row(x - mean, codes)  # about 0, where sums of squares keep their digits
    low, width = row.x[0], row.x[-1] - row.x[0]

    def start(below: float, above: float) -> tuple[Tensor, Tensor]:
        step = (width * (1 - below - above) / (codes.high - codes.low)).clamp(min=SMALLEST_STEP)
        return step, low + below * width - codes.low * step

    def refined(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        for _ in range(_MOST_REFITS):
            refit = row.line(pair)
            if not row.error(refit) < row.error(pair):
                break
            pair = refit
        return pair

    starts = sorted((start(below, above) for below, above in _CUTS), key=row.error)
    step, offset = min((refined(pair) for pair in starts[:_REFINED]), key=row.error)
    return step, offset + mean


def quantise(
    x: Tensor, step: Tensor, offset: Tensor, codes: Codes, axis: int | None = None, scale: float = 1.0
) -> Tensor:
    """``round(clip((x - beta) / s, -Q_N, Q_P)) s + beta``, with LSQ+'s gradients.

    With ``u = (x - beta) / s`` and ``g`` the ``scale`` of the gradients of step and offset:

    - d out / d x = 1 where ``-Q_N < u < Q_P``, else 0;
    - d out / d s = g (round(u) - u) there, ``-g Q_N`` below and ``g Q_P`` above;
    - d out / d beta = 0 there, ``g`` elsewhere.

    >>> x = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
    >>> s, beta = torch.tensor(0.5, requires_grad=True), torch.tensor(-0.25, requires_grad=True)
    >>> y = quantise(x, s, beta, unsigned_codes(2))
    >>> y.tolist()
    [-0.25, -0.25, 1.25]
    >>> y.sum().backward()
    >>> x.grad.tolist(), s.grad.item(), beta.grad.item()  # 0 + (0 - 0.5) + 3;  1 + 0 + 1
    ([0.0, 1.0, 0.0], 2.5, 2.0)
    """
    s = along(step.detach().clamp(min=SMALLEST_STEP), x, axis)
    beta = along(offset.detach(), x, axis)
    u = (x.detach() - beta) / s
    code = u.clamp(codes.low, codes.high).round()
    inside = (u > codes.low) & (u < codes.high)
    by_step = torch.where(inside, code - u, code)
    scaled_step, scaled_offset = along(step * scale, x, axis), along(offset * scale, x, axis)
    return with_slopes(code * s + beta, (x, inside), (scaled_step, by_step), (scaled_offset, ~inside))


class LsqPlusQuantiser(nn.Module):
    """An activation tensor's quantiser: its codes are fixed, its step and offset are learned.

    >>> quantiser = LsqPlusQuantiser.for_activations(torch.tensor([[-0.5, 0.0], [1.0, 0.5]]), bits=2)
    >>> quantiser.codebook().tolist()
    [-0.5, 0.0, 0.5, 1.0]
    """

    def __init__(self, step: Tensor, offset: Tensor, codes: Codes, axis: int | None = None) -> None:
        super().__init__()
        self.step = nn.Parameter(step.detach().clone())
        self.offset = nn.Parameter(offset.detach().clone())
        self.codes = codes
        self.axis = axis

    @staticmethod
    def for_weights(weight: Tensor, bits: int, axis: int | None = None) -> LsqQuantiser:
        """LSQ's quantiser from LSQ+'s starting step, or steps: one per channel along ``axis``."""
        return LsqQuantiser(initial_step(weight, bits, axis), signed_codes(bits), axis)

    @classmethod
    def for_activations(cls, batch: Tensor, bits: int, axis: int | None = None) -> LsqPlusQuantiser:
        """Unsigned codes with an offset; step and offset from a first batch of activations."""
        if axis is not None and axis % batch.dim() == 0:
            raise WeightError("axis 0 of the activations is the batch: allowed are the axes behind it")
        codes = unsigned_codes(bits)
        step, offset = initial_step_and_offset(batch, codes, axis)
        return cls(step, offset, codes, axis)

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor; see :func:`quantise`."""
        scale = gradient_scale(shared_count(x, self.axis, batched=True), self.codes)
        return quantise(x, self.step, self.offset, self.codes, self.axis, scale)

    @torch.no_grad()
    def codebook(self) -> Tensor:
        """Every value the output can take, ascending: ``2^k`` of them, or a row of them per channel."""
        codes = torch.arange(self.codes.low, self.codes.high + 1, device=self.step.device)
        values = codes.to(self.step) * self.step.clamp(min=SMALLEST_STEP).unsqueeze(-1)
        return values + self.offset.unsqueeze(-1)
