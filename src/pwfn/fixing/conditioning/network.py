"""Conditioning a whole network: the original and its copy run side by side, and pause at every layer.

At each layer the inputs of all images are there, from the original network and from the copy whose earlier
layers are fixed already. The layer is fixed, and all go on. So every image passes through each network once,
and only the activations at one depth are in memory. Early layers have large activations: images join later,
as many as fit; they run through the layers that are fixed without a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.errors import WeightError
from pwfn.fixing.conditioning.columns import best_linear, damping_for, fix_columns
from pwfn.fixing.conditioning.operations import Normalisation, Place, Product, Watch, Weights
from pwfn.fixing.conditioning.passes import Inputs, Lane, key_of, pooled, sharing_copy
from pwfn.layout import Layout

MEMORY = 2 * 2**30
"""Bytes that activations may use; the number of images in flight follows from it."""

_ROWS_PER_COLUMN = 32  # inputs per column of a layer's moments: more are not better
_ROWS_PER_IMAGE = 64
_WIDEST = 5120  # columns whose moments are kept together; wider layers are fixed in blocks of them
_LARGEST_RATIO = 4.0  # by which a BatchNorm variance may change: a channel that vanished stays small

Memory = Callable[[int], Tensor]
"""The numbers of an entry of the layout, in the order of memory."""

MatrixOf = Callable[[Memory], Tensor]
"""A layer's weights, groups × rows × columns, from such numbers."""


class Conditioning:
    """Fixes every compressed weight of ``model``, a copy of ``original``, at a multiple of ``step``.

    The copy's weights and BatchNorm statistics change in place. A statistic is corrected by what the
    compression changed: by the difference of means and the ratio of variances between the two networks
    on the same examples. It is never gathered afresh from so few. Those of ``frozen`` layers stay.
    """

    def __init__(
        self,
        original: nn.Module,
        model: nn.Module,
        layout: Layout,
        step: float,
        memory: int = MEMORY,
        frozen: Collection[str] = (),
    ) -> None:
        self.layout, self.step, self._memory = layout, step, memory
        self._networks, self._frozen = (original, model), frozenset(frozen)
        self._weights = Weights(original, layout), Weights(model, layout)
        self._fixed = [torch.zeros(e.size, dtype=torch.bool) for e in layout.entries]
        self._done: set[Place | str] = set()
        self.silent: list[str] = []  # entries that no operation used

    @torch.no_grad()
    def run(self, batches: Sequence[Inputs], on_layer: Callable[[int, int], None] | None = None) -> None:
        """Fix all layers, in the order in which the network uses them."""
        with _plain_attention():
            bytes_at = self._bytes_at(batches[0])
            networks = tuple(zip(self._networks, self._weights, strict=True))
            lanes = [Lane(networks, batch, number, self._stops) for number, batch in enumerate(batches)]
            waiting = lanes[::-1]
            active: list[Lane] = []
            try:
                while waiting or active:
                    while waiting and (not active or self._has_room(active, bytes_at)):
                        if waiting[-1].advance():
                            active.append(waiting[-1])
                        waiting.pop()
                    if not active:
                        continue
                    key = active[0].key
                    group = [lane for lane in active if lane.key == key]
                    if self._handle(group):
                        self._done.add(key)
                    if on_layer is not None:
                        on_layer(len(self._done), max(len(bytes_at), len(self._done)))
                    for lane in group:
                        if not lane.advance():
                            active.remove(lane)
            finally:
                for lane in (*active, *waiting):
                    lane.close()
        self._round_the_rest()

    def _has_room(self, active: Sequence[Lane], bytes_at: dict[Place | str, int]) -> bool:
        """Whether one more lane fits, at the depth of the first; unknown where no size was seen there."""
        need = bytes_at.get(active[0].key, 0) * active[0].size
        return 0 < need * (len(active) + 1) <= self._memory

    def _stops(self, found: Product | Normalisation) -> bool:
        """Whether a pass must wait: the layer is not fixed yet."""
        if isinstance(found, Normalisation):
            return found.layer not in self._done
        return found.weight not in self._done and not self._is_fixed(found.weight)

    def _is_fixed(self, place: Place) -> bool:
        return bool(self._fixed[place.entry][place.positions(torch.device("cpu"))].any())

    def _bytes_at(self, batch: Inputs) -> dict[Place | str, int]:
        """By layer in order, the bytes per example that both networks need from there on, about."""
        sizes: dict[Place | str, int] = {}

        def note(found: Product | Normalisation) -> None:
            # The input, the output and a residual branch, in two networks.
            size = 6 * found.inputs.numel() * found.inputs.element_size() // max(batch.size, 1)
            sizes.setdefault(key_of(found), size)

        with Watch(self._weights[0], note):
            batch.through(sharing_copy(self._networks[0]), "train_loader, the first batches")
        largest = 0
        for key in reversed(sizes):
            largest = sizes[key] = max(largest, sizes[key])
        return sizes

    def _handle(self, group: Sequence[Lane]) -> bool:
        """Do what the layer needs; False where no input has reached it, as with an expert without tokens."""
        group = [lane for lane in group if lane.found.inputs.numel()]
        if not group:
            return False
        found = group[0].found
        if not isinstance(found, Normalisation):
            self._fix(found, group)
        elif found.layer not in self._frozen:
            self._correct(found.layer, group)
        return True

    def _fix(self, product: Product, group: Sequence[Lane]) -> None:
        """Fix one layer, given the inputs of the images in flight."""
        name = self.layout.entries[product.weight.entry].name
        positions = product.positions()
        bias = product.bias
        if bias is not None and self._is_fixed(bias):
            bias = None
        rows = None if bias is None else bias.positions(positions.device)

        def matrix_of(memory: Memory) -> Tensor:
            found = memory(product.weight.entry)[positions]
            if bias is None:
                return found
            return torch.cat([found, memory(bias.entry)[rows].reshape(*found.shape[:2], 1)], -1)

        matrix = matrix_of(self._weights[0].memory).float()
        columns = matrix.shape[-1]
        images = sum(lane.size for lane in group)
        limit = -(-max(_ROWS_PER_IMAGE * images, _ROWS_PER_COLUMN * columns) // len(group))
        values = torch.empty_like(matrix)
        width = -(-columns // -(-columns // _WIDEST))
        for first in range(0, columns, width):
            block = slice(first, min(first + width, columns))
            moments, cross, count = _moments(group, limit, block, without_bias=bias is None)
            damping = damping_for(count, moments.shape[-1])
            if not bool(torch.isfinite(moments).all() and torch.isfinite(cross).all()):
                raise WeightError(
                    f"{name}: its inputs are not finite on these images: check the images, or the network"
                )
            target = best_linear(matrix[..., block], cross, moments, damping)
            values[..., block] = self._placed(target, moments, damping, matrix_of, block)
        self._write(product.weight, positions, values[..., : positions.shape[-1]])
        if bias is not None and rows is not None:
            self._write(bias, rows, values[..., -1].reshape(rows.shape))

    def _placed(
        self, target: Tensor, moments: Tensor, damping: float, matrix_of: MatrixOf, block: slice
    ) -> Tensor:
        """What the weights of a block of columns become; a subclass may look at other vectors there."""
        return fix_columns(target, moments, self.step, damping)

    def _write(self, place: Place, positions: Tensor, values: Tensor) -> None:
        memory = self._weights[1].memory(place.entry)
        memory[positions] = values.to(memory.dtype)
        self._fixed[place.entry][positions.cpu()] = True

    def _correct(self, name: str, group: Sequence[Lane]) -> None:
        """Shift and scale the running statistics of a BatchNorm layer by what compression changed."""
        layer: Any = self._networks[1].get_submodule(name)  # it has statistics and an eps
        own, original = zip(*(lane.statistics() for lane in group), strict=True)
        mean, variance = pooled(own)
        mean_before, variance_before = pooled(original)
        ratio = (variance + layer.eps) / (variance_before + layer.eps)
        ratio = ratio.clamp(1 / _LARGEST_RATIO, _LARGEST_RATIO)
        layer.running_mean += (mean - mean_before).to(layer.running_mean)
        changed = (layer.running_var.double() + layer.eps) * ratio - layer.eps
        layer.running_var.copy_(changed.clamp_min(0))

    def _round_the_rest(self) -> None:
        """Weights that no operation used go to the nearest multiple."""
        for number, entry in enumerate(self.layout.entries):
            free = ~self._fixed[number]
            if bool(free.any()):
                memory = self._weights[1].memory(number)
                free = free.to(memory.device)
                rounded = torch.round(memory[free].double() / self.step) * self.step
                memory[free] = rounded.to(memory.dtype)
                if bool(free.all()):
                    self.silent.append(entry.name)

    def notes(self) -> tuple[str, ...]:
        """What a user should know about layers that could not be conditioned."""
        silent = [name for name in self.silent if len(self.layout.entry(name).shape) > 1]
        number = "1 weight tensor was" if len(silent) == 1 else f"{len(silent)} weight tensors were"
        note = (
            f"{number} rounded without looking at inputs, because no image came to the layer or it is of "
            f"another kind: {', '.join(silent[:3])}{', …' * (len(silent) > 3)}"
        )
        return (note,) if silent else ()


def _moments(
    group: Sequence[Lane], limit: int, block: slice, without_bias: bool
) -> tuple[Tensor, Tensor, int]:
    """``E[x' x'^T]`` of some columns of the copy's inputs, ``E[x x'^T]`` with the original's; how many."""
    moments = cross = torch.zeros((), dtype=torch.float64)
    count = 0
    for lane in group:
        own, original = (x[..., block] for x in lane.inputs(limit, without_bias))
        moments = (own.transpose(1, 2) @ own).double() + moments
        cross = (original.transpose(1, 2) @ own).double() + cross
        count += own.shape[1]
    return moments / count, cross / count, count


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Within the block ``nn.MultiheadAttention`` uses plain operations, not one fused kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
