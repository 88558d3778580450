"""The published tables: their plans, the verdict on the targets, and the way from a run to the pages."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import results
import table
import targets
from results import Folders
from targets import Target

from pwfn import Config, ConfigError
from pwfn.lab import compare
from pwfn.lab.compare.plan import Plan
from pwfn.lab.compare.table import make_table

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"
ROWS = sorted((EXPERIMENTS / "rows").glob("*.toml"))
ABLATIONS = sorted((EXPERIMENTS / "ablations").glob("*.toml"))
KEYS = (
    *("model", "method", "preset", "seed", "top1_start", "top1", "top1_ensemble", "entropy_bits", "unique"),
    *("file_bytes", "fp32_bytes", "epochs", "seconds", "device", "commit"),
)


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in config.to_dict().items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def _changed(one: Config, other: Config) -> dict[str, Any]:
    """The settings of the second that are not those of the first."""
    before = _flat(one)
    return {name: value for name, value in _flat(other).items() if value != before[name]}


def _ablation(name: str) -> Plan:
    return compare.load(EXPERIMENTS / "ablations" / f"{name}.toml")


# --- the plans ---


def test_every_target_has_its_plan_of_one_row_and_three_seeds() -> None:
    asked = targets.read(EXPERIMENTS / "targets.toml")
    assert sorted(target.name for target in asked) == [path.stem for path in ROWS]
    for path in ROWS:
        plan = compare.load(path)
        assert [run.seed for run in plan.runs()] == [0, 1, 2]
        assert (plan.data, plan.samples, plan.rows[0].method) == ("npz:data/cifar10.npz", 20, "pwfn")


@pytest.mark.parametrize("path", [*ROWS, *ABLATIONS], ids=lambda path: path.stem)
def test_a_plan_is_for_one_network_and_says_how_it_is_computed(path: Path) -> None:
    plan = compare.load(path)
    (network,) = plan.models
    names = {"cifar_vit_tiny": "vit_tiny"}
    stem = names.get(network.name, network.name.removeprefix("cifar_"))
    data = "45000" if plan.holdout else "cifar10"  # what is held out must be new to the network
    assert network.weights == f"weights/{stem}_{data}.safetensors"
    for run in plan.runs():
        training = run.config.training
        assert (training.cuda_graph, training.precision) == (True, "bf16")
        assert training.channels_last == ("vit" not in network.name)
    assert f"make results NAME={path.stem}\n" in path.read_text()


@pytest.mark.parametrize("network", ["resnet18", "resnet20"])
def test_the_rows_on_sigma_differ_in_sigma_alone(network: str) -> None:
    """The same rounds, rule and epochs; the precision b goes with sigma, the floor is one for sigma."""
    runs = [run for run in _ablation(f"sigma_{network}").runs() if run.seed == 0]
    labels = ["sigma learned, as in the paper", "sigma learned at its own rate", "sigma from curvature"]
    assert [run.label for run in runs] == [*labels, "one constant sigma", "sigma in proportion to |w|"]
    first = runs[0].config
    own_rate = {
        "posterior.alpha": 2**-13,
        "posterior.cap": 0.1,
        "training.sigma_learning_rate": 0.1,
        "clustering.distance_floor": 2**-9,
    }
    given = {"posterior.learn_sigma": False, "clustering.b": "off"}
    assert [_changed(first, run.config) for run in runs] == [
        {},
        own_rate,
        {**given, "posterior.init": "curvature_root", "posterior.scaled": True},
        {**given, "posterior.init": "tolerance"},
        {**given, "posterior.init": "relative", "posterior.scaled": True},
    ]
    assert [run.config.posterior.tolerance for run in runs[2:]] == [0.1] * 3
    assert (first.posterior.init, first.posterior.learn_sigma, first.clustering.b) == ("powers", True, 7)
    assert {run.epochs for run in runs} == {28.05 if network == "resnet20" else 10.05}
    assert [run.seed for run in _ablation(f"sigma_{network}").runs()] == [0, 1, 2] * 5


def test_the_rows_on_alpha_and_on_the_prior() -> None:
    alphas = _ablation("alpha_resnet20").runs()
    assert [run.config.posterior.alpha for run in alphas] == [2.0**-n for n in range(9, 15)]
    assert [run.label for run in alphas] == [f"alpha 2^-{n}" for n in range(9, 15)]
    assert all(run.config.posterior.learn_sigma for run in alphas)  # without, alpha would do nothing
    prior, none = (run.config for run in _ablation("prior_resnet20").runs() if run.seed == 0)
    assert (prior.posterior.init, none.posterior.constant_sigma) == ("powers", 1e-3)
    assert _changed(prior, none) == {"posterior.init": "constant"}


@pytest.mark.parametrize("network", ["resnet20", "resnet20_small"])
def test_every_lever_is_pulled_alone_from_the_row_it_is_for(network: str) -> None:
    row = compare.load(EXPERIMENTS / "rows" / f"{network}.toml").runs()[0].config
    base = row.override({"schedule.epochs_per_round": 1.5})
    runs = [run for run in _ablation(f"levers_{network}").runs() if run.seed == 0]
    for run in runs:
        assert run.config == base.override(run.row.settings), run.label
    assert [run.label for run in runs if run.config == base] == ["none of these"]
    # Fewer rounds, but no fewer epochs; two rows are about training for longer.
    epochs = {run.label: run.epochs for run in runs}
    longer = {"polish, 4 epochs": 17.55, "four times the epochs": 55.05}
    for label in longer.keys() & epochs.keys():
        assert epochs.pop(label) == pytest.approx(longer[label])
    assert {round(number, 6) for number in epochs.values()} == {14.55}


@pytest.mark.parametrize("path", [path for path in ABLATIONS if path.stem.startswith("levers")])
def test_levers_are_for_images_that_the_network_never_saw(path: Path) -> None:
    plan, text = compare.load(path), path.read_text()
    assert plan.holdout == 5000
    assert {run.seed for run in plan.runs()} == ({0, 1, 2} if "resnet20" in path.stem else {0})
    assert len({run.config for run in plan.runs()}) == len(plan.runs())
    assert "--holdout 5000" in text
    assert f"--out {plan.models[0].weights}\n" in text


def test_a_name_is_of_one_plan(tmp_path: Path) -> None:
    assert len(Folders().plans()) == len(ROWS) + len(ABLATIONS) + 3
    folders = Folders(tmp_path)
    for place in ("rows", "ablations"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "same.toml").touch()
    with pytest.raises(ConfigError, match=r"same\.toml would share a folder of results: rename one"):
        folders.plans()
    with pytest.raises(ConfigError, match=r"'resnet2O' is no plan in .*: did you mean 'resnet20'\?"):
        Folders().plan("resnet2O")


# --- what is in the repository ---


def test_every_result_has_what_it_must_have() -> None:
    paths = sorted((EXPERIMENTS / "results").glob("*/results/*.json"))
    assert len(paths) >= 19
    for path in paths:
        facts = json.loads(path.read_text())
        assert [key for key in KEYS if key not in facts] == [], path
        assert int(facts["commit"], 16) > 0, path
    # Those of experiments/cifar10.py say in place of a preset which TOML file they are of: by their names.
    for path in sorted((EXPERIMENTS / "results").glob("*_seed*.json")):
        facts = json.loads(path.read_text())
        assert [key for key in KEYS if key not in facts and key != "preset"] == [], path
        assert (EXPERIMENTS / f"{path.stem.rpartition('_seed')[0]}.toml").exists()


def test_every_table_is_of_its_plan_and_made_from_its_results(tmp_path: Path) -> None:
    plans = Folders().plans()
    for found in sorted((EXPERIMENTS / "results").glob("*/table.md")):
        folder = found.parent
        plan = compare.load(plans[folder.name])
        files = {path.stem for path in (folder / "results").iterdir()}
        assert files <= {run.name for run in plan.runs()}, folder
        shutil.copytree(folder / "results", tmp_path / folder.name / "results")
        compare.run(plan, tmp_path / folder.name, table_only=True, say=lambda line: None)
        assert (tmp_path / folder.name / "table.md").read_text() == found.read_text(), folder
    assert list(tmp_path.iterdir())


# --- the verdict ---


def _facts(top1: float = 0.92, **others: Any) -> dict[str, Any]:
    usual = {
        "top1_start": 0.92,
        "top1_ensemble": 0.925,
        "entropy_bits": 2.0,
        "unique": 30,
        "file_bytes": 40_000,
        "epochs": 28.05,
        "fp32_bytes": 1_000_000,
        "device": "GPU",
        "versions": {"torch": "2.0"},
        "commit": "0123456789abcdef",
    }
    return {**usual, "top1": top1, **others}


WHOLE = Target(
    "x", "X", start_at_least=0.92, within_points=0.0, bits=2.0, unique=30, times_smaller=25
)  # what _facts just meets


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
        (
            WHOLE,
            [_facts(0.9, entropy_bits=3.5, unique=1100)],
            ["top-1 by 2.00 points", "bits by 1.500", "unique by 1,070"],
        ),
        (Target("x", "X", at_least=0.915), [_facts(0.915)] * 3, []),
        (Target("x", "X", at_least=0.915), [_facts(0.9149)], ["top-1 by 0.01 points"]),
        (Target("x", "X", within_points=0.3), [_facts(0.917)], []),
        (Target("x", "X", within_points=0.3), [_facts(0.9145)], ["top-1 by 0.25 points"]),
        (Target("x", "X", at_least=0.9, bytes=40_000), [_facts()], []),
        (Target("x", "X", at_least=0.9, bytes=39_999), [_facts()], ["bytes by 1"]),
    ],
)
def test_what_is_missed_and_by_how_much(
    target: Target, found: Sequence[dict[str, Any]], missed: list[str]
) -> None:
    assert targets.shortfalls(target, found) == missed


@pytest.mark.parametrize(
    ("found", "missing", "said"),
    [
        ([_facts()], {}, "met"),
        ([_facts(0.9)], {}, "missed: top-1 by 2.00 points"),
        ([_facts()], {1: "is missing", 2: "is missing"}, "seed 1 is missing; seed 2 is missing; so far met"),
        ([_facts(unique=31)], {0: "is missing"}, "seed 0 is missing; so far missed: unique by 1"),
        ([], {0: "is missing"}, "not measured yet"),
        (
            [],
            {0: "was run with other settings"},
            "not measured yet: seed 0 was run with other settings",
        ),
    ],
)
def test_nothing_is_met_while_a_seed_is_missing(
    found: Sequence[dict[str, Any]], missing: dict[int, str], said: str
) -> None:
    assert targets.verdict(WHOLE, found, missing) == said


def test_where_nothing_is_asked_nothing_is_met() -> None:
    free = Target("x", "X")
    assert targets.shortfalls(free, [_facts(0.1)]) == []
    assert targets.verdict(free, [_facts(0.1)], {}) == "–"
    assert free.asked() == "none"
    assert targets.verdict(free, [], {0: "is missing"}) == "not measured yet"


def test_a_line_of_the_targets_table() -> None:
    """Of 91 and 92 the deviation is 1 / sqrt 2; of the largest file, 41,234 bytes, 24.25 make the whole."""
    found = [_facts(0.91, top1_ensemble=None), _facts(0.92, file_bytes=41_234, unique=1_030)]
    cells = targets.row(WHOLE, found, {}, "x.toml").strip("| ").split(" | ")
    assert cells == [
        *("[X](x.toml)", "92.00", "91.50 ± 0.71", "92.50", "2.00 ± 0.00", "1,030", "41,234", "24.2 times"),
        "28.05",
        "start at least 92 %; top-1 no lower than its start; bits at most 2; unique at most 30; "
        "bytes at most 1/25 of fp32",
        "missed: top-1 by 0.50 points, unique by 1,000, bytes by 1,234",
    ]
    assert targets.row(WHOLE, [], {0: "is missing"}, "x.toml").count(" – |") == 8
    assert len(targets.HEAD.splitlines()[0].strip("| ").split(" | ")) == len(cells)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_lest = 0.9", "'at_lest' is unknown: did you mean 'at_least'?"),
        ("at_least = 0.9\nwithin_points = 1.0", "target 'x' has both at_least and within_points: give one"),
        ("at_least = 0.9\nbytes = 1\ntimes_smaller = 1", "target 'x' has both bytes and times_smaller"),
    ],
)
def test_a_mistake_in_the_targets_is_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(f'[[target]]\nname = "x"\nlabel = "X"\n{text}\n')
    with pytest.raises(ConfigError) as caught:
        targets.read(path)
    assert message in str(caught.value)


# --- from files to pages ---

TINY = """# A tiny table
data = "digits"
seeds = [0, 1]
samples = 2
batch_size = 64
[settings]
schedule = { fractions = [0.5, 1.0], epochs_per_round = 0.2 }
finish = { polish_epochs = 0.1, reestimate_epochs = 0.1 }
[[model]]
name = "digits_resnet"
weights = "random"
[[row]]
method = "pwfn"
"""
ASKED = '[[target]]\nname = "tiny"\nlabel = "Tiny"\nat_least = 0.9\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one target and one ablation, of which nothing was measured."""
    for folder in ("docs", "experiments/rows", "experiments/ablations", "experiments/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "experiments" / "targets.toml").write_text(ASKED)
    (tmp_path / "experiments" / "rows" / "tiny.toml").write_text(TINY)
    (tmp_path / "experiments" / "ablations" / "more.toml").write_text(TINY.replace("A tiny", "Another"))
    marks = {
        "README.md": (table.TARGETS, table.COMPARISON),
        "docs/results.md": (
            table.TARGETS,
            table.FRONTIER,
            (table.START, table.END),
            table.SIGMAS,
            table.ABLATIONS,
        ),
        "docs/uncertainty.md": (table.TRUST,),
    }
    for name, pairs in marks.items():
        blocks = "\n".join(f"before\n{start}\n{end}\nafter" for start, end in pairs)
        (tmp_path / name).write_text(f"# Page\n{blocks}\n")
    return tmp_path


def _leave(root: Path, name: str, seed: int, **others: Any) -> None:
    """A result of the tiny plan, as a run would leave it."""
    run = next(run for run in compare.load(root / "experiments/rows/tiny.toml").runs() if run.seed == seed)
    folder = root / "experiments" / "results" / name / "results"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**_facts(), "settings": run.config.to_dict(), **others}
    (folder / f"{run.name}.json").write_text(json.dumps(facts))


def test_results_of_other_settings_do_not_count(root: Path) -> None:
    plan = compare.load(root / "experiments/rows/tiny.toml")
    folder = root / "experiments/results/tiny"
    assert targets.results(plan, folder) == ([], {0: "is missing", 1: "is missing"})
    _leave(root, "tiny", 0)
    other = plan.runs()[1].config.override({"clustering.delta": 2.0})
    _leave(root, "tiny", 1, settings=other.to_dict())
    found, missing = targets.results(plan, folder)
    assert [facts["top1"] for facts in found] == [0.92]
    assert missing == {1: "was run with other settings"}
    two = compare.read(TINY + '[[row]]\nmethod = "lsq"\n')
    with pytest.raises(ConfigError, match=r"has one \[\[model\]\] and one \[\[row\]\]"):
        targets.results(two, folder)


def _table_command(root: Path, *arguments: str) -> tuple[int, str]:
    words = [sys.executable, str(EXPERIMENTS / "table.py"), "--root", str(root), *arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


def test_pages_are_written_between_their_marks_and_checked(root: Path) -> None:
    stale = "README.md and docs/results.md: not up to date: run python experiments/table.py"
    all_stale = stale.replace("results.md", "results.md and docs/uncertainty.md")
    assert _table_command(root, "--check") == (1, all_stale)
    assert _table_command(root) == (0, "")
    assert _table_command(root, "--check") == (0, "")
    readme, page = ((root / name).read_text() for name in ("README.md", "docs/results.md"))
    assert "| [Tiny](experiments/rows/tiny.toml) | – |" in readme
    assert "| top-1 at least 90 % | not measured yet |" in readme
    assert "| [Tiny](../experiments/rows/tiny.toml) | – |" in page
    assert "Not measured yet: `more`." in page
    assert "-->\nNot measured yet.\n<!--" in (root / "docs" / "uncertainty.md").read_text()
    assert (readme.count("before\n"), readme.count("\nafter")) == (2, 2)
    _leave(root, "tiny", 0)
    _leave(root, "tiny", 1, device="GPU B", commit="ab" * 20)
    text = table.pages(root)[root / "README.md"]
    figures = "| 92.00 ± 0.00 | 92.50 ± 0.00 | 2.00 ± 0.00 | 30 | 40,000 | 25.0 times | 28.05 |"
    assert f"{figures} top-1 at least 90 % | met |" in text
    assert "Measured on: GPU B, torch 2.0; GPU, torch 2.0. Commits: 0123456, abababa." in text
    assert _table_command(root, "--check") == (1, stale)


def test_ablations_stand_under_the_first_line_of_their_plan(root: Path) -> None:
    folder = root / "experiments" / "results" / "more"
    folder.mkdir()
    (folder / "table.md").write_text("### digits_resnet, digits\n\n| a ### b |\n")
    text = table.ablations(root / "experiments")
    assert (
        text == "### Another table\n\n`make results NAME=more`\n\n#### digits_resnet, digits\n\n| a ### b |"
    )


def test_a_page_without_its_marks_is_not_written_over(root: Path) -> None:
    (root / "README.md").write_text("# Page\n")
    status, sentence = _table_command(root)
    assert status == 1
    assert sentence.startswith("a page has not both marks <!-- targets")
    assert (root / "README.md").read_text() == "# Page\n"


# --- from runs to files ---


def _call(root: Path, *arguments: str) -> int:
    return results.main(arguments, Folders(root / "experiments", root / "tables"))


def test_a_plan_is_run_and_what_came_of_it_is_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = root / "experiments" / "rows" / "tiny.toml"
    plan.write_text(TINY.replace("seeds = [0, 1]", "seeds = [0]"))
    words = ("run", "tiny", "--device", "cpu", "--commit", "ab" * 20)
    assert _call(root, *words) == 0
    kept, ran = root / "experiments" / "results" / "tiny", root / "tables" / "tiny"
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*.*")) == [
        "results/digits_resnet_pwfn_seed0.json",
        "table.json",
        "table.md",
    ]
    for path in ("results/digits_resnet_pwfn_seed0.json", "table.json", "table.md"):
        assert (kept / path).read_bytes() == (ran / path).read_bytes()
    facts = json.loads((kept / "results" / "digits_resnet_pwfn_seed0.json").read_text())
    assert [key for key in KEYS if key not in facts] == []
    assert facts["commit"] == "ab" * 20
    capsys.readouterr()

    # The file that the figures are of, and no other.
    assert _call(root, "keep", "tiny", "0") == 0
    file = root / "experiments" / "models" / "tiny_seed0.pwfn"
    assert capsys.readouterr().out == f"pwfn evaluate {file} --data digits\n"
    assert file.read_bytes() == (ran / "digits_resnet/pwfn/seed0/model.pwfn").read_bytes()

    # Another machine, where the runs are not: what has results is not run again, what is new would be.
    shutil.rmtree(root / "tables")
    before = (kept / "table.md").read_bytes()
    assert _call(root, *words, "--missing") == 0
    assert not (root / "tables").exists()
    assert (kept / "table.md").read_bytes() == before
    plan.write_text(TINY)
    assert [run.seed for run in results.unmeasured(compare.load(plan), kept).runs()] == [1]
    assert _call(root, *words, "--missing", "--table-only") == 1
    assert "- digits_resnet, PWFN, seed 1: it has not ended" in (kept / "table.md").read_text()
    assert (kept / "results" / "digits_resnet_pwfn_seed0.json").exists()
    capsys.readouterr()
    assert _call(root, "list") == 0
    assert capsys.readouterr().out == "tiny  1 of 2 results\nmore  no results\n"


def test_a_run_that_another_table_has_is_not_done_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TINY.replace("seeds = [0, 1]", "seeds = [0]")
    other = '[[row]]\nmethod = "pwfn"\nlabel = "{}"\n[row.settings]\n"training.learning_rate" = {}\n'
    (root / "experiments/rows/tiny.toml").write_text(tiny)
    more = tiny.replace('method = "pwfn"\n', 'method = "pwfn"\nlabel = "The same"\n')
    (root / "experiments/ablations/more.toml").write_text(more + other.format("Faster", 0.002))
    words = ("--device", "cpu", "--commit", "ab" * 20)
    assert _call(root, "run", "tiny", *words) == 0
    capsys.readouterr()
    assert _call(root, "run", "more", *words) == 0
    said = capsys.readouterr().out.splitlines()
    source = root / "tables/tiny/digits_resnet/pwfn/seed0"
    assert said[0] == f"digits_resnet, The same, seed 0: the same as {source}, which is done"
    assert [line for line in said if line.endswith(": started")] == ["digits_resnet, Faster, seed 0: started"]
    kept = [
        json.loads(path.read_text()) for path in sorted((root / "experiments/results").rglob("*seed0.json"))
    ]
    faster, same, first = kept
    assert {key for key in first if same[key] != first[key]} == {"name", "label"}
    assert (same["label"], faster["label"]) == ("The same", "Faster")
    assert faster["file_sha256"] != first["file_sha256"]

    # Of other data, or begun by hand so that nobody knows: it is not the same.
    shutil.rmtree(root / "tables/more")
    plan = compare.load(root / "experiments/ablations/more.toml")
    folders = Folders(root / "experiments", root / "tables")
    begun = json.loads((source / "asked.json").read_text())
    for changed in ({**begun, "data": "others"}, {**begun, "holdout": 5}, None):
        (source / "asked.json").unlink()
        if changed is not None:
            (source / "asked.json").write_text(json.dumps(changed))
        assert results.share(plan, "more", folders) == []
    (source / "asked.json").write_text(json.dumps(begun))
    assert [run.label for run in results.share(plan, "more", folders)] == ["The same"]


def _model(root: Path, content: bytes) -> Path:
    file = root / "tables" / "tiny" / "digits_resnet" / "pwfn" / "seed0" / "model.pwfn"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_only_small_files_whose_figures_are_known_are_kept(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def complaint(*arguments: str) -> str:
        assert _call(root, "keep", *arguments) == 2
        return capsys.readouterr().err

    target = root / "experiments" / "models" / "tiny_seed0.pwfn"
    assert "model.pwfn: is not there: python experiments/results.py run tiny makes it" in complaint(
        "tiny", "0"
    )
    file = _model(root, bytes(3_000_001))
    assert f"{file}: has 3,000,001 bytes, and at most 3,000,000 are kept" in complaint("tiny", "0")
    file.write_bytes(bytes(3_000_000))
    assert "seed0.json: python experiments/results.py run tiny --table-only puts" in complaint("tiny", "0")
    _leave(root, "tiny", 0, file_sha256=hashlib.sha256(b"another").hexdigest())
    assert f"{file}: its figures are not in" in complaint("tiny", "0")
    assert "tiny has 0 runs with seed 7, not one: name a plan in" in complaint("tiny", "7")
    rows = root / "experiments" / "ablations" / "more.toml"
    rows.write_text(rows.read_text() + '[[row]]\nmethod = "lsq"\n')
    assert "more has 2 runs with seed 0, not one" in complaint("more", "0")
    assert not target.exists()
    _leave(root, "tiny", 0, file_sha256=hashlib.sha256(bytes(3_000_000)).hexdigest())
    assert _call(root, "keep", "tiny", "0") == 0
    assert target.read_bytes() == bytes(3_000_000)


def test_a_run_that_failed_does_not_replace_what_was_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its folder there may be figures of other settings; those of the plan are not lost to them."""
    for seed in (0, 1):
        _leave(root, "tiny", seed, model="digits_resnet", samples=2, file_sha256="0", **REST)
    kept = root / "experiments" / "results" / "tiny" / "results"
    names = [f"digits_resnet_pwfn_seed{seed}.json" for seed in (0, 1)]
    first = (kept / names[0]).read_bytes()
    ran = root / "tables" / "tiny" / "results"
    ran.mkdir(parents=True)
    newer = json.loads((kept / names[1]).read_text())
    (ran / names[0]).write_text("{}")
    (ran / names[1]).write_text(json.dumps({**newer, "top1": 0.5}))
    real = compare.run

    def started(plan: Plan, out: Path, **options: Any) -> compare.Table:
        if out == ran.parent:
            assert (options["jobs"], options["commit"]) == (2, "abc1234")
            done = {name: json.loads((ran / f"{name}.json").read_text()) for name in [names[1][:-5]]}
            return make_table(plan, done, {names[0][:-5]: "the loss is nan"})
        return real(plan, out, **options)

    monkeypatch.setattr(compare, "run", started)
    assert _call(root, "run", "tiny", "--jobs", "2", "--commit", "abc1234") == 0  # of each seed there is one
    assert (kept / names[0]).read_bytes() == first
    assert json.loads((kept / names[1]).read_text())["top1"] == 0.5
    out, err = capsys.readouterr()
    assert f"1 results copied to {kept.parent}" in out
    assert err == "results: digits_resnet, PWFN, seed 0: the loss is nan\n"


REST = {
    "inner_entropy_bits": 2.0,
    "inner_unique": 20,
    "codebooks": 1,
    "separate": {"layer": "no", "channel": "no", "attention": "none"},
    "epochs": 1.0,
    "seconds": 36.0,
}
"""What a table wants of a result, and the verdict on a target does not."""


def test_weights_are_looked_for_by_name_in_the_folders_that_are_given(tmp_path: Path) -> None:
    plan = compare.read(TINY.replace('"random"', '"weights/a.safetensors"'))
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
    for folder in ("two", "three"):
        (tmp_path / folder / "a.safetensors").touch()
    places = [tmp_path / folder for folder in ("one", "two", "three")]
    assert results.found_weights(plan, places).models[0].weights == str(tmp_path / "two" / "a.safetensors")
    assert results.found_weights(plan, places[:1]) == plan
    assert results.found_weights(compare.read(TINY), places) == compare.read(TINY)


def test_mistakes_are_said_before_anything_is_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(root, "run", "tiny", "mor") == 2
    assert capsys.readouterr().err.endswith("did you mean 'more'?\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root))  # wherever that lies, it is in no checkout
    assert _call(root, "run", "tiny") == 2
    assert "is not in a git checkout" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _call(root, "run", "tiny", "--jobs", "0")
    assert "is 0: allowed is a whole number of at least 1" in capsys.readouterr().err
    assert not (root / "tables").exists()
