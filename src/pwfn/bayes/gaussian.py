"""Gaussian weights: every compressed weight is N(mu, sigma), and more and more of them are fixed.

net = GaussianNetwork(model)
net.tolerate(loss)                      # posterior.init = "tolerance": sigma by what the network tolerates
for fraction in PAPER_FRACTIONS:
    ...                                 # any loop, any optimiser: net(x), net.penalty()
    net.fix(fraction)
compressed = net.finish()
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from pwfn.bayes import kernels
from pwfn.bayes.kernels.reference import SIGMA_FLOOR
from pwfn.bayes.method import DataProbe, Method, WeightState, register
from pwfn.bayes.network import check_finite
from pwfn.bayes.sigma import root_mean_square, starting_sigma, tolerated_sigma
from pwfn.config import Config, SigmaInit
from pwfn.errors import WeightError
from pwfn.file.compressed import Compressed
from pwfn.fixing.fix_round import fix_round
from pwfn.fixing.record import FixRecord, FixStep, Move, relative_moves
from pwfn.layout import held, untouched


@register("pwfn")
class GaussianNetwork(Method):
    """Any eager model with its convolution and linear weights as independent Gaussians.

    In training mode every forward pass draws ``w = mu + sigma * eps``. In evaluation mode it uses the
    means: before any training the output equals the model's own, bit for bit. The model given is not
    changed; the copy's other parameters (BatchNorm, tokens, …) are trained along.

    The default ``posterior.init = "tolerance"`` needs data. Until :meth:`tolerate` is called, sigma is
    ``posterior.rms_fraction`` times the root mean square of all weights. By default sigma is not trained.

    A fixed weight lives in a buffer, not in a parameter: no optimiser can move it. ``mu`` and ``sigma`` are
    the current vectors; ``free_mu`` and ``free_sigma`` are the trained parameters behind them.

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
    has_posterior = True
    graph_safe = False  # seed and number of a draw are not tensors

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config)
        self.records: list[FixRecord] = []
        self._noise: bool | None = None
        self._generator: torch.Generator | None = None
        self._at: tuple[int, int] | None = None
        self._shares = False
        mu = self.layout.gather(model)
        self.free_mu = nn.Parameter(mu)
        self.free_sigma = nn.Parameter(starting_sigma(mu, self.layout, self.settings.posterior))
        self.register_buffer("fixed", torch.zeros_like(mu, dtype=torch.bool))
        self.register_buffer("fixed_mu", torch.zeros_like(mu))
        self.register_buffer("fixed_sigma", torch.zeros_like(mu))

    def __repr__(self) -> str:
        fixed = int(self.fixed.sum())
        return f"GaussianNetwork({type(self.model).__name__}, {self.layout.size:,} weights, {fixed:,} fixed)"

    @property
    def mu(self) -> Tensor:
        """The mean of every weight."""
        return torch.where(self.fixed, self.fixed_mu, _whole(self.free_mu))

    @property
    def sigma(self) -> Tensor:
        """The standard deviation of every weight; at least 2^-30 for a free one."""
        return torch.where(self.fixed, self._fixed_sigmas(), self._floored())

    def start(self, probe: DataProbe) -> None:
        """With ``posterior.init = "tolerance"``, find sigma by the loss on a few batches."""
        if self.settings.posterior.init is SigmaInit.TOLERANCE:
            self.tolerate(probe.loss)

    @torch.no_grad()
    def tolerate(self, loss: Callable[[], float]) -> None:
        """Set sigma to the noise at which the loss has risen by ``posterior.tolerance``.

        One value for all free weights; see :func:`pwfn.bayes.sigma.tolerated_sigma`. ``loss`` is the mean
        training loss of this network, or another cost of the noise, on the same batches with the same noise
        at every call. ``compress`` calls this for you.

        >>> net = GaussianNetwork(nn.Linear(3, 1), Config().override({"posterior.tolerance": 0.25}))
        >>> net.tolerate(lambda: net.sigma[0].item() ** 2)
        >>> abs(net.sigma[0].item() - 0.5) < 0.005
        True
        """

        def place(sigma: float) -> None:
            value = max(sigma, SIGMA_FLOOR)
            if self.free_sigma.dim():
                self.free_sigma.masked_fill_(~self.fixed, value)
            else:
                self.free_sigma.fill_(value)

        def of(sigma: float) -> float:
            place(sigma)
            return loss()

        place(tolerated_sigma(root_mean_square(self.free_mu), self.settings.posterior.tolerance, of))

    def weights(self) -> dict[str, Tensor]:
        """The weights of one pass by name: a draw in training mode, else the means."""
        return self.layout.views(self._vector())

    @contextmanager
    def sampling(
        self,
        on: bool = True,
        generator: torch.Generator | None = None,
        *,
        at: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Within the block: draw weights (``on``) or use the means, in either mode.

        The noise comes from torch's random state, from a generator, or from ``at``, a seed and a step
        number, which give the same noise every time.

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

    @property
    def penalty_strength(self) -> float:
        """``posterior.alpha``, or 0 where sigma is not trained."""
        return 0.0 if self.settings.training.sigma_learning_rate is None else self.settings.posterior.alpha

    def penalty(self) -> Tensor:
        """The regulariser, ``alpha * sum_i max(0, S - sigma_i)`` over the free weights (paper, eq. 3).

        Zero where sigma is not trained (``training.sigma_learning_rate = "off"``).
        """
        short = torch.relu(self.settings.posterior.cap - _whole(self.free_sigma))
        return self.penalty_strength * short.masked_fill(self.fixed, 0).sum()

    def fix(self, fraction: float) -> FixRecord:
        """Fix weights until ``ceil(N * fraction)`` of them are; see :func:`pwfn.fix_round`."""
        check_finite(self.mu.detach(), self.layout, "mean of")
        check_finite(self.sigma.detach(), self.layout, "sigma of")
        return self._fix(fraction, 1.0, self.settings.fixing.sweep)

    def _fix(self, fraction: float, delta: float, sweep: float | None) -> FixRecord:
        rule, b = self.settings.fixing.rule, self.settings.fixing.grid_exponent
        vectors = self.mu.detach(), self.sigma, self.fixed
        result = fix_round(*vectors, fraction, rule=rule, b=b, delta=delta, sweep=sweep)
        new = result.fixed & ~self.fixed
        moves = relative_moves(self.mu.detach()[new], result.mu[new])
        self.fixed_mu.copy_(torch.where(new, result.mu, self.fixed_mu))
        sigmas = torch.where(new, result.sigma, self._fixed_sigmas())
        self.fixed.copy_(result.fixed)
        if self.free_sigma.dim():
            self.fixed_sigma.copy_(sigmas)
        else:
            self.fixed_sigma = sigmas[self.fixed]
        self.records.append(FixRecord(fraction, int(self.fixed.sum()), tuple(result.steps), tuple(moves)))
        return self.records[-1]

    def finish(self) -> Compressed:
        """The compressed network, once every weight is fixed."""
        free = int((~self.fixed).sum())
        if free:
            raise WeightError(f"{free:,} of {self.layout.size:,} weights are still free: call fix(1.0) first")
        others = {name: _whole(tensor) for name, tensor in untouched(self.model, self.layout).items()}
        return Compressed.of(self.layout, held(self.layout, self.fixed_mu), self.fixed_sigma, others)

    def rounded(self) -> Self:
        """A copy whose free weights are fixed too, each at its own nearest candidate of the highest order."""
        other = copy.deepcopy(self)
        # With so small a threshold only weights that lie on a candidate are taken before the sweep.
        other._fix(1.0, 2.0**-100, 2.0**-100)
        return other

    def state(self) -> WeightState:
        """Means, sigmas, and which weights are fixed."""
        return WeightState(self.mu.detach(), self.sigma.detach(), self.fixed)

    def parameter_groups(
        self, *, lr: float, weight_decay: float = 0.0, sigma_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Groups for any torch optimiser, with weight decay on everything but sigma.

        ``sigma_lr`` is ``training.sigma_learning_rate`` unless given; zero where that is off. Sigma is part
        of the gradient's norm in any case, so that runs with and without it are clipped alike.
        """
        if sigma_lr is None:
            sigma_lr = self.settings.training.sigma_learning_rate or 0.0
        if sigma_lr and not self.free_sigma.dim():
            raise WeightError(
                f"sigma_lr is {sigma_lr} for a sigma that is one constant since share_storage: set "
                "training.sigma_learning_rate in the network's config, or train before share_storage"
            )
        others = [p for p in self.parameters() if p is not self.free_sigma]
        return [
            {"params": others, "lr": lr, "weight_decay": weight_decay},
            {"params": [self.free_sigma], "lr": sigma_lr, "weight_decay": 0.0},
        ]

    def share_storage(self) -> None:
        """Let fixed and free values share one storage, which saves two vectors; a constant sigma takes none.

        Where sigma is not trained and the same for all free weights, ``free_sigma`` becomes a scalar without
        a gradient, and ``fixed_sigma`` has one entry per fixed weight, in their order.

        From then on only an optimiser that leaves fixed weights alone may be used, as those of
        :mod:`pwfn.bayes.optimizer` do. A copy, a move to another device or a state that is loaded ends it.

        >>> net = GaussianNetwork(nn.Linear(4, 2))
        >>> net.share_storage()
        >>> net.free_sigma.numel(), net.fixed_sigma.numel(), net.sigma.numel()
        (1, 0, 10)
        """
        with torch.no_grad():
            self.free_mu.copy_(self.mu)
            self.fixed_mu = self.free_mu.detach()
            constant = self._constant_sigma()
            if constant is None:
                self.free_sigma.copy_(self.sigma)
                self.fixed_sigma = self.free_sigma.detach()
            else:
                self.fixed_sigma = self._fixed_sigmas()[self.fixed]
                self.free_sigma = nn.Parameter(constant, requires_grad=False)
        self._shares = True

    def _constant_sigma(self) -> Tensor | None:
        """The sigma of all free weights, where it is not trained and they have the same."""
        free = self._floored().detach()
        if not free.dim():
            return free
        if self.settings.training.sigma_learning_rate is not None:
            return None
        free = free[~self.fixed]
        return free[0].clone() if free.numel() and bool((free == free[0]).all()) else None

    def _fixed_sigmas(self) -> Tensor:
        """``fixed_sigma`` with one entry per weight."""
        return self.fixed_sigma if self.free_sigma.dim() else kernels.unpacked(self.fixed_sigma, self.fixed)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Sigma becomes a vector, whatever it was here and is in the state: then any optimiser may follow."""
        if not self.free_sigma.dim():
            self.fixed_sigma = self._fixed_sigmas()
            self.free_sigma = nn.Parameter(self.free_sigma.detach().repeat(self.layout.size))
        names = free, held, mask = [prefix + name for name in ("free_sigma", "fixed_sigma", "fixed")]
        if all(name in state_dict for name in names) and not state_dict[free].dim():
            state_dict[free] = state_dict[free].repeat(state_dict[mask].numel())
            state_dict[held] = kernels.unpacked(state_dict[held], state_dict[mask])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def get_extra_state(self) -> Tensor:
        """The records, as JSON in a tensor of bytes: a state dict of tensors alone fits into safetensors."""
        plain = [
            (r.fraction, r.fixed, [tuple(s) for s in r.steps], [tuple(m) for m in r.moves])
            for r in self.records
        ]
        return torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """The records again, from what ``get_extra_state`` gave."""
        self.records = [
            FixRecord(fraction, fixed, tuple(FixStep(*s) for s in steps), tuple(Move(*m) for m in moves))
            for fraction, fixed, steps, moves in json.loads(bytes(state.tolist()))
        ]

    def _vector(self) -> Tensor:
        """The weights of this forward pass: one draw, or the means."""
        # With shared storage the sigmas of fixed weights lie here too, and the optimiser keeps the floor.
        if self.training and not self._shares:
            # The floor is a projection, not a clamp in the graph: a clamp's gradient is zero below it, and
            # a sigma that one step had carried there would hardly come back.
            with torch.no_grad():
                self.free_sigma.clamp_(min=SIGMA_FLOOR)
        if not (self.training if self._noise is None else self._noise):
            return self.mu
        quiet = self.training and not self.settings.posterior.noise_on_fixed
        if self._at is not None:
            vectors = self.free_mu, self.free_sigma, self.fixed, self.fixed_mu, self._fixed_sigmas()
            seed, step = self._at
            return kernels.draw(*vectors, seed=seed, step=step, noise_on_fixed=not quiet)
        fixed_sigma = torch.zeros_like(self.fixed_mu) if quiet else self._fixed_sigmas()
        free_sigma = self.free_sigma if self.training else self._floored()
        return kernels.sample(self.mu, torch.where(self.fixed, fixed_sigma, free_sigma), self._generator)

    def _floored(self) -> Tensor:
        # Not clamp_min: autograd would keep free_sigma itself for it, which the next forward pass in
        # training mode projects in place.
        sigma = _whole(self.free_sigma)
        return sigma.masked_fill(sigma < SIGMA_FLOOR, SIGMA_FLOOR)


def _whole(vector: Tensor) -> Tensor:
    """The vector itself, or all of one that ``fully_shard`` has divided; all processes must call this."""
    return vector.full_tensor() if hasattr(vector, "full_tensor") else vector
