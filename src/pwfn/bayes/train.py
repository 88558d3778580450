"""The training loop: one phase of steps, which can be stopped after any step and resumed."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from pwfn.bayes.batches import Batch, is_out_of_memory
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.execution import RecordedStep
from pwfn.bayes.method import Method
from pwfn.bayes.network import WeightNetwork, forget_graphs
from pwfn.bayes.objective import Objective, autocast, largest_that_fits
from pwfn.bayes.optimizer import FlatAdamW, FlatSGD
from pwfn.config import Precision, SchedulerName, TrainingConfig
from pwfn.errors import ConfigError, DataError, DivergedError, TooLargeError, cause

# Reading the loss waits for the device: once every so many steps, or seconds if steps are long.
_REPORT_STEPS = 32
_REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class PhaseState:
    """How far a training phase has come, with everything needed to resume it."""

    step: int  # steps done
    totals: list[float]  # sum of their losses, in each process
    optimizer: dict[str, Any]
    scaler: dict[str, Any]  # of the loss, for fp16; empty otherwise
    kind: str = ""  # class of the optimiser, where known


AfterStep = Callable[[int, Callable[[], PhaseState]], None]
"""Called after every step with its number and a function that takes a snapshot; it may raise."""

OnLoss = Callable[[int, float, float], None]
"""Called now and then with the steps done, the mean loss since the last call, and the learning rate."""


def fit(
    net: WeightNetwork,
    batches: Iterator[Batch],
    steps: int,
    objective: Objective,
    config: TrainingConfig,
    *,
    optimizer: torch.optim.Optimizer,
    where: str,
    seed: int | None = None,
    start: PhaseState | None = None,
    scaler: torch.amp.GradScaler | None = None,
    after_step: AfterStep | None = None,
    on_loss: OnLoss | None = None,
    distributed: Distributed | None = None,
) -> float:
    """Train for a number of steps and return the mean task loss.

    A step averages the gradients of ``config.accumulate`` batches, and of all processes. With ``start`` it
    resumes where that snapshot was taken, with the learning rates and weight decay of this optimiser. A
    ``scaler`` takes the scale of fp16 losses from one phase to the next. The gradient's norm is clipped
    before the regulariser's gradient is added. The latter has the norm ``alpha * sqrt(N)``: clipping the sum
    would shrink every step.

    The noise of a torch optimiser's steps is a function of ``seed`` and the number of the batch, or torch's
    own random state without a seed. A flat optimiser has a seed of its own.
    """
    net.train()
    distributed = distributed or Distributed(net.device)
    scaler = scaler or loss_scaler(net.device, config)
    first = 0 if start is None else start.step
    log = _LossLog(net.device, steps, first, where)
    stepper = _Stepper(net, objective, config, optimizer, distributed, seed, scaler, log)
    if start is not None:
        stepper.restore(start)
        log.total += start.totals[distributed.rank]
    _rates_on_device(optimizer)
    scheduler = _scheduler(optimizer, config.scheduler, steps, first)

    def snapshot() -> PhaseState:
        log.check()  # a network that has diverged is not worth resuming
        return PhaseState(
            step + 1,
            distributed.gather(float(log.total)),
            _plain_rates(copy.deepcopy(optimizer.state_dict())),
            scaler.state_dict(),
            type(optimizer).__name__,
        )

    for step in range(first, steps):
        stepper.step(batches, f"{where}, step {step + 1}")
        mean = log.read(step)
        if on_loss is not None and mean is not None:
            on_loss(step + 1, mean, float(optimizer.param_groups[0]["lr"]))
        if after_step is not None:
            after_step(step + 1, snapshot)
        if scheduler is not None and step + 1 < steps:
            scheduler.step()
    forget_graphs(net)
    return float(distributed.total(log.total)) / distributed.world / max(steps, 1)


def loss_scaler(device: torch.device, config: TrainingConfig) -> torch.amp.GradScaler:
    """An adaptive scale of the loss for fp16, where much of a gradient lies below 2^-24; else none."""
    return torch.amp.GradScaler(device.type, enabled=config.precision is Precision.FP16)


def _scheduler(
    optimizer: torch.optim.Optimizer, name: SchedulerName, steps: int, done: int
) -> LambdaLR | None:
    """Half a cosine from the learning rate to zero; a closed form, so that a resumed phase has the same."""
    if name is SchedulerName.NONE:
        return None
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
    return LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2, last_epoch=done - 1)


def _rates_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Learning rates as tensors where torch's kernels can read them: a recorded step has no numbers."""
    for group in optimizer.param_groups:
        if group.get("fused") and not isinstance(group["lr"], Tensor):
            group["lr"] = torch.full((), group["lr"], device=group["params"][0].device)


def _plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with learning rates as numbers."""
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
    return state


class _Stepper:
    """One step of training: gradients, clipping, regulariser, update."""

    def __init__(
        self,
        net: WeightNetwork,
        objective: Objective,
        config: TrainingConfig,
        optimizer: torch.optim.Optimizer,
        distributed: Distributed,
        seed: int | None,
        scaler: torch.amp.GradScaler,
        log: _LossLog,
    ) -> None:
        self.net, self.objective, self.config, self.scaler = net, objective, config, scaler
        self.optimizer, self.distributed, self.seed, self.log = optimizer, distributed, seed, log
        self.flat = optimizer if isinstance(optimizer, (FlatSGD, FlatAdamW)) else None
        alone = distributed.world == 1 and config.accumulate == 1 and not scaler.is_enabled()
        made_for = None if self.flat is None else (self.flat.draws, self.flat.distributed.world)
        if made_for not in (None, now := (config.accumulate, distributed.world)):
            raise ConfigError(
                "the flat optimiser was made for {} batches per step in {} processes, and the run has {} in "
                "{}: pass it draws= and distributed=".format(*made_for, *now)
            )
        self.done = 0  # steps
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained = grouped if self.flat is None else self.flat.trained
        # A penalty concerns the network's own parameters: none where only others are trained, as in polish.
        own = {id(p) for p in net.parameters(recurse=False)}
        self._has_penalty = self.flat is None and any(id(p) in own for p in grouped)
        self._recorded: RecordedStep[None] | None = None
        records = config.cuda_graph and net.device.type == "cuda" and net.recordable
        if records and alone and (self.flat is not None or net.graph_safe):
            loss_fn = [objective.loss_fn] if hasattr(objective.loss_fn, "__dict__") else []
            watched = [*net.modules(), *loss_fn]
            self._recorded = RecordedStep(self._whole, optimizer.zero_grad, watched)

    def restore(self, start: PhaseState) -> None:
        """Momenta and loss scale of a snapshot; what the settings say of the optimiser is theirs."""
        if start.kind not in ("", kind := type(self.optimizer).__name__):
            raise ConfigError(
                f"the phase stopped after step {start.step} of {start.kind}, and {kind} cannot use that "
                "state: keep training.optimizer, accumulate and precision, or resume from the end of a round"
            )
        groups = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        # A copy: torch would go on with the snapshot's own tensors, and change them.
        self.optimizer.load_state_dict(copy.deepcopy(start.optimizer))
        for group, (rate, decay) in zip(self.optimizer.param_groups, groups, strict=True):
            group["lr"] = group["initial_lr"] = rate  # a number: they go to the device after this
            group["weight_decay"] = decay
        if start.scaler:  # none where the phase began in another precision
            self.scaler.load_state_dict(start.scaler)
        self.done = start.step

    def step(self, batches: Iterator[Batch], where: str) -> None:
        """One step; its loss and the norm of the task's gradient go to the log."""
        if isinstance(self.net, Method):
            self.net.before_step(self.done, self.log.steps, self.distributed)
        if self._recorded is not None:
            self._recorded(next(batches), where)
            self.net.recordable = not self._recorded.failed
        else:
            self._whole(batches, where)
        self.done += 1

    def _whole(self, batches: Iterator[Batch] | Batch, where: str) -> None:
        """Gradients of the step's batches, or of this one; then clipping, regulariser and update.

        All of it can be recorded: the host decides nothing, and reads nothing from the device.
        """
        given = itertools.repeat(batches) if isinstance(batches, Batch) else batches
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number in range(self.config.accumulate):
            with self._drawn(number):
                losses.append(self._gradients(next(given), where))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        self.log.add(loss, self._update())

    def _update(self) -> Tensor:
        """Clip, add the regulariser's gradient, and update; the norm of the task's gradient."""
        if self.flat is not None:
            return self._flat_update(self.flat)
        self.distributed.average_gradients_(self.trained)
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        norm = nn.utils.clip_grad_norm_([p for p in self.trained if p.grad is not None], limit)
        penalty = self.net.penalty() if self._has_penalty and isinstance(self.net, Method) else None
        if penalty is not None:
            penalty.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # With an adaptive loss scale an infinite gradient is no failure: that step was skipped.
        return torch.zeros_like(norm) if self.scaler.is_enabled() else norm

    def _flat_update(self, flat: FlatSGD | FlatAdamW) -> Tensor:
        """The same in the optimiser's own passes."""
        if not self.scaler.is_enabled():
            return flat.step()
        flat.gather()
        self.scaler.unscale_(flat)
        self.scaler.step(flat)
        self.scaler.update()
        return torch.zeros_like(self.log.total)

    def _drawn(self, number: int) -> AbstractContextManager[None]:
        if self.flat is not None:
            return self.flat.drawn(number)
        if self.seed is None:
            return nullcontext()
        return self.net.sampling(at=(self.seed, self.done * self.config.accumulate + number))

    def _gradients(self, batch: Batch, where: str) -> Tensor:
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
        term = self.net.loss_term(loss.detach()) if isinstance(self.net, Method) else None
        whole = loss if term is None else loss + term
        try:
            self.scaler.scale(whole / self.config.accumulate).backward()
        except RuntimeError as error:  # out of memory, or an operation that cannot be differentiated
            if is_out_of_memory(error):
                raise batch.too_large(where) from error
            raise DataError(f"{where}: the loss has no gradient: {cause(error)}") from error
        return loss.detach()


class _LossLog:
    """The losses of a phase, kept on the device and read now and then."""

    def __init__(self, device: torch.device, steps: int, first: int, where: str) -> None:
        self.total = torch.zeros((), device=device)
        self._first_bad = torch.full((), -1, device=device, dtype=torch.int64)
        self._since = torch.zeros((), device=device)
        self._done = torch.full((), first, device=device, dtype=torch.int64)
        self._count, self._read = 0, time.monotonic()
        self.steps, self._where = steps, where

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Add a step, in place and on the device, so that it can be part of a recording."""
        self.total += loss
        self._since += loss
        # The first bad step is noted on the device, so that reading now and then is enough.
        bad = ~torch.isfinite(loss + norm) & (self._first_bad < 0)
        self._first_bad.copy_(torch.where(bad, self._done, self._first_bad))
        self._done += 1

    def read(self, step: int) -> float | None:
        """After a step: now and then, the mean loss since the last time."""
        self._count += 1
        now = time.monotonic()
        if self._count < _REPORT_STEPS and now - self._read < _REPORT_SECONDS and step < self.steps - 1:
            return None
        self.check()
        mean = float(self._since) / self._count
        self._since.zero_()
        self._count, self._read = 0, now
        return mean

    def check(self) -> None:
        """Wait for the device, and stop if a loss or a gradient was not finite."""
        first_bad = int(self._first_bad)
        if first_bad >= 0:
            raise DivergedError(
                f"{self._where}: the loss or its gradient is no longer finite at step {first_bad + 1} of "
                f"{self.steps}: lower training.learning_rate, or look for NaN in the data"
            )


def steps_in(epochs: float, steps_per_epoch: int) -> int:
    """Whole steps in a number of epochs, at least one if there is anything to train.

    >>> steps_in(0.05, 391), steps_in(3, 391), steps_in(0, 391)
    (20, 1173, 0)
    """
    return math.ceil(epochs * steps_per_epoch - 1e-9)
