"""Write the tables of results into the README, from the files in experiments/results.

python experiments/table.py            rewrite the blocks between their marks
python experiments/table.py --check    exit 1 if the README is not up to date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results: made by experiments/table.py -->", "<!-- end of results -->"
COMPARISON = "<!-- comparison: made by experiments/table.py -->", "<!-- end of comparison -->"
HEAD = (
    "| result file | network | rule | top-1 before | just after the last fixing | top-1 after | "
    "20-draw ensemble | bits a weight | unique values | powers of two | file, bytes | smaller than fp32 |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, facts: dict[str, Any]) -> str:
    """One line of the table."""
    percent = [f"{100 * facts[key]:.2f} %" for key in ("top1_start", "top1_fixed", "top1", "top1_ensemble")]
    cells = [
        f"[{name}](experiments/results/{name}.json)",
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
    commits = sorted({str(f["commit"])[:10] for f in results.values()})
    rows = "\n".join(row(name, facts) for name, facts in results.items())
    return f"{HEAD}\n{rows}\n\nMeasured on: {'; '.join(machines)}. Commits: {', '.join(commits)}."


def comparison(folder: Path) -> str:
    """The tables that `pwfn compare` left in the folders compare_*, one below the other."""
    tables = [path.read_text().strip() for path in sorted(folder.glob("compare_*/table.md"))]
    return "\n\n".join(tables)


def with_block(text: str, block: str, marks: tuple[str, str]) -> str:
    """The README with a block put between its marks."""
    start, end = marks
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{block}\n{end}{after}"


def main() -> None:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    readme = ROOT / "README.md"
    text = readme.read_text()
    results = ROOT / "experiments" / "results"
    new = with_block(text, table(results), (START, END))
    new = with_block(new, comparison(results), COMPARISON)
    if parser.parse_args().check:
        sys.exit(0 if new == text else "README.md is not up to date: run python experiments/table.py")
    readme.write_text(new)


if __name__ == "__main__":
    main()
