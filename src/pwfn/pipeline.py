"""The whole method in one call: warm-up, rounds of training and fixing, and the finish."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.batches import Source
from pwfn.compressed import Compressed
from pwfn.config import Config
from pwfn.errors import ConfigError, WeightError
from pwfn.metrics import Pool, Summary, summarise
from pwfn.posterior import FixRecord, GaussianNetwork
from pwfn.randomness import random_states, restore_random_states, seeded
from pwfn.training import (
    Fitting,
    LossFn,
    Objective,
    Scores,
    accuracy,
    divergence,
    evaluate,
    finite,
    fit,
    reestimate_batchnorm,
    steps_in,
)


@dataclass(frozen=True)
class Round:
    """The facts of one round, after its fixing."""

    number: int  # from 1
    steps: int  # training steps before the fixing
    loss: float | None  # mean task loss over them; None for no steps
    fix: FixRecord
    fixed: Pool  # over the weights fixed so far
    sigma_quartiles: tuple[float, float, float]  # of the weights that were free in training
    scores: Scores | None  # of the point estimate on the validation data
    seconds: float


@dataclass
class Progress:
    """How far a run has come: its rounds, and all that it takes to go on after the last of them.

    An error raised in mid-run carries it as ``error.progress``; ``compress(..., resume=progress)``
    goes on from there, with the same settings or with others (a lower learning rate, say). With the
    same settings, and loaders that give the same epochs again (:class:`pwfn.data.Epochs`), the result
    is the very one that the uninterrupted run would have had.
    """

    rounds: list[Round] = field(default_factory=list)
    before: Scores | None = None
    state: dict[str, Any] | None = None  # state dict of the GaussianNetwork, on the CPU
    finished: int = 0  # how many of the steps after the last round are done
    batches: int = 0  # batches drawn from the training data
    random: dict[str, Any] | None = None  # every random state
    fitting: Fitting | None = None  # a stretch of training that was begun, if in the midst of one

    def network(self, model: nn.Module, config: Config | None = None) -> GaussianNetwork:
        """The network as it was after the last finished round, made from the original model."""
        net = GaussianNetwork(model, config)
        self.restore(net)
        return net

    def restore(self, net: GaussianNetwork) -> None:
        """Put a network into the state after the last finished round."""
        if self.state is None:
            return
        try:
            net.load_state_dict(self.state)
        except RuntimeError as error:
            raise WeightError(
                "the progress does not fit the model: it is of another network, or of other "
                "layout.include and layout.exclude"
            ) from error


Keep = Callable[[Callable[[], Progress]], None]
"""Is given, after every step, a function that takes the progress at that step."""


@dataclass(frozen=True)
class Result:
    """What ``compress`` returns."""

    compressed: Compressed
    summary: Summary
    rounds: tuple[Round, ...]
    before: Scores | None  # the original network on the validation data
    fixed: Scores | None  # just after the last fixing
    after: Scores | None  # at the end, measured on the decoded weights
    config: Config
    _original: nn.Module = field(repr=False)

    def save(
        self, path: str | Path, *, posterior: str = "centre", record: Mapping[str, Any] | None = None
    ) -> int:
        """Write a .pwfn file and return its size in bytes; see :func:`pwfn.fileformat.save`."""
        return self.compressed.save(path, posterior=posterior, record=record)

    def model(self) -> nn.Module:
        """A new copy of the original model with the compressed weights in it, in evaluation mode."""
        return self.compressed.apply_to(copy.deepcopy(self._original)).eval()


def compress(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    config: Config | None = None,
    loss_fn: LossFn = F.cross_entropy,
    *,
    metric: LossFn | None = None,
    distill: bool | LossFn = False,
    device: torch.device | str | None = None,
    on_round: Callable[[Progress], None] | None = None,
    resume: Progress | None = None,
    keep: Keep | None = None,
) -> Result:
    """Turn a pre-trained network into one whose weights take a handful of values.

    Args:
        model: any eager model with convolution or linear layers; left as it is.
        train_loader: batches ``(input, …, target)``, mappings with ``labels`` or ``target``, or
            inputs alone with ``distill``; iterated again for every epoch.
        val_loader: where given, every round is scored on it.
        config: ``Config.preset("recommended")`` unless given.
        loss_fn: a function of the model's output and the target.
        metric: a mean over the batch to report beside the loss; accuracy for cross entropy, unless
            ``distill`` is a function.
        distill: ``True``: the loss is the divergence from the original network's softmax output,
            so that unlabelled data will do; or a function of output and original output.
        device: where to run; the model's own unless given.
        on_round: called after every round with the progress so far.
        resume: the progress of a run that stopped; left as it is.
        keep: called after every training step with a function that gives the progress at that very
            step, to be called (and its result stored) only now and then.

    The same seed on the same machine gives a bit-identical result. Random states are put back as
    they were. An error in mid-run, or an interrupt, carries what was reached as ``error.progress``.

    >>> data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(2)]
    >>> result = compress(nn.Linear(4, 2), data)
    >>> result.compressed.values().numel()
    10
    """
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}: allowed is a pwfn.Config, such as "
            'pwfn.Config.preset("paper")'
        )
    resume = Progress() if resume is None else resume
    if not isinstance(resume, Progress):
        raise ConfigError(f"resume is a {type(resume).__name__}: allowed is a pwfn.Progress")
    where = usable_device(_device_of(model) if device is None else device)
    with seeded(config.seed, where):
        run = _Run(model, train_loader, val_loader, config, where, loss_fn, metric, distill)
        progress = replace(resume, rounds=list(resume.rounds))
        try:
            return run.whole(progress, on_round, keep)
        except BaseException as error:  # an interrupt too: hours of rounds are worth keeping
            error.progress = progress  # type: ignore[attr-defined]  # ours declare it, others can hold it
            raise


class _Run:
    """One run's fixed parts: network, data and objective."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None,
        config: Config,
        device: torch.device,
        loss_fn: LossFn,
        metric: LossFn | None,
        distill: bool | LossFn,
    ) -> None:
        self.config = config
        self.net = GaussianNetwork(model, config).to(device)
        self.original = copy.deepcopy(model).to(device).eval()
        self.train = Source("train_loader", train_loader, device)
        self.val = Source("val_loader", val_loader, device) if val_loader is not None else None
        compare = divergence if distill is True else distill or None
        is_cross_entropy = loss_fn is F.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss)
        classifies = is_cross_entropy and compare in (None, divergence)
        self.metric = metric or (accuracy if classifies else None)
        self.objective = Objective(loss_fn, self.original if compare else None, compare)
        self.epoch = self.train.steps_per_epoch(config.training)

    def whole(
        self, progress: Progress, on_round: Callable[[Progress], None] | None, keep: Keep | None
    ) -> Result:
        schedule = self.config.schedule
        if progress.state is None:
            progress.before = self.scores(self.original)
        progress.restore(self.net)
        self.batches = self.train.endless(progress.batches)
        self.keep, self.progress = keep, progress
        if progress.random is not None:
            restore_random_states(progress.random)
        reached = progress.rounds[-1].fix.fraction if progress.rounds else 0.0
        for number, fraction in enumerate(schedule.fractions, 1):
            if fraction <= reached:
                continue
            progress.rounds.append(self.round(number, fraction))
            self.advance()
            if on_round is not None:
                on_round(progress)
        # Statistics fit the point estimate, then the parameters the statistics, then once more.
        for number, step in enumerate((self.reestimate, self.polish, self.reestimate)):
            if number >= progress.finished:
                step()
                progress.finished = number + 1
                self.advance()
        compressed = self.net.finish()
        after = self.scores(compressed.apply_to(copy.deepcopy(self.original)))
        return Result(
            compressed=replace(compressed, record=_record(self.config, progress, after)),
            summary=summarise(compressed.layout, compressed.values()),
            rounds=tuple(progress.rounds),
            before=progress.before,
            fixed=progress.rounds[-1].scores,
            after=after,
            config=self.config,
            _original=self.original,
        )

    def advance(self) -> None:
        """Note where the run is, between two stretches of training."""
        progress = self.progress
        progress.state, progress.fitting = _on_cpu(self.net.state_dict()), None
        progress.batches, progress.random = self.batches.drawn, random_states()

    def fit(self, optimizer: torch.optim.Optimizer, steps: int, where: str) -> float:
        """Train, from the beginning or from where the progress says that this stretch was left."""
        start, self.progress.fitting = self.progress.fitting, None
        return fit(
            self.net,
            self.batches,
            steps,
            self.objective,
            self.config.training,
            optimizer=optimizer,
            where=where,
            start=start,
            after_step=self.after_step if self.keep is not None else None,
        )

    def after_step(self, snapshot: Callable[[], Fitting]) -> None:
        def progress() -> Progress:
            fitting = snapshot()
            return replace(
                self.progress,
                rounds=list(self.progress.rounds),
                state=_on_cpu(self.net.state_dict()),
                batches=self.batches.drawn,
                random=random_states(),
                fitting=fitting,
            )

        if self.keep is not None:
            self.keep(progress)

    def round(self, number: int, fraction: float) -> Round:
        """Train with fresh optimiser state, then fix up to the fraction."""
        started = time.perf_counter()
        config, net, schedule = self.config.training, self.net, self.config.schedule
        epochs = schedule.warmup_epochs if number == 1 else schedule.epochs_per_round
        steps = steps_in(epochs, self.epoch)
        optimizer = torch.optim.SGD(
            net.parameter_groups(
                lr=config.learning_rate,
                sigma_lr=config.sigma_learning_rate,
                weight_decay=config.weight_decay,
            ),
            momentum=config.momentum,
        )
        where = f"round {number} of {len(schedule.fractions)}"
        loss = self.fit(optimizer, steps, where) if steps else None
        quartiles = _quartiles(net.sigma[~net.fixed].detach())
        record = net.fix(fraction)
        return Round(
            number=number,
            steps=steps,
            loss=loss,
            fix=record,
            fixed=Pool.of(net.mu[net.fixed].detach()),
            sigma_quartiles=quartiles,
            scores=self.scores(net),
            seconds=time.perf_counter() - started,
        )

    def reestimate(self) -> None:
        """Gather BatchNorm statistics at the point estimate; the second time only if polish changed it."""
        finish = self.config.finish
        if finish.reestimate_batchnorm and (self.progress.finished == 0 or self.polish_steps):
            steps = steps_in(finish.reestimate_epochs, self.epoch)
            reestimate_batchnorm(self.net, self.batches, steps, "BatchNorm re-estimation")

    @property
    def polish_steps(self) -> int:
        """Steps of polish: none where every parameter is compressed."""
        trained = any(p.requires_grad for p in self.net.model.parameters())
        return steps_in(self.config.finish.polish_epochs, self.epoch) if trained else 0

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
        with self.net.sampling(False):
            self.fit(optimizer, self.polish_steps, "polish")

    def scores(self, model: nn.Module) -> Scores | None:
        if self.val is None:
            return None
        precision = self.config.training.precision
        return evaluate(model, self.val, self.objective, self.metric, precision)


def _record(config: Config, progress: Progress, after: Scores | None) -> dict[str, Any]:
    """The facts of a run that its file keeps, as JSON can hold them."""
    return {
        "method": "pwfn",
        "settings": config.to_dict(),
        "before": progress.before.to_dict() if progress.before else None,
        "after": after.to_dict() if after else None,
        "rounds": [
            {
                "fraction": done.fix.fraction,
                "loss": finite(done.loss),
                "metric": finite(done.scores.metric) if done.scores else None,
                "entropy_bits": done.fixed.entropy_bits,
                "unique": done.fixed.unique,
            }
            for done in progress.rounds
        ],
    }


def _device_of(model: nn.Module) -> torch.device:
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


def usable_device(device: torch.device | str) -> torch.device:
    """A device by name, tried out; one that cannot be used is an error."""
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used: allowed is one that this torch can reach, such as "
            '"cpu" or "cuda:0"'
        ) from error
    return chosen


def _quartiles(values: Tensor) -> tuple[float, float, float]:
    if values.numel() == 0:
        return (0.0, 0.0, 0.0)
    ascending = values.sort().values
    at = [round(q * (values.numel() - 1)) for q in (0.25, 0.5, 0.75)]
    low, middle, high = ascending[at].tolist()
    return (low, middle, high)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
