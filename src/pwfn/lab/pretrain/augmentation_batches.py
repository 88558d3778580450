"""What a batch goes through before it is trained on: squares blanked, examples blended, labels smoothed.

So that a network can be compressed with what it was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.bayes.batches import BATCH_ERRORS, Batch, Stream
from pwfn.config import TrainingConfig
from pwfn.config.seeds import generator_from
from pwfn.errors import ConfigError, DataError, cause


def is_wanted(config: TrainingConfig) -> bool:
    """Whether anything is done to the batches.

    >>> is_wanted(TrainingConfig()), is_wanted(TrainingConfig(cutout=8))
    (False, True)
    """
    return bool(config.blend or config.cutmix or config.cutout or config.label_smoothing)


def check(config: TrainingConfig, *, reads_labels: bool, loss_fn: object) -> None:
    """Refuse settings that contradict each other or the run."""
    if config.blend + config.cutmix > 1:
        raise ConfigError(
            f"training.blend is {config.blend:g} and training.cutmix {config.cutmix:g}: both are shares of "
            "the batches, allowed is at most 1 together"
        )
    if config.label_smoothing and not reads_labels:
        raise ConfigError(
            f"training.label_smoothing is {config.label_smoothing:g}, and no label is read: set it to 0, or "
            "training.distill_share below 1"
        )
    named = [f"training.{name}" for name in ("blend", "cutmix", "label_smoothing") if getattr(config, name)]
    if named and reads_labels and not is_cross_entropy(loss_fn):
        raise ConfigError(
            f"{' and '.join(named)} would make probabilities of the labels, which cross entropy takes and "
            "the given loss may not: leave loss_fn out, set training.distill = true, or do without"
        )


def is_cross_entropy(loss_fn: object) -> bool:
    """Whether a loss takes classes, or the classes' probabilities."""
    return loss_fn is F.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss)


def augmented(
    batches: Stream,
    config: TrainingConfig,
    seed: int,
    where: str,
    classes: Callable[[Batch], int] | None,
) -> Iterator[Batch]:
    """The stream, with what the settings want done to each batch.

    What is drawn depends on the seed and on the batch's number in the stream alone, so that a run that goes
    on does to it what it would have done had it never stopped. ``classes`` says of a batch how many the
    network tells apart; None: labels are not read, and stay as they are.
    """
    soft = config.blend or config.cutmix or config.label_smoothing
    for batch in batches:
        place = f"{where}, batch {batches.drawn}"
        if soft and classes is not None:
            target = probabilities(batch.target, classes(batch), config.label_smoothing, place)
            batch = Batch(batch.args, batch.kwargs, target)
        if config.cutout:
            batch = blanked(batch, config.cutout, generator_from("cutout", seed, batches.drawn), place)
        if config.blend or config.cutmix:
            dice = generator_from("blend", seed, batches.drawn)
            chance = float(torch.rand((), generator=dice))
            if chance < config.blend:
                batch = blend(batch, dice, place)
            elif chance < config.blend + config.cutmix:
                batch = patch(batch, dice, place)
        yield batch


def probabilities(target: Any, classes: int, smoothing: float, where: str = "the batch") -> Tensor:
    """Labels as probabilities of the classes: ``(1 - smoothing) [c = y] + smoothing / classes``.

    Labels may be probabilities already. One below 0 is to be ignored, as by cross entropy: all of its are 0.

    >>> probabilities(torch.tensor([1, -100]), 4, 0.2).tolist()
    [[0.05..., 0.85..., 0.05..., 0.05...], [0.0, 0.0, 0.0, 0.0]]
    """
    if isinstance(target, Tensor) and target.is_floating_point() and target.shape[1:] == (classes,):
        return (1 - smoothing) * target + smoothing / classes
    if not isinstance(target, Tensor) or target.dim() != 1 or target.is_floating_point():
        said = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise DataError(
            f"{where}: targets are {said}, and to blend or smooth labels takes one class of {classes} for "
            "each example: set training.blend, training.cutmix and training.label_smoothing to 0"
        )
    counted = (target >= 0)[:, None]
    rows = torch.full((len(target), classes), smoothing / classes, device=target.device)
    try:
        rows.scatter_(1, target.clamp(min=0).long()[:, None], 1 - smoothing + smoothing / classes)
    except BATCH_ERRORS as error:
        raise DataError(f"{where}: a target is none of {classes} classes: {cause(error)}") from error
    return rows * counted


def blend(batch: Batch, dice: torch.Generator, where: str = "the batch") -> Batch:
    """Every example with a share ``1 - t`` of another: ``t x_i + (1 - t) x_p(i)``.

    t is uniform between 0 and 1 and p a permutation, both the same for the whole batch. Inputs are blended
    that are numbers of floating point and as long as the batch, and targets that are probabilities; other
    targets stay, and mean nothing any more.

    >>> batch = blend(Batch((torch.tensor([[0.0], [1.0]]),), {}, None), torch.Generator().manual_seed(1))
    >>> float(batch.args[0].sum())
    1.0
    """
    share = float(torch.rand((), generator=dice, dtype=torch.float64))
    order = torch.randperm(batch.size, generator=dice)

    def mixed(value: Tensor) -> Tensor:
        # Into a tensor like the first, whose order in memory a recorded step relies on.
        others = value[order.to(value.device, non_blocking=True)]
        return torch.add(value * share, others, alpha=1 - share, out=torch.empty_like(value))

    return _Change("training.blend", "blended, none is", 1, mixed, mixed).of(batch, where)


def patch(batch: Batch, dice: torch.Generator, where: str = "the batch") -> Batch:
    """Every image with a rectangle from another one, the same for the whole batch (CutMix).

    The rectangle's share of the image is uniform between 0 and 1; targets that are probabilities are
    blended by it.

    >>> images = torch.stack((torch.zeros(1, 8, 8), torch.ones(1, 8, 8)))
    >>> float(patch(Batch((images,), {}, None), torch.Generator().manual_seed(1)).args[0].sum())
    64.0
    """
    cut, down, right = torch.rand(3, generator=dice, dtype=torch.float64).tolist()
    order = torch.randperm(batch.size, generator=dice)
    shares = []

    def patched(images: Tensor) -> Tensor:
        rows, columns = (round(length * math.sqrt(cut)) for length in images.shape[2:])
        top, left = int(down * (images.shape[2] - rows + 1)), int(right * (images.shape[3] - columns + 1))
        shares.append(1 - rows * columns / (images.shape[2] * images.shape[3]))
        return with_patch(images, order.to(images.device, non_blocking=True), (top, left, rows, columns))

    def mixed(target: Tensor) -> Tensor:
        return torch.lerp(target[order.to(target.device, non_blocking=True)], target, shares[0])

    return _Change("training.cutmix", "patched, there are no images", 4, patched, mixed).of(batch, where)


def blanked(batch: Batch, side: int, dice: torch.Generator, where: str = "the batch") -> Batch:
    """Zero, the mean colour of normalised images, in a square of each; its centre is anywhere in the image.

    >>> images = torch.ones(2, 1, 8, 8)
    >>> int(blanked(Batch((images,), {}, None), 1, torch.Generator()).args[0].sum())
    126
    """
    drawn = torch.rand(2, batch.size, generator=dice, dtype=torch.float64)

    def blank(images: Tensor) -> Tensor:
        most = torch.tensor(images.shape[2:], dtype=torch.float64)[:, None]
        rows, columns = (drawn * most).long().to(images.device, non_blocking=True)
        return without_square(images, rows, columns, side)

    return _Change("training.cutout", "blanked, there are no images", 4, blank).of(batch, where)


@dataclass(frozen=True)
class _Change:
    """What a setting does to inputs of at least so many axes, and to targets that are probabilities."""

    setting: str
    lacking: str
    least_dim: int
    of_input: Callable[[Tensor], Tensor]
    of_target: Callable[[Tensor], Tensor] | None = None

    def of(self, batch: Batch, where: str) -> Batch:
        """The batch with its inputs changed, those that are of floating point and as long as it."""
        size, found = batch.size, 0

        def changed(value: Any) -> Any:
            nonlocal found
            if isinstance(value, Mapping):
                return {key: changed(item) for key, item in value.items()}
            if isinstance(value, tuple):
                return tuple(changed(item) for item in value)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value.dim() < self.least_dim or len(value) != size:
                return value
            found += 1
            return self.of_input(value)

        inputs, named, target = changed(batch.args), changed(batch.kwargs), batch.target
        if not found:
            raise DataError(
                f"{where}: inputs {batch.describe()} cannot be {self.lacking} of floating point and as long "
                f"as the batch: set {self.setting} = 0"
            )
        soft = isinstance(target, Tensor) and target.is_floating_point() and target.dim() == 2
        if self.of_target is not None and soft:
            target = self.of_target(target)
        return Batch(inputs, named, target)


def with_patch(images: Tensor, order: Tensor, place: tuple[int, int, int, int]) -> Tensor:
    """The images, each with a rectangle (top, left, rows, columns) of the one that ``order`` names."""
    top, left, rows, columns = place
    inside = (..., slice(top, top + rows), slice(left, left + columns))
    found = images.clone()
    found[inside] = images[inside][order]
    return found


def without_square(images: Tensor, rows: Tensor, columns: Tensor, side: int) -> Tensor:
    """The images with 0 in a square around (row, column) of each, as far as that lies inside."""

    def inside(centres: Tensor, length: int) -> Tensor:
        start = centres[:, None] - side // 2
        along = torch.arange(length, device=images.device)
        return (along >= start) & (along < start + side)

    height, width = images.shape[2:]
    hole = inside(rows, height)[:, :, None] & inside(columns, width)[:, None, :]
    # masked_fill itself would copy to another order in memory where images are channels last.
    return images.clone().masked_fill_(hole[:, None], 0)
