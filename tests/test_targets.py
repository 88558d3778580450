"""Targets: which state is kept, what a state is, and that keeping states changes nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Shuffled
from cases import normalised_classifier as network
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import CONFIG, STEPS, assert_same, cut_off, figures, newest, run
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from pwfn import ConfigError, Result, compress, evaluate, loads
from pwfn.config import TargetConfig
from pwfn.evaluate.score import Scores
from pwfn.evaluate.targets import MAX_TRIES, State, check_target, choose, meets, next_step, pareto
from pwfn.fixing.step import next_dyadic
from pwfn.progress import Progress
from pwfn.run.checkpoint import from_plain, to_plain

WAS = Scores(0.3, 0.90, 100)


def state(number: int, metric: float, bits: float, size: int) -> State:
    return State(number, number / 4, Scores(0.3, metric, 100), bits, 2**number, bytes(size))


# The choice, by hand: accuracy falls from round to round, and so do bits and bytes.
STATES = [
    state(1, 0.90, 6.0, 9000),
    state(2, 0.89, 4.0, 6000),
    state(3, 0.88, 3.0, 4000),
    state(4, 0.80, 2.0, 3000),
]


@pytest.mark.parametrize(
    ("target", "kept", "met"),
    [
        ({"max_drop": 2.5}, 3, True),
        ({"max_drop": 2.0}, 3, True),
        ({"max_drop": 1.99}, 2, True),
        ({"max_drop": 0.0}, 1, True),
        ({"max_drop": 100.0}, 4, True),
        ({"bits": 4.0}, 2, True),
        ({"bits": 3.99}, 3, True),
        ({"bits": 2.0}, 4, True),
        ({"max_drop": 2.5, "bits": 3.5}, 3, True),
        ({"max_drop": 10.0, "bits": 3.5}, 4, True),
        ({"bits": 1.5}, 4, False),
        ({"max_drop": 1.0, "bits": 3.0}, 2, False),
        ({"bytes": 6000}, 2, True),
        ({"bytes": 5999}, 3, True),
        ({"bytes": 6000, "bits": 3.0}, 3, True),
        ({"max_drop": 2.5, "bytes": 6000}, 3, True),
        ({"max_drop": 1.0, "bytes": 4000}, 2, False),
        ({"bytes": 2999}, 4, False),
    ],
)
def test_the_state_that_is_kept(target: dict[str, float], kept: int, met: bool) -> None:
    for states in (STATES, STATES[::-1]):
        choice = choose(states, WAS, TargetConfig(**target))
        assert (choice.round, choice.met) == (kept, met)
        assert f"round {kept}" in choice.why
        assert ("no state meets the target" in choice.why) != met


def test_where_no_state_is_accurate_enough_the_most_accurate_is_kept() -> None:
    metrics = (0.6, 0.5, 0.7, 0.6)
    worse = [state(n, metric, 4.0, 1000) for n, metric in enumerate(metrics, 1)]
    for bits in (None, 1.0, 5.0):
        choice = choose(worse, WAS, TargetConfig(max_drop=1.0, bits=bits))
        assert (choice.round, choice.met) == (3, False)


def test_of_files_within_one_percent_the_most_accurate_is_kept() -> None:
    states = [state(1, 0.90, 3.0, 1011), state(2, 0.89, 3.0, 1010), state(3, 0.88, 3.0, 1000)]
    assert choose(states, WAS, TargetConfig(max_drop=5.0)).round == 2
    assert choose([states[0], states[2]], WAS, TargetConfig(max_drop=5.0)).round == 3
    assert choose(states, WAS, TargetConfig(bits=5.0)).round == 1  # size does not count there


def test_equals_are_told_apart_by_size_then_by_round() -> None:
    same = [state(1, 0.9, 3.0, 1000), state(2, 0.9, 3.0, 999), state(3, 0.9, 3.0, 999)]
    for target in (TargetConfig(max_drop=1.0), TargetConfig(bits=3.0), TargetConfig(bytes=1000)):
        assert choose(same, WAS, target).round == choose(same[::-1], WAS, target).round == 2
    assert choose(same, WAS, TargetConfig(bits=1.0)).round == 1


def test_the_reason_has_the_figures() -> None:
    why = choose(STATES, WAS, TargetConfig(max_drop=2.0)).why
    for figure in ("round 3", "88.00%", "-2.00 points", "3.000 bits", "4,000 bytes", "at most 2 points"):
        assert figure in why
    unscored = [dataclasses.replace(s, scores=None) for s in STATES]
    why = choose(unscored, None, TargetConfig(bits=3.5)).why
    assert "%" not in why
    assert "points" not in why


def test_what_was_not_scored_is_best_where_it_is_largest() -> None:
    """The largest file is nearest to the original; a loss without a metric is as good as one."""
    unscored = [dataclasses.replace(s, scores=None) for s in STATES]
    choice = choose(unscored, None, TargetConfig(bytes=6000))
    assert (choice.round, "accurate" in choice.why) == (2, False)
    losses = [dataclasses.replace(s, scores=Scores(abs(s.round - 3), None, 9)) for s in STATES]
    choice = choose(losses, None, TargetConfig(bytes=6000))
    assert (choice.round, "accurate" in choice.why) == (3, False)
    losses[2] = dataclasses.replace(losses[2], scores=Scores(math.nan, None, 9))
    assert choose(losses, None, TargetConfig(bytes=6000)).round == 4  # of equals the smaller


def test_a_gain_is_no_loss_and_equal_is_within() -> None:
    assert meets(TargetConfig(max_drop=0.0), WAS, Scores(9.0, 0.95, 100), 8.0, 1)
    assert meets(TargetConfig(max_drop=0.0), WAS, WAS, 8.0, 1)
    assert not meets(TargetConfig(max_drop=0.0), WAS, Scores(0.1, 0.8999, 10000), 8.0, 1)
    assert meets(TargetConfig(), None, None, 8.0, 1)
    assert meets(TargetConfig(bits=2.5, bytes=7), None, None, 2.5, 7)
    assert not meets(TargetConfig(bits=2.5), None, None, 2.5001, 1)
    assert not meets(TargetConfig(bytes=7), None, None, 1.0, 8)
    # Fractions of 10,000 images, whose difference in floats is not quite the hundredths that it is.
    for lost in range(1, 400):
        now = Scores(0.3, (9000 - lost) / 10000, 10000)
        assert meets(TargetConfig(max_drop=lost / 100), WAS, now, 1.0, 1)


def test_without_labels_what_is_lost_is_agreement() -> None:
    now = Scores(0.1, 0.97, 100, agreement=True)
    for before in (Scores(0.0, 1.0, 100, agreement=True), None):  # the original agrees with itself
        assert meets(TargetConfig(max_drop=3.0), before, now, 1.0, 1)
        assert not meets(TargetConfig(max_drop=2.9), before, now, 1.0, 1)
    agreeing = [
        dataclasses.replace(s, scores=dataclasses.replace(now, metric=1 - 0.1 * s.round)) for s in STATES
    ]
    choice = choose(agreeing, None, TargetConfig(max_drop=20.0))
    assert (choice.round, choice.met) == (2, True)
    assert "agreement 80.00%" in choice.why


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=6),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 6000),
)
def test_what_is_said_to_meet_a_target_does_and_is_found_where_there_is_one(
    given_states: list[tuple[int, int, int]], drop: int | None, bits: int | None, size: int | None
) -> None:
    target = TargetConfig(max_drop=drop, bits=bits, bytes=size)
    states = [
        state(n, 0.9 - lost / 100, float(entropy), 1000 * size)
        for n, (lost, entropy, size) in enumerate(given_states, 1)
    ]
    fitting = [s for s in states if meets(target, WAS, s.scores, s.entropy_bits, len(s.content))]
    choice = choose(states, WAS, target)
    kept = states[choice.round - 1]
    assert choice.met == bool(fitting) == (kept in fitting)
    if fitting and drop is not None:
        assert len(kept.content) == min(len(s.content) for s in fitting)
    elif fitting and kept.scores is not None:
        assert kept.scores.metric == max(s.scores.metric for s in fitting)  # type: ignore[type-var, union-attr]


def test_a_state_keeps_its_step_in_a_checkpoint_and_in_the_record() -> None:
    tried = dataclasses.replace(STATES[0], step=0.046875)
    states = (tried, STATES[1])
    assert from_plain(to_plain(Progress(states=states))).states == states
    assert tried.to_dict()["step"] == 0.046875
    assert "step" not in STATES[1].to_dict()


# The search for a step, on networks whose figures are a function of it.

LADDER = [next_dyadic(1.0, place) for place in range(-96, 97)]
Figures = Callable[[float], tuple[float, float, int]]  # metric, bits, bytes


def search(figures: Figures, target: TargetConfig, first: float = 1.0) -> list[State]:
    """Every try of a search, in order."""
    tries: list[State] = []
    step: float | None = first
    while step is not None:
        metric, bits, size = figures(step)
        tries.append(State(len(tries) + 1, 1.0, Scores(0.3, metric, 100), bits, 9, bytes(size), step))
        assert len(tries) <= MAX_TRIES
        step = next_step(tries, WAS, target)
    return tries


def smooth(step: float) -> tuple[float, float, int]:
    """Accuracy falls with the square of the step; bits and bytes fall too, but not to nothing."""
    bits = 0.1 + 6 / (1 + step)
    return max(0.9 - 0.01 * step**2, 0.1), bits, round(1000 * bits)


@given(
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0.01, 8),
    st.none() | st.integers(1, 8000),
    st.integers(-40, 40),
)
def test_the_search_finds_the_best_step_of_all(
    drop: float | None, bits: float | None, size: int | None, start: int
) -> None:
    target = TargetConfig(max_drop=drop, bits=bits, bytes=size)
    first = next_dyadic(1.0, start)
    found = search(smooth, target, first)
    steps = [each.step for each in found]
    assert len(set(steps)) == len(steps)
    assert steps[0] == first
    reach = [next_dyadic(first, place) for place in range(-96, 97)]
    assert set(steps) <= set(reach)

    def fits(step: float) -> bool:
        metric, its_bits, its_size = smooth(step)
        return meets(target, WAS, Scores(0.3, metric, 100), its_bits, its_size)

    within = [step for step in reach if fits(step)]
    if not target.wanted:
        assert steps == [first]
        return
    assert choose(found, WAS, target).met == bool(within)
    if within:
        assert (min(within) if drop is None else max(within)) in steps


@pytest.mark.parametrize(
    ("target", "step"),
    [
        ({"max_drop": 1.0}, 1.0),  # 0.01 times the square of the step
        ({"max_drop": 4.0}, 2.0),
        ({"max_drop": 0.01}, 0.09375),  # 0.1 is between two steps
        ({"bits": 3.1}, 1.0),  # 0.1 + 6 / (1 + step)
        ({"bytes": 2100}, 2.0),
        ({"max_drop": 4.0, "bytes": 5000}, 2.0),  # a smaller step would do for the bytes
        ({"bits": 3.1, "bytes": 2100}, 2.0),
    ],
)
@pytest.mark.parametrize("first", [0.01, 0.5, 1.0, 30.0])
def test_the_step_that_is_kept(target: dict[str, float], step: float, first: float) -> None:
    wanted = TargetConfig(**target)  # type: ignore[arg-type]
    found = search(smooth, wanted, first)
    choice = choose(found, WAS, wanted)
    kept = found[choice.round - 1]
    assert (kept.step, choice.met) == (step, True)
    assert f"step {step:.4g}" in choice.why


@pytest.mark.parametrize("target", [{"bits": 0.05}, {"bytes": 1}, {"max_drop": 1.0, "bits": 0.2}])
def test_a_search_for_what_cannot_be_ends_at_what_is_nearest(target: dict[str, float]) -> None:
    wanted = TargetConfig(**target)  # type: ignore[arg-type]
    found = search(smooth, wanted)
    choice = choose(found, WAS, wanted)
    assert not choice.met
    nearest = 1.0 if wanted.max_drop else 2.0**12
    assert found[choice.round - 1].step == nearest


def test_where_no_step_is_accurate_enough_the_finest_is_tried() -> None:
    found = search(lambda step: (0.5, 3.0, 3000), TargetConfig(max_drop=1.0))
    assert min(each.step or 0.0 for each in found) == 2.0**-12
    assert [each.step for each in found] == sorted((each.step or 0.0 for each in found), reverse=True)


@given(
    st.lists(st.floats(0, 1) | st.just(math.nan), min_size=193, max_size=193),
    st.floats(0, 100),
    st.none() | st.integers(1, 8000),
)
def test_any_noise_ends_and_what_meets_the_target_is_not_lost(
    metrics: list[float], drop: float, size: int | None
) -> None:
    noise = dict(zip(LADDER, metrics, strict=True))
    target = TargetConfig(max_drop=drop, bytes=size)
    found = search(lambda step: (noise[step], *smooth(step)[1:]), target)
    steps = [each.step for each in found]
    assert len(set(steps)) == len(steps) <= MAX_TRIES
    met = [each for each in found if meets(TargetConfig(max_drop=drop), WAS, each.scores, 0.0, 0)]
    # The next larger step, at least, was tried and lost too much.
    best = max((each.step or 0.0 for each in met), default=0.0)
    assert not met or best == LADDER[-1] or next_dyadic(best, 1) in steps


@given(st.lists(st.tuples(st.integers(-120, 120), st.booleans()), max_size=11), st.booleans())
def test_a_search_resumed_from_any_tries_goes_on_and_ends(
    tries: list[tuple[int, bool]], accurate: bool
) -> None:
    """Of another target or another first step: they need not lie as this search would have put them."""
    target = TargetConfig(max_drop=1.0) if accurate else TargetConfig(bits=3.0)
    known = {next_dyadic(1.0, place): good for place, good in tries}

    def made(step: float, good: bool) -> State:
        return State(1, 1.0, Scores(0.3, 0.9 if good else 0.1, 9), 2.0 if good else 4.0, 9, b"", step)

    done = [made(step, good) for step, good in known.items()]
    while (step := next_step(done, WAS, target)) is not None:
        assert step not in {each.step for each in done}
        done.append(made(step, len(done) % 2 == 0))
        assert len(done) <= MAX_TRIES


@given(st.lists(st.tuples(st.integers(0, 4).map(float), st.integers(0, 4)), max_size=8))
def test_the_pareto_front_is_what_nothing_beats(points: list[tuple[float, int]]) -> None:
    front = pareto(points)
    for (score, size), is_best in zip(points, front, strict=True):
        as_good = [p for p in points if p[0] >= score and p[1] <= size]
        assert is_best == all(p == (score, size) for p in as_good)
    assert not points or any(front)


def test_a_limit_on_the_loss_of_accuracy_needs_an_accuracy() -> None:
    check_target(TargetConfig(max_drop=1.0), True)
    check_target(TargetConfig(bits=1.0), False)
    with pytest.raises(ConfigError, match=r"target\.max_drop is 1"):
        check_target(TargetConfig(max_drop=1.0), False)
    with pytest.raises(ConfigError, match=r"target\.max_drop is 1"):  # before any training
        compress(network(), Shuffled(), None, CONFIG.override({"target.max_drop": 1.0}))


# States of a real run

TARGET = CONFIG.override({"target.bits": 100.0})  # every state meets it: the most accurate is kept


@pytest.fixture(scope="module")
def kept() -> Result:
    return run(TARGET)


def test_every_state_is_a_whole_network_with_the_accuracy_that_it_names(kept: Result) -> None:
    assert [(s.round, s.fraction) for s in kept.states] == [(1, 0.4), (2, 0.8), (3, 1.0)]
    for found in kept.states:
        compressed = loads(found.content)
        assert compressed.values().numel() == kept.compressed.layout.size
        assert compressed.values().unique().numel() == found.unique
        assert evaluate(compressed.apply_to(network()), Shuffled()) == found.scores
        assert compressed.record["round"] == found.round
    assert kept.states[0].unique > kept.states[-1].unique  # what is free has the finest grid


def test_keeping_states_changes_no_round(kept: Result) -> None:
    plain = run()
    assert plain.states == ()
    assert figures(plain) == figures(kept)


class Counting(Shuffled):
    """Every pass is another epoch, counted by the loader itself."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return super().epoch(self.passes)

    epoch = None  # type: ignore[assignment]  # not by number


class CountingSampler(Sampler[int]):
    """As :class:`Counting`, by a sampler."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(32, generator=torch.Generator().manual_seed(self.passes)).tolist())

    def __len__(self) -> int:
        return 32


def shuffling(kind: str) -> Iterable[Any]:
    """A loader whose passes differ, and which one pass too many would change."""
    if kind == "counting":
        return Counting()
    data, generator = Images(), torch.Generator().manual_seed(5)
    if kind == "counting sampler":
        return DataLoader(data, 8, sampler=CountingSampler())
    if kind == "transforms":
        data.transforms = {"noise": [Noise()]}
        return DataLoader(data, 8)
    if kind == "generator":
        return DataLoader(data, 8, shuffle=True, generator=generator)
    if kind == "batch sampler":
        order = BatchSampler(RandomSampler(data, generator=generator), 8, drop_last=False)
        return DataLoader(data, batch_sampler=order)
    return DataLoader(data, 8, shuffle=True, num_workers=1, persistent_workers=True)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Those of Shuffled, one by one."""

    def __init__(self) -> None:
        self.examples = [pair for x, y in Shuffled().batches for pair in zip(x, y, strict=True)]
        self.transforms: dict[str, list[Noise]] = {"noise": []}

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        x, y = self.examples[at]
        for transform in self.transforms["noise"]:
            x = transform(x)
        return x, y


class Noise:
    """With a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __call__(self, x: Tensor) -> Tensor:
        return x + 0.1 * float(self.generator.normal())


KINDS = ["generator", "batch sampler", "counting", "counting sampler", "transforms", "persistent workers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_keeping_states_changes_no_round_whatever_the_loader(kind: str, shared: bool) -> None:
    """Also where one loader serves for training and for validation."""
    found = []
    for config in (CONFIG, TARGET):
        loader = shuffling(kind)
        found.append(figures(compress(network(), loader, loader if shared else Shuffled(), config)))
    assert found[0] == found[1]


def favouring(number: int, progress: Progress) -> Progress:
    """The progress of a run in which the state after this round is by far the most accurate."""
    states = [
        dataclasses.replace(s, scores=Scores(0.3, float(s.round == number), 32)) for s in progress.states
    ]
    return dataclasses.replace(progress, states=tuple(states))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_run_goes_back_to_the_state_that_is_kept(number: int, kept: Result) -> None:
    """Its weights are the result's; what is beside them is trained further, unless that is turned off."""
    after_rounds: list[Progress] = []
    run(TARGET, on_round=after_rounds.append)
    resume = favouring(number, after_rounds[-1])
    plain = TARGET.override(
        {
            "finish.polish_epochs": 0.0,
            "finish.reestimate_epochs": 0.0,
            "finish.fold_batchnorm": False,
            "finish.uncompressed_dtype": "float32",
        }
    )
    state = loads(kept.states[number - 1].content)
    for config in (TARGET, plain):
        result = run(config, resume=resume)
        assert result.choice is not None
        assert (result.choice.round, result.choice.met, result.target_met) == (number, True, True)
        assert torch.equal(result.compressed.values(), state.values())
        same = torch.equal(result.compressed.untouched["1.weight"], state.untouched["1.weight"])
        assert same == (config is plain)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_run_in_its_finish_chooses_again_for_another_target(number: int, kept: Result) -> None:
    """Other states are better now than when it chose: what it finished belongs to another network."""
    taken: list[Progress] = []
    run(TARGET, keep=lambda progress, ends: taken.append(progress()))
    assert taken[-1].choice is not None
    result = run(TARGET, resume=favouring(number, taken[-1]))
    assert result.choice is not None
    assert result.choice.round == number
    assert torch.equal(result.compressed.values(), loads(kept.states[number - 1].content).values())


def test_a_target_that_none_meets_is_missed() -> None:
    result = run(CONFIG.override({"target.bits": 0.01}))
    assert result.choice is not None
    assert (result.choice.round, result.choice.met, result.target_met) == (3, False, False)
    assert "missed" in str(result)


@pytest.mark.parametrize("step", [1, 7, 13, 14, STEPS])
def test_with_states_a_run_cut_off_at_any_step_ends_the_same(step: int, kept: Result, tmp_path: Path) -> None:
    """Before and after a round's last step, and in polish, when a state was chosen."""
    found = newest(cut_off(tmp_path, step, config=TARGET))
    assert (found.choice is not None) == (step > 13)
    assert_same(run(TARGET, resume=found), kept, tmp_path)


def test_progress_after_each_round_has_the_states_so_far(kept: Result, tmp_path: Path) -> None:
    after_rounds: list[Progress] = []
    run(TARGET, on_round=after_rounds.append)
    for number, progress in enumerate(after_rounds, 1):
        assert len(progress.states) == number
        assert_same(run(TARGET, resume=from_plain(to_plain(progress))), kept, tmp_path)


def test_the_bytes_of_the_file_itself_decide(kept: Result) -> None:
    size = run(CONFIG.override({"target.bytes": 10**6})).file_bytes
    assert size < 10**6
    for limit, met in ((size + 50, True), (size // 2, False)):  # the record in the file holds the limit
        result = run(CONFIG.override({"target.bytes": limit}))
        assert result.target_met is met
        assert ("missed" in str(result)) is not met
    assert dataclasses.replace(result, saved_bytes=size // 2).target_met  # as it was written
    assert kept.target_met
    assert run().target_met is None


def test_a_target_set_after_the_rounds_is_one_sentence() -> None:
    after_rounds: list[Progress] = []
    run(on_round=after_rounds.append)
    with pytest.raises(ConfigError, match="start a new run"):
        run(TARGET, resume=after_rounds[-1])


# Through the command line

TINY = (
    *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random", "--device", "cpu"),
    *("--set", "schedule.fractions=[0.5, 0.9, 1.0]", "--set", "schedule.epochs_per_round=0.2"),
    *("--set", "finish.polish_epochs=0.1", "--set", "finish.reestimate_epochs=0.2", "--batch-size", "64"),
    *("--set", "posterior.init=rms"),
)


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


def test_a_target_that_is_met(call: Call, tmp_path: Path) -> None:
    status, out, err = call(*TINY, "--out", str(tmp_path), "--max-drop", "100")
    assert (status, err) == (0, "")
    record = record_of(tmp_path)
    states = record["states"]
    assert sorted(p.stat().st_size for p in (tmp_path / "states").iterdir()) == sorted(
        s["file_bytes"] for s in states
    )
    kept = states[record["choice"]["round"] - 1]
    assert kept["file_bytes"] <= 1.01 * min(s["file_bytes"] for s in states)
    assert record["target_met"] is True
    assert record["choice"]["why"] in out
    file = str(tmp_path / "states" / "round-02.pwfn")
    status, out, err = call("evaluate", file, "--data", "digits", "--device", "cpu", "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["after"]["metric"] == states[1]["metric"]
    assert (facts["file_bytes"], facts["unique"]) == (states[1]["file_bytes"], states[1]["unique"])


def test_a_target_that_is_missed_is_status_1(call: Call, tmp_path: Path) -> None:
    status, out, err = call(*TINY, "--out", str(tmp_path), "--target-bits", "0.01")
    assert (status, err) == (1, "")
    assert "the target was missed" in out
    assert (tmp_path / "model.pwfn").exists()
    record = record_of(tmp_path)
    assert record["target_met"] is False
    status, out, err = call(*TINY, "--out", str(tmp_path), "--target-bits", "0.01", "--resume", "--json")
    assert (status, err) == (1, "")
    assert json.loads(out)["choice"] == record["choice"]


def test_a_file_that_is_too_large_is_status_1(call: Call, tmp_path: Path) -> None:
    status, out, err = call(*TINY, "--out", str(tmp_path), "--target-bytes", "100")
    assert (status, err) == (1, "")
    assert "at most 100 bytes" in out
    assert record_of(tmp_path)["target_met"] is False


@pytest.mark.parametrize(("name", "value"), [("max-drop", "-1"), ("target-bits", "0"), ("target-bytes", "0")])
def test_a_target_that_cannot_be(call: Call, name: str, value: str, tmp_path: Path) -> None:
    status, out, err = call(*TINY, "--out", str(tmp_path / "run"), f"--{name}", value)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"is {value}" in err
    assert not (tmp_path / "run").exists()
