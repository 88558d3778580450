"""Free weights that prefer centres which are in use: popularity with an eye on the length of the code.

With ``n`` weights fixed so far, ``n_c`` of them at the candidate ``c``, the next weight at ``c`` costs

    bits(c) = log2(n / n_c)      where n_c > 0
    bits(c) = log2(n + 1)        for a centre that would be new: a share of one in n + 1

and a weight's cost there is ``D + rate * bits(c)``, with ``D = |mu - c| / sigma`` as ever. Each weight votes
for the candidate of least cost, not for the nearest, and in a sweep goes there, least cost first. What the
most popular candidate takes is by D alone: delta stays what it is, a number of sigmas.

The cheapest candidate depends on sigma, so it is not that of a stretch of the line. But all new centres
cost the same, and only the nearest of them can be the cheapest; those in use are few, and looked at one by
one. So there is no table of weights by candidates here either, but each choice looks at every free weight
once for each centre in use, which takes that many times as long as without a rate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pwfn.config import ClusteringConfig, Rule
from pwfn.fixing.select import Cut, FreeWeights, Near, cut, taken
from pwfn.fixing.unique import unique_counts


class _Prices(NamedTuple):
    """The candidates of an order: the new ones, all of one price, and those in use with a price each."""

    new: Tensor  # their places in the grid, ascending
    new_values: Tensor
    new_ends: Tensor  # of the stretches nearest to each
    new_price: float  # rate * bits
    used: list[tuple[int, float, float]]  # place in the grid, value, price


class _Votes(NamedTuple):
    """The free weights of a block, and the place in the grid that each votes for."""

    block: slice
    at: Tensor
    choice: Tensor


class RatedWeights(FreeWeights):
    """Free weights for a rate above zero."""

    def __init__(self, mu: Tensor, sigma: Tensor, fixed: Tensor, config: ClusteringConfig):
        values, counts = unique_counts(mu[fixed])
        self._held: dict[float, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        self._total = sum(self._held.values())
        self._ballot: list[_Votes] | None = None  # of the grid and the prices as they are
        super().__init__(mu, sigma, fixed, config)

    def bits(self, centre: float) -> float:
        """What one more weight at a centre costs."""
        held = self._held.get(centre, 0)
        return math.log2(self._total / held) if held else math.log2(self._total + 1)

    def most_popular(self, omega: int) -> tuple[float, tuple[float, float]]:
        """The candidate that is cheapest for most weights (the smallest of equals); it has no one stretch."""
        if self._set_grid(omega) or self._ballot is None:
            self._vote()
        self._elected = int(self._votes.argmax())  # the first of equal maxima
        return float(self._grid[self._elected]), (-math.inf, math.inf)

    def admitted(
        self, centre: float, stretch: tuple[float, float], delta: float, needed: int
    ) -> tuple[list[Near], Cut]:
        """As without a rate; by the rule ``nearest`` only weights that voted for the centre."""
        if self._config.rule is not Rule.NEAREST:
            return super().admitted(centre, stretch, delta, needed)
        near = []
        for block, at, choice in self._ballot or ():
            at = at[choice == self._elected]
            if at.numel():
                distance = self._distance(self._mu[block][at], self._sigma[block][at], centre)
                near.append(Near(block, at.to(torch.int32), distance))
        return near, cut([part.distance for part in near], needed, delta)

    def fix(self, near: list[Near], chosen: Cut, centre: float) -> None:
        """As without a rate; the centre is cheaper from then on."""
        self._ballot = None  # which may lie by places of before a compaction, too
        super().fix(near, chosen, centre)
        self._held[centre] = self._held.get(centre, 0) + chosen.length
        self._total += chosen.length

    def sweep(self, needed: int) -> None:
        """Send the ``needed`` weights of least cost each to its cheapest candidate, by prices as they are."""
        self._set_grid(self._config.omega_max)
        prices = self._prices()
        near = []
        for block in self._blocks():
            at = self._free(block)
            if at.numel():
                cost = self._cheapest(self._mu[block][at], self._sigma[block][at], prices)[1]
                near.append(Near(block, at.to(torch.int32), cost))
        grid = self._grid.to(self._mu.device)
        for block, at in taken(near, cut([part.distance for part in near], needed)):
            at = at.long()
            mu, sigma = self._mu[block], self._sigma[block]
            mu[at] = grid[self._cheapest(mu[at], sigma[at], prices)[0]]
            sigma[at] = sigma[at].clamp_max(self._unit / 4)
            self._fixed[block].index_fill_(0, at, True)

    def _discount(self, moved: Tensor) -> None:
        """Nothing: prices have changed, and all vote again."""

    def _vote(self) -> None:
        prices, size = self._prices(), self._grid.numel()
        self._ballot, self._votes = [], np.zeros(size, np.int64)
        for block in self._blocks():
            at = self._free(block)
            if at.numel():
                choice, _ = self._cheapest(self._mu[block][at], self._sigma[block][at], prices)
                self._ballot.append(_Votes(block, at, choice))
                self._votes += torch.bincount(choice, minlength=size).cpu().numpy()

    def _prices(self) -> _Prices:
        rate, values, device = self._config.rate, self._grid.tolist(), self._mu.device
        used = [(k, c, rate * self.bits(c)) for k, c in enumerate(values) if c in self._held]
        new = torch.tensor([k for k, c in enumerate(values) if c not in self._held], dtype=torch.int64)
        kept = self._grid[new]
        ends = self._ends(kept)
        return _Prices(
            new.to(device), kept.to(device), ends.to(device), rate * math.log2(self._total + 1), used
        )

    def _cheapest(self, means: Tensor, sigmas: Tensor, prices: _Prices) -> tuple[Tensor, Tensor]:
        """For each weight the candidate of least cost, of equals the smallest; and the cost, in float64."""
        if prices.new.numel():
            nearest = torch.bucketize(means, prices.new_ends)
            choice = prices.new[nearest]
            cost = self._distance(means, sigmas, prices.new_values[nearest]).double() + prices.new_price
        else:
            choice = torch.zeros_like(means, dtype=torch.int64)
            cost = torch.full_like(means, math.inf, dtype=torch.float64)
        for place, value, price in prices.used:
            here = self._distance(means, sigmas, value).double() + price
            better = (here < cost) | ((here == cost) & (choice > place))
            choice.masked_fill_(better, place)
            cost = torch.where(better, here, cost)
        return choice, cost
