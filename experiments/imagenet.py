"""The tables of docs/imagenet.md: measured times, the paper's figures, and how the presets differ.

python benchmarks/imagenet_steps.py --out experiments/results/imagenet_steps.jsonl     with a GPU
python experiments/results.py docs
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kept

from pwfn import Config
from pwfn.lab import compare
from pwfn.lab.compare import paper
from pwfn.lab.compare.table import markdown

STEPS_HEADS = (
    *("network", "batch", "step", "images/s", "plain fine-tuning", "memory", "training, h", "the rest, h"),
    *("in all, h", "workers"),
)
PAPER_HEADS = (
    *("plan", "network", "weights", "baseline", "PWFN, top-1 (ensemble)", "bits", "unique", "WFN, top-1"),
    *("bits", "unique"),
)


def measured(path: Path) -> list[dict[str, Any]]:
    """What was measured: the last line of each network, batch size and device."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for facts in kept.read(path):
        found[facts["network"], facts["batch_size"], facts["device"]] = facts
    return list(found.values())


def step_cells(facts: Mapping[str, Any]) -> list[str]:
    """One row of the table of times."""
    hours = facts["hours"]
    return [
        f"`{facts['network']}`",
        str(facts["batch_size"]),
        f"{1e3 * facts['ours_s']:.1f} ms",
        f"{facts['ours_images_a_second']:,.0f}",
        f"{1e3 * facts['rival_s']:.1f} ms (ratio {facts['ratio']:.2f})",
        f"{facts['ours_bytes'] / 2**30:.1f} GiB" if facts["ours_bytes"] else "–",
        f"{hours['training']:.2f}",
        f"{hours['polish'] + hours['reestimation'] + hours['scoring']:.2f}",
        f"{hours['all']:.2f}",
        str(math.ceil(facts["ours_images_a_second"] / facts["worker_images_a_second"])),
    ]


def steps(path: Path) -> list[str]:
    """The table of times, and where they were measured."""
    found = measured(path)
    if not found:
        return ["Not measured yet: run `python benchmarks/imagenet_steps.py` with a GPU."]
    machines = {
        f"{facts['device']}, torch {facts['versions']['torch']}, {facts['precision']}"
        f"{', CUDA graph' if facts['cuda_graph'] else ''}, one worker reads "
        f"{facts['worker_images_a_second']:,.0f} images/s, commit {facts['commit'][:10]}"
        for facts in found
    }
    counts = {
        f"{count['training']:g} epochs of training, {count['polish']:g} of polish, BatchNorm statistics over "
        f"{count['reestimation']:g} (none in DeiT), {count['scorings']:g} scorings after rounds and "
        f"{count['fp32_scorings']:g} in float32"
        for count in (facts["counts"] for facts in found)
    }
    below = f"A run is {'; '.join(sorted(counts))}. Measured on: {'; '.join(sorted(machines))}."
    return [*markdown(STEPS_HEADS, [step_cells(facts) for facts in found]), "", below]


def expected(folder: Path) -> list[str]:
    """What the paper reports for each network; none of it was measured here."""
    rows = []
    for path in sorted(folder.glob("*.toml")):
        (network,) = compare.load(path).networks
        found = [paper.line(str(network.paper), method) for method in ("Baseline", "PWFN", "WFN")]
        base, pwfn, wfn = found
        assert base is not None
        assert pwfn is not None
        rows.append(
            [
                f"[{path.name}](../experiments/imagenet/{path.name})",
                str(network.paper),
                f"`{network.name}`",
                f"{base.top1}",
                f"{pwfn.top1} ({pwfn.ensemble})",
                f"{pwfn.entropy_bits}",
                f"{pwfn.unique}",
                *(["–"] * 3 if wfn is None else map(str, (wfn.top1, wfn.entropy_bits, wfn.unique))),
            ]
        )
    return markdown(PAPER_HEADS, rows, (0, 1, 2))


def differing() -> list[str]:
    """Every setting in which the presets paper and recommended differ."""
    ours, theirs = (Config.preset(name).to_dict() for name in ("recommended", "paper"))
    rows = [
        [f"`{section}.{name}`", f"`{json.dumps(theirs[section][name])}`", f"`{json.dumps(value)}`"]
        for section, values in ours.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if theirs[section][name] != value
    ]
    return markdown(["setting", "`paper`", "`recommended`"], rows, (0, 1, 2))
