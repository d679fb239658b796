"""Small Triton functions shared by every kernel: operands held as tuples of power-of-two chunks of the head dimension,
the dropout mask, and the scalar mathematics that generated programs call.

A head dimension of 80 is held as chunks (64, 16): tuples of [ROWS, 64] and [ROWS, 16], so that no arithmetic is
wasted on 128 columns. Only the last chunk may be wider than what is left; its surplus is masked, memory beyond a row
is never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


# ------------------------------------------------------------------------------------------------------------- chunks


@triton.jit
def load_chunk(ptr, rows, limit, stride_row, stride_d, start, D: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    """[ROWS, C]: columns start … start + C of the rows below `limit`, 0 elsewhere. FULL: all those columns exist."""
    d = start + tl.arange(0, C)
    at = ptr + rows[:, None].to(tl.int64) * stride_row + d[None, :].to(tl.int64) * stride_d
    if FULL:
        return tl.load(at, mask=rows[:, None] < limit, other=0.0)
    return tl.load(at, mask=(rows[:, None] < limit) & (d[None, :] < D), other=0.0)


@triton.jit
def load_chunks(ptr, rows, limit, stride_row, stride_d, D: tl.constexpr, CHUNKS: tl.constexpr):
    """A whole operand, ([ROWS, CHUNKS[0]], …)."""
    out = ()
    at: tl.constexpr = 0
    for i in tl.static_range(len(CHUNKS)):
        out += (load_chunk(ptr, rows, limit, stride_row, stride_d, at, D, CHUNKS[i], at + CHUNKS[i] <= D),)  # type: ignore[assignment]
        at = at + CHUNKS[i]
    return out


@triton.jit
def store_chunks(ptr, rows, limit, stride_row, stride_d, x, start, D: tl.constexpr, CHUNKS: tl.constexpr):
    at = start
    for i in tl.static_range(len(CHUNKS)):
        d = at + tl.arange(0, CHUNKS[i])
        to = ptr + rows[:, None].to(tl.int64) * stride_row + d[None, :].to(tl.int64) * stride_d
        tl.store(to, x[i].to(ptr.dtype.element_ty), mask=(rows[:, None] < limit) & (d[None, :] < D))
        at = at + CHUNKS[i]


@triton.jit
def zero_chunks(ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    out = ()
    for i in tl.static_range(len(CHUNKS)):
        out += (tl.zeros([ROWS, tl.constexpr(CHUNKS[i])], tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def scale_rows(x, factor):
    """Each chunk [ROWS, C] times factor [ROWS]."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] * factor[:, None],)  # type: ignore[assignment]
    return out


@triton.jit
def inner(a, b, PRECISION: tl.constexpr):
    """a bᵀ over the head dimension: ([A, C], …), ([B, C], …) -> [A, B]."""
    s = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        s = tl.dot(a[i], b[i].T, s, input_precision=PRECISION)
    return s


@triton.jit
def accumulate(acc, w, x, PRECISION: tl.constexpr):
    """acc + w x: ([A, C], …), [A, B], ([B, C], …) -> ([A, C], …)."""
    out = ()
    for i in tl.static_range(len(acc)):
        out += (tl.dot(w, x[i], acc[i], input_precision=PRECISION),)  # type: ignore[assignment]
    return out


@triton.jit
def inner_streamed(
    a, a_rows, a_limit, a_row, a_d, b, b_rows, b_limit, b_row, b_d,
    D: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`inner` for head dimensions too large to hold: both operands are read chunk by chunk. -> [A, B]"""
    s = tl.zeros([A, B], tl.float32)
    for at in tl.range(0, D, C):
        x = load_chunk(a, a_rows, a_limit, a_row, a_d, at, D, C, False)
        y = load_chunk(b, b_rows, b_limit, b_row, b_d, at, D, C, False)
        s = tl.dot(x, y.T, s, input_precision=PRECISION)
    return s


# ------------------------------------------------------------------------------------------------------------ softmax


@triton.jit
def probabilities(x, row_max, inverse_sum):
    """softmax from the row statistics; NaN in rows that are wholly -inf, as torch. Never folds log2(e) into x."""
    return tl.exp2((x - row_max) * LOG2E) * inverse_sum


@triton.jit
def dropout_scale(seed, bh, m, n, M, N, threshold, keep_scale):
    """keep_scale where the weight is kept, 0 where it is dropped, as `philox.scale`; m and n broadcast to a tile."""
    counter = (bh.to(tl.int64) * M + m.to(tl.int64)) * N + n.to(tl.int64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    r, _, _, _ = tl.philox(seed, low, high, zero, zero, 7)
    ordered = (r ^ 0x80000000).to(tl.int32, bitcast=True)  # as unsigned: threshold comes 2**31 lower
    return tl.where(ordered >= threshold, keep_scale, 0.0)


# -------------------------------------------------------------------------------------------- mathematics of programs


@triton.jit
def as_index(x):
    """A loaded integer, as int32 or int64."""
    return x.to(tl.int64) if x.dtype.primitive_bitwidth == 64 else x.to(tl.int32)


@triton.jit
def floor_div(a, b):
    """Integer a // b rounded towards minus infinity (Triton's rounds towards 0)."""
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)


@triton.jit
def floor_mod(a, b):
    """Integer a % b with the sign of b."""
    r = a - (a // b) * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    """Nearest integer, ties to even."""
    near = tl.floor(x + 0.5)
    odd = near - 2.0 * tl.floor(near * 0.5)
    tie = ((x - tl.floor(x)) == 0.5) & (odd == 1.0)
    return tl.where(tl.abs(x) < 8388608.0, tl.where(tie, near - 1.0, near), x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Within 2 ulp: Cephes' polynomial for small |x|, by exp elsewhere."""
    z = x * x
    c = -5.70498872745e-3
    c = c * z + 2.06390887954e-2
    c = c * z - 5.37397155531e-2
    c = c * z + 1.33314422036e-1
    c = c * z - 3.33332819422e-1
    small = c * z * x + x
    a = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    return tl.where(a < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def expm1(x):
    """exp(x) - 1; a series where the difference would cancel."""
    series = 1.0 + x * (1.0 / 8.0)
    series = 1.0 + x * (1.0 / 7.0) * series
    series = 1.0 + x * (1.0 / 6.0) * series
    series = 1.0 + x * (1.0 / 5.0) * series
    series = 1.0 + x * (1.0 / 4.0) * series
    series = 1.0 + x * (1.0 / 3.0) * series
    series = 1.0 + x * (1.0 / 2.0) * series
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), with the rounding of 1 + x divided out (Goldberg, 1991, theorem 4)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def power(x, y):
    """x ** y for floats, signs and zeros as C's pow."""
    r = tl.exp2(y * tl.log2(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = whole & ((y - 2.0 * tl.floor(y * 0.5)) == 1.0)
    r = tl.where(x < 0, tl.where(whole, tl.where(odd, -r, r), float("nan")), r)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, r)
