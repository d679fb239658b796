"""Tabulates what depends on the distance between key and query alone: M + N - 1 values instead of M * N.

    bias[h, bucket(n - m)]        table[h, j] = bias[h, bucket(j - (M - 1))]   computed in the graph
                             ->   t0[h, n - m + (M - 1)]                       in the kernel

The graph computes it with torch's own operations, so a bucket rounds as it does in eager, and the gradient of an
embedding behind it is autograd's. So it does for a `Projection`: rows times a table of few rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchflash.passes import index as ix
from torchflash.passes.index import Index
from torchflash.score import Expr


@dataclass(frozen=True)
class Table:
    """`expr` over `axes`, the last of which is the distance, counted from -(queries - 1)."""

    expr: Expr
    axes: tuple[Index, ...]

    def index(self, queries: Index, keys: Index) -> list[Expr]:
        """Where in the table the value for a query and a key is."""
        distance = ix.sympy.expand(keys - queries + ix.axis_size(queries) - 1)
        return [ix.to_expr(a) for a in self.axes[:-1]] + [ix.to_expr(distance)]


@dataclass(frozen=True)
class Projection:
    """Every row of `rows` (over its `dim`) contracted with every row of `table` (over its `table_dim`). `since`: the
    positions in the graph from which on the two hold what was read."""

    rows: Node
    dim: int
    table: Node
    table_dim: int
    since: tuple[int, int]

    def reads(self) -> tuple[tuple[Node, int], ...]:
        return (self.rows, self.since[0]), (self.table, self.since[1])


def tabulate(e: Expr, queries: Index, keys: Index) -> Table | None:
    """The table of `e`, or None when it depends on more than the distance between `queries` and `keys`."""
    shift = ix.axis_size(queries) - 1
    distance = ix.axis("j", ix.sympy.expand(ix.axis_size(keys) + shift))
    moved = ix.replace_axis(e, keys, ix.sympy.expand(queries + distance - shift))
    axes = ix.expr_axes(moved)
    if queries in axes or keys in axes or distance not in axes:
        return None
    others = sorted(axes - {distance}, key=str)
    return Table(moved, (*others, distance))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%":
    operator.mod, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor, "<=": operator.le,
    "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq, "!=": operator.ne, "neg": operator.neg,
    "~": operator.invert, "where": torch.where, "nan_to_num": torch.nan_to_num}  # fmt: skip


class Emission:
    """The algebra that writes an expression as nodes of the graph, one dim for each of `axes`."""

    def __init__(
        self,
        out: Any,
        axes: tuple[Index, ...],
        held: dict[str, tuple[Node, int]],
        size: Callable[[Index], Any],
        device: torch.device,
    ):
        self.out, self.axes, self.held, self.size, self.device = out, axes, held, size, device

    def const(self, v: Any) -> Any:
        return v

    def name(self, text: str) -> Any:
        symbol = ix.symbol(text)
        assert symbol is not None
        if symbol not in self.axes:
            return self.size(symbol)
        node = self.out.call(torch.arange, self.size(ix.axis_size(symbol)), device=self.device)
        shape = [1] * len(self.axes)
        shape[self.axes.index(symbol)] = -1
        return self.out.method("reshape", node, shape)

    def load(self, e: Expr, args: list[Any]) -> Any:
        node = self.held[e.value[1:]][0]
        t = node.meta[self.out.key]
        if not isinstance(t, torch.Tensor):
            return node
        if args:
            node = self.out.call(operator.getitem, node, tuple(args))
        wide = torch.float32 if t.dtype.is_floating_point else torch.bool if t.dtype == torch.bool else torch.int64
        return node if t.dtype == wide else self.out.method("to", node, wide)

    def call(self, op: str, e: Expr, args: list[Any]) -> Any:
        if op in _FUNCTIONS:
            return self.out.call(_FUNCTIONS[op], *args)
        casts = {"int": torch.int64, "float": torch.float32, "bool": torch.bool}
        if op in casts:
            return self.out.method("to", args[0], casts[op])
        if op == "int32":
            return self.out.method("to", self.out.method("to", args[0], torch.int32), torch.int64)
        if op in ("half", "bfloat16"):
            return self.out.method(
                "to", self.out.method("to", args[0], getattr(torch, "float16" if op == "half" else op)), torch.float32
            )
        if op in ("minimum", "maximum") and not all(isinstance(a, Node) for a in args):
            node, number = args if isinstance(args[0], Node) else args[::-1]
            return self.out.call(torch.clamp, node, *((None, number) if op == "minimum" else (number,)))
        return self.out.call(getattr(torch, op), *args)
