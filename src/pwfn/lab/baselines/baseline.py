"""The network as it is: what all others are compared with, by the same measure and in the same file."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from pwfn.bayes.method import Between, Method
from pwfn.config import Config
from pwfn.file.compressed import Compressed
from pwfn.fixing.fix_round import FixRecord
from pwfn.layout import untouched


class Baseline(Method):
    """Every weight keeps its own value; with ``schedule.epochs`` the network is fine-tuned as it is.

    Nearly every weight differs from all others, so the codebook is as long as the network, and its file
    is larger than the plain weights: codebooks pay where values repeat.

    >>> net = Baseline(nn.Linear(4, 2), Config.preset("recommended", "baseline"))
    >>> net.finish().codebook.numel()
    10
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self.weight = nn.Parameter(self.layout.gather(model))

    def views(self) -> dict[str, Tensor]:
        """The weights themselves."""
        return self.layout.views(self.weight)

    def between(self, number: int, fraction: float) -> Between:
        """Nothing."""
        return Between(FixRecord(fraction, self.layout.size), self.weight.detach())

    def rounded(self) -> Self:
        """A copy as it is."""
        return copy.deepcopy(self)

    def adopt(self, compressed: Compressed) -> None:
        """Take over a finished state."""
        self.check_same_layout(compressed)
        with torch.no_grad():
            self.weight.copy_(compressed.values())
        self.model.load_state_dict(compressed.untouched, strict=False)

    def finish(self) -> Compressed:
        """Every weight's own value."""
        return Compressed.of(self.layout, self.weight.detach(), None, untouched(self.model, self.layout))

    def compared(self) -> Sequence[Tensor]:
        """The weights."""
        return (self.weight,)
