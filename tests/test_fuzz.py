"""Random attention functions, put together from layouts, scales, masks, biases, caps and what follows the softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forms import Form, check
from forms.registry import NEG, Gen, compare, compiled, lowest, make, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchflash import Skipped
from torchflash.backend import torchflash

Maker = Callable[[Gen, int, int, int, int], tuple[Callable[..., Any], tuple[Any, ...]]]


def index(m: int, n: int) -> Any:
    return torch.arange(m)[:, None], torch.arange(n)[None, :]


# each makes (f(scores, *extra), extra) for scores [B, H, M, N]
STEPS: dict[str, Maker] = {
    "mul": lambda g, b, h, m, n: (lambda s: s * 0.37, ()),
    "div": lambda g, b, h, m, n: (lambda s: s / 2.5, ()),
    "neg": lambda g, b, h, m, n: (lambda s: -s, ()),
    "shift": lambda g, b, h, m, n: (lambda s: 1.5 + s, ()),
    "scale": lambda g, b, h, m, n: (lambda s, t: s * t, (g.r(h, 1, 1),)),
    "scale0": lambda g, b, h, m, n: (lambda s, t: t * s, (g.r(1),)),
    "cap": lambda g, b, h, m, n: (lambda s: 3.0 * torch.tanh(s / 3.0), ()),
    "clamp": lambda g, b, h, m, n: (lambda s: s.clamp(min=-2.0), ()),
    "leaky": lambda g, b, h, m, n: (lambda s: F.leaky_relu(s, 0.2), ()),
    "bias": lambda g, b, h, m, n: (lambda s, t: s + t, (g.r(h, m, n),)),
    "bias_n": lambda g, b, h, m, n: (lambda s, t: t[:, None, None] + s, (g.r(b, n),)),
    "bias_m": lambda g, b, h, m, n: (lambda s, t: s - t, (g.r(b, 1, m, 1),)),
    "bias_vectors": lambda g, b, h, m, n: (lambda s, t, u: s + t[:, :, None] * u[:, None], (g.r(h, m), g.r(h, n))),
    "table": lambda g, b, h, m, n: (
        lambda s, t: s + t[(index(m, n)[0] - index(m, n)[1]).clamp(-3, 3) + 3].permute(2, 0, 1), (g.r(7, h),)
    ),
    "alibi": lambda g, b, h, m, n: (
        lambda s, t: s - t[:, None, None] * (index(m, n)[0] - index(m, n)[1]).abs(), (g.r(h, grad=False),)
    ),
    "causal": lambda g, b, h, m, n: (lambda s: s.masked_fill(torch.ones(m, n).triu(1 + n - m).bool(), NEG), ()),
    "causal_add": lambda g, b, h, m, n: (lambda s: s + torch.full((m, n), -1e9).triu(1).to(s.dtype), ()),
    "window": lambda g, b, h, m, n: (
        lambda s: torch.where((index(m, n)[0] - index(m, n)[1]).abs() < 4, s, lowest(s)), ()
    ),
    "padding": lambda g, b, h, m, n: (lambda s, t: s.masked_fill(~t[:, None, None], -1e4), (g.keep(b, n),)),
    "padding_low": lambda g, b, h, m, n: (
        lambda s, t: s + (1.0 - t[:, None, None].to(s.dtype)) * torch.finfo(torch.float32).min, (g.keep(b, n),)
    ),
    "mask": lambda g, b, h, m, n: (lambda s, t: torch.where(t, s, NEG), (g.keep(b, 1, m, n),)),
    "mask_mul": lambda g, b, h, m, n: (lambda s, t: s * t - 1e4 * (1 - t), (g.keep(m, n).to(g.dtype),)),
    "blocks": lambda g, b, h, m, n: (
        lambda s: s.masked_fill(index(m, n)[0] // 3 < index(m, n)[1] // 3, -50.0), ()
    ),
    "checker": lambda g, b, h, m, n: (
        lambda s: s.masked_fill((index(m, n)[0] + index(m, n)[1]) % 3 == 1, -20.0), ()
    ),
    "fold": lambda g, b, h, m, n: (lambda s: s.reshape(b * h, m, n).view(b, h, m, n), ()),
    "transpose": lambda g, b, h, m, n: (lambda s: s.transpose(1, 2).contiguous().transpose(1, 2), ()),
}  # fmt: skip
AFTER: dict[str, Maker] = {
    "half": lambda g, b, h, m, n: (lambda p: p * 0.5, ()),
    "gate": lambda g, b, h, m, n: (lambda p, t: p * t, (g.r(h, 1, 1),)),
    "rows": lambda g, b, h, m, n: (lambda p, t: p.masked_fill(~t[:, None, :, None], 0.0), (g.keep(b, m),)),
    "keys": lambda g, b, h, m, n: (lambda p, t: p * t[:, None, None], (g.r(b, n),)),
    "nan": lambda g, b, h, m, n: (lambda p: torch.nan_to_num(p), ()),
    "cast": lambda g, b, h, m, n: (lambda p: p.float().to(p.dtype), ()),
    "dropout_off": lambda g, b, h, m, n: (lambda p: F.dropout(p, 0.3, training=False), ()),
}


def by_hand(s: Any) -> Any:
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


SOFTMAX: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda s: s.softmax(-1),
    "float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "log": lambda s: F.log_softmax(s, -1).exp(),
    "by_hand": by_hand,
    "transposed": lambda s: s.mT.softmax(-2).mT,
}


def heads(x: Any, layout: str) -> Any:
    """[B, H, N, D] as the layout holds it."""
    return x if layout == "bhmd" else x.transpose(1, 2) if layout == "bmhd" else x.flatten(0, 1)


def products(layout: str, b: int, h: int, group: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(q, k -> scores [B, H, M, N]), (weights [B, H, M, N], v -> output)."""
    if layout == "bhmd":
        repeat = (lambda x: x.repeat_interleave(group, 1)) if group > 1 else (lambda x: x)
        return (lambda q, k: q @ repeat(k).mT), (lambda p, v: p @ repeat(v))
    if layout == "bmhd":
        repeat = (lambda x: x.repeat_interleave(group, 2)) if group > 1 else (lambda x: x)
        return (
            lambda q, k: torch.einsum("bmhd,bnhd->bhmn", q, repeat(k)),
            lambda p, v: torch.einsum("bhmn,bnhd->bmhd", p, repeat(v)),
        )
    return (
        lambda q, k: torch.bmm(q, k.mT).view(b, h, q.shape[1], k.shape[1]),
        lambda p, v: torch.bmm(p.reshape(b * h, p.shape[2], p.shape[3]), v),
    )


@st.composite
def attention(draw: st.DrawFn) -> tuple[Form, dict[str, Any]]:
    layout = draw(st.sampled_from(["bhmd", "bmhd", "folded"]))
    b, hk, group = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        1 if layout == "folded" else draw(st.integers(1, 2)),
    )
    m, n = draw(st.integers(1, 9)), draw(st.integers(2, 9))
    d, dv = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=4))
    after = draw(st.lists(st.sampled_from(sorted(AFTER)), max_size=2))
    soft = draw(st.sampled_from(sorted(SOFTMAX)))
    if soft == "by_hand" and {"nan", "mask", "causal"} & {*steps, *after}:
        soft = "softmax"  # by hand, -inf - -inf is not the row constant that cancels
    h = hk * group

    def make(g: Gen) -> tuple[Any, tuple[Any, ...]]:
        q, k, v = g.r(b, h, m, d), g.r(b, hk, n, d), g.r(b, hk, n, dv)
        parts = [STEPS[x](g, b, h, m, n) for x in steps], [AFTER[x](g, b, h, m, n) for x in after]
        extra = [t for group_ in parts for _, ts in group_ for t in ts]
        score, mix = products(layout, b, h, group)

        def fn(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            given_ = list(rest)
            x = score(q, k)
            for f, ts in parts[0]:
                x = f(x, *(given_.pop(0) for _ in ts))
            x = SOFTMAX[soft](x)
            for f, ts in parts[1]:
                x = f(x, *(given_.pop(0) for _ in ts))
            return mix(x, v)

        return fn, (*(heads(t, layout).detach().requires_grad_() for t in (q, k, v)), *extra)

    sizes = {"b": b, "h": h, "hk": hk, "m": m, "n": n, "d": d, "dv": dv}
    return Form(" ".join([layout, *steps, soft, *after]), make), sizes


def hold(drawn: tuple[Form, dict[str, Any]]) -> None:
    check(drawn[0], train=True, slack=4.0)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=30, derandomize=True, **QUIET)  # type: ignore[arg-type]
@given(attention())
def test_random_attention(drawn: tuple[Form, dict[str, Any]]) -> None:
    hold(drawn)


@pytest.mark.slow
@settings(max_examples=600, **QUIET)  # type: ignore[arg-type]
@given(attention())
def test_more_random_attention(drawn: tuple[Form, dict[str, Any]]) -> None:
    hold(drawn)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Form, dict[str, int]]:
    """Scores that add products and are put end to end, weights that are taken apart along any dim and mixed again."""
    b, hk, group = draw(st.integers(1, 2)), 2 * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    h, m, d = hk * group, draw(st.integers(2, 6)), draw(st.integers(1, 5))
    ends = [
        (draw(st.integers(1, 5)), draw(st.lists(st.sampled_from([1.0, 2.0, -0.7]), min_size=1, max_size=3)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    n = sum(length for length, _ in ends)
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=2))
    apart = draw(st.sampled_from(["no", "keys", "some_keys", "heads", "pairs", "queries", "every_other", "one_head"]))
    shared = draw(st.booleans())  # one query for all pieces
    sink = draw(st.booleans()) and not {"mask", "causal"} & {*steps}

    def make(g: Gen) -> tuple[Any, tuple[Any, ...]]:
        def rows(heads_: int, length: int) -> Any:
            return g.r(b, heads_, length, d)

        q = [rows(h, m) for _, scales in ends for _ in scales]
        k = [rows(hk, length) for length, scales in ends for _ in scales]
        v = [rows(hk, length) for length, _ in ends]
        parts = [STEPS[x](g, b, h, m, n) for x in steps]
        extra = [t for _, ts in parts for t in ts]
        weight = g.r(h, 1, 1)

        def fn(w: Any, *given_: Any) -> Any:
            left = list(given_)
            qs, ks, vs = ([left.pop(0) for _ in x] for x in (q, k, v))
            ks, vs = ([t.repeat_interleave(group, 1) for t in x] for x in (ks, vs))
            scores, at = [], 0
            for _, scales in ends:
                products_ = [(qs[0] if shared else qs[at + i]) @ ks[at + i].mT * c for i, c in enumerate(scales)]
                scores.append(sum(products_[1:], products_[0]))
                at += len(scales)
            s = torch.cat(scores, -1)
            for f, ts in parts:
                s = f(s, *(left.pop(0) for _ in ts))
            p, x = s.softmax(-1), torch.cat(vs, 2)
            match apart:
                case "keys":
                    o = sum(a @ y for a, y in zip(p.split([y.shape[2] for y in vs], -1), vs, strict=True))
                case "some_keys":
                    o = p[..., : vs[0].shape[2]] @ vs[0]
                case "heads":
                    y, z = p.chunk(2, 1)
                    o = (y - w[: h // 2] * z) @ x[:, h // 2 :]
                case "pairs":
                    y, z = p.unflatten(1, (h // 2, 2)).unbind(2)
                    o = (y + z * 0.5) @ x[:, ::2]
                case "queries":
                    y, z = p.split([1, m - 1], 2)
                    o = torch.cat([z @ x, (y * w) @ x], 2)
                case "every_other":
                    o = p[:, :, ::2] @ x
                case "one_head":
                    o = p[:, 1] @ x[:, 0]
                case _:
                    o = p @ x
            return o * torch.sigmoid(s.logsumexp(-1, keepdim=True) - w) if sink and apart == "no" else o

        return fn, (weight, *q, *k, *v, *extra)

    name = f"{[scales for _, scales in ends]} {' '.join(steps)} {apart} shared={shared} sink={sink}"
    return Form(name, make), {"b": b, "h": h, "m": m, "n": n, "d": d}


def hold_whatever(form: Form) -> None:
    """Eager's values and gradients, rewritten or not."""
    fn, inputs = make(form)
    got = step(compiled(form, fn), fn, inputs, train=True)
    assert "internal" not in [r.code for r in torchflash.report if isinstance(r, Skipped)]
    compare(fn, inputs, True, got, slack=4.0)


@settings(max_examples=30, derandomize=True, **QUIET)  # type: ignore[arg-type]
@given(pieces())
def test_random_pieces(drawn: tuple[Form, dict[str, int]]) -> None:
    hold_whatever(drawn[0])


@pytest.mark.slow
@settings(max_examples=600, **QUIET)  # type: ignore[arg-type]
@given(pieces())
def test_more_random_pieces(drawn: tuple[Form, dict[str, int]]) -> None:
    hold_whatever(drawn[0])
