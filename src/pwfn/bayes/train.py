"""The fit loop, and BatchNorm re-estimation."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch, is_out_of_memory
from pwfn.bayes.cuda_graph import RecordedStep
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.network import WeightNetwork
from pwfn.bayes.objective import Objective, autocast, evaluating, gathering, largest_that_fits
from pwfn.bayes.optimizer import FlatOptimizer
from pwfn.config import Precision, TrainingConfig
from pwfn.errors import ConfigError, DataError, DivergedError, TooLargeError, cause

# Each look at the loss waits for the device: one every so many steps, or seconds if steps are long.
_LOOK_STEPS = 32
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Fitting:
    """How far a stretch of training has come, with all that it takes to go on from there."""

    step: int  # steps done
    totals: list[float]  # sum of their losses, in each process
    optimizer: dict[str, Any]  # its state dict
    scaler: dict[str, Any]  # of the loss, for fp16; empty otherwise
    average: list[Tensor] | None = None  # the moving average, where there is one


AfterStep = Callable[[Callable[[], Fitting]], None]
"""Called after every step with a function that takes a snapshot; it may raise to stop the run."""

Look = Callable[[int, float], None]
"""Called now and then with the steps done and the mean loss of those since the last call."""


def fit(
    net: WeightNetwork,
    batches: Iterator[Batch],
    steps: int,
    objective: Objective,
    config: TrainingConfig,
    *,
    optimizer: torch.optim.Optimizer | FlatOptimizer,
    where: str,
    seed: int | None = None,
    start: Fitting | None = None,
    rate: Callable[[int], float] | None = None,
    after_step: AfterStep | None = None,
    look: Look | None = None,
    distributed: Distributed | None = None,
    stepper: Stepper | FlatStepper | None = None,
) -> float:
    """Train for a number of steps and return the mean task loss.

    A step averages the gradients of ``config.accumulate`` batches, and of all processes. With
    ``start`` it goes on where that snapshot was taken. The gradient's norm is clipped before
    the regulariser's part is added: the regulariser's own norm is ``alpha * sqrt(N)``, and clipping
    the sum would shrink every step. ``rate`` gives, for the steps done, the share of the learning rates
    that the next step has. With ``config.average`` the network has the moving average in the end; see
    :class:`Average`. A ``stepper`` is one of :func:`stepper_for` that made an earlier stretch's
    steps with the same optimiser: what it has recorded is not recorded again.

    A torch optimiser makes plain steps, whose noise is a function of ``seed`` and the batch's number,
    or torch's own without a seed. A :class:`pwfn.bayes.optimizer.FlatOptimizer` has its own seed; with the
    same one it takes the same steps, to rounding, in fewer passes.
    """
    net.train()
    distributed = distributed or Distributed(net.device)
    if stepper is None:
        stepper = stepper_for(net, objective, config, optimizer, distributed, seed)
    ledger = _Ledger(net.device, steps, where)
    average = Average(_moving(net), config.average) if config.average else None
    first = 0
    if rate is not None and not isinstance(optimizer, FlatOptimizer):
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
    if start is not None:
        optimizer.load_state_dict(start.optimizer)
        stepper.scaler.load_state_dict(start.scaler)
        stepper.done = start.step
        ledger.total += start.totals[stepper.distributed.rank]
        first = start.step
        if average is not None and start.average is not None:
            average.load(start.average)
    for step in range(first, steps):
        if rate is not None:
            _scale_rates(optimizer, rate(step))
        loss, norm = stepper.step(batches, f"{where}, step {step + 1}")
        mean = ledger.enter(step, loss, norm)
        if average is not None:
            average.add(step + 1)
        if look is not None and mean is not None:
            look(step + 1, mean)
        if after_step is not None:
            after_step(partial(_snapshot, step + 1, ledger, stepper, average))
    if average is not None:
        average.place()
    return float(stepper.distributed.total(ledger.total)) / stepper.distributed.world / max(steps, 1)


def stepper_for(
    net: WeightNetwork,
    objective: Objective,
    config: TrainingConfig,
    optimizer: torch.optim.Optimizer | FlatOptimizer,
    distributed: Distributed,
    seed: int | None = None,
) -> Stepper | FlatStepper:
    """What makes the steps of an optimiser."""
    if isinstance(optimizer, FlatOptimizer):
        return FlatStepper(net, objective, config, optimizer, distributed)
    return Stepper(net, objective, config, optimizer, distributed, seed)


def _scale_rates(optimizer: torch.optim.Optimizer | FlatOptimizer, factor: float) -> None:
    if isinstance(optimizer, FlatOptimizer):
        optimizer.scale_rates(factor)
        return
    for group in optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]


class Average:
    """A moving average of tensors over the steps of a training.

    After step n it is ``d average + (1 - d) now``, ``d = min(decay, n / (n + 9))``: in the beginning it is
    short, so that it forgets where the training began. A fixed weight does not move, nor does its average.
    It lies in ``kept``, tensors of its own unless given.
    """

    def __init__(self, now: list[Tensor], decay: float, kept: list[Tensor] | None = None) -> None:
        self._now, self.decay = now, decay
        self.kept = [tensor.clone() for tensor in now] if kept is None else kept

    @torch.no_grad()
    def add(self, step: int) -> None:
        """What the network is after a step, from 1 on."""
        torch._foreach_lerp_(self.kept, self._now, 1 - min(self.decay, step / (step + 9)))

    def load(self, kept: list[Tensor]) -> None:
        """Go on from an average that was kept."""
        for own, other in zip(self.kept, kept, strict=True):
            own.copy_(other)

    def place(self) -> None:
        """Give the network the average."""
        for now, kept in zip(self._now, self.kept, strict=True):
            now.copy_(kept)


def _moving(net: WeightNetwork) -> list[Tensor]:
    """What steps of training move: parameters that are trained, and the model's statistics."""
    buffers = [buffer for buffer in net.model.buffers() if buffer.is_floating_point()]
    return [*(p.detach() for p in net.parameters() if p.requires_grad), *buffers]


def _snapshot(step: int, ledger: _Ledger, stepper: Stepper | FlatStepper, average: Average | None) -> Fitting:
    ledger.check()  # a network that has diverged is not worth going on with
    return Fitting(
        step,
        stepper.distributed.gather(float(ledger.total)),
        copy.deepcopy(stepper.optimizer.state_dict()),
        stepper.scaler.state_dict(),
        [tensor.cpu().clone() for tensor in average.kept] if average is not None else None,
    )


@dataclass(frozen=True)
class _Task:
    """Forward and backward of a batch, for whoever steps then."""

    net: WeightNetwork
    objective: Objective
    config: TrainingConfig
    optimizer: torch.optim.Optimizer | FlatOptimizer
    scaler: torch.amp.GradScaler

    def gradients(self, batch: Batch, where: str) -> Tensor:
        """Add a batch's share to the gradients, and return its loss."""

        def alone(part: Batch) -> Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            return self._attempt(part, where)

        try:
            return self._attempt(batch, where)
        except TooLargeError as error:
            raise batch.too_large(where, largest_that_fits(batch, alone)) from error

    def _attempt(self, batch: Batch, where: str) -> Tensor:
        with autocast(self.net.device, self.config.precision):
            loss = self.objective(self.net, batch, where)
        if not loss.requires_grad:
            raise DataError(f"{where}: the loss does not depend on the weights: return a differentiable loss")
        term = self.net.term(loss.detach())
        whole = loss if term is None else loss + term
        try:
            self.scaler.scale(whole / self.config.accumulate).backward()
        except RuntimeError as error:  # out of memory, or an operation that cannot be differentiated
            if is_out_of_memory(error):
                raise batch.too_large(where) from error
            raise DataError(f"{where}: the loss has no gradient: {cause(error)}") from error
        return loss.detach()


class FlatStepper:
    """One step of training after another, each in one pass over the vectors: one process, one batch."""

    def __init__(
        self,
        net: WeightNetwork,
        objective: Objective,
        config: TrainingConfig,
        optimizer: FlatOptimizer,
        distributed: Distributed,
    ) -> None:
        if distributed.world > 1 or config.accumulate > 1 or config.precision is Precision.FP16:
            # Sigma's gradient is g * eps: that of several draws is not the gradient of their mean.
            raise ConfigError(
                "a flat optimiser steps one batch of one process, in fp32 or bf16: set training.fused = false"
            )
        self.optimizer, self.distributed = optimizer, distributed
        self.scaler = torch.amp.GradScaler(net.device.type, enabled=False)
        self.done = 0
        self._task = _Task(net, objective, config, optimizer, self.scaler)
        graph = config.cuda_graph and net.device.type == "cuda"
        self._recorded: RecordedStep | None = None
        if graph:
            self._recorded = RecordedStep(optimizer.trained, self._task.gradients, optimizer.collect)

    def step(self, batches: Iterator[Batch], where: str) -> tuple[Tensor, Tensor]:
        """The loss of the step's batch, and the norm of the task's gradient."""
        batch = next(batches)
        if self._recorded is not None:
            with self.optimizer.drawn():
                loss, gradient = self._recorded(batch, where)
            return loss, self.optimizer.step(gradient)
        self.optimizer.zero_grad()
        with self.optimizer.drawn():
            loss = self._task.gradients(batch, where)
        return loss, self.optimizer.step()


class Stepper:
    """One plain step of training after another: gradients, clipping, regulariser, update."""

    def __init__(
        self,
        net: WeightNetwork,
        objective: Objective,
        config: TrainingConfig,
        optimizer: torch.optim.Optimizer,
        distributed: Distributed,
        seed: int | None,
    ) -> None:
        self.net, self.config = net, config
        self.optimizer, self.distributed, self.seed = optimizer, distributed, seed
        self.done = 0  # steps
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        # Unscaled, much of a gradient in fp16 lies below 2^-24, where it would vanish.
        scaled = config.precision is Precision.FP16
        self.scaler = torch.amp.GradScaler(net.device.type, enabled=scaled)
        self._task = _Task(net, objective, config, optimizer, self.scaler)
        # A penalty is of the network's own parameters: none where only others are trained, as in polish.
        own = {id(p) for p in net.parameters(recurse=False)}
        self._has_penalty = any(id(p) in own for p in self.trained)
        one_pass = distributed.world == 1 and config.accumulate == 1 and not scaled and net.is_recordable
        graph = config.cuda_graph and net.device.type == "cuda" and one_pass
        self._recorded = RecordedStep(self.trained, self._task.gradients) if graph else None

    def step(self, batches: Iterator[Batch], where: str) -> tuple[Tensor, Tensor]:
        """The mean loss of the step's batches, and the norm of the task's gradient."""
        loss = self._loss(batches, where)
        self.done += 1
        self.distributed.average_gradients_(self.trained)
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        norm = nn.utils.clip_grad_norm_([p for p in self.trained if p.grad is not None], limit)
        penalty = self.net.penalty() if self._has_penalty else None
        if penalty is not None:
            penalty.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # With a scale that adapts itself an infinite gradient is no mishap: that step was left out.
        return loss, torch.zeros_like(loss) if self.scaler.is_enabled() else norm

    def _loss(self, batches: Iterator[Batch], where: str) -> Tensor:
        if self._recorded is not None:
            return self._recorded(next(batches), where)[0]
        self.optimizer.zero_grad(set_to_none=True)
        count = self.config.accumulate
        return torch.stack([self._drawn(next(batches), where, number) for number in range(count)]).mean()

    def _drawn(self, batch: Batch, where: str, number: int) -> Tensor:
        """Add a batch's share to the gradients, with a draw of its own, and return its loss."""
        if self.seed is None:
            return self._task.gradients(batch, where)
        with self.net.sampling(at=(self.seed, self.done * self.config.accumulate + number)):
            return self._task.gradients(batch, where)


class _Ledger:
    """The losses of a stretch, kept on the device; read now and then, for a look or a mishap."""

    def __init__(self, device: torch.device, steps: int, where: str) -> None:
        self.total = torch.zeros((), device=device)
        self._first_bad = torch.full((), -1, device=device, dtype=torch.int64)
        self._since = torch.zeros((), device=device)
        self._count, self._looked = 0, time.monotonic()
        self._steps, self._where = steps, where

    def enter(self, step: int, loss: Tensor, norm: Tensor) -> float | None:
        """Note a step; at a look, the mean loss since the last one."""
        self.total += loss
        self._since += loss
        self._count += 1
        # The first bad step is noted on the device, so that one look now and then will do.
        bad = ~torch.isfinite(loss + norm)
        self._first_bad = torch.where((self._first_bad < 0) & bad, step, self._first_bad)
        now = time.monotonic()
        if self._count < _LOOK_STEPS and now - self._looked < _LOOK_SECONDS and step < self._steps - 1:
            return None
        self.check()
        mean = float(self._since) / self._count
        self._since.zero_()
        self._count, self._looked = 0, now
        return mean

    def check(self) -> None:
        """Wait for the device, and stop if a loss or a gradient was not finite."""
        first_bad = int(self._first_bad)
        if first_bad >= 0:
            raise DivergedError(
                f"{self._where}: the loss or its gradient is no longer finite at step {first_bad + 1} of "
                f"{self._steps}: lower training.learning_rate, or look for NaN in the data"
            )


@torch.no_grad()
def reestimate_batchnorm(
    net: WeightNetwork,
    batches: Iterator[Batch],
    steps: int,
    where: str,
    distributed: Distributed | None = None,
) -> int:
    """Gather running statistics again at the point estimate, as plain means over all batches.

    Statistics gathered under noise do not fit the network without it. Returns how many layers
    were done; the rest of the network is in evaluation mode meanwhile. A layer that no batch
    comes through keeps its statistics, and so does every layer after an error.
    """
    with gathering(net) as layers, net.sampling(False):
        if not layers:
            return 0
        for _ in range(max(steps, 1)):
            next(batches).through(net, where)
        done = [layer for layer in layers.values() if layer.num_batches_tracked != 0]
    (distributed or Distributed(net.device)).average_(
        [buffer for layer in done for buffer in _statistics(layer)]
    )
    return len(done)


def diagonal_fisher(
    net: WeightNetwork,
    parameter: nn.Parameter,
    batches: Iterator[Batch],
    count: int,
    objective: Objective,
    precision: Precision,
    where: str,
    distributed: Distributed | None = None,
) -> Tensor:
    """The diagonal of the empirical Fisher, ``h = mean over batches of size * g^2``, g by the parameter.

    At a minimum the gradients of examples add up to nothing, so that the square of a batch's mean
    gradient is that of one example, on average, over the batch's size: the factor makes h the Fisher of
    an example, whatever the size, which stands for the curvature of the loss. The network is in
    evaluation mode with noise off. Gradients in fp16 would vanish without a scale: they are in fp32.
    """
    total = torch.zeros_like(parameter, requires_grad=False)
    precision = Precision.FP32 if precision is Precision.FP16 else precision
    with evaluating(net), net.sampling(False), torch.enable_grad():
        for number in range(1, count + 1):
            batch, place = next(batches), f"{where}, batch {number}"
            with autocast(net.device, precision):
                loss = objective(net, batch, place)
            try:
                (gradient,) = torch.autograd.grad(loss, parameter)
            except RuntimeError as error:  # out of memory, or an operation that cannot be differentiated
                if is_out_of_memory(error):
                    raise batch.too_large(place) from error
                raise DataError(f"{place}: the loss has no gradient: {cause(error)}") from error
            total.addcmul_(gradient, gradient, value=batch.size / count)
    (distributed or Distributed(net.device)).average_([total])
    return total


def _statistics(layer: nn.Module) -> list[Tensor]:
    return [buffer for buffer in layer.buffers(recurse=False) if buffer.is_floating_point()]


def steps_in(epochs: float, steps_per_epoch: int) -> int:
    """Whole steps in a number of epochs, at least one if there is anything to train.

    >>> steps_in(0.05, 391), steps_in(3, 391), steps_in(0, 391)
    (20, 1173, 0)
    """
    return math.ceil(epochs * steps_per_epoch - 1e-9)
