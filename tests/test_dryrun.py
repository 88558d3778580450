"""The dry run: it finds what the run would find, leaves nothing behind, and its figures can be trusted."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cases import digits_run as options
from cases import npz_file
from safetensors.torch import save_file

from pwfn import Config, PwfnError
from pwfn.evaluate.targets import MAX_TRIES
from pwfn.run.folder import run
from pwfn.run.forecast import forecast
from pwfn.zoo.models import digits_resnet

UNTRAINED = Config().override(
    {
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.epochs_per_round": [0.0, 0.0, 0.0],
        "finish.polish_epochs": 0.0,
        "finish.reestimate_epochs": 0.0,
        "finish.fold_batchnorm": False,
        "finish.uncompressed_dtype": "float32",
    }
)
SHRUNK = UNTRAINED.override({"finish.fold_batchnorm": True, "finish.uncompressed_dtype": "bfloat16"})


def test_where_nothing_is_trained_the_forecast_is_the_result(tmp_path: Path) -> None:
    """With BatchNorm folded and rounded too; the forecast's file has no record of the run in it."""
    state = digits_resnet().state_dict()
    for name, value in state.items():
        if "running" in name:  # or there would be nothing to fold and to round
            value.uniform_(0.5, 2.0)
    weights = str(tmp_path / "weights.safetensors")
    save_file(state, weights)
    sizes = []
    for number, config in enumerate((UNTRAINED, SHRUNK)):
        asked = options(tmp_path / str(number), weights=weights)
        found, result = forecast(asked, config), run(asked, config)
        assert (found.entropy_bits, found.unique) == (
            result.summary.whole.entropy_bits,
            result.summary.whole.unique,
        )
        assert found.steps == 0
        assert 0 < result.file_bytes - found.file_bytes < 5000
        sizes.append(found.file_bytes)
    assert sizes[1] < sizes[0] - 500


def test_a_system_that_tells_no_peak_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no module ``resource``."""
    monkeypatch.setitem(sys.modules, "resource", None)
    found = forecast(options(tmp_path), UNTRAINED)
    assert found.memory_bytes == 0
    assert str(found).startswith("memory: not known")


def test_the_steps_are_those_of_the_run(tmp_path: Path) -> None:
    """1,347 images in batches of 64 are 22; 5 % of an epoch before the first fixing, and one of polish."""
    config = Config().override({"schedule.fractions": [0.5, 0.9, 1.0], "schedule.epochs_per_round": 2.0})
    found = forecast(options(tmp_path), config)
    assert found.steps == 2 + 44 + 44 + 22
    halved = forecast(options(tmp_path), config.override({"training.accumulate": 2}))
    assert halved.steps == 1 + 22 + 22 + 11
    assert found.epoch_seconds == pytest.approx(22 * found.step_seconds)
    assert halved.epoch_seconds == pytest.approx(11 * halved.step_seconds)
    least = found.steps * found.step_seconds + 3 * found.fixing_seconds + 5 * found.scoring_seconds
    # BatchNorm is re-estimated before and after polish, a third of a step per batch.
    assert found.total_seconds == pytest.approx(least + 44 * found.step_seconds / 3)
    target = forecast(options(tmp_path), config.override({"target.bits": 3.0}))
    least = target.steps * target.step_seconds + 6 * target.fixing_seconds + 8 * target.scoring_seconds
    assert target.total_seconds == pytest.approx(least + 5 * 22 * target.step_seconds / 3)
    assert (found.tries, target.tries) == (1, 1)
    assert found.device_bytes is None
    assert 2**26 < found.memory_bytes < 2**36  # of this process: more than torch alone, and less than 64 GiB


def test_a_target_that_decides_the_step_may_cost_many_networks(tmp_path: Path) -> None:
    """Each try is fixed once and scored once; the original and the file are scored too."""
    config = Config.preset("quick").override({"options.images": 64})
    alone = forecast(options(tmp_path), config)
    assert alone.total_seconds == pytest.approx(alone.fixing_seconds + 3 * alone.scoring_seconds)
    found = forecast(options(tmp_path), config.override({"target.bits": 2.0}))
    assert (found.tries, found.steps) == (MAX_TRIES, 0)
    fixing = found.fixing_seconds + (MAX_TRIES - 1) * found.try_seconds
    assert found.try_seconds > 0
    assert found.total_seconds == pytest.approx(fixing + (MAX_TRIES + 2) * found.scoring_seconds)
    assert "up to" in str(found)
    assert "up to" not in str(alone)


def test_a_dry_run_is_never_silent_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pwfn.run.forecast._SILENT_SECONDS", 0.01)
    said: list[str] = []
    forecast(options(tmp_path), UNTRAINED, say=said.append)
    repeated = [line for line in said if line.endswith("so far")]
    assert len(repeated) > 2
    assert all(any(line.startswith(other) for other in said if other != line) for line in repeated)
    threads = set(threading.enumerate())
    with pytest.raises(PwfnError):
        forecast(options(tmp_path, data="digit"), UNTRAINED, say=said.append)
    assert set(threading.enumerate()) <= threads  # one of an earlier test may have ended


def test_the_expected_time_is_that_of_the_run(tmp_path: Path) -> None:
    """Within a factor of ten: other processes share the machine with the tests."""
    config = Config().override({"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 1.0})
    found = forecast(options(tmp_path), config)
    seconds = run(options(tmp_path / "run", checkpoint_minutes=60), config).seconds
    assert seconds / 10 < found.total_seconds < 10 * seconds


def test_nothing_is_written_and_a_run_in_the_folder_is_not_changed(tmp_path: Path, call: Any) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    arguments = (
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--device", "cpu", "--dry-run", "--out", str(tmp_path / "run")),
    )
    status, out, err = call(*arguments)
    assert status == 0
    assert len(err.splitlines()) > 3  # one for each thing that is measured
    assert [line.partition(":")[0] for line in out.splitlines()] == ["memory", "time", "file"]
    assert list(tmp_path.iterdir()) == []
    run(options(tmp_path / "run"), UNTRAINED)
    before = content()
    status, out, err = call(*arguments, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["steps"] == 1 + 9 * 33 + 11  # 11 batches of 128
    assert content() == before


@pytest.mark.parametrize("method", ["wfn", "lsq", "kmeans"])
def test_other_methods_have_forecasts_too(method: str, tmp_path: Path) -> None:
    config = Config.preset("recommended", method).override({"training.steps_per_epoch": 2})
    found = forecast(options(tmp_path), config)
    assert 0 < found.file_bytes < 4 * digits_weights()
    assert found.steps >= 1


def digits_weights() -> int:
    return sum(p.numel() for p in digits_resnet().parameters())


@pytest.fixture
def nets(tmp_path: Path) -> str:
    """A network for digits that runs out of memory in training, above twenty images; data for it."""
    file = tmp_path / "nets.py"
    file.write_text(
        "import torch\n"
        "class Hungry(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) > 20:\n"
        "            raise torch.OutOfMemoryError('out of memory')\n"
        "        return super().forward(x)\n"
        "def hungry():\n"
        "    return Hungry(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "x, y = torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64)\n"
        "def good():\n"
        "    return [(x, y)], [(x, y)]\n"
        "def bad():\n"
        "    return [(x, y)], [(x[:, :0], y)]\n"
    )
    return f"python:{file}:"


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ("cifar_resnet20", "{npz}", r"y_train\[10\] is 10: .*10 classes"),
        ("cifar_resnet20", "npz:missing.npz", "missing.npz"),
        ("cifar_resnet20", "imagefolder:missing", "missing"),
        ("cifar_resnet20", "digits", "channel"),
        ("cifar_resnet21", "digits", "did you mean .*cifar_resnet20"),
        ("digits_resnet", "{nets}bad", r"test data, batch 1: .*\(1, 0, 8, 8\)"),
    ],
)
def test_what_is_wrong_is_found_as_the_run_would_find_it(
    model: str, data: str, named: str, nets: str, tmp_path: Path
) -> None:
    data = data.format(npz=npz_file(tmp_path / "data.npz", labels=12), nets=nets)
    messages = []
    for job in (forecast, run):
        with pytest.raises(PwfnError, match=named) as caught:
            job(options(tmp_path / "run", model=model, data=data), UNTRAINED)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]


def test_a_batch_too_large_says_what_fits(nets: str, tmp_path: Path) -> None:
    how = options(tmp_path / "run", model=f"{nets}hungry", data=f"{nets}good")
    config = UNTRAINED.override({"schedule.epochs_per_round": [1.0, 0.0, 0.0], "posterior.init": "powers"})
    for job, where in ((forecast, "dry run"), (run, "round 1 of 3")):
        with pytest.raises(PwfnError, match=rf"^{where}, step 1: .*\(64, 1, 8, 8\).* 16 fits"):
            job(how, config)
