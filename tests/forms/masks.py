"""Scales, caps and masks in every spelling: causal, padding, windows, documents, prefixes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from forms.registry import NEG, form, lowest, sc

INF = float("inf")


# ------------------------------------------------------------------ scale
@form()
def mask_of_the_scores_dtype(g):
    def fn(q, k, v, m):
        s = sc(q, k)
        return (s + m.type_as(s)).softmax(-1) @ v

    mask = torch.zeros(g.S, g.S, dtype=torch.float64).masked_fill(~g.keep(g.S, g.S), NEG)
    return fn, (*g.qkv(), mask)


@form()
def scale_on_query(g):
    return (lambda q, k, v: ((q * g.D**-0.5) @ k.mT).softmax(-1) @ v), g.qkv()


@form()
def scale_on_key(g):
    return (lambda q, k, v: (q @ (k / math.sqrt(g.D)).mT).softmax(-1) @ v), g.qkv()


@form()
def scale_split_quarter(g):
    return (lambda q, k, v: ((q * g.D**-0.25) @ (k * g.D**-0.25).mT).softmax(-1) @ v), g.qkv()


@form()
def scale_left_mul(g):
    return (lambda q, k, v: (0.3 * (q @ k.mT)).softmax(-1) @ v), g.qkv()


@form()
def scale_torch_sqrt_tensor(g):
    return (lambda q, k, v: (q @ k.mT / torch.sqrt(torch.tensor(q.size(-1), dtype=q.dtype))).softmax(-1) @ v), g.qkv()


@form()
def scale_tensor_in_graph_pow(g):
    return (lambda q, k, v: (q @ k.mT * torch.tensor(float(k.size(-1))).pow(-0.5).to(q.dtype)).softmax(-1) @ v), g.qkv()


@form()
def scale_rsqrt_full(g):
    return (
        lambda q, k, v: (q @ k.mT * torch.rsqrt(torch.full((), float(g.D), dtype=q.dtype))).softmax(-1) @ v
    ), g.qkv()


@form()
def scale_full_tensor_gpt2(g):
    return (
        lambda q, k, v: (q @ k.mT / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype, device=q.device)).softmax(-1) @ v
    ), g.qkv()


@form()
def scale_by_layer_and_size(g):
    return (lambda q, k, v: (q @ k.mT / (v.size(-1) ** 0.5) / float(3 + 1)).softmax(-1) @ v), g.qkv()


@form()
def scale_reciprocal(g):
    return (lambda q, k, v: (q @ k.mT * torch.reciprocal(torch.tensor(2.0))).softmax(-1) @ v), g.qkv()


@form()
def scale_parameter_heads(g):
    return (lambda q, k, v, t: (q @ k.mT * t).softmax(-1) @ v), (*g.qkv(), g.r(g.H, 1, 1))


@form()
def scale_parameter_0d(g):
    return (lambda q, k, v, t: (q @ k.mT * t).softmax(-1) @ v), (*g.qkv(), g.r())


@form()
def scale_parameter_div(g):
    t = (torch.rand(g.H, 1, 1, generator=g.rng) + 1).to(g.dtype).requires_grad_()
    return (lambda q, k, v, t: (q @ k.mT / t).softmax(-1) @ v), (*g.qkv(), t)


@form()
def scale_tensor_per_query(g):
    return (lambda q, k, v, t: (q @ k.mT * t).softmax(-1) @ v), (*g.qkv(), g.r(g.B, 1, g.S, 1))


@form()
def scale_tensor_per_key(g):
    return (lambda q, k, v, t: (q @ k.mT * t).softmax(-1) @ v), (*g.qkv(), g.r(g.B, 1, 1, g.S))


@form()
def scale_log_n(g):
    return (lambda q, k, v: (q @ k.mT * (math.log(k.shape[-2]) / math.sqrt(q.shape[-1]))).softmax(-1) @ v), g.qkv(n=17)


@form()
def scale_log_position(g):
    def fn(q, k, v):
        pos = torch.arange(1, q.shape[-2] + 1, dtype=q.dtype)
        return (q @ k.mT * (pos.log() / math.log(512)).clamp(min=1.0)[:, None]).softmax(-1) @ v

    return fn, g.qkv()


@form()
def swinv2_cosine(g):
    def fn(q, k, v, ls, b):
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return (a * torch.clamp(ls, max=math.log(1 / 0.01)).exp() + b).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 1, 1), g.r(1, g.H, g.S, g.S))


@form()
def swinv2_clamp_tensor_max(g):
    def fn(q, k, v, ls):
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return (a * torch.clamp(ls, max=torch.log(torch.tensor(1.0 / 0.01))).exp()).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 1, 1))


@form()
def swinv2_cpb(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.mlp = nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, g.H, bias=False))
            s.ls = nn.Parameter(torch.zeros(g.H, 1, 1))
            n = 3
            c = torch.stack(torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")).flatten(1)
            rel = (c[:, :, None] - c[:, None, :]).permute(1, 2, 0) + n - 1
            rel[:, :, 0] *= 2 * n - 1
            s.register_buffer("idx", rel.sum(-1))
            t = torch.arange(-(n - 1), n).float()
            s.register_buffer(
                "table", torch.stack(torch.meshgrid(t, t, indexing="ij")).permute(1, 2, 0).contiguous()[None]
            )

        def forward(s, q, k, v):
            a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * s.ls.clamp(max=4.6).exp()
            b = s.mlp(s.table.to(q.dtype)).view(-1, g.H)[s.idx.view(-1)].view(9, 9, -1).permute(2, 0, 1).contiguous()
            return F.softmax(a + (16 * torch.sigmoid(b)).unsqueeze(0), -1) @ v

    g.S = 9
    return g.module(A()), g.qkv()


@form()
def softcap(g):
    return (lambda q, k, v: (torch.tanh(sc(q, k) / 5.0) * 5.0).softmax(-1) @ v), g.qkv()


@form()
def softcap_mask_gemma2(g):
    def fn(q, k, v, m):
        a = sc(q, k) / 5.0
        a = torch.tanh(a)
        a = a * 5.0
        a = a + m
        return F.softmax(a, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    m = torch.full((g.S, g.S), -1e38).triu(1)[None, None].to(g.dtype)
    return fn, (*g.qkv(), m)


@form()
def grok_softcap(g):
    return (lambda q, k, v: (30 * torch.tanh(sc(q, k) * 0.08838834764831845 / 30)).softmax(-1) @ v), g.qkv()


# ------------------------------------------------------------------ causal
@form()
def nanogpt(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            e = g.H * g.D
            s.c_attn = nn.Linear(e, 3 * e)
            s.c_proj = nn.Linear(e, e)
            s.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
            s.drop = nn.Dropout(0.0)

        def forward(s, x):
            B, T, C = x.size()
            q, k, v = s.c_attn(x).split(C, dim=2)
            q, k, v = (t.view(B, T, g.H, C // g.H).transpose(1, 2) for t in (q, k, v))
            a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            a = a.masked_fill(s.bias[:, :, :T, :T] == 0, float("-inf"))
            a = s.drop(F.softmax(a, dim=-1))
            y = a @ v
            return s.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    return g.module(A()), (g.x(),)


@form()
def gpt1_mul_mask(g):
    m = torch.tril(torch.ones(32, 32, dtype=g.dtype)).view(1, 1, 32, 32)

    def fn(q, k, v, m):
        w = sc(q, k)
        b = m[:, :, : w.size(-2), : w.size(-1)]
        return (w * b + -1e4 * (1 - b)).softmax(-1) @ v

    return fn, (*g.qkv(), m)


@form()
def gpt1_mul_mask_in_graph(g):
    def fn(q, k, v):
        w = sc(q, k)
        n = w.shape[-1]
        b = torch.tril(torch.ones(n, n, dtype=q.dtype)).view(1, 1, n, n)
        return (w * b - 1e4 * (1 - b)).softmax(-1) @ v

    return fn, g.qkv()


@form()
def gpt2_old_slice(g):
    m = torch.tril(torch.ones((32, 32), dtype=torch.uint8)).view(1, 1, 32, 32)

    def fn(q, k, v, b):
        w = q @ k.transpose(-1, -2)
        w = w / (float(v.size(-1)) ** 0.5)
        nd, ns = w.size(-2), w.size(-1)
        m = b[:, :, ns - nd : ns, :ns].bool()
        w = torch.where(m, w, torch.tensor(-1e4, dtype=w.dtype))
        return nn.Softmax(dim=-1)(w) @ v

    q, k, v = g.qkv(n=17)
    return fn, (q, k, v, m)


@form()
def gpt2_mask_value_tensor(g):
    m = torch.tril(torch.ones((32, 32), dtype=torch.bool)).view(1, 1, 32, 32)

    def fn(q, k, v, b):
        w = q @ k.transpose(-1, -2)
        w = w / torch.full([], v.size(-1) ** 0.5, dtype=w.dtype)
        nd, ns = w.size(-2), w.size(-1)
        mv = torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype)
        return torch.where(b[:, :, ns - nd : ns, :ns], w.to(w.dtype), mv).softmax(-1).type(v.dtype) @ v

    q, k, v = g.qkv(n=17)
    return fn, (q, k, v, m)


@form()
def causal_triu_inf_added(g):
    def fn(q, k, v):
        m = torch.triu(torch.full((q.size(-2), k.size(-2)), NEG), diagonal=1).to(q.dtype)
        return (sc(q, k) + m).softmax(-1) @ v

    return fn, g.qkv()


@form()
def causal_triu_ones_bool(g):
    return (
        lambda q, k, v: sc(q, k).masked_fill(torch.triu(torch.ones(g.S, g.S), 1).bool(), NEG).softmax(-1) @ v
    ), g.qkv()


@form()
def causal_triu_ones_eq1(g):
    return (
        lambda q, k, v: (
            sc(q, k).masked_fill(torch.triu(torch.ones(g.S, g.S, dtype=torch.int), 1) == 1, -1e9).softmax(-1) @ v
        )
    ), g.qkv()


@form()
def causal_tutorial_subsequent(g):
    def fn(q, k, v):
        m = (torch.triu(torch.ones(g.S, g.S)) == 1).transpose(0, 1)
        m = m.float().masked_fill(m == 0, NEG).masked_fill(m == 1, 0.0).to(q.dtype)
        return (sc(q, k) + m).softmax(-1) @ v

    return fn, g.qkv()


@form()
def causal_annotated_transformer(g):
    def fn(q, k, v):
        m = torch.triu(torch.ones((1, g.S, g.S)), diagonal=1).type(torch.uint8) == 0
        return sc(q, k).masked_fill(m.unsqueeze(1) == 0, -1e9).softmax(dim=-1) @ v

    return fn, g.qkv()


@form()
def causal_fairseq_fill_with_neg_inf(g):
    def fn(q, k, v):
        m = torch.triu(torch.zeros(g.S, g.S).float().fill_(float("-inf")).type_as(q), 1)
        return F.softmax((sc(q, k) + m.unsqueeze(0)).float(), -1).type_as(q) @ v

    return fn, g.qkv()


@form()
def causal_xtransformers(g):
    def fn(q, k, v):
        i, j = sc(q, k).shape[-2:]
        m = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
        return sc(q, k).masked_fill(m, -torch.finfo(q.dtype).max).softmax(-1) @ v

    return fn, g.qkv(n=17)


@form()
def causal_bottom_right_arange(g):
    def fn(q, k, v):
        i = torch.arange(q.shape[2]).view(-1, 1) + (k.shape[2] - q.shape[2])
        j = torch.arange(k.shape[2]).view(1, -1)
        return torch.where(j <= i, sc(q, k), lowest(q)).softmax(-1) @ v

    return fn, g.qkv(n=17)


@form()
def causal_cache_position(g):
    def fn(q, k, v, pos):
        m = torch.full((q.shape[2], k.shape[2]), lowest(q), dtype=q.dtype)
        m = torch.triu(m, diagonal=1) if q.shape[2] != 1 else m
        m = m * (torch.arange(k.shape[2]) > pos.reshape(-1, 1))
        return (sc(q, k) + m[None, None]).softmax(-1) @ v

    return fn, (*g.qkv(n=17), torch.arange(4, 17))


@form()
def causal_tril_indices_buffer(g):
    m = torch.ones(32, 32).tril()
    return (lambda q, k, v, m: sc(q, k).masked_fill(m[: q.size(2), : k.size(2)] == 0, NEG).softmax(-1) @ v), (
        *g.qkv(),
        m,
    )


@form()
def causal_from_cumsum(g):
    def fn(q, k, v):
        i = torch.ones(g.S, dtype=torch.long).cumsum(0)
        return torch.where(i[:, None] >= i[None], sc(q, k), NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def causal_one_minus_float(g):
    return (
        lambda q, k, v: (sc(q, k) - (1.0 - torch.tril(torch.ones(g.S, g.S, dtype=q.dtype))) * 1e4).softmax(-1) @ v
    ), g.qkv()


@form()
def causal_not_tril(g):
    return (
        lambda q, k, v: sc(q, k).masked_fill(~torch.tril(torch.ones(g.S, g.S, dtype=torch.bool)), NEG).softmax(-1) @ v
    ), g.qkv()


@form()
def causal_logical_not(g):
    return (
        lambda q, k, v: sc(q, k).masked_fill(torch.logical_not(torch.ones(g.S, g.S).tril()), NEG).softmax(-1) @ v
    ), g.qkv()


@form()
def causal_expand_batch(g):
    return (
        lambda q, k, v: (
            sc(q, k)
            .masked_fill(torch.ones(g.S, g.S).tril().bool().logical_not()[None, None].expand(g.B, g.H, -1, -1), NEG)
            .softmax(-1)
            @ v
        )
    ), g.qkv()


@form()
def causal_strict(g):
    return (lambda q, k, v: sc(q, k).masked_fill(torch.ones(g.S, g.S).triu().bool(), -1e9).softmax(-1) @ v), g.qkv()


@form()
def causal_strict_inf_nan_row(g):
    return (lambda q, k, v: sc(q, k).masked_fill(torch.ones(g.S, g.S).triu().bool(), NEG).softmax(-1) @ v), g.qkv()


@form()
def causal_reverse_flip(g):
    return (
        lambda q, k, v: sc(q, k).masked_fill(torch.ones(g.S, g.S).triu(1).flip(0, 1).bool(), NEG).softmax(-1) @ v
    ), g.qkv()


@form()
def causal_where_zeros_like(g):
    return (
        lambda q, k, v: (
            torch.where(torch.ones(g.S, g.S).tril() > 0, sc(q, k), torch.full_like(sc(q, k), NEG)).softmax(-1) @ v
        )
    ), g.qkv()


@form()
def causal_method_where(g):
    return (lambda q, k, v: sc(q, k).where(torch.ones(g.S, g.S, dtype=torch.bool).tril(), NEG).softmax(-1) @ v), g.qkv()


@form()
def causal_mesh_grid(g):
    def fn(q, k, v):
        i, j = torch.meshgrid(torch.arange(g.S), torch.arange(g.S), indexing="ij")
        return sc(q, k).masked_fill(j > i, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def causal_mesh_grid_xy(g):
    def fn(q, k, v):
        j, i = torch.meshgrid(torch.arange(17), torch.arange(g.S), indexing="xy")
        return sc(q, k).masked_fill(j > i, NEG).softmax(-1) @ v

    return fn, g.qkv(n=17)


@form()
def causal_outer_ge(g):
    return (
        lambda q, k, v: (
            sc(q, k)
            .masked_fill(torch.ge(torch.arange(g.S).unsqueeze(0), torch.arange(1, g.S + 1).unsqueeze(1)), NEG)
            .softmax(-1)
            @ v
        )
    ), g.qkv()


# ------------------------------------------------------------------ padding
@form()
def padding_bert_extended(g):
    m = g.padding().to(torch.long)

    def fn(q, k, v, m):
        e = m[:, None, None, :].to(dtype=q.dtype)
        e = (1.0 - e) * -10000.0
        return (sc(q, k) + e).softmax(-1) @ v

    return fn, (*g.qkv(), m)


@form()
def padding_bert_finfo_whole(g):
    m = g.padding(whole=True).to(torch.long)

    def fn(q, k, v, m):
        e = m[:, None, None, :].to(dtype=q.dtype)
        e = (1.0 - e) * torch.finfo(q.dtype).min
        return (sc(q, k) + e).softmax(-1) @ v

    return fn, (*g.qkv(), m)


@form()
def padding_whole_inf_nan(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1) @ v), (
        *g.qkv(),
        g.padding(whole=True),
    )


@form()
def padding_whole_inf_added_nan(g):
    def fn(q, k, v, m):
        return (sc(q, k) + torch.zeros(m.shape, dtype=q.dtype).masked_fill(~m, NEG)[:, None, None]).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def padding_whole_finfo_filled(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(~m[:, None, None], lowest(q)).softmax(-1) @ v), (
        *g.qkv(),
        g.padding(whole=True),
    )


@form()
def padding_whole_where_zero_after(g):
    def fn(q, k, v, m):
        m = m[:, None, None]
        return torch.where(m, sc(q, k).masked_fill(~m, NEG).softmax(-1), 0.0) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def padding_espnet(g):
    def fn(q, k, v, m):
        mask = m.unsqueeze(1).eq(0).unsqueeze(1)
        s = sc(q, k).masked_fill(mask, float(torch.finfo(q.dtype).min))
        a = torch.softmax(s, dim=-1).masked_fill(mask, 0.0)
        return torch.matmul(F.dropout(a, 0.1, False), v)

    return fn, (*g.qkv(), g.padding(whole=True).long())


@form()
def padding_fairseq(g):
    # [B*H,T,S] -> view -> masked_fill_(key_padding_mask.unsqueeze(1).unsqueeze(2).to(bool)) -> view
    def fn(q, k, v, pad):
        b, h, t, d = q.shape
        q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
        w = torch.bmm(q, k.transpose(1, 2))
        w = w.view(b, h, t, -1)
        w = w.masked_fill(pad.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
        w = w.view(b * h, t, -1)
        p = F.softmax(w.float(), dim=-1).type_as(w)
        return torch.bmm(p, v)

    return fn, (*g.qkv(), (~g.padding()).to(torch.uint8))


@form()
def padding_bart_old(g):
    def fn(q, k, v, m):
        b, h, t, d = q.shape
        inv = 1.0 - m[:, None, None, :].expand(b, 1, t, m.shape[1]).to(q.dtype)
        inv = inv.masked_fill(inv.bool(), torch.finfo(q.dtype).min)
        q, k, v = (x.reshape(b * h, -1, d) for x in (q * d**-0.5, k, v))
        w = torch.bmm(q, k.transpose(1, 2))
        w = w.view(b, h, t, -1) + inv
        w = w.view(b * h, t, -1)
        o = torch.bmm(F.dropout(F.softmax(w, dim=-1), 0.1, training=False), v)
        return o.view(b, h, t, d).transpose(1, 2).reshape(b, t, h * d)

    return fn, (*g.qkv(), g.padding().long())


@form()
def padding_distilbert(g):
    def fn(q, k, v, mask):
        mask = (mask == 0).view(g.B, 1, 1, g.S).expand_as(q @ k.transpose(2, 3))
        s = (q / math.sqrt(g.D)) @ k.transpose(2, 3)
        s = s.masked_fill(mask, torch.tensor(torch.finfo(s.dtype).min))
        return F.softmax(s, dim=-1) @ v

    return fn, (*g.qkv(), g.padding().long())


@form()
def padding_xlm(g):
    def fn(q, k, v, mask):
        s = (q / math.sqrt(g.D)) @ k.transpose(2, 3)
        m = (mask == 0).view((g.B, 1, 1, g.S)).expand_as(s)
        s = s.masked_fill_(m, torch.finfo(s.dtype).min)
        return F.softmax(s.float(), dim=-1).type_as(s) @ v

    return fn, (*g.qkv(), g.padding().long())


@form()
def padding_query_and_key(g):
    def fn(q, k, v, m):
        mm = m[:, None, :, None] & m[:, None, None, :]
        return sc(q, k).masked_fill(~mm, -1e9).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding())


@form()
def padding_query_mul_key_float(g):
    def fn(q, k, v, m):
        m = m.to(q.dtype)
        mm = m[:, :, None] * m[:, None, :]
        return (sc(q, k) + (1 - mm[:, None]) * -1e6).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding())


@form()
def padding_bmm_outer_mask(g):
    def fn(q, k, v, m):
        m = m.to(q.dtype)
        mm = torch.einsum("bi,bj->bij", m, m)
        return sc(q, k).masked_fill(mm[:, None] == 0, -1e9).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding())


@form()
def padding_lengths_in_graph(g):
    def fn(q, k, v, ln):
        m = torch.arange(k.shape[2])[None, :] < ln[:, None]
        return sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1) @ v

    return fn, (*g.qkv(), torch.tensor([5, 13]))


@form()
def padding_and_causal_llama(g):
    def fn(q, k, v, m):
        n = q.shape[2]
        c = torch.full((n, n), lowest(q), dtype=q.dtype)
        c = torch.triu(c, 1)
        c = c[None, None].expand(g.B, 1, -1, -1).clone()
        p = c + m[:, None, None, :].to(q.dtype)
        p = p == 0
        c = c.masked_fill(p & (c == 0) & (m[:, None, None, :] == 0), lowest(q))
        return F.softmax(sc(q, k) + c, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    return fn, (*g.qkv(), g.padding().flip(1).long())


@form()
def padding_llama_clone_setitem(g):
    def fn(q, k, v, m):
        n = q.shape[2]
        c = torch.triu(torch.full((n, n), lowest(q), dtype=q.dtype), 1)[None, None].expand(g.B, 1, -1, -1).clone()
        p = c[:, :, :, :n] + m[:, None, None, :].to(q.dtype)
        p = p == 0
        c[:, :, :, :n] = c[:, :, :, :n].masked_fill(p, lowest(q))
        return F.softmax(sc(q, k) + c, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    return fn, (*g.qkv(), g.padding().flip(1).long())


@form()
def padding_left_rows_whole(g):
    def fn(q, k, v, m):
        i = torch.arange(g.S)
        mm = (i[None] <= i[:, None])[None, None] & m[:, None, None, :]
        return torch.where(mm, sc(q, k), lowest(q)).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding().flip(1))


@form()
def padding_old_hf_combined_min(g):
    def _mk(n, dt):
        m = torch.full((n, n), torch.finfo(dt).min)
        c = torch.arange(n)
        m.masked_fill_(c < (c + 1).view(n, 1), 0)
        return m.to(dt)

    def fn(q, k, v, m):
        c = _mk(g.S, q.dtype)[None, None].expand(g.B, 1, g.S, g.S)
        e = m[:, None, None, :].expand(g.B, 1, g.S, g.S).to(q.dtype)
        inv = 1.0 - e
        inv = inv.masked_fill(inv.to(torch.bool), torch.finfo(q.dtype).min)
        a = sc(q, k) + (inv + c).clamp(min=torch.finfo(q.dtype).min)
        a = torch.max(a, torch.tensor(torch.finfo(a.dtype).min))
        return a.softmax(-1) @ v

    return fn, (*g.qkv(), g.padding().flip(1).long())


@form()
def padding_opt_masked_fill_add(g):
    def fn(q, k, v, m):
        a = sc(q, k) + m
        a = torch.max(a, torch.tensor(torch.finfo(a.dtype).min))
        return F.softmax(a, dim=-1) @ v

    m = torch.zeros(g.B, 1, g.S, g.S, dtype=g.dtype).masked_fill(~g.keep(g.B, 1, g.S, g.S), torch.finfo(g.dtype).min)
    return fn, (*g.qkv(), m)


@form()
def mask_float_requires_grad(g):
    return (lambda q, k, v, m: (sc(q, k) + m).softmax(-1) @ v), (*g.qkv(), g.r(g.B, 1, 1, g.S))


@form()
def mask_int8_eq0(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(m == 0, -1e9).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, g.S, g.S).to(torch.int8),
    )


@form()
def mask_uint8_to_bool(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(m.to(torch.bool), -1e9).softmax(-1) @ v), (
        *g.qkv(),
        (~g.keep(g.B, 1, 1, g.S)).to(torch.uint8),
    )


@form()
def mask_uint8_one_minus(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill((1 - m).bool(), -1e9).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, 1, g.S).to(torch.uint8),
    )


@form()
def mask_float_lt_half(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(m < 0.5, -1e9).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, 1, g.S).to(g.dtype),
    )


@form()
def mask_float_bool_ne(g):
    return (lambda q, k, v, m: torch.where(m != 0, sc(q, k), -1e9).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, 1, g.S).to(g.dtype),
    )


@form()
def mask_times_scores(g):
    return (lambda q, k, v, m: (sc(q, k) * m).softmax(-1) @ v), (*g.qkv(), g.keep(g.B, 1, 1, g.S).to(g.dtype))


@form()
def mask_mul_minus_1e9(g):
    return (lambda q, k, v, m: (sc(q, k) + m * -1e9).softmax(-1) @ v), (*g.qkv(), (~g.keep(g.B, 1, 1, g.S)).to(g.dtype))


@form()
def mask_log(g):
    return (lambda q, k, v, m: (sc(q, k) + (m + 1e-45).log()).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, 1, g.S).to(g.dtype),
    )


@form()
def mask_log_probs(g):
    return (lambda q, k, v, m: (sc(q, k) + torch.log(m.clamp(min=1e-6))).softmax(-1) @ v), (
        *g.qkv(),
        torch.rand(g.B, 1, g.S, g.S, generator=g.rng).to(g.dtype).requires_grad_(),
    )


@form()
def mask_sub(g):
    return (lambda q, k, v, m: (sc(q, k) - 1e8 * (1 - m)).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, 1, g.S).to(g.dtype),
    )


@form()
def mask_before_scale(g):
    return (lambda q, k, v, m: ((q @ k.mT).masked_fill(m == 0, -1e9) / math.sqrt(g.D)).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, 1, g.S),
    )


@form()
def mask_two_of_them(g):
    def fn(q, k, v, a, b):
        s = sc(q, k).masked_fill(a.unsqueeze(1).unsqueeze(1), NEG)
        s = s + b
        return s.softmax(-1) @ v

    return fn, (*g.qkv(), ~g.padding(), torch.full((g.S, g.S), NEG, dtype=g.dtype).triu(1))


@form()
def mask_xor_or(g):
    m = g.keep(g.S, g.S)
    n = g.keep(g.B, 1, 1, g.S)
    return (
        lambda q, k, v, m, n: (
            sc(q, k).masked_fill((m ^ n) & ~torch.eye(g.S, dtype=torch.bool) | (~m & ~n), -1e9).softmax(-1) @ v
        )
    ), (*g.qkv(), m, n)


@form()
def mask_eye_excluded(g):
    return (lambda q, k, v: sc(q, k).masked_fill(torch.eye(g.S, dtype=torch.bool), lowest(q)).softmax(-1) @ v), g.qkv()


@form()
def mask_lsa_vit(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.temperature = nn.Parameter(torch.log(torch.tensor(g.D**-0.5)))

        def forward(s, q, k, v):
            d = torch.matmul(q, k.transpose(-1, -2)) * s.temperature.exp()
            m = torch.eye(d.shape[-1], dtype=torch.bool)
            d = d.masked_fill(m, -torch.finfo(d.dtype).max)
            return d.softmax(-1) @ v

    m = A().to(g.dtype)
    return m, g.qkv()


@form()
def sliding_window_abs(g):
    def fn(q, k, v):
        i = torch.arange(g.S)
        d = (i[:, None] - i[None]).abs()
        return sc(q, k).masked_fill(d > 3, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def sliding_window_tril_triu(g):
    return (
        lambda q, k, v: (
            sc(q, k).masked_fill(~torch.ones(g.S, g.S, dtype=torch.bool).tril().triu(-4), NEG).softmax(-1) @ v
        )
    ), g.qkv()


@form()
def sliding_window_gemma(g):
    def fn(q, k, v):
        c = torch.triu(torch.full((g.S, g.S), lowest(q), dtype=q.dtype), 1)
        sw = torch.tril(torch.ones_like(c, dtype=torch.bool), diagonal=-4)
        return (sc(q, k) + torch.where(sw, lowest(q), c)).softmax(-1) @ v

    return fn, g.qkv()


@form()
def sliding_window_mistral_log(g):
    def fn(q, k, v):
        m = torch.tril(torch.full((g.S, g.S), 1.0, dtype=q.dtype))
        m = torch.triu(m, diagonal=-4)
        m = torch.log(m)
        return (sc(q, k) + m[None, None]).softmax(-1) @ v

    return fn, g.qkv()


@form()
def block_local(g):
    def fn(q, k, v):
        i = torch.arange(g.S) // 4
        return sc(q, k).masked_fill(i[:, None] != i[None], NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def block_causal_chunks(g):
    def fn(q, k, v):
        i = torch.arange(g.S)
        return (
            sc(q, k).masked_fill(~((i[None] // 4) <= torch.div(i[:, None], 4, rounding_mode="floor")), NEG).softmax(-1)
            @ v
        )

    return fn, g.qkv()


@form()
def dilated(g):
    def fn(q, k, v):
        i = torch.arange(g.S)
        d = i[:, None] - i[None]
        return sc(q, k).masked_fill((d % 3 != 0) | (d < 0), NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def strided_sparse(g):
    def fn(q, k, v):
        i = torch.arange(g.S)[:, None]
        j = torch.arange(g.S)[None]
        m = (j <= i) & ((i - j < 4) | (torch.remainder(i - j, 4) == 0))
        return sc(q, k).masked_fill(~m, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def global_tokens(g):
    def fn(q, k, v, gl):
        i = torch.arange(g.S)
        near = (i[:, None] - i[None]).abs() <= 2
        m = near[None] | gl[:, :, None] | gl[:, None, :]
        return sc(q, k).masked_fill(~m[:, None], lowest(q)).softmax(-1) @ v

    return fn, (*g.qkv(), g.keep(g.B, g.S, p=0.2))


@form()
def documents_segment_ids(g):
    def fn(q, k, v, seg):
        m = seg.unsqueeze(-1).eq(seg.unsqueeze(-2)).unsqueeze(1)
        return torch.where(m, sc(q, k), torch.tensor(-1e9, dtype=q.dtype)).softmax(-1) @ v

    return fn, (*g.qkv(), torch.tensor([0] * 4 + [1] * 5 + [2] * 4)[None].repeat(g.B, 1))


@form()
def documents_float_ids(g):
    def fn(q, k, v, seg):
        return sc(q, k).masked_fill((seg[:, None, :, None] - seg[:, None, None, :]) != 0, NEG).softmax(-1) @ v

    return fn, (*g.qkv(), torch.tensor([0] * 4 + [1] * 5 + [2] * 4)[None].repeat(g.B, 1).float())


@form()
def documents_cumsum_eos(g):
    def fn(q, k, v, tok):
        seg = (tok == 0).long().cumsum(-1)
        i = torch.arange(g.S)
        m = (seg[:, :, None] == seg[:, None, :]) & (i[:, None] >= i[None])
        return sc(q, k).masked_fill(~m[:, None], lowest(q)).softmax(-1) @ v

    return fn, (*g.qkv(), torch.randint(0, 3, (g.B, g.S), generator=g.rng))


@form()
def documents_searchsorted(g):
    def fn(q, k, v, cu):
        i = torch.arange(g.S)
        seg = torch.searchsorted(cu, i, right=True)
        return sc(q, k).masked_fill(seg[:, None] != seg[None], NEG).softmax(-1) @ v

    return fn, (*g.qkv(), torch.tensor([0, 4, 9, 13]))


@form()
def prefix_or(g):
    def fn(q, k, v, pre):
        i = torch.arange(g.S)
        m = torch.ones(g.S, g.S, dtype=torch.bool).tril()[None] | (i < pre[:, None])[:, None, :]
        return sc(q, k).masked_fill(~m[:, None], NEG).softmax(-1) @ v

    return fn, (*g.qkv(), torch.tensor([3, 7]))


@form()
def prefix_unilm_slice_setitem(g):
    def fn(q, k, v):
        m = torch.ones(g.S, g.S, dtype=torch.bool).tril()
        m[:, :4] = True
        return sc(q, k).masked_fill(~m, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def tree_mask_indexed(g):
    return (lambda q, k, v, m, i: sc(q, k).masked_fill(~m[i][:, i], NEG).softmax(-1) @ v), (
        *g.qkv(),
        torch.ones(32, 32, dtype=torch.bool).tril(),
        torch.arange(2, 15),
    )


@form()
def xlnet_mask_einsum(g):
    def fn(q, k, v, m):
        s = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.3
        s = s - 1e30 * torch.einsum("ijbn->bnij", m)
        p = F.softmax(s, dim=3)
        return torch.einsum("bnij,jbnd->ibnd", p, v)

    m = (~g.keep(g.S, g.S, g.B, 1, p=0.8)).to(g.dtype)
    m[:, 0] = 0
    return fn, (*[g.r(g.S, g.B, g.H, g.D) for _ in range(3)], m)


@form()
def transfoxl_mask_ibjn(g):
    def fn(q, k, v):
        s = torch.einsum("ibnd,jbnd->ijbn", q, k) * 0.3
        m = torch.ones(g.S, g.S).triu(1)[:, :, None].bool()
        s = s.float().masked_fill(m[:, :, :, None], -1e30).type_as(s)
        p = F.softmax(s, dim=1)
        return torch.einsum("ijbn,jbnd->ibnd", p, v)

    return fn, [g.r(g.S, g.B, g.H, g.D) for _ in range(3)]


@form()
def ctrl_mask_mul(g):
    def fn(q, k, v, m):
        s = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(g.D)
        nd, ns = s.size(-2), s.size(-1)
        s = s + m[ns - nd : ns, :ns] * -1e4
        return torch.matmul(torch.softmax(s, dim=-1), v)

    return fn, (*g.qkv(), torch.triu(torch.ones(32, 32), 1).to(g.dtype))


@form()
def gptj_causal(g):
    cm = torch.tril(torch.ones((32, 32), dtype=torch.bool)).view(1, 1, 32, 32)

    def fn(q, k, v, cm, sa):
        ql, kl = q.size(-2), k.size(-2)
        c = cm[:, :, kl - ql : kl, :kl]
        q = q.to(torch.float32)
        k = k.to(torch.float32)
        w = q @ k.transpose(-1, -2)
        w = torch.where(c, w, torch.tensor(torch.finfo(w.dtype).min, dtype=w.dtype))
        w = w / sa
        return nn.functional.softmax(w, dim=-1).to(v.dtype) @ v

    return fn, (*g.qkv(), cm, torch.sqrt(torch.tensor(float(g.D))))


@form()
def gptneo_local(g):
    n = 32
    b = torch.tril(torch.ones((n, n), dtype=torch.bool)).view(1, 1, n, n)
    b = torch.bitwise_xor(b, torch.tril(b, -4))

    def fn(q, k, v, b):
        w = q.float() @ k.float().transpose(-1, -2)
        m = b[:, :, : g.S, : g.S]
        w = torch.where(m, w, torch.tensor(torch.finfo(w.dtype).min, dtype=w.dtype))
        return F.softmax(w, -1).to(v.dtype) @ v

    return fn, (*g.qkv(), b)


@form()
def gptneo_local_in_graph(g):
    def fn(q, k, v):
        b = torch.tril(torch.ones((g.S, g.S), dtype=torch.bool))
        b = torch.bitwise_xor(b, torch.tril(b, -4))
        return torch.where(b, sc(q, k), lowest(q)).softmax(-1) @ v

    return fn, g.qkv()


@form()
def allennlp_masked_softmax_memory_efficient(g):
    def fn(q, k, v, m):
        s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
        m = m[:, None, None].expand(g.B, g.H, g.S, g.S).reshape(-1, g.S, g.S)
        return F.softmax(s.masked_fill((1 - m.float()).bool(), -1e32), -1).bmm(v.flatten(0, 1))

    return fn, (*g.qkv(), g.padding())


@form(skip="*")
def allennlp_masked_softmax_renormalised(g):
    def fn(q, k, v, m):
        s = q @ k.mT
        m = m[:, None, None].to(q.dtype)
        r = F.softmax(s * m, -1) * m
        r = r / (r.sum(-1, keepdim=True) + 1e-13)
        return r @ v

    return fn, (*g.qkv(), g.padding())


# ------------------------------------------------------------------ integers of few bits
def _of_integers(g, keep, t):
    """A mask from integers, `t` [B, S], over keys and queries; every row keeps the first key."""

    def fn(q, k, v, t):
        kept = keep(t[:, None, None, :], t[:, None, :, None])
        return torch.where(kept | (torch.arange(g.S) == 0), sc(q, k), NEG).softmax(-1) @ v

    return fn, (*g.qkv(), t)


def _spread(g, low, high, dtype):
    """Integers from `low` to `high` in disorder."""
    t = torch.linspace(low, high, g.B * g.S, dtype=torch.float64).round().long()
    return t[torch.randperm(g.B * g.S, generator=g.rng)].view(g.B, g.S).to(dtype)


@form()
def int32_products_wrap(g):
    return _of_integers(g, lambda n, m: n * m < 0, _spread(g, 30_000, 70_000, torch.int32))


@form()
def int32_squares_wrap(g):
    return _of_integers(g, lambda n, m: n**2 + m < 0, _spread(g, 30_000, 70_000, torch.int32))


@form()
def int32_differences_wrap(g):
    t = _spread(g, -(2**31), 2**31 - 1, torch.int32)
    return _of_integers(g, lambda n, m: (n - m < 10) & ((n + 1) * 3 > m) & (abs(-n) > 5), t)


@form()
def int32_differences_of_positions(g):
    return _of_integers(g, lambda n, m: abs(n - m) < 4, _spread(g, 0, 20, torch.int32))


@form()
def int64_products_do_not_wrap(g):
    return _of_integers(g, lambda n, m: n.long() * m < 5 * 10**9 // 3, _spread(g, 30_000, 70_000, torch.int32))


@form()
def int64_cut_to_int32(g):
    return _of_integers(g, lambda n, m: n.int() - m.int() > 0, _spread(g, -(2**40), 2**40 + 12345, torch.int64))


@form()
def int32_products_of_indices_wrap(g):
    def fn(q, k, v):
        i = torch.arange(g.S, dtype=torch.int32)
        kept = (i[None] * 30_000) * (i[:, None] * 10_000) >= 0
        return torch.where(kept | (i == 0), sc(q, k), NEG).softmax(-1) @ v

    return fn, g.qkv()


@form()
def int32_distances_with_sign_in_bias(g):
    def fn(q, k, v, t, slopes):
        d = (t[:, None, None, :] * 2 - t[:, None, :, None] * 2).to(q.dtype)
        return (sc(q, k) - slopes[:, None, None] * d / 2**31).softmax(-1) @ v

    return fn, (*g.qkv(), _spread(g, -(2**31), 2**31 - 1, torch.int32), g.r(g.H))


@form()
def bytes_wrap(g):
    t = _spread(g, 0, 255, torch.uint8)
    return _of_integers(g, lambda n, m: (n * n < 128) & (-n < 250) & (n + m < 200) & (n.long() * 300 > m), t)


@form()
def signed_bytes_wrap(g):
    return _of_integers(g, lambda n, m: (n**2 >= 0) & (abs(n) >= 0), _spread(g, -128, 127, torch.int8))


@form()
def arange_of_bytes(g):
    def fn(q, k, v):
        kept = torch.arange(0, 260, 20, dtype=torch.uint8)
        return torch.where(kept < 128, sc(q, k), NEG).softmax(-1) @ v

    return fn, g.qkv()
