"""The settings of a run, as a preset and what differs from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pwfn.config.config import PRESETS, Config, flat
from pwfn.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """A setting that differs from its preset."""

    name: str  # section.name
    value: Any
    preset_value: Any


@dataclass(frozen=True)
class Settings:
    """A method, a preset, and what differs from it."""

    method: str
    preset: str
    changed: tuple[Change, ...]
    seed: int
    recorded: Mapping[str, Any]  # all of them by section.name, as recorded
    trouble: str | None = None  # why they could not be compared with a preset

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Settings:
        """From the settings in a run's record: the preset from which the fewest differ.

        The seed is separate.

        >>> found = Settings.of(Config.preset("paper").override({"seed": 3}).to_dict())
        >>> found.method, found.preset, found.changed, found.seed
        ('pwfn', 'paper', (), 3)
        """
        method, seed, recorded = str(found.get("method", "pwfn")), found.get("seed", 0), flat(found)
        try:
            config = Config.from_dict(found)
        except ConfigError as error:
            return cls(
                method, "unknown", (), seed if isinstance(seed, int) else 0, recorded, trouble=str(error)
            )
        # The presets of this method; of equally near ones the last wins, which names the method itself.
        presets = [name for name, own in PRESETS.items() if not own or own.get("method", "pwfn") == method]
        changes = {name: _changes(config, Config.preset(name, method)) for name in presets}
        preset = min(reversed(changes), key=lambda name: len(changes[name]))
        return cls(method, preset, changes[preset], config.seed, recorded)

    def arguments(self) -> list[str]:
        """For ``pwfn compress``; settings unknown to this version are left to the run's own file."""
        if self.trouble is not None:
            return ["--config", "config.toml"]
        method = ["--method", self.method] if self.method != "pwfn" else []
        preset = ["--preset", self.preset] if self.preset != "recommended" else []
        seed = ["--seed", str(self.seed)] if self.seed else []
        changes = [part for each in self.changed for part in ("--set", f"{each.name}={toml(each.value)}")]
        return [*method, *preset, *seed, *changes]

    def __str__(self) -> str:
        """On one line.

        >>> print(Settings.of(Config.preset("paper").override({"fixing.sweep": 4.0}).to_dict()))
        method pwfn, preset paper with fixing.sweep=4.0, seed 0
        """
        changes = ", ".join(f"{each.name}={toml(each.value)}" for each in self.changed)
        preset = f"{self.preset} with {changes}" if changes else self.preset
        return f"method {self.method}, preset {preset}, seed {self.seed}"


def _changes(config: Config, preset: Config) -> tuple[Change, ...]:
    usual = flat(preset.to_dict())
    return tuple(
        Change(name, value, usual.get(name))
        for name, value in flat(config.to_dict()).items()
        if value != usual.get(name) and name not in ("seed", "method")
    )


def toml(value: Any) -> str:
    """A setting's value as ``--set`` reads it: TOML, or a bare word.

    >>> toml("each"), toml(True), toml([0.5, 1.0]), toml("a b"), toml("true")
    ('each', 'true', '[0.5, 1.0]', '"a b"', '"true"')
    """
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.+-]*", value):
        return value if value not in ("true", "false", "inf", "nan") else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
