"""The fit loop, evaluation, and BatchNorm re-estimation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.batches import BATCH_ERRORS, Batch, Source
from pwfn.config import Precision, TrainingConfig
from pwfn.errors import DataError, DivergedError, cause
from pwfn.posterior import GaussianNetwork

LossFn = Callable[[Any, Any], Tensor]
_CHECK_EVERY = 32  # steps between looks at the loss: each look waits for the device


@dataclass(frozen=True)
class Objective:
    """The task's loss of a batch, and the divergence from the original network if it teaches."""

    loss_fn: LossFn
    teacher: nn.Module | None = None
    divergence: LossFn | None = None

    def __call__(self, net: nn.Module, batch: Batch, where: str) -> Tensor:
        """The loss of a batch."""
        return self.of_output(batch.through(net, where), batch, where)

    def of_output(self, output: Any, batch: Batch, where: str) -> Tensor:
        """The loss of an output already computed."""
        if self.teacher is not None and self.divergence is not None:
            with torch.no_grad():
                reference = batch.through(self.teacher, where)
            compare, target = self.divergence, reference
        elif batch.target is None:
            raise DataError(f"{where} has no target: give (input, target) batches, or distill=True")
        else:
            compare, target = self.loss_fn, batch.target
        try:
            loss = compare(output, target)
        except BATCH_ERRORS as error:
            raise DataError(
                f"{where}: the loss cannot take the output and the target: {cause(error)}"
            ) from error
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
class Fitting:
    """How far a stretch of training has come, with all that it takes to go on from there."""

    step: int  # steps done
    total: Tensor  # sum of their losses
    optimizer: dict[str, Any]  # its state dict


AfterStep = Callable[[Callable[[], Fitting]], None]
"""Called after every step with a function that takes a snapshot; it may raise to stop the run."""


def fit(
    net: GaussianNetwork,
    batches: Iterator[Batch],
    steps: int,
    objective: Objective,
    config: TrainingConfig,
    *,
    optimizer: torch.optim.Optimizer,
    where: str,
    start: Fitting | None = None,
    after_step: AfterStep | None = None,
) -> float:
    """Train for a number of steps and return the mean task loss.

    With ``start`` it goes on where that snapshot was taken. The gradient's norm is clipped before
    the regulariser's part is added: the regulariser's own norm is ``alpha * sqrt(N)``, and clipping
    the sum would shrink every step.
    """
    net.train()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    device = net.free_mu.device
    total = torch.zeros((), device=device)
    first_bad = torch.full((), -1, device=device, dtype=torch.int64)
    if start is not None:
        optimizer.load_state_dict(start.optimizer)
        total += start.total.to(device)
    for step in range(start.step if start is not None else 0, steps):
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        here = f"{where}, step {step + 1}"
        with _autocast(device, config.precision):
            loss = objective(net, batch, here)
        _backward(loss, here)
        limit = math.inf if config.clip_norm is None else config.clip_norm
        norm = nn.utils.clip_grad_norm_([p for p in trained if p.grad is not None], limit)
        if net.config.posterior.alpha > 0 and any(p is net.free_sigma for p in trained):
            net.penalty().backward()
        optimizer.step()
        total += loss.detach()
        # The first bad step is noted on the device, so that one look now and then will do.
        bad = ~torch.isfinite(loss.detach() + norm)
        first_bad = torch.where((first_bad < 0) & bad, step, first_bad)
        if step % _CHECK_EVERY == _CHECK_EVERY - 1 or step == steps - 1:
            _check_loss(int(first_bad), steps, where)
        if after_step is not None:
            after_step(partial(_snapshot, step + 1, total, first_bad, optimizer, steps, where))
    return float(total) / max(steps, 1)


def _snapshot(
    step: int, total: Tensor, first_bad: Tensor, optimizer: torch.optim.Optimizer, steps: int, where: str
) -> Fitting:
    _check_loss(int(first_bad), steps, where)  # a network that has diverged is not worth going on with
    return Fitting(step, total.detach().cpu().clone(), copy.deepcopy(optimizer.state_dict()))


def _backward(loss: Tensor, where: str) -> None:
    if not loss.requires_grad:
        raise DataError(f"{where}: the loss does not depend on the weights: return a differentiable loss")
    try:
        loss.backward()
    except RuntimeError as error:  # out of memory, or an operation that cannot be differentiated
        raise DataError(f"{where}: the loss has no gradient: {cause(error)}") from error


def _check_loss(first_bad: int, steps: int, where: str) -> None:
    if first_bad >= 0:
        raise DivergedError(
            f"{where}: the loss or its gradient is no longer finite at step {first_bad + 1} of {steps}: "
            "lower training.learning_rate, or look for NaN in the data"
        )


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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    objective: Objective,
    metric: LossFn | None,
    precision: Precision = Precision.FP32,
) -> Scores:
    """Loss and metric of a model in evaluation mode; its mode is put back afterwards."""
    totals = torch.zeros(2, dtype=torch.float64, device=source.device)
    examples = scored = 0
    with _evaluating(model):
        for number, batch in enumerate(source.batches(), 1):
            where = f"{source.name}, batch {number}"
            with _autocast(source.device, precision):
                output = batch.through(model, where)
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
    loss, score = totals.tolist()
    return Scores(loss / examples, score / scored if scored else None, examples)


def _score(metric: LossFn, output: Any, target: Any, where: str) -> Tensor:
    try:
        return torch.as_tensor(metric(output, target)).double().reshape(())
    except BATCH_ERRORS as error:
        raise DataError(
            f"{where}: the metric cannot take the output and the target, or is not a single number: "
            f"{cause(error)}"
        ) from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode; then every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def reestimate_batchnorm(net: GaussianNetwork, batches: Iterator[Batch], steps: int, where: str) -> int:
    """Gather running statistics again at the point estimate, as plain means over the batches.

    Statistics gathered under noise do not fit the network without it. Returns how many layers
    were done; the rest of the network is in evaluation mode meanwhile. A layer that no batch
    comes through keeps its statistics.
    """
    layers = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        return 0
    before = [(layer.momentum, {k: v.clone() for k, v in layer.named_buffers()}) for layer in layers]
    done = 0
    with _evaluating(net), net.sampling(False):
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # cumulative mean
            layer.train()
        try:
            for _ in range(max(steps, 1)):
                next(batches).through(net, where)
        finally:
            for layer, (momentum, statistics) in zip(layers, before, strict=True):
                layer.momentum = momentum
                if layer.num_batches_tracked == 0:
                    layer.load_state_dict(statistics, strict=False)
                else:
                    done += 1
    return done


def steps_in(epochs: float, steps_per_epoch: int) -> int:
    """Whole steps in a number of epochs, at least one if there is anything to train.

    >>> steps_in(0.05, 391), steps_in(3, 391), steps_in(0, 391)
    (20, 1173, 0)
    """
    return math.ceil(epochs * steps_per_epoch - 1e-9)


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision is Precision.BF16)
