"""Properties of dropout, for the CPU, the interpreter and the GPU.

The mask is read off the results of each kernel, [B, H, M, N] bool, True = kept.

An operand that is a slice of the identity copies columns of a matrix into the result: of the weights with v = 1 (out)
and do = 1 (dv), of the gradient of the scores with q = 1 (dk), k = 1 (dq) and a bias of their size (dbias). Where
do · v = 1 that gradient is P (mask / (1 - p) - Σ P mask / (1 - p)): positive where the weight is kept, negative where
it is dropped, in every row that has both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from oracle import INF, Inputs, gradients, run_op, within_budget
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from torchflash.kernels import philox

P = 0.4
TEXTS = {False: ("0.1 * s", ""), True: ("where(n <= m, 0.1 * s, -inf)", "n <= m")}
BIASED = {False: ("0.1 * s + t0[b, h, m, n]", ""), True: ("where(n <= m, 0.1 * s + t0[b, h, m, n], -inf)", "n <= m")}


class Shape(NamedTuple):
    """`heads`: of k and v."""

    B: int
    H: int
    heads: int
    M: int
    N: int


@dataclasses.dataclass
class Setting:
    """One dropout, and how it runs. `width`: of the slices, and the head dimension."""

    shape: Shape
    causal: bool = False
    p: float = P
    seed: int = 2**40 + 3
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    tuning: str = "min_seqlen=0"
    width: int = 16

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Inputs:
        score, keep = (TEXTS if bias is None else BIASED)[self.causal]
        captures = [] if bias is None else [bias]
        seed = torch.tensor([self.seed], device=self.device)
        return Inputs(q, k, v, captures, score=score, keep=keep, dropout_p=self.p, seed=seed, tuning=self.tuning)

    def normal(self, heads: int, length: int) -> Tensor:
        return torch.randn(self.shape.B, heads, length, self.width, device=self.device).to(self.dtype)

    def full(self, heads: int, length: int, value: float) -> Tensor:
        return torch.full_like(self.normal(heads, length), value)

    def slices(self, heads: int, length: int) -> Iterator[tuple[slice, Tensor]]:
        """(the columns, [B, heads, length, width] with these columns of the identity)."""
        whole = torch.eye(length, device=self.device, dtype=self.dtype)
        for start in range(0, length, self.width):
            at = slice(start, min(start + self.width, length))
            x = self.full(heads, length, 0.0)
            x[..., : at.stop - at.start] = whole[:, at]
            yield at, x

    def pairs(self) -> Tensor:
        """[M, N] bool: the weights that are not masked."""
        whole = torch.ones(self.shape.M, self.shape.N, dtype=torch.bool, device=self.device)
        return whole.tril() if self.causal else whole


def documented(x: Setting) -> Tensor:
    """What torchflash/kernels/philox.py says, where nothing is masked."""
    B, H, _, M, N = x.shape
    row = torch.arange(B * H * M, device=x.device).view(B, H, M, 1)
    seed, n = torch.tensor([x.seed], device=x.device), torch.arange(N, device=x.device)
    return (philox.scale(x.p, seed, row, n) != 0) & x.pairs()


def weights(x: Setting, q: Tensor, k: Tensor) -> Tensor:
    """[B, H, M, N], by which out = weights v."""
    out = torch.empty((*q.shape[:3], x.shape.N), device=x.device, dtype=x.dtype)
    for at, v in x.slices(x.shape.heads, x.shape.N):
        out[..., at] = run_op(x.inputs(q, k, v))[..., : at.stop - at.start]
    return out


def of_forward(x: Setting) -> Tensor:
    return weights(x, x.normal(x.shape.H, x.shape.M), x.normal(x.shape.heads, x.shape.N)) != 0


def _from_keys(x: Setting, read: Callable[[Tensor, slice, Tensor], Tensor]) -> Tensor:
    """By the gradient of keys or values, which adds up the query heads that share a head: one of them at a time has an
    upstream gradient. `read`(1 for those query heads, the rows, the slice) gives [B, heads, N, rows]."""
    B, H, heads, M, N = x.shape
    found = torch.zeros(B, H, M, N, dtype=x.dtype, device=x.device)
    for member in range(H // heads):
        only = torch.zeros(H, 1, 1, dtype=x.dtype, device=x.device)
        only[member :: H // heads] = 1
        for at, eye in x.slices(H, M):
            found[:, member :: H // heads, at] = read(only, at, eye)[..., : at.stop - at.start].mT
    return found


def of_dv(x: Setting) -> Tensor:
    q, k, v = x.normal(x.shape.H, x.shape.M), x.normal(x.shape.heads, x.shape.N), x.normal(x.shape.heads, x.shape.N)

    def read(only: Tensor, at: slice, eye: Tensor) -> Tensor:
        v.requires_grad_()
        return torch.autograd.grad(run_op(x.inputs(q, k, v)), v, eye * only)[0]

    return _from_keys(x, read) != 0


def of_dk(x: Setting) -> Tensor:
    k, v = x.full(x.shape.heads, x.shape.N, 0.0), x.full(x.shape.heads, x.shape.N, 1.0)
    do = x.full(x.shape.H, x.shape.M, 1 / x.width)

    def read(only: Tensor, at: slice, eye: Tensor) -> Tensor:
        k.requires_grad_()
        return torch.autograd.grad(run_op(x.inputs(eye, k, v)), k, do * only)[0]

    return _from_keys(x, read) > 0


def of_dq(x: Setting) -> Tensor:
    q, v = x.full(x.shape.H, x.shape.M, 0.0).requires_grad_(), x.full(x.shape.heads, x.shape.N, 1.0)
    do = x.full(x.shape.H, x.shape.M, 1 / x.width)
    found = torch.zeros((*q.shape[:3], x.shape.N), dtype=x.dtype, device=x.device)
    for at, k in x.slices(x.shape.heads, x.shape.N):
        found[..., at] = torch.autograd.grad(run_op(x.inputs(q, k, v)), q, do)[0][..., : at.stop - at.start]
    return found > 0


def of_dbias(x: Setting) -> Tensor:
    q, k = x.full(x.shape.H, x.shape.M, 0.0), x.full(x.shape.heads, x.shape.N, 0.0)
    v, do = x.full(x.shape.heads, x.shape.N, 1.0), x.full(x.shape.H, x.shape.M, 1 / x.width)
    B, H, _, M, N = x.shape
    bias = torch.zeros(B, H, M, N, dtype=x.dtype, device=x.device, requires_grad=True)
    return torch.autograd.grad(run_op(x.inputs(q, k, v, bias)), bias, do)[0] > 0


READ = {"out": of_forward, "dv": of_dv, "dk": of_dk, "dq": of_dq, "dbias": of_dbias}


def check_masks(x: Setting) -> None:
    """Every kernel applies the documented mask."""
    expected = documented(x)
    both = (expected.any(-1) & (x.pairs() & ~expected).any(-1))[..., None]
    assert both.float().mean() > 0.8
    for name, read in READ.items():
        rows = torch.ones_like(both) if name in ("out", "dv") else both
        differ = (read(x) != expected) & rows
        assert not differ.any(), f"{name}: {int(differ.sum())} weights of {differ.numel()}, e.g. {differ.nonzero()[0]}"


def eager(x: Setting, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, output) by hand, in the dtype of the operands."""
    k, v = (t.repeat_interleave(x.shape.H // x.shape.heads, 1) for t in (k, v))
    scores = (0.1 * (q @ k.mT)).masked_fill(~x.pairs(), -INF)
    w = torch.softmax(scores, -1) * mask / (1 - x.p)
    return w, w @ v


def check_arithmetic(x: Setting, slack: float = 1.0) -> None:
    """Weights are 0 or P / (1 - p), dv = Wᵀ do for the very weights W of the forward, and the output, dq and dk are
    those of eager attention with the mask that is read off the output: all in float64."""
    q, v, do = x.normal(x.shape.H, x.shape.M), x.normal(x.shape.heads, x.shape.N), x.normal(x.shape.H, x.shape.M)
    k = x.normal(x.shape.heads, x.shape.N)
    shown = weights(x, q, k)
    mask = shown != 0
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = run_op(x.inputs(*leaves))
    got = [out, *torch.autograd.grad(out, leaves, do)]

    def by_hand(dtype: torch.dtype) -> list[Tensor]:
        operands = [t.detach().to(dtype).requires_grad_() for t in leaves]
        w, out = eager(x, *operands, mask.to(dtype))
        return [w, out, *gradients(out, operands, do.to(dtype))]

    exact, rough = by_hand(torch.float64), by_hand(x.dtype)
    for name, a, b, c in zip(["weights", "out", "dq", "dk", "dv"], [shown, *got], exact, rough, strict=True):
        within_budget(name, a, b, c, slack)
    B, _, heads, _, N = x.shape
    dv = (shown.double().mT @ do.double()).view(B, heads, -1, N, x.width).sum(2)
    within_budget("dv of the weights shown", got[3], dv, rough[4], slack)


def check_rate(mask: Tensor, p: float) -> None:
    """Of all weights 4 sigma; and the counts of rows and of columns spread as independent draws do: their mean square
    deviation is that of a binomial count within 5 sigma, which is the sum of all correlations of two places."""
    dropped = (~mask).double()
    variance = p * (1 - p)
    assert abs(dropped.mean().item() - p) < 4 * (variance / mask.numel()) ** 0.5
    for axis, name in ((-1, "rows"), (-2, "columns")):
        size = mask.shape[axis]
        z = (dropped.sum(axis) - size * p).flatten() / (size * variance) ** 0.5
        spread = (2 / z.numel()) ** 0.5  # the standard deviation of the mean of z², z being nearly normal
        assert abs(z.square().mean().item() - 1) < 5 * spread, f"counts of {name}"
        assert z.abs().max().item() < 7, f"counts of {name}"


def check_independent(first: Tensor, second: Tensor, p: float, sigmas: float = 5.0) -> None:
    """Two masks agree in p² + (1 - p)² of the places."""
    agree = p * p + (1 - p) ** 2
    share = (first == second).double().mean().item()
    assert abs(share - agree) < sigmas * (agree * (1 - agree) / first.numel()) ** 0.5, f"{share} and not {agree}"


# ------------------------------------------------------------------------------------------ as torch.compile draws it


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dropout(torch.softmax(q @ k.mT * 0.1, -1), P) @ v


def layers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two layers, heads in groups of two."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return attend(q, k, v), attend(q + 1, k, v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = checkpoint(layers, q, k, v, use_reentrant=False)
    return first, second


INNERS = ["eager", "aot_eager", "inductor"]
# no "eager": torch's own backend of that name draws anew when a checkpoint computes the forward again
STEPS = [(layers, inner) for inner in INNERS] + [(checkpointed, inner) for inner in INNERS[1:]]
NAMES = [f"{function.__name__}-{inner}" for function, inner in STEPS]


def compiled(function: Callable[..., tuple[Tensor, ...]], inner: str) -> Callable[..., tuple[Tensor, ...]]:
    torch._dynamo.reset()
    options = {"torchflash.min_seqlen": 0, "torchflash.inner": inner, "torchflash.strict": True}
    return torch.compile(function, backend="torchflash", options=options)


def operands(length: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """For `layers`: q [2, 4, length, dim], k [2, 2, length, dim], v = 1 [2, 2, length, length]."""
    q, k = (torch.randn(2, heads, length, dim, device=device).to(dtype) for heads in (4, 2))
    return [q, k, torch.eye(length, device=device, dtype=dtype).expand(2, 2, length, length).contiguous()]


def check_training_steps(step: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], slack: float = 1.0) -> None:
    """`step`, `layers` in some way, draws a new mask at each call, of its own for each layer, batch and head, also of
    those that share keys; and its backward applies it."""
    kept: list[Tensor] = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outs = step(*leaves)
        dos = [torch.randn_like(out) for out in outs]
        got = [*outs, *torch.autograd.grad(outs, leaves, dos)]
        masks = [out.detach() != 0 for out in outs]

        def by_hand(dtype: torch.dtype, masks: list[Tensor] = masks, dos: list[Tensor] = dos) -> list[Tensor]:
            q, k, v = exact = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            outs = [
                torch.softmax(q @ k.mT * 0.1, -1) * mask.to(dtype) / (1 - P) @ v
                for q, mask in zip((q, q + 1), masks, strict=True)
            ]
            return [*outs, *torch.autograd.grad(outs, exact, [do.to(dtype) for do in dos])]

        names = ["first", "second", "dq", "dk", "dv"]
        for name, a, b, c in zip(names, got, by_hand(torch.float64), by_hand(inputs[0].dtype), strict=True):
            within_budget(name, a, b, c, slack)
        kept += [head for mask in masks for head in mask.flatten(0, 1)]
    for first, second in itertools.combinations(kept, 2):
        check_independent(first, second, P)


def check_reproducible(step: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> None:
    """By torch.manual_seed: the same seed gives the same masks, another seed others, and every call its own."""
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append([out for _ in range(2) for out in step(*inputs)])
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not any(map(torch.equal, runs[0], runs[2]))
    for first, second in itertools.combinations(runs[0], 2):
        assert not torch.equal(first != 0, second != 0)
