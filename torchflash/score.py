"""The score program: the small language in which recognition tells the kernels what happens between the two
contractions.

    where((n <= m) & t0[b, n], 0.125 * s, -inf)
    x0 = t1[h] * float(n - m); where(n <= m, 0.125 * s + x0, -inf)

Text in, `Expr` out, text back (`parse(str(e)) is e`). An `Expr` is an immutable, hash-consed DAG, so shared work is
shared by identity. Everything that is ever done with a program is one bottom-up walk (`interpret`) under another
algebra: evaluation by torch (`evaluate`), bounds over index intervals (`bounds`), Triton source
(`torchflash.kernels.lower`). `vjp` differentiates.

Names: `s` raw dot product q·k (float), `p` probability (float; only in `post` programs), `b h m n` batch, head, query
and key index (int), `z0 z1 …` sizes (int), `t0[i, j] …` captured tensors at integer indices (`t0[()]` when 0-d).
A program of rows is `k` at one or two indices: where key n of batch b lies (torchflash/kernels/op.py).
Floats are float32, ints int64. `/` divides floats; `//` and `%` round towards minus infinity as in Python and torch;
`int32` is what 32 bits hold of an int.
"""

from __future__ import annotations

import ast
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

MAX_TEXT = 8192  # characters; a longer program is a skip, not a kernel
MAX_NODES = 256  # distinct operations

BINARY = {"+": 11, "-": 11, "*": 12, "/": 12, "//": 12, "%": 12, "**": 14, "&": 9, "^": 8, "|": 7,
          "<=": 6, "<": 6, ">=": 6, ">": 6, "==": 6, "!=": 6}  # operator -> binding strength  # fmt: skip
COMPARE = frozenset(("<=", "<", ">=", ">", "==", "!="))
UNARY = {"neg": "-", "~": "~"}
_UNARY_STRENGTH = 13
FLOAT_FUNCTIONS = frozenset(
    (
        "exp",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "sigmoid",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "erf",
        "half",
        "bfloat16",
        "float",
    )
)
ROUNDING = frozenset(("floor", "ceil", "trunc", "round", "sign"))
_OTHERS = frozenset(("where", "abs", "minimum", "maximum", "int", "int32", "bool", "nan_to_num", "isnan"))
FUNCTIONS = FLOAT_FUNCTIONS | ROUNDING | _OTHERS
ARITY = {"where": 3, "minimum": 2, "maximum": 2}
INDEX_NAMES = frozenset("bhmn")
ROWS = "k"  # what a program of rows reads: k[t0[b, n // 16], n % 16]


class ScoreError(ValueError):
    """The text is not a score program: the message says what, where and why."""


class Expr:
    """One operation of a program. `op` is "const", "name", "load", an operator, or a function; `value` is the
    constant, the name, or the name of the capture that is loaded. Structurally equal expressions are the same
    object."""

    __slots__ = ("__weakref__", "args", "op", "value")
    _interned: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], Expr]] = weakref.WeakValueDictionary()

    op: str
    args: tuple[Expr, ...]
    value: Any

    def __new__(cls, op: str, args: tuple[Expr, ...] = (), value: Any = None) -> Expr:
        key = (op, tuple(id(a) for a in args), type(value), repr(value) if isinstance(value, float) else value)
        found = cls._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            found.op, found.args, found.value = op, args, value
            cls._interned[key] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (str(self),)

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        return f"<{to_text(self)}>"


def const(value: bool | int | float) -> Expr:
    return Expr("const", value=value)


def name(text: str) -> Expr:
    return Expr("name", value=text)


def load(target: str, indices: Sequence[Expr]) -> Expr:
    return Expr("load", tuple(indices), target)


def call(op: str, *args: Expr) -> Expr:
    """An operation, without simplification; `torchflash.score.build` simplifies."""
    return Expr(op, args)


# ------------------------------------------------------------------------------------------------------------- walking


def topological(*roots: Expr) -> list[Expr]:
    """Every expression below `roots`, operands before users."""
    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        e, done = stack.pop()
        if e in order:
            continue
        if done:
            order[e] = None
        else:
            stack.append((e, True))
            stack.extend((a, False) for a in reversed(e.args) if a not in order)
    return list(order)


def names(*exprs: Expr) -> frozenset[str]:
    """Every name a program mentions, captures included."""
    return frozenset(e.value for e in topological(*exprs) if e.op in ("name", "load"))


def loads(*exprs: Expr) -> tuple[Expr, ...]:
    """The distinct loads of captured tensors, inner ones first."""
    return tuple(e for e in topological(*exprs) if e.op == "load")


def interpret(expr: Expr, algebra: Any, memo: dict[Expr, Any] | None = None) -> Any:
    """Bottom-up: `algebra.const(v)`, `.name(n)`, `.load(expr, indices)`, `.call(op, expr, args)`; each shared
    operation once."""
    memo = {} if memo is None else memo
    for e in topological(expr):
        if e in memo:
            continue
        args = [memo[a] for a in e.args]
        if e.op == "const":
            memo[e] = algebra.const(e.value)
        elif e.op == "name":
            memo[e] = algebra.name(e.value)
        elif e.op == "load":
            memo[e] = algebra.load(e, args)
        else:
            memo[e] = algebra.call(e.op, e, args)
    return memo[expr]


def substitute(expr: Expr, mapping: Mapping[Expr, Expr], make: Callable[..., Expr] | None = None) -> Expr:
    """Replace sub-expressions; what is above them is built again by `make` (default: as it was)."""
    make = make or call
    memo = dict(mapping)
    for e in topological(expr):
        if e not in memo:
            args = [memo[a] for a in e.args]
            same = all(x is y for x, y in zip(args, e.args, strict=True))
            memo[e] = e if same else Expr(e.op, tuple(args), e.value) if e.value is not None else make(e.op, *args)
    return memo[expr]


def renamed(expr: Expr, mapping: Mapping[str, str]) -> Expr:
    """With other names, and targets of loads."""
    memo: dict[Expr, Expr] = {}
    for e in topological(expr):
        args = [memo[a] for a in e.args]
        if e.op in ("name", "load"):
            target = mapping.get(e.value, e.value)
            memo[e] = load(target, args) if e.op == "load" else name(target)
        else:
            memo[e] = call(e.op, *args) if args else e
    return memo[expr]


class _Kinds:
    def __init__(self, captures: Mapping[str, str]):
        self.captures = captures

    def const(self, v: Any) -> str:
        return "b" if isinstance(v, bool) else "i" if isinstance(v, int) else "f"

    def name(self, n: str) -> str:
        return "f" if n in ("s", "p", "g") else "i"

    def load(self, e: Expr, args: list[str]) -> str:
        return self.captures[e.value]

    def call(self, op: str, e: Expr, args: list[str]) -> str:
        if op in COMPARE or op in ("isnan", "bool"):
            return "b"
        if op == "/" or op in FLOAT_FUNCTIONS:
            return "f"
        if op in ("int", "int32"):
            return "i"
        top = max(args[1:] if op == "where" else args, key="bif".index)
        return "i" if top == "b" and op in ("+", "-", "*", "//", "%", "**", "neg") else top


def kind(expr: Expr, captures: Mapping[str, str], memo: dict[Expr, Any] | None = None) -> str:
    """ "b" bool, "i" int64 or "f" float32, given the kind of each capture by name."""
    return str(interpret(expr, _Kinds(captures), memo))


def capture_kinds(tensors: Sequence[Tensor]) -> dict[str, str]:
    """{"t0": "f", …} from the captured tensors' dtypes."""
    return {
        f"t{i}": "b" if t.dtype == torch.bool else "f" if t.dtype.is_floating_point else "i"
        for i, t in enumerate(tensors)
    }


# --------------------------------------------------------------------------------------------------------------- text


def to_text(expr: Expr) -> str:
    """Canonical text: temporaries `x0 = …; ` for every operation used more than once, then the value."""
    order = topological(expr)
    uses = dict.fromkeys(order, 0)
    for e in order:
        for a in e.args:
            uses[a] += 1
    texts: dict[Expr, tuple[str, int]] = {}
    lines: list[str] = []
    for e in order:
        text, strength = _print(e, [texts[a] for a in e.args])
        if uses[e] > 1 and e.args:
            lines.append(f"x{len(lines)} = {text}; ")
            text, strength = f"x{len(lines) - 1}", 99
        texts[e] = text, strength
    return "".join(lines) + texts[expr][0]


def _print(e: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
    if e.op == "const":
        if isinstance(e.value, float):
            text = repr(e.value)
            return text, _UNARY_STRENGTH if text.startswith("-") else 99
        return str(e.value), _UNARY_STRENGTH if not isinstance(e.value, bool) and e.value < 0 else 99
    if e.op == "name":
        return e.value, 99
    if e.op == "load":
        return f"{e.value}[{', '.join(a for a, _ in args) or '()'}]", 99
    if e.op in BINARY:
        k = BINARY[e.op]
        # comparisons do not chain, ** is right-associative: parenthesise both sides of equal strength there
        left, right = args
        lhs = left[0] if left[1] > k or (left[1] == k and k not in (6, 14)) else f"({left[0]})"
        rhs = right[0] if right[1] > k else f"({right[0]})"
        return f"{lhs} {e.op} {rhs}", k
    if e.op in UNARY:
        a, k = args[0]
        literal = e.args[0].op == "const"  # "-1" is a constant; the negation of one is "-(1)"
        return UNARY[e.op] + (
            a if k >= _UNARY_STRENGTH and not literal and not a.startswith("-") else f"({a})"
        ), _UNARY_STRENGTH
    return f"{e.op}({', '.join(a for a, _ in args)})", 99


_BINOPS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
ast.Pow: "**",
           ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}  # fmt: skip
_COMPARES: dict[type, str] = {ast.LtE: "<=", ast.Lt: "<", ast.GtE: ">=", ast.Gt: ">", ast.Eq: "==", ast.NotEq: "!="}


def parse(text: str) -> Expr:
    """The program in `text`. Raises ScoreError with the offending piece when it is not one."""
    if len(text) > MAX_TEXT:
        raise ScoreError(f"score program of {len(text)} characters; at most {MAX_TEXT}")
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError) as e:
        raise ScoreError(f"not a score program: {text!r} ({e})") from None
    scope: dict[str, Expr] = {}
    for statement in body[:-1]:
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            raise ScoreError(f"expected 'x0 = …;' before the value, found {ast.unparse(statement)!r}")
        scope[statement.targets[0].id] = _expr(statement.value, scope)
    if not body or not isinstance(body[-1], ast.Expr):
        raise ScoreError(f"a score program ends with the value: {text!r}")
    return _expr(body[-1].value, scope)


def _is_tensor(target: str) -> bool:
    return target == ROWS or (target[0] == "t" and target[1:].isdigit())


def _expr(node: ast.expr, scope: Mapping[str, Expr]) -> Expr:
    def sub(x: ast.expr) -> Expr:
        return _expr(x, scope)

    match node:
        case ast.Constant(value=bool() | int() | float()):
            return const(node.value)  # type: ignore[arg-type]
        case ast.Name(id="inf" | "nan"):
            return const(float(node.id))
        case ast.Name():
            if node.id in scope:
                return scope[node.id]
            if node.id in "spgbhmn" or (node.id[0] == "z" and node.id[1:].isdigit()):
                return name(node.id)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as v)) if not isinstance(v, bool):
            return const(-v)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf" | "nan" as v)):
            return const(-float(v))
        case ast.UnaryOp(op=ast.USub()):
            return call("neg", sub(node.operand))
        case ast.UnaryOp(op=ast.Invert()):
            return call("~", sub(node.operand))
        case ast.BinOp() if type(node.op) in _BINOPS:
            return call(_BINOPS[type(node.op)], sub(node.left), sub(node.right))
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARES:
            return call(_COMPARES[type(op)], sub(node.left), sub(right))
        case ast.Subscript(value=ast.Name(id=target)) if _is_tensor(target):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return load(target, [sub(i) for i in items])
        case ast.Call(func=ast.Name(id=f), keywords=[]) if f in FUNCTIONS and len(node.args) == ARITY.get(f, 1):
            return call(f, *[sub(a) for a in node.args])
    raise ScoreError(f"{ast.unparse(node)!r} is not part of the score language")


def check_limits(*exprs: Expr) -> str | None:
    """Why the programs are too large to become kernels, or None."""
    size = len(topological(*exprs))
    if size > MAX_NODES:
        return f"{size} operations; at most {MAX_NODES}"
    longest = max(len(str(e)) for e in exprs)
    return f"{longest} characters; at most {MAX_TEXT}" if longest > MAX_TEXT else None


# ---------------------------------------------------------------------------------------------------------- evaluation


class _Torch:
    def __init__(self, env: Mapping[str, Any], captures: Sequence[Tensor], dtype: torch.dtype):
        self.env, self.captures, self.dtype = env, captures, dtype
        self.device = next((v.device for v in env.values() if isinstance(v, Tensor)), torch.device("cpu"))

    def const(self, v: Any) -> Any:
        return v

    def name(self, n: str) -> Any:
        return self.env[n]

    def load(self, e: Expr, args: list[Any]) -> Any:
        t = self.captures[int(e.value[1:])]
        if t.dim():
            # unselected branches of a where may point outside: clamp, the value is not used
            index = [
                self.tensor(a).to(t.device).long().clamp(0, max(size - 1, 0))
                for a, size in zip(args, t.shape, strict=True)
            ]
            t = t[tuple(index)] if t.numel() else t.new_zeros(torch.broadcast_shapes(*[i.shape for i in index]))
        return t.to(self.dtype) if t.dtype.is_floating_point else t.long() if t.dtype != torch.bool else t

    def tensor(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        dtype = self.dtype if isinstance(x, float) else torch.bool if isinstance(x, bool) else torch.int64
        return torch.full((), x, device=self.device, dtype=dtype)  # written by the device: no copy, no waiting

    def float(self, x: Any) -> Tensor:
        return self.tensor(x).to(self.dtype)

    def call(self, op: str, e: Expr, args: list[Any]) -> Any:
        if not any(isinstance(a, Tensor) for a in args):
            args = [self.tensor(a) for a in args]
        if op in BINARY:
            a, b = args
            return _OPERATORS[op](a, b)
        match op:
            case "neg":
                return -args[0]
            case "~":
                return ~args[0]
            case "where":
                return torch.where(self.tensor(args[0]), args[1], args[2])
            case "minimum" | "maximum":
                a, b = (self.tensor(x) for x in args)
                top = torch.result_type(a, b)
                return getattr(torch, op)(a.to(top), b.to(top))
            case "int":
                return args[0].long()
            case "int32":
                return args[0].to(torch.int32).long()
            case "bool":
                return args[0].bool()
            case "float":
                return self.float(args[0])
            case "half" | "bfloat16":
                return self.float(args[0]).to(getattr(torch, op)).to(self.dtype)
            case "nan_to_num":
                return torch.where(torch.isnan(args[0]), 0.0, args[0])
            case "isnan" | "abs":
                return getattr(torch, op)(args[0])
            case _ if op in ROUNDING:
                return getattr(torch, op)(args[0])
            case _:
                return getattr(torch, op)(self.float(args[0]))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": torch.add, "-": lambda a, b: a - b, "*": torch.mul, "/": torch.true_divide, "//": torch.floor_divide, "%":
    torch.remainder, "**": torch.pow, "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "<=":
    lambda a, b: a <= b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b, ">": lambda a, b: a > b, "==": lambda a,
    b: a == b, "!=": lambda a, b: a != b}  # fmt: skip


def evaluate(
    expr: Expr,
    env: Mapping[str, Any],
    captures: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    memo: dict[Expr, Any] | None = None,
) -> Any:
    """The value of `expr` by torch, broadcast over the tensors in `env` (name -> Tensor or number). Floats are
    computed in `dtype`; loads are clamped into their capture. May return a Python number when nothing in the program
    is a tensor."""
    return interpret(expr, _Torch(env, captures, dtype), memo)


# ------------------------------------------------------------------------------------------------------ simplification


def is_int(e: Expr) -> bool:
    """Certainly an int, whatever the captures are."""
    if e.op == "const":
        return isinstance(e.value, int) and not isinstance(e.value, bool)
    if e.op == "name":
        return e.value not in ("s", "p", "g")
    return e.op in ("int", "int32") or (
        e.op in ("+", "-", "*", "//", "%", "neg", "abs", "minimum", "maximum") and all(map(is_int, e.args))
    )


def is_float(e: Expr) -> bool:
    """Certainly a float, whatever the captures are."""
    if e.op == "const":
        return isinstance(e.value, float)
    if e.op == "name":
        return e.value in ("s", "p", "g")
    if e.op == "/" or e.op in FLOAT_FUNCTIONS:
        return True
    if e.op in ("+", "-", "*", "**", "neg", "abs", "minimum", "maximum", "nan_to_num"):
        return any(map(is_float, e.args))
    return e.op == "where" and any(map(is_float, e.args[1:]))


def is_bool(e: Expr) -> bool:
    """Certainly a bool, whatever the captures are."""
    if e.op == "const":
        return isinstance(e.value, bool)
    return e.op in COMPARE or e.op in ("isnan", "bool") or (e.op in ("&", "|", "^", "~") and all(map(is_bool, e.args)))


_NEGATED = {"<=": ">", "<": ">=", ">=": "<", ">": "<=", "==": "!=", "!=": "=="}
TRUE, FALSE, ZERO = const(True), const(False), const(0.0)


def build(op: str, *args: Expr) -> Expr:
    """An operation, simplified where that cannot change a value or a kind (x * 1.0, where(True, a, b), constants …)."""
    if all(a.op == "const" for a in args):
        folded = _fold(op, args)
        if folded is not None:
            return folded
    choices = [a for a in args if a.op != "const"]
    if (
        op not in ("where", "&", "|")
        and len(choices) == 1
        and choices[0].op == "where"
        and all(a.op == "const" for a in choices[0].args[1:])
    ):
        c, *branches = choices[0].args
        return build("where", c, *(build(op, *(branch if a is choices[0] else a for a in args)) for branch in branches))
    match op:
        case "where":
            c, a, b = args
            if c.op == "const":
                chosen = a if c.value else b
                other = b if c.value else a
                # the kind of a where is that of both branches together
                return chosen if is_float(chosen) or not is_float(other) else build("float", chosen)
            if a is b:
                return a
            if c.op == "~":  # a condition is a bool, and so is what it negates
                return build("where", c.args[0], b, a)
            if a is TRUE and b is FALSE:
                return c
            if a is FALSE and b is TRUE:
                return build("~", c)
            if b.op == "where" and b.args[0] is c:
                return build("where", c, a, b.args[2])
            if a.op == "where" and a.args[0] is c:
                return build("where", c, a.args[1], b)
            if a.op == "where" and a.args[2] is b:
                return build("where", build("&", c, a.args[0]), a.args[1], b)
        case "&" | "|":
            a, b = args
            unit, zero = (TRUE, FALSE) if op == "&" else (FALSE, TRUE)
            for x, y in ((a, b), (b, a)):
                if x is unit and is_bool(y):
                    return y
                if x is zero and is_bool(y):
                    return zero
            if a is b:
                return a
        case "~":
            (a,) = args
            if a.op == "~":
                return a.args[0]
            if a.op in COMPARE and all(map(is_int, a.args)):
                return call(_NEGATED[a.op], *a.args)
        case "+":
            a, b = args
            for x, y in ((a, b), (b, a)):
                if (
                    x.op == "const"
                    and x.value == 0
                    and not isinstance(x.value, bool)
                    and (is_float(y) or (is_int(x) and is_int(y)))
                ):
                    return y
            if b.op == "neg":
                return build("-", a, b.args[0])
        case "-":
            a, b = args
            if (
                b.op == "const"
                and b.value == 0
                and not isinstance(b.value, bool)
                and (is_float(a) or (is_int(b) and is_int(a)))
            ):
                return a
        case "*":
            a, b = args
            if b.op == "const" and a.op != "const":
                a, b = b, a  # constants first
            if a.op == "const" and not isinstance(a.value, bool):
                if a.value == 1 and (is_float(b) or (is_int(a) and is_int(b))):
                    return b
                if b.op == "*" and b.args[0].op == "const" and is_float(b):
                    return build("*", const(float(a.value * b.args[0].value)), b.args[1])
                if b.op == "neg" and is_float(b):
                    return build("*", const(-a.value), b.args[0])
            return call("*", a, b)
        case "/":
            a, b = args
            if (
                b.op == "const"
                and not isinstance(b.value, bool)
                and b.value
                and math.isfinite(1.0 / b.value)
                and is_float(a)
            ):
                return build("*", const(1.0 / b.value), a)
        case "neg":
            (a,) = args
            if a.op == "neg":
                return a.args[0]
            if a.op == "*" and a.args[0].op == "const" and is_float(a):
                return build("*", const(-a.args[0].value), a.args[1])
        case "float" if is_float(args[0]):
            return args[0]
        case "int" if is_int(args[0]):
            return args[0]
        case "int32" if args[0].op in ("+", "-", "*", "neg", "int32"):  # only the last time counts
            (a,) = args
            return call("int32", _wide(a.args[0]) if a.op == "int32" else build(a.op, *map(_wide, a.args)))
        case "bool" if is_bool(args[0]):
            return args[0]
        case "half" | "bfloat16":
            (a,) = args
            if a.op == "const":
                return const(float(torch.tensor(float(a.value), dtype=torch.float64).to(getattr(torch, op))))
            if a.op == "where":
                return build("where", a.args[0], build(op, a.args[1]), build(op, a.args[2]))
            if a.op == op:
                return a
            if is_bool(a):
                return build("float", a)
    return call(op, *args)


def _wide(e: Expr) -> Expr:
    return e.args[0] if e.op == "int32" else e


def _fold(op: str, args: Sequence[Expr]) -> Expr | None:
    try:
        value = evaluate(call(op, *args), {}, (), torch.float64)
    except (RuntimeError, OverflowError):
        return None
    if isinstance(value, Tensor):
        value = value.item()
    return const(value)


# ------------------------------------------------------------------------------------------------------ differentiation


def vjp(expr: Expr, captures: Mapping[str, str], cotangent: Expr | None = None) -> dict[Expr, Expr]:
    """Reverse-mode derivative of `expr`, a float program, for the upstream gradient `g` (or `cotangent`).

    `captures` gives the kind of each capture. Returns {name `s`, name `p`, each float load: its gradient}, for those
    the value depends on. A where in the program stays a where in the gradient, so what was not selected contributes
    exactly 0, even where it is inf or NaN. Ties in minimum and maximum share the gradient and clamps are spelled by
    where, as torch does.
    """
    order = topological(expr)
    memo: dict[Expr, Any] = {}
    for e in order:
        kind(e, captures, memo)
    active: set[Expr] = set()
    for e in order:
        leaf = (e.op == "name" and e.value in ("s", "p")) or e.op == "load"
        if memo[e] == "f" and (leaf or (e.op != "load" and any(a in active for a in e.args))):
            active.add(e)
    adjoint: dict[Expr, Expr] = {expr: cotangent or name("g")} if expr in active else {}
    result: dict[Expr, Expr] = {}
    for e in reversed(order):
        g = adjoint.pop(e, None)
        if g is None:
            continue
        if e.op in ("name", "load"):
            result[e] = g
            continue
        for a, d in zip(e.args, _pullback(e, g), strict=True):
            if d is not None and a in active:
                adjoint[a] = build("+", adjoint[a], d) if a in adjoint else d
    return result


def _pullback(e: Expr, g: Expr) -> tuple[Expr | None, ...]:
    x = e.args[0]
    c = const
    match e.op:
        case "+":
            return g, g
        case "-":
            return g, build("neg", g)
        case "*":
            return build("*", e.args[1], g), build("*", x, g)
        case "/":
            y = e.args[1]
            return build("/", g, y), build("neg", build("/", build("*", g, e), y))
        case "**":
            y = e.args[1]
            dx = build("*", build("*", g, y), build("**", x, build("-", y, c(1))))
            # torch: x ** 0 has gradient 0 everywhere; the gradient for the exponent is 0 where x == 0 and y >= 0
            dx = build("where", build("==", y, c(0)), ZERO, dx)
            dy = build(
                "where",
                build("&", build("==", x, c(0)), build(">=", y, c(0))),
                ZERO,
                build("*", g, build("*", e, build("log", x))),
            )
            return dx, dy
        case "neg":
            return (build("neg", g),)
        case "where":
            return None, build("where", x, g, ZERO), build("where", x, ZERO, g)
        case "minimum" | "maximum":
            a, b = e.args
            wins = "<" if e.op == "minimum" else ">"
            shared = build("where", build("==", a, b), build("*", c(0.5), g), ZERO)
            return build("where", build(wins, a, b), g, shared), build("where", build(wins, b, a), g, shared)
        case "exp":
            return (build("*", g, e),)
        case "expm1":
            return (build("*", g, build("exp", x)),)
        case "log":
            return (build("/", g, x),)
        case "log1p":
            return (build("/", g, build("+", x, c(1.0))),)
        case "tanh":
            return (build("*", g, build("-", c(1.0), build("*", e, e))),)
        case "sigmoid":
            return (build("*", g, build("*", e, build("-", c(1.0), e))),)
        case "sqrt":
            return (build("/", build("*", c(0.5), g), e),)
        case "rsqrt":
            return (build("*", build("*", c(-0.5), g), build("*", e, build("*", e, e))),)
        case "abs":
            return (build("*", g, build("sign", x)),)
        case "sin":
            return (build("*", g, build("cos", x)),)
        case "cos":
            return (build("neg", build("*", g, build("sin", x))),)
        case "erf":
            return (build("*", build("*", c(2 / math.sqrt(math.pi)), g), build("exp", build("neg", build("*", x, x)))),)
        case "half" | "bfloat16" | "float":
            return (g,)
        case "nan_to_num":
            return (build("where", build("isnan", x), ZERO, g),)
    return (None,) * len(e.args)


# --------------------------------------------------------------------------------------------------------------- bounds


class Unbounded(Exception):
    """An expression whose range the index intervals do not determine."""


class Integers:
    """Interval arithmetic on Python numbers; `torchflash.kernels.lower` has the same operations as Triton source."""

    true, false = True, False
    number = staticmethod(lambda v: v)
    minimum = staticmethod(min)
    maximum = staticmethod(max)
    add = staticmethod(lambda a, b: a + b)
    sub = staticmethod(lambda a, b: a - b)
    mul = staticmethod(lambda a, b: a * b)
    floordiv = staticmethod(lambda a, b: a // b)
    le = staticmethod(lambda a, b: a <= b)
    both = staticmethod(lambda a, b: a and b)
    either = staticmethod(lambda a, b: a or b)
    negate = staticmethod(lambda a: not a)


def bounds(
    expr: Expr,
    env: Mapping[str, tuple[Any, Any]],
    algebra: Any = Integers,
    known: Mapping[Expr, tuple[Any, Any]] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """(some element may be True, every element is True) of a boolean program when each name lies in its inclusive
    interval, and so does each integer program in `known`; of a boolean one it says what is returned here.

    Sound for every program: what cannot be bounded (loads, floats) is "may be, need not be". `algebra` supplies the
    arithmetic on interval ends, `Integers` for Python.
    """
    A = algebra

    def boolean(e: Expr) -> tuple[Any, Any]:
        if e in known:
            return known[e]
        try:
            match e.op:
                case "const" if isinstance(e.value, bool):
                    return (A.true, A.true) if e.value else (A.false, A.false)
                case "~":
                    can, must = boolean(e.args[0])
                    return A.negate(must), A.negate(can)
                case "&" | "|":
                    (ca, ma), (cb, mb) = map(boolean, e.args)
                    f = A.both if e.op == "&" else A.either
                    return f(ca, cb), f(ma, mb)
                case "where":
                    (cc, mc), (ca, ma), (cb, mb) = map(boolean, e.args)
                    can = A.either(A.both(cc, ca), A.both(A.negate(mc), cb))
                    return can, A.either(A.both(ma, mb), A.either(A.both(mc, ma), A.both(A.negate(cc), mb)))
                case "<=" | "<" | ">=" | ">" | "==" | "!=":
                    return compare(e.op, integer(e.args[0]), integer(e.args[1]))
        except Unbounded:
            pass
        return A.true, A.false

    def compare(op: str, x: tuple[Any, Any], y: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, b), (c, d) = x, y
        match op:
            case "<=":
                return A.le(a, d), A.le(b, c)
            case "<":
                return A.negate(A.le(d, a)), A.negate(A.le(c, b))
            case ">=":
                return A.le(c, b), A.le(d, a)
            case ">":
                return A.negate(A.le(b, c)), A.negate(A.le(a, d))
        equal = A.both(A.le(a, d), A.le(c, b)), A.both(A.le(b, c), A.le(d, a))
        return equal if op == "==" else (A.negate(equal[1]), A.negate(equal[0]))

    def integer(e: Expr) -> tuple[Any, Any]:
        if e in known:
            return known[e]
        match e.op:
            case "const" if isinstance(e.value, int) and not isinstance(e.value, bool):
                return (A.number(e.value),) * 2
            case "name" if e.value in env:
                return env[e.value]
            case "+":
                (a, b), (c, d) = map(integer, e.args)
                return A.add(a, c), A.add(b, d)
            case "-":
                (a, b), (c, d) = map(integer, e.args)
                return A.sub(a, d), A.sub(b, c)
            case "neg":
                a, b = integer(e.args[0])
                return A.sub(A.number(0), b), A.sub(A.number(0), a)
            case "*":
                (a, b), (c, d) = map(integer, e.args)
                ends = [A.mul(x, y) for x in (a, b) for y in (c, d)]
                low = A.minimum(A.minimum(ends[0], ends[1]), A.minimum(ends[2], ends[3]))
                return low, A.maximum(A.maximum(ends[0], ends[1]), A.maximum(ends[2], ends[3]))
            case "//" if _positive(e.args[1]):
                (a, b), (c, d) = map(integer, e.args)
                if c is d or c == d:
                    return A.floordiv(a, c), A.floordiv(b, c)
            case "%" if _positive(e.args[1]):
                _, d = integer(e.args[1])
                return A.number(0), A.sub(d, A.number(1))
            case "abs":
                a, b = integer(e.args[0])
                zero = A.number(0)
                return A.maximum(zero, A.maximum(a, A.sub(zero, b))), A.maximum(b, A.sub(zero, a))
            case "minimum" | "maximum":
                (a, b), (c, d) = map(integer, e.args)
                f = A.minimum if e.op == "minimum" else A.maximum
                return f(a, c), f(b, d)
            case "int" if is_int(e.args[0]):
                return integer(e.args[0])
        raise Unbounded

    return boolean(expr)


def _positive(e: Expr) -> bool:
    """A divisor that is certainly positive: a constant or a size."""
    return (e.op == "const" and e.value > 0) or (e.op == "name" and e.value.startswith("z"))
