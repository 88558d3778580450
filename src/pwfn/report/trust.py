"""The section on uncertainty: the table of rivals and their reliability, where a run was assessed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pwfn.errors import FileError
from pwfn.report.facts import RunFacts, read_json
from pwfn.report.markup import Markup, element, joined
from pwfn.report.reliability import diagrams
from pwfn.report.tables import Cell, Column, decimal, percent, table

FILE = "uncertainty.json"
_MEASURES = {
    "nll": Column("NLL", "Negative log-likelihood, in nats; less is better"),
    "brier": Column("Brier", "Brier score; less is better"),
    "calibration_error": Column(
        "Calibration", "Expected calibration error, bins of equal mass; less is better"
    ),
    "risk_coverage_area": Column("AURC", "Area under the risk–coverage curve; less is better"),
    "temperature": Column(
        "T", "Temperature, fitted on other examples; none where it is as the network gives it"
    ),
}

_PLACES = {"risk_coverage_area": 5, "temperature": 3}
_SHORT = {
    "max_probability": "by max p",
    "predictive_entropy": "by entropy",
    "mutual_information": "by mutual information",
}


def section(run: RunFacts) -> Markup:
    """Empty where the run's folder has no ``uncertainty.json``, as ``pwfn evaluate`` writes it."""
    path = run.run.folder / FILE
    if not path.is_file():
        return Markup("")
    found = read_json(path)
    found = found.get("uncertainty", found)  # what `pwfn evaluate --json` prints has more beside it
    try:
        return joined(
            _preamble(found),
            _rivals(run.name, found["rows"]),
            _elsewhere(found["rows"]),
            diagrams(found.get("reliability", {})),
            _comparisons(found.get("comparisons", [])),
            [element("p", str(note), class_="note") for note in found.get("notes", [])],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{path}: is not what pwfn evaluate writes ({type(error).__name__}: {error}): write it again, or "
            "remove it"
        ) from error


def _preamble(found: Mapping[str, Any]) -> Markup:
    draws = f"{found['samples']} draws from the posterior" if found.get("samples") else ""
    said = "; ".join(part for part in (draws, str(found.get("split", ""))) if part)
    return element("p", f"{said[:1].upper()}{said[1:]}.", class_="note") if said else Markup("")


def _rivals(name: str, rows: Sequence[Mapping[str, Any]]) -> Markup:
    used = {key: column for key, column in _MEASURES.items() if any(key in row for row in rows)}
    columns = [Column("Rival", is_number=False), Column("Accuracy"), *used.values()]
    cells = [
        [
            Cell(str(row["name"])),
            percent(_finite(row["accuracy"]), 2),
            *(decimal(_finite(row.get(key)), _PLACES.get(key, 4)) for key in used),
        ]
        for row in rows
    ]
    return table(f"{name} and its rivals, on the same examples", columns, cells, sortable=True)


def _elsewhere(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """A table for each data set from elsewhere: how well doubt tells it from the network's own."""
    made = []
    for place in dict.fromkeys(name for row in rows for name in row.get("auroc", {})):
        scores = dict.fromkeys(key for row in rows for key in _by_score(row, "auroc", place))
        kinds = (("auroc", "AUROC", decimal, 4), ("fpr95", "FPR95", percent, 2))
        columns = [Column("Rival", is_number=False)]
        columns += [Column(f"{head} {score}".strip()) for _, head, _, _ in kinds for score in scores]
        cells = [
            [
                Cell(str(row["name"])),
                *(
                    shown(_finite(_by_score(row, kind, place).get(score)), places)
                    for kind, _, shown, places in kinds
                    for score in scores
                ),
            ]
            for row in rows
        ]
        caption = f"Doubt tells {place} from the network’s own data (AUROC: 1 is perfect, 0.5 is chance)"
        made.append(table(caption, columns, cells, sortable=True))
    return made


def _by_score(row: Mapping[str, Any], kind: str, place: str) -> dict[str, Any]:
    """Of a kind of measure against a data set: by score of uncertainty, or one number without a name."""
    found = row.get(kind, {}).get(place, {})
    return {_SHORT.get(k, str(k)): v for k, v in found.items()} if isinstance(found, dict) else {"": found}


def _finite(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def _comparisons(found: Sequence[Mapping[str, Any]]) -> Markup:
    if not found:
        return Markup("")
    columns = [Column("Rival", is_number=False), Column("Difference, nats"), Column("Standard error")]
    columns.append(Column("The ensemble is", is_number=False))
    verdicts = {"no difference": "no better and no worse"}
    rows = [
        [
            Cell(str(each["rival"])),
            Cell(f"{each['difference']:+.4f}", each["difference"]),
            decimal(each["standard_error"], 4),
            Cell(verdicts.get(each["verdict"], str(each["verdict"]))),
        ]
        for each in found
    ]
    return table(
        "The ensemble’s negative log-likelihood less its rival’s; below 0 it is better", columns, rows
    )
