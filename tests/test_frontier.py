"""Accuracy against bits: what of the tables is drawn, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import frontier
import pytest
from PIL import Image

from pwfn.errors import FileError
from pwfn.report.figures import style

TARGETS = "".join(
    f'[[target]]\nname = "{name}"\nlabel = "{name}"\nwithin_points = 0.3\nbits = 2.0\n\n'
    for name in frontier.PANELS.values()
)


def _line(method: str, bits: float, top1: float, seeds: int = 3) -> dict[str, Any]:
    figures = {"entropy_bits": (bits, None), "top1": (top1, 0.001), "top1_start": (0.95, None)}
    return {
        "label": method,
        "method": method,
        "seeds": list(range(seeds)),
        "figures": {name: {"mean": mean, "spread": spread} for name, (mean, spread) in figures.items()},
    }


def _table(root: Path, name: str, model: str, *lines: dict[str, Any], holdout: int = 0) -> None:
    folder = root / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    content = {"holdout": holdout, "parts": [{"model": model, "lines": list(lines)}]}
    (folder / "table.json").write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    (tmp_path / "targets.toml").write_text(TARGETS)
    for model, name in frontier.PANELS.items():
        (tmp_path / "rows" / f"{name}.toml").touch()
        _table(tmp_path, name, model, _line("pwfn", 1.5, 0.949))
    return tmp_path


def test_lines_of_test_images_are_points(root: Path) -> None:
    (root / "rows" / "resnet20_quick.toml").touch()
    _table(root, "resnet20_quick", "cifar_resnet20", _line("pwfn", 2.0, 0.94))
    lines = [
        _line("baseline", 20.0, 0.95),
        _line("wfn", 3.0, 0.93),
        _line("lsq+", 9.0, 0.94),
        _line("pwfn", 3.5, 0.945),
    ]
    _table(root, "compare_resnet20", "cifar_resnet20", *lines, _line("kmeans", 0.0, 0.0, seeds=0))
    _table(root, "levers_resnet20", "cifar_resnet20", _line("pwfn", 1.0, 0.99), holdout=5000)
    found = [point for point in frontier.points(root) if point.model == "cifar_resnet20"]
    assert [(point.table, point.kind, point.bits) for point in found] == [
        ("compare_resnet20", "WFN", 3.0),
        ("compare_resnet20", frontier.QUANTISERS, 9.0),
        ("compare_resnet20", frontier.PWFN_ELSE, 3.5),
        ("resnet20", frontier.PWFN_ROWS, 1.5),
        ("resnet20_quick", frontier.PWFN_QUICK, 2.0),
    ]
    assert (found[0].top1, found[0].spread, found[0].start) == pytest.approx((93.0, 0.1, 95.0))


def test_what_lies_below_is_counted_and_another_network_is_not(root: Path, tmp_path: Path) -> None:
    _table(root, "sigma", "cifar_resnet18", _line("pwfn", 1.0, 0.1), _line("pwfn", 1.0, 0.94))
    _table(root, "resnet56", "cifar_resnet56", _line("pwfn", 1.0, 0.1))
    said = frontier.caption(root)
    assert (
        "; 5 lines of the tables of test images, of which 1 lie more than 2.5 points below the start" in said
    )
    assert "](frontier.png)\n\nTo the left is smaller" in said
    style.png(frontier.drawing(root), tmp_path / "a.png", 40)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_without_results_is_named_and_the_page_says_so(root: Path) -> None:
    (root / "results" / "vit_tiny" / "table.json").unlink()
    with pytest.raises(
        FileError, match=r"vit_tiny: has no results: python experiments/results.py run vit_tiny"
    ):
        frontier.drawing(root)
    assert frontier.caption(root) == "Not measured yet."


def test_the_picture_in_the_docs_is_of_the_results_that_are_there() -> None:
    with Image.open(frontier.ROOT / frontier.PICTURE) as picture:
        assert picture.info["Description"] == frontier.fingerprint(frontier.ROOT / "experiments")


def test_another_result_is_another_picture(root: Path) -> None:
    before = frontier.fingerprint(root)
    assert frontier.fingerprint(root) == before
    _table(root, "resnet20", "cifar_resnet20", _line("pwfn", 1.5, 0.9491))
    assert frontier.fingerprint(root) != before
