"""Out-of-distribution data by name: another data set, noise, or a change of the network's own test images.

``npz:PATH`` and every other source of :mod:`pwfn.zoo.data`; ``noise``; ``shift:rotate:90`` and the like.
Images are normalised like the network's own. Random numbers depend on the seed and the index of the example
only, not on batch size or device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.config.seeds import generator_from
from pwfn.errors import DataError, cause
from pwfn.zoo import data
from pwfn.zoo.data import Data, DataOptions, Epochs, TensorLoader


class Shift(NamedTuple):
    """A change of images N×C×H×W in [0, 1], and the range of its strength."""

    unit: str
    lowest: float
    highest: float
    change: Callable[[Tensor, float, Tensor], Tensor]  # images, strength, random numbers
    random: Callable[..., Tensor] | None = None  # draws the random numbers of one image


def _gaussian(images: Tensor, std: float, noise: Tensor) -> Tensor:
    """``clamp(x + std eps)``."""
    return (images + std * noise).clamp(0, 1)


def _rotate(images: Tensor, degrees: float, _: Tensor) -> Tensor:
    """Anticlockwise about the centre; corners become black."""
    quarters, rest = divmod(degrees, 90)
    height, width = images.shape[2:]
    if rest == 0 and (height == width or quarters % 2 == 0):
        return images.rot90(int(quarters), (2, 3))  # exact, without interpolation
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # From a pixel of the result to its origin, in coordinates from -1 to 1 along each side.
    turn = images.new_tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _contrast(images: Tensor, factor: float, _: Tensor) -> Tensor:
    """``m + factor (x - m)`` with m the mean of the image."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + factor * (images - mean)


NOISE = Shift("", 0.0, 0.0, lambda images, _, noise: noise.to(images), torch.rand)
"""Uniform noise in [0, 1] instead of the image."""

SHIFTS = {
    "gaussian": Shift("STD", 0.0, 10.0, _gaussian, torch.randn),
    "rotate": Shift("DEGREES", -360.0, 360.0, _rotate),
    "contrast": Shift("FACTOR", 0.0, 1.0, _contrast),
}


class OodData(NamedTuple):
    """A loader of out-of-distribution images, and what was done to them, if that should be said."""

    loader: Epochs
    note: str = ""


def open_ood(spec: str, own: Data, options: DataOptions) -> OodData:
    """Out-of-distribution data by name, for a network with test data ``own`` prepared by ``options``.

    >>> own = data.open_source("digits")
    >>> len(open_ood("shift:rotate:90", own, DataOptions()).loader) == len(own.test)
    True
    """
    kind, _, rest = spec.partition(":")
    if spec == "noise":
        return OodData(_shifted(spec, own, options, NOISE, 0.0), "uniform noise instead of images")
    if kind == "shift":
        name, _, strength = rest.partition(":")
        if name not in SHIFTS:
            raise DataError(f"{spec!r} is not a known shift: allowed are {_usage()}")
        return OodData(_shifted(spec, own, options, SHIFTS[name], _strength(spec, name, strength)))
    if kind == "npz" and rest and own.image_shape is not None:
        images, note = _fitted(_read_images(Path(rest).expanduser()), own.image_shape, rest)
        images = images.contiguous().to(options.device)
        labels, size = images.new_zeros(len(images), dtype=torch.int64), options.test_batch_size or 1000
        return OodData(TensorLoader(images, labels, size, mean=options.mean, std=options.std), note)
    if kind not in data.SOURCES:
        known = ", ".join(source.usage for source in data.SOURCES.values())
        raise DataError(f"{spec!r} is not known out-of-distribution data: allowed are {_usage()}, {known}")
    return OodData(data.open_source(spec, options).test)


def _usage() -> str:
    return ", ".join(["noise", *(f"shift:{name}:{shift.unit}" for name, shift in SHIFTS.items())])


def _strength(spec: str, name: str, text: str) -> float:
    unit, low, high, *_ = SHIFTS[name]
    try:
        strength = float(text)
    except ValueError:
        strength = math.nan
    if not low <= strength <= high:
        raise DataError(f"{spec!r}: allowed is shift:{name}:{unit} with {unit} from {low:g} to {high:g}")
    return strength


def _shifted(spec: str, own: Data, options: DataOptions, shift: Shift, strength: float) -> Epochs:
    if own.image_shape is None:
        raise DataError(
            f"{spec!r} with data {own.name!r}: how its images are normalised is not known, so they cannot be "
            "changed: give other data with python:FILE:FUNCTION"
        )
    return Shifted(own.test, shift, strength, options)


@dataclass(eq=False)
class Shifted(Epochs):
    """The images of another loader after a shift, without labels; the same in every epoch.

    Images are taken back to [0, 1] by ``x std + mean``, changed there, and normalised again.
    """

    loader: Epochs
    shift: Shift
    strength: float
    options: DataOptions

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int, start: int = 0) -> Iterator[Tensor]:
        """The batches of epoch ``number``, from batch ``start`` on."""
        examples = 0
        for position, (images, _) in enumerate(self.loader.epoch(number)):
            if position >= start:
                yield self._batch(images, examples)
            examples += len(images)

    def _batch(self, images: Tensor, first: int) -> Tensor:
        mean = images.new_tensor(self.options.mean or (0.0,)).view(1, -1, 1, 1)
        std = images.new_tensor(self.options.std or (1.0,)).view(1, -1, 1, 1)
        random = torch.empty(0)
        if self.shift.random is not None:
            generators = (generator_from("outside", self.options.seed, first + i) for i in range(len(images)))
            random = torch.stack([self.shift.random(images.shape[1:], generator=g) for g in generators])
        changed = self.shift.change(images * std + mean, self.strength, random.to(images.device))
        return (changed - mean) / std


def _read_images(path: Path) -> Tensor:
    """The test images of an npz file, N×C×H×W; labels and training images are not needed."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file, np.load(file) as stored:
            found = stored.get("x_test")
    except Exception as error:  # numpy, zipfile and zlib raise different errors for a broken file
        raise DataError(f"{path}: cannot be read as an npz file: {cause(error)}") from error
    if found is None:
        raise DataError(f"{path}: has no x_test: name the images so, N×H×W or N×H×W×C uint8")
    if found.dtype != np.uint8 or found.ndim not in (3, 4) or not found.size:
        raise DataError(f"{path}: x_test is {found.shape} {found.dtype}: allowed is N×H×W or N×H×W×C uint8")
    images = torch.from_numpy(found)
    return images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()


def _fitted(images: Tensor, shape: tuple[int, int, int], name: str) -> tuple[Tensor, str]:
    """The images with the channels and the size that the network takes, and a note of what was changed."""
    channels, *size = shape
    done = []
    if images.shape[1] != channels:
        if 1 not in (images.shape[1], channels):
            raise DataError(
                f"{name}: images have {images.shape[1]} channels and the network's own {channels}: allowed "
                "are as many, or grey ones"
            )
        done.append(f"from {images.shape[1]} to {channels} channels")
        if images.shape[1] == 1:
            images = images.expand(-1, channels, -1, -1)
        else:
            images = images.float().mean(1, keepdim=True).round().byte()
    if list(images.shape[2:]) != size:
        done.append(f"from {images.shape[2]}×{images.shape[3]} to {size[0]}×{size[1]}")
        resized = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
        images = resized.round().clamp(0, 255).byte()
    return images, f"images converted {' and '.join(done)}" if done else ""
