"""torch.ops.torchflash.attention and its explicit backward: schema, checks, shapes and strides, dispatch.

    s = q · k over D      x = score(s, b, h, m, n, …)      p = softmax over n of x      out = Σ_n post(p) · dropout · v

q [B, H, M, D], k [B, Hk, N, D], v [B, Hv, N, Dv] with any strides; head h of q uses head h // (H // Hk) of k and h //
(H // Hv) of v. `score`, `keep` and `post` are programs (torchflash/score.py) over the `captures` t0 t1 … and `sizes`
z0 z1 …. `tuning` says how to run, not what to compute (torchflash/kernels/tuning.py); "" leaves it to us. `tile_map`
is what torch.ops.torchflash.tile_map (mask.py) gives for the mask of these very programs, captures and sizes, or empty.

With `rows`, keys and values are read where they lie, as in a paged cache (torchflash/kernels/rows.py): k [B, Hk, R, D]
or [B, Hk, pages, page, D], v likewise, and key n of batch b at one or two indices, as k[t0[b, n // 16], n % 16];
`keys` says how many there are. They are copied where a gradient is needed, and only there.

Strides of the results, the same for real and fake tensors:
    out        [B, H, M, Dv] contiguous ("bhmd"), or contiguous as [B, M, H, Dv] and viewed as [B, H, M, Dv] ("bmhd")
    lse        [2, B, H, M] contiguous, float32: the row maximum of x, and Σ exp(x - maximum)
    dq dk dv   contiguous, or contiguous as [B, L, heads, D] where the operand's heads lie closer together than its rows
    dcaptures  contiguous
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchflash.kernels import program as programs
from torchflash.kernels import reference, replay, unfused
from torchflash.kernels import tuning as tunings
from torchflash.kernels.mask import KEYS, ORDER_KEYS, ROWS
from torchflash.kernels.memory import empty_strided
from torchflash.kernels.rows import gather
from torchflash.score import Expr

LAYOUTS = ("bhmd", "bmhd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

library = torch.library.Library("torchflash", "DEF")
library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] captures, SymInt[] sizes, str score, str keep, float fill, "
    "str post, float dropout_p, Tensor? seed, str layout, str rows, SymInt? keys, str tuning, Tensor[] tile_map) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),  # those of the results follow from them
)
library.define(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] captures, "
    "SymInt[] sizes, bool[] need, str score, str keep, float fill, str post, float dropout_p, Tensor? seed, "
    "str tuning, Tensor[] tile_map) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dcaptures)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),  # those of the results follow from them
)


# -------------------------------------------------------------------------------------------------------------- checks


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    dropout_p: float,
    seed: Tensor | None,
    rows: Sequence[Expr],
    keys: int | None,
) -> None:
    if q.dim() != 4 or not k.dim() == v.dim() == 3 + max(1, len(rows)):
        pages = ", k and v with two indices of rows [batch, heads, pages, page, dim]" if len(rows) == 2 else ""
        raise ValueError(
            f"torchflash::attention: q, k and v must be [batch, heads, length, dim]{pages}; got {_shapes(q, k, v)}"
        )
    if (keys is None) != (not rows):
        raise ValueError(f"torchflash::attention: rows and keys go together; got {len(rows)} indices, {keys} keys")
    (B, H, _, D), (Bk, Hk, *N, Dk), (Bv, Hv, *Nv, _) = q.shape, k.shape, v.shape
    if keys and not all(N):
        raise IndexError(f"torchflash::attention: {keys} keys in a cache without rows; got {_shapes(q, k, v)}")
    wrong = [
        ("batch sizes must agree", not B == Bk == Bv),
        ("q and k must have one dim", D != Dk),
        ("k and v must have one length", N != Nv),
        ("the heads of k must divide those of q", H and (not Hk or H % Hk)),
        ("the heads of v must divide those of q", H and (not Hv or H % Hv)),
    ]
    if said := ", ".join(what for what, so in wrong if so):
        raise ValueError(f"torchflash::attention: {said}; got {_shapes(q, k, v)}")
    dtype, device = q.dtype, q.device
    if k.dtype != dtype or dtype not in DTYPES or v.dtype not in DTYPES:
        raise TypeError(
            "torchflash::attention: q and k must have one dtype, all of float16, bfloat16, float32; "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    elsewhere = k.device != device or v.device != device or (seed is not None and seed.device != device)
    for c in captures:
        elsewhere = elsewhere or (c.device != device and c.dim() > 0)
    if elsewhere:
        raise ValueError(f"torchflash::attention: every tensor must be on the device of q, {device}; move it there")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"torchflash::attention: dropout_p must be in [0, 1]; got {dropout_p}")
    if dropout_p and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError("torchflash::attention: dropout needs a seed, an int64 tensor of one element")


def _check_tile_map(p: reference.Problem) -> None:
    tile_map, M, N = p.tile_map, p.M, p.N
    if not tile_map:
        return
    lines = tile_map[0].shape[:2]
    states, rows = ((*lines, -(-M // ROWS), -(-N // KEYS)), torch.int8), ((*lines, M), torch.int8)
    order = [((*lines, 1, n), torch.int32) for n in (-(-N // ORDER_KEYS), 2)]
    fits = len(lines) == 2 and lines[0] in (1, p.B) and lines[1] in (1, p.H)
    fits = fits and all(x.device == p.q.device for x in tile_map)
    if not fits or [(tuple(x.shape), x.dtype) for x in tile_map] not in ([states], [states, rows], [states, *order]):
        raise ValueError(
            f"torchflash::attention: tile_map must be what torchflash::tile_map gives for {M} queries and {N} keys, or "
            f"empty; got {[f'{x.dtype} {list(x.shape)} on {x.device}' for x in tile_map]}"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


# ------------------------------------------------------------------------------------------------- results and strides


def _empty_out(q: Tensor, v: Tensor, layout: str) -> Tensor:
    B, H, M, _ = q.shape
    D = v.shape[-1]
    if layout == "bhmd":
        return empty_strided(v, (B, H, M, D), (H * M * D, M * D, D, 1), v.dtype)
    if layout == "bmhd":
        return empty_strided(v, (B, H, M, D), (M * H * D, D, H * D, 1), v.dtype)
    raise ValueError(f"torchflash::attention: unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")


def _empty_lse(q: Tensor) -> Tensor:
    B, H, M, _ = q.shape
    return empty_strided(q, (2, B, H, M), (B * H * M, H * M, M, 1), torch.float32)


def _empty_gradient(x: Tensor) -> Tensor:
    B, H, L, D = x.shape
    _, step_h, step_l, _ = x.stride()
    if H != 1 and L != 1 and step_h < step_l:
        return empty_strided(x, (B, H, L, D), (L * H * D, D, H * D, 1), x.dtype)
    return empty_strided(x, (B, H, L, D), (H * L * D, L * D, D, 1), x.dtype)


# ------------------------------------------------------------------------------------------------------ implementation


def _kernels_for(q: Tensor, v: Tensor) -> Any | None:
    """The Triton implementation where it can run on these operands, else None: blockwise torch."""
    device = q.device
    if not q.shape[-1] or not v.shape[-1]:
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        return None  # and triton is not imported
    return _launch(device)


@functools.cache
def _launch(device: torch.device) -> Any | None:
    try:
        from torchflash.kernels import launch
    except ImportError:
        return None
    return launch if launch.supports(device) else None


REMEMBERED = 2048
_known: OrderedDict[Any, reference.Problem] = OrderedDict()  # without its tensors


def _unfused(p: reference.Problem) -> bool:
    memory = p.memory
    if memory is None or not p.q.is_cuda:
        return unfused.faster((p.B, p.H, p.M, p.N), p.q.device, p.q.dtype.itemsize, p.tuning)
    deterministic = torch.are_deterministic_algorithms_enabled()
    found: bool | None = memory.get(deterministic)
    if found is None:
        found = memory[deterministic] = unfused.faster((p.B, p.H, p.M, p.N), p.q.device, p.q.dtype.itemsize, p.tuning)
    return found


def _like(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    texts: tuple[str, str, float, str],
    dropout_p: float,
    seed: Tensor | None,
    tuning: str,
    tile_map: Sequence[Tensor],
    rows: str = "",
    keys: int | None = None,
) -> tuple[reference.Problem, list[Tensor]]:
    """The problem without its tensors, checked, and the captures on its device. What does not depend on the contents of
    tensors is found out once."""
    on = q.get_device()
    here = [c if c.get_device() == on else c.to(q.device) for c in captures]
    key = (
        texts, rows, keys, dropout_p, tuning, torch._C._get_float32_matmul_precision(), *sizes, _described(q),
        _described(k), _described(v), *[_described(c) for c in (*captures, *tile_map)], len(tile_map),
        None if seed is None else _described(seed),
    )  # fmt: skip
    known = _known.get(key)
    if known is None:
        program = programs.read(*texts, tuple([_kind(c.dtype) for c in captures]), rows)
        _check(q, k, v, captures, dropout_p, seed, program.rows, keys)
        made = reference.Problem(q, k, v, here, sizes, program, dropout_p, seed, tunings.read(tuning), keys, tile_map)
        _check_tile_map(made)
        made.memory = {}
        known = _known[key] = made.like(None, None, None, [], None)
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
    return known, here


def _way(q: Tensor, *key: Any) -> Any:
    """What decides, together with a problem, which kernels a call launches; None where that is not remembered."""
    if not q.is_cuda:
        return None
    main_stream = not torch._C._cuda_getCurrentRawStream(q.get_device())
    return *key, main_stream, torch.are_deterministic_algorithms_enabled()


def _recorded(problem: reference.Problem, way: Any, tensors: Sequence[Tensor], call: Callable[[], Any]) -> Any:
    memory = problem.memory
    return call() if way is None or memory is None else replay.record(memory, way, tensors, call)


def _replayed(problem: reference.Problem, way: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels of an earlier call have been launched on these tensors."""
    found = problem.memory.get(way) if way is not None and problem.memory is not None else None
    return type(found) is replay.Replay and found.run(tensors)


def _described(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15


@functools.cache
def _kind(dtype: torch.dtype) -> str:
    return programs.kinds_of([torch.empty(0, dtype=dtype)])[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], score: str, keep: str, fill: float,
    post: str, dropout_p: float, seed: Tensor | None, layout: str, rows: str, keys: int | None, tuning: str,
    tile_map: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    texts = (score, keep, fill, post)
    known, here = _like(q, k, v, captures, sizes, texts, dropout_p, seed, tuning, tile_map, rows, keys)
    out, lse = _empty_out(q, v, layout), _empty_lse(q)
    way, tensors = _way(q, "forward", layout), (q, k, v, out, lse, *here, *tile_map, *(() if seed is None else (seed,)))
    if _replayed(known, way, tensors):
        return out, lse
    problem = known.like(q, k, v, here, seed, tile_map)
    if not known.N or not lse.numel() or dropout_p == 1.0:
        return out.zero_(), lse.fill_(0.0 if known.N else -torch.inf)
    if _unfused(problem):
        unfused.forward(problem, out, lse)
        return out, lse
    kernels = _kernels_for(q, v)
    if kernels is None or not _recorded(problem, way, tensors, lambda: kernels.forward(problem, out, lse)):
        reference.forward(problem, out, lse)
    return out, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: list[Tensor], sizes: list[int],
    need: list[bool], score: str, keep: str, fill: float, post: str, dropout_p: float, seed: Tensor | None,
    tuning: str, tile_map: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    known, here = _like(q, k, v, captures, sizes, (score, keep, fill, post), dropout_p, seed, tuning, tile_map)
    dq, dk, dv = map(_empty_gradient, (q, k, v))
    way = _way(q, "backward", _described(do), _described(out), *need)
    tensors = (q, k, v, do, out, lse, dq, dk, dv, *here, *tile_map, *(() if seed is None else (seed,)))
    if _replayed(known, way, tensors):
        return dq, dk, dv, []
    problem = known.like(q, k, v, here, seed, tile_map)
    wanted = [c for c, n in zip(captures, need, strict=True) if n]
    if not k.shape[2] or not lse.numel() or dropout_p == 1.0:
        return (
            dq.zero_(),
            dk.zero_(),
            dv.zero_(),
            [torch.zeros(c.shape, dtype=c.dtype, device=c.device) for c in wanted],
        )
    gradients = None
    if _unfused(problem):
        gradients = unfused.backward(problem, do, out, lse, dq, dk, dv, need)
    elif (kernels := _kernels_for(q, v)) is not None:
        gradients = _recorded(
            problem, way, tensors, lambda: kernels.backward(problem, do, out, lse, dq, dk, dv, need)
        )
        if gradients is None:  # on the statistics of its own forward, whose scores are rounded in the same way
            out, lse = torch.empty_like(out), torch.empty_like(lse)
            reference.forward(problem, out, lse)
    if gradients is None:
        gradients = reference.backward(problem, do, out, lse, dq, dk, dv, need)
    return dq, dk, dv, [g.to(c.device) for g, c in zip(gradients, wanted, strict=True)]


def _past_dispatcher(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as code that Inductor compiled calls it, past the dispatcher, which costs the host as much as the launch of
    a kernel. Not where somebody listens: a profiler, a mode that sees every op, autocast, forward-mode derivatives."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if (
            torch._C._len_torch_dispatch_stack()
            or forward_ad._current_level >= 0
            or torch.autograd._profiler_enabled()
            or torch._C._is_any_autocast_enabled()
        ):
            return op(*args)
        return function(*args)

    return call


def _exact(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast must not reach the float32 arithmetic inside: what the op computes depends on its arguments alone."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return kernel(*args)

    return run


for _key in ("CPU", "CUDA"):
    library.impl("attention", _exact(_forward), _key)
    library.impl("attention_backward", _exact(_backward), _key)


@torch.library.register_fake("torchflash::attention", lib=library)
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], score: str, keep: str, fill: float,
    post: str, dropout_p: float, seed: Tensor | None, layout: str, rows: str, keys: int | None, tuning: str,
    tile_map: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_out(q, v, layout), _empty_lse(q)


@torch.library.register_fake("torchflash::attention_backward", lib=library)
def _backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: list[Tensor], sizes: list[int],
    need: list[bool], score: str, keep: str, fill: float, post: str, dropout_p: float, seed: Tensor | None,
    tuning: str, tile_map: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dq, dk, dv = map(_empty_gradient, (q, k, v))
    return dq, dk, dv, [c.new_empty(c.shape) for c, n in zip(captures, need, strict=True) if n]


# ------------------------------------------------------------------------------------------------------------ autograd
PLAIN = "write this attention in plain torch and keep it out of torch.compile"  # whoever made the op

# By hand: torch.library.register_autograd does the same for any schema, at several times the launch of a kernel.

_guard, _no_autocast = torch._C._AutoDispatchBelowAutograd, torch._C._DisableAutocast
_ends: dict[int, bool] = {}  # keysets, as numbers: whether nothing but the implementation comes after autograd


def _ends_here(keyset: Any) -> bool:
    """Whether the dispatcher would go from autograd straight to CPU or CUDA: no mode, subclass or transform in it."""
    number = keyset.raw_repr()
    found = _ends.get(number)
    if found is None:
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        real = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
        found = _ends[number] = below.highestPriorityTypeId() in real
    return found


def _forward_below(keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    if _ends_here(keyset):
        with _guard(), _no_autocast():
            return _forward(*args)
    with _guard():
        return torch.ops.torchflash.attention.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _backward_below(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if _ends_here(keyset):
        with _guard(), _no_autocast():
            return _backward(*args)
    with _guard():
        op = torch.ops.torchflash.attention_backward.default
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


class _Attention(torch.autograd.Function):
    """`captures` come one by one, as autograd sees no tensors inside a list."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, rest: Any, *captures: Tensor
    ) -> tuple[Tensor, Tensor]:
        sizes, score, keep, fill, post, dropout_p, *how = rest
        out, lse = _forward_below(
            keyset, q, k, v, list(captures), sizes, score, keep, fill, post, dropout_p, seed, *how
        )
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, seed, *captures, *how[-1])
        ctx.rest, ctx.captures = rest[:-1], len(captures)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, seed, *both = ctx.saved_tensors
        captures, tile_map = both[: ctx.captures], both[ctx.captures :]
        sizes, score, keep, fill, post, dropout_p, _layout, _rows, _keys, tuning = ctx.rest
        need = list(ctx.needs_input_grad[6:])
        if do is None:
            return (None,) * (6 + len(captures))
        dq, dk, dv, dcaptures = torch.ops.torchflash.attention_backward.default(
            do, q, k, v, out, lse, captures, sizes, need, score, keep, fill, post, dropout_p, seed, tuning, tile_map
        )
        found = iter(dcaptures)
        return None, dq, dk, dv, None, None, *(next(found) if n else None for n in need)


class _Backward(torch.autograd.Function):
    """There so that a second derivative is an error and not silently 0."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv, dcaptures = run()
        return dq, dk, dv, *dcaptures

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"torchflash: attention has no second derivative; to have one, {PLAIN}"
        )


def _forward_autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    if forward_ad._current_level >= 0:
        _refuse_tangents(*args[:3], *args[3])
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(f"torchflash: attention does not run inside transforms of torch.func; {PLAIN}")
        q, k, v, captures, *rest = _contiguous(*args)
        seed = rest.pop(6)
        return _Attention.apply(keyset, q, k, v, seed, rest, *captures)
    return _forward_below(keyset, *args)


def _contiguous(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], score: str, keep: str, fill: float,
    post: str, dropout_p: float, seed: Tensor | None, layout: str, rows: str, keys: int | None, *how: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The same arguments with keys and values in their order, by operations that autograd knows."""
    if keys is not None:
        kinds = tuple([_kind(c.dtype) for c in captures])
        at = programs.read(score, keep, fill, post, kinds, rows).rows
        named = {f"z{i}": size for i, size in enumerate(sizes)}
        k, v = (
            gather(x, at, captures, named, slice(0, x.shape[0]), slice(0, x.shape[1]), slice(0, keys)) for x in (k, v)
        )
    return q, k, v, captures, sizes, score, keep, fill, post, dropout_p, seed, layout, "", None, *how


def _backward_autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        dq, dk, dv, *dcaptures = _Backward.apply(lambda: _backward_below(keyset, *args), *args[:6], *args[6])
        return dq, dk, dv, dcaptures
    return _backward_below(keyset, *args)


library.impl("attention", _forward_autograd, "Autograd", with_keyset=True)
library.impl("attention_backward", _backward_autograd, "Autograd", with_keyset=True)


def _refuse_tangents(*tensors: Tensor) -> None:
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            f"torchflash: attention has no forward-mode derivative; to have one, {PLAIN}"
        )


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(
        f"torchflash: torch.vmap over attention is not supported; make its dim a leading dim of q, k and v, or {PLAIN}"
    )


torch.library.register_vmap("torchflash::attention", _refuse_vmap, lib=library)
torch.library.register_vmap("torchflash::attention_backward", _refuse_vmap, lib=library)

for _packet, _function in (
    (torch.ops.torchflash.attention, _forward),
    (torch.ops.torchflash.attention_backward, _backward),
):
    # an attribute of the op, so that compiled code finds it wherever it finds the op
    setattr(_packet, "compiled", _past_dispatcher(_packet.default, _function))  # noqa: B010

__all__ = ["library"]
