"""How a run was set, said as what differs from a preset, and the command that repeats it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pwfn.config import PRESETS, Config, MethodName
from pwfn.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A setting that is not as its preset has it."""

    name: str  # section.name
    value: Any
    usual: Any  # the preset's


@dataclass(frozen=True)
class Settings:
    """A method, a preset, and what differs from it."""

    method: str
    preset: str
    changed: tuple[Setting, ...]
    seed: int
    trouble: str | None = None  # why they could not be compared with a preset

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Settings:
        """From the settings in a run's record: the preset in which the fewest differ.

        The seed is told apart: it makes another run, but no other method. Of what the run did not read
        nothing is told.

        >>> Settings.of(Config.preset("paper").override({"clustering.b": 8, "seed": 3}).to_dict())
        Settings(method='pwfn', preset='paper', changed=(Setting(name='clustering.b', value=8, usual=7),), \
seed=3, trouble=None)
        """
        method = str(found.get("method", MethodName.PWFN))
        seed = found.get("seed", 0)
        try:
            config = Config.recorded(found)
        except ConfigError as error:
            return cls(method, "recommended", (), seed if isinstance(seed, int) else 0, str(error))
        names = PRESETS if config.method is MethodName.PWFN else ("recommended",)
        changed = {name: _changed(config, Config.preset(name, method)) for name in names}
        preset = min(changed, key=lambda name: len(changed[name]))  # the first of equals is recommended
        return cls(method, preset, changed[preset], config.seed)

    def arguments(self) -> list[str]:
        """For ``pwfn compress``; settings that are not known by now are left to the run's own file."""
        if self.trouble is not None:
            return ["--config", "config.toml"]
        method = ["--method", self.method] if self.method != MethodName.PWFN else []
        preset = ["--preset", self.preset] if self.preset != "recommended" else []
        seed = ["--seed", str(self.seed)] if self.seed else []
        changes = [part for each in self.changed for part in ("--set", f"{each.name}={toml(each.value)}")]
        return [*method, *preset, *seed, *changes]


def _changed(config: Config, preset: Config) -> tuple[Setting, ...]:
    mine, usual = config.in_force(), flat(preset.to_dict())
    return tuple(
        Setting(name, value, usual[name])
        for name, value in mine.items()
        if value != usual[name] and name not in ("seed", "method")
    )


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by ``section.name``.

    >>> flat({"seed": 1, "clustering": {"b": 7}})
    {'seed': 1, 'clustering.b': 7}
    """
    found: dict[str, Any] = {}
    for key, item in tables.items():
        found |= {f"{key}.{n}": v for n, v in item.items()} if isinstance(item, Mapping) else {key: item}
    return found


def toml(value: Any) -> str:
    """A setting's value as ``--set`` reads it: TOML, or a bare word.

    >>> toml("each"), toml(True), toml([0.5, 1.0]), toml("a b"), toml("true")
    ('each', 'true', '[0.5, 1.0]', '"a b"', '"true"')
    """
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.+-]*", value):
        return value if value not in ("true", "false", "inf", "nan") else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


DATA, WEIGHTS = "DATA", "WEIGHTS"
"""Stand in a command for what a run's record does not name."""


@dataclass(frozen=True)
class Command:
    """What to type to run it again, and what must be put in by hand."""

    text: str
    missing: tuple[str, ...]  # of DATA and WEIGHTS


def command(record: Mapping[str, Any], asked: Mapping[str, Any], settings: Settings, out: str) -> Command:
    """The command that repeats a run.

    ``asked`` are the names that the run was started with (``data``, ``weights``, and whatever else of
    ``classes``, ``holdout``, ``limit``, ``test_batch_size`` and ``posterior`` was said).
    """
    identity = record["identity"]
    names = {"--data": asked.get("data") or DATA, "--weights": asked.get("weights") or WEIGHTS}
    missing = tuple(str(name) for name in names.values() if name in (DATA, WEIGHTS))
    words = ["--model", str(identity["model"]["name"]), *(str(w) for pair in names.items() for w in pair)]
    words += ["--out", out, "--batch-size", str(identity["data"]["batch_size"])]
    for key in ("test_batch_size", "classes", "holdout", "limit", "posterior"):
        if asked.get(key):
            words += [f"--{key.replace('_', '-')}", str(asked[key])]
    words += settings.arguments()
    processes = identity.get("processes", 1)
    start = "pwfn compress"
    if processes != 1:
        start = f"torchrun --nproc-per-node {shlex.quote(str(processes))} -m {start}"
    # An option a line, with what follows it.
    lines = [start]
    for word in words:
        if word.startswith("--"):
            lines.append(f"  {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return Command(" \\\n".join(lines), missing)
