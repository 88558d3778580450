"""How reliable the network in a .pwfn file is, on data by name: for ``pwfn evaluate``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pwfn.errors import ConfigError, WeightError
from pwfn.file.compressed import Compressed
from pwfn.file.storage import replacing
from pwfn.lab.uncertainty.assess import Assessment, Rival, assess
from pwfn.lab.uncertainty.ood import open_ood
from pwfn.lab.uncertainty.recalibration import Recalibration, why_not
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.resolve import network_of
from pwfn.run.scores import OpenFile, evaluate_file, open_file, scores, sizes, summary_line
from pwfn.zoo import models


def evaluated(path: Path, options: RunOptions, asked: TrustOptions) -> tuple[dict[str, Any], list[str]]:
    """The figures of a file, and lines of text; with the table of rivals if anything of it is asked for."""
    if not asked.wanted:
        facts = evaluate_file(path, options, seed=asked.seed)
        return facts, [summary_line(facts)]
    facts, table = assess_file(path, options, asked)
    return facts, [summary_line(facts), "", *table.lines()]


def assess_file(path: Path, options: RunOptions, asked: TrustOptions) -> tuple[dict[str, Any], Assessment]:
    """As :func:`evaluate_file`, and the table of rivals; it is also written to ``asked.out`` as JSON."""
    if asked.recalibrate and not asked.samples:
        raise ConfigError(
            f"--recalibrate {asked.recalibrate} computes BatchNorm statistics for every draw, but no draws "
            "are requested: give --samples too"
        )
    file = open_file(path, options, asked.seed)
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


def _recalibration(file: OpenFile, asked: TrustOptions) -> Recalibration:
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
