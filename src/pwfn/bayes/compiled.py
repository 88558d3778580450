"""A module's forward pass through ``torch.compile``, where that works; elsewhere as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pwfn.bayes.batches import Batch
from pwfn.errors import cause

_PLAIN_PASSES = 2  # before compiling: the first passes are watched (see network.py and optimizer.py)
LOGGER = logging.getLogger("pwfn")


class Compiled:
    """Calls a module by ``torch.compile`` for inputs of the shape that came first.

    Other shapes, such as the last batch of an epoch, would each take as long to compile: they are computed
    as usual. So is everything once compiling has failed; a warning says why.

    >>> layer = nn.Linear(2, 2)
    >>> torch.equal(Compiled(layer)(torch.ones(1, 2)), layer(torch.ones(1, 2)))
    True
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.failed = module, False
        self._compiled: Callable[..., Any] | None = None
        self._shape: Any = None
        self._passes = 0

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a network is not compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        module, shape = self.module, Batch(args, kwargs, None).shape()
        if self._shape is None:
            self._shape = shape
        if self.failed or shape != self._shape or self._passes < _PLAIN_PASSES:
            self._passes += shape == self._shape
            return module(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(module, dynamic=False)
        try:
            return self._compiled(*args, **kwargs)
        except RuntimeError as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self.failed = True
            LOGGER.warning(
                "the model could not be compiled, so that steps take longer: %s. The result is the same; "
                "training.compile = false silences this",
                cause(error),
            )
            return module(*args, **kwargs)
