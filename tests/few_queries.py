"""Attention of few queries over many keys, as in decoding: programs and shapes for kernels/split.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import INF, Inputs
from torch import Tensor

B, H, N = 2, 4, 520
MIN = torch.finfo(torch.bfloat16).min
LOW = "~(t0[b, 0, m, n] <= -1e+30)"


def kept(*lengths: int) -> Tensor:
    """[B, N] bool: of a static cache, what is filled."""
    return torch.arange(N)[None] < torch.tensor(lengths)[:, None]


def added(*lengths: int) -> Callable[[int], Tensor]:
    return lambda M: torch.where(kept(*lengths)[:, None, None], 0.0, MIN).expand(B, 1, M, N)


@dataclass(frozen=True)
class Way:
    score: str
    keep: str = ""
    fill: float = -INF
    captures: Callable[[int], list[Tensor]] = lambda M: []
    sizes: Callable[[int], list[int]] = lambda M: []
    post: str = "p"
    split: bool = True


WAYS = {
    "plain": Way("0.25 * s"),
    "causal": Way("where(n <= m + 500, 0.25 * s, -inf)", "n <= m + 500"),
    "bottom_right": Way("where(n <= m + z1 - z0, 0.25 * s, -inf)", "n <= m + z1 - z0", sizes=lambda M: [M, N]),
    "window": Way("where(abs(n - 300) < 40, 0.25 * s, -inf)", "abs(n - 300) < 40"),
    "filled": Way("where(t0[b, n], 0.25 * s, -inf)", "t0[b, n]", captures=lambda M: [kept(200, 410)]),
    "filled_finite": Way(f"where(t0[b, n], 0.25 * s, {MIN})", "t0[b, n]", MIN, lambda M: [kept(200, 410)]),
    "empty": Way("where(t0[b, n], 0.25 * s, -inf)", "t0[b, n]", captures=lambda M: [kept(0, 410)]),
    "empty_is_zero": Way("where(t0[b, n], 0.25 * s, -inf)", "t0[b, n]", captures=lambda M: [kept(0, 410)],
                         post="where(t0[b, n], p, 0.0)"),
    "empty_finite": Way(f"where(t0[b, n], 0.25 * s, {MIN})", "t0[b, n]", MIN, lambda M: [kept(0, 410)]),
    "added": Way("0.25 * s + t0[b, 0, m, n]", LOW, -1e30, lambda M: [added(200, 410)(M)]),
    "added_empty": Way("0.25 * s + t0[b, 0, m, n]", LOW, -1e30, lambda M: [added(0, 410)(M)]),
    "mask_of_heads": Way("where(t0[b, h, n], 0.25 * s, -inf)", "t0[b, h, n]",
                         captures=lambda M: [torch.rand(B, H, N) < 0.7]),
    "alibi": Way("0.25 * s + 0.01 * float(h) * float(n - m)"),
    "bias": Way("0.25 * s + t0[h, m, n]", captures=lambda M: [torch.randn(H, M, N)]),
    "softcap": Way("5.0 * tanh(0.05 * s)"),
    "gate": Way("0.25 * s", post="p * t0[h]", captures=lambda M: [torch.randn(H)], split=False),
}  # fmt: skip


def few(way: Way, M: int, D: int, heads: int, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """`heads` of keys and values."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, length, h, D).to(device, dtype).transpose(1, 2)
        for length, h in ((M, H), (N, heads), (N, heads))
    )
    captures = [c.to(dtype) if c.is_floating_point() and not c.lt(-1e30).any() else c for c in way.captures(M)]
    return Inputs(
        q, k, v, [c.to(device) for c in captures], way.sizes(M), score=way.score, keep=way.keep, fill=way.fill,
        post=way.post,
    )  # fmt: skip
