"""Runs in a folder: what they leave there, and that nothing which stops one changes how it ends.

``python tests/test_runs.py 20`` kills a run with SIGKILL at twenty random moments, goes on each time, and
compares the bytes; the tests do so a few times only.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import Call

from pwfn import Config, FileError, GaussianNetwork, Progress, PwfnError, cli, load
from pwfn.run import command as commands
from pwfn.run import folder as runs
from pwfn.run.checkpoint import Store
from pwfn.run.console import Lines
from pwfn.run.folder import run
from pwfn.run.interrupt import Keeper, StoppedError
from pwfn.run.options import RunOptions
from pwfn.run.scores import evaluate_file, summary_line
from pwfn.zoo import data
from pwfn.zoo.models import digits_resnet

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
    assert names == ["checkpoints", "config.toml", "log.jsonl", "model.pwfn", "observed.jsonl", "record.json"]
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


def test_an_ensemble_is_scored_as_a_network_is(whole: Path) -> None:
    """In evaluation mode: how the data are cut makes no difference, and it is the mean of the draws."""
    path = whole / "model.pwfn"
    found = [evaluate_file(path, options(whole, test_batch_size=n), samples=3, seed=5) for n in (7, 450)]
    compressed, model = load(path), digits_resnet().eval()
    generator, total = torch.Generator().manual_seed(5), torch.zeros(450, 10)
    tests = data.digits().test
    with torch.no_grad():
        for _ in range(3):
            model.load_state_dict(compressed.sample(generator))
            total += model(tests.images).softmax(1)
    expected = float((total.argmax(1) == tests.targets).double().mean())
    assert [facts["ensemble"] for facts in found] == [expected] * 2


def test_the_folder_of_another_run_is_not_written_over(whole: Path) -> None:
    before = (whole / "model.pwfn").read_bytes()
    with pytest.raises(FileError, match="holds a run already: go on with it by --resume"):
        run(options(whole), CONFIG)
    assert (whole / "model.pwfn").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"clustering.b": 8}, "settings.clustering.b is 'off', not 8"),
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


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint-000001.pt").write_bytes(b"torn")
    with pytest.raises(FileError, match="every checkpoint is damaged: remove them to begin again"):
        run(options(folder, resume=True), CONFIG)
    assert (folder / "checkpoints" / "checkpoint-000001.pt").read_bytes() == b"torn"


def test_what_a_killed_run_left_half_written_is_removed(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    halves = [
        ".model.pwfn.x.part",
        "checkpoints/.checkpoint-000002.pt.x.part",
        "states/.round-01.pwfn.x.part",
    ]
    for name in halves:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"half")
    run(options(folder, resume=True), CONFIG)
    assert not list(folder.rglob(".*"))
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()


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


# Ctrl-C where nothing is trained


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_ctrl_c_while_scoring_stops_before_the_next_batch(
    number: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored are the original, then each of three rounds, then the end."""
    calls = 0

    class Interrupting(Keeper):
        def between(self) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                signal.raise_signal(signal.SIGINT)
            super().between()

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(runs, "Keeper", Interrupting)
        with pytest.raises(StoppedError) as caught:
            run(options(folder, checkpoint_minutes=60), CONFIG)
    assert calls == number
    assert caught.value.exit_status == 130
    assert bool(Store(folder / "checkpoints", {}).paths()) == (number > 1)
    finish_as(whole, folder)


def test_a_second_ctrl_c_stops_at_once(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def long_work(net: GaussianNetwork, fraction: float) -> None:
        signal.raise_signal(signal.SIGTERM)
        reached.append("one signal waits for the next step")
        signal.raise_signal(signal.SIGINT)
        reached.append("the second does not")

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(GaussianNetwork, "fix", long_work)
        with pytest.raises(StoppedError, match="stopped by SIGINT"):
            run(options(folder), CONFIG)
    assert reached == ["one signal waits for the next step"]
    finish_as(whole, folder)


def finish_as(whole: Path, folder: Path) -> None:
    """Go on with a run: it ends in the same bytes, and its log tells everything once."""
    run(options(folder, resume=True), CONFIG)
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()
    assert told(folder) == told(whole)
    ours, theirs = (json.loads((place / "record.json").read_text()) for place in (folder, whole))
    for name in ("before", "after", "file_bytes", "unique", "entropy_bits", "identity"):
        assert ours[name] == theirs[name]
    assert len(ours["rounds"]) == 3


def told(folder: Path) -> list[tuple[object, ...]]:
    """The lines of a log without what differs from time to time."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    kept = ("event", "stage", "step", "round", "fraction", "metric", "unique", "batches", "rounds")
    return [tuple(line.get(name) for name in kept) for line in lines if line["event"] != "start"]


class KilledError(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 8))
def test_killed_around_any_checkpoint_the_log_and_the_states_are_complete(
    number: int, moment: str, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds make two checkpoints each, after their training and after their fixing; polish one."""
    folder, saved, save = tmp_path / "run", 0, Store.save

    def killing(store: Store, progress: Progress) -> Path:
        nonlocal saved
        saved += 1
        if saved == number and moment == "before":
            raise KilledError
        path = save(store, progress)
        if saved == number:
            raise KilledError
        return path

    with monkeypatch.context() as patched:
        patched.setattr(Store, "save", killing)
        with pytest.raises(KilledError):
            run(options(folder, checkpoint_minutes=60), KEPT)
    assert not (folder / "model.pwfn").exists()
    run(options(folder, resume=True), KEPT)
    assert (folder / "model.pwfn").read_bytes() == (kept / "model.pwfn").read_bytes()
    assert told(folder) == told(kept)
    for path in sorted((kept / "states").iterdir()):
        assert (folder / "states" / path.name).read_bytes() == path.read_bytes()


QUICK = CONFIG.override({"schedule.epochs_per_round": 0.1, "finish.polish_epochs": 0.1})
KEPT = QUICK.override({"target.keep_states": True, "clustering.rule": "nearest"})


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "run"
    run(options(folder, checkpoint_minutes=60), KEPT)
    return folder


# No space left


@pytest.mark.parametrize("name", [".checkpoint-000002", ".checkpoint-000005", ".model.pwfn", ".record.json"])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def full(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(FileError) as caught:
            run(options(folder, checkpoint_minutes=60), CONFIG)
    assert str(caught.value).startswith(f"{folder}")
    assert str(caught.value).endswith(": cannot be written: No space left on device")
    assert not list(folder.rglob("*.part"))
    assert Store(folder / "checkpoints", identity(folder)).newest() is not None
    finish_as(whole, folder)


def identity(folder: Path) -> dict[str, object]:
    first: dict[str, dict[str, object]] = json.loads((folder / "log.jsonl").read_text().splitlines()[0])
    return first["identity"]


def test_a_log_on_a_full_disk_is_one_sentence(whole: Path, tmp_path: Path) -> None:
    """The device /dev/full takes nothing."""
    log = tmp_path / "run" / "log.jsonl"

    def fill(line: str) -> None:
        if line.lstrip().startswith("1 "):
            log.rename(tmp_path / "log")
            log.symlink_to("/dev/full")

    with pytest.raises(FileError, match=r"log\.jsonl: cannot be written: No space left on device$"):
        run(options(log.parent), CONFIG, Lines(fill))
    log.unlink()
    (tmp_path / "log").rename(log)
    finish_as(whole, log.parent)


def test_a_checkpoint_larger_than_the_system_allows(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with a true limit of the system on the size of files, set after the first round."""
    folder, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(line: str) -> None:
        if line.lstrip().startswith("1 "):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))

    folder.mkdir()
    (folder / "settings.toml").write_text(CONFIG.to_toml())
    command = (
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--device", "cpu", "--batch-size", "64", "--checkpoint-minutes", "0.001"),
        *("--config", str(folder / "settings.toml"), "--out", str(folder)),
    )
    monkeypatch.setattr(commands, "view_for", lambda **_: Lines(limit))
    monkeypatch.setattr(sys, "argv", ["pwfn", *command])
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pwfn: {folder / 'checkpoints'}")
    assert said.endswith(": cannot be written: File too large\n")
    assert said.count("\n") == 1
    assert len(Store(folder / "checkpoints", {}).paths()) >= 1
    finish_as(whole, folder)


def test_curves_are_written_where_asked_for_and_change_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(options(folder, tensorboard=True), CONFIG)
    events = list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert b"round/entropy_bits" in events[0].read_bytes()
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()
    assert told(folder) == told(whole)


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


def test_what_is_kept_of_the_posterior_is_asked_for_and_checked_before_the_work(
    call: Call, tmp_path: Path
) -> None:
    names = ("compress", "--model", "digits_resnet", "--weights", "random", "--data", "digits")
    small = ("--set", "schedule.fractions=[1.0]", "--set", "training.steps_per_epoch=1", "--device", "cpu")
    found = {}
    for kind in ("none", "centre", "weight"):
        run_of = (*names, *small, "--out", str(tmp_path / kind), "--posterior", kind, "--json")
        status, out, _ = call(*run_of)
        assert status == 0
        found[kind] = json.loads(out)["file_bytes"]
        compressed = load(tmp_path / kind / "model.pwfn")
        assert (compressed.sigma is None) == (kind == "none")
        assert (compressed.weight_sigma is None) == (kind != "weight")
    assert found["none"] < found["centre"] < found["weight"]
    for words, method, sentence in (
        ("all", "pwfn", "pwfn: posterior is 'all': allowed is one of none, centre, weight\n"),
        ("weight", "lsq", "pwfn: posterior is 'weight': lsq has none to keep; leave it out\n"),
    ):
        run_of = (*names, "--out", str(tmp_path / "no"), "--posterior", words, "--method", method)
        assert call(*run_of) == (2, "", sentence)
        assert not (tmp_path / "no").exists()


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
        same = kills = trials = 0
        while kills < int(sys.argv[1]):  # some end before their moment has come
            target = folder / f"killed-{trials}"
            kills += killed_and_gone_on_with(target, [numbers.uniform(0, 1.2 * length)])
            same += (target / "model.pwfn").read_bytes() == (folder / "whole" / "model.pwfn").read_bytes()
            trials += 1
        print(f"{kills} of {trials} runs were killed in mid-run; {same} ended in the same bytes")


if __name__ == "__main__":
    main()
