"""Optimisers of our own for the flat vectors: a step draws in one pass, and steps mu and sigma in another.

optimizer = FlatSGD(net, lr=1e-3, momentum=0.9, clip_norm=1.0)
for x, y in loader:
    with optimizer.drawn():
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    optimizer.step()

The regulariser, the mask, the floor of sigma and the clipping are part of ``step``: the loss has no
``net.penalty()``. Sigma's gradient is never stored, and a fixed weight is neither read nor written, nor
has it any state: an optimiser is of the mask that it was made with, and after ``net.fix`` comes a new one.
Any torch optimiser on ``net.parameter_groups`` does the same in plain steps; a test compares them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pwfn.bayes import kernels as ops
from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.errors import WeightError


class FlatOptimizer(ABC):
    """What the two optimisers share: the weights of a step, the gradient's norm, the other parameters."""

    _vectors: ClassVar[tuple[str, ...]] = ()  # names of the state, each with an entry for a free weight

    def __init__(
        self,
        net: GaussianNetwork,
        *,
        lr: float,
        sigma_lr: float | None = None,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        """Over a network's weights and its uncompressed parameters.

        Args:
            net: the network; one process, one device.
            lr, sigma_lr: for mu and the uncompressed parameters, and for sigma (lr unless given; none
                where ``posterior.learn_sigma`` is off).
            weight_decay: on all but sigma.
            clip_norm: largest norm of the task's gradient, over mu, sigma and the uncompressed.
            dtype: of the weights in the forward pass; mu's own unless given. Under bfloat16
                autocast, bfloat16 saves the casts.
            seed: of the noise; a draw is a function of (seed, number of the step).
        """
        if any(entry.dtype != net.free_mu.dtype for entry in net.layout.entries):
            raise WeightError("the model's weights are of several types: use a torch optimiser")
        self.net, self.seed, self.count = net, seed, 0
        self._rates = lr, net.config.posterior.sigma_rate(lr, sigma_lr)
        self.lr, self.sigma_lr = self._rates
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.others = [p for p in net.model.parameters() if p.requires_grad]
        self._mask, self._version = net.fixed, net.fixed._version
        self._offsets = ops.free_offsets(net.fixed)
        free, mu = int((~net.fixed).sum()), net.free_mu.detach()
        self.state = {name: mu.new_zeros(free) for name in self._vectors}
        self._values = torch.empty_like(mu, dtype=dtype)
        pieces = self._values.split([entry.size for entry in net.layout.entries])
        shapes = [entry.shape for entry in net.layout.entries]
        self._leaves = [nn.Parameter(p.view(shape)) for p, shape in zip(pieces, shapes, strict=True)]
        self._one = torch.ones((), device=mu.device)  # the scale of a gradient that is not clipped
        self._other = self._optimizer_of_others() if self.others else None

    def scale_rates(self, factor: float) -> None:
        """From now on the learning rates are so many times those that the optimiser was made with."""
        self.lr, self.sigma_lr = (factor * rate for rate in self._rates)
        for group in self._other.param_groups if self._other is not None else ():
            group["lr"] = self.lr

    @property
    def trained(self) -> list[nn.Parameter]:
        """What backward leaves gradients with: the pieces of a draw, and the uncompressed parameters."""
        return [*self._leaves, *self.others]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The learning rate, where torch's optimisers have it."""
        return [{"lr": self.lr}]

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Within the block the network has the weights of this step, and backward finds them."""
        net = self.net
        self._check_mask()
        ops.draw_(
            self._values,
            net.free_mu,
            net.free_sigma,
            net.fixed,
            net.fixed_mu,
            net.fixed_sigma,
            seed=self.seed,
            step=self.count,
            noise_on_fixed=net.config.posterior.noise_on_fixed,
        )
        with net.placed(self._leaves):
            yield

    @torch.no_grad()
    def collect(self) -> Tensor:
        """The gradients that backward left with the pieces, as one vector; the pieces' own are dropped.

        It is made here and not kept: in the forward pass, when memory is scarcest, there is no gradient.
        """
        gradients = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        unused = any(gradient is None for gradient in gradients)  # a layer that this step did not go through
        whole = torch.zeros_like(self._values) if unused else torch.empty_like(self._values)
        parts = torch._C._nn.unflatten_dense_tensors(whole, list(self._leaves))
        found = [(part, g) for part, g in zip(parts, gradients, strict=True) if g is not None]
        if found:
            torch._foreach_copy_([part for part, _ in found], [g for _, g in found])
        return whole

    @torch.no_grad()
    def step(self, gradient: Tensor | None = None) -> Tensor:
        """Step, and return the norm of the task's gradient, on the device, before it was clipped.

        The gradient is the one that backward left, or the one given, as :meth:`collect` gave it.
        """
        self._check_mask()
        if gradient is None:
            gradient = self.collect()
        at = {"seed": self.seed, "step": self.count}
        squared = ops.grad_squared_norm(gradient, self.net.fixed, **at)
        others = [p.grad for p in self.others if p.grad is not None]
        if others:
            total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(others)))
            squared = torch.addcmul(squared, total, total)
        norm = squared.sqrt().float()
        scale = self._one
        if self.clip_norm is not None:
            scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
            torch._foreach_mul_(others, scale) if others else None
        self.count += 1
        self._update(gradient, scale, at)
        if self._other is not None:
            self._other.step()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for parameter in self.trained:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that it takes to go on: torch's own classes, and plain values."""
        other = self._other.state_dict() if self._other is not None else None
        return {"count": self.count, "seed": self.seed, "vectors": dict(self.state), "others": other}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave, copied; of the same mask, so load the network before."""
        for name, vector in self.state.items():
            kept = state["vectors"][name]
            if kept.shape != vector.shape:
                raise WeightError(
                    f"{name} is of {kept.numel():,} free weights, and the network has {vector.numel():,}: "
                    "load the network's state first, then make the optimiser, then load its own"
                )
            vector.copy_(kept)
        self.count, self.seed = state["count"], state["seed"]
        if self._other is not None:
            self._other.load_state_dict(state["others"])

    def _check_mask(self) -> None:
        """State lies by the mask; another mask, and it would be that of other weights."""
        fixed = self.net.fixed
        if fixed is not self._mask or fixed._version != self._version:
            raise WeightError(
                "weights were fixed, loaded or moved since the optimiser was made: make a new one after that"
            )

    @property
    def _fused(self) -> bool | None:
        """Torch's one kernel for the uncompressed parameters, where it has one; else its own choice."""
        return all(p.is_cuda and p.is_floating_point() for p in self.others) or None

    @abstractmethod
    def _update(self, gradient: Tensor, scale: Tensor, at: dict[str, int]) -> None:
        """Step mu and sigma."""

    @abstractmethod
    def _optimizer_of_others(self) -> torch.optim.Optimizer:
        """The same for the uncompressed parameters, which are few."""


class FlatSGD(FlatOptimizer):
    """SGD with momentum: ``m = momentum * m + g``, ``p = p - lr * m``; see :func:`pwfn.bayes.kernels.sgd_`.

    >>> net = GaussianNetwork(nn.Linear(4, 2)).train()
    >>> optimizer = FlatSGD(net, lr=0.1)
    >>> with optimizer.drawn():
    ...     net(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step().item() > 0
    True
    """

    _vectors = ("momentum_mu", "momentum_sigma")

    def __init__(self, net: GaussianNetwork, *, momentum: float = 0.0, **options: Any) -> None:
        self.momentum = momentum
        super().__init__(net, **options)

    def _update(self, gradient: Tensor, scale: Tensor, at: dict[str, int]) -> None:
        posterior = self.net.config.posterior
        ops.sgd_(
            self.net.free_mu,
            self.net.free_sigma,
            self.state["momentum_mu"],
            self.state["momentum_sigma"],
            gradient,
            self.net.fixed,
            self._offsets,
            scale,
            lr=self.lr,
            sigma_lr=self.sigma_lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            alpha=posterior.strength,
            cap=posterior.cap,
            **at,
        )

    def _optimizer_of_others(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.others,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            fused=self._fused,
        )


class FlatAdamW(FlatOptimizer):
    """AdamW, decoupled weight decay on all but sigma; see :func:`pwfn.bayes.kernels.adamw_`."""

    _vectors = ("mean_mu", "mean_sigma", "square_mu", "square_sigma")

    def __init__(
        self, net: GaussianNetwork, *, betas: tuple[float, float] = (0.9, 0.999), **options: Any
    ) -> None:
        self.betas = betas
        super().__init__(net, **options)

    def _update(self, gradient: Tensor, scale: Tensor, at: dict[str, int]) -> None:
        posterior = self.net.config.posterior
        ops.adamw_(
            self.net.free_mu,
            self.net.free_sigma,
            self.state["mean_mu"],
            self.state["mean_sigma"],
            self.state["square_mu"],
            self.state["square_sigma"],
            gradient,
            self.net.fixed,
            self._offsets,
            scale,
            lr=self.lr,
            sigma_lr=self.sigma_lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            alpha=posterior.strength,
            cap=posterior.cap,
            count=self.count,
            **at,
        )

    def _optimizer_of_others(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.others,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=self._fused,
        )
