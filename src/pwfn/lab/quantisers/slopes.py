"""A value whose gradients are set by formula, not derived: what every quantiser is built from."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def with_slopes(value: Tensor, *slopes: tuple[Tensor, Tensor]) -> Tensor:
    """``value``, with ``d out / d p = slope`` for each pair ``(p, slope)``; a straight-through has slope 1.

    Backwards, ``dL/dp = sum (dL/dout * slope)`` over the elements that share p. The slope is taken
    element by element before anything is summed; left to autograd, LSQ's ``sum round(u) - sum u`` would
    lose its digits to cancellation. The value of p is not looked at: a multiple of a parameter as p
    gives that multiple of its gradient. A value of -0.0 becomes 0.0.

    >>> import torch
    >>> x, s = torch.tensor([0.4, 1.7], requires_grad=True), torch.tensor(2.0, requires_grad=True)
    >>> y = with_slopes(x.round(), (x, torch.tensor([1.0, 0.5])), (0.1 * s, torch.tensor([3.0, 4.0])))
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist(), round(s.grad.item(), 6)
    ([0.0, 2.0], [1.0, 0.5], 0.7)
    """
    tensors = [tensor for p, slope in slopes for tensor in (p, slope.detach())]
    result: Tensor = _WithSlopes.apply(value.detach(), *tensors)  # type: ignore[no-untyped-call]  # torch's
    return result


class _WithSlopes(Function):
    """:func:`with_slopes` of ``value, p, slope, p, slope, …``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *pairs: Tensor) -> Tensor:
        ctx.shapes = [p.shape for p in pairs[::2]]
        ctx.save_for_backward(*pairs[1::2])
        return value + 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None]
        needed = ctx.needs_input_grad[1::2]
        for slope, shape, wanted in zip(ctx.saved_tensors, ctx.shapes, needed, strict=True):
            found += [(above * slope).sum_to_size(shape) if wanted else None, None]
        return tuple(found)
