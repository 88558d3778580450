"""Every network of the paper by name, from the command line alone: compressed, then scored from its file.

``python tests/test_networks.py`` does all six and says how many seconds each took; the tests do the smallest.
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
import torch
from safetensors.torch import load_file

from pwfn import cli, load
from pwfn.evaluate.entropy import per_attention_part
from pwfn.report.figures import figures
from pwfn.report.reading import read_run

PAPER = (
    "resnet18",
    "resnet34",
    "resnet50",
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "densenet161",
)
DEIT_TINY = 5_717_416 - 197 * 192 - 192 - 25 * 2 * 192
"""Its parameters as published, less the embedding of 197 positions, the class token and 25 LayerNorms."""

RESNET20 = 9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
"""Nineteen 3×3 convolutions."""

TINY = (
    *("--set", "schedule.fractions=[0.5, 1.0]", "--set", "training.steps_per_epoch=1"),
    *("--set", "schedule.warmup_epochs=1", "--set", "schedule.epochs_per_round=1"),
    *("--set", "finish.polish_epochs=0"),
)


def call(*arguments: str) -> dict[str, Any]:
    """The command in this process, and the JSON that it prints."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, ["pwfn", *arguments, "--json"]
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    assert not ended.value.code
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


def test_a_network_of_the_paper_by_name(tmp_path: Path) -> None:
    path, record, again = compressed_and_scored("deit_tiny_patch16_224", tmp_path)
    assert again["after"] == record["after"]
    assert again["after"]["examples"] == 8
    assert again["file_bytes"] == path.stat().st_size < record["fp32_bytes"] / 4
    assert [done["fraction"] for done in record["rounds"]] == [0.5, 1.0]
    assert [done["steps"] for done in record["rounds"]] == [1, 1]
    assert load(path).layout.size == record["weights"] == DEIT_TINY
    assert record["unique"] == load(path).values().unique().numel()
    # Its report has a box for the input channels of q, k and v of each of the twelve blocks.
    found = {figure.key: figure for figure in figures([read_run(path.parent)])}
    header, rows = found["attention"].table or ((), ())
    assert [row[0] for row in rows] == [str(block) for block in range(1, 13)]
    assert [name for name in header if name.startswith("unique")] == ["unique, q", "unique, k", "unique, v"]
    values, layout = load(path).values(), load(path).layout
    last = per_attention_part(layout, values, "blocks.11.attn.qkv.weight")["v"]
    assert float(rows[-1][-1]) == pytest.approx(sum(pool.unique for pool in last) / len(last), abs=0.05)


# Numbers of classes


def npz(path: Path, classes: int) -> str:
    numbers = np.random.default_rng(0)
    pixels = numbers.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(24) % classes
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[:12], y_test=labels[:12])
    return f"npz:{path}"


def test_a_file_knows_how_many_classes_it_has(tmp_path: Path) -> None:
    data, out = npz(tmp_path / "three.npz", 3), tmp_path / "run"
    call(
        *(
            "compress",
            "--model",
            "cifar_resnet20",
            "--weights",
            "random",
            "--classes",
            "3",
            "--device",
            "cpu",
        ),
        *("--data", data, "--out", str(out), "--batch-size", "12", *TINY),
    )
    record = json.loads((out / "record.json").read_text())
    assert record["weights"] == RESNET20 + 3 * 65
    again = call("evaluate", str(out / "model.pwfn"), "--data", data, "--device", "cpu")
    assert again["after"] == record["after"]
    assert again["after"]["examples"] == 12


def test_weights_of_another_number_of_classes_load_without_a_word(tmp_path: Path) -> None:
    """What train writes says how many classes there are; for other files --classes says it."""
    data, weights = npz(tmp_path / "four.npz", 4), tmp_path / "w.safetensors"
    trained = call(
        *("train", "--model", "cifar_resnet20", "--data", data, "--out", str(weights), "--device", "cpu"),
        *("--epochs", "1", "--batch-size", "12"),
    )
    assert weights.exists()
    usual = ("--model", "cifar_resnet20", "--data", data, "--device", "cpu", "--batch-size", "12", *TINY)
    first = call("compress", *usual, "--weights", str(weights), "--out", str(tmp_path / "first"))
    assert first["before"]["metric"] == pytest.approx(trained["top1"] / 100)
    torch.save(load_file(weights), tmp_path / "w.pt")
    bare = ("--weights", str(tmp_path / "w.pt"))
    second = call("compress", *usual, *bare, "--classes", "4", "--out", str(tmp_path / "second"))
    for name in ("before", "after", "unique", "entropy_bits"):
        assert first[name] == second[name]


def main() -> None:
    for name in sys.argv[1:] or PAPER:
        with tempfile.TemporaryDirectory() as folder:
            began, worked = time.monotonic(), time.process_time()
            _, record, again = compressed_and_scored(name, Path(folder))
            seconds, worked = time.monotonic() - began, time.process_time() - worked
            same = "as" if again["after"] == record["after"] else "NOT as"
            print(
                f"{name:<24} {seconds:6.1f} s ({worked:6.1f} of one core), {record['weights']:>11,} weights "
                f"of {record['unique']:>4} values, {record['file_bytes']:>11,} bytes; scored {same} recorded",
                flush=True,
            )


if __name__ == "__main__":
    main()
