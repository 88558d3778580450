"""Networks by name: small residual networks of our own, and any timm model."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.errors import PwfnError


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm around a shortcut that has no weights.

    Where the block halves the image or adds channels, the shortcut takes every second pixel and
    pads the channels with zeros ("option A" of the ResNet paper).
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self._stride = stride
        self._added = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×channels×H/stride×W/stride."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self._stride > 1:
            x = x[:, :, :: self._stride, :: self._stride]
        if self._added:
            half = self._added // 2
            x = F.pad(x, (0, 0, 0, 0, half, self._added - half))
        return F.relu(out + x)


class SmallResNet(nn.Module):
    """A residual network for small images: one convolution, three stages, one linear layer."""

    def __init__(self, blocks: int, channels: int = 16, classes: int = 10, image_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(image_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.layer1 = self._stage(channels, channels, blocks, stride=1)
        self.layer2 = self._stage(channels, 2 * channels, blocks, stride=2)
        self.layer3 = self._stage(2 * channels, 4 * channels, blocks, stride=2)
        self.linear = nn.Linear(4 * channels, classes)

    @staticmethod
    def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = ResidualBlock(channels_in, channels, stride)
        return nn.Sequential(first, *(ResidualBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×classes."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(out.mean((2, 3)))


def cifar_resnet20() -> nn.Module:
    """ResNet-20 for 32×32 images, 268,346 weights in convolutions and the linear layer."""
    return SmallResNet(blocks=3)


def cifar_resnet56() -> nn.Module:
    """ResNet-56 for 32×32 images."""
    return SmallResNet(blocks=9)


def digits_resnet() -> nn.Module:
    """The demo's network for 8×8 grey images: seven convolutions and a linear layer."""
    return SmallResNet(blocks=1, channels=16, image_channels=1)


OWN: dict[str, Callable[[], nn.Module]] = {
    "cifar_resnet20": cifar_resnet20,
    "cifar_resnet56": cifar_resnet56,
    "digits_resnet": digits_resnet,
}


INPUT_SHAPES: dict[str, tuple[int, ...]] = {
    "cifar_resnet20": (3, 32, 32),
    "cifar_resnet56": (3, 32, 32),
    "digits_resnet": (1, 8, 8),
}


def create(name: str, **options: Any) -> nn.Module:
    """A network by name: one of our own, ``python:FILE:FUNCTION``, or any that timm has.

    ``options`` go to the function that makes it. The file of ``python:`` is run: name only files
    that you trust.
    """
    if name in OWN:
        return OWN[name](**options)
    if name.startswith("python:"):
        return _from_file(name, **options)
    return timm_model(name, **options)


def input_shape(name: str, model: nn.Module) -> tuple[int, ...] | None:
    """Shape of one input, where it is known: for our own networks, and for timm's."""
    known = getattr(model, "default_cfg", None) or {}
    shape = INPUT_SHAPES.get(name) or known.get("input_size")
    return tuple(shape) if shape else None


def _from_file(name: str, **options: Any) -> nn.Module:
    path, _, function = name.removeprefix("python:").rpartition(":")
    if not path or not function:
        raise PwfnError(f"model {name!r} is not of the form python:FILE:FUNCTION")
    if not Path(path).is_file():
        raise PwfnError(f"model {name!r}: there is no file {path}")
    found = runpy.run_path(path).get(function)
    if not callable(found):
        raise PwfnError(f"model {name!r}: {path} defines no function {function}")
    model = found(**options)
    if not isinstance(model, nn.Module):
        raise PwfnError(
            f"model {name!r}: {function} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def timm_model(name: str, **options: Any) -> nn.Module:
    """``timm.create_model``, with torchvision made importable first (see ``ready_torchvision``)."""
    ready_torchvision()
    try:
        import timm
    except ImportError as error:
        raise PwfnError(f"model {name!r} needs timm: pip install 'pwfn[timm]'") from error
    if not timm.is_model(name):
        raise PwfnError(f"model {name!r} is not known to pwfn or timm: see timm.list_models()")
    model: nn.Module = timm.create_model(name, **options)
    return model


_torchvision_library: torch.library.Library | None = None


def ready_torchvision() -> None:
    """Declare two operators that torchvision's import expects, where its compiled part is missing.

    torchvision's wheels carry a compiled part for CUDA builds of torch. Beside a CPU build that
    part does not load, and its Python part, which is all that timm needs, then fails at import
    because ``torchvision::nms`` does not exist. Declaring the schemas lets it import; calling
    them still fails. Nothing is done where the compiled part is there or was declared before.
    """
    global _torchvision_library
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    _torchvision_library = torch.library.Library("torchvision", "DEF")
    _torchvision_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
