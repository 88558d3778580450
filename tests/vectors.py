"""Cases for the operations on flat vectors, and statistical checks of their noise, for a CPU and for CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from pwfn.bayes import kernels as ops

SIZES = (1, 127, 1025, 4099)
SHARES = {"none": 0.0, "some": 1 / 3, "all": 1.0}  # how many weights are fixed
FLOOR = 2.0**-30
SGD = {"lr": 0.01, "sigma_lr": 0.02, "momentum": 0.9, "weight_decay": 1e-2, "alpha": 2.0**-11, "cap": 0.05}
ADAMW = {"lr": 0.01, "sigma_lr": 0.002, "weight_decay": 1e-2, "alpha": 2.0**-11, "cap": 0.05}
STATES = {"sgd_": 2, "adamw_": 4}  # vectors of state


def vectors(
    size: int, share: float = 1 / 3, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """Random weights, a share of them fixed; some sigmas are above the cap, some below it, some at it."""
    generator = torch.Generator().manual_seed(size)
    sigma = torch.rand(size, generator=generator) * 0.1
    sigma[::5] = 0.05
    sigma[3::7] = 0.0
    made = {
        "free_mu": torch.randn(size, generator=generator),
        "free_sigma": sigma,
        "fixed": torch.rand(size, generator=generator) < share,
        "fixed_mu": torch.randn(size, generator=generator),
        "fixed_sigma": torch.rand(size, generator=generator),
    }
    return {k: t.to(device) if k == "fixed" else t.to(device, dtype) for k, t in made.items()}


def new_state(name: str, fixed: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The state of an optimizer before its first step: zeros, one per free weight."""
    free = int((~fixed).sum())
    return [torch.zeros(free, device=fixed.device, dtype=dtype) for _ in range(STATES[name])]


def operations(device: str = "cpu") -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for each operation of ``torch.ops.pwfn``."""
    v, at = vectors(127, device=device), {"seed": 1, "step": 2}
    fixed, grad, scale = v["fixed"], torch.ones(127, device=device), torch.tensor(0.5, device=device)
    plain = grad.clone(), grad.clone(), fixed, v["fixed_mu"], v["fixed_sigma"]
    leaves = v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()
    rest = grad, fixed, ops.free_offsets(fixed), scale
    return {
        "draw": ((*leaves, *plain[2:]), {**at, "noise_on_fixed": True, "dtype": torch.bfloat16}),
        "draw_": ((grad.bfloat16(), *plain), {**at, "noise_on_fixed": False}),
        "draw_backward": ((grad.bfloat16(), fixed), at),
        "grad_squared_norm": ((grad, fixed), at),
        "sgd_": ((*plain[:2], *new_state("sgd_", fixed), *rest), {**SGD, **at}),
        "adamw_": ((*plain[:2], *new_state("adamw_", fixed), *rest), {**ADAMW, "count": 1, **at}),
    }


# Thresholds: a normal statistic of 4.5 or a p-value of 1e-5, for draws of a fixed seed.
def check_normal(sample: Tensor) -> None:
    x = sample.double()
    n = x.numel()
    assert abs(x.mean().item()) < 4.5 / math.sqrt(n)
    assert abs(x.square().mean().item() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs(x.pow(3).mean().item()) < 4.5 * math.sqrt(15 / n)
    assert abs(x.pow(4).mean().item() - 3) < 4.5 * math.sqrt(96 / n)
    assert stats.kstest(x.cpu().numpy(), "norm").pvalue > 1e-5


def check_independent(one: Tensor, other: Tensor) -> None:
    """Neither the numbers nor their squares are correlated."""
    a, b = one.double(), other.double()
    assert abs((a * b).mean().item()) < 4.5 / math.sqrt(a.numel())
    assert abs(((a**2 - 1) * (b**2 - 1)).mean().item()) < 4.5 * 2 / math.sqrt(a.numel())
