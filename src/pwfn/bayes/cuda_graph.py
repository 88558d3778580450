"""Forward and backward of a training step, captured as a CUDA graph and replayed without Python overhead.

A graph contains kernels, not the program: do not capture a model whose forward pass changes from call to call
in Python (by Python's own random numbers, say). Dropout and the like draw new numbers in every replay.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pwfn.bayes.batches import Batch
from pwfn.errors import ConfigError, cause

_WARMUP_STEPS = 3  # libraries initialise themselves in their first calls, which cannot be captured


class GraphedStep:
    """Loss and gradients of batches of one shape, by replaying a graph.

    The first few steps, and batches of another shape, are computed as usual.

    Args:
        parameters: the tensors that backward leaves gradients with.
        work: computes the loss of a batch and calls backward.
        collect: called after ``work``; takes gradients away from the parameters and returns them.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        work: Callable[[Batch, str], Tensor],
        collect: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self._parameters, self._work = list(parameters), work
        self._collect = collect or (lambda: None)
        self._seen: Counter[Any] = Counter()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape: Any = None

    def __call__(self, batch: Batch, where: str) -> tuple[Tensor, Tensor | None]:
        """The loss and what was collected; other gradients are in the parameters' ``grad``."""
        shape = batch.shape()
        if self._graph is None:
            self._seen[shape] += 1
            if self._seen[shape] > _WARMUP_STEPS:
                self._capture(batch, where)
        if self._graph is None or shape != self._shape:
            self._clear_gradients()
            return self._work(batch, where), self._collect()
        for static, given in zip(self._batch.tensors(), batch.tensors(), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss, self._collected

    def _capture(self, batch: Batch, where: str) -> None:
        self._clear_gradients()  # so that backward allocates them in the graph's own memory
        gc.collect()  # what is left of earlier passes belongs to a stream that capture cannot wait for
        self._batch = batch.cloned()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                self._loss = self._work(self._batch, where)
                self._collected = self._collect()
        except RuntimeError as error:
            _recover(stream)
            raise ConfigError(
                f"{where}: the step cannot be captured as a CUDA graph ({cause(error)}): set "
                "training.cuda_graph = false"
            ) from error
        self._gradients = [(p, p.grad) for p in self._parameters]
        self._graph, self._shape = graph, batch.shape()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _recover(stream: torch.cuda.Stream) -> None:
    """Make the device usable after a capture that failed.

    torch returns to the caller's stream, and releases its random generator, only after a capture that
    succeeds. Capturing one small kernel releases the generator; torch warns of an empty graph.
    """
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # the first error is the one to report
        scratch = torch.zeros(1, device=stream.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scratch.zero_()
