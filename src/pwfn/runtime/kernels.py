"""The kernels in Triton's language; ``triton.py`` beside this launches them."""

# Kernel parameters are pointers and scalars of Triton's language, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs
# Constants are written in capitals, as is usual in Triton.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pwfn.runtime.assembly import (
    after_the_previous_kernel,
    fill_table,
    fill_table_of_words,
    jit,
    loads_before_here,
    look_up_bytes,
    look_up_four,
    look_up_pairs,
    multiply_add,
    read_inputs,
    read_palette,
    read_words,
    tl,
    triton,
)

_NUMBERS = (
    *("inputs", "rows", "words", "columns", "size", "height", "width", "out_width", "out_area"),
    *("above", "before", "stride", "across_stride", "down", "across"),
)


def _jit_by_lane(function: Callable[..., Any]) -> Any:
    """``triton.jit`` for any alignment, so that neighbouring lanes take neighbouring words.

    If Triton knew of a larger alignment, it would give a lane two words of a row and half a warp to another
    row. The tile of x would then have another layout and be exchanged through shared memory at every step.
    """
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    numbers = [name for name in names if name in _NUMBERS]
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


@jit
def _multiply_words(x, sums, words, numbers, table,
                    GROUPS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr,
                    WARPS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Add the products of four words of two rows, eight apart, with the numbers of the same columns."""
    p, q, r, s = sums
    places: tl.constexpr = STEPS * TILES * WARPS
    count: tl.constexpr = GROUPS * STEPS
    for i in tl.static_range(4):
        if PACKED:
            a, c, e, g = look_up_bytes(words[i], table, GROUPS, places)
            b, d, f, h = look_up_bytes(words[4 + i], table, GROUPS, places)
            p, q, r, s = multiply_add(
                x, p, q, r, s, a, b, c, d, numbers[4 * i], numbers[4 * i + 1], TILES, WARPS, count
            )
            p, q, r, s = multiply_add(
                x, p, q, r, s, e, f, g, h, numbers[4 * i + 2], numbers[4 * i + 3], TILES, WARPS, count
            )
        else:
            a, c = look_up_pairs(words[i], table, GROUPS, places)
            b, d = look_up_pairs(words[4 + i], table, GROUPS, places)
            p, q, r, s = multiply_add(
                x, p, q, r, s, a, b, c, d, numbers[2 * i], numbers[2 * i + 1], TILES, WARPS, count
            )
    return p, q, r, s


@jit
def _numbers(x_row, k, columns, top, left, height, width, down, across, EACH: tl.constexpr,
             CHANNELS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """EACH numbers of x for the columns from k on, in half as many registers.

    A convolution has CHANNELS columns for each place of its kernel, whose upper left corner is at
    ``top, left`` of the image.
    """
    inside = k < columns
    if CHANNELS == 0:
        at = x_row + tl.minimum(k, columns - EACH).to(tl.int64) * 2
    else:
        place = k // CHANNELS
        y = top + place // KERNEL_WIDTH * down
        z = left + place % KERNEL_WIDTH * across
        inside = inside & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        at = x_row + tl.where(inside, (y * width + z) * CHANNELS + k % CHANNELS, 0).to(tl.int64) * 2
    a, b, c, d, e, f, g, h = read_inputs(at, inside, EVEN)
    if EACH == 16:
        return a, b, c, d, e, f, g, h
    else:
        i, j, l, m, n, o, p, q = read_inputs(at + 32, inside, EVEN)  # noqa: E741
        return a, b, c, d, e, f, g, h, i, j, l, m, n, o, p, q


@_jit_by_lane
def mma(x, indices, palettes, bias, out, inputs, rows, columns, size,
        height, width, out_width, out_area, above, before, stride, across_stride, down, across,
        GROUPS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
        STEPS: tl.constexpr, DEPTH: tl.constexpr, X_AHEAD: tl.constexpr, EARLY: tl.constexpr,
        PACKED: tl.constexpr, CHANNELS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, EVEN: tl.constexpr,
        ONE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """``W x^T`` on tensor cores: each weight is looked up into the register in which they need it.

    Tiles are as in :func:`gemv_table`: the second axis is the lanes, the first counts groups of 8 inputs,
    steps, tiles of 16 rows of a warp, and warps, of which SPLIT share the columns of the same rows. A lane
    reads 16 bytes of indices of a row at once, and of the row eight below: lanes ``4 i`` to ``4 i + 3`` read
    64 consecutive ones. The tensor cores take 16 columns at a time, four from each lane. Which four are taken
    together does not matter, if the numbers of x are taken in the same way. The sums need no exchange between
    lanes, and up to 8 inputs cost as much as one. DEPTH steps of indices are in flight, and with X_AHEAD one
    of x too.

    A convolution of channels-last images (CHANNELS is not 0) is the same product: its inputs are the places
    of the result, and their columns are gathered from the image.
    """
    if EARLY:
        after_the_previous_kernel()
    value = read_palette(palettes, size, WARPS, PACKED)
    each: tl.constexpr = 32 if PACKED else 16  # indices in 16 bytes
    stride_k: tl.constexpr = 4 * each * STEPS * SPLIT
    lane = tl.arange(0, 32)[None, :]
    place = tl.arange(0, STEPS * TILES * WARPS)[:, None]
    tile = place % WARPS // SPLIT * TILES + place // WARPS % TILES
    row = tl.program_id(0) * (16 * TILES * (WARPS // SPLIT)) + tile * 16 + lane // 4
    row_bytes = columns * 16 // each
    # Nothing beyond the last row is stored, and x is zero beyond the last column: lanes that would read
    # beyond the end read the end instead.
    k = (place % SPLIT * STEPS + place // (TILES * WARPS)) * 64 + lane % 4 * 16
    last = row_bytes - 16
    upper = indices.to(tl.int64) + tl.minimum(row, rows - 1).to(tl.int64) * row_bytes
    lower = indices.to(tl.int64) + tl.minimum(row + 8, rows - 1).to(tl.int64) * row_bytes
    words = read_words(upper + tl.minimum(k, last)) + read_words(lower + tl.minimum(k, last))
    for _ in tl.static_range(DEPTH - 1):
        k += 64 * STEPS * SPLIT
        words = words + read_words(upper + tl.minimum(k, last)) + read_words(lower + tl.minimum(k, last))
    x_place = tl.arange(0, GROUPS * STEPS * WARPS)[:, None]
    x_k = (x_place % SPLIT * STEPS + x_place // WARPS % STEPS) * (4 * each) + lane % 4 * each
    first = tl.program_id(1) * (8 * GROUPS)
    m = tl.minimum(first + x_place // (STEPS * WARPS) * 8 + lane // 4, inputs - 1)
    top, left = m, m
    if CHANNELS == 0:
        x_row = x.to(tl.int64) + m.to(tl.int64) * columns * 2
    else:
        x_row = x.to(tl.int64) + (m // out_area).to(tl.int64) * (height * width * CHANNELS * 2)
        top = m % out_area // out_width * stride - above
        left = m % out_area % out_width * across_stride - before
    if X_AHEAD:
        numbers = _numbers(x_row, x_k, columns, top, left, height, width, down, across,
                           each, CHANNELS, KERNEL_WIDTH, EVEN)  # fmt: skip
    loads_before_here()
    table = fill_table_of_words(value, WARPS)
    p = tl.zeros([GROUPS * STEPS * TILES * WARPS, 32], tl.float32)
    q, r, s = p, p, p
    for _ in range(0, columns, stride_k):
        k += 64 * STEPS * SPLIT
        words = words + read_words(upper + tl.minimum(k, last)) + read_words(lower + tl.minimum(k, last))
        if X_AHEAD:
            x_k += stride_k
            ahead = _numbers(x_row, x_k, columns, top, left, height, width, down, across,
                             each, CHANNELS, KERNEL_WIDTH, EVEN)  # fmt: skip
        else:
            numbers = _numbers(x_row, x_k, columns, top, left, height, width, down, across,
                               each, CHANNELS, KERNEL_WIDTH, EVEN)  # fmt: skip
            x_k += stride_k
        loads_before_here()
        p, q, r, s = _multiply_words(
            x, (p, q, r, s), words, numbers, table, GROUPS, STEPS, TILES, WARPS, PACKED
        )
        words = words[8:]
        if X_AHEAD:
            numbers = ahead
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
    m += first + tl.arange(0, GROUPS)[:, None, None, None] * 8
    tile = tl.arange(0, parts)[None, None, :, None] * TILES + tl.arange(0, TILES)[None, :, None, None]
    n += (tl.program_id(0) * (TILES * parts) + tile) * 16
    if BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * rows + n, result, mask=(m < inputs) & (n < rows))


@jit
def _load_index(indices, n, k, columns, mask, PACKED: tl.constexpr):
    """The indices of rows n and columns k; two columns share a byte if PACKED."""
    if PACKED:
        byte = tl.load(indices + n.to(tl.int64) * ((columns + 1) // 2) + k // 2, mask=mask, other=0)
        index = (byte.to(tl.int32) >> k % 2 * 4) & 15
    else:
        index = tl.load(indices + n.to(tl.int64) * columns + k, mask=mask, other=0).to(tl.int32)
    return index


@jit
def gemv_load(x, indices, palettes, bias, out, inputs, rows, columns, size, part_rows,
              BATCH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Sums of products; the palette of a row is read through the L1 cache."""
    m = tl.arange(0, BATCH)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    palette = palettes + (n // part_rows * size)[:, None]
    total = tl.zeros([BATCH, ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = start + k < columns
        both = inside[None, :] & (n < rows)[:, None]
        index = _load_index(indices, n[:, None], (start + k)[None, :], columns, both, PACKED)
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
             COLUMNS: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """``W x^T`` on tensor cores, one looked-up tile of W at a time; the next tiles are prefetched."""
    m = tl.arange(0, BATCH)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    palette = palettes + (n // part_rows * size)[:, None]
    x_at = x + m[None, :].to(tl.int64) * columns + k[:, None]
    total = tl.zeros([ROWS, BATCH], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = start + k < columns
        both = inside[None, :] & (n < rows)[:, None]
        index = _load_index(indices, n[:, None], (start + k)[None, :], columns, both, PACKED)
        number = tl.load(x_at, mask=inside[:, None] & (m < inputs)[None, :], other=0.0)
        weight = tl.load(palette + index, mask=both & (index < size), other=0.0)
        total = tl.dot(weight.to(x.dtype.element_ty), number, total)
        x_at += COLUMNS
    if BIAS:
        total += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    place = m[None, :].to(tl.int64) * rows + n[:, None]
    tl.store(out + place, total, mask=(n < rows)[:, None] & (m < inputs)[None, :])


@jit
def expand(indices, palettes, out, count, size, inner, length, parts, inner_columns, columns,
           PARTS: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """The dense tensor, element by element; an index beyond its palette gives zero.

    The axis that is cut into ``parts`` has ``length`` places, ``inner`` elements apart. If PACKED, two
    neighbours along an axis of ``columns`` places, ``inner_columns`` elements apart, share a byte.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        line = at // inner_columns  # counts columns through all that is before them
        if not EVEN:
            line += line // columns  # rows begin with a new byte
        index = tl.load(indices + line // 2 * inner_columns + at % inner_columns, mask=at < count, other=0)
        index = (index.to(tl.int32) >> (line % 2 * 4).to(tl.int32)) & 15
    else:
        index = tl.load(indices + at, mask=at < count, other=0).to(tl.int32)
    held = (at < count) & (index >= 0) & (index < size)
    if PARTS:
        index += ((at // inner % length).to(tl.int64) * parts // length * size).to(tl.int32)
    tl.store(out + at, tl.load(palettes + index, mask=held, other=0.0), mask=at < count)
