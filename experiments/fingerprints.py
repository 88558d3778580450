"""Fingerprints of what a run computes: the same before and after a change that must not change results.

    python experiments/fingerprints.py                 compare with experiments/results/fingerprints.json
    python experiments/fingerprints.py --write         keep them as the new reference
    python experiments/fingerprints.py digits          only cases whose name contains a word

A fingerprint is the SHA-256 of a compressed network: names and shapes, values, sigmas and all other tensors.
The record inside a file (settings by name, scores) is not part of it. Runs use one thread. Other versions of
torch, and other processors, round differently: the reference names both. Needs data/cifar10.npz
(`pwfn data cifar10`) for ResNet-20.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pwfn
from pwfn.progress import Progress
from pwfn.run.demo import pretrained
from pwfn.zoo import data, models

ROOT = Path(__file__).resolve().parent
REFERENCE = ROOT / "results" / "fingerprints.json"
CIFAR, WEIGHTS = ROOT.parent / "data/cifar10.npz", ROOT.parent / "weights/resnet20_cifar10.safetensors"


class _StopError(Exception):
    """Ends a run after a round."""


def fingerprint(compressed: pwfn.Compressed) -> str:
    """SHA-256 over layout, values, sigmas and the other tensors."""
    digest = hashlib.sha256()
    for entry in compressed.layout.entries:
        digest.update(f"{entry.name} {tuple(entry.shape)}".encode())
    digest.update(compressed.values().contiguous().numpy().tobytes())
    if compressed.sigma is not None:
        digest.update(compressed.sigma.contiguous().numpy().tobytes())
    for name in sorted(compressed.untouched):
        digest.update(name.encode())
        tensor = compressed.untouched[name].contiguous().reshape(-1)
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def resumed(*arguments: Any) -> pwfn.Result:
    """A run that is stopped after its second round, and resumed."""

    def stop(progress: Progress) -> None:
        if len(progress.rounds) == 2:
            raise _StopError

    try:
        return pwfn.compress(*arguments, on_round=stop)
    except _StopError as error:
        return pwfn.compress(*arguments, resume=error.progress)  # type: ignore[attr-defined]  # every error has it


def digits(preset: str, seed: int, compress: Callable[..., pwfn.Result]) -> pwfn.Result:
    """The demo's network; where sigma is trained, at ten times the rate: rounds have 129 steps here."""
    train, test = data.digits()
    model = pretrained(seed)
    config = pwfn.Config.preset(preset).override({"seed": seed})
    if config.training.sigma_learning_rate is not None:
        config = config.override({"training.sigma_learning_rate": 0.01})
    return compress(model, train, test, config)


def resnet20(preset: str, seed: int, compress: Callable[..., pwfn.Result]) -> pwfn.Result:
    """ResNet-20, eight batches of 64 images, three short rounds."""
    with np.load(CIFAR) as arrays:
        images, labels = arrays["x_train"][:512], arrays["y_train"][:512]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std
    loader = list(zip(x.split(64), torch.from_numpy(labels).long().split(64), strict=True))
    model = models.create("cifar_resnet20")
    models.load_weights(model, str(WEIGHTS))
    short = {
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.epochs_per_round": [0.25, 1.0, 1.0],
        "seed": seed,
    }
    config = pwfn.Config.preset(preset).override(short)
    if config.finish.polish_epochs:
        config = config.override({"finish.polish_epochs": 0.5})
    return compress(model, loader, loader[:2], config)


def cases(word: str) -> Iterator[tuple[str, Callable[[], pwfn.Result]]]:
    """Every case by name."""
    for network in (digits, resnet20):
        for seed in (0, 1):
            for preset in ("recommended", "paper"):
                ways = {"": pwfn.compress} | (
                    {" resumed": resumed} if network is digits and seed == 0 else {}
                )
                for end, way in ways.items():
                    name = f"{network.__name__} {preset} seed {seed}{end}"
                    if word in name:
                        yield name, partial(network, preset, seed, way)


def main() -> None:
    """Compute, print, and compare or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {"fingerprints": {}}
    found, differing = {}, 0
    for name, work in cases(options.word):
        result = work()
        found[name] = fingerprint(result.compressed)
        same = found[name] == kept["fingerprints"].get(name)
        differing += not same
        whole, after = result.summary.whole, result.after
        figures = f"{after.metric:.2%}" if after and after.metric is not None else "–"
        verdict = "same" if same else "differs"
        print(f"{verdict:8}{name:36}{found[name][:16]}  {figures}, {whole.entropy_bits:.3f} bits", flush=True)
    if options.write:
        machine = f"{platform.machine()}, torch {torch.__version__}"
        REFERENCE.write_text(json.dumps({"machine": machine, "fingerprints": found}, indent=1) + "\n")
    raise SystemExit(bool(differing) and not options.write)


if __name__ == "__main__":
    main()
