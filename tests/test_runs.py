"""Runs in a folder: what they leave there, and that nothing which stops one changes how it ends.

``python tests/test_runs.py 20`` kills a run with SIGKILL at twenty random moments, goes on each time, and
compares the bytes; the tests do so a few times only.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from pwfn import Config, FileError, PwfnError, load
from pwfn.checkpoint import Store
from pwfn.filescores import evaluate_file, summary_line
from pwfn.keeping import StoppedError
from pwfn.options import RunOptions
from pwfn.runs import run
from pwfn.watching import Lines

CONFIG = Config().override(
    {
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.epochs_per_round": 0.5,
        "training.learning_rate": 0.01,
        "finish.polish_epochs": 0.3,
        "finish.reestimate_epochs": 0.2,
    }
)


def options(folder: Path, **changes: object) -> RunOptions:
    usual = {"weights": "random", "batch_size": 64, "device": "cpu", "checkpoint_minutes": 1e-3}
    names = {"model": "digits_resnet", "data": "digits"}
    return RunOptions(out=folder, **{**names, **usual, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(options(folder), CONFIG)
    return folder


def test_what_a_run_leaves(whole: Path) -> None:
    names = sorted(path.name for path in whole.iterdir())
    assert names == ["checkpoints", "config.toml", "log.jsonl", "model.pwfn", "record.json"]
    assert len(list((whole / "checkpoints").iterdir())) == 2
    assert Config.load(whole / "config.toml") == CONFIG
    lines = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events == ["start", *["epoch", "round"] * 3, "epoch", "end"]
    assert [line["fraction"] for line in lines if line["event"] == "round"] == [0.5, 0.9, 1.0]
    assert lines[-2]["stage"] == "polish"
    facts = json.loads((whole / "record.json").read_text())
    assert facts["file_bytes"] == (whole / "model.pwfn").stat().st_size
    assert facts["weights"] == load(whole / "model.pwfn").layout.size


def test_random_weights_leave_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    with pytest.raises(PwfnError, match="did you mean"):
        run(options(tmp_path / "run", data="digitz"), CONFIG)  # after the network was made
    assert torch.equal(torch.get_rng_state(), before)


def test_figures_are_those_of_the_file(whole: Path) -> None:
    facts = json.loads((whole / "record.json").read_text())
    again = evaluate_file(whole / "model.pwfn", options(whole), samples=2)
    assert again["after"] == facts["after"]
    assert 0 <= again["ensemble"] <= 1
    assert f"{facts['file_bytes']:,} bytes" in summary_line(facts)


def test_the_folder_of_another_run_is_not_written_over(whole: Path) -> None:
    before = (whole / "model.pwfn").read_bytes()
    with pytest.raises(FileError, match="holds a run already: go on with it by --resume"):
        run(options(whole), CONFIG)
    assert (whole / "model.pwfn").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"clustering.b": 8}, "settings.clustering.b is 7, not 8"),
        ({"batch_size": 32}, {}, "data.batch_size is 64, not 32"),
        ({"limit": 700}, {}, "data.content is"),
    ],
)
def test_another_run_does_not_go_on_from_this_one(
    changes: dict[str, object], config: dict[str, object], message: str, whole: Path
) -> None:
    with pytest.raises(FileError, match=message):
        run(options(whole, resume=True, **changes), CONFIG.override(config))


def test_a_finished_run_taken_up_again_ends_the_same(whole: Path) -> None:
    before = (whole / "model.pwfn").read_bytes()
    run(options(whole, resume=True), CONFIG)
    assert (whole / "model.pwfn").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_the_end_is_the_same(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    def interrupt(line: str) -> None:
        if line.lstrip().startswith("1 "):  # after the first round
            signal.raise_signal(number)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    folder = tmp_path / "run"
    with pytest.raises(StoppedError, match=f"stopped by {number.name}; go on with --out .*run --resume"):
        run(options(folder, checkpoint_minutes=60), CONFIG, Lines(interrupt))
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    run(options(folder, resume=True), CONFIG)
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["fraction"] for line in lines if line["event"] == "round"] == [0.5, 0.9, 1.0]


def test_a_run_without_checkpoints_goes_on_from_the_start(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(options(folder, resume=True), CONFIG)
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "digits_resnett"}, "digits_resnet"),
        ({"data": "digit"}, "digits"),
        ({"weights": "missing.safetensors"}, "missing.safetensors"),
        ({"weights": "pretrained"}, "--weights"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"model": "cifar_resnet20"}, "take a model for images of 1 channels"),
    ],
)
def test_mistakes_are_one_sentence(change: dict[str, object], message: str, tmp_path: Path) -> None:
    usual = {"model": "digits_resnet", "data": "digits", "weights": "random", "device": "cpu"}
    with pytest.raises(PwfnError, match=message) as caught:
        run(RunOptions(out=tmp_path / "run", **{**usual, **change}), CONFIG)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def killed_and_gone_on_with(folder: Path, moments: list[float]) -> int:
    """Start a run in a process of its own, kill it after each so many seconds, then let it end."""
    kills = 0
    for seconds in moments:
        process = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # it says a line when it begins, after all imports
        time.sleep(seconds)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
    subprocess.run([sys.executable, __file__, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return kills


def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bytes(tmp_path: Path) -> None:
    torch_threads = torch.get_num_threads()
    run(options(tmp_path / "whole"), CONFIG)
    kills = killed_and_gone_on_with(tmp_path / "killed", [0.3, 0.9])
    assert kills >= 1
    assert (tmp_path / "killed" / "model.pwfn").read_bytes() == (
        tmp_path / "whole" / "model.pwfn"
    ).read_bytes()
    assert Store(tmp_path / "killed" / "checkpoints", {}).paths()
    assert torch.get_num_threads() == torch_threads


def main() -> None:
    if not sys.argv[1].isdigit():
        run(
            options(Path(sys.argv[1]), resume=True, checkpoint_minutes=0.0),
            CONFIG,
            Lines(lambda line: print(line, flush=True)),
        )
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        began = time.monotonic()
        run(options(folder / "whole"), CONFIG)
        length = time.monotonic() - began
        numbers = random.Random(0)
        same = kills = 0
        for trial in range(int(sys.argv[1])):
            target = folder / f"killed-{trial}"
            kills += killed_and_gone_on_with(target, [numbers.uniform(0, 1.2 * length)])
            same += (target / "model.pwfn").read_bytes() == (folder / "whole" / "model.pwfn").read_bytes()
        print(f"{kills} of {trial + 1} runs were killed in mid-run; {same} ended in the same bytes")


if __name__ == "__main__":
    main()
