"""The published figures: each has its machine, seed and commit, and the README's table is made from them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pwfn import Config
from pwfn.lab import compare

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
    wanted = settings.override({"seed": facts["seed"]})
    assert Config.recorded(facts["settings"]).in_force() == wanted.in_force()


TABLES = sorted((ROOT / "experiments" / "results").glob("compare_*"))
FIELDS = (
    *("model", "method", "label", "preset", "seed", "top1_start", "top1", "top1_ensemble", "entropy_bits"),
    *("unique", "inner_entropy_bits", "inner_unique", "file_bytes", "fp32_bytes", "codebooks", "epochs"),
    *("seconds", "device", "versions", "commit", "settings"),
)


@pytest.mark.parametrize("folder", TABLES, ids=lambda folder: folder.name)
def test_a_table_of_methods_is_made_from_its_results(folder: Path, tmp_path: Path) -> None:
    """Results of other settings than the plan's would be missing from it, and the table would say so."""
    shutil.copytree(folder / "results", tmp_path / "results")
    plan = compare.load(ROOT / "experiments" / f"{folder.name}.toml")
    made = compare.run(plan, tmp_path, table_only=True, say=lambda line: None)
    assert len(made.missing) + len(list((folder / "results").iterdir())) == len(plan.runs())
    assert (tmp_path / "table.md").read_text() == (folder / "table.md").read_text()
    assert (tmp_path / "table.json").read_text() == (folder / "table.json").read_text()


@pytest.mark.parametrize(
    "path", [path for folder in TABLES for path in sorted((folder / "results").glob("*.json"))], ids=str
)
def test_a_result_of_a_table_says_where_it_comes_from(path: Path) -> None:
    facts = json.loads(path.read_text())
    assert not [name for name in FIELDS if name not in facts]
    assert facts["name"] == path.stem
    assert int(facts["commit"], 16) > 0
    assert facts["device"].startswith("NVIDIA")
