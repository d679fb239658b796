"""A contraction of two tensors, whatever it is spelled with, as two operands read at named axes.

out[b, h, m, n] = Σ_d  lhs[b, h, m, d] * rhs[b, h, n, d]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchflash.passes import index as ix
from torchflash.passes.graph import argument, operation, tensor
from torchflash.passes.reader import Dot, Indices, Reader, Unreadable

CONTRACTIONS = frozenset(
    ("matmul", "bmm", "mm", "einsum", "inner", "linear", "baddbmm", "addmm", "mv", "tensordot")
)


@dataclass(frozen=True)
class Operand:
    """A tensor read at an index; `user` is the node that consumes it there. `pads`: (dim, zeros before, zeros behind)
    where the index runs over more than the tensor has. `parts`: (dim, start, step, length) where it runs over less."""

    node: Node
    index: Indices
    user: Node
    pads: tuple[tuple[int, ix.Index, ix.Index], ...] = ()
    parts: tuple[tuple[int, ix.Index, ix.Index, ix.Index], ...] = ()

    def shape(self) -> tuple[ix.Index, ...]:
        """Of the parts, with the zeros."""
        sizes = list(ix.shape_of(tensor(self.node)))  # type: ignore[arg-type]
        for d, _start, _step, length in self.parts:
            sizes[d] = length
        for d, before, behind in self.pads:
            sizes[d] = ix.sympy.expand(before + sizes[d] + behind)
        return tuple(sizes)

    def padded(self, axis: ix.Index) -> Operand | None:
        """With zeros where an index `axis` - start leads outside; None where it leads past the end of a dim by
        anything else."""
        t = tensor(self.node)
        assert t is not None
        for d, (i, size) in enumerate(zip(self.index, self.shape(), strict=True)):
            before = ix.sympy.expand(axis - i)
            if axis not in ix.axes(i) or ix.axes(before):
                continue
            behind = ix.sympy.expand(ix.axis_size(axis) - before - size)
            if before == 0 and behind == 0:
                continue
            if not ix.nonnegative(before) or not (ix.nonnegative(behind) or ix.guarded(t, behind >= 0)):
                return None
            index = (*self.index[:d], axis, *self.index[d + 1 :])
            return Operand(self.node, index, self.user, ((d, before, behind),))
        return self

    def sliced(self) -> Operand | None:
        """The slice that an index of start + step * axis, or of start + step * (axis // group), leads to in each dim,
        with that axis or group as its index; None where the index is another. An index that may be the whole of a group
        stays."""
        t = tensor(self.node)
        assert t is not None
        index, parts = list(self.index), []
        padded = {d for d, _before, _behind in self.pads}
        for d, (i, size) in enumerate(zip(self.index, self.shape(), strict=True)):
            if d in padded:
                continue
            start, step, along = ix.affine(i)
            length = ix.ONE if along == 0 else ix.extent(along)
            if length is None and along == i:
                continue
            if length is None or not ix.nonnegative(step - 1):
                return None
            last = ix.sympy.expand(start + step * (length - 1))
            if start == 0 and step == 1 and last == size - 1:
                continue
            behind = ix.sympy.expand(size - 1 - last)
            if not all(ix.nonnegative(x) or ix.guarded(t, x >= 0) for x in (start, length - 1, behind)):
                return None
            index[d] = along
            parts.append((d, start, step, length))
        return Operand(self.node, tuple(index), self.user, self.pads, tuple(parts))

    def axes(self) -> frozenset[ix.Index]:
        return frozenset().union(*(ix.axes(i) for i in self.index))


@dataclass(frozen=True)
class Contraction:
    """Σ over `summed` of lhs * rhs, computed in `dtype`."""

    lhs: Operand
    rhs: Operand
    summed: tuple[ix.Index, ...]
    dtype: torch.dtype
    node: Node


def contraction(r: Reader, dot: Dot, role: str) -> Contraction | None:
    """The operands of `dot`; the summed axes are named `role`. None when it is not a contraction of two tensors."""
    node, index = dot.node, dot.index
    args, kwargs = r.arguments(node)
    name = operation(node)
    result = tensor(node)
    if result is None or name not in CONTRACTIONS:
        return None
    if name == "einsum":
        return _einsum(r, node, args, index, role)
    if name == "tensordot":
        return _tensordot(node, args, kwargs, index, role)
    if name in ("baddbmm", "addmm"):
        a, b = argument(args, kwargs, 1, "batch1", "mat1"), argument(args, kwargs, 2, "batch2", "mat2")
    elif name == "linear":
        a, b = args[0], argument(args, kwargs, 1, "weight")
        if argument(args, kwargs, 2, "bias") is not None:
            return None
    else:
        a, b = args[0], argument(args, kwargs, 1, "other", "mat2", "vec")
    ta, tb = tensor(a), tensor(b)
    if ta is None or tb is None:
        return None
    sa, sb = ix.shape_of(ta), ix.shape_of(tb)
    if not sa or not sb:
        return None
    d = ix.axis(role, sa[-1])
    if name in ("linear", "inner"):  # rhs[n, d]
        left, right = index[: len(sa) - 1], index[len(sa) - 1 :]
        return Contraction(Operand(a, (*left, d), node), Operand(b, (*right, d), node), (d,), result.dtype, node)
    # matmul: batch dims broadcast; a vector on either side has no row or column
    rest = list(index)
    column = () if len(sb) == 1 else (rest.pop(),)
    row = () if len(sa) == 1 else (rest.pop(),)
    lhs = (*ix.broadcast(sa[:-2], rest), *row, d) if len(sa) > 1 else (d,)
    rhs = (*ix.broadcast(sb[:-2], rest), d, *column) if len(sb) > 1 else (d,)
    lhs = tuple(ix.at(s, i) for s, i in zip(sa, lhs, strict=True))
    rhs = tuple(ix.at(s, i) for s, i in zip(sb, rhs, strict=True))
    return Contraction(Operand(a, lhs, node), Operand(b, rhs, node), (d,), result.dtype, node)


def _tensordot(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], index: Indices, role: str
) -> Contraction | None:
    a, b, dims = args[0], argument(args, kwargs, 1, "b", "other"), argument(args, kwargs, 2, "dims", default=2)
    result, ta, tb = tensor(node), tensor(a), tensor(b)
    if result is None or ta is None or tb is None or not isinstance(dims, (int, tuple, list)):
        return None
    sa, sb = ix.shape_of(ta), ix.shape_of(tb)
    pairs = (range(len(sa) - dims, len(sa)), range(dims)) if isinstance(dims, int) else dims
    if len(pairs) != 2 or not all(isinstance(d, int) for side in pairs for d in side) or len(pairs[0]) != len(pairs[1]):
        return None
    left, right = ([d % len(s) for d in side] for s, side in zip((sa, sb), pairs, strict=True))
    summed = tuple(ix.axis(f"{role}{k}" if k else role, sa[d]) for k, d in enumerate(left))
    if any(sa[x] != sb[y] for x, y in zip(left, right, strict=True)):
        return None  # one of them has one element, which stands for all
    rest = iter(index)
    lhs, rhs = (
        tuple(summed[dims.index(d)] if d in dims else next(rest) for d in range(len(s)))
        for s, dims in ((sa, left), (sb, right))
    )
    return Contraction(Operand(a, lhs, node), Operand(b, rhs, node), summed, result.dtype, node)


def _einsum(r: Reader, node: Node, args: tuple[Any, ...], index: Indices, role: str) -> Contraction | None:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if (
        not isinstance(equation, str)
        or len(operands) != 2
        or tensor(operands[0]) is None
        or tensor(operands[1]) is None
    ):
        return None
    shapes = [ix.shape_of(tensor(o)) for o in operands]  # type: ignore[arg-type]
    terms, out = _expand(equation, [len(s) for s in shapes])
    if terms is None or out is None or any(len(set(t)) != len(t) for t in terms):
        return None
    at: dict[str, ix.Index] = dict(zip(out, index, strict=True))
    sizes: dict[str, ix.Index] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) == 1:
                sizes[letter] = size  # the other operand may broadcast
    summed: list[ix.Index] = []
    for letter, size in sizes.items():
        if letter not in at:
            at[letter] = ix.axis(f"{role}{len(summed)}" if summed else role, size)
            summed.append(at[letter])
    # a letter only one operand has is summed alone: not a contraction of the two
    if any(at[x] in summed and not all(x in t for t in terms) for x in at):
        return None
    lhs, rhs = (
        Operand(o, tuple(ix.at(s, at[x]) for x, s in zip(t, shape, strict=True)), node)
        for o, t, shape in zip(operands, terms, shapes, strict=True)
    )
    result = tensor(node)
    assert result is not None
    return Contraction(lhs, rhs, tuple(summed), result.dtype, node)


def einsum_permutation(args: tuple[Any, ...], index: Indices) -> tuple[Node, Indices]:
    """The view that an einsum of one operand is, when it only permutes; Unreadable otherwise."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 1 or (t := tensor(operands[0])) is None:
        raise Unreadable
    terms, out = _expand(args[0], [t.dim()])
    if terms is None or out is None or sorted(terms[0]) != sorted(out) or len(set(out)) != len(out):
        raise Unreadable
    return operands[0], tuple(index[out.index(x)] for x in terms[0])


def _expand(equation: str, ranks: list[int]) -> tuple[list[list[str]] | None, list[str] | None]:
    """The letters of each operand and of the result, with an ellipsis spelled out."""
    equation = equation.replace(" ", "")
    inputs, arrow, result = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        return None, None
    spans = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]
    widest = max((s for s, t in zip(spans, terms, strict=True) if "..." in t), default=0)

    def letters(term: str, span: int) -> list[str]:
        head, dots, tail = term.partition("...")
        middle = [f".{k}" for k in range(widest - span, widest)] if dots else []
        return [*head, *middle, *tail]

    spelled = [letters(t, s) for t, s in zip(terms, spans, strict=True)]
    if any(len(x) != rank for x, rank in zip(spelled, ranks, strict=True)):
        return None, None
    if arrow:
        return spelled, letters(result, widest)
    flat = [x for t in spelled for x in t]
    dots_ = [f".{k}" for k in range(widest)]
    return spelled, dots_ + sorted(x for x in set(flat) if flat.count(x) == 1 and not x.startswith("."))
