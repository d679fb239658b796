"""Compiles kernel launches for GPUs that need not be here, and reads what ptxas made of them.

A `Case` says what attention to compile for. `compile_launches` gives all that its forward and backward launch on a GPU
of some compute capability, `compile_tile` one kernel with one tile; both as `Resources`: registers, spills, shared
memory, warnings. Operands are on the meta device and take no memory. No driver and no GPU are needed; ptxas comes with
triton.

How: the functions of launch.py run as they are, with another `start` (launcher.py) that compiles instead of launching.
While they do, launches of other threads of this process are not launched either: compile in a process of its own, as
`python -m torchflash tune` does (torchflash/tune.py), or where nothing else runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from torchflash.kernels import autotune, launch, launcher, maps, operands, reference, split
from torchflash.kernels import program as programs
from torchflash.kernels.candidates import Work, shared_limit
from torchflash.kernels.configs import Tile
from torchflash.kernels.launcher import Spilling
from torchflash.kernels.tuning import PARAMETERS

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
Arguments = Mapping[str, Any]
Others = Callable[[], Arguments]
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
          torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- case


@dataclass(frozen=True)
class Case:
    """One attention by its shapes: q [B, H, M, D], k [B, Hk, N, D], v [B, Hv, N, DV], its programs, and the shape and
    dtype of each captured tensor. Operands lie as models make them, heads inside: contiguous as [B, L, heads, D]."""

    B: int
    H: int
    M: int
    D: int
    Hk: int
    Hv: int
    N: int
    DV: int
    dtype: torch.dtype
    score: str
    keep: str = ""
    fill: float = -math.inf
    post: str = "p"
    captures: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    sizes: tuple[int, ...] = ()
    dropout_p: float = 0.0

    def problem(self, device: torch.device | str = "meta") -> reference.Problem:
        """With random operands; captured masks keep all, captured integers are 0."""

        def operand(heads: int, length: int, dim: int) -> Tensor:
            return torch.randn(self.B, length, heads, dim, device=device, dtype=self.dtype).transpose(1, 2)

        q, k, v = operand(self.H, self.M, self.D), operand(self.Hk, self.N, self.D), operand(self.Hv, self.N, self.DV)
        captures = [_captured(shape, dtype, device) for shape, dtype in self.captures]
        kinds = programs.kinds_of([torch.empty(0, dtype=dtype) for _, dtype in self.captures])
        program = programs.read(self.score, self.keep, self.fill, self.post, kinds)
        seed = torch.zeros(1, dtype=torch.int64, device=device) if self.dropout_p else None
        return reference.Problem(q, k, v, captures, self.sizes, program, self.dropout_p, seed)


def _captured(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


# ----------------------------------------------------------------------------------------------------------- resources


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int  # of a thread
    spills: int  # bytes of a thread, stored and loaded
    stack: int  # bytes of a thread
    shared: int  # bytes of a thread block
    warps: int
    stages: int
    tensor_core: int  # instructions
    async_copies: int
    warnings: tuple[str, ...]  # of ptxas, about wgmma: C75xx
    source: str = field(default="", repr=False)  # in Triton's dialect of MLIR
    asm: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return (
            f"regs {self.registers} spills {self.spills} shared {self.shared} warps {self.warps} stages {self.stages} "
            f"mma {self.tensor_core} cp.async {self.async_copies} {' '.join(self.warnings)}"
        )


def compile_launches(
    problem: reference.Problem, need: Sequence[bool], capability: int, name: str | None = None
) -> dict[str, list[Resources]]:
    """What the forward and backward of `problem` launch on a GPU of that capability, by the kernel's name; with a
    `name`, what `run` does.

    `need` says which captures need a gradient. Tiles that do not fit or spill much are passed over, as on that GPU.
    """
    found: dict[str, list[Resources]] = {}

    def start(kernel: Any, grid: int, changing: Arguments, others: Others, spills: int | None = None) -> None:
        resources = compile_kernel(kernel, {**others(), **changing}, capability)
        _refuse(resources, capability, spills)
        found.setdefault(kernel.__name__, []).append(resources)

    with elsewhere(start, capability):
        assert run(problem, need, name)
    return found


def _refuse(resources: Resources, capability: int, spills: int | None) -> None:
    """As the driver and launcher.start would."""
    if resources.shared > shared_limit(capability):
        raise OutOfResources(resources.shared, shared_limit(capability), "shared memory")
    if spills is not None and resources.stack > 4 * spills:
        raise Spilling(resources.stack // 4)


def compile_tile(problem: reference.Problem, name: str, tile: Tile, capability: int) -> list[Resources]:
    """What the kernel `name` ("forward", "backward_kv" or "backward_q") takes with one tile, whether it fits or not:
    one for each of its launches (two of backward_kv where k and v have different numbers of heads).

    Raises what triton or ptxas raise.
    """
    found: list[Resources] = []

    def start(kernel: Any, grid: int, changing: Arguments, others: Others, spills: int | None = None) -> None:
        if kernel.__name__ == f"attention_{name}":
            found.append(compile_kernel(kernel, {**others(), **changing}, capability))

    with elsewhere(start, capability), only(name, tile):
        assert run(problem, [False] * len(problem.captures), name)
    return found


def built_in(problem: reference.Problem, name: str, capability: int) -> Tile:
    """The tile that the kernel `name` runs with on such a GPU by the built-in table: the first that fits."""
    found: list[Tile] = []

    def start(kernel: Any, grid: int, changing: Arguments, others: Others, spills: int | None = None) -> None:
        if kernel.__name__ == f"attention_{name}":
            arguments = {**others(), **changing}
            _refuse(compile_kernel(kernel, arguments, capability), capability, spills)
            found.append(Tile(*(arguments[key] for key in PARAMETERS)))

    with elsewhere(start, capability):
        if not run(problem, [False] * len(problem.captures), name):
            raise ValueError(f"no tile of {name} fits sm_{capability}")
    return found[0]


def table(case: Case, name: str, capability: int) -> list[Tile]:
    """What the built-in table has for the kernel, from the first choice on."""
    with elsewhere(launcher.start, capability):
        return launch.tiles(name, operands.Operands(case.problem()))


def is_split(case: Case) -> bool:
    """Whether the forward of the case is that of few queries (split.py), which has no kernel "forward"."""
    with elsewhere(launcher.start):
        return split.suits(operands.Operands(case.problem()))


def work(case: Case, capability: int) -> Work:
    """What candidates depend on (candidates.py)."""
    with elsewhere(launcher.start, capability):
        return autotune.work(operands.Operands(case.problem()), capability)


def time_tile(problem: reference.Problem, name: str, tile: Tile) -> float:
    """Milliseconds that the kernel `name` takes with one tile on the GPU of the operands: the median, with a cold L2
    cache, summed over its launches.

    Raises OutOfResources where the tile does not fit, and what triton raises.
    """
    times: list[float] = []
    refused: list[OutOfResources] = []

    def start(kernel: Any, grid: int, changing: Arguments, others: Others, spills: int | None = None) -> Any:
        ours = kernel.__name__ == f"attention_{name}"
        try:
            started = launcher.start(kernel, grid, changing, others)
        except OutOfResources as e:
            refused.extend([e] if ours else [])
            raise
        if ours and started is not None:
            times.append(autotune.milliseconds(started.repeated(changing)))
        return started

    with elsewhere(start), only(name, tile):
        done = run(problem, [False] * len(problem.captures), name)
    if refused:
        raise refused[0]
    assert done
    return sum(times)


def run(problem: reference.Problem, need: Sequence[bool], name: str | None = None) -> bool:
    """Forward and backward of `problem`, or what of them launches the kernel `name`."""
    q, k, v = problem.q, problem.k, problem.v
    out = torch.zeros((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), dtype=v.dtype, device=v.device).transpose(1, 2)
    lse = torch.zeros((2, *q.shape[:3]), dtype=torch.float32, device=q.device)
    if not launch.forward(problem, out, lse):
        return False
    if name == "forward":
        return True
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    return launch.backward(problem, torch.randn_like(out), out, lse, dq, dk, dv, need) is not None


@contextlib.contextmanager
def elsewhere(start: Callable[..., Any], capability: int | None = None) -> Iterator[None]:
    """Kernels are started by `start`, which takes what launcher.start takes; for a GPU of another capability than is
    here, if one is given. What launches have remembered is put aside meanwhile."""
    with contextlib.ExitStack() as stack:
        for module in (launch, maps):
            stack.enter_context(mock.patch.object(module, "start", start))
        for module, memory in ((launch, "_fitting"), (operands, "_setups"), (maps, "_known")):
            stack.enter_context(mock.patch.object(module, memory, OrderedDict()))
        if capability is not None:
            stack.enter_context(mock.patch.object(operands, "has_tma", lambda device: capability >= 90))
        yield


@contextlib.contextmanager
def only(name: str, tile: Tile) -> Iterator[None]:
    """The kernel `name` has no other tile than this."""
    usual = launch.tiles

    def tiles(kernel: str, o: operands.Operands) -> list[Tile]:
        return [tile] if kernel == name else usual(kernel, o)

    with mock.patch.object(launch, "tiles", tiles):
        yield


# ------------------------------------------------------------------------------------------------------------- compile


def compile_kernel(kernel: Any, arguments: Mapping[str, Any], capability: int) -> Resources:
    """What `kernel[grid](**arguments)` would compile on a GPU of that capability."""
    arguments = dict(arguments)
    options = {k: arguments.pop(k) for k in OPTIONS if k in arguments}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name], constants[i,] = "constexpr", value
        else:
            specialize = not parameter.do_not_specialize
            signature[parameter.name] = _type(value, (i,), constants, attributes, specialize)
    assert not arguments, f"unknown arguments {sorted(arguments)}"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _resources(compiled, capability, options)


def _type(
    value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any], specialize: bool
) -> Any:
    if isinstance(value, tuple):
        return tuple(_type(v, (*path, i), constants, attributes, specialize) for i, v in enumerate(value))
    if isinstance(value, Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return "*" + _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if value is None or (isinstance(value, int) and value == 1 and specialize):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if specialize and value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(compiled: Any, capability: int, options: Mapping[str, Any]) -> Resources:
    said = _ptxas(compiled.asm["ptx"], capability)
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    stack = re.search(r"(\d+) bytes stack frame", said)
    assert registers and spills and stack, said
    text = compiled.asm["ptx"]
    return Resources(
        registers=int(registers.group(1)),
        spills=int(spills.group(1)) + int(spills.group(2)),
        stack=int(stack.group(1)),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        stages=options.get("num_stages", 0),
        tensor_core=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", text)),
        async_copies=text.count("cp.async.c"),
        warnings=tuple(line for line in said.splitlines() if re.search(r"C75\d\d", line)),
        source=compiled.asm["ttir"],
        asm=compiled.asm,
    )


def _ptxas(ptx: str, capability: int) -> str:
    """What `ptxas -v` says."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = os.path.join(folder, "k.ptx"), os.path.join(folder, "k.cubin")
        with open(source, "w") as f:
            f.write(ptx)
        arch = f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [get_ptxas(capability).path, "-v", arch, source, "-o", binary]
        return subprocess.run(command, capture_output=True, text=True).stderr
