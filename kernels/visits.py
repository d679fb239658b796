"""Which tiles a kernel visits: tile maps, computed on the device.

`tile_states` says of each tile [BLOCK_M, BLOCK_N] of scores whether the mask keeps nothing of it (0), something (1), or
all, so that the tile is plain (2): by the ranges of indices and of vectors along one axis, else by looking at the mask.
`tile_order` sorts the tiles of each row of tiles (or column, for dK and dV): plain ones first, then those that keep
something, then the rest. A kernel walks the first two; the rest only for rows that keep no key at all, where what is
masked weighs something: `needy_rows` lists these.

    STATES [b, h, rows, columns] int8    ORDER [b, h, lines, tiles] int32
    COUNTS [b, h, lines, 2] int32: plain, visited
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("Z0", "Z1", "Z2", "Z3", "Z4", "Z5", "Z6", "Z7")


@triton.jit(do_not_specialize=("HEADS", "M", "N", *SIZES))
def tile_states(
    STATES, UNEVEN, T, S, HEADS, M, N, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7,
    MASKED: tl.constexpr, KEEP: tl.constexpr, PLAIN: tl.constexpr, MAY_KEEP: tl.constexpr, SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per WIDTH tiles of a row of tiles where SPANS tells by the ranges of indices and of vectors along one
    axis; without it one per tile, which looks at the mask.

    UNEVEN [b, h, M] int8, all 0 before: 1 for rows that keep something, or for which MASKED, where it is given, is not
    one finite number."""
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    steps = columns if SPANS is None else tl.cdiv(columns, WIDTH)
    line = tl.program_id(0) // steps
    step = tl.program_id(0) % steps
    m0 = (line % rows) * BLOCK_M
    b = line // rows // HEADS
    h = line // rows % HEADS
    m1 = tl.minimum(m0 + BLOCK_M, M) - 1
    at = STATES + line.to(tl.int64) * columns
    if SPANS is None:
        n0 = step * BLOCK_N
        n1 = tl.minimum(n0 + BLOCK_N, N) - 1
        state = step * 0
        if MAY_KEEP(b, h, h, m0, m1, n0, n1, Z):
            n = n0 + tl.arange(0, BLOCK_N)[None, :]
            none = tl.zeros([ROWS, BLOCK_N], tl.int1)
            some = none
            cut = none
            marks = ()
            for part in tl.static_range(BLOCK_M // ROWS):  # unrolled, so that much is read at the same time
                m = m0 + part * ROWS + tl.arange(0, ROWS)[:, None]
                inside = (m < M) & (n < N)
                kept = (KEEP(b, h, m, n, T, S, Z) | none) & inside
                some |= kept
                if PLAIN is not None:
                    cut |= ((PLAIN(b, h, m, n, T, S, Z) | none) == 0) & inside
                if UNEVEN is not None:
                    uneven = kept
                    if MASKED is not None:
                        first = MASKED(b, h, m, tl.zeros([1, 1], tl.int32), T, S, Z)
                        same = (MASKED(b, h, m, n, T, S, Z) == first) & (first > float("-inf"))
                        uneven |= (same == 0) & inside
                    marks += (tl.max(uneven.to(tl.int8), 1, keep_dims=True),)  # type: ignore[assignment]
            state = tl.max(tl.max(some.to(tl.int32), 1), 0)
            if PLAIN is not None:
                state += state * (1 - tl.max(tl.max(cut.to(tl.int32), 1), 0))
            if UNEVEN is not None:
                for part in tl.static_range(BLOCK_M // ROWS):
                    m = m0 + part * ROWS + tl.arange(0, ROWS)[:, None]
                    to = UNEVEN + (line // rows).to(tl.int64) * M + m
                    tl.store(to, marks[part], mask=(m < M) & (marks[part] > 0))
        tl.store(at + step, state.to(tl.int8))
    else:
        tile = step * WIDTH + tl.arange(0, WIDTH)
        n0 = tile * BLOCK_N
        n1 = tl.minimum(n0 + BLOCK_N, N) - 1
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0[:, None] + tl.arange(0, BLOCK_N)[None, :]
        some, every = SPANS(b, h, h, m, m < M, n, n < N, m0, m1, n0, n1, T, S, Z)
        state = (some | tl.zeros([WIDTH], tl.int1)).to(tl.int32)
        state += (every | tl.zeros([WIDTH], tl.int1)).to(tl.int32) * state
        tl.store(at + tile, state.to(tl.int8), mask=tile < columns)


@triton.jit(do_not_specialize=("lines", "tiles", "whole", "to_line", "to_tile"))
def tile_order(
    STATES, ORDER, COUNTS, lines, tiles, whole, to_line, to_tile, RUN: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One program per line; `to_line` and `to_tile` are strides of STATES. A tile that is not `whole`, the last one,
    counts as cut, so that kernels look for the end of the keys (or queries) there. With RUN, so do plain tiles that do
    not follow one another without a gap: kernels need not look up the others."""
    program = tl.program_id(0).to(tl.int64)
    states = STATES + program // lines * lines * tiles + (program % lines) * to_line
    plain = program.to(tl.int32) * 0
    partial = plain
    first = plain
    if RUN:
        first += tiles
        for start in range(0, tiles, WIDTH):
            tile = start + tl.arange(0, WIDTH)
            state = tl.load(states + tile * to_tile, mask=tile < tiles, other=0).to(tl.int32)
            first = tl.minimum(first, tl.min(tl.where((state == 2) & (tile < whole), tile, tiles), 0))
    for start in range(0, tiles, WIDTH):
        tile = start + tl.arange(0, WIDTH)
        state = tl.load(states + tile * to_tile, mask=tile < tiles, other=0).to(tl.int32)
        is_plain = (state == 2) & (tile < whole)
        if RUN:
            is_plain &= plain + tl.cumsum(is_plain.to(tl.int32), 0) == tile - first + 1
        plain += tl.sum(is_plain.to(tl.int32), 0)
        partial += tl.sum(((state > 0) & (is_plain == 0)).to(tl.int32), 0)
    tl.store(COUNTS + program * 2, plain)
    tl.store(COUNTS + program * 2 + 1, plain + partial)
    order = ORDER + program * tiles
    next_plain = plain * 0
    next_partial = plain
    next_rest = plain + partial
    for start in range(0, tiles, WIDTH):
        tile = start + tl.arange(0, WIDTH)
        state = tl.load(states + tile * to_tile, mask=tile < tiles, other=-1).to(tl.int32)
        is_plain = (state == 2) & (tile < whole)
        if RUN:
            is_plain &= (tile >= first) & (tile < first + plain)
        is_plain = is_plain.to(tl.int32)
        is_partial = (state > 0).to(tl.int32) - is_plain
        is_rest = (state == 0).to(tl.int32)
        place = is_plain * (next_plain + tl.cumsum(is_plain, 0) - 1)
        place += is_partial * (next_partial + tl.cumsum(is_partial, 0) - 1)
        place += is_rest * (next_rest + tl.cumsum(is_rest, 0) - 1)
        tl.store(order + place, tile, mask=tile < tiles)
        next_plain += tl.sum(is_plain, 0)
        next_partial += tl.sum(is_partial, 0)
        next_rest += tl.sum(is_rest, 0)


@triton.jit(do_not_specialize=("M",))
def needy_rows(LSE, ROWS, NEEDY, COUNTS, M, length, fill, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """NEEDY [bh, tiles], COUNTS [bh]: the rows of tiles in which some row with a gradient has not seen a score so far
    above the fill that what is masked weighs nothing beside it, or is NaN throughout."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(M, BLOCK_M)
    count = tiles * 0
    for start in range(0, tiles, WIDTH):
        tile = start + tl.arange(0, WIDTH)
        m = tile[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        row_max = tl.load(LSE + program * M + m, mask=m < M, other=float("inf"))
        base = tl.load(ROWS + program * length + m, mask=m < M, other=float("inf"))
        needy = (base != float("inf")) & (((row_max - fill > 128.0) == 0) | (base != base))
        needy = tl.max(needy.to(tl.int32), 1)
        tl.store(NEEDY + program * tiles + count + tl.cumsum(needy, 0) - 1, tile, mask=needy > 0)
        count += tl.sum(needy, 0)
    tl.store(COUNTS + program, count)


@triton.jit
def visit(ORDER, COUNTS, b, h, line_b, line_h, line, tiles, whole):
    """(where the order of a line of tiles begins, its first tile, how many tiles are plain, how many are visited).

    Without a map all are visited, and the `whole` first ones are plain."""
    at = b.to(tl.int64) * line_b + h.to(tl.int64) * line_h + line
    first = line * 0
    plain = whole
    visited = tiles
    if ORDER is not None:
        first = tl.load(ORDER + at * tiles)
        plain = tl.load(COUNTS + at * 2)
        visited = tl.load(COUNTS + at * 2 + 1)
    return at * tiles, first, plain, visited


@triton.jit
def plain_at(ORDER, start, i, first, RUN: tl.constexpr):
    """The plain tile `i` of a line whose `first` one is known."""
    tile = first + i
    if RUN == 0:
        tile = tl.load(ORDER + start + i)
    return tile


@triton.jit
def tile_at(ORDER, start, i):
    tile = i
    if ORDER is not None:
        tile = tl.load(ORDER + start + i)
    return tile
