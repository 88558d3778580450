"""How the images of a network are prepared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from pwfn.errors import PwfnError
from pwfn.zoo.models.names import INPUT_SHAPES
from pwfn.zoo.models.torchvision import ready_torchvision


@dataclass(frozen=True)
class DataConfig:
    """Normalisation, size and cropping of the images that a network was trained on.

    An image is scaled so that its shorter side is ``image_size / crop_pct``, the middle is cut out
    at ``image_size``, and each channel becomes ``(x - mean) / std`` of x in [0, 1]. Where the size is
    not known, arrays are taken as they are, and files are brought to ImageNet's.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int | None
    interpolation: str = "bicubic"
    crop_pct: float = 1.0

    def metadata(self) -> dict[str, str]:
        """The normalisation as a weight file's metadata holds it.

        >>> DataConfig((0.5,), (0.25,), 8).metadata()
        {'normalize_mean': '0.5', 'normalize_std': '0.25'}
        """
        return {"normalize_mean": _joined(self.mean), "normalize_std": _joined(self.std)}


CIFAR = DataConfig((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 32)
IMAGENET = DataConfig((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224, crop_pct=0.875)
OTHER = replace(IMAGENET, image_size=None)
DIGITS = DataConfig((0.0,), (1.0,), 8)


def data_config(name: str, model: nn.Module, metadata: Mapping[str, str] | None = None) -> DataConfig:
    """How the images of a network are prepared.

    ``metadata``, of the file its weights came from, has the first word on the normalisation
    (``normalize_mean``, ``normalize_std``). The rest, or all of it, is what timm says of its models,
    CIFAR's for our own networks (none for digits), and for others ImageNet's at any size.
    """
    config = _usual(name, model)
    notes = metadata or {}
    if "normalize_mean" not in notes and "normalize_std" not in notes:
        return config
    mean, std = (_numbers(notes, key) for key in ("normalize_mean", "normalize_std"))
    if len(mean) != len(std) or not all(x > 0 for x in std):
        raise PwfnError(
            f"the weights' metadata has normalize_mean {_joined(mean)} and normalize_std {_joined(std)}: "
            "allowed is one number of each per channel, the latter above 0"
        )
    return replace(config, mean=mean, std=std)


def _usual(name: str, model: nn.Module) -> DataConfig:
    shape = INPUT_SHAPES.get(name)
    if shape is not None:
        return CIFAR if shape == (3, 32, 32) else DIGITS
    if not getattr(model, "pretrained_cfg", None):
        return OTHER
    ready_torchvision()
    from timm.data import resolve_model_data_config

    said = resolve_model_data_config(model)
    return DataConfig(
        mean=tuple(said["mean"]),
        std=tuple(said["std"]),
        image_size=max(said["input_size"][1:]),
        interpolation=said["interpolation"],
        crop_pct=float(said["crop_pct"]),
    )


def _numbers(notes: Mapping[str, str], key: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in notes[key].split(","))
    except (KeyError, ValueError, AttributeError):
        numbers = ()
    if not numbers or not all(math.isfinite(x) for x in numbers):
        raise PwfnError(
            f"the weights' metadata has {key} {notes.get(key)!r}: allowed is a number per channel, "
            "with commas between them"
        )
    return numbers


def _joined(numbers: tuple[float, ...]) -> str:
    return ",".join(repr(x) for x in numbers)
