"""Reading an FX graph: the value, canonical operation and arguments of a node, in whatever spelling it was written.

`torch.softmax(x, 1)`, `x.softmax(dim=1)`, `aten.softmax.int(x, 1)` and `F.softmax(x, 1)` are all the operation
"softmax"; `a += b`, `a.add_(b)` and `operator.iadd(a, b)` are all "add" (what writing in place means for the graph is
`passes.mutation`'s business).
"""

from __future__ import annotations

import functools
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
OPERATORS = {name: canonical for canonical, names in _SPELLINGS.items() for name in names.split()}
TORCH = frozenset(("torch", "_operator", "builtins", "math"))  # whose functions have these names


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


def storage(x: Any) -> int | None:
    """The identity of the memory a node's tensor lives in; None when it has no ordinary storage."""
    t = tensor(x)
    if t is None or t.layout is not torch.strided:
        return None
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


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
    else:
        text = _name(target)
    text = OPERATORS.get(text, text)
    if text.endswith("_") and not text.startswith("_"):
        text = text[:-1]
    return OPERATORS.get(text, text)


@functools.cache
def _name(target: Any) -> str:
    """The name of a function or operator; with its namespace where it is not torch's own, but may be called alike."""
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    module, name = getattr(target, "__module__", None) or "torch", getattr(target, "__name__", "")
    return name if module.partition(".")[0] in TORCH else f"{module}.{name}"


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
