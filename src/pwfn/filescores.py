"""What the network in a file gets right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn.batches import Source
from pwfn.compressed import Compressed
from pwfn.data import Data
from pwfn.errors import DataError, FileError
from pwfn.fileformat import load
from pwfn.inspection import inspect
from pwfn.opening import check_classes, network_of, open_data, preparation_of
from pwfn.options import RunOptions
from pwfn.scoring import Objective, Scores, accuracy, evaluate, evaluating
from pwfn.sections import Precision
from pwfn.team import Team, team_for

_KEPT = ("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "fp32_bytes")


def evaluate_file(path: Path, options: RunOptions, *, samples: int = 0, seed: int = 0) -> dict[str, Any]:
    """What a file's network gets right on data by name, beside its size.

    The network is the one that the file names, unless ``options.model`` is another. With ``samples``,
    also what the mean prediction of so many draws from its posterior gets right.
    """
    compressed = load(path)
    network = network_of(compressed, options.model)
    alone = team_for(options.device, alone=True)
    device = alone.device
    source = open_data(options, preparation_of(compressed, options.model, network), seed, alone)
    check_classes(compressed.apply_to(network).to(device), source, device)
    facts = {"after": scores(network, source, alone).to_dict(), **sizes(path)}
    if samples:
        facts["ensemble"] = _ensemble(compressed, network, source, device, samples, seed)
    return facts


def scores(model: nn.Module, source: Data, team: Team) -> Scores:
    """Cross entropy and accuracy on the test data, in float32."""
    tests = Source("test data", source.test, team.device)
    return evaluate(model, tests, Objective(F.cross_entropy), accuracy, Precision.FP32, team=team)


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


@torch.no_grad()
def _ensemble(
    compressed: Compressed, network: nn.Module, source: Data, device: torch.device, samples: int, seed: int
) -> float:
    """Accuracy of the mean softmax over draws from the posterior that the file keeps."""
    generator = torch.Generator().manual_seed(seed)
    tests = Source("test data", source.test, device)
    total: torch.Tensor | None = None
    with evaluating(network):
        for _ in range(samples):
            network.load_state_dict({**network.state_dict(), **compressed.sample(generator)})
            drawn = torch.cat([batch.through(network, "test data").softmax(1) for batch in tests.batches()])
            total = drawn if total is None else total + drawn
    if total is None:
        raise DataError(f"samples is {samples}: allowed is at least 1")
    targets = torch.cat([batch.target for batch in tests.batches()])
    return float((total.argmax(1) == targets).double().mean())


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
