"""The backward kernels: row statistics, then dK/dV by key blocks and dQ by query blocks, no atomics on any of them.

With p = softmax(x), w = post(p) · dropout, out = w v:

    dv = wᵀ do    dw = do vᵀ · dropout    dp = post'(dw)    dx = p (dp - delta)
    ds = score'(dx)    dq = ds k    dk = dsᵀ q

delta = Σ_d do · out = Σ_n p dp, as post is linear in p. Every tile is masked, in one loop: two loops sharing
accumulators, or a branch around a dot, would serialise the tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchflash.kernels.forward import UNSPECIALIZED, kept_keys
from torchflash.kernels.tiles import (
    accumulate,
    dropout_scale,
    inner,
    inner_streamed,
    load_chunk,
    load_chunks,
    probabilities,
    store_chunks,
    zero_chunks,
)


@triton.jit(do_not_specialize=("H", "M"))
def attention_delta(
    OUT, DO, LSE, DELTA, NEEDY, o_b, o_h, o_m, o_d, g_b, g_h, g_m, g_d, H, M, fill,
    KEEP: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [B, H, M]; NEEDY[b, h] = 1 where some row must not skip what is not kept (its fill weighs something)."""
    blocks = tl.cdiv(M, BLOCK_M)
    bh = tl.program_id(0) // blocks
    m = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(0, DV, BLOCK_D):
        o = load_chunk(OUT + b * o_b + h * o_h, m, M, o_m, o_d, at, DV, BLOCK_D, False)
        do = load_chunk(DO + b * g_b + h * g_h, m, M, g_m, g_d, at, DV, BLOCK_D, False)
        total += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row = bh.to(tl.int64) * M + m
    tl.store(DELTA + row, total, mask=m < M)
    if KEEP is not None:
        row_max = tl.load(LSE + row, mask=m < M, other=float("inf"))
        needy = tl.max(((m < M) & ((row_max - fill > 128.0) == 0)).to(tl.int32), 0)
        tl.atomic_max(NEEDY + bh, needy, mask=needy > 0)


@triton.jit
def kept_queries(KEEP: tl.constexpr, b, h0, h1, n0, M, N, Z, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[lo, hi), multiples of BLOCK_M: the query tiles outside provably keep none of the keys n0 … n0 + BLOCK_N."""
    lo = M * 0
    hi = tl.cdiv(M, BLOCK_M) * BLOCK_M
    if KEEP is not None:
        n1 = tl.minimum(n0 + BLOCK_N, N) - 1
        can = KEEP(b, h0, h1, lo, tl.minimum(lo + BLOCK_M, M) - 1, n0, n1, Z)
        while (lo < hi) & (can == 0):
            lo += BLOCK_M
            can = KEEP(b, h0, h1, lo, tl.minimum(lo + BLOCK_M, M) - 1, n0, n1, Z)
        can = KEEP(b, h0, h1, hi - BLOCK_M, tl.minimum(hi, M) - 1, n0, n1, Z)
        while (lo < hi) & (can == 0):
            hi -= BLOCK_M
            can = KEEP(b, h0, h1, hi - BLOCK_M, tl.minimum(hi, M) - 1, n0, n1, Z)
    return lo, hi


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "HEADS"))
def attention_backward_kv(
    Q, K, V, DO, LSE, DELTA, NEEDY, DK, DV_, SEED, T, S,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_m, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    H, HEADS, GROUP_K, GROUP_V, M, N, plane, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, threshold, keep_scale,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, POST: tl.constexpr, POST_GRADIENT: tl.constexpr,
    KEEP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    SLICES: tl.constexpr, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key block: HEADS query heads share it and are added here, one after the other.

    Tiles are transposed, [BLOCK_N, BLOCK_M], so that both products take them as they are. Where k and v have different
    numbers of heads (not SHARED) dK and dV come from two launches, and what changes with the query head is read again.
    """
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    blocks = tl.cdiv(N, BLOCK_N) * SLICES
    program = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    groups = H // HEADS
    b = program // groups
    h0 = (program % groups) * HEADS
    n0 = (block // SLICES) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]

    k_at = K + b.to(tl.int64) * k_b + (h0 // GROUP_K).to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + (h0 // GROUP_V).to(tl.int64) * v_h
    if STREAM == 0:
        k = load_chunks(k_at, n, N, k_n, k_d, D, CHUNKS)  # [BLOCK_N, D]
        if WANT_DK:
            v = load_chunks(v_at, n, N, v_n, v_d, DV, CHUNKS_V)  # [BLOCK_N, DV]
    if DROPOUT:
        seed = tl.load(SEED)
    if WANT_DK:
        dk = zero_chunks(BLOCK_N, CHUNKS)
    if WANT_DV:
        dv = zero_chunks(BLOCK_N, CHUNKS_V)

    lo, hi = kept_queries(KEEP, b, h0, h0 + HEADS - 1, n0, M, N, Z, BLOCK_M, BLOCK_N)
    if KEEP is not None:
        needy = tl.max(tl.zeros([1], tl.int32), 0)
        for head in range(HEADS):
            needy = tl.maximum(needy, tl.load(NEEDY + b * H + h0 + head))
        lo = tl.where(needy > 0, 0, lo)
        hi = tl.where(needy > 0, tl.cdiv(M, BLOCK_M) * BLOCK_M, hi)
    count = (hi - lo) // BLOCK_M
    for i in tl.range(0, count * HEADS):
        h = h0 + i // count
        m = lo + (i % count) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        bh = b * H + h
        row = bh.to(tl.int64) * M + m
        q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
        do_at = DO + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h
        kv_at = K + b.to(tl.int64) * k_b + (h // GROUP_K).to(tl.int64) * k_h
        vv_at = V + b.to(tl.int64) * v_b + (h // GROUP_V).to(tl.int64) * v_h
        if STREAM:
            s = inner_streamed(kv_at, n, N, k_n, k_d, q_at, m, M, q_m, q_d, D, STREAM, BLOCK_N, BLOCK_M, PRECISION)
        else:
            if SHARED == 0:
                k = load_chunks(kv_at, n, N, k_n, k_d, D, CHUNKS)
                if WANT_DK:
                    v = load_chunks(vv_at, n, N, v_n, v_d, DV, CHUNKS_V)
            q = load_chunks(q_at, m, M, q_m, q_d, D, CHUNKS)  # [BLOCK_M, D]
            do = load_chunks(do_at, m, M, g_m, g_d, DV, CHUNKS_V)  # [BLOCK_M, DV]
            s = inner(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
        valid = (m[None, :] < M) & (n[:, None] < N)
        row_max = tl.load(LSE + row, mask=m < M, other=0.0)
        inverse_sum = 1.0 / tl.load(LSE + plane + row, mask=m < M, other=1.0)
        x = SCORE(s, b, h, m[None, :], n[:, None], T, S, Z)
        p = tl.where(valid, probabilities(x, row_max[None, :], inverse_sum[None, :]), 0.0)
        if DROPOUT:
            dropped = dropout_scale(seed, bh, m[None, :], n[:, None], M, N, threshold, keep_scale)
        if WANT_DV:
            w = p
            if POST is not None:
                w = tl.where(valid, POST(p, b, h, m[None, :], n[:, None], T, S, Z), 0.0)
            if DROPOUT:
                w *= dropped
            if STREAM:
                do = (load_chunk(do_at, m, M, g_m, g_d, (block % SLICES) * CHUNKS_V[0], DV, CHUNKS_V[0], False),)
            dv = accumulate(dv, w.to(DO.dtype.element_ty), do, PRECISION)
        if WANT_DK:
            if STREAM:
                dp = inner_streamed(
                    vv_at, n, N, v_n, v_d, do_at, m, M, g_m, g_d, DV, STREAM, BLOCK_N, BLOCK_M, PRECISION
                )
                q = (load_chunk(q_at, m, M, q_m, q_d, (block % SLICES) * CHUNKS[0], D, CHUNKS[0], False),)
            else:
                dp = inner(v, do, PRECISION)  # [BLOCK_N, BLOCK_M]
            if DROPOUT:
                dp *= dropped
            if POST is not None:
                dp = POST_GRADIENT(dp, p, b, h, m[None, :], n[:, None], T, S, Z, valid, (), ())
            delta = tl.load(DELTA + row, mask=m < M, other=0.0)
            dx = p * (dp - delta[None, :])
            ds = tl.where(valid, SCORE_GRADIENT(dx, s, b, h, m[None, :], n[:, None], T, S, Z, valid, (), ()), 0.0)
            dk = accumulate(dk, ds.to(Q.dtype.element_ty), q, PRECISION)

    if WANT_DK:
        dk_at = DK + b.to(tl.int64) * dk_b + (h0 // GROUP_K).to(tl.int64) * dk_h
        store_chunks(dk_at, n, N, dk_n, dk_d, dk, (block % SLICES) * CHUNKS[0], D, CHUNKS)
    if WANT_DV:
        dv_at = DV_ + b.to(tl.int64) * dv_b + (h0 // GROUP_V).to(tl.int64) * dv_h
        store_chunks(dv_at, n, N, dv_n, dv_d, dv, (block % SLICES) * CHUNKS_V[0], DV, CHUNKS_V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_q(
    Q, K, V, DO, LSE, DELTA, DQ, SEED, T, S, G, GS,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_m, g_d, dq_b, dq_h, dq_m, dq_d,
    H, GROUP_K, GROUP_V, M, N, plane, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, fill, threshold, keep_scale,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, POST_GRADIENT: tl.constexpr, KEEP: tl.constexpr,
    ONLY_DELTA: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    SLICES: tl.constexpr, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of one block of query rows. Gradients of captured tensors that need a scatter are added to G on the way.

    ONLY_DELTA: instead, delta as Σ_n p dp from these very p and dp. Then Σ_n dx is 0 to rounding, as in eager
    attention; with delta from the rounded output it is off by one error in a whole row, which adds up in the gradient
    of a captured scalar.
    """
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    blocks = tl.cdiv(M, BLOCK_M) * SLICES
    bh = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    m0 = (block // SLICES) * BLOCK_M
    b = bh // H
    h = bh % H
    m = m0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]

    q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k_at = K + b.to(tl.int64) * k_b + (h // GROUP_K).to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + (h // GROUP_V).to(tl.int64) * v_h
    do_at = DO + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h
    if STREAM == 0:
        q = load_chunks(q_at, m, M, q_m, q_d, D, CHUNKS)  # [BLOCK_M, D]
        do = load_chunks(do_at, m, M, g_m, g_d, DV, CHUNKS_V)  # [BLOCK_M, DV]
    row = bh.to(tl.int64) * M + m
    row_max = tl.load(LSE + row, mask=m < M, other=0.0)
    inverse_sum = 1.0 / tl.load(LSE + plane + row, mask=m < M, other=1.0)
    delta = tl.load(DELTA + row, mask=m < M, other=0.0)
    if DROPOUT:
        seed = tl.load(SEED)
    total = tl.zeros([BLOCK_M], tl.float32)
    dq = zero_chunks(BLOCK_M, CHUNKS)

    lo, hi = kept_keys(KEEP, b, h, m0, M, N, Z, BLOCK_M, BLOCK_N)
    if KEEP is not None:
        needy = tl.max(((m < M) & ((row_max - fill > 128.0) == 0)).to(tl.int32), 0)
        lo = tl.where(needy > 0, 0, lo)
        hi = tl.where(needy > 0, tl.cdiv(N, BLOCK_N) * BLOCK_N, hi)
    for n0 in tl.range(lo, hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        if STREAM:
            s = inner_streamed(q_at, m, M, q_m, q_d, k_at, n, N, k_n, k_d, D, STREAM, BLOCK_M, BLOCK_N, PRECISION)
            dp = inner_streamed(do_at, m, M, g_m, g_d, v_at, n, N, v_n, v_d, DV, STREAM, BLOCK_M, BLOCK_N, PRECISION)
            k = (load_chunk(k_at, n, N, k_n, k_d, (block % SLICES) * CHUNKS[0], D, CHUNKS[0], False),)
        else:
            k = load_chunks(k_at, n, N, k_n, k_d, D, CHUNKS)  # [BLOCK_N, D]
            v = load_chunks(v_at, n, N, v_n, v_d, DV, CHUNKS_V)  # [BLOCK_N, DV]
            s = inner(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
            dp = inner(do, v, PRECISION)  # [BLOCK_M, BLOCK_N]
        valid = (m[:, None] < M) & (n[None, :] < N)
        x = SCORE(s, b, h, m[:, None], n[None, :], T, S, Z)
        p = tl.where(valid, probabilities(x, row_max[:, None], inverse_sum[:, None]), 0.0)
        if DROPOUT:
            dp *= dropout_scale(seed, bh, m[:, None], n[None, :], M, N, threshold, keep_scale)
        adds = valid & (block % SLICES == 0)  # the gradients of captures are added once
        if POST_GRADIENT is not None:
            dp = POST_GRADIENT(dp, p, b, h, m[:, None], n[None, :], T, S, Z, adds, G, GS)
        if ONLY_DELTA:
            total += tl.sum(tl.where(valid, p * dp, 0.0), 1)
        else:
            dx = p * (dp - delta[:, None])
            ds = tl.where(valid, SCORE_GRADIENT(dx, s, b, h, m[:, None], n[None, :], T, S, Z, adds, G, GS), 0.0)
            dq = accumulate(dq, ds.to(K.dtype.element_ty), k, PRECISION)

    if ONLY_DELTA:
        tl.store(DELTA + row, total, mask=(m < M) & (block % SLICES == 0))
    else:
        dq_at = DQ + b.to(tl.int64) * dq_b + h.to(tl.int64) * dq_h
        store_chunks(dq_at, m, M, dq_m, dq_d, dq, (block % SLICES) * CHUNKS[0], D, CHUNKS)
