"""The figures of a finished run, measured on its file in the same way for every method."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.errors import FileError
from pwfn.evaluate.entropy import summarise
from pwfn.file.compressed import Compressed
from pwfn.file.content import Division
from pwfn.file.format import load
from pwfn.lab.compare.plan import Run
from pwfn.lab.uncertainty.file import evaluated
from pwfn.layout import Entry, Kind, Layout
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.resolve import network_of

DIGEST = "weights.sha256"
"""The digest of the file of weights that a run was started from; in its folder."""


def unfinished(run: Run, folder: Path) -> str | None:
    """Why a run must be started or resumed: it has not ended, or it was another run; None if it is done."""
    if not (folder / "model.pwfn").is_file() or not (folder / "record.json").is_file():
        return "it has not ended"
    try:
        facts = record(folder)
    except FileError as error:
        return str(error)
    wanted = {
        "model": run.network.name,
        "data": run.plan.data,
        "holdout": run.plan.holdout,
        "batch_size": run.plan.batch_size,
        "settings": run.config.to_dict(),
    }
    before, now = folder / DIGEST, weights_digest(run)
    if before.is_file() and now and before.read_text(encoding="utf-8").strip() != now:
        return f"it started from other weights than those now in {run.network.weights}"
    return difference({name: facts[name] for name in wanted}, wanted)


def difference(found: Any, wanted: Any) -> str | None:
    """The first thing in which a run that was done differs from the one that is wanted.

    >>> difference({"seed": 1, "fixing": {"rule": "mean"}}, {"seed": 1, "fixing": {"rule": "each"}})
    "its fixing.rule is 'mean', not 'each'"
    """

    def walk(one: Any, other: Any, where: str) -> Iterator[str]:
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            for key in dict.fromkeys((*other, *one)):
                name = key if where in ("", "settings") else f"{where}.{key}"
                yield from walk(one.get(key), other.get(key), name)
        elif one != other:
            yield f"its {where} is {one!r}, not {other!r}"

    return next(walk(found, wanted, ""), None)


def weights_digest(run: Run) -> str | None:
    """SHA-256 of the file of weights, where a file is named."""
    path = Path(run.network.weights)
    return digest(path) if path.is_file() else None


def record(folder: Path) -> dict[str, Any]:
    """What is needed of a run's record; an error names the file where something is missing."""
    path = folder / "record.json"
    found = read_json(path)
    try:
        identity, machine = found["identity"], found["machine"]
        return {
            "model": identity["model"]["name"],
            "data": found["asked"]["data"],
            "holdout": found["asked"]["holdout"],
            "batch_size": identity["data"]["batch_size"],
            "settings": identity["settings"],
            **{name: machine[name] for name in ("device", "versions")},
            **{name: found[name] for name in ("epochs", "seconds", "before", "after")},
        }
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: has no {error}: remove {folder} to run it again") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from None


def measure(run: Run, folder: Path, *, device: str | None, commit: str | None) -> dict[str, Any]:
    """All figures of a finished run, for its result file.

    Entropy is ``-sum p log2 p`` over the values of all weights and biases of convolution and linear layers,
    in bits per weight, whether the method quantised them or not; ``inner`` is without the first and last
    layer and without biases. Accuracies are fractions, sizes are bytes.
    """
    file, facts = folder / "model.pwfn", record(folder)
    compressed = load(file)
    network = network_of(compressed, run.network.name)
    layout = Layout.of(network)
    summary = summarise(layout, _values(compressed, layout, file))
    drawn = ensemble_accuracy(file, run, device) if run.plan.samples and compressed.drawable else None
    separate = own_codebooks(compressed, any(entry.attention for entry in layout.entries))
    if run.row.method == "baseline":  # as in the paper: what is not quantised has no codebook
        separate = dict.fromkeys(separate, "none")
    return {
        "name": run.name,
        "model": run.network.name,
        "method": run.row.method,
        "label": run.label,
        "preset": run.row.preset or "recommended",
        "seed": run.seed,
        "top1_start": (facts["before"] or {}).get("metric"),
        "top1": (facts["after"] or {}).get("metric"),
        "top1_ensemble": drawn,
        "samples": run.plan.samples,
        "entropy_bits": summary.whole.entropy_bits,
        "unique": summary.whole.unique,
        "inner_entropy_bits": summary.inner.entropy_bits,
        "inner_unique": summary.inner.unique,
        "file_bytes": file.stat().st_size,
        "fp32_bytes": fp32_bytes(network),
        "codebooks": len(compressed.codebooks),
        "separate": separate,
        **{name: facts[name] for name in ("epochs", "seconds", "device", "versions")},
        "commit": commit,
        "data": run.plan.data,
        "holdout": run.plan.holdout,
        "settings": facts["settings"],
        "file_sha256": digest(file),
    }


def own_codebooks(compressed: Compressed, has_attention: bool) -> dict[str, str]:
    """Which parts of a network have codebooks of their own, by how its weights are divided.

    Each of ``layer``, ``channel`` (input channel) and ``attention`` is "yes", "no" or "none" (there are no
    such parts); ``channel`` is "output" where every output channel has one. Biases do not count. A layer has
    its own if no two weights of different layers use the same codebook. A projection of q, k or v has one
    per head where it is cut between heads, into parts of more than one channel.
    """
    pairs = zip(compressed.layout.entries, compressed.divisions, strict=True)
    weights = [(entry, division) for entry, division in pairs if entry.kind is Kind.WEIGHT]
    layers = {entry.layer for entry, _ in weights}
    # Each codebook once for every layer that uses it.
    books = [book for _, book in {(e.layer, book) for e, d in weights for book in d.codebooks}]
    channel = "no"
    if any(_is_per_channel(entry, division, entry.input_axis) for entry, division in weights):
        channel = "yes"
    elif any(_is_per_channel(entry, division, entry.output_axis) for entry, division in weights):
        channel = "output"
    per_head = "yes" if any(_is_per_head(entry, division) for entry, division in weights) else "no"
    return {
        "layer": "yes" if len(set(books)) == len(books) and len(layers) > 1 else "no",
        "channel": channel,
        "attention": per_head if has_attention else "none",
    }


def _is_per_channel(entry: Entry, division: Division, axis: int | None) -> bool:
    parts = len(division.codebooks)
    return axis is not None and parts > 1 and division.axis == axis and parts == entry.shape[axis]


def _is_per_head(entry: Entry, division: Division) -> bool:
    held, parts = entry.attention, len(division.codebooks)
    if held is None or held.axis != division.axis or held.heads < 2:
        return False
    return parts % held.heads == 0 and parts < entry.shape[held.axis]


def fp32_bytes(network: nn.Module) -> int:
    """Bytes of parameters and buffers, tied ones once, floating-point numbers in at most 4 bytes.

    >>> fp32_bytes(nn.Linear(3, 2))
    32
    """
    state = network.state_dict(keep_vars=True).values()
    once = {id(tensor): tensor for tensor in state if isinstance(tensor, Tensor)}  # extra state is no tensor
    return sum(
        t.numel() * (min(t.element_size(), 4) if t.is_floating_point() else t.element_size())
        for t in once.values()
    )


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _values(compressed: Compressed, layout: Layout, file: Path) -> Tensor:
    """The decoded weights of the whole network as one vector; by name, as a method may add modules."""
    state = compressed.dense_state_dict()
    missing = [entry.name for entry in layout.entries if entry.name not in state]
    if missing:
        raise FileError(f"{file}: has no {missing[0]}, which the network has: it is of another network")
    return torch.cat([state[entry.name].to(layout.dtype).reshape(-1) for entry in layout.entries])


def ensemble_accuracy(file: Path, run: Run, device: str | None) -> float:
    """Accuracy of the mean prediction of draws from the posterior in a file."""
    plan = run.plan
    options = RunOptions(
        *(run.network.name, plan.data, file.parent, ""),
        device=device,
        batch_size=plan.batch_size,
        holdout=plan.holdout,
    )
    asked = TrustOptions(samples=plan.samples, seed=run.seed)
    return float(evaluated([file], options, asked)[0]["ensemble"])
