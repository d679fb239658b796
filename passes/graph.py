"""Reading an FX graph: the value, canonical operation and arguments of a node, in whatever spelling it was written.

`torch.softmax(x, 1)`, `x.softmax(dim=1)`, `aten.softmax.int(x, 1)` and `F.softmax(x, 1)` are all the operation "softmax"; `a += b`,
`a.add_(b)` and `operator.iadd(a, b)` are all "add" (what writing in place means for the graph is `passes.mutation`'s business).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "ifloordiv": "floor_divide", "iand": "and", "ior": "or",
              "ixor": "xor", "ipow": "pow", "imod": "remainder", "imatmul": "matmul", "truediv": "div", "true_divide": "div", "divide": "div",
              "multiply": "mul", "subtract": "sub", "floordiv": "floor_divide", "mod": "remainder", "fmod_": "fmod", "and_": "and", "or_": "or",
              "xor": "xor", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "invert": "invert", "inv": "invert",
              "bitwise_not": "invert", "not_": "logical_not", "negative": "neg", "absolute": "abs", "arctan": "atan", "clip": "clamp",
              "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "_softmax": "softmax",
              "_log_softmax": "log_softmax", "special_softmax": "softmax", "special_log_softmax": "log_softmax",
              "swapaxes": "transpose", "swapdims": "transpose", "concat": "cat", "concatenate": "cat", "_unsafe_view": "view",
              "moveaxis": "movedim", "special_expit": "sigmoid", "expit": "sigmoid", "special_logsumexp": "logsumexp", "max_pool": "max_pool",
              "special_erf": "erf", "special_exp2": "exp2", "special_expm1": "expm1", "special_log1p": "log1p", "__and__": "and",
              "__or__": "or", "__xor__": "xor", "__add__": "add", "__radd__": "radd", "__mul__": "mul", "__rmul__": "mul", "__sub__": "sub",
              "__rsub__": "rsub", "__truediv__": "div", "__rtruediv__": "rdiv", "__matmul__": "matmul", "__neg__": "neg", "__invert__": "invert",
              "__getitem__": "getitem", "__eq__": "eq", "__ne__": "ne", "__le__": "le", "__lt__": "lt", "__ge__": "ge", "__gt__": "gt",
              "__pow__": "pow", "__floordiv__": "floor_divide", "__mod__": "remainder", "_to_copy": "to", "type_": "type"}  # fmt: skip


def value(x: Any) -> Any:
    """What a node stands for in the trace (a fake tensor, a SymInt, a number …); anything else is its own value."""
    if not isinstance(x, Node):
        return x
    return x.meta.get("example_value", x.meta.get("val"))


def tensor(x: Any) -> torch.Tensor | None:
    v = value(x)
    return v if isinstance(v, torch.Tensor) else None


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
        if node.target is operator.setitem or text in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "ipow", "imod", "imatmul"):
            return node.args[0]
        if isinstance(node.target, torch._ops.OpOverload):
            for a, argument in zip(node.args, node.target._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    return a
        elif text.endswith("_") and not text.startswith("_") and text not in _OPERATORS:
            return node.args[0] if node.args else None
    elif node.op == "call_method":
        text = str(node.target)
        if text == "__setitem__" or (text.endswith("_") and not text.endswith("__")) or text in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
            return node.args[0]
    out = node.kwargs.get("out")
    if out is None and node.kwargs.get("inplace") is True:
        return node.args[0] if node.args else node.kwargs.get("input")
    return out


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
