"""PWFN: Gaussian weights, fixed round by round on one codebook (Subia-Waud & Dasmahapatra, NeurIPS 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.method import (
    Between,
    InForce,
    Look,
    Method,
    Stretch,
    rounds_of_fixing,
    torch_optimizer,
)
from pwfn.bayes.optimizer import FlatAdamW, FlatOptimizer, FlatSGD
from pwfn.config import Config, Optimizer, Precision, SigmaInit


class Pwfn(GaussianNetwork, Method):
    """:class:`pwfn.GaussianNetwork` as a run needs it; weights, penalty and finish are its own.

    >>> from torch import nn
    >>> net = Pwfn(nn.Linear(4, 2), Config())
    >>> [net.between(i, s.fraction).record.fixed for i, s in enumerate(net.plan(Config()), 1)][-2:]
    [10, 10]
    """

    keeps_optimizer = False
    has_posterior = True
    forecast_of = "the weights as they are, and sigma, where it learns, moved by the regulariser alone"

    @classmethod
    def plan(cls, config: Config) -> tuple[Stretch, ...]:
        """A stretch of training before every fixing."""
        return rounds_of_fixing(config)

    def begin(self, look: Look) -> None:
        """Where the settings have it so, sigma starts from the curvature, or by what is tolerated."""
        posterior = self.config.posterior
        if posterior.init in (SigmaInit.CURVATURE, SigmaInit.CURVATURE_ROOT):
            self.take_curvature(look.fisher(self.free_mu, posterior.curvature_batches))
        if posterior.by_tolerance:
            self.take_tolerated(lambda: look.loss(posterior.tolerance_batches))

    def rehearse(self, steps: int) -> None:
        """What the regulariser alone does to sigma.

        With momentum m a step moves it by ``sigma_lr * alpha / (1 - m)``, up to the cap.
        """
        training, posterior = self.config.training, self.config.posterior
        rate = posterior.sigma_rate(training.learning_rate, training.sigma_learning_rate)
        way = steps * rate * posterior.strength / max(1 - training.momentum, 1e-3)
        with torch.no_grad():
            moved = torch.maximum(self.free_sigma, (self.free_sigma + way).clamp_max(posterior.cap))
            self.free_sigma.copy_(torch.where(self.fixed, self.free_sigma, moved))

    def between(self, number: int, fraction: float) -> Between:
        """Fix weights up to the fraction."""
        quartiles = _quartiles(self.sigma[~self.fixed].detach())
        record = self.fix(fraction)
        return Between(record, self.mu[self.fixed].detach(), quartiles)

    def in_force(self) -> InForce:
        """Means, sigmas, and which weights are fixed."""
        return InForce(self.mu.detach(), self.sigma.detach(), self.fixed)

    def compared(self) -> Sequence[Tensor]:
        """Which weights are fixed, and every mean and sigma."""
        return (self.fixed, self.mu, self.sigma)

    def optimizer(self, seed: int, *, alone: bool) -> torch.optim.Optimizer | FlatOptimizer:
        """One that draws and steps in one pass each where it may, else torch's."""
        config = self.config.training
        if not (alone and self.may_be_fused(self.config)):
            groups = self.parameter_groups(
                lr=config.learning_rate,
                sigma_lr=config.sigma_learning_rate,
                weight_decay=config.weight_decay,
            )
            return torch_optimizer(groups, self.config)
        self.share_storage()
        # Autocast leaves float64 as it is.
        halves = config.precision is Precision.BF16 and self.free_mu.dtype == torch.float32
        dtype = torch.bfloat16 if halves else None
        if config.optimizer is Optimizer.ADAMW:
            return FlatAdamW(
                self,
                lr=config.learning_rate,
                sigma_lr=config.sigma_learning_rate,
                weight_decay=config.weight_decay,
                clip_norm=config.clip_norm,
                betas=(config.momentum, 0.999),
                dtype=dtype,
                seed=seed,
            )
        return FlatSGD(
            self,
            lr=config.learning_rate,
            sigma_lr=config.sigma_learning_rate,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            momentum=config.momentum,
            dtype=dtype,
            seed=seed,
        )

    def may_be_fused(self, config: Config) -> bool:
        """Whether draws and steps can be made in one pass each."""
        plain = all(entry.dtype == self.free_mu.dtype for entry in self.layout.entries)
        return config.training.fused and plain and config.training.precision is not Precision.FP16


def _quartiles(values: Tensor) -> tuple[float, float, float]:
    if values.numel() == 0:
        return (0.0, 0.0, 0.0)
    at = [round(q * (values.numel() - 1)) for q in (0.25, 0.5, 0.75)]
    low, middle, high = (float(values.kthvalue(position + 1).values) for position in at)
    return (low, middle, high)
