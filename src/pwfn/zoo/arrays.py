"""Data sets that fit in memory: they live on the device, and are shuffled and augmented there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.config.seeds import generator_from
from pwfn.errors import DataError, cause
from pwfn.zoo.dataset import Data, DataOptions, fingerprint
from pwfn.zoo.epochs import Epochs, epoch_order, shares

_NAMES = ("x_train", "y_train", "x_test", "y_test")


class Normaliser:
    """``(x - mean) / std`` per channel, after uint8 images are divided by 255.

    The constants are on the device from the start: copying them with every batch would make the host
    wait for the device.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.constants = torch.tensor([mean, std], device=device).view(2, 1, -1, 1, 1) if mean else None

    def __call__(self, images: Tensor) -> Tensor:
        """The normalised images."""
        if images.dtype == torch.uint8:
            images = images.float() / 255
        return images if self.constants is None else (images - self.constants[0]) / self.constants[1]


@dataclass(eq=False)
class TensorLoader(Epochs):
    """Batches from tensors on one device, without worker processes.

    ``images`` are N×C×H×W, float or uint8 (scaled to [0, 1]); ``mean`` and ``std`` are per channel. With
    ``augment`` every image is padded by 4 pixels, cropped at random and flipped with probability 1/2. The
    order depends on (seed, epoch), the augmentation on (seed, epoch, batch, rank), so an epoch can start at
    any batch at no cost. A loader that shuffles divides an epoch evenly among ``world`` processes, one that
    does not divides it exactly.

    >>> loader = TensorLoader(torch.zeros(5, 1, 2, 2), torch.arange(5), batch_size=2)
    >>> [len(target) for _, target in loader], len(loader)
    ([2, 2, 1], 3)
    >>> [target.tolist() for _, target in loader.epoch(7, start=1)]
    [[2, 3], [4]]
    """

    images: Tensor
    targets: Tensor
    batch_size: int = 128
    shuffle: bool = False
    augment: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    seed: int = 0
    rank: int = 0
    world: int = 1
    _shares: list[slice] = field(init=False, repr=False)
    _normalise: Normaliser = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count = len(self.images)
        if count != len(self.targets):
            raise DataError(f"there are {count:,} images and {len(self.targets):,} targets: give one each")
        self._shares = shares(count, self.batch_size, self.rank, self.world, exact=not self.shuffle)
        self._normalise = Normaliser(self.mean, self.std, self.images.device)

    def __len__(self) -> int:
        return len(self._shares)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number``, beginning with batch ``start``; earlier ones are not made."""
        order = epoch_order(len(self.images), self.seed, number, shuffle=self.shuffle)
        order = order.to(self.images.device)
        for batch in range(start, len(self._shares)):
            chosen = order[self._shares[batch]]
            images = self.images[chosen]
            if self.augment:
                generator = generator_from("augment", self.seed, number, batch, self.rank)
                images = crop_and_flip(images, generator)
            yield self._normalise(images), self.targets[chosen]


def crop_and_flip(images: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """A random crop of each padded image, mirrored with probability 1/2, in one gather.

    The random numbers are drawn on the CPU and copied to the device without synchronisation.

    >>> crop_and_flip(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    n, channels, height, width = images.shape
    device = images.device
    outcomes = torch.tensor([2 * pad + 1, 2 * pad + 1, 2]).view(3, 1)
    drawn = (torch.rand(3, n, generator=generator, dtype=torch.float64) * outcomes).long()
    top, left, mirrored = drawn.to(device, non_blocking=True).view(3, n, 1)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    columns = torch.where(mirrored == 1, columns.flip(1), columns)
    each = torch.arange(n, device=device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, channels, 1, 1)
    padded = F.pad(images, (pad,) * 4)
    return padded[each, channel, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]


class Split(NamedTuple):
    """Loaders for training (shuffled) and for testing."""

    train: TensorLoader
    test: TensorLoader


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: images N×C×H×W (uint8, or float as the network takes them), and labels."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    augment: bool = True

    def __post_init__(self) -> None:
        for name, images, labels in (
            ("y_train", self.x_train, self.y_train),
            ("y_test", self.x_test, self.y_test),
        ):
            if len(images) != len(labels):
                raise DataError(f"{self.name}: {name} has {len(labels):,} labels for {len(images):,} images")
            if not len(images):
                raise DataError(f"{self.name}: {name} is empty: give images to train and to test on")
            if labels.min() < 0:
                index = int(labels.argmin())
                raise DataError(f"{self.name}: {name}[{index}] is {labels[index]}: allowed is 0 or more")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: training images are {_size(self.x_train)} and test images "
                f"{_size(self.x_test)}: they must have one size"
            )

    def opened(self, spec: str, options: DataOptions, classes: int | None = None) -> Data:
        """The data set named ``spec``, on the device; ``classes`` defaults to the largest label plus 1."""
        channels, height, width = (int(side) for side in self.x_train.shape[1:])
        size = _size(self.x_train)
        options.check_channels(f"{self.name}: images are {size} and have {channels} channels", channels)
        if options.image_size is not None and (height, width) != (options.image_size,) * 2:
            raise DataError(
                f"{self.name}: images are {_size(self.x_train)}, the model takes {options.image_size}×"
                f"{options.image_size}: use a model for images of that size"
            )
        split = self.split(options)
        used = (len(split.train.images), len(split.test.images) if options.holdout else 0)
        content = (used, self.x_train, self.y_train, self.x_test, self.y_test)
        return Data(
            name=spec,
            train=split.train,
            test=split.test,
            classes=classes or int(max(self.y_train.max(), self.y_test.max())) + 1,
            image_shape=(channels, height, width),
            fingerprint=fingerprint(spec.partition(":")[0], content),
            train_size=len(split.train.images),
            test_size=len(split.test.images),
            labels={"y_train": self.y_train, "y_test": self.y_test},
        )

    def split(self, options: DataOptions) -> Split:
        """Loaders for training and testing."""
        kept, held = options.divide(self.name, len(self.x_train))
        x_train, y_train = self.x_train, self.y_train
        x_test, y_test = (self.x_test, self.y_test) if held is None else (x_train[held], y_train[held])
        if len(kept) < len(x_train):
            x_train, y_train = x_train[kept], y_train[kept]
        options.check_divisible(self.name, len(x_train), len(x_test))
        train = self._loader(x_train, y_train, options.batch_size, options, train=True)
        test = self._loader(x_test, y_test, options.test_batch_size or 1000, options, train=False)
        return Split(train, test)

    def _loader(
        self, images: np.ndarray, labels: np.ndarray, size: int, options: DataOptions, *, train: bool
    ) -> TensorLoader:
        try:
            on_device = torch.from_numpy(np.require(images, requirements=["C", "W"])).to(options.device)
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{self.name}: {images.nbytes:,} bytes of images do not fit on {options.device}: use "
                "--limit, or store them as an image folder"
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


def _size(images: np.ndarray) -> str:
    channels, height, width = images.shape[1:]
    return f"{height}×{width}×{channels}"


def read_npz(file: str | Path) -> Arrays:
    """The arrays ``x_train, y_train, x_test, y_test`` of an npz file; pickled objects are refused."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        with path.open("rb") as opened, np.load(opened) as stored:
            found = {name: stored[name] for name in _NAMES if name in stored}
    except Exception as error:  # numpy, zipfile and zlib raise different errors for a broken file
        raise DataError(f"{path}: cannot be read as an npz file: {cause(error)}") from error
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise DataError(f"{path}: has no {' and no '.join(missing)}: the arrays are {', '.join(_NAMES)}")
    for name, array in found.items():
        images = name.startswith("x_")
        channels_first = images and array.ndim == 4 and array.shape[1] in (1, 3) and array.shape[3] > 4
        if images and (array.dtype != np.uint8 or array.ndim != 4 or channels_first):
            raise DataError(f"{path}: {name} is {array.shape} {array.dtype}: allowed is N×H×W×C uint8")
        if not images and (array.dtype.kind not in "iu" or array.ndim != 1):
            raise DataError(f"{path}: {name} is {array.shape} {array.dtype}: allowed is N whole numbers")
        if images:
            found[name] = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    return Arrays(str(path), **found)


def read_digits() -> Arrays:
    """The bundled 8×8 digits (see digits.md): 1,347 to train on and 450 to test on, a fixed split."""
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)[:, None]
    labels = labels[order].astype(np.int64)
    return Arrays("digits", images[:1347], labels[:1347], images[1347:], labels[1347:], augment=False)


def digits(batch_size: int = 32) -> Split:
    """Loaders over the bundled 8×8 digits: 1,347 images to train on, 450 to test on.

    >>> len(digits().train.images), len(digits().test.images)
    (1347, 450)
    """
    return read_digits().split(DataOptions(batch_size=batch_size, test_batch_size=450))
