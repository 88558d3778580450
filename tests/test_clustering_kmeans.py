"""k-means: scikit-learn's inertia from the same start, a literal loop, gradients summed over members."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from waiting import NoWaiting

from pwfn.lab.baselines.kmeans import kmeans, linear_centroids, lloyd, members, share


def normal(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 0.05


def lumps() -> Tensor:
    """Two far apart: of 16 linear centroids 12 or more have no member at first."""
    return torch.cat((normal(500, 1) * 0.1 - 5, normal(500, 2) * 0.1 + 5))


def inertia(weights: Tensor, centroids: Tensor, indices: Tensor) -> float:
    return float((weights - centroids[indices]).square().sum())


@pytest.mark.parametrize(
    ("weights", "count"),
    [(normal(127), 2), (normal(127, 2), 4), (normal(1025), 64), (lumps(), 16)],
)
def test_centroids_are_those_of_scikit_learn_from_the_same_start(weights: Tensor, count: int) -> None:
    start = linear_centroids(weights, count)
    done = lloyd(weights, start, iterations=10_000)
    cluster = pytest.importorskip("sklearn.cluster")
    theirs = cluster.KMeans(count, init=start.numpy()[:, None], n_init=1, max_iter=10_000, tol=0)
    theirs.fit(weights.numpy()[:, None])
    assert inertia(weights, *done) == pytest.approx(theirs.inertia_, rel=1e-9, abs=1e-18)
    used = np.unique(theirs.labels_)
    np.testing.assert_allclose(done.centroids.numpy(), np.sort(theirs.cluster_centers_[used, 0]), atol=1e-12)


def slow_lloyd(weights: list[float], centroids: list[float], iterations: int) -> list[float]:
    """Lloyd's iterations over plain lists, without empty clusters."""
    centroids = sorted(centroids)
    for _ in range(iterations):
        groups: list[list[float]] = [[] for _ in centroids]
        for w in weights:
            groups[min(range(len(centroids)), key=lambda j: abs(w - centroids[j]))].append(w)
        centroids = [math.fsum(g) / len(g) for g in groups]
    return centroids


@pytest.mark.parametrize("iterations", [1, 2, 7])
def test_iterations_are_those_of_a_literal_loop(iterations: int) -> None:
    weights = normal(127)
    start = linear_centroids(weights, 5)
    expected = slow_lloyd(weights.tolist(), start.tolist(), iterations)
    done = lloyd(weights, start, iterations=iterations)
    np.testing.assert_allclose(done.centroids.numpy(), expected, rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-6, 6).map(lambda n: n / 4), min_size=1, max_size=30),
    st.lists(st.integers(-9, 9).map(lambda n: n / 8), min_size=1, max_size=9),
)
def test_a_fixed_point_of_any_input(values: list[float], start: list[float]) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    centroids, indices = lloyd(weights, torch.tensor(start, dtype=torch.float64), iterations=1000)
    # Every weight is at its nearest centroid, every centroid at the mean of its members, none is empty.
    nearest = (weights[:, None] - centroids).abs().amin(1)
    torch.testing.assert_close((weights - centroids[indices]).abs(), nearest, rtol=0, atol=1e-12)
    for j, centre in enumerate(centroids):
        torch.testing.assert_close(weights[indices == j].mean(), centre, rtol=0, atol=1e-12)
    if len(set(values)) <= len(start):
        assert centroids.tolist() == sorted(set(values))
    else:
        assert centroids.numel() == len(start)


def test_equal_weights_share_one_centroid_to_the_bit() -> None:
    weights = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64).repeat(1001)
    assert lloyd(weights, linear_centroids(weights, 16)).centroids.tolist() == [-0.3, 0.1, 0.7]


def test_inertia_never_rises() -> None:
    weights = normal(1025)
    start = linear_centroids(weights, 32)
    losses = [inertia(weights, *lloyd(weights, start, iterations=n)) for n in (1, 2, 3, 5, 10, 50, 300)]
    assert losses == sorted(losses, reverse=True)


def test_linear_centroids_meet_both_ends() -> None:
    weights = normal(127, dtype=torch.float32)
    start = linear_centroids(weights, 7)
    assert (start[0], start[-1]) == (weights.min(), weights.max())
    torch.testing.assert_close(start.diff(), start.diff().mean().expand(6))


def test_groups_are_clustered_each_on_its_own_and_keep_their_number_type() -> None:
    parts = [part.float() for part in (normal(127, 1), normal(1, 2), normal(300, 3) * 5)]
    shared = kmeans(torch.cat(parts), 8, [127, 1, 300])
    assert shared.centroids.dtype == torch.float32
    offset = 0
    for part, indices in zip(parts, shared.indices.split([127, 1, 300]), strict=True):
        alone = kmeans(part, 8)
        size = alone.centroids.numel()
        assert size == min(8, len(part))
        assert torch.equal(shared.centroids[offset : offset + size], alone.centroids)
        assert torch.equal(indices - offset, alone.indices)
        offset += size


@pytest.mark.parametrize(("size", "count"), [(1, 1), (127, 3), (1025, 16), (40_001, 256)])
def test_centroid_gradients_are_those_of_a_plain_loop(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(size)
    indices = torch.randint(0, count, (size,), generator=generator)
    of, centroids = members(indices, count), normal(count).requires_grad_()
    gradient = normal(size, 1) * normal(size, 2).mul(60).exp()  # of many sizes and both signs
    weights = share(centroids, indices, of)
    assert torch.equal(weights, centroids[indices])
    one, two = (torch.autograd.grad(weights, centroids, gradient, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two)
    for j, found in enumerate(one.tolist()):
        own = gradient[indices == j].tolist()
        # An addition of float64 is off by 2^-53 of its sum, and no sum is above that of the sizes.
        assert abs(found - math.fsum(own)) <= math.fsum(map(abs, own)) * size * 2.0**-53


def test_centroid_gradients_by_hand() -> None:
    # Beside 2^30 the 1 would be lost in float32; the last centroid has no member.
    indices, gradient = torch.tensor([1, 0, 1, 1]), torch.tensor([2.0**30, 5.0, 1.0, -(2.0**30)])
    centroids, of = torch.zeros(3, requires_grad=True), members(indices, 3)
    with NoWaiting():
        share(centroids, indices, of).backward(gradient)
    assert centroids.grad is not None
    assert centroids.grad.tolist() == [5.0, 1.0, 0.0]
