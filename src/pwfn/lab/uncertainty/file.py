"""How reliable the network in a .pwfn file is, on data by name: for ``pwfn evaluate``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pwfn.errors import ConfigError, DataError, WeightError
from pwfn.file.storage import replacing
from pwfn.lab.uncertainty.assess import Assessment, Rival, assess
from pwfn.lab.uncertainty.ood import open_ood
from pwfn.lab.uncertainty.recalibration import Recalibration, why_not
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.scores import OpenFile, file_facts, open_file, original_of, summary_line


def evaluated(path: Path, options: RunOptions, asked: TrustOptions) -> tuple[dict[str, Any], list[str]]:
    """The figures of a file, and lines of text; with the table of rivals if anything of it is asked for.

    Without labels there is no such table: the network is compared with the original one.
    """
    file = open_file(path, options, asked.seed)
    if not file.labelled and (asked.samples or asked.ood or asked.out or asked.recalibrate):
        raise DataError(
            f"{file.data.name} has no labels, which --samples, --ood, --out and --recalibrate need: leave "
            "these out, or give labelled data"
        )
    if not asked.wanted or not file.labelled:
        facts = file_facts(file, path, options.model, asked.original)
        return facts, [summary_line(facts)]
    facts, table = assess_file(path, options, asked, file)
    return facts, [summary_line(facts), "", *table.lines()]


def assess_file(
    path: Path, options: RunOptions, asked: TrustOptions, file: OpenFile | None = None
) -> tuple[dict[str, Any], Assessment]:
    """The figures of a file, and the table of rivals; it is also written to ``asked.out`` as JSON."""
    if asked.recalibrate and not asked.samples:
        raise ConfigError(
            f"--recalibrate {asked.recalibrate} computes BatchNorm statistics for every draw, but no draws "
            "are requested: give --samples too"
        )
    file = file or open_file(path, options, asked.seed)
    device = file.distributed.device
    recalibrate = _recalibration(file, asked) if asked.recalibrate else None
    original = original_of(file.compressed, options.model, asked.original) if asked.original else None
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
    facts = file_facts(file, path)
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
