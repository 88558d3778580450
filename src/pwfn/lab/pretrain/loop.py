"""The loop that trains a network from scratch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.objective import Objective
from pwfn.bayes.randomness import seeded
from pwfn.bayes.train import Average
from pwfn.config import Precision, TrainingConfig
from pwfn.errors import DataError, DivergedError
from pwfn.evaluate.score import Scores, accuracy, mean_scores
from pwfn.lab.pretrain.augmentation import cutout, mixed
from pwfn.lab.pretrain.recipe import Optimizer, Recipe, rise_and_fall
from pwfn.zoo import models


def untrained(name: str, recipe: Recipe, **options: Any) -> nn.Module:
    """A network whose first weights come from the recipe's seed; ``options`` as for `models.create`."""
    with seeded(recipe.seed, torch.device("cpu")):
        return models.create(name, **options)


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data."""

    number: int  # from 1
    epochs: int
    loss: float  # mean over the steps, of the augmented images
    learning_rate: float  # of the last step
    scores: Scores | None  # on the test data; None without any
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
    """Train a network in place, and return what each epoch gave; the last scores are its own.

    ``train`` and ``test`` are iterables of ``(images, labels)``, the former with a length, shuffled
    and augmented; without a ``device`` the model's is used. With ``recipe.average`` the network
    gets the averaged weights in the end, and all scores are theirs; the last is in float32. The
    recipe's seed fixes all that is drawn here; the first weights (see `untrained`) and a loader that
    has a seed of its own are the caller's.
    """
    place = torch.device(device) if device is not None else next(model.parameters()).device
    if not isinstance(train, Sized):
        raise DataError("the training loader has no length: pass one whose len() is its number of batches")
    model.to(place)
    _arrange(model, torch.channels_last)
    source = Source("the training loader", train, place)
    tests = Source("the test loader", test, place) if test is not None else None
    history: list[Epoch] = []
    try:
        with seeded(recipe.seed, place):
            run = _Run(model, recipe, source.steps_per_epoch(TrainingConfig()) * recipe.epochs)
            for number in range(1, recipe.epochs + 1):
                started = time.perf_counter()
                loss = run.epoch(source, number)
                last = number == recipe.epochs
                if last and run.shown is not model:
                    model.load_state_dict(run.shown.state_dict())
                scores = run.scores(tests, Precision.FP32 if last else recipe.precision) if tests else None
                seconds = time.perf_counter() - started
                history.append(Epoch(number, recipe.epochs, loss, run.rate, scores, seconds))
                if on_epoch is not None:
                    on_epoch(history[-1])
    finally:
        _arrange(model, torch.contiguous_format)
        model.eval()
    return history


def _arrange(model: nn.Module, form: torch.memory_format) -> None:
    model.to(memory_format=form)  # type: ignore[call-overload]  # it is in torch's documentation


class _Run:
    """The state of a training: optimiser, moving average, and how many steps are done."""

    def __init__(self, model: nn.Module, recipe: Recipe, steps: int) -> None:
        self.model, self.recipe, self.steps = model, recipe, steps
        self.done = 0
        self.rate = 0.0
        self.objective = Objective(partial(F.cross_entropy, label_smoothing=recipe.label_smoothing))
        self.optimizer = _optimizer(model, recipe)
        self.shown = copy.deepcopy(model) if recipe.average else model
        kept = _tensors(self.shown, smooth=True)
        self._average = (
            Average(_tensors(model, smooth=True), recipe.average, kept) if recipe.average else None
        )
        self._counts = _tensors(self.shown, smooth=False)

    def epoch(self, source: Source, number: int) -> float:
        """One pass; the device is waited for once, at its end."""
        where = f"epoch {number} of {self.recipe.epochs}"
        self.model.train()
        total = torch.zeros((), device=source.device)
        first_bad = torch.full((), -1, device=source.device, dtype=torch.int64)
        step = -1
        for step, batch in enumerate(source.batches(number - 1)):
            loss = self._step(batch, f"{where}, step {step + 1}")
            total += loss
            first_bad = torch.where((first_bad < 0) & ~torch.isfinite(loss), step, first_bad)
        if step < 0:
            raise DataError(f"{source.name} gave nothing in {where}: pass one that can be iterated again")
        if int(first_bad) >= 0:
            raise DivergedError(
                f"{where}: the loss is no longer finite at step {int(first_bad) + 1} of {step + 1}: "
                "lower the recipe's learning_rate, or look for NaN in the data"
            )
        for old, new in zip(self._counts, _tensors(self.model, smooth=False), strict=True):
            old.copy_(new)
        return float(total) / (step + 1)

    def scores(self, tests: Source, precision: Precision) -> Scores:
        """Loss, without label smoothing, and accuracy of the network as it would be returned."""
        return mean_scores(self.shown, tests, Objective(F.cross_entropy), accuracy, precision)

    def _step(self, batch: Batch, where: str) -> Tensor:
        if len(batch.args) != 1 or not isinstance(batch.args[0], Tensor) or batch.args[0].dim() != 4:
            raise DataError(f"{where}: allowed is a batch of (images, labels), the images N×C×H×W")
        recipe = self.recipe
        images = cutout(batch.args[0], recipe.cutout)
        images, partner, share = mixed(images, recipe)
        images = images.to(memory_format=torch.channels_last)
        self.rate = recipe.learning_rate * rise_and_fall((self.done + 0.5) / self.steps, recipe.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision is Precision.BF16):
            first = Batch((images,), {}, batch.target)
            output = first.through(self.model, where)
            loss = self.objective.of_output(output, first, where)
            if partner is not None:
                other = Batch((images,), {}, batch.target[partner])
                loss = share * loss + (1 - share) * self.objective.of_output(output, other, where)
        try:
            loss.backward()
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
            self.optimizer.step()
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{where}: out of memory with {len(images):,} images: use smaller batches"
            ) from error
        self.done += 1
        if self._average is not None:
            self._average.add(self.done)
        return loss.detach()


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    layers = [m for m in model.modules() if isinstance(m, (_ConvNd, nn.Linear))]
    decayed = {id(layer.weight) for layer in layers}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) in decayed], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, fused = recipe.learning_rate, all(p.is_cuda for p in trained)
    if recipe.optimizer is Optimizer.ADAMW:
        return torch.optim.AdamW(groups, rate, betas=(recipe.momentum, 0.999), fused=fused)
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(groups, rate, momentum=recipe.momentum, nesterov=nesterov, fused=fused)


def _tensors(model: nn.Module, *, smooth: bool) -> list[Tensor]:
    """Parameters and buffers, each once: those with a mean, or the others, which count something."""
    every = (*model.parameters(), *model.buffers())
    return [tensor.detach() for tensor in every if tensor.is_floating_point() == smooth]
