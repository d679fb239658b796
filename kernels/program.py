"""The programs of one attention, parsed once: score, keep and post with the derivatives the backward needs.

Text and capture kinds in, a memoised `Program` out. Both implementations (blockwise torch and Triton) start from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchflash import score as sc
from torchflash.score import Expr

S, P, G = sc.name("s"), sc.name("p"), sc.name("g")


@dataclass(frozen=True, eq=False)
class Program:
    """What happens to the scores. `keep` is None when no tile may be skipped; `post` is None for plain probabilities.

    `score_vjp` and `post_vjp` map `s` or `p`, and each float load, to its gradient in terms of `g`. `rows` are the
    indices of key n in the dims of k and v between heads and D; () where that is n itself.
    """

    score: Expr
    keep: Expr | None
    fill: float
    post: Expr | None
    kinds: tuple[str, ...]
    score_vjp: dict[Expr, Expr]
    post_vjp: dict[Expr, Expr]
    rows: tuple[Expr, ...] = ()

    @property
    def kind_map(self) -> dict[str, str]:
        return kind_map(self.kinds)

    def loads_of(self, capture: int) -> list[Expr]:
        """The loads of capture `t<capture>` that receive a gradient, each once."""
        found = dict.fromkeys(e for vjp in (self.score_vjp, self.post_vjp) for e in vjp if e.op == "load")
        return [e for e in found if e.value == f"t{capture}"]


class _Fold:
    """Rebuilds an expression with constants folded."""

    const = staticmethod(sc.const)
    name = staticmethod(sc.name)
    load = staticmethod(lambda e, args: sc.load(e.value, args))
    call = staticmethod(lambda op, e, args: sc.build(op, *args))


def fold(e: Expr) -> Expr:
    return sc.interpret(e, _Fold)


@functools.lru_cache(maxsize=4096)
def read(score: str, keep: str, fill: float, post: str, kinds: tuple[str, ...], rows: str = "") -> Program:
    """Parse the texts of one attention. Raises ScoreError when a text is not a program."""
    known = kind_map(kinds)
    x, w = fold(sc.parse(score)), fold(sc.parse(post))
    kept = fold(sc.parse(keep)) if keep else None
    at = _row_indices(rows, known) if rows else ()
    for e in (x, w, *at) + ((kept,) if kept is not None else ()):
        missing = sorted({load.value for load in sc.loads(e)} - set(known))
        if missing:
            raise sc.ScoreError(f"the program loads {missing[0]} but there are {len(kinds)} captures: {e}")
    if kept is sc.TRUE:
        kept = None
    if sc.kind(x, known) != "f":
        x = sc.build("float", x)
    return Program(
        score=x,
        keep=kept,
        fill=fill,
        post=None if w is P else w,
        kinds=kinds,
        score_vjp=sc.vjp(x, known),
        post_vjp={P: G} if w is P else sc.vjp(w, known),
        rows=at,
    )


def kind_map(kinds: Sequence[str]) -> dict[str, str]:
    return {f"t{i}": k for i, k in enumerate(kinds)}


def _row_indices(text: str, kinds: dict[str, str]) -> tuple[Expr, ...]:
    e = sc.parse(text)
    if e.op != "load" or e.value != sc.ROWS or not 1 <= len(e.args) <= 2:
        raise sc.ScoreError(f"rows are {sc.ROWS!r} at one or two indices, as k[t0[b, n // 16], n % 16]; got {text!r}")
    at = tuple(fold(i) for i in e.args)
    known = sc.names(*at)
    if "n" not in known or known & {"s", "p", "g", "h", "m"} or any(kinds.get(t, "i") != "i" for t in known):
        raise sc.ScoreError(f"rows follow from b, n, sizes and captured integers; got {text!r}")
    return at


def kinds_of(captures: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(sc.capture_kinds(captures).values())


def plain_axes(load: Expr) -> list[str | int] | None:
    """["b", "h", 0, "n"] for a load indexed by distinct axes and constants only, else None."""
    axes: list[str | int] = []
    for i in load.args:
        if i.op == "name" and i.value in sc.INDEX_NAMES and i.value not in axes:
            axes.append(i.value)
        elif i.op == "const" and isinstance(i.value, int) and i.value >= 0:
            axes.append(int(i.value))
        else:
            return None
    return axes
