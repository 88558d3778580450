"""What a classifier answers, counted batch by batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwfn.bayes.distributed import Distributed
from pwfn.bayes.objective import is_logits


class Answers(NamedTuple):
    """The predictions of a classifier over a loader, in a few numbers."""

    outputs: int  # of the network
    top_share: float  # of the predictions, those of the most frequent class
    confidence: float  # mean of the largest softmax output
    labels: int  # different classes among the labels; 0 where there are none


class AnswerCounter:
    """Counts predictions and labels per class on the device; nothing is read before the end.

    >>> counter = AnswerCounter()
    >>> counter.add(torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0]]), torch.tensor([1, 2]))
    >>> found = counter.result(Distributed(torch.device("cpu")))
    >>> found.outputs, found.top_share, found.labels
    (3, 1.0, 2)
    """

    def __init__(self) -> None:
        self._totals: Tensor | None = None  # predictions per class, labels per class, sum of confidences
        self._usable = True

    def add(self, output: Any, target: Any) -> None:
        """Count one batch; classes lie along axis 1, as for cross entropy."""
        outputs = output.shape[1] if is_logits(output) else 0
        if self._totals is None and outputs:
            self._totals = torch.zeros(2 * outputs + 1, dtype=torch.float64, device=output.device)
        if self._totals is None or self._totals.numel() != 2 * outputs + 1:  # not a classifier
            self._usable = False
            return
        confidence, predicted = output.float().softmax(1).max(1)
        counts, labels = self._totals[:outputs], self._totals[outputs:-1]
        counts.index_add_(0, predicted.flatten(), counts.new_ones(predicted.numel()))
        self._totals[-1] += confidence.double().sum()
        if is_labels(target, output):
            within = ((target >= 0) & (target < outputs)).flatten()
            labels.index_add_(0, target.flatten().clamp(0, outputs - 1).long(), within.double())

    def result(self, distributed: Distributed) -> Answers | None:
        """The answers to the batches of all processes; None where there is nothing to count."""
        own = self._totals.cpu() if self._totals is not None and self._usable else None
        found = distributed.gather(own)  # not a sum: a process without counts must not stop the others
        if any(each is None or len(each) != len(found[0]) for each in found):
            return None
        totals = torch.stack(found).sum(0)
        outputs = len(totals) // 2
        counted = float(totals[:outputs].sum())
        return Answers(
            outputs,
            float(totals[:outputs].max()) / counted,
            float(totals[-1]) / counted,
            int(totals[outputs:-1].count_nonzero()),
        )


def is_labels(target: Any, output: Tensor) -> bool:
    """Whether a target holds one class for every prediction, and not, say, class probabilities."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        return False
    return target.shape == output.shape[:1] + output.shape[2:]
