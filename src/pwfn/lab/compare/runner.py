"""The runs of a table, each in a process of its own; finished ones are not run again.

OUT/<model>/<row>/seed<N>/    a run, as `pwfn compress` leaves it, and its stderr.txt
OUT/results/*.json            its figures
OUT/table.md, OUT/table.json  the table
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pwfn.config import Config
from pwfn.errors import ConfigError, FileError, PwfnError
from pwfn.file.storage import make_folder, replacing
from pwfn.lab.compare.measure import (
    DIGEST,
    difference,
    digest,
    measure,
    read_json,
    unfinished,
    weights_digest,
)
from pwfn.lab.compare.plan import Plan, Run
from pwfn.lab.compare.table import Table, lines, make_table
from pwfn.run.console import duration

STDERR = "stderr.txt"


class InterruptedTableError(PwfnError):
    """The table was stopped by Ctrl-C or by the system; its runs have left checkpoints."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}: the same command resumes every run")
        self.exit_status = 128 + number  # as in a shell


class _SignalError(BaseException):
    """A signal arrived. Not a PwfnError, so that nothing takes it for the failure of a run."""


def start_process(arguments: Sequence[str], stderr: Path) -> subprocess.Popen[bytes]:
    """Start ``pwfn`` in a process that Ctrl-C does not reach: the table ends it, once."""
    with stderr.open("wb") as errors:
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
) -> Table:
    """Do every run of a table that is not done, ``jobs`` at a time, measure all, and save the table.

    With ``table_only`` nothing is started: the table is made from the runs that are there and, where a
    run's folder is missing, from its result file. A run that fails does not stop the others;
    ``table.status`` is then 1.
    """
    work = _Work(plan, out, device, commit, say)
    if table_only:
        for each in plan.runs():
            work.measure(each, unfinished(each, out / each.place))
    else:
        _check_weights(plan)
        work.do(jobs or plan.jobs)
    table = make_table(plan, work.results, work.notes)
    make_folder(out)
    write(out / "table.json", json.dumps(table.to_dict(), indent=1, ensure_ascii=False) + "\n")
    write(out / "table.md", "\n".join(lines(table)) + "\n")
    return table


@dataclass
class _Going:
    """A run whose process is there."""

    run: Run
    process: subprocess.Popen[bytes]
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


@dataclass
class _Work:
    """The runs of a table on their way to its results."""

    plan: Plan
    out: Path
    device: str | None
    commit: str | None
    say: Callable[[str], None]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the run's name
    notes: dict[str, str] = field(default_factory=dict)  # why a run has none

    def do(self, jobs: int) -> None:
        """Start what is not done, and measure each run when it has ended."""
        runs = self.plan.runs()
        waiting = [run for run in runs if unfinished(run, self.out / run.place) is not None]
        names = {run.name for run in waiting}
        done = [run for run in runs if run.name not in names]
        ended, paces, going = len(done), list[float](), list[_Going]()
        if done:
            self.say(f"{len(done)} of {len(runs)} runs are done already")
        with _stopping(going):
            for run in done:
                self.measure(run)
            while waiting or going:
                over = [each for each in going if each.process.poll() is not None]
                going[:] = [each for each in going if each not in over]
                while waiting and len(going) < jobs:
                    going.append(self._begin(waiting.pop(0)))
                # New runs are started before old ones are measured, so that the device is not idle.
                for each in over:
                    ended += 1
                    seconds, said = each.seconds, self._end(each)
                    if each.run.name in self.results and each.run.epochs > 0:
                        paces.append(seconds / each.run.epochs)
                    rest = [(run.epochs, 0.0) for run in waiting]
                    rest += [(other.run.epochs, other.seconds) for other in going]
                    self.say(
                        f"{each.run}: {said} after {duration(seconds)}; {ended} of {len(runs)} runs over"
                        f"{time_left(paces, rest, jobs)}"
                    )
                if not over:
                    time.sleep(0.1)

    def _begin(self, run: Run) -> _Going:
        folder, weights = self.out / run.place, weights_digest(run)
        make_folder(folder)
        if weights and not any((folder / "checkpoints").glob("checkpoint-*.pt")):  # else it began before
            write(folder / DIGEST, weights + "\n")
        self.say(f"{run}: started")
        process = start_process(run.arguments(self.out, self.device), folder / STDERR)
        return _Going(run, process, time.monotonic())

    def _end(self, ended: _Going) -> str:
        """Measure a run whose process has ended; says how it went."""
        run, status = ended.run, ended.process.wait()
        why = unfinished(run, self.out / run.place)
        if why is None:
            self.measure(run)
        else:
            sentence = last_sentence(self.out / run.place / STDERR, status)
            self.notes[run.name] = sentence or f"its process ended with status {status}, and {why}"
        if run.name in self.notes:
            return f"failed ({self.notes[run.name]})"
        found = self.results[run.name]
        top1 = f"{found['top1']:.2%}, " if found["top1"] is not None else ""
        return f"done ({top1}{found['entropy_bits']:.2f} bits, {found['file_bytes']:,} bytes)"

    def measure(self, run: Run, why_not: str | None = None) -> None:
        """The figures of a finished run: those in its result file, if the network's file is still the same.

        Without the network's file, they are those of the result file, or missing for the reason given.
        """
        folder = self.out / run.place
        file, path = folder / "model.pwfn", self.out / "results" / f"{run.name}.json"
        try:
            kept, other = kept_result(run, path)
            if why_not is None and (kept is None or kept["file_sha256"] != digest(file)):
                commit = self.commit or git_commit(Path(__file__))
                kept = measure(run, folder, device=self.device, commit=commit)
                make_folder(path.parent)
                write(path, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            elif why_not is not None and file.exists():
                kept = None
            elif other:
                why_not = f"its results are of another run: {other}"
        except PwfnError as error:
            kept, why_not = None, str(error)
        if kept is not None:
            self.results[run.name] = kept
        else:
            self.notes[run.name] = str(why_not)


def kept_result(run: Run, path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The figures in a result file, if they are of this run; otherwise in what they differ."""
    if not path.exists():
        return None, None
    kept = read_json(path)
    wanted = {
        "model": run.network.name,
        "samples": run.plan.samples,
        "holdout": run.plan.holdout,
        "settings": run.config.to_dict(),
    }
    try:
        found = {name: kept[name] for name in wanted}
        found["settings"] = with_later_settings(found["settings"])
        other = difference(found, wanted)
        _ = kept["file_sha256"]
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: is not a result of this command ({error}): move it elsewhere") from None
    return (None, other) if other else (kept, None)


def with_later_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an earlier result, with the defaults of those that did not exist then.

    >>> with_later_settings({"training": {"momentum": 0.8}})["training"]["cuda_graph"]
    True
    """
    usual = Config().to_dict()
    return {
        name: {**usual.get(name, {}), **own} if isinstance(own, Mapping) else own
        for name, own in settings.items()
    }


@contextmanager
def _stopping(going: list[_Going]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with a sentence; whatever ends it ends the processes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _SignalError(number)

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, which alone may handle signals
        before = {}
    try:
        try:
            yield
        finally:
            for each in going:
                each.process.terminate()
            for each in going:
                each.process.wait()
    except _SignalError as signalled:
        raise InterruptedTableError(signalled.args[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def time_left(paces: Sequence[float], rest: Sequence[tuple[float, float]], jobs: int) -> str:
    """How long the rest takes, from the seconds per epoch of the runs that ended.

    ``rest``: epochs of each run to come, and the seconds it has been running.

    >>> time_left([10.0, 20.0], [(4.0, 0.0), (4.0, 30.0)], jobs=1)
    ', about 2 min left'
    """
    if not paces or not rest:
        return ""
    usual = sum(paces) / len(paces)
    seconds = [max(usual * epochs - spent, 0.0) for epochs, spent in rest]
    # No sooner than the longest of them, however many run at a time.
    return f", about {duration(max(sum(seconds) / jobs, *seconds))} left"


def last_sentence(path: Path, status: int) -> str | None:
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
    return next(reversed(ours or found), None)


def _check_weights(plan: Plan) -> None:
    for network in plan.networks:
        if network.weights not in ("pretrained", "random") and not Path(network.weights).is_file():
            raise ConfigError(
                f"{network.weights}: there are no weights of {network.name} here: give a file, relative to "
                'the current folder, or "pretrained"'
            )


def git_commit(file: Path) -> str | None:
    """The commit of the checkout in which a file is tracked; None if it is not."""
    try:
        for words in (["ls-files", "--error-unmatch", file.name], ["rev-parse", "HEAD"]):
            done = subprocess.run(
                ["git", *words], cwd=file.parent, capture_output=True, text=True, check=True, timeout=60
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
