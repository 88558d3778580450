"""A finished run's figures, measured on its file: the same for every method, whatever its layout covers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.config import Config, MethodName
from pwfn.errors import ConfigError, FileError
from pwfn.evaluate.entropy import summarise
from pwfn.file.compressed import Compressed
from pwfn.file.content import Division
from pwfn.file.format import load
from pwfn.lab.compare.plan import Run
from pwfn.layout import Entry, Kind, Layout
from pwfn.run.options import RunOptions
from pwfn.run.resolve import network_of
from pwfn.run.scores import evaluate_file

Ensemble = Callable[[Path, Run, str | None], float]
"""Accuracy of the mean prediction of draws from a file's posterior."""


class Mark(StrEnum):
    """Whether parts of a network have codebooks of their own."""

    YES = "yes"
    NO = "no"
    OUTPUT = "output"  # every output channel has, where the question is of input channels
    NONE = "none"  # the network has no such parts, or no codebook at all


@dataclass(frozen=True)
class Marks:
    """What has a codebook of its own: layers, input channels, attention heads."""

    layer: Mark
    channel: Mark
    attention: Mark

    @classmethod
    def of(cls, compressed: Compressed, has_attention: bool) -> Marks:
        """From how a file's weights are divided; biases are left out of it.

        A layer has its own if no two weights of different layers use the same codebook. A projection of
        q, k or v that is cut along its outputs has them for heads where the cuts are between heads, and
        more than a channel wide.
        """
        pairs = zip(compressed.layout.entries, compressed.divisions, strict=True)
        weights = [(entry, division) for entry, division in pairs if entry.kind is Kind.WEIGHT]
        # Each codebook once for every layer that uses it.
        books = [book for _, book in {(e.layer, book) for e, d in weights for book in d.codebooks}]
        channel = Mark.NO
        if any(_by_channel(entry, division, entry.input_axis) for entry, division in weights):
            channel = Mark.YES
        elif any(_by_channel(entry, division, entry.output_axis) for entry, division in weights):
            channel = Mark.OUTPUT
        heads = any(_by_head(entry, division) for entry, division in weights)
        return cls(
            layer=_mark(len(set(books)) == len(books) and len({e.layer for e, _ in weights}) > 1),
            channel=channel,
            attention=_mark(heads) if has_attention else Mark.NONE,
        )


def _mark(is_so: bool) -> Mark:
    return Mark.YES if is_so else Mark.NO


def _by_channel(entry: Entry, division: Division, axis: int | None) -> bool:
    parts = len(division.codebooks)
    return axis is not None and parts > 1 and division.axis == axis and parts == entry.shape[axis]


def _by_head(entry: Entry, division: Division) -> bool:
    held, parts = entry.attention, len(division.codebooks)
    if held is None or held.axis != division.axis or held.heads < 2:
        return False
    return parts % held.heads == 0 and parts < entry.shape[held.axis]


def unfinished(run: Run, out: Path, place: Path | None = None) -> str | None:
    """Why a run must be started, or gone on with: it has not ended, or was another; None if it is done.

    It is looked for at its own place below ``out``, or at the one given.
    """
    folder = out / (place or run.place)
    if not (folder / "model.pwfn").is_file() or not (folder / "record.json").is_file():
        return "it has not ended"
    try:
        begun = read_json(folder / ASKED) if (folder / ASKED).exists() else {}
        return _begun_otherwise(run, begun) or differs(run, record(folder))
    except FileError as error:
        return str(error)


ASKED = "asked.json"
"""What a run was begun with, beside its settings; in its folder."""


def asked(run: Run) -> dict[str, Any]:
    """What a run begins with, beside its settings: the data by name, the weights by name and content."""
    weights = Path(run.network.weights)
    content = digest(weights) if weights.is_file() else None
    return {
        "data": run.plan.data,
        "holdout": run.plan.holdout,
        "weights": run.network.weights,
        "weights_sha256": content,
    }


def _begun_otherwise(run: Run, begun: Mapping[str, Any]) -> str | None:
    """By content, where both are known: weights may lie elsewhere by now."""
    wanted = asked(run)
    if begun.get("data", wanted["data"]) != wanted["data"]:
        return f"its data are {begun['data']}, not {wanted['data']}"
    if begun.get("holdout", 0) != wanted["holdout"]:
        return f"it held out {begun.get('holdout', 0):,} training images, not {wanted['holdout']:,}"
    by = "weights_sha256" if begun.get("weights_sha256") and wanted["weights_sha256"] else "weights"
    if begun.get(by, wanted[by]) != wanted[by]:
        return f"it began from other weights than those of {wanted['weights']}"
    return None


def differs(run: Run, found: Mapping[str, Any]) -> str | None:
    """In what a run that was done differs from the one that is wanted; None where it does not."""
    identity = found["identity"]
    if identity["model"]["name"] != run.network.name:
        return f"it is of {identity['model']['name']}, not {run.network.name}"
    if identity["data"]["batch_size"] != run.plan.batch_size:
        return f"its batches are of {identity['data']['batch_size']}, not {run.plan.batch_size}"
    return settings_differ(run, identity["settings"])


def settings_differ(run: Run, found: Mapping[str, Any]) -> str | None:
    """The first setting in which a run that was done differs; None where there is none.

    A setting that came later was then as its first default, and one that the run does not read (another
    method's, say) makes no difference.
    """
    try:
        before = Config.recorded(found).in_force()
    except ConfigError as error:
        return f"its settings are of another version: {error}"
    for name, value in run.config.in_force().items():
        # What decides which others are read (the method, say) comes before them: alike here, alike there.
        if before[name] != value:
            return f"its {name} is {before[name]!r}, not {value!r}"
    return None


def record(folder: Path) -> dict[str, Any]:
    """The record of a run; an error that names the file where it cannot be used."""
    path = folder / "record.json"
    found = read_json(path)
    try:
        _ = found["identity"]["model"]["name"], found["identity"]["data"]["batch_size"]
        _ = found["identity"]["settings"], found["machine"]["device"], found["machine"]["versions"]
        _ = found["epochs"], found["seconds"], found["before"], found["after"]
    except (KeyError, TypeError) as error:
        raise FileError(
            f"{path}: is of another version, and has no {error}: remove {folder} to run it again"
        ) from None
    return found


def read_json(path: Path) -> Any:
    """What is in a file of JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from None


def measured(
    run: Run, out: Path, *, device: str | None, commit: str | None, ensemble: Ensemble | None = None
) -> dict[str, Any]:
    """All figures of a finished run, for its file of results.

    Entropy is ``-sum p log2 p`` over the values of all weights and biases of convolutions and linear
    layers, in bits a weight, whether the method quantised them or not; ``inner`` is without the first
    and the last layer and without biases. Accuracies are shares, sizes bytes.
    """
    folder = out / run.place
    file, kept = folder / "model.pwfn", record(folder)
    compressed = load(file)
    network = network_of(compressed, run.network.name)
    layout = Layout.of(network)
    summary = summarise(layout, _values(compressed, layout, file))
    marks = Marks.of(compressed, any(entry.attention for entry in layout.entries))
    if run.config.method is MethodName.BASELINE:  # as in the paper: what is not quantised has no codebook
        marks = Marks(Mark.NONE, Mark.NONE, Mark.NONE)
    drawn = None
    has_posterior = compressed.weight_sigma is not None or compressed.centre_sigma is not None
    if run.plan.samples and has_posterior:
        drawn = (ensemble or _ensemble)(file, run, device)
    return {
        "name": run.name,
        "model": run.network.name,
        "method": run.row.method,
        "label": run.label,
        "preset": run.row.preset or "recommended",
        "seed": run.seed,
        "top1_start": _metric(kept["before"]),
        "top1": _metric(kept["after"]),
        "top1_ensemble": drawn,
        "samples": run.plan.samples,
        "entropy_bits": summary.whole.entropy_bits,
        "unique": summary.whole.unique,
        "inner_entropy_bits": summary.inner.entropy_bits,
        "inner_unique": summary.inner.unique,
        "file_bytes": file.stat().st_size,
        "fp32_bytes": fp32_bytes(network),
        "codebooks": len(compressed.codebooks),
        "separate": asdict(marks),
        "epochs": kept["epochs"],
        "seconds": kept["seconds"],
        "device": kept["machine"]["device"],
        "versions": kept["machine"]["versions"],
        "commit": commit,
        "data": run.plan.data,
        "holdout": run.plan.holdout,
        "settings": kept["identity"]["settings"],
        "file_sha256": digest(file),
    }


def fp32_bytes(network: nn.Module) -> int:
    """A network's parameters and buffers, tied ones once, floating-point numbers in at most 4 bytes.

    >>> fp32_bytes(nn.Linear(3, 2))
    32
    """
    once: dict[int, Tensor] = {
        id(tensor): tensor for tensor in network.state_dict(keep_vars=True).values() if _is_tensor(tensor)
    }
    return sum(
        t.numel() * (min(t.element_size(), 4) if t.is_floating_point() else t.element_size())
        for t in once.values()
    )


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)  # a module's extra state is not


def _values(compressed: Compressed, layout: Layout, file: Path) -> Tensor:
    """The decoded weights that the whole network's layout covers, by name, as one vector.

    By name, and not by way of the network: a method may have added modules of its own to it.
    """
    state = compressed.dense_state_dict()
    missing = [entry.name for entry in layout.entries if entry.name not in state]
    if missing:
        raise FileError(f"{file}: has no {missing[0]}, which the network has: it is of another network")
    return torch.cat([state[entry.name].to(layout.dtype).reshape(-1) for entry in layout.entries])


def _metric(scores: Mapping[str, Any] | None) -> float | None:
    return scores["metric"] if scores is not None else None


def _ensemble(file: Path, run: Run, device: str | None) -> float:
    plan = run.plan
    options = RunOptions(run.network.name, plan.data, file.parent, "", device=device)
    options = replace(options, batch_size=plan.batch_size, holdout=plan.holdout)
    return float(evaluate_file(file, options, samples=run.plan.samples, seed=run.seed)["ensemble"])
