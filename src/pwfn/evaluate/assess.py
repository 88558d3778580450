"""An ensemble against its rivals: the same examples, the same measures, in one call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.errors import DataError
from pwfn.evaluate import calibration as measures
from pwfn.evaluate.assessment import TEMPERED, Assessment, Comparison, Detection, Doubt, Rival, Row
from pwfn.evaluate.ensemble import (
    Predictions,
    Score,
    Settle,
    ensemble,
    missing_probability,
    point,
)
from pwfn.evaluate.temperature import at_limit, fit_temperature, tempered
from pwfn.file.compressed import Compressed


def assess(
    compressed: Compressed,
    model: nn.Module,
    loader: Iterable[Any],
    *,
    original: nn.Module | None = None,
    ood: Mapping[str, Iterable[Any]] | None = None,
    calibration: Iterable[Any] | None = None,
    samples: int = 20,
    seed: int = 0,
    sigma_scale: float = 1.0,
    settle: Settle | None = None,
    device: torch.device | str | None = None,
) -> Assessment:
    """The original network, the point estimate and the ensemble, each with temperature scaling too.

    ``model`` is of the network's architecture; it is given the compressed weights, and has the point
    estimate's in the end. ``original`` has the weights from before; without it, its rows are left
    out. ``ood`` is data from elsewhere, by name; labels are not looked at.

    Temperatures are fitted on the ``calibration`` data, and all of ``loader`` is scored. Without it,
    half of the loader's examples fit them and all rivals, scaled or not, are scored on the other
    half; which half an example is in depends on how many there are alone (:func:`split_in_half`).
    """
    if samples < 0:
        raise DataError(f"samples is {samples}: allowed is at least 0")
    data = {"": loader, **({_FITTED: calibration} if calibration is not None else {}), **(ood or {})}
    named = {name: f"data {name!r}" if name else "test data" for name in data} | {_FITTED: "calibration data"}
    found: dict[Rival, dict[str, Predictions]] = {}
    if original is not None:
        found[Rival.ORIGINAL] = {k: point(original, v, device, name=named[k]) for k, v in data.items()}
    compressed.apply_to(model)
    found[Rival.POINT] = {k: point(model, v, device, name=named[k]) for k, v in data.items()}
    if samples:
        found[Rival.ENSEMBLE] = {
            k: ensemble(
                *(compressed, model, v, samples, seed, device),
                sigma_scale=sigma_scale,
                settle=settle,
                name=named[k],
            )
            for k, v in data.items()
        }
    for name in data:
        _check_same(named[name], [by_name[name] for by_name in found.values()])
    scored, fitted, split = _divided(found[Rival.POINT], calibration is not None)
    rows, losses, notes = _rows(found, scored, fitted)
    if original is None:
        notes.append("the original network's rows are left out: its weights were not given")
    if not samples:
        notes.append("the ensemble's rows are left out: no draws were asked for")
    return Assessment(
        rows=tuple(rows),
        comparisons=tuple(_comparisons(losses)),
        doubt={k: Doubt.of(v) for k, v in found.get(Rival.ENSEMBLE, {}).items() if k != _FITTED},
        examples=len(scored),
        calibration_examples=len(fitted),
        split=split,
        samples=samples,
        seed=seed,
        sigma_scale=sigma_scale,
        notes=tuple(notes),
    )


_FITTED = "\0calibration"  # among the names of data, where no user's can be


def split_in_half(count: int) -> tuple[Tensor, Tensor]:
    """Examples to fit temperatures on and those to score, half each, in ascending order.

    A permutation that depends on the count alone: the same for every rival and every seed, and not
    by class, as the first half of sorted data would be.

    >>> fitted, scored = split_in_half(5)
    >>> sorted(fitted.tolist() + scored.tolist()), len(scored)
    ([0, 1, 2, 3, 4], 3)
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: count // 2].sort().values, order[count // 2 :].sort().values


def _divided(found: Mapping[str, Predictions], separate: bool) -> tuple[Tensor, Tensor, str]:
    """The examples that are scored, those that temperatures are fitted on, and a sentence on it."""
    count = len(found[""].marks)
    if separate:
        fitted, scored = torch.arange(len(found[_FITTED].marks)), torch.arange(count)
        return scored, fitted, f"scored on {count:,} examples; temperatures fitted on {len(fitted):,} others"
    if count < 2:
        raise DataError(
            "test data: one example cannot be split into one to fit a temperature on and one to score: give "
            "more, or calibration data"
        )
    fitted, scored = split_in_half(count)
    half = f"scored on {len(scored):,} of {count:,} examples, drawn once and for all"
    return scored, fitted, f"{half}; temperatures fitted on the other {len(fitted):,}"


def _rows(
    found: Mapping[Rival, Mapping[str, Predictions]], scored: Tensor, fitted: Tensor
) -> tuple[list[Row], dict[Rival, Tensor], list[str]]:
    rows, losses, notes = [], {}, []
    for rival, by_name in found.items():
        whole = by_name[""]
        own, split = whole.chosen(scored), by_name.get(_FITTED, whole).chosen(fitted)
        if own.targets is None or split.targets is None or whole.targets is None:
            raise DataError("test data, or calibration data, have no labels: give (input, target) batches")
        accuracy_all = measures.accuracy(whole.probabilities, whole.targets)
        temperature = fit_temperature(split.log_probabilities, split.targets)
        if at_limit(temperature):
            notes.append(
                f"{TEMPERED[rival]}: the likelihood of the calibration examples has no best temperature "
                f"from 1/16 to 16, and {temperature:.3g} is at the end of that"
            )
        elsewhere = {name: other for name, other in by_name.items() if name not in ("", _FITTED)}
        for named, t in ((rival, None), (TEMPERED[rival], temperature)):
            log_p = own.log_probabilities if t is None else tempered(own.log_probabilities, t)
            detection = {name: _detection(own, other, t) for name, other in elsewhere.items()}
            rows.append(_row(named, log_p, own.targets, t, accuracy_all, detection))
            losses[named] = measures.log_losses(log_p, own.targets)
    return rows, losses, notes


def _row(
    rival: Rival,
    log_p: Tensor,
    targets: Tensor,
    temperature: float | None,
    accuracy_all: float,
    detection: dict[str, dict[Score, Detection]],
) -> Row:
    p = log_p.exp()
    bins = measures.reliability(p, targets)
    return Row(
        rival=rival,
        temperature=temperature,
        accuracy=measures.accuracy(p, targets),
        accuracy_all=accuracy_all,
        nll=measures.negative_log_likelihood(log_p, targets),
        brier=measures.brier_score(p, targets),
        calibration_error=measures.gap(bins),
        bins=bins,
        risk_coverage=measures.risk_coverage(missing_probability(log_p), measures.wrong(p, targets)),
        detection=detection,
    )


def _detection(own: Predictions, other: Predictions, temperature: float | None) -> dict[Score, Detection]:
    """By each score that there is: mutual information is that of several draws as they are."""
    found = {}
    for score in Score:
        if score is Score.MUTUAL_INFORMATION and (own.samples == 1 or temperature is not None):
            continue
        inside, outside = (_scaled(side, temperature).uncertainty(score) for side in (own, other))
        found[score] = Detection(
            measures.auroc(inside, outside), measures.false_positive_rate(inside, outside)
        )
    return found


def _scaled(found: Predictions, temperature: float | None) -> Predictions:
    if temperature is None:
        return found
    return replace(found, log_probabilities=tempered(found.log_probabilities, temperature))


def _comparisons(losses: Mapping[Rival, Tensor]) -> list[Comparison]:
    """The ensemble, as it is, against each rival: mean and standard error of the paired differences."""
    if Rival.ENSEMBLE not in losses:
        return []
    compared = []
    for rival, theirs in losses.items():
        if rival in (Rival.ENSEMBLE, Rival.ENSEMBLE_TEMPERED):
            continue
        difference = losses[Rival.ENSEMBLE] - theirs
        n = len(difference)
        spread = float(difference.std(correction=1)) if n > 1 else 0.0
        compared.append(Comparison(rival, float(difference.mean()), spread / math.sqrt(n)))
    return compared


def _check_same(name: str, passes: Sequence[Predictions]) -> None:
    """All rivals are scored on the same examples, or not at all."""
    if not all(torch.equal(found.marks, passes[0].marks) for found in passes):
        raise DataError(
            f"{name} gave other examples to one network than to another: pass a loader that gives the same "
            "ones in the same order each time (shuffle=False, no random augmentation)"
        )
