"""What an ensemble and its rivals were found to be worth: values, a table, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pwfn.errors import DataError
from pwfn.evaluate.calibration import Bin, RiskCoverage
from pwfn.evaluate.ensemble import Predictions, Score

_ROUNDING_NATS = 1e-9


class Rival(StrEnum):
    """What gives the predictions."""

    ORIGINAL = "original"  # the network before it was compressed
    ORIGINAL_TEMPERED = "original, tempered"
    POINT = "point estimate"  # every weight at its centre
    POINT_TEMPERED = "point estimate, tempered"
    ENSEMBLE = "ensemble"  # the mean prediction of draws from the posterior
    ENSEMBLE_TEMPERED = "ensemble, tempered"


TEMPERED = {
    Rival.ORIGINAL: Rival.ORIGINAL_TEMPERED,
    Rival.POINT: Rival.POINT_TEMPERED,
    Rival.ENSEMBLE: Rival.ENSEMBLE_TEMPERED,
}


@dataclass(frozen=True)
class Detection:
    """How well a score of uncertainty tells a data set from the network's own."""

    auroc: float
    fpr95: float


@dataclass(frozen=True, eq=False)
class Row:
    """The measures of one rival, on the scored examples."""

    rival: Rival
    temperature: float | None  # fitted on the calibration examples; None: as the network gives it
    accuracy: float
    accuracy_all: float  # on the calibration examples as well, where they are of the same data
    nll: float  # nats
    brier: float
    calibration_error: float
    bins: tuple[Bin, ...]  # of the reliability diagram
    risk_coverage: RiskCoverage  # by the largest probability
    detection: dict[str, dict[Score, Detection]]  # by name of the data from elsewhere


@dataclass(frozen=True)
class Comparison:
    """The ensemble's negative log-likelihood less a rival's, over the same examples."""

    rival: Rival
    difference: float  # mean, in nats; below 0 the ensemble is better
    standard_error: float

    @property
    def verdict(self) -> str:
        """In a word; a difference within two standard errors is none."""
        if abs(self.difference) <= 2 * self.standard_error + _ROUNDING_NATS:
            return "no difference"
        return "better" if self.difference < 0 else "worse"


@dataclass(frozen=True)
class Doubt:
    """Means over the examples of a data set, of what the draws say of them."""

    examples: int
    predictive_entropy: float  # nats
    mutual_information: float
    disagreement: float  # share of draws whose class is not the ensemble's
    accuracy_of_a_draw: float | None  # None: without labels

    @classmethod
    def of(cls, found: Predictions) -> Doubt:
        """From what was predicted."""
        return cls(
            len(found.marks),
            float(found.predictive_entropy.mean()),
            float(found.mutual_information.mean()),
            float(found.disagreement.mean()),
            float(found.draws_right.mean()) if found.draws_right is not None else None,
        )


@dataclass(frozen=True, eq=False)
class Assessment:
    """All rivals on the same examples, as values, as a table and for JSON."""

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    doubt: dict[str, Doubt]  # of the ensemble, on its own data ("") and on those from elsewhere
    examples: int
    calibration_examples: int
    split: str  # in a sentence: what was fitted where
    samples: int
    seed: int
    sigma_scale: float
    notes: tuple[str, ...] = field(default=())

    def row(self, rival: Rival) -> Row:
        """The measures of one rival."""
        found = next((row for row in self.rows if row.rival is rival), None)
        if found is None:
            raise DataError(
                f"{rival} was not assessed: there are {', '.join(row.rival for row in self.rows)}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every measure, the bins of the reliability diagrams, the risk–coverage curves."""
        return {
            "rows": [_plain(row) for row in self.rows],
            "reliability": {row.rival.value: [asdict(b) for b in row.bins] for row in self.rows},
            "risk_coverage": {row.rival.value: row.risk_coverage.points() for row in self.rows},
            "comparisons": [
                asdict(c) | {"rival": c.rival.value, "verdict": c.verdict} for c in self.comparisons
            ],
            "doubt": {name or "own data": asdict(doubt) for name, doubt in self.doubt.items()},
            "examples": self.examples,
            "calibration_examples": self.calibration_examples,
            "split": self.split,
            "samples": self.samples,
            "seed": self.seed,
            "sigma_scale": self.sigma_scale,
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For people: the table, one for each data set from elsewhere, and what the ensemble gains."""
        draws = (
            f"{self.samples} draws, sigma × {self.sigma_scale:g}, seed {self.seed}; " if self.samples else ""
        )
        head = ("", "accuracy", "NLL", "Brier", "ECE", "AURC", "T")
        body = [
            (
                row.rival.value,
                f"{row.accuracy:.2%}",
                *(f"{number:.4f}" for number in (row.nll, row.brier, row.calibration_error)),
                f"{row.risk_coverage.area:.5f}",
                "" if row.temperature is None else f"{row.temperature:.3f}",
            )
            for row in self.rows
        ]
        found = [f"{draws}{self.split}", "", *_aligned([head, *body])]
        for name in dict.fromkeys(name for row in self.rows for name in row.detection):
            found += ["", *self._detection_lines(name)]
        if self.comparisons:
            found += ["", "the ensemble's NLL less its rival's (± standard error; below 0 it is better):"]
            found += _aligned(
                [
                    (c.rival.value, f"{c.difference:+.4f} ± {c.standard_error:.4f}", c.verdict)
                    for c in self.comparisons
                ]
            )
        return [*found, *([""] if self.notes else []), *self.notes]

    def _detection_lines(self, name: str) -> list[str]:
        head = (
            f"against {name}",
            *(f"{what} {_SHORT[score]}" for what in ("AUROC", "FPR95") for score in Score),
        )
        body = []
        for row in self.rows:
            by_score = [row.detection[name].get(score) for score in Score]
            cells = [
                *("" if d is None else f"{d.auroc:.4f}" for d in by_score),
                *("" if d is None else f"{d.fpr95:.2%}" for d in by_score),
            ]
            body.append((row.rival.value, *cells))
        return _aligned([head, *body])


def _plain(row: Row) -> dict[str, Any]:
    """A row for JSON; its bins and its curve have places of their own."""
    return {
        "name": row.rival.value,
        "temperature": row.temperature,
        "accuracy": row.accuracy,
        "accuracy_all": row.accuracy_all,
        "nll": row.nll,
        "brier": row.brier,
        "calibration_error": row.calibration_error,
        "risk_coverage_area": row.risk_coverage.area,
        "auroc": {
            name: {s.value: d.auroc for s, d in found.items()} for name, found in row.detection.items()
        },
        "fpr95": {
            name: {s.value: d.fpr95 for s, d in found.items()} for name, found in row.detection.items()
        },
    }


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join((row[0].ljust(widths[0]), *numbers)).rstrip()

    return [line(row) for row in rows]


_SHORT = {Score.MAX_PROBABILITY: "max p", Score.PREDICTIVE_ENTROPY: "entropy", Score.MUTUAL_INFORMATION: "MI"}
