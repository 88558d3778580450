"""Loss and accuracy of a model over a loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.bayes.batches import BATCH_ERRORS, Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.objective import LossFn, Objective, autocast, evaluating, largest_that_fits
from pwfn.config import Precision
from pwfn.errors import DataError, TooLargeError, cause
from pwfn.evaluate.answers import AnswerCounter, Answers

_FIRST_BATCHES = 4  # whose labels are compared with the network's outputs


@dataclass(frozen=True)
class Scores:
    """Mean over the examples of a loader."""

    loss: float  # the run's objective
    metric: float | None  # accuracy, 0 to 1, for classifiers; None where there is no metric
    examples: int
    answers: Answers | None = field(default=None, compare=False, repr=False)  # of a classifier

    def __str__(self) -> str:
        of = f"{self.examples:,} examples (loss {self.loss:.4g})"
        return of if self.metric is None else f"{self.metric:.2%} of {of}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN.

        >>> Scores(math.inf, 0.5, 10).to_dict()
        {'loss': None, 'metric': 0.5, 'examples': 10}
        """
        return {"loss": finite(self.loss), "metric": finite(self.metric), "examples": self.examples}


def finite(number: float | None) -> float | None:
    """The number, or None where it is NaN or infinite, as a loss may be and JSON cannot."""
    return number if number is not None and math.isfinite(number) else None


def accuracy(output: Any, target: Any) -> Tensor:
    """Fraction of targets whose class has the largest output along axis 1.

    As for cross entropy, a target may also be class probabilities (the largest counts), and class -100
    is ignored.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    predicted = output.argmax(1)
    if target.is_floating_point() and target.shape == output.shape:
        target = target.argmax(1)
    if target.shape != predicted.shape:
        raise ValueError(f"{tuple(predicted.shape)} predictions for {tuple(target.shape)} targets")
    return (predicted == target).sum().double() / (target != -100).sum()


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFn = F.cross_entropy,
    *,
    metric: LossFn | None = None,
    device: torch.device | str | None = None,
) -> Scores:
    """Loss and metric of a model over a loader, in evaluation mode and full float32.

    Args:
        model: left in the mode and on the device it was, unless ``device`` is given.
        loader: batches ``(input, …, target)``, or mappings with ``labels`` or ``target``.
        loss_fn: a function of output and target.
        metric: a mean over the batch; accuracy for cross entropy unless given.
        device: where to run; the model's own unless given.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> evaluate(nn.Identity(), data).metric
    1.0
    """
    if device is not None:
        model.to(device)
    where = next((tensor.device for tensor in model.state_dict().values()), torch.device(device or "cpu"))
    if metric is None and loss_fn is F.cross_entropy:
        metric = accuracy
    return mean_scores(model, Source("the loader", loader, where), Objective(loss_fn), metric)


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

    ``before_batch`` is called before every batch, and may raise. fp32 is full float32 on a GPU too, so that
    figures are the same wherever a file is scored.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=source.device)
    examples = scored = 0
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
                if counted:
                    counter.add(output, batch.target)
                totals[0] += objective.of_output(output, batch, where).double() * batch.size
                if metric is not None and batch.target is not None:
                    totals[1] += _score(metric, output, batch.target, where) * batch.size
                    scored += batch.size
            examples += batch.size
    if examples == 0:
        raise DataError(
            f"{source.name} gave no batch: it is empty, or can be read only once; pass a loader that "
            "can be iterated again and again"
        )
    counts = totals.new_tensor([examples, scored])
    loss, score, *sizes = distributed.total(torch.cat((totals, counts))).tolist()
    examples, scored = map(int, sizes)
    answers = counter.result(distributed) if counted else None
    return Scores(loss / examples, score / scored if scored else None, examples, answers)


def _output(model: nn.Module, batch: Batch, where: str) -> Any:
    try:
        return batch.through(model, where)
    except TooLargeError as error:
        fits = largest_that_fits(batch, lambda part: part.through(model, where))
        raise batch.too_large(where, fits) from error


def _score(metric: LossFn, output: Any, target: Any, where: str) -> Tensor:
    try:
        return torch.as_tensor(metric(output, target)).double().reshape(())
    except BATCH_ERRORS as error:
        raise DataError(
            f"{where}: the metric cannot take the output and the target, or is not a single number: "
            f"{cause(error)}"
        ) from error
