"""The published figures: each has its machine, seed and commit, and the README's table is made from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pwfn import Config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "experiments" / "results").glob("*.json"))


def test_the_table_in_the_readme_is_made_from_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "table.py"), "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_tables_of_performance_are_made_from_what_was_measured() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "table.py"), "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    facts = json.loads(path.read_text())
    assert facts["name"] == path.stem
    assert facts["device"]
    assert len(facts["commit"]) >= 7
    assert int(facts["commit"], 16) > 0
    settings = Config.load(ROOT / "experiments" / f"{path.stem.rpartition('_seed')[0]}.toml")
    # A setting that came later was then as its default is now.
    assert Config().override(facts["settings"]) == settings.override({"seed": facts["seed"]})
