"""Tensors made from numbers and indices: arange, full, triangles."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.graph import argument, dtype_of, operation, tensor, value
from torchflash.passes.pointwise import compare
from torchflash.passes.reader import (
    HALVES,
    Indices,
    Reader,
    Unreadable,
    reads,
)
from torchflash.score import FALSE, Expr, build, const

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@reads("arange")
def _arange(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    start, step = (
        (args[0], args[2] if len(args) > 2 else kwargs.get("step", 1))
        if len(args) > 1
        else (kwargs.get("start", 0), kwargs.get("step", 1))
    )
    if dtype_of(node).is_floating_point:
        first, by = (r.operand(x, (), node) for x in (start, step))
        position = build("+", first, build("*", by, build("float", ix.to_expr(index[0]))))
        return r.cast(position, torch.float32, dtype_of(node)) if dtype_of(node) in HALVES else position
    low, stride = (ix.from_expr(r.operand(x, (), node)) for x in (start, step))
    if low is None or stride is None:
        raise Unreadable
    return r.cast(ix.to_expr(ix.sympy.expand(low + stride * index[0])), torch.int64, dtype_of(node))


@reads(
    "zeros",
    "zeros_like",
    "new_zeros",
    "zero",
    "ones",
    "ones_like",
    "new_ones",
    "full",
    "full_like",
    "new_full",
    "fill",
    "tensor",
    "scalar_tensor",
    "as_tensor",
)
def _full(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    name = operation(node)
    dtype = dtype_of(node)
    if name.removeprefix("new_").startswith("zero"):
        filler: Any = 0
    elif name.removeprefix("new_").startswith("one"):
        filler = 1
    elif name in ("tensor", "scalar_tensor", "as_tensor"):
        filler = args[0]
        if isinstance(filler, (list, tuple)) or ((t := tensor(filler)) is not None and t.dim()):
            raise Unreadable
    else:
        position = 2 if name == "new_full" else 1
        filler = argument(args, kwargs, position, "fill_value", "value")
    e = r.read(filler, (), node)
    t = tensor(filler)
    return r.cast(e, t.dtype if t is not None else type(value(filler)), dtype)


@reads("tril", "triu")
def _triangle(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    diagonal = r.read(argument(args, kwargs, 1, "diagonal", default=0), (), node)
    x = r.read(args[0], index, node)
    column, row = ix.to_expr(index[-1]), score.call("+", ix.to_expr(index[-2]), diagonal)
    inside = compare("<=" if operation(node) == "tril" else ">=", column, row)
    zero = FALSE if dtype_of(node) == torch.bool else const(0.0) if dtype_of(node).is_floating_point else const(0)
    return build("where", inside, x, zero)


@reads("eye")
def _eye(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return r.cast(compare("==", ix.to_expr(index[-2]), ix.to_expr(index[-1])), torch.bool, dtype_of(node))


@reads("outer", "ger")
def _outer(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if not dtype_of(node).is_floating_point:
        raise Unreadable
    x, y = (
        r.cast(r.read(t, (i,), node), dtype_of(t), torch.float32, keep_float=True)
        for t, i in ((args[0], index[0]), (args[1], index[1]))
    )
    return build("*", x, y)
