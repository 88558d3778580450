"""A compression run in a folder: started with one call, and resumed after a crash.

run/config.toml          all settings
run/log.jsonl            a line for the start, every epoch, round and state, and the end
run/trace.jsonl          the weights at the start, and before and after every fixing
run/checkpoints/         the newest two
run/states/              the network if the run ended after each round, where there is a target
run/model.pwfn           the result
run/record.json          its figures, and everything that led to them
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch

from pwfn.bayes.batchnorm import tracked
from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.method import METHODS, check_options
from pwfn.compress import compress
from pwfn.config import Config
from pwfn.errors import ConfigError, FileError
from pwfn.evaluate.verdict import LOGGER
from pwfn.file.format import load
from pwfn.file.header import Posterior
from pwfn.file.storage import clear_leftovers, make_folder, replacing
from pwfn.progress import Progress, StepEvent
from pwfn.result import Result
from pwfn.run.checkpoint import Keeper, Store
from pwfn.run.console import View, state_lines
from pwfn.run.lock import Lock
from pwfn.run.options import RunOptions
from pwfn.run.resolve import Resolved, resolve
from pwfn.run.scores import check_same
from pwfn.run.tensorboard import TensorBoard
from pwfn.version import __version__

_ASKED = ("data", "eval_data", "weights", "classes", "holdout", "limit", "test_batch_size", "posterior")
"""Options that the record keeps by name, so that the command can be repeated; the identity has contents."""


_WRITTEN = (
    *("config.toml", "log.jsonl", "trace.jsonl", "record.json", "model.pwfn", "weights.safetensors"),
    *("checkpoints/checkpoint-*.pt", "states/round-*.pwfn"),
)
"""All files that a run, or the demo, writes in its folder."""


def run(
    options: RunOptions, config: Config, view: View | None = None, distributed: Distributed | None = None
) -> Result:
    """Compress a network by name on data by name, and leave everything in a folder.

    With several processes all do the work, and the first one writes and shows.
    """
    _check(options.posterior, config)
    distributed = distributed or distributed_for(options.device)
    with ExitStack() as stack:
        lock = stack.enter_context(Lock(options.out))
        distributed.first(lambda: _enter(options, lock))
        found = resolve(options, config, distributed)
        store = Store(options.out / "checkpoints", found.identity)
        progress = store.newest() if options.resume else None
        if options.resume and progress is None and store.paths():
            raise FileError(
                f"{store.folder}: every checkpoint is damaged: remove them to start again, or use another "
                "folder"
            )
        distributed.largest([0])  # a barrier: nobody writes before all have read
        views = [] if view is None or not distributed.leads else [stack.enter_context(view)]
        if options.tensorboard and distributed.leads:
            curves = TensorBoard(options.out / "tensorboard", _steps_done(progress))
            views.append(stack.enter_context(curves))
        keeper = stack.enter_context(Keeper(options.out, store, options.checkpoint_minutes, distributed))
        journal = _Journal(options, views, store, distributed, progress)
        stack.enter_context(journal)
        journal.begin(found, config, progress)
        result = compress(
            found.model,
            found.data.train,
            found.data.test,
            config,
            distill=found.distill,
            on_round=journal.round,
            on_step=journal.step,
            resume=progress,
            keep=keeper,
            before_batch=keeper.before_batch,
            record={  # what a file must hold to be scored again by name
                "model": options.model,
                **({"classes": found.classes} if found.classes is not None else {}),
                "data": found.data.fingerprint,
                "preparation": asdict(found.preparation),
            },
            distributed=distributed,
        )
        result = replace(result, saved_bytes=distributed.first(lambda: _save(result, options)))
        journal.end(result, found)
    return result


def _enter(options: RunOptions, lock: Lock) -> None:
    """Make the folder this run's own, and remove what a killed run left half written."""
    prepare(options.out, options.resume)
    lock.take()
    prepare(options.out, options.resume)  # again: a run may have ended there in between
    clear_leftovers(options.out, _WRITTEN)


def prepare(folder: Path, resume: bool = False) -> None:
    """Make the folder of a run; an error if it holds a run that is not to be resumed."""
    try:
        used = any((folder / "checkpoints").glob("checkpoint-*.pt")) or (folder / "model.pwfn").exists()
    except OSError as error:  # a folder of another user
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if used and not resume:
        raise FileError(f"{folder}: already holds a run: resume it with --resume, or use another folder")
    make_folder(folder)  # first, so that an error names it
    make_folder(folder / "checkpoints")


def _check(wanted: str | None, config: Config) -> None:
    """What the method's own settings and the posterior must be, before the work and not after it."""
    check_options(METHODS[config.method], config)
    if wanted is not None and wanted not in list(Posterior):
        raise ConfigError(f"posterior is {wanted!r}: allowed is one of {', '.join(Posterior)}")
    if wanted not in (None, Posterior.NONE) and not METHODS[config.method].has_posterior:
        raise ConfigError(f"posterior is {wanted!r}: {config.method} has none to store; leave it out")


def _save(result: Result, options: RunOptions) -> int:
    """Write the file, check that it reads back as the network that was scored, and return its size."""
    path = options.out / "model.pwfn"
    size = result.save(path, posterior=options.posterior)
    check_same(path, result.compressed)
    return size


class _Journal(logging.Handler):
    """Writes log, trace, states and record, and tells the views; in the first process only.

    Within a ``with`` block it also shows what the run logs, instead of standard error.
    """

    def __init__(
        self,
        options: RunOptions,
        views: list[View],
        store: Store,
        distributed: Distributed,
        progress: Progress | None,
    ) -> None:
        super().__init__(logging.WARNING)
        self._options, self._folder = options, options.out
        self._views, self._store, self._distributed = views, store, distributed
        self._events: list[StepEvent] = []  # since the last line of an epoch
        self._first = self._rounds = len(progress.rounds) if progress else 0
        self._log = options.out / "log.jsonl"

    def __enter__(self) -> Self:
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)

    def begin(self, found: Resolved, config: Config, progress: Progress | None) -> None:
        """Log and show what begins, or from where it resumes."""
        if not self._distributed.leads:
            return
        batches = progress.batches if progress else 0
        self._cut(batches if progress else -1)
        _write(self._folder / "config.toml", config.to_toml())
        self._add("start", batches, {"identity": found.identity, **_machine(self._distributed)})
        title = f"{self._options.model} on {found.data.name}"
        if progress is not None:
            title += f"; resuming after round {self._rounds} and {batches:,} batches"
        # Statistics of noisy training do not fit the point estimate: its accuracy would say little.
        fits = not config.finish.reestimate_epochs or not tracked(found.model)
        for view in self._views:
            view.begin(title, progress.rounds if progress else (), metric=found.measure if fits else "")

    def step(self, now: StepEvent) -> None:
        """Show it; log a line at the end of every epoch and of every phase."""
        for view in self._views:
            view.step(now)
        self._events.append(now)
        if int(now.epoch) > int(self._events[0].epoch) or now.step == now.steps:
            loss = statistics.fmean(event.loss for event in self._events)
            self._add("epoch", now.batches, asdict(replace(now, loss=loss)))
            self._events = []

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning before the first round is done; those of the end are printed with the result."""
        if self._rounds == self._first:
            for view in self._views:
                for line in textwrap.wrap(f"WARNING: {record.getMessage()}", 76):
                    view.say(line)

    def round(self, now: Progress) -> None:
        """Log a round, write a checkpoint, and show it."""
        self._rounds = len(now.rounds)
        self._distributed.first(lambda: self._write_round(now))
        for view in self._views:
            view.round(now.rounds[-1])

    def _write_round(self, now: Progress) -> None:
        """The checkpoint comes last: a run that is killed before it repeats the round, and its lines."""
        self._add("round", now.batches, now.rounds[-1].to_dict())
        # Written as a whole: it is small, and what a killed run wrote after its checkpoint is dropped.
        _write(self._folder / "trace.jsonl", "".join(trace.to_line() + "\n" for trace in now.traces))
        if now.states:
            state = now.states[-1]
            make_folder(self._folder / "states")
            _write(self._folder / "states" / f"round-{state.round:02d}.pwfn", state.content)
            self._add("state", now.batches, state.to_dict())
        self._store.save(now)

    def end(self, result: Result, found: Resolved) -> None:
        """Write the record."""
        if not self._distributed.leads:
            return
        asked = {name: getattr(self._options, name) for name in _ASKED}
        record = {
            **result.to_dict(),
            "content_sha256": load(self._folder / "model.pwfn").content_sha256(),
            "identity": found.identity,
            "asked": asked,
            "machine": _machine(self._distributed),
        }
        _write(self._folder / "record.json", json.dumps(record, indent=1) + "\n")
        self._add("end", None, {"seconds": result.seconds})
        for view in self._views:
            for line in state_lines(result.states):
                view.say(line)

    def _add(self, event: str, batches: int | None, facts: Mapping[str, Any]) -> None:
        """Add a JSON object to the log as one line."""
        if not self._distributed.leads:
            return
        place = {} if batches is None else {"batches": batches, "rounds_done": self._rounds}
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **facts, **place}) + "\n")
        except OSError as error:
            raise FileError(f"{self._log}: cannot be written: {error.strerror or error}") from error

    def _cut(self, batches: int) -> None:
        """Keep the lines up to this point of the run: those after it are written again.

        A line that was truncated when the run was killed is dropped, and so is that of the end.
        """
        kept = []
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        for line in text.splitlines():
            try:
                facts = json.loads(line)
                if facts["batches"] <= batches and facts["rounds_done"] <= self._rounds:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        _write(self._log, "".join(kept))


def _steps_done(progress: Progress | None) -> int:
    if progress is None:
        return 0
    return sum(done.steps for done in progress.rounds) + (progress.phase.step if progress.phase else 0)


def _machine(distributed: Distributed) -> dict[str, Any]:
    is_cuda = distributed.device.type == "cuda"
    processor = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(distributed.device) if is_cuda else processor,
        "processes": distributed.world,
        "threads": torch.get_num_threads(),
        "versions": {"pwfn": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _write(path: Path, content: str | bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
