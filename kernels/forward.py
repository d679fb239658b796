"""The forward kernel: one program per (batch, head, block of query rows[, slice of value columns]).

Online softmax (Milakov & Gimelshein, 2018; FlashAttention-2) around a score program. The row statistics are stored as
two planes, the row maximum and the sum of exp(x - maximum), not as one log-sum-exp: where every score of a row is a
huge negative fill, maximum + log(sum) rounds to the maximum, and a rounded logarithm is the same error in a whole
row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchflash.kernels.tiles import (
    LOG2E,
    accumulate,
    dropout_scale,
    inner,
    inner_streamed,
    load_chunk,
    load_chunks,
    scale_rows,
    store_chunks,
    zero_chunks,
)

SIZES = ("Z0", "Z1", "Z2", "Z3", "Z4", "Z5", "Z6", "Z7")
UNSPECIALIZED = ("H", "GROUP_K", "GROUP_V", "M", "N", "threshold", "plane", *SIZES)


@triton.jit
def kept_keys(KEEP: tl.constexpr, b, h, m0, M, N, Z, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[lo, hi), multiples of BLOCK_N: the key tiles outside are provably not kept by rows m0 … m0 + BLOCK_M."""
    lo = N * 0
    hi = tl.cdiv(N, BLOCK_N) * BLOCK_N
    if KEEP is not None:
        m1 = tl.minimum(m0 + BLOCK_M, M) - 1
        can = KEEP(b, h, h, m0, m1, lo, tl.minimum(lo + BLOCK_N, N) - 1, Z)
        while (lo < hi) & (can == 0):
            lo += BLOCK_N
            can = KEEP(b, h, h, m0, m1, lo, tl.minimum(lo + BLOCK_N, N) - 1, Z)
        can = KEEP(b, h, h, m0, m1, hi - BLOCK_N, tl.minimum(hi, N) - 1, Z)
        while (lo < hi) & (can == 0):
            hi -= BLOCK_N
            can = KEEP(b, h, h, m0, m1, hi - BLOCK_N, tl.minimum(hi, N) - 1, Z)
    return lo, hi


@triton.jit
def post_of_nan(POST: tl.constexpr, b, h, m, M, N, T, S, Z, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M], whether post(NaN) is NaN for some key: only then is a row of NaN probabilities NaN."""
    found = tl.zeros([BLOCK_M], tl.int32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        w = POST(tl.full([BLOCK_M, BLOCK_N], float("nan"), tl.float32), b, h, m[:, None], n[None, :], T, S, Z)
        found = tl.maximum(found, tl.max(((w != w) & (n[None, :] < N)).to(tl.int32), 1))
    return found


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward(
    Q, K, V, OUT, LSE, SEED, T, S,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_m, o_d,
    H, GROUP_K, GROUP_V, M, N, plane, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, fill, threshold, keep_scale,
    SCORE: tl.constexpr, POST: tl.constexpr, KEEP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    SLICES: tl.constexpr, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    blocks = tl.cdiv(M, BLOCK_M) * SLICES
    bh = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # under a causal mask the longest rows go first
    start_v = (block % SLICES) * CHUNKS_V[0]
    m0 = (block // SLICES) * BLOCK_M
    b = bh // H
    h = bh % H
    m = m0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]

    q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k_at = K + b.to(tl.int64) * k_b + (h // GROUP_K).to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + (h // GROUP_V).to(tl.int64) * v_h
    if STREAM == 0:
        q = load_chunks(q_at, m, M, q_m, q_d, D, CHUNKS)  # [BLOCK_M, D]
    if DROPOUT:
        seed = tl.load(SEED)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, CHUNKS_V)  # [BLOCK_M, DV]

    lo, hi = kept_keys(KEEP, b, h, m0, M, N, Z, BLOCK_M, BLOCK_N)
    # First the range that may be kept. Only if a row has then not seen a score far above the fill, also the rest: there
    # the fill weighs something, and skipping would be wrong. The order of tiles does not matter.
    for rest in range(1 if KEEP is None else 2):
        first, count = lo, (hi - lo) // BLOCK_N
        if KEEP is not None:
            needy = tl.max(((m < M) & ((row_max - fill > 128.0) == 0)).to(tl.int32), 0)
            others = (tl.cdiv(N, BLOCK_N) - count) * needy
            count = tl.where(rest == 0, count, others)
        for i in tl.range(0, count):
            n0 = first + i * BLOCK_N
            if KEEP is not None:
                skipped = tl.where(i * BLOCK_N < lo, i * BLOCK_N, i * BLOCK_N + hi - lo)
                n0 = tl.where(rest == 0, n0, skipped)
            n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            if STREAM:
                s = inner_streamed(q_at, m, M, q_m, q_d, k_at, n, N, k_n, k_d, D, STREAM, BLOCK_M, BLOCK_N, PRECISION)
            else:
                k = load_chunks(k_at, n, N, k_n, k_d, D, CHUNKS)  # [BLOCK_N, D]
                s = inner(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
            x = SCORE(s, b, h, m[:, None], n[None, :], T, S, Z)
            x = tl.where(n[None, :] < N, x, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(x, 1))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2((x - base[:, None]) * LOG2E)
            rescale = tl.exp2((row_max - base) * LOG2E)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            row_max = new_max
            if POST is not None:
                p = tl.where(n[None, :] < N, POST(p, b, h, m[:, None], n[None, :], T, S, Z), 0.0)
            if DROPOUT:
                p *= dropout_scale(seed, bh, m[:, None], n[None, :], M, N, threshold, keep_scale)

            if STREAM:
                v = (load_chunk(v_at, n, N, v_n, v_d, start_v, DV, CHUNKS_V[0], False),)
            else:
                v = load_chunks(v_at, n, N, v_n, v_d, DV, CHUNKS_V)  # [BLOCK_N, DV]
            acc = accumulate(scale_rows(acc, rescale), p.to(V.dtype.element_ty), v, PRECISION)

    is_nan = (row_sum != row_sum) | (row_sum == 0.0)  # a NaN or +inf score, or nothing but -inf
    inverse = tl.where(is_nan, float("nan"), 1.0 / row_sum)
    acc = scale_rows(acc, inverse)
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
        tl.store(lse_at, row_max, mask=m < M)
        tl.store(lse_at + plane, row_sum, mask=m < M)
