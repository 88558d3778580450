"""What a data source is asked for, and what it returns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pwfn.errors import DataError
from pwfn.zoo.epochs import Epochs

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
_HASHED_BYTES = 2**28  # of one array; only every n-th row of a larger one is hashed


@dataclass(frozen=True)
class DataOptions:
    """How images are prepared, batched and divided among processes.

    The first five are what :func:`pwfn.zoo.models.data_config` returns for a network.

    >>> DataOptions(batch_size=64, rank=1, world=2).batch_size
    64
    """

    mean: tuple[float, ...] = ()  # per channel, of values in [0, 1]; empty: images are not normalised
    std: tuple[float, ...] = ()
    image_size: int | None = None  # height and width that the model needs; None: 224 for folders, else any
    interpolation: str = "bilinear"
    crop_pct: float = 0.875  # share of the resized test image that the centre crop keeps
    augment: bool = True  # training images; digits are never augmented
    batch_size: int = 128  # per process
    test_batch_size: int | None = None  # None: batch_size for folders, 1,000 for data in memory
    seed: int = 0
    device: torch.device | str = "cpu"
    rank: int = 0
    world: int = 1
    workers: int = 4  # processes that read image files
    limit: int | None = None  # train on the first n images of a fixed permutation
    holdout: int = 0  # test on the last n images of that permutation, and do not train on them
    testing: bool = False  # only the test data are wanted: where files for training are missing, do without

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        if not 0 <= self.rank < self.world:
            raise DataError(
                f"rank is {self.rank} of {self.world} processes: allowed is 0 to {self.world - 1}"
            )
        if len(self.mean) != len(self.std):
            raise DataError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}: give one of each per channel"
            )
        if not all(value > 0 for value in self.std):
            raise DataError(f"std is {self.std}: allowed are numbers above 0")
        if self.interpolation not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise DataError(f"interpolation is {self.interpolation!r}: allowed is one of {known}")
        if not 0 < self.crop_pct <= 1:
            raise DataError(f"crop_pct is {self.crop_pct}: allowed is more than 0 and at most 1")
        for name in ("batch_size", "test_batch_size", "image_size", "limit", "holdout", "workers"):
            value, low = getattr(self, name), 0 if name in ("holdout", "workers") else 1
            if value is not None and (not isinstance(value, int) or value < low):
                raise DataError(f"{name} is {value!r}: allowed is a whole number of at least {low}")

    def divide(self, name: str, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The training images to train on, and those held out for testing (None: the source's test images).

        The permutation depends only on ``count``: every seed holds out the same images.

        >>> DataOptions(holdout=2).divide("six", 6)
        (array([2, 3, 4, 5]), array([0, 1]))
        """
        if self.holdout >= count:
            raise DataError(
                f"{name}: holdout is {self.holdout:,} of {count:,} training images: some must be left"
            )
        if not self.holdout and self.limit is None:
            return np.arange(count), None
        order = np.random.default_rng(0).permutation(count)
        trained, held = order[: count - self.holdout], order[count - self.holdout :]
        return np.sort(trained[: self.limit]), np.sort(held) if self.holdout else None

    def check_channels(self, images: str, channels: int) -> None:
        """Refuse images whose channels are not those of mean and std; ``images`` begins the sentence."""
        if len(self.mean) not in (0, channels):
            raise DataError(
                f"{images}, mean and std have {len(self.mean)} numbers: use a model for images of {channels} "
                "channels; a model of your own names its mean, std and input_size in model.pretrained_cfg"
            )

    def check_divisible(self, name: str, train: int, test: int) -> None:
        """Refuse fewer images than processes."""
        for what, count in (("training", train), ("test", test)):
            if count < self.world:
                raise DataError(
                    f"{name}: there are {count} {what} images for {self.world} processes: use fewer processes"
                )


@dataclass(frozen=True)
class Data:
    """A data set: loaders for training and testing, and what is known about it."""

    name: str  # as given to open_source
    train: Epochs
    test: Epochs
    classes: int | None  # None: not known
    image_shape: tuple[int, int, int] | None  # channels, height, width
    fingerprint: str  # of the content, not of its path
    train_size: int | None = None  # examples of all processes
    test_size: int | None = None
    class_names: tuple[str, ...] | None = None
    labelled: bool = True  # whether the training data have labels
    labels: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def check_labels(self, classes: int, advice: str = "") -> None:
        """Refuse labels outside 0 to ``classes - 1``; ``advice`` ends the sentence.

        The labels of ``python:`` sources are not known and not checked.
        """
        advice = f": {advice}" if advice else ""
        if self.class_names is not None and len(self.class_names) > classes:
            raise DataError(
                f"{self.name}: there are {len(self.class_names):,} class folders and the model has "
                f"{classes:,} classes: {self.class_names[classes]!r} is the first without one{advice}"
            )
        if self.class_names is not None and not self.train_size and len(self.class_names) < classes:
            raise DataError(
                f"{self.name}: there are {len(self.class_names):,} class folders and the model has "
                f"{classes:,} classes: without a folder 'train' there must be one for each, in their order"
            )
        for name, labels in self.labels.items():
            outside = np.flatnonzero((labels < 0) | (labels >= classes))
            if len(outside):
                raise DataError(
                    f"{self.name}: {name}[{outside[0]}] is {labels[outside[0]]}: the model has {classes:,} "
                    f"classes, allowed is 0 to {classes - 1}{advice}"
                )


def fingerprint(kind: str, parts: Iterable[Any]) -> str:
    """16 hexadecimal digits that identify data: arrays by type, shape and content, the rest by its text.

    >>> fingerprint("npz", [np.zeros(3)]) == fingerprint("npz", [np.zeros(3)])
    True
    >>> fingerprint("npz", [np.zeros(3)]) == fingerprint("npz", [np.zeros(4)])
    False
    """
    digest = hashlib.blake2b(kind.encode(), digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"|{part.dtype.str}{part.shape}|".encode())
            step = 1 + part.nbytes // _HASHED_BYTES
            digest.update(np.ascontiguousarray(part[::step]).data.cast("B") if part.size else b"")
        else:
            raw = part if isinstance(part, bytes) else repr(part).encode()
            digest.update(f"|{len(raw)}|".encode() + raw)
    return digest.hexdigest()
