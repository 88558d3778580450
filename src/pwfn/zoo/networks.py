"""Networks for small images: residual networks, a VGG and a vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm, and a shortcut around them.

    Where the block halves the image or adds channels, the shortcut takes every second pixel and pads the
    channels with zeros (option A of the ResNet paper); with ``project`` it is a 1×1 convolution with
    BatchNorm (option B).
    """

    def __init__(self, channels_in: int, channels: int, stride: int, project: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self._stride = stride
        self._added = channels - channels_in
        self._project = project
        if project:
            self.shortcut = nn.Sequential()
            if stride != 1 or channels_in != channels:
                projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
                self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×channels×H/stride×W/stride."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self._project:
            return F.relu(out + self.shortcut(x))
        if self._stride > 1:
            x = x[:, :, :: self._stride, :: self._stride]
        if self._added:
            half = self._added // 2
            x = F.pad(x, (0, 0, 0, 0, half, self._added - half))
        return F.relu(out + x)


class SmallResNet(nn.Module):
    """A residual network for images of about 32×32: a 3×3 convolution, stages of blocks, a linear layer.

    Every stage after the first halves the image and doubles the channels. Weights in convolutions and the
    linear layer, for 10 classes of 32×32 images in 3 channels:

    - ResNet-20, 3 blocks per stage: 268,346
    - ResNet-56, 9 blocks per stage: 848,954
    - ResNet-18, 4 stages of 2 blocks, 64 channels, with projections: 11,164,362
    """

    def __init__(
        self,
        blocks: int,
        channels: int = 16,
        classes: int = 10,
        image_channels: int = 3,
        stages: int = 3,
        project: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(image_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self._stages = [f"layer{stage + 1}" for stage in range(stages)]
        channels_in = channels
        for stage, name in enumerate(self._stages):
            width = channels * 2**stage
            layer = nn.Sequential()
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layer.append(ResidualBlock(channels_in, width, stride, project))
                channels_in = width
            self.add_module(name, layer)
        self.linear = nn.Linear(channels_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×classes."""
        out = F.relu(self.bn1(self.conv1(x)))
        for name in self._stages:
            out = getattr(self, name)(out)
        return self.linear(out.mean((2, 3)))


class SmallVGG(nn.Module):
    """VGG-16 with BatchNorm for images of about 32×32: 13 convolutions of 3×3, then one linear layer.

    Max pooling halves the image after the convolutions 2, 4, 7, 10 and 13. For 10 classes of images in
    3 channels it has 14,715,594 weights in convolutions and the linear layer.
    """

    def __init__(
        self,
        stages: tuple[tuple[int, ...], ...] = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3),
        classes: int = 10,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels_in = image_channels
        for stage in stages:
            for channels in stage:
                # No bias: BatchNorm, which follows, would subtract it.
                self.features.append(nn.Conv2d(channels_in, channels, 3, padding=1, bias=False))
                self.features.append(nn.BatchNorm2d(channels)).append(nn.ReLU(inplace=True))
                channels_in = channels
            self.features.append(nn.MaxPool2d(2))
        self.linear = nn.Linear(channels_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×classes."""
        return self.linear(self.features(x).mean((2, 3)))


class SelfAttention(nn.Module):
    """Softmax attention among tokens, with query, key and value from one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(width / heads)) v per head; N×tokens×width to the same."""
        n, tokens, width = x.shape
        parts = self.qkv(x).reshape(n, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(n, tokens, width))


class Mlp(nn.Module):
    """Two linear layers with GELU between them, applied to each token."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """N×tokens×width to the same."""
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """N×tokens×width to the same."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A transformer over square patches of an image, with a learned position for each patch.

    The linear layer takes the mean of the tokens; there is no class token. The defaults, for CIFAR, have
    4.0 million weights.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 9,
        heads: int = 3,
        classes: int = 10,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(image_channels, width, patch, patch)
        self.position = nn.Parameter(torch.empty(1, (image_size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        # About the size of an embedded patch: without it the mean of the tokens ignores their order.
        nn.init.trunc_normal_(self.position, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×classes."""
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))
