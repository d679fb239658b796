"""Index algebra by brute force: the index into the source that it gives for each element of a view is numpy's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from torchflash import score
from torchflash.passes import index as ix

settings.register_profile("index", deadline=None, max_examples=120, derandomize=True)
settings.load_profile("index")

Shape = tuple[int, ...]


def axes(shape: Shape, role: str = "a") -> tuple[Any, ...]:
    return tuple(ix.axis(f"{role}{i}", sympy.Integer(s)) for i, s in enumerate(shape))


def sizes(shape: Shape) -> tuple[Any, ...]:
    return tuple(map(sympy.Integer, shape))


def evaluate(e: Any, at: dict[Any, int]) -> int:
    return int(e.subs(at)) if e.free_symbols else int(e)


def factors(n: int) -> st.SearchStrategy[Shape]:
    """Shapes with n elements, ones included."""

    def grow(parts: list[int]) -> st.SearchStrategy[Shape]:
        return st.permutations(parts).map(tuple)

    primes = [p for p, e in sympy.factorint(n).items() for _ in range(e)]

    def join(cuts: list[bool]) -> list[int]:
        groups, current = [], 1
        for p, cut in zip(primes, cuts, strict=True):
            current *= p
            if cut:
                groups.append(current)
                current = 1
        return [*groups, current]

    cuts = st.lists(st.booleans(), min_size=len(primes), max_size=len(primes))
    return cuts.map(join).flatmap(grow)


@given(st.sampled_from([1, 4, 6, 8, 12, 24, 36, 60]).flatmap(lambda n: st.tuples(factors(n), factors(n))))
def test_reshape_is_numpys(shapes: tuple[Shape, Shape]) -> None:
    src, dst = shapes
    index = axes(dst)
    found = ix.reshape(sizes(src), sizes(dst), index)
    source = np.arange(math.prod(src)).reshape(src)
    view = source.reshape(dst)
    for at in np.ndindex(*dst):
        where = tuple(evaluate(e, dict(zip(index, at, strict=True))) for e in found)
        assert all(0 <= i < s for i, s in zip(where, src, strict=True)), (src, dst, found)
        assert source[where] == view[at], (src, dst, found)


@given(st.sampled_from([8, 12, 24, 36]).flatmap(lambda n: st.tuples(factors(n), factors(n), factors(n))))
def test_reshaping_there_and_back_is_the_identity(shapes: tuple[Shape, Shape, Shape]) -> None:
    a, b, c = shapes
    index = axes(a)
    there = ix.reshape(sizes(c), sizes(b), ix.reshape(sizes(b), sizes(a), index))
    back = ix.reshape(sizes(a), sizes(c), there)
    source = np.arange(math.prod(a)).reshape(a)
    for at in np.ndindex(*a):
        assert source[tuple(evaluate(e, dict(zip(index, at, strict=True))) for e in back)] == source[at]


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (4, 3, 2, 5)])
def test_folding_and_unfolding_leaves_plain_axes(shape: Shape) -> None:
    folded = (math.prod(shape[:-1]), shape[-1])
    index = axes(shape)
    inside = ix.reshape(sizes(folded), sizes(shape), index)
    assert ix.reshape(sizes(shape), sizes(folded), inside) == index


linear = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(-3, 20))


@given(linear, st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_divmod_is_pythons(line: tuple[int, int, int], d: int, size_x: int, size_y: int) -> None:
    a, b, c = line
    x, y = ix.axis("x", sympy.Integer(size_x)), ix.axis("y", sympy.Integer(size_y))
    e = sympy.expand(a * x + b * y + c)
    quotient, rest = ix.divmod_index(e, sympy.Integer(d))
    for i, j in itertools.product(range(size_x), range(size_y)):
        at = {x: i, y: j}
        assert divmod(a * i + b * j + c, d) == (evaluate(quotient, at), evaluate(rest, at)), (e, d, quotient, rest)


def test_a_size_of_the_same_name_in_another_graph() -> None:
    for assumption in ("positive", "nonnegative", "positive"):
        s = sympy.Symbol("s77", integer=True, **{assumption: True})
        ix._know([s])
        assert ix.axis_size(ix.axis("a", s)) == s
        assert ix.from_expr(ix.to_expr(s)) == s


def test_only_exact_quotients_are_folded() -> None:
    s = sympy.Symbol("s", integer=True, positive=True)
    assert ix.exact_quotients(FloorDiv(2 * s * s, s)) == 2 * s
    assert ix.exact_quotients(FloorDiv(s + 1, 2)).subs(s, 4) == 2


@given(linear, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_ranges_hold(line: tuple[int, int, int], d: int, size_x: int, size_y: int) -> None:
    a, b, c = line
    x, y = ix.axis("x", sympy.Integer(size_x)), ix.axis("y", sympy.Integer(size_y))
    for e in (
        a * x - b * y + c,
        ix.floordiv(a * x + b * y + c, sympy.Integer(d)),
        ix.divmod_index(a * x + b * y + c, d)[1],
    ):
        e = sympy.expand(e)
        values = [evaluate(e, {x: i, y: j}) for i, j in itertools.product(range(size_x), range(size_y))]
        low, high = ix.bounds(e)
        assert low is None or low <= min(values), e
        assert high is None or high >= max(values), e
        assert not ix.nonnegative(e) or min(values) >= 0, e


@given(linear, linear, st.integers(1, 5), st.integers(1, 5), st.sampled_from(["<=", "<", ">=", ">", "==", "!="]))
def test_comparisons_fold_only_where_decided(
    left: tuple[int, int, int], right: tuple[int, int, int], size_x: int, size_y: int, op: str
) -> None:
    x, y = ix.axis("x", sympy.Integer(size_x)), ix.axis("y", sympy.Integer(size_y))
    a, b = (sympy.expand(p * x + q * y + r) for p, q, r in (left, right))
    folded = ix.compare(op, ix.to_expr(a), ix.to_expr(b))
    assert folded is not None
    for i, j in itertools.product(range(size_x), range(size_y)):
        env = {x.name: torch.tensor(i), y.name: torch.tensor(j)}
        u, v = evaluate(a, {x: i, y: j}), evaluate(b, {x: i, y: j})
        want = {"<=": u <= v, "<": u < v, ">=": u >= v, ">": u > v, "==": u == v, "!=": u != v}[op]
        assert bool(score.evaluate(folded, env, [])) == want, (a, op, b, folded)


@given(linear, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_expressions_say_the_same(line: tuple[int, int, int], d: int, size_x: int, size_y: int) -> None:
    a, b, c = line
    x, y = ix.axis("x", sympy.Integer(size_x)), ix.axis("y", sympy.Integer(size_y))
    for e in (a * x - b * y + c, *ix.divmod_index(a * x + b * y + c, sympy.Integer(d))):
        e = sympy.expand(e)
        expr = ix.to_expr(e)
        again = ix.from_expr(expr)
        for i, j in itertools.product(range(size_x), range(size_y)):
            env = {x.name: torch.tensor(i), y.name: torch.tensor(j)}
            assert int(score.evaluate(expr, env, [])) == evaluate(e, {x: i, y: j})
            assert again is not None and evaluate(again, {x: i, y: j}) == evaluate(e, {x: i, y: j})


def test_an_axis_of_one_keeps_its_name() -> None:
    one, many = ix.axis("h", sympy.Integer(1)), ix.axis("m", sympy.Integer(7))
    assert ix.at(sympy.Integer(1), one) is one
    assert ix.at(sympy.Integer(1), many) == 0
    assert ix.broadcast(sizes((1, 7)), (ix.axis("b", sympy.Integer(3)), many)) == (0, many)


def test_sizes_of_the_trace_stay_symbols() -> None:
    s = sympy.Symbol("s9", integer=True, positive=True)
    n = ix.axis("n", s)
    b, h, m, d = (ix.axis(r, sympy.Symbol(f"s{i}", integer=True, positive=True)) for i, r in enumerate("bhmd"))
    B, H, M, D = map(ix.axis_size, (b, h, m, d))
    assert ix.reshape((B, H, M, D), (B * H, M, D), (b * H + h, m, d)) == (b, h, m, d)
    assert ix.nonnegative(s - 1 - n)
    assert not ix.nonnegative(n - 1)
    assert ix.divmod_index(n + 3 * s, s) == (3, n)
