"""The Dynamo backend: options → rewrite → report → the inner compiler.

Found by torch.compile(model, backend="torchflash") through the entry point in setup.cfg; importing is not needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters, dynamo_timed
from torch._logging import trace_structured

from torchflash import kernels, passes  # noqa: F401  kernels registers the op
from torchflash.inductor import compile_by_inductor
from torchflash.options import Options, parse
from torchflash.report import Report, SkippedError, place
from torchflash.verification import Collector, Verification

# one logger for the package: TORCH_LOGS="torchflash" shows the reports, "+torchflash" the graphs as well
log = logging.getLogger("torchflash")


class Backend:
    """A callable `(gm, example_inputs, *, mode=None, options=None)` as torch.compile wants it.

    `report` is what happened to every graph compiled since the process started or torch._dynamo.reset() was called.
    Raises SkippedError under the option `torchflash.strict` if a softmax was left alone.
    """

    __name__ = "torchflash"

    def __init__(self) -> None:
        self.report = Report()
        self.verified = Collector()

    @property
    def verification(self) -> Verification:
        """What the option `torchflash.verify` has found so far: see `torchflash.verify`."""
        return self.verified.result(self.report)

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        ours, patches = parse(mode, options)
        report = rewrite_and_report(gm, ours, graph=self.report.graphs)
        check_strict(report, ours)
        if ours.verify:
            compiled = torch._dynamo.lookup_backend("eager")(gm, list(example_inputs))
        elif ours.inner == "inductor":
            compiled = compile_by_inductor(gm, example_inputs, ours, patches)
        else:
            compiled = torch._dynamo.lookup_backend(ours.inner)(gm, list(example_inputs))
        # Counted once the graph is compiled: torch starts over with another graph when a float cannot stay symbolic.
        self.report += report
        for key, count in report.counts().items():
            counters["torchflash"][key] += count
        return compiled

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        self.report = Report()
        self.verified = Collector()


def check_strict(report: Report, options: Options) -> None:
    """Raises SkippedError under `options.strict` if a softmax was left alone for another reason than those allowed; a
    call of scaled_dot_product_attention, which does not hold its scores in memory, may always be."""
    unwanted = [record for record in report.skipped if record.code not in ("sdpa", *options.allowed)]
    if options.strict and unwanted:
        raise SkippedError(report, unwanted)


def rewrite_and_report(gm: torch.fx.GraphModule, options: Options, graph: int) -> Report:
    """Rewrites the graph in place and gives its report; both also go to log, TORCH_TRACE and dump folder."""
    _show_graph(gm, "before", options, graph)
    with dynamo_timed("torchflash.rewrite_graph"):
        records = passes.rewrite_graph(gm, options)
    report = Report.of_graph(graph, records, _graph_breaks(gm))
    _show_graph(gm, "after", options, graph)
    log.info("graph %d\n%s", graph, report)
    _trace("torchflash_report", "json", report.to_json)
    if options.dump is not None:
        _dump(options.dump, f"graph_{graph}.report.txt", f"{report}\n")
        _dump(options.dump, f"graph_{graph}.report.json", report.to_json(indent=1) + "\n")
    return report


def _show_graph(gm: torch.fx.GraphModule, moment: str, options: Options, graph: int) -> None:
    def printed() -> str:
        return gm.print_readable(print_output=False)

    _trace(f"torchflash_{moment}", "string", printed)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("graph %d %s\n%s", graph, moment, printed())
    if options.dump is not None:
        _dump(options.dump, f"graph_{graph}.{moment}.py", printed())


def _trace(name: str, encoding: str, payload: Callable[[], str]) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def _dump(folder: str, name: str, text: str) -> None:
    path = Path(folder)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        path /= f"rank_{torch.distributed.get_rank()}"
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(text, encoding="utf-8")


def _graph_breaks(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ()
    at = reason.user_stack[-1] if reason.user_stack else None
    frame = f" ({place(at.filename, at.lineno)})" if at is not None else ""
    return (str(reason.reason).splitlines()[0] + frame,)


torchflash = Backend()
