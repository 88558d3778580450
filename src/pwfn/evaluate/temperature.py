"""Temperature scaling (Guo et al., 2017): one number that makes a network more or less sure of itself."""

from __future__ import annotations

import math

from torch import Tensor

from pwfn.evaluate.calibration import negative_log_likelihood

LEAST, MOST = 2.0**-4, 2.0**4
"""Temperatures tried. Where every example is right the likelihood rises without end as T falls."""
_STEPS = 100
_PRECISE = 1e-10  # of 1 / T, relative
_NEAR = 1.001


def tempered(log_probabilities: Tensor, temperature: float) -> Tensor:
    """``log softmax(log p / T)``: for one network the same as of its outputs divided by T.

    An ensemble's mean prediction is scaled as a whole: first the mean, then the temperature.

    >>> import torch
    >>> tempered(torch.tensor([[0.8, 0.2]]).log(), 0.5).exp()
    tensor([[0.9412, 0.0588]])
    """
    return (log_probabilities / temperature).log_softmax(1)


def fit_temperature(log_probabilities: Tensor, targets: Tensor) -> float:
    """The T between 1/16 and 16 of the least negative log-likelihood on these examples.

    With ``beta = 1 / T`` and l the logarithms, the likelihood is convex in beta: its slope is
    ``mean(E_p[l] - l[target])`` and its curvature ``mean(Var_p[l])``, p = softmax(beta l). Newton's
    steps, within an interval that shrinks as the slope's sign tells; never worse than T = 1.

    >>> import torch
    >>> sure = torch.tensor([[0.9, 0.1]] * 4, dtype=torch.float64).log()
    >>> round(fit_temperature(sure, torch.tensor([0, 0, 0, 1])), 6)  # right three times of four
    2.0
    """
    before = negative_log_likelihood(log_probabilities, targets)
    logs = log_probabilities.double()
    at_target = logs.gather(1, targets.long()[:, None]).squeeze(1)
    low, high = 1 / MOST, 1 / LEAST
    beta = 1.0
    for _ in range(_STEPS):
        p = (beta * logs).softmax(1)
        mean = (p * logs).sum(1)
        slope = float((mean - at_target).mean())
        curvature = float((p * (logs - mean[:, None]).square()).sum(1).mean())
        low, high = (beta, high) if slope < 0 else (low, beta)
        newton = beta - slope / curvature if curvature > 0 else math.inf
        following = newton if low < newton < high else math.sqrt(low * high)
        moved, beta = abs(following - beta), following
        if moved <= _PRECISE * beta:
            break
    fitted = 1 / beta
    # Where T = 1 is best already, rounding may make the other one worse in the last digit.
    better = negative_log_likelihood(tempered(logs, fitted), targets) < before
    return fitted if better else 1.0


def at_limit(temperature: float) -> bool:
    """Whether a fitted temperature is where the search ends, and not at the likelihood's best."""
    return not LEAST * _NEAR < temperature < MOST / _NEAR
