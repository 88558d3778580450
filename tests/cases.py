"""Small models and data that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.file.compressed import Compressed
from pwfn.layout import Layout, untouched
from pwfn.run.options import RunOptions
from pwfn.zoo.models import VisionTransformer, ready_torchvision

# Runs: resumable data, a network with BatchNorm and dropout, a run by name


class Shuffled:
    """Batches for ``normalised_classifier`` whose order is a function of the epoch only."""

    def __init__(self, batches: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
            for _ in range(batches)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(number)).tolist()
        return iter([self.batches[i] for i in order[start:]])


def normalised_classifier() -> nn.Module:
    """For 6 numbers: BatchNorm and dropout between two linear layers; 3 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


def digits_run(folder: Path, **changes: Any) -> RunOptions:
    """A run of an untrained network on digits, with a checkpoint after nearly every step."""
    usual = {"model": "digits_resnet", "data": "digits", "weights": "random", "device": "cpu"}
    return RunOptions(out=folder, **{**usual, "batch_size": 64, "checkpoint_minutes": 1e-3, **changes})


# Data sets


def npz_file(path: Path, side: int = 32, labels: int = 3, channels: int = 3, count: int = 16) -> str:
    """A data source of random images, the same for training and testing, with labels 0, 1, 2, …"""
    images = np.random.default_rng(0).integers(0, 256, (count, side, side, channels), dtype=np.uint8)
    targets = np.arange(count) % labels
    np.savez(path, x_train=images, y_train=targets, x_test=images, y_test=targets)
    return f"npz:{path}"


def image_folder(folder: Path, count: int = 4) -> str:
    """A data source of two classes, a and b, left or right half bright; images of different sizes."""
    from PIL import Image

    numbers = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(count):
            height, width = numbers.integers(40, 90, 2)
            pixels = numbers.integers(0, 100, (height, width, 3), dtype=np.uint8)
            half = slice(0, width // 2) if number % 2 else slice(width // 2, width)
            pixels[:, half] += 150
            path = folder / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return f"imagefolder:{folder}"


# Evaluation: ensembles, BatchNorm statistics, costs


def batchnorm_classifier(seed: int = 0) -> Any:
    """For 4 numbers: two BatchNorm layers with statistics unlike those of a new layer, dropout; 3 classes."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Linear(8, 3)),
    )
    with torch.no_grad():
        for layer in (model[1], model[5]):
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.normal_()
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            layer.num_batches_tracked.fill_(7)
        model[7].weight.normal_()  # so that every class is predicted now and then
    return model


def compressed_of(
    model: nn.Module, values: Tensor | None = None, sigma: Tensor | float | None = None, **selectors: Any
) -> Compressed:
    """The model with these values, or its own rounded to quarters; a number is the sigma of all weights."""
    layout = Layout.of(model, **selectors)
    if values is None:
        values = (4 * layout.gather(model)).round() / 4
    if isinstance(sigma, float):
        sigma = torch.full((layout.size,), sigma)
    return Compressed.of(layout, values, sigma, untouched(model, layout))


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """From the normal distribution, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


# Layout, file, runtime, export


class Tied(nn.Module):
    """An embedding tied to the head, one layer under two names, a norm, and buffers of both kinds."""

    def __init__(self, tokens: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = self.first
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("not_saved", torch.tensor(3.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.first(self.embedding(tokens)).flatten(0, -2))
        return self.scale * self.head(self.second(x)).view(*tokens.shape, -1)


def tiny_gpt2() -> Any:
    """Two blocks, three heads, a head tied to the embedding."""
    ready_torchvision()
    import transformers

    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 12, "vocab_size": 37, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def convnet() -> nn.Module:
    """A convolution, a BatchNorm and a linear layer, for inputs of 3×4×4."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
