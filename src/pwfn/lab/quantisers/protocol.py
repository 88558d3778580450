"""What the quantisers of weights have in common."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class WeightQuantiser(Protocol):
    """A weight's quantiser: an ``nn.Module`` that is called with the weight and gives it on few values.

    Its class makes it with ``for_weights(weight, bits, axis=None)``, starting values from the weight:
    one codebook, or one for each channel along ``axis`` where the method has those. Nothing in a call
    waits for the device, so that calls can be recorded as a CUDA graph.

    >>> import torch
    >>> from pwfn.lab.quantisers import LsqQuantiser
    >>> isinstance(LsqQuantiser.for_weights(torch.ones(3), bits=4), WeightQuantiser)
    True
    """

    def __call__(self, weight: Tensor, /) -> Tensor:
        """The quantised weight, with the method's gradients."""
        ...

    def forward(self, weight: Tensor, /) -> Tensor:
        """As torch has it: what a call computes."""
        ...

    def codebook(self, weight: Tensor | None = None) -> Tensor:
        """Every value that the result can take, ascending; a row per channel where each has its own.

        Where it depends on the weight (APoT's on its standard deviation), the weight must be given.
        """
        ...
