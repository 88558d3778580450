"""The operations as torch sees them, ``torch.ops.pwfn.<name>``, and the public function that calls each.

The argument list of an operation is written once, in ``reference``: the schema and the signature of the
public function are derived from it. The reference runs on every device. Where Triton is installed, the
kernels of ``triton`` are registered over it for CUDA; they are imported at the first call on a CUDA tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from pwfn.bayes.kernels import reference
from pwfn.errors import WeightError
from pwfn.runtime.library import define

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("pwfn", "DEF")

_SGD_STATE = ("momentum_mu", "momentum_sigma")
_ADAMW_STATE = ("mean_mu", "mean_sigma", "square_mu", "square_sigma")
_STATE = {*_SGD_STATE, *_ADAMW_STATE}


def _operation(
    function: Callable[P, R], fake: Callable[..., R | None], writes: tuple[str, ...] = ()
) -> Callable[P, R]:
    """Define ``torch.ops.pwfn.<name>`` from a reference, and return the function that checks and calls it.

    ``fake`` returns empty results of the right shape and type, for tracing. ``writes`` names the
    arguments that are written in place; autograd does not record an operation that has any.
    """
    name, parameters = function.__name__, tuple(inspect.signature(function).parameters)
    schema = torch.library.infer_schema(function, mutates_args=writes)
    run = define(_LIBRARY, name, schema, function, "pwfn.bayes.kernels.triton")
    torch.library.register_fake(f"pwfn::{name}", fake, lib=_LIBRARY)

    @wraps(function)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(zip(parameters, args, strict=False))
        _check(**given | kwargs)
        return run(*args, **kwargs)

    return torch.no_grad()(operation) if writes else operation


def _check(*, fixed: Tensor, seed: int, step: int, count: int = 1, **others: Any) -> None:
    """Raise before a kernel could access memory outside a vector.

    That the state has as many entries as there are free weights is not checked here: the count is on
    the device, and to read it would wait for it. The kernels do not access the state past its end.
    """
    size, state = fixed.numel(), None
    constant = "free_sigma" in others and others["free_sigma"].dim() == 0
    fits = fixed.dtype == torch.bool and fixed.shape == (size,) and fixed.is_contiguous()
    for name, value in [("fixed", fixed), *others.items()]:
        if not isinstance(value, Tensor):
            continue
        of_sigma, floating = name.endswith("sigma"), value.is_floating_point()
        packed = value.dim() == 1 and value.numel() <= size
        if name == "offsets":
            fits = value.dtype == torch.int64 and value.shape == (-(-size // reference.BLOCK),)
        elif name == "ahead":
            fits = value.dtype == torch.int64 and value.dim() == 0
        elif name == "scale":
            fits = floating and value.dim() == 0
        elif name == "rates":
            fits = value.dtype == torch.float32 and value.shape == (2,)
        elif name in _STATE:
            state = state or value.shape
            full = value.shape == state and not (constant and of_sigma)
            fits = floating and packed and (full or (of_sigma and not value.numel()))
        elif name != "fixed":
            fits = floating and (
                value.shape == fixed.shape
                or (name == "free_sigma" and constant)
                or (name == "fixed_sigma" and others.get("offsets") is not None and packed)
            )
        if not (fits and value.device == fixed.device and (name == "grad_w" or value.is_contiguous())):
            raise WeightError(
                f"{name} is a {'' if value.is_contiguous() else 'strided '}{value.dtype} tensor of shape "
                f"{tuple(value.shape)} on {value.device}, which does not fit {size:,} weights on "
                f"{fixed.device}: see pwfn.bayes.kernels.reference"
            )
    if not (0 <= seed < 2**63 and 0 <= step < 2**63):
        raise WeightError(f"seed is {seed} and step is {step}: both must be between 0 and 2^63 - 1")
    if count < 1:
        raise WeightError(f"count is {count}: the first step of AdamW has count 1")


def _fake_draw(free_mu: Tensor, *_: Tensor, dtype: torch.dtype | None = None, **numbers: int) -> Tensor:
    return torch.empty_like(free_mu, dtype=dtype)


def _fake_gradients(grad_w: Tensor, fixed: Tensor, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    made = torch.empty(grad_w.shape, dtype=reference.wide(grad_w.dtype), device=grad_w.device)
    return made, torch.empty_like(made)


def _fake_norm(grad_w: Tensor, fixed: Tensor, *, seed: int, step: int, ahead: Tensor | None = None) -> Tensor:
    return grad_w.new_empty((), dtype=torch.float64)


def _fake_nothing(*tensors: Tensor, **numbers: Any) -> None:
    """The result of an operation that writes in place."""


draw = _operation(reference.draw, _fake_draw)
draw_ = _operation(reference.draw_, _fake_nothing, writes=("out",))
draw_backward = _operation(reference.draw_backward, _fake_gradients)
grad_squared_norm = _operation(reference.grad_squared_norm, _fake_norm)
sgd_ = _operation(reference.sgd_, _fake_nothing, writes=("free_mu", "free_sigma", *_SGD_STATE))
adamw_ = _operation(reference.adamw_, _fake_nothing, writes=("free_mu", "free_sigma", *_ADAMW_STATE))


def _remember(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    free_mu, free_sigma, fixed, *_ = inputs
    ctx.seed, ctx.step = keyword_only_inputs["seed"], keyword_only_inputs["step"]
    ctx.kinds = [(vector.shape, vector.dtype) for vector in (free_mu, free_sigma)]
    ctx.save_for_backward(fixed)


def _gradients(ctx: Any, grad_w: Tensor) -> tuple[Tensor | None, ...]:
    """Of free_mu and free_sigma only; the noise is recomputed, so only the mask was saved."""
    grads = torch.ops.pwfn.draw_backward(grad_w, *ctx.saved_tensors, seed=ctx.seed, step=ctx.step)
    fits = (grad.sum_to_size(shape).to(dtype) for grad, (shape, dtype) in zip(grads, ctx.kinds, strict=True))
    return *fits, None, None, None


torch.library.register_autograd("pwfn::draw", _gradients, setup_context=_remember, lib=_LIBRARY)
