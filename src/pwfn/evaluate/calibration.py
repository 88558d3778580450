"""How good predicted probabilities are: proper scores, calibration, temperature, and use of uncertainty.

Probabilities are examples × classes, targets one class per example. Everything is computed in float64 and
does not depend on the order of the examples. Log-likelihoods are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.errors import DataError

BINS = 15
TRUE_POSITIVE_RATE = 0.95
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 2.0**-4, 2.0**4
"""The range of the search. If every example is right, the likelihood rises without limit as T falls."""

_SUM_TOLERANCE = 1e-3  # float16 probabilities sum to 1 within this
_CEIL_TOLERANCE = 1e-9
_NEWTON_STEPS = 100
_NEWTON_TOLERANCE = 1e-10  # of 1 / T, relative
_AT_LIMIT = 1.001


def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    """Share of examples whose target has the largest probability.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    return float((~wrong(probabilities, targets)).double().mean())


def wrong(probabilities: Tensor, targets: Tensor) -> Tensor:
    """For each example, whether a class other than its target has the largest probability."""
    _check(probabilities, targets)
    return probabilities.argmax(1) != targets


def negative_log_likelihood(log_probabilities: Tensor, targets: Tensor) -> float:
    """Mean of ``-log p[target]``, in nats; takes logarithms, which are exact where p is tiny.

    >>> p = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    >>> negative_log_likelihood(p.log(), torch.tensor([0, 0])) == 1.5 * math.log(2)
    True
    """
    return float(log_losses(log_probabilities, targets).mean())


def log_losses(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """``-log p[target]`` of each example, in nats."""
    _check(log_probabilities.exp(), targets)
    return F.nll_loss(log_probabilities.double(), targets.long(), reduction="none")


def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    """Mean of ``sum_k (p_k - [k = target])^2``, from 0 to 2.

    >>> brier_score(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
    0.3125
    """
    _check(probabilities, targets)
    p = probabilities.double()
    at_target = p.gather(1, targets.long()[:, None]).squeeze(1)
    return float((p.square().sum(1) - 2 * at_target + 1).mean())


class Bin(NamedTuple):
    """Examples of similar confidence: a point of a reliability diagram."""

    examples: int
    confidence: float  # mean of the largest probability
    accuracy: float


def reliability(probabilities: Tensor, targets: Tensor, bins: int = BINS) -> tuple[Bin, ...]:
    """Accuracy against confidence ``max_k p_k``, in bins of equal mass and rising confidence.

    With the n confidences sorted, bin b ends with the one of rank ``ceil(b n / bins)``. Examples of equal
    confidence share the lower bin, so their order does not matter; bins left empty are omitted.

    >>> p = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    >>> [(b.examples, b.accuracy) for b in reliability(p, torch.tensor([0, 1, 0, 1]), bins=2)]
    [(2, 0.5), (2, 1.0)]
    """
    if bins < 1:
        raise DataError(f"bins is {bins}: allowed is at least 1")
    right = ~wrong(probabilities, targets)
    confidence = probabilities.double().amax(1)
    n = len(confidence)
    ends = confidence.sort().values[[-(-b * n // bins) - 1 for b in range(1, bins)]]
    number = torch.searchsorted(ends, confidence)
    return tuple(
        Bin(int(own.sum()), float(confidence[own].mean()), float(right[own].double().mean()))
        for own in (number == b for b in number.unique())
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error, ``sum_b n_b / n |accuracy_b - confidence_b|``, of a reliability diagram.

    >>> p = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    >>> calibration_error(reliability(p, torch.tensor([0, 1])))
    0.25
    """
    n = sum(b.examples for b in bins)
    return math.fsum(b.examples / n * abs(b.accuracy - b.confidence) for b in bins)


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> Tensor:
    """The risk at coverage ``k / n``, k = 1 … n: the error rate among the k least uncertain examples.

    Examples of equal uncertainty have no order: the curve is the mean over all orders of them. Its mean is
    the area under it (AURC): 0 is perfect; a random order gives the error rate.

    >>> risk_coverage(torch.tensor([0.1, 0.4, 0.2]), torch.tensor([False, True, False]))[-1].item()
    0.3333333333333333
    >>> risk_coverage(torch.tensor([1.0, 1.0]), torch.tensor([False, True])).tolist()
    [0.5, 0.5]
    """
    _check_scores(uncertainty=uncertainty)
    if wrong.shape != uncertainty.shape:
        raise DataError(
            f"{wrong.numel():,} results for {uncertainty.numel():,} uncertainties: the numbers must be equal"
        )
    _, group, sizes = uncertainty.double().unique(return_inverse=True, return_counts=True)
    errors = torch.bincount(group, weights=wrong.double())
    # Each of a group of m examples with e errors counts as e / m of an error.
    found = torch.repeat_interleave(errors / sizes, sizes).cumsum(0)
    return found / torch.arange(1, len(group) + 1, device=group.device)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How well uncertainty detects out-of-distribution data: the area under the ROC curve; 0.5 is chance.

    ``P(outside > inside) + P(outside = inside) / 2`` over all pairs of an in-distribution and an
    out-of-distribution example.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    _check_scores(inside=inside, outside=outside)
    ordered, others = inside.double().sort().values, outside.double().contiguous()
    below = torch.searchsorted(ordered, others, right=False).double()
    up_to = torch.searchsorted(ordered, others, right=True).double()
    return float((below + up_to).sum() / 2 / (len(inside) * len(outside)))


def false_positive_rate(inside: Tensor, outside: Tensor) -> float:
    """Share of out-of-distribution data accepted when 95 % of the in-distribution data are (FPR95).

    An example is accepted if its uncertainty is at most t, the smallest threshold that accepts
    ``ceil(0.95 n)`` of the n examples inside. 0 is perfect, 0.95 chance.

    >>> false_positive_rate(torch.arange(20.0), torch.tensor([18.0, 18.5, 30.0, 40.0]))
    0.25
    """
    _check_scores(inside=inside, outside=outside)
    accepted = math.ceil(TRUE_POSITIVE_RATE * len(inside) - _CEIL_TOLERANCE)
    threshold = inside.double().sort().values[accepted - 1]
    return float((outside.double() <= threshold).double().mean())


def tempered(log_probabilities: Tensor, temperature: float) -> Tensor:
    """``log softmax(log p / T)``: for one network the same as dividing its outputs by T (Guo et al., 2017).

    The prediction of an ensemble is scaled as a whole: first the mean, then the temperature.

    >>> tempered(torch.tensor([[0.8, 0.2]]).log(), 0.5).exp()
    tensor([[0.9412, 0.0588]])
    """
    return (log_probabilities / temperature).log_softmax(1)


def fit_temperature(log_probabilities: Tensor, targets: Tensor) -> float:
    """The T between 1/16 and 16 with the least negative log-likelihood on these examples.

    With ``beta = 1 / T`` and l the log-probabilities, the loss is convex in beta: its slope is
    ``mean(E_p[l] - l[target])`` and its curvature ``mean(Var_p[l])``, p = softmax(beta l). Newton steps,
    within an interval that shrinks by the sign of the slope; the result is never worse than T = 1.

    >>> sure = torch.tensor([[0.9, 0.1]] * 4, dtype=torch.float64).log()
    >>> round(fit_temperature(sure, torch.tensor([0, 0, 0, 1])), 6)  # right three times of four
    2.0
    """
    before = negative_log_likelihood(log_probabilities, targets)
    logs = log_probabilities.double()
    at_target = logs.gather(1, targets.long()[:, None]).squeeze(1)
    low, high = 1 / HIGHEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE
    beta = 1.0
    for _ in range(_NEWTON_STEPS):
        p = (beta * logs).softmax(1)
        mean = (p * logs).sum(1)
        slope = float((mean - at_target).mean())
        curvature = float((p * (logs - mean[:, None]).square()).sum(1).mean())
        low, high = (beta, high) if slope < 0 else (low, beta)
        newton = beta - slope / curvature if curvature > 0 else math.inf
        following = newton if low < newton < high else math.sqrt(low * high)
        moved, beta = abs(following - beta), following
        if moved <= _NEWTON_TOLERANCE * beta:
            break
    # If T = 1 is already the best, rounding may make the other one worse in the last digit.
    better = negative_log_likelihood(tempered(logs, 1 / beta), targets) < before
    return 1 / beta if better else 1.0


def at_limit(temperature: float) -> bool:
    """Whether a fitted temperature is an end of the search range and not the optimum of the likelihood."""
    return not LOWEST_TEMPERATURE * _AT_LIMIT < temperature < HIGHEST_TEMPERATURE / _AT_LIMIT


def _check(probabilities: Tensor, targets: Tensor) -> None:
    """Refuse tensors that are not probabilities, and targets that are not among their classes."""
    if probabilities.dim() != 2 or targets.shape != probabilities.shape[:1]:
        raise DataError(
            f"probabilities are {tuple(probabilities.shape)} and targets {tuple(targets.shape)}: allowed is "
            "examples × classes, and one class per example"
        )
    if not len(targets):
        raise DataError("there are no examples: give probabilities and targets of at least one")
    if targets.is_floating_point() or int(targets.min()) < 0 or int(targets.max()) >= probabilities.shape[1]:
        raise DataError(
            f"targets are {targets.dtype}, from {targets.min()} to {targets.max()}: allowed are whole "
            f"numbers from 0 to {probabilities.shape[1] - 1}, the classes"
        )
    # Negated so that NaN counts as off.
    off = ~((probabilities.double().sum(1) - 1).abs() < _SUM_TOLERANCE) | (probabilities < 0).any(1)
    if off.any():
        row = int(off.nonzero()[0])
        raise DataError(
            f"row {row} of the probabilities is not a distribution (it sums to "
            f"{float(probabilities[row].sum()):g}): give the softmax of the outputs"
        )


def _check_scores(**named: Tensor) -> None:
    for name, values in named.items():
        if values.dim() != 1 or not len(values) or values.isnan().any():
            raise DataError(
                f"{name} is {tuple(values.shape)}, with {int(values.isnan().sum())} NaN: allowed is one "
                "number per example, for at least one example"
            )
