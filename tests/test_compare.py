"""The table of methods: its description, its runs in other processes, its figures, and how it is shown."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pwfn import Compressed, Config, ConfigError, Layout, load
from pwfn.lab import compare
from pwfn.lab.compare import measuring, paper, running
from pwfn.lab.compare.measuring import Mark, Marks
from pwfn.lab.compare.plan import Plan, Run
from pwfn.lab.compare.running import (
    COMPLAINTS,
    CutOffError,
    Process,
    _left,
    _pace,
    epochs_trained,
    start_process,
)
from pwfn.layout import Entry, Kind, untouched
from pwfn.run.console import duration
from pwfn.run.options import RunOptions, settings
from pwfn.run.scores import evaluate_file
from pwfn.zoo.models import digits_resnet

ROOT = Path(__file__).resolve().parent.parent

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
"quantiser.bits" = 3
[[row]]
method = "pwfn"
seeds = [1]
"""
NAMES = ["digits_resnet_lsq_3_bit_seed0", "digits_resnet_lsq_3_bit_seed3", "digits_resnet_pwfn_seed1"]


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
    first = runs[0].config
    expected = Config.preset("recommended", "lsq").override(
        {"quantiser.bits": 3, "training.learning_rate": 0.01}
    )
    assert first == expected
    assert runs[1].config == expected.override({"seed": 3})


def test_a_run_is_the_command_that_one_would_type() -> None:
    run = compare.read(DESCRIPTION).runs()[1]
    words = (
        "compress --model digits_resnet --weights random --data digits --out t/digits_resnet/lsq_3_bit/seed3 "
        "--method lsq --seed 3 --batch-size 64 --resume --json --device cuda:1 "
        "--set training.learning_rate=0.01 --set quantiser.bits=3"
    )
    assert run.arguments(Path("t"), "cuda:1") == words.split()


def test_settings_are_written_so_that_they_are_read_as_they_were() -> None:
    text = DESCRIPTION.replace(
        '"quantiser.bits" = 3',
        '"quantiser.codebooks" = "network"\n"target.bits" = "off"\n"layout.exclude" = ["fc.*"]\n'
        '"training.channels_last" = true\n"schedule.fractions" = [0.5, 1]\n"posterior.alpha" = 1e-5',
    )
    run = compare.read(text).runs()[0]
    words = run.arguments(Path("t"), None)
    changes = [value for name, value in itertools.pairwise(words) if name == "--set"]
    assert settings(None, None, changes, 0, method="lsq") == run.config
    assert run.config.layout.exclude == ("fc.*",)


def test_settings_of_a_row_win_over_the_networks_and_those_over_the_tables() -> None:
    text = """
    data = "digits"
    settings = { clustering = { b = 5, delta = 0.5, omega_max = 2 } }
    [[model]]
    name = "digits_resnet"
    settings = { "clustering.b" = 6, "clustering.delta" = 0.25 }
    [[row]]
    method = "pwfn"
    preset = "paper"
    settings = { "clustering.b" = 8 }
    """
    run = compare.read(text).runs()[0]
    assert run.config == Config.preset("paper").override(
        {"clustering.omega_max": 2, "clustering.delta": 0.25, "clustering.b": 8}
    )
    assert "--preset paper" in " ".join(run.arguments(Path("t"), None))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('data = "digits"', "", "data is missing: say data = …"),
        ('data = "digits"', "data = 3", "data is 3: allowed is text in quotes"),
        ("seeds = [0, 3]", "seads = [0, 3]", "'seads' is unknown: did you mean 'seeds'?"),
        ("seeds = [0, 3]", "seeds = [0, 0]", "seeds is [0, 0]: allowed is a list of whole numbers"),
        ("seeds = [0, 3]", "seeds = []", "seeds is []: allowed is a list of whole numbers"),
        ("seeds = [0, 3]", "jobs = 0", "jobs is 0: allowed is a whole number of at least 1"),
        ("samples = 4", "samples = 1.5", "samples is 1.5: allowed is a whole number of at least 0"),
        ("samples = 4", "samples =", "the description is not valid TOML"),
        (
            "training.learning_rate = 0.01",
            "training.learning_rat = 1",
            "row 1: setting 'training.learning_rat'",
        ),
        (
            "training.learning_rate = 0.01",
            "seed = 1",
            "row 1: setting 'seed' is not of the form section.name",
        ),
        ('name = "digits_resnet"', "", "model 1: name is missing"),
        ('weights = "random"', 'weight = "random"', "model 1: 'weight' is unknown: did you mean 'weights'?"),
        (
            "ResNet-18",
            "Resnet18",
            "model 1: paper is 'Resnet18', no network of the paper's table: did you mean",
        ),
        ('method = "lsq"', 'method = "lsqq"', "row 1: method 'lsqq' is unknown: did you mean 'lsq'?"),
        ('method = "lsq"', "", "row 1: method is missing"),
        (
            'method = "lsq"',
            'method = "lsq"\nlabel = "-"',
            "row 1: label is '-': allowed is text with a letter",
        ),
        (
            'method = "lsq"',
            'method = "lsq"\npaper = "lsq"',
            "row 1: paper is 'lsq', no method of the paper's",
        ),
        ('method = "lsq"', 'method = "lsq"\nmodels = ["digit"]', "row 1: models has 'digit', no network of"),
        ('method = "lsq"', 'method = "lsq"\npreset = "paper"', "row 1: preset 'paper' is of the method pwfn"),
        ('"quantiser.bits" = 3', '"quantiser.bits" = 9', "row 1: quantiser.bits is 9: allowed is"),
        ('"pwfn"', '"pwfn"\nsettings = {clustering = {b = -1}}', "row 2: clustering.b is -1: allowed is"),
        (
            '"pwfn"',
            '"pwfn"\n[row.settings]',
            "row 2: setting 'seeds' is not of the form section.name: it is a row's own",
        ),
        ('"pwfn"', '"pwfn"\nlabel = "LSQ 3 bit"\n', None),
        ("seeds = [1]", 'label = "LSQ 3 bit"', "digits_resnet, LSQ 3 bit, seed 0 is there twice"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(
    old: str, new: str, message: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(DESCRIPTION.replace(old, new, 1))
    if message is None:  # another seed: no clash
        assert len(compare.load(path).runs()) == 3
        return
    with pytest.raises(ConfigError) as caught:
        compare.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_table_has_networks_and_rows() -> None:
    top, _, rest = DESCRIPTION.partition("[[model]]")
    model, _, rows = rest.partition("[[row]]")
    for block, text in (("model", f"{top}[[row]]{rows}"), ("row", f"{top}[[model]]{model}")):
        with pytest.raises(ConfigError, match=f"there is no {block}: add a block that begins with"):
            compare.read(text)
        with pytest.raises(ConfigError, match=f"{block} is 3: allowed are blocks"):
            compare.read(f"{block} = 3\n{text}")


def test_weights_that_are_not_there_are_said_once_and_not_by_every_run(tmp_path: Path) -> None:
    plan = compare.read(DESCRIPTION.replace('"random"', '"weights/none.safetensors"'))
    with pytest.raises(ConfigError, match=r"weights/none\.safetensors: the weights of digits_resnet are not"):
        compare.run(plan, tmp_path, start=_Fake().start)


# --- the paper's figures ---


def test_the_papers_table_has_its_31_lines() -> None:
    tables = tomllib.loads((Path(compare.__file__).parent / "paper.toml").read_text())
    counts = {name: len(lines) for name, lines in tables["networks"].items()}
    resnets, others = [6, 6, 5], [6, 6, 2]
    assert counts == dict(zip(paper.networks(), resnets + others, strict=True))
    # Sums over the columns as printed: a slip in any one number shows.
    lines = [line for table in tables["networks"].values() for line in table.values()]
    assert sum(round(10 * line["top1"]) for line in lines) == 22862
    assert sum(round(10 * line.get("ensemble", 0)) for line in lines) == 8230
    assert sum(round(10 * line.get("entropy_bits", 0)) for line in lines) == 2142
    assert sum(line.get("unique", 0) for line in lines) == 105_357_048
    assert tables["epochs"] == {"APoT": 120, "PWFN": 27, "WFN": 27, "LSQ": 90, "Q-ViT": 300}


def test_lines_of_the_paper() -> None:
    apot = paper.line("ResNet-18", "APoT")
    assert apot is not None
    assert (apot.layer, apot.channel, apot.attention) == (True, False, None)
    assert (apot.top1, apot.ensemble, apot.entropy_bits, apot.unique) == (69.9, None, 5.7, 1430)
    assert (apot.epochs, apot.bits, apot.inner_unique) == (120, 3, None)
    qvit = paper.line("DeiT-Tiny", "Q-ViT")
    assert qvit is not None
    assert (qvit.entropy_bits, qvit.unique) == (11.5, 1_117_630)
    assert (qvit.inner_entropy_bits, qvit.inner_unique) == (10.5, 128_793)
    assert "Q-ViT (w/o FL-Bias)" not in paper.methods()


def test_every_method_finds_its_line_and_a_row_may_choose_another() -> None:
    text = DESCRIPTION.replace(
        'method = "pwfn"', 'method = "pwfn"\nsettings = {posterior = {init = "constant"}}'
    )
    runs = compare.read(text).runs()
    found = [run.paper_line.method if run.paper_line else None for run in runs]
    assert found == ["LSQ", "LSQ", "PWFN (no prior)"]
    assert runs[2].label == "PWFN (no prior)"
    chosen = compare.read(DESCRIPTION.replace('method = "lsq"', 'method = "lsq"\npaper = "APoT"')).runs()[0]
    assert chosen.paper_line == paper.line("ResNet-18", "APoT")
    none = compare.read(DESCRIPTION.replace('method = "lsq"', 'method = "lsq"\npaper = "off"')).runs()[0]
    assert none.paper_line is None


@pytest.mark.parametrize(("name", "rows"), [("resnet18", 11), ("resnet20", 12), ("vit", 9)])
def test_the_tables_of_the_experiments(name: str, rows: int) -> None:
    plan = compare.load(ROOT / "experiments" / f"compare_{name}.toml")
    assert len(plan.rows) == rows
    for run in plan.runs():
        # What each method trains: within two epochs of the paper's 27.
        config = run.config
        if run.row.method in ("pwfn", "wfn"):
            schedule = config.schedule
            trained = schedule.warmup_epochs + schedule.epochs_per_round * (len(schedule.fractions) - 1)
        else:
            trained = config.schedule.epochs
        assert trained + config.finish.polish_epochs <= (0 if run.row.method == "baseline" else 29)


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


def _by_layer(entry: Entry) -> tuple[int, int]:
    return 0, 1


def _by_input(entry: Entry) -> tuple[int, int]:
    return (1, entry.shape[1]) if entry.kind is Kind.WEIGHT else (0, 1)


def _by_output(entry: Entry) -> tuple[int, int]:
    return 0, entry.shape[0]


def _by_head(entry: Entry) -> tuple[int, int]:
    return (0, 6) if entry.attention and entry.kind is Kind.WEIGHT else (0, 1)


def _heads_and_outputs(entry: Entry) -> tuple[int, int]:
    return _by_head(entry) if entry.attention else _by_output(entry)


@pytest.mark.parametrize(
    ("divide", "marks"),
    [
        (None, ("no", "no", "no")),
        (_by_layer, ("yes", "no", "no")),
        (_by_input, ("yes", "yes", "no")),
        (_by_output, ("yes", "output", "no")),
        (_by_head, ("yes", "no", "yes")),
        (_heads_and_outputs, ("yes", "output", "yes")),
    ],
)
def test_marks_come_from_how_the_file_divides_its_weights(divide: Any, marks: tuple[str, ...]) -> None:
    found = Marks.of(_divided(Transformer(), divide), has_attention=True)
    assert (found.layer, found.channel, found.attention) == marks
    assert Marks.of(_divided(Transformer(), divide), has_attention=False).attention is Mark.NONE


def test_codebooks_of_biases_make_no_mark() -> None:
    """One codebook for all weights; a bias with its own does not make it one a layer."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    whole = _divided(model, _by_layer)
    shared = tuple(
        division if entry.kind is Kind.BIAS else whole.divisions[0]
        for entry, division in zip(whole.layout.entries, whole.divisions, strict=True)
    )
    mixed = Compressed(whole.layout, whole.codebooks, shared, whole.indices, {})
    assert Marks.of(mixed, False).layer is Mark.NO
    assert Marks.of(whole, False).layer is Mark.YES


# --- runs that stand in for real ones ---


class _Ended:
    """A process that has ended, or ends after a few looks at it, or only when it is told to."""

    def __init__(self, status: int, looks: int | None = 0) -> None:
        self.status, self.looks, self.told = status, looks, False

    def poll(self) -> int | None:
        if self.looks is None:
            return self.status if self.told else None
        self.looks -= 1
        return self.status if self.looks < 0 else None

    def terminate(self) -> None:
        self.told = True

    def wait(self) -> int:
        assert self.told or self.looks is not None
        return self.status


class _Fake:
    """Stands in for starting a process: leaves at once what a run would."""

    def __init__(self, fails: dict[str, tuple[int, str]] | None = None, looks: int | None = 0) -> None:
        self.fails, self.looks = fails or {}, looks
        self.started: list[str] = []
        self.processes: list[_Ended] = []
        self.most = 0

    def start(self, arguments: Sequence[str], complaints: Path) -> Process:
        values = dict(itertools.pairwise(arguments[1:]))
        folder = Path(values["--out"])
        self.started.append("/".join(folder.parts[-3:]))
        status, sentence = self.fails.get(self.started[-1], (0, ""))
        complaints.write_text(sentence)
        if not sentence and status == 0 and self.looks is not None:
            leave_run(folder, values, arguments)
        self.processes.append(_Ended(status, self.looks))
        going = sum(process.poll() is None for process in self.processes) if self.looks else 1
        self.most = max(self.most, going)
        return self.processes[-1]


def leave_run(folder: Path, values: dict[str, str], arguments: Sequence[str]) -> None:
    """A digits_resnet whose weights are rounded; biases, for lsq, are left as they are."""
    torch.manual_seed(int(values["--seed"]))
    model = digits_resnet()
    whole = Layout.of(model)
    is_pwfn = values["--method"] == "pwfn"
    layout = whole if is_pwfn else whole.without_biases("kept in full precision")
    rounded = (layout.gather(model) * 8).round() / 8
    record = {"model": "digits_resnet", "data": "x", "note": values["--seed"]}
    compressed = Compressed.of(
        layout,
        rounded,
        torch.full_like(rounded, 1e-3) if is_pwfn else None,
        untouched(model, layout),
        divide=None if is_pwfn else _by_layer,
        record=record,
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
        "machine": {"device": "a machine", "versions": {"torch": "2.0", "python": "3.11", "pwfn": "0"}},
        "epochs": 27.0,
        "seconds": 1800.0 * (1 + int(values["--seed"])),
    }
    (folder / "record.json").write_text(json.dumps(facts))


def _nine_tenths(file: Path, run: Run, device: str | None) -> float:
    return 0.9


def _table(
    plan: Plan, out: Path, fake: _Fake | None = None, **options: Any
) -> tuple[compare.Table, list[str]]:
    said: list[str] = []
    fake = fake or _Fake()
    usual: dict[str, Any] = {"ensemble": _nine_tenths, "commit": "abcdef0123456"}
    table = compare.run(plan, out, start=fake.start, say=said.append, **{**usual, **options})
    return table, said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    _table(compare.read(DESCRIPTION), out)
    return out


def _copy(source: Path, target: Path) -> Path:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return target


def test_every_run_is_started_once_and_its_results_are_kept(tmp_path: Path) -> None:
    fake = _Fake()
    table, said = _table(compare.read(DESCRIPTION), tmp_path, fake)
    places = ["digits_resnet/lsq_3_bit/seed0", "digits_resnet/lsq_3_bit/seed3", "digits_resnet/pwfn/seed1"]
    assert fake.started == places
    assert table.status == 0
    assert sorted(path.stem for path in (tmp_path / "results").iterdir()) == NAMES
    assert said[0] == "digits_resnet, LSQ, 3 bit, seed 0: started"
    done = [line for line in said if "done (" in line]
    assert len(done) == 3
    assert re.search(
        r"seed 0: done \(80\.00%, \d\.\d\d bits, [\d,]+ bytes\) after 0 s; 1 of 3 runs over", done[0]
    )
    assert "left" in done[0]
    assert "left" not in done[2]
    assert (tmp_path / "table.md").read_text() == "\n".join(compare.lines(table)) + "\n"
    assert json.loads((tmp_path / "table.json").read_text()) == json.loads(json.dumps(table.to_dict()))


def test_a_result_is_measured_on_the_file_for_the_whole_network(finished: Path) -> None:
    """Biases count for LSQ too, which left them alone."""
    facts = json.loads((finished / "results" / f"{NAMES[0]}.json").read_text())
    keys = (
        "model method label preset seed top1_start top1 top1_ensemble entropy_bits unique inner_entropy_bits "
        "inner_unique file_bytes fp32_bytes codebooks epochs seconds device versions commit settings"
    )
    assert set(keys.split()) <= set(facts)
    file = finished / "digits_resnet" / "lsq_3_bit" / "seed0" / "model.pwfn"
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


def test_modules_that_a_method_added_do_not_count(tmp_path: Path) -> None:
    run = compare.read(DESCRIPTION).runs()[0]
    folder = tmp_path / run.place
    folder.mkdir(parents=True)
    _Fake().start(run.arguments(tmp_path, None), folder / COMPLAINTS)
    plain = measuring.measured(run, tmp_path, device=None, commit=None)
    file = load(folder / "model.pwfn")
    more = {**file.untouched, "fc.input_quantiser.step": torch.tensor([0.1])}
    with_step = Compressed(
        file.layout, file.codebooks, file.divisions, file.indices, more, record=file.record
    )
    with_step.save(folder / "model.pwfn", posterior="none")
    found = measuring.measured(run, tmp_path, device=None, commit=None)
    differing = {name for name in plain if plain[name] != found[name]}
    assert differing == {"file_bytes", "file_sha256"}


def test_a_file_of_another_network_is_refused(finished: Path, tmp_path: Path) -> None:
    out = _copy(finished, tmp_path)
    (out / "results" / f"{NAMES[0]}.json").unlink()
    model = nn.Linear(3, 2)
    layout = Layout.of(model)
    other = Compressed.of(layout, layout.gather(model), None, {}, record={"model": "digits_resnet"})
    other.save(out / "digits_resnet/lsq_3_bit/seed0/model.pwfn", posterior="none")
    table, _ = _table(compare.read(DESCRIPTION), out)
    assert table.status == 1
    assert "which the network has: it is of another network" in "\n".join(compare.lines(table))


def test_the_ensemble_is_that_of_the_evaluate_command(finished: Path) -> None:
    run = compare.read(DESCRIPTION).runs()[2]
    found = measuring.measured(run, finished, device="cpu", commit=None)["top1_ensemble"]
    file = finished / run.place / "model.pwfn"
    options = RunOptions("digits_resnet", "digits", file.parent, device="cpu")
    assert found == evaluate_file(file, options, samples=4, seed=1)["ensemble"]


def test_what_is_done_is_not_run_and_not_measured_again(finished: Path, tmp_path: Path) -> None:
    out = _copy(finished, tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    fake = _Fake()
    compare.run(compare.read(DESCRIPTION), out, start=fake.start, say=_silent, ensemble=_unwanted)
    assert fake.started == []
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def _silent(line: str) -> None:
    pass


def _unwanted(file: Path, run: Run, device: str | None) -> float:
    raise AssertionError("measured again")


def test_a_file_that_has_changed_is_measured_again(finished: Path, tmp_path: Path) -> None:
    out = _copy(finished, tmp_path)
    places = [out / "digits_resnet/lsq_3_bit" / f"seed{n}" / "model.pwfn" for n in (0, 3)]
    places[0].write_bytes(places[1].read_bytes())
    table, said = _table(compare.read(DESCRIPTION), out)
    assert said == ["3 of 3 runs are done already"]
    names = ("unique", "entropy_bits", "file_bytes", "file_sha256")
    found = [json.loads((out / "results" / f"{name}.json").read_text()) for name in NAMES[:2]]
    assert [found[0][name] for name in names] == [found[1][name] for name in names]
    assert table.status == 0


def before_sigma_was_a_choice(config: Config) -> dict[str, Any]:
    """A record of those settings from before sigma could stay as it starts, or go by what is tolerated."""
    tables = config.to_dict()
    for name in ("learn_sigma", "tolerance", "tolerance_batches", "network_sigma"):
        del tables["posterior"][name]
    return tables


def test_a_record_of_before_is_of_the_settings_that_were_the_defaults_then() -> None:
    run = compare.read(DESCRIPTION).runs()[2]
    then = {"posterior.init": "powers", "posterior.noise_on_fixed": True, "clustering.b": 7}
    record = before_sigma_was_a_choice(run.config.override(then))
    # The plan has what is recommended now, which that run was not.
    assert measuring.settings_differ(run, record) == "its posterior.init is 'powers', not 'tolerance'"
    named = {f'"{name}"': value for name, value in then.items()}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in named.items())
    same = compare.read(f'{DESCRIPTION}[row.settings]\n{lines}\n"posterior.learn_sigma" = true\n').runs()[2]
    assert measuring.settings_differ(same, record) is None
    other = compare.read(f"{DESCRIPTION}[row.settings]\n{lines}\n").runs()[2]
    assert measuring.settings_differ(other, record) == "its posterior.learn_sigma is True, not False"


def test_settings_that_a_run_does_not_read_make_no_difference() -> None:
    lsq, _, pwfn = compare.read(DESCRIPTION).runs()
    then = {"posterior.init": "powers", "posterior.noise_on_fixed": True, "clustering.b": 7}
    assert measuring.settings_differ(lsq, before_sigma_was_a_choice(lsq.config.override(then))) is None
    bits = lsq.config.override({"quantiser.bits": 2}).to_dict()
    assert measuring.settings_differ(lsq, bits) == "its quantiser.bits is 2, not 3"
    assert measuring.settings_differ(lsq, pwfn.config.to_dict()) == "its method is 'pwfn', not 'lsq'"
    unread = pwfn.config.override({"posterior.network_sigma": 0.5, "wfn.delta": 0.1}).to_dict()
    assert measuring.settings_differ(pwfn, unread) is None
    tolerance = pwfn.config.override({"posterior.tolerance": 7.0}).to_dict()
    usual = Config().posterior.tolerance
    assert measuring.settings_differ(pwfn, tolerance) == f"its posterior.tolerance is 7.0, not {usual}"


@pytest.mark.parametrize(
    ("old", "new", "which"),
    [
        ('"quantiser.bits" = 3', '"quantiser.bits" = 3\n"training.momentum" = 0.5', {"lsq_3_bit"}),
        ("learning_rate = 0.01", "learning_rate = 0.02", {"lsq_3_bit", "pwfn"}),
        ("batch_size = 64", "batch_size = 32", {"lsq_3_bit", "pwfn"}),
        ('data = "digits"', 'data = "npz:digits.npz"', {"lsq_3_bit", "pwfn"}),
        ('weights = "random"', 'weights = "pretrained"', {"lsq_3_bit", "pwfn"}),
        ("samples = 4", "samples = 4\nholdout = 100", {"lsq_3_bit", "pwfn"}),
        ("samples = 4", "samples = 5", set()),
    ],
)
def test_a_run_that_was_another_is_started_and_says_itself_why_it_cannot_go_on(
    finished: Path, tmp_path: Path, old: str, new: str, which: set[str]
) -> None:
    out = _copy(finished, tmp_path)
    for folder in (out / "digits_resnet").glob("*/*"):  # as a run leaves it
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "checkpoint-1.pt").touch()
    fake = _Fake()
    fails = {f"digits_resnet/{name}": (2, "pwfn: it is another\n") for name in _places_of(out)}
    fake.fails = fails
    table, _ = _table(compare.read(DESCRIPTION.replace(old, new)), out, fake)
    assert {Path(place).parent.name for place in fake.started} == which
    assert set(table.missing.values()) == ({"it is another"} if which else set())


def test_held_out_images_are_scored_in_the_test_images_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compare.read(DESCRIPTION.replace("samples = 4", "samples = 4\nholdout = 100"))
    words = plan.runs()[0].arguments(tmp_path, None)
    assert words[words.index("--holdout") + 1] == "100"
    assert "--holdout" not in compare.read(DESCRIPTION).runs()[0].arguments(tmp_path, None)
    asked: list[RunOptions] = []

    def evaluated(file: Path, options: RunOptions, **_: Any) -> dict[str, Any]:
        asked.append(options)
        return {"ensemble": 0.9}

    monkeypatch.setattr(measuring, "evaluate_file", evaluated)
    table, _ = _table(plan, tmp_path / "out", ensemble=None)
    assert {options.holdout for options in asked} == {100}
    text = "\n".join(compare.lines(table))
    assert "### digits_resnet, digits, 100 training images held out" in text
    assert "Top-1 in percent of the held-out images" in text
    # The figures say so too, and those of the test images are not taken for them.
    kept = tmp_path / "out" / "results" / f"{NAMES[0]}.json"
    assert json.loads(kept.read_text())["holdout"] == 100
    kept.write_text(json.dumps({k: v for k, v in json.loads(kept.read_text()).items() if k != "holdout"}))
    (tmp_path / "out" / plan.runs()[0].place / "model.pwfn").unlink()
    again, _ = _table(plan, tmp_path / "out", table_only=True)
    assert again.missing[str(plan.runs()[0])] == "its results are of another run: its holdout is 0, not 100"


def _places_of(out: Path) -> list[str]:
    return [str(path.relative_to(out / "digits_resnet")) for path in (out / "digits_resnet").glob("*/*")]


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        path.write_bytes(b"weights")
    described = DESCRIPTION.replace('"random"', f'"{first}"')
    _table(compare.read(described), tmp_path / "out")
    fake = _Fake()
    _table(compare.read(DESCRIPTION.replace('"random"', f'"{second}"')), tmp_path / "out", fake)
    assert fake.started == []  # the same, elsewhere
    first.write_bytes(b"others")
    _table(compare.read(described), tmp_path / "out", fake)
    assert len(fake.started) == 3


def test_a_failed_run_stops_no_other_and_its_sentence_is_in_the_table(tmp_path: Path) -> None:
    place = "digits_resnet/lsq_3_bit/seed0"
    noise = "a library warns\npwfn: batch 3: the loss is nan: lower the learning rate\n"
    table, said = _table(compare.read(DESCRIPTION), tmp_path, _Fake({place: (2, noise)}))
    sentence = "batch 3: the loss is nan: lower the learning rate"
    assert table.status == 1
    assert table.missing == {"digits_resnet, LSQ, 3 bit, seed 0": sentence}
    assert next(line for line in said if "failed" in line).startswith(
        f"digits_resnet, LSQ, 3 bit, seed 0: failed ({sentence}) after"
    )
    assert f"- digits_resnet, LSQ, 3 bit, seed 0: {sentence}" in (tmp_path / "table.md").read_text()
    lsq = table.parts[0].lines[0]
    assert lsq.seeds == (3,)
    assert lsq.figures["top1"] == compare.table.Figure(0.8 + 3 / 100, None)


@pytest.mark.parametrize(
    ("status", "text", "sentence"),
    [
        (-9, "", "its process was ended by SIGKILL: is memory short?"),
        (-15, "pwfn: x", "its process was ended by SIGTERM"),
        (
            1,
            "Traceback\n  here\nZeroDivisionError: division by zero\n",
            "ZeroDivisionError: division by zero",
        ),
        (3, "", "its process ended with status 3, and it has not ended"),
    ],
)
def test_how_a_process_ended(status: int, text: str, sentence: str, tmp_path: Path) -> None:
    fails = {"digits_resnet/lsq_3_bit/seed3": (status, text)}
    table, _ = _table(compare.read(DESCRIPTION), tmp_path, _Fake(fails))
    assert table.missing == {"digits_resnet, LSQ, 3 bit, seed 3": sentence}


def test_a_status_of_one_with_a_result_is_a_missed_target_and_no_failure(tmp_path: Path) -> None:
    class Missed(_Fake):
        def start(self, arguments: Sequence[str], complaints: Path) -> Process:
            super().start(arguments, complaints)
            return _Ended(1)

    assert _table(compare.read(DESCRIPTION), tmp_path, Missed())[0].status == 0


@pytest.mark.parametrize(("jobs", "most"), [(None, 1), (2, 2), (8, 3)])
def test_so_many_at_a_time(
    jobs: int | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    fake = _Fake(looks=12)
    table, _ = _table(compare.read(DESCRIPTION), tmp_path, fake, jobs=jobs)
    assert fake.most == most
    assert table.status == 0


def test_damaged_records_and_results_are_named(finished: Path, tmp_path: Path) -> None:
    out = _copy(finished, tmp_path)
    (out / "digits_resnet/pwfn/seed1/record.json").write_text('{"before": 1}')
    (out / "results" / f"{NAMES[0]}.json").write_text("{")
    (out / "results" / f"{NAMES[1]}.json").write_text("[]")
    table, _ = _table(compare.read(DESCRIPTION), out, table_only=True)
    missing = list(table.missing.values())
    assert len(missing) == 3
    assert missing[0].startswith(f"{out / 'results' / NAMES[0]}.json: cannot be read")
    assert missing[1].startswith(f"{out / 'results' / NAMES[1]}.json: is not a result of this command")
    assert missing[2].endswith(
        f"has no 'identity': remove {out / 'digits_resnet/pwfn/seed1'} to run it again"
    )
    fake = _Fake()
    table, _ = _table(compare.read(DESCRIPTION), out, fake)
    assert fake.started == ["digits_resnet/pwfn/seed1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_processes_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    class Signalled(_Fake):
        """The signal comes when the second process has started, however slow the machine."""

        def start(self, arguments: Sequence[str], complaints: Path) -> Process:
            process = super().start(arguments, complaints)
            if len(self.processes) == 2:
                threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            return process

    fake = Signalled(looks=None)
    before = signal.getsignal(number)
    with pytest.raises(CutOffError, match=f"stopped by {number.name}: the same command goes on") as caught:
        _table(compare.read(DESCRIPTION), tmp_path, fake, jobs=2)
    assert caught.value.exit_status == 128 + number
    assert [process.told for process in fake.processes] == [True, True]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_measured_is_not_taken_for_that_runs_failure(
    tmp_path: Path, number: signal.Signals
) -> None:
    def measuring(file: Path, run: compare.Run, device: str | None) -> float:
        os.kill(os.getpid(), number)
        time.sleep(5)  # the signal comes before it is over
        return 0.5

    fake = _Fake()
    with pytest.raises(CutOffError, match="the same command goes on"):
        _table(compare.read(DESCRIPTION), tmp_path, fake, jobs=1, ensemble=measuring)


def test_epochs_behind_a_run_are_read_from_its_log_torn_lines_and_all(tmp_path: Path) -> None:
    assert epochs_trained(tmp_path) == 0
    lines = [
        {"event": "start"},
        {"event": "epoch", "stage": "round 1 of 2", "epoch": 0.05},
        {"event": "round", "fraction": 0.5},
        {"event": "epoch", "stage": "round 2 of 2", "epoch": 1.0},
        {"event": "epoch", "stage": "round 2 of 2", "epoch": 2.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text + '{"event": "epoch", "sta')
    assert epochs_trained(tmp_path) == 2.05


@pytest.mark.parametrize(
    ("paces", "waiting", "going", "jobs", "seconds"),
    [
        ([], [3.0], [(2.0, None)], 1, None),  # nothing is known yet
        ([10.0], [], [], 1, None),  # nothing is left
        ([10.0, 20.0], [2.0, 4.0], [], 1, 90),  # 15 s an epoch
        ([10.0], [2.0], [(3.0, 40.0)], 1, 170),  # the usual is 25 s; the one that is going has its own
        ([10.0], [2.0], [(3.0, 40.0)], 2, 120),  # no sooner than the longest
        ([], [2.0], [(1.0, 8.0)], 1, 24),
    ],
)
def test_the_time_left_is_reckoned_in_epochs(
    paces: list[float],
    waiting: list[float],
    going: list[tuple[float, float | None]],
    jobs: int,
    seconds: float | None,
) -> None:
    expected = "" if seconds is None else f", about {duration(seconds)} left"
    assert _left(paces, waiting, going, jobs) == expected


def test_a_run_that_has_hardly_begun_has_no_pace_of_its_own() -> None:
    """Its start took most of the time: three minutes for a 60th of the run would make it three hours."""
    assert _pace(180.0, 0.05, 3.0) is None
    assert _pace(180.0, 0.0, 0.0) is None  # nothing to train, nothing trained
    assert _pace(180.0, 0.5, 3.0) == 360.0
    assert _pace(180.0, 0.5, 0.0) == 360.0  # trained for more than it was asked to


# --- the table ---


def test_the_table_alone_is_made_of_what_is_there(finished: Path, tmp_path: Path) -> None:
    out = _copy(finished, tmp_path)
    whole = (out / "table.md").read_text()
    (out / "table.md").unlink()
    fake = _Fake()
    _table(compare.read(DESCRIPTION), out, fake, table_only=True)
    assert (out / "table.md").read_text() == whole
    for path in sorted((out / "digits_resnet").rglob("*"), reverse=True):  # results alone are enough
        path.rmdir() if path.is_dir() else path.unlink()
    assert _table(compare.read(DESCRIPTION), out, fake, table_only=True)[0].status == 0
    assert (out / "table.md").read_text() == whole
    (out / "results" / f"{NAMES[1]}.json").unlink()
    table, _ = _table(compare.read(DESCRIPTION), out, fake, table_only=True)
    assert table.missing == {"digits_resnet, LSQ, 3 bit, seed 3": "it has not ended"}
    assert fake.started == []
    other = compare.read(DESCRIPTION.replace("learning_rate = 0.01", "learning_rate = 0.02"))
    missing = _table(other, out, fake, table_only=True)[0].missing
    reason = "its results are of another run: its training.learning_rate is 0.01, not 0.02"
    assert list(missing.values()) == [reason, "it has not ended", reason]


def _results(plan: Plan) -> dict[str, dict[str, Any]]:
    facts: dict[str, Any] = {
        "top1_start": 0.92,
        "unique": 1234,
        "inner_entropy_bits": 2.5,
        "inner_unique": 7,
        "fp32_bytes": 1_000_000,
        "codebooks": 9,
        "epochs": 27.0,
        "device": "GPU",
        "versions": {"torch": "2.0"},
        "commit": "0123456789ab",
    }
    own: list[dict[str, Any]] = [
        {"top1": 0.90, "top1_ensemble": None, "entropy_bits": 3.0, "file_bytes": 100_001, "seconds": 3600},
        {"top1": 0.91, "top1_ensemble": None, "entropy_bits": 3.5, "file_bytes": 100_001, "seconds": 7200},
        {"top1": 0.915, "top1_ensemble": 0.917, "entropy_bits": 2.0, "file_bytes": 80_000, "seconds": 1800},
    ]
    own[0]["commit"] = facts["commit"][:7]  # the same, as git abbreviates it
    marks = [{"layer": "yes", "channel": "output", "attention": "none"}] * 2
    marks.append({"layer": "no", "channel": "no", "attention": "none"})
    return {
        run.name: {**facts, **figures, "separate": mark}
        for run, figures, mark in zip(plan.runs(), own, marks, strict=True)
    }


def test_the_lines_of_a_table() -> None:
    """Means and deviations by hand: of 90 and 91 it is 1/sqrt 2, of 3 and 3.5 its half."""
    plan = compare.read(DESCRIPTION)
    rows = compare.lines(compare.table.make_table(plan, _results(plan), {}))
    assert rows[0] == "### digits_resnet, digits"
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:6]]
    assert cells[0] == [
        *("method", "own codebooks: layer / in-ch / attn", "codebooks", "top-1 (ensemble)", "bits", "unique"),
        *(
            "inner bits",
            "inner unique",
            "bytes on disk",
            "smaller than fp32",
            "extra epochs",
            "hours",
            "seeds",
        ),
        *("*paper, ImageNet ResNet-18*", "*paper: top-1 (ensemble)*", "*paper: bits*", "*paper: unique*"),
        "*paper: extra epochs*",
    ]
    assert cells[2] == [
        *("LSQ, 3 bit", "✓ out –", "9", "90.50 ± 0.71", "3.25 ± 0.35", "1,234", "2.50", "7", "100,001"),
        *("9.9 times", "27", "1.500 ± 0.707", "2", "*LSQ: ✓ ✗ –*", "*68.2*", "–", "–", "*90*"),
    ]
    assert cells[3] == [
        *("PWFN", "✗ ✗ –", "9", "91.50 (91.70)", "2.00", "1,234", "2.50", "7", "80,000", "12.5 times", "27"),
        *("0.500", "1", "*PWFN: ✗ ✗ –*", "*70.0 (70.1)*", "*2.5*", "*155*", "*27*"),
    ]
    assert len({len(row) for row in rows[2:6]}) == 1  # readable as plain text, too
    assert "not measured here" in "\n".join(rows)
    assert rows[-1] == "Measured on: GPU, torch 2.0. Commits: 0123456."


def test_rows_of_a_table_that_has_nothing_yet(tmp_path: Path) -> None:
    table, _ = _table(compare.read(DESCRIPTION), tmp_path, table_only=True)
    assert table.status == 1
    row = next(row for row in compare.lines(table) if row.startswith("| LSQ"))
    assert [cell.strip() for cell in row.strip("|").split(" | ")][1:5] == ["– – –", "–", "–", "–"]
    assert not any(line.startswith("Measured on") for line in compare.lines(table))


def test_a_network_without_a_line_in_the_paper_has_no_columns_of_it() -> None:
    plan = compare.read(DESCRIPTION.replace('paper = "ResNet-18"', ""))
    text = "\n".join(compare.lines(compare.table.make_table(plan, _results(plan), {})))
    assert "paper" not in text


def test_a_label_or_a_complaint_cannot_break_the_table() -> None:
    plan = compare.read(DESCRIPTION.replace('method = "pwfn"', 'method = "pwfn"\nlabel = "a|b\\u001b[2J"'))
    notes = {plan.runs()[0].name: "two\nlines"}
    rows = compare.lines(compare.table.make_table(plan, {}, notes))
    assert any(row.startswith("| a\\|b\N{REPLACEMENT CHARACTER}[2J") for row in rows)
    assert not any("\n" in row or "\x1b" in row for row in rows)


# --- real processes ---


def _waited(process: Process) -> int:
    return process.wait()


def test_a_process_runs_pwfn_and_its_sentence_is_kept(tmp_path: Path) -> None:
    path = tmp_path / COMPLAINTS
    assert _waited(start_process(["--version"], path)) == 0
    assert path.read_text() == ""
    status = _waited(start_process(["config", "--preset", "papr"], path))
    assert status == 2
    assert running._complaint(path, status) == "preset 'papr' is unknown: did you mean 'paper'?"


SMALL = """
data = "digits"
samples = 2
batch_size = 64
[settings]
schedule = { fractions = [0.5, 1.0], epochs_per_round = 0.2, epochs = 0.2 }
finish = { polish_epochs = 0.1, reestimate_epochs = 0.1 }
[[model]]
name = "digits_resnet"
weights = "random"
[[row]]
method = "pwfn"
[[row]]
method = "lsq"
"""


def test_a_small_table_for_real(tmp_path: Path) -> None:
    said: list[str] = []
    table = compare.run(compare.read(SMALL), tmp_path, jobs=2, device="cpu", say=said.append)
    assert table.missing == {}
    pwfn, lsq = table.parts[0].lines
    assert pwfn.figures["top1_ensemble"] is not None
    assert lsq.figures["top1_ensemble"] is None
    assert (pwfn.separate["layer"], lsq.separate["layer"]) == (Mark.NO, Mark.YES)
    assert lsq.figures["epochs"] == compare.table.Figure(0.2 + 0.1, None)  # polish included
    again: list[str] = []
    compare.run(compare.read(SMALL), tmp_path, device="cpu", say=again.append, start=_Fake().start)
    assert again == ["2 of 2 runs are done already"]
