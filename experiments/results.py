"""Run a plan of experiments, keep its figures in the repository, and write the pages of tables.

    python experiments/results.py list                    every plan, and how many of its runs have results
    python experiments/results.py run resnet20 resnet56   `pwfn compare` for each, into tables/NAME
    python experiments/results.py keep resnet20 0         the file of seed 0, to experiments/models
    python experiments/results.py docs                    write docs/tables and the blocks of other pages
    python experiments/results.py docs --check            exit 1 if a page or a figure is not up to date

A name is that of a plan in experiments: rows/NAME.toml, ablations/NAME.toml or compare_*.toml. Paths in a
plan are relative to the current folder. A run that was stopped is resumed by the same command.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import few_images
import figures
import files
import imagenet
import posteriors
import readme_table
import second_stage
import targets
import uncertainty_per_byte
from archive import Archive
from PIL import Image

from pwfn.errors import ConfigError, FileError, PwfnError
from pwfn.file.storage import make_folder
from pwfn.lab import compare
from pwfn.lab.compare.measure import digest
from pwfn.lab.compare.runner import git_commit, write

MOST_BYTES = 3_000_000
"""Of a file that is kept in the repository."""

PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "methods": (
        "Methods side by side",
        "Every method from the same weights, with the same data and measure; the rulings are in "
        "[methods.md](../methods.md). No settings were searched for the rivals, and `recommended` was chosen "
        "on ResNet-20. Results of commits 7d01ce6 and 8ad8651 were scored with TF32: up to two images differ "
        "from float32.",
        ("compare_resnet18", "compare_resnet20", "compare_vit"),
    ),
    "conditioned": (
        "Conditioning",
        "The preset quick: 1,024 training images without their labels, no training. The step is a fraction "
        "of the root mean square of all weights; `quick` without a step finds its own. The last tables are "
        "about PWFN, trained with all images and labels.",
        (
            "conditioned_resnet20",
            "conditioned_resnet56",
            "conditioned_resnet18",
            "conditioned_vgg16",
            "conditioned_vit",
            "conditioned_rounds",
            "conditioned_rounds_resnet56",
            "conditioned_rounds_resnet18",
        ),
    ),
    "small": (
        "Training for the bytes",
        "The preset small, which trains for the size of its file. At commit a5fa1f7 lambda reached its "
        "target late in the run, and too few bytes were counted for what is not compressed: the files of "
        "VGG-16 for 100,000 bytes are above their target. That VGG-16 is of another training (93.96 %) "
        "than the one of commit b7694c2 (93.77 %).",
        (*("small_vgg16", "small_resnet18", "small_resnet20", "small_resnet56"), "rate_short_resnet20"),
    ),
    "sigma": (
        "Where sigma comes from",
        "The paper's sigma, its prior, its regulariser and its rules, against one constant sigma.",
        (*("paper_resnet20", "sigma_resnet20", "sigma_resnet18", "prior_resnet20"), *figures.SIGMAS),
    ),
    "training": (
        "How to train",
        "Settings are chosen by 5,000 held-out images that the network was not trained on.",
        (
            *("levers_resnet20", "levers_resnet20_small", "levers_resnet18", "levers_vit_tiny"),
            *("average_resnet18", "average_vit_tiny", "quick_resnet20"),
        ),
    ),
}
"""By page: its title, its first lines, and its tables. Tables of one row are in targets.md."""


def unmeasured(archive: Archive, name: str) -> compare.Plan:
    """The plan with only those runs that have no results; perhaps none, and then it has no rows."""
    plan, rows = archive.plan(name), []
    for network in plan.networks:
        for row in plan.rows:
            own = [run for run in plan.runs() if run.network is network and run.row is row]
            seeds = tuple(run.seed for run in own if archive.result(name, run)[0] is None)
            if seeds:
                rows.append(replace(row, models=(network.name,), seeds=seeds))
    return replace(plan, rows=tuple(rows))


def run(archive: Archive, name: str, tables: Path, options: argparse.Namespace) -> int:
    """Do a plan's runs and keep their figures; 1 where a result is missing."""
    plan = unmeasured(archive, name) if options.missing else archive.plan(name)
    commit = options.commit or git_commit(Path(__file__))
    if commit is None:
        raise ConfigError("this is not a git checkout, and a result names its commit: give --commit")
    if plan.rows:
        how = {"jobs": options.jobs, "device": options.device, "commit": commit}
        made = compare.run(plan, tables / name, table_only=options.table_only, **how)
        # A run that failed, or was not asked for, may have left figures of other settings in that folder.
        done = [each for each in plan.runs() if str(each) not in made.missing]
        make_folder(archive.folder(name) / "results")
        for each in done:
            shutil.copy(tables / name / "results" / f"{each.name}.json", archive.folder(name) / "results")
        for which, why in made.missing.items():
            print(f"results: {which}: {why}", file=sys.stderr)
        if name in figures.SIGMAS and not made.missing and not options.missing:
            figures.keep_sigmas(archive, name, tables)
    write(archive.folder(name) / "table.md", archive.table(name))
    return int(bool(unmeasured(archive, name).rows))


def keep(archive: Archive, name: str, seed: int, tables: Path, row: str | None = None) -> Path:
    """Copy the file of a run to experiments/models, if the results are those of this file."""
    runs = [each for each in archive.plan(name).runs() if each.seed == seed and row in (None, each.label)]
    if len(runs) != 1:
        labels = ", ".join(f'"{each.label}"' for each in runs)
        advice = f": give --row, one of {labels}" if labels else ""
        raise ConfigError(f"{name} has {len(runs)} such runs with seed {seed}, not one{advice}")
    file = tables / name / runs[0].place / "model.pwfn"
    if not file.is_file():
        raise FileError(f"{file}: is not there: python experiments/results.py run {name} makes it")
    size, (facts, _) = file.stat().st_size, archive.result(name, runs[0])
    if size > MOST_BYTES:
        raise FileError(f"{file}: has {size:,} bytes, and at most {MOST_BYTES:,} are kept in the repository")
    if facts is None or facts["file_sha256"] != digest(file):
        raise FileError(
            f"{file}: its figures are not in {archive.folder(name)}: python experiments/results.py run "
            f"{name} --table-only puts them there"
        )
    target = archive.experiments / "models" / f"{runs[0].name if row else f'{name}_seed{seed}'}.pwfn"
    make_folder(target.parent)
    shutil.copyfile(file, target)
    return target


def pages(archive: Archive) -> dict[Path, str]:
    """Every page that is generated, or has generated blocks, as it should be."""
    made: dict[Path, str] = {}
    folder = archive.root / "docs" / "tables"

    def page(name: str, title: str, lines: Sequence[str]) -> None:
        head = ["<!-- made by experiments/results.py docs -->", f"# {title}", ""]
        made[folder / f"{name}.md"] = "\n".join([*head, *lines]) + "\n"

    asked = "What is asked is in `experiments/targets.toml`. While a seed is missing, nothing is met."
    page(
        "targets",
        "Targets",
        [
            asked,
            "",
            *targets.table(archive),
            "",
            "## Accuracy and size",
            "",
            *figures.frontier_lines(archive),
        ],
    )
    for name, (title, intro, tables) in PAGES.items():
        lines = [intro]
        for table in tables:
            repeat = [f"`make results NAME={table}` repeats it.", ""] if table in archive.paths else []
            lines += ["", f"## {archive.title(table)}", "", *repeat]
            lines += [*figures.sigma_lines(archive, table), ""] if table in figures.SIGMAS else []
            lines += archive.table(table).splitlines()
        page(name, title, lines)
    made |= {archive.folder(name) / "table.md": archive.table(name) for name in archive.names}
    results = archive.experiments / "results"
    blocks = {
        "README.md": {"table": readme_table.table()},
        "docs/uncertainty.md": {
            "posteriors": posteriors.table(results / "posteriors.jsonl"),
            "per byte": uncertainty_per_byte.table(results / "uncertainty_per_byte.jsonl"),
        },
        "docs/method.md": {"second stage": second_stage.table(results / "second_stage.jsonl")},
        "docs/results.md": {"files": files.table(results / "files.jsonl")},
        "docs/imagenet.md": {
            "imagenet steps": imagenet.steps(results / "imagenet_steps.jsonl"),
            "imagenet paper": imagenet.expected(archive.experiments / "imagenet"),
            "imagenet settings": imagenet.differing(),
            "few images": few_images.table(results / "few_images.jsonl"),
        },
    }
    for path, own in blocks.items():
        text = (archive.root / path).read_text(encoding="utf-8")
        for name, lines in own.items():
            text = with_block(text, name, lines)
        made[archive.root / path] = text
    return made


def with_block(text: str, name: str, lines: Sequence[str]) -> str:
    r"""The page with the block between ``<!-- name … -->`` and ``<!-- end of name -->``, where it has one.

    >>> with_block("<!-- a: made by us -->\nold\n<!-- end of a -->", "a", ["new"])
    '<!-- a: made by us -->\nnew\n<!-- end of a -->'
    """
    marks = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    return marks.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], text)


def stale(archive: Archive) -> list[str]:
    """Pages that differ from what would be written, and figures of other results."""
    found = [
        str(path.relative_to(archive.root))
        for path, text in pages(archive).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for name, wanted in figures.fingerprints(archive).items():
        with Image.open(archive.root / "docs" / f"{name}.png") as picture:
            if picture.info.get("Description") != wanted:
                found.append(f"docs/{name}.png (python experiments/figures.py)")
    return found


def main(
    arguments: Sequence[str] | None = None, archive: Archive | None = None, tables: Path = Path("tables")
) -> int:
    """The command; its status."""
    archive = archive or Archive()
    options = _parser().parse_args(arguments)
    try:
        if options.command == "list":
            width = max(map(len, archive.paths), default=0)
            for name in archive.paths:
                runs = archive.plan(name).runs()
                there = sum(archive.result(name, each)[0] is not None for each in runs)
                print(f"{name:{width}}  {there} of {len(runs)} results")
        elif options.command == "keep":
            file = keep(archive, options.name, options.seed, tables, options.row)
            print(f"pwfn evaluate {file} --data {archive.plan(options.name).data}")
        elif options.command == "docs" and options.check:
            if old := stale(archive):
                print(f"results: not up to date: {', '.join(old)}", file=sys.stderr)
                return 1
        elif options.command == "docs":
            for path, text in pages(archive).items():
                make_folder(path.parent)
                write(path, text)
        else:
            for name in options.names:  # a typo in the last name is reported before the first is run
                archive.plan(name)
            return max(run(archive, name, tables, options) for name in options.names)
    except PwfnError as error:
        print(f"results: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every plan, and how many of its runs have results")
    running = commands.add_parser("run", help="start or resume every run of the named plans")
    running.add_argument("names", nargs="+", metavar="NAME")
    running.add_argument("--device", help="cpu, cuda:0, …; CUDA if there is one, unless given")
    running.add_argument("--jobs", type=int, help="runs at a time, instead of the plan's")
    running.add_argument("--commit", help="of this code, where it is not a git checkout")
    running.add_argument("--missing", action="store_true", help="leave out runs that have results already")
    running.add_argument(
        "--table-only", action="store_true", help="start nothing: keep the runs that are there"
    )
    keeping = commands.add_parser("keep", help="copy the file of a run to experiments/models")
    keeping.add_argument("name", metavar="NAME")
    keeping.add_argument("seed", type=int, metavar="SEED")
    keeping.add_argument("--row", help="its label, where the plan has several")
    docs = commands.add_parser("docs", help="write the pages of tables")
    docs.add_argument("--check", action="store_true", help="only say whether they are up to date")
    return parser


if __name__ == "__main__":
    sys.exit(main())
