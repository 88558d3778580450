"""What each network should reach, and whether the results reach it."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from archive import Archive, Facts

from pwfn.config import hint
from pwfn.errors import ConfigError
from pwfn.lab.compare.table import Line, cells, commits, legend, machines, markdown

ROUNDING = 1e-9  # of sums of floating-point numbers; means differ by at least a third of an image in 10,000
HEADS = (
    *("network", "start", "top-1 (ensemble)", "bits", "unique", "bytes", "smaller than fp32", "epochs"),
    *("target", "verdict"),
)


@dataclass(frozen=True)
class Target:
    """What one network should reach; None where nothing is asked.

    >>> Target("a", "A", within_points=0.3, bits=2.5).asked()
    'top-1 within 0.3 points of its start; bits at most 2.5'
    """

    name: str  # of the table
    label: str
    at_least: float | None = None  # mean accuracy, a fraction
    within_points: float | None = None  # instead: points (of 100) that it may be below the start
    start_at_least: float | None = None  # accuracy of the network before compression
    bits: float | None = None  # largest entropy per weight
    unique: int | None = None  # largest number of values
    bytes: int | None = None  # of the whole file
    times_smaller: float | None = None  # instead: the file compared with the network in fp32

    def __post_init__(self) -> None:
        for one, other in (("at_least", "within_points"), ("bytes", "times_smaller")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigError(f"target {self.name!r} has both {one} and {other}: give one of the two")

    def least(self, start: float) -> float:
        """The least accuracy that meets it: at_least, start - within_points / 100, or any."""
        if self.at_least is not None:
            return self.at_least
        return start - self.within_points / 100 if self.within_points is not None else 0.0

    def most_bytes(self, fp32_bytes: int) -> int | None:
        """The largest file that meets it: bytes, or floor(fp32_bytes / times_smaller).

        >>> Target("a", "A", times_smaller=24).most_bytes(1000)
        41
        """
        return math.floor(fp32_bytes / self.times_smaller) if self.times_smaller is not None else self.bytes

    def asked(self) -> str:
        """In words."""
        within = f"within {self.within_points:g} points of" if self.within_points else "no lower than"
        words = (
            (self.start_at_least, f"start at least {100 * (self.start_at_least or 0):g} %"),
            (self.at_least, f"top-1 at least {100 * (self.at_least or 0):g} %"),
            (self.within_points, f"top-1 {within} its start"),
            (self.bits, f"bits at most {self.bits}"),
            (self.unique, f"unique at most {self.unique}"),
            (self.bytes, f"bytes at most {self.bytes or 0:,}"),
            (self.times_smaller, f"bytes at most 1/{self.times_smaller} of fp32"),
        )
        return "; ".join(said for value, said in words if value is not None) or "none"


def read(path: Path) -> list[Target]:
    """All targets, in their order."""
    known = [field.name for field in dataclasses.fields(Target)]
    found = []
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["target"]:
        for key in table:
            if key not in known:
                raise ConfigError(f"{path}: {key!r} is unknown{hint(key, known)}")
        found.append(Target(**table))
    return found


def results(archive: Archive, name: str) -> tuple[list[Facts], dict[int, str]]:
    """The results of a table of one row; and for the seeds without one, why.

    Results of other settings than the plan's do not count.
    """
    if name not in archive.paths:
        return [facts for row in archive.retired(name).values() for facts in row], {}
    runs = archive.plan(name).runs()
    if len({(run.network.name, run.label) for run in runs}) != 1:
        raise ConfigError(f"{name}: the plan of a target has one [[model]] and one [[row]]")
    found: list[Facts] = []
    missing: dict[int, str] = {}
    for run in runs:
        facts, other = archive.result(name, run)
        if facts is not None:
            found.append(facts)
        else:
            missing[run.seed] = "was run with other settings" if other else "is missing"
    return found, missing


def shortfalls(target: Target, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """By how much the results miss it, in words, rounded up; empty where it is met.

    Accuracy and bits are means over seeds, unique values and bytes those of the worst seed.
    """
    start, top1, bits = (
        fmean(facts[key] for facts in found) for key in ("top1_start", "top1", "entropy_bits")
    )
    unique, size = (max(facts[key] for facts in found) for key in ("unique", "file_bytes"))
    most = target.most_bytes(found[0]["fp32_bytes"])
    missed = []
    if target.start_at_least is not None and start < target.start_at_least - ROUNDING:
        missed.append(f"start by {_up(100 * (target.start_at_least - start), 2)} points")
    if top1 < target.least(start) - ROUNDING:
        missed.append(f"top-1 by {_up(100 * (target.least(start) - top1), 2)} points")
    if target.bits is not None and bits > target.bits + ROUNDING:
        missed.append(f"bits by {_up(bits - target.bits, 3)}")
    if target.unique is not None and unique > target.unique:
        missed.append(f"unique by {unique - target.unique:,}")
    if most is not None and size > most:
        missed.append(f"bytes by {size - most:,}")
    return missed


def verdict(target: Target, found: Sequence[Mapping[str, Any]], missing: Mapping[int, str]) -> str:
    """Met, or missed and by how much; while seeds are missing, nothing is met."""
    lacking = "; ".join(f"seed {seed} {why}" for seed, why in missing.items())
    if not found:
        return f"not measured yet: {lacking}"
    missed = shortfalls(target, found)
    said = f"missed: {', '.join(missed)}" if missed else "–" if target.asked() == "none" else "met"
    return f"{lacking}; so far {said}" if missing else said


def row(target: Target, found: Sequence[Facts], missing: Mapping[int, str]) -> list[str]:
    """One row of the table."""
    line = Line.of(target.label, "pwfn", found)
    start = line.figures["top1_start"]
    label, _, top1, bits, _, *figures, _ = cells(line)
    shown = [label, start.shown(".2f", 100) if start else "–", top1, bits, *figures]
    return [*shown, target.asked(), verdict(target, found, missing)]


def table(archive: Archive) -> list[str]:
    """The table of all targets."""
    rows, everything = [], list[Facts]()
    for target in read(archive.experiments / "targets.toml"):
        found, missing = results(archive, target.name)
        everything += found
        rows.append(row(target, found, missing))
        if target.name not in archive.paths:
            rows[-1][0] += " †"
    notes = legend(0, 20, more=False)
    if any(cells[0].endswith("†") for cells in rows):
        commit = archive.retirement["commit"]
        notes += f" †: uses settings that no longer exist; commit {commit} has the plan and can repeat it."
    if everything:
        on, made = "; ".join(machines(everything)), ", ".join(commits(everything))
        notes += f"\n\nMeasured on: {on}. Commits: {made}."
    return [*markdown(HEADS, rows, (0, 8, 9)), "", notes]


def _up(value: float, digits: int) -> str:
    """Rounded up, so that what is missed is never shown as 0.

    >>> _up(0.001, 2), _up(0.25, 2)
    ('0.01', '0.25')
    """
    return f"{math.ceil(value * 10**digits - 1e-6) / 10**digits:.{digits}f}"
