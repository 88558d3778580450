"""Scores of the network in a .pwfn file on data by name, for ``pwfn evaluate`` and at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.objective import Objective
from pwfn.config import Precision
from pwfn.errors import DataError, FileError
from pwfn.evaluate import calibration
from pwfn.evaluate.ensemble import ensemble
from pwfn.evaluate.inspect import inspect
from pwfn.evaluate.score import Scores, accuracy, mean_scores
from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.run.options import RunOptions
from pwfn.run.resolve import check_classes, data_options, network_of, preparation_of
from pwfn.zoo.data import Data, DataOptions, open_source

_SIZES = ("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "fp32_bytes")


def evaluate_file(path: Path, options: RunOptions, *, samples: int = 0, seed: int = 0) -> dict[str, Any]:
    """Loss, accuracy and sizes of a file; with ``samples`` also the accuracy of an ensemble of so many draws.

    The network is the one named in the file, unless ``options.model`` names another.
    """
    file = open_file(path, options, seed)
    facts = {"after": scores(file.network, file.data, file.distributed).to_dict(), **sizes(path)}
    if samples:
        drawn = ensemble(file.compressed, file.network, file.data.test, samples, seed)
        if drawn.targets is None:
            raise DataError("test data have no labels: give (input, target) batches")
        facts["ensemble"] = calibration.accuracy(drawn.probabilities, drawn.targets)
    return facts


@dataclass(frozen=True)
class OpenFile:
    """A file with its network and data."""

    compressed: Compressed
    network: nn.Module  # with the file's weights, on the device
    data: Data
    images: DataOptions  # how images of other data are prepared
    distributed: Distributed


def open_file(path: Path, options: RunOptions, seed: int) -> OpenFile:
    """A file, the network it names with its weights, and data by name."""
    compressed = load(path)
    network = network_of(compressed, options.model)
    alone = distributed_for(options.device, alone=True)
    preparation = preparation_of(compressed, options.model, network)
    images = data_options(options, preparation, seed, alone)
    data = open_source(options.data, images)
    check_classes(compressed.apply_to(network).to(alone.device), data, alone.device)
    return OpenFile(compressed, network, data, images, alone)


def scores(model: nn.Module, source: Data, distributed: Distributed) -> Scores:
    """Cross entropy and accuracy on the test data, in float32."""
    tests = Source("test data", source.test, distributed.device)
    return mean_scores(
        model, tests, Objective(F.cross_entropy), accuracy, Precision.FP32, distributed=distributed
    )


def sizes(path: Path) -> dict[str, Any]:
    """Counts and bytes of a file."""
    found = inspect(path, zstd=False)
    return {name: getattr(found, name) for name in _SIZES}


def check_same(path: Path, compressed: Compressed) -> None:
    """Read a file back, and raise an error unless it holds exactly the weights that were saved."""
    kept, wanted = load(path).dense_state_dict(), compressed.dense_state_dict()
    if kept.keys() != wanted.keys() or not all(_equal(kept[name], wanted[name]) for name in kept):
        raise FileError(f"{path}: does not hold what was written to it: check the disk, and save again")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Uncompressed tensors may hold NaN, which counts as equal to itself here.
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def summary_line(facts: Mapping[str, Any]) -> str:
    """The figures of a file in one line, with those of the original network if they are known."""
    before, after = facts.get("before"), facts["after"]
    was = f"{before['metric']:.2%} before, " if before and before["metric"] is not None else ""
    now = f"{after['metric']:.2%}" if after["metric"] is not None else f"loss {after['loss']}"
    drawn = f" ({facts['ensemble']:.2%} as an ensemble)" if "ensemble" in facts else ""
    return (
        f"{was}{now} after{drawn}; {facts['weights']:,} weights with {facts['unique']} values, "
        f"{facts['entropy_bits']:.3f} bits per weight; {facts['file_bytes']:,} bytes, fp32 "
        f"{facts['fp32_bytes']:,}"
    )
