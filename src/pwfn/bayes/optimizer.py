"""Optimisers over the flat vectors: one pass draws the weights of a step, one pass updates mu and sigma.

They are torch optimisers, so that schedulers and state dicts work as usual. They take the same steps, up
to rounding, as torch's own optimiser with ``net.penalty()``, in fewer passes over the vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn.bayes import kernels
from pwfn.bayes.distributed import Distributed, MeanGradient
from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.method import BETAS, MOMENTUM, Method, fused, on_device, torch_optimizer
from pwfn.bayes.network import tensors_of
from pwfn.config import OptimizerName, Precision, TrainingConfig
from pwfn.errors import WeightError


class FlatOptions(TypedDict, total=False):
    """See :class:`FlatSGD`."""

    clip_norm: float | None
    dtype: torch.dtype | None
    seed: int
    draws: int
    distributed: Distributed | None


class _Flat(torch.optim.Optimizer):
    """What the flat optimisers share: the weights of a step are leaves of the graph, drawn in one pass.

    ``seed`` and ``count`` are in the first parameter group. Steps are counted on the device, so that a
    recorded step counts itself. The mask of fixed weights must not change as long as an instance is used.
    """

    narrower: torch.dtype | None = None  # to draw in from the second step on, if autocast allows it

    def _prepare(
        self,
        net: GaussianNetwork,
        *names: str,
        clip_norm: float | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        draws: int = 1,
        distributed: Distributed | None = None,
    ) -> None:
        """``names``: of the vectors in the state of mu and of sigma."""
        self.net, self.clip_norm, self.draws, self._names = net, clip_norm, draws, names
        self.distributed = distributed or Distributed(net.device)
        trains_sigma = self.param_groups[1]["lr"] != 0
        several = draws * self.distributed.world > 1
        if several and trains_sigma:
            # Sigma's gradient is g * eps: that of several draws is not the mean of g, times anything.
            raise WeightError("a step of several draws cannot train sigma: use a torch optimiser")
        if any(entry.dtype != net.free_mu.dtype for entry in net.layout.entries):
            raise WeightError("the model's weights have several types: use a torch optimiser")
        self.param_groups[0] |= {"seed": seed, "count": 0}
        self._norm_seed = self.distributed.first(lambda: seed)
        self._step_supports_amp_scaling = False  # a loss scaler decides itself whether a step is taken
        self._count = torch.zeros((), dtype=torch.int64, device=net.device)
        self._mask, self._version = net.fixed, net.fixed._version
        self._offsets, self._free = kernels.free_offsets(net.fixed), int((~net.fixed).sum())
        self._casts: _Casts | None = None
        self._values = torch.empty_like(net.free_mu.detach(), dtype=dtype)
        self.leaves = [nn.Parameter(piece) for piece in net.layout.pieces(self._values)]
        self._mean = MeanGradient(self.leaves, self.distributed) if several else None
        self.others = [p for p in net.model.parameters() if p.requires_grad]
        for parameter, count in ((net.free_mu, self._free), (net.free_sigma, trains_sigma * self._free)):
            self.state[parameter] = {
                name: torch.zeros(count, dtype=parameter.dtype, device=parameter.device) for name in names
            }

    @contextmanager
    def drawn(self, number: int = 0) -> Iterator[None]:
        """Within the block the network has draw ``number`` of this step, and backward finds its weights."""
        net = self.net
        if self._mean is not None:
            self._mean.expect(last=number == self.draws - 1)
        self._check_mask()
        if self._casts is not None:
            self._narrow_if_cast(self._casts)
        kernels.draw_(
            *(self._values, net.free_mu, net.free_sigma, net.fixed, net.fixed_mu, net.fixed_sigma),
            seed=self.param_groups[0]["seed"],
            step=0,
            ahead=self._draw(number),
            noise_on_fixed=net.settings.posterior.noise_on_fixed,
            offsets=None if net.free_sigma.dim() else self._offsets,
        )
        if self.narrower is not None:
            self._casts = _Casts(self.leaves, self.narrower)
        with net.placed(self.leaves), self._casts or nullcontext():
            yield

    def gather(self) -> None:
        """After the draws of a step: all gradients become their means over batches and processes."""
        mu = self.net.free_mu
        mu.grad = self.collect() if self._mean is None else self._mean.take().to(mu.dtype)
        self.distributed.average_gradients_(self.others)

    @property
    def trained(self) -> list[nn.Parameter]:
        """What backward leaves gradients with: the pieces of a draw, and the uncompressed parameters."""
        return [*self.leaves, *self.others]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for parameter in (*self.trained, self.net.free_mu):
            parameter.grad = None
        if self._mean is not None:
            self._mean.forget()

    @torch.no_grad()
    def step(self) -> Tensor:  # type: ignore[override]  # torch's takes a closure
        """One step from the gradients that backward left; returns their norm before clipping."""
        mu = self.net.free_mu
        self._check_mask()
        if mu.grad is None and self._mean is not None:
            self.gather()
        gradient = self.collect() if mu.grad is None else mu.grad
        mu.grad = None  # torch's own step is for the uncompressed parameters
        norm, scale = self._norm_and_scale(gradient)
        trained = self.net.free_mu, self.net.free_sigma
        state = [self.state[parameter][name] for name in self._names for parameter in trained]
        self._update(*trained, *state, gradient, self.net.fixed, self._offsets, scale)
        super().step()
        self._count += 1
        return norm

    def _update(self, *vectors: Tensor) -> None:
        """Update mu and sigma: the optimiser's own kernel."""
        raise NotImplementedError

    @torch.no_grad()
    def collect(self) -> Tensor:
        """The gradients of the leaves as one vector, which is not kept: memory is scarce in forward."""
        gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        unused = any(gradient is None for gradient in gradients)  # a layer that this step did not use
        whole = torch.zeros_like(self._values) if unused else torch.empty_like(self._values)
        parts = torch._C._nn.unflatten_dense_tensors(whole, list(self.leaves))
        found = [(part, g) for part, g in zip(parts, gradients, strict=True) if g is not None]
        if found:
            torch._foreach_copy_([part for part, _ in found], [g for _, g in found])
        return whole

    def _norm_and_scale(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of the task's gradient over mu, sigma and the others; the factor that clips it.

        The gradients of the other parameters are scaled in place.
        """
        at: dict[str, Any] = {"seed": self._norm_seed, "step": 0, "ahead": self._draw(0)}
        squared = kernels.grad_squared_norm(gradient, self.net.fixed, **at)
        others = [p.grad for p in self.others if p.grad is not None]
        if others:
            total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(others)))
            squared = torch.addcmul(squared, total, total)
        norm = squared.sqrt().float()
        if self.clip_norm is None:
            return norm, torch.ones_like(norm)
        scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
        if others:
            torch._foreach_mul_(others, scale)
        return norm, scale

    def _draw(self, number: int) -> Tensor:
        """The number of a draw, over all steps."""
        return self._count if self.draws == 1 else self._count * self.draws + number

    def _check_mask(self) -> None:
        """An optimiser's state belongs to one mask; with another it would belong to other weights."""
        fixed = self.net.fixed
        if fixed is not self._mask or fixed._version != self._version:
            raise WeightError(
                "weights were fixed, loaded or moved since the optimiser was made: make a new one after that"
            )

    def _narrow_if_cast(self, casts: _Casts) -> None:
        """Where autocast has cast every weight, draw them in its type: the same numbers, in one pass less."""
        if casts.all:
            self._values = self._values.to(casts.dtype)
            for leaf, piece in zip(self.leaves, self.net.layout.pieces(self._values), strict=True):
                leaf.data = piece
        self.narrower = self._casts = None

    def _numbers(self) -> dict[str, Any]:
        """The numbers of an update; learning rates that are tensors stay on the device."""
        first, second = self.param_groups[:2]
        rates = [first["lr"], second["lr"]]
        known = not any(isinstance(rate, Tensor) for rate in rates)
        device = self._count.device
        return {
            "lr": rates[0] if known else 0.0,
            "sigma_lr": rates[1] if known else 0.0,
            "rates": None if known else torch.stack([torch.as_tensor(r, device=device) for r in rates]),
            "weight_decay": first["weight_decay"],
            "alpha": self.net.penalty_strength,
            "cap": self.net.settings.posterior.cap,
            "seed": first["seed"],
            "step": 0,
            "ahead": self._count,
        }

    def state_dict(self) -> dict[str, Any]:
        """As of any optimiser; reads the number of the step from the device."""
        self.param_groups[0]["count"] = int(self._count)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` gave; for the same mask, so load the network's state before."""
        super().load_state_dict(state_dict)
        self._count.fill_(self.param_groups[0]["count"])
        for parameter in (self.net.free_mu, self.net.free_sigma):
            for name, vector in self.state[parameter].items():
                constant = parameter is self.net.free_sigma and not vector.numel()
                if vector.dim() == 1 and vector.numel() != self._free and not constant:
                    raise WeightError(
                        f"{name} belongs to {vector.numel():,} free weights, and the network has "
                        f"{self._free:,}: load the network's state first, then make the optimiser"
                    )


class FlatSGD(_Flat, torch.optim.SGD):  # type: ignore[misc]  # step takes no closure
    """SGD with momentum: ``m = momentum * m + g``, ``p = p - lr * m``; see :func:`pwfn.bayes.kernels.sgd_`.

    Args:
        net: the network.
        lr, sigma_lr: for mu and the uncompressed parameters, and for sigma. ``sigma_lr`` is
            ``training.sigma_learning_rate`` unless given; 0 where that is off.
        momentum, weight_decay: weight decay is on everything but sigma.
        clip_norm: largest norm of the task's gradient, over mu, sigma and the uncompressed parameters.
        dtype: of the weights in the forward pass; mu's own unless given.
        seed: of the noise; a draw is a function of (seed, number of the draw).
        draws: batches per step, each with a draw of its own; their losses should be divided by their number.
        distributed: the processes of the run, each with a seed of its own. A step of several draws needs a
            constant sigma, which then enters the norm with the noise of the first draw of the first process.

    >>> net = GaussianNetwork(nn.Linear(4, 2)).train()
    >>> optimizer = FlatSGD(net, lr=0.1)
    >>> with optimizer.drawn():
    ...     net(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step().item() > 0
    True
    """

    def __init__(
        self,
        net: GaussianNetwork,
        *,
        lr: float,
        sigma_lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[FlatOptions],
    ) -> None:
        groups = net.parameter_groups(lr=lr, sigma_lr=sigma_lr, weight_decay=weight_decay)
        torch.optim.SGD.__init__(self, groups, lr=lr, momentum=momentum, fused=fused(groups))
        self._prepare(net, "momentum", **options)

    def _update(self, *vectors: Tensor) -> None:
        kernels.sgd_(*vectors, momentum=self.param_groups[0]["momentum"], **self._numbers())


class FlatAdamW(_Flat, torch.optim.AdamW):  # type: ignore[misc]  # as above
    """AdamW, weight decay on everything but sigma; see :func:`pwfn.bayes.kernels.adamw_` and FlatSGD."""

    def __init__(
        self,
        net: GaussianNetwork,
        *,
        lr: float,
        sigma_lr: float | None = None,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.0,
        **options: Unpack[FlatOptions],
    ) -> None:
        groups = net.parameter_groups(lr=lr, sigma_lr=sigma_lr, weight_decay=weight_decay)
        torch.optim.AdamW.__init__(self, groups, lr=lr, betas=betas, **on_device(groups))
        self._prepare(net, "mean", "square", **options)
        for parameter in (net.free_mu, net.free_sigma):
            self.state[parameter]["step"] = torch.zeros(())  # torch expects one with every state

    def _update(self, *vectors: Tensor) -> None:
        beta1, beta2 = self.param_groups[0]["betas"]
        kernels.adamw_(*vectors, beta1=beta1, beta2=beta2, count=1, **self._numbers())


class _Casts(TorchDispatchMode):
    """Within the block, watch whether all weights are cast to a type, and are used in no other way.

    A part of a model may run without autocast, or not in every step, or have operations that autocast
    leaves in float32.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self._used_otherwise = dtype, False
        self._memory = [range(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]
        self._cast: set[range] = set()

    @property
    def all(self) -> bool:
        """Whether every weight was cast, and none was used otherwise."""
        return not self._used_otherwise and len(self._cast) == len(self._memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation, then carry it out."""
        kwargs = kwargs or {}
        starts = [x.data_ptr() for x in tensors_of((args, kwargs)) if x.layout is torch.strided]
        weights = [memory for memory in self._memory for start in starts if start in memory]
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self.dtype:
            self._cast.update(weights)
        elif weights:
            returned = [result.alias_info for result in func._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in returned)
            self._used_otherwise = self._used_otherwise or not is_view
        return func(*args, **kwargs)


def optimizer_for(
    net: Method, config: TrainingConfig, seed: int, distributed: Distributed | None = None
) -> torch.optim.Optimizer:
    """A fresh optimiser as the settings say; ``seed``: of the noise.

    A flat one where the network is Gaussian and of one type, unless several draws per step train sigma; else
    torch's own.
    """
    world = 1 if distributed is None else distributed.world
    plain = all(entry.dtype == net.layout.dtype for entry in net.layout.entries)
    plain &= config.precision is not Precision.FP16 or net.layout.dtype is not torch.float16
    one = world * config.accumulate == 1 or not config.sigma_learning_rate
    if isinstance(net, GaussianNetwork) and one and plain:
        net.share_storage()
        given: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        given |= {"clip_norm": config.clip_norm, "seed": seed}
        given |= {"draws": config.accumulate, "distributed": distributed}
        adamw = config.optimizer is OptimizerName.ADAMW
        optimizer = FlatAdamW(net, **given) if adamw else FlatSGD(net, momentum=MOMENTUM, **given)
        # Autocast leaves float64 as it is.
        if config.precision is Precision.BF16 and net.free_mu.dtype == torch.float32:
            optimizer.narrower = torch.bfloat16
        return optimizer
    return torch_optimizer(net, config)
