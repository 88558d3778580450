"""The inside of a run: stretches of training, fixings, and what comes after the last of them."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.fold_batchnorm import lighten
from pwfn.bayes.objective import LossFn, Objective, Scores, accuracy, divergence, evaluate
from pwfn.bayes.randomness import random_states, restore_random_states
from pwfn.bayes.sensitivity import Looking
from pwfn.bayes.train import (
    AfterStep,
    Fitting,
    FlatStepper,
    Stepper,
    fit,
    reestimate_batchnorm,
    stepper_for,
    steps_in,
)
from pwfn.config import Config, Decay, Precision
from pwfn.errors import ConfigError, DataError
from pwfn.evaluate import trace as observed
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.targets import State, check_target, choose
from pwfn.file.compressed import Compressed
from pwfn.file.format import dumps, load, loads
from pwfn.file.storage import replacing
from pwfn.lab import baselines as methods
from pwfn.lab.baselines import Method
from pwfn.lab.pretrain import augmentation_batches as augmentation
from pwfn.progress import Keep, Progress, Round, StepEvent
from pwfn.zoo.data.epochs import seed_from


class Run:
    """One run's fixed parts: network, data and objective; and how far it has come."""

    progress: Progress
    keep: Keep | None = None
    between: Callable[[], None] | None = None
    on_step: Callable[[StepEvent], None] | None = None
    record: Mapping[str, Any]  # facts that every file of this run keeps
    _classes: int | None = None
    _stepper: Stepper | FlatStepper | None = None  # of an optimiser that lives through all rounds

    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None,
        config: Config,
        distributed: Distributed,
        loss_fn: LossFn,
        metric: LossFn | None,
        distill: bool | LossFn,
    ) -> None:
        self.config, self.distributed, self.record = config, distributed, {}
        self.net: Method = methods.of(config)(model, config).to(distributed.device)
        self.plan = self.net.plan(config)
        self.original = copy.deepcopy(model).to(distributed.device).eval()
        last = config.training.channels_last
        self.train = Source("train_loader", train_loader, distributed.device, last)
        self.val = (
            Source("val_loader", val_loader, distributed.device, last) if val_loader is not None else None
        )
        compare = divergence if distill is True else distill or None
        classifies = augmentation.is_cross_entropy(loss_fn) and compare in (None, divergence)
        self.metric = metric or (accuracy if classifies else None)
        check_target(config.target, self.val is not None and self.metric is not None)
        share = config.training.distill_share
        self.task = Objective(loss_fn)
        self.objective = Objective(loss_fn, self.original, compare, share) if compare else self.task
        # What a run is scored by: the argument replaces the task, the setting only how it is trained.
        self.scored = self.objective
        if compare is None and config.training.distill:
            self.objective = Objective(loss_fn, self.original, divergence, share)
        self.reads_labels = self.objective.divergence is None or share < 1
        augmentation.check(config.training, reads_labels=self.reads_labels, loss_fn=loss_fn)
        if config.training.average and self.net.keeps_optimizer:
            raise ConfigError(
                f"training.average is {config.training.average:g}, and method {config.method} does not fix "
                "in rounds, after which training begins anew: set it to 0"
            )
        self.epoch = self.train.steps_per_epoch(config.training)  # in batches
        self.looking = Looking(self.train, self.task, self.scored, config, distributed)

    def whole(self, on_round: Callable[[Progress], None] | None) -> None:
        """All rounds that are left, the choice of a state where there is a target, and the finish."""
        progress = self.progress
        self._began = time.perf_counter() - progress.seconds
        if progress.state is None:
            progress.before = self.scores(self.original, Precision.FP32)
            self.begin(self.net)
            progress.start = observed.at_start(self.net.layout, self.net.in_force())
            if self.config.finish.lightens:  # what cannot be is told now, not after all the work
                lighten(copy.deepcopy(self.net.model), self.config.finish)
        progress.restore(self.net)
        self.batches = self.train.endless(progress.batches)
        if progress.random is not None:
            restore_random_states(progress.random[self.distributed.rank])
        reached = progress.rounds[-1].fix.fraction if progress.rounds else 0.0
        for number, (_, fraction) in enumerate(self.plan, 1):
            if fraction <= reached:
                continue
            progress.rounds.append(self.round(number, fraction))
            if self.config.target.wanted or self.config.target.keep_states:
                progress.states.append(self.state(number, fraction))
            self.advance()
            if on_round is not None:
                on_round(progress)
        if self.config.target.wanted and progress.choice is None:
            self.settle()
        # Statistics fit the point estimate, then the parameters the statistics, then once more.
        for number, step in enumerate((self.reestimate, self.polish, self.reestimate, self.lighten)):
            if number >= progress.finished:
                step()
                progress.finished = number + 1
                self.advance()

    def begin(self, net: Method) -> None:
        """Let the method look at some batches, if it wants to, before the run's own are begun."""
        with torch.no_grad():
            net.begin(self.looking.look(net))
        if self.distributed.world > 1:  # each has seen a batch of its own: all begin as the first does
            net.load_state_dict(self.distributed.first(lambda: _on_cpu(net.state_dict())))

    def advance(self) -> None:
        """Note where the run is, between two stretches of training."""
        progress = self.progress
        progress.state, progress.fitting = _on_cpu(self.net.state_dict()), None
        progress.seconds = time.perf_counter() - self._began
        progress.batches, progress.random = self.batches.drawn, self.distributed.gather(random_states())

    def fit(
        self,
        stepper: Stepper | FlatStepper,
        steps: int,
        round_number: int,
        where: str,
        falls: bool = True,
    ) -> float:
        """Train, from the beginning or from where the progress says that this stretch was left.

        The learning rate falls over the stretch or, where the optimiser lives on, over all of them.
        """
        start, self.progress.fitting = self.progress.fitting, None
        first = start.step if start is not None else 0
        before = sum(self.stretches()[: round_number - 1])
        start_of_rate, life = (before, sum(self.stretches()[:-1])) if self.net.keeps_optimizer else (0, steps)

        def rate(step: int) -> float:
            return (1 + math.cos(math.pi * (start_of_rate + step) / life)) / 2

        def look(step: int, loss: float) -> None:
            if self.on_step is not None:
                share = self.config.training.accumulate / self.epoch
                self.on_step(
                    StepEvent(
                        stage=where,
                        round=round_number,
                        rounds=len(self.plan),
                        step=step,
                        steps=steps,
                        epoch=step * share,
                        epochs=steps * share,
                        loss=loss,
                        learning_rate=stepper.optimizer.param_groups[0]["lr"],
                        done=(before + step) / sum(self.stretches()),
                        batches=self.batches.drawn,
                    )
                )

        loss = fit(
            self.net,
            self.trained_on(where),
            steps,
            self.objective,
            self.config.training,
            optimizer=stepper.optimizer,
            where=where,
            start=start,
            rate=rate if falls and self.config.training.decay is Decay.COSINE else None,
            after_step=self.after_step(first, steps) if self.keep is not None else None,
            look=look,
            distributed=self.distributed,
            stepper=stepper,
        )
        # As with DistributedDataParallel, the first process's statistics are everybody's.
        buffers = [buffer for buffer in self.net.model.buffers() if buffer.dtype != torch.bool]
        self.distributed.copy_first_(buffers)
        return loss

    def trained_on(self, where: str) -> Iterator[Batch]:
        """The run's own batches, from where they are, and what is to be done to them done."""
        training = self.config.training
        if not augmentation.is_wanted(training):
            return self.batches
        seed = seed_from(self.config.seed, self.distributed.rank)
        return augmentation.augmented(
            self.batches, training, seed, where, self.classes if self.reads_labels else None
        )

    def classes(self, batch: Batch) -> int:
        """How many the network tells apart, as the original's answer to a batch says."""
        if self._classes is None:
            with torch.no_grad():
                output = batch.first(1).through(self.original, "train_loader")
            if not isinstance(output, Tensor) or output.dim() != 2:
                raise DataError(
                    "the network's output is not one row of classes for each example, so labels cannot be "
                    "blended or smoothed: set training.blend, training.cutmix and training.label_smoothing "
                    "to 0"
                )
            self._classes = output.shape[1]
        return self._classes

    def after_step(self, done: int, steps: int) -> AfterStep:
        """Offers the progress after every step, and says which is the last of the stretch."""

        def call(snapshot: Callable[[], Fitting]) -> None:
            nonlocal done
            done += 1

            def progress() -> Progress:
                fitting = snapshot()
                return replace(
                    self.progress,
                    rounds=list(self.progress.rounds),
                    states=list(self.progress.states),
                    state=_on_cpu(self.net.state_dict()),
                    batches=self.batches.drawn,
                    random=self.distributed.gather(random_states()),
                    fitting=fitting,
                    seconds=time.perf_counter() - self._began,
                )

            if self.keep is not None:
                self.keep(progress, done == steps)

        return call

    def stretches(self) -> list[int]:
        """Steps of each stretch of training: of every round, and of polish."""
        return [*(self.steps_in(stretch.epochs) for stretch in self.plan), self.polish_steps]

    @property
    def epochs(self) -> float:
        """Of training in all, polish included."""
        polish = self.config.finish.polish_epochs if self.polish_steps else 0.0
        return sum(stretch.epochs for stretch in self.plan) + polish

    def steps_in(self, epochs: float) -> int:
        """Steps of the optimiser in a number of epochs."""
        return steps_in(epochs / self.config.training.accumulate, self.epoch)

    def stepper(self, seed: int) -> Stepper | FlatStepper:
        """For a round: a fresh optimiser, or the one that lives on, here or in the progress."""
        if self._stepper is not None:
            return self._stepper
        training = self.config.training
        alone = self.distributed.world == 1 and training.accumulate == 1
        optimizer = self.net.optimizer(seed, alone=alone)
        if self.progress.optimizer is not None:
            # Its momenta, not its learning rates: those are of the settings, which may be others by now.
            rates = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({**self.progress.optimizer, "param_groups": rates})
        return stepper_for(self.net, self.objective, training, optimizer, self.distributed, seed)

    def round(self, number: int, fraction: float) -> Round:
        """Train, then do what the method does in between."""
        started = time.perf_counter()
        net, steps = self.net, self.stretches()[number - 1]
        seed = seed_from("noise", self.config.seed, self.distributed.rank, number)
        where = f"round {number} of {len(self.plan)}"
        loss = None
        if steps:
            stepper = self.stepper(seed)
            loss = self.fit(stepper, steps, number, where)
            if net.keeps_optimizer:
                self._stepper = stepper
                self.progress.optimizer = copy.deepcopy(stepper.optimizer.state_dict())
        before = observed.before_fixing(number, net.layout, net.in_force())
        done = net.between(number, fraction)
        after = observed.after_fixing(number, done.record, net.layout, net.in_force())
        self.distributed.check_alike(f"{where}: the weights", net.compared())
        if self.config.schedule.reestimate_in_rounds:
            self.reestimate_aside(where)
        return Round(
            number=number,
            steps=steps,
            loss=loss,
            fix=done.record,
            fixed=Pool.of(done.fixed),
            sigma_quartiles=done.sigma_quartiles,
            scores=self.scores(net),
            seconds=time.perf_counter() - started,
            observed=(after,) if before is None else (before, after),
        )

    def reestimate_aside(self, where: str) -> None:
        """Gather BatchNorm statistics at the point estimate, while the run's own batches stay where they are.

        Layers in training mode normalise by the batch's own statistics, so the weights that a run comes to
        are the same with it and without.
        """
        dice = random_states()  # a loader that shuffles may draw from them
        steps = steps_in(self.config.finish.reestimate_epochs, self.epoch)
        reestimate_batchnorm(
            self.net, self.train.endless(), steps, f"{where}, re-estimation", self.distributed
        )
        restore_random_states(dice)

    def state(self, number: int, fraction: float) -> State:
        """The whole network as it would be if the run ended here; the run itself goes on untouched."""
        net = self.net.rounded()
        if self.config.finish.reestimate_batchnorm:
            # From the first epoch again, not from the run's own batches, which it must find as they were.
            steps = steps_in(self.config.finish.reestimate_epochs, self.epoch)
            where = f"the state after round {number}"
            reestimate_batchnorm(net, self.train.endless(), steps, where, self.distributed)
        compressed = net.finish()
        scores = self.scores(compressed.apply_to(copy.deepcopy(self.original)), Precision.FP32)
        facts = {"method": str(self.config.method), "settings": self.config.to_dict(), "round": number}
        record = {**compressed.record, **facts, **self.record}
        pool = Pool.of(compressed.values())
        content = self.distributed.first(lambda: dumps(replace(compressed, record=record)))
        return State(number, fraction, scores, pool.entropy_bits, pool.unique, content)

    def settle(self) -> None:
        """Choose the state to keep and, if it is not the last, go back to it."""
        progress = self.progress
        progress.choice = choose(progress.states, progress.before, self.config.target)
        if progress.choice.round < len(self.plan):
            chosen = next(s for s in progress.states if s.round == progress.choice.round)
            self.net.adopt(loads(chosen.content))
        self.advance()

    def reestimate(self) -> None:
        """Gather BatchNorm statistics at the point estimate; the second time only if polish changed it."""
        finish = self.config.finish
        if finish.reestimate_batchnorm and (self.progress.finished == 0 or self.polish_steps):
            steps = steps_in(finish.reestimate_epochs, self.epoch)
            reestimate_batchnorm(self.net, self.batches, steps, "BatchNorm re-estimation", self.distributed)

    @property
    def polish_steps(self) -> int:
        """Steps of polish: none where every parameter is compressed."""
        trained = any(p.requires_grad for p in self.net.model.parameters())
        return self.steps_in(self.config.finish.polish_epochs) if trained else 0

    def polish(self) -> None:
        """Train the uncompressed parameters alone, with noise off."""
        if not self.polish_steps:
            return
        parameters = [p for p in self.net.model.parameters() if p.requires_grad]
        config = self.config.training
        optimizer = torch.optim.SGD(
            parameters,
            lr=self.config.finish.polish_learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        stepper = stepper_for(self.net, self.objective, config, optimizer, self.distributed)
        with self.net.sampling(False):
            self.fit(stepper, self.polish_steps, len(self.plan) + 1, "polish", falls=False)

    def lighten(self) -> None:
        """Fold BatchNorm and round what is not compressed, where the settings have it so."""
        lighten(self.net.model, self.config.finish)

    def scores(self, model: nn.Module, precision: Precision | None = None) -> Scores | None:
        """Of a model on the validation data, if there are any.

        On the way in the number type of training, which is quicker; before and after, in float32.
        """
        if self.val is None:
            return None
        precision = precision or self.config.training.precision
        # Processes may have unlike numbers of batches, so that they could not agree to stop here.
        between = self.between if self.distributed.world == 1 else None
        return evaluate(
            model,
            self.val,
            self.scored,
            self.metric,
            precision,
            distributed=self.distributed,
            between=between,
        )


def _read(content: bytes) -> Compressed:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pwfn"
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return load(path)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
