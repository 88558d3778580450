"""The table of the README, from the result files in experiments/results.

python experiments/readme_table.py            write it into README.md
python experiments/readme_table.py --check    exit with status 1 if README.md has another one
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import kept

ROOT = Path(__file__).resolve().parent.parent
HEADS = ("network", "method", "top-1 before", "top-1 after", "bits", "values", "bytes", "smaller")
ROWS = (
    (
        "ResNet-20",
        "[quick](experiments/rows/conditioned_resnet20.toml), 1,024 images, no labels, not trained",
        "conditioned_resnet20/cifar_resnet20_quick",
    ),
    (
        "ResNet-20",
        "[small](docs/tables/small.md), 40,000 bytes asked",
        "small_resnet20/cifar_resnet20_small_40_000_bytes",
    ),
    ("ResNet-20", "LSQ, 3 bit", "compare_resnet20/cifar_resnet20_lsq_3_bit"),
    ("ResNet-18", "pwfn, recommended", "compare_resnet18/cifar_resnet18_pwfn_recommended"),
    (
        "ResNet-18",
        "[small](docs/tables/small.md), 600,000 bytes asked",
        "small_resnet18/cifar_resnet18_small_600_000_bytes",
    ),
    (
        "VGG-16",
        "[small](docs/tables/small.md), 125,000 bytes asked",
        "small_vgg16/cifar_vgg16_small_125_000_bytes",
    ),
    ("ViT, 4 M weights", "pwfn, recommended", "compare_vit/cifar_vit_tiny_pwfn_recommended"),
    ("ViT, 4 M weights", "Q-ViT, 4 bit", "compare_vit/cifar_vit_tiny_q_vit_4_bit"),
)
"""Network, method, and the result files: folder and name without the seed."""

IMAGENET = (
    ("MobileNetV2, ImageNet", "mobilenet_v2", "0.205"),
    ("EfficientNet-Lite0, ImageNet", "tf_efficientnet_lite0", "0.4"),
)
"""Networks of experiments/results/few_images.jsonl, and the step of their row."""

Facts = dict[str, Any]


def results(place: str) -> list[Facts]:
    """The figures of every seed."""
    folder, _, name = place.partition("/")
    paths = sorted((ROOT / "experiments" / "results" / folder).rglob(f"{name}_seed*.json"))
    if not paths:
        raise SystemExit(f"{place}: there is no such result in experiments/results")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def imagenet() -> list[tuple[str, str, list[Facts]]]:
    """The rows of networks that were trained on ImageNet."""
    path = ROOT / "experiments" / "results" / "few_images.jsonl"
    lines = kept.read(path)
    rows = []
    link = "docs/imagenet.md#a-thousand-unlabelled-images"
    for label, name, step in IMAGENET:
        (own,) = (line for line in lines if (line["network"], line["row"]) == (name, f"quick-{step}"))
        method = f"[quick, step {step}]({link}), {own['images']:,} images"
        rows.append((label, method, [own]))
    return rows


def shown(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n - 1).

    >>> shown([91.0, 92.0]), shown([91.0])
    ('91.50 ± 0.71', '91.00')
    """
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def cells(network: str, method: str, found: Sequence[Facts]) -> list[str]:
    """One row: accuracy and bits are means over seeds, values and bytes those of the largest file."""
    size = max(facts["file_bytes"] for facts in found)
    return [
        network,
        method,
        f"{100 * found[0]['top1_start']:.2f}",
        shown([100 * facts["top1"] for facts in found]),
        f"{fmean(facts['entropy_bits'] for facts in found):.2f}",
        f"{max(facts['unique'] for facts in found):,}",
        f"{size:,}",
        f"{math.floor(10 * found[0]['fp32_bytes'] / size) / 10:.1f} ×",  # rounded down
    ]


def table() -> str:
    """The table, and below it where it was measured."""
    found = [(network, method, results(place)) for network, method, place in ROWS] + imagenet()
    lines = [list(HEADS), ["---"] * len(HEADS), *(cells(*row) for row in found)]
    every = [facts for _, _, row in found for facts in row]
    machines = sorted({f"{facts['device']}, torch {facts['versions']['torch']}" for facts in every})
    commits = sorted({facts["commit"][:7] for facts in every})
    seeds = {row["seed"] for row in every}
    return "\n".join(
        [
            *("| " + " | ".join(line) + " |" for line in lines),
            "",
            f"Measured on {'; '.join(machines)}, at commits {', '.join(commits)}; seeds "
            f"{min(seeds)} to {max(seeds)} where ± is given, else seed 0.",
        ]
    )


def with_table(text: str) -> str:
    """The README with the table between its two marks."""
    marks = re.compile(r"(<!-- table: [^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
    return marks.sub(lambda found: found[1] + table() + "\n" + found[2], text)


def main() -> int:
    """The command; its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    checks = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = with_table(old)
    if checks:
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
