"""The backward kernels: row statistics, then dK/dV by key blocks and dQ by query blocks, no atomics on any of them.

With score = factor · f(s), p = softmax(score), w = post(p) · dropout, out = w v:

    dv = wᵀ do    dw = do vᵀ · dropout    dp = post'(dw)    dx = p (dp - delta)
    ds = f'(dx)    dq = factor · ds k    dk = factor · dsᵀ q

delta = Σ_d do · out = Σ_n p dp, as post is linear in p. Tiles that the mask spares go through a loop of their
own, which neither computes nor loads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchflash.kernels.forward import UNSPECIALIZED
from torchflash.kernels.moments import add_product, even_sum
from torchflash.kernels.tiles import (
    FAR,
    LOG2E,
    accumulate,
    dropout_keeps,
    dropout_keys,
    inner,
    inner_streamed,
    load_chunk,
    load_chunks,
    probabilities,
    row_keys,
    row_statistics,
    store_chunks,
    zero_chunks,
)
from torchflash.kernels.visits import plain_at, tile_at, visit


@triton.jit(do_not_specialize=("H", "M", "N", "lines"))
def attention_rows(
    OUT, DO, LSE, ROWS, EVEN, SEED, o_b, o_h, o_m, o_d, g_b, g_h, g_m, g_d, H, M, N, lines, length,
    exponent, fill, huge,
    EXACT: tl.constexpr, JOINT: tl.constexpr, ZERO: tl.constexpr, DROPOUT: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """ROWS [3 or 6, lines = B H, length >= M]: the base of the exponents, delta, 1 / sum (unless JOINT, where it is in
    the base), and under DROPOUT the three keys of the row. Rows whose gradient is 0, as that of padding is, get the
    base inf: then p is 0, and tiles of nothing else need not be visited. So do rows without keys if they are ZERO, and
    even ones (even.py), which EVEN [lines, length] int8 marks if it is there."""
    blocks = length // BLOCK_M
    bh = tl.program_id(0) // blocks
    m = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    delta = tl.zeros([BLOCK_M], tl.float32)
    alive = tl.zeros([BLOCK_M], tl.int32)
    for at in range(0, DV, BLOCK_D):
        o = load_chunk(OUT + b * o_b + h * o_h, m, M, o_m, o_d, at, DV, BLOCK_D, DV % BLOCK_D == 0, True)
        do = load_chunk(DO + b * g_b + h * g_h, m, M, g_m, g_d, at, DV, BLOCK_D, DV % BLOCK_D == 0, True)
        delta += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        alive = tl.maximum(alive, tl.max((do != 0.0).to(tl.int32), 1))
    row = bh.to(tl.int64) * M + m
    base = tl.load(LSE + row, mask=m < M, other=0.0)
    row_sum = tl.load(LSE + lines.to(tl.int64) * M + row, mask=m < M, other=1.0)
    even = (row_sum == even_sum(N)) & (base <= fill)
    if not EXACT:
        base = tl.where(base == huge, -FAR * exponent, base * LOG2E)  # as the forward had it
    if JOINT:
        base += tl.log2(row_sum)
    at = ROWS + bh.to(tl.int64) * length + m
    finite = (row_sum > 0.0) & (row_sum < float("inf"))  # else the whole row of p is NaN, and delta must not spread it
    delta = tl.where(finite, delta, 0.0)
    base = tl.where(finite, base, float("nan"))
    dead = (alive == 0) & finite
    if ZERO:
        dead |= row_sum == 0.0
    if EVEN is not None:
        dead |= even
        tl.store(EVEN + bh.to(tl.int64) * length + m, (even & (m < M)).to(tl.int8))
    tl.store(at, tl.where((m < M) & (dead == 0), base, float("inf")))
    tl.store(at + lines.to(tl.int64) * length, delta)
    if not JOINT:
        tl.store(at + lines.to(tl.int64) * 2 * length, tl.where(dead, 0.0, 1.0 / row_sum))
    if DROPOUT:
        k0, k1, k2 = dropout_keys(tl.load(SEED), row)
        tl.store(at + lines.to(tl.int64) * 3 * length, k0.to(tl.float32, bitcast=True))
        tl.store(at + lines.to(tl.int64) * 4 * length, k1.to(tl.float32, bitcast=True))
        tl.store(at + lines.to(tl.int64) * 5 * length, k2.to(tl.float32, bitcast=True))


@triton.jit
def backward_kv_tile(
    dk, dv, k, v, m0, fresh, Q, K, V, DO, q_at, k_at, v_at, do_at, ROWS, Q_DESC, DO_DESC, T, S, Z,
    q_m, q_d, k_n, k_d, v_n, v_d, g_m, g_d, b, h, bh, n, part, M, N, lines, length, exponent, threshold, keep_scale,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, POST: tl.constexpr, POST_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, JOINT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, STREAM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """(dk, dv) after the queries m0 … m0 + BLOCK_M; without TAIL all of them exist and are `fresh`."""
    m = m0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    if STREAM:
        s = inner_streamed(k_at, n, N, k_n, k_d, q_at, m, M, q_m, q_d, D, STREAM, BLOCK_N, BLOCK_M, PRECISION)
    else:
        if SHARED == 0:
            k = load_chunks(None, k_at, b, h, 0, n, N, k_n, k_d, D, CHUNKS, True)
            if WANT_DK:
                v = load_chunks(None, v_at, b, h, 0, n, N, v_n, v_d, DV, CHUNKS_V, True)
        q = load_chunks(Q_DESC, q_at, b, h, m0, m, M, q_m, q_d, D, CHUNKS, TAIL)  # [BLOCK_M, D]
        do = load_chunks(DO_DESC, do_at, b, h, m0, m, M, g_m, g_d, DV, CHUNKS_V, TAIL)  # [BLOCK_M, DV]
        s = inner(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    base, delta, inverse_sum = row_statistics(ROWS, lines, length, bh, m, JOINT)
    used = ((m < M) & fresh)[None, :]
    if TAIL:
        base = tl.where(fresh, base, float("inf"))  # then p is 0
    x = SCORE(s, b, h, m[None, :], n[:, None], T, S, Z)
    p = probabilities(x, base[None, :], inverse_sum[None, :], exponent, EXACT, JOINT)
    if TAIL and (POST is not None or EXACT):  # where a score can be NaN
        p = tl.where(used, p, 0.0)
    if DROPOUT:
        k0, k1, k2 = row_keys(ROWS, lines, length, bh, m)
        kept = dropout_keeps(k0[None, :], k1[None, :], k2[None, :], n[:, None], threshold)
    if WANT_DV:
        w = p
        if POST is not None:
            w = POST(p, b, h, m[None, :], n[:, None], T, S, Z)
            if TAIL:
                w = tl.where(used, w, 0.0)
        if DROPOUT:
            w = tl.where(kept, w, 0.0)
        if STREAM:
            do = (load_chunk(do_at, m, M, g_m, g_d, part * CHUNKS_V[0], DV, CHUNKS_V[0], False, True),)
        dv = accumulate(dv, w.to(DO.dtype.element_ty), do, PRECISION)
    if WANT_DK:
        if STREAM:
            dp = inner_streamed(v_at, n, N, v_n, v_d, do_at, m, M, g_m, g_d, DV, STREAM, BLOCK_N, BLOCK_M, PRECISION)
            q = (load_chunk(q_at, m, M, q_m, q_d, part * CHUNKS[0], D, CHUNKS[0], False, True),)
        else:
            dp = inner(v, do, PRECISION)  # [BLOCK_N, BLOCK_M]
        if DROPOUT:
            dp = tl.where(kept, dp * keep_scale, 0.0)
        if POST is not None:
            dp = POST_GRADIENT(dp, p, b, h, m[None, :], n[:, None], T, S, Z, used, (), ())
        # f' is linear: masking p before the product rather than dx after it keeps conversions packed
        ds = SCORE_GRADIENT(p, s, b, h, m[None, :], n[:, None], T, S, Z, used, (), ())
        ds *= dp - delta[None, :]
        if TAIL and (POST is not None or EXACT):  # neither 0 · NaN nor 0 / 0
            ds = tl.where(used, ds, 0.0)
        dk = accumulate(dk, ds.to(Q.dtype.element_ty), q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "HEADS"))
def attention_backward_kv(
    Q, K, V, DO, ROWS, DK, DV_, Q_DESC, DO_DESC, T, S, STATES, ORDER, COUNTS, NEEDY, NEEDY_COUNTS, SUM,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_m, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    H, HEADS, GROUP_K, GROUP_V, M, N, lines, length, line_b, line_h, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7,
    factor, exponent, threshold, keep_scale,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, BODY: tl.constexpr, BODY_GRADIENT: tl.constexpr,
    POST: tl.constexpr, POST_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, JOINT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    SLICES: tl.constexpr, STREAM: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    column = block // SLICES
    n0 = column * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]

    k_at = K + b.to(tl.int64) * k_b + (h0 // GROUP_K).to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + (h0 // GROUP_V).to(tl.int64) * v_h
    k = ()
    v = ()
    if STREAM == 0:
        k = load_chunks(None, k_at, b, h0, n0, n, N, k_n, k_d, D, CHUNKS, True)  # [BLOCK_N, D]
        if WANT_DK:
            v = load_chunks(None, v_at, b, h0, n0, n, N, v_n, v_d, DV, CHUNKS_V, True)  # [BLOCK_N, DV]
    dk = ()
    dv = ()
    if WANT_DK:
        dk = zero_chunks(BLOCK_N, CHUNKS)
    if WANT_DV:
        dv = zero_chunks(BLOCK_N, CHUNKS_V)

    tiles = tl.cdiv(M, BLOCK_M)
    for head in range(HEADS):
        h = h0 + head
        bh = b * H + h
        start, first, plain, visited = visit(ORDER, COUNTS, b, h, line_b, line_h, column, tiles, M // BLOCK_M)
        count = visited
        if ORDER is not None:
            count += tl.load(NEEDY_COUNTS + bh)
            needy = NEEDY + bh.to(tl.int64) * tiles
            columns = tl.cdiv(N, BLOCK_N)
            states = STATES + (b * line_b + h * line_h) // columns * tiles.to(tl.int64) * columns + column
        q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
        do_at = DO + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h
        kv_at = K + b.to(tl.int64) * k_b + (h // GROUP_K).to(tl.int64) * k_h
        vv_at = V + b.to(tl.int64) * v_b + (h // GROUP_V).to(tl.int64) * v_h
        for i in tl.range(0, plain):
            dk, dv = backward_kv_tile(
                dk, dv, k, v, plain_at(ORDER, start, i, first, RUN) * BLOCK_M, True, Q, K, V, DO, q_at, kv_at, vv_at,
                do_at, ROWS, Q_DESC, DO_DESC, T, S, Z, q_m, q_d, k_n, k_d, v_n, v_d, g_m, g_d, b, h, bh, n,
                block % SLICES, M, N, lines, length, exponent, threshold, keep_scale,
                BODY, BODY_GRADIENT, POST, POST_GRADIENT, EXACT, JOINT, DROPOUT, PRECISION, SHARED, WANT_DK, WANT_DV,
                D, DV, CHUNKS, CHUNKS_V, STREAM, BLOCK_M, BLOCK_N, False,
            )  # fmt: skip
        for i in tl.range(plain, count):
            tile = i
            fresh = True
            if ORDER is not None:
                # After its own tiles a column visits those whose rows need all columns, unless it was there already.
                own = i < visited
                tile = tl.load(tl.where(own, ORDER + start + i, needy + i - visited))
                fresh = own | (tl.load(states + tile.to(tl.int64) * columns, mask=own == 0, other=0) == 0)
            dk, dv = backward_kv_tile(
                dk, dv, k, v, tile * BLOCK_M, fresh, Q, K, V, DO, q_at, kv_at, vv_at, do_at, ROWS,
                Q_DESC, DO_DESC, T, S, Z, q_m, q_d, k_n, k_d, v_n, v_d, g_m, g_d, b, h, bh, n, block % SLICES,
                M, N, lines, length, exponent, threshold, keep_scale,
                SCORE, SCORE_GRADIENT, POST, POST_GRADIENT, EXACT, JOINT, DROPOUT, PRECISION, SHARED, WANT_DK, WANT_DV,
                D, DV, CHUNKS, CHUNKS_V, STREAM, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip

    if WANT_DK:
        dk_at = DK + b.to(tl.int64) * dk_b + (h0 // GROUP_K).to(tl.int64) * dk_h
        dk = scale_all(dk, factor)
        store_chunks(dk_at, n, N, dk_n, dk_d, dk, (block % SLICES) * CHUNKS[0], D, CHUNKS)
    if WANT_DV:
        if SUM is not None:
            for head in range(HEADS):
                at = SUM + (b * H + h0 + head).to(tl.int64) * DV
                dv = add_row(dv, at, (block % SLICES) * CHUNKS_V[0], DV, CHUNKS_V)
        dv_at = DV_ + b.to(tl.int64) * dv_b + (h0 // GROUP_V).to(tl.int64) * dv_h
        dv = scale_all(dv, keep_scale)
        store_chunks(dv_at, n, N, dv_n, dv_d, dv, (block % SLICES) * CHUNKS_V[0], DV, CHUNKS_V)


@triton.jit
def backward_q_tile(
    dq, total, q, do, n0, keys, base, delta, inverse_sum, K, q_at, k_at, v_at, do_at, K_DESC, V_DESC, T, S, G, GS, Z,
    q_m, q_d, k_n, k_d, v_n, v_d, g_m, g_d, b, h, h_k, h_v, m, part, adds, M, N, exponent, threshold, keep_scale,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, POST_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, JOINT: tl.constexpr, ONLY_DELTA: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, STREAM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """(dq, Σ p dp) after the keys n0 … n0 + BLOCK_N; without TAIL all of them exist."""
    n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if STREAM:
        s = inner_streamed(q_at, m, M, q_m, q_d, k_at, n, N, k_n, k_d, D, STREAM, BLOCK_M, BLOCK_N, PRECISION)
        dp = inner_streamed(do_at, m, M, g_m, g_d, v_at, n, N, v_n, v_d, DV, STREAM, BLOCK_M, BLOCK_N, PRECISION)
        k = (load_chunk(k_at, n, N, k_n, k_d, part * CHUNKS[0], D, CHUNKS[0], False, True),)
    else:
        k = load_chunks(K_DESC, k_at, b, h_k, n0, n, N, k_n, k_d, D, CHUNKS, TAIL)  # [BLOCK_N, D]
        v = load_chunks(V_DESC, v_at, b, h_v, n0, n, N, v_n, v_d, DV, CHUNKS_V, TAIL)  # [BLOCK_N, DV]
        s = inner(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = inner(do, v, PRECISION)  # [BLOCK_M, BLOCK_N]
    used = (n < N)[None, :]
    x = SCORE(s, b, h, m[:, None], n[None, :], T, S, Z)
    p = probabilities(x, base[:, None], inverse_sum[:, None], exponent, EXACT, JOINT)
    if TAIL:
        p = tl.where(used, p, 0.0)
    if DROPOUT:
        kept = dropout_keeps(keys[0][:, None], keys[1][:, None], keys[2][:, None], n[None, :], threshold)
        dp = tl.where(kept, dp * keep_scale, 0.0)
    valid = used & (m < M)[:, None] & adds
    if POST_GRADIENT is not None:
        dp = POST_GRADIENT(dp, p, b, h, m[:, None], n[None, :], T, S, Z, valid, G, GS)
    if ONLY_DELTA:
        total += tl.sum(tl.where(used, p * dp, 0.0), 1)
    else:
        if len(G) == 0:
            ds = SCORE_GRADIENT(p, s, b, h, m[:, None], n[None, :], T, S, Z, valid, G, GS)
            ds *= dp - delta[:, None]
        else:
            dx = p * (dp - delta[:, None])
            ds = SCORE_GRADIENT(dx, s, b, h, m[:, None], n[None, :], T, S, Z, valid, G, GS)
        if TAIL and (POST_GRADIENT is not None or EXACT):  # neither 0 · NaN nor 0 / 0
            ds = tl.where(used, ds, 0.0)
        dq = accumulate(dq, ds.to(K.dtype.element_ty), k, PRECISION)
    return dq, total


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "GROUP"))
def attention_backward_q(
    Q, K, V, DO, LSE, ROWS, DQ, K_DESC, V_DESC, SEED, T, S, G, GS, ORDER, COUNTS, EVEN, KEYS,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_m, g_d, dq_b, dq_h, dq_m, dq_d,
    H, GROUP, GROUP_K, GROUP_V, M, N, lines, length, line_b, line_h, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7,
    factor, exponent, fill, threshold, keep_scale,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, BODY: tl.constexpr, BODY_GRADIENT: tl.constexpr,
    POST_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, JOINT: tl.constexpr, ONLY_DELTA: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    SLICES: tl.constexpr, STREAM: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    h_k = h // GROUP_K
    h_v = h // GROUP_V
    m = m0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]

    q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k_at = K + b.to(tl.int64) * k_b + h_k.to(tl.int64) * k_h
    v_at = V + b.to(tl.int64) * v_b + h_v.to(tl.int64) * v_h
    do_at = DO + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h
    q = ()
    do = ()
    if STREAM == 0:
        q = load_chunks(None, q_at, b, h, m0, m, M, q_m, q_d, D, CHUNKS, True)  # [BLOCK_M, D]
        do = load_chunks(None, do_at, b, h, m0, m, M, g_m, g_d, DV, CHUNKS_V, True)  # [BLOCK_M, DV]
    row = bh.to(tl.int64) * M + m
    base, delta, inverse_sum = row_statistics(ROWS, lines, length, bh, m, JOINT)
    keys = ()
    if DROPOUT:
        keys = dropout_keys(tl.load(SEED), row)
    total = tl.zeros([BLOCK_M], tl.float32)
    dq = zero_chunks(BLOCK_M, CHUNKS)

    tiles = tl.cdiv(N, BLOCK_N)
    start, first, plain, count = visit(ORDER, COUNTS, b, h, line_b, line_h, m0 // BLOCK_M, tiles, N // BLOCK_N)
    if ORDER is not None:
        row_max = tl.load(LSE + row, mask=m < M, other=0.0)
        alive = base != float("inf")
        needy = tl.max((alive & ((row_max - fill > 128.0) == 0)).to(tl.int32), 0)
        count = tl.where(needy > 0, tiles, count)
        if tl.max(alive.to(tl.int32), 0) == 0:
            plain *= 0
            count *= 0
    adds = block % SLICES == 0  # the gradients of captures are added once
    for i in tl.range(0, plain):
        dq, total = backward_q_tile(
            dq, total, q, do, plain_at(ORDER, start, i, first, RUN) * BLOCK_N, keys, base, delta, inverse_sum, K, q_at,
            k_at, v_at, do_at, K_DESC, V_DESC, T, S, G, GS, Z, q_m, q_d, k_n, k_d, v_n, v_d, g_m, g_d, b, h, h_k, h_v,
            m, block % SLICES, adds, M, N, exponent, threshold, keep_scale,
            BODY, BODY_GRADIENT, POST_GRADIENT, EXACT, JOINT, ONLY_DELTA, DROPOUT, PRECISION,
            D, DV, CHUNKS, CHUNKS_V, STREAM, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
    for i in tl.range(plain, count):
        dq, total = backward_q_tile(
            dq, total, q, do, tile_at(ORDER, start, i) * BLOCK_N, keys, base, delta, inverse_sum, K, q_at, k_at, v_at,
            do_at, K_DESC, V_DESC, T, S, G, GS, Z, q_m, q_d, k_n, k_d, v_n, v_d, g_m, g_d, b, h, h_k, h_v, m,
            block % SLICES, adds, M, N, exponent, threshold, keep_scale,
            SCORE, SCORE_GRADIENT, POST_GRADIENT, EXACT, JOINT, ONLY_DELTA, DROPOUT, PRECISION,
            D, DV, CHUNKS, CHUNKS_V, STREAM, BLOCK_M, BLOCK_N, True,
        )  # fmt: skip

    if ONLY_DELTA:
        total = tl.where(total == total, total, 0.0)  # as in `attention_rows`
        at = ROWS + (lines + bh).to(tl.int64) * length + m
        tl.store(at, total, mask=(m < M) & (block % SLICES == 0))
    else:
        dq_at = DQ + b.to(tl.int64) * dq_b + h.to(tl.int64) * dq_h
        if KEYS is not None:
            flags = EVEN + bh.to(tl.int64) * length
            some = tl.max(tl.load(flags + m).to(tl.int32), 0)
            dq = add_product(
                dq, some, do_at, m0, M, g_m, g_d, flags, None,
                KEYS + (bh // GROUP).to(tl.int64) * DV * D, (block % SLICES) * CHUNKS[0], D, DV, CHUNKS, 32, 1,
                PRECISION,
            )  # fmt: skip
        dq = scale_all(dq, factor)
        store_chunks(dq_at, m, M, dq_m, dq_d, dq, (block % SLICES) * CHUNKS[0], D, CHUNKS)


@triton.jit
def add_row(x, ROW, start, D: tl.constexpr, CHUNKS: tl.constexpr):
    """x [ROWS, D] plus ROW [D] in each row, of which the columns `start` … are taken."""
    out = ()
    at = start
    for i in tl.static_range(len(x)):
        d = at + tl.arange(0, CHUNKS[i])
        out += (x[i] + tl.load(ROW + d, mask=d < D, other=0.0)[None, :],)  # type: ignore[assignment]
        at = at + CHUNKS[i]
    return out


@triton.jit
def scale_all(x, factor):
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] * factor,)  # type: ignore[assignment]
    return out
