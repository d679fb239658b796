"""torch.ops.torchflash.attention and its explicit backward: schema, checks, shapes and strides, dispatch.

    s = q · k over D      x = score(s, b, h, m, n, …)      p = softmax over n of x      out = Σ_n post(p) · dropout · v

q [B, H, M, D], k [B, Hk, N, D], v [B, Hv, N, Dv] with any strides; head h of q uses head h // (H // Hk) of k and h //
(H // Hv) of v. `score`, `keep` and `post` are programs (torchflash/score.py) over the `captures` t0 t1 … and `sizes`
z0 z1 …. `tuning` says how to run, not what to compute (torchflash/kernels/tuning.py); "" leaves it to us.

Strides of the results, the same for real and fake tensors:
    out        [B, H, M, Dv] contiguous ("bhmd"), or contiguous as [B, M, H, Dv] and viewed as [B, H, M, Dv] ("bmhd")
    lse        [2, B, H, M] contiguous, float32: the row maximum of x, and Σ exp(x - maximum)
    dq dk dv   contiguous, or contiguous as [B, L, heads, D] where the operand's heads lie closer together than its rows
    dcaptures  contiguous
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchflash.kernels import program as programs
from torchflash.kernels import reference, unfused
from torchflash.kernels import tuning as tunings

LAYOUTS = ("bhmd", "bmhd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

library = torch.library.Library("torchflash", "DEF")
library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] captures, SymInt[] sizes, str score, str keep, float fill, "
    "str post, float dropout_p, Tensor? seed, str layout, str tuning) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] captures, "
    "SymInt[] sizes, bool[] need, str score, str keep, float fill, str post, float dropout_p, Tensor? seed, "
    "str tuning) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dcaptures)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# -------------------------------------------------------------------------------------------------------------- checks


def _check(q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], dropout_p: float, seed: Tensor | None) -> None:
    def shapes() -> str:
        return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"

    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"torchflash::attention: q, k and v must be [batch, heads, length, dim]; got {shapes()}")
    (B, H, _, D), (Bk, Hk, N, Dk), (Bv, Hv, Nv, _) = q.shape, k.shape, v.shape
    if not (B == Bk == Bv and D == Dk and N == Nv):
        raise ValueError(
            "torchflash::attention: batch sizes must agree, q and k must have one dim, k and v one length; "
            f"got {shapes()}"
        )
    if H and (not Hk or not Hv or H % Hk or H % Hv):
        raise ValueError(f"torchflash::attention: the heads of k and of v must divide those of q; got {shapes()}")
    if q.dtype != k.dtype or any(x.dtype not in DTYPES for x in (q, k, v)):
        raise TypeError(
            "torchflash::attention: q and k must have one dtype, all of float16, bfloat16, float32; "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    others = [k, v, *(c for c in captures if c.dim()), *([seed] if seed is not None else [])]
    if any(x.device != q.device for x in others):
        raise ValueError(f"torchflash::attention: every tensor must be on the device of q, {q.device}; move it there")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"torchflash::attention: dropout_p must be in [0, 1]; got {dropout_p}")
    if dropout_p and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError("torchflash::attention: dropout needs a seed, an int64 tensor of one element")


# ------------------------------------------------------------------------------------------------- results and strides


def _empty_out(q: Tensor, v: Tensor, layout: str) -> Tensor:
    B, H, M, _ = q.shape
    if layout == "bhmd":
        return v.new_empty((B, H, M, v.shape[-1]))
    if layout == "bmhd":
        return v.new_empty((B, M, H, v.shape[-1])).transpose(1, 2)
    raise ValueError(f"torchflash::attention: unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty((2, *q.shape[:3]), dtype=torch.float32)


def _empty_gradient(x: Tensor) -> Tensor:
    B, H, L, D = x.shape
    if H != 1 and L != 1 and x.stride(1) < x.stride(2):
        return x.new_empty((B, L, H, D)).transpose(1, 2)
    return x.new_empty((B, H, L, D))


# ------------------------------------------------------------------------------------------------------ implementation


def _kernels_for(q: Tensor, v: Tensor) -> Any | None:
    """The Triton implementation where it can run on these operands, else None: blockwise torch."""
    if not q.shape[-1] or not v.shape[-1]:
        return None
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        return None  # and triton is not imported
    try:
        from torchflash.kernels import launch
    except ImportError:
        return None
    return launch if launch.supports(q.device) else None


def _unfused(p: reference.Problem) -> bool:
    return unfused.faster((p.B, p.H, p.M, p.N), p.q.device, p.q.dtype.itemsize, p.tuning)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    texts: tuple[str, str, float, str],
    dropout_p: float,
    seed: Tensor | None,
    tuning: str,
) -> reference.Problem:
    _check(q, k, v, captures, dropout_p, seed)
    program = programs.read(*texts, programs.kinds_of(captures))
    here = [c if c.device == q.device else c.to(q.device) for c in captures]
    return reference.Problem(q, k, v, here, sizes, program, dropout_p, seed, tunings.read(tuning))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], score: str, keep: str, fill: float,
    post: str, dropout_p: float, seed: Tensor | None, layout: str, tuning: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = _problem(q, k, v, captures, sizes, (score, keep, fill, post), dropout_p, seed, tuning)
    out, lse = _empty_out(q, v, layout), _empty_lse(q)
    if not k.shape[2] or not lse.numel() or dropout_p == 1.0:
        return out.zero_(), lse.fill_(0.0 if k.shape[2] else -torch.inf)
    if _unfused(problem):
        unfused.forward(problem, out, lse)
        return out, lse
    kernels = _kernels_for(q, v)
    if kernels is None or not kernels.forward(problem, out, lse):
        reference.forward(problem, out, lse)
    return out, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: list[Tensor], sizes: list[int],
    need: list[bool], score: str, keep: str, fill: float, post: str, dropout_p: float, seed: Tensor | None,
    tuning: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    problem = _problem(q, k, v, captures, sizes, (score, keep, fill, post), dropout_p, seed, tuning)
    dq, dk, dv = map(_empty_gradient, (q, k, v))
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
        gradients = kernels.backward(problem, do, out, lse, dq, dk, dv, need)
    if gradients is None:
        gradients = reference.backward(problem, do, out, lse, dq, dk, dv, need)
    return dq, dk, dv, [g.to(c.device) for g, c in zip(gradients, wanted, strict=True)]


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
    post: str, dropout_p: float, seed: Tensor | None, layout: str, tuning: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_out(q, v, layout), _empty_lse(q)


@torch.library.register_fake("torchflash::attention_backward", lib=library)
def _backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: list[Tensor], sizes: list[int],
    need: list[bool], score: str, keep: str, fill: float, post: str, dropout_p: float, seed: Tensor | None,
    tuning: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dq, dk, dv = map(_empty_gradient, (q, k, v))
    return dq, dk, dv, [c.new_empty(c.shape) for c, n in zip(captures, need, strict=True) if n]


# ------------------------------------------------------------------------------------------------------------ autograd


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captures, sizes, score, keep, fill, post, dropout_p, seed, _, tuning = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, seed, *captures)
    ctx.rest = (list(sizes), score, keep, fill, post, dropout_p, tuning)


def _autograd(ctx: Any, do: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, seed, *captures = ctx.saved_tensors
    sizes, score, keep, fill, post, dropout_p, tuning = ctx.rest
    need = [bool(n) for n in ctx.needs_input_grad[3]] if captures else []
    nothing: tuple[Any, ...] = ([] if not sizes else None, *[None] * 8)
    if do is None:
        return None, None, None, [None] * len(captures), *nothing
    dq, dk, dv, dcaptures = torch.ops.torchflash.attention_backward(
        do, q, k, v, out, lse, captures, sizes, need, score, keep, fill, post, dropout_p, seed, tuning
    )
    found = iter(dcaptures)
    return dq, dk, dv, [next(found) if n else None for n in need], *nothing


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "torchflash: attention has no second derivative; leave that block out of torch.compile to compute one"
    )


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(
        "torchflash: torch.vmap over a rewritten attention is not supported; apply vmap before compiling"
    )


torch.library.register_autograd("torchflash::attention", _autograd, setup_context=_setup, lib=library)
torch.library.register_autograd("torchflash::attention_backward", _refuse_double_backward, lib=library)
torch.library.register_vmap("torchflash::attention", _refuse_vmap, lib=library)
torch.library.register_vmap("torchflash::attention_backward", _refuse_vmap, lib=library)

__all__ = ["library"]
