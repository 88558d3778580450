"""A finished run, read from its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pwfn.errors import FileError
from pwfn.evaluate.trace import Trace
from pwfn.file.compressed import Compressed
from pwfn.file.format import load

MODEL, RECORD, LOG, OBSERVED = "model.pwfn", "record.json", "log.jsonl", "observed.jsonl"


@dataclass(frozen=True)
class RunData:
    """What a run has left; ``rounds`` and ``epochs`` are those lines of its log."""

    folder: Path
    name: str  # the folder's; see `names` for several runs
    record: Mapping[str, Any]  # record.json
    rounds: tuple[Mapping[str, Any], ...]
    epochs: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any]  # section by section, as Config.to_dict gives them; maybe of another version
    compressed: Compressed  # model.pwfn
    observed: tuple[Trace, ...] = ()  # none where an earlier version ran it

    @property
    def file(self) -> Path:
        """The network."""
        return self.folder / MODEL


def read_run(folder: str | Path) -> RunData:
    """Everything in a run's folder; an error names what is missing or damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"{folder}: is not a folder: name one that pwfn compress has written (--out)")
    if not (folder / RECORD).exists():
        has_begun = (folder / LOG).exists()
        why = "has not ended: go on with it by --resume" if has_begun else "holds no run: name one that does"
        raise FileError(f"{folder}: {why} ({RECORD} is not there)")
    record = _parsed(folder / RECORD, _text(folder / RECORD))
    lines = [_parsed(folder / LOG, text, number) for number, text in _lines(folder / LOG)]
    observed = folder / OBSERVED
    return RunData(
        folder=folder,
        name=Path(os.path.abspath(folder)).name,
        record=record,
        rounds=tuple(line for line in lines if line.get("event") == "round"),
        epochs=tuple(line for line in lines if line.get("event") == "epoch"),
        settings=_settings(folder / RECORD, record),
        compressed=load(folder / MODEL),
        observed=_observed(observed) if observed.exists() else (),
    )


def names(runs: Sequence[RunData]) -> list[str]:
    """A name for each run that tells it from the others: as many of its last folders as that takes.

    Runs of one folder get a number each.
    """
    paths = [Path(os.path.abspath(run.folder)).parts for run in runs]
    found = [run.name for run in runs]
    for depth in range(2, max(map(len, paths), default=0) + 1):
        if len(set(found)) == len(found):
            return found
        found = ["/".join(parts[-depth:]) for parts in paths]
    if len(set(found)) == len(found):
        return found
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def _observed(path: Path) -> tuple[Trace, ...]:
    found = []
    for number, text in _lines(path):
        try:
            found.append(Trace.of_plain(_parsed(path, text, number)))
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{path}: line {number} is not what a run writes: remove the file to do without it"
            ) from error
    return tuple(found)


def _settings(path: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    identity = record.get("identity")
    found = identity.get("settings") if isinstance(identity, dict) else None
    if not isinstance(found, dict):
        raise FileError(f"{path}: names no settings: it is not the record of a run")
    return found


def _lines(path: Path) -> list[tuple[int, str]]:
    """With their numbers, from 1."""
    return [(number, text) for number, text in enumerate(_text(path).splitlines(), 1) if text.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not text: the file is damaged") from error


def _parsed(path: Path, text: str, number: int | None = None) -> dict[str, Any]:
    where = f"{path}: line {number}" if number is not None else f"{path}: it"
    try:
        found = json.loads(text)
    except ValueError as error:
        raise FileError(f"{where} is not JSON: the file is damaged") from error
    if not isinstance(found, dict):
        raise FileError(f"{where} is not a JSON object: the file is damaged")
    return found
