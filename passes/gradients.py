"""Through which nodes of a graph gradients flow.

    with torch.no_grad():        q' is a cut: the gradient of s does not reach q, though a view, which reads through,
        q' = q.view(2, 4, -1)    and the fake value of q', which torch says needs a gradient, have it otherwise
    s = q' @ k.mT

A write in place under no_grad is one as well: its target has the gradient of what it held before.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from torchflash.passes.graph import operation, tensor
from torchflash.passes.mutation import Versions
from torchflash.passes.writes import written

_SWITCHES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def _switches(graph: Graph) -> bool:
    """Whether gradients are switched on or off within a graph."""
    return any(operation(n) in _SWITCHES for n in graph.nodes)


def in_one_mode(first: Node, last: Node) -> bool:
    """Whether gradients are not switched on or off between two nodes."""
    node = first
    while node is not last and operation(node) not in _SWITCHES:
        node = node.next
    return node is last


def enabled_at_start(gm: GraphModule, outer: GraphModule) -> bool:
    """Whether `gm`, inside `outer` or itself, may begin with gradients enabled: a graph of Dynamo begins in the mode
    it is compiled in, and those inside of it where they are called; one of torch.export in any."""
    if not any("example_value" in n.meta for n in gm.graph.find_nodes(op="placeholder")) or torch.is_grad_enabled():
        return True
    return gm is not outer and any(_switches(m.graph) for m in outer.modules() if isinstance(m, GraphModule))


class Gradients:
    """`cuts`: the nodes through which no gradient flows although one of their inputs needs it: detach, and what runs
    under no_grad and is used outside of it. `inputs`: the inputs of the graph that each node is differentiable with
    respect to, as bits of a number; where a graph does not say whether an input needs a gradient (those of
    torch.export), each floating-point one does. `without`: the same of what runs under no_grad, were it not."""

    def __init__(self, versions: Versions, graph: Graph, enabled: bool) -> None:
        self.inputs: dict[Node, int] = {}
        self.without: dict[Node, int] = {}
        cuts: set[Node] = set()
        modes = [enabled]
        anywhere = enabled or _switches(graph)
        for i, node in enumerate(versions.nodes):
            name, t = operation(node), tensor(node)
            if name == "_set_grad_enabled":
                modes[-1] = bool(node.args[0])
            elif name == "_enter_inference_mode":
                modes.append(not node.args[0])
            elif name == "_exit_inference_mode" and len(modes) > 1:
                modes.pop()
            floating = t is not None and t.dtype.is_floating_point
            needs = t is None or (floating and (t.requires_grad or "example_value" not in node.meta))
            if not node.op.startswith("call"):
                self.inputs[node] = 1 << i if anywhere and floating and needs else 0
                continue
            read = [x for x in tree_leaves(versions.arguments(node)) if isinstance(x, Node)]
            if modes[-1]:
                cuts.update(x if tensor(x) is not None else node for x in read if self.without.get(x))
                given = _any(self.inputs, read)
                if name == "detach" and given:
                    cuts.add(node)
                self.inputs[node] = given if needs and name != "detach" else 0
            else:
                if floating or t is None:
                    self.without[node] = _any(self.inputs, read) | _any(self.without, read)
                self.inputs[node] = _any(self.inputs, written(node))  # has the gradient that its target had
        self.cuts = frozenset(cuts)


def _any(inputs: dict[Node, int], nodes: Iterable[Node]) -> int:
    return functools.reduce(operator.or_, (inputs.get(x, 0) for x in nodes), 0)


__all__ = ["Gradients", "enabled_at_start", "in_one_mode"]
