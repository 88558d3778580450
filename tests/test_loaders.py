"""Loaders: nothing is lost or doubled on the way to a batch, and crops and flips are what they should be."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pwfn.zoo.arrays import crop_and_flip
from pwfn.zoo.data import Repeated, TensorLoader, open_source
from pwfn.zoo.epochs import shares


def targets_of(batches: Any) -> list[int]:
    return [int(target) for _, targets in batches for target in targets]


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_shares_of_an_epoch(count: int, batch_size: int, world: int) -> None:
    """For testing disjoint and complete; for training equal, and together the batches of one process."""
    exact = [shares(count, batch_size, rank, world, exact=True) for rank in range(world)]
    positions = [n for rank in exact for share in rank for n in range(count)[share]]
    assert sorted(positions) == list(range(count))
    assert all(0 < share.stop - share.start <= batch_size for rank in exact for share in rank)
    if batch_size > 1 and count >= world:
        assert {len(rank) for rank in exact} == {-(-count // (batch_size * world))}
    even = [shares(count, batch_size, rank, world, exact=False) for rank in range(world)]
    sizes = [[share.stop - share.start for share in rank] for rank in even]
    assert all(size == sizes[0] for size in sizes)
    together = [sorted(n for rank in even for n in range(count)[rank[b]]) for b in range(len(sizes[0]))]
    single = shares(count - count % world, batch_size * world, 0, 1, exact=False)
    assert together == [list(range(share.start, share.stop)) for share in single]


def test_any_iterable_has_epochs() -> None:
    told = []

    class Sampled(list[int]):
        def set_epoch(self, number: int) -> None:
            told.append(number)

    repeated = Repeated(Sampled([5, 6, 7]))
    assert (list(repeated), list(repeated.epoch(8, 2)), list(repeated.epoch(9, 3))) == ([5, 6, 7], [7], [])
    assert told == [0, 8, 9]
    exact = [list(Repeated(range(7), rank, 3, exact=True)) for rank in range(3)]
    assert exact == [[0, 3, 6], [1, 4], [2, 5]]
    even = [Repeated(range(7), rank, 3) for rank in range(3)]
    assert [(len(part), list(part.epoch(0)), list(part.epoch(0, 1))) for part in even] == [
        (2, [0, 3], [3]),
        (2, [1, 4], [4]),
        (2, [2, 5], [5]),
    ]

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    assert next(Repeated(Endless()).epoch(0, 4)) == 4
    with pytest.raises(TypeError, match="Endless has no length"):
        len(Repeated(Endless()))


@given(st.integers(0, 40), st.integers(1, 12), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_example_comes_once_with_its_target(n: int, batch_size: int, shuffle: bool) -> None:
    images = torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 1, 2, 2)
    loader = TensorLoader(images, torch.arange(n), batch_size, shuffle=shuffle)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-n // batch_size)
    assert all(len(targets) == batch_size for _, targets in batches[:-1])
    assert all(torch.equal(i, t.float().view(-1, 1, 1, 1).expand_as(i)) for i, t in batches)
    seen = targets_of(batches)
    assert (sorted(seen) if shuffle else seen) == list(range(n))
    if shuffle and n > 15:
        other = TensorLoader(images, torch.arange(n), batch_size, shuffle=True, seed=1)
        orders = [seen, list(range(n)), targets_of(loader), targets_of(other)]
        assert len(set(map(tuple, orders))) == 4


def test_the_batches_of_an_epoch_never_change() -> None:
    """Later versions must resume a run and repeat a result: order, crops and flips are pinned."""
    images = (torch.arange(20 * 3 * 6 * 5) % 251).to(torch.uint8).view(20, 3, 6, 5)
    loader = TensorLoader(images, torch.arange(20), 4, shuffle=True, augment=True, seed=5, rank=1, world=2)
    batches = list(loader.epoch(3, start=1))
    assert [targets.tolist() for _, targets in batches] == [[8, 18, 14, 0], [12, 6]]
    pixels = b"".join((batch * 255).round().to(torch.uint8).numpy().tobytes() for batch, _ in batches)
    assert hashlib.sha256(pixels).hexdigest()[:32] == "f5ec29ba49e53ce3bbc024513fa7c773"
    assert open_source("digits").fingerprint == "549943049e252774"


def test_bytes_become_shares_and_channels_are_normalised() -> None:
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)  # 1×2×1×2
    ((plain, _),) = list(TensorLoader(images, torch.zeros(1)))
    torch.testing.assert_close(plain, torch.tensor([[[[0.0, 1.0]], [[0.2, 0.4]]]]))
    ((normal, _),) = list(TensorLoader(images, torch.zeros(1), mean=(0.5, 0.2), std=(0.25, 0.1)))
    torch.testing.assert_close(normal, torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]]))
    floats = torch.tensor([[[[10.0, 20.0]]]])
    ((kept, _),) = list(TensorLoader(floats, torch.zeros(1)))
    assert torch.equal(kept, floats)  # floats are not scaled


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_crop_of_the_padded_image_and_its_mirror_occurs(dtype: torch.dtype, channels: int) -> None:
    """An asymmetric image: 162 outcomes, each with probability 1/162, some of which are equal."""
    image = torch.arange(1, 1 + 12 * channels).to(dtype).view(channels, 3, 4)
    padded = F.pad(image, (4, 4, 4, 4))
    plain = [padded[:, i : i + 3, j : j + 4] for i in range(9) for j in range(9)]
    outcomes = Counter(tuple(crop.flatten().tolist()) for crop in [*plain, *(crop.flip(2) for crop in plain)])
    draws = crop_and_flip(image.expand(8000, channels, 3, 4), torch.Generator().manual_seed(0))
    seen = Counter(tuple(draw.flatten().tolist()) for draw in draws)
    assert seen.keys() == outcomes.keys()
    for outcome, ways in outcomes.items():
        expected = 8000 * ways / 162
        assert abs(seen[outcome] - expected) < 6 * expected**0.5


def test_each_image_batch_epoch_and_process_is_augmented_on_its_own() -> None:
    images = torch.arange(1, 65, dtype=torch.float32).view(1, 1, 8, 8).expand(64, 1, 8, 8)

    def drawn(number: int, batch: int, rank: int = 0) -> set[tuple[float, ...]]:
        world = 2 if rank else 1
        loader = TensorLoader(images, torch.zeros(64), 16, augment=True, rank=rank, world=world)
        return {tuple(image.reshape(-1).tolist()) for image in next(loader.epoch(number, batch))[0]}

    sets = [drawn(0, 0), drawn(0, 1), drawn(1, 0), drawn(0, 0, rank=1)]
    assert all(len(images) > 8 for images in sets)
    assert all(left != right for left, right in itertools.combinations(sets, 2))
