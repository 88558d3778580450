"""Examples on their way through two networks at once, which pause at every layer that is not fixed yet."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from pwfn.fixing.conditioning.operations import Normalisation, Place, Product, Watch, Weights


class Inputs(Protocol):
    """Some examples that can be put through a model."""

    @property
    def size(self) -> int:
        """Number of examples."""

    def through(self, model: nn.Module, where: str) -> object:
        """The model's output for them."""


class Lane:
    """A few examples on their way through both networks, the original and its copy."""

    def __init__(
        self, networks: Sequence[tuple[nn.Module, Weights]], batch: Inputs, number: int, stops: Stops
    ) -> None:
        self._original, self._own = (
            Pass(model, weights, batch, stops, number) for model, weights in networks
        )
        self._number, self.size = number, batch.size

    @property
    def found(self) -> Product | Normalisation:
        """The operation at which they wait."""
        assert self._own.found is not None
        return self._own.found

    @property
    def key(self) -> Place | str:
        """The layer at which they wait."""
        return key_of(self.found)

    def advance(self) -> bool:
        """Run both networks to the next layer; False at the end."""
        at = self._own.found and self.key
        going = self._own.advance()
        # Where control flow depends on the data, the original waits for the copy at a layer not yet fixed.
        if not self._original.waits or (self._original.found and key_of(self._original.found) == at):
            self._original.advance()
        if not going:
            self.close()
        return going

    def inputs(self, limit: int, without_bias: bool) -> tuple[Tensor, Tensor]:
        """The layer's inputs in the copy and in the original, at the same positions."""
        own = self.found
        assert isinstance(own, Product)
        other = self._original.found
        # Where control flow depends on the data, the networks may be at different layers, or have sent
        # different examples to this one.
        original = own
        if isinstance(other, Product) and other.weight == own.weight:
            original = other if other.inputs.shape == own.inputs.shape else own
        if without_bias:
            own, original = replace(own, bias=None), replace(original, bias=None)
        return own.rows(limit, self._number).float(), original.rows(limit, self._number).float()

    def statistics(self) -> tuple[Statistics, Statistics]:
        """Mean and variance of each channel in the copy and in the original."""
        other = self._original.found
        same = isinstance(other, Normalisation) and other.layer == self.key and other.inputs.numel()
        original = other if same and other is not None else self.found
        return _statistics(self.found.inputs), _statistics(original.inputs)

    def close(self) -> None:
        """End both passes."""
        self._own.close()
        self._original.close()


Stops = Callable[[Product | Normalisation], bool]


class _Stopped(BaseException):
    """Ends a pass that is not needed any more."""


class Pass:
    """A forward pass that can pause: it runs in a thread of its own, only while :meth:`advance` waits.

    A network may draw random numbers in evaluation mode, too. Each pass has a stream of its own, so that the
    two passes with one seed differ in their weights only.
    """

    def __init__(self, model: nn.Module, weights: Weights, batch: Inputs, stops: Stops, seed: int) -> None:
        self.found: Product | Normalisation | None = None
        self._failure: BaseException | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._closing = False
        self._stops = stops

        def pause(found: Product | Normalisation) -> None:
            if self._closing:  # a model may have caught the first one
                raise _Stopped
            if stops(found):
                self.found = found
                self._paused.release()
                self._go.acquire()
                if self._closing:
                    raise _Stopped

        def run() -> None:
            self._go.acquire()
            try:
                if not self._closing:
                    with torch.no_grad(), Watch(weights, pause):
                        batch.through(sharing_copy(model), "conditioning")
            except _Stopped:
                pass
            except BaseException as error:  # raised again in the thread that waits
                self._failure = error
            self.found = None
            self._ended = True
            self._paused.release()

        self._ended = False
        devices = {p.device.index for p in model.parameters() if p.is_cuda}
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)]
        self._random = [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._generators]
        self._thread = threading.Thread(target=run, daemon=True)

    def advance(self) -> bool:
        """Run to the next layer; False at the end of the network."""
        if self._ended:
            return False
        if not self._thread.is_alive():
            self._thread.start()
        self._swap_random_states()
        try:
            self._go.release()
            self._paused.acquire()
        finally:
            self._swap_random_states()
        if self.found is None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.found is not None

    def _swap_random_states(self) -> None:
        """Exchange the random states of this pass and of everything else."""
        for number, generator in enumerate(self._generators):
            others = generator.get_state()
            generator.set_state(self._random[number])
            self._random[number] = others

    @property
    def waits(self) -> bool:
        """Whether it has come to a layer that is still to be fixed."""
        return self.found is not None and self._stops(self.found)

    def close(self) -> None:
        """End the pass where it waits or, after an interrupt, at the next layer."""
        self._closing = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()


Statistics = tuple[int, Tensor, Tensor]  # number of values per channel, mean, variance


def _statistics(inputs: Tensor) -> Statistics:
    rows = inputs.float().reshape(*inputs.shape[:2], -1)  # examples × channels × positions
    mean = rows.mean(-1).mean(0)
    # On a CPU several times as fast as torch.var_mean.
    square = torch.linalg.vector_norm(rows - mean[:, None], dim=-1).double().square().sum(0)
    count = rows.shape[0] * rows.shape[2]
    return count, mean.double(), square / count


def pooled(parts: Sequence[Statistics]) -> tuple[Tensor, Tensor]:
    """Mean and variance over all parts."""
    total = sum(count for count, _, _ in parts)
    mean = sum((count / total * m for count, m, _ in parts), torch.zeros_like(parts[0][1]))
    spread = (count / total * (v + (m - mean) ** 2) for count, m, v in parts)
    return mean, sum(spread, torch.zeros_like(mean))


def key_of(found: Product | Normalisation) -> Place | str:
    """The layer that an operation belongs to."""
    return found.layer if isinstance(found, Normalisation) else found.weight


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy that shares all tensors: models may keep values on their modules during a pass."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
