"""What a run shows: the same table on a terminal and in a log, bars that leave nothing behind, curves."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pwfn.errors import FileError, PwfnError
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.score import Scores
from pwfn.evaluate.targets import State
from pwfn.fixing.record import FixRecord
from pwfn.progress import Round, StepEvent
from pwfn.run.console import ConsoleView, View, state_lines
from pwfn.run.tensorboard import TensorBoard


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def done(number: int, *, loss: float | None = 0.4123, scored: bool = True) -> Round:
    """Round ``number`` of four."""
    return Round(
        number=number,
        steps=100,
        loss=loss,
        fix=FixRecord(number / 4, fixed=250 * number),
        fixed=Pool(250 * number, 10 + number, 2.5 - number / 8, 0.125, 0.98),
        sigma_quartiles=(0.00051, 0.0025, 0.0125),
        scores=Scores(0.5 / number, 0.9 + number / 100, 450) if scored else None,
        seconds=12.34,
        rate_bytes=40123.5,
    )


def moment(number: int, step: int, *, loss: float = 0.5) -> StepEvent:
    """Step ``step`` of round ``number`` of four, or of polish after them, each of 100 steps."""
    stage = f"round {number} of 4" if number <= 4 else "polish"
    share = (100 * (number - 1) + step) / 500
    return StepEvent(stage, number, 4, step, 100, 0.03 * step, 3.0, loss, 0.001, share, rate_bytes=40123.4)


def watch(view: View, clock: Clock, seconds_per_step: float = 0.1) -> None:
    """Four rounds of 100 steps with an event every 10, and polish."""
    with view:
        view.begin("a network on data, into run")
        for number in range(1, 6):
            for step in range(10, 101, 10):
                clock.now += 10 * seconds_per_step
                view.step(moment(number, step))
            if number <= 4:
                view.round(done(number))
        view.say("the end")


# A log


def log(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(heads: str, row: str) -> dict[str, str]:
    """By head, what stands under it: columns end where their heads end."""
    ends = [found.end() for found in re.finditer(r"\S+( of 2)?", heads)]
    starts = [0, *ends[:-1]]
    return {heads[a:b].strip(): row[a:b].strip() for a, b in zip(starts, ends, strict=True)}


def test_a_log_has_a_line_per_round_and_the_time_left() -> None:
    console, clock = log(), Clock()
    watch(ConsoleView(console, clock), clock)
    title, heads, *rows, end = written(console).splitlines()
    assert (title, end, len(rows)) == ("a network on data, into run", "the end", 4)
    assert cells(heads, rows[0]) == {
        "round": "1",
        "fixed": "25.0%",
        "loss": "0.4123",
        "accuracy": "91.00%",
        "values": "11",
        "bits": "2.38",
        "zeros": "12.5%",
        "powers of 2": "98.0%",
        "time": "12 s",
    }
    # 400, 300, 200 and 100 steps of 0.1 s are left; rich rounds up, also 20.0000001.
    left = [int(re.fullmatch(r", (\d+) s left", row[len(heads) :])[1]) for row in rows]  # type: ignore[index]
    assert left == pytest.approx([40, 30, 20, 10], abs=1)


def test_a_log_of_a_long_run_has_a_line_per_minute() -> None:
    console, clock = log(), Clock()
    watch(ConsoleView(console, clock), clock, seconds_per_step=2.5)
    lines = written(console).splitlines()
    assert lines[2:5] == [
        "round 1 of 4: step 30 of 100, loss 0.5000, 40,123 bytes, 20 min left",
        "round 1 of 4: step 60 of 100, loss 0.5000, 40,123 bytes, 18 min left",
        "round 1 of 4: step 90 of 100, loss 0.5000, 40,123 bytes, 17 min left",
    ]
    assert len(lines) == 2 + 4 * 4 + 3 + 1


def test_a_resumed_run_shows_earlier_rounds_and_is_timed_from_where_it_resumed() -> None:
    console, clock = log(), Clock()
    view = ConsoleView(console, clock)
    view.begin("title", [done(1), done(2, loss=None, scored=False)])
    for step in (10, 20, 100):  # 300 of 500 steps, most of them by an earlier process
        view.step(moment(3, step))
        clock.now += step / 10
    view.round(done(3))
    _, heads, first, second, third = written(console).splitlines()
    assert cells(heads, first)["round"] == "1"
    assert (cells(heads, second)["loss"], cells(heads, second)["accuracy"]) == ("-", "-")
    assert third.endswith(", 7 s left")  # 90 steps in 3 s, 200 are left


def test_accuracy_is_left_out_where_it_would_mislead() -> None:
    console = log()
    view = ConsoleView(console)
    view.begin("title", [done(1)], metric="")
    _, heads, row = written(console).splitlines()
    assert "accuracy" not in heads
    assert "91.00%" not in row
    assert cells(heads, row)["values"] == "11"


# A terminal


def terminal(width: int = 80, **environment: str) -> Console:
    environment = {"TERM": "xterm-256color", **environment}
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=24, _environ=environment)


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


@pytest.mark.parametrize("width", [20, 50, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_only_the_table_stays(width: int) -> None:
    console, clock = terminal(width), Clock()
    with ConsoleView(console, clock) as view:
        view.begin("title", [done(1)])
        for number in (2, 3):
            for step in (5, 50, 100):
                clock.now += 3725
                view.step(moment(number, step))
                view._bars.refresh()
                assert max(map(len, screen(written(console)))) <= width
            view.round(done(number))
    rows = [row for row in screen(written(console)) if row.strip()]
    assert [row.split()[0] for row in rows] == ["title", "round", "1", "2", "3"]


def test_the_bars_show_where_the_run_is_and_how_long_it_takes() -> None:
    console, clock = terminal(100), Clock()
    with ConsoleView(console, clock) as view:
        view.begin("title")
        for step in (10, 20, 30):
            clock.now += 10
            view.step(moment(2, step))
        view._bars.refresh()
        whole, phase = screen(written(console))[-2:]
        view.step(moment(2, 100))
        view._bars.refresh()
        fixing = screen(written(console))[-1]
    assert re.fullmatch(r"whole run .* 26% 0:00:30 0:06:10", whole.strip())  # 370 steps of 1 s are left
    assert re.fullmatch(
        r"round 2 of 4: step 30 of 100, loss 0.5000, 40,123 bytes .* 30% 0:00:20 0:01:10", phase.strip()
    )
    assert fixing.startswith("round 2 of 4: fixing and scoring")


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError, None])
def test_the_cursor_is_shown_again_however_the_run_ends(ending: type[BaseException] | None) -> None:
    console = terminal()
    try:
        with ConsoleView(console, Clock()) as view:
            view.begin("title")
            view.step(moment(1, 20))
            if ending is not None:
                raise ending
    except (KeyboardInterrupt, ValueError):
        pass
    text = written(console)
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h")
    assert "whole run" not in "".join(screen(text))


def test_nothing_is_shown_before_the_run_begins_or_by_the_silent_view(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = terminal()
    with pytest.raises(ValueError, match="early"), ConsoleView(console):
        raise ValueError("early")
    assert written(console) == ""
    watch(View(), Clock())
    assert capsys.readouterr() == ("", "")


def test_names_are_not_taken_for_markup_and_a_dumb_terminal_gets_plain_lines() -> None:
    for console in (terminal(), terminal(TERM="dumb"), terminal(NO_COLOR="1")):
        with ConsoleView(console, Clock()) as view:
            view.begin("npz:[bold]x[/bold].npz")
        assert screen(written(console))[0] == "npz:[bold]x[/bold].npz"
    console, clock = terminal(TERM="dumb"), Clock()
    watch(ConsoleView(console, clock), clock)
    assert "\x1b" not in written(console)


def test_a_star_marks_the_states_that_no_other_beats() -> None:
    assert state_lines([]) == []
    figures = [(0.90, 9000), (0.88, 4000), (0.70, 4500)]
    states = [
        State(n, n / 4, Scores(0.3, metric, 100), 3.0, 5, bytes(size))
        for n, (metric, size) in enumerate(figures, 1)
    ]
    lines = state_lines([*states, replace(states[2], scores=None)])
    assert [line.endswith("*") for line in lines[2:]] == [True, True, False, False]
    assert lines[2].split() == ["1", "25.0%", "90.00%", "5", "3.00", "9,000", "*"]
    assert lines[-1].split()[2] == "-"
    tried = state_lines([replace(states[0], step=0.046875)])
    assert tried[-1].split()[:3] == ["1", "0.04688", "90.00%"]
    assert "step" in tried[1]


# TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: [(event.step, round(event.value, 7)) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_curves_have_the_figures_of_the_log(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as view:
        view.begin("title")
        for now in (moment(1, 10), moment(1, 100, loss=0.25)):
            view.step(now)
        view.round(done(1))
        view.step(moment(2, 50, loss=0.125))
        view.round(done(2, scored=False))
    found = curves(tmp_path)
    assert found.pop("train/loss") == [(10, 0.5), (100, 0.25), (150, 0.125)]
    assert found.pop("train/learning_rate") == [(10, 0.001), (100, 0.001), (150, 0.001)]
    assert found.pop("train/rate_bytes") == [(step, pytest.approx(40123.4)) for step in (10, 100, 150)]
    assert found.pop("sigma/median") == [(100, 0.0025), (200, 0.0025)]
    assert found.pop("sigma/upper_quartile") == [(100, 0.0125), (200, 0.0125)]
    assert found.pop("sigma/lower_quartile") == [(100, 0.00051), (200, 0.00051)]
    for name, value in done(1).to_dict().items():
        if name != "sigma_quartiles":
            step, figure = found.pop(f"round/{name}")[0]
            assert (step, figure) == (100, pytest.approx(value)), name
    assert found == {}


def test_a_long_run_has_ten_thousand_points_at_most(tmp_path: Path) -> None:
    one = replace(moment(1, 0), steps=1000)
    with TensorBoard(tmp_path) as view:
        view.begin("title")
        for n in range(1, 1001):
            view.step(replace(one, step=n, done=n / 2**16, loss=n % 7))
    points = curves(tmp_path)["train/loss"]
    # Seven events are the first to make up a ten-thousandth of the run.
    assert [step for step, _ in points] == [*range(1, 1000, 7), 1000]
    assert {value for _, value in points[1:-1]} == {3}  # the mean of seven in a row


def test_curves_of_a_resumed_run_do_not_go_back_in_time(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as view:
        view.begin("title")
        view.step(moment(1, 100))
        view.round(done(1))
        for step in (20, 40, 60):
            view.step(moment(2, step))
    # Killed at step 160, it resumes from the checkpoint at step 140, whose own figures stay.
    with TensorBoard(tmp_path, first_step=140) as view:
        view.begin("title", [done(1)])
        for step in (55, 100):
            view.step(moment(2, step, loss=0.25))
        view.round(done(2))
    found = curves(tmp_path)
    assert found["train/loss"] == [(100, 0.5), (120, 0.5), (140, 0.5), (155, 0.25), (200, 0.25)]
    assert found["round/fraction"] == [(100, 0.25), (200, 0.5)]


def test_curves_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"file/curves: cannot be written: Not a directory$"):
        TensorBoard(tmp_path / "file" / "curves")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PwfnError, match=r"pip install 'pwfn\[tensorboard\]'$"):
        TensorBoard(tmp_path)


def test_a_round_without_training_says_nothing_of_the_time_left() -> None:
    """The next layer-by-layer pass may be the last one or not be needed."""
    console, clock = log(), Clock()
    with ConsoleView(console, clock) as view:
        view.begin("a network")
        for layer in range(10):
            clock.now += 1
            view.step(StepEvent.at_layer(layer, 20, 1))
        view.round(done(1, loss=None))
    assert "left" not in written(console)
