"""Run one experiment on CIFAR-10 with the settings of a TOML file, and keep its facts as JSON.

    python experiments/cifar10.py experiments/resnet20_each.toml \\
        --model cifar_resnet20 --weights resnet20_cifar10.safetensors --data data/cifar10.npz

Accuracy and size after are those of the .pwfn file, loaded again. The run's folder is kept in --runs; a run
that was cut off goes on from there.
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

from pwfn import Config, load
from pwfn.evaluate.inspect import inspect
from pwfn.lab import baselines as methods
from pwfn.run.console import Lines
from pwfn.run.folder import run
from pwfn.run.options import RunOptions
from pwfn.run.scores import evaluate_file

SHOWN = (
    "top1_start",
    "top1_fixed",
    "top1",
    "top1_ensemble",
    "entropy_bits",
    "unique",
    "file_bytes",
    "seconds",
)


def main() -> None:
    """Run one experiment and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file; its name is the result's name")
    parser.add_argument("--model", default="cifar_resnet20")
    parser.add_argument("--weights", required=True, help="safetensors with normalize_mean and normalize_std")
    parser.add_argument("--data", type=Path, default=Path("data/cifar10.npz"))
    parser.add_argument("--seed", type=int, default=None, help="in place of the file's")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=Path("experiments/results"), help="for the JSON")
    parser.add_argument("--runs", type=Path, default=Path("data/runs"), help="for the folder of the run")
    parser.add_argument("--commit", default=None, help="of this code, where it is not a git checkout")
    options = parser.parse_args()

    config = Config.load(options.config)
    if options.seed is not None:
        config = config.override({"seed": options.seed})
    name = f"{options.config.stem}_seed{config.seed}"
    folder = options.runs / name
    source = f"npz:{options.data}"
    started = time.perf_counter()
    chosen = RunOptions(options.model, source, folder, options.weights, device=options.device, resume=True)
    run(chosen, config, Lines(lambda line: print(name, line, flush=True)))
    seconds = round(time.perf_counter() - started, 1)

    file = folder / "model.pwfn"
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["event"] == "round"]
    scored = evaluate_file(file, chosen, samples=20, seed=config.seed)
    facts = {
        "name": name,
        "model": options.model,
        "method": "pwfn",
        "seed": config.seed,
        "top1_start": lines[-1]["before"]["metric"],
        "top1_fixed": rounds[-1]["metric"],
        "top1": scored["after"]["metric"],
        "top1_ensemble": scored["ensemble"],
        **_file_facts(file),
        "epochs": _epochs(config),
        "seconds": seconds,
        "device": _device_name(options.device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit or _commit(),
        "settings": config.to_dict(),
        "rounds": rounds,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(name, {key: facts[key] for key in SHOWN}, flush=True)


def _file_facts(path: Path) -> dict[str, Any]:
    facts = inspect(path).to_dict()
    kept = (
        *("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "index_bytes"),
        *("untouched_bytes", "fp32_bytes", "fp16_bytes", "int8_bytes", "zstd19_bytes"),
    )
    digest = hashlib.sha256(load(path).values().numpy().tobytes()).hexdigest()
    return {**{name: facts[name] for name in kept}, "values_sha256": digest}


def _epochs(config: Config) -> float:
    """Epochs of training, polish included."""
    return sum(stretch.epochs for stretch in methods.of(config).plan(config)) + config.finish.polish_epochs


def _device_name(device: str | None) -> str:
    wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.cuda.get_device_name(wanted) if wanted.startswith("cuda") else platform.processor() or "cpu"


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    main()
