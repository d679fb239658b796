"""View operations: they only change at which index the source is read."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.contraction import Operand, einsum_permutation
from torchflash.passes.graph import argument, operation, several, tensor, value
from torchflash.passes.pointwise import compare
from torchflash.passes.reader import Indices, Reader, Unreadable, positive_dim, reads
from torchflash.score import Expr, build

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
View = tuple[Any, Indices]


def shape_of(x: Any) -> tuple[ix.Index, ...]:
    t = tensor(x)
    assert t is not None
    return ix.shape_of(t)


def size_of(x: Any) -> ix.Index:
    v = value(x)
    if isinstance(v, bool) or not isinstance(v, (int, torch.SymInt)):
        raise Unreadable
    return ix.size_of(v)


def registered_in(table: dict[str, Any]) -> Any:
    """A decorator, by names, for (reader, node, args, kwargs, index) -> (source, index of the source): it goes into the
    table, and such nodes are read through it."""

    def named(*names: str) -> Any:
        def register(f: Any) -> Any:
            table.update(dict.fromkeys(names, f))

            @reads(*names)
            def read(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
                source, at = f(r, node, args, kwargs, index)
                return r.read(source, tuple(at), node)

            return f

        return register

    return named


VIEWS: dict[str, Any] = {}
view = registered_in(VIEWS)


def peel_steps(r: Reader, operand: Operand) -> list[Operand]:
    """An operand, and what it is a view of: the tensor it was made from, and so on up to one that is no view."""
    steps = [operand]
    while (step := VIEWS.get(operation(operand.node))) is not None:
        args, kwargs = r.arguments(operand.node)
        try:
            source, at = step(r, operand.node, args, kwargs, operand.index)
        except (Unreadable, ix.NotInteger):
            break
        if (
            not isinstance(source, Node)
            or r.versions.stale(source, operand.node)
            or r.versions.stale(operand.node, operand.user)
        ):
            break
        a, b = tensor(source), tensor(operand.node)
        if a is None or b is None or a.dtype != b.dtype:
            break
        if operand.node in r.gradients.cuts:
            break
        operand = Operand(source, tuple(at), operand.node)
        steps.append(operand)
    return steps


# ------------------------------------------------------------------------------------------------------ order and shape


@view("transpose")
def _transpose(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    rank = len(index)
    a = positive_dim(argument(args, kwargs, 1, "dim0", "axis0"), rank)
    b = positive_dim(argument(args, kwargs, 2, "dim1", "axis1"), rank)
    at = list(index)
    at[a], at[b] = at[b], at[a]
    return args[0], tuple(at)


@view("t", "adjoint")
def _t(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    return args[0], index if len(index) < 2 else (*index[:-2], index[-1], index[-2])


@view("mT", "mH", "numpy_T", "matrix_H")
def _transposed(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    # how later versions of torch spell the attributes
    t = tensor(args[0])
    if t is None or t.dtype.is_complex:
        raise Unreadable
    if operation(node) == "numpy_T":
        return args[0], tuple(reversed(index))
    return args[0], (*index[:-2], index[-1], index[-2])


@view("getattr")
def _getattr(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    if args[1] in ("mT", "mH", "H") or (args[1] == "T" and len(index) == 2):
        return args[0], (*index[:-2], index[-1], index[-2])
    if args[1] == "T":
        return args[0], tuple(reversed(index))
    if args[1] in ("data", "real"):
        t = tensor(args[0])
        if t is not None and not t.requires_grad and not t.dtype.is_complex:
            return args[0], index
    raise Unreadable


@view("permute")
def _permute(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    dims = [positive_dim(d, len(index)) for d in several(args, kwargs, 1, "dims")]
    return args[0], tuple(index[dims.index(k)] for k in range(len(index)))


@view("movedim")
def _movedim(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    rank = len(index)
    source, target = (argument(args, kwargs, k, n) for k, n in ((1, "source"), (2, "destination")))
    source, target = (
        [positive_dim(d, rank) for d in (x if isinstance(x, (tuple, list)) else (x,))] for x in (source, target)
    )
    order: list[Any] = [None] * rank
    for s, t in zip(source, target, strict=True):
        order[t] = s
    rest = iter(d for d in range(rank) if d not in source)
    order = [next(rest) if d is None else d for d in order]
    return args[0], tuple(index[order.index(k)] for k in range(rank))


@view("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel")
def _reshape(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    source, result = tensor(args[0]), tensor(node)
    if source is None or result is None or source.dtype != result.dtype:
        raise Unreadable
    return args[0], ix.reshape(ix.shape_of(source), ix.shape_of(result), index)


@view("unsqueeze")
def _unsqueeze(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    d = positive_dim(argument(args, kwargs, 1, "dim"), len(index))
    return args[0], (*index[:d], *index[d + 1 :])


@view("squeeze")
def _squeeze(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = shape_of(args[0])
    dims = argument(args, kwargs, 1, "dim")
    chosen = (
        range(len(shape))
        if dims is None
        else [positive_dim(d, len(shape)) for d in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    )
    rest = iter(index)
    return args[0], tuple(ix.ZERO if k in chosen and s == 1 else next(rest) for k, s in enumerate(shape))


@view("expand", "expand_as", "broadcast_to")
def _expand(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    return args[0], ix.broadcast(shape_of(args[0]), index)


@view("contiguous", "clone")
def _same(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    return args[0], index


@view("repeat", "tile")
def _repeat(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = shape_of(args[0])
    tail = index[len(index) - len(shape) :]
    return args[0], tuple(ix.at(s, i if s == 1 else ix.divmod_index(i, s)[1]) for s, i in zip(shape, tail, strict=True))


@view("repeat_interleave")
def _repeat_interleave(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    times, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if dim is None or not isinstance(value(times), (int, torch.SymInt)):
        raise Unreadable
    d = positive_dim(dim, len(index))
    return args[0], tuple(ix.floordiv(i, size_of(times)) if k == d else i for k, i in enumerate(index))


VIEWS["einsum"] = lambda r, node, args, kwargs, index: einsum_permutation(args, index)


# ------------------------------------------------------------------------------------------------------- lanes of vmap


@reads("_add_batch_dim")
def _add_batch_dim(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source, dim, level = args
    d = positive_dim(dim, len(index) + 1)
    return r.read(source, (*index[:d], _lane(level, shape_of(source)[d]), *index[d:]), node)


@reads("_remove_batch_dim")
def _remove_batch_dim(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source, level, size, dim = args
    d = positive_dim(dim, len(index))
    inside = r.read(source, (*index[:d], *index[d + 1 :]), node)
    if r.depends(inside):
        raise Unreadable
    return ix.replace_axis(inside, _lane(level, size_of(size)), index[d])


def _lane(level: int, size: ix.Index) -> ix.Index:
    return ix.axis(f"lane{level}", size)


# ---------------------------------------------------------------------------------------------------- parts and joints


@view("narrow")
def _narrow(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    dim, start = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "start")
    if tensor(start) is not None:
        raise Unreadable
    d = positive_dim(dim, len(index))
    return args[0], shifted(index, d, from_end(size_of(start), shape_of(args[0])[d]), ix.ONE)


@view("slice")
def _slice(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    d = positive_dim(argument(args, kwargs, 1, "dim", default=0), len(index))
    start, step = argument(args, kwargs, 2, "start"), argument(args, kwargs, 4, "step", default=1)
    return args[0], sliced(index, d, start, step, shape_of(args[0])[d])


@view("select")
def _select(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = shape_of(args[0])
    d = positive_dim(argument(args, kwargs, 1, "dim"), len(shape))
    at = from_end(size_of(argument(args, kwargs, 2, "index")), shape[d])
    return args[0], (*index[:d], at, *index[d:])


def from_end(start: ix.Index, size: ix.Index) -> ix.Index:
    if ix.nonnegative(start):
        return start
    if ix.nonnegative(-start - 1):
        return ix.sympy.expand(start + size)
    raise Unreadable


def sliced(index: Indices, d: int, start: Any, step: Any, size: ix.Index) -> Indices:
    first = ix.ZERO if start is None else from_end(size_of(start), size)
    return shifted(index, d, first, ix.ONE if step is None else size_of(step))


def shifted(index: Indices, d: int, start: ix.Index, step: ix.Index) -> Indices:
    # a slice that starts before the beginning starts at it; one that starts behind the end is empty and never read
    if not ix.nonnegative(start):
        raise Unreadable
    return (*index[:d], ix.sympy.expand(start + step * index[d]), *index[d + 1 :])


@view("flip")
def _flip(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = shape_of(args[0])
    dims = [positive_dim(d, len(shape)) for d in several(args, kwargs, 1, "dims")]
    return args[0], tuple(ix.sympy.expand(shape[k] - 1 - i) if k in dims else i for k, i in enumerate(index))


@view("roll")
def _roll(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shifts, dims = argument(args, kwargs, 1, "shifts"), argument(args, kwargs, 2, "dims")
    shifts, dims = (x if isinstance(x, (tuple, list)) else (x,) for x in (shifts, dims))
    if not dims or dims[0] is None:
        raise Unreadable
    shape, at = shape_of(args[0]), list(index)
    for shift, dim in zip(shifts, dims, strict=True):
        d = positive_dim(dim, len(shape))
        at[d] = ix.divmod_index(ix.sympy.expand(at[d] - size_of(shift) + shape[d]), shape[d])[1]
    return args[0], tuple(at)


@reads("cat", "stack")
def _cat(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    parts = args[0] if args else kwargs["tensors"]
    result = tensor(node)
    assert result is not None
    d = positive_dim(argument(args, kwargs, 1, "dim", "axis", default=0), len(index))
    if operation(node) == "stack":
        pieces = [(p, ix.sympy.Integer(k), ix.ONE) for k, p in enumerate(parts)]
    else:
        pieces, offset = [], ix.ZERO
        for p in parts:
            t = tensor(p)
            if t is None or t.dtype != result.dtype:
                raise Unreadable
            if t.dim() != len(index):
                continue  # torch skips the legacy empty tensor
            pieces.append((p, offset, shape_of(p)[d]))
            offset = ix.sympy.expand(offset + shape_of(p)[d])
    value: Expr | None = None
    for p, start, size in reversed(pieces):
        if size == 0:
            continue
        at = (*index[:d], *((ix.sympy.expand(index[d] - start),) if operation(node) == "cat" else ()), *index[d + 1 :])
        piece = r.read(p, at, node)
        end = ix.to_expr(ix.sympy.expand(start + size))
        value = piece if value is None else build("where", compare("<", ix.to_expr(index[d]), end), piece, value)
    if value is None:
        raise Unreadable
    return value


@reads("pad", "constant_pad_nd")
def _pad(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source, widths = tensor(args[0]), argument(args, kwargs, 1, "pad")
    mode = argument(args, kwargs, 2, "mode", default="constant") if operation(node) == "pad" else "constant"
    filler = argument(args, kwargs, 3 if operation(node) == "pad" else 2, "value", default=0.0)
    if mode != "constant" or source is None:
        raise Unreadable
    at, inside = list(index), score.TRUE
    for k in range(len(widths) // 2):
        d = len(index) - 1 - k
        before = size_of(widths[2 * k])
        at[d] = ix.sympy.expand(index[d] - before)
        for op, limit in ((">=", ix.ZERO), ("<", ix.shape_of(source)[d])):
            test = compare(op, ix.to_expr(at[d]), ix.to_expr(limit))
            inside = test if inside is score.TRUE else inside if test is score.TRUE else build("&", inside, test)
    x = r.read(args[0], tuple(at), node)
    outside = r.cast(r.read(filler or 0, (), node), type(value(filler or 0)), source.dtype)
    return build("where", inside, x, outside)
