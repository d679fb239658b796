"""Reads what a tensor of the graph holds at one symbolic index, as an expression of the score language.

`Reader.read(node, index)` walks up from `node` through everything that is elementwise, a view, or made from indices,
and stops at what it does not know: that becomes a *load* of the tensor at an index, which is always right. Three
kinds of leaves mark what depends on the scores, each holding the node and the index it is read at:

    Dot      a contraction of two tensors            (read further by `passes.contraction`)
    Reduce   a reduction of something score-like     (read further by `passes.softmax`)
    Softmax  a softmax in one call                   (likewise)

Operations are in `passes.leaves`, `pointwise`, `creation`, `views` and `lookups`, one small handler each.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.gradients import Gradients
from torchflash.passes.graph import dtype_of, operation, tensor, value
from torchflash.passes.index import Index
from torchflash.passes.mutation import Versions
from torchflash.passes.table import Projection
from torchflash.score import Expr, build

log = logging.getLogger(__name__)

Indices = tuple[Index, ...]
Handler = Callable[["Reader", Node, tuple[Any, ...], dict[str, Any], Indices], Expr]
HANDLERS: dict[str, Handler] = {}

SMALL_INTS = frozenset((torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64))
HALVES = {torch.float16: "half", torch.bfloat16: "bfloat16"}


class Unreadable(Exception):
    """This node cannot be read through; the reader loads it instead."""


@dataclass(frozen=True)
class Dot:
    """A contraction read at an index of its result."""

    node: Node
    index: Indices


@dataclass(frozen=True)
class Reduce:
    """`op` of `node` over the dims in `dims`; `index` has 0 in their place. `user` computes it, as others may."""

    op: str
    node: Node
    dims: tuple[int, ...]
    index: Indices
    user: Node = field(compare=False)


@dataclass(frozen=True)
class Softmax:
    """softmax of `node` over `dim`, read at `index`; `call` is the softmax itself."""

    node: Node
    dim: int
    index: Indices
    call: Node


def reads(*names: str) -> Callable[[Handler], Handler]:
    """Registers the handler of an operation under its canonical names."""

    def register(f: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, f))
        return f

    return register


class Reader:
    """Reads one graph, which may begin with `gradients` enabled. `origin` remembers at which (node, index) pairs an
    expression was found: it can be loaded from there.

    `held` tells for each loaded name which node it is, and since which position in the graph it holds what was read.
    """

    def __init__(self, graph: Graph, gradients: bool = True) -> None:
        self.versions = Versions(graph)
        self.gradients = Gradients(self.versions, graph, gradients)
        self.transformed = transformed(graph)
        self.held: dict[str, tuple[Node, int]] = {}
        self.projections: dict[str, Projection] = {}
        self.origin: dict[Expr, list[tuple[Node, Indices]]] = {}
        self._memo: dict[tuple[Node, Indices], Expr] = {}
        self._dependent: dict[Expr, bool] = {}
        self._reaches: dict[Expr, float] = {}

    def arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `node`, each tensor in the version it has there; the first one is always positional."""
        args, kwargs = self.versions.arguments(node)
        if not args:
            first = next((k for k in ("condition", "input", "self", "tensors", "tensor") if k in kwargs), None)
            if first is not None:
                return (kwargs[first],), {k: v for k, v in kwargs.items() if k != first}
        return args, kwargs

    def read(self, x: Any, index: Indices, user: Node | None = None) -> Expr:
        """The value at `index` of an argument of `user`: a node, or a number."""
        if not isinstance(x, Node):
            return self.number(x)
        if tensor(x) is None:
            return self.scalar(x)
        if user is not None and self.versions.stale(x, user):
            return self.load(x, index, self.versions.order[user])
        key = (x, index)
        if key in self._memo:
            return self._memo[key]
        e = self._read(x, index)
        self._memo[key] = e
        if e.args and not self.depends(e) and not batched(x):
            self.origin.setdefault(e, []).append(key)
        return e

    def _read(self, x: Node, index: Indices) -> Expr:
        handler = HANDLERS.get(operation(x))
        if handler is None:
            return self.load(x, index)
        args, kwargs = self.arguments(x)
        try:
            e = handler(self, x, args, kwargs, index)
        except (Unreadable, ix.NotInteger):
            return self.load(x, index)
        except Exception as error:  # a load is always right
            log.debug("torchflash: %s could not be read: %r", x.name, error)
            return self.load(x, index)
        if x in self.gradients.cuts:
            # no gradient may flow back through it; what is constant along a row cancels all the same
            return Expr("detach", (e,)) if self.depends(e) else self.load(x, index)
        return e

    def load(self, x: Node, index: Indices, since: int | None = None) -> Expr:
        """The tensor itself, at an index; `since` when it has been written before it was read there."""
        if batched(x):
            raise Unreadable  # has an axis that only exists inside vmap
        if x.target is operator.setitem:  # has no value of its own: the tensor holds it from there on
            return self.load(x.args[0], index, self.versions.order[x])  # type: ignore[arg-type]
        text = x.name if since is None else f"{x.name}@{since}"
        self.held[text] = x, self.versions.order[x] if since is None else since
        return score.load(f"%{text}", [ix.to_expr(i) for i in index])

    def project(self, projection: Projection) -> str:
        """The name by which `projection` is loaded."""
        known = next((text for text, p in self.projections.items() if p == projection), None)
        text = known or f"projection{len(self.projections)}"
        self.projections[text] = projection
        return f"%{text}"

    def number(self, x: Any) -> Expr:
        if isinstance(x, (bool, int, float)):
            return score.const(x)
        if isinstance(x, torch.SymInt):
            return ix.to_expr(ix.size_of(x))
        raise Unreadable

    def scalar(self, x: Node) -> Expr:
        """A number the graph computes (sizes, and floats made from them)."""
        v = value(x)
        if isinstance(v, (bool, int, float)):
            return score.const(v)
        if isinstance(v, torch.SymInt):
            return ix.to_expr(ix.size_of(v))
        if not isinstance(v, torch.SymFloat):
            raise Unreadable
        args, _ = self.arguments(x)
        text = getattr(x.target, "__name__", str(x.target))
        known = {"truediv": "/", "mul": "*", "add": "+", "sub": "-", "pow": "**"}
        if text in known:
            a, b = (self._float_scalar(a) for a in args)
            return build(known[text], a, b)
        if text == "neg":
            return build("neg", self._float_scalar(args[0]))
        if text in ("_sym_sqrt", "sym_sqrt", "sqrt"):
            return build("sqrt", self._float_scalar(args[0]))
        if text in ("sym_float", "float"):
            return self._float_scalar(args[0])
        if text == "item":  # a Python float that may change from call to call: captured as a 0-d tensor
            return self.load(x, ())
        return score.const(float(v))  # specialises, with a guard

    def _float_scalar(self, x: Any) -> Expr:
        return build("float", self.read(x, ()) if isinstance(x, Node) else self.number(x))

    def depends(self, e: Expr) -> bool:
        """Whether an expression depends on scores (has one of the three leaves)."""
        if e not in self._dependent:
            for x in score.topological(e):
                if x not in self._dependent:
                    self._dependent[x] = x.op in ("dot", "reduce", "softmax") or any(self._dependent[a] for a in x.args)
        return self._dependent[e]

    def with_loads(self, e: Expr, loads: Mapping[Expr, Expr]) -> Expr:
        """`e` with loads in the place of contractions beside the scores; what was computed from these can be loaded
        itself from then on."""
        inside = set(score.topological(e))
        for key, x in self._memo.items():
            if x in inside and x not in loads and self.depends(x):
                loaded = score.substitute(x, loads, build)
                if not self.depends(loaded) and not batched(key[0]):
                    self.origin.setdefault(loaded, []).append(key)
        return score.substitute(e, loads, build)

    def gradient_inputs(self, e: Expr) -> int:
        """The inputs of the graph that `e` is differentiable with respect to, as bits of a number."""
        found = 0
        for x in score.topological(e):
            held = self.held.get(x.value[1:]) if x.op == "load" else None
            node = held[0] if held is not None else x.value.node if x.op in ("dot", "reduce", "softmax") else None
            found |= self.gradients.inputs.get(node, 0) if node is not None else 0
        return found

    # ---------------------------------------------------------------------------------------------- operands, casts

    def operand(self, x: Any, index: Indices, node: Node, as_float: bool | None = None) -> Expr:
        """An operand of the elementwise `node` at `index` of its result, as a number: bools count as 0 and 1."""
        result = tensor(node)
        if as_float is None:
            as_float = result is not None and result.dtype.is_floating_point
        t = tensor(x)
        e = self.read(x, ix.broadcast(ix.shape_of(t), index) if t is not None else (), node)
        return self.cast(
            e, t.dtype if t is not None else type(value(x)), torch.float32 if as_float else torch.int64, keep_float=True
        )

    def operand_at(self, o: Any, node: Node) -> Expr:
        """An operand of the floating-point `node` at an index of its own (a `passes.contraction.Operand`)."""
        t = tensor(o.node)
        assert t is not None
        return self.cast(self.read(o.node, o.index, node), t.dtype, torch.float32, keep_float=True)

    def cast(self, e: Expr, source: Any, target: torch.dtype, keep_float: bool = False) -> Expr:
        """`e` of dtype (or Python type) `source` converted to `target`. Rounding to a half type is kept, except where
        the value depends on the scores: those stay in float32, which is more accurate than what eager does."""
        if target.is_complex:
            raise Unreadable
        floating = (
            source is float
            or source is torch.SymFloat
            or (isinstance(source, torch.dtype) and source.is_floating_point)
        )
        boolean = source in (bool, torch.bool)
        if keep_float and floating:
            return e
        if target == torch.bool:
            return e if boolean else build("!=", e, score.const(0.0 if floating else 0))
        if target.is_floating_point:
            if boolean:
                e = build("where", e, score.const(1.0), score.const(0.0))
            elif not floating:
                e = build("float", e)
            if target in HALVES and source != target and not self.depends(e):
                e = build(HALVES[target], e)
            return e
        if boolean:
            return build("where", e, score.const(1), score.const(0))
        if floating:
            e = build("int", e)
        elif target == torch.int32 and source != target:
            e = self.in_32_bits(e)
        if target in SMALL_INTS and source != target and not _small(e):
            raise Unreadable  # may wrap around
        return e

    def integer(self, e: Expr, node: Node) -> Expr:
        """`e`, computed from the integers that `node` is computed from, as the dtype of `node` holds it."""
        dtype = dtype_of(node)
        if dtype in SMALL_INTS:
            raise Unreadable  # wraps around
        return self.in_32_bits(e) if dtype == torch.int32 else e

    def in_32_bits(self, e: Expr) -> Expr:
        return e if self._reach(e) < 2**31 else build("int32", e)

    def _reach(self, e: Expr) -> float:
        """What the magnitude of an integer does not exceed. Symbolic sizes are taken for less than 2**20."""
        for x in score.topological(e):
            if x not in self._reaches:
                args = [self._reaches[a] for a in x.args]
                self._reaches[x] = self._reach_of(x, args)
        return self._reaches[e]

    def _reach_of(self, e: Expr, args: list[float]) -> float:
        match e.op:
            case "const":
                return abs(float(e.value))
            case "name":
                i = ix.symbol(e.value)
                size = ix.axis_size(i) if i is not None and ix.is_axis(i) else None
                return float(size) if size is not None and size.is_number else float(1 << 20)
            case "load":
                held = self.held.get(e.value[1:])
                t = None if held is None else tensor(held[0])
                if t is None or t.dtype.is_floating_point:
                    return math.inf
                return 1.0 if t.dtype == torch.bool else float(-torch.iinfo(t.dtype).min or torch.iinfo(t.dtype).max)
            case "int" | "int32":  # of a float: torch leaves open what becomes of larger ones
                return min(args[0], float(1 << 31))
            case "+" | "-":
                return sum(args)
            case "*":
                return math.prod(args)
            case "//" | "neg" | "abs":
                return args[0]
            case "%":
                return args[1]
            case "where" | "minimum" | "maximum":
                return max(args[-2:])
        return 1.0 if score.is_bool(e) else math.inf


def batched(x: Node) -> bool:
    """Whether a node's tensor is one lane of torch.func.vmap."""
    t = tensor(x)
    return t is not None and torch._C._functorch.is_batchedtensor(t)


def transformed(graph: Graph) -> frozenset[Node]:
    """The nodes that run inside a transform of torch.func (vmap, grad, jvp …), on its wrapped tensors."""
    depth, found = 0, set()
    for node in graph.nodes:
        text = getattr(node.target, "__name__", "")
        depth += text.endswith("_increment_nesting") - text.endswith("_decrement_nesting")
        if depth > 0:
            found.add(node)
    return frozenset(found)


def _small(e: Expr) -> bool:
    """Fits any integer type: a number from 0 to 127, or a choice of such."""
    if e.op == "where":
        return all(map(_small, e.args[1:]))
    return e.op == "const" and 0 <= e.value <= 127


def positive_dim(dim: Any, rank: int) -> int:
    """A dim counted from the front; Unreadable when it is not a plain number."""
    if not isinstance(dim, int):
        raise Unreadable
    return dim % max(rank, 1)
