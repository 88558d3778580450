"""The paper's ImageNet networks: every plan is complete, and one is run on a few generated images."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pwfn import Config
from pwfn.lab import compare
from pwfn.lab.compare import paper
from pwfn.zoo import models

ROOT = Path(__file__).resolve().parent.parent
PLANS = sorted((ROOT / "experiments" / "imagenet").glob("*.toml"))
TEXT, RECOMMENDED = "PWFN, the paper's text", "PWFN, recommended"


def test_the_six_networks_of_the_paper_are_there_once() -> None:
    networks = [network for path in PLANS for network in compare.load(path).networks]
    assert sorted(str(network.paper) for network in networks) == sorted(paper.tables()["networks"])
    assert {network.weights for network in networks} == {"pretrained"}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_has_the_presets_settings_and_timm_the_weights(path: Path) -> None:
    models.ready_torchvision()
    import timm

    plan = compare.load(path)
    runs = {run.label: run for run in plan.runs()}
    assert list(runs) == ["Baseline", TEXT, RECOMMENDED, "WFN"]
    assert (plan.batch_size, plan.samples, plan.seeds) == (128, 20, (0,))
    how = {"training.precision": "bf16", "training.cuda_graph": True}
    assert runs[TEXT].config == Config.preset("paper").override(how)
    assert runs[RECOMMENDED].config == Config.preset("recommended").override(how)
    wfn = {**how, "options.delta": 0.015, "finish.polish_epochs": 0.0}
    assert runs["WFN"].config == Config.preset("recommended", "wfn").override(wfn)
    assert [runs[label].epochs for label in ("Baseline", TEXT, "WFN")] == [0.0, 27.05, 27.05]
    (network,) = plan.networks
    assert runs[TEXT].paper_line == paper.line(str(network.paper), "PWFN")
    assert network.name in timm.list_pretrained()


@pytest.mark.parametrize(("name", "crop"), [("resnet18", 224 / 256), ("deit_tiny", 0.9)])
def test_a_network_takes_images_of_its_size(name: str, crop: float) -> None:
    (network,) = compare.load(ROOT / "experiments" / "imagenet" / f"{name}.toml").networks
    model = models.create(network.name).eval()
    config = models.data_config(network.name, model)
    assert (config.image_size, config.crop_pct) == (224, crop)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)


def test_a_plan_goes_through_the_whole_command_on_generated_images(tmp_path: Path) -> None:
    """One row of it: the others take the same way, and their methods have tests of their own."""
    draw, images = np.random.default_rng(0), tmp_path / "imagenet"
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            (images / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(images / split / name / f"{number}.JPEG")
    plan = compare.load(ROOT / "experiments" / "imagenet" / "deit_tiny.toml")
    short = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [1.0], "posterior.init": "rms"}
    small = replace(
        plan,
        data=f"imagefolder:{images}",
        samples=1,
        batch_size=4,
        settings={**plan.settings, **short},
        networks=tuple(replace(network, weights="random") for network in plan.networks),
        rows=tuple(row for row in plan.rows if row.label == RECOMMENDED),
    )
    made = compare.run(small, tmp_path / "out", device="cpu", say=lambda line: None)
    assert made.missing == {}
    (path,) = (tmp_path / "out" / "results").iterdir()
    facts = json.loads(path.read_text())
    assert (facts["label"], facts["model"]) == (RECOMMENDED, "deit_tiny_patch16_224.fb_in1k")
    assert facts["epochs"] == 1.0 + Config().finish.polish_epochs
    assert facts["settings"]["training"]["precision"] == "bf16"
    assert facts["unique"] < 500  # of 5.7 million weights
    assert facts["file_bytes"] < facts["fp32_bytes"] / 4


def test_a_command_of_the_page_is_the_plans_row() -> None:
    """A row that is started by hand must be the one that the table looks for."""
    plan = compare.load(ROOT / "experiments" / "imagenet" / "resnet18.toml")
    run = next(run for run in plan.runs() if run.label == RECOMMENDED)
    page = (ROOT / "docs" / "imagenet.md").read_text(encoding="utf-8").replace("\\\n", "")
    (found,) = re.findall(r"^pwfn compress (.*--workers.*)$", page, re.MULTILINE)
    words, wanted = shlex.split(found), run.arguments(Path("tables/imagenet_resnet18"), None)[1:]
    for name in ("--model", "--data", "--method", "--preset", "--seed", "--out"):
        assert words[words.index(name) + 1] == wanted[wanted.index(name) + 1], name

    def changes(words: list[str]) -> set[str]:
        return {words[i + 1].replace('"', "") for i, word in enumerate(words) if word == "--set"}

    assert changes(words) == changes(wanted)
