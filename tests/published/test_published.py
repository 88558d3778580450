"""The published results: complete, of the plans that are there, and what every page and figure says."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import files
import pytest
import results
import targets
from archive import Archive

ARCHIVE = Archive()
ROOT, PLANS = ARCHIVE.root, sorted(ARCHIVE.paths)
KEYS = (
    *("name", "model", "method", "label", "preset", "seed", "top1_start", "top1", "top1_ensemble"),
    *("samples", "entropy_bits", "unique", "inner_entropy_bits", "inner_unique", "file_bytes", "fp32_bytes"),
    *("codebooks", "separate", "epochs", "seconds", "device", "versions", "commit", "data", "settings"),
)


def test_every_page_and_figure_is_that_of_the_results() -> None:
    assert results.stale(ARCHIVE) == []


def test_the_tables_of_performance_are_those_of_the_measurements() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_all_its_results_and_no_others(name: str) -> None:
    plan = ARCHIVE.plan(name)
    missing = {run.name: ARCHIVE.result(name, run) for run in plan.runs() if not ARCHIVE.result(name, run)[0]}
    assert missing == {}
    files = {path.stem for path in (ARCHIVE.folder(name) / "results").iterdir()}
    assert files == {run.name for run in plan.runs()}


def test_every_retired_row_has_results_and_no_plan_has_it() -> None:
    for name in ARCHIVE.retirement.keys() - {"commit"}:
        assert all(ARCHIVE.retired(name).values()), name
        labels = {run.label for run in ARCHIVE.plan(name).runs()} if name in ARCHIVE.paths else set()
        assert not labels & ARCHIVE.retired(name).keys(), name


def test_every_result_says_where_it_comes_from() -> None:
    paths = sorted(ARCHIVE.experiments.glob("results/*/re*/*_seed*.json"))
    assert len(paths) > 200
    for path in paths:
        facts = json.loads(path.read_text(encoding="utf-8"))
        assert [key for key in KEYS if key not in facts] == [], path
        assert facts["name"] == path.stem, path
        assert int(facts["commit"], 16) > 0, path


def test_every_table_is_on_a_page() -> None:
    asked = [target.name for target in targets.read(ARCHIVE.experiments / "targets.toml")]
    shown = [name for _, _, tables in results.PAGES.values() for name in tables]
    assert sorted([*asked, *shown]) == ARCHIVE.names


def test_pages_of_tables_have_at_most_ten_columns() -> None:
    for page in (ROOT / "docs" / "tables").glob("*.md"):
        columns = [
            len(line.split(" | ")) for line in page.read_text("utf-8").splitlines() if line[:2] == "| "
        ]
        assert max(columns) <= 10, page


@pytest.mark.parametrize("name", [name for name in PLANS if not name.startswith("compare")])
def test_a_plan_is_for_one_network_and_says_how_to_repeat_it(name: str) -> None:
    plan, text = ARCHIVE.plan(name), ARCHIVE.paths[name].read_text(encoding="utf-8")
    (network,) = plan.networks
    # Held-out images must be new to the network.
    data = "45000" if plan.holdout else "cifar10"
    assert network.weights == f"weights/{network.name.removeprefix('cifar_')}_{data}.safetensors"
    assert f"make results NAME={name}\n" in text
    assert not plan.holdout or "--holdout 5000" in text


def test_one_change_at_a_time_from_the_row_of_the_targets() -> None:
    base = ARCHIVE.plan("resnet20").runs()[0].config.override({"schedule.epochs_per_round": 1.5})
    runs = [run for run in ARCHIVE.plan("levers_resnet20").runs() if run.seed == 0]
    for run in runs:
        assert run.config == base.override(run.row.settings), run.label
    assert [run.label for run in runs if run.config == base] == ["none of these"]


def test_kept_files_are_those_of_the_results() -> None:
    known = set()
    for path in ARCHIVE.experiments.glob("results/*/re*/*_seed*.json"):
        known.add(json.loads(path.read_text(encoding="utf-8"))["file_sha256"])
    for line in files.RESULTS.read_text(encoding="utf-8").splitlines():
        facts = json.loads(line)
        assert facts["was_sha256"] in known, facts["file"]
        assert facts["agreement"] >= 0.999, facts["file"]
        known.add(facts["sha256"])
    for file in (ARCHIVE.experiments / "models").glob("*.pwfn"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in known, file


HISTORY = {"95.00", "87.76", "1.37", "2.02", "90.10"}
"""Figures that docs/results.md quotes from the history, as it says, or from within a run."""


def test_figures_in_the_text_are_in_the_tables() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- files: .*?<!-- end of files -->", "", text, flags=re.DOTALL)  # a table itself
    tables = "".join(ARCHIVE.table(name) for name in ARCHIVE.names)
    known = set(
        re.findall(r"\d+\.\d\d", tables + (ROOT / "docs" / "tables" / "targets.md").read_text("utf-8"))
    )
    quoted = re.findall(r"(\d\d\.\d\d) (?:%|and|points)|(\d\.\d\d) bits", text)
    assert len(quoted) > 40
    assert {top1 or bits for top1, bits in quoted} - known - HISTORY == set()


@pytest.mark.parametrize("page", ["results", "methods", "comparing", "imagenet"])
def test_links_of_the_pages_lead_somewhere(page: str) -> None:
    path = ROOT / "docs" / f"{page}.md"
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / Path(target)).exists(), target
