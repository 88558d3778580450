"""What LSQ, LSQ+, APoT and Q-ViT share: latent weights that every pass sees through quantisers."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pwfn.bayes.method import Between, Look, Method, torch_optimizer
from pwfn.bayes.optimizer import FlatOptimizer
from pwfn.config import Codebooks, Config
from pwfn.errors import ConfigError, WeightError
from pwfn.file.compressed import Compressed
from pwfn.fixing.fix_round import FixRecord
from pwfn.lab import activations
from pwfn.lab.activations import NAME, ActivationKind
from pwfn.lab.quantisers.together import LsqTogether, parts_of
from pwfn.layout import Entry, Layout, held, untouched

END_BITS = 8
"""Of the first and the last layer, as the methods' papers have them."""


class Quantised(Method):
    """A latent weight for each weight of the network, and a quantiser for each tensor of them.

    The latent weights are trained through the quantisers, whose own parameters (steps, clip points)
    are trained along without weight decay. At the end the quantised values take the place of the latent
    ones. Biases stay as they are, in full precision.
    """

    activation_kind: ClassVar[ActivationKind]
    possible_codebooks: ClassVar[frozenset[Codebooks]] = frozenset({Codebooks.LAYER, Codebooks.CHANNEL})

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """The weights alone."""
        return super().layout_of(model, config).without_biases(f"{config.method} keeps biases as they are")

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self.codebooks = chosen_codebooks(config, self.own_codebooks(), self.possible_codebooks)
        self.latent = nn.Parameter(self.layout.gather(model))
        pieces = self.layout.pieces(self.latent.detach())
        self.quantisers = nn.ModuleList(
            self.quantiser(entry, piece) for entry, piece in zip(self.layout.entries, pieces, strict=True)
        )
        self._is_final = False
        self._at_once: LsqTogether | None = None  # made where the weights are
        description = self.attached(model)
        if description is not None:
            activations.attach(self.model, description)

    def own_codebooks(self) -> Codebooks:
        """What has one in the method's paper."""
        return Codebooks.LAYER

    @abstractmethod
    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """The quantiser of one tensor of weights, with starting values from it."""

    def attached(self, model: nn.Module) -> dict[str, Any] | None:
        """What is put into the model beside the weights: quantisers of activations, if they are wanted."""
        bits, ends = self.config.quantiser.activation_bits, self.config.quantiser.include_ends
        if bits is None:
            return None
        return activations.plan(model, self.layout, self.activation_kind, bits, include_ends=ends)

    def bits_of(self, entry: Entry) -> int:
        """Bits of a tensor's weights: more for the first and the last layer, unless told."""
        quantiser = self.config.quantiser
        return END_BITS if entry.layer in self.layout.ends and not quantiser.include_ends else quantiser.bits

    def axis_of(self, entry: Entry) -> int | None:
        """Along which axis every channel has a codebook of its own; None: one for the tensor."""
        return None if self.codebooks is Codebooks.LAYER else entry.output_axis

    def begin(self, look: Look) -> None:
        """Quantisers of activations take their starting values from a batch."""
        if hasattr(self.model, NAME):
            with activations.observing(self.model):
                look.through(self)

    def views(self) -> dict[str, Tensor]:
        """The quantised weights; at the end, those that took the latent ones' place."""
        if self._is_final:
            return self.layout.views(self.latent)
        together = self._together()
        if together is not None:
            return self.layout.views(together(self.latent))
        pieces = self.layout.pieces(self.latent)
        quantised = [quantiser(piece) for quantiser, piece in zip(self.quantisers, pieces, strict=True)]
        return self.layout.named(quantised)

    def between(self, number: int, fraction: float) -> Between:
        """Nothing but, after the last stretch, the quantised weights for good."""
        if fraction >= 1:
            self._settle(self._values())
        return Between(FixRecord(fraction, self.layout.size), self._values())

    def rounded(self) -> Self:
        """A copy with the quantised weights for good."""
        other = copy.deepcopy(self)
        other._settle(other._values())
        return other

    def adopt(self, compressed: Compressed) -> None:
        """Take over a finished state."""
        self.check_same_layout(compressed)
        self._settle(compressed.values().to(self.latent))
        self.model.load_state_dict(compressed.untouched, strict=False)

    def finish(self) -> Compressed:
        """The quantised weights, with as many codebooks as the method has."""
        if not self._is_final:
            raise WeightError("the weights are still in training: the last stretch puts them in place")
        record = {}
        if hasattr(self.model, NAME):
            record["activations"] = activations.describe(self.model)
        values = held(self.layout, self.latent.detach())
        return Compressed.of(
            *(self.layout, values, None, untouched(self.model, self.layout)),
            divide=self.divided,
            record=record,
        )

    def divided(self, entry: Entry) -> tuple[int, int]:
        """Axis and number of the parts of a tensor that have codebooks of their own."""
        axis = self.axis_of(entry)
        return (0, 1) if axis is None else (axis, entry.shape[axis])

    def compared(self) -> Sequence[Tensor]:
        """The latent weights, and what the quantisers have learned."""
        return (self.latent, *self.quantisers.parameters())

    def optimizer(self, seed: int, *, alone: bool) -> torch.optim.Optimizer | FlatOptimizer:
        """Weight decay is on the weights and what is not quantised, not on steps and clip points."""
        attached = getattr(self.model, NAME, nn.Module())
        learned = [*self.quantisers.parameters(), *attached.parameters()]
        known = {id(p) for p in learned}
        others = [p for p in self.parameters() if id(p) not in known]
        decay = self.config.training.weight_decay
        groups = [{"params": others, "weight_decay": decay}, {"params": learned, "weight_decay": 0.0}]
        return torch_optimizer(groups, self.config)

    def get_extra_state(self) -> dict[str, bool]:
        """Whether the weights are in place."""
        return {"is_final": self._is_final}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """What ``get_extra_state`` gave."""
        self._is_final = state["is_final"]
        self.latent.requires_grad_(not self._is_final)

    def _together(self) -> LsqTogether | None:
        """All quantisers at once, where they can be: far fewer operations where layers are many and small."""
        if not self.config.training.fused:
            return None
        if self._at_once is None or self._at_once.device != self.latent.device:
            parts = parts_of(self.quantisers, [entry.size for entry in self.layout.entries])
            self._at_once = LsqTogether(parts, self.latent.device) if parts else None
        return self._at_once

    @torch.no_grad()
    def _values(self) -> Tensor:
        views = self.views()
        return torch.cat([views[e.name].to(self.latent.dtype).reshape(-1) for e in self.layout.entries])

    @torch.no_grad()
    def _settle(self, values: Tensor) -> None:
        self.latent.copy_(values)
        self.set_extra_state({"is_final": True})


def chosen_codebooks(config: Config, own: Codebooks, possible: frozenset[Codebooks]) -> Codebooks:
    """What has a codebook of its own, by the settings; an error where the method has no such choice.

    >>> chosen_codebooks(Config(), Codebooks.LAYER, frozenset({Codebooks.LAYER}))
    <Codebooks.LAYER: 'layer'>
    """
    wanted = config.quantiser.codebooks
    if wanted is Codebooks.METHOD:
        return own
    if wanted not in possible:
        names = ", ".join(f'"{each}"' for each in Codebooks if each in possible)
        raise ConfigError(
            f'quantiser.codebooks is "{wanted}": {config.method} can have {names}, or "method" for its own'
        )
    return wanted
