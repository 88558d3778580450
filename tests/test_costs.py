"""Products, bytes and energy by hand; products also against torch's own counter."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import compressed_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pwfn import Compressed, DataError, FileError, Layout, LayoutError
from pwfn.file.format import Reader
from pwfn.fixing.candidates import order
from pwfn.lab.costs import (
    Arithmetic,
    CostSheet,
    Storage,
    cost_sheet,
    count_products,
)
from pwfn.lab.costs.sheet import picojoules, untouched_bytes
from pwfn.zoo.models import OWN

VALUES = torch.tensor([0.0, 0.5, -0.25, 0.375, 0.6875, 0.3])  # orders 0, 1, 1, 2, 3, and many


def mixed(model: nn.Module, **selectors: Any) -> Compressed:
    """The model with all of VALUES in turn."""
    size = Layout.of(model, **selectors).size
    return compressed_of(model, VALUES[torch.arange(size) % len(VALUES)], **selectors)


def uses(model: nn.Module, example: Any, **selectors: Any) -> dict[str, int]:
    """Products of each parameter; by order they must be what its values say."""
    compressed = mixed(model, **selectors)
    found = count_products(compressed, model, example)
    values = compressed.values()
    for entry, by_order in zip(compressed.layout.entries, found.by_order, strict=True):
        times, rest = divmod(sum(by_order.values()), entry.size)
        assert rest == 0
        orders = Counter(order(value) for value in values[entry.span].tolist())
        assert by_order == {n: times * count for n, count in orders.items() if times}
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
        # two groups: each of 6 filters sees 2 of 4 channels, at 3×3 positions.
        (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5), 9 * 6 * 2 * 9),
        (nn.Conv2d(4, 4, 3, groups=4, padding="same"), (1, 4, 5, 6), 30 * 4 * 9),
        (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 1, 4, 4), 16 * 2 * 9),
        # transposed: each of 3×3 input positions meets every weight, wherever it lands.
        (nn.ConvTranspose2d(2, 5, 3, stride=2, padding=1), (1, 2, 3, 3), 9 * 2 * 5 * 9),
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
    assert uses(layer, example)["weight"] == macs  # where operations arrive whole


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


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_tokens_in_any_memory_order(bias: bool) -> None:
    example = torch.randn(1, 3, 5, 2).permute(0, 3, 2, 1)
    assert uses(nn.Linear(3, 4, bias=bias), example)["weight"] == 10 * 12


def test_channels_last() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    values = torch.zeros(54 + 3)
    values[:54].view(3, 2, 3, 3)[1] = 0.5  # one filter of shifts
    found = count_products(compressed_of(model, values), model, torch.randn(1, 2, 5, 5))
    assert found.by_order[0] == {0: 9 * 36, 1: 9 * 18}


class Twice(nn.Module):
    """One layer called for 5 tokens and for 1, and a second layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.other = nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(self.one(x)).sum(1))


def test_a_tied_weight_counts_every_time_and_is_read_once() -> None:
    model, example = Twice(), torch.randn(1, 5, 4)
    compressed = mixed(model)
    whole = cost_sheet(compressed, model, example)
    assert (whole.macs, whole.bytes_read[Storage.FP32]) == ((5 + 5 + 1) * 16, 64)
    tied = count_products(compressed, model, example)
    model.other.weight = nn.Parameter(torch.randn(4, 4))
    assert count_products(compressed, model, example) == tied  # also where the model's tie is undone


class Language(nn.Module):
    """One table of words for input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.words(ids)), self.words.weight)


class Standardised(nn.Conv2d):
    """Its products are with another tensor than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, (self.weight - self.weight.mean()) / self.weight.std())


def test_a_table_that_a_model_multiplies_by() -> None:
    found = uses(Language(), torch.tensor([[1, 2, 3]]), include=["type:Embedding"])
    assert found == {"words.weight": 3 * 40, "mix.weight": 3 * 16, "mix.bias": 0}


@pytest.mark.parametrize(
    ("model", "example", "name", "macs", "uncompressed"),
    [
        (nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), torch.tensor([[1, 2, 3]]), "0.weight", 24, 0),
        (Standardised(1, 2, 3, bias=False), torch.randn(1, 1, 5, 5), "weight", 0, 9 * 18),
    ],
)
def test_weights_in_no_product_are_named(
    model: nn.Module, example: Tensor, name: str, macs: int, uncompressed: int
) -> None:
    """Only looked up, or changed before use."""
    selectors = {"include": ["type:Embedding"]} if isinstance(model, nn.Sequential) else {}
    sheet = cost_sheet(mixed(model, **selectors), model, example)
    assert sheet.not_multiplied == (name,)
    assert (sheet.macs, sheet.uncompressed_macs) == (macs, uncompressed)


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


def test_a_transformer_with_a_fast_path() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = torch.backends.mha.get_fastpath_enabled()
    found = count_products(mixed(model), model, torch.randn(1, 5, 8))
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert sum(sum(n.values()) for n in found.by_order) == 5 * (3 * 64 + 64 + 2 * 8 * 16)
    assert found.uncompressed == 2 * 5 * 5 * 8


class Direct(nn.Module):
    """A weight in every kind of product, on either side, sliced, and repeated."""

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
    found = count_products(mixed(model), model, (torch.randn(1, 4, 4), how))
    assert sum(found.by_order[0].values()) == macs
    assert found.uncompressed == 0


def test_a_bilinear_layer() -> None:
    assert uses(nn.Bilinear(3, 4, 5), (torch.randn(1, 3), torch.randn(1, 4))) == {"weight": 60, "bias": 0}


def test_slices_and_neighbours_in_memory_have_their_own_orders() -> None:
    direct, values = Direct(), torch.zeros(4, 4)
    values[1] = 0.5
    values[2] = 0.375
    found = count_products(compressed_of(direct, values.reshape(-1)), direct, (torch.randn(1, 4, 4), "rows"))
    assert found.by_order == ({0: 16, 1: 16},)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    flat = torch.randn(20)
    model[0].weight = nn.Parameter(flat[1:10].view(3, 3))
    model[1].weight = nn.Parameter(flat[11:].view(3, 3))
    values = torch.cat((torch.full((9,), 0.5), torch.full((9,), 0.375)))
    found = count_products(compressed_of(model, values), model, torch.randn(1, 2, 3))
    assert found.by_order == ({1: 18}, {2: 18})


def test_layers_left_out_are_not_compressed() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    found = count_products(mixed(model, exclude=["1.*"]), model, torch.randn(1, 2, 3))
    expected = {0: 4, 1: 8, 2: 4, 3: 4, order(float(VALUES[5])): 4}
    assert (found.by_order, found.uncompressed) == ((expected,), 40)


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_vgg16", "cifar_vit_tiny", "digits_resnet"])
def test_a_whole_network_is_as_torch_counts_it(name: str) -> None:
    model = OWN[name]()
    example = torch.randn(1, 1, 8, 8) if name == "digits_resnet" else torch.randn(1, 3, 32, 32)
    sheet = cost_sheet(mixed(model), model, example)
    assert sheet.macs + sheet.uncompressed_macs == torch_macs(model, example)
    assert sheet.not_multiplied == ()
    assert (sheet.uncompressed_macs > 0) == (name == "cifar_vit_tiny")


def test_a_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count_products(mixed(model), model, torch.randn(1, 1, 5, 5))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# Bytes


def test_bytes_by_hand() -> None:
    """16 weights of three values, 2 bits each as indices."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    compressed = compressed_of(model, torch.tensor([0.5] * 8 + [0.0] * 4 + [-0.25] * 4))
    sheet = cost_sheet(compressed, model, torch.randn(1, 4))
    coded = Reader(compressed.dumps()).sizes
    sizes = (64, 16 + 4, 4 + 3 * 4, coded.indices + coded.codebooks + coded.tables)
    assert list(sheet.bytes_read.values()) == [2 * 4 * 4 + size for size in sizes]


@pytest.mark.parametrize(("unique", "bits"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5)])
def test_an_index_has_as_many_bits_as_its_codebook_needs(unique: int, bits: int) -> None:
    model = nn.Linear(7, 5, bias=False)
    values = (torch.arange(35) % unique).float()
    sheet = cost_sheet(compressed_of(model, values), model, torch.randn(1, 7))
    assert sheet.bytes_read[Storage.INDICES] == math.ceil(35 * bits / 8) + 4 * unique


def test_parts_with_their_own_codebooks() -> None:
    """Two rows of 8: one of two values, the other of four."""
    model = nn.Linear(8, 2, bias=False)
    values = torch.cat((torch.arange(8) % 2, torch.arange(8) % 4)).float()
    compressed = Compressed.of(Layout.of(model), values, None, {}, divide=lambda entry: (0, 2))
    sheet = cost_sheet(compressed, model, torch.randn(1, 8))
    assert sheet.bytes_read[Storage.INDICES] == (8 * 1 + 8 * 2) // 8 + 4 * (2 + 4)


def test_coded_bytes_are_those_of_the_file_or_of_one_written_now(tmp_path: Path) -> None:
    model, path, example = OWN["digits_resnet"](), tmp_path / "net.pwfn", torch.randn(1, 1, 8, 8)
    compressed = compressed_of(model)
    compressed.save(path)
    measured = cost_sheet(compressed, model, example, file=path)
    sizes = Reader(path).sizes
    there = sizes.indices + sizes.tables + sizes.codebooks
    assert measured.bytes_read[Storage.CODED] == there + untouched_bytes(compressed)
    assert cost_sheet(compressed, model, example) == measured


# Energy


def hand_sheet() -> CostSheet:
    """Ten products: two with 0, three with a power of two, two of order 2, one of order 3, two of many."""
    model = nn.Linear(10, 1, bias=False)
    values = torch.tensor([0.0, 0.0, 0.5, -0.25, 1.0, 0.375, 0.75, 0.6875, 0.3, 0.1])
    return cost_sheet(compressed_of(model, values), model, torch.randn(1, 10))


def test_counts_of_the_sheet() -> None:
    whole = hand_sheet()
    found = (whole.skipped_macs, whole.shift_macs, whole.shift_add_macs, whole.multiplied_macs)
    assert (found, whole.macs) == ((2, 3, 3, 2), 10)


def test_four_powers_of_two_are_shifts_and_five_are_not() -> None:
    """85 is 64 + 16 + 4 + 1, and 341 has 256 in addition; no fewer sum to them."""
    model = nn.Linear(2, 1, bias=False)
    whole = cost_sheet(compressed_of(model, torch.tensor([85.0, 341.0])), model, torch.randn(1, 2))
    assert whole.macs_by_order == {4: 1, 5: 1}
    assert (whole.shift_add_macs, whole.multiplied_macs) == (1, 1)
    assert [picojoules(Arithmetic.FIXED_SHIFTS, n) for n in (4, 5)] == pytest.approx([4 * 0.23, 3.2])
    assert [picojoules(Arithmetic.FLOAT_SHIFTS, n) for n in (4, 5)] == pytest.approx([4 * 0.93, 4.6])


@pytest.mark.parametrize(
    ("arithmetic", "picojoules"),
    [
        (Arithmetic.FP32, 10 * (3.7 + 0.9)),
        (Arithmetic.INT8, 10 * (0.2 + 0.1)),
        # 3 + 2 × 2 + 3 powers of two, and two multiplications.
        (Arithmetic.FLOAT_SHIFTS, 10 * (0.03 + 0.9) + 2 * (3.7 + 0.9)),
        (Arithmetic.FIXED_SHIFTS, 10 * (0.13 + 0.1) + 2 * (3.1 + 0.1)),
    ],
)
def test_energy_of_products_by_hand(arithmetic: Arithmetic, picojoules: float) -> None:
    found = [e.compute_microjoules for e in hand_sheet().energy if e.arithmetic is arithmetic]
    assert found == [pytest.approx(picojoules * 1e-6, rel=1e-12)] * len(found)
    assert found


def test_energy_of_reading_by_hand() -> None:
    """DRAM: 1.3 nJ for 64 bits."""
    whole = hand_sheet()
    # 10 weights of 9 values: 4 bits each.
    sizes = {Storage.FP32: 40, Storage.INT8: 14, Storage.INDICES: 5 + 9 * 4}
    for e in whole.energy:
        size = sizes.get(e.storage, whole.bytes_read[Storage.CODED])
        assert e.traffic_microjoules == pytest.approx(size * 1.3e3 / 8 * 1e-6, rel=1e-12)
        assert e.energy_microjoules == e.compute_microjoules + e.traffic_microjoules


def test_products_without_a_compressed_weight_are_fp32_for_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    sheet = cost_sheet(compressed_of(model, torch.zeros(4), exclude=["1.*"]), model, torch.randn(1, 2))
    shifts = [e.compute_microjoules for e in sheet.energy if "shifts" in e.arithmetic]
    assert shifts == pytest.approx([4 * 4.6e-6] * 4, rel=1e-12)


# Text and JSON


def test_a_dict_for_json() -> None:
    sheet = hand_sheet()
    found = json.loads(json.dumps(asdict(sheet)))
    assert found["macs_by_order"]["0"] == 2
    assert found["bytes_read"]["fp32"] == 40
    assert found["energy"][0]["arithmetic"] == "fp32"


# What cannot be counted


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(3, 3), r"weight is \(2, 3\) in the compressed network and \(3, 3\) in the model"),
        (lambda: nn.ReLU(), "absent from the model: pass a dense model"),
        (lambda: nn.Linear(3, 2, device="meta"), r"weight has no memory \(device meta\): load the model"),
        (
            lambda: mixed(nn.Linear(3, 2)).apply_to(nn.Linear(3, 2), weights="indices"),
            "absent from the model",
        ),
        (lambda: torch.compile(nn.Linear(3, 2), backend="eager"), "already compiled"),
    ],
)
def test_a_model_that_is_another(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        cost_sheet(mixed(nn.Linear(3, 2)), model(), torch.randn(1, 3))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.randn(2, 3), r"the example is \(2, 3\), and not a batch of one"),
        (torch.tensor(1.0), r"the example is \(\), and not a batch of one"),
        (torch.randn(1, 4), r"cannot take the example \(1, 4\): RuntimeError"),
        ({"y": torch.randn(1, 3)}, r"cannot take the example \(1, 3\): TypeError"),
        ((), "has no tensor"),
    ],
)
def test_an_example_that_is_none(example: Any, words: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(DataError, match=words):
        cost_sheet(mixed(model), model, example)


def test_the_file_of_another_network(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 2), tmp_path / "other.pwfn"
    for other in (mixed(nn.Linear(2, 3)), compressed_of(model, torch.zeros(8))):
        other.save(path)
        with pytest.raises(FileError, match="not those of this network"):
            cost_sheet(mixed(model), model, torch.randn(1, 3), file=path)
