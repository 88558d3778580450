"""A compression run in a folder: started with one call, watched in its log, gone on with after a crash.

run/config.toml          the settings, whole
run/log.jsonl            a line for the start, for every epoch, round and state, and for the end
run/observed.jsonl       what was seen of the weights at the start, and before and after every fixing
run/checkpoints/         the newest two
run/states/              the network as it would be after each round, where that was asked for
run/model.pwfn           the result
run/record.json          its figures, measured on that file, and all that led to them
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.compress import Result, compress
from pwfn.config import Config
from pwfn.errors import ConfigError, FileError
from pwfn.evaluate.targets import State, pareto
from pwfn.file.header import Posterior
from pwfn.file.storage import clear_leftovers, make_folder, replacing
from pwfn.lab import baselines as methods
from pwfn.progress import Progress, StepEvent
from pwfn.run.checkpoint import Store
from pwfn.run.console import Several, Silent, TensorBoard, View
from pwfn.run.interrupt import Keeper
from pwfn.run.options import RunOptions
from pwfn.run.resolve import Opened, opened
from pwfn.run.scores import check_same, scores, sizes, summary_line
from pwfn.version import __version__

_ASKED = ("data", "weights", "classes", "holdout", "limit", "test_batch_size", "posterior")
"""What a run was asked for by name, so that its command can be told again; the identity has contents."""


def run(
    options: RunOptions, config: Config, view: View | None = None, distributed: Distributed | None = None
) -> dict[str, Any]:
    """Compress a network by name on data by name, and return the figures of the file it ends in.

    With several processes all do the work, and the first alone writes and shows.
    """
    _check_posterior(options.posterior, config)
    distributed = distributed or distributed_for(options.device)
    view = view if view is not None and distributed.leads else Silent()
    distributed.first(lambda: _prepare(options.out, options.resume))
    found = opened(options, config, distributed)
    store = Store(options.out / "checkpoints", found.identity)
    distributed.first(lambda: clear_leftovers(options.out))
    progress = store.newest() if options.resume else None
    if options.resume and progress is None and store.paths():
        raise FileError(
            f"{store.folder}: every checkpoint is damaged: remove them to begin again, or name another folder"
        )
    distributed.largest([0])  # nobody writes before all have read
    if options.tensorboard and distributed.leads:
        view = Several([view, TensorBoard(options.out / "tensorboard", _steps_done(progress))])
    with view, Keeper(options.out, store, options.checkpoint_minutes, distributed) as keeper:
        diary = _Diary(options, view, store, distributed, progress)
        diary.begin(found, config, progress)
        result = compress(
            found.model,
            found.data.train,
            found.data.test,
            config,
            on_round=diary.round,
            on_step=diary.pulse,
            resume=progress,
            keep=keeper,
            between=keeper.between,
            record=_record(options, found),
            distributed=distributed,
        )
        facts = _finish(options, found, result, distributed)
        diary.end(facts)
    return facts


def _check_posterior(wanted: str | None, config: Config) -> None:
    """Before the work, not after it."""
    if wanted is not None and wanted not in list(Posterior):
        raise ConfigError(f"posterior is {wanted!r}: allowed is one of {', '.join(Posterior)}")
    if wanted not in (None, Posterior.NONE) and not methods.of(config).has_posterior:
        raise ConfigError(f"posterior is {wanted!r}: {config.method} has none to keep; leave it out")


def _finish(options: RunOptions, found: Opened, result: Result, distributed: Distributed) -> dict[str, Any]:
    """Write the file, read it back, and score what is in it."""
    path = options.out / "model.pwfn"

    def write() -> dict[str, Any]:
        result.save(path, posterior=options.posterior)
        check_same(path, result.compressed)
        return sizes(path)

    measured = distributed.first(write)
    # The file holds these very weights: so every process scores its share of the data on its own copy.
    after = scores(result.model(), found.data, distributed)
    facts = {
        "before": result.before.to_dict() if result.before else None,
        "after": after.to_dict(),
        **measured,
        "epochs": result.epochs,
        "seconds": result.seconds,
    }
    if result.choice is not None:
        facts["choice"] = {**asdict(result.choice), "met_in_the_end": result.target_met}
    return facts


def _record(options: RunOptions, found: Opened) -> dict[str, Any]:
    """What a file must know to be scored again by name."""
    classes = {"classes": found.classes} if found.classes is not None else {}
    return {
        "model": options.model,
        **classes,
        "data": found.data.fingerprint,
        "preparation": asdict(found.preparation),
    }


@dataclass(frozen=True)
class _Moment:
    """Where a line of the log belongs: after so many batches and rounds."""

    batches: int
    rounds: int


class _Diary:
    """Shows a run, and keeps its log and its checkpoints; silent in all processes but the first."""

    def __init__(
        self,
        options: RunOptions,
        view: View,
        store: Store,
        distributed: Distributed,
        progress: Progress | None,
    ) -> None:
        self._folder, self._view, self._store, self._team = options.out, view, store, distributed
        self._options = options
        self._epoch: list[StepEvent] = []
        self._rounds = len(progress.rounds) if progress else 0
        self._log: _Log | None = None
        if distributed.leads:
            moment = _Moment(progress.batches, len(progress.rounds)) if progress else None
            self._log = _Log(options.out / "log.jsonl", moment)

    def begin(self, found: Opened, config: Config, progress: Progress | None) -> None:
        """Say what begins, or from where it goes on."""
        if self._log is None:
            return
        self._identity = found.identity
        _write_text(self._folder / "config.toml", config.to_toml())
        batches = progress.batches if progress else 0
        line = {"event": "start", "batches": batches, "rounds": self._rounds, "identity": found.identity}
        self._log.add({**line, **_machine(self._team)})
        title = f"{self._options.model} on {found.data.name}, into {self._folder}"
        if progress is not None:
            title += f"; going on after round {self._rounds} and {batches:,} batches"
        rounds = len(methods.of(config).plan(config))
        self._view.begin(title, rounds, progress.rounds if progress else ())

    def pulse(self, now: StepEvent) -> None:
        """Show it; and write a line at the end of every epoch and of every stretch."""
        if self._log is None:
            return
        self._view.pulse(now)
        first = self._epoch[0] if self._epoch else now
        self._epoch.append(now)
        if int(now.epoch) > int(first.epoch) or now.step == now.steps:
            losses = [pulse.loss for pulse in self._epoch]
            self._log.add(
                {
                    "event": "epoch",
                    "batches": now.batches,
                    "rounds": self._rounds,
                    "stage": now.stage,
                    "epoch": now.epoch,
                    "step": now.step,
                    "loss": sum(losses) / len(losses),
                    "learning_rate": now.learning_rate,
                }
            )
            self._epoch = []

    def round(self, now: Progress) -> None:
        """Log, checkpoint and show a round; keep its state where there is one."""
        self._epoch, self._rounds = [], len(now.rounds)
        self._team.first(lambda: self._write_round(now))
        self._view.round(now.rounds[-1])

    def _write_round(self, now: Progress) -> None:
        """The checkpoint comes last: a run that is killed before it does the round, and its lines, again."""
        where = {"batches": now.batches, "rounds": len(now.rounds)}
        if self._log is not None:
            self._log.add({"event": "round", **where, **now.rounds[-1].to_dict()})
            # Whole each time: it is small, and what a killed run had written beyond its checkpoint goes.
            lines = "".join(seen.to_line() + "\n" for seen in now.observed)
            _write_text(self._folder / "observed.jsonl", lines)
            if now.states:
                state = now.states[-1]
                path = _state_path(self._folder, state)
                _write_bytes(path, state.content)
                self._log.add({"event": "state", **where, **state.to_dict(), "file": str(path)})
        self._store.save(now)

    def end(self, facts: dict[str, Any]) -> None:
        """Write the record, and say what came of it all."""
        if self._log is None:
            return
        states = [line for line in self._log.lines() if line["event"] == "state"]
        record = {
            **facts,
            "identity": self._identity,
            "asked": {name: getattr(self._options, name) for name in _ASKED},
            "machine": _machine(self._team),
            "rounds": [line for line in self._log.lines() if line["event"] == "round"],
            "states": states,
        }
        _write_text(self._folder / "record.json", json.dumps(record, indent=1) + "\n")
        self._log.add({"event": "end", **facts})
        for line in table_of_states(states):
            self._view.say(line)
        if "choice" in facts:
            self._view.say(f"kept {facts['choice']['why']}")
        self._view.end(summary_line(facts))


def table_of_states(states: list[dict[str, Any]]) -> list[str]:
    """The states of a run, a line each; a star is at those that no other beats in accuracy and size."""
    if not states:
        return []
    best = pareto([(state["metric"] or 0.0, state["file_bytes"]) for state in states])
    lines = ["as it would be after each round:   accuracy  entropy  unique      bytes  best for its size"]
    for state, is_best in zip(states, best, strict=True):
        score = f"{state['metric']:.2%}" if state["metric"] is not None else "-"
        lines.append(
            f"{state['round']:>5}  {state['fraction']:>6.1%} fixed {score:>21}  "
            f"{state['entropy_bits']:>7.3f}  {state['unique']:>6}  {state['file_bytes']:>9,}"
            f"  {'*' if is_best else ''}".rstrip()
        )
    return lines


class _Log:
    """Lines of JSON; those after the point that a run goes on from are dropped, as they come again."""

    def __init__(self, path: Path, moment: _Moment | None) -> None:
        self._path = path
        kept = [line for line in self.lines() if moment is not None and _is_before(line, moment)]
        _write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, facts: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:
            raise FileError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def lines(self) -> list[dict[str, Any]]:
        """What is in it; a line that was torn as the run was killed is left out."""
        if not self._path.exists():
            return []
        found = []
        for text in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "event" in line:
                found.append(line)
        return found


def _is_before(line: Mapping[str, Any], moment: _Moment) -> bool:
    batches = line.get("batches", moment.batches + 1)  # a line without them is the last of a finished run
    return bool(batches <= moment.batches and line.get("rounds", 0) <= moment.rounds)


def _prepare(folder: Path, resume: bool) -> None:
    try:
        used = any((folder / "checkpoints").glob("checkpoint-*.pt")) or (folder / "model.pwfn").exists()
    except OSError as error:  # a folder of somebody else's
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if used and not resume:
        raise FileError(f"{folder}: holds a run already: go on with it by --resume, or name another folder")
    for path in (folder, folder / "checkpoints"):
        make_folder(path)


def _steps_done(progress: Progress | None) -> int:
    if progress is None:
        return 0
    begun = progress.fitting.step if progress.fitting else 0
    return sum(done.steps for done in progress.rounds) + begun


def _state_path(folder: Path, state: State) -> Path:
    make_folder(folder / "states")
    return folder / "states" / f"round-{state.round:02d}.pwfn"


def _machine(distributed: Distributed) -> dict[str, Any]:
    is_cuda = distributed.device.type == "cuda"
    name = (
        torch.cuda.get_device_name(distributed.device)
        if is_cuda
        else platform.processor() or platform.machine()
    )
    versions = {"pwfn": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"device": name, "processes": distributed.world, "versions": versions}


def _write_text(path: Path, text: str) -> None:
    _write_bytes(path, text.encode())


def _write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
