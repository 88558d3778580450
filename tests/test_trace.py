"""Traces of a run: counted right, the same after a kill, and recording them changes nothing."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import Shuffled, digits_run
from cases import normalised_classifier as network
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import CONFIG, STEPS, CutOffError
from test_runs import CONFIG as RUN_CONFIG
from test_runs import KilledError
from torch import Tensor, nn

from pwfn import Config, GaussianNetwork, Result, compress
from pwfn.bayes.method import WeightState
from pwfn.evaluate import trace
from pwfn.evaluate.trace import (
    BINS_PER_OCTAVE,
    HIGHEST_BIN,
    LOWEST_BIN,
    MOST_CENTRES,
    MOST_PER_LAYER,
    MOST_SAMPLED,
    Histogram,
    Moment,
    Trace,
    after_fixing,
    at_start,
    before_fixing,
    sample_positions,
    sigma_histogram,
)
from pwfn.fixing.record import FixRecord, Move
from pwfn.lab.baselines.baseline import Baseline
from pwfn.layout import Entry, Kind, Layout
from pwfn.progress import Progress
from pwfn.run.checkpoint import Store, from_plain, to_plain
from pwfn.run.folder import run
from pwfn.zoo import models

SIGMA_DIFFERS = Config().override({"posterior.init": "powers", "fixing.grid_exponent": 7})
"""From weight to weight, as in the paper, so that a mix-up would show."""

# Sigmas in bins


def histogram(sigma: Tensor, fixed: Tensor | None = None) -> Histogram | None:
    layout = Layout.of(nn.Linear(sigma.numel(), 1, bias=False))
    fixed = torch.zeros_like(sigma, dtype=torch.bool) if fixed is None else fixed
    return sigma_histogram(layout, WeightState(torch.zeros_like(sigma), sigma, fixed))


def test_every_power_of_two_is_the_lower_end_of_a_bin() -> None:
    found = histogram(torch.tensor([2.0**-30, 2.0**-29, 0.25, 0.5]))
    assert found is not None
    filled = {found.first + i: count for i, count in enumerate(found.counts) if count}
    assert filled == {e * BINS_PER_OCTAVE: 1 for e in (-30, -29, -2, -1)}


def test_bins_are_those_of_the_logarithm_and_hold_every_free_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    sigma = (torch.rand(2000, dtype=torch.float64, generator=generator) * 24 - 25).exp2()
    fixed = torch.rand(2000, generator=generator) < 0.3
    found = histogram(sigma, fixed)
    assert found is not None
    expected = Counter(math.floor(8 * math.log2(s)) for s in sigma[~fixed].tolist())
    assert {found.first + i: c for i, c in enumerate(found.counts) if c} == expected
    assert found.total == int((~fixed).sum())
    assert min(found.counts[0], found.counts[-1]) > 0


def test_the_end_bins_hold_what_lies_beyond_them() -> None:
    found = histogram(torch.tensor([0.0, 2.0**-60, 1e6]))
    assert found is not None
    assert (found.first, found.counts[0]) == (LOWEST_BIN, 2)
    assert (found.counts[-1], found.first + len(found.counts) - 1) == (1, HIGHEST_BIN)
    assert histogram(torch.ones(3), torch.ones(3, dtype=torch.bool)) is None  # no free weight


# Centres and moves


def test_after_a_fixing_the_codebook_is_that_of_the_fixed_weights() -> None:
    """Nine weights at 1/4, two at 1/2, and one still free."""
    layout = Layout.of(nn.Linear(3, 3))
    mu = torch.tensor([0.25, 0.25, 0.5, 0.25, 0.5, 0.3, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25])
    fixed = torch.ones(12, dtype=torch.bool)
    fixed[5] = False
    record = FixRecord(0.9, 11, (), (Move(0.25, 9, 0.123456789, 1.0, 2), Move(0.5, 2, 0.0, 0.0, 0)))
    seen = after_fixing(3, record, layout, WeightState(mu, torch.full((12,), 0.25), fixed))
    assert (seen.moment, seen.round, seen.fraction) == (Moment.AFTER, 3, 11 / 12)
    assert (seen.codebook, seen.centres) == (((0.25, 9), (0.5, 2)), 2)
    assert seen.sigma == Histogram(-2 * BINS_PER_OCTAVE, (1,))
    assert seen.moves == (Move(0.25, 9, 0.123457, 1.0, 2), Move(0.5, 2, 0.0, 0.0, 0))
    assert seen.sample == ()
    assert repr(seen) == "Trace(after, round=3, fraction=0.916667, centres=2)"


def test_only_the_most_frequent_centres_are_kept() -> None:
    count = MOST_CENTRES + 76
    layout = Layout.of(nn.Linear(2 * count - 100, 1, bias=False))
    values = torch.arange(count).float() / 16
    mu = torch.cat((values, values[100:]))  # the first hundred occur once, the others twice
    seen = after_fixing(1, FixRecord(1.0, mu.numel()), layout, WeightState(mu))
    assert seen.centres == count
    expected = {**dict.fromkeys(values[:24].tolist(), 1), **dict.fromkeys(values[100:].tolist(), 2)}
    assert seen.codebook == tuple(sorted(expected.items()))  # of equally frequent ones the smallest


def test_before_a_fixing_only_sigmas_are_recorded_and_nothing_without_them() -> None:
    net = GaussianNetwork(nn.Linear(4, 2), Config())
    seen = before_fixing(2, net.layout, net.state())
    assert seen is not None
    assert seen.sigma is not None
    assert seen.sigma.total == 10
    assert seen == Trace(Moment.BEFORE, 2, 0.0, sigma=seen.sigma)
    plain = Baseline(nn.Linear(4, 2), Config(method="baseline"))
    assert before_fixing(2, plain.layout, plain.state()) is None
    assert at_start(plain.layout, plain.state()).centres == 10


# The sample


@given(st.integers(1, 5000), st.integers(1, 400), st.text(max_size=5))
def test_there_is_one_position_in_every_interval(size: int, most: int, name: str) -> None:
    entry = Entry(name, (size,), torch.float32, 0, "", "Linear", Kind.WEIGHT)
    found = sample_positions(entry, most).tolist()
    assert found == sample_positions(entry, most).tolist()
    count = min(size, most)
    edges = [i * size // count for i in range(count + 1)]
    intervals = itertools.pairwise(edges)
    assert all(low <= place < high for place, (low, high) in zip(found, intervals, strict=True))


def test_the_same_weights_are_sampled_at_the_end_and_no_random_state_is_used() -> None:
    torch.manual_seed(1)
    net = GaussianNetwork(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 4)), SIGMA_DIFFERS)
    mu = net.mu.detach().clone()
    state = torch.get_rng_state()
    first = at_start(net.layout, net.state())
    assert torch.equal(torch.get_rng_state(), state)
    last = after_fixing(1, net.fix(1.0), net.layout, net.state())
    assert [sample.name for sample in first.sample] == ["0.weight", "1.weight"]  # no biases
    for entry, one, other in zip(net.layout.entries[::2], first.sample, last.sample, strict=True):
        at = sample_positions(entry, MOST_PER_LAYER)
        assert torch.tensor(one.mu).allclose(mu[entry.span][at], rtol=1e-5, atol=0)
        assert torch.tensor(other.mu).allclose(net.mu[entry.span][at], rtol=1e-5, atol=0)
        assert torch.tensor(other.sigma).allclose(net.sigma[entry.span][at], rtol=1e-5, atol=0)


def test_traces_of_large_and_of_deep_networks_are_small() -> None:
    with torch.device("meta"):
        large = Layout.of(models.create("cifar_resnet18"))
    deep = Layout.of(nn.Sequential(*(nn.Linear(20, 20) for _ in range(100))))
    seen = []
    for layout in (large, deep):
        mu = torch.linspace(-0.2, 0.2, layout.size)
        seen.append(
            at_start(layout, WeightState(mu, mu.abs() / 16, torch.zeros(layout.size, dtype=torch.bool)))
        )
    assert large.size == 11_164_362
    assert 2 * len(seen[0].to_line()) < 500_000
    assert {len(sample.mu) for sample in seen[1].sample} == {MOST_SAMPLED // 100}


# In a run


def whole_run(config: Config = CONFIG, **how: object) -> tuple[Result, list[Trace]]:
    kept: list[Trace] = []

    def on_round(progress: Progress) -> None:
        kept[:] = progress.traces

    return compress(network(), Shuffled(), Shuffled(), config, on_round=on_round, **how), kept  # type: ignore[arg-type]


def test_a_run_records_its_start_and_both_sides_of_every_fixing() -> None:
    result, seen = whole_run()
    both = [(moment, number) for number in (1, 2, 3) for moment in (Moment.BEFORE, Moment.AFTER)]
    assert [(each.moment, each.round) for each in seen] == [(Moment.START, 0), *both]
    for done, (before, after) in zip(result.rounds, [each.traces for each in result.rounds], strict=True):
        assert after.centres == done.fixed.unique
        assert sum(count for _, count in after.codebook) == done.fix.fixed == done.fixed.weights
        assert [(m.centre, m.count) for m in after.moves] == [(m.centre, m.count) for m in done.fix.moves]
        assert before.sigma is not None
        size = result.compressed.layout.size
        assert before.sigma.total == size - round(before.fraction * size)
    assert dict(seen[-1].codebook) == dict(Counter(result.compressed.values().tolist()))
    assert seen[-1].sigma is None  # nothing is free
    for each in seen:
        assert from_plain(json.loads(each.to_line()), Trace) == each
        assert "\n" not in each.to_line()


@pytest.mark.parametrize("step", range(1, STEPS + 1, 3))
def test_interrupted_at_a_step_the_rest_of_the_run_records_the_same(step: int, tmp_path: Path) -> None:
    store, taken = Store(tmp_path, {}), 0

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            store.save(progress())
            raise CutOffError

    with pytest.raises(CutOffError):
        whole_run(keep=keep)
    found = store.newest()
    assert found is not None
    kept = list(found.traces)
    seen = whole_run()[1]
    assert kept == seen[: len(kept)]
    assert kept
    again = [each for done in whole_run(resume=found)[0].rounds for each in done.traces]
    assert again == seen[1:]


def test_a_round_that_fails_after_its_fixing_is_not_recorded_twice() -> None:
    calls = 0

    def before_batch() -> None:
        nonlocal calls
        calls += 1
        if calls == 4 * len(Shuffled().batches) - 1:  # of the original, of two rounds, and of the third
            raise CutOffError

    with pytest.raises(CutOffError) as caught:
        whole_run(before_batch=before_batch)
    progress: Progress = caught.value.progress  # type: ignore[attr-defined]  # compress adds it
    seen = whole_run()[1]
    assert progress.traces == seen[:5]
    assert whole_run(resume=from_plain(to_plain(progress)))[1] == seen


def test_recording_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, _ = whole_run()
    empty = Trace(Moment.START, 0, 0.0)
    for name in ("at_start", "before_fixing", "after_fixing"):
        monkeypatch.setattr(trace, name, lambda *_: empty)
    result, seen = whole_run()
    assert set(seen) == {empty}
    for path, each in (("a.pwfn", recorded), ("b.pwfn", result)):
        each.save(tmp_path / path, posterior="weight")
    assert (tmp_path / "a.pwfn").read_bytes() == (tmp_path / "b.pwfn").read_bytes()


@pytest.mark.parametrize(
    ("method", "first_share"), [("wfn", 0.0), ("lsq", 1.0), ("kmeans", 1.0), ("apot", 1.0)]
)
def test_traces_of_methods_without_sigmas(method: str, first_share: float) -> None:
    changes: dict[str, object] = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0]}
    if method != "wfn":
        changes["options.bits"] = 2
    result, seen = whole_run(Config.preset("recommended", method).override(changes))
    assert [each.moment for each in seen] == [Moment.START, Moment.AFTER, Moment.AFTER]
    assert seen[0].fraction == first_share
    assert all(each.sigma is None and not each.sample for each in seen)
    counts = Counter(result.compressed.values().tolist())
    assert dict(seen[-1].codebook) == pytest.approx(dict(counts), abs=0)
    assert bool(seen[-1].moves) == (method == "wfn")


# In the folder of a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "run"
    run(digits_run(path, checkpoint_minutes=60), RUN_CONFIG)
    return path


def test_the_file_in_the_folder(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert [line["moment"] for line in lines] == ["start", *["before", "after"] * 3]
    assert [line["fraction"] for line in lines[2::2]] == pytest.approx([0.5, 0.9, 1.0], abs=1e-4)


@pytest.mark.parametrize(("number", "moment"), [(1, "before"), (4, "after")])
def test_killed_around_a_checkpoint_the_files_end_the_same(
    number: int, moment: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            run(digits_run(tmp_path / "run", checkpoint_minutes=60), RUN_CONFIG)
    run(digits_run(tmp_path / "run", resume=True, checkpoint_minutes=60), RUN_CONFIG)
    for name in ("trace.jsonl", "model.pwfn"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()
