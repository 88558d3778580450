"""Runs in a folder: what they leave there, and that nothing which stops one changes how it ends.

``python tests/test_runs.py 20`` kills a run with SIGKILL at twenty random moments, resumes it each time, and
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import digits_run as options
from conftest import Call

from pwfn import Config, FileError, GaussianNetwork, PwfnError, cli, load
from pwfn.file.storage import replacing
from pwfn.lab.uncertainty.file import evaluated
from pwfn.progress import Progress, Round
from pwfn.run import console
from pwfn.run import folder as runs
from pwfn.run.checkpoint import Keeper, StoppedError, Store
from pwfn.run.console import View
from pwfn.run.folder import run
from pwfn.run.lock import Lock
from pwfn.run.options import TrustOptions
from pwfn.zoo import data
from pwfn.zoo.models import digits_resnet

CONFIG = Config().override(
    {
        "posterior.init": "rms",  # at once: no forward passes
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.epochs_per_round": 0.5,
        "training.learning_rate": 0.01,
        "finish.polish_epochs": 0.3,
        "finish.reestimate_epochs": 0.2,
    }
)
QUICK = CONFIG.override({"schedule.epochs_per_round": 0.1, "finish.polish_epochs": 0.1})
KEPT = QUICK.override({"target.max_drop": 100.0, "fixing.rule": "nearest"})


class AfterFirstRound(View):
    """Does something after the first round."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def round(self, done: Round) -> None:
        if done.number == 1:
            self._action()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(options(folder), CONFIG)
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "run"
    run(options(folder, checkpoint_minutes=60), KEPT)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


def assert_resumes(folder: Path, whole: Path, config: Config = CONFIG) -> None:
    """Resume a run: it ends in the same bytes, and its log has every line once."""
    run(options(folder, resume=True), config)
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()
    assert logged(folder) == logged(whole)
    ours, theirs = record(folder), record(whole)
    for name in ("before", "after", "file_bytes", "unique", "entropy_bits", "identity"):
        assert ours[name] == theirs[name]
    assert len(ours["rounds"]) == 3


def logged(folder: Path) -> list[tuple[object, ...]]:
    """The lines of a log, without times and without how often the run was started."""
    names = ("event", "stage", "step", "round", "fraction", "metric", "unique", "batches", "rounds_done")
    return [tuple(line.get(name) for name in names) for line in lines(folder) if line["event"] != "start"]


# What a run leaves


def test_what_a_run_leaves(whole: Path) -> None:
    names = sorted(path.name for path in whole.iterdir())
    assert names == ["checkpoints", "config.toml", "log.jsonl", "model.pwfn", "record.json", "trace.jsonl"]
    assert len(list((whole / "checkpoints").iterdir())) == 2
    assert Config.load(whole / "config.toml") == CONFIG
    assert [line["event"] for line in lines(whole)] == ["start", *["epoch", "round"] * 3, "epoch", "end"]
    assert lines(whole)[-2]["stage"] == "polish"
    facts = record(whole)
    assert facts["file_bytes"] == (whole / "model.pwfn").stat().st_size
    assert facts["weights"] == load(whole / "model.pwfn").layout.size
    assert [done["fraction"] for done in facts["rounds"]] == [0.5, 0.9, 1.0]


def test_log_and_record_tell_the_same(kept: Path) -> None:
    facts = record(kept)
    for event, name in (("round", "rounds"), ("state", "states")):
        found = [line for line in lines(kept) if line["event"] == event]
        assert len(found) == 3
        for line, listed in zip(found, facts[name], strict=True):
            assert listed.items() <= line.items()
    for state in facts["states"]:
        path = kept / "states" / f"round-{state['round']:02d}.pwfn"
        assert path.stat().st_size == state["file_bytes"]


def test_figures_are_those_of_the_file(whole: Path) -> None:
    """An ensemble too is scored in evaluation mode: how the data are batched makes no difference."""
    path = whole / "model.pwfn"
    asked = TrustOptions(samples=3, seed=5)
    found = [evaluated([path], options(whole, test_batch_size=n), asked)[0] for n in (7, 450)]
    for facts in found:
        assert facts["after"]["metric"] == record(whole)["after"]["metric"]
    assert evaluated([path], options(whole), TrustOptions(samples=0))[0]["after"] == record(whole)["after"]
    compressed, model = load(path), digits_resnet().eval()
    generator, total = torch.Generator().manual_seed(5), torch.zeros(450, 10)
    tests = data.digits().test
    with torch.no_grad():
        for _ in range(3):
            model.load_state_dict(compressed.sample(generator))
            total += model(tests.images).softmax(1)
    expected = float((total.argmax(1) == tests.targets).double().mean())
    assert [facts["ensemble"] for facts in found] == [expected] * 2


def test_curves_are_written_on_request_and_change_nothing(whole: Path, tmp_path: Path) -> None:
    run(options(tmp_path, tensorboard=True), CONFIG)
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert b"round/entropy_bits" in events.read_bytes()
    assert (tmp_path / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()
    assert logged(tmp_path) == logged(whole)


def test_the_posterior_of_the_file_is_chosen_and_checked_before_the_work(call: Call, tmp_path: Path) -> None:
    command = ("compress", "--model", "digits_resnet", "--weights", "random", "--data", "digits")
    small = ("--set", "schedule.fractions=[1.0]", "--set", "training.steps_per_epoch=1", "--device", "cpu")
    found = {}
    for kind in ("none", "centre", "weight"):
        status, out, _ = call(*command, *small, "--out", str(tmp_path / kind), "--posterior", kind, "--json")
        assert status == 0
        path = tmp_path / kind / "model.pwfn"
        found[kind] = json.loads(out)["file_bytes"]
        assert found[kind] == path.stat().st_size
        assert (load(path).sigma is None) == (kind == "none")
        assert (load(path).weight_sigma is None) == (kind != "weight")
    assert found["none"] < found["centre"] < found["weight"]
    for kind, method in (("all", "pwfn"), ("weight", "lsq")):
        folder = tmp_path / "no"
        status, out, err = call(*command, "--out", str(folder), "--posterior", kind, "--method", method)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"pwfn: posterior is '{kind}': ")
        assert not folder.exists()


# What is refused


def test_the_folder_of_another_run_is_not_overwritten(whole: Path) -> None:
    before = (whole / "model.pwfn").read_bytes()
    with pytest.raises(FileError, match="already holds a run"):
        run(options(whole), CONFIG)
    assert (whole / "model.pwfn").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "config", "difference"),
    [
        ({}, {"fixing.grid_exponent": 8}, "settings.fixing.grid_exponent is 'off', not 8"),
        ({"batch_size": 32}, {}, "data.batch_size is 64, not 32"),
        ({"limit": 700}, {}, "data.content is"),
    ],
)
def test_a_run_of_other_settings_or_data_does_not_resume_this_one(
    changes: dict[str, object], config: dict[str, object], difference: str, whole: Path
) -> None:
    with pytest.raises(FileError, match=difference):
        run(options(whole, resume=True, **changes), CONFIG.override(config))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again_unasked(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "checkpoint-000001.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"torn")
    with pytest.raises(FileError, match="every checkpoint is damaged"):
        run(options(tmp_path, resume=True), CONFIG)
    assert path.read_bytes() == b"torn"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "digits_resnett"}, "digits_resnet"),
        ({"data": "digit"}, "digits"),
        ({"weights": "missing.safetensors"}, "missing.safetensors"),
        ({"weights": "pretrained"}, "--weights"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"model": "cifar_resnet20"}, "channel"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_random_states_alone(
    change: dict[str, object], named: str, tmp_path: Path
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(PwfnError, match=named) as caught:
        run(options(tmp_path / "run", **change), CONFIG)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


# Stopped by a signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_the_end_is_the_same(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    interrupt = AfterFirstRound(lambda: signal.raise_signal(number))
    with pytest.raises(StoppedError, match=f"{number.name}.*--resume") as caught:
        run(options(tmp_path, checkpoint_minutes=60), CONFIG, interrupt)
    assert caught.value.exit_status == 128 + number
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert_resumes(tmp_path, whole)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_ctrl_c_while_scoring_stops_before_the_next_batch(
    number: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored are the original, then each of three rounds, then the end."""
    calls = 0

    class Interrupting(Keeper):
        def before_batch(self) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                signal.raise_signal(signal.SIGINT)
            super().before_batch()

    with monkeypatch.context() as patched:
        patched.setattr(runs, "Keeper", Interrupting)
        with pytest.raises(StoppedError):
            run(options(tmp_path, checkpoint_minutes=60), CONFIG)
    assert calls == number
    assert bool(Store(tmp_path / "checkpoints", {}).paths()) == (number > 1)
    assert_resumes(tmp_path, whole)


def test_a_second_ctrl_c_stops_at_once(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def long_work(net: GaussianNetwork, fraction: float) -> None:
        signal.raise_signal(signal.SIGTERM)
        reached.append("one signal waits for the next step")
        signal.raise_signal(signal.SIGINT)
        reached.append("the second does not")

    with monkeypatch.context() as patched:
        patched.setattr(GaussianNetwork, "fix", long_work)
        with pytest.raises(StoppedError, match="SIGINT"):
            run(options(tmp_path), CONFIG)
    assert reached == ["one signal waits for the next step"]
    assert_resumes(tmp_path, whole)


def test_another_number_of_threads_is_told_when_a_run_resumes(tmp_path: Path) -> None:
    """At once, and the record has both: that of the machine, and the warning."""
    said: list[str] = []

    class Listening(AfterFirstRound):
        def say(self, line: str) -> None:
            said.append(line)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(StoppedError):
            run(options(tmp_path), QUICK, AfterFirstRound(lambda: signal.raise_signal(signal.SIGINT)))
        assert lines(tmp_path)[0]["threads"] == 2
        torch.set_num_threads(1)
        run(options(tmp_path, resume=True), QUICK, Listening(lambda: None))
    finally:
        torch.set_num_threads(before)
    assert "2 threads" in " ".join(said)
    assert record(tmp_path)["machine"]["threads"] == 1
    assert any("2 threads" in sentence for sentence in record(tmp_path)["warnings"])


# Killed


class KilledError(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@pytest.mark.parametrize(
    ("number", "moment"), [*((n, "before") for n in range(1, 8)), (1, "after"), (2, "after"), (7, "after")]
)
def test_killed_around_any_checkpoint_the_log_and_the_states_are_complete(
    number: int, moment: str, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds make two checkpoints each, after their training and after their fixing; polish one."""
    saved, save = 0, Store.save

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
            run(options(tmp_path, checkpoint_minutes=60), KEPT)
    assert not (tmp_path / "model.pwfn").exists()
    assert_resumes(tmp_path, kept, KEPT)
    for path in (kept / "states").iterdir():
        assert (tmp_path / "states" / path.name).read_bytes() == path.read_bytes()


def test_what_a_killed_run_left_half_written_is_removed_and_a_finished_run_resumes_to_the_same_end(
    whole: Path, tmp_path: Path
) -> None:
    for name in ("model.pwfn", "log.jsonl", "checkpoints/checkpoint-000002.pt", "states/round-01.pwfn"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(tmp_path / name) as half:
            pass
        (tmp_path / name).rename(half)  # as if the process had been killed before it was renamed
    assert len(list(tmp_path.rglob(".*.part"))) == 4
    for _ in range(2):  # from the start, as there is no checkpoint; then from the end
        assert_resumes(tmp_path, whole)
        assert not list(tmp_path.rglob(".*"))


def test_a_run_removes_no_file_of_others(tmp_path: Path) -> None:
    names = (".mine.part", ".model.pwfn.part", ".a.txt.abcdefgh.part", "photos/.model.pwfn.abcdefgh.part")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    run(options(tmp_path), QUICK)
    assert all((tmp_path / name).read_text() == name for name in names)


# Two runs in one folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_folder_is_refused_while_the_first_is_at_work(resume: bool, tmp_path: Path) -> None:
    said: list[str] = []

    def second() -> None:
        for path in (tmp_path / "checkpoints").glob("*.pt"):  # as early in the first run as can be
            path.unlink()
        with pytest.raises(FileError) as caught:
            run(options(tmp_path, resume=resume), QUICK)
        said.append(str(caught.value))

    first = run(options(tmp_path), QUICK, AfterFirstRound(second))
    assert said[0].startswith(f"{tmp_path}: ")
    assert f"process {os.getpid()} on " in said[0]
    assert "\n" not in said[0]
    assert load(tmp_path / "model.pwfn").values().equal(first.compressed.values())
    run(options(tmp_path, resume=True), QUICK)  # the first has let go


def test_a_killed_run_leaves_no_lock_even_if_a_child_of_it_lives_on(tmp_path: Path) -> None:
    """Workers that read data are such children."""
    program = (
        "import os, sys, time; from pathlib import Path; from pwfn.run.lock import Lock\n"
        "Lock(Path(sys.argv[1])).take(); child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(FileError, match=f"process {process.pid} on "):
            Lock(tmp_path).take()
        process.kill()
        process.wait()
        with Lock(tmp_path) as lock:
            lock.take()
        assert not list((tmp_path / "checkpoints").iterdir())
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_where_nothing_can_be_locked_a_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    run(options(tmp_path), QUICK)
    assert any("cannot be locked" in line for line in caplog.messages)


def killed_and_resumed(folder: Path, moments: list[float]) -> int:
    """Start a run in its own process, kill it after each of these seconds, then let it end; counts kills."""
    kills = 0
    for seconds in moments:
        process = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # it prints a line when it begins, after all imports
        time.sleep(seconds)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
    subprocess.run([sys.executable, __file__, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return kills


def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, [0.3, 0.9]) >= 1
    assert (tmp_path / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()


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
        with pytest.raises(FileError, match=r"No space left on device$") as caught:
            run(options(folder, checkpoint_minutes=60), CONFIG)
    assert str(caught.value).startswith(f"{folder}")
    assert not list(folder.rglob("*.part"))
    assert Store(folder / "checkpoints", lines(folder)[0]["identity"]).newest() is not None
    assert_resumes(folder, whole)


def test_a_log_on_a_full_disk_is_one_sentence(whole: Path, tmp_path: Path) -> None:
    """The device /dev/full takes nothing."""
    log = tmp_path / "run" / "log.jsonl"

    def fill() -> None:
        log.rename(tmp_path / "log")
        log.symlink_to("/dev/full")

    with pytest.raises(FileError, match=r"log\.jsonl: .*No space left on device$"):
        run(options(log.parent), CONFIG, AfterFirstRound(fill))
    log.unlink()
    (tmp_path / "log").rename(log)
    assert_resumes(log.parent, whole)


def test_a_checkpoint_larger_than_the_system_allows(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with a true limit of the system on the size of files, set after the first round."""
    folder, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))

    (tmp_path / "settings.toml").write_text(CONFIG.to_toml())
    command = (
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--device", "cpu", "--batch-size", "64", "--checkpoint-minutes", "0.001"),
        *("--config", str(tmp_path / "settings.toml"), "--out", str(folder)),
    )
    monkeypatch.setattr(console, "ConsoleView", lambda: AfterFirstRound(limit))
    monkeypatch.setattr(sys, "argv", ["pwfn", *command])
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pwfn: {folder / 'checkpoints'}")
    assert said.endswith(": File too large\n")
    assert said.count("\n") == 1
    assert len(Store(folder / "checkpoints", {}).paths()) >= 1
    assert_resumes(folder, whole)


def main() -> None:
    if not sys.argv[1].isdigit():
        print("imported", flush=True)
        run(options(Path(sys.argv[1]), resume=True, checkpoint_minutes=0.0), CONFIG)
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
            kills += killed_and_resumed(target, [numbers.uniform(0, 1.2 * length)])
            same += (target / "model.pwfn").read_bytes() == (folder / "whole" / "model.pwfn").read_bytes()
            trials += 1
        print(f"{kills} of {trials} runs were killed in mid-run; {same} ended in the same bytes")


if __name__ == "__main__":
    main()
