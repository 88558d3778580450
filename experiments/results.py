"""Run a table of experiments, keep its figures and its best files in the repository, and list what there is.

    python experiments/results.py list                    every plan, and which have results
    python experiments/results.py run resnet20 resnet56   `pwfn compare` for each, into tables/NAME
    python experiments/results.py keep resnet20 0         the file of seed 0, into experiments/models
    python experiments/table.py                           then: the tables in README.md and docs/results.md

A name is that of a plan: rows/NAME.toml, ablations/NAME.toml or compare_*.toml, all in experiments. What a
plan names (data, weights) is seen from the current folder. Figures go to experiments/results/NAME; those of
earlier runs stay there, and in the table if they are of the plan still. A run that was cut off goes on with
the same command, and one that tables/OTHER has with the same settings is not done again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pwfn.config.checks import hint
from pwfn.errors import ConfigError, FileError, PwfnError
from pwfn.file.storage import make_folder, replacing
from pwfn.lab import compare
from pwfn.lab.compare.measuring import ASKED, digest, read_json, unfinished

MOST_BYTES = 3_000_000
"""Of a file that is kept in the repository."""


@dataclass(frozen=True)
class Folders:
    """Where plans, figures and files are kept, and where runs are."""

    experiments: Path = Path(__file__).resolve().parent
    tables: Path = Path("tables")

    def plans(self) -> dict[str, Path]:
        """The file of every plan, by name: rows, ablations, tables of methods."""
        found: dict[str, Path] = {}
        for pattern in ("rows/*.toml", "ablations/*.toml", "compare_*.toml"):
            for path in sorted(self.experiments.glob(pattern)):
                other = found.setdefault(path.stem, path)
                if other != path:
                    raise ConfigError(f"{path} and {other} would share a folder of results: rename one")
        return found

    def plan(self, name: str) -> compare.Plan:
        """The plan of a name."""
        plans = self.plans()
        if name not in plans:
            raise ConfigError(f"{name!r} is no plan in {self.experiments}{hint(name, plans)}")
        return compare.load(plans[name])

    def kept(self, name: str) -> Path:
        """The folder of a plan's figures."""
        return self.experiments / "results" / name


def found_weights(plan: compare.Plan, folders: Sequence[Path]) -> compare.Plan:
    """The plan with each file of weights taken from the first of the folders that has one of its name."""

    def found(weights: str) -> str:
        if weights in ("pretrained", "random"):
            return weights
        places = [folder / Path(weights).name for folder in folders]
        return next((str(place) for place in places if place.is_file()), weights)

    networks = (replace(network, weights=found(network.weights)) for network in plan.models)
    return replace(plan, models=tuple(networks))


def unmeasured(plan: compare.Plan, folder: Path) -> compare.Plan:
    """The plan with those runs only whose figures are not in the folder; perhaps none, and then no rows."""
    lacking = _table(plan, folder).missing if (folder / "results").is_dir() else None
    rows = []
    for network in plan.models:
        for row in plan.rows:
            own = [run for run in plan.runs() if run.network is network and run.row is row]
            seeds = tuple(run.seed for run in own if lacking is None or str(run) in lacking)
            if seeds:
                rows.append(replace(row, models=(network.name,), seeds=seeds))
    return replace(plan, rows=tuple(rows))


def run(name: str, folders: Folders, options: argparse.Namespace) -> int:
    """Do a plan's runs, and put their figures and the table among the results; 1 where any is missing."""
    whole = folders.plan(name)
    plan = unmeasured(whole, folders.kept(name)) if options.missing else whole
    out, done, failed = folders.tables / name, list[compare.Run](), dict[str, str]()
    if plan.rows:
        plan = found_weights(plan, options.weights)
        if not options.table_only:
            share(plan, name, folders)
        made = compare.run(
            plan,
            out,
            jobs=options.jobs,
            device=options.device,
            commit=options.commit or _commit(folders.experiments),
            table_only=options.table_only,
        )
        failed = dict(made.missing)
        done = [each for each in plan.runs() if str(each) not in failed]
    # What failed, or was not asked for, may have left figures of other settings in that folder.
    kept = collect(whole, [out / "results" / f"{each.name}.json" for each in done], folders.kept(name))
    print("\n".join(compare.lines(kept)))
    print(f"{len(done)} results copied to {folders.kept(name)}")
    for each, why in () if options.table_only else failed.items():
        print(f"results: {each}: {why}", file=sys.stderr)
    return kept.status


def share(plan: compare.Plan, name: str, folders: Folders) -> list[compare.Run]:
    """Take runs that the table of another plan has done already, alike to the last setting; those it took."""
    taken = []
    others = [other for other in folders.plans() if other != name and (folders.tables / other).is_dir()]
    for run in plan.runs():
        if unfinished(run, folders.tables / name) is None:
            continue
        found = (_alike(run, folders.plan(other), folders.tables / other) for other in others)
        source = next((folder for folder in found if folder is not None), None)
        if source is not None:
            print(f"{run}: the same as {source}, which is done")
            target = folders.tables / name / run.place
            make_folder(target)
            for part in (ASKED, "log.jsonl", "record.json", "model.pwfn"):
                _copy(source / part, target / part)
            taken.append(run)
    return taken


def _alike(run: compare.Run, plan: compare.Plan, tables: Path) -> Path | None:
    """The folder of a finished run of another table that is this run, but for its name."""
    for other in plan.runs():
        # What it was begun with must be known: data and weights are no settings.
        known = other.seed == run.seed and (tables / other.place / ASKED).is_file()
        if known and unfinished(run, tables, other.place) is None:
            return tables / other.place
    return None


def collect(plan: compare.Plan, results: Sequence[Path], target: Path) -> compare.Table:
    """Copy results over those that were kept, and make the plan's table of all that are there then."""
    make_folder(target / "results")
    for path in results:
        _copy(path, target / "results" / path.name)
    return _table(plan, target)


def keep(name: str, seed: int, folders: Folders) -> Path:
    """Copy the file of a plan's run to experiments/models, if it is the one that the results are of."""
    runs = [each for each in folders.plan(name).runs() if each.seed == seed]
    if len(runs) != 1:
        raise ConfigError(
            f"{name} has {len(runs)} runs with seed {seed}, not one: name a plan in "
            f"{folders.experiments / 'rows'} and one of its seeds"
        )
    file = folders.tables / name / runs[0].place / "model.pwfn"
    if not file.is_file():
        raise FileError(f"{file}: is not there: python experiments/results.py run {name} makes it")
    size = file.stat().st_size
    if size > MOST_BYTES:
        raise FileError(
            f"{file}: has {size:,} bytes, and at most {MOST_BYTES:,} are kept in the repository: publish it "
            "elsewhere, or compress further"
        )
    result = folders.kept(name) / "results" / f"{runs[0].name}.json"
    if not result.is_file() or read_json(result)["file_sha256"] != digest(file):
        raise FileError(
            f"{file}: its figures are not in {result}: python experiments/results.py run {name} --table-only "
            "puts them there"
        )
    target = folders.experiments / "models" / f"{name}_seed{seed}.pwfn"
    make_folder(target.parent)
    _copy(file, target)
    return target


def listing(folders: Folders) -> list[str]:
    """A line for each plan: its name and how many of its runs have results."""
    plans = folders.plans()
    width = max(map(len, plans), default=0)
    lines = []
    for name, path in plans.items():
        runs = compare.load(path).runs()
        there = sum((folders.kept(name) / "results" / f"{each.name}.json").exists() for each in runs)
        said = "no results" if not there else f"{there} of {len(runs)} results"
        lines.append(f"{name:{width}}  {said}")
    return lines


def main(arguments: Sequence[str] | None = None, folders: Folders | None = None) -> int:
    """The command; its status."""
    folders = folders or Folders()
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "list":
                print("\n".join(listing(folders)))
            case "keep":
                data = folders.plan(options.name).data
                print(f"pwfn evaluate {_shown(keep(options.name, options.seed, folders))} --data {data}")
            case "run":
                for name in options.names:  # a slip in the last name is said before the first is run
                    folders.plan(name)
                return max(run(name, folders, options) for name in options.names)
    except PwfnError as error:
        print(f"results: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every plan, and which have results")
    running = commands.add_parser("run", help="run, or go on with, every run of the named plans")
    running.add_argument("names", nargs="+", metavar="NAME")
    running.add_argument("--device", help="cpu, cuda:0, …; CUDA where there is one, unless given")
    running.add_argument("--jobs", type=_count, help="runs at a time, in place of the plan's")
    running.add_argument("--commit", help="of this code, where it is not a git checkout")
    running.add_argument(
        *("--weights",),
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="where to look for files of weights first, by their names",
    )
    running.add_argument("--missing", action="store_true", help="leave out what the results have already")
    running.add_argument(
        "--table-only", action="store_true", help="start nothing: keep the figures of the runs that are there"
    )
    keeping = commands.add_parser("keep", help="copy a run's file to experiments/models")
    keeping.add_argument("name", metavar="NAME")
    keeping.add_argument("seed", type=int, metavar="SEED")
    return parser


def _count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}: allowed is a whole number of at least 1")
    return number


def _table(plan: compare.Plan, folder: Path) -> compare.Table:
    """The table of the figures in a folder; table.md and table.json there are written anew."""
    return compare.run(plan, folder, table_only=True, say=_silent)


def _silent(line: str) -> None:
    """Say nothing."""


def _commit(folder: Path) -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            f"{folder} is not in a git checkout, and a result says of which commit it is: give --commit"
        ) from None
    return done.stdout.strip()


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)


def _shown(path: Path) -> Path:
    """As seen from the current folder, where it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
