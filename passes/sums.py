"""Products of queries and keys that the scores add, as one: content and positions, the parts of latent attention.

    2 * Σ_d q1[m, d] * k1[n, d] + Σ_e q2[m, e] * k2[n, e]    ->    2 * Σ_f q[m, f] * k[n, f]

with q = [q1, 0.5 * q2] and k = [k1, k2] side by side.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.contraction import Operand
from torchflash.passes.index import Index
from torchflash.passes.normal import terms
from torchflash.score import Expr, build, const, name

MAX_DEPTH = 256  # side by side; the scores of deeper ones are added as they are


@dataclass(frozen=True)
class Product:
    """`scale` * Σ over `depth` of q * k, with the `keys` end to end; without the scale it is what `nodes` compute."""

    q: Operand
    keys: tuple[Operand, ...]
    depth: tuple[Index, ...]
    scale: float
    nodes: tuple[Node, ...]


def summed(scores: Expr, main: Expr, depths: Mapping[Expr, tuple[Index, ...]]) -> tuple[Expr, dict[Expr, float]]:
    """`scores` with `s` for `main` or, if nothing else is done with them, for the sum of it and others of `depths`; and
    what of each is in `s`. `depths`: the products that may be put side by side, with the axes they sum."""
    parts = score.topological(scores)
    if len(depths) == 1 or len(parts) > 2 * score.MAX_NODES:
        parts = []
    for e in reversed(parts):
        if e.op not in ("+", "-"):
            continue
        summands = terms(e)
        found = {t: x for t in summands if (x := _scaled(t)) is not None and x[0] in depths}
        unit = next((unit for x, _, unit in found.values() if x is main), None)
        scaled = {t: (x, c * summands[t]) for t, (x, c, u) in found.items() if u == unit}
        scales = dict(scaled.values())
        if main not in scales or len(scales) == 1 or len(scales) != len(scaled) or _deep(scales, depths):
            continue
        largest = max(scales.values(), key=abs)  # queries are only made smaller: they do not overflow
        rebuilt = _times(largest, name("s"))
        for op, factor in unit or ():
            rebuilt = build(op, rebuilt, factor)
        for t, count in summands.items():
            if t not in scaled:
                rebuilt = build("+" if count > 0 else "-", rebuilt, _times(abs(count), t))
        whole = score.substitute(scores, {e: rebuilt}, build)
        if not scales.keys() & set(score.topological(whole)):
            return whole, {x: c / largest for x, c in scales.items()}
    return score.substitute(scores, {main: name("s")}, build), {main: 1.0}


def _deep(scales: Mapping[Expr, float], depths: Mapping[Expr, tuple[Index, ...]]) -> bool:
    sizes = (functools.reduce(operator.mul, map(ix.axis_size, depths[x]), ix.ONE) for x in scales)
    depth = ix.sympy.expand(sum(sizes, ix.ZERO))
    return bool(depth.is_number and depth > MAX_DEPTH)


def _times(scale: float, e: Expr) -> Expr:
    return e if scale == 1 else build("*", const(float(scale)), e)


def _scaled(e: Expr) -> tuple[Expr, float, tuple[tuple[str, Expr], ...]] | None:
    """(x, c, unit) when `e` is c * x for a contraction x and a number c, neither 0 nor infinite, times or over each
    factor of `unit`, which depends on nothing but sizes."""
    c, unit = 1.0, []
    while e.op in ("*", "/", "neg"):
        if e.op == "neg":
            c, e = -c, e.args[0]
            continue
        x, factor = e.args if e.op == "/" or _fixed(e.args[1]) else e.args[::-1]
        if factor.op == "const" and factor.value:
            c = c / factor.value if e.op == "/" else c * factor.value
        elif factor.op != "const" and _fixed(factor):
            unit.append((e.op, factor))
        else:
            return None
        e = x
    return (e, c, tuple(unit)) if e.op == "dot" and math.isfinite(c) and c else None


def _fixed(e: Expr) -> bool:
    return not ix.expr_axes(e) and not any(x.op in ("load", "dot", "reduce", "softmax") for x in score.topological(e))
