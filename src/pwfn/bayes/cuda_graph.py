"""Forward and backward of a step captured as a CUDA graph and replayed: no time is spent in Python.

Kernels are captured, not the program. A model whose forward pass differs from call to call (by Python's own
random numbers, say) must not be captured. Dropout and the like draw anew at every replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pwfn.bayes.batches import Batch
from pwfn.errors import ConfigError, cause

_WARM_STEPS = 3  # libraries set themselves up in their first calls, which cannot be recorded


class GraphedStep:
    """Loss and gradient of batches of one shape; those of another shape are computed as usual.

    The first few steps are too. ``work`` computes the loss of a batch and goes backward from it, which
    leaves gradients with the ``parameters``; ``collect`` then takes those that do not stay with one.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        work: Callable[[Batch, str], Tensor],
        collect: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self._parameters, self._work = list(parameters), work
        self._collect = collect or (lambda: None)
        self._seen: dict[Any, int] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape: Any = None

    def __call__(self, batch: Batch, where: str) -> tuple[Tensor, Tensor | None]:
        """The loss, and what was collected; the other gradients lie with the parameters."""
        shape = batch.shape()
        if self._graph is None:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] > _WARM_STEPS:
                self._record(batch, where)
        if self._graph is None or shape != self._shape:
            self._forget()
            return self._work(batch, where), self._collect()
        for kept, given in zip(self._batch.tensors(), batch.tensors(), strict=True):
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss, self._gradient

    def _record(self, batch: Batch, where: str) -> None:
        self._forget()  # so that backward makes gradients of its own, which stay in place
        self._batch = batch.cloned()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                self._loss = self._work(self._batch, where)
                self._gradient = self._collect()
        except RuntimeError as error:
            _leave_as_it_was(stream)
            raise ConfigError(
                f"{where}: the step cannot be captured as a CUDA graph ({cause(error)}): set "
                "training.cuda_graph = false"
            ) from error
        self._gradients = [(p, p.grad) for p in self._parameters]
        self._graph, self._shape = graph, batch.shape()

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _leave_as_it_was(stream: torch.cuda.Stream) -> None:
    """After a recording that failed: the caller's stream and torch's random numbers.

    torch goes back to that stream only where a recording ends well; and so, where it keeps one mark for all
    recordings, is its generator released, from which the caller could not draw until then. So one is made
    that does, of one kernel, because torch warns of an empty one.
    """
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # the error that is on its way says more than a second one
        room = torch.zeros(1, device=stream.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            room.zero_()
