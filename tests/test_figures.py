"""A run as it is read, and its figures: true to the data, and an SVG that fits into any page."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pwfn import Compressed, Config, FileError, Layout, PwfnError, load
from pwfn.fixing.unique import entropy_bits
from pwfn.layout import untouched
from pwfn.report.figures import Figure, accuracy, figures, layers, save_png, sigma, style, training
from pwfn.report.reading import (
    BINS_PER_OCTAVE,
    Histogram,
    History,
    Move,
    RunData,
    Sample,
    names,
    read_run,
)
from pwfn.run.folder import run
from pwfn.run.options import RunOptions
from pwfn.zoo.models import VisionTransformer

SVG = "{http://www.w3.org/2000/svg}"
SHORT: dict[str, Any] = {
    "schedule.fractions": [0.5, 0.9, 1.0],
    "schedule.epochs_per_round": 0.1,
    "finish.polish_epochs": 0.1,
}
CONFIGS = {
    "paper": Config.preset("paper").override({**SHORT, "target.max_drop": 100.0}),  # sigmas vary
    "constant": Config.preset("recommended").override(SHORT),  # one sigma for all weights
    "wfn": Config.preset("recommended", "wfn").override(SHORT),  # none
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    for name, config in CONFIGS.items():
        options = RunOptions("digits_resnet", "digits", place / name, "random", device="cpu", batch_size=64)
        run(options, config)
    return {name: place / name for name in CONFIGS}


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> dict[str, RunData]:
    return {name: read_run(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def drawn(runs: dict[str, RunData]) -> list[tuple[Figure, str]]:
    return [(figure, style.svg(figure)) for figure in figures(list(runs.values()))]


def rows(figure: Figure | None) -> tuple[tuple[str, ...], ...]:
    assert figure is not None
    assert figure.table is not None
    return figure.table[1]


# Reading


def test_a_run_is_read_whole(folders: dict[str, Path], runs: dict[str, RunData]) -> None:
    found = runs["paper"]
    assert (found.name, found.folder) == ("paper", folders["paper"])
    assert [done.fraction for done in found.rounds] == [0.5, 0.9, 1.0]
    assert [state.number for state in found.states] == [1, 2, 3]
    assert found.settings == CONFIGS["paper"].to_dict()
    assert torch.equal(found.compressed.values(), load(folders["paper"] / "model.pwfn").values())
    history = found.history
    assert [number for number, _ in history.sigmas] == [0, 1, 2, 3]  # the start, and before every fixing
    assert history.sigmas[0][1].total == found.compressed.layout.size
    counts = torch.unique(found.compressed.values(), return_counts=True)[1]
    assert history.codebooks[-1] == (3, tuple(sorted(counts.tolist(), reverse=True)))
    weights = {entry.name for entry in found.compressed.layout.entries if entry.kind == "weight"}
    assert {(start.name, end.name) for start, end in history.samples} == {(name, name) for name in weights}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("record.json", None),
        *[("record.json", content) for content in (b"{", b"[]", b"{}", b"\xff\xff")],
        ("model.pwfn", None),
        ("model.pwfn", b"torn"),
        ("trace.jsonl", b'{"moment": "noon", "round": 0}'),
        ("trace.jsonl", b"5"),
    ],
)
def test_what_is_missing_or_damaged_is_named_in_one_sentence(
    name: str, content: bytes | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folders["wfn"], copy, ignore=shutil.ignore_patterns("checkpoints"))
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    with pytest.raises(FileError, match=re.escape(name)) as caught:
        read_run(copy)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileError, match=re.escape(str(folder))):
            read_run(folder)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/one", "a/two"], ["one", "two"]),
        (["/t/lsq/seed0", "/t/wfn/seed0", "/t/wfn/seed1"], ["lsq/seed0", "wfn/seed0", "wfn/seed1"]),
        (["/a/x/run", "/b/x/run"], ["a/x/run", "b/x/run"]),
        (["/a/run", "/a/run"], ["run (1)", "run (2)"]),
        ([], []),
    ],
)
def test_names_tell_runs_apart(runs: dict[str, RunData], paths: list[str], expected: list[str]) -> None:
    made = [replace(runs["wfn"], folder=Path(path), name=Path(path).name) for path in paths]
    assert names(made) == expected


# The set of figures, and the SVG


def test_all_that_the_runs_allow_is_drawn(drawn: list[tuple[Figure, str]], runs: dict[str, RunData]) -> None:
    gaussian = ["schedule", "distances", "mu-sigma", "channels", "layers-by-bits"]
    plain = ["schedule", "distances", "channels", "layers-by-bits"]
    of_runs = [f"{key}-{n}" for n, keys in enumerate((gaussian, gaussian, plain), 1) for key in keys]
    assert [figure.key for figure, _ in drawn] == ["accuracy", "rounds", "sigmas", *of_runs]
    alone = [figure.key for figure in figures([runs["constant"]])]
    assert alone == ["accuracy", "rounds", *gaussian]  # its one sigma is a sentence
    untraced = [figure.key for figure in figures([replace(runs["paper"], history=History())])]
    assert untraced == ["accuracy", "rounds", "schedule", "channels", "layers-by-bits"]
    assert figures([]) == []


def test_every_svg_is_sound_small_and_self_contained(drawn: list[tuple[Figure, str]]) -> None:
    seen: set[str] = set()
    for figure, svg in drawn:
        root = ElementTree.fromstring(svg)
        assert (root.tag, root.get("role"), root.get("aria-label")) == (f"{SVG}svg", "img", figure.alt)
        assert re.search(r"\d.*\.$", figure.alt), figure.key
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert "text" in tags  # letters are letters
        assert tags.isdisjoint(("script", "style", "image", "metadata", "foreignObject"))
        assert svg.count("http") == 1  # the name space
        assert len(svg) < 120_000, (figure.key, len(svg))
        # Colours are the page's to set.
        bare = re.sub(r"var\(--figure-[1-6], #[0-9a-f]{6}\)", "", svg)
        assert not re.findall(r"(?:fill|stroke): #[0-9a-f]{3,6}", bare), figure.key
        # Ids are unique in a page of all figures, and every reference is met.
        ids = re.findall(r'\bid="([^"]*)"', svg)
        assert len({*ids} | seen) == len(ids) + len(seen), figure.key
        assert {a or b for a, b in re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', svg)} <= {*ids}
        seen |= {*ids}
        if figure.table is not None:
            header, numbers = figure.table
            assert {len(row) for row in numbers} == {len(header)}, figure.key


def contrast(one: str, other: str) -> float:
    """Of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(color: str) -> float:
        shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_light_and_in_dark() -> None:
    css = resources.files("pwfn.report").joinpath("page.css").read_text(encoding="utf-8")
    light_paper, dark_paper = re.findall(r"--paper: (#[0-9a-f]{6})", css)[:2]
    dark = re.findall(r"--figure-\d: (#[0-9a-f]{6})", css)
    assert len(dark) == len(style.SERIES)
    assert min(contrast(color, light_paper) for color in style.SERIES) >= 3
    assert min(contrast(color, dark_paper) for color in dark) >= 5


def test_a_name_may_hold_anything(runs: dict[str, RunData]) -> None:
    wild = '</svg><script>alert("1")</script> & $x^2$ 重み \x1b[31m'
    found = training.by_round([runs["paper"], runs["wfn"]], [wild, "b"])
    assert found is not None
    root = ElementTree.fromstring(style.svg(found))  # which takes no control characters
    assert not root.findall(f".//{SVG}script")
    shown = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    assert "</script> & $x^2$ 重み �[31m" in shown


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=2, max_size=80, unique=True))
def test_a_cloud_of_dots_is_one_path_that_has_them_all(places: list[tuple[int, int]]) -> None:
    def draw(sheet: Any) -> None:
        panel = sheet.subplots()
        style.dots(panel, [float(x) for x, _ in places], [float(y) for _, y in places], style.SERIES[0])
        panel.set(xlim=(-1, 61), ylim=(-1, 61))

    svg = style.svg(Figure("k", "", "", "", draw, 3.0))
    (path,) = re.findall(r'd="([^"]*)"[^>]*stroke-linecap: round', svg)
    strokes = [tuple(map(float, each)) for each in re.findall(r"M (\S+) (\S+) L (\S+) (\S+)", path)]
    assert len({stroke[:2] for stroke in strokes}) == len(places)
    assert all(end == pytest.approx(start, abs=0.011) for *start, a, b in strokes for end in [[a, b]])


def test_the_mark_of_the_finished_file_is_not_clipped(runs: dict[str, RunData]) -> None:
    found = training.by_round([runs["paper"]], ["paper"])
    assert found is not None
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet()
    found.draw(sheet)
    lines = [line for panel in sheet.axes for line in panel.lines]
    hollow = [line for line in lines if line.get_markerfacecolor() == "none"]
    assert len(hollow) == 2
    assert not any(line.get_clip_on() for line in hollow)


# What the figures show


def test_distances_by_round_are_those_of_the_moves(runs: dict[str, RunData]) -> None:
    """Round 1: 10 weights by 0.1 and 30 by 0.3, 10 of them from zero. Mean (10 * 0.1 + 20 * 0.3) / 30."""
    moves = (
        (1, Move(0.25, 10, 0.1, 0.4, 0)),
        (1, Move(0.5, 30, 0.3, 0.9, 10)),
        (2, Move(-0.5, 4, 0.01, 0.02, 0)),
    )
    figure = training.distances(replace(runs["paper"], history=History(moves=moves)))
    assert rows(figure) == (("1", "2", "40", "0.233", "0.9"), ("2", "1", "4", "0.01", "0.02"))
    assert figure is not None
    assert "the largest is 0.9, to the value 0.5 in round 1" in figure.alt


def test_an_outline_holds_every_weight_and_gathers_what_is_too_small() -> None:
    histogram = Histogram(-20 * BINS_PER_OCTAVE, (4, *(0,) * (10 * BINS_PER_OCTAVE - 1), 6))
    x, y = sigma._outline(histogram, -16)
    assert sum(y) == pytest.approx(100)
    assert [(round(a * 8 - 0.5), b) for a, b in zip(x, y, strict=True) if b] == [(-128, 40.0), (-80, 60.0)]
    assert y[0] == y[-1] == 0


def test_a_constant_sigma_is_a_sentence(runs: dict[str, RunData]) -> None:
    spike, wide = Histogram(-64, (5,)), Histogram(-64, (5, 1))
    assert f"{2 ** (-63.5 / 8):.2g} throughout" in (
        sigma.constant(History(sigmas=((0, spike), (1, spike)))) or ""
    )
    later = sigma.constant(History(sigmas=((0, spike), (1, Histogram(-56, (3,))))))
    assert "0.0041 at the start and 0.0082" in (later or "")
    assert sigma.constant(History(sigmas=((0, spike), (1, wide)))) is None
    assert sigma.constant(History()) is None
    assert [sigma.constant(found.history) is not None for found in runs.values()] == [False, True, False]


def test_without_a_trace_the_last_codebook_is_that_of_the_file(runs: dict[str, RunData]) -> None:
    figure, untraced = (
        training.schedule(found) for found in (runs["paper"], replace(runs["paper"], history=History()))
    )
    assert figure is not None
    assert untraced is not None
    assert untraced.alt == figure.alt


def test_runs_that_no_other_beats_are_named(runs: dict[str, RunData]) -> None:
    def of(metric: float | None, size: int) -> RunData:
        made = replace(runs["paper"], after=metric, states=())
        vars(made)["file"] = replace(runs["paper"].file, file_bytes=size)
        return made

    figure = accuracy.against_size([of(0.9, 100), of(0.8, 50), of(0.7, 60)], ["a", "b", "c"])
    assert figure is not None
    assert "a, 90.00% at 100 bytes; b, 80.00% at 50 bytes; before compression" in figure.alt
    assert accuracy.against_size([of(None, 100)], ["a"]) is None


def test_the_rivals_are_the_other_rows_of_the_table_that_the_run_is_of(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "digits_resnet" / "ours" / "seed0"
    shutil.copytree(folders["paper"], folder, ignore=shutil.ignore_patterns("checkpoints", "states"))
    digest = hashlib.sha256((folder / "model.pwfn").read_bytes()).hexdigest()
    results = tmp_path / "results"
    results.mkdir()

    def add(label: str, top1: Any, size: int, **more: str) -> None:
        result = {"model": "digits_resnet", "label": label, "top1": top1, "file_bytes": size, **more}
        (results / f"{len(list(results.iterdir()))}.json").write_text(json.dumps(result))

    add("LSQ", 0.75, 3000)
    add("LSQ", 0.5, 2000)
    assert read_run(folder).rivals == ()  # a table that this run is not of
    add("ours", 0.875, 1000, file_sha256=digest)
    add("ours", 0.625, 1000)  # another seed
    add("elsewhere", 0.25, 1000, model="cifar_resnet20")
    add("baseline", 0.9, 9000, method="baseline")
    add("not measured", None, 1000)
    (results / "notes.json").write_text("not of JSON")
    data = read_run(folder)
    assert data.rivals == (("LSQ", 0.625, 3000),)
    figure = accuracy.against_size([data], ["ours"])
    assert figure is not None
    assert "LSQ 62.50% at 3.0 kB" in figure.alt
    assert rows(figure) == (("LSQ", "62.50%", "3,000"),)
    assert "LSQ" in style.svg(figure)


def test_one_sigma_for_all_weights_is_not_drawn_against_mu(runs: dict[str, RunData]) -> None:
    start, end = Sample("a.weight", (0.1, 0.2), (0.5, 0.5)), Sample("a.weight", (0.0, 0.25), (0.5, 0.5))
    assert sigma.mu_and_sigma(replace(runs["paper"], history=History(samples=((start, end),)))) is None
    varied = Sample("a.weight", (0.0, 0.25), (0.0, 0.125))
    figure = sigma.mu_and_sigma(replace(runs["paper"], history=History(samples=((start, varied),))))
    assert figure is not None
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet()
    figure.draw(sheet)
    low, high = sheet.axes[0].get_ylim()
    assert -4.5 < low < -3  # a little below 2^-3, where zero is drawn
    assert -1 <= high < 0


def test_the_layer_that_takes_most_bits_is_named(runs: dict[str, RunData]) -> None:
    layout, values = runs["paper"].compressed.layout, runs["paper"].compressed.values()
    bits = {entry.name: entry.size * entropy_bits(values[entry.span]) for entry in layout.entries}
    most = max(bits, key=lambda name: bits[name])
    assert (
        f"{most} takes the most bits, {bits[most] / sum(bits.values()):.0%}"
        in layers.by_bits(runs["paper"]).alt
    )


def test_queries_keys_and_values_by_layer(runs: dict[str, RunData]) -> None:
    """Three blocks whose queries have two values, keys four and values eight: log2 of that many bits."""
    model = VisionTransformer(depth=3, width=32, heads=2)
    layout = Layout.of(model)
    values = torch.round(layout.gather(model) * 64) / 64
    for entry in layout.entries:
        if entry.attention is not None and entry.kind == "weight":
            blocks = values[entry.span].view(entry.shape).tensor_split(3)
            for block, count in zip(blocks, (2, 4, 8), strict=True):
                block.copy_(torch.arange(block.shape[0])[:, None] % count / 8)
    compressed = Compressed.of(layout, values, None, untouched(model, layout))
    figure = layers.channels(replace(runs["paper"], compressed=compressed))
    assert rows(figure) == tuple((str(n), "1.00", "2.00", "3.00", "2.00", "4.00", "8.00") for n in (1, 2, 3))
    assert figure is not None
    assert figure.key == "attention"


def test_channels_of_a_network_without_attention(runs: dict[str, RunData]) -> None:
    layout, values = runs["paper"].compressed.layout, runs["paper"].compressed.values()
    last = layout.entry("linear.weight")
    columns = values[last.span].view(last.shape).unbind(1)
    mean = sum(entropy_bits(column) for column in columns) / len(columns)
    assert rows(layers.channels(runs["paper"]))[-1][:2] == ("linear.weight", f"{mean:.2f}")


def test_a_network_of_one_layer_is_drawn(runs: dict[str, RunData], tmp_path: Path) -> None:
    compressed = Compressed.of(Layout.of(nn.Linear(4, 2, bias=False)), torch.full((8,), 0.5), None, {})
    compressed.save(tmp_path / "model.pwfn")
    one = replace(runs["paper"], compressed=compressed, history=History(), folder=tmp_path)
    found = {figure.key: style.svg(figure) for figure in figures([one])}
    assert {"channels", "layers-by-bits"} <= set(found)


def test_a_reliability_diagram_is_drawn_for_any_bins() -> None:
    bins = [
        {"examples": 1, "confidence": 0.5, "accuracy": 0.0},
        {"examples": 3, "confidence": 1.0, "accuracy": 0.5},
    ]
    figure = accuracy.reliability({"<b>": [], "c": bins}, "k")
    assert figure is not None
    assert "c 0.5000" in figure.alt
    ElementTree.fromstring(style.svg(figure))
    assert accuracy.reliability({}, "k") is None


# Pictures, and matplotlib


def test_pictures_of_all_figures(runs: dict[str, RunData], tmp_path: Path) -> None:
    from PIL import Image

    written = save_png([runs["wfn"]], tmp_path / "png")
    assert [path.stem for path in written] == [figure.key for figure in figures([runs["wfn"]])]
    for path in written:
        with Image.open(path) as image:
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
            colors = image.convert("RGB").getcolors(maxcolors=2**24)
        assert colors is not None
        assert len(colors) > 20
        if path.stem == "distances":  # its dots are there
            assert any(red > 180 and blue < 140 for _, (red, _, blue) in colors)  # type: ignore[misc]  # RGB


def test_without_matplotlib_the_message_says_what_to_install(
    runs: dict[str, RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PwfnError, match=r"matplotlib: pip install 'pwfn\[report\]'"):
        style.svg(layers.by_bits(runs["paper"]))


def test_importing_the_figures_does_not_import_matplotlib() -> None:
    program = "import pwfn.report.page, sys; print('matplotlib' in sys.modules, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_drawing_does_not_change_the_settings_of_matplotlib(runs: dict[str, RunData]) -> None:
    import matplotlib as mpl

    figure = layers.by_bits(runs["paper"])
    before, plain = dict(mpl.rcParams), style.svg(figure)
    with mpl.rc_context({"axes.facecolor": "red", "font.size": 40}):
        assert style.svg(figure) == plain
        assert mpl.rcParams["axes.facecolor"] == "red"
    assert dict(mpl.rcParams) == before
