"""Programs as Triton source: the score, post and keep functions, their gradients and the scatter of captured gradients.

The score program `where((n <= m) & t0[b, n], 0.125 * s, -inf)` becomes

    def score_<hash>(s, b, h, m, n, T, S, Z):
        x0 = n <= m
        x1 = tl.load(T[0] + …, mask=…, other=0)
        …
        return x4

`b`, `h` are scalars; `m`, `n` are int32 tiles that broadcast, [BLOCK_M, 1] and [1, BLOCK_N] or the transposes, so
that one function serves every kernel. T holds the captured pointers, S their strides and then sizes, both flat, Z the
sizes z0 z1 …. A load is masked by the capture's own bounds: tile tails and unselected branches read nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torchflash import score as sc
from torchflash.kernels import generated
from torchflash.kernels.forms import Form, float32, is_difference, same_in_tile, spans
from torchflash.kernels.program import G, P, Program, S, kind_map
from torchflash.score import Expr

INDICES = "b, h, m, n, T, S, Z"
_LARGEST = 3.4028234663852886e38
_CALLS = {"exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt_rn", "rsqrt": "tl.rsqrt",
          "sin": "tl.sin", "cos": "tl.cos", "erf": "tl.erf", "tanh": "tanh", "sigmoid": "sigmoid",
          "expm1": "expm1", "log1p": "log1p", "floor": "tl.floor", "ceil": "tl.ceil",
          "trunc": "trunc", "round": "round_even"}  # fmt: skip


def float_text(v: float) -> str:
    """A float32 literal. Triton would make what float32 cannot hold a float64."""
    if math.isnan(v):
        return 'float("nan")'
    if abs(v) > _LARGEST:
        return 'float("inf")' if v > 0 else 'float("-inf")'
    v = float32(v)
    if v and abs(v) < 2.0**-126:
        return f"tl.full([], {v!r}, tl.float32)"
    return repr(v)


class Printer:
    """An algebra for `score.interpret`: emits one line per operation, returns its text. `fast`: for operands in half
    precision. `near`: differences x - y of integers that are known to be less than forms.NEAR."""

    def __init__(
        self, kinds: dict[str, str], ranks: Sequence[int], fast: bool = False, near: frozenset[Expr] = frozenset()
    ):
        self.kinds, self.fast, self.near = kinds, fast, near
        self.lines: list[str] = []
        self.kind_memo: dict[Expr, Any] = {}
        self.operands: dict[Expr, list[str]] = {}  # the texts of what each operation is applied to
        self.first = [sum(ranks[:i]) for i in range(len(ranks))]
        self.total = sum(ranks)

    def emit(self, text: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def kind(self, e: Expr) -> str:
        return sc.kind(e, self.kinds, self.kind_memo)

    def cast(self, e: Expr, text: str, want: str) -> str:
        have = self.kind(e)
        if e.op == "const":
            v = e.value
            if want == "f":
                return float_text(float(v))
            return str(int(v)) if want == "i" else f"({bool(v)})"
        if have == want:
            return text
        if want == "b":
            return f"({text} != 0)"
        return f"tl.cast({text}, {'tl.float32' if want == 'f' else 'tl.int32' if have == 'b' else 'tl.int64'})"

    def const(self, v: Any) -> str:
        return float_text(v) if isinstance(v, float) else f"({v})"

    def name(self, n: str) -> str:
        return f"Z[{n[1:]}]" if n[0] == "z" else n

    # ------------------------------------------------------------------------------------------------------- loads

    def place(self, e: Expr, args: Sequence[str], strides: str) -> tuple[str, str]:
        """(element offset, bounds mask or "") of a load or scatter at `args`; `strides` names the tuple of strides."""
        first = self.first[int(e.value[1:])]
        offset, inside = [], []
        for j, (index, text) in enumerate(zip(e.args, args, strict=True), first):
            size = f"S[{self.total + j}]"
            if index.op == "const":
                if index.value:
                    offset.append(f"tl.cast({strides}[{j}], tl.int64) * {index.value}")
                    inside.append(f"({index.value} < {size})")
                continue
            if self.kind(index) != "i":
                text = self.cast(index, text, "i")
            offset.append(f"tl.cast({text}, tl.int64) * {strides}[{j}]")
            if index.op != "name":
                inside.append(f"({text} >= 0)")
            inside.append(f"({text} < {size})")
        return " + ".join(offset) or "0", " & ".join(inside)

    def load(self, e: Expr, args: list[str]) -> str:
        offset, mask = self.place(e, args, "S")
        pointer = f"T[{e.value[1:]}] + ({offset})"
        value = self.emit(f"tl.load({pointer}, mask={mask}, other=0)" if mask else f"tl.load({pointer})")
        kind = self.kind(e)
        if kind == "b":
            return value
        return self.emit(f"tl.cast({value}, tl.float32)" if kind == "f" else f"as_index({value})")

    # -------------------------------------------------------------------------------------------------- operations

    def call(self, op: str, e: Expr, args: list[str]) -> str:
        self.operands[e] = args
        return self.emit(self.operation(op, e, args))

    def operation(self, op: str, e: Expr, args: list[str]) -> str:
        kind = self.kind(e)

        def all_as(want: str) -> list[str]:
            return [self.cast(a, t, want) for a, t in zip(e.args, args, strict=True)]

        if op in sc.COMPARE:
            a, b = all_as(max(map(self.kind, e.args), key="bif".index))
            return f"{a} {op} {b}"
        if op in ("&", "|", "^"):
            a, b = all_as(kind)
            return f"{a} {op} {b}"
        if op in ("+", "-"):
            a, b = all_as(kind)
            if kind == "i" and sc.loads(e):  # what is loaded may need all of 32 bits
                a = f"tl.cast({a}, tl.int64)"
            return f"{a} {op} {b}"
        if op == "*":
            a, b = all_as(kind)
            return f"tl.cast({a}, tl.int64) * {b}" if kind == "i" else f"{a} * {b}"
        if op == "/":
            a, b = all_as("f")
            return f"{a} / {b}"
        if op in ("//", "%"):
            return self.divide(op, e, all_as(kind), kind)
        if op == "**":
            return self.power(e, all_as(kind), kind)
        if op == "where":
            a, b = (self.cast(x, t, kind) for x, t in zip(e.args[1:], args[1:], strict=True))
            return f"tl.where({self.cast(e.args[0], args[0], 'b')}, {a}, {b})"
        if op in ("minimum", "maximum"):
            a, b = all_as(kind)
            nan = ", propagate_nan=tl.PropagateNan.ALL" if kind == "f" else ""
            return f"tl.{op}({a}, {b}{nan})"
        (a,) = args
        match op:
            case "neg":
                return f"-({self.cast(e.args[0], a, kind)})"
            case "~":
                return f"({a} == 0)" if kind == "b" else f"-1 - {a}"
            case "int":
                if self.kind(e.args[0]) == "f":
                    return f"tl.cast({a}, tl.int64)"
                return self.cast(e.args[0], a, "i")
            case "int32":
                return f"tl.cast({self.cast(e.args[0], a, 'i')}, tl.int32)"
            case "bool":
                return self.cast(e.args[0], a, "b")
            case "float":
                return self.difference(e.args[0]) or self.cast(e.args[0], a, "f")
            case "half" | "bfloat16":
                value = self.cast(e.args[0], a, "f")
                if op == "bfloat16" and spans_tile(e):
                    return f"bfloat16_rounded({value})"
                return f"tl.cast(tl.cast({value}, {'tl.float16' if op == 'half' else 'tl.bfloat16'}), tl.float32)"
            case "isnan":
                return f"{a} != {a}"
            case "nan_to_num":
                return f"tl.where({a} == {a}, {a}, 0.0)" if kind == "f" else a
            case "sign":
                one, zero = ("1.0", "0.0") if kind == "f" else ("1", "0")
                return f"tl.where({a} > 0, {one}, tl.where({a} < 0, -{one}, {zero}))"
            case "abs":
                return f"tl.abs({a})"
            case "floor" | "ceil" | "trunc" | "round" if kind != "f":
                return a
        function = "tanh_fast" if op == "tanh" and self.fast else _CALLS[op]
        return f"{function}({self.cast(e.args[0], a, 'f')})"

    def difference(self, e: Expr) -> str | None:
        """float(x - y) of loaded integers: a tile of int64 is slow to convert, and x and y are vectors."""
        if not is_difference(e) or self.kind(e) != "i" or not sc.loads(e):
            return None
        function = "float_of_near_difference" if e in self.near else "float_of_difference"
        return f"{function}({', '.join(self.operands[e])})"

    def divide(self, op: str, e: Expr, args: list[str], kind: str) -> str:
        a, b = args
        if kind == "f":
            return f"tl.floor({a} / {b})" if op == "//" else f"{a} - tl.floor({a} / {b}) * {b}"
        if never_negative(e.args[0]) and positive(e.args[1]):
            return f"{a} {op} {b}"
        return f"{'floor_div' if op == '//' else 'floor_mod'}({a}, {b})"

    def power(self, e: Expr, args: list[str], kind: str) -> str:
        a, b = args
        y = e.args[1]
        if y.op == "const" and float(y.value).is_integer() and 1 <= y.value <= 8:
            base = f"tl.cast({a}, tl.int64)" if kind == "i" else a
            return " * ".join([base] * int(y.value))
        if kind == "f" and y.op == "const" and y.value == 0.5:
            return f"tl.sqrt_rn({a})"
        if kind == "f" and y.op == "const" and y.value == -1:
            return f"1.0 / {a}"
        if kind == "f":
            return f"power(0.0 + {a}, 0.0 + {b})"
        return f"tl.cast(round_even(power(tl.cast({a}, tl.float32), tl.cast({b}, tl.float32))), tl.int64)"


def never_negative(e: Expr) -> bool:
    if e.op == "const":
        return e.value >= 0
    if e.op == "name":
        return e.value in sc.INDEX_NAMES or e.value[0] == "z"
    return e.op in ("+", "*", "//", "%") and all(map(never_negative, e.args))


def positive(e: Expr) -> bool:
    return (e.op == "const" and e.value > 0) or (e.op == "name" and e.value[0] == "z")


def full_tile(e: Expr, text: str, like: str) -> str:
    """`text` broadcast to a whole float tile, where the program itself does not span it."""
    return text if spans_tile(e) else f"tl.full({like}.shape, 0.0, tl.float32) + {text}"


def spans_tile(e: Expr) -> bool:
    """Whether the value is [BLOCK_M, BLOCK_N] in a tile, rather than a vector or a scalar."""
    used = sc.names(e)
    return bool(used & {"s", "p", "g"}) or {"m", "n"} <= used


# ----------------------------------------------------------------------------------------------------------- functions


@functools.cache
def value_function(form: Form, which: str, ranks: tuple[int, ...], fast: bool) -> Any:
    """The inner score, its body in plain tiles, or post, as a jitted function."""
    program = form.program
    e = {"score": form.inner, "body": form.body, "post": program.post}[which]
    assert e is not None
    argument = "p" if which == "post" else "s"
    printer = Printer(program.kind_map, ranks, fast, form.near if which == "body" else frozenset())
    result = full_tile(e, sc.interpret(e, printer), argument)
    return generated.function(which, f"{argument}, {INDICES}", tuple(printer.lines), result)


@functools.cache
def condition_function(kinds: tuple[str, ...], condition: Expr, ranks: tuple[int, ...]) -> Any:
    """A condition on indices and captures of these kinds, as keep, as a jitted function."""
    printer = Printer(kind_map(kinds), ranks)
    result = printer.cast(condition, sc.interpret(condition, printer), "b")
    return generated.function("condition", INDICES, tuple(printer.lines), result)


@functools.cache
def masked_function(kinds: tuple[str, ...], value: Expr, ranks: tuple[int, ...]) -> Any:
    """What is added to scores where nothing is kept, as a jitted function."""
    printer = Printer(kind_map(kinds), ranks)
    result = sc.interpret(value, printer)
    return generated.function("masked", INDICES, tuple(printer.lines), result)


@functools.cache
def rows_function(program: Program, ranks: tuple[int, ...]) -> Any:
    """The indices of the rows of keys n, a vector, as a jitted function; None where key n is row n."""
    if not program.rows:
        return None
    printer = Printer(program.kind_map, ranks)
    memo: dict[Expr, Any] = {}
    at = [printer.cast(i, sc.interpret(i, printer, memo), "i") for i in program.rows]
    return generated.function("rows", "b, n, T, S, Z", tuple(printer.lines), f"({', '.join(at)},)")


@functools.cache
def gradient_function(form: Form, which: str, ranks: tuple[int, ...], scatter: tuple[int, ...], fast: bool) -> Any:
    """The gradient for s (of the inner score or its body) or p (of post), which also adds the gradients of the captures
    in `scatter` to float32 buffers: G holds their pointers, GS their strides (at the places of S); lanes that are not
    `valid` add nothing."""
    program = form.program
    if which == "post":
        argument, leaf, vjp, own = "p", P, program.post_vjp, program.post_vjp
    else:
        e = form.inner if which == "score" else form.body
        argument, leaf, vjp, own = "s", S, program.score_vjp, sc.vjp(e, program.kind_map)
    printer = Printer(program.kind_map, ranks, fast, form.near if which == "body" else frozenset())
    memo: dict[Expr, Any] = {}
    zero = "tl.full(g.shape, 0.0, tl.float32)"
    result = full_tile(own[leaf], sc.interpret(own[leaf], printer, memo), "g") if leaf in own else zero
    for load, adjoint in vjp.items():
        if load.op == "load" and int(load.value[1:]) in scatter:
            value = full_tile(adjoint, sc.interpret(adjoint, printer, memo), "g")
            _scatter(printer, load, value, [sc.interpret(i, printer, memo) for i in load.args])
    return generated.function(
        f"{which}_gradient", f"g, {argument}, {INDICES}, valid, G, GS", tuple(printer.lines), result
    )


def _scatter(printer: Printer, load: Expr, value: str, indices: list[str]) -> None:
    """Add a [BLOCK_M, BLOCK_N] tile of gradients: first summed over the axes the index does not use, then by
    atomics."""
    used = sc.names(*load.args)
    value = printer.emit(f"tl.where(valid, {value}, 0.0)")
    if "n" not in used:
        value = printer.emit(f"tl.sum({value}, 1, keep_dims=True)")
    if "m" not in used:
        value = printer.emit(f"tl.sum({value}, 0, keep_dims=True)")
    offset, mask = printer.place(load, indices, "GS")
    at = printer.emit(f"tl.full({value}.shape, 0, tl.int64) + {offset}")
    inside = f"({value} != 0.0)" + (f" & {mask}" if mask else "")  # NaN != 0: it is added too
    printer.lines.append(f"tl.atomic_add(G[{load.value[1:]}] + {at}, {value}, mask={inside}, sem='relaxed')")


@functools.cache
def adjoint_function(program: Program, which: str, load: Expr, ranks: tuple[int, ...], fast: bool) -> Any:
    """The gradient tile that reaches one `load`, for the kernel that sums it without atomics."""
    vjp, argument = (program.score_vjp, "s") if which == "score" else (program.post_vjp, "p")
    printer = Printer(program.kind_map, ranks, fast)
    adjoint = vjp[load]
    text = sc.interpret(adjoint, printer)
    return generated.function(
        f"{which}_adjoint", f"g, {argument}, {INDICES}", tuple(printer.lines), full_tile(adjoint, text, "g")
    )


class _Source:
    """Interval arithmetic that prints Triton source, for `score.bounds`."""

    true, false = "True", "False"

    @staticmethod
    def number(v: int) -> str:
        return str(v)

    @staticmethod
    def minimum(a: str, b: str) -> str:
        return a if a == b else f"tl.minimum({a}, {b})"

    @staticmethod
    def maximum(a: str, b: str) -> str:
        return a if a == b else f"tl.maximum({a}, {b})"

    @staticmethod
    def add(a: str, b: str) -> str:
        return f"({a} + {b})"

    @staticmethod
    def sub(a: str, b: str) -> str:
        return f"({a} - {b})"

    @staticmethod
    def mul(a: str, b: str) -> str:
        return f"(tl.cast({a}, tl.int64) * {b})"

    @staticmethod
    def floordiv(a: str, b: str) -> str:
        return f"floor_div({a}, {b})"

    @staticmethod
    def le(a: str, b: str) -> str:
        return f"({a} <= {b})"

    @staticmethod
    def both(a: str, b: str) -> str:
        if "False" in (a, b):
            return "False"
        return b if a == "True" else a if b in ("True", a) else f"({a} & {b})"

    @staticmethod
    def either(a: str, b: str) -> str:
        if "True" in (a, b):
            return "True"
        return b if a == "False" else a if b in ("False", a) else f"({a} | {b})"

    @staticmethod
    def negate(a: str) -> str:
        return {"True": "False", "False": "True"}.get(a, f"({a} == 0)")


_TILE = {"b": ("b", "b"), "h": ("h", "h"), "m": ("m0", "m1"), "n": ("n0", "n1")}


@functools.cache
def bound_function(condition: Expr) -> Any:
    """(b, h, m0, m1, n0, n1, Z) -> whether the condition may hold for some (m, n) in the inclusive ranges."""
    text = sc.bounds(condition, _TILE | _sizes(condition), _Source)[0]
    text = {"True": "n0 == n0", "False": "n0 != n0"}.get(text, text)
    return generated.function("bound", "b, h, m0, m1, n0, n1, Z", (), text)


def _sizes(*conditions: Expr) -> dict[str, tuple[str, str]]:
    return {z: (f"Z[{z[1:]}]",) * 2 for z in sc.names(*conditions) if z[0] == "z"}


@functools.cache
def range_function(
    kinds: tuple[str, ...], keep: Expr, plain: Expr | None, value: Expr | None, ranks: tuple[int, ...],
    blocks: tuple[int, int],
) -> Any:  # fmt: skip
    """(whether `keep` may hold for some element, whether `plain` holds for all, whether `value` is the finite number
    throughout that it is at the first key) of tiles side by side [TILES], or of each of their rows [ROWS, TILES] where
    the mask `spans` tiles: by the ranges of their indices and of what they load. None where that does not tell.

    (b, h, m, n, inside_m, inside_n, m_start, n_start, m0, m1, n0, n1, T, S, Z) with
        m, inside_m [BLOCK_M], n, inside_n [TILES, BLOCK_N], m_start [], n_start [TILES], m0, m1 [], n0, n1 [TILES]
    or, of rows,
        m, m_start [ROWS, 1, 1], inside_m None, n, inside_n [1, TILES, BLOCK_N], n_start [1, TILES, 1],
        m0, m1 [ROWS, 1], n0, n1 [1, TILES]
    where inside_n may be None; starts are those of the tile, ends those of the range."""
    conditions = [keep] if plain is None else [keep, plain]
    rows = spans(sc.loads(*conditions, *([] if value is None else [value])), blocks)
    leaves: dict[Expr, None] = {}
    if not all(_ranged(e, kind_map(kinds), leaves, blocks, rows) for e in conditions):
        return None
    printer = Printer(kind_map(kinds), ranks)
    memo: dict[Expr, Any] = {}

    def ends(leaf: Expr) -> tuple[str, str]:
        kind, reduced = printer.kind(leaf), ""
        if same_in_tile(leaf, blocks, rows):
            leaf = sc.substitute(leaf, STARTS)
            reduced = ", None, 2" if rows else ""
        elif "n" in sc.names(leaf):
            reduced = f", inside_n, {2 if rows else 1}"
        elif "m" in sc.names(leaf):
            reduced = f", inside_m, {2 if rows else 0}"
        text = sc.interpret(leaf, printer, memo)
        names = ("some", "every") if kind == "b" else ("least", "largest")
        found = [f"{end}({text}{reduced})" if reduced else text for end in names]
        if kind == "i":  # their differences may need more than 32 bits
            found = [f"tl.cast({x}, tl.int64)" for x in found]
        return printer.emit(found[0]), printer.emit(found[1])

    known = {leaf: ends(leaf) for leaf in leaves}
    floats = [x for x in sc.topological(*conditions) if x.op == "const" and isinstance(x.value, float)]
    numbers = {x: (float_text(x.value),) * 2 for x in floats}
    env = _TILE | _sizes(*conditions)
    may = sc.bounds(keep, env, _Source, known | numbers)[0]
    must = "False" if plain is None else sc.bounds(plain, env, _Source, known | numbers)[1]
    may, must = ({"True": "n0 == n0", "False": "n0 != n0"}.get(text, text) for text in (may, must))
    if far := _far(conditions, kind_map(kinds), known, known | numbers):
        may, must = f"({may}) | ({far})", f"({must}) & (({far}) == 0)"
    same = "n0 == n0"
    if value is not None:
        low, high = known.get(value) or ends(value)
        first, other = ends(sc.substitute(value, {sc.name("n"): sc.const(0)}))
        same = f'({low} == {first}) & ({high} == {other}) & ({low} == {high}) & ({low} > float("-inf"))'
    arguments = "b, h, m, n, inside_m, inside_n, m_start, n_start, m0, m1, n0, n1, T, S, Z"
    return generated.function("ranges", arguments, tuple(printer.lines), f"{may}, {must}, {same}")


def _far(
    conditions: Sequence[Expr], kinds: dict[str, str], known: dict[Expr, tuple[str, str]],
    ranges: dict[Expr, tuple[str, str]],
) -> str:  # fmt: skip
    """Whether integers that are loaded are so large that what is made from them may not fit into 64 bits, as of what
    stands for no time at all, or NaN may be at most what is infinite: the ranges say nothing then. "" where neither
    can be."""
    far: dict[Expr, None] = {}
    products = False
    stack = [x for e in conditions for x in sc.topological(e) if x not in known and x.op in _OVERFLOWING]
    while stack:
        e = stack.pop()
        if e in known:
            far[e] = None
        else:
            products |= e.op == "*"
            stack += e.args
    room = 2**31 if products else 2**60
    found = [f"({known[e][0]} < {-room}) | ({known[e][1]} > {room})" for e in far]
    for e in dict.fromkeys(x for c in conditions for x in sc.topological(c) if x.op in ("<=", ">=") and x not in known):
        low, high = e.args if e.op == "<=" else e.args[::-1]
        harmless = "f" not in (sc.kind(low, kinds), sc.kind(high, kinds))
        harmless |= low.op == "const" and low.value > -math.inf
        harmless |= high.op == "const" and high.value < math.inf
        if low in ranges and high in ranges and not harmless:
            a, b = ranges[low][1], ranges[high][0]
            found.append(f'({a} == {b}) & (({a} + {b} == float("inf")) | ({a} + {b} == float("-inf")))')
    return " | ".join(found)


_OVERFLOWING = {"+", "-", "*", "neg", "abs"}
STARTS = {sc.name("m"): sc.name("m_start"), sc.name("n"): sc.name("n_start")}
_LOGIC, _ARITHMETIC = {"&", "|", "~"}, {"+", "-", "*", "neg", "//", "%", "abs", "minimum", "maximum", "int"}


def _ranged(
    e: Expr, kinds: dict[str, str], leaves: dict[Expr, None], blocks: tuple[int, int], rows: bool, kind: str = "b"
) -> bool:
    """Finds the parts of a condition whose ranges are found by evaluating them: the largest that are the same in a
    tile, or load something along one axis at most, and single loads. False where a part that loads is not of the kind
    that is wanted, or is combined by what intervals do not say."""
    same = {"m", "n"} <= sc.names(e) and same_in_tile(e, blocks, rows)
    if not sc.loads(e) and not same:
        return all(_ranged(a, kinds, leaves, blocks, rows) for a in e.args if sc.is_bool(a))
    if sc.kind(e, kinds) == kind and (same or (rows and e.op == "load") or not {"m", "n"} <= sc.names(e)):
        leaves[e] = None
        return True
    if e.op in sc.COMPARE and kind == "b":
        kind = "f" if "f" in (sc.kind(a, kinds) for a in e.args) else "i"
    elif e.op not in {"b": _LOGIC, "i": _ARITHMETIC, "f": ()}[kind]:
        return False
    return all(_ranged(a, kinds, leaves, blocks, rows, kind) for a in e.args)


def is_exact(condition: Expr) -> bool:
    """Whether the ranges of what it loads tell exactly: it is one load, or that compared with a number."""
    e = condition
    while e.op == "~":
        (e,) = e.args
    loaded = [a for a in e.args if a.op == "load"] if e.op in sc.COMPARE else [e]
    rest = [a for a in e.args if a not in loaded] if e.op in sc.COMPARE else []
    return len(loaded) == 1 and loaded[0].op == "load" and all(a.op == "const" for a in rest)


__all__ = ["G", "adjoint_function", "bound_function", "condition_function", "gradient_function", "is_exact",
           "masked_function", "range_function", "value_function"]  # fmt: skip
