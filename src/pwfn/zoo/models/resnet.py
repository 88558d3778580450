"""Residual networks for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


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


class ProjectionBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm around a shortcut that projects where shapes differ.

    Where the block halves the image or adds channels, the shortcut is a 1×1 convolution with
    BatchNorm ("option B" of the ResNet paper), elsewhere it has no weights.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×channels×H/stride×W/stride."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with a 3×3 first convolution and no pooling after it, for images of about 32×32."""

    def __init__(self, classes: int = 10, image_channels: int = 3, channels: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(image_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.layer1 = self._stage(channels, channels, stride=1)
        self.layer2 = self._stage(channels, 2 * channels, stride=2)
        self.layer3 = self._stage(2 * channels, 4 * channels, stride=2)
        self.layer4 = self._stage(4 * channels, 8 * channels, stride=2)
        self.linear = nn.Linear(8 * channels, classes)

    @staticmethod
    def _stage(channels_in: int, channels: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            ProjectionBlock(channels_in, channels, stride), ProjectionBlock(channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×classes."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.linear(out.mean((2, 3)))


def cifar_resnet20(classes: int = 10) -> nn.Module:
    """ResNet-20 for 32×32 images, 268,346 weights in convolutions and the linear layer."""
    return SmallResNet(blocks=3, classes=classes)


def cifar_resnet56(classes: int = 10) -> nn.Module:
    """ResNet-56 for 32×32 images, 848,954 weights in convolutions and the linear layer."""
    return SmallResNet(blocks=9, classes=classes)


def cifar_resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 for 32×32 images, 11,164,362 weights in convolutions and the linear layer.

    Weights and biases of all convolutions, the projections of the shortcuts among them, and of the
    linear layer; BatchNorm's 9,600 scales and offsets are not counted.
    """
    return ResNet18(classes)
