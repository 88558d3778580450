"""The table of experiments/results/uncertainty: every variant beside its rivals, as means over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pwfn.config import Config, flat

AS_IT_IS = "sigma × 1"
"""The label of the assessment of a file as it is."""

MEASURES = ("accuracy", "nll", "brier", "calibration_error", "risk_coverage_area")
HEAD = ("variant", "predicts", "top-1, %", "NLL", "Brier", "ECE", "AURC", "AUROC", "FPR95", "seeds")


def table(folder: Path) -> list[str]:
    """Every variant and assessment as Markdown, mean ± standard deviation over seeds (n - 1), with sources.

    One table per network. Rivals appear once per variant, since they do not depend on the assessment; the
    original network, which is the same for all variants, once.
    """
    by_network: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        by_network.setdefault(result["model"], []).append(result)
    tables = [[f"### {network}", "", *_table(found), ""] for network, found in by_network.items()]
    return [line for lines in tables for line in lines][:-1] or ["Not measured yet."]


def _table(found: Sequence[dict[str, Any]]) -> list[str]:
    """The table of one network's results."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in sorted(found, key=lambda result: (result["variant"] != "recommended", result["name"])):
        for label, answer in result["answers"].items():
            groups.setdefault((result["variant"], label), []).append(answer)
    lines, seen = [_line(HEAD), _line(["---"] * len(HEAD))], set[str]()
    for (variant, label), answers in groups.items():
        for rival in [row["name"] for row in answers[0]["rows"]]:
            is_shown = label == AS_IT_IS or rival.startswith("ensemble")
            if not is_shown or (rival.startswith("original") and rival in seen):
                continue
            seen.add(rival)
            rows = [next(row for row in answer["rows"] if row["name"] == rival) for answer in answers]
            said = rival if label == AS_IT_IS else f"{rival}; {label}"
            network = "–" if rival.startswith("original") else variant
            lines.append(_line([network, said, *_figures(rows), str(len(rows))]))
    return [*lines, "", *_notes(found)]


def _figures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of one rival; those of the original are the same for every seed."""
    cells = [_shown([row[name] for row in rows], 100 if name == "accuracy" else 1) for name in MEASURES]
    for name in ("auroc", "fpr95"):
        by_data = [
            f"{_called(data)} {_shown([row[name][data]['max_probability'] for row in rows])}"
            for data in rows[0][name]
        ]
        cells.append("; ".join(by_data) or "–")
    return cells


def _notes(found: Sequence[dict[str, Any]]) -> list[str]:
    answer, machines = found[0]["answers"][AS_IT_IS], set[str]()
    for each in found:
        machines.add(f"{each['machine']['device']}, torch {each['machine']['versions']['torch']}")
    on_cpu = sorted(each["name"] for each in found if each.get("assessed_on") == "CPU")
    scored = f"; scored on a CPU: {', '.join(on_cpu)}" if on_cpu else ""
    points = "; ".join(
        f"{variant}: {_shown([each['top1'] for each in own], 100)} % of all test images from "
        f"{100 * own[0]['top1_start']:.2f}, {_shown([each['entropy_bits'] for each in own])} bits"
        for variant, own in _by_variant(found).items()
    )
    return [
        f"{found[0]['model']}, {answer['samples']} draws; {answer['split']}. "
        "± is the standard deviation over seeds (n - 1). AUROC and FPR95 tell out-of-distribution data from "
        "the test images by the largest probability.",
        "",
        f"The files: {points}. Other than by the preset, for all: {_changes(found)}.",
        "",
        f"Compressed on: {'; '.join(sorted(machines))}{scored}. Commits: "
        f"{', '.join(sorted({str(each['commit']) for each in found}))}.",
    ]


def _changes(found: Sequence[dict[str, Any]]) -> str:
    """The settings that differ from the preset "recommended" in the same way for all results."""
    usual, others = flat(Config.preset("recommended").to_dict()), []
    configs = [flat(each["settings"]) for each in found]
    for name, value in configs[0].items():
        alike = all(config.get(name) == value for config in configs)
        if alike and name != "seed" and usual.get(name) != value:
            others.append(f"`{name} = {json.dumps(value)}`")
    return ", ".join(others) or "nothing"


def _by_variant(found: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in sorted(found, key=lambda result: result["variant"] != "recommended"):
        groups.setdefault(each["variant"], []).append(each)
    return groups


def _called(data: str) -> str:
    """``npz:data/fashion.npz`` is fashion."""
    return Path(data.partition(":")[2]).stem if data.startswith("npz:") else data


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(values: Sequence[float], scale: float = 1.0) -> str:
    mean, digits = scale * statistics.fmean(values), 2 if scale == 100 else 3
    same = len(set(values)) == 1
    spread = "" if same else f" ± {scale * statistics.stdev(values):.{digits}f}"
    return f"{mean:.{digits}f}{spread}"
