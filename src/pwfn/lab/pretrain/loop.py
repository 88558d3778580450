"""The loop that trains a network from scratch, and what it does to a batch of images."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from pwfn.bayes.batches import Batch, Source, is_out_of_memory
from pwfn.bayes.execution import RecordedStep
from pwfn.bayes.objective import Objective, autocast
from pwfn.bayes.randomness import seeded
from pwfn.config import OptimizerName, Precision, TrainingConfig
from pwfn.errors import DataError, DivergedError
from pwfn.evaluate.score import Scores, accuracy, mean_scores
from pwfn.lab.pretrain.recipe import Recipe
from pwfn.zoo import models


def untrained(name: str, recipe: Recipe, **options: Any) -> nn.Module:
    """A network with initial weights from the recipe's seed; ``options`` as for ``models.create``."""
    with seeded(recipe.seed, torch.device("cpu")):
        return models.create(name, **options)


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data."""

    number: int  # from 1
    epochs: int
    loss: float  # mean over the steps, on augmented images
    learning_rate: float  # of the last step
    scores: Scores | None  # on the test data, if there is any
    seconds: float

    @property
    def top1(self) -> float | None:
        """Accuracy on the test data in percent."""
        return None if self.scores is None or self.scores.metric is None else 100 * self.scores.metric


def train(
    model: nn.Module,
    train: Iterable[Any],
    test: Iterable[Any] | None,
    recipe: Recipe,
    *,
    device: torch.device | str | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train a network in place, and return the figures of each epoch.

    ``train`` and ``test`` give batches ``(images, labels)``; ``train`` has a length, shuffles and augments.
    With ``recipe.average`` the network ends with the moving average, and all scores are those of the
    average. The last scores are in float32. The recipe's seed fixes everything drawn here.
    """
    place = torch.device(device) if device is not None else next(model.parameters()).device
    if not isinstance(train, Sized):
        raise DataError("the training loader has no length: pass one whose len() is its number of batches")
    source = Source("the training loader", train, place, channels_last=True)
    tests = Source("the test loader", test, place) if test is not None else None
    _arrange(model.to(place), torch.channels_last)
    history: list[Epoch] = []
    try:
        with seeded(recipe.seed, place):
            state = _State(model, recipe, source.steps_per_epoch(TrainingConfig()) * recipe.epochs)
            for number in range(1, recipe.epochs + 1):
                started = time.perf_counter()
                loss, rate = state.epoch(source, number)
                last = number == recipe.epochs
                if last and state.shown is not model:
                    model.load_state_dict(state.shown.state_dict())
                scores = None
                if tests is not None:
                    precision = Precision.FP32 if last else recipe.precision
                    scores = mean_scores(state.shown, tests, Objective(F.cross_entropy), accuracy, precision)
                seconds = time.perf_counter() - started
                history.append(Epoch(number, recipe.epochs, loss, rate, scores, seconds))
                if on_epoch is not None:
                    on_epoch(history[-1])
    finally:
        _arrange(model, torch.contiguous_format)
        model.eval()
    return history


class _State:
    """A training under way: optimiser, learning rate and moving average."""

    def __init__(self, model: nn.Module, recipe: Recipe, steps: int) -> None:
        self.model, self.recipe = model, recipe
        self.optimizer = optimizer_for(model, recipe)
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: rise_and_fall((step + 0.5) / steps, recipe.warmup)
        )
        self.averaged = moving_average(model, recipe.average) if recipe.average else None
        self.shown = self.averaged.module if self.averaged is not None else model
        fixed = recipe.mixup + recipe.cutmix == 0  # what the host draws cannot be recorded
        self._step: Callable[[Batch, str], Tensor] = self._taken
        if fixed and next(model.parameters()).is_cuda:
            self._step = RecordedStep(self._taken, self.optimizer.zero_grad, model.modules())

    def epoch(self, source: Source, number: int) -> tuple[float, float]:
        """One pass: the mean loss and the last learning rate. It waits for the device once, at its end."""
        where = f"epoch {number} of {self.recipe.epochs}"
        self.model.train()
        losses: list[Tensor] = []
        rate: float | Tensor = 0.0
        for step, batch in enumerate(source.batches(number - 1), 1):
            losses.append(self._step(batch, f"{where}, step {step}").clone())
            if self.averaged is not None:
                self.averaged.update_parameters(self.model)
            rate = self.optimizer.param_groups[0]["lr"]
            rate = rate.clone() if isinstance(rate, Tensor) else rate
            self.scheduler.step()
        if not losses:
            raise DataError(f"{source.name} gave nothing in {where}: pass one that can be iterated again")
        found = torch.stack(losses)
        bad = (~torch.isfinite(found)).nonzero()
        if len(bad):
            raise DivergedError(
                f"{where}: the loss is no longer finite at step {int(bad[0]) + 1} of {len(losses)}: lower "
                "the learning rate, or look for NaN in the data"
            )
        return float(found.mean()), float(rate)

    def _taken(self, batch: Batch, where: str) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = _loss(self.model, batch, self.recipe, where)
        try:
            loss.backward()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise batch.too_large(where) from error
            raise
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        return loss.detach()


def _loss(model: nn.Module, batch: Batch, recipe: Recipe, where: str) -> Tensor:
    """Cross entropy of the augmented batch; of a mixed one, the mean of both labels' by their shares."""
    if len(batch.args) != 1 or not isinstance(batch.args[0], Tensor) or batch.args[0].dim() != 4:
        raise DataError(f"{where}: allowed is a batch of (images, labels), the images N×C×H×W")
    objective = Objective(partial(F.cross_entropy, label_smoothing=recipe.label_smoothing))
    images, order, share = mixed(cutout(batch.args[0], recipe.cutout), recipe)
    with autocast(images.device, recipe.precision):
        output = Batch((images,), {}, None).through(model, where)
        loss = objective.of_output(output, batch, where)
        if order is not None:
            other = Batch(batch.args, {}, batch.target[order])
            loss = share * loss + (1 - share) * objective.of_output(output, other, where)
    return loss


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


def rise_and_fall(progress: float, warmup: float) -> float:
    """Share of the peak learning rate after a share of the steps: linear up, half a cosine down to 0.

    >>> [round(rise_and_fall(t, 0.2), 6) for t in (0.1, 0.2, 0.6, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * min((progress - warmup) / (1 - warmup), 1.0))) / 2


def optimizer_for(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Weight decay on the weights of convolution and linear layers only."""
    layers = [m for m in model.modules() if isinstance(m, (_ConvNd, nn.Linear))]
    decayed = {id(layer.weight) for layer in layers}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) in decayed], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
    ]
    fused = all(p.is_cuda for p in trained)
    rate = recipe.learning_rate
    if fused:  # a recorded step reads it there; one tensor each, since schedulers write into them
        for group in groups:
            group["lr"] = torch.full((), recipe.learning_rate, device=trained[0].device)
    if recipe.optimizer is OptimizerName.ADAMW:
        betas = (recipe.momentum, 0.999)
        return torch.optim.AdamW(groups, rate, betas=betas, fused=fused, capturable=fused)
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(groups, rate, momentum=recipe.momentum, nesterov=nesterov, fused=fused)


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """``average = d * average + (1 - d) * now`` of parameters and buffers, ``d = min(decay, (n+1)/(n+10))``.

    n is the number of earlier steps; the first one is copied. Whole numbers (BatchNorm's counter) are copied.
    """

    def update(averages: Any, now: Any, count: Tensor | int) -> None:
        own = min(decay, (int(count) + 1) / (int(count) + 10))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, now, 1 - own)
        else:
            torch._foreach_copy_(averages, now)

    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)


def _arrange(model: nn.Module, form: torch.memory_format) -> None:
    model.to(memory_format=form)  # type: ignore[call-overload]  # it is in torch's documentation
