"""Q-ViT: low-bit vision transformers (Li et al., NeurIPS 2022, arXiv 2210.06707).

Quantisers by head and by channel, rectified queries and keys, and distillation of their similarity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pwfn.bayes.method import register
from pwfn.config import Config
from pwfn.lab import activations
from pwfn.lab.activations import ActivationKind
from pwfn.lab.baselines.quantised import TRAINED, Codebooks, Quantised
from pwfn.lab.quantisers import LsqQuantiser, PartsQuantiser
from pwfn.layout import Entry


@register("q-vit")
class QVit(Quantised):
    """LSQ's quantisers, a step for each head of q, k and v and for each output channel of other weights.

    The paper's released program has a step for each output channel of every weight; those of a head are
    quantised alike here, as its queries, keys, values and probabilities are, so that a file has a
    codebook for each head and not one for each of its channels (``options.codebooks = "channel"``
    has the program's). The patch embedding and the head of the network have 8 bits.

    Queries and keys are rectified in any case (see :class:`pwfn.lab.activations.attention.Rectification`).
    With ``options.activation_bits`` the inputs of layers have a step and offset for each input channel,
    and queries, keys, values and attention probabilities one for each head.

    The teacher is the network as it came: in training the distance between its similarities of
    queries and of keys and this network's is added to the loss, with weight 1 as in the paper. The
    paper's other distillation, by the teacher's outputs, is a setting of the task and not of a method.

    >>> from pwfn.zoo.models import VisionTransformer
    >>> model = VisionTransformer(image_size=8, patch=4, width=12, depth=1, heads=3)
    >>> net = QVit(model, Config(method="q-vit"))
    >>> [(entry.name, *net.divided(entry)) for entry in net.layout.entries[:3]]  # axis and codebooks
    [('patch_embed.weight', 0, 12), ('blocks.0.attn.qkv.weight', 0, 9), ('blocks.0.attn.proj.weight', 0, 12)]
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        **TRAINED,
        "training.optimizer": "adamw",
        "training.learning_rate": 2e-4,
        "training.clip_norm": 1.0,
    }
    activation_kind = ActivationKind.QVIT
    possible_codebooks = frozenset({Codebooks.LAYER, Codebooks.CHANNEL, Codebooks.HEAD})

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
        activations.attach(teacher, activations.plan_capture(self.layout))
        self._teacher = (teacher,)  # in a tuple: no submodule, so neither trained nor in the state dict
        self._distance: Tensor | None = None

    def own_codebooks(self) -> Codebooks:
        """Every head, and every output channel of what has none."""
        return Codebooks.HEAD

    def quantiser(self, entry: Entry, weight: Tensor) -> nn.Module:
        """LSQ's own, of heads where they have codebooks, else of channels or of the whole."""
        heads = self._heads(entry)
        if heads is None:
            return LsqQuantiser.for_weights(weight, self.bits_of(entry), self.axis_of(entry))
        return PartsQuantiser(weight, self.bits_of(entry), *heads)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own; in training the teacher sees the same, and the distance to it is kept."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        teacher = self._teacher[0]
        with activations.capturing(teacher) as theirs, torch.no_grad():
            teacher(*args, **kwargs)
        with activations.capturing(self.model) as ours:
            out = super().forward(*args, **kwargs)
        self._distance = activations.similarity_distance(ours, theirs)
        return out

    def loss_term(self, loss: Tensor) -> Tensor | None:
        """``sum over layers and heads of ||G_q - G_q'|| + ||G_k - G_k'||`` of the pass before."""
        distance, self._distance = self._distance, None
        return distance

    def divided(self, entry: Entry) -> tuple[int, int]:
        """A codebook for each head, or as other methods have them."""
        return self._heads(entry) or super().divided(entry)

    def _heads(self, entry: Entry) -> tuple[int, int] | None:
        """Axis and number of the heads of q, k and v, where each has a codebook of its own."""
        if self.codebooks is not Codebooks.HEAD or entry.attention is None:
            return None
        return entry.attention.axis, len(entry.attention.parts) * entry.attention.heads

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The teacher moves along, though it is no submodule.
        self._teacher[0]._apply(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_distance": None}  # which is part of a graph, and cannot be copied
