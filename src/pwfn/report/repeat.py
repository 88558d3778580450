"""The settings of a run as differences from a preset, and the commands that repeat and load it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pwfn.config import PRESETS, Config, flat
from pwfn.errors import ConfigError
from pwfn.report.reading import MODEL, RunData
from pwfn.run.options import RunOptions
from pwfn.zoo.models import recorded_classes


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


PLACEHOLDERS = {"DATA": "the data", "WEIGHTS": "the weights that the run started from"}
"""Stand in a command for names that a run's record does not have."""


def compress_command(run: RunData, settings: Settings) -> tuple[str, str]:
    """The command that repeats a run, and a sentence on what its record does not name.

    Loaders of the user (``python:``) may have a batch size of their own: the option is then left out unless
    it was given.
    """
    asked = run.asked
    data, weights = str(asked.get("data") or "DATA"), str(asked.get("weights") or "WEIGHTS")
    options: dict[str, Any] = {"model": run.model, "data": data, "weights": weights}
    options["out"] = run.folder.name or "run"
    if not (data.startswith("python:") and run.batch_size == RunOptions.batch_size):
        options["batch_size"] = run.batch_size
    options |= {
        key: asked.get(key)
        for key in ("eval_data", "test_batch_size", "classes", "holdout", "limit", "posterior")
    }
    words = [
        word for key, value in options.items() if value for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    start, processes = "pwfn compress", run.record["identity"].get("processes", 1)
    if processes != 1:
        start = f"torchrun --nproc-per-node {shlex.quote(str(processes))} -m {start}"
    lines = [start]  # one option per line
    for word in (*words, *settings.arguments()):
        if word.startswith("--"):
            lines.append(f"  {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    missing = [f"{name} for {what}" for name, what in PLACEHOLDERS.items() if name in (data, weights)]
    note = f"The record does not name everything: put in {' and '.join(missing)}." if missing else ""
    return " \\\n".join(lines), note


def load_code(run: RunData) -> str:
    """Three lines of Python that load the network from its file."""
    classes = recorded_classes(run.compressed.record)
    outputs = f", classes={classes}" if classes is not None else ""
    path = f"{run.name}/{MODEL}"
    return (
        "import pwfn\nfrom pwfn.zoo import models\n"
        f"model = pwfn.load({path!r}).apply_to(models.create({run.model!r}{outputs})).eval()"
    )
