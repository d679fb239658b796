"""From what was read to the programs of the operator: which tensors are captured, and the canonical form of the masks.

What does not depend on the scores is either computed inside the kernel or loaded from a tensor of the graph. Loaded
is what varies along queries or keys alone (a vector costs less to load than to compute again), and what a kernel
could round differently from torch where that would flip a decision. A masked score takes the form where(keep, x,
fill).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.attention import Attention
from torchflash.passes.graph import tensor
from torchflash.passes.index import Index
from torchflash.passes.reader import Reader
from torchflash.passes.softmax import Failure
from torchflash.passes.table import Projection, Table, tabulate
from torchflash.score import Expr, build, const, name

HEAVY = 12  # operations; more of them on indices alone are loaded where that costs a vector
MAX_SIZES = 8  # symbolic sizes a kernel takes
MASKED = -100.0  # a fill below this is worth skipping tiles for
_COSTLY = frozenset(
    ("load", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf", "**", "/", "//", "%")
)
HUGE = 1e30  # no score is this large: adding one to a larger fill does not change the fill


@dataclass(frozen=True)
class Programs:
    """The operator's programs over b h m n and z0 z1 …, t0 t1 …; the nodes and tables it captures; every node that is
    read for them, and since which position in the graph it holds what was read; the size symbols the operator is
    given; whether a gradient reaches queries and keys at all; and the indices of `Attention.rows`."""

    score: Expr
    keep: Expr | None
    fill: float
    post: Expr
    captures: tuple[Node | Table | Projection, ...]
    reads: tuple[tuple[Node, int], ...]
    sizes: tuple[Index, ...]
    differentiates_scores: bool
    rows: Expr | None = None


def programs(r: Reader, block: Attention) -> Programs | Failure:
    """The programs of a proven block; a Failure when they exceed the limits of the score language."""
    if any(x.op == "detach" for x in score.topological(block.scores, block.post)):
        return Failure("unknown_op", "no gradient flows through part of the scores (detach or no_grad)", block.softmax)
    chooser = _Chooser(r, block)
    try:
        at = () if block.rows is None else block.rows.at
        chosen = [chooser.choose(e) for e in (block.scores, block.post, *at)]
    except _Overwritten as e:
        (node,) = e.args
        return Failure("mutation", f"{node.name} is written in place between its use and the end of the block", node)
    except _MustLoad as e:
        return Failure(
            "unknown_op", f"a decision on a rounded value has no tensor to be loaded from: {e}", block.softmax
        )
    axes = _axis_names(block)
    body, post, *rows = (score.substitute(e, {name(a.name): x for a, x in axes.items()}, _rebuild) for e in chosen)
    keep, fill = masked_form(body, chooser.adds_mask)
    names = list(dict.fromkeys(x.value[1:] for x in score.loads(body, post, *rows)))
    symbols = _sizes_in(body, post, *rows)
    renamed = {name(s.name): name(f"z{i}") for i, s in enumerate(symbols)}
    targets = {n: f"t{i}" for i, n in enumerate(names)}
    final = [None if e is None else _retarget(e, renamed, targets) for e in (body, keep, post, *rows)]
    computed: dict[str, Table | Projection] = {**chooser.tables, **r.projections}
    captures = tuple(computed[n] if n in computed else r.held[n][0] for n in names)
    inner = [x.value[1:] for c in captures if isinstance(c, Table) for x in score.loads(c.expr)]
    projected = [x for c in captures if isinstance(c, Projection) for x in c.reads()]
    reads = (*(r.held[n] for n in (*names, *inner) if n in r.held), *projected)
    for node, _ in reads:
        t = tensor(node)
        if t is not None and (t.dtype.is_complex or t.layout is not torch.strided):
            return Failure("dtype", f"the scores use {node.name}, which is a {t.layout} tensor of {t.dtype}", node)
    if len(symbols) > MAX_SIZES:
        return Failure(
            "too_complex", f"the score program uses {len(symbols)} sizes; at most {MAX_SIZES}", block.softmax
        )
    too_large = score.check_limits(*(e for e in final if e is not None))
    if too_large:
        return Failure("too_complex", f"the score program has {too_large}", block.softmax)
    x, keep, w, *indices = final
    assert x is not None and w is not None
    looked_up = score.load(score.ROWS, [i for i in indices if i is not None]) if indices else None
    return Programs(x, keep, fill, w, captures, reads, symbols, _reaches_scores(x, captures), looked_up)


def _reaches_scores(e: Expr, captures: Sequence[Node | Table | Projection]) -> bool:
    """Whether a gradient of the score program reaches the dot product, be it one of zeros as that of round and sign."""
    tensors = [tensor(c) if isinstance(c, Node) else None for c in captures]
    kinds = {f"t{i}": "f" if t is None else score.capture_kinds([t])["t0"] for i, t in enumerate(tensors)}
    memo: dict[Expr, str] = {}
    reached = {name("s")}
    for x in score.topological(e):
        if score.kind(x, kinds, memo) == "f" and x.op != "load" and reached.intersection(x.args):
            reached.add(x)
    return e in reached


# --------------------------------------------------------------------------------------------------- load or compute


class _MustLoad(Exception):
    pass


class _Overwritten(_MustLoad):
    """A tensor holds something else when the operator runs."""


class _Chooser:
    def __init__(self, r: Reader, block: Attention) -> None:
        self.r = r
        self.end = r.versions.order[block.root]
        self.queries = frozenset(block.roles.queries)
        self.keys = block.roles.keys
        self.axes = frozenset((*(a for d in block.dims for a in d), block.roles.keys))
        self.memo: dict[Expr, Expr] = {}
        self.tables: dict[str, Table] = {}

    def choose(self, e: Expr) -> Expr:
        if e.op in ("const", "name"):
            return e
        if e not in self.memo:
            self.memo[e] = self._choose(e)
        return self.memo[e]

    def _choose(self, e: Expr) -> Expr:
        if _scorelike(e):
            return self._children(e)
        overwritten = next((x for x in map(self._loaded, score.loads(e)) if x is not None and self._changes(*x)), None)
        if (cheaper := self._vector(e) or (None if overwritten else self._table(e))) is not None:
            return cheaper
        try:
            if overwritten and e.op == "load":
                raise _Overwritten(overwritten[0])
            if self._decides_on_rounding(e):
                raise _MustLoad(str(e))
            return self._children(e)
        except _MustLoad:
            if (found := self._narrowest(e)) is None:
                raise
            return self.r.load(*found)

    def _children(self, e: Expr) -> Expr:
        args = [self.choose(a) for a in e.args]
        return score.load(e.value, args) if e.op == "load" else _rebuild(e.op, *args)

    def _vector(self, e: Expr) -> Expr | None:
        """A load of `e` from a tensor that does not vary along both queries and keys."""
        inner = e.args if e.op == "load" else (e,)
        if not any(score.loads(x) for x in inner) and len(score.topological(e)) <= HEAVY:
            return None
        found = self._narrowest(e)
        return None if found is None or self._crosses(found[1]) else self.r.load(*found)

    def _table(self, e: Expr) -> Expr | None:
        """A load of `e` from a table over distances, where computing it in the kernel is heavy, could round another
        way, or would add the gradients of many elements to few."""
        if len(self.queries) != 1:
            return None
        (queries,) = self.queries
        if not {queries, self.keys} <= ix.expr_axes(e):
            return None
        parts = score.topological(e)
        heavy = len(parts) > HEAVY and any(x.op in _COSTLY for x in parts)
        if not heavy and not any(self._decides_on_rounding(x) or self._scatters(x) for x in parts):
            return None
        table = tabulate(e, queries, self.keys)
        if table is None:
            return None
        text = next((t for t, known in self.tables.items() if known == table), f"table{len(self.tables)}")
        self.tables[text] = table
        return score.load(f"%{text}", table.index(queries, self.keys))

    def _scatters(self, e: Expr) -> bool:
        """A load that needs a gradient at an index that varies along queries and keys together."""
        if e.op != "load" or e.value[1:] not in self.r.held:
            return False
        t = tensor(self.r.held[e.value[1:]][0])
        return (
            t is not None
            and t.requires_grad
            and any(self.queries & ix.expr_axes(i) and self.keys in ix.expr_axes(i) for i in e.args)
        )

    def adds_mask(self, e: Expr) -> bool:
        """Whether a load that is added to the scores looks like a mask: a float without a gradient, the same for all
        heads. Then the kernels look for what is huge and negative in it."""
        if e.value[1:] not in self.r.held or "h" in score.names(e) or "n" not in score.names(e):
            return False
        t = tensor(self.r.held[e.value[1:]][0])
        return t is not None and t.dtype.is_floating_point and not t.requires_grad

    def _narrowest(self, e: Expr) -> tuple[Node, tuple[Index, ...]] | None:
        """Where `e` can be loaded from with the fewest axes, at an index that needs no other load."""
        found = [
            o
            for o in self.r.origin.get(e, ())
            if self._axes(o[1]) <= self.axes
            and not any(score.loads(ix.to_expr(i)) for i in o[1])
            and not self._changes(o[0], self.r.versions.order[o[0]])
        ]
        return min(found, key=lambda o: len(self._axes(o[1])), default=None)

    def _loaded(self, e: Expr) -> tuple[Node, int] | None:
        return self.r.held.get(e.value[1:])

    def _changes(self, node: Node, since: int) -> bool:
        """Whether a tensor is written before the operator runs."""
        return self.r.versions.written_between(node, since, self.end)

    def _axes(self, index: Sequence[Index]) -> frozenset[Index]:
        return frozenset().union(*(ix.axes(i) for i in index))

    def _crosses(self, index: Sequence[Index]) -> bool:
        axes = self._axes(index)
        return self.keys in axes and bool(axes & self.queries)

    def _decides_on_rounding(self, e: Expr) -> bool:
        """A comparison or truncation of a computed float, which another order of operations could decide
        differently."""
        if e.op in score.COMPARE or e.op in ("int", "floor", "ceil", "trunc", "round", "sign", "//", "%"):
            return any(self._rounded(a) for a in e.args)
        return False

    def _rounded(self, e: Expr) -> bool:
        """A float that is computed by rounding: not loaded, not a constant, not integers in float."""
        exact = ("const", "name", "load", "half", "bfloat16", "int", "int32", "isnan", "bool")
        if e.op in exact or e.op in score.COMPARE:
            return False
        if e.op == "float":
            return self._rounded(e.args[0])
        if e.op in (
            "where",
            "neg",
            "abs",
            "minimum",
            "maximum",
            "~",
            "&",
            "|",
            "^",
            "floor",
            "ceil",
            "trunc",
            "round",
            "sign",
            "nan_to_num",
        ):
            return any(map(self._rounded, e.args))
        return not self._integral(e)

    def _integral(self, e: Expr) -> bool:
        """Integers, perhaps held in floats."""
        match e.op:
            case "const":
                return math.isfinite(e.value) and float(e.value).is_integer()
            case "name" | "int" | "int32":
                return e.value not in ("s", "p")
            case "load":
                t = tensor(self.r.held[e.value[1:]][0]) if e.value[1:] in self.r.held else None
                return t is not None and not t.dtype.is_floating_point
            case "where":
                return all(map(self._integral, e.args[1:]))
            case "+" | "-" | "*" | "//" | "%" | "neg" | "float" | "abs" | "minimum" | "maximum":
                return all(map(self._integral, e.args))
        return False


@functools.lru_cache(maxsize=65536)
def _scorelike(e: Expr) -> bool:
    return bool(score.names(e) & {"s", "p"})


# ---------------------------------------------------------------------------------------------------------- naming


def _axis_names(block: Attention) -> dict[Index, Expr]:
    """Every axis of the block in terms of b, h, m, n, and the sizes of folded axes."""
    roles = block.roles
    found: dict[Index, Expr] = {roles.keys: name("n") if ix.axis_size(roles.keys) != 1 else const(0)}
    for group, variable in ((roles.batch, "b"), (roles.heads, "h"), (roles.queries, "m")):
        sizes = [ix.axis_size(a) for a in group]
        index = tuple(ix.axis(f"{variable}*", functools.reduce(operator.mul, sizes, ix.ONE)) for _ in (0,))
        parts = ix.reshape(tuple(sizes), (ix.axis_size(index[0]),), index) if group else ()
        for a, part in zip(group, parts, strict=True):
            e = ix.to_expr(part) if ix.axis_size(a) != 1 else const(0)
            found[a] = score.substitute(e, {name(index[0].name): name(variable)})
    return found


def _rebuild(op: str, *args: Expr) -> Expr:
    """Builds again, folding comparisons and divisions of indices as far as they go without ranges."""
    return build(op, *args)


def _sizes_in(*exprs: Expr) -> tuple[Index, ...]:
    own = score.INDEX_NAMES | {"s", "p", "g"}
    found = dict.fromkeys(e.value for e in score.topological(*exprs) if e.op == "name" and e.value not in own)
    return tuple(s for text in found if (s := ix.symbol(text)) is not None)


def _retarget(e: Expr, renamed: dict[Expr, Expr], targets: dict[str, str]) -> Expr:
    memo = dict(renamed)
    for x in score.topological(e):
        if x not in memo:
            args = [memo[a] for a in x.args]
            memo[x] = (
                score.load(targets[x.value[1:]], args) if x.op == "load" else x if not args else score.call(x.op, *args)
            )
    return memo[e]


# ------------------------------------------------------------------------------------------------------------ masks


def masked_form(e: Expr, adds_mask: Callable[[Expr], bool] = lambda load: False) -> tuple[Expr | None, float]:
    """(keep, fill) such that `e` is at most fill wherever keep is false; keep is None where nothing is masked.

    0.125 * s + where(n <= m, 0.0, -inf)  ->  n <= m, -inf
    0.125 * s + t0[b, 0, m, n]            ->  ~(t0[b, 0, m, n] <= -1e30), -1e30    if adds_mask(t0[b, 0, m, n])

    The score itself stays as it is written: in a row that keeps no key an added mask passes gradients on, a filled
    one does not.
    """
    lifted = _lift(e, adds_mask)
    if lifted is None:
        return None, 0.0
    keep, _, fill = lifted
    decides = bool(score.names(keep) & {"m", "n"}) and not score.names(keep) & {"s", "p"}
    return (keep, fill) if decides and fill <= MASKED else (None, 0.0)


def _lift(e: Expr, adds_mask: Callable[[Expr], bool]) -> tuple[Expr, Expr, float] | None:
    """(keep, the score where it is kept, fill)."""
    match e.op:
        case "where":
            c, a, b = e.args
            if a.op == "const" and (b.op != "const" or a.value < b.value):
                c, a, b = build("~", c), b, a
            if b.op != "const" or isinstance(b.value, bool):
                return _branch(c, a, b, adds_mask)
            return _both(c, a, float(b.value), adds_mask)
        case "load" if adds_mask(e):
            return build("~", build("<=", e, const(-HUGE))), const(0.0), -HUGE  # NaN stays
        case "+" | "-":
            a, b = e.args
            for first in (True, False):
                lifted = _lift(a if first else b, adds_mask)
                if lifted is None:
                    continue
                keep, x, fill = lifted
                other = b if first else a
                sign = -1.0 if e.op == "-" and not first else 1.0
                if sign * fill == -math.inf or (sign * fill <= -HUGE and _moderate(other)):
                    rest = build(e.op, x, other) if first else build(e.op, other, x)
                    return _both(keep, rest, sign * fill, adds_mask)
        case "*":
            a, b = e.args
            if a.op == "const" and a.value > 0 and (lifted := _lift(b, adds_mask)) is not None:
                keep, x, fill = lifted
                return keep, build("*", a, x), float(a.value * fill)
        case "float":
            return _lift(e.args[0], adds_mask)
    return None


def _branch(c: Expr, a: Expr, b: Expr, adds_mask: Callable[[Expr], bool]) -> tuple[Expr, Expr, float] | None:
    """Of where(c, a, b): what one of the two masks itself, if the choice does not depend on the scores."""
    if score.names(c) & {"s", "p"}:
        return None
    for first in (True, False):
        lifted = _lift(a if first else b, adds_mask)
        if lifted is not None:
            keep, x, fill = lifted
            elsewhere, y = (build("~", c), b) if first else (c, a)
            if not _scorelike(y):  # may be as low as what is masked
                elsewhere = build("&", elsewhere, build("~", build("<=", y, const(fill))))
            return build("|", elsewhere, keep), build("where", c, x, b) if first else build("where", c, a, x), fill
    return None


def _both(keep: Expr, x: Expr, fill: float, adds_mask: Callable[[Expr], bool]) -> tuple[Expr, Expr, float]:
    """With what masks `x` itself."""
    inner = _lift(x, adds_mask)
    if inner is None or not inner[2] <= MASKED or score.names(inner[0]) & {"s", "p"}:
        return keep, x, fill
    return build("&", keep, inner[0]), inner[1], max(fill, inner[2])


def _moderate(e: Expr) -> bool:
    """Adds nothing that could lift a huge negative fill: no huge positive number is written in it."""
    return not any(x.op == "const" and x.value >= HUGE for x in score.topological(e))
