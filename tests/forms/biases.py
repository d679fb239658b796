"""Biases broadcast along every axis, with gradients; ALiBi, tables, buckets, relative positions."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from forms.registry import NEG, form, lowest, sc

INF = float("inf")


def _bias(shape):
    def make(g):
        full = (g.B, g.H, g.S, g.S)
        sh = [f if u else 1 for f, u in zip(full, shape, strict=False)]
        while sh and sh[0] == 1 and len(sh) > 2:
            sh = sh[1:]
        return (lambda q, k, v, b: (sc(q, k) + b).softmax(-1) @ v), (*g.qkv(), g.r(*sh))

    make.__name__ = "bias_" + "".join(c for c, u in zip("bhmn", shape, strict=False) if u)
    return make


for sh in itertools.product((0, 1), repeat=4):
    m = _bias(sh)
    m.__name__ += "" if any(sh) else "none"
    form()(m)


@form()
def bias_commuted(g):
    return (lambda q, k, v, b: (b + sc(q, k)).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def bias_before_scale(g):
    return (lambda q, k, v, b: ((q @ k.mT + b) * 0.3).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def bias_subtracted(g):
    return (lambda q, k, v, b: (sc(q, k) - b).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def bias_multiplied(g):
    return (lambda q, k, v, b: (sc(q, k) * b).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def bias_scaled_by_parameter(g):
    return (lambda q, k, v, b, t: (sc(q, k) + t * b).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S), g.r(g.H, 1, 1))


@form()
def bias_torch_add_alpha(g):
    return (lambda q, k, v, b: torch.add(sc(q, k), b, alpha=0.5).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S, g.S))


@form()
def bias_addcmul(g):
    return (lambda q, k, v, b, c: torch.addcmul(sc(q, k), b, c, value=0.5).softmax(-1) @ v), (
        *g.qkv(),
        g.r(g.H, g.S, g.S),
        g.r(g.S),
    )


@form()
def bias_addcdiv(g):
    return (lambda q, k, v, b: torch.addcdiv(sc(q, k), b, torch.full((1,), 2.0, dtype=q.dtype)).softmax(-1) @ v), (
        *g.qkv(),
        g.r(g.H, g.S, g.S),
    )


@form()
def bias_lerp(g):
    return (lambda q, k, v, b: torch.lerp(sc(q, k), b, 0.3).softmax(-1) @ v), (*g.qkv(), g.r(g.B, g.H, g.S, g.S))


@form()
def bias_baddbmm(g):
    return (lambda q, k, v, b: torch.baddbmm(b, q, k.mT, beta=0.5, alpha=0.3).softmax(-1) @ v), (
        *[g.r(g.B * g.H, g.S, g.D) for _ in range(3)],
        g.r(g.B * g.H, g.S, g.S),
    )


@form()
def bias_baddbmm_broadcast(g):
    return (lambda q, k, v, b: torch.baddbmm(b, q, k.mT).softmax(-1) @ v), (
        *[g.r(g.B * g.H, g.S, g.D) for _ in range(3)],
        g.r(1, g.S),
    )


@form()
def bias_addmm_2d(g):
    return (lambda q, k, v, b: torch.addmm(b, q, k.mT).softmax(-1) @ v), (*[g.r(g.S, g.D) for _ in range(3)], g.r(g.S))


@form()
def bias_from_baddbmm(g):
    def fn(q, k, v, b, x, y):
        return (q @ k.mT + torch.baddbmm(b, x, y, beta=0.5, alpha=2.0)).softmax(-1) @ v

    B = g.B * g.H
    return fn, (*[g.r(B, g.S, g.D) for _ in range(3)], g.r(B, g.S, g.S), g.r(B, g.S, 5), g.r(B, 5, g.S))


@form()
def bias_from_addmm(g):
    def fn(q, k, v, b, x, y):
        return (torch.baddbmm(b, q, k.mT) + torch.addmm(b[0], x, y) * 0.5).softmax(-1) @ v

    B = g.B * g.H
    return fn, (*[g.r(B, g.S, g.D) for _ in range(3)], g.r(B, g.S, g.S), g.r(g.S, 5), g.r(5, g.S))


@form()
def shaw_by_baddbmm(g):
    def fn(q, k, v, b, e):
        i = torch.arange(g.S)
        r = e[i[:, None] - i[None] + g.S - 1]
        x = torch.baddbmm(b, q.transpose(0, 1), r.mT).transpose(0, 1)
        return (q @ k.mT + x).softmax(-1) @ v

    return fn, (*[g.r(g.B, g.S, g.D) for _ in range(3)], g.r(g.S, g.B, g.S), g.r(2 * g.S - 1, g.D))


@form()
def bias_permuted_bsh(g):
    return (lambda q, k, v, b: (sc(q, k) + b.permute(0, 3, 1, 2)).softmax(-1) @ v), (*g.qkv(), g.r(g.B, g.S, g.S, g.H))


@form()
def mask_made_of_the_values(g):
    """A rate for each key and group of heads, from a contraction and functions that decide by it (Doge)."""

    def fn(q, k, v, rate, w, m):
        dt = torch.exp(rate * F.softplus(v.transpose(1, 2).flatten(2) @ w)).transpose(1, 2)
        dt = dt[:, :, None].expand(-1, -1, g.S, -1).masked_fill(~m[:, None, None], lowest(q))
        return (sc(q, k) + dt[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H // 2), g.r(g.H * g.D, g.H // 2), g.padding())


@form()
def bias_from_pair_linear(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.n, s.l = nn.LayerNorm(6), nn.Linear(6, g.H, bias=False)

        def forward(s, q, k, v, z):
            return (sc(q, k) + s.l(s.n(z)).permute(2, 0, 1)[None]).softmax(-1) @ v

    return g.module(A()), (*g.qkv(), g.r(g.S, g.S, 6))


@form()
def triangle_attention_starting_node(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            c = 16
            s.q, s.k, s.v, s.g, s.o = (nn.Linear(c, c) for _ in range(5))
            s.b = nn.Linear(c, 4, bias=False)

        def forward(s, x, mask):
            I, J, c = x.shape

            def h(t):
                return t.view(I, J, 4, 4).transpose(1, 2)

            mb = (1e9 * (mask - 1))[:, None, None, :]
            tb = s.b(x).permute(2, 0, 1)[None]
            a = torch.matmul(h(s.q(x)) * 0.5, h(s.k(x)).transpose(-1, -2))
            a = a + mb
            a = a + tb
            o = torch.matmul(a.softmax(-1), h(s.v(x))).transpose(-2, -3)
            return s.o((o * torch.sigmoid(s.g(x).view(I, J, 4, 4))).reshape(I, J, c))

    m = (torch.rand(7, 7, generator=g.rng) < 0.8).to(g.dtype)
    m[:, 0] = 1
    return g.module(A()), (g.r(7, 7, 16), m)


@form()
def graphormer_bias(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.sp = nn.Embedding(8, g.H)
            s.virt = nn.Embedding(1, g.H)

        def forward(s, q, k, v, dist):
            b = s.sp(dist).permute(0, 3, 1, 2)
            return (sc(q, k) + b).softmax(-1) @ v

    return g.module(A()), (*g.qkv(), torch.randint(0, 8, (g.B, g.S, g.S), generator=g.rng))


@form()
def graphormer_virtual_token(g):
    def fn(q, k, v, b, t):
        b = b.clone()
        t = t.view(1, g.H, 1)
        b[:, :, 1:, 0] = b[:, :, 1:, 0] + t
        b[:, :, 0, :] = b[:, :, 0, :] + t
        return (sc(q, k) + b).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, g.S, g.S), g.r(g.H))


@form()
def graph_transformer_adjacency(g):
    return (lambda q, k, v, a: sc(q, k).masked_fill(a[:, None] == 0, -1e9).softmax(-1) @ v), (
        *g.qkv(),
        g.keep(g.B, g.S, g.S).to(g.dtype),
    )


# ------------------------------------------------------------------ alibi
def slopes(h):
    return [2.0 ** -(i + 1) for i in range(h)]


@form()
def alibi_list_tensor(g):
    def fn(q, k, v):
        s = torch.tensor(slopes(g.H), dtype=q.dtype).view(g.H, 1, 1)
        i = torch.arange(g.S)
        return (sc(q, k) + s * (i[None, :] - i[:, None])).softmax(-1) @ v

    return fn, g.qkv()


@form()
def alibi_buffer(g):
    s = torch.tensor(slopes(g.H), dtype=g.dtype)

    def fn(q, k, v, s):
        i = torch.arange(k.shape[2])
        b = s[:, None, None] * i[None, None, :]
        return (sc(q, k) + b).masked_fill(torch.ones(g.S, g.S).triu(1).bool(), NEG).softmax(-1) @ v

    return fn, (*g.qkv(), s)


@form()
def alibi_abs_symmetric(g):
    s = torch.tensor(slopes(g.H), dtype=g.dtype)

    def fn(q, k, v, s):
        i = torch.arange(g.S)
        d = -(i[None] - i[:, None]).abs()
        return (sc(q, k) + torch.einsum("h,mn->hmn", s, d.to(q.dtype))).softmax(-1) @ v

    return fn, (*g.qkv(), s)


@form()
def alibi_slopes_in_graph_pow(g):
    def fn(q, k, v):
        s = torch.pow(torch.tensor(2.0**-2), torch.arange(1, 1 + g.H)).to(q.dtype)
        i = torch.arange(g.S)
        return (sc(q, k) + s[:, None, None] * (i[None] - i[:, None]).to(q.dtype)[None]).softmax(-1) @ v

    return fn, g.qkv()


@form()
def alibi_bloom_build(g):
    def fn(q, k, v, mask):
        base = torch.tensor(2 ** (-(2 ** -(math.log2(4) - 3))), dtype=torch.float32)
        p = torch.arange(1, 1 + 4, dtype=torch.int32)
        s = torch.pow(base, p)
        at = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
        al = (s[..., None] * at).reshape(g.B * g.H, 1, g.S).to(q.dtype)
        w = al.baddbmm(
            batch1=q.reshape(-1, g.S, g.D), batch2=k.reshape(-1, g.S, g.D).transpose(-1, -2), beta=1.0, alpha=0.3
        )
        w = w.view(g.B, g.H, g.S, -1) + torch.full((g.S, g.S), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        p = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(p.view(g.B * g.H, g.S, -1), v.reshape(-1, g.S, g.D))

    return fn, (*g.qkv(), g.padding().long())


@form()
def alibi_mpt(g):
    def fn(q, k, v):
        al = torch.arange(1 - 17, 1, dtype=torch.int32).view(1, 1, 1, 17)
        base = torch.arange(1, 1 + 4, dtype=torch.int64).float() * (8 / 4)
        sl = (1.0 / torch.pow(2, base)).view(1, 4, 1, 1)
        al = (al * sl).squeeze(0)
        return F.softmax((sc(q, k) + al[:, -g.S :, -17:]).float(), -1).to(v.dtype) @ v

    return fn, g.qkv(n=17)


@form()
def alibi_learned_slopes(g):
    def fn(q, k, v, s):
        i = torch.arange(g.S)
        return (sc(q, k) - F.softplus(s)[:, None, None] * (i[None] - i[:, None]).abs()).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H))


@form()
def kerple_log(g):
    def fn(q, k, v, a, b):
        i = torch.arange(g.S)
        d = (i[:, None] - i[None]).abs().to(q.dtype)
        return (sc(q, k) - a.clamp(min=1e-2) * torch.log(1 + b.clamp(min=1e-2) * d)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 1, 1), g.r(g.H, 1, 1))


@form()
def gaussian_distance_bias(g):
    def fn(q, k, v, sg):
        i = torch.arange(g.S).to(q.dtype)
        d = (i[:, None] - i[None]) ** 2
        return (sc(q, k) - d / (2 * sg**2 + 1.0)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 1, 1))


@form()
def distance_of_coordinates(g):
    def fn(q, k, v, xyz):
        d = ((xyz[:, :, None] - xyz[:, None]) ** 2).sum(-1)
        return (sc(q, k) - 0.1 * d[:, None]).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.B, g.S, 3))


@form()
def distance_cdist_bias(g):
    return (lambda q, k, v, x: (sc(q, k) - torch.cdist(x, x)[:, None]).softmax(-1) @ v), (
        *g.qkv(),
        g.r(g.B, g.S, 3).detach(),
    )


@form()
def forgetting_transformer(g):
    # cumulative log forget gate: D_ij = c_i - c_j
    def fn(q, k, v, f):
        c = F.logsigmoid(f).cumsum(-1)
        s = sc(q, k) + c[..., :, None] - c[..., None, :]
        return s.masked_fill(torch.ones(g.S, g.S).triu(1).bool(), NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, g.S))


@form()
def same_vector_twice(g):
    return (lambda q, k, v, t: (sc(q, k) + t[:, :, None] * t[:, None, :]).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.S))


# ------------------------------------------------------------------ tables
@form()
def t5_buckets(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(8, g.H)

        def bucket(s, rp, bi=True, nb=8, md=20):
            rb = 0
            if bi:
                nb //= 2
                rb += (rp > 0).to(torch.long) * nb
                rp = torch.abs(rp)
            else:
                rp = -torch.min(rp, torch.zeros_like(rp))
            me = nb // 2
            small = rp < me
            lg = me + (torch.log(rp.float() / me) / math.log(md / me) * (nb - me)).to(torch.long)
            lg = torch.min(lg, torch.full_like(lg, nb - 1))
            return rb + torch.where(small, rp, lg)

        def forward(s, q, k, v):
            cp = torch.arange(g.S, dtype=torch.long)[:, None]
            mp = torch.arange(k.shape[2], dtype=torch.long)[None, :]
            b = s.e(s.bucket(mp - cp)).permute([2, 0, 1]).unsqueeze(0)
            return F.softmax((q @ k.transpose(3, 2) + b).float(), dim=-1).type_as(q) @ v

    return g.module(A()), g.qkv(n=17)


@form()
def t5_decoder_buckets_mask(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(8, g.H)

        def forward(s, q, k, v, m):
            i = torch.arange(g.S)
            rp = -torch.min(i[None] - i[:, None], torch.zeros_like(i[None] - i[:, None]))
            lg = 4 + (torch.log(rp.float() / 4) / math.log(5) * 4).to(torch.long)
            lg = torch.min(lg, torch.full_like(lg, 7))
            b = s.e(torch.where(rp < 4, rp, lg)).permute(2, 0, 1)[None]
            b = b + m[:, None, None, :]
            s_ = q @ k.transpose(3, 2)
            s_ += b
            return F.softmax(s_.float(), dim=-1).type_as(s_) @ v

    return g.module(A()), (*g.qkv(), (1.0 - g.padding().to(g.dtype)) * -1e9)


@form()
def relative_table_clamped(g):
    def fn(q, k, v, t):
        i = torch.arange(g.S)
        r = (i[:, None] - i[None]).clamp(-4, 4) + 4
        return (sc(q, k) + t[r].permute(2, 0, 1)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(9, g.H))


@form()
def relative_table_heads_first(g):
    def fn(q, k, v, t):
        i = torch.arange(g.S)
        return (sc(q, k) + t[:, i[:, None] - i[None] + g.S - 1]).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 2 * g.S - 1))


@form()
def relative_table_gather(g):
    idx = torch.randint(0, 9, (g.S, g.S), generator=g.rng)
    return (
        lambda q, k, v, t, i: (
            (sc(q, k) + torch.gather(t, 1, i.reshape(1, -1).expand(g.H, -1)).view(g.H, g.S, g.S)).softmax(-1) @ v
        )
    ), (*g.qkv(), g.r(g.H, 9), idx)


@form()
def relative_table_index_select(g):
    idx = torch.randint(0, 9, (g.S, g.S), generator=g.rng)
    return (
        lambda q, k, v, t, i: (
            (sc(q, k) + torch.index_select(t, 0, i.view(-1)).view(g.S, g.S, g.H).permute(2, 0, 1)).softmax(-1) @ v
        )
    ), (*g.qkv(), g.r(9, g.H), idx)


@form()
def relative_table_negative_indices(g):
    def fn(q, k, v, t):
        i = torch.arange(g.S)
        return (sc(q, k) + t[i[:, None] - i[None]].permute(2, 0, 1)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(2 * g.S - 1, g.H))


@form()
def relative_shift_1d_pad_view(g):
    # toeplitz by pad and view of a learned vector (music transformer skew on a bias)
    def fn(q, k, v, t):
        n = g.S
        x = t[:, None, :].expand(g.H, n, 2 * n - 1)
        x = F.pad(x, (0, 1)).flatten(1)
        x = F.pad(x, (0, n - 1)).view(g.H, n + 1, 2 * n - 1)[:, :n, n - 1 :]
        return (sc(q, k) + x).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 2 * g.S - 1))


@form()
def beit_table(g):
    n = 9
    idx = torch.randint(0, 28, (n + 1, n + 1), generator=g.rng)
    g.S = n + 1

    def fn(q, k, v, t, idx):
        b = t[idx.view(-1)].view(n + 1, n + 1, -1).permute(2, 0, 1).contiguous()
        return ((q * 0.3) @ k.transpose(-2, -1) + b.unsqueeze(0)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(28, g.H), idx)


@form()
def levit_bias_idxs(g):
    idx = torch.randint(0, 9, (g.S, g.S), generator=g.rng)
    return (lambda q, k, v, t, i: (sc(q, k) + t[:, i]).softmax(-1) @ v), (*g.qkv(), g.r(g.H, 9), idx)


@form()
def maxvit_table_2d(g):
    n = 3
    g.S = 9

    def fn(q, k, v, t):
        c = torch.arange(n)
        r = c[:, None] - c[None] + n - 1
        b = t[:, r[:, None, :, None], r[None, :, None, :]].reshape(g.H, 9, 9)
        return (sc(q, k) + b).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 2 * n - 1, 2 * n - 1))


@form()
def decomposed_bias_h_w(g):
    # bias over rows and columns of an image, given (not from q)
    def fn(q, k, v, bh, bw):
        s = sc(q, k).view(g.B, g.H, 3, 4, 3, 4) + bh[:, :, None, :, None] + bw[:, None, :, None, :]
        return s.view(g.B, g.H, 12, 12).softmax(-1) @ v

    g.S = 12
    return fn, (*g.qkv(), g.r(g.H, 3, 3), g.r(g.H, 4, 4))


@form()
def interpolated_bias(g):
    return (lambda q, k, v, t: (sc(q, k) + F.interpolate(t[None], size=(g.S, g.S), mode="bilinear")).softmax(-1) @ v), (
        *g.qkv(),
        g.r(g.H, 5, 5),
    )


@form()
def shaw(g):
    def fn(q, k, v, e):
        i = torch.arange(g.S)
        r = e[i[:, None] - i[None] + g.S - 1]
        return (sc(q, k) + torch.einsum("bhld,lrd->bhlr", q, r)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(2 * g.S - 1, g.D))


@form()
def shaw_clamped_by_queries_and_keys(g):
    def fn(q, k, v, e):
        i, j = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        r = F.embedding((i[:, None] - j[None]).clamp(-5, 5) + 5, e)
        s = sc(q, k) + torch.einsum("bhmd,mnd->bhmn", q, r) + torch.einsum("bhnd,mnd->bhmn", k, r)
        return s.softmax(-1) @ v

    return fn, (*g.qkv(), g.r(11, g.D))


@form()
def deberta_disentangled(g):
    def fn(q, k, v, e, wq, wk):
        S = q.shape[2]
        d = torch.arange(S)[:, None] - torch.arange(S)[None] + 6
        at = d.clamp(0, 11).expand(q.shape[0], q.shape[1], S, S)
        c2p = torch.gather(q @ (e @ wk).mT, -1, at)
        p2c = torch.gather(k @ (e @ wq).mT, -1, (12 - d).clamp(0, 11).expand_as(at)).mT
        return ((q @ k.mT + c2p + p2c) / math.sqrt(3 * g.D)).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(12, g.D), g.w(g.D, g.D), g.w(g.D, g.D))


@form()
def content_twice(g):
    return (lambda q, k, v, w: (sc(q, k) + sc(q, w)).softmax(-1) @ v), (*g.qkv(), g.r(g.B, g.H, g.S, g.D))


@form()
def key_bias_from_the_keys(g):
    return (lambda q, k, v, w: (sc(q, k) + (k @ w).mT).softmax(-1) @ v), (*g.qkv(n=17), g.r(g.D, 1))


@form()
def key_bias_from_the_keys_linear(g):
    return (lambda q, k, v, w: (sc(q, k) + F.linear(k, w).mT).softmax(-1) @ v), (*g.qkv(n=17), g.r(1, g.D))


@form()
def key_bias_from_the_keys_by_head(g):
    def fn(q, k, v, u):
        return (sc(q, k) + torch.einsum("bhnd,hd->bhn", k, u)[:, :, None]).softmax(-1) @ v

    return fn, (*g.qkv(n=17), g.r(g.H, g.D))


@form()
def transformer_xl_u_multiplied_out(g):
    def fn(q, k, v, u):
        return ((q @ k.mT + u @ k.mT) * 0.3).masked_fill(torch.ones(g.S, g.S).triu(1).bool(), NEG).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.H, 1, g.D))


@form()
def key_gate_from_the_keys(g):
    return (lambda q, k, v, w: (sc(q, k) * torch.sigmoid(k @ w).mT).softmax(-1) @ v), (*g.qkv(n=17), g.r(g.D, 1))


@form(skip="several_contractions")
def content_multiplied(g):
    return (lambda q, k, v, w: (sc(q, k) * (q @ w.mT)).softmax(-1) @ v), (*g.qkv(), g.r(g.B, g.H, g.S, g.D))


@form(skip="several_contractions")
def content_twice_too_deep(g):
    g.D = 160
    return (lambda q, k, v, w: (sc(q, k) + q @ w.mT * 0.1).softmax(-1) @ v), (*g.qkv(), g.r(g.B, g.H, g.S, g.D))


@form()
def sam_decomposed_relpos(g):
    def fn(q, k, v, rh, rw):
        s = (q * 0.3) @ k.mT
        rq = q.view(g.B * g.H, 3, 4, g.D)
        h = torch.einsum("bhwc,hkc->bhwk", rq, rh)
        w = torch.einsum("bhwc,wkc->bhwk", rq, rw)
        s = (s.view(g.B * g.H, 3, 4, 3, 4) + h[:, :, :, :, None] + w[:, :, :, None, :]).view(g.B * g.H, 12, 12)
        return s.softmax(-1) @ v

    return fn, (*[g.r(g.B * g.H, 12, g.D) for _ in range(3)], g.r(3, 3, g.D), g.r(4, 4, g.D))


@form()
def music_transformer_skew(g):
    def fn(q, k, v, e):
        r = q @ e.mT
        r = F.pad(r, (1, 0)).view(g.B, g.H, g.S + 1, g.S)[:, :, 1:]
        return (q @ k.mT + r).softmax(-1) @ v

    return fn, (*g.qkv(), g.r(g.S, g.D))


@form()
def transformer_xl_relative(g):
    def fn(q, k, v, r, u, w):
        ac = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
        bd = torch.einsum("ibnd,jnd->ijbn", q + w, r)
        z = torch.zeros((bd.size(0), 1, *bd.size()[2:]), dtype=bd.dtype)
        x = torch.cat([z, bd], 1).view(bd.size(1) + 1, bd.size(0), *bd.size()[2:])[1:].view_as(bd)
        p = F.softmax((ac + x) * 0.3, dim=1)
        return torch.einsum("ijbn,jbnd->ibnd", p, v)

    return fn, (*[g.r(g.S, g.B, g.H, g.D) for _ in range(3)], g.r(g.S, g.H, g.D), g.r(g.H, g.D), g.r(g.H, g.D))


@form()
def esp_rel_pos_conformer(g):
    def fn(q, k, v, p, u, w):
        ac = (q + u).transpose(1, 2) @ k.mT
        bd = (q + w).transpose(1, 2) @ p.mT
        z = torch.zeros((*bd.size()[:3], 1), dtype=bd.dtype)
        x = (
            torch.cat([z, bd], -1)
            .view(*bd.size()[:2], bd.size(3) + 1, bd.size(2))[:, :, 1:]
            .view_as(bd)[..., : bd.size(-1) // 2 + 1]
        )
        return ((ac + x) * 0.3).softmax(-1) @ v

    return fn, (
        g.r(g.B, g.S, g.H, g.D),
        g.r(g.B, g.H, g.S, g.D),
        g.r(g.B, g.H, g.S, g.D),
        g.r(1, g.H, 2 * g.S - 1, g.D),
        g.r(g.H, g.D),
        g.r(g.H, g.D),
    )


@form(blocks=2)
def alphafold_ipa_points(g):
    def fn(q, k, v, qp, kp, b):
        d = ((qp[:, :, None] - kp[:, None]) ** 2).sum((-1, -2))
        s = sc(q, k) + b - 0.5 * d.permute(0, 3, 1, 2)
        p = s.softmax(-1)
        return p @ v, torch.einsum("bhmn,bnhpc->bmhpc", p, kp)

    return fn, (*g.qkv(), g.r(g.B, g.S, g.H, 2, 3), g.r(g.B, g.S, g.H, 2, 3), g.r(g.H, g.S, g.S))
