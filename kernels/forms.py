"""A score program in the form the kernels run: a factor outside, and what is left of it in a tile that the mask spares.

    where((n <= m) & t0[b, n], 0.125 * s, -inf)
      ->  factor 0.125, inner where((n <= m) & t0[b, n], s, -inf), body s, plain (n <= m) & t0[b, n]

The factor goes into the exponent, exp2(factor * log2(e) * (inner - its maximum)), and into dQ and dK once at the end. A
tile is *plain* where `plain` holds everywhere: there the inner program is `body`, and the mask is neither computed nor
loaded.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchflash import score as sc
from torchflash.kernels.program import P, Program, fold
from torchflash.score import Expr

LOG2E = 1.4426950408889634
MASKED = -100.0  # a branch of at most this is a mask, not a score
HUGE = 1e20
LARGEST = 3.4028234663852886e38
FAR = 2.0**100  # stands for what is huge: times any exponent it is exact, so that masked rows are exactly even
NEAR = 1 << 22  # the size of integers whose differences are those of float32 with as many bits of mantissa
MODERATE = 1e3  # half an ulp of a base below this does not show in half precision


def float32(v: float) -> float:
    """`v` rounded to float32; infinite where that is beyond it."""
    return ctypes.c_float(v).value


@dataclass(frozen=True, eq=False)
class Form:
    """`program.score` = factor * inner, and inner = body where `plain` holds."""

    program: Program
    factor: float
    inner: Expr
    body: Expr
    plain: Expr | None  # None: no tile is known to be plain, or all are and there is no mask
    fill: float  # what of the scores is not kept is at most this
    far_fill: float  # the same while what is huge is FAR
    huge: float  # what FAR stands for in the scores; inf where nothing does
    near: frozenset[Expr] = frozenset()  # differences of integers of which those in plain tiles are less than NEAR
    post: Expr | None = None  # what kernels do to probabilities
    zero: bool = False  # a row without keys is 0: that was all that `program.post` did
    exact: bool = False  # the exponent is a difference times log2(e), which nothing finite overflows
    joint: bool = False  # maximum and sum of a row fit into one logarithm

    @property
    def exponent(self) -> float:
        """factor * log2(e), rounded as the kernels round it."""
        return float32(float32(self.factor) * float32(LOG2E))


@functools.lru_cache(maxsize=4096)
def form(program: Program, exact: bool) -> Form:
    """The form of a program; `exact` keeps the scores as they are, for operands whose own rounding would not hide
    another order of multiplication."""
    masks, huge = _huge_masks(program.score), _huge_value(program.score)
    # Two would be as one, and what float32 cannot hold is infinite.
    exact = exact or masks > 1 or not abs(huge) <= LARGEST
    factor = 1.0 if exact else float32(_factor(program.score))
    inner = program.score if exact else _divided(program.score, factor)
    if not exact and (not _moderate(inner, factor) or factor > MODERATE):
        exact, factor, inner = True, 1.0, program.score
    stands = not exact and any(x.op == "const" and abs(x.value) == FAR for x in sc.topological(inner))
    far_fill = program.fill if exact else _scaled(program.fill, factor) * factor
    assumptions = _Assumptions(program)
    body = assumptions.apply(inner) if program.keep is not None else inner
    conditions = assumptions.conditions()
    near = _differences(body, program.kind_map) if conditions else ()
    for x in dict.fromkeys(a for e in near for a in e.args):
        conditions += [sc.build("<", x, sc.const(NEAR)), sc.build("<=", sc.const(-NEAR), x)]
    zero = program.post is not None and _zeroes_empty_rows(program.post, program.score)
    return Form(
        program=program,
        factor=factor,
        inner=inner,
        body=body,
        plain=functools.reduce(lambda a, b: sc.build("&", a, b), conditions) if conditions else None,
        fill=_raised(program.fill),
        far_fill=_raised(far_fill),
        huge=float32(huge) if stands else math.inf,
        near=frozenset(near),
        post=None if zero else program.post,
        zero=zero,
        exact=exact,
        joint=not exact and not stands,
    )


def _differences(e: Expr, kinds: dict[str, str]) -> list[Expr]:
    """x - y in what of `e` is float(x - y) of loaded integers, each along one of two axes."""
    return [
        x.args[0]
        for x in sc.topological(e)
        if x.op == "float" and sc.loads(x) and sc.kind(x.args[0], kinds) == "i" and is_difference(x.args[0])
        and {"m", "n"} <= sc.names(x)
    ]


def is_difference(e: Expr) -> bool:
    """Whether `e` is x - y, with x and y vectors at most."""
    return e.op == "-" and not any({"m", "n"} <= sc.names(a) for a in e.args)


def spans(loads: Sequence[Expr], blocks: tuple[int, int]) -> bool:
    """Whether one of the loads has elements of its own for each row and key of a tile."""
    return any({"m", "n"} <= sc.names(x) and not same_in_tile(x, blocks, False) for x in loads)


def same_in_tile(e: Expr, blocks: tuple[int, int], rows: bool) -> bool:
    """Whether `e` is the same in all of a tile, or in each of its `rows`: indices are in it divided by multiples of
    `blocks` alone."""
    for name, block in zip(("n",) if rows else ("m", "n"), blocks[::-1] if rows else blocks, strict=False):
        if e is sc.name(name):
            return False
        if e.op == "//" and e.args[0] is sc.name(name) and e.args[1].op == "const":
            return bool(e.args[1].value > 0 and e.args[1].value % block == 0)
    return all(same_in_tile(a, blocks, rows) for a in e.args)


def _raised(fill: float) -> float:
    """A little more than any fill can be after its roundings."""
    return fill + abs(fill) * 2.0**-20 if math.isfinite(fill) else fill


def _zeroes_empty_rows(post: Expr, score: Expr) -> bool:
    """Whether `post` is where(kept, p, 0.0) for all that the score keeps: elsewhere p is 0 already, but in a row that
    keeps nothing, where it is NaN; and a row that is NaN for another reason, as of another mask, keeps something."""
    if post.op != "where":
        return False
    condition, a, b = post.args
    if b is P:
        condition, a, b = sc.build("~", condition), b, a
    return a is P and b.op == "const" and b.value == 0.0 and _infinite_without(condition, score)


def _infinite_without(kept: Expr, score: Expr) -> bool:
    """Whether the score is -inf, or NaN, wherever `kept` does not hold, and nowhere else unless `s` is infinite."""
    if score.op == "where":
        condition, a, b = score.args
        if a.op == "const":
            condition, a, b = sc.build("~", condition), b, a
        return condition is kept and b.op == "const" and b.value == -math.inf and _finite(a, kept)
    if score.op == "+":
        for x, other in (score.args, score.args[::-1]):
            if kept is _above(x) or _infinite_without(kept, x):
                return _finite(other, kept)
    return False


def _above(x: Expr) -> Expr:
    return sc.build("~", sc.build("<=", x, sc.const(-math.inf)))


def _finite(e: Expr, kept: Expr) -> bool:
    """Whether `e` is above -inf wherever `kept` holds and `s` is finite."""
    facts, stack = set(), [kept]
    while stack:
        fact = stack.pop()
        facts.add(fact)
        stack += fact.args if fact.op == "&" else ()

    def finite(x: Expr) -> bool:
        if _above(x) in facts:
            return True
        match x.op:
            case "const":
                return abs(x.value) <= HUGE
            case "name":
                return True
            case "where":
                condition, a, b = x.args
                return (sc.build("~", condition) in facts or finite(a)) and (condition in facts or finite(b))
            case "*" if any(map(_number, x.args)):
                return all(_number(a) or finite(a) for a in x.args)
            case "/" if _number(x.args[1]):
                return finite(x.args[0])
            case "+" | "-" | "neg" | "abs" | "float" | "minimum" | "maximum" | "tanh" | "sigmoid":
                return all(map(finite, x.args))
        return False

    return finite(e)


def _number(e: Expr) -> bool:
    """Made of constants and sizes alone."""
    of_sizes = all(n.startswith("z") for n in sc.names(e)) and not sc.loads(e)
    return of_sizes and all(0 < abs(x.value) <= HUGE for x in sc.topological(e) if x.op == "const")


# ------------------------------------------------------------------------------------------------------------- factor


def _factor(e: Expr) -> float:
    """The positive constant that multiplies the whole score, through masks; 1 where there is none."""
    match e.op:
        case "*" | "/":
            number, other = _by_number(e)
            if number is not None:
                return (number if e.op == "*" else 1.0 / number) * _factor(other)
        case "where":
            constant, other = _masked(e)
            if constant is not None:
                return _factor(other)
        case "+":
            mask, other = _added_mask(e)
            if mask is not None:
                return _factor(other)
    return 1.0


def _divided(e: Expr, factor: float) -> Expr:
    """`e` without the `factor` that multiplies it, and what is huge in its masks as FAR."""
    if e.op == "where":
        constant, other = _masked(e)
        if constant is None:
            return e
        inner, filled = _divided(other, factor), sc.const(_scaled(float(constant.value), factor))
        branches = (filled, inner) if e.args[1] is constant else (inner, filled)
        return fold(sc.call("where", e.args[0], *branches))
    if e.op == "+":
        mask, other = _added_mask(e)
        if mask is None:
            return e
        condition, *values = mask.args
        mask = sc.call("where", condition, *(sc.const(_scaled(float(x.value), factor)) for x in values))
        return fold(sc.call("+", _divided(other, factor), mask))
    if factor == 1.0:
        return e
    number, other = _by_number(e)
    assert number is not None
    rest = factor / number if e.op == "*" else factor * number
    return _divided(other, 1.0 if abs(rest - 1.0) < 1e-6 else rest)


def _huge_masks(e: Expr) -> int:
    """How many masks add or fill in what is huge but finite; one that is used twice counts twice."""
    count: dict[Expr, int] = {}
    for x in sc.topological(e):
        count[x] = sum(count[a] for a in x.args) + (x.op == "where" and any(map(_huge, x.args)))
    return count[e]


def _huge_value(e: Expr, factor: float = 1.0) -> float:
    """The value in `factor * e` of what is huge in the mask that `_divided` would make FAR; 0 where nothing is."""
    match e.op:
        case "*" | "/":
            number, other = _by_number(e)
            if number is not None:
                return _huge_value(other, factor * number if e.op == "*" else factor / number)
        case "where":
            constant, other = _masked(e)
            if constant is not None:
                return factor * float(constant.value) if _huge(constant) else _huge_value(other, factor)
        case "+":
            mask, other = _added_mask(e)
            if mask is not None:
                found = [float(x.value) for x in mask.args[1:] if _huge(x)]
                return factor * found[0] if found else _huge_value(other, factor)
    return 0.0


def _huge(e: Expr) -> bool:
    return e.op == "const" and HUGE < abs(e.value) < math.inf


def _added_mask(e: Expr) -> tuple[Expr | None, Expr]:
    """(where(c, 0.0, -inf), x) of their sum: what is masked is infinite, or so huge that x is lost in it."""
    for mask, other in (e.args, e.args[::-1]):
        if mask.op == "where" and all(x.op == "const" for x in mask.args[1:]):
            values = sorted(float(x.value) for x in mask.args[1:])
            if values[1] == 0.0 and values[0] < -HUGE:
                return mask, other
    return None, e


def _by_number(e: Expr) -> tuple[float | None, Expr]:
    a, b = e.args
    for number, other in ((a, b), (b, a)) if e.op == "*" else ((b, a),):
        if number.op == "const" and 0 < number.value < math.inf:
            return float(number.value), other
    return None, e


def _masked(e: Expr) -> tuple[Expr | None, Expr]:
    _, a, b = e.args
    return (a, b) if a.op == "const" else (b, a) if b.op == "const" else (None, e)


def _scaled(v: float, factor: float) -> float:
    if HUGE < abs(v) < math.inf:
        return math.copysign(FAR, v)
    return v / factor


def _moderate(e: Expr, factor: float) -> bool:
    """Whether no finite value of `e`, but that of `s` and what is FAR, is too large for the base of an exponent."""
    return magnitude(e) * factor <= MODERATE


def magnitude(e: Expr) -> float:
    """A bound of |e| apart from what `s`, FAR and infinite constants bring in."""
    memo: dict[Expr, float] = {}
    for x in sc.topological(e):
        memo[x] = _magnitude(x, memo)
    return memo[e]


def _magnitude(e: Expr, memo: dict[Expr, float]) -> float:
    of = [memo[a] for a in e.args]
    match e.op:
        case "const":
            return abs(float(e.value)) if math.isfinite(e.value) and abs(e.value) != FAR else 0.0
        case "name":
            return 0.0 if e.value in ("s", "p") else 2.0**31
        case "+" | "-":
            return sum(of)
        case "where":
            return max(of[1:])
        case "minimum" | "maximum":
            return max(of)
        case "tanh" | "sigmoid" | "sin" | "cos" | "erf":
            return 1.0
        case "*" if "s" not in sc.names(e):
            return of[0] * of[1]
        case "*" if any(a.op == "const" for a in e.args):
            return math.prod(of)
        case "/" if e.args[1].op == "const" and e.args[1].value:
            return of[0] / abs(float(e.args[1].value))
        case "neg" | "abs" | "float" | "half" | "bfloat16" | "floor" | "ceil" | "trunc" | "round":
            return of[0]
        case _:
            return 1.0 if sc.is_bool(e) else math.inf


# -------------------------------------------------------------------------------------------------------------- plain


class _Assumptions:
    """What a score is where its mask spares all: masks are chosen and additive masks are 0."""

    def __init__(self, program: Program):
        self.masks = frozenset(sc.loads(program.keep)) if program.keep is not None else frozenset()
        self.kinds = program.kind_map
        self.chosen: dict[Expr, bool] = {}  # conditions
        self.zeros: dict[Expr, None] = {}  # loads that are 0

    def conditions(self) -> list[Expr]:
        chosen = [c if value else sc.build("~", c) for c, value in self.chosen.items()]
        return chosen + [sc.build("==", x, sc.const(0.0)) for x in self.zeros]

    def apply(self, e: Expr) -> Expr:
        if e.op == "where":
            condition, a, b = e.args
            low_a, low_b = (x.op == "const" and x.value <= MASKED for x in (a, b))
            if low_a != low_b and not sc.names(condition) & {"s", "p"}:
                self.chosen[condition] = low_b
                return self.apply(a if low_b else b)
        elif e.op == "load" and e in self.masks and sc.kind(e, self.kinds) == "f":
            self.zeros[e] = None
            return sc.const(0.0)
        elif e.op in ("+", "-", "float") or (e.op == "*" and any(a.op == "const" for a in e.args)):
            return sc.build(e.op, *map(self.apply, e.args))
        return e

