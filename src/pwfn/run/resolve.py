"""From names to objects: the network with its weights, the data, and the identity of a run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.objective import LossFn, comparison, evaluating, logits
from pwfn.bayes.randomness import seeded
from pwfn.config import Config
from pwfn.errors import DataError, FileError
from pwfn.file.compressed import Compressed
from pwfn.run.options import RunOptions
from pwfn.zoo import data, models
from pwfn.zoo.data import Data, DataOptions
from pwfn.zoo.models import DataConfig


@dataclass(frozen=True)
class Resolved:
    """Everything that a run needs, found and checked."""

    model: nn.Module
    preparation: DataConfig  # of images
    data: Data
    distill: bool | LossFn  # without labels to train with it learns from the original's outputs: how
    measure: str  # "accuracy"; without labels "agreement" with the original, "" where it gives no classes
    classes: int | None  # if the network does not have its usual number of outputs
    identity: dict[str, Any]  # what a run must have in common with the one that it resumes


def resolve(options: RunOptions, config: Config, distributed: Distributed) -> Resolved:
    """The network and the data of a run; labels are checked against the network's outputs."""
    classes = options.classes
    if options.model in models.OWN and options.weights not in ("pretrained", "random"):
        classes = classes or models.noted_classes(options.weights)
    model, notes = with_weights(options.model, options.weights, classes)
    digest = _digest(model)
    preparation = models.data_config(options.model, model, notes)
    images = data_options(options, preparation, config.seed, distributed)
    source = data.open_source(options.data, images)
    advice = "for another number of outputs give --classes"
    tested = check_classes(model.to(distributed.device), source, distributed.device, advice)
    labelled = source.labelled and tested
    if options.eval_data is not None:
        other = data.open_source(options.eval_data, replace(images, testing=True))
        tested = check_classes(model, other, distributed.device, advice)
        if labelled and not tested:
            raise DataError(f"{other.name} has no labels to score by: give labelled data with --eval-data")
        content = data.fingerprint("two", (source.fingerprint, other.fingerprint))
        name = f"{source.name}, scored on {other.name}"
        source = replace(source, name=name, test=other.test, test_size=other.test_size, fingerprint=content)
    distill = False if labelled else compared_by(model, source, distributed.device)
    measure = "accuracy" if tested else "agreement" if distill is True else ""
    identity = {
        "model": {"name": options.model, "weights": digest},
        "data": {"content": source.fingerprint, "batch_size": options.batch_size},
        "processes": distributed.world,
        "settings": config.to_dict(),
    }
    return Resolved(model, preparation, source, distill, measure, classes, identity)


def with_weights(name: str, weights: str, classes: int | None) -> tuple[nn.Module, dict[str, str]]:
    """A network by name with weights from a file, "pretrained" or "random"; and the metadata of the file."""
    if weights == "pretrained":
        return models.create(name, pretrained=True, classes=classes), {}
    with seeded(0, torch.device("cpu")):  # random weights are the same in every run
        model = models.create(name, classes=classes)
    return model, models.load_weights(model, weights) if weights != "random" else {}


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def network_of(compressed: Compressed, name: str) -> nn.Module:
    """An untrained network of a file's architecture: the one named or, for "", the one the file names."""
    classes = models.recorded_classes(compressed.record)
    return models.create(name or models.recorded(compressed.record), classes=classes)


def preparation_of(compressed: Compressed, name: str, network: nn.Module) -> DataConfig:
    """How images are prepared: as in the run that wrote the file, or as is usual for the network."""
    usual = models.data_config(name or models.recorded(compressed.record), network)
    kept = compressed.record.get("preparation")
    if not isinstance(kept, dict):
        return usual
    try:
        changed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()}
        return replace(usual, **changed)
    except TypeError:
        raise FileError(f"the file's record has an unknown preparation of images: {kept!r}") from None


def data_options(
    options: RunOptions, preparation: DataConfig, seed: int, distributed: Distributed
) -> DataOptions:
    """How images are prepared for the network, batched and divided among the processes."""
    return DataOptions(
        **vars(preparation),
        batch_size=options.batch_size,
        test_batch_size=options.test_batch_size,
        seed=seed,
        device=distributed.device,
        rank=distributed.rank,
        world=distributed.world,
        workers=options.workers,
        limit=options.limit,
        holdout=options.holdout,
    )


@torch.no_grad()
def check_classes(model: nn.Module, source: Data, device: torch.device, advice: str = "") -> bool:
    """Compare the labels with what the model returns for one example, before any work is done.

    Returns whether the test data have labels.
    """
    was_training, labelled = model.training, True
    for batch in Source("test data", source.test, device).batches():
        output = logits(batch.first(1).through(model.eval(), "test data, batch 1"))
        if isinstance(output, torch.Tensor) and output.dim() == 2:
            source.check_labels(output.shape[1], advice)
        labelled = batch.target is not None
        break
    model.train(was_training)
    return labelled


def compared_by(model: nn.Module, source: Data, device: torch.device) -> bool | LossFn:
    """How two networks are compared on unlabelled data: by classes (True), or by a loss of their outputs."""
    with evaluating(model):
        for batch in Source("test data", source.test, device).batches():
            return comparison(replace(batch.first(1), target=None), model)
    return True
