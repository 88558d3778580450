"""From names to things: the network with its weights, the data, and what tells one run from another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.randomness import seeded
from pwfn.config import Config
from pwfn.errors import FileError
from pwfn.file.compressed import Compressed
from pwfn.run.options import RunOptions
from pwfn.zoo import data, models
from pwfn.zoo.data import Data, DataOptions
from pwfn.zoo.models import DataConfig


@dataclass(frozen=True)
class Opened:
    """Everything that a run needs, found and checked."""

    model: nn.Module
    preparation: DataConfig  # of images
    data: Data
    classes: int | None  # where the network has not its usual number of them
    identity: dict[str, Any]  # what a run must have in common with the one it goes on from


def opened(options: RunOptions, config: Config, distributed: Distributed) -> Opened:
    """The network and the data of a run; labels are checked against the network's outputs."""
    model, preparation, classes, digest = _network(options)
    source = open_data(options, preparation, config.seed, distributed)
    advice = "for another number of outputs say --classes"
    check_classes(model.to(distributed.device), source, distributed.device, advice)
    identity = {
        "model": {"name": options.model, "weights": digest},
        "data": {"content": source.fingerprint, "batch_size": options.batch_size},
        "processes": distributed.world,
        "settings": config.to_dict(),
    }
    return Opened(model, preparation, source, classes, identity)


def _network(options: RunOptions) -> tuple[nn.Module, DataConfig, int | None, str]:
    """The network with its weights, how its images are prepared, its classes, a digest of the weights."""
    notes: dict[str, str] = {}
    if options.weights == "pretrained":
        classes = options.classes
        model = models.create(options.model, pretrained=True, classes=classes)
    else:
        is_file = options.weights != "random"
        noted = models.noted_classes(options.weights) if is_file and options.model in models.OWN else None
        classes = options.classes or noted
        with seeded(0, torch.device("cpu")):  # random weights are for trying out: the same each time
            model = models.create(options.model, classes=classes)
        if is_file:
            notes = models.load_weights(model, options.weights)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return model, models.data_config(options.model, model, notes), classes, digest.hexdigest()[:16]


def network_of(compressed: Compressed, name: str) -> nn.Module:
    """An untrained network of a file's architecture: the one named or, for no name, that the file names."""
    classes = models.recorded_classes(compressed.record)
    return models.create(name or models.recorded(compressed.record), classes=classes)


def preparation_of(compressed: Compressed, name: str, network: nn.Module) -> DataConfig:
    """As the run that wrote the file prepared its images, or as is usual for the network."""
    usual = models.data_config(name or models.recorded(compressed.record), network)
    kept = compressed.record.get("preparation")
    if not isinstance(kept, dict):
        return usual
    try:
        changed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()}
        return replace(usual, **changed)
    except TypeError:
        raise FileError(f"the file's record has an unknown way to prepare images: {kept!r}") from None


def open_data(options: RunOptions, preparation: DataConfig, seed: int, distributed: Distributed) -> Data:
    """The data by name, prepared as the network needs them; a process's share where there are several."""
    return data.open_source(
        options.data,
        DataOptions.prepared(
            preparation,
            batch_size=options.batch_size,
            test_batch_size=options.test_batch_size,
            seed=seed,
            device=distributed.device,
            rank=distributed.rank,
            world=distributed.world,
            workers=options.workers,
            limit=options.limit,
            holdout=options.holdout,
        ),
    )


@torch.no_grad()
def check_classes(model: nn.Module, source: Data, device: torch.device, advice: str = "") -> None:
    """Labels against what the model gives for one example, before hours are spent on it."""
    was_training = model.training
    for batch in Source("test data", source.test, device).batches():
        output = batch.first(1).through(model.eval(), "test data, batch 1")
        if isinstance(output, torch.Tensor) and output.dim() == 2:
            source.check_labels(output.shape[1], advice)
        break
    model.train(was_training)
