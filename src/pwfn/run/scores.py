"""Scores of the network in a .pwfn file on data by name, for ``pwfn evaluate`` and at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.objective import Objective
from pwfn.config import Precision
from pwfn.errors import ConfigError, DataError, FileError, WeightError
from pwfn.evaluate import calibration
from pwfn.evaluate.assess import Assessment, Rival, assess
from pwfn.evaluate.ensemble import ensemble
from pwfn.evaluate.inspect import inspect
from pwfn.evaluate.ood import open_ood
from pwfn.evaluate.recalibration import Recalibration, why_not
from pwfn.evaluate.score import Scores, accuracy, mean_scores
from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.file.storage import replacing
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.resolve import check_classes, network_of, open_data, preparation_of
from pwfn.zoo import models
from pwfn.zoo.data import Data, DataOptions

_SIZES = ("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "fp32_bytes")


def evaluated(path: Path, options: RunOptions, asked: TrustOptions) -> tuple[dict[str, Any], list[str]]:
    """The figures of a file, and lines of text; with the table of rivals if anything of it is asked for."""
    if not asked.wanted:
        facts = evaluate_file(path, options, seed=asked.seed)
        return facts, [summary_line(facts)]
    facts, table = assess_file(path, options, asked)
    return facts, [summary_line(facts), "", *table.lines()]


def evaluate_file(path: Path, options: RunOptions, *, samples: int = 0, seed: int = 0) -> dict[str, Any]:
    """Loss, accuracy and sizes of a file; with ``samples`` also the accuracy of an ensemble of so many draws.

    The network is the one named in the file, unless ``options.model`` names another.
    """
    file = _open(path, options, seed)
    facts = {"after": scores(file.network, file.data, file.distributed).to_dict(), **sizes(path)}
    if samples:
        drawn = ensemble(file.compressed, file.network, file.data.test, samples, seed)
        if drawn.targets is None:
            raise DataError("test data have no labels: give (input, target) batches")
        facts["ensemble"] = calibration.accuracy(drawn.probabilities, drawn.targets)
    return facts


def assess_file(path: Path, options: RunOptions, asked: TrustOptions) -> tuple[dict[str, Any], Assessment]:
    """As :func:`evaluate_file`, and the table of rivals; it is also written to ``asked.out`` as JSON."""
    if asked.recalibrate and not asked.samples:
        raise ConfigError(
            f"--recalibrate {asked.recalibrate} computes BatchNorm statistics for every draw, but no draws "
            "are requested: give --samples too"
        )
    file = _open(path, options, asked.seed)
    device = file.distributed.device
    recalibrate = _recalibration(file, asked) if asked.recalibrate else None
    original = _original(file.compressed, options.model, asked.original) if asked.original else None
    ood = {spec: open_ood(spec, file.data, file.images) for spec in asked.ood}
    table = assess(
        file.compressed,
        file.network,
        file.data.test,
        original=original.to(device) if original is not None else None,
        ood={spec: other.loader for spec, other in ood.items()},
        samples=asked.samples,
        seed=asked.seed,
        sigma_scale=asked.sigma_scale,
        recalibrate=recalibrate,
    )
    notes = [f"{spec}: {other.note}" for spec, other in ood.items() if other.note]
    is_worse = any(each.rival is Rival.POINT and each.verdict == "worse" for each in table.comparisons)
    if recalibrate is not None:
        notes.append(
            "BatchNorm statistics were recalibrated for every draw, on "
            f"{len(recalibrate.batches)} training batches ({recalibrate.examples:,} examples)"
        )
    elif is_worse and why_not(file.network) is None:
        notes.append(
            "the ensemble is worse than the point estimate, whose BatchNorm statistics its draws use: "
            "--recalibrate 8 gives each draw its own"
        )
    table = replace(table, notes=(*table.notes, *notes))
    facts = {"after": scores(file.network, file.data, file.distributed).to_dict(), **sizes(path)}
    if asked.samples:
        facts["ensemble"] = table.row(Rival.ENSEMBLE).accuracy_all
    facts["uncertainty"] = table.to_dict()
    if asked.out is not None:
        with replacing(asked.out) as temporary:
            temporary.write_text(json.dumps(facts["uncertainty"], indent=1) + "\n", encoding="utf-8")
    return facts, table


@dataclass(frozen=True)
class _File:
    """A file with its network and data."""

    compressed: Compressed
    network: nn.Module  # with the file's weights, on the device
    data: Data
    images: DataOptions  # how images of other data are prepared
    distributed: Distributed


def _open(path: Path, options: RunOptions, seed: int) -> _File:
    compressed = load(path)
    network = network_of(compressed, options.model)
    alone = distributed_for(options.device, alone=True)
    preparation = preparation_of(compressed, options.model, network)
    data = open_data(options, preparation, seed, alone)
    check_classes(compressed.apply_to(network).to(alone.device), data, alone.device)
    images = DataOptions.prepared(
        preparation,
        batch_size=options.batch_size,
        test_batch_size=options.test_batch_size,
        seed=seed,
        device=alone.device,
        workers=options.workers,
    )
    return _File(compressed, network, data, images, alone)


def _recalibration(file: _File, asked: TrustOptions) -> Recalibration:
    reason = why_not(file.network)
    if reason is not None:
        raise WeightError(reason)
    device = file.distributed.device
    return Recalibration.from_loader(file.data.train, asked.recalibrate, seed=asked.seed, device=device)


def _original(compressed: Compressed, name: str, weights: str) -> nn.Module:
    """The network with its weights before compression."""
    if weights == "pretrained":
        classes = models.recorded_classes(compressed.record)
        return models.create(name or models.recorded(compressed.record), pretrained=True, classes=classes)
    network = network_of(compressed, name)
    models.load_weights(network, weights)
    return network


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
