"""Forward and backward of a step recorded as a CUDA graph and replayed: no time is lost in Python.

What is recorded are the kernels, not the program: a model whose forward pass takes another way each
time (by Python's own random numbers, say) must not be recorded. Dropout and the like draw anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pwfn.batches import Batch
from pwfn.errors import ConfigError, cause
from pwfn.flat import FlatOptimizer

_WARM_STEPS = 3  # libraries set themselves up in their first calls, which cannot be recorded


class RecordedStep:
    """Loss and gradient of batches of one shape; those of another shape are computed as usual.

    The first few steps are too. ``work`` computes the loss of a batch and goes backward from it.
    """

    def __init__(self, optimizer: FlatOptimizer, work: Callable[[Batch, str], Tensor]) -> None:
        self._optimizer, self._work = optimizer, work
        self._seen: dict[Any, int] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape: Any = None

    def __call__(self, batch: Batch, where: str) -> tuple[Tensor, Tensor]:
        """The loss, and the gradient as one vector; the others' lies with the parameters."""
        shape = batch.shape()
        if self._graph is None:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] > _WARM_STEPS:
                self._record(batch, where)
        if self._graph is None or shape != self._shape:
            self._optimizer.zero_grad()
            return self._work(batch, where), self._optimizer.collect()
        for kept, given in zip(self._batch.tensors(), batch.tensors(), strict=True):
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss, self._gradient

    def _record(self, batch: Batch, where: str) -> None:
        self._optimizer.zero_grad()  # so that backward makes gradients of its own, which stay in place
        self._batch = batch.cloned()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._loss = self._work(self._batch, where)
                self._gradient = self._optimizer.collect()
        except RuntimeError as error:
            raise ConfigError(
                f"{where}: the step cannot be recorded as a CUDA graph ({cause(error)}): set "
                "training.cuda_graph = false"
            ) from error
        self._gradients = [(p, p.grad) for p in self._optimizer.others]
        self._graph, self._shape = graph, batch.shape()
