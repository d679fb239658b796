"""What depends on the scores, read as leaves: contractions, softmaxes, reductions of scores; and dropout."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from torchflash.passes import index as ix
from torchflash.passes.contraction import contraction, einsum_permutation
from torchflash.passes.graph import argument, operation, several, tensor
from torchflash.passes.reader import (
    Dot,
    Indices,
    Reader,
    Reduce,
    Softmax,
    Unreadable,
    positive_dim,
    reads,
)
from torchflash.score import Expr, build

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

REDUCTIONS = ("sum", "amax", "amin", "mean", "logsumexp", "std", "var", "prod")


# after


@reads("matmul", "bmm", "mm", "einsum", "inner", "linear", "tensordot")
def _dot(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if operation(node) == "linear" and argument(args, kwargs, 2, "bias") is not None:
        raise Unreadable
    if operation(node) == "einsum":
        try:
            source, at = einsum_permutation(args, index)
        except Unreadable:
            pass
        else:
            return r.read(source, at, node)
        if (both := contraction(r, Dot(node, index), "d")) is not None and not both.summed:
            return build("*", *(r.operand_at(o, node) for o in (both.lhs, both.rhs)))
    return Expr("dot", (), Dot(node, index))


@reads("baddbmm", "addmm", "addbmm")
def _baddbmm(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    if operation(node) == "addbmm":
        raise Unreadable
    beta, alpha = argument(args, kwargs, 3, "beta", default=1), argument(args, kwargs, 4, "alpha", default=1)
    dot = build("*", r.operand(alpha, (), node), Expr("dot", (), Dot(node, index)))
    if isinstance(beta, (int, float)) and beta == 0:
        return dot
    added = r.operand(args[0], index, node)
    return build(
        "+",
        added if isinstance(beta, (int, float)) and beta == 1 else build("*", r.operand(beta, (), node), added),
        dot,
    )


@reads("softmax", "_safe_softmax")
def _softmax(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    name = operation(node)
    dim = argument(args, kwargs, 1, "dim")
    rank = len(index)
    if dim is None:
        dim = 0 if rank in (0, 1, 3) else 1
    e = Expr("softmax", (), Softmax(args[0], positive_dim(dim, rank), index, node))
    return build("nan_to_num", e) if name == "_safe_softmax" else e


@reads("log_softmax")
def _log_softmax(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    dim = argument(args, kwargs, 1, "dim")
    if dim is None:
        dim = 0 if len(index) in (0, 1, 3) else 1
    d = positive_dim(dim, len(index))
    at = tuple(ix.ZERO if k == d else i for k, i in enumerate(index))
    return build("-", r.read(args[0], index, node), Expr("reduce", (), Reduce("logsumexp", args[0], (d,), at, node)))


@reads(*REDUCTIONS)
def reduction(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    source = tensor(args[0])
    assert source is not None
    rank = source.dim()
    dims = several(args[:2], kwargs, 1, "dim", "axis") or tuple(range(rank))
    if dims == (None,):
        dims = tuple(range(rank))
    reduced = tuple(sorted(positive_dim(d, rank) for d in dims))
    kept = iter(index)
    keepdim = argument(args, kwargs, 2, "keepdim", default=False)
    # the index of the source, with 0 at the reduced dims
    at = tuple(
        next(kept) if d not in reduced else (next(kept), ix.ZERO)[1] if keepdim else ix.ZERO for d in range(rank)
    )
    shape = ix.shape_of(source)
    inside = tuple(ix.axis("r", shape[d]) if d in reduced else i for d, i in enumerate(at))
    if not r.depends(r.read(args[0], inside, node)):
        raise Unreadable
    return Expr("reduce", (), Reduce(operation(node), args[0], reduced, at, node))


@reads("dropout", "feature_dropout")
def _dropout(r: Reader, node: Node, args: Args, kwargs: Kwargs, index: Indices) -> Expr:
    p = argument(args, kwargs, 1, "p", default=0.5)
    training = argument(args, kwargs, 2, "training", "train", default=True)
    x = r.operand(args[0], index, node)
    if training is False or (isinstance(p, (int, float)) and p == 0):
        return x
    if operation(node) != "dropout" or not isinstance(p, (int, float)) or training is not True or not r.depends(x):
        raise Unreadable
    # the generator is keyed by position, so the node only has to tell two dropouts apart
    return Expr("dropout", (x,), (float(p), node))
