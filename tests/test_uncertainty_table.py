"""The table of the study of uncertainty: means over seeds, each rival where it belongs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import uncertainty_table

from pwfn import Config


def _row(name: str, nll: float) -> dict[str, Any]:
    return {
        "name": name,
        "accuracy": 0.9,
        "nll": nll,
        "brier": 0.1,
        "calibration_error": 0.02,
        "risk_coverage_area": 0.01,
        "auroc": {"npz:data/fashion.npz": {"max_probability": 0.75}},
        "fpr95": {"npz:data/fashion.npz": {"max_probability": 0.5}},
    }


def _result(
    folder: Path,
    variant: str,
    seed: int,
    nll: float,
    labels: list[str],
    model: str = "net",
    **changes: Any,
) -> None:
    answer = {
        "rows": [_row("original", 0.25), _row("point estimate", 2 * nll), _row("ensemble", nll)],
        "samples": 20,
        "split": "scored on half",
    }
    name = f"{model}_{variant}_seed{seed}"
    config = Config.preset("recommended").override({"seed": seed, **changes})
    facts = {
        "name": name,
        "model": model,
        "variant": variant,
        "seed": seed,
        "top1_start": 0.95,
        "top1": 0.94,
        "entropy_bits": 1.5,
        "machine": {"device": "a GPU", "versions": {"torch": "2.0"}},
        "commit": "abc",
        "settings": config.to_dict(),
        "answers": dict.fromkeys(labels, answer),
    }
    (folder / f"{name}.json").write_text(json.dumps(facts))


def test_means_over_seeds_and_each_rival_once(tmp_path: Path) -> None:
    asked = ["sigma × 1", "sigma × 0.5"]
    _result(tmp_path, "another", 0, 0.5, asked[:1])
    _result(tmp_path, "recommended", 0, 0.1, asked)
    _result(tmp_path, "recommended", 1, 0.3, asked[:1])
    lines = uncertainty_table.table(tmp_path)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [(row[0], row[1], row[3], row[-1]) for row in cells[2:]] == [
        ("–", "original", "0.250", "2"),
        ("recommended", "point estimate", "0.400 ± 0.283", "2"),  # 0.2 and 0.6
        ("recommended", "ensemble", "0.200 ± 0.141", "2"),
        ("recommended", "ensemble; sigma × 0.5", "0.100", "1"),
        ("another", "point estimate", "1.000", "1"),
        ("another", "ensemble", "0.500", "1"),
    ]
    assert cells[2][2] == "90.00"
    assert cells[2][7:9] == ["fashion 0.750", "fashion 0.500"]
    said = "\n".join(lines)
    assert "recommended: 94.00 % of all test images from 95.00, 1.500 bits; another: " in said
    assert "a GPU, torch 2.0. Commits: abc." in said
    assert lines[:2] == ["### net", ""]
    assert "Other than by the preset, for all: nothing." in said


def test_a_table_for_each_network_and_what_its_runs_have_in_common(tmp_path: Path) -> None:
    short = {"schedule.epochs_per_round": 0.5}
    _result(tmp_path, "recommended", 0, 0.1, ["sigma × 1"], "small", **short)
    other = {**short, "posterior.noise_on_fixed": False}
    _result(tmp_path, "quiet", 1, 0.2, ["sigma × 1"], "small", **other)
    _result(tmp_path, "recommended", 0, 0.3, ["sigma × 1"], "large")
    lines = uncertainty_table.table(tmp_path)
    assert [line for line in lines if line.startswith("#")] == ["### large", "### small"]
    assert sum("| original |" in line for line in lines) == 2
    said = [line.partition("for all: ")[2] for line in lines if "for all: " in line]
    assert said == [
        "nothing.",
        "`schedule.epochs_per_round = 0.5`.",
    ]  # neither the seed nor the variant's own
    assert lines[-1].startswith("Compressed on")


def test_without_results_it_says_so(tmp_path: Path) -> None:
    assert uncertainty_table.table(tmp_path) == ["Not measured yet."]
