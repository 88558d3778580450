"""Deep Compression's shared weights: k-means, then the centroids are trained (Han, Mao & Dally, 2015)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from pwfn.bayes.method import Between, Method
from pwfn.config import Codebooks, Config
from pwfn.file.compressed import Compressed
from pwfn.fixing.fix_round import FixRecord
from pwfn.lab.baselines.kmeans_clusters import Members, kmeans, members, share
from pwfn.lab.baselines.quantised import chosen_codebooks
from pwfn.layout import Layout, held, untouched


class KMeans(Method):
    """Every weight is one of ``2^bits`` centroids of its layer, or of the network.

    Which one is settled before training, by k-means from linear centroids; training moves the centroids,
    each by the sum of its members' gradients. All layers have as many centroids. Biases stay as they are.

    >>> net = KMeans(nn.Linear(8, 8), Config(method="kmeans").override({"quantiser.bits": 2}))
    >>> net.finish().codebook.numel()
    4
    """

    indices: Tensor

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """The weights alone."""
        return super().layout_of(model, config).without_biases(f"{config.method} keeps biases as they are")

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        possible = frozenset({Codebooks.LAYER, Codebooks.NETWORK})
        self.codebooks = chosen_codebooks(config, Codebooks.LAYER, possible)
        sizes = [entry.size for entry in self.layout.entries] if self.codebooks is Codebooks.LAYER else None
        shared = kmeans(self.layout.gather(model), 2**config.quantiser.bits, sizes)
        self.centroids = nn.Parameter(shared.centroids)
        self.register_buffer("indices", shared.indices)
        self._members: Members | None = None  # by index, on the device of the weights

    def views(self) -> dict[str, Tensor]:
        """Every weight its centroid."""
        if self._members is None or self._members.order.device != self.indices.device:
            self._members = members(self.indices, self.centroids.numel())
        return self.layout.views(share(self.centroids, self.indices, self._members))

    def between(self, number: int, fraction: float) -> Between:
        """Nothing: the weights are in place all along."""
        return Between(FixRecord(fraction, self.layout.size), self.centroids.detach()[self.indices])

    def rounded(self) -> Self:
        """A copy as it is."""
        return copy.deepcopy(self)

    @torch.no_grad()
    def adopt(self, compressed: Compressed) -> None:
        """Take over a finished state of this run, whose weights share as these do."""
        self.check_same_layout(compressed)
        self.centroids[self.indices] = compressed.values().to(self.centroids)
        self.model.load_state_dict(compressed.untouched, strict=False)

    def finish(self) -> Compressed:
        """The centroids and who belongs to each."""
        values = held(self.layout, self.centroids.detach()[self.indices])
        by_layer = self.codebooks is Codebooks.LAYER
        return Compressed.of(
            *(self.layout, values, None, untouched(self.model, self.layout)),
            divide=(lambda entry: (0, 1)) if by_layer else None,
        )

    def compared(self) -> Sequence[Tensor]:
        """The centroids, and who belongs to each."""
        return (self.centroids, self.indices)

    def get_extra_state(self) -> dict[str, int]:
        """Nothing that is not in the tensors; there is one so that loading is noticed."""
        return {}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Members are found anew for the indices that came with it."""
        self._members = None
