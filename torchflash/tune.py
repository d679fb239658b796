"""`python -m torchflash tune`: what each tile of the kernels takes of the chip, and how fast it is, for one shape.

For every candidate BLOCK_M, BLOCK_N, num_warps and num_stages: the on-chip memory as estimated from the algorithm
(torchflash/kernels/candidates.py has the formula) beside what compilation gives, and on a GPU the time. Compilation
needs no GPU. What comes out are tables, JSON, and the options to pass to torch.compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchflash.functional import _planned

if TYPE_CHECKING:
    from torchflash.kernels.candidates import Estimate
    from torchflash.kernels.compiling import Case, Resources
    from torchflash.kernels.configs import Tile
    from torchflash.kernels.parallel import Done

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TENSORS = {**DTYPES, "bool": torch.bool, "int32": torch.int32, "int64": torch.int64}
EXAMPLES = """\
examples:
  python -m torchflash tune --shape 4,12,4096,64 --causal
  python -m torchflash tune --shape 1,32,8192,128 --heads-kv 8 --causal --arch sm_80 --kernels forward
  python -m torchflash tune --score 'scale * s + slopes[h] * (n - m)' --keep 'n <= m' --tensor slopes=H:fp32

In a table, * marks the choice: the fastest tile, or without times the built-in one. "estimate" is what the algorithm
needs: operands times stages, and what is held; "compiled" is what the compiler made of it. Registers beyond 255 are
spilled to memory, which may or may not be slow; C75xx are warnings of ptxas that it makes asynchronous products wait.
"""


# ----------------------------------------------------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"torchflash tune: {message}; see python -m torchflash tune --help\n")


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m torchflash tune",
        description="Shows, for one shape of attention, what each candidate tile of the kernels takes of the GPU's\n"
        "on-chip memory, estimated and compiled, on a GPU also how long it runs, and which one to choose.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--shape", default="4,12,4096,64", metavar="B,H,N,D",
                   help="batch, heads, length, head dimension (default: %(default)s)")  # fmt: skip
    p.add_argument("--heads-kv", type=int, metavar="H", help="heads of keys and values (default: as queries)")
    p.add_argument("--length-kv", type=int, metavar="N", help="length of keys and values (default: as queries)")
    p.add_argument("--dim-v", type=int, metavar="D", help="head dimension of values (default: as queries)")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k and v (default: %(default)s)")
    p.add_argument("--causal", action="store_true", help="keep n <= m")
    p.add_argument("--score", metavar="TEXT", help="the score, as in torchflash.attention (default: 'scale * s')")
    p.add_argument("--keep", metavar="TEXT", help="which keys count, as in torchflash.attention")
    p.add_argument("--tensor", action="append", default=[], metavar="NAME=SHAPE:DTYPE",
                   help="a tensor that the texts name; sizes are numbers or B, H, M, N (queries, keys), as in "
                   f"slopes=H:fp32; dtypes: {', '.join(TENSORS)}; no gradient")  # fmt: skip
    p.add_argument("--dropout", type=float, default=0.0, metavar="P", help="probability (default: %(default)s)")
    p.add_argument("--arch", metavar="SM", help="sm_80, sm_90 … (default: the GPU that is here, else sm_90)")
    p.add_argument("--kernels", default="forward,backward_kv,backward_q", metavar="NAMES",
                   help="which, separated by commas (default: %(default)s)")  # fmt: skip
    p.add_argument("--top", type=int, default=12, metavar="N",
                   help="the N most promising candidates of each kernel; 0: all (default: %(default)s)")  # fmt: skip
    p.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one for each core)")
    p.add_argument("--json", metavar="FILE", help="write everything to FILE as well")
    return p


@dataclass(frozen=True)
class Request:
    """What to tune: the attention, the GPU it is for (90 for sm_90), and the device to time on, if there is one."""

    case: Case
    capability: int
    device: str | None
    kernels: tuple[str, ...]
    top: int
    jobs: int | None
    json: str | None

    def title(self) -> str:
        c = self.case
        dtype = str(c.dtype).removeprefix("torch.")
        lines = [
            f"torchflash tune for sm_{self.capability}: q {[c.B, c.H, c.M, c.D]}, k {[c.B, c.Hk, c.N, c.D]}, "
            f"v {[c.B, c.Hv, c.N, c.DV]}, {dtype}",
            f"device  {self.device or 'none of this kind here, so no times'}",
            f"score   {c.score}",
        ]
        lines += [f"keep    {c.keep}"] if c.keep else []
        lines += [f"dropout {c.dropout_p}"] if c.dropout_p else []
        return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> Request:
    """Ends the program with one line on stderr for what cannot be tuned."""
    from torchflash.kernels import compiling
    from torchflash.kernels.tuning import KERNELS

    p = parser()
    a = p.parse_args(argv)
    try:
        kernels = tuple(a.kernels.split(","))
        if unknown := [k for k in kernels if k not in KERNELS]:
            raise ValueError(f"--kernels: unknown kernel {unknown[0]!r}; known: {', '.join(KERNELS)}")
        for name, least in (("top", 0), ("jobs", 1)):
            if getattr(a, name) is not None and getattr(a, name) < least:
                raise ValueError(f"--{name} must be at least {least}; got {getattr(a, name)}")
        folder = os.path.dirname(os.path.abspath(a.json or ""))
        if not os.path.isdir(folder):
            raise ValueError(f"--json: there is no folder {folder!r} to write to; make it first")
        capability, device = _gpu(a.arch)
        case = _case(a)
        if "forward" in kernels and compiling.is_split(case):
            raise ValueError(
                f"--kernels: the forward of so few queries ({case.M}) shares out its keys, by a kernel that is not "
                "tuned; leave it out, as in --kernels backward_kv,backward_q"
            )
        return Request(case, capability, device, kernels, a.top, a.jobs, a.json)
    except ValueError as e:
        p.error(str(e))


def _case(a: argparse.Namespace) -> Case:
    from torchflash.kernels.compiling import Case

    if not re.fullmatch(r"\d+(,\d+){3}", a.shape):
        raise ValueError(f"--shape must be four numbers B,H,N,D; got {a.shape!r}")
    B, H, M, D = map(int, a.shape.split(","))
    heads, N, DV = (
        other if given is None else given for given, other in ((a.heads_kv, H), (a.length_kv, M), (a.dim_v, D))
    )
    if min(B, H, M, D, heads, N, DV) < 1:
        raise ValueError("--shape, --heads-kv, --length-kv and --dim-v must be at least 1")
    if H % heads:
        raise ValueError(f"--heads-kv must divide the heads of the queries, {H}; got {heads}")
    if not 0.0 <= a.dropout < 1.0:
        raise ValueError(f"--dropout must be at least 0 and less than 1; got {a.dropout}")
    tensors = dict(_tensor(text, {"B": B, "H": H, "M": M, "N": N}) for text in a.tensor)
    described = tuple(
        (name, len(shape), "b" if dtype == torch.bool else "f" if dtype.is_floating_point else "i")
        for name, (shape, dtype) in tensors.items()
    )
    try:
        plan = _planned(a.score, a.keep, 1.0 / math.sqrt(D), a.causal, None, described, (), M <= N)
    except ValueError as e:
        text = str(e).removeprefix("attention(): ").replace("tensors has", "--tensor gives")
        advice = r"describe it by --tensor \1=SHAPE:DTYPE, as in slopes=H:fp32"
        raise ValueError(re.sub(r"pass it as tensors=\{'(\w+)': …\}", advice, text)) from None
    captures = tuple(tensors[name] for name in plan.captures)
    sizes = tuple({"M": M, "N": N}[name] for name in plan.sizes)
    return Case(B, H, M, D, heads, heads, N, DV, DTYPES[a.dtype], plan.score, plan.keep, -math.inf, plan.post, captures,
                sizes, a.dropout)  # fmt: skip


def _tensor(text: str, sizes: dict[str, int]) -> tuple[str, tuple[tuple[int, ...], torch.dtype]]:
    found = re.fullmatch(r"(\w+)=([\w,]*):(\w+)", text)
    if found is None or found[3] not in TENSORS:
        dtypes = ", ".join(TENSORS)
        raise ValueError(f"--tensor must be NAME=SHAPE:DTYPE, as in slopes=H:fp32, of {dtypes}; got {text!r}")
    shape = [sizes.get(size, size) for size in found[2].split(",") if size]
    if not all(str(size).isdigit() and int(size) for size in shape):
        raise ValueError(f"--tensor: sizes are numbers or {', '.join(sizes)}; got {text!r}")
    return found[1], (tuple(map(int, shape)), TENSORS[found[3]])


def _gpu(arch: str | None) -> tuple[int, str | None]:
    """(capability to compile for, the name of the GPU here if it is of that capability)."""
    from torchflash.kernels.candidates import SHARED_LIMIT

    here, name = None, None
    if torch.cuda.is_available() and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability()
        here, name = major * 10 + minor, f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
    if arch is None:
        capability = here or 90
    else:
        found = re.fullmatch(r"(?:sm_?)?(\d+)a?", arch)
        capability = int(found[1]) if found else 0
    if (capability not in SHARED_LIMIT and capability != here) or capability < 80:
        raise ValueError(f"--arch: unknown GPU {arch or name!r}; known: {', '.join(f'sm_{c}' for c in SHARED_LIMIT)}")
    return capability, name if capability == here else None


# ----------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Row:
    """A candidate and what is known of it: `compiled` for each launch, or an `error`; `ms` on a GPU."""

    tile: Tile
    estimate: Estimate
    compiled: tuple[Resources, ...] = ()
    error: str | None = None
    ms: float | None = None
    built_in: bool = False
    choice: bool = False

    def resources(self) -> dict[str, Any]:
        """Of the most demanding launch."""
        rs = self.compiled
        warnings = sorted({code for r in rs for line in r.warnings for code in re.findall(r"C75\d\d", line)})
        return {
            "shared": max(r.shared for r in rs),
            "registers": max(r.registers for r in rs),
            "spills": max(r.spills for r in rs),
            "warnings": warnings,
        }

    def as_dict(self) -> dict[str, Any]:
        from torchflash.kernels.tuning import PARAMETERS

        return {
            **dict(zip(PARAMETERS, self.tile, strict=True)),
            "estimate": self.estimate._asdict(),
            "compiled": self.resources() if self.compiled else None,
            "error": self.error,
            "ms": self.ms,
            "built_in": self.built_in,
            "choice": self.choice,
        }


HEAD = """\
                                        shared memory, KiB       registers  spilled
   BLOCK_M BLOCK_N num_warps num_stages  estimate compiled  est. compiled    bytes        ms"""


def line(row: Row) -> str:
    """A row of the table under HEAD."""
    tile, estimate = row.tile, row.estimate
    text = f"{'*' if row.choice else ' '}  {tile.block_m:>7} {tile.block_n:>7} {tile.warps:>9} {tile.stages:>10}"
    text += f"  {estimate.shared / 1024:>8.1f}"
    if row.compiled:
        r = row.resources()
        text += f" {r['shared'] / 1024:>8.1f}  {estimate.registers:>4} {r['registers']:>8}  {r['spills']:>7}"
    else:
        text += f" {'-':>8}  {estimate.registers:>4} {'-':>8}  {'-':>7}"
    text += f"  {'-' if row.ms is None else f'{row.ms:.3f}':>8}"
    notes = ["built-in"] if row.built_in else []
    notes += row.resources()["warnings"] if row.compiled else []
    notes += [row.error] if row.error else []
    return (text + "  " + ", ".join(notes)).rstrip()


class Tables:
    """The candidates of each kernel, filled while they are compiled and timed."""

    def __init__(self, request: Request):
        self.request = request
        self.rows: dict[str, list[Row]] = {}

    def choose(self) -> None:
        """Marks the fastest row of each kernel, or without times the built-in one."""
        for rows in self.rows.values():
            rows.sort(key=lambda row: math.inf if row.ms is None else row.ms)  # stable
            for row in rows:
                row.choice = False
            timed = [row for row in rows if row.ms is not None]
            for row in timed[:1] or [row for row in rows if row.built_in]:
                row.choice = True

    def options(self) -> dict[str, dict[str, int]]:
        """For torch.compile: the choices."""
        from torchflash.kernels.tuning import PARAMETERS

        chosen = {kernel: row.tile for kernel, rows in self.rows.items() for row in rows if row.choice}
        if not chosen:
            return {}
        return {f"torchflash.{name}": {k: t[i] for k, t in chosen.items()} for i, name in enumerate(PARAMETERS)}

    def __str__(self) -> str:
        parts = [self.request.title()]
        for kernel, rows in self.rows.items():
            parts += ["", kernel, HEAD, *map(line, rows)]
        if options := self.options():
            parts += ["", "options={", *(f"    {json.dumps(k)}: {json.dumps(v)}," for k, v in options.items()), "}"]
        return "\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        request, case = self.request, self.request.case
        shown = {**asdict(case), "fill": str(case.fill), "dtype": str(case.dtype).removeprefix("torch.")}
        shown["captures"] = [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in case.captures]
        return {
            "case": shown,
            "arch": f"sm_{request.capability}",
            "device": request.device,
            "kernels": {kernel: [row.as_dict() for row in rows] for kernel, rows in self.rows.items()},
            "options": self.options(),
        }


# ------------------------------------------------------------------------------------------------------------- the work


def tune(request: Request, tables: Tables, progress: Callable[[str], None]) -> None:
    """Fills `tables`; it may be interrupted at any time."""
    from torchflash.kernels import candidates, compiling, parallel

    work = compiling.work(request.case, request.capability)

    def compiled(tasks: list[parallel.Task]) -> Iterator[tuple[parallel.Task, Done]]:
        for count, (index, done) in enumerate(parallel.compile_all(tasks, request.jobs), 1):
            task = tasks[index]
            what = f"{task.kernel} {_written(done.tile)}" if done.tile else f"{task.kernel}, built-in"
            progress(f"compiling {count}/{len(tasks)}: {what}")
            yield task, done

    task = functools.partial(parallel.Task, request.case, capability=request.capability)
    for of, done in compiled([task(kernel=kernel, tile=None) for kernel in request.kernels]):
        if done.tile is None:  # even the built-in one fails: the candidates will show how
            progress(f"{of.kernel}: {done.error}")
        first = done.tile or compiling.table(request.case, of.kernel, request.capability)[0]
        tiles = candidates.candidates(of.kernel, work, first)
        tables.rows[of.kernel] = [
            Row(tile, candidates.estimate(of.kernel, tile, work), built_in=tile == done.tile)
            for tile in tiles[: request.top or None]
        ]
        _fill(tables.rows[of.kernel][0], done, request.capability)
    tables.rows = {kernel: tables.rows[kernel] for kernel in request.kernels}
    rows: dict[tuple[str, Tile | None], Row] = {
        (kernel, row.tile): row for kernel, rows in tables.rows.items() for row in rows if not row.compiled
    }
    for of, done in compiled([task(kernel=kernel, tile=tile) for kernel, tile in rows]):
        _fill(rows[of.kernel, of.tile], done, request.capability)
    if request.device is not None:
        _time(request, tables, progress)


def _fill(row: Row, done: Done, capability: int) -> None:
    from torchflash.kernels.candidates import shared_limit

    row.compiled, row.error = done.resources, done.error
    if row.compiled and row.resources()["shared"] > shared_limit(capability):
        row.error = f"does not fit into {shared_limit(capability) / 1024:.0f} KiB"


def _time(request: Request, tables: Tables, progress: Callable[[str], None]) -> None:
    from torchflash.kernels import compiling, parallel

    torch.manual_seed(0)
    problem = request.case.problem("cuda")
    todo = [(kernel, row) for kernel, rows in tables.rows.items() for row in rows if row.error is None]
    for count, (kernel, row) in enumerate(todo, 1):
        progress(f"timing {count}/{len(todo)}: {kernel} {_written(row.tile)}")
        try:
            row.ms = compiling.time_tile(problem, kernel, row.tile)
        except Exception as e:
            row.error = parallel.one_line(e)


def _written(tile: Tile) -> str:
    return f"{tile.block_m} x {tile.block_n}, {tile.warps} warps, {tile.stages} stages"


class _Progress:
    """One line on stderr that changes; a line for each step where it is no terminal."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0, 2 for a bad argument, 130 after Ctrl-C, which prints what is known so far."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        print("torchflash tune: TRITON_INTERPRET is set, so that nothing is compiled; unset it", file=sys.stderr)
        return 2
    try:
        request = parse(argv)
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        print("torchflash tune: needs triton, which compiles the kernels; install it", file=sys.stderr)
        return 2
    tables, progress, status = Tables(request), _Progress(), 0
    try:
        tune(request, tables, progress)
    except KeyboardInterrupt:
        status = 130
    progress.clear()
    if status:
        print("interrupted; this much is known:", file=sys.stderr)
    tables.choose()
    print(tables)
    if request.json:
        with open(request.json, "w") as f:
            json.dump(tables.as_dict(), f, indent=1)
    return status
