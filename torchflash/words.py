"""A score program in words, for the report: "causal + key padding, softcap 50, bias by head"."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

from torchflash import score as sc
from torchflash.score import Expr

AXES = {"b": "batch", "h": "head", "m": "query", "n": "key"}
LOW = -1e3  # numbers from here on down are masks
_FAR = 1 << 40
_OPERATIONS: dict[str, Any] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "~": operator.not_, "neg": operator.neg, "abs": abs,
    "minimum": min, "maximum": max,
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def in_words(score: str, keep: str = "", post: str = "p") -> str:
    """What the texts of a program mean, as far as there are words for it; "full attention" where nothing is done to the
    scores but scaling. Raises ScoreError where they are no program."""
    x = sc.parse(score)
    kept = sc.parse(keep) if keep else _kept(x)
    conjuncts = sorted(_conjuncts(kept), key=lambda c: bool(sc.loads(c)))
    masks = list(dict.fromkeys(map(_condition, conjuncts)))
    found = [" + ".join(masks)] if masks else []
    found += list(dict.fromkeys(_changes(_unmasked(x, sc.loads(kept)))))
    found += [_after(sc.parse(post))]
    return ", ".join(word for word in found if word) or "full attention"


# --------------------------------------------------------------------------------------------------------------- masks


@functools.lru_cache(maxsize=4096)
def _kept(e: Expr) -> Expr:
    """Where `e` is not a mask's number; loads that are added may be masks too, and are not looked at."""
    if e.op == "where":
        condition, a, b = e.args
        if _low(b):
            return sc.build("&", condition, _kept(a))
        if _low(a):
            return sc.build("&", sc.build("~", condition), _kept(b))
    if e.op in ("+", "*", "-", "/", "float"):
        return functools.reduce(lambda a, b: sc.build("&", a, b), map(_kept, e.args))
    return sc.TRUE


def _low(e: Expr) -> bool:
    return e.op == "const" and not isinstance(e.value, bool) and e.value <= LOW


def _conjuncts(e: Expr) -> list[Expr]:
    if e is sc.TRUE:
        return []
    if e.op == "&":
        return [c for a in e.args for c in _conjuncts(a)]
    return [e]


def _condition(e: Expr) -> str:
    if e.op == "|":
        return "(" + " or ".join(" + ".join(map(_condition, _conjuncts(a))) for a in e.args) + ")"
    loads = sc.loads(e)
    if not loads:
        return _positions(e)
    inner = e.args[0] if e.op == "~" else e
    if inner.op in ("==", "!=") and len(loads) == 2 and loads[0].value == loads[1].value:
        return "documents" if {"m", "n"} <= sc.names(e) else "groups"
    axes = _axes(*loads)
    if inner.op in sc.COMPARE and len(axes) <= 2 and "n" not in axes and "n" in sc.names(e):
        return "keys up to a position by query" if "m" in axes else "key lengths"
    if axes <= {"b", "n"}:
        return "key padding"
    if axes <= {"b", "m"}:
        return "query padding"
    return f"mask by {_by(axes)}"


def _axes(*loads: Expr) -> set[str]:
    return {name for load in loads for name in sc.names(load)} & set(AXES)


def _by(axes: set[str]) -> str:
    return ", ".join(word for axis, word in AXES.items() if axis in axes) or "one number"


def _positions(e: Expr) -> str:
    """A condition on query and key positions: by which distances n - m it lets pass."""
    numbers = [abs(int(x.value)) for x in sc.topological(e) if x.op == "const" and math.isfinite(x.value)]
    tried = sorted({s * (c + d) for c in (0, *numbers) for d in (-1, 0, 1, 2) for s in (-1, 1)} | {-_FAR, _FAR})
    try:
        passed = [d for d in tried if _value(e, 4 * _FAR, 4 * _FAR + d)]
        same = all(bool(_value(e, 4 * _FAR + 7, 4 * _FAR + 7 + d)) == (d in passed) for d in tried)
    except (TypeError, KeyError, ZeroDivisionError):
        return "a rule of positions"
    steps = next((int(x.args[1].value) for x in sc.topological(e) if x.op == "//" and x.args[1].op == "const"), 0)
    if steps:
        return f"blocks of {steps}"
    if same and [d for d in tried if d not in passed] == [0]:
        return "not the query's own key"
    if not same or not passed or passed != [d for d in tried if passed[0] <= d <= passed[-1]]:
        return "a rule of positions"
    first, last = passed[0], passed[-1]
    if first == -_FAR:
        if last == _FAR:
            return "all keys"
        return "causal" if last == 0 else "strictly causal" if last == -1 else f"up to {last} keys ahead"
    if last == _FAR:
        return f"window of {1 - first}" if first <= 0 else f"from {first} keys ahead"
    return f"window of {-first} on both sides" if first == -last else f"keys from {first} to {last}"


def _value(e: Expr, m: int, n: int) -> Any:
    memo: dict[Expr, Any] = {}
    for x in sc.topological(e):
        if x.op == "name":
            memo[x] = {"m": m, "n": n}.get(x.value, 0)  # sizes: as if there were as many queries as keys
        elif x.op == "const":
            memo[x] = x.value
        elif x.op in ("int", "int32", "float"):
            memo[x] = memo[x.args[0]]
        else:
            memo[x] = _OPERATIONS[x.op](*(memo[a] for a in x.args))
    return memo[e]


# -------------------------------------------------------------------------------------------------------------- scores


@functools.lru_cache(maxsize=4096)
def _unmasked(e: Expr, masks: tuple[Expr, ...]) -> Expr:
    """The score where nothing is masked."""
    if e.op == "where":
        _, a, b = e.args
        if _low(a) or _low(b):
            return _unmasked(b if _low(a) else a, masks)
    if e.op == "+":
        for mask, other in (e.args, e.args[::-1]):
            if mask in masks or (mask.op == "where" and any(map(_low, mask.args[1:])) and "s" not in sc.names(mask)):
                return _unmasked(other, masks)
    if e.op in ("+", "-", "*", "/", "float"):
        return sc.call(e.op, *(_unmasked(a, masks) for a in e.args))
    return e


@functools.lru_cache(maxsize=4096)
def _changes(e: Expr) -> tuple[str, ...]:
    """What happens to `s` on the way up to `e`, in that order, each once."""
    if "s" not in sc.names(e) or e.op == "name":
        return ()
    inside = tuple(dict.fromkeys(word for a in e.args for word in _changes(a)))
    others = [a for a in e.args if "s" not in sc.names(a)]
    match e.op:
        case "+" | "-":
            return (*inside, *(_added(a) for a in others if a.op != "const"))
        case "*" | "/":
            factors = [load for a in others for load in sc.loads(a)]
            tanh = next((a for a in e.args if a.op == "tanh"), None)
            if tanh is not None and others and others[0].op == "const":
                return (*_changes(tanh.args[0]), f"softcap {others[0].value:g}")
            return (*inside, f"scale by {_by(_axes(*factors))}") if factors else inside
        case "neg" | "float" | "half" | "bfloat16":
            return inside
    function = e.op if e.op.isalnum() and e.op != "where" else "a function of the score"
    return (*inside, function)


def _added(e: Expr) -> str:
    loads = sc.loads(e)
    axes = _axes(*loads)
    if any({"m", "n"} <= sc.names(i) for load in loads for i in load.args):
        rest = axes - {"m", "n"}
        return f"relative position bias by {_by(rest)}" if rest else "relative position bias"
    if not loads:
        return "bias by position"
    if {"m", "n"} & sc.names(e) and not {"m", "n"} & axes:
        return "ALiBi"
    return f"bias by {_by(axes)}"


def _after(post: Expr) -> str:
    """What is done to the probabilities."""
    while post.op == "where" and any(a.op == "const" and a.value == 0 for a in post.args[1:]):
        post = next(a for a in post.args[1:] if a.op != "const")
    if post is sc.name("p") or (post.op == "*" and any(a.op == "const" for a in post.args)):
        return ""
    loads = sc.loads(post)
    return f"weights times a tensor by {_by(_axes(*loads))}" if loads else "weights changed after the softmax"
