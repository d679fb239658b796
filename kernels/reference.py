"""Blockwise attention in plain torch, forward and explicit backward: the CPU implementation, and what runs wherever
the Triton kernels cannot (no triton, an unsupported device or dtype).

Works tile by tile over (batch × heads, BLOCK_M queries, BLOCK_N keys), so temporary memory does not grow with M·N;
keys and values of grouped heads are never expanded. All arithmetic is float32, weights and score gradients are
rounded to the operands' dtype before a product as in the kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels import philox
from torchflash.kernels.program import P, Program, S, plain_axes
from torchflash.kernels.rows import gather
from torchflash.kernels.tuning import DEFAULT, Tuning
from torchflash.score import Expr

TILE_ELEMENTS = 1 << 19  # per temporary: 2 MB of float32
BLOCK_M, BLOCK_N = 128, 512


class Block(NamedTuple):
    """The sizes of a tile."""

    b: int
    h: int
    m: int
    n: int


class Problem:
    """The operands of one attention and the tiles they are worked on in."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captures: Sequence[Tensor],
        sizes: Sequence[int],
        program: Program,
        dropout_p: float,
        seed: Tensor | None,
        tuning: Tuning = DEFAULT,
        keys: int | None = None,
        tile_map: Sequence[Tensor] = (),
    ):
        self.memory: dict[Any, Any] | None = None  # of those who run what differs in the contents of tensors alone
        self.q, self.k, self.v, self.captures, self.program = q, k, v, list(captures), program
        self.sizes = {f"z{i}": int(z) for i, z in enumerate(sizes)}
        self.dropout_p, self.seed, self.tuning = dropout_p, seed, tuning
        self.tile_map = tuple(tile_map)  # of torch.ops.torchflash.tile_map; empty: the kernels make their own
        self.B, self.H, self.M, _ = q.shape
        self.N = k.shape[2] if keys is None else keys
        self.group_k = self.H // k.shape[1] if self.H else 1
        self.group_v = self.H // v.shape[1] if self.H else 1

    def like(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        captures: list[Tensor],
        seed: Tensor | None,
        tile_map: Sequence[Tensor] = (),
    ) -> Problem:
        """The same of other tensors of the same shapes, strides and dtypes, or of none, to be remembered."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other.__dict__.update(q=q, k=k, v=v, captures=captures, seed=seed, tile_map=tuple(tile_map))
        return other

    @functools.cached_property
    def block(self) -> Block:
        # The heads of one tile are a whole number of groups of both k and v, unless even one head at a time is a lot.
        together = math.lcm(self.group_k, self.group_v)
        B, H, M, N = (max(1, size) for size in (self.B, self.H, self.M, self.N))
        n = min(BLOCK_N, N)
        m = min(BLOCK_M, M, max(32, TILE_ELEMENTS // (n * B * H)))
        if m * B * H * n > TILE_ELEMENTS:
            n = min(n, max(64, TILE_ELEMENTS // (m * B * H)))
        h = min(H, TILE_ELEMENTS // (m * n * B) // together * together or together)
        return Block(min(B, max(1, TILE_ELEMENTS // (m * n * h))), h, m, n)

    def keys(self, b: slice, h: slice, n: slice) -> Tensor:
        return gather(self.k, self.program.rows, self.captures, self.sizes, b, h, n)

    def values(self, b: slice, h: slice, n: slice) -> Tensor:
        return gather(self.v, self.program.rows, self.captures, self.sizes, b, h, n)

    def rows(self) -> Iterator[Rows]:
        block = self.block
        for b in range(0, self.B, block.b):
            for h in range(0, self.H, block.h):
                for m in range(0, self.M, block.m):
                    yield Rows(
                        self,
                        slice(b, min(b + block.b, self.B)),
                        slice(h, min(h + block.h, self.H)),
                        slice(m, min(m + block.m, self.M)),
                    )


class Rows:
    """A block of query rows: batches `b`, heads `h`, queries `m` (slices)."""

    def __init__(self, problem: Problem, b: slice, h: slice, m: slice):
        self.problem, self.b, self.h, self.m = problem, b, h, m
        self.h_k = slice(h.start // problem.group_k, -(-h.stop // problem.group_k))
        self.h_v = slice(h.start // problem.group_v, -(-h.stop // problem.group_v))

    @functools.cached_property
    def env(self) -> dict[str, Any]:
        index, device = torch.arange, self.problem.q.device
        return {
            **self.problem.sizes,
            "b": index(self.b.start, self.b.stop, device=device)[:, None, None, None],
            "h": index(self.h.start, self.h.stop, device=device)[:, None, None],
            "m": index(self.m.start, self.m.stop, device=device)[:, None],
        }

    @functools.cached_property
    def q(self) -> Tensor:
        return self.problem.q[self.b, self.h, self.m].float()

    def keys(self) -> tuple[list[slice], list[slice]]:
        """(key tiles that may be kept, tiles provably not kept)."""
        p = self.problem
        tiles = [slice(n, min(n + p.block.n, p.N)) for n in range(0, p.N, p.block.n)]
        if p.program.keep is None:
            return tiles, []
        env = {z: (size, size) for z, size in p.sizes.items()}
        env |= {axis: (at.start, at.stop - 1) for axis, at in (("b", self.b), ("h", self.h), ("m", self.m))}
        may = [bool(sc.bounds(p.program.keep, {**env, "n": (t.start, t.stop - 1)})[0]) for t in tiles]
        return [t for t, can in zip(tiles, may, strict=True) if can], [
            t for t, can in zip(tiles, may, strict=True) if not can
        ]

    def needs_rest(self, row_max: Tensor) -> bool:
        """Whether some row has not seen a score so far above the fill that exp(fill - lse) is 0."""
        return bool((~(row_max - self.problem.program.fill > 128)).any())


class Tile:
    """One tile of scores [b, h, m, n] of a block of rows."""

    def __init__(self, rows: Rows, n: slice):
        self.rows, self.n = rows, n
        p = rows.problem
        self.k = p.keys(rows.b, rows.h_k, n).float()
        self.v = p.values(rows.b, rows.h_v, n).float()
        self.env = {**rows.env, "n": torch.arange(n.start, n.stop, device=p.q.device)}
        self.s = times(rows.q, self.k.mT)
        self.memo: dict[Expr, Any] = {}
        self.x = self.evaluate(p.program.score, {"s": self.s}, self.memo)

    def evaluate(self, e: Expr, names: dict[str, Tensor], memo: dict[Expr, Any] | None = None) -> Tensor:
        value = sc.evaluate(e, {**self.env, **names}, self.rows.problem.captures, memo=memo)
        if not isinstance(value, Tensor):
            value = torch.full((), value, device=self.s.device)
        return value.to(torch.float32).expand(self.s.shape)

    def post(self, p: Tensor) -> Tensor:
        program = self.rows.problem.program
        return p if program.post is None else self.evaluate(program.post, {"p": p})

    def dropout_scale(self) -> Tensor | None:
        problem = self.rows.problem
        if not problem.dropout_p or problem.seed is None:
            return None
        b, h, m, n = (self.env[axis] for axis in "bhmn")
        return philox.scale(problem.dropout_p, problem.seed, (b * problem.H + h) * problem.M + m, n)


def times(a: Tensor, b: Tensor) -> Tensor:
    """a b for a [B, H, X, Y], b [B, H / G, Y, Z], each head of b serving G consecutive heads of a."""
    B, H, X, Y = a.shape
    heads = b.shape[1]
    if heads == H:
        return a @ b
    return (a.reshape(B, heads, H // heads * X, Y) @ b).view(B, H, X, b.shape[-1])


def times_transposed(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """aᵀ b for a [B, H, X, Y], b [B, H, X, Z], summed over groups of heads: [B, heads, Y, Z]."""
    B, H, X, Y = a.shape
    rows = H // heads * X
    return a.reshape(B, heads, rows, Y).mT @ b.reshape(B, heads, rows, b.shape[-1])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype == torch.float32 else x.to(dtype).float()


# ------------------------------------------------------------------------------------------------------------ forward


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fills out [B, H, M, Dv] and lse [2, B, H, M] (row maximum, sum of exp(x - maximum))."""
    for rows in problem.rows():
        row_max = torch.full(rows.q.shape[:3], -math.inf, device=out.device)
        row_sum = torch.zeros_like(row_max)
        acc = rows.q.new_zeros((*rows.q.shape[:3], out.shape[-1]))
        kept, rest = rows.keys()
        row_max, row_sum, acc = _online(rows, kept, row_max, row_sum, acc)
        if rest and rows.needs_rest(row_max):
            row_max, row_sum, acc = _online(rows, rest, row_max, row_sum, acc)
        is_nan = ~(row_sum > 0)  # a NaN or +inf score, or nothing but -inf
        result = (acc / row_sum[..., None]).masked_fill_(is_nan[..., None], math.nan)
        if problem.program.post is not None and bool(is_nan.any()):
            result.masked_fill_((is_nan & ~_post_of_nan(rows))[..., None], 0.0)
        out[rows.b, rows.h, rows.m] = result.to(out.dtype)
        lse[0, rows.b, rows.h, rows.m] = row_max
        lse[1, rows.b, rows.h, rows.m] = row_sum


def _online(
    rows: Rows, tiles: list[slice], row_max: Tensor, row_sum: Tensor, acc: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = rows.problem.v.dtype
    for n in tiles:
        tile = Tile(rows, n)
        new_max = torch.maximum(row_max, tile.x.amax(-1))
        base = new_max.masked_fill(new_max == -math.inf, 0.0)
        p = (tile.x - base[..., None]).exp_()
        rescale = (row_max - base).exp_()
        row_sum = row_sum * rescale + p.sum(-1)
        row_max = new_max
        w = tile.post(p)
        dropped = tile.dropout_scale()
        if dropped is not None:
            w = w * dropped
        acc = acc * rescale[..., None] + times(rounded(w, dtype), tile.v)
    return row_max, row_sum, acc


def _post_of_nan(rows: Rows) -> Tensor:
    """[b, h, m], whether post(NaN) is NaN for some key: only then is a row of NaN probabilities NaN."""
    found = torch.zeros(rows.q.shape[:3], dtype=torch.bool, device=rows.q.device)
    kept, rest = rows.keys()
    for n in kept + rest:
        tile = Tile(rows, n)
        found |= tile.post(torch.full_like(tile.s, math.nan)).isnan().any(-1)
    return found


# ----------------------------------------------------------------------------------------------------------- backward


def backward(
    problem: Problem, do: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, need: Sequence[bool]
) -> list[Tensor]:
    """Fills dq, dk, dv; returns the gradients of the captures with `need`, in their dtype."""
    program = problem.program
    q_dtype, v_dtype = problem.q.dtype, problem.v.dtype
    dk32, dv32 = (torch.zeros(x.shape, device=x.device) for x in (dk, dv))
    whole = problem.block.b == problem.B and problem.block.h == problem.H
    gradients = [CaptureGradient(problem, i, whole) if wanted else None for i, wanted in enumerate(need)]
    for rows in problem.rows():
        do_rows = do[rows.b, rows.h, rows.m].float()
        delta = (do_rows * out[rows.b, rows.h, rows.m].float()).sum(-1, keepdim=True)
        row_max, row_sum = (lse[i, rows.b, rows.h, rows.m][..., None] for i in (0, 1))
        dq_rows = torch.zeros_like(rows.q)
        kept, rest = rows.keys()
        tiles = kept + (rest if rest and rows.needs_rest(row_max) else [])
        if exact_delta(problem, need):
            delta = torch.zeros_like(delta)
            for n in tiles:
                p, _, _, dp = _weights(Tile(rows, n), do_rows, row_max, row_sum)
                delta += (p * dp).sum(-1, keepdim=True)
        for n in tiles:
            tile = Tile(rows, n)
            p, w, dw, dp = _weights(tile, do_rows, row_max, row_sum)
            dv32[rows.b, rows.h_v, n] += times_transposed(rounded(w, v_dtype), do_rows, tile.v.shape[1])
            post_names = {"p": p, "g": dw}
            score_names = {"s": tile.s, "g": p * (dp - delta)}
            memo = dict(tile.memo)
            if S in program.score_vjp:
                ds = rounded(tile.evaluate(program.score_vjp[S], score_names, memo), q_dtype)
                dq_rows += times(ds, tile.k)
                dk32[rows.b, rows.h_k, n] += times_transposed(ds, rows.q, tile.k.shape[1])
            for gradient in gradients:
                if gradient is not None:
                    for vjp, names, m in ((program.post_vjp, post_names, None), (program.score_vjp, score_names, memo)):
                        gradient.add(tile, vjp, names, m)
        dq[rows.b, rows.h, rows.m] = dq_rows.to(dq.dtype)
    dk.copy_(dk32)
    dv.copy_(dv32)
    return [g.result() for g in gradients if g is not None]


def exact_delta(problem: Problem, need: Sequence[bool]) -> bool:
    """Whether delta must be Σ_n p dp of the very p and dp that are used, not Σ_d do · out: then Σ_n dx is 0 to
    rounding, as in eager attention, instead of off by one error in a whole row, which adds up in the gradient of a
    captured tensor that is summed along rows and is all there is in rows of a single weight. Costs another pass; other
    gradients in half precision and in TF32 hide it in the rounding of the operands."""
    loads = [load for i, wanted in enumerate(need) if wanted for load in problem.program.loads_of(i)]
    rough = problem.q.dtype == torch.float32 and problem.v.dtype != torch.float32  # the output alone is rounded
    if rough or any("n" not in sc.names(*load.args) for load in loads):
        return True
    exact = torch.get_float32_matmul_precision() == "highest"
    return problem.v.dtype == torch.float32 and (exact or bool(loads))


def _weights(tile: Tile, do_rows: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(p, w, dw, dp) of a tile: probabilities, what multiplies the values, and their gradients."""
    program = tile.rows.problem.program
    p = (tile.x - row_max).exp_() / row_sum
    dropped = tile.dropout_scale()
    w, dw = tile.post(p), times(do_rows, tile.v.mT)
    if dropped is not None:
        w, dw = w * dropped, dw * dropped
    if program.post is None:
        return p, w, dw, dw
    dp = tile.evaluate(program.post_vjp[P], {"p": p, "g": dw}) if P in program.post_vjp else torch.zeros_like(p)
    return p, w, dw, dp


class CaptureGradient:
    """Gradient of one capture, summed tile by tile; `whole`: every tile holds all batches and heads."""

    def __init__(self, problem: Problem, index: int, whole: bool):
        self.capture = problem.captures[index]
        self.loads = problem.program.loads_of(index)
        # Where every element is written once the sum is complete in the tile and needs no float32 buffer.
        axes = plain_axes(self.loads[0]) if len(self.loads) == 1 else None
        once = whole and axes is not None and "m" in axes and "n" in axes
        one_program = not (
            self.loads and self.loads[0] in problem.program.score_vjp and self.loads[0] in problem.program.post_vjp
        )
        dtype = self.capture.dtype if once and one_program else torch.float32
        self.total = torch.zeros(self.capture.shape, dtype=dtype, device=self.capture.device)

    def result(self) -> Tensor:
        return self.total.to(self.capture.dtype)

    def add(self, tile: Tile, vjp: dict[Expr, Expr], names: dict[str, Tensor], memo: dict[Expr, Any] | None) -> None:
        for load in self.loads:
            if load in vjp:
                self._add(tile, load, tile.evaluate(vjp[load], names, memo))

    def _add(self, tile: Tile, load: Expr, gradient: Tensor) -> None:
        axes = plain_axes(load)
        if axes is not None:
            used = [a for a in axes if isinstance(a, str)]
            gradient = gradient.sum([i for i, a in enumerate("bhmn") if a not in used]) if len(used) < 4 else gradient
            order = [a for a in "bhmn" if a in used]
            gradient = gradient.permute([order.index(a) for a in used])
            at = {"b": tile.rows.b, "h": tile.rows.h, "m": tile.rows.m, "n": tile.n}
            # What lies outside the capture is an unselected branch. A slice clips itself; an integer would not.
            if all(a < size for a, size in zip(axes, self.capture.shape, strict=True) if isinstance(a, int)):
                place = self.total[tuple(at[a] if isinstance(a, str) else a for a in axes)]
                place += gradient[tuple(slice(0, size) for size in place.shape)]
            return
        shape = gradient.shape
        index = [sc.evaluate(i, tile.env, tile.rows.problem.captures) for i in load.args]
        device = gradient.device
        index = [i.long() if isinstance(i, Tensor) else torch.full((), i, device=device) for i in index]
        spanned = torch.broadcast_shapes((1, 1, 1, 1), *[i.shape for i in index])
        missing = [d for d in range(4) if spanned[d] == 1 and shape[d] > 1]
        gradient = gradient.sum(missing, keepdim=True) if missing else gradient
        inside = torch.ones((), dtype=torch.bool, device=gradient.device)
        for i, size in zip(index, self.capture.shape, strict=True):
            inside = inside & (i >= 0) & (i < size)
        if self.capture.numel():
            index = [i.clamp(0, size - 1) for i, size in zip(index, self.capture.shape, strict=True)]
            gradient = torch.where(inside, gradient, 0.0)
            self.total.index_put_(tuple(i.expand(gradient.shape) for i in index), gradient, accumulate=True)
