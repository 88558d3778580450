"""Deep Compression's k-means (Han, Mao and Dally, 2015): shared weights and their fine-tuning.

The weights lie on a line, so those nearest to a centroid are one stretch of the sorted list: an
iteration is a search of k - 1 edges and k differences of prefix sums, whatever the number of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pwfn.errors import WeightError


@dataclass(frozen=True)
class Clusters:
    """Centroids that have members, ascending (float64), each weight's index into them, and the loss."""

    centroids: Tensor
    indices: Tensor
    inertia: float
    iterations: int


@dataclass(frozen=True)
class SharedWeights:
    """Codebooks of one or more groups end to end: weight i is ``centroids[indices[i]]``."""

    centroids: Tensor
    indices: Tensor
    sizes: tuple[int, ...]
    """Centroids of each group."""


@dataclass(frozen=True)
class Members:
    """The weights in order of their centroid, and where each one's begin: made once, as indices stay."""

    order: Tensor
    offsets: Tensor
    """Of each centroid's first member in the order, and the end of the last one's."""


def linear_centroids(weights: Tensor, count: int) -> Tensor:
    """``count`` equally spaced numbers from the smallest weight to the largest, as float64.

    ``c_j = min + j * (max - min) / (count - 1)``; one centroid is put midway.

    >>> linear_centroids(torch.tensor([3.0, -1.0, 0.0]), 3).tolist()
    [-1.0, 1.0, 3.0]
    >>> linear_centroids(torch.tensor([3.0, -1.0, 0.0]), 1).tolist()
    [1.0]
    """
    _check(weights)
    if count < 1:
        raise WeightError(f"{count} centroids: at least 1 is needed")
    low, high = torch.stack(torch.aminmax(weights.detach())).double()
    if count == 1:
        return ((low + high) / 2).reshape(1)
    steps = torch.arange(count, dtype=torch.float64, device=weights.device) / (count - 1)
    # From both ends, so that each is met exactly.
    return low * (1 - steps) + high * steps


def lloyd(weights: Tensor, centroids: Tensor, *, iterations: int = 300) -> Clusters:
    """Lloyd's iterations from the centroids given, until no weight changes its cluster.

    Each weight goes to its nearest centroid (midway: the smaller one), then each centroid to the mean
    of its members. Centroids left without members move to the weights farthest from their own
    centroid, one each, which leave that cluster (the rule of scikit-learn; of equally far ones the
    smallest first); no weight at distance 0 is moved, so with fewer different weights than centroids
    some stay empty, and those are left out of the result. Sums are in float64.
    ``inertia = sum_i (w_i - c(i))^2``.

    >>> done = lloyd(torch.tensor([0.0, 1.0, 9.0, 11.0]), torch.tensor([0.0, 11.0]))
    >>> done.centroids.tolist(), done.indices.tolist(), done.inertia
    ([0.5, 10.0], [0, 0, 1, 1], 2.5)
    >>> lloyd(torch.tensor([0.0, 1.0, 11.0]), torch.tensor([0.0, 5.4, 11.0])).centroids.tolist()
    [0.0, 1.0, 11.0]
    """
    _check(weights)
    if centroids.dim() != 1 or centroids.numel() == 0 or not bool(torch.isfinite(centroids).all()):
        raise WeightError("the centroids are not a flat list of at least one finite number")
    # On the host: running sums on a GPU come out otherwise in their last digits each time.
    values = weights.detach().sort().values.cpu().double()
    sums = torch.cat((values.new_zeros(1), values.cumsum(0)))
    centres = centroids.detach().to(values).sort().values
    bounds = _bounds(values, centres)
    done = 0
    while done < iterations:
        done += 1
        centres, refilled = _means(values, sums, centres, bounds)
        before, bounds = bounds, _bounds(values, centres)
        if not refilled and torch.equal(before, bounds):
            break
    used = bounds.diff() > 0
    # Leaving out an empty one changes no one's nearest.
    centres = centres[used]
    own = torch.repeat_interleave(centres, bounds.diff()[used])
    inertia = float((values - own).square_().sum())
    centres = centres.to(weights.device)
    indices = torch.bucketize(weights.detach().double(), _edges(centres))
    return Clusters(centres, indices, inertia, done)


def kmeans(
    weights: Tensor, count: int, sizes: Sequence[int] | None = None, *, iterations: int = 300
) -> SharedWeights:
    """k-means from linear centroids: one codebook for the vector, or one for each of its groups.

    Args:
        weights: flat.
        count: centroids of a codebook (``2^bits``); a group with fewer different weights gets fewer.
        sizes: lengths of consecutive groups, a layer each; one group if None.
        iterations: at most so many.

    >>> shared = kmeans(torch.tensor([0.0, 1.0, 5.0, 7.0]), 1, sizes=[2, 2])
    >>> shared.centroids.tolist(), shared.indices.tolist(), shared.sizes
    ([0.5, 6.0], [0, 0, 1, 1], (1, 1))
    """
    _check(weights)
    sizes = [weights.numel()] if sizes is None else list(sizes)
    if sum(sizes) != weights.numel() or min(sizes, default=1) < 1:
        raise WeightError(f"groups of {sizes} weights do not make up a vector of {weights.numel()}")
    groups = [
        lloyd(part, linear_centroids(part, count), iterations=iterations)
        for part in weights.detach().split(sizes)
    ]
    lengths = [group.centroids.numel() for group in groups]
    indices, offset = [], 0
    for group, length in zip(groups, lengths, strict=True):
        indices.append(group.indices + offset)
        offset += length
    centroids = torch.cat([group.centroids for group in groups]).to(weights.dtype)
    return SharedWeights(centroids, torch.cat(indices), tuple(lengths))


def members(indices: Tensor, count: int) -> Members:
    """Which weights belong to each of ``count`` centroids.

    >>> found = members(torch.tensor([1, 0, 1]), 2)
    >>> found.order.tolist(), found.offsets.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    counts = torch.bincount(indices, minlength=count)
    if counts.numel() != count:
        raise WeightError(f"an index is {counts.numel() - 1}: there are {count} centroids only")
    return Members(indices.argsort(stable=True), F.pad(counts.cumsum(0), (1, 0)))


def centroid_gradient(gradient: Tensor, of: Members) -> Tensor:
    """``dL/dc_j = sum of dL/dw_i over the members i of j``.

    Each centroid's members lie together and are added in float64 by one segmented reduction, which a
    device does in one order every time; scattered additions on a GPU come out otherwise each time.
    Nothing waits for the device.

    >>> centroid_gradient(torch.tensor([1.0, 2.0, 4.0]), members(torch.tensor([1, 0, 1]), 2)).tolist()
    [2.0, 5.0]
    """
    ordered = gradient.detach()[of.order].double()
    # unsafe leaves out checks for which the host would wait; members() made the offsets.
    sums = torch.segment_reduce(ordered, "sum", offsets=of.offsets, unsafe=True, initial=0)
    return sums.to(gradient.dtype)


def share(centroids: Tensor, indices: Tensor, of: Members) -> Tensor:
    """The weights ``centroids[indices]``; backwards, :func:`centroid_gradient`. For any optimiser.

    >>> c, i = torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor([1, 0, 1])
    >>> w = share(c, i, members(i, 2))
    >>> (w * w).sum().backward()
    >>> w.tolist(), c.grad.tolist()
    ([2.0, 0.5, 2.0], [1.0, 8.0])
    """
    result: Tensor = _Share.apply(centroids, indices, of)  # type: ignore[no-untyped-call]  # torch's own
    return result


class _Share(torch.autograd.Function):
    """:func:`share`."""

    @staticmethod
    def forward(ctx: Any, centroids: Tensor, indices: Tensor, of: Members) -> Tensor:
        ctx.members = of
        return centroids[indices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return centroid_gradient(gradient, ctx.members), None, None


def _edges(centres: Tensor) -> Tensor:
    return (centres[:-1] + centres[1:]) / 2


def _bounds(values: Tensor, centres: Tensor) -> Tensor:
    """Where each centroid's stretch of the sorted values begins, and the end of the last."""
    inner = torch.searchsorted(values, _edges(centres), right=True)
    return torch.cat((inner.new_zeros(1), inner, inner.new_tensor([values.numel()])))


def _means(values: Tensor, sums: Tensor, centres: Tensor, bounds: Tensor) -> tuple[Tensor, bool]:
    """The members' means, ascending; empty centroids move to the farthest weights. Whether any did."""
    counts = bounds.diff()
    totals = sums[bounds].diff()
    empty = torch.nonzero(counts == 0).squeeze(1)
    # A difference of prefix sums is rounded; a mean is within its members, and so exact where they are equal.
    last = values.numel() - 1
    low, high = values[bounds[:-1].clamp_max(last)], values[(bounds[1:] - 1).clamp_min(0)]
    if empty.numel():
        owner = torch.repeat_interleave(torch.arange(centres.numel(), device=values.device), counts)
        far = _farthest((values - centres[owner]).abs_(), empty.numel())
        empty = empty[: far.numel()]
        for place in far.tolist():  # a few: one after the other subtracts them in one order
            totals[owner[place]] -= values[place]
            counts[owner[place]] -= 1
        totals[empty] = low[empty] = high[empty] = values[far]
        counts[empty] = 1
    means = (totals / counts.clamp_min(1)).clamp(low, high)
    return torch.where(counts > 0, means, centres).sort().values, empty.numel() > 0


def _farthest(distance: Tensor, count: int) -> Tensor:
    """Places of the ``count`` largest distances above 0; of equal ones the first, in ascending order."""
    count = min(count, int(distance.count_nonzero()))
    if count == 0:
        return distance.new_zeros(0, dtype=torch.int64)
    least = distance.topk(count).values[-1]
    above = torch.nonzero(distance > least).squeeze(1)
    level = torch.nonzero(distance == least).squeeze(1)[: count - above.numel()]
    return torch.cat((above, level)).sort().values


def _check(weights: Tensor) -> None:
    if weights.dim() != 1 or weights.numel() == 0 or not weights.is_floating_point():
        raise WeightError("the weights are not a flat tensor of at least one float: flatten them first")
    if not bool(torch.isfinite(weights).all()):
        position = int(torch.nonzero(~torch.isfinite(weights))[0])
        raise WeightError(f"weights[{position}] is {float(weights[position])}: every weight must be finite")
