"""Time and memory of conditioning (preset quick), against the number of images.

    python benchmarks/condition.py [--cases NAME …] [--images N …] [--device cpu|cuda] [--out FILE]

Prints one JSON line per case: all that a run with the step 0.5 does, scaling included. Without a step of its
own a run makes up to five more passes, with at most 384 images each. ``cifar_resnet20`` takes 64 to 4,096
images of 32 × 32 pixels, torchvision's ``resnet50`` 1,024 of 224 × 224. Images and weights are random.

The rival is one forward pass of the original network over the same images, in parts of 32. Seconds are those
of the clock on a GPU, and of the processor on a CPU. ``ours_bytes`` is the largest memory beside network and
images at any time: on a GPU what torch allocated; on a CPU the rise of the resident size, in a process per
case. ``activations_limit`` is what conditioning allows itself for activations.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import torch
from machine import here, show
from torch import Tensor

from pwfn import Config
from pwfn.bayes.batches import Batch
from pwfn.bayes.grid.conditioned import ConditionedNetwork
from pwfn.bayes.method import DataProbe
from pwfn.bayes.randomness import seeded
from pwfn.fixing.conditioning.network import MEMORY
from pwfn.zoo import models

CASES = {
    "cifar_resnet20": ("cifar_resnet20", 32, (64, 256, 1024, 4096)),
    "resnet50": ("torchvision:resnet50", 224, (1024,)),
}
"""By name: the network, the size of its images, and how many of them."""

PART = 32
STEP = 0.5


def forward_seconds(model: torch.nn.Module, images: Tensor) -> float:
    """Time of one pass over the images, after one that initialises."""
    with torch.no_grad():
        model(images[:PART])
        started = _now(images.device)
        for part in images.split(PART):
            model(part)
    return _now(images.device) - started


def measure(network: str, size: int, count: int, device: torch.device) -> dict[str, Any]:
    """The figures of one case."""
    with seeded(0, device):
        model = models.create(network).to(device).eval()
        images = torch.randn(count, 3, size, size, device=device)
        forward_s = forward_seconds(model, images)
        config = Config.preset("quick").override({"options.step": STEP, "options.images": count})
        net = ConditionedNetwork(model, config).to(device)
        batches = [Batch((part,), {}, None) for part in images.split(PART)]
        net.data = DataProbe(lambda module: None, lambda: 0.0, lambda count: batches)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = _peak_bytes(device)
        started = _now(device)
        net.fix(1.0)
        seconds = _now(device) - started
    return {
        "case": f"conditioning {network}, {count:,} images of {size}×{size}",
        "network": network,
        "weights": net.layout.size,
        "images": count,
        "rival": "one forward pass over them",
        "ours_s": seconds,
        "rival_s": forward_s,
        "ratio": seconds / forward_s,
        "ours_bytes": _peak_bytes(device) - before,
        "image_bytes": images.numel() * images.element_size(),
        "activations_limit": MEMORY,
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _now(device: torch.device) -> float:
    """Seconds; on a CPU those of all threads of this process."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument(
        "--images", nargs="+", type=int, help="numbers of images, instead of those of the case"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="of the code, if it is not in a git checkout")
    parser.add_argument("--out", type=Path, help="a file to append the lines to")
    options = parser.parse_args()
    device = torch.device(options.device)
    shared = here(device, options.commit)
    for name in options.cases:
        network, size, counts = CASES[name]
        for count in options.images or counts:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                facts = process.apply(measure, (network, size, count, device))
            show({**facts, **shared}, options.out)


if __name__ == "__main__":
    main()
