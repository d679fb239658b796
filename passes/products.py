"""Products that are multiplied out and summed, as the contractions that they are: opened, and closed again unless what
they are part of was rewritten.

    s = (q[:, :, None] * k[:, None]).sum(-1)    ->    s = torch.einsum("abcd,abcd->abc", q[:, :, None], k[:, None])

A contraction spares the product of all pairs, and its terms are not rounded one by one.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchflash.passes import index as ix
from torchflash.passes.composites import Opened, open_call
from torchflash.passes.gradients import in_one_mode
from torchflash.passes.graph import argument, operation, several, tensor
from torchflash.passes.writes import written


def open_products(gm: GraphModule) -> list[Opened]:
    """Opens each sum of a product whose factors each lack a dim that the other has, or that has one element; its users
    take the contraction."""
    opened = []
    for node in list(gm.graph.nodes):
        if operation(node) != "sum" or (function := _contraction(node)) is None:
            continue
        product = node.args[0]
        with gm.graph.inserting_before(product):  # where the factors are read
            call = gm.graph.call_function(function, _factors(product))
        call.meta = dict(node.meta)
        found = open_call(gm, call, function)
        gm.graph.erase_node(call)
        if found is not None:
            found.results.meta = dict(node.meta)  # what is written to it in place is written to the same memory
            node.replace_all_uses_with(found.results)
            opened.append(Opened(node, found.nodes, found.results))
    return opened


def _factors(product: Node) -> tuple[Any, Any]:
    return product.args[0], argument(product.args, product.kwargs, 1, "other")


def _contraction(node: Node) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What a sum of a product is of its factors, if that is a contraction."""
    product, result = node.args[0] if node.args else None, tensor(node)
    if not isinstance(product, Node) or operation(product) != "mul" or set(product.users) != {node}:
        return None
    dims = several(node.args[:2], node.kwargs, 1, "dim", "axis")
    if result is None or written(product) or written(node) or not in_one_mode(product, node):
        return None
    if not dims or not all(isinstance(d, int) for d in dims):
        return None
    factors = [t for x in _factors(product) if (t := tensor(x)) is not None and t.dtype == result.dtype]
    if len(factors) != 2:
        return None
    rank = max(t.dim() for t in factors)
    shapes = [[ix.ONE] * (rank - t.dim()) + list(ix.shape_of(t)) for t in factors]
    summed = sorted(d % rank for d in dims)
    rest = [d for d in range(rank) if d not in summed]
    alone = [any(x[d] != 1 and y[d] == 1 for d in rest) for x, y in (shapes, shapes[::-1])]
    either = any(all(x[d] == 1 for x in shapes) for d in rest)  # a single query, say
    if rank > len(string.ascii_lowercase) or any(shapes[0][d] != shapes[1][d] for d in summed):
        return None
    if not all(alone) and not (either and any(alone)):
        return None
    letters = string.ascii_lowercase[:rank]
    terms = ",".join(letters[rank - t.dim() :] for t in factors)
    equation = f"{terms}->{''.join(letters[d] for d in rest)}"
    keepdim = argument(node.args, node.kwargs, 2, "keepdim", default=False)

    def contract(a: Tensor, b: Tensor) -> Tensor:
        out = torch.einsum(equation, a, b)
        for d in summed if keepdim else ():
            out = out.unsqueeze(d)
        return out

    return contract


__all__ = ["open_products"]
