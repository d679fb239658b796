"""What surrounds a block: dropout, checkpoints, autocast, vmap, buffers, returned tensors, writes in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from forms.registry import NEG, form, sc

INF = float("inf")


def att(q, k, v):
    return sc(q, k).softmax(-1) @ v


@form()
def dropout_eval_module(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.d = nn.Dropout(0.3)

        def forward(s, q, k, v):
            return s.d(sc(q, k).softmax(-1)) @ v

    return A().eval(), g.qkv()


@form(random=True)
def dropout_train_module(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.d = nn.Dropout(0.3)

        def forward(s, q, k, v):
            return s.d(sc(q, k).softmax(-1)) @ v

    return A().train(), g.qkv()


@form()
def dropout_p0_train(g):
    return (lambda q, k, v: F.dropout(sc(q, k).softmax(-1), 0.0, training=True) @ v), g.qkv()


@form()
def dropout_functional_false(g):
    return (lambda q, k, v: F.dropout(sc(q, k).softmax(-1), p=0.4, training=False) @ v), g.qkv()


@form(random=True)
def dropout_functional_true_inplace(g):
    return (lambda q, k, v: F.dropout(sc(q, k).softmax(-1) * 1.0, p=0.4, training=True, inplace=True) @ v), g.qkv()


@form(random=True)
def dropout_torch_positional(g):
    return (lambda q, k, v: torch.dropout(sc(q, k).softmax(-1), 0.2, True) @ v), g.qkv()


@form()
def dropout_p1(g):
    return (lambda q, k, v: F.dropout(sc(q, k).softmax(-1), 1.0, True) @ v), g.qkv()


@form(random=True)
def dropout_then_mask_gate(g):
    return (lambda q, k, v, t: (F.dropout(sc(q, k).softmax(-1), 0.2) * t) @ v), (*g.qkv(), g.r(g.H, 1, 1))


@form(random=True, skip="*")
def dropout_twice(g):
    return (lambda q, k, v: F.dropout(F.dropout(sc(q, k).softmax(-1), 0.2), 0.1) @ v), g.qkv()


@form(random=True, skip="*")
def dropout_on_scores(g):
    return (lambda q, k, v: F.dropout(sc(q, k), 0.2).softmax(-1) @ v), g.qkv()


@form(random=True)
def dropkey_bernoulli(g):
    return (
        lambda q, k, v: (sc(q, k) + torch.bernoulli(torch.full_like(sc(q, k), 0.2)) * -1e12).softmax(-1) @ v
    ), g.qkv()


@form(random=True)
def dropout_mask_by_hand(g):
    return (
        lambda q, k, v: (sc(q, k).softmax(-1) * (torch.rand(g.B, g.H, g.S, g.S) < 0.8).to(q.dtype) / 0.8) @ v
    ), g.qkv()


@form(random=True, skip="*")
def dropout2d_headwise(g):
    return (lambda q, k, v: F.dropout2d(sc(q, k).softmax(-1), 0.2) @ v), g.qkv()


@form(random=True)
def dropout_on_output(g):
    return (lambda q, k, v: F.dropout(att(q, k, v), 0.2)), g.qkv()


@form(blocks=2)
def two_layers(g):
    return (lambda q, k, v: att(att(q, k, v), k, v)), g.qkv()


@form(blocks=2)
def output_is_next_key_and_value(g):
    return (lambda q, k, v: (lambda o: att(q, o, o))(att(q, k, v))), g.qkv()


@form(blocks=2)
def encoder_decoder(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            e = 32
            s.l = nn.ModuleList([nn.Linear(e, e) for _ in range(8)])

        def forward(s, x, y):
            def h(t):
                return t.view(t.shape[0], t.shape[1], 4, 8).transpose(1, 2)

            m = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            a = (
                (sc(h(s.l[0](x)), h(s.l[1](x))).masked_fill(m, NEG).softmax(-1) @ h(s.l[2](x)))
                .transpose(1, 2)
                .reshape(x.shape)
            )
            x = x + s.l[3](a)
            a = att(h(s.l[4](x)), h(s.l[5](y)), h(s.l[6](y))).transpose(1, 2).reshape(x.shape)
            return x + s.l[7](a)

    return g.module(A()), (g.x(), g.x(17))


@form()
def checkpointed(g):
    return (lambda q, k, v: checkpoint(att, q, k, v, use_reentrant=False)), g.qkv()


@form(random=True)
def checkpointed_dropout(g):
    return (
        lambda q, k, v: checkpoint(
            lambda q, k, v: F.dropout(sc(q, k).softmax(-1), 0.2) @ v, q, k, v, use_reentrant=False
        )
    ), g.qkv()


@form(blocks=2)
def checkpointed_blocks_closure(g):
    m = g.keep(g.S, g.S)

    def fn(q, k, v, m):
        def blk(x):
            return x + sc(x, k).masked_fill(~m, -1e9).softmax(-1) @ v

        return checkpoint(blk, checkpoint(blk, q, use_reentrant=False), use_reentrant=False)

    return fn, (*g.qkv(), m)


@form()
def nested_functions(g):
    def fn(q, k, v):
        def scores(a):
            return sc(q, a)

        def mix(p):
            return p @ v

        return mix(scores(k).softmax(-1))

    return fn, g.qkv()


@form()
def autocast_bf16(g):
    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return att(q, k, v)

    return fn, g.qkv()


@form()
def autocast_bf16_linear(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.qkv = nn.Linear(32, 96)
            s.o = nn.Linear(32, 32)

        def forward(s, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q, k, v = [t.view(g.B, -1, 4, 8).transpose(1, 2) for t in s.qkv(x).chunk(3, -1)]
                m = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
                p = F.softmax(sc(q, k).masked_fill(~m, NEG), dim=-1)
                return s.o((p @ v).transpose(1, 2).reshape(x.shape))

    return g.module(A()), (g.x(),)


@form()
def autocast_disabled_inside(g):
    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                return att(q.float(), k.float(), v.float()).to(q.dtype)

    return fn, g.qkv()


@form()
def autocast_scores_only(g):
    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s = sc(q, k)
        return s.float().softmax(-1).to(v.dtype) @ v

    return fn, g.qkv()


@form(skip="transform")
def vmapped_over_heads(g):
    return (lambda q, k, v: torch.func.vmap(att)(q, k, v)), [g.r(g.H, g.S, g.D) for _ in range(3)]


@form(skip="transform")
def vmapped_shared_key(g):
    return (lambda q, k, v: torch.func.vmap(att, in_dims=(0, None, None))(q, k, v)), (
        g.r(g.H, g.S, g.D),
        g.r(g.S, g.D),
        g.r(g.S, g.D),
    )


@form(skip="transform")
def vmapped_twice_in_dims(g):
    return (lambda q, k, v: torch.func.vmap(torch.func.vmap(att, in_dims=1, out_dims=1))(q, k, v)), g.bsd()


@form(skip="transform")
def vmapped_mask(g):
    m = g.keep(g.B, g.S)
    return (
        lambda q, k, v, m: torch.func.vmap(lambda q, k, v, m: sc(q, k).masked_fill(~m, -1e9).softmax(-1) @ v)(
            q, k, v, m
        )
    ), (*g.qkv(), m)


@form()
def buffers_of_module(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("m", torch.ones(20, 20).tril().bool())
            s.register_buffer("sl", torch.rand(4, 1, 1))
            s.scale = 0.3

        def forward(s, q, k, v):
            a = (q @ k.mT) * s.scale + s.sl * torch.arange(k.shape[2])
            return a.masked_fill(~s.m[: q.shape[2], : k.shape[2]], NEG).softmax(-1) @ v

    return A().to(g.dtype), g.qkv()


@form()
def python_float_argument(g):
    return (lambda q, k, v, c: (q @ k.mT * c).softmax(-1) @ v), (*g.qkv(), 0.37)


@form()
def python_flags(g):
    def fn(q, k, v, causal):
        s = sc(q, k)
        if causal:
            s = s.masked_fill(torch.ones(g.S, g.S).triu(1).bool(), NEG)
        return s.softmax(-1) @ v

    return fn, (*g.qkv(), True)


@form()
def loop_over_heads(g):
    return (lambda q, k, v: torch.stack([att(q[:, 0], k[:, 0], v[:, 0])], 1)), g.qkv()


@form(blocks=4)
def loop_over_all_heads(g):
    return (lambda q, k, v: torch.cat([att(q[:, h], k[:, h], v[:, h]) for h in range(4)], -1)), g.qkv()


@form()
def key_value_returned(g):
    return (lambda q, k, v: (att(q * 1.0, k * 2.0, v * 3.0), k * 2.0, v * 3.0)), g.qkv()


@form()
def queries_returned(g):
    return (lambda q, k, v: (lambda q2, k2: (att(q2, k2, v), q2, k2.mT))(q * 0.5, k * 0.7)), g.qkv()


@form()
def output_used_twice(g):
    return (lambda q, k, v: (lambda o: o + o.transpose(1, 2).transpose(1, 2).tanh())(att(q, k, v))), g.qkv()


@form(fullgraph=False, blocks=2)
def graph_break_between(g):
    def fn(q, k, v):
        a = att(q, k, v)
        torch._dynamo.graph_break()
        return att(a, k, v)

    return fn, g.qkv()


@form(fullgraph=False, skip="*")
def graph_break_inside(g):
    def fn(q, k, v):
        p = sc(q, k).softmax(-1)
        torch._dynamo.graph_break()
        return p @ v

    return fn, g.qkv()


@form()
def double_softmax_input_cast(g):
    return (lambda q, k, v: (q.float() @ k.float().mT * 0.3).softmax(-1).to(v.dtype) @ v), g.qkv()


@form(skip="dtype")
def float64_inputs(g):
    return (lambda q, k, v: att(q.double(), k.double(), v.double()).to(q.dtype)), g.qkv()


@form(skip="dtype")
def float64_scores(g):
    return (lambda q, k, v: (q.double() @ k.double().mT).softmax(-1).to(v.dtype) @ v), g.qkv()


@form()
def softmax_in_double(g):
    return (lambda q, k, v: sc(q, k).double().softmax(-1).to(v.dtype) @ v), g.qkv()


@form()
def mixed_value_dtype(g):
    return (lambda q, k, v: (sc(q, k).float().softmax(-1) @ v.float()).to(q.dtype)), g.qkv()


@form()
def float64_mask(g):
    return (lambda q, k, v, m: (sc(q, k) + m.to(q.dtype)).softmax(-1) @ v), (
        *g.qkv(),
        g.r(g.S, g.S, dtype=torch.float64),
    )


@form()
def input_mask_written_after(g):
    def fn(q, k, v, m):
        o = (sc(q, k) + m).softmax(-1) @ v
        m.add_(1.0)
        return o

    return fn, (*g.qkv(), g.r(g.S, g.S).detach())


@form()
def computed_mask_written_after(g):
    def fn(q, k, v, m):
        m = m * 2
        o = (sc(q, k) + m).softmax(-1) @ v
        m.add_(1.0)
        return o, m

    return fn, (*g.qkv(), g.r(g.S, g.S).detach())


@form()
def input_key_cache_updated(g):
    # the cache (an input buffer) is written, then attended to
    def fn(q, k, v, ck, cv):
        ck[:, :, 4:] = k
        cv[:, :, 4:] = v
        return att(q, ck, cv)

    return fn, (*g.qkv(), torch.zeros(g.B, g.H, 17, g.D, dtype=g.dtype), torch.zeros(g.B, g.H, 17, g.D, dtype=g.dtype))


@form()
def input_key_cache_copy_(g):
    def fn(q, k, v, ck, cv):
        ck[:, :, 4:].copy_(k)
        cv.narrow(2, 4, 13).copy_(v)
        return att(q, ck, cv)

    return fn, (*g.qkv(), torch.zeros(g.B, g.H, 17, g.D, dtype=g.dtype), torch.zeros(g.B, g.H, 17, g.D, dtype=g.dtype))


@form()
def requires_grad_only_value(g):
    return att, (*[t.detach() for t in g.qkv()[:2]], g.qkv()[2])


@form()
def requires_grad_only_query(g):
    return att, (g.qkv()[0], *[t.detach() for t in g.qkv()[1:]])


@form()
def requires_grad_only_bias(g):
    return (lambda q, k, v, b: (sc(q, k) + b).softmax(-1) @ v), (*[t.detach() for t in g.qkv()], g.r(g.H, g.S, g.S))


@form()
def huge_scores(g):
    return (lambda q, k, v: (q * 30 @ k.mT).softmax(-1) @ v), g.qkv()


@form()
def constant_inputs(g):
    return (lambda q, k, v: ((q * 0 + 1000.0) @ (k * 0 + 1000.0).mT).softmax(-1) @ v), g.qkv()


@form()
def negative_scale(g):
    return (lambda q, k, v: (q @ k.mT * -0.3).softmax(-1) @ v), g.qkv()


@form()
def infinite_bias_column(g):
    b = torch.zeros(g.S, dtype=g.dtype)
    b[3] = INF
    return (lambda q, k, v, b: (sc(q, k) + b).softmax(-1) @ v), (*g.qkv(), b)


@form()
def multihead_attention_module(g):
    m = nn.MultiheadAttention(32, 4, batch_first=True)

    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.m = m

        def forward(s, x):
            return s.m(x, x, x, need_weights=True)[0]

    return g.module(A()), (g.x(),)


@form(random=True)
def multihead_attention_dropout(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.m = nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True)

        def forward(s, x):
            return s.m(x, x, x)[0]

    return g.module(A()), (g.x(),)


@form()
def multihead_attention_zeros_and_masks(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.m = nn.MultiheadAttention(32, 4, add_bias_kv=True, add_zero_attn=True)

        def forward(s, x, y, padding, mask):
            return s.m(x, y, y, key_padding_mask=padding, attn_mask=mask)[0]

    x, y = g.r(g.S, g.B, 32), g.r(g.S + 3, g.B, 32)
    return g.module(A()), (x, y, ~g.padding(g.S + 3), ~g.keep(g.S, g.S + 3))


@form(skip="weights_used")
def multihead_attention_weights(g):
    class A(nn.Module):
        def __init__(s):
            super().__init__()
            s.m = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(s, x):
            return s.m(x, x, x, need_weights=True)

    return g.module(A()), (g.x(),)
