"""``pwfn train``: from names of a network and a data set to trained weights in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pwfn.bayes.distributed import usable_device
from pwfn.errors import FileError, PwfnError
from pwfn.evaluate.score import finite
from pwfn.file.storage import check_writable, replacing
from pwfn.lab.pretrain.loop import Epoch, train, untrained
from pwfn.lab.pretrain.recipe import Recipe, recipe_for
from pwfn.run.console import duration
from pwfn.zoo import data, models
from pwfn.zoo.data import DataOptions

HEADER = "epoch     loss  learning rate  accuracy  seconds  time left"


class InterruptedTrainingError(PwfnError):
    """Training was stopped by Ctrl-C, and nothing was written."""

    exit_status = 130  # as in a shell


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, on what data and into which file; None: as in the network's recipe."""

    model: str
    data: str  # a source: npz:PATH, cifar10:DIR, …
    out: Path
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    precision: str | None = None
    device: str | None = None  # CUDA if there is one, unless given
    limit: int | None = None  # train on this many images only
    holdout: int = 0  # hold out this many training images and test on them instead of the test images
    force: bool = False  # replace an existing file

    def recipe(self) -> Recipe:
        """The network's recipe with the numbers given here.

        >>> TrainOptions("cifar_resnet18", "digits", Path("w"), epochs=2).recipe().epochs
        2
        """
        names = ("epochs", "batch_size", "learning_rate", "seed", "precision")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(recipe_for(self.model), **given)


def run(options: TrainOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train a network by name on data by name, write its weights, and return the facts."""
    history: list[Epoch] = []
    try:
        return _run(options, say, history)
    except KeyboardInterrupt:
        reached = f" after {len(history)} of {history[-1].epochs} epochs" if history else ""
        raise InterruptedTrainingError(
            f"stopped by Ctrl-C{reached}: {options.out} was not written, and training from scratch does not "
            "resume"
        ) from None


def _run(options: TrainOptions, say: Callable[[str], None], history: list[Epoch]) -> dict[str, Any]:
    recipe, name, out = options.recipe(), options.model, options.out
    if out.is_file() and not options.force:
        raise FileError(f"{out}: exists already: name another file, or replace it with --force")
    check_writable(out)  # before the work, not after it
    device = usable_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.device("meta"):  # only its data settings are needed
        images = models.data_config(name, models.create(name))
    how = DataOptions(
        **vars(images),
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        device=device,
        limit=options.limit,
        holdout=options.holdout,
    )
    source = data.open_source(options.data, how)
    if source.classes is not None:  # a user's function does not say: the network's usual number
        source.check_labels(source.classes)
    model = untrained(name, recipe, **({"classes": source.classes} if source.classes is not None else {}))
    size = "" if source.train_size is None else f", {source.train_size:,} images"
    say(
        f"{name} on {source.name}{size}: {recipe.epochs:,} epochs, batches of {recipe.batch_size:,}, "
        f"{recipe.precision} on {device}"
    )
    say(HEADER)

    def on_epoch(done: Epoch) -> None:
        history.append(done)
        say(epoch_line(done, sum(each.seconds for each in history)))

    started = time.perf_counter()
    train(model, source.train, source.test, recipe, device=device, on_epoch=on_epoch)
    seconds, last = time.perf_counter() - started, history[-1]
    top1 = finite(last.top1)
    notes: dict[str, Any] = {"model": name, "classes": source.classes, **images.metadata(), "top1": top1}
    notes |= {"recipe": json.dumps(asdict(recipe)), "seed": recipe.seed}
    state = {key: tensor.cpu() for key, tensor in model.state_dict().items()}
    with replacing(out) as temporary:
        save_file(state, temporary, {key: str(value) for key, value in notes.items() if value is not None})
    bytes_written = out.stat().st_size
    examples = last.scores.examples if last.scores else 0
    right = "" if top1 is None else f"{top1:.2f}% of {examples:,} test images right "
    return {
        "model": name,
        "data": source.fingerprint,
        "classes": source.classes,
        "top1": top1,
        "loss": finite(last.scores.loss) if last.scores else None,
        "examples": examples,
        "train_loss": finite(last.loss),
        "epochs": recipe.epochs,
        "seconds": round(seconds, 2),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "file": str(out),
        "bytes": bytes_written,
        "recipe": asdict(recipe),
        "sentence": f"{out}: {bytes_written:,} bytes; {right}after {duration(seconds)}; "
        f"compress it with --model {name} --weights {out}",
    }


def epoch_line(done: Epoch, seconds: float) -> str:
    """An epoch as one line below :data:`HEADER`; ``seconds`` is the time of all epochs so far.

    >>> epoch_line(Epoch(5, 100, 1.25, 0.2, None, 3.0), 15.0)
    '    5   1.2500            0.2         -      3.0      5 min'
    """
    top1 = "-" if done.top1 is None else f"{done.top1:.2f}%"
    left = duration(seconds / done.number * (done.epochs - done.number)) if done.number < done.epochs else "-"
    return (
        f"{done.number:>5}  {done.loss:>7.4f}  {done.learning_rate:>13.3g}  {top1:>8}  "
        f"{done.seconds:>7.1f}  {left:>9}"
    )
