"""Write the tables of docs/imagenet.md: how long, by what was measured; settings; the paper's figures.

    python benchmarks/imagenet_steps.py --out experiments/results/imagenet_steps.jsonl     with a GPU
    python experiments/imagenet/table.py            rewrite the blocks between their marks
    python experiments/imagenet/table.py --check    exit 1 if the page is not up to date

A later line of the same network, batch size and device replaces an earlier one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from pwfn import Config
from pwfn.lab import compare
from pwfn.lab.compare import paper

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "imagenet.md"
PLANS = ROOT / "experiments" / "imagenet"
MEASURED = ROOT / "experiments" / "results" / "imagenet_steps.jsonl"
STEPS = "<!-- imagenet steps: made by experiments/imagenet/table.py -->", "<!-- end of imagenet steps -->"
FIGURES = (
    "<!-- imagenet figures of the paper: made by experiments/imagenet/table.py -->",
    "<!-- end of imagenet figures of the paper -->",
)
DIFFERING = (
    "<!-- imagenet settings: made by experiments/imagenet/table.py -->",
    "<!-- end of imagenet settings -->",
)
NOT_MEASURED = (
    "Not measured yet: run `python benchmarks/imagenet_steps.py --out "
    "experiments/results/imagenet_steps.jsonl` with a GPU, then `python experiments/imagenet/table.py`."
)
HEAD = (
    "| network | batch | a step | images a second | plain fine-tuning | memory | hours of training | "
    "polish | BatchNorm | scoring | hours in all | workers to keep up |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
PAPER_HEAD = (
    "| file | network | weights | baseline | PWFN, top-1 (ensemble) | bits | unique | WFN, top-1 | bits | "
    "unique |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def lines(path: Path) -> list[dict[str, Any]]:
    """What was measured, each network, batch size and device once, in the order of their first lines."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        facts = json.loads(text)
        found[facts["network"], facts["batch_size"], facts["device"]] = facts
    return list(found.values())


def row(facts: dict[str, Any]) -> str:
    """One line of the table."""
    hours = facts["hours"]
    memory = f"{facts['ours_bytes'] / 2**30:.1f} GiB" if facts["ours_bytes"] else "–"
    parts = [f"{hours[name]:.2f}" for name in ("training", "polish", "reestimation", "scoring", "all")]
    cells = [
        f"`{facts['network']}`",
        str(facts["batch_size"]),
        f"{1e3 * facts['ours_s']:.1f} ms",
        f"{facts['ours_images_a_second']:,.0f}",
        f"{1e3 * facts['rival_s']:.1f} ms (ratio {facts['ratio']:.2f})",
        memory,
        *parts,
        str(math.ceil(facts["ours_images_a_second"] / facts["worker_images_a_second"])),
    ]
    return "| " + " | ".join(cells) + " |"


def run_of(facts: dict[str, Any]) -> str:
    """What the hours are of."""
    count = facts["counts"]
    return (
        f"{count['training']:g} epochs of training, {count['polish']:g} of polish, BatchNorm statistics over "
        f"{count['reestimation']:g} (none in DeiT), {count['scorings']:g} scorings after rounds and "
        f"{count['fp32_scorings']:g} in float32"
    )


def steps(path: Path) -> str:
    """How long: the table, and below it where it was measured."""
    found = lines(path)
    if not found:
        return NOT_MEASURED
    machines = {
        f"{facts['device']}, torch {facts['versions']['torch']}, {facts['precision']}"
        f"{', CUDA graph' if facts['cuda_graph'] else ''}, a worker reads "
        f"{facts['worker_images_a_second']:,.0f} images a second, commit {facts['commit'][:10]}"
        for facts in found
    }
    runs = "; ".join(sorted({run_of(facts) for facts in found}))
    below = f"A run is {runs}. Measured on: {'; '.join(sorted(machines))}."
    return "\n".join([HEAD, *map(row, found), "", below])


def expected(folder: Path) -> str:
    """What the paper found, network by network; none of it was measured here."""
    rows = []
    for path in sorted(folder.glob("*.toml")):
        (network,) = compare.load(path).models
        name = str(network.paper)
        base, pwfn, wfn = (paper.line(name, method) for method in ("Baseline", "PWFN", "WFN"))
        assert base is not None
        assert pwfn is not None
        cells = [
            f"[{path.name}](../experiments/imagenet/{path.name})",
            name,
            f"`{network.name}`",
            f"*{base.top1}*",
            f"*{pwfn.top1} ({pwfn.ensemble})*",
            f"*{pwfn.entropy_bits}*",
            f"*{pwfn.unique}*",
            *(["–"] * 3 if wfn is None else (f"*{x}*" for x in (wfn.top1, wfn.entropy_bits, wfn.unique))),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([PAPER_HEAD, *rows])


def differing() -> str:
    """Every setting in which the two presets differ."""
    ours, theirs = (Config.preset(name).to_dict() for name in ("recommended", "paper"))
    rows = [
        f"| `{section}.{name}` | {_written(theirs[section][name])} | {_written(value)} |"
        for section, values in ours.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if theirs[section][name] != value
    ]
    return "\n".join(["| setting | `paper` | `recommended` |", "|---|---|---|", *rows])


def _written(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def with_block(text: str, block: str, marks: tuple[str, str]) -> str:
    """The page with a block put between its marks, which must be there."""
    start, end = marks
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        sys.exit(f"{PAGE.name} has not both marks {start} and {end}: put them back")
    return f"{before}{start}\n{block}\n{end}{after}"


def main() -> None:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell whether the page is up to date")
    text = PAGE.read_text(encoding="utf-8")
    new = with_block(text, steps(MEASURED), STEPS)
    new = with_block(new, expected(PLANS), FIGURES)
    new = with_block(new, differing(), DIFFERING)
    if parser.parse_args().check:
        made = "python experiments/imagenet/table.py"
        sys.exit(0 if new == text else f"{PAGE.name} is not up to date: run {made}")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
