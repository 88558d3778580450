"""The page: sound HTML, self-contained, and true to the files of the run."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pwfn import Config, FileError, PwfnError, load
from pwfn.config.changes import Settings
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.inspect import inspect
from pwfn.lab.costs import cost_sheet
from pwfn.lab.uncertainty.file import evaluated
from pwfn.report import write
from pwfn.report.figures import style
from pwfn.report.page import compress_command, load_code, page, verdict
from pwfn.report.reading import RunData, read_run
from pwfn.run.folder import run
from pwfn.run.options import RunOptions, TrustOptions, settings
from pwfn.zoo import models

SHORT = {
    "schedule.fractions": [0.5, 0.9, 1.0],
    "schedule.epochs_per_round": 0.2,
    "finish.polish_epochs": 0.1,
    "finish.reestimate_epochs": 0.2,
    "target.bits": 32.0,  # so that states are kept
}


def make_run(folder: Path, config: Config | None = None) -> Path:
    """A run of a few steps from random weights, with its uncertainty assessed."""
    options = RunOptions("digits_resnet", "digits", folder, "random", device="cpu", batch_size=64)
    run(options, (config or Config()).override(SHORT))
    scored = RunOptions("", "digits", folder, "", device="cpu")
    asked = TrustOptions(samples=2, ood=("noise",), out=folder / "uncertainty.json")
    evaluated([folder / "model.pwfn"], scored, asked)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def data(folder: Path) -> RunData:
    return read_run(folder)


@pytest.fixture(scope="module")
def text(data: RunData) -> str:
    return page([data])


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("checkpoints", "states")
    return Path(shutil.copytree(folder, tmp_path / "run", ignore=ignored))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of all but the figures, which take most of the time."""
    monkeypatch.setattr(style, "svg", lambda figure: f'<svg role="img" aria-label="{figure.key}"></svg>')


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


class Sound(HTMLParser):
    """A strict reader: every element is closed in order, and ids are unique."""

    VOID = frozenset(("meta", "wbr"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # innermost element, and its text
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag}: an attribute twice"
        self.elements.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> is of SVG alone"
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.texts.append((self.open[-1], data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def said(self) -> str:
        """The visible text, on one line."""
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())


def cells(text: str, label: str) -> list[list[tuple[str, str | None]]]:
    """Rows of the table whose label begins so: the text of each cell, and its value for sorting."""
    found = re.search(rf'<table[^>]* aria-label="{re.escape(html.escape(label))}.*?</table>', text, re.DOTALL)
    assert found is not None, label
    rows = re.findall(r"<tr>(.*?)</tr>", found.group().partition("<tbody>")[2], re.DOTALL)
    return [
        [
            (
                html.unescape(re.sub(r"<[^>]*>", "", inner)),
                (re.findall(r'data-value="([^"]*)"', attrs) or [None])[0],
            )
            for attrs, inner in re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", row, re.DOTALL)
        ]
        for row in rows
    ]


# Sound and self-contained


@pytest.mark.parametrize(
    "wrong", ["<p>", "<p></b></p>", '<p id="a"></p><b id="a"></b>', "<p/>", '<p class="a" class="b"></p>']
)
def test_the_strict_reader_finds_mistakes(wrong: str) -> None:
    Sound('<p id="a">x<wbr></p><svg><path/></svg>')
    with pytest.raises(AssertionError):
        Sound(wrong)


def test_the_page_is_sound_and_its_contents_lead_to_its_sections(text: str) -> None:
    sound = Sound(text)
    assert text.startswith("<!DOCTYPE html>")
    assert [sound.count(tag) for tag in ("html", "head", "body", "main", "h1", "title")] == [1] * 6
    targets = [str(attrs["href"])[1:] for tag, attrs in sound.elements if tag == "a"]
    assert targets == [attrs["id"] for tag, attrs in sound.elements if tag == "section"]
    assert targets[:2] == ["accuracy", "load"]


def test_the_page_needs_no_other_file(text: str) -> None:
    sound = Sound(text)
    loads = {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert loads.isdisjoint(tag for tag, _ in sound.elements)
    for tag, attrs in sound.elements:
        for name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, name)
    without = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|@font-face", without)
    assert all(found.startswith("#") for found in re.findall(r"url\(['\"]?([^)]*)", without))


def test_the_browser_may_run_this_script_alone_and_fetch_nothing(text: str) -> None:
    policy = next(a["content"] for _, a in Sound(text).elements if a.get("http-equiv")) or ""
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}';" in policy
    # It has to come before anything that it is about.
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script>")


def test_figures_and_tables_have_text_alternatives_and_can_be_reached_by_keyboard(text: str) -> None:
    sound = Sound(text)
    assert all(attrs["aria-label"] for tag, attrs in sound.elements if tag == "table")
    boxes = [attrs for _, attrs in sound.elements if (attrs.get("class") or "").startswith("box")]
    assert len(boxes) == sound.count("table")
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in boxes)
    pictures = [attrs for tag, attrs in sound.elements if tag == "svg"]
    assert len(pictures) == sound.count("figure") == sound.count("figcaption") >= 7
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 20 for attrs in pictures)


def test_the_same_runs_give_the_same_bytes(data: RunData, text: str) -> None:
    assert page([data]) == text


@pytest.mark.usefixtures("undrawn")
def test_several_runs_and_one_run_twice_have_different_names(data: RunData, copy: Path) -> None:
    sound = Sound(page([data, read_run(copy), data]))
    assert (
        len({said for tag, said in sound.texts if tag == "th"} & {"first (1)", "run (2)", "first (3)"}) == 3
    )
    assert "3 runs side by side" in sound.said
    assert sound.ids.index("figure-accuracy") < sound.ids.index("figures")
    assert {"figure-reliability-1", "figure-reliability-2", "figure-reliability-3"} <= set(sound.ids)


def test_what_is_absent_is_left_out(copy: Path) -> None:
    """A record of an earlier version without accuracy, rounds, machine and names, and no trace."""
    for name in ("trace.jsonl", "uncertainty.json", "log.jsonl"):
        (copy / name).unlink()
    keys = ("model", "settings")
    change_json(copy / "record.json", lambda r: {"identity": {key: r["identity"][key] for key in keys}})
    for runs in ([read_run(copy)], [read_run(copy), read_run(copy)]):
        sound = Sound(page(runs))
        assert {"states", "uncertainty", "figure-accuracy", "figure-rounds"}.isdisjoint(sound.ids)
        assert {"load", "making", "layers", "bytes", "costs"} <= set(sound.ids)
        assert "accuracy not measured" in sound.said


def test_a_method_without_rounds_or_sigmas_has_a_page_too(tmp_path: Path) -> None:
    options = RunOptions("digits_resnet", "digits", tmp_path / "run", "random", device="cpu")
    run(options, Config.preset("recommended", "baseline"))
    sound = Sound(page([read_run(tmp_path / "run")]))
    assert "No smaller than in fp32" in sound.said
    assert "figure-sigmas" not in sound.ids


def test_a_package_that_is_missing_is_named(data: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(PwfnError, match=r"jinja2: pip install 'pwfn\[report\]'"):
        page([data])


# True to the files


def test_the_top_has_the_numbers_of_the_run(data: RunData, folder: Path, text: str) -> None:
    top = Sound(text).said.partition("How it was made")[0]
    file = inspect(folder / "model.pwfn", zstd=False)
    before, after = (data.record[key]["metric"] for key in ("before", "after"))
    assert f"Accuracy {before:.2%} → before, now {after:.2%} on 450 examples" in top
    on_disk = (folder / "model.pwfn").stat().st_size
    assert f"{int(10 * file.fp32_bytes / on_disk) / 10} times smaller" in top  # rounded down
    assert f"Entropy {file.entropy_bits:.2f} bits per weight" in top
    assert f"Unique values {load(folder / 'model.pwfn').values().unique().numel()} " in top


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.9, 0.88, "2.00 points of accuracy lost"),
        (0.88, 0.9, "2.00 points of accuracy gained"),
        (0.9, 0.90001, "accuracy unchanged"),
        (None, 0.9, "accuracy before not measured"),
        (0.9, None, "accuracy not measured"),
    ],
)
def test_the_verdict_says_what_became_of_accuracy(
    data: RunData, before: float | None, after: float | None, said: str
) -> None:
    assert said in verdict(replace(data, before=before, after=after))


def test_the_record_and_the_page_pin_the_file(data: RunData, folder: Path, text: str) -> None:
    wanted = load(folder / "model.pwfn").content_sha256()
    assert data.record["content_sha256"] == wanted
    assert wanted in Sound(text).said


def test_the_code_on_the_page_loads_the_network(
    data: RunData, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = load_code(data)
    assert len(code.splitlines()) == 3
    assert html.escape(code, quote=False) in html.unescape(text)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(code, names)
    expected = load(folder / "model.pwfn").apply_to(models.digits_resnet()).eval()
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(names["model"](images), expected(images))


def test_the_table_of_layers_is_measured_on_the_file(folder: Path, text: str) -> None:
    compressed, facts = load(folder / "model.pwfn"), inspect(folder / "model.pwfn", zstd=False)
    rows = cells(text, f"{len(compressed.layout.entries)} compressed tensors")
    for number, (row, entry) in enumerate(zip(rows, compressed.layout.entries, strict=True), 1):
        pool = Pool.of(compressed.values()[entry.span])
        assert [shown for shown, _ in row[:7]] == [
            *(str(number), entry.name, "×".join(map(str, entry.shape)), f"{entry.size:,}"),
            *(f"{pool.entropy_bits:.2f}", str(pool.unique), f"{pool.zero_share:.1%}"),
        ]
        values = [entry.size, pool.entropy_bits, pool.unique, pool.zero_share]
        assert [float(value or "nan") for _, value in row[3:7]] == values
    assert sum(int(row[7][1] or 0) for row in rows) >= facts.parts["index"]
    left_out = {row[0][0]: row[2][0] for row in cells(text, "Parameters of first in full precision")}
    assert left_out == {each.name: each.reason for each in compressed.layout.left_out}


def test_the_parts_of_the_file_add_up_to_it(folder: Path, text: str) -> None:
    sizes = [int(row[1][1] or 0) for row in cells(text, "Parts of the file of first")]
    assert sum(sizes) == (folder / "model.pwfn").stat().st_size
    assert sizes == sorted(sizes, reverse=True)
    # Each size is said once.
    said = Sound(text).said.partition("Where the bytes are Parts")[2].partition("Uncertainty")[0]
    numbers = re.findall(r"\d{1,3}(?:,\d{3})+(?!\.)", said)
    counted = Counter(int(number.replace(",", "")) for number in numbers)
    assert counted[sum(sizes)] == 1
    assert counted[inspect(folder / "model.pwfn", zstd=False).fp32_bytes] == 1


def test_the_states_after_each_round_are_listed(data: RunData, text: str) -> None:
    rows = cells(text, "first, had the run ended after a round")
    assert [row[0][0] for row in rows] == ["1", "2", "3"]
    assert [int(row[5][1] or 0) for row in rows] == [state["file_bytes"] for state in data.record["states"]]
    assert "yes" in [row[6][0] for row in rows]


def test_the_steps_that_were_tried_are_listed(copy: Path, undrawn: None) -> None:
    def with_steps(record: Any) -> Any:
        states = [{**state, "step": 0.5**n} for n, state in enumerate(record["states"])]
        return {**record, "states": states}

    change_json(copy / "record.json", with_steps)
    rows = cells(page([read_run(copy)]), "run, at each step that was tried")
    assert [row[1][0] for row in rows] == ["1", "0.5", "0.25"]


def test_the_cost_sheet_is_that_of_the_network(folder: Path, text: str) -> None:
    path = folder / "model.pwfn"
    sheet = cost_sheet(load(path), models.digits_resnet(), torch.zeros(1, 1, 8, 8), file=path)
    products = {row[0][0]: int(row[1][1] or 0) for row in cells(text, "What becomes of ")}
    assert products["a shift"] == sheet.shift_macs
    assert sum(products.values()) == sheet.macs + sheet.uncompressed_macs
    energy = cells(text, "Energy, estimated")
    assert [row[5][0] for row in energy] == [f"{e.energy_microjoules:.3f}" for e in sheet.energy]
    read = [sheet.bytes_read[each.storage] for each in sheet.energy]
    assert [int(row[2][1] or 0) for row in energy] == read
    assert energy[0][6][0] == "100.0%"


@pytest.mark.usefixtures("undrawn")
def test_a_file_cannot_make_the_report_run_code(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    Path("evil.py").write_text("raise SystemExit('it was run')")
    load(copy / "model.pwfn").save(copy / "model.pwfn", record={"model": "python:evil.py:make"})
    assert "Not counted: the file wants to run evil.py:make" in Sound(page([read_run(copy)])).said


@pytest.mark.usefixtures("undrawn")
def test_a_network_of_ones_own_has_its_costs_when_its_owner_names_it(copy: Path, text: str) -> None:
    code = copy / "nets.py"
    code.write_text("from pwfn.zoo.models import digits_resnet as make\n")
    file, named = copy / "model.pwfn", f"python:{code}:make"
    load(file).save(file, record={"model": named})
    data = read_run(copy)
    assert "--model" in Sound(page([data])).said  # how to get them
    own = page([data], named, "1,8,8")
    assert cells(own, "What becomes of ") == cells(text, "What becomes of ")
    for model, shape, what in (
        (named, None, "--input-shape"),
        (named, "1;8", "1;8"),
        (f"python:{code}:other", "1,8,8", "other"),
        ("cifar_resnet20", None, "conv1.weight"),
    ):
        with pytest.raises(PwfnError, match=re.escape(what)):
            page([data], model, shape)


@pytest.mark.usefixtures("undrawn")
def test_uncertainty_is_shown_as_it_was_assessed(folder: Path, text: str, copy: Path) -> None:
    found = json.loads((folder / "uncertainty.json").read_text())
    rows = cells(text, "Predictions of first")
    assert [row[0][0] for row in rows] == [row["name"] for row in found["rows"]]
    assert [row[2][0] for row in rows] == [f"{row['nll']:.4f}" for row in found["rows"]]
    assert len(cells(text, "Detection of noise")) == len(rows)
    for row in found["rows"]:  # the diagram and the table agree
        assert f"{row['name']} {row['calibration_error']:.4f}" in text
    change_json(copy / "uncertainty.json", lambda u: {"after": {}, "uncertainty": u})  # as --json prints it
    assert cells(page([read_run(copy)]), "Predictions of run") == rows


# Settings, and the command that repeats the run


@pytest.mark.parametrize(
    ("made", "preset", "changed"),
    [
        (Config(), "recommended", []),
        (Config.preset("quick"), "quick", []),
        (Config.preset("paper").override({"training.clip_norm": 0.5}), "paper", ["training.clip_norm"]),
        (Config.preset("recommended", "lsq"), "recommended", []),
        (
            Config.preset("recommended", "kmeans").override({"options.bits": 3, "seed": 7}),
            "recommended",
            ["options.bits"],
        ),
    ],
)
def test_settings_are_shown_as_differences_from_the_nearest_preset(
    made: Config, preset: str, changed: list[str]
) -> None:
    found = Settings.of(made.to_dict())
    assert (found.method, found.preset, found.seed) == (made.method, preset, made.seed)
    assert [each.name for each in found.changed] == changed


def of_config(data: RunData, made: Config) -> str:
    return compress_command(data, Settings.of(made.to_dict()))[0]


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))


def parsed(command: str) -> Config:
    """The settings of a command, read as the command line reads them."""
    pairs = [(a, b) for a, b in itertools.pairwise(words_of(command)) if a.startswith("--")]
    given = dict(pairs)
    changes = [value for name, value in pairs if name == "--set"]
    seed = int(given["--seed"]) if "--seed" in given else None
    return settings(given.get("--preset"), None, changes, seed, method=given.get("--method"))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**40),
            "training.weight_decay": st.floats(0, 1),
            "training.clip_norm": st.none() | st.floats(1e-6, 1e6),
            "training.distill": st.booleans(),
            "posterior.alpha": st.floats(0, 9),
            "layout.exclude": st.lists(st.text("ab\"' $*\\é=", min_size=1), max_size=2),
        },
    ),
    st.sampled_from(["recommended", "paper", "quick"]),
)
def test_the_command_sets_the_same_settings(data: RunData, changes: dict[str, Any], preset: str) -> None:
    made = Config.preset(preset).override(changes)
    assert parsed(of_config(data, made)) == made


@pytest.mark.parametrize("method", ["wfn", "lsq", "lsq+", "apot", "q-vit", "kmeans", "baseline"])
def test_the_command_names_the_method(data: RunData, method: str) -> None:
    made = Config.preset("recommended", method).override({"seed": 5})
    assert parsed(of_config(data, made)) == made


def test_the_command_has_every_name_of_the_record_and_says_what_is_missing(data: RunData) -> None:
    settings = Settings.of(Config().to_dict())

    def asked(**names: Any) -> RunData:
        return replace(data, record={**data.record, "asked": names}, folder=Path("out; rm -rf"))

    command, note = compress_command(asked(), settings)
    assert "--data DATA" in command
    assert "DATA" in note
    assert "WEIGHTS" in note
    names = {"data": "npz:my data.npz", "weights": "w.safetensors", "limit": 100, "holdout": 0}
    command, note = compress_command(asked(**names), settings)
    assert note == ""
    assert words_of(command) == [
        *("pwfn", "compress", "--model", "digits_resnet", "--data", "npz:my data.npz"),
        *("--weights", "w.safetensors", "--out", "out; rm -rf", "--batch-size", "64", "--limit", "100"),
    ]
    identity = {**data.record["identity"], "processes": 8}
    several = replace(data, record={**data.record, "identity": identity})
    assert compress_command(several, settings)[0].startswith("torchrun --nproc-per-node 8 -m pwfn compress")


@pytest.mark.parametrize(
    ("source", "size", "said"),
    [
        ("digits", 128, True),
        ("python:d.py:f", 128, False),
        ("python:d.py:f", 64, True),
        ("digits", None, False),
    ],
)
def test_the_command_has_no_batch_size_that_was_not_used(
    data: RunData, source: str, size: int | None, said: bool
) -> None:
    changed = replace(data, batch_size=size, record={**data.record, "asked": {"data": source}})
    assert ("--batch-size" in of_config(changed, Config())) is said


def test_names_are_in_the_record_or_in_what_a_table_asked_for(copy: Path) -> None:
    (copy / "asked.json").write_text(json.dumps({"data": "npz:a.npz", "weights": "w.pt"}))
    change_json(copy / "record.json", lambda r: {**r, "asked": {"data": "digits"}})
    text = of_config(read_run(copy), Config())
    assert "--data digits" in text
    assert "--weights w.pt" in text


@pytest.mark.usefixtures("undrawn")
def test_settings_of_another_version_are_shown_as_recorded(copy: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        record["identity"]["settings"]["training"]["colour"] = "red"
        return record

    change_json(copy / "record.json", change)
    text = page([read_run(copy)])
    assert "the settings are of another version: setting 'training.colour' is unknown" in Sound(text).said
    assert "--config config.toml" in text
    assert "--set " not in text
    assert [("training.colour", None), ("red", None)] in cells(text, "Settings of run")


# Text from files stays text

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</style>{{ 7*7 }}"


def test_nothing_in_a_name_becomes_an_element(folder: Path, copy: Path) -> None:
    there = copy.rename(copy.parent / "<b onclick=x>'\"&amp;")

    def change(record: dict[str, Any]) -> dict[str, Any]:
        record["identity"]["model"]["name"] = NASTY + "\x00\x1b[31m\ud800"
        record["identity"]["data"]["content"] = record["machine"]["device"] = NASTY
        record["machine"]["versions"][NASTY] = NASTY
        record["choice"] = {"why": NASTY}
        record["identity"]["settings"]["layout"]["exclude"] = [NASTY]
        return record

    def assess(found: dict[str, Any]) -> dict[str, Any]:
        found["rows"][0]["name"] = found["split"] = NASTY
        found["rows"][0]["auroc"] = {NASTY: {NASTY: 0.5}}
        found["reliability"][NASTY] = found["reliability"].pop("point estimate")
        return {**found, "notes": [NASTY]}

    change_json(there / "record.json", change)
    change_json(there / "uncertainty.json", assess)
    for runs in ([read_run(there)], [read_run(there), read_run(folder)]):
        made = page(runs)
        made.encode("utf-8")
        sound = Sound(made)
        assert sound.count("script") == sound.count("style") == 1
        assert {"img", "b"}.isdisjoint(tag for tag, _ in sound.elements)
        assert not any(name.startswith("on") for _, attrs in sound.elements for name in attrs)
        assert NASTY in sound.said
        assert "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}" in sound.said


# Mistakes


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("record.json", lambda r: {**r, "after": 3}),
        ("record.json", lambda r: {**r, "rounds": [{"fraction": 1}]}),
        ("record.json", lambda r: {**r, "machine": 5}),
        ("record.json", lambda r: {**r, "identity": {"settings": r["identity"]["settings"]}}),
        ("record.json", lambda r: {**r, "identity": {**r["identity"], "settings": 1}}),
        ("uncertainty.json", lambda u: {}),
        ("uncertainty.json", lambda u: [1]),
        ("uncertainty.json", lambda u: {**u, "rows": [{"name": "a", "accuracy": "high"}]}),
        (
            "uncertainty.json",
            lambda u: {**u, "reliability": {"a": [{"examples": 1, "confidence": "x", "accuracy": 1}]}},
        ),
    ],
)
def test_a_damaged_file_is_named_in_one_sentence(copy: Path, name: str, change: Callable[[Any], Any]) -> None:
    change_json(copy / name, change)
    with pytest.raises(FileError) as caught:
        page([read_run(copy)])
    assert f"{copy / name}: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("undrawn")
def test_the_page_is_written_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert str(out) in write([folder], out)
    text = out.read_text(encoding="utf-8")
    assert text == page([read_run(folder)])
    for folders, place in (([], out), ([tmp_path], out), ([folder], tmp_path / "none" / "report.html")):
        with pytest.raises(FileError):
            write(folders, place)
    assert out.read_text(encoding="utf-8") == text
