"""How reliable the networks in .pwfn files are, on data by name: for ``pwfn evaluate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pwfn.bayes.batches import Source
from pwfn.errors import DataError
from pwfn.file.content import NOTHING_TO_DRAW
from pwfn.file.storage import check_writable, replacing
from pwfn.lab.uncertainty.assess import Assessment, Rival, assess
from pwfn.lab.uncertainty.ood import open_ood
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.scores import OpenFile, file_facts, open_files, original_of, summary_line

_SAMPLES = 20


def evaluated(
    paths: Sequence[Path], options: RunOptions, asked: TrustOptions
) -> tuple[dict[str, Any], list[str]]:
    """The figures of one file, or of several as one ensemble, and lines of text.

    With the table of rivals if anything of it is asked for, if there are several files, or if a predictive
    sigma was fitted. Without labels there is no such table: the network is compared with the original one.
    """
    if asked.out is not None:
        check_writable(asked.out)
    files: Sequence[OpenFile] = open_files(paths, options, asked.seed)
    first, several = files[0], len(files) > 1
    if not first.labelled and (asked.samples or asked.ood or asked.out or several):
        raise DataError(
            f"{first.data.name} has no labels, which --samples, --ood, --out and several files need: leave "
            "these out, or give labelled data"
        )
    asked, files = _with_samples(asked, files)
    if first.labelled and (asked.wanted or several):
        facts, table = _assessed(paths, files, options.model, asked)
        return facts, [*_summary(facts), "", *table.lines()]
    facts = file_facts(first, paths[0], options.model, asked.original)
    return facts, [*_summary(facts), *_why_not_drawn(first, asked)]


def _assessed(
    paths: Sequence[Path], files: Sequence[OpenFile], model: str, asked: TrustOptions
) -> tuple[dict[str, Any], Assessment]:
    """The figures of one or several files, and the table of rivals; it is also written to ``asked.out``.

    Several files predict together: ``file_bytes`` is the sum, and the figures of each are in ``files``.
    """
    first = files[0]
    original = original_of(first.compressed, model, asked.original) if asked.original else None
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
        f"{path}: {why}, so that it predicts by its point estimate"
        for path, file in zip(paths, files, strict=True)
        if asked.samples and not file.compressed.drawable
        for why in ("no fitted sigma" if file.compressed.posterior == "none" else NOTHING_TO_DRAW,)
    ]
    if len(files) > 1:  # a report is of one of them, and says so
        notes.append(f"the predictions are of several files together: {', '.join(map(str, paths))}")
    if len(files) > 1 and original is not None:
        notes.append(f"the original network is that of {paths[0]} alone")
    if len({path.resolve() for path in paths}) < len(paths):
        notes.append("a file that is given twice has two votes, and its bytes count twice")
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


def _with_samples(asked: TrustOptions, files: Sequence[OpenFile]) -> tuple[TrustOptions, Sequence[OpenFile]]:
    """With the number of draws: 20 by default where a predictive sigma was fitted and is not zero.

    By default a sigma of training is not drawn: it may be far too large to predict with.
    """
    if asked.samples is not None:
        return asked, files
    fitted = any(map(_is_fitted, files)) and _has_classes(files[0])
    return replace(asked, samples=_SAMPLES if fitted else 0), [
        file
        if file.compressed.posterior == "tensor"
        else replace(file, compressed=replace(file.compressed, weight_sigma=None, centre_sigma=None))
        for file in files
    ]


def _is_fitted(file: OpenFile) -> bool:
    return file.compressed.posterior == "tensor" and file.compressed.drawable


def _has_classes(file: OpenFile) -> bool:
    """Whether every example has one class, which all measures of uncertainty need."""
    batches = Source("test data", file.data.test, file.distributed.device).batches()
    target = next((batch.target for batch in batches), None)
    return isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()


def _why_not_drawn(file: OpenFile, asked: TrustOptions) -> list[str]:
    """What a reader should know of a single file without draws."""
    found = []
    if file.compressed.posterior == "tensor" and not file.compressed.drawable:
        found.append(NOTHING_TO_DRAW)
    elif _is_fitted(file) and file.labelled and asked.samples == 0 and not _has_classes(file):
        found.append("its fitted sigma is not drawn: uncertainty is measured where an example has one class")
    if asked.sigma_scale != 1:
        found.append("--sigma-scale has no effect: nothing is drawn")
    return found


def _summary(facts: dict[str, Any]) -> list[str]:
    if "files" not in facts:
        return [summary_line(facts)]
    drawn = f", {facts['ensemble']:.2%} with draws" if "ensemble" in facts else ""
    together = f"{len(facts['files'])} files together: {facts['point']:.2%}{drawn}; "
    return [*map(summary_line, facts["files"]), f"{together}{facts['file_bytes']:,} bytes"]
