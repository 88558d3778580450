"""Inference from indices: equal to the dense model, and as small as the report says."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Tied, convnet, tiny_gpt2
from torch import Tensor, nn

import pwfn
from pwfn import Compressed, Layout, LayoutError, WeightError
from pwfn.file.compressed import Divide
from pwfn.layout import untouched
from pwfn.runtime import (
    IndexedWeight,
    capture,
    expand,
    index_dtype,
    indexed_conv2d,
    indexed_linear,
    pack,
)

SIZES = (1, 127, 1025)
OPERATIONS = ("expand", "indexed_linear", "indexed_conv2d")
ROOT = Path(__file__).parent.parent


def drawn(rows: int, columns: int, size: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Indices of the narrowest type, and palettes."""
    generator = torch.Generator().manual_seed(rows * 31 + columns * 7 + size)
    indices = torch.randint(0, size, (rows, columns), generator=generator).to(index_dtype(size))
    return indices, torch.randn(parts, size, generator=generator)


def compressed(model: nn.Module, values: int = 7, divide: Divide | None = None, **layout: Any) -> Compressed:
    """The model with new weights of that many values."""
    lay = Layout.of(model, **layout)
    generator = torch.Generator().manual_seed(0)
    palette = torch.randn(values, generator=generator) * 0.3
    vector = palette[torch.randint(0, values, (lay.size,), generator=generator)].to(lay.dtype)
    return Compressed.of(lay, vector, None, untouched(model, lay), divide=divide)


def both(model: nn.Module, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """The dense model and the one from indices."""
    small = compressed(model, **settings)
    dense = small.apply_to(copy.deepcopy(model))
    return dense.eval(), small.apply_to(copy.deepcopy(model), weights="indices").eval()


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_indexed_linear_is_linear_of_the_looked_up_weight(rows: int, columns: int, biased: bool) -> None:
    indices, palettes = drawn(rows, columns, 13)
    bias = torch.randn(rows) if biased else None
    for shape in ((columns,), (3, columns), (2, 3, columns)):
        x = torch.randn(shape)
        wanted = F.linear(x, palettes[0][indices.long()], bias)
        assert torch.equal(indexed_linear(x, indices, palettes[0], bias), wanted)


@pytest.mark.parametrize("size", [1, 2, 16, 256, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_palettes_of_all_sizes_and_types(size: int, dtype: torch.dtype) -> None:
    indices, palettes = drawn(9, 127, size)
    assert indices.dtype == (torch.uint8 if size <= 256 else torch.int16)
    x, palette = torch.randn(3, 127).to(dtype), palettes[0].to(dtype)
    assert torch.equal(indexed_linear(x, indices, palette), F.linear(x, palette[indices.long()]))
    assert torch.equal(expand(indices.int(), palette), palette[indices.long()])


@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (2, 7), (4, 5, 3, 3), (2, 6, 1, 1), (2, 3, 5)], ids=str)
def test_two_indices_in_a_byte_are_the_same_weight(shape: tuple[int, ...]) -> None:
    indices, palettes = torch.randint(0, 16, shape, dtype=torch.uint8), torch.randn(1, 16)
    formats = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
    for memory_format in formats:
        given = indices.contiguous(memory_format=memory_format)
        packed = pack(given)
        assert packed.numel() == shape[0] * -(-shape[1] // 2) * indices[0, 0].numel()
        made = expand(packed, palettes, columns=shape[1])
        assert torch.equal(made, palettes[0][indices.long()])
        assert made.is_contiguous(memory_format=memory_format)
    weight = IndexedWeight(indices, palettes)
    assert weight.shape == indices.shape
    assert torch.equal(weight.one_per_element(), indices)


def test_only_small_palettes_are_packed() -> None:
    indices = torch.zeros(2, 3, dtype=torch.uint8)
    assert IndexedWeight(indices, torch.zeros(1, 16)).indices.shape == (2, 2)
    assert IndexedWeight(indices, torch.zeros(1, 17)).indices.shape == (2, 3)
    with pytest.raises(WeightError, match="17 values needs indices that are not packed"):
        indexed_linear(torch.zeros(1, 3), pack(indices), torch.zeros(17))
    with pytest.raises(WeightError, match="packed ones for 5 columns"):
        expand(pack(indices), torch.zeros(3), columns=5)
    with pytest.raises(WeightError, match="packing needs uint8"):
        pack(indices.int())


def test_a_layer_is_packed_if_it_uses_few_values_of_a_long_codebook() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(40, 40, bias=False))
    lay, values = Layout.of(model), torch.arange(100.0)
    vector = torch.cat([values[80:96], values[torch.arange(1600) % 100]])
    small = Compressed.of(lay, vector, None, {}).apply_to(model, weights="indices")
    assert small[0].indexed_weight.indices.shape == (4, 2)
    assert small[1].indexed_weight.indices.shape == (40, 40)
    assert torch.equal(small[0].weight, values[80:96].view(4, 4))
    assert torch.equal(small[1].weight.flatten(), vector[16:])


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_each_part_has_its_palette(axis: int) -> None:
    indices, palettes = torch.randint(0, 5, (6, 4, 8), dtype=torch.uint8), torch.randn(2, 5)
    halves = indices.chunk(2, axis)
    wanted = torch.cat([palettes[i][half.long()] for i, half in enumerate(halves)], axis)
    assert torch.equal(expand(indices, palettes, axis), wanted)


def test_parts_of_a_large_tensor_are_right_across_its_pieces() -> None:
    indices, palettes = drawn(3000, 1025, 7, parts=1000)
    made = expand(indices, palettes)
    for row in (0, 2, 3, 1023, 1024, 2999):
        assert torch.equal(made[row], palettes[row // 3][indices[row].long()])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": torch.zeros(2, 3, dtype=torch.int64)}, "indices are torch.int64"),
        ({"indices": torch.zeros(6, dtype=torch.uint8)}, r"shape \(2, 3\) .* \(6,\)"),
        ({"palettes": torch.zeros(0)}, r"shape \(0,\)"),
        ({"palettes": torch.zeros(4, dtype=torch.int32)}, "floating-point"),
        ({"palettes": torch.zeros(4, device="meta")}, "on cpu, .* on meta"),
        ({"palettes": torch.zeros(3, 4)}, "2 rows .* 3"),
        ({"x": torch.zeros(2, 4)}, r"shape \(2, 4\)"),
        ({"x": torch.zeros(())}, r"shape \(\)"),
        ({"x": torch.zeros(2, 3).bfloat16()}, "torch.bfloat16"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\)"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor], words: str) -> None:
    indices = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(WeightError, match=words):
        indexed_linear(**{"x": torch.zeros(2, 3), "indices": indices, "palettes": torch.zeros(4), **change})


def test_an_index_beyond_the_palette_is_refused() -> None:
    with pytest.raises(WeightError, match="from 3 to 3 do not fit a palette of 3"):
        IndexedWeight(torch.full((2, 2), 3, dtype=torch.uint8), torch.zeros(1, 3))
    with pytest.raises(WeightError, match="along axis 1 into 2 parts"):
        expand(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3), 1)


@pytest.mark.parametrize("name", OPERATIONS)
# torch's own deprecations, met while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_opcheck(name: str) -> None:
    indices, palettes = drawn(6, 9, 13, parts=2)
    packed, image = pack(indices), torch.randn(2, 9, 4, 5, requires_grad=True)
    filters = indices.view(6, 9, 1, 1).expand(6, 9, 2, 1).contiguous()
    cases: dict[str, list[tuple[Any, ...]]] = {
        "expand": [(indices, palettes, 0), (packed, palettes, 0, 9)],
        "indexed_conv2d": [
            (image, filters, palettes, torch.randn(6), (2, 1), (1, 0), (1, 1), 1),
            (image, pack(filters), palettes, None, (1, 1), (0, 0), (1, 2), 1),
        ],
        "indexed_linear": [
            (torch.randn(2, 3, 9, requires_grad=True), indices, palettes, torch.randn(6)),
            (torch.randn(9), indices, palettes, None),
            (torch.randn(3, 9, requires_grad=True), packed, palettes, None),
        ],
    }
    for case in cases[name]:
        done = torch.library.opcheck(getattr(torch.ops.pwfn, name).default, case)
        assert set(done.values()) == {"SUCCESS"}


def test_a_convolution_from_indices_and_its_gradient() -> None:
    indices, palettes = torch.randint(0, 5, (6, 3, 3, 2), dtype=torch.uint8), torch.randn(1, 5)
    x = torch.randn(2, 6, 7, 5, dtype=torch.float32, requires_grad=True)
    settings = (2, 1), (1, 1), (1, 2), 2
    wanted = F.conv2d(x, palettes[0][indices.long()], None, *settings)
    for given in (indices, pack(indices)):
        made = indexed_conv2d(x, given, palettes, None, *settings)
        assert torch.equal(made, wanted)
        (gradient,) = torch.autograd.grad(made.square().sum(), x)
        (expected,) = torch.autograd.grad(wanted.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(gradient, expected)


def test_gradients_go_to_the_input_and_to_nothing_else() -> None:
    dense, small = both(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    inputs = [
        torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)
    ]
    for model, x in zip((dense, small), inputs, strict=True):
        model(x).square().sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-7)
    assert list(small.parameters()) == []


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 11)),
    "3d": (nn.Conv3d(2, 4, 2, bias=False), (1, 2, 4, 5, 6)),
    "grouped": (nn.Conv2d(6, 9, 3, groups=3), (2, 6, 7, 7)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (2, 4, 7, 7)),
    "transposed": (nn.ConvTranspose1d(6, 9, 3, stride=2, groups=3), (2, 6, 5)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_convolutions_of_every_kind(kind: str, axis: int | None) -> None:
    layer, shape = CONVOLUTIONS[kind]

    def divide(entry: Any) -> tuple[int, int]:
        return (axis or 0, entry.shape[axis or 0]) if len(entry.shape) > 1 else (0, 1)

    dense, small = both(nn.Sequential(layer), divide=divide if axis is not None else None)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert torch.equal(small[0].weight, dense[0].weight)
    assert torch.equal(small(x), dense(x))
    small(x).sum().backward()
    assert x.grad is not None
    assert "weight" not in dict(small[0].named_parameters())


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_with_several_codebooks(axis: int) -> None:
    def divide(entry: Any) -> tuple[int, int]:
        return (axis, entry.shape[axis]) if len(entry.shape) > 1 else (0, 1)

    dense, small = both(nn.Sequential(nn.Linear(6, 4)), divide=divide)
    assert small[0].indexed_weight.palettes.shape[0] == (4 if axis == 0 else 6)
    x = torch.randn(3, 6)
    assert torch.equal(small(x), dense(x))
    dense, small = both(
        nn.Sequential(nn.Embedding(6, 4)), divide=lambda e: (axis, 2), include=["type:Embedding"]
    )
    x = torch.tensor([[0, 3], [5, 2]])
    assert torch.equal(small(x), dense(x))


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (nn.Linear(5, 7), (2, 6), "5 features are needed along axis -1"),
        (nn.Linear(6, 7), (2, 5), "6 features"),
        (nn.Linear(6, 7), (2, 3), "6 features"),
        (nn.Conv2d(3, 7, 3), (2, 4, 6, 6), "3 channels are needed along axis -3"),
        (nn.Conv2d(4, 7, 3), (2, 3, 6, 6), "4 channels"),
        (nn.Conv2d(6, 8, 3, groups=2), (2, 8, 6, 6), "6 channels"),
        (nn.Conv2d(6, 8, 3, groups=2), (2, 7, 6, 6), "6 channels"),
    ],
)
def test_an_input_of_another_width_is_refused(layer: nn.Module, shape: tuple[int, ...], words: str) -> None:
    """Where two indices share a byte, the bytes of one column more or less are as many."""
    _, small = both(nn.Sequential(layer))
    assert "two indices per byte" in repr(small)
    with pytest.raises(WeightError, match=words):
        small(torch.randn(shape))


def test_an_embedding_takes_numbers_of_rows_only() -> None:
    model = nn.Sequential(nn.Embedding(20, 6))
    small = compressed(model, include=["type:Embedding"]).apply_to(model, weights="indices")
    assert isinstance(small[0].indexed_weight, IndexedWeight)
    for wrong in (torch.tensor([-1]), torch.tensor([20])):
        with pytest.raises(IndexError):
            small(wrong)
    for kind in (torch.bool, torch.uint8):
        with pytest.raises(RuntimeError, match="indices"):
            small(torch.ones(20, dtype=kind))


def test_a_long_codebook_is_cut_to_what_a_layer_uses() -> None:
    dense, small = both(nn.Sequential(nn.Linear(8, 8), nn.Linear(40, 40)), values=300)
    assert small[0].indexed_weight.indices.dtype == torch.uint8
    assert small[0].indexed_weight.palettes.shape[1] <= 64
    assert small[1].indexed_weight.indices.dtype == torch.int16
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(small, dense, strict=True))


def test_tied_weights_and_shared_modules_stay_one() -> None:
    dense, small = both(Tied())
    x = torch.arange(11)
    for model in (small, copy.deepcopy(small), copy.deepcopy(small).double().float()):
        assert isinstance(model.embedding, nn.Embedding)
        assert model.embedding.indexed_weight is model.head.indexed_weight
        assert model.first is model.second
        assert torch.equal(model(x), dense(x))
    indices = [weight.indices for weight in small.modules() if isinstance(weight, IndexedWeight)]
    assert sum(tensor.nbytes for tensor in indices) == (66 + 36) // 2  # two in a byte


@pytest.mark.parametrize("settings", [{}, {"kdim": 5, "vdim": 7}])
# torch's own word on the nested tensors of its fast path.
@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_attention_reads_its_projections_as_dense(settings: dict[str, int]) -> None:
    dense, small = both(nn.MultiheadAttention(8, 2, batch_first=True, **settings))
    widths = (8, settings.get("kdim", 8), settings.get("vdim", 8))
    q, k, v = (torch.randn(2, 4, width) for width in widths)
    for mode in (torch.enable_grad(), torch.inference_mode()):
        with mode:
            assert torch.allclose(small(q, k, v)[0], dense(q, k, v)[0], rtol=1e-5, atol=1e-6)
    assert isinstance(small, nn.MultiheadAttention)
    packed = ["in_proj_weight"] if not settings else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    weights = {name for name, module in small.named_modules() if isinstance(module, IndexedWeight)}
    assert weights == {"out_proj.indexed_weight", *(f"indexed_{name}" for name in packed)}


@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_a_transformer_of_torch() -> None:
    dense, small = both(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for settings in ({}, {"src_key_padding_mask": padding}):
        for mode in (torch.enable_grad(), torch.inference_mode()):
            with mode:
                assert torch.allclose(small(x, **settings), dense(x, **settings), rtol=1e-5, atol=1e-6)


def test_conv1d_of_transformers() -> None:
    dense, small = both(tiny_gpt2())
    x = torch.arange(6)[None]
    c_attn = small.transformer.h[0].attn.c_attn
    assert isinstance(c_attn.indexed_weight, IndexedWeight)
    assert torch.equal(c_attn.weight, dense.transformer.h[0].attn.c_attn.weight)
    assert small.lm_head.indexed_weight is small.transformer.wte.indexed_weight
    with torch.inference_mode():
        assert torch.allclose(small(x).logits, dense(x).logits, rtol=1e-5, atol=1e-6)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_with_its_own_code_keeps_it() -> None:
    dense, small = both(nn.Sequential(Own(4, 4), nn.Bilinear(4, 4, 2)))
    x = torch.randn(3, 4)
    assert isinstance(small[0], Own)
    assert torch.equal(small[0](x), dense[0](x))
    assert torch.equal(small[1](x, x), dense[1](x, x))
    assert isinstance(small[1], nn.Bilinear)


def test_what_cannot_be_indexed_stays_dense() -> None:
    model = nn.ModuleDict(
        {"rnn": nn.LSTM(4, 4), "rows": nn.Embedding(5, 4, max_norm=1.0), "last": nn.Linear(4, 2)}
    )
    dense, small = both(model, include=["rnn.*", "rows.weight"])
    x = torch.randn(3, 1, 4)
    assert torch.equal(small["rnn"](x)[0], dense["rnn"](x)[0])
    dense = {"rnn.weight_ih_l0", "rnn.weight_hh_l0", "rows.weight", "last.bias"}
    assert dense <= set(small.state_dict())
    assert "last.weight" not in small.state_dict()


def test_a_model_from_indices_holds_as_many_bytes_as_computed_by_hand() -> None:
    _, small = both(convnet(), values=7)
    biases, norm, palettes = 8 + 5, 4 * 8 * 4 + 8, 2 * 7 * 4
    # Two neighbours in a byte: of three channels in two, of the linear layer in half as many.
    indices = 8 * 2 * 9 + 64 * 5
    assert sum(t.nbytes for t in small.state_dict().values()) == indices + palettes + biases * 4 + norm


def test_no_dense_weight_is_held_after_a_call() -> None:
    _, small = both(convnet())
    small(torch.randn(2, 3, 4, 4))
    floating = [t for t in (*small.parameters(), *small.buffers()) if t.is_floating_point()]
    assert max(t.numel() for t in floating) == 8


def test_saves_loads_copies_and_changes_type() -> None:
    dense, small = both(convnet())
    x = torch.randn(2, 3, 4, 4)
    other = compressed(convnet()).apply_to(convnet(), weights="indices").eval()
    buffer = io.BytesIO()
    torch.save(small.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), dense(x))
    assert torch.equal(copy.deepcopy(small)(x), dense(x))
    narrow = copy.deepcopy(small).to(torch.bfloat16)
    assert narrow[4].indexed_weight.indices.dtype == torch.uint8
    assert narrow[4].indexed_weight.palettes.dtype == narrow[4].bias.dtype == torch.bfloat16
    wanted = copy.deepcopy(dense).to(torch.bfloat16)(x.bfloat16())
    assert torch.equal(narrow(x.bfloat16()), wanted)
    last = copy.deepcopy(small).to(memory_format=torch.channels_last)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(last(x), dense(x), rtol=1e-5, atol=1e-6)


class Attending(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = x[..., : self.attention.kdim], x[..., : self.attention.vdim]
        return self.head(self.attention(x, keys, values)[0])


@pytest.mark.parametrize("sizes", [{}, {"kdim": 4, "vdim": 6}], ids=["packed", "separate"])
def test_attention_with_several_indexed_weights_can_be_pickled(sizes: dict[str, int]) -> None:
    dense, small = both(Attending(**sizes))
    x = torch.randn(2, 5, 8)
    for model in (small, pickle.loads(pickle.dumps(small)), pickle.loads(pickle.dumps(copy.deepcopy(small)))):
        torch.testing.assert_close(model(x), dense(x))
        assert isinstance(model.attention, nn.MultiheadAttention)
        assert not any("proj_weight" in name for name, _ in model.named_parameters())


def test_autocast_works_as_for_dense_layers() -> None:
    dense, small = both(convnet())
    x = torch.randn(2, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        made, wanted = small(x), dense(x)
    assert made.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(made, wanted)


def test_a_narrow_model_and_one_without_memory(tmp_path: Path) -> None:
    """Also from a file."""
    compressed(convnet()).save(tmp_path / "net.pwfn")
    small = pwfn.load(tmp_path / "net.pwfn")
    x = torch.randn(2, 3, 4, 4)
    narrow = small.apply_to(convnet().bfloat16(), weights="indices").eval()
    assert torch.equal(narrow(x.bfloat16()), small.apply_to(convnet().bfloat16()).eval()(x.bfloat16()))
    with torch.device("meta"):
        empty = convnet()
    made = small.apply_to(empty, weights="indices").eval()
    assert not any(t.is_meta for t in made.state_dict().values())
    assert torch.equal(made(x), small.apply_to(convnet()).eval()(x))


def test_a_model_may_be_one_layer() -> None:
    model = nn.Linear(4, 3)
    small = compressed(model)
    assert small.apply_to(model, weights="indices") is model
    assert torch.equal(model(torch.ones(4)), small.apply_to(nn.Linear(4, 3))(torch.ones(4)))
    assert set(model.state_dict()) == {"bias", "indexed_weight.indices", "indexed_weight.palettes"}


def test_hooks_are_kept() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(3, 3, 1)), []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(1))
    small = compressed(model).apply_to(model, weights="indices")
    small[1](small[0](torch.ones(1, 4)).t())
    assert seen == [1, 1]
    small[0].register_full_backward_hook(lambda *_: seen.append(2))
    small[0](torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert seen == [1, 1, 1, 2]


def test_a_wrong_choice_or_model_is_named() -> None:
    small = compressed(convnet())
    with pytest.raises(WeightError, match="'sparse': allowed is 'dense' or 'indices'"):
        small.apply_to(convnet(), weights="sparse")
    with pytest.raises(LayoutError, match=r"the model does not match: 0\.bias is absent in the model"):
        small.apply_to(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)), weights="indices")


# torch's own deprecations, met while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_can_be_exported_as_a_graph() -> None:
    dense, small = both(convnet())
    x = torch.randn(2, 3, 4, 4)
    graph = torch.export.export(small, (x,))
    assert "pwfn.indexed_linear" in str(graph.graph)
    assert torch.allclose(graph.module()(x), dense(x), rtol=1e-5, atol=1e-6)


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_kernels_are_registered_where_triton_is_and_it_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import torch, pwfn.runtime.library as library\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print([has('pwfn::' + name, 'CUDA') for name in ('expand', 'indexed_linear', 'indexed_conv2d')])"
    )
    source = str(ROOT / "src")
    hidden = "import sys; sys.modules['triton'] = None\n" + program
    assert run("-c", hidden, PYTHONPATH=source) == "[False, False, False]"
    (tmp_path / "triton.py").write_text("raise RuntimeError('imported')")
    assert run("-c", program, PYTHONPATH=f"{tmp_path}{os.pathsep}{source}") == "[True, True, True]"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_in_tritons_interpreter() -> None:
    tests = str(ROOT / "tests/gpu/test_runtime.py")
    run("-m", "pytest", "-p", "no:cacheprovider", tests, TRITON_INTERPRET="1")


def test_the_benchmark_prints_one_line_per_case() -> None:
    program = str(ROOT / "benchmarks/inference.py")
    lines = run(program, "--quick", "--device", "cpu", PYTHONPATH=str(ROOT / "src")).splitlines()
    found = [json.loads(line) for line in lines]
    keys = {"case", "ratio", "ours_s", "rival_s", "rival", "ours_bytes", "rival_bytes", "device", "versions"}
    assert len(found) >= 3
    assert all(keys <= line.keys() for line in found)
    assert all(line["ours_bytes"] < line["rival_bytes"] for line in found)


def test_without_a_gpu_a_captured_network_is_the_network() -> None:
    dense, small = both(convnet())
    x = torch.randn(2, 3, 4, 4)
    run = capture(small, x)
    assert torch.equal(run(x), dense(x))
    with pytest.raises(WeightError, match=r"of shape \(1, 3, 4, 4\)"):
        run(x[:1])
    with pytest.raises(WeightError, match="training mode"):
        capture(small.train(), x)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: nn.Linear(4, 2), [(3, 4)]),
        (lambda: nn.Conv2d(2, 4, 3), [(1, 2, 5, 5)]),
        (lambda: nn.MultiheadAttention(4, 2), [(3, 1, 4)] * 3),
    ],
)
def test_a_layer_from_indices_can_be_pickled(
    make: Callable[[], nn.Module], shapes: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([make()])
    layout = Layout.of(model)
    small = Compressed.of(layout, (layout.gather(model) * 4).round() / 4, None, {})
    indexed = small.apply_to(model, weights="indices").eval()
    again = pickle.loads(pickle.dumps(indexed))
    inputs = [torch.randn(shape) for shape in shapes]
    one, two = (each[0](*inputs) for each in (indexed, again))
    assert torch.equal(one if isinstance(one, Tensor) else one[0], two if isinstance(two, Tensor) else two[0])
