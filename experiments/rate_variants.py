"""Other ways to train for the bytes, against the method ``rate``; see docs/method.md.

    make results NAME=rate_short_resnet20

``Noise``: Gaussian noise of constant size instead of rounding, rounded once at the end. ``EachSigma``: the
same with one sigma per weight, learned under the description length. ``Rounds``: more and more of the weights
are fixed, those nearest to a multiple of the step first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pwfn.bayes.grid.rate import RateNetwork
from pwfn.config import Config
from pwfn.fixing.code_length import CodeLength
from pwfn.fixing.record import FixRecord, FixStep

SIGMA = 0.29
"""In steps: the standard deviation of rounding, ``1 / sqrt(12)``."""


class Noise(RateNetwork):
    """Trained under noise of one size, rounded at the end."""

    def weights(self) -> dict[str, Tensor]:
        """A draw in training, rounded otherwise."""
        if not self.training:
            return super().weights()
        return self.layout.views(self.drawn() * self._grid)

    def drawn(self) -> Tensor:
        """The levels with noise."""
        return self.levels + SIGMA * torch.randn_like(self.levels)


class EachSigma(Noise):
    """One sigma per weight, learned: ``loss + lambda / n * sum (-log2 p(w) - log2 sigma)``.

    The second term is the entropy of the noise, up to a constant. Where noise does no harm, sigma grows.
    """

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config)
        self.log_sigma = nn.Parameter(torch.full_like(self.levels, math.log(SIGMA)))

    def drawn(self) -> Tensor:
        """The levels with noise of their own size."""
        return self.levels + self.log_sigma.exp() * torch.randn_like(self.levels)

    def penalty(self) -> Tensor:
        """The expected code length less the entropy of the noise."""
        price = self.price / self.layout.size
        bits = CodeLength(self.lengths, self.contexts).bits(self.drawn())
        return price * (bits - self.log_sigma / math.log(2)).sum()


class Rounds(RateNetwork):
    """Fixed in rounds, nearest first; a fixed weight does not move."""

    mask: Tensor
    values: Tensor

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config)
        self.register_buffer("mask", torch.zeros_like(self.levels, dtype=torch.bool))
        self.register_buffer("values", torch.zeros_like(self.levels))

    def weights(self) -> dict[str, Tensor]:
        """Fixed weights as they are."""
        with torch.no_grad():  # whatever the optimiser did to them
            self.levels.copy_(torch.where(self.mask, self.values, self.levels))
        return super().weights()

    def _meet_target(self) -> None:
        """As they are: a wider zero bin or another step would move weights that are fixed."""
        self.levels.copy_(self.levels.round())

    def fix(self, fraction: float) -> FixRecord:
        """Those nearest to a whole number."""
        if fraction == 1.0:
            self.levels.data.copy_(torch.where(self.mask, self.values, self.levels))
            return super().fix(1.0)
        with torch.no_grad():
            distance = (self.levels - self.levels.round()).abs().masked_fill(self.mask, -1.0)
            count = math.ceil(fraction * self.layout.size)
            chosen = torch.zeros_like(self.mask)
            chosen[distance.argsort(stable=True)[:count]] = True
            self.mask.copy_(chosen)
            self.values.copy_(torch.where(chosen, self.levels.round(), 0.0))
        return FixRecord(fraction, count, (FixStep(math.nan, 0, 0.0, count),), ())
