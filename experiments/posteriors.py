"""Fit the predictive sigma of every file in a folder, and score its draws on the test images.

python experiments/posteriors.py --data npz:data/cifar10.npz --out runs/posteriors

Writes each file with its posterior, and `posteriors.json`: accuracy, NLL and ECE of point estimate and
ensemble on all test images, both after a temperature on the fixed half, and bytes. The data must be those
that the networks were trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pwfn.errors import DataError
from pwfn.evaluate import calibration
from pwfn.evaluate.ensemble import Predictions, ensemble
from pwfn.lab.uncertainty.assess import split_in_half
from pwfn.run.options import RunOptions
from pwfn.run.scores import fit_file, open_file

MODELS = Path(__file__).resolve().parent / "models"


def main() -> None:
    """Fit and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", type=Path, nargs="+", default=sorted(MODELS.glob("*.pwfn")))
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = []
    for path in options.files:
        found.append(study(path, options))
        print(json.dumps(found[-1]), flush=True)
        (options.out / "posteriors.json").write_text(json.dumps(found, indent=1) + "\n")


def study(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One file: its fit, and its scores."""
    how = RunOptions("", options.data, options.out, "", device=options.device)
    started = time.perf_counter()
    facts = fit_file(path, options.out / path.name, how)
    seconds = time.perf_counter() - started
    file = open_file(options.out / path.name, how, 0)
    rows = {}
    for name, samples in (("point estimate", 0), ("ensemble", options.samples)):
        predicted = ensemble([file.compressed], file.network, file.data.test, samples)
        rows[name] = scores(predicted)
    more = facts["file_bytes"] - path.stat().st_size
    drawable = file.compressed.drawable
    return {
        "name": path.stem,
        "file_bytes": facts["file_bytes"],
        "more_bytes": more,
        "drawable": drawable,
        "fit_seconds": round(seconds, 1),
        "samples": options.samples,
        "sigma": facts["sigma"],
        **rows,
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
        "accuracy": calibration.accuracy(found.probabilities, targets),
        "nll": calibration.negative_log_likelihood(log_p, targets),
        "ece": calibration.calibration_error(found.probabilities, targets),
        "nll_half": calibration.negative_log_likelihood(log_p[scored], targets[scored]),
        "nll_half_tempered": calibration.negative_log_likelihood(scaled, targets[scored]),
        "temperature": temperature,
    }


if __name__ == "__main__":
    main()
