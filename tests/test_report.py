"""The page: sound, alone in its file, and true to the run's own files."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pwfn import Config, load
from pwfn.errors import FileError
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.inspect import inspect
from pwfn.lab.costs import cost_sheet
from pwfn.report import write
from pwfn.report.details import file_bytes
from pwfn.report.facts import facts_of
from pwfn.report.figures import Figure
from pwfn.report.markup import Markup, element, escaped, joined
from pwfn.report.page import page
from pwfn.report.reading import RunData, read_run
from pwfn.report.reliability import calibration_error, diagrams
from pwfn.report.repeating import Settings, command, toml
from pwfn.report.tables import Cell, Column, bar, percent, table
from pwfn.report.top import size
from pwfn.run.folder import run
from pwfn.run.options import RunOptions, TrustOptions, settings
from pwfn.run.scores import assess_file
from pwfn.zoo import models

SMALL = {
    "schedule.fractions": [0.5, 0.9, 1.0],
    "schedule.epochs_per_round": 0.2,
    "finish.polish_epochs": 0.1,
    "finish.reestimate_epochs": 0.2,
    "target.keep_states": True,
}


def make_run(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A run of a few steps from random weights, assessed."""
    options = RunOptions("digits_resnet", "digits", folder, "random", device="cpu", batch_size=64)
    run(options, Config().override({**SMALL, **(changes or {})}))
    scored = RunOptions("", "digits", folder, "", device="cpu")
    facts, _ = assess_file(folder / "model.pwfn", scored, TrustOptions(samples=2, ood=("noise",)))
    (folder / "uncertainty.json").write_text(json.dumps(facts["uncertainty"]))
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


class Sound(HTMLParser):
    """Reads a page as a strict reader would: every element is closed, in order, and ids are unique."""

    VOID = frozenset(("meta", "hr", "wbr"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # innermost element, and what it says
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
        """What is read on the page, on one line."""
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())


# Sound, and alone in its file


def test_the_reader_of_pages_sees_what_is_wrong() -> None:
    Sound('<p id="a">x<wbr></p><svg><path/></svg>')
    for wrong in (
        "<p>",
        "<p></b></p>",
        '<p id="a"></p><b id="a"></b>',
        "<p/>",
        '<p class="a" class="b"></p>',
    ):
        with pytest.raises(AssertionError):
            Sound(wrong)


def test_a_page_is_sound_and_its_contents_lead_somewhere(text: str) -> None:
    sound = Sound(text)
    assert text.startswith("<!DOCTYPE html>")
    assert [sound.count(tag) for tag in ("html", "head", "body", "main", "h1", "title")] == [1] * 6
    targets = [attrs["href"] for tag, attrs in sound.elements if tag == "a"]
    assert len(targets) == 7  # a run has all sections but the one for several
    assert all(target is not None and target[1:] in sound.ids for target in targets)


def test_a_page_needs_nothing_beside_it(text: str) -> None:
    sound = Sound(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in sound.elements
    }
    for tag, attrs in sound.elements:
        for name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:image/")), (tag, name, value)
    without = text.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        'xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    assert not re.search(r"https?:|//[a-z]+\.|@import|@font-face", without)
    assert all(found.startswith("#") for found in re.findall(r"url\(['\"]?([^)]*)", without))


def test_the_browser_is_told_to_run_this_script_alone_and_to_fetch_nothing(text: str) -> None:
    policy = next(a["content"] for t, a in Sound(text).elements if a.get("http-equiv"))
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}';" in policy
    # It has to come before anything that it is about.
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script>")


def test_every_figure_has_a_title_a_sentence_and_a_text_alternative(data: RunData, text: str) -> None:
    sound = Sound(text)
    pictures = [attrs for tag, attrs in sound.elements if tag == "svg"]
    assert len(pictures) == sound.count("figure") >= 8
    for attrs in pictures:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 20
    assert sound.count("figcaption") == sound.count("figure")


def test_the_same_runs_give_the_same_bytes(data: RunData, text: str) -> None:
    assert page([data]) == text


def test_several_runs_and_one_run_twice_are_told_apart(data: RunData, folder: Path, tmp_path: Path) -> None:
    other = read_run(shutil.copytree(folder, tmp_path / "second"))
    sound = Sound(page([data, other, data]))
    head = [said for tag, said in sound.texts if tag == "th"][:3]
    assert len(set(head)) == 3
    assert [said for tag, said in sound.texts if tag == "h1"] == ["3 runs side by side"]
    assert "figure-pareto" in sound.ids
    assert sound.ids.index("figure-pareto") < sound.ids.index("figures")


# True to the files


def cells(text: str, label: str) -> list[list[tuple[str, str | None]]]:
    """Rows of the table of that name: what each cell shows, and what it is sorted by."""
    found = re.search(
        rf'<table[^>]* aria-label="{re.escape(html.escape(label))}[^"]*".*?</table>', text, re.DOTALL
    )
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


def test_the_top_has_the_figures_of_the_run(data: RunData, folder: Path, text: str) -> None:
    said, file = Sound(text).said, inspect(folder / "model.pwfn", zstd=False)
    before, after = (data.record[key]["metric"] for key in ("before", "after"))
    assert f"Accuracy {before:.2%} → before, now {after:.2%}" in said
    lost = 100 * (before - after)
    assert f"{abs(lost):.2f} points {'lost' if lost > 0 else 'gained'}, on 450 images" in said
    on_disk = (folder / "model.pwfn").stat().st_size
    assert f"{file.fp32_bytes:,} bytes in fp32, {on_disk:,} on disk" in said
    assert f"{file.entropy_bits:.2f} of entropy; {file.bits_per_weight:.2f} on disk" in said
    assert f"Unique values {load(folder / 'model.pwfn').values().unique().numel()}" in said


def test_the_table_of_layers_is_measured_on_the_file(folder: Path, text: str) -> None:
    compressed = load(folder / "model.pwfn")
    rows = cells(text, "9 compressed tensors")
    assert [row[1][0] for row in rows] == [entry.name for entry in compressed.layout.entries]
    for number, (row, entry) in enumerate(zip(rows, compressed.layout.entries, strict=True), 1):
        pool = Pool.of(compressed.values()[entry.span])
        assert [shown for shown, _ in row[:1] + row[2:7]] == [
            str(number),
            "×".join(map(str, entry.shape)),
            f"{entry.size:,}",
            f"{pool.entropy_bits:.2f}",
            str(pool.unique),
            f"{pool.zero_share:.1%}",
        ]
        assert [float(value or "nan") for _, value in row[3:7]] == [
            entry.size,
            pool.entropy_bits,
            pool.unique,
            pool.zero_share,
        ]
    indices = inspect(folder / "model.pwfn", zstd=False).index_bytes
    assert sum(int(row[7][1] or 0) for row in rows) >= indices
    assert "14 parameters are left in full precision" in text
    assert "BatchNorm2d: normalisation stays in full precision" in text


def test_the_parts_of_the_file_add_up_to_it(folder: Path, text: str) -> None:
    *parts, whole = cells(text, "Where the ")
    sizes = [int(row[1][1] or 0) for row in parts]
    assert sum(sizes) == int(whole[1][1] or 0) == (folder / "model.pwfn").stat().st_size
    assert sizes == sorted(sizes, reverse=True)


def test_what_speaks_for_a_file_is_rounded_down(data: RunData) -> None:
    facts = facts_of(data, "first")
    tenths = 10 * facts.file.fp32_bytes / facts.file.file_bytes
    assert facts.times_smaller * 10 == pytest.approx(int(tenths))
    assert 'class="bars"' in file_bytes(facts)


def test_the_states_after_each_round_are_listed(data: RunData, text: str) -> None:
    rows = cells(text, "first as it would be")
    assert [row[0][0] for row in rows] == ["1", "2", "3"]
    assert [int(row[5][1] or 0) for row in rows] == [state["file_bytes"] for state in data.record["states"]]
    assert "yes" in [row[6][0] for row in rows]


def test_the_cost_sheet_is_that_of_the_network(folder: Path, text: str) -> None:
    sheet = cost_sheet(
        load(folder / "model.pwfn"),
        models.digits_resnet(),
        torch.zeros(1, 1, 8, 8),
        file=folder / "model.pwfn",
    )
    rows = {row[0][0]: row[1][0] for row in cells(text, "What becomes of ")}
    assert rows["is a shift"] == f"{sheet.whole.shift_macs:,}"
    assert rows["is left out: times 0"] == f"{sheet.whole.skipped_macs:,}"
    energy = cells(text, "Energy: an estimate")
    assert [row[4][0] for row in energy] == [f"{e.energy_microjoules:.3f}" for e in sheet.whole.energy]
    assert energy[0][5][0] == "100.0%"


def test_a_network_that_a_file_would_have_to_run_code_for_is_not_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("raise SystemExit('it was run')")
    there = shutil.copytree(folder, tmp_path / "run")
    load(there / "model.pwfn").save(there / "model.pwfn", record={"model": "python:evil.py:make"})
    said = Sound(page([read_run(there)])).said
    assert (
        "Not counted, as the network cannot be made here by its name: the file wants to run evil.py" in said
    )


def test_uncertainty_is_shown_where_it_was_assessed(folder: Path, text: str, tmp_path: Path) -> None:
    found = json.loads((folder / "uncertainty.json").read_text())
    rows = cells(text, "first and its rivals")
    assert [row[0][0] for row in rows] == [row["name"] for row in found["rows"]]
    assert [row[2][0] for row in rows] == [f"{row['nll']:,.4f}" for row in found["rows"]]
    assert [row[5][0] for row in rows] == [f"{row['risk_coverage_area']:.5f}" for row in found["rows"]]
    assert len(cells(text, "Doubt tells noise")) == len(rows)
    for row in found["rows"]:  # what is drawn is what was measured
        assert calibration_error(found["reliability"][row["name"]]) == pytest.approx(row["calibration_error"])
        assert f"Reliability of {row['name']}, in " in text
    there = shutil.copytree(folder, tmp_path / "run")
    (there / "uncertainty.json").write_text(json.dumps({"after": {}, "uncertainty": found}))  # as printed
    assert cells(page([read_run(there)]), "run and its rivals") == rows
    (there / "uncertainty.json").unlink()
    assert 'id="trust"' not in page([read_run(there)])


def test_a_reliability_diagram_has_a_dot_where_the_bin_is() -> None:
    bins = [
        {"examples": 1, "confidence": 0.5, "accuracy": 0.0},
        {"examples": 3, "confidence": 1.0, "accuracy": 0.5},
    ]
    assert calibration_error(bins) == 0.5
    drawn = diagrams({"a": bins})
    # 200 wide from 42, 200 high from 6: confidence 0.5 is in the middle, accuracy 0 at the foot.
    assert '<circle cx="142.0" cy="206.0"' in drawn
    assert '<circle cx="242.0" cy="106.0"' in drawn
    assert diagrams({}) == ""
    Sound(diagrams({"<b>": [], "c": bins}))


# Settings, and the command that repeats them


@pytest.mark.parametrize(
    ("made", "preset", "changed"),
    [
        (Config(), "recommended", []),
        (Config.preset("paper"), "paper", []),
        (Config.preset("paper").override({"clustering.rule": "each"}), "paper", ["clustering.rule"]),
        (Config.preset("paper").override({"posterior.tolerance": 0.3}), "paper", []),  # not read
        (Config.preset("recommended", "lsq"), "recommended", []),
        (
            Config.preset("recommended", "kmeans").override({"quantiser.bits": 3, "seed": 7}),
            "recommended",
            ["quantiser.bits"],
        ),
    ],
)
def test_settings_are_told_by_what_differs_from_the_nearest_preset(
    made: Config, preset: str, changed: list[str]
) -> None:
    found = Settings.of(made.to_dict())
    assert (found.method, found.preset, found.seed) == (made.method, preset, made.seed)
    assert [each.name for each in found.changed] == changed


RECORD = {"identity": {"model": {"name": "m"}, "data": {"batch_size": 64}, "processes": 1}}


def parsed(text: str) -> Config:
    """The settings that a command sets, read as the command line reads them."""
    words = shlex.split(text.replace("\\\n", ""))
    given = {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}
    changes = [b for a, b in itertools.pairwise(words) if a == "--set"]
    seed = int(given["--seed"]) if "--seed" in given else None
    return settings(given.get("--preset"), None, changes, seed, method=given.get("--method"))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**40),
            "clustering.b": st.integers(4, 9),
            "clustering.sweep": st.none() | st.floats(1, 1e6),
            "clustering.rule": st.sampled_from(["mean", "each", "nearest"]),
            "posterior.alpha": st.floats(1e-9, 1),
            "training.fused": st.booleans(),
            "training.sigma_learning_rate": st.none() | st.floats(1e-6, 1),
            "schedule.fractions": st.just([0.25, 1.0]),
            "layout.exclude": st.lists(st.text("ab\"' $*\\é=", min_size=1), max_size=2),
        },
    ),
    st.sampled_from(["recommended", "paper"]),
)
def test_the_command_makes_the_very_settings_again(changes: dict[str, Any], preset: str) -> None:
    made = Config.preset(preset).override(changes)
    text = command(RECORD, {}, Settings.of(made.to_dict()), "run").text
    assert parsed(text).in_force() == made.in_force()


@pytest.mark.parametrize("method", ["wfn", "lsq", "lsq+", "apot", "q-vit", "kmeans", "baseline"])
def test_the_command_names_the_method(method: str) -> None:
    made = Config.preset("recommended", method).override({"seed": 5})
    assert parsed(command(RECORD, {}, Settings.of(made.to_dict()), "run").text) == made


def test_the_command_has_every_name_that_is_known_and_says_which_are_not() -> None:
    plain = Settings.of(Config().to_dict())
    assert command(RECORD, {}, plain, "run").missing == ("DATA", "WEIGHTS")
    asked = {
        "data": "npz:my data.npz",
        "weights": "w.safetensors",
        "limit": 100,
        "holdout": 0,
        "classes": None,
    }
    found = command(RECORD, asked, plain, "out; rm -rf")
    assert found.missing == ()
    assert shlex.split(found.text.replace("\\\n", "")) == [
        *("pwfn", "compress", "--model", "m", "--data", "npz:my data.npz", "--weights", "w.safetensors"),
        *("--out", "out; rm -rf", "--batch-size", "64", "--limit", "100"),
    ]
    several = {"identity": {**RECORD["identity"], "processes": 8}}
    assert command(several, asked, plain, "run").text.startswith(
        "torchrun --nproc-per-node 8 -m pwfn compress"
    )


def test_names_come_from_the_record_or_from_what_a_table_asked_for(folder: Path, tmp_path: Path) -> None:
    there = shutil.copytree(folder, tmp_path / "run")
    (there / "asked.json").write_text(json.dumps({"data": "npz:a.npz", "weights": "w.pt"}))
    record = json.loads((there / "record.json").read_text())
    assert record.pop("asked")["data"] == "digits"
    (there / "record.json").write_text(json.dumps(record))  # as earlier versions wrote it
    assert "--data npz:a.npz" in facts_of(read_run(there), "run").command.text
    (there / "record.json").write_text(json.dumps({**record, "asked": {"data": "digits"}}))
    text = facts_of(read_run(there), "run").command.text
    assert "--data digits" in text
    assert "--weights w.pt" in text


def test_settings_of_another_version_are_said_to_be_so(folder: Path, tmp_path: Path) -> None:
    there = shutil.copytree(folder, tmp_path / "run")
    record = json.loads((there / "record.json").read_text())
    record["identity"]["settings"]["clustering"]["colour"] = "red"
    (there / "record.json").write_text(json.dumps(record))
    said = Sound(page([read_run(there)])).said
    assert "unknown, as the settings are of another version: setting 'clustering.colour' is unknown" in said
    assert "--config config.toml" in said
    assert "--set " not in said


@pytest.mark.parametrize(
    "value", [True, 3, 0.00048828125, "each", "off", "true", "1", "a b", [], [0.5], ["*"]]
)
def test_values_survive_the_command_line(value: Any) -> None:
    from pwfn.run.options import _change

    assert _change(f"a.b={toml(value)}") == ("a.b", value)


# Text from files is only text

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</style>"


def test_nothing_in_a_name_becomes_an_element(folder: Path, tmp_path: Path, text: str) -> None:
    there = shutil.copytree(folder, tmp_path / "<b onclick=x>'\"&amp;")
    record = json.loads((there / "record.json").read_text())
    record["identity"]["model"]["name"] = NASTY + "\x00\x1b[31m\ud800"
    record["identity"]["data"]["content"] = record["machine"]["device"] = NASTY
    record["machine"]["versions"][NASTY] = NASTY
    record["choice"] = {"why": NASTY}
    record["identity"]["settings"]["layout"]["exclude"] = [NASTY]
    (there / "record.json").write_text(json.dumps(record))
    assessed = json.loads((there / "uncertainty.json").read_text())
    assessed["rows"][0]["name"] = assessed["split"] = NASTY
    assessed["rows"][0]["auroc"] = {NASTY: {NASTY: 0.5}}
    assessed["reliability"][NASTY] = assessed["reliability"].pop("point estimate")
    assessed["notes"] = [NASTY]
    (there / "uncertainty.json").write_text(json.dumps(assessed))
    for runs in ([read_run(there)], [read_run(there), read_run(folder)]):
        made = page(runs)
        made.encode("utf-8")
        sound = Sound(made)
        assert sound.count("script") == 1
        assert sound.count("style") == 1
        assert {"img", "b"}.isdisjoint(tag for tag, _ in sound.elements)
        assert not any(name.startswith("on") for _, attrs in sound.elements for name in attrs)
        assert NASTY in sound.said
        assert "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}" in sound.said


@given(st.text())
def test_text_is_read_as_it_was_written(text: str) -> None:
    made = element("p", text, title=text)
    sound = Sound(made)
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    assert sound.elements == [("p", {"title": shown})]
    assert "".join(data for _, data in sound.texts) == (shown if shown.strip() else "")


def test_markup_stays_and_nested_children_are_joined() -> None:
    assert joined("<", Markup("<hr>"), ["&", [Markup("<wbr>")]]) == "&lt;<hr>&amp;<wbr>"
    assert (
        element("i", class_="a b", hidden=True, title=None, data_sortable=False)
        == '<i class="a b" hidden></i>'
    )
    assert isinstance(escaped("x"), Markup)


def test_a_sortable_table_says_so_and_missing_numbers_have_no_value() -> None:
    made = table("T", [Column("A", is_number=False), Column("")], [[Cell("x"), percent(None)]], sortable=True)
    assert '<table aria-label="T" data-sortable>' in made
    assert '<td class="number">–</td>' in made
    assert made.count("<th ") == 2  # an empty head is no head
    assert "width:100.0%" in str(bar(1.0).shown)


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (2_500_000_000, "2.5 GB")]
)
def test_sizes(number: int, shown: str) -> None:
    assert size(number) == shown


# Mistakes


def spoiled(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> RunData:
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return read_run(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("record.json", lambda r: {**r, "after": 3}, "record.json: is not the record of a run"),
        (
            "record.json",
            lambda r: {**r, "identity": {"settings": r["identity"]["settings"]}},
            "record.json: is not the record of a run, or of another version ('model')",
        ),
        (
            "uncertainty.json",
            lambda u: {},
            "uncertainty.json: is not what pwfn evaluate writes (KeyError: 'rows')",
        ),
        ("uncertainty.json", lambda u: [1], "uncertainty.json: holds a list, not a JSON object"),
        (
            "uncertainty.json",
            lambda u: {**u, "reliability": {"a": [{"examples": 1, "confidence": "x", "accuracy": 1}]}},
            "uncertainty.json: is not what pwfn evaluate writes (TypeError",
        ),
    ],
)
def test_a_damaged_file_is_named(
    folder: Path, tmp_path: Path, name: str, change: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(FileError) as caught:
        page([spoiled(shutil.copytree(folder, tmp_path / "run"), name, change)])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_is_written_whole_or_not_at_all(folder: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "report.html"
    said = write([folder], out)
    assert out.read_text(encoding="utf-8") == text
    assert said == f"{out}: {len(text.encode()):,} bytes, 1 run; open it in any browser"
    with pytest.raises(FileError, match="no run to report on: name the folder of one"):
        write([], out)
    with pytest.raises(FileError, match="holds no run"):
        write([tmp_path], out)
    with pytest.raises(FileError, match="cannot be written"):
        write([folder], tmp_path / "none" / "report.html")
    assert out.read_text(encoding="utf-8") == text


def test_figures_made_before_are_not_made_again(data: RunData) -> None:
    svg = '<svg role="img" aria-label="a line that rises to the right"></svg>'
    figure = Figure(
        "own", "A <title>", "Read it so.", "a line that rises to the right", svg, (("x", "y"), (("1", "2"),))
    )
    made = page([data], [figure])
    assert re.findall(r'id="figure-([^"]*)"', made) == ["own"]
    assert "A &lt;title&gt;" in made
    assert svg in made
    assert cells(made, "Numbers of: A <title>") == [[("1", None), ("2", None)]]
