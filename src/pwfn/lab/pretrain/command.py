"""One call from names to trained weights in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pwfn.bayes.distributed import usable_device
from pwfn.errors import FileError, PwfnError
from pwfn.evaluate.score import finite
from pwfn.file.storage import replacing
from pwfn.lab.pretrain.loop import Epoch, train, untrained
from pwfn.lab.pretrain.recipe import Recipe, recipe_for
from pwfn.lab.pretrain.saving import save_weights
from pwfn.run.console import duration
from pwfn.zoo import data, models
from pwfn.zoo.data import Data, DataOptions
from pwfn.zoo.models import DataConfig

HEADER = "epoch     loss  learning rate  accuracy  seconds  time left"


class InterruptedTrainingError(PwfnError):
    """Training was stopped by Ctrl-C, and nothing was written."""

    exit_status = 130  # as a shell would have it


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, on what and into which file; None leaves a number to the network's recipe."""

    model: str
    data: str  # a source: npz:PATH, cifar10:DIR, …
    out: Path
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    precision: str | None = None
    device: str | None = None  # CUDA where there is one, unless given
    limit: int | None = None  # train on so many images only
    holdout: int = 0  # test on so many training images, held out, instead of the test images
    force: bool = False  # replace the file if it is there

    def recipe(self) -> Recipe:
        """The network's recipe with the numbers given here in place of its own.

        >>> TrainOptions("cifar_resnet18", "digits", Path("w"), epochs=2).recipe().epochs
        2
        """
        names = ("epochs", "batch_size", "learning_rate", "seed", "precision")
        given = {name: getattr(self, name) for name in names}
        return replace(
            recipe_for(self.model), **{name: value for name, value in given.items() if value is not None}
        )


def run(options: TrainOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train a network by name on data by name, write its weights, and return the facts."""
    history: list[Epoch] = []
    try:
        return _run(options, say, history)
    except KeyboardInterrupt:
        reached = f" after {len(history)} of {history[-1].epochs} epochs" if history else ""
        raise InterruptedTrainingError(
            f"stopped by Ctrl-C{reached}: {options.out} was not written, and training from scratch does not "
            "go on where it stopped"
        ) from None


def _run(options: TrainOptions, say: Callable[[str], None], history: list[Epoch]) -> dict[str, Any]:
    recipe = options.recipe()
    _check_target(options.out, options.force)  # before the work, not after it
    device = usable_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.device("meta"):  # only its data settings are asked for
        preparation = models.data_config(options.model, models.create(options.model))
    source = _data(options, recipe, preparation, device)
    if source.classes is None:  # a function of the user's made it: the network's usual number
        model = untrained(options.model, recipe)
    else:
        source.check_labels(source.classes)
        model = untrained(options.model, recipe, classes=source.classes)
    say(_beginning(options, recipe, source, device))
    say(HEADER)

    def on_epoch(done: Epoch) -> None:
        history.append(done)
        say(epoch_line(done, sum(each.seconds for each in history)))

    started = time.perf_counter()
    train(model, source.train, source.test, recipe, device=device, on_epoch=on_epoch)
    seconds = time.perf_counter() - started
    metadata = {
        "model": options.model,
        "classes": source.classes,
        **preparation.metadata(),
        "top1": finite(history[-1].top1),
        "recipe": recipe,
        "seed": recipe.seed,
    }
    save_weights(model, options.out, metadata)
    return _facts(options, recipe, source, device, history[-1], seconds)


def epoch_line(done: Epoch, seconds: float) -> str:
    """An epoch in one line under :data:`HEADER`; ``seconds`` is what all epochs so far took.

    >>> epoch_line(Epoch(5, 100, 1.25, 0.2, None, 3.0), 15.0)
    '    5   1.2500            0.2         -      3.0      5 min'
    """
    top1 = "-" if done.top1 is None else f"{done.top1:.2f}%"
    left = duration(seconds / done.number * (done.epochs - done.number)) if done.number < done.epochs else "-"
    return (
        f"{done.number:>5}  {done.loss:>7.4f}  {done.learning_rate:>13.3g}  {top1:>8}  "
        f"{done.seconds:>7.1f}  {left:>9}"
    )


class _EnoughError(Exception):
    """Ends the trial below without a file."""


def _check_target(path: Path, force: bool) -> None:
    """Begin to write the file as it will be written, and leave off: what fails then, fails now."""
    if path.is_file() and not force:
        raise FileError(f"{path}: is there already: name another file, or replace it with --force")
    with suppress(_EnoughError), replacing(path):
        raise _EnoughError


def _data(options: TrainOptions, recipe: Recipe, preparation: DataConfig, device: torch.device) -> Data:
    return data.open_source(
        options.data,
        DataOptions.prepared(
            preparation,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            device=device,
            limit=options.limit,
            holdout=options.holdout,
        ),
    )


def _beginning(options: TrainOptions, recipe: Recipe, source: Data, device: torch.device) -> str:
    images = "" if source.train_size is None else f", {source.train_size:,} images"
    epochs = "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs:,} epochs"
    return (
        f"{options.model} on {source.name}{images}: {epochs} in batches of {recipe.batch_size:,}, "
        f"{recipe.precision} on {device}"
    )


def _facts(
    options: TrainOptions, recipe: Recipe, source: Data, device: torch.device, last: Epoch, seconds: float
) -> dict[str, Any]:
    size = options.out.stat().st_size
    examples = last.scores.examples if last.scores else 0
    right = "" if last.top1 is None else f"{last.top1:.2f}% of {examples:,} test images right "
    return {
        "model": options.model,
        "data": source.fingerprint,
        "classes": source.classes,
        "top1": finite(last.top1),
        "loss": finite(last.scores.loss) if last.scores else None,
        "examples": examples,
        "train_loss": finite(last.loss),
        "epochs": recipe.epochs,
        "seconds": round(seconds, 2),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "file": str(options.out),
        "bytes": size,
        "recipe": recipe.to_dict(),
        "sentence": (
            f"{options.out}: {size:,} bytes; {right}after {duration(seconds)}; "
            f"compress it with --model {options.model} --weights {options.out}"
        ),
    }
