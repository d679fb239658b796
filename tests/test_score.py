"""The score language: text round-trips, torch evaluates it, its derivative is autograd's, its bounds hold."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchflash import score
from torchflash.score import (
    Expr,
    ScoreError,
    bounds,
    build,
    call,
    check_limits,
    const,
    evaluate,
    kind,
    load,
    name,
    parse,
    vjp,
)

settings.register_profile("score", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("score")

B, H, M, N = 2, 3, 5, 7
PROGRAMS = [
    "0.125 * s",
    "where((n <= m) & t0[b, n], 0.125 * s, -inf)",
    "x0 = t1[h] * float(n - m); where(n <= m, 0.125 * s + x0 * x0, -inf)",
    "50.0 * tanh(s / 50.0)",
    "t1[h] * s ** 2",
    "-(1) + (-2) ** 2 + s",
    "-s ** 2",
    "(-s) ** 2",
    "s - (s - (1.0 - s))",
    "s / (s / 3.0) / 2.0",
    "float((m <= n) == (n <= m)) * s",
    "where(~(t0[b, n] & t0[b, m]), s, nan)",
    "float(2 ** (3 ** b))",
    "float(-(m % 3) // 2 - n // z0 % 4) + t2[()] * s",
    "where((m ^ 3) > (n | 1), minimum(s, 1.0), maximum(abs(s), 0.5))",
    "t1[where(h < 1, 0, h - 1)] + exp(-abs(s)) * log1p(s * s)",
    "nan_to_num(s) + sigmoid(s) + rsqrt(s * s + 1.0) + sqrt(s * s + 2.0) + expm1(0.1 * s)",
    "erf(s) + sin(s) - cos(s) + sign(s)",
]


def env(**more: Any) -> dict[str, Any]:
    return {
        "b": torch.arange(B)[:, None, None, None], "h": torch.arange(H)[:, None, None], "m": torch.arange(M)[:, None],
        "n": torch.arange(N), "z0": 4, **more,
    }  # fmt: skip


def captures(seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(B, N, generator=g) < 0.7, torch.randn(H, generator=g), torch.randn((), generator=g)]


KINDS = score.capture_kinds(captures())

# ------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("text", PROGRAMS)
def test_text_round_trips(text: str) -> None:
    e = parse(text)
    assert parse(str(e)) is e
    assert pickle.loads(pickle.dumps(e)) is e


def test_canonical_text_names_what_is_shared() -> None:
    x = call("*", name("s"), const(2.0))
    assert str(call("+", x, call("tanh", x))) == "x0 = s * 2.0; x0 + tanh(x0)"
    assert parse("s + s") is call("+", name("s"), name("s"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "ends with the value"),
        ("s +", "not a score program"),
        ("foo(s)", "'foo(s)' is not part"),
        ("q", "'q' is not part"),
        ("s if m else n", "not part"),
        ("1 < m < 3", "'1 < m < 3' is not part"),
        ("where(s, 1.0)", "not part"),
        ("exp(s, s)", "not part"),
        ("'s'", "not part"),
        ("__import__('os')", "not part"),
        ("s.real", "not part"),
        ("t[0]", "not part"),
        ("s; s", "expected 'x0 = …;'"),
        ("x0 = 1", "ends with the value"),
    ],
)
def test_errors_name_the_piece(text: str, told: str) -> None:
    with pytest.raises(ScoreError) as e:
        parse(text)
    assert told in str(e.value) and "\n" not in str(e.value)


def test_limits() -> None:
    e = name("s")
    assert check_limits(e) is None
    for i in range(score.MAX_NODES):
        e = call("+", e, const(float(i)))
    assert "operations; at most 256" in str(check_limits(e))
    with pytest.raises(ScoreError, match="at most 8192"):
        parse("s + " * 4000 + "s")


# ------------------------------------------------------------------------------------------- random programs

LEAVES = {
    "f": [name("s"), const(0.5), const(-1.25), load("t1", [name("h")]), load("t2", [])],
    "i": [name("b"), name("h"), name("m"), name("n"), name("z0"), const(3), const(-2)],
    "b": [load("t0", [name("b"), name("n")]), const(True)],
}


def expressions(what: str, depth: int = 4) -> st.SearchStrategy[Expr]:
    if depth == 0:
        return st.sampled_from(LEAVES[what])
    f, i, b = (expressions(k, depth - 1) for k in "fib")

    def op(ops: str, *args: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        return st.builds(call, st.sampled_from(ops.split()), *args)

    if what == "f":
        return st.one_of(
            st.sampled_from(LEAVES["f"]), op("+ - * minimum maximum", f, f), op("abs tanh sigmoid exp sin cos", f),
            st.builds(build, st.just("neg"), f),
            op("where", b, f, f), op("float", i), op("* +", f, i),
        )  # fmt: skip
    if what == "i":
        return st.one_of(
            st.sampled_from(LEAVES["i"]), op("+ - * minimum maximum", i, i), op("abs", i),
            st.builds(build, st.just("neg"), i),
            op("// %", i, st.sampled_from([const(2), const(3), name("z0")])), op("where", b, i, i), op("& | ^", i, i),
        )  # fmt: skip
    return st.one_of(
        st.sampled_from(LEAVES["b"]), op("<= < >= > == !=", i, i), op("& | ^", b, b), op("~", b), op("where", b, b, b)
    )


@given(st.one_of(*(expressions(k) for k in "fib")))
def test_any_text_round_trips(e: Expr) -> None:
    assert parse(str(e)) is e


@given(st.sampled_from("fib").flatmap(lambda k: st.tuples(st.just(k), expressions(k))))
def test_kinds_are_those_of_the_values(pair: tuple[str, Expr]) -> None:
    what, e = pair
    assert kind(e, KINDS) == what
    value = torch.as_tensor(evaluate(e, env(s=torch.randn(B, H, M, N)), captures()))
    assert {"b": torch.bool, "i": torch.int64, "f": torch.float32}[what] == value.dtype


@given(expressions("f"))
def test_building_again_simplifies_but_keeps_the_value(e: Expr) -> None:
    memo: dict[Expr, Expr] = {}
    for x in score.topological(e):
        args = [memo[a] for a in x.args]
        memo[x] = x if not args else load(x.value, args) if x.op == "load" else build(x.op, *args)
    rebuilt = memo[e]
    s = torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(0))
    a, b = (
        torch.as_tensor(evaluate(x, env(s=s.double()), captures(), torch.float64)).expand(s.shape) for x in (e, rebuilt)
    )
    torch.testing.assert_close(a.double(), b.double(), equal_nan=True, rtol=1e-5, atol=1e-6)


def test_evaluation_is_torch() -> None:
    s = torch.randn(B, H, M, N)
    mask, slope, _ = captures()
    e = parse("x0 = t1[h] * float(n - m); where((n <= m) & t0[b, n], 0.5 * s + x0 // 2.0, -inf)")
    i, j = torch.arange(M)[:, None], torch.arange(N)
    want = 0.5 * s + (slope[:, None, None] * (j - i)) // 2.0
    want = want.masked_fill(~((j <= i) & mask[:, None, None]), -math.inf)
    torch.testing.assert_close(evaluate(e, env(s=s), captures()), want)


def test_division_and_remainder_round_down() -> None:
    m, n = torch.arange(-7, 8)[:, None], torch.tensor([-3, -2, 2, 3])
    got = [evaluate(parse(f"m {op} n"), {"m": m, "n": n}, []) for op in ("//", "%")]
    want = [[[f(int(a), int(b)) for b in n] for a in m[:, 0]] for f in (lambda a, b: a // b, lambda a, b: a % b)]
    assert [x.tolist() for x in got] == want


def test_loads_outside_are_safe() -> None:
    value = evaluate(
        parse("where(n < 3, t0[n], t1[n - 3])"), {"n": torch.arange(5)}, [torch.arange(3.0), torch.arange(3.0, 5.0)]
    )
    assert value.tolist() == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------------- derivative


def check_vjp(e: Expr) -> None:
    s = torch.randn(B, H, M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tensors = [t.double().requires_grad_() if t.is_floating_point() else t for t in captures()]
    g = torch.randn(B, H, M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    value = torch.as_tensor(evaluate(e, env(s=s), tensors, torch.float64)).expand(B, H, M, N)
    derivative = vjp(e, KINDS)
    leaves = [s, tensors[1], tensors[2]]
    want = torch.autograd.grad(value, leaves, g, allow_unused=True) if value.requires_grad else [None] * 3
    got: dict[str, Any] = {}
    for leaf, d in derivative.items():
        dense = torch.as_tensor(evaluate(d, env(s=s.detach(), g=g), tensors, torch.float64)).double().expand(B, H, M, N)
        at = "s" if leaf is name("s") else leaf.value
        total = dense if at == "s" else dense.sum((0, 2, 3)) if at == "t1" else dense.sum()
        got[at] = got.get(at, 0) + total.detach()
    for at, w in zip(("s", "t1", "t2"), want, strict=True):
        if w is None or at not in got:
            assert w is None or not w.count_nonzero(), at
            assert at not in got or not got[at].count_nonzero(), at
        else:
            torch.testing.assert_close(
                got[at], w, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m, at=at: f"{at}: {m}\n{e}"
            )


@pytest.mark.parametrize("text", [t for t in PROGRAMS if "t1[where" not in t])
def test_derivative_is_autograds(text: str) -> None:
    check_vjp(parse(text))


@given(expressions("f"))
def test_derivative_of_anything_is_autograds(e: Expr) -> None:
    s = torch.randn(B, H, M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value = torch.as_tensor(evaluate(e, env(s=s), captures(), torch.float64)).double()
    assume(value.isfinite().all() and value.abs().max() < 1e6)
    check_vjp(e)


@pytest.mark.parametrize(
    ("text", "at", "want"),
    [
        ("where(n < 2, s, -inf)", [0.0, 1.0, 2.0], [1.0, 1.0, 0.0]),
        ("where(n < 2, s, 2.0 * s + inf)", [0.0, 1.0, 2.0], [1.0, 1.0, 2.0]),
        ("where(n < 2, s, nan)", [0.0, 1.0, 2.0], [1.0, 1.0, 0.0]),
        ("where(s > 1.0, 1.0, s)", [0.0, 1.0, 2.0], [1.0, 1.0, 0.0]),
        ("nan_to_num(s)", [0.0, math.nan, 2.0], [1.0, 0.0, 1.0]),
        ("abs(s)", [-1.0, 0.0, 2.0], [-1.0, 0.0, 1.0]),
        ("maximum(s, 1.0)", [0.0, 1.0, 2.0], [0.0, 0.5, 1.0]),
        ("s ** 0", [0.0, 1.0, 2.0], [0.0, 0.0, 0.0]),
        ("half(s)", [0.1, 1.0, 2.0], [1.0, 1.0, 1.0]),
        ("floor(s) + round(s) + ceil(s)", [0.1, 1.0, 2.6], [0.0, 0.0, 0.0]),
    ],
)
def test_derivative_at_the_edges(text: str, at: list[float], want: list[float]) -> None:
    s = torch.tensor(at)
    d = vjp(parse(text), {}).get(name("s"))
    got = (
        torch.zeros(3)
        if d is None
        else torch.as_tensor(evaluate(d, {"s": s, "n": torch.arange(3), "g": torch.ones(3)}, []))
    )
    assert got.expand(3).tolist() == want


# ------------------------------------------------------------------------------------------------------------ bounds


@given(expressions("b"), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=4, max_size=4))
def test_bounds_hold_for_every_index(e: Expr, spans: list[tuple[int, int]]) -> None:
    ranges = {
        x: (low, min(low + width, top - 1)) for x, (low, width), top in zip("bhmn", spans, (B, H, M, N), strict=True)
    }
    ranges = {x: (min(low, high), high) for x, (low, high) in ranges.items()}
    can, must = bounds(e, {**ranges, "z0": (4, 4)})
    s = torch.randn(B, H, M, N)
    everywhere = torch.as_tensor(evaluate(e, env(s=s), captures())).expand(B, H, M, N)
    tile = everywhere[tuple(slice(low, high + 1) for low, high in ranges.values())]
    assert can or not tile.any()
    assert not must or tile.all()


@pytest.mark.parametrize(
    ("text", "tile", "want"),
    [
        ("n <= m", {"m": (4, 7), "n": (0, 4)}, (True, True)),
        ("n <= m", {"m": (4, 7), "n": (4, 7)}, (True, False)),
        ("n <= m", {"m": (4, 7), "n": (8, 9)}, (False, False)),
        ("(n <= m) & (m - n < 4)", {"m": (4, 7), "n": (0, 3)}, (True, False)),
        ("(n <= m) & (m - n < 4)", {"m": (3, 3), "n": (0, 3)}, (True, True)),
        ("(n <= m) & (m - n < 4)", {"m": (12, 15), "n": (0, 3)}, (False, False)),
        ("abs(m - n) <= 3", {"m": (0, 3), "n": (0, 3)}, (True, True)),
        ("m // 4 == n // 4", {"m": (4, 7), "n": (4, 7)}, (True, True)),
        ("m // 4 == n // 4", {"m": (4, 7), "n": (8, 11)}, (False, False)),
        ("t0[b, n] & (n <= m)", {"b": (0, 0), "m": (4, 7), "n": (0, 4)}, (True, False)),
        ("t0[b, n] & (n <= m)", {"b": (0, 0), "m": (0, 3), "n": (4, 7)}, (False, False)),
        ("n < z0", {"n": (0, 3), "z0": (4, 4)}, (True, True)),
    ],
)
def test_bounds_decide_tiles(text: str, tile: dict[str, Any], want: tuple[bool, bool]) -> None:
    assert tuple(map(bool, bounds(parse(text), tile))) == want


def test_products_of_masks_are_bounded() -> None:
    for op, (a, b) in itertools.product("&|", itertools.product((True, False), repeat=2)):
        can, must = bounds(call(op, const(a), const(b)), {})
        assert can == must == (a and b if op == "&" else a or b)
