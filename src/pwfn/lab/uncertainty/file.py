"""How reliable the networks in .pwfn files are, on data by name: for ``pwfn evaluate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pwfn.errors import DataError
from pwfn.file.content import NOTHING_TO_DRAW
from pwfn.file.storage import replacing
from pwfn.lab.uncertainty.assess import Assessment, Rival, assess
from pwfn.lab.uncertainty.ood import open_ood
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.scores import OpenFile, file_facts, open_files, original_of, summary_line

_SAMPLES = 20


def evaluated(
    paths: Path | Sequence[Path], options: RunOptions, asked: TrustOptions
) -> tuple[dict[str, Any], list[str]]:
    """The figures of one file, or of several as one ensemble, and lines of text.

    With the table of rivals if anything of it is asked for, if there are several files, or if a predictive
    sigma was fitted. Without labels there is no such table: the network is compared with the original one.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = open_files(paths, options, asked.seed)
    first, several = files[0], len(files) > 1
    if not first.labelled and (asked.samples or asked.ood or asked.out or several):
        raise DataError(
            f"{first.data.name} has no labels, which --samples, --ood, --out and several files need: leave "
            "these out, or give labelled data"
        )
    asked = _with_samples(asked, files)
    if first.labelled and (asked.wanted or several):
        facts, table = assess_file(paths, options, asked, files)
        return facts, [*_summary(facts), "", *table.lines()]
    facts = file_facts(first, paths[0], options.model, asked.original)
    return facts, _summary(facts)


def assess_file(
    paths: Path | Sequence[Path],
    options: RunOptions,
    asked: TrustOptions,
    files: Sequence[OpenFile] | None = None,
) -> tuple[dict[str, Any], Assessment]:
    """The figures of one or several files, and the table of rivals; it is also written to ``asked.out``.

    Several files predict together: ``file_bytes`` is the sum, and the figures of each are in ``files``.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = files or open_files(paths, options, asked.seed)
    asked, first = _with_samples(asked, files), files[0]
    original = original_of(first.compressed, options.model, asked.original) if asked.original else None
    ood = {spec: open_ood(spec, first.data, first.images) for spec in asked.ood}
    table = assess(
        [file.compressed for file in files] if len(files) > 1 else first.compressed,
        [file.network for file in files] if len(files) > 1 else first.network,
        first.data.test,
        original=original.to(first.distributed.device) if original is not None else None,
        ood={spec: other.loader for spec, other in ood.items()},
        samples=asked.samples or 0,
        seed=asked.seed,
        sigma_scale=asked.sigma_scale,
    )
    notes = [f"{spec}: {other.note}" for spec, other in ood.items() if other.note]
    notes += [
        f"{path}: {NOTHING_TO_DRAW}, so that it predicts by its point estimate"
        for path, file in zip(paths, files, strict=True)
        if asked.samples and file.compressed.posterior != "none" and not file.compressed.drawable
    ]
    table = replace(table, notes=(*table.notes, *notes))
    each = [file_facts(file, path) for file, path in zip(files, paths, strict=True)]
    facts = each[0]
    if len(files) > 1:
        facts = {"files": each, "file_bytes": sum(one["file_bytes"] for one in each)}
        facts["point"] = table.row(Rival.POINT).accuracy_all
    if asked.samples:
        facts["ensemble"] = table.row(Rival.ENSEMBLE).accuracy_all
    facts["uncertainty"] = table.to_dict()
    if asked.out is not None:
        with replacing(asked.out) as temporary:
            temporary.write_text(json.dumps(facts["uncertainty"], indent=1) + "\n", encoding="utf-8")
    return facts, table


def _with_samples(asked: TrustOptions, files: Sequence[OpenFile]) -> TrustOptions:
    """With the number of draws: 20 by default where a predictive sigma was fitted and is not zero."""
    if asked.samples is not None:
        return asked
    fitted = (file.compressed.posterior == "tensor" and file.compressed.drawable for file in files)
    return replace(asked, samples=_SAMPLES if files[0].labelled and any(fitted) else 0)


def _summary(facts: dict[str, Any]) -> list[str]:
    if "files" not in facts:
        return [summary_line(facts)]
    drawn = f", {facts['ensemble']:.2%} with draws" if "ensemble" in facts else ""
    together = f"{len(facts['files'])} files together: {facts['point']:.2%}{drawn}; "
    return [*map(summary_line, facts["files"]), f"{together}{facts['file_bytes']:,} bytes"]
