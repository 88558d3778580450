"""LSQ+: LSQ with better starting values and, for activations, a learned offset (Bhalgat et al., 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from pwfn.activations import ActivationKind
from pwfn.config import Config
from pwfn.layout import Entry
from pwfn.methods.quantised import Quantised
from pwfn.quantisers import LsqPlusQuantiser
from pwfn.sections import Codebooks


class LsqPlus(Quantised):
    """LSQ's quantiser of weights from ``s = max(|mu - 3 sigma|, |mu + 3 sigma|) / 2^(k-1)``.

    One step a layer; in transformers, where the spread of channels is wide, one an output channel.
    First and last layer have 8 bits. Activations, where wanted, have a learned step and offset a layer,
    which start at the least squared error.

    >>> net = LsqPlus(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), Config(method="lsq+"))
    >>> net.codebooks
    <Codebooks.LAYER: 'layer'>
    """

    activation_kind = ActivationKind.LSQ_PLUS

    def __init__(self, model: nn.Module, config: Config) -> None:
        attends = any(entry.attention for entry in self.layout_of(model, config).entries)
        self.own_codebooks = Codebooks.CHANNEL if attends else Codebooks.LAYER  # type: ignore[misc]  # by network
        super().__init__(model, config)

    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """LSQ's, from LSQ+'s starting step."""
        return LsqPlusQuantiser.for_weights(weight, self.bits_of(entry), self.axis_of(entry))
