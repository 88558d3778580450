"""Products, bytes and energy by hand; products also against torch's own counter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pwfn import DataError, FileError, Layout, LayoutError
from pwfn.evaluate import entropy as metrics
from pwfn.file.compressed import Compressed
from pwfn.file.format import Reader
from pwfn.lab.costs import (
    ASSUMPTIONS,
    PAIRS,
    Arithmetic,
    CostSheet,
    EnergyFigures,
    Storage,
    Traffic,
    cost_sheet,
    count_products,
)
from pwfn.layout import untouched
from pwfn.zoo.models import OWN

VALUES = torch.tensor([0.0, 0.5, -0.25, 0.375, 0.6875, 0.3])  # orders 0, 1, 1, 2, 3, and many


def compressed_of(model: nn.Module, values: Tensor | None = None, **selectors: Any) -> Compressed:
    """The model with these values, or with all of VALUES in turn."""
    layout = Layout.of(model, **selectors)
    if values is None:
        values = VALUES[torch.arange(layout.size) % len(VALUES)]
    return Compressed.of(layout, values, None, untouched(model, layout))


def uses(model: nn.Module, example: Any, **selectors: Any) -> dict[str, int]:
    """Products of each parameter; by order they must be what its values say."""
    compressed = compressed_of(model, **selectors)
    found = count_products(compressed, model, example)
    values = compressed.values()
    for entry, by_order in zip(compressed.layout.entries, found.by_order, strict=True):
        times, rest = divmod(sum(by_order.values()), entry.size)
        assert rest == 0
        orders = metrics.orders(values[entry.span])
        assert by_order == {order: times * n for order, n in orders.items() if times}
    names = [entry.name for entry in compressed.layout.entries]
    return dict(zip(names, (sum(n.values()) for n in found.by_order), strict=True))


def torch_macs(model: nn.Module, example: Tensor) -> int:
    """By torch's counter, which counts a multiplication and an addition as two."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model.eval()(example)
    assert counter.get_total_flops() % 2 == 0
    return int(counter.get_total_flops() // 2)


# Products


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        # 5×5 with a border of 1 and stride 2: 3×3 positions, each of 3 filters of 2×3×3.
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), (1, 2, 5, 5), 9 * 3 * 2 * 9),
        # 7×7, a 3×3 kernel 5 wide by dilation: 3×3 positions.
        (nn.Conv2d(2, 3, 3, dilation=2), (1, 2, 7, 7), 9 * 3 * 2 * 9),
        # two groups: each of 6 filters sees 2 of 4 channels, at 3×3 positions.
        (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5), 9 * 6 * 2 * 9),
        (nn.Conv2d(4, 4, 3, groups=4, padding="same"), (1, 4, 5, 6), 30 * 4 * 9),
        (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 1, 4, 4), 16 * 2 * 9),
        (nn.Conv1d(2, 3, 4), (1, 2, 10), 7 * 3 * 2 * 4),
        (nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3), 8 * 2 * 8),
        # transposed: each of 3×3 input positions meets every weight, wherever it lands.
        (nn.ConvTranspose2d(2, 5, 3, stride=2, padding=1), (1, 2, 3, 3), 9 * 2 * 5 * 9),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 3, 3), 9 * 4 * 3 * 9),
        (nn.Linear(3, 4), (1, 3), 12),
        (nn.Linear(3, 4), (1, 7, 3), 7 * 12),
        (nn.Linear(3, 4, bias=False), (1, 5, 6, 3), 30 * 12),
    ],
    ids=lambda value: str(value).split("(")[0] if isinstance(value, nn.Module) else str(value),
)
def test_one_layer_by_hand_and_by_torch(layer: nn.Module, shape: tuple[int, ...], macs: int) -> None:
    example = torch.randn(shape)
    assert uses(layer, example)["weight"] == macs
    assert torch_macs(layer, example) == macs
    with torch.inference_mode():
        example = torch.randn(shape)
    assert uses(layer, example)["weight"] == macs  # where operations come whole


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_tokens_in_any_order_of_memory(bias: bool) -> None:
    example = torch.randn(1, 3, 5, 2).permute(0, 3, 2, 1)
    assert uses(nn.Linear(3, 4, bias=bias), example)["weight"] == 10 * 12


def test_a_layer_of_images_that_are_channels_last() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    values = torch.zeros(54 + 3)
    values.view(-1)[:54].view(3, 2, 3, 3)[1] = 0.5  # one filter of shifts
    found = count_products(compressed_of(model, values), model, torch.randn(1, 2, 5, 5))
    assert found.by_order[0] == {0: 9 * 36, 1: 9 * 18}


@settings(deadline=None, max_examples=60)
@given(
    dims=st.integers(1, 3),
    groups=st.integers(1, 3),
    inner=st.integers(1, 3),
    outer=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    side=st.integers(5, 8),
    transposed=st.booleans(),
)
def test_convolutions_of_any_kind_are_as_torch_counts_them(
    dims: int, groups: int, inner: int, outer: int, transposed: bool, side: int, **options: int
) -> None:
    layer: Any = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    model = layer(groups * inner, groups * outer, options.pop("kernel"), groups=groups, **options)
    example = torch.randn(1, groups * inner, *[side] * dims)
    assert uses(model, example)["weight"] == torch_macs(model, example)


class Twice(nn.Module):
    """One layer called for 5 tokens and for 1, and a second layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.other = nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(self.one(x)).sum(1))


def test_a_tied_weight_counts_each_time_and_is_read_once() -> None:
    model = Twice()
    sheet = cost_sheet(compressed_of(model), model, torch.randn(1, 5, 4))
    assert sheet.whole.macs == (5 + 5 + 1) * 16
    assert sheet.whole.weights == 16
    assert sheet.whole.traffic.fp32_bytes == 64


def test_a_model_whose_tie_is_undone_counts_alike() -> None:
    model = Twice()
    compressed = compressed_of(model)
    tied = count_products(compressed, model, torch.randn(1, 5, 4))
    model.other.weight = nn.Parameter(torch.randn(4, 4))
    assert count_products(compressed, model, torch.randn(1, 5, 4)) == tied


class Language(nn.Module):
    """Words in and out by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.words(ids)), self.words.weight)


def test_a_table_that_a_model_multiplies_by_itself() -> None:
    ids = torch.tensor([[1, 2, 3]])
    found = uses(Language(), ids, include=["type:Embedding"])
    assert found == {"words.weight": 3 * 40, "mix.weight": 3 * 16, "mix.bias": 0}


def test_a_table_that_is_only_looked_up_is_said_to_be() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    sheet = cost_sheet(compressed_of(model, include=["type:Embedding"]), model, torch.tensor([[1, 2, 3]]))
    assert sheet.not_multiplied == ("0.weight",)
    assert (sheet.whole.macs, sheet.whole.uncompressed_macs) == (3 * 8, 0)
    assert any(line.startswith("compressed, but in no convolution") for line in sheet.lines())


class Standardised(nn.Conv2d):
    """Its products are with another tensor than its weight: they are not shifts, whatever the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, (self.weight - self.weight.mean()) / self.weight.std())


def test_a_weight_that_is_changed_before_it_is_used_stays_in_full_precision() -> None:
    model = Standardised(1, 2, 3, bias=False)
    sheet = cost_sheet(compressed_of(model), model, torch.randn(1, 1, 5, 5))
    assert (sheet.whole.macs, sheet.whole.uncompressed_macs) == (0, 9 * 18)
    assert sheet.not_multiplied == ("weight",)


@pytest.mark.parametrize("same", [True, False])
def test_packed_projections_by_part(same: bool) -> None:
    """Queries of 5 tokens; keys and values of the same, or of 7 others."""
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    q = torch.randn(1, 5, 8)
    k = q if same else torch.randn(1, 7, 8)
    length = k.shape[1]
    layout = Layout.of(model)
    values = torch.full((layout.size,), 0.6875)  # order 3
    packed = values[layout.entry("in_proj_weight").span].view(3, 64)
    packed[0], packed[1], packed[2] = 0.5, 0.375, 0.0  # orders 1, 2, 0
    found = count_products(compressed_of(model, values), model, (q, k, k))
    by_name = dict(zip((e.name for e in layout.entries), found.by_order, strict=True))
    assert by_name["in_proj_weight"] == {0: length * 64, 1: 5 * 64, 2: length * 64}
    assert by_name["out_proj.weight"] == {3: 5 * 64}
    assert found.uncompressed == 2 * 5 * length * 8  # scores, and their sums of values
    named = {"query": q, "key": k, "value": k}
    assert count_products(compressed_of(model, values), model, named) == found


def test_a_transformer_that_has_a_fast_path() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    before = torch.backends.mha.get_fastpath_enabled()
    compressed = compressed_of(model)
    found = count_products(compressed, model, torch.randn(5, 1, 8), batch_axis=1)
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert sum(sum(n.values()) for n in found.by_order) == 5 * (3 * 64 + 64 + 2 * 8 * 16)
    assert found.uncompressed == 2 * 5 * 5 * 8


def test_a_bilinear_layer() -> None:
    model = nn.Bilinear(3, 4, 5)
    assert uses(model, (torch.randn(1, 3), torch.randn(1, 4))) == {"weight": 60, "bias": 0}


class Direct(nn.Module):
    """A weight in every kind of product, on either side, cut, and repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, how: str) -> Tensor:
        w = self.layer.weight
        matrices = {
            "left": lambda: w @ x[0],
            "rows": lambda: x[0] @ w[:2].t(),
            "batches": lambda: torch.bmm(x.expand(3, 4, 4), w.expand(3, 4, 4)),
            "added": lambda: torch.baddbmm(x, x, w.unsqueeze(0)),
            "vector": lambda: torch.mv(w, x[0, 0]),
            "added vector": lambda: torch.addmv(x[0, 0], w, x[0, 0]),
            "as vector": lambda: torch.mv(x[0], w[0]),
            "dot": lambda: torch.dot(w[0], x[0, 0]),
            "einsum": lambda: torch.einsum("bij,kj->bik", x, w),
            "both": lambda: w @ w,
        }
        return matrices[how]()


@pytest.mark.parametrize(
    ("how", "macs"),
    [
        *(("left", 64), ("rows", 32), ("batches", 192), ("added", 64), ("vector", 16), ("added vector", 16)),
        *(("as vector", 16), ("dot", 4), ("einsum", 64), ("both", 64)),
    ],
)
def test_products_that_a_model_writes_out(how: str, macs: int) -> None:
    model = Direct()
    found = count_products(compressed_of(model), model, (torch.randn(1, 4, 4), how))
    assert sum(found.by_order[0].values()) == macs
    assert found.uncompressed == 0


def test_rows_that_are_cut_out_have_their_own_orders() -> None:
    model, values = Direct(), torch.zeros(4, 4)
    values[1] = 0.5
    values[2] = 0.375
    found = count_products(compressed_of(model, values.reshape(-1)), model, (torch.randn(1, 4, 4), "rows"))
    assert found.by_order == ({0: 16, 1: 16},)


def test_two_weights_in_one_piece_of_memory_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    flat = torch.randn(20)
    model[0].weight = nn.Parameter(flat[1:10].view(3, 3))
    model[1].weight = nn.Parameter(flat[11:].view(3, 3))
    values = torch.cat((torch.full((9,), 0.5), torch.full((9,), 0.375)))
    found = count_products(compressed_of(model, values), model, torch.randn(1, 2, 3))
    assert found.by_order == ({1: 18}, {2: 18})


def test_layers_left_out_and_attention_scores_are_not_compressed() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    found = count_products(compressed_of(model, exclude=["1.*"]), model, torch.randn(1, 2, 3))
    assert (found.by_order, found.uncompressed) == (({0: 4, 1: 8, 2: 4, 3: 4, **high(4)},), 40)


def high(times: int) -> dict[int, int]:
    """Products with 0.3, whose order as float32 is for metrics to know."""
    return dict.fromkeys(metrics.orders(torch.tensor([0.3])), times)


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_vit_tiny", "digits_resnet"])
def test_a_whole_network_is_as_torch_counts_it(name: str) -> None:
    model = OWN[name]()
    example = torch.randn(1, 1, 8, 8) if name == "digits_resnet" else torch.randn(1, 3, 32, 32)
    sheet = cost_sheet(compressed_of(model), model, example)
    assert sheet.whole.macs + sheet.whole.uncompressed_macs == torch_macs(model, example)
    assert sheet.not_multiplied == ()
    assert (sheet.whole.uncompressed_macs > 0) == (name == "cifar_vit_tiny")
    assert sum(layer.macs for layer in sheet.layers) == sheet.whole.macs


def test_a_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count_products(compressed_of(model), model, torch.randn(1, 1, 5, 5))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# Bytes


def test_bytes_by_hand() -> None:
    """16 weights of three values, 8 + 4 + 4 times: 1.5 bits each by entropy, 2 bits as indices."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    values = torch.tensor([0.5] * 8 + [0.0] * 4 + [-0.25] * 4)
    sheet = cost_sheet(compressed_of(model, values), model, torch.randn(1, 4))
    # Its table: number of symbols, and for each a gap and a count, a byte each.
    shared = Traffic(index_bytes=12, coded_bytes=12 + 7)
    (layer,) = sheet.layers
    assert layer.traffic == Traffic(fp32_bytes=64, int8_bytes=16 + 4, index_bytes=4, coded_bytes=3)
    assert sheet.untouched_bytes == 2 * 4 * 4
    assert sheet.whole.traffic == layer.traffic + shared + Traffic(32, 32, 32, 32)
    assert not sheet.coded_is_measured


@pytest.mark.parametrize(("unique", "bits"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5)])
def test_an_index_has_as_many_bits_as_its_codebook_needs(unique: int, bits: int) -> None:
    model = nn.Linear(7, 5, bias=False)
    values = (torch.arange(35) % unique).float()
    (layer,) = cost_sheet(compressed_of(model, values), model, torch.randn(1, 7)).layers
    assert layer.traffic.index_bytes == math.ceil(35 * bits / 8)


def test_parts_with_codebooks_of_their_own() -> None:
    """Two rows of 8: one of two values, the other of four."""
    model = nn.Linear(8, 2, bias=False)
    values = torch.cat((torch.arange(8) % 2, torch.arange(8) % 4)).float()
    compressed = Compressed.of(Layout.of(model), values, None, {}, divide=lambda entry: (0, 2))
    sheet = cost_sheet(compressed, model, torch.randn(1, 8))
    assert sheet.layers[0].traffic.index_bytes == (8 * 1 + 8 * 2) // 8
    assert sheet.whole.traffic.index_bytes == 3 + 4 * (2 + 4)


def test_coded_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    model = OWN["digits_resnet"]()
    compressed = compressed_of(model)
    path = tmp_path / "net.pwfn"
    compressed.save(path)
    example = torch.randn(1, 1, 8, 8)
    measured = cost_sheet(compressed, model, example, file=path)
    sizes = Reader(path).sizes
    there = sizes.indices + sizes.tables + sizes.codebooks
    assert measured.coded_is_measured
    assert measured.whole.traffic.coded_bytes == there + measured.untouched_bytes
    assert sum(layer.traffic.coded_bytes for layer in measured.layers) == sizes.indices
    # By entropy it is the same but for the coder's whole words of 4 bytes, and the tables uncompressed.
    estimated = cost_sheet(compressed, model, example)
    pairs = zip(measured.layers, estimated.layers, strict=True)
    assert all(0 <= m.traffic.coded_bytes - e.traffic.coded_bytes <= 2 * 8 for m, e in pairs)


def test_coded_bytes_are_at_most_the_pooled_entropy() -> None:
    model = OWN["digits_resnet"]()
    layout = Layout.of(model)
    grid = torch.round(layout.gather(model) * 16) / 16
    sheet = cost_sheet(compressed_of(model, grid), model, torch.randn(1, 1, 8, 8))
    coded = sum(layer.traffic.coded_bytes for layer in sheet.layers)
    assert coded <= metrics.entropy_bits(grid) * layout.size / 8 + len(layout.entries)


# Energy


def hand_sheet() -> CostSheet:
    """Ten products: two with 0, three with a power of two, two of order 2, one of order 3, two of many."""
    model = nn.Linear(10, 1, bias=False)
    values = torch.tensor([0.0, 0.0, 0.5, -0.25, 1.0, 0.375, 0.75, 0.6875, 0.3, 0.1])
    return cost_sheet(compressed_of(model, values), model, torch.randn(1, 10))


def test_counts_of_the_sheet() -> None:
    whole = hand_sheet().whole
    found = (whole.skipped_macs, whole.shift_macs, whole.shift_add_macs, whole.multiplied_macs)
    assert (found, whole.macs) == ((2, 3, 3, 2), 10)


def test_four_powers_of_two_are_shifts_and_five_are_not() -> None:
    """85 is 64 + 16 + 4 + 1, and 341 has 256 besides; no fewer sum to them."""
    model = nn.Linear(2, 1, bias=False)
    whole = cost_sheet(compressed_of(model, torch.tensor([85.0, 341.0])), model, torch.randn(1, 2)).whole
    assert whole.macs_by_order == {4: 1, 5: 1}
    assert (whole.shift_add_macs, whole.multiplied_macs) == (1, 1)
    figures = EnergyFigures()
    assert figures.product(Arithmetic.FIXED_SHIFTS, 4) == pytest.approx(4 * 0.23)
    assert figures.product(Arithmetic.FIXED_SHIFTS, 5) == pytest.approx(3.2)
    assert figures.product(Arithmetic.FLOAT_SHIFTS, 4) == pytest.approx(4 * 0.93)
    assert figures.product(Arithmetic.FLOAT_SHIFTS, 5) == pytest.approx(4.6)


@pytest.mark.parametrize(
    ("arithmetic", "picojoules"),
    [
        (Arithmetic.FP32, 10 * (3.7 + 0.9)),
        (Arithmetic.INT8, 10 * (0.2 + 0.1)),
        # 3 + 2 × 2 + 3 powers of two, and two that are multiplied by.
        (Arithmetic.FLOAT_SHIFTS, 10 * (0.03 + 0.9) + 2 * (3.7 + 0.9)),
        (Arithmetic.FIXED_SHIFTS, 10 * (0.13 + 0.1) + 2 * (3.1 + 0.1)),
    ],
)
def test_energy_of_products_by_hand(arithmetic: Arithmetic, picojoules: float) -> None:
    found = [e.compute_microjoules for e in hand_sheet().whole.energy if e.arithmetic is arithmetic]
    assert found == [pytest.approx(picojoules * 1e-6, rel=1e-12)] * len(found)
    assert found


def test_energy_of_what_is_read_by_hand() -> None:
    whole = hand_sheet().whole
    assert [(e.arithmetic, e.storage) for e in whole.energy] == list(PAIRS)
    # 10 weights of 9 values: 4 bits each.
    sizes = {Storage.FP32: 40, Storage.INT8: 14, Storage.INDICES: 5 + 9 * 4}
    for e in whole.energy:
        size = sizes.get(e.storage, whole.traffic.coded_bytes)
        assert e.traffic_microjoules == pytest.approx(size * 1.3e3 / 8 * 1e-6, rel=1e-12)
        assert e.energy_microjoules == e.compute_microjoules + e.traffic_microjoules


def test_products_without_a_compressed_weight_are_fp32_for_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    sheet = cost_sheet(compressed_of(model, torch.zeros(4), exclude=["1.*"]), model, torch.randn(1, 2))
    energy = sheet.whole.energy_of(Arithmetic.FIXED_SHIFTS, Storage.CODED)
    assert energy.compute_microjoules == pytest.approx(4 * 4.6e-6, rel=1e-12)
    assert all(e.compute_microjoules == 0 for e in sheet.layers[0].energy if "shifts" in e.arithmetic)


def test_other_figures() -> None:
    model = nn.Linear(2, 1, bias=False)
    figures = EnergyFigures(fp32_multiply=10.0, fp32_add=1.0, dram_byte=100.0)
    sheet = cost_sheet(compressed_of(model), model, torch.randn(1, 2), figures=figures)
    energy = sheet.whole.energy_of(Arithmetic.FP32, Storage.FP32)
    assert energy.compute_microjoules == pytest.approx(22e-6)
    assert energy.traffic_microjoules == pytest.approx(800e-6)


def test_the_published_figures() -> None:
    """Horowitz 2014, figure 1.1.9; ShiftAddNet for the shift."""
    assert EnergyFigures() == EnergyFigures(
        int8_add=0.03,
        int32_add=0.1,
        fp32_add=0.9,
        int8_multiply=0.2,
        int32_multiply=3.1,
        fp32_multiply=3.7,
        int32_shift=0.13,
        dram_byte=162.5,
    )


# For people and for JSON


def test_a_dict_for_json() -> None:
    sheet = hand_sheet()
    found = json.loads(json.dumps(sheet.to_dict()))
    assert found["estimate"] is True
    assert found["assumptions"] == list(ASSUMPTIONS)
    assert found["whole"]["macs"] == 10
    assert sum(found["whole"]["macs_by_order"].values()) == 10
    assert found["whole"]["traffic"]["fp32_bytes"] == 40
    assert found["whole"]["energy"][0]["arithmetic"] == "fp32"
    assert found["layers"][0]["shift_add_macs"] == 3
    assert found["figures_picojoules"]["dram_byte"] == 162.5


def test_lines_for_people() -> None:
    lines = hand_sheet().lines()
    assert lines[0] == "one inference of one example: 10 multiply-accumulates"
    words = [line.split() for line in lines]
    assert ["skipped:", "the", "weight", "is", "0", "2", "20.0%"] in words
    assert ["2", "shifts,", "1", "add:", "order", "2", "2", "20.0%"] in words
    assert ["3", "shifts,", "2", "adds:", "order", "3", "1", "10.0%"] in words
    assert ["fp32", "40", "bytes", "1.0×"] in words
    assert sum("ESTIMATE" in line for line in lines) == 1
    assert lines[-len(ASSUMPTIONS) :] == [f"  - {text}" for text in ASSUMPTIONS]


# What cannot be counted


def indexed(model: nn.Module) -> nn.Module:
    return compressed_of(model).apply_to(model, weights="indices")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(3, 3), r"weight is \(2, 3\) in the compressed network and \(3, 3\) in the model"),
        (lambda: nn.Conv2d(3, 2, 1), r"\(2, 3, 1, 1\) in the model: pass a dense model"),
        (lambda: nn.ReLU(), "absent from the model: pass a dense model of the same architecture"),
        (lambda: nn.Linear(3, 2, device="meta"), r"weight has no memory \(device meta\): load the model"),
        (lambda: indexed(nn.Linear(3, 2)), "absent from the model: pass a dense model"),
        (lambda: torch.compile(nn.Linear(3, 2), backend="eager"), "the model is already compiled"),
    ],
)
def test_a_model_that_is_another(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        cost_sheet(compressed_of(nn.Linear(3, 2)), model(), torch.randn(1, 3))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.randn(2, 3), r"the example is \(2, 3\), and its axis 0 is not a batch of one: pass x\[:1\]"),
        (torch.tensor(1.0), r"the example is \(\), and its axis 0 is not a batch of one"),
        (torch.randn(1, 4), r"the model cannot take the example \(1, 4\): RuntimeError: mat1 and mat2"),
        ({"y": torch.randn(1, 3)}, r"the model cannot take the example \(1, 3\): TypeError"),
        ((), "the example has no tensor: pass what the model takes"),
    ],
)
def test_an_example_that_is_none(example: Any, words: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(DataError, match=words):
        cost_sheet(compressed_of(model), model, example)


def test_the_file_of_another_network(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 2), tmp_path / "other.pwfn"
    for other, values in ((nn.Linear(2, 3), None), (model, torch.zeros(8))):
        compressed_of(other, values).save(path)
        with pytest.raises(FileError, match="not those of this network: pass the file it was saved to"):
            cost_sheet(compressed_of(model), model, torch.randn(1, 3), file=path)
