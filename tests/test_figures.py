"""The figures of runs: what they tell is in the data, and the SVG is fit for any page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import KEPT, QUICK, options
from torch import nn

from pwfn import Compressed, Config, FileError, Layout, PwfnError, load
from pwfn.evaluate.entropy import entropy_bits, per_attention_part
from pwfn.evaluate.trace import BINS_PER_OCTAVE, Histogram, Moment, Trace
from pwfn.fixing.fix_round import Move
from pwfn.layout import untouched
from pwfn.report.figures import (
    STYLE,
    Figure,
    canvas,
    course,
    distances,
    drawings,
    figures,
    layers,
    save_png,
    sigmas,
    sizes,
)
from pwfn.report.reading import RunData, names, read_run
from pwfn.run.folder import run
from pwfn.zoo.models import VisionTransformer

SVG = "{http://www.w3.org/2000/svg}"
PAPER_SIGMA: dict[str, Any] = {
    "posterior.init": "powers",
    "posterior.learn_sigma": True,
    "posterior.noise_on_fixed": True,
    "clustering.b": 7,
}
"""Sigma as the paper has it, of which there is most to draw."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with the paper's sigmas, one of them with states, and one of another method."""
    place = tmp_path_factory.mktemp("runs")
    quick = QUICK.override({**PAPER_SIGMA, "posterior.alpha": 0.0})
    wfn = Config.preset("recommended", "wfn").override(
        {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 0.1, "finish.polish_epochs": 0.1}
    )
    for name, config in (("kept", KEPT.override(PAPER_SIGMA)), ("alpha0", quick), ("wfn", wfn)):
        run(options(place / name, checkpoint_minutes=60), config)
    return [place / name for name in ("kept", "alpha0", "wfn")]


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> list[RunData]:
    return [read_run(folder) for folder in folders]


@pytest.fixture(scope="module")
def drawn(runs: list[RunData]) -> list[Figure]:
    return figures(runs)


@pytest.fixture
def copy(folders: list[Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[1], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")))


# Reading


def test_a_run_is_read_whole(folders: list[Path], runs: list[RunData]) -> None:
    first = runs[0]
    assert (first.name, first.folder) == ("kept", folders[0])
    assert [done["fraction"] for done in first.rounds] == [0.5, 0.9, 1.0]
    assert [line["stage"] for line in first.epochs][-1] == "polish"
    assert first.settings == KEPT.override(PAPER_SIGMA).to_dict()
    assert torch.equal(first.compressed.values(), load(folders[0] / "model.pwfn").values())
    assert [seen.moment for seen in first.observed][:2] == [Moment.START, Moment.BEFORE]
    assert first.record["file_bytes"] == first.file.stat().st_size


def test_a_run_of_an_earlier_version_has_no_observations(copy: Path) -> None:
    (copy / "observed.jsonl").unlink()
    found = read_run(copy)
    assert found.observed == ()
    keys = [figure.key for figure in figures([found])]
    assert keys == ["course", "schedule", "starting-sigma", "channels", "map", "bytes"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("record.json", None, r"has not ended: go on with it by --resume \(record.json is not there\)"),
        ("record.json", "{", r"record\.json: it is not JSON: the file is damaged"),
        ("record.json", "[]", r"record\.json: it is not a JSON object"),
        ("record.json", "{}", r"record\.json: names no settings: it is not the record of a run"),
        ("record.json", b"\xff\xff", r"record\.json: is not text"),
        ("log.jsonl", None, r"log\.jsonl: cannot be read: No such file"),
        ("log.jsonl", '{"event": "start"}\n{"event": "ro', r"log\.jsonl: line 2 is not JSON"),
        ("model.pwfn", None, r"model\.pwfn"),
        ("model.pwfn", b"torn", r"model\.pwfn"),
        (
            "observed.jsonl",
            '{"moment": "noon", "round": 0}',
            r"observed\.jsonl: line 1 is not what a run writes",
        ),
        ("observed.jsonl", "5", r"observed\.jsonl: line 1 is not a JSON object"),
    ],
)
def test_what_is_missing_or_damaged_is_named_in_one_sentence(
    name: str, content: str | bytes | None, message: str, copy: Path
) -> None:
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match=message) as caught:
        read_run(copy)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_none_and_one_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is not a folder: name one that pwfn compress has written"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileError, match="holds no run: name one that does"):
        read_run(tmp_path)


def test_names_tell_runs_apart(runs: list[RunData]) -> None:
    def named(*paths: str) -> list[str]:
        return names([replace(runs[0], folder=Path(path), name=Path(path).name) for path in paths])

    assert named("a/one", "a/two") == ["one", "two"]
    assert named("/t/lsq/seed0", "/t/wfn/seed0", "/t/wfn/seed1") == ["lsq/seed0", "wfn/seed0", "wfn/seed1"]
    assert named("/a/x/run", "/b/x/run") == ["a/x/run", "b/x/run"]
    assert named("/a/run", "/a/run") == ["run (1)", "run (2)"]
    assert names([]) == []


# The set of figures


def test_all_that_the_runs_allow_is_drawn(drawn: list[Figure]) -> None:
    shared = ["pareto", "course", "files", "sigmas"]
    gaussian = [
        *("schedule", "distances", "mu-sigma", "starting-sigma", "channels", "map", "bytes"),
    ]
    plain = ["schedule", "distances", "channels", "map", "bytes"]
    of_runs = [f"{key}-{n}" for n, keys in ((1, gaussian), (2, gaussian), (3, plain)) for key in keys]
    assert [figure.key for figure in drawn] == shared + of_runs


def test_one_run_alone_has_no_comparisons_and_no_numbers(runs: list[RunData]) -> None:
    keys = [drawing.key for drawing in drawings(runs[1:2])]
    assert keys == [
        *(
            "course",
            "sigmas",
            "schedule",
            "distances",
            "mu-sigma",
            "starting-sigma",
            "channels",
            "map",
            "bytes",
        )
    ]
    assert "pareto" in [drawing.key for drawing in drawings(runs[:1])]  # it has kept its states
    assert figures([]) == []


def test_how_to_read_is_one_sentence_and_the_text_alternative_has_numbers(drawn: list[Figure]) -> None:
    for figure in drawn:
        assert figure.how_to_read.endswith(".")
        assert not re.search(r"[.!?]\s", figure.how_to_read), figure.key
        assert figure.alt.endswith(".")
        assert re.search(r"\d", figure.alt) or figure.key.startswith("starting"), figure.key
        if figure.table is not None:
            header, rows = figure.table
            assert rows, figure.key
            assert {len(row) for row in rows} == {len(header)}, figure.key


# The SVG


def test_every_svg_is_sound_small_and_alone(drawn: list[Figure]) -> None:
    for figure in drawn:
        root = ElementTree.fromstring(figure.svg)
        assert root.tag == f"{SVG}svg"
        assert root.get("role") == "img"
        assert root.get("aria-label") == figure.alt
        assert root.get("viewBox")
        tags = {element.tag for element in root.iter()}
        assert f"{SVG}text" in tags  # letters are letters
        assert not tags & {
            f"{SVG}{name}" for name in ("script", "style", "image", "metadata", "foreignObject")
        }
        assert figure.svg.count("http") == 1  # the name space
        assert len(figure.svg) < 120_000, (figure.key, len(figure.svg))


def test_ids_are_unique_in_a_page_of_all_figures_and_every_reference_is_met(drawn: list[Figure]) -> None:
    seen: set[str] = set()
    for figure in drawn:
        ids = re.findall(r'\bid="([^"]*)"', figure.svg)
        assert len(set(ids)) == len(ids)
        assert all(each.startswith(f"{figure.key}-") for each in ids)
        assert not seen & set(ids)
        seen |= set(ids)
        targets = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', figure.svg)
        assert {a or b for a, b in targets} <= set(ids)
    assert len({figure.key for figure in drawn}) == len(drawn)


def test_colours_are_the_pages_to_choose(drawn: list[Figure]) -> None:
    for figure in drawn:
        assert "currentColor" in figure.svg
        bare = re.sub(r"var\(--figure-[1-6], #[0-9a-f]{6}\)", "", figure.svg)
        assert not re.findall(r"(?:fill|stroke): #[0-9a-f]{3,6}", bare), figure.key
    assert STYLE.count("--figure-1:") == 2  # light and dark


def contrast(one: str, other: str) -> float:
    """Of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(color: str) -> float:
        shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_from_their_page() -> None:
    light, dark = (re.findall(r"--figure-\d:(#[0-9a-f]{6})", part) for part in STYLE.split("@media"))
    assert len(light) == len(dark) == 6
    assert min(contrast(color, "#ffffff") for color in light) >= 3
    assert min(contrast(color, "#1b1f24") for color in dark) >= 5


def test_the_same_run_gives_the_same_bytes(runs: list[RunData], drawn: list[Figure]) -> None:
    again = {drawing.key: canvas.svg(drawing) for drawing in drawings(runs)[:6]}
    assert again == {figure.key: figure.svg for figure in drawn[:6]}


def test_a_name_may_hold_anything(runs: list[RunData]) -> None:
    wild = '</svg><script>alert("1")</script> & $x^2$ 重み \x1b[31m'
    found = figures([replace(runs[0], name=wild), replace(runs[1], observed=())])
    for figure in found:
        root = ElementTree.fromstring(figure.svg)  # which takes no control characters
        assert not root.findall(f".//{SVG}script")
    compared = next(figure for figure in found if figure.key == "files")
    shown = ["".join(text.itertext()) for text in ElementTree.fromstring(compared.svg).iter(f"{SVG}text")]
    assert '…1")</script> & $x^2$ 重み �[31m'[-20:] in " ".join(shown)
    assert compared.table is not None
    assert compared.table[1][0][0] == wild.replace("\x1b", "�")


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=2, max_size=80))
def test_dots_are_merged_and_none_is_lost(places: list[tuple[int, int]]) -> None:
    """Two panels with the same marks: each keeps its own."""

    def draw(sheet: Any) -> None:
        for panel in sheet.subplots(1, 2):
            canvas.dots(panel, [x for x, _ in places], [y for _, y in places], canvas.SERIES[0], alpha=0.5)
            panel.set(xlim=(-1, 61), ylim=(-1, 61))

    text = canvas.svg(canvas.Drawing("k", "", "", "", draw, 3.0))
    paths = [d.count("h0") for d in re.findall(r'd="([^"]*h0)"', text)]
    count = len(set(places))
    assert paths == [count, count]


# What the figures tell


def made(runs: list[RunData], **changes: Any) -> RunData:
    return replace(runs[1], **changes)


def test_distances_by_round_are_those_of_the_moves(runs: list[RunData]) -> None:
    """Round 1: 10 weights by 0.1 and 30 by 0.3, 10 of them from zero; round 2: one centre within 0.015."""
    observed = (
        Trace(Moment.AFTER, 1, 0.5, moves=(Move(0.25, 10, 0.1, 0.4, 0), Move(0.5, 30, 0.3, 0.9, 10))),
        Trace(Moment.AFTER, 2, 1.0, moves=(Move(-0.5, 4, 0.01, 0.02, 0), Move(0.0, 3, 0.0, 0.0, 3))),
    )
    drawing = distances.distances(made(runs, observed=observed))
    assert drawing is not None
    assert drawing.table is not None
    assert drawing.table[1] == (("1", "2", "40", "0.233", "0.9"), ("2", "1", "4", "0.01", "0.02"))
    assert "in 33% of them the mean is within WFN's threshold" in drawing.alt
    assert "the largest is 0.9, to the centre 0.5 in round 1" in drawing.alt
    assert "WFN's threshold, 0.015" in canvas.svg(drawing)


def test_quantiles_of_sigma_are_within_their_bin() -> None:
    histogram = Histogram(-8 * BINS_PER_OCTAVE, (1, 2, 6, 1))
    edges = histogram.edges()
    assert edges[2] < sigmas._quantile(histogram, 0.5) < edges[3]
    assert edges[0] < sigmas._quantile(histogram, 0.1) < edges[1]
    assert edges[3] < sigmas._quantile(histogram, 0.95) < edges[4]


def test_an_outline_holds_every_weight_and_gathers_what_is_too_small() -> None:
    histogram = Histogram(-20 * BINS_PER_OCTAVE, (4, *(0,) * (10 * BINS_PER_OCTAVE - 1), 6))
    x, y = sigmas._outline(histogram, -16)
    assert sum(y) == pytest.approx(100)
    assert [(round(a * 8 - 0.5), b) for a, b in zip(x, y, strict=True) if b] == [(-128, 40.0), (-80, 60.0)]
    assert y[0] == y[-1] == 0


def test_sigmas_of_several_runs_stand_under_their_alpha(drawn: list[Figure]) -> None:
    figure = next(figure for figure in drawn if figure.key == "sigmas")
    assert "alpha = 2⁻¹¹" in figure.svg
    assert "alpha = 0" in figure.svg
    assert figure.table is not None
    assert {row[0] for row in figure.table[1]} == {"kept", "alpha0"}  # the other has none


def test_weights_per_centre_are_the_codebooks(runs: list[RunData]) -> None:
    seen = course._weights_per_centre(runs[0])
    assert [number for number, _ in seen] == [1, 2, 3]
    values = runs[0].compressed.values()
    assert seen[-1][1] == sorted(torch.unique(values, return_counts=True)[1].tolist(), reverse=True)
    unseen = course._weights_per_centre(replace(runs[0], observed=()))
    assert unseen == seen[-1:]


def test_the_parts_of_a_file_add_up(runs: list[RunData], drawn: list[Figure]) -> None:
    _, rows = next(figure.table for figure in drawn if figure.key == "bytes-1")  # type: ignore[misc]  # it has one
    sizes_of_parts = [int(row[1].replace(",", "")) for row in rows]
    assert sum(sizes_of_parts[:-1]) == sizes_of_parts[-1] == runs[0].file.stat().st_size


def test_the_best_runs_are_filled(runs: list[RunData]) -> None:
    def of(metric: float, size: int) -> RunData:
        record = {**runs[0].record, "after": {"metric": metric}, "file_bytes": size, "states": []}
        return replace(runs[0], record=record)

    drawing = sizes.trade([of(0.9, 100), of(0.8, 50), of(0.7, 60)], ["a", "b", "c"])
    assert drawing is not None
    assert drawing.table is not None
    assert [row[-1] for row in drawing.table[1]] == ["yes", "yes", "no"]
    assert sizes.trade([of(0.9, 100)], ["a"]) is None
    assert drawing.alt == (
        "Of 3 runs those that no other beats in both accuracy and size: a, 90.00% at 100 bytes; "
        "b, 80.00% at 50 bytes."
    )


def test_layers_by_bits(runs: list[RunData]) -> None:
    drawing = layers.layer_map(runs[0])
    assert drawing is not None
    assert drawing.table is not None
    layout, values = runs[0].compressed.layout, runs[0].compressed.values()
    for entry, row in zip(layout.entries, drawing.table[1], strict=True):
        bits = entropy_bits(values[entry.span])
        assert row[:3] == (entry.name, f"{entry.size:,}", f"{bits:.2f}")
    shares = [float(row[-1].rstrip("%")) for row in drawing.table[1]]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


@pytest.fixture(scope="module")
def transformer(runs: list[RunData]) -> RunData:
    """Three blocks whose queries have two values, keys four, and values eight."""
    torch.manual_seed(0)
    model = VisionTransformer(depth=3, width=32, heads=2)
    layout = Layout.of(model)
    values = torch.round(layout.gather(model) * 64) / 64
    for entry in layout.entries:
        if entry.attention is not None and entry.kind == "weight":
            blocks = values[entry.span].view(entry.shape).tensor_split(3)
            for block, count in zip(blocks, (2, 4, 8), strict=True):
                block.copy_(torch.arange(block.shape[0])[:, None] % count / 8)
    return replace(
        runs[1], compressed=Compressed.of(layout, values, None, untouched(model, layout)), observed=()
    )


def test_queries_keys_and_values_by_layer(transformer: RunData) -> None:
    drawing = layers.attention(transformer)
    assert drawing is not None
    assert drawing.table is not None
    assert drawing.table[1] == tuple(
        (str(n), "1.00", "2.00", "3.00", "2.0", "4.0", "8.0") for n in (1, 2, 3)
    )  # so many values, all as often, take log2 of that many bits
    layout, values = transformer.compressed.layout, transformer.compressed.values()
    name = next(entry.name for entry in layout.entries if entry.attention is not None)
    assert [pool.unique for pool in per_attention_part(layout, values, name)["k"]] == [4] * 32
    keys = [figure.key for figure in figures([transformer])]
    assert "attention" in keys
    assert "channels" not in keys


def test_layers_of_a_network_without_attention(runs: list[RunData]) -> None:
    assert layers.attention(runs[0]) is None
    drawing = layers.channels(runs[0])
    assert drawing is not None
    assert drawing.table is not None
    layout, values = runs[0].compressed.layout, runs[0].compressed.values()
    last = layout.entry("linear.weight")
    columns = values[last.span].view(last.shape).unbind(1)
    mean = sum(entropy_bits(column) for column in columns) / len(columns)
    assert drawing.table[1][-1][:3] == ("linear.weight", str(len(columns)), f"{mean:.2f}")


def test_the_starting_sigma_is_drawn_for_the_prior_alone(runs: list[RunData]) -> None:
    assert sigmas.starting_sigma(runs[0]) is not None
    constant = Config().override({"posterior.init": "constant"}).to_dict()
    assert sigmas.starting_sigma(made(runs, settings=constant)) is None
    assert sigmas.starting_sigma(runs[2]) is None


def test_where_sigma_does_not_learn_no_alpha_and_no_cap_are_shown(runs: list[RunData]) -> None:
    still = made(runs, settings=Config().to_dict())
    drawing = sigmas.collapse([still], ["still"])
    assert drawing is not None
    assert drawing.table is not None
    assert {row[1] for row in drawing.table[1]} == {"sigma does not learn"}
    assert "alpha =" not in drawing.alt
    learns = sigmas.collapse([runs[0]], ["learns"])
    assert learns is not None
    assert learns.alt.startswith("alpha = ")


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_torchs(values: list[float], share: float) -> None:
    expected = float(torch.quantile(torch.tensor(values, dtype=torch.float64), share))
    assert math.isclose(canvas.quantile(values, share), expected, rel_tol=1e-9, abs_tol=1e-9)


# Pictures, and without matplotlib


def test_pictures_of_all_figures(runs: list[RunData], tmp_path: Path) -> None:
    from PIL import Image

    written = save_png(runs[:1], tmp_path / "png")
    assert [path.stem for path in written] == [drawing.key for drawing in drawings(runs[:1])]
    for path in written:
        with Image.open(path) as image:
            assert image.width == 1152
            colors = image.convert("RGB").getcolors(maxcolors=2**24)
            assert colors is not None
            assert len(colors) > 20
            assert max(colors)[1] == (255, 255, 255)


def test_without_matplotlib_the_message_says_what_to_install(
    runs: list[RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PwfnError, match=r"the figures need matplotlib: pip install 'pwfn\[report\]'"):
        figures(runs[:1])


def test_importing_the_figures_does_not_import_matplotlib() -> None:
    program = "import pwfn.report.figures, sys; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_drawing_leaves_the_settings_of_matplotlib_alone(runs: list[RunData]) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with mpl.rc_context({"axes.facecolor": "red", "font.size": 40}):
        figures(runs[1:2])
        assert mpl.rcParams["axes.facecolor"] == "red"
    assert dict(mpl.rcParams) == before


def test_a_figure_can_be_kept_as_json(drawn: list[Figure]) -> None:
    for figure in drawn:
        assert json.loads(json.dumps(figure.table)) == (
            None if figure.table is None else [list(figure.table[0]), [list(row) for row in figure.table[1]]]
        )


def test_a_network_of_one_layer_is_drawn_too(runs: list[RunData], tmp_path: Path) -> None:
    model = nn.Linear(4, 2, bias=False)
    layout = Layout.of(model)
    compressed = Compressed.of(layout, torch.full((8,), 0.5), None, {})
    compressed.save(tmp_path / "model.pwfn")
    one = made(runs, compressed=compressed, observed=(), folder=tmp_path)
    assert {"channels", "map", "bytes"} <= {figure.key for figure in figures([one])}
