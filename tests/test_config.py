"""Settings: every field is checked, presets are the paper's numbers, TOML is a faithful image."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Shuffled, normalised_classifier
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pwfn
from pwfn.bayes.method import METHODS, phases
from pwfn.config import (
    PAPER_FRACTIONS,
    PRESETS,
    Choice,
    Config,
    FixingConfig,
    LayoutConfig,
    Number,
    PosteriorConfig,
    Rule,
    Switch,
)
from pwfn.config.checks import Epochs, Fractions, Selectors
from pwfn.errors import ConfigError, PwfnError

SECTIONS = [
    item.name for item in dataclasses.fields(Config) if item.name not in ("method", "seed", "options")
]
FIELDS = {
    f"{name}.{item.name}": item for name in SECTIONS for item in dataclasses.fields(getattr(Config(), name))
}

JUNK = [[1.0, "x"], 1j, {}, b"1", object()]
NUMBERS = ["1", "", True, math.nan, math.inf, -math.inf, -1, 10**400]


def refused(check: Any) -> list[Any]:
    """Values that a field of this kind never takes."""
    if isinstance(check, Number):
        edge = [check.low] if check.above_low else [check.low - 1]
        over = [check.high + 1] if check.high != math.inf else []
        return [
            *JUNK,
            *NUMBERS,
            *edge,
            *over,
            *([1.5] if check.whole else []),
            *([] if check.optional else [None]),
        ]
    if isinstance(check, Switch):
        return [*JUNK, 0, 1, "true", "on", None, math.nan]
    if isinstance(check, Choice):
        return [*JUNK, "", "MEAN", None, 0, True]
    if isinstance(check, Fractions):
        lists = [[], [0.5], [0.0, 1.0], [0.6, 0.4, 1.0], [0.5, 0.5, 1.0], [0.5, 1.2], [math.nan, 1.0], [True]]
        return [*JUNK, "1.0", 1.0, None, *lists]
    if isinstance(check, Epochs):
        return [*JUNK, "1.0", None, -0.1, math.nan, [], [-1], [None], [True]]
    assert isinstance(check, Selectors)
    return ["head.*", None, 3, [""], [3], [None], True]


def taken(check: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this kind takes, as it keeps them."""
    if isinstance(check, Number):
        if check.whole:
            high = int(min(check.high, 10**9))
            number: st.SearchStrategy[Any] = st.integers(int(check.low) + check.above_low, high)
        else:
            top = None if check.high == math.inf else check.high
            number = st.floats(check.low, top, exclude_min=check.above_low, allow_infinity=False)
        return st.none() | number if check.optional else number
    if isinstance(check, Switch):
        return st.booleans()
    if isinstance(check, Choice):
        return st.sampled_from(list(check.enum))
    if isinstance(check, Epochs):
        return st.floats(0, 100)
    if isinstance(check, Fractions):
        inner = st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), unique=True).map(sorted)
        return inner.map(lambda xs: (*xs, 1.0))
    return st.lists(st.text(min_size=1)).map(tuple)


ANY_CONFIG = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**63 - 1)},
    optional={name: taken(item.metadata["check"]) for name, item in FIELDS.items()},
).map(lambda changes: Config().override(changes))


def value_of(config: Config, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def test_there_are_at_most_35_settings() -> None:
    assert len(FIELDS) + 2 <= 35  # with method and seed
    assert all(len(item.metadata["help"]) <= 110 for item in FIELDS.values())


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_value_is_refused_in_a_sentence_that_says_what_is_allowed(name: str) -> None:
    for value in refused(FIELDS[name].metadata["check"]):
        with pytest.raises(ConfigError, match=rf"^{name} is ") as caught:
            Config().override({name: value})
        assert "allowed is" in str(caught.value)
        assert "\n" not in str(caught.value)


@given(ANY_CONFIG)
@settings(deadline=None, max_examples=60)
def test_any_valid_settings_survive_toml_and_plain_values(config: Config) -> None:
    text = config.to_toml()
    assert Config.from_toml(text) == Config.from_dict(config.to_dict()) == config
    assert hash(Config.from_toml(text)) == hash(config)
    assert tomllib.loads(text) == config.to_dict()


def test_toml_comments_every_setting_and_fits_two_screens() -> None:
    lines = Config().to_toml().splitlines()
    for name, item in FIELDS.items():
        section, field = name.split(".")
        at = next(
            i for i in range(lines.index(f"[{section}]"), len(lines)) if lines[i].startswith(f"{field} = ")
        )
        assert lines[at - 1] == f"# {item.metadata['help']}: {item.metadata['check'].allowed}"
    assert len(lines) <= 100


@pytest.mark.parametrize("value", [-1, 2**63, 10**400, 0.5, "0", True, None, math.nan, []])
def test_a_bad_seed_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^seed is .*: allowed is a whole number of at least 0"):
        Config(seed=value)
    assert Config(seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize("value", ["LSQ", "", None, 4, "python:missing.py:Mine"])
def test_an_unknown_method_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^method .* is unknown"):
        Config(method=value)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_must_be_of_its_own_class(name: str) -> None:
    wrong = PosteriorConfig() if name != "posterior" else LayoutConfig()
    for value in (wrong, None, {}, "paper"):
        with pytest.raises(ConfigError, match=rf"^{name} is .*: allowed is a \w+Config$"):
            Config(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_settings_and_survives_toml(name: str) -> None:
    config = Config.preset("recommended", name)
    assert config.method == name
    assert config == Config(method=name).override(METHODS[name].defaults)
    assert Config.from_toml(config.to_toml()) == Config.from_toml(f'method = "{name}"') == config


@pytest.mark.parametrize("preset", ["quick", "small"])
@pytest.mark.filterwarnings("ignore")
def test_toml_marks_the_sections_that_a_method_does_not_read(preset: str) -> None:
    config = Config.preset(preset).override({"schedule.epochs_per_round": 1})
    lines = config.to_toml().splitlines()
    after = {name: lines[lines.index(f"[{name}]") + 1] for name in SECTIONS}
    marked = [name for name, line in after.items() if line.endswith("reads none of these")]
    assert marked == ["posterior", "fixing"]
    assert "reads none" not in Config().to_toml()
    assert "the method lsq reads none" in Config.from_toml('method = "lsq"').to_toml()
    other = {"posterior.init": "rms", "posterior.alpha": 1, "fixing.rule": "mean", "fixing.grid_exponent": 1}
    found = [
        pwfn.compress(normalised_classifier(), Shuffled(), config=made).compressed.values()
        for made in (config, config.override(other))
    ]
    assert torch.equal(*found)


def test_options_of_a_method_are_kept_as_given_and_merged() -> None:
    config = Config(method="lsq", options={"bits": 3}).override({"options.include_ends": True})
    assert config.options == {"bits": 3, "include_ends": True}
    assert Config.from_toml(config.to_toml()) == config
    with pytest.raises(ConfigError, match="options is 3"):
        Config(options=3)  # type: ignore[arg-type]


def test_the_papers_presets_are_for_pwfn_alone_and_a_wrong_method_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="preset 'paper' belongs to the method pwfn"):
        Config.preset("paper", "lsq")
    with pytest.raises(ConfigError, match=r"did you mean 'lsq'\?"):
        Config.preset("recommended", "lsk")


@pytest.mark.parametrize("preset", ["quick", "small"])
def test_a_preset_with_a_method_of_its_own_does_not_replace_the_one_that_is_asked_for(preset: str) -> None:
    """Also where that is the usual one."""
    with pytest.raises(ConfigError, match=f"preset '{preset}' belongs to the method"):
        Config.preset(preset, "pwfn")
    with pytest.raises(ConfigError, match=f"preset '{preset}' belongs to the method"):
        Config.from_toml(f'preset = "{preset}"\nmethod = "pwfn"')


def test_names_become_enums_and_lists_become_tuples() -> None:
    config = Config().override({"fixing.rule": "nearest", "schedule.fractions": [0.5, 1]})
    assert config.fixing.rule is Rule.NEAREST
    assert config.schedule.fractions == (0.5, 1.0)
    assert LayoutConfig(include=[nn.Embedding]).include == ("type:torch.nn.modules.sparse.Embedding",)
    assert type(FixingConfig(grid_exponent=7.0).grid_exponent) is int  # type: ignore[arg-type]


def test_the_papers_numbers() -> None:
    """METHOD.md, sections 2 to 5: what the paper says, and nothing after the last fixing."""
    paper = Config.preset("paper")
    assert (
        paper.schedule.fractions == (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0) == PAPER_FRACTIONS
    )
    assert sum(phase.epochs for phase in phases(paper)) == pytest.approx(27.05)
    assert (paper.posterior.alpha, paper.posterior.cap) == (2**-11, 0.05)
    assert (paper.training.learning_rate, paper.training.sigma_learning_rate) == (1e-3, 1e-3)
    assert (paper.training.weight_decay, paper.training.clip_norm) == (1e-4, 1.0)
    assert (paper.fixing.rule, paper.fixing.grid_exponent, paper.fixing.sweep) == ("mean", 7, None)
    assert (paper.finish.reestimate_epochs, paper.finish.polish_epochs) == (0, 0)


def test_no_default_can_change_the_paper_preset() -> None:
    """What is not pinned is of the user's machine and data, not of the method."""
    free = {"posterior.rms_fraction", "posterior.tolerance", "training.precision", "training.cuda_graph"}
    free |= {"training.accumulate", "training.steps_per_epoch"}
    free |= {name for name in FIELDS if name.split(".")[0] in ("layout", "target")}
    assert set(PRESETS["paper"]) == set(FIELDS) - free


def test_the_quick_preset_trains_nothing_and_keeps_batchnorm_statistics() -> None:
    quick = Config.preset("quick")
    assert quick.method == "conditioned"
    assert sum(phase.epochs for phase in phases(quick)) + quick.finish.polish_epochs == 0
    assert quick.finish.reestimate_epochs == 0
    with pytest.raises(ConfigError, match="conditioned"):
        Config.preset("quick", "lsq")


@pytest.mark.parametrize("name", ["papr", "Paper", "", "ours", None, 3, ["paper"], {}])
def test_an_unknown_preset_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^preset .* is unknown: .*paper"):
        Config.preset(name)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("fixing.rul", "did you mean 'rule'?"),
        ("shedule.fractions", "did you mean 'schedule'?"),
        ("sed", "did you mean 'seed'?"),
        ("posterior.zzz", "allowed is one of init, "),
        ("zzz", "allowed is one of method, seed, "),
        ("fixing.rule.c", "fixing.rule.c"),
        ("fixing.", "allowed is one of rule, "),
        (".rule", "''"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match="is unknown") as caught:
        Config().override({key: 1})
    assert suggestion in str(caught.value)


def test_override_gives_a_changed_copy_and_later_keys_win() -> None:
    config, table = Config(), {"rule": "mean"}
    changed = config.override({"seed": 3, "fixing": table, "fixing.grid_exponent": 8})
    assert config == Config()
    assert (changed.seed, changed.fixing) == (3, FixingConfig(grid_exponent=8, rule=Rule.MEAN))
    assert table == {"rule": "mean"}  # the caller's own dictionary
    assert config.override({"fixing": FixingConfig(), "fixing.grid_exponent": 8}).fixing.grid_exponent == 8
    assert config.override({"fixing.grid_exponent": 8, "fixing": FixingConfig()}).fixing.grid_exponent is None
    assert config.override({"fixing.grid_exponent": 8, "fixing": table}).fixing.grid_exponent == 8


def test_fractions_and_epochs_change_together() -> None:
    both = {"schedule.epochs_per_round": [1, 2], "schedule.fractions": [0.5, 1.0]}
    assert [tuple(phase) for phase in phases(Config().override(both))] == [(1.0, 0.5), (2.0, 1.0)]
    with pytest.raises(ConfigError, match=r"schedule.epochs_per_round has 2 numbers for the 10"):
        Config().override({"schedule.epochs_per_round": [1, 2]})


@pytest.mark.parametrize(
    "changes", [{"fixing": 3}, {"seed": {"a": 1}}, {"seed.a": 1}, {3: 4}, {"fixing": {3: 4}}, {None: 1}]
)
def test_override_refuses_what_is_no_setting(changes: Any) -> None:
    with pytest.raises(ConfigError):
        Config().override(changes)


def test_settings_are_frozen_and_equal_ones_hash_alike() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    for name in FIELDS:
        section, field = name.split(".")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(config, section), field, value_of(config, name))
    a = Config().override({"layout.include": ["x"], "schedule.fractions": [0.5, 1]})
    b = Config().override({"layout.include": ("x",), "schedule.fractions": (0.5, 1.0)})
    assert a == b
    assert len({a, b, config}) == 2


def test_toml_starts_from_its_preset_and_names_only_what_differs() -> None:
    config = Config.from_toml('preset = "paper"\nseed = 4\n[fixing]\ngrid_exponent = 8\nsweep = "off"\n')
    assert config == Config.preset("paper").override({"seed": 4, "fixing.grid_exponent": 8})
    assert Config.from_toml("") == Config.preset("recommended") == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[fixing", "not valid TOML"),
        ("[fixing]\nsweep = 7\nsweep = 8", "not valid TOML"),
        ("seed = -1", "seed is -1: allowed is"),
        ("[fixing]\nrules = 'each'", "did you mean 'rule'?"),
        ("[fixin]\nsweep = 7", "did you mean 'fixing'?"),
        ("fixing = 3", "fixing is 3: allowed is a table of settings"),
        ("b = 7", "setting 'b' is unknown"),
        ("preset = 3", "preset 3 is unknown"),
        ("[training]\nlearning_rate = nan", "training.learning_rate is nan"),
        ("[training]\nlearning_rate = 2024-01-01", "training.learning_rate is datetime.date"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_that_names_the_file(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00seed")
    for path in (tmp_path / "missing.toml", tmp_path, binary, "nul\0.toml"):
        with pytest.raises(ConfigError, match="cannot read the settings") as caught:
            Config.load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert isinstance(caught.value, PwfnError)


def test_a_file_gives_the_same_settings_as_its_text(tmp_path: Path) -> None:
    config = Config.preset("paper").override({"layout.exclude": ["kopf.é*"], "training.clip_norm": None})
    (tmp_path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    assert Config.load(tmp_path / "run.toml") == Config.load(str(tmp_path / "run.toml")) == config
