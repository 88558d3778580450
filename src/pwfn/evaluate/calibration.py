"""How good predicted probabilities are: proper scores, calibration, and whether doubt comes where it should.

Probabilities are examples × classes, targets one class per example; everything is computed in float64
and does not depend on the order of the examples. Entropies and log-likelihoods are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pwfn.errors import DataError

BINS = 15
TRUE_POSITIVE_RATE = 0.95
_ROUNDING = 1e-3  # by which float16 probabilities may miss a sum of one
_FORGIVEN = 1e-9  # of rounding, in a ceiling


class Binning(StrEnum):
    """How examples are put together by their confidence."""

    EQUAL_MASS = "equal_mass"  # as many examples in each
    EQUAL_WIDTH = "equal_width"  # [0, 1] in equal parts


def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    """Share of examples whose class has the largest probability.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    return float((~wrong(probabilities, targets)).double().mean())


def negative_log_likelihood(log_probabilities: Tensor, targets: Tensor) -> float:
    """Mean of ``-log p[target]``, in nats; it takes logarithms, of which none is lost where p is tiny.

    >>> p = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    >>> negative_log_likelihood(p.log(), torch.tensor([0, 0])) == 1.5 * math.log(2)
    True
    """
    return float(log_losses(log_probabilities, targets).mean())


def log_losses(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """``-log p[target]`` of each example, in nats."""
    _check(log_probabilities.exp(), targets)
    return -log_probabilities.double().gather(1, targets.long()[:, None]).squeeze(1)


def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    """Mean of ``sum_k (p_k - [k = target])^2``, from 0 to 2.

    >>> brier_score(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
    0.3125
    """
    _check(probabilities, targets)
    p = probabilities.double()
    # sum_k p_k^2 - 2 p_target + 1, without a table of zeros and ones.
    at_target = p.gather(1, targets.long()[:, None]).squeeze(1)
    return float((p.square().sum(1) - 2 * at_target + 1).mean())


@dataclass(frozen=True)
class Bin:
    """Examples of like confidence: a point of a reliability diagram."""

    examples: int
    low: float  # the least confidence in it
    high: float
    confidence: float  # mean of the largest probability
    accuracy: float


def reliability(
    probabilities: Tensor, targets: Tensor, bins: int = BINS, binning: Binning = Binning.EQUAL_MASS
) -> tuple[Bin, ...]:
    """Accuracy against confidence ``max_k p_k``, in bins of rising confidence; empty ones are left out.

    Equal mass: with the confidences in order, bin b ends with the one at rank ``ceil(b n / bins)``.
    Examples of one confidence stay together, in the lower bin, so that their order does not matter.
    Equal width: bin b has ``(b - 1) / bins <= confidence < b / bins``, the last one also 1.

    >>> p = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    >>> [(b.examples, b.accuracy) for b in reliability(p, torch.tensor([0, 1, 0, 1]), bins=2)]
    [(2, 0.5), (2, 1.0)]
    """
    if bins < 1:
        raise DataError(f"bins is {bins}: allowed is at least 1")
    right = ~wrong(probabilities, targets)
    confidence = probabilities.double().amax(1)
    if binning is Binning.EQUAL_MASS:
        n = len(confidence)
        ranks = [-(-b * n // bins) for b in range(1, bins)]
        ends = confidence.sort().values[[max(rank, 1) - 1 for rank in ranks]]
        number = torch.searchsorted(ends, confidence, right=False)
    else:
        edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
        number = torch.searchsorted(edges, confidence, right=True)
    members = (number == b for b in range(bins))
    return tuple(
        Bin(
            int(member.sum()),
            float(confidence[member].min()),
            float(confidence[member].max()),
            float(confidence[member].mean()),
            float(right[member].double().mean()),
        )
        for member in members
        if member.any()
    )


def calibration_error(
    probabilities: Tensor, targets: Tensor, bins: int = BINS, binning: Binning = Binning.EQUAL_MASS
) -> float:
    """Expected calibration error, ``sum_b n_b / n |accuracy_b - confidence_b|``.

    >>> p = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    >>> calibration_error(p, torch.tensor([0, 1])), calibration_error(p, torch.tensor([0, 0]))
    (0.25, 0.25)
    """
    return gap(reliability(probabilities, targets, bins, binning))


def gap(bins: tuple[Bin, ...]) -> float:
    """The calibration error of bins that are there already: mean distance from the diagonal."""
    n = sum(b.examples for b in bins)
    return math.fsum(b.examples / n * abs(b.accuracy - b.confidence) for b in bins)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The share of errors among the examples that are kept, as the most uncertain are given up."""

    coverage: Tensor  # k / n for k = 1 … n
    risk: Tensor

    @property
    def area(self) -> float:
        """``1/n sum_k risk(k / n)``: 0 is perfect; with an order by chance it is the error rate."""
        return float(self.risk.mean())

    def points(self, count: int = 100) -> list[tuple[float, float]]:
        """At most so many (coverage, risk), evenly spread, the last one at full coverage."""
        n = len(self.risk)
        kept = sorted({-(-k * n // count) for k in range(1, count + 1)})
        return [(float(self.coverage[k - 1]), float(self.risk[k - 1])) for k in kept]


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """``risk(k / n)`` = errors among the k least uncertain examples, divided by k.

    Of examples of one uncertainty each is as likely to come first as another: the curve is the mean
    over their orders.

    >>> risk_coverage(torch.tensor([0.1, 0.4, 0.2]), torch.tensor([False, True, False])).risk[-1].item()
    0.3333333333333333
    >>> risk_coverage(torch.tensor([1.0, 1.0]), torch.tensor([False, True])).risk.tolist()
    [0.5, 0.5]
    """
    _check_scores("uncertainty", uncertainty)
    if wrong.shape != uncertainty.shape:
        raise DataError(
            f"{wrong.numel():,} results for {uncertainty.numel():,} uncertainties: they must agree"
        )
    _, group, sizes = uncertainty.double().unique(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(sizes), dtype=torch.float64, device=group.device)
    errors.index_add_(0, group, wrong.double())
    # The j-th of a group of m with e errors adds e / m of an error.
    k = torch.arange(1, len(group) + 1, dtype=torch.float64, device=group.device)
    found = torch.repeat_interleave(errors / sizes, sizes).cumsum(0)
    return RiskCoverage(k / len(group), found / k)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How well uncertainty tells data from elsewhere: ``P(outside > inside) + P(outside = inside) / 2``.

    Over all pairs of an example of the network's own kind of data and one from elsewhere: the area
    under the receiver operating characteristic. 0.5 is chance.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    for name, values in (("inside", inside), ("outside", outside)):
        _check_scores(name, values)
    ordered, others = inside.double().sort().values, outside.double().contiguous()
    below = torch.searchsorted(ordered, others, right=False).double()
    up_to = torch.searchsorted(ordered, others, right=True).double()
    return float((below + up_to).sum() / 2 / (len(inside) * len(outside)))


def false_positive_rate(inside: Tensor, outside: Tensor, tpr: float = TRUE_POSITIVE_RATE) -> float:
    """Share of the data from elsewhere that is let in when a share ``tpr`` of one's own is (FPR95).

    What is no more uncertain than ``t`` is let in, and ``t`` is the least threshold that lets in
    ``ceil(tpr n)`` of the n examples inside. 0 is perfect, 0.95 chance.

    >>> false_positive_rate(torch.arange(20.0), torch.tensor([18.0, 18.5, 30.0, 40.0]))
    0.25
    """
    for name, values in (("inside", inside), ("outside", outside)):
        _check_scores(name, values)
    if not 0 < tpr <= 1:
        raise DataError(f"tpr is {tpr}: allowed is more than 0 and at most 1")
    let_in = max(math.ceil(tpr * len(inside) - _FORGIVEN), 1)
    threshold = inside.double().sort().values[let_in - 1]
    return float((outside.double() <= threshold).double().mean())


def wrong(probabilities: Tensor, targets: Tensor) -> Tensor:
    """For each example whether another class than its target has the largest probability."""
    _check(probabilities, targets)
    return probabilities.argmax(1) != targets


def _check(probabilities: Tensor, targets: Tensor) -> None:
    """Refuse what are no probabilities, and classes that they do not have."""
    if probabilities.dim() != 2 or targets.shape != probabilities.shape[:1]:
        raise DataError(
            f"probabilities are {tuple(probabilities.shape)} and targets {tuple(targets.shape)}: allowed is "
            "examples × classes, and a class for each example"
        )
    if not len(targets):
        raise DataError("there are no examples: give probabilities and targets of at least one")
    if targets.is_floating_point() or int(targets.min()) < 0 or int(targets.max()) >= probabilities.shape[1]:
        raise DataError(
            f"targets are {targets.dtype}, from {targets.min()} to {targets.max()}: allowed are whole "
            f"numbers from 0 to {probabilities.shape[1] - 1}, the classes"
        )
    # Written so that NaN is off as well.
    off = ~((probabilities.double().sum(1) - 1).abs() < _ROUNDING) | (probabilities < 0).any(1)
    if off.any():
        row = int(off.nonzero()[0])
        raise DataError(
            f"row {row} of the probabilities is not a distribution (it sums to "
            f"{float(probabilities[row].sum()):g}): give the softmax of the outputs"
        )


def _check_scores(name: str, values: Tensor) -> None:
    if values.dim() != 1 or not len(values) or values.isnan().any():
        raise DataError(
            f"{name} is {tuple(values.shape)}, {int(values.isnan().sum())} of it NaN: allowed is a number "
            "for each of at least one example"
        )
