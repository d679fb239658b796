"""A score program in words, for the report: "causal + key padding, softcap 50, bias by head"."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Set

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchflash import score as sc
from torchflash.score import Expr

AXES = {"b": "batch", "h": "head", "m": "query", "n": "key"}
LOW = -1e3  # numbers from here on down are masks
_FAR = 1 << 40


@functools.lru_cache(maxsize=4096)
def in_words(score: str, keep: str = "", post: str = "p") -> str:
    """What the texts of a program mean, as far as there are words for it; "full attention" where nothing is done to the
    scores but scaling. Raises ScoreError where they are no program."""
    x = sc.parse(score)
    kept = sc.parse(keep) if keep else _kept(x)
    found = [_all(_conjuncts(kept))]
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


def _all(conjuncts: Iterable[Expr]) -> str:
    """The words of conditions that hold together, without loads first."""
    words = list(dict.fromkeys(map(_condition, sorted(conjuncts, key=lambda c: bool(sc.loads(c))))))
    if not any("causal" in w or "ahead" in w for w in words):  # a window ends at the query's own key only if causal
        words = [re.sub(r"^window of (\d+)$", lambda w: _from(1 - int(w[1]), ""), w) for w in words]
    return " + ".join(words)


def _condition(e: Expr) -> str:
    if e.op == "|":
        return "(" + " or ".join(_all(_conjuncts(a)) for a in e.args) + ")"
    loads = sc.loads(e)
    if not loads:
        return _positions(e)
    negated, inner = (True, e.args[0]) if e.op == "~" else (False, e)
    if inner.op in ("==", "!=") and {*inner.args} == {*loads} and len({x.value for x in loads}) == 1:
        other = "other " if (inner.op == "!=") != negated else ""
        return other + ("documents" if {"m", "n"} <= sc.names(e) else "groups")
    axes = sc.names(e) & set(AXES)
    if inner.op in ("<", "<=", ">", ">=") and "n" not in _axes(*loads) and len(_axes(*loads)) <= 2:
        for side, below in zip(inner.args, (inner.op[0] == "<", inner.op[0] == ">"), strict=True):
            if _is_key(side) and "n" not in sc.names(*(a for a in inner.args if a is not side)):
                by = " by query" if "m" in axes else ""
                return f"keys from a position on{by}" if below == negated else f"keys up to a position{by}" if by else \
                    "key lengths"
    if axes <= {"b", "n"}:
        return "key padding"
    if axes <= {"b", "m"}:
        return "query padding"
    return f"mask by {_by(axes)}"


def _is_key(e: Expr) -> bool:
    """n, but for a constant that is added."""
    if e.op in ("+", "-", "float", "int"):
        return _is_key(e.args[0]) and all(a.op == "const" for a in e.args[1:])
    return e is sc.name("n")


def _axes(*loads: Expr) -> set[str]:
    return {name for load in loads for name in sc.names(load)} & set(AXES)


def _by(axes: Set[str]) -> str:
    return ", ".join(word for axis, word in AXES.items() if axis in axes) or "one number"


def _positions(e: Expr) -> str:
    """A condition on query and key positions: by the distances n - m, the keys or the distances of blocks that it lets
    pass; the condition itself where it goes by something else."""
    formula = str(e) if len(str(e)) <= _LONGEST else "a rule of positions"
    names = sc.names(e)
    constants = [abs(int(x.value)) for x in sc.topological(e) if x.op == "const" and math.isfinite(x.value)]
    reach = _reach(e)
    if reach > _DENSE or not {"m", "n"} & names or {"b", "h"} & names:
        return formula
    if "n" not in names:
        return formula
    # near the first query and key, near what the constants add up to, and far from any
    near = {c + d for c in (0, *constants, sum(constants)) for d in (-1, 0, 1, 2, 3, 5)}
    bases = sorted((m for x in near for m in (x, x + 2 * _FAR) if m >= 0), reverse=True)
    counts = _SIZES if any(x[0] == "z" for x in names) else _SIZES[:1]
    sizes = {int(x.args[1].value) for x in sc.topological(e) if x.op == "//" and x.args[1].op == "const"}
    size = sizes.pop() if len(sizes) == 1 else 0
    try:
        with _disable_current_modes():
            steps = torch.tensor([-_FAR, *range(-reach, reach + 1), _FAR], device="cpu")
            if "m" not in names:
                keys = steps[reach + 1 :]
                passed = _same((keys, _value(e, torch.zeros_like(keys), keys, z)) for z in counts)
                return formula if passed is None else _keys(passed, formula)
            passed = _same((n, _value(e, torch.full_like(n, m), n, z)) for z in counts for m in bases
                           for n in [m + steps])  # fmt: skip
            if passed is not None:
                return _distances(steps, passed, formula)
            inside = sorted({0, 1, size // 2, size - 1}) if size > 1 else []
            steps = torch.cat([steps[:1], steps[abs(steps) <= sum(constants) + 2], steps[-1:]])
            passed = _same((n, _value(e, torch.full_like(n, size * m + i), n, z)) for z in counts for m in bases
                           for i in inside for j in inside for n in [size * (m + steps) + j])  # fmt: skip
            return formula if passed is None else _distances(steps, passed, formula, size)
    except (RuntimeError, TypeError, KeyError):
        return formula


_LONGEST, _DENSE = 60, 1 << 17
_SIZES = (1 << 20, 1 << 21)  # as if there were as many queries as keys


def _reach(e: Expr) -> int:
    """Beyond this distance a condition is the same for all keys, whatever its constants add up to."""
    found: dict[Expr, tuple[int, int]] = {}  # what its operations multiply or divide by, what its constants add up to
    for x in sc.topological(e):
        args = [found[a] for a in x.args]
        scale, total = max((s for s, _ in args), default=1), sum(t for _, t in args)
        if x.op == "const":
            total = abs(int(x.value)) if math.isfinite(x.value) else 0
        elif x.op in ("*", "//", "%"):
            factor = max((t for (_, t), a in zip(args, x.args, strict=True) if a.op == "const"), default=1)
            offset = sum(t for (_, t), a in zip(args, x.args, strict=True) if a.op != "const")
            scale, total = scale * max(factor, 1), offset * (factor if x.op == "*" else 1)
        found[x] = min(scale, _DENSE), min(total, _DENSE)
    scale, total = found[e]
    return 2 * scale * (total + 2) + 4


def _same(masks: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """What all of the masks are, each of which comes with the keys that it is of; None where two differ."""
    found: Tensor | None = None
    for keys, mask in masks:
        found = mask if found is None else found
        if not torch.equal(found[keys >= 0], mask[keys >= 0]):
            return None
    return found


def _span(passed: Tensor) -> tuple[int, int] | None:
    """The first and the last place that passes, if all between them do."""
    at = passed.nonzero().flatten().tolist()
    settled = bool(passed[-1] == passed[-2])  # what is far away is as what is near it
    return (at[0], at[-1]) if settled and at and at[-1] - at[0] == len(at) - 1 else None


def _keys(passed: Tensor, formula: str) -> str:
    """`passed`: keys from 0 on, the last one for those far away."""
    span, end = _span(passed), len(passed) - 1
    if span is None or (span[0] and span[1] < end):
        return formula
    if span[0]:
        return f"not the first {span[0]} keys" if span[0] > 1 else "not the first key"
    return "all keys" if span[1] == end else f"the first {span[1] + 1} keys" if span[1] else "the first key"


def _distances(steps: Tensor, passed: Tensor, formula: str, size: int = 0) -> str:
    """`passed`: which `steps` n - m do, or which steps of blocks of `size`."""
    of, blocks = (f" by blocks of {size}", f"blocks of {size}") if size else ("", "keys")
    span, own = _span(passed) if passed[0] == passed[1] else None, steps.tolist().index(0)
    if span is None:
        only = not passed[own] and bool((~passed).sum() == 1)
        return formula if not only else f"not the query's own block of {size}" if size else "not the query's own key"
    first, last = (int(steps[i]) for i in span)
    if first == -_FAR and last == _FAR:
        return "all keys"
    if first == -_FAR:
        if last in (0, -1):
            return ("strictly causal" if last else "causal") + of
        return f"up to {last} {blocks} ahead" if last > 0 else f"at least {-last} {blocks} behind"
    if last == _FAR:
        return f"window of {1 - first}" if first < 0 and not size else _from(first, of)
    if first == last == 0:
        return blocks if size else "only the query's own key"
    if first == -last:
        return f"window of {last} {blocks} on both sides" if size else f"window of {last} on both sides"
    return (f"only {_step(first)}" if first == last else f"from {_step(first)} to {_step(last)}") + of


def _from(first: int, of: str) -> str:
    return f"from {_step(first)} on{of}"


def _step(d: int) -> str:
    return "the query's own" if d == 0 else f"{d} ahead" if d > 0 else f"{-d} behind"


def _value(e: Expr, m: Tensor, n: Tensor, size: int) -> Tensor:
    env = {x: torch.full_like(n, size) for x in sc.names(e) if x.startswith("z")}
    mask: Tensor = sc.evaluate(e, {"n": n, "m": m, **env}, ())
    return mask.bool().expand(n.shape)


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
    if e.op == "where" and len(others) == 2 and e.args[0] in others and sc.names(others[0]) & set("bhmn") == {"n"}:
        return (*inside, _sink(others[1]))
    function = e.op if e.op.isalnum() and e.op != "where" else "a function of the score"
    return (*inside, function)


def _sink(e: Expr) -> str:
    """The score of keys that queries are not multiplied with."""
    axes = sc.names(e) & set(AXES)
    return f"sink of {e.value:g}" if e.op == "const" else f"sink by {_by(axes)}" if axes else "learned sink"


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
