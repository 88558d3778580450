"""Data by name: nothing is lost or doubled on the way to a batch, and any batch can be had again."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from pwfn import DataError
from pwfn.zoo import data
from pwfn.zoo.data import DataOptions, Epochs, Repeated, TensorLoader, open_source
from pwfn.zoo.data.cifar import _ArrayUnpickler
from pwfn.zoo.data.epochs import shares
from pwfn.zoo.data.tensors import crop_and_flip

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def numbered(n: int, channels: int = 1, side: int = 2) -> tuple[Tensor, Tensor]:
    """Images whose every pixel is their own number, which is their target too."""
    targets = torch.arange(n)
    return targets.float().view(n, 1, 1, 1).expand(n, channels, side, side).contiguous(), targets


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def targets_of(batches: Any) -> list[int]:
    return [int(target) for _, targets in batches for target in targets]


def same(left: Any, right: Any) -> bool:
    """Whether two lists of batches are equal to the bit."""
    return len(left) == len(right) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(left, right, strict=True)
    )


# Sources, made small


def arrays(n_train: int = 6, n_test: int = 3) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (n_train, 4, 5, 3), dtype=np.uint8),
        "y_train": draw.integers(0, 10, n_train),
        "x_test": draw.integers(0, 256, (n_test, 4, 5, 3), dtype=np.uint8),
        "y_test": draw.integers(0, 10, n_test).astype(np.uint8),
    }


def make_npz(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**arrays(), **changes}
    np.savez(folder / "images.npz", **{name: value for name, value in content.items() if value is not None})
    return f"npz:{folder / 'images.npz'}"


def make_folder(folder: Path, train: int = 5, val: int = 2) -> str:
    """Three classes of images of various sizes, JPEG and PNG, colour, grey and palette."""
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number, name in enumerate(("ape", "bee", "cat")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 256, (24 + index, 30 + number, 3), dtype=np.uint8)
                mode = ("RGB", "L", "P")[index % 3]
                ending = "JPEG" if mode != "P" else "png"
                Image.fromarray(pixels).convert(mode).save(folder / split / name / f"{index}.{ending}")
    return f"imagefolder:{folder}"


def cifar_batch(n: int, seed: int, labels: str = "labels", classes: int = 10) -> dict[bytes, Any]:
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (n, 3072), dtype=np.uint8)
    return {b"data": images, labels.encode(): draw.integers(0, classes, n).tolist()}


def make_cifar10(folder: Path, **changes: Any) -> str:
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        content = changes.get(name, cifar_batch(3, index))
        raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol=index)
        (inner / name).write_bytes(raw)
    return f"cifar10:{folder}"


def make_cifar100(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(("train", "test")):
        (folder / name).write_bytes(pickle.dumps(cifar_batch(9, index, "fine_labels", 100)))
    return f"cifar100:{folder}"


LOADERS = """
import torch
from pwfn.zoo.data import TensorLoader
def loaders():
    images, targets = torch.arange(12.0).view(12, 1, 1, 1), torch.arange(12)
    return TensorLoader(images, targets, 4, shuffle=True), list(zip(images.split(3), targets.split(3)))
def plain():
    return loaders()[1], loaders()[1]
def with_options(options):
    return [(options.batch_size, options.rank)], [0]
def one(): return [1]
def number(): return 3, 4
def endless(): return (x for x in [1]), [1]
def broken(): raise ValueError("no data today\\nsecond line")
value = 3
"""


def make_python(folder: Path, function: str = "loaders") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(LOADERS)
    return f"python:{folder / 'mine.py'}:{function}"


MAKERS: dict[str, Callable[[Path], str]] = {
    "npz": make_npz,
    "imagefolder": make_folder,
    "cifar10": make_cifar10,
    "cifar100": make_cifar100,
    "digits": lambda _: "digits",
    "python": make_python,
}


def options_for(kind: str, **changes: Any) -> DataOptions:
    fitting: dict[str, Any] = {} if kind in ("digits", "python") else dict(HALF)
    if kind == "imagefolder":
        fitting |= {"image_size": 16, "workers": 0}
    size = 500 if kind == "digits" else 4
    return DataOptions(**{"batch_size": size, "test_batch_size": 2, **fitting, **changes})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make(tmp_path_factory.mktemp(kind) / "here") for kind, make in MAKERS.items()}


# Every source


@pytest.mark.parametrize("kind", MAKERS)
def test_an_epoch_is_a_pure_function_of_its_number_and_position(kind: str, places: dict[str, str]) -> None:
    opened = open_source(places[kind], options_for(kind, seed=3))
    assert isinstance(opened.train, Epochs)
    assert isinstance(opened.test, Epochs)
    for loader in (opened.train, opened.test):
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        whole = list(loader.epoch(1))
        assert len(whole) == len(loader) >= 2
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
        torch.rand(3)
        list(loader.epoch(0))
        for start in (0, 1, len(loader) - 1, len(loader), len(loader) + 1):
            assert same(list(loader.epoch(1, start)), whole[start:])
    again = open_source(places[kind], options_for(kind, seed=3))
    assert same(list(again.train.epoch(2)), list(opened.train.epoch(2)))
    if kind != "python":  # whose loaders have a seed of their own
        other = open_source(places[kind], options_for(kind, seed=4))
        assert not same(list(other.train.epoch(2)), list(opened.train.epoch(2)))
        assert same(list(other.test.epoch(2)), list(opened.test.epoch(0)))


@pytest.mark.parametrize("kind", MAKERS)
def test_each_pass_is_the_next_epoch(kind: str, places: dict[str, str]) -> None:
    train = open_source(places[kind], options_for(kind)).train
    abandoned = iter(train)  # begun is begun, though nothing was taken
    assert same(list(train), list(train.epoch(1)))
    assert same(list(abandoned), list(train.epoch(0)))
    assert not same(list(train.epoch(0)), list(train.epoch(1)))


@pytest.mark.parametrize("kind", ["npz", "imagefolder", "cifar10", "cifar100", "digits"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_data_between_them(kind: str, world: int, places: dict[str, str]) -> None:
    alone = open_source(places[kind], options_for(kind))
    parts = [
        open_source(places[kind], options_for(kind, rank=rank, world=world, batch_size=2))
        for rank in range(world)
    ]
    assert {(part.fingerprint, part.train_size, part.classes) for part in parts} == {
        (alone.fingerprint, alone.train_size, alone.classes)
    }
    assert len({len(part.train) for part in parts}) == 1
    assert len({len(part.test) for part in parts}) == 1
    tested = [image for part in parts for images, _ in part.test.epoch(0) for image in images]
    wanted = [image for images, _ in alone.test.epoch(0) for image in images]
    assert Counter(image.numpy().tobytes() for image in tested) == Counter(
        i.numpy().tobytes() for i in wanted
    )
    trained = Counter(target for part in parts for target in targets_of(part.train.epoch(1)))
    every = Counter(targets_of(alone.train.epoch(1)))
    assert trained <= every
    assert every.total() - trained.total() < world


@pytest.mark.parametrize("kind", MAKERS)
def test_the_fingerprint_is_of_the_content_not_of_the_place(
    kind: str, places: dict[str, str], tmp_path: Path
) -> None:
    mine = open_source(places[kind], options_for(kind))
    other = MAKERS[kind](tmp_path / "some" / "where")
    assert open_source(other, options_for(kind, seed=9)).fingerprint == mine.fingerprint
    assert len(mine.fingerprint) == 16
    assert mine.name == places[kind]
    if kind != "python":
        assert open_source(other, options_for(kind, holdout=3)).fingerprint != mine.fingerprint
        assert open_source(other, options_for(kind, limit=3)).fingerprint != mine.fingerprint


def test_the_fingerprint_changes_with_any_change_of_the_content(tmp_path: Path) -> None:
    content = arrays()
    prints = [open_source(make_npz(tmp_path / "0"), DataOptions()).fingerprint]
    for name, value in content.items():
        changed = value.copy()
        changed.flat[-1] = (changed.flat[-1] + 1) % 10
        prints.append(open_source(make_npz(tmp_path / name, **{name: changed}), DataOptions()).fingerprint)
    for change in ("none", "rename", "rewrite", "remove"):
        spec = make_folder(tmp_path / change)
        file = tmp_path / change / "train" / "bee" / "0.JPEG"
        if change == "rename":
            file.rename(file.with_name("00.JPEG"))
        elif change == "rewrite":
            file.write_bytes(file.read_bytes() + b"\0")
        elif change == "remove":
            file.unlink()
        prints.append(open_source(spec, DataOptions()).fingerprint)
    path = tmp_path / "python" / "mine.py"
    for _ in range(2):
        prints.append(open_source(make_python(tmp_path / "python")).fingerprint)
    prints.append(open_source(make_python(tmp_path / "python", "plain")).fingerprint)
    assert prints[-2] == prints[-3]
    path.write_text(path.read_text() + "# changed\n")
    prints.append(open_source(f"python:{path}:plain").fingerprint)
    assert len(set(prints)) == len(prints) - 1


@pytest.mark.parametrize("kind", ["npz", "imagefolder", "cifar10", "digits"])
def test_a_holdout_is_taken_from_the_training_images_and_is_the_same_for_every_seed(
    kind: str, places: dict[str, str]
) -> None:
    opened = [open_source(places[kind], options_for(kind, holdout=3, seed=seed)) for seed in (0, 1)]
    whole = open_source(places[kind], options_for(kind, augment=False))
    assert whole.train_size is not None
    assert (opened[0].train_size, opened[0].test_size) == (whole.train_size - 3, 3)
    assert same(list(opened[0].test), list(opened[1].test))
    plain = open_source(places[kind], options_for(kind, holdout=3, augment=False))

    def images(loader: Epochs) -> Counter[bytes]:
        return Counter(image.numpy().tobytes() for batch, _ in loader.epoch(0) for image in batch)

    assert images(plain.train) + images(plain.test) == images(whole.train)
    few = open_source(places[kind], options_for(kind, holdout=3, limit=2, augment=False))
    assert few.train_size == 2
    assert images(few.train) < images(plain.train)
    assert images(few.test) == images(plain.test)
    with pytest.raises(DataError, match="training images: some must be left"):
        open_source(places[kind], options_for(kind, holdout=whole.train_size))
    with pytest.raises(DataError, match=r"2 training images do not go round 3 processes"):
        open_source(places[kind], options_for(kind, limit=2, world=3))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("imagefoldr:/x", r"'imagefoldr:/x' is of no known kind: did you mean imagefolder:DIR\?"),
        ("CIFAR10:/x", r"did you mean cifar10:DIR\?"),
        ("some/cifar.npz", r"did you mean 'npz:some/cifar.npz'\?"),
        ("/", r"did you mean 'imagefolder:/'\?"),
        (
            "qqq",
            "allowed are npz:PATH, imagefolder:DIR, cifar10:DIR, cifar100:DIR, digits, python:FILE",
        ),
        ("npz", "data source 'npz': allowed is npz:PATH"),
        ("npz:", "allowed is npz:PATH"),
        ("digits:8", "data source 'digits:8': allowed is digits"),
        ("npz:/nowhere.npz", "^/nowhere.npz: there is no such file"),
        ("imagefolder:/nowhere", "^/nowhere: there is no such folder"),
        ("cifar10:/nowhere", "^/nowhere: there is no such folder"),
        ("cifar100:/", "^/train: there is no such file"),
        ("python:/nowhere.py:f", "^/nowhere.py: there is no such file"),
        ("python:nowhere.py", "allowed is python:FILE:FUNCTION"),
    ],
)
def test_a_name_that_leads_nowhere_gets_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        open_source(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"test_batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world": 2}, "rank is 2 of 2 processes: allowed is 0 to 1"),
        ({"mean": (0.5,)}, "mean has 1 numbers and std 0"),
        ({"mean": (0.5,), "std": (0.0,)}, r"std is \(0.0,\): allowed are numbers above 0"),
        ({"interpolation": "cubic"}, "interpolation is 'cubic': allowed is one of nearest"),
        ({"crop_pct": 0.0}, "crop_pct is 0.0"),
        ({"limit": 0}, "limit is 0: allowed is a whole number of at least 1"),
        ({"holdout": -1}, "holdout is -1"),
        ({"workers": -1}, "workers is -1"),
        ({"image_size": 0}, "image_size is 0"),
    ],
)
def test_options_are_checked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        DataOptions(**change)


# Shares of an epoch


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_shares_of_a_test_set_are_disjoint_and_complete(count: int, batch_size: int, world: int) -> None:
    found = [shares(count, batch_size, rank, world, exact=True) for rank in range(world)]
    positions = [n for rank in found for share in rank for n in range(count)[share]]
    assert sorted(positions) == list(range(count))
    assert all(0 < share.stop - share.start <= batch_size for rank in found for share in rank)
    if batch_size > 1 and count >= world:
        assert {len(rank) for rank in found} == {-(-count // (batch_size * world))}


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_shares_of_a_training_set_are_equal(count: int, batch_size: int, world: int) -> None:
    found = [shares(count, batch_size, rank, world, exact=False) for rank in range(world)]
    sizes = [[share.stop - share.start for share in rank] for rank in found]
    assert all(size == sizes[0] for size in sizes)
    positions = [n for rank in found for share in rank for n in range(count)[share]]
    assert len(set(positions)) == len(positions) == count - count % world
    together = [sorted(n for rank in found for n in range(count)[rank[b]]) for b in range(len(sizes[0]))]
    single = shares(count - count % world, batch_size * world, 0, 1, exact=False)
    assert together == [list(range(share.start, share.stop)) for share in single]  # as one process would


# Any iterable


def test_any_iterable_has_epochs() -> None:
    told = []

    class Sampled(list[int]):
        def set_epoch(self, number: int) -> None:
            told.append(number)

    repeated = Repeated(Sampled([5, 6, 7]))
    assert isinstance(repeated, Epochs)
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
    loader = TensorLoader(*numbered(3))
    assert data.as_epochs(loader) is loader

    class Counting(list[int]):
        epoch = 3  # a loader's own counter, not ours

    assert isinstance(data.as_epochs(Counting()), Repeated)


# Tensors


@given(st.integers(0, 40), st.integers(1, 12), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_example_comes_once_with_its_target(n: int, batch_size: int, shuffle: bool) -> None:
    loader = TensorLoader(*numbered(n), batch_size=batch_size, shuffle=shuffle)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-n // batch_size)
    assert all(len(targets) == batch_size for _, targets in batches[:-1])
    seen = targets_of(batches)
    assert sorted(seen) == list(range(n))
    for images, targets in batches:
        assert torch.equal(images, targets.float().view(-1, 1, 1, 1).expand_as(images))
    if not shuffle:
        assert seen == list(range(n))


def test_shuffling_draws_a_new_order_each_epoch() -> None:
    loader = TensorLoader(*numbered(50), batch_size=7, shuffle=True)
    orders = [targets_of(loader) for _ in range(20)]
    assert len({tuple(order) for order in [list(range(50)), *orders]}) == 21
    other = TensorLoader(*numbered(50), batch_size=7, shuffle=True, seed=1)
    assert targets_of(other) != orders[0]


def test_bytes_become_shares_and_channels_are_normalised() -> None:
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)  # 1×2×1×2
    ((plain, _),) = list(TensorLoader(images, torch.zeros(1)))
    torch.testing.assert_close(plain, torch.tensor([[[[0.0, 1.0]], [[0.2, 0.4]]]]))
    ((normal, _),) = list(TensorLoader(images, torch.zeros(1), mean=(0.5, 0.2), std=(0.25, 0.1)))
    torch.testing.assert_close(normal, torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]]))
    assert images.dtype == torch.uint8
    floats = torch.tensor([[[[10.0, 20.0]]]])
    ((kept, _),) = list(TensorLoader(floats, torch.zeros(1)))
    assert torch.equal(kept, floats)  # floats are not scaled


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.zeros(4)}, "3 images and 4 targets"),
        ({"batch_size": 0}, "batch_size is 0: allowed is a whole number of at least 1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"rank": 1}, "rank is 1 of 1 processes"),
        ({"mean": (0.5,)}, "mean has 1 and std 0 numbers"),
        ({"std": (0.5,)}, "mean has 0 and std 1 numbers"),
        ({"mean": (0.5, 0.5), "std": (1.0, 1.0)}, r"allowed is one of each per channel \(1\), or none"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        TensorLoader(**{"images": torch.zeros(3, 1, 2, 2), "targets": torch.zeros(3), **change})


# Augmentation


def crops(image: Tensor) -> list[Tensor]:
    """Every crop of the image padded by 4, and every mirrored one."""
    _, height, width = image.shape
    padded = F.pad(image, (4, 4, 4, 4))
    plain = [padded[:, i : i + height, j : j + width] for i in range(9) for j in range(9)]
    return plain + [crop.flip(2) for crop in plain]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 5, 5), (1, 6, 4), (2, 1, 9)])
def test_an_augmented_image_is_a_crop_of_the_padded_one_or_its_mirror(
    dtype: torch.dtype, channels: int, height: int, width: int
) -> None:
    images = torch.randint(1, 255, (40, channels, height, width), generator=generator()).to(dtype)
    ((augmented, targets),) = list(TensorLoader(images, torch.arange(40), batch_size=40, augment=True))
    assert augmented.shape == images.shape
    for image, number in zip(augmented, targets, strict=True):
        original = images[number]
        scale = 255 if dtype == torch.uint8 else 1
        assert any(torch.equal(image, crop.float() / scale) for crop in crops(original))


def test_every_crop_and_its_mirror_occurs() -> None:
    """One asymmetric image, 162 different outcomes, each of probability 1/162."""
    image = torch.arange(1, 13, dtype=torch.float32).view(1, 1, 3, 4)
    outcomes = Counter(tuple(crop.reshape(-1).tolist()) for crop in crops(image[0]))
    draws = crop_and_flip(image.expand(8000, 1, 3, 4), generator())
    seen = Counter(tuple(draw.reshape(-1).tolist()) for draw in draws)
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


def test_the_test_data_are_never_augmented_or_shuffled(tmp_path: Path) -> None:
    split = data.npz(make_npz(tmp_path).removeprefix("npz:"), mean=(), std=())
    assert (split.train.shuffle, split.train.augment) == (True, True)
    assert (split.test.shuffle, split.test.augment) == (False, False)
    digits = data.digits()
    assert (digits.train.shuffle, digits.train.augment) == (True, False)
    assert (digits.test.shuffle, digits.test.augment) == (False, False)


# Digits


def rows(images: Any, labels: Any) -> Counter[bytes]:
    whole = np.concatenate([np.asarray(images).reshape(len(labels), -1), np.asarray(labels)[:, None]], axis=1)
    return Counter(row.astype(np.float64).tobytes() for row in whole)


def test_the_digits_are_split_without_loss_or_overlap() -> None:
    pixels, labels = load_digits(return_X_y=True)
    np.random.seed(123)  # the split does not depend on it
    train, test = data.digits()
    assert (len(train.images), len(test.images)) == (1347, 450)
    parts = [rows(16 * part.images.double(), part.targets) for part in (train, test)]
    assert parts[0] + parts[1] == rows(pixels, labels)
    assert train.images.shape[1:] == (1, 8, 8)
    assert float(train.images.min()) == 0
    assert float(train.images.max()) == 1
    assert set(test.targets.tolist()) == set(range(10))
    again = data.digits(batch_size=5)
    assert torch.equal(again.train.images, train.images)
    assert torch.equal(again.test.targets, test.targets)
    assert next(iter(again.train))[1].shape == (5,)


# npz files


def test_an_npz_file_becomes_normalised_channels_first_images(tmp_path: Path) -> None:
    spec = make_npz(tmp_path)
    opened = open_source(spec, DataOptions(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), batch_size=4))
    content = arrays()
    assert (len(opened.train), len(opened.test)) == (2, 1)
    assert (opened.image_shape, opened.train_size, opened.test_size) == ((3, 4, 5), 6, 3)
    assert opened.classes == max(content["y_train"].max(), content["y_test"].max()) + 1
    images, labels = next(iter(opened.test))
    assert labels.tolist() == content["y_test"].tolist()
    assert labels.dtype == torch.int64
    expected = (content["x_test"].astype(np.float64) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    torch.testing.assert_close(images, torch.from_numpy(expected.transpose(0, 3, 1, 2)).float())
    assert sorted(targets_of(opened.train)) == sorted(content["y_train"].tolist())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, "has no y_test: the arrays are x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((6, 4, 5, 3))}, r"x_train is \(6, 4, 5, 3\) float64: allowed is N×H×W×C uint8"),
        ({"x_test": np.zeros((3, 4, 5), np.uint8)}, r"x_test is \(3, 4, 5\) uint8"),
        ({"y_train": np.zeros(5, np.int64)}, "y_train belongs to 6 images and has 5 labels"),
        ({"y_train": np.zeros((6, 1), np.int64)}, r"y_train is \(6, 1\) int64: allowed is N whole numbers"),
        ({"y_test": np.zeros(3)}, r"y_test is \(3,\) float64: allowed is N whole numbers"),
        ({"y_test": np.array(["a", "b", "c"])}, r"y_test is \(3,\) <U1: allowed is N whole numbers"),
        ({"y_test": np.array([0, None, 1])}, "cannot be read as an npz file"),  # a pickled object
        ({"y_test": np.array([0, 1, -1])}, r"y_test\[2\] is -1: a label is 0 or more"),
        ({"x_test": np.zeros((3, 4, 5, 1), np.uint8)}, "training images are 4×5×3 and test images 4×5×1"),
        ({"x_test": np.zeros((0, 4, 5, 3), np.uint8), "y_test": np.zeros(0, int)}, "y_test is empty"),
    ],
)
def test_an_npz_file_of_another_form_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    spec = make_npz(tmp_path, **changes)
    with pytest.raises(DataError, match=words) as caught:
        open_source(spec)
    assert str(caught.value).startswith(spec.removeprefix("npz:"))


def test_images_that_the_model_does_not_take_are_refused(places: dict[str, str]) -> None:
    with pytest.raises(DataError, match="images are 8×8×1 and have 1 channels, mean and std have 3 numbers"):
        open_source("digits", DataOptions(**HALF))
    with pytest.raises(DataError, match="images are 32×32×3, the model takes 224×224"):
        open_source(places["cifar10"], DataOptions(image_size=224))
    with pytest.raises(DataError, match="read in 3 channels, mean and std have 1 numbers"):
        open_source(places["imagefolder"], DataOptions(mean=(0.5,), std=(1.0,)))


def test_a_file_that_is_no_npz_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.npz"
    np.savez_compressed(whole, **arrays())
    content = whole.read_bytes()
    (tmp_path / "truncated.npz").write_bytes(content[: len(content) // 2])
    middle = len(content) // 3
    (tmp_path / "damaged.npz").write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("x_train,y_train")
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    for name in ("truncated.npz", "damaged.npz", "empty.npz", "text.npz", "array.npz"):
        path = tmp_path / name
        with pytest.raises(DataError, match="cannot be read as an npz file") as caught:
            data.npz(path, mean=(), std=())
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


def test_labels_outside_the_models_classes_are_named(places: dict[str, str], tmp_path: Path) -> None:
    spec = make_npz(tmp_path, y_train=np.array([0, 1, 2, 3, 7, 9]), y_test=np.array([0, 11, 1]))
    opened = open_source(spec)
    assert opened.classes == 12
    opened.check_labels(12)
    with pytest.raises(DataError, match=r"y_test\[1\] is 11: the model has 10 classes, allowed is 0 to 9"):
        opened.check_labels(10)
    with pytest.raises(DataError, match=r"y_train\[4\] is 7: the model has 4 classes"):
        opened.check_labels(4)
    with pytest.raises(DataError, match="3 class folders and the model has 2 classes: 'cat' is the first"):
        open_source(places["imagefolder"]).check_labels(2)
    open_source(places["imagefolder"]).check_labels(1000)
    with pytest.raises(DataError, match=r"labels\[\d+\] is \d: the model has 2 classes"):
        open_source(places["cifar10"]).check_labels(2)
    open_source(places["python"]).check_labels(1)  # not known


# CIFAR


def test_cifar_batches_become_images(places: dict[str, str]) -> None:
    opened = open_source(places["cifar10"])
    assert (opened.classes, opened.image_shape) == (10, (3, 32, 32))
    assert (opened.train_size, opened.test_size) == (15, 3)
    batch = cifar_batch(3, 5)
    ((images, labels),) = list(opened.test)
    assert labels.tolist() == batch[b"labels"]
    expected = batch[b"data"].reshape(3, 3, 32, 32).astype(np.float32) / 255  # red, green, blue planes
    assert torch.equal(images, torch.from_numpy(expected))
    train = [label for n in range(5) for label in cifar_batch(3, n)[b"labels"]]
    assert sorted(targets_of(opened.train)) == sorted(train)
    hundred = open_source(places["cifar100"])
    assert (hundred.classes, hundred.train_size) == (100, 9)
    assert targets_of(hundred.test) == cifar_batch(9, 1, "fine_labels", 100)[b"fine_labels"]


def test_a_pickle_as_python_2_wrote_it_is_read(tmp_path: Path) -> None:
    """The official files are of 2009: byte strings for text, and the flags of a dtype as 0 and 1."""
    pixels = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x01M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tb\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    old = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu."
    spec = make_cifar10(tmp_path, test_batch=old)
    ((images, labels),) = list(open_source(spec).test)
    assert labels.tolist() == [7]
    assert bytes((images * 255).round().byte().reshape(-1).tolist()) == pixels


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.mkdir, ("owned",), "posix.mkdir"),
        (eval, ("__import__('os').mkdir('owned')",), "builtins.eval"),
        (getattr, (np.ndarray, "tofile"), "builtins.getattr"),
        (np.load, ("x.npy",), "numpy.load"),
        (np.fromfile, ("x",), "fromfile"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused(
    function: Any, arguments: Any, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = {**cifar_batch(3, 0), b"batch_label": Malicious(function, *arguments)}
    spec = make_cifar10(tmp_path / "x", data_batch_2=pickle.dumps(batch, protocol))
    with pytest.raises(DataError, match=f"data_batch_2: asks to run .*{name.split('.')[-1]}, which no CIFAR"):
        open_source(spec)
    assert not (tmp_path / "owned").exists()


def test_a_pickle_cannot_reach_through_a_dotted_name(tmp_path: Path) -> None:
    file = tmp_path / "dotted"
    file.write_bytes(b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.")
    with file.open("rb") as stream, pytest.raises(DataError, match=r"numpy\.ndarray\.tofile"):
        _ArrayUnpickler(stream).load()
    file.write_bytes(b"c_codecs\nencode\n(Vx\nVrot13\ntR.")
    with file.open("rb") as stream, pytest.raises(DataError, match="encodes text as 'rot13'"):
        _ArrayUnpickler(stream).load()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as a CIFAR batch: EOFError"),
        (pickle.dumps(cifar_batch(3, 0))[:500], "cannot be read as a CIFAR batch"),
        (pickle.dumps([1, 2]), "cannot be read as a CIFAR batch"),
        (pickle.dumps({b"data": np.zeros((3, 3072), np.uint8)}), "cannot be read as a CIFAR batch: KeyError"),
        ({**cifar_batch(3, 0), b"data": np.zeros((3, 3071), np.uint8)}, r"data is \(3, 3071\) uint8"),
        ({**cifar_batch(3, 0), b"labels": [1, 2]}, "a whole number for each of 3 images"),
        ({**cifar_batch(3, 0), b"labels": [1, 10, 2]}, r"labels\[1\] is 10: allowed is 0 to 9"),
    ],
)
def test_a_damaged_cifar_batch_is_named(content: Any, words: str, tmp_path: Path) -> None:
    spec = make_cifar10(tmp_path, data_batch_3=content)
    with pytest.raises(DataError, match=f"/data_batch_3: .*{words}"):
        open_source(spec)


# Folders of images


def test_a_folder_of_images_is_read_as_torchvision_would(places: dict[str, str]) -> None:
    opened = open_source(places["imagefolder"], options_for("imagefolder", interpolation="bicubic"))
    assert (opened.classes, opened.class_names, opened.image_shape) == (3, ("ape", "bee", "cat"), (3, 16, 16))
    assert (opened.train_size, opened.test_size) == (15, 6)
    from torchvision import transforms as T

    chain = T.Compose(
        [
            T.Resize(18, T.InterpolationMode.BICUBIC),  # floor(16 / 0.875)
            T.CenterCrop(16),
            T.ToTensor(),
            T.Normalize(HALF["mean"], HALF["std"]),
        ]
    )
    root = Path(places["imagefolder"].removeprefix("imagefolder:"))
    files = sorted((root / "val").rglob("*.*"))
    expected = torch.stack([chain(Image.open(file).convert("RGB")) for file in files])
    batches = list(opened.test)
    torch.testing.assert_close(torch.cat([images for images, _ in batches]), expected)
    assert targets_of(batches) == [0, 0, 1, 1, 2, 2]
    assert sorted(targets_of(opened.train)) == [0] * 5 + [1] * 5 + [2] * 5


def test_the_number_of_workers_makes_no_difference(places: dict[str, str]) -> None:
    alone, many = (
        open_source(places["imagefolder"], options_for("imagefolder", workers=workers)) for workers in (0, 2)
    )
    state = torch.get_rng_state()
    assert same(list(many.train.epoch(1)), list(alone.train.epoch(1)))
    assert same(list(many.train.epoch(2, 1)), list(alone.train.epoch(2))[1:])
    assert same(list(many.test), list(alone.test))
    assert torch.equal(torch.get_rng_state(), state)


def test_training_images_of_a_folder_are_cropped_and_flipped(tmp_path: Path) -> None:
    """Of a ramp, left to right, a crop spans less than the whole, and half of them fall."""
    ramp = np.broadcast_to(np.arange(0, 240, 5, dtype=np.uint8)[None, :, None], (48, 48, 3))
    for split in ("train", "val"):
        (tmp_path / split / "ramp").mkdir(parents=True)
        for n in range(40):
            Image.fromarray(ramp.copy()).save(tmp_path / split / "ramp" / f"{n}.png")
    spec = f"imagefolder:{tmp_path}"
    ((images, _),) = list(open_source(spec, DataOptions(image_size=16, workers=0)).train.epoch(0))
    slopes = images[:, 0, 8, -1] - images[:, 0, 8, 0]
    assert 8 < int((slopes < 0).sum()) < 32
    assert len(set(slopes.abs().tolist())) > 10
    assert float(slopes.abs().min()) < 0.5 < float(slopes.abs().max())
    plain = open_source(spec, DataOptions(image_size=16, workers=0, augment=False))
    ((images, _),) = list(plain.train.epoch(0))
    assert all(torch.equal(image, images[0]) for image in images)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "gone"])
def test_an_image_that_cannot_be_read_is_named(workers: int, damage: str, tmp_path: Path) -> None:
    spec = make_folder(tmp_path)
    bad = tmp_path / "train" / "bee" / "1.JPEG"
    opened = open_source(spec, options_for("imagefolder", workers=workers))
    whole = bad.read_bytes()
    if damage == "gone":
        bad.unlink()
    else:
        bad.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[damage])
    with pytest.raises(DataError, match=f"^{bad}: cannot be read as an image: ") as caught:
        list(opened.train.epoch(0))
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_form_is_refused(tmp_path: Path) -> None:
    def refused(change: Callable[[Path], Any], words: str, **options: Any) -> None:
        spec = make_folder(tmp_path / "f")
        change(tmp_path / "f")
        with pytest.raises(DataError, match=words) as caught:
            open_source(spec, DataOptions(**options))
        assert "\n" not in str(caught.value)
        shutil.rmtree(tmp_path / "f")

    refused(lambda f: shutil.rmtree(f / "train"), "f: has no folder 'train': the layout is train/<class>")
    refused(lambda f: shutil.rmtree(f / "val"), "f: has no folder 'val'")
    refused(lambda f: (shutil.rmtree(f / "train"), (f / "train").mkdir()), "train: has no class folders")
    refused(lambda f: (f / "train" / "dog").mkdir(), "train/dog: this class folder has no images")
    refused(lambda f: (f / "val" / "bee").rename(f / "val" / "dog"), "val/dog: this class has no folder in")
    spec = make_folder(tmp_path / "f")
    shutil.rmtree(tmp_path / "f" / "val" / "ape")  # some classes alone can be tested
    (tmp_path / "f" / "train" / "bee" / "notes.txt").write_text("not an image")
    (tmp_path / "f" / "train" / ".cache").mkdir()
    opened = open_source(spec, options_for("imagefolder"))
    assert (targets_of(opened.test), opened.train_size) == ([1, 1, 2, 2], 15)
    shutil.rmtree(tmp_path / "f" / "val")  # a holdout needs none
    assert open_source(spec, options_for("imagefolder", holdout=4)).test_size == 4


# The user's own


def test_the_users_function_makes_the_loaders(tmp_path: Path) -> None:
    spec = make_python(tmp_path)
    opened = open_source(spec)
    assert isinstance(opened.train, TensorLoader)
    assert isinstance(opened.test, Repeated)
    assert (opened.classes, opened.image_shape, len(opened.train), len(opened.test)) == (None, None, 3, 4)
    given = open_source(make_python(tmp_path, "with_options"), DataOptions(batch_size=7, rank=1, world=2))
    assert list(given.train) == [(7, 1)]
    parts = [open_source(make_python(tmp_path, "plain"), DataOptions(rank=r, world=3)) for r in range(3)]
    assert [len(part.train) for part in parts] == [1, 1, 1]
    assert sorted(t for part in parts for t in targets_of(part.test)) == list(range(12))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("loader", r"mine.py: has no function 'loader': did you mean 'loaders'\?"),
        ("xyz", "has no function 'xyz'$"),
        ("value", "has no function 'value'"),
        ("one", r"one returned a list: allowed is a pair of loaders, \(train, test\)"),
        ("number", "number returned other than two loaders: a loader is a int"),
        ("endless", "mine.py: the training loader has no length: give it __len__"),
        ("broken", "mine.py: broken failed: ValueError: no data today$"),
    ],
)
def test_a_function_of_the_users_that_does_not_serve_is_named(
    function: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        open_source(make_python(tmp_path, function))


def test_a_file_of_the_users_that_does_not_serve_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(DataError, match=r"bad.py: cannot be imported: SyntaxError"):
        open_source(f"python:{tmp_path / 'bad.py'}:f")
    (tmp_path / "notes.txt").write_text("def f(): pass")
    with pytest.raises(DataError, match=r"notes.txt: is not a Python file: its name must end in .py"):
        open_source(f"python:{tmp_path / 'notes.txt'}:f")
    with pytest.raises(DataError, match="loaders of 4 and 4 batches do not go round 5 processes"):
        open_source(make_python(tmp_path, "plain"), DataOptions(world=5))
