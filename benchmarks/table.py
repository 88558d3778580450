"""Write the tables of docs/performance.md from the lines in benchmarks/results.

    python benchmarks/step.py >> benchmarks/results/step_h200.jsonl     on each machine, for each benchmark
    python benchmarks/table.py            rewrite the block between the two marks
    python benchmarks/table.py --check    exit with 1 if the page is not up to date

A later line of the same case, rival and device replaces an earlier one. Lines without a ratio (profiles) are
skipped. The lines of ``codec.py`` have tables of their own: a row per file, a column per coder.
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
FILES_START = "<!-- files: made by benchmarks/table.py -->"
FILES_END = "<!-- end of what benchmarks/table.py made of files -->"
RIVAL = "constriction"
"""Its times are the unit of those of the other coders of files."""

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
    return "\n".join([HEAD, *rows, "", *(f"{line}  " for line in versions)])


def cells(facts: dict[str, Any] | None, name: str, unit: dict[str, Any] | None) -> str:
    """Bytes, or millions of weights per second with the time divided by that of the rival."""
    if facts is None or facts.get(name) is None:
        return "–"
    if name == "bytes" or unit is None:
        return f"{facts[name]:,}"
    return f"{number(facts['weights'] / facts[name] / 1e6)} ({number(facts[name] / unit[name])})"


def number(value: float) -> str:
    """With two places at least, and without an exponent."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def codec_tables(found: list[dict[str, Any]]) -> str:
    """Bytes, decoding, encoding and loading of every file by every coder."""
    by = {(facts["file"], facts["coder"]): facts for facts in found}
    files, coders = list(dict.fromkeys(file for file, _ in by)), list(dict.fromkeys(coder for _, coder in by))
    out: list[str] = []

    def add(title: str, columns: list[str], rows: list[list[str]]) -> None:
        head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        out.extend(("", title, "", head, *(f"| {' | '.join(row)} |" for row in rows)))

    speed = f"million weights per second, and in brackets the time divided by that of {RIVAL}"
    for name, title in (
        ("bytes", "Bytes of all indices:"),
        *((f"{w}_s", f"{w.capitalize()}, {speed}:") for w in ("decode", "encode")),
    ):
        used = [
            coder
            for coder in coders
            if any(facts.get(name) is not None for facts in found if facts["coder"] == coder)
        ]
        # The bytes do not depend on the number of threads.
        used = [coder for coder in used if name != "bytes" or "2 threads" not in coder]
        rows = [
            [file, *(cells(by.get((file, coder)), name, by.get((file, RIVAL))) for coder in used)]
            for file in files
        ]
        add(title, ["file", *used], rows)
    ours = [coder for coder in coders if any("load_s" in facts for facts in found if facts["coder"] == coder)]
    rows = [
        [
            file,
            f"{by[file, ours[0]]['weights']:,}",
            *(f"{seconds(by[file, c]['load_s'])}, {by[file, c]['load_memory'] or '–'}" for c in ours),
        ]
        for file in files
    ]
    add(
        "`pwfn.load`: time, and peak memory divided by that of the decoded indices:",
        ["file", "weights", *ours],
        rows,
    )
    made = sorted(
        {
            f"{facts['device']}, commit {facts['commit'][:7]}, torch {facts['versions']['torch']}"
            for facts in found
        }
    )
    return "\n".join([*out, "", *(f"{line}  " for line in made)]).strip("\n")


def codec_lines() -> list[dict[str, Any]]:
    """The lines of ``codec.py``."""
    text = (RESULTS / "codec_cpu.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def replaced(text: str, start: str, block: str, end: str) -> str:
    """A page with another block between two marks."""
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{block}\n{end}{rest.partition(end)[2]}"


def page(text: str) -> str:
    """The page with new tables."""
    text = replaced(text, START, table(), END)
    return replaced(text, FILES_START, codec_tables(codec_lines()), FILES_END)


def main() -> int:
    """Rewrite the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check whether the page is up to date")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if options.check:
        if made != text:
            print(f"{PAGE.name} is not up to date: run python benchmarks/table.py", file=sys.stderr)
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
