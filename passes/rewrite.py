"""The pass: every attention block of a graph, and of the graph modules inside it, becomes one call of the operator.

Candidates are the contractions whose operand may hold probabilities. Each is proven or not; of those proven, the
blocks whose scores nothing else needs are rewritten. A block whose scores stay alive would create them anyway, so it
is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchflash import score
from torchflash.kernels import tuning as tunings
from torchflash.kernels import unfused
from torchflash.options import Options
from torchflash.passes import index as ix
from torchflash.passes.attention import CASTS, MAX_FACTORS, Attention, Given, addends, factors, prove
from torchflash.passes.composites import name_dtypes, open_composites
from torchflash.passes.contraction import CONTRACTIONS
from torchflash.passes.gradients import enabled_at_start
from torchflash.passes.graph import operation, tensor, value
from torchflash.passes.keep import keep
from torchflash.passes.leaves import REDUCTIONS
from torchflash.passes.lookups import SPLITS
from torchflash.passes.paged import paged
from torchflash.passes.products import open_products
from torchflash.passes.program import Programs, programs
from torchflash.passes.reader import HANDLERS, Reader, batched
from torchflash.passes.replace import Emitted, choose_layout, replace
from torchflash.passes.sdpa import begins_autocast, close_calls, open_calls
from torchflash.passes.softmax import Failure
from torchflash.passes.views import VIEWS
from torchflash.passes.writes import written
from torchflash.report import SKIP_CODES, Rewritten, Skipped, bytes_of_scores, dims, locate

log = logging.getLogger(__name__)

ANCHORS = frozenset(("softmax", "_safe_softmax", "log_softmax"))
EXPONENTIALS = frozenset(("exp", "exp2"))


@dataclass
class _Candidate:
    """The blocks that `root` is the sum of, with their programs, and what is added to them. `copied`: the same with
    keys and values copied out of what they are looked up in, where that is not done."""

    root: Node
    parts: tuple[tuple[Attention, Programs], ...]
    given: tuple[Given, ...]
    chain: frozenset[Node]
    copied: _Candidate | None = None


def rewrite_graph(gm: GraphModule, options: Options | None = None) -> list[Rewritten | Skipped]:
    """Rewrites `gm` in place, nested graph modules included. Returns a record for each block rewritten and each
    softmax left alone, in the order of the graph. Never raises for a graph it does not understand: that is a Skipped
    with code `internal`."""
    options = options or Options()
    records: list[Rewritten | Skipped] = []
    modules = [module for module in gm.modules() if isinstance(module, GraphModule)]
    begins = any(map(begins_autocast, modules))
    for module in modules:
        gradients, autocast = enabled_at_start(module, gm), begins or torch._C._is_any_autocast_enabled()
        records += _rewrite_one(module, options, gradients, autocast, unsure=begins and module is not gm)
    return records


def _rewrite_one(
    gm: GraphModule, options: Options, gradients: bool, autocast: bool, unsure: bool
) -> list[Rewritten | Skipped]:
    """`gradients`, `autocast`: whether these may be enabled in `gm`."""
    open_composites(gm)
    name_dtypes(gm)
    opened, left = open_calls(gm, options.sdpa, unsure)
    opened += open_products(gm)
    order = {n.name: i for i, n in enumerate(gm.graph.nodes)}
    records: list[Rewritten | Skipped] = [_skip(n, Failure("sdpa", why)) for n, why in left.items()]
    closed: set[str] = set()
    try:
        found = _rewrite_opened(gm, options, gradients, autocast)
    finally:
        closed = close_calls(gm, opened)
    for record in found:
        if isinstance(record, Skipped) and record.node in closed:
            reason = f"{record.code}: {record.reason}" if record.reason else record.code
            record = replace_fields(record, code="sdpa", reason=reason, advice=SKIP_CODES["sdpa"])
        records.append(record)
    return sorted(records, key=lambda record: order.get(record.node, 0))


def _rewrite_opened(
    gm: GraphModule, options: Options, gradients: bool, autocast: bool
) -> list[Rewritten | Skipped]:
    names = {operation(n) for n in gm.graph.nodes}
    if not CONTRACTIONS & names or not (ANCHORS & names or any(map(_is_exponential, gm.graph.nodes))):
        return [
            _skip(n, Failure("no_values"))
            for n in gm.graph.nodes
            if operation(n) in ANCHORS
        ]
    try:
        reader = Reader(gm.graph, gradients)
        probabilities = _probabilities(reader, gm)
        candidates, failures = _candidates(reader, gm, probabilities)
        return _apply(reader, gm, candidates, failures, options, autocast)
    except Exception as e:
        log.exception("torchflash: internal error, graph left alone")
        failure = Failure("internal", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
        return [_skip(n, failure) for n in gm.graph.nodes if operation(n) in ANCHORS]


def _is_exponential(node: Node) -> bool:
    """exp(x), or a number to the power of what is made from a contraction: not the frequencies of rotations."""
    if operation(node) != "pow" or isinstance(node.args[0] if node.args else node, Node):
        return operation(node) in EXPONENTIALS
    stack, seen = list(node.all_input_nodes), set[Node]()
    while stack:
        x = stack.pop()
        if operation(x) in CONTRACTIONS:
            return True
        if x not in seen and operation(x) in HANDLERS:
            seen.add(x)
            stack += x.all_input_nodes
    return False


def _probabilities(r: Reader, gm: GraphModule) -> frozenset[Node]:
    """Nodes that may hold probabilities: what follows a softmax or an exponential by operations the reader knows."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        name = operation(node)
        if name in ANCHORS or _is_exponential(node):
            found.add(node)
        elif (name in HANDLERS or name in SPLITS) and name not in CONTRACTIONS:
            args, kwargs = r.arguments(node)
            if any(isinstance(a, Node) and a in found for a in torch.utils._pytree.tree_leaves((args, kwargs))):
                found.add(node)
    return frozenset(found)


def _candidates(
    r: Reader, gm: GraphModule, probabilities: frozenset[Node]
) -> tuple[list[_Candidate], dict[Node, Failure]]:
    candidates: list[_Candidate] = []
    failures: dict[Node, Failure] = {}  # softmax -> why
    proven: set[Node] = set()
    for root in gm.graph.nodes:
        inner = _second_contractions(r, root, probabilities, proven)
        if not inner:
            continue
        try:
            found = _candidate(r, root, probabilities)
        except ix.NotInteger as e:
            found = Failure("layout", f"the score language has no words for the size {e}", root)
        except Exception as e:
            log.exception("torchflash: internal error at %s, left alone", root.name)
            found = Failure("internal", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", root)
        if isinstance(found, _Candidate):
            # a block with a sink, or of pieces, is in the place of those that it is made from
            parts = proven & {*inner}
            if any(u is not root and u not in found.chain for n in parts for u in n.users):
                continue
            candidates = [c for c in candidates if c.root not in parts] + [found]
            proven.add(root)
        elif found is not None:
            for anchor in _anchors_before(r, root, probabilities):
                failures.setdefault(anchor, found)
    return candidates, failures


def _candidate(r: Reader, root: Node, probabilities: frozenset[Node]) -> _Candidate | Failure | None:
    if batched(root) or root in r.transformed:
        return Failure("transform", "inside a function transform of torch.func", root)
    proven = prove(r, root, probabilities)
    if not isinstance(proven, tuple):
        return proven
    blocks, given = proven
    parts: list[tuple[Attention, Programs]] = []
    for block in blocks:
        found = programs(r, block)
        if isinstance(found, Failure):
            return found
        if (failure := _written_since(r, block, found)) is not None:
            return failure
        parts.append((block, found))
    for g in given:
        if any(r.versions.written_between(node, since, r.versions.order[root]) for node, since in _reads(r, g)):
            return Failure("mutation", f"what {g.softmax.name} is multiplied by is written before the end", g.softmax)
    candidate = _Candidate(root, tuple(parts), given, frozenset().union(*(_chain(r, b) for b in blocks)))
    for node in written(root):
        if node not in candidate.chain:
            return Failure("mutation", f"the result is written to {node.name}, which is there before", root)
    return candidate if len(parts) + len(given) > 1 else _in_place(r, candidate) or candidate


def _in_place(r: Reader, c: _Candidate) -> _Candidate | None:
    """A block on keys and values where they are looked up, if nothing but the block needs what is looked up."""
    ((block, _),) = c.parts
    moved = paged(r, block)
    if moved is None or moved.rows is None or isinstance(found := programs(r, moved), Failure):
        return None
    candidate = _Candidate(c.root, ((moved, found),), (), c.chain, copied=c)
    needed = _alive(r, [candidate]).intersection(moved.rows.lookups)
    return None if needed or _written_since(r, moved, found) else candidate


def _second_contractions(
    r: Reader, node: Node, probabilities: frozenset[Node], proven: set[Node], depth: int = MAX_FACTORS
) -> tuple[Node, ...]:
    """The contractions of probabilities with values that a block ending in `node` would have: itself, what it divides,
    what it multiplies with a function of the weights, what it adds. `proven`: those that are blocks without."""
    t = tensor(node)
    if t is None or not t.dtype.is_floating_point:
        return ()
    name = operation(node)
    args, kwargs = r.arguments(node)
    if name in CONTRACTIONS:
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        return (node,) if any(isinstance(a, Node) and a in probabilities for a in inputs) else ()
    if name in ("add", "sub"):
        pieces = addends(r, node)
        found = [_inside(r, x, probabilities, proven, 0) for x in pieces] if len(pieces) > 1 else []
        return tuple(x for f in found for x in f) if all(found) else ()
    for inner, other in factors(r, node) if depth else ():
        # (exp(x) @ v) / Σ exp(x), (softmax(x) @ v) * sigmoid(logsumexp(x) - sink)
        x = _inside(r, inner, probabilities, proven, depth - 1)
        sure = depth < MAX_FACTORS or (name == "div" and x and x[0] not in proven)
        if x and (sure or _of_weights(r, other, probabilities)):
            return x
    return ()


def _inside(
    r: Reader, x: Any, probabilities: frozenset[Node], proven: set[Node], depth: int
) -> tuple[Node, ...]:
    """The contraction that `x` is but for casts, views and factors."""
    while isinstance(x, Node) and operation(x) in (CASTS | VIEWS.keys()) - CONTRACTIONS:
        x = r.arguments(x)[0][0]
    if not isinstance(x, Node) or operation(x) not in CONTRACTIONS | {"mul", "div"}:
        return ()
    return _second_contractions(r, x, probabilities, proven, depth)


def _of_weights(r: Reader, x: Any, probabilities: frozenset[Node]) -> bool:
    """Whether `x` is made from a sum of exponentials."""
    stack, seen = [x], set[Node]()
    while stack:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen or operation(node) not in HANDLERS.keys() - CONTRACTIONS:
            continue
        if operation(node) == "logsumexp" or (operation(node) == "sum" and node in probabilities):
            return True
        seen.add(node)
        stack += torch.utils._pytree.tree_leaves(r.arguments(node))
    return False


def _anchors_before(r: Reader, root: Node, probabilities: frozenset[Node]) -> list[Node]:
    """The softmaxes that `root` contracts with something; where there is none in one call, the exponential of the one
    by hand."""
    seen: set[Node] = set()
    queue = list(root.all_input_nodes)
    calls, exponentials = [], []
    while queue:
        node = queue.pop(0)
        if node in seen or node not in probabilities:
            continue
        seen.add(node)
        if operation(node) in ANCHORS:
            calls.append(node)
        elif _is_exponential(node):
            exponentials.append(node)
        args, kwargs = r.arguments(node)
        queue += [a for a in (*args, *kwargs.values()) if isinstance(a, Node)]
    return calls or exponentials[:1]


def _chain(r: Reader, block: Attention) -> frozenset[Node]:
    """What lies between the contractions, the first ones included: the nodes that hold scores or weights."""
    after: set[Node] = {n for p in block.products for n in p.nodes}
    order = r.versions.order
    for node in r.versions.nodes[min(map(order.__getitem__, after)) + 1 : order[block.root]]:
        args, kwargs = r.arguments(node)
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(a, Node) and a in after for a in flat):
            after.add(node)
    before: set[Node] = set()
    stack = [block.root]
    while stack:
        args, kwargs = r.arguments(stack.pop())
        for a in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(a, Node) and a in after and a not in before:
                before.add(a)
                stack.append(a)
    return frozenset(before)


def _written_since(r: Reader, block: Attention, found: Programs) -> Failure | None:
    """The operator runs where the block ended: what it reads must still hold what the block read."""
    order = r.versions.order
    for node, since in (*_operands(r, block), *found.reads):
        if r.versions.written_between(node, since, order[block.root]):
            return Failure(
                "mutation", f"{node.name} is written in place between its use and the end of the block", node
            )
    return None


def _apply(
    r: Reader,
    gm: GraphModule,
    candidates: list[_Candidate],
    failures: dict[Node, Failure],
    options: Options,
    autocast: bool,
) -> list[Rewritten | Skipped]:
    while True:
        alive = _alive(r, candidates)
        needed = [(c, users) for c in candidates if (users := _outside_users(r, c, alive))]
        if not needed:
            break
        for c, users in needed:
            candidates.remove(c)
            user = users[0]
            what = "returned" if user.op == "output" else f"used by {user.name}"
            if where := locate(user)["source"]:
                what += f" in {where}"
            elif _innermost(user) is torch.nn.MultiheadAttention:
                what += ", unless it is called with need_weights=False"
            for block, _ in c.parts:
                failures[block.softmax] = Failure("weights_used", f"the scores or weights are {what}", user)
    order = r.versions.order
    records: list[tuple[int, Rewritten | Skipped]] = []
    emitted, tuning = Emitted(autocast), options.tuning().write()
    rewritten: list[_Candidate] = []
    for c in candidates:
        if options.verify:
            emitted.tables, emitted.maps = {}, {}  # each block has its own, so that gradients can be told apart
        if options.verify and len(c.parts) + len(c.given) > 1:
            calls: list[Node] | Failure = Failure("several_softmaxes", "torchflash.verify compares them one at a time")
        else:
            calls = replace(r, gm.graph, c.parts, c.given, choose_layout(c.parts[0][0]), tuning, emitted)
            if isinstance(calls, Failure) and c.copied is not None:
                c = c.copied
                calls = replace(r, gm.graph, c.parts, c.given, choose_layout(c.parts[0][0]), tuning, emitted)
        if isinstance(calls, Failure):
            failures.update((block.softmax, calls) for block, _ in c.parts)
            continue
        rewritten.append(c)
        kept = Failure("no_scores")
        failures.update((g.softmax, kept) for g in c.given)
        for (block, programs_), call in zip(c.parts, calls, strict=True):
            record = _rewritten(block, programs_, call)
            records.append((order[c.root], record))
            if options.verify:
                keep(r, gm, block, programs_, call, emitted, alive, record)
    alive = _alive(r, rewritten)
    dead = _dead(r, {c.root for c in rewritten}, alive)
    for c in rewritten:
        c.root.replace_all_uses_with(emitted.results[c.root])
    for n in reversed(r.versions.nodes):
        if n in dead and not n.users:
            gm.graph.erase_node(n)
    done = {n for c in rewritten for n in (*c.chain, *(b.softmax for b, _ in c.parts))}
    unknown = Failure("no_values")
    for node in order:
        if node in alive and node not in done and (node in failures or operation(node) in ANCHORS):
            records.append((order[node], _skip(node, failures.get(node, unknown))))
    if candidates:
        gm.graph.lint()
        gm.recompile()
    return [x for _, x in sorted(records, key=lambda x: x[0])]


def _alive(r: Reader, candidates: list[_Candidate]) -> set[Node]:
    """The nodes that are still needed once every candidate is rewritten."""
    inputs = {c.root: _inputs(r, c) for c in candidates}
    stack = [n for n in r.versions.nodes if n.op in ("placeholder", "output") or _effects(r, n)]
    alive: set[Node] = set()
    while stack:
        n = stack.pop()
        if n in alive:
            continue
        alive.add(n)
        if n in inputs:
            stack += inputs[n]
        else:
            args, kwargs = r.arguments(n)
            stack += [
                a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Node)
            ] + n.all_input_nodes
    return alive


def _inputs(r: Reader, c: _Candidate) -> list[Node]:
    """What the operator reads, and the writes that make it what was read."""
    held = [x for block, found in c.parts for x in (*_operands(r, block), *found.reads)]
    held += [x for g in c.given for x in _reads(r, g)]
    return [n for node, since in held for n in (node, *r.versions.writers(node, since))]


def _reads(r: Reader, g: Given) -> list[tuple[Node, int]]:
    return [(g.softmax, r.versions.order[g.softmax]), *(r.held[x.value[1:]] for x in score.loads(g.factor))]


def _operands(r: Reader, block: Attention) -> list[tuple[Node, int]]:
    operands = (*(o for p in block.products for o in (p.q, *p.keys)), *block.values)
    return [(o.node, r.versions.order[o.user]) for o in operands]


def _effects(r: Reader, n: Node) -> bool:
    if n in r.versions.harmless:
        return False
    # drawing random numbers is none, or no dropout of aten could go
    return bool(written(n)) or (operation(n) != "dropout" and n.is_impure())


def _outside_users(r: Reader, c: _Candidate, alive: set[Node]) -> list[Node]:
    """Who keeps a node of the chain alive."""
    kept = c.chain & alive
    if not kept:
        return []
    users = [u for n in kept for u in n.users if u in alive and u not in c.chain and u is not c.root]
    users = users or [u for u in alive if any(a in kept for a in u.all_input_nodes) and u not in c.chain] or list(kept)
    return sorted(users, key=r.versions.order.__getitem__)


def _dead(r: Reader, roots: set[Node], alive: set[Node]) -> set[Node]:
    """The rewritten blocks and what only they needed, in-place writes to their own tensors too."""
    dead: set[Node] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in dead and (n in roots or n not in alive) and n.op not in ("placeholder", "output"):
            dead.add(n)
            args, kwargs = r.arguments(n)
            stack += [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Node)]
            stack += n.all_input_nodes + [u for u in n.users if u in r.versions.harmless]
    return dead


def _rewritten(block: Attention, p: Programs, operator_: Node) -> Rewritten:
    q, k, v = (dims(tensor(a)) for a in operator_.args[:3])  # type: ignore[arg-type]
    itemsize = block.qk_dtype.itemsize
    device = tensor(block.root).device  # type: ignore[union-attr]
    if block.rows is not None:
        keys = value(operator_.args[13])
        k, v = ((*x[:2], keys if isinstance(keys, int) else str(keys), x[-1]) for x in (k, v))
    runs = unfused.describe((*q[:3], k[2]), device, itemsize, tunings.read(str(operator_.args[14])))
    return Rewritten(
        **locate(block.softmax),
        score=str(p.score),
        keep="" if p.keep is None else str(p.keep),
        post=str(p.post),
        dropout_p=block.dropout_p,
        q=q,
        k=k,
        v=v,
        dtype=str(block.qk_dtype).removeprefix("torch."),
        bytes_saved=None if runs.startswith("unfused,") else bytes_of_scores(q, k, itemsize),
        runs=runs,
        rows="" if p.rows is None else str(p.rows),
    )


def _skip(node: Node, failure: Failure) -> Skipped:
    at = failure.node.name if failure.node is not None and failure.node is not node else ""
    return Skipped(**locate(node), code=failure.code, reason=failure.reason or _cut_off(node, failure.code), at=at)


def _innermost(node: Node) -> Any:
    """The class of the module that a node belongs to."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][1] if stack else None


def _cut_off(node: Node, code: str) -> str:
    """What of the attention of a softmax a graph break has left to another graph; "" where that is not to be seen."""
    if code == "no_scores":
        ends = _ends(node, lambda n: n.all_input_nodes)
        if any(n.op == "placeholder" and not isinstance(value(n), torch.nn.Parameter) for n in ends):
            return "it is an input of this graph; mend the graph break before it, if there is one"
    ending = getattr(node.graph.owning_module, "compile_subgraph_reason", None)
    if code == "no_values" and ending is not None and ending.graph_break:
        if any(n.op == "output" for n in _ends(node, lambda n: n.users)):
            return "this graph ends at a graph break before they are; mend that"
    return ""


def _ends(node: Node, following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Where one comes to from `node` by operations that the reader knows and that sum nothing."""
    stack, seen = [node], {node}
    while stack:
        for n in following(stack.pop()):
            if n not in seen:
                seen.add(n)
                if operation(n) in HANDLERS and operation(n) not in (*CONTRACTIONS, *REDUCTIONS):
                    stack.append(n)
    return seen
