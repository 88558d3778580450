"""Plans and results in the repository: where they are, and the table of each.

rows/NAME.toml, ablations/NAME.toml, compare_*.toml   plans, for `pwfn compare`
results/NAME/results/*.json                           figures of a plan's runs
results/NAME/retired/*.json                           figures whose settings no longer exist: see retired.toml
results/NAME/table.md                                 the table of both
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pwfn.config import hint
from pwfn.errors import ConfigError
from pwfn.lab import compare
from pwfn.lab.compare.runner import kept_result
from pwfn.lab.compare.table import HEADS, Line, cells, commits, legend, machines, make_table, markdown

Facts = dict[str, Any]


@dataclass(frozen=True)
class Archive:
    """The experiments of a repository."""

    root: Path = Path(__file__).resolve().parent.parent

    @property
    def experiments(self) -> Path:
        """The folder of plans and results."""
        return self.root / "experiments"

    def folder(self, name: str) -> Path:
        """The folder of a table's figures."""
        return self.experiments / "results" / name

    @cached_property
    def paths(self) -> dict[str, Path]:
        """The file of every plan, by name."""
        found: dict[str, Path] = {}
        for pattern in ("rows/*.toml", "ablations/*.toml", "compare_*.toml"):
            for path in sorted(self.experiments.glob(pattern)):
                if found.setdefault(path.stem, path) != path:
                    raise ConfigError(f"{path} and {found[path.stem]} would share their results: rename one")
        return found

    def plan(self, name: str) -> compare.Plan:
        """The plan of a name."""
        if name not in self.paths:
            raise ConfigError(f"{name!r} is no plan in {self.experiments}{hint(name, self.paths)}")
        return compare.load(self.paths[name])

    def result(self, name: str, run: compare.Run) -> tuple[Facts | None, str | None]:
        """The figures of a run of a plan; or None, and in what those that are there differ."""
        return kept_result(run, self.folder(name) / "results" / f"{run.name}.json")

    @cached_property
    def retirement(self) -> dict[str, Any]:
        """What retired.toml says: the commit, and the rows of each table."""
        path = self.experiments / "retired.toml"
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def rows(self, name: str) -> dict[str, list[Facts]]:
        """The results of a table by row, seed by seed: of its plan, then those that are retired."""
        found: dict[str, list[Facts]] = {}
        for run in self.plan(name).runs() if name in self.paths else ():
            facts, _ = self.result(name, run)
            if facts is not None:
                found.setdefault(run.label, []).append(facts)
        return found | self.retired(name)

    def retired(self, name: str) -> dict[str, list[Facts]]:
        """The results of a table whose settings no longer exist: by row, in its order, seed by seed."""
        rows: dict[str, list[Facts]] = {row: [] for row in self.retirement.get(name, {}).get("rows", ())}
        for path in sorted((self.folder(name) / "retired").glob("*.json")):
            facts = json.loads(path.read_text(encoding="utf-8"))
            rows[facts["label"]].append(facts)
        return rows

    def title(self, name: str) -> str:
        """The first line of a table's plan; of a retired table, its title."""
        if name in self.paths:
            return self.paths[name].read_text(encoding="utf-8").partition("\n")[0].strip("# :")
        return str(self.retirement[name]["title"])

    def table(self, name: str) -> str:
        """The text of ``table.md``: the table of the plan, then the rows that are retired."""
        lines: list[str] = []
        if name in self.paths:
            plan = self.plan(name)
            found, notes = {}, {}
            for run in plan.runs():
                facts, other = self.result(name, run)
                if facts is not None:
                    found[run.name] = facts
                else:
                    notes[run.name] = f"its results are of another run: {other}" if other else "not measured"
            lines = compare.lines(make_table(plan, found, notes))
        if name in self.retirement:
            lines += ["", *self._retired_table(name)] if lines else self._retired_table(name)
        return "\n".join(lines) + "\n"

    @property
    def names(self) -> list[str]:
        """Every table: those with a plan, and those that are retired."""
        return sorted({*self.paths, *self.retirement} - {"commit"})

    def _retired_table(self, name: str) -> list[str]:
        rows, info = self.retired(name), self.retirement[name]
        found = [facts for row in rows.values() for facts in row]
        first = found[0]
        held = f", {first['holdout']:,} training images held out" if first["holdout"] else ""
        lines = [Line.of(label, own[0]["method"], own) for label, own in rows.items()]
        return [
            f"### {first['model']}, {first['data']}{held}, retired",
            "",
            f"Uses settings that no longer exist ({info['uses']}). Commit {self.retirement['commit']} has the"
            " plan and can repeat it.",
            "",
            *markdown(HEADS, [cells(line) for line in lines], (0, 1)),
            "",
            *([] if name in self.paths else [legend(first["holdout"], first["samples"]), ""]),
            f"Measured on: {'; '.join(machines(found))}. Made at commits: {', '.join(commits(found))}.",
        ]
