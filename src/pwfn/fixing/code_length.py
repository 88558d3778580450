"""Code length of weights that are whole numbers of steps, as a function to train with.

The file codes a weight by what is near it (see docs/format.md). Here a weight's context is the expected size
of its magnitude, from the mean magnitudes of its filter and of its input channel, and each context has one
table of probabilities for the whole network. The file's coder knows more, above all the signs of neighbours,
so the sum is 6 to 11 % above the coded bytes for a ResNet. A small or very sparse network can cost more than
the sum: the coder starts without tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwfn.layout import Layout

LARGEST = 40  # beyond it the length grows linearly
_CONTEXTS = 21  # half octaves of the expected magnitude from 2^-8 to 2^1.5; the last one is for vectors
_OCTAVES = 8
_PRIOR = 0.02  # of a count, halved for every further level: no level is impossible


class CodeLength(NamedTuple):
    """Bits of every level in every context, and the context of every weight."""

    lengths: Tensor  # contexts × levels 0 to LARGEST, float32; of +k and -k alike
    contexts: Tensor  # one per weight, uint8

    def bits(self, levels: Tensor) -> Tensor:
        """Bits of each weight. Between whole numbers the length is linear, and so is its gradient constant.

        ``bits(u) = L(k) + (|u| - k) (L(k + 1) - L(k))`` with ``k = floor |u|``.

        >>> table = CodeLength(torch.arange(41.0)[None], torch.zeros(2, dtype=torch.uint8))
        >>> table.bits(torch.tensor([-1.25, 3.0])).tolist()
        [1.25, 3.0]
        """
        magnitude = levels.abs()
        below = magnitude.detach().clamp(max=LARGEST - 1).to(torch.int32)
        at = self.contexts.to(torch.int32) * (LARGEST + 1) + below
        flat = self.lengths.reshape(-1)  # flat[at] would first copy the indices to int64
        low = flat.index_select(0, at)
        return low + (magnitude - below) * (flat.index_select(0, at + 1) - low)

    def total(self, levels: Tensor) -> Tensor:
        """The sum of :meth:`bits`, with the same gradient, in less time.

        >>> table = CodeLength(torch.arange(41.0)[None], torch.zeros(2, dtype=torch.uint8))
        >>> table.total(torch.tensor([-1.25, 3.0])).item()
        4.25
        """
        found: Tensor = _Total.apply(levels, self.lengths, self.contexts)  # type: ignore[no-untyped-call]  # torch's own
        return found


class _Total(torch.autograd.Function):
    """Between two whole numbers the length is ``intercept + slope u``: one look into each table, no graph.

    The tables begin at ``u = -LARGEST``, so that they have the sign of u too.
    """

    @staticmethod
    def forward(ctx: Any, levels: Tensor, lengths: Tensor, contexts: Tensor) -> Tensor:
        """Bits of all weights."""
        rises = lengths.diff(dim=1)
        intercepts = lengths[:, :-1] - rises * torch.arange(LARGEST, device=lengths.device)
        slopes, intercepts = _mirrored(rises, -1).to(levels.dtype), _mirrored(intercepts, 1)
        # In place where it can be: most of the time goes into reading and writing.
        # A number that is not finite must not become an index: the loss says that the run has failed.
        below = (levels + LARGEST).nan_to_num_().clamp_(0, 2 * LARGEST - 1).to(torch.int32)
        at = torch.add(contexts, below, alpha=len(lengths), out=below)
        slope = slopes.index_select(0, at)
        ctx.save_for_backward(slope)
        return intercepts.index_select(0, at).sum() + torch.dot(slope, levels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The slopes."""
        (slope,) = ctx.saved_tensors
        return gradient * slope, None, None


def _mirrored(table: Tensor, sign: int) -> Tensor:
    """Columns for ``-LARGEST`` to ``LARGEST - 1``, those below zero times ``sign``, as one vector."""
    return torch.cat([sign * table.flip(1), table], 1).T.reshape(-1)


class Rounded(torch.autograd.Function):
    """Whole numbers; the gradient passes as it is."""

    @staticmethod
    def forward(levels: Tensor) -> Tensor:
        """Round half to even."""
        return levels.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient."""
        return gradient


@torch.no_grad()
def code_length(layout: Layout, levels: Tensor) -> CodeLength:
    """The tables that fit these levels (whole numbers): the probabilities are their own frequencies.

    Frequencies are made symmetric and non-increasing in the magnitude, so that zero is always the shortest.
    """
    contexts = torch.cat([_contexts(levels[entry.span], entry.shape) for entry in layout.entries])
    magnitude = levels.abs().clamp(max=LARGEST).long()
    places = contexts.long() * (LARGEST + 1) + magnitude
    counts = torch.bincount(places, minlength=_CONTEXTS * (LARGEST + 1)).double().view(_CONTEXTS, -1)
    counts[:, 1:] /= 2  # two signs
    counts += _PRIOR * 0.5 ** torch.arange(LARGEST + 1, dtype=torch.float64, device=counts.device)
    counts = counts.flip(1).cummax(1).values.flip(1)
    total = counts[:, :1] + 2 * counts[:, 1:].sum(1, keepdim=True)
    return CodeLength((total / counts).log2().float(), contexts)


def _contexts(levels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of one tensor: the expected magnitude is (mean of the filter) (mean of the channel) / (mean of all)."""
    if len(shape) < 2:
        return torch.full_like(levels, _CONTEXTS - 1, dtype=torch.uint8)
    magnitude = levels.abs().reshape(shape[0], shape[1], -1)
    filters, channels, inside = magnitude.shape

    def mean(dims: tuple[int, ...], count: int) -> Tensor:
        return magnitude.mean(dims) + 0.25 / count  # a quarter of a level more: never zero

    expected = mean((1, 2), channels * inside)[:, None] * mean((0, 2), filters * inside)
    expected = expected / mean((0, 1, 2), magnitude.numel())
    places = (2 * (expected.log2() + _OCTAVES)).round().clamp(0, _CONTEXTS - 2)
    return places.to(torch.uint8)[..., None].expand(magnitude.shape).reshape(-1)
