"""The kernels of even rows (even.py): sums over keys and over such rows, each of which ends at once where no row is
even, and what the other kernels make of them."""

from __future__ import annotations

import triton
import triton.language as tl

from torchflash.kernels.tiles import load_chunk

MODERATE: tl.constexpr = tl.constexpr(2.0**30)  # of q and k: products are lost in evenness.LOW


@triton.jit
def even_sum(N):
    """What is stored as the sum of an even row: the float32 above N."""
    return (tl.cast(N, tl.float32).to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)


@triton.jit
def moderate_rows(ptr, rows, limit, stride_row, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[ROWS] int32, whether all of a row is finite and not so large that a product with the like is not lost in LOW."""
    found = tl.full(rows.shape, 1, tl.int32)
    for at in range(0, D, BLOCK_D):
        x = load_chunk(ptr, rows, limit, stride_row, stride_d, at, D, BLOCK_D, D % BLOCK_D == 0, True)
        found = tl.minimum(found, tl.min((tl.abs(x.to(tl.float32)) < MODERATE).to(tl.int32), 1))
    return found


# ------------------------------------------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=("HEADS", "HEADS_K", "marks", "batches", "N", "span", "parts"))
def value_sums(
    K, V, UNEVEN, SUMS, MODERATE_K, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    HEADS, HEADS_K, marks, batches, N, span, parts,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """SUMS [B, HEADS, parts, DV]: Σ v_n over `span` keys. MODERATE_K [B, HEADS_K, parts] int32: whether k is moderate
    there. Only where UNEVEN, `marks` for each batch, leaves some row even."""
    program = tl.program_id(0)
    part = program % parts
    head = program // parts % (HEADS + HEADS_K)
    b = program // parts // (HEADS + HEADS_K)
    at = UNEVEN + tl.where(batches > 1, b, 0).to(tl.int64) * marks
    least = tl.full([WIDTH], 1, tl.int32)
    for start in range(0, marks, WIDTH):
        i = start + tl.arange(0, WIDTH)
        least = tl.minimum(least, tl.load(at + i, mask=i < marks, other=1).to(tl.int32))
    first = part * span
    last = tl.minimum(first + span, N)
    if tl.min(least, 0) == 0:
        if head < HEADS:
            v_at = V + b.to(tl.int64) * v_b + head.to(tl.int64) * v_h
            for start_d in range(0, DV, BLOCK_D):
                total = tl.zeros([BLOCK_D], tl.float32)
                for n0 in range(first, last, BLOCK_N):
                    n = n0 + tl.arange(0, BLOCK_N)
                    v = load_chunk(v_at, n, last, v_n, v_d, start_d, DV, BLOCK_D, DV % BLOCK_D == 0, True)
                    total += tl.sum(v.to(tl.float32), 0)
                d = start_d + tl.arange(0, BLOCK_D)
                to = SUMS + ((b * HEADS + head) * parts + part).to(tl.int64) * DV
                tl.store(to + d, total, mask=d < DV)
        elif MODERATE_K is not None:
            k_at = K + b.to(tl.int64) * k_b + (head - HEADS).to(tl.int64) * k_h
            found = tl.full([BLOCK_N], 1, tl.int32)
            for n0 in range(first, last, BLOCK_N):
                n = n0 + tl.arange(0, BLOCK_N)
                found = tl.minimum(found, moderate_rows(k_at, n, last, k_n, k_d, D, BLOCK_D))
            tl.store(MODERATE_K + (b * HEADS_K + head - HEADS) * parts + part, tl.min(found, 0))


@triton.jit
def even_rows(
    marks, MODERATE_K, q_at, b, h_k, m, M, q_m, q_d, heads_k, parts, D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M] int32, whether a row is even; `marks` of those of its head that are not."""
    even = (tl.load(marks + m, mask=m < M, other=1) == 0).to(tl.int32)
    if MODERATE_K is not None:
        if tl.max(even, 0) > 0:
            even *= moderate_rows(q_at, m, M, q_m, q_d, D, 32)
            for part in range(parts):
                even *= tl.load(MODERATE_K + (b * heads_k + h_k) * parts + part)
    return even


@triton.jit
def with_sums(acc, even, SUMS, line, parts, start_v, DV: tl.constexpr, CHUNKS_V: tl.constexpr):
    """acc [BLOCK_M, DV] with Σ_n v_n in even rows."""
    out = ()
    at = start_v
    for c in tl.static_range(len(CHUNKS_V)):
        d = at + tl.arange(0, CHUNKS_V[c])
        total = tl.zeros([tl.constexpr(CHUNKS_V[c])], tl.float32)
        for part in range(parts):
            total += tl.load(SUMS + (line * parts + part).to(tl.int64) * DV + d, mask=d < DV, other=0.0)
        out += (tl.where(even[:, None] > 0, total[None, :], acc[c]),)  # type: ignore[assignment]
        at = at + CHUNKS_V[c]
    return out


# ------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def first_and_last(EVEN, start, count, WIDTH: tl.constexpr):
    """(place of the first flag that is set, 1 + that of the last); (count, 0) where none is."""
    first = tl.zeros([WIDTH], tl.int32) + count
    last = tl.zeros([WIDTH], tl.int32)
    for at in range(0, count, WIDTH):
        i = at + tl.arange(0, WIDTH)
        even = tl.load(EVEN + start + i, mask=i < count, other=0) > 0
        first = tl.minimum(first, tl.where(even, i, count))
        last = tl.maximum(last, tl.where(even, i + 1, 0))
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit(do_not_specialize=("H", "GROUP", "GROUP_K", "GROUP_V", "M", "N", "lines", "length"))
def even_moments(
    Q, K, V, DO, EVEN, SOME, SUM, QUERIES, KEYS, MEAN,
    q_b, q_h, q_r, q_d, g_b, g_h, g_r, g_d, k_b, k_h, k_r, k_d, v_b, v_h, v_r, v_d,
    H, GROUP, GROUP_K, GROUP_V, M, N, lines, length, weight, weight_s,
    D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """even.Moments, a square of [BLOCK, BLOCK] a program, over ROWS rows or keys at a time: first those of rows, then
    those of keys. SOME and SUM are always stored, the rest where some row is even."""
    slices: tl.constexpr = 1 if QUERIES is None else (D + BLOCK - 1) // BLOCK
    slices_v: tl.constexpr = (DV + BLOCK - 1) // BLOCK
    program = tl.program_id(0) // (slices * slices_v)
    at = tl.program_id(0) % slices * BLOCK
    at_v = tl.program_id(0) // slices % slices_v * BLOCK
    d = at + tl.arange(0, BLOCK)
    d_v = at_v + tl.arange(0, BLOCK)
    square = d_v[:, None] * D + d[None, :]
    inside = (d_v[:, None] < DV) & (d[None, :] < D)
    ones = tl.full([ROWS, 16], 1.0, tl.float32).to(Q.dtype.element_ty)  # sums as products, whose columns are alike
    SUMS: tl.constexpr = "tf32x3" if PRECISION == "tf32" else PRECISION
    if program < lines:
        b = (program // H).to(tl.int64)
        h = (program % H).to(tl.int64)
        first, last = first_and_last(EVEN, program.to(tl.int64) * length, M, WIDTH)
        total = tl.zeros([BLOCK], tl.float32)
        queries = tl.zeros([BLOCK, BLOCK], tl.float32)
        for m0 in tl.range(first, last, ROWS):
            m = m0 + tl.arange(0, ROWS)
            even = tl.load(EVEN + program.to(tl.int64) * length + m, mask=m < last, other=0) > 0
            do = load_chunk(DO + b * g_b + h * g_h, m, last, g_r, g_d, at_v, DV, BLOCK, DV % BLOCK == 0, True)
            do = tl.where(even[:, None], do, 0.0)
            total += tl.sum(do.to(tl.float32), 0)
            if QUERIES is not None:
                q = load_chunk(Q + b * q_b + h * q_h, m, last, q_r, q_d, at, D, BLOCK, D % BLOCK == 0, True)
                q = tl.where(even[:, None], q, 0.0)
                queries = tl.dot(do.T, q, queries, input_precision=PRECISION)
        tl.store(SUM + program.to(tl.int64) * DV + d_v, total * weight, mask=(d_v < DV) & (at == 0))
        tl.store(SOME + program, (last > 0).to(tl.int32), mask=(at == 0) & (at_v == 0))
        if QUERIES is not None:
            of_rows = QUERIES + program.to(tl.int64) * DV * D
            tl.store(of_rows + square, (queries * weight_s).to(Q.dtype.element_ty), mask=inside & (last > 0))
    elif QUERIES is not None:
        pair = program - lines
        b = (pair * GROUP // H).to(tl.int64)
        h = (pair * GROUP % H).to(tl.int64)
        last = pair * 0
        for head in range(GROUP):
            _, end = first_and_last(EVEN, (pair * GROUP + head).to(tl.int64) * length, M, WIDTH)
            last = tl.maximum(last, end)
        k_at = K + b * k_b + h // GROUP_K * k_h
        v_at = V + b * v_b + h // GROUP_V * v_h
        keys = tl.zeros([BLOCK, BLOCK], tl.float32)
        sum_k = tl.zeros([BLOCK, 16], tl.float32)
        sum_v = tl.zeros([BLOCK, 16], tl.float32)
        for n0 in tl.range(0, tl.where(last > 0, N, 0), ROWS):
            n = n0 + tl.arange(0, ROWS)
            k = load_chunk(k_at, n, N, k_r, k_d, at, D, BLOCK, D % BLOCK == 0, True)
            v = load_chunk(v_at, n, N, v_r, v_d, at_v, DV, BLOCK, DV % BLOCK == 0, True)
            sum_k = tl.dot(k.T, ones, sum_k, input_precision=SUMS)
            sum_v = tl.dot(v.T, ones, sum_v, input_precision=SUMS)
            keys = tl.dot(v.T, k, keys, input_precision=PRECISION)
        mean = tl.max(sum_v, 1) * weight
        keys -= mean[:, None] * tl.max(sum_k, 1)[None, :]
        of_keys = KEYS + pair.to(tl.int64) * DV * D
        tl.store(of_keys + square, (keys * weight_s).to(Q.dtype.element_ty), mask=inside & (last > 0))
        tl.store(MEAN + pair.to(tl.int64) * DV + d_v, mean, mask=(d_v < DV) & (at == 0) & (last > 0))


@triton.jit
def add_product(
    acc, some, X, first, limit, stride_row, stride_d, EVEN, MEAN, MOMENT, start,
    D: tl.constexpr, DV: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + (x - MEAN) MOMENT if `some`, which is 0 or 1: x [ROWS, DV], the rows `first` … of X, or those of them that
    are EVEN; MEAN [DV]; MOMENT [DV, D], of which the columns `start` … are taken."""
    rows = first + tl.arange(0, acc[0].shape[0])
    used = rows < limit
    if EVEN is not None:
        used = tl.load(EVEN + rows) > 0
    for at in tl.range(0, DV * some, STEP, num_stages=STAGES):
        x = load_chunk(X, rows, limit, stride_row, stride_d, at, DV, STEP, DV % STEP == 0, True)
        d_v = at + tl.arange(0, STEP)
        if MEAN is not None:
            mean = tl.load(MEAN + d_v, mask=d_v < DV, other=0.0)
            x = (x.to(tl.float32) - mean[None, :]).to(X.dtype.element_ty)
        x = tl.where(used[:, None], x, 0.0)
        out = ()
        column = start
        for i in tl.static_range(len(acc)):
            d = column + tl.arange(0, CHUNKS[i])
            inside = (d_v[:, None] < DV) & (d[None, :] < D)
            moment = tl.load(MOMENT + d_v[:, None] * D + d[None, :], mask=inside, other=0.0)
            out += (tl.dot(x, moment, acc[i], input_precision=PRECISION),)  # type: ignore[assignment]
            column = column + CHUNKS[i]
        acc = out
    return acc


@triton.jit(do_not_specialize=("H", "HEADS", "GROUP", "GROUP_V", "N"))
def even_keys(
    DK, V, SOME, QUERIES, MEAN, dk_b, dk_h, dk_n, dk_d, v_b, v_h, v_n, v_d, H, HEADS, GROUP, GROUP_V, N, factor,
    D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """DK += Σ factor (v_n - v̄) QUERIES over the HEADS query heads of a head of k."""
    slices: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    at = tl.program_id(0) % slices * BLOCK_D
    rest = tl.program_id(0) // slices
    n0 = rest % tl.cdiv(N, BLOCK_N) * BLOCK_N
    head_k = rest // tl.cdiv(N, BLOCK_N)
    first = head_k * HEADS  # b H + h
    b = tl.cast(first // H, tl.int64)
    some = first * 0
    for bh in range(first, first + HEADS):
        some = tl.maximum(some, tl.load(SOME + bh))
    if some > 0:
        acc = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32),)
        for bh in range(first, first + HEADS):
            v_at = V + b * v_b + tl.cast(bh % H // GROUP_V, tl.int64) * v_h
            acc = add_product(
                acc, tl.load(SOME + bh), v_at, n0, N, v_n, v_d, None, MEAN + tl.cast(bh // GROUP, tl.int64) * DV,
                QUERIES + tl.cast(bh, tl.int64) * DV * D, at, D, DV, (BLOCK_D,), 32, 2, PRECISION,
            )  # fmt: skip
        n = n0 + tl.arange(0, BLOCK_N)
        d = at + tl.arange(0, BLOCK_D)
        to = DK + b * dk_b + (first % H // HEADS).to(tl.int64) * dk_h
        to = to + n[:, None].to(tl.int64) * dk_n + d[None, :].to(tl.int64) * dk_d
        inside = (n[:, None] < N) & (d[None, :] < D)
        dk = tl.load(to, mask=inside, other=0.0).to(tl.float32) + acc[0] * factor
        tl.store(to, dk.to(DK.dtype.element_ty), mask=inside)
