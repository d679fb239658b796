"""Slices, caches, memory tokens, local blocks: operands that are part of a larger tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forms.registry import NEG, form, sc

INF = float("inf")


@form()
def kv_cache_prefix(g):
    return (lambda q, k, v: sc(q, k[:, :, :9]).softmax(-1) @ v[:, :, :9]), g.qkv(n=17)


@form()
def query_prefix(g):
    return (lambda q, k, v: sc(q[:, :, :5], k).softmax(-1) @ v), g.qkv(n=17)


@form()
def depth_prefix_both(g):
    return (lambda q, k, v: sc(q[..., :5], k[..., :5]).softmax(-1) @ v), g.qkv(n=17)


@form()
def value_column_prefix(g):
    return (lambda q, k, v: sc(q, k).softmax(-1) @ v[..., :3]), g.qkv(n=17)


@form()
def heads_prefix(g):
    return (lambda q, k, v: sc(q[:, :2], k[:, :2]).softmax(-1) @ v[:, :2]), g.qkv(n=17)


@form()
def heads_first_of_gqa(g):
    return (lambda q, k, v: sc(q, k[:, :1]).softmax(-1) @ v[:, :1]), g.qkv(n=17)


@form()
def batch_first(g):
    return (lambda q, k, v: sc(q, k[0]).softmax(-1) @ v[0]), g.qkv(n=17)


@form()
def batch_first_kept(g):
    return (lambda q, k, v: sc(q, k[:1]).softmax(-1) @ v[:1]), g.qkv(n=17)


@form()
def diagonal_query(g):
    return (lambda q, k, v: sc(torch.diagonal(q.reshape(4, 4, -1, 8), 0, 0, 1).permute(2, 0, 1), k).softmax(-1) @ v), (
        g.r(4, 4, g.S, 8),
        g.r(4, 17, 8),
        g.r(4, 17, 8),
    )


@form()
def cls_query(g):
    return (lambda q, k, v: sc(q[:, :, 0:1], k).softmax(-1) @ v), g.qkv(n=17)


@form()
def cls_query_select(g):
    return (lambda q, k, v: (sc(q[:, :, 0].unsqueeze(2), k).softmax(-1) @ v).squeeze(2)), g.qkv(n=17)


@form()
def last_query(g):
    return (lambda q, k, v: sc(q[:, :, -1:], k).softmax(-1) @ v), g.qkv(n=17)


@form()
def strided_keys(g):
    return (lambda q, k, v: sc(q, k[:, :, ::2]).softmax(-1) @ v[:, :, ::2]), g.qkv(n=17)


@form()
def pooled_keys(g):
    return (
        lambda q, k, v: (
            sc(q, F.avg_pool1d(k.flatten(0, 1).mT, 2).mT.unflatten(0, (g.B, g.H))).softmax(-1)
            @ F.max_pool1d(v.flatten(0, 1).mT, 2).mT.unflatten(0, (g.B, g.H))
        )
    ), g.qkv(n=16)


@form()
def cache_cat(g):
    def fn(q, k, v, pk, pv):
        k = torch.cat([pk, k], dim=-2)
        v = torch.cat([pv, v], dim=-2)
        return sc(q, k).softmax(-1) @ v, k, v

    return fn, (*g.qkv(), g.r(g.B, g.H, 4, g.D), g.r(g.B, g.H, 4, g.D))


@form()
def cache_cat_causal(g):
    def fn(q, k, v, pk, pv):
        k = torch.cat([pk, k], dim=-2)
        v = torch.cat([pv, v], dim=-2)
        m, n = q.size(2), k.size(2)
        return sc(q, k).masked_fill(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, 4, g.D), g.r(g.B, g.H, 4, g.D))


@form()
def cache_index_copy(g):
    def fn(q, k, v, ck, cv, pos):
        ck = ck.index_copy(2, pos, k)
        cv = cv.index_copy(2, pos, v)
        m = torch.arange(ck.size(2))[None] <= pos[:, None]
        return sc(q, ck).masked_fill(~m, NEG).softmax(-1) @ cv

    return fn, (*g.qkv(), g.r(g.B, g.H, 20, g.D), g.r(g.B, g.H, 20, g.D), torch.arange(3, 16))


@form()
def cache_setitem_gptfast(g):
    def fn(q, k, v, ck, cv, pos):
        ck = ck.clone()
        cv = cv.clone()
        ck[:, :, pos] = k
        cv[:, :, pos] = v
        m = torch.ones(20, 20, dtype=torch.bool).tril()[None, None, pos]
        return torch.where(m, sc(q, ck), NEG).softmax(-1) @ cv

    return fn, (*g.qkv(), g.r(g.B, g.H, 20, g.D), g.r(g.B, g.H, 20, g.D), torch.arange(3, 16))


@form()
def memory_tokens_cat(g):
    def fn(q, k, v, mk, mv):
        k = torch.cat([mk.expand(g.B, -1, -1, -1), k], -2)
        v = torch.cat([mv.expand(g.B, -1, -1, -1), v], -2)
        return sc(q, k).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(1, g.H, 2, g.D), g.r(1, g.H, 2, g.D))


@form()
def mask_cat_padded(g):
    def fn(q, k, v, m):
        m = F.pad(m, (4, 0), value=True)
        k = F.pad(k, (0, 0, 4, 0))
        v = F.pad(v, (0, 0, 4, 0))
        return sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding())


@form()
def mask_cat_ones(g):
    def fn(q, k, v, pk, m):
        m = torch.cat([torch.ones(g.B, 4, dtype=m.dtype), m], -1)
        k = torch.cat([pk, k], 2)
        v = torch.cat([pk, v], 2)
        return sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, 4, g.D), g.padding())


@form()
def mask_cat_causal_blocks(g):
    def fn(q, k, v, pk):
        m = torch.cat([torch.zeros(g.S, 4, dtype=torch.bool), torch.ones(g.S, g.S, dtype=torch.bool).triu(1)], -1)
        k = torch.cat([pk, k], 2)
        v = torch.cat([pk, v], 2)
        return sc(q, k).masked_fill(m, NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, 4, g.D))


@form()
def multi_query_axes_image(g):
    # queries on a grid [x,y], keys flat
    return (
        lambda q, k, v: torch.einsum("bhxyn,bhnd->bhxyd", torch.einsum("bhxyd,bhnd->bhxyn", q, k).softmax(-1), v)
    ), (g.r(g.B, g.H, 3, 4, g.D), g.r(g.B, g.H, 17, g.D), g.r(g.B, g.H, 17, g.D))


@form(skip="*")
def keys_on_grid_joint_softmax(g):
    return (
        lambda q, k, v: torch.einsum(
            "bhmxy,bhxyd->bhmd",
            torch.einsum("bhmd,bhxyd->bhmxy", q, k).flatten(-2).softmax(-1).unflatten(-1, (3, 4)),
            v,
        )
    ), (g.r(g.B, g.H, g.S, g.D), g.r(g.B, g.H, 3, 4, g.D), g.r(g.B, g.H, 3, 4, g.D))


@form()
def axial_attention_rows(g):
    return (lambda x, wq, wk, wv: torch.matmul(((x @ wq) @ (x @ wk).mT * 0.3).softmax(-1), x @ wv)), (
        g.r(g.B, 5, 6, g.D),
        g.w(g.D, g.D),
        g.w(g.D, g.D),
        g.w(g.D, g.D),
    )


@form()
def axial_attention_columns(g):
    return (
        lambda x, wq, wk, wv: torch.matmul(
            ((x @ wq).transpose(1, 2) @ (x @ wk).transpose(1, 2).mT * 0.3).softmax(-1), (x @ wv).transpose(1, 2)
        ).transpose(1, 2)
    ), (g.r(g.B, 5, 6, g.D), g.w(g.D, g.D), g.w(g.D, g.D), g.w(g.D, g.D))


@form()
def axial_permute_fold(g):
    def fn(x):
        b, c, h, w = x.shape
        t = x.permute(0, 3, 2, 1).reshape(b * w, h, c)
        return (sc(t, t).softmax(-1) @ t).reshape(b, w, h, c).permute(0, 3, 2, 1)

    return fn, (g.r(g.B, g.D, 5, 6),)


@form()
def chunked_local_attention_blocks(g):
    def fn(q, k, v):
        def f(t):
            return t.reshape(g.B, g.H, 4, 4, g.D)

        s = torch.einsum("bhwid,bhwjd->bhwij", f(q), f(k)) * 0.3
        s = s.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), NEG)
        return torch.einsum("bhwij,bhwjd->bhwid", s.softmax(-1), f(v)).reshape(g.B, g.H, 16, g.D)

    g.S = 16
    return fn, g.qkv()


@form()
def look_around_local_attention(g):
    def fn(q, k, v):
        def f(t):
            return t.reshape(g.B, g.H, 4, 4, g.D)

        def la(t):
            t = f(t)
            return torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], dim=3)

        pos = torch.arange(16).view(4, 4)
        kp = torch.cat([F.pad(pos, (0, 0, 1, 0), value=-1)[:-1], pos], 1)
        s = torch.einsum("bhwid,bhwjd->bhwij", f(q), la(k)) * 0.3
        m = (pos[:, :, None] < kp[:, None, :]) | (kp[:, None, :] == -1)
        s = s.masked_fill(m, -torch.finfo(s.dtype).max)
        return torch.einsum("bhwij,bhwjd->bhwid", s.softmax(-1), la(v)).reshape(g.B, g.H, 16, g.D)

    g.S = 16
    return fn, g.qkv()
