"""Every setting of a run: frozen, checked on construction, TOML in and out, three presets.

A setting is written ``section.name`` (``clustering.rule``) in messages, in overrides and,
as a key of a table, in TOML. ``None`` is written ``"off"`` there.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pwfn.config.checks import Choice, Number, Section, hint
from pwfn.config.sections import (
    ClusteringConfig,
    Decay,
    FinishConfig,
    LayoutConfig,
    MethodName,
    Optimizer,
    PosteriorConfig,
    QuantiserConfig,
    Rule,
    ScheduleConfig,
    SigmaInit,
    TargetConfig,
    TrainingConfig,
    WfnConfig,
)
from pwfn.errors import ConfigError

_SINGLE: dict[str, Number | Choice] = {
    "method": Choice(MethodName),
    "seed": Number(0, 2**63 - 1, whole=True),
}
_SECTIONS: dict[str, type[Section]] = {
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

    method: MethodName = MethodName.PWFN
    seed: int = 0
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    posterior: PosteriorConfig = field(default_factory=PosteriorConfig)
    clustering: ClusteringConfig = field(default_factory=ClusteringConfig)
    quantiser: QuantiserConfig = field(default_factory=QuantiserConfig)
    wfn: WfnConfig = field(default_factory=WfnConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    finish: FinishConfig = field(default_factory=FinishConfig)
    target: TargetConfig = field(default_factory=TargetConfig)

    def __post_init__(self) -> None:
        for name, check in _SINGLE.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, check(value))
            except (ValueError, OverflowError):
                raise ConfigError(f"{name} is {value!r}: allowed is {check.allowed()}") from None
        for name, section in _SECTIONS.items():
            if not isinstance(getattr(self, name), section):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: allowed is a {section.__name__}")

    @classmethod
    def preset(cls, name: str, method: str = MethodName.PWFN) -> Self:
        """The settings of that name, ``paper`` (to the letter), ``recommended`` or ``quick``, for a method.

        With ``recommended`` all weights have one sigma, by what the network tolerates, which does not learn.
        ``paper`` has the paper's: sigma starts from the powers of two and learns, the rule is ``mean``, the
        grid begins at 2^-7, there is no sweep, and nothing after the last fixing, no BatchNorm re-estimation
        and no polish. ``quick`` has one sigma for all too, in three rounds and three epochs in all, one of
        them polish. These two are for ``pwfn`` alone.

        >>> Config.preset("recommended", "lsq").training.decay
        <Decay.COSINE: 'cosine'>
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(f"preset {name!r} is unknown{hint(name, PRESETS)}")
        if not isinstance(method, str) or method not in list(MethodName):
            raise ConfigError(f"method {method!r} is unknown{hint(method, list(MethodName))}")
        if PRESETS[name] and method != MethodName.PWFN:
            raise ConfigError(f"preset {name!r} is of the method pwfn: leave it out for {method}")
        return cls(method=MethodName(method)).override(
            {**METHOD_SETTINGS[MethodName(method)], **PRESETS[name]}
        )

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with ``{"section.name": value}`` changed, in that order; unknown names get a suggestion."""
        changed = self
        for key, value in changes.items():
            section, _, name = str(key).partition(".")
            changed = changed._merged({section: {name: value}} if name else {key: value})
        return changed

    def _merged(self, tables: Mapping[str, Any]) -> Self:
        known = (*_SINGLE, *_SECTIONS)
        changed: dict[str, Any] = {}
        for name, value in tables.items():
            if name not in known:
                raise ConfigError(f"setting {name!r} is unknown{hint(name, known)}")
            if name in _SINGLE or isinstance(value, Section):
                changed[name] = value
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is {value!r}: allowed is a table of settings")
            section = getattr(self, name)
            fields = [item.name for item in dataclasses.fields(section)]
            for key in value:
                if key not in fields:
                    raise ConfigError(f"setting '{name}.{key}' is unknown{hint(key, fields)}")
            changed[name] = dataclasses.replace(section, **value)
        return dataclasses.replace(self, **changed)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Settings from TOML; what it does not name is as in its ``preset`` and for its ``method``.

        They are ``recommended`` and ``pwfn`` unless the text names others.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the settings are not valid TOML: {error}") from None
        preset = tables.pop("preset", "recommended")
        if not isinstance(preset, str):
            raise ConfigError(f"preset is {preset!r}: allowed is one of {', '.join(PRESETS)}")
        return cls.preset(preset, tables.get("method", MethodName.PWFN))._merged(tables)

    @classmethod
    def recorded(cls, found: Mapping[str, Any]) -> Self:
        """Settings from a run's record, which may be older than some of them.

        What a record does not have came after it, and was then as its first default: see FIRST_DEFAULTS
        where that may not be the default of today.

        >>> Config.recorded({"posterior": {"init": "powers"}}).posterior.learn_sigma
        True
        """
        preset = cls.preset("recommended", str(found.get("method", MethodName.PWFN)))
        return preset.override({**FIRST_DEFAULTS, **METHOD_SETTINGS[preset.method]}).override(found)

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
        tables: dict[str, Any] = {name: _plain(getattr(self, name)) for name in _SINGLE}
        for name in _SECTIONS:
            section = getattr(self, name)
            tables[name] = {
                item.name: _plain(getattr(section, item.name)) for item in dataclasses.fields(section)
            }
        return tables

    def in_force(self) -> dict[str, Any]:
        """The settings that a run reads, plain and by ``section.name``: runs alike in them are the same run.

        Left out is what is of another method or of another ``posterior.init``, the tolerance where sigma
        does not go by it, the share of a distillation that there is not, and the length of training as a
        whole where it goes by rounds.

        >>> ["posterior.tolerance" in Config.preset(name).in_force() for name in ("recommended", "paper")]
        [True, False]
        """
        read: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if not isinstance(value, Mapping):
                read[name] = value
            elif _METHOD_OF.get(name, self.method) is self.method:
                read |= {f"{name}.{key}": item for key, item in value.items()}
        if not self.training.distill:
            del read["training.distill_share"]
        if self.method in _BY_ROUNDS:
            del read["schedule.epochs"]
        if self.method is MethodName.PWFN and not self.posterior.by_tolerance:
            del read["posterior.tolerance"], read["posterior.tolerance_batches"]
        init = self.posterior.init
        return {name: value for name, value in read.items() if init in _INITS_OF.get(name, SigmaInit)}

    def to_toml(self) -> str:
        """TOML with every setting and, as a comment, what it does and what is allowed.

        >>> Config.from_toml(Config.preset("paper").to_toml()) == Config.preset("paper")
        True
        """
        import tomli_w

        tables = self.to_dict()
        lines = [tomli_w.dumps({name: tables.pop(name)}).strip() for name in _SINGLE]
        for name, table in tables.items():
            lines += ["", f"[{name}]"]
            for item in dataclasses.fields(_SECTIONS[name]):  # type: ignore[arg-type]  # sections are dataclasses
                lines.append(f"# {item.metadata['help']}: {item.metadata['check'].allowed()}")
                lines.append(tomli_w.dumps({item.name: table[item.name]}).strip())
        return "\n".join(lines) + "\n"


_PLAIN_STEPS: dict[str, Any] = {
    "training.learning_rate": 1e-3,
    "training.decay": Decay.NONE,
    "training.distill": False,
    "training.distill_share": 1.0,
}
"""The paper's. The other methods and ``quick`` have them too, unless they name others."""

PRESETS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "paper": {
        **_PLAIN_STEPS,
        "posterior.init": SigmaInit.POWERS,
        "posterior.learn_sigma": True,
        "posterior.noise_on_fixed": True,
        "clustering.rule": Rule.MEAN,
        "clustering.b": 7,
        "clustering.sweep": None,
        "finish.reestimate_batchnorm": False,
        "finish.polish_epochs": 0.0,
    },
    "quick": {
        **_PLAIN_STEPS,
        "posterior.init": SigmaInit.TOLERANCE,
        "posterior.tolerance": 0.1,
        "posterior.learn_sigma": False,
        "posterior.noise_on_fixed": False,
        "clustering.b": None,
        "schedule.fractions": (0.6, 0.9, 1.0),
        "schedule.epochs_of_rounds": (0.05, 1.2, 0.75),
        "finish.reestimate_epochs": 0.1,
        "finish.polish_epochs": 1.0,
    },
}
"""What each preset sets; some of it is as by default, and named so that it stays when a default changes."""

FIRST_DEFAULTS: dict[str, Any] = {
    **_PLAIN_STEPS,
    "posterior.init": SigmaInit.POWERS,
    "posterior.network_sigma": 0.5,
    "posterior.tolerance": 0.2,
    "posterior.learn_sigma": True,
    "posterior.noise_on_fixed": True,
    "clustering.b": 7,
}
"""What a setting was by default when there first was such a setting, where the default has changed or may."""

_METHOD_OF = {"posterior": MethodName.PWFN, "clustering": MethodName.PWFN, "wfn": MethodName.WFN}
"""The sections that one method alone reads."""

_BY_ROUNDS = (MethodName.PWFN, MethodName.WFN)
"""The methods that fix weights in rounds, each with its own epochs."""

_CURVATURES = (SigmaInit.CURVATURE, SigmaInit.CURVATURE_ROOT)
_INITS_OF = {
    "posterior.constant_sigma": (SigmaInit.CONSTANT,),
    "posterior.network_sigma": (SigmaInit.NETWORK,),
    "posterior.relative_sigma": (SigmaInit.RELATIVE,),
    "posterior.curvature_batches": _CURVATURES,
    "posterior.curvature_sigma": _CURVATURES,
    "posterior.curvature_scale": _CURVATURES,
}
"""The settings that say where sigma starts, and with which ``posterior.init`` a run reads them."""

_TRAINED_ON_ITS_CODEBOOK: dict[str, Any] = {
    # One optimiser for the whole run. There is no noise to re-estimate statistics after, and
    # all that is not quantised was trained along with what is: nothing is left to polish.
    **_PLAIN_STEPS,
    "training.learning_rate": 0.01,
    "training.decay": Decay.COSINE,
    "training.clip_norm": None,
    "finish.reestimate_batchnorm": False,
    "finish.polish_epochs": 0.0,
}
METHOD_SETTINGS: dict[MethodName, dict[str, Any]] = {
    MethodName.PWFN: {},
    MethodName.WFN: {**_PLAIN_STEPS, "training.clip_norm": None},
    MethodName.LSQ: _TRAINED_ON_ITS_CODEBOOK,
    MethodName.LSQ_PLUS: _TRAINED_ON_ITS_CODEBOOK,
    MethodName.APOT: _TRAINED_ON_ITS_CODEBOOK,
    MethodName.QVIT: {
        **_TRAINED_ON_ITS_CODEBOOK,
        "training.optimizer": Optimizer.ADAMW,
        "training.learning_rate": 2e-4,
        "training.clip_norm": 1.0,
    },
    # A centroid's gradient is the sum over its members: steps are small, and none may be wild.
    MethodName.KMEANS: {
        **_TRAINED_ON_ITS_CODEBOOK,
        "training.learning_rate": 1e-4,
        "training.clip_norm": 1.0,
    },
    MethodName.BASELINE: {
        **_PLAIN_STEPS,
        "schedule.epochs": 0.0,
        "finish.reestimate_batchnorm": False,
        "finish.polish_epochs": 0.0,
    },
}
"""What each method sets beside the defaults, which are those of ``pwfn``."""


def _plain(value: Any) -> Any:
    if value is None:
        return "off"
    if isinstance(value, StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
