"""What a run sees of its weights: counted right, the same after a kill, and looking changes nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import CONFIG, STEPS, CutOffError, Shuffled, network
from test_runs import QUICK, KilledError, options
from torch import Tensor, nn

from pwfn import Config, Progress, Result, compress, rounds
from pwfn.bayes.method import InForce
from pwfn.bayes.pwfn import Pwfn
from pwfn.evaluate.trace import (
    BINS_PER_OCTAVE,
    HIGHEST_BIN,
    LOWEST_BIN,
    MOST_CENTRES,
    MOST_OF_A_LAYER,
    MOST_OF_ALL,
    Histogram,
    Moment,
    Observed,
    after_fixing,
    at_start,
    before_fixing,
    sample_positions,
    sigma_histogram,
)
from pwfn.fixing.fix_round import FixRecord, Move
from pwfn.lab.baselines.baseline import Baseline
from pwfn.layout import Entry, Kind, Layout
from pwfn.run.checkpoint import Store, from_plain, to_plain
from pwfn.run.folder import run
from pwfn.zoo import models

SIGMA_DIFFERS = Config().override({"posterior.init": "powers", "clustering.b": 7})
"""From weight to weight, as in the paper, so that one in the place of another would show."""

# Sigmas in bins


def histogram(sigma: Tensor, fixed: Tensor | None = None) -> Histogram | None:
    layout = Layout.of(nn.Linear(sigma.numel(), 1, bias=False))
    fixed = torch.zeros_like(sigma, dtype=torch.bool) if fixed is None else fixed
    return sigma_histogram(layout, InForce(torch.zeros_like(sigma), sigma, fixed))


def test_powers_of_two_begin_a_bin_each() -> None:
    found = histogram(torch.tensor([2.0**-30, 2.0**-29, 0.25, 0.5]))
    assert found is not None
    assert found.first == -30 * BINS_PER_OCTAVE
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
    assert found.counts[0] > 0
    assert found.counts[-1] > 0


def test_what_lies_beyond_the_bins_is_in_the_last_of_them() -> None:
    found = histogram(torch.tensor([0.0, 2.0**-60, 1e6]))
    assert found is not None
    assert found.first == LOWEST_BIN
    assert found.counts[0] == 2
    assert (found.counts[-1], found.first + len(found.counts) - 1) == (1, HIGHEST_BIN)


def test_without_free_weights_there_is_no_histogram() -> None:
    assert histogram(torch.ones(3), torch.ones(3, dtype=torch.bool)) is None


# Centres, moves and layers


def test_after_a_fixing_the_codebook_moves_and_layers_are_those_of_the_fixed_weights() -> None:
    """Six weights at 1/4, two at 1/2 and the last still free; the bias all at 1/4."""
    layout = Layout.of(nn.Linear(3, 3))
    mu = torch.tensor([0.25, 0.25, 0.5, 0.25, 0.5, 0.3, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25])
    fixed = torch.ones(12, dtype=torch.bool)
    fixed[5] = False
    record = FixRecord(0.9, 11, (), (Move(0.25, 9, 0.123456789, 1.0, 2), Move(0.5, 2, 0.0, 0.0, 0)))
    seen = after_fixing(3, record, layout, InForce(mu, torch.full((12,), 0.25), fixed))
    assert (seen.moment, seen.round, seen.fraction) == (Moment.AFTER, 3, 11 / 12)
    assert seen.codebook == ((0.25, 9), (0.5, 2))
    assert seen.centres == 2
    assert seen.sigma == Histogram(-2 * BINS_PER_OCTAVE, (1,))
    assert seen.moves == (Move(0.25, 9, 0.123457, 1.0, 2), Move(0.5, 2, 0.0, 0.0, 0))
    entropy = -(6 / 8 * math.log2(6 / 8) + 2 / 8 * math.log2(2 / 8))
    weight, bias = seen.layers
    assert (weight.name, weight.weights, weight.unique) == ("weight", 8, 2)
    assert weight.entropy_bits == float(f"{entropy:.6g}")
    assert bias == ("bias", 3, 0.0, 1)
    assert seen.sample == ()


def test_a_layer_without_fixed_weights_is_left_out() -> None:
    layout = Layout.of(nn.Linear(3, 1))
    fixed = torch.tensor([True, False, True, False])
    seen = after_fixing(1, FixRecord(0.5, 2), layout, InForce(torch.ones(4), torch.ones(4), fixed))
    assert [layer.name for layer in seen.layers] == ["weight"]


def test_of_more_centres_than_are_kept_the_most_popular_are() -> None:
    count = MOST_CENTRES + 76
    layout = Layout.of(nn.Linear(2 * count - 100, 1, bias=False))
    values = torch.arange(count).float() / 16
    mu = torch.cat((values, values[100:]))  # the first hundred occur once, the others twice
    seen = after_fixing(1, FixRecord(1.0, mu.numel()), layout, InForce(mu))
    assert seen.centres == count
    assert len(seen.codebook) == MOST_CENTRES
    expected = {**dict.fromkeys(values[:24].tolist(), 1), **dict.fromkeys(values[100:].tolist(), 2)}
    assert seen.codebook == tuple(sorted(expected.items()))  # of the equally popular the smallest


def test_before_a_fixing_only_sigmas_are_looked_at_and_a_method_without_them_is_not() -> None:
    net = Pwfn(nn.Linear(4, 2), Config())
    seen = before_fixing(2, net.layout, net.in_force())
    assert seen is not None
    assert (seen.moment, seen.round, seen.fraction) == (Moment.BEFORE, 2, 0.0)
    assert seen.sigma is not None
    assert seen.sigma.total == 10
    assert (seen.codebook, seen.layers, seen.sample) == ((), (), ())
    plain = Baseline(nn.Linear(4, 2), Config(method="baseline"))  # type: ignore[arg-type]  # names become enums
    assert before_fixing(2, plain.layout, plain.in_force()) is None
    assert at_start(plain.layout, plain.in_force()).centres == 10


# The sample


@given(st.integers(1, 5000), st.integers(1, 400), st.text(max_size=5))
def test_positions_are_distinct_in_order_and_one_in_every_stretch(size: int, most: int, name: str) -> None:
    entry = Entry(name, (size,), torch.float32, 0, "", "Linear", Kind.WEIGHT)
    found = sample_positions(entry, most).tolist()
    assert len(found) == min(size, most)
    assert found == sorted(set(found))
    assert found[0] >= 0
    assert found[-1] < size
    assert found == sample_positions(entry, most).tolist()
    if size > most:
        edges = [i * size // most for i in range(most + 1)]
        assert all(edges[i] <= place < edges[i + 1] for i, place in enumerate(found))


def test_the_same_weights_are_looked_at_in_the_end_and_no_random_state_is_touched() -> None:
    torch.manual_seed(1)
    net = Pwfn(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 4)), SIGMA_DIFFERS)
    mu = net.mu.detach().clone()
    state = torch.get_rng_state()
    first = at_start(net.layout, net.in_force())
    assert torch.equal(torch.get_rng_state(), state)
    done = net.between(1, 1.0)
    last = after_fixing(1, done.record, net.layout, net.in_force())
    assert [sample.name for sample in first.sample] == ["0.weight", "1.weight"]  # biases are not layers
    for entry, one, other in zip(net.layout.entries[::2], first.sample, last.sample, strict=True):
        at = sample_positions(entry, MOST_OF_A_LAYER)
        assert len(one.mu) == min(entry.size, MOST_OF_A_LAYER)
        assert torch.tensor(one.mu).allclose(mu[entry.span][at], rtol=1e-5, atol=0)
        assert torch.tensor(other.mu).allclose(net.mu[entry.span][at], rtol=1e-5, atol=0)
        assert torch.tensor(other.sigma).allclose(net.sigma[entry.span][at], rtol=1e-5, atol=0)


def test_a_resnet18_takes_less_than_half_a_megabyte_for_its_samples() -> None:
    with torch.device("meta"):
        layout = Layout.of(models.create("cifar_resnet18"))
    mu = torch.linspace(-0.2, 0.2, layout.size)
    line = at_start(layout, InForce(mu, mu.abs() / 16, torch.zeros(layout.size, dtype=torch.bool))).to_line()
    assert layout.size == 11_164_362
    assert 2 * len(line) < 500_000


def test_a_deep_network_has_fewer_of_each_layer() -> None:
    layout = Layout.of(nn.Sequential(*(nn.Linear(20, 20) for _ in range(100))))
    mu = torch.linspace(-1, 1, layout.size)
    seen = at_start(layout, InForce(mu, mu.abs(), torch.zeros(layout.size, dtype=torch.bool)))
    assert {len(sample.mu) for sample in seen.sample} == {MOST_OF_ALL // 100}


# Kept and read


def test_a_line_is_json_that_gives_the_same_again() -> None:
    net = Pwfn(network(), SIGMA_DIFFERS)
    seen = [at_start(net.layout, net.in_force())]
    for number, fraction in enumerate((0.5, 1.0), 1):
        before = before_fixing(number, net.layout, net.in_force())
        assert before is not None
        done = net.between(number, fraction)
        seen += [before, after_fixing(number, done.record, net.layout, net.in_force())]
    for each in seen:
        assert Observed.of_plain(json.loads(each.to_line())) == each
        assert "\n" not in each.to_line()
    assert all(seen[2].moves)
    assert seen[-1].sigma is None  # nothing is free


def whole_run(config: Config = CONFIG, **how: object) -> tuple[Result, list[Observed]]:
    kept: list[Observed] = []

    def on_round(progress: Progress) -> None:
        kept[:] = progress.observed

    return compress(network(), Shuffled(), Shuffled(), config, on_round=on_round, **how), kept  # type: ignore[arg-type]


def test_a_run_sees_its_start_and_both_sides_of_every_fixing() -> None:
    result, seen = whole_run()
    moments = [(each.moment, each.round) for each in seen]
    both = [(moment, number) for number in (1, 2, 3) for moment in (Moment.BEFORE, Moment.AFTER)]
    assert moments == [(Moment.START, 0), *both]
    for done, (before, after) in zip(result.rounds, [each.observed for each in result.rounds], strict=True):
        assert after.centres == done.fixed.unique
        assert sum(count for _, count in after.codebook) == done.fix.fixed == done.fixed.weights
        assert [(m.centre, m.count) for m in after.moves] == [(m.centre, m.count) for m in done.fix.moves]
        assert before.sigma is not None
        size = result.compressed.layout.size
        assert before.sigma.total == size - round(before.fraction * size)
    assert dict(seen[-1].codebook) == dict(Counter(result.compressed.values().tolist()))


@pytest.mark.parametrize("step", range(1, STEPS + 1, 3))
def test_cut_off_at_a_step_the_rest_of_the_run_sees_the_same(step: int, tmp_path: Path) -> None:
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
    kept = list(found.observed)
    seen = whole_run()[1]
    assert kept == seen[: len(kept)]
    assert kept
    again = [each for done in whole_run(resume=found)[0].rounds for each in done.observed]
    assert again == seen[1:]


def test_a_run_that_stops_in_mid_round_does_not_see_it_twice() -> None:
    """An error after the fixing, in the scoring: the round is not done, and is done again."""
    calls = 0

    def between() -> None:
        nonlocal calls
        calls += 1
        if calls == 4 * len(Shuffled().batches) - 1:  # of the original, of two rounds, and of the third
            raise CutOffError

    with pytest.raises(CutOffError) as caught:
        whole_run(between=between)
    progress: Progress = caught.value.progress  # type: ignore[attr-defined]  # compress hangs it there
    assert len(progress.rounds) == 2
    seen = whole_run()[1]
    assert progress.observed == seen[:5]
    assert whole_run(resume=from_plain(to_plain(progress)))[1] == seen


def test_looking_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing, _ = whole_run()
    blind = Observed(Moment.START, 0, 0.0)
    for name in ("at_start", "before_fixing", "after_fixing"):
        monkeypatch.setattr(rounds.observed, name, lambda *_: blind)
    result, seen = whole_run()
    assert set(seen) == {blind}
    for path, each in (("a.pwfn", seeing), ("b.pwfn", result)):
        each.save(tmp_path / path, posterior="weight")
    assert (tmp_path / "a.pwfn").read_bytes() == (tmp_path / "b.pwfn").read_bytes()


@pytest.mark.parametrize(
    ("method", "first_share"), [("wfn", 0.0), ("lsq", 1.0), ("kmeans", 1.0), ("apot", 1.0)]
)
def test_methods_without_sigmas_show_what_they_have(method: str, first_share: float) -> None:
    changes = {"schedule.fractions": [0.5, 1.0], "schedule.epochs": 2, "quantiser.bits": 2}
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
    path = tmp_path_factory.mktemp("observed") / "run"
    run(options(path, checkpoint_minutes=60), QUICK)
    return path


def test_what_is_in_the_folder(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "observed.jsonl").read_text().splitlines()]
    assert [line["moment"] for line in lines] == ["start", *["before", "after"] * 3]
    assert [line["fraction"] for line in lines[2::2]] == pytest.approx([0.5, 0.9, 1.0], abs=1e-4)
    assert (folder / "observed.jsonl").stat().st_size < 200_000


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 7))
def test_killed_around_any_checkpoint_the_same_bytes_are_there_in_the_end(
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
            run(options(tmp_path / "run", checkpoint_minutes=60), QUICK)
    run(options(tmp_path / "run", resume=True, checkpoint_minutes=60), QUICK)
    for name in ("observed.jsonl", "model.pwfn"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()
