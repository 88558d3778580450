"""Small models and data that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pwfn.run.options import RunOptions

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
