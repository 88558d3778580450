"""The distinct values of a long vector that has few of them, without sorting it."""

from __future__ import annotations

import torch
from torch import Tensor

_SHORT = 2**16  # below it, or on a GPU, a sort costs nothing
_SAMPLE = 2**14
_MANY = 2**13  # with more distinct values than these a sort is quicker


def distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values, ascending, and for each element the index of its own; as ``torch.unique``.

    The values of a sample are taken for all there are; elements that prove to be others add theirs.

    >>> book, index = distinct(torch.tensor([0.5, -0.25, 0.5]))
    >>> book.tolist(), index.tolist()
    ([-0.25, 0.5], [1, 0, 1])
    """
    if values.device.type != "cpu" or values.numel() < _SHORT:
        book, index = torch.unique(values, return_inverse=True)
        return book, index
    book = torch.unique(values[:: values.numel() // _SAMPLE])
    while book.numel() <= _MANY:
        index = torch.bucketize(values, book).clamp_max_(book.numel() - 1)
        others = values[book[index] != values]
        if others.numel() == 0:
            return book, index
        book = torch.unique(torch.cat((book, others[:_SHORT])))
    book, index = torch.unique(values, return_inverse=True)
    return book, index


def counted(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values, ascending, and how often each occurs.

    >>> [column.tolist() for column in counted(torch.tensor([0.5, -0.25, 0.5]))]
    [[-0.25, 0.5], [1, 2]]
    """
    book, index = distinct(values)
    return book, torch.bincount(index, minlength=book.numel())
