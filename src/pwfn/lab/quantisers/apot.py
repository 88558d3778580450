"""APoT: levels that are sums of powers of two (Li, Dong & Wang, ICLR 2020, arXiv 1909.13144)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from pwfn.lab.quantisers.gradients import with_gradients

SMALLEST_ALPHA = 1e-6
"""Lower limit of a learned alpha: 0 cannot divide, and a negative alpha would flip the signs."""
_SMALLEST_SIGMA = 1e-8
_TRIED = 100  # clip points that a start is chosen from


def terms(bits: int) -> tuple[tuple[float, ...], ...]:
    """The non-zero powers of two that each term of an unsigned sum of ``bits`` bits may be.

    Even, ``bits = 2 n``: n terms of 2 bits, term i from ``{0, 2^-i, 2^-(i+n), 2^-(i+2n)}``, i = 1 … n.
    Odd, ``bits = 2 n + 1``: n such terms and one of a single bit, placed before their last powers:
    term i from ``{0, 2^-i, 2^-(i+n), 2^-(i+2n+1)}``, and the last from ``{0, 2^-(2n+1)}``.
    No power is in two terms, so all ``2^bits`` sums differ.

    >>> terms(2), terms(3)
    (((0.5, 0.25, 0.125),), ((0.5, 0.25, 0.0625), (0.125,)))
    >>> terms(4)
    ((0.5, 0.125, 0.03125), (0.25, 0.0625, 0.015625))
    """
    n, odd = divmod(bits, 2)
    pairs = tuple((2.0**-i, 2.0 ** -(i + n), 2.0 ** -(i + 2 * n + odd)) for i in range(1, n + 1))
    return (*pairs, (2.0 ** -(2 * n + 1),)) if odd else pairs


def levels(bits: int, *, signed: bool) -> Tensor:
    """The absolute levels, ascending from 0 to 1, as float64: sums of :func:`terms` over the largest sum.

    The sign takes one bit: signed levels have ``2^bits - 1`` values in all, unsigned ones ``2^bits``.

    >>> levels(3, signed=True).tolist(), levels(2, signed=False).tolist()
    ([0.0, 0.25, 0.5, 1.0], [0.0, 0.25, 0.5, 1.0])
    >>> (levels(3, signed=False) * 10).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    """
    choices = ((0.0, *term) for term in terms(bits - signed))
    sums = sorted(sum(choice) for choice in itertools.product(*choices))
    return torch.tensor(sums, dtype=torch.float64) / sums[-1]


def nearest(u: Tensor, levels: Tensor) -> Tensor:
    """The level nearest to each absolute value, with the sign of the value; midway, the smaller one.

    >>> nearest(torch.tensor([-0.4, 0.375, 0.8, 7.0]), levels(3, signed=True)).tolist()
    [-0.5, 0.25, 1.0, 1.0]
    """
    u, levels = u.detach(), levels.to(u)
    midpoints = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(u.abs(), midpoints)].copysign(u)


def quantise(x: Tensor, alpha: Tensor, levels: Tensor, signed: bool) -> Tensor:
    """``alpha P(clip(x / alpha, -1, 1))``, P the nearest level; clipped at 0 below if unsigned.

    With ``u = x / alpha`` the gradients are ("reparameterised clipping function" in the paper):

    - d out / d x = 1 where x is not clipped, else 0;
    - d out / d alpha = P(u) - u where x is not clipped, else the level it is clipped to: -1, 0 or 1.

    >>> x, alpha = torch.tensor([-6.0, 0.75, 1.5], requires_grad=True), torch.tensor(2.0, requires_grad=True)
    >>> y = quantise(x, alpha, levels(3, signed=True), signed=True)
    >>> y.tolist()
    [-2.0, 0.5, 1.0]
    >>> y.sum().backward()
    >>> x.grad.tolist(), alpha.grad.item()  # -1 + (0.25 - 0.375) + (0.5 - 0.75)
    ([0.0, 1.0, 1.0], -1.375)
    """
    limit = alpha.detach().clamp(min=SMALLEST_ALPHA)
    u = x.detach() / limit
    clipped = u.clamp(-1.0 if signed else 0.0, 1.0)
    level = nearest(clipped, levels)
    inside = clipped == u
    return with_gradients(level * limit, (x, inside), (alpha, torch.where(inside, level - u, level)))


@torch.no_grad()
def fitted_alpha(x: Tensor, levels: Tensor, signed: bool) -> Tensor:
    """Starting clip point: of ``max|x| i / 100``, i = 1 … 100, the one with the least squared error.

    >>> fitted_alpha(torch.tensor([2.0, 1.0, 0.5, 0.0]), levels(2, signed=False), signed=False).item()
    2.0
    """
    top = (x.abs() if signed else x).max().clamp(min=SMALLEST_ALPHA)
    tried = [top * i / _TRIED for i in range(_TRIED, 0, -1)]
    errors = [(quantise(x, alpha, levels, signed) - x).square().sum() for alpha in tried]
    found = torch.stack(errors).tolist()  # one transfer to the host for all of them
    return tried[found.index(min(found))]


def normalised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(w - mu) / sigma`` and sigma, of the whole tensor (the paper's weight normalisation).

    Autograd treats mu and sigma as constants.

    >>> u, sigma = normalised(torch.tensor([1.0, 3.0]))
    >>> u.tolist(), sigma.item()
    ([-1.0, 1.0], 1.0)
    """
    variance, mean = torch.var_mean(weight.detach(), correction=0)
    sigma = variance.sqrt().clamp(min=_SMALLEST_SIGMA)
    return (weight - mean) / sigma, sigma


class ApotQuantiser(nn.Module):
    """Quantiser of one tensor with fixed levels and a learned clip point alpha.

    With ``normalise``, weights are normalised first, so alpha is in standard deviations, and the result is
    multiplied by their sigma. A batch norm behind the layer absorbs that factor; elsewhere it keeps the
    scale of the network.

    >>> quantiser = ApotQuantiser(levels(3, signed=True), torch.tensor(3.0), signed=True, normalise=True)
    >>> quantiser(torch.tensor([-1.0, 1.0])).tolist()
    [-0.75, 0.75]
    """

    levels: Tensor

    def __init__(self, levels: Tensor, alpha: Tensor, signed: bool, *, normalise: bool = False) -> None:
        super().__init__()
        self.register_buffer("levels", levels.to(alpha), persistent=False)
        self.alpha = nn.Parameter(alpha.detach().clone())
        self.signed, self.normalise = signed, normalise

    @classmethod
    def for_weights(cls, weight: Tensor, bits: int) -> ApotQuantiser:
        """Signed, for normalised weights, with alpha fitted to them.

        >>> quantiser = ApotQuantiser.for_weights(torch.tensor([-2.0, -1.0, 1.0, 2.0]), bits=3)
        >>> round(quantiser.alpha.item(), 6)  # 2 / sqrt(2.5): both magnitudes are levels
        1.264911
        """
        own = levels(bits, signed=True)
        alpha = fitted_alpha(normalised(weight.detach())[0], own, signed=True)
        return cls(own, alpha, signed=True, normalise=True)

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor; see :func:`quantise` and :func:`normalised`."""
        if not self.normalise:
            return quantise(x, self.alpha, self.levels, self.signed)
        u, sigma = normalised(x)
        return quantise(u, self.alpha, self.levels, self.signed) * sigma
