"""A finished run, read from its folder. The only module of the report that knows the names of its files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pwfn.errors import FileError, cause
from pwfn.evaluate.entropy import Summary, summarise
from pwfn.evaluate.inspect import FileFacts, inspect
from pwfn.evaluate.trace import BINS_PER_OCTAVE, Histogram, Moment, Sample, Trace
from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.fixing.record import Move
from pwfn.run.checkpoint import from_plain

MODEL, RECORD, LOG, TRACE = "model.pwfn", "record.json", "log.jsonl", "trace.jsonl"
UNCERTAINTY, ASKED = "uncertainty.json", "asked.json"


class Round(NamedTuple):
    """The network after a round; NaN for what a record does not have."""

    number: int  # from 1
    file_bytes: int  # of a state: the whole network, had the run ended there; else 0
    fraction: float  # of the weights that are fixed
    accuracy: float
    entropy_bits: float
    unique: float
    zero_share: float
    power_of_two_share: float
    step: float  # of a state without training: the weights are its multiples


@dataclass(frozen=True)
class History:
    """What a run recorded of its weights on the way; empty for earlier versions and some methods."""

    sigmas: tuple[tuple[int, Histogram], ...] = ()  # of the free weights before fixing n; 0 is the start
    codebooks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # after fixing n: weights per value, descending
    moves: tuple[tuple[int, Move], ...] = ()  # in fixing n
    samples: tuple[tuple[Sample, Sample], ...] = ()  # the same weights at the start and after the last fixing

    @classmethod
    def of(cls, trace: Iterable[Trace]) -> History:
        """From the lines of a run's trace."""
        trace = tuple(trace)
        fixed = [seen for seen in trace if seen.moment is Moment.AFTER]
        start = next((seen.sample for seen in trace if seen.moment is Moment.START), ())
        end = {sample.name: sample for seen in fixed[-1:] for sample in seen.sample}
        return cls(
            sigmas=tuple((s.round, s.sigma) for s in trace if s.sigma and s.moment is not Moment.AFTER),
            codebooks=tuple(
                (s.round, tuple(sorted((count for _, count in s.codebook), reverse=True)))
                for s in fixed
                if s.codebook
            ),
            # Where all weights were zero the relative distance is not defined.
            moves=tuple((s.round, move) for s in fixed for move in s.moves if move.count > move.from_zero),
            samples=tuple((sample, end[sample.name]) for sample in start if sample.name in end),
        )


class Rival(NamedTuple):
    """Another row of the table that a run belongs to: mean accuracy over its seeds, and the largest file."""

    label: str
    accuracy: float
    file_bytes: int


@dataclass(frozen=True)
class RunData:
    """What a run has left in its folder."""

    folder: Path
    name: str  # of the folder; see `names` for several runs
    record: Mapping[str, Any]
    model: str
    batch_size: int | None
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]  # by section, as recorded, possibly by another version
    before: float | None  # accuracy, a share; None for agreement, which the original has with itself
    after: float | None  # accuracy, or agreement with the original network
    examples: int | None  # that it was measured on
    rounds: tuple[Round, ...]
    states: tuple[Round, ...]
    compressed: Compressed
    history: History = field(default_factory=History)

    @cached_property
    def file(self) -> FileFacts:
        """The file, measured."""
        return inspect(self.folder / MODEL, zstd=False)

    @cached_property
    def summary(self) -> Summary:
        """Entropy and counts of its values."""
        return summarise(self.compressed.layout, self.compressed.values())

    @property
    def measure(self) -> str:
        """What the scores are: "accuracy", or "agreement" with the original network without labels."""
        return "agreement" if (self.record.get("after") or {}).get("of") == "agreement" else "accuracy"

    @property
    def points_lost(self) -> float | None:
        """Points of accuracy lost, negative if some were gained."""
        return None if self.before is None or self.after is None else 100 * (self.before - self.after)

    @property
    def ruined(self) -> str:
        """Why the result is useless, as the run recorded it; empty if it is not."""
        return str(self.record.get("ruined") or "")

    @property
    def warnings(self) -> list[str]:
        """What looked wrong, without what the verdict says."""
        return [str(text) for text in self.record.get("warnings") or () if text != self.ruined]

    @property
    def times_smaller(self) -> float:
        """Bytes in fp32 over bytes of the file, rounded down to a tenth: 2.0 for 605 and 301 bytes."""
        return (10 * self.file.fp32_bytes // self.file.file_bytes) / 10

    @property
    def asked(self) -> Mapping[str, Any]:
        """The names that the run was started with: in its record, or beside it if a table started it."""
        path = self.folder / ASKED
        return {**(read_json(path) if path.is_file() else {}), **dict(self.record.get("asked") or {})}

    @cached_property
    def rivals(self) -> tuple[Rival, ...]:
        """Other methods on the same network, if ``pwfn compare`` made the run in OUT/<model>/<row>/<seed>."""
        folders = Path(os.path.abspath(self.folder)).parents
        paths = sorted(folders[2].glob("results/*.json")) if len(folders) > 2 else []
        found = [result for result in map(_result, paths) if result and result["model"] == self.model]
        digest = hashlib.sha256((self.folder / MODEL).read_bytes()).hexdigest()
        own = {result["label"] for result in found if result.get("file_sha256") == digest}
        others: dict[str, list[Mapping[str, Any]]] = {}
        for result in found if own else ():  # the results of another table than this run's say nothing
            if result["label"] not in own and result.get("method") != "baseline":
                others.setdefault(result["label"], []).append(result)
        return tuple(
            Rival(
                label,
                statistics.fmean(result["top1"] for result in seeds),
                max(result["file_bytes"] for result in seeds),
            )
            for label, seeds in others.items()
        )

    @property
    def uncertainty(self) -> Mapping[str, Any] | None:
        """What ``pwfn evaluate --out`` or ``--json`` wrote; None if it did not."""
        path = self.folder / UNCERTAINTY
        if not path.is_file():
            return None
        found = read_json(path)
        return found.get("uncertainty", found)


def read_run(folder: str | Path) -> RunData:
    """Everything in a run's folder; an error names what is missing or damaged."""
    folder = Path(folder)
    path = folder / RECORD
    if not folder.is_dir():
        raise FileError(f"{folder}: is not a folder: name one that pwfn compress has written (--out)")
    if not path.exists():
        has_begun = (folder / LOG).exists()
        why = "the run has not ended: continue it with --resume" if has_begun else "holds no run"
        raise FileError(f"{folder}: {why} ({RECORD} is missing)")
    record = read_json(path)
    try:
        identity, after = record["identity"], record.get("after") or {}
        return RunData(
            folder=folder,
            name=Path(os.path.abspath(folder)).name,
            record=record,
            model=str(identity["model"]["name"]),
            batch_size=(identity.get("data") or {}).get("batch_size"),
            machine=dict(record.get("machine") or {}),
            settings=dict(identity["settings"]),
            before=None if after.get("of") == "agreement" else _metric(record.get("before") or {}),
            after=_metric(after),
            examples=int(after["examples"]) if after.get("examples") else None,
            rounds=tuple(map(_round, record.get("rounds") or ())),
            states=tuple(map(_round, record.get("states") or ())),
            compressed=load(folder / MODEL),
            history=History.of(read_trace(folder)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{path}: is not the record of a run ({cause(error)}): write it again with pwfn compress --resume"
        ) from error


def read_trace(folder: Path) -> list[Trace]:
    """What the run recorded of its weights at the start and around every fixing; empty if it did not."""
    path = folder / TRACE
    lines = _text(path).splitlines() if path.exists() else []
    found = []
    for number, text in enumerate(lines, 1):
        try:
            found.append(from_plain(dict(json.loads(text)), Trace))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(
                f"{path}: line {number} is damaged ({type(error).__name__}): remove the file to do without it"
            ) from error
    return found


def names(runs: Sequence[RunData]) -> list[str]:
    """A unique name per run: as many of its last folders as that takes, or a number."""
    paths = [Path(os.path.abspath(run.folder)).parts for run in runs]
    for depth in range(1, max(map(len, paths), default=0) + 1):
        found = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(found)) == len(found):
            return found
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def measure(runs: Sequence[RunData]) -> str:
    """What the scores of all these runs are."""
    return " or ".join(sorted({run.measure for run in runs}))


def quantile(histogram: Histogram, share: float) -> float:
    """The middle, in log2, of the bin of sigma that reaches this share.

    >>> quantile(Histogram(-17, (1, 4, 1)), 0.5) == 2 ** (-15.5 / 8)
    True
    """
    so_far = 0
    for number, count in enumerate(histogram.counts):
        so_far += count
        if so_far >= share * histogram.total:
            return float(2 ** ((histogram.first + number + 0.5) / BINS_PER_OCTAVE))
    return math.nan


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise FileError(f"{path}: is not JSON: restore or remove it") from error
    if not isinstance(found, dict):
        raise FileError(f"{path}: holds a {type(found).__name__}, not a JSON object: restore or remove it")
    return found


def _result(path: Path) -> dict[str, Any] | None:
    """What ``pwfn compare`` measured of a run; None for any other file, which may lie there."""
    try:
        found = read_json(path)
    except FileError:
        return None
    kinds = {"model": str, "label": str, "top1": float, "file_bytes": int}
    return found if all(isinstance(found.get(key), kind) for key, kind in kinds.items()) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not text: restore or remove it") from error


def _metric(scores: Mapping[str, Any]) -> float | None:
    metric = scores.get("metric")
    return None if metric is None else float(metric)


def _round(line: Mapping[str, Any]) -> Round:
    def number(key: str) -> float:
        value = line.get(key)
        return math.nan if value is None else float(value)

    keys = ("fraction", "metric", "entropy_bits", "unique", "zero_share", "power_of_two_share", "step")
    return Round(int(line["round"]), int(line.get("file_bytes") or 0), *map(number, keys))
