"""`attention`: the operator as a function, for those who write attention themselves.

The arguments of torch.nn.functional.scaled_dot_product_attention and, beyond them, any score that can be written in
the score language (torchflash/score.py). The texts become one program: names are replaced by captured tensors, sizes
and numbers, and masks by conditions on the score.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.score import Expr, ScoreError, build, const, load, name

if TYPE_CHECKING:
    from torchflash.kernels.mask import Request

INF = float("inf")
AXES = ("b", "h", "m", "n")
LENGTHS = ("M", "N")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK = "attn_mask"
Bound = Tensor | float | int | bool


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, score: str | None = None,
    keep: str | None = None, tensors: Mapping[str, Bound] | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, score: str | None = None,
    keep: str | None = None, tensors: Mapping[str, Bound] | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    score: str | None = None,
    keep: str | None = None,
    tensors: Mapping[str, Bound] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(score(query · key)) · value, without the scores in memory, forward and backward.

    query [..., H, M, D], key [..., H, N, D], value [..., H, N, Dv] → [..., H, M, Dv]; float16, bfloat16 or float32. The
    first eight arguments are those of scaled_dot_product_attention and mean the same: leading dims broadcast;
    `attn_mask` is broadcast to [..., H, M, N], bool (True = keep) or float (added, with a gradient); `is_causal` keeps
    n <= m; `scale` defaults to 1 / sqrt(D); `enable_gqa` lets H of key and value be a divisor of query's. Under
    autocast, query, key and value are cast to its dtype.

    score: the score in the score language, over `s` (the dot product, not scaled), the indices `b` (of all leading
    dims, folded), `h`, `m` (query) and `n` (key), the lengths `M` and `N`, `scale`, and the names in `tensors`:
        attention(q, k, v, score="scale * s + slopes[h] * (n - m)", keep="n <= m", tensors={"slopes": slopes})
    Default: "scale * s". Arithmetic, comparisons, & | ~, where(c, x, y), minimum, maximum, abs, exp, log, tanh, sigmoid
    …; temporaries as in "d = n - m; scale * s + d". Indices must lie inside the tensor; they are clamped to it.
    keep: which keys count, a condition in the same language; kernels skip tiles that keep none.
    tensors: what the texts name: tensors, with gradients where they are of a floating dtype, and Python numbers;
    one that no text names is an error.

    The masks, `keep` and a where(…, -inf) in `score` combine. A query that may attend to no key gets 0, and no gradient
    comes from it, as in scaled_dot_product_attention.

    return_lse: also return the logarithm of the softmax's denominator, log Σ exp(score), float32 [..., H, M], -inf
    where nothing is kept. It has no gradient and knows of no dropout.

    ScoreError (a ValueError) for a text that is not a score; ValueError and TypeError for shapes, dtypes and devices.
    A second derivative raises, and so do forward-mode derivatives and the transforms of torch.func (vmap, grad, jvp …).
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"attention(): dropout_p must be between 0 and 1; got {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attention(): attn_mask and is_causal exclude each other; give the mask and keep='n <= m'")
    q, k, v, lead = _operands(query, key, value, enable_gqa)
    M, N = q.shape[2], k.shape[2]
    names = dict(tensors or {})
    scale = 1.0 / math.sqrt(max(1, _constant(q.shape[-1]))) if scale is None else float(_constant(scale))
    captured = {n: _capture(n, x) for n, x in names.items() if isinstance(x, Tensor)}
    numbers = tuple((n, _number(n, x)) for n, x in names.items() if not isinstance(x, Tensor))
    mask: tuple[str, tuple[bool, ...]] | None = None
    if attn_mask is not None:
        if MASK in names:
            raise ScoreError(f"attention(): {MASK!r} is an argument and cannot name a tensor too; choose another name")
        bias = _mask(attn_mask, lead, M, N)
        mask = (
            "bool" if bias.dtype == torch.bool else "float",
            tuple(True if size != 1 else False for size in bias.shape),
        )
        captured[MASK] = bias
    described = tuple((n, x.dim(), _kind(x)) for n, x in captured.items())
    plan = _plan(score, keep, scale, is_causal, mask, described, numbers, True if M <= N else False)
    captures = [captured[n] for n in plan.captures]
    sizes = [{"M": M, "N": N}[n] for n in plan.sizes]
    layout = "bmhd" if q.shape[1] != 1 and q.stride(1) < q.stride(2) else "bhmd"
    texts = (plan.score, plan.keep, -INF, plan.post)
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=q.device) if dropout_p else None
    op = torch.ops.torchflash.attention
    tile_map = _tile_map(q, k, v, captures, sizes, texts)
    out, statistics = op(q, k, v, captures, sizes, *texts, float(dropout_p), seed, layout, "", None, "", tile_map)
    out = out.reshape(*lead, M, v.shape[-1])
    if not return_lse:
        return out
    if dropout_p == 1.0:  # of which the operator makes nothing, not even scores
        with torch.no_grad():
            _, statistics = op(q, k, v, captures, sizes, *texts, 0.0, None, layout, "", None, "", tile_map)
    return out, (statistics[0] + statistics[1].clamp(min=0.0).log()).reshape(*lead, M)


# ------------------------------------------------------------------------------------------------------------ operands


def _operands(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q [B, H, M, D], k [B, Hk, N, D], v [B, Hv, N, Dv], and the leading dims of the result, heads included."""
    for what, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(what, x)
    q, k, v = _autocast(query), _autocast(key), _autocast(value)

    def shapes() -> str:
        return f"got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"

    for what, x in (("query", q), ("key", k), ("value", v)):
        if x.dim() < 2:
            raise ValueError(f"attention(): {what} needs at least the dims [length, dim]; {shapes()}")
        if x.dtype not in DTYPES:
            raise TypeError(f"attention(): {what} must be float16, bfloat16 or float32; got {x.dtype}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention(): query and key must have one last dim, {_differ(q, k, -1)}; {shapes()}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention(): key and value must have one length, {_differ(k, v, -2)}; {shapes()}")
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise TypeError(
            f"attention(): query, key and value must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v)]
    H = heads[0] if enable_gqa else max(heads)
    for what, h in zip(("query", "key", "value"), heads, strict=True):
        if H and not (h and H % h == 0 if enable_gqa else h in (1, H)):
            if enable_gqa:
                advice = f"the {h} heads of {what} must divide the {H} of query"
            else:
                advice = f"the heads of query, key and value must be as many, or 1, not {heads} (see enable_gqa)"
            raise ValueError(f"attention(): {advice}; {shapes()}")
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    except RuntimeError:
        raise ValueError(f"attention(): the dims before the heads do not broadcast; {shapes()}") from None
    rank = max(q.dim(), k.dim(), v.dim())
    lead = (*batch, H) if rank > 2 else ()
    q = q.expand(*batch, H, *q.shape[-2:])
    k, v = (x.expand(*batch, h, *x.shape[-2:]) for x, h in ((k, heads[1]), (v, heads[2])))
    q, k, v = (x.reshape(math.prod(batch), *x.shape[-3:]) if len(batch) != 1 else x for x in (q, k, v))
    return q, k, v, lead


def _check_tensor(what: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"attention(): {what} must be a torch.Tensor; got {type(x).__module__}.{type(x).__name__}")


def _differ(x: Tensor, y: Tensor, dim: int) -> str:
    return f"not {x.shape[dim]} and {y.shape[dim]}"


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _mask(x: Tensor, lead: Sequence[int], M: int, N: int) -> Tensor:
    """The mask with the dims [B, H, M, N] or the last of them, each whole or of size 1."""
    _check_tensor(MASK, x)
    if x.dtype != torch.bool and x.dtype not in DTYPES:
        raise TypeError(f"attention(): attn_mask must be bool, float16, bfloat16 or float32; got {x.dtype}")
    whole = (*lead, M, N)
    fits = 2 <= x.dim() <= len(whole) and all(
        a == b or a == 1 for a, b in zip(x.shape, whole[len(whole) - x.dim() :], strict=True)
    )
    if not fits:
        raise ValueError(f"attention(): attn_mask {list(x.shape)} does not broadcast to [..., H, M, N] = {list(whole)}")
    if x.dim() > 3 and len(lead) > 2:  # several dims fold into b
        batch = lead[:-1]
        x = x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])
    return x


def _capture(n: str, x: Tensor) -> Tensor:
    if x.is_complex():
        raise TypeError(f"attention(): the tensor {n!r} is complex; give its parts")
    return x.float() if x.dtype == torch.float64 else x


def _kind(x: Tensor) -> str:
    return "b" if x.dtype == torch.bool else "f" if x.dtype.is_floating_point else "i"


def _number(n: str, x: Any) -> bool | int | float:
    if isinstance(x, (bool, int, float)):
        value = _constant(x)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"attention(): {n!r} is {value}, beyond int64; pass a float")
        return value
    raise TypeError(f"attention(): {n!r} must be a tensor or a Python number; got {type(x).__name__}")


def _constant(x: Any) -> Any:
    """A number that is part of the program: torch.compile makes another graph for another one."""
    if not torch.compiler.is_compiling():
        return x
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(x)


# ------------------------------------------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Plan:
    """The texts of the operator; which tensors are t0, t1 … and which lengths are z0, z1 … in them."""

    score: str
    keep: str
    post: str
    captures: tuple[str, ...]
    sizes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _planned(
    score: str | None,
    keep: str | None,
    scale: float,
    is_causal: bool,
    mask: tuple[str, tuple[bool, ...]] | None,
    described: tuple[tuple[str, int, str], ...],
    numbers: tuple[tuple[str, bool | int | float], ...],
    square: bool,
) -> Plan:
    known = _Names(scale, described, dict(numbers))
    x = known.read("score", score) if score is not None else build("*", const(scale), name("s"))
    kept = _condition(x)
    if keep is not None:
        condition = known.read("keep", keep)
        _check_kinds(condition, known)
        if "s" in sc.names(condition) or sc.kind(condition, known.kinds) != "b":
            raise ScoreError(f"attention(): keep must be a condition that does not depend on s: {keep!r}")
        kept = build("&", kept, condition)
    if is_causal:
        kept = build("&", kept, build("<=", name("n"), name("m")))
    if mask is not None:
        what, whole = mask
        axes = AXES[4 - len(whole) :]
        index = [name(a) if w else const(0) for a, w in zip(axes, whole, strict=True)]
        entry = load(f"t{known.tensors.index(MASK)}", index)
        if what == "bool":
            kept = build("&", kept, entry)
        else:
            dropped = build("<=", entry, const(-INF))  # so that NaN stays
            x, kept = build("+", x, entry), build("&", kept, build("~", dropped))
    _check_kinds(x, known)
    given = [n for n in (*known.tensors, *dict(numbers)) if n != MASK or mask is None]
    if unused := ", ".join(repr(n) for n in given if n not in known.used):
        raise ValueError(f"attention(): tensors has {unused}, which neither score nor keep names; leave it out")
    post: Expr = name("p")
    if kept is not sc.TRUE:
        x = build("where", kept, x, const(-INF))
        if not _keeps_one(kept, square):
            post = build("where", kept, post, const(0.0))  # a row without any key is 0, not NaN
    if too_large := sc.check_limits(x, post):
        raise ScoreError(f"attention(): the score has {too_large}; precompute a part of it as a tensor")
    positional = any(c.op in sc.COMPARE and all(map(sc.is_int, c.args)) for c in sc.topological(kept))
    texts = [x, kept if positional else None, post]
    used = sc.names(x, post)
    captures = [i for i in range(len(known.tensors)) if f"t{i}" in used]
    sizes = [i for i in range(len(LENGTHS)) if f"z{i}" in used]
    mapping = {f"t{i}": f"t{new}" for new, i in enumerate(captures)}
    mapping |= {f"z{i}": f"z{new}" for new, i in enumerate(sizes)}
    written = ["" if e is None else str(sc.renamed(e, mapping)) for e in texts]
    return Plan(
        written[0], written[1], written[2], tuple(known.tensors[i] for i in captures), tuple(LENGTHS[i] for i in sizes)
    )


def _plan(*arguments: Any) -> Plan:
    """`_planned`, run while tracing where torch.compile traces it: its arguments are constants."""
    import torchflash.kernels  # noqa: F401  registers the operator

    return _planned(*arguments)


# what torch.compiler.assume_constant_result does, but for importing Dynamo
_plan._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _tile_map(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], texts: tuple[str, str, float, str]
) -> list[Tensor]:
    """That of a mask that is made of tensors, for the forward and the backward: alone, either finds its own."""
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *captures))
    if not trains or not captures or any(c.device != q.device for c in captures):
        return []
    exact = q.dtype.itemsize >= 4 or v.dtype.itemsize >= 4
    wanted = _request(texts, tuple(_kind(c) for c in captures), tuple(c.dim() for c in captures), exact, q.device.type)
    if wanted is None:
        return []
    mine, sizes = [captures[i] for i in wanted.captures], [sizes[i] for i in wanted.sizes]
    lines = [q.shape[0] if "b" in wanted.axes else 1, q.shape[1] if "h" in wanted.axes else 1]
    found: list[Tensor] = torch.ops.torchflash.tile_map(
        mine, sizes, [*lines, q.shape[2], k.shape[2]], *wanted[3:]
    )
    return found


def _request(
    texts: tuple[str, str, float, str], kinds: tuple[str, ...], ranks: tuple[int, ...], exact: bool, device: str
) -> Request | None:
    """Run while tracing, as `_plan`."""
    from torchflash.kernels import mask, program

    if not mask.wanted_on(torch.device(device)):
        return None
    return mask.request(program.read(*texts, kinds), exact, tuple((False,) * rank for rank in ranks), few=False)


_request._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Names:
    """What the names in the texts stand for: `tensors` are t0, t1 … and `LENGTHS` z0, z1 for the time being."""

    def __init__(
        self, scale: float, described: Sequence[tuple[str, int, str]], numbers: dict[str, bool | int | float]
    ) -> None:
        self.tensors = [n for n, _, _ in described]
        self.ranks = {n: rank for n, rank, _ in described}
        self.written = {f"t{i}": n for i, n in enumerate(self.tensors)} | {f"z{i}": n for i, n in enumerate(LENGTHS)}
        self.used: set[str] = set()  # filled by `read`
        self.kinds = {f"t{i}": kind for i, (_, _, kind) in enumerate(described)}
        self.taken = {"s", *AXES, *LENGTHS, "scale", "inf", "nan"} | sc.FUNCTIONS
        for n in (*self.tensors, *numbers):
            if not n.isidentifier() or n in self.taken or (n == MASK and n in numbers):
                raise ScoreError(f"attention(): {n!r} cannot name a tensor or number; choose another name")
        values: dict[str, ast.expr] = {n: ast.Name(f"z{i}") for i, n in enumerate(LENGTHS)}
        values |= {n: ast.Constant(v) for n, v in {"scale": scale, **numbers}.items()}
        # as if the text began with them: "M = z0; N = z1; scale = 0.125; …"
        self.prelude: list[ast.stmt] = [ast.Assign([ast.Name(n)], v, lineno=0) for n, v in values.items()]
        self.plain = {"s", *AXES, "inf", "nan", *values}

    def read(self, what: str, text: str) -> Expr:
        """The expression in `text`; a ScoreError says where and why it is none."""
        if not isinstance(text, str):
            raise TypeError(f"attention(): {what} must be a text in the score language; got {type(text).__name__}")
        try:
            module = ast.parse(text.strip())
        except SyntaxError as e:
            raise ScoreError(f"attention(): {what}, line {e.lineno}, column {e.offset}: {e.msg}: {text!r}") from None
        except (ValueError, RecursionError) as e:
            raise ScoreError(f"attention(): {what}: {e}: {text!r}") from None
        if not module.body or not isinstance(module.body[-1], ast.Expr):
            raise ScoreError(f"attention(): {what} must end with an expression: {text!r}")
        module = _Translate(self, what).visit(module)
        module.body[:0] = self.prelude
        try:
            return _folded(sc.parse(ast.unparse(ast.fix_missing_locations(module))))
        except ScoreError as e:
            raise ScoreError(f"attention(): {what}: {e}") from None


BITWISE: dict[type, str] = {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}


def _binds(op: str) -> str:
    return f"{op} binds tighter than <=, ==, …; put comparisons in parentheses: (a <= b) {op} (c <= d)"


class _Translate(ast.NodeTransformer):
    """Tensors by name become loads of t0, t1 …; a name that nobody knows is an error."""

    def __init__(self, names: _Names, what: str) -> None:
        self.names, self.what, self.own = names, what, set[str]()

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)
        self.own |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id not in sc.FUNCTIONS:
            raise self.error(node.func, f"unknown function {node.func.id!r}", sc.FUNCTIONS)
        if isinstance(node.func, ast.Name) and len(node.args) != (arity := sc.ARITY.get(node.func.id, 1)):
            raise self.error(node, f"{node.func.id} takes {arity} argument{'s' if arity > 1 else ''}")
        node.args = [self.visit(a) for a in node.args]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1:
            bitwise = [BITWISE[type(x.op)] for x in (node.left, *node.comparators)
                       if isinstance(x, ast.BinOp) and type(x.op) in BITWISE]  # fmt: skip
            why = _binds(bitwise[0]) if bitwise else "comparisons do not chain; write (a <= b) & (b <= c)"
            raise self.error(node, f"{ast.unparse(node)!r}: {why}")
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        raise self.error(node, f"{ast.unparse(node)!r}: write & and |, with comparisons in parentheses")

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        raise self.error(node, f"{ast.unparse(node)!r}: write where(condition, x, y)")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not):
            raise self.error(node, f"{ast.unparse(node)!r}: write ~")
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.value, ast.Name):
            raise self.error(node, f"{ast.unparse(node)!r}: only tensors can be indexed")
        n = node.value.id
        if n not in self.names.tensors or n in self.own:
            raise self.error(node.value, f"unknown tensor {n!r}", self.names.tensors, self.passed(n))
        self.names.used.add(n)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(indices) != self.names.ranks[n]:
            raise self.error(node, f"{n} has {self.names.ranks[n]} dims and is indexed by {len(indices)}")
        node.value = ast.Name(f"t{self.names.tensors.index(n)}")
        node.slice = self.visit(node.slice)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        n = node.id
        if n in self.own:
            return node
        self.names.used.add(n)
        if n in self.names.plain:
            return node
        if n in self.names.tensors:
            if self.names.ranks[n]:
                raise self.error(node, f"{n} has {self.names.ranks[n]} dims and is not indexed")
            return ast.parse(f"t{self.names.tensors.index(n)}[()]", mode="eval").body
        raise self.error(node, f"unknown name {n!r}", self.names.plain | set(self.names.tensors), self.passed(n))

    def passed(self, n: str) -> str:
        """How to make a name known that may be."""
        return "" if n in self.names.taken | self.own or n == MASK else f"; pass it as tensors={{{n!r}: …}}"

    def error(self, node: ast.expr, text: str, known: Iterable[str] = (), advice: str = "") -> ScoreError:
        known = sorted(n for n in known if n != MASK)
        among = (f"; known: {', '.join(known)}" if known else "") + advice
        where = f"line {node.lineno}, column {node.col_offset + 1}"
        return ScoreError(f"attention(): {self.what}, {where}: {text}{among}")


def _folded(e: Expr) -> Expr:
    """Built again, constants folded."""
    memo: dict[Expr, Expr] = {}
    for x in sc.topological(e):
        args = [memo[a] for a in x.args]
        memo[x] = load(x.value, args) if x.op == "load" else build(x.op, *args) if args else x
    return memo[e]


def _check_kinds(x: Expr, known: _Names) -> None:
    memo: dict[Expr, Any] = {}

    def text(e: Expr) -> str:
        return repr(str(sc.renamed(e, known.written)))

    for e in sc.topological(x):
        kind = sc.kind(e, known.kinds, memo)
        for a in e.args if e.op in sc.COMPARE else ():
            if a.op in BITWISE.values() and len({memo[y] for y in a.args}) > 1:
                raise ScoreError(f"attention(): {text(e)}: {_binds(a.op)}")
        if (e.op == "where" and memo[e.args[0]] != "b") or (e.op in ("&", "|", "^", "~") and kind == "f"):
            hint = f"; {_binds(e.op)}" if e.op in BITWISE.values() else ""
            raise ScoreError(f"attention(): a condition must be a bool, such as x != 0, not a number: {text(e)}{hint}")
        if e.op == "load" and any(memo[i] != "i" for i in e.args):
            raise ScoreError(f"attention(): tensors are indexed by integers; convert by int(): {text(e)}")


def _condition(x: Expr) -> Expr:
    """Where a score is not -inf as far as it is written as where(condition, …, -inf), alone or in a sum."""
    match x.op:
        case "where":
            c, a, b = x.args
            if b.op == "const" and b.value == -INF:
                return build("&", c, _condition(a))
            if a.op == "const" and a.value == -INF:
                return build("&", build("~", c), _condition(b))
        case "+":
            return build("&", *map(_condition, x.args))
        case "-":
            return _condition(x.args[0])
    return sc.TRUE


def _keeps_one(kept: Expr, square: bool) -> bool:
    """Whether every query certainly keeps a key: the first one, or, where there are at least as many keys as queries
    (`square`), its own."""

    def at(n: Expr) -> bool:
        moved = sc.substitute(kept, {name("n"): n}, _same)
        if sc.loads(moved):
            return False
        env = {z: (1, _LARGE) for z in sc.names(moved) if z.startswith("z")}
        return bool(sc.bounds(moved, {**dict.fromkeys(AXES, (0, _LARGE)), **env})[1])

    return at(const(0)) or (square and at(name("m")))


_LARGE = 1 << 40


def _same(op: str, *args: Expr) -> Expr:
    """Builds again, knowing that x - x is 0 and x <= x holds."""
    if len(args) == 2 and args[0] is args[1] and sc.is_int(args[0]):
        if op == "-":
            return const(0)
        if op in sc.COMPARE:
            return const(op in ("<=", ">=", "=="))
    return build(op, *args)
