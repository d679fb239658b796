"""The softmax in one call and by hand, functions of the scores, what follows the softmax, and what is no attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from forms.registry import NEG, form, lowest, sc

INF = float("inf")


@form()
def softmax_module(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.sm = nn.Softmax(dim=-1)

        def forward(s, q, k, v):
            return s.sm(sc(q, k)) @ v

    return A(), g.qkv()


@form()
def softmax_dtype_f32_type_as(g):
    return (lambda q, k, v: F.softmax(sc(q, k), dim=-1, dtype=torch.float32).type_as(q) @ v), g.qkv()


@form()
def softmax_positional_dtype(g):
    return (lambda q, k, v: torch.softmax(sc(q, k), -1, torch.float32).to(v) @ v), g.qkv()


@form()
def softmax_float_then_half_to_dtype(g):
    return (lambda q, k, v: sc(q, k).float().softmax(-1).to(q.dtype) @ v), g.qkv()


@form()
def log_softmax_exp(g):
    return (lambda q, k, v: F.log_softmax(sc(q, k), -1).exp() @ v), g.qkv()


@form()
def log_softmax_torch_exp(g):
    return (lambda q, k, v: torch.exp(torch.log_softmax(sc(q, k), dim=-1)) @ v), g.qkv()


@form()
def by_hand_no_max(g):
    return (lambda q, k, v: (lambda e: (e / e.sum(-1, keepdim=True)) @ v)(sc(q, k).exp())), g.qkv()


@form()
def by_hand_max_values(g):
    return (
        lambda q, k, v: (
            lambda s: (lambda e: (e / e.sum(dim=-1, keepdim=True)) @ v)(torch.exp(s - s.max(dim=-1, keepdim=True)[0]))
        )(sc(q, k))
    ), g.qkv()


@form()
def by_hand_max_unsqueeze(g):
    return (
        lambda q, k, v: (
            lambda s: (lambda e: (e / e.sum(-1).unsqueeze(-1)) @ v)((s - s.max(-1).values[..., None]).exp())
        )(sc(q, k))
    ), g.qkv()


@form()
def by_hand_global_max(g):
    return (
        lambda q, k, v: (lambda s: (lambda e: (e / e.sum(-1, keepdim=True)) @ v)((s - s.max()).exp()))(sc(q, k))
    ), g.qkv()


@form()
def by_hand_amax_detach(g):
    return (
        lambda q, k, v: (
            lambda s: (lambda e: (e / e.sum(-1, keepdim=True)) @ v)((s - s.detach().amax(-1, keepdim=True)).exp())
        )(sc(q, k))
    ), g.qkv()


@form(skip="*")
def by_hand_exp_mul_mask(g):
    def fn(q, k, v, m):
        e = torch.exp(sc(q, k)) * m
        return (e / e.sum(-1, keepdim=True)) @ v

    return fn, (*g.qkv(), g.keep(g.B, 1, g.S, g.S).to(g.dtype))


@form()
def by_hand_exp_masked_fill_zero(g):
    def fn(q, k, v, m):
        e = torch.exp(sc(q, k)).masked_fill(~m, 0.0)
        return (e / e.sum(-1, keepdim=True)) @ v

    return fn, (*g.qkv(), g.keep(g.B, 1, g.S, g.S))


@form()
def by_hand_exp_where_zero_causal(g):
    def fn(q, k, v):
        s = sc(q, k)
        s = s - s.amax(-1, keepdim=True)
        e = torch.where(torch.ones(g.S, g.S, dtype=torch.bool).tril(), s.exp(), 0.0)
        return (e / e.sum(-1, keepdim=True)) @ v

    return fn, g.qkv()


@form()
def by_hand_exp_tril(g):
    def fn(q, k, v):
        e = torch.exp(sc(q, k)).tril()
        return (e / e.sum(-1, keepdim=True)) @ v

    return fn, g.qkv()


@form()
def by_hand_reciprocal(g):
    return (lambda q, k, v: (lambda e: (e * e.sum(-1, keepdim=True).reciprocal()) @ v)(sc(q, k).exp())), g.qkv()


@form()
def by_hand_pow_minus_one(g):
    return (lambda q, k, v: (lambda e: (e * e.sum(-1, keepdim=True) ** -1) @ v)(sc(q, k).exp())), g.qkv()


@form()
def by_hand_logsumexp(g):
    return (lambda q, k, v: (lambda s: (s - s.logsumexp(-1, keepdim=True)).exp() @ v)(sc(q, k))), g.qkv()


@form()
def by_hand_logsumexp_fn(g):
    return (lambda q, k, v: (lambda s: torch.exp(s - torch.logsumexp(s, dim=-1)[..., None]) @ v)(sc(q, k))), g.qkv()


@form()
def by_hand_log_sum_exp(g):
    return (lambda q, k, v: (lambda s: (s - s.exp().sum(-1, keepdim=True).log()).exp() @ v)(sc(q, k))), g.qkv()


@form()
def by_hand_exp2(g):
    return (
        lambda q, k, v: (lambda e: (e / e.sum(-1, keepdim=True)) @ v)(torch.exp2(sc(q, k) * 1.4426950408889634))
    ), g.qkv()


@form()
def by_hand_two_pow(g):
    return (lambda q, k, v: (lambda e: (e / e.sum(-1, keepdim=True)) @ v)(2.0 ** sc(q, k))), g.qkv()


@form(skip="*")
def by_hand_normalize_l1(g):
    return (lambda q, k, v: F.normalize(sc(q, k).exp(), p=1, dim=-1) @ v), g.qkv()


@form()
def deferred_division(g):
    return (lambda q, k, v: (lambda e: (e @ v) / e.sum(-1, keepdim=True))(sc(q, k).exp())), g.qkv()


@form()
def deferred_division_max(g):
    return (
        lambda q, k, v: (lambda s: (lambda e: (e @ v) / e.sum(-1, keepdim=True))((s - s.amax(-1, keepdim=True)).exp()))(
            sc(q, k)
        )
    ), g.qkv()


@form()
def deferred_division_bmhd(g):
    return (
        lambda q, k, v: (lambda e: torch.einsum("bhmn,bnhd->bmhd", e, v) / e.sum(-1).transpose(1, 2)[..., None])(
            torch.einsum("bmhd,bnhd->bhmn", q, k).exp()
        )
    ), g.bsd()


def exponentials(s):
    """exp(s - m), their sum, and m, the row's maximum."""
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return e, e.sum(-1, keepdim=True), m


@form()
def deferred_reciprocal(g):
    return (lambda q, k, v: (lambda e, z, m: (e @ v) * z.reciprocal())(*exponentials(sc(q, k)))), g.qkv()


@form()
def deferred_exp_of_minus_log(g):
    return (lambda q, k, v: (lambda e, z, m: (e @ v) * torch.exp(-z.log()))(*exponentials(sc(q, k)))), g.qkv()


@form()
def deferred_to_logsumexp(g):
    """As a merge of partial results does it: by exp(m - lse)."""
    return (lambda q, k, v: (lambda e, z, m: (e @ v) * torch.exp(m - (m + z.log())))(*exponentials(sc(q, k)))), g.qkv()


@form()
def deferred_over_exp_of_logsumexp(g):
    return (lambda q, k, v: (lambda s: (s.exp() @ v) / s.logsumexp(-1, keepdim=True).exp())(sc(q, k))), g.qkv()


@form()
def deferred_rescaled(g):
    """The sum and the product both rescaled to another maximum."""

    def fn(q, k, v):
        e, z, m = exponentials(sc(q, k))
        to = torch.exp(m - m.clamp(min=0.5))
        return (e @ v) * to / (z * to)

    return fn, g.qkv()


@form()
def deferred_masked_causal(g):
    def fn(q, k, v):
        s = sc(q, k)
        m = s.amax(-1, keepdim=True)
        e = torch.where(torch.ones(g.S, g.S, dtype=torch.bool).tril(), torch.exp(s - m), 0.0)
        return (e @ v) * torch.exp(-e.sum(-1, keepdim=True).log())

    return fn, g.qkv()


@form(random=True)
def deferred_dropout(g):
    return (lambda q, k, v: (lambda e, z, m: (F.dropout(e, 0.3) @ v) * (1 / z))(*exponentials(sc(q, k)))), g.qkv()


@form(skip="*")
def deferred_product_with_the_sum(g):
    return (lambda q, k, v: (lambda e, z, m: (e @ v) * torch.exp(z.log()))(*exponentials(sc(q, k)))), g.qkv()


@form(skip="*")
def deferred_to_another_maximum(g):
    return (lambda q, k, v: (lambda e, z, m: (e @ v) * torch.exp(-(m + z.log())))(*exponentials(sc(q, k)))), g.qkv()


@form(skip="*")
def deferred_ones_column(g):
    def fn(q, k, v):
        e = sc(q, k).exp()
        o = e @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
        return o[..., :-1] / o[..., -1:]

    return fn, g.qkv()


@form()
def temperature_in_softmax(g):
    return (lambda q, k, v: torch.softmax((q @ k.mT) / 0.7, dim=3) @ v), g.qkv()


@form()
def minus_mean(g):
    return (lambda q, k, v: (lambda s: (s - s.mean(-1, keepdim=True)).softmax(-1) @ v)(sc(q, k))), g.qkv()


@form()
def minus_max_then_softmax(g):
    return (
        lambda q, k, v: (lambda s: F.softmax(s - torch.max(s, dim=-1, keepdim=True).values, dim=-1) @ v)(sc(q, k))
    ), g.qkv()


@form()
def cogview_pb_relax(g):
    def fn(q, k, v):
        alpha = 32
        s = (q / (alpha * math.sqrt(g.D))) @ k.transpose(-1, -2)
        return ((s - s.max(dim=-1, keepdim=True)[0]) * alpha).softmax(-1) @ v

    return fn, g.qkv()


@form()
def cogview_pb_relax_detach_masked(g):
    def fn(q, k, v, m):
        alpha = 32
        s = (q / (alpha * math.sqrt(g.D))) @ k.transpose(-1, -2)
        s = s.masked_fill(~m, -torch.finfo(s.dtype).max)
        return ((s - s.amax(dim=-1, keepdim=True).detach()) * alpha).softmax(-1) @ v

    return fn, (*g.qkv(), g.keep(g.B, 1, 1, g.S))


@form(skip="*")
def groupvit_clamped_stable(g):
    # GLIP/GroundingDINO: s -= s.max(); clamp
    def fn(q, k, v):
        s = q @ k.mT
        s = s - s.max()
        s = torch.clamp(s, min=-50000)
        s = torch.clamp(s, max=50000)
        return s.softmax(-1) @ v

    return fn, g.qkv()


@form()
def scores_clamped(g):
    return (lambda q, k, v: sc(q, k).clamp(-1.0, 1.0).softmax(-1) @ v), g.qkv()


@form()
def scores_clamp_min_inplace(g):
    return (lambda q, k, v: sc(q, k).clamp_(min=-0.5).softmax(-1) @ v), g.qkv()


@form()
def scores_relu(g):
    return (lambda q, k, v: F.relu(sc(q, k)).softmax(-1) @ v), g.qkv()


@form()
def scores_leaky_relu_gat(g):
    return (lambda q, k, v: F.leaky_relu(sc(q, k), 0.2).softmax(-1) @ v), g.qkv()


@form()
def scores_sigmoid(g):
    return (lambda q, k, v: torch.sigmoid(sc(q, k)).softmax(-1) @ v), g.qkv()


@form()
def scores_square(g):
    return (lambda q, k, v: (sc(q, k) ** 2).softmax(-1) @ v), g.qkv()


@form()
def scores_cubed(g):
    return (lambda q, k, v: (sc(q, k) ** 3).softmax(-1) @ v), g.qkv()


@form()
def scores_gelu(g):
    return (lambda q, k, v: F.gelu(sc(q, k)).softmax(-1) @ v), g.qkv()


@form()
def scores_silu_softplus(g):
    return (lambda q, k, v: (lambda s: (F.silu(s) + F.softplus(s)).softmax(-1) @ v)(sc(q, k))), g.qkv()


@form()
def scores_abs_sign_sqrt(g):
    return (lambda q, k, v: (lambda s: (s.abs().add(0.1).sqrt() * s.sign()).softmax(-1) @ v)(sc(q, k))), g.qkv()


@form()
def softmin_of_distances(g):
    def fn(q, k, v):
        d = (q**2).sum(-1, keepdim=True) - 2 * q @ k.mT + (k**2).sum(-1)[:, :, None, :]
        return F.softmin(d / math.sqrt(g.D), dim=-1) @ v

    return fn, g.qkv()


@form()
def softmin_module(g):
    softmin = nn.Softmin(dim=-1)
    return (lambda q, k, v: softmin(-sc(q, k)) @ v), g.qkv()


@form(skip="*")
def softmin_over_queries(g):
    return (lambda q, k, v: F.softmin(sc(q, k), dim=-2) @ v), g.qkv()


@form()
def scores_of_many_functions(g):
    def fn(q, k, v):
        s = sc(q, k)
        s = F.elu(s) + F.mish(s) * F.hardsigmoid(s) - F.softshrink(s) + F.gelu(s, approximate="tanh")
        return torch.logaddexp(s, 0.5 * s.abs()).softmax(-1) @ v

    return fn, g.qkv()


@form(skip="unknown_op")
def scores_atan(g):
    return (lambda q, k, v: torch.atan(sc(q, k)).softmax(-1) @ v), g.qkv()


@form()
def scores_remainder(g):
    return (lambda q, k, v: (sc(q, k) % 2.0).softmax(-1) @ v), g.qkv()


@form()
def scores_fmod(g):
    return (lambda q, k, v: torch.fmod(q @ k.mT, -0.5).softmax(-1) @ v), g.qkv()


@form()
def scores_log_sigmoid(g):
    return (lambda q, k, v: F.logsigmoid(sc(q, k)).softmax(-1) @ v), g.qkv()


@form()
def scores_negative_distance(g):
    # L2 attention: -(|q|^2 - 2qk + |k|^2)
    def fn(q, k, v):
        d = (q**2).sum(-1, keepdim=True) - 2 * q @ k.mT + (k**2).sum(-1)[:, :, None, :]
        return (-d / math.sqrt(g.D)).softmax(-1) @ v

    return fn, g.qkv()


@form(skip="*")
def cdist_attention(g):
    return (lambda q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v), g.qkv()


@form(skip="*")
def scores_normalised_rows(g):
    return (lambda q, k, v: F.layer_norm(sc(q, k), (g.S,)).softmax(-1) @ v), g.qkv()


@form(skip="*")
def scores_std_rows(g):
    return (lambda q, k, v: (lambda s: (s / s.std(-1, keepdim=True)).softmax(-1) @ v)(sc(q, k))), g.qkv()


@form(skip="*")
def scores_topk_sparse(g):
    def fn(q, k, v):
        s = sc(q, k)
        t = s.topk(4, dim=-1).values[..., -1:]
        return s.masked_fill(s < t, NEG).softmax(-1) @ v

    return fn, g.qkv()


@form(skip="*")
def scores_topk_scatter(g):
    def fn(q, k, v):
        s = sc(q, k)
        val, idx = s.topk(4, dim=-1)
        return torch.full_like(s, NEG).scatter(-1, idx, val).softmax(-1) @ v

    return fn, g.qkv()


@form()
def scores_threshold(g):
    return (lambda q, k, v: (lambda s: s.masked_fill(s < -1.0, -1e9).softmax(-1) @ v)(sc(q, k))), g.qkv()


@form()
def scores_where_positive(g):
    return (lambda q, k, v: (lambda s: torch.where(s > 0, s, 0.1 * s).softmax(-1) @ v)(sc(q, k))), g.qkv()


# ------------------------------------------------------------------ after the softmax
@form()
def post_head_gate(g):
    return (lambda q, k, v, t: (sc(q, k).softmax(-1) * t) @ v), (*g.qkv(), g.r(g.H, 1, 1))


@form()
def post_head_mask_bert(g):
    return (lambda q, k, v, t: (sc(q, k).softmax(-1) * t[None, :, None, None]) @ v), (
        *g.qkv(),
        torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=g.dtype),
    )


@form()
def post_scale_number(g):
    return (lambda q, k, v: (0.5 * sc(q, k).softmax(-1)) @ v), g.qkv()


@form()
def post_div_tensor(g):
    return (lambda q, k, v, t: (sc(q, k).softmax(-1) / t) @ v), (*g.qkv(), torch.tensor(3.0, dtype=g.dtype))


@form()
def post_neg(g):
    return (lambda q, k, v: -(-sc(q, k).softmax(-1) @ v)), g.qkv()


@form()
def post_mask_again_mul(g):
    return (lambda q, k, v, m: (sc(q, k).masked_fill(~m, -1e9).softmax(-1) * m) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, g.S, g.S),
    )


@form()
def post_mask_again_fill(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(~m, -1e9).softmax(-1).masked_fill(~m, 0) @ v), (
        *g.qkv(),
        g.keep(g.B, 1, g.S, g.S),
    )


@form()
def post_query_mask(g):
    return (lambda q, k, v, m: (sc(q, k).softmax(-1) * m[:, None, :, None].to(q.dtype)) @ v), (*g.qkv(), g.padding())


@form()
def post_nan_to_num(g):
    return (lambda q, k, v, m: sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1).nan_to_num(0.0) @ v), (
        *g.qkv(),
        g.padding(whole=True),
    )


@form()
def post_nan_to_num_fn(g):
    return (lambda q, k, v, m: torch.nan_to_num(sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1)) @ v), (
        *g.qkv(),
        g.padding(whole=True),
    )


@form()
def post_isnan_masked_fill(g):
    def fn(q, k, v, m):
        p = sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1)
        return p.masked_fill(torch.isnan(p), 0.0) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def post_isnan_where(g):
    def fn(q, k, v, m):
        p = sc(q, k).masked_fill(~m[:, None, None], NEG).softmax(-1)
        return torch.where(p != p, torch.zeros_like(p), p) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def post_any_row_mask(g):
    def fn(q, k, v, m):
        m = m[:, None, None]
        p = sc(q, k).masked_fill(~m, NEG).softmax(-1)
        return p.masked_fill(~m.any(-1, keepdim=True), 0.0) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def post_weights_of_position(g):
    return (lambda q, k, v, t: (sc(q, k).softmax(-1) * t) @ v), (*g.qkv(), g.r(g.S, g.S))


@form()
def post_decay(g):
    def fn(q, k, v):
        i = torch.arange(g.S).to(q.dtype)
        return (sc(q, k).softmax(-1) * torch.exp(-0.1 * (i[:, None] - i[None]).abs())) @ v

    return fn, g.qkv()


@form()
def post_view_fold(g):
    return (
        lambda q, k, v: torch.bmm(sc(q, k).softmax(-1).view(g.B * g.H, g.S, g.S), v.reshape(g.B * g.H, g.S, g.D)).view(
            g.B, g.H, g.S, g.D
        )
    ), g.qkv()


@form()
def post_gate_from_queries(g):
    return (lambda q, k, v, w: (torch.sigmoid(q @ w) * sc(q, k).softmax(-1)) @ v), (*g.qkv(), g.r(g.H, g.D, 1))


@form()
def post_gate_of_heads_by_linear(g):
    def fn(x, q, k, v, w, b):
        gate = F.linear(x, w, b).tanh().transpose(1, 2).unsqueeze(-1)
        return (sc(q, k).softmax(-1) * gate) @ v

    return fn, (g.x(), *g.qkv(), g.w(g.H, g.H * g.D), g.r(g.H))


@form()
def post_gate_by_baddbmm(g):
    def fn(q, k, v, a, w):
        gate = torch.baddbmm(a, q.flatten(0, 1), w).view(g.B, g.H, g.S, 1)
        return (gate * sc(q, k).softmax(-1)) @ v

    return fn, (*g.qkv(), g.r(g.B * g.H, g.S, 1), g.r(g.B * g.H, g.D, 1))


@form(skip="nonlinear_weights")
def post_gate_for_each_pair(g):
    return (lambda q, k, v, w: (torch.sigmoid(q @ w.mT) * sc(q, k).softmax(-1)) @ v), (*g.qkv(), g.qkv()[1])


@form(skip="*")
def post_add_matrix(g):
    return (lambda q, k, v, t: (sc(q, k).softmax(-1) + t) @ v), (*g.qkv(), g.r(g.S, g.S))


@form(skip="*")
def post_square(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) ** 2) @ v), g.qkv()


@form(skip="*")
def post_clamp(g):
    return (lambda q, k, v: sc(q, k).softmax(-1).clamp(min=0.05) @ v), g.qkv()


@form()
def post_renormalise(g):
    return (lambda q, k, v: (lambda p: (p / (p.sum(-1, keepdim=True) + 1e-9)) @ v)(sc(q, k).softmax(-1) * 2)), g.qkv()


@form(skip="nonlinear_weights")
def post_renormalise_after_mask(g):
    def fn(q, k, v, m):
        p = sc(q, k).softmax(-1).masked_fill(~m, 0)
        return (p / p.sum(-1, keepdim=True)) @ v

    return fn, (*g.qkv(), g.keep(g.S, g.S))


@form(skip="nonlinear_weights")
def post_renormalise_over_queries(g):
    return (lambda q, k, v: (lambda p: (p / p.sum(-2, keepdim=True)) @ v)(sc(q, k).softmax(-1))), g.qkv()


@form(skip="*")
def post_times_scores(g):
    return (lambda q, k, v: (lambda s: (s.softmax(-1) * s) @ v)(sc(q, k))), g.qkv()


@form(blocks=2)
def two_products_in_two_softmaxes(g):
    def fn(q, k, v, a, b, w, m):
        s, t = q @ k.mT * 0.3, a @ b.mT / 2
        x, y = s + t, t + s
        return x.masked_fill(~m, NEG).softmax(-1) @ v, y.masked_fill(~m, NEG).softmax(-1) @ w

    return fn, (*g.qkv(), *(g.r(g.B, g.H, g.S, 2) for _ in range(3)), g.keep(g.S, g.S))


@form()
def latent_products(g):
    # multi-head latent attention: the rotated part of the keys is one for all heads
    def fn(q, k, v, a, b, mask):
        s = (torch.einsum("bshc,bthc->bsht", q, k) + torch.einsum("bshr,btr->bsht", a, b)) * 0.3
        p = (s + mask[:, None]).softmax(dim=-1, dtype=torch.float32).type_as(q)
        return torch.einsum("bsht,bthc->bshc", p, v)

    mask = torch.full((g.S, g.S), NEG).triu(1)
    return fn, (*g.bsd(), g.r(g.B, g.S, g.H, 4), g.r(g.B, g.S, 4), mask)


@form()
def latent_products_absorbed(g):
    def fn(q, c, a, b):
        s = (torch.einsum("bshc,btc->bsht", q, c) - torch.einsum("bshr,btr->bsht", a, b) * 0.5) * 0.3
        return torch.einsum("bsht,btc->bshc", s.softmax(-1), c)

    return fn, (g.r(g.B, g.S, g.H, 12), g.r(g.B, g.S, 12), g.r(g.B, g.S, g.H, 4), g.r(g.B, g.S, 4))


@form()
def three_products(g):
    def fn(q, k, v, a, b, bias):
        s = torch.baddbmm(bias, a.flatten(0, 1), b.flatten(0, 1).mT, alpha=0.4).view(g.B, g.H, g.S, g.S)
        return ((q @ k.mT * 0.3 + s) - q @ b.mT * 0.3).softmax(-1) @ v

    return fn, (*g.qkv(), *g.qkv()[:2], g.r(g.B * g.H, g.S, g.S))


@form()
def product_that_decides_about_the_sum(g):
    def fn(q, k, v, a, b):
        s = q @ k.mT * 0.3
        return torch.where(s > -1.0, s + a @ b.mT * 0.3, -2.0).softmax(-1) @ v

    return fn, (*g.qkv(), *g.qkv()[:2])


@form()
def product_beside_a_function_of_it(g):
    def fn(q, k, v, a, b):
        s, t = q @ k.mT * 0.3, a @ b.mT * 0.3
        return (s + t + torch.tanh(t)).softmax(-1) @ v

    return fn, (*g.qkv(), *g.qkv()[:2])


@form()
def grouped_products(g):
    def fn(q, k, v, a, b):
        k, v, b = (t.repeat_interleave(2, 1) for t in (k, v, b))
        return (q @ k.mT * 0.3 + a @ b.mT).softmax(-1) @ v

    return fn, (*g.qkv(hk=2), g.r(g.B, g.H, g.S, 4), g.r(g.B, 2, g.S, 4))


@form()
def untied_positions(g):
    return (lambda q, k, v, a, b, bias: (q @ k.mT * 0.25 + a @ b.mT * 0.2 + bias).softmax(-1) @ v), (
        *g.qkv(),
        *(g.r(g.H, g.S, g.D) for _ in range(2)),
        g.r(g.H, g.S, g.S),
    )


@form(skip="*")
def post_talking_heads(g):
    return (lambda q, k, v, w: torch.einsum("bhmn,hg->bgmn", sc(q, k).softmax(-1), w) @ v), (*g.qkv(), g.r(g.H, g.H))


@form(skip="*")
def pre_talking_heads(g):
    return (lambda q, k, v, w: torch.einsum("bhmn,hg->bgmn", sc(q, k), w).softmax(-1) @ v), (*g.qkv(), g.r(g.H, g.H))


@form(skip="*")
def talking_heads_linear_cait(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.l, s.w = nn.Linear(g.H, g.H), nn.Linear(g.H, g.H)

        def forward(s, q, k, v):
            a = sc(q, k)
            a = s.l(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
            a = s.w(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return a @ v

    return g.module(A()), g.qkv()


@form(skip="*")
def talking_heads_conv(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = nn.Conv2d(g.H, g.H, 1)

        def forward(s, q, k, v):
            return s.c(sc(q, k)).softmax(-1) @ v

    return g.module(A()), g.qkv()


@form(skip="weights_used")
def weights_returned(g):
    return (lambda q, k, v: (lambda p: (p @ v, p))(sc(q, k).softmax(-1))), g.qkv()


@form(skip="weights_used")
def weights_mean_returned(g):
    return (lambda q, k, v: (lambda p: (p @ v, p.mean(1)))(sc(q, k).softmax(-1))), g.qkv()


@form(skip="weights_used")
def scores_returned(g):
    return (lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s))(sc(q, k))), g.qkv()


@form(skip="weights_used")
def scores_loss_used(g):
    return (lambda q, k, v: (lambda s: s.softmax(-1) @ v + s.logsumexp(-1, keepdim=True))(sc(q, k))), g.qkv()


@form(skip="weights_used")
def entropy_of_weights(g):
    return (lambda q, k, v: (lambda p: (p @ v, -(p * p.log()).sum(-1)))(sc(q, k).softmax(-1))), g.qkv()


@form(blocks=2)
def realformer_residual_scores(g):
    def fn(q, k, v, q2, k2, v2):
        s = sc(q, k)
        a = s.softmax(-1) @ v
        s2 = sc(q2, k2) + s
        return a + s2.softmax(-1) @ v2

    return fn, (*g.qkv(), *g.qkv())


@form(blocks=2)
def one_weights_two_values(g):
    return (lambda q, k, v, w: (lambda p: (p @ v, p @ w))(sc(q, k).softmax(-1))), (*g.qkv(), g.r(g.B, g.H, g.S, 5))


@form(blocks=1)
def weights_returned_and_dropped(g):
    def inner(q, k, v):
        p = sc(q, k).softmax(-1)
        return p @ v, p

    return (lambda q, k, v: inner(q, k, v)[0]), g.qkv()


@form()
def weights_computed_twice_and_dropped(g):
    def fn(q, k, v):
        sc(q, k).softmax(-1)
        return sc(q, k).softmax(-1) @ v

    return fn, g.qkv()


@form()
def weights_shape_used(g):
    return (lambda q, k, v: (lambda p: (p @ v) * (p.shape[-1] ** 0.5))(sc(q, k).softmax(-1))), g.qkv()


@form(blocks=2)
def differential(g):
    return (lambda q, k, v, q2, k2: (sc(q, k).softmax(-1) - 0.3 * sc(q2, k2).softmax(-1)) @ v), (*g.qkv(), *g.qkv()[:2])


@form(blocks=2)
def differential_lambda_and_gate(g):
    def fn(q, k, v, q2, k2, a, b, m):
        p1 = sc(q, k).masked_fill(~m, NEG).softmax(-1)
        p2 = sc(q2, k2).softmax(-1)
        return ((p1 - a.exp() * p2) * b) @ v

    mask = torch.ones(g.S, g.S, dtype=torch.bool).tril()
    return fn, (*g.qkv(), *g.qkv()[:2], g.r(g.H, 1, 1), g.r(g.H, g.S, 1), mask)


@form(blocks=2)
def differential_halves_of_heads(g):
    def fn(q, k, v, w):
        a, b = sc(q, k).softmax(-1).chunk(2, 1)
        return (a - w.exp() * b) @ v

    return fn, (*g.qkv()[:2], g.r(g.B, g.H // 2, g.S, 6), g.r(g.H // 2, 1, 1))


@form(blocks=2)
def differential_unbind(g):
    def fn(q, k, v, w):
        a, b = sc(q, k).softmax(-1).unflatten(1, (2, g.H // 2)).unbind(1)
        return (a - w * b) @ v

    return fn, (*g.qkv()[:2], g.r(g.B, g.H // 2, g.S, 6), g.r(g.H // 2, 1, 1))


@form(blocks=2)
def differential_pairs_of_grouped_heads(g):
    def fn(q, k, v, w, m):
        s = sc(q, k.repeat_interleave(4, 1)).masked_fill(~m, NEG)
        p = s.softmax(-1).view(g.B, 4, 2, g.S, g.S)
        return (p[:, :, 0] - w.exp() * p[:, :, 1]) @ v.repeat_interleave(4, 1)

    mask = torch.ones(g.S, g.S, dtype=torch.bool).tril()
    return fn, (g.r(g.B, 8, g.S, g.D), g.r(g.B, 2, g.S, g.D), g.r(g.B, 1, g.S, 6), g.r(4, 1, 1), mask)


@form()
def convit_gated_positions(g):
    def fn(q, k, v, positions, gate):
        a = torch.sigmoid(gate.view(1, -1, 1, 1))
        p = (1.0 - a) * sc(q, k).softmax(-1) + a * positions.softmax(-1)
        p /= p.sum(-1).unsqueeze(-1)
        return p @ v

    return fn, (*g.qkv(), g.r(1, g.H, g.S, g.S), g.r(g.H))


@form()
def mixture_with_given_weights_and_key_weight(g):
    def fn(q, k, v, positions, w):
        return ((sc(q, k).softmax(-1) - positions.softmax(-1)) * w) @ v

    return fn, (*g.qkv(), g.r(g.B, g.H, g.S, g.S), g.r(g.S))


@form(skip="several_softmaxes", random=True)
def differential_one_dropout(g):
    return (lambda q, k, v, w: F.dropout(sc(q, k).softmax(-1) - 0.3 * sc(q, w).softmax(-1), 0.5) @ v), (
        *g.qkv(),
        g.qkv()[1],
    )


@form(blocks=2, random=True)
def differential_two_dropouts(g):
    return (
        lambda q, k, v, w: (
            (F.dropout(sc(q, k).softmax(-1), 0.5) - 0.3 * F.dropout(sc(q, w).softmax(-1) * 2, 0.2)) @ v
        )
    ), (*g.qkv(), g.qkv()[1])


@form(blocks=2, random=True)
def differential_halves_of_one_dropout(g):
    def fn(q, k, v):
        a, b = F.dropout(sc(q, k).softmax(-1), 0.5).chunk(2, 1)
        return (a - 0.3 * b) @ v

    return fn, (*g.qkv()[:2], g.r(g.B, g.H // 2, g.S, 6))


@form(skip="several_softmaxes")
def softmaxes_multiplied(g):
    return (lambda q, k, v, w: (sc(q, k).softmax(-1) * sc(q, w).softmax(-1)) @ v), (*g.qkv(), g.qkv()[1])


@form(skip="weights_used")
def differential_one_returned(g):
    def fn(q, k, v, w):
        p = sc(q, k).softmax(-1)
        return (p - 0.3 * sc(q, w).softmax(-1)) @ v, p

    return fn, (*g.qkv(), g.qkv()[1])


@form(blocks=2)
def differential_two_values(g):
    return (lambda q, k, v, q2, k2: sc(q, k).softmax(-1) @ v - 0.3 * (sc(q2, k2).softmax(-1) @ v)), (
        *g.qkv(),
        *g.qkv()[:2],
    )


@form()
def softmax_one(g):
    return (lambda q, k, v: (lambda e: (e / (1 + e.sum(-1, keepdim=True))) @ v)(sc(q, k).exp())), g.qkv()


@form()
def softmax_one_less_the_maximum(g):
    def fn(q, k, v):
        s = sc(q, k)
        top = s.amax(-1, keepdim=True)
        e = torch.exp(s - top)
        return (e * (1.0 / (e.sum(-1, keepdim=True) + torch.exp(-top)))) @ v

    return fn, g.qkv()


@form()
def softmax_one_of_masked_rows(g):
    def fn(q, k, v, keep):
        s = sc(q, k).masked_fill(~keep[:, None, None], NEG)
        top = s.amax(-1, keepdim=True).clamp(min=0)
        e = torch.exp(s - top)
        return (e / (torch.exp(-top) + e.sum(-1, keepdim=True))) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def sink_by_hand_cut_off(g):
    def fn(q, k, v, sinks):
        s = sc(q, k)
        s = torch.cat([sinks[:, None, None].expand(s.shape[0], -1, s.shape[2], -1), s], dim=-1)
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return (e / e.sum(-1, keepdim=True))[..., 1:] @ v

    return fn, (*g.qkv(), g.r(g.H))


@form()
def softmax_one_divided_at_the_end(g):
    def fn(q, k, v):
        e = sc(q, k).exp()
        return (e @ v) / (1.0 + e.sum(-1, keepdim=True))

    return fn, g.qkv()


@form()
def sink_in_the_denominator(g):
    def fn(q, k, v, sinks):
        s = sc(q, k) + torch.triu(torch.full((q.shape[2], k.shape[2]), -1e9, dtype=q.dtype), 1)
        top = s.max(-1, keepdim=True).values
        e = torch.exp(s - top)
        return (e / (e.sum(-1, keepdim=True) + torch.exp(sinks[:, None, None] - top))) @ v

    return fn, (*g.qkv(), g.r(g.H))


@form(skip="denominator")
def softmax_one_of_rows_of_nan(g):
    """Where nothing is kept the maximum is -inf, and eager's weights are NaN."""

    def fn(q, k, v, keep):
        s = sc(q, k).masked_fill(~keep[:, None, None], NEG)
        top = s.amax(-1, keepdim=True)
        e = torch.exp(s - top)
        return (e / (torch.exp(-top) + e.sum(-1, keepdim=True))) @ v

    return fn, (*g.qkv(), g.padding(whole=True))


@form(skip="denominator")
def softmax_one_of_other_units(g):
    """What is added is not less the maximum."""

    def fn(q, k, v):
        s = sc(q, k)
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return (e / (1 + e.sum(-1, keepdim=True))) @ v

    return fn, g.qkv()


@form(skip="denominator")
def denominator_with_a_score(g):
    return (lambda q, k, v: (lambda e: (e / (e[..., :1] + e.sum(-1, keepdim=True))) @ v)(sc(q, k).exp())), g.qkv()


@form()
def sinks_gpt_oss(g):
    def fn(q, k, v, sinks):
        s = sc(q, k)
        s = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)], dim=-1)
        s = s - s.max(dim=-1, keepdim=True).values
        p = F.softmax(s, dim=-1, dtype=s.dtype)
        return p[..., :-1] @ v

    return fn, (*g.qkv(), g.r(g.H))


@form()
def sinks_and_causal_mask(g):
    def fn(q, k, v, sinks):
        mask = torch.full((q.shape[2], k.shape[2]), lowest(q), dtype=q.dtype).triu(1)
        s = torch.cat([sc(q, k) + mask, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
        return F.softmax(s - s.amax(-1, keepdim=True), dim=-1)[..., :-1] @ v

    return fn, (*g.qkv(), g.r(g.H))


@form()
def sinks_in_masked_rows(g):
    # nothing but the sink is left of the second batch
    def fn(q, k, v, sinks, m):
        s = sc(q, k).masked_fill(~m[:, None, None], lowest(q))
        return torch.cat([sinks.expand(*s.shape[:3], 1), s], -1).softmax(-1)[..., 1:] @ v

    return fn, (*g.qkv(), g.r(g.H, 1, 1), g.padding(whole=True))


@form()
def sinks_as_low_as_the_mask(g):
    def fn(q, k, v, m):
        s = torch.cat([torch.full((g.B, g.H, g.S, 2), NEG, dtype=q.dtype), sc(q, k).masked_fill(~m, -1e9)], -1)
        return s.softmax(-1)[..., 2:] @ v

    return fn, (*g.qkv(), g.padding(whole=True)[:, None, None])


@form()
def sink_from_logsumexp(g):
    def fn(q, k, v, sinks):
        s = sc(q, k) + torch.full((g.S, g.S), lowest(q), dtype=q.dtype).triu(1)
        gate = (s.logsumexp(-1) - sinks.view(1, -1, 1)).float().sigmoid()
        o = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        return (o * gate.unsqueeze(-1).to(o.dtype)).transpose(1, 2)

    return fn, (*g.qkv(), g.r(g.H))


@form()
def sink_from_the_logsumexp_of_the_weights(g):
    def fn(q, k, v, sinks):
        s = sc(q, k) + torch.full((g.S, g.S), lowest(q), dtype=q.dtype).triu(1)
        lse = s.logsumexp(-1, keepdim=True)
        return ((s - lse).exp() @ v) * torch.sigmoid(lse - sinks[:, None, None])

    return fn, (*g.qkv(), g.r(g.H))


GATES = {
    "one_minus": lambda o, lse, c: o * (1 - torch.sigmoid(c - lse)),
    "over_one_plus_exp": lambda o, lse, c: o / (1 + torch.exp(c - lse)),
    "reciprocal": lambda o, lse, c: o * (1 / (torch.exp(c - lse) + 1)),
    "logsigmoid": lambda o, lse, c: o * torch.exp(F.logsigmoid(lse - c)),
    "softplus": lambda o, lse, c: torch.exp(-F.softplus(c - lse)) * o,
    "logaddexp": lambda o, lse, c: o * torch.exp(lse - torch.logaddexp(c, lse)),
    "log1p": lambda o, lse, c: o * torch.exp(-torch.log1p(torch.exp(c - lse))),
    "ratio": lambda o, lse, c: o * (lse.exp() / (lse.exp() + c.exp())),
    "ratio_at_the_end": lambda o, lse, c: o * lse.exp() / (c.exp() + lse.exp()),
}


def _sink_as_a_gate(how):
    def make(g):
        def fn(q, k, v, sinks):
            s = sc(q, k)
            return GATES[how](s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True), sinks[:, None, None])

        return fn, (*g.qkv(), g.r(g.H))

    make.__name__ = f"sink_as_a_gate_{how}"
    return form()(make)


for _how in GATES:
    _sink_as_a_gate(_how)


@form()
def sink_from_logsumexp_by_hand(g):
    def fn(q, k, v, sinks):
        e, z, m = exponentials(sc(q, k))
        return ((e / z) @ v) * torch.sigmoid(m + z.log() - sinks[:, None, None])

    return fn, (*g.qkv(), g.r(g.H))


@form(skip="weights_used")
def gate_that_is_what_the_sink_takes(g):
    def fn(q, k, v, sinks):
        s = sc(q, k)
        return (s.softmax(-1) @ v) * (1 - torch.sigmoid(s.logsumexp(-1, keepdim=True) - sinks[:, None, None]))

    return fn, (*g.qkv(), g.r(g.H))


@form(skip="weights_used")
def gate_over_one_plus_exp_in_rows_of_nan(g):
    def fn(q, k, v, m):
        s = sc(q, k).masked_fill(~m[:, None, None], NEG)
        return (s.softmax(-1) @ v) / (1 + torch.exp(-s.logsumexp(-1, keepdim=True)))

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def sink_from_logsumexp_in_masked_rows(g):
    def fn(q, k, v, m):
        s = sc(q, k).masked_fill(~m[:, None, None], lowest(q))
        return torch.sigmoid(s.logsumexp(-1, keepdim=True)) * (s.softmax(-1) @ v)

    return fn, (*g.qkv(), g.padding(whole=True))


@form()
def sink_from_logsumexp_and_grouped_heads(g):
    def fn(q, k, v, sinks):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        s = sc(q, k)
        o = (s.softmax(-1) @ v).transpose(1, 2)
        return o * torch.sigmoid(s.logsumexp(-1) - sinks - 1.0).transpose(1, 2)[..., None]

    return fn, (*g.qkv(hk=2), g.r(g.H, 1))


@form(skip="weights_used")
def sink_from_logsumexp_in_rows_of_nan(g):
    def fn(q, k, v, sinks, m):
        s = sc(q, k).masked_fill(~m[:, None, None], NEG)
        return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sinks)

    return fn, (*g.qkv(), g.r(g.H, 1, 1), g.padding(whole=True))


@form(skip="weights_used")
def sink_from_logsumexp_of_other_scores(g):
    def fn(q, k, v, m):
        s = sc(q, k)
        return (s.masked_fill(~m, -1e4).softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True))

    return fn, (*g.qkv(), g.keep(g.S, g.S))


@form(skip="weights_used")
def gate_from_logsumexp(g):
    return (lambda q, k, v: (lambda s: (s.softmax(-1) @ v) * torch.tanh(s.logsumexp(-1, keepdim=True)))(sc(q, k))), (
        g.qkv()
    )


@form()
def weights_sliced_keys_inside(g):
    return (lambda q, k, v, w: (sc(q, k).softmax(-1) * w)[..., 3:9] @ v[:, :, 3:9]), (*g.qkv(), g.r(g.S))


@form()
def null_key_cat_scores(g):
    def fn(q, k, v):
        p = torch.cat([torch.zeros(g.B, g.H, g.S, 1, dtype=q.dtype), sc(q, k)], -1).softmax(-1)
        return p[..., 1:] @ v

    return fn, g.qkv()


@form()
def two_scores_concatenated(g):
    def fn(q, k, v, k2, v2):
        p = torch.cat([sc(q, k), sc(q, k2)], -1).softmax(-1)
        return p @ torch.cat([v, v2], -2)

    return fn, (*g.qkv(), *g.qkv()[:2])


@form()
def keys_and_values_in_pieces(g):
    # a few tokens that all see, and blocks that see themselves
    def fn(q, k, v, gk, gv, m):
        s = torch.cat([torch.einsum("bhckf,bhgf->bhckg", q, gk), torch.einsum("bhckf,bhcxf->bhckx", q, k)], -1)
        p = (s + m[:, None, :, None].to(s)).softmax(-1)
        a, b = p[..., :3], p[..., 3:]
        return torch.einsum("bhckg,bhgf->bhckf", a, gv) + torch.einsum("bhckx,bhcxf->bhckf", b, v)

    m = torch.zeros(g.B, 4, 8)
    m[:, 2, 5:] = torch.finfo(torch.float32).min
    return fn, (*(g.r(g.B, g.H, 4, 5, g.D) for _ in range(3)), *(g.r(g.B, g.H, 3, g.D) for _ in range(2)), m)


@form()
def memories_beside_keys(g):
    def fn(q, k, v, mk, mv, m):
        s = torch.cat([sc(q, mk), sc(q, k).masked_fill(~m, lowest(q))], -1)
        a, b = s.softmax(-1).split([mk.shape[2], k.shape[2]], -1)
        return a @ mv + b @ v

    mask = torch.ones(g.S, g.S, dtype=torch.bool).tril()
    return fn, (*g.qkv(), *(g.r(g.B, g.H, 5, g.D) for _ in range(2)), mask)


@form()
def pieces_that_are_subtracted(g):
    def fn(q, k, v):
        p = sc(q, k).softmax(-1)
        return p[..., :5] @ v[:, :, :5] - -(p[..., 5:] @ v[:, :, 5:])

    return fn, g.qkv()


@form()
def pieces_of_grouped_and_other_heads(g):
    def fn(q, k, v, a, b, c, d):
        k, v, a, b = (t.repeat_interleave(2, 1) for t in (k, v, a, b))
        p = torch.cat([sc(q, k), sc(q, a), sc(q, c)], -1).softmax(-1)
        n = k.shape[2]
        o = p[..., :n] @ v
        o = o + p[..., n : n + 4] @ b
        o += p[..., n + 4 :] @ d
        return o

    return fn, (*g.qkv(hk=2), *(g.r(g.B, 2, 4, g.D) for _ in range(2)), *(g.r(g.B, g.H, 2, g.D) for _ in range(2)))


@form(random=True)
def pieces_with_dropout(g):
    def fn(q, k, v, mk, mv):
        p = F.dropout(torch.cat([sc(q, mk), sc(q, k)], -1).softmax(-1), 0.5)
        return p[..., :5] @ mv + p[..., 5:] @ v

    return fn, (*g.qkv(), *(g.r(g.B, g.H, 5, g.D) for _ in range(2)))


@form(blocks=2)
def pieces_that_are_not_added(g):
    def fn(q, k, v, mk, mv):
        a, b = torch.cat([sc(q, mk), sc(q, k)], -1).softmax(-1).split([mk.shape[2], k.shape[2]], -1)
        return torch.cat([a @ mv, b @ v], -1)

    return fn, (*g.qkv(), *(g.r(g.B, g.H, 5, g.D) for _ in range(2)))


@form(blocks=2)
def pieces_with_a_factor(g):
    def fn(q, k, v, mk, mv):
        a, b = torch.cat([sc(q, mk), sc(q, k)], -1).softmax(-1).split([mk.shape[2], k.shape[2]], -1)
        return a @ mv + (b * 2) @ v

    return fn, (*g.qkv(), *(g.r(g.B, g.H, 5, g.D) for _ in range(2)))


@form(blocks=2)
def pieces_of_which_one_is_returned(g):
    def fn(q, k, v, mk, mv):
        a, b = torch.cat([sc(q, mk), sc(q, k)], -1).softmax(-1).split([mk.shape[2], k.shape[2]], -1)
        x = a @ mv
        return x + b @ v, x

    return fn, (*g.qkv(), *(g.r(g.B, g.H, 5, g.D) for _ in range(2)))


@form(blocks=2)
def pieces_that_overlap(g):
    def fn(q, k, v):
        p = sc(q, k).softmax(-1)
        return p[..., :8] @ v[:, :, :8] + p[..., 5:] @ v[:, :, 5:]

    return fn, g.qkv()


@form(blocks=2)
def pieces_that_are_all_of_it(g):
    def fn(q, k, v, w):
        p = sc(q, k).softmax(-1)
        return p @ v + p @ w

    return fn, (*g.qkv(), g.qkv()[2])


@form()
def pieces_of_two_queries(g):
    def fn(q, k, v, mq, mk, mv):
        a, b = torch.cat([sc(mq, mk), sc(q, k)], -1).softmax(-1).split([mk.shape[2], k.shape[2]], -1)
        return a @ mv + b @ v

    return fn, (*g.qkv(), g.qkv()[0], *(g.r(g.B, g.H, 5, g.D) for _ in range(2)))


@form()
def weights_sliced_keys(g):
    return (lambda q, k, v: sc(q, k).softmax(-1)[..., :5] @ v[:, :, :5]), g.qkv()


@form()
def weights_sliced_queries(g):
    return (lambda q, k, v: sc(q, k).softmax(-1)[:, :, 2:5] @ v), g.qkv()


@form()
def weights_sliced_heads(g):
    return (lambda q, k, v: sc(q, k).softmax(-1)[:, 1:3] @ v[:, 1:3]), g.qkv()


@form()
def weights_every_other_query(g):
    return (lambda q, k, v: sc(q, k).softmax(-1)[:, :, 1::2] @ v), g.qkv()


@form()
def weights_of_one_head(g):
    return (lambda q, k, v, b: (sc(q, k) + b).softmax(-1)[:, 2] @ v[:, 0]), (*g.qkv(), g.r(g.H, g.S, g.S))


@form(blocks=2)
def weights_split_by_heads(g):
    def fn(q, k, v):
        a, b = sc(q, k).softmax(-1).split([1, g.H - 1], 1)
        return torch.cat([a @ v[:, :1], b @ v[:, 1:]], 1)

    return fn, g.qkv()


@form(blocks=2)
def weights_split_by_queries(g):
    def fn(q, k, v):
        a, b = torch.split(sc(q, k).softmax(-1), [5, g.S - 5], dim=2)
        return torch.cat([b @ v, a @ v], 2)

    return fn, g.qkv()


@form(skip="*")
def weights_split_then_written(g):
    def fn(q, k, v):
        p = sc(q, k).softmax(-1) * 2
        a, b = p.chunk(2, 1)
        p.mul_(b.new_tensor([[[3.0]], [[1.0]]]).repeat_interleave(g.H // 2, 0))
        return (a - b) @ v

    # torch refuses to differentiate this
    return fn, (*(x.detach() for x in g.qkv()[:2]), g.r(g.B, g.H // 2, g.S, g.D, grad=False))


@form(skip="layout")
def weights_of_reversed_heads(g):
    return (lambda q, k, v: sc(q, k).softmax(-1).flip(1) @ v), g.qkv()


@form(skip="*")
def weights_rolled_keys(g):
    return (lambda q, k, v: sc(q, k).softmax(-1).roll(1, -1) @ v), g.qkv()


@form(skip="softmax_axis")
def over_heads(g):
    return (lambda q, k, v: sc(q, k).softmax(1) @ v), g.qkv()


@form(skip="softmax_axis")
def over_batch(g):
    return (lambda q, k, v: sc(q, k).softmax(0) @ v), g.qkv()


@form(skip="softmax_axis")
def over_queries(g):
    return (lambda q, k, v: sc(q, k).softmax(2) @ v), g.qkv()


@form(skip="softmax_axis")
def slot_attention(g):
    def fn(q, k, v):
        p = (k @ q.mT * 0.3).softmax(-1) + 1e-8
        p = p / p.sum(-2, keepdim=True)
        return p.mT @ v

    return fn, (g.r(g.B, 5, g.D), g.r(g.B, g.S, g.D), g.r(g.B, g.S, g.D))


@form(skip="*")
def joint_query_key(g):
    return (lambda q, k, v: sc(q, k).flatten(-2).softmax(-1).view(g.B, g.H, g.S, g.S) @ v), g.qkv()


@form(skip="*")
def sum_over_queries_by_hand(g):
    return (lambda q, k, v: (lambda e: (e / e.sum(-2, keepdim=True)) @ v)(sc(q, k).exp())), g.qkv()


@form(skip="*")
def sum_over_both_by_hand(g):
    return (lambda q, k, v: (lambda e: (e / e.sum((-2, -1), keepdim=True)) @ v)(sc(q, k).exp())), g.qkv()


@form(skip="*")
def double_softmax(g):
    return (lambda q, k, v: sc(q, k).softmax(-1).softmax(-1) @ v), g.qkv()


@form(skip="*")
def sinkhorn_twice(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) * sc(q, k).softmax(-2)) @ v), g.qkv()


@form(skip="*")
def linear_attention_softmax_features(g):
    return (lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v)), g.qkv()


@form(skip="*")
def linear_attention_elu(g):
    return (lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)), g.qkv()


@form(skip="*")
def efficient_attention_softmax_k(g):
    return (
        lambda q, k, v: torch.einsum(
            "bhde,bhnd->bhne", torch.einsum("bhnd,bhne->bhde", k.softmax(dim=-2), v), q.softmax(-1)
        )
    ), g.qkv()


@form(skip="*")
def performer_features(g):
    def fn(q, k, v, w):
        def f(t):
            return torch.exp(t @ w - (t**2).sum(-1, keepdim=True) / 2)

        q, k = f(q), f(k)
        return (q @ (k.mT @ v)) / (q @ k.sum(-2)[..., None])

    return fn, (*g.qkv(), g.r(g.D, 6))


@form(skip="*")
def retention_decay(g):
    return (lambda q, k, v: (sc(q, k) * torch.exp(-torch.arange(g.S).to(q.dtype))) @ v), g.qkv()


@form(skip="*")
def sigmoid_attention(g):
    return (lambda q, k, v: torch.sigmoid(sc(q, k)) @ v), g.qkv()


@form(skip="*")
def relu_attention(g):
    return (lambda q, k, v: F.relu(sc(q, k)).div(g.S) @ v), g.qkv()


@form(blocks=1)
def attention_pooling_scores_linear(g):
    # softmax(w x) : the query is a vector, scores = x @ w
    return (lambda x, w: (x @ w).softmax(1).mT @ x), (g.r(g.B, g.S, g.D), g.r(g.D, 1))


@form()
def attention_pooling_learned_query(g):
    return (
        lambda x, qq: torch.einsum("bn,bnd->bd", (torch.einsum("d,bnd->bn", qq, x) / math.sqrt(g.D)).softmax(-1), x)
    ), (g.r(g.B, g.S, g.D), g.r(g.D))


@form(skip="*")
def bahdanau_additive(g):
    return (lambda q, k, v, w: (torch.tanh(q[:, :, None] + k[:, None]) @ w).softmax(-1) @ v), (
        g.r(g.B, g.S, g.D),
        g.r(g.B, g.S, g.D),
        g.r(g.B, g.S, g.D),
        g.r(g.D),
    )


@form()
def luong_dot_bmm(g):
    return (
        lambda q, k: torch.bmm(F.softmax(torch.bmm(k, q.unsqueeze(2)).squeeze(2), dim=1).unsqueeze(1), k).squeeze(1)
    ), (g.r(g.B, g.D), g.r(g.B, g.S, g.D))


@form()
def perceiver_latents(g):
    return (lambda z, x, wq, wk, wv: (sc(z @ wq, x @ wk)).softmax(-1) @ (x @ wv)), (
        g.r(5, g.D),
        g.r(g.B, 17, 6),
        g.w(g.D, g.D),
        g.w(6, g.D),
        g.w(6, g.D),
    )


@form()
def set_transformer_pma(g):
    def fn(s, x):
        q = torch.cat(s.repeat(g.B, 1, 1).split(2, 2), 0)
        k = torch.cat(x.split(2, 2), 0)
        a = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(g.D), 2)
        return torch.cat((q + a.bmm(k)).split(g.B, 0), 2)

    return fn, (g.r(1, 3, g.D), g.r(g.B, g.S, g.D))


@form(skip="*")
def router_softmax_no_values(g):
    return (lambda x, w: (x @ w).softmax(-1).topk(2)[0]), (g.r(g.B, g.S, g.D), g.r(g.D, 4))


@form(skip="*")
def classifier_softmax(g):
    return (lambda x, w: (x @ w).softmax(-1)), (g.r(g.B, g.S, g.D), g.r(g.D, 4))


@form()
def hopfield_soft_codebook(g):
    return (lambda x, e: (x @ e.t() * 4.0).softmax(-1) @ e), (g.r(g.B, g.S, g.D), g.r(17, g.D))


@form(blocks=1)
def moe_soft_dispatch(g):
    return (lambda x, p: torch.einsum("bnes,bnd->besd", torch.einsum("bnd,esd->bnes", x, p).softmax(1), x)), (
        g.r(g.B, g.S, g.D),
        g.r(3, 2, g.D),
    )


@form(blocks=1)
def transfer_q_is_softmaxed_twice_v(g):
    return (lambda q, k, v: (sc(q, k).softmax(-1) @ v.softmax(-1)).softmax(-1) @ v.mT), g.qkv()


@form()
def cogview_pb_relax_whole_row(g):
    def fn(q, k, v, m):
        s = (q / (32 * math.sqrt(g.D))) @ k.transpose(-1, -2)
        s = s.masked_fill(~m[:, None, None], -torch.finfo(s.dtype).max)
        return ((s - s.amax(dim=-1, keepdim=True).detach()) * 32).softmax(-1) @ v

    return fn, (*g.qkv(), g.padding(whole=True))
