"""Scores of the network in a .pwfn file on data by name, for ``pwfn evaluate`` and at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed, distributed_for
from pwfn.bayes.objective import LossFn, Objective, divergence
from pwfn.bayes.predictive import fit_posterior
from pwfn.config import Precision
from pwfn.errors import DataError, FileError, PwfnError
from pwfn.evaluate.inspect import inspect
from pwfn.evaluate.score import Scores, accuracy, mean_scores
from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.file.storage import check_writable
from pwfn.run.options import RunOptions
from pwfn.run.resolve import (
    check_classes,
    compared_by,
    data_options,
    network_of,
    preparation_of,
    with_weights,
)
from pwfn.zoo import models
from pwfn.zoo.data import Data, DataOptions, open_source
from pwfn.zoo.models import DataConfig

_SIZES = ("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "fp32_bytes")


@dataclass(frozen=True)
class OpenFile:
    """A file with its network and data."""

    compressed: Compressed
    network: nn.Module  # with the file's weights, on the device
    data: Data
    labelled: bool
    images: DataOptions  # how images of other data are prepared
    distributed: Distributed

    def scores(self, model: str = "", original: str | None = None) -> Scores:
        """On the test data, in float32: cross entropy and accuracy; without labels KL and agreement.

        Where the outputs are no class scores, their squared error.
        """
        objective = Objective(F.cross_entropy)
        metric: LossFn | None = accuracy
        if not self.labelled:
            if original is None:
                raise DataError(
                    f"{self.data.name} has no labels, so that the network is compared with the original one: "
                    "give its weights with --weights FILE, or --weights pretrained"
                )
            network = original_of(self.compressed, model, original)
            network = network.to(self.distributed.device).eval()
            compare = compared_by(network, self.data, self.distributed.device)
            objective = Objective(divergence if compare is True else compare or F.mse_loss, network)
            metric = accuracy if compare is True else None
        tests = Source("test data", self.data.test, self.distributed.device)
        return mean_scores(
            self.network, tests, objective, metric, Precision.FP32, distributed=self.distributed
        )


def original_of(compressed: Compressed, name: str, weights: str) -> nn.Module:
    """The network of a file with its weights before compression: a file, "pretrained" or "random"."""
    classes = models.recorded_classes(compressed.record)
    return with_weights(name or models.recorded(compressed.record), weights, classes)[0]


def _opened(path: Path, model: str) -> tuple[Compressed, nn.Module, DataConfig]:
    """A file, its network with the file's weights, and how the images of that are prepared."""
    compressed = load(path)
    try:
        network = compressed.apply_to(network_of(compressed, model))
        return compressed, network, preparation_of(compressed, model, network)
    except PwfnError as error:
        raise type(error)(f"{path}: {error}") from error


def open_file(path: Path, options: RunOptions, seed: int, *, testing: bool = True) -> OpenFile:
    """A file, the network it names with its weights, and data by name; ``testing``: only to test on."""
    compressed, network, preparation = _opened(path, options.model)
    alone = distributed_for(options.device, alone=True)
    images = replace(data_options(options, preparation, seed, alone), testing=testing)
    data = open_source(options.data, images)
    labelled = check_classes(network.to(alone.device), data, alone.device)
    return OpenFile(compressed, network, data, labelled, images, alone)


def open_files(paths: Sequence[Path], options: RunOptions, seed: int) -> list[OpenFile]:
    """Several files whose networks take the same images; the data are opened once."""
    first = open_file(paths[0], options, seed)
    found = [first]
    for path in paths[1:]:
        compressed, network, preparation = _opened(path, options.model)
        if preparation != preparation_of(first.compressed, options.model, first.network):
            raise DataError(
                f"{path}: takes images that are prepared otherwise than for {paths[0]}: evaluate it alone"
            )
        place = first.distributed.device
        check_classes(network.to(place), first.data, place)
        found.append(replace(first, compressed=compressed, network=network))
    return found


def fit_file(
    path: Path, out: Path, options: RunOptions, *, seed: int = 0, original: str | None = None
) -> dict[str, Any]:
    """Fit the predictive sigma of a file on training data by name, and write the file with it to ``out``.

    With ``options.holdout``, on training images that the network has not seen; see
    :func:`pwfn.fit_posterior`.
    """
    check_writable(out)
    file, unseen = open_file(path, options, seed, testing=False), options.holdout > 0
    fitted = fit_posterior(
        *(file.compressed, file.network, file.data.test if unseen else file.data.train),
        original=original_of(file.compressed, options.model, original) if original is not None else None,
        unseen=unseen,
        seed=seed,
    )
    before = path.stat().st_size  # ``out`` may be the same file
    size = fitted.save(out)
    more = size - before
    sentence = f"{out}: {size:,} bytes ({more:+,}); posterior: {fitted.posterior_sentence}"
    sigma = [] if fitted.tensor_sigma is None else fitted.tensor_sigma.tolist()
    return {"file": str(out), "file_bytes": size, "sigma": sigma, "sentence": sentence}


def file_facts(file: OpenFile, path: Path, model: str = "", original: str | None = None) -> dict[str, Any]:
    """The scores of a file, its counts and its bytes."""
    found = inspect(path, zstd=False)
    sizes = {name: getattr(found, name) for name in _SIZES}
    return {"after": file.scores(model, original).to_dict(), **sizes}


def check_same(path: Path, compressed: Compressed) -> None:
    """Read a file back, and raise an error unless it holds exactly the weights that were saved."""
    kept, wanted = load(path).dense_state_dict(), compressed.dense_state_dict()
    if kept.keys() != wanted.keys() or not all(_equal(kept[name], wanted[name]) for name in kept):
        raise FileError(f"{path}: does not hold what was written to it: check the disk, and save again")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Uncompressed tensors may hold NaN, which counts as equal to itself here.
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def summary_line(facts: Mapping[str, Any]) -> str:
    """The figures of a file in one line, with those of the original network if they are known."""
    before, after = facts.get("before"), facts["after"]
    was = f"{before['metric']:.2%} before, " if before and before["metric"] is not None else ""
    now = f"{after['metric']:.2%} after" if after["metric"] is not None else f"loss {after['loss']} after"
    if after.get("of") == "agreement":
        now = f"agreement {after['metric']:.2%} with the original network, KL {after['loss']:.4g}"
    drawn = f" ({facts['ensemble']:.2%} as an ensemble)" if "ensemble" in facts else ""
    return (
        f"{was}{now}{drawn}; {facts['weights']:,} weights with {facts['unique']} values, "
        f"{facts['entropy_bits']:.3f} bits per weight; {facts['file_bytes']:,} bytes, fp32 "
        f"{facts['fp32_bytes']:,}"
    )
