"""Exports a .pwfn file to any target; the model for a graph is found by its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pwfn.errors import PwfnError
from pwfn.export.dense import to_safetensors, to_torch
from pwfn.export.onnx import to_onnx
from pwfn.export.pt2 import to_pt2
from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.file.storage import check_writable
from pwfn.zoo import models

_ENDINGS = {"onnx": ".onnx", "pt2": ".pt2", "safetensors": ".safetensors", "torch": ".pt"}
_GRAPHS = ("onnx", "pt2")


def from_file(
    file: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    dtype: str = "fp32",
    model: str | None = None,
    input_shape: str | None = None,
) -> dict[str, Any]:
    """Export a file and return the facts, with a sentence as text among them."""
    if to not in _ENDINGS:
        raise PwfnError(f"target {to!r} is unknown: allowed is one of {', '.join(_ENDINGS)}")
    if to in _GRAPHS and dtype != "fp32":
        raise PwfnError(f"dtype {dtype!r} is for safetensors and torch: {to} is always fp32")
    if to not in _GRAPHS and (model is not None or input_shape is not None):
        raise PwfnError(f"--model and --input-shape are for onnx and pt2: {to} needs neither")
    target = Path(out) if out else Path(str(file).removesuffix(".pwfn") + _ENDINGS[to])
    # Not by methods of Path: they raise where a path may not be looked at.
    if os.path.exists(target) and os.path.exists(file) and os.path.samefile(target, file):
        raise PwfnError(f"{target} is the file itself: name another with --out")
    compressed = load(file)
    check_writable(target)
    if to in _GRAPHS:
        facts, sentence = _graph(compressed, to, target, model, input_shape)
    else:
        write = to_safetensors if to == "safetensors" else to_torch
        exactness = write(compressed, target, dtype)
        facts, sentence = exactness._asdict(), f"; {exactness.sentence()}"
    size = target.stat().st_size
    return {
        "path": str(target),
        "file_bytes": size,
        **facts,
        "sentence": f"{target}: {size:,} bytes{sentence}",
    }


def _graph(
    compressed: Compressed, to: str, target: Path, name: str | None, shape: str | None
) -> tuple[dict[str, Any], str]:
    name = name or models.recorded(compressed.record)
    module = models.create(name, classes=models.recorded_classes(compressed.record))
    sizes = input_sizes(shape) if shape is not None else models.input_shape(name, module)
    if sizes is None:
        raise PwfnError(f"the input of {name!r} is not known: give its shape with --input-shape 3,224,224")
    write = to_onnx if to == "onnx" else to_pt2
    done = write(compressed, module, torch.zeros(2, *sizes), target)
    facts = {name: fact for name, fact in vars(done).items() if name not in ("path", "file_bytes")}
    kind = f"{facts['palettes']} tensors as palette and indices" if to == "onnx" else "weights in fp32"
    filters = f"; {done.dropped:,} of {done.filters:,} filters were dropped" if done.dropped else ""
    if facts.get("kept_because"):
        filters = f"; filters could not be dropped ({facts['kept_because']})"
    return facts, (
        f", {kind}; outputs differ from torch by at most {done.largest_error:.2g}, the largest output is "
        f"{done.largest_output:.2g}{filters}"
    )


def input_sizes(text: str) -> tuple[int, ...]:
    """The shape of one input, as it is written on the command line.

    >>> input_sizes("3,224,224")
    (3, 224, 224)
    """
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PwfnError(f"input shape {text!r} is not a list of whole numbers such as 3,224,224")
    return sizes
