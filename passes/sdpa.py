"""Calls of scaled_dot_product_attention as attention like any other: opened, and closed again unless what is inside was
rewritten.

    o = F.scaled_dot_product_attention(q, k, v, mask)    ->    matmul, mask, softmax, matmul
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from torchflash.passes.composites import Opened, open_call
from torchflash.passes.graph import operation, tensor
from torchflash.passes.writes import written

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
        found = None if why else open_call(gm, node, functools.partial(_attention, autocast=dtype))
        if found is None:
            left[node] = why or "its operations could not be traced"
            continue
        _lies_as(found.results, node)
        node.replace_all_uses_with(found.results)
        opened.append(found)
    return opened, left


def _lies_as(result: Node, call: Node) -> None:
    """Gives the opened result the strides of the call's, which follow those of the queries in most of torch's kernels:
    what comes after, such as a view without a copy, has been traced with them."""
    given, made = tensor(call), tensor(result)
    assert given is not None and isinstance(made, FakeTensor)
    with made.fake_mode, torch.no_grad():
        lying = torch.empty_strided(given.shape, given.stride(), dtype=made.dtype, device=made.device)
    key = "example_value" if "example_value" in result.meta else "val"
    result.meta[key] = lying.requires_grad_(made.requires_grad)


def close_calls(gm: GraphModule, opened: list[Opened]) -> set[str]:
    """Puts back each call whose opened result is still used; returns the names of the softmaxes that are gone."""
    closed: set[str] = set()
    for o in opened:
        if o.results.users:
            o.results.replace_all_uses_with(o.call)
            closed |= {n.name for n in o.nodes if operation(n) == "softmax"}
        else:
            _erase(gm, o.call)
        for n in reversed(o.nodes):
            if not n.users and not n._erased:
                gm.graph.erase_node(n)
    if opened:
        gm.recompile()
    return closed


def _erase(gm: GraphModule, node: Node) -> None:
    """A call that nobody uses, and what only it used: copies of keys and values, say, that are now read in place."""
    stack = [node]
    while stack:
        n = stack.pop()
        pure = n.op.startswith("call") and not n.is_impure() and not written(n)
        if pure and not n.users and not n._erased:
            stack += n.all_input_nodes
            gm.graph.erase_node(n)


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
