"""Small models and data that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.run.options import RunOptions

# Runs: resumable data, a network with BatchNorm and dropout, a run by name


class Shuffled:
    """Batches for ``normalised_classifier`` whose order is a function of the epoch only."""

    def __init__(self, batches: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
            for _ in range(batches)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(number)).tolist()
        return iter([self.batches[i] for i in order[start:]])


def normalised_classifier() -> nn.Module:
    """For 6 numbers: BatchNorm and dropout between two linear layers; 3 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


def digits_run(folder: Path, **changes: Any) -> RunOptions:
    """A run of an untrained network on digits, with a checkpoint after nearly every step."""
    usual = {"model": "digits_resnet", "data": "digits", "weights": "random", "device": "cpu"}
    return RunOptions(out=folder, **{**usual, "batch_size": 64, "checkpoint_minutes": 1e-3, **changes})
