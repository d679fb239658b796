"""Reading an FX graph: the value, canonical operation and arguments of a node, in whatever spelling it was written.

`torch.softmax(x, 1)`, `x.softmax(dim=1)`, `aten.softmax.int(x, 1)` and `F.softmax(x, 1)` are all the operation
"softmax"; `a += b`, `a.add_(b)` and `operator.iadd(a, b)` are all "add" (what writing in place means for the graph is
`passes.mutation`'s business).
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch
from torch.fx import Node

# canonical operation: its other names
_SPELLINGS = {
    "abs": "absolute",
    "add": "iadd __add__",
    "and": "iand and_ bitwise_and __and__",
    "atan": "arctan",
    "cat": "concat concatenate",
    "clamp": "clip",
    "div": "itruediv truediv true_divide divide __truediv__",
    "eq": "__eq__",
    "erf": "special_erf",
    "exp2": "special_exp2",
    "expm1": "special_expm1",
    "floor_divide": "ifloordiv floordiv __floordiv__",
    "fmod": "fmod_",
    "ge": "greater_equal __ge__",
    "getitem": "__getitem__",
    "gt": "greater __gt__",
    "invert": "inv bitwise_not __invert__",
    "le": "less_equal __le__",
    "log1p": "special_log1p",
    "log_softmax": "_log_softmax special_log_softmax",
    "logical_not": "not_",
    "logsumexp": "special_logsumexp",
    "lt": "less __lt__",
    "matmul": "imatmul __matmul__",
    "movedim": "moveaxis",
    "mul": "imul multiply __mul__ __rmul__",
    "ne": "not_equal __ne__",
    "neg": "negative __neg__",
    "or": "ior or_ bitwise_or __or__",
    "pow": "ipow __pow__",
    "radd": "__radd__",
    "rdiv": "__rtruediv__",
    "remainder": "imod mod __mod__",
    "rsub": "__rsub__",
    "sigmoid": "special_expit expit",
    "softmax": "_softmax special_softmax",
    "sub": "isub subtract __sub__",
    "to": "_to_copy",
    "transpose": "swapaxes swapdims",
    "type": "type_",
    "view": "_unsafe_view",
    "xor": "ixor bitwise_xor __xor__",
}
_OPERATORS = {name: canonical for canonical, names in _SPELLINGS.items() for name in names.split()}


_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv iand ior ixor ipow imod imatmul".split())


def value(x: Any) -> Any:
    """What a node stands for in the trace (a fake tensor, a SymInt, a number …); anything else is its own value. An
    item assignment stands for the tensor it has written."""
    if not isinstance(x, Node):
        return x
    if x.target is operator.setitem:
        return value(x.args[0])
    return x.meta.get("example_value", x.meta.get("val"))


def tensor(x: Any) -> torch.Tensor | None:
    v = value(x)
    return v if isinstance(v, torch.Tensor) else None


def dtype_of(x: Any) -> torch.dtype:
    t = tensor(x)
    assert t is not None
    return t.dtype


def operation(node: Node) -> str:
    """The canonical name of what a call node does; "" for other nodes."""
    if not node.op.startswith("call"):
        return ""
    target = node.target
    if isinstance(target, str):
        text = target if node.op == "call_method" else ""
    elif isinstance(target, torch._ops.OpOverload):
        text = target.overloadpacket.__name__
    else:
        text = getattr(target, "__name__", "")
    text = _OPERATORS.get(text, text)
    if text.endswith("_") and not text.startswith("_"):
        text = text[:-1]
    return _OPERATORS.get(text, text)


def in_place_target(node: Node) -> Any:
    """The argument a call writes to, or None."""
    if node.op == "call_function":
        text = getattr(node.target, "__name__", "")
        if node.target is operator.setitem or text in _IN_PLACE:
            return node.args[0]
        if isinstance(node.target, torch._ops.OpOverload):
            for a, argument in zip(node.args, node.target._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    return a
        elif text.endswith("_") and not text.startswith("_") and text not in _OPERATORS:
            return node.args[0] if node.args else None
    elif node.op == "call_method":
        text = str(node.target)
        if text == "__setitem__" or (text.endswith("_") and not text.endswith("__")) or text.strip("_") in _IN_PLACE:
            return node.args[0]
    out = node.kwargs.get("out")
    if out is None and (node.kwargs.get("inplace") is True or _inplace_by_position(node)):
        return node.args[0] if node.args else node.kwargs.get("input")
    return out


def _inplace_by_position(node: Node) -> bool:
    """As the modules of torch.nn call their functions: dropout(x, p, training, inplace)."""
    at = [i for i, a in enumerate(node.args) if a is True]
    return bool(at) and node.op == "call_function" and _position_of_inplace(node.target) in at


@functools.cache
def _position_of_inplace(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return None
    return names.index("inplace") if "inplace" in names else None


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str, default: Any = None) -> Any:
    """The argument at `position` or under any of `names`."""
    if position < len(args):
        return args[position]
    return next((kwargs[n] for n in names if n in kwargs), default)


def several(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> tuple[Any, ...]:
    """A list of sizes or dims given as one sequence or as the rest of the positional arguments."""
    rest = args[position:]
    if not rest:
        rest = (argument((), kwargs, 0, *names, default=()),)
    if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)):
        return tuple(rest[0])
    return tuple(rest)
