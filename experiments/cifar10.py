"""Compress a CIFAR-10 network with the settings of a TOML file; keep the facts as JSON, and the file.

    python experiments/cifar10.py experiments/resnet20_each.toml \\
        --model cifar_resnet20 --weights resnet20_cifar10.safetensors --data data/cifar10.npz

The weights' metadata gives the normalisation they were trained with. Accuracy and size after are those of the
.pwfn file, loaded again; the file is kept in --files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from pwfn import Compressed, Config, Progress, Result, compress, data, load, models
from pwfn.inspection import inspect


def main() -> None:
    """Run one experiment and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file; its name is the result's name")
    parser.add_argument("--model", default="cifar_resnet20")
    parser.add_argument("--weights", type=Path, required=True, help="safetensors with normalize_mean, _std")
    parser.add_argument("--data", type=Path, default=Path("data/cifar10.npz"))
    parser.add_argument("--seed", type=int, default=None, help="in place of the file's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("experiments/results"), help="for the JSON")
    parser.add_argument("--files", type=Path, default=Path("data"), help="for the .pwfn file")
    parser.add_argument("--commit", default=None, help="of this code, where it is not a git checkout")
    options = parser.parse_args()

    config = Config.load(options.config)
    if options.seed is not None:
        config = config.override({"seed": options.seed})
    with safe_open(options.weights, framework="pt") as file:
        notes = file.metadata() or {}
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    model = models.create(options.model).to(options.device)
    model.load_state_dict(state)
    train, test = data.npz(
        options.data,
        mean=tuple(float(x) for x in notes["normalize_mean"].split(",")),
        std=tuple(float(x) for x in notes["normalize_std"].split(",")),
        device=options.device,
    )
    name = f"{options.config.stem}_seed{config.seed}"
    started = time.perf_counter()
    result = compress(model, train, test, config, on_round=lambda progress: _say(name, progress))
    options.files.mkdir(parents=True, exist_ok=True)
    file = options.files / f"{name}.pwfn"
    result.save(file, record={"model": options.model})
    loaded = load(file)
    facts = {
        "name": name,
        "model": options.model,
        "seed": config.seed,
        "settings": config.to_dict(),
        **_figures(result),
        **_file_facts(file),
        "top1": _accuracy(loaded.apply_to(result.model()), test),
        "top1_ensemble": _ensemble(loaded, result.model(), test, config.seed),
        "seconds": round(time.perf_counter() - started, 1),
        "device": _device_name(options.device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit or _commit(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    shown = (
        "top1_start",
        "top1_fixed",
        "top1",
        "top1_ensemble",
        "entropy_bits",
        "unique",
        "file_bytes",
        "seconds",
    )
    print(name, {key: facts[key] for key in shown}, flush=True)


def _say(name: str, progress: Progress) -> None:
    done = progress.rounds[-1]
    score = done.scores.metric if done.scores else None
    print(
        f"{name} round {done.number} fixed {done.fix.fraction:.3f} loss {done.loss} top1 {score} "
        f"bits {done.fixed.entropy_bits:.3f} unique {done.fixed.unique} sigma {done.sigma_quartiles}",
        flush=True,
    )


def _figures(result: Result) -> dict[str, Any]:
    whole, inner, schedule = result.summary.whole, result.summary.inner, result.config.schedule
    digest = hashlib.sha256(result.compressed.values().numpy().tobytes()).hexdigest()
    return {
        "top1_start": result.before.metric if result.before else None,
        "top1_fixed": result.fixed.metric if result.fixed else None,
        "entropy_bits": whole.entropy_bits,
        "unique": whole.unique,
        "power_of_two_share": whole.power_of_two_share,
        "zero_share": whole.zero_share,
        "weights": whole.weights,
        "entropy_bits_inner": inner.entropy_bits,
        "unique_inner": inner.unique,
        "orders": result.summary.orders,
        "epochs": schedule.warmup_epochs + schedule.epochs_per_round * (len(schedule.fractions) - 1),
        "values_sha256": digest,
        "rounds": [
            {
                "fraction": done.fix.fraction,
                "loss": done.loss,
                "top1": done.scores.metric if done.scores else None,
                "entropy_bits": done.fixed.entropy_bits,
                "unique": done.fixed.unique,
                "power_of_two_share": done.fixed.power_of_two_share,
                "sigma_quartiles": done.sigma_quartiles,
                "steps": [list(step) for step in done.fix.steps],
                "seconds": round(done.seconds, 2),
            }
            for done in result.rounds
        ],
    }


def _file_facts(path: Path) -> dict[str, Any]:
    facts = inspect(path).to_dict()
    kept = (
        "file_bytes",
        "index_bytes",
        "untouched_bytes",
        "fp32_bytes",
        "fp16_bytes",
        "int8_bytes",
        "zstd19_bytes",
    )
    return {name: facts[name] for name in kept}


@torch.no_grad()
def _accuracy(model: nn.Module, test: data.TensorLoader) -> float:
    right = sum(int((model(images).argmax(1) == targets).sum()) for images, targets in test)
    return right / len(test.targets)


@torch.no_grad()
def _ensemble(
    compressed: Compressed, member: nn.Module, test: data.TensorLoader, seed: int, draws: int = 20
) -> float:
    """Accuracy of the mean softmax over draws from the posterior in the file."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.zeros(())
    for _ in range(draws):
        member.load_state_dict(compressed.sample(generator))
        mean = mean.to(test.targets.device) + torch.cat([member(images).softmax(1) for images, _ in test])
    return float((mean.argmax(1) == test.targets).double().mean())


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    main()
