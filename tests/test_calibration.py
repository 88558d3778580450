"""Measures of predicted probabilities: by hand, against other libraries, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pwfn.errors import DataError
from pwfn.evaluate.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    accuracy,
    at_limit,
    auroc,
    brier_score,
    calibration_error,
    false_positive_rate,
    fit_temperature,
    negative_log_likelihood,
    reliability,
    risk_coverage,
    tempered,
)
from pwfn.evaluate.ensemble import missing_probability
from pwfn.zoo.models import ready_torchvision

# Five examples of three classes; confidences 0.5, 0.6, 0.7, 0.8, 0.9, of which the third and fifth are right.
P = torch.tensor(
    [[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.05, 0.9, 0.05]],
    dtype=torch.float64,
)
Y = torch.tensor([1, 0, 0, 1, 1])


def predictions(seed: int, n: int, classes: int = 5, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and targets of which six in ten are as predicted, whatever the confidence."""
    generator = torch.Generator().manual_seed(seed)
    log_p = (sharp * torch.randn(n, classes, generator=generator, dtype=torch.float64)).log_softmax(1)
    drawn = torch.randint(0, classes, (n,), generator=generator)
    return log_p, torch.where(torch.rand(n, generator=generator) < 0.6, log_p.argmax(1), drawn)


def ece(p: Tensor, y: Tensor, bins: int = 15) -> float:
    return calibration_error(reliability(p, y, bins))


# By hand


def test_accuracy_likelihood_and_brier_by_hand() -> None:
    assert accuracy(P, Y) == 2 / 5
    by_hand = -(math.log(0.3) + math.log(0.2) + math.log(0.7) + math.log(0.1) + math.log(0.9)) / 5
    assert negative_log_likelihood(P.log(), Y) == pytest.approx(by_hand, abs=1e-15)
    rows = ((0.25, 0.49, 0.04), (0.64, 0.36, 0.04), (0.09, 0.04, 0.01), (0.01, 0.81, 0.64))
    assert brier_score(P, Y) == pytest.approx((sum(map(sum, rows)) + 0.015) / 5, abs=1e-15)


def test_bins_of_equal_mass_by_hand() -> None:
    """Five examples in two bins: ranks up to ceil(5/2) = 3 and the rest."""
    low, high = reliability(P, Y, bins=2)
    assert tuple(low) == pytest.approx((3, 0.6, 1 / 3))
    assert tuple(high) == pytest.approx((2, 0.85, 0.5))
    by_hand = 3 / 5 * abs(1 / 3 - 0.6) + 2 / 5 * abs(0.5 - 0.85)
    assert ece(P, Y, bins=2) == pytest.approx(by_hand, abs=1e-15)
    assert [b.examples for b in reliability(P, Y, bins=50)] == [1] * 5  # more bins than examples


def test_examples_of_one_confidence_share_a_bin() -> None:
    p = torch.tensor([[0.75, 0.25]] * 6 + [[0.9, 0.1]] * 2)
    found = reliability(p, torch.tensor([0, 0, 0, 0, 1, 1, 0, 0]), bins=4)
    assert [b.examples for b in found] == [6, 2]
    assert [b.accuracy for b in found] == pytest.approx([2 / 3, 1])


def test_risk_and_coverage_by_hand() -> None:
    """In order of confidence: right, wrong, right, wrong, wrong."""
    found = risk_coverage(1 - P.amax(1), P.argmax(1) != Y)
    assert found.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 2 / 4, 3 / 5])


def test_a_tie_in_risk_is_the_mean_over_its_orders() -> None:
    """One certain example that is right, then two alike, one of them wrong."""
    uncertainty, wrong = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, True, False])
    orders = ([0, 1 / 2, 1 / 3], [0, 0, 1 / 3])
    mean = [sum(risks) / 2 for risks in zip(*orders, strict=True)]
    assert risk_coverage(uncertainty, wrong).tolist() == pytest.approx(mean)


def test_auroc_and_fpr95_by_hand() -> None:
    inside, outside = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 3.5, 9.0])
    # Pairs won: against 2.0 one and a half, against 3.5 three, against 9.0 four; of twelve.
    assert auroc(inside, outside) == pytest.approx(8.5 / 12)
    # All four inside must be accepted for 95 %: the threshold is 4, and two of three outside are too.
    assert false_positive_rate(inside, outside) == pytest.approx(2 / 3)


def test_the_95th_of_a_hundred_is_the_threshold() -> None:
    """0.95 · 100 in float64 may be a little more than 95, and one more would be accepted."""
    for outside, rate in ((95.0, 1.0), (95.5, 0.0)):
        assert false_positive_rate(torch.arange(1.0, 101.0), torch.tensor([outside])) == rate


def test_a_probability_next_to_one_is_not_rounded_to_one() -> None:
    logits = torch.tensor([[0.0, -40.0, -60.0], [0.0, -41.0, -60.0]], dtype=torch.float64)
    missing = missing_probability(logits.log_softmax(1))
    assert (1 - logits.softmax(1).amax(1)).tolist() == [0.0, 0.0]
    assert missing.tolist() == pytest.approx([math.exp(-40) + math.exp(-60), math.exp(-41) + math.exp(-60)])


# Against other libraries


@pytest.mark.parametrize(
    ("seed", "n", "classes", "sharp"), [(0, 1, 2, 1.0), (1, 127, 2, 3.0), (2, 1025, 10, 6.0)]
)
def test_scikit_learn_agrees_on_proper_scores(seed: int, n: int, classes: int, sharp: float) -> None:
    sk = pytest.importorskip("sklearn.metrics")
    log_p, y = predictions(seed, n, classes, sharp)
    p, labels = log_p.exp().numpy(), list(range(classes))
    assert accuracy(log_p.exp(), y) == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert negative_log_likelihood(log_p, y) == pytest.approx(sk.log_loss(y, p, labels=labels), rel=1e-12)
    theirs = sk.brier_score_loss(y, p, labels=labels, scale_by_half=False)
    assert brier_score(log_p.exp(), y) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(("seed", "bins", "each"), [(0, 15, 10), (1, 10, 37), (2, 3, 1)])
def test_scikit_learn_agrees_on_bins_of_equal_mass(seed: int, bins: int, each: int) -> None:
    calibration_curve = pytest.importorskip("sklearn.calibration").calibration_curve
    log_p, y = predictions(seed, bins * each)
    confidence, predicted = log_p.exp().max(1)
    true, said = calibration_curve(
        (predicted == y).numpy(), confidence.numpy(), n_bins=bins, strategy="quantile"
    )
    found = reliability(log_p.exp(), y, bins)
    assert [b.examples for b in found] == [each] * bins
    assert [b.accuracy for b in found] == pytest.approx(true.tolist(), rel=1e-12)
    assert [b.confidence for b in found] == pytest.approx(said.tolist(), rel=1e-12)
    assert ece(log_p.exp(), y, bins) == pytest.approx(abs(true - said).mean(), rel=1e-12)


def test_torchmetrics_agrees_on_the_calibration_error_where_its_bins_are_the_same() -> None:
    """Confidences 0.55, 0.65, … 0.95: one group for each of its bins of equal width, all of one size."""
    ready_torchvision()
    from torchmetrics.functional.classification import multiclass_calibration_error

    confidence = torch.tensor([0.55, 0.65, 0.75, 0.85, 0.95], dtype=torch.float64).repeat_interleave(8)
    p = torch.stack((confidence, 1 - confidence), 1)
    y = (torch.rand(40, generator=torch.Generator().manual_seed(0)) > 0.7).long()
    theirs = multiclass_calibration_error(p, y, num_classes=2, n_bins=10, norm="l1")
    assert ece(p, y, bins=5) == pytest.approx(float(theirs), abs=2e-7)  # it computes in float32


@pytest.mark.parametrize(("inside", "outside", "values"), [(1, 1, 3), (127, 1025, 20), (1025, 127, 10_000)])
def test_scikit_learn_agrees_on_auroc_and_fpr95(inside: int, outside: int, values: int) -> None:
    """With few values there are many ties."""
    generator = torch.Generator().manual_seed(values)
    a = torch.randint(0, values, (inside,), generator=generator) / values
    b = (torch.randint(0, values, (outside,), generator=generator) / values + 0.2).clamp(0, 1)
    is_outside = torch.cat((torch.zeros(inside), torch.ones(outside))).long()
    scores = torch.cat((a, b))
    sk = pytest.importorskip("sklearn.metrics")
    assert auroc(a, b) == pytest.approx(sk.roc_auc_score(is_outside, scores), rel=1e-12)
    # In-distribution data are the positive class, and less uncertain is more positive.
    false, true, _ = sk.roc_curve(1 - is_outside, -scores, drop_intermediate=False)
    assert false_positive_rate(a, b) == pytest.approx(false[true >= 0.95 - 1e-12].min(), rel=1e-12)


# Properties


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 6), st.booleans())
def test_the_order_of_the_examples_does_not_matter(seed: int, n: int, classes: int, ties: bool) -> None:
    log_p, y = predictions(seed, n, classes)
    if ties:
        log_p = log_p[torch.arange(n) % (n // 3 + 1)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    p, q = log_p.exp(), log_p.exp()[order]
    for measure in (accuracy, brier_score, ece):
        assert measure(p, y) == pytest.approx(measure(q, y[order]), rel=1e-12, abs=1e-15)
    curves = [
        risk_coverage(missing_probability(rows), rows.argmax(1) != targets).tolist()
        for rows, targets in ((log_p, y), (log_p[order], y[order]))
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-12, abs=1e-15)
    inside, outside = missing_probability(log_p)[: n // 2 + 1], missing_probability(log_p)[n // 2 :]
    assert auroc(inside, outside) == auroc(inside.flip(0), outside.flip(0))
    assert auroc(inside, outside) == pytest.approx(1 - auroc(outside, inside), abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 6), st.floats(0.1, 20))
def test_a_fitted_temperature_never_raises_the_loss_it_is_fitted_by(
    seed: int, n: int, classes: int, sharp: float
) -> None:
    log_p, y = predictions(seed, n, classes, sharp)
    t = fit_temperature(log_p, y)
    best = negative_log_likelihood(tempered(log_p, t), y)
    assert LOWEST_TEMPERATURE * 0.999 <= t <= HIGHEST_TEMPERATURE * 1.001
    assert best <= negative_log_likelihood(log_p, y)
    for other in (LOWEST_TEMPERATURE, 0.9 * t, 1.1 * t, HIGHEST_TEMPERATURE):
        if LOWEST_TEMPERATURE <= other <= HIGHEST_TEMPERATURE:
            assert best <= negative_log_likelihood(tempered(log_p, other), y) + 1e-9


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_that_was_applied_is_found(temperature: float) -> None:
    """Labels are drawn from the probabilities before scaling, so the best T undoes the scaling."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50_000, 10, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    found = fit_temperature((logits * temperature).log_softmax(1), y)
    assert found == pytest.approx(temperature, rel=0.02)
    assert not at_limit(found)


def test_a_temperature_changes_no_prediction_and_is_that_of_the_outputs() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in (0.2, 3.0):
        scaled = tempered(logits.log_softmax(1), t)
        assert torch.equal(scaled.argmax(1), logits.argmax(1))
        assert torch.allclose(scaled.exp(), (logits / t).softmax(1), rtol=1e-12)


@pytest.mark.parametrize("targets", [[0, 1], [1, 0]])
def test_if_all_are_right_or_all_wrong_the_temperature_is_at_its_limit(targets: list[int]) -> None:
    log_p = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).log()
    assert at_limit(fit_temperature(log_p, torch.tensor(targets)))


# Mistakes


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        (torch.tensor([[2.0, 1.0]]), torch.tensor([0]), "row 0 of the probabilities .* sums to 3.*softmax"),
        (torch.tensor([[math.nan, 1.0]]), torch.tensor([0]), "not a distribution"),
        (torch.tensor([[1.5, -0.5]]), torch.tensor([0]), "not a distribution"),
        (P, Y + 2, "from 2 to 3"),
        (P, Y.float(), "whole numbers"),
        (P, Y[:3], "one class per example"),
        (P[:0], Y[:0], "no examples"),
    ],
)
def test_what_are_no_probabilities_is_refused(p: Tensor, y: Tensor, message: str) -> None:
    for measure in (accuracy, brier_score, ece):
        with pytest.raises(DataError, match=message):
            measure(p, y)


def test_scores_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="1 NaN"):
        auroc(torch.tensor([math.nan]), torch.tensor([1.0]))
    with pytest.raises(DataError, match="outside is"):
        false_positive_rate(torch.ones(2), torch.ones(0))
    with pytest.raises(DataError, match="3 results for 2"):
        risk_coverage(torch.ones(2), torch.ones(3))
    with pytest.raises(DataError, match="bins is 0"):
        reliability(P, Y, bins=0)
