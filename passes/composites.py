"""Opens calls that have attention inside but are one node of Dynamo's graph, and spells out what needs a tensor for
its dtype alone.

    o, w = F.multi_head_attention_forward(q, k, v, …)    ->    the operations it consists of
    y = torch._transformer_encoder_layer_fwd(x, …)       ->    those of nn.TransformerEncoderLayer
    mask.type_as(scores)                                 ->    mask.to(dtype=…, device=…)

They are traced on the fake tensors, so they are what torch does for these arguments. A call that cannot be traced stays
as it is.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchflash.passes.graph import tensor, value

log = logging.getLogger(__name__)


def encoder_layer(
    x: Tensor,
    dim: int,
    heads: int,
    weight_qkv: Tensor,
    bias_qkv: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    weight_norm_1: Tensor,
    bias_norm_1: Tensor,
    weight_norm_2: Tensor,
    bias_norm_2: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """nn.TransformerEncoderLayer as torch has it under no_grad in eval mode, x [B, N, dim], by operations.

    `mask` [N, N], [B, N] of keys, or [B, heads, N, N], as `mask_type` 0, 1 or 2 says, leaves out what is not 0, also
    where its numbers are meant to be added; a query without keys gives NaN (aten/src/ATen/native/transformers).
    """

    def attend(x: Tensor) -> Tensor:
        q, k, v = F.linear(x, weight_qkv, bias_qkv).unflatten(-1, (3, heads, dim // heads)).permute(2, 0, 3, 1, 4)
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            left_out = mask[:, None, None] if mask_type == 1 else mask
            scores = (q / math.sqrt(dim // heads)) @ k.transpose(-2, -1)
            out = scores.masked_fill(left_out.to(torch.bool), -math.inf).softmax(-1) @ v
        return F.linear(out.transpose(1, 2).flatten(2), weight_out, bias_out)

    def feed(x: Tensor) -> Tensor:
        activation = F.gelu if use_gelu else F.relu
        return F.linear(activation(F.linear(x, weight_1, bias_1)), weight_2, bias_2)

    def first(x: Tensor) -> Tensor:
        return F.layer_norm(x, (dim,), weight_norm_1, bias_norm_1, eps)

    def second(x: Tensor) -> Tensor:
        return F.layer_norm(x, (dim,), weight_norm_2, bias_norm_2, eps)

    if norm_first:
        x = x + attend(first(x))
        return x + feed(second(x))
    x = first(x + attend(x))
    return second(x + feed(x))


COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: F.multi_head_attention_forward,
    F.softmin: F.softmin,
    torch._transformer_encoder_layer_fwd: encoder_layer,
}


def open_composites(gm: GraphModule) -> None:
    """Replaces in `gm` every composite call by its operations."""
    for node in list(gm.graph.nodes):
        function = COMPOSITES.get(node.target) if node.op == "call_function" else None
        if function is None:
            continue
        several = isinstance(value(node), (tuple, list))
        if several and any(u.target is not operator.getitem for u in node.users):
            continue
        opened = open_call(gm, node, function)
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


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _describe(node: Node, copies: dict[Node, Node]) -> None:
    """Gives each copy of a traced node the metadata of `node` and its own value."""
    key = "example_value" if "example_value" in node.meta else "val"
    for n, copy in copies.items():
        if n.op == "placeholder":
            continue
        copy.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
        copy.meta[key] = t = n.meta["val"]
        if isinstance(t, Tensor) and t.dtype.is_floating_point and torch.is_grad_enabled():
            needs = any(isinstance(x := value(a), Tensor) and x.requires_grad for a in copy.all_input_nodes)
            t.requires_grad_(needs and n.target is not torch.ops.aten.detach.default)
