"""Forms that once were wrong, and their neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forms.registry import NEG, form

INF = float("inf")

library = torch.library.Library("torchflash_tests", "FRAGMENT")
library.define("matmul(Tensor x, Tensor y) -> Tensor")
library.define("exp(Tensor x) -> Tensor")
library.impl("matmul", lambda x, y: (x @ y) * 2, "CompositeImplicitAutograd")
library.impl("exp", lambda x: x.sin(), "CompositeImplicitAutograd")


@torch.compiler.allow_in_graph
def softmax(x, dim):
    return torch.softmax(3 * x, dim)


# ---------------------------------------------------------------- from reading: suspicious
@form(skip="*")
def residual_baddbmm_values(g):
    sh = (g.B * g.H, g.S, g.D)
    return (lambda q, k, v, x: torch.baddbmm(x, torch.bmm(q, k.mT).softmax(-1), v)), (
        g.r(*sh),
        g.r(*sh),
        g.r(*sh),
        g.r(*sh),
    )


@form(skip="*")
def residual_addmm_values(g):
    sh = (g.S, g.D)
    return (lambda q, k, v, x: torch.addmm(x, (q @ k.t()).softmax(-1), v, beta=0.5, alpha=2.0)), (
        g.r(*sh),
        g.r(*sh),
        g.r(*sh),
        g.r(*sh),
    )


@form()
def softmax_kwargs(g):
    return (
        lambda q, k, v: torch.matmul(
            torch.softmax(input=torch.matmul(input=q, other=k.transpose(dim0=-2, dim1=-1)), dim=-1), v
        )
    ), g.qkv()


@form()
def where_kwargs(g):
    m = g.keep(g.S, g.S)
    return (lambda q, k, v, m: torch.where(condition=m, input=q @ k.mT, other=NEG).softmax(dim=-1) @ v), (*g.qkv(), m)


@form(skip_training="*")
def no_grad_scores(g):
    def fn(q, k, v):
        with torch.no_grad():
            s = q @ k.mT
        return s.softmax(-1) @ v

    return fn, g.qkv()


@form(skip_training="*")
def no_grad_weights(g):
    def fn(q, k, v):
        with torch.no_grad():
            p = (q @ k.mT).softmax(-1)
        return p @ v

    return fn, g.qkv()


@form()
def no_grad_bias(g):
    def fn(q, k, v, b):
        with torch.no_grad():
            bb = b * 2.0
        return (q @ k.mT + bb).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def no_grad_bias_gather(g):
    idx = torch.randint(0, 7, (g.S, g.S), generator=g.rng)

    def fn(q, k, v, b, idx):
        with torch.no_grad():
            bb = b[:, idx]
        return (q @ k.mT + bb).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 7), idx)


@form()
def detached_bias(g):
    return (lambda q, k, v, b: (q @ k.mT + (b * 2).detach()).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def detached_max_by_hand(g):
    def fn(q, k, v):
        s = q @ k.mT * 0.3
        e = (s - s.max(-1, keepdim=True).values.detach()).exp()
        return (e / e.sum(-1, keepdim=True)) @ v

    return fn, g.qkv()


@form(skip_training="*")
def detached_weights(g):
    return (lambda q, k, v: (q @ k.mT).softmax(-1).detach() @ v), g.qkv()


@form(skip_training="*")
def detached_scores(g):
    return (lambda q, k, v: (q @ k.mT).detach().softmax(-1) @ v), g.qkv()


@form()
def detached_query(g):
    return (lambda q, k, v: (q.detach() @ k.mT).softmax(-1) @ v), g.qkv()


@form(blocks=2)
def mask_written_between_blocks(g):
    def fn(q, k, v):
        m = torch.zeros(g.S, g.S, dtype=q.dtype)
        a = (q @ k.mT + m).softmax(-1) @ v
        m[:, 3:] = -3.0
        return a + (k @ q.mT + m).softmax(-1) @ v

    return fn, g.qkv()


@form()
def mask_setitem(g):
    def fn(q, k, v):
        m = torch.zeros(g.S, g.S, dtype=torch.bool)
        m[:, 3:6] = True
        return (q @ k.mT).masked_fill(m, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def mask_setitem_eq0(g):
    def fn(q, k, v):
        m = torch.ones(g.S, g.S)
        m[:, 3:6] = 0
        return (q @ k.mT).masked_fill(m == 0, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def mask_input_cloned_setitem(g):
    def fn(q, k, v, m):
        m = m.clone()
        m[..., 2] = False
        return (q @ k.mT).masked_fill(~m, NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.keep(g.B, 1, 1, g.S))


@form()
def divided_output(g):
    c = (torch.rand(g.B, g.H, g.S, 1, generator=g.rng) + 0.5).to(g.dtype).requires_grad_()
    return (lambda q, k, v, c: ((q @ k.mT).softmax(-1) @ v) / c), (*g.qkv(), c)


@form()
def divided_output_0d(g):
    c = torch.tensor(1.7, dtype=g.dtype)
    return (lambda q, k, v, c: ((q @ k.mT).softmax(-1) @ v) / c), (*g.qkv(), c)


@form()
def divided_output_column(g):
    c = (torch.rand(g.D, generator=g.rng) + 0.5).to(g.dtype).requires_grad_()
    return (lambda q, k, v, c: ((q @ k.mT).softmax(-1) @ v) / c), (*g.qkv(), c)


@form()
def index_int_and_tensor(g):
    # torch selects ints first: result dims follow the slices
    t = g.r(3, g.S, g.S)
    idx = torch.randperm(g.S, generator=g.rng)
    return (lambda q, k, v, t, idx: (q @ k.mT + t[1, :, idx]).softmax(-1) @ v), (*g.qkv(), t, idx)


@form()
def index_two_tensors_apart(g):
    t = g.r(g.S, g.S, g.S)
    i = torch.randperm(g.S, generator=g.rng)[:, None]
    j = torch.randint(0, g.S, (g.S, g.S), generator=g.rng)
    return (lambda q, k, v, t, i, j: (q @ k.mT + t[i, :, j].sum(-1)).softmax(-1) @ v), (*g.qkv(), t, i, j)


@form()
def index_two_tensors_apart_heads(g):
    t = g.r(g.S, g.H, g.S)
    i = torch.randperm(g.S, generator=g.rng)[:, None].expand(g.S, g.S)
    j = torch.randint(0, g.S, (g.S, g.S), generator=g.rng)
    return (lambda q, k, v, t, i, j: (q @ k.mT + t[i, :, j].permute(2, 0, 1)).softmax(-1) @ v), (*g.qkv(), t, i, j)


@form()
def same_tensor_everywhere(g):
    return (lambda x: (x @ x.mT).softmax(-1) @ x), (g.r(g.B, g.S, g.D),)


@form()
def inplace_scale_query(g):
    def fn(q, k, v):
        q = q * 1.0
        q *= 0.3
        return (q @ k.mT).softmax(-1) @ v

    return fn, g.qkv()


@form()
def inplace_chain(g):
    m = g.keep(g.B, 1, 1, g.S)

    def fn(q, k, v, m):
        s = q @ k.mT
        s *= 0.3
        s += 1.0
        s.div_(2.0)
        s.masked_fill_(~m, NEG)
        return s.softmax(-1) @ v

    return fn, (*g.qkv(), m)


@form(skip="mutation")
def inplace_through_view(g):
    m = g.keep(g.S, g.S)

    def fn(q, k, v, m):
        s = torch.bmm(q.reshape(-1, g.S, g.D), k.reshape(-1, g.S, g.D).mT)
        s.view(g.B, g.H, g.S, g.S).masked_fill_(~m, -1e9)
        return (s.softmax(-1) @ v.reshape(-1, g.S, g.D)).view(q.shape)

    return fn, (*g.qkv(), m)


@form()
def score_column_written(g):
    def fn(q, k, v):
        s = q @ k.mT
        s[..., 0] = -5.0
        return s.softmax(-1) @ v

    return fn, g.qkv()


@form()
def bias_inplace_before(g):
    def fn(q, k, v, b):
        b = b * 1.5
        b += 1.0
        b[..., 2] = -4.0
        return (q @ k.mT + b).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def outer_einsum_alibi(g):
    sl = torch.tensor([2.0 ** -(i + 1) for i in range(g.H)], dtype=g.dtype)

    def fn(q, k, v, sl):
        pos = torch.arange(g.S).to(q.dtype)
        b = torch.einsum("h,n->hn", sl, pos)[:, None, :]
        return (q @ k.mT * 0.3 + b).softmax(-1) @ v

    return fn, (*g.qkv(), sl)


@form()
def embedding_padding_idx(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(2 * g.S, g.H, padding_idx=g.S)

        def forward(s, q, k, v):
            i = torch.arange(g.S)
            b = s.e(i[:, None] - i[None] + g.S).permute(2, 0, 1)
            return (q @ k.mT + b).softmax(-1) @ v

    return g.module(A()), g.qkv()


@form(skip="*")
def the_sum_tells_rows_of_nan(g):
    """It is not 1 there."""

    def fn(q, k, v, m):
        p = (q @ k.mT * 0.3).masked_fill(~m, -INF).softmax(-1)
        return torch.where(p.sum(-1, keepdim=True).isnan(), torch.zeros_like(p), p) @ v

    return fn, (*g.qkv(), torch.ones(g.S, g.S, dtype=torch.bool).tril(-1))


@form(skip="*")
def the_sum_of_another_softmax(g):
    def fn(q, k, v, w):
        return ((q @ k.mT * 0.3).softmax(-1) / (q @ w.mT).softmax(-1).sum(-1, keepdim=True)) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, g.S, g.D))


@form()
def embedding_padding_idx_of_the_last_row(g):
    w = g.r(2 * g.S, g.H)

    def fn(q, k, v, w):
        i = torch.arange(g.S)
        b = F.embedding((i[None] - i[:, None]) + g.S, w, padding_idx=-1).permute(2, 0, 1)
        return (q @ k.mT + b).softmax(-1) @ v

    return fn, (*g.qkv(), w)


@form()
def embedding_scale_grad(g):
    w = g.r(2 * g.S, g.H)

    def fn(q, k, v, w):
        i = torch.arange(g.S)
        b = F.embedding((i[:, None] - i[None]) + g.S, w, scale_grad_by_freq=True).permute(2, 0, 1)
        return (q @ k.mT + b).softmax(-1) @ v

    return fn, (*g.qkv(), w)


@form(skip="*")
def remainder_of_a_rounded_quotient(g):
    """Of 0.3 and 0.1 eager says 0.1, less a rounding, and a quotient that is rounded up to 3 says 0."""
    return (lambda q, k, v: torch.fmod(q @ k.mT, 0.1).softmax(-1) @ v), g.qkv()


# ---------------------------------------------------------------- functions of the user, called as those of torch
@form(skip="*")
def matmul_of_the_user(g):
    return (lambda q, k, v: torch.ops.torchflash_tests.matmul(q, k.mT).softmax(-1) @ v), g.qkv()


@form(skip="*")
def exp_of_the_user(g):
    return (lambda q, k, v: torch.ops.torchflash_tests.exp.default(q @ k.mT).softmax(-1) @ v), g.qkv()


@form(skip="*")
def softmax_of_the_user(g):
    return (lambda q, k, v: softmax(q @ k.mT, -1) @ v), g.qkv()
