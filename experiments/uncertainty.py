"""Does the posterior tell when a prediction is uncertain? Runs and their rivals as one table.

python experiments/uncertainty.py run --model cifar_resnet18 --weights W.safetensors \
    --data npz:data/cifar10.npz --ood npz:data/fashion.npz --ood noise --seeds 0 1 2
python experiments/uncertainty.py table            print the table of experiments/results/uncertainty

`run` compresses the network with every variant and seed (or resumes), keeps one sigma per weight, and
assesses each file: the ensemble of 20 draws beside its rivals, also on out-of-distribution data; with
smaller scales of sigma; and with one sigma per centre instead of one per weight. With --plain only the
first of these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from uncertainty_table import AS_IT_IS, table

from pwfn import Compressed, Config, load
from pwfn.lab.uncertainty.assess import Assessment, Rival, assess
from pwfn.lab.uncertainty.ood import open_ood
from pwfn.run.folder import run
from pwfn.run.options import RunOptions, settings
from pwfn.run.resolve import network_of, preparation_of
from pwfn.zoo import models
from pwfn.zoo.data import DataOptions, open_source

RESULTS = Path(__file__).resolve().parent / "results" / "uncertainty"

VARIANTS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "fixed weights quiet": {"posterior.noise_on_fixed": False},
    "sigma of the paper": {
        "posterior.init": "powers",
        "training.sigma_learning_rate": 0.001,
        "fixing.grid_exponent": 7,
    },
}
"""What each changes from the recommended settings."""

SCALES = (0.125, 0.25, 0.5)


def main() -> None:
    """Run and assess, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("run", help="compress and assess")
    for name in ("model", "weights", "data"):
        job.add_argument(f"--{name}", required=True)
    job.add_argument("--ood", action="append", default=[])
    job.add_argument("--seeds", type=int, nargs="+", default=[0])
    job.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    job.add_argument("--set", dest="changes", action="append", default=[], help="section.name=value, for all")
    job.add_argument("--samples", type=int, default=20)
    job.add_argument("--plain", action="store_true", help="assess each file only as it is")
    job.add_argument("--device", default=None)
    job.add_argument("--runs", type=Path, default=Path("runs/uncertainty"))
    job.add_argument("--out", type=Path, default=RESULTS)
    job.add_argument("--commit", default=None, help="of this code, where it is not a git checkout")
    shown = commands.add_parser("table", help="print the table")
    shown.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table(options.out)))
        return
    for variant in options.variants:
        for seed in options.seeds:
            study(options, variant, seed)


def study(options: argparse.Namespace, variant: str, seed: int) -> None:
    """One run, and every assessment of its file."""
    name = f"{options.model}_{variant.replace(' ', '_')}_seed{seed}"
    config: Config = settings(None, None, options.changes, seed).override(VARIANTS[variant])
    chosen = RunOptions(options.model, options.data, options.runs / name, options.weights)
    chosen = replace(chosen, device=options.device, resume=True, posterior="weight")
    if not _done(chosen.out, config):
        run(chosen, config)
    record = json.loads((chosen.out / "record.json").read_text())
    compressed = load(chosen.out / "model.pwfn")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    answers = {}
    for label, found in _answers(options, compressed, seed, device):
        answers[label] = found.to_dict()
        row = found.row(Rival.ENSEMBLE)
        print(name, label, f"accuracy {row.accuracy:.4f}, NLL {row.nll:.4f}", flush=True)
    result = {
        "name": name,
        "model": options.model,
        "variant": variant,
        "seed": seed,
        "samples": options.samples,
        "top1_start": record["before"]["metric"],
        "top1": record["after"]["metric"],
        "entropy_bits": record["entropy_bits"],
        "unique": record["unique"],
        "machine": record["machine"],
        "assessed_on": str(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"),
        "commit": options.commit,
        "settings": config.to_dict(),
        "answers": answers,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _done(folder: Path, config: Config) -> bool:
    """Whether a run with these settings has finished there; one that was interrupted is resumed instead."""
    if not (folder / "model.pwfn").is_file() or not (folder / "record.json").is_file():
        return False
    found = json.loads((folder / "record.json").read_text())["identity"]["settings"]
    return bool(found == config.to_dict())


def _answers(
    options: argparse.Namespace, compressed: Compressed, seed: int, device: torch.device
) -> Iterator[tuple[str, Assessment]]:
    """The assessment of the file as it is, then with each change that could explain a weak ensemble."""
    network = network_of(compressed, options.model).to(device)
    preparation = preparation_of(compressed, options.model, network)
    images = DataOptions.prepared(preparation, batch_size=128, test_batch_size=1000, seed=seed, device=device)
    own = open_source(options.data, images)
    ood = {spec: open_ood(spec, own, images).loader for spec in options.ood}
    original = network_of(compressed, options.model).to(device)
    if options.weights != "random":
        models.load_weights(original, options.weights)

    def ask(of: Compressed, with_ood: bool = False, **how: Any) -> Assessment:
        common: dict[str, Any] = {"original": original, "samples": options.samples, "seed": seed}
        return assess(of, network, own.test, ood=ood if with_ood else None, **common, **how)

    yield AS_IT_IS, ask(compressed, with_ood=True)
    if options.plain:
        return
    for scale in SCALES:
        yield f"sigma × {scale:g}", ask(compressed, sigma_scale=scale)
    by_centre = replace(compressed, weight_sigma=None, centre_sigma=compressed.centre_sigmas())
    yield "one sigma per centre", ask(by_centre)


if __name__ == "__main__":
    main()
