"""What each network shall reach, and whether the results say that it does."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pwfn.config.checks import hint
from pwfn.errors import ConfigError
from pwfn.lab import compare
from pwfn.lab.compare.measuring import settings_differ
from pwfn.lab.compare.table import Figure

# Of sums of floating-point numbers: far less than the third of an image in 10,000 that means can differ by.
ROUNDING = 1e-9
HEAD = (
    "| network | start | top-1 | ensemble | bits | unique | bytes | smaller than fp32 | epochs | target | "
    "verdict |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
NOT_MEASURED = "not measured yet"
NO_TARGET = "none"


@dataclass(frozen=True)
class Target:
    """What one network shall reach; None where nothing is asked.

    >>> Target("a", "A", within_points=0.3, bits=2.5).asked()
    'top-1 within 0.3 points of its start; bits at most 2.5'
    """

    name: str  # of the plan in experiments/rows, and of the folder of results
    label: str
    at_least: float | None = None  # mean accuracy, a share
    within_points: float | None = None  # in place of that: points of 100 that it may lie below the start
    start_at_least: float | None = None  # accuracy of the network before
    bits: float | None = None  # most entropy a weight
    unique: int | None = None  # most values
    bytes: int | None = None  # most, of the whole file
    times_smaller: float | None = None  # in place of that: the file against the network in fp32

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

        >>> Target("a", "A", at_least=0.9, times_smaller=24).most_bytes(1000)
        41
        """
        return math.floor(fp32_bytes / self.times_smaller) if self.times_smaller is not None else self.bytes

    def asked(self) -> str:
        """In words."""
        parts = []
        if self.start_at_least is not None:
            parts.append(f"start at least {100 * self.start_at_least:g} %")
        if self.at_least is not None:
            parts.append(f"top-1 at least {100 * self.at_least:g} %")
        elif self.within_points:
            parts.append(f"top-1 within {self.within_points:g} points of its start")
        elif self.within_points is not None:
            parts.append("top-1 no lower than its start")
        if self.bits is not None:
            parts.append(f"bits at most {self.bits:g}")
        if self.unique is not None:
            parts.append(f"unique at most {self.unique}")
        if self.bytes is not None:
            parts.append(f"bytes at most {self.bytes:,}")
        if self.times_smaller is not None:
            parts.append(f"bytes at most 1/{self.times_smaller:g} of fp32")
        return "; ".join(parts) or NO_TARGET


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


def results(plan: compare.Plan, folder: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The results of a plan of one row, by what is in its folder; and of the other seeds why there are none.

    What was measured with other settings than the plan has now does not count.
    """
    runs = plan.runs()
    if len({(run.network.name, run.label) for run in runs}) != 1:
        raise ConfigError("a target's plan has one [[model]] and one [[row]]: move others to another plan")
    found: list[dict[str, Any]] = []
    missing: dict[int, str] = {}
    for run in runs:
        path = folder / "results" / f"{run.name}.json"
        facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if facts is None:
            missing[run.seed] = "is missing"
        elif settings_differ(run, facts["settings"]) is not None:
            missing[run.seed] = "was run with other settings"
        else:
            found.append(facts)
    return found, missing


def shortfalls(target: Target, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """By how much the results miss it, in words; empty where it is met.

    Accuracy and bits are means over seeds, unique values and bytes those of the worst seed. What is missed
    is rounded up.
    """
    start, top1, bits = (
        fmean(facts[key] for facts in found) for key in ("top1_start", "top1", "entropy_bits")
    )
    missed = []
    if target.start_at_least is not None and start < target.start_at_least - ROUNDING:
        missed.append(f"start by {_up(100 * (target.start_at_least - start), 2)} points")
    if top1 < target.least(start) - ROUNDING:
        missed.append(f"top-1 by {_up(100 * (target.least(start) - top1), 2)} points")
    if target.bits is not None and bits > target.bits + ROUNDING:
        missed.append(f"bits by {_up(bits - target.bits, 3)}")
    unique = max(facts["unique"] for facts in found)
    if target.unique is not None and unique > target.unique:
        missed.append(f"unique by {unique - target.unique:,}")
    size = max(facts["file_bytes"] for facts in found)
    most = target.most_bytes(found[0]["fp32_bytes"])
    if most is not None and size > most:
        missed.append(f"bytes by {size - most:,}")
    return missed


def verdict(target: Target, found: Sequence[Mapping[str, Any]], missing: Mapping[int, str]) -> str:
    """Met, or missed and by how much; while seeds are missing, nothing is met."""
    lacking = "; ".join(f"seed {seed} {why}" for seed, why in missing.items())
    if not found:
        is_stale = any(why != "is missing" for why in missing.values())
        return f"{NOT_MEASURED}: {lacking}" if is_stale else NOT_MEASURED
    missed = shortfalls(target, found)
    said = f"missed: {', '.join(missed)}" if missed else "–" if target.asked() == NO_TARGET else "met"
    return f"{lacking}; so far {said}" if missing else said


def row(target: Target, found: Sequence[Mapping[str, Any]], missing: Mapping[int, str], link: str) -> str:
    """One line of the table; the label links to the plan."""
    cells = ["–"] * 8
    if found:
        size, whole = max(facts["file_bytes"] for facts in found), found[0]["fp32_bytes"]
        cells = [
            f"{100 * fmean(facts['top1_start'] for facts in found):.2f}",
            _shown([100 * facts["top1"] for facts in found]),
            _shown([100 * facts["top1_ensemble"] for facts in found if facts["top1_ensemble"] is not None]),
            _shown([facts["entropy_bits"] for facts in found]),
            f"{max(facts['unique'] for facts in found):,}",
            f"{size:,}",
            f"{math.floor(10 * whole / size) / 10:.1f} times",  # never more than it is
            f"{found[0]['epochs']:.4g}",
        ]
    label = f"[{target.label}]({link})"
    return "| " + " | ".join([label, *cells, target.asked(), verdict(target, found, missing)]) + " |"


def table(experiments: Path, prefix: str) -> str:
    """The targets' table, and where it was measured; ``prefix`` leads from the page to ``experiments``."""
    rows, all_found = [], []
    for target in read(experiments / "targets.toml"):
        plan = compare.load(experiments / "rows" / f"{target.name}.toml")
        found, missing = results(plan, experiments / "results" / target.name)
        rows.append(row(target, found, missing, f"{prefix}experiments/rows/{target.name}.toml"))
        all_found += found
    below = (
        "Top-1 in percent, of the `.pwfn` file, loaded again; ensemble: of the mean prediction of 20 draws "
        "from its posterior. Top-1, ensemble and bits are mean ± standard deviation over seeds (n - 1); "
        "unique and bytes those of the seed that has most. Bits: entropy a weight, of all weights and biases "
        "of convolutions and linear layers in one pool."
    )
    lines = [HEAD, *rows, "", below]
    if all_found:
        machines = sorted({f"{facts['device']}, torch {facts['versions']['torch']}" for facts in all_found})
        commits = sorted({facts["commit"][:7] for facts in all_found})
        lines += ["", f"Measured on: {'; '.join(machines)}. Commits: {', '.join(commits)}."]
    return "\n".join(lines)


def _shown(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n - 1).

    >>> _shown([91.0, 92.0]), _shown([91.0]), _shown([])
    ('91.50 ± 0.71', '91.00', '–')
    """
    figure = Figure.of(values)
    if figure is None:
        return "–"
    return f"{figure.mean:.2f}" + (f" ± {figure.spread:.2f}" if figure.spread is not None else "")


def _up(value: float, digits: int) -> str:
    """Rounded up, so that what is missed is never shown as nothing.

    >>> _up(0.001, 2), _up(0.25, 2)
    ('0.01', '0.25')
    """
    return f"{math.ceil(value * 10**digits - 1e-6) / 10**digits:.{digits}f}"
