"""The kernels themselves, in Triton's language; ``triton.py`` beside this launches them.

What bounds a product with few inputs is the memory, a byte a weight, and as much the look-ups: about four
instructions a weight, and one read of shared memory. Random reads of one small table would collide in its 32
banks three or four deep. So each program writes 32 copies of the palette there (32 KiB), one to a bank, and
every lane reads its own: a look-up is a byte selection, a multiply-add for the address, and one shared read
that nothing else stands in the way of. The palette's size changes nothing in this.
"""

# A kernel's parameters are pointers and scalars of Triton's language, which has no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:  # It comes with torch's CUDA builds only, and brings no types.
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # library.py registers none of this then; the module still opens, for its reader
    triton = None


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def _jit_by_lane(function: Callable[..., Any]) -> Any:
    """``triton.jit`` for any alignment, so that neighbouring lanes take neighbouring words.

    Knowing of more, Triton would give a lane two words of a row, and half a warp to another row; x's tile
    would lie otherwise, and be exchanged through shared memory at every step.
    """
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    numbers = [name for name in names if name in ("inputs", "rows", "words", "columns", "size")]
    pointers = [name for name in names if not name.isupper()]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)


if triton is not None:
    # The table is a variable of the assembly's own: Triton offers no shared memory to address. Triton's is
    # dynamic and begins behind it. A kernel may have 48 KiB of both without asking; Triton asks from there
    # on, for its own part alone, so its part must be below 16 KiB or above 48 KiB.
    _TABLE = tl.constexpr("{ .shared .align 128 .b8 copies[32768]; mov.u32 $0, copies; }")

    # A thread writes all 32 copies of an entry, or some where there are more threads than entries: 16 bytes
    # a time, each lane beginning elsewhere in the row so that eight lanes together touch all banks.
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

    _FILL, _FILL_HALF, _FILL_QUARTER = _fill(8), _fill(4), _fill(2)
    _OWN_COPY = tl.constexpr("{ .reg .b32 lane; mov.u32 lane, %laneid; mad.lo.u32 $0, lane, 4, $1; }")

    # For each byte of a word: select it, make its copy's address, read.
    _LOOKUP = tl.constexpr(
        "{ .reg .b32 at;\n"
        + "".join(
            f"prmt.b32 at, $4, 0, 0x444{i}; mad.lo.u32 at, at, 128, $5; ld.shared.f32 ${i}, [at];\n"
            for i in range(4)
        )
        + "}"
    )
    # The same for tensor cores: the table's words are 16-bit numbers, and two of them make a register.
    _PAIRS = tl.constexpr(
        "{ .reg .b32 at, a, b, c, d;\n"
        + "".join(
            f"prmt.b32 at, $2, 0, 0x444{i}; mad.lo.u32 at, at, 128, $3; ld.shared.b32 {to}, [at];\n"
            for i, to in enumerate("abcd")
        )
        + "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, c, d, 0x5410; }"
    )
    _STREAM = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
    _KEEP = tl.constexpr(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$8];\nld.global.v4.b32 {$4, $5, $6, $7}, [$8 + 16];"
    )
    _KEEP_INSIDE = tl.constexpr(
        "{ .reg .pred p; setp.ne.s32 p, $9, 0;\n"
        + "".join(f"mov.b32 ${i}, 0;\n" for i in range(8))
        + "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$8];\n"
        + "@p ld.global.v4.b32 {$4, $5, $6, $7}, [$8 + 16]; }"
    )
    _MMA_BFLOAT16 = tl.constexpr(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    _MMA_FLOAT16 = tl.constexpr(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    _FOUR_OF_WORD = tl.constexpr("=f,=f,=f,=f,r,r")


@_jit
def _table(palettes, size):
    """Writes the copies; where this lane's begins."""
    start = tl.inline_asm_elementwise(_TABLE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    entry = tl.arange(0, 256)
    value = tl.load(palettes + entry, mask=entry < size, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    tl.inline_asm_elementwise(
        _FILL, "=r,r,r,r,r", [entry, bits, start, 0], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    # The look-ups need this, and it stays behind the barrier: so they do too.
    return tl.inline_asm_elementwise(_OWN_COPY, "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1)


@_jit
def _byte(word, palettes, size, J: tl.constexpr):  # noqa: N803 - Triton's habit for constants
    index = (word >> (8 * J)) & 255
    return tl.load(palettes + index, mask=index < size, other=0.0).to(tl.float32)


@_jit
def _four(word, table, palettes, size, TABLE: tl.constexpr):  # noqa: N803
    """The four weights of a word, as float32."""
    if TABLE:
        a, b, c, d = tl.inline_asm_elementwise(
            _LOOKUP,
            _FOUR_OF_WORD,
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


@_jit
def _number(x, word, J: tl.constexpr):  # noqa: N803
    """Number J of the four in a 64-bit word of x."""
    return (word >> (16 * J)).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)


@_jit
def _product(
    weight,
    number,
    BATCH: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WARPS: tl.constexpr,  # noqa: N803
):
    """Each weight times each input's number; all that moves is between registers of a thread."""
    weight = tl.reshape(weight, [1, STEPS, ROWS, WARPS, 32])
    number = tl.reshape(number, [BATCH, STEPS, 1, WARPS, 32])
    weight = tl.reshape(
        tl.broadcast_to(weight, [BATCH, STEPS, ROWS, WARPS, 32]), [BATCH * STEPS * ROWS * WARPS, 32]
    )
    number = tl.reshape(
        tl.broadcast_to(number, [BATCH, STEPS, ROWS, WARPS, 32]), [BATCH * STEPS * ROWS * WARPS, 32]
    )
    return weight * number


@_jit_by_lane
def gemv_table(
    x,
    indices,
    palettes,
    bias,
    out,
    inputs,
    rows,
    words,  # of four indices in a row
    size,
    BATCH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WARPS: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803
):
    """One warp to a row: its 32 lanes read neighbouring words, and only the end sums across lanes.

    Tiles have two axes, the second being the lanes. The first counts inputs, steps, a warp's rows and
    warps, in this order: whatever the version of Triton, place i is then warp ``i % WARPS``'s, and all
    but the warps lie in a thread's registers. So a weight looked up serves all inputs, and a number of x
    all rows.
    """
    lane = tl.arange(0, 32)[None, :]
    place = tl.arange(0, STEPS * ROWS * WARPS)[:, None]
    row = tl.program_id(0) * (ROWS * WARPS) + place % (ROWS * WARPS)
    at = place // (ROWS * WARPS) * 32 + lane
    word = indices.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * words + at
    x_place = tl.arange(0, BATCH * STEPS * WARPS)[:, None]
    batch = x_place // (STEPS * WARPS)
    x_step = x_place // WARPS % STEPS * 32 + lane
    x_at = batch.to(tl.int64) * words + x_step
    # Two steps of words are in flight; the first while the table is being filled.
    now = tl.load(word, mask=(at < words) & (row < rows), other=0)
    table = 0
    if TABLE:
        table = _table(palettes, size)
    total = tl.zeros([BATCH * STEPS * ROWS * WARPS, 32], tl.float32)
    for start in range(0, words, STEPS * 32):
        word += STEPS * 32
        ahead = tl.load(word, mask=(start + STEPS * 32 + at < words) & (row < rows), other=0)
        inside = (start + x_step < words) & (batch < inputs)
        four = tl.load(x.to(tl.pointer_type(tl.int64)) + x_at, mask=inside, other=0)
        a, b, c, d = _four(now, table, palettes, size, TABLE)
        total += _product(a, _number(x, four, 0), BATCH, STEPS, ROWS, WARPS)
        total += _product(b, _number(x, four, 1), BATCH, STEPS, ROWS, WARPS)
        total += _product(c, _number(x, four, 2), BATCH, STEPS, ROWS, WARPS)
        total += _product(d, _number(x, four, 3), BATCH, STEPS, ROWS, WARPS)
        x_at += STEPS * 32
        now = ahead
    # Steps first, within a thread: then there is less to sum across lanes.
    result = tl.sum(tl.sum(tl.reshape(total, [BATCH, STEPS, ROWS * WARPS, 32]), 1), 2)
    m = tl.arange(0, BATCH)[:, None]
    n = tl.program_id(0) * (ROWS * WARPS) + tl.arange(0, ROWS * WARPS)[None, :]
    if BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * rows + n, result, mask=(m < inputs) & (n < rows))


@_jit
def _palette(palettes, size, WARPS: tl.constexpr):  # noqa: N803
    """An entry of the palette for each thread: of 16 bits, zero beyond the palette."""
    entry = tl.arange(0, 32 * WARPS if WARPS > 8 else 256) % 256
    value = tl.load(palettes + entry, mask=entry < size, other=0.0)
    return value.to(tl.int16, bitcast=True).to(tl.int32)


@_jit
def _table_of_16_bits(value, WARPS: tl.constexpr):  # noqa: N803
    """Writes the copies as :func:`_table` does; where this lane's begins."""
    start = tl.inline_asm_elementwise(_TABLE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    thread = tl.arange(0, 32 * WARPS if WARPS > 8 else 256)
    tl.inline_asm_elementwise(
        _FILL if WARPS <= 8 else (_FILL_HALF if WARPS == 16 else _FILL_QUARTER),
        "=r,r,r,r,r",
        [thread % 256, value, start, thread // 256 * (64 // WARPS)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    return tl.inline_asm_elementwise(_OWN_COPY, "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1)


@_jit
def _loads_before_here():
    """The assembler would else put loads where it needs the fewest registers: next to their use."""
    tl.inline_asm_elementwise(
        "bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@_jit
def _words(at):
    """Four words of indices, not to be kept in the cache: nobody reads them again."""
    return tl.inline_asm_elementwise(
        _STREAM,
        "=r,=r,=r,=r,l",
        [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@_jit
def _eight(row, k, columns, EVEN: tl.constexpr):  # noqa: N803
    """Sixteen numbers of x in eight registers, zeros from the last column on."""
    i = tl.int32
    at = row + tl.minimum(k, columns - 16).to(tl.int64) * 2
    if EVEN:  # only loads ahead of need go beyond, and nobody looks at them
        made = tl.inline_asm_elementwise(
            _KEEP, "=r,=r,=r,=r,=r,=r,=r,=r,l", [at], dtype=(i, i, i, i, i, i, i, i), is_pure=False, pack=1
        )
    else:
        made = tl.inline_asm_elementwise(
            _KEEP_INSIDE,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r",
            [at, (k < columns).to(tl.int32)],
            dtype=(i, i, i, i, i, i, i, i),
            is_pure=False,
            pack=1,
        )
    return made


@_jit
def _pairs(
    word,
    table,
    GROUPS: tl.constexpr,  # noqa: N803
    PLACES: tl.constexpr,  # noqa: N803
):
    """The four weights of a word in two registers, for each group of inputs."""
    first, second = tl.inline_asm_elementwise(
        _PAIRS, "=r,=r,r,r", [word, table], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    first = tl.broadcast_to(tl.reshape(first, [1, PLACES, 32]), [GROUPS, PLACES, 32])
    second = tl.broadcast_to(tl.reshape(second, [1, PLACES, 32]), [GROUPS, PLACES, 32])
    return tl.reshape(first, [GROUPS * PLACES, 32]), tl.reshape(second, [GROUPS * PLACES, 32])


@_jit
def _for_tiles(
    pair,
    TILES: tl.constexpr,  # noqa: N803
    WARPS: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
):
    pair = tl.broadcast_to(tl.reshape(pair, [COUNT, 1, WARPS, 32]), [COUNT, TILES, WARPS, 32])
    return tl.reshape(pair, [COUNT * TILES * WARPS, 32])


@_jit
def _multiplied(
    x,
    p,
    q,
    r,
    s,
    upper,
    lower,
    first,
    second,
    table,
    GROUPS: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    WARPS: tl.constexpr,  # noqa: N803
):
    """Adds the product of 16 rows, 16 columns and 8 inputs at each place."""
    a, c = _pairs(upper, table, GROUPS, STEPS * TILES * WARPS)
    b, d = _pairs(lower, table, GROUPS, STEPS * TILES * WARPS)
    first = _for_tiles(first, TILES, WARPS, GROUPS * STEPS)
    second = _for_tiles(second, TILES, WARPS, GROUPS * STEPS)
    return tl.inline_asm_elementwise(
        _MMA_BFLOAT16 if x.dtype.element_ty == tl.bfloat16 else _MMA_FLOAT16,
        "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r",
        [p, q, r, s, a, b, c, d, first, second],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@_jit_by_lane
def mma(
    x,
    indices,
    palettes,
    bias,
    out,
    inputs,
    rows,
    columns,
    size,
    GROUPS: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    WARPS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    ONE: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr,  # noqa: N803
):
    """``W x^T`` by tensor cores, each weight looked up into the register in which they want it.

    Tiles are as in :func:`gemv_table`: the second axis is the lanes, the first counts groups of 8 inputs,
    steps, a warp's tiles of 16 rows, and warps, of which SPLIT share the columns of the same rows. A lane
    reads 16 indices of a row at once, and of the row eight below: lanes ``4 i`` to ``4 i + 3`` read 64 in
    succession. The tensor cores take 16 columns at a time, four of a lane's each; which four of the 64
    stand together is free as long as the numbers of x do the same. Their sums need no exchange between
    lanes, and up to 8 inputs cost what one does.
    """
    value = _palette(palettes, size, WARPS)
    stride: tl.constexpr = 64 * STEPS * SPLIT
    lane = tl.arange(0, 32)[None, :]
    place = tl.arange(0, STEPS * TILES * WARPS)[:, None]
    tile = place % WARPS // SPLIT * TILES + place // WARPS % TILES
    row = tl.program_id(0) * (16 * TILES * (WARPS // SPLIT)) + tile * 16 + lane // 4
    k = (place % SPLIT * STEPS + place // (TILES * WARPS)) * 64 + lane % 4 * 16
    # Nothing beyond the last row is stored, and beyond the last column x is zero: there a lane may read
    # what it likes, so it reads the end.
    last = columns - 16
    upper = indices.to(tl.int64) + tl.minimum(row, rows - 1).to(tl.int64) * columns
    lower = indices.to(tl.int64) + tl.minimum(row + 8, rows - 1).to(tl.int64) * columns
    u0, u1, u2, u3 = _words(upper + tl.minimum(k, last))
    l0, l1, l2, l3 = _words(lower + tl.minimum(k, last))
    x_place = tl.arange(0, GROUPS * STEPS * WARPS)[:, None]
    x_k = (x_place % SPLIT * STEPS + x_place // WARPS % STEPS) * 64 + lane % 4 * 16
    m = tl.minimum(x_place // (STEPS * WARPS) * 8 + lane // 4, inputs - 1)
    x_row = x.to(tl.int64) + m.to(tl.int64) * columns * 2
    if GROUPS == 1:  # there are registers to read x ahead too
        a, b, c, d, e, f, g, h = _eight(x_row, x_k, columns, EVEN)
    _loads_before_here()
    table = _table_of_16_bits(value, WARPS)
    p = tl.zeros([GROUPS * STEPS * TILES * WARPS, 32], tl.float32)
    q, r, s = p, p, p
    for _ in range(0, columns, stride):
        k += stride
        n0, n1, n2, n3 = _words(upper + tl.minimum(k, last))
        o0, o1, o2, o3 = _words(lower + tl.minimum(k, last))
        if GROUPS == 1:
            x_k += stride
            a1, b1, c1, d1, e1, f1, g1, h1 = _eight(x_row, x_k, columns, EVEN)
        else:
            a, b, c, d, e, f, g, h = _eight(x_row, x_k, columns, EVEN)
            x_k += stride
        _loads_before_here()
        p, q, r, s = _multiplied(x, p, q, r, s, u0, l0, a, b, table, GROUPS, STEPS, TILES, WARPS)
        p, q, r, s = _multiplied(x, p, q, r, s, u1, l1, c, d, table, GROUPS, STEPS, TILES, WARPS)
        p, q, r, s = _multiplied(x, p, q, r, s, u2, l2, e, f, table, GROUPS, STEPS, TILES, WARPS)
        p, q, r, s = _multiplied(x, p, q, r, s, u3, l3, g, h, table, GROUPS, STEPS, TILES, WARPS)
        u0, u1, u2, u3 = n0, n1, n2, n3
        l0, l1, l2, l3 = o0, o1, o2, o3
        if GROUPS == 1:
            a, b, c, d, e, f, g, h = a1, b1, c1, d1, e1, f1, g1, h1
    # A lane has the sums of two neighbouring inputs with two rows, eight apart.
    parts: tl.constexpr = WARPS // SPLIT
    if ONE:
        total = tl.reshape(tl.join(p, r), [GROUPS, STEPS, TILES, parts, SPLIT, 64])
        at = tl.arange(0, 64)[None, None, None, :]
        m = at // 2 % 4 * 2
        n = at // 8 + at % 2 * 8
    else:
        total = tl.join(tl.join(p, q), tl.join(r, s))
        total = tl.reshape(total, [GROUPS, STEPS, TILES, parts, SPLIT, 128])
        at = tl.arange(0, 128)[None, None, None, :]
        m = at // 4 % 4 * 2 + at // 2 % 2
        n = at // 16 + at % 2 * 8
    result = tl.sum(tl.sum(total, 1), 3)
    m += tl.arange(0, GROUPS)[:, None, None, None] * 8
    tile = tl.arange(0, parts)[None, None, :, None] * TILES + tl.arange(0, TILES)[None, :, None, None]
    n += (tl.program_id(0) * (TILES * parts) + tile) * 16
    if BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * rows + n, result, mask=(m < inputs) & (n < rows))


@_jit
def gemv_load(
    x,
    indices,
    palettes,
    bias,
    out,
    inputs,
    rows,
    columns,
    size,
    rows_a_part,
    BATCH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr,  # noqa: N803
):
    """Sums of products; the palette of a row is read through the L1 cache."""
    m = tl.arange(0, BATCH)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    palette = palettes + (n // rows_a_part * size)[:, None]
    total = tl.zeros([BATCH, ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = start + k < columns
        both = inside[None, :] & (n < rows)[:, None]
        index = tl.load(
            indices + n[:, None].to(tl.int64) * columns + (start + k)[None, :], mask=both, other=0
        )
        index = index.to(tl.int32)
        weight = tl.load(palette + index, mask=both & (index < size), other=0.0).to(tl.float32)
        place = m[:, None].to(tl.int64) * columns + (start + k)[None, :]
        number = tl.load(x + place, mask=inside[None, :] & (m < inputs)[:, None], other=0.0).to(tl.float32)
        total += weight[None, :, :] * number[:, None, :]
    result = tl.sum(total, 2)
    if BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * rows + n[None, :]
    tl.store(out + place, result, mask=(m < inputs)[:, None] & (n < rows)[None, :])


@_jit
def dot_load(
    x,
    indices,
    palettes,
    bias,
    out,
    inputs,
    rows,
    columns,
    size,
    rows_a_part,
    BATCH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr,  # noqa: N803
):
    """``W x^T`` on tensor cores, a tile of W looked up at a time; the tiles to come are on their way."""
    m = tl.arange(0, BATCH)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    palette = palettes + (n // rows_a_part * size)[:, None]
    index_at = indices + n[:, None].to(tl.int64) * columns + k[None, :]
    x_at = x + m[None, :].to(tl.int64) * columns + k[:, None]
    total = tl.zeros([ROWS, BATCH], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = start + k < columns
        both = inside[None, :] & (n < rows)[:, None]
        index = tl.load(index_at, mask=both, other=0)
        number = tl.load(x_at, mask=inside[:, None] & (m < inputs)[None, :], other=0.0)
        wide = index.to(tl.int32)
        weight = tl.load(palette + wide, mask=both & (wide < size), other=0.0)
        total = tl.dot(weight.to(x.dtype.element_ty), number, total)
        index_at += COLUMNS
        x_at += COLUMNS
    if BIAS:
        total += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    place = m[None, :].to(tl.int64) * rows + n[:, None]
    tl.store(out + place, total, mask=(n < rows)[:, None] & (m < inputs)[None, :])


@_jit
def expand(
    indices,
    palettes,
    out,
    count,
    size,
    inner,  # elements from one place of the axis to the next
    here,  # places of the axis
    start,
    length,
    parts,
    PARTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The dense tensor, element by element; outside its palette zero."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int32)
    held = (at < count) & (index >= 0) & (index < size)
    if PARTS:
        index += ((start + at // inner % here) * parts // length * size).to(tl.int32)
    tl.store(out + at, tl.load(palettes + index, mask=held, other=0.0), mask=at < count)
