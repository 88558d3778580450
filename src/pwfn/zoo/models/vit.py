"""A small vision transformer for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Softmax attention of tokens among themselves, query, key and value from one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """N×tokens×width to the same: softmax(q k^T / sqrt(width / heads)) v, head by head."""
        n, tokens, width = x.shape
        parts = self.qkv(x).reshape(n, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(n, tokens, width))


class Mlp(nn.Module):
    """Two linear layers with GELU between them, each token by itself."""

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
    """A transformer over square patches of an image, with a learned position for each.

    The mean of the tokens goes to the linear layer; there is no class token.
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
        # About as large as an embedded patch: the mean of the tokens is blind to the order but for it.
        nn.init.trunc_normal_(self.position, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×classes."""
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def cifar_vit_tiny(classes: int = 10) -> nn.Module:
    """Nine blocks of width 192 with three heads over 64 patches of 4×4 pixels, 4.0 million weights."""
    return VisionTransformer(classes=classes)
