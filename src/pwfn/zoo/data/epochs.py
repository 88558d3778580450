"""Epochs that can be taken up at any batch, and how they are divided over processes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pwfn.config.seeds import generator_from
from pwfn.errors import DataError


@runtime_checkable
class Epochs(Protocol):
    """Batches that are a pure function of the epoch's number and of their position in it.

    A run that was killed asks for ``epoch(number, start)`` and sees the very batches that it would
    have seen. No random state but the loader's own seed is read, and none is changed.
    """

    def __len__(self) -> int:
        """Batches in an epoch."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch ``number``, from batch ``start`` on."""

    def __iter__(self) -> Iterator[Any]:
        """Epoch 0 at the first call, epoch 1 at the second, and so on."""


class Loader(ABC):
    """Gives :class:`Epochs` the look of a DataLoader: each ``iter`` begins the next epoch."""

    _passes: int = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch ``number``, from batch ``start`` on."""

    def __iter__(self) -> Iterator[Any]:
        number, self._passes = self._passes, self._passes + 1
        return self.epoch(number)


@dataclass(eq=False)
class Repeated(Loader):
    """Any iterable of batches as :class:`Epochs`: an epoch is one pass over it.

    The first ``start`` batches of a pass are made and dropped, and a pass is told its number
    where the iterable or its sampler has ``set_epoch``. Whether epoch 3 gives the same batches
    each time is the user's: a DataLoader that shuffles from torch's global random state does not.

    Over several processes each takes every ``world``-th batch: with ``exact`` all of them, as for
    testing; without, as for training, as many on each process.

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
        """One pass over the iterable, less its first ``start`` batches."""
        sampler, batch_sampler = (getattr(self.iterable, n, None) for n in ("sampler", "batch_sampler"))
        for told in (self.iterable, sampler, batch_sampler):
            if callable(set_epoch := getattr(told, "set_epoch", None)):
                set_epoch(number)
        stop = None
        if self.world > 1 and not self.exact and isinstance(self.iterable, Sized):
            stop = len(self) * self.world
        first = self.rank + start * self.world
        return itertools.islice(iter(self.iterable), first, stop, self.world)


def as_epochs(loader: Any, rank: int = 0, world: int = 1, *, exact: bool = False) -> Epochs:
    """The loader itself where it is :class:`Epochs` already, else :class:`Repeated` over it.

    >>> len(as_epochs([1, 2, 3]))
    3
    """
    if isinstance(loader, Epochs) and callable(loader.epoch):
        return loader
    if not isinstance(loader, Iterable):
        raise DataError(f"a loader is a {type(loader).__name__}: allowed is an iterable of batches")
    return Repeated(loader, rank, world, exact)


def epoch_order(count: int, seed: int, number: int, *, shuffle: bool) -> Tensor:
    """The order in which epoch ``number`` goes through ``count`` examples, the same on every process."""
    if not shuffle:
        return torch.arange(count)
    return torch.randperm(count, generator=generator_from("order", seed, number))


def shares(count: int, batch_size: int, rank: int, world: int, *, exact: bool) -> list[slice]:
    """Which positions of an epoch's order each batch of one process has.

    Batch b of all processes together is the b-th run of ``batch_size * world`` positions, so that
    two processes with 64 see together what one sees with 128. Without ``exact`` (training)
    a process has as many examples as any other in every batch, and fewer than ``world`` are left
    out of an epoch. With it (testing) each goes to one process, and no process has a batch
    less than another as long as batches are of two or more.

    >>> [shares(7, 2, rank, 2, exact=False) for rank in range(2)]
    [[slice(0, 2, None), slice(4, 5, None)], [slice(2, 4, None), slice(5, 6, None)]]
    >>> [shares(7, 2, rank, 2, exact=True) for rank in range(2)]
    [[slice(0, 2, None), slice(4, 5, None)], [slice(2, 4, None), slice(5, 7, None)]]
    """
    bounds = [*range(0, count, batch_size * world), count]
    if exact and len(bounds) > 2 and bounds[-1] - bounds[-2] < world:
        bounds[-2] = (bounds[-3] + bounds[-1]) // 2  # the last run alone has too few for all
    found = []
    for first, end in itertools.pairwise(bounds):
        size = end - first if exact else (end - first) // world * world
        share = slice(first + size * rank // world, first + size * (rank + 1) // world)
        if share.stop > share.start:
            found.append(share)
    return found


def check_share(batch_size: int, rank: int, world: int) -> None:
    """Refuse a batch size or a place among the processes that cannot be."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"batch_size is {batch_size!r}: allowed is a whole number of at least 1")
    if not 0 <= rank < world:
        raise DataError(f"rank is {rank} of {world} processes: allowed is 0 to {world - 1}")
