"""Elementwise operations: arithmetic, functions, comparisons and choices, casts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.graph import argument, dtype_of, operation, tensor, value
from torchflash.passes.reader import (
    HALVES,
    HANDLERS,
    Indices,
    Reader,
    Unreadable,
    reads,
)
from torchflash.score import FALSE, TRUE, ZERO, Expr, build, const

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- arithmetic


def _arithmetic(r: Reader, node: Node, op: str, a: Any, b: Any, index: Indices) -> Expr:
    return r.integer(build(op, r.operand(a, index, node), r.operand(b, index, node)), node)


@reads("add", "sub", "rsub", "radd")
def _add(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    a, b = args[0], argument(args, kwargs, 1, "other")
    name = operation(node)
    x, y = r.operand(a, index, node), r.operand(b, index, node)
    if dtype_of(node) == torch.bool:
        return build(
            "|", r.read(a, ix.broadcast(_shape(a), index), node), r.read(b, ix.broadcast(_shape(b), index), node)
        )
    alpha = argument(args, kwargs, 2, "alpha", default=1)
    if alpha != 1:
        scale = r.operand(alpha, (), node)
        x, y = (build("*", scale, x), y) if name == "rsub" else (x, build("*", scale, y))
    if name == "rsub":
        x, y = y, x
    return r.integer(build("-" if "sub" in name else "+", x, y), node)


def _shape(x: Any) -> tuple[ix.Index, ...]:
    t = tensor(x)
    return ix.shape_of(t) if t is not None else ()


@reads("mul")
def _mul(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    a, b = args[0], argument(args, kwargs, 1, "other")
    if dtype_of(node) == torch.bool:
        return _logical(r, node, "&", a, b, index)
    return _arithmetic(r, node, "*", a, b, index)


@reads("div", "rdiv")
def _div(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    a, b = args[0], argument(args, kwargs, 1, "other")
    if operation(node) == "rdiv":
        a, b = b, a
    mode = kwargs.get("rounding_mode")
    if mode == "floor":
        return _floor_divide(r, node, (a, b), {}, index)
    if mode is not None:
        raise Unreadable
    return build("/", r.operand(a, index, node, True), r.operand(b, index, node, True))


@reads("floor_divide")
def _floor_divide(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if dtype_of(node).is_floating_point:
        quotient = build("/", r.operand(args[0], index, node), r.operand(args[1], index, node))
        if r.depends(quotient):
            raise Unreadable  # 1.0 // 0.1 is 9, the floor of the quotient, which is rounded, 10
        return build("floor", quotient)
    return _divide_index("//", _arithmetic(r, node, "//", args[0], args[1], index))


@reads("remainder", "fmod")
def _remainder(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    divisor, step = argument(args, kwargs, 1, "other"), "floor" if operation(node) == "remainder" else "trunc"
    if dtype_of(node).is_floating_point:
        x = r.operand(args[0], index, node)
        if not r.depends(x) or not isinstance(divisor, (int, float)) or not abs(math.frexp(divisor)[0]) == 0.5:
            raise Unreadable  # only a power of 2 divides without rounding
        y = const(float(divisor))
        return build("-", x, build("*", y, build(step, build("/", x, y))))
    if step == "trunc":
        raise Unreadable
    return _divide_index("%", _arithmetic(r, node, "%", args[0], divisor, index))


def _divide_index(op: str, e: Expr) -> Expr:
    """Folds a division of indices where their ranges allow."""
    folded = ix.from_expr(e) if e.op == op else None
    return e if folded is None else ix.to_expr(folded)


@reads("pow")
def _pow(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    base, exponent = args[0], argument(args, kwargs, 1, "exponent")
    x = r.operand(base, index, node)
    if isinstance(base, (int, float)) and base > 0 and base != 1 and dtype_of(node).is_floating_point:
        y = r.operand(exponent, index, node)
        if r.depends(y):
            return build("exp", build("*", const(math.log(base)), y))
    if exponent in (2, 2.0) and isinstance(exponent, (int, float)):
        return r.integer(build("*", x, x), node)
    if exponent in (1, 1.0) and isinstance(exponent, (int, float)):
        return x
    if not dtype_of(node).is_floating_point:
        raise Unreadable
    if exponent in (-1, -1.0) and isinstance(exponent, (int, float)):
        return build("/", const(1.0), x)
    return build("**", x, r.operand(exponent, index, node))


@reads("square")
def _square(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    x = r.operand(args[0], index, node)
    return r.integer(build("*", x, x), node)


@reads("reciprocal")
def _reciprocal(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return build("/", const(1.0), r.operand(args[0], index, node))


@reads("neg")
def _neg(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return r.integer(build("neg", r.operand(args[0], index, node)), node)


@reads("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", "erf")
def _function(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return build(operation(node), r.operand(args[0], index, node, True))


@reads("floor", "ceil", "trunc", "fix", "round", "sign", "sgn")
def _round(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if len(args) > 1 or kwargs:
        raise Unreadable  # decimals
    name = {"fix": "trunc", "sgn": "sign"}.get(operation(node), operation(node))
    return build(name, r.operand(args[0], index, node))


@reads("exp2")
def _exp2(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return build("exp", build("*", const(math.log(2.0)), r.operand(args[0], index, node, True)))


@reads("log2", "log10")
def _log_base(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    base = 2.0 if operation(node) == "log2" else 10.0
    return build("*", const(1.0 / math.log(base)), build("log", r.operand(args[0], index, node, True)))


@reads("abs")
def _abs(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    x = r.operand(args[0], index, node)
    i = ix.from_expr(x)
    if i is not None and ix.nonnegative(i):
        return x
    return r.integer(build("abs", x), node)


@reads("addcmul", "addcdiv")
def _addc(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    a, b = (r.operand(argument(args, kwargs, k, n), index, node) for k, n in ((1, "tensor1"), (2, "tensor2")))
    value_ = r.operand(argument(args, kwargs, 3, "value", default=1), (), node)
    return r.integer(
        build(
            "+",
            r.operand(args[0], index, node),
            build("*", value_, build("*" if operation(node) == "addcmul" else "/", a, b)),
        ),
        node,
    )


@reads("lerp")
def _lerp(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    start, end, weight = (
        r.operand(argument(args, kwargs, k, n), index, node) for k, n in ((0, "input"), (1, "end"), (2, "weight"))
    )
    return build("+", start, build("*", weight, build("-", end, start)))


@reads("relu", "leaky_relu", "silu", "softplus", "softsign", "hardtanh", "gelu", "relu6", "log_sigmoid", "logsigmoid",
       "elu", "selu", "celu", "mish", "hardswish", "hardsigmoid", "softshrink", "hardshrink", "tanhshrink",
       "threshold")  # fmt: skip
def _activation(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    x = r.operand(args[0], index, node)

    def number(position: int, name: str, default: float) -> float:
        given = argument(args, kwargs, position, name, default=default)
        if not isinstance(given, (int, float)) or isinstance(given, bool):
            raise Unreadable
        return float(given)

    match operation(node):
        case "relu":
            # torch's relu has gradient 0 at 0, and NaN stays NaN
            return build("where", build("<=", x, ZERO), ZERO, x)
        case "relu6":
            return _saturated(x, 0.0, 6.0)
        case "leaky_relu":
            slope = r.operand(argument(args, kwargs, 1, "negative_slope", default=0.01), (), node)
            return build("where", build(">", x, ZERO), x, build("*", slope, x))
        case "silu":
            return build("*", x, build("sigmoid", x))
        case "gelu":
            return _gelu(x, argument(args, kwargs, 1, "approximate", default="none"))
        case "logsigmoid" | "log_sigmoid":
            return build("neg", softplus(build("neg", x)))
        case "softsign":
            return build("/", x, build("+", const(1.0), build("abs", x)))
        case "softplus":
            return softplus(x, number(1, "beta", 1.0), number(2, "threshold", _FAR))
        case "hardtanh":
            return _saturated(x, number(1, "min_val", -1.0), number(2, "max_val", 1.0))
        case "elu" if isinstance(node.target, torch._ops.OpOverload):
            return _elu(x, number(1, "alpha", 1.0), number(2, "scale", 1.0), number(3, "input_scale", 1.0))
        case "elu":
            return _elu(x, number(1, "alpha", 1.0))
        case "selu":
            return _elu(x, 1.6732632423543772, 1.0507009873554805)
        case "celu":
            alpha = number(1, "alpha", 1.0)
            return _elu(x, alpha, 1.0, 1.0 / alpha)
        case "mish":
            return build("*", x, build("tanh", softplus(x)))
        case "hardswish":
            inside = build("*", x, build("*", const(1 / 6), build("+", x, const(3.0))))
            above = build("where", build(">=", x, const(3.0)), x, inside)
            return build("where", build("<=", x, const(-3.0)), build("*", ZERO, x), above)
        case "hardsigmoid":
            return build("*", const(1 / 6), _saturated(build("+", x, const(3.0)), 0.0, 6.0))
        case "softshrink":
            size = const(number(1, "lambd", 0.5))
            above = build("where", build(">", x, size), build("-", x, size), build("*", ZERO, x))
            return build("where", build("<", x, build("neg", size)), build("+", x, size), above)
        case "hardshrink":
            size = const(number(1, "lambd", 0.5))
            return build("where", build("<=", build("abs", x), size), ZERO, x)
        case "tanhshrink":
            return build("-", x, build("tanh", x))
        case "threshold":
            low, fill = (const(number(k, n, 0.0)) for k, n in ((1, "threshold"), (2, "value")))
            return build("where", build("<=", x, low), fill, x)
    raise Unreadable


_FAR = 20.0  # exp(-20) is less than the last place of 20


def softplus(x: Expr, beta: float = 1.0, threshold: float = _FAR) -> Expr:
    """log(1 + exp(x)). Where that is x itself nothing overflows either: an infinite exp would have a gradient of NaN,
    chosen or not."""
    y = x if beta == 1.0 else build("*", const(beta), x)
    far = build(">", y, const(threshold))
    near = build("log1p", build("exp", build("where", far, const(threshold), y)))
    return build("where", far, x, near if beta == 1.0 else build("*", const(1 / beta), near))


def _elu(x: Expr, alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Expr:
    low = build("<=", x, ZERO)
    y = build("expm1", build("*", const(input_scale), build("where", low, x, ZERO)))
    return build("where", low, build("*", const(alpha * scale), y), build("*", const(scale), x))


def _gelu(x: Expr, approximate: Any) -> Expr:
    if approximate == "none":
        y = build("erf", build("*", const(math.sqrt(0.5)), x))
    elif approximate == "tanh":
        cubic = build("*", const(0.044715), build("*", x, build("*", x, x)))
        y = build("tanh", build("*", const(math.sqrt(2 / math.pi)), build("+", x, cubic)))
    else:
        raise Unreadable
    return build("*", build("*", const(0.5), x), build("+", const(1.0), y))


@reads("logaddexp")
def _logaddexp(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return logaddexp(r.operand(args[0], index, node), r.operand(argument(args, kwargs, 1, "other"), index, node))


def logaddexp(a: Expr, b: Expr) -> Expr:
    """log(exp(a) + exp(b))"""
    high = build(">=", a, b)
    alike = build("&", build("==", a, b), build("==", build("abs", a), const(math.inf)))  # their difference is NaN
    d = build("where", alike, ZERO, build("where", high, build("-", b, a), build("-", a, b)))
    return build("+", build("where", high, a, b), build("log1p", build("exp", d)))


def _saturated(x: Expr, low: float, high: float) -> Expr:
    """Between two numbers, with gradient 0 at them too, as hardtanh of torch has; NaN stays."""
    below, above = build("<=", x, const(low)), build(">=", x, const(high))
    return build("where", below, const(low), build("where", above, const(high), x))


def _clamped(x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """Clamping by comparisons: NaN stays, and the gradient at the ends is 1 as in torch. Where the ends are the wrong
    way round it is the upper one."""
    y = x
    if low is not None:
        y = build("where", compare("<", y, low), low, y)
    if high is not None:
        y = build("where", compare(">", y, high), high, y)
    return y


@reads("clamp", "clamp_min", "clamp_max")
def _clamp(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    name = operation(node)
    low = argument(args, kwargs, 1, "min") if name != "clamp_max" else None
    high = argument(args, kwargs, 1, "max") if name == "clamp_max" else argument(args, kwargs, 2, "max")
    x = r.operand(args[0], index, node)
    return _clamped(x, *(None if b is None else r.operand(b, index, node) for b in (low, high)))


@reads("minimum", "maximum", "fmin", "fmax", "min", "max")
def _extremum(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    name = operation(node)
    other = argument(args, kwargs, 1, "other")
    if name in ("min", "max") and (other is None or tensor(other) is None):
        return HANDLERS["amax"](r, node, args, kwargs, index)
    if name in ("fmin", "fmax") or dtype_of(node) == torch.bool:
        raise Unreadable
    x, y = r.operand(args[0], index, node), r.operand(other, index, node)
    smaller = name.startswith("min")
    less, more = compare("<=", x, y), compare(">=", x, y)
    if less.op == "const" or more.op == "const":
        return x if (less if smaller else more) is TRUE else y
    return build("minimum" if smaller else "maximum", x, y)


# ---------------------------------------------------------------------------------------------- comparisons, choices


def compare(op: str, a: Expr, b: Expr) -> Expr:
    return ix.compare(op, a, b) or build(op, a, b)


_COMPARISONS = {"le": "<=", "lt": "<", "ge": ">=", "gt": ">", "eq": "==", "ne": "!="}


@reads(*_COMPARISONS)
def _comparison(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    op = _COMPARISONS[operation(node)]
    a, b = args[0], argument(args, kwargs, 1, "other")
    ta, tb = tensor(a), tensor(b)
    dtypes = [t.dtype for t in (ta, tb) if t is not None]
    if all(d == torch.bool for d in dtypes) and (ta is None or tb is None):
        # a boolean against a number: t == 0 is ~t
        t, number, node_ = (a, b, a) if ta is not None else (b, a, b)
        e = r.read(t, ix.broadcast(_shape(node_), index), node)
        flip = {"<=": ">=", "<": ">", ">=": "<=", ">": "<"}.get(op, op) if ta is None else op
        n = r.read(number, (), node)
        on, off = build(flip, const(1.0), n), build(flip, const(0.0), n)
        return build("where", e, on, off)
    as_float = any(d.is_floating_point for d in dtypes) or isinstance(value(a), float) or isinstance(value(b), float)
    x, y = r.operand(a, index, node, as_float), r.operand(b, index, node, as_float)
    if any(d in HALVES or d == torch.float64 for d in dtypes) and _rounded(r, x, y):
        raise Unreadable  # what eager compares has been rounded; the program would compare something else
    if x is y and not as_float:
        return const(op in ("<=", ">=", "=="))
    if x is y and op in ("==", "!="):
        return build("isnan", x) if op == "!=" else build("~", build("isnan", x))
    return compare(op, x, y)


def _rounded(r: Reader, *operands: Expr) -> bool:
    return any(not r.depends(e) and not _held(e) for e in operands)


def _held(e: Expr) -> bool:
    """Whether a program has the very value of `e` that a half dtype holds."""
    if e.op == "where":
        return all(map(_held, e.args[1:]))
    return e.op in ("load", "const", "half", "bfloat16")


def _logical(r: Reader, node: Node, op: str, a: Any, b: Any, index: Indices) -> Expr:
    x, y = (_truth(r, t, index, node) for t in (a, b))
    unit, zero = (TRUE, FALSE) if op == "&" else (FALSE, TRUE)
    if op != "^":
        for p, q in ((x, y), (y, x)):
            if p is unit:
                return q
            if p is zero:
                return zero
    return build(op, x, y)


def _truth(r: Reader, x: Any, index: Indices, node: Node) -> Expr:
    t = tensor(x)
    e = r.read(x, ix.broadcast(_shape(x), index), node)
    return r.cast(e, t.dtype if t is not None else type(value(x)), torch.bool)


@reads("and", "or", "xor", "logical_and", "logical_or", "logical_xor")
def _and_or(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    name = operation(node)
    op = {"and": "&", "or": "|", "xor": "^"}[name.removeprefix("logical_")]
    a, b = args[0], argument(args, kwargs, 1, "other")
    if dtype_of(node) == torch.bool:
        return _logical(r, node, op, a, b, index)
    return _arithmetic(r, node, op, a, b, index)


@reads("invert", "logical_not")
def _not(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if operation(node) == "invert" and dtype_of(node) != torch.bool:
        raise Unreadable
    return build("~", _truth(r, args[0], index, node))


@reads("where")
def _where(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if len(args) + len(kwargs) < 3:
        raise Unreadable
    c, a, b = args[0], argument(args, kwargs, 1, "input", "self"), argument(args, kwargs, 2, "other")
    if operation(node) == "where" and node.op == "call_method":
        c, a = a, c  # x.where(condition, y)
    return _choose(r, node, c, a, b, index)


def _choose(r: Reader, node: Node, c: Any, a: Any, b: Any, index: Indices) -> Expr:
    condition = _truth(r, c, index, node)
    if dtype_of(node) == torch.bool:
        return build("where", condition, _truth(r, a, index, node), _truth(r, b, index, node))
    return build("where", condition, _fill(r, node, a, index), _fill(r, node, b, index))


def _fill(r: Reader, node: Node, x: Any, index: Indices) -> Expr:
    """A branch of a where; a number becomes what the result's dtype holds of it (1e9 is inf in float16)."""
    e = r.operand(x, index, node)
    if e.op == "const" and dtype_of(node) in HALVES and (tensor(x) is None or not _shape(x)):
        return build(HALVES[dtype_of(node)], e)
    return e


@reads("masked_fill")
def _masked_fill(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    mask, filler = argument(args, kwargs, 1, "mask"), argument(args, kwargs, 2, "value")
    return _choose(r, node, mask, filler, args[0], index)


@reads("nan_to_num")
def _nan_to_num(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    x = r.operand(args[0], index, node)
    nan = argument(args, kwargs, 1, "nan")
    if nan not in (None, 0, 0.0):
        raise Unreadable
    if not _is_probability(r, x):
        raise Unreadable  # infinities are replaced too
    return build("nan_to_num", x)


def _is_probability(r: Reader, e: Expr) -> bool:
    """Never infinite: a softmax, or one by hand."""
    return r.depends(e) and any(
        x.op == "softmax" or (x.op == "reduce" and x.value.op in ("sum", "logsumexp")) for x in score.topological(e)
    )


@reads("isnan", "isinf", "isneginf", "isfinite")
def _is(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    x = r.operand(args[0], index, node, None if tensor(args[0]) is None else True)
    inf = math.inf
    match operation(node):
        case "isnan":
            return build("isnan", x)
        case "isneginf":
            return build("==", x, const(-inf))
        case "isinf":
            return build("==", build("abs", x), const(inf))
    return build("<", build("abs", x), const(inf))


# --------------------------------------------------------------------------------------------- casts, identities, noise


@reads("to", "type", "float", "half", "bfloat16", "double", "bool", "int", "long", "type_as", "short")
def _to(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source = tensor(args[0])
    assert source is not None
    return r.cast(r.read(args[0], index, node), source.dtype, dtype_of(node))


@reads(
    "contiguous",
    "clone",
    "detach",
    "alias",
    "requires_grad_",
    "cuda",
    "cpu",
    "positive",
    "pos",
    "lift_fresh",
    "lift_fresh_copy",
    "expand_copy",
)
def _identity(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return r.read(args[0], index, node)


@reads("copy")
def _copy(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source = tensor(args[1])
    assert source is not None
    return r.cast(r.read(args[1], ix.broadcast(ix.shape_of(source), index), node), source.dtype, dtype_of(node))
