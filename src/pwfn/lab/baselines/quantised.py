"""What LSQ, LSQ+, APoT and Q-ViT share: latent weights that every pass sees through quantisers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pwfn.bayes.method import DataProbe, Method
from pwfn.config import Choice, Config, Number, Section, Switch, setting
from pwfn.errors import ConfigError, WeightError
from pwfn.file.compressed import ATTACHED, Compressed
from pwfn.fixing.record import FixRecord
from pwfn.lab import activations
from pwfn.lab.activations import END_BITS, ActivationKind
from pwfn.lab.baselines.baseline import NO_FINISH, PLAIN_STEPS
from pwfn.lab.quantisers.lsq import LsqTogether, parts_of
from pwfn.layout import Entry, Layout, held, untouched

TRAINED: dict[str, Any] = {
    # One phase and one optimiser for the whole run. There is no noise to re-estimate statistics after, and
    # everything that is not quantised was trained along: nothing is left to polish.
    **PLAIN_STEPS,
    **NO_FINISH,
    "training.learning_rate": 0.01,
    "training.scheduler": "cosine",
    "training.clip_norm": None,
    "schedule.fractions": (1.0,),
    "schedule.epochs_per_round": (27.0,),
}
"""Settings of methods that train on their codebook from the first step."""


class Codebooks(StrEnum):
    """What has a codebook of its own."""

    METHOD = "method"  # as in the method's paper
    NETWORK = "network"
    LAYER = "layer"
    CHANNEL = "channel"  # every output channel of a weight
    HEAD = "head"  # every attention head of q, k and v, and every output channel of other weights


@dataclass(frozen=True)
class QuantiserOptions(Section):
    """Options of LSQ, LSQ+, APoT, Q-ViT and k-means."""

    _name = "options"
    bits: int = setting(4, Number(2, 8, whole=True), "per weight; k-means has 2^bits centroids")
    activation_bits: int | None = setting(
        None, Number(2, 8, whole=True, optional=True), 'per input of a layer; "off": not quantised'
    )
    include_ends: bool = setting(False, Switch(), "use ``bits`` for the first and last layer too, not 8")
    codebooks: Codebooks = setting(
        Codebooks.METHOD, Choice(Codebooks), "what has a codebook of its own, where the method has a choice"
    )


class Quantised(Method):
    """One latent weight per weight of the network, and one quantiser per tensor.

    The latent weights are trained through the quantisers. The quantisers' own parameters (steps, clip
    points) are trained along without weight decay. At the end the quantised values replace the latent
    ones. Biases stay in full precision.
    """

    defaults: ClassVar[Mapping[str, Any]] = TRAINED
    Options = QuantiserOptions
    options: QuantiserOptions
    activation_kind: ClassVar[ActivationKind]
    possible_codebooks: ClassVar[frozenset[Codebooks]] = frozenset({Codebooks.LAYER, Codebooks.CHANNEL})

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """The weights alone."""
        return super().layout_of(model, config).without_biases(f"{config.method} does not quantise biases")

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self.codebooks = chosen_codebooks(self, self.own_codebooks(), self.possible_codebooks)
        self.latent = nn.Parameter(self.layout.gather(model))
        pieces = self.layout.pieces(self.latent.detach())
        self.quantisers = nn.ModuleList(
            self.quantiser(entry, piece) for entry, piece in zip(self.layout.entries, pieces, strict=True)
        )
        self._is_final = False
        self._at_once: LsqTogether | None = None  # made where the weights are
        bits, ends = self.options.activation_bits, self.options.include_ends
        if bits is not None or self.activation_kind is ActivationKind.QVIT:  # which rectifies in any case
            description = activations.plan(model, self.layout, self.activation_kind, bits, include_ends=ends)
            activations.attach(self.model, description)

    def own_codebooks(self) -> Codebooks:
        """What has a codebook in the method's paper."""
        return Codebooks.LAYER

    @abstractmethod
    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """The quantiser of one tensor of weights, with starting values from it."""

    def is_end(self, entry: Entry) -> bool:
        """Whether a tensor has the 8 bits of a first or last layer."""
        return entry.layer in self.layout.ends and not self.options.include_ends

    def bits_of(self, entry: Entry) -> int:
        """Bits of a tensor's weights."""
        return END_BITS if self.is_end(entry) else self.options.bits

    def axis_of(self, entry: Entry) -> int | None:
        """The axis along which every channel has a codebook; None: one for the tensor."""
        return None if self.codebooks is Codebooks.LAYER else entry.output_axis

    @torch.no_grad()
    def start(self, probe: DataProbe) -> None:
        """Rectifications and quantisers of activations take their starting values from a batch."""
        if hasattr(self.model, ATTACHED):
            with activations.observing(self.model):
                probe.through(self)

    def weights(self) -> dict[str, Tensor]:
        """The quantised weights; at the end, those that replaced the latent ones."""
        if self._is_final:
            return self.layout.views(self.latent)
        together = self._together()
        if together is not None:
            return self.layout.views(together(self.latent))
        pieces = self.layout.pieces(self.latent)
        quantised = [quantiser(piece) for quantiser, piece in zip(self.quantisers, pieces, strict=True)]
        return self.layout.named(quantised)

    @torch.no_grad()
    def fix(self, fraction: float) -> FixRecord:
        """After the last phase the quantised weights replace the latent ones."""
        if fraction >= 1:
            self.latent.copy_(self.state().mu)
            self.set_extra_state({"is_final": True})
        return FixRecord(fraction, self.layout.size)

    def finish(self) -> Compressed:
        """The quantised weights, with as many codebooks as the method has."""
        if not self._is_final:
            raise WeightError("the weights are still in training: call fix(1.0) first")
        record = {}
        if hasattr(self.model, ATTACHED):
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

    def parameter_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Weight decay on the weights and what is not quantised, not on steps and clip points."""
        attached = getattr(self.model, ATTACHED, nn.Module())
        learned = [*self.quantisers.parameters(), *attached.parameters()]
        known = {id(p) for p in learned}
        others = [p for p in self.parameters() if id(p) not in known]
        return [
            {"params": others, "lr": lr, "weight_decay": weight_decay},
            {"params": learned, "lr": lr, "weight_decay": 0.0},
        ]

    def get_extra_state(self) -> dict[str, bool]:
        """Whether the weights are in place."""
        return {"is_final": self._is_final}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """What ``get_extra_state`` gave."""
        self._is_final = state["is_final"]
        self.latent.requires_grad_(not self._is_final)

    def _together(self) -> LsqTogether | None:
        """All quantisers at once, where possible: far fewer operations where layers are many and small."""
        if self._at_once is None or self._at_once.device != self.latent.device:
            parts = parts_of(self.quantisers, [entry.size for entry in self.layout.entries])
            self._at_once = LsqTogether(parts, self.latent.device) if parts else None
        return self._at_once


def chosen_codebooks(net: Method, own: Codebooks, possible: frozenset[Codebooks]) -> Codebooks:
    """What has a codebook of its own, by the options; an error where the method has no such choice."""
    wanted: Codebooks = net.options.codebooks
    if wanted is Codebooks.METHOD:
        return own
    if wanted not in possible:
        names = ", ".join(f'"{each}"' for each in Codebooks if each in possible)
        raise ConfigError(
            f'options.codebooks is "{wanted}": {net.settings.method} can have {names}, or "method" for '
            "its own"
        )
    return wanted
