"""Gaussian weights: every compressed weight is N(mu, sigma), and more and more of them are fixed.

net = GaussianNetwork(model)
net.take_tolerated(loss)                # where sigma starts by what the network tolerates
for fraction in PAPER_FRACTIONS:
    ...                                 # any loop, any optimiser: net(x), net.penalty()
    net.fix(fraction)
compressed = net.finish()
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from pwfn.bayes import kernels as ops
from pwfn.bayes.network import WeightNetwork, check_finite
from pwfn.config import Config, PosteriorConfig, SigmaInit
from pwfn.errors import WeightError
from pwfn.file.compressed import Compressed
from pwfn.fixing.codebook import merged
from pwfn.fixing.fix_round import FixRecord, FixStep, Move, fix_round, relative_moves
from pwfn.layout import Layout, held, untouched

SIGMA_FLOOR = 2.0**-30
"""The smallest sigma of a free weight."""

_INITIAL_SCALE = 0.0025
_INITIAL_LARGEST = 0.05
_LEAST_CURVATURE = 1e-30  # so that no weight, be it without any effect, divides by zero


def initial_sigma(weight: Tensor) -> Tensor:
    """Where sigma starts, by relative distance to the powers of two on either side.

    With ``2^x <= |mu| < 2^(x+1)``, ``lo = 2^x``, ``hi = 2^(x+1)``:
    ``d = (|mu| - lo)/lo * (hi - |mu|)/hi``, zero at a power of two and largest between, and
    ``sigma = clamp(0.0025 * d / q75, 2^-30, 0.05)`` with q75 the third quartile of d over the
    tensor. Zero counts as a power of two. Where q75 is zero (a sparse tensor, say), it is taken
    over the positive d; where no d is positive, every sigma is at the floor. Sigma is float32
    for narrower weights, whose own type need not hold 2^-30 or 0.05.

    >>> sigma = initial_sigma(torch.tensor([0.5, 0.75, 0.75, 0.0], dtype=torch.float64))
    >>> sigma.tolist() == [2**-30, 0.0025, 0.0025, 2**-30]
    True
    """
    if not weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
        raise WeightError("initial_sigma needs finite floating-point weights")
    if weight.dtype not in (torch.float32, torch.float64):
        return initial_sigma(weight.float())
    # |mu| = m * 2^e with 1/2 <= m < 1, so lo = 2^(e-1), hi = 2^e and d depends on m alone.
    mantissa = torch.frexp(weight.detach().abs()).mantissa
    d = (2 * mantissa - 1) * (1 - mantissa)
    d = torch.where(mantissa == 0, torch.zeros_like(d), d).reshape(-1)
    quartile = _third_quartile(d)
    if quartile == 0:
        quartile = _third_quartile(d[d > 0])
    if quartile == 0:
        return torch.full_like(weight, SIGMA_FLOOR, requires_grad=False)
    sigma = (_INITIAL_SCALE * d / quartile).clamp(SIGMA_FLOOR, _INITIAL_LARGEST)
    return sigma.view(weight.shape)


def relative_sigma(weight: Tensor, share: float) -> Tensor:
    """Sigma in proportion to the weight, ``sigma = max(share * |mu|, 2^-30)``: WFN's view.

    >>> relative_sigma(torch.tensor([0.5, -2.0, 0.0]), 0.25).tolist() == [0.125, 0.5, 2**-30]
    True
    """
    return (share * weight.detach().abs()).clamp_min(SIGMA_FLOOR)


def curvature_sigma(curvature: Tensor, scale: float, cap: float, *, root: bool = False) -> Tensor:
    """Sigma from the curvature h of the loss, ``clamp(scale / (h + 1e-30), 2^-30, cap)``.

    Noise of spread sigma costs the loss ``h sigma^2 / 2``, and the regulariser gives ``alpha sigma``
    for it: with ``scale = alpha`` this is where the two balance, and where a sigma that learns would
    settle. With ``root``, ``scale / (sqrt(h) + 1e-30)``: the noise of each weight costs the loss the
    same, ``scale^2 / 2``.

    >>> curvature_sigma(torch.tensor([0.0, 0.25, 1.0]), 0.125, 0.375).tolist()
    [0.375, 0.375, 0.125]
    >>> curvature_sigma(torch.tensor([0.0, 0.25, 1.0]), 0.125, 0.375, root=True).tolist()
    [0.375, 0.25, 0.125]
    """
    h = curvature.sqrt() if root else curvature
    return (scale / (h + _LEAST_CURVATURE)).clamp(SIGMA_FLOOR, max(cap, SIGMA_FLOOR))


def _third_quartile(values: Tensor) -> float:
    """Linear interpolation between order statistics; ``torch.quantile`` stops at 16 M values."""
    if values.numel() == 0:
        return 0.0
    position = 0.75 * (values.numel() - 1)
    below = int(position)
    low = float(values.kthvalue(below + 1).values)
    high = float(values.kthvalue(min(below + 2, values.numel())).values)
    return low + (position - below) * (high - low)


class GaussianNetwork(WeightNetwork):
    """Any eager model with its convolution and linear weights as independent Gaussians.

    In training mode every forward pass draws ``w = mu + sigma * eps`` anew; in evaluation mode
    it uses the means, so that before any training the output is the model's own, bit for bit.
    The model given is copied, not changed; the copy's other parameters (BatchNorm, tokens, …)
    are trained along.

    Without data it cannot be known what noise the network tolerates: with ``posterior.init =
    "tolerance"``, which is the default, sigma is that of ``network``, ``posterior.network_sigma`` times
    the root mean square of all weights, until :meth:`take_tolerated` is called. By default sigma does not
    learn: :meth:`penalty` is zero, and an optimiser must be made of :meth:`parameter_groups`, where sigma
    has a learning rate of zero.

    A fixed weight lives in a buffer, not in a parameter: no optimiser, momentum or weight decay
    can move it. ``mu`` and ``sigma`` are the vectors in force (fixed where fixed); ``free_mu``
    and ``free_sigma`` are the trained parameters behind them.

    >>> model = nn.Linear(4, 2)
    >>> net = GaussianNetwork(model).eval()
    >>> x = torch.randn(3, 4)
    >>> torch.equal(net(x), model(x))
    True
    >>> net.fix(1.0).fixed
    10
    >>> net.finish().layout.size
    10
    """

    fixed: Tensor
    fixed_mu: Tensor
    fixed_sigma: Tensor
    is_recordable = False  # the seed and number of a draw are no tensors

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config)
        self.records: list[FixRecord] = []
        self._noise: bool | None = None
        self._generator: torch.Generator | None = None
        self._at: tuple[int, int] | None = None
        self._shares = False
        mu = self.layout.gather(model)
        self.free_mu = nn.Parameter(mu)
        self.free_sigma = nn.Parameter(_starting_sigma(mu, self.layout, self.config.posterior))
        self.register_buffer("fixed", torch.zeros_like(mu, dtype=torch.bool))
        self.register_buffer("fixed_mu", torch.zeros_like(mu))
        self.register_buffer("fixed_sigma", torch.zeros_like(mu))

    @property
    def mu(self) -> Tensor:
        """The mean of every weight."""
        return torch.where(self.fixed, self.fixed_mu, self.free_mu)

    @property
    def sigma(self) -> Tensor:
        """The standard deviation of every weight; at least 2^-30 for a free one."""
        return torch.where(self.fixed, self.fixed_sigma, self._floored())

    def views(self) -> dict[str, Tensor]:
        """The weights of one pass by name: a draw in training mode, else the means."""
        return self.layout.views(self._weights())

    @contextmanager
    def sampling(
        self,
        on: bool = True,
        generator: torch.Generator | None = None,
        *,
        at: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Within the block: draw weights (``on``) or use the means, in either mode.

        The noise is from torch's own random state, from a generator, or that of ``at``, a seed and
        a number of a step, as :func:`pwfn.bayes.kernels.draw` makes it: the same again for the same two.

        >>> net = GaussianNetwork(nn.Linear(4, 2)).eval()
        >>> with net.sampling(generator=torch.Generator().manual_seed(0)):
        ...     draw = net(torch.ones(1, 4))
        >>> torch.equal(draw, net(torch.ones(1, 4)))
        False
        """
        before = self._noise, self._generator, self._at
        self._noise, self._generator, self._at = on, generator, at
        try:
            yield
        finally:
            self._noise, self._generator, self._at = before

    def share_storage(self) -> None:
        """Let fixed values live where the free ones do, which saves two vectors.

        From then on only an optimiser that leaves fixed weights alone may be used (:mod:`pwfn.bayes.optimizer`);
        any other would move them. A copy, or a move to another device, has its own storage again.
        """
        with torch.no_grad():
            self.free_mu.copy_(self.mu)
            self.free_sigma.copy_(self.sigma)
        self.fixed_mu, self.fixed_sigma = self.free_mu.detach(), self.free_sigma.detach()
        self._shares = True

    @torch.no_grad()
    def take_curvature(self, curvature: Tensor) -> None:
        """Let sigma start from the curvature of the loss at every weight; see :func:`curvature_sigma`.

        For ``posterior.init`` of ``curvature`` and ``curvature_root``, which ``compress`` does by itself.
        Unless the settings have a scale, it is the one that gives ``posterior.curvature_sigma`` to the
        median (the lower one) of the curvatures above zero: networks differ in theirs by orders.

        >>> settings = {"posterior.init": "curvature", "posterior.curvature_sigma": 2**-6}
        >>> net = GaussianNetwork(nn.Linear(3, 1), Config().override(settings))
        >>> net.take_curvature(torch.tensor([0.0, 0.5, 1.0, 2.0]))
        >>> net.sigma[1:].tolist() == [2**-5, 2**-6, 2**-7]
        True
        """
        p = self.config.posterior
        if curvature.shape != self.free_sigma.shape or not bool((curvature >= 0).all()):
            raise WeightError("the curvature must be a number of at least 0 for every weight of the layout")
        if not bool(torch.isfinite(curvature).all()) or not bool(curvature.any()):
            raise WeightError(
                "the curvature is zero for every weight, or not finite for one: look for a loss that does "
                "not depend on the weights, or for NaN in the data"
            )
        root = p.init is SigmaInit.CURVATURE_ROOT
        scale = p.curvature_scale
        if scale is None:
            median = float(curvature[curvature > 0].median())
            scale = p.curvature_sigma * (math.sqrt(median) if root else median)
        sigma = curvature_sigma(curvature, scale, p.cap, root=root)
        self.free_sigma.copy_(torch.where(self.fixed, self.free_sigma, sigma))

    @torch.no_grad()
    def take_tolerated(self, loss: Callable[[], float]) -> None:
        """Let sigma start at one value for all: the noise at which the loss has risen by the tolerance.

        ``sigma``, with ``loss(sigma) = loss(0) + posterior.tolerance``, is found by halving its logarithm,
        from 2^-8 to 8 times the root mean square of the weights, to a hundredth. ``loss`` is of the
        network as it is, the same draws at every call. For ``posterior.init = "tolerance"`` or, with
        ``posterior.scaled``, of any other: then weights keep the sigmas that they have but for one factor,
        and it is their root mean square that is found. ``compress`` does it by itself.

        >>> settings = {"posterior.init": "tolerance", "posterior.tolerance": 0.25}
        >>> net = GaussianNetwork(nn.Linear(3, 1), Config().override(settings))
        >>> net.take_tolerated(lambda: net.sigma[0].item() ** 2)
        >>> abs(net.sigma[0].item() - 0.5) < 0.005
        True
        """
        rms = _root_mean_square(self.free_mu)
        if rms == 0:
            raise WeightError("every weight is zero: there is no sigma by what the network tolerates")
        shape: float | Tensor = rms
        if self.config.posterior.init is not SigmaInit.TOLERANCE:
            shape = self.free_sigma * (rms / _root_mean_square(self.free_sigma[~self.fixed]))
        self._set_free_sigma(SIGMA_FLOOR)
        tolerance, quiet = self.config.posterior.tolerance, loss()
        if not math.isfinite(quiet):
            raise WeightError(
                f"the loss is {quiet} without any noise: look for NaN in the data or the weights"
            )
        allowed = quiet + tolerance
        least, most = low, high = -8.0, 3.0  # log2 of sigma / rms
        for _ in range(10):
            middle = (low + high) / 2
            self._set_free_sigma(shape * 2**middle)
            if loss() <= allowed:  # not so where it is nan
                low = middle
            else:
                high = middle
        if low == least or high == most:
            said = "noise of a 256th of" if low == least else "not even noise of eight times"
            raise WeightError(
                f"{said} the weights' size raises the loss by {tolerance:g}, posterior.tolerance: set "
                "another, or another posterior.init"
            )
        self._set_free_sigma(shape * 2**low)

    def _set_free_sigma(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self.free_sigma.copy_(torch.where(self.fixed, self.free_sigma, value.clamp_min(SIGMA_FLOOR)))
        else:
            self.free_sigma.masked_fill_(~self.fixed, max(value, SIGMA_FLOOR))

    def penalty(self) -> Tensor:
        """The regulariser, ``alpha * sum_i max(0, S - sigma_i)`` over the free weights (paper, eq. 3).

        Zero where sigma does not learn (``posterior.learn_sigma``).
        """
        short = torch.relu(self.config.posterior.cap - self.free_sigma)
        return self.config.posterior.strength * short.masked_fill(self.fixed, 0).sum()

    def fix(self, fraction: float) -> FixRecord:
        """Fix weights until ``ceil(N * fraction)`` of them are; see :func:`pwfn.fix_round`.

        The fixing that is the last also sees to ``clustering.most_values``, see :func:`pwfn.fixing.codebook.merged`;
        there weights that were fixed before may move once more. The record is of what was chosen before that.
        """
        before, mask = self.mu.detach(), self.fixed
        check_finite(before, self.layout, "mean of")
        check_finite(self.sigma.detach(), self.layout, "sigma of")
        c = self.config.clustering
        result = fix_round(
            before,
            self.sigma,
            mask,
            fraction,
            rule=c.rule,
            b=c.b,
            multiple=c.multiple,
            delta=c.delta,
            omega_max=c.omega_max,
            rate=c.rate,
            zero_fix=c.zero_fix,
            zero_first=c.zero_first,
            sweep=c.sweep,
            distance_floor=c.distance_floor,
            fixed_sigma=c.fixed_sigma,
        )
        new = result.fixed & ~mask
        moves = relative_moves(before[new], result.mu[new])
        self.fixed_mu.copy_(torch.where(new, result.mu, self.fixed_mu))
        self.fixed_sigma.copy_(torch.where(new, result.sigma, self.fixed_sigma))
        self.fixed.copy_(result.fixed)
        if c.most_values is not None and bool(self.fixed.all()):
            self.fixed_mu.copy_(merged(self.fixed_mu, c.most_values))
        record = FixRecord(fraction, int(self.fixed.sum()), tuple(result.steps), tuple(moves))
        self.records.append(record)
        return record

    def finish(self) -> Compressed:
        """The compressed network, once every weight is fixed."""
        free = int((~self.fixed).sum())
        if free:
            raise WeightError(f"{free:,} of {self.layout.size:,} weights are still free: call fix(1.0) first")
        values = held(self.layout, self.fixed_mu)
        return Compressed.of(self.layout, values, self.fixed_sigma, untouched(self.model, self.layout))

    def rounded(self) -> Self:
        """A copy whose free weights are fixed too, each at its own nearest candidate of the highest order.

        >>> net = GaussianNetwork(nn.Linear(4, 2))
        >>> net.rounded().finish().layout.size, int(net.fixed.sum())
        (10, 0)
        """
        other = copy.deepcopy(self)
        # With so small a threshold only weights that lie on a candidate are taken before the sweep.
        tiny = 2.0**-100
        other.config = self.config.override(
            {"clustering.delta": tiny, "clustering.sweep": tiny, "clustering.zero_first": 0.0}
        )
        other.fix(1.0)
        other.config = self.config
        return other

    def adopt(self, compressed: Compressed) -> None:
        """Take over a finished state: every weight fixed at its centre, and the tensors beside them."""
        self.check_same_layout(compressed)
        sigma = compressed.sigma
        with torch.no_grad():
            self.fixed.fill_(True)
            self.fixed_mu.copy_(compressed.values())
            self.fixed_sigma.copy_(torch.zeros_like(self.fixed_sigma) if sigma is None else sigma)
        self.model.load_state_dict(compressed.untouched, strict=False)

    def parameter_groups(
        self, *, lr: float, sigma_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Groups for any torch optimiser, with weight decay on all but sigma.

        With ``posterior.learn_sigma`` off, sigma's learning rate is zero, whatever is given. It is part
        of the gradient's norm all the same, so that runs with and without are clipped alike.
        """
        others = [p for p in self.parameters() if p is not self.free_sigma]
        return [
            {"params": others, "lr": lr, "weight_decay": weight_decay},
            {
                "params": [self.free_sigma],
                "lr": self.config.posterior.sigma_rate(lr, sigma_lr),
                "weight_decay": 0.0,
            },
        ]

    def get_extra_state(self) -> list[tuple[Any, ...]]:
        """The records, as plain tuples that a weights-only load accepts."""
        return [
            (r.fraction, r.fixed, [tuple(s) for s in r.steps], [tuple(m) for m in r.moves])
            for r in self.records
        ]

    def set_extra_state(self, state: list[tuple[Any, ...]]) -> None:
        """The records again, from what ``get_extra_state`` gave."""
        self.records = [
            FixRecord(fraction, fixed, tuple(FixStep(*s) for s in steps), tuple(Move(*m) for m in moves))
            for fraction, fixed, steps, moves in state
        ]

    def _weights(self) -> Tensor:
        """The vector of this forward pass: one draw, or the means."""
        # Where storage is shared the sigmas of fixed weights lie here too, and the optimiser has the floor.
        if self.training and not self._shares:
            # The floor is a projection, not a clamp in the graph: a clamp's gradient is zero
            # below it, and a sigma that one step had carried there would hardly come back.
            with torch.no_grad():
                self.free_sigma.clamp_(min=SIGMA_FLOOR)
        if not (self.training if self._noise is None else self._noise):
            return self.mu
        quiet = self.training and not self.config.posterior.noise_on_fixed
        if self._at is not None:
            seed, step = self._at
            return ops.draw(
                self.free_mu,
                self.free_sigma,
                self.fixed,
                self.fixed_mu,
                self.fixed_sigma,
                seed=seed,
                step=step,
                noise_on_fixed=not quiet,
            )
        fixed_sigma = torch.zeros_like(self.fixed_sigma) if quiet else self.fixed_sigma
        free_sigma = self.free_sigma if self.training else self._floored()
        return ops.sample(self.mu, torch.where(self.fixed, fixed_sigma, free_sigma), self._generator)

    def _floored(self) -> Tensor:
        # Not clamp_min: autograd would keep free_sigma itself for it, which the next forward
        # pass in training mode projects in place.
        return self.free_sigma.masked_fill(self.free_sigma < SIGMA_FLOOR, SIGMA_FLOOR)


def _root_mean_square(values: Tensor) -> float:
    return math.sqrt(float(values.detach().double().square().mean())) if values.numel() else 0.0


def _starting_sigma(mu: Tensor, layout: Layout, config: PosteriorConfig) -> Tensor:
    if config.init is SigmaInit.CONSTANT:
        return torch.full_like(mu, config.constant_sigma)
    if config.init in (SigmaInit.NETWORK, SigmaInit.TOLERANCE):
        # What is tolerated is not known before data are: it comes by take_tolerated.
        return torch.full_like(mu, max(config.network_sigma * _root_mean_square(mu), SIGMA_FLOOR))
    if config.init is SigmaInit.RELATIVE:
        return relative_sigma(mu, config.relative_sigma)
    # Nor is the curvature, which comes by take_curvature: until then sigma is this.
    return torch.cat([initial_sigma(mu[entry.span]) for entry in layout.entries])
