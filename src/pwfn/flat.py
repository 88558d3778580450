"""Optimisers of our own for the flat vectors: a step draws in one pass, and steps mu and sigma in another.

optimizer = FlatSGD(net, lr=1e-3, momentum=0.9, clip_norm=1.0)
for x, y in loader:
    with optimizer.drawn():
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    optimizer.step()

The regulariser, the mask, the floor of sigma and the clipping are part of ``step``: the loss has no
``net.penalty()``. Sigma's gradient is never stored, and a fixed weight is neither read nor written.
Any torch optimiser on ``net.parameter_groups`` does the same in plain steps; a test compares them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pwfn import ops
from pwfn.errors import WeightError
from pwfn.posterior import GaussianNetwork


class FlatOptimizer(ABC):
    """What the two optimisers share: the weights of a step, the gradient's norm, the other parameters."""

    _vectors: ClassVar[tuple[str, ...]] = ()  # names of the state, each as long as the weights

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
            lr, sigma_lr: for mu and the uncompressed parameters, and for sigma (lr unless given).
            weight_decay: on all but sigma.
            clip_norm: largest norm of the task's gradient, over mu, sigma and the uncompressed.
            dtype: of the weights in the forward pass; mu's own unless given. Under bfloat16
                autocast, bfloat16 saves the casts.
            seed: of the noise; a draw is a function of (seed, number of the step).
        """
        if any(entry.dtype != net.free_mu.dtype for entry in net.layout.entries):
            raise WeightError("the model's weights are of several types: use a torch optimiser")
        self.net, self.seed, self.count = net, seed, 0
        self.lr, self.sigma_lr = lr, lr if sigma_lr is None else sigma_lr
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.others = [p for p in net.model.parameters() if p.requires_grad]
        self.state = {name: torch.zeros_like(net.free_mu, requires_grad=False) for name in self._vectors}
        self._values = torch.empty_like(net.free_mu, dtype=dtype or net.free_mu.dtype, requires_grad=False)
        self._gradient = torch.empty_like(self._values)
        self._parts = self._cut(self._gradient)
        self._leaves = [nn.Parameter(part) for part in self._cut(self._values)]
        self._other = self._optimizer_of_others() if self.others else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The learning rate, where torch's optimisers have it."""
        return [{"lr": self.lr}]

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Within the block the network has the weights of this step, and backward finds them."""
        net = self.net
        with torch.no_grad():
            self._values.copy_(
                ops.draw(
                    net.free_mu.detach(),
                    net.free_sigma.detach(),
                    net.fixed,
                    net.fixed_mu,
                    net.fixed_sigma,
                    seed=self.seed,
                    step=self.count,
                    noise_on_fixed=net.config.posterior.noise_on_fixed,
                    dtype=self._values.dtype,
                )
            )
        with net.placed(self._leaves):
            yield

    @torch.no_grad()
    def step(self) -> Tensor:
        """Step, and return the norm of the task's gradient, on the device, before it was clipped."""
        self._collect()
        at = {"seed": self.seed, "step": self.count}
        squared = ops.grad_squared_norm(self._gradient, self.net.fixed, **at)
        gradients = [p.grad for p in self.others if p.grad is not None]
        if gradients:
            squared = squared + nn.utils.get_total_norm(gradients).double().square()
        norm = squared.sqrt().float()
        scale = torch.ones_like(norm)
        if self.clip_norm is not None:
            scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
            torch._foreach_mul_(gradients, scale) if gradients else None
        self.count += 1
        self._update(scale, at)
        if self._other is not None:
            self._other.step()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for parameter in (*self._leaves, *self.others):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that it takes to go on: torch's own classes, and plain values."""
        other = self._other.state_dict() if self._other is not None else None
        return {"count": self.count, "seed": self.seed, "vectors": dict(self.state), "others": other}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave, copied."""
        self.count, self.seed = state["count"], state["seed"]
        for name, vector in self.state.items():
            vector.copy_(state["vectors"][name])
        if self._other is not None:
            self._other.load_state_dict(state["others"])

    def _cut(self, vector: Tensor) -> list[Tensor]:
        entries = self.net.layout.entries
        pieces = vector.split([entry.size for entry in entries])
        return [piece.view(entry.shape) for entry, piece in zip(entries, pieces, strict=True)]

    def _collect(self) -> None:
        """The gradients of the pieces, as one vector."""
        used = [(part, leaf.grad) for part, leaf in zip(self._parts, self._leaves, strict=True)]
        if any(gradient is None for _, gradient in used):
            self._gradient.zero_()  # a layer that this step did not go through
        found = [(part, gradient) for part, gradient in used if gradient is not None]
        if found:
            torch._foreach_copy_([part for part, _ in found], [gradient for _, gradient in found])
        for leaf in self._leaves:
            leaf.grad = None

    @abstractmethod
    def _update(self, scale: Tensor, at: dict[str, int]) -> None:
        """Step mu and sigma."""

    @abstractmethod
    def _optimizer_of_others(self) -> torch.optim.Optimizer:
        """The same for the uncompressed parameters, which are few."""


class FlatSGD(FlatOptimizer):
    """SGD with momentum: ``m = momentum * m + g``, ``p = p - lr * m``; see :func:`pwfn.ops.sgd_`.

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

    def _update(self, scale: Tensor, at: dict[str, int]) -> None:
        posterior = self.net.config.posterior
        ops.sgd_(
            self.net.free_mu,
            self.net.free_sigma,
            self.state["momentum_mu"],
            self.state["momentum_sigma"],
            self._gradient,
            self.net.fixed,
            scale,
            lr=self.lr,
            sigma_lr=self.sigma_lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            alpha=posterior.alpha,
            cap=posterior.cap,
            **at,
        )

    def _optimizer_of_others(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.others, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )


class FlatAdamW(FlatOptimizer):
    """AdamW, decoupled weight decay on all but sigma; see :func:`pwfn.ops.adamw_`."""

    _vectors = ("mean_mu", "mean_sigma", "square_mu", "square_sigma")

    def __init__(
        self, net: GaussianNetwork, *, betas: tuple[float, float] = (0.9, 0.999), **options: Any
    ) -> None:
        self.betas = betas
        super().__init__(net, **options)

    def _update(self, scale: Tensor, at: dict[str, int]) -> None:
        posterior = self.net.config.posterior
        ops.adamw_(
            self.net.free_mu,
            self.net.free_sigma,
            self.state["mean_mu"],
            self.state["mean_sigma"],
            self.state["square_mu"],
            self.state["square_sigma"],
            self._gradient,
            self.net.fixed,
            scale,
            lr=self.lr,
            sigma_lr=self.sigma_lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            alpha=posterior.alpha,
            cap=posterior.cap,
            count=self.count,
            **at,
        )

    def _optimizer_of_others(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.others, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
