"""Small models and data sets that several test files use."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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
