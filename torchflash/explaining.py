"""`explain` and `rewrite`: what the backend does, without compiling.

`explain` runs Dynamo with a backend that rewrites a copy of each graph, reports, and executes the original. The report
is bound to what Dynamo caches, so that a graph that runs twice is compiled once and reported each time.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from torchflash.options import Options, parse
from torchflash.report import Report

log = logging.getLogger("torchflash")

# what is compiled here does not count towards the recompile limit of the model, where torch can tell the two apart
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters

_reports: ContextVar[list[Report] | None] = ContextVar("torchflash_reports", default=None)


def explain(
    model: Callable[..., Any], *, options: Mapping[str, Any] | None = None, dynamic: bool | None = None
) -> Callable[..., Report]:
    """`explain(model)(*args, **kwargs)` reports what backend="torchflash" does to a model called like this.

    The model runs once, unrewritten, in eager mode and under the caller's grad mode, since Dynamo has to get past graph
    breaks. Buffers and random states are put back, no gradient is touched, and what the model was compiled to before
    stays in use. `options` and `dynamic` are those of torch.compile. Graphs come in the order in which they ran.
    TypeError if `model` cannot be called.
    """
    ours, _ = parse(options=options)
    check_callable("explain", model)

    def run(*args: Any, **kwargs: Any) -> Report:
        return reports_of(model, _Recorder(ours), dynamic, lambda compiled: compiled(*args, **kwargs))

    return run


def check_callable(name: str, model: object) -> None:
    if not callable(model):
        raise TypeError(f"{name}() takes a module or a function; got {type(model).__name__} {model!r}")


def reports_of(
    model: Callable[..., Any], backend: Any, dynamic: bool | None, use: Callable[[Callable[..., Any]], object]
) -> Report:
    """What `backend`, whose graphs are `reporting`, reports while `use` calls the model compiled by it. The model and
    what Dynamo knows of it are as before afterwards."""
    apart: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
    compiled: Callable[..., Any] = torch.compile(_uncompiled(model), backend=backend, dynamic=dynamic, **apart)
    found: list[Report] = []
    token = _reports.set(found)
    try:
        with _restored(model), _shapes_not_learnt(), _compiled_every_time():
            use(compiled)
    finally:
        _reports.reset(token)
    if not found:
        log.warning(
            "torchflash: no graph of the model was compiled, so there is nothing to report. Where it should have one,"
            " Dynamo may have given it up, as it does at its recompile limit: torch._dynamo.reset() makes it try again"
        )
    total = Report()
    for number, report in enumerate(found):
        total += Report.of_graph(number, report.records, report.graph_breaks)
    return total


def graphs_so_far() -> int:
    return len(_reports.get() or ())


def rewrite(gm: torch.fx.GraphModule, options: Options | None = None) -> tuple[torch.fx.GraphModule, Report]:
    """A rewritten copy of an FX graph, and the report; parameters are shared, `gm` stays as it was.

    For other backends and for graphs by hand. Nodes must carry their (fake) tensors in meta["example_value"], as in the
    graphs that Dynamo gives to backends, or in meta["val"], as in those of torch.export; ValueError otherwise.
    Nested graph modules are rewritten too. SkippedError under `options.strict` if a softmax was left alone.
    """
    from torchflash.backend import check_strict, rewrite_and_report

    if not isinstance(gm, torch.fx.GraphModule):
        raise TypeError(f"rewrite() takes a torch.fx.GraphModule, got {type(gm).__name__}")
    for node in gm.graph.find_nodes(op="placeholder"):
        if not {"example_value", "val"} & node.meta.keys():
            raise ValueError(
                "rewrite() needs a graph whose nodes carry meta['example_value'] or meta['val'], as Dynamo and"
                f" torch.export make them; {node.name!r} has neither"
            )
    options = options or Options()
    rewritten = _copy(gm)
    report = rewrite_and_report(rewritten, options, graph=0)
    check_strict(report, options)
    return rewritten, report


@dataclass(frozen=True)
class _Recorder:
    """The backend of `explain`; equal ones share what Dynamo has cached."""

    options: Options
    __name__ = "torchflash_explain"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torchflash.backend import rewrite_and_report

        report = rewrite_and_report(_copy(gm), self.options, graph=graphs_so_far())

        return reporting(gm, report)


def reporting(gm: torch.fx.GraphModule, report: Report) -> Callable[..., Any]:
    """Runs the graph and adds its report to those of whoever collects them."""

    def forward(*args: Any) -> Any:
        collected = _reports.get()
        if collected is not None:
            collected.append(report)
        return gm.forward(*args)

    return forward


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy whose graph, and those of nested graph modules, may be changed; the rest is shared."""
    fresh = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph), type(gm).__name__)
    fresh.meta = dict(gm.meta)
    if hasattr(gm, "compile_subgraph_reason"):
        fresh.compile_subgraph_reason = gm.compile_subgraph_reason
    for name, child in gm.named_children():
        if isinstance(child, torch.fx.GraphModule):
            setattr(fresh, name, _copy(child))
    return fresh


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What the user wrote, under torch.compile(model), torch.compile(function) and model.compile()."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.nn.Module):
        return model._call_impl if model._compiled_call_impl is not None else model
    return torch._dynamo.eval_frame.innermost_fn(model)


@contextmanager
def _shapes_not_learnt() -> Iterator[None]:
    """Sizes are what they are here, and sizes seen here do not make dimensions of a later compile dynamic. Floats are
    constants: where a compile cannot keep one symbolic, such as a dropout's p, it starts over so as well."""
    from torch._dynamo import pgo

    learnt = pgo.get_code_state()
    saved = copy.deepcopy(learnt)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True):
        try:
            yield
        finally:
            learnt.clear()
            learnt.update(saved)


@contextmanager
def _compiled_every_time() -> Iterator[None]:
    """Another shape or another instance of a class compiles anew, however many there were before: beyond its limits
    Dynamo would run the model without asking the backend."""
    with torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
        yield


_NO_LIMIT = 1 << 30


@contextmanager
def _restored(model: Callable[..., Any]) -> Iterator[None]:
    """Puts back random states and, for a module, the buffers that were written."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    saved = [(buffer, buffer._version, buffer.clone()) for buffer in buffers if not buffer.is_inference()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, version, value in saved:
                    if buffer._version != version:
                        buffer.copy_(value)
