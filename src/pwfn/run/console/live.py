"""A run as it is seen on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from pwfn.progress import Round, StepEvent
from pwfn.run.console.lines import loss_text, score_text
from pwfn.run.console.timing import Clock, TimeLeft, duration, stopwatch
from pwfn.run.console.view import View

if TYPE_CHECKING:  # rich is for terminals only, and importing pwfn stays light
    from rich.console import Console, RenderableType
    from rich.live import Live as RichLive

_REFRESHES = 4  # a second
_SMOOTHING = 0.8  # share of the loss shown before in the one shown next


class Live(View):
    """A table that grows by a row a round, above bars that move.

    A row is printed once and for all; only the bars are drawn again, and vanish at the end, so that
    the table stays whole in any terminal, and after any end of the run.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._left, self._began = TimeLeft(0, clock), clock()
        self._columns: tuple[_Column, ...] = ()
        self._now: StepEvent | None = None
        self._loss = math.nan
        self._widest = 0  # text beside a bar so far, so that the bars keep their length
        self._bars: RichLive | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = self._bars is not None
        self._stop()
        if running and error is not None and self._now is not None:
            self._print(f"{self._now.stage}, {_step(self._now)}, loss {self._loss:.4f}", style="dim")

    def say(self, line: str) -> None:
        """Print the line above the bars."""
        self._print(line)

    def begin(self, title: str, rounds: int, earlier: Sequence[Round] = ()) -> None:
        """Print the title, the heads and the rounds done before, and show the bars."""
        from rich.live import Live as Bars

        self._left, self._began = TimeLeft(rounds - len(earlier), self._clock), self._clock()
        self._columns = _columns(self._console.width)
        self._print(title, style="bold")
        self._row([column.head for column in self._columns], style="dim")
        for done in earlier:
            self._row([column.cell(done) for column in self._columns])
        # Output is not redirected through rich: processes that read images are forked off while its
        # thread may hold its lock, and a warning in one of them would wait for that forever.
        self._bars = Bars(
            get_renderable=self._area,
            console=self._console,
            refresh_per_second=_REFRESHES,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._bars.start()

    def pulse(self, now: StepEvent) -> None:
        """Take note; the bars are drawn at their own pace."""
        self._left.pulse(now.done)
        if self._now is None or self._now.stage != now.stage or not math.isfinite(self._loss):
            self._loss = now.loss
        else:
            self._loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * now.loss
        self._now = now

    def round(self, done: Round) -> None:
        """Print the round's row."""
        self._left.round(done.seconds)
        self._row([column.cell(done) for column in self._columns])

    def end(self, line: str) -> None:
        """Take the bars away and print the line below the table."""
        self._stop()
        self._print(line, style="bold")

    def _stop(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False)

    def _row(self, cells: Sequence[str], style: str = "") -> None:
        pairs = zip(cells, self._columns, strict=True)
        line = "  ".join(cell.rjust(column.width) for cell, column in pairs)
        self._console.print(
            line, style=style, markup=False, highlight=False, no_wrap=True, overflow="ellipsis"
        )

    def _area(self) -> RenderableType:
        """The bars and the line below them, as they are now; called from rich's own thread."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now, width = self._now, self._console.width
        elapsed, left = stopwatch(self._clock() - self._began), self._left.seconds()
        rest = "" if left is None else f", {duration(left)} left"
        if now is None:
            return Text(f"starting, {elapsed}", style="cyan", no_wrap=True, overflow="ellipsis")
        stretch = _step(now) if width < _ROOMY else f"epoch {_epochs(now)}, {_step(now)}"
        if now.step >= now.steps:
            stretch = "fixing and scoring" if now.round <= now.rounds else "finishing"
        rows = (
            ("whole run", now.done, f"{now.done:.1%}, {elapsed}{rest}"),
            (now.stage, now.step / max(now.steps, 1), stretch),
        )
        self._widest = max(self._widest, *(len(text) for _, _, text in rows))
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        if width >= _TIGHT:
            grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, min_width=min(self._widest, width // 2))
        for label, share, text in rows:
            bar = ProgressBar(1.0, min(share, 1.0), complete_style="cyan", finished_style="green")
            grid.add_row(label, *([bar] if width >= _TIGHT else []), text)
        figures = f"loss {self._loss:.4f}, learning rate {now.learning_rate:.3g}"
        if self._console.height < _LOW:
            return grid
        return Group(Text(), grid, Text(figures, no_wrap=True, overflow="ellipsis"))


_ROOMY, _TIGHT = 72, 48  # columns of a terminal: below the first no epochs, below the second no bars
_LOW = 8  # lines of one: below that the bars only


def _step(now: StepEvent) -> str:
    return f"step {now.step:,} of {now.steps:,}"


def _epochs(now: StepEvent) -> str:
    digits = 1 if now.epochs >= 1 else 2
    return f"{now.epoch:.{digits}f} of {now.epochs:.{digits}f}".removesuffix(".0")


class _Column(NamedTuple):
    head: str
    width: int
    cell: Callable[[Round], str]
    rank: int  # where room is short, the highest goes first


def _columns(width: int) -> tuple[_Column, ...]:
    """Those that fit, with two spaces between them; all of them from 78 characters on."""
    if _width(_WIDE) <= width:
        return _WIDE
    kept = list(_NARROW)
    while len(kept) > 1 and _width(kept) > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    return tuple(kept)


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + 2 * (len(columns) - 1)


def _thousandths(value: float) -> str:
    """Four characters of 1000 times a sigma.

    >>> [_thousandths(s) for s in (2**-30, 0.00052, 0.0499, 0.25)]
    ['<.01', '0.52', '49.9', ' 250']
    """
    value *= 1000
    if value < 0.01:
        return "<.01"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:4.0f}"


def _took(done: Round) -> str:
    if done.seconds < 59.95:
        return f"{done.seconds:.1f} s"
    if done.seconds < 3600:
        return f"{int(done.seconds) // 60}:{int(done.seconds) % 60:02}"
    return f"{int(done.seconds) // 3600}:{int(done.seconds) // 60 % 60:02} h"


def _sigmas(done: Round, text: Callable[[float], str]) -> str:
    """The quartiles of sigma, for methods that have any."""
    return " ".join(map(text, done.sigma_quartiles)) if done.sigma_quartiles else "-"


_NARROW = (
    _Column("round", 5, lambda done: f"{done.number}", 0),
    _Column("done", 6, lambda done: f"{done.fix.fraction:.1%}", 1),
    _Column("loss", 6, loss_text, 4),
    _Column("accuracy", 8, score_text, 2),
    _Column("bits", 5, lambda done: f"{done.fixed.entropy_bits:.3f}", 3),
    _Column("unique", 6, lambda done: f"{done.fixed.unique}", 5),
    _Column("powers", 6, lambda done: f"{done.fixed.power_of_two_share:.1%}", 7),
    _Column("sigma x1000", 14, lambda done: _sigmas(done, _thousandths), 6),
    _Column("time", 6, _took, 8),
)
_LONG = {"bits": ("entropy bits", 12), "powers": ("powers of two", 13), "time": ("time", 7)}
_SIGMA = _Column("sigma quartiles", 23, lambda done: _sigmas(done, "{:.5f}".format), 6)
_WIDE = tuple(
    _SIGMA if old.head == "sigma x1000" else _Column(*_LONG.get(old.head, old[:2]), *old[2:])
    for old in _NARROW
)
