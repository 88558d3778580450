"""Data in memory: nothing is lost or doubled on the way to a batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from pwfn import DataError, data
from pwfn.data import TensorLoader
from pwfn.training import seeded

CPU = torch.device("cpu")


def numbered(n: int, channels: int = 1, side: int = 2) -> tuple[Tensor, Tensor]:
    """Images whose every pixel is their own number, which is their target too."""
    targets = torch.arange(n)
    return targets.float().view(n, 1, 1, 1).expand(n, channels, side, side).contiguous(), targets


# Batches


@given(st.integers(0, 40), st.integers(1, 12), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_example_comes_once_with_its_target(n: int, batch_size: int, shuffle: bool) -> None:
    loader = TensorLoader(*numbered(n), batch_size=batch_size, shuffle=shuffle)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-n // batch_size)
    assert all(len(targets) == batch_size for _, targets in batches[:-1])
    seen = [int(t) for _, targets in batches for t in targets]
    assert sorted(seen) == list(range(n))
    for images, targets in batches:
        assert torch.equal(images, targets.float().view(-1, 1, 1, 1).expand_as(images))
    if not shuffle:
        assert seen == list(range(n))


def test_shuffling_draws_a_new_order_each_pass_from_torchs_random_state() -> None:
    loader = TensorLoader(*numbered(50), batch_size=7, shuffle=True)

    def order() -> list[int]:
        return [int(t) for _, targets in loader for t in targets]

    with seeded(1, CPU):
        first, second = order(), order()
    with seeded(1, CPU):
        assert order() == first
    assert first != second
    assert first != list(range(50))


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
    with seeded(0, CPU):
        images = torch.randint(
            1, 255, (40, channels, height, width), dtype=dtype if dtype == torch.uint8 else None
        )
        images = images.to(dtype)
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
    with seeded(0, CPU):
        draws = data._crop_and_flip(image.expand(8000, 1, 3, 4))
    seen = Counter(tuple(draw.reshape(-1).tolist()) for draw in draws)
    assert seen.keys() == outcomes.keys()
    for outcome, ways in outcomes.items():
        expected = 8000 * ways / 162
        assert abs(seen[outcome] - expected) < 6 * expected**0.5


def test_images_in_a_batch_are_augmented_each_on_its_own() -> None:
    images = torch.arange(1, 65, dtype=torch.float32).view(1, 1, 8, 8).expand(64, 1, 8, 8)
    with seeded(0, CPU):
        augmented = data._crop_and_flip(images)
    assert len({tuple(image.reshape(-1).tolist()) for image in augmented}) > 32


def test_the_test_data_are_never_augmented_or_shuffled(tmp_path: Path) -> None:
    split = saved(tmp_path)
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


def arrays(n_train: int = 6, n_test: int = 3) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (n_train, 4, 5, 3), dtype=np.uint8),
        "y_train": generator.integers(0, 10, n_train),
        "x_test": generator.integers(0, 256, (n_test, 4, 5, 3), dtype=np.uint8),
        "y_test": generator.integers(0, 10, n_test).astype(np.uint8),
    }


def saved(folder: Path, **changes: Any) -> data.Split:
    path = folder / "images.npz"
    content = {**arrays(), **changes}
    np.savez(path, **{name: value for name, value in content.items() if value is not None})
    return data.npz(path, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), batch_size=4)


def test_an_npz_file_becomes_normalised_channels_first_images(tmp_path: Path) -> None:
    train, test = saved(tmp_path)
    content = arrays()
    assert (len(train), len(test)) == (2, 1)
    images, labels = next(iter(test))
    assert labels.tolist() == content["y_test"].tolist()
    assert labels.dtype == torch.int64
    expected = (content["x_test"].astype(np.float64) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    torch.testing.assert_close(images, torch.from_numpy(expected.transpose(0, 3, 1, 2)).float())
    assert sorted(int(t) for _, targets in train for t in targets) == sorted(content["y_train"].tolist())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, "y_test is not a file in the archive"),
        (
            {"x_train": np.zeros((6, 4, 5, 3))},
            r"x_train is \(6, 4, 5, 3\) torch.float64: allowed is N×H×W×C uint8",
        ),
        ({"x_test": np.zeros((3, 4, 5), np.uint8)}, r"x_test is \(3, 4, 5\) torch.uint8"),
        ({"y_train": np.zeros(5, np.int64)}, "6 images and 5 targets"),
        (
            {"y_train": np.zeros((6, 1), np.int64)},
            r"y_train is \(6, 1\) torch.int64: allowed is N whole numbers",
        ),
        ({"y_test": np.zeros(3)}, r"y_test is \(3,\) torch.float64: allowed is N whole numbers"),
        ({"y_test": np.array(["a", "b", "c"])}, "cannot be read"),
        ({"x_test": np.zeros((3, 4, 5, 1), np.uint8)}, r"one of each per channel \(1\)"),
    ],
)
def test_an_npz_file_of_another_form_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        saved(tmp_path, **changes)


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
    for name in ("missing.npz", "truncated.npz", "damaged.npz", "empty.npz", "text.npz", "array.npz"):
        path = tmp_path / name
        with pytest.raises(DataError, match="cannot be read as x_train, y_train, x_test, y_test") as caught:
            data.npz(path, mean=(), std=())
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
