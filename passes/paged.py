"""Keys and values that are looked up row by row, as in a paged cache, are read where they lie and not copied.

    k = k_cache[table].flatten(1, 2)                 k', v' = the caches viewed as [B, Hk, pages, page, D]
    v = v_cache[table].flatten(1, 2)          ->     o = torchflash.attention(q, k', v', [table], …,
    o = softmax(q @ k.mT) @ v                                                 "k[t0[b, n // 16], n % 16]", N)

Keys and values must be looked up at the same indices, which follow from batch and key. Where a gradient is needed the
lookup stays, so that it may reach the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from torchflash.passes import index as ix
from torchflash.passes.attention import Attention, Rows, is_whole
from torchflash.passes.contraction import Operand
from torchflash.passes.graph import dtype_of, operation, tensor
from torchflash.passes.index import Index
from torchflash.passes.lookups import LOOKUPS
from torchflash.passes.reader import Reader, Unreadable
from torchflash.passes.views import peel_steps
from torchflash.score import Expr

MAX_ROWS = 2  # indices that the operator takes


def paged(r: Reader, block: Attention) -> Attention | None:
    """The block on what its keys and values are looked up in; None where that is not known to be possible."""
    result = tensor(block.root)
    assert result is not None
    roles = block.roles
    if not roles.batch and len(roles.heads) == 1:  # what all but the queries share may be called either
        roles = dataclasses.replace(roles, batch=roles.heads, heads=())
        block = dataclasses.replace(block, roles=roles)
    single = len(block.products) == len(block.products[0].keys) == len(block.values) == 1
    if result.requires_grad or not single or len(roles.batch) > 1:
        return None
    (product,), (value,) = block.products, block.values
    for k, rows in _looked_up(r, block, product.keys[0], product.depth, block.qk_dtype, None):
        for v, same in _looked_up(r, block, value, roles.columns, block.v_dtype, rows):
            at = Rows(rows.axes, rows.at, (*rows.lookups, *same.lookups))
            moved = dataclasses.replace(product, keys=(k,))
            return dataclasses.replace(block, products=(moved,), values=(v,), rows=at)
    return None


def _looked_up(
    r: Reader, block: Attention, o: Operand, columns: Sequence[Index], dtype: torch.dtype, same: Rows | None
) -> Iterator[tuple[Operand, Rows]]:
    """What `o` is looked up in, before any views of it that help, and where; at the `same` indices, if given."""
    *_, last = peel_steps(r, _without_parts(o))
    lookup = LOOKUPS.get(operation(last.node))
    if lookup is None or o.pads or len(columns) != 1 or r.versions.stale(last.node, last.user):
        return
    args, kwargs = r.arguments(last.node)
    try:
        source, at = lookup(r, last.node, args, kwargs, last.index)
        if not isinstance(source, Node) or tensor(source) is None or dtype_of(source) != dtype:
            return
        for step in peel_steps(r, Operand(source, tuple(at), last.node)):
            found = _rows_of(block, step, columns[0], last.node, same)
            if found is not None:
                yield found
    except (Unreadable, ix.NotInteger):
        return


def _without_parts(o: Operand) -> Operand:
    """The same read at indices of the whole tensor."""
    index = list(o.index)
    for d, start, step, _length in o.parts:
        index[d] = ix.sympy.expand(start + step * index[d])
    return Operand(o.node, tuple(index), o.user)


def _rows_of(
    block: Attention, o: Operand, column: Index, lookup: Node, same: Rows | None
) -> tuple[Operand, Rows] | None:
    """`o` with an axis of its own for each dim whose index follows from batch and key, so that the other dims are
    heads and columns; None where they are not, or where a view of it would not do."""
    roles = block.roles
    t = tensor(o.node)
    assert t is not None
    index, rows = list(o.index), list[tuple[Index, Expr]]()
    for d, (i, size) in enumerate(zip(o.index, ix.shape_of(t), strict=True)):
        if not i.is_Integer and i not in roles.batch and ix.axes(i) <= {*roles.batch, roles.keys}:
            e = ix.to_expr(i)
            place = len(rows) if same is None or e not in same.at else same.at.index(e)
            index[d] = ix.axis(f"row{place}", size)
            rows.append((index[d], e))
    moved = Operand(o.node, tuple(index), o.user).sliced()
    if moved is None or not is_whole(moved) or column not in index or not 1 <= len(rows) <= MAX_ROWS:
        return None
    heads = tuple(a for a in roles.heads if a in moved.axes())
    if len(heads) > 1 or heads != roles.heads[: len(heads)] or not any(roles.keys in ix.expr_axes(e) for _, e in rows):
        return None
    axes, at = zip(*sorted(rows, key=str), strict=True)
    found = Rows(axes, at, (lookup,))
    return None if same is not None and (axes, at) != (same.axes, same.at) else (moved, found)

