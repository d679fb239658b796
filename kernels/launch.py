"""Launches the Triton kernels for one attention: tiles, grids, specialisations, and the way down when a tile does not
fit.

`forward` and `backward` return False / None where no configuration fits the device; the caller then runs blockwise
torch.
"""

from __future__ import annotations

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

from torchflash.kernels import autotune, configs, even, lower, split
from torchflash.kernels import backward as bwd
from torchflash.kernels.captures import attention_backward_capture
from torchflash.kernels.forward import attention_forward
from torchflash.kernels.launcher import Spilling, Started, cdiv, device_guard, interpreting, start
from torchflash.kernels.memory import empty
from torchflash.kernels.operands import Operands, layout, strides
from torchflash.kernels.program import plain_axes
from torchflash.kernels.reference import Problem, exact_delta
from torchflash.score import Expr

log = logging.getLogger("torchflash")

SPILLS = 192  # words a thread may spill: what lies outside the inner loops does not show
_fitting: dict[Any, int] = {}  # (kernel, specialisation) -> index of the first tile that fits the device


def supports(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return interpreting()


def run(
    kernel: Any,
    name: str,
    o: Operands,
    grid: Callable[[configs.Tile], int],
    own: Any,
    by_tile: Callable[[configs.Tile], dict[str, Any]],
    changing: dict[str, Any],
    others: Callable[[], dict[str, Any]],
) -> bool:
    """Launch with the first tile that fits and does not spill much; False when none fits. What does is remembered.
    `own` is what decides `others`, besides the setup of `o`."""
    setup = o.setup
    changing["T"] = o.T
    known = setup.plans.get((name, own))
    if known is not None:
        started, tile = known
        o.again = True
        changing.update(by_tile(tile))
        started.again(changing)
        return True
    o.again = False
    choices = tiles(name, o)

    def launch(tile: configs.Tile, spills: int | None = None) -> tuple[Started | None, dict[str, Any]]:
        def arguments() -> dict[str, Any]:
            sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.warps}
            return {**others(), **setup.common, **sizes, "num_stages": tile.stages, **extra_options()}

        given = {**changing, **by_tile(tile)}
        return start(kernel, grid(tile), given, arguments, spills), given

    timed, final = None, True
    if o.problem.tuning.autotune:
        timed, final = autotune.fastest(name, own, o, choices[0], launch)
        choices = choices if timed is None else [timed, *choices]
    kind = (name, own[0], setup.kind, choices[0])
    candidates = list(range(_fitting.get(kind, 0), len(choices)))
    limit = None if timed or o.problem.tuning.tile(name) or kind in _fitting else SPILLS
    spilling: dict[int, int] = {}  # the choices that spill more, and how much
    while candidates:
        i = candidates.pop(0)
        try:
            first, _ = launch(choices[i], limit)
        except OutOfResources as e:
            log.info("%s with %s does not fit: %s", name, choices[i], e)
        except Spilling as e:
            log.info("%s with %s: %s", name, choices[i], e)
            spilling[i] = e.words
        else:
            _fitting[kind] = i
            if first is not None and final:
                setup.plans[name, own] = first, choices[i]
            return True
        if spilling and (not candidates or len(spilling) == 3):
            candidates, limit = [min(spilling, key=spilling.__getitem__)], None
            spilling = {}
    log.warning(
        "torchflash: no tile of %s fits %s for head dims %d and %d in %s; running blockwise torch, which is slow",
        name, o.problem.q.device, setup.D, setup.DV, o.problem.q.dtype,
    )  # fmt: skip
    return False


def tiles(name: str, o: Operands) -> list[configs.Tile]:
    """From the first choice to the last resort; first what the user asked for."""
    setup = o.setup
    itemsizes = [c.itemsize for c in o.problem.captures]
    choices = configs.tiles(name, setup.held, setup.itemsize, setup.form, itemsizes, setup.hopper)
    fixed = o.problem.tuning.tile(name)
    if name == "split":  # as many rows as there are
        rows = split.rows(o)
        fixed = {k: v for k, v in fixed.items() if k != "BLOCK_M"}
        choices = [tile._replace(block_m=rows) for tile in choices]
    return [choices[0].replaced(fixed), *choices] if fixed else choices


@functools.cache
def extra_options() -> dict[str, Any]:
    return {} if interpreting() else {"enable_fp_fusion": True}  # the default differs between versions of triton


# -------------------------------------------------------------------------------------------------------------- the op


def forward(problem: Problem, out: Tensor, lse: Tensor) -> bool:
    o = Operands(problem)
    if split.suits(o):
        with device_guard(problem.q.device):
            return _forward_split(o, out, lse)
    even.mark(o)
    p, setup = problem, o.setup

    def grid(tile: configs.Tile) -> int:
        return p.B * p.H * cdiv(p.M, tile.block_m) * setup.dims(setup.DV)["SLICES"]

    def by_tile(tile: configs.Tile) -> dict[str, Any]:
        return {
            "Q_DESC": o.descriptor(p.q, tile.block_m, "q"), "K_DESC": o.descriptor(p.k, tile.block_n, "k"),
            "V_DESC": o.descriptor(p.v, tile.block_n, "v"), **o.rows(tile), **even.of_forward(o),
        }  # fmt: skip

    def others() -> dict[str, Any]:
        return {
            "fill": setup.form.far_fill, "huge": setup.form.huge,
            "FILLED": setup.maps is not None and setup.form.fill > -math.inf, "ZERO": setup.form.zero,
            "SCORE": setup.value("score"), "BODY": setup.value("body"), "POST": setup.post, "parts": even.parts(p.N)[1],
            **strides(q=p.q, k=p.k, v=p.v, o=out), **setup.rows, **setup.dims(setup.DV), **setup.dropout,
        }  # fmt: skip

    with device_guard(p.q.device):
        changing = {"Q": p.q, "K": p.k, "V": p.v, "OUT": out, "LSE": lse, "SEED": p.seed}
        return run(attention_forward, "forward", o, grid, (None, layout(out)), by_tile, changing, others)


def _forward_split(o: Operands, out: Tensor, lse: Tensor) -> bool:
    p, setup = o.problem, o.setup
    pack, lines = split.pack(o), p.B * p.H
    changing: dict[str, Any] = {"Q": p.q, "K": p.k, "V": p.v}
    by_last: dict[str, Any] = {}  # what goes with the tile that was tried last
    last = configs.Tile(0, 0, 0, 0)

    def grid(tile: configs.Tile) -> int:
        return lines // pack * split.splits(o, tile)

    def by_tile(tile: configs.Tile) -> dict[str, Any]:
        nonlocal last
        last, parts = tile, split.splits(o, tile)
        by_last.update(
            K_DESC=o.descriptor(p.k, tile.block_n, "k"), V_DESC=o.descriptor(p.v, tile.block_n, "v"),
            STATISTICS=empty(lse, (2, lines * p.M, parts), torch.float32),
            ACC=empty(lse, (lines * p.M, parts, setup.DV), torch.float32), **o.rows(tile),
        )  # fmt: skip
        return by_last

    def others() -> dict[str, Any]:
        dims = setup.dims()
        return {
            "splits": split.splits(o, last), "SCORE": setup.value("score"),
            **{name: dims[name] for name in ("D", "DV", "CHUNKS", "CHUNKS_V")}, **strides(q=p.q, k=p.k, v=p.v),
            **setup.rows,
        }  # fmt: skip

    def of_split() -> dict[str, Any]:
        return {"PACK": pack, "BODY": setup.value("body"), **others()}

    def of_combine() -> dict[str, Any]:
        return {
            **others(), **setup.common, **strides(o=out), "fill": setup.form.far_fill, "huge": setup.form.huge,
            "FILLED": setup.maps is not None and setup.form.fill > -math.inf, "ZERO": setup.form.zero,
            "PARTS": min(split.PARTS, triton.next_power_of_2(split.splits(o, last))),
            "BLOCK_M": 16, "BLOCK_N": last.block_n, "num_warps": 4, "num_stages": 1,
            **extra_options(),
        }  # fmt: skip

    own = (None, layout(out))  # of both kernels
    if not run(split.attention_split, "split", o, grid, own, by_tile, changing, of_split):
        return False
    of_parts = {name: x for name, x in by_last.items() if name != "RUN"}
    changing |= of_parts | {"OUT": out, "LSE": lse}
    setup.start(split.attention_combine, (last, own), lines * p.M, changing, of_combine)
    return True


class Saved:
    """What the backward kernels share: the upstream gradient, the statistics of the forward, and those of the rows."""

    def __init__(self, o: Operands, do: Tensor, out: Tensor, lse: Tensor, need: Sequence[bool], dq: Tensor):
        p, setup = o.problem, o.setup
        self.do, self.lse = do, lse
        self.length = cdiv(p.M, configs.LARGEST_BLOCK) * configs.LARGEST_BLOCK
        planes = 6 if p.dropout_p else 3
        self.rows = empty(p.q, (planes, p.B * p.H, self.length), torch.float32)
        self.key = (layout(do), do.dtype)
        flags = even.flags(o, self.length, need)
        block = 64 if setup.DV <= 128 else 32

        def others() -> dict[str, Any]:
            return {
                **strides(o=out, g=do), "H": p.H, "M": p.M, "N": p.N, "lines": p.B * p.H, "length": self.length,
                "exponent": setup.form.exponent, "fill": setup.form.fill, "huge": setup.form.huge,
                "EXACT": setup.form.exact, "ZERO": setup.form.zero,
                "JOINT": setup.form.joint, "DROPOUT": p.dropout_p > 0, "DV": setup.DV, "BLOCK_M": block,
                "BLOCK_D": min(128, max(16, triton.next_power_of_2(setup.DV))), **extra_options(),
            }  # fmt: skip

        changing = {"OUT": out, "DO": do, "LSE": lse, "ROWS": self.rows, "EVEN": flags, "SEED": p.seed}
        grid = p.B * p.H * self.length // block
        setup.start(bwd.attention_rows, (self.key, layout(out), flags is None), grid, changing, others)
        self.even = even.of_backward(o, do, flags, need, dq)


def backward(
    problem: Problem, do: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, need: Sequence[bool]
) -> list[Tensor] | None:
    o = Operands(problem)
    p = problem
    with device_guard(p.q.device):
        saved = Saved(o, do, out, lse, need, dq)
        wanted = tuple(need)
        if wanted not in o.setup.exact_delta:
            o.setup.exact_delta[wanted] = exact_delta(p, need)
        if o.setup.exact_delta[wanted] and not _backward_q(o, saved, dq, (), (), only_delta=True):
            return None
        if not _backward_kv(o, saved, dk, dv):
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
        self.loads = o.setup.program.loads_of(index)
        axes = [plain_axes(e) for e in self.loads]
        # The kernel of its own recomputes the tile. It pays where a gradient is as large as the scores (no float32
        # copy, no atomic per score) and is the only way to the same bits every time.
        possible = all(a is not None and self._spans(o, a) for a in axes)
        large = possible and all(a is not None and "m" in a and "n" in a for a in axes)
        self.scattered = bool(self.loads) and not (large or (possible and torch.are_deterministic_algorithms_enabled()))
        passes = sum((e in o.setup.program.score_vjp) + (e in o.setup.program.post_vjp) for e in self.loads)
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


def _backward_capture(o: Operands, saved: Saved, plan: CapturePlan, load: Expr) -> bool:
    p, setup = o.problem, o.setup
    program = setup.program
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
        return lower.adjoint_function(program, which, load, setup.ranks, setup.fast) if load in vjp else None

    def grid(tile: configs.Tile) -> int:
        sizes = {"b": p.B, "h": p.H, "m": cdiv(p.M, tile.block_m), "n": cdiv(p.N, tile.block_n)}
        return math.prod(sizes[axis] for axis in used)

    def by_tile(tile: configs.Tile) -> dict[str, Any]:
        return {
            "Q_DESC": o.descriptor(p.q, tile.block_m, "q"), "DO_DESC": o.descriptor(saved.do, tile.block_m, saved.key),
            "K_DESC": o.descriptor(p.k, tile.block_n, "k"), "V_DESC": o.descriptor(p.v, tile.block_n, "v"),
        }  # fmt: skip

    def others() -> dict[str, Any]:
        return {
            "B": p.B, "length": saved.length, **{f"t_{axis}": used.get(axis, 0) for axis in "bhmn"},
            **{f"USES_{axis.upper()}": axis in used for axis in "bhmn"}, "SCORE": setup.value("score"),
            "JOINT": setup.form.joint, "POST_GRADIENT": setup.gradient("post"), "SCORE_ADJOINT": adjoint("score"),
            "POST_ADJOINT": adjoint("post"), **strides(q=p.q, k=p.k, v=p.v, g=saved.do), **setup.dims(),
            **setup.dropout,
        }  # fmt: skip

    changing = {"Q": p.q, "K": p.k, "V": p.v, "DO": saved.do, "ROWS": saved.rows, "GRADIENT": gradient}
    own = (load, saved.key, layout(gradient), gradient.dtype)
    return run(attention_backward_capture, "backward_capture", o, grid, own, by_tile, changing, others)


def _backward_kv(o: Operands, saved: Saved, dk: Tensor, dv: Tensor) -> bool:
    p, setup = o.problem, o.setup
    together = p.group_k == p.group_v and not setup.stream
    for want_dk, want_dv in [(True, True)] if together else [(True, False), (False, True)]:
        heads = p.group_k if want_dk else p.group_v
        sliced = setup.D if want_dk else setup.DV

        def grid(tile: configs.Tile, heads: int = heads, sliced: int = sliced) -> int:
            return p.B * (p.H // heads) * cdiv(p.N, tile.block_n) * setup.dims(sliced)["SLICES"]

        def by_tile(tile: configs.Tile) -> dict[str, Any]:
            return {
                "Q_DESC": o.descriptor(p.q, tile.block_m, "q"),
                "DO_DESC": o.descriptor(saved.do, tile.block_m, saved.key),
                **o.columns(tile, saved.lse, saved.rows), **saved.even.of_columns(),
            }  # fmt: skip

        def others(
            heads: int = heads, sliced: int = sliced, want_dk: bool = want_dk, want_dv: bool = want_dv
        ) -> dict[str, Any]:
            return {
                "HEADS": heads, "SHARED": p.group_k == p.group_v, "WANT_DK": want_dk, "WANT_DV": want_dv,
                "length": saved.length, "factor": setup.form.factor, "JOINT": setup.form.joint,
                "SCORE": setup.value("score"), "SCORE_GRADIENT": setup.gradient("score"), "BODY": setup.value("body"),
                "BODY_GRADIENT": setup.gradient("body"), "POST": setup.post, "POST_GRADIENT": setup.gradient("post"),
                **strides(q=p.q, k=p.k, v=p.v, g=saved.do, dk=dk, dv=dv), **setup.dims(sliced), **setup.dropout,
            }  # fmt: skip

        changing = {"Q": p.q, "K": p.k, "V": p.v, "DO": saved.do, "ROWS": saved.rows, "DK": dk, "DV_": dv}
        own = (want_dk, want_dv, saved.key, layout(dk, dv), saved.even.kind)
        if not run(bwd.attention_backward_kv, "backward_kv", o, grid, own, by_tile, changing, others):
            return False
    even.add_to_keys(o, saved.even, dk)
    return True


def _backward_q(
    o: Operands,
    saved: Saved,
    dq: Tensor,
    scattered: tuple[int, ...],
    buffers: Sequence[Tensor | None],
    only_delta: bool = False,
) -> bool:
    p, setup = o.problem, o.setup
    G: tuple[Any, ...] = ()
    GS: tuple[int, ...] = ()
    if scattered:
        G = tuple(saved.rows if b is None else b for b in buffers)
        GS = tuple(x for c, b in zip(p.captures, buffers, strict=True) for x in (c if b is None else b).stride())

    def grid(tile: configs.Tile) -> int:
        return p.B * p.H * cdiv(p.M, tile.block_m) * setup.dims(setup.D)["SLICES"]

    def by_tile(tile: configs.Tile) -> dict[str, Any]:
        keys = {"K_DESC": o.descriptor(p.k, tile.block_n, "k"), "V_DESC": o.descriptor(p.v, tile.block_n, "v")}
        return keys | o.rows(tile) | saved.even.of_rows()

    def others() -> dict[str, Any]:
        body = "score" if scattered else "body"  # what is scattered may be part of the mask: all tiles alike
        return {
            "GS": GS, "GROUP": saved.even.group, "length": saved.length, "factor": setup.form.factor,
            "fill": setup.form.fill, "JOINT": setup.form.joint, "SCORE": setup.value("score"),
            "BODY": setup.value(body),
            "SCORE_GRADIENT": None if only_delta else setup.gradient("score", scattered),
            "BODY_GRADIENT": None if only_delta else setup.gradient(body, scattered),
            "POST_GRADIENT": setup.gradient("post", scattered), "ONLY_DELTA": only_delta,
            **strides(q=p.q, k=p.k, v=p.v, g=saved.do, dq=dq), **setup.dims(setup.D), **setup.dropout,
        }  # fmt: skip

    changing = {
        "Q": p.q, "K": p.k, "V": p.v, "DO": saved.do, "LSE": saved.lse, "ROWS": saved.rows, "DQ": dq, "SEED": p.seed,
        "G": G,
    }  # fmt: skip
    own = (only_delta, scattered, saved.key, layout(dq), GS, saved.even.kind)
    return run(bwd.attention_backward_q, "backward_q", o, grid, own, by_tile, changing, others)


__all__ = ["Operands", "backward", "forward", "supports"]
