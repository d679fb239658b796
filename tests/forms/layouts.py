"""Layouts, grouped heads, einsum, folded axes, fused projections, strides and extreme sizes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from forms.registry import NEG, form, sc

INF = float("inf")


def rkv(x, n):
    b, h, s, d = x.shape
    return x if n == 1 else x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


# ------------------------------------------------------------------ grouped heads
@form()
def gqa_repeat_kv(g):
    return (lambda q, k, v: sc(q, rkv(k, 2)).softmax(-1) @ rkv(v, 2)), g.qkv(hk=2)


@form()
def mqa_repeat_kv(g):
    return (lambda q, k, v: sc(q, rkv(k, 4)).softmax(-1) @ rkv(v, 4)), g.qkv(hk=1)


@form()
def gqa_repeat_interleave(g):
    return (
        lambda q, k, v: sc(q, k.repeat_interleave(2, dim=1)).softmax(-1) @ torch.repeat_interleave(v, repeats=2, dim=1)
    ), g.qkv(hk=2)


@form()
def gqa_repeat_tiled(g):
    return (lambda q, k, v: sc(q, k.repeat(1, 2, 1, 1)).softmax(-1) @ v.repeat(1, 2, 1, 1)), g.qkv(hk=2)


@form()
def gqa_stack_tiled_expand(g):
    def fn(q, k, v):
        def e(t):
            return t[:, None].expand(-1, 2, -1, -1, -1).reshape(g.B, g.H, g.S, g.D)

        return sc(q, e(k)).softmax(-1) @ e(v)

    return fn, g.qkv(hk=2)


@form()
def gqa_bsd_repeat_before_transpose(g):
    def fn(q, k, v):
        def r(x):
            return x[:, :, :, None, :].expand(g.B, g.S, 2, 2, g.D).reshape(g.B, g.S, 4, g.D)

        q, k, v = q.transpose(1, 2), r(k).transpose(1, 2), r(v).transpose(1, 2)
        return (sc(q, k).float().softmax(-1).type_as(q) @ v).transpose(1, 2).contiguous().view(g.B, g.S, -1)

    return fn, (g.r(g.B, g.S, 4, g.D), g.r(g.B, g.S, 2, g.D), g.r(g.B, g.S, 2, g.D))


@form()
def gqa_5d_matmul(g):
    def fn(q, k, v):
        q = q.view(g.B, 2, 2, g.S, g.D)
        return (q @ k[:, :, None].mT * 0.3).softmax(-1) @ v[:, :, None]

    return fn, g.qkv(hk=2)


@form()
def tensordot_of_matrices(g):
    return (
        lambda q, k, v: torch.tensordot(torch.tensordot(q, k, dims=([1], [1])).softmax(-1), v, dims=1)
    ), (g.r(g.S, g.D), g.r(g.S, g.D), g.r(g.S, 5))


@form()
def tensordot_of_shared_keys(g):
    return (
        lambda q, k, v: torch.tensordot(v, torch.tensordot(k, q, dims=([1], [-1])).softmax(0), dims=([0], [0]))
    ), (g.r(g.B, g.H, g.S, g.D), g.r(g.S, g.D), g.r(g.S, 5))


@form()
def tensordot_over_two_dims(g):
    return (
        lambda q, k, v: torch.tensordot(torch.tensordot(q, k, dims=([1, 2], [2, 1])).softmax(-1), v, dims=1)
    ), (g.r(g.S, 2, 4), g.r(g.S, 4, 2), g.r(g.S, 5))


# ------------------------------------------------------------------ products that are multiplied out and summed
@form()
def products_summed(g):
    def fn(q, k, v):
        s = (q[:, :, :, None] * k[:, :, None]).sum(-1) * 0.3
        return (s.softmax(-1)[..., None] * v[:, :, None]).sum(dim=3)

    return fn, g.qkv(dv=5)


@form()
def products_summed_with_dims_kept(g):
    def fn(q, k, v, m):
        s = torch.sum(torch.mul(k.unsqueeze(2), q.unsqueeze(3)), dim=(-1,), keepdim=True)
        p = s.masked_fill(~m[..., None], NEG).softmax(-2)
        return torch.sum(p * v.unsqueeze(-3), -2, True).squeeze(-2)

    return fn, (*g.qkv(), g.keep(g.S, g.S))


@form()
def products_summed_of_shared_keys(g):
    return (
        lambda q, k, v: (q[:, :, :, None, :].mul(k).sum(axis=-1).softmax(-1).unsqueeze(-1) * v).sum(-2)
    ), (g.r(g.B, g.H, g.S, g.D), g.r(g.S, g.D), g.r(g.S, 5))


@form(skip="*")
def products_summed_after_a_write(g):
    def fn(q, k, v):
        x = q[:, :, :, None] * k[:, :, None]
        x.mul_(2)
        return x.sum(-1).softmax(-1) @ v

    return fn, g.qkv()


@form(skip="mutation")
def products_summed_around_a_write(g):
    def fn(q, k, v):
        q = q * 0.5
        product = q[:, :, :, None] * k[:, :, None]
        q.mul_(2)
        return product.sum(-1).softmax(-1) @ v + q.sum()

    q, k, v = g.qkv()
    return fn, (q.detach(), k.detach(), v)  # no gradient needs what is written


@form(skip="no_values")
def products_summed_elsewhere(g):
    return (lambda q, k, v: (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1) + v.sum()), g.qkv()


@form()
def gqa_grouped_einsum(g):
    def fn(q, k, v):
        q = q.view(g.B, g.S, 2, 2, g.D)
        s = torch.einsum("bmkgd,bnkd->bkgmn", q, k) * 0.3
        return torch.einsum("bkgmn,bnkd->bmkgd", s.softmax(-1), v).reshape(g.B, g.S, 4, g.D)

    return fn, (g.r(g.B, g.S, 4, g.D), g.r(g.B, g.S, 2, g.D), g.r(g.B, g.S, 2, g.D))


@form()
def gqa_grouped_einsum_swapped(g):
    # heads as (g k): the key head is h % k
    def fn(q, k, v):
        q = q.view(g.B, g.S, 2, 2, g.D)
        s = torch.einsum("bmgkd,bnkd->bgkmn", q, k) * 0.3
        return torch.einsum("bgkmn,bnkd->bmgkd", s.softmax(-1), v).reshape(g.B, g.S, 4, g.D)

    return fn, (g.r(g.B, g.S, 4, g.D), g.r(g.B, g.S, 2, g.D), g.r(g.B, g.S, 2, g.D))


@form()
def gqa_fold_groups_into_rows(g):
    def fn(q, k, v):
        q = q.reshape(g.B, 2, 2 * g.S, g.D)
        return ((q @ k.mT * 0.3).softmax(-1) @ v).view(g.B, 4, g.S, g.D)

    return fn, g.qkv(hk=2)


@form()
def gqa_fold_groups_into_rows_causal(g):
    def fn(q, k, v):
        q = q.reshape(g.B, 2, 2 * g.S, g.D)
        s = (q @ k.mT * 0.3).view(g.B, 2, 2, g.S, g.S)
        s = s.masked_fill(torch.ones(g.S, g.S, dtype=torch.bool).triu(1), NEG)
        return (s.softmax(-1).view(g.B, 2, 2 * g.S, g.S) @ v).view(g.B, 4, g.S, g.D)

    return fn, g.qkv(hk=2)


@form()
def gqa_keys_grouped_values_not(g):
    return (lambda q, k, v: sc(q, rkv(k, 2)).softmax(-1) @ v), (*g.qkv(hk=2)[:2], g.r(g.B, g.H, g.S, g.D))


@form()
def gqa_keys_mqa_values_grouped(g):
    return (lambda q, k, v: sc(q, rkv(k, 4)).softmax(-1) @ rkv(v, 2)), (
        g.qkv()[0],
        g.r(g.B, 1, g.S, g.D),
        g.r(g.B, 2, g.S, g.D),
    )


@form()
def mqa_broadcast(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), g.qkv(hk=1)


@form()
def mqa_einsum(g):
    return (
        lambda q, k, v: torch.einsum("bhmn,bnd->bhmd", (torch.einsum("bhmd,bnd->bhmn", q, k) * 0.3).softmax(-1), v)
    ), (g.r(g.B, g.H, g.S, g.D), g.r(g.B, g.S, g.D), g.r(g.B, g.S, g.D))


@form()
def mqa_falcon_unsqueeze(g):
    return (lambda q, k, v: sc(q, k.unsqueeze(1)).softmax(-1) @ v.unsqueeze(1)), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, g.S, g.D),
        g.r(g.B, g.S, g.D),
    )


@form()
def mqa_gpt_bigcode(g):
    def fn(q, k, v):
        b, n, h, d = g.B, g.S, g.H, g.D
        a = torch.baddbmm(
            torch.empty((b, n * h, n), dtype=q.dtype), q.reshape(b, n * h, d), k.transpose(1, 2), beta=0, alpha=0.3
        ).view(b, n, h, n)
        m = torch.ones(n, n, dtype=torch.bool).tril()[None, :, None, :]
        a = torch.where(m, a, torch.finfo(a.dtype).min).softmax(-1)
        return torch.bmm(a.view(b, n * h, n), v).view(b, n, h * d)

    return fn, (g.r(g.B, g.S, g.H, g.D), g.r(g.B, g.S, g.D), g.r(g.B, g.S, g.D))


@form()
def gqa_falcon_new_decoder(g):
    def fn(qkv):
        b, n = g.B, g.S
        x = qkv.view(b, n, 2, 4, g.D)
        q = x[:, :, :, :-2]
        k = x[:, :, :, [-2]]
        v = x[:, :, :, [-1]]
        k = torch.broadcast_to(k, q.shape)
        v = torch.broadcast_to(v, q.shape)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        return sc(q, k).softmax(-1) @ v

    return fn, (g.r(g.B, g.S, 2 * 4 * g.D),)


@form()
def shared_kv_batch_broadcast(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(1, g.H, g.S, g.D),
        g.r(1, g.H, g.S, g.D),
    )


@form()
def shared_q_batch_broadcast(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(1, g.H, g.S, g.D),
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, g.H, g.S, g.D),
    )


@form()
def shared_kv_2d(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (g.r(g.B, g.H, g.S, g.D), g.r(17, g.D), g.r(17, g.D))


@form()
def shared_values_only(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (g.r(g.B, g.H, g.S, g.D), g.r(g.B, g.H, 17, g.D), g.r(17, 5))


@form()
def shared_keys_only(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (g.r(g.B, g.H, g.S, g.D), g.r(17, g.D), g.r(g.B, g.H, 17, 5))


@form()
def shared_heads_keys_lack_batch(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(1, g.H, 17, g.D),
        g.r(g.B, 1, 17, 5),
    )


@form()
def batch_only_in_values(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (g.r(g.H, g.S, g.D), g.r(g.H, 17, g.D), g.r(g.B, g.H, 17, 5))


# ------------------------------------------------------------------ einsum & layouts
@form()
def einsum_dots(g):
    return (
        lambda q, k, v: torch.einsum(
            "...mn,...nd->...md", torch.einsum("...md,...nd->...mn", q, k).mul(0.3).softmax(-1), v
        )
    ), g.qkv()


@form()
def einsum_mixed_dots(g):
    return (
        lambda q, k, v: torch.einsum(
            "b...mn,b...nd->b...md", torch.einsum("b...md,b...nd->b...mn", q, k).mul(0.3).softmax(-1), v
        )
    ), g.qkv()


@form()
def einsum_spaces_lists(g):
    return (
        lambda q, k, v: torch.einsum(
            "b h m n, b n h d -> b m h d", [torch.einsum("b m h d, b n h d -> b h m n", [q, k]).softmax(-1), v]
        )
    ), g.bsd()


@form()
def einsum_out_bmhd_flat(g):
    return (
        lambda q, k, v: torch.einsum(
            "nhql,nlhd->nqhd", [torch.softmax(torch.einsum("nqhd,nkhd->nhqk", [q, k]) / (g.H * g.D) ** 0.5, dim=3), v]
        ).reshape(g.B, g.S, -1)
    ), g.bsd()


@form()
def einsum_key_first(g):
    return (
        lambda q, k, v: torch.einsum("bhnm,bhnd->bhmd", torch.einsum("bhnd,bhmd->bhnm", k, q).mul(0.3).softmax(-2), v)
    ), g.qkv()


@form()
def einsum_heads_last(g):
    return (
        lambda q, k, v: torch.einsum("bmnh,bnhd->bmhd", torch.einsum("bmhd,bnhd->bmnh", q, k).mul(0.3).softmax(2), v)
    ), g.bsd()


@form()
def einsum_values_first(g):
    return (
        lambda q, k, v: torch.einsum("bnhd,bhmn->bmhd", v, torch.einsum("bnhd,bmhd->bhmn", k, q).mul(0.3).softmax(-1))
    ), g.bsd()


@form()
def einsum_implicit_output(g):
    return (lambda q, k, v: torch.einsum("mn,nd", torch.einsum("md,nd", q, k).softmax(-1), v)), (
        g.r(g.S, g.D),
        g.r(17, g.D),
        g.r(17, g.D),
    )


@form()
def einsum_project_and_score(g):
    def fn(x, wq, wk, wv):
        q = torch.einsum("bnd,hde->bhne", x, wq)
        k = torch.einsum("bnd,hde->bhne", x, wk)
        v = torch.einsum("bnd,hde->bhne", x, wv)
        return torch.einsum("bhmn,bhne->bhme", (torch.einsum("bhme,bhne->bhmn", q, k) * 0.3).softmax(-1), v)

    return fn, (g.x(), *(g.w(g.H, g.H * g.D, g.D) for _ in range(3)))


@form()
def einsum_two_depth_letters(g):
    return (
        lambda q, k, v: torch.einsum("bmn,bnef->bmef", torch.einsum("bmef,bnef->bmn", q, k).mul(0.1).softmax(-1), v)
    ), (g.r(g.B, g.S, 2, g.D), g.r(g.B, 17, 2, g.D), g.r(g.B, 17, 2, g.D))


@form(skip="no_scores")
def einsum_three_operands(g):
    return (
        lambda q, k, v: torch.einsum(
            "bhmn,bhnd->bhmd", torch.einsum("bhmd,bhnd,h->bhmn", q, k, torch.ones(g.H, dtype=q.dtype)).softmax(-1), v
        )
    ), g.qkv()


@form()
def keys_first_softmax_dim_minus2(g):
    return (lambda q, k, v: (k @ q.mT * 0.3).softmax(-2).mT @ v), g.qkv(n=17)


@form()
def transposed_values_times_weights(g):
    return (lambda q, k, v: (v.mT @ (q @ k.mT * 0.3).softmax(-1).mT).mT), g.qkv(n=17)


@form()
def transposed_everything(g):
    return (lambda q, k, v: v.mT @ (k @ q.mT * 0.3).softmax(-2)), g.qkv(n=17)


@form()
def channels_first_conv(g):
    def fn(q, k, v):  # [B,C,N]
        a = torch.einsum("bcm,bcn->bmn", q, k).softmax(-1)
        return torch.einsum("bmn,bcn->bcm", a, v)

    return fn, (g.r(g.B, g.D, g.S), g.r(g.B, g.D, 17), g.r(g.B, g.D, 17))


@form()
def nonlocal_block(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.t, s.p, s.g = (nn.Conv2d(8, 4, 1) for _ in range(3))
            s.w = nn.Conv2d(4, 8, 1)

        def forward(s, x):
            b = x.shape[0]
            gx = s.g(x).view(b, 4, -1).permute(0, 2, 1)
            t = s.t(x).view(b, 4, -1).permute(0, 2, 1)
            p = s.p(x).view(b, 4, -1)
            f = F.softmax(torch.matmul(t, p), dim=-1)
            y = torch.matmul(f, gx).permute(0, 2, 1).contiguous().view(b, 4, *x.shape[2:])
            return s.w(y) + x

    return g.module(A()), (g.r(g.B, 8, 3, 4),)


@form()
def sagan_attention(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.f, s.gg, s.h = (
                nn.Conv1d(8, 4, 1, bias=False),
                nn.Conv1d(8, 4, 1, bias=False),
                nn.Conv1d(8, 8, 1, bias=False),
            )
            s.gamma = nn.Parameter(torch.tensor([0.5]))

        def forward(s, x):
            size = x.size()
            x = x.view(*size[:2], -1)
            f, gg, h = s.f(x), s.gg(x), s.h(x)
            beta = F.softmax(torch.bmm(f.transpose(1, 2).contiguous(), gg), dim=1)
            return (s.gamma * torch.bmm(h, beta) + x).view(*size).contiguous()

    return g.module(A()), (g.r(g.B, 8, 3, 4),)


@form()
def vae_attn_block_ldm(g):
    def fn(q, k, v):
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * (int(c) ** (-0.5))
        w_ = F.softmax(w_, dim=2)
        v = v.reshape(b, c, h * w)
        w_ = w_.permute(0, 2, 1)
        return torch.bmm(v, w_).reshape(b, c, h, w)

    return fn, [g.r(g.B, 8, 3, 4) for _ in range(3)]


@form()
def ddpm_qkv_attention_legacy(g):
    def fn(qkv):
        bs, width, length = qkv.shape
        ch = width // (3 * g.H)
        q, k, v = qkv.reshape(bs * g.H, ch * 3, length).split(ch, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        w = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        w = torch.softmax(w.float(), dim=-1).type(w.dtype)
        return torch.einsum("bts,bcs->bct", w, v).reshape(bs, -1, length)

    return fn, (g.r(g.B, 3 * g.H * g.D, g.S),)


@form()
def ddpm_qkv_attention(g):
    def fn(qkv):
        bs, width, length = qkv.shape
        ch = width // (3 * g.H)
        q, k, v = qkv.chunk(3, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        w = torch.einsum("bct,bcs->bts", (q * scale).view(bs * g.H, ch, length), (k * scale).view(bs * g.H, ch, length))
        w = torch.softmax(w.float(), dim=-1).type(w.dtype)
        return torch.einsum("bts,bcs->bct", w, v.reshape(bs * g.H, ch, length)).reshape(bs, -1, length)

    return fn, (g.r(g.B, 3 * g.H * g.D, g.S),)


@form()
def diffusers_head_to_batch(g):
    def fn(q, k, v):
        def hb(t):
            b, s, d = t.shape
            return t.reshape(b, s, g.H, d // g.H).permute(0, 2, 1, 3).reshape(b * g.H, s, d // g.H)

        q, k, v = hb(q), hb(k), hb(v)
        s = torch.baddbmm(
            torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype), q, k.transpose(-1, -2), beta=0, alpha=0.35
        )
        o = torch.bmm(s.softmax(-1).to(q.dtype), v)
        return o.reshape(g.B, g.H, g.S, g.D).permute(0, 2, 1, 3).reshape(g.B, g.S, -1)

    return fn, (g.x(), g.x(17), g.x(17))


@form()
def diffusers_baddbmm_mask(g):
    def fn(q, k, v, m):
        s = torch.baddbmm(
            m.repeat_interleave(g.H, dim=0), q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2), beta=1, alpha=0.35
        )
        return torch.bmm(s.softmax(-1), v.flatten(0, 1)).unflatten(0, (g.B, g.H))

    return fn, (*g.qkv(n=17), g.r(g.B, 1, 17).detach().expand(g.B, g.S, 17).contiguous())


@form()
def two_d(g):
    return (lambda q, k, v: (q @ k.t() / math.sqrt(g.D)).softmax(-1) @ v), (g.r(g.S, g.D), g.r(17, g.D), g.r(17, 5))


@form()
def two_d_mm_causal(g):
    return (
        lambda q, k, v: torch.mm(torch.mm(q, k.t()).masked_fill(torch.ones(g.S, g.S).triu(1) > 0, NEG).softmax(1), v)
    ), (g.r(g.S, g.D), g.r(g.S, g.D), g.r(g.S, 5))


@form()
def two_d_karpathy_T(g):
    return (lambda x: F.softmax(x @ x.T, dim=1) @ x), (g.r(g.S, g.D),)


@form()
def three_d_no_heads(g):
    return (lambda q, k, v: torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) / 8**0.5, dim=-1), v)), (
        g.r(g.B, g.S, g.D),
        g.r(g.B, 17, g.D),
        g.r(g.B, 17, 5),
    )


@form()
def five_d_msa_row(g):
    return (
        lambda q, k, v: torch.einsum("rbhij,rbjhd->rbihd", torch.einsum("rbihd,rbjhd->rbhij", q, k).softmax(-1), v)
    ), [g.r(3, g.B, g.S, g.H, g.D) for _ in range(3)]


@form()
def five_d_column_attention(g):
    return (
        lambda q, k, v: torch.einsum("hcnij,jcnhd->icnhd", torch.einsum("icnhd,jcnhd->hcnij", q, k).softmax(-1), v)
    ), [g.r(g.S, 3, g.B, g.H, g.D) for _ in range(3)]


@form()
def esm_tied_row_attention(g):
    return (
        lambda q, k, v: torch.einsum(
            "hnij,rjnhd->rinhd", torch.einsum("rinhd,rjnhd->hnij", q, k).mul(0.1).softmax(-1), v
        )
    ), [g.r(3, g.S, g.B, g.H, g.D) for _ in range(3)]


@form()
def windows_swin_partition(g):
    def fn(x, wqkv):
        B, H, W, C = x.shape
        ws = 4
        x = x.view(B, H // ws, ws, W // ws, ws, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, ws * ws, C)
        qkv = (x @ wqkv).reshape(-1, ws * ws, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        return ((q * 0.3) @ k.transpose(-2, -1)).softmax(-1) @ v

    return fn, (g.r(g.B, 8, 8, 8), g.w(8, 24))


@form()
def swin_bias_and_shift_mask(g):
    n = 16
    nW = 4
    idx = torch.randint(0, 49, (n, n), generator=g.rng)
    mask = torch.where(torch.rand(nW, n, n, generator=g.rng) < 0.3, -100.0, 0.0).to(g.dtype)

    def fn(q, k, v, t, idx, mask):
        B_ = q.shape[0]
        a = (q * 0.3) @ k.transpose(-2, -1)
        b = t[idx.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        a = a + b.unsqueeze(0)
        a = a.view(B_ // nW, nW, g.H, n, n) + mask.unsqueeze(1).unsqueeze(0)
        a = a.view(-1, g.H, n, n).softmax(-1)
        return (a @ v).transpose(1, 2).reshape(B_, n, g.H * g.D)

    return fn, (*[g.r(2 * nW, g.H, n, g.D) for _ in range(3)], g.r(49, g.H), idx, mask)


@form()
def swin_shift_mask_in_graph(g):
    def fn(q, k, v):
        H = W = 8
        ws = 4
        sh = 2
        im = torch.zeros((1, H, W, 1))
        c = 0
        for hs in (slice(0, -ws), slice(-ws, -sh), slice(-sh, None)):
            for w in (slice(0, -ws), slice(-ws, -sh), slice(-sh, None)):
                im[:, hs, w, :] = c
                c += 1
        m = im.view(1, 2, ws, 2, ws, 1).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, ws * ws)
        m = m.unsqueeze(1) - m.unsqueeze(2)
        m = m.masked_fill(m != 0, -100.0).masked_fill(m == 0, 0.0).to(q.dtype)
        a = q @ k.mT
        a = a.view(2, 4, g.H, 16, 16) + m.unsqueeze(1).unsqueeze(0)
        return a.view(-1, g.H, 16, 16).softmax(-1) @ v

    return fn, [g.r(8, g.H, 16, g.D) for _ in range(3)]


# ------------------------------------------------------------------ qkv splitting
def qkvmod(split, n=1):
    def make(g):
        class A(nn.Module):
            def __init__(s):
                super().__init__()
                e = g.H * g.D
                s.qkv = nn.Linear(e, 3 * e)
                s.proj = nn.Linear(e, e)

            def forward(s, x):
                q, k, v = split(s.qkv(x), g, x)
                y = sc(q, k).softmax(-1) @ v
                return s.proj(y.transpose(1, 2).reshape(x.shape))

        return g.module(A()), (g.x(),)

    return make


def H(t, g):
    return t.view(t.shape[0], t.shape[1], g.H, -1).transpose(1, 2)


for nm, f in {
    "timm": lambda t, g, x: t.reshape(x.shape[0], x.shape[1], 3, g.H, g.D).permute(2, 0, 3, 1, 4).unbind(0),
    "timm_index": lambda t, g, x: (lambda y: (y[0], y[1], y[2]))(
        t.reshape(x.shape[0], x.shape[1], 3, g.H, g.D).permute(2, 0, 3, 1, 4)
    ),
    "chunk": lambda t, g, x: [H(y, g) for y in t.chunk(3, dim=-1)],
    "split": lambda t, g, x: [H(y, g) for y in t.split(g.H * g.D, -1)],
    "neox": lambda t, g, x: [
        y.permute(0, 2, 1, 3) for y in t.view(x.shape[0], x.shape[1], g.H, 3 * g.D).split(g.D, -1)
    ],
    "bloom": lambda t, g, x: [t.view(x.shape[0], x.shape[1], g.H, 3, g.D)[..., i, :].transpose(1, 2) for i in range(3)],
    "unbind2": lambda t, g, x: [y.transpose(1, 2) for y in t.view(x.shape[0], x.shape[1], 3, g.H, g.D).unbind(2)],
    "unflatten": lambda t, g, x: t.unflatten(-1, [3, g.H, g.D]).movedim(2, 0).transpose(2, 3),
    "tensor_split": lambda t, g, x: [
        y.view(x.shape[0], -1, g.H, g.D).swapaxes(1, 2) for y in torch.tensor_split(t, 3, dim=2)
    ],
    "select": lambda t, g, x: [
        t.view(x.shape[0], x.shape[1], 3, g.H, g.D).select(2, i).transpose(1, 2) for i in range(3)
    ],
    "narrow": lambda t, g, x: [H(t.narrow(-1, i * g.H * g.D, g.H * g.D), g) for i in range(3)],
    "slices": lambda t, g, x: [H(t[..., i * g.H * g.D : (i + 1) * g.H * g.D], g) for i in range(3)],
}.items():
    f2 = qkvmod(f)
    f2.__name__ = "qkv_" + nm
    form()(f2)


# ------------------------------------------------------------------ strides and sizes
@form()
def noncontiguous_inputs(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(g.S, g.H, g.B, g.D).permute(2, 1, 0, 3).detach().requires_grad_(),
        g.r(g.B, g.H, g.D, g.S).mT.detach().requires_grad_(),
        g.r(g.B, g.H, g.S, 2 * g.D)[..., ::2].detach().requires_grad_(),
    )


@form()
def expanded_keys_values(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, 1, g.S, g.D).detach().expand(-1, g.H, -1, -1).requires_grad_(),
        g.r(1, 1, g.S, g.D).detach().expand(g.B, g.H, -1, -1).requires_grad_(),
    )


@form()
def expanded_in_graph(g):
    return (lambda q, k, v: sc(q, k.expand(-1, g.H, -1, -1)).softmax(-1) @ v.expand(g.B, g.H, -1, -1)), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, 1, g.S, g.D),
        g.r(1, 1, g.S, g.D),
    )


@form()
def learned_query_expanded(g):
    return (lambda q, k, v: sc(q.expand(g.B, -1, -1, -1), k).softmax(-1) @ v), (
        g.r(1, g.H, 3, g.D),
        g.r(g.B, g.H, 17, g.D),
        g.r(g.B, g.H, 17, g.D),
    )


@form()
def one_query(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (g.r(g.B, g.H, 1, g.D), *g.qkv()[1:])


@form()
def one_query_squeezed(g):
    return (lambda q, k, v: torch.bmm(torch.bmm(q.unsqueeze(1), k.mT).softmax(-1), v).squeeze(1)), (
        g.r(g.B, g.D),
        g.r(g.B, g.S, g.D),
        g.r(g.B, g.S, g.D),
    )


@form()
def one_key(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, g.H, 1, g.D),
        g.r(g.B, g.H, 1, g.D),
    )


@form()
def one_query_one_key(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(g.B, g.H, 1, g.D) for _ in range(3)]


@form()
def one_depth(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(g.B, g.H, g.S, 1) for _ in range(3)]


@form()
def one_value_column(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (*g.qkv()[:2], g.r(g.B, g.H, g.S, 1))


@form()
def one_head(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(g.B, 1, g.S, g.D) for _ in range(3)]


@form()
def one_batch(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(1, g.H, g.S, g.D) for _ in range(3)]


@form()
def all_ones(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(1, 1, 1, 1) for _ in range(3)]


@form()
def no_queries(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (g.r(g.B, g.H, 0, g.D), *g.qkv()[1:])


@form()
def no_keys(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), (
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, g.H, 0, g.D),
        g.r(g.B, g.H, 0, g.D),
    )


@form()
def no_batch(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(0, g.H, g.S, g.D) for _ in range(3)]


@form()
def square_all_equal(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v), [g.r(4, 4, 4, 4) for _ in range(3)]


@form()
def square_all_equal_transposed_v(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v.mT), [g.r(4, 4, 4, 4) for _ in range(3)]


@form()
def square_weights_transposed(g):
    return (lambda q, k, v: sc(q, k).softmax(-2).mT @ v), [g.r(4, 4, 4, 4) for _ in range(3)]


@form(skip="*")
def square_wrong_axis(g):
    return (lambda q, k, v: sc(q, k).softmax(-2) @ v), [g.r(4, 4, 4, 4) for _ in range(3)]


@form()
def square_key_not_transposed(g):
    return (lambda q, k, v: (q @ k).softmax(-1) @ v), [g.r(4, 4, 4, 4) for _ in range(3)]


@form()
def output_sum_expanded_grad(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) @ v).sum()), g.qkv()


@form()
def output_strided_use(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) @ v)[..., ::2]), g.qkv()


@form()
def output_view_after(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) @ v).view(g.B * g.H, g.S * g.D)), g.qkv()


@form()
def output_inplace_after(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) @ v).add_(1.0).mul_(2.0)), g.qkv()
