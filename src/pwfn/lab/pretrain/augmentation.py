"""Changes to a batch of training images, made on their device, which is never waited for."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from pwfn.lab.pretrain.augmentation_batches import with_patch, without_square
from pwfn.lab.pretrain.recipe import Recipe


def cutout(images: Tensor, side: int) -> Tensor:
    """Zero, the mean colour, in a square of each image; its centre is anywhere in the image.

    >>> int(cutout(torch.ones(1, 1, 8, 8), 1).sum())
    63
    """
    if side == 0:
        return images
    rows, columns = (
        torch.randint(length, (len(images),), device=images.device) for length in images.shape[2:]
    )
    return without_square(images, rows, columns, side)


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
    images = with_patch(images, partner, (top, left, rows, columns))
    return images, partner, 1 - rows * columns / (height * width)
