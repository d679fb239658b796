"""Index algebra: which element of a source an element of a view is.

An index is a sympy integer expression over *axes* (symbols with a known size), size symbols of the traced graph, and
opaque symbols that stand for an index read from a tensor. View operations are maps on such indices; divisions and
remainders fold where the ranges of the axes decide them, so that reshaping there and back is the identity again.

    view (B*H, M) of (B, H, M) at (i, m)      ->  (i // H, i % H, m)
    view (B, H, M) of (B*H, M) at (b, h, m)   ->  (b*H + h, m)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._sympy.functions import FloorDiv, PythonMod

from torchflash import score
from torchflash.score import Expr

Index: TypeAlias = sympy.Expr
ZERO = sympy.Integer(0)
ONE = sympy.Integer(1)

_SIZES: dict[sympy.Symbol, Index] = {}  # axis -> its size
_OPAQUE: dict[sympy.Symbol, Expr] = {}  # index read from a tensor -> the expression that reads it
_NAMES: dict[str, sympy.Symbol] = {}  # axes and size symbols by name


def size_of(value: Any) -> Index:
    """A size of the traced graph (int or SymInt) as sympy."""
    if isinstance(value, torch.SymInt):
        size = exact_quotients(sympy.sympify(value.node.expr))
        _know(size.free_symbols)
        return size
    return sympy.Integer(int(value))


@functools.lru_cache(maxsize=65536)
def exact_quotients(e: Index) -> Index:
    """2 * s * s // s is 2 * s."""
    for x in e.atoms(FloorDiv):
        quotient = sympy.expand(sympy.cancel(x.args[0] / x.args[1]))
        if all(sympy.denom(term) == 1 for term in sympy.Add.make_args(quotient)):
            e = e.subs(x, quotient)
    return e


def shape_of(tensor: torch.Tensor) -> tuple[Index, ...]:
    return tuple(size_of(s) for s in tensor.shape)


def axis(role: str, size: Index) -> Index:
    """The axis `role` running over `range(size)`. An axis of size 1 keeps its name, so that its role can be told."""
    a = _axis(role, size)
    _SIZES[a] = size
    _NAMES[a.name] = a
    return a


@functools.cache
def _axis(role: str, size: Index) -> Index:
    return sympy.Symbol(f"{role}[{size}]", integer=True, nonnegative=True)


def axis_size(symbol: Index) -> Index:
    return _SIZES[symbol]


def at(size: Index, i: Index) -> Index:
    """Index `i` in a dim of `size`: 0 where there is only one, unless `i` is the axis of size 1 that names it."""
    return i if size != 1 or _SIZES.get(i) == 1 else ZERO


def is_axis(e: Index) -> bool:
    return e in _SIZES


def affine(e: Index) -> tuple[Index, Index, Index]:
    """(start, step, along) such that `e` is start + step * along, with an `along` of coefficient 1 or, of a constant,
    0."""
    terms = sympy.Add.make_args(sympy.expand(e))
    moving = _moving(terms)
    start = sympy.expand(e - sum(moving))
    if not moving:
        return start, ONE, ZERO
    varying = [f for t in moving for f in _moving(sympy.Mul.make_args(t))]
    return (start, moving[0] / varying[0], varying[0]) if len(varying) == 1 else (start, ONE, sum(moving))


def _moving(terms: Sequence[Index]) -> list[Index]:
    """Those that vary with an axis."""
    return [t for t in terms if any(x in _SIZES or x in _OPAQUE for x in t.free_symbols)]


def extent(e: Index) -> Index | None:
    """How many values an axis, or axis // group in whole groups, takes from 0 on; None of another index."""
    if e in _SIZES:
        return _SIZES[e]
    if isinstance(e, FloorDiv) and e.args[0] in _SIZES:
        groups, rest = divmod_index(_SIZES[e.args[0]], e.args[1])
        return groups if rest == 0 else None
    return None


def axes(e: Index) -> frozenset[Index]:
    """The axes an index depends on, through opaque indices too."""
    found: set[Index] = set()
    for x in e.free_symbols:
        if x in _SIZES:
            found.add(x)
        elif x in _OPAQUE:
            found |= expr_axes(_OPAQUE[x])
    return frozenset(found)


def opaque(e: Expr, size: Index) -> Index:
    """The index that an integer expression reads from a tensor; it lies in [0, size)."""
    a = sympy.Symbol(f"<{id(e)}:{size}>", integer=True, nonnegative=True)
    _OPAQUE[a] = e
    return a


# ------------------------------------------------------------------------------------------------------------ ranges


@functools.lru_cache(maxsize=65536)
def nonnegative(e: Index) -> bool:
    """Certainly >= 0, for axes within their sizes and every size symbol >= 1."""
    if e.is_number:
        return bool(e >= 0)
    low = bounds(e)[0]
    if low is None:
        return False
    if low.is_number:
        return bool(low >= 0)
    shifted = sympy.expand(low.subs({x: x + 1 for x in low.free_symbols}, simultaneous=True))
    return all(c.is_number and c >= 0 for c in (t.as_coeff_Mul()[0] for t in sympy.Add.make_args(shifted)))


@functools.lru_cache(maxsize=65536)
def bounds(e: Index) -> tuple[Index | None, Index | None]:
    """Inclusive (low, high) free of axes; None where unknown."""
    if e.is_number or not any(x in _SIZES or x in _OPAQUE for x in e.free_symbols):
        return e, e
    if e in _SIZES:
        return ZERO, _SIZES[e] - 1
    if e in _OPAQUE:
        return ZERO, None
    if isinstance(e, FloorDiv):
        low, high = bounds(e.args[0])
        d = e.args[1]
        return (None if low is None else floordiv(low, d)), (None if high is None else floordiv(high, d))
    if isinstance(e, PythonMod):
        return ZERO, e.args[1] - 1
    low = high = ZERO
    for term in sympy.Add.make_args(sympy.expand(e)):
        moving = _moving(sympy.Mul.make_args(term))
        if not moving:
            low = None if low is None else low + term
            high = None if high is None else high + term
            continue
        if len(moving) > 1:
            return None, None
        coefficient = term / moving[0]
        if coefficient == 1 and moving[0] is e:
            return None, None
        a, b = bounds(moving[0])
        if coefficient.is_negative:
            a, b = b, a
        elif not coefficient.is_nonnegative:
            return None, None
        low = None if low is None or a is None else low + coefficient * a
        high = None if high is None or b is None else high + coefficient * b
    return (None if low is None else sympy.expand(low)), (None if high is None else sympy.expand(high))


def guarded(tensor: torch.Tensor, relation: sympy.Basic) -> bool:
    """Whether a relation between symbolic sizes, such as those of `tensor`, holds for this trace, under a guard."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    environment = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)
    try:
        return environment is not None and bool(environment.evaluate_expr(relation))
    except GuardOnDataDependentSymNode:
        return False


# ---------------------------------------------------------------------------------------------------- division, views


@functools.lru_cache(maxsize=65536)
def divmod_index(e: Index, d: Index) -> tuple[Index, Index]:
    """(e // d, e % d) for a positive d."""
    e = sympy.expand(e)
    if d == 1:
        return e, ZERO
    if e.is_number and d.is_number:
        return sympy.Integer(int(e) // int(d)), sympy.Integer(int(e) % int(d))
    quotient = rest = ZERO
    for term in sympy.Add.make_args(e):
        ratio = sympy.cancel(term / d)
        if sympy.denom(ratio) == 1:
            quotient += ratio
        else:
            rest += term
    if rest == 0:
        return quotient, ZERO
    high = bounds(rest)[1]
    if nonnegative(rest) and high is not None and nonnegative(sympy.expand(d - 1 - high)):
        return quotient, rest
    constant = rest.as_coeff_Add()[0]
    terms = sympy.Add.make_args(rest - constant)
    common = functools.reduce(math.gcd, map(_coefficient, terms), _coefficient(d))
    if common > 1 and constant.is_Integer:
        # (2 x + 1) // 4 is x // 2
        left = constant % common
        outer, inner = divmod_index(sympy.expand((rest - left) / common), d / common)
        return quotient + outer, sympy.expand(common * inner + left)
    return quotient + FloorDiv(rest, d), PythonMod(rest, d)


def _coefficient(e: Index) -> int:
    """Of a product; 1 where it is a fraction, which no integer divides."""
    c = e.as_coeff_Mul()[0]
    return int(c) if c.is_Integer else 1


@functools.lru_cache(maxsize=65536)
def rejoin(e: Index) -> Index:
    """x // d * d + x % d is x again."""
    e = sympy.expand(e)
    changed = True
    while changed and e.is_Add:
        changed = False
        for term in e.args:
            _coefficient, rest = term.as_coeff_Mul()
            rests = [f for f in sympy.Mul.make_args(rest) if isinstance(f, PythonMod)]
            if len(rests) != 1:
                continue
            (x, d), factor = rests[0].args, term / rests[0]
            whole = sympy.expand(factor * d * FloorDiv(x, d))
            if whole in e.args:
                e = sympy.expand(e - term - whole + factor * x)
                changed = True
                break
    return e


def floordiv(e: Index, d: Index) -> Index:
    return divmod_index(e, d)[0]


def _product(sizes: Sequence[Index]) -> Index:
    return sympy.expand(functools.reduce(operator.mul, sizes, ONE))


@functools.lru_cache(maxsize=65536)
def reshape(src: tuple[Index, ...], dst: tuple[Index, ...], index: tuple[Index, ...]) -> tuple[Index, ...]:
    """The index into a tensor of shape `src` of what its row-major reshape to `dst` has at `index`."""
    out = [ZERO] * len(src)
    left = [k for k, s in enumerate(src) if s != 1]
    right = [k for k, s in enumerate(dst) if s != 1]
    # axes of size 1 are index 0 wherever they are put: keep them between the same neighbours, in order
    ones = [(sum(r < k for r in right), index[k]) for k, s in enumerate(dst) if s == 1 and _SIZES.get(index[k]) == 1]
    for k, s in enumerate(src):
        if s == 1 and ones:
            before = sum(x < k for x in left)
            chosen = next((o for o in ones if o[0] == before), ones[0] if len(left) != len(right) else None)
            if chosen is not None:
                ones.remove(chosen)
                out[k] = chosen[1]
    i = j = 0
    while i < len(left) or j < len(right):
        # the smallest group of source dims and of target dims that hold the same number of elements
        a, b = left[i : i + 1], right[j : j + 1]
        while a and b and _product([src[k] for k in a]) != _product([dst[k] for k in b]):
            pa, pb = _product([src[k] for k in a]), _product([dst[k] for k in b])
            grow_left = nonnegative(sympy.expand(pb - pa)) if i + len(a) < len(left) else False
            if not grow_left and j + len(b) < len(right):
                b = right[j : j + len(b) + 1]
            elif i + len(a) < len(left):
                a = left[i : i + len(a) + 1]
            else:
                break
        if not a or not b or _product([src[k] for k in a]) != _product([dst[k] for k in b]):
            a, b = left[i:], right[j:]
        i, j = i + len(a), j + len(b)
        linear, stride = ZERO, ONE
        for k in reversed(b):
            linear += index[k] * stride
            stride *= dst[k]
        linear = rejoin(linear)
        for k in reversed(a[1:]):
            linear, out[k] = divmod_index(linear, src[k])
        if a:
            out[a[0]] = sympy.expand(linear)
    return tuple(out)


def fold(axes: Sequence[Index]) -> Index:
    """The index of several axes folded into one dim, the last one fastest."""
    linear = ZERO
    for a in axes:
        linear = linear * _SIZES[a] + a
    return sympy.expand(linear)


def broadcast(shape: Sequence[Index], index: Sequence[Index]) -> tuple[Index, ...]:
    """The index into an operand of `shape` that broadcasts against a result read at `index`."""
    tail = index[len(index) - len(shape) :]
    return tuple(at(s, i) for s, i in zip(shape, tail, strict=True))


# ------------------------------------------------------------------------------------- between indices and expressions


@functools.lru_cache(maxsize=65536)
def to_expr(e: Index) -> Expr:
    """An index as an integer expression of the score language (axes and sizes by their symbol's name)."""
    if e.is_Integer:
        return score.const(int(e))
    if e.is_Symbol:
        return _OPAQUE[e] if e in _OPAQUE else score.name(e.name)
    if isinstance(e, FloorDiv):
        return score.call("//", to_expr(e.args[0]), to_expr(e.args[1]))
    if isinstance(e, PythonMod):
        return score.call("%", to_expr(e.args[0]), to_expr(e.args[1]))
    if e.is_Add:
        positive = [t for t in e.args if not _negative(t)]
        negative = [t for t in e.args if _negative(t)]
        positive.sort(key=lambda t: (t.is_number, str(t)))
        if positive:
            first, *rest = positive
            out = to_expr(first)
        else:
            first, *negative = negative
            out, rest = to_expr(first), []
        for t in rest:
            out = score.call("+", out, to_expr(t))
        for t in sorted(negative, key=lambda t: (t.is_number, str(t))):
            out = score.call("-", out, to_expr(-t))
        return out
    if e.is_Mul:
        coefficient, rest = e.as_coeff_Mul()
        if coefficient == -1:
            return score.call("neg", to_expr(rest))
        if coefficient.is_Integer:
            factors = [score.const(int(coefficient))] if coefficient != 1 else []
            factors += [to_expr(f) for f in sympy.Mul.make_args(rest)]
            return functools.reduce(lambda a, b: score.call("*", a, b), factors)
    if e.is_Pow and e.exp.is_Integer and e.exp > 0:
        return functools.reduce(lambda a, b: score.call("*", a, b), [to_expr(e.base)] * int(e.exp))
    if e.func.__name__ in ("Max", "Min") and len(e.args) >= 2:
        op = "maximum" if e.func.__name__ == "Max" else "minimum"
        return functools.reduce(lambda a, b: score.call(op, a, b), [to_expr(a) for a in e.args])
    raise NotInteger(e)


class NotInteger(ValueError):
    """A size expression the score language has no words for."""


def _negative(t: Index) -> bool:
    return bool(t.as_coeff_Mul()[0] < 0)


@functools.lru_cache(maxsize=65536)
def from_expr(e: Expr) -> Index | None:
    """The index an integer expression is, or None when it reads a tensor or needs another operation."""
    match e.op:
        case "const" if isinstance(e.value, int) and not isinstance(e.value, bool):
            return sympy.Integer(e.value)
        case "name" if e.value not in ("s", "p", "g"):
            return symbol(e.value)
        case "+" | "-" | "*" | "//" | "%":
            a, b = (from_expr(x) for x in e.args)
            if a is None or b is None:
                return None
            if e.op in ("//", "%"):
                return divmod_index(a, b)[e.op == "%"] if nonnegative(b - 1) else None
            return sympy.expand({"+": operator.add, "-": operator.sub, "*": operator.mul}[e.op](a, b))
        case "neg":
            a = from_expr(e.args[0])
            return None if a is None else -a
    return None


@functools.lru_cache(maxsize=65536)
def expr_axes(e: Expr) -> frozenset[Index]:
    """The axes an expression depends on."""
    found: set[Index] = set()
    for x in score.topological(e):
        if x.op == "name" and (s := symbol(x.value)) is not None and s in _SIZES:
            found.add(s)
        elif x.op in ("dot", "reduce", "softmax"):
            for i in x.value.index:
                found |= axes(i)
    return frozenset(found)


def compare(op: str, a: Expr, b: Expr) -> Expr | None:
    """A comparison of two indices, folded where ranges decide it and with both sides tidied; None if not both
    indices."""
    x, y = from_expr(a), from_expr(b)
    if x is None or y is None:
        return None
    difference = sympy.expand(x - y)
    at_least, at_most = nonnegative(difference), nonnegative(sympy.expand(-difference))
    above, below = nonnegative(sympy.expand(difference - 1)), nonnegative(sympy.expand(-difference - 1))
    table = {"<=": (at_most, above), "<": (below, at_least), ">=": (at_least, below), ">": (above, at_most),
             "==": (at_least and at_most, above or below), "!=": (above or below, at_least and at_most)}  # fmt: skip
    certain, impossible = table[op]
    if certain or impossible:
        return score.const(bool(certain))
    return score.call(op, to_expr(x), to_expr(y))


def replace_axis(e: Expr, axis: Index, by: Index) -> Expr:
    """`e` with `axis` replaced by the index `by`."""
    memo: dict[Expr, Expr] = {}
    for x in score.topological(e):
        i = from_expr(x) if x.op != "load" else None
        if i is not None:
            memo[x] = to_expr(sympy.expand(i.subs(axis, by))) if axis in i.free_symbols else x
            continue
        args = [memo[a] for a in x.args]
        if x.op == "load":
            memo[x] = score.load(x.value, args)
        elif x.op in score.COMPARE:
            memo[x] = compare(x.op, *args) or score.build(x.op, *args)
        else:
            memo[x] = score.build(x.op, *args) if args else x
    return memo[e]


def _know(sizes: Iterable[sympy.Symbol]) -> None:
    for s in sizes:
        if _NAMES.setdefault(s.name, s) != s:
            _NAMES[s.name] = s
            _forget()


def _forget() -> None:
    """What was derived from a size of the same name in another graph, which was known to be something else."""
    for f in (exact_quotients, nonnegative, bounds, divmod_index, rejoin, reshape, to_expr, from_expr, expr_axes):
        f.cache_clear()


def symbol(text: str) -> Index | None:
    """The axis or size symbol of a name."""
    return _NAMES.get(text)
