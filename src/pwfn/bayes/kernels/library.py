"""The operations as torch sees them: one schema each, plain torch as default, kernels over it.

``torch.ops.pwfn.<name>`` runs the reference on every device. Where Triton is installed, its kernels
are registered over it for CUDA; where it is not, the reference stays in force there too. Triton
itself is imported with the first call on a CUDA tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pwfn.bayes.kernels import reference
from pwfn.dispatch import define

SCHEMAS: dict[str, str] = {
    "draw": (
        "(Tensor free_mu, Tensor free_sigma, Tensor fixed, Tensor fixed_mu, Tensor fixed_sigma, "
        "int seed, int step, bool noise_on_fixed, ScalarType dtype) -> Tensor"
    ),
    "draw_": (
        "(Tensor(a!) out, Tensor free_mu, Tensor free_sigma, Tensor fixed, Tensor fixed_mu, "
        "Tensor fixed_sigma, int seed, int step, bool noise_on_fixed) -> ()"
    ),
    "draw_backward": "(Tensor grad_w, Tensor fixed, int seed, int step) -> (Tensor, Tensor)",
    "grad_squared_norm": "(Tensor grad_w, Tensor fixed, int seed, int step) -> Tensor",
    "sgd_": (
        "(Tensor(a!) free_mu, Tensor(b!) free_sigma, Tensor(c!) momentum_mu, Tensor(d!) momentum_sigma, "
        "Tensor grad_w, Tensor fixed, Tensor offsets, Tensor scale, float lr, float sigma_lr, "
        "float momentum, float weight_decay, float alpha, float cap, int seed, int step) -> ()"
    ),
    "adamw_": (
        "(Tensor(a!) free_mu, Tensor(b!) free_sigma, Tensor(c!) mean_mu, Tensor(d!) mean_sigma, "
        "Tensor(e!) square_mu, Tensor(f!) square_sigma, Tensor grad_w, Tensor fixed, Tensor offsets, "
        "Tensor scale, float lr, float sigma_lr, float beta1, float beta2, float epsilon, "
        "float weight_decay, float alpha, float cap, int count, int seed, int step) -> ()"
    ),
}
"""Of each operation the schema, in which a ! marks what it writes to."""

_LIBRARY = torch.library.Library("pwfn", "DEF")


def _define(name: str) -> Any:
    return define(_LIBRARY, name, SCHEMAS[name], getattr(reference, name), "pwfn.bayes.kernels.triton")


draw = _define("draw")
draw_ = _define("draw_")
draw_backward = _define("draw_backward")
grad_squared_norm = _define("grad_squared_norm")
sgd_ = _define("sgd_")
adamw_ = _define("adamw_")


def _empty_draw(free_mu: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(free_mu, dtype=rest[-1])


def _empty_gradients(grad_w: Tensor, fixed: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    made = torch.empty(grad_w.shape, dtype=reference.wide(grad_w.dtype), device=grad_w.device)
    return made, torch.empty_like(made)


def _empty_scalar(grad_w: Tensor, fixed: Tensor, seed: int, step: int) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=grad_w.device)


def _nothing(*args: Any) -> None:
    """What an operation that writes in place returns."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    free_mu, free_sigma, fixed, _, _, ctx.seed, ctx.step, _, _ = inputs
    ctx.dtypes = free_mu.dtype, free_sigma.dtype
    ctx.save_for_backward(fixed)


def _gradients(ctx: Any, grad_w: Tensor) -> tuple[Tensor | None, ...]:
    """To the free mu and sigma only; the noise is made again, so nothing but the mask was kept."""
    grad_mu, grad_sigma = draw_backward(grad_w, *ctx.saved_tensors, ctx.seed, ctx.step)
    return grad_mu.to(ctx.dtypes[0]), grad_sigma.to(ctx.dtypes[1]), *(None,) * 7


_FAKES: dict[str, Callable[..., Any]] = {
    "draw": _empty_draw,
    "draw_": _nothing,
    "draw_backward": _empty_gradients,
    "grad_squared_norm": _empty_scalar,
    "sgd_": _nothing,
    "adamw_": _nothing,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"pwfn::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("pwfn::draw", _gradients, setup_context=_remember, lib=_LIBRARY)
