"""Compiles kernel launches for GPUs that are not here, and reads what ptxas made of them.

`Compiler(kernel, capability)` stands in for a kernel: launching it compiles what the launch would compile on that GPU
and appends a `Resources`, or raises OutOfResources as the driver would. No driver and no GPU are needed; ptxas and
cuobjdump come with triton.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
          torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    registers: int
    spills: int  # bytes stored and loaded
    shared: int
    warps: int
    stages: int
    tensor_core: int  # instructions
    async_copies: int
    warnings: tuple[str, ...]
    source: str
    asm: Any = None

    def __str__(self) -> str:
        return (
            f"regs {self.registers} spills {self.spills} shared {self.shared} warps {self.warps} stages {self.stages} "
            f"mma {self.tensor_core} cp.async {self.async_copies} {' '.join(self.warnings)}"
        )


class Compiler:
    def __init__(self, kernel: Any, capability: int):
        self.kernel, self.capability = kernel, capability
        self.found: list[Resources] = []

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, **arguments: Any) -> None:
        options = {k: arguments.pop(k) for k in OPTIONS if k in arguments}
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for i, parameter in enumerate(self.kernel.params):
            value = arguments.pop(parameter.name)
            if parameter.is_constexpr:
                signature[parameter.name], constants[i,] = "constexpr", value
            else:
                specialize = not parameter.do_not_specialize
                signature[parameter.name] = _type(value, (i,), constants, attributes, specialize)
        assert not arguments, f"unknown arguments {sorted(arguments)}"
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        if compiled.metadata.shared > SHARED_LIMIT[self.capability]:  # as the driver would refuse it
            raise OutOfResources(compiled.metadata.shared, SHARED_LIMIT[self.capability], "shared memory")
        self.found.append(_resources(compiled, self.capability, options))


def compile_launches(problem: Any, need: list[bool], capability: int) -> dict[str, list[Resources]]:
    """What the forward and backward of `problem` launch on a GPU of that capability, by kernel name."""
    from torchflash.kernels import backward, launch, maps

    for memory in (launch._fitting, launch._setups, maps._known):
        memory.clear()

    places = [(launch, "attention_forward"), (launch, "attention_backward_capture"), (backward, "attention_rows"),
              (backward, "attention_backward_kv"), (backward, "attention_backward_q"), (maps, "tile_states"),
              (maps, "tile_order"), (maps, "needy_rows")]  # fmt: skip
    stand_ins = {name: Compiler(getattr(module, name), capability) for module, name in places}
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        stack.callback(launch._setups.clear)
        stack.enter_context(mock.patch.object(launch, "has_tma", lambda device: capability >= 90))
        q, k, v = problem.q, problem.k, problem.v
        out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype)
        lse = torch.empty((2, *q.shape[:3]))
        assert launch.forward(problem, out, lse)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        assert launch.backward(problem, out, out, lse, *gradients, need) is not None
    return {name: c.found for name, c in stand_ins.items() if c.found}


def _type(
    value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any], specialize: bool
) -> Any:
    if isinstance(value, tuple):
        return tuple(_type(v, (*path, i), constants, attributes, specialize) for i, v in enumerate(value))
    if isinstance(value, torch.Tensor):
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


def _resources(compiled: Any, capability: int, options: dict[str, Any]) -> Resources:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as d:
        ptx, cubin = os.path.join(d, "k.ptx"), os.path.join(d, "k.cubin")
        with open(ptx, "w") as f:
            f.write(compiled.asm["ptx"])
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        said = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={name}", ptx, "-o", cubin], capture_output=True, text=True
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers and spills, said
    text = compiled.asm["ptx"]
    return Resources(
        registers=int(registers.group(1)),
        spills=int(spills.group(1)) + int(spills.group(2)),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        stages=options.get("num_stages", 0),
        tensor_core=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", text)),
        async_copies=text.count("cp.async.c"),
        warnings=tuple(line for line in said.splitlines() if re.search(r"C75\d\d", line)),
        source=compiled.asm["ttir"],
        asm=compiled.asm,
    )
