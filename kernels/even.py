"""Rows that keep no key, as those of padding: all their N scores are one huge negative number, so softmax weighs every
key alike, and no tile of scores has to be computed for them. Such a row is *even*:

    out_m = v̄ = Σ_n v_n / N        dv_n += do_m / N        ds_mn = c / N · do_m (v_n - v̄)

with c the derivative of the score for s at what is masked: 0 where the mask fills in a number, that of the score where
it adds one. Summed over the even rows of a head, and over keys (moments.py):

    dv_n += Σ_m do_m / N        dk_n += c / N · (v_n - v̄) Σ_m do_mᵀ q_m        dq_m = c / N · do_m Σ_n (v_n - v̄)ᵀ k_n

evenness.py says of which programs this holds; whether a row is even is found out on the device. The forward stores more
than N as the sum of such a row (`even_sum`), by an ulp, and so tells the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchflash.kernels import moments
from torchflash.kernels.evenness import Shape, shape
from torchflash.kernels.launcher import cdiv
from torchflash.kernels.memory import empty

if TYPE_CHECKING:
    from torchflash.kernels.operands import Operands

STEEP = 2.0**13  # D |c|: moments.MODERATE bounds q and k, and D |c| q k is to be lost in evenness.LOW
COUNTED = 1 << 24  # sums of as many ones are exact
SPAN = 512  # keys, at least, that one program sums
PARTS = 16


def eligible(o: Operands, need: Sequence[bool] = ()) -> Shape | None:
    """The shape of even rows, if they are to be told from others: by the backward only if no gradient of a captured
    tensor comes from them."""
    p, setup = o.problem, o.setup
    alike = setup.maps is not None and not p.dropout_p and p.N < COUNTED and not p.program.rows
    found = shape(setup.form) if alike else None
    if found is None or not found.added:
        return found
    taken = any(wanted and p.program.loads_of(i) for i, wanted in enumerate(need))
    apart = bool(need) and p.q.dtype != p.v.dtype
    return None if taken or apart or setup.D * abs(found.slope) > STEEP else found


def mark(o: Operands) -> None:
    """Lets the next tile map of `o` say which rows are not even."""
    o.even = eligible(o)


def parts(N: int) -> tuple[int, int]:
    """(how many keys a program sums, how many programs)."""
    span = max(SPAN, cdiv(cdiv(N, PARTS), 128) * 128)
    return span, cdiv(N, span)


NOTHING: dict[str, Any] = dict.fromkeys(("UNEVEN", "SUMS", "MODERATE"))


def of_forward(o: Operands) -> dict[str, Any]:
    """Arguments of the forward kernel, after its tile map has been made: the rows that are not even, and sums of the
    values."""
    marks = o.uneven
    if marks is None:
        return NOTHING
    p = o.problem
    found = eligible(o)
    added = found is not None and found.added
    heads, heads_k = p.H // p.group_v, p.H // p.group_k if added else 0
    span, count = parts(p.N)
    sums = empty(p.v, (p.B, heads, count, p.v.shape[-1]), torch.float32)
    moderate = empty(p.v, (p.B, heads_k, count), torch.int32) if added else None

    def others() -> dict[str, Any]:
        dims = {"D": o.setup.D, "DV": o.setup.DV, "BLOCK_D": 64, "BLOCK_N": 128, "WIDTH": 1024}
        return {
            **{f"k_{axis}": step for axis, step in zip("bhnd", p.k.stride(), strict=True)},
            **{f"v_{axis}": step for axis, step in zip("bhnd", p.v.stride(), strict=True)},
            "HEADS": heads, "HEADS_K": heads_k, "marks": marks.numel() // marks.shape[0], "batches": marks.shape[0],
            "N": p.N, "span": span, "parts": count, **dims,
        }  # fmt: skip

    grid = p.B * (heads + heads_k) * count
    changing = {"K": p.k, "V": p.v, "UNEVEN": marks, "SUMS": sums, "MODERATE_K": moderate}
    o.setup.start(moments.value_sums, marks.shape, grid, changing, others)
    return {"UNEVEN": marks, "SUMS": sums, "MODERATE": moderate}


def flags(o: Operands, length: int, need: Sequence[bool]) -> Tensor | None:
    """[B H, length] int8, for the backward to say which rows are even; None where it does not ask."""
    if eligible(o, need) is None:
        return None
    return empty(o.problem.q, (o.problem.B * o.problem.H, length), torch.int8)


@dataclass(frozen=True)
class Moments:
    """What even rows add to gradients: of each query head, but `keys` and `mean` of each pair of a head of k and one of
    v."""

    even: Tensor | None = None  # [B H, length]
    some: Tensor | None = None  # [B H], whether there are any
    rows: Tensor | None = None  # [B H, DV], Σ_m do_m / N
    queries: Tensor | None = None  # [B H, DV, D], c / N Σ_m do_mᵀ q_m
    keys: Tensor | None = None  # [B pairs, DV, D], c / N Σ_n (v_n - v̄)ᵀ k_n
    mean: Tensor | None = None  # [B pairs, DV], v̄
    group: int = 1  # query heads of a pair

    @property
    def kind(self) -> tuple[bool, bool]:
        """What kernels are compiled for."""
        return self.even is None, self.keys is None

    def of_rows(self) -> dict[str, Any]:
        return {"EVEN": self.even, "KEYS": self.keys}

    def of_columns(self) -> dict[str, Any]:
        return {"SUM": self.rows}


def of_backward(o: Operands, do: Tensor, even: Tensor | None, need: Sequence[bool], dq: Tensor) -> Moments:
    """Some of it in the memory of `dq`, until that is written."""
    found = eligible(o, need)
    if even is None or found is None:
        return Moments()
    p, setup = o.problem, o.setup
    D, DV, lines = setup.D, setup.DV, p.B * p.H
    group = math.gcd(p.group_k, p.group_v)
    pairs = lines // group if found.added else 0
    some = empty(do, (lines,), torch.int32)
    rows = empty(do, (lines, DV), torch.float32)
    queries = keys = mean = None
    if found.added:
        queries, keys = _within(dq, (lines, DV, D)), empty(do, (pairs, DV, D), dq.dtype)
        mean = empty(do, (pairs, DV), torch.float32)
    slices_v, slices = cdiv(DV, 64), cdiv(D, 64) if found.added else 1

    def others() -> dict[str, Any]:
        of = {"q": p.q, "g": do, "k": p.k, "v": p.v}
        steps = {f"{x}_{a}": s for x, t in of.items() for a, s in zip("bhrd", t.stride(), strict=True)}
        return {
            **steps, "H": p.H, "GROUP": group, "GROUP_K": p.group_k, "GROUP_V": p.group_v, "M": p.M, "N": p.N,
            "lines": lines, "length": even.shape[1], "weight": 1.0 / p.N,
            "weight_s": found.slope / (setup.form.factor * p.N),  # the kernels multiply by the factor
            "D": D, "DV": DV, "PRECISION": setup.common["PRECISION"], "BLOCK": 64,
            "ROWS": 128 if setup.itemsize < 4 else 64, "WIDTH": 4096,
            "num_warps": 4, "num_stages": 3 if setup.itemsize < 4 else 2,
        }  # fmt: skip

    grid = (lines + pairs) * slices_v * slices
    changing = {
        "Q": p.q, "K": p.k, "V": p.v, "DO": do, "EVEN": even, "SOME": some, "SUM": rows, "QUERIES": queries,
        "KEYS": keys, "MEAN": mean,
    }  # fmt: skip
    setup.start(moments.even_moments, (do.stride(), do.data_ptr() % 16, do.dtype), grid, changing, others)
    return Moments(even, some, rows, queries, keys, mean, group)


def _within(x: Tensor, size: tuple[int, int, int]) -> Tensor:
    """Contiguous, in the memory of `x`, which is dense; or elsewhere, where it does not fit."""
    if x.numel() < math.prod(size):
        return empty(x, size, x.dtype)
    return x.as_strided(size, (size[1] * size[2], size[2], 1))


def add_to_keys(o: Operands, moments_: Moments, dk: Tensor) -> None:
    """Adds to dk what even rows add, which is a product of matrices: in the kernel of dK it would cost registers."""
    if moments_.queries is None:
        return
    p, setup = o.problem, o.setup
    blocks = {"BLOCK_N": 64, "BLOCK_D": 128 if setup.D > 64 and setup.itemsize < 4 else 64}

    def others() -> dict[str, Any]:
        of = {"dk": dk, "v": p.v}
        steps = {f"{x}_{a}": s for x, t in of.items() for a, s in zip("bhnd", t.stride(), strict=True)}
        return {
            **steps, "H": p.H, "HEADS": p.group_k, "GROUP": moments_.group, "GROUP_V": p.group_v, "N": p.N,
            "factor": setup.form.factor, "D": setup.D, "DV": setup.DV, "PRECISION": setup.common["PRECISION"],
            **blocks, "num_warps": 4,
        }  # fmt: skip

    grid = p.B * (p.H // p.group_k) * cdiv(p.N, blocks["BLOCK_N"]) * cdiv(setup.D, blocks["BLOCK_D"])
    changing = {"DK": dk, "V": p.v, "SOME": moments_.some, "QUERIES": moments_.queries, "MEAN": moments_.mean}
    setup.start(moments.even_keys, (dk.stride(), dk.data_ptr() % 16), grid, changing, others)


__all__ = ["add_to_keys", "eligible", "flags", "of_backward", "of_forward"]
