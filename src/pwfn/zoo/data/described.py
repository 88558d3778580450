"""What a source is asked for, and what it gives: the data with the facts that identify them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pwfn.errors import DataError
from pwfn.zoo.data.epochs import Epochs, check_share
from pwfn.zoo.models import DataConfig

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
_HASHED_BYTES = 2**28  # of an array; of a longer one every n-th row is looked at


@dataclass(frozen=True)
class DataOptions:
    """How images are prepared, batched and divided; the model's own data settings go in here.

    >>> DataOptions(batch_size=64, rank=1, world=2).batch_size
    64
    """

    mean: tuple[float, ...] = ()  # per channel, of values in [0, 1]; none: left as they are
    std: tuple[float, ...] = ()
    image_size: int | None = None  # height and width the model needs; None: 224 for folders, else any
    interpolation: str = "bilinear"
    crop_pct: float = 0.875  # share of the resized test image that the centre crop keeps
    augment: bool = True  # of training images; digits are never augmented
    batch_size: int = 128  # of each process
    test_batch_size: int | None = None  # None: batch_size for folders, 1,000 for data on the device
    seed: int = 0
    device: torch.device | str = "cpu"
    rank: int = 0
    world: int = 1
    workers: int = 4  # processes that read images; data in memory need none
    limit: int | None = None  # train on the first n images of a fixed permutation only
    holdout: int = 0  # the last n of that permutation are the test images, and are not trained on

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        check_share(self.batch_size, self.rank, self.world)
        if self.test_batch_size is not None:
            check_share(self.test_batch_size, self.rank, self.world)
        if len(self.mean) != len(self.std):
            raise DataError(f"mean has {len(self.mean)} numbers and std {len(self.std)}: they go in pairs")
        if not all(value > 0 for value in self.std):
            raise DataError(f"std is {self.std}: allowed are numbers above 0")
        if self.interpolation not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise DataError(f"interpolation is {self.interpolation!r}: allowed is one of {known}")
        if not 0 < self.crop_pct <= 1:
            raise DataError(f"crop_pct is {self.crop_pct}: allowed is more than 0 and at most 1")
        least = {"image_size": 1, "limit": 1, "holdout": 0, "workers": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise DataError(f"{name} is {value}: allowed is a whole number of at least {low}")

    @classmethod
    def prepared(cls, preparation: DataConfig, **options: Any) -> DataOptions:
        """Options for the images of a network that is known how to prepare them for."""
        return cls(
            mean=preparation.mean,
            std=preparation.std,
            image_size=preparation.image_size,
            interpolation=preparation.interpolation,
            crop_pct=preparation.crop_pct,
            **options,
        )

    def divide(self, name: str, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The training images to train on, and those held out to test on (None: the source's own).

        The permutation depends on ``count`` alone, not on the seed: every run holds out the same.

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

    def check_divisible(self, name: str, train: int, test: int) -> None:
        """Every process needs an example of each split; all processes find out alike."""
        for what, count in (("training", train), ("test", test)):
            if count < self.world:
                raise DataError(f"{name}: {count} {what} images do not go round {self.world} processes")


@dataclass(frozen=True)
class Data:
    """Data opened by name: loaders for training and testing, and what is known of them."""

    name: str  # as asked for
    train: Epochs
    test: Epochs
    classes: int | None  # None: not known
    image_shape: tuple[int, int, int] | None  # channels, height, width
    fingerprint: str  # of the content, wherever it lies
    train_size: int | None = None  # examples over all processes
    test_size: int | None = None
    class_names: tuple[str, ...] | None = None
    labels: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def check_labels(self, classes: int, advice: str = "") -> None:
        """Refuse labels that a model with this many classes cannot give; a label outside is named.

        Nothing is checked where the labels are not known beforehand (``python:`` sources). The
        advice, where there is any, ends the sentence.
        """
        advice = f": {advice}" if advice else ""
        if self.class_names is not None and len(self.class_names) > classes:
            raise DataError(
                f"{self.name}: there are {len(self.class_names):,} class folders and the model has "
                f"{classes:,} classes: {self.class_names[classes]!r} is the first without one{advice}"
            )
        for name, labels in self.labels.items():
            outside = np.flatnonzero((labels < 0) | (labels >= classes))
            if len(outside):
                raise DataError(
                    f"{self.name}: {name}[{outside[0]}] is {labels[outside[0]]}: the model has {classes:,} "
                    f"classes, allowed is 0 to {classes - 1}{advice}"
                )


def fingerprint(kind: str, parts: Iterable[Any]) -> str:
    """16 hexadecimal digits that tell data apart: arrays by shape and content, the rest by text.

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
