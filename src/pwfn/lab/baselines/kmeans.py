"""Deep Compression's shared weights: k-means, then the centroids are trained (Han, Mao & Dally, 2015)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from pwfn.bayes.method import Method, register
from pwfn.config import Config
from pwfn.file.compressed import Compressed
from pwfn.fixing.record import FixRecord
from pwfn.lab.baselines.kmeans_clusters import Members, kmeans, members, share
from pwfn.lab.baselines.quantised import TRAINED, Codebooks, QuantiserOptions, chosen_codebooks
from pwfn.layout import Layout, held, untouched


@register("kmeans")
class KMeans(Method):
    """Every weight is one of ``2^bits`` centroids of its layer, or of the network.

    Which one is settled before training, by k-means from linear centroids; training moves the centroids,
    each by the sum of its members' gradients. All layers have as many centroids. Biases stay as they are.

    >>> net = KMeans(nn.Linear(8, 8), Config(method="kmeans", options={"bits": 2}))
    >>> net.finish().codebook.numel()
    4
    """

    # A centroid's gradient is the sum over its members: steps are small, and clipped.
    defaults: ClassVar[Mapping[str, Any]] = {
        **TRAINED,
        "training.learning_rate": 1e-4,
        "training.clip_norm": 1.0,
    }
    Options = QuantiserOptions
    options: QuantiserOptions
    indices: Tensor

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """The weights alone."""
        return super().layout_of(model, config).without_biases(f"{config.method} does not quantise biases")

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        possible = frozenset({Codebooks.LAYER, Codebooks.NETWORK})
        self.codebooks = chosen_codebooks(self, Codebooks.LAYER, possible)
        sizes = [entry.size for entry in self.layout.entries] if self.codebooks is Codebooks.LAYER else None
        shared = kmeans(self.layout.gather(model), 2**self.options.bits, sizes)
        self.centroids = nn.Parameter(shared.centroids)
        self.register_buffer("indices", shared.indices)
        self._members: Members | None = None  # by index, on the device of the weights

    def weights(self) -> dict[str, Tensor]:
        """Every weight its centroid."""
        if self._members is None or self._members.order.device != self.indices.device:
            self._members = members(self.indices, self.centroids.numel())
        return self.layout.views(share(self.centroids, self.indices, self._members))

    def fix(self, fraction: float) -> FixRecord:
        """Nothing: the weights are in place from the start."""
        return FixRecord(fraction, self.layout.size)

    def finish(self) -> Compressed:
        """The centroids and who belongs to each."""
        values = held(self.layout, self.centroids.detach()[self.indices])
        by_layer = self.codebooks is Codebooks.LAYER
        return Compressed.of(
            *(self.layout, values, None, untouched(self.model, self.layout)),
            divide=(lambda entry: (0, 1)) if by_layer else None,
        )

    def get_extra_state(self) -> dict[str, int]:
        """Nothing that is not in the tensors; there is one so that loading is noticed."""
        return {}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Members are found anew for the indices that came with it."""
        self._members = None
