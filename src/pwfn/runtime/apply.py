"""Puts a compressed network into a model as indices, where the model allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwfn.layout import Entry
from pwfn.runtime.layers import IndexedWeight, read_from_indices
from pwfn.runtime.library import MOST_PACKED, index_dtype


class Coded(NamedTuple):
    """A compressed parameter: its indices, and one codebook for each equal part of an axis."""

    entry: Entry
    indices: Tensor  # in the shape of the parameter
    codebooks: Sequence[Tensor]
    axis: int = 0


@torch.no_grad()
def apply_indices(model: nn.Module, weights: Sequence[Coded], untouched: Mapping[str, Tensor]) -> nn.Module:
    """Give the model compressed weights as indices and all other tensors as they are; return it.

    Vectors are loaded dense, because indices would save little. For a model on the meta device see
    :func:`load_dense`.
    """
    parameters, dense = dict(model.named_parameters(remove_duplicate=False)), dict(untouched)
    places: list[tuple[nn.Module, str, IndexedWeight]] = []
    for coded in weights:
        names = (coded.entry.name, *coded.entry.aliases)
        weight = _indexed(coded, parameters[names[0]])
        owners = [(model.get_submodule(layer), leaf) for layer, _, leaf in (n.rpartition(".") for n in names)]
        if len(weight.shape) < 2 or any(_keeps_dense(module) for module, _ in owners):
            dense |= dict.fromkeys(names, weight.dense())
        else:
            places += [(*owner, weight) for owner in owners]
    load_dense(model, dense)
    for module, leaf, weight in places:
        if leaf in module._parameters:  # else the module has two names
            read_from_indices(module, leaf, weight)
    return model


def load_dense(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors by their names in the state dict.

    In a model on the meta device they take the place of its own, on the CPU; tied parameters stay tied.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.load_state_dict(tensors, strict=False)
        return
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    state = model.state_dict()
    narrow = {name: tensor.to(state[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(narrow, strict=False, assign=True)
    for first, *others in tied.values():
        for name in others:
            layer, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(layer), leaf, model.get_parameter(first))


def _keeps_dense(module: nn.Module) -> bool:
    """Whether a module has its parameters in a list of its own, or writes to them."""
    lists = (nn.RNNBase, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, lists) or (isinstance(module, nn.Embedding) and module.max_norm is not None)


def _indexed(coded: Coded, parameter: Tensor) -> IndexedWeight:
    """Indices and palettes on the device, in the type and in the memory format of the parameter."""
    _, indices, books, axis = coded
    cut = indices.view(indices.shape or (1,)).tensor_split(len(books), axis)
    parts = [_used(book, part) for book, part in zip(books, cut, strict=True)]
    size = max(palette.numel() for palette, _ in parts)
    palettes = torch.stack([F.pad(palette, (0, size - palette.numel())) for palette, _ in parts])
    narrow = torch.cat([part for _, part in parts], axis).to(index_dtype(size)).view(indices.shape)
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    narrow = narrow.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    return IndexedWeight(narrow.to(device), palettes.to(device, parameter.dtype), axis)


def _used(book: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Palette and indices; only the values that occur here, where that makes indices narrower."""
    if book.numel() <= MOST_PACKED:
        return book, index
    used = torch.bincount(index.flatten(), minlength=book.numel()) > 0
    if int(used.sum()) > MOST_PACKED and book.numel() <= 2**8:
        return book, index
    within = used.cumsum(0, dtype=torch.int32) - 1
    return book[used], within[index.to(torch.int32)]
