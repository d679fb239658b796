"""What was done to each softmax of a model, as values: `Rewritten` or `Skipped`, collected in a `Report`.

The passes make the records, the backend numbers them, and everything a person or a tool reads (text, JSON, the log,
TORCH_TRACE, counters) is printed from them here. Skip codes are stable: scripts may rely on them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, overload

import torch

from torchflash.score import ScoreError
from torchflash.words import in_words

# code -> what it means and what the user can do about it
SKIP_CODES: dict[str, str] = {
    "sdpa": "torch's own kernels run this call of scaled_dot_product_attention; 'torchflash.sdpa' says which are ours",
    "no_scores": "what is normalised is not a contraction of queries with keys; nothing to do if it is not attention",
    "no_values": "the probabilities are not contracted with values; nothing to do if it is not attention",
    "weights_used": "the scores or probabilities are used elsewhere, so they must exist; do not return or log them",
    "softmax_axis": "the softmax runs over another axis than the one contracted with the values; check `dim`",
    "several_contractions": "the scores add two contractions of queries with keys; concatenate them along the depth",
    "several_softmaxes": "the values are weighted by a mixture of softmaxes; contract each with the values, then mix",
    "denominator": "the weights are not divided by exactly their sum over the keys; not supported yet",
    "nonlinear_weights": "what follows the softmax is not linear in the probabilities; apply it to the output instead",
    "layout": "the axes cannot be arranged as batch, heads, queries, keys; keep one axis for each",
    "transform": "runs inside torch.func.vmap, grad or jvp; write the extra axis out, or differentiate outside",
    "dtype": "only float16, bfloat16 and float32 are supported; cast q, k and v",
    "device": "only cpu and cuda tensors are supported; move q, k and v",
    "mutation": "a tensor on the way is written in place in a way that cannot be resolved; write out of place",
    "unknown_op": "an operation on the scores is not known; please report it if it is elementwise",
    "too_complex": "the formula of the scores exceeds the limits; precompute the mask or bias as a tensor",
    "mismatch": "the replacement did not reproduce the block's shape, dtype or strides; please report it",
    "internal": "an error inside torchflash, the block was left as it was; please report it",
}

Dim = int | str  # a symbolic size is the text of its expression


@dataclass(frozen=True, kw_only=True)
class Record:
    """Where a softmax is. `Rewritten` and `Skipped` say what became of it.

    module: path of the innermost module, as in `named_modules()`; its class for the root or where there is no path.
    source: "file:line" of the user's code, the file relative to its entry of sys.path; "In[3]:line" in a notebook.
    node: name of the softmax's node in the FX graph. graph, index: which graph of the report, which softmax of it.
    """

    module: str = ""
    source: str = ""
    node: str = ""
    graph: int = 0
    index: int = 0

    @property
    def where(self) -> str:
        """The location as it is printed: "layers.0.attn (model.py:12)"."""
        name = self.module or self.node or "?"
        return f"{name} ({self.source})" if self.source else name


@dataclass(frozen=True, kw_only=True)
class Rewritten(Record):
    """An attention block that became one `torchflash::attention`.

    score, keep, post: the score programs. q, k, v: shapes [B, H, M, D], [B, Hk, N, D], [B, Hv, N, Dv] of the op.
    dtype: of q and k, such as "float32". bytes_saved: of the scores and probabilities that no longer exist, forward;
    None if a size is symbolic or they exist after all. runs: "fused", or when unfused, as short sequences do where that
    is faster. note: anything else worth reading. rows: where keys and values are read, if not in their order.
    """

    score: str
    keep: str = ""
    post: str = "p"
    dropout_p: float = 0.0
    q: tuple[Dim, ...] = ()
    k: tuple[Dim, ...] = ()
    v: tuple[Dim, ...] = ()
    dtype: str = ""
    bytes_saved: int | None = None
    runs: str = "fused"
    note: str = ""
    rows: str = ""

    @property
    def heads(self) -> str:
        """ "8", or with fewer key or value heads "8 over 2" or "8 over 2/1"."""
        if not (len(self.q) == len(self.k) == len(self.v) == 4):
            return ""
        h, hk, hv = (str(shape[1]) for shape in (self.q, self.k, self.v))
        if h == hk == hv:
            return h
        return f"{h} over {hk}" if hk == hv else f"{h} over {hk}/{hv}"

    @property
    def what(self) -> str:
        """The programs in words: "causal + key padding, softcap 50, GQA 4:1"; "" where they are no programs."""
        try:
            words = [in_words(self.score, self.keep, self.post)]
        except ScoreError:
            return ""
        heads = [shape[1] for shape in (self.q, self.k) if len(shape) == 4]
        if len(heads) == 2 and heads[0] != heads[1]:
            whole = all(isinstance(h, int) for h in heads)
            ratio = f" {heads[0] // heads[1]}:1" if whole else ""  # type: ignore[operator]
            words.append("MQA" if heads[1] == 1 else f"GQA{ratio}")
        words += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        words += ["paged keys"] if self.rows else []
        return ", ".join(words)

    def __str__(self) -> str:
        shapes = {"q": self.q, "k": self.k, "v": self.v}
        facts = [f"{name} {_shape(shape)}" for name, shape in shapes.items() if shape]
        facts += [self.dtype] if self.dtype else []
        facts += [f"heads {self.heads}"] if " over " in self.heads else []
        facts += [f"saves {_bytes(self.bytes_saved)}"] if self.bytes_saved is not None else []
        rows = [f"rewritten  {self.where}"]
        rows += [", ".join(facts)] if facts else []
        rows[1:1] = [self.what] if self.what else []
        rows += [f"score  {self.score}"]
        rows += [f"keep   {self.keep}"] if self.keep else []
        rows += [f"post   {self.post}"] if self.post != "p" else []
        rows += [f"rows   {self.rows}"] if self.rows else []
        rows += [f"runs   {self.runs}"] if self.runs != "fused" else []
        rows += [f"note   {self.note}"] if self.note else []
        return "\n           ".join(rows)


@dataclass(frozen=True, kw_only=True)
class Skipped(Record):
    """A softmax that was left as it is.

    code: one of SKIP_CODES. reason: what was found here. at: the node where recognition stopped. advice: what the user
    can do; by default the code's line in SKIP_CODES.
    """

    code: str
    reason: str = ""
    at: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        if self.code not in SKIP_CODES:
            raise ValueError(f"unknown skip code {self.code!r}; known: {', '.join(sorted(SKIP_CODES))}")
        if not self.advice:
            object.__setattr__(self, "advice", SKIP_CODES[self.code])

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        at = f" [at {self.at}]" if self.at else ""
        return f"skipped    {self.where} {self.code}{reason}{at}\n           {self.advice}"


@dataclass(frozen=True)
class Report(Sequence[Rewritten | Skipped]):
    """The records of one or more graphs, in order: a sequence; `str()` to read, `to_json()` to keep.

    graphs: how many graphs were looked at. graph_breaks: why Dynamo split the model, one line each.
    """

    records: tuple[Rewritten | Skipped, ...] = ()
    graphs: int = 0
    graph_breaks: tuple[str, ...] = ()

    @property
    def rewritten(self) -> tuple[Rewritten, ...]:
        return tuple(r for r in self.records if isinstance(r, Rewritten))

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(r for r in self.records if isinstance(r, Skipped))

    def counts(self) -> dict[str, int]:
        """As in `torch._dynamo.utils.counters["torchflash"]`: "rewritten" and "skipped.<code>"."""
        counts: dict[str, int] = {}
        for record in self.records:
            key = "rewritten" if isinstance(record, Rewritten) else f"skipped.{record.code}"
            counts[key] = counts.get(key, 0) + 1
        return counts

    @overload
    def __getitem__(self, index: int) -> Rewritten | Skipped: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rewritten | Skipped, ...]: ...
    def __getitem__(self, index: int | slice) -> Rewritten | Skipped | tuple[Rewritten | Skipped, ...]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Rewritten | Skipped]:
        return iter(self.records)

    def __add__(self, other: Report) -> Report:
        if not isinstance(other, Report):
            return NotImplemented
        return Report(self.records + other.records, self.graphs + other.graphs, self.graph_breaks + other.graph_breaks)

    def __str__(self) -> str:
        head = f"torchflash: {len(self.rewritten)} rewritten, {len(self.skipped)} skipped"
        head += f" in {self.graphs} graph{'' if self.graphs == 1 else 's'}"
        return "\n".join([head, *map(str, self.records), *(f"graph break  {why}" for why in self.graph_breaks)])

    def to_json(self, indent: int | None = None) -> str:
        """Strict JSON; `Report.from_json` gives an equal report back."""
        return json.dumps(
            {
                "graphs": self.graphs,
                "graph_breaks": list(self.graph_breaks),
                "records": [{"kind": type(r).__name__.lower(), **asdict(r)} for r in self.records],
            },
            indent=indent,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote. Raises ValueError if it is not one."""
        try:
            data = json.loads(text)
            records = tuple(_record_from(entry) for entry in data["records"])
            return cls(records, int(data["graphs"]), tuple(data["graph_breaks"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a torchflash report: {error!r}") from error

    @classmethod
    def of_graph(cls, graph: int, records: Iterable[Rewritten | Skipped], graph_breaks: Iterable[str] = ()) -> Report:
        """The report of one graph: its records with `graph` and `index` filled in."""
        numbered = tuple(replace(record, graph=graph, index=i) for i, record in enumerate(records))
        return cls(numbered, 1, tuple(graph_breaks))


class SkippedError(RuntimeError):
    """Raised under the option `torchflash.strict` if a softmax was left alone; `.report` holds the whole report."""

    def __init__(self, report: Report, skipped: Sequence[Skipped]) -> None:
        lines = "\n".join(str(record) for record in skipped)
        super().__init__(
            f"torchflash.strict: {len(skipped)} softmax{'' if len(skipped) == 1 else 'es'} not rewritten; mend what"
            f" is said below, accept the code by 'torchflash.allow', or turn 'torchflash.strict' off\n{lines}"
        )
        self.report = report


def _record_from(entry: dict[str, Any]) -> Rewritten | Skipped:
    kinds: dict[str, type[Rewritten] | type[Skipped]] = {"rewritten": Rewritten, "skipped": Skipped}
    entry = dict(entry)
    kind = kinds[entry.pop("kind")]
    tuples = {f.name for f in fields(kind)} & {"q", "k", "v"}
    values: dict[str, Any] = {key: tuple(value) if key in tuples else value for key, value in entry.items()}
    return kind(**values)


# ------------------------------------------------------------------------------------- fields of a record from a graph


def locate(node: torch.fx.Node) -> dict[str, Any]:
    """The fields `module`, `source` and `node` of a record about this node, "" where the graph does not say."""
    return {"module": _module(node), "source": _source(node), "node": node.name}


def dims(tensor: torch.Tensor) -> tuple[Dim, ...]:
    """The shape of a (fake) tensor for a record: ints, or the text of symbolic sizes."""
    return tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)


def bytes_of_scores(q: Sequence[Dim], k: Sequence[Dim], itemsize: int) -> int | None:
    """Bytes of the scores and the probabilities of [B, H, M, D] queries and [B, Hk, N, D] keys; None if symbolic."""
    sizes = (*q[:3], k[2])
    total = 2 * itemsize
    for size in sizes:
        if not isinstance(size, int):
            return None
        total *= size
    return total


# L['self'], G['model'], a bare variable; L['args'][0] where nn.Module.compile made it a wrapper's first argument
_ROOT = re.compile(r"^(L\['args'\]\[0\]|[A-Za-z_]\w*(\['[^']*'\])?)")
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def _module(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = re.sub(r"\.?__closure__\[\d+\]\.cell_contents", "", str(path))
    path = re.sub(r"\.(__dict__\['_modules'\]|_modules)(?=\[|\.)", "", _ROOT.sub("", path, count=1))
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
    if parts:
        return ".".join(parts)
    return kind.__name__ if isinstance(kind, type) else str(kind).rsplit(".", 1)[-1]


_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _source(node: torch.fx.Node) -> str:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    # nn.Softmax and functional.py are not where the user's attention is
    frames = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    if not frames:
        return ""
    return place(*frames[-1])


def place(file: str, line: int | str) -> str:
    """A line of the user's code as it is printed: "model.py:12", the file relative to its entry of sys.path, or
    "In[3]:12" for a cell of a notebook."""
    roots = [os.path.abspath(root) + os.sep for root in sys.path]
    root = max((root for root in roots if file.startswith(root)), key=len, default="")
    return f"{_cell(file) or file[len(root) :]}:{line}"


def _cell(file: str) -> str:
    """The notebook cell that a file stands for, such as "In[3]"; "" for others."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    names = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = names(file) if names is not None else None
    return str(found[1]) if found else ""


def _shape(shape: tuple[Dim, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _bytes(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
