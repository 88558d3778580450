"""Data that a network was not trained for, by name: another set, noise, or its own data changed.

``npz:PATH`` and every other source of :mod:`pwfn.zoo.data`; ``noise``; ``shift:rotate:90`` and the like.
Images come to the network prepared as its own are. What is made up comes from a seed and the number
of the example alone: neither the size of the batches nor the device makes a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.config.seeds import seed_from
from pwfn.errors import DataError, cause
from pwfn.zoo import data
from pwfn.zoo.data import Data, DataOptions, Epochs, TensorLoader

_GREY = 1  # channels
_LARGEST = 255


@dataclass(frozen=True)
class Kind:
    """A change of images: what its strength is, and what does it."""

    strength: str
    allowed: tuple[float, float]
    change: Callable[
        [Tensor, float, Tensor], Tensor
    ]  # images N×C×H×W in [0, 1], the strength, random numbers
    drawn: Callable[..., Tensor] | None = None  # the random numbers of one image, if it needs any


def _noise(images: Tensor, _: float, drawn: Tensor) -> Tensor:
    """Uniform in [0, 1], whatever the image was."""
    return drawn.to(images)


def _gaussian(images: Tensor, std: float, drawn: Tensor) -> Tensor:
    """``clamp(x + std eps)``."""
    return (images + std * drawn).clamp(0, 1)


def _rotate(images: Tensor, degrees: float, _: Tensor) -> Tensor:
    """Turned about its middle, anticlockwise; what comes in from outside is black."""
    quarters, rest = divmod(degrees, 90)
    height, width = images.shape[2:]
    if rest == 0 and (height == width or quarters % 2 == 0):
        return images.rot90(int(quarters), (2, 3))  # exactly, pixel by pixel
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # Where each pixel of the new image comes from, in coordinates from -1 to 1 along each side.
    turn = images.new_tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _contrast(images: Tensor, factor: float, _: Tensor) -> Tensor:
    """``m + factor (x - m)`` with m the mean of the image."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + factor * (images - mean)


NOISE = Kind("", (0.0, 0.0), _noise, torch.rand)
SHIFTS: dict[str, Kind] = {
    "gaussian": Kind("STD", (0.0, 10.0), _gaussian, torch.randn),
    "rotate": Kind("DEGREES", (-360.0, 360.0), _rotate),
    "contrast": Kind("FACTOR", (0.0, 1.0), _contrast),
}


@dataclass(frozen=True)
class Outside:
    """Data from elsewhere: their name, a loader, and what was done to the images, if anything."""

    name: str
    loader: Epochs
    note: str = ""


def open_outside(spec: str, own: Data, options: DataOptions) -> Outside:
    """Data from elsewhere by name, for a network whose own data these are, prepared by these options.

    >>> own = data.open_source("digits")
    >>> turned = open_outside("shift:rotate:90", own, DataOptions())
    >>> len(turned.loader) == len(own.test)
    True
    """
    kind, colon, rest = spec.partition(":")
    if spec == "noise":
        return Outside(spec, _changed(spec, own, options, NOISE, 0.0), "uniform noise in place of the images")
    if kind == "shift":
        name, _, strength = rest.partition(":")
        if name not in SHIFTS:
            raise DataError(f"{spec!r} is no known change of the data: allowed are {_usage()}")
        return Outside(spec, _changed(spec, own, options, SHIFTS[name], _strength(spec, name, strength)))
    if kind == "npz" and colon and rest and own.image_shape is not None:
        images, note = _fitted(_read_images(Path(rest).expanduser()), own.image_shape, rest)
        return Outside(spec, _loader(images, options), note)
    if kind not in data.SOURCES:
        known = ", ".join(source.usage for source in data.SOURCES.values())
        raise DataError(f"{spec!r} is no known data from elsewhere: allowed are {_usage()}, {known}")
    return Outside(spec, data.open_source(spec, options).test)


def _usage() -> str:
    return ", ".join(["noise", *(f"shift:{name}:{kind.strength}" for name, kind in SHIFTS.items())])


def _strength(spec: str, name: str, text: str) -> float:
    low, high = SHIFTS[name].allowed
    try:
        strength = float(text)
    except ValueError:
        strength = math.nan
    if not low <= strength <= high:
        what = SHIFTS[name].strength
        raise DataError(f"{spec!r}: allowed is shift:{name}:{what} with {what} from {low:g} to {high:g}")
    return strength


def _changed(spec: str, own: Data, options: DataOptions, kind: Kind, strength: float) -> Epochs:
    if own.image_shape is None:
        raise DataError(
            f"{spec!r} with data {own.name!r}: how its images are prepared is not known, so that they cannot "
            "be changed: give other data with python:FILE:FUNCTION"
        )
    return Changed(own.test, kind, strength, options.mean, options.std, options.seed)


@dataclass(eq=False)
class Changed(Epochs):
    """The images of another loader, each changed, without their labels.

    Images are brought back to [0, 1] by ``x std + mean``, changed there, and normalised again.
    """

    loader: Epochs
    kind: Kind
    strength: float
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    seed: int = 0

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int, start: int = 0) -> Iterator[Tensor]:
        """As the other loader has them; the changes are the same in every epoch."""
        done = 0  # examples
        for position, (images, _) in enumerate(self.loader.epoch(number)):
            if position >= start:
                yield self._batch(images, done)
            done += len(images)

    def _batch(self, images: Tensor, first: int) -> Tensor:
        mean, std = (
            images.new_tensor(values or (usual,)).view(1, -1, 1, 1)
            for values, usual in ((self.mean, 0.0), (self.std, 1.0))
        )
        drawn = torch.empty(0)
        if self.kind.drawn is not None:
            generator, drawn = torch.Generator(), torch.empty(images.shape)
            for offset, place in enumerate(drawn):
                generator.manual_seed(seed_from("outside", self.seed, first + offset))
                place.copy_(self.kind.drawn(place.shape, generator=generator))
        changed = self.kind.change(images * std + mean, self.strength, drawn.to(images.device))
        return (changed - mean) / std


def _read_images(path: Path) -> Tensor:
    """The test images of an npz file, N×C×H×W; labels and training images need not be there."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file, np.load(file) as stored:
            found = stored.get("x_test")
    except Exception as error:  # numpy, zipfile and zlib each have their own for a broken file
        raise DataError(f"{path}: cannot be read as an npz file: {cause(error)}") from error
    if found is None:
        raise DataError(
            f"{path}: has no x_test: images from elsewhere are N×H×W or N×H×W×C uint8, by that name"
        )
    if found.dtype != np.uint8 or found.ndim not in (3, 4) or not found.size:
        raise DataError(f"{path}: x_test is {found.shape} {found.dtype}: allowed is N×H×W or N×H×W×C uint8")
    images = torch.from_numpy(found)
    return images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()


def _fitted(images: Tensor, shape: tuple[int, int, int], name: str) -> tuple[Tensor, str]:
    """Bytes in the channels and the size that the network takes, and what was done for it."""
    channels, height, width = shape
    done = []
    if images.shape[1] != channels:
        if _GREY not in (images.shape[1], channels):
            raise DataError(
                f"{name}: images have {images.shape[1]} channels and the network's own {channels}: allowed "
                "are as many, or grey ones"
            )
        done.append(f"from {images.shape[1]} to {channels} channels")
        images = (
            images.expand(-1, channels, -1, -1)
            if images.shape[1] == _GREY
            else images.float().mean(1, keepdim=True).round().byte()
        )
    if images.shape[2:] != (height, width):
        done.append(f"from {images.shape[2]}×{images.shape[3]} to {height}×{width}")
        resized = F.interpolate(images.float(), (height, width), mode="bilinear", antialias=True)
        images = resized.round().clamp(0, _LARGEST).byte()
    return images, f"images brought {' and '.join(done)}" if done else ""


def _loader(images: Tensor, options: DataOptions) -> TensorLoader:
    none = torch.zeros(len(images), dtype=torch.int64)
    return TensorLoader(
        images.contiguous().to(options.device),
        none.to(options.device),
        options.test_batch_size or 1000,
        mean=options.mean,
        std=options.std,
    )
