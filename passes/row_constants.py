"""What is the same for all keys of a row, the softmax does not see: the maximum everybody subtracts.

Its gradient is zero, but is one: a parameter that only such a term depends on has a gradient of zeros in eager mode,
not None, and the result depends on it. So a term that brings an input of its own stays.
"""

from __future__ import annotations

import math

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.graph import tensor
from torchflash.passes.reader import Reader
from torchflash.score import Expr, build, const


def strip_row_constants(r: Reader, e: Expr, n: ix.Index) -> Expr:
    """`e` without score-dependent terms that do not vary along `n`: softmax does not see them. What a mask fills in
    is at least as low as -1e30 where a term is dropped beside it, and stays what it is."""
    dropped: list[Expr] = []
    stripped = _strip(r, e, n, dropped, frozenset())
    rest = r.gradient_inputs(stripped) if dropped else 0
    own = frozenset(x for x in dropped if r.gradient_inputs(x) & ~rest)
    return _strip(r, e, n, [], own) if own else stripped


def _strip(r: Reader, e: Expr, n: ix.Index, dropped: list[Expr], kept: frozenset[Expr]) -> Expr:
    """Notes in `dropped` which terms are; those in `kept` are not."""

    def constant(x: Expr) -> bool:
        if not r.depends(x) or n in ix.expr_axes(x) or x in kept:
            return False
        dropped.append(x)
        return True

    match e.op:
        case "+" | "-":
            a, b = e.args
            if constant(b):
                return _strip(r, a, n, dropped, kept)
            if constant(a):
                rest = _strip(r, b, n, dropped, kept)
                return rest if e.op == "+" else build("neg", rest)
            return build(e.op, _strip(r, a, n, dropped, kept), _strip(r, b, n, dropped, kept))
        case "*" | "/" if any(x.op == "const" and x.value for x in e.args) and e.args[-1].op != e.args[0].op:
            factor, inner = sorted(e.args, key=lambda x: x.op != "const")
            stripped = _strip(r, inner, n, dropped, kept)
            if stripped is inner or (e.op == "/" and e.args[1] is not factor):
                return e
            scale = abs(1.0 / factor.value if e.op == "/" else factor.value)
            if scale > 1:
                # less the maximum a fill was finite after scaling: it must be so without
                if _adds_loads(r, stripped):
                    return e
                stripped = _bounded(stripped, _LARGEST / scale)
            return build(e.op, *(stripped if x is inner else x for x in e.args))
        case "where":
            c, a, b = e.args
            if _masked(b):
                return build("where", c, _strip(r, a, n, dropped, kept), b)
            if _masked(a):
                return build("where", c, a, _strip(r, b, n, dropped, kept))
    return e


_LARGEST = 3e38  # of float32, nearly


def _bounded(e: Expr, largest: float) -> Expr:
    """`e` with its finite fills at most `largest` in magnitude: they stay far below every score."""
    fills = [x for x in score.topological(e) if _masked(x) and -math.inf < x.value < -largest]
    return score.substitute(e, {x: const(-largest) for x in fills}, build) if fills else e


def _adds_loads(r: Reader, e: Expr) -> bool:
    """Whether a captured float, which may be a mask of huge numbers, is part of the value."""
    if e.op == "load":
        t = tensor(r.held[e.value[1:]][0])
        return t is None or t.dtype.is_floating_point
    if e.op in score.COMPARE or e.op in ("&", "|", "~", "dot", "reduce"):
        return False
    return any(_adds_loads(r, x) for x in (e.args[1:] if e.op == "where" else e.args))


def _masked(e: Expr) -> bool:
    return e.op == "const" and e.value <= -1e30
