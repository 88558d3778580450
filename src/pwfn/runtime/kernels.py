"""The kernels in Triton's language; ``triton.py`` beside this launches them."""

# Kernel parameters are pointers and scalars of Triton's language, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs
# Constants are written in capitals, as is usual in Triton.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pwfn.runtime.assembly import (
    fill_table,
    fill_table_of_16_bits,
    jit,
    loads_before_here,
    look_up_four,
    multiply_add,
    read_inputs,
    read_palette,
    read_words,
    tl,
    triton,
)


def _jit_by_lane(function: Callable[..., Any]) -> Any:
    """``triton.jit`` for any alignment, so that neighbouring lanes take neighbouring words.

    If Triton knew of a larger alignment, it would give a lane two words of a row and half a warp to another
    row. The tile of x would then have another layout and be exchanged through shared memory at every step.
    """
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    numbers = [name for name in names if name in ("inputs", "rows", "words", "columns", "size")]
    pointers = [name for name in names if not name.isupper()]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)


@jit
def _number(x, word, J: tl.constexpr):
    """Number J of the four in a 64-bit word of x."""
    return (word >> (16 * J)).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)


@jit
def _product(
    weight, number, BATCH: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr
):
    """Each weight times the number of each input; data moves between registers of one thread only."""
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
def gemv_table(x, indices, palettes, bias, out, inputs, rows, words, size,
               BATCH: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
               STEPS: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """One warp per row: its 32 lanes read neighbouring words, and are summed only at the end.

    ``words`` counts the words of four indices in a row. Tiles have two axes. The second is the lanes, the
    first counts inputs, steps, rows of a warp and warps, in this order. In every version of Triton, place i
    then belongs to warp ``i % WARPS``, and all but the warps lie in the registers of a thread. So each
    looked-up weight serves all inputs, and each number of x serves all rows.
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
    # Two steps of words are in flight, the first while the table is filled.
    now = tl.load(word, mask=(at < words) & (row < rows), other=0)
    table = 0
    if TABLE:
        table = fill_table(palettes, size)
    total = tl.zeros([BATCH * STEPS * ROWS * WARPS, 32], tl.float32)
    for start in range(0, words, STEPS * 32):
        word += STEPS * 32
        ahead = tl.load(word, mask=(start + STEPS * 32 + at < words) & (row < rows), other=0)
        inside = (start + x_step < words) & (batch < inputs)
        four = tl.load(x.to(tl.pointer_type(tl.int64)) + x_at, mask=inside, other=0)
        a, b, c, d = look_up_four(now, table, palettes, size, TABLE)
        total += _product(a, _number(x, four, 0), BATCH, STEPS, ROWS, WARPS)
        total += _product(b, _number(x, four, 1), BATCH, STEPS, ROWS, WARPS)
        total += _product(c, _number(x, four, 2), BATCH, STEPS, ROWS, WARPS)
        total += _product(d, _number(x, four, 3), BATCH, STEPS, ROWS, WARPS)
        x_at += STEPS * 32
        now = ahead
    # Sum over steps first, within a thread: less is left to sum across lanes.
    result = tl.sum(tl.sum(tl.reshape(total, [BATCH, STEPS, ROWS * WARPS, 32]), 1), 2)
    m = tl.arange(0, BATCH)[:, None]
    n = tl.program_id(0) * (ROWS * WARPS) + tl.arange(0, ROWS * WARPS)[None, :]
    if BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * rows + n, result, mask=(m < inputs) & (n < rows))


@_jit_by_lane
def mma(x, indices, palettes, bias, out, inputs, rows, columns, size,
        GROUPS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
        STEPS: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """``W x^T`` on tensor cores: each weight is looked up into the register in which they need it.

    Tiles are as in :func:`gemv_table`: the second axis is the lanes, the first counts groups of 8 inputs,
    steps, tiles of 16 rows of a warp, and warps, of which SPLIT share the columns of the same rows. A lane
    reads 16 indices of a row at once, and of the row eight below: lanes ``4 i`` to ``4 i + 3`` read 64
    consecutive ones. The tensor cores take 16 columns at a time, four from each lane. Which four of the 64
    are taken together does not matter, if the numbers of x are taken in the same way. The sums need no
    exchange between lanes, and up to 8 inputs cost as much as one.
    """
    value = read_palette(palettes, size, WARPS)
    stride: tl.constexpr = 64 * STEPS * SPLIT
    lane = tl.arange(0, 32)[None, :]
    place = tl.arange(0, STEPS * TILES * WARPS)[:, None]
    tile = place % WARPS // SPLIT * TILES + place // WARPS % TILES
    row = tl.program_id(0) * (16 * TILES * (WARPS // SPLIT)) + tile * 16 + lane // 4
    k = (place % SPLIT * STEPS + place // (TILES * WARPS)) * 64 + lane % 4 * 16
    # Nothing beyond the last row is stored, and x is zero beyond the last column: lanes that would read
    # beyond the end read the end instead.
    last = columns - 16
    upper = indices.to(tl.int64) + tl.minimum(row, rows - 1).to(tl.int64) * columns
    lower = indices.to(tl.int64) + tl.minimum(row + 8, rows - 1).to(tl.int64) * columns
    u0, u1, u2, u3 = read_words(upper + tl.minimum(k, last))
    l0, l1, l2, l3 = read_words(lower + tl.minimum(k, last))
    x_place = tl.arange(0, GROUPS * STEPS * WARPS)[:, None]
    x_k = (x_place % SPLIT * STEPS + x_place // WARPS % STEPS) * 64 + lane % 4 * 16
    m = tl.minimum(x_place // (STEPS * WARPS) * 8 + lane // 4, inputs - 1)
    x_row = x.to(tl.int64) + m.to(tl.int64) * columns * 2
    if GROUPS == 1:  # there are enough registers to prefetch x too
        a, b, c, d, e, f, g, h = read_inputs(x_row, x_k, columns, EVEN)
    loads_before_here()
    table = fill_table_of_16_bits(value, WARPS)
    p = tl.zeros([GROUPS * STEPS * TILES * WARPS, 32], tl.float32)
    q, r, s = p, p, p
    for _ in range(0, columns, stride):
        k += stride
        n0, n1, n2, n3 = read_words(upper + tl.minimum(k, last))
        o0, o1, o2, o3 = read_words(lower + tl.minimum(k, last))
        if GROUPS == 1:
            x_k += stride
            a1, b1, c1, d1, e1, f1, g1, h1 = read_inputs(x_row, x_k, columns, EVEN)
        else:
            a, b, c, d, e, f, g, h = read_inputs(x_row, x_k, columns, EVEN)
            x_k += stride
        loads_before_here()
        p, q, r, s = multiply_add(x, p, q, r, s, u0, l0, a, b, table, GROUPS, STEPS, TILES, WARPS)
        p, q, r, s = multiply_add(x, p, q, r, s, u1, l1, c, d, table, GROUPS, STEPS, TILES, WARPS)
        p, q, r, s = multiply_add(x, p, q, r, s, u2, l2, e, f, table, GROUPS, STEPS, TILES, WARPS)
        p, q, r, s = multiply_add(x, p, q, r, s, u3, l3, g, h, table, GROUPS, STEPS, TILES, WARPS)
        u0, u1, u2, u3 = n0, n1, n2, n3
        l0, l1, l2, l3 = o0, o1, o2, o3
        if GROUPS == 1:
            a, b, c, d, e, f, g, h = a1, b1, c1, d1, e1, f1, g1, h1
    # A lane has the sums of two neighbouring inputs and two rows, eight apart.
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


@jit
def gemv_load(x, indices, palettes, bias, out, inputs, rows, columns, size, part_rows,
              BATCH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Sums of products; the palette of a row is read through the L1 cache."""
    m = tl.arange(0, BATCH)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    palette = palettes + (n // part_rows * size)[:, None]
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


@jit
def dot_load(x, indices, palettes, bias, out, inputs, rows, columns, size, part_rows,
             BATCH: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """``W x^T`` on tensor cores, one looked-up tile of W at a time; the next tiles are prefetched."""
    m = tl.arange(0, BATCH)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    palette = palettes + (n // part_rows * size)[:, None]
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


@jit
def expand(indices, palettes, out, count, size, inner, length, parts,
           PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The dense tensor, element by element; an index beyond its palette gives zero.

    The axis that is cut into ``parts`` has ``length`` places, ``inner`` elements apart.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int32)
    held = (at < count) & (index >= 0) & (index < size)
    if PARTS:
        index += ((at // inner % length) * parts // length * size).to(tl.int32)
    tl.store(out + at, tl.load(palettes + index, mask=held, other=0.0), mask=at < count)
