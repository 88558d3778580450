"""Changes to a batch of training images, computed on the device of the images."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from pwfn.lab.pretrain.recipe import Recipe


def cutout(images: Tensor, side: int) -> Tensor:
    """Set a square of each image to 0, the mean colour; its centre is anywhere in the image.

    >>> int(cutout(torch.ones(1, 1, 8, 8), 1).sum())
    63
    """
    if side == 0:
        return images

    def inside(length: int) -> Tensor:
        start = torch.randint(length, (len(images), 1), device=images.device) - side // 2
        along = torch.arange(length, device=images.device)
        return (along >= start) & (along < start + side)

    rows, columns = map(inside, images.shape[2:])
    hole = rows[:, None, :, None] & columns[:, None, None, :]
    # masked_fill would not keep the order in memory of channels-last images.
    return images.clone().masked_fill_(hole, 0)


def mixed(images: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None, float]:
    """The batch, perhaps mixed with itself in another order; that order; and the share of the first.

    Mixup: ``t x_i + (1 - t) x_p(i)`` with t from Beta(0.8, 0.8). CutMix: a rectangle of ``x_i`` comes from
    ``x_p(i)``; its share of the image is uniform. The loss is mixed by the same share. Numbers that all
    images of a batch have in common are drawn on the host, so that the device is not waited for.

    >>> mixed(torch.ones(2, 1, 8, 8), Recipe())[1:]
    (None, 1.0)
    """
    chance = random.random() if recipe.mixup + recipe.cutmix > 0 else 1.0
    if chance >= recipe.mixup + recipe.cutmix:
        return images, None, 1.0
    order = torch.randperm(len(images), device=images.device)
    if chance < recipe.mixup:
        share = random.betavariate(0.8, 0.8)
        return images * share + images[order] * (1 - share), order, share
    height, width = images.shape[2:]
    cut = math.sqrt(random.random())
    rows, columns = round(height * cut), round(width * cut)
    top, left = random.randint(0, height - rows), random.randint(0, width - columns)
    inside = (..., slice(top, top + rows), slice(left, left + columns))
    patched = images.clone()
    patched[inside] = images[inside][order]
    return patched, order, 1 - rows * columns / (height * width)
