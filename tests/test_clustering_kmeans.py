"""k-means: scikit-learn's inertia from the same start, a literal loop, gradients summed over members."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from waiting import NoWaiting

from pwfn import WeightError
from pwfn.lab.baselines import kmeans_clusters as kmeans


def normal(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 0.05


def scikit(weights: Tensor, start: Tensor, iterations: int = 300) -> Any:
    cluster = pytest.importorskip("sklearn.cluster")
    model = cluster.KMeans(len(start), init=start.numpy()[:, None], n_init=1, max_iter=iterations, tol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.importorskip("sklearn.exceptions").ConvergenceWarning)
        return model.fit(weights.numpy()[:, None])


@pytest.mark.parametrize(
    ("size", "count"), [(1, 1), (127, 1), (127, 4), (127, 16), (1025, 16), (1025, 64), (4097, 256)]
)
def test_inertia_is_that_of_scikit_learn_from_the_same_start(size: int, count: int) -> None:
    weights = normal(size, seed=size + count)
    start = kmeans.linear_centroids(weights, count)
    done = kmeans.lloyd(weights, start, iterations=10_000)
    theirs = scikit(weights, start, 10_000)
    assert done.inertia == pytest.approx(theirs.inertia_, rel=1e-9, abs=1e-18)
    used = np.unique(theirs.labels_)
    np.testing.assert_allclose(done.centroids.numpy(), np.sort(theirs.cluster_centers_[used, 0]), atol=1e-12)


def test_empty_clusters_end_as_with_scikit_learn() -> None:
    # Two lumps far apart: of 16 linear centroids 12 or more have no member at first.
    weights = torch.cat((normal(500, 1) * 0.1 - 5, normal(500, 2) * 0.1 + 5))
    start = kmeans.linear_centroids(weights, 16)
    first = torch.bincount(torch.bucketize(weights, (start[1:] + start[:-1]) / 2), minlength=16)
    assert int((first == 0).sum()) >= 12
    done = kmeans.lloyd(weights, start, iterations=10_000)
    assert done.centroids.numel() == 16
    assert done.inertia == pytest.approx(scikit(weights, start, 10_000).inertia_, rel=1e-9)


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
    start = kmeans.linear_centroids(weights, 5)
    done = kmeans.lloyd(weights, start, iterations=iterations)
    assert done.iterations == min(iterations, 6)  # the sixth changes nothing
    expected = slow_lloyd(weights.tolist(), start.tolist(), iterations)
    np.testing.assert_allclose(done.centroids.numpy(), expected, rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-6, 6).map(lambda n: n / 4), min_size=1, max_size=30),
    st.lists(st.integers(-9, 9).map(lambda n: n / 8), min_size=1, max_size=9),
)
def test_a_fixed_point_of_any_input(values: list[float], start: list[float]) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    done = kmeans.lloyd(weights, torch.tensor(start, dtype=torch.float64), iterations=1000)
    assert done.iterations < 1000
    own = done.centroids[done.indices]
    # Every weight is at its nearest centroid, every centroid at the mean of its members, none is empty.
    table = (weights[:, None] - done.centroids).abs()
    torch.testing.assert_close((weights - own).abs(), table.amin(1), rtol=0, atol=1e-12)
    for j, centre in enumerate(done.centroids):
        torch.testing.assert_close(weights[done.indices == j].mean(), centre, rtol=0, atol=1e-12)
    assert done.inertia == pytest.approx(float(((weights - own) ** 2).sum()), abs=1e-12)
    if len(set(values)) <= len(start):
        assert done.centroids.tolist() == sorted(set(values))
    else:
        assert done.centroids.numel() == len(start)


def test_equal_weights_share_one_centroid_to_the_bit() -> None:
    weights = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64).repeat(1001)
    done = kmeans.lloyd(weights, kmeans.linear_centroids(weights, 16))
    assert done.centroids.tolist() == [-0.3, 0.1, 0.7]
    assert done.inertia == 0


def test_inertia_never_rises() -> None:
    weights = normal(1025)
    start = kmeans.linear_centroids(weights, 32)
    losses = [kmeans.lloyd(weights, start, iterations=n).inertia for n in (1, 2, 3, 5, 10, 50, 300)]
    assert losses == sorted(losses, reverse=True)


def test_linear_centroids_meet_both_ends() -> None:
    weights = normal(127, dtype=torch.float32)
    start = kmeans.linear_centroids(weights, 7)
    assert (start[0], start[-1]) == (weights.min(), weights.max())
    torch.testing.assert_close(start.diff(), start.diff().mean().expand(6))


def test_groups_are_clustered_each_on_its_own() -> None:
    parts = [normal(127, 1), normal(1, 2), normal(300, 3) * 5]
    shared = kmeans.kmeans(torch.cat(parts), 8, [127, 1, 300])
    assert shared.sizes == (8, 1, 8)
    offset = 0
    for part, size, indices in zip(parts, shared.sizes, shared.indices.split([127, 1, 300]), strict=True):
        alone = kmeans.lloyd(part, kmeans.linear_centroids(part, 8))
        assert torch.equal(shared.centroids[offset : offset + size], alone.centroids)
        assert torch.equal(indices - offset, alone.indices)
        offset += size


def test_one_group_is_the_whole_vector_and_keeps_its_number_type() -> None:
    weights = normal(1025, dtype=torch.float32)
    shared = kmeans.kmeans(weights, 16)
    assert shared.sizes == (16,)
    assert shared.centroids.dtype == torch.float32
    assert torch.equal(shared.indices, kmeans.kmeans(weights, 16, [1025]).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 127, 1025])
def test_centroid_gradients_are_those_of_autograd_through_indexing(size: int, dtype: torch.dtype) -> None:
    weights = normal(size, dtype=dtype)
    shared = kmeans.kmeans(weights, 16)
    of = kmeans.members(shared.indices, shared.centroids.numel())
    factor = normal(size, 9, dtype=dtype)
    one, two = (shared.centroids.clone().requires_grad_() for _ in range(2))
    ours, plain = kmeans.share(one, shared.indices, of), two[shared.indices]
    assert torch.equal(ours, plain)
    (ours.sin() * factor).sum().backward()
    (plain.sin() * factor).sum().backward()
    torch.testing.assert_close(one.grad, two.grad)
    at_weights = torch.cos(plain.detach()) * factor
    torch.testing.assert_close(kmeans.centroid_gradient(at_weights, of), two.grad)


def slow_gradient(gradient: Tensor, indices: Tensor, count: int) -> Tensor:
    """One centroid after the other, its members' gradients added exactly."""
    sums = [math.fsum(gradient[indices == j].tolist()) for j in range(count)]
    return torch.tensor(sums, dtype=torch.float64)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (127, 3), (1025, 16), (40_001, 256)])
def test_centroid_gradients_are_those_of_a_plain_loop(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(size)
    indices = torch.randint(0, count, (size,), generator=generator)
    of = kmeans.members(indices, count)
    gradient = normal(size, 1) * normal(size, 2).mul(60).exp()  # of many sizes and both signs
    found = kmeans.centroid_gradient(gradient, of)
    # An addition of float64 is off by 2^-53 of its sum, and no sum is above that of the sizes.
    slack = slow_gradient(gradient.abs(), indices, count) * size * 2.0**-53
    assert bool(((found - slow_gradient(gradient, indices, count)).abs() <= slack).all())
    assert torch.equal(found, kmeans.centroid_gradient(gradient, of))


def test_centroid_gradients_of_float32_are_added_in_float64() -> None:
    # Beside 2^30 the 1 would be lost in float32.
    gradient, of = (
        torch.tensor([2.0**30, 1.0, -(2.0**30)]),
        kmeans.members(torch.zeros(3, dtype=torch.int64), 1),
    )
    assert kmeans.centroid_gradient(gradient, of).tolist() == [1.0]


def test_no_step_with_shared_weights_waits_for_the_device() -> None:
    shared = kmeans.kmeans(normal(1025, dtype=torch.float32), 16)
    of = kmeans.members(shared.indices, 16)
    centroids = shared.centroids.requires_grad_()
    with NoWaiting():
        kmeans.share(centroids, shared.indices, of).square().sum().backward()
    assert centroids.grad is not None


def test_a_centroid_without_members_has_gradient_zero() -> None:
    of = kmeans.members(torch.tensor([2, 0]), 4)
    assert kmeans.centroid_gradient(torch.tensor([1.0, 2.0]), of).tolist() == [2.0, 0.0, 1.0, 0.0]


def test_share_takes_an_optimiser_to_the_members_mean() -> None:
    weights = normal(127)
    shared = kmeans.kmeans(weights, 4)
    of = kmeans.members(shared.indices, 4)
    centroids = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([centroids], lr=0.005)
    for _ in range(2000):
        optimizer.zero_grad()
        (kmeans.share(centroids, shared.indices, of) - weights).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(centroids.detach(), shared.centroids, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (lambda: kmeans.kmeans(torch.tensor([1.0, math.inf]), 2), r"weights\[1\] is inf"),
        (lambda: kmeans.kmeans(torch.zeros(0), 2), "at least one float"),
        (lambda: kmeans.kmeans(torch.ones(3), 2, [1, 1]), "do not make up a vector of 3"),
        (lambda: kmeans.kmeans(torch.ones(3), 0), "0 centroids"),
        (lambda: kmeans.lloyd(torch.ones(3), torch.zeros(0)), "at least one finite"),
        (lambda: kmeans.members(torch.tensor([3]), 2), "an index is 3"),
    ],
)
def test_mistakes_are_named(action: Callable[[], object], sentence: str) -> None:
    with pytest.raises(WeightError, match=sentence):
        action()
