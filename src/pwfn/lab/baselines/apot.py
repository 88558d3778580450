"""APoT: levels that are sums of powers of two, a learned clip point a layer (Li, Dong & Wang, ICLR 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from pwfn.bayes.method import register
from pwfn.lab.activations import END_BITS, ActivationKind
from pwfn.lab.baselines.quantised import Codebooks, Quantised
from pwfn.lab.quantisers import ApotQuantiser, LsqQuantiser
from pwfn.layout import Entry


@register("apot")
class Apot(Quantised):
    """``alpha P((w - mean) / std)`` times std, P the nearest of the levels within ``[-1, 1]``.

    First and last layer have 8 bits and, as in the paper, a uniform quantiser: LSQ's. Activations, where
    wanted, have unsigned levels of the same kind, or signed ones where the first batch has negative inputs.

    >>> from pwfn.config import Config
    >>> config = Config(method="apot", options={"include_ends": True, "bits": 3})
    >>> net = Apot(nn.Linear(8, 4), config)
    >>> net.quantisers[0].levels.tolist()
    [0.0, 0.25, 0.5, 1.0]
    """

    activation_kind = ActivationKind.APOT
    possible_codebooks = frozenset({Codebooks.LAYER})

    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """APoT's own, from the clip point of least squared error; a uniform one for the ends."""
        if self.is_end(entry):
            return LsqQuantiser.for_weights(weight, END_BITS)
        return ApotQuantiser.for_weights(weight, self.bits_of(entry))
