"""What writing in place means for a reader of the graph: which version of a tensor an argument is.

    s = q @ k                       s    = q @ k
    s.masked_fill_(mask, -inf)  ->  s'   = masked_fill(s, mask, -inf)
    softmax(s)                      softmax(s')

A write through a name of the whole tensor, be it to a part, renames it for everything that follows. One through an
alias of another shape leaves the other names *stale* from there on: their definition no longer says what they hold. A
stale tensor can still be loaded (the graph computes it), never read through. The graph itself is not changed.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchflash.passes.graph import storage, tensor
from torchflash.passes.writes import written


class Versions:
    """The versions of every tensor in one graph."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.resolved: dict[Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.writes: dict[int, list[int]] = {}  # storage -> positions of the writes to it
        self.harmless: set[Node] = set()  # writes that only make a new version of a tensor made in this graph
        self._stale: dict[Node, int] = {}
        current: dict[Node, Node] = {}
        members: dict[int, list[Node]] = {}
        for node in graph.nodes:
            args = map_arg(node.args, lambda x: current.get(x, x))
            self.resolved[node] = args, map_arg(node.kwargs, lambda x: current.get(x, x))
            targets = written(node)
            for target in targets:
                if (key := storage(target)) is None:
                    continue
                self.writes.setdefault(key, []).append(self.order[node])
                whole = targets == (target,) and _covers(node, target)
                external = any(o.op in ("placeholder", "get_attr") for o in members.get(key, ()))
                for other in members.get(key, ()):
                    if whole and not external and _geometry(other) == _geometry(node):
                        current[other] = node
                    else:
                        self._stale.setdefault(other, self.order[node])
                if whole and not external:
                    self.harmless.add(node)
            if (key := storage(node)) is not None:
                members.setdefault(key, []).append(node)

    def arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `node` with every tensor replaced by the version it has there."""
        return self.resolved[node]

    def stale(self, node: Node, user: Node) -> bool:
        """Whether `node` holds something else than its definition says when `user` runs."""
        since = self._stale.get(node)
        return since is not None and self.order[user] > since

    def written_between(self, node: Node, first: int, last: int) -> bool:
        """Whether the memory of `node` is written between two positions."""
        key = storage(node)
        return key is not None and any(first < w < last for w in self.writes.get(key, ()))

    def writers(self, node: Node, last: int) -> list[Node]:
        """The writes to the memory of `node` up to a position."""
        key = storage(node)
        return [] if key is None else [self.nodes[w] for w in self.writes.get(key, ()) if w <= last]


def _geometry(node: Node) -> tuple[Any, ...] | None:
    t = tensor(node)
    return (
        None if t is None else (tuple(map(str, t.shape)), tuple(map(str, t.stride())), str(t.storage_offset()), t.dtype)
    )


def _covers(node: Node, target: Node) -> bool:
    """The result of the write is what it has written to, and all of its storage."""
    t = tensor(node)
    if t is None or storage(node) != storage(target) or _geometry(node) != _geometry(target):
        return False
    size = t.numel() * t.element_size()
    total = t.untyped_storage().nbytes()
    return str(size) == str(total)
