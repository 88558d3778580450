"""All settings of a run: frozen, checked on construction, TOML in and out, four presets.

A setting is written ``section.name`` (``fixing.rule``) in messages and overrides, and as a key of a
table in TOML. ``None`` is written ``"off"`` there.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pwfn.config.checks import Number, Section, hint
from pwfn.config.sections import (
    PAPER_FRACTIONS,
    FinishConfig,
    FixingConfig,
    LayoutConfig,
    PosteriorConfig,
    ScheduleConfig,
    TargetConfig,
    TrainingConfig,
)
from pwfn.errors import ConfigError

_SEED = Number(0, 2**63 - 1, whole=True)
_SECTIONS: dict[str, type[Section]] = {
    "layout": LayoutConfig,
    "posterior": PosteriorConfig,
    "fixing": FixingConfig,
    "training": TrainingConfig,
    "schedule": ScheduleConfig,
    "finish": FinishConfig,
    "target": TargetConfig,
}
_KNOWN = ("method", "seed", *_SECTIONS, "options")

METHOD_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "pwfn": {},
    "conditioned": {
        "schedule.fractions": (1.0,),
        "schedule.epochs_per_round": (0.0,),
        "finish.reestimate_epochs": 0.0,
        "finish.polish_epochs": 0.0,
    },
    "rate": {
        "training.optimizer": "adamw",
        "training.weight_decay": 0.0,
        "training.scheduler": "cosine",
        "training.clip_norm": None,
        "training.distill": True,
        "schedule.fractions": (1.0,),
        "schedule.epochs_per_round": (20.0,),
        "finish.polish_epochs": 0.0,
    },
}
"""By method: the settings that differ from the defaults. Methods of the lab register themselves here."""

_OF_PWFN = ("posterior", "fixing")
"""Sections that no other method reads, except perhaps one of a user's own, whose name has a colon."""


@dataclass(frozen=True, repr=False)
class Config:
    """All settings of a compression run. ``Config()`` is the preset ``recommended``.

    ``options`` are settings of one method, which checks them itself; PWFN has none.

    >>> Config.preset("paper").fixing.rule
    <Rule.MEAN: 'mean'>
    >>> Config().override({"fixing.grid_exponent": 8})
    Config(fixing.grid_exponent=8)
    >>> Config().override({"fixing.rule": "closest"})
    Traceback (most recent call last):
    ...
    pwfn.errors.ConfigError: fixing.rule is 'closest': allowed is one of "mean", "each", "nearest"
    """

    method: str = "pwfn"
    seed: int = 0
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    posterior: PosteriorConfig = field(default_factory=PosteriorConfig)
    fixing: FixingConfig = field(default_factory=FixingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    finish: FinishConfig = field(default_factory=FinishConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHOD_DEFAULTS:
            raise ConfigError(f"method {self.method!r} is unknown{hint(self.method, METHOD_DEFAULTS)}")
        try:
            object.__setattr__(self, "seed", _SEED(self.seed))
        except (ValueError, OverflowError):
            raise ConfigError(f"seed is {self.seed!r}: allowed is {_SEED.allowed}") from None
        for name, section in _SECTIONS.items():
            if not isinstance(getattr(self, name), section):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: allowed is a {section.__name__}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options is {self.options!r}: allowed is a table of settings")
        epochs, fractions = self.schedule.epochs_per_round, self.schedule.fractions
        if isinstance(epochs, tuple) and len(epochs) != len(fractions):
            raise ConfigError(
                f"schedule.epochs_per_round has {len(epochs)} numbers for the {len(fractions)} of "
                "schedule.fractions: give one number, or one for each fraction"
            )

    def __repr__(self) -> str:
        usual, own = flat(Config().to_dict()), flat(self.to_dict())
        changed = [f"{name}={value!r}" for name, value in own.items() if value != usual.get(name)]
        return f"Config({', '.join(changed)})"

    @classmethod
    def preset(cls, name: str, method: str | None = None) -> Self:
        """The settings of a preset. ``quick`` and ``small`` name their methods; ``paper`` is for ``pwfn``.

        - ``recommended``: one sigma for all weights, as large as the network tolerates, which is not trained;
          the rule ``each``; new BatchNorm statistics and an epoch of polish at the end. The file is meant for
          inference: BatchNorm is folded, and what is not compressed rounded. For exact tensors set
          ``finish.fold_batchnorm = false`` and ``finish.uncompressed_dtype = "float32"``.
        - ``quick``: the method ``conditioned``. A thousand images, no labels and no training: the weights go
          to multiples of one step, layer by layer, and those still free take up the rounding error.
        - ``small``: the method ``rate``. Trained for the bytes: the divergence from the original's output
          plus a price for the length of the code. Meant to be used with ``target.bytes``.
        - ``paper``: the paper's numbers, every one of them pinned; docs/method.md names the departures.

        >>> Config.preset("quick").method
        'conditioned'
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(f"preset {name!r} is unknown{hint(name, PRESETS)}")
        own = PRESETS[name].get("method", "pwfn")
        if PRESETS[name] and method not in (None, own):
            raise ConfigError(f"preset {name!r} belongs to the method {own}: leave it out for {method}")
        method = method or own
        config = cls(method=method)
        return config.override({**METHOD_DEFAULTS[method], **PRESETS[name]})

    @classmethod
    def chosen(cls, config: Config | None, preset: str | None) -> Config:
        """The settings given, or those of a preset; ``recommended`` for neither."""
        if config is not None and preset is not None:
            raise ConfigError("give config or preset, not both")
        if config is not None and not isinstance(config, Config):
            raise ConfigError(
                f"config is a {type(config).__name__}: allowed is a pwfn.Config, such as "
                'pwfn.Config.preset("paper")'
            )
        return config if config is not None else cls.preset(preset or "recommended")

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with ``{"section.name": value}`` changed; of two changes of one setting the later wins."""
        tables: dict[str, Any] = {}
        for key, value in changes.items():
            section, dot, name = str(key).partition(".")
            new = {name: value} if dot else value
            held = tables.get(section, {})
            held = vars(held) if isinstance(held, Section) else held
            tables[section] = {**held, **new} if isinstance(new, Mapping) else new
        return self._merged(tables)

    def _merged(self, tables: Mapping[str, Any]) -> Self:
        changed: dict[str, Any] = {}
        for name, value in tables.items():
            if name not in _KNOWN:
                raise ConfigError(f"setting {name!r} is unknown{hint(name, _KNOWN)}")
            if name in ("method", "seed") or isinstance(value, Section):
                changed[name] = value
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is {value!r}: allowed is a table of settings")
            if name == "options":
                changed[name] = {**self.options, **value}
                continue
            section = getattr(self, name)
            fields = [item.name for item in dataclasses.fields(section)]
            for key in value:
                if key not in fields:
                    raise ConfigError(f"setting '{name}.{key}' is unknown{hint(key, fields)}")
            changed[name] = dataclasses.replace(section, **value)
        return dataclasses.replace(self, **changed)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Settings from TOML. What it does not name comes from its ``preset`` and ``method``.

        These are ``recommended`` and ``pwfn`` unless the text names others.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the settings are not valid TOML: {error}") from None
        preset = tables.pop("preset", "recommended")
        return cls.preset(preset, tables.get("method"))._merged(tables)

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
        """Plain numbers, strings, lists and tables, ``None`` as ``"off"``.

        >>> Config()._merged(Config.preset("paper").to_dict()) == Config.preset("paper")
        True
        """
        tables: dict[str, Any] = {"method": self.method, "seed": self.seed}
        for name in _SECTIONS:
            section = getattr(self, name)
            tables[name] = {
                item.name: _plain(getattr(section, item.name)) for item in dataclasses.fields(section)
            }
        return tables | ({"options": dict(self.options)} if self.options else {})

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> Self:
        """Settings from what :meth:`to_dict` gave; what is not there has its default."""
        return cls()._merged(tables)

    def to_toml(self) -> str:
        """TOML with every setting and, as a comment, its meaning and allowed values.

        >>> Config.from_toml(Config.preset("paper").to_toml()) == Config.preset("paper")
        True
        """
        import tomli_w

        tables = self.to_dict()
        lines = [tomli_w.dumps({name: tables[name]}).strip() for name in ("method", "seed")]
        for name, section in _SECTIONS.items():
            lines += ["", f"[{name}]"]
            if name in _OF_PWFN and self.method != "pwfn" and ":" not in self.method:
                lines.append(f"# the method {self.method} reads none of these")
            for item in dataclasses.fields(section):  # type: ignore[arg-type]  # sections are dataclasses
                lines.append(f"# {item.metadata['help']}: {item.metadata['check'].allowed}")
                lines.append(tomli_w.dumps({item.name: tables[name][item.name]}).strip())
        if self.options:
            lines += ["", tomli_w.dumps({"options": tables["options"]}).strip()]
        return "\n".join(lines) + "\n"


PRESETS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "paper": {
        "posterior.init": "powers",
        "posterior.alpha": 2**-11,
        "posterior.cap": 0.05,
        "posterior.noise_on_fixed": True,
        "fixing.rule": "mean",
        "fixing.grid_exponent": 7,
        "fixing.sweep": None,
        "training.optimizer": "sgd",
        "training.learning_rate": 1e-3,
        "training.sigma_learning_rate": 1e-3,
        "training.weight_decay": 1e-4,
        "training.scheduler": "none",
        "training.clip_norm": 1.0,
        "training.distill": False,
        "schedule.fractions": PAPER_FRACTIONS,
        "schedule.epochs_per_round": 3.0,
        "finish.reestimate_epochs": 0.0,
        "finish.polish_epochs": 0.0,
        "finish.fold_batchnorm": False,
        "finish.uncompressed_dtype": "float32",
    },
    "quick": {"method": "conditioned"},
    "small": {"method": "rate"},
}
"""What each preset sets. ``paper`` pins every number it stands for, so that no default can change it."""


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """What :meth:`Config.to_dict` gave, by ``section.name``.

    >>> flat({"seed": 1, "training": {"clip_norm": 0.9}})
    {'seed': 1, 'training.clip_norm': 0.9}
    """
    found: dict[str, Any] = {}
    for name, item in tables.items():
        if isinstance(item, Mapping):
            found |= {f"{name}.{key}": value for key, value in item.items()}
        else:
            found[name] = item
    return found


def _plain(value: Any) -> Any:
    if value is None:
        return "off"
    if isinstance(value, StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
