"""Fit the predictive sigma of compressed files, and score their draws on the test images.

python experiments/posteriors.py --data npz:data/cifar10.npz --out tables/posteriors

scores every file of experiments/models; with ``--files``, those alone.

Writes each file with its posterior to ``--out``; one line per file is appended to
experiments/results/posteriors.jsonl. ``python experiments/results.py docs`` makes the table of
docs/uncertainty.md. The training data must be those that the networks were trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import kept

from pwfn.errors import DataError
from pwfn.evaluate import calibration
from pwfn.evaluate.ensemble import Predictions, ensemble
from pwfn.lab.compare.table import markdown
from pwfn.lab.uncertainty.assess import split_in_half
from pwfn.run.options import RunOptions
from pwfn.run.scores import fit_file, open_file

HERE = Path(__file__).resolve().parent
RESULTS = kept.RESULTS / "posteriors.jsonl"
HEADS = ("file", "bytes", "for sigma", "top-1, %", "NLL", "ECE", "NLL, tempered", "fit, s")


def main() -> None:
    """Fit and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    every = sorted((HERE / "models").glob("*.pwfn"))
    parser.add_argument("--files", type=Path, nargs="+", default=every)
    parser.add_argument("--data", required=True, help="as for `pwfn evaluate`: npz:data/cifar10.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files with a posterior")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--commit", default=None, help="of the code, if it is not in a git checkout")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.files:
        facts = study(path, options)
        print(json.dumps(facts), flush=True)
        kept.add(RESULTS, facts)


def study(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One file: its fit, and its scores."""
    how = RunOptions("", options.data, options.out, "", device=options.device)
    started = time.perf_counter()
    facts = fit_file(path, options.out / path.name, how, seed=options.seed)
    seconds = time.perf_counter() - started
    file = open_file(options.out / path.name, how, options.seed)
    rows = {}
    for name, samples in (("point", 0), ("ensemble", options.samples)):
        predicted = ensemble([file.compressed], file.network, file.data.test, samples)
        rows[name] = scores(predicted)
    return {
        "file": path.name,
        "bytes": facts["file_bytes"],
        "sigma_bytes": len(file.compressed.layout.entries),
        "drawable": file.compressed.drawable,
        "samples": options.samples,
        "seed": options.seed,
        "fit_seconds": round(seconds, 1),
        **rows,
        **kept.here(options.commit),
    }


def scores(found: Predictions) -> dict[str, float]:
    """Measures on all examples, and the NLL after a temperature on one half, fitted on the other."""
    if found.targets is None:
        raise DataError("the test data have no labels: give labelled ones")
    fitted, scored = split_in_half(len(found.targets))
    log_p, targets = found.log_probabilities, found.targets
    temperature = calibration.fit_temperature(log_p[fitted], targets[fitted])
    scaled = calibration.tempered(log_p[scored], temperature)
    return {
        "images": len(targets),
        "accuracy": calibration.accuracy(found.probabilities, targets),
        "nll": calibration.negative_log_likelihood(log_p, targets),
        "ece": calibration.calibration_error(calibration.reliability(found.probabilities, targets)),
        "nll_half_tempered": calibration.negative_log_likelihood(scaled, targets[scored]),
        "temperature": temperature,
    }


def table(path: Path = RESULTS) -> list[str]:
    """The table of docs/uncertainty.md: point estimate → ensemble."""
    lines = kept.read(path)
    if not lines:
        return ["Not measured yet."]
    rows = []
    for own in lines:
        both = (own["point"], own["ensemble"])
        top1 = " → ".join(f"{100 * scores['accuracy']:.2f}" for scores in both)
        others = [
            " → ".join(f"{scores[key]:.3f}" for scores in both) for key in ("nll", "ece", "nll_half_tempered")
        ]
        fit = f"{own['fit_seconds']:.0f}"
        rows.append((f"`{own['file']}`", f"{own['bytes']:,}", f"{own['sigma_bytes']}", top1, *others, fit))
    return [
        *markdown(HEADS, rows),
        "",
        f"Point estimate → mean of {lines[0]['samples']} draws, {lines[0]['point']['images']:,} test images, "
        f"seed {lines[0]['seed']}. Measured on: {kept.measured_on(lines, threads=True)}.",
    ]


if __name__ == "__main__":
    main()
