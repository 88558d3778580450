"""Networks by name, from the command line alone: compressed, then scored from the file.

``python tests/test_networks.py`` does every network of the paper; the test does the smallest.
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

import pytest
import torch
from cases import image_folder, npz_file
from safetensors.torch import load_file

from pwfn import cli, load

PAPER = (
    *("resnet18", "resnet34", "resnet50", "densenet161"),
    *("deit_tiny_patch16_224", "deit_small_patch16_224"),
)
RESNET20 = 9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
"""Nineteen 3×3 convolutions."""

TINY = (
    *("--set", "schedule.fractions=[0.5, 1.0]", "--set", "training.steps_per_epoch=1"),
    *("--set", "schedule.epochs_per_round=[1, 1]"),
    *("--set", "finish.polish_epochs=0", "--set", "posterior.init=powers", "--device", "cpu"),
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


def compressed_and_scored(name: str, folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The file, its record, and what evaluate says of it."""
    usual = ("--data", image_folder(folder / "images"), "--batch-size", "4", "--workers", "0")
    out = folder / name
    call("compress", "--model", name, "--weights", "random", "--out", str(out), *usual, *TINY)
    record: dict[str, Any] = json.loads((out / "record.json").read_text())
    return out / "model.pwfn", record, call("evaluate", str(out / "model.pwfn"), *usual, "--device", "cpu")


def test_a_network_of_timm_by_name(tmp_path: Path) -> None:
    """A small one; test_imagenet takes one of the paper's networks through the whole command."""
    path, record, again = compressed_and_scored("test_vit", tmp_path)
    assert again["after"] == record["after"]
    assert again["after"]["examples"] == 4
    assert again["file_bytes"] == path.stat().st_size < record["fp32_bytes"] / 4
    assert [(done["fraction"], done["steps"]) for done in record["rounds"]] == [(0.5, 1), (1.0, 1)]
    assert load(path).layout.size == record["weights"]
    assert record["unique"] == load(path).values().unique().numel()


def test_weights_and_files_know_how_many_classes_they_have(tmp_path: Path) -> None:
    """The weights that train writes say the number of classes; for other files --classes does."""
    data, weights = npz_file(tmp_path / "four.npz", labels=4, count=12), tmp_path / "w.safetensors"
    usual = ("--model", "cifar_resnet20", "--data", data, "--batch-size", "12")
    trained = call("train", *usual, "--out", str(weights), "--device", "cpu", "--epochs", "1")
    first = call("compress", *usual, *TINY, "--weights", str(weights), "--out", str(tmp_path / "first"))
    assert first["before"]["metric"] == pytest.approx(trained["top1"] / 100)
    assert first["weights"] == RESNET20 + 4 * 65
    torch.save(load_file(weights), tmp_path / "w.pt")
    bare = ("--weights", str(tmp_path / "w.pt"), "--classes", "4", "--out", str(tmp_path / "second"))
    second = call("compress", *usual, *TINY, *bare)
    assert all(first[name] == second[name] for name in ("before", "after", "unique", "entropy_bits"))
    again = call("evaluate", str(tmp_path / "second" / "model.pwfn"), "--data", data, "--device", "cpu")
    assert again["after"] == second["after"]
    assert again["after"]["examples"] == 12


def main() -> None:
    for name in sys.argv[1:] or PAPER:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            _, record, again = compressed_and_scored(name, Path(folder))
            same = "as" if again["after"] == record["after"] else "NOT as"
            seconds, count = time.monotonic() - began, record["weights"]
            print(f"{name}: {seconds:.1f} s, {count:,} weights, scored {same} recorded", flush=True)


if __name__ == "__main__":
    main()
