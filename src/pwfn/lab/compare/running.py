"""The runs of a table, each in a process of its own; those that are done are not run again.

OUT/<model>/<row>/seed<N>/    a run, as `pwfn compress` leaves it, with what it complained of
OUT/results/*.json            its figures
OUT/table.md, OUT/table.json  the table
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pwfn.errors import ConfigError, FileError, PwfnError
from pwfn.file.storage import make_folder, replacing
from pwfn.lab.compare.measuring import (
    ASKED,
    Ensemble,
    asked,
    digest,
    measured,
    read_json,
    settings_differ,
    unfinished,
)
from pwfn.lab.compare.plan import Plan, Run
from pwfn.lab.compare.table import Table, lines, make_table
from pwfn.run.console import duration

COMPLAINTS = "stderr.txt"
"""What a run's process wrote to its standard error; in its folder."""


class Process(Protocol):
    """A run that was started: as much of :class:`subprocess.Popen` as is needed here."""

    def poll(self) -> int | None:
        """Its status, once it has ended."""

    def terminate(self) -> None:
        """Ask it to write a checkpoint and end."""

    def wait(self) -> int:
        """Its status, after it has ended."""


Start = Callable[[Sequence[str], Path], Process]
"""Starts ``pwfn`` with arguments; its complaints go to a file."""


class CutOffError(PwfnError):
    """The table was cut off by Ctrl-C or by the system; its runs have left checkpoints."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: the same command goes on where each run was")
        self.exit_status = 128 + number  # as a shell would have it


class _SignalError(BaseException):
    """A signal has come. No error of ours, so that nobody who handles those takes it for a run's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def start_process(arguments: Sequence[str], complaints: Path) -> Process:
    """Start ``pwfn`` in a process that Ctrl-C does not reach: it is ended by us, and only once."""
    with complaints.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "pwfn", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def run(
    plan: Plan,
    out: Path,
    *,
    jobs: int | None = None,
    device: str | None = None,
    commit: str | None = None,
    table_only: bool = False,
    say: Callable[[str], None] = print,
    start: Start = start_process,
    ensemble: Ensemble | None = None,
) -> Table:
    """Do every run of a table that is not done, ``jobs`` at a time, measure all, and save the table.

    With ``table_only`` nothing is started: the table is of the runs that are there and, where a run's
    folder is not, of its results. A run that fails does not stop the others; ``table.status`` is then 1.
    """
    work = _Work(plan, out, device, commit or _commit(), say, start, ensemble)
    if table_only:
        work.gather()
    else:
        _check_weights(plan)
        work.do(jobs or plan.jobs)
    table = make_table(plan, work.results, work.notes)
    make_folder(out)
    _write(out / "table.json", json.dumps(table.to_dict(), indent=1, ensure_ascii=False) + "\n")
    _write(out / "table.md", "\n".join(lines(table)) + "\n")
    return table


@dataclass
class _Going:
    """A run whose process is there."""

    run: Run
    process: Process
    since: float
    from_epoch: float  # trained before it was gone on with


@dataclass
class _Work:
    """The runs of a table on their way to its results."""

    plan: Plan
    out: Path
    device: str | None
    commit: str | None
    say: Callable[[str], None]
    start: Start
    ensemble: Ensemble | None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the run's name
    notes: dict[str, str] = field(default_factory=dict)  # why a run has none

    def gather(self) -> None:
        """Measure what is there."""
        for run in self.plan.runs():
            why = unfinished(run, self.out)
            if why is None or not (self.out / run.place / "model.pwfn").exists():
                self._measure(run, why)
            else:
                self.notes[run.name] = why

    def do(self, jobs: int) -> None:
        """Start what is not done, and measure each run when it has ended."""
        runs = self.plan.runs()
        waiting = [run for run in runs if unfinished(run, self.out) is not None]
        names = {run.name for run in waiting}
        done = [run for run in runs if run.name not in names]
        total, ended, paces = len(runs), len(done), list[float]()
        if done:
            self.say(f"{len(done)} of {total} runs are done already")
        going: list[_Going] = []
        with _signals(), _ending(going):
            for run in done:
                self._measure(run)
            while waiting or going:
                over = [each for each in going if each.process.poll() is not None]
                going[:] = [each for each in going if each not in over]
                while waiting and len(going) < jobs:
                    going.append(self._begin(waiting.pop(0)))
                # New ones are started before the old are measured, so that the device does not wait.
                for each in over:
                    ended += 1
                    seconds = time.monotonic() - each.since
                    said = self._end(each)
                    if each.run.name in self.results and each.run.epochs > 0:
                        paces.append(seconds / each.run.epochs)
                    left = _left(paces, [run.epochs for run in waiting], self._rest(going), jobs)
                    self.say(
                        f"{each.run}: {said} after {duration(seconds)}; {ended} of {total} runs over{left}"
                    )
                if not over:
                    time.sleep(0.1)

    def _begin(self, run: Run) -> _Going:
        folder = self.out / run.place
        make_folder(folder)
        if not any((folder / "checkpoints").glob("checkpoint-*.pt")):  # else it was begun before
            _write(folder / ASKED, json.dumps(asked(run), indent=1) + "\n")
        self.say(f"{run}: started")
        process = self.start(run.arguments(self.out, self.device), folder / COMPLAINTS)
        return _Going(run, process, time.monotonic(), epochs_trained(folder))

    def _rest(self, going: list[_Going]) -> list[tuple[float, float | None]]:
        """Of each run that is going: the epochs it still has, and its own seconds an epoch, if known."""
        found: list[tuple[float, float | None]] = []
        for each in going:
            trained = epochs_trained(self.out / each.run.place)
            pace = _pace(time.monotonic() - each.since, trained - each.from_epoch, each.run.epochs)
            found.append((max(each.run.epochs - trained, 0.0), pace))
        return found

    def _end(self, ended: _Going) -> str:
        """Measure a run whose process has ended; says how it went."""
        run, status = ended.run, ended.process.wait()
        why = unfinished(run, self.out)
        if why is None:
            self._measure(run)
        else:
            sentence = _complaint(self.out / run.place / COMPLAINTS, status)
            self.notes[run.name] = sentence or f"its process ended with status {status}, and {why}"
        if run.name in self.notes:
            return f"failed ({self.notes[run.name]})"
        found = self.results[run.name]
        top1 = f"{found['top1']:.2%}, " if found["top1"] is not None else ""
        return f"done ({top1}{found['entropy_bits']:.2f} bits, {found['file_bytes']:,} bytes)"

    def _measure(self, run: Run, why_not: str | None = None) -> None:
        """The figures of a finished run: as they were kept, if the file is still the same.

        For a run whose file is not there, they are as they were kept, or missing for that reason.
        """
        kept, file = None, self.out / run.place / "model.pwfn"
        try:
            kept, other = self._kept(run)
            if why_not is None and (kept is None or kept["file_sha256"] != digest(file)):
                kept = measured(run, self.out, device=self.device, commit=self.commit, ensemble=self.ensemble)
                make_folder(self.out / "results")
                _write(self._path(run), json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            why_not = f"its results are of another run: {other}" if other else why_not
        except PwfnError as error:
            kept, why_not = None, str(error)
        if kept is not None:
            self.results[run.name] = kept
        else:
            self.notes[run.name] = str(why_not)

    def _path(self, run: Run) -> Path:
        return self.out / "results" / f"{run.name}.json"

    def _kept(self, run: Run) -> tuple[dict[str, Any] | None, str | None]:
        """Its figures as they were measured before, if they are of this run; else in what they differ."""
        if not self._path(run).exists():
            return None, None
        kept = read_json(self._path(run))
        try:
            differing = settings_differ(run, kept["settings"])
            kept = {"holdout": 0, **kept}  # which results of before there was such a thing do not have
            facts = {"model": run.network.name, "samples": run.plan.samples, "holdout": run.plan.holdout}
            for name, wanted in facts.items():
                if kept[name] != wanted:
                    differing = f"its {name} is {kept[name]!r}, not {wanted!r}"
            _ = kept["file_sha256"]
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{self._path(run)}: is not a result of this command ({error}): move it elsewhere"
            ) from None
        return (None, differing) if differing else (kept, None)


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: with a sentence."""

    def cut_off(number: int, frame: FrameType | None) -> None:
        raise _SignalError(number)

    try:
        before = {number: signal.signal(number, cut_off) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, which alone may handle signals
        before = {}
    try:
        yield
    except _SignalError as signalled:
        raise CutOffError(signalled.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ending(going: list[_Going]) -> Iterator[None]:
    """Whatever ends the block ends the processes: they are asked to, and write their checkpoints."""
    try:
        yield
    finally:
        for each in going:
            each.process.terminate()
        for each in going:
            each.process.wait()


def epochs_trained(folder: Path) -> float:
    """How many epochs a run has behind it, by its log; polish counts."""
    path = folder / "log.jsonl"
    stages: dict[str, float] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):  # a line that is being written just now
            line = json.loads(text)
            if line["event"] == "epoch":
                stages[line["stage"]] = float(line["epoch"])
    return sum(stages.values())


def _pace(seconds: float, trained: float, epochs: float) -> float | None:
    """Seconds an epoch of a run that has trained so far, of so many; None before a tenth of them.

    The time to start, which is none of the pace, counts for most of it until then.

    >>> _pace(60.0, 0.05, 3.0), _pace(60.0, 1.5, 3.0)
    (None, 40.0)
    """
    return seconds / trained if trained > 0 and trained >= 0.1 * epochs else None


def _left(
    paces: list[float], waiting: list[float], going: list[tuple[float, float | None]], jobs: int
) -> str:
    """How long it still takes, by the epochs to come.

    A run that is going has its own seconds an epoch; others take as many as those did that are done.
    """
    known = [*paces, *(pace for _, pace in going if pace is not None)]
    if not known or not (waiting or going):
        return ""
    usual = sum(known) / len(known)
    rest = [usual * epochs for epochs in waiting]
    rest += [epochs * (usual if pace is None else pace) for epochs, pace in going]
    # No sooner than the longest of them, however many run at a time.
    return f", about {duration(max(sum(rest) / jobs, *rest))} left"


def _complaint(path: Path, status: int) -> str | None:
    """The sentence in which a process ended."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"its process was ended by {name}" + (": is memory short?" if name == "SIGKILL" else "")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.removeprefix("pwfn: ") for line in found if line.startswith("pwfn: ")]
    told = ours or found
    return told[-1] if told else None


def _check_weights(plan: Plan) -> None:
    for network in plan.models:
        if network.weights not in ("pretrained", "random") and not Path(network.weights).is_file():
            raise ConfigError(
                f"{network.weights}: the weights of {network.name} are not there: name a file, as seen from "
                'the current folder, or "pretrained"'
            )


def _commit() -> str | None:
    """Of this code, where it lies in a checkout of its own."""
    here = Path(__file__)
    try:
        for words in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            done = subprocess.run(
                ["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=60
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
