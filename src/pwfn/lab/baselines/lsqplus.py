"""LSQ+: LSQ with better starting values and, for activations, a learned offset (Bhalgat et al., 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from pwfn.bayes.method import register
from pwfn.lab.activations import ActivationKind
from pwfn.lab.baselines.quantised import Codebooks, Quantised
from pwfn.lab.quantisers import Codes, LsqQuantiser, lsqplus
from pwfn.layout import Entry


@register("lsq+")
class LsqPlus(Quantised):
    """LSQ's quantiser of weights from ``s = max(|mu - 3 sigma|, |mu + 3 sigma|) / 2^(k-1)``.

    One step a layer; in transformers, where the spread of channels is wide, one an output channel.
    First and last layer have 8 bits. Activations, where wanted, have a learned step and offset a layer,
    which start at the least squared error.

    >>> from pwfn.config import Config
    >>> net = LsqPlus(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), Config(method="lsq+"))
    >>> net.codebooks
    <Codebooks.LAYER: 'layer'>
    """

    activation_kind = ActivationKind.LSQ_PLUS

    def own_codebooks(self) -> Codebooks:
        """Every output channel of a transformer, every layer of other networks."""
        attends = any(entry.attention for entry in self.layout.entries)
        return Codebooks.CHANNEL if attends else Codebooks.LAYER

    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """LSQ's, from LSQ+'s starting step."""
        bits, axis = self.bits_of(entry), self.axis_of(entry)
        return LsqQuantiser(lsqplus.initial_step(weight, bits, axis), Codes.of(bits, signed=True), axis)
