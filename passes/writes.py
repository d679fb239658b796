"""Which tensors a call writes to, in whatever spelling.

    s.mul_(2)    s += 1    t[0] = x    torch.mul(s, 2, out=s)    F.relu(s, inplace=True)    torch._foreach_mul_([s], 2)
    torch.ops.mine.append(key, value, key_cache, value_cache)    checkpoint(body, x, mask), where body writes the mask
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from torchflash.passes.graph import OPERATORS, storage

_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv iand ior ixor ipow imod imatmul".split())


def written(node: Node) -> tuple[Node, ...]:
    """The arguments of a call whose memory it writes to."""
    if not node.op.startswith("call"):
        return ()
    return tuple(dict.fromkeys(x for x in pytree.tree_leaves(list(_arguments(node))) if isinstance(x, Node)))


def _arguments(node: Node) -> Iterator[Any]:
    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        yield from _by_schema(node, target)
    elif isinstance(target, HigherOrderOperator):
        yield from _by_body(node, target)
    elif _first_is_written(node):
        yield node.args[0] if node.args else node.kwargs.get("input")
    yield node.kwargs.get("out")


def _by_schema(node: Node, op: OpOverload | OpOverloadPacket) -> Iterator[Any]:
    """Of a packet, what any of its overloads writes."""
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    for schema in (overload._schema for overload in overloads):
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if not argument.kwarg_only and i < len(node.args):
                yield node.args[i]
            yield node.kwargs.get(argument.name)


def _by_body(node: Node, op: HigherOrderOperator) -> Iterator[Any]:
    """What the body that is called writes, which takes the last arguments; all that is given to one of several bodies
    that writes, or to a kernel of the user."""
    if op.name() == "triton_kernel_wrapper_mutation":
        yield node.kwargs
        return
    owner = node.graph.owning_module
    attributes = [getattr(owner, str(x.target), None) for x in node.all_input_nodes if x.op == "get_attr"]
    bodies = [x for x in attributes if isinstance(x, GraphModule)]
    for body in bodies:
        inputs = body.graph.find_nodes(op="placeholder")
        places = {storage(w) for n in body.graph.nodes for w in written(n)} - {None}
        given = pytree.tree_leaves(node.args)[-len(inputs) :]
        wrote = [storage(x) in places for x in inputs]
        if len(bodies) == 1 and len(given) == len(inputs):
            yield [x for x, so in zip(given, wrote, strict=True) if so]
        elif any(wrote):
            yield node.args


def _first_is_written(node: Node) -> bool:
    if node.kwargs.get("inplace") is True:
        return True
    if node.op == "call_method":
        text = str(node.target)
        in_place = text.endswith("_") and not text.endswith("__")
        return in_place or text == "__setitem__" or text.strip("_") in _IN_PLACE
    text = getattr(node.target, "__name__", "")
    if node.target is operator.setitem or text in _IN_PLACE:
        return True
    in_place = text.endswith("_") and not text.startswith("__") and text not in OPERATORS
    return in_place or any(a is True and i == _position_of_inplace(node.target) for i, a in enumerate(node.args))


@functools.cache
def _position_of_inplace(function: Any) -> int | None:
    """As the modules of torch.nn call their functions: dropout(x, p, training, inplace)."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return None
    return names.index("inplace") if "inplace" in names else None


__all__ = ["written"]
