"""Rows that keep no key, as those of padding: all their N scores are one huge negative number, so softmax weighs every
key alike, and no tile of scores has to be computed for them. Such a row is *even*:

    out_m = v̄ = Σ_n v_n / N        dv_n += do_m / N        ds_mn = c / N · do_m (v_n - v̄)

with c the derivative of the score for s at what is masked: 0 where the mask fills in a number, that of the score where
it adds one. Summed over the even rows of a head, and over keys (moments.py):

    dv_n += Σ_m do_m / N        dk_n += c / N · (v_n - v̄) Σ_m do_mᵀ q_m        dq_m = c / N · do_m Σ_n (v_n - v̄)ᵀ k_n

`shape` says of which programs this holds; whether a row is even is found out on the device. The forward stores more
than N as the sum of such a row (`even_sum`), by an ulp, and so tells the backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels import generated, lower, moments
from torchflash.kernels.forms import Form, magnitude
from torchflash.kernels.launcher import cdiv
from torchflash.kernels.memory import empty
from torchflash.kernels.program import G, S
from torchflash.score import Expr

if TYPE_CHECKING:
    from torchflash.kernels.operands import Operands

LOW = -1e30  # adding a moderate score to this or less does not change it
MODERATE = 2.0**40
STEEP = 2.0**13  # D |c|: moments.MODERATE bounds q and k, and D |c| q k is to be lost in LOW
COUNTED = 1 << 24  # sums of as many ones are exact
SPAN = 512  # keys, at least, that one program sums
PARTS = 16


@dataclass(frozen=True)
class Shape:
    """What even rows of a program are made of."""

    slope: float  # of the score, at what is masked
    value: Expr | None  # what is added where nothing is kept, if that is data and has to be looked at

    @property
    def added(self) -> bool:
        return self.slope != 0.0


@functools.lru_cache(maxsize=4096)
def shape(form: Form) -> Shape | None:
    """None where a row without kept keys need not be even."""
    program = form.program
    keep, e = program.keep, program.score
    if keep is None or program.post is not None or not sc.loads(keep):
        return None
    if e.op == "where":
        return Shape(0.0, None) if _filled(e) is keep else None
    slope = _slope(program.score_vjp.get(S))
    if e.op != "+" or not slope:
        return None
    for mask, other in (e.args, e.args[::-1]):
        if not magnitude(other) <= MODERATE:
            continue
        if mask.op == "load" and sc.kind(mask, program.kind_map) == "f":
            low = sc.build("~", sc.build("<=", mask, sc.const(LOW)))
            return Shape(slope, mask) if keep is low else None
        if mask.op == "where" and _added(mask) is keep:
            return Shape(slope, None)
    return None


def _filled(e: Expr) -> Expr | None:
    """The condition under which `e` is not one and the same finite number, which it is everywhere else."""
    condition, a, b = e.args
    if a.op == "const" and (b.op != "const" or a.value < b.value):
        condition, a, b = sc.build("~", condition), b, a
    if b.op != "const" or not -math.inf < b.value < 0:
        return None
    inner = _filled(a) if a.op == "where" and b in a.args else None
    return condition if inner is None else sc.build("&", condition, inner)


def _added(e: Expr) -> Expr | None:
    """The condition under which where(…) is 0, if it is so low a number everywhere else that what it is added to is
    lost."""
    condition, a, b = e.args
    if a.op != "const" or b.op != "const":
        return None
    if a.value < b.value:
        condition, a, b = sc.build("~", condition), b, a
    return condition if a.value == 0 and -torch.finfo(torch.float32).max <= b.value <= LOW else None


def _slope(e: Expr | None) -> float:
    """c of a gradient c · g, else 0."""
    if e is None:
        return 0.0
    if e is G:
        return 1.0
    if e.op == "neg":
        return -_slope(e.args[0])
    if e.op == "*":
        for number, other in (e.args, e.args[::-1]):
            if number.op == "const":
                return float(number.value) * _slope(other)
    if e.op == "/" and e.args[1].op == "const" and e.args[1].value:
        return _slope(e.args[0]) / float(e.args[1].value)
    return 0.0


@functools.lru_cache(maxsize=4096)
def value_function(form: Form, value: Expr, ranks: tuple[int, ...]) -> Any:
    """What is added where nothing is kept, as a jitted function."""
    printer = lower.Printer(form.program.kind_map, ranks)
    text = sc.interpret(value, printer)
    return generated.function("masked", lower.INDICES, tuple(printer.lines), text)


# -------------------------------------------------------------------------------------------------------------- launch


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


__all__ = ["add_to_keys", "eligible", "flags", "of_backward", "of_forward", "shape"]
