"""Write the tables of results into README.md and pages of docs, from the files in experiments.

python experiments/table.py            rewrite the blocks between their marks
python experiments/table.py --check    exit 1 if a page is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import collapse
import frontier
import targets
import uncertainty_table

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results: made by experiments/table.py -->", "<!-- end of results -->"
COMPARISON = "<!-- comparison: made by experiments/table.py -->", "<!-- end of comparison -->"
TARGETS = "<!-- targets: made by experiments/table.py -->", "<!-- end of targets -->"
TRUST = "<!-- uncertainty: made by experiments/table.py -->", "<!-- end of uncertainty -->"
SIGMAS = "<!-- sigmas: made by experiments/table.py -->", "<!-- end of sigmas -->"
FRONTIER = "<!-- frontier: made by experiments/table.py -->", "<!-- end of frontier -->"
ABLATIONS = "<!-- ablations: made by experiments/table.py -->", "<!-- end of ablations -->"
HEAD = (
    "| result file | network | rule | top-1 before | just after the last fixing | top-1 after | "
    "20-draw ensemble | bits a weight | unique values | powers of two | file, bytes | smaller than fp32 |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, facts: dict[str, Any]) -> str:
    """One line of the table."""
    percent = [f"{100 * facts[key]:.2f} %" for key in ("top1_start", "top1_fixed", "top1", "top1_ensemble")]
    cells = [
        f"[{name}](../experiments/results/{name}.json)",
        facts["model"],
        f"`{facts['settings']['clustering']['rule']}`",
        *percent,
        f"{facts['entropy_bits']:.2f}",
        str(facts["unique"]),
        f"{100 * facts['power_of_two_share']:.0f} %",
        f"{facts['file_bytes']:,}",
        f"{int(10 * facts['fp32_bytes'] / facts['file_bytes']) / 10} times",
    ]
    return "| " + " | ".join(cells) + " |"


def table(folder: Path) -> str:
    """The whole block, with machine and commit of the runs."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    machines = sorted({f"{f['device']}, torch {f['versions']['torch']}" for f in results.values()})
    commits = sorted({str(f["commit"])[:7] for f in results.values()})
    rows = "\n".join(row(name, facts) for name, facts in results.items())
    return f"{HEAD}\n{rows}\n\nMeasured on: {'; '.join(machines)}. Commits: {', '.join(commits)}."


def comparison(folder: Path) -> str:
    """The tables that `pwfn compare` left in the folders compare_*, one below the other."""
    tables = [path.read_text().strip() for path in sorted(folder.glob("compare_*/table.md"))]
    return "\n\n".join(tables)


def ablations(experiments: Path) -> str:
    """The tables of experiments/ablations, each under its plan's first line; then what is missing."""
    parts, missing = [], []
    for plan in sorted((experiments / "ablations").glob("*.toml")):
        found = experiments / "results" / plan.stem / "table.md"
        if not found.exists():
            missing.append(f"`{plan.stem}`")
            continue
        title = plan.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        # The table's own headings stand below this one.
        own = re.sub("^### ", "#### ", found.read_text(encoding="utf-8").strip(), flags=re.MULTILINE)
        parts.append(f"### {title}\n\n`make results NAME={plan.stem}`\n\n{own}")
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def sigmas(root: Path) -> str:
    """Figure and table of each plan that something was kept of, as seen from a page of docs."""
    names = [name for name in collapse.NAMES if collapse.kept(name, root).is_file()]
    return "\n\n".join(
        f"![Sigmas of the free weights, {name}]({name}.png)\n\n{collapse.table(name, root)}" for name in names
    )


def with_block(text: str, block: str, marks: tuple[str, str]) -> str:
    """The page with a block put between its marks, which must be there."""
    start, end = marks
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        sys.exit(f"a page has not both marks {start} and {end}: put them back")
    return f"{before}{start}\n{block}\n{end}{after}"


def pages(root: Path) -> dict[Path, str]:
    """Every page that has blocks, as it shall be."""
    experiments = root / "experiments"
    readme, page, trust = root / "README.md", root / "docs" / "results.md", root / "docs" / "uncertainty.md"
    blocks: dict[Path, dict[tuple[str, str], str]] = {
        readme: {
            TARGETS: targets.table(experiments, ""),
            COMPARISON: comparison(experiments / "results"),
        },
        page: {
            TARGETS: targets.table(experiments, "../"),
            FRONTIER: frontier.caption(experiments),
            (START, END): table(experiments / "results"),
            SIGMAS: sigmas(root),
            ABLATIONS: ablations(experiments),
        },
        trust: {TRUST: "\n".join(uncertainty_table.table(experiments / "results" / "uncertainty"))},
    }
    made = {}
    for path, own in blocks.items():
        text = path.read_text(encoding="utf-8")
        for marks, block in own.items():
            text = with_block(text, block, marks)
        made[path] = text
    return made


def main() -> None:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell whether the pages are up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository, unless it is this one")
    options = parser.parse_args()
    stale = {path: text for path, text in pages(options.root).items() if path.read_text("utf-8") != text}
    if options.check and stale:
        names = " and ".join(str(path.relative_to(options.root)) for path in stale)
        sys.exit(f"{names}: not up to date: run python experiments/table.py")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
