"""The oracle and the error budget of every numerical test of attention.

Oracle: the same programs evaluated eagerly in float64, differentiated by autograd. Budget: at most twice the error
that eager PyTorch itself makes in the operands' dtype, with a floor for what is nearly exact or nearly zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import torchflash.kernels
from torchflash import score as sc
from torchflash.kernels import philox

INF = float("inf")


@dataclass
class Inputs:
    """The arguments of one attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    captures: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    score: str = "0.25 * s"
    keep: str = ""
    fill: float = -INF
    post: str = "p"
    dropout_p: float = 0.0
    seed: Tensor | None = None
    layout: str = "bhmd"
    tuning: str = "min_seqlen=0"  # fused at every length
    rows: str = ""
    keys: int | None = None
    tile_map: list[Tensor] = field(default_factory=list)

    def leaves(self) -> list[Tensor]:
        """What gets a gradient: q, k, v and the float captures."""
        return [self.q, self.k, self.v, *(c for c in self.captures if c.is_floating_point())]

    def names(self) -> list[str]:
        return ["q", "k", "v", *(f"t{i}" for i, c in enumerate(self.captures) if c.is_floating_point())]


def run_op(x: Inputs) -> Tensor:
    out, _ = torch.ops.torchflash.attention(
        x.q, x.k, x.v, x.captures, x.sizes, x.score, x.keep, x.fill, x.post, x.dropout_p, x.seed, x.layout, x.rows,
        x.keys, x.tuning, x.tile_map,
    )  # fmt: skip
    return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def eager(x: Inputs, dtype: torch.dtype | None = None) -> Tensor:
    """Attention as written by hand. `dtype`: of everything; None: products in the operands' dtypes, the rest in
    float32."""
    program = torch.float32 if dtype is None else dtype
    with default_dtype(program):
        q, k, v = (t if dtype is None else t.to(dtype) for t in (x.q, x.k, x.v))
        captures = [c.to(dtype) if dtype is not None and c.is_floating_point() else c for c in x.captures]
        if x.keys is not None:
            k, v = (in_order(t, x) for t in (k, v))
        (B, H, M, _), N = q.shape, k.shape[2]
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))

        def index(size: int) -> Tensor:
            return torch.arange(size, device=q.device)

        env: dict[str, Any] = {f"z{i}": z for i, z in enumerate(x.sizes)}
        env |= {"b": index(B)[:, None, None, None], "h": index(H)[:, None, None], "m": index(M)[:, None], "n": index(N)}
        s = (q @ k.mT).to(program)
        scores = sc.evaluate(sc.parse(x.score), {**env, "s": s}, captures, program)
        p = torch.softmax(torch.as_tensor(scores, device=q.device).to(program).expand(s.shape), -1)
        w = sc.evaluate(sc.parse(x.post), {**env, "p": p}, captures, program)
        if x.dropout_p:
            w = w * philox.scale(x.dropout_p, x.seed, (env["b"] * H + env["h"]) * M + env["m"], env["n"])
        return w.to(v.dtype) @ v


def in_order(t: Tensor, x: Inputs) -> Tensor:
    """The keys or values of a cache in their order, [B, heads, keys, D]."""
    assert x.keys is not None
    at, sizes = sc.parse(x.rows).args, {f"z{i}": z for i, z in enumerate(x.sizes)}
    found = []
    for b in range(t.shape[0]):
        names = {**sizes, "b": torch.tensor(b), "n": torch.arange(x.keys)}
        found.append(t[(b, slice(None), *(sc.evaluate(i, names, x.captures) for i in at))])
    return torch.stack(found)


def gradients(out: Tensor, leaves: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, do, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def check(x: Inputs, do: Tensor | None = None, op: Any = run_op, slack: float = 1.0) -> None:
    """The op on `x` against the oracle: output and every gradient within the budget."""
    for leaf in x.leaves():
        leaf.requires_grad_()
    out = op(x)
    do = torch.randn(out.shape, device=out.device).to(out.dtype) if do is None else do
    got = [out, *torch.autograd.grad(out, x.leaves(), do, allow_unused=True)]
    exact_out = eager(x, torch.float64)
    exact = [exact_out, *gradients(exact_out, x.leaves(), do.double())]
    rough_out = eager(x)
    rough = [rough_out, *gradients(rough_out, x.leaves(), do)]
    for name, a, b, c in zip(["out", *(f"d{n}" for n in x.names())], got, exact, rough, strict=True):
        unused = a is None and not b.count_nonzero()
        assert a is not None or unused, f"{name} is missing"
        if a is not None:
            # What reaches a captured tensor is a long sum, and delta's rounding is one error in a whole row of it.
            within_budget(name, a, b, c, slack * (4 if name.startswith("dt") else 1))


def within_budget(name: str, got: Tensor, exact: Tensor, rough: Tensor, slack: float = 1.0) -> None:
    assert got.shape == exact.shape and got.dtype == rough.dtype, f"{name}: {got.shape} {got.dtype}"
    a, b, c = (t.detach().double() for t in (got, exact, rough))
    assert torch.equal(a.isnan(), b.isnan()), (
        f"{name}: NaN in {int((a.isnan() != b.isnan()).sum())} places of {a.numel()}"
    )
    a, b, c = (t[~b.isnan()] for t in (a, b, c))
    if not a.numel():
        return
    error, own = (float((t - b).nan_to_num(0.0).abs().max()) for t in (a, c))
    ulps = 8 if got.dtype == torch.float32 else 2  # of the largest element: sums in another order differ by that
    floor = ulps * torch.finfo(got.dtype).eps * max(float(b.abs().max()), 1.0)
    budget = slack * max(2 * own, floor)
    assert error <= budget, f"{name}: error {error:.3g}, eager's own {own:.3g}, budget {budget:.3g}"


assert torchflash.kernels  # registers the op
