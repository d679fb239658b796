"""Keeps what a block was beside the operator that replaces it, so that both can be run on the same tensors
(`torchflash.verifying`).

    q, k, v, bias  →  … softmax …  →  root             call, q', k', v', bias' = enter(q, k, v, bias)
                                                   ->   o  = torchflash.attention(q', k', v', [bias'], …)[0]
                                                        o' = leave(call, o, …)

`enter` gives its tensors on and sees the gradients that come back through the operator; `leave` gives the result on.
The block itself becomes a graph of its own, from what the operator reads to the root.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchflash.passes import index as ix
from torchflash.passes.attention import Attention
from torchflash.passes.graph import operation, storage, tensor
from torchflash.passes.index import Index
from torchflash.passes.program import Programs
from torchflash.passes.reader import Reader
from torchflash.passes.replace import Emitted
from torchflash.passes.writes import written
from torchflash.report import Rewritten
from torchflash.verifying import Block, DropoutAxes, Enter, Input, Leave

log = logging.getLogger(__name__)

# set the state that what follows runs in
CONTEXT = frozenset(
    (
        "_enter_autocast",
        "_exit_autocast",
        "_set_grad_enabled",
        "_enter_inference_mode",
        "_exit_inference_mode",
        "_vmap_increment_nesting",
        "_vmap_decrement_nesting",
        "lazy_load_decompositions",
    )
)
RANDOM = frozenset(
    "alpha_dropout bernoulli dropout feature_dropout multinomial normal rand rand_like randint randint_like randn"
    " randn_like randperm rrelu uniform".split()
)


@dataclass(frozen=True)
class _Block:
    """The nodes between `inputs` (in the order of the graph) and the root; writes in place that stay outside, with
    what they write to; why the block cannot be run again, if so."""

    inputs: tuple[Node, ...]
    members: frozenset[Node]
    done: dict[Node, Node]
    problem: str


def keep(
    r: Reader,
    gm: GraphModule,
    block: Attention,
    programs: Programs,
    call: Node,
    emitted: Emitted,
    alive: set[Node],
    record: Rewritten,
) -> None:
    """Puts `enter` and `leave` around what was emitted for `block`, the operator `call` among it. `alive` are the
    nodes of the original graph that stay."""
    root = block.root
    result = emitted.results.pop(root)
    originals = {emitted.current(n): n for n in emitted.results}
    ours = _emitted_for(r, result, frozenset(originals))
    read = {a for n in ours for a in n.all_input_nodes if a not in ours}
    operands = {originals.get(a, a) for a in read if tensor(a) is not None}
    try:
        inputs, shared = _analyse(r, gm, block, programs, operands, alive, set(emitted.results), record)
    except Exception as error:  # the block is as it is; that it cannot be compared is said
        log.exception("torchflash: internal error, %s is not verified", root.name)
        inputs = _in_order(r, operands)
        described = tuple(Input(x.name, "", True, False, False) for x in inputs)
        shared = Block(record, described, None, None, f"internal error: {type(error).__name__}: {error}")

    q, k, seed, keys = call.args[0], call.args[1], call.args[10], call.args[13]
    first = next(n for n in gm.graph.nodes if n in ours and n is not seed)
    if isinstance(seed, Node):
        first.prepend(seed)
    with gm.graph.inserting_before(first):
        entered = gm.graph.call_module(_add(gm, Enter(shared)), (seed, *map(emitted.current, inputs)))
        token = gm.graph.call_function(operator.getitem, (entered, 0))
        for position, x in enumerate(inputs):
            if x in operands:
                outer = emitted.current(x)
                inner = gm.graph.call_function(operator.getitem, (entered, position + 1))
                inner.meta = dict(outer.meta)
                for n in ours:
                    n.replace_input_with(outer, inner)
    last = next(n for n in reversed(gm.graph.nodes) if n in ours)
    with gm.graph.inserting_after(last):
        left = gm.graph.call_module(_add(gm, Leave(shared)), (token, result, q, k, keys))
    left.meta = dict(result.meta)
    emitted.results[root] = left


def _analyse(
    r: Reader,
    gm: GraphModule,
    block: Attention,
    programs: Programs,
    operands: set[Node],
    alive: set[Node],
    roots: set[Node],
    record: Rewritten,
) -> tuple[tuple[Node, ...], Block]:
    """The inputs of `block`, and what `Enter` and `Leave` share. `operands`: the nodes the operator reads."""
    kept = _between(r, block.root, operands, alive, alive | roots)
    inputs = _in_order(r, {*kept.inputs, *operands})
    roles = _roles(block, programs)
    at = r.versions.order[block.root]
    described = tuple(
        Input(
            x.name,
            "+".join(roles.get(x, ())),
            x in operands,
            _written_by(r, x, kept.members),
            r.versions.written_between(x, at, len(r.versions.order)),
        )
        for x in inputs
    )
    dropout, problem = _dropout(r, block, kept.members)
    graph = _graph(r, block.root, inputs, kept, dropout[0] if dropout else None)
    axes = dropout[1] if dropout else None
    return inputs, Block(record, described, GraphModule(gm, graph), axes, kept.problem or problem)


def _in_order(r: Reader, nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted(nodes, key=r.versions.order.__getitem__))


def _add(gm: GraphModule, module: torch.nn.Module) -> str:
    number = sum(1 for name, _ in gm.named_children() if name.startswith("torchflash_verify"))
    name = f"torchflash_verify_{number}"
    gm.add_submodule(name, module)
    return name


def _emitted_for(r: Reader, result: Node, earlier: frozenset[Node]) -> frozenset[Node]:
    """The new nodes that `result` is computed from, as far as the results of earlier blocks."""
    found: set[Node] = set()
    stack = [result]
    while stack:
        n = stack.pop()
        if n not in found and n not in r.versions.order and n not in earlier:
            found.add(n)
            stack += n.all_input_nodes
    return frozenset(found)


def _between(r: Reader, root: Node, operands: set[Node], alive: set[Node], available: Iterable[Node]) -> _Block:
    """What `root` is computed by from `operands` and other nodes that are available, as far as these do not depend on
    the operands themselves."""
    order = r.versions.order
    last = order[root]
    dependent: set[Node] = set(operands)
    for n in r.versions.nodes[:last]:
        if n not in dependent and any(a in dependent for a in _arguments(r, n)):
            dependent.add(n)
    ends = operands | {n for n in available if n not in dependent}
    again: set[Node] = set()  # writes that stay outside, but what they write to is made again here
    while True:
        inputs: set[Node] = set()
        members: set[Node] = set()
        done: dict[Node, Node] = {}
        stack = [root]
        while stack:
            n = stack.pop()
            if n in members or n in inputs or n in done:
                continue
            if n is not root and (n in ends or n.op in ("placeholder", "get_attr")):
                inputs.add(n)
            elif n in alive and n not in again and (target := _only_written(n)) is not None:
                done[n] = target
                stack.append(target)
            else:
                members.add(n)
                stack += _arguments(r, n)
                stack += r.versions.writers(n, last)
        outside = {storage(x) for x in inputs}
        missing = {w for w in done if storage(w) not in outside}
        if not missing:
            break
        again |= missing
    ordered = _in_order(r, inputs)
    return _Block(ordered, frozenset(members), done, _problem(r, root, ordered, members))


def _only_written(n: Node) -> Node | None:
    """What a call writes to, if it writes to one tensor alone and its result is that."""
    targets = written(n)
    return targets[0] if len(targets) == 1 and storage(n) == storage(targets[0]) else None


def _arguments(r: Reader, n: Node) -> list[Node]:
    leaves = torch.utils._pytree.tree_leaves(r.arguments(n))
    return [*(a for a in leaves if isinstance(a, Node)), *n.all_input_nodes]


def _problem(r: Reader, root: Node, inputs: tuple[Node, ...], members: set[Node]) -> str:
    order = r.versions.order
    places: dict[int, Node] = {}
    for x in inputs:
        key = storage(x)
        if key is None:
            continue
        users = [order[u] for u in members if x in _arguments(r, u)]
        since = min(users, default=order[root])
        writes = [w for w in r.versions.writes.get(key, ()) if since < w < order[root]]
        if any(r.versions.nodes[w] not in members for w in writes):
            return f"{x.name} is written in place before the end of the block"
        if writes and places.setdefault(key, x) is not x:
            return f"{x.name} and {places[key].name} share memory that the block writes in place"
    return ""


def _written_by(r: Reader, x: Node, members: frozenset[Node]) -> bool:
    key = storage(x)
    return key is not None and any(r.versions.nodes[w] in members for w in r.versions.writes.get(key, ()))


def _graph(r: Reader, root: Node, inputs: tuple[Node, ...], kept: _Block, dropout: Node | None) -> Graph:
    """The block as a graph: `inputs` in, the root out; `dropout` is marked in the metadata."""
    graph = Graph()
    copies = {x: graph.placeholder(x.name) for x in inputs}
    for n in r.versions.nodes[: r.versions.order[root] + 1]:
        if n in copies:
            continue
        if n in kept.done:
            copies[n] = copies[kept.done[n]]
        elif n in kept.members or operation(n) in CONTEXT:
            copies[n] = copy = graph.node_copy(n, copies.__getitem__)
            in_place = bool(written(n))
            copy.meta = {"dropout": in_place} if n is dropout else {}
    graph.output(copies[root])
    return graph


def _roles(block: Attention, programs: Programs) -> dict[Node, list[str]]:
    """What each input is called in the report: q, k, v, t0 …; one tensor may be several."""
    found: dict[Node, list[str]] = {}
    for p in block.products:
        for name, o in (("q", p.q), *(("k", k) for k in p.keys)):
            found.setdefault(o.node, []).append(name)
    for v in block.values:
        found.setdefault(v.node, []).append("v")
    for i, c in enumerate(programs.captures):
        if isinstance(c, Node):
            found.setdefault(c, []).append(f"t{i}")
    return found


# ------------------------------------------------------------------------------------------------------------- dropout


def _dropout(r: Reader, block: Attention, members: frozenset[Node]) -> tuple[tuple[Node, DropoutAxes] | None, str]:
    """The dropout of the block and how the axes of the operator's mask lie in it; or why there is none to be had."""
    random = [n for n in members if operation(n) in RANDOM and not _passes(r, n)]
    if not block.dropout_p:
        return None, f"{random[0].name} draws random numbers" if random else ""
    if len(random) != 1 or operation(random[0]) != "dropout":
        return None, "it draws random numbers besides those of its dropout"
    node = random[0]
    roles = block.roles
    groups = (roles.batch, roles.heads, roles.queries, (roles.keys,))
    known = frozenset(a for g in groups for a in g)
    found = [i for x, i in r._memo if x is node and frozenset().union(*(ix.axes(e) for e in i)) <= known]
    dims = [_unfolded(i) for i in found[0]] if len(set(found)) == 1 else []
    if not dims or any(d is None for d in dims):
        return None, "the axes of its dropout could not be told apart"
    names = [tuple(a.name for a in g) for g in groups]
    sizes = {a.name: int(ix.axis_size(a)) for a in known if ix.axis_size(a).is_Integer}
    layout = tuple(tuple(a.name for a in d) for d in dims if d is not None)
    return (node, DropoutAxes(block.dropout_p, tuple(names), layout, sizes)), ""


def _passes(r: Reader, n: Node) -> bool:
    """Whether a dropout does nothing."""
    args, kwargs = r.arguments(n)
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return "dropout" in operation(n) and (given.get("training", True) is False or given.get("p") == 0.0)


def _unfolded(i: Index) -> tuple[Any, ...] | None:
    """The axes that an index folds, outermost first."""
    axes = sorted(ix.axes(i), key=str)
    return next((p for p in permutations(axes) if ix.fold(p) == i), None) if len(axes) <= 4 else None
