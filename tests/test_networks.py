"""Every network of the paper by name, from the command line alone: compressed, then scored from its file.

``python tests/test_networks.py`` does all six and says how many seconds each took; the tests do one or two.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pwfn import cli, load

PAPER = (
    "resnet18",
    "resnet34",
    "resnet50",
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "densenet161",
)
WEIGHTS = {"resnet18": 11_689_512 - 9_600, "deit_tiny_patch16_224": 5_717_416}
"""timm's counts of parameters; BatchNorm's 9,600 in ResNet-18 are not compressed."""

TINY = (
    *("--set", "schedule.fractions=[0.5, 1.0]", "--set", "training.steps_per_epoch=1"),
    *("--set", "schedule.warmup_epochs=1", "--set", "schedule.epochs_per_round=1"),
    *("--set", "finish.polish_epochs=1"),
)


def call(*arguments: str) -> dict[str, Any]:
    """The command in this process, and the JSON that it prints."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, ["pwfn", *arguments, "--json"]
    try:
        with contextlib.redirect_stdout(printed):
            cli.main()
    except SystemExit as ended:
        assert not ended.code, ended.code
    finally:
        sys.argv = before
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def images(folder: Path) -> str:
    """16 images of two classes, left or right half bright, of as many sizes; half of them to test on."""
    from PIL import Image

    numbers = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(8):
            height, width = numbers.integers(40, 90, 2)
            pixels = numbers.integers(0, 100, (height, width, 3), dtype=np.uint8)
            half = slice(0, width // 2) if number % 2 else slice(width // 2, width)
            pixels[:, half] += 150
            path = folder / split / ("left" if number % 2 else "right") / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return f"imagefolder:{folder}"


def compressed_and_scored(name: str, folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The file, its record, and what evaluate says of it."""
    data, out = images(folder / "images"), folder / name
    usual = ("--data", data, "--batch-size", "8", "--workers", "0", "--device", "cpu")
    call("compress", "--model", name, "--weights", "random", "--out", str(out), *usual, *TINY)
    record: dict[str, Any] = json.loads((out / "record.json").read_text())
    return out / "model.pwfn", record, call("evaluate", str(out / "model.pwfn"), *usual)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_network_of_the_paper_by_name(name: str, tmp_path: Path) -> None:
    path, record, again = compressed_and_scored(name, tmp_path)
    assert again["after"] == record["after"]
    assert again["after"]["examples"] == 8
    assert again["file_bytes"] == path.stat().st_size < record["fp32_bytes"] / 4
    assert [done["fraction"] for done in record["rounds"]] == [0.5, 1.0]
    assert [done["steps"] for done in record["rounds"]] == [1, 1]
    assert load(path).layout.size == record["weights"] == WEIGHTS[name]
    assert record["unique"] == load(path).values().unique().numel()


def main() -> None:
    for name in sys.argv[1:] or PAPER:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            _, record, again = compressed_and_scored(name, Path(folder))
            same = "as" if again["after"] == record["after"] else "NOT as"
            print(
                f"{name:<24} {time.monotonic() - began:6.1f} s, {record['weights']:>11,} weights of "
                f"{record['unique']:>4} values, {record['file_bytes']:>11,} bytes; evaluate says {same} the record",
                flush=True,
            )


if __name__ == "__main__":
    main()
