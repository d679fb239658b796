"""View operations and lookups: they only change at which index the source is read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from torchflash import score
from torchflash.passes import index as ix
from torchflash.passes.contraction import Operand, einsum_permutation
from torchflash.passes.graph import argument, operation, several, tensor, value
from torchflash.passes.pointwise import _compare, _reduction
from torchflash.passes.reader import Indices, Reader, Unreadable, positive_dim, reads
from torchflash.score import Expr, build, const

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
View = tuple[Any, Indices]


def _shape(x: Any) -> tuple[ix.Index, ...]:
    t = tensor(x)
    assert t is not None
    return ix.shape_of(t)


def _size(x: Any) -> ix.Index:
    v = value(x)
    if isinstance(v, bool) or not isinstance(v, (int, torch.SymInt)):
        raise Unreadable
    return ix.size_of(v)


VIEWS: dict[str, Any] = {}


def view(*names: str) -> Any:
    """Registers a view: (reader, node, args, kwargs, index) -> (source, index of the source)."""

    def register(f: Any) -> Any:
        VIEWS.update(dict.fromkeys(names, f))

        @reads(*names)
        def read(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
            source, at = f(r, node, args, kwargs, index)
            return r.read(source, tuple(at), node)

        return f

    return register


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
        if a is None or b is None or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
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
    shape = _shape(args[0])
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
    return args[0], ix.broadcast(_shape(args[0]), index)


@view("contiguous", "clone")
def _same(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    return args[0], index


@view("repeat", "tile")
def _repeat(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = _shape(args[0])
    tail = index[len(index) - len(shape) :]
    return args[0], tuple(ix.at(s, i if s == 1 else ix.divmod_index(i, s)[1]) for s, i in zip(shape, tail, strict=True))


@view("repeat_interleave")
def _repeat_interleave(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    times, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if dim is None or not isinstance(value(times), (int, torch.SymInt)):
        raise Unreadable
    d = positive_dim(dim, len(index))
    return args[0], tuple(ix.floordiv(i, _size(times)) if k == d else i for k, i in enumerate(index))


VIEWS["einsum"] = lambda r, node, args, kwargs, index: einsum_permutation(args, index)


# ------------------------------------------------------------------------------------------------------- lanes of vmap


@reads("_add_batch_dim")
def _add_batch_dim(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source, dim, level = args
    d = positive_dim(dim, len(index) + 1)
    return r.read(source, (*index[:d], _lane(level, _shape(source)[d]), *index[d:]), node)


@reads("_remove_batch_dim")
def _remove_batch_dim(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source, level, size, dim = args
    d = positive_dim(dim, len(index))
    inside = r.read(source, (*index[:d], *index[d + 1 :]), node)
    if r.depends(inside):
        raise Unreadable
    return ix.replace_axis(inside, _lane(level, _size(size)), index[d])


def _lane(level: int, size: ix.Index) -> ix.Index:
    return ix.axis(f"lane{level}", size)


# ---------------------------------------------------------------------------------------------------- parts and joints


@view("narrow")
def _narrow(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    dim, start = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "start")
    if tensor(start) is not None:
        raise Unreadable
    d = positive_dim(dim, len(index))
    return args[0], _shifted(index, d, _from_end(_size(start), _shape(args[0])[d]), ix.ONE)


@view("slice")
def _slice(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    d = positive_dim(argument(args, kwargs, 1, "dim", default=0), len(index))
    start, step = argument(args, kwargs, 2, "start"), argument(args, kwargs, 4, "step", default=1)
    return args[0], _sliced(index, d, start, step, _shape(args[0])[d])


@view("select")
def _select(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = _shape(args[0])
    d = positive_dim(argument(args, kwargs, 1, "dim"), len(shape))
    at = _from_end(_size(argument(args, kwargs, 2, "index")), shape[d])
    return args[0], (*index[:d], at, *index[d:])


def _from_end(start: ix.Index, size: ix.Index) -> ix.Index:
    if ix.nonnegative(start):
        return start
    if ix.nonnegative(-start - 1):
        return ix.sympy.expand(start + size)
    raise Unreadable


def _sliced(index: Indices, d: int, start: Any, step: Any, size: ix.Index) -> Indices:
    first = ix.ZERO if start is None else _from_end(_size(start), size)
    return _shifted(index, d, first, ix.ONE if step is None else _size(step))


def _shifted(index: Indices, d: int, start: ix.Index, step: ix.Index) -> Indices:
    # a slice that starts before the beginning starts at it; one that starts behind the end is empty and never read
    if not ix.nonnegative(start):
        raise Unreadable
    return (*index[:d], ix.sympy.expand(start + step * index[d]), *index[d + 1 :])


@view("flip")
def _flip(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shape = _shape(args[0])
    dims = [positive_dim(d, len(shape)) for d in several(args, kwargs, 1, "dims")]
    return args[0], tuple(ix.sympy.expand(shape[k] - 1 - i) if k in dims else i for k, i in enumerate(index))


@view("roll")
def _roll(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> View:
    shifts, dims = argument(args, kwargs, 1, "shifts"), argument(args, kwargs, 2, "dims")
    shifts, dims = (x if isinstance(x, (tuple, list)) else (x,) for x in (shifts, dims))
    if not dims or dims[0] is None:
        raise Unreadable
    shape, at = _shape(args[0]), list(index)
    for shift, dim in zip(shifts, dims, strict=True):
        d = positive_dim(dim, len(shape))
        at[d] = ix.divmod_index(ix.sympy.expand(at[d] - _size(shift) + shape[d]), shape[d])[1]
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
            pieces.append((p, offset, _shape(p)[d]))
            offset = ix.sympy.expand(offset + _shape(p)[d])
    value: Expr | None = None
    for p, start, size in reversed(pieces):
        if size == 0:
            continue
        at = (*index[:d], *((ix.sympy.expand(index[d] - start),) if operation(node) == "cat" else ()), *index[d + 1 :])
        piece = r.read(p, at, node)
        end = ix.to_expr(ix.sympy.expand(start + size))
        value = piece if value is None else build("where", _compare("<", ix.to_expr(index[d]), end), piece, value)
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
        before = _size(widths[2 * k])
        at[d] = ix.sympy.expand(index[d] - before)
        for op, limit in ((">=", ix.ZERO), ("<", ix.shape_of(source)[d])):
            test = _compare(op, ix.to_expr(at[d]), ix.to_expr(limit))
            inside = test if inside is score.TRUE else inside if test is score.TRUE else build("&", inside, test)
    x = r.read(args[0], tuple(at), node)
    outside = r.cast(r.read(filler or 0, (), node), type(value(filler or 0)), source.dtype)
    return build("where", inside, x, outside)


# -------------------------------------------------------------------------------------------------------------- lookups


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
        shape = _shape(target)
        for k, size, i in zip(_spelled_out(keys, len(shape)), shape, index, strict=True):
            if isinstance(k, slice):
                start, stop = _slice_ends(k, size)
                inside.append(_compare(">=", ix.to_expr(i), ix.to_expr(start)))
                inside.append(_compare("<", ix.to_expr(i), ix.to_expr(stop)))
                at.append(ix.sympy.expand(i - start))
            else:
                inside.append(_compare("==", ix.to_expr(i), ix.to_expr(_from_end(_size(k), size))))
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
    start = ix.ZERO if k.start is None else _from_end(_size(k.start), size)
    stop = size if k.stop is None else _from_end(_size(k.stop), size)
    if not ix.nonnegative(start) or not ix.nonnegative(stop):
        raise Unreadable
    return start, stop


@reads("index")
def _index(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    key = tuple(slice(None) if k is None else k for k in args[1])
    return r.read(args[0], _indexed(r, node, args[0], key, index), node)


def _item_of_tuple(r: Reader, node: Node, source: Any, key: Any, index: Indices) -> Expr:
    if not isinstance(source, Node) or not isinstance(key, int):
        raise Unreadable
    args, kwargs = r.arguments(source)
    name = operation(source)
    if name in ("max", "min") and key == 0:
        return _reduction(r, source, args, kwargs, index)
    if name in ("native_dropout",):
        raise Unreadable
    part = tuple_view(r, source, key, index)
    return r.read(part[0], part[1], source)


def tuple_view(r: Reader, source: Node, key: int, index: Indices) -> View:
    """The part `key` of chunk, split, unbind, meshgrid or broadcast_tensors as a view of what it was made from."""
    args, kwargs = r.arguments(source)
    name, parts = operation(source), value(source)
    if name in ("chunk", "split", "tensor_split", "split_with_sizes", "unbind") and tensor(args[0]) is not None:
        shape = _shape(args[0])
        d = positive_dim(argument(args, kwargs, 1 if name == "unbind" else 2, "dim", default=0), len(shape))
        key %= len(parts)
        if name == "unbind":
            return args[0], (*index[:d], ix.sympy.Integer(key), *index[d:])
        start = ix.sympy.expand(sum((ix.shape_of(p)[d] for p in parts[:key]), ix.ZERO))
        return args[0], _shifted(index, d, start, ix.ONE)
    if name in ("meshgrid", "broadcast_tensors"):
        sources = args[0] if isinstance(args[0], (tuple, list)) else args
        if name == "broadcast_tensors":
            return sources[key], ix.broadcast(_shape(sources[key]), index)
        order = (
            (1, 0, *range(2, len(sources)))
            if kwargs.get("indexing") == "xy" and len(sources) > 1
            else range(len(sources))
        )
        shape = _shape(sources[key])
        return sources[key], (index[list(order).index(key)],) if shape else ()
    raise Unreadable


VIEWS["getitem"] = lambda r, node, args, kwargs, index: (
    (args[0], _indexed(r, node, args[0], args[1], index, plain=True))
    if tensor(args[0]) is not None
    else tuple_view(r, args[0], args[1], index)
)


def _indexed(r: Reader, node: Node, source: Any, key: Any, index: Indices, plain: bool = False) -> Indices:
    """The index into `source` of `source[key]` read at `index`; `plain` refuses indexing by tensors."""
    shape = _shape(source)
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
    looked_up = max((len(_shape(t)) for t in tensors), default=0)
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
            out.append(_sliced((rest.pop(0),), 0, k.start, k.step, shape[d])[0])
        elif tensor(k) is not None:
            if together and not started:
                started = True
                at_tensors, rest = tuple(rest[:looked_up]), rest[looked_up:]
            out.append(_looked_up(r, k, ix.broadcast(_shape(k), at_tensors), shape[d], node, wrap=True))
        else:
            out.append(_from_end(_size(k), shape[d]))
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


@reads("embedding")
def _embedding(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    a, b = args[0], argument(args, kwargs, 1, "weight")
    indices, weight = (b, a) if isinstance(node.target, torch._ops.OpOverload) else (a, b)
    if not isinstance(node.target, torch._ops.OpOverload) and argument(args, kwargs, 3, "max_norm") is not None:
        raise Unreadable  # writes the weight
    if any(argument(args, kwargs, k, "scale_grad_by_freq") is True for k in (3, 5)) and tensor(weight).requires_grad:  # type: ignore[union-attr]
        raise Unreadable
    if argument(args, kwargs, 2, "padding_idx") not in (None, -1) and tensor(weight).requires_grad:  # type: ignore[union-attr]
        raise Unreadable  # the padding row gets no gradient
    i = _looked_up(r, indices, index[:-1], _shape(weight)[0], node, wrap=False)
    return r.read(weight, (i, index[-1]), node)


@reads("index_select")
def _index_select(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    d = positive_dim(argument(args, kwargs, 1, "dim"), len(index))
    indices = argument(args, kwargs, 2, "index")
    at = (index[d],) if len(_shape(indices)) else ()
    i = _looked_up(r, indices, at, _shape(args[0])[d], node, wrap=False)
    return r.read(args[0], (*index[:d], i, *index[d + 1 :]), node)


@reads("gather", "take_along_dim")
def _gather(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    name = operation(node)
    dim, indices = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    if name == "take_along_dim":
        indices, dim = argument(args, kwargs, 1, "indices"), argument(args, kwargs, 2, "dim")
    shape = _shape(args[0])
    d = positive_dim(dim, len(shape))
    if name == "take_along_dim" and any(
        a != b for k, (a, b) in enumerate(zip(shape, _shape(indices), strict=True)) if k != d
    ):
        raise Unreadable  # broadcasts
    i = _looked_up(r, indices, index, shape[d], node, wrap=False)
    return r.read(args[0], (*index[:d], i, *index[d + 1 :]), node)


@reads("diagonal", "as_strided", "unfold")
def _unknown(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    raise Unreadable
