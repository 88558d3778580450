"""What a network is trained for: the loss of a batch, by labels or by the original network's outputs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.bayes.batches import BATCH_ERRORS, Batch
from pwfn.bayes.network import tensors_of
from pwfn.config import Config, Precision
from pwfn.errors import DataError, TooLargeError, cause

LossFn = Callable[[Any, Any], Tensor]
_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True)
class Objective:
    """The loss of a batch: ``loss_fn`` of output and target or, with a teacher, of output and its output."""

    loss_fn: LossFn
    teacher: Callable[..., Any] | None = None

    def __call__(self, net: nn.Module, batch: Batch, where: str) -> Tensor:
        """The loss of a batch."""
        return self.of_output(batch.through(net, where), batch, where)

    def of_output(self, output: Any, batch: Batch, where: str) -> Tensor:
        """The loss of an output already computed."""
        return self.compared(output, self.reference(batch, where), where)

    def reference(self, batch: Batch, where: str) -> Any:
        """What the output is compared with: the teacher's output, or the target."""
        if self.teacher is not None:
            with torch.no_grad():
                return batch.through(self.teacher, where)
        if batch.target is None:
            raise DataError(
                f"{where} has no target: give (input, target) batches, or compare with the original network "
                "(distill=True of compress, original= of evaluate)"
            )
        return batch.target

    def compared(self, output: Any, reference: Any, where: str) -> Tensor:
        """The loss of an output against its reference."""
        scores = class_scores(output)
        if self._ignored is not None and isinstance(scores, Tensor) and scores.shape[1:2] == (1,):
            raise DataError(
                f"{where}: the network has one output, and the cross entropy of one class is always 0: give "
                "another loss_fn, such as torch.nn.functional.binary_cross_entropy_with_logits"
            )
        try:
            loss = applied(self.loss_fn, output, reference)
        except BATCH_ERRORS as error:
            raise DataError(
                f"{where}: the loss cannot take the output and the target: {cause(error)}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError(f"{where}: the loss is not a single number: reduce it to its mean")
        return loss.reshape(())

    @property
    def classifies(self) -> bool:
        """Whether the loss compares classes along axis 1."""
        return self.loss_fn is divergence or self._ignored is not None

    def check_labels(self, output: Any, batch: Batch, where: str) -> None:
        """Raise an error for a label that is none of the network's outputs.

        On a GPU, cross entropy would end the process. Reading a label waits for the device.
        """
        labels, ignored, output = batch.target, self._ignored, class_scores(output)
        if self.teacher is not None or ignored is None or not is_logits(output):
            return
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        outputs = output.shape[1]
        outside = labels[((labels < 0) | (labels >= outputs)) & (labels != ignored)]
        if outside.numel():
            raise DataError(
                f"{where}: label {int(outside[0])} is out of range, because the network has {outputs:,} "
                f"outputs (allowed is 0 to {outputs - 1}): use a network with more outputs, or other labels"
            )

    def check_classes(self, loader: Any, output: Any, where: str) -> None:
        """Raise an error if a loader's data set has more classes than the network has outputs.

        The first batches of sorted data would not show it. torchvision's data sets have ``classes``.
        """
        dataset, output = getattr(loader, "dataset", None), class_scores(output)
        while dataset is not None and not hasattr(dataset, "classes"):
            dataset = getattr(dataset, "dataset", None)  # a Subset has it inside
        classes = getattr(dataset, "classes", None)
        if self.teacher is not None or self._ignored is None or not is_logits(output):
            return
        if isinstance(classes, (list, tuple)) and len(classes) > output.shape[1]:
            raise DataError(
                f"{where}: the data set has {len(classes):,} classes and the network {output.shape[1]:,} "
                "outputs: use a network with more outputs, or other data"
            )

    def labels(self, target: Any) -> Any:
        """The target with -100, the usual number, for the label that the cross entropy leaves out.

        >>> Objective(nn.CrossEntropyLoss(ignore_index=255)).labels(torch.tensor([1, 255])).tolist()
        [1, -100]
        """
        if self._ignored in (None, -100) or not isinstance(target, Tensor) or target.is_floating_point():
            return target
        return target.long().masked_fill(target == self._ignored, -100)

    @property
    def leaves_out(self) -> bool:
        """Whether the loss is a mean over the labels that are not left out."""
        return self._ignored is not None and getattr(self.loss_fn, "reduction", "mean") == "mean"

    @property
    def _ignored(self) -> int | None:
        """The label that a cross entropy leaves out; None for another loss."""
        if isinstance(self.loss_fn, nn.CrossEntropyLoss):
            return self.loss_fn.ignore_index
        return -100 if self.loss_fn is F.cross_entropy else None


def tasks(
    loss_fn: LossFn, metric: LossFn | None, distill: bool | LossFn, original: nn.Module, config: Config
) -> tuple[Objective, Objective, LossFn | None]:
    """What a run is scored by, what it is trained for, and its metric.

    ``distill`` replaces the task; the setting ``training.distill`` only changes how it is trained.
    """
    compare = divergence if distill is True else distill or None
    scored = Objective(loss_fn) if compare is None else Objective(compare, original)
    classifies = Objective(loss_fn).classifies
    if classifies and compare in (None, divergence):
        metric = metric or accuracy
    if compare is None and config.training.distill:
        return scored, Objective(divergence if classifies else relative_square, original), metric
    return scored, scored, metric


def is_logits(output: Any) -> bool:
    """Whether an output has one number per class, along axis 1."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return False
    return output.dim() > 1 and output.shape[1] > 1


def logits(output: Any) -> Any:
    """The ``logits`` of an output that is an object or a mapping (Hugging Face); any other output itself.

    >>> logits({"logits": torch.zeros(2, 3), "hidden_states": ()}).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else output


def class_scores(output: Any) -> Any:
    """As :func:`logits`, with the classes along axis 1, where cross entropy and we expect them.

    Hugging Face has the classes of a sequence in the last axis, examples × tokens × classes.

    >>> class_scores({"logits": torch.zeros(2, 7, 3)}).shape
    torch.Size([2, 3, 7])
    """
    found = logits(output)
    return found.movedim(-1, 1) if found is not output and found.dim() == 3 else found


def applied(function: LossFn, output: Any, reference: Any) -> Any:
    """A loss or metric of an output that may be an object with ``logits``.

    The function receives the logits. If it cannot take them, it receives the whole output.
    """
    if logits(output) is output:
        return function(output, reference)
    compares = function in (F.cross_entropy, divergence, accuracy)
    part = class_scores if compares or isinstance(function, nn.CrossEntropyLoss) else logits
    try:
        return function(part(output), part(reference))
    except BATCH_ERRORS as error:
        try:
            return function(output, reference)
        except BATCH_ERRORS:
            raise error from None


def accuracy(output: Any, target: Any) -> Tensor:
    """Fraction of targets whose class has the largest output along axis 1.

    As for cross entropy, a target may also be class probabilities (the largest counts), and class -100
    is ignored. With the outputs of another network as target, it is the share of equal predictions.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    predicted = output.argmax(1)
    if target.is_floating_point() and target.shape == output.shape:
        target = target.argmax(1)
    if target.shape != predicted.shape:
        raise ValueError(f"{tuple(predicted.shape)} predictions for {tuple(target.shape)} targets")
    return (predicted == target).sum().double() / (target != -100).sum()


def labelled_share(target: Any) -> Tensor | float:
    """The share of labels that are not -100, which accuracy and cross entropy leave out.

    >>> float(labelled_share(torch.tensor([3, -100])))
    0.5
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or not target.numel():
        return 1.0
    return (target != -100).double().mean()


def divergence(output: Tensor, reference: Tensor) -> Tensor:
    """Kullback–Leibler divergence of softmax outputs, ``sum p log(p / q)`` in nats; p is the reference.

    Classes lie along axis 1, as for cross entropy; the mean is over everything else.

    >>> divergence(torch.zeros(1, 2), torch.zeros(1, 2)).item()
    0.0
    """
    log_q, log_p = F.log_softmax(output.float(), 1), F.log_softmax(reference.float(), 1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()


def relative_square(output: Any, reference: Any) -> Tensor:
    """Squared error in units of the reference's variance over the batch, ``mean (z' - z)^2 / var z``.

    For outputs that are no class scores: 0.01 is what a fit with an R^2 of 0.99 leaves. Of an output of
    several tensors, the mean.

    >>> z = torch.tensor([[0.0], [2.0]])
    >>> relative_square(z + 0.5, z).item(), relative_square({"a": 8 * z + 4}, {"a": 8 * z}).item()
    (0.25, 0.25)
    """
    pairs = [(now.float(), z.detach().float()) for now, z in _numbers(output, reference)]
    return torch.stack([F.mse_loss(now, z) / spread(z).clamp(min=1e-30) for now, z in pairs]).mean()


def squared_error(output: Any, reference: Any) -> Tensor:
    """The mean squared error; of an output of several tensors, the mean of theirs.

    >>> squared_error((torch.ones(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(3))).item()
    0.5
    """
    return torch.stack([F.mse_loss(now, z) for now, z in _numbers(output, reference)]).mean()


def _numbers(output: Any, reference: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two outputs that can be compared by their difference."""
    own, wanted = list(tensors_of(output)), list(tensors_of(reference))
    if len(own) != len(wanted):
        raise ValueError(
            f"the output has {len(own)} tensors and the original's {len(wanted)}: a network that returns "
            "more in training mode cannot be compared"
        )
    found = [(now, z) for now, z in zip(own, wanted, strict=True) if z.is_floating_point() and z.numel()]
    if not found:
        raise ValueError("no output is a tensor of floating-point numbers, which could be compared")
    return found


def spread(z: Tensor) -> Tensor:
    """The variance of each output over the examples, their mean; of one example, that over its outputs."""
    many = z.dim() > 0 and z.shape[0] > 1
    variance, square = (z - (z.mean(0) if many else z.mean())).square().mean(), z.square().mean()
    return torch.where(variance > 1e-9 * square, variance, square)  # all alike: relative to their size


@torch.no_grad()
def comparison(batch: Batch | None, original: nn.Module) -> bool | LossFn:
    """How data like this batch is scored against the original network; False: by its labels.

    Without labels by :func:`divergence` (True), or by the squared error where outputs are no class scores.
    """
    if batch is None or batch.target is not None:
        return False
    return is_logits(class_scores(batch.through(original, "val_loader, batch 1"))) or squared_error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def largest_that_fits(batch: Batch, attempt: Callable[[Batch], Any]) -> int:
    """How many examples of a batch fit in memory: found by trying, halving the size."""
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
    """Automatic mixed precision for a forward pass."""
    return torch.autocast(device.type, _TYPES.get(precision), enabled=precision in _TYPES)
