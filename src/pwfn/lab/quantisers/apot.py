"""APoT: levels that are sums of powers of two (Li, Dong & Wang, ICLR 2020, arXiv 1909.13144)."""

from __future__ import annotations

import itertools
from enum import Enum

import torch
from torch import Tensor, nn

from pwfn.errors import ConfigError, WeightError
from pwfn.lab.quantisers.lsq import checked_bits
from pwfn.lab.quantisers.slopes import with_slopes

SMALLEST_ALPHA = 1e-6
"""A learned alpha counts as at least this: at 0 nothing could be divided, below 0 signs would flip."""
_SMALLEST_SIGMA = 1e-8


class AlphaGradient(Enum):
    """Which elements move the clip point alpha."""

    ALL = "all"
    """Clipped ones by their sign, the others by their rounding: the paper's reparameterised clipping."""
    CLIPPED = "clipped"
    """Clipped ones alone, as in PACT, which the paper improves on."""


def terms(bits: int) -> tuple[tuple[float, ...], ...]:
    """The powers of two that each term of an unsigned sum of ``bits`` bits may be, besides 0.

    Even, ``bits = 2 n``: n terms of 2 bits, term i from ``{0, 2^-i, 2^-(i+n), 2^-(i+2n)}``, i = 1 … n.
    Odd, ``bits = 2 n + 1``: n such terms and one of a single bit that slips in before their last power:
    term i from ``{0, 2^-i, 2^-(i+n), 2^-(i+2n+1)}`` and the last from ``{0, 2^-(2n+1)}``.
    No power is in two terms, so the ``2^bits`` sums all differ.

    >>> terms(2)
    ((0.5, 0.25, 0.125),)
    >>> terms(3)
    ((0.5, 0.25, 0.0625), (0.125,))
    >>> terms(4)
    ((0.5, 0.125, 0.03125), (0.25, 0.0625, 0.015625))
    """
    n, odd = divmod(bits, 2)
    pairs = tuple((2.0**-i, 2.0 ** -(i + n), 2.0 ** -(i + 2 * n + odd)) for i in range(1, n + 1))
    return (*pairs, (2.0 ** -(2 * n + 1),)) if odd else pairs


def magnitudes(bits: int) -> Tensor:
    """The levels of ``bits`` bits without a sign, ascending from 0 to 1, as float64: sums of :func:`terms`.

    The sums are divided by the largest, ``1 / gamma``, which is no power of two when there are two
    terms or more; alpha takes that factor up.

    >>> (magnitudes(3) * 5 / 8).tolist()
    [0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625]
    """
    sums = sorted(sum(choice) for choice in itertools.product(*((0.0, *term) for term in terms(bits))))
    return torch.tensor(sums, dtype=torch.float64) / sums[-1]


def weight_magnitudes(bits: int) -> Tensor:
    """The absolute levels of weights: one of the ``bits`` is the sign, so ``2^bits - 1`` values in all.

    >>> weight_magnitudes(2).tolist(), weight_magnitudes(3).tolist()
    ([0.0, 1.0], [0.0, 0.25, 0.5, 1.0])
    """
    return magnitudes(checked_bits(bits) - 1)


def activation_magnitudes(bits: int) -> Tensor:
    """The levels of activations, which have no sign: ``2^bits`` values.

    >>> activation_magnitudes(2).tolist()
    [0.0, 0.25, 0.5, 1.0]
    """
    return magnitudes(checked_bits(bits))


def nearest(u: Tensor, levels: Tensor) -> Tensor:
    """Each element's nearest level by absolute value, its sign kept; half way goes to the smaller.

    >>> nearest(torch.tensor([-0.4, 0.375, 0.8, 7.0]), weight_magnitudes(3)).tolist()
    [-0.5, 0.25, 1.0, 1.0]
    """
    u, levels = u.detach(), levels.to(u)
    half_way = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(u.abs(), half_way)].copysign(u)


@torch.no_grad()
def fitted_alpha(x: Tensor, levels: Tensor, signed: bool, candidates: int = 100) -> Tensor:
    """Of ``max|x| i / candidates``, the alpha with the least squared error: a start from the data.

    >>> fitted_alpha(torch.tensor([2.0, 1.0, 0.5, 0.0]), activation_magnitudes(2), signed=False).item()
    2.0
    """
    if x.numel() == 0:
        raise WeightError(f"a tensor of shape {tuple(x.shape)} is empty: there is nothing to quantise")
    top = (x.abs() if signed else x).max().clamp(min=SMALLEST_ALPHA)
    tried = [top * i / candidates for i in range(candidates, 0, -1)]
    # All are measured before the host asks for one: it waits once.
    errors = torch.stack([(quantise(x, alpha, levels, signed) - x).square().sum() for alpha in tried])
    found = errors.tolist()
    return tried[found.index(min(found))]


def normalised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(w - mu) / sigma`` and sigma, the layer's own; no gradient goes through the two.

    >>> u, sigma = normalised(torch.tensor([1.0, 3.0]))
    >>> u.tolist(), sigma.item()
    ([-1.0, 1.0], 1.0)
    """
    if weight.numel() == 0:
        raise WeightError(f"a tensor of shape {tuple(weight.shape)} is empty: there is nothing to quantise")
    variance, mean = torch.var_mean(weight.detach(), correction=0)
    sigma = variance.sqrt().clamp(min=_SMALLEST_SIGMA)
    return (weight - mean) / sigma, sigma


def quantise(
    x: Tensor,
    alpha: Tensor,
    levels: Tensor,
    signed: bool,
    *,
    alpha_gradient: AlphaGradient = AlphaGradient.ALL,
    pass_clipped: bool = False,
) -> Tensor:
    """``alpha P(clip(x / alpha, -1, 1))``, P the projection to the nearest level; from 0 if unsigned.

    With ``u = x / alpha`` the gradients are:

    - d out / d x = 1 where x is not clipped, else 0, or 1 everywhere with ``pass_clipped``;
    - d out / d alpha = P(u) - u where x is not clipped, or 0 with ``AlphaGradient.CLIPPED``;
      sign(x) where ``|x| > alpha`` (and 0 below 0, if unsigned).

    >>> x, alpha = torch.tensor([-6.0, 0.75, 1.5], requires_grad=True), torch.tensor(2.0, requires_grad=True)
    >>> y = quantise(x, alpha, weight_magnitudes(3), signed=True)
    >>> y.tolist()
    [-2.0, 0.5, 1.0]
    >>> y.sum().backward()
    >>> x.grad.tolist(), alpha.grad.item()  # -1 + (0.25 - 0.375) + (0.5 - 0.75)
    ([0.0, 1.0, 1.0], -1.375)
    """
    low = -1.0 if signed else 0.0
    limit = alpha.detach().clamp(min=SMALLEST_ALPHA)
    u = x.detach() / limit
    clipped = u.clamp(low, 1.0)
    level = nearest(clipped, levels)
    inside = clipped == u
    rounding = level - u if alpha_gradient is AlphaGradient.ALL else torch.zeros_like(u)
    by_x = torch.ones_like(inside) if pass_clipped else inside
    return with_slopes(level * limit, (x, by_x), (alpha, torch.where(inside, rounding, level)))


class ApotQuantiser(nn.Module):
    """One tensor's quantiser: its levels are fixed, its clip point alpha is learned.

    Weights are normalised first, and the result is multiplied by their sigma unless
    ``restore_scale`` is off; in front of a batch norm the two train alike, elsewhere only the
    first keeps the scale of the network. Make one with :meth:`for_weights` or :meth:`for_activations`.

    >>> weight = torch.tensor([-1.0, 1.0])
    >>> quantiser = ApotQuantiser.for_weights(weight, bits=3, alpha=3.0)
    >>> quantiser(weight).tolist()
    [-0.75, 0.75]
    >>> quantiser.codebook(weight).tolist()
    [-3.0, -1.5, -0.75, 0.0, 0.75, 1.5, 3.0]
    """

    levels: Tensor

    def __init__(
        self,
        levels: Tensor,
        alpha: Tensor,
        signed: bool,
        *,
        normalise: bool,
        restore_scale: bool = True,
        alpha_gradient: AlphaGradient = AlphaGradient.ALL,
        pass_clipped: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("levels", levels.to(alpha), persistent=False)
        self.alpha = nn.Parameter(alpha.detach().clone())
        self.signed = signed
        self.normalise = normalise
        self.restore_scale = restore_scale
        self.alpha_gradient = alpha_gradient
        self.pass_clipped = pass_clipped

    @classmethod
    def for_weights(
        cls,
        weight: Tensor,
        bits: int,
        axis: int | None = None,
        *,
        alpha: float | None = None,
        restore_scale: bool = True,
        alpha_gradient: AlphaGradient = AlphaGradient.ALL,
        pass_clipped: bool = False,
    ) -> ApotQuantiser:
        """Signed, of normalised weights; alpha, in their standard deviations, is fitted unless given.

        The authors' program starts from 3. ``axis`` must be None: APoT has one codebook per layer.

        >>> quantiser = ApotQuantiser.for_weights(torch.tensor([-2.0, -1.0, 1.0, 2.0]), bits=3)
        >>> round(quantiser.alpha.item(), 6)  # 2 / sqrt(2.5): both magnitudes are levels
        1.264911
        """
        levels = weight_magnitudes(bits)
        _refuse(axis)
        u, _ = normalised(weight.detach())
        return cls(
            levels,
            fitted_alpha(u, levels, signed=True) if alpha is None else u.new_tensor(alpha),
            True,
            normalise=True,
            restore_scale=restore_scale,
            alpha_gradient=alpha_gradient,
            pass_clipped=pass_clipped,
        )

    @classmethod
    def for_activations(
        cls,
        batch: Tensor,
        bits: int,
        axis: int | None = None,
        signed: bool = False,
        *,
        alpha: float | None = None,
        alpha_gradient: AlphaGradient = AlphaGradient.ALL,
    ) -> ApotQuantiser:
        """Unsigned unless told; alpha is fitted to a first batch of activations unless given.

        The authors' program starts from 8. ``axis`` must be None: APoT has one codebook per layer.
        """
        levels = weight_magnitudes(bits) if signed else activation_magnitudes(bits)
        _refuse(axis)
        start = fitted_alpha(batch, levels, signed) if alpha is None else batch.new_tensor(alpha)
        return cls(levels, start, signed, normalise=False, alpha_gradient=alpha_gradient)

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor; see :func:`quantise` and :func:`normalised`."""
        sigma: Tensor | None = None
        if self.normalise:
            x, sigma = normalised(x)
        out = quantise(
            x,
            self.alpha,
            self.levels,
            self.signed,
            alpha_gradient=self.alpha_gradient,
            pass_clipped=self.pass_clipped,
        )
        return out * sigma if sigma is not None and self.restore_scale else out

    @torch.no_grad()
    def codebook(self, weight: Tensor | None = None) -> Tensor:
        """Every value the output can take, ascending; the weights are needed for their sigma."""
        values = torch.cat((-self.levels.flip(0)[:-1], self.levels)) if self.signed else self.levels
        values = values * self.alpha.clamp(min=SMALLEST_ALPHA)
        if not (self.normalise and self.restore_scale):
            return values
        if weight is None:
            raise WeightError("the codebook of normalised weights has their scale: give the weights as well")
        return values * normalised(weight)[1]


def _refuse(axis: int | None) -> None:
    if axis is not None:
        raise ConfigError(f"axis is {axis}: APoT has one codebook per layer, so that None alone is allowed")
