"""The forward kernel: one program per (batch, head, block of query rows[, slice of value columns]).

Online softmax (Milakov & Gimelshein, 2018; FlashAttention-2) around a score program: first over the tiles that the mask
spares altogether, then over those it cuts. The row statistics are stored as two planes, the row maximum and the sum of
exp(x - maximum), not as one log-sum-exp: where every score of a row is a huge negative fill, maximum + log(sum) rounds
to the maximum, and a rounded logarithm is the same error in a whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchflash.kernels.moments import even_rows, even_sum, with_sums
from torchflash.kernels.tiles import (
    BEYOND,
    FAR,
    LOG2E,
    accumulate,
    dropout_keeps,
    dropout_keys,
    exponentials,
    inner,
    inner_streamed,
    load_chunk,
    load_chunks,
    places,
    scale_rows,
    store_chunks,
    zero_chunks,
)
from torchflash.kernels.visits import SIZES, plain_at, tile_at, visit

UNSPECIALIZED = ("H", "GROUP_K", "GROUP_V", "M", "N", "threshold", "lines", "line_b", "line_h", "parts", *SIZES)


@triton.jit
def post_of_nan(POST: tl.constexpr, b, h, m, M, N, T, S, Z, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M], whether post(NaN) is NaN for some key: only then is a row of NaN probabilities NaN."""
    found = tl.zeros([BLOCK_M], tl.int32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        w = POST(tl.full([BLOCK_M, BLOCK_N], float("nan"), tl.float32), b, h, m[:, None], n[None, :], T, S, Z)
        found = tl.maximum(found, tl.max(((w != w) & (n[None, :] < N)).to(tl.int32), 1))
    return found


@triton.jit
def forward_tile(
    row_max, row_sum, acc, q, keys, n0, Q, K, V, K_DESC, V_DESC, T, S, R, Z,
    q_m, q_d, k_n, k_d, v_n, v_d, b, h, h_k, h_v, m, start_v, M, N, exponent, threshold,
    ROWS: tl.constexpr, SCORE: tl.constexpr, POST: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """(row_max, row_sum, acc) after the keys n0 … n0 + BLOCK_N; without TAIL all of them exist."""
    n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k_rows = n
    v_rows = n
    limit = N
    # looked up ones are counted in elements
    if ROWS is not None:
        k_rows, v_rows = places(ROWS, b, n, N, T, S, Z, R, TAIL)
        limit = BEYOND
        k_n = 1
        v_n = 1
    if STREAM:
        s = inner_streamed(Q, m, M, q_m, q_d, K, k_rows, limit, k_n, k_d, D, STREAM, BLOCK_M, BLOCK_N, PRECISION)
    else:
        k = load_chunks(K_DESC, K, b, h_k, n0, k_rows, limit, k_n, k_d, D, CHUNKS, TAIL)  # [BLOCK_N, D]
        s = inner(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    x = SCORE(s, b, h, m[:, None], n[None, :], T, S, Z)
    if TAIL:
        x = tl.where(n[None, :] < N, x, float("-inf"))

    new_max = tl.max(x, 1)
    if not EXACT:
        new_max *= exponent
    new_max = tl.maximum(row_max, new_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = exponentials(x, base[:, None], exponent, EXACT)
    rescale = exponentials(row_max, base, 1.0, EXACT)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if POST is not None:
        p = POST(p, b, h, m[:, None], n[None, :], T, S, Z)
        if TAIL:
            p = tl.where(n[None, :] < N, p, 0.0)
    if DROPOUT:
        p = tl.where(dropout_keeps(keys[0][:, None], keys[1][:, None], keys[2][:, None], n[None, :], threshold), p, 0.0)

    if STREAM:
        v = (load_chunk(V, v_rows, limit, v_n, v_d, start_v, DV, CHUNKS_V[0], False, True),)
    else:
        v = load_chunks(V_DESC, V, b, h_v, n0, v_rows, limit, v_n, v_d, DV, CHUNKS_V, TAIL)  # [BLOCK_N, DV]
    acc = accumulate(scale_rows(acc, rescale), p.to(V.dtype.element_ty), v, PRECISION)
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward(
    Q, K, V, OUT, LSE, Q_DESC, K_DESC, V_DESC, SEED, T, S, R, ORDER, COUNTS, UNEVEN, SUMS, MODERATE,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_m, o_d,
    H, GROUP_K, GROUP_V, M, N, lines, line_b, line_h, parts, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7,
    exponent, fill, huge, threshold, keep_scale,
    ROWS: tl.constexpr, SCORE: tl.constexpr, BODY: tl.constexpr, POST: tl.constexpr, EXACT: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_V: tl.constexpr, SLICES: tl.constexpr, STREAM: tl.constexpr, RUN: tl.constexpr, FILLED: tl.constexpr,
    ZERO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    blocks = tl.cdiv(M, BLOCK_M) * SLICES
    bh = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # under a causal mask the longest rows go first
    start_v = (block % SLICES) * CHUNKS_V[0]
    m0 = (block // SLICES) * BLOCK_M
    b = bh // H
    h = bh % H
    h_k = h // GROUP_K
    h_v = h // GROUP_V
    m = m0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]

    q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k_at = K + b.to(tl.int64) * k_b + h_k.to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + h_v.to(tl.int64) * v_h
    q = ()
    if STREAM == 0:
        q = load_chunks(Q_DESC, q_at, b, h, m0, m, M, q_m, q_d, D, CHUNKS, True)  # [BLOCK_M, D]
    keys = ()
    if DROPOUT:
        keys = dropout_keys(tl.load(SEED), bh.to(tl.int64) * M + m)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, CHUNKS_V)  # [BLOCK_M, DV]
    tiles = tl.cdiv(N, BLOCK_N)
    start, first, plain, visited = visit(ORDER, COUNTS, b, h, line_b, line_h, m0 // BLOCK_M, tiles, N // BLOCK_N)
    for i in tl.range(0, plain):
        row_max, row_sum, acc = forward_tile(
            row_max, row_sum, acc, q, keys, plain_at(ORDER, start, i, first, RUN) * BLOCK_N, q_at, k_at, v_at,
            K_DESC, V_DESC, T, S, R, Z, q_m, q_d, k_n, k_d, v_n, v_d, b, h, h_k, h_v, m, start_v, M, N, exponent,
            threshold, ROWS, BODY, POST, EXACT, DROPOUT, PRECISION, D, DV, CHUNKS, CHUNKS_V, STREAM, BLOCK_M, BLOCK_N,
            False,
        )  # fmt: skip
    unit: tl.constexpr = 1.0 if EXACT else LOG2E  # of the row maximum
    # Only if a row has then not seen a score far above the fill, also the tiles that keep nothing: there the fill
    # weighs something, and skipping would be wrong. The order of tiles does not matter. Infinite fills never do.
    begin = plain
    end = visited
    even = tl.zeros([BLOCK_M], tl.int32)
    for _ in tl.static_range(1 if FILLED == 0 else 2):  # unrolled: a loop of loops serialises wgmma
        for i in tl.range(begin, end):
            row_max, row_sum, acc = forward_tile(
                row_max, row_sum, acc, q, keys, tile_at(ORDER, start, i) * BLOCK_N, q_at, k_at, v_at, K_DESC, V_DESC,
                T, S, R, Z, q_m, q_d, k_n, k_d, v_n, v_d, b, h, h_k, h_v, m, start_v, M, N, exponent, threshold,
                ROWS, SCORE, POST, EXACT, DROPOUT, PRECISION, D, DV, CHUNKS, CHUNKS_V, STREAM, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
        if FILLED:
            needs = (m < M) & ((row_max - fill * unit > 128.0 * unit) == 0)
            if UNEVEN is not None:
                mask = (b * line_b + h * line_h) // tl.cdiv(M, BLOCK_M)
                marks = UNEVEN + mask.to(tl.int64) * M
                even = even_rows(marks, MODERATE, q_at, b, h_k, m, M, q_m, q_d, H // GROUP_K, parts, D)
                needs &= even == 0
            needy = tl.max(needs.to(tl.int32), 0)
            begin = visited
            end = tl.where(needy > 0, tiles, visited)

    if UNEVEN is not None:
        if tl.max(even, 0) > 0:
            one = tl.zeros([BLOCK_M, 1], tl.float32)
            x = tl.max(SCORE(one, b, h, m[:, None], tl.zeros([1, 1], tl.int32), T, S, Z), 1)
            if not EXACT:
                x *= exponent
            row_max = tl.where(even > 0, x, row_max)
            row_sum = tl.where(even > 0, N.to(tl.float32), row_sum)
            acc = with_sums(acc, even, SUMS, b * (H // GROUP_V) + h_v, parts, start_v, DV, CHUNKS_V)
    is_nan = (row_sum != row_sum) | (row_sum == 0.0)  # a NaN or +inf score, or nothing but -inf
    if ZERO:
        is_nan = row_sum != row_sum
    inverse = tl.where(is_nan, float("nan"), 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))
    acc = scale_rows(acc, inverse * keep_scale)
    if POST is not None:
        if tl.max((is_nan & (m < M)).to(tl.int32), 0) > 0:
            stays = post_of_nan(POST, b, h, m, M, N, T, S, Z, BLOCK_M, BLOCK_N) > 0
            out = ()
            for c in tl.static_range(len(CHUNKS_V)):
                out += (tl.where((is_nan & (stays == 0))[:, None], 0.0, acc[c]),)  # type: ignore[assignment]
            acc = out

    o_at = OUT + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
    store_chunks(o_at, m, M, o_m, o_d, acc, start_v, DV, CHUNKS_V)
    if start_v == 0:
        lse_at = LSE + bh.to(tl.int64) * M + m
        if not EXACT:  # FAR (forms.py) times the exponent is exact, and so is this comparison
            row_max = tl.where(row_max == -FAR * exponent, huge, row_max * (1.0 / LOG2E))
        if UNEVEN is not None:
            row_sum = tl.where(even > 0, even_sum(N), row_sum)
        tl.store(lse_at, row_max, mask=m < M)
        tl.store(lse_at + lines.to(tl.int64) * M, row_sum, mask=m < M)
