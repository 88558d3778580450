"""LSQ+: LSQ with other starting values and a learned offset (Bhalgat et al., 2020, arXiv 2004.09576).

Weights are symmetric and have LSQ's own quantiser. Activations have a learned offset as well.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.lab.quantisers.lsq import SMALLEST_STEP, Codes, channel_rows

_CUTS = tuple((a / 20, b / 20) for a in range(0, 20, 2) for b in range(0, 20, 2) if a + b < 20)
"""Fractions of the range of the activations that a starting point leaves out below and above."""
_REFINED = 5
"""How many of the best starting points are refined."""
_MAX_REFITS = 50


def initial_step(weight: Tensor, bits: int, axis: int | None = None) -> Tensor:
    """Starting step of weights, ``s = max(|mu - 3 sigma|, |mu + 3 sigma|) / 2^(b-1)``.

    Mean and standard deviation are those of the tensor, or of each channel along ``axis``.

    >>> initial_step(torch.tensor([1.0, 3.0]), bits=3).item()  # mu = 2, sigma = 1
    1.25
    """
    rows = channel_rows(weight.detach(), axis)
    mu, sigma = rows.mean(dim=1), rows.std(dim=1, correction=0)
    widest = torch.maximum((mu - 3 * sigma).abs(), (mu + 3 * sigma).abs())
    step = (widest / -Codes.of(bits, signed=True).low).clamp(min=SMALLEST_STEP)
    return step[0] if axis is None else step


@torch.no_grad()
def initial_step_and_offset(batch: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Starting values of activations with unsigned codes, ``s, beta = argmin sum (x_hat - x)^2``.

    The search starts from ``s = (max - min) / Q_P`` and ``beta = min``, for the whole range and for parts
    of it, and refines the best few. With the codes held, s and beta are the least-squares line; with s
    and beta held, the nearest codes are optimal. The error never rises.

    >>> step, offset = initial_step_and_offset(torch.tensor([-0.5, 0.0, 1.0, 0.5]), bits=2)
    >>> step.item(), offset.item()
    (0.5, -0.5)
    """
    codes = Codes.of(bits, signed=False)
    x = channel_rows(batch, None)[0].double()
    mean = x.mean()
    values = _SortedValues(x - mean, codes)  # around 0, where sums of squares keep their digits
    low, width = values.x[0], values.x[-1] - values.x[0]

    def start(below: float, above: float) -> tuple[Tensor, Tensor]:
        step = (width * (1 - below - above) / codes.high).clamp(min=SMALLEST_STEP)
        return step, low + below * width

    def refined(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        for _ in range(_MAX_REFITS):
            refit = values.refit(pair)
            if not values.error(refit) < values.error(pair):
                break
            pair = refit
        return pair

    starts = sorted((start(below, above) for below, above in _CUTS), key=values.error)
    step, offset = min((refined(pair) for pair in starts[:_REFINED]), key=values.error)
    return step.to(batch.dtype), (offset + mean).to(batch.dtype)


class _SortedValues:
    """Values with their prefix sums: an error then costs ``2^k`` look-ups instead of a pass."""

    def __init__(self, x: Tensor, codes: Codes) -> None:
        self.x = x.sort().values
        self.sums = F.pad(self.x.cumsum(0), (1, 0))
        self.squares = self.x.square().sum()
        self.codes = torch.arange(codes.low, codes.high + 1, dtype=x.dtype, device=x.device)

    def by_code(self, step: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Number and sum of the values that are rounded to each code."""
        borders = torch.searchsorted(self.x, (self.codes[:-1] + 0.5) * step + offset)
        borders = F.pad(F.pad(borders, (1, 0)), (0, 1), value=len(self.x))
        return borders.diff(), self.sums[borders].diff()

    def error(self, pair: tuple[Tensor, Tensor]) -> float:
        """``sum (x_hat - x)^2 = sum x^2 - 2 sum_c x_hat_c sum_c x + sum_c n_c x_hat_c^2``."""
        counts, sums = self.by_code(*pair)
        values = self.codes * pair[0] + pair[1]
        return float(self.squares - 2 * (values * sums).sum() + (counts * values.square()).sum())

    def refit(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Least-squares step and offset for the codes that a step and an offset give."""
        counts, sums = self.by_code(*pair)
        mean_code = (counts * self.codes).sum() / len(self.x)
        spread = self.codes - mean_code
        variance = (counts * spread.square()).sum()
        if variance == 0:  # all values have one code, which determines no line
            return pair
        step = ((spread * sums).sum() / variance).clamp(min=SMALLEST_STEP)
        return step, self.sums[-1] / len(self.x) - step * mean_code
