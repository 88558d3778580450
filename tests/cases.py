"""Small models that several test files share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.zoo.models import ready_torchvision
from pwfn.zoo.models.vit import VisionTransformer

# Quantised activations and attention


def grouped_convnet() -> nn.Module:
    """For images of 3 × 7 × 7: a convolution with a batch norm, a grouped one, a linear layer; 5 classes."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, 5),
    )


def own_vit() -> nn.Module:
    """For images of 3 × 8 × 8: two blocks of 3 heads; 5 classes."""
    torch.manual_seed(3)
    return VisionTransformer(image_size=8, patch=4, width=24, depth=2, heads=3, classes=5).eval()


def timm_vit() -> nn.Module:
    """For images of 3 × 8 × 8: two of timm's blocks with 2 heads; 5 classes."""
    ready_torchvision()
    from timm.models.vision_transformer import VisionTransformer as TimmTransformer

    torch.manual_seed(3)
    model: nn.Module = TimmTransformer(
        img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    return model.eval()


VITS = [own_vit, timm_vit]


class TinyAttention(nn.Module):
    """Two heads over tokens of width 4: ``(batch, tokens, 4)`` to ``(batch, 2, tokens, 2)``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind(0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)
