"""LSQ for parts of a tensor that are more than a channel: attention heads."""

from __future__ import annotations

from torch import Tensor, nn

from pwfn.lab.quantisers.lsq import LsqQuantiser


class PartsQuantiser(nn.Module):
    """LSQ with a step for each of as many equal parts as an axis of the weight is cut into.

    >>> import torch
    >>> quantiser = PartsQuantiser(torch.tensor([[1.0], [-1.0], [2.0], [-6.0]]), bits=2, axis=0, parts=2)
    >>> quantiser.lsq.step.tolist()  # 2 mean|w| / sqrt(Q_P), with Q_P = 1
    [2.0, 8.0]
    """

    def __init__(self, weight: Tensor, bits: int, axis: int, parts: int) -> None:
        super().__init__()
        self.axis, self.parts = axis, parts
        self.lsq = LsqQuantiser.for_weights(self._cut(weight), bits, axis)

    def forward(self, weight: Tensor) -> Tensor:
        """The quantised weight."""
        quantised: Tensor = self.lsq(self._cut(weight))
        return quantised.flatten(self.axis, self.axis + 1)

    def codebook(self, weight: Tensor | None = None) -> Tensor:
        """A row of values for each part, ascending."""
        return self.lsq.codebook(weight)

    def _cut(self, weight: Tensor) -> Tensor:
        return weight.unflatten(self.axis, (self.parts, -1))
