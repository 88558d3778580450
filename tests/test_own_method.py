"""The method of one's own in docs/methods.md: short, and it runs as the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pwfn import load
from pwfn.lab import compare
from pwfn.lab.baselines import find
from pwfn.zoo.models import digits_resnet

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods.md"


@pytest.fixture
def method(tmp_path: Path) -> str:
    """The example of the page, as a file, and its name."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 40
    (tmp_path / "rounding.py").write_text(code)
    return f"python:{tmp_path / 'rounding.py'}:Rounding"


def test_the_example_compresses_a_network_and_resumes(method: str, tmp_path: Path, call: Any) -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    (words,) = re.findall(r"^pwfn (compress .*python:rounding.*)$", page, re.MULTILINE)
    out = tmp_path / "run"
    words = words.replace("python:rounding.py:Rounding", method).replace("--out run", f"--out {out}")
    short = "--set training.steps_per_epoch=4 --set finish.polish_epochs=0 --device cpu --json"
    arguments = [*words.split(), *short.split()]
    status, said, err = call(*arguments)
    assert (status, err) == (0, "")
    compressed = load(out / "model.pwfn")
    values = compressed.codebook
    assert json.loads(said)["unique"] == values.numel() < 100
    # Every value is a multiple of one step: half a standard deviation of the weights at the start.
    step = values[values > 0].min()
    torch.testing.assert_close(values / step, (values / step).round(), rtol=0, atol=1e-4)
    assert compressed.apply_to(digits_resnet()) is not None
    assert call(*arguments, "--resume")[0] == 0


def test_the_example_is_a_row_of_a_table(method: str, tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (row,) = re.findall(r"```toml\n(\[\[row\]\].*?)```", page, re.DOTALL)
    text = (
        'data = "digits"\n[settings]\n"training.steps_per_epoch" = 2\n"finish.polish_epochs" = 0.0\n'
        '[[model]]\nname = "digits_resnet"\nweights = "random"\n'
    )
    plan = compare.read(text + row.replace("python:rounding.py:Rounding", method))
    assert [run.label for run in plan.runs()] == ["Rounding"]
    table = compare.run(plan, tmp_path / "out", device="cpu", say=lambda line: None)
    assert table.missing == {}
    (line,) = table.parts[0].lines
    assert line.figures["top1"] is not None
    assert line.separate["layer"] == "no"  # one codebook for the network


def test_annotations_of_a_method_file_may_be_postponed(method: str) -> None:
    file = Path(method.removeprefix("python:").removesuffix(":Rounding"))
    file.write_text("from __future__ import annotations\n" + file.read_text())
    assert find(method) == method
