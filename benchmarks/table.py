"""Write the tables of docs/performance.md from the lines in benchmarks/results.

    python benchmarks/step.py >> benchmarks/results/step_h200.jsonl     on each machine, for each benchmark
    python benchmarks/table.py            rewrite the block between the two marks
    python benchmarks/table.py --check    exit with 1 if the page is not up to date

A later line of the same case, rival and device replaces an earlier one. Lines without a ratio (profiles) are
skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
START, END = "<!-- made by benchmarks/table.py -->", "<!-- end of what benchmarks/table.py made -->"
HEAD = (
    "| case | rival | ours | rival's | ratio | memory, ours | memory, rival's | device |\n"
    "|---|---|---|---|---|---|---|---|"
)


def lines() -> list[dict[str, Any]]:
    """The newest line of every case, in the order of files and lines."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            facts = json.loads(text)
            if facts.get("ratio") is not None:
                found[facts["case"], facts["rival"], facts["device"]] = facts
    return list(found.values())


def seconds(value: float | None) -> str:
    """A time with a suitable unit."""
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def memory(facts: dict[str, Any], name: str) -> str:
    """Megabytes, if measured: the memory of a CUDA graph does not count as allocated."""
    value = 0 if "CUDA graph" in facts["case"] else facts.get(name)
    return f"{value / 1e6:,.1f} MB" if value else "–"


def table() -> str:
    """The block between the marks."""
    rows = [
        f"| {facts['case']} | {facts['rival']} | {seconds(facts['ours_s'])} | {seconds(facts['rival_s'])} | "
        f"{facts['ratio']:.2f} | {memory(facts, 'ours_bytes')} | {memory(facts, 'rival_bytes')} | "
        f"{facts['device']} |"
        for facts in lines()
    ]
    versions = sorted({f"{facts['device']}: torch {facts['versions']['torch']}" for facts in lines()})
    return "\n".join([START, HEAD, *rows, "", *(f"{line}  " for line in versions), END])


def main() -> int:
    """Rewrite the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check whether the page is up to date")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    made = before + table() + after
    if options.check:
        if made != text:
            print(f"{PAGE.name} is not up to date: run python benchmarks/table.py", file=sys.stderr)
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
