"""Opens calls that have attention inside but are one node of Dynamo's graph, and spells out what needs a tensor for
its dtype alone.

    o, w = F.multi_head_attention_forward(q, k, v, …)    ->    the operations it consists of
    o = F.scaled_dot_product_attention(q, k, v, mask)    ->    matmul, mask, softmax, matmul
    mask.type_as(scores)                                 ->    mask.to(dtype=…, device=…)

They are traced on the fake tensors, so they are what torch does for these arguments. A call that cannot be traced stays
as it is. Calls of scaled_dot_product_attention are closed again unless what is inside was rewritten.
"""

from __future__ import annotations

import functools
import logging
import math
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

from torchflash.passes.graph import operation, tensor, value

log = logging.getLogger(__name__)

COMPOSITES: frozenset[Any] = frozenset((F.multi_head_attention_forward,))


def open_composites(gm: GraphModule) -> None:
    """Replaces in `gm` every composite call by its operations."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in COMPOSITES:
            continue
        if any(u.target is not operator.getitem for u in node.users):
            continue
        opened = _open(gm, node, node.target)
        if opened is None:
            continue
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


def _open(gm: GraphModule, node: Node, function: Callable[..., Any]) -> Opened | None:
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


# -------------------------------------------------------------------------------------- scaled_dot_product_attention

CALL = "scaled_dot_product_attention"


def open_calls(gm: GraphModule, which: str, unsure: bool = False) -> tuple[list[Opened], dict[Node, str]]:
    """Opens the calls of scaled_dot_product_attention of the kind `which` (Options.sdpa), whose users take the opened
    result; and why the others are left to torch. `unsure`: an autocast may begin in a graph that calls this one."""
    opened, left = [], {}
    for node in [n for n in gm.graph.nodes if operation(n) == CALL]:
        why = _left_to_torch(node, which)
        dtype = None if why else _autocast(node)
        if not why and unsure and dtype is None and _other_dtype(node):
            why = "autocast may round its mask"
        found = None if why else _open(gm, node, functools.partial(_attention, autocast=dtype))
        if found is None:
            left[node] = why or "its operations could not be traced"
            continue
        node.replace_all_uses_with(found.results)
        opened.append(found)
    return opened, left


def close_calls(gm: GraphModule, opened: list[Opened]) -> set[str]:
    """Puts back each call whose opened result is still used; returns the names of the softmaxes that are gone."""
    closed: set[str] = set()
    for o in opened:
        if o.results.users:
            o.results.replace_all_uses_with(o.call)
            closed |= {n.name for n in o.nodes if operation(n) == "softmax"}
        else:
            gm.graph.erase_node(o.call)
        for n in reversed(o.nodes):
            if not n.users and not n._erased:
                gm.graph.erase_node(n)
    if opened:
        gm.recompile()
    return closed


def _left_to_torch(node: Node, which: str) -> str:
    """Why a call stays; "" where it is to be opened."""
    q, mask = tensor(node.args[0] if node.args else node.kwargs.get("query")), _mask(node)
    if q is None or q.dim() < 3:
        return "its operands are not batched"
    if not node.users:
        return "nothing uses its result"
    if which == "none":
        return "the option says so"
    if which == "all":
        return ""
    if mask is None:
        return "there is no mask tensor"
    if q.device.type != "cuda":
        return f"on {q.device.type} torch's kernels are faster"
    if isinstance(q.shape[-2], int) and q.shape[-2] == 1:
        return "there is one query"
    return ""


def _mask(node: Node) -> Any:
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _other_dtype(node: Node) -> bool:
    """Whether the mask is of another floating-point dtype than the result."""
    result, mask = tensor(node), tensor(_mask(node))
    return result is not None and mask is not None and mask.dtype not in (result.dtype, torch.bool)


def begins_autocast(gm: GraphModule) -> bool:
    return any(operation(n) in ("_enter_autocast", "wrap_with_autocast") for n in gm.graph.nodes)


def _autocast(node: Node) -> torch.dtype | None:
    """What autocast rounds the operands of a call to, the mask as well; None outside of autocast."""
    q, result = tensor(node.args[0] if node.args else node.kwargs.get("query")), tensor(node)
    if q is None or result is None:
        return None
    active = [torch.is_autocast_enabled(q.device.type)]
    for n in node.graph.nodes:
        if n is node:
            break
        if operation(n) == "_enter_autocast":
            active.append(bool(n.args[2]) if n.args[0] == q.device.type else active[-1])
        elif operation(n) == "_exit_autocast":
            active.pop()
    return result.dtype if active[-1] or q.dtype != result.dtype else None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    autocast: torch.dtype | None = None,
) -> torch.Tensor:
    """As torch documents scaled_dot_product_attention: a query without any key gives 0."""
    if autocast is not None:
        query, key, value = query.to(autocast), key.to(autocast), value.to(autocast)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(autocast)  # finfo.min of float32 is then -inf
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask beside is_causal")  # an error of torch's, or what the kernel it takes makes of it
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    s = (query @ key.transpose(-2, -1)) * (1.0 / torch.sym_sqrt(query.size(-1)) if scale is None else scale)
    kept = None
    if is_causal:
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        s = s.masked_fill(~causal, -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        kept = attn_mask
        s = s.masked_fill(~kept, -math.inf)
    elif attn_mask is not None:
        kept = ~(attn_mask <= -math.inf)
        s = (s + attn_mask).masked_fill(~kept, -math.inf)
    p = s.softmax(-1).to(query.dtype)
    if kept is not None:
        p = torch.where(kept, p, 0.0)
    return F.dropout(p, dropout_p) @ value
