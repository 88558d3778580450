"""What a network is trained for and scored by: the loss of a batch, accuracy, and means over a loader."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.bayes.batches import BATCH_ERRORS, Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.config import Precision
from pwfn.errors import DataError, TooLargeError, cause

LossFn = Callable[[Any, Any], Tensor]
_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True)
class Objective:
    """The task's loss of a batch, and the divergence from the original network if it teaches.

    Then it is ``share * divergence + (1 - share) * loss_fn``; with a share of 1 labels are not needed.
    """

    loss_fn: LossFn
    teacher: nn.Module | None = None
    divergence: LossFn | None = None
    share: float = 1.0  # of the divergence, where there is one

    def __call__(self, net: nn.Module, batch: Batch, where: str) -> Tensor:
        """The loss of a batch."""
        return self.of_output(batch.through(net, where), batch, where)

    def of_output(self, output: Any, batch: Batch, where: str) -> Tensor:
        """The loss of an output already computed."""
        if self.teacher is None or self.divergence is None:
            return self._of_labels(output, batch, where)
        with torch.no_grad():
            reference = batch.through(self.teacher, where)
        taught = _compared(self.divergence, output, reference, where)
        if self.share == 1:
            return taught
        return self.share * taught + (1 - self.share) * self._of_labels(output, batch, where)

    def _of_labels(self, output: Any, batch: Batch, where: str) -> Tensor:
        if batch.target is None:
            raise DataError(f"{where} has no target: give (input, target) batches, or distill=True")
        return _compared(self.loss_fn, output, batch.target, where)


def _compared(compare: LossFn, output: Any, target: Any, where: str) -> Tensor:
    try:
        loss = compare(output, target)
    except BATCH_ERRORS as error:
        raise DataError(f"{where}: the loss cannot take the output and the target: {cause(error)}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise DataError(f"{where}: the loss is not a single number: reduce it to its mean")
    return loss.reshape(())


def divergence(output: Tensor, reference: Tensor) -> Tensor:
    """Kullback–Leibler divergence of softmax outputs, ``sum p log(p / q)``, p the reference's, in nats.

    Classes lie along axis 1, as for cross entropy; the mean is over everything else.

    >>> divergence(torch.zeros(1, 2), torch.zeros(1, 2)).item()
    0.0
    """
    log_q, log_p = F.log_softmax(output.float(), 1), F.log_softmax(reference.float(), 1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()


@dataclass(frozen=True)
class Scores:
    """Mean over the examples of a loader."""

    loss: float  # the run's objective
    metric: float | None  # accuracy as a share for classifiers; None where there is no metric
    examples: int

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
    """Share of targets whose class has the largest output along axis 1.

    As for cross entropy, a target may also be the classes' probabilities (the largest counts),
    and class -100 is left out.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    predicted = output.argmax(1)
    if target.is_floating_point() and target.shape == output.shape:
        target = target.argmax(1)
    if target.shape != predicted.shape:
        raise ValueError(f"{tuple(predicted.shape)} predictions for {tuple(target.shape)} targets")
    return (predicted == target).sum().double() / (target != -100).sum()


@contextmanager
def full_float32(wanted: bool = True) -> Iterator[None]:
    """Within the block, convolutions and products of float32 do not take TF32's 10 bits for its 23.

    Torch lets cuDNN do so unless told, and a few images in ten thousand then get another class.
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
def evaluate(
    model: nn.Module,
    source: Source,
    objective: Objective,
    metric: LossFn | None,
    precision: Precision = Precision.FP32,
    *,
    distributed: Distributed | None = None,
    between: Callable[[], None] | None = None,
) -> Scores:
    """Loss and metric of a model in evaluation mode, over the batches of all processes.

    Its mode is put back afterwards. ``between`` is called before every batch, and may raise. In float32
    it is float32 in full, on a GPU too, so that figures are the same wherever a file is scored.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=source.device)
    examples = scored = 0
    with evaluating(model), full_float32(precision is Precision.FP32):
        for number, batch in enumerate(source.batches(), 1):
            if between is not None:
                between()
            where = f"{source.name}, batch {number}"
            with autocast(source.device, precision):
                output = _output(model, batch, where)
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
    loss, score, *counted = (
        (distributed or Distributed(source.device)).total(torch.cat((totals, counts))).tolist()
    )
    examples, scored = map(int, counted)
    return Scores(loss / examples, score / scored if scored else None, examples)


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode; then every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def tracked(model: nn.Module) -> dict[str, _BatchNorm]:
    """By name, the BatchNorm layers that update running statistics in training mode."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
    }


@contextmanager
def gathering(model: nn.Module) -> Iterator[dict[str, _BatchNorm]]:
    """Within the block BatchNorm gathers statistics anew, as plain means over what comes through.

    The rest of the model is in evaluation mode. Gives those layers by name. Then all have their mode and
    momentum again; one that nothing came through has its statistics again too and, after an error, so has
    every one.
    """
    layers = tracked(model)
    before = [(layer.momentum, {k: v.clone() for k, v in layer.named_buffers()}) for layer in layers.values()]
    whole = False
    with evaluating(model):
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
            layer.train()
        try:
            yield layers
            whole = True
        finally:
            for layer, (momentum, statistics) in zip(layers.values(), before, strict=True):
                layer.momentum = momentum
                if not whole or layer.num_batches_tracked == 0:
                    layer.load_state_dict(statistics, strict=False)


def largest_that_fits(batch: Batch, attempt: Callable[[Batch], Any]) -> int:
    """How many examples of a batch fit in memory: tried out, by halving, since no formula knows."""
    failure = sys.exception()
    while failure is not None:  # its frames hold what the attempt had computed so far
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__
    size = batch.size // 2
    while size:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        try:
            attempt(batch.first(size))
        except TooLargeError:
            size //= 2
        else:
            break
    return size


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Number types of the forward pass, as the precision has them."""
    return torch.autocast(device.type, _TYPES.get(precision), enabled=precision in _TYPES)
