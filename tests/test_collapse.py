"""What is kept of the sigmas of a run, and what is made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import collapse
import pytest

from pwfn.errors import FileError
from pwfn.evaluate.trace import Histogram, Moment, Trace
from pwfn.report.reading import read_trace
from pwfn.run.folder import run
from pwfn.run.options import RunOptions

NAME = "alpha_resnet20"
PLAN = """
data = "digits"
seeds = [0]
samples = 0
batch_size = 32
[settings]
"posterior.init" = "powers"
"posterior.learn_sigma" = true
"schedule.fractions" = [0.5, 1.0]
"training.steps_per_epoch" = 2
[[model]]
name = "digits_resnet"
weights = "random"
[[row]]
method = "pwfn"
label = "one"
"""


def _root(tmp_path: Path) -> Path:
    (tmp_path / "experiments" / "ablations").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / NAME).mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    return tmp_path


def _line(label: str, bins: dict[int, int], rate: float | str = "off") -> str:
    looks = [
        Trace(Moment.BEFORE if number else Moment.START, number, 0.0, sigma=Histogram(at, (3,))).to_plain()
        for number, at in bins.items()
    ]
    settings = {
        "posterior": {"alpha": 2.0**-11, "cap": 0.05, "learn_sigma": True},
        "training": {"learning_rate": 0.001, "sigma_learning_rate": rate},
    }
    return json.dumps({"label": label, "settings": settings, "observed": looks})


def test_the_table_has_the_medians(tmp_path: Path) -> None:
    root = _root(tmp_path)
    # The middle of the bin [2^-8, 2^-7.875), and of one an octave up.
    lines = [_line("one", {0: -64, 1: -56}), _line("other", {0: -64, 2: -64}, 0.1)]
    collapse.kept(NAME, root).write_text("\n".join(lines) + "\n")
    assert round(2 ** (-63.5 / 8), 4) == 0.0041
    assert collapse.table(NAME, root).splitlines() == [
        "| median sigma of the free weights | start | fixing 1 | fixing 2 |",
        "| --- | --- | --- | --- |",
        "| one | 0.0041 | 0.0082 | – |",
        "| other | 0.0041 | – | 0.0041 |",
    ]
    assert [seen.rate for seen in collapse.seen(NAME, root)] == [0.001, 0.1]
    picture = collapse.draw(NAME, root).read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"sigmas.jsonl: is not there: python experiments/collapse.py keep"):
        collapse.table(NAME, _root(tmp_path))


def test_what_a_run_saw_is_kept(tmp_path: Path) -> None:
    root = _root(tmp_path)
    (root / "experiments" / "ablations" / f"{NAME}.toml").write_text(PLAN)
    (made,) = collapse.compare.load(root / "experiments" / "ablations" / f"{NAME}.toml").runs()
    folder = tmp_path / "tables" / NAME / made.place
    run(RunOptions("digits_resnet", "digits", folder, "random", device="cpu"), made.config)
    collapse.keep(NAME, tmp_path / "tables", root)
    (kept,) = collapse.seen(NAME, root)
    looks = [look for look in read_trace(folder) if look.moment is not Moment.AFTER]
    assert kept.label == "one"
    assert [look.sigma for look in kept.observed] == [look.sigma for look in looks]
    start = kept.observed[0].sigma
    assert isinstance(start, Histogram)
    assert start.total == sum(entry.weights for entry in read_trace(folder)[-1].layers)
    assert all(math.isfinite(edge) for edge in start.edges())
