"""Changes to a batch of training images, made on their device, which is never waited for."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from pwfn.scratch.recipe import Recipe


def cutout(images: Tensor, side: int) -> Tensor:
    """Zero, the mean colour, in a square of each image; its centre is anywhere in the image.

    >>> int(cutout(torch.ones(1, 1, 8, 8), 1).sum())
    63
    """
    if side == 0:
        return images
    height, width = images.shape[2:]
    device = images.device

    def inside(length: int) -> Tensor:
        start = torch.randint(length, (len(images), 1), device=device) - side // 2
        along = torch.arange(length, device=device)
        return (along >= start) & (along < start + side)

    hole = inside(height)[:, :, None] & inside(width)[:, None, :]
    return images.masked_fill(hole[:, None], 0)


def mixed(images: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None, float]:
    """The batch, perhaps mixed with itself in another order, that order, and the share of the first.

    The few numbers that all images of a batch have in common are drawn on the host, which waits
    for nothing.
    """
    chance = random.random() if recipe.mixup + recipe.cutmix > 0 else 1.0
    if chance >= recipe.mixup + recipe.cutmix:
        return images, None, 1.0
    partner = torch.randperm(len(images), device=images.device)
    if chance < recipe.mixup:
        share = random.betavariate(0.8, 0.8)
        return images * share + images[partner] * (1 - share), partner, share
    height, width = images.shape[2:]
    cut = math.sqrt(random.random())  # so that the rectangle's share of the image is uniform
    rows, columns = round(height * cut), round(width * cut)
    top, left = random.randint(0, height - rows), random.randint(0, width - columns)
    images = images.clone()
    inside = (..., slice(top, top + rows), slice(left, left + columns))
    images[inside] = images[partner][inside]
    return images, partner, 1 - rows * columns / (height * width)
