"""What a run shows: a live view on a terminal, plain lines in a pipe or log, or nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pwfn.evaluate.targets import State, pareto
from pwfn.progress import Round, StepEvent

_LINE_SECONDS = 60.0  # between plain lines within a training phase
_SPEED_SECONDS = 600.0  # the time left is estimated from the last ten minutes


class View:
    """Shows nothing. A subclass shows what it overrides."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the screen or the file in order, however the run ended."""

    def begin(self, title: str, done: Sequence[Round] = (), *, metric: str = "accuracy") -> None:
        """The run begins, or resumes after rounds that are done; ``metric``: its name, empty to hide it."""

    def step(self, now: StepEvent) -> None:
        """Training has come this far."""

    def round(self, done: Round) -> None:
        """A round is done."""

    def say(self, line: str) -> None:
        """Show a line of text."""


class ConsoleView(View):
    """A table with one row per round; on a terminal, progress bars below it until the run ends.

    Elsewhere, plain lines: one per round and, in long training phases, one per minute.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console() if console is None else console
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        # Output is not redirected through rich: worker processes are forked while its thread may hold its
        # lock, and a warning in one of them would then wait forever.
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>4.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
            speed_estimate_period=_SPEED_SECONDS,
            disable=not self._live,
            expand=True,
        )
        self._clock, self._said = clock, clock()
        self._columns: list[_Column] = []
        self._stage = ""

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, title: str, done: Sequence[Round] = (), *, metric: str = "accuracy") -> None:
        """Print the title, the heads and the rounds that are done."""
        named = [c._replace(head=metric, width=len(metric)) if c.head == _METRIC else c for c in _COLUMNS]
        self._columns = [column for column in named if column.head]
        self.say(title)
        self.say("  ".join(column.head.rjust(column.width) for column in self._columns))
        for earlier in done:
            self.say(self._row(earlier))
        self._run = self._bars.add_task("whole run", total=1.0)
        self._phase = self._bars.add_task("starting", total=None)
        self._bars.start()

    def step(self, now: StepEvent) -> None:
        """Move the bars; elsewhere, print a line if there was none for a minute."""
        self._bars.update(self._run, completed=now.done)
        text = f"{now.stage}: step {now.step:,} of {now.steps:,}, loss {now.loss:.4f}"
        if now.rate_bytes is not None:
            text += f", {now.rate_bytes:,.0f} bytes"
        if math.isnan(now.loss):
            text = f"{now.stage}: layer {now.step:,} of {now.steps:,}"
        if now.step == now.steps:
            text = f"{now.stage}: fixing and scoring" if now.round <= now.rounds else "finishing"
        if now.stage != self._stage:
            self._bars.reset(self._phase, total=now.steps)
            self._stage = now.stage
        self._bars.update(self._phase, description=text, completed=now.step)
        if not self._live and self._clock() - self._said >= _LINE_SECONDS:
            self.say(text + self._left())

    def round(self, done: Round) -> None:
        """Print the row of the round."""
        trained = done.loss is not None  # another try, or none, may follow a round without training
        self.say(self._row(done) + (self._left() if trained and not self._live else ""))

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        fit: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} if self._live else {"soft_wrap": True}
        self._console.print(line, markup=False, highlight=False, **fit)
        self._said = self._clock()

    def _row(self, done: Round) -> str:
        return "  ".join(column.cell(done).rjust(column.width) for column in self._columns)

    def _left(self) -> str:
        seconds = self._bars.tasks[self._run].time_remaining
        return f", {duration(seconds)} left" if seconds else ""


class _Column(NamedTuple):
    head: str
    width: int
    cell: Callable[[Round], str]


_METRIC = "metric"


def _metric(done: Round) -> str:
    return f"{done.scores.metric:.2%}" if done.scores and done.scores.metric is not None else "-"


_COLUMNS = (
    _Column("round", 5, lambda done: f"{done.number}"),
    _Column("fixed", 6, lambda done: f"{done.fix.fraction:.1%}"),
    _Column("loss", 7, lambda done: f"{done.loss:.4f}" if done.loss is not None else "-"),
    _Column(_METRIC, 8, _metric),
    # Of the weights that are fixed so far.
    _Column("values", 6, lambda done: f"{done.fixed.unique}"),
    _Column("bits", 5, lambda done: f"{done.fixed.entropy_bits:.2f}"),
    _Column("zeros", 6, lambda done: f"{done.fixed.zero_share:.1%}"),
    _Column("powers of 2", 11, lambda done: f"{done.fixed.power_of_two_share:.1%}"),
    _Column("time", 10, lambda done: duration(done.seconds)),
)


def state_lines(states: Sequence[State]) -> list[str]:
    """The states of a run, one line each; a star marks those that no other beats in accuracy and size."""
    if not states:
        return []
    metrics = [state.scores.metric if state.scores else None for state in states]
    best = pareto([(metric or 0.0, len(s.content)) for metric, s in zip(metrics, states, strict=True)])
    name = next((state.scores.name for state in states if state.scores), "accuracy")
    steps = states[0].step is not None
    title = "the network at each step that was tried" if steps else "the network if the run ended after round"
    lines = [title, f"    n  {'step' if steps else 'fixed':>8}  {name}  values   bits      bytes"]
    for state, metric, is_best in zip(states, metrics, best, strict=True):
        score = f"{metric:.2%}" if metric is not None else "-"
        place = f"{state.fraction:.1%}" if state.step is None else f"{state.step:.4g}"
        lines.append(
            f"{state.round:>5}  {place:>8}  {score:>{len(name)}}  {state.unique:>6}  "
            f"{state.entropy_bits:>5.2f}  {len(state.content):>9,}{' *' if is_best else ''}"
        )
    return lines


def duration(seconds: float) -> str:
    """A length of time in words.

    >>> [duration(s) for s in (0.4, 59.7, 754, 3599, 11_100, 187_000)]
    ['0 s', '1 min', '13 min', '1 h 00 min', '3 h 05 min', '2 d 4 h']
    """
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"
