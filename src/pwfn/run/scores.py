"""What the network in a file gets right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from pwfn.errors import ConfigError, DataError, FileError
from pwfn.evaluate import calibration as uncertainty
from pwfn.evaluate.assess import assess
from pwfn.evaluate.assessment import Assessment, Rival
from pwfn.evaluate.ensemble import ensemble
from pwfn.evaluate.inspect import inspect
from pwfn.evaluate.ood import open_outside
from pwfn.evaluate.recalibration import Settling, settled_by, why_not
from pwfn.evaluate.score import Scores, accuracy, mean_scores
from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.file.storage import replacing
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.resolve import check_classes, network_of, open_data, preparation_of
from pwfn.zoo import models
from pwfn.zoo.data import Data, DataOptions
from pwfn.zoo.models import DataConfig

_KEPT = ("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "fp32_bytes")


def evaluate_file(path: Path, options: RunOptions, *, samples: int = 0, seed: int = 0) -> dict[str, Any]:
    """What a file's network gets right on data by name, beside its size.

    The network is the one that the file names, unless ``options.model`` is another. With ``samples``,
    also what the mean prediction of so many draws from its posterior gets right.
    """
    file = _opened(path, options, seed)
    facts = {"after": scores(file.network, file.source, file.distributed).to_dict(), **sizes(path)}
    if samples:
        facts["ensemble"] = _ensemble(file, samples, seed)
    return facts


def assess_file(
    path: Path,
    options: RunOptions,
    *,
    original: str | None = None,
    ood: Sequence[str] = (),
    samples: int = 20,
    seed: int = 0,
    sigma_scale: float = 1.0,
    settle: int = 0,
    out: Path | None = None,
) -> tuple[dict[str, Any], Assessment]:
    """As :func:`evaluate_file`, and how far the predictions can be trusted, beside those of simpler rivals.

    ``original`` is where the weights from before are: a file, or "pretrained" for timm's own. ``ood``
    is data from elsewhere by name (:func:`pwfn.evaluate.open_outside`). With ``settle``, every draw
    has BatchNorm statistics of its own, from so many training batches
    (:func:`pwfn.evaluate.settled_by`), and a note says so. With ``out``, the assessment is written
    there too, as JSON.
    """
    if settle and not samples:
        raise ConfigError(
            f"--settle {settle} gathers BatchNorm statistics for every draw, and no draws are asked for: "
            "give --samples as well"
        )
    file = _opened(path, options, seed)
    device = file.distributed.device
    settling = _settling(file, settle, seed) if settle else None
    before = None if original is None else _original(file.compressed, options.model, original).to(device)
    images = DataOptions.prepared(
        file.preparation,
        batch_size=options.batch_size,
        test_batch_size=options.test_batch_size,
        seed=seed,
        device=device,
        workers=options.workers,
    )
    others = {spec: open_outside(spec, file.source, images) for spec in ood}
    found = assess(
        file.compressed,
        file.network,
        file.source.test,
        original=before,
        ood={spec: other.loader for spec, other in others.items()},
        samples=samples,
        seed=seed,
        sigma_scale=sigma_scale,
        settle=settling,
    )
    notes = tuple(f"{spec}: {other.note}" for spec, other in others.items() if other.note)
    if settling is not None:
        notes += (settling.note,)
    elif _is_worse_than_the_point(found) and why_not(file.network) is None:
        notes += (
            "the ensemble is worse than the point estimate, whose BatchNorm statistics the draws have: "
            "--settle 8 gathers their own",
        )
    found = replace(found, notes=found.notes + notes)
    facts = {"after": scores(file.network, file.source, file.distributed).to_dict(), **sizes(path)}
    if samples:
        facts["ensemble"] = found.row(Rival.ENSEMBLE).accuracy_all
    assessed = found.to_dict()
    if out is not None:
        with replacing(out) as temporary:
            temporary.write_text(json.dumps(assessed, indent=1) + "\n", encoding="utf-8")
    return {**facts, "uncertainty": assessed}, found


def evaluated(path: Path, options: RunOptions, asked: TrustOptions) -> tuple[dict[str, Any], list[str]]:
    """A file's figures, and the lines that tell of them; with the table of rivals where it is asked for."""
    if not asked.wanted:
        facts = evaluate_file(path, options, seed=asked.seed)
        return facts, [summary_line(facts)]
    facts, table = assess_file(
        path,
        options,
        original=asked.original,
        ood=asked.ood,
        samples=asked.samples,
        seed=asked.seed,
        sigma_scale=asked.sigma_scale,
        settle=asked.settle,
        out=asked.out,
    )
    return facts, [summary_line(facts), "", *table.lines()]


@dataclass(frozen=True)
class _Opened:
    """A file with the network and the data that belong to it."""

    compressed: Compressed
    network: nn.Module  # with the file's weights, on the device
    preparation: DataConfig
    source: Data
    distributed: Distributed


def _opened(path: Path, options: RunOptions, seed: int) -> _Opened:
    compressed = load(path)
    network = network_of(compressed, options.model)
    alone = distributed_for(options.device, alone=True)
    preparation = preparation_of(compressed, options.model, network)
    source = open_data(options, preparation, seed, alone)
    check_classes(compressed.apply_to(network).to(alone.device), source, alone.device)
    return _Opened(compressed, network, preparation, source, alone)


def _settling(file: _Opened, batches: int, seed: int) -> Settling:
    """Settles a draw on training batches; a network that cannot be settled is refused before it is scored."""
    settling = settled_by(file.source.train, batches, seed=seed, device=file.distributed.device)
    settling.check(file.network)
    return settling


def _is_worse_than_the_point(found: Assessment) -> bool:
    return any(each.rival is Rival.POINT and each.verdict == "worse" for each in found.comparisons)


def _original(compressed: Compressed, name: str, weights: str) -> nn.Module:
    """The network with the weights that it had before it was compressed."""
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
    return {name: getattr(found, name) for name in _KEPT}


def check_same(path: Path, compressed: Compressed) -> None:
    """Read a file back, and refuse it unless it holds the very weights that were to be saved."""
    kept, wanted = load(path).dense_state_dict(), compressed.dense_state_dict()
    if kept.keys() != wanted.keys() or not all(_equal(kept[name], wanted[name]) for name in kept):
        raise FileError(f"{path}: does not hold what was written to it: check the disk, and save again")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # NaN among the untouched is kept as it was, and is equal to itself here.
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _ensemble(file: _Opened, samples: int, seed: int) -> float:
    """Accuracy of the mean softmax over draws from the posterior that the file keeps."""
    found = ensemble(file.compressed, file.network, file.source.test, samples, seed)
    if found.targets is None:
        raise DataError("test data have no labels: give (input, target) batches")
    return uncertainty.accuracy(found.probabilities, found.targets)


def summary_line(facts: Mapping[str, Any]) -> str:
    """A file's figures in one line; with those of the original network, if they are there."""
    before, after = facts.get("before"), facts["after"]
    was = f"{before['metric']:.2%} before, " if before and before["metric"] is not None else ""
    now = f"{after['metric']:.2%}" if after["metric"] is not None else f"loss {after['loss']}"
    drawn = f" ({facts['ensemble']:.2%} as an ensemble)" if "ensemble" in facts else ""
    return (
        f"{was}{now} after{drawn}; {facts['weights']:,} weights of {facts['unique']} values, "
        f"{facts['entropy_bits']:.3f} bits each; {facts['file_bytes']:,} bytes, fp32 {facts['fp32_bytes']:,}"
    )
