"""What the page says of one run, measured on its file and read from its record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pwfn.errors import FileError
from pwfn.evaluate.entropy import Summary, summarise
from pwfn.evaluate.inspect import FileFacts, inspect
from pwfn.report.reading import RunData
from pwfn.report.repeating import Command, Settings, command


@dataclass(frozen=True)
class RunFacts:
    """One run: how good it is, how large, how it was set, and what is in its file."""

    run: RunData
    name: str  # that tells it from the others
    model: str
    before: float | None  # accuracy, a share
    after: float | None
    examples: int | None  # that it was scored on
    file: FileFacts
    summary: Summary
    settings: Settings
    command: Command

    @property
    def lost(self) -> float | None:
        """Points of accuracy lost; negative where some were gained."""
        return None if self.before is None or self.after is None else 100 * (self.before - self.after)

    @property
    def times_smaller(self) -> float:
        """Bytes of the network in fp32 over bytes of the file; rounded down to a tenth, as it speaks for it.

        2.0 for 301 bytes that were 605.
        """
        return (10 * self.file.fp32_bytes // self.file.file_bytes) / 10


def facts_of(run: RunData, name: str) -> RunFacts:
    """Measure a run's file, and read its record."""
    record, folder = run.record, Path(run.folder)
    try:
        identity = record["identity"]
        model, found = str(identity["model"]["name"]), identity["settings"]
        before, after = _metric(record["before"]), _metric(record["after"])
        examples = record["after"]["examples"] if record["after"] else None
        settings = Settings.of(found)
        repeat = command(record, _asked(record, folder), settings, folder.name or "run")
    except (KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{folder / 'record.json'}: is not the record of a run, or of another version ({error}): "
            "run pwfn compress --resume on the folder to have it written again"
        ) from None
    compressed = run.compressed
    return RunFacts(
        run=run,
        name=name,
        model=model,
        before=before,
        after=after,
        examples=examples,
        file=inspect(folder / "model.pwfn", zstd=False),
        summary=summarise(compressed.layout, compressed.values()),
        settings=settings,
        command=repeat,
    )


def _metric(scores: Mapping[str, Any] | None) -> float | None:
    metric = scores["metric"] if scores is not None else None
    return float(metric) if metric is not None else None


def _asked(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The names that the run was started with: in its record, or beside it where a table started it."""
    path = folder / "asked.json"
    beside = read_json(path) if path.is_file() else {}
    return {**beside, **record.get("asked", {})}


def read_json(path: Path) -> dict[str, Any]:
    """What is in a file of JSON, which must be an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read: {error}: mend or remove it") from None
    if not isinstance(found, dict):
        raise FileError(f"{path}: holds a {type(found).__name__}, not a JSON object: mend or remove it")
    return found
