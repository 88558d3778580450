"""The whole method in one call: start, [train, fix] for every round, finish."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pwfn.bayes.batches import Source, Stream, device_of
from pwfn.bayes.batchnorm import reestimate_batchnorm, unfolded
from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.execution import channels_last
from pwfn.bayes.grid import conditioned, rate  # noqa: F401  # they register the methods of quick and small
from pwfn.bayes.method import METHODS, FixedNetwork, Method, Phase, fix_alike, phases, polish_optimizer
from pwfn.bayes.objective import LossFn, comparison, tasks
from pwfn.bayes.optimizer import optimizer_for
from pwfn.bayes.predictive import run_posterior, wants_posterior
from pwfn.bayes.randomness import random_states, rank_seed, restore_random_states, seeded, undisturbed
from pwfn.bayes.sigma import probe
from pwfn.bayes.train import PhaseState, fit, loss_scaler, steps_in
from pwfn.config import Config, Precision, SchedulerName
from pwfn.config.seeds import seed_from
from pwfn.errors import ConfigError, DataError
from pwfn.evaluate import trace
from pwfn.evaluate.entropy import Pool, summarise
from pwfn.evaluate.score import Scores, mean_scores, recorded
from pwfn.evaluate.targets import State, check_target, choose, next_step
from pwfn.evaluate.verdict import doubts, kept_statistics, left_out, other_threads, ruin, warn
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.file.format import dumps, loads
from pwfn.fixing.conditioning.scale import without_gradients
from pwfn.progress import Keep, Progress, Round, StepEvent, on_cpu
from pwfn.result import Result
from pwfn.zoo.epochs import batched

Trained = Method | FixedNetwork


def compress(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    config: Config | None = None,
    loss_fn: LossFn = F.cross_entropy,
    *,
    preset: str | None = None,
    metric: LossFn | None = None,
    distill: bool | LossFn = False,
    device: torch.device | str | None = None,
    on_round: Callable[[Progress], None] | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    resume: Progress | None = None,
    keep: Keep | None = None,
    before_batch: Callable[[], None] | None = None,
    record: Mapping[str, Any] | None = None,
    distributed: Distributed | None = None,
) -> Result:
    """Turn a pre-trained network into one whose weights take a handful of values.

    Args:
        model: any eager model with convolution or linear layers; it is not changed.
        train_loader: batches ``(input, …, target)``, mappings with ``labels`` or ``target``, or inputs
            alone with ``distill`` or ``preset="quick"``; iterated again for every epoch. A tensor of inputs,
            or a pair of inputs and labels, is cut into batches.
        val_loader: scored after every round; by agreement with the original network if it has no labels.
        config: the settings; those of the preset ``recommended`` unless given.
        loss_fn: a function of the model's output and the target.
        preset: the name of a preset, instead of ``config``.
        metric: a mean share of 1 to report beside the loss; accuracy for cross entropy, unless
            ``distill`` is a function.
        distill: ``True``: the loss is the divergence from the original network's softmax output, so that
            unlabelled data is enough; or a function of output and original output. Scores use it too.
            (The setting ``training.distill`` changes training only.)
        device: where to run; the model's own unless given.
        on_round: called after every round with the progress so far.
        on_step: called a few times per second in training.
        resume: the progress of a run that stopped.
        keep: called after every training step; see :data:`pwfn.progress.Keep`.
        before_batch: called before every batch of validation data; it may raise.
        record: facts to keep in the file beside those of the run, as JSON can hold them.
        distributed: the processes of this run; those that torchrun or accelerate launched unless given.

    The same seed on the same machine with the same number of threads gives the same bits. Random states
    are restored afterwards. An error or an interrupt in the run carries what was reached as
    ``error.progress``. What looks wrong is logged as soon as it is known, and is in ``result.warnings``.

    With several processes each makes the same call with its own share of the data: a step averages their
    gradients, each draws its own noise, and their weights are compared after every round.

    >>> data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(2)]
    >>> result = compress(nn.Linear(4, 2), data)
    >>> result.compressed.values().numel()
    10
    """
    config = Config.chosen(config, preset)
    if resume is not None and not isinstance(resume, Progress):
        raise ConfigError(f"resume is a {type(resume).__name__}: allowed is a pwfn.progress.Progress")
    if distributed is None:
        distributed = distributed_for(device_of(model) if device is None else device)
    run, start = None, resume or Progress()
    try:
        with seeded(rank_seed(config.seed, distributed.rank), distributed.device):
            run = Run(model, train_loader, val_loader, config, distributed, loss_fn, metric, distill, start)
            run.keep, run.before_batch, run.on_step = keep, before_batch, on_step
            run.net.record = record or {}
            return run.whole(on_round)
    except BaseException as error:  # an interrupt too: hours of rounds are worth keeping
        error.progress = run.progress if run else start  # type: ignore[attr-defined]  # others can hold it
        raise


class Run:
    """One run: network, data, objective, and how far it has come."""

    keep: Keep | None = None
    before_batch: Callable[[], None] | None = None
    on_step: Callable[[StepEvent], None] | None = None

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
        progress: Progress = Progress(),  # noqa: B008  # a value: it never changes
    ) -> None:
        self.config, self.distributed, self.progress = config, distributed, progress
        self.phases = phases(config)
        self.train = Source("train_loader", batched(train_loader), distributed.device)
        trains = any(phase.epochs for phase in self.phases)
        start = unfolded(model, self.train, distributed) if trains else model
        self.net: Method = METHODS[config.method](start, config).to(distributed.device)
        self.searches = self.net.has_grid and config.target.wanted
        self.original = copy.deepcopy(model).to(distributed.device).eval()
        self.train = channels_last(self.train, self.original, config.training.precision)
        self.val: Source | None = None
        if val_loader is not None:
            self.val = replace(self.train, name="val_loader", loader=batched(val_loader)).repeatable()
            self.val = self.val.apart() if val_loader is train_loader else self.val
            if config.method in ("conditioned", "rate") and not distill:  # they can do without labels
                distill = comparison(next(self.val.batches(), None), self.original)
        self.scored, self.objective, self.metric = tasks(loss_fn, metric, distill, self.original, config)
        check_target(config.target, self.val is not None and self.metric is not None)
        takes_steps = trains or config.finish.takes_steps
        self.batches_per_epoch = self.train.steps_per_epoch(config.training) if takes_steps else 1
        self.threads = torch.get_num_threads() if distributed.device.type == "cpu" else 0
        self.scaler = loss_scaler(distributed.device, config.training)
        if progress.scaler:
            self.scaler.load_state_dict(progress.scaler)
        self.net.data = probe(self.net, self.train, self.scored, distributed)
        self.net.on_layer = lambda *at: self._at_layer(*at)  # a method would be copied with the network

    def whole(self, on_round: Callable[[Progress], None] | None = None) -> Result:
        """Everything that is left to do: the rounds, the choice where there is a target, the finish."""
        self._started = time.perf_counter() - self.progress.seconds
        if self.progress.network is None:
            self._start()
        self.progress.restore(self.net)
        self._warn(other_threads(self.progress.threads, self.threads))
        self.batches = self.train.endless(self.progress.batches)
        if self.progress.random is not None:
            restore_random_states(self.progress.random[self.distributed.rank])
        for number, phase in self._rounds_left():
            self._round(number, phase)
            if on_round is not None:
                on_round(self.progress)
        return self._finish()

    def _rounds_left(self) -> Iterator[tuple[int, Phase]]:
        """The rounds that are not done; where a target decides the step of a grid, one for each try."""
        done = self.progress.rounds[-1].fix.fraction if self.progress.rounds else 0.0
        for number, phase in enumerate(self.phases, 1):
            if phase.fraction > done:
                yield number, phase
        while self.searches:
            self.net.grid_step = next_step(self.progress.states, self.progress.before, self.config.target)
            if self.net.grid_step is None:
                return
            yield len(self.progress.rounds) + 1, self.phases[-1]

    def _start(self) -> None:
        """Score the original, and let the method find its starting values."""
        if self.config.finish.shrinks:  # what cannot be done is said now, not after all the work
            shrink_uncompressed(copy.deepcopy(self.net.model), self.config.finish)
        before = self.scores(self.original, Precision.FP32)
        found = doubts(before, self.phase_steps()) + kept_statistics(self.net, self.original)
        warnings = warn(found + left_out(self.net), self.distributed)
        self.start_network(self.net)
        start = trace.at_start(self.net.layout, self.net.state())
        self.progress = replace(self.progress, before=before, start=start, warnings=warnings)

    def start_network(self, net: Method) -> None:
        """Starting values that need data; the run's own pass over the data is not advanced."""
        with torch.no_grad():
            net.start(probe(net, self.train, self.scored, self.distributed))
        if self.distributed.world > 1:  # each has seen its own batches: all start as the first does
            net.load_state_dict(self.distributed.first(lambda: on_cpu(net.state_dict())))

    def _round(self, number: int, phase: Phase) -> None:
        """Train, fix, score; then the progress changes at once."""
        started = time.perf_counter()
        net, steps, where = self.net, self.steps_in(phase.epochs), f"round {number} of {len(self.phases)}"
        loss = None
        if steps:
            seed = seed_from("noise", self.config.seed, self.distributed.rank, number)
            optimizer = optimizer_for(net, self.config.training, seed, self.distributed)
            loss = self._fit(net, optimizer, steps, number, where, seed)
        before = trace.before_fixing(number, net.layout, state := net.state())
        quartiles, target, again = state.sigma_quartiles(), self.config.target, True
        while again:
            fixed = fix_alike(net, phase.fraction, self.distributed)
            states = [self._state(number, phase.fraction)] if target.wanted else []
            again = any(net.spare(state.excess_bytes(target)) for state in states)
        after = trace.after_fixing(number, fixed, net.layout, state := net.state())
        self.distributed.check_alike(f"{where}: the weights", net.own_tensors())
        made = Round(
            *(number, steps, loss, fixed),
            fixed=Pool.of(state.mu if state.fixed is None else state.mu[state.fixed]),
            sigma_quartiles=quartiles,
            scores=states[0].scores if self.searches else self.scores(net),
            seconds=time.perf_counter() - started,
            traces=(after,) if before is None else (before, after),
            rate_bytes=net.rate_bytes(),
        )
        done, kept = (*self.progress.rounds, made), (*self.progress.states, *states)
        warnings = self.progress.noted(warn(net.notes, self.distributed))
        self._advance(rounds=done, states=kept, warnings=warnings)

    def _warn(self, found: tuple[str, ...]) -> None:
        """Log these sentences, and keep them."""
        self.progress = replace(self.progress, warnings=self.progress.noted(warn(found, self.distributed)))

    def _state(self, number: int, fraction: float) -> State:
        """The whole network as it would be if the run ended here; the run itself is not affected."""
        with undisturbed(self.train, self.val):  # loaders that shuffle draw from random states
            net = self.net.rounded()
            fixed = FixedNetwork(net, net.finish())
            if self.config.finish.reestimate_epochs:
                self._reestimate(fixed, self.train.apart().endless())
            goes_on = len(self.phases) > 1 and not self.searches  # from this state, if it is chosen
            compressed = fixed.finish() if goes_on else fixed.shrunk()
            if wants_posterior(net, self.scored):  # in bytes, one posterior is as large as another
                compressed = replace(compressed, sigma_codes=(0,) * len(compressed.layout.entries))
            model, val = compressed.apply_to(copy.deepcopy(self.original)), self.val and self.val.apart()
            scores = self.scores(model, Precision.FP32, val)
        pool = Pool.of(compressed.values())
        made = self._recorded(compressed, round=number, **recorded(before=self.progress.before, after=scores))
        sized = goes_on and self.config.target.bytes is not None
        shrunk = replace(made, untouched=fixed.shrunk().untouched) if sized else None
        content, size = self.distributed.first(lambda: (dumps(made), len(dumps(shrunk)) if shrunk else None))
        return State(number, fraction, scores, pool.entropy_bits, pool.unique, content, net.grid_step, size)

    def _finish(self) -> Result:
        """Choose a state where there is a target, then what comes after the last fixing."""
        progress, finish, target = self.progress, self.config.finish, self.config.target
        choice = choose(progress.states, progress.before, target) if target.wanted else None
        last = len(progress.rounds)
        kept, finished = (last if made is None else made.round for made in (choice, progress.choice))
        if kept != finished:  # what was done of the finish was for another target
            self.progress = progress = replace(progress, uncompressed=None, finished=0, phase=None)
        earlier = (loads(state.content) for state in progress.states if state.round == kept < last)
        net = FixedNetwork(self.net, next(earlier, None) or self.net.finish())
        if progress.uncompressed is not None:
            net.model.load_state_dict(progress.uncompressed)
        # Statistics fit the point estimate, then the parameters the statistics, then once more.
        steps: tuple[tuple[bool, Callable[[FixedNetwork], object]], ...] = (
            (bool(finish.reestimate_epochs), self._reestimate),
            (self.polish_steps > 0, self._polish),
            (bool(finish.reestimate_epochs) and self.polish_steps > 0, self._reestimate),
            (finish.shrinks, lambda net: shrink_uncompressed(net.model, finish)),
        )
        for number, (wanted, step) in enumerate(steps):
            if number >= self.progress.finished:
                if wanted:
                    step(net)
                uncompressed = on_cpu(net.model.state_dict())
                self._advance(choice=choice, uncompressed=uncompressed, finished=number + 1)
        compressed = net.finish()
        codes, found = self.distributed.first(lambda: self._posterior(compressed))
        self._warn(found)
        return self._result(replace(compressed, sigma_codes=codes))

    def _posterior(self, compressed: Compressed) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """Codes of the predictive sigmas; None and a warning where the training data have none to give."""
        of = (self.net, self.train.apart(), self.scored, self.original, self.before_batch)
        try:
            with without_gradients(self.original):  # it may keep its outputs, and a graph cannot be copied
                return run_posterior(compressed, *of), ()
        except DataError as error:  # labels that training did not read, say: the network is there
            return None, (f"no posterior was fitted: {error}",)

    def _reestimate(self, net: FixedNetwork, batches: Stream | None = None) -> None:
        steps = steps_in(self.config.finish.reestimate_epochs or 0.0, self.batches_per_epoch)
        reestimate_batchnorm(net, batches or self.batches, steps, "BatchNorm re-estimation", self.distributed)

    @property
    def polish_steps(self) -> int:
        """Steps of polish: none where every parameter is compressed."""
        trained = any(p.requires_grad for p in self.net.model.parameters())
        return self.steps_in(self.config.finish.polish_epochs) if trained else 0

    def _polish(self, net: FixedNetwork) -> None:
        """Train the uncompressed parameters alone, with noise off."""
        optimizer = polish_optimizer(net.model, self.config.training)
        self._fit(net, optimizer, self.polish_steps, len(self.phases) + 1, "polish", None)

    def _result(self, compressed: Compressed) -> Result:
        after = self.scores(compressed.apply_to(copy.deepcopy(self.original)), Precision.FP32)
        steps = sum(done.steps for done in self.progress.rounds) + self.polish_steps
        summary, before = summarise(compressed.layout, compressed.values()), self.progress.before
        return Result(
            compressed=self._recorded(compressed, **recorded(before=before, after=after)),
            summary=summary,
            rounds=self.progress.rounds,
            before=before,
            fixed=self.progress.rounds[-1].scores,
            after=after,
            config=self.config,
            epochs=steps * self.config.training.accumulate / self.batches_per_epoch,
            seconds=self.progress.seconds,
            states=self.progress.states,
            choice=self.progress.choice,
            warnings=warn(ruin(before, after, summary.whole), self.distributed) + self.progress.warnings,
            _original=self.original,
        )

    def _recorded(self, compressed: Compressed, **facts: object) -> Compressed:
        """With what led to it in its record."""
        made = {"method": self.config.method, "settings": self.config.to_dict(), **facts}
        return replace(compressed, record={**compressed.record, **made, **self.net.record})

    def _fit(
        self, net: Trained, optimizer: Optimizer, steps: int, round_number: int, where: str, seed: int | None
    ) -> float:
        """One phase, from the beginning or from where the progress says that it was left."""
        training, plan = self.config.training, self.phase_steps()
        earlier, share = sum(plan[: round_number - 1]), training.accumulate / self.batches_per_epoch

        def on_loss(step: int, loss: float, learning_rate: float) -> None:
            if self.on_step is not None:
                at = (where, round_number, len(self.phases), step, steps, step * share, steps * share)
                done = (earlier + step) / sum(plan)
                rate = net.rate_bytes() if isinstance(net, Method) else None
                self.on_step(StepEvent(*at, loss, learning_rate, done, self.batches.drawn, rate))

        def after_step(step: int, snapshot: Callable[[], PhaseState]) -> None:
            if self.keep is not None:
                self.keep(lambda: self._in_phase(net, snapshot()), step == steps)

        loss = fit(
            *(net, self.batches, steps, self.objective),
            replace(training, scheduler=SchedulerName.NONE) if isinstance(net, FixedNetwork) else training,
            optimizer=optimizer,
            where=where,
            seed=seed,
            start=self.progress.phase,
            scaler=self.scaler,
            after_step=after_step,
            on_loss=on_loss,
            distributed=self.distributed,
        )
        # As with DistributedDataParallel, the first process's statistics are used by all.
        self.distributed.copy_first_([each for each in net.model.buffers() if each.dtype != torch.bool])
        return loss

    def _at_layer(self, layer: int, layers: int) -> None:
        if self.before_batch is not None and self.distributed.world == 1:  # it may stop the run
            self.before_batch()
        if self.on_step is not None and layer < layers:
            self.on_step(StepEvent.at_layer(layer, layers, len(self.progress.rounds) + 1))

    def _in_phase(self, net: Trained, phase: PhaseState) -> Progress:
        """The progress in the middle of a phase."""
        polishing = isinstance(net, FixedNetwork)
        state = on_cpu(net.model.state_dict() if polishing else net.state_dict())
        return self._now(phase=phase, **{"uncompressed" if polishing else "network": state})

    def _advance(self, **changes: Any) -> None:
        """The progress between two phases."""
        self.progress = self._now(network=on_cpu(self.net.state_dict()), phase=None, **changes)

    def _now(self, **changes: Any) -> Progress:
        return replace(
            self.progress,
            batches=self.batches.drawn,
            scaler=self.scaler.state_dict(),
            threads=self.threads,
            random=self.distributed.gather(random_states()),
            seconds=time.perf_counter() - self._started,
            **changes,
        )

    def phase_steps(self) -> list[int]:
        """Steps of each phase: of every round, and of polish."""
        return [*(self.steps_in(phase.epochs) for phase in self.phases), self.polish_steps]

    def steps_in(self, epochs: float) -> int:
        """Steps of the optimiser in a number of epochs."""
        return steps_in(epochs / self.config.training.accumulate, self.batches_per_epoch)

    def scores(
        self, model: nn.Module, precision: Precision | None = None, val: Source | None = None
    ) -> Scores | None:
        """Scores on the validation data, if there is any; in the precision of training unless given."""
        val = val or self.val
        if val is None:
            return None
        return mean_scores(
            *(model, val, self.scored, self.metric, precision or self.config.training.precision),
            distributed=self.distributed,
            # Processes may have different numbers of batches, so that they could not agree to stop here.
            before_batch=self.before_batch if self.distributed.world == 1 else None,
        )
