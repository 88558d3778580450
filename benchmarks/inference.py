"""How fast and how large: running from indices, against dense weights.

    python benchmarks/inference.py [--quick] [--device cpu|cuda] [--tune bytes|packed|convolutions]

One JSON line a case, every time a median. ``ratio`` is our time over the rival's in the same run, below 1
where we are faster; ``speedup`` is its inverse.

Linear layers of 4096 × 4096, 14336 × 4096 and 4096 × 14336 (outputs × inputs), with 1, 4, 16 and 32 inputs
at once, against ``F.linear`` with bf16 weights. On a GPU there are as many copies of a layer as exceed four
times its L2 cache, and one after the other is called, so that every weight comes from memory. ``ours_s`` and
``rival_s`` are the time of a call when all of them, in turn until there are 60, are captured in one CUDA
graph: launches cost both the same there, and the start of the graph next to nothing. ``ours_eager_s`` and
``rival_eager_s`` are that of calls from Python, one after the other. ``variants_s`` has every kernel that
fits (see ``pwfn.runtime.triton``); ``ours_s`` is the one that is chosen.
Indices are drawn evenly from 256 values, one byte each, or from 16 values, two in a byte; in one case,
``peaked``, half of all weights are at one value, as from training. ``floor_s`` is the time to read the
indices at the rate of a large copy.
``ours_bytes`` and ``rival_bytes`` are the weights'. ``difference`` is between both results, relative to their
norm.

A whole network, ResNet-18 for CIFAR-10 fixed in one round without training, bf16 and channels-last, with
images one and 128 at a time, and both networks captured as one CUDA graph each: ``ours_bytes`` and
``rival_bytes`` are the most memory held during a call, with the weights. Convolutions compute from indices
where there are few places, and make their weights dense one at a time elsewhere.

``--tune`` prints the time of every program shape instead: of linear layers with one index (``bytes``) or two
(``packed``) in a byte, or of the convolutions of ResNet-18 with one image. ``--quick`` takes small layers, a
small network and few repeats; on a CPU the reference looks a weight up before it multiplies, which is for
memory, not for speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from machine import device_name, versions
from torch import Tensor, nn

from pwfn import Config, GaussianNetwork
from pwfn.runtime import IndexedWeight, indexed_conv2d, indexed_linear, pack
from pwfn.zoo.models import create

LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336))
INPUTS = (1, 4, 16, 32)
VALUES = (256, 16)
MMA_SHAPES = (
    *((1, 16, 16, 1), (1, 8, 8, 1), (1, 8, 8, 2), (1, 16, 8, 1), (1, 16, 4, 1), (1, 8, 4, 1), (1, 8, 2, 1)),
    *((1, 4, 4, 2), (2, 4, 4, 1), (2, 4, 2, 1), (2, 2, 2, 2)),
)
# Tiles, warps, split, steps, depth, x ahead; each with and without an early start.
PACKED_SHAPES = (
    *(
        (1, 16, 16, 1, 1, 0),
        (1, 16, 16, 1, 2, 0),
        (1, 16, 16, 1, 1, 1),
        (1, 16, 8, 1, 2, 0),
        (1, 32, 32, 1, 1, 0),
    ),
    *((1, 8, 8, 1, 1, 0), (1, 8, 8, 1, 2, 0), (1, 8, 8, 1, 3, 0), (1, 8, 8, 1, 4, 0), (1, 8, 8, 1, 2, 1)),
    *((1, 8, 8, 2, 1, 0), (1, 8, 8, 2, 2, 0), (2, 8, 8, 1, 1, 0), (2, 8, 8, 1, 2, 0), (2, 16, 16, 1, 1, 0)),
    *((1, 8, 4, 1, 2, 0), (1, 4, 4, 1, 2, 0), (1, 4, 4, 1, 4, 0), (1, 4, 4, 2, 2, 0), (2, 4, 4, 1, 2, 0)),
    *((1, 8, 8, 1), (2, 4, 4, 1), (1, 4, 4, 2), (2, 2, 2, 2)),
)
# Tiles, warps, split, steps, depth, x ahead, early, groups.
CONV_SHAPES = (
    *(
        (1, 16, 16, 1, 1, 1, 0, 1),
        (1, 16, 16, 1, 2, 0, 0, 1),
        (1, 8, 8, 1, 1, 1, 0, 1),
        (1, 8, 8, 1, 2, 0, 0, 1),
    ),
    *((1, 8, 4, 1, 1, 1, 0, 1), (1, 8, 8, 1, 1, 0, 0, 2), (1, 8, 8, 1, 2, 0, 0, 2), (1, 8, 4, 1, 1, 0, 0, 2)),
    *((2, 8, 8, 1, 1, 0, 0, 2), (1, 4, 4, 1, 1, 0, 0, 2), (1, 4, 4, 1, 1, 0, 0, 4), (1, 4, 4, 1, 2, 0, 0, 4)),
    *((1, 4, 2, 1, 1, 0, 0, 4), (2, 4, 4, 1, 1, 0, 0, 4), (2, 4, 2, 1, 1, 0, 0, 4), (1, 4, 4, 1, 1, 1, 0, 1)),
)
# Channels, outputs, kernel, stride and size of the image: those of ResNet-18 for CIFAR-10.
CONVOLUTIONS = (
    *(
        (64, 64, 3, 1, 32),
        (64, 128, 3, 2, 32),
        (64, 128, 1, 2, 32),
        (128, 128, 3, 1, 16),
        (128, 256, 3, 2, 16),
    ),
    *((256, 256, 3, 1, 8), (256, 512, 3, 2, 8), (512, 512, 3, 1, 4)),
)
GEMV_SHAPES = ((8, 8, 2), (2, 8, 8), (2, 16, 4), (4, 16, 2), (4, 4, 4))
CAPTURED = 60
"""Calls in a graph: replaying one takes some ten microseconds to begin, which is no layer's time."""

Call = Callable[[], Any]


class Layers:
    """Copies of one layer, as indices and as dense weights."""

    def __init__(
        self,
        rows: int,
        columns: int,
        inputs: int,
        copies: int,
        device: torch.device,
        values: int = VALUES[0],
        peaked: bool = False,
    ) -> None:
        dtype = torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        shape = copies, rows, columns
        indices = torch.randint(0, values, shape, generator=generator, device=device, dtype=torch.uint8)
        if peaked:
            indices[torch.rand(shape, generator=generator, device=device) < 0.5] = values // 2
        self.indices = [pack(index) if values <= 16 else index for index in indices]
        palette = torch.randn(values, generator=generator, device=device).sort().values
        self.palette = (palette / columns**0.5).to(dtype)
        self.dense = [self.palette[index.int()] for index in indices]
        self.x = torch.randn(inputs, columns, generator=generator, device=device).to(dtype)

    def ours(self, **settings: Any) -> list[Call]:
        """A call for each copy, by the operation, or by a kernel of a given variant or shape."""
        if not settings:
            return [partial(indexed_linear, self.x, index, self.palette) for index in self.indices]
        from pwfn.runtime import triton as kernels

        rows = self.palette[None]
        call = kernels.indexed_linear
        return [partial(call, self.x, index, rows, None, **settings) for index in self.indices]

    def theirs(self) -> list[Call]:
        """A call of ``F.linear`` for each copy."""
        return [partial(F.linear, self.x, weight) for weight in self.dense]

    def difference(self) -> float:
        """Between the results, relative to their norm."""
        ours, theirs = self.ours()[0]().double(), self.theirs()[0]().double()
        return float((ours - theirs).norm() / theirs.norm())


def run_all(calls: Sequence[Call]) -> None:
    """One after the other."""
    for call in calls:
        call()


def captured(calls: Sequence[Call]) -> Call:
    """All calls as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run_all(calls)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(calls)
    return graph.replay


def elapsed_s(action: Call, device: torch.device) -> float:
    """Seconds of one run, by the device's clock where it has one."""
    if device.type == "cpu":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    action()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1000


def medians_s(actions: dict[str, Call], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 2):  # the first two warm up
        for name, action in actions.items():
            seconds = elapsed_s(action, device)
            if turn > 1:
                times[name].append(seconds)
    return {name: statistics.median(taken) for name, taken in times.items()}


class Bench:
    """The cases on one device."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.repeats = 5 if quick else 30
        self.rate = self.copy_rate() if device.type == "cuda" else None

    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a large copy."""
        source = torch.empty(2**30, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        taken = medians_s({"copy": lambda: target.copy_(source)}, self.device, 10)["copy"]
        return 2 * source.nbytes / taken

    def copies(self, rows: int, columns: int, values: int) -> int:
        """How many layers exceed four times the cache, as indices."""
        if self.device.type == "cpu":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(2, -(-4 * cache // (rows * columns // (2 if values <= 16 else 1))))

    def times(self, lists: dict[str, list[Call]]) -> dict[str, float]:
        """Seconds of one call of each list: all captured on a GPU, called on a CPU."""
        on_gpu = self.device.type == "cuda"
        count = len(next(iter(lists.values())))
        if on_gpu and count > 1:  # a network is one call, and has its own many launches
            times = -(-CAPTURED // count)
            lists, count = {k: calls * times for k, calls in lists.items()}, count * times
        actions = {k: captured(calls) if on_gpu else partial(run_all, calls) for k, calls in lists.items()}
        return {k: s / count for k, s in medians_s(actions, self.device, self.repeats).items()}

    def linear(self, rows: int, columns: int, inputs: int, values: int, peaked: bool = False) -> None:
        """One layer from indices against the dense one."""
        copies = self.copies(rows, columns, values)
        layers = Layers(rows, columns, inputs, copies, self.device, values, peaked)
        lists = {"ours": layers.ours(), "rival": layers.theirs()}
        lists |= {name: layers.ours(variant=name) for name in self.variants(inputs, values)}
        taken = self.times(lists)
        more: dict[str, Any] = {}
        if self.device.type == "cuda":
            eager: dict[str, Call] = {k: partial(run_all, lists[k]) for k in ("ours", "rival")}
            found = medians_s(eager, self.device, self.repeats)
            more = {f"{k}_eager_s": round(s / len(lists[k]), 9) for k, s in found.items()}
            more["variants_s"] = {k: round(s, 9) for k, s in taken.items() if k not in ("ours", "rival")}
        if self.rate is not None:
            more["floor_s"] = round(layers.indices[0].nbytes / self.rate, 9)
        index = layers.indices[0]
        few = ", 16 values" if values == 16 else ""
        self.line(
            f"linear {rows} × {columns}, {inputs} inputs{few}{', peaked' if peaked else ''}",
            (taken["ours"], taken["rival"]),
            "F.linear, bf16 weights",
            (index.nbytes + layers.palette.nbytes, layers.dense[0].nbytes),
            difference=round(layers.difference(), 6),
            **more,
        )

    def variants(self, inputs: int, values: int) -> list[str]:
        """The kernels that can take so many inputs."""
        if self.device.type == "cpu":
            return []
        few = [*(["gemv-table"] if values > 16 else []), "gemv-load"] if inputs <= 8 else []
        return ["mma", *few, "dot-load", "dense"]

    def tune(self, rows: int, columns: int, inputs: int, values: int) -> None:
        """Every shape of program for a linear layer, fastest first."""
        from pwfn.runtime import triton as kernels

        layers = Layers(rows, columns, inputs, self.copies(rows, columns, values), self.device, values)
        lists = {"F.linear": layers.theirs()}
        shapes: list[tuple[int, ...]] = list(MMA_SHAPES)
        if values <= 16:
            shapes = [(*kernels.Mma(*shape)[:6], early) for shape in PACKED_SHAPES for early in (0, 1)]
        settings = [("mma", shape) for shape in shapes if kernels.Mma(*shape).fits(inputs)]
        if inputs <= 4 and values > 16:
            settings += [("gemv-table", shape) for shape in GEMV_SHAPES]
        for variant, shape in settings:
            lists[f"{variant} {shape}"] = layers.ours(variant=variant, shape=shape)
        self.table(f"linear {rows} × {columns}, {inputs} inputs, {values} values", "F.linear", lists)

    def tune_conv2d(self, case: tuple[int, ...]) -> None:
        """Every shape of program for a convolution of one image; weights come from the cache."""
        from pwfn.runtime import triton as kernels

        channels, rows, size, stride, width = case
        last, dtype = torch.channels_last, torch.bfloat16
        kernel = rows, channels, size, size
        indices = torch.randint(0, VALUES[0], kernel, device=self.device).to(torch.uint8)
        indices = indices.contiguous(memory_format=last)
        palette = torch.randn(VALUES[0], device=self.device).to(dtype)
        dense = palette[indices.int()].contiguous(memory_format=last)
        x = torch.randn(1, channels, width, width, device=self.device).to(dtype, memory_format=last)
        geometry = (stride, stride), (size // 2, size // 2), (1, 1), 1
        given = x, indices, palette[None], None, *geometry
        calls: dict[str, Call] = {
            "F.conv2d": partial(F.conv2d, x, dense, None, *geometry),
            "chosen": partial(indexed_conv2d, *given),
        }
        for shape in CONV_SHAPES:
            calls[str(shape)] = partial(kernels.indexed_conv2d, *given, shape=shape)
        lists = {name: [call] * 10 for name, call in calls.items()}
        self.table(f"convolution {channels} to {rows}, {size} × {size}, {width} × {width}", "F.conv2d", lists)

    def table(self, case: str, rival: str, lists: dict[str, list[Call]]) -> None:
        """Print the times of all, fastest first; what does not run is named."""
        for name in list(lists):
            try:
                lists[name][0]()
            except Exception as error:  # a shape that the compiler or the device refuses
                print(f"tune, {case}: {name} does not run: {error}", flush=True)
                del lists[name]
        taken = dict(sorted(self.times(lists).items(), key=lambda item: item[1]))
        print(f"tune, {case}: {rival} takes {taken[rival] * 1e6:.2f} µs")
        for name, seconds in taken.items():
            print(
                f"  {seconds * 1e6:8.2f} µs  {taken[rival] / seconds:6.3f} times as fast  {name}", flush=True
            )

    def network(self, inputs: int) -> None:
        """A whole network from indices against the dense one."""
        name, dtype = "cifar_resnet20" if self.quick else "cifar_resnet18", torch.float32
        if self.device.type == "cuda":
            dtype = torch.bfloat16
        torch.manual_seed(0)
        # The paper's sigma, for as many values as a network trained that way has.
        config = Config().override({"posterior.init": "powers", "fixing.grid_exponent": 7})
        network = GaussianNetwork(create(name).to(self.device), config)
        network.fix(1.0)
        compressed = network.finish()
        form: dict[str, Any] = {"dtype": dtype, "memory_format": torch.channels_last}
        x = torch.randn(inputs, 3, 32, 32, device=self.device).to(**form)
        models: dict[str, nn.Module] = {}
        peaks = []
        for kind, weights in (("ours", "indices"), ("rival", "dense")):
            model = compressed.apply_to(create(name).to(self.device), weights=weights)
            models[kind] = model.eval().to(**form)
        with torch.inference_mode():
            for model in models.values():
                peaks.append(self.peak_bytes(model, x))
            difference = (models["ours"](x) - models["rival"](x)).norm() / models["rival"](x).norm()
            taken = self.times({kind: [partial(model, x)] for kind, model in models.items()})
        self.line(
            f"network {name}, {inputs} images",
            (taken["ours"], taken["rival"]),
            "the same network, dense",
            (peaks[0], peaks[1]),
            values=compressed.codebook.numel(),
            resident_bytes=resident_bytes(models["ours"]),
            dense_resident_bytes=resident_bytes(models["rival"]),
            difference=round(float(difference), 6),
        )

    def peak_bytes(self, model: nn.Module, x: Tensor) -> int:
        """The most memory that model and call take; on a CPU the weights' part of it."""
        if self.device.type == "cpu":
            indexed = [module for module in model.modules() if isinstance(module, IndexedWeight)]
            dense = (module.shape.numel() * module.palettes.element_size() for module in indexed)
            return resident_bytes(model) + max(dense, default=0)  # one layer is dense at a time
        model.cpu()  # away with its own bytes, which are to count
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model.to(self.device)
        model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def line(
        self, case: str, seconds: tuple[float, float], rival: str, size: tuple[int, int], **more: Any
    ) -> None:
        """Print one case."""
        ours, theirs = seconds
        facts = {
            "case": f"inference, {case}",
            "ratio": round(ours / theirs, 4),
            "speedup": round(theirs / ours, 3),
            "ours_s": round(ours, 9),
            "rival_s": round(theirs, 9),
            "rival": rival,
            "ours_bytes": size[0],
            "rival_bytes": size[1],
            **more,
            "device": device_name(self.device),
            "versions": versions(),
        }
        print(json.dumps(facts, ensure_ascii=False), flush=True)


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of a model, each counted once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def main() -> int:
    """Run all cases of a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small layers and network, few repeats")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU, where there is one, unless told")
    parser.add_argument(
        "--tune", choices=("bytes", "packed", "convolutions"), help="time shapes of programs instead (GPU)"
    )
    arguments = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(arguments.device or found)
    if arguments.tune and device.type == "cpu":
        parser.error("--tune needs a GPU")
    bench = Bench(device, arguments.quick)
    small = arguments.quick or device.type == "cpu"
    layers = ((512, 512), (1024, 512)) if small else LAYERS
    if arguments.tune == "convolutions":
        for case in CONVOLUTIONS:
            bench.tune_conv2d(case)
    elif arguments.tune:
        for rows, columns in reversed(layers):
            for inputs in INPUTS:
                bench.tune(rows, columns, inputs, VALUES[0] if arguments.tune == "bytes" else VALUES[1])
    else:
        for values in VALUES:
            for rows, columns in layers:
                for inputs in INPUTS[:2] if small else INPUTS:
                    bench.linear(rows, columns, inputs, values)
        bench.linear(*layers[0], inputs=1, values=VALUES[0], peaked=True)
        for images in (1, 4) if small else (1, 128):
            bench.network(images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
