"""The forward of few queries, as in decoding: the keys are shared out between programs (Flash-Decoding, Dao et al.,
2023), which alone would be too few to read keys and values as fast as memory gives them.

`attention_split` attends to one part of the tiles of keys that the mask keeps; all query heads that share a head of
keys are rows of one tile, so that it is read once. `attention_combine` rescales what the parts found to their common
maximum and adds it up.

    STATISTICS [2, B H M, splits] float32: row maximum and sum of a part    ACC [B H M, splits, DV] float32
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from torchflash.kernels.configs import Tile
from torchflash.kernels.forward import forward_tile
from torchflash.kernels.launcher import cdiv
from torchflash.kernels.mask import QUERIES
from torchflash.kernels.tiles import FAR, LOG2E, exponentials, scale_rows, zero_chunks
from torchflash.kernels.visits import SIZES, plain_at, tile_at, visit

if TYPE_CHECKING:
    from torchflash.kernels.operands import Operands

ROWS = 64  # of a tile, at most
FEWEST = 512  # keys that are worth a second launch
PROGRAMS = 4  # for each multiprocessor
PARTS = 64  # at most that a program of `attention_combine` reads at the same time
UNSPECIALIZED = ("H", "GROUP_K", "GROUP_V", "M", "N", "splits", "lines", "line_b", "line_h", *SIZES)


@triton.jit
def packed_rows(line, H, M, PACK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(b, first head, head of each row, query of each row, which rows exist): PACK heads of M queries each."""
    b = line // (H // PACK)
    h0 = line % (H // PACK) * PACK
    row = tl.arange(0, BLOCK_M)
    exists = row < PACK * M
    return b, h0, tl.where(exists, h0 + row // M, h0), tl.where(exists, row % M, M), exists


@triton.jit
def load_rows(at, exists, stride_d, D: tl.constexpr, CHUNKS: tl.constexpr):
    """([BLOCK_M, CHUNKS[0]], …) of rows that begin at the pointers `at`."""
    out = ()
    start: tl.constexpr = 0
    for i in tl.static_range(len(CHUNKS)):
        d = start + tl.arange(0, CHUNKS[i])
        mask = exists[:, None] & (d[None, :] < D)
        out += (tl.load(at[:, None] + d[None, :] * stride_d, mask=mask, other=0.0),)  # type: ignore[assignment]
        start = start + CHUNKS[i]
    return out


@triton.jit
def store_rows(at, exists, stride_d, x, D: tl.constexpr, CHUNKS: tl.constexpr):
    start: tl.constexpr = 0
    for i in tl.static_range(len(CHUNKS)):
        d = start + tl.arange(0, CHUNKS[i])
        mask = exists[:, None] & (d[None, :] < D)
        tl.store(at[:, None] + d[None, :] * stride_d, x[i].to(at.dtype.element_ty), mask=mask)
        start = start + CHUNKS[i]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_split(
    Q, K, V, STATISTICS, ACC, K_DESC, V_DESC, T, S, R, ORDER, COUNTS,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    H, GROUP_K, GROUP_V, M, N, splits, lines, line_b, line_h, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, exponent,
    ROWS: tl.constexpr, SCORE: tl.constexpr, BODY: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, RUN: tl.constexpr,
    PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    split = tl.program_id(0) % splits
    b, h0, h, m, exists = packed_rows(tl.program_id(0) // splits, H, M, PACK, BLOCK_M)
    h_k = h0 // GROUP_K
    h_v = h0 // GROUP_V
    k_at = K + b.to(tl.int64) * k_b + h_k.to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + h_v.to(tl.int64) * v_h
    q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + m.to(tl.int64) * q_m
    q = load_rows(q_at, exists, q_d, D, CHUNKS)  # [BLOCK_M, D]

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, CHUNKS_V)  # [BLOCK_M, DV]
    tiles = tl.cdiv(N, BLOCK_N)
    start, first, plain, visited = visit(ORDER, COUNTS, b, h0, line_b, line_h, 0, tiles, N // BLOCK_N)
    begin = visited * split // splits
    end = visited * (split + 1) // splits
    for i in tl.range(begin, tl.minimum(plain, end)):
        row_max, row_sum, acc = forward_tile(
            row_max, row_sum, acc, q, (), plain_at(ORDER, start, i, first, RUN) * BLOCK_N, Q, k_at, v_at,
            K_DESC, V_DESC, T, S, R, Z, q_m, q_d, k_n, k_d, v_n, v_d, b, h[:, None], h_k, h_v, m, 0, M, N, exponent, 0,
            ROWS, BODY, None, EXACT, False, PRECISION, D, DV, CHUNKS, CHUNKS_V, 0, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
    for i in tl.range(tl.maximum(plain, begin), end):
        row_max, row_sum, acc = forward_tile(
            row_max, row_sum, acc, q, (), tile_at(ORDER, start, i) * BLOCK_N, Q, k_at, v_at,
            K_DESC, V_DESC, T, S, R, Z, q_m, q_d, k_n, k_d, v_n, v_d, b, h[:, None], h_k, h_v, m, 0, M, N, exponent, 0,
            ROWS, SCORE, None, EXACT, False, PRECISION, D, DV, CHUNKS, CHUNKS_V, 0, BLOCK_M, BLOCK_N, True,
        )  # fmt: skip

    at = ((b * H + h).to(tl.int64) * M + m) * splits + split
    tl.store(STATISTICS + at, row_max, mask=exists)
    tl.store(STATISTICS + lines.to(tl.int64) * M * splits + at, row_sum, mask=exists)
    store_rows(ACC + at * DV, exists, 1, acc, DV, CHUNKS_V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_combine(
    Q, K, V, OUT, LSE, STATISTICS, ACC, K_DESC, V_DESC, T, S, R, ORDER, COUNTS,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_m, o_d,
    H, GROUP_K, GROUP_V, M, N, splits, lines, line_b, line_h, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, exponent, fill, huge,
    ROWS: tl.constexpr, SCORE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, FILLED: tl.constexpr, ZERO: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per row; it reads PARTS parts at the same time. Only the first of its BLOCK_M rows exists."""
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    row = tl.program_id(0).to(tl.int64)
    plane = lines.to(tl.int64) * M * splits
    m = tl.program_id(0) % M
    h = tl.program_id(0) // M % H
    b = tl.program_id(0) // M // H
    first = tl.arange(0, BLOCK_M) == 0

    row_max = tl.full([], float("-inf"), tl.float32)
    for start in tl.range(0, splits, PARTS):
        part = start + tl.arange(0, PARTS)
        found = tl.load(STATISTICS + row * splits + part, mask=part < splits, other=float("-inf"))
        row_max = tl.maximum(row_max, tl.max(found, 0))
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.zeros([], tl.float32)
    total = zero_chunks(1, CHUNKS_V)
    for start in tl.range(0, splits, PARTS):
        part = start + tl.arange(0, PARTS)
        exists = part < splits
        at = row * splits + part
        rescale = exponentials(tl.load(STATISTICS + at, mask=exists, other=float("-inf")), base, 1.0, EXACT)
        row_sum += tl.sum(tl.load(STATISTICS + plane + at, mask=exists, other=0.0) * rescale, 0)
        parts = load_rows(ACC + at * DV, exists, 1, DV, CHUNKS_V)  # [PARTS, DV]
        sums = ()
        for c in tl.static_range(len(CHUNKS_V)):
            sums += (total[c] + tl.sum(parts[c] * rescale[:, None], 0, keep_dims=True),)  # type: ignore[assignment]
        total = sums

    row_max = tl.where(first, row_max, float("-inf"))
    row_sum = tl.where(first, row_sum, 0.0)
    acc = ()
    for c in tl.static_range(len(CHUNKS_V)):
        acc += (tl.where(first[:, None], total[c], 0.0),)  # type: ignore[assignment]
    unit: tl.constexpr = 1.0 if EXACT else LOG2E  # of the row maximum
    if FILLED:  # as attention_forward: where the fill weighs something, also the tiles that keep nothing
        needs = first & ((row_max - fill * unit > 128.0 * unit) == 0)
        h_k = h // GROUP_K
        h_v = h // GROUP_V
        k_at = K + b.to(tl.int64) * k_b + h_k.to(tl.int64) * k_h
        v_at = V + b.to(tl.int64) * v_b + h_v.to(tl.int64) * v_h
        q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + m.to(tl.int64) * q_m
        q = load_rows(q_at + tl.zeros([BLOCK_M], tl.int64), first, q_d, D, CHUNKS)
        rows = tl.where(first, m, M)
        tiles = tl.cdiv(N, BLOCK_N)
        start, _, _, visited = visit(ORDER, COUNTS, b, h, line_b, line_h, 0, tiles, N // BLOCK_N)
        for i in tl.range(visited, tl.where(tl.max(needs.to(tl.int32), 0) > 0, tiles, visited)):
            row_max, row_sum, acc = forward_tile(
                row_max, row_sum, acc, q, (), tile_at(ORDER, start, i) * BLOCK_N, Q, k_at, v_at, K_DESC, V_DESC,
                T, S, R, Z, q_m, q_d, k_n, k_d, v_n, v_d, b, h, h_k, h_v, rows, 0, M, N, exponent, 0,
                ROWS, SCORE, None, EXACT, False, PRECISION, D, DV, CHUNKS, CHUNKS_V, 0, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip

    is_nan = row_sum != row_sum
    if ZERO == 0:
        is_nan |= row_sum == 0.0
    inverse = tl.where(is_nan, float("nan"), 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))
    o_at = OUT + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h + m.to(tl.int64) * o_m
    store_rows(o_at + tl.zeros([BLOCK_M], tl.int64), first, o_d, scale_rows(acc, inverse), DV, CHUNKS_V)
    if not EXACT:
        row_max = tl.where(row_max == -FAR * exponent, huge, row_max * (1.0 / LOG2E))
    lse_at = LSE + row + tl.zeros([BLOCK_M], tl.int64)
    tl.store(lse_at, row_max, mask=first)
    tl.store(lse_at + lines.to(tl.int64) * M, row_sum, mask=first)


def pack(o: Operands) -> int:
    """How many heads are rows of one tile: those that share a head of keys and of values, and a mask."""
    p, maps = o.problem, o.setup.maps
    group: int = p.group_k
    shared = p.group_v == group and (maps is None or maps.heads == 1)
    return group if shared and group * p.M <= ROWS else 1


def suits(o: Operands) -> bool:
    p, setup = o.problem, o.setup
    alone = p.dropout_p == 0.0 and setup.form.post is None and not setup.stream
    return alone and p.M <= QUERIES and p.N >= FEWEST


def rows(o: Operands) -> int:
    """Of a tile."""
    return max(16, triton.next_power_of_2(pack(o) * o.problem.M))


def splits(o: Operands, tile: Tile) -> int:
    """How many parts there are of every line of keys."""
    p = o.problem
    lines = p.B * p.H // pack(o)
    return max(1, min(cdiv(PROGRAMS * multiprocessors(p.q.device), lines), cdiv(p.N, 2 * tile.block_n)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
