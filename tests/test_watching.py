"""Watching a run: what each view shows, on any terminal, and how long the run still takes."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pwfn import PwfnError
from pwfn.bayes.objective import Scores
from pwfn.errors import FileError
from pwfn.evaluate.entropy import Pool
from pwfn.fixing.fix_round import FixRecord
from pwfn.progress import Round, StepEvent
from pwfn.run.console import (
    HEADER,
    Lines,
    Live,
    Several,
    Silent,
    TensorBoard,
    TimeLeft,
    View,
    duration,
    round_line,
    view_for,
)
from pwfn.run.console.live import _NARROW, _WIDE, _columns, _width

FRACTIONS = (0.25, 0.5, 0.75, 1.0)


class Clock:
    """Time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def done(number: int, *, seconds: float = 12.34, loss: float | None = 0.4123, scored: bool = True) -> Round:
    fraction = FRACTIONS[number - 1]
    return Round(
        number=number,
        steps=100,
        loss=loss,
        fix=FixRecord(fraction, fixed=round(1000 * fraction), steps=(), moves=()),
        fixed=Pool(round(1000 * fraction), 10 + number, 2.5 - number / 8, 0.125, 0.98),
        sigma_quartiles=(0.00051, 0.0025, 0.0125),
        scores=Scores(0.5 / number, 0.9 + number / 100, 450) if scored else None,
        seconds=seconds,
    )


def moment(number: int, step: int, *, loss: float = 0.5, steps: int = 100) -> StepEvent:
    """Step ``step`` of round ``number`` of four, or of polish after them, each of 100 steps."""
    return StepEvent(
        stage=f"round {number} of 4" if number <= 4 else "polish",
        round=number,
        rounds=4,
        step=step,
        steps=steps,
        epoch=3 * step / steps,
        epochs=3,
        loss=loss,
        learning_rate=0.001,
        done=(100 * (number - 1) + step) / 500,
    )


# Time


def test_time_left_is_the_pace_of_training_and_a_pause_for_every_round_left() -> None:
    clock = Clock()
    left = TimeLeft(4, clock)
    assert left.seconds() is None
    left.pulse(0.0)
    assert left.seconds() is None  # no pace yet
    clock.wait(20)
    left.pulse(0.1)
    assert left.seconds() == pytest.approx(180)  # no pause seen yet
    clock.wait(20)
    left.pulse(0.2)
    clock.wait(5)
    left.round()
    assert left.seconds() == pytest.approx(160 + 3 * 5)
    clock.wait(40)
    left.pulse(0.4)
    assert left.seconds() == pytest.approx(120 + 3 * 5)
    clock.wait(3)  # of the pause that is to come
    assert left.seconds() == pytest.approx(120 + 3 * 5 - 3)
    clock.wait(30)  # it is longer than the one before: nothing else is taken off
    assert left.seconds() == pytest.approx(120 + 2 * 5)
    left.round()
    assert left.seconds() == pytest.approx(120 + 2 * (5 + 33) / 2)


def test_a_run_that_goes_on_is_timed_from_where_it_goes_on() -> None:
    clock = Clock()
    left = TimeLeft(2, clock)
    left.pulse(0.8)
    clock.wait(10)
    left.pulse(0.9)
    assert left.seconds() == pytest.approx(10)
    clock.wait(10)
    left.pulse(1.0)
    assert left.seconds() == 0


def test_rounds_without_training_are_timed_too() -> None:
    clock = Clock()
    left = TimeLeft(3, clock)
    clock.wait(7)
    left.round(6.0)
    assert left.seconds() == pytest.approx(12)
    clock.wait(6)
    left.round()
    assert left.seconds() == pytest.approx(6)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (89, "1 min"),
        (3569, "59 min"),
        (3571, "1 h 00 min"),
        (2 * 86400 - 29, "2 d 0 h"),
        (27.6 * 3600, "27 h 36 min"),
        (100 * 3600, "4 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Lines


def watched(view: View, clock: Clock, seconds_a_step: float = 0.1, pause: float = 2.0) -> None:
    """Four rounds of 100 steps with a pulse every 10, and polish."""
    with view:
        view.begin("a network on data, into run", 4)
        view.pulse(moment(1, 0))
        for number in (1, 2, 3, 4, 5):
            for step in range(10, 101, 10):
                clock.wait(10 * seconds_a_step)
                view.pulse(moment(number, step))
            clock.wait(pause)
            if number <= 4:
                view.round(done(number))
        view.end("92.00% before, 94.00% after")


ROWS = [
    "    1   25.0%   0.4123    91.00%    2.375      11          98.0%       0.00250",
    "    2   50.0%   0.4123    92.00%    2.250      12          98.0%       0.00250",
    "    3   75.0%   0.4123    93.00%    2.125      13          98.0%       0.00250",
    "    4  100.0%   0.4123    94.00%    2.000      14          98.0%       0.00250",
]


def test_lines_of_a_short_run() -> None:
    said: list[str] = []
    clock = Clock()
    watched(Lines(said.append, clock), clock)
    assert said == [
        "a network on data, into run",
        "round    done     loss  accuracy  entropy  unique  powers of two  median sigma",
        f"{ROWS[0]}  46 s left",  # 400 steps at 0.1 s, 3 pauses of 2 s
        f"{ROWS[1]}  34 s left",
        f"{ROWS[2]}  22 s left",
        f"{ROWS[3]}  10 s left",
        "92.00% before, 94.00% after",
    ]
    assert said[1] == HEADER


def test_lines_of_a_long_run_come_once_a_minute() -> None:
    said: list[str] = []
    clock = Clock()
    watched(Lines(said.append, clock), clock, seconds_a_step=2.5, pause=0.0)
    assert said[2:6] == [
        "round 1 of 4: step 30 of 100, loss 0.5000, 20 min left",
        "round 1 of 4: step 60 of 100, loss 0.5000, 18 min left",
        "round 1 of 4: step 90 of 100, loss 0.5000, 17 min left",
        f"{ROWS[0]}  17 min left",
    ]
    assert len(said) == 2 + 4 * 4 + 3 + 1


def test_lines_of_a_run_that_goes_on() -> None:
    said: list[str] = []
    view = Lines(said.append, Clock())
    view.begin("title", 4, [done(1), done(2)])
    view.say("a word")
    assert said == ["title", HEADER, *ROWS[:2], "a word"]


def test_a_round_without_training_or_scores() -> None:
    line = round_line(done(1, loss=None, scored=False))
    assert line == "    1   25.0%        -         -    2.375      11          98.0%       0.00250"


# The live view


def terminal(width: int, height: int = 24, **options: Any) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        _environ={"TERM": "xterm-256color", **options},
    )


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def screen(text: str) -> list[str]:
    """What a terminal shows after all this; rich moves up, erases lines, colours, hides the cursor."""
    rows, y, x = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            y, x = y + 1, 0
            rows += [""] * (y == len(rows))
        elif token == "\r":
            x = 0
        elif token == "\x1b[1A":
            y -= 1
        elif token == "\x1b[2K":
            rows[y] = ""
        elif token.startswith("\x1b"):
            assert re.fullmatch(r"\x1b\[([0-9;]*m|\?25[lh])", token), token
        else:
            rows[y] = rows[y].ljust(x)[:x] + token + rows[y][x + len(token) :]
            x += len(token)
    return rows


def drawn(view: Live) -> None:
    """Draw the bars now, not at the next quarter of a second."""
    assert view._bars is not None
    view._bars.refresh()


@pytest.mark.parametrize("width", [20, 30, 40, 50, 71, 78, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_the_table_stays(width: int) -> None:
    console, clock = terminal(width), Clock()
    with Live(console, clock) as view:
        view.begin("title", 4, [done(1)])
        for number in (2, 3):
            for step in (5, 50, 100):
                clock.wait(3725)
                view.pulse(moment(number, step))
                drawn(view)
                assert max(map(len, screen(written(console)))) <= width
            view.round(done(number))
        view.end("the end")
    rows = [row for row in screen(written(console)) if row]
    assert [row.split()[0] for row in rows] == ["title", "round", "1", "2", "3", "the"]
    assert max(map(len, rows)) <= width


def test_the_live_view_on_80_columns() -> None:
    console, clock = terminal(80), Clock()
    with Live(console, clock) as view:
        view.begin("a network on data, into run", 4)
        drawn(view)
        assert screen(written(console))[-1] == "starting, 0:00:00"
        view.pulse(moment(1, 0))
        for step in range(10, 101, 10):
            clock.wait(1)
            view.pulse(moment(1, step))
        drawn(view)
        assert "fixing and scoring" in screen(written(console))[-2]
        clock.wait(2)
        view.round(done(1))
        view.pulse(moment(2, 0))
        clock.wait(3)
        view.pulse(moment(2, 30, loss=0.4))
        drawn(view)
        rows = screen(written(console))
        view.round(done(2))
        view.end("92.00% before, 94.00% after")
    assert rows[:4] == [
        "a network on data, into run",
        "round    done    loss  accuracy   bits  unique  powers     sigma x1000    time",
        "    1   25.0%  0.4123    91.00%  2.375      11   98.0%  0.51 2.50 12.5  12.3 s",
        "",
    ]
    whole, stretch, figures = rows[4:]
    # 370 of 500 steps are left at 0.1 s, and three pauses of 2 s.
    assert re.fullmatch(r"whole run    ━+[╸╺]━+ 26\.0%, 0:00:15, 43 s left *", whole)
    assert re.fullmatch(r"round 2 of 4 ━+[╸╺]━+ epoch 0\.9 of 3, step 30 of 100 *", stretch)
    assert {len(whole), len(stretch)} == {80}
    assert figures == "loss 0.4800, learning rate 0.001"  # four fifths of 0.5, one of 0.4
    assert screen(written(console))[1:5] == [
        *rows[1:3],
        "    2   50.0%  0.4123    92.00%  2.250      12   98.0%  0.51 2.50 12.5  12.3 s",
        "92.00% before, 94.00% after",
    ]


def test_the_live_view_on_120_columns() -> None:
    console, clock = terminal(120), Clock()
    watched(Live(console, clock), clock)
    heads, first, *_ = [row for row in screen(written(console)) if row][1:]
    assert heads == (
        "round    done    loss  accuracy  entropy bits  unique "
        " powers of two          sigma quartiles     time"
    )
    assert first == (
        "    1   25.0%  0.4123    91.00%         2.375      11 "
        "         98.0%  0.00051 0.00250 0.01250   12.3 s"
    )
    assert len(heads) == len(first) == _width(_WIDE)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError, None])
def test_the_cursor_is_shown_again_however_the_run_ends(ending: type[BaseException] | None) -> None:
    console = terminal(80)
    try:
        with Live(console, Clock()) as view:
            view.begin("title", 4)
            view.pulse(moment(1, 0))
            view.pulse(moment(1, 20))
            if ending is not None:
                raise ending
    except (KeyboardInterrupt, ValueError):
        pass
    text = written(console)
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h")
    rows = [row for row in screen(text) if row]
    assert "whole run" not in "".join(rows)
    assert rows[2:] == ([] if ending is None else ["round 1 of 4, step 20 of 100, loss 0.5000"])


def test_an_error_before_the_run_begins_leaves_nothing_on_the_terminal() -> None:
    console = terminal(80)
    with pytest.raises(ValueError, match="early"), Live(console):
        raise ValueError("early")
    assert written(console) == ""


def test_the_live_view_without_colours() -> None:
    console = terminal(80, NO_COLOR="1")
    with Live(console, Clock()) as view:
        view.begin("title", 4)
        view.pulse(moment(3, 50))
        drawn(view)
        bar = screen(written(console))[-2]
        view.end("the end")
    assert not re.findall(r"\x1b\[[0-9;]*3[0-9]", written(console))
    assert re.fullmatch(r"round 3 of 4 ━+ {9,}epoch 1\.5 of 3, step 50 of 100 *", bar)


@pytest.mark.parametrize("height", [2, 5, 24])
def test_the_live_view_is_no_higher_than_the_terminal(height: int) -> None:
    console = terminal(80, height)
    with Live(console, Clock()) as view:
        view.begin("title", 4)
        before = len(screen(written(console)))
        view.pulse(moment(3, 50))
        drawn(view)
        assert len(screen(written(console))) - before < height
        view.end("the end")
    assert [row for row in screen(written(console)) if row][-1] == "the end"


def test_the_live_view_draws_at_its_own_pace() -> None:
    console = terminal(80)
    with Live(console) as view:
        view.begin("title", 4)
        started = time.monotonic()
        for step in range(2000):
            view.pulse(moment(1, step % 100))
        view.end("the end")
        quarters = math.ceil(4 * (time.monotonic() - started))
    assert written(console).count("whole run") <= quarters + 1


def test_names_are_not_taken_for_markup() -> None:
    console = terminal(80)
    with Live(console) as view:
        view.begin("npz:[bold]x[/bold].npz", 4)
        view.say("[red]a word")
        view.end("[/]")
    assert [row for row in screen(written(console)) if row][::2] == ["npz:[bold]x[/bold].npz", "[red]a word"]


def test_columns_leave_one_by_one_where_room_is_short() -> None:
    assert _width(_NARROW) <= 80
    assert _width(_WIDE) <= 120
    assert {column.width for column in _NARROW} >= {5, 6, 8}
    counts = [len(_columns(width)) for width in range(1, 121)]
    assert counts == sorted(counts)
    assert set(counts) == set(range(1, 10))
    for columns in (_NARROW, _WIDE):
        for column in columns:
            assert len(column.head) <= column.width
            for seconds in (0.0, 59.96, 3599, 35_999):
                assert len(column.cell(done(4, seconds=seconds))) <= column.width


# Which view, and several


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_which_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert type(view_for(as_json=True, stream=Terminal())) is Silent
    assert type(view_for(stream=Terminal())) is Live
    assert type(view_for(stream=io.StringIO())) is Lines
    monkeypatch.setenv("TERM", "dumb")
    assert type(view_for(stream=Terminal())) is Lines


def test_lines_where_rich_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert type(view_for(stream=Terminal())) is Lines


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    watched(Silent(), Clock())
    Silent().say("a word")
    assert capsys.readouterr() == ("", "")


class Noted(View):
    """Keeps the names of what it was told."""

    def __init__(self, on_exit: Callable[[], None] = lambda: None) -> None:
        self.told: list[Any] = []
        self._on_exit = on_exit

    def __enter__(self) -> Noted:
        self.told.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("exit")
        self._on_exit()

    def say(self, line: str) -> None:
        self.told.append(line)

    def begin(self, title: str, rounds: int, earlier: Any = ()) -> None:
        self.told.append((title, rounds, len(earlier)))

    def pulse(self, now: StepEvent) -> None:
        self.told.append(now)

    def round(self, done: Round) -> None:
        self.told.append(done)

    def end(self, line: str) -> None:
        self.told.append(line)


def test_several_views_are_told_the_same() -> None:
    views = [Noted(), Noted()]
    one, now = done(1), moment(1, 1)
    with Several(views) as view:
        view.say("a word")
        view.begin("title", 4, [one])
        view.pulse(now)
        view.round(one)
        view.end("the end")
    expected = ["enter", "a word", ("title", 4, 1), now, one, "the end", "exit"]
    assert [view.told for view in views] == [expected] * 2


def test_all_of_several_views_are_left_even_if_one_fails() -> None:
    def fail() -> None:
        raise OSError("full")

    first, second = Noted(), Noted(fail)
    with pytest.raises(OSError, match="full"), Several([first, second]):
        pass
    assert first.told == second.told == ["enter", "exit"]


# TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: [(event.step, round(event.value, 7)) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_curves(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as view:
        view.begin("title", 4)
        view.pulse(moment(1, 10))
        view.pulse(moment(1, 100, loss=0.25))
        view.round(done(1))
        view.pulse(moment(2, 50, loss=0.125))
        view.round(done(2, scored=False))
        view.end("the end")
    assert curves(tmp_path) == {
        "train/loss": [(10, 0.5), (100, 0.25), (150, 0.125)],
        "train/learning_rate": [(10, 0.001), (100, 0.001), (150, 0.001)],
        "round/fixed": [(100, 0.25), (200, 0.5)],
        "round/accuracy": [(100, 0.91)],
        "round/validation_loss": [(100, 0.5)],
        "round/entropy_bits": [(100, 2.375), (200, 2.25)],
        "round/unique": [(100, 11), (200, 12)],
        "round/power_of_two_share": [(100, 0.98), (200, 0.98)],
        "round/zero_share": [(100, 0.125), (200, 0.125)],
        "sigma/lower_quartile": [(100, 0.00051), (200, 0.00051)],
        "sigma/median": [(100, 0.0025), (200, 0.0025)],
        "sigma/upper_quartile": [(100, 0.0125), (200, 0.0125)],
    }


def test_a_long_run_has_ten_thousand_points_at_most(tmp_path: Path) -> None:
    one = moment(1, 0, steps=1000)
    pulses = [replace(one, step=n, done=n / 2**16, loss=n % 7) for n in range(1, 1001)]
    with TensorBoard(tmp_path) as view:
        view.begin("title", 4)
        for now in pulses:
            view.pulse(now)
    points = curves(tmp_path)["train/loss"]
    # Seven pulses are the first to make up a ten-thousandth.
    assert [step for step, _ in points] == [*range(1, 1000, 7), 1000]
    assert points[0] == (1, 1)
    assert {value for _, value in points[1:-1]} == {3}  # the mean of seven in a row


def test_curves_of_a_run_that_goes_on_do_not_fold_back(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as view:
        view.begin("title", 4)
        for step in (50, 100):
            view.pulse(moment(1, step))
        view.round(done(1))
        for step in (20, 40, 60):
            view.pulse(moment(2, step))
    # Killed at step 160, it goes on from the checkpoint at step 140, whose own figures stay.
    with TensorBoard(tmp_path, first_step=140) as view:
        view.begin("title", 4, [done(1)])
        for step in (55, 100):
            view.pulse(moment(2, step, loss=0.25))
        view.round(done(2))
    found = curves(tmp_path)
    assert found["train/loss"] == [(50, 0.5), (100, 0.5), (120, 0.5), (140, 0.5), (155, 0.25), (200, 0.25)]
    assert found["round/fixed"] == [(100, 0.25), (200, 0.5)]


def test_a_run_that_starts_again_has_its_own_curves_only(tmp_path: Path) -> None:
    for loss in (0.5, 0.25):
        with TensorBoard(tmp_path) as view:
            view.begin("title", 4)
            view.pulse(moment(1, 50, loss=loss))
    assert curves(tmp_path)["train/loss"] == [(50, 0.25)]


def test_curves_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PwfnError, match=r"need tensorboard: pip install 'pwfn\[tensorboard\]'$"):
        TensorBoard(tmp_path)


def test_curves_where_they_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"file/curves: cannot be written: Not a directory$"):
        TensorBoard(tmp_path / "file" / "curves")
