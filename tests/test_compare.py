"""The table of methods: its description, its runs in other processes, its figures, and how it is shown."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pwfn import Compressed, Config, ConfigError, Layout, load
from pwfn.lab import compare
from pwfn.lab.compare import measure, paper, runner
from pwfn.lab.compare.measure import own_codebooks
from pwfn.lab.compare.table import HEADS, Figure, make_table
from pwfn.lab.uncertainty.file import evaluated
from pwfn.layout import Entry, Kind, untouched
from pwfn.run.options import RunOptions, TrustOptions, settings
from pwfn.zoo.models import digits_resnet

DESCRIPTION = """
data = "digits"
seeds = [0, 3]
samples = 4
batch_size = 64
[settings]
training.learning_rate = 0.01
[[model]]
name = "digits_resnet"
weights = "random"
paper = "ResNet-18"
[[row]]
method = "lsq"
[row.settings]
"options.bits" = 3
[[row]]
method = "pwfn"
seeds = [1]
"""
NAMES = ["digits_resnet_lsq_3_bit_seed0", "digits_resnet_lsq_3_bit_seed3", "digits_resnet_pwfn_seed1"]
PLACES = ["digits_resnet/lsq_3_bit/seed0", "digits_resnet/lsq_3_bit/seed3", "digits_resnet/pwfn/seed1"]


def _changed(old: str, new: str) -> compare.Plan:
    assert old in DESCRIPTION
    return compare.read(DESCRIPTION.replace(old, new, 1))


# --- the description ---


def test_a_description_is_read_whole() -> None:
    plan = compare.read(DESCRIPTION)
    assert (plan.data, plan.seeds, plan.jobs, plan.samples, plan.batch_size) == ("digits", (0, 3), 1, 4, 64)
    runs = plan.runs()
    assert [run.name for run in runs] == NAMES
    assert [str(run) for run in runs] == [
        "digits_resnet, LSQ, 3 bit, seed 0",
        "digits_resnet, LSQ, 3 bit, seed 3",
        "digits_resnet, PWFN, seed 1",
    ]
    changes = {"options.bits": 3, "training.learning_rate": 0.01, "seed": 3}
    assert runs[1].config == Config.preset("recommended", "lsq").override(changes)
    assert [run.epochs for run in runs] == pytest.approx([27.0, 27.0, 28.05])


def test_a_run_is_a_command_that_is_read_back_as_the_same_settings() -> None:
    plan = _changed(
        '"options.bits" = 3',
        '"options.codebooks" = "layer"\n"target.bits" = "off"\n"layout.exclude" = ["fc.*"]\n'
        '"training.cuda_graph" = true\n"schedule.epochs_per_round" = [0.5]\n"posterior.alpha" = 1e-5',
    )
    run = plan.runs()[1]
    words = run.arguments(Path("t"), "cuda:1")
    wanted = (
        "compress --model digits_resnet --weights random --data digits --out t/digits_resnet/lsq_4_bit/seed3 "
        "--method lsq --seed 3 --batch-size 64 --resume --json --device cuda:1"
    )
    assert words[: len(wanted.split())] == wanted.split()
    changes = [value for name, value in itertools.pairwise(words) if name == "--set"]
    assert settings(None, None, changes, 3, method="lsq") == run.config
    assert run.config.layout.exclude == ("fc.*",)
    held = _changed("samples = 4", "holdout = 100").runs()[0].arguments(Path("t"), None)
    assert held[held.index("--holdout") + 1] == "100"


def test_settings_of_a_row_override_the_networks_and_those_the_tables() -> None:
    text = """
    data = "digits"
    settings = { posterior = { alpha = 0.5, cap = 0.5, tolerance = 0.5 } }
    [[model]]
    name = "digits_resnet"
    settings = { "posterior.alpha" = 0.25, "posterior.cap" = 0.25 }
    [[row]]
    method = "pwfn"
    preset = "paper"
    settings = { "posterior.alpha" = 0.125 }
    """
    run = compare.read(text).runs()[0]
    expected = {"posterior.tolerance": 0.5, "posterior.cap": 0.25, "posterior.alpha": 0.125}
    assert run.config == Config.preset("paper").override(expected)
    assert "--preset paper" in " ".join(run.arguments(Path("t"), None))


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('data = "digits"', "", "data is missing"),
        ('data = "digits"', "data = 3", "data is 3"),
        ("seeds = [0, 3]", "seads = [0, 3]", "'seads' is unknown: did you mean 'seeds'?"),
        ("seeds = [0, 3]", "seeds = [0, 0]", "seeds is [0, 0]"),
        ("seeds = [0, 3]", "seeds = []", "seeds is []"),
        ("seeds = [0, 3]", "jobs = 0", "jobs is 0"),
        ("samples = 4", "samples = true", "samples is True"),
        ("samples = 4", "samples =", "the description is not valid TOML"),
        ("[[model]]", "[model]", "there is no model"),
        ("training.learning_rate = 0.01", "training.learning_rat = 1", "row 1: setting 'training.learning_r"),
        ("training.learning_rate = 0.01", "seed = 1", "row 1: setting 'seed'"),
        ('name = "digits_resnet"', "", "model 1: name is missing"),
        ('weights = "random"', 'weight = "random"', "model 1: 'weight' is unknown: did you mean 'weights'?"),
        ("ResNet-18", "Resnet18", "model 1: paper is 'Resnet18'"),
        ('method = "lsq"', 'method = "lsqq"', "row 1: method 'lsqq' is unknown: did you mean 'lsq'?"),
        ('method = "lsq"', 'method = "python:no.py:A"', "row 1: no.py: "),
        ('method = "lsq"', "", "row 1: method is missing"),
        ('method = "lsq"', 'method = "lsq"\nlabel = "-"', "row 1: label is '-'"),
        ('method = "lsq"', 'method = "lsq"\nmodels = ["digit"]', "row 1: models has 'digit'"),
        ('method = "lsq"', 'method = "lsq"\npreset = "paper"', "row 1: preset 'paper'"),
        ('"options.bits" = 3', '"options.bits" = 9', "row 1: options.bits is 9"),
        ('"options.bits" = 3', '"options.bit" = 3', "row 1: setting 'options.bit' is unknown"),
        ('"pwfn"', '"pwfn"\nsettings = {posterior = {alpha = -1}}', "row 2: posterior.alpha is -1"),
        ('"pwfn"', '"pwfn"\n[row.settings]', "row 2: setting 'seeds'"),
        ("seeds = [1]", 'label = "LSQ 3 bit"', "digits_resnet, LSQ 3 bit, seed 0 is there twice"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(
    old: str, new: str, where: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(DESCRIPTION.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        compare.load(path)
    assert str(caught.value).startswith(f"{path}: {where}")
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_there_are_reported_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights/none\.safetensors: "):
        compare.run(_changed('"random"', '"weights/none.safetensors"'), tmp_path)


# --- the paper's figures ---


def test_the_papers_figures_are_those_printed() -> None:
    """Sums over the columns as printed: a typo in any one number shows."""
    tables = paper.tables()["networks"]
    assert [len(table) for table in tables.values()] == [6, 6, 5, 6, 6, 2]
    lines = [line for table in tables.values() for line in table.values()]
    assert sum(round(10 * line["top1"]) for line in lines) == 22862
    assert sum(round(10 * line.get("ensemble", 0)) for line in lines) == 8230
    assert sum(round(10 * line.get("entropy_bits", 0)) for line in lines) == 2142
    assert sum(line.get("unique", 0) for line in lines) == 105_357_048
    qvit = paper.line("DeiT-Tiny", "Q-ViT")
    assert qvit is not None
    assert (qvit.unique, qvit.inner_unique, qvit.epochs, qvit.bits) == (1_117_630, 128_793, 300, 3)


def test_a_row_finds_the_papers_line_of_its_method() -> None:
    plan = _changed('method = "pwfn"', 'method = "pwfn"\nsettings = {posterior = {init = "constant"}}')
    found = [run.paper_line.method if run.paper_line else None for run in plan.runs()]
    assert found == ["LSQ", "LSQ", "PWFN (no prior)"]
    assert plan.runs()[2].label == "PWFN (no prior)"
    assert _changed('paper = "ResNet-18"', "").runs()[0].paper_line is None


# --- what has a codebook of its own ---


class Transformer(nn.Module):
    """A projection of q, k and v for two heads, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(4, 12)
        self.after = nn.Linear(4, 6)


def _divided(model: nn.Module, divide: Callable[[Entry], tuple[int, int]] | None) -> Compressed:
    layout = Layout.of(model)
    return Compressed.of(layout, layout.gather(model).round(decimals=1), None, {}, divide=divide)


def _per_layer(entry: Entry) -> tuple[int, int]:
    return 0, 1


def _per_input(entry: Entry) -> tuple[int, int]:
    return (1, entry.shape[1]) if entry.kind is Kind.WEIGHT else (0, 1)


def _per_output(entry: Entry) -> tuple[int, int]:
    return 0, entry.shape[0]


def _per_head(entry: Entry) -> tuple[int, int]:
    return (0, 6) if entry.attention and entry.kind is Kind.WEIGHT else (0, 1)


@pytest.mark.parametrize(
    ("divide", "marks"),
    [
        (None, ("no", "no", "no")),
        (_per_layer, ("yes", "no", "no")),
        (_per_input, ("yes", "yes", "no")),
        (_per_output, ("yes", "output", "no")),
        (_per_head, ("yes", "no", "yes")),
        (lambda entry: (_per_head if entry.attention else _per_output)(entry), ("yes", "output", "yes")),
    ],
)
def test_own_codebooks_follow_the_division_of_the_file(divide: Any, marks: tuple[str, ...]) -> None:
    found = own_codebooks(_divided(Transformer(), divide), has_attention=True)
    assert tuple(found.values()) == marks
    assert own_codebooks(_divided(Transformer(), divide), has_attention=False)["attention"] == "none"


def test_codebooks_of_biases_do_not_count() -> None:
    """One codebook for all weights; a bias with its own does not make it one per layer."""
    whole = _divided(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), _per_layer)
    shared = tuple(
        division if entry.kind is Kind.BIAS else whole.divisions[0]
        for entry, division in zip(whole.layout.entries, whole.divisions, strict=True)
    )
    mixed = Compressed(whole.layout, whole.codebooks, shared, whole.indices, {})
    assert (own_codebooks(mixed, False)["layer"], own_codebooks(whole, False)["layer"]) == ("no", "yes")


# --- runs, with a stand-in for the processes ---


class _Ended:
    """A process that has ended, or ends after a few polls, or only when it is told to."""

    def __init__(self, status: int, polls: int | None = 0) -> None:
        self.status, self.polls, self.told = status, polls, False

    def poll(self) -> int | None:
        if self.polls is None:
            return self.status if self.told else None
        self.polls -= 1
        return self.status if self.polls < 0 else None

    def terminate(self) -> None:
        self.told = True

    def wait(self) -> int:
        assert self.told or self.polls is not None
        return self.status


class Fake:
    """Stands in for starting a process: leaves at once what a run would."""

    def __init__(self) -> None:
        self.fails: dict[str, tuple[int, str]] = {}
        self.polls: int | None = 0
        self.status = 0
        self.started: list[str] = []
        self.processes: list[_Ended] = []
        self.most = 0
        self.then: Callable[[], None] = lambda: None

    def start(self, arguments: Sequence[str], stderr: Path) -> Any:
        values = dict(itertools.pairwise(arguments[1:]))
        folder = Path(values["--out"])
        self.started.append("/".join(folder.parts[-3:]))
        status, sentence = self.fails.get(self.started[-1], (self.status, ""))
        stderr.write_text(sentence)
        if not sentence and status in (0, self.status) and self.polls is not None:
            leave_run(folder, values, arguments)
        self.processes.append(_Ended(status, self.polls))
        self.most = max(self.most, sum(p.poll() is None for p in self.processes) if self.polls else 1)
        self.then()
        return self.processes[-1]


def leave_run(folder: Path, values: dict[str, str], arguments: Sequence[str]) -> None:
    """A digits_resnet whose weights are rounded; biases, for lsq, are left alone."""
    torch.manual_seed(int(values["--seed"]))
    model = digits_resnet()
    is_pwfn = values["--method"] == "pwfn"
    layout = Layout.of(model) if is_pwfn else Layout.of(model).without_biases("kept in full precision")
    rounded = (layout.gather(model) * 8).round() / 8
    compressed = Compressed.of(
        layout,
        rounded,
        torch.full_like(rounded, 1e-3) if is_pwfn else None,
        untouched(model, layout),
        divide=None if is_pwfn else _per_layer,
        record={"model": "digits_resnet", "data": "x", "note": values["--seed"]},
    )
    compressed.save(folder / "model.pwfn", posterior="centre" if is_pwfn else "none")
    changes = [value for name, value in itertools.pairwise(arguments) if name == "--set"]
    config = settings(None, None, changes, int(values["--seed"]), method=values["--method"])
    facts = {
        "before": {"metric": 0.9, "loss": 0.3},
        "after": {"metric": 0.8 + int(values["--seed"]) / 100, "loss": 0.4},
        "identity": {
            "model": {"name": "digits_resnet", "weights": "0"},
            "data": {"content": "x", "batch_size": int(values["--batch-size"])},
            "settings": config.to_dict(),
        },
        "asked": {"data": values["--data"], "holdout": int(values.get("--holdout", 0))},
        "machine": {"device": "a machine", "versions": {"torch": "2.0", "python": "3.11", "pwfn": "0"}},
        "epochs": 27.0,
        "seconds": 1800.0 * (1 + int(values["--seed"])),
    }
    (folder / "record.json").write_text(json.dumps(facts))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(runner, "start_process", made.start)
    monkeypatch.setattr(measure, "ensemble_accuracy", lambda file, run, device: 0.9)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return made


def _table(plan: compare.Plan, out: Path, **options: Any) -> tuple[compare.Table, list[str]]:
    said: list[str] = []
    table = compare.run(plan, out, say=said.append, **{"commit": "abcdef0123456", **options})
    return table, said


@pytest.fixture
def finished(fake: Fake, tmp_path: Path) -> Path:
    """A finished table, with checkpoints as runs leave them."""
    out = tmp_path / "finished"
    _table(compare.read(DESCRIPTION), out)
    for place in PLACES:
        (out / place / "checkpoints").mkdir()
        (out / place / "checkpoints" / "checkpoint-000001.pt").touch()
    fake.started.clear()
    return out


def test_every_run_is_started_once_and_its_results_are_kept(fake: Fake, tmp_path: Path) -> None:
    table, said = _table(compare.read(DESCRIPTION), tmp_path)
    assert fake.started == PLACES
    assert table.status == 0
    assert sorted(path.stem for path in (tmp_path / "results").iterdir()) == NAMES
    done = [line for line in said if "done (" in line]
    assert ["left" in line for line in done] == [True, True, False]
    assert done[0].startswith("digits_resnet, LSQ, 3 bit, seed 0: done (80.00%, ")
    assert (tmp_path / "table.md").read_text() == "\n".join(compare.lines(table)) + "\n"
    assert json.loads((tmp_path / "table.json").read_text()) == json.loads(json.dumps(table.to_dict()))


def test_a_result_is_measured_on_the_file_for_the_whole_network(finished: Path) -> None:
    """Biases count for LSQ too, which left them alone."""
    facts = json.loads((finished / "results" / f"{NAMES[0]}.json").read_text())
    file = finished / PLACES[0] / "model.pwfn"
    model = load(file).apply_to(digits_resnet())
    layout = Layout.of(model)
    everything = layout.gather(model)
    counts = torch.unique(everything, return_counts=True)[1].double()
    share = counts / counts.sum()
    assert facts["unique"] == counts.numel()
    assert facts["entropy_bits"] == pytest.approx(float(-(share * share.log2()).sum()), abs=1e-9)
    assert everything.numel() > load(file).layout.size
    ends = (layout.entries[0].layer, layout.entries[-1].layer)
    inner = [e for e in layout.entries if e.kind is Kind.WEIGHT and e.layer not in ends]
    assert facts["inner_unique"] == torch.cat([everything[e.span] for e in inner]).unique().numel()
    assert facts["file_bytes"] == file.stat().st_size
    assert facts["fp32_bytes"] == sum(
        t.numel() * (8 if t.dtype is torch.int64 else 4) for t in model.state_dict().values()
    )
    assert facts["codebooks"] == sum(e.kind is Kind.WEIGHT for e in layout.entries)
    assert facts["separate"] == {"layer": "yes", "channel": "no", "attention": "none"}
    assert (facts["top1_start"], facts["top1"], facts["top1_ensemble"]) == (0.9, 0.8, None)
    assert (facts["epochs"], facts["seconds"], facts["commit"]) == (27.0, 1800.0, "abcdef0123456")
    drawn = json.loads((finished / "results" / f"{NAMES[2]}.json").read_text())
    assert (drawn["top1_ensemble"], drawn["codebooks"], drawn["separate"]["layer"]) == (0.9, 1, "no")


def test_modules_that_a_method_added_do_not_count(finished: Path) -> None:
    run = compare.read(DESCRIPTION).runs()[0]
    folder = finished / run.place
    plain = measure.measure(run, folder, device=None, commit=None)
    file = load(folder / "model.pwfn")
    more = {**file.untouched, "fc.input_quantiser.step": torch.tensor([0.1])}
    added = Compressed(file.layout, file.codebooks, file.divisions, file.indices, more, record=file.record)
    added.save(folder / "model.pwfn", posterior="none")
    found = measure.measure(run, folder, device=None, commit=None)
    assert {name for name in plain if plain[name] != found[name]} == {"file_bytes", "file_sha256"}


def test_a_file_of_another_network_is_refused(finished: Path) -> None:
    model = nn.Linear(3, 2)
    layout = Layout.of(model)
    other = Compressed.of(layout, layout.gather(model), None, {}, record={"model": "digits_resnet"})
    other.save(finished / PLACES[0] / "model.pwfn", posterior="none")
    table, _ = _table(compare.read(DESCRIPTION), finished)
    assert table.status == 1
    assert "which the network has: it is of another network" in "\n".join(compare.lines(table))


@pytest.mark.parametrize("holdout", [0, 100])
def test_the_ensemble_is_that_of_the_evaluate_command(
    finished: Path, monkeypatch: pytest.MonkeyPatch, holdout: int
) -> None:
    monkeypatch.undo()
    run = _changed("samples = 4", f"samples = 4\nholdout = {holdout}").runs()[2]
    file = finished / run.place / "model.pwfn"
    options = RunOptions("digits_resnet", "digits", file.parent, device="cpu", holdout=holdout)
    expected = evaluated([file], options, TrustOptions(samples=4, seed=1))[0]["ensemble"]
    assert measure.ensemble_accuracy(file, run, "cpu") == expected


def test_what_is_done_is_not_run_and_not_measured_again(
    finished: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: Any) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "ensemble_accuracy", unwanted)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    _table(compare.read(DESCRIPTION), finished)
    assert fake.started == []
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_file_that_has_changed_is_measured_again(finished: Path) -> None:
    first, second = (finished / place / "model.pwfn" for place in PLACES[:2])
    first.write_bytes(second.read_bytes())
    table, said = _table(compare.read(DESCRIPTION), finished)
    assert (said, table.status) == (["3 of 3 runs are done already"], 0)
    found = [json.loads((finished / "results" / f"{name}.json").read_text()) for name in NAMES[:2]]
    assert found[0]["file_sha256"] == found[1]["file_sha256"]


@pytest.mark.parametrize(
    ("old", "new", "which"),
    [
        ('"options.bits" = 3', '"options.bits" = 3\n"training.weight_decay" = 0.5', PLACES[:2]),
        ("learning_rate = 0.01", "learning_rate = 0.02", PLACES),
        ("batch_size = 64", "batch_size = 32", PLACES),
        ('data = "digits"', 'data = "npz:digits.npz"', PLACES),
        ("samples = 4", "samples = 4\nholdout = 100", PLACES),
        ("samples = 4", "samples = 5", []),
    ],
)
def test_a_run_that_was_another_is_started_and_says_itself_why_it_cannot_resume(
    finished: Path, fake: Fake, old: str, new: str, which: list[str]
) -> None:
    fake.fails = dict.fromkeys(PLACES, (2, "pwfn: it is another\n"))
    table, _ = _table(_changed(old, new), finished)
    assert fake.started == which
    assert set(table.missing.values()) == ({"it is another"} if which else set())


def test_weights_are_known_by_their_content(fake: Fake, tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        path.write_bytes(b"weights")
    _table(_changed('"random"', f'"{first}"'), tmp_path / "out")
    _table(_changed('"random"', f'"{second}"'), tmp_path / "out")
    assert len(fake.started) == 3  # the same weights elsewhere
    first.write_bytes(b"others")
    _table(_changed('"random"', f'"{first}"'), tmp_path / "out")
    assert len(fake.started) == 6


@pytest.mark.parametrize(
    ("status", "text", "sentence"),
    [
        (2, "a warning\npwfn: batch 3: the loss is nan: lower it\n", "batch 3: the loss is nan: lower it"),
        (-9, "", "its process was ended by SIGKILL: is memory short?"),
        (-15, "pwfn: x", "its process was ended by SIGTERM"),
        (1, "Traceback\n  here\nZeroDivisionError: by 0\n", "ZeroDivisionError: by 0"),
        (3, "", "its process ended with status 3, and it has not ended"),
    ],
)
def test_a_failed_run_stops_no_other_and_its_sentence_is_in_the_table(
    fake: Fake, status: int, text: str, sentence: str, tmp_path: Path
) -> None:
    fake.fails = {PLACES[0]: (status, text)}
    table, said = _table(compare.read(DESCRIPTION), tmp_path)
    assert table.status == 1
    assert table.missing == {"digits_resnet, LSQ, 3 bit, seed 0": sentence}
    assert any(f"seed 0: failed ({sentence}) after" in line for line in said)
    assert f"- digits_resnet, LSQ, 3 bit, seed 0: {sentence}" in (tmp_path / "table.md").read_text()
    lsq = table.parts[0].lines[0]
    assert (lsq.seeds, lsq.figures["top1"]) == ((3,), Figure(0.8 + 3 / 100, None))


def test_a_status_of_one_with_a_result_is_a_missed_target_and_no_failure(fake: Fake, tmp_path: Path) -> None:
    fake.status = 1
    assert _table(compare.read(DESCRIPTION), tmp_path)[0].status == 0


@pytest.mark.parametrize(("jobs", "most"), [(None, 1), (2, 2), (8, 3)])
def test_so_many_at_a_time(fake: Fake, jobs: int | None, most: int, tmp_path: Path) -> None:
    fake.polls = 12
    assert _table(compare.read(DESCRIPTION), tmp_path, jobs=jobs)[0].status == 0
    assert fake.most == most


def test_damaged_records_and_results_are_named(finished: Path, fake: Fake) -> None:
    (finished / PLACES[2] / "record.json").write_text('{"before": 1}')
    (finished / "results" / f"{NAMES[0]}.json").write_text("{")
    (finished / "results" / f"{NAMES[1]}.json").write_text("[]")
    table, _ = _table(compare.read(DESCRIPTION), finished, table_only=True)
    missing = list(table.missing.values())
    assert missing[0].startswith(f"{finished / 'results' / NAMES[0]}.json: cannot be read")
    assert missing[1].startswith(f"{finished / 'results' / NAMES[1]}.json: is not a result of this command")
    assert missing[2].endswith(f"has no 'identity': remove {finished / PLACES[2]} to run it again")
    _table(compare.read(DESCRIPTION), finished)
    assert fake.started == PLACES[2:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_processes_and_says_how_to_resume(
    fake: Fake, tmp_path: Path, number: signal.Signals
) -> None:
    def signalled() -> None:
        if len(fake.processes) == 2:  # both have started, however slow the machine
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    fake.polls, fake.then = None, signalled
    before = signal.getsignal(number)
    with pytest.raises(compare.InterruptedTableError, match=f"stopped by {number.name}") as caught:
        _table(compare.read(DESCRIPTION), tmp_path, jobs=2)
    assert caught.value.exit_status == 128 + number
    assert [process.told for process in fake.processes] == [True, True]
    assert signal.getsignal(number) == before


def test_a_signal_while_a_run_is_measured_is_not_taken_for_that_runs_failure(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measuring(*_: Any) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        return 0.5

    monkeypatch.setattr(measure, "ensemble_accuracy", measuring)
    with pytest.raises(compare.InterruptedTableError, match="the same command resumes"):
        _table(compare.read(DESCRIPTION), tmp_path)


@pytest.mark.parametrize(
    ("paces", "rest", "jobs", "said"),
    [
        ([], [(3.0, 0.0)], 1, ""),  # nothing is known yet
        ([10.0], [], 1, ""),  # nothing is left
        ([100.0, 200.0], [(2.0, 0.0), (4.0, 0.0)], 1, ", about 15 min left"),  # 150 s per epoch
        ([100.0], [(3.0, 60.0), (3.0, 400.0)], 1, ", about 4 min left"),  # the second is overdue
        ([100.0], [(12.0, 0.0), (3.0, 0.0)], 2, ", about 20 min left"),  # no sooner than the longest
    ],
)
def test_the_time_left_follows_from_the_epochs_left(
    paces: list[float], rest: list[tuple[float, float]], jobs: int, said: str
) -> None:
    assert runner.time_left(paces, rest, jobs) == said


# --- the table ---


def test_the_table_alone_is_made_of_what_is_there(finished: Path, fake: Fake) -> None:
    plan = compare.read(DESCRIPTION)
    whole = (finished / "table.md").read_text()
    for place in PLACES:  # results alone are enough
        (finished / place / "model.pwfn").unlink()
    assert _table(plan, finished, table_only=True)[0].status == 0
    assert (finished / "table.md").read_text() == whole
    (finished / "results" / f"{NAMES[1]}.json").unlink()
    table, _ = _table(plan, finished, table_only=True)
    assert table.missing == {"digits_resnet, LSQ, 3 bit, seed 3": "it has not ended"}
    other, _ = _table(_changed("learning_rate = 0.01", "learning_rate = 0.02"), finished, table_only=True)
    reason = "its results are of another run: its training.learning_rate is 0.01, not 0.02"
    assert list(other.missing.values()) == [reason, "it has not ended", reason]
    held, _ = _table(_changed("samples = 4", "samples = 4\nholdout = 9"), finished, table_only=True)
    assert "its holdout is 0, not 9" in held.missing[str(plan.runs()[0])]
    assert fake.started == []


def _results(plan: compare.Plan) -> dict[str, dict[str, Any]]:
    same = ("inner_entropy_bits", "inner_unique", "codebooks", "epochs")
    facts: dict[str, Any] = dict.fromkeys(same, 7)
    facts |= {"top1_start": 0.92, "unique": 1234, "fp32_bytes": 1_000_000}
    facts |= {"device": "GPU", "versions": {"torch": "2.0"}}
    own: list[dict[str, Any]] = [
        {"top1": 0.90, "top1_ensemble": None, "entropy_bits": 3.0, "file_bytes": 100_001, "seconds": 3600},
        {"top1": 0.91, "top1_ensemble": None, "entropy_bits": 3.5, "file_bytes": 100_001, "seconds": 7200},
        {"top1": 0.915, "top1_ensemble": 0.917, "entropy_bits": 2.0, "file_bytes": 80_000, "seconds": 1800},
    ]
    commits = ["0123456", "0123456789ab", "0123456789ab"]  # the same, as git abbreviates it
    marks = [{"layer": "yes", "channel": "output", "attention": "none"}] * 2
    marks.append({"layer": "no", "channel": "no", "attention": "none"})
    return {
        run.name: {**facts, **figures, "separate": mark, "seed": run.seed, "commit": commit}
        for run, figures, mark, commit in zip(plan.runs(), own, marks, commits, strict=True)
    }


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def test_the_lines_of_a_table() -> None:
    """Means and deviations by hand: of 90 and 91 it is 1/sqrt 2, of 3 and 3.5 half of that."""
    plan = compare.read(DESCRIPTION)
    rows = compare.lines(make_table(plan, _results(plan), {}))
    assert rows[0] == "### digits_resnet, digits"
    cells = [_cells(row) for row in rows[2:6]]
    assert tuple(cells[0]) == HEADS
    assert cells[2] == [
        *("LSQ, 3 bit", "✓ out –", "90.50 ± 0.71", "3.25 ± 0.35", "7.00", "1,234", "100,001", "9.9×", "7"),
        "2",
    ]
    assert cells[3] == [
        *("PWFN", "✗ ✗ –", "91.50 (91.70)", "2.00", "7.00", "1,234", "80,000", "12.5×", "7", "1"),
    ]
    assert len({len(row) for row in rows[2:6]}) == 1  # readable as plain text, too
    printed = [_cells(row) for row in rows if row.startswith("| ") and row not in rows[2:6]]
    assert printed[2:] == [
        ["LSQ, 3 bit", "LSQ", "✓ ✗ –", "68.2", "–", "–", "90"],
        ["PWFN", "PWFN", "✗ ✗ –", "70.0 (70.1)", "2.5", "155", "27"],
    ]
    assert rows[-1] == "Measured on: GPU, torch 2.0. Commits: 0123456."


def test_rows_of_a_table_that_has_nothing_yet(tmp_path: Path) -> None:
    table, _ = _table(compare.read(DESCRIPTION), tmp_path, table_only=True)
    assert table.status == 1
    row = next(row for row in compare.lines(table) if row.startswith("| LSQ"))
    assert _cells(row)[1:5] == ["– – –", "–", "–", "–"]


def test_a_label_or_an_error_cannot_break_the_table() -> None:
    plan = _changed('method = "pwfn"', 'method = "pwfn"\nlabel = "a|b\\u001b[2J"')
    rows = compare.lines(make_table(plan, {}, {plan.runs()[0].name: "two\nlines"}))
    assert any(row.startswith("| a\\|b\N{REPLACEMENT CHARACTER}[2J") for row in rows)
    assert not any("\n" in row or "\x1b" in row for row in rows)


# --- real processes ---

SMALL = """
data = "digits"
samples = 2
batch_size = 64
[settings]
training.steps_per_epoch = 3
finish = { polish_epochs = 0.0, reestimate_epochs = 0.5 }
[[model]]
name = "digits_resnet"
weights = "random"
[[row]]
method = "pwfn"
[row.settings]
schedule = { fractions = [0.5, 1.0], epochs_per_round = 0.2 }
[[row]]
method = "lsq"
[row.settings]
"schedule.epochs_per_round" = [0.25]
"options.bits" = 2
[[row]]
method = "kmeans"
[row.settings]
"training.optimizer" = "adamw"
"training.precision" = "fp16"
"schedule.epochs_per_round" = [0.25]
"layout.include" = ["no_such_name"]
"""


def test_a_small_table_with_real_processes(tmp_path: Path) -> None:
    """One run of it fails, in a sentence of its own."""
    said: list[str] = []
    table = compare.run(compare.read(SMALL), tmp_path, jobs=2, device="cpu", say=said.append)
    pwfn, lsq, _ = table.parts[0].lines
    (sentence,) = table.missing.values()
    assert "no_such_name" in sentence
    for line, method in ((pwfn, "pwfn"), (lsq, "lsq")):  # an ensemble only where it is worth drawing
        (file,) = tmp_path.glob(f"**/*{method}*/**/model.pwfn")
        assert (line.figures["top1_ensemble"] is not None) == load(file).drawable
    assert (pwfn.separate["layer"], lsq.separate["layer"]) == ("no", "yes")
    assert lsq.figures["epochs"] == Figure(1 / 3, None)  # a quarter of three batches is one step
    again, _ = _table(compare.read(SMALL), tmp_path, table_only=True)
    assert again.parts == table.parts
