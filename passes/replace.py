"""Puts the operator in the place of a proven block, after checking that it gives what the block gave.

    s = q @ k.transpose(-2, -1)                    q' = q, k' = k, v' = v viewed as [B, H, M, D]
    p = softmax(s * 0.125, -1)             ->      o  = torchflash.attention(q', k', v', …)[0]
    o = p @ v

Every node is emitted with its fake value. When the result differs from the root's in shape, dtype or stride, the
emitted nodes are erased and the block is skipped. A layout in memory other than the root's is used only where nobody
can see it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchflash import score
from torchflash.kernels import program as kernel_programs
from torchflash.kernels.mask import QUERIES, expanded_dims, request, wanted_on
from torchflash.passes import index as ix
from torchflash.passes.attention import Attention, Given, Operand
from torchflash.passes.graph import operation, tensor, value
from torchflash.passes.index import Index
from torchflash.passes.program import Programs
from torchflash.passes.reader import Reader
from torchflash.passes.softmax import Failure
from torchflash.passes.table import Emission, Projection, Table


@dataclass
class Emitted:
    """What earlier replacements in the graph have emitted: the nodes in the place of roots, and tables, those under
    no_grad apart. `autocast`: whether one may be active."""

    autocast: bool = False
    results: dict[Node, Node] = field(default_factory=dict)
    tables: dict[tuple[Table | Projection, bool], Node] = field(default_factory=dict)
    maps: dict[Any, tuple[Node, Node]] = field(default_factory=dict)  # of tiles, and the root before which each stands

    def current(self, node: Node) -> Node:
        """The node that has the value of `node` now: an item assignment has none of its own."""
        while node.target is operator.setitem:
            node = node.args[0]  # type: ignore[assignment]
        return self.results.get(node, node)


class Emitter:
    """Adds nodes before `at`, each with the fake value it has; `undo` takes them all away again. A root that has been
    replaced already stands for what replaced it."""

    def __init__(self, graph: Graph, at: Node, emitted: Emitted) -> None:
        self.graph, self.at, self.emitted = graph, at, emitted
        self.nodes: list[Node] = []
        result = tensor(at)
        assert result is not None
        self.key = "example_value" if "example_value" in at.meta else "val"
        self.mode = result.fake_mode if isinstance(result, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)

    def call(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._emit("call_function", f, args, kwargs, f)

    def method(self, name: str, *args: Any) -> Node:
        return self._emit("call_method", name, args, {}, getattr(torch.Tensor, name))

    def _emit(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], f: Callable[..., Any]) -> Node:
        args = map_arg(args, self.emitted.current)
        with self.graph.inserting_before(self.at):
            node = self.graph.create_node(op, target, args, kwargs)
        self.nodes.append(node)
        # without a graph of its own: the user's hooks on saved tensors (checkpointing) must not see this
        with self.mode, enable_python_dispatcher(), torch.no_grad():
            fake = f(*map_arg(args, value), **kwargs)
        result = fake[0] if isinstance(fake, tuple) else fake
        if isinstance(result, torch.Tensor) and result.dtype.is_floating_point and torch.is_grad_enabled():
            inputs = torch.utils._pytree.tree_leaves([value(a) for a in node.all_input_nodes])
            needs = any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs)
            result.requires_grad_(needs and target != "detach")
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.at.meta:
                node.meta[key] = self.at.meta[key]
        node.meta[self.key] = fake
        return node

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """What is emitted inside is computed in the dtype of its operands."""
        if not self.emitted.autocast:
            yield
            return
        device = tensor(self.at).device.type  # type: ignore[union-attr]
        with self.graph.inserting_before(self.at):
            entered = self.graph.call_function(autocast_mode._enter_autocast, (device, None, False, None))
        self.nodes.append(entered)
        yield
        with self.graph.inserting_before(self.at):
            self.nodes.append(self.graph.call_function(autocast_mode._exit_autocast, (entered,)))

    def undo(self) -> None:
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()


def replace(
    r: Reader,
    graph: Graph,
    parts: Sequence[tuple[Attention, Programs]],
    given: Sequence[Given],
    layout: str,
    tuning: str,
    emitted: Emitted,
) -> list[Node] | Failure:
    """Emits before their root the operators of the blocks it is the sum of, to be run as `tuning` says, the views
    around them, and what is added to them.

    Returns the operators' nodes and notes in `emitted` which node has the root's value. The root itself stays until the
    caller redirects its users."""
    root = parts[0][0].root
    out = Emitter(graph, root, emitted)
    shared = Emitted(emitted.autocast, tables=dict(emitted.tables), maps=dict(emitted.maps))
    try:
        # Of a mixture the parts may be far larger than their sum, which float32 leaves room for.
        mixed = torch.float32 if len(parts) + len(given) > 1 else None
        both = [_emit(out, r, block, programs, layout, tuning, shared, mixed) for block, programs in parts]
        terms = [*(result for _, result in both), *(_given(out, r, g, layout) for g in given)]
        node = functools.reduce(lambda a, b: out.call(operator.add, a, b), terms)
        if mixed is not None and tensor(node).dtype != tensor(root).dtype:  # type: ignore[union-attr]
            node = out.method("to", node, tensor(root).dtype)  # type: ignore[union-attr]
    except Exception as e:  # a replacement that cannot be built leaves the graph alone
        out.undo()
        reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        return Failure("mismatch", f"the replacement could not be built: {reason}", root)
    expected, got = tensor(root), tensor(node)
    assert expected is not None and got is not None
    for what, a, b in (
        ("shape", tuple(expected.shape), tuple(got.shape)),
        ("dtype", expected.dtype, got.dtype),
        ("device", expected.device, got.device),
        ("strides", tuple(expected.stride()), tuple(got.stride())),
    ):
        if not _same(a, b) and not (what == "strides" and (same_strides(expected, got) or strides_unseen(root))):
            out.undo()
            return Failure("mismatch", f"the replacement has {what} {b}, the block {a}", root)
    emitted.tables, emitted.maps = shared.tables, shared.maps
    emitted.results[root] = node
    return [call for call, _ in both]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)  # of symbolic sizes: with a guard


def _emit(
    out: Emitter,
    r: Reader,
    block: Attention,
    programs: Programs,
    layout: str,
    tuning: str,
    shared: Emitted,
    dtype: torch.dtype | None,
) -> tuple[Node, Node]:
    """The operator, and its result in place of the block's; in `dtype`, if one is given."""
    roles = block.roles
    qk_dtype, v_dtype = dtype or block.qk_dtype, dtype or block.v_dtype
    q, k = _queries(out, block, qk_dtype), _keys(out, block, qk_dtype)
    v = _rows(out, block.values, block, roles.columns, v_dtype)
    rows, keys = ("", None) if programs.rows is None else (str(programs.rows), _size(out, ix.axis_size(roles.keys)))
    if not programs.differentiates_scores:  # no gradient reaches the queries and keys, and none is written for them
        q, k = (out.method("detach", x) for x in (q, k))
    device = tensor(block.root).device  # type: ignore[union-attr]
    captures = []
    for c in programs.captures:
        if isinstance(c, (Table, Projection)):
            known = c, block.root in r.gradients.without
            if known not in shared.tables:
                shared.tables[known] = _table(out, r, c, device) if isinstance(c, Table) else _projection(out, c)
            captures.append(shared.tables[known])
        else:
            captures.append(_capture(out, _kept(out, r, c, block), device))
    sizes = [_size(out, s) for s in programs.sizes]
    seed = None
    if block.dropout_p:
        seed = out.call(torch.randint, 0, 2**62, (1,), dtype=torch.int64, device=device)
    keep = "" if programs.keep is None else str(programs.keep)
    texts = (str(programs.score), keep, programs.fill, str(programs.post))
    exact = max(qk_dtype.itemsize, v_dtype.itemsize) >= 4
    map_ = _tile_map(out, r, block, programs, texts, exact, captures, sizes, shared) if wanted_on(device) else []
    both = out.call(
        torch.ops.torchflash.attention.default,
        q, k, v, captures, sizes, *texts, block.dropout_p, seed, layout, rows, keys, tuning, map_,
    )  # fmt: skip
    node = out.call(operator.getitem, both, 0)
    if r.versions.written_between(block.root, r.versions.order[block.root], len(r.versions.order)):
        node = out.method("clone", node)  # the operator keeps its result for the backward, the contraction did not
    return both, _result(out, node, block, layout, dtype)


def _tile_map(
    out: Emitter,
    r: Reader,
    block: Attention,
    programs: Programs,
    texts: tuple[str, str, float, str],
    exact: bool,
    captures: Sequence[Node],
    sizes: Sequence[Any],
    shared: Emitted,
) -> list[Node]:
    """The nodes of the tile map of a mask that is made of data: those of an earlier block with the same mask, if what
    it is made of has not been written in between."""
    tensors = [tensor(c) for c in captures]
    if any(type(t) is not FakeTensor for t in tensors):
        return []
    program = kernel_programs.read(*texts, kernel_programs.kinds_of(tensors))  # type: ignore[arg-type]
    roles = block.roles
    queries = functools.reduce(operator.mul, map(ix.axis_size, roles.queries), ix.ONE)
    few = bool(queries.is_Integer and queries <= QUERIES)
    wanted = request(program, exact, expanded_dims(tensors), few)  # type: ignore[arg-type]
    if wanted is None:
        return []
    groups = (roles.batch if "b" in wanted.axes else (), roles.heads if "h" in wanted.axes else (), roles.queries)
    shape = [functools.reduce(operator.mul, map(ix.axis_size, g), ix.ONE) for g in (*groups, (roles.keys,))]
    sources = [programs.captures[i] for i in wanted.captures]
    key = (*wanted[3:], *shape, *sources, *(programs.sizes[i] for i in wanted.sizes))
    order = r.versions.order
    node, first = shared.maps.get(key, (None, block.root))
    between = order[first], order[block.root]
    if node is None or any(not isinstance(c, Node) or r.versions.written_between(c, *between) for c in sources):
        node = out.call(
            torch.ops.torchflash.tile_map.default,
            [captures[i] for i in wanted.captures], [sizes[i] for i in wanted.sizes], _shape_argument(out, shape),
            *wanted[3:],
        )  # fmt: skip
        shared.maps[key] = node, block.root
    return [out.call(operator.getitem, node, i) for i in range(len(value(node)))]


def _given(out: Emitter, r: Reader, g: Given, layout: str) -> Node:
    block, roles = g.beside, g.beside.roles
    p = _operand(out, g.weights, (roles.batch, roles.heads, roles.queries, (roles.keys,)), torch.float32, expand=True)
    v = _rows(out, block.values, block, roles.columns, torch.float32, expand=True)
    axes = (*roles.batch, *roles.heads, *roles.queries, roles.keys)
    device = tensor(block.root).device  # type: ignore[union-attr]
    factor = score.interpret(g.factor, Emission(out, axes, r.held, lambda size: _size(out, size), device))
    weights = out.method("to", out.call(operator.mul, p, factor), torch.float32)
    return _result(out, out.call(torch.matmul, weights, v), block, layout, torch.float32)


def _table(out: Emitter, r: Reader, table: Table, device: torch.device) -> Node:
    emission = Emission(out, table.axes, r.held, lambda size: _size(out, size), device)
    node = score.interpret(table.expr, emission)
    return out.method(
        "contiguous", out.method("expand", node, _shape_argument(out, [ix.axis_size(a) for a in table.axes]))
    )


def _projection(out: Emitter, p: Projection) -> Node:
    rows = tensor(p.rows)
    assert rows is not None
    x = p.rows if p.dim == rows.dim() - 1 else out.method("movedim", p.rows, p.dim, -1)
    table = p.table if p.table_dim == 0 else out.method("t", p.table)
    with out.without_autocast():  # the contraction that this is made from may have been outside of it
        return out.call(torch.matmul, x, table)


def _kept(out: Emitter, r: Reader, capture: Node, block: Attention) -> Node:
    """A captured tensor; a copy of one that is written after the block, since the operator keeps it for the
    backward."""
    t = tensor(block.root)
    needs = t is not None and t.requires_grad
    return (
        out.method("clone", capture)
        if needs and r.versions.written_between(capture, r.versions.order[block.root], len(r.versions.order))
        else capture
    )


def _shape_argument(out: Emitter, sizes: Sequence[Index]) -> list[Any]:
    return [_size(out, s) for s in sizes]


def _size(out: Emitter, size: Index) -> Any:
    """A size as a number, or as a node of the graph that computes it."""
    if size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return _symbol(out, size)
    parts = [_size(out, a) for a in size.args]
    if size.is_Add:
        return functools.reduce(lambda a, b: out.call(operator.add, a, b), parts)
    if size.is_Mul:
        return functools.reduce(lambda a, b: out.call(operator.mul, a, b), parts)
    if size.is_Pow:
        return out.call(operator.pow, *parts)
    if isinstance(size, ix.FloorDiv):
        return out.call(operator.floordiv, *parts)
    if isinstance(size, ix.PythonMod):
        return out.call(operator.mod, *parts)
    raise ValueError(f"no node computes the size {size}")


def _symbol(out: Emitter, symbol: Index) -> Node:
    for node in out.graph.nodes:
        if node is out.at:
            break
        v = value(node)
        if isinstance(v, torch.SymInt) and ix.size_of(v) == symbol:
            return node
    for node in out.graph.nodes:
        if node is out.at:
            break
        if (t := tensor(node)) is not None:
            for d, s in enumerate(t.shape):
                if isinstance(s, torch.SymInt) and ix.size_of(s) == symbol:
                    return out.call(torch.ops.aten.sym_size.int, node, d)
    raise ValueError(f"no tensor of the graph has the size {symbol}")


def _queries(out: Emitter, block: Attention, dtype: torch.dtype) -> Node:
    """The queries of all products side by side, each with the scale of its product."""
    roles, parts = block.roles, []
    for p in block.products:
        q = _operand(out, p.q, (roles.batch, roles.heads, roles.queries, p.depth), dtype, expand=True)
        parts.append(q if p.scale == 1 else out.call(operator.mul, q, p.scale))
    return parts[0] if len(parts) == 1 else out.call(torch.cat, parts, -1)


def _keys(out: Emitter, block: Attention, dtype: torch.dtype) -> Node:
    """The keys of all products side by side; of each head, unless all lack the same heads."""
    expand = _differ(block, [k for p in block.products for k in p.keys])
    parts = [_rows(out, p.keys, block, p.depth, dtype, expand) for p in block.products]
    return parts[0] if len(parts) == 1 else out.call(torch.cat, parts, -1)


def _rows(
    out: Emitter,
    pieces: Sequence[Operand],
    block: Attention,
    columns: Sequence[Index],
    dtype: torch.dtype,
    expand: bool = False,
) -> Node:
    """Keys or values, end to end."""
    roles = block.roles
    expand = expand or _differ(block, pieces)
    if len(pieces) > 1:
        pieces = [dataclasses.replace(o, pads=()) for o in pieces]
    along = [(roles.keys,)] if block.rows is None else [(axis,) for axis in block.rows.axes]
    rows = [_operand(out, o, (roles.batch, roles.heads, *along, columns), dtype, expand) for o in pieces]
    return rows[0] if len(rows) == 1 else out.call(torch.cat, rows, 2)


def _differ(block: Attention, operands: Sequence[Operand]) -> bool:
    """Whether one of the operands has heads that another lacks."""
    return len({frozenset(i for i in o.index if ix.axes(i) & {*block.roles.heads}) for o in operands}) > 1


def _operand(
    out: Emitter, o: Operand, groups: Sequence[Sequence[Index]], dtype: torch.dtype, expand: bool = False
) -> Node:
    """`o` as [batch, heads, rows …, columns]: its dims permuted, missing axes inserted, groups of axes folded.

    Heads that are grouped (axis // g) or missing at the end of the heads stay so, unless `expand`; other missing axes
    are expanded.
    """
    node, index = o.node, list(o.index)
    t = tensor(node)
    assert t is not None
    if o.parts:
        node = out.call(operator.getitem, node, _slices(out, o))
    if t.dtype != dtype:
        node = out.method("to", node, dtype)
    for d, before, behind in o.pads:
        widths = [0, 0] * (t.dim() - 1 - d) + _shape_argument(out, (before, behind))
        node = out.call(torch.nn.functional.pad, node, widths)
    at, shape = {}, list(o.shape())
    for d, i in enumerate(index):
        axis = i.args[0] if isinstance(i, ix.FloorDiv) else i
        at[axis] = d
        if expand and axis is not i:
            node = out.method("repeat_interleave", node, _size(out, i.args[1]), d)
            shape[d] = ix.axis_size(axis)
    # dims that are indexed by a constant hold one element
    singles = [d for d, i in enumerate(index) if i == 0]
    order: list[int] = []
    sizes: list[list[Index]] = []
    expanded = False
    for g, group in enumerate(groups):
        present = [a in at for a in group]
        trailing = len(group) - next((k for k, p in enumerate(reversed(present)) if p), len(group))
        here: list[Index] = []
        for k, a in enumerate(group):
            if a in at:
                order.append(at[a])
                here.append(shape[at[a]])
            elif g == 1 and not expand and k >= trailing:
                continue  # a head that this operand lacks at the end: grouped
            elif ix.axis_size(a) == 1:
                continue
            else:
                order.append(-1)
                here.append(ix.axis_size(a))
                expanded = True
        sizes.append(here)
    permuted = [d for d in order if d >= 0] + singles
    if permuted != list(range(len(index))):
        node = out.method("permute", node, permuted)
    if singles:
        flat = [shape[d] for d in order if d >= 0]
        node = out.method("reshape", node, _shape_argument(out, flat))
    if expanded:
        for position, d in enumerate(order):
            if d < 0:
                node = out.method("unsqueeze", node, position)
        node = out.method("expand", node, _shape_argument(out, [s for here in sizes for s in here]))
    return _fold(out, node, sizes)


def _slices(out: Emitter, o: Operand) -> tuple[slice, ...]:
    key = [slice(None)] * len(o.index)
    for d, start, step, length in o.parts:
        stop = ix.sympy.expand(start + step * (length - 1) + 1)
        key[d] = slice(*(_size(out, x) for x in (start, stop, step)))
    return tuple(key)


def _fold(out: Emitter, node: Node, sizes: Sequence[Sequence[Index]]) -> Node:
    if all(len(here) == 1 for here in sizes):
        return node
    folded = [functools.reduce(operator.mul, here, ix.ONE) for here in sizes]
    missing = [k for k, here in enumerate(sizes) if not here]
    if all(len(here) <= 1 for here in sizes):
        for k in missing:
            node = out.method("unsqueeze", node, k)
        return node
    return out.method("reshape", node, _shape_argument(out, folded))


def _capture(out: Emitter, node: Node, device: torch.device) -> Node:
    t = tensor(node)
    if t is None:
        # a float: spelled so that AOTAutograd can put the tensor behind it in its place
        return out.call(torch.mul, out.call(torch.ones, (), dtype=torch.float32, device=device), node)
    if t.device != device:
        node = out.method("to", node, device)
    if t.dtype == torch.float64:
        node = out.method("to", node, torch.float32)
    return node


def _result(out: Emitter, node: Node, block: Attention, layout: str, dtype: torch.dtype | None) -> Node:
    """[B, H, M, Dv] back to the axes of the root, in `dtype` or the root's and, where it can be seen, the root's
    strides."""
    roles = block.roles
    axes = [*roles.batch, *roles.heads, *roles.queries, *roles.columns]
    root = tensor(block.root)
    assert root is not None
    if any(len(g) != 1 for g in (roles.batch, roles.heads, roles.queries, roles.columns)):
        node = _unfold(out, node, (roles.batch, roles.heads, roles.queries, roles.columns), layout)
    order = [axes.index(a) for d in block.dims for a in d]
    if order != list(range(len(axes))):
        node = out.method("permute", node, order)
    if len(order) != root.dim():
        node = out.method("reshape", node, _shape_argument(out, ix.shape_of(root)))
    got = tensor(node)
    assert got is not None
    if got.dtype != (dtype or root.dtype):
        node = out.method("to", node, dtype or root.dtype)
    got = tensor(node)
    assert got is not None
    if not same_strides(root, got) and not strides_unseen(block.root):
        by_stride = sorted(range(root.dim()), key=lambda d: -_hint(root.stride(d)))
        node = out.method("permute", node, by_stride)
        node = out.method("contiguous", node)
        node = out.method("permute", node, [by_stride.index(d) for d in range(root.dim())])
    return node


def _unfold(out: Emitter, node: Node, groups: Sequence[Sequence[Index]], layout: str) -> Node:
    """Splits the folded dims again. Memory order [B, M, H, Dv] is split in that order, so that it stays a view."""
    sizes = [[ix.axis_size(a) for a in g] for g in groups]
    if layout == "bmhd":
        node = out.method("transpose", node, 1, 2)
        node = out.method("reshape", node, _shape_argument(out, sizes[0] + sizes[2] + sizes[1] + sizes[3]))
        b, h, m, c = map(len, sizes)
        order = [*range(b), *range(b + m, b + m + h), *range(b, b + m), *range(b + h + m, b + h + m + c)]
        return out.method("permute", node, order)
    return out.method("reshape", node, _shape_argument(out, [s for here in sizes for s in here]))


def _hint(s: Any) -> int:
    if isinstance(s, torch.SymInt):
        return int(s.node.hint) if s.node.has_hint() else 1 << 30
    return int(s)


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal strides wherever a dim has more than one element; of no elements any."""
    if any(_hint(n) == 0 for n in a.shape):
        return True
    return all(_same(s, t) for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if _hint(n) != 1)


PASS_STRIDES_ON = frozenset("transpose permute getattr unsqueeze movedim t reshape flatten add mul sub div to".split())
HIDE_STRIDES = frozenset("linear matmul bmm mm contiguous".split())


def strides_unseen(root: Node) -> bool:
    """Whether every user of `root` gives the same for any strides: it copies, or is elementwise or a contraction.
    Views pass the question on, and so does a reshape, which is a view or a copy."""
    stack, seen = [root], set[Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.users:
            return False
        for user in node.users:
            name = operation(user)
            if name in PASS_STRIDES_ON:
                stack.append(user)
            elif name not in HIDE_STRIDES:
                return False
    return True


def choose_layout(block: Attention) -> str:
    """ "bmhd" where the heads are put behind the queries afterwards (so that this is free), "bhmd" otherwise."""
    root = tensor(block.root)
    assert root is not None
    if strides_unseen(block.root):
        for user in block.root.users:
            if operation(user) in ("transpose", "permute", "movedim"):
                return "bmhd"
    roles = block.roles
    wanted = (*roles.batch, *roles.queries, *roles.heads, *roles.columns)
    by_stride = sorted(range(root.dim()), key=lambda d: (-_hint(root.stride(d)), d))
    if roles.queries and roles.heads and tuple(a for d in by_stride for a in block.dims[d]) == wanted:
        return "bmhd"
    return "bhmd"
