"""From runs to the published tables: targets and their verdicts, figures, pages, and the command."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import figures
import imagenet
import posteriors
import pytest
import results
import second_stage
import targets
import torch
from archive import Archive
from targets import Target
from torch import nn

from pwfn import Config, ConfigError
from pwfn.evaluate.ensemble import Predictions
from pwfn.lab import compare

TINY = """# A tiny table
data = "digits"
seeds = [0, 1]
samples = 2
batch_size = 64
[settings]
training.steps_per_epoch = 3
posterior.init = "powers"
training.sigma_learning_rate = 0.001
schedule = { fractions = [0.5, 1.0], epochs_per_round = 0.2 }
finish = { polish_epochs = 0.1, reestimate_epochs = 0.1 }
[[model]]
name = "digits_resnet"
weights = "random"
[[row]]
method = "pwfn"
"""
RETIRED = 'commit = "0123abc"\n[old]\ntitle = "An old table"\nuses = "a.lever"\nrows = ["second", "first"]\n'


def _facts(top1: float = 0.92, **others: Any) -> dict[str, Any]:
    usual = {
        "top1_start": 0.92,
        "top1_ensemble": 0.925,
        "entropy_bits": 2.0,
        "unique": 30,
        "epochs": 28.05,
        "file_bytes": 40_000,
        "fp32_bytes": 1_000_000,
        "seed": 0,
        "seconds": 36.0,
        "holdout": 0,
        "inner_entropy_bits": 2.0,
        "inner_unique": 20,
        "codebooks": 1,
        "method": "pwfn",
        "samples": 2,
        "separate": {"layer": "no", "channel": "no", "attention": "none"},
        "file_sha256": "0",
        "device": "GPU",
        "versions": {"torch": "2.0"},
        "commit": "0123456789abcdef",
        "data": "digits",
    }
    return {**usual, "model": "digits_resnet", "top1": top1, **others}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """A repository with one target, one ablation and one retired table, of which nothing was measured."""
    made = Archive(tmp_path)
    for folder in ("docs", "experiments/rows", "experiments/ablations", "experiments/results/old/retired"):
        (tmp_path / folder).mkdir(parents=True)
    target = '[[target]]\nname = "tiny"\nlabel = "Tiny"\nat_least = 0.9\nbits = 2.5\n'
    (made.experiments / "targets.toml").write_text(target)
    (made.experiments / "retired.toml").write_text(RETIRED)
    (made.experiments / "rows" / "tiny.toml").write_text(TINY)
    (made.experiments / "ablations" / "more.toml").write_text(TINY.replace("A tiny", "Another"))
    return made


def _leave(archive: Archive, name: str, seed: int, **others: Any) -> Path:
    """A result of a plan, as a run would leave it."""
    run = next(run for run in archive.plan(name).runs() if run.seed == seed)
    folder = archive.folder(name) / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.name}.json"
    path.write_text(json.dumps(_facts(settings=run.config.to_dict(), seed=seed, **others)))
    return path


def _retire(archive: Archive, label: str, seed: int, **others: Any) -> None:
    path = archive.folder("old") / "retired" / f"{label}_seed{seed}.json"
    path.write_text(json.dumps(_facts(label=label, seed=seed, **others)))


# --- the verdict ---

WHOLE = Target("x", "X", start_at_least=0.92, within_points=0.0, bits=2.0, unique=30, times_smaller=25)
"""What _facts just meets."""


@pytest.mark.parametrize(
    ("target", "found", "missed"),
    [
        (WHOLE, [_facts()], []),
        (WHOLE, [_facts(0.91), _facts(0.92), _facts(0.93)], []),  # the mean counts, and it is 0.92
        (WHOLE, [_facts(0.9199), _facts(), _facts()], ["top-1 by 0.01 points"]),  # a third of 0.01, up
        (WHOLE, [_facts(top1_start=0.9175)], ["start by 0.25 points"]),
        (WHOLE, [_facts(entropy_bits=2.0001)], ["bits by 0.001"]),
        (WHOLE, [_facts(entropy_bits=1.9), _facts(entropy_bits=2.1)], []),
        (WHOLE, [_facts(unique=10), _facts(unique=31)], ["unique by 1"]),  # the worst seed
        (WHOLE, [_facts(file_bytes=100), _facts(file_bytes=41_234)], ["bytes by 1,234"]),
        (WHOLE, [_facts(0.9, unique=1100)], ["top-1 by 2.00 points", "unique by 1,070"]),
        (Target("x", "X", at_least=0.915), [_facts(0.915)] * 3, []),
        (Target("x", "X", at_least=0.915), [_facts(0.9149)], ["top-1 by 0.01 points"]),
        (Target("x", "X", within_points=0.3), [_facts(0.917)], []),
        (Target("x", "X", within_points=0.3), [_facts(0.9145)], ["top-1 by 0.25 points"]),
        (Target("x", "X", bytes=39_999), [_facts()], ["bytes by 1"]),
        (Target("x", "X"), [_facts(0.1)], []),
    ],
)
def test_what_is_missed_and_by_how_much(
    target: Target, found: Sequence[dict[str, Any]], missed: list[str]
) -> None:
    assert targets.shortfalls(target, found) == missed


@pytest.mark.parametrize(
    ("target", "found", "missing", "said"),
    [
        (WHOLE, [_facts()], {}, "met"),
        (WHOLE, [_facts(0.9)], {}, "missed: top-1 by 2.00 points"),
        (WHOLE, [_facts()], {1: "is missing"}, "seed 1 is missing; so far met"),
        (WHOLE, [_facts(unique=31)], {0: "is missing"}, "seed 0 is missing; so far missed: unique by 1"),
        (WHOLE, [], {0: "is missing"}, "not measured yet: seed 0 is missing"),
        (Target("x", "X"), [_facts(0.1)], {}, "–"),
    ],
)
def test_nothing_is_met_while_a_seed_is_missing(
    target: Target, found: Sequence[dict[str, Any]], missing: dict[int, str], said: str
) -> None:
    assert targets.verdict(target, found, missing) == said


def test_a_row_of_the_targets() -> None:
    """Of 91 and 92 the deviation is 1 / sqrt 2; the mean file of 40,617 bytes is 24.6 times smaller."""
    found = [_facts(0.91, top1_ensemble=None), _facts(0.92, file_bytes=41_234)]
    assert targets.row(WHOLE, found, {}) == [
        *("X", "92.00", "91.50 ± 0.71 (92.50)", "2.00", "30", "40,617 ± 873", "24.6×", "28.05"),
        "start at least 92 %; top-1 no lower than its start; bits at most 2.0; unique at most 30; "
        "bytes at most 1/25 of fp32",
        "missed: top-1 by 0.50 points, bytes by 1,234",
    ]
    assert targets.row(WHOLE, [], {0: "is missing"})[1:8] == ["–"] * 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_lest = 0.9", "did you mean 'at_least'"),
        ("at_least = 0.9\nwithin_points = 1.0", "both at_least and within_points"),
        ("bytes = 1\ntimes_smaller = 1", "both bytes and times_smaller"),
    ],
)
def test_a_mistake_in_the_targets_is_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(f'[[target]]\nname = "x"\nlabel = "X"\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        targets.read(path)


def test_results_of_other_settings_do_not_count(archive: Archive) -> None:
    _leave(archive, "tiny", 0)
    _leave(archive, "tiny", 1, holdout=5)
    found, missing = targets.results(archive, "tiny")
    assert ([facts["seed"] for facts in found], missing) == ([0], {1: "was run with other settings"})
    lines = targets.table(archive)
    assert "seed 1 was run with other settings; so far met" in lines[2]
    (archive.experiments / "rows" / "tiny.toml").write_text(TINY + '[[row]]\nmethod = "lsq"\n')
    with pytest.raises(ConfigError, match=r"one \[\[row\]\]"):
        targets.results(archive, "tiny")


# --- retired results ---


def test_retired_results_stay_with_the_commit_that_can_repeat_them(archive: Archive) -> None:
    for seed, top1 in enumerate((0.9, 0.92)):
        _retire(archive, "first", seed, top1=top1)
    _retire(archive, "second", 0, commit="fedcba9876")
    text = archive.table("old")
    assert "Uses settings that no longer exist (a.lever). Commit 0123abc" in text
    assert "Made at commits: 0123456, fedcba9." in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == ["second", "first"]  # the old order
    assert "91.00 ± 1.41" in rows[3]
    assert archive.title("old") == "An old table"
    # A target of such a table has its figures too.
    target = '[[target]]\nname = "old"\nlabel = "Old"\n'
    (archive.experiments / "targets.toml").write_text(target)
    lines = targets.table(archive)
    assert lines[2].startswith("| Old †")
    assert "commit 0123abc has the plan" in lines[-1]


def test_a_table_has_the_rows_of_its_plan_and_then_the_retired(archive: Archive) -> None:
    text = RETIRED.replace("[old]", "[more]").replace('["second", "first"]', '["gone"]')
    (archive.experiments / "retired.toml").write_text(text)
    _leave(archive, "more", 0)
    folder = archive.folder("more") / "retired"
    folder.mkdir()
    (folder / "gone_seed0.json").write_text(json.dumps(_facts(label="gone")))
    assert list(archive.rows("more")) == ["PWFN", "gone"]
    written = archive.table("more")
    assert written.index("| PWFN") < written.index("no longer exist") < written.index("| gone")
    assert written.count("± is the standard deviation") == 1


# --- figures ---


def test_lines_of_test_images_are_points(archive: Archive) -> None:
    _leave(archive, "tiny", 0, top1=0.93)
    _leave(archive, "tiny", 1, top1=0.91)
    _leave(archive, "more", 0, holdout=0, file_bytes=350)
    _retire(archive, "first", 0, method="lsq+", file_bytes=900)
    _retire(archive, "second", 0, method="baseline")
    found = [(p.table, p.kind, p.size) for p in figures.points(archive)]
    assert found == [
        ("more", figures.ELSEWHERE, 350),
        ("old", figures.QUANTISERS, 900),
        ("tiny", figures.TARGETS, 40_000),
    ]
    tiny = figures.points(archive)[-1]
    assert (tiny.top1, tiny.spread, tiny.start) == pytest.approx((92.0, 2**0.5, 92.0))


def test_the_median_of_a_histogram() -> None:
    assert figures.median((-64, [1, 5, 1])) == pytest.approx(2 ** (-62.5 / 8))
    assert figures.median((0, [2, 0, 2])) == pytest.approx(2 ** (0.5 / 8))


def _sigmas(archive: Archive, name: str) -> None:
    traces = [
        {"moment": "before" if number else "start", "round": number, "fraction": 0.0, "sigma": [first, [3]]}
        for number, first in ((0, -64), (1, -56))
    ]
    settings = {"posterior": {"alpha": 2.0**-11, "cap": 0.05}, "training": {"sigma_learning_rate": 0.1}}
    archive.folder(name).mkdir(parents=True, exist_ok=True)
    line = json.dumps({"label": "one", "settings": settings, "traces": traces})
    (archive.folder(name) / "sigmas.jsonl").write_text(line + "\n")


def test_the_table_and_the_figure_of_sigma(archive: Archive) -> None:
    """The middle of the bin [2^-8, 2^-7.875) is 0.0041, and an octave up 0.0082."""
    _sigmas(archive, "s")
    rows = [line for line in figures.sigma_lines(archive, "s") if line.startswith("| ")]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]] == [
        ["start", "0.0041"],
        ["fixing 1", "0.0082"],
    ]
    panel = figures.sigma_figure(archive, "s").axes[0]
    start, before = (line.get_xydata() for line in panel.lines[:2])
    assert [xy.tolist() for xy in (start[1], before[1])] == [[-63.5 / 8, 100.0], [-55.5 / 8, 100.0]]


def test_the_frontier_is_drawn_from_the_points(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PANELS", {"digits_resnet": "Tiny"})
    for seed in (0, 1):
        _leave(archive, "tiny", seed)
    _retire(archive, "first", 0, top1=0.5)  # below the panel
    _retire(archive, "second", 0, model="other")
    panel = figures.frontier(archive).axes[0]
    assert panel.get_title(loc="left") == "Tiny"
    assert panel.get_legend_handles_labels()[1] == [figures.TARGETS, figures.ELSEWHERE]
    assert "2 lines, of which 1" in figures.frontier_lines(archive)[-1]


# --- the command ---


def _call(archive: Archive, *arguments: str) -> int:
    return results.main(arguments, archive, archive.root / "tables")


def test_a_plan_is_run_and_its_figures_are_kept(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = archive.experiments / "rows" / "tiny.toml"
    plan.write_text(TINY.replace("seeds = [0, 1]", "seeds = [0]"))
    monkeypatch.setattr(figures, "SIGMAS", ("tiny",))
    words = ("run", "tiny", "--device", "cpu", "--commit", "ab" * 20)
    assert _call(archive, *words) == 0
    kept, ran = archive.folder("tiny"), archive.root / "tables" / "tiny"
    result = "results/digits_resnet_pwfn_seed0.json"
    for path in (result, "table.md"):
        assert (kept / path).read_bytes() == (ran / path).read_bytes()
    assert json.loads((kept / result).read_text())["commit"] == "ab" * 20
    (run,) = figures.sigma_traces(archive, "tiny")
    assert [trace["moment"] for trace in run["traces"]] == ["start", "before", "before"]
    assert run["settings"]["training"]["sigma_learning_rate"] == 0.001
    assert sum(run["traces"][0]["sigma"][1]) > 70_000  # every weight of the network
    capsys.readouterr()

    # The file that the figures are of.
    assert _call(archive, "keep", "tiny", "0") == 0
    file = archive.experiments / "models" / "tiny_seed0.pwfn"
    assert capsys.readouterr().out == f"pwfn evaluate {file} --data digits\n"
    assert file.read_bytes() == (ran / "digits_resnet/pwfn/seed0/model.pwfn").read_bytes()

    # Elsewhere, where the runs are not: what has results is not run again, what is new would be.
    shutil.rmtree(archive.root / "tables")
    assert _call(archive, *words, "--missing") == 0
    assert not (archive.root / "tables").exists()
    plan.write_text(TINY)
    assert [run.seed for run in results.unmeasured(archive, "tiny").runs()] == [1]
    assert _call(archive, *words, "--missing", "--table-only") == 1
    assert "- digits_resnet, PWFN, seed 1: not measured" in (kept / "table.md").read_text()
    capsys.readouterr()
    assert _call(archive, "list") == 0
    assert capsys.readouterr().out == "tiny  1 of 2 results\nmore  0 of 2 results\n"


def test_a_run_that_failed_does_not_replace_what_was_kept(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder may hold figures of other settings."""
    first, second = (_leave(archive, "tiny", seed) for seed in (0, 1))
    before = first.read_bytes()
    ran = archive.root / "tables" / "tiny"
    (ran / "results").mkdir(parents=True)
    (ran / "results" / first.name).write_text("{}")
    newer = {**json.loads(second.read_text()), "top1": 0.5}
    (ran / "results" / second.name).write_text(json.dumps(newer))
    real = compare.run

    def run(plan: compare.Plan, out: Path, **options: Any) -> compare.Table:
        if out == ran:
            assert (options["jobs"], options["commit"]) == (2, "abc1234")
            done = {plan.runs()[1].name: newer}
            return compare.table.make_table(plan, done, {plan.runs()[0].name: "the loss is nan"})
        return real(plan, out, **options)

    monkeypatch.setattr(compare, "run", run)
    assert _call(archive, "run", "tiny", "--jobs", "2", "--commit", "abc1234") == 0  # each seed has a result
    assert first.read_bytes() == before
    assert json.loads(second.read_text())["top1"] == 0.5
    assert "digits_resnet, PWFN, seed 0: the loss is nan" in capsys.readouterr().err


def test_only_small_files_whose_figures_are_known_are_kept(
    archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert _call(archive, "keep", *words) == 2
        return capsys.readouterr().err

    assert "model.pwfn: is not there" in refused("tiny", "0")
    file = archive.root / "tables" / "tiny" / "digits_resnet" / "pwfn" / "seed0" / "model.pwfn"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3_000_001))
    assert "has 3,000,001 bytes" in refused("tiny", "0")
    file.write_bytes(bytes(100))
    _leave(archive, "tiny", 0, file_sha256=hashlib.sha256(b"another").hexdigest())
    assert "its figures are not in" in refused("tiny", "0")
    assert "tiny has 0 such runs with seed 7" in refused("tiny", "7")
    assert "tiny has 0 such runs with seed 0" in refused("tiny", "0", "--row", "another")
    _leave(archive, "tiny", 0, file_sha256=hashlib.sha256(bytes(100)).hexdigest())
    assert _call(archive, "keep", "tiny", "0") == 0
    assert (archive.experiments / "models" / "tiny_seed0.pwfn").read_bytes() == bytes(100)

    # Of several rows, one must be named.
    plan = archive.paths["tiny"]
    plan.write_text(TINY + '[[row]]\nmethod = "pwfn"\nlabel = "second"\n')
    assert 'not one: give --row, one of "PWFN", "second"' in refused("tiny", "0")
    assert _call(archive, "keep", "tiny", "0", "--row", "PWFN") == 0
    assert (archive.experiments / "models" / "digits_resnet_pwfn_seed0.pwfn").read_bytes() == bytes(100)


def test_mistakes_are_reported_before_anything_is_run(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(archive, "run", "tiny", "mor") == 2
    assert "did you mean 'more'?" in capsys.readouterr().err
    monkeypatch.setattr(results, "git_commit", lambda file: None)
    assert _call(archive, "run", "tiny") == 2
    assert "give --commit" in capsys.readouterr().err
    assert not (archive.root / "tables").exists()
    shutil.copy(archive.experiments / "rows" / "tiny.toml", archive.experiments / "ablations")
    with pytest.raises(ConfigError, match="would share their results"):
        _ = Archive(archive.root).paths


def test_pages_are_written_and_found_stale(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "PAGES", {"page": ("A page", "It begins.", ("more", "old"))})
    monkeypatch.setattr(figures, "fingerprints", lambda archive: {})
    monkeypatch.setattr(figures, "PANELS", {})
    (archive.experiments / "imagenet").mkdir()
    for seed in (0, 1):
        _leave(archive, "tiny", seed)
        _leave(archive, "more", seed)
        _retire(archive, "first", seed)
    _retire(archive, "second", 0)
    block = "before\n<!-- {0}: made by us -->\nold\n<!-- end of {0} -->\nafter\n"
    pages = {"uncertainty": "per byte", "imagenet": "none", "results": "none", "method": "none"}
    for page, name in pages.items():
        (archive.root / "docs" / f"{page}.md").write_text(block.format(name))
    assert _call(archive, "docs") == 0
    assert _call(archive, "docs", "--check") == 0
    text = (archive.root / "docs" / "tables" / "page.md").read_text()
    assert "# A page\n\nIt begins.\n\n## Another table\n\n`make results NAME=more` repeats it." in text
    assert "## An old table\n\n###" in text
    page = (archive.root / "docs" / "uncertainty.md").read_text()
    assert page == block.format("per byte").replace("old", "Not measured yet.")
    assert "old" in (archive.root / "docs" / "imagenet.md").read_text()  # not a block of ours
    _leave(archive, "tiny", 1, top1=0.5)
    assert _call(archive, "docs", "--check") == 1
    assert "docs/tables/targets.md" in capsys.readouterr().err


# --- ImageNet ---


def test_the_table_of_times(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert imagenet.steps(path)[0].startswith("Not measured yet")
    line: dict[str, Any] = {
        "network": "resnet18.tv_in1k",
        "batch_size": 128,
        "device": "a GPU",
        "ours_s": 0.032,
        "ratio": 2.0,
        "rival_s": 0.016,
        "ours_images_a_second": 4000.0,
        "worker_images_a_second": 150.0,
        "ours_bytes": 3 * 2**30,
        "precision": "bf16",
        "cuda_graph": True,
        "versions": {"torch": "2.0"},
        "commit": "0123456789abcdef",
        "counts": {"training": 27.05, "polish": 1, "reestimation": 2, "scorings": 10, "fp32_scorings": 23},
        "hours": {"training": 2.41, "polish": 0.09, "reestimation": 0.1, "scoring": 0.2, "all": 2.8},
    }
    path.write_text("".join(json.dumps(own) + "\n" for own in ({**line, "ours_s": 1.0}, line)))
    _, _, row, _, below = imagenet.steps(path)
    # The later line counts; 4,000 images per second by workers of 150 each: 26.7 of them.
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("`resnet18.tv_in1k`", "128", "32.0 ms", "4,000", "16.0 ms (ratio 2.00)", "3.0 GiB", "2.41", "0.39"),
        *("2.80", "27"),
    ]
    assert "27.05 epochs of training" in below


def test_the_presets_differ_in_what_the_page_says() -> None:
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in imagenet.differing()[2:]]
    paper = Config.preset("paper")
    changes = {name: json.loads(ours) for name, _, ours in rows}
    assert paper.override(changes) == Config.preset("recommended")


def test_the_scores_of_draws_by_hand() -> None:
    log_p = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0], [2.0, 2.0]], dtype=torch.float64).div(4).log()
    nothing = torch.zeros(4)
    found = posteriors.scores(Predictions(log_p, nothing, nothing, torch.tensor([0, 1, 1, 0]), 1, nothing))
    assert found["accuracy"] == 0.75  # the last one is a tie, and the first class wins
    likelihoods = (0.75, 0.25, 0.75, 0.5)
    assert found["nll"] == pytest.approx(-sum(map(math.log, likelihoods)) / 4)


def test_the_table_of_draws(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    assert posteriors.table(path) == ["Not measured yet."]
    measures = {"images": 100, "nll": 0.5, "ece": 0.25, "nll_half_tempered": 0.4}
    facts = {
        "file": "a.pwfn",
        "bytes": 12345,
        "sigma_bytes": 22,
        "samples": 20,
        "seed": 0,
        "fit_seconds": 6.6,
        "point": {**measures, "accuracy": 0.9},
        "ensemble": {**measures, "accuracy": 0.91, "nll": 0.45},
        "device": "a machine",
        "threads": 1,
        "versions": {"torch": "2.13"},
        "commit": "0123456789abcdef",
    }
    path.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    lines = posteriors.table(path)
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    both = ["90.00 → 91.00", "0.500 → 0.450", "0.250 → 0.250", "0.400 → 0.400"]
    assert cells == ["`a.pwfn`", "12,345", "22", *both, "7"]
    assert "a machine, 1 threads" in lines[-1]
    assert "0123456789" in lines[-1]


def test_the_table_of_second_stages(tmp_path: Path) -> None:
    """Differences are between runs of the same seed: by hand 0.1 and 0.3 here, 0.2 ± 0.1."""
    path = tmp_path / "second_stage.jsonl"
    assert second_stage.table(path) == ["Not measured yet."]
    name, step = second_stage.RUNS[0]
    lines = []
    for seed, changes in enumerate(({"quick": 0.0, "distilled": 0.1}, {"quick": 0.0, "distilled": 0.3})):
        for variant, change in changes.items():
            parts = {part: {"kl": 0.5 + seed + change, "agreement": 0.9} for part in second_stage.SETS}
            own = {"network": name, "step": step, "seed": seed, "variant": variant, "accuracy": 0.8}
            facts = {"device": "a machine", "threads": 1, "torch": "2.13", "commit": "0123456789abcdef"}
            lines.append(json.dumps({**own, **parts, **facts}))
    path.write_text("\n".join(lines), encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in second_stage.table(path)[2:4]]
    assert rows[0] == [f"{name}, {step}", "quick", "1.0000", "1.0000", "1.0000", "90.00", "80.00"]
    change = "+0.2000 ± 0.1000"
    assert rows[1][1:] == ["distilled", change, change, change, "+0.00 ± 0.00", "+0.00 ± 0.00"]


def test_a_regression_on_its_own_channels_leaves_batchnorm_alone() -> None:
    """The copy is the original: slope 1, shift 0."""
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean.copy_(torch.tensor([0.1, 0.2, 0.3]))
    inputs = SimpleNamespace(inputs=torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)))
    lane: Any = SimpleNamespace(found=inputs, _original=SimpleNamespace(found=inputs))
    work: Any = SimpleNamespace(_networks=(None, nn.Sequential(layer)))
    second_stage.regress(work, "0", [lane])
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(layer.running_var, torch.ones(3))
