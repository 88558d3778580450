"""Progress on disk: it comes back as it was, from the newest file that is whole, into its own run only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwfn import Config, FileError, Progress, Result, compress
from pwfn.run.checkpoint import Store, from_plain, to_plain

# Sigma learns and fixed weights are drawn too: the most that can go astray.
CONFIG = Config().override(
    {
        "posterior.init": "powers",
        "posterior.learn_sigma": True,
        "posterior.noise_on_fixed": True,
        "clustering.b": 7,
        "schedule.fractions": [0.4, 0.8, 1.0],
        "schedule.epochs_per_round": 1.5,
        "training.learning_rate": 0.05,
        "training.sigma_learning_rate": 0.5,
    }
)


class Shuffled:
    """Batches whose order is a function of the epoch alone."""

    def __init__(self, batches: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
            for _ in range(batches)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(number)).tolist()
        return iter([self.batches[i] for i in order[start:]])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


def run(
    keep: Callable[[Callable[[], Progress], bool], None] | None = None, resume: Progress | None = None
) -> Result:
    return compress(network(), Shuffled(), Shuffled(), CONFIG, keep=keep, resume=resume)


def assert_same(a: Result, b: Result, folder: Path) -> None:
    a.save(folder / "a.pwfn", posterior="weight")
    b.save(folder / "b.pwfn", posterior="weight")
    assert (folder / "a.pwfn").read_bytes() == (folder / "b.pwfn").read_bytes()
    # As text: the centre of a sweep is NaN, which is not equal to itself.
    assert [repr(dataclasses.replace(done, seconds=0.0)) for done in a.rounds] == [
        repr(dataclasses.replace(done, seconds=0.0)) for done in b.rounds
    ]


class CutOffError(Exception):
    """The run was cut off."""


STEPS = 1 + 6 + 6 + 4  # 5 % of four batches, one and a half epochs twice, one epoch of polish


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_cut_off_at_any_step_ends_in_the_same_bytes(step: int, tmp_path: Path) -> None:
    store = Store(tmp_path, {"run": 1})
    taken = 0

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            store.save(progress())
            raise CutOffError

    with pytest.raises(CutOffError):
        run(keep)
    found = Store(tmp_path, {"run": 1}).newest()
    assert found is not None
    assert found.batches >= step
    assert_same(run(resume=found), run(), tmp_path)


HALF = CONFIG.override({"training.precision": "fp16"})


def steep(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients are too large for 16 bits at first: the scale is halved a few times."""
    return 64 * nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("step", [2, 7, 9, STEPS - 1])
def test_with_sixteen_bits_the_scale_of_the_loss_is_kept_too(step: int, tmp_path: Path) -> None:
    store, taken, scales = Store(tmp_path, {}), 0, []

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        nonlocal taken
        taken += 1
        now = progress()
        assert now.fitting is not None
        scales.append(now.fitting.scaler["scale"])
        if taken == step:
            store.save(now)
            raise CutOffError

    def half(**how: Any) -> Result:
        return compress(network(), Shuffled(), Shuffled(), HALF, steep, **how)

    with pytest.raises(CutOffError):
        half(keep=keep)
    assert min(scales) < 65536
    found = store.newest()
    assert found is not None
    assert found.fitting is not None
    assert found.fitting.scaler["scale"] == scales[-1]
    assert_same(half(resume=found), half(), tmp_path)


def test_keeping_progress_changes_nothing(tmp_path: Path) -> None:
    assert_same(
        run(keep=lambda progress, ends: None), run(keep=lambda progress, ends: progress() and None), tmp_path
    )


def test_progress_after_a_round_is_enough_too(tmp_path: Path) -> None:
    kept: list[dict[str, object]] = []
    whole = compress(
        network(), Shuffled(), Shuffled(), CONFIG, on_round=lambda progress: kept.append(to_plain(progress))
    )
    assert len(kept) == 3
    for plain in kept:
        assert_same(run(resume=from_plain(plain)), whole, tmp_path)


def stored(folder: Path, times: int) -> Store:
    """A folder with the progress after each of some steps."""
    store = Store(folder, {"model": "a", "settings": {"seed": 0, "b": 7}})
    taken = 0

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        nonlocal taken
        taken += 1
        store.save(progress())
        if taken == times:
            raise CutOffError

    with pytest.raises(CutOffError):
        run(keep)
    return store


def test_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    store = stored(tmp_path, 5)
    assert [path.name for path in store.paths()] == ["checkpoint-000004.pt", "checkpoint-000005.pt"]
    found = store.newest()
    assert found is not None
    assert found.batches == 5


@pytest.mark.parametrize("fault", ["torn", "flipped", "empty", "other"])
def test_a_damaged_newest_one_is_passed_over(fault: str, tmp_path: Path) -> None:
    store = stored(tmp_path, 3)
    newest = store.paths()[-1]
    content = newest.read_bytes()
    middle = len(content) // 2
    damaged = {
        "torn": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
        "other": b"something else altogether",
    }
    newest.write_bytes(damaged[fault])
    found = store.newest()
    assert found is not None
    assert found.batches == 2
    store.paths()[0].write_bytes(b"")
    assert store.newest() is None


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert Store(tmp_path, {}).newest() is None


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"model": "b", "settings": {"seed": 0, "b": 7}}, "model is 'a', not 'b'"),
        ({"model": "a", "settings": {"seed": 1, "b": 7}}, "settings.seed is 0, not 1"),
        ({"model": "a", "settings": {"seed": 0}}, "settings.b is 7, not None"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused_and_says_why(
    identity: dict[str, object], message: str, tmp_path: Path
) -> None:
    stored(tmp_path, 1)
    with pytest.raises(FileError, match=message) as caught:
        Store(tmp_path, identity).newest()
    assert "\n" not in str(caught.value)
