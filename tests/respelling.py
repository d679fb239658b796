"""The same computation in other words: rules that rewrite Dynamo's graphs into equivalent ones.

Each rule takes a node and says what stands in its place, or None where it does not apply. Values change by rounding at
most. What the operations of the graph are given is known from `example_value`.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

Rule = Callable[[GraphModule, Node], Node | None]
RULES: dict[str, Rule] = {}

# functions and methods of one meaning; the first of each is what the others are told apart by
ADD = (operator.add, torch.add, "add")
SUB = (operator.sub, torch.sub, "sub")
MUL = (operator.mul, torch.mul, "mul")
DIV = (operator.truediv, torch.div, "div", torch.true_divide)
MATMUL = (operator.matmul, torch.matmul, "matmul")
TRANSPOSE = (torch.transpose, "transpose", torch.swapaxes, "swapaxes")
SOFTMAX = (F.softmax, torch.softmax, "softmax")
MASKED_FILL = (torch.masked_fill, "masked_fill")
WHERE = (torch.where,)
METHODS = {torch.add: "add", torch.sub: "sub", torch.mul: "mul", torch.div: "div", torch.matmul: "matmul",
           torch.transpose: "transpose", torch.softmax: "softmax", torch.masked_fill: "masked_fill", torch.exp: "exp",
           torch.tanh: "tanh", torch.sigmoid: "sigmoid", torch.clamp: "clamp", torch.permute: "permute",
           torch.unsqueeze: "unsqueeze", torch.reshape: "reshape", torch.bmm: "bmm", torch.neg: "neg",
           torch.squeeze: "squeeze", torch.logical_not: "logical_not", torch.tril: "tril",
           torch.triu: "triu"}  # fmt: skip
FUNCTIONS = {v: k for k, v in METHODS.items()}


def rule(f: Rule) -> Rule:
    RULES[f.__name__] = f
    return f


def shown(x: Any) -> Tensor | None:
    t = x.meta.get("example_value") if isinstance(x, Node) else None
    return t if isinstance(t, Tensor) else None


def floating(x: Any) -> bool:
    t = shown(x)
    return t is not None and t.is_floating_point()


def number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def two(node: Node, names: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """The operands of a call of one of `names` with two of them and nothing else."""
    if node.target not in names or node.op not in ("call_function", "call_method"):
        return None
    return (node.args[0], node.args[1]) if len(node.args) == 2 and not node.kwargs else None


def given(node: Node, names: tuple[Any, ...], *keys: str) -> dict[str, Any] | None:
    """The arguments of a call of one of `names` by name, if it has no others than `keys`."""
    if node.target not in names or node.op not in ("call_function", "call_method") or len(node.args) > len(keys):
        return None
    found = dict(zip(keys, node.args, strict=False)) | dict(node.kwargs)
    return found if set(found) <= set(keys) else None


def call(gm: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call whose example value is what it gives for those of its arguments."""
    node = (gm.graph.call_method if isinstance(target, str) else gm.graph.call_function)(target, args, kwargs)
    values = torch.fx.map_arg((args, kwargs), lambda n: n.meta.get("example_value"))
    (first, *rest), named = values
    function = getattr(first, target) if isinstance(target, str) else None
    mode = next(t for n in node.all_input_nodes if (t := shown(n)) is not None).fake_mode  # type: ignore[attr-defined]
    with mode:
        node.meta["example_value"] = function(*rest, **named) if function else target(first, *rest, **named)
    return node


# --------------------------------------------------------------------------------------------------------------- rules


@rule
def commuted(gm: GraphModule, node: Node) -> Node | None:
    for names in (ADD, MUL):
        if (found := two(node, names)) and floating(node):
            a, b = found
            return call(gm, names[0], b, a)
    return None


@rule
def divided(gm: GraphModule, node: Node) -> Node | None:
    """x * c as x / (1 / c)"""
    found = two(node, MUL)
    if not found or not floating(node):
        return None
    x, c = found if number(found[1]) else found[::-1]
    return call(gm, operator.truediv, x, 1.0 / c) if number(c) and c and floating(x) else None


@rule
def multiplied(gm: GraphModule, node: Node) -> Node | None:
    """x / c as x * (1 / c)"""
    found = two(node, DIV)
    if not found or not number(found[1]) or not floating(found[0]):
        return None
    return call(gm, torch.mul, found[0], 1.0 / found[1])


@rule
def negated(gm: GraphModule, node: Node) -> Node | None:
    """x - y as x + -y, and x + y as x - -y"""
    for names, other in ((SUB, operator.add), (ADD, operator.sub)):
        if (found := two(node, names)) and floating(node) and floating(found[1]):
            return call(gm, other, found[0], call(gm, torch.neg, found[1]))
    return None


@rule
def by_method(gm: GraphModule, node: Node) -> Node | None:
    name = METHODS.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]
    plain = {operator.add: "add", operator.mul: "mul", operator.sub: "sub", operator.truediv: "div"}
    name = name or plain.get(node.target)  # type: ignore[call-overload]
    if name is None or not node.args or shown(node.args[0]) is None:
        return None
    return call(gm, name, *node.args, **node.kwargs)


@rule
def by_function(gm: GraphModule, node: Node) -> Node | None:
    if node.op != "call_method" or node.target not in FUNCTIONS or shown(node.args[0]) is None:
        return None
    args = node.args
    if node.target in ("permute", "reshape") and len(args) > 1 and not isinstance(args[1], (tuple, list)):
        args = (args[0], tuple(args[1:]))
    return call(gm, FUNCTIONS[node.target], *args, **node.kwargs)  # type: ignore[index]


def _products(node: Node) -> tuple[Any, Any, int] | None:
    """a, b and the rank of a product of two batches of matrices with the same batch dims."""
    found = two(node, MATMUL)
    if not found:
        return None
    a, b = map(shown, found)
    if a is None or b is None or a.dim() != b.dim() or a.dim() < 3 or a.shape[:-2] != b.shape[:-2]:
        return None
    return found[0], found[1], a.dim()


@rule
def by_einsum(gm: GraphModule, node: Node) -> Node | None:
    found = _products(node)
    return call(gm, torch.functional.einsum, "...ij,...jk->...ik", found[0], found[1]) if found else None


@rule
def by_sum(gm: GraphModule, node: Node) -> Node | None:
    """q @ k as the sum over the products of all pairs."""
    found = _products(node)
    a, b = (shown(x) for x in found[:2]) if found else (None, None)
    if found is None or a is None or b is None or a.dtype != b.dtype or not a.is_floating_point():
        return None
    product = call(gm, torch.mul, call(gm, torch.unsqueeze, found[0], -1), call(gm, torch.unsqueeze, found[1], -3))
    return call(gm, torch.sum, product, -2)


@rule
def transposed_einsum(gm: GraphModule, node: Node) -> Node | None:
    """q @ k.transpose(-2, -1) as an einsum of q and k."""
    found = two(node, MATMUL)
    if not found or not isinstance(found[1], Node):
        return None
    inner = given(found[1], TRANSPOSE, "input", "dim0", "dim1")
    a, k = shown(found[0]), shown(inner["input"]) if inner else None
    if a is None or k is None or a.dim() != k.dim() or a.dim() < 3 or a.shape[:-2] != k.shape[:-2]:
        return None
    if {int(inner[d]) % k.dim() for d in ("dim0", "dim1")} != {k.dim() - 2, k.dim() - 1}:  # type: ignore[index]
        return None
    letters = "abcd"[: a.dim() - 2]
    text = f"{letters}ie,{letters}je->{letters}ij"
    return call(gm, torch.functional.einsum, text, found[0], inner["input"])  # type: ignore[index]


@rule
def by_bmm(gm: GraphModule, node: Node) -> Node | None:
    found = _products(node)
    if not found or found[2] == 3:
        return None
    a, b = (call(gm, torch.flatten, x, 0, found[2] - 3) for x in found[:2])
    shape = shown(node).shape  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in shape):
        return None
    return call(gm, "reshape", call(gm, torch.bmm, a, b), *shape)


@rule
def by_baddbmm(gm: GraphModule, node: Node) -> Node | None:
    """a @ b * c of three dims as the alpha of a baddbmm."""
    found = two(node, MUL)
    if not found or not number(found[1]) or not isinstance(found[0], Node) or len(found[0].users) > 1:
        return None
    inner = _products(found[0]) if found[0].target not in (torch.bmm, "bmm") else (*found[0].args, 3)
    if not inner or inner[2] != 3:
        return None
    empty = call(gm, torch.zeros_like, found[0])
    return call(gm, torch.baddbmm, empty, inner[0], inner[1], beta=0.0, alpha=float(found[1]))


@rule
def scaled_before(gm: GraphModule, node: Node) -> Node | None:
    """(q @ k) * c as (q * c) @ k"""
    return _scaled(gm, node, first=True)


@rule
def scaled_twice(gm: GraphModule, node: Node) -> Node | None:
    """(q @ k) * c as (q * √c) @ (k * √c)"""
    return _scaled(gm, node, first=False)


def _scaled(gm: GraphModule, node: Node, first: bool) -> Node | None:
    found, inverse = two(node, MUL), False
    if not found:
        found, inverse = two(node, DIV), True
    if not found or not number(found[1]) or not isinstance(found[0], Node) or len(found[0].users) > 1:
        return None
    factors, c = two(found[0], MATMUL), 1.0 / found[1] if inverse else float(found[1])
    if not factors or not all(map(floating, factors)) or c <= 0:
        return None
    if first:
        return call(gm, operator.matmul, call(gm, operator.mul, factors[0], c), factors[1])
    return call(gm, operator.matmul, *(call(gm, operator.mul, x, c**0.5) for x in factors))


@rule
def by_where(gm: GraphModule, node: Node) -> Node | None:
    found = given(node, MASKED_FILL, "input", "mask", "value")
    if not found or not number(found["value"]) or not floating(found["input"]):
        return None
    return call(gm, torch.where, found["mask"], float(found["value"]), found["input"])


@rule
def by_masked_fill(gm: GraphModule, node: Node) -> Node | None:
    found = given(node, WHERE, "condition", "input", "other")
    if not found or len(found) < 3 or shown(found["condition"]) is None:
        return None
    c, x, y = found["condition"], found["input"], found["other"]
    if number(x) and floating(y) and shown(y).shape == shown(node).shape:  # type: ignore[union-attr]
        return call(gm, "masked_fill", y, c, float(x))
    if number(y) and floating(x) and shown(x).shape == shown(node).shape:  # type: ignore[union-attr]
        return call(gm, "masked_fill", x, call(gm, operator.invert, c), float(y))
    return None


@rule
def by_permute(gm: GraphModule, node: Node) -> Node | None:
    found = given(node, TRANSPOSE, "input", "dim0", "dim1")
    t = shown(found["input"]) if found else None
    if t is None or len(found) < 3:  # type: ignore[arg-type]
        return None
    order = list(range(t.dim()))
    i, j = int(found["dim0"]) % t.dim(), int(found["dim1"]) % t.dim()  # type: ignore[index]
    order[i], order[j] = order[j], order[i]
    return call(gm, "permute", found["input"], *order)  # type: ignore[index]


@rule
def other_dims(gm: GraphModule, node: Node) -> Node | None:
    """Dims counted from the other end."""
    if (found := given(node, TRANSPOSE, "input", "dim0", "dim1")) and len(found) == 3:
        t = shown(found["input"])
        dims = () if t is None else (_other(found[d], t) for d in ("dim0", "dim1"))
        return t if t is None else call(gm, "swapaxes", found["input"], *dims)
    if (found := given(node, SOFTMAX, "input", "dim")) and isinstance(found.get("dim"), int):
        t = shown(found["input"])
        return t if t is None else call(gm, torch.softmax, found["input"], _other(found["dim"], t))
    return None


def _other(dim: int, t: Tensor) -> int:
    return dim - t.dim() if dim >= 0 else dim + t.dim()


@rule
def by_reshape(gm: GraphModule, node: Node) -> Node | None:
    if node.op == "call_method" and node.target == "view" and not isinstance(node.args[1], torch.dtype):
        return call(gm, "reshape", *node.args)
    return None


def _softmax(node: Node) -> tuple[Any, int] | None:
    """The argument and the dim of a softmax, if that is all that is said of it."""
    found = given(node, SOFTMAX, "input", "dim")
    if not found or not isinstance(found.get("dim"), int) or not floating(found["input"]):
        return None
    return found["input"], found["dim"]


@rule
def softmax_by_hand(gm: GraphModule, node: Node) -> Node | None:
    if (found := _softmax(node)) is None:
        return None
    x, dim = found
    e = call(gm, torch.exp, call(gm, operator.sub, x, call(gm, "amax", x, dim, keepdim=True)))
    return call(gm, operator.truediv, e, call(gm, "sum", e, dim, keepdim=True))


@rule
def softmax_by_logarithm(gm: GraphModule, node: Node) -> Node | None:
    found = _softmax(node)
    return None if found is None else call(gm, torch.exp, call(gm, F.log_softmax, *found))


@rule
def softmax_by_logsumexp(gm: GraphModule, node: Node) -> Node | None:
    if (found := _softmax(node)) is None:
        return None
    x, dim = found
    return call(gm, torch.exp, call(gm, torch.sub, x, call(gm, torch.logsumexp, x, dim, keepdim=True)))


@rule
def in_place(gm: GraphModule, node: Node) -> Node | None:
    """Into the product of matrices that nobody else reads."""
    for names, name in ((ADD, "add_"), (MUL, "mul_"), (DIV, "div_"), (SUB, "sub_")):
        if found := two(node, names):
            return call(gm, name, *found) if _own(found[0], node, found[1]) else None
    found = given(node, MASKED_FILL, "input", "mask", "value")
    if found and _own(found["input"], node, None) and number(found["value"]):
        return call(gm, "masked_fill_", found["input"], found["mask"], found["value"])
    return None


def _own(x: Any, node: Node, other: Any) -> bool:
    fresh = (*MATMUL, *ADD, torch.bmm, "add_", "mul_", "masked_fill_")
    if not isinstance(x, Node) or x.target not in fresh or len(x.users) > 1 or not floating(x):
        return False
    if isinstance(other, Node) and (shown(other) is None or other.target in MATMUL):
        return False
    a, b = shown(x), shown(node)
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype


# --------------------------------------------------------------------------------------------------------- application


def respelled(gm: GraphModule, names: list[str], chance: float = 1.0, seed: int = 0) -> tuple[GraphModule, int]:
    """A copy of Dynamo's graph with the rules of `names` applied, one after the other, to all nodes there are, each
    with a probability `chance`; and how many were replaced."""
    memo: dict[Any, Any] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, memo))
    for old, new in memo.items():
        new.meta = dict(old.meta)
    other = GraphModule(copy.copy(gm), graph)
    rng = random.Random(seed)
    count = 0
    for name in names:
        for node in list(other.graph.nodes):
            if node.op not in ("call_function", "call_method") or node._erased or rng.random() >= chance:
                continue
            with other.graph.inserting_before(node):
                found = RULES[name](other, node)
            if found is None:
                continue
            if name != "in_place":  # whoever writes to the result later writes to this memory
                found.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(found)
            other.graph.erase_node(node)
            count += 1
    other.graph.eliminate_dead_code()
    other.graph.lint()
    other.recompile()
    return other, count
