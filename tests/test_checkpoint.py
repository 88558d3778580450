"""Progress on disk: it reads back as it was, from the newest intact file, and into its own run only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Shuffled
from cases import normalised_classifier as network
from torch import Tensor, nn

from pwfn import Config, ConfigError, FileError, Result, compress
from pwfn.progress import Progress
from pwfn.run.checkpoint import Store, from_plain, to_plain

# Sigma is trained and fixed weights are drawn too, so that every part of the state matters.
CONFIG = Config().override(
    {
        "posterior.init": "powers",
        "fixing.grid_exponent": 7,
        "schedule.fractions": [0.4, 0.8, 1.0],
        "schedule.epochs_per_round": 1.5,
        "training.learning_rate": 0.05,
        "training.sigma_learning_rate": 0.5,
    }
)
STEPS = 1 + 6 + 6 + 4  # 5 % of four batches, one and a half epochs twice, one epoch of polish
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"training.optimizer": "adamw"},
    "cosine": {"training.scheduler": "cosine"},
    "accumulation": {"training.accumulate": 2},
}
PLAIN, HALF = VARIANTS["accumulation"], {"training.precision": "fp16"}


class CutOffError(Exception):
    """The run was cut off."""


def run(config: Config = CONFIG, **how: Any) -> Result:
    return compress(network(), Shuffled(), Shuffled(), config, **how)


@pytest.fixture(scope="module")
def whole() -> Result:
    return run()


def cut_off(folder: Path, step: int, each: bool = False, **how: Any) -> Store:
    """The checkpoints of a run that ended after a step: one of the last step, or one of each."""
    store, taken = Store(folder, {"model": "a", "settings": {"seed": 0, "b": 7}}), 0

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        nonlocal taken
        taken += 1
        if each or taken == step:
            store.save(progress())
        if taken == step:
            raise CutOffError

    with pytest.raises(CutOffError):
        run(keep=keep, **how)
    return store


def newest(store: Store) -> Progress:
    found = store.newest()
    assert found is not None
    return found


def assert_same(a: Result, b: Result, folder: Path) -> None:
    a.save(folder / "a.pwfn", posterior="weight")
    b.save(folder / "b.pwfn", posterior="weight")
    assert (folder / "a.pwfn").read_bytes() == (folder / "b.pwfn").read_bytes()
    assert figures(a) == figures(b)
    assert (a.choice, a.states, a.after) == (b.choice, b.states, b.after)


def figures(result: Result) -> list[str]:
    """Of the rounds; as text, since the centre of a sweep is NaN, which is not equal to itself."""
    return [repr(dataclasses.replace(done, seconds=0.0)) for done in result.rounds]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_cut_off_at_any_step_ends_in_the_same_bytes(step: int, whole: Result, tmp_path: Path) -> None:
    found = newest(cut_off(tmp_path, step))
    assert found.batches >= step
    assert_same(run(resume=found), whole, tmp_path)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_state_of_every_optimiser_is_kept(name: str, tmp_path: Path) -> None:
    config = CONFIG.override(VARIANTS[name])
    found = newest(cut_off(tmp_path, 4, config=config))
    assert_same(run(config, resume=found), run(config), tmp_path)


def steep(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients are too large for fp16 at first: the scale is halved a few times."""
    return 64 * nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("step", [2, 9, STEPS - 1])
def test_with_fp16_the_scale_of_the_loss_is_kept_too(step: int, tmp_path: Path) -> None:
    how = {"config": CONFIG.override({"training.precision": "fp16"}), "loss_fn": steep}
    found = newest(cut_off(tmp_path, step, **how))
    assert found.phase is not None
    assert found.phase.scaler["scale"] < 65536
    assert_same(run(resume=found, **how), run(**how), tmp_path)


def test_with_fp16_a_round_begins_with_the_scale_that_the_last_one_found(tmp_path: Path) -> None:
    """Too large a scale costs the first steps of a round, which are skipped."""
    how = {"config": CONFIG.override({"training.precision": "fp16"}), "loss_fn": steep}
    taken: list[Progress] = []
    after_rounds: list[Progress] = []
    whole = run(keep=lambda progress, ends: taken.append(progress()), on_round=after_rounds.append, **how)
    scales = [progress.phase.scaler["scale"] for progress in taken if progress.phase]
    assert len(scales) == STEPS
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] < 65536
    for progress in after_rounds:
        assert_same(run(resume=from_plain(to_plain(progress)), **how), whole, tmp_path)


@pytest.mark.parametrize("name", ["flat", *VARIANTS])
def test_settings_of_the_optimiser_that_change_in_a_round_hold_from_there_on(
    name: str, tmp_path: Path
) -> None:
    """A learning rate of nothing moves nothing; weight decay is felt."""
    variants = {"flat": {}, **VARIANTS}
    config = CONFIG.override(
        {**variants[name], "schedule.fractions": [1.0], "schedule.epochs_per_round": [4]}
    )
    found = newest(cut_off(tmp_path, 3, config=config))
    assert found.network is not None

    def moved(**training: float) -> Tensor:
        changes = {f"training.{key}": value for key, value in training.items()}
        last: list[Progress] = []
        run(config.override(changes), resume=found, keep=lambda now, ends: last.append(now()))
        steps = [now for now in last if now.phase and not now.rounds]
        return steps[-1].network["free_mu"] - found.network["free_mu"]

    assert moved(learning_rate=1e-30, weight_decay=0.0, sigma_learning_rate=1e-30).abs().max() < 1e-9
    assert not torch.equal(moved(weight_decay=0.0), moved(weight_decay=1.0))


@pytest.mark.parametrize(
    ("began", "goes_on"),
    [({}, VARIANTS["adamw"]), (VARIANTS["adamw"], {}), ({}, PLAIN), (PLAIN, {})],
)
def test_in_mid_round_another_optimiser_is_one_sentence(
    began: dict[str, Any], goes_on: dict[str, Any], tmp_path: Path
) -> None:
    found = newest(cut_off(tmp_path, 4, config=CONFIG.override(began)))
    with pytest.raises(ConfigError, match="step") as caught:
        run(CONFIG.override(goes_on), resume=found)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("began", "goes_on"), [({}, HALF), (HALF, {})])
def test_in_mid_round_another_precision_resumes(
    began: dict[str, Any], goes_on: dict[str, Any], tmp_path: Path
) -> None:
    found = newest(cut_off(tmp_path, 4, config=CONFIG.override(began)))
    assert run(CONFIG.override(goes_on), resume=found).compressed.layout.size


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of torch, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_run_that_resumes_with_another_number_of_threads_says_so(
    threads: Callable[[int], None], tmp_path: Path
) -> None:
    """Sums are added up by threads, and may round differently. Of the same number, nothing is said."""
    threads(2)
    usual, found = run().warnings, newest(cut_off(tmp_path, 9))
    assert run(resume=found).warnings == usual
    threads(1)
    told: list[Progress] = []
    (more,) = set(run(resume=found, on_round=told.append).warnings) - set(usual)
    assert "2 threads" in more
    assert "OMP_NUM_THREADS=2" in more
    assert run(resume=told[-1]).warnings.count(more) == 1
    old = dataclasses.replace(found, threads=0)  # of a checkpoint that does not know
    assert run(resume=old).warnings == usual


def test_taking_progress_changes_nothing_and_progress_after_a_round_is_enough(
    whole: Result, tmp_path: Path
) -> None:
    after_rounds: list[Progress] = []
    assert_same(
        run(keep=lambda progress, ends: progress() and None, on_round=after_rounds.append), whole, tmp_path
    )
    assert len(after_rounds) == 3
    for progress in after_rounds:
        assert_same(run(resume=from_plain(to_plain(progress))), whole, tmp_path)


def test_progress_reads_back_as_it_was(tmp_path: Path) -> None:
    """With states and a choice, in the middle of polish: nothing in it is empty."""
    config = CONFIG.override({"target.max_drop": 3.0})
    taken: list[Progress] = []
    run(config, keep=lambda progress, ends: taken.append(progress()))
    store = Store(tmp_path, {})
    store.save(taken[-1])
    read = newest(store)
    for item in dataclasses.fields(Progress):
        value = getattr(taken[-1], item.name)
        assert value is not None, item.name
        assert repr(getattr(read, item.name)) == repr(value), item.name
    assert {type(part) for part in read.rounds[1].fix.steps} == {type(taken[-1].rounds[1].fix.steps[0])}
    assert read.states == taken[-1].states


def test_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    store = cut_off(tmp_path, 5, each=True)
    assert [path.name for path in store.paths()] == ["checkpoint-000004.pt", "checkpoint-000005.pt"]
    assert newest(store).batches == 5


@pytest.mark.parametrize("fault", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_skipped(fault: str, tmp_path: Path) -> None:
    store = cut_off(tmp_path, 3, each=True)
    path = store.paths()[-1]
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "truncated": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
        "foreign": b"something else altogether",
    }
    path.write_bytes(damaged[fault])
    assert newest(store).batches == 2
    store.paths()[0].write_bytes(b"")
    assert store.newest() is None


def test_a_file_of_another_version_is_one_sentence(tmp_path: Path) -> None:
    store = cut_off(tmp_path, 1)
    path = store.paths()[0]
    path.write_bytes(b"PWFNCKP4" + path.read_bytes()[8:])
    with pytest.raises(FileError, match="another version of pwfn") as caught:
        store.newest()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert Store(tmp_path, {}).newest() is None


@pytest.mark.parametrize(
    ("identity", "difference"),
    [
        ({"model": "b", "settings": {"seed": 0, "b": 7}}, "model is 'a', not 'b'"),
        ({"model": "a", "settings": {"seed": 1, "b": 7}}, "settings.seed is 0, not 1"),
        ({"model": "a", "settings": {"seed": 0}}, "settings.b is 7, not None"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused_with_the_difference(
    identity: dict[str, object], difference: str, tmp_path: Path
) -> None:
    cut_off(tmp_path, 1)
    with pytest.raises(FileError, match=difference) as caught:
        Store(tmp_path, identity).newest()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("section", "name"), [("training", "clip_norm"), ("target", None)])
def test_a_setting_that_an_earlier_version_did_not_have_had_its_default(
    section: str, name: str | None, tmp_path: Path
) -> None:
    """A setting, or all of a section."""
    settings = Config().to_dict()
    if name is None:
        del settings[section]
    else:
        del settings[section][name]
    Store(tmp_path, {"settings": settings}).save(Progress(batches=3))
    assert newest(Store(tmp_path, {"settings": Config().to_dict()})).batches == 3
    other = Config().override({"training.clip_norm": 0.5, "target.bits": 3.0}).to_dict()
    with pytest.raises(FileError, match=rf"settings\.{section}\.\w+ is"):
        Store(tmp_path, {"settings": other}).newest()


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    """A pickle that names a function is refused by torch, whatever its checksum."""
    import hashlib
    import io
    import pickle

    buffer = io.BytesIO()
    torch.save({"progress": print}, buffer)
    content = buffer.getvalue()
    head = cut_off(tmp_path, 1).paths()[0].read_bytes()[:8]
    (tmp_path / "checkpoint-000002.pt").write_bytes(head + hashlib.sha256(content).digest() + content)
    with pytest.raises(pickle.UnpicklingError):
        Store(tmp_path, {}).newest()
