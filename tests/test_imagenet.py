"""The paper's ImageNet networks: every file is complete, and one is run on a few made-up images."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imagenet import table

from pwfn import Config
from pwfn.lab import compare
from pwfn.lab.compare import paper
from pwfn.zoo import models

ROOT = Path(__file__).resolve().parent.parent
PLANS = sorted((ROOT / "experiments" / "imagenet").glob("*.toml"))
TEXT, RECOMMENDED = "PWFN, the paper's text", "PWFN, recommended"


def _benchmark() -> Any:
    spec = spec_from_file_location("imagenet_steps", ROOT / "benchmarks" / "imagenet_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_six_networks_of_the_paper_are_there_once() -> None:
    networks = [network for path in PLANS for network in compare.load(path).models]
    assert sorted(str(network.paper) for network in networks) == sorted(paper.networks())
    assert {network.weights for network in networks} == {"pretrained"}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_settings_are_the_presets_but_for_how_they_are_computed(path: Path) -> None:
    plan = compare.load(path)
    runs = {run.label: run for run in plan.runs()}
    assert list(runs) == ["Baseline", TEXT, RECOMMENDED, "WFN"]
    assert (plan.batch_size, plan.samples, plan.seeds) == (128, 20, (0,))
    assert plan.data == "imagefolder:imagenet"
    convolutions = "deit" not in path.stem
    how = {
        "training.precision": "bf16",
        "training.cuda_graph": True,
        "training.channels_last": convolutions,
    }
    assert runs[TEXT].config == Config.preset("paper").override(how)
    assert runs[RECOMMENDED].config == Config.preset("recommended").override(how)
    wfn = {**how, "wfn.delta": 0.015, "finish.polish_epochs": 0.0}
    assert runs["WFN"].config == Config.preset("recommended", "wfn").override(wfn)
    assert [runs[label].epochs for label in ("Baseline", TEXT, "WFN")] == [0.0, 27.05, 27.05]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_papers_text_is_in_the_settings(path: Path) -> None:
    """What the paper's section "Experiments" says in numbers."""
    run = next(run for run in compare.load(path).runs() if run.label == TEXT)
    config = run.config
    assert config.training.optimizer == "sgd"
    assert (config.training.momentum, config.training.learning_rate) == (0.9, 0.001)
    assert (config.clustering.delta, config.posterior.alpha) == (1.0, 2**-11)
    assert (config.clustering.rule, config.schedule.epochs_per_round) == ("mean", 3.0)
    assert run.paper_line == paper.line(str(run.network.paper), "PWFN")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_timm_has_the_weights(path: Path) -> None:
    models.ready_torchvision()
    import timm

    (network,) = compare.load(path).models
    assert network.name in timm.list_pretrained()


@pytest.mark.parametrize(("name", "crop"), [("resnet18", 224 / 256), ("deit_tiny", 0.9)])
def test_a_network_takes_images_of_its_size(name: str, crop: float) -> None:
    (network,) = compare.load(ROOT / "experiments" / "imagenet" / f"{name}.toml").models
    model = models.create(network.name).eval()
    config = models.data_config(network.name, model)
    assert (config.image_size, config.crop_pct) == (224, crop)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of small JPEG files, eight to train on and four to score."""
    from PIL import Image

    dice, root = np.random.default_rng(0), tmp_path / "imagenet"
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = dice.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.JPEG")
    return root


def test_a_file_goes_through_the_whole_command_on_made_up_images(images: Path, tmp_path: Path) -> None:
    """One row of it: the others take the same way, and their methods have tests of their own."""
    plan = compare.load(ROOT / "experiments" / "imagenet" / "deit_tiny.toml")
    short = {"schedule.fractions": [1.0], "schedule.warmup_epochs": 1.0}
    small = replace(
        plan,
        data=f"imagefolder:{images}",
        samples=1,
        batch_size=4,
        settings={**plan.settings, **short},
        models=tuple(replace(network, weights="random") for network in plan.models),
        rows=tuple(row for row in plan.rows if row.label == RECOMMENDED),
    )
    made = compare.run(small, tmp_path / "out", jobs=2, device="cpu", say=lambda line: None)
    assert made.missing == {}
    (path,) = (tmp_path / "out" / "results").iterdir()
    facts = json.loads(path.read_text())
    assert (facts["label"], facts["model"]) == (RECOMMENDED, "deit_tiny_patch16_224.fb_in1k")
    assert facts["epochs"] == 1.0 + Config().finish.polish_epochs
    assert facts["settings"]["training"]["precision"] == "bf16"
    # The network has 5.7 million weights.
    assert facts["unique"] < 500
    assert facts["fp32_bytes"] > 10 * 2**20
    assert facts["file_bytes"] < facts["fp32_bytes"] / 4
    expected = paper.line("DeiT-Tiny", "PWFN")
    assert expected is not None
    assert f"{expected.top1} ({expected.ensemble})" in (tmp_path / "out" / "table.md").read_text()


# --- the page ---


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "imagenet" / "table.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_of_the_page_are_the_files_rows() -> None:
    """A row that is started by hand must be the one that the table looks for."""
    plan = compare.load(ROOT / "experiments" / "imagenet" / "resnet18.toml")
    run = next(run for run in plan.runs() if run.label == RECOMMENDED)
    page = (ROOT / "docs" / "imagenet.md").read_text(encoding="utf-8").replace("\\\n", "")
    found = [shlex.split(line) for line in re.findall(r"^pwfn compress .*--workers.*$", page, re.MULTILINE)]
    assert len(found) == 1
    words, wanted = found[0][1:], run.arguments(Path("tables/imagenet_resnet18"), None)
    written = {name: words[place + 1] for place, name in enumerate(words) if name.startswith("--")}
    for name in ("--model", "--data", "--method", "--preset", "--seed", "--out"):
        assert written[name] == wanted[wanted.index(name) + 1], name
    pairs = {words[place + 1] for place, name in enumerate(words) if name == "--set"}
    assert pairs == {
        wanted[place + 1].replace('"', "") for place, name in enumerate(wanted) if name == "--set"
    }


LINE: dict[str, Any] = {
    "network": "resnet18.tv_in1k",
    "batch_size": 128,
    "device": "a GPU",
    "ours_s": 0.032,
    "rival_s": 0.016,
    "ratio": 2.0,
    "ours_images_a_second": 4000.0,
    "worker_images_a_second": 150.0,
    "ours_bytes": 3 * 2**30,
    "precision": "bf16",
    "cuda_graph": True,
    "versions": {"torch": "2.0"},
    "commit": "0123456789abcdef",
    "counts": {"training": 27.05, "polish": 1.0, "reestimation": 2.0, "scorings": 10, "fp32_scorings": 23},
    "hours": {"training": 2.41, "polish": 0.09, "reestimation": 0.1, "scoring": 0.2, "all": 2.8},
}


def test_the_table_of_hours(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert table.steps(path) == table.NOT_MEASURED
    older = {**LINE, "ours_s": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (older, LINE)))
    head, rule, row, empty, below = table.steps(path).splitlines()
    assert len(head.split("|")) == len(rule.split("|")) == len(row.split("|"))
    # 4,000 images a second by workers of 150 each: 26.7 of them.
    assert row == (
        "| `resnet18.tv_in1k` | 128 | 32.0 ms | 4,000 | 16.0 ms (ratio 2.00) | 3.0 GiB | 2.41 | "
        "0.09 | 0.10 | 0.20 | 2.80 | 27 |"
    )
    assert empty == ""
    assert below == (
        "A run is 27.05 epochs of training, 1 of polish, BatchNorm statistics over 2 (none in DeiT), 10 "
        "scorings after rounds and 23 in float32. Measured on: a GPU, torch 2.0, bf16, CUDA graph, a worker "
        "reads 150 images a second, commit 0123456789."
    )


def test_the_hours_of_a_run() -> None:
    """With batches of 128 an epoch is 10,009.117 steps, and a scoring 390.625."""
    benchmark = _benchmark()
    case = benchmark.Case("resnet18", torch.device("cpu"), None)
    config = {"finish.reestimate_batchnorm": True, "finish.polish_epochs": 1.0}
    case.config = Config.preset("paper").override(config)
    found = benchmark.hours(case, 0.036, 0.018, 0.36, 3.6)
    assert found["training"] == pytest.approx(27.05 * 10_009.1171875 * 1e-5)
    assert found["polish"] == pytest.approx(10_009.1171875 * 1e-5)
    assert found["reestimation"] == pytest.approx(2 * 10_009.1171875 * 5e-6)
    assert found["scoring"] == pytest.approx(390.625 * (10 * 1e-4 + 23 * 1e-3))
    assert found["all"] == pytest.approx(sum(found[name] for name in found if name != "all"))
