"""Targets: which state is kept and why, what a state is, and that keeping states changes nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import CONFIG, STEPS, CutOffError, Shuffled, network
from torch.nn import functional as F

from pwfn import Compressed, Config, ConfigError, Progress, Result, compress, load
from pwfn.bayes.batches import Source
from pwfn.bayes.objective import Objective, Scores, accuracy, evaluate
from pwfn.config import TargetConfig
from pwfn.evaluate.targets import State, check_target, choose, meets, pareto
from pwfn.run.checkpoint import Store, from_plain, to_plain
from pwfn.run.folder import table_of_states

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
    ("target", "kept", "met", "why"),
    [
        (
            {"max_drop": 2.5},
            3,
            True,
            "of 3 that meet the target (at most 2.5 points lost) it is the smallest",
        ),
        ({"max_drop": 2.0}, 3, True, "of 3 that meet the target (at most 2 points lost) it is the smallest"),
        ({"max_drop": 1.99}, 2, True, "of 2 that meet the target"),
        ({"max_drop": 0.0}, 1, True, "it alone meets the target (at most 0 points lost)"),
        ({"max_drop": 100.0}, 4, True, "of 4 that meet the target"),
        ({"bits": 4.0}, 2, True, "of 3 that meet the target (at most 4 bits) it is the most accurate"),
        ({"bits": 3.99}, 3, True, "of 2 that meet the target"),
        ({"bits": 2.0}, 4, True, "it alone meets the target (at most 2 bits)"),
        (
            {"max_drop": 2.5, "bits": 3.5},
            3,
            True,
            "it alone meets the target (at most 2.5 points lost, at mo",
        ),
        ({"max_drop": 10.0, "bits": 3.5}, 4, True, "of 2 that meet the target"),
        ({"bits": 1.5}, 4, False, "no state meets the target (at most 1.5 bits), and it has the fewest bits"),
        ({"max_drop": 1.0, "bits": 3.0}, 2, False, "the fewest bits of those that are accurate enough"),
    ],
)
def test_the_state_that_is_kept(target: dict[str, float], kept: int, met: bool, why: str) -> None:
    for states in (STATES, STATES[::-1]):
        choice = choose(states, WAS, TargetConfig(**target))
        assert (choice.round, choice.met) == (kept, met)
        assert why in choice.why


def test_where_no_state_is_accurate_enough_the_most_accurate_is_kept() -> None:
    worse = [dataclasses.replace(s, scores=Scores(0.3, 0.7 - 0.1 * s.round % 0.3, 100)) for s in STATES]
    best = max(worse, key=lambda s: s.scores.metric)  # type: ignore[union-attr]
    for bits in (None, 1.0, 5.0):
        choice = choose(worse, WAS, TargetConfig(max_drop=1.0, bits=bits))
        assert (choice.round, choice.met) == (best.round, False)
        assert choice.why.endswith("and it has the best accuracy")


def test_of_files_within_one_percent_the_most_accurate_is_kept() -> None:
    states = [state(1, 0.90, 3.0, 1011), state(2, 0.89, 3.0, 1010), state(3, 0.88, 3.0, 1000)]
    assert choose(states, WAS, TargetConfig(max_drop=5.0)).round == 2
    assert choose([states[0], states[2]], WAS, TargetConfig(max_drop=5.0)).round == 3
    assert choose(states, WAS, TargetConfig(bits=5.0)).round == 1  # size does not count there


def test_equals_are_told_apart_by_size_then_by_round() -> None:
    same = [state(1, 0.9, 3.0, 1000), state(2, 0.9, 3.0, 999), state(3, 0.9, 3.0, 999)]
    for target in (TargetConfig(max_drop=1.0), TargetConfig(bits=3.0)):
        assert choose(same, WAS, target).round == choose(same[::-1], WAS, target).round == 2
    assert choose(same, WAS, TargetConfig(bits=1.0)).round == 1


def test_the_sentence_has_the_figures() -> None:
    assert choose(STATES, WAS, TargetConfig(max_drop=2.0)).why == (
        "the state after round 3 (88.00% (-2.00 points), 3.000 bits, 4,000 bytes): of 3 that meet the target "
        "(at most 2 points lost) it is the smallest"
    )
    unscored = [dataclasses.replace(s, scores=None) for s in STATES]
    assert choose(unscored, None, TargetConfig(bits=3.5)).why.startswith(
        "the state after round 4 (2.000 bits, 3,000 bytes): "
    )


def test_a_gain_is_no_loss_and_equal_is_within() -> None:
    assert meets(TargetConfig(max_drop=0.0), WAS, Scores(9.0, 0.95, 100), 8.0)
    assert meets(TargetConfig(max_drop=0.0), WAS, WAS, 8.0)
    assert not meets(TargetConfig(max_drop=0.0), WAS, Scores(0.1, 0.8999, 10000), 8.0)
    assert meets(TargetConfig(), None, None, 8.0)
    assert meets(TargetConfig(bits=2.5), None, None, 2.5)
    assert not meets(TargetConfig(bits=2.5), None, None, 2.5001)
    # Shares of 10,000 images, whose difference in floats is not quite the hundredths that it is.
    for lost in range(1, 400):
        assert meets(TargetConfig(max_drop=lost / 100), WAS, Scores(0.3, (9000 - lost) / 10000, 10000), 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=6),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(1, 6),
)
def test_what_is_said_to_meet_a_target_does_and_is_found_where_there_is_one(
    figures: list[tuple[int, int, int]], drop: int | None, bits: int | None
) -> None:
    target = TargetConfig(max_drop=drop, bits=bits)
    states = [
        state(n, 0.9 - lost / 100, float(entropy), 1000 * size)
        for n, (lost, entropy, size) in enumerate(figures, 1)
    ]
    fitting = [s for s in states if meets(target, WAS, s.scores, s.entropy_bits)]
    choice = choose(states, WAS, target)
    kept = states[choice.round - 1]
    assert choice.met == bool(fitting) == (kept in fitting)
    if fitting and drop is not None:
        assert len(kept.content) == min(len(s.content) for s in fitting)
    elif fitting and kept.scores is not None:
        assert kept.scores.metric == max(s.scores.metric for s in fitting)  # type: ignore[type-var, union-attr]


@given(st.lists(st.tuples(st.integers(0, 4).map(float), st.integers(0, 4)), max_size=8))
def test_a_star_is_at_what_nothing_beats(points: list[tuple[float, int]]) -> None:
    stars = pareto(points)
    for (score, size), star in zip(points, stars, strict=True):
        as_good = [p for p in points if p[0] >= score and p[1] <= size]
        assert star == all(p == (score, size) for p in as_good)
    assert not points or any(stars)


def test_a_limit_on_the_loss_of_accuracy_needs_an_accuracy() -> None:
    check_target(TargetConfig(max_drop=1.0), True)
    check_target(TargetConfig(bits=1.0), False)
    with pytest.raises(ConfigError, match=r"target\.max_drop is 1, and no accuracy is measured: pass a val"):
        check_target(TargetConfig(max_drop=1.0), False)
    with pytest.raises(ConfigError, match="no accuracy is measured"):  # before any training
        compress(network(), Shuffled(), None, CONFIG.override({"target.max_drop": 1.0}))


def test_the_table_of_states() -> None:
    assert table_of_states([]) == []
    lines = table_of_states([s.to_dict() for s in [*STATES, state(5, 0.7, 2.0, 3500)]])
    assert len(lines) == 6
    assert [line.endswith("*") for line in lines[1:]] == [True, True, True, True, False]
    assert lines[1].split() == ["1", "25.0%", "fixed", "90.00%", "6.000", "2", "9,000", "*"]
    nothing = dataclasses.replace(STATES[0], scores=None).to_dict()
    assert table_of_states([nothing])[1].split()[3] == "-"


# States of a real run


def run(config: Config, **how: Any) -> Result:
    return compress(network(), Shuffled(), Shuffled(), config, **how)


KEEP = CONFIG.override({"target.keep_states": True})


@pytest.fixture(scope="module")
def kept() -> Result:
    return run(KEEP)


def read(content: bytes, folder: Path) -> Compressed:
    path = folder / "state.pwfn"
    path.write_bytes(content)
    return load(path)


def test_every_state_is_a_whole_network_with_the_accuracy_that_it_names(kept: Result, tmp_path: Path) -> None:
    assert [s.round for s in kept.states] == [1, 2, 3]
    assert [s.fraction for s in kept.states] == [0.4, 0.8, 1.0]
    for found in kept.states:
        compressed = read(found.content, tmp_path)
        values = compressed.values()
        assert values.numel() == kept.compressed.layout.size
        assert values.unique().numel() == found.unique
        tests = Source("tests", Shuffled(), torch.device("cpu"))
        model = compressed.apply_to(network())
        assert evaluate(model, tests, Objective(F.cross_entropy), accuracy) == found.scores
        assert compressed.record["round"] == found.round
    uniques = [s.unique for s in kept.states]
    assert uniques[0] > uniques[-1]  # few weights were fixed, and the rest have the finest grid


def test_keeping_states_changes_nothing_else(kept: Result) -> None:
    plain = run(CONFIG)
    assert plain.states == ()
    assert torch.equal(plain.compressed.values(), kept.compressed.values())
    assert plain.compressed.untouched.keys() == kept.compressed.untouched.keys()
    for name, tensor in plain.compressed.untouched.items():
        assert torch.equal(tensor, kept.compressed.untouched[name]), name
    assert plain.after == kept.after
    assert [repr(dataclasses.replace(done, seconds=0.0)) for done in plain.rounds] == [
        repr(dataclasses.replace(done, seconds=0.0)) for done in kept.rounds
    ]
    assert plain.compressed.record != kept.compressed.record  # the settings are in it


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_run_goes_back_to_the_state_that_is_kept(rounds: int, kept: Result, tmp_path: Path) -> None:
    """With a limit on the bits alone the most accurate is kept: all but one are said to be worse."""
    earlier = kept.states[rounds - 1]
    target = {"target.bits": 100.0, "finish.polish_epochs": 0.0, "finish.reestimate_batchnorm": False}
    config = CONFIG.override(target)

    def favour(progress: Progress) -> None:
        for place, found in enumerate(progress.states):
            metric = 1.0 if found.round == rounds else 0.0
            progress.states[place] = dataclasses.replace(found, scores=Scores(0.3, metric, 32))

    result = run(config, on_round=favour)
    assert result.choice is not None
    assert (result.choice.round, result.choice.met, result.target_met) == (rounds, True, True)
    content = read(result.states[rounds - 1].content, tmp_path)
    assert torch.equal(result.compressed.values(), content.values())
    assert torch.equal(content.values(), read(earlier.content, tmp_path).values())
    for name, tensor in content.untouched.items():
        assert torch.equal(result.compressed.untouched[name], tensor), name
    assert result.summary.whole.unique == earlier.unique


def test_after_a_target_polish_goes_on_from_the_kept_state(kept: Result) -> None:
    """The weights stay at that state's values, and what lies beside them is trained."""

    def favour(progress: Progress) -> None:
        for place, found in enumerate(progress.states):
            metric = 1.0 if found.round == 1 else 0.0
            progress.states[place] = dataclasses.replace(found, scores=Scores(0.3, metric, 32))

    result = run(CONFIG.override({"target.bits": 100.0}), on_round=favour)
    assert result.summary.whole.unique == kept.states[0].unique
    last = kept.compressed.untouched["1.weight"]
    assert not torch.equal(result.compressed.untouched["1.weight"], last)


def test_a_target_that_none_meets_is_said_to_be_missed() -> None:
    result = run(CONFIG.override({"target.bits": 0.01}))
    assert result.choice is not None
    assert result.choice.round == 3
    assert (result.choice.met, result.target_met) == (False, False)


@pytest.mark.parametrize("step", [1, 2, 7, 8, 13, 14, STEPS])
def test_with_states_kept_a_run_cut_off_at_any_step_ends_the_same(step: int, tmp_path: Path) -> None:
    """Before and after each round's last step, and in polish, when a state was chosen."""
    config = CONFIG.override({"target.max_drop": 3.0})
    store, taken = Store(tmp_path, {}), 0

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            store.save(progress())
            raise CutOffError

    with pytest.raises(CutOffError):
        run(config, keep=keep)
    found = store.newest()
    assert found is not None
    assert (found.choice is not None) == (step > 13)
    assert_same_end(run(config, resume=found), run(config), tmp_path)


def test_progress_after_each_round_has_the_states_so_far(tmp_path: Path) -> None:
    config = CONFIG.override({"target.max_drop": 3.0})
    plain: list[dict[str, Any]] = []
    whole = run(config, on_round=lambda progress: plain.append(to_plain(progress)))
    assert [len(progress["states"]) for progress in plain] == [1, 2, 3]
    for progress in plain:
        assert_same_end(run(config, resume=from_plain(progress)), whole, tmp_path)


def assert_same_end(a: Result, b: Result, folder: Path) -> None:
    for result, name in ((a, "a.pwfn"), (b, "b.pwfn")):
        result.save(folder / name, posterior="weight")
    assert (folder / "a.pwfn").read_bytes() == (folder / "b.pwfn").read_bytes()
    assert (a.choice, a.states, a.after) == (b.choice, b.states, b.after)


# Through the command line

TINY = (
    *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random", "--device", "cpu"),
    *("--set", "schedule.fractions=[0.5, 0.9, 1.0]", "--set", "schedule.epochs_per_round=0.2"),
    *("--set", "finish.polish_epochs=0.1", "--set", "finish.reestimate_epochs=0.2", "--batch-size", "64"),
)


def logged(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def test_a_target_that_is_met(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, out, err = call(*TINY, "--out", str(folder), "--max-drop", "100")
    assert (status, err) == (0, "")
    states = logged(folder, "state")
    assert [s["round"] for s in states] == [1, 2, 3]
    assert [Path(s["file"]).name for s in states] == ["round-01.pwfn", "round-02.pwfn", "round-03.pwfn"]
    assert [Path(s["file"]).stat().st_size for s in states] == [s["file_bytes"] for s in states]
    record = json.loads((folder / "record.json").read_text())
    assert record["states"] == states
    smallest = min(s["file_bytes"] for s in states)
    kept = states[record["choice"]["round"] - 1]
    assert kept["file_bytes"] <= 1.01 * smallest
    assert record["choice"]["met_in_the_end"] is True
    assert "as it would be after each round:" in out
    assert f"\nkept {record['choice']['why']}\n" in out

    status, out, err = call(
        *("evaluate", str(folder / "states" / "round-02.pwfn"), "--data", "digits", "--device", "cpu"),
        "--json",
    )
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["after"]["metric"] == states[1]["metric"]
    assert (facts["file_bytes"], facts["unique"]) == (states[1]["file_bytes"], states[1]["unique"])


def test_a_target_that_is_missed_is_status_1_and_a_sentence(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, out, err = call(*TINY, "--out", str(folder), "--target-bits", "0.01")
    assert (status, err) == (1, "")
    said = next(line for line in out.splitlines() if line.startswith("kept "))
    assert said.startswith("kept the state after round 3 (")
    assert said.endswith("no state meets the target (at most 0.01 bits), and it has the fewest bits")
    assert (folder / "model.pwfn").exists()
    record = json.loads((folder / "record.json").read_text())
    assert record["choice"]["met_in_the_end"] is False
    status, out, err = call(*TINY, "--out", str(folder), "--target-bits", "0.01", "--resume", "--json")
    assert (status, err) == (1, "")
    assert json.loads(out)["choice"] == record["choice"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-drop", "-1"), "target.max_drop is -1.0: allowed is"),
        (("--target-bits", "0"), "target.bits is 0.0: allowed is"),
    ],
)
def test_a_target_that_cannot_be(call: Any, arguments: tuple[str, str], words: str, tmp_path: Path) -> None:
    status, out, err = call(*TINY, "--out", str(tmp_path / "run"), *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"pwfn: {words}")
    assert not (tmp_path / "run").exists()
