"""What a run is started with: settings of a preset or a file with changes on top, and what wins over what."""

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
    assert settings(None, None, method="lsq") == Config.preset("recommended", "lsq")


def test_changes_win_over_the_file_and_named_options_over_the_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "paper"\nseed = 5\n[fixing]\ngrid_exponent = 8\n[target]\nbits = 4.0\n')
    found = settings(None, file, ["fixing.grid_exponent=9", "seed=6", "target.bits=3"], seed=7, max_drop=0.5)
    expected = {"fixing.grid_exponent": 9, "seed": 7, "target.bits": 3.0, "target.max_drop": 0.5}
    assert found == Config.preset("paper").override(expected)
    assert settings(None, file, target_bits=2.5).target.bits == 2.5
    assert settings(None, file, target_bytes=9000).target.bytes == 9000


def test_zero_is_a_value_and_not_the_absence_of_one() -> None:
    assert settings(None, None, ["seed=3"], seed=0).seed == 0
    assert settings(None, None, max_drop=0.0).target.max_drop == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fixing.rule=each", "each"),
        ('fixing.rule="nearest"', "nearest"),
        (" fixing.grid_exponent = 8 ", 8),
        ("training.learning_rate=1e-2", 0.01),
        ("training.clip_norm=off", None),
        ("schedule.fractions=[0.5, 1.0]", (0.5, 1.0)),
        ("posterior.noise_on_fixed=false", False),
        ('layout.exclude=["head.*"]', ("head.*",)),
    ],
)
def test_a_change_is_toml_or_a_bare_word(text: str, value: object) -> None:
    section, name = text.partition("=")[0].strip().split(".")
    assert getattr(getattr(settings(None, None, [text]), section), name) == value


@given(st.floats(0, 1), st.integers(0, 30), st.integers(0, 2**63 - 1))
def test_numbers_are_read_exactly(rate: float, b: int, seed: int) -> None:
    changes = [f"training.learning_rate={rate!r}", f"fixing.grid_exponent={b}", f"seed={seed}"]
    found = settings(None, None, changes)
    assert (found.training.learning_rate, found.fixing.grid_exponent, found.seed) == (rate, b, seed)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("fixing.rule", "fixing.rule"),
        ("=3", "''"),
        ("fixing.rul=each", "did you mean 'rule'"),
        ("fixin.rule=each", "did you mean 'fixing'"),
        ("fixing.grid_exponent=eight", "fixing.grid_exponent is 'eight'"),
        ("seed=-1", "seed is -1"),
        ("schedule.fractions=[0.5, 0.4]", "schedule.fractions is "),
        ("options.bits=3", "options.bits"),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(change: str, named: str, tmp_path: Path) -> None:
    from pwfn import GaussianNetwork
    from pwfn.zoo.models import digits_resnet

    with pytest.raises(ConfigError) as caught:
        GaussianNetwork(digits_resnet(), settings(None, None, [change]))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", [{"preset": "paper"}, {"preset": None, "method": "lsq"}])
def test_a_file_names_its_own_preset_and_method(other: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        settings(file=tmp_path / "run.toml", **other)  # type: ignore[arg-type]
