"""What a probability is: finds the softmax in an expression, in one call or written by hand, and what is done to it
after.

    softmax(x)      exp(x) / Σ exp(x)      exp(x - logsumexp(x))      exp(x - a - log Σ exp(x - a))
    exp(x - a) / (exp(y - a) + Σ exp(x - a))      with a further key of score y, which meets no value

The normalised axis is proven: it must be the axis contracted with the values. Terms that are constant along that axis
cancel (the maximum everybody subtracts).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.graph import tensor
from torchflash.passes.normal import alike, normal, sum_of, terms
from torchflash.passes.reader import Reader, Reduce, Softmax
from torchflash.passes.row_constants import strip_row_constants
from torchflash.score import Expr, build, const, name


@dataclass(frozen=True)
class Failure:
    """Why a softmax is not the softmax of an attention block: the report's skip code, the words, and where it
    failed. Without words, what the code says is all there is to say."""

    code: str
    reason: str = ""
    node: Node | None = None


@dataclass(frozen=True)
class Weights:
    """post(p) with p = softmax over `keys` of `scores`; dropout, if any, is applied to p with probability `dropout_p`.
    Of the keys, those from `start` on meet a value."""

    scores: Expr
    post: Expr
    dropout_p: float
    softmax: Node  # the call, or the division or exponential that ends the one by hand
    keys: ix.Index
    start: ix.Index
    p: Expr  # what was found to be the softmax


@dataclass(frozen=True)
class Found:
    """A softmax: its scores, the node that ends it, and, where one by hand is over more keys than meet a value, its
    axis, which the scores are read at, and where the others start; `sink` is the score of one more key behind them."""

    scores: Expr
    node: Node
    keys: ix.Index | None = None
    start: ix.Index = ix.ZERO
    sink: Expr | None = None


def find_softmaxes(r: Reader, e: Expr, n: ix.Index, consumer: Node) -> tuple[Weights, ...] | Failure:
    """The softmaxes over axis `n` inside the weights `e`, of which `e` is the sum of the weights returned."""
    e = _normalised(r, normal(r, e, n), n)
    matches: dict[Expr, Found] = {}
    failure: Failure | None = None
    stack = [e]
    while stack:
        x = stack.pop()
        if x in matches or not r.depends(x):
            continue
        found = _softmax(r, x, n, consumer)
        if isinstance(found, Found):
            matches[x] = found
        elif isinstance(found, Failure):
            failure = failure or found
        else:
            stack.extend(x.args)
    if failure is not None or not matches:
        return failure or Failure("no_scores", "what is contracted with the values is not a softmax", consumer)
    if len(matches) == 1:
        ((where, found),) = matches.items()
        whole = _weights(r, score.substitute(e, {where: name("p")}, build), where, found, n, consumer)
        return whole if isinstance(whole, Failure) else (whole,)
    shared = any(x.op == "dropout" and len(matches.keys() & {*score.topological(x)}) > 1 for x in score.topological(e))
    mixture = score.substitute(e, dict.fromkeys(matches, name("p")), build)
    mixture = score.substitute(mixture, {x: x.args[0] for x in score.topological(mixture) if x.op == "dropout"}, build)
    if shared or any(x.op == "nan_to_num" for x in score.topological(mixture)) or not linear(mixture):
        return Failure("several_softmaxes", f"the values are contracted with a mixture of {len(matches)} softmaxes",
                       consumer)  # fmt: skip
    parts: list[Weights] = []
    for where, found in sorted(matches.items(), key=lambda item: r.versions.order[item[1].node]):
        post = _part(e, where, frozenset(matches))
        assert post is not None
        part = _weights(r, post, where, found, n, consumer)
        if isinstance(part, Failure):
            return part
        parts.append(part)
    return tuple(parts)


def _normalised(r: Reader, e: Expr, n: ix.Index) -> Expr:
    """`e` with 1, or the sum of the factors, for what softmaxes sum to over the keys, where they are multiplied with it
    or divided by it. In a row of NaN they do not sum to 1, but stay NaN whatever they are divided by: so it must be
    their own sum, and nothing else is done with it."""
    while True:
        divided = next((d for x in score.topological(e) if (d := _by_own_sum(r, x, n)) is not None), None)
        if divided is None:
            return e
        e = score.substitute(e, dict([divided]), build)


def _by_own_sum(r: Reader, x: Expr, n: ix.Index) -> tuple[Expr, Expr] | None:
    """(x, the same without its sums) of weights times or over what holds their sum."""
    if x.op not in ("*", "/"):
        return None
    for weights, other in (x.args, x.args[::-1])[: 2 if x.op == "*" else 1]:
        own = _kept_softmaxes(weights, n)
        sums = {
            y: total
            for y in score.topological(other)
            if (total := _total(r, y, n)) is not None and _kept_softmaxes(_body(r, y.value, n), n) <= own
        }
        if sums:
            args = [a if a is weights else score.substitute(a, sums, build) for a in x.args]
            return x, build(x.op, *args)
    return None


def _kept_softmaxes(e: Expr | None, n: ix.Index) -> set[Expr]:
    """The softmaxes over `n` whose NaN is one of `e`."""
    parts = [] if e is None else score.topological(e)
    if any(y.op in ("where", "nan_to_num", "dropout", "detach", "minimum", "maximum") for y in parts):
        return set()
    return {y for y in parts if y.op == "softmax" and _extent(y.value, n) == (n, ix.ZERO)}


def _total(r: Reader, x: Expr, n: ix.Index) -> Expr | None:
    """The sum over the keys of softmaxes, each times what is the same for all keys: the sum of the factors."""
    if x.op != "reduce" or x.value.op != "sum" or (body := _body(r, x.value, n)) is None:
        return None
    softmaxes = _kept_softmaxes(body, n)
    factor = score.substitute(body, dict.fromkeys(softmaxes, const(1.0)), build)
    if (
        softmaxes
        and linear(score.substitute(body, dict.fromkeys(softmaxes, name("p")), build))
        and not r.depends(factor)
        and n not in ix.expr_axes(factor)
        and not any(n in ix.axes(i) for y in softmaxes for d, i in enumerate(y.value.index) if d != y.value.dim)
    ):
        return factor
    return None


def _part(e: Expr, softmax: Expr, others: frozenset[Expr]) -> Expr | None:
    """The part that has `softmax`, as p, of what is linear in all softmaxes together; None where there is none."""
    if e is softmax:
        return name("p")
    if e in others or (e.op == "const" and e.value == 0):
        return None
    parts = [_part(x, softmax, others) for x in e.args]
    match e.op:
        case "+" | "-":
            a, b = parts
            if b is None:
                return a
            return build("neg", b) if a is None and e.op == "-" else b if a is None else build(e.op, a, b)
        case "where" if any(x is not None for x in parts):
            return build("where", e.args[0], *(const(0.0) if x is None else x for x in parts[1:]))
    if all(x is None for x in parts):
        return None
    if e.op == "dropout":
        return Expr("dropout", tuple(x for x in parts if x is not None), e.value)
    return build(e.op, *(y if x is None else x for x, y in zip(parts, e.args, strict=True)))


def _weights(r: Reader, post: Expr, where: Expr, found: Found, n: ix.Index, consumer: Node) -> Weights | Failure:
    """`post` is the weights as a function of p, which is the softmax `where`."""
    scores, node, sink = found.scores, found.node, found.sink
    keys, start = (found.keys or n, found.start) if where.op != "softmax" else _extent(where.value, n)
    post = _gates_loaded(r, post, n)
    if keys is n and sink is None and (apart := _sink(r, post, scores, n)) is not None:
        post, sink, scores, keys = apart
    if sink is not None:
        scores = build("where", _within(keys, start, ix.axis_size(n)), scores, sink)
    if others := [x for x in score.topological(post) if x.op in ("dot", "reduce", "softmax")]:
        own = {x.value.node for x in score.topological(scores) if x.op == "dot"}
        gate = next((x.value.node for x in others if x.op == "dot" and x.value.node not in own), None)
        reason = (
            "the scores are used again after the softmax"
            if gate is None
            else f"the weights depend on a contraction for each query and key beside the scores ({gate.name})"
        )
        return Failure("nonlinear_weights", reason, gate or consumer)
    dropouts = [x for x in score.topological(post) if x.op == "dropout"]
    if len(dropouts) > 1:
        return Failure("nonlinear_weights", "two dropouts follow the softmax", consumer)
    post = score.substitute(post, {x: x.args[0] for x in dropouts}, build) if dropouts else post
    post = _replace_nans(post)
    if any(x.op == "dropout" for x in score.topological(scores)):
        return Failure("unknown_op", "dropout on the scores, before the softmax", node)
    if not linear(post):
        return Failure("nonlinear_weights", f"what follows the softmax is not linear in it: {post}", consumer)
    if keys is not n:
        post = ix.replace_axis(post, n, ix.sympy.expand(keys - start))
        if post is not name("p"):
            post = build("where", _within(keys, start, ix.axis_size(n)), post, const(0.0))
    scores = strip_row_constants(r, scores, keys)
    return Weights(scores, post, dropouts[0].value[0] if dropouts else 0.0, node, keys, start, where)


def _gates_loaded(r: Reader, post: Expr, n: ix.Index) -> Expr:
    """`post` with loads for the contractions in it that are the same for all keys, such as a gate made from the
    queries."""
    gates = [x.value for x in score.topological(post) if x.op == "dot" and n not in ix.expr_axes(x)]
    loads = {r.read(d.node, d.index): r.load(d.node, d.index) for d in gates}
    return r.with_loads(post, loads) if loads else post


def _sink(r: Reader, post: Expr, scores: Expr, n: ix.Index) -> tuple[Expr, Expr, Expr, ix.Index] | None:
    """(`post` without it, c, the scores at an axis of one more key, that axis) where `post` has the factor
    sigmoid(logsumexp(scores) - c): what a further key of score c and value 0 leaves to the others. A row that keeps no
    key at all is NaN in eager mode, and must not exist."""
    scores, keys = strip_row_constants(r, scores, n), ix.axis("n", ix.axis_size(n) + 1)
    for gate in score.topological(post):
        if gate.op != "sigmoid" or (rest := _without_factor(post, gate)) is None:
            continue
        summands = terms(gate.args[0])
        found = {t: x for t, count in summands.items() if count == 1 and (x := _logsumexp(r, t, scores, n, keys))}
        if len(found) != 1:
            continue
        ((logsumexp, (whole, shift)),) = found.items()
        summands.update(shift)
        del summands[logsumexp]
        summands = Counter({t: count for t, count in summands.items() if count})
        if any(r.depends(t) or n in ix.expr_axes(t) for t in summands) or not _magnitude(r, scores) <= _FINITE:
            continue
        return rest, sum_of(Counter({t: -count for t, count in summands.items()})), whole, keys
    return None


def _logsumexp(r: Reader, e: Expr, scores: Expr, n: ix.Index, keys: ix.Index) -> tuple[Expr, Counter[Expr]] | None:
    """(the scores at the axis `keys`, x) where `e` is the logarithm of the sum of the exponentials of the scores, plus
    x, in one call or by hand."""
    inner = e.args[0] if e.op == "log" else e
    if inner.op != "reduce" or inner.value.op != ("sum" if e.op == "log" else "logsumexp"):
        return None
    own, whole = (_exponent(inner.value, _body(r, inner.value, n, at)) for at in (None, keys))
    if own is None or whole is None:
        return None
    shift = terms(own)
    shift.subtract(terms(scores))
    shift = Counter({t: count for t, count in shift.items() if count})
    if any(n in ix.expr_axes(t) for t in shift):
        return None
    if shift:
        rest = terms(whole)
        rest.subtract(shift)
        whole = sum_of(Counter({t: count for t, count in rest.items() if count}))
    return whole, shift


_FINITE = 3.4028235e38  # the largest float32, nearly


def _magnitude(r: Reader, e: Expr) -> float:
    """What `e` does not exceed either way as long as no product of queries and keys exceeds 1e30."""
    found: dict[Expr, float] = {}
    for x in score.topological(e):
        args = [found[a] for a in x.args]
        match x.op:
            case "const":
                found[x] = abs(float(x.value))
            case "dot":
                found[x] = 1e30
            case "load" | "name":
                t = tensor(r.held[x.value[1:]][0]) if x.op == "load" else None
                found[x] = math.inf if x.op == "load" and (t is None or t.dtype.is_floating_point) else 1e19
            case "where":
                found[x] = max(args[1:])
            case "minimum" | "maximum":
                found[x] = max(args)
            case "+" | "-":
                found[x] = sum(args)
            case "*":
                found[x] = math.prod(args)
            case "/" if least := _least(x.args[1]):
                found[x] = args[0] / least
            case "neg" | "abs" | "float" | "int" | "int32":
                found[x] = args[0]
            case "tanh" | "sigmoid" | "sin" | "cos" | "erf":
                found[x] = 1.0
            case _:
                found[x] = math.inf
    return found[e]


def _least(e: Expr) -> float:
    """What the magnitude of a number or of a function of sizes is not below."""
    match e.op:
        case "const":
            return abs(float(e.value))
        case "name":
            return 0.0 if ix.expr_axes(e) else 1.0
        case "float" | "sqrt":
            least = _least(e.args[0])
            return math.sqrt(least) if e.op == "sqrt" else least
    return 0.0


def _without_factor(e: Expr, factor: Expr) -> Expr | None:
    """e / factor, for a factor that it has once."""
    if e.op not in ("*", "/"):
        return None
    a, b = e.args
    for side, other in ((a, b), (b, a))[: 2 if e.op == "*" else 1]:
        if factor in score.topological(other) or factor not in score.topological(side):
            continue
        if side is factor:
            return other if e.op == "*" else build("/", const(1.0), other)
        if (rest := _without_factor(side, factor)) is not None:
            return build(e.op, *((rest, other) if side is a else (other, rest)))
    return None


def _extent(s: Softmax, n: ix.Index) -> tuple[ix.Index, ix.Index]:
    """(the axis that `s` normalises, where on it the axis `n` starts): a softmax may have more keys than values, such
    as a sink that is cut off after it."""
    size = ix.shape_of(tensor(s.node))[s.dim]  # type: ignore[arg-type]
    if s.index[s.dim] is n and size == ix.axis_size(n):
        return n, ix.ZERO
    return ix.axis("n", size), ix.sympy.expand(s.index[s.dim] - n)


def _within(keys: ix.Index, start: ix.Index, size: ix.Index) -> Expr:
    low, high = (ix.compare(op, ix.to_expr(keys), ix.to_expr(end)) for op, end in ((">=", start), ("<", start + size)))
    assert low is not None and high is not None
    return build("&", low, high)


def _replace_nans(e: Expr) -> Expr:
    """where(isnan(x), 0, x) as nan_to_num(x): a weight is never infinite."""

    def make(op: str, *args: Expr) -> Expr:
        if op == "where":
            c, a, b = args
            if c.op == "isnan" and c.args[0] is b and a.op == "const" and a.value == 0:
                return build("nan_to_num", b)
        return build(op, *args)

    memo: dict[Expr, Expr] = {}
    for x in score.topological(e):
        memo[x] = x if x.value is not None or not x.args else make(x.op, *(memo[a] for a in x.args))
    return memo[e]


def linear(e: Expr) -> bool:
    """Linear and homogeneous in `p`."""
    if "p" not in score.names(e):
        return e.op == "const" and e.value == 0
    match e.op:
        case "name":
            return e.value == "p"
        case "+" | "-":
            return all(map(linear, e.args))
        case "*":
            a, b = e.args
            return (linear(a) and "p" not in score.names(b)) or (linear(b) and "p" not in score.names(a))
        case "/":
            return linear(e.args[0]) and "p" not in score.names(e.args[1])
        case "where":
            return "p" not in score.names(e.args[0]) and linear(e.args[1]) and linear(e.args[2])
        case "neg" | "nan_to_num" | "float":
            return linear(e.args[0])
    return False


def _softmax(r: Reader, e: Expr, n: ix.Index, consumer: Node) -> Found | Failure | None:
    """What is found when `e` is itself a softmax over `n`; None when it may contain one; Failure when it is another
    thing."""
    match e.op:
        case "softmax":
            s = e.value
            keys, start = _extent(s, n)
            if ix.axes(start) or any(n in ix.axes(i) for k, i in enumerate(s.index) if k != s.dim):
                return Failure(
                    "softmax_axis",
                    f"normalised over dim {s.dim}, which is not the one contracted with the values",
                    s.call,
                )
            behind = ix.sympy.expand(ix.axis_size(keys) - start - ix.axis_size(n))
            if not ix.nonnegative(start) or not (
                ix.nonnegative(behind) or ix.guarded(tensor(s.node), behind >= 0)  # type: ignore[arg-type]
            ):
                return Failure(
                    "denominator", "normalised over other keys than those contracted with the values", s.call
                )
            return Found(r.read(s.node, (*s.index[: s.dim], keys, *s.index[s.dim + 1 :]), s.call), s.call)
        case "/":
            return _divided(r, e.args[0], e.args[1], n, consumer)
        case "*":
            for a, b in (e.args, e.args[::-1]):
                if b.op == "/" and b.args[0].op == "const" and b.args[0].value == 1 and _has_sum(b.args[1]):
                    return _divided(r, a, b.args[1], n, consumer)
        case "exp":
            return _exponential(r, e.args[0], n, consumer)
    return None


def _has_sum(e: Expr) -> bool:
    return any(x.op == "reduce" and x.value.op == "sum" for x in score.topological(e))


def _divided(
    r: Reader, numerator: Expr, denominator: Expr, n: ix.Index, consumer: Node
) -> Found | Failure | None:
    """numerator / denominator as exp(x) / Σ exp(x), masked entries being 0; exp(y) may be added to the sum."""
    exponent = _log(numerator)
    if exponent is None or not r.depends(numerator) or n not in ix.expr_axes(numerator):
        return None
    added = None
    summands = terms(denominator)
    sums = [x for x in summands if x.op == "reduce" and x.value.op == "sum"]
    if len(sums) == 1 and len(summands) == 2 and set(summands.values()) == {1}:
        (denominator,) = sums
        (added,) = summands.keys() - {denominator}
    if denominator.op != "reduce":
        if not r.depends(denominator):
            return None
        return Failure("denominator", "the normaliser is not the plain sum of the exponentials", consumer)
    total: Reduce = denominator.value
    body = _body(r, total, n)
    if body is None and total.op == "sum" and added is None:
        for keys, start in _more_keys(r, numerator, total, n):
            whole = _exponent(total, _body(r, total, keys))
            part = _body(r, total, keys, ix.sympy.expand(n + start))
            if part is not None and alike(part, numerator) and whole is not None:
                return Found(whole, total.user, keys, start)
    if total.op != "sum" or body is None:
        return Failure(
            "softmax_axis",
            f"normalised over dims {total.dims}, not over the one contracted with the values",
            total.user,
        )
    if not alike(body, numerator):
        return Failure("denominator", "the normaliser is not the sum of what is normalised", total.user)
    if added is None:
        return Found(exponent, total.user)
    keys = ix.axis("n", ix.axis_size(n) + 1)
    body = _body(r, total, n, keys)
    exponent = _log(body) if body is not None else None
    sink = _score_of(r, added, exponent, n, keys) if exponent is not None else None
    if exponent is None or sink is None:
        return Failure("denominator", "the normaliser is not the plain sum of the exponentials", consumer)
    return Found(strip_row_constants(r, exponent, keys), total.user, keys, sink=sink)


def _more_keys(r: Reader, part: Expr, total: Reduce, n: ix.Index) -> Iterator[tuple[ix.Index, ix.Index]]:
    """(the axis of all keys, where on it `n` may start), if `total` is over more keys than `part` has."""
    t = tensor(total.node)
    assert t is not None
    if len(total.dims) != 1 or (body := _body(r, total, keys := ix.axis("n", ix.shape_of(t)[total.dims[0]]))) is None:
        return
    at = {x.value.node: x.value.index for x in score.topological(body) if x.op == "dot"}
    for x in score.topological(part):
        if x.op != "dot" or x.value.node not in at:
            continue
        for whole, own in zip(at[x.value.node], x.value.index, strict=True):
            start = ix.sympy.expand(own - n - whole + keys)
            if keys in ix.axes(whole) and not {n, keys} & ix.axes(start) and ix.nonnegative(start):
                behind = ix.sympy.expand(ix.axis_size(keys) - start - ix.axis_size(n))
                if ix.nonnegative(behind):
                    yield keys, start


def _score_of(r: Reader, added: Expr, exponent: Expr, n: ix.Index, keys: ix.Index) -> Expr | None:
    """y where `added` = exp(y - a) and a is what `exponent` holds of the same for all keys; y does not depend on the
    scores."""
    if added.op == "const" and 0 < added.value < math.inf:
        shifted: Expr = const(math.log(added.value))
    elif added.op == "exp":
        shifted = added.args[0]
    else:
        return None
    inner = exponent
    while inner.op == "where" and (fills := [x for x in inner.args[1:] if x.op == "const" and x.value == -math.inf]):
        inner = next(x for x in inner.args[1:] if x is not fills[0])

    def of_rows(e: Expr, axis: ix.Index) -> Counter[Expr]:
        return Counter({t: c for t, c in terms(e).items() if r.depends(t) and axis not in ix.expr_axes(t)})

    constants = of_rows(inner, keys)
    rest = Counter(terms(shifted))
    rest.subtract(constants)
    rest = Counter({t: c for t, c in rest.items() if c})
    if any(r.depends(t) or n in ix.expr_axes(t) for t in rest):
        return None
    # a row of nothing but -inf less a maximum of -inf is NaN in eager mode
    if not all(map(_clamped, constants)) and not _magnitude(r, strip_row_constants(r, exponent, keys)) <= _FINITE:
        return None
    counted = (t if c == 1 else build("*", const(float(c)), t) for t, c in rest.items())
    return functools.reduce(lambda a, b: build("+", a, b), counted, const(0.0))


def _clamped(e: Expr) -> bool:
    """Whether `e` is at least a number: maximum(x, c), or where(x < c, c, x), or such cut off above."""
    if e.op == "maximum":
        return any(x.op == "const" and math.isfinite(x.value) for x in e.args)
    if e.op != "where" or e.args[0].op not in ("<", "<=", ">", ">="):
        return False
    (x, c), end, other = e.args[0].args, e.args[1], e.args[2]
    finite = x is other and c is end and c.op == "const" and math.isfinite(c.value)
    return finite and (e.args[0].op[0] == "<" or _clamped(x))


def _log(e: Expr) -> Expr | None:
    """x where e = exp(x), with -inf where e is a constant 0."""
    if e.op == "exp":
        return e.args[0]
    if e.op == "where":
        branches = [const(-math.inf) if b.op == "const" and b.value == 0 else _log(b) for b in e.args[1:]]
        if branches[0] is not None and branches[1] is not None:
            return build("where", e.args[0], branches[0], branches[1])
    return None


def _exponential(r: Reader, exponent: Expr, n: ix.Index, consumer: Node) -> Found | Failure | None:
    """exp(x - logsumexp(x)), the logarithm in one call or of a sum of exponentials."""
    summands = terms(exponent)
    for term, count in summands.items():
        if count != -1:
            continue
        inner = term
        total = inner.value if inner.op == "reduce" else None
        if inner.op == "log" and inner.args[0].op == "reduce" and inner.args[0].value.op == "sum":
            total = inner.args[0].value
        elif total is None or total.op != "logsumexp":
            continue
        rest = summands.copy()
        del rest[term]
        body = _body(r, total, n)
        if body is None:
            for keys, start in _more_keys(r, exponent, total, n):
                part, whole = (_exponent(total, _body(r, total, keys, at)) for at in (ix.sympy.expand(n + start), keys))
                if part is not None and whole is not None and terms(part) == rest:
                    return Found(whole, total.user, keys, start)
            return Failure(
                "softmax_axis",
                f"normalised over dims {total.dims}, not over the one contracted with the values",
                total.user,
            )
        if (body := _exponent(total, body)) is None:
            continue
        if terms(body) == rest:
            return Found(body, total.user)
        return Failure("denominator", "the normaliser is not the sum of what is normalised", total.user)
    return None


def _exponent(total: Reduce, body: Expr | None) -> Expr | None:
    """What the exponentials are of that `total` adds."""
    return None if body is None else _log(body) if total.op == "sum" else body


def _body(r: Reader, total: Reduce, n: ix.Index, at: ix.Index | None = None) -> Expr | None:
    """What `total` reduces, read at axis `n`, or at `at` instead; None when it reduces other dims than that one."""
    t = tensor(total.node)
    assert t is not None
    if len(total.dims) != 1 or ix.shape_of(t)[total.dims[0]] != ix.axis_size(n):
        return None
    inside = tuple((at or n) if d == total.dims[0] else i for d, i in enumerate(total.index))
    if any(n in ix.axes(i) for d, i in enumerate(total.index) if d != total.dims[0]):
        return None
    return normal(r, r.read(total.node, inside, total.user), at or n)
