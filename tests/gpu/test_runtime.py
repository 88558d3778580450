"""The kernels that look weights up, compared with plain torch in float64.

Runs on a CUDA device, and with TRITON_INTERPRET=1 on the CPU; skipped elsewhere. The interpreter has no
assembly: there ``gemv-table`` reads the palette from memory instead, and numpy computes what each instruction
of ``mma`` does.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from pwfn import Compressed, Layout, WeightError  # noqa: E402 - after the skips
from pwfn.layout import untouched  # noqa: E402
from pwfn.runtime import (  # noqa: E402
    assembly,
    capture,
    indexed_linear,
    library,
    pack,
    reference,
)
from pwfn.runtime import triton as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
OPERATIONS = ("expand", "indexed_linear", "indexed_conv2d")
on_device = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
BATCHES = (1, 3, 17, 32)
COLUMNS = (16, 1024, 1040, 4112)  # some no multiple of a block
ODD_COLUMNS = (1, 127, 1025)
NARROW = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)  # its dot knows no bfloat16

# Relative to the norm of the result: the sums are in float32, the results are rounded to their own type.
# A bfloat16 is rounded on a GPU, and cut off in the interpreter.
CLOSE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}


def drawn(
    inputs: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    size: int = 256,
    parts: int = 1,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inputs + 10 * rows + 100 * columns)
    x = torch.randn(inputs, columns, generator=generator).to(DEVICE, dtype)
    indices = torch.randint(0, size, (rows, columns), generator=generator).to(DEVICE, torch.uint8)
    palettes = torch.randn(parts, size, generator=generator).to(DEVICE, dtype)
    indices = pack(indices) if packed else indices
    return x, indices, palettes, torch.randn(rows, generator=generator).to(DEVICE, dtype)


def check(made: Tensor, x: Tensor, indices: Tensor, palettes: Tensor, bias: Tensor | None) -> None:
    wide = None if bias is None else bias.double()
    wanted = reference.indexed_linear(x.double(), indices, palettes.double(), wide)
    assert made.dtype == x.dtype
    assert made.shape == wanted.shape
    error = (made.double() - wanted).norm() / wanted.norm()
    assert error < CLOSE[x.dtype], error


class Assembly:
    """What the assembly in ``mma`` means, on arrays whose last axis is the lanes of a warp."""

    def __init__(self, words: Any) -> None:
        self.words = words  # reads 32-bit words at addresses, where a mask says so
        self.table = np.zeros(256, np.uint32)
        self.copies = np.zeros(256, int)  # of each entry, in 16ths of 128 bytes

    def __call__(self, text: str, given: list[Any]) -> list[Any]:
        """The outputs for these inputs."""
        fills = {getattr(assembly, name).value: n for name, n in FILLS.items()}
        if text in fills:
            entry, value, _, _ = np.broadcast_arrays(*given)
            self.table[entry] = value.astype(np.uint32)
            np.add.at(self.copies, entry, fills[text])
            return [np.zeros_like(entry)]
        if text in (assembly.STREAM.value, assembly.KEEP.value, assembly.KEEP_INSIDE.value):
            inside = given[1] != 0 if len(given) == 2 else np.ones(given[0].shape, bool)
            return [self.words(given[0] + 4 * i, inside) for i in range(4 if "no_allocate" in text else 8)]
        if text == assembly.PAIRS.value:
            assert self.copies.min() == self.copies.max() >= 8
            a, b, c, d = (self.table[given[0].astype(np.uint32) >> 8 * i & 255] & 0xFFFF for i in range(4))
            return [a | b << 16, c | d << 16]
        if text == assembly.BYTES.value:
            return [self.table[given[0].astype(np.uint32) >> 8 * i & 255] for i in range(4)]
        if text == assembly.MMA_FLOAT16.value:
            return self.multiplied(*given)
        return [np.zeros(1, np.int32)]  # addresses in shared memory, and the barrier

    def multiplied(self, *given: Any) -> list[Any]:
        """Of mma.m16n8k16, by the tables in NVIDIA's manual of its assembly."""
        half, quarter = np.arange(32) // 4, np.arange(32) % 4
        numbers = [np.ascontiguousarray(g).astype(np.uint32).view(np.float16) for g in given[4:]]
        sums = []
        for place in range(given[0].shape[0]):
            left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
            pairs = [n[place].reshape(32, 2) for n in numbers]
            for i in range(2):
                for down, across, pair in zip((0, 8, 0, 8), (0, 0, 8, 8), pairs[:4], strict=True):
                    left[half + down, quarter * 2 + i + across] = pair[:, i]
                for down, pair in zip((0, 8), pairs[4:], strict=True):
                    right[quarter * 2 + i + down, half] = pair[:, i]
            made = left @ right
            sums.append([made[half + i // 2 * 8, quarter * 2 + i % 2] for i in range(4)])
        return [given[i] + np.stack([s[i] for s in sums]) for i in range(4)]


FILLS = {"FILL": 8, "FILL_HALF": 4, "FILL_QUARTER": 2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives the interpreter the meaning of the assembly."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton._C.libtriton import interpreter
    from triton.runtime.interpreter import TensorHandle

    def words(at: Any, inside: Any) -> Any:
        at = np.ascontiguousarray(at).astype(np.uint64)
        return interpreter.load(at, inside, np.zeros(at.shape, np.int32), np.dtype(np.int32))

    meaning = Assembly(words)

    def elementwise(text: Any, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
        given = [np.asarray(a.handle.data if isinstance(a, tl.tensor) else a) for a in args]
        made = meaning(getattr(text, "value", text), given)
        several = isinstance(dtype, tuple)
        numpy_types = {tl.int32: np.int32, tl.float32: np.float32}
        out = []
        for array, kind in zip(made, dtype if several else (dtype,), strict=True):
            array = np.ascontiguousarray(array)
            array = array.view(numpy_types[kind]) if array.dtype == np.uint32 else array
            array = array.astype(numpy_types[kind])
            out.append(tl.tensor(TensorHandle(array, kind), tl.block_type(kind, list(array.shape))))
        return tuple(out) if several else out[0]

    monkeypatch.setattr(tl, "inline_asm_elementwise", elementwise)
    yield


@pytest.mark.parametrize("inputs", [1, 2, 3, 8, 9, 17, 32])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", NARROW)
def test_tensor_cores_from_the_table(inputs: int, columns: int, dtype: torch.dtype) -> None:
    *tensors, bias = drawn(inputs, 37, columns, dtype)
    for added in (bias, None):
        check(kernels.indexed_linear(*tensors, added, variant="mma"), *tensors, added)


MMA_SHAPES = [kernels.mma_shape(inputs, rows) for inputs in (8, 16, 32) for rows in (4096, 14336)]


@pytest.mark.parametrize("shape", [*MMA_SHAPES, (1, 16, 4, 1), (1, 8, 2, 1)], ids=str)
@pytest.mark.parametrize("inputs", [1, 7, 16, 32])
@pytest.mark.parametrize("columns", [1024, 1040])
def test_every_shape_of_a_program_with_tensor_cores(
    shape: tuple[int, ...], inputs: int, columns: int
) -> None:
    tensors = drawn(inputs, 150, columns, NARROW[-1])
    if kernels.Mma(*shape).fits(inputs):
        check(kernels.indexed_linear(*tensors, variant="mma", shape=shape), *tensors)
    else:
        with pytest.raises(WeightError, match=f"no room for {inputs} inputs"):
            kernels.indexed_linear(*tensors, variant="mma", shape=shape)


@pytest.mark.parametrize("inputs", [1, 3, 8, 17])
@pytest.mark.parametrize("columns", [32, 1024, 2080])
@pytest.mark.parametrize("size", [1, 7, 16])
def test_tensor_cores_from_two_indices_in_a_byte(inputs: int, columns: int, size: int) -> None:
    *tensors, bias = drawn(inputs, 37, columns, NARROW[-1], size, packed=True)
    assert tensors[1].shape == (37, columns // 2)
    for added in (bias, None):
        check(kernels.indexed_linear(*tensors, added, variant="mma"), *tensors, added)


PACKED_SHAPES = [
    (1, 16, 16, 1, 2, 0),
    (1, 8, 8, 1, 3, 0, 1),
    (2, 8, 4, 1, 2),
    (1, 4, 4, 2, 4),
    (1, 32, 32, 1, 1, 0),
]


@pytest.mark.parametrize("shape", PACKED_SHAPES, ids=str)
@pytest.mark.parametrize("columns", [4096, 4128])
@pytest.mark.parametrize("packed", [True, False])
def test_every_depth_of_a_program(shape: tuple[int, ...], columns: int, packed: bool) -> None:
    tensors = drawn(1, 150, columns, NARROW[-1], 16, packed=packed)
    check(kernels.indexed_linear(*tensors, variant="mma", shape=shape), *tensors)


IMAGES = [  # channels, outputs, kernel, then stride, padding and dilation, and the image
    (32, 16, (3, 3), (1, 1), (1, 1), (1, 1), (1, 5, 7)),
    (64, 37, (3, 3), (2, 1), (1, 0), (1, 1), (2, 9, 8)),
    (32, 33, (1, 1), (2, 2), (0, 0), (1, 1), (1, 7, 7)),
    (96, 20, (5, 3), (1, 2), (4, 2), (2, 1), (3, 6, 11)),
    (32, 16, (2, 2), (1, 1), (0, 0), (1, 1), (1, 2, 2)),
]


def drawn_image(case: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    channels, outputs, kernel, *geometry, (images, height, width) = case
    generator = torch.Generator().manual_seed(channels + outputs)
    x = torch.randn(images, channels, height, width, generator=generator)
    indices = torch.randint(0, size, (outputs, channels, *kernel), generator=generator).to(torch.uint8)
    palettes = torch.randn(1, size, generator=generator)
    last = torch.channels_last
    return (
        x.to(DEVICE, NARROW[-1], memory_format=last),
        indices.to(DEVICE, memory_format=last),
        palettes.to(DEVICE, NARROW[-1]),
        torch.randn(outputs, generator=generator).to(DEVICE, NARROW[-1]),
        *geometry,
        1,
    )


@pytest.mark.parametrize("case", IMAGES, ids=str)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [None, (1, 8, 4, 1, 2, 0, 0, 1), (2, 2, 2, 1, 1, 0, 1, 4)], ids=str)
def test_a_convolution_is_a_product_with_gathered_columns(
    case: tuple[Any, ...], packed: bool, shape: tuple[int, ...] | None
) -> None:
    x, indices, palettes, bias, *geometry = drawn_image(case, 13 if packed else 200)
    wanted = reference.indexed_conv2d(x.double(), indices, palettes.double(), bias.double(), *geometry)
    indices = pack(indices) if packed else indices
    places = wanted.numel() // wanted.shape[1]
    assert kernels.fits_conv2d(x, indices, palettes, places, 1)
    made = kernels.indexed_conv2d(x, indices, palettes, bias, *geometry, shape=shape)
    assert made.shape == wanted.shape
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert (made.double() - wanted).norm() / wanted.norm() < CLOSE[x.dtype]


def test_which_convolutions_have_a_kernel() -> None:
    x, indices, palettes, *_ = drawn_image(IMAGES[0], 16)
    fits = kernels.fits_conv2d
    assert fits(x, indices, palettes, 35, 1)
    assert fits(x, pack(indices), palettes, library.MOST_PLACES, 1)
    assert not fits(x, indices, palettes, library.MOST_PLACES + 1, 1)
    assert not fits(x.float(), indices, palettes, 35, 1)
    assert not fits(x.contiguous(), indices, palettes, 35, 1)
    assert not fits(x, indices.contiguous(), palettes, 35, 1)
    assert not fits(x[:, :16], indices[:, :16], palettes, 35, 1)
    assert not fits(x, indices.to(torch.int16), palettes, 35, 1)
    assert not fits(x, indices, palettes.repeat(2, 1), 35, 1)
    made = kernels.indexed_conv2d(x[:, :8], indices[:4, :4], palettes, None, (1, 1), (1, 1), (1, 1), 2)
    wanted = reference.indexed_conv2d(x[:, :8], indices[:4, :4], palettes, None, (1, 1), (1, 1), (1, 1), 2)
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_products_from_the_table(inputs: int, columns: int, dtype: torch.dtype) -> None:
    *tensors, bias = drawn(inputs, 37, columns, dtype)
    for added in (bias, None):
        made = kernels.indexed_linear(*tensors, added, variant="gemv-table")
        check(made, *tensors, added)


@pytest.mark.parametrize("shape", [(8, 8, 2), (2, 8, 8), (2, 16, 4), (4, 16, 2), (4, 4, 4)], ids=str)
def test_every_shape_of_a_program(shape: tuple[int, ...]) -> None:
    tensors = drawn(1, 70, 1040, torch.bfloat16)
    check(kernels.indexed_linear(*tensors, variant="gemv-table", shape=shape), *tensors)


@pytest.mark.parametrize("inputs", [1, 3, 4])
@pytest.mark.parametrize("columns", ODD_COLUMNS)
@pytest.mark.parametrize("parts", [1, 3, 39])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_sums_of_products_through_the_cache(
    inputs: int, columns: int, parts: int, dtype: torch.dtype, packed: bool
) -> None:
    tensors = drawn(inputs, 39, columns, dtype, 13, parts, packed)
    check(kernels.indexed_linear(*tensors, variant="gemv-load"), *tensors)


@pytest.mark.parametrize("inputs", BATCHES)
@pytest.mark.parametrize("columns", ODD_COLUMNS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("packed", [True, False])
def test_tensor_cores_through_the_cache(
    inputs: int, columns: int, parts: int, dtype: torch.dtype, packed: bool
) -> None:
    tensors = drawn(inputs, 39, columns, dtype, 13, parts, packed)
    check(kernels.indexed_linear(*tensors, variant="dot-load"), *tensors)


@pytest.mark.parametrize("size", [1, 2, 31, 255, 256])
@pytest.mark.parametrize("variant", ["mma", "gemv-table", "gemv-load", "dot-load"])
def test_palettes_of_all_sizes(size: int, variant: str) -> None:
    tensors = drawn(2, 40, 1024, torch.float16, size)
    check(kernels.indexed_linear(*tensors, variant=variant), *tensors)


@pytest.mark.parametrize("variant", ["mma", "gemv-table", "gemv-load", "dot-load"])
def test_an_index_beyond_the_palette_reads_zero(variant: str) -> None:
    x, indices, palettes, _ = drawn(2, 40, 1024, torch.float16, 200)
    short = palettes[:, :100].contiguous()
    padded = torch.cat([short, torch.zeros_like(short)], 1)
    check(kernels.indexed_linear(x, indices, short, None, variant=variant), x, indices, padded, None)


@pytest.mark.parametrize("variant", kernels.VARIANTS)
def test_inputs_of_any_number_of_axes(variant: str) -> None:
    x, indices, palettes, bias = drawn(6, 40, 64, torch.float16)
    for given in (x[0], x, x.view(2, 3, 64), x.view(6, 64).t().contiguous().t()):
        made = kernels.indexed_linear(given, indices, palettes, bias, variant=variant)
        check(made, given, indices, palettes, bias)


def test_what_is_chosen() -> None:
    def chosen(inputs: int, columns: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> str:
        return kernels.choose(*drawn(inputs, 48, columns, dtype, **more)[:3])

    assert chosen(1, 64) == chosen(1, 64, torch.float16) == chosen(5, 64) == chosen(32, 64) == "mma"
    assert chosen(1, 72) == chosen(4, 72) == "gemv-table"
    assert chosen(1, 63) == chosen(1, 64, parts=3) == chosen(4, 64, torch.float32) == "gemv-load"
    assert chosen(5, 63) == chosen(5, 72) == chosen(5, 64, parts=3) == "dot-load"
    assert chosen(33, 64) == chosen(5, 64, torch.float32) == chosen(1, 64, torch.float64) == "dense"
    assert kernels.choose(*drawn(1, 8192, 64, torch.bfloat16)[:3]) == "gemv-table"
    assert kernels.choose(*drawn(2, 8192, 64, torch.bfloat16)[:3]) == "mma"
    x, indices, palettes, _ = drawn(1, 48, 64, torch.bfloat16)
    assert kernels.choose(x, indices.to(torch.int16), palettes) == "dense"
    assert chosen(1, 64, size=16, packed=True) == chosen(32, 96, size=16, packed=True) == "mma"
    assert chosen(1, 48, size=16, packed=True) == "gemv-load"
    assert chosen(5, 48, size=16, packed=True) == "dot-load"
    longer = torch.zeros(69, device=DEVICE, dtype=torch.bfloat16)
    assert kernels.choose(longer[1:65].view(1, 64), indices, palettes) == "gemv-load"
    assert kernels.choose(longer[4:68].view(1, 64), indices, palettes) == "gemv-table"
    for variant, columns in (("gemv-table", 63), ("mma", 72), ("bytes", 64)):
        with pytest.raises(WeightError, match=f"{variant} cannot take these tensors"):
            kernels.indexed_linear(*drawn(1, 48, columns, torch.bfloat16), variant=variant)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_expanding(dtype: torch.dtype, axis: int) -> None:
    for parts in (1, 2):
        indices = torch.randint(0, 9, (6, 4, 8, 130), device=DEVICE).to(dtype)
        palettes = torch.randn(parts, 9, device=DEVICE)
        part = indices[1:3] if axis else indices[:, 1:3]  # not contiguous, or not from the first element
        for given in (indices, indices.to(memory_format=torch.channels_last), part):
            made = kernels.expand(given, palettes, axis)
            assert torch.equal(made, reference.expand(given, palettes, axis))
            if given is not part:
                assert made.stride() == given.stride()
    assert kernels.expand(indices[:0], palettes, 1).shape == (0, 4, 8, 130)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(6, 9), (6, 130), (4, 3, 5, 5), (2, 8, 3, 1)], ids=str)
def test_expanding_two_indices_in_a_byte(shape: tuple[int, ...], axis: int) -> None:
    for parts in (1, shape[axis]):
        indices = torch.randint(0, 9, shape, device=DEVICE).to(torch.uint8)
        palettes = torch.randn(parts, 9, device=DEVICE)
        formats = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
        for memory_format in formats:
            given = indices.contiguous(memory_format=memory_format)
            made = kernels.expand(pack(given), palettes, axis, shape[1])
            assert torch.equal(made, reference.expand(given, palettes, axis))
            assert made.is_contiguous(memory_format=memory_format)


def test_no_inputs_are_no_work() -> None:
    _, indices, palettes, bias = drawn(1, 40, 64, torch.float16)
    none = torch.zeros(0, 64, device=DEVICE, dtype=torch.float16)
    assert kernels.indexed_linear(none, indices, palettes, bias).shape == (0, 40)


@on_device
@pytest.mark.parametrize("rows", [4096, 14336])
@pytest.mark.parametrize("columns", [4096, 14336])
def test_layers_of_a_language_model(rows: int, columns: int) -> None:
    for inputs in (1, 2, 4, 8, 16, 32, 33):
        tensors = drawn(inputs, rows, columns, torch.bfloat16)
        made = indexed_linear(*tensors)
        check(made, *tensors)
        assert torch.equal(made, indexed_linear(*tensors))  # no atomics: the same input, the same bits


@on_device
def test_the_kernels_are_what_a_cuda_tensor_gets() -> None:
    tensors = drawn(1, 4096, 4096, torch.bfloat16)
    assert torch.equal(indexed_linear(*tensors), kernels.indexed_linear(*tensors, variant="mma"))


@on_device
# torch's own warning that the mode is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("inputs", [1, 4, 16, 32])
def test_can_be_captured_and_takes_no_more_than_its_result(inputs: int) -> None:
    tensors = drawn(inputs, 4096, 4096, torch.bfloat16)
    wanted = indexed_linear(*tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        torch.cuda.set_sync_debug_mode("error")
        made = indexed_linear(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before <= made.nbytes + 512
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = indexed_linear(*tensors)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


@on_device
def test_a_captured_network_gives_the_same_bits_and_no_dense_weight() -> None:
    model = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, stride=2))
    layout = Layout.of(model)
    form: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    for count in (9, 40):  # packed and not
        values = torch.linspace(-0.1, 0.1, count)[torch.randint(0, count, (layout.size,))]
        small = Compressed.of(layout, values, None, untouched(model, layout))
        dense = small.apply_to(copy.deepcopy(model)).eval().to(**form)
        made = small.apply_to(copy.deepcopy(model), weights="indices").eval().to(**form)
        assert isinstance(made[0], nn.Conv2d)
        assert made[0].indexed_weight.indices.shape[1] == (16 if count == 9 else 32)
        x = torch.randn(1, 32, 8, 8).to(**form)
        run = capture(made, x)
        with torch.inference_mode():
            for given in (x, 2 * x):
                assert torch.equal(run(given), made(given))
                torch.testing.assert_close(made(given), dense(given), rtol=2e-2, atol=2e-2)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            made[0](x)
            assert torch.cuda.max_memory_allocated() - before < 64 * 32 * 9 * 2


@on_device
@pytest.mark.parametrize("name", OPERATIONS)
# torch's own deprecations, met while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_opcheck(name: str) -> None:
    x, indices, palettes, bias = drawn(3, 48, 64, torch.float32)
    case: tuple[Any, ...] = (x.requires_grad_(), indices, palettes, bias)
    if name == "expand":
        case = (indices, palettes, 0)
    if name == "indexed_conv2d":
        x, indices, *more = drawn_image(IMAGES[1], 16)
        case = (x.requires_grad_(), pack(indices), *more)
    done = torch.library.opcheck(getattr(torch.ops.pwfn, name).default, case)
    assert set(done.values()) == {"SUCCESS"}


@on_device
def test_a_model_on_the_device_holds_no_dense_weight() -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 64)).cuda()
    layout = Layout.of(model)
    values = torch.tensor([-0.125, 0.0, 0.0625])[torch.randint(0, 3, (layout.size,))]
    small = Compressed.of(layout, values, None, untouched(model, layout))
    dense = small.apply_to(copy.deepcopy(model)).bfloat16()
    made = small.apply_to(model, weights="indices").bfloat16()
    assert made[0].indexed_weight.indices.is_cuda
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.allclose(made(x), dense(x), rtol=2e-2, atol=2e-2)
    held = [made[i].indexed_weight.indices.nbytes for i in (0, 2)]
    assert sum(held) == (1024 * 2048 + 2048 * 64) // 2  # three values: two in a byte
