"""How long the paper's ImageNet networks take: one training step, and from that a whole run.

    python benchmarks/imagenet_steps.py [--networks NAME …] [--batch-size N] [--steps N] [--out FILE]

Prints one JSON line per network of experiments/imagenet, with the settings of that file's row "recommended":
on CUDA in bfloat16, channels-last and as a CUDA graph; on a CPU in float32. A step is that of a run: forward,
backward, clipping and SGD with momentum, with half of the weights fixed. Its batch is random images that are
on the device already: no data is read. The rival is plain fine-tuning by SGD, in the same number type and
memory format, as a CUDA graph too. ``ratio`` is our time divided by the rival's, each the median over blocks
of steps that alternate in the same process. ``ours_bytes`` and ``rival_bytes`` are the most that torch
reserved on the device for each, network and batch included (0 on a CPU); ours includes the original network,
which a run keeps.

``hours`` is a whole run of that row on 1,281,167 images, from these measurements: its epochs of training and
of polish, whose steps count as training steps; the re-estimation of BatchNorm statistics; a scoring of
50,000 images after every round, and those in float32: before and after the run, of its file, and of the
samples of the ensemble. It does not include reading the images: ``worker_images_a_second`` is how many images
one process reads, crops and flips, for synthetic JPEG files of ImageNet's usual size (500×375 pixels, about
110 kB).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import here, show, wait
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config
from pwfn.bayes.batches import Batch
from pwfn.bayes.batchnorm import reestimate_batchnorm
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.execution import RecordedStep
from pwfn.bayes.method import MOMENTUM, phases
from pwfn.bayes.objective import autocast
from pwfn.bayes.optimizer import optimizer_for
from pwfn.bayes.randomness import seeded
from pwfn.bayes.train import fit
from pwfn.compress import Run
from pwfn.config import Precision
from pwfn.lab import compare
from pwfn.zoo import models
from pwfn.zoo.data import DataOptions, open_source

ROOT = Path(__file__).resolve().parent.parent
PLANS = {path.stem: path for path in sorted((ROOT / "experiments" / "imagenet").glob("*.toml"))}
TRAIN_IMAGES, TEST_IMAGES = 1_281_167, 50_000
SHAPE, CLASSES = (3, 224, 224), 1000
BLOCKS = 3
WARMUP_STEPS = 5  # three before a graph is captured, one that captures it, and one that replays it
SCORED_BATCHES = 4
FILES = 64  # read to measure the speed of a worker


class Case:
    """A network of the paper with its settings, for a device."""

    def __init__(self, name: str, device: torch.device, batch_size: int | None) -> None:
        plan = compare.load(PLANS[name])
        self.row = next(
            run for run in plan.runs() if (run.row.method, run.row.preset) == ("pwfn", "recommended")
        )
        self.network, self.device = self.row.network.name, device
        self.batch_size = batch_size or plan.batch_size
        self.config: Config = self.row.config
        if device.type != "cuda":  # bfloat16 is slow on most CPUs, and there are no graphs
            self.config = self.config.override({"training.precision": "fp32", "training.cuda_graph": False})
        self.channels_last = self.config.training.precision is not Precision.FP32  # as in a run

    def model(self) -> nn.Module:
        """The network on the device, not trained: times do not depend on the weights."""
        return models.create(self.network).to(self.device)

    def images(self) -> tuple[Tensor, Tensor]:
        """A batch of random images with labels, on the device."""
        images = torch.randn(self.batch_size, *SHAPE, device=self.device)
        if self.channels_last:
            images = images.to(memory_format=torch.channels_last)
        return images, torch.randint(0, CLASSES, (self.batch_size,), device=self.device)


class Ours:
    """A run of the method, in the middle of its rounds."""

    def __init__(self, case: Case) -> None:
        images, config = case.images(), case.config
        scored = [images] * SCORED_BATCHES
        self.run = Run(
            case.model(), [images], scored, config, Distributed(case.device), F.cross_entropy, None, False
        )
        self.run.start_network(self.run.net)
        self.net = self.run.net.train()
        self.net.fix(0.5)
        self._optimizer = optimizer_for(self.net, config.training, 0)
        self._batches = self.run.train.endless()

    def step_seconds(self, count: int) -> float:
        """Mean time of training steps, after those that capture a graph."""
        started = 0.0

        def after_step(step: int, snapshot: object) -> None:
            nonlocal started
            if step == WARMUP_STEPS:
                wait(self.net.device)
                started = time.perf_counter()

        fit(
            self.net,
            self._batches,
            WARMUP_STEPS + count,
            self.run.objective,
            self.net.settings.training,
            optimizer=self._optimizer,
            where="benchmark",
            seed=0,
            after_step=after_step,
        )
        wait(self.net.device)
        return (time.perf_counter() - started) / count

    def scoring_seconds(self, precision: Precision) -> float:
        """Time of one batch without gradients, in a number type."""
        model = self.run.original if precision is Precision.FP32 else self.net
        return _seconds(self.net.device, lambda: self.run.scores(model, precision)) / SCORED_BATCHES

    def reestimation_seconds(self) -> float:
        """Time of one batch for BatchNorm statistics; 0 if there are none."""

        def gather() -> int:
            return reestimate_batchnorm(self.net, self.run.train.endless(), SCORED_BATCHES, "benchmark")

        if gather() == 0:
            return 0.0
        return _seconds(self.net.device, gather) / SCORED_BATCHES


class Plain:
    """Plain fine-tuning by SGD with momentum, as fast as we can make it."""

    def __init__(self, case: Case) -> None:
        training, device = case.config.training, case.device
        images, labels = case.images()
        self._batch = Batch((images,), {}, labels)
        model: Any = case.model().train()
        if case.channels_last:
            model = model.to(memory_format=torch.channels_last)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(
            parameters,
            lr=training.learning_rate,
            momentum=MOMENTUM,
            weight_decay=training.weight_decay,
            fused=device.type == "cuda",
        )

        def work(batch: Batch, where: str) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with autocast(device, training.precision):
                loss = F.cross_entropy(model(*batch.args), batch.target)
            loss.backward()
            if training.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, training.clip_norm)
            optimizer.step()
            return loss.detach()

        recorded = RecordedStep(work, lambda: optimizer.zero_grad(set_to_none=True))
        step = recorded if training.cuda_graph else work
        self._step = lambda: step(self._batch, "benchmark")

    def step_seconds(self, count: int) -> float:
        """Mean time of training steps, after those that capture a graph; the loss is read once."""
        for _ in range(WARMUP_STEPS):
            self._step()
        total = torch.zeros((), device=self._batch.target.device)
        wait(total.device)
        started = time.perf_counter()
        for _ in range(count):
            total += self._step()
        assert math.isfinite(float(total))
        return (time.perf_counter() - started) / count


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Time of the second call: the first initialises."""
    work()
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def reserved_bytes(device: torch.device, make: Callable[[], Ours | Plain]) -> tuple[Any, int]:
    """Ours or the rival, and the most memory that its first steps made torch reserve on the device.

    Reserved, not allocated: the memory of a CUDA graph does not count as allocated.
    """
    if device.type != "cuda":
        return make(), 0
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = make()
    made.step_seconds(1)
    return made, torch.cuda.max_memory_reserved(device) - before


def medians(both: list[Ours | Plain], length: int) -> list[float]:
    """Seconds per step of each, in alternating blocks."""
    blocks = [[each.step_seconds(length) for each in both] for _ in range(BLOCKS)]
    return [statistics.median(times) for times in zip(*blocks, strict=True)]


def counts(case: Case) -> dict[str, float]:
    """Numbers of a whole run: epochs with gradients and, for BatchNorm statistics, without; scorings."""
    finish, plan = case.config.finish, phases(case.config)
    return {
        "training": sum(phase.epochs for phase in plan),
        "polish": finish.polish_epochs,
        "reestimation": (1 + (finish.polish_epochs > 0)) * (finish.reestimate_epochs or 0.0),
        "scorings": len(plan),
        "fp32_scorings": 3 + case.row.plan.samples,  # before, after, the file, and its samples
    }


def hours(
    case: Case, step_s: float, reestimation_s: float, scoring_s: float, fp32_scoring_s: float
) -> dict[str, float]:
    """Hours of a whole run, part by part, from the seconds per batch."""
    count = counts(case)
    train, test = TRAIN_IMAGES / case.batch_size / 3600, TEST_IMAGES / case.batch_size / 3600
    parts = {
        "training": count["training"] * train * step_s,
        "polish": count["polish"] * train * step_s,
        "reestimation": count["reestimation"] * train * reestimation_s,
        "scoring": test * (count["scorings"] * scoring_s + count["fp32_scorings"] * fp32_scoring_s),
    }
    return {**parts, "all": sum(parts.values())}


def worker_images_a_second() -> float:
    """Images per second that one process reads and prepares for training."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, seeded(0, torch.device("cpu")):
        for number in range(FILES):
            coarse = torch.rand(1, 3, 47, 63)
            fine = F.interpolate(coarse, (375, 500), mode="bicubic") + 0.08 * torch.randn(1, 3, 375, 500)
            pixels = fine[0].clamp(0, 1).mul(255).byte().permute(1, 2, 0).numpy()
            for split in ("train", "val"):
                path = Path(folder, split, "class", f"{number}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path, quality=88)
        source = open_source(f"imagefolder:{folder}", DataOptions(batch_size=16, image_size=224, workers=0))

        def read() -> None:
            for _ in source.train:
                pass

        return FILES / _seconds(torch.device("cpu"), read)


def measure(
    name: str, device: torch.device, batch_size: int | None, steps: int, shared: dict[str, Any]
) -> dict[str, Any]:
    """The measurements of a network."""
    case = Case(name, device, batch_size)
    training = case.config.training
    with seeded(0, device):  # as a run: with deterministic cuDNN
        mine, our_bytes = reserved_bytes(device, lambda: Ours(case))
        rival, rival_bytes = reserved_bytes(device, lambda: Plain(case))
        our_s, rival_s = medians([mine, rival], steps)
        fp32_scoring_s = mine.scoring_seconds(Precision.FP32)
        is_fp32 = training.precision is Precision.FP32
        scoring_s = fp32_scoring_s if is_fp32 else mine.scoring_seconds(training.precision)
        reestimation_s = mine.reestimation_seconds()
    facts = {
        "case": f"imagenet step {case.network}",
        "name": name,
        "network": case.network,
        "paper": case.row.network.paper,
        "batch_size": case.batch_size,
        "precision": str(training.precision),
        "channels_last": case.channels_last,
        "cuda_graph": training.cuda_graph,
        "steps": BLOCKS * steps,
        "ratio": our_s / rival_s,
        "ours_s": our_s,
        "rival_s": rival_s,
        "rival": "plain fine-tuning" + (", CUDA graph" if training.cuda_graph else ""),
        "ours_images_a_second": case.batch_size / our_s,
        "rival_images_a_second": case.batch_size / rival_s,
        "ours_bytes": our_bytes,
        "rival_bytes": rival_bytes,
        "scoring_s": scoring_s,
        "fp32_scoring_s": fp32_scoring_s,
        "reestimation_s": reestimation_s,
        "counts": counts(case),
        "hours": hours(case, our_s, reestimation_s, scoring_s, fp32_scoring_s),
        **shared,
    }
    del mine, rival
    return facts


def main() -> None:
    """Measure the networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=PLANS, default=list(PLANS), help="default: all")
    parser.add_argument("--batch-size", type=int, help="default: as in experiments/imagenet")
    parser.add_argument("--steps", type=int, default=10, help=f"in each of {BLOCKS} blocks")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="of the code, if it is not in a git checkout")
    parser.add_argument("--out", type=Path, help="a file to append the lines to")
    options = parser.parse_args()
    device = torch.device(options.device)
    shared = {"worker_images_a_second": worker_images_a_second(), "processors": os.cpu_count()}
    shared |= here(device, options.commit)
    for name in options.networks:
        show(measure(name, device, options.batch_size, options.steps, shared), options.out)


if __name__ == "__main__":
    main()
