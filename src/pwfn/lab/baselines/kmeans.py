"""Deep Compression's shared weights: k-means, then the centroids are trained.

Han, Mao & Dally, ICLR 2016, arXiv 1510.00149. The weights lie on a line, so those nearest to a centroid are
one slice of the sorted list: an iteration is a search for k - 1 edges and k differences of prefix sums,
whatever the number of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pwfn.bayes.method import Method, register
from pwfn.config import Config
from pwfn.file.compressed import Compressed
from pwfn.fixing.record import FixRecord
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


class Clusters(NamedTuple):
    """Centroids and the index of each weight: weight i is shared as ``centroids[indices[i]]``."""

    centroids: Tensor
    indices: Tensor


class Members(NamedTuple):
    """The weights ordered by centroid, and where those of each centroid begin; the last offset is the end."""

    order: Tensor
    offsets: Tensor


def linear_centroids(weights: Tensor, count: int) -> Tensor:
    """``c_j = min + j (max - min) / (count - 1)`` (section 3.2, linear initialisation), as float64.

    >>> linear_centroids(torch.tensor([3.0, -1.0, 0.0]), 3).tolist()
    [-1.0, 1.0, 3.0]
    """
    low, high = torch.stack(torch.aminmax(weights.detach())).double()
    steps = torch.arange(count, dtype=torch.float64, device=weights.device) / (count - 1)
    # Interpolated from both ends, so that both are exact.
    return low * (1 - steps) + high * steps


def lloyd(weights: Tensor, centroids: Tensor, *, iterations: int = 300) -> Clusters:
    """Lloyd's iterations from the given centroids, until no weight changes its cluster.

    Each weight goes to its nearest centroid (midway: the smaller one), then each centroid to the mean of its
    members, ``c_j = mean of w_i over the members i of j``. A centroid without members moves to the weight
    farthest from its own centroid, which leaves that cluster (scikit-learn's rule; of equally far ones the
    smallest first). A weight at distance 0 never moves, so centroids stay empty if there are fewer unique
    weights than centroids; the result leaves them out. Centroids are ascending, in float64.

    >>> lloyd(torch.tensor([0.0, 1.0, 9.0, 11.0]), torch.tensor([0.0, 11.0])).centroids.tolist()
    [0.5, 10.0]
    >>> lloyd(torch.tensor([0.0, 1.0, 11.0]), torch.tensor([0.0, 5.4, 11.0])).centroids.tolist()
    [0.0, 1.0, 11.0]
    """
    # On the host: prefix sums on a GPU differ in their last digits from run to run.
    values = weights.detach().sort().values.cpu().double()
    sums = F.pad(values.cumsum(0), (1, 0))
    centres = centroids.detach().to(values).sort().values
    bounds = _bounds(values, centres)
    for _ in range(iterations):
        centres, refilled = _means(values, sums, centres, bounds)
        before, bounds = bounds, _bounds(values, centres)
        if not refilled and torch.equal(before, bounds):
            break
    # Without the empty centroids every weight keeps its nearest.
    centres = centres[bounds.diff() > 0].to(weights.device)
    return Clusters(centres, torch.bucketize(weights.detach().double(), _edges(centres)))


def kmeans(weights: Tensor, count: int, sizes: Sequence[int] | None = None) -> Clusters:
    """k-means from linear centroids: one codebook for the vector, or one for each group of weights.

    ``sizes`` are the lengths of consecutive groups, such as layers, whose codebooks are concatenated. A
    codebook has ``count`` centroids, fewer where a group has fewer unique weights.

    >>> centroids, indices = kmeans(torch.tensor([0.0, 4.0, 5.0, 7.0, 7.0]), 2, sizes=[3, 2])
    >>> centroids.tolist(), indices.tolist()
    ([0.0, 4.5, 7.0], [0, 1, 1, 2, 2])
    """
    centroids, indices, offset = [], [], 0
    for part in weights.detach().split([weights.numel()] if sizes is None else list(sizes)):
        group = lloyd(part, linear_centroids(part, count))
        centroids.append(group.centroids)
        indices.append(group.indices + offset)
        offset += group.centroids.numel()
    return Clusters(torch.cat(centroids).to(weights.dtype), torch.cat(indices))


def members(indices: Tensor, count: int) -> Members:
    """Which weights belong to each of ``count`` centroids.

    >>> found = members(torch.tensor([1, 0, 1]), 2)
    >>> found.order.tolist(), found.offsets.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    counts = torch.bincount(indices, minlength=count)
    return Members(indices.argsort(stable=True), F.pad(counts.cumsum(0), (1, 0)))


def share(centroids: Tensor, indices: Tensor, of: Members) -> Tensor:
    """The shared weights ``centroids[indices]``, with ``dL/dc_j = sum of dL/dw_i over the members i of j``.

    The gradient (eq. 3) is one segmented sum in float64 over the members in order, which gives the same bits
    every time and never waits for the device; scattered additions on a GPU do not.

    >>> c, i = torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor([1, 0, 1])
    >>> w = share(c, i, members(i, 2))
    >>> (w * w).sum().backward()
    >>> w.tolist(), c.grad.tolist()
    ([2.0, 0.5, 2.0], [1.0, 8.0])
    """
    result: Tensor = _Share.apply(centroids, indices, of)  # type: ignore[no-untyped-call]
    return result


class _Share(torch.autograd.Function):
    """:func:`share`."""

    @staticmethod
    def forward(ctx: Any, centroids: Tensor, indices: Tensor, of: Members) -> Tensor:
        ctx.of = of
        return centroids[indices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        ordered = above[ctx.of.order].double()
        # unsafe=True skips a check of the offsets that would wait for the device.
        sums = torch.segment_reduce(ordered, "sum", offsets=ctx.of.offsets, unsafe=True, initial=0)
        return sums.to(above.dtype), None, None


def _edges(centres: Tensor) -> Tensor:
    return (centres[:-1] + centres[1:]) / 2


def _bounds(values: Tensor, centres: Tensor) -> Tensor:
    """Where the slice of each centroid begins in the sorted values, and the end of the last one."""
    inner = torch.searchsorted(values, _edges(centres), right=True)
    return F.pad(F.pad(inner, (1, 0)), (0, 1), value=values.numel())


def _means(values: Tensor, sums: Tensor, centres: Tensor, bounds: Tensor) -> tuple[Tensor, bool]:
    """The means of the members, ascending, and whether an empty centroid moved to a far weight."""
    counts = bounds.diff()
    totals = sums[bounds].diff()
    empty = torch.nonzero(counts == 0).squeeze(1)
    # A difference of prefix sums is rounded: a mean clamped to its members is exact where they are equal.
    last = values.numel() - 1
    low, high = values[bounds[:-1].clamp_max(last)], values[(bounds[1:] - 1).clamp_min(0)]
    if empty.numel():
        owner = torch.repeat_interleave(torch.arange(centres.numel()), counts)
        far = _farthest((values - centres[owner]).abs_(), empty.numel())
        empty = empty[: far.numel()]
        for place in far.tolist():  # one after the other: the order of subtractions is fixed
            totals[owner[place]] -= values[place]
            counts[owner[place]] -= 1
        totals[empty] = low[empty] = high[empty] = values[far]
        counts[empty] = 1
    means = (totals / counts.clamp_min(1)).clamp(low, high)
    return torch.where(counts > 0, means, centres).sort().values, empty.numel() > 0


def _farthest(distance: Tensor, count: int) -> Tensor:
    """Ascending places of the ``count`` largest distances above 0; of equal ones, the first."""
    count = min(count, int(distance.count_nonzero()))
    if count == 0:
        return distance.new_zeros(0, dtype=torch.int64)
    least = distance.topk(count).values[-1]  # which of equal ones topk takes is not defined
    above = torch.nonzero(distance > least).squeeze(1)
    level = torch.nonzero(distance == least).squeeze(1)[: count - above.numel()]
    return torch.cat((above, level)).sort().values
