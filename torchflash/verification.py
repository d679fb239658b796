"""What `verify` found: each tensor of each rewritten block against eager's and float64's, as records and as text.

`compare` makes one `Comparison`, a `Collector` gathers them while a model runs, `Verification` is what the user gets.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchflash.report import Record, Report

if TYPE_CHECKING:
    from torchflash.verifying import Block

log = logging.getLogger("torchflash")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor of a block, the output or a gradient, against float64.

    name: "out", "dq", "dk", "dv", "dt0" … for tensors of the score, "d(name)" for others that it is computed from;
    joined by "+" where one tensor has several roles. tensor: its name in the graph. error: max |torchflash - float64|.
    relative: that divided by max |float64|. eager_error, eager_relative: the same of eager in its dtype. budget: the
    error up to which `ok`. nonfinite, eager_nonfinite: how many elements are NaN or infinite; worse: how many are so
    only in torchflash. elements: how many there are.
    """

    name: str
    tensor: str
    error: float
    relative: float
    eager_error: float
    eager_relative: float
    budget: float
    nonfinite: int
    eager_nonfinite: int
    worse: int
    elements: int

    @property
    def ok(self) -> bool:
        """Finite wherever eager is, and within the budget."""
        return not self.worse and self.error <= self.budget

    def __str__(self) -> str:
        text = f"{self.name:<8} {self.error:8.1e} {self.relative:8.1e}  eager {self.eager_error:8.1e}"
        text += f" {self.eager_relative:8.1e}"
        if self.worse:
            text += f"  NON-FINITE in {self.worse} of {self.elements} where eager is finite"
        if self.error > self.budget:
            text += f"  WORSE than eager: at most {self.budget:.1e} expected"
        if self.nonfinite > self.worse or self.eager_nonfinite:
            text += f"  (non-finite: {self.nonfinite}, in eager {self.eager_nonfinite}, of {self.elements})"
        return text


@dataclass(frozen=True, kw_only=True)
class Verified(Record):
    """What was found for one rewritten block; the worst of all `calls`. score: its program. problems: why something
    could not be compared."""

    score: str
    calls: int = 0
    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """All of it could be compared and is as accurate as eager."""
        return bool(self.comparisons) and not self.problems and all(c.ok for c in self.comparisons)

    def __str__(self) -> str:
        word = "ok" if self.ok else "BAD" if any(not c.ok for c in self.comparisons) else "unknown"
        calls = f", {self.calls} calls" if self.calls != 1 else ""
        rows = [f"{word:<10} {self.where}{calls}", *map(str, self.comparisons)]
        rows += [f"not compared: {problem}" for problem in self.problems]
        return "\n           ".join(rows)


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first block with NaN or infinite elements in `passing` ("forward" or "backward"): its place, the tensor and
    how many of its elements; `eager`: how many eager's own has."""

    passing: str
    where: str
    name: str
    count: int
    eager: int

    def __str__(self) -> str:
        also = f"eager's own has {self.eager}" if self.eager else "eager's own is finite"
        return f"first non-finite {self.passing}: {self.where}, {self.count} elements of {self.name}; {also}"


@dataclass(frozen=True)
class Verification(Sequence[Verified]):
    """What `verify` found: a sequence of `Verified`, one for each block in the order in which they first ran.

    nonfinite: the first blocks that are non-finite where eager is not, and the first that are so in eager as well, for
    forward and backward. report: what was rewritten and what was not. `str()` to read, `to_json()` to keep.
    """

    blocks: tuple[Verified, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    report: Report = field(default_factory=Report)

    @property
    def ok(self) -> bool:
        """At least one block ran, and every one was compared and is as accurate as eager."""
        return bool(self.blocks) and all(block.ok for block in self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Verified]:
        return iter(self.blocks)

    def __getitem__(self, index: Any) -> Any:
        return self.blocks[index]

    def __str__(self) -> str:
        good = sum(block.ok for block in self.blocks)
        alone = len(self.report.skipped)
        skipped = f", {alone} softmax{'' if alone == 1 else 'es'} left alone" if alone else ""
        found = f"{good} of {len(self.blocks)} blocks as accurate as eager"
        if not self.blocks:
            found = "nothing was rewritten, so there is nothing to compare"
        head = f"torchflash.verify: {found}{skipped}"
        columns = ["           tensor      error relative        error relative  (against float64)"]
        return "\n".join([head, *(columns if self.blocks else []), *map(str, self.nonfinite), *map(str, self.blocks)])

    def to_json(self, **kwargs: Any) -> str:
        """JSON text; `kwargs` are those of json.dumps. NaN and infinity are written as strings."""
        blocks = [
            {**asdict(b), "ok": b.ok, "comparisons": [{**asdict(c), "ok": c.ok} for c in b.comparisons]}
            for b in self.blocks
        ]
        content = {
            "ok": self.ok,
            "nonfinite": [asdict(n) for n in self.nonfinite],
            "blocks": blocks,
            "report": json.loads(self.report.to_json()),
        }
        finite = pytree.tree_map_only(float, lambda x: x if math.isfinite(x) else str(x), content)
        return json.dumps(finite, **kwargs)


class Collector:
    """Gathers the comparisons of one `verify`, or of everything compiled with the option `torchflash.verify`."""

    def __init__(self) -> None:
        self._blocks: dict[int, Verified] = {}
        self._nonfinite: dict[tuple[str, bool], NonFinite] = {}
        self._told: set[tuple[int, str]] = set()

    def add(self, block: Block, passing: str, comparisons: Sequence[Comparison] = (), problem: str = "") -> None:
        """Notes what came out of one pass ("forward" or "backward") through `block`; warns of what is new and bad."""
        r = block.record
        seen = self._blocks.get(block.key) or Verified(
            module=r.module, source=r.source, node=r.node, graph=r.graph, index=r.index, score=r.score
        )
        worst = {c.name: c for c in seen.comparisons}
        for c in comparisons:
            worst[c.name] = max(worst.get(c.name, c), c, key=_badness)
            if c.nonfinite:
                here = NonFinite(
                    passing=passing, where=seen.where, name=c.name, count=c.nonfinite, eager=c.eager_nonfinite
                )
                self._nonfinite.setdefault((passing, bool(c.worse)), here)
            if not c.ok:
                self._warn(block, c.name, f"{seen.where}: {c}")
        problems = seen.problems
        if problem and problem not in problems:
            problems += (problem,)
            self._warn(block, problem, f"{seen.where}: not compared: {problem}")
        self._blocks[block.key] = dataclasses.replace(
            seen, calls=seen.calls + (passing == "forward"), comparisons=tuple(worst.values()), problems=problems
        )

    def _warn(self, block: Block, what: str, text: str) -> None:
        if (block.key, what) not in self._told:
            self._told.add((block.key, what))
            log.warning("torchflash.verify: %s", text)

    def result(self, report: Report) -> Verification:
        return Verification(tuple(self._blocks.values()), tuple(self._nonfinite.values()), report)


def _badness(c: Comparison) -> tuple[bool, float]:
    return c.worse > 0, c.error / c.budget if c.budget else c.error


def compare(
    name: str,
    tensor: str,
    ours: Tensor,
    eager: Tensor,
    exact: Tensor,
    scale: float,
    ulps: tuple[int, int],
    dtype: torch.dtype,
) -> Comparison:
    """`ours` and `eager`, of the model's dtype, against `exact`, of float64.

    The budget is twice eager's own error, and at least `ulps` units in the last place (of float32, of a half type) of
    the largest element or of `scale`, the incoming gradient's largest: sums in another order differ by that. The unit
    is that of `dtype`, which the products are computed in, or of the tensor's own where that is coarser.
    """
    a, b, c = (x.detach().to(torch.float64) for x in (ours, eager, exact))
    finite_a, finite_b, finite_c = (x.isfinite() for x in (a, b, c))
    largest = maximum(c.abs(), finite_c)
    error, own = maximum((a - c).abs(), finite_a & finite_c), maximum((b - c).abs(), finite_b & finite_c)
    coarser = max((ours.dtype, dtype), key=lambda d: torch.finfo(d).eps)
    floor = ulps[coarser != torch.float32] * torch.finfo(coarser).eps * max(largest, scale)
    return Comparison(
        name=name, tensor=tensor, error=error, relative=_ratio(error, largest), eager_error=own,
        eager_relative=_ratio(own, largest), budget=max(2 * own, floor), nonfinite=int((~finite_a).sum()),
        eager_nonfinite=int((~finite_b).sum()), worse=int((~finite_a & finite_b).sum()), elements=a.numel(),
    )  # fmt: skip


def maximum(x: Tensor, where: Tensor) -> float:
    return float(torch.where(where, x, 0.0).max()) if x.numel() else 0.0


def _ratio(a: float, b: float) -> float:
    return a / b if b else (0.0 if not a else math.inf)
