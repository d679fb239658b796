"""Lookups: parts of tensors by slices, numbers and index tensors, of tuples by numbers; and assignments to them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.graph import argument, operation, tensor, value
from torchflash.passes.leaves import reduction
from torchflash.passes.pointwise import compare
from torchflash.passes.reader import Indices, Reader, Unreadable, positive_dim, reads
from torchflash.passes.views import VIEWS, View, from_end, registered_in, shape_of, shifted, size_of, sliced
from torchflash.score import Expr, build, const

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

LOOKUPS: dict[str, Any] = {}  # (reader, node, args, kwargs, index) -> (source, index of the source as torch indexes)
SPLITS = frozenset(("chunk", "split", "tensor_split", "split_with_sizes", "unbind"))


@reads("getitem")
def _getitem(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source, key = args
    if tensor(source) is None:
        return _item_of_tuple(r, node, source, key, index)
    found = _indexed(r, node, source, key, index)
    return r.read(source, found, node)


@reads("setitem")
def _setitem(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    """t[key] = x, read as where(inside key, x, t): key is made of slices and numbers, or one mask."""
    target, key, written = args
    t, source = tensor(target), tensor(written)
    assert t is not None
    keys = list(key) if isinstance(key, tuple) else [key]
    inside: list[Expr] = []
    at: list[ix.Index] = []  # of what is written
    if len(keys) == 1 and (mask := tensor(keys[0])) is not None and mask.dtype == torch.bool:
        if source is not None and source.dim():
            raise Unreadable  # one value for each kept element
        inside.append(r.read(keys[0], index[: mask.dim()], node))
    else:
        shape = shape_of(target)
        for k, size, i in zip(_spelled_out(keys, len(shape)), shape, index, strict=True):
            if isinstance(k, slice):
                start, stop = _slice_ends(k, size)
                inside.append(compare(">=", ix.to_expr(i), ix.to_expr(start)))
                inside.append(compare("<", ix.to_expr(i), ix.to_expr(stop)))
                at.append(ix.sympy.expand(i - start))
            else:
                inside.append(compare("==", ix.to_expr(i), ix.to_expr(from_end(size_of(k), size))))
    if source is not None:
        what = r.cast(r.read(written, ix.broadcast(ix.shape_of(source), tuple(at)), node), source.dtype, t.dtype)
    else:
        what = r.cast(r.read(written, (), node), type(value(written)), t.dtype)
    tests = [x for x in inside if x is not score.TRUE]
    condition = functools.reduce(lambda a, b: build("&", a, b), tests, score.TRUE) if tests else score.TRUE
    return build("where", condition, what, r.read(target, index, node))


def _spelled_out(keys: list[Any], rank: int) -> list[Any]:
    """One key for each dim: an ellipsis and what is left out become full slices."""
    if any(k is None or isinstance(k, (list, bool)) or tensor(k) is not None for k in keys):
        raise Unreadable
    missing = [slice(None)] * (rank - sum(k is not Ellipsis for k in keys))
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
    return keys + missing if at is None else keys[:at] + missing + keys[at + 1 :]


def _slice_ends(k: slice, size: ix.Index) -> tuple[ix.Index, ix.Index]:
    if k.step not in (None, 1):
        raise Unreadable
    start = ix.ZERO if k.start is None else from_end(size_of(k.start), size)
    stop = size if k.stop is None else from_end(size_of(k.stop), size)
    if not ix.nonnegative(start) or not ix.nonnegative(stop):
        raise Unreadable
    return start, stop


@reads("index")
def _index(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    return r.read(args[0], _indexed(r, node, args[0], _key_of_aten(args), index), node)


def _key_of_aten(args: Args) -> tuple[Any, ...]:
    return tuple(slice(None) if k is None else k for k in args[1])


def _item_of_tuple(r: Reader, node: Node, source: Any, key: Any, index: Indices) -> Expr:
    if not isinstance(source, Node) or not isinstance(key, int):
        raise Unreadable
    args, kwargs = r.arguments(source)
    name = operation(source)
    if name in ("max", "min") and key == 0:
        return reduction(r, source, args, kwargs, index)
    if name in ("native_dropout",):
        raise Unreadable
    if r.versions.written_between(node, r.versions.order[source], r.versions.order[node]):
        raise Unreadable
    part = tuple_view(r, source, key, index)
    return r.read(part[0], part[1], source)


def tuple_view(r: Reader, source: Node, key: int, index: Indices) -> View:
    """The part `key` of chunk, split, unbind, meshgrid or broadcast_tensors as a view of what it was made from."""
    args, kwargs = r.arguments(source)
    name, parts = operation(source), value(source)
    if name in SPLITS and tensor(args[0]) is not None:
        shape = shape_of(args[0])
        d = positive_dim(argument(args, kwargs, 1 if name == "unbind" else 2, "dim", default=0), len(shape))
        key %= len(parts)
        if name == "unbind":
            return args[0], (*index[:d], ix.sympy.Integer(key), *index[d:])
        start = ix.sympy.expand(sum((ix.shape_of(p)[d] for p in parts[:key]), ix.ZERO))
        return args[0], shifted(index, d, start, ix.ONE)
    if name in ("meshgrid", "broadcast_tensors"):
        sources = args[0] if isinstance(args[0], (tuple, list)) else args
        if name == "broadcast_tensors":
            return sources[key], ix.broadcast(shape_of(sources[key]), index)
        order = (
            (1, 0, *range(2, len(sources)))
            if kwargs.get("indexing") == "xy" and len(sources) > 1
            else range(len(sources))
        )
        shape = shape_of(sources[key])
        return sources[key], (index[list(order).index(key)],) if shape else ()
    raise Unreadable


VIEWS["getitem"] = lambda r, node, args, kwargs, index: (
    (args[0], _indexed(r, node, args[0], args[1], index, plain=True))
    if tensor(args[0]) is not None
    else tuple_view(r, args[0], args[1], index)
)


LOOKUPS["getitem"] = lambda r, node, args, kwargs, index: (
    args[0],
    _indexed(r, node, args[0], args[1], index, wrap=False),
)
LOOKUPS["index"] = lambda r, node, args, kwargs, index: (
    args[0],
    _indexed(r, node, args[0], _key_of_aten(args), index, wrap=False),
)


lookup = registered_in(LOOKUPS)  # whose indices are never negative


def _indexed(
    r: Reader, node: Node, source: Any, key: Any, index: Indices, plain: bool = False, wrap: bool = True
) -> Indices:
    """The index into `source` of `source[key]` read at `index`; `plain` refuses indexing by tensors, without `wrap`
    their negative numbers stay."""
    shape = shape_of(source)
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(value(k), bool) or isinstance(k, list) for k in keys):
        raise Unreadable
    taken = sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis in [k for k in keys if not isinstance(k, Node)]:
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(shape) - taken)
    else:
        keys += [slice(None)] * (len(shape) - taken)
    tensors = [k for k in keys if tensor(k) is not None]
    if tensors and plain:
        raise Unreadable
    if any(tensor(k).dtype in (torch.bool, torch.uint8) for k in tensors):  # type: ignore[union-attr]
        raise Unreadable
    looked_up = max((len(shape_of(t)) for t in tensors), default=0)
    # numbers select first; then the looked-up dims stand where the first index tensor stood, or in front when
    # something separates them
    positions = [
        i
        for i, k in enumerate(k for k in keys if not isinstance(value(k), (int, torch.SymInt)))
        if tensor(k) is not None
    ]
    together = not tensors or positions == list(range(positions[0], positions[-1] + 1))
    rest = list(index)
    at_tensors: Indices = ()
    if tensors and not together:
        at_tensors, rest = tuple(rest[:looked_up]), rest[looked_up:]
    out: list[ix.Index] = []
    started = False
    for k in keys:
        d = len(out)
        if k is None:
            rest.pop(0)
        elif isinstance(k, slice):
            out.append(sliced((rest.pop(0),), 0, k.start, k.step, shape[d])[0])
        elif tensor(k) is not None:
            if together and not started:
                started = True
                at_tensors, rest = tuple(rest[:looked_up]), rest[looked_up:]
            out.append(_looked_up(r, k, ix.broadcast(shape_of(k), at_tensors), shape[d], node, wrap))
        else:
            out.append(from_end(size_of(k), shape[d]))
    return tuple(ix.at(s, i) for s, i in zip(shape, out, strict=True))


def _looked_up(r: Reader, x: Any, at: Indices, size: ix.Index, user: Node, wrap: bool) -> ix.Index:
    """The value of the integer tensor `x` at `at`, used as an index into a dim of `size`."""
    e = r.read(x, at, user)
    plain = ix.from_expr(e)
    if plain is not None:
        if ix.nonnegative(plain):
            return plain
        if ix.nonnegative(ix.sympy.expand(-plain - 1)):
            return ix.sympy.expand(plain + size)
    if wrap:  # indexing counts negative indices from the end; gather and embedding do not allow them
        e = build("where", build("<", e, const(0)), build("+", e, ix.to_expr(size)), e)
    return ix.opaque(e, size)


@lookup("embedding")
def _embedding(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    of_aten = isinstance(node.target, torch._ops.OpOverload)
    a, b = args[0], argument(args, kwargs, 1, "weight")
    indices, weight = (b, a) if of_aten else (a, b)
    if not of_aten and argument(args, kwargs, 3, "max_norm") is not None:
        raise Unreadable  # writes the weight
    padding = argument(args, kwargs, 2, "padding_idx")  # its row gets no gradient; of aten -1 is none, else the last
    scaled = argument(args, kwargs, 3 if of_aten else 5, "scale_grad_by_freq")
    sparse = argument(args, kwargs, 4 if of_aten else 6, "sparse")
    special = scaled or sparse or padding not in ((None, -1) if of_aten else (None,))
    if special and tensor(weight).requires_grad:  # type: ignore[union-attr]
        raise Unreadable
    i = _looked_up(r, indices, index[:-1], shape_of(weight)[0], node, wrap=False)
    return weight, (i, index[-1])


@lookup("index_select")
def _index_select(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    d = positive_dim(argument(args, kwargs, 1, "dim"), len(index))
    indices = argument(args, kwargs, 2, "index")
    at = (index[d],) if len(shape_of(indices)) else ()
    i = _looked_up(r, indices, at, shape_of(args[0])[d], node, wrap=False)
    return args[0], (*index[:d], i, *index[d + 1 :])


@lookup("gather", "take_along_dim")
def _gather(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    name = operation(node)
    dim, indices = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    if name == "take_along_dim":
        indices, dim = argument(args, kwargs, 1, "indices"), argument(args, kwargs, 2, "dim")
    shape = shape_of(args[0])
    d = positive_dim(dim, len(shape))
    if name == "take_along_dim" and any(
        a != b for k, (a, b) in enumerate(zip(shape, shape_of(indices), strict=True)) if k != d
    ):
        raise Unreadable  # broadcasts
    i = _looked_up(r, indices, index, shape[d], node, wrap=False)
    return args[0], (*index[:d], i, *index[d + 1 :])
