"""Loaders whose epochs can start at any batch, and how an epoch is divided among processes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pwfn.config.seeds import generator_from

_TENSOR_BATCH = 64  # examples per batch, where the data are one tensor


class Epochs(ABC):
    """A loader whose batches depend only on the epoch number and the position within the epoch.

    A killed run resumes with ``epoch(number, start)`` and gets the batches that it would have got. A
    subclass reads no random state except its own seed, and changes none.
    """

    _passes: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches in an epoch."""

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch ``number``, beginning with batch ``start``."""

    def __iter__(self) -> Iterator[Any]:
        """Epoch 0 at the first call, epoch 1 at the second, and so on."""
        number, self._passes = self._passes, self._passes + 1
        return self.epoch(number)


@dataclass(eq=False)
class Repeated(Epochs):
    """Any iterable of batches as :class:`Epochs`: an epoch is one pass over it.

    The first ``start`` batches of a pass are read and dropped. If the iterable or its sampler has
    ``set_epoch``, it is called with the epoch number. Epochs repeat only if the iterable does: a
    DataLoader that shuffles with torch's global random state does not.

    With several processes each takes every ``world``-th batch: with ``exact`` (testing) every batch is
    used, without it (training) every process gets the same number of batches.

    >>> list(Repeated([10, 11, 12]).epoch(0, start=1))
    [11, 12]
    """

    iterable: Iterable[Any]
    rank: int = 0
    world: int = 1
    exact: bool = False

    def __len__(self) -> int:
        if not isinstance(self.iterable, Sized):
            raise TypeError(f"{type(self.iterable).__name__} has no length")
        whole = len(self.iterable)
        return len(range(self.rank, whole, self.world)) if self.exact else whole // self.world

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """One pass over the iterable, without its first ``start`` batches."""
        sampler, batch_sampler = (getattr(self.iterable, n, None) for n in ("sampler", "batch_sampler"))
        for owner in (self.iterable, sampler, batch_sampler):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(number)
        stop = None
        if self.world > 1 and not self.exact and isinstance(self.iterable, Sized):
            stop = len(self) * self.world
        first = self.rank + start * self.world
        return itertools.islice(iter(self.iterable), first, stop, self.world)


def epoch_order(count: int, seed: int, number: int, *, shuffle: bool) -> Tensor:
    """The order of ``count`` examples in epoch ``number``, the same in every process."""
    if not shuffle:
        return torch.arange(count)
    return torch.randperm(count, generator=generator_from("order", seed, number))


def shares(count: int, batch_size: int, rank: int, world: int, *, exact: bool) -> list[slice]:
    """The positions of an epoch's order that each batch of one process takes.

    Batch b of all processes together takes the b-th ``batch_size * world`` positions, so two processes
    with batches of 64 see the same examples as one with batches of 128. Without ``exact`` (training)
    every process has the same number of examples in every batch; fewer than ``world`` examples of an
    epoch are left out. With ``exact`` (testing) every example goes to one process, and all processes have
    the same number of batches if ``batch_size`` is at least 2.

    >>> [shares(7, 2, rank, 2, exact=False) for rank in range(2)]
    [[slice(0, 2, None), slice(4, 5, None)], [slice(2, 4, None), slice(5, 6, None)]]
    >>> [shares(7, 2, rank, 2, exact=True) for rank in range(2)]
    [[slice(0, 2, None), slice(4, 5, None)], [slice(2, 4, None), slice(5, 7, None)]]
    """
    bounds = [*range(0, count, batch_size * world), count]
    if exact and len(bounds) > 2 and bounds[-1] - bounds[-2] < world:
        bounds[-2] = (bounds[-3] + bounds[-1]) // 2  # the last batch alone has too few for all processes
    found = []
    for first, end in itertools.pairwise(bounds):
        size = end - first if exact else (end - first) // world * world
        share = slice(first + size * rank // world, first + size * (rank + 1) // world)
        if share.stop > share.start:
            found.append(share)
    return found


def batched(loader: Iterable[Any]) -> Iterable[Any]:
    """A loader as it is; a tensor or array of examples, or a pair of those and one label each, as batches.

    >>> [len(labels) for _, labels in batched((torch.zeros(70, 3), torch.zeros(70)))]
    [64, 6]
    """
    if isinstance(loader, (tuple, list)) and _is_pair(*loader[:3]):
        return list(zip(*(as_tensor(each).split(_TENSOR_BATCH) for each in loader), strict=True))
    loader = as_tensor(loader)
    return list(loader.split(_TENSOR_BATCH)) if isinstance(loader, Tensor) else loader


def _is_pair(*parts: Any) -> bool:
    """Whether these are examples and one number for each, and so cannot be two batches."""
    if len(parts) != 2 or not all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return False
    return parts[0].ndim > 1 == parts[1].ndim and len(parts[0]) == len(parts[1])


def as_tensor(value: Any) -> Any:
    """An array of numbers as a tensor, which is a copy: arrays may be read-only; else the value."""
    return torch.tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" else value
