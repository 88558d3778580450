"""What a run is asked for: settings of a preset or a file with changes on top, and what wins over what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwfn import Config, ConfigError
from pwfn.run.options import settings


def test_nothing_given_is_the_recommended_preset() -> None:
    assert settings(None, None) == Config() == Config.preset("recommended")
    assert settings("paper", None) == Config.preset("paper")


def test_changes_come_over_the_file_and_named_options_over_the_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "paper"\nseed = 5\n[clustering]\nb = 8\n[target]\nbits = 4.0\n')
    found = settings(None, file, ["clustering.b=9", "seed=6", "target.bits=3"], seed=7, max_drop=0.5)
    expected = {"clustering.b": 9, "seed": 7, "target.bits": 3.0, "target.max_drop": 0.5}
    assert found == Config.preset("paper").override(expected)
    assert settings(None, file).seed == 5
    assert settings(None, file, target_bits=2.5).target.bits == 2.5


def test_zero_is_a_value_and_not_the_absence_of_one() -> None:
    assert settings(None, None, ["seed=3"], seed=0).seed == 0
    assert settings(None, None, max_drop=0.0).target.max_drop == 0.0
    assert settings(None, None, max_drop=0.0).target.wanted


@pytest.mark.parametrize(
    ("text", "section", "name", "value"),
    [
        ("clustering.rule=each", "clustering", "rule", "each"),
        ('clustering.rule="nearest"', "clustering", "rule", "nearest"),
        (" clustering.b = 8 ", "clustering", "b", 8),
        ("training.learning_rate=1e-2", "training", "learning_rate", 0.01),
        ("training.clip_norm=off", "training", "clip_norm", None),
        ("schedule.fractions=[0.5, 1.0]", "schedule", "fractions", (0.5, 1.0)),
        ("posterior.noise_on_fixed=false", "posterior", "noise_on_fixed", False),
        ('layout.exclude=["head.*"]', "layout", "exclude", ("head.*",)),
        ("target.keep_states=true", "target", "keep_states", True),
    ],
)
def test_a_change_is_written_as_toml_has_it_or_as_a_bare_word(
    text: str, section: str, name: str, value: object
) -> None:
    assert getattr(getattr(settings(None, None, [text]), section), name) == value


@given(st.floats(0, 1), st.integers(0, 30), st.integers(0, 2**63 - 1))
def test_numbers_come_through_exactly(rate: float, b: int, seed: int) -> None:
    found = settings(None, None, [f"training.learning_rate={rate!r}", f"clustering.b={b}", f"seed={seed}"])
    assert (found.training.learning_rate, found.clustering.b, found.seed) == (rate, b, seed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["clustering.b"], "'clustering.b' is not of the form section.name=value"),
        (["=3"], "setting '' is unknown"),
        (["clustering.rul=each"], "setting 'clustering.rul' is unknown: did you mean 'rule'?"),
        (["clusterin.rule=each"], "setting 'clusterin' is unknown: did you mean 'clustering'?"),
        (["clustering.b=eight"], "clustering.b is 'eight': allowed is"),
        (["seed=-1"], "seed is -1: allowed is"),
        (["schedule.fractions=[0.5, 0.4]"], "schedule.fractions is "),
        (["training.precision=fp8"], "training.precision is 'fp8': allowed is one of"),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(changes: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(None, None, changes)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_a_preset_and_a_file_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --config or --preset, not both"):
        settings("paper", tmp_path / "run.toml")
