"""The weights of a softmax by hand in one spelling, whatever their factors were written as: what is the same for all
keys of a row is gathered, and logarithms become divisions.

    exp(x - m) * exp(m - (m + log z))          ->    exp(x - m) / z
    exp(x) / exp(l), exp(x) * exp(-l)          ->    exp(x - l)
    p * (1 - sigmoid(c - l)), p / (1 + exp(c - l)), p * exp(l) / (exp(l) + exp(c)), p * exp(l - logaddexp(l, c))
                                               ->    p * sigmoid(l - c)

Only what depends on the scores is touched. Where eager mode overflows on the way, the normal form does not.
"""

from __future__ import annotations

import functools
from collections import Counter

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.pointwise import logaddexp, softplus
from torchflash.passes.reader import Reader
from torchflash.score import Expr, build, const

Powers = list[tuple[Expr, int]]  # factors, each with 1 or -1


def normal(r: Reader, e: Expr, n: ix.Index) -> Expr:
    """`e` with its products in normal form, keys being the axis `n`."""
    memo: dict[Expr, Expr] = {}
    for x in score.topological(e):
        args = [memo[a] for a in x.args]
        same = all(a is b for a, b in zip(args, x.args, strict=True))
        y = x if same else Expr(x.op, tuple(args), x.value) if x.value is not None else build(x.op, *args)
        memo[x] = _rewritten(y, n) if r.depends(y) else y
    return memo[e]


def terms(e: Expr) -> Counter[Expr]:
    """The summands of `e` with their multiplicity."""
    found: dict[Expr, Counter[Expr]] = {}
    for x in score.topological(e):
        if x.op not in ("+", "-", "neg"):
            found[x] = Counter((x,))
            continue
        counts = Counter(found[x.args[0]]) if x.op != "neg" else Counter[Expr]()
        (counts.update if x.op == "+" else counts.subtract)(found[x.args[-1]])
        found[x] = Counter({t: count for t, count in counts.items() if count})
    return found[e]


def sum_of(summands: Counter[Expr]) -> Expr:
    """What the summands add to."""
    counted = [t if c == 1 else build("*", const(float(c)), t) for t, c in summands.items() if c != -1]
    positive = functools.reduce(lambda a, b: build("+", a, b), counted) if counted else const(0.0)
    return functools.reduce(lambda a, b: build("-", a, b), [t for t, c in summands.items() if c == -1], positive)


def alike(a: Expr, b: Expr) -> bool:
    """Whether two exponentials, masked entries being 0, are the same but for the order of what is added inside."""
    if a is b:
        return True
    if a.op == b.op == "exp":
        return terms(a.args[0]) == terms(b.args[0])
    return a.op == b.op == "where" and a.args[0] is b.args[0] and all(map(alike, a.args[1:], b.args[1:]))


def _rewritten(e: Expr, n: ix.Index) -> Expr:
    match e.op:
        case "-" if e.args[0].op == "const" and e.args[0].value == 1 and e.args[1].op == "sigmoid" and _of_row(e, n):
            return build("sigmoid", build("neg", e.args[1].args[0]))
        case "*" | "/":
            return _product(e, n)
    return e


def _of_row(e: Expr, n: ix.Index) -> bool:
    """The same for all keys, and made from a sum or maximum over them."""
    return n not in ix.expr_axes(e) and _reduces(e)


def _reduces(e: Expr) -> bool:
    return any(x.op == "reduce" for x in score.topological(e))


def _product(e: Expr, n: ix.Index) -> Expr:
    rest: Powers = []
    exponents: Counter[Expr] = Counter()
    divisors: list[Expr] = []
    gates: list[Expr] = []
    found = False
    for factor, power in _factors(e):
        if factor.op == "exp" and _of_row(factor, n):
            _add(exponents, terms(factor.args[0]), power)
            found = True
        elif power < 0 and _of_row(factor, n):
            divisors.append(factor)
            found |= factor.op == "+" or not _divides(factor, e, n)
        else:
            rest.append((factor, power))
    if not found:
        return e
    for t, count in list(exponents.items()):
        if t.op == "log" and count == -1 and _of_row(t, n):
            divisors.append(t.args[0])
            del exponents[t]
    for x in list(divisors):
        if (apart := _logistic(x)) is not None:
            divisors.remove(x)
            gates.append(build("sigmoid", apart[0]))
            _add(exponents, apart[1], -1)
    gates += _gates_in(exponents)
    return _rebuilt(rest, divisors, exponents, gates, n)


def _rebuilt(rest: Powers, divisors: list[Expr], exponents: Counter[Expr], gates: list[Expr], n: ix.Index) -> Expr:
    """The product: first the exponential that varies along the keys, over what is of the row."""
    main = next((x for x, power in rest if power > 0 and n in ix.expr_axes(x) and _is_exponential(x)), None)
    if main is not None:
        rest.remove((main, 1))
        product = _raised(main, exponents)
    else:
        product = build("exp", sum_of(exponents)) if exponents else const(1.0)
    for x in divisors:
        if product.op == "dropout":
            product = Expr("dropout", (build("/", product.args[0], x),), product.value)
        else:
            product = build("/", product, x)
    for x, power in (*rest, *((gate, 1) for gate in gates)):
        product = build("*" if power > 0 else "/", product, x)
    return product


def _factors(e: Expr) -> Powers:
    if e.op not in ("*", "/"):
        return [(e, 1)] if not (e.op == "const" and e.value == 1) else []
    a, b = e.args
    return _factors(a) + [(x, p if e.op == "*" else -p) for x, p in _factors(b)]


def _add(counts: Counter[Expr], others: Counter[Expr], sign: int) -> None:
    for t, count in others.items():
        counts[t] += sign * count
        if not counts[t]:
            del counts[t]


def _divides(divisor: Expr, e: Expr, n: ix.Index) -> bool:
    """Whether it divides an exponential in the product `e` as it is."""
    if e.op not in ("*", "/"):
        return False
    here = e.op == "/" and e.args[1] is divisor and n in ix.expr_axes(e.args[0]) and _is_exponential(e.args[0])
    return here or any(_divides(divisor, x, n) for x in e.args)


def _is_exponential(e: Expr) -> bool:
    if e.op == "where":
        return all((x.op == "const" and x.value == 0) or _is_exponential(x) for x in e.args[1:])
    return e.op == "exp" or (e.op == "dropout" and _is_exponential(e.args[0]))


def _raised(e: Expr, exponents: Counter[Expr]) -> Expr:
    """An exponential times that of the sum of `exponents`."""
    if not exponents or e.op == "const":
        return e
    if e.op == "exp":
        summands = terms(e.args[0])
        _add(summands, exponents, 1)
        return build("exp", sum_of(summands))
    if e.op == "dropout":
        return Expr("dropout", (_raised(e.args[0], exponents),), e.value)
    return build("where", e.args[0], *(_raised(x, exponents) for x in e.args[1:]))


def _logistic(e: Expr) -> tuple[Expr, Counter[Expr]] | None:
    """(x, y) where 1 / e = sigmoid(x) * exp(-y)."""
    if e.op != "+":
        return None
    for a, b in (e.args, e.args[::-1]):
        if a.op == "const" and a.value == 1 and b.op == "exp":
            return build("neg", b.args[0]), Counter()
        if a.op == b.op == "exp" and _reduces(a):
            return build("-", a.args[0], b.args[0]), terms(a.args[0])
    return None


def _gates_in(exponents: Counter[Expr]) -> list[Expr]:
    """Takes -softplus(x) and -logaddexp(x, y) out of `exponents`, and returns what these are the logarithms of."""
    gates = []
    for t in [t for t, count in exponents.items() if count == -1 and t.op == "where"]:
        c, a, b = t.args
        apart = terms(logaddexp(a, b)) if c.op == ">=" and c.args == (a, b) else Counter((t,))
        if len(apart) == 1 and t is softplus(a):
            gates.append(build("sigmoid", build("neg", a)))
        elif len(apart) == 2 and all(exponents[x] == -count for x, count in apart.items()):
            # 1 / (exp(a) + exp(b)) = sigmoid(a - b) * exp(-a)
            a, b = (a, b) if _reduces(a) else (b, a)
            gates.append(build("sigmoid", build("-", a, b)))
            _add(exponents, terms(a), -1)
        else:
            continue
        _add(exponents, apart, 1)
    for t in [t for t, count in exponents.items() if count == -1 and t.op == "log1p" and t.args[0].op == "exp"]:
        gates.append(build("sigmoid", build("neg", t.args[0].args[0])))
        _add(exponents, Counter((t,)), 1)
    return gates
