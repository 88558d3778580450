"""LSQ: a uniform quantiser with a learned step for each layer (Esser et al., ICLR 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from pwfn.bayes.method import register
from pwfn.lab.activations import ActivationKind
from pwfn.lab.baselines.quantised import Quantised
from pwfn.lab.quantisers import LsqQuantiser
from pwfn.layout import Entry


@register("lsq")
class Lsq(Quantised):
    """``round(clip(w / s, -2^(k-1), 2^(k-1) - 1)) s``; one step a layer, or one an output channel.

    First and last layer have 8 bits. Activations, where wanted, have a learned step a layer.

    >>> from pwfn.config import Config
    >>> net = Lsq(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), Config(method="lsq"))
    >>> [net.bits_of(entry) for entry in net.layout.entries]
    [8, 4, 8]
    """

    activation_kind = ActivationKind.LSQ

    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """LSQ's own, from ``s = 2 mean|w| / sqrt(Q_P)``."""
        return LsqQuantiser.for_weights(weight, self.bits_of(entry), self.axis_of(entry))
