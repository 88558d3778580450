"""The table of docs/results.md: files of version 1 of the format, rewritten in version 2.

Indices with contexts, BatchNorm folded, and what is not compressed rounded as the presets do it. Each network
was scored before and after on the test images. All files in experiments/models are of version 2 now; the
program that rewrote them is this file as it is at the commits below the table.
"""

from __future__ import annotations

from pathlib import Path

import kept

from pwfn.lab.compare.table import markdown

RESULTS = kept.RESULTS / "files.jsonl"
HEADS = ("file", "version 1", "version 2, exact", "version 2", "indices", "the rest", "equal answers", "KL")


def table(path: Path = RESULTS) -> list[str]:
    """The table."""
    lines = kept.read(path)
    if not lines:
        return ["Not measured yet."]
    rows = [
        (
            f"`{own['file']}`",
            *(f"{own[key]:,}" for key in ("was_bytes", "exact_bytes", "bytes")),
            f"{own['was_index_bytes']:,} → {own['index_bytes']:,}",
            f"{own['was_rest_bytes']:,} → {own['rest_bytes']:,}",
            f"{100 * own['agreement']:.2f} %",
            f"{own['kl']:.1e}",
        )
        for own in lines
    ]
    tops = ", ".join(f"{100 * own['was_top1']:.2f} → {100 * own['top1']:.2f}" for own in lines)
    return [
        *markdown(HEADS, rows),
        "",
        f"Scored on {lines[0]['images']:,} images; top-1 in this order: {tops}. Measured on: "
        f"{kept.measured_on(lines)}.",
    ]
