"""A compressed network put into a model as indices; what stays dense does so with a reason."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pwfn.errors import LayoutError
from pwfn.file.compressed import Compressed, Division, index_dtype
from pwfn.layout import Entry
from pwfn.layout.coverage import is_hf_conv1d
from pwfn.runtime.layers import IndexedConv, IndexedEmbedding, IndexedLinear, IndexedWeight, read_as_dense

KEPT_DENSE = "_pwfn_kept_dense"
"""Where a model keeps the reasons why tensors of it stayed dense, for :func:`pwfn.runtime.memory_report`."""

_PLAIN_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@torch.no_grad()
def apply_indices(compressed: Compressed, model: nn.Module, tile: int | None = None) -> nn.Module:
    """Give the model a compressed network's weights as indices, and return it.

    Layers are replaced within the model; only a model that is itself one such layer comes back as another
    object. Parameters may lie on the meta device: what is loaded then goes to the CPU.

    >>> from pwfn.layout import Layout
    >>> model = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> small = Compressed.of(Layout.of(model), torch.tensor([0.5, -0.25]), None, {})
    >>> apply_indices(small, model)[0].indexed.indices.tolist(), model(torch.ones(2)).item()
    ([[1, 0]], 0.25)
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    reasons = {item.name: item.reason for item in compressed.layout.left_out}
    dense, indexed = dict(compressed.untouched), []
    for entry, division in zip(compressed.layout.entries, compressed.divisions, strict=True):
        reason = _why_dense(model, entry)
        if reason is None:
            indexed.append((entry, division))
            continue
        weight = _weight(compressed, entry, division, parameters[entry.name])
        for name in (entry.name, *entry.aliases):
            dense[name], reasons[name] = weight.dense(), reason
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load_state_dict(dense, strict=False, assign=on_meta)
    replaced: dict[int, nn.Module] = {}
    for entry, division in indexed:
        weight = _weight(compressed, entry, division, parameters[entry.name])
        turned: list[IndexedWeight] = []
        for module, leaf in _places(model, entry):
            if id(module) not in replaced and leaf in module._parameters:
                new = _layer(module, leaf, weight, turned, tile)
                if new is None:
                    read_as_dense(module, leaf, weight)
                else:
                    replaced[id(module)] = _in_place_of(module, new)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in replaced:
                module._modules[name] = replaced[id(child)]
    model = replaced.get(id(model), model)
    setattr(model, KEPT_DENSE, reasons)
    return model


def _why_dense(model: nn.Module, entry: Entry) -> str | None:
    """Why a compressed parameter is loaded dense all the same; None if it need not be."""
    if len(entry.shape) < 2:
        return "a vector: indices would save little"
    for module, _ in _places(model, entry):
        if isinstance(module, nn.RNNBase):
            return f"{type(module).__name__} keeps its weights in a list of its own"
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            return f"{type(module).__name__}: it holds parameters only"
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            return "Embedding with max_norm writes to its weight"
    return None


def _places(model: nn.Module, entry: Entry) -> Iterator[tuple[nn.Module, str]]:
    for name in (entry.name, *entry.aliases):
        layer, _, leaf = name.rpartition(".")
        yield model.get_submodule(layer), leaf


def _weight(compressed: Compressed, entry: Entry, division: Division, parameter: Tensor) -> IndexedWeight:
    """Its indices and palettes, on the parameter's device and in its type; the palettes are rows."""
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    books = division.codebooks if len(set(division.codebooks)) > 1 else division.codebooks[:1]
    shape = entry.shape or (1,)
    cut = compressed.indices[entry.span].view(shape).tensor_split(len(books), division.axis)
    parts = [_used(compressed.codebooks[book], index) for book, index in zip(books, cut, strict=True)]
    size = max(palette.numel() for palette, _ in parts)
    palettes = torch.stack([F.pad(palette, (0, size - palette.numel())) for palette, _ in parts])
    indices = torch.cat([index for _, index in parts], division.axis).to(index_dtype(size)).view(entry.shape)
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        indices = indices.contiguous(memory_format=torch.channels_last)
    else:
        indices = indices.contiguous()
    return IndexedWeight(indices.to(device), palettes.to(device, parameter.dtype), division.axis)


def _used(book: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Palette and indices; of a codebook too long for bytes, only the values that occur here."""
    if book.numel() <= 2**8:
        return book, index
    used, within = torch.unique(index.to(torch.int64), return_inverse=True)
    return book[used], within


def _layer(
    module: nn.Module, leaf: str, weight: IndexedWeight, turned: list[IndexedWeight], tile: int | None
) -> nn.Module | None:
    """The layer that takes the module's place; None if there is none for it.

    ``turned`` keeps the weight with its axes exchanged, for the next layer tied to it.
    """
    if leaf != "weight":
        return None
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return IndexedLinear(weight, module.bias)
    if is_hf_conv1d(module) and type(module).__module__ == "transformers.pytorch_utils":
        if not turned:
            turned.append(IndexedWeight(weight.indices.t().contiguous(), weight.palettes, 1 - weight.axis))
        return IndexedLinear(turned[0], module.get_parameter("bias"))
    if isinstance(module, _ConvNd) and type(module) in _PLAIN_CONVOLUTIONS:
        return IndexedConv(module, weight, tile)
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        return IndexedEmbedding(weight)
    return None


def _in_place_of(old: nn.Module, new: nn.Module) -> nn.Module:
    """The new layer in the old one's mode, with the hooks that were hung on it."""
    lost = [name for name in ("_backward_hooks", "_state_dict_hooks") if getattr(old, name, None)]
    if lost:
        raise LayoutError(
            f"{type(old).__name__} has {lost[0].strip('_').replace('_', ' ')}, which an indexed layer cannot "
            "keep: remove them first"
        )
    # Beside the hooks, which of them take keywords, and which are called after a failure too.
    for name in (
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ):
        getattr(new, name).update(getattr(old, name))
    return new.train(old.training)
