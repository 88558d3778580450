"""The inline assembly (PTX) of the kernels, each instruction sequence in one small Triton function.

A product with few inputs is bound by memory, at one byte per weight, and by the look-ups, at about four
instructions and one shared-memory read per weight. Random reads of one small table would cause three- to
four-way bank conflicts. Therefore each program writes 32 copies of the palette to shared memory (32 KiB), one
per bank, and every lane reads its own copy: a look-up is a byte selection, a multiply-add for the address
and one conflict-free read. The cost does not depend on the size of the palette.

Two indices in one byte select a word with both values: half the bytes, and half the look-ups.
"""

# Kernel parameters are pointers and scalars of Triton's language, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs
# Constants are written in capitals, as is usual in Triton.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:  # comes with torch's CUDA builds only, and has no type annotations
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # library.py does not register the kernels then
    triton = tl = None

__all__ = ["tl", "triton"]  # imported from here by kernels.py


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or the plain function where Triton is not installed."""
    return function if triton is None else triton.jit(function)


if triton is not None:
    # The table is a variable of the assembly itself, because Triton gives no address of shared memory.
    # Triton's own shared memory is dynamic and begins behind it. A kernel may use 48 KiB of both without a
    # request; Triton requests more for its own part only: that must be below 16 KiB or above 48 KiB.
    TABLE_ADDRESS = tl.constexpr("{ .shared .align 128 .b8 copies[32768]; mov.u32 $0, copies; }")

    # A thread writes all 32 copies of an entry, or some of them if there are more threads than entries: 16
    # bytes at a time. Each lane begins at another place of the row, so eight lanes together touch all banks.
    def _fill(count: int) -> Any:
        return tl.constexpr(
            "{ .reg .b32 lane, row, at; mov.u32 lane, %laneid; add.u32 lane, lane, $4;\n"
            + "mad.lo.u32 row, $1, 128, $3;\n"
            + "".join(
                f"add.u32 at, lane, {i}; and.b32 at, at, 7; mad.lo.u32 at, at, 16, row; "
                "st.shared.v4.b32 [at], {$2, $2, $2, $2};\n"
                for i in range(count)
            )
            + "mov.b32 $0, 0; }"
        )

    FILL, FILL_HALF, FILL_QUARTER = _fill(8), _fill(4), _fill(2)
    OWN_COPY = tl.constexpr("{ .reg .b32 lane; mov.u32 lane, %laneid; mad.lo.u32 $0, lane, 4, $1; }")

    # For each byte of a word: select it, compute the address in this lane's copy, read.
    LOOKUP = tl.constexpr(
        "{ .reg .b32 at;\n"
        + "".join(
            f"prmt.b32 at, $4, 0, 0x444{i}; mad.lo.u32 at, at, 128, $5; ld.shared.f32 ${i}, [at];\n"
            for i in range(4)
        )
        + "}"
    )
    # The same for tensor cores: the words of the table are 16-bit numbers, two of which share a register.
    PAIRS = tl.constexpr(
        "{ .reg .b32 at, a, b, c, d;\n"
        + "".join(
            f"prmt.b32 at, $2, 0, 0x444{i}; mad.lo.u32 at, at, 128, $3; ld.shared.b32 {to}, [at];\n"
            for i, to in enumerate("abcd")
        )
        + "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, c, d, 0x5410; }"
    )
    # And where a byte is two indices: each word of the table is a pair of numbers already.
    BYTES = tl.constexpr(
        "{ .reg .b32 at;\n"
        + "".join(
            f"prmt.b32 at, $4, 0, 0x444{i}; mad.lo.u32 at, at, 128, $5; ld.shared.b32 ${i}, [at];\n"
            for i in range(4)
        )
        + "}"
    )
    STREAM = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
    KEEP = tl.constexpr(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$8];\nld.global.v4.b32 {$4, $5, $6, $7}, [$8 + 16];"
    )
    KEEP_INSIDE = tl.constexpr(
        "{ .reg .pred p; setp.ne.s32 p, $9, 0;\n"
        + "".join(f"mov.b32 ${i}, 0;\n" for i in range(8))
        + "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$8];\n"
        + "@p ld.global.v4.b32 {$4, $5, $6, $7}, [$8 + 16]; }"
    )
    MMA_BFLOAT16 = tl.constexpr(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    MMA_FLOAT16 = tl.constexpr(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )


@jit
def fill_table(palettes, size):
    """Write the 32 copies of a palette as float32; return the address of this lane's copy."""
    start = tl.inline_asm_elementwise(TABLE_ADDRESS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    entry = tl.arange(0, 256)
    value = tl.load(palettes + entry, mask=entry < size, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    tl.inline_asm_elementwise(
        FILL, "=r,r,r,r,r", [entry, bits, start, 0], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    # The look-ups depend on this value, which stays behind the barrier; so they stay behind it too.
    return tl.inline_asm_elementwise(OWN_COPY, "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1)


@jit
def _byte(word, palettes, size, J: tl.constexpr):
    index = (word >> (8 * J)) & 255
    return tl.load(palettes + index, mask=index < size, other=0.0).to(tl.float32)


@jit
def look_up_four(word, table, palettes, size, TABLE: tl.constexpr):
    """The four weights of a word, as float32."""
    if TABLE:
        a, b, c, d = tl.inline_asm_elementwise(
            LOOKUP,
            "=f,=f,=f,=f,r,r",
            [word, table],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:  # what the assembly does, for the interpreter
        a = _byte(word, palettes, size, 0)
        b = _byte(word, palettes, size, 1)
        c = _byte(word, palettes, size, 2)
        d = _byte(word, palettes, size, 3)
    return a, b, c, d


@jit
def read_palette(palettes, size, WARPS: tl.constexpr, PACKED: tl.constexpr):
    """What a byte stands for, one per thread: a number of 16 bits, or two; zero beyond the palette."""
    entry = tl.arange(0, 32 * WARPS if WARPS > 8 else 256) % 256
    if PACKED:
        low = tl.load(palettes + entry % 16, mask=entry % 16 < size, other=0.0)
        high = tl.load(palettes + entry // 16, mask=entry // 16 < size, other=0.0)
        low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        value = low | high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        value = tl.load(palettes + entry, mask=entry < size, other=0.0)
        value = value.to(tl.int16, bitcast=True).to(tl.int32)
    return value


@jit
def fill_table_of_words(value, WARPS: tl.constexpr):
    """Write the 32 copies of :func:`read_palette`; return the address of this lane's copy."""
    start = tl.inline_asm_elementwise(TABLE_ADDRESS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    thread = tl.arange(0, 32 * WARPS if WARPS > 8 else 256)
    tl.inline_asm_elementwise(
        FILL if WARPS <= 8 else (FILL_HALF if WARPS == 16 else FILL_QUARTER),
        "=r,r,r,r,r",
        [thread % 256, value, start, thread // 256 * (64 // WARPS)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    return tl.inline_asm_elementwise(OWN_COPY, "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1)


@jit
def loads_before_here():
    """Keep loads ahead of their use: the assembler would move them next to it, to save registers."""
    tl.inline_asm_elementwise(
        "bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def read_words(at):
    """Four words of indices. They are not kept in the cache: each is read once."""
    return tl.inline_asm_elementwise(
        STREAM,
        "=r,=r,=r,=r,l",
        [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@jit
def after_the_previous_kernel():
    """Wait until its results are visible, and let the next kernel start: it waits here too."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def read_inputs(at, inside, EVEN: tl.constexpr):
    """Sixteen numbers of x in eight registers, zeros where they are not inside."""
    i = tl.int32
    if EVEN:  # only prefetches are not inside, and their result is not used
        made = tl.inline_asm_elementwise(
            KEEP, "=r,=r,=r,=r,=r,=r,=r,=r,l", [at], dtype=(i, i, i, i, i, i, i, i), is_pure=False, pack=1
        )
    else:
        made = tl.inline_asm_elementwise(
            KEEP_INSIDE,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r",
            [at, inside.to(tl.int32)],
            dtype=(i, i, i, i, i, i, i, i),
            is_pure=False,
            pack=1,
        )
    return made


@jit
def _for_groups(pair, GROUPS: tl.constexpr, PLACES: tl.constexpr):
    pair = tl.broadcast_to(tl.reshape(pair, [1, PLACES, 32]), [GROUPS, PLACES, 32])
    return tl.reshape(pair, [GROUPS * PLACES, 32])


@jit
def _for_tiles(pair, TILES: tl.constexpr, WARPS: tl.constexpr, COUNT: tl.constexpr):
    pair = tl.broadcast_to(tl.reshape(pair, [COUNT, 1, WARPS, 32]), [COUNT, TILES, WARPS, 32])
    return tl.reshape(pair, [COUNT * TILES * WARPS, 32])


@jit
def look_up_pairs(word, table, GROUPS: tl.constexpr, PLACES: tl.constexpr):
    """The four weights of a word in two registers, repeated for each group of inputs."""
    first, second = tl.inline_asm_elementwise(
        PAIRS, "=r,=r,r,r", [word, table], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return _for_groups(first, GROUPS, PLACES), _for_groups(second, GROUPS, PLACES)


@jit
def look_up_bytes(word, table, GROUPS: tl.constexpr, PLACES: tl.constexpr):
    """The eight weights of a word with two indices in a byte: as above, in four registers."""
    i = tl.int32
    a, b, c, d = tl.inline_asm_elementwise(
        BYTES, "=&r,=&r,=&r,=&r,r,r", [word, table], dtype=(i, i, i, i), is_pure=True, pack=1
    )
    a, b = _for_groups(a, GROUPS, PLACES), _for_groups(b, GROUPS, PLACES)
    return a, b, _for_groups(c, GROUPS, PLACES), _for_groups(d, GROUPS, PLACES)


@jit
def multiply_add(x, p, q, r, s, a, b, c, d, first, second,
                 TILES: tl.constexpr, WARPS: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Add the product of 16 rows, 16 columns and 8 inputs at each place (``mma.m16n8k16``)."""
    first = _for_tiles(first, TILES, WARPS, COUNT)
    second = _for_tiles(second, TILES, WARPS, COUNT)
    return tl.inline_asm_elementwise(
        MMA_BFLOAT16 if x.dtype.element_ty == tl.bfloat16 else MMA_FLOAT16,
        "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r",
        [p, q, r, s, a, b, c, d, first, second],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
