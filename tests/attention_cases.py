"""Attention programs to test the op with: what recognition produces for the usual models, and the hard corners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import INF, Inputs
from torch import Tensor

B, H, M, N, D = 2, 2, 29, 53, 16
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MIN = torch.finfo(F32).min


@dataclass(frozen=True)
class Case:
    name: str
    score: str
    keep: str = ""
    fill: float = -INF
    post: str = "p"
    captures: Callable[[torch.dtype], list[Tensor]] = lambda dtype: []
    sizes: tuple[int, ...] = ()
    slack: float = (
        1.0  # of the budget: eager rounds gradients at casts, we do not; some gradients are one sum over everything
    )
    heads: tuple[int, int] = (H, H)  # of k and of v
    dropout_p: float = 0.0


def normal(*shape: int, scale: float = 1.0) -> Callable[[torch.dtype], list[Tensor]]:
    return lambda dtype: [(torch.randn(shape) * scale).to(dtype)]


def padding(whole: bool) -> Tensor:
    """[B, N] bool: keys kept; one batch loses its tail, `whole`: the last batch keeps nothing."""
    kept = torch.arange(N)[None] < torch.tensor([[N - 9], [0 if whole else 20]])
    return kept


def rows(whole: int) -> Tensor:
    """[B, M, N] bool with `whole` rows that keep nothing."""
    kept = torch.rand(B, M, N) < 0.6
    kept[..., 0] = True
    kept[1, 3 : 3 + whole] = False
    return kept


CASES = [
    Case("plain", "0.25 * s"),
    Case("causal", "where(n <= m, 0.25 * s, -inf)", "n <= m"),
    Case("causal_bottom_right", "where(n <= m + z1 - z0, 0.25 * s, -inf)", "n <= m + z1 - z0", sizes=(M, N)),
    Case("window", "where((n <= m) & (m - n < 9), 0.25 * s, -inf)", "(n <= m) & (m - n < 9)"),
    Case("window_finfo", f"where(abs(m - n) < z0, 0.25 * s, {MIN})", "abs(m - n) < z0", MIN, sizes=(7,)),
    Case("rows_without_keys_inf", "where(n <= m - 5, 0.25 * s, -inf)", "n <= m - 5"),
    Case("rows_without_keys_finfo", f"where(n <= m - 5, 0.25 * s, {MIN})", "n <= m - 5", MIN),
    Case("rows_without_keys_1e4", "where(n <= m - 5, 0.25 * s, -10000.0)", "n <= m - 5", -1e4),
    Case("small_fill", "where(n <= m, 0.25 * s, -3.0)", "n <= m", -3.0),
    Case("padding", "where(t0[b, n], 0.25 * s, -inf)", "t0[b, n]", captures=lambda d: [padding(False)]),
    Case("padding_whole_batch_inf", "where(t0[b, n], 0.25 * s, -inf)", captures=lambda d: [padding(True)]),
    Case("padding_whole_batch_finfo", f"where(t0[b, n], 0.25 * s, {MIN})", captures=lambda d: [padding(True)]),
    Case("mask_rows_inf", "where(t0[b, m, n] & (n <= m), 0.25 * s, -inf)", "t0[b, m, n] & (n <= m)",
         captures=lambda d: [rows(3)]),
    Case("nan_to_num", "where(t0[b, m, n], 0.25 * s, -inf)", post="nan_to_num(p)", captures=lambda d: [rows(3)]),
    Case("mask_again", "where(t0[b, m, n], 0.25 * s, -inf)",
         post="where(t0[b, m, n], p, 0.0)", captures=lambda d: [rows(3)]),
    Case("additive_mask", "0.25 * s + t0[b, 0, m, n]",
         captures=lambda d: [torch.zeros(B, 1, M, N).masked_fill(~rows(0)[:, None], -INF).to(d)]),
    Case("additive_1e9", "0.25 * s + 1000000000.0 * (float(t0[b, n]) - 1.0)", captures=lambda d: [padding(True)]),
    Case("masks_added", "0.25 * s + where(t0[b, n], 0.0, -1e30) + where(n <= m, 0.0, -1e30)",
         "t0[b, n] & (n <= m)", -1e30, captures=lambda d: [padding(True)]),
    Case("mask_added_twice", "x0 = where(t0[b, n], 0.0, -1e30); 0.25 * s + x0 + x0", "t0[b, n]", -1e30,
         captures=lambda d: [padding(True)]),
    Case("masks_of_two_sizes", "0.25 * s + where(t0[b, n], 0.0, -1e35) + where(n <= m - 5, 0.0, -1e30)",
         "t0[b, n] & (n <= m - 5)", -1e30, captures=lambda d: [padding(True)]),
    Case("prefix", "where((n <= m) | (n < t0[b]), 0.25 * s, -inf)", "(n <= m) | (n < t0[b])",
         captures=lambda d: [torch.tensor([11, 24])]),
    Case("documents", f"where((t0[b, m] == t0[b, n]) & (n <= m), 0.25 * s, {MIN})",
         "(t0[b, m] == t0[b, n]) & (n <= m)", MIN,
         captures=lambda d: [(torch.arange(N)[None] // torch.tensor([[17], [11]])).to(torch.int32)]),
    Case("alibi", "where(n <= m, 0.25 * s + t0[h] * float(n - m), -inf)", "n <= m",
         captures=normal(H, scale=0.1)),
    Case("alibi_rounded", "where(n <= m, 0.25 * s + bfloat16(0.1 * float(n - m)), -inf)", "n <= m"),
    Case("time_stamps", "0.25 * s - 3e-09 * abs(float(t0[b, n] - t0[b, m]))",
         captures=lambda d: [1_700_000_000_000_000_000 + torch.randint(10**9, (B, N))]),
    Case("int32", "where((int32(t0[b, n] * t0[b, m]) < 0) | (n == 0), "
         "0.25 * s + 1e-09 * float(int32(t0[b, n] - t0[b, m])), -inf)",
         captures=lambda d: [torch.randint(-(2**31), 2**31, (B, N)).to(torch.int32)]),
    Case("far_apart", "where(t0[b, n] - t0[b, m] <= 0, 0.25 * s, -inf)", "t0[b, n] - t0[b, m] <= 0",
         captures=lambda d: [torch.randint(-(2**31), 2**31, (B, N)).to(torch.int32)]),
    Case("softcap", "where(n <= m, 5.0 * tanh(0.05 * s), -inf)", "n <= m"),
    Case("learned_scale", "minimum(exp(t0[()]), 100.0) * s", captures=normal(scale=0.3)),
    Case("bias", "0.25 * s + t0[h, m, n]", captures=normal(H, M, N)),
    Case("bias_batch", "0.25 * s + t0[b, 0, 0, n] + t1[0, h, m, 0] * 0.1 * float(n)",
         captures=lambda d: [torch.randn(B, 1, 1, N).to(d), torch.randn(1, H, M, 1).to(d)]),
    Case("bias_twice", "0.25 * s + t0[h, m] * t0[h, n]", captures=normal(H, N, scale=0.5)),
    Case("relative_bias", "0.25 * s + t0[minimum(maximum(n - m, -8), 8) + 8, h]", captures=normal(17, H)),
    Case("buckets", "0.25 * s + t0[where(abs(n - m) < 4, abs(n - m), minimum(4 + int(log(float(abs(n - m)) / "
         "4.0) * 1.5), 7)), h]",
         captures=normal(8, H)),
    Case("gathered_table", "0.25 * s + t0[t1[m, n], h]",
         captures=lambda d: [torch.randn(9, H).to(d), torch.randint(0, 9, (M, N))]),
    Case("pair_bias", "0.25 * s + t0[b // 2, h, m, n]", captures=normal(1, H, M, N)),
    Case("concatenated", "0.25 * s + where(n < z0, t0[h, n], t1[h, n - z0])", sizes=(20,),
         captures=lambda d: [torch.randn(H, 20).to(d), torch.randn(H, N - 20).to(d)]),
    Case("floors", "0.25 * s + 0.1 * float((n - m) // 3 + (n - m) % 5 + (m - n) // z0) - 0.2 * float((n - m) % "
         "z0 > 3)", sizes=(7,)),
    Case("functions", "0.2 * s + sigmoid(0.1 * s) * 0.3 + sin(float(m)) - abs(0.01 * s) + 0.1 * (0.1 * s) ** 2 "
         "+ log1p(exp(0.05 * s))"),
    Case("rounding", "half(0.25 * s) + bfloat16(0.1 * float(n))", slack=1e3),
    Case("head_gate", "0.25 * s", post="p * t0[h]", captures=normal(H)),
    Case("weight_after", "where(n <= m, 0.25 * s, -inf)", "n <= m", post="where(t1[b, n], p, 0.0) * t0[h, m] * 0.5",
         captures=lambda d: [torch.randn(H, M).to(d), padding(False)]),
    Case("grouped", "where(n <= m, 0.25 * s + t0[h] * 0.1 * float(n), -inf)", "n <= m", heads=(1, 1),
         captures=normal(H)),
    Case("grouped_apart", "where(n <= m, 0.25 * s, -inf)", "n <= m", heads=(1, 2)),
    Case("no_query", "0.1 * float(n)"),
    Case("constant", "0.0"),
    Case("dropout", "where(n <= m, 0.25 * s, -inf)", "n <= m", dropout_p=0.3),
    Case("dropout_gate_bias", "0.25 * s + t0[h, m, n]", post="p * t1[h]", dropout_p=0.5,
         captures=lambda d: [torch.randn(H, M, N).to(d), torch.randn(H).to(d)]),
]  # fmt: skip


def build(case: Case, dtype: torch.dtype = F32, *, v_dtype: torch.dtype | None = None, device: str = "cpu") -> Inputs:
    torch.manual_seed(0)
    heads_k, heads_v = case.heads
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, heads_k, N, D), torch.randn(B, heads_v, N, D)
    captures = case.captures(dtype)
    return Inputs(
        q=q.to(device, dtype), k=k.to(device, dtype), v=v.to(device, v_dtype or dtype),
        captures=[c.to(device) for c in captures],
        sizes=list(case.sizes), score=case.score, keep=case.keep, fill=case.fill, post=case.post,
        dropout_p=case.dropout_p,
        seed=torch.tensor([1234567890123], device=device) if case.dropout_p else None,
    )  # fmt: skip
