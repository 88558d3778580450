"""The whole method in one call: warm-up, rounds of training and fixing, and the finish."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.objective import LossFn, Scores, finite
from pwfn.bayes.randomness import rank_seed, seeded
from pwfn.config import Config, Precision
from pwfn.errors import ConfigError
from pwfn.evaluate.entropy import Summary, summarise
from pwfn.evaluate.targets import Choice, State, meets
from pwfn.file.compressed import Compressed
from pwfn.progress import Keep, Progress, Round, StepEvent
from pwfn.rounds import Run


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
    epochs: float  # trained, polish included
    seconds: float  # of work, in all the processes that went on with it
    _original: nn.Module = field(repr=False)
    states: tuple[State, ...] = ()  # after each round, where they were asked for
    choice: Choice | None = None  # of one of them, where there was a target
    target_met: bool | None = None  # by the figures at the end

    def save(
        self, path: str | Path, *, posterior: str | None = None, record: Mapping[str, Any] | None = None
    ) -> int:
        """Write a .pwfn file and return its size in bytes; see :func:`pwfn.file.format.save`."""
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
    on_step: Callable[[StepEvent], None] | None = None,
    resume: Progress | None = None,
    keep: Keep | None = None,
    between: Callable[[], None] | None = None,
    record: Mapping[str, Any] | None = None,
    distributed: Distributed | None = None,
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
            so that unlabelled data will do; or a function of output and original output. Scores are
            by it too. (With ``training.distill`` only training is; ``training.distill_share`` is for both.)
        device: where to run; the model's own unless given.
        on_round: called after every round with the progress so far.
        on_step: called a few times a second in training.
        resume: the progress of a run that stopped; left as it is.
        keep: called after every training step with a function that gives the progress at that very
            step, to be called (and its result stored) only now and then; see :data:`pwfn.progress.Keep`.
        between: called before every batch of validation data; it may raise.
        record: facts to keep in the file beside those of the run, as JSON can hold them.
        distributed: the processes of this run; those it was launched with (torchrun, accelerate launch)
            unless given. ``pwfn.Distributed(device)`` runs alone in any case.

    The same seed on the same machine gives a bit-identical result. Random states are put back as
    they were. An error in mid-run, or an interrupt, carries what was reached as ``error.progress``.

    With several processes each calls this alike, with its own share of the data: a step averages
    their gradients, each draws its own noise, and their clusters are compared after every round.

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
    if distributed is None:
        distributed = distributed_for(_device_of(model) if device is None else device)
    with seeded(rank_seed(config.seed, distributed.rank), distributed.device):
        run = Run(model, train_loader, val_loader, config, distributed, loss_fn, metric, distill)
        progress = replace(resume, rounds=list(resume.rounds), states=list(resume.states))
        run.progress, run.keep, run.between, run.on_step = progress, keep, between, on_step
        run.record = dict(record or {})
        try:
            run.whole(on_round)
            return _result(run)
        except BaseException as error:  # an interrupt too: hours of rounds are worth keeping
            error.progress = progress  # type: ignore[attr-defined]  # ours declare it, others can hold it
            raise


def _result(run: Run) -> Result:
    """What has come out, once nothing is left to do."""
    progress, target = run.progress, run.config.target
    compressed = run.net.finish()
    after = run.scores(compressed.apply_to(copy.deepcopy(run.original)), Precision.FP32)
    summary = summarise(compressed.layout, compressed.values())
    bits = summary.whole.entropy_bits
    return Result(
        compressed=replace(
            compressed, record={**compressed.record, **_record(run.config, progress, after), **run.record}
        ),
        summary=summary,
        rounds=tuple(progress.rounds),
        before=progress.before,
        fixed=progress.rounds[-1].scores,
        after=after,
        config=run.config,
        epochs=run.epochs,
        seconds=progress.seconds,
        states=tuple(progress.states),
        choice=progress.choice,
        target_met=meets(target, progress.before, after, bits) if target.wanted else None,
        _original=run.original,
    )


def _record(config: Config, progress: Progress, after: Scores | None) -> dict[str, Any]:
    """The facts of a run that its file keeps, as JSON can hold them."""
    return {
        "method": str(config.method),
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
