"""Settings: every field is checked, presets are the paper's numbers, TOML is a faithful image."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pwfn.bayes.method import rounds_of_fixing
from pwfn.config import (
    METHOD_SETTINGS,
    PAPER_FRACTIONS,
    PRESETS,
    ClusteringConfig,
    Codebooks,
    Config,
    Decay,
    FinishConfig,
    FixedSigma,
    LayoutConfig,
    MethodName,
    Optimizer,
    PosteriorConfig,
    Precision,
    QuantiserConfig,
    Rest,
    Rule,
    ScheduleConfig,
    SigmaInit,
    TargetConfig,
    TrainingConfig,
    WfnConfig,
)
from pwfn.errors import ConfigError, PwfnError

SECTIONS: dict[str, type] = {
    "layout": LayoutConfig,
    "posterior": PosteriorConfig,
    "clustering": ClusteringConfig,
    "quantiser": QuantiserConfig,
    "wfn": WfnConfig,
    "training": TrainingConfig,
    "schedule": ScheduleConfig,
    "finish": FinishConfig,
    "target": TargetConfig,
}

NOT_A_NUMBER = ["1", "", True, None, [1.0], 1j, math.nan, math.inf, -math.inf, {}]
NOT_A_SWITCH = [0, 1, "true", "on", None, [True], math.nan]
NOT_A_LIST_OF_NAMES = ["head.*", None, 3, [""], [3], [None], [["head"]], True]
AT_LEAST_0 = st.floats(min_value=0, allow_infinity=False)
ABOVE_0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is known of one field: values refused, values taken, and words of the refusal."""

    bad: list[Any]
    good: list[Any]
    allowed: str
    valid: st.SearchStrategy[Any]


def number(allowed: str, bad: list[Any], good: list[Any], valid: st.SearchStrategy[Any]) -> Case:
    return Case([*NOT_A_NUMBER, *bad], good, allowed, valid)


def optional(allowed: str, bad: list[Any], good: list[Any], valid: st.SearchStrategy[Any]) -> Case:
    refused = [value for value in NOT_A_NUMBER if value is not None]
    return Case([*refused, "Off", *bad], [*good, None, "off"], f'{allowed}, or "off"', st.none() | valid)


def switch() -> Case:
    return Case(NOT_A_SWITCH, [True, False], "true or false", st.booleans())


def choice(enum: Any, *names: str) -> Case:
    allowed = "one of " + ", ".join(f'"{name}"' for name in names)
    bad = ["", "MEAN", names[0].upper(), names[0] + " ", None, 0, True, [names[0]], math.nan]
    return Case(bad, [*names, *enum], allowed, st.sampled_from(list(enum)))


def selectors() -> Case:
    allowed = 'a list of name patterns ("head.*"), "type:CLASS" strings or module classes'
    good = [(), [], ["head.*"], ("type:Embedding",), [nn.Embedding]]
    return Case(NOT_A_LIST_OF_NAMES, good, allowed, st.lists(st.text(min_size=1)).map(tuple))


def fractions() -> Case:
    allowed = "an increasing list of numbers above 0 and at most 1, the last of them 1"
    bad = [
        "1.0",
        1.0,
        None,
        [],
        [0.5],  # the last is not 1
        [0.0, 1.0],
        [-0.1, 1.0],
        [0.5, 0.5, 1.0],
        [0.6, 0.4, 1.0],
        [0.5, 1.2],
        [1.0, 1.0],
        ["0.5", 1.0],
        [math.nan, 1.0],
        [True],
        [None, 1.0],
    ]
    inner = st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), unique=True).map(sorted)
    return Case(bad, [[1], [0.5, 1.0], (0.2, 1)], allowed, inner.map(lambda xs: (*xs, 1.0)))


def numbers() -> Case:
    bad = [1.0, "1.0", "Off", [], [-0.1], [1.0, math.nan], ["1"], [True], [None], [math.inf], {}]
    valid = st.none() | st.lists(AT_LEAST_0, min_size=1).map(tuple)
    good = [[0], (0.5, 3), [1e300], None, "off"]
    return Case(bad, good, 'a list of numbers of at least 0, or "off"', valid)


TINY = 5e-324
AT_LEAST_0_CASE = number("a number of at least 0", [-TINY, -1, 10**400], [0, 1, 0.0, 1e300], AT_LEAST_0)
ABOVE_0_CASE = number("a number above 0", [0, 0.0, -0.0, -1, 10**400], [TINY, 1, 2.5], ABOVE_0)

CASES: dict[str, Case] = {
    "layout.include": selectors(),
    "layout.exclude": selectors(),
    "posterior.init": choice(
        SigmaInit, "powers", "constant", "network", "tolerance", "relative", "curvature", "curvature_root"
    ),
    "posterior.constant_sigma": ABOVE_0_CASE,
    "posterior.network_sigma": ABOVE_0_CASE,
    "posterior.tolerance": ABOVE_0_CASE,
    "posterior.scaled": switch(),
    "posterior.tolerance_batches": number(
        "a whole number of at least 1", [0, -1, 1.5, 10**400], [1, 32, 8.0], st.integers(1, 10**6)
    ),
    "posterior.relative_sigma": ABOVE_0_CASE,
    "posterior.curvature_batches": number(
        "a whole number of at least 1", [0, -1, 1.5, 10**400], [1, 32, 8.0], st.integers(1, 10**6)
    ),
    "posterior.curvature_sigma": ABOVE_0_CASE,
    "posterior.curvature_scale": optional("a number above 0", [0, -1], [TINY, 1e-6], ABOVE_0),
    "posterior.alpha": AT_LEAST_0_CASE,
    "posterior.cap": ABOVE_0_CASE,
    "posterior.learn_sigma": switch(),
    "posterior.noise_on_fixed": switch(),
    "clustering.rule": choice(Rule, "mean", "each", "nearest"),
    "clustering.b": optional(
        "a whole number of at least 0 and at most 30",
        [-1, 31, 7.5, 10**400],
        [0, 30, 7.0],
        st.integers(0, 30),
    ),
    "clustering.multiple": number(
        "a whole number of at least 1 and at most 31", [0, 32, 1.5, -3], [1, 31, 3.0], st.integers(1, 31)
    ),
    "clustering.most_values": optional(
        "a whole number of at least 2", [0, 1, 1.5, -3], [2, 32, 10**6], st.integers(2, 10**6)
    ),
    "clustering.delta": ABOVE_0_CASE,
    "clustering.omega_max": number(
        "a whole number of at least 1 and at most 6", [0, 7, 1.5, -4], [1, 6, 4.0], st.integers(1, 6)
    ),
    "clustering.rate": AT_LEAST_0_CASE,
    "clustering.zero_fix": switch(),
    "clustering.zero_first": AT_LEAST_0_CASE,
    "clustering.sweep": optional("a number above 0", [0, -1.0], [TINY, 16], ABOVE_0),
    "clustering.distance_floor": ABOVE_0_CASE,
    "clustering.fixed_sigma": choice(FixedSigma, "std", "keep"),
    "quantiser.bits": number(
        "a whole number of at least 2 and at most 8", [1, 9, 4.5, -4], [2, 8, 4.0], st.integers(2, 8)
    ),
    "quantiser.activation_bits": optional(
        "a whole number of at least 2 and at most 8", [1, 9, 4.5], [2, 8, 4.0], st.integers(2, 8)
    ),
    "quantiser.include_ends": switch(),
    "quantiser.codebooks": choice(Codebooks, "method", "network", "layer", "channel", "head"),
    "wfn.delta": number(
        "a number above 0 and at most 0.5", [0, 0.6, -1, 10**400], [TINY, 0.5], st.floats(1e-9, 0.5)
    ),
    "wfn.omega_max": number(
        "a whole number of at least 0 and at most 30", [-1, 31, 1.5], [0, 30, 20.0], st.integers(0, 30)
    ),
    "wfn.ratio": AT_LEAST_0_CASE,
    "wfn.temperature": ABOVE_0_CASE,
    "wfn.nearest": number(
        "a whole number of at least 1", [0, -1, 1.5, 10**400], [1, 16, 8.0], st.integers(1, 10**6)
    ),
    "training.learning_rate": AT_LEAST_0_CASE,
    "training.decay": choice(Decay, "none", "cosine"),
    "training.sigma_learning_rate": optional("a number of at least 0", [-1e-9], [0, 0.1], AT_LEAST_0),
    "training.momentum": number(
        "a number of at least 0 and at most 1", [-0.1, 1.1, 10**400], [0, 0.9, 1], st.floats(0, 1)
    ),
    "training.weight_decay": AT_LEAST_0_CASE,
    "training.clip_norm": optional("a number above 0", [0, -1], [1, 0.5], ABOVE_0),
    "training.precision": choice(Precision, "fp32", "bf16", "fp16"),
    "training.optimizer": choice(Optimizer, "sgd", "adamw"),
    "training.channels_last": switch(),
    "training.fused": switch(),
    "training.cuda_graph": switch(),
    "training.accumulate": number(
        "a whole number of at least 1", [0, -1, 1.5, 10**400], [1, 8, 2.0], st.integers(1, 10**6)
    ),
    "training.distill": switch(),
    "training.distill_share": number(
        "a number of at least 0 and at most 1", [-0.1, 1.1, 10**400], [0, 0.5, 1], st.floats(0, 1)
    ),
    "training.average": number(
        "a number of at least 0 and at most 0.99999",
        [-0.1, 1, 10**400],
        [0, 0.5, 0.999],
        st.floats(0, 0.99999),
    ),
    "training.blend": number(
        "a number of at least 0 and at most 1", [-0.1, 1.1, 10**400], [0, 0.5, 1], st.floats(0, 1)
    ),
    "training.cutmix": number(
        "a number of at least 0 and at most 1", [-0.1, 1.1, 10**400], [0, 0.5, 1], st.floats(0, 1)
    ),
    "training.cutout": number(
        "a whole number of at least 0 and at most 4096",
        [-1, 4097, 1.5, 10**400],
        [0, 8, 2.0],
        st.integers(0, 4096),
    ),
    "training.label_smoothing": number(
        "a number of at least 0 and at most 1", [-0.1, 1.1, 10**400], [0, 0.1, 1], st.floats(0, 1)
    ),
    "training.steps_per_epoch": optional(
        "a whole number of at least 1", [0, -1, 1.5, 10**400], [1, 391, 3.0], st.integers(1, 10**12)
    ),
    "schedule.fractions": fractions(),
    "schedule.warmup_epochs": AT_LEAST_0_CASE,
    "schedule.epochs_per_round": AT_LEAST_0_CASE,
    "schedule.epochs_of_rounds": numbers(),
    "schedule.epochs": AT_LEAST_0_CASE,
    "schedule.reestimate_in_rounds": switch(),
    "finish.reestimate_batchnorm": switch(),
    "finish.reestimate_epochs": ABOVE_0_CASE,
    "finish.polish_epochs": AT_LEAST_0_CASE,
    "finish.polish_learning_rate": AT_LEAST_0_CASE,
    "finish.fold_batchnorm": switch(),
    "finish.rest": choice(Rest, "float32", "float16", "bfloat16"),
    "target.max_drop": optional(
        "a number of at least 0 and at most 100", [-0.1, 100.5], [0, 0.5, 100], st.floats(0, 100)
    ),
    "target.bits": optional("a number above 0", [0, -1], [0.5, 2.5], ABOVE_0),
    "target.keep_states": switch(),
}

REFUSED = [(name, value) for name, case in CASES.items() for value in case.bad]
TAKEN = [(name, value) for name, case in CASES.items() for value in case.good]


def with_field(name: str, value: Any) -> Any:
    """The section of ``section.field`` with that one field set."""
    section, field = name.split(".")
    return SECTIONS[section](**{field: value})


def value_of(config: Config, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def test_every_field_of_every_section_has_a_case_here() -> None:
    parts = {item.name: item for item in dataclasses.fields(Config)}
    assert set(parts) == {"method", "seed", *SECTIONS}
    known = {f"{name}.{item.name}" for name, cls in SECTIONS.items() for item in dataclasses.fields(cls)}
    assert set(CASES) == known


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda x: repr(x)[:40])
def test_a_bad_value_is_refused_in_a_sentence_that_says_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        with_field(name, value)
    assert str(caught.value) == f"{name} is {value!r}: allowed is {CASES[name].allowed}"
    with pytest.raises(ConfigError) as again:
        Config().override({name: value})
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize(("name", "value"), TAKEN, ids=lambda x: repr(x)[:40])
def test_a_good_value_is_taken_as_it_is(name: str, value: Any) -> None:
    kept = getattr(with_field(name, value), name.split(".")[1])
    if value is None or value == "off":
        assert kept is None
    elif isinstance(value, (list, tuple)):
        assert isinstance(kept, tuple)
        assert len(kept) == len(value)
        if value != [nn.Embedding]:
            assert list(kept) == list(value)
    else:
        assert kept == value


@pytest.mark.parametrize("value", [-1, 2**63, 10**400, 0.5, "0", True, None, math.nan, math.inf, []])
def test_a_bad_seed_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^seed is .*: allowed is a whole number of at least 0"):
        Config(seed=value)


@pytest.mark.parametrize("value", [0, 1, 2**32, 2**63 - 1])
def test_a_good_seed_is_taken(value: int) -> None:
    assert Config(seed=value).seed == value


@pytest.mark.parametrize(("name", "section"), SECTIONS.items())
def test_a_section_must_be_of_its_own_class(name: str, section: type) -> None:
    wrong = PosteriorConfig() if section is not PosteriorConfig else LayoutConfig()
    for value in (wrong, None, {}, "paper"):
        with pytest.raises(ConfigError, match=rf"^{name} is .*: allowed is a {section.__name__}$"):
            Config(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["LSQ", "", None, 4])
def test_a_bad_method_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'^method is .*: allowed is one of "pwfn", "wfn", "lsq"'):
        Config(method=value)


@pytest.mark.parametrize("name", list(MethodName))
def test_every_method_has_its_settings_and_survives_toml(name: MethodName) -> None:
    config = Config.preset("recommended", name)
    assert config.method is name
    assert config == Config(method=name).override(METHOD_SETTINGS[name])
    assert Config.from_toml(config.to_toml()) == config
    assert Config.from_toml(f'method = "{name}"') == config


@pytest.mark.parametrize(
    ("name", "learning_rate", "decay"),
    [
        ("wfn", 1e-3, "none"),
        ("lsq", 1e-2, "cosine"),
        ("lsq+", 1e-2, "cosine"),
        ("apot", 1e-2, "cosine"),
        ("q-vit", 2e-4, "cosine"),
        ("kmeans", 1e-4, "cosine"),
        ("baseline", 1e-3, "none"),
    ],
)
def test_the_steps_of_the_other_methods(name: str, learning_rate: float, decay: str) -> None:
    """By the labels alone, and whatever is recommended for pwfn."""
    training = Config.preset("recommended", name).training
    assert (training.learning_rate, training.decay) == (learning_rate, decay)
    assert (training.distill, training.distill_share) == (False, 1.0)


def test_the_paper_preset_is_of_pwfn_alone_and_a_wrong_method_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="preset 'paper' is of the method pwfn: leave it out for lsq"):
        Config.preset("paper", "lsq")
    with pytest.raises(ConfigError, match=r"method 'lsk' is unknown: did you mean 'lsq'\?"):
        Config.preset("recommended", "lsk")


def test_names_become_enums_and_lists_become_tuples() -> None:
    config = Config().override({"clustering.rule": "nearest", "schedule.fractions": [0.5, 1]})
    assert config.clustering.rule is Rule.NEAREST
    assert config.schedule.fractions == (0.5, 1.0)
    assert LayoutConfig(include=[nn.Embedding]).include == ("type:torch.nn.modules.sparse.Embedding",)
    assert type(ClusteringConfig(b=7.0).b) is int  # type: ignore[arg-type]
    assert type(ClusteringConfig(delta=2).delta) is float


# The presets by hand: every setting that a run of them reads. No other test hinges on what is recommended.
PAPER: dict[str, Any] = {
    "method": "pwfn",
    "seed": 0,
    "layout.include": [],
    "layout.exclude": [],
    "posterior.init": "powers",
    "posterior.scaled": False,
    "posterior.alpha": 2**-11,
    "posterior.cap": 0.05,
    "posterior.learn_sigma": True,
    "posterior.noise_on_fixed": True,
    "clustering.rule": "mean",
    "clustering.b": 7,
    "clustering.multiple": 1,
    "clustering.most_values": "off",
    "clustering.delta": 1.0,
    "clustering.omega_max": 4,
    "clustering.rate": 0.0,
    "clustering.zero_fix": False,
    "clustering.zero_first": 0.0,
    "clustering.sweep": "off",
    "clustering.distance_floor": 2**-30,
    "clustering.fixed_sigma": "std",
    "quantiser.bits": 4,
    "quantiser.activation_bits": "off",
    "quantiser.include_ends": False,
    "quantiser.codebooks": "method",
    "training.optimizer": "sgd",
    "training.learning_rate": 0.001,
    "training.sigma_learning_rate": "off",
    "training.momentum": 0.9,
    "training.weight_decay": 1e-4,
    "training.decay": "none",
    "training.clip_norm": 1.0,
    "training.precision": "fp32",
    "training.channels_last": False,
    "training.fused": True,
    "training.cuda_graph": False,
    "training.accumulate": 1,
    "training.distill": False,
    "training.average": 0.0,
    "training.blend": 0.0,
    "training.cutmix": 0.0,
    "training.cutout": 0,
    "training.label_smoothing": 0.0,
    "training.steps_per_epoch": "off",
    "schedule.fractions": [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0],
    "schedule.warmup_epochs": 0.05,
    "schedule.epochs_per_round": 3.0,
    "schedule.epochs_of_rounds": "off",
    "schedule.reestimate_in_rounds": False,
    "finish.reestimate_batchnorm": False,
    "finish.reestimate_epochs": 1.0,
    "finish.polish_epochs": 0.0,
    "finish.polish_learning_rate": 1e-3,
    "finish.fold_batchnorm": False,
    "finish.rest": "float32",
    "target.max_drop": "off",
    "target.bits": "off",
    "target.keep_states": False,
}


def test_the_paper_preset_is_these_settings() -> None:
    """All that a run of it reads; what only another method or another start of sigma reads is left out."""
    assert Config.preset("paper").in_force() == PAPER
    assert tuple(PAPER["schedule.fractions"]) == PAPER_FRACTIONS
    no_prior = Config.preset("paper").override({"posterior.init": "constant"})
    assert no_prior.posterior.constant_sigma == 1e-3


RECOMMENDED: dict[str, Any] = {
    "posterior.init": "tolerance",
    "posterior.tolerance": 0.1,
    "posterior.tolerance_batches": 8,
    "posterior.learn_sigma": False,
    "posterior.noise_on_fixed": True,
    "clustering.rule": "each",
    "clustering.b": "off",
    "clustering.sweep": 16.0,
    "training.learning_rate": 0.001,
    "training.decay": "none",
    "training.distill": False,
    "finish.reestimate_batchnorm": True,
    "finish.polish_epochs": 1.0,
}
"""What may differ from the paper's; nothing else does."""


def test_the_recommended_preset_is_the_papers_but_for_these() -> None:
    assert Config.preset("recommended") == Config()
    assert Config().in_force() == {**PAPER, **RECOMMENDED}
    paper, ours = Config.preset("paper"), Config()
    differing = {name for name in CASES if value_of(paper, name) != value_of(ours, name)}
    assert differing <= set(RECOMMENDED)  # of what is not read, either


QUICK: dict[str, Any] = {
    "posterior.init": "tolerance",
    "posterior.tolerance": 0.1,
    "posterior.tolerance_batches": 8,
    "posterior.learn_sigma": False,
    "posterior.noise_on_fixed": False,
    "clustering.rule": "each",
    "clustering.b": "off",
    "clustering.sweep": 16.0,
    "schedule.fractions": [0.6, 0.9, 1.0],
    "schedule.epochs_of_rounds": [0.05, 1.2, 0.75],
    "finish.reestimate_batchnorm": True,
    "finish.reestimate_epochs": 0.1,
    "finish.polish_epochs": 1.0,
}


def test_the_quick_preset_is_the_papers_but_for_these() -> None:
    assert Config.preset("quick").in_force() == {**PAPER, **QUICK}


def test_a_run_reads_the_sections_of_its_method_and_what_its_start_of_sigma_needs() -> None:
    def sections(method: MethodName) -> set[str]:
        return {name.partition(".")[0] for name in Config(method=method).in_force()}

    shared = {"method", "seed", "layout", "quantiser", "training", "schedule", "finish", "target"}
    assert sections(MethodName.PWFN) == shared | {"posterior", "clustering"}
    assert sections(MethodName.WFN) == shared | {"wfn"}
    assert sections(MethodName.LSQ) == shared
    starts = {
        "powers": set(),
        "constant": {"constant_sigma"},
        "network": {"network_sigma"},
        "tolerance": {"tolerance", "tolerance_batches"},
        "relative": {"relative_sigma"},
        "curvature": {"curvature_batches", "curvature_sigma", "curvature_scale"},
        "curvature_root": {"curvature_batches", "curvature_sigma", "curvature_scale"},
    }
    always = {"init", "scaled", "alpha", "cap", "learn_sigma", "noise_on_fixed"}
    for init, own in starts.items():
        read = Config().override({"posterior.init": init}).in_force()
        found = {name.removeprefix("posterior.") for name in read if name.startswith("posterior.")}
        assert found == always | own
        read = Config().override({"posterior.init": init, "posterior.scaled": True}).in_force()
        assert read.keys() >= {"posterior.tolerance", "posterior.tolerance_batches"}
    for distill in (True, False):
        read = Config().override({"training.distill": distill}).in_force()
        assert ("training.distill_share" in read) == distill
    for method in MethodName:
        by_rounds = method in (MethodName.PWFN, MethodName.WFN)
        assert ("schedule.epochs" in Config(method=method).in_force()) == (not by_rounds)


def test_a_record_without_a_setting_has_its_first_default() -> None:
    """What was recommended before there was a choice is what such a record is of."""
    old = Config.recorded({"posterior": {"init": "powers"}, "clustering": {"rule": "each"}})
    after = {"clustering.sweep": 16.0, "finish.reestimate_batchnorm": True, "finish.polish_epochs": 1.0}
    assert old.in_force() == {**PAPER, **after, "clustering.rule": "each"}
    assert Config.recorded({"posterior": {"init": "tolerance"}}).posterior.tolerance == 0.2
    assert Config.recorded({"posterior": {"init": "network"}}).posterior.network_sigma == 0.5
    assert Config.recorded({"method": "lsq"}).in_force() == Config.preset("recommended", "lsq").in_force()


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_record_with_all_settings_is_read_as_it_is(preset: str) -> None:
    config = Config.preset(preset).override({"seed": 3})
    assert Config.recorded(config.to_dict()) == config


def test_a_record_of_unknown_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"setting 'posterior.sigmas' is unknown"):
        Config.recorded({"posterior": {"sigmas": 1}})


def test_the_quick_preset_trains_three_epochs_in_all() -> None:
    quick = Config.preset("quick")
    plan = rounds_of_fixing(quick)
    assert sum(stretch.epochs for stretch in plan) + quick.finish.polish_epochs == pytest.approx(3.0)
    assert plan[-1].fraction == 1
    assert quick.clustering.rule is Config().clustering.rule


@pytest.mark.parametrize("name", ["papr", "Paper", "", "ours", None, 3, ["paper"], {}])
def test_an_unknown_preset_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^preset .* is unknown: ") as caught:
        Config.preset(name)
    assert "paper" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("clustering.rul", "did you mean 'rule'?"),
        ("training.learning_rat", "did you mean 'learning_rate'?"),
        ("shedule.fractions", "did you mean 'schedule'?"),
        ("sed", "did you mean 'seed'?"),
        (
            "posterior.zzz",
            "allowed is one of init, scaled, constant_sigma, network_sigma, tolerance",
        ),
        (
            "zzz",
            "allowed is one of method, seed, layout, posterior, clustering, quantiser, wfn, training",
        ),
        ("clustering.b.c", "clustering.b.c"),
        ("clustering.", "did you mean 'clustering'?"),
        (".rule", "''"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().override({key: 1})
    assert suggestion in str(caught.value)
    assert "is unknown" in str(caught.value)


def test_override_gives_a_changed_copy() -> None:
    config = Config()
    changed = config.override({"seed": 3, "clustering.b": 8, "clustering.rule": "mean", "posterior.alpha": 0})
    assert config == Config()
    assert (changed.seed, changed.clustering.b, changed.posterior.alpha) == (3, 8, 0.0)
    assert changed.clustering == ClusteringConfig(b=8, rule=Rule.MEAN)
    assert changed.override({}) == changed


def test_override_takes_whole_sections_and_tables_and_later_keys_win() -> None:
    table = {"rule": "mean"}
    merged = Config().override({"clustering": table, "clustering.b": 8})
    assert (merged.clustering.rule, merged.clustering.b) == (Rule.MEAN, 8)
    assert table == {"rule": "mean"}  # the caller's own dictionary
    assert Config().override({"clustering": ClusteringConfig(), "clustering.b": 8}).clustering.b == 8
    assert Config().override({"clustering.b": 8, "clustering": {"rule": "mean"}}).clustering.b == 8
    assert Config().override({"clustering.b": 8, "clustering": ClusteringConfig()}).clustering.b is None


@pytest.mark.parametrize(
    "changes",
    [{"clustering": 3}, {"seed": {"a": 1}}, {"seed.a": 1}, {3: 4}, {"clustering": {3: 4}}, {None: 1}],
)
def test_override_refuses_what_is_no_setting(changes: Any) -> None:
    with pytest.raises(ConfigError):
        Config().override(changes)


def test_settings_are_frozen() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    for name in CASES:
        section, field = name.split(".")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(config, section), field, value_of(config, name))


def test_equal_settings_are_equal_and_hash_alike() -> None:
    a = Config().override({"layout.include": ["x"], "schedule.fractions": [0.5, 1]})
    b = Config().override({"layout.include": ("x",), "schedule.fractions": (0.5, 1.0)})
    assert a == b
    assert hash(a) == hash(b)
    assert a != a.override({"seed": 1})
    assert len({a, b, Config()}) == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_toml(preset: str) -> None:
    config = Config.preset(preset)
    assert Config.from_toml(config.to_toml()) == config


VALID_CONFIGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**63 - 1)}, optional={name: case.valid for name, case in CASES.items()}
).map(lambda changes: Config().override(changes))


@given(VALID_CONFIGS)
@settings(deadline=None, max_examples=60)
def test_any_valid_settings_survive_toml(config: Config) -> None:
    text = config.to_toml()
    assert Config.from_toml(text) == config
    assert hash(Config.from_toml(text)) == hash(config)
    assert tomllib.loads(text) == config.to_dict()


def test_toml_lists_every_setting_with_a_comment_that_says_what_is_allowed() -> None:
    text = Config().to_toml()
    tables = tomllib.loads(text)
    sections = {name: table for name, table in tables.items() if isinstance(table, dict)}
    assert {f"{s}.{k}" for s, table in sections.items() for k in table} == set(CASES)
    lines = text.splitlines()
    for name, case in CASES.items():
        section, field = name.split(".")
        start = lines.index(f"[{section}]")
        at = next(i for i in range(start, len(lines)) if lines[i].startswith(f"{field} = "))
        assert lines[at - 1].startswith("# ")
        assert lines[at - 1].endswith(": " + case.allowed)


def test_toml_starts_from_its_preset_and_names_only_what_differs() -> None:
    config = Config.from_toml('preset = "paper"\nseed = 4\n[clustering]\nb = 8\nsweep = "off"\n')
    assert config == Config.preset("paper").override({"seed": 4, "clustering.b": 8})
    assert Config.from_toml("") == Config.preset("recommended")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clustering", "not valid TOML"),
        ("seed = ", "not valid TOML"),
        ("[clustering]\nb = 7\nb = 8", "not valid TOML"),
        ("seed = -1", "seed is -1: allowed is"),
        ("[clustering]\nrule = 'closest'", "clustering.rule is 'closest': allowed is one of"),
        ("[clustering]\nrules = 'each'", "did you mean 'rule'?"),
        ("[clusterin]\nb = 7", "did you mean 'clustering'?"),
        ("clustering = 3", "clustering is 3: allowed is a table of settings"),
        ("b = 7", "setting 'b' is unknown"),
        ("preset = 'papers'", "did you mean 'paper'?"),
        ("preset = 3", "preset is 3: allowed is one of recommended, paper"),
        ("[training]\nlearning_rate = nan", "training.learning_rate is nan"),
        ("[training]\nlearning_rate = 2024-01-01", "training.learning_rate is datetime.date"),
        ("[schedule]\nfractions = [0.5, 0.9]", "the last of them 1"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_that_names_the_file(
    text: str, words: str, tmp_path: Any
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00seed")
    for path in (tmp_path / "missing.toml", tmp_path, binary, "nul\0.toml"):
        with pytest.raises(ConfigError, match="cannot read the settings") as caught:
            Config.load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert isinstance(caught.value, PwfnError)


def test_a_file_gives_the_same_settings_as_its_text(tmp_path: Any) -> None:
    config = Config.preset("paper").override({"layout.exclude": ["kopf.é*"], "training.clip_norm": None})
    (tmp_path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    assert Config.load(tmp_path / "run.toml") == config
    assert Config.load(str(tmp_path / "run.toml")) == config
