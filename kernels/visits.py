"""Which tiles a kernel visits: tile maps, computed on the device.

`tile_states` says of each tile [BLOCK_M, BLOCK_N] of scores whether the mask keeps nothing of it (0), something (1), or
all, so that the tile is plain (2): by the ranges of indices and of what is loaded, else by looking at the mask.
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
    RANGES: tl.constexpr, OF_ROWS: tl.constexpr, EXACT: tl.constexpr, VALUE: tl.constexpr, KEEP: tl.constexpr,
    PLAIN: tl.constexpr, MAY_KEEP: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program per TILES tiles side by side. RANGES tells, of a tile or of its rows; the mask itself is looked at,
    by KEEP and PLAIN, where there is no RANGES, or where rows are to be marked and it does not tell of some, unless it
    is EXACT.

    UNEVEN [b, h, M] int8, all 0 before: 1 for rows that keep something, or for which VALUE, where it is given, is not
    one finite number. Without TAIL the keys are a whole number of programs' tiles."""
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(columns, TILES)
    line = tl.program_id(0) // steps
    step = tl.program_id(0) % steps
    m0 = (line % rows) * BLOCK_M
    b = line // rows // HEADS
    h = line // rows % HEADS
    marks = UNEVEN
    if UNEVEN is not None:
        marks += (line // rows).to(tl.int64) * M
    tile = step * TILES + tl.arange(0, TILES)
    n0 = tile * BLOCK_N
    state = tl.zeros([TILES], tl.int32)
    m1 = tl.minimum(m0 + BLOCK_M, M) - 1
    n1 = tl.minimum(n0 + BLOCK_N, N) - 1
    if RANGES is None:
        start = step * TILES * BLOCK_N
        look = MAY_KEEP(b, h, m0, m1, start, tl.minimum(start + TILES * BLOCK_N, N) - 1, Z)
    elif OF_ROWS:
        state, unsure = states_by_rows(
            marks, T, S, Z, b, h, m0, tile, n0, n1, columns, M, N, RANGES, EXACT, VALUE, TAIL, BLOCK_M, BLOCK_N, ROWS,
            TILES,
        )  # fmt: skip
        look = unsure > 0
    else:
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0[:, None] + tl.arange(0, BLOCK_N)[None, :]
        may, must, same = RANGES(b, h, m, n, m < M, n < N, m0, n0, m0, m1, n0, n1, T, S, Z)
        exists = tile < columns
        may = (may | (state > 0)) & exists
        state = may.to(tl.int32)
        state += state * (must | (state > 1)).to(tl.int32)
        look = tl.max((state == 1).to(tl.int32), 0) > 0
        if UNEVEN is not None:
            uneven = state == 2
            if VALUE is not None:
                uneven |= ((same | (state > 2)) == 0) & exists
            tl.store(marks + m, tl.full([BLOCK_M], 1, tl.int8), mask=(m < M) & (tl.max(uneven.to(tl.int32), 0) > 0))
    if KEEP is not None:
        if look:
            state = look_at_mask(
                marks, T, S, Z, b, h, m0, step * TILES * BLOCK_N, M, N, VALUE, KEEP, PLAIN,
                BLOCK_M, BLOCK_N, ROWS, TILES,
            )  # fmt: skip
    tl.store(STATES + line.to(tl.int64) * columns + tile, state.to(tl.int8), mask=tile < columns)


@triton.jit
def states_by_rows(
    marks, T, S, Z, b, h, m0, tile, n0, n1, columns, M, N, RANGES: tl.constexpr, EXACT: tl.constexpr,
    VALUE: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """([TILES] int32, the states of tiles side by side; whether RANGES does not tell if some row is to be marked)."""
    n = n0[None, :, None] + tl.arange(0, BLOCK_N)[None, None, :]
    inside = None
    if TAIL:
        inside = n < N
    none = tl.zeros([ROWS, TILES], tl.int1)
    some = tl.zeros([TILES], tl.int32)
    cut = some
    unsure = m0 * 0
    for part in tl.static_range(BLOCK_M // ROWS):  # unrolled, so that much is read at the same time
        row = m0 + part * ROWS + tl.arange(0, ROWS)
        exists = (row[:, None] < M) & (tile < columns)[None, :]
        m = row[:, None, None]
        may, must, same = RANGES(
            b, h, m, n, None, inside, m, n0[None, :, None], row[:, None], row[:, None], n0[None, :], n1[None, :],
            T, S, Z,
        )  # fmt: skip
        may = (may | none) & exists
        must = (must | none) & exists
        some = tl.maximum(some, tl.max(may.to(tl.int32), 0))
        cut = tl.maximum(cut, tl.max((must ^ exists).to(tl.int32), 0))
        if marks is not None:
            uneven = may
            if not EXACT:
                uneven &= must
            if VALUE is not None:
                uneven |= ((same | none) == 0) & exists
            found = tl.max(uneven.to(tl.int32), 1)
            tl.store(marks + row, found.to(tl.int8), mask=(row < M) & (found > 0))
            if not EXACT:
                unsure = tl.maximum(unsure, tl.max(tl.max(may.to(tl.int32), 1) - found, 0))
    return some + some * (1 - cut), unsure


@triton.jit
def look_at_mask(
    marks, T, S, Z, b, h, m0, n0, M, N, VALUE: tl.constexpr, KEEP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """[TILES] int32, the states of tiles side by side from m0, n0 on; `marks` [M] are set where they are wanted."""
    n = n0 + tl.arange(0, TILES * BLOCK_N)[None, :]
    none = tl.zeros([ROWS, TILES * BLOCK_N], tl.int1)
    some = none
    cut = none
    for start in range(m0, m0 + BLOCK_M, ROWS):
        m = start + tl.arange(0, ROWS)[:, None]
        inside = (m < M) & (n < N)
        kept = (KEEP(b, h, m, n, T, S, Z) | none) & inside
        some |= kept
        if PLAIN is not None:
            cut |= ((PLAIN(b, h, m, n, T, S, Z) | none) == 0) & inside
        if marks is not None:
            uneven = kept
            if VALUE is not None:
                first = VALUE(b, h, m, tl.zeros([1, 1], tl.int32), T, S, Z)
                same = (VALUE(b, h, m, n, T, S, Z) == first) & (first > float("-inf"))
                uneven |= (same == 0) & inside
            found = tl.max(uneven.to(tl.int8), 1, keep_dims=True)
            tl.store(marks + m, found, mask=(m < M) & (found > 0))
    state = any_of_tiles(some, TILES, BLOCK_N)
    if PLAIN is not None:
        state += state * (1 - any_of_tiles(cut, TILES, BLOCK_N))
    return state


@triton.jit
def any_of_tiles(x, TILES: tl.constexpr, BLOCK_N: tl.constexpr):
    """[TILES] int32 of x [rows, TILES * BLOCK_N]: whether anything of a tile is true."""
    return tl.max(tl.max(tl.reshape(x.to(tl.int32), [x.shape[0], TILES, BLOCK_N]), 2), 0)


@triton.jit
def merged_state(
    states, line, tile, count, lines, tiles, to_line, to_tile, LINE_PARTS: tl.constexpr, LINE_SPLIT: tl.constexpr,
    TILE_PARTS: tl.constexpr, TILE_SPLIT: tl.constexpr,
):  # fmt: skip
    """The state of tiles that are LINE_PARTS x TILE_PARTS of the `lines` x `tiles` of `states`, or of which LINE_SPLIT
    x TILE_SPLIT are one of those; -1 for those from `count` on, which do not exist, also where their part of one of
    `states` lies behind the last key (or query)."""
    largest = tl.full(tile.shape, -1, tl.int32)
    least = tl.full(tile.shape, 2, tl.int32)
    for i in tl.static_range(LINE_PARTS):
        for j in tl.static_range(TILE_PARTS):
            at_line = line // LINE_SPLIT * LINE_PARTS + i
            at_tile = tile // TILE_SPLIT * TILE_PARTS + j
            exists = (at_line < lines) & (at_tile < tiles) & (tile < count)
            state = tl.load(states + at_line * to_line + at_tile * to_tile, mask=exists, other=-1).to(tl.int32)
            largest = tl.maximum(largest, state)
            least = tl.minimum(least, tl.where(exists, state, 2))
    return tl.where(least == 2, largest, tl.minimum(largest, 1))


@triton.jit(do_not_specialize=("lines", "tiles", "whole", "given_lines", "given_tiles", "to_line", "to_tile"))
def tile_order(
    STATES, MERGED, ORDER, COUNTS, lines, tiles, whole, given_lines, given_tiles, to_line, to_tile,
    LINE_PARTS: tl.constexpr, LINE_SPLIT: tl.constexpr, TILE_PARTS: tl.constexpr, TILE_SPLIT: tl.constexpr,
    RUN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per line; `to_line` and `to_tile` are strides of STATES, of `given_lines` x `given_tiles` tiles that
    may be smaller than those here, or larger (see `merged_state`); MERGED [b, h, tiles, lines] has their states then. A
    tile that is not `whole`, the last one, counts as cut, so that kernels look for the end of the keys (or queries)
    there. With RUN, so do plain tiles that do not follow one another without a gap: kernels need not look up the
    others."""
    program = tl.program_id(0).to(tl.int64)
    line = (program % lines).to(tl.int32)
    states = STATES + program // lines * given_lines * given_tiles
    plain = program.to(tl.int32) * 0
    partial = plain
    first = plain
    if RUN:
        first += tiles
        for start in range(0, tiles, WIDTH):
            tile = start + tl.arange(0, WIDTH)
            state = merged_state(
                states, line, tile, tiles, given_lines, given_tiles, to_line, to_tile, LINE_PARTS, LINE_SPLIT,
                TILE_PARTS, TILE_SPLIT,
            )  # fmt: skip
            first = tl.minimum(first, tl.min(tl.where((state == 2) & (tile < whole), tile, tiles), 0))
    for start in range(0, tiles, WIDTH):
        tile = start + tl.arange(0, WIDTH)
        state = merged_state(
            states, line, tile, tiles, given_lines, given_tiles, to_line, to_tile, LINE_PARTS, LINE_SPLIT,
            TILE_PARTS, TILE_SPLIT,
        )  # fmt: skip
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
        state = merged_state(
            states, line, tile, tiles, given_lines, given_tiles, to_line, to_tile, LINE_PARTS, LINE_SPLIT,
            TILE_PARTS, TILE_SPLIT,
        )  # fmt: skip
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
        if MERGED is not None:
            to = MERGED + program // lines * lines * tiles + tile.to(tl.int64) * lines + line
            tl.store(to, state.to(tl.int8), mask=tile < tiles)
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
