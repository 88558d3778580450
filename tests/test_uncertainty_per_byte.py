"""Uncertainty per byte: what is counted, what is measured under shifts, and every row of a small study."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import idx_images
import numpy as np
import pytest
import torch
import uncertainty_per_byte as per_byte
from cases import compressed_of
from torch import Tensor

from pwfn.zoo.models import digits_resnet


def test_bytes_of_the_original() -> None:
    state = {
        "conv.weight": torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)),
        "bn.weight": torch.ones(4),
        "bn.num_batches_tracked": torch.tensor(7),
    }
    weights = 4 * 3 * 3 * 3
    assert per_byte.stored(state, "fp32", ["conv.weight"])[1] == 4 * (weights + 4)
    assert per_byte.stored(state, "fp16", ["conv.weight"])[1] == 2 * (weights + 4)
    back, size = per_byte.stored(state, "int8", ["conv.weight"])
    assert size == weights + 4 * 4 + 4 * 4  # integers, a scale per filter, the others as they are
    assert back.keys() == state.keys()
    assert torch.equal(back["bn.weight"], state["bn.weight"])
    for got, was in zip(back["conv.weight"], state["conv.weight"], strict=True):
        step = was.abs().max() / 127
        steps = got / step
        torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
        assert (got - was).abs().max() <= step * 0.5001
        assert steps.abs().max().round() == 127


def test_bytes_of_laplace() -> None:
    # Ten classes and 64 features: output and input factor of the weights, output factor of the biases.
    kron = [torch.eye(10), torch.eye(64), torch.eye(10)]
    assert per_byte.factor_bytes(kron) == 4 * (55 + 2080 + 55 + 1)
    assert per_byte.factor_bytes([torch.ones(650)]) == 4 * 651


def logs(*right: float) -> Tensor:
    """Log-probabilities of two classes, of which the first has these."""
    p = torch.tensor(right, dtype=torch.float64)
    return torch.stack((p, 1 - p), 1).log()


def small_sets() -> per_byte.Sets:
    return per_byte.Sets(
        batches={},
        targets=torch.tensor([0, 0, 1, 0]),
        scored=torch.tensor([1, 2]),
        foreign=("foreign",),
        shifted=tuple((f"a{n}", f"b{n}") for n in range(5)),
    )


def test_shifts_are_means_over_kinds_at_each_strength() -> None:
    found = {"test": logs(0.9, 0.8, 0.4, 0.3), "foreign": logs(0.5, 0.5, 0.75)}
    for n in range(5):
        found |= {f"a{n}": logs(0.9, 0.2), f"b{n}": logs(0.5 ** (n + 1), 0.2)}
    measured = per_byte.measured(found, small_sets())
    assert measured["nll"] == pytest.approx(-(math.log(0.8) + math.log(0.6)) / 2)
    assert measured["accuracy_all"] == 0.75
    assert measured["accuracy"] == 1.0
    # 1 - max p: inside 0.2 and 0.4, outside 0.5, 0.5 and 0.25.
    assert measured["auroc"]["foreign"] == pytest.approx(5 / 6)
    for n, level in enumerate(measured["shifted"]):
        first, second = -(math.log(0.9) + math.log(0.8)) / 2, -((n + 1) * math.log(0.5) + math.log(0.8)) / 2
        assert level["nll"] == pytest.approx((first + second) / 2)


def test_the_temperature_is_fitted_on_the_other_half() -> None:
    """Those examples are right three times of four, and 0.9 is too sure of that: T = 2."""
    right = [0, 0, 0, 1] * 2
    sets = replace(small_sets(), targets=torch.tensor([*right, 1, 1]), scored=torch.tensor([8, 9]))
    found = {"test": logs(*[0.9] * 8, 0.6, 0.4), "foreign": logs(0.5)}
    found |= {spec: logs(0.5, 0.5) for level in sets.shifted for spec in level}
    line = per_byte.row("a", "b", 3, found, sets)
    assert line["tempered"]["temperature"] == pytest.approx(2.0)
    assert line["images"] == {"test": 10, "scored": 2, "foreign": 1, "shifted": 2}
    odds = math.sqrt(1.5)
    p = 1 / (1 + odds), odds / (1 + odds)
    assert line["tempered"]["nll"] == pytest.approx(-(math.log(p[0]) + math.log(p[1])) / 2)


def test_a_whole_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Two trainings of a network on digits; ensembles of files are the mean of their predictions."""
    results = tmp_path / "results.jsonl"
    monkeypatch.setattr(per_byte, "RESULTS", results)
    monkeypatch.setattr(per_byte, "laplace", lambda network, train, sets: iter(()))
    for number in range(2):
        torch.manual_seed(number)
        model = digits_resnet()
        torch.save(model.state_dict(), tmp_path / f"{number}.pt")
        path = tmp_path / "files" / f"training{number}_seed0" / "model.pwfn"
        path.parent.mkdir(parents=True)
        made = compressed_of(model)
        codes = (180,) * len(made.layout.entries)
        replace(made, sigma_codes=codes).save(path, record={"model": "digits_resnet"})
    words = ["--model", "digits_resnet", "--data", "digits", "--ood", "noise", "shift:rotate:90"]
    words += [
        "--weights",
        str(tmp_path / "0.pt"),
        str(tmp_path / "1.pt"),
        "--folder",
        str(tmp_path / "files"),
    ]
    words += ["--no-compress", "--seeds", "0", "--samples", "2", "--limit", "50", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["uncertainty_per_byte.py", *words, "--commit", "abc"])
    per_byte.main()
    lines = {line["row"]: line for line in map(json.loads, results.read_text().splitlines())}
    assert list(lines) == [
        *("original, fp32", "original, fp16", "original, int8", "2 originals, fp32", "point estimate"),
        *("2 draws", "2 files, point estimates", "2 files, draws"),
    ]
    sizes = [(tmp_path / "files" / f"training{n}_seed0" / "model.pwfn").stat().st_size for n in (0, 1)]
    assert lines["2 draws"]["bytes"] == sizes[0]
    assert lines["2 files, draws"]["bytes"] == sum(sizes)
    assert lines["point estimate"]["bytes"] < sizes[0] < lines["original, int8"]["bytes"]
    assert lines["2 originals, fp32"]["bytes"] == 2 * lines["original, fp32"]["bytes"]
    assert lines["point estimate"]["images"] == {"test": 450, "scored": 225, "foreign": 50, "shifted": 50}
    # The file holds the original's weights rounded: the two predict nearly the same.
    assert lines["point estimate"]["plain"]["nll"] == pytest.approx(
        lines["original, fp32"]["plain"]["nll"], rel=0.2
    )
    shown = per_byte.table(results)
    assert shown[0] == "### digits_resnet"
    assert len(shown) == 14
    assert "against noise and rotate:90, 50 images" in shown[-1]

    # With one training its seeds are the members.
    (tmp_path / "files" / "training1_seed0").rename(tmp_path / "files" / "training0_seed1")
    words.remove(str(tmp_path / "1.pt"))
    words[words.index("--seeds") + 1 : words.index("--samples")] = ["0", "1"]
    monkeypatch.setattr("sys.argv", ["uncertainty_per_byte.py", *words, "--commit", "abc"])
    per_byte.main()
    last = json.loads(results.read_text().splitlines()[-1])
    assert (last["row"], last["bytes"]) == ("2 files of one training, draws", sum(sizes))
    capsys.readouterr()


def test_means_over_seeds_and_later_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert per_byte.table(path) == ["Not measured yet."]

    def line(which: str, top1: float, nll: float) -> str:
        plain = {"accuracy_all": top1, "nll": nll, "ece": 0.02, "brier": 0.1, "aurc": 0.01}
        plain |= {"auroc": {"npz:data/fashion.npz": 0.9}, "shifted": [{"nll": n} for n in range(5)]}
        facts = {
            "network": "net",
            "row": "point estimate",
            "which": which,
            "bytes": 1000,
            "plain": plain,
            "tempered": {**plain, "nll": 0.2},
            "images": {"test": 10, "scored": 5, "foreign": 4, "shifted": 3},
            "device": "a GPU",
            "versions": {"torch": "2.0"},
            "commit": "abc",
        }
        return json.dumps(facts) + "\n"

    path.write_text(line("seed0", 0.5, 9.0) + line("seed0", 0.9, 0.3) + line("seed1", 0.92, 0.4))
    lines = per_byte.table(path)
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells == [
        *("point estimate", "1,000", "91.00 ± 1.41", "0.350 → 0.200", "0.020 → 0.020", "0.100", "0.0100"),
        *("0.900", "2.000 → 2.000"),
    ]
    assert "against fashion, 4 images" in lines[-1]


def test_images_of_idx_files(tmp_path: Path) -> None:
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8)
    raw = np.array([2051, 2, 3, 4], ">u4").tobytes() + pixels.tobytes()
    (tmp_path / "a").write_bytes(raw)
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    for name in ("a", "a.gz"):
        found = idx_images.images(tmp_path / name)
        assert found.shape == (2, 3, 4, 1)
        assert found[1, 2, 3, 0] == 23
    (tmp_path / "labels").write_bytes(np.array([2049, 1, 0, 0], ">u4").tobytes())
    with pytest.raises(SystemExit, match="2049"):
        idx_images.images(tmp_path / "labels")
