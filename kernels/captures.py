"""Gradient of a captured tensor that is indexed by plain axes (t0[h, m, n], t1[b], …), without atomics and without a
float32 copy of it: one program per tile of the axes the index uses, which loops over the axes it does not use, always
in one order.

Other indices (a relative position, an embedding of document numbers) are scattered by the dQ kernel instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchflash.kernels.forward import UNSPECIALIZED
from torchflash.kernels.tiles import (
    dropout_keeps,
    inner,
    inner_streamed,
    load_chunks,
    probabilities,
    row_keys,
    row_statistics,
)


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "B"))
def attention_backward_capture(
    Q, K, V, DO, ROWS, GRADIENT, Q_DESC, K_DESC, V_DESC, DO_DESC, T, S,
    q_b, q_h, q_m, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_m, g_d, t_b, t_h, t_m, t_n,
    B, H, GROUP_K, GROUP_V, M, N, lines, length, Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7,
    exponent, threshold, keep_scale,
    SCORE: tl.constexpr, POST_GRADIENT: tl.constexpr, SCORE_ADJOINT: tl.constexpr, POST_ADJOINT: tl.constexpr,
    USES_B: tl.constexpr, USES_H: tl.constexpr, USES_M: tl.constexpr, USES_N: tl.constexpr,
    EXACT: tl.constexpr, JOINT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_V: tl.constexpr, SLICES: tl.constexpr, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """GRADIENT[…] += Σ over the unused axes; t_b … t_n are its strides along the used ones."""
    Z = (Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7)
    m_blocks = tl.cdiv(M, BLOCK_M)
    n_blocks = tl.cdiv(N, BLOCK_N)
    # The program's own place on the used axes; on the others it stays 0.
    rest = tl.program_id(0)
    n_own = rest * 0
    m_own = rest * 0
    h_own = rest * 0
    if USES_N:
        n_own = rest % n_blocks
        rest = rest // n_blocks
    if USES_M:
        m_own = rest % m_blocks
        rest = rest // m_blocks
    if USES_H:
        h_own = rest % H
        rest = rest // H
    b_own = rest
    n_count = 1 if USES_N else n_blocks
    m_count = 1 if USES_M else m_blocks
    h_count = 1 if USES_H else H
    b_count = 1 if USES_B else B

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, n_count * m_count * h_count * b_count):
        n0 = (n_own + i % n_count) * BLOCK_N
        m0 = (m_own + (i // n_count) % m_count) * BLOCK_M
        h = h_own + (i // (n_count * m_count)) % h_count
        b = b_own + i // (n_count * m_count * h_count)
        m = m0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        n = n0 + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        bh = b * H + h
        q_at = Q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
        k_at = K + b.to(tl.int64) * k_b + (h // GROUP_K).to(tl.int64) * k_h
        v_at = V + b.to(tl.int64) * v_b + (h // GROUP_V).to(tl.int64) * v_h
        do_at = DO + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h
        if STREAM:
            s = inner_streamed(q_at, m, M, q_m, q_d, k_at, n, N, k_n, k_d, D, STREAM, BLOCK_M, BLOCK_N, PRECISION)
            dp = inner_streamed(do_at, m, M, g_m, g_d, v_at, n, N, v_n, v_d, DV, STREAM, BLOCK_M, BLOCK_N, PRECISION)
        else:
            q = load_chunks(Q_DESC, q_at, b, h, m0, m, M, q_m, q_d, D, CHUNKS, True)
            k = load_chunks(K_DESC, k_at, b, h // GROUP_K, n0, n, N, k_n, k_d, D, CHUNKS, True)
            s = inner(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
            do = load_chunks(DO_DESC, do_at, b, h, m0, m, M, g_m, g_d, DV, CHUNKS_V, True)
            v = load_chunks(V_DESC, v_at, b, h // GROUP_V, n0, n, N, v_n, v_d, DV, CHUNKS_V, True)
            dp = inner(do, v, PRECISION)  # [BLOCK_M, BLOCK_N]
        valid = (m[:, None] < M) & (n[None, :] < N)
        base, delta, inverse_sum = row_statistics(ROWS, lines, length, bh, m, JOINT)
        x = SCORE(s, b, h, m[:, None], n[None, :], T, S, Z)
        p = probabilities(x, base[:, None], inverse_sum[:, None], exponent, EXACT, JOINT)
        p = tl.where(valid, p, 0.0)
        if DROPOUT:
            k0, k1, k2 = row_keys(ROWS, lines, length, bh, m)
            kept = dropout_keeps(k0[:, None], k1[:, None], k2[:, None], n[None, :], threshold)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        if POST_ADJOINT is not None:
            total += tl.where(valid, POST_ADJOINT(dp, p, b, h, m[:, None], n[None, :], T, S, Z), 0.0)
        if SCORE_ADJOINT is not None:
            if POST_GRADIENT is not None:
                dp = POST_GRADIENT(dp, p, b, h, m[:, None], n[None, :], T, S, Z, valid, (), ())
            dx = p * (dp - delta[:, None])
            total += tl.where(valid, SCORE_ADJOINT(dx, s, b, h, m[:, None], n[None, :], T, S, Z), 0.0)

    m = m_own * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_own * BLOCK_N + tl.arange(0, BLOCK_N)
    at = GRADIENT + b_own.to(tl.int64) * t_b + h_own.to(tl.int64) * t_h
    dtype: tl.constexpr = GRADIENT.dtype.element_ty
    if USES_M and USES_N:
        at = at + m[:, None].to(tl.int64) * t_m + n[None, :].to(tl.int64) * t_n
        inside = (m[:, None] < M) & (n[None, :] < N)
        tl.store(at, (tl.load(at, mask=inside, other=0.0) + total).to(dtype), mask=inside)
    elif USES_M:
        at = at + m.to(tl.int64) * t_m
        tl.store(at, (tl.load(at, mask=m < M, other=0.0) + tl.sum(total, 1)).to(dtype), mask=m < M)
    elif USES_N:
        at = at + n.to(tl.int64) * t_n
        tl.store(at, (tl.load(at, mask=n < N, other=0.0) + tl.sum(total, 0)).to(dtype), mask=n < N)
    else:
        tl.store(at, (tl.load(at) + tl.sum(tl.sum(total, 1), 0)).to(dtype))
