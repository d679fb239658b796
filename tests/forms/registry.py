"""Attention as people write it: the registry of forms, and the check that holds each to eager PyTorch.

    @form(blocks=2)                    two attention blocks inside, each must be rewritten
    @form(skip="softmax_axis")         none may be; the report says why ("*": any reason)
    @form(skip_training="*")           rewritten in inference only
    def over_heads(g):                 g makes inputs; returns (function or module, positional inputs)
        return (lambda q, k, v: sc(q, k).softmax(1) @ v), g.qkv()

Every form must give eager's output and gradients, rewritten or not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from torchflash import Rewritten, Skipped
from torchflash.backend import torchflash

NEG = float("-inf")
SLACK = 2.0  # of the budget: sums over everything, of a few numbers, are as lucky as they are


class Gen:
    """Makes reproducible inputs; floating ones need gradients unless told otherwise."""

    def __init__(self, dtype: torch.dtype = torch.float32, B: int = 2, H: int = 4, S: int = 13, D: int = 8) -> None:
        self.dtype, self.B, self.H, self.S, self.D = dtype, B, H, S, D
        self.rng = torch.Generator().manual_seed(0)

    def r(self, *shape: int, grad: bool = True, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.rng) * scale).to(dtype or self.dtype).requires_grad_(grad)

    def qkv(self, n: int | None = None, hk: int | None = None, dv: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, S, D], [B, hk, n, D], [B, hk, n, dv]"""
        n, hk, dv = n or self.S, hk or self.H, dv or self.D
        return self.r(self.B, self.H, self.S, self.D), self.r(self.B, hk, n, self.D), self.r(self.B, hk, n, dv)

    def bsd(self, n: int | None = None) -> tuple[Tensor, ...]:
        """q, k, v as [B, S, H, D]"""
        return tuple(self.r(self.B, x, self.H, self.D) for x in (self.S, n or self.S, n or self.S))

    def keep(self, *shape: int, p: float = 0.7) -> Tensor:
        """A random mask, True = keep; every row keeps its first key."""
        mask = torch.rand(*shape, generator=self.rng) < p
        mask[..., 0] = True
        return mask

    def padding(self, n: int | None = None, whole: bool = False) -> Tensor:
        """[B, n], True = keep; `whole`: the second batch keeps nothing."""
        n = n or self.S
        lengths = torch.tensor([n - 3, 0 if whole else n // 2] + [n] * (self.B - 2))[: self.B]
        return torch.arange(n)[None] < lengths[:, None]

    def x(self, n: int | None = None) -> Tensor:
        """Hidden states [B, n, H * D]."""
        return self.r(self.B, n or self.S, self.H * self.D)

    def w(self, *shape: int) -> Tensor:
        """A weight matrix."""
        return self.r(*shape, scale=shape[0] ** -0.5)

    def module(self, m: nn.Module) -> nn.Module:
        with torch.no_grad():
            for p in m.parameters():
                p.copy_(torch.randn(p.shape, generator=self.rng) * 0.5 / math.sqrt(max(p.shape[-1], 1)))
        return m.to(self.dtype)


@dataclass(frozen=True)
class Form:
    name: str
    make: Callable[[Gen], tuple[Any, Sequence[Any]]]
    blocks: int = 1
    skip: str = ""
    skip_training: str = ""
    random: bool = False
    fullgraph: bool = True


FORMS: dict[str, Form] = {}


def form(
    blocks: int = 1, skip: str = "", skip_training: str = "", random: bool = False, fullgraph: bool = True
) -> Callable[[Any], Any]:
    """Registers a form. `random`: draws random numbers, so that its values are not compared."""

    def register(f: Any) -> Any:
        assert f.__name__ not in FORMS, f.__name__
        FORMS[f.__name__] = Form(f.__name__, f, 0 if skip else blocks, skip, skip_training, random, fullgraph)
        return f

    return register


def sc(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores."""
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def lowest(t: Tensor) -> float:
    return torch.finfo(t.dtype).min


def make(f: Form, dtype: torch.dtype = torch.float32, **size: int) -> tuple[Any, Sequence[Any]]:
    return f.make(Gen(dtype, **size))


Step = tuple[list[Tensor], list[Tensor | None]]


def step(f: Any, fn: Any, inputs: Sequence[Any], train: bool) -> Step:
    """(outputs, gradients of all leaves) of `f`, which is `fn` or `fn` compiled."""
    ins = [_leaf(t, train) for t in inputs]
    if not train:
        with torch.no_grad():
            return _tensors(f(*ins)), []
    leaves = [t for t in ins if isinstance(t, Tensor) and t.requires_grad]
    leaves += list(fn.parameters()) if isinstance(fn, nn.Module) else []
    outputs = _tensors(f(*ins))
    torch.manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        if x.requires_grad:
            loss = loss + (x * torch.randn(x.shape).to(x.dtype)).sum(dtype=torch.float64)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [x.detach() for x in outputs], list(gradients)


def _leaf(t: Any, train: bool) -> Any:
    if not isinstance(t, Tensor):
        return t
    x = t.detach()
    return (x.clone() if x.is_contiguous() else x).requires_grad_(train and t.requires_grad)


def _tensors(o: Any) -> list[Tensor]:
    return [t for t in (o if isinstance(o, (tuple, list)) else [o]) if isinstance(t, Tensor)]


def compiled(f: Form, fn: Any, dynamic: bool | None = None, inner: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    counters.clear()
    options = {"torchflash.inner": inner}
    return torch.compile(fn, backend="torchflash", options=options, dynamic=dynamic, fullgraph=f.fullgraph)


def check(
    f: Form,
    train: bool,
    dtype: torch.dtype = torch.float32,
    dynamic: bool | None = None,
    inner: str = "aot_eager",
    slack: float = SLACK,
    **size: int,
) -> list[Rewritten | Skipped]:
    """Compiles and runs a form; asserts what was rewritten, the output and every gradient. Returns the records."""
    fn, inputs = make(f, dtype, **size)
    torch.manual_seed(0)
    got = step(compiled(f, fn, dynamic, inner), fn, inputs, train)
    records = list(torchflash.report)
    skipped = [r for r in records if isinstance(r, Skipped)]
    told = "; ".join(f"{r.code}: {r.reason}" for r in skipped)
    assert "internal" not in [r.code for r in skipped], told
    skip = f.skip or (f.skip_training if train else "")
    blocks = 0 if skip else f.blocks
    assert counters["torchflash"]["rewritten"] == blocks, f"{counters['torchflash']['rewritten']} rewritten; {told}"
    assert sum(isinstance(r, Rewritten) for r in records) == blocks
    if skip not in ("", "*"):
        assert skip in [r.code for r in skipped], told
    if not f.random:
        compare(fn, inputs, train, got, slack)
    return records


def compare(fn: Any, inputs: Sequence[Any], train: bool, got: Step, slack: float) -> None:
    rough = step(fn, fn, inputs, train)
    try:
        exact = _float64(fn, inputs, train)
    except (RuntimeError, NotImplementedError):  # the form itself converts to a dtype that does not go with float64
        exact = rough
    outputs = [(f"output {i}", *x) for i, x in enumerate(zip(got[0], exact[0], rough[0], strict=True))]
    gradients = [(f"gradient {i}", *x) for i, x in enumerate(zip(got[1], exact[1], rough[1], strict=True))]
    for name, a, b, c in outputs + gradients:
        if a is None or c is None:
            # what was declared unused may come back as zeros, and the other way round
            present = next((t for t in (a, b, c) if t is not None), None)
            assert present is None or not present.count_nonzero(), f"{name} is {'missing' if a is None else 'not None'}"
        elif not a.is_floating_point():
            assert torch.equal(a, c), name
        else:
            # a form that mixes dtypes may overflow where float64 meets its float32 parts: eager is the oracle there
            usable = b is not None and b.shape == c.shape and torch.equal(b.isnan(), c.isnan())
            oracle.within_budget(name, a, b if usable else c, c, slack)


def _float64(fn: Any, inputs: Sequence[Any], train: bool) -> Step:
    def up(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    exact = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    return step(exact, exact, [up(t) for t in inputs], train)
