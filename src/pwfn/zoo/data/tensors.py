"""Data that fits in memory: it lives on the device, and is shuffled and augmented there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.config.seeds import generator_from
from pwfn.errors import DataError
from pwfn.zoo.data.epochs import Loader, check_share, epoch_order, shares


class Normaliser:
    """Bytes to shares of 255, then ``(x - mean) / std`` for each channel.

    The constants lie on the device from the start: to send them with every batch would make the
    host wait for the device.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.constants = torch.tensor([mean, std], device=device).view(2, 1, -1, 1, 1) if mean else None

    def __call__(self, images: Tensor) -> Tensor:
        """The images as the network takes them."""
        if images.dtype == torch.uint8:
            images = images.float() / 255
        return images if self.constants is None else (images - self.constants[0]) / self.constants[1]


@dataclass(eq=False)
class TensorLoader(Loader):
    """Batches from tensors on one device; reads like a DataLoader, without worker processes.

    ``images`` are N×C×H×W, float or uint8 (then scaled to [0, 1]); ``mean`` and ``std`` are per
    channel. With ``augment`` every image is padded by 4, cropped at random and flipped half of
    the time. The order comes from (seed, epoch), the augmentation from (seed, epoch, batch,
    rank), so that an epoch can be taken up at any batch at no cost. A loader that shuffles
    divides each epoch evenly over ``world`` processes, one that does not divides it exactly.

    >>> loader = TensorLoader(torch.zeros(5, 1, 2, 2), torch.arange(5), batch_size=2)
    >>> [len(target) for _, target in loader], len(loader)
    ([2, 2, 1], 3)
    >>> [target.tolist() for _, target in loader.epoch(7, start=1)]
    [[2, 3], [4]]
    """

    images: Tensor
    targets: Tensor
    batch_size: int = 128
    shuffle: bool = False
    augment: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    seed: int = 0
    rank: int = 0
    world: int = 1
    _shares: list[slice] = field(init=False, repr=False)
    _normalise: Normaliser = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.images) != len(self.targets):
            raise DataError(
                f"{len(self.images):,} images and {len(self.targets):,} targets: they must be as many"
            )
        check_share(self.batch_size, self.rank, self.world)
        channels = self.images.shape[1] if self.images.dim() > 1 else 0
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, channels):
            raise DataError(
                f"mean has {len(self.mean)} and std {len(self.std)} numbers: allowed is one of each per "
                f"channel ({channels}), or none"
            )
        count = len(self.images)
        self._shares = shares(count, self.batch_size, self.rank, self.world, exact=not self.shuffle)
        self._normalise = Normaliser(self.mean, self.std, self.images.device)

    def __len__(self) -> int:
        return len(self._shares)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number``, from batch ``start`` on; those before are not made."""
        order = epoch_order(len(self.images), self.seed, number, shuffle=self.shuffle)
        order = order.to(self.images.device)
        for batch in range(start, len(self._shares)):
            chosen = order[self._shares[batch]]
            images = self.images[chosen]
            if self.augment:
                generator = generator_from("augment", self.seed, number, batch, self.rank)
                images = crop_and_flip(images, generator)
            yield self._normalise(images), self.targets[chosen]


def crop_and_flip(images: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """A random crop of each padded image, mirrored half of the time, in one gather.

    What is drawn, on the CPU, goes to the device in one small copy for which nothing waits.

    >>> crop_and_flip(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    n, channels, height, width = images.shape
    device = images.device
    most = torch.tensor([2 * pad + 1, 2 * pad + 1, 2]).view(3, 1)
    drawn = (torch.rand(3, n, generator=generator, dtype=torch.float64) * most).long()
    top, left, mirrored = drawn.to(device, non_blocking=True).view(3, n, 1)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    columns = torch.where(mirrored == 1, columns.flip(1), columns)
    each = torch.arange(n, device=device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, channels, 1, 1)
    padded = F.pad(images, (pad,) * 4)
    return padded[each, channel, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]


class Split(NamedTuple):
    """Loaders for training (shuffled) and for testing."""

    train: TensorLoader
    test: TensorLoader
