"""What the kernels of one attention take: what follows from shapes, strides, dtypes and programs, remembered, and the
tensors of one call."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torchflash.kernels import configs, lower, philox
from torchflash.kernels.forms import Form, form
from torchflash.kernels.launcher import Started, based, interpreting
from torchflash.kernels.maps import Maps, Starting, pointers, strides_and_sizes
from torchflash.kernels.reference import Problem
from torchflash.kernels.visits import SIZES

if TYPE_CHECKING:
    from torchflash.kernels.even import Shape

MAX_SIZES = len(SIZES)
REMEMBERED = 1024
NO_ROWS: dict[str, Any] = {"ORDER": None, "COUNTS": None, "line_b": 0, "line_h": 0, "RUN": True}
NO_COLUMNS: dict[str, Any] = {**NO_ROWS, "STATES": None, "NEEDY": None, "NEEDY_COUNTS": None}
_setups: OrderedDict[Any, Setup] = OrderedDict()


def precision(dtype: torch.dtype) -> str:
    """How float32 operands are multiplied: as torch.get_float32_matmul_precision() says."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def layout(*tensors: Tensor) -> tuple[Any, ...]:
    """All of tensors that a kernel can be compiled for, but their dtypes."""
    return tuple([(x.shape, x.stride(), x.data_ptr() % 16) for x in tensors])


class Setup(Starting):
    """What follows from the shapes, strides, dtypes and programs of one attention."""

    def __init__(self, p: Problem):
        super().__init__()
        self.program = p.program
        if len(p.sizes) > MAX_SIZES:
            raise ValueError(f"a program may use at most {MAX_SIZES} sizes; got {len(p.sizes)}")
        self.D, self.DV = p.q.shape[-1], p.v.shape[-1]
        self.itemsize = max(p.q.dtype.itemsize, p.v.dtype.itemsize)
        self.fast = self.itemsize < 4
        self.form: Form = form(p.program, not self.fast)
        self.ranks = tuple(c.dim() for c in p.captures)
        self.S = strides_and_sizes(p.captures)
        steps = zip(p.k.shape[2:-1], p.k.stride()[2:-1], p.v.stride()[2:-1], strict=True)
        self.rows = {
            "ROWS": lower.rows_function(p.program, self.ranks),
            "R": tuple(x for dim in steps for x in dim) if p.program.rows else (),
        }
        self.sizes = dict(zip(SIZES, [*p.sizes.values(), *[0] * (MAX_SIZES - len(p.sizes))], strict=True))
        self.common = dict(
            M=p.M, N=p.N, H=p.H, GROUP_K=p.group_k, GROUP_V=p.group_v, lines=p.B * p.H, exponent=self.form.exponent,
            EXACT=self.form.exact, PRECISION=precision(p.q.dtype), S=self.S, **self.sizes,
        )  # fmt: skip
        self.dropout = {
            "threshold": philox.threshold(p.dropout_p) - 2**31, "keep_scale": 1.0 / (1.0 - p.dropout_p),
            "DROPOUT": p.dropout_p > 0,
        }  # fmt: skip
        self.stream = max(self.D, self.DV) > configs.STREAM_ABOVE[self.itemsize]
        self.held = configs.STREAM_TILES[self.itemsize] if self.stream else max(self.D, self.DV)
        whole = all(configs.chunks(d) == (d,) for d in (self.D, self.DV))
        together = whole and not p.program.rows  # what is read by one descriptor
        self.hopper = together and self.fast and not self.stream and has_tma(p.q.device)
        self.post = self.value("post") if self.form.post is not None else None
        self.maps = Maps(self.form, p, self.S, self.sizes) if self.program.keep is not None else None
        self.kind = (p.q.device, p.program, self.D, self.DV, p.q.dtype, p.v.dtype, precision(p.q.dtype), p.tuning)
        self.descriptors: dict[Any, TensorDescriptor | None] = {}
        self.plans: dict[Any, tuple[Started, configs.Tile]] = {}
        self.exact_delta: dict[tuple[bool, ...], bool] = {}

    def value(self, which: str) -> Any:
        return lower.value_function(self.form, which, self.ranks, self.fast)

    def gradient(self, which: str, scatter: tuple[int, ...] = ()) -> Any:
        if which == "post" and self.form.post is None:
            return None
        return lower.gradient_function(self.form, which, self.ranks, scatter, self.fast)

    def dims(self, slices: int | None = None) -> dict[str, Any]:
        """Head-dimension arguments; `slices` is the dimension whose columns are shared out when streaming."""
        held, shared = {"D": self.D, "DV": self.DV, "STREAM": 0, "SLICES": 1}, -(-(slices or 1) // configs.STREAM_SLICE)
        if not self.stream:
            return held | {"CHUNKS": configs.chunks(self.D), "CHUNKS_V": configs.chunks(self.DV)}
        part = (configs.STREAM_SLICE,)
        return held | {"CHUNKS": part, "CHUNKS_V": part, "STREAM": configs.STREAM_CHUNK, "SLICES": shared}


def setup_of(p: Problem) -> Setup:
    key = (
        p.program, p.tuning, p.dropout_p, p.q.device, p.q.dtype, p.v.dtype, torch.get_float32_matmul_precision(),
        p.N, *p.sizes.values(), layout(p.q, p.k, p.v, *p.captures, *p.tile_map), tuple(c.dtype for c in p.captures),
    )  # fmt: skip
    found = _setups.get(key)
    if found is None:
        found = _setups[key] = Setup(p)
        if len(_setups) > REMEMBERED:
            _setups.popitem(last=False)
    return found


class Operands:
    """The arguments that every kernel of one attention shares."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        self.T = pointers(p.captures)
        self.made: dict[Any, Any] = {}  # the tile maps of this call
        self.again = False
        self.even: Shape | None = None  # of rows that tile maps are to tell from others
        self.uneven: Tensor | None = None  # which those are, once there is a tile map
        memory = p.memory
        if memory is None:
            self.setup = setup_of(p)
        else:
            found = memory.get("setup")
            if found is None:
                found = memory["setup"] = setup_of(p)
            self.setup = found

    def rows(self, tile: configs.Tile) -> dict[str, Any]:
        """The tile map for a kernel of query rows."""
        maps = self.setup.maps
        if maps is None:
            return NO_ROWS
        return maps.of_rows(tile, self)

    def columns(self, tile: configs.Tile, lse: Tensor, statistics: Tensor) -> dict[str, Any]:
        """The tile map for the kernel of keys."""
        maps = self.setup.maps
        if maps is None:
            return NO_COLUMNS
        return maps.of_columns(tile, self, lse, statistics)

    def descriptor(self, x: Tensor, rows: int, which: Any) -> TensorDescriptor | Tensor | None:
        """For the tensor memory accelerator to read `rows` rows of `x`; None without one, or where it cannot. `which`
        decides the layout of `x`, together with the setup. `x` itself for a kernel that is started `again`."""
        if self.again:
            return x
        known = self.setup.descriptors.get((which, rows), self)
        if known is self:
            known = self.setup.descriptors[which, rows] = describe(x, rows) if self.setup.hopper else None
        return None if known is None else based(known, x)


def describe(x: Tensor, rows: int) -> TensorDescriptor | None:
    shape, strides, size = list(x.shape), list(x.stride()), x.dtype.itemsize
    outer = all(s * size % 16 == 0 and (n == 1 or s) for n, s in zip(shape[:3], strides[:3], strict=True))
    if strides[3] != 1 or x.data_ptr() % 16 or not outer:
        return None
    return based(TensorDescriptor(x, shape, strides, [1, 1, rows, shape[3]]), None)


@functools.cache
def has_tma(device: torch.device) -> bool:
    if device.type != "cuda":
        return interpreting()
    return torch.cuda.get_device_capability(device) >= (9, 0)


def strides(**tensors: Tensor) -> dict[str, int]:
    """q=… -> q_b, q_h, q_m, q_d; keys and values (k, v, dk, dv) name their rows n, those of pages too."""
    found: dict[str, int] = {}
    for name, x in tensors.items():
        axes = "bhnd" if name in ("k", "v", "dk", "dv") else "bhmd"
        outer_and_inner = x.stride()[:2] + x.stride()[-2:]
        found |= {f"{name}_{axis}": stride for axis, stride in zip(axes, outer_and_inner, strict=True)}
    return found
