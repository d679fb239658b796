"""The dropout mask, a pure function of (seed, b, h, m, n).

Each row draws three 32-bit keys by Philox 4x32-7 (Salmon et al., 2011) at counter (b H + h) M + m; with them the row
mixes n by two multiplications and an xor-shift with the constants of lowbias32 (Wellons, 2018). A generator of full
strength per element would cost more than the attention; this costs seven instructions.

The blockwise torch implementation draws it here, the Triton kernels in `tiles.py`; both give the same bits, whatever
the tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
SPREAD, MIX_A, MIX_B = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF
_A, _B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def threshold(dropout_p: float) -> int:
    """A draw below it (as an unsigned 32-bit integer) is dropped."""
    return round(dropout_p * 2**32)


def _mulhilo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    product = a * b  # wraps as two's complement; the 64 bits are those of the unsigned product
    return (product >> 32) & _MASK, product & _MASK


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four unsigned 32-bit integers, as int64, for each int64 counter; `seed` is an int64 tensor [1]."""
    key_a, key_b = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        hi_b, lo_b = _mulhilo(c2, _B)
        hi_a, lo_a = _mulhilo(c0, _A)
        c0, c1, c2, c3 = hi_b ^ c1 ^ key_a, lo_b, hi_a ^ c3 ^ key_b, lo_a
        key_a, key_b = (key_a + _KEY_A) & _MASK, (key_b + _KEY_B) & _MASK
    return c0, c1, c2, c3


def draw(seed: Tensor, row: Tensor, n: Tensor) -> Tensor:
    """Uniform unsigned 32-bit integers, as int64, for key `n` of row `row` = (b H + h) M + m; both int64, broadcast."""
    k0, k1, k2, _ = philox(seed, row)
    x = ((n * SPREAD) & _MASK) ^ k0
    x = (x * MIX_A + k1) & _MASK
    return ((x ^ (x >> 15)) * MIX_B + k2) & _MASK


def scale(dropout_p: float, seed: Tensor, row: Tensor, n: Tensor) -> Tensor:
    """1 / (1 - p) where the weight is kept and 0 where it is dropped, float32."""
    kept = draw(seed, row, n) >= threshold(dropout_p)
    return kept.to(torch.float32) * (1.0 / (1.0 - dropout_p))
