"""Gradients given by formula instead of derived: straight-through estimators and learned steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def with_gradients(value: Tensor, *gradients: tuple[Tensor, Tensor]) -> Tensor:
    """``value``, with ``d out / d p = g`` for each pair ``(p, g)``; g = 1 is the straight-through estimator.

    The backward pass computes ``dL/dp = sum(dL/dout * g)`` over the elements that share p. The product
    comes before the sum: LSQ's ``sum(round(u) - u)``, split by autograd into two sums, would lose its
    digits to cancellation. The value of p is not used, so passing ``c * p`` scales the gradient of p
    by c. -0.0 becomes 0.0.

    >>> import torch
    >>> x, s = torch.tensor([0.4, 1.7], requires_grad=True), torch.tensor(2.0, requires_grad=True)
    >>> y = with_gradients(x.round(), (x, torch.tensor([1.0, 0.5])), (0.1 * s, torch.tensor([3.0, 4.0])))
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist(), round(s.grad.item(), 6)
    ([0.0, 2.0], [1.0, 0.5], 0.7)
    """
    pairs = [tensor for p, g in gradients for tensor in (p, g.detach())]
    result: Tensor = _WithGradients.apply(value.detach(), *pairs)  # type: ignore[no-untyped-call]
    return result


class _WithGradients(Function):
    """:func:`with_gradients` of ``value, p, g, p, g, …``."""

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
        for g, shape, is_needed in zip(ctx.saved_tensors, ctx.shapes, needed, strict=True):
            found += [(above * g).sum_to_size(shape) if is_needed else None, None]
        return tuple(found)
