"""Data that fits in memory: it lives on the device, and is shuffled and augmented there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.errors import DataError


@dataclass
class TensorLoader:
    """Batches from tensors on one device; reads like a DataLoader, without worker processes.

    ``images`` are N×C×H×W, float or uint8 (then scaled to [0, 1]); ``mean`` and ``std`` are per
    channel. With ``augment`` every image is padded by 4, cropped at random and flipped half of
    the time. Order and augmentation come from torch's global random state.

    >>> loader = TensorLoader(torch.zeros(5, 1, 2, 2), torch.arange(5), batch_size=2)
    >>> [len(target) for _, target in loader], len(loader)
    ([2, 2, 1], 3)
    """

    images: Tensor
    targets: Tensor
    batch_size: int = 128
    shuffle: bool = False
    augment: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.images) != len(self.targets):
            raise DataError(
                f"{len(self.images):,} images and {len(self.targets):,} targets: they must be as many"
            )
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise DataError(f"batch_size is {self.batch_size!r}: allowed is a whole number of at least 1")
        channels = self.images.shape[1] if self.images.dim() > 1 else 0
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, channels):
            raise DataError(
                f"mean has {len(self.mean)} and std {len(self.std)} numbers: allowed is one of each per "
                f"channel ({channels}), or none"
            )

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device, size = self.images.device, len(self.images)
        order = torch.randperm(size, device=device) if self.shuffle else torch.arange(size, device=device)
        for start in range(0, size, self.batch_size):
            chosen = order[start : start + self.batch_size]
            yield self._prepared(self.images[chosen]), self.targets[chosen]

    def _prepared(self, images: Tensor) -> Tensor:
        if self.augment:
            images = _crop_and_flip(images)
        if images.dtype == torch.uint8:
            images = images.float() / 255
        if self.mean:
            centre = torch.tensor(self.mean, device=images.device).view(1, -1, 1, 1)
            scale = torch.tensor(self.std, device=images.device).view(1, -1, 1, 1)
            images = (images - centre) / scale
        return images


def _crop_and_flip(images: Tensor, pad: int = 4) -> Tensor:
    """A random crop of each padded image, mirrored half of the time, in one gather per axis."""
    n, channels, height, width = images.shape
    padded = F.pad(images, (pad,) * 4)
    device = images.device
    top = torch.randint(0, 2 * pad + 1, (n, 1), device=device)
    left = torch.randint(0, 2 * pad + 1, (n, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    mirrored = torch.rand(n, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    each = torch.arange(n, device=device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, channels, 1, 1)
    return padded[each, channel, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]


class Split(NamedTuple):
    """Loaders for training (shuffled) and for testing."""

    train: TensorLoader
    test: TensorLoader


def digits(batch_size: int = 32) -> Split:
    """scikit-learn's bundled 8×8 digits: 1,347 images to train on, 450 to test, a fixed split."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.from_numpy(pixels[order] / 16).float().view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[order]).long()
    return Split(
        TensorLoader(images[:1347], targets[:1347], batch_size, shuffle=True),
        TensorLoader(images[1347:], targets[1347:], 450),
    )


def npz(
    path: str | Path,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 128,
    device: torch.device | str = "cpu",
) -> Split:
    """Images from an npz file: ``x_train, y_train, x_test, y_test``, uint8, N×H×W×C."""
    try:
        with Path(path).open("rb") as file, np.load(file) as arrays:
            x_train, y_train, x_test, y_test = (
                torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")
            )
    except Exception as error:  # numpy, zipfile and zlib each have their own for a broken file
        raise DataError(f"{path}: cannot be read as x_train, y_train, x_test, y_test: {error}") from error
    pairs = (("x_train", x_train, "y_train", y_train), ("x_test", x_test, "y_test", y_test))
    for name, images, label_name, labels in pairs:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(
                f"{path}: {name} is {tuple(images.shape)} {images.dtype}: allowed is N×H×W×C uint8"
            )
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(
                f"{path}: {label_name} is {tuple(labels.shape)} {labels.dtype}: allowed is N whole numbers"
            )

    def loader(images: Tensor, labels: Tensor, size: int, train: bool) -> TensorLoader:
        on_device = images.permute(0, 3, 1, 2).contiguous().to(device)
        targets = labels.long().to(device)
        return TensorLoader(on_device, targets, size, shuffle=train, augment=train, mean=mean, std=std)

    return Split(loader(x_train, y_train, batch_size, True), loader(x_test, y_test, 1000, False))
