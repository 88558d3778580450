"""The files in experiments/models, written in version 2 of the format, and what that changes.

    python experiments/files.py --data npz:data/cifar10.npz

Rewrites the files of version 1: indices with contexts, BatchNorm folded, and what is not compressed rounded
as the presets do it (``finish.fold_batchnorm``, ``finish.uncompressed_dtype``; bfloat16 where the run asked
for that). Each network is scored before and after on the test images, which choose nothing, and one JSON line
is appended to experiments/results/files.jsonl. ``python experiments/results.py docs`` makes the table of
docs/results.md from them.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pwfn
from pwfn.config import Config
from pwfn.config.sections import UncompressedDtype
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import fold_batchnorm, round_uncompressed
from pwfn.file.format import Reader
from pwfn.lab.compare.measure import digest
from pwfn.lab.compare.runner import git_commit
from pwfn.lab.compare.table import markdown
from pwfn.layout import untouched
from pwfn.run.resolve import network_of, preparation_of
from pwfn.zoo.data import open_source
from pwfn.zoo.dataset import DataOptions

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "files.jsonl"
HEADS = ("file", "version 1", "version 2, exact", "version 2", "indices", "the rest", "equal answers", "KL")


def model_of(compressed: Compressed) -> nn.Module:
    """The network in a file, in evaluation mode."""
    return compressed.apply_to(network_of(compressed, "")).eval()


def test_batches(spec: str, compressed: Compressed) -> Iterable[tuple[Tensor, Tensor]]:
    """The test images, prepared as the file says."""
    preparation = preparation_of(compressed, "", network_of(compressed, ""))
    options = DataOptions(**vars(preparation), batch_size=500)
    found: Iterable[tuple[Tensor, Tensor]] = open_source(spec, options).test
    return found


def shrunk(compressed: Compressed) -> Compressed:
    """The same network with smaller uncompressed tensors."""
    asked = compressed.record.get("settings", {}).get("finish", {})
    wanted = next((asked[key] for key in ("uncompressed_dtype", "rest") if key in asked), "float32")
    dtype = UncompressedDtype(wanted)
    if dtype is UncompressedDtype.FLOAT32:
        dtype = Config.preset("recommended").finish.uncompressed_dtype
    model = model_of(compressed)
    fold_batchnorm(model)
    round_uncompressed(model, dtype)
    return replace(compressed, untouched=untouched(model, compressed.layout))


@torch.inference_mode()
def predictions(compressed: Compressed, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Logarithms of probabilities for each image, and the labels."""
    model = model_of(compressed)
    pairs = [(model(images).log_softmax(1), labels) for images, labels in batches]
    return torch.cat([scores for scores, _ in pairs]), torch.cat([labels for _, labels in pairs])


def rewritten(path: Path, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Rewrite a file; returns the facts of both."""
    before, was = pwfn.load(path), Reader(path)
    facts: dict[str, Any] = {"file": path.name, "was_bytes": was.file_bytes, "was_sha256": digest(path)}
    facts |= {"was_index_bytes": was.sizes.indices, "was_rest_bytes": was.sizes.untouched}
    facts |= {"exact_bytes": len(before.dumps()), "model": before.record["model"]}
    after = shrunk(before)
    old, labels = predictions(before, batches)
    new, _ = predictions(after, batches)
    after.save(path)
    now = Reader(path)
    return facts | {
        "bytes": now.file_bytes,
        "sha256": digest(path),
        "index_bytes": now.sizes.indices,
        "rest_bytes": now.sizes.untouched,
        "images": len(labels),
        "agreement": (old.argmax(1) == new.argmax(1)).double().mean().item(),
        "kl": (old.exp() * (old - new)).sum(1).double().mean().item(),
        "was_top1": (old.argmax(1) == labels).double().mean().item(),
        "top1": (new.argmax(1) == labels).double().mean().item(),
        "device": platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": git_commit(Path(__file__)),
    }


def table(path: Path = RESULTS) -> list[str]:
    """The table of docs/results.md."""
    if not path.exists():
        return ["Not measured yet."]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
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
    machines = sorted({f"{own['device']}, torch {own['versions']['torch']}" for own in lines})
    commits = sorted({own["commit"][:10] for own in lines})
    return [
        *markdown(HEADS, rows),
        "",
        f"Scored on {lines[0]['images']:,} images; top-1 in this order: {tops}. Measured on: "
        f"{'; '.join(machines)}, commit {', '.join(commits)}.",
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="as for `pwfn evaluate`: npz:data/cifar10.npz")
    options = parser.parse_args()
    for path in sorted((HERE / "models").glob("*.pwfn")):
        if Reader(path).version == 1:
            facts = rewritten(path, test_batches(options.data, pwfn.load(path)))
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
            print(f"{path.name}: {facts['was_bytes']:,} → {facts['bytes']:,} bytes", flush=True)


if __name__ == "__main__":
    main()
