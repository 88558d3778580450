"""Two steps that could follow the preset quick, and do not: what they change, for three seeds.

    python experiments/second_stage.py

appends one line per network, step, seed and variant to experiments/results/second_stage.jsonl; those that
are there are not run again. ``python experiments/results.py docs`` makes the table of docs/method.md.

- ``distilled``: after conditioning, scale and shift of every BatchNorm layer are trained to the original's
  softmax outputs on the same 1,024 images, BatchNorm in evaluation mode: 64 steps of Adam with batches of 64,
  learning rate 0.001 falling along half a cosine, images cropped, flipped and mixed.
- ``regression``: where BatchNorm's statistics are corrected, the copy's channels are scaled by their
  regression on the original's, ``cov / var``, not by the ratio of standard deviations.

All variants have the same step; their bytes are not compared. The original is compared with them on 5,000
training images that were not used, plain and mixed (0.7 of one, 0.3 of another), and on the test images.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import kept
import numpy as np
import torch
from torch import Tensor, nn

import pwfn
from pwfn import Config
from pwfn.bayes.batches import Batch
from pwfn.bayes.objective import accuracy, divergence
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.fixing.conditioning.network import Conditioning
from pwfn.fixing.conditioning.passes import Lane
from pwfn.lab.compare.table import markdown
from pwfn.zoo import models
from pwfn.zoo.arrays import Normaliser, crop_and_flip

HERE = Path(__file__).resolve().parent
RESULTS = kept.RESULTS / "second_stage.jsonl"
RUNS = (("cifar_resnet20", 1.22), ("cifar_resnet56", 1.1), ("cifar_resnet20", 0.9))
VARIANTS = ("quick", "distilled", "regression")
IMAGES, HELD_OUT, STEPS, BATCH, RATE = 1024, 5000, 64, 64, 1e-3
SETS = ("held_out", "mixed", "test")
HEADS = (
    "network, step",
    "variant",
    "KL, held-out",
    "KL, mixed",
    "KL, test",
    "agreement, test, %",
    "top-1, %",
)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parent / "data" / "cifar10.npz")
    parser.add_argument("--commit", default=None, help="of the code, if it is not in a git checkout")
    options = parser.parse_args()
    arrays = np.load(options.data)
    facts = kept.here(options.commit) | {"device": platform.machine()}  # it runs on the CPU
    for name, step in RUNS:
        for seed in range(3):
            done = {(own["network"], own["step"], own["seed"]) for own in kept.read(RESULTS)}
            if (name, step, seed) not in done:
                for own in study(name, step, seed, arrays):
                    kept.add(RESULTS, own | facts)


def study(name: str, step: float, seed: int, arrays: Any) -> list[dict[str, Any]]:
    """All variants of one network, step and seed."""
    original = models.create(name)
    weights = HERE.parent / "weights" / f"{name.removeprefix('cifar_')}_cifar10.safetensors"
    prepared = models.data_config(name, original, models.load_weights(original, str(weights)))
    original.eval()
    normalise = Normaliser(prepared.mean, prepared.std, torch.device("cpu"))

    def images(part: str, indices: Any) -> Tensor:
        return normalise(torch.from_numpy(arrays[f"x_{part}"][indices]).permute(0, 3, 1, 2))

    others = len(arrays["x_train"]) - HELD_OUT
    chosen = torch.randperm(others, generator=torch.Generator().manual_seed(seed))[:IMAGES]
    used, held_out = images("train", chosen.numpy()), images("train", slice(others, None))
    sets = {
        "held_out": held_out,
        "mixed": Batch((held_out,), {}, None).mixed(0.7).args[0],
        "test": images("test", slice(None)),
    }
    references = {part: outputs(original, inputs) for part, inputs in sets.items()}
    labels = torch.from_numpy(arrays["y_test"]).long()
    found = []
    quick = original
    for variant in VARIANTS:
        started = time.perf_counter()
        if variant == "distilled":
            model = distilled(quick, original, used, seed)
        else:
            model = conditioned(original, used, step, seed, variant == "regression")
            quick = model if variant == "quick" else quick
        seconds = time.perf_counter() - started
        model = copy.deepcopy(model)
        shrink_uncompressed(model, Config.preset("quick").finish)
        row: dict[str, Any] = {"network": name, "step": step, "seed": seed, "variant": variant}
        for part, inputs in sets.items():
            z = outputs(model, inputs)
            row[part] = {
                "kl": divergence(z, references[part]).item(),
                "agreement": accuracy(z, references[part]).item(),
            }
            if part == "test":
                row["accuracy"] = accuracy(z, labels).item()
        found.append({**row, "seconds": round(seconds, 1)})
        print(json.dumps(found[-1]), flush=True)
    return found


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Of all images, a few hundred at a time."""
    return torch.cat([model(part) for part in inputs.split(250)])


def conditioned(model: nn.Module, images: Tensor, step: float, seed: int, regression: bool) -> nn.Module:
    """The network of the preset quick, before BatchNorm is folded."""
    plain = {"finish.fold_batchnorm": False, "finish.uncompressed_dtype": "float32"}
    config = Config.preset("quick").override({"options.step": step, "seed": seed, **plain})
    correct = regress if regression else Conditioning._correct
    with mock.patch.object(Conditioning, "_correct", correct):
        return pwfn.compress(model, images, config=config).model().eval()


def regress(self: Conditioning, name: str, group: Sequence[Lane]) -> None:
    """Correct a BatchNorm layer so that it sees ``a z' + b``, nearest to the original's z.

    ``a = cov(z, z') / var z'`` and ``b = mean z - a mean z'``, per channel.
    """
    layer: Any = self._networks[1].get_submodule(name)
    sums: list[Any] = [0, 0, 0, 0, 0]
    for lane in group:
        own, other = (
            found.inputs.movedim(1, 0).flatten(1).double()
            for found in (lane.found, lane._original.found or lane.found)
        )
        new = (own.shape[1], own.sum(1), other.sum(1), own.square().sum(1), (own * other).sum(1))
        sums = [before + each for before, each in zip(sums, new, strict=True)]
    count = sums[0]
    mean, mean_before, square, product = (each / count for each in sums[1:])
    slope = (product - mean * mean_before) / (square - mean.square()).clamp_min(1e-12)
    slope = slope.clamp(0.5, 2.0)
    layer.running_mean.copy_((layer.running_mean - mean_before + slope * mean) / slope)
    layer.running_var.copy_(
        ((layer.running_var.double() + layer.eps) / slope.square() - layer.eps).clamp_min(0)
    )


def distilled(model: nn.Module, original: nn.Module, images: Tensor, seed: int) -> nn.Module:
    """Scales and shifts trained to the original's outputs."""
    model = copy.deepcopy(model).requires_grad_(False).eval()
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    trained = [p.requires_grad_() for layer in layers for p in (layer.weight, layer.bias)]
    optimizer = torch.optim.Adam(trained, RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draws = torch.Generator().manual_seed(seed)
    epochs = math.ceil(STEPS * BATCH / len(images))
    order = torch.cat([torch.randperm(len(images), generator=draws) for _ in range(epochs)])
    for step in range(STEPS):
        batch = crop_and_flip(images[order[step * BATCH : (step + 1) * BATCH]], draws)
        share = torch.rand(len(batch), 1, 1, 1, generator=draws) / 2
        batch = (1 - share) * batch + share * batch.roll(1, 0)
        with torch.no_grad():
            reference = original(batch)
        optimizer.zero_grad()
        divergence(model(batch), reference).backward()
        optimizer.step()
        scheduler.step()
    return model.requires_grad_(False)


def table(path: Path = RESULTS) -> list[str]:
    """The table of docs/method.md: means, and for variants the difference from quick ± its standard error."""
    lines = kept.read(path)
    if not lines:
        return ["Not measured yet."]
    rows = []
    for name, step in RUNS:
        own = [line for line in lines if (line["network"], line["step"]) == (name, step)]
        for variant in [each for each in VARIANTS if each in {line["variant"] for line in own}]:
            cells = [f"{name}, {step}", variant]
            cells += [_cell(own, variant, (part, "kl"), 4, 1) for part in SETS]
            cells += [_cell(own, variant, keys, 2, 100) for keys in (("test", "agreement"), ("accuracy",))]
            rows.append(tuple(cells))
    return [
        *markdown(HEADS, rows),
        "",
        "Means over seeds 0 to 2; of variants, the difference from `quick` with the same seed, ± its "
        f"standard error. Measured on: {kept.measured_on(lines, threads=True)}.",
    ]


def _cell(lines: Sequence[Any], variant: str, keys: Sequence[str], places: int, factor: int) -> str:
    """A mean, or a mean difference from quick."""

    def values(of: str) -> dict[int, float]:
        found = {}
        for line in lines:
            if line["variant"] == of:
                value = line
                for key in keys:
                    value = value[key]
                found[line["seed"]] = factor * float(value)
        return found

    own, quick = values(variant), values("quick")
    if variant == "quick":
        return f"{statistics.mean(own.values()):.{places}f}"
    changes = [own[seed] - quick[seed] for seed in own]
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return f"{statistics.mean(changes):+.{places}f} ± {error:.{places}f}"


if __name__ == "__main__":
    main()
