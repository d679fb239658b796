"""Opens calls that have attention inside but are one node of Dynamo's graph, and spells out what needs a tensor for
its dtype alone.

    o, w = F.multi_head_attention_forward(q, k, v, …)    ->    the operations it consists of
    mask.type_as(scores)                                 ->    mask.to(dtype=…, device=…)

They are traced on the fake tensors, so they are what torch does for these arguments. A call that cannot be traced stays
as it is.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchflash.passes.graph import tensor, value

log = logging.getLogger(__name__)

COMPOSITES: frozenset[Any] = frozenset((F.multi_head_attention_forward, F.softmin))


def open_composites(gm: GraphModule) -> None:
    """Replaces in `gm` every composite call by its operations."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in COMPOSITES:
            continue
        several = isinstance(value(node), (tuple, list))
        if several and any(u.target is not operator.getitem for u in node.users):
            continue
        opened = open_call(gm, node, node.target)
        if opened is None:
            continue
        if not several:
            node.replace_all_uses_with(opened.results)
        for user in list(node.users):
            user.replace_all_uses_with(opened.results[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        gm.recompile()


def name_dtypes(gm: GraphModule) -> None:
    """Replaces in `gm` every conversion to the dtype and device of another tensor by one that names them."""
    for node in gm.graph.nodes:
        if node.op != "call_method" or node.target not in ("to", "type_as") or len(node.args) != 2 or node.kwargs:
            continue
        x, other = (tensor(a) if isinstance(a, Node) else None for a in node.args)
        if x is not None and other is not None and x.layout is other.layout is torch.strided:
            node.target = "to"
            node.args, node.kwargs = node.args[:1], {"dtype": other.dtype, "device": other.device}


@dataclass(frozen=True)
class Opened:
    """What a call consists of: nodes before it, and those of them that are its results."""

    call: Node
    nodes: tuple[Node, ...]
    results: Any


def open_call(gm: GraphModule, node: Node, function: Callable[..., Any]) -> Opened | None:
    """Puts the operations of `function`, called as `node` is, before `node`."""
    try:
        return _traced(gm, node, function)
    except Exception as e:
        log.debug("torchflash: %s stays closed: %r", node.name, e)
        return None


def _traced(gm: GraphModule, node: Node, function: Callable[..., Any]) -> Opened | None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(x for x in leaves if isinstance(x, Node)))
    fakes = [value(x) for x in inputs]
    if not fakes or not isinstance(fakes[0], FakeTensor):
        return None

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = pytree.tree_unflatten([given[x] if isinstance(x, Node) else x for x in leaves], spec)
        return function(*args, **kwargs)

    with fakes[0].fake_mode:
        traced = make_fx(call, pre_dispatch=True)(*fakes)
    (results,) = (n.args[0] for n in traced.graph.nodes if n.op == "output")
    for expected, got in zip(pytree.tree_leaves(value(node)), pytree.tree_leaves(results), strict=True):
        t = got.meta["val"] if isinstance(got, Node) else None
        if (expected is None) != (t is None) or (t is not None and not _alike(expected, t)):
            return None  # traced outside the autocast it runs in
    if any(n.op == "get_attr" for n in traced.graph.nodes):
        return None  # holds a constant of its own
    copies = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(node):
        outputs: Any = gm.graph.graph_copy(traced.graph, copies)
    _describe(node, copies)
    return Opened(node, tuple(copy for n, copy in copies.items() if n.op != "placeholder"), outputs)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _describe(node: Node, copies: dict[Node, Node]) -> None:
    """Gives each copy of a traced node the metadata of `node` and its own value."""
    key = "example_value" if "example_value" in node.meta else "val"
    for n, copy in copies.items():
        if n.op == "placeholder":
            continue
        copy.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
        copy.meta[key] = t = n.meta["val"]
        if isinstance(t, torch.Tensor) and t.dtype.is_floating_point and torch.is_grad_enabled():
            needs = any(isinstance(x := value(a), torch.Tensor) and x.requires_grad for a in copy.all_input_nodes)
            t.requires_grad_(needs and n.target is not torch.ops.aten.detach.default)
