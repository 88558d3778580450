"""The main job on a small embedded problem: train a network on digits, then fix its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.randomness import seeded
from pwfn.compress import Result, compress
from pwfn.config import Config
from pwfn.evaluate.inspect import inspect
from pwfn.file.format import load
from pwfn.file.storage import make_folder
from pwfn.progress import Progress
from pwfn.run.console import HEADER, round_line
from pwfn.zoo import data, models

_PRETRAINING_EPOCHS = 12
FILE = "model.pwfn"


def settings(preset: str, seed: int) -> Config:
    """A preset, with sigma, where it learns, ten times as fast: a round here is 129 steps, not thousands.

    The regulariser moves sigma by a set amount a step, so that in a run this short it would
    otherwise hardly leave its start. What is recommended is a sigma that does not learn.
    """
    return Config.preset(preset).override({"seed": seed, "training.sigma_learning_rate": 0.01})


def pretrained(train: data.TensorLoader, seed: int) -> nn.Module:
    """The demo's network, trained from scratch with a one-cycle learning rate."""
    with seeded(seed, torch.device("cpu")):
        model = models.digits_resnet()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        steps = _PRETRAINING_EPOCHS * len(train)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        model.train()
        for number in range(_PRETRAINING_EPOCHS):
            for images, targets in train.epoch(number):
                optimizer.zero_grad()
                F.cross_entropy(model(images), targets).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def run(config: Config, say: Callable[[str], None] = print, out: Path | None = None) -> Result:
    """Train, compress and report, a line a round; with ``out``, write ``out/model.pwfn`` too."""
    if out is not None:
        make_folder(out)  # before the work, not after it
    train, test = data.digits()
    model = pretrained(train, config.seed)
    size = sum(p.numel() for p in model.parameters())
    say(f"A residual network with {size:,} parameters, trained on {len(train.images):,} images of digits.")
    say(HEADER)

    def on_round(progress: Progress) -> None:
        say(round_line(progress.rounds[-1]))

    result = compress(model, train, test, config, on_round=on_round)
    for line in summary_lines(result):
        say(line)
    if out is not None:
        for line in _file_lines(result, out, test):
            say(line)
    return result


def _file_lines(result: Result, out: Path, test: data.TensorLoader) -> list[str]:
    """Save the network, and say what the file itself holds: its size, and its accuracy when loaded."""
    path = out / FILE
    result.save(path, record={"model": "digits_resnet"})
    model = load(path).apply_to(models.digits_resnet()).eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == targets).sum()) for images, targets in test)
    facts = inspect(path, zstd=False)
    return [
        f"{path}: {facts.file_bytes:,} bytes; loaded from it, {right} of {len(test.targets)} images right",
        f"the same network in fp32: {facts.fp32_bytes:,} bytes; in fp16: {facts.fp16_bytes:,}; "
        f"in int8: {facts.int8_bytes:,}",
    ]


def summary_lines(result: Result) -> list[str]:
    """The result in a few lines: accuracy before and after, and what the weights have become."""
    whole = result.summary.whole
    lines = []
    if (
        result.before
        and result.after
        and result.before.metric is not None
        and result.after.metric is not None
    ):
        lines.append(
            f"accuracy on {result.after.examples:,} test images: {result.before.metric:.2%} before, "
            f"{result.after.metric:.2%} after"
        )
    lines.append(
        f"{whole.weights:,} weights now take {whole.unique} values, {whole.entropy_bits:.3f} bits of "
        f"entropy each; {whole.power_of_two_share:.1%} are zero or a power of two"
    )
    return lines


def facts(result: Result, out: Path | None = None) -> dict[str, Any]:
    """The same as plain numbers, rounds included; with ``out``, what is inside the file there too."""
    return {
        **({"file": inspect(out / FILE, zstd=False).to_dict()} if out is not None else {}),
        "before": result.before.to_dict() if result.before else None,
        "after": result.after.to_dict() if result.after else None,
        **asdict(result.summary.whole),
        "rounds": [
            {
                "fraction": done.fix.fraction,
                "fixed": done.fix.fixed,
                "loss": done.loss,
                "metric": done.scores.metric if done.scores else None,
                "seconds": done.seconds,
                **asdict(done.fixed),
            }
            for done in result.rounds
        ],
    }
