"""Every setting of a run: frozen, checked on construction, TOML in and out, two presets.

A setting is written ``section.name`` (``clustering.rule``) in messages, in overrides and,
as a key of a table, in TOML. ``None`` is written ``"off"`` there.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pwfn.checks import Choice, Fractions, Number, Section, Selectors, Switch, setting
from pwfn.errors import ConfigError

PAPER_FRACTIONS: tuple[float, ...] = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0)
"""Fraction of all weights that is fixed after each of the ten rounds."""


class Rule(StrEnum):
    """Which weights are fixed at the chosen centre (D is the distance to it in sigmas)."""

    MEAN = "mean"  # the longest prefix, by D, whose mean D is at most delta: the paper's text
    EACH = "each"  # every weight with D at most delta: the authors' released program
    NEAREST = "nearest"  # like mean, among the weights whose nearest candidate is the centre


class SigmaInit(StrEnum):
    """Where sigma starts."""

    POWERS = "powers"  # by relative distance to the powers of two on either side: the prior
    CONSTANT = "constant"  # one value for all: the paper's "no prior"


class FixedSigma(StrEnum):
    """Which sigma a weight has once it is fixed."""

    STD = "std"  # population standard deviation of the means that moved together
    KEEP = "keep"  # the sigma it had


class Optimizer(StrEnum):
    """What makes the steps."""

    SGD = "sgd"
    ADAMW = "adamw"  # momentum is its first beta, 0.999 the second


class Precision(StrEnum):
    """Number type of the forward and backward pass (weights and updates stay float32)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"  # with a loss scale that adapts itself


@dataclass(frozen=True)
class LayoutConfig(Section):
    """Which parameters are compressed, beyond the weights and biases of conv and linear layers."""

    _name = "layout"
    include: Sequence[str | type] = setting((), Selectors(), "compress these as well")
    exclude: Sequence[str | type] = setting((), Selectors(), "leave these out (wins over include)")


@dataclass(frozen=True)
class PosteriorConfig(Section):
    """The Gaussian weights: where sigma starts, and what keeps it from collapsing."""

    _name = "posterior"
    init: SigmaInit = setting(SigmaInit.POWERS, Choice(SigmaInit), "where sigma starts")
    constant_sigma: float = setting(
        1e-3, Number(0, above_low=True), 'the starting sigma for init = "constant"'
    )
    alpha: float = setting(2**-11, Number(0), "strength of the regulariser")
    cap: float = setting(0.05, Number(0, above_low=True), "S: sigma above it is not rewarded")
    noise_on_fixed: bool = setting(True, Switch(), "fixed weights are sampled in training too")


@dataclass(frozen=True)
class ClusteringConfig(Section):
    """One fixing round."""

    _name = "clustering"
    rule: Rule = setting(Rule.EACH, Choice(Rule), "which weights are fixed at a centre")
    b: int = setting(7, Number(0, 30, whole=True), "smallest power of two is 2^-b")
    delta: float = setting(1.0, Number(0, above_low=True), "first threshold, in sigmas")
    omega_max: int = setting(4, Number(1, 6, whole=True), "most powers of two in a centre")
    zero_fix: bool = setting(False, Switch(), "weights below 2^-b are at distance 0 from 0")
    sweep: float | None = setting(
        16.0,
        Number(0, above_low=True, optional=True),
        "once delta would pass it, the rest go each to their own nearest candidate",
    )
    distance_floor: float = setting(2**-30, Number(0, above_low=True), "smallest sigma used in a distance")
    fixed_sigma: FixedSigma = setting(FixedSigma.STD, Choice(FixedSigma), "the sigma of a fixed weight")


@dataclass(frozen=True)
class TrainingConfig(Section):
    """The optimiser, its state afresh in every round."""

    _name = "training"
    optimizer: Optimizer = setting(Optimizer.SGD, Choice(Optimizer), "what makes the steps")
    learning_rate: float = setting(1e-3, Number(0), "for mu and the uncompressed parameters")
    sigma_learning_rate: float | None = setting(
        None, Number(0, optional=True), 'for sigma; "off": the same as learning_rate'
    )
    momentum: float = setting(0.9, Number(0, 1), "of SGD; the first beta of AdamW")
    weight_decay: float = setting(1e-4, Number(0), "on mu and the uncompressed; never on sigma")
    clip_norm: float | None = setting(
        1.0,
        Number(0, above_low=True, optional=True),
        "largest norm of the task's gradient, before the regulariser's part is added",
    )
    precision: Precision = setting(
        Precision.FP32, Choice(Precision), "number type of the forward and backward pass"
    )
    channels_last: bool = setting(
        False, Switch(), "images in the order that convolutions in bf16 and fp16 are fastest with"
    )
    fused: bool = setting(
        True, Switch(), "draw and step in one pass over the vectors, where one process does it alone"
    )
    cuda_graph: bool = setting(
        False, Switch(), "on CUDA, record forward and backward once and replay it: Python code runs no more"
    )
    accumulate: int = setting(
        1, Number(1, whole=True), "batches averaged into one step, each with its own noise"
    )
    steps_per_epoch: int | None = setting(
        None,
        Number(1, whole=True, optional=True),
        'batches in an epoch; "off": the length of the loader',
    )


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """Rounds: how much is fixed, and how long is trained before each."""

    _name = "schedule"
    fractions: Sequence[float] = setting(
        PAPER_FRACTIONS, Fractions(), "fraction of the weights fixed after each round"
    )
    warmup_epochs: float = setting(0.05, Number(0), "trained before the first round's fixing")
    epochs_per_round: float = setting(3.0, Number(0), "trained before each other fixing")


@dataclass(frozen=True)
class FinishConfig(Section):
    """After the last round, with every compressed weight in place."""

    _name = "finish"
    reestimate_batchnorm: bool = setting(True, Switch(), "gather BatchNorm statistics again, with noise off")
    reestimate_epochs: float = setting(1.0, Number(0, above_low=True), "data used for that")
    polish_epochs: float = setting(1.0, Number(0), "train the uncompressed parameters alone")
    polish_learning_rate: float = setting(1e-3, Number(0), "for that")


@dataclass(frozen=True)
class TargetConfig(Section):
    """What the result must reach; with a target, the best state on the way that meets it is kept."""

    _name = "target"
    max_drop: float | None = setting(
        None, Number(0, 100, optional=True), "points of accuracy (of 100) that may be lost"
    )
    bits: float | None = setting(
        None, Number(0, above_low=True, optional=True), "most entropy a weight may have, in bits"
    )
    keep_states: bool = setting(
        False, Switch(), "score and keep the whole network as it would be after every round, target or not"
    )

    @property
    def wanted(self) -> bool:
        """Whether there is any target."""
        return self.max_drop is not None or self.bits is not None


_SECTIONS: dict[str, type[Section]] = {
    "layout": LayoutConfig,
    "posterior": PosteriorConfig,
    "clustering": ClusteringConfig,
    "training": TrainingConfig,
    "schedule": ScheduleConfig,
    "finish": FinishConfig,
    "target": TargetConfig,
}


@dataclass(frozen=True)
class Config:
    """All settings of a compression run. ``Config()`` is the preset ``recommended``.

    >>> Config.preset("paper").clustering.rule
    <Rule.MEAN: 'mean'>
    >>> Config().override({"clustering.b": 8}).clustering.b
    8
    >>> Config().override({"clustering.rule": "closest"})
    Traceback (most recent call last):
    ...
    pwfn.errors.ConfigError: clustering.rule is 'closest': allowed is one of "mean", "each", "nearest"
    """

    seed: int = 0
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    posterior: PosteriorConfig = field(default_factory=PosteriorConfig)
    clustering: ClusteringConfig = field(default_factory=ClusteringConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    finish: FinishConfig = field(default_factory=FinishConfig)
    target: TargetConfig = field(default_factory=TargetConfig)

    def __post_init__(self) -> None:
        check = Number(0, 2**63 - 1, whole=True)
        try:
            object.__setattr__(self, "seed", check(self.seed))
        except (ValueError, OverflowError):
            raise ConfigError(f"seed is {self.seed!r}: allowed is {check.allowed()}") from None
        for name, section in _SECTIONS.items():
            if not isinstance(getattr(self, name), section):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: allowed is a {section.__name__}")

    @classmethod
    def preset(cls, name: str) -> Self:
        """The settings of that name: ``paper`` (to the letter) or ``recommended``.

        ``paper`` keeps the paper's rule (``mean``), has no sweep, and stops after the last
        fixing: no BatchNorm re-estimation, no polish.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(f"preset {name!r} is unknown{_hint(name, PRESETS)}")
        return cls().override(PRESETS[name])

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with ``{"section.name": value}`` changed, in that order; unknown names get a suggestion."""
        changed = self
        for key, value in changes.items():
            section, _, name = str(key).partition(".")
            changed = changed._merged({section: {name: value}} if name else {key: value})
        return changed

    def _merged(self, tables: Mapping[str, Any]) -> Self:
        known = ("seed", *_SECTIONS)
        changed: dict[str, Any] = {}
        for name, value in tables.items():
            if name not in known:
                raise ConfigError(f"setting {name!r} is unknown{_hint(name, known)}")
            if name == "seed" or isinstance(value, Section):
                changed[name] = value
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is {value!r}: allowed is a table of settings")
            section = getattr(self, name)
            fields = [item.name for item in dataclasses.fields(section)]
            for key in value:
                if key not in fields:
                    raise ConfigError(f"setting '{name}.{key}' is unknown{_hint(key, fields)}")
            changed[name] = dataclasses.replace(section, **value)
        return dataclasses.replace(self, **changed)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Settings from TOML; what it does not name is as in its ``preset`` (``recommended``)."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the settings are not valid TOML: {error}") from None
        preset = tables.pop("preset", "recommended")
        if not isinstance(preset, str):
            raise ConfigError(f"preset is {preset!r}: allowed is one of {', '.join(PRESETS)}")
        return cls.preset(preset)._merged(tables)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Settings from a TOML file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path at all
            raise ConfigError(f"{path}: cannot read the settings: {error}") from None
        try:
            return cls.from_toml(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and tables, ``None`` as ``"off"``."""
        tables: dict[str, Any] = {"seed": self.seed}
        for name in _SECTIONS:
            section = getattr(self, name)
            tables[name] = {
                item.name: _plain(getattr(section, item.name)) for item in dataclasses.fields(section)
            }
        return tables

    def to_toml(self) -> str:
        """TOML with every setting and, as a comment, what it does and what is allowed.

        >>> Config.from_toml(Config.preset("paper").to_toml()) == Config.preset("paper")
        True
        """
        import tomli_w

        lines = [tomli_w.dumps({"seed": self.seed}).strip()]
        for name, table in self.to_dict().items():
            if name == "seed":
                continue
            lines += ["", f"[{name}]"]
            for item in dataclasses.fields(_SECTIONS[name]):  # type: ignore[arg-type]  # sections are dataclasses
                lines.append(f"# {item.metadata['help']}: {item.metadata['check'].allowed()}")
                lines.append(tomli_w.dumps({item.name: table[item.name]}).strip())
        return "\n".join(lines) + "\n"


PRESETS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "paper": {
        "clustering.rule": Rule.MEAN,
        "clustering.sweep": None,
        "finish.reestimate_batchnorm": False,
        "finish.polish_epochs": 0.0,
    },
}
"""What each preset changes from the defaults."""


def _plain(value: Any) -> Any:
    if value is None:
        return "off"
    if isinstance(value, StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f": did you mean {near[0]!r}?" if near else f": allowed is one of {', '.join(names)}"
