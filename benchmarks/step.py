"""The cost of a training step with Gaussian weights, against plain fine-tuning and other Bayesian layers.

    python benchmarks/step.py [--quick] [--cases NAME …] [--recorded] [--rate] [--profile]

Prints one JSON line per case. A step is forward, backward, clipping to norm 1 and SGD with momentum, on
one batch that is on the device already; on CUDA in bfloat16 autocast and channels-last, on a CPU in float32.
Ours is the loop of a run (``pwfn.bayes.train.fit``) with half of the weights fixed. ``ratio`` is our time
divided by the rival's, each a median over blocks of steps that alternate in the same process;
``ours_bytes`` and ``rival_bytes`` are the peak of the device's memory over a few steps, each measured
without the other (0 on a CPU).

On CUDA there are also cases whose whole step is recorded as a CUDA graph (``training.cuda_graph``), against
plain fine-tuning as usual and with its whole step recorded, and the first round of ``recommended``, for its
memory.

--rate compares a step of the method ``rate``, recorded on CUDA, with the same step without the code length.

Rivals: plain fine-tuning; ours with torch's optimiser instead of fused passes;
``torch.nn.utils.parametrize`` with ``mu + sigma * randn`` on every weight; the reparameterised layers of
bayesian-torch, if it is installed.

--profile prints what a step does on the host and the device instead, by torch's profiler, with and
without fused passes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from machine import wait
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from pwfn import Config, GaussianNetwork
from pwfn.bayes.batches import Batch
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.grid.rate import RateNetwork
from pwfn.bayes.method import MOMENTUM, Method, torch_optimizer
from pwfn.bayes.objective import Objective, autocast
from pwfn.bayes.optimizer import optimizer_for
from pwfn.bayes.train import fit
from pwfn.zoo import models

LR, DECAY, CLIP = 1e-3, 1e-4, 1.0
CASES = {  # network, image side, classes, batch
    "cifar_resnet20": (32, 10, 128),
    "cifar_resnet18": (32, 10, 128),
    "resnet50": (224, 1000, 128),
    "deit_small_patch16_224": (224, 1000, 128),
}
RECORDING = 8  # steps at the start of a phase, in which its graph is recorded
Steps = Callable[[int], float]
"""Takes a number of steps; the seconds that one took, without those that record a graph."""


class Setting:
    """A network and a batch on a device."""

    def __init__(self, name: str, device: torch.device, batch: int | None = None) -> None:
        side, classes, size = CASES[name]
        torch.manual_seed(0)
        self.device = device
        # As in the paper, sigma is trained and fixed weights are drawn too: the most that a step has to do.
        self.config = Config.preset("paper").override(
            {
                "training.precision": "bf16" if device.type == "cuda" else "fp32",
                "training.learning_rate": LR,
                "training.weight_decay": DECAY,
                "training.clip_norm": CLIP,
            }
        )
        self.model = models.create(name).to(device)
        size = batch or size
        images = torch.randn(size, 3, side, side, device=device).to(memory_format=torch.channels_last)
        self.batch = Batch((images,), {}, torch.randint(0, classes, (size,), device=device))

    def loss(self, model: nn.Module) -> Tensor:
        """Cross entropy of the batch, in the case's precision."""
        with autocast(self.device, self.config.training.precision):
            return F.cross_entropy(model(*self.batch.args), self.batch.target)


def _batches(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def timed(device: torch.device, work: Callable[[], None], count: int) -> float:
    """Seconds per step of work that takes so many."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return (time.perf_counter() - started) / count


def ours(setting: Setting, *, fused: bool = True, graph: bool = False, first: bool = False) -> Steps:
    """The loop of a run, with half of the weights fixed; ``first``: the first round of ``recommended``."""
    config = setting.config
    if first:
        config = Config().override({"training.precision": config.training.precision})
    net = GaussianNetwork(setting.model, config).train()
    if not first:
        net.fix(0.5)
    config = config.override({"training.cuda_graph": graph})
    make = partial(optimizer_for, seed=0) if fused else torch_optimizer
    return _fitting(setting, net, config, make(net, config.training))


def _fitting(setting: Setting, net: Method, config: Config, optimizer: torch.optim.Optimizer) -> Steps:
    """The loop of a run."""
    objective, batches = Objective(F.cross_entropy), _batches(setting.batch)
    skipped = RECORDING if config.training.cuda_graph else 0

    def steps(count: int) -> float:
        started = time.perf_counter()

        def after(step: int, snapshot: object) -> None:
            nonlocal started
            if step == skipped:
                wait(setting.device)
                started = time.perf_counter()

        wait(setting.device)
        how = {"optimizer": optimizer, "where": "benchmark", "seed": 0, "after_step": after}
        fit(net, batches, count + skipped, objective, config.training, **how)  # type: ignore[arg-type]  # each has its own type
        wait(setting.device)
        return (time.perf_counter() - started) / count

    return steps


class Rate(RateNetwork):
    """As in a run of 20 epochs of CIFAR-10, where tables are fitted every 100 steps."""

    taken = 0

    def before_step(self, step: int, steps: int, distributed: Distributed) -> None:
        """The number of the step in that run."""
        self.taken += 1
        super().before_step(self.taken, 20 * 391, distributed)


class Unpriced(Rate):
    """Without the code length: no term in the loss, no tables to fit."""

    def before_step(self, step: int, steps: int, distributed: Distributed) -> None:
        """Nothing."""

    def penalty(self) -> None:  # type: ignore[override]  # a method may have none
        """None."""


def rate(setting: Setting, kind: type[RateNetwork] = Rate) -> Steps:
    """Training for the bytes, by labels: a teacher's pass would be in both."""
    precision, cuda = setting.config.training.precision, setting.device.type == "cuda"
    config = Config.preset("small").override(
        {"training.precision": precision, "training.cuda_graph": cuda, "target.bits": 1.0}
    )
    net = kind(setting.model, config).to(setting.device).train()
    return _fitting(setting, net, config, optimizer_for(net, config.training, seed=0))


def _loop(setting: Setting, model: nn.Module, extra: Callable[[], Tensor | float] = lambda: 0.0) -> Steps:
    """A plain training loop; the loss is read once per block, as in ours."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = setting.device.type == "cuda"
    optimizer = torch.optim.SGD(parameters, LR, momentum=MOMENTUM, weight_decay=DECAY, fused=fused)

    def take(count: int) -> None:
        total = torch.zeros((), device=setting.device)
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = setting.loss(model)
            (loss + extra()).backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            total += loss.detach()
        assert math.isfinite(float(total))

    return lambda count: timed(setting.device, lambda: take(count), count)


def plain(setting: Setting) -> Steps:
    """Plain fine-tuning."""
    return _loop(setting, copy.deepcopy(setting.model).to(memory_format=torch.channels_last))  # type: ignore[call-overload]  # as torch documents it


def plain_captured(setting: Setting) -> Steps:
    """Plain fine-tuning whose whole step is a CUDA graph."""
    model = copy.deepcopy(setting.model).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]  # as torch documents it
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True)

    def step() -> Tensor:
        loss = setting.loss(model)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def take(count: int, alive: object = step) -> None:  # keeps alive what the graph reads and writes
        total = torch.zeros((), device=setting.device)
        for _ in range(count):
            graph.replay()
            total += loss
        assert math.isfinite(float(total))

    return lambda count: timed(setting.device, lambda: take(count), count)


class Gaussian(nn.Module):
    """``mu + sigma * eps``, as a parametrization."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.sigma = nn.Parameter(torch.full_like(like, 1e-3))

    def forward(self, mu: Tensor) -> Tensor:
        """A draw."""
        return torch.addcmul(mu, self.sigma, torch.randn_like(mu))


def parametrized(setting: Setting) -> Steps:
    """The shortest code that makes every weight of every layer Gaussian."""
    model = copy.deepcopy(setting.model)
    for layer in list(model.modules()):
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            for name, parameter in list(layer.named_parameters(recurse=False)):
                parametrize.register_parametrization(layer, name, Gaussian(parameter.detach()))
    sigmas = [layer.sigma for layer in model.modules() if isinstance(layer, Gaussian)]

    def penalty() -> Tensor:
        return 2**-11 * torch.stack([torch.relu(0.05 - sigma).sum() for sigma in sigmas]).sum()

    return _loop(setting, model, penalty)


def bayesian_torch(setting: Setting) -> Steps:
    """The conversion of bayesian-torch, with its KL term."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss  # type: ignore[import-not-found,import-untyped,unused-ignore]  # not ours

    model = copy.deepcopy(setting.model)
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -6.0}
    dnn_to_bnn(model, {**prior, "type": "Reparameterization", "moped_enable": True, "moped_delta": 0.01})
    model.to(setting.device)
    count = len(setting.batch.target)
    return _loop(setting, model, lambda: get_kl_loss(model) / count / 1e3)


RIVALS: dict[str, Callable[[Setting], Steps]] = {
    "plain fine-tuning": plain,
    "pwfn without fused passes": lambda setting: ours(setting, fused=False),
    "torch parametrize": parametrized,
    "bayesian-torch": bayesian_torch,
}


RIVALS_OF_LARGE = ("plain fine-tuning", "pwfn without fused passes")  # at 224 pixels


def peak_bytes(setting: Setting, make: Callable[[Setting], Steps]) -> int:
    """Peak memory of the device over a few steps, with only the network and the batch beside it."""
    if setting.device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    steps = make(setting)
    steps(3)
    torch.cuda.reset_peak_memory_stats()
    steps(3)
    # The original network is not part of the training.
    own = sum(t.numel() * t.element_size() for t in setting.model.state_dict().values())
    return torch.cuda.max_memory_allocated() - own


def medians(runs: list[Steps], blocks: int, length: int) -> list[float]:
    """Seconds per step of each, in alternating blocks."""
    for steps in runs:
        steps(length)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(blocks):
        for steps, own in zip(runs, times, strict=True):
            own.append(steps(length))
    return [statistics.median(own) for own in times]


def measure(name: str, device: torch.device, *, quick: bool, recorded: bool, rated: bool) -> None:
    """Print a line for every rival; ``recorded``, ``rated``: of those cases alone."""
    cuda = device.type == "cuda"
    setting = Setting(name, device, 16 if quick and not cuda else None)
    blocks, length = (3, 2) if quick else (9, 10) if cuda else (11, 3)
    rivals = dict(RIVALS)
    if find_spec("bayesian_torch") is None:
        del rivals["bayesian-torch"]
    if CASES[name][0] > 100:
        rivals = {rival: RIVALS[rival] for rival in RIVALS_OF_LARGE}
    compared: list[tuple[str, Callable[[Setting], Steps], str, Callable[[Setting], Steps]]] = [
        ("", ours, rival, make) for rival, make in rivals.items()
    ]
    if rated:
        compared = [(", method rate", rate, "rate without the code length", partial(rate, kind=Unpriced))]
    elif cuda:
        captured = partial(ours, graph=True)
        compared = [] if recorded else compared
        compared.append(
            (", first round of recommended", partial(ours, first=True), "plain fine-tuning", plain)
        )
        compared.append((", CUDA graph", captured, "plain fine-tuning", plain))
        compared.append((", CUDA graph", captured, "plain fine-tuning, CUDA graph", plain_captured))
    for way, mine, rival, make in compared:
        graph = way.endswith("graph") or (cuda and rated)
        # The memory of a graph does not count as allocated.
        our_bytes, rival_bytes = (0, 0) if graph else (peak_bytes(setting, mine), peak_bytes(setting, make))
        how = (5, 100) if rated else (5, 40) if graph else (blocks, length)
        our_s, rival_s = medians([mine(setting), make(setting)], *how)
        facts = {
            "case": f"step {name}{way}",
            "ratio": our_s / rival_s,
            "ours_s": our_s,
            "rival_s": rival_s,
            "rival": rival,
            "ours_bytes": our_bytes,
            "rival_bytes": rival_bytes,
            "bytes_ratio": our_bytes / rival_bytes if rival_bytes else None,
            "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        print(json.dumps(facts), flush=True)


def profile(name: str, device: torch.device) -> None:
    """Kernels and waits of a step, without and with fused passes."""
    setting = Setting(name, device)
    for fused in (False, True):
        steps = ours(setting, fused=fused)
        steps(5)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            steps(10)  # fewer than the 32 after which the loss is read
            wait(device)
        events = profiler.events() or []
        waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense", "aten::item")
        facts = {
            "case": f"profile {name}",
            "fused": fused,
            "kernels_a_step": sum(e.device_type.name == "CUDA" for e in events) / 10,
            "launches_a_step": sum(e.name == "cudaLaunchKernel" for e in events) / 10,
            "waits_in_ten_steps": {w: sum(e.name == w for e in events) for w in waits},
        }
        print(json.dumps(facts), flush=True)
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=12, max_name_column_width=60))


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches and few blocks, for a CPU")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="networks")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recorded", action="store_true", help="only the cases with a CUDA graph")
    parser.add_argument("--rate", action="store_true", help="only the method rate, with its term and without")
    parser.add_argument("--profile", action="store_true", help="profile instead")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True  # for all rivals
    usual = ["cifar_resnet20"] if device.type == "cpu" else list(CASES)
    for name in options.cases or usual:
        if options.profile:
            profile(name, device)
        else:
            measure(name, device, quick=options.quick, recorded=options.recorded, rated=options.rate)


if __name__ == "__main__":
    main()
