"""Filters before BatchNorm, scaled by their curvature, so that one grid fits all of them.

A filter before BatchNorm may be multiplied by any positive number: with the running statistics changed
accordingly, the network stays the same function. But the weights are rounded to one grid, so the number
decides how finely a filter is rounded. Rounding costs
``sum h_i sigma_i^2 / 2`` and the code takes ``sum log(1 / sigma_i)``, so the noise should be ``1 / sqrt(h)``:
filters to which the output is sensitive are made larger, others smaller. Layers without BatchNorm, mostly
the last one, cannot be scaled: all others are then scaled together, so that both cost the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pwfn.fixing.conditioning.columns import damped
from pwfn.fixing.conditioning.links import Link, exact, find_links, tensors_in
from pwfn.fixing.conditioning.operations import Normalisation, Product, Watch, Weights
from pwfn.fixing.conditioning.passes import Inputs, sharing_copy
from pwfn.layout import Layout

POWER = 0.25
"""1/2 is right for fine grids. On a coarse grid small filters would become all zero, so it is less."""

SMALLEST_GAIN = 0.7
"""Bits per weight, by :func:`gain_bits`, from which filters are scaled. It ranks networks but is not what
they save, so a caller should try both."""

_EXAMPLES = 256  # for the curvature
_ROWS, _ROWS_PER_COLUMN = 4096, 4  # inputs for a layer's moments, about
_LARGEST = 16.0  # factor, and one over the smallest
_TOLERANCE = 1e-4  # of the outputs: far above rounding errors, far below a wrong factor


def scale_filters(
    model: nn.Module,
    layout: Layout,
    batches: Sequence[Inputs],
    score: Callable[[Any], Tensor],
    power: float = POWER,
) -> int:
    """Scale the filters of ``model`` that BatchNorm follows, in place; returns how many (0: none).

    Filter r is multiplied by ``s = g (h_r / mean)^power``, with the geometric mean over all weights, and ::

        running_mean' = s * running_mean        running_var' = s^2 * (running_var + eps) - eps

    so in evaluation mode the network remains the same function, up to rounding. ``h_r`` is the curvature:
    the mean square of the gradient of ``score`` at the filter's output, summed over positions, times
    :func:`conditional_square` of its inputs. ``score`` turns the output for a batch into one number: the
    sum of the log-likelihoods of labels that are drawn from the network's own distribution.

    Scaled are compressed layers whose output goes to one BatchNorm layer and nowhere else. Their common
    factor ``g`` is 1 unless there are other linear layers or convolutions: see :func:`_common_factor`.
    Nothing is done where all curvatures are so similar that the gain is small (:func:`gain_bits`).

    >>> from pwfn.bayes.batches import Batch
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)).eval()
    >>> inputs = [Batch((torch.eye(2),), {}, None)]
    >>> steep = torch.tensor([1.0, 256.0])  # the second output counts more
    >>> scale_filters(model, Layout.of(model), inputs, lambda output: (output * steep).sum())
    2
    >>> model[1].running_var
    tensor([ 0.0625, 16.0002])
    """
    if not batches:
        return 0
    weights = Weights(model, layout)
    network = sharing_copy(model).eval()
    with without_gradients(model):
        links, others, before = find_links(network, weights, layout, batches[0])
        curvatures = _curvatures(network, weights, [*links, *others], batches, score)
    links, others = ([link for link in some if link.layer in curvatures] for some in (links, others))
    rows, fixed = ([curvatures[link.layer] for link in some] for some in (links, others))
    columns = [link.columns for link in links]
    # Filters that cannot be scaled apart count as one.
    alike = [h.mean().expand_as(h) for h in fixed]
    if not links or not gain_bits([*rows, *alike], [*columns, *(o.columns for o in others)]) >= SMALLEST_GAIN:
        return 0
    factors = _factors(rows, columns, power)
    common = _common_factor(rows, columns, factors, fixed, [other.columns for other in others])
    return _scale(model, network, weights, links, [common * s for s in factors], batches[0], before)


def even_layers(model: nn.Module, layout: Layout, batch: Inputs, power: float = 1.0) -> int:
    """Scale whole layers that BatchNorm follows, in place, to one size; returns the number of filters.

    The weights of layer l are multiplied by ``s = (rms / rms_l)^power``, with the root mean square of all
    these layers together and of the layer alone. As with :func:`scale_filters` the network remains the
    same function. On a coarse grid no layer is then all zero while another keeps most of its weights.

    >>> from pwfn.bayes.batches import Batch
    >>> layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    >>> model = nn.Sequential(layers[0], nn.BatchNorm1d(1), layers[1], nn.BatchNorm1d(1)).eval()
    >>> _ = model[0].weight.data.fill_(0.5), model[2].weight.data.fill_(-8.0)
    >>> even_layers(model, Layout.of(model), Batch((torch.ones(1, 1),), {}, None))
    2
    >>> round(model[0].weight.item(), 2), round(model[2].weight.item(), 2)
    (5.67, -5.67)
    """
    weights = Weights(model, layout)
    network = sharing_copy(model).eval()
    with without_gradients(model):
        links, _, before = find_links(network, weights, layout, batch)
    squares = [weights.memory(link.product.weight.entry).double().square() for link in links]
    each = [float(square.mean()) for square in squares]
    links, each = [link for link, e in zip(links, each, strict=True) if e], [e for e in each if e]
    if not links:
        return 0
    count = sum(square.numel() for square in squares)
    whole = sum(float(square.sum()) for square in squares) / count
    factors = [
        torch.full((link.product.positions()[..., 0].numel(),), (whole / own) ** (power / 2))
        for link, own in zip(links, each, strict=True)
    ]
    return _scale(model, network, weights, links, factors, batch, before)


@torch.no_grad()
def _scale(
    model: nn.Module,
    network: nn.Module,
    weights: Weights,
    links: Sequence[Link],
    factors: Sequence[Tensor],
    batch: Inputs,
    before: Any,
) -> int:
    """Scale filters in place, one tensor of factors per layer; nothing where the outputs change by it."""
    changes: list[tuple[Tensor, Tensor]] = []
    for link, factor in zip(links, factors, strict=True):
        changes += _scaled(weights, link.product, model.get_submodule(link.layer), factor)
    kept = [tensor.clone() for tensor, _ in changes]
    for tensor, new in changes:
        tensor.copy_(new)
    with exact():
        after = batch.through(network, "train_loader, the first batches")
    if not _same(after, before):
        for (tensor, _), old in zip(changes, kept, strict=True):
            tensor.copy_(old)
        return 0
    return sum(len(factor) for factor in factors)


def gain_bits(curvatures: Sequence[Tensor], columns: Sequence[int]) -> float:
    """Bits per weight that a perfect scaling saves on a fine grid; -inf if every curvature is 0.

    It is ``1/2 log2(arithmetic mean / geometric mean)`` of the curvatures over all weights. Each layer has
    a tensor with a number per filter, and its number of weights per filter. Zeros are left out.

    >>> gain_bits([torch.tensor([1.0, 1.0]), torch.tensor([16.0, 0.0])], [2, 4])  # of 8.5 and 4
    0.5437...
    """
    h, share = _over_weights(curvatures, columns)
    return 0.5 * float((h * share).sum().log2() - (h.log2() * share).sum())


def _over_weights(curvatures: Sequence[Tensor], columns: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All curvatures that are not 0, and each one's share of the weights."""
    h = torch.cat([part.double() for part in curvatures])
    counts = torch.cat(
        [torch.full_like(part, n, dtype=torch.float64) for part, n in zip(curvatures, columns, strict=True)]
    )
    h, counts = h[h != 0], counts[h != 0]
    return h, counts / counts.sum()


def _factors(curvatures: Sequence[Tensor], columns: Sequence[int], power: float) -> list[Tensor]:
    """The factor of every filter; one without curvature gets the smallest of its layer."""
    h, share = _over_weights(curvatures, columns)
    middle = (h.log() * share).sum()
    found = []
    for part in curvatures:
        factor = torch.exp(power * (part.log() - middle)).clamp(1 / _LARGEST, _LARGEST)
        alive = part != 0
        found.append(factor.where(alive, factor[alive].min() if bool(alive.any()) else 1.0))
    return found


def _common_factor(
    curvatures: Sequence[Tensor],
    columns: Sequence[int],
    factors: Sequence[Tensor],
    fixed: Sequence[Tensor],
    fixed_columns: Sequence[int],
) -> float:
    """The number g by which all factors are multiplied, because of the layers that keep their scale.

    A rounding error costs ``h / (g s)^2`` in a scaled filter and ``h`` in one that keeps its scale. On a fine
    grid the code is shortest for a given cost where both have the same mean over their weights.

    >>> ones = [torch.ones(2)]
    >>> _common_factor([torch.full((2,), 16.0)], [3], ones, ones, [5])
    4.0
    """

    def mean(squares: Iterable[Tensor], columns: Sequence[int]) -> float:
        each, share = _over_weights(list(squares), columns)
        return float((each * share).sum())

    rest = mean(fixed, fixed_columns) if fixed else 0.0
    own = mean((h / s.square() for h, s in zip(curvatures, factors, strict=True)), columns)
    return min(max(math.sqrt(own / rest), 1 / _LARGEST), _LARGEST) if rest and own else 1.0


def _scaled(weights: Weights, product: Product, layer: Any, factor: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Tensors that belong to one layer and its BatchNorm layer, and their new numbers."""
    mean, variance = layer.running_mean, layer.running_var.double() + layer.eps
    # A running variance cannot be negative; what float32 cannot hold would differ between devices.
    factor = torch.maximum(factor.to(variance), (layer.eps / variance).sqrt()).float().double()
    weight = weights.memory(product.weight.entry)
    new, positions = weight.to(torch.float64, copy=True), product.positions()
    new[positions] *= factor.view(len(positions), -1, 1)
    changes = [
        (weight, new),
        (mean, mean.double() * factor),
        (layer.running_var, (factor.square() * variance - layer.eps).clamp_min(0)),
    ]
    if product.bias is not None:
        bias = weights.memory(product.bias.entry)
        changes.append((bias, bias.double() * factor))
    return changes


def _curvatures(
    network: nn.Module,
    weights: Weights,
    links: Sequence[Link],
    batches: Sequence[Inputs],
    score: Callable[[Any], Tensor],
) -> dict[str, Tensor]:
    """By the layer where an output can be seen, the curvature of every filter that makes it."""
    starts = itertools.accumulate((batch.size for batch in batches), initial=0)
    some = [batch for batch, start in zip(batches, starts, strict=False) if start < _EXAMPLES]
    sums = _Sums(links, len(some))
    network = sharing_copy(network)  # it alone has the hooks, and what a pass leaves on modules
    for link in links:
        module = network.get_submodule(link.layer)
        if isinstance(module, (nn.Linear, _ConvNd)):
            module.register_forward_hook(partial(sums.at_output, link))
        else:
            module.register_forward_pre_hook(partial(sums.at_input, link.layer), with_kwargs=True)
    for batch in some if links else ():
        with torch.enable_grad():
            with Watch(weights, sums.add_moments):
                output = batch.through(network, "train_loader, the first batches")
            number = score(output)
            if sums.starts and number.requires_grad:
                torch.autograd.grad(number, sums.starts, allow_unused=True)
        sums.starts.clear()
    found = {}
    for layer, square in sums.gradients.items():
        of_inputs = conditional_square(sums.moments[layer] / sums.counts[layer])
        of_inputs = of_inputs.repeat_interleave(len(square) // len(of_inputs))
        found[layer] = (square * of_inputs / sum(batch.size for batch in some)).cpu()
    return found


def conditional_square(moments: Tensor) -> Tensor:
    """Mean square of a layer's inputs, each given those of the columns after it; one number per group.

    For ``H = E[x x^T]`` the mean of ``1 / U_jj^2`` with :func:`.columns.inverse_factor` U: what a rounding
    error costs if the columns that are fixed later take up their part of it.

    >>> conditional_square(torch.tensor([[[4.0, 0.0], [0.0, 2.0]]]))  # 1 % damping
    tensor([3.0300], dtype=torch.float64)
    >>> conditional_square(torch.tensor([[[4.0, 4.0], [4.0, 4.0]]]))  # the second column takes up nearly all
    tensor([2.0598], dtype=torch.float64)
    """
    lower, failure = torch.linalg.cholesky_ex(damped(moments).flip(-2, -1))
    found = lower.diagonal(dim1=-2, dim2=-1).square().mean(-1)
    found = found.where(moments.diagonal(dim1=-2, dim2=-1).sum(-1) != 0, 0.0)  # no inputs: damping alone
    return found.where(failure == 0, math.nan)


class _Sums:
    """What curvatures are made of, over several passes."""

    def __init__(self, links: Sequence[Link], passes: int) -> None:
        self._links, self._passes = {link.product.weight.entry: link for link in links}, passes
        self.gradients: dict[str, Tensor] = {}  # squares, over examples and positions
        self.moments: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()  # inputs in the moments
        self.starts: list[Tensor] = []  # where the graph of a pass begins: parameters need no gradients

    def at_input(self, layer: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of a BatchNorm layer."""
        self._add_gradient(layer, next(iter((*args, *kwargs.values()))), 1)

    def at_output(self, link: Link, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook of another layer."""
        form = link.product.convolution
        self._add_gradient(link.layer, output, output.dim() - (1 if form is None else 1 + len(form.kernel)))
        return output.clone() if output.is_leaf else output  # a leaf could not be changed in place

    def _add_gradient(self, layer: str, z: Tensor, channels: int) -> None:
        if not z.requires_grad:
            self.starts.append(z.requires_grad_())

        def add(gradient: Tensor) -> None:
            rows = _wide(gradient).movedim(channels, 0).flatten(1)
            self.gradients[layer] = rows.square().sum(1, dtype=torch.float64) + self.gradients.get(layer, 0)

        z.register_hook(add)

    def add_moments(self, found: Product | Normalisation) -> None:
        """Called before every operation that uses compressed weights."""
        if isinstance(found, Product) and found.weight.entry in self._links:
            link = self._links[found.weight.entry]
            limit = -(-max(_ROWS, _ROWS_PER_COLUMN * link.columns) // self._passes)
            x = _wide(replace(found, bias=None).rows(limit, 0))
            self.moments[link.layer] = x.transpose(1, 2) @ x + self.moments.get(link.layer, 0)
            self.counts[link.layer] += x.shape[1]


def _wide(tensor: Tensor) -> Tensor:
    """Squares of 16-bit numbers would overflow."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _same(output: Any, before: Any) -> bool:
    """Whether two outputs are equal up to rounding."""
    own, old = list(tensors_in(output)), list(tensors_in(before))
    if not old or [tensor.shape for tensor in own] != [tensor.shape for tensor in old]:
        return False
    return all(
        bool((a.double() - b.double()).abs().max() <= _TOLERANCE * b.double().abs().max())
        for a, b in zip(own, old, strict=True)
        if b.numel()
    )


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Within the block no parameter requires a gradient."""
    # Copies of a TorchScript module have parameters that are no leaves, whose flag torch refuses to change.
    flags = [(p, p.requires_grad) for p in model.parameters() if p.is_leaf]
    for parameter, _ in flags:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
