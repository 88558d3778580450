"""The dry run: it finds what the run would find, leaves nothing behind, and its figures can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pwfn.bayes.pwfn import Pwfn
from safetensors.torch import save_file
from torch import nn

from pwfn import Config, DataError, PwfnError
from pwfn.errors import TooLargeError
from pwfn.run.folder import run
from pwfn.run.forecast import Forecast, forecast
from pwfn.run.options import RunOptions
from pwfn.zoo.models import digits_resnet

UNTRAINED = Config().override(
    {
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.warmup_epochs": 0.0,
        "schedule.epochs_per_round": 0.0,
        "finish.polish_epochs": 0.0,
        "finish.reestimate_batchnorm": False,
    }
)


def options(folder: Path, **changes: Any) -> RunOptions:
    usual = {"model": "digits_resnet", "data": "digits", "weights": "random", "device": "cpu"}
    return RunOptions(out=folder, **{**usual, "batch_size": 64, **changes})


def test_where_nothing_is_trained_the_forecast_is_the_result(tmp_path: Path) -> None:
    found = forecast(options(tmp_path / "run"), UNTRAINED)
    facts = run(options(tmp_path / "run"), UNTRAINED)
    assert found.entropy_bits == facts["entropy_bits"]
    assert found.unique == facts["unique"]
    assert found.steps == 0
    record = facts["file_bytes"] - found.file_bytes
    assert 0 < record < 5000  # the forecast's file has no record of the run in it


def test_a_lighter_rest_is_part_of_the_forecast(tmp_path: Path) -> None:
    state = digits_resnet().state_dict()
    for name, value in state.items():
        if "running" in name:  # or there would be nothing to fold and to round
            value.uniform_(0.5, 2.0)
    weights = str(tmp_path / "weights.safetensors")
    save_file(state, weights)
    lighter = UNTRAINED.override({"finish.fold_batchnorm": True, "finish.rest": "bfloat16"})
    asked = options(tmp_path / "run", weights=weights)
    plain, light = (forecast(asked, config).file_bytes for config in (UNTRAINED, lighter))
    assert light < plain - 500
    record = run(asked, lighter)["file_bytes"] - light
    assert 0 < record < 5000  # as above


def test_a_rehearsal_moves_a_sigma_that_learns_and_no_other() -> None:
    """With momentum 0.9 a step moves it by ten times the learning rate times alpha, up to the cap."""
    constant = {"posterior.init": "constant", "posterior.constant_sigma": 0.01, "posterior.alpha": 0.5}
    learns = Pwfn(nn.Linear(4, 2), Config.preset("paper").override(constant))
    learns.rehearse(2)
    torch.testing.assert_close(learns.sigma.detach(), torch.full((10,), 0.01 + 2 * 10 * 0.001 * 0.5))
    learns.rehearse(1000)
    torch.testing.assert_close(learns.sigma.detach(), torch.full((10,), 0.05))
    stays = Pwfn(nn.Linear(4, 2), Config().override(constant))
    stays.rehearse(1000)
    torch.testing.assert_close(stays.sigma.detach(), torch.full((10,), 0.01))


def test_the_steps_are_those_of_the_run(tmp_path: Path) -> None:
    """1,347 images in batches of 64 are 22; the paper's warm-up is 5 % of an epoch, and polish one epoch."""
    config = Config().override({"schedule.fractions": [0.5, 0.9, 1.0], "schedule.epochs_per_round": 2.0})
    found = forecast(options(tmp_path), config)
    assert found.steps == 2 + 44 + 44 + 22
    halved = forecast(options(tmp_path), config.override({"training.accumulate": 2}))
    assert halved.steps == 1 + 22 + 22 + 11
    assert found.epoch_seconds == pytest.approx(22 * found.step_seconds)
    assert halved.epoch_seconds == pytest.approx(11 * halved.step_seconds)
    least = found.steps * found.step_seconds + 3 * found.fixing_seconds + 5 * found.scoring_seconds
    assert found.total_seconds == pytest.approx(least + 44 * found.step_seconds / 3)
    assert found.device_bytes is None
    assert 2**26 < found.memory_bytes < 2**36  # of this process: more than torch alone, and less than 64 GiB


def test_the_expected_time_is_that_of_the_run(tmp_path: Path) -> None:
    """Within a factor of ten: other processes share the machine with the tests."""
    config = Config().override({"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 1.0})
    found = forecast(options(tmp_path), config)
    run(options(tmp_path / "run", checkpoint_minutes=60), config)
    seconds = json.loads((tmp_path / "run" / "record.json").read_text())["seconds"]
    assert seconds / 10 < found.total_seconds < 10 * seconds


def test_nothing_is_written(tmp_path: Path, call: Any) -> None:
    arguments = (
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--device", "cpu", "--dry-run", "--out", str(tmp_path / "run")),
    )
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["memory", "time", "file"]
    assert list(tmp_path.iterdir()) == []
    status, out, err = call(*arguments, "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert Forecast(**facts).lines()[2].startswith(f"file: about {facts['file_bytes']:,} bytes, ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    run(options(tmp_path), UNTRAINED)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    forecast(options(tmp_path), UNTRAINED)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def npz(path: Path, label: int = 2) -> str:
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    labels = numbers.integers(0, 3, 8)
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=[*labels[:-1], label])
    return f"npz:{path}"


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("cifar_resnet20", "label", r"y_test\[7\] is 10: the model has 10 classes, allowed is 0 to 9"),
        ("cifar_resnet20", "npz:missing.npz", "missing.npz: there is no such file"),
        ("cifar_resnet20", "imagefolder:missing", "missing: there is no such folder"),
        ("cifar_resnet20", "digits", "take a model for images of 1 channels"),
        ("cifar_resnet21", "digits", "did you mean .*cifar_resnet20"),
    ],
)
def test_what_is_wrong_is_found_as_the_run_would_find_it(
    model: str, data: str, words: str, tmp_path: Path
) -> None:
    data = npz(tmp_path / "data.npz", 10) if data == "label" else data
    messages = []
    for job in (forecast, run):
        with pytest.raises(PwfnError, match=words) as caught:
            job(options(tmp_path / "run", model=model, data=data), UNTRAINED)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]


@pytest.fixture
def hungry(tmp_path: Path) -> str:
    """A network for digits that runs out of memory in training, above twenty images."""
    file = tmp_path / "nets.py"
    file.write_text(
        "import torch\n"
        "class Hungry(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) > 20:\n"
        "            raise torch.OutOfMemoryError('out of memory')\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    return Hungry(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "def data():\n"
        "    x, y = torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64)\n"
        "    return [(x, y)], [(x, y)]\n"
    )
    return f"python:{file}:"


def test_a_batch_too_large_says_what_fits(hungry: str, tmp_path: Path) -> None:
    how = options(tmp_path / "run", model=f"{hungry}make", data=f"{hungry}data")
    config = UNTRAINED.override({"schedule.warmup_epochs": 1.0})
    for job, where in ((forecast, "dry run"), (run, "round 1 of 3")):
        with pytest.raises(TooLargeError) as caught:
            job(how, config)
        assert str(caught.value) == (
            f"{where}, step 1: out of memory with inputs (64, 1, 8, 8) float32: a batch of 16 fits"
        )


def test_test_data_that_the_model_cannot_take(tmp_path: Path) -> None:
    file = tmp_path / "data.py"
    file.write_text(
        "import torch\n"
        "def data():\n"
        "    x, y = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)\n"
        "    return [(x, y)], [(x[:, :0], y)]\n"
    )
    with pytest.raises(DataError, match=r"test data, batch 1: the model cannot take inputs \(1, 0, 8, 8\)"):
        forecast(options(tmp_path / "run", data=f"python:{file}:data"), UNTRAINED)
