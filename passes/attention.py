"""The proof that a contraction is the second half of an attention block, and the block as a value.

    root[a0, a1, …] = Σ_n  post(softmax_n(score(Σ_d q·k))) * v

The axes of the root are only names. What each of them is follows from who has it:

    in v only                      a column of the values
    in q, in neither k nor v       a query
    anything else                  batch (the last ones are heads; a head that k or v lacks is grouped)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.beside import Beside
from torchflash.passes.contraction import CONTRACTIONS, Contraction, Operand, contraction
from torchflash.passes.graph import argument, operation, tensor
from torchflash.passes.index import Index
from torchflash.passes.pieces import end_to_end
from torchflash.passes.reader import Dot, Indices, Reader
from torchflash.passes.softmax import Failure, Weights, find_softmaxes
from torchflash.passes.sums import Product, summed
from torchflash.passes.views import VIEWS, peel_steps
from torchflash.score import Expr, build, const, name

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_PIECES = 8
MAX_FACTORS = 3  # behind the contraction with the values
CASTS = frozenset(("to", "type", "float", "half", "bfloat16", "type_as"))


@dataclass(frozen=True)
class Roles:
    """What the axes of a block are. `batch`, `heads`, `queries`, `columns` (of v) are axes of the root, in the order
    in which they fold; `heads` may end in axes that k or v lack. `keys` are contracted."""

    batch: tuple[Index, ...]
    heads: tuple[Index, ...]
    queries: tuple[Index, ...]
    columns: tuple[Index, ...]
    keys: Index


@dataclass(frozen=True)
class Rows:
    """Where key n lies in tensors that keys and values are looked up in: `at` on the `axes` that these have in the
    place of keys, by nodes that would otherwise copy them (`passes.paged`)."""

    axes: tuple[Index, ...]
    at: tuple[Expr, ...]
    lookups: tuple[Node, ...]


@dataclass(frozen=True)
class Attention:
    """A proven block. `root` is the node the operator replaces, `dims` the axes that each of its dims folds; `scores`
    and `post` are expressions over the axes in `roles`, with `s` for the sum of the `products` of queries and keys,
    mostly one, and loads named after nodes. The `values` are one tensor, or several end to end. With `rows`, keys and
    values are one tensor each, read where they lie."""

    root: Node
    dims: tuple[tuple[Index, ...], ...]
    softmax: Node
    products: tuple[Product, ...]
    values: tuple[Operand, ...]
    qk_dtype: torch.dtype
    v_dtype: torch.dtype
    roles: Roles
    scores: Expr
    post: Expr
    dropout_p: float
    rows: Rows | None = None


@dataclass(frozen=True)
class Given:
    """The part of a mixture whose weights come from no queries and keys: `weights`, a softmax in the graph, times
    `factor`, contracted with the values of the blocks beside it."""

    weights: Operand
    factor: Expr
    beside: Attention
    softmax: Node


def prove(
    r: Reader, root: Node, probabilities: frozenset[Node]
) -> tuple[tuple[Attention, ...], tuple[Given, ...]] | Failure | None:
    """The attention blocks that `root` is the sum of, mostly one, and what is added to them; a Failure that says which
    step of the proof fails; None where nothing hints at attention. `probabilities` are the nodes that may hold
    weights."""
    result = tensor(root)
    assert result is not None
    dims: tuple[tuple[Index, ...], ...] = tuple((ix.axis(f"a{i}", size),) for i, size in enumerate(ix.shape_of(result)))
    while True:
        found = _prove(r, root, dims, probabilities)
        if not isinstance(found, _Split):
            return found
        dims = tuple(d if found.axis not in d else _split(d, found) for d in dims)


@dataclass(frozen=True)
class _Split:
    """An axis of the root is two: the operands have `axis // inner` and `axis % inner`."""

    axis: Index
    inner: Index


def _split(axes: tuple[Index, ...], by: _Split) -> tuple[Index, ...]:
    name, _, _ = by.axis.name.partition("[")
    parts = (ix.axis(f"{name}o", ix.floordiv(ix.axis_size(by.axis), by.inner)), ix.axis(f"{name}i", by.inner))
    return tuple(p for a in axes for p in (parts if a is by.axis else (a,)))


def _prove(
    r: Reader, root: Node, dims: tuple[tuple[Index, ...], ...], probabilities: frozenset[Node]
) -> tuple[tuple[Attention, ...], tuple[Given, ...]] | Failure | _Split | None:
    if operation(root) in ("add", "sub"):
        block = _in_pieces(r, root, dims, probabilities)
        return ((block,), ()) if isinstance(block, Attention) else block
    index = tuple(ix.fold(d) for d in dims)
    second, behind = _second(r, root, index, probabilities)
    if second is None or len(second.summed) != 1:
        return None
    if operation(second.node) in ("baddbmm", "addmm"):
        return Failure(
            "unknown_op", f"{second.node.name} adds another tensor to the contraction with the values", second.node
        )
    failure: Failure | None = None
    for v, found in _sides(r, second, probabilities, behind):
        if isinstance(found, Failure):
            failure = failure or found
            continue
        parts = [_block(r, root, dims, second, (_values(v, second.summed[0], w),), w) for w in found]
        blocks = tuple(b for b in parts if isinstance(b, Attention))
        others = [_given(r, dims, b, w, blocks) for b, w in zip(parts, found, strict=True)
                  if not isinstance(b, Attention)]  # fmt: skip
        if (split := next((x for x in (*parts, *others) if isinstance(x, _Split)), None)) is not None:
            return split
        given = tuple(g for g in others if isinstance(g, Given))
        if blocks and len(blocks) + len(given) == len(parts):
            return blocks, given
        failure = failure or next(b for b in parts if isinstance(b, Failure))
    return failure


def _sides(
    r: Reader,
    second: Contraction,
    probabilities: frozenset[Node],
    behind: tuple[tuple[str, Expr], ...] = (),
) -> Iterator[tuple[Operand, tuple[Weights, ...] | Failure]]:
    """The operand that may be values, and what softmaxes the other one, with the factors behind, is the sum of."""
    for side, v in ((second.lhs, second.rhs), (second.rhs, second.lhs)):
        if side.node not in probabilities:
            continue
        weights = r.read(side.node, side.index, side.user)
        for op, factor in behind:
            weights = build(op, weights, factor)
        if r.depends(weights):
            yield v, find_softmaxes(r, weights, second.summed[0], second.node)


def _in_pieces(
    r: Reader, root: Node, dims: tuple[tuple[Index, ...], ...], probabilities: frozenset[Node]
) -> Attention | Failure | _Split | None:
    """The block that `root` is when it adds what parts of the weights give with values of their own."""
    pieces: list[tuple[Contraction, Operand, Weights]] = []
    for x in addends(r, root):
        at = ix.broadcast(ix.shape_of(tensor(x)), tuple(ix.fold(d) for d in dims))  # type: ignore[arg-type]
        dot = None if x in r.gradients.cuts else contracted(r, x, at, probabilities)
        second = None if dot is None else contraction(r, dot, "n")
        if second is None or len(second.summed) != 1 or operation(second.node) in ("baddbmm", "addmm"):
            return None
        found = [(v, w[0]) for v, w in _sides(r, second, probabilities) if not isinstance(w, Failure) and len(w) == 1]
        if len(found) != 1:
            return None
        ((v, weights),) = found
        pieces.append((second, _values(v, second.summed[0], weights), weights))
    second, _, weights = pieces[0]
    shared = {(s.dtype, w.softmax, w.scores, w.keys, w.post, w.dropout_p) for s, _, w in pieces}
    if len(shared) > 1 or weights.post is not name("p"):
        return None
    return _block(r, root, dims, second, tuple(v for _, v, _ in pieces), weights)


def addends(r: Reader, x: Node) -> list[Node]:
    """What an addition adds, a - -b too, and the additions in it; none where these are more than MAX_PIECES."""
    found: list[Node] = []
    stack: list[Any] = [x]
    while stack:
        y = stack.pop()
        if not isinstance(y, Node) or tensor(y) is None or len(found) + len(stack) >= MAX_PIECES:
            return []
        args, kwargs = r.arguments(y)
        other = argument(args, kwargs, 1, "other")
        negated = operation(y) == "sub" and isinstance(other, Node) and operation(other) == "neg"
        if (operation(y) != "add" and not negated) or (y is not x and y in r.gradients.cuts):
            found.append(y)
        elif argument(args, kwargs, 2, "alpha", default=1) != 1:
            return []
        else:
            stack += [r.arguments(other)[0][0] if negated else other, args[0]]
    return found


def _second(
    r: Reader, x: Any, index: Indices, probabilities: frozenset[Node], depth: int = MAX_FACTORS
) -> tuple[Contraction | None, tuple[tuple[str, Expr], ...]]:
    """The contraction with the values that `x` is, or that it divides by a normaliser or multiplies with the part that
    a sink leaves; and these divisors and factors, the innermost first."""
    while isinstance(x, Node) and tensor(x) is not None:
        args, kwargs = r.arguments(x)
        if operation(x) in CONTRACTIONS:
            dot = contracted(r, x, index, probabilities)
            return (None if dot is None else contraction(r, dot, "n")), ()
        if operation(x) in CASTS:
            x = args[0]
        elif (step := VIEWS.get(operation(x))) is not None:
            x, index = step(r, x, args, kwargs, index)
        else:
            break
        if x in r.gradients.cuts:
            return None, ()
    for inner, other in factors(r, x) if depth else ():
        t, result = tensor(other), tensor(inner)
        if t is None or result is None or inner in r.gradients.cuts:
            continue
        at = ix.broadcast(ix.shape_of(result), index)
        second, behind = _second(r, inner, at, probabilities, depth - 1)
        if second is not None:
            factor = r.read(other, ix.broadcast(ix.shape_of(t), index), x)
            return second, (*behind, ("/" if operation(x) == "div" else "*", factor))
    return None, ()


def factors(r: Reader, node: Any) -> tuple[tuple[Any, Any], ...]:
    """(numerator, divisor) of a division, (factor, other factor) of a product both ways round."""
    if not isinstance(node, Node) or operation(node) not in ("div", "mul"):
        return ()
    args, kwargs = r.arguments(node)
    a, b = args[0], argument(args, kwargs, 1, "other")
    return ((a, b),) if operation(node) == "div" else ((a, b), (b, a))


def contracted(r: Reader, x: Any, index: Indices, probabilities: frozenset[Node]) -> Dot | None:
    """The contraction of probabilities that `x` is but for casts and views, at its own index."""
    while isinstance(x, Node) and tensor(x) is not None:
        args, kwargs = r.arguments(x)
        if operation(x) in CONTRACTIONS:
            inputs = pytree.tree_leaves((args, kwargs))
            return Dot(x, tuple(index)) if any(isinstance(a, Node) and a in probabilities for a in inputs) else None
        if operation(x) in CASTS:
            x = args[0]
        elif (step := VIEWS.get(operation(x))) is not None:
            x, index = step(r, x, args, kwargs, index)
        else:
            return None
        if x in r.gradients.cuts:
            return None
    return None


def _values(v: Operand, n: Index, weights: Weights) -> Operand:
    """The values over all keys of the softmax."""
    at = ix.sympy.expand(weights.keys - weights.start)
    return Operand(v.node, tuple(ix.sympy.expand(i.subs(n, at)) for i in v.index), v.user)


def _block(
    r: Reader,
    root: Node,
    dims: tuple[tuple[Index, ...], ...],
    second: Contraction,
    pieces: tuple[Operand, ...],
    weights: Weights,
    sums: bool = True,
) -> Attention | Failure | _Split:
    """The block with these weights, and values in `pieces`; with `sums`, of products that the scores add."""
    n = weights.keys
    leaves = [x for x in score.topological(weights.scores) if x.op in ("dot", "reduce", "softmax")]
    for leaf in leaves:
        if leaf.op != "dot":
            return Failure("unknown_op", "the scores contain a reduction of themselves", leaf.value.node)
    products = {x: c for x in leaves if (c := contraction(r, x.value, "d")) is not None}
    sides = {x: s for x, c in products.items() if (s := _queries_and_keys(c, n)) is not None}
    values: frozenset[Index] = frozenset().union(*(v.axes() for v in pieces))
    proper = [x for x, (q, k) in sides.items() if (q.axes() - k.axes() - values)] or list(sides)
    if not proper and any("@" in x.value for x in score.loads(weights.scores)):
        return Failure("mutation", "the scores are written in place through a view of them", weights.softmax)
    if not proper and (unknown := _unknown_operation(r, weights.scores)) is not None:
        return Failure(
            "unknown_op", f"the reader does not know {operation(unknown) or unknown.target} of the scores", unknown
        )
    if not proper:
        return Failure("no_scores", node=weights.softmax)
    # a contraction of masks, or of one element, may look like one of queries and keys
    main = max(
        proper, key=lambda x: (any(_needs_gradient(o) for o in sides[x]), len(products[x].summed), _extent(products[x]))
    )
    q, k = sides[main]
    rows = q.axes() - k.axes() - values
    alike = [x for x in proper if products[x].dtype == products[main].dtype and not rows & sides[x][1].axes()]
    plain = {x: tuple(_plainest(r, o, n) for o in sides[x]) for x in alike}
    of_main = [x for x in alike if _same(r, plain[x][0], plain[main][0]) and plain[x][1].pads]
    keys = end_to_end([plain[x][1] for x in of_main], n) if len(of_main) > 1 and main in of_main else None
    if keys is not None:
        whole, scales = score.substitute(weights.scores, dict.fromkeys(of_main, name("s")), build), {main: 1.0}
    else:
        whole, scales = summed(weights.scores, main, {x: products[x].summed for x in alike if sums or x is main})
    beside = Beside(r, q, k, rows, n)
    loaded: dict[Expr, Expr] = {}
    for x in score.topological(whole):
        if x.op == "dot":
            bias = beside.load(x, products.get(x))
            if isinstance(bias, Failure):
                return bias
            loaded.update(bias)
    scores = r.with_loads(whole, loaded)
    if r.depends(scores):
        return Failure(
            "several_contractions", "a contraction that the scores add cannot be told apart", weights.softmax
        )
    first = products[main]
    for dtype in (first.dtype, second.dtype):
        if dtype not in DTYPES:
            return Failure("dtype", f"computed in {str(dtype).removeprefix('torch.')}", first.node)
    device = tensor(root).device.type  # type: ignore[union-attr]
    if device not in ("cpu", "cuda"):
        return Failure("device", f"runs on {device}", root)
    last = end_to_end([_plainest(r, v, n) for v in pieces], n)
    if last is None:
        return Failure("layout", "the values in pieces are not those of all keys", pieces[0].node)
    factors = tuple(
        Product(plain[x][0], (plain[x][1],), products[x].summed, scale, (products[x].node,))
        for x, scale in scales.items()
    )
    if keys is not None:
        factors = (Product(plain[main][0], keys, first.summed, 1.0, tuple(products[x].node for x in of_main)),)
    for o in (*(o for p in factors for o in (p.q, *p.keys)), *last):
        if not is_whole(o) and (split := _split_of(o, dims)) is not None:
            return split
    axes = tuple(a for d in dims for a in d)
    roles = _roles(axes, n, factors, last, ix.expr_axes(scores) | ix.expr_axes(weights.post))
    if isinstance(roles, Failure):
        return roles if len(factors) == 1 else _block(r, root, dims, second, pieces, weights, sums=False)
    return Attention(
        root,
        dims,
        weights.softmax,
        factors,
        last,
        first.dtype,
        second.dtype,
        roles,
        scores,
        weights.post,
        weights.dropout_p,
    )


def _given(
    r: Reader,
    dims: tuple[tuple[Index, ...], ...],
    found: Failure | _Split,
    w: Weights,
    blocks: Sequence[Attention],
) -> Given | _Split | None:
    if not isinstance(found, Failure) or found.code != "no_scores" or not blocks or w.p.op != "softmax":
        return None
    roles = blocks[0].roles
    weights = Operand(w.softmax, w.p.value.index, blocks[0].root)
    if not is_whole(weights) and (split := _split_of(weights, dims)) is not None:
        return split
    factor = score.substitute(w.post, {name("p"): const(1.0)}, build)
    groups = (roles.batch, roles.heads, roles.queries)
    if (
        r.depends(w.scores)
        or w.dropout_p
        or w.keys is not roles.keys
        or not is_whole(weights)
        or any(len(g) != 1 for g in (*groups, roles.columns))
        or any(_group(i) for i in weights.index)
        or any(x.op in ("where", "nan_to_num", "detach") for x in score.topological(w.post))
        or not ix.expr_axes(factor) <= {roles.keys, *(a for g in groups for a in g)}
    ):
        return None
    return Given(weights, factor, blocks[0], w.softmax)


def _same(r: Reader, a: Operand, b: Operand) -> bool:
    """Whether both read the same values, through views or not."""
    if (a.pads, a.parts) != (b.pads, b.parts):
        return False
    if not a.pads and not a.parts:
        a, b = (peel_steps(r, o)[-1] for o in (a, b))
    first, last = sorted(r.versions.order[o.user] for o in (a, b))
    return (a.node, a.index) == (b.node, b.index) and not r.versions.written_between(a.node, first, last)


def _needs_gradient(o: Operand) -> bool:
    t = tensor(o.node)
    return t is not None and t.requires_grad


def _extent(c: Contraction) -> bool:
    return any(ix.axis_size(d) != 1 for d in c.summed)


def _unknown_operation(r: Reader, scores: Expr) -> Node | None:
    """An operation the reader stopped at that has a contraction before it."""
    for x in score.loads(scores):
        node = r.held[x.value[1:]][0]
        stack, seen = [node], set[Node]()
        while stack and len(seen) < 64:
            y = stack.pop()
            if y in seen or not y.op.startswith("call"):
                continue
            seen.add(y)
            if operation(y) in CONTRACTIONS and operation(y) != "linear":
                return node
            stack += y.all_input_nodes
    return None


def _queries_and_keys(c: Contraction, n: Index) -> tuple[Operand, Operand] | None:
    """(queries, keys): exactly one operand runs along the keys, and both along all of what is contracted."""
    for q, k in ((c.lhs, c.rhs), (c.rhs, c.lhs)):
        along = [i for i in k.index if n in ix.axes(i)]
        if (
            len(along) == 1
            and not ix.axes(ix.sympy.expand(along[0] - n))
            and n not in q.axes()
            and all(d in q.index and d in k.index for d in c.summed)
        ):
            return q, k
    return None


def _plainest(r: Reader, o: Operand, n: Index) -> Operand:
    """The operand before the views in front of it, as far as each of its dims still is one axis, part of a head axis
    or a constant; a slice of it where no view is. Where it has not all of the keys `n`, it has no others before the
    views either."""
    best = o.padded(n) or o
    pads = [p[1:] for p in best.pads]
    steps = [p for s in peel_steps(r, o) if (p := s.padded(n)) is not None and [x[1:] for x in p.pads] == pads]
    if whole := [p for p in steps if is_whole(p)]:
        return whole[-1]
    sliced = [s for p in steps if (s := p.sliced()) is not None and is_whole(s)]
    return sliced[-1] if sliced else best


def _split_of(o: Operand, dims: tuple[tuple[Index, ...], ...]) -> _Split | None:
    """The axis of the root of which `o` has the parts, and the size of the inner part."""
    axes = {a for d in dims for a in d}
    found = [x for i in o.index for x in i.atoms(ix.FloorDiv, ix.PythonMod) if x.args[0] in axes]
    inner = {x.args[0]: x.args[1] for x in found if ix.divmod_index(ix.axis_size(x.args[0]), x.args[1])[1] == 0}
    # axis // g alone is a group of heads
    parts = [x for x in found if isinstance(x, ix.PythonMod) and x.args[0] in inner]
    return _Split(parts[0].args[0], inner[parts[0].args[0]]) if parts else None


def is_whole(o: Operand) -> bool:
    """Every dim is all of one axis, all groups of one, or has one element; and no axis is used twice."""
    t = tensor(o.node)
    assert t is not None
    used: list[Index] = []
    for i, size in zip(o.index, o.shape(), strict=True):
        if ix.is_axis(i) and _equal(t, ix.axis_size(i), size):
            used.append(i)
        elif (g := _group(i)) is not None and _equal(t, ix.axis_size(g[0]), size * g[1]):
            used.append(g[0])
        elif i != 0 or size != 1:
            return False
    return len(set(used)) == len(used)


def _equal(t: torch.Tensor, a: Index, b: Index) -> bool:
    """Whether two sizes are equal; of symbolic ones that only are so for this trace, under a guard."""
    difference = ix.sympy.expand(a - b)
    if difference.is_number:
        return bool(difference == 0)
    return ix.guarded(t, ix.sympy.Eq(a, b))


def _group(i: Index) -> tuple[Index, Index] | None:
    """(axis, g) when `i` is axis // g."""
    if isinstance(i, ix.FloorDiv) and ix.is_axis(i.args[0]):
        return i.args[0], i.args[1]
    return None


def _roles(
    index: Indices, n: Index, products: Sequence[Product], values: Sequence[Operand], scored: frozenset[Index]
) -> Roles | Failure:
    def layout(reason: str, o: Operand | None = None) -> Failure:
        return Failure("layout", reason, o.node if o is not None else None)

    has_q: frozenset[Index] = frozenset().union(*(p.q.axes() for p in products))
    has_k: frozenset[Index] = frozenset().union(*(k.axes() for p in products for k in p.keys))
    has_v: frozenset[Index] = frozenset().union(*(v.axes() for v in values))
    wants = [x for p in products for x in ((p.q, p.depth), *((k, (n, *p.depth)) for k in p.keys))]
    for o, wanted in (*wants, *((v, (n,)) for v in values)):
        if not is_whole(o) or not all(w in o.index for w in wanted):
            return layout("an operand is not indexed by whole axes", o)
    columns = tuple(a for a in index if all(a in v.index for v in values) and a not in has_q | has_k | scored)
    queries = tuple(a for a in index if a in has_q and a not in has_k and a not in has_v)
    if not columns:
        return layout("the values have no column of their own", values[0])
    rest = [a for a in index if a not in columns and a not in queries]
    if any(a in has_k and a not in has_q and a not in has_v for a in rest):
        return Failure("no_scores", "the keys depend on the query", products[0].keys[0].node)
    for p in products:
        if any(_group(i) for i in p.q.index):
            return layout("the queries are grouped", p.q)
    rows = (*(k for p in products for k in p.keys), *values)
    grouped = {g[0] for o in rows for i in o.index if (g := _group(i)) is not None}
    if len(grouped) > 1 or any(g not in rest for g in grouped):
        return layout("keys and values are grouped along several axes", products[0].keys[0])
    # axes that k or v lack go last; both must lack a suffix of the heads, or be expanded
    lacking = [[a for a in rest if a not in has] for has in (has_k, has_v)]
    if grouped:
        (head,) = grouped
        return Roles(tuple(a for a in rest if a is not head), (head,), queries, columns, n)
    both = [a for a in rest if a in lacking[0] and a in lacking[1]]
    one = [a for a in rest if (a in lacking[0]) != (a in lacking[1])]
    full = [a for a in rest if a in has_k and a in has_v]
    if {a in lacking[0] for a in one} == {True, False}:
        full, one = full + [a for a in one if a not in lacking[1]], [a for a in one if a in lacking[1]]
    tail = one + both
    if tail:
        # an axis that all three have may lead the heads, so that it need not be expanded
        lead = full[-1:]
        return Roles(tuple(full[:-1]), tuple(lead + tail), queries, columns, n)
    return Roles(tuple(full[:-1]), tuple(full[-1:]), queries, columns, n)
