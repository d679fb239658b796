"""The mathematics that generated programs call, element by element, against torch and Python."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
import triton
import triton.language as tl

from torchflash.kernels.tiles import bfloat16_rounded, float_of_difference

BLOCK = 1024


@triton.jit
def _difference(A, B, OUT, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, float_of_difference(tl.load(A + at), tl.load(B + at)))


@triton.jit
def _bfloat16(X, OUT, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, bfloat16_rounded(tl.load(X + at)))


def check_differences(device: str) -> None:
    """Of integers of every size: rounded once up to 2**46, within an ulp beyond."""
    torch.manual_seed(0)
    for dtype, bits in ((torch.int32, 30), (torch.int64, 61)):
        below = torch.randint(-(2**bits), 2**bits, (2, BLOCK)) >> torch.randint(bits, (2, BLOCK))
        a, b = below
        b = torch.where(torch.arange(BLOCK) % 3 == 0, a - (b >> bits // 2), b)  # near one another
        out = torch.empty(BLOCK, device=device)
        _difference[(1,)](a.to(dtype).to(device), b.to(dtype).to(device), out, BLOCK)
        for x, y, found in zip(a.tolist(), b.tolist(), out.cpu().numpy(), strict=True):
            exact = x - y
            nearest = np.float32(Fraction(exact))
            if abs(exact) <= 2**46:
                assert found == nearest, (x, y)
            else:
                assert abs(int(found) - exact) <= int(np.spacing(abs(nearest))), (x, y)


def check_bfloat16(device: str) -> None:
    """Of all kinds of floats, ties among them."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4, BLOCK)).to(torch.int32)
    bits[1] = (bits[1] & -65536) | 0x8000  # ties
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1.0])
    x = torch.cat([bits.view(torch.float32).flatten()[: -len(special)], special])
    out = torch.empty(len(x), device=device)
    _bfloat16[(len(x) // BLOCK,)](x.to(device), out, BLOCK)
    assert torch.equal(out.cpu().isnan(), x.isnan())
    torch.testing.assert_close(out.cpu(), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
