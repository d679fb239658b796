"""Attention with all scores in memory at once, forward and explicit backward: what short sequences take.

A fused kernel pays for its launch on the host, and blockwise torch for its bookkeeping, before the first score is
computed; where there are few scores, plain batched products and elementwise operations are done by then. The op asks
`faster` at run time, so that one compiled graph takes whichever suits the length at hand. Both ways compute the same to
rounding and keep the same row statistics, so either may follow the other in a backward.

Scores, softmax and accumulation are float32; products take their operands in the operands' dtype, as in the kernels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels.program import P, Program, S, plain_axes
from torchflash.kernels.reference import CaptureGradient, Problem, Rows, Tile
from torchflash.kernels.tuning import Tuning
from torchflash.score import Expr

LOWEST = torch.finfo(torch.float32).min

# ------------------------------------------------------------------------------------------------------- which way


class Limits(NamedTuple):
    """Unfused below `length`, by the longer of queries and keys, while B·H·M·N is at most `scores`."""

    length: int
    scores: int


FUSED, UNBOUNDED = Limits(0, 0), 1 << 62
# Device -> bytes of an element of q -> limits; measured by benchmarks/short_sequences.py, which prints such lines.
MEASURED: dict[str, dict[int, Limits]] = {
    # batches of 1 and 4, 12 heads of 64, one thread: 0.9 to 2.8 times as fast at 256 tokens, 0.5 to 1.8 times at 1024
    "cpu": {2: Limits(512, 1 << 22), 4: Limits(512, 1 << 22)},
}


def device_name(device: torch.device) -> str:
    """The row of MEASURED: "cpu", or "sm_90" for a CUDA device of capability 9.0."""
    return _cuda_name(device) if device.type == "cuda" else device.type


@functools.cache
def _cuda_name(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return "cuda"  # a fake tensor on a machine without such a device
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def limits(device: torch.device, itemsize: int, tuning: Tuning) -> Limits:
    """The user's min_seqlen, whatever it costs, or what was measured on this kind of device, which bounds the memory
    too. A CUDA device that was not measured takes the nearest older one that was."""
    if tuning.min_seqlen is not None:
        return Limits(tuning.min_seqlen, UNBOUNDED)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "0":
        return FUSED  # the interpreter is there to run the kernels
    return measured(device_name(device)).get(itemsize, FUSED)


def measured(name: str) -> dict[int, Limits]:
    if name in MEASURED or not name.startswith("sm_"):
        return MEASURED.get(name, {})
    known = sorted((int(other[3:]), other) for other in MEASURED if other.startswith("sm_"))
    older = [other for number, other in known if number < int(name[3:])]
    return MEASURED[(older or [other for _, other in known[:1]])[-1]] if known else {}


def faster(shape: tuple[int, int, int, int], device: torch.device, itemsize: int, tuning: Tuning) -> bool:
    """Whether attention with scores of `shape` [B, H, M, N] runs unfused.

    Under deterministic algorithms only where the user said so: cuBLAS wants settings of its own for them.
    """
    B, H, M, N = shape
    found = limits(device, itemsize, tuning)
    if max(M, N) >= found.length or B * H * M * N > found.scores:
        return False
    return tuning.min_seqlen is not None or device.type != "cuda" or not torch.are_deterministic_algorithms_enabled()


def describe(shape: Sequence[int | str], device: torch.device, itemsize: int, tuning: Tuning) -> str:
    """For the report: how attention with scores of `shape` [B, H, M, N] will run, some sizes perhaps symbolic."""
    found = limits(device, itemsize, tuning)
    by = "" if tuning.min_seqlen is None else ", by torchflash.min_seqlen"
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) == 4:
        B, H, M, N = sizes
        if not faster((B, H, M, N), device, itemsize, tuning):
            return "fused"
        return f"unfused, {max(M, N)} < {found.length} tokens{by}; its scores take {B * H * M * N * 4 / 2**20:.1f} MiB"
    if found.length <= max((size for size in shape[2:] if isinstance(size, int)), default=0):
        return "fused"
    bound = "" if by else f" and up to {found.scores * 4 / 2**20:.0f} MiB of scores"
    return f"unfused below {found.length} tokens{bound}{by}; else fused"


# ----------------------------------------------------------------------------------------------------------- products


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for a [G, X, Y], b [G, Y, Z] of one dtype: float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.device.type == "cuda":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def groups(x: Tensor, heads: int) -> Tensor:
    """x [B, H, L, D] as [B · heads, H / heads · L, D]: what shares a head of another operand lies together."""
    B, H, L, D = x.shape
    return x.reshape(B * heads, H // heads * L, D)


class Scores(Tile):
    """The one tile of an unfused attention: `s` and `x` [B, H, M, N] float32."""

    def __init__(self, problem: Problem):
        p = problem
        self.rows, self.n = Rows(p, slice(0, p.B), slice(0, p.H), slice(0, p.M)), slice(0, p.N)
        used = set("bhmn") if p.dropout_p else indices(p.program)
        at = {"b": (p.B, 3), "h": (p.H, 2), "m": (p.M, 1), "n": (p.N, 0)}  # size, dims that follow
        self.env = dict(p.sizes)
        for axis in used:
            size, follow = at[axis]
            self.env[axis] = torch.arange(size, device=p.q.device).view(size, *[1] * follow)
        heads = p.k.shape[1]
        self.q, self.k = groups(p.q, heads), groups(p.keys(self.rows.b, slice(0, heads), self.n), heads)
        self.s = product(self.q, self.k.mT).view(p.B, p.H, p.M, p.N)
        self.views = {load: view for load in loads(p.program) if (view := self._view(load)) is not None}
        self.memo = dict(self.views)
        self.x = self.evaluate(p.program.score, {"s": self.s}, self.memo)

    def evaluate(self, e: Expr, names: dict[str, Tensor], memo: dict[Expr, Any] | None = None) -> Tensor:
        return super().evaluate(e, names, dict(self.views) if memo is None else memo)

    def _view(self, load: Expr) -> Tensor | None:
        """A capture indexed by plain axes, in its place among [B, H, M, N]: nothing is gathered."""
        p = self.rows.problem
        axes, t = plain_axes(load), p.captures[int(load.value[1:])]
        if axes is None:
            return None
        sizes = {"b": p.B, "h": p.H, "m": p.M, "n": p.N}
        if any(size < (sizes[a] if isinstance(a, str) else a + 1) for a, size in zip(axes, t.shape, strict=True)):
            return None  # read outside where the program then takes another branch
        t = t[tuple(slice(0, sizes[a]) if isinstance(a, str) else a for a in axes)]
        used = [a for a in axes if isinstance(a, str)]
        t = t.permute([used.index(a) for a in "bhmn" if a in used])
        t = t[tuple(slice(None) if a in used else None for a in "bhmn")]
        return t.float() if t.dtype.is_floating_point else t if t.dtype == torch.bool else t.long()


@functools.lru_cache(maxsize=4096)
def loads(program: Program) -> tuple[Expr, ...]:
    vjps = (*program.score_vjp.values(), *program.post_vjp.values())
    return sc.loads(program.score, *vjps, *([] if program.post is None else [program.post]))


@functools.lru_cache(maxsize=4096)
def indices(program: Program) -> frozenset[str]:
    """The index names that the programs mention, derivatives included."""
    vjps = (*program.score_vjp, *program.score_vjp.values(), *program.post_vjp, *program.post_vjp.values())
    return sc.names(program.score, *vjps, *([] if program.post is None else [program.post])) & sc.INDEX_NAMES


# ------------------------------------------------------------------------------------------------------------ forward


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fills out [B, H, M, Dv] and lse [2, B, H, M] (row maximum, sum of exp(x - maximum))."""
    tile = Scores(problem)
    heads = problem.v.shape[1]
    v = problem.values(tile.rows.b, slice(0, heads), tile.n)
    row_max = torch.amax(tile.x, -1, out=lse[0])
    base = row_max.clamp(min=LOWEST)  # so that exp is 0, and not NaN, in a row of nothing but -inf
    p = torch.sub(tile.x, base[..., None]).exp_()
    row_sum = torch.sum(p, -1, out=lse[1])[..., None]
    dropped = tile.dropout_scale()
    if problem.program.post is not None:  # of the probabilities themselves: it decides which NaN stays
        p = tile.post(p.div_(row_sum))
    w = p if dropped is None else p * dropped
    acc = product(groups(w.to(v.dtype), heads), groups(v, heads)).view(out.shape)
    if problem.program.post is None:
        torch.div(acc, row_sum, out=out)
    else:
        out.copy_(acc)


# ----------------------------------------------------------------------------------------------------------- backward


def backward(
    problem: Problem, do: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, need: Sequence[bool]
) -> list[Tensor]:
    """Fills dq, dk, dv; returns the gradients of the captures with `need`, in their dtype."""
    program, tile = problem.program, Scores(problem)
    q, k, v, heads = problem.q, problem.k, problem.v, problem.v.shape[1]
    p = torch.softmax(tile.x, -1)
    dropped = tile.dropout_scale()
    do, v = groups(do, heads), groups(v, heads)
    w, dw = tile.post(p), product(do, v.mT).view(p.shape)
    if dropped is not None:
        w, dw = w * dropped, dw * dropped
    dv.copy_(product(groups(w.to(v.dtype), heads).mT, do).view(dv.shape))
    dp = dw
    if program.post is not None:
        dp = tile.evaluate(program.post_vjp[P], {"p": p, "g": dw}) if P in program.post_vjp else torch.zeros_like(p)
    dx = torch.ops.aten._softmax_backward_data(dp, p, -1, torch.float32)
    post_names, score_names = {"p": p, "g": dw}, {"s": tile.s, "g": dx}
    if S in program.score_vjp:
        ds = groups(tile.evaluate(program.score_vjp[S], score_names, tile.memo).to(q.dtype), k.shape[1])
        dq.copy_(product(ds, tile.k).view(dq.shape))
        dk.copy_(product(ds.mT, tile.q).view(dk.shape))
    else:
        dq.zero_(), dk.zero_()
    gradients = [CaptureGradient(problem, i, True) for i, wanted in enumerate(need) if wanted]
    for gradient in gradients:
        gradient.add(tile, program.post_vjp, post_names, None)
        gradient.add(tile, program.score_vjp, score_names, tile.memo)
    return [gradient.result() for gradient in gradients]
