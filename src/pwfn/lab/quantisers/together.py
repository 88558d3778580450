"""LSQ over one flat vector: all quantisers of a network in a few operations, not a few for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pwfn.lab.quantisers.lsq import SMALLEST_STEP, LsqQuantiser, gradient_scale
from pwfn.lab.quantisers.parts import PartsQuantiser


class Part(NamedTuple):
    """Where a quantiser's weights lie: from the end of the one before it, so many, as many to each step."""

    quantiser: LsqQuantiser
    size: int


def parts_of(quantisers: Iterable[nn.Module], sizes: Iterable[int]) -> list[Part] | None:
    """The parts that quantisers have of a vector; None unless all are LSQ's, each step's weights together.

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
    """What each quantiser gives for its part of a vector, all at once, with the same gradients.

    ``round(clip(w / s, -Q_N, Q_P)) s``, with s the step of the part, or of the channel of it, that the weight
    lies in. Values and the gradient of w are those of the quantisers to the last bit; that of a step
    is summed in float64. Steps stay the quantisers' own parameters. A call has fixed shapes and waits for
    nothing, so that it can be recorded as a CUDA graph.

    >>> one = LsqQuantiser.for_weights(torch.tensor([0.5, -0.5, 1.0, -2.0]), bits=2)
    >>> other = LsqQuantiser.for_weights(torch.tensor([[3.0], [-5.0]]), bits=2, axis=0)
    >>> both = LsqTogether([Part(one, 4), Part(other, 2)], torch.device("cpu"))
    >>> both(torch.tensor([0.5, -0.5, 1.0, -2.0, 6.0, -11.0])).tolist()
    [0.0, 0.0, 0.0, -2.0, 6.0, -10.0]
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.device = device
        self._quantisers = [part.quantiser for part in parts]
        counts = [quantiser.step.numel() for quantiser in self._quantisers]
        sizes = [part.size // count for part, count in zip(parts, counts, strict=True)]
        codes = [quantiser.codes for quantiser in self._quantisers]
        scales = [gradient_scale(size, own) for size, own in zip(sizes, codes, strict=True)]

        def by_step(values: list[Any], dtype: torch.dtype) -> Tensor:
            whole = torch.tensor(values, dtype=dtype, device=device)
            return whole.repeat_interleave(torch.tensor(counts, device=device))

        dtype = self._quantisers[0].step.dtype
        self._lengths = by_step(sizes, torch.int64)
        self._scales = by_step(scales, torch.float64)
        steps = torch.arange(len(self._lengths), dtype=torch.int32, device=device)
        self._which = steps.repeat_interleave(self._lengths)
        self._low = by_step([own.low for own in codes], dtype).repeat_interleave(self._lengths)
        self._high = by_step([own.high for own in codes], dtype).repeat_interleave(self._lengths)

    def __call__(self, weights: Tensor) -> Tensor:
        """The quantised vector."""
        steps = torch.cat([quantiser.step.reshape(-1) for quantiser in self._quantisers])
        result: Tensor = _Together.apply(weights, steps, self)  # type: ignore[no-untyped-call]  # torch's
        return result


class _Together(Function):
    """:class:`LsqTogether`; see :func:`pwfn.lab.quantisers.lsq.quantise` for the formulas."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, steps: Tensor, of: LsqTogether) -> Tensor:
        s = steps.clamp(min=SMALLEST_STEP).index_select(0, of._which)
        u = weights / s
        code = torch.minimum(torch.maximum(u, of._low), of._high).round_()
        inside = (u > of._low) & (u < of._high)
        by_step = torch.where(inside, code - u, code)
        ctx.of = of
        ctx.save_for_backward(inside, by_step)
        return code.mul_(s).add_(0.0)  # -0.0 becomes 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inside, by_step = ctx.saved_tensors
        of: LsqTogether = ctx.of
        for_weights = above * inside if ctx.needs_input_grad[0] else None
        for_steps = None
        if ctx.needs_input_grad[1]:
            # Unsafe: lengths are not looked at, which would wait for the device; they are right as made.
            sums = torch.segment_reduce(
                (above * by_step).double(), "sum", lengths=of._lengths, axis=0, unsafe=True
            )
            for_steps = (sums * of._scales).to(above.dtype)
        return for_weights, for_steps, None
