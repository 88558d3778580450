"""Exported files against the fp32 ONNX and the torch model of the same network: latency, load, bytes.

    python benchmarks/export_onnx.py [--quick]
    python benchmarks/export_onnx.py --file FILE --model cifar_vgg16 --threads 1

One JSON line per case. ``ratio`` is ours over the rival's, in the same run, repetition by
repetition in turn; times are medians. (A file named ``onnx.py`` would hide the package.)

Networks have random weights, unless ``--file`` names a .pwfn file. Ours drops filters that are zero, and the
rival computes them. Ours is palette ONNX against the fp32 ONNX, and the torch program (pt2) against the model
itself in torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from pwfn import Compressed, Config, GaussianNetwork, load
from pwfn.export import OnnxExport, ProgramExport, to_onnx, to_pt2
from pwfn.zoo import models

NETWORKS = ("mobilenetv2_100", "resnet18", "deit_tiny_patch16_224")
RIVAL = "torch.onnx.export with its defaults, fp32"
TORCH_RIVAL = "the dense model in torch, eager, fp32"


@dataclass(frozen=True)
class Files:
    """The same network four times: ours and a rival, for onnxruntime and for torch."""

    ours: OnnxExport
    theirs: Path
    theirs_bytes: int  # graph and weights, which the exporter may put in a second file
    batch: Tensor
    threads: int
    program: ProgramExport
    module: nn.Module  # the dense model in torch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Exported files against dense ones.")
    parser.add_argument("--quick", action="store_true", help="one network only, few repetitions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--file", type=Path, help="a .pwfn file to export, with --model")
    parser.add_argument("--model", help="the name of its network")
    options = parser.parse_args()
    if (options.file is None) != (options.model is None):
        parser.error("--file and --model belong together")
    names = (options.model,) if options.file else NETWORKS[:1] if options.quick else NETWORKS
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            torch.set_num_threads(options.threads)
            model = models.create(name)
            compressed = load(options.file) if options.file else random_weights(model)
            files = exported(name, model, compressed, Path(folder), options.threads)
            case = options.file.name if options.file else name
            repetitions = 20 if options.quick else 150
            report(f"{case} latency", files, *latencies(files, repetitions))
            report(f"{case} session load", files, *loads(files, 3 if options.quick else 9))
            for size in (1, 32):
                times = torch_latencies(files, size, max(5, repetitions // size))
                report_program(f"{case} torch latency, batch of {size}", files, *times)


def random_weights(model: nn.Module) -> Compressed:
    """The network's own random weights, all fixed, after random BatchNorm."""
    randomise_norms(model)
    # The paper's sigma, for as many values as a network trained that way has.
    net = GaussianNetwork(model, Config().override({"posterior.init": "powers", "fixing.grid_exponent": 7}))
    net.fix(1.0)
    return net.finish()


def exported(name: str, model: nn.Module, compressed: Compressed, folder: Path, threads: int) -> Files:
    """Both files of a compressed network."""
    shape = models.input_shape(name, model)
    assert shape is not None
    ours = to_onnx(compressed, model, torch.zeros(2, *shape), folder / "ours.onnx")
    theirs = folder / "theirs" / "model.onnx"
    theirs.parent.mkdir()
    dense_onnx(compressed, model, torch.randn(2, *shape), theirs)
    size = sum(file.stat().st_size for file in theirs.parent.iterdir())
    program = to_pt2(compressed, model, torch.zeros(2, *shape), folder / "ours.pt2")
    module = compressed.apply_to(model).eval()
    return Files(ours, theirs, size, torch.randn(1, *shape), threads, program, module)


def randomise_norms(model: nn.Module) -> None:
    """Statistics and affine parameters as after some training, so that folding them matters."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)


def dense_onnx(compressed: Compressed, model: nn.Module, batch: Tensor, path: Path) -> None:
    """The rival: the exporter as it comes, with a dynamic batch."""
    module = compressed.apply_to(model).eval()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        torch.onnx.export(module, (batch,), path, dynamo=True, dynamic_shapes=shapes)


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Stock onnxruntime on the CPU, with a set number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def latencies(files: Files, repetitions: int) -> tuple[float, float]:
    """Median seconds of one image, ours and theirs."""
    runs = []
    for path in (files.ours.path, files.theirs):
        runner = session(path, files.threads)
        feed = {runner.get_inputs()[0].name: files.batch.numpy()}
        runs.append(lambda runner=runner, feed=feed: runner.run(None, feed))
    return medians(runs[0], runs[1], repetitions, warm_up=5)


def loads(files: Files, repetitions: int) -> tuple[float, float]:
    """Median seconds from the file to a session that is ready, ours and theirs."""
    ours, theirs = (
        functools.partial(session, path, files.threads) for path in (files.ours.path, files.theirs)
    )
    return medians(ours, theirs, repetitions, warm_up=1)


def medians(
    ours: Callable[[], Any], theirs: Callable[[], Any], repetitions: int, *, warm_up: int
) -> tuple[float, float]:
    """Both in turn, each first half of the time, so that a slow moment hits both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(warm_up + repetitions):
        for which in (0, 1) if repetition % 2 else (1, 0):
            start = time.perf_counter()
            (ours, theirs)[which]()
            if repetition >= warm_up:
                seconds[which].append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def torch_latencies(files: Files, size: int, repetitions: int) -> tuple[float, float]:
    """Median seconds of a batch in torch, the program and the dense model."""
    program = torch.export.load(files.program.path).module()
    batch = files.batch.expand(size, *files.batch.shape[1:]).contiguous()
    with torch.inference_mode():
        return medians(lambda: program(batch), lambda: files.module(batch), repetitions, warm_up=5)


def report(case: str, files: Files, ours_s: float, rival_s: float) -> None:
    """One JSON line."""
    line(case, files, files.ours, RIVAL, files.theirs_bytes, ours_s, rival_s)


def report_program(case: str, files: Files, ours_s: float, rival_s: float) -> None:
    """One JSON line; the bytes of the rival are those of its tensors."""
    size = sum(tensor.nbytes for tensor in files.module.state_dict().values())
    line(case, files, files.program, TORCH_RIVAL, size, ours_s, rival_s)


def line(
    case: str,
    files: Files,
    ours: OnnxExport | ProgramExport,
    rival: str,
    rival_bytes: int,
    ours_s: float,
    rival_s: float,
) -> None:
    """Print it."""
    facts = {
        "case": case,
        "ratio": ours_s / rival_s,
        "ours_s": ours_s,
        "rival_s": rival_s,
        "rival": rival,
        "ours_bytes": ours.file_bytes,
        "rival_bytes": rival_bytes,
        "bytes_ratio": ours.file_bytes / rival_bytes,
        "filters": ours.filters,
        "dropped": ours.dropped,
        "largest_error": ours.largest_error,
        "largest_output": ours.largest_output,
        "device": f"{platform.machine()} CPU, {files.threads} threads",
        "versions": {
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
