"""LSQ over one flat vector: all quantisers of a network in a few operations instead of a few for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pwfn.lab.quantisers.lsq import SMALLEST_STEP, LsqQuantiser, PartsQuantiser, gradient_scale


class Part(NamedTuple):
    """A quantiser and the number of its weights, which follow those of the part before it."""

    quantiser: LsqQuantiser
    size: int


def parts_of(quantisers: Iterable[nn.Module], sizes: Iterable[int]) -> list[Part] | None:
    """The parts of a vector; None unless all are LSQ's and the weights of each step are contiguous.

    >>> len(parts_of([LsqQuantiser.for_weights(torch.ones(2, 3), bits=4, axis=0)], [6]))
    1
    >>> parts_of([LsqQuantiser.for_weights(torch.ones(2, 3), bits=4, axis=1)], [6]) is None
    True
    """
    found = []
    for quantiser, size in zip(quantisers, sizes, strict=True):
        own = quantiser.lsq if isinstance(quantiser, PartsQuantiser) else quantiser
        if not isinstance(own, LsqQuantiser) or own.axis not in (None, 0):
            return None
        found.append(Part(own, size))
    return found


class LsqTogether:
    """The output of each quantiser for its part of a vector, all at once, with the same gradients.

    ``round(clip(w / s, -Q_N, Q_P)) s``, with s the step of the part or channel that the weight is in.
    Values and the gradient of w equal those of the quantisers bit for bit; the gradient of a step is
    summed in float64. The steps stay parameters of the quantisers. A call has fixed shapes and never
    waits for the device, so it can be captured in a CUDA graph.

    >>> one = LsqQuantiser.for_weights(torch.tensor([0.5, -0.5, 1.0, -2.0]), bits=2)
    >>> other = LsqQuantiser.for_weights(torch.tensor([[3.0], [-5.0]]), bits=2, axis=0)
    >>> both = LsqTogether([Part(one, 4), Part(other, 2)], torch.device("cpu"))
    >>> both(torch.tensor([0.5, -0.5, 1.0, -2.0, 6.0, -11.0])).tolist()
    [0.0, 0.0, 0.0, -2.0, 6.0, -10.0]
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.device = device
        self._quantisers = [part.quantiser for part in parts]
        codes = [quantiser.codes for quantiser in self._quantisers]
        counts = torch.tensor([quantiser.step.numel() for quantiser in self._quantisers])
        lengths = [part.size // part.quantiser.step.numel() for part in parts]
        scales = [gradient_scale(length, own) for length, own in zip(lengths, codes, strict=True)]

        def by_step(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

        dtype = self._quantisers[0].step.dtype
        self._lengths = by_step(lengths, torch.int64)
        self._scales = by_step(scales, torch.float64)
        steps = torch.arange(len(self._lengths), dtype=torch.int32, device=device)
        self._which = steps.repeat_interleave(self._lengths)
        self._low = by_step([own.low for own in codes], dtype).repeat_interleave(self._lengths)
        self._high = by_step([own.high for own in codes], dtype).repeat_interleave(self._lengths)

    def __call__(self, weights: Tensor) -> Tensor:
        """The quantised vector."""
        steps = torch.cat([quantiser.step.reshape(-1) for quantiser in self._quantisers])
        result: Tensor = _Together.apply(weights, steps, self)  # type: ignore[no-untyped-call]
        return result


class _Together(Function):
    """:class:`LsqTogether`; see :func:`pwfn.lab.quantisers.lsq.quantise` for the formulas."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, steps: Tensor, of: LsqTogether) -> Tensor:
        s = steps.clamp(min=SMALLEST_STEP).index_select(0, of._which)
        u = weights / s
        code = torch.minimum(torch.maximum(u, of._low), of._high).round_()
        inside = (u > of._low) & (u < of._high)
        ctx.of = of
        ctx.save_for_backward(inside, torch.where(inside, code - u, code))
        return code.mul_(s).add_(0.0)  # -0.0 becomes 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inside, by_step = ctx.saved_tensors
        for_weights = above * inside if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_weights, None, None
        of: LsqTogether = ctx.of
        # unsafe=True skips a check of the lengths that would wait for the device.
        sums = torch.segment_reduce(
            (above * by_step).double(), "sum", lengths=of._lengths, axis=0, unsafe=True
        )
        return for_weights, (sums * of._scales).to(above.dtype), None
