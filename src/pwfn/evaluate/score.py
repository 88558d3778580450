"""Loss and accuracy of a model over a loader, or its agreement with the original network."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.bayes.batches import BATCH_ERRORS, Batch, Source
from pwfn.bayes.distributed import Distributed, usable_device
from pwfn.bayes.objective import (
    LossFn,
    Objective,
    applied,
    autocast,
    class_scores,
    divergence,
    evaluating,
    is_logits,
    labelled_share,
    largest_that_fits,
)
from pwfn.bayes.objective import accuracy as accuracy
from pwfn.config import Precision
from pwfn.errors import DataError, TooLargeError, cause
from pwfn.zoo.epochs import batched

_FIRST_BATCHES = 4  # whose labels are compared with the network's outputs


class Answers(NamedTuple):
    """The predictions of a classifier over a loader, in a few numbers."""

    outputs: int  # of the network
    top_share: float  # of the predictions, those of the most frequent class
    confidence: float  # mean of the largest softmax output
    labels: int  # different classes among the labels; 0 where there are none


@dataclass(frozen=True)
class Scores:
    """Mean over the examples of a loader.

    >>> str(Scores(0.08125, 0.973, 400, agreement=True))
    'agreement 97.30% of 400 examples (KL 0.08125)'
    """

    loss: float  # the run's objective
    metric: float | None  # accuracy, 0 to 1, for classifiers; None where there is no metric
    examples: int
    answers: Answers | None = field(default=None, compare=False, repr=False)  # of a classifier
    agreement: bool = False  # no labels: metric is the share of the original's predictions, loss the KL

    @property
    def name(self) -> str:
        """What the metric is."""
        return "agreement" if self.agreement else "accuracy"

    def __str__(self) -> str:
        of = f"{self.examples:,} examples ({'KL' if self.agreement else 'loss'} {self.loss:.4g})"
        if self.metric is None:
            return of
        return f"{'agreement ' if self.agreement else ''}{self.metric:.2%} of {of}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN.

        >>> Scores(math.inf, 0.5, 10).to_dict()
        {'loss': None, 'metric': 0.5, 'examples': 10}
        """
        of = {"of": "agreement"} if self.agreement else {}
        return {"loss": finite(self.loss), "metric": finite(self.metric), "examples": self.examples, **of}


def finite(number: float | None) -> float | None:
    """The number, or None where it is NaN or infinite, as a loss may be and JSON cannot."""
    return number if number is not None and math.isfinite(number) else None


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFn = F.cross_entropy,
    *,
    metric: LossFn | None = None,
    original: nn.Module | None = None,
    device: torch.device | str | None = None,
) -> Scores:
    """Loss and metric of a model over a loader, in evaluation mode and full float32.

    Args:
        model: left in the mode and on the device it was, unless ``device`` is given.
        loader: batches ``(input, …, target)``, or mappings with ``labels`` or ``target``; with ``original``
            also inputs alone, or a tensor of them.
        loss_fn: a function of output and target.
        metric: a mean over the batch; accuracy for cross entropy unless given.
        original: the network before compression; it is not changed. The loss is then the divergence from
            its softmax output and, without labels, the metric is the share of equal predictions.
        device: where to run; the model's own unless given.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> evaluate(nn.Identity(), data).metric
    1.0
    >>> print(evaluate(nn.Identity(), [torch.eye(2)], original=nn.Identity()))
    agreement 100.00% of 2 examples (KL 0)
    """
    for each in (model, model if original is None else original):
        if not isinstance(each, nn.Module):
            raise DataError(
                f"the model is a {type(each).__name__}: allowed is a torch.nn.Module, such as "
                "pwfn.load(path).apply_to(model)"
            )
    where = placed(model, device)
    objective = Objective(loss_fn)
    if metric is None and objective.classifies:
        metric = accuracy
    if original is not None:
        objective = Objective(divergence, copy.deepcopy(original).to(where).eval())
    return mean_scores(model, Source("the loader", batched(loader), where), objective, metric)


def placed(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device of a model, after moving it to ``device`` if one is given."""
    if device is not None:
        chosen = usable_device(device)
        model.to(chosen)
        return chosen
    held = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in held), torch.device("cpu"))


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
        # One class for every prediction, and not, say, class probabilities.
        numbers = isinstance(target, Tensor) and not (target.is_floating_point() or target.is_complex())
        if numbers and target.shape == predicted.shape:
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


@contextmanager
def full_float32(wanted: bool = True) -> Iterator[None]:
    """Within the block, float32 convolutions and matrix products do not use TF32 (10 bits instead of 23).

    Torch lets cuDNN use it by default, and a few images in ten thousand then get another class.
    """
    cudnn, cuda = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda)  # torch types only some
    kinds = (cudnn.conv, cuda.matmul)
    before = [kind.fp32_precision for kind in kinds]
    try:
        if wanted:
            for kind in kinds:
                kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, own in zip(kinds, before, strict=True):
            kind.fp32_precision = own


def recorded(**scores: Scores | None) -> dict[str, Any]:
    """Scores by name, as the record of a file has them.

    >>> recorded(before=None)
    {'before': None}
    """
    return {name: found.to_dict() if found else None for name, found in scores.items()}


@torch.no_grad()
def mean_scores(
    model: nn.Module,
    source: Source,
    objective: Objective,
    metric: LossFn | None,
    precision: Precision = Precision.FP32,
    *,
    distributed: Distributed | None = None,
    before_batch: Callable[[], None] | None = None,
) -> Scores:
    """Loss and metric of a model in evaluation mode, over the batches of all processes.

    Where no batch has a target and the objective has a teacher, accuracy becomes agreement with the teacher.
    ``before_batch`` is called before every batch, and may raise. fp32 is full float32 on a GPU too, so that
    figures are the same wherever a file is scored.
    """
    # Sums over the examples, and how many they are, of loss, metric and agreement.
    totals = torch.zeros(2, 3, dtype=torch.float64, device=source.device)
    examples = 0

    def add(place: int, value: Tensor, count: Tensor | float) -> None:
        weight = totals.new_ones(()) * count
        totals[0, place] += torch.where(weight > 0, value.double() * weight, 0.0)  # of nothing it is NaN
        totals[1, place] += weight

    distributed = distributed or Distributed(source.device)
    counter, counted = AnswerCounter(), metric is accuracy or objective.classifies
    with evaluating(model), full_float32(precision is Precision.FP32):
        for number, batch in enumerate(source.batches(), 1):
            if before_batch is not None:
                before_batch()
            where = f"{source.name}, batch {number}"
            with autocast(source.device, precision):
                output = _output(model, batch, where)
                if number <= _FIRST_BATCHES:
                    objective.check_classes(source.loader, output, source.name)
                    objective.check_labels(output, batch, where)
                target = objective.labels(batch.target)
                if counted:
                    counter.add(class_scores(output), target)
                labelled = batch.size * labelled_share(target)
                reference = output if objective.teacher is model else objective.reference(batch, where)
                loss = objective.compared(output, reference, where)
                add(0, loss, labelled if objective.leaves_out else batch.size)
                if metric is accuracy and target is not None:
                    add(1, _score(metric, output, target, where), labelled)
                elif metric is not None and target is not None:
                    add(1, _score(metric, output, batch.target, where), batch.size)
                elif metric is accuracy:
                    add(2, _score(metric, output, reference, where), batch.size)
            examples += batch.size
    if examples == 0:
        raise DataError(
            f"{source.name} gave no batch: it is empty, or can be read only once; pass a loader that "
            "can be iterated again and again"
        )
    *sums, examples = distributed.total(torch.cat((totals.flatten(), totals.new_tensor([examples])))).tolist()
    means = [total / count if count else None for total, count in zip(sums[:3], sums[3:], strict=True)]
    mean_loss, score, agreement = means
    answers = counter.result(distributed) if counted else None
    if mean_loss is None:
        raise DataError(f"{source.name}: the loss leaves out every label: check the labels")
    if agreement is not None and score is None:
        return Scores(mean_loss, agreement, int(examples), answers, agreement=True)
    return Scores(mean_loss, score, int(examples), answers)


def _output(model: nn.Module, batch: Batch, where: str) -> Any:
    try:
        return batch.through(model, where)
    except TooLargeError as error:
        fits = largest_that_fits(batch, lambda part: part.through(model, where))
        raise batch.too_large(where, fits) from error


def _score(metric: LossFn, output: Any, target: Any, where: str) -> Tensor:
    try:
        return torch.as_tensor(applied(metric, output, target)).double().reshape(())
    except BATCH_ERRORS as error:
        raise DataError(
            f"{where}: the metric cannot take the output and the target, or is not a single number: "
            f"{cause(error)}"
        ) from error
