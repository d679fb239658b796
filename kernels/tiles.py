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
FAR: tl.constexpr = tl.constexpr(2.0**100)  # forms.FAR
BEYOND: tl.constexpr = tl.constexpr(1 << 62)  # every place in memory
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


# ------------------------------------------------------------------------------------------------------------- chunks


@triton.jit
def load_chunk(
    ptr, rows, limit, stride_row, stride_d, start, D: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """[ROWS, C]: columns start … start + C of the rows below `limit`, 0 elsewhere. WHOLE: all those columns exist;
    without TAIL all rows are below."""
    d = start + tl.arange(0, C)
    at = ptr + rows[:, None].to(tl.int64) * stride_row + d[None, :].to(tl.int64) * stride_d
    if WHOLE and not TAIL:
        x = tl.load(at)
    elif WHOLE:
        x = tl.load(at, mask=rows[:, None] < limit, other=0.0)
    elif TAIL:
        x = tl.load(at, mask=(rows[:, None] < limit) & (d[None, :] < D), other=0.0)
    else:
        x = tl.load(at, mask=d[None, :] < D, other=0.0)
    return x


@triton.jit
def load_chunks(
    DESC, ptr, b, h, start, rows, limit, stride_row, stride_d, D: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr
):
    """Rows `rows` = start … of a whole operand, ([ROWS, CHUNKS[0]], …): by the tensor memory accelerator where there is
    a descriptor, which gives 0 outside, else from `ptr`, the place of (b, h)."""
    out = ()
    if DESC is not None:
        out += (tl.reshape(DESC.load([b, h, start, 0]), [rows.shape[0], CHUNKS[0]]),)  # type: ignore[assignment]
    else:
        at: tl.constexpr = 0
        for i in tl.static_range(len(CHUNKS)):
            x = load_chunk(ptr, rows, limit, stride_row, stride_d, at, D, CHUNKS[i], at + CHUNKS[i] <= D, TAIL)
            out += (x,)  # type: ignore[assignment]
            at = at + CHUNKS[i]
    return out


@triton.jit
def places(ROWS: tl.constexpr, b, n, N, T, S, Z, R, TAIL: tl.constexpr):
    """([BLOCK_N], [BLOCK_N]): how far in k and in v the rows of the keys n lie from those at index 0, in elements; with
    TAIL, BEYOND for keys that do not exist. ROWS gives one or two indices, R the size and the strides in k and v of
    each. An index that torch would refuse leads to the first or last row: nothing outside is read."""
    at = ROWS(b, n, T, S, Z)
    k = tl.zeros(n.shape, tl.int64)
    v = tl.zeros(n.shape, tl.int64)
    for i in tl.static_range(len(at)):
        row = at[i] + tl.zeros(n.shape, tl.int32)
        row = tl.where(row < 0, row + R[3 * i], row)
        row = tl.minimum(tl.maximum(row, 0), R[3 * i] - 1).to(tl.int64)
        k += row * R[3 * i + 1]
        v += row * R[3 * i + 2]
    if TAIL:
        k = tl.where(n < N, k, BEYOND)
        v = tl.where(n < N, v, BEYOND)
    return k, v


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
        x = load_chunk(a, a_rows, a_limit, a_row, a_d, at, D, C, False, True)
        y = load_chunk(b, b_rows, b_limit, b_row, b_d, at, D, C, False, True)
        s = tl.dot(x, y.T, s, input_precision=PRECISION)
    return s


# ------------------------------------------------------------------------------------------------------------ softmax


@triton.jit
def exponentials(x, base, exponent, EXACT: tl.constexpr):
    """exp(score - row maximum) for the inner score x, `exponent` being the factor times log2(e).

    `base` is the row maximum in units of log2(e), of which `x * exponent` is within rounding. EXACT: it is the maximum
    itself, the factor is 1, and log2(e) multiplies the difference, so that no finite x overflows.
    """
    if EXACT:
        power = (x - base) * LOG2E
    else:
        power = x * exponent - base
    return tl.exp2(power)


@triton.jit
def probabilities(x, base, inverse_sum, exponent, EXACT: tl.constexpr, JOINT: tl.constexpr):
    """softmax from the row statistics, JOINT ones with the sum as part of the base; NaN in rows of nothing but -inf."""
    p = exponentials(x, base, exponent, EXACT)
    if not JOINT:
        p *= inverse_sum
    return p


@triton.jit
def row_statistics(ROWS, lines, length, bh, m, JOINT: tl.constexpr):
    """(base, delta, 1 / sum) of rows, as `attention_rows` stored them: [3 or 6, lines, length], with `length` beyond
    every tile."""
    at = ROWS + bh.to(tl.int64) * length
    plane = lines.to(tl.int64) * length
    base = tl.load(at + m)
    delta = tl.load(at + plane + m)
    inverse_sum = base
    if not JOINT:
        inverse_sum = tl.load(at + 2 * plane + m)
    return base, delta, inverse_sum


@triton.jit
def row_keys(ROWS, lines, length, bh, m):
    """The keys of `dropout_keys` that `attention_rows` stored behind the statistics."""
    at = ROWS + bh.to(tl.int64) * length
    plane = lines.to(tl.int64) * length
    k0 = tl.load(at + 3 * plane + m).to(tl.uint32, bitcast=True)
    k1 = tl.load(at + 4 * plane + m).to(tl.uint32, bitcast=True)
    k2 = tl.load(at + 5 * plane + m).to(tl.uint32, bitcast=True)
    return k0, k1, k2


@triton.jit
def dropout_keys(seed, row):
    """Three uint32 per row, as `philox.draw`; row is (b H + h) M + m."""
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    k0, k1, k2, _ = tl.philox(seed, low, high, zero, zero, 7)
    return k0, k1, k2


@triton.jit
def dropout_keeps(k0, k1, k2, n, threshold):
    """Whether a weight is kept, as `philox.draw` says; keys and n broadcast to a tile."""
    x = ((n.to(tl.uint32) * 0x9E3779B9) ^ k0) * 0x7FEB352D + k1
    x = (x ^ (x >> 15)) * 0x846CA68B + k2
    ordered = (x ^ 0x80000000).to(tl.int32, bitcast=True)  # as unsigned: threshold comes 2**31 lower
    return ordered >= threshold


# -------------------------------------------------------------------------------------------- mathematics of programs


@triton.jit
def as_index(x):
    """A loaded integer, as int32 or int64."""
    return x.to(tl.int64) if x.dtype.primitive_bitwidth == 64 else x.to(tl.int32)


@triton.jit
def float_of_difference(a, b):
    """float(a - b) for integers, rounded once if it is below 2**46, else within one ulp; what is converted is a and b,
    which may be vectors. a - b itself does not overflow."""
    digit: tl.constexpr = 1 << 22
    if a.dtype.primitive_bitwidth < 64 and b.dtype.primitive_bitwidth < 64:
        high = with_mantissa((a >> 22) + digit // 2) - with_mantissa((b >> 22) + digit // 2)
    else:
        high = with_mantissa((a >> 22) & (digit - 1)) - with_mantissa((b >> 22) & (digit - 1))
        top = with_mantissa((a >> 44) + digit // 2) - with_mantissa((b >> 44) + digit // 2)
        high = tl.fma(top, tl.full(top.shape, digit, tl.float32), high)
    low = with_mantissa(a & (digit - 1)) - with_mantissa(b & (digit - 1))
    return tl.fma(high, tl.full(high.shape, digit, tl.float32), low)


@triton.jit
def float_of_near_difference(a, b):
    """float(a - b) for integers from -2**22 up to 2**22, forms.NEAR."""
    return with_mantissa(a + (1 << 22)) - with_mantissa(b + (1 << 22))


@triton.jit
def with_mantissa(x):
    """2**23 + x for integers 0 <= x < 2**23. Differences of these are exact; those of conversions LLVM would make
    conversions of differences, of which there are more."""
    return (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_rounded(x):
    """A float32 tile rounded to bfloat16 and back: two elements by one instruction, where a conversion alone would be
    one of the slow ones, beside exp2."""
    if INTERPRETED:
        y = x.to(tl.bfloat16).to(tl.float32)
    else:
        y = tl.inline_asm_elementwise(
            """{ .reg .b32 both;
                cvt.rn.bf16x2.f32 both, $3, $2;
                shl.b32 $0, both, 16;
                and.b32 $1, both, 0xffff0000; }""",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return y


@triton.jit
def some(x, inside, AXIS: tl.constexpr):
    """Whether a condition holds for some element along an axis that is `inside`; None: all are."""
    x = x.to(tl.int32)
    if inside is not None:
        x = tl.where(inside, x, 0)
    return tl.max(x, AXIS) > 0


@triton.jit
def every(x, inside, AXIS: tl.constexpr):
    x = x.to(tl.int32)
    if inside is not None:
        x = tl.where(inside, x, 1)
    return tl.min(x, AXIS) > 0


@triton.jit
def least(x, inside, AXIS: tl.constexpr):
    """Of numbers along an axis that are `inside`; of floats -inf where one of them is NaN."""
    if x.dtype.is_floating():
        if inside is not None:
            x = tl.where(inside, x, float("inf"))
        if INTERPRETED:  # which is slow at reductions that it does not know
            return tl.min(tl.where(x == x, x, float("-inf")), AXIS)
        found = tl.reduce(x, AXIS, smaller)
        return tl.where(found == found, found, float("-inf"))
    else:
        bits: tl.constexpr = x.dtype.primitive_bitwidth - 1
        if inside is not None:
            x = tl.where(inside, x, (1 << bits) - 1)
        return tl.min(x, AXIS)


@triton.jit
def largest(x, inside, AXIS: tl.constexpr):
    if x.dtype.is_floating():
        if inside is not None:
            x = tl.where(inside, x, float("-inf"))
        if INTERPRETED:
            return tl.max(tl.where(x == x, x, float("inf")), AXIS)
        found = tl.reduce(x, AXIS, larger)
        return tl.where(found == found, found, float("inf"))
    else:
        bits: tl.constexpr = x.dtype.primitive_bitwidth - 1
        if inside is not None:
            x = tl.where(inside, x, -(1 << bits))
        return tl.max(x, AXIS)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


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
def tanh_fast(x):
    """Within 2e-7, not relative to small values: for operands in half precision."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


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
