"""Faster steps: images in channels-last order, a step as a CUDA graph without Python.

A recording contains kernels, not the program. Where a model draws random numbers on the host (Python's,
numpy's, torch's on the CPU), counts its calls in an attribute, or reads a value from the device, steps run as
usual, with a warning. Dropout and the like draw new numbers in every replay. A change in Python that leaves
no such trace needs ``training.cuda_graph = false``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.randomness import random_states, restore_random_states, undisturbed
from pwfn.config import Precision
from pwfn.errors import DataError, PwfnError, cause

_MOST_SHAPES = 100  # of batches, none of which came often enough to be recorded
_WARMUP_STEPS = 3  # libraries initialise themselves in their first calls, which cannot be recorded
LOGGER = logging.getLogger("pwfn")
T = TypeVar("T")


@torch.no_grad()
def channels_last(source: Source, model: Callable[..., Any], precision: Precision) -> Source:
    """For bf16 and fp16, the source with images in channels-last order, if the model takes them so.

    Convolutions of these types are faster in this order, but ``x.view(len(x), -1)`` of a feature map is an
    error. The model, in evaluation mode, is tried on one image.

    >>> source = Source("images", [torch.zeros(1, 2, 2, 2)], torch.device("cpu"))
    >>> channels_last(source, torch.nn.Identity(), Precision.BF16).channels_last
    True
    >>> channels_last(source, lambda x: x.view(-1), Precision.BF16).channels_last
    False
    """
    if precision is Precision.FP32:
        return source
    arranged = replace(source, channels_last=True)
    with undisturbed(source):
        batch = next(arranged.apart().batches(0), None)
        try:
            if batch is not None:
                batch.first(1).through(model, source.name)
        except DataError:
            return source
    return arranged


class RecordedStep(Generic[T]):
    """A step on batches of one shape, by replaying a graph.

    The first few steps, and batches of another shape, run as usual; all do once a recording has failed.

    Args:
        work: the whole step on one batch. What it returns must be tensors, which a replay overwrites.
        clear: called before a step is recorded: gradients of earlier steps must be gone, so that backward
            allocates them in the memory of the graph.
        watched: modules and other objects whose numbers a step must not change, such as a counter of calls.
    """

    def __init__(
        self, work: Callable[[Batch, str], T], clear: Callable[[], None], watched: Iterable[object] = ()
    ) -> None:
        self._work, self._clear, self._watched = work, clear, list(watched)
        self._seen: Counter[Any] = Counter()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape: Any = None
        self.failed = False

    def __call__(self, batch: Batch, where: str) -> T:
        """What ``work`` returns for this batch."""
        shape = batch.shape()
        tensors = batch.tensors()
        if not tensors:
            return self._work(batch, where)
        # A capture sees only the current device, and the network may be on another one.
        with torch.cuda.device_of(tensors[0]):
            if self._graph is None and not self.failed:
                self._seen[shape] += 1
                if self._seen[shape] > _WARMUP_STEPS:
                    self._record(batch, shape, where)
                elif len(self._seen) > _MOST_SHAPES:
                    self._give_up(where, "nearly every batch has a shape of its own", random_states())
            if self._graph is None or shape != self._shape:
                return self._work(batch, where)
            for static, given in zip(self._batch.tensors(), tensors, strict=True):
                static.copy_(given, non_blocking=True)
            self._graph.replay()
            return self._result

    def _record(self, batch: Batch, shape: Any, where: str) -> None:
        self._clear()
        gc.collect()  # what is left of earlier passes belongs to a stream that capture cannot wait for
        static, graph, stream = batch.cloned(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        before, numbers = random_states(), self._numbers()
        try:
            # Only this thread's calls count: a thread that pins memory for a loader must not end the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = self._work(static, where)
        except (RuntimeError, PwfnError) as error:
            _recover(stream)
            first = error.__context__  # leaving the capture fails too, and says less
            self._give_up(where, cause(first if isinstance(first, Exception) else error), before)
            return
        pairs = zip(numbers, self._numbers(), strict=True)
        changed = [name for own, now in pairs for name in own if own[name] != now.get(name)]
        if changed or _drew_on_the_host(before):
            for thing, own in zip(self._watched, numbers, strict=True):
                vars(thing).update(own)
            why = f"changes {changed[0]} in every step" if changed else "draws random numbers on the host"
            self._give_up(where, f"the model {why}", before)
            return
        self._graph, self._shape, self._batch, self._result = graph, shape, static, result

    def _numbers(self) -> list[dict[str, Any]]:
        """Numbers and words among the attributes of what is watched."""
        kinds = (bool, int, float, str)
        return [{k: v for k, v in vars(each).items() if isinstance(v, kinds)} for each in self._watched]

    def _give_up(self, where: str, why: str, states: dict[str, Any]) -> None:
        restore_random_states(states)  # the step is taken again, as usual
        self._clear()
        self.failed = True
        LOGGER.warning(
            "%s: steps are not recorded as a CUDA graph, so that small networks train more slowly: %s. The "
            "result is the same; training.cuda_graph = false silences this",
            *(where, why),
        )


def _drew_on_the_host(before: dict[str, Any]) -> bool:
    """Whether a generator of the host has moved since then: a replay would not move it."""
    now = random_states()
    numbers = [state["numpy"][2:] + state["python"] for state in (before, now)]
    pairs = [(state["torch"], state["numpy"][1]) for state in (before, now)]
    return numbers[0] != numbers[1] or not all(map(torch.equal, *pairs))


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
