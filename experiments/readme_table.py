"""The table of the README, from the result files in experiments/results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import kept

from pwfn.lab.compare.table import commits, machines

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


def table() -> list[str]:
    """The table, and below it where it was measured."""
    found = [(network, method, results(place)) for network, method, place in ROWS] + imagenet()
    lines = [list(HEADS), ["---"] * len(HEADS), *(cells(*row) for row in found)]
    every = [facts for _, _, row in found for facts in row]
    on, at = "; ".join(machines(every)), ", ".join(commits(every))
    seeds = {row["seed"] for row in every}
    return [
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
        f"Measured on {on}, at commits {at}; seeds {min(seeds)} to {max(seeds)} where ± is given, "
        "else seed 0.",
    ]
