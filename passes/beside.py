"""Contractions that the scores add to queries · keys: relative positions, content against position.

Each is loaded from a tensor the graph computes. Where that tensor would have an element for each query and key, it is
made smaller or the block is left alone:

    q[b, h, m] · w[b, h, m, n]                given one by one: nothing is smaller, it is loaded
    q[b, h, m] · table[bucket(m, n)]          (q @ table.T)[b, h, m, bucket(m, n)]: one for each row of the table
    u[h] · k[b, h, n]                         one for each key: it is loaded
    q[b, h, m] · k[b, h, n]                   left alone
"""

from __future__ import annotations

from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.contraction import Contraction, Operand
from torchflash.passes.graph import tensor
from torchflash.passes.index import Index
from torchflash.passes.reader import Dot, Reader
from torchflash.passes.softmax import Failure
from torchflash.passes.table import Projection
from torchflash.passes.views import peel_steps
from torchflash.score import Expr


class Beside:
    """The contractions of one block beside that of `q` and `k`, whose keys are the axis `n`; `queries` are the axes
    that neither keys nor values have."""

    def __init__(self, r: Reader, q: Operand, k: Operand, queries: frozenset[Index], n: Index) -> None:
        self.r, self.n, self.queries = r, n, queries
        self.bases = self._bases(q) | self._bases(k)

    def _bases(self, *operands: Operand) -> set[Node]:
        return {peel_steps(self.r, o)[-1].node for o in operands}

    def load(self, e: Expr, c: Contraction | None) -> dict[Expr, Expr] | Failure:
        """What of the scores becomes which load, for the contraction `e`."""
        dot: Dot = e.value
        failure = Failure("several_contractions", f"the scores add another contraction ({dot.node.name})", dot.node)
        if c is None:
            return failure
        # the tensor may hold more than the product: baddbmm adds another to it
        whole = {self.r.read(dot.node, dot.index): self.r.load(dot.node, dot.index)}
        if not self._square(dot):
            return whole
        for rows, other in ((c.lhs, c.rhs), (c.rhs, c.lhs)):
            if self._paired(other):
                projected = self._project(c, rows, other)
                return whole if projected is None else {e: projected}
        return failure if self.bases & self._bases(c.lhs, c.rhs) else whole

    def _square(self, dot: Dot) -> bool:
        """Has an element for every query and key: neither gathered from fewer, nor for groups of keys, nor the same for
        all queries."""
        if not any(self.queries & ix.axes(i) for i in dot.index):
            return False
        size = ix.ONE
        for i, s in zip(dot.index, ix.shape_of(tensor(dot.node)), strict=True):  # type: ignore[arg-type]
            if self.n in ix.axes(i):
                if self.queries & ix.axes(i):
                    return False
                if not ix.axes(ix.sympy.expand(i - self.n)):
                    return True
                size *= s
        return ix.nonnegative(ix.sympy.expand(size - ix.axis_size(self.n)))

    def _paired(self, o: Operand) -> bool:
        axes = o.axes()
        return self.n in axes and bool(self.queries & axes)

    def _project(self, c: Contraction, rows: Operand, other: Operand) -> Expr | None:
        """A load from `rows` times the table that `other` is looked up in."""
        if len(c.summed) != 1 or rows.index.count(c.summed[0]) != 1:
            return None
        (d,) = c.summed
        e = self.r.read(other.node, other.index, other.user)
        summed = ix.to_expr(d)
        if e.op != "load" or list(e.args).count(summed) != 1 or len(e.args) != 2:
            return None
        at = e.args.index(summed)
        table, since = self.r.held[e.value[1:]]
        (row,) = (a for a in e.args if a is not summed)
        dtypes = {t.dtype for t in map(tensor, (table, rows.node, other.node)) if t is not None}
        if d in ix.expr_axes(row) or dtypes != {c.dtype} or ix.shape_of(tensor(table))[at] != ix.axis_size(d):  # type: ignore[arg-type]
            return None
        dim = rows.index.index(d)
        projection = Projection(rows.node, dim, table, at, (self.r.versions.order[rows.user], since))
        index = [ix.to_expr(i) for k, i in enumerate(rows.index) if k != dim]
        return score.load(self.r.project(projection), (*index, row))
