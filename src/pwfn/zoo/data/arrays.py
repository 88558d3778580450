"""Images that come as arrays: npz files, and scikit-learn's digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pwfn.errors import DataError, cause
from pwfn.zoo.data.described import Data, DataOptions, fingerprint
from pwfn.zoo.data.tensors import Split, TensorLoader

_NAMES = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: images N×C×H×W (uint8, or float as the network takes them), and labels."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    names: tuple[str, ...] = _NAMES  # of the four, in messages
    augment: bool = True

    def __post_init__(self) -> None:
        for images, labels, name in (
            (self.x_train, self.y_train, self.names[1]),
            (self.x_test, self.y_test, self.names[3]),
        ):
            if len(images) != len(labels):
                raise DataError(
                    f"{self.name}: {name} belongs to {len(images):,} images and has {len(labels):,} labels: "
                    "they must be as many"
                )
            if not len(images):
                raise DataError(f"{self.name}: {name} is empty: there must be images to train and to test on")
            if labels.min() < 0:
                index = int(labels.argmin())
                raise DataError(f"{self.name}: {name}[{index}] is {labels[index]}: a label is 0 or more")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: training images are {_size(self.x_train)} and test images "
                f"{_size(self.x_test)}: they must be alike"
            )

    def opened(self, kind: str, options: DataOptions, classes: int | None = None) -> Data:
        """Loaders over the arrays, on the device, and the facts."""
        channels, height, width = (int(side) for side in self.x_train.shape[1:])
        if len(options.mean) not in (0, channels):
            raise DataError(
                f"{self.name}: images are {_size(self.x_train)} and have {channels} channels, mean and std "
                f"have {len(options.mean)} numbers: take a model for images of {channels} channels"
            )
        if options.image_size is not None and (height, width) != (options.image_size,) * 2:
            raise DataError(
                f"{self.name}: images are {_size(self.x_train)}, the model takes {options.image_size}×"
                f"{options.image_size}: take a model for images of that size"
            )
        split, used = self.split(options)
        return Data(
            name=self.name,
            train=split.train,
            test=split.test,
            classes=classes or int(max(self.y_train.max(), self.y_test.max())) + 1,
            image_shape=(channels, height, width),
            fingerprint=fingerprint(kind, (used, self.x_train, self.y_train, self.x_test, self.y_test)),
            train_size=len(split.train.images),
            test_size=len(split.test.images),
            labels={self.names[1]: self.y_train, self.names[3]: self.y_test},
        )

    def split(self, options: DataOptions) -> tuple[Split, tuple[int, int]]:
        """Loaders for training and testing, and the counts trained on and held out."""
        kept, held = options.divide(self.name, len(self.x_train))
        x_train, y_train = self.x_train, self.y_train
        x_test, y_test = (self.x_test, self.y_test) if held is None else (x_train[held], y_train[held])
        if len(kept) < len(x_train):
            x_train, y_train = x_train[kept], y_train[kept]
        options.check_divisible(self.name, len(x_train), len(x_test))

        def loader(images: np.ndarray, labels: np.ndarray, size: int, train: bool) -> TensorLoader:
            try:
                on_device = torch.from_numpy(np.require(images, requirements=["C", "W"])).to(options.device)
            except torch.OutOfMemoryError as error:
                raise DataError(
                    f"{self.name}: {images.nbytes:,} bytes of images do not fit on {options.device}: use "
                    "limit, or keep them as an image folder"
                ) from error
            return TensorLoader(
                on_device,
                torch.from_numpy(labels.astype(np.int64)).to(options.device),
                size,
                shuffle=train,
                augment=train and self.augment and options.augment,
                mean=options.mean,
                std=options.std,
                seed=options.seed,
                rank=options.rank,
                world=options.world,
            )

        train = loader(x_train, y_train, options.batch_size, True)
        test = loader(x_test, y_test, options.test_batch_size or 1000, False)
        return Split(train, test), (len(kept), 0 if held is None else len(held))


def _size(images: np.ndarray) -> str:
    channels, height, width = images.shape[1:]
    return f"{height}×{width}×{channels}"


def read_npz(path: str | Path) -> Arrays:
    """The four arrays of an npz file, ``x_train, y_train, x_test, y_test``; nothing in it is run."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file, np.load(file) as stored:
            found = {name: stored[name] for name in _NAMES if name in stored}
    except Exception as error:  # numpy, zipfile and zlib each have their own for a broken file
        raise DataError(f"{path}: cannot be read as an npz file: {cause(error)}") from error
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise DataError(f"{path}: has no {' and no '.join(missing)}: the arrays are {', '.join(_NAMES)}")
    for name in ("x_train", "x_test"):
        if found[name].dtype != np.uint8 or found[name].ndim != 4:
            raise DataError(
                f"{path}: {name} is {found[name].shape} {found[name].dtype}: allowed is N×H×W×C uint8"
            )
        found[name] = np.ascontiguousarray(found[name].transpose(0, 3, 1, 2))
    for name in ("y_train", "y_test"):
        if found[name].ndim != 1 or found[name].dtype.kind not in "iu":
            raise DataError(
                f"{path}: {name} is {found[name].shape} {found[name].dtype}: allowed is N whole numbers"
            )
    return Arrays(str(path), **found)


def npz(
    path: str | Path,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Split:
    """Images from an npz file: ``x_train, y_train, x_test, y_test``, uint8, N×H×W×C.

    >>> train, test = npz("cifar10.npz", mean=(0.5,) * 3, std=(0.25,) * 3)  # doctest: +SKIP
    """
    options = DataOptions(mean=mean, std=std, batch_size=batch_size, device=device, seed=seed)
    return read_npz(path).split(options)[0]


def read_digits() -> Arrays:
    """scikit-learn's bundled 8×8 digits, 1,347 to train on and 450 to test, a fixed split."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (pixels[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels[order].astype(np.int64)
    return Arrays("digits", images[:1347], labels[:1347], images[1347:], labels[1347:], augment=False)


def digits(batch_size: int = 32, seed: int = 0) -> Split:
    """scikit-learn's bundled 8×8 digits: 1,347 images to train on, 450 to test, a fixed split.

    >>> len(digits().train.images), len(digits().test.images)
    (1347, 450)
    """
    return read_digits().split(DataOptions(batch_size=batch_size, seed=seed, test_batch_size=450))[0]
