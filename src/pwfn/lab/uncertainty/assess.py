"""The table of rivals: an ensemble beside simpler predictors, with the same measures on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.errors import DataError
from pwfn.evaluate import calibration as measures
from pwfn.evaluate.calibration import Bin, at_limit, fit_temperature, tempered
from pwfn.evaluate.ensemble import Predictions, Score, ensemble, missing_probability, point
from pwfn.file.compressed import Compressed

_ROUNDING_NATS = 1e-9
_TEST = "test data"
_SHORT = {Score.MAX_PROBABILITY: "max p", Score.PREDICTIVE_ENTROPY: "entropy", Score.MUTUAL_INFORMATION: "MI"}


class Rival(StrEnum):
    """What predicts; "tempered" is with temperature scaling."""

    ORIGINAL = "original"  # the network before compression
    ORIGINAL_TEMPERED = "original, tempered"
    POINT = "point estimate"  # every weight at its centre
    POINT_TEMPERED = "point estimate, tempered"
    ENSEMBLE = "ensemble"  # mean prediction of draws from the posterior
    ENSEMBLE_TEMPERED = "ensemble, tempered"


@dataclass(frozen=True, eq=False, repr=False)
class Row:
    """The measures of one rival, on the scored examples."""

    rival: Rival
    temperature: float | None  # fitted on the calibration examples; None: not scaled
    accuracy: float
    accuracy_all: float  # on all test examples
    nll: float  # nats
    brier: float
    calibration_error: float
    risk_coverage_area: float  # by the largest probability
    auroc: dict[str, dict[Score, float]]  # by name of the out-of-distribution data and score of uncertainty
    fpr95: dict[str, dict[Score, float]]
    bins: tuple[Bin, ...]  # of the reliability diagram
    losses: Tensor  # -log p of each example's target

    def __repr__(self) -> str:
        return f"Row({self.rival.value!r}, accuracy={self.accuracy:.4f}, nll={self.nll:.4f})"

    def to_dict(self) -> dict[str, Any]:
        """The measures for JSON, without bins and losses."""
        measured = [field.name for field in fields(self) if field.name not in ("rival", "bins", "losses")]
        return {"name": self.rival.value, **{name: getattr(self, name) for name in measured}}


@dataclass(frozen=True)
class Comparison:
    """Negative log-likelihood of the ensemble minus that of a rival, over the same examples."""

    rival: Rival
    difference: float  # mean, in nats; below 0 the ensemble is better
    standard_error: float  # of the paired differences

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``no difference`` within two standard errors."""
        if abs(self.difference) <= 2 * self.standard_error + _ROUNDING_NATS:
            return "no difference"
        return "better" if self.difference < 0 else "worse"


@dataclass(frozen=True, eq=False, repr=False)
class Assessment:
    """All rivals on the same examples: values, a table, and JSON."""

    rows: tuple[Row, ...]
    examples: int
    calibration_examples: int
    split: str  # a sentence: which examples are scored, and which fit temperatures
    samples: int
    seed: int
    sigma_scale: float
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Assessment(rows={len(self.rows)}, examples={self.examples}, samples={self.samples})"

    def row(self, rival: Rival) -> Row:
        """The measures of one rival."""
        found = next((row for row in self.rows if row.rival is rival), None)
        if found is None:
            raise DataError(f"no row for {rival}: there are {', '.join(row.rival for row in self.rows)}")
        return found

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The ensemble, not scaled, against every other rival; empty without an ensemble."""
        found = []
        for row in self.rows if self.samples else ():
            if not row.rival.startswith(Rival.ENSEMBLE):
                difference = self.row(Rival.ENSEMBLE).losses - row.losses
                spread = float(difference.std(correction=1)) if len(difference) > 1 else 0.0
                error = spread / math.sqrt(len(difference))
                found.append(Comparison(row.rival, float(difference.mean()), error))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every measure, and the bins of the reliability diagrams."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "rows": [row.to_dict() for row in self.rows],
            "reliability": {row.rival.value: [b._asdict() for b in row.bins] for row in self.rows},
            "comparisons": [asdict(each) | {"verdict": each.verdict} for each in self.comparisons],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Text for a terminal: the table, one table per out-of-distribution data set, comparisons, notes."""
        draws = f"{self.samples} draws, sigma × {self.sigma_scale:g}, seed {self.seed}; "
        table = [["", "accuracy", "NLL", "Brier", "ECE", "AURC", "T"]]
        for row in self.rows:
            figures = [f"{number:.4f}" for number in (row.nll, row.brier, row.calibration_error)]
            t = "" if row.temperature is None else f"{row.temperature:.3f}"
            table.append([row.rival, f"{row.accuracy:.2%}", *figures, f"{row.risk_coverage_area:.5f}", t])
        found = [(draws if self.samples else "") + self.split, "", *_aligned(table)]
        for name in self.rows[0].auroc:
            table = [[f"against {name}", *(f"{m} {_SHORT[s]}" for m in ("AUROC", "FPR95") for s in Score)]]
            for row in self.rows:
                areas = [f"{row.auroc[name][s]:.4f}" if s in row.auroc[name] else "" for s in Score]
                rates = [f"{row.fpr95[name][s]:.2%}" if s in row.fpr95[name] else "" for s in Score]
                table.append([row.rival, *areas, *rates])
            found += ["", *_aligned(table)]
        if self.comparisons:
            said = "NLL of the ensemble minus that of the rival (± standard error; negative is better):"
            found += ["", said]
            found += _aligned(
                [
                    [each.rival, f"{each.difference:+.4f} ± {each.standard_error:.4f}", each.verdict]
                    for each in self.comparisons
                ]
            )
        return [*found, *([""] if self.notes else []), *self.notes]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first left-aligned and the others right-aligned."""
    first, *others = ([*column] for column in zip(*rows, strict=True))
    columns = [[cell.ljust(max(map(len, first))) for cell in first]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def assess(
    compressed: Compressed | Sequence[Compressed],
    model: nn.Module | Sequence[nn.Module],
    loader: Iterable[Any],
    *,
    original: nn.Module | None = None,
    ood: Mapping[str, Iterable[Any]] | None = None,
    samples: int = 20,
    seed: int = 0,
    sigma_scale: float = 1.0,
) -> Assessment:
    """Measure the original network, the point estimate and the ensemble, each with temperature scaling too.

    ``model`` has the network's architecture; it gets the compressed weights and ends with the point
    estimate's. ``original`` has the weights before compression; without it its rows are left out. ``ood``
    holds out-of-distribution data by name; labels in it are ignored. The rest is as for
    :func:`~pwfn.evaluate.ensemble.ensemble`; with 0 samples the ensemble's rows are left out. Of several
    networks the point estimate is the mean prediction of theirs.

    Half of the examples fit temperatures, the other half scores all rivals (:func:`split_in_half`).
    """
    if samples < 0:
        raise DataError(f"samples is {samples}: allowed is at least 0")
    data = {_TEST: loader, **{f"data {name!r}": other for name, other in (ood or {}).items()}}

    def each(predict: Callable[[Iterable[Any], str], Predictions]) -> dict[str, Predictions]:
        return {name: predict(own, name) for name, own in data.items()}

    def draw(own: Iterable[Any], name: str) -> Predictions:
        return ensemble(compressed, model, own, samples, seed, sigma_scale=sigma_scale, name=name)

    def centres(own: Iterable[Any], name: str) -> Predictions:
        networks = [compressed] if isinstance(compressed, Compressed) else compressed
        return ensemble(networks, model, own, 0, name=name)

    found: dict[Rival, dict[str, Predictions]] = {}
    notes: list[str] = []
    if original is not None:
        found[Rival.ORIGINAL] = each(lambda own, name: point(original, own, name=name))
    else:
        notes.append("rows of the original network are left out: its weights were not given")
    found[Rival.POINT] = each(centres)
    if samples:
        found[Rival.ENSEMBLE] = each(draw)
    else:
        notes.append("rows of the ensemble are left out: no draws were requested")
    _check_same(found)
    count = len(found[Rival.POINT][_TEST].checksums)
    if count < 2:
        raise DataError(
            "test data: one example cannot be split into one to fit a temperature on and one to score: give "
            "more"
        )
    fitted, scored = split_in_half(count)
    rows = []
    for rival, by_name in found.items():
        own, scaled = by_name[_TEST], Rival(f"{rival}, tempered")
        if own.targets is None:
            raise DataError("test data have no labels: give (input, target) batches")
        temperature = fit_temperature(own.log_probabilities[fitted], own.targets[fitted])
        if at_limit(temperature):
            notes.append(
                f"{scaled}: the calibration examples have no best temperature from 1/16 to 16; "
                f"{temperature:.3g} is an end of that range"
            )
        rows.append(_row(rival, None, by_name, scored, list(ood or {})))
        rows.append(_row(scaled, temperature, by_name, scored, list(ood or {})))
    return Assessment(
        rows=tuple(rows),
        examples=len(scored),
        calibration_examples=len(fitted),
        split=f"scored on {len(scored):,} of {count:,} examples, a fixed half; "
        f"temperatures fitted on the other {len(fitted):,}",
        samples=samples,
        seed=seed,
        sigma_scale=sigma_scale,
        notes=tuple(notes),
    )


def _check_same(found: Mapping[Rival, Mapping[str, Predictions]]) -> None:
    """All rivals must have seen the same examples."""
    first, *rest = found.values()
    for name, own in first.items():
        if not all(torch.equal(own.checksums, other[name].checksums) for other in rest):
            raise DataError(
                f"{name} gave other examples to one network than to another: pass a loader that gives the "
                "same ones in the same order each time (shuffle=False, no random augmentation)"
            )


def split_in_half(count: int) -> tuple[Tensor, Tensor]:
    """Indices of the examples that fit temperatures and of those that are scored, each ascending.

    A random permutation that depends on ``count`` only: the same for every rival and every seed, and balanced
    even where the data are sorted by class.

    >>> fitted, scored = split_in_half(5)
    >>> sorted(fitted.tolist() + scored.tolist()), len(scored)
    ([0, 1, 2, 3, 4], 3)
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: count // 2].sort().values, order[count // 2 :].sort().values


def _row(
    rival: Rival,
    temperature: float | None,
    found: Mapping[str, Predictions],
    scored: Tensor,
    ood: Sequence[str],
) -> Row:
    whole = found[_TEST]
    assert whole.targets is not None  # as assess has checked
    own, targets = _scaled(whole.chosen(scored), temperature), whole.targets[scored]
    log_p, p = own.log_probabilities, own.probabilities
    bins, losses = measures.reliability(p, targets), measures.log_losses(log_p, targets)
    risks = measures.risk_coverage(missing_probability(log_p), measures.wrong(p, targets))
    # Mutual information needs several draws, and is not defined for their scaled mean.
    has_information = own.samples > 1 and temperature is None
    scores = [score for score in Score if score is not Score.MUTUAL_INFORMATION or has_information]
    others = {name: _scaled(found[f"data {name!r}"], temperature) for name in ood}

    def detection(measure: Callable[[Tensor, Tensor], float]) -> dict[str, dict[Score, float]]:
        return {
            name: {score: measure(own.uncertainty(score), other.uncertainty(score)) for score in scores}
            for name, other in others.items()
        }

    return Row(
        rival=rival,
        temperature=temperature,
        accuracy=measures.accuracy(p, targets),
        accuracy_all=measures.accuracy(whole.probabilities, whole.targets),
        nll=float(losses.mean()),
        brier=measures.brier_score(p, targets),
        calibration_error=measures.calibration_error(bins),
        risk_coverage_area=float(risks.mean()),
        auroc=detection(measures.auroc),
        fpr95=detection(measures.false_positive_rate),
        bins=bins,
        losses=losses,
    )


def _scaled(found: Predictions, temperature: float | None) -> Predictions:
    if temperature is None:
        return found
    return replace(found, log_probabilities=tempered(found.log_probabilities, temperature))
