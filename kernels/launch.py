"""Launches the Triton kernels for one attention: tiles, grids, specialisations, and the way down when a tile does not
fit.

`forward` and `backward` return False / None where no configuration fits the device; the caller then runs blockwise
torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from torchflash.kernels import backward as bwd
from torchflash.kernels import configs, lower, philox
from torchflash.kernels.captures import attention_backward_capture
from torchflash.kernels.forward import attention_forward
from torchflash.kernels.program import Program, plain_axes
from torchflash.kernels.reference import Problem, exact_delta
from torchflash.score import Expr

log = logging.getLogger("torchflash")

MAX_SIZES = 8  # z0 … z7 are kernel arguments
_fitting: dict[Any, int] = {}  # (kernel, specialisation) -> index of the first tile that fits the device


def supports(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return interpreting()


def interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)


def precision(dtype: torch.dtype) -> str:
    """How float32 operands are multiplied: as torch.get_float32_matmul_precision() says."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


# -------------------------------------------------------------------------------------------------- what a kernel takes


class Operands:
    """The arguments that every kernel of one attention shares."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        self.program = p.program
        if len(p.sizes) > MAX_SIZES:
            raise ValueError(f"a program may use at most {MAX_SIZES} sizes; got {len(p.sizes)}")
        self.ranks = tuple(c.dim() for c in p.captures)
        self.T = tuple(c if c.numel() else p.q.new_zeros(1, dtype=c.dtype) for c in p.captures)
        self.S = tuple(x for c in p.captures for x in c.stride()) + tuple(x for c in p.captures for x in c.shape)
        sizes = [*p.sizes.values(), *([0] * (MAX_SIZES - len(p.sizes)))]
        self.common = dict(
            M=p.M, N=p.N, H=p.H, GROUP_K=p.group_k, GROUP_V=p.group_v, plane=p.B * p.H * p.M,
            threshold=philox.threshold(p.dropout_p) - 2**31, keep_scale=1.0 / (1.0 - p.dropout_p),
            DROPOUT=p.dropout_p > 0, PRECISION=precision(p.q.dtype),
            SEED=p.seed, T=self.T, S=self.S, **{f"Z{i}": z for i, z in enumerate(sizes)},
        )  # fmt: skip
        self.D, self.DV = p.q.shape[-1], p.v.shape[-1]
        self.itemsize = max(p.q.dtype.itemsize, p.v.dtype.itemsize)
        self.stream = max(self.D, self.DV) > configs.STREAM_ABOVE[self.itemsize]
        self.held = configs.STREAM_TILES[self.itemsize] if self.stream else max(self.D, self.DV)
        self.common["KEEP"] = lower.keep_function(self.program, MAX_SIZES)
        self.common["SCORE"] = lower.value_function(self.program, "score", self.ranks)
        self.post = lower.value_function(self.program, "post", self.ranks) if self.program.post is not None else None

    def gradient(self, which: str, scatter: tuple[int, ...] = ()) -> Any:
        if which == "post" and self.program.post is None:
            return None
        return lower.gradient_function(self.program, which, self.ranks, scatter)

    def dims(self, slices: int | None = None) -> dict[str, Any]:
        """Head-dimension arguments; `slices` is the dimension whose columns are shared out when streaming."""
        held, shared = {"D": self.D, "DV": self.DV, "STREAM": 0, "SLICES": 1}, -(-(slices or 1) // configs.STREAM_SLICE)
        if not self.stream:
            return held | {"CHUNKS": configs.chunks(self.D), "CHUNKS_V": configs.chunks(self.DV)}
        part = (configs.STREAM_SLICE,)
        return held | {"CHUNKS": part, "CHUNKS_V": part, "STREAM": configs.STREAM_CHUNK, "SLICES": shared}


def strides(**tensors: Tensor) -> dict[str, int]:
    """q=… -> q_b, q_h, q_m, q_d; keys and values (k, v, dk, dv) name their rows n."""
    found: dict[str, int] = {}
    for name, x in tensors.items():
        axes = "bhnd" if name in ("k", "v", "dk", "dv") else "bhmd"
        found |= {f"{name}_{axis}": stride for axis, stride in zip(axes, x.stride(), strict=True)}
    return found


def device_guard(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def run(kernel: Any, name: str, o: Operands, grid: Callable[[configs.Tile], int], **arguments: Any) -> bool:
    """Launch with the first tile that fits; False when none does. What fits is remembered."""
    choices = configs.tiles(name, o.held, o.itemsize)
    functions = tuple(v for k, v in arguments.items() if k.isupper() and callable(v))
    key = (
        name,
        o.problem.q.device,
        o.program,
        functions,
        o.D,
        o.DV,
        o.problem.q.dtype,
        o.problem.v.dtype,
        arguments["PRECISION"],
    )
    for i in range(_fitting.get(key, 0), len(choices)):
        tile = choices[i]
        try:
            kernel[(grid(tile),)](
                **arguments,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **extra_options(),
            )
        except OutOfResources as e:
            log.info("%s with %s does not fit: %s", name, tile, e)
            continue
        _fitting[key] = i
        return True
    log.warning(
        "torchflash: no tile of %s fits %s for head dims %d and %d in %s; running blockwise torch, which is slow",
        name, o.problem.q.device, o.D, o.DV, o.problem.q.dtype,
    )  # fmt: skip
    return False


@functools.cache
def extra_options() -> dict[str, Any]:
    return {} if interpreting() else {"enable_fp_fusion": True}  # the default differs between versions of triton


# -------------------------------------------------------------------------------------------------------------- the op


def forward(problem: Problem, out: Tensor, lse: Tensor) -> bool:
    o = Operands(problem)
    p = problem
    dims = o.dims(o.DV)

    def grid(tile: configs.Tile) -> int:
        return p.B * p.H * triton.cdiv(p.M, tile.block_m) * dims["SLICES"]

    with device_guard(p.q.device):
        return run(
            attention_forward, "forward", o, grid, Q=p.q, K=p.k, V=p.v, OUT=out, LSE=lse,
            fill=p.program.fill, POST=o.post, **strides(q=p.q, k=p.k, v=p.v, o=out), **o.common, **dims,
        )  # fmt: skip


def backward(
    problem: Problem, do: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, need: Sequence[bool]
) -> list[Tensor] | None:
    o = Operands(problem)
    p = problem
    delta = torch.empty((p.B, p.H, p.M), dtype=torch.float32, device=p.q.device)
    needy = torch.zeros(p.B * p.H, dtype=torch.int32, device=p.q.device)
    with device_guard(p.q.device):
        block = 64 if o.DV <= 128 else 32
        bwd.attention_delta[(p.B * p.H * triton.cdiv(p.M, block),)](
            OUT=out, DO=do, LSE=lse, DELTA=delta, NEEDY=needy, **strides(o=out, g=do), H=p.H, M=p.M,
            fill=p.program.fill, KEEP=o.common["KEEP"], DV=o.DV, BLOCK_M=block,
            BLOCK_D=min(128, max(16, triton.next_power_of_2(o.DV))), **extra_options(),
        )  # fmt: skip
        saved = {"DO": do, "LSE": lse, "DELTA": delta}
        if exact_delta(p, need) and not _backward_q(o, saved, dq, (), (), only_delta=True):
            return None
        if not _backward_kv(o, saved, needy, dk, dv):
            return None
        plans = [CapturePlan(o, i) if n else None for i, n in enumerate(need)]
        scattered = tuple(plan.index for plan in plans if plan and plan.scattered)
        if scattered and torch.are_deterministic_algorithms_enabled():
            _alert_not_deterministic([str(e) for i in scattered for e in p.program.loads_of(i)])
        buffers = [None if plan is None else plan.buffer for plan in plans]
        if not _backward_q(o, saved, dq, scattered, buffers):
            return None
        for plan in plans:
            if plan and not plan.scattered and not all(_backward_capture(o, saved, plan, load) for load in plan.loads):
                return None
    return [plan.buffer.to(plan.capture.dtype) for plan in plans if plan]


class CapturePlan:
    """How the gradient of one capture is summed: by atomics in the dQ kernel, or by a kernel of its own without any."""

    def __init__(self, o: Operands, index: int):
        self.index, self.capture = index, o.problem.captures[index]
        self.loads = o.program.loads_of(index)
        axes = [plain_axes(e) for e in self.loads]
        # The kernel of its own recomputes the tile. It pays where a gradient is as large as the scores (no float32
        # copy, no atomic per score) and is the only way to the same bits every time.
        possible = all(a is not None and self._spans(o, a) for a in axes)
        large = possible and all(a is not None and "m" in a and "n" in a for a in axes)
        self.scattered = bool(self.loads) and not (large or (possible and torch.are_deterministic_algorithms_enabled()))
        passes = sum((e in o.program.score_vjp) + (e in o.program.post_vjp) for e in self.loads)
        dtype = self.capture.dtype if passes == 1 and not self.scattered else torch.float32
        self.buffer = torch.zeros(self.capture.shape, dtype=dtype, device=self.capture.device)

    def _spans(self, o: Operands, axes: list[str | int]) -> bool:
        """Whether the capture holds every index: not so inside an unselected branch of a where."""
        p = o.problem
        sizes = {"b": p.B, "h": p.H, "m": p.M, "n": p.N}
        return all(
            size >= (sizes[a] if isinstance(a, str) else a + 1)
            for a, size in zip(axes, self.capture.shape, strict=True)
        )


def _alert_not_deterministic(loads: list[str]) -> None:
    text = (
        f"torchflash: the gradient of a captured tensor indexed as {', '.join(loads)} is summed by atomic additions "
        "and has no deterministic implementation; index it by plain axes, or pass warn_only=True to "
        "torch.use_deterministic_algorithms"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)


def _backward_capture(o: Operands, saved: dict[str, Any], plan: CapturePlan, load: Expr) -> bool:
    p, program = o.problem, o.program
    axes = plain_axes(load)
    assert axes is not None
    gradient = plan.buffer
    used: dict[str, int] = {}
    for dim, axis in enumerate(axes):
        if isinstance(axis, str):
            used[axis] = plan.buffer.stride(dim)
        else:
            gradient = gradient.narrow(dim, axis, 1)

    def adjoint(which: str) -> Any:
        vjp = program.score_vjp if which == "score" else program.post_vjp
        return lower.adjoint_function(program, which, load, o.ranks) if load in vjp else None

    def grid(tile: configs.Tile) -> int:
        sizes = {"b": p.B, "h": p.H, "m": triton.cdiv(p.M, tile.block_m), "n": triton.cdiv(p.N, tile.block_n)}
        return math.prod(sizes[axis] for axis in used)

    return run(
        attention_backward_capture, "backward_capture", o, grid, Q=p.q, K=p.k, V=p.v, **saved, GRADIENT=gradient, B=p.B,
        **{f"t_{axis}": used.get(axis, 0) for axis in "bhmn"},
        **{f"USES_{axis.upper()}": axis in used for axis in "bhmn"},
        POST_GRADIENT=o.gradient("post"), SCORE_ADJOINT=adjoint("score"), POST_ADJOINT=adjoint("post"),
        **strides(q=p.q, k=p.k, v=p.v, g=saved["DO"]), **o.common, **o.dims(),
    )  # fmt: skip


def _backward_kv(o: Operands, saved: dict[str, Any], needy: Tensor, dk: Tensor, dv: Tensor) -> bool:
    p = o.problem
    together = p.group_k == p.group_v and not o.stream
    for want_dk, want_dv in [(True, True)] if together else [(True, False), (False, True)]:
        heads = p.group_k if want_dk else p.group_v
        dims = o.dims(o.D if want_dk else o.DV)

        def grid(tile: configs.Tile, heads: int = heads, slices: int = dims["SLICES"]) -> int:
            return p.B * (p.H // heads) * triton.cdiv(p.N, tile.block_n) * slices

        if not run(
            bwd.attention_backward_kv, "backward_kv", o, grid, Q=p.q, K=p.k, V=p.v, **saved, NEEDY=needy, DK=dk, DV_=dv,
            HEADS=heads, SHARED=p.group_k == p.group_v, WANT_DK=want_dk, WANT_DV=want_dv,
            SCORE_GRADIENT=o.gradient("score"), POST=o.post, POST_GRADIENT=o.gradient("post"),
            **strides(q=p.q, k=p.k, v=p.v, g=saved["DO"], dk=dk, dv=dv), **o.common, **dims,
        ):  # fmt: skip
            return False
    return True


def _backward_q(
    o: Operands,
    saved: dict[str, Any],
    dq: Tensor,
    scattered: tuple[int, ...],
    buffers: Sequence[Tensor | None],
    only_delta: bool = False,
) -> bool:
    p = o.problem
    dims = o.dims(o.D)
    G: tuple[Any, ...] = ()
    GS: tuple[int, ...] = ()
    if scattered:
        G = tuple(saved["DELTA"] if b is None else b for b in buffers)
        GS = tuple(x for c, b in zip(p.captures, buffers, strict=True) for x in (c if b is None else b).stride())

    def grid(tile: configs.Tile) -> int:
        return p.B * p.H * triton.cdiv(p.M, tile.block_m) * dims["SLICES"]

    return run(
        bwd.attention_backward_q, "backward_q", o, grid, Q=p.q, K=p.k, V=p.v, **saved, DQ=dq, G=G, GS=GS,
        fill=p.program.fill,
        SCORE_GRADIENT=None if only_delta else o.gradient("score", scattered),
        POST_GRADIENT=o.gradient("post", scattered), ONLY_DELTA=only_delta,
        **strides(q=p.q, k=p.k, v=p.v, g=saved["DO"], dq=dq), **o.common, **dims,
    )  # fmt: skip


__all__ = ["Operands", "Program", "backward", "forward", "supports"]
