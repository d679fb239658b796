"""`torchflash.attention`: what scaled_dot_product_attention gives, masks and all; scores as text; and its errors."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import torchflash
from torchflash import attention
from torchflash.backend import torchflash as backend
from torchflash.score import ScoreError

B, H, M, N, D = 2, 4, 24, 31, 8
INF = float("inf")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


def qkv(hk: int = H, n: int = N, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (B, H, M, D), (B, hk, n, D), (B, hk, n, D)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def agree(got: Tensor, leaves: list[Tensor], reference) -> None:
    """Output and gradients within the budget; `reference` maps the leaves, in any dtype, to the output."""
    doubles = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in leaves]
    exact, rough = reference(*doubles), reference(*leaves)
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    do = torch.randn(got.shape).to(got.dtype)
    results = [
        [y, *torch.autograd.grad(y, [xs[i] for i in wanted], do.to(y.dtype))]
        for y, xs in ((got, leaves), (exact, doubles), (rough, leaves))
    ]
    for i, (a, b, c) in enumerate(zip(*results, strict=True)):
        oracle.within_budget("out" if not i else f"gradient {i - 1}", a, b, c, slack=2 if i else 1)


# ------------------------------------------------------------------------------------------------------- as SDPA


def keep(*shape: int) -> Tensor:
    """Bool, True = keep; one row keeps nothing."""
    mask = torch.rand(shape) < 0.6
    mask[..., 3, :] = mask.shape[-2] == 1
    return mask


def added(*shape: int) -> Tensor:
    return torch.randn(shape).masked_fill(~keep(*shape), -INF).requires_grad_()


MASKS = {
    "none": lambda: None,
    "bool [M, N]": lambda: keep(M, N),
    "bool [H, M, N]": lambda: keep(H, M, N),
    "bool [B, 1, 1, N]": lambda: torch.rand(B, 1, 1, N) < 0.6,
    "bool [B, H, M, N]": lambda: keep(B, H, M, N),
    "float [M, N]": lambda: added(M, N),
    "float [1, H, M, N]": lambda: added(1, H, M, N),
    "float [B, 1, M, 1]": lambda: torch.randn(B, 1, M, 1).requires_grad_(),
    "float [B, H, M, N]": lambda: added(B, H, M, N),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    leaves = [*qkv(), *([m] if (m := MASKS[mask]()) is not None else [])]
    agree(attention(*leaves), leaves, sdpa)


@pytest.mark.parametrize(
    "arguments", [{"is_causal": True}, {"scale": 0.5}, {"is_causal": True, "scale": 0.3}, {"scale": -0.3}], ids=str
)
@pytest.mark.parametrize("n", [M, N, 5])
def test_arguments(arguments, n):
    leaves = qkv(n=n)
    agree(attention(*leaves, **arguments), leaves, lambda q, k, v: sdpa(q, k, v, **arguments))


def test_order_of_arguments_is_that_of_sdpa():
    import inspect

    ours = list(inspect.signature(attention).parameters)
    assert ours[:8] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    q, k, v = (x.detach() for x in qkv())
    torch.testing.assert_close(attention(q, k, v, None, 0.0, True), sdpa(q, k, v, None, 0.0, True))


@pytest.mark.parametrize("hk", [1, 2])
def test_grouped_heads(hk):
    leaves = qkv(hk)
    agree(attention(*leaves, enable_gqa=True), leaves, lambda q, k, v: sdpa(q, k, v, enable_gqa=True))


SHAPES = {
    "2-D": ((M, D), (N, D), (N, 3)),
    "3-D": ((H, M, D), (H, N, D), (H, N, 3)),
    "5-D": ((3, B, H, M, D), (3, B, H, N, D), (3, B, H, N, D)),
    "heads broadcast": ((B, 1, M, D), (1, H, N, D), (1, 1, N, D)),
    "batch broadcast": ((B, H, M, D), (1, H, N, D), (1, H, N, D)),
    "missing dims": ((H, M, D), (B, H, N, D), (B, H, N, D)),
    "5-D broadcast": ((3, 1, H, M, D), (1, B, H, N, D), (B, H, N, D)),
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes(shapes):
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES[shapes]]
    agree(attention(*leaves), leaves, sdpa)


def test_mask_of_five_dims():
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES["5-D"]] + [added(3, 1, 1, M, N)]
    agree(attention(*leaves), leaves, sdpa)
    leaves[3] = added(B, 1, M, N)
    agree(attention(*leaves), leaves, sdpa)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    leaves = qkv(dtype=dtype)
    agree(attention(*leaves, is_causal=True), leaves, lambda q, k, v: sdpa(q, k, v, is_causal=True))


def test_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = attention(q, k, v, added(M, N)), sdpa(q, k, v)
    assert got.dtype == want.dtype == torch.bfloat16
    got.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.isfinite().all()


def test_a_query_without_keys_is_zero():
    """As in scaled_dot_product_attention; and a NaN that is not masked stays one."""
    leaves = qkv()
    for arguments in ({"attn_mask": torch.zeros(M, N, dtype=torch.bool)}, {"attn_mask": torch.full((M, N), -INF)},
                      {"keep": "n > n + 1"}, {"score": "where(n > N, s, -inf)"},
                      {"score": "scale * s + where(m > n + N, 0.0, -inf)"}):  # fmt: skip
        out = attention(*leaves, **arguments)
        assert out.count_nonzero() == 0, arguments
        assert all(g.count_nonzero() == 0 for g in torch.autograd.grad(out.sum(), leaves))
    q = torch.full((1, 1, 2, 4), math.nan)
    mask = torch.tensor([[True, True], [False, False]])
    out = attention(q, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), mask)
    assert out[..., 0, :].isnan().all() and not out[..., 1, :].count_nonzero()


def test_nan_in_a_mask_stays():
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    mask = torch.zeros(9, 9)
    mask[3, 5] = math.nan
    out = torchflash.attention(q, k, v, mask)
    assert torch.equal(out.isnan(), torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).isnan())


def test_no_keys():
    out, lse = attention(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4), return_lse=True)
    assert not out.count_nonzero() and (lse == -INF).all()


def test_dropout():
    q, k = torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 128, 8)
    weights = attention(q, k, torch.eye(128).expand(1, 2, 128, 128), None, 0.25) * 128
    dropped = (weights == 0).float().mean().item()
    assert abs(dropped - 0.25) < 4 * (0.25 * 0.75 / weights.numel()) ** 0.5
    torch.testing.assert_close(weights[weights != 0], torch.full_like(weights[weights != 0], 1 / 0.75))
    torch.manual_seed(1)
    first = attention(*qkv(), dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, attention(*qkv(), dropout_p=0.5))
    assert not attention(*qkv(), dropout_p=1.0).count_nonzero()


# -------------------------------------------------------------------------------------------------- scores as text


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    s = q @ k.mT / math.sqrt(D) + slopes[:, None, None] * (j - i)
    return s.masked_fill(j > i, -INF).softmax(-1) @ v


ALIBI = {
    "one text": {"score": "where(n <= m, scale * s + slopes[h] * (n - m), -inf)"},
    "keep": {"score": "scale * s + slopes[h] * (n - m)", "keep": "n <= m"},
    "is_causal": {"score": "d = n - m; scale * s + slopes[h] * d", "is_causal": True},
    "scale given": {"score": "x0 = s * scale; x0 + slopes[h] * (n - m)", "keep": "~(n > m)", "scale": D**-0.5},
}


@pytest.mark.parametrize("form", ALIBI)
def test_alibi(form):
    leaves = [*qkv(), torch.rand(H, requires_grad=True)]
    agree(attention(*leaves[:3], **ALIBI[form], tensors={"slopes": leaves[3]}), leaves, alibi)


def test_numbers_and_lengths():
    leaves = qkv()
    got = attention(*leaves, score="cap * tanh(scale * s / cap)", keep="(n - m <= N - M) & (m + N - M - n < window)",
                    tensors={"cap": 5.0, "window": 6})  # fmt: skip

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(M)[:, None] + N - M - torch.arange(N)
        s = 5 * torch.tanh(q @ k.mT / math.sqrt(D) / 5)
        return s.masked_fill((distance < 0) | (distance >= 6), -INF).softmax(-1) @ v

    agree(got, leaves, reference)


def test_several_tensors_of_every_kind():
    table, temperature = torch.randn(7, H, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    ids, flag = torch.randint(0, 2, (B, N)), torch.rand(B, H) < 0.5
    leaves = [*qkv(), table, temperature]
    got = attention(*leaves[:3], score="scale * s / temp + where(flag[b, h], table[minimum(abs(n - m), 6), h], 0.0)",
                    keep="ids[b, n] == ids[b, m] ", attn_mask=torch.ones(M, N, dtype=torch.bool),
                    tensors={"table": table, "temp": temperature, "ids": ids, "flag": flag},
                    )  # fmt: skip

    def reference(q: Tensor, k: Tensor, v: Tensor, table: Tensor, temperature: Tensor) -> Tensor:
        distance = (torch.arange(N) - torch.arange(M)[:, None]).abs().clamp(max=6)
        bias = torch.where(flag[:, :, None, None], table[distance].permute(2, 0, 1), 0.0)
        s = q @ k.mT / math.sqrt(D) / temperature + bias
        return s.masked_fill((ids[:, None] != ids[:, :M, None])[:, None], -INF).softmax(-1) @ v

    agree(got, leaves, reference)


def test_lse():
    q, k, v = (x.detach() for x in qkv())
    mask = keep(M, N)
    out, lse = attention(q, k, v, mask, return_lse=True)
    scores = (q.double() @ k.double().mT / math.sqrt(D)).masked_fill(~mask, -INF)
    assert lse.shape == (B, H, M) and lse.dtype == torch.float32 and lse[..., 3].isneginf().all()
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(out, attention(q, k, v, mask))
    _, dropped = attention(q, k, v, mask, dropout_p=1.0, return_lse=True)
    assert torch.equal(dropped, lse)
    q.requires_grad_()
    assert not attention(q, k, v, return_lse=True)[1].requires_grad
    assert attention(q[0, 0], k[0, 0], v[0, 0], return_lse=True)[1].shape == (M,)


def test_lengths_do_not_make_programs():
    """One program serves all lengths, so that one kernel does."""
    from torchflash.functional import _planned

    text = {"keep": "(n <= m + N - M) & (m - n < 9)"}
    attention(*qkv(), **text)
    before = _planned.cache_info().misses
    attention(*qkv(n=N + 5), **text)
    assert _planned.cache_info().misses == before


def test_the_post_program_is_only_where_a_row_may_be_empty():
    from torchflash.functional import _planned

    def post(keep: str, square: bool = False) -> str:
        return _planned(None, keep, 1.0, False, None, (), (), square).post

    assert post("n <= m") == "p" and post("(n <= m) | (n < 3)") == "p"
    assert post("(n <= m) & (m - n < 3)", square=True) == "p"
    for keep, square in (("(n <= m) & (m - n < 3)", False), ("n < m", True), ("n <= m - 1", True), ("n >= m", False)):
        assert post(keep, square).startswith("where("), keep


# -------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["torchflash", "inductor", "aot_eager"])
def test_compiled(name, dynamic):
    slopes = torch.rand(H, requires_grad=True)

    def model(q, k, v, slopes):
        x = attention(q, k, v, score="scale * s + slopes[h] * (n - m)", keep="n <= m", tensors={"slopes": slopes})
        return x.transpose(1, 2).flatten(2) * 2

    leaves = [*qkv(), slopes]
    compiled = torch.compile(model, backend=name, fullgraph=True, dynamic=dynamic)
    for a, b in zip(*(torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, model)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), model(*leaves))
    assert len(backend.report) == 0  # nothing to rewrite, nothing skipped


def test_compiled_with_a_mask_and_another_length():
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for n in (N, N + 3, N + 9):
        q, k, v = (x.detach() for x in qkv(n=n))
        mask = keep(B, 1, M, n)
        torch.testing.assert_close(compiled(q, k, v, mask), sdpa(q, k, v, mask), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- errors


SLOPES = {"slopes": torch.ones(H), "w": 3, "real": torch.ones(B, N, dtype=torch.bool)}
TEXTS = {
    "scale * s +": "score, line 1, column 12: invalid syntax: 'scale * s +'",
    "s +\n slope[h]": "line 1, column 4: invalid syntax",
    "scale * s + slope[h]": "score, line 1, column 13: unknown tensor 'slope'; known: real, slopes; "
    "pass it as tensors={'slope': …}",
    "s * gain": "unknown name 'gain'; known: M, N, b, h, inf, m, n, nan, real, s, scale, slopes, w; "
    "pass it as tensors={'gain': …}",
    "s + slopes[h, m]": "score, line 1, column 5: slopes has 1 dims and is indexed by 2",
    "s + slopes": "score, line 1, column 5: slopes has 1 dims and is not indexed",
    "s + p": "unknown name 'p'; known: M, N, b, h, inf, m, n, nan, real, s, scale, slopes, w",
    "soft(s)": "unknown function 'soft'; known: abs, bfloat16,",
    "maximum(s)": "maximum takes 2 arguments",
    "where(0 <= n <= m, s, 0.0)": "'0 <= n <= m': comparisons do not chain; write (a <= b) & (b <= c)",
    "where(n <= m & m - n < 5, s, 0.0)": "'n <= m & m - n < 5': & binds tighter than <=, ==, …; "
    "put comparisons in parentheses: (a <= b) & (c <= d)",
    "where(n <= m & real[b, n], s, 0.0)": "& binds tighter than <=, ==, …; put comparisons in parentheses",
    "where(n == m | real[b, n], s, 0.0)": "| binds tighter than <=, ==, …; put comparisons in parentheses",
    "where(n <= m & slopes[h], s, 0.0)": "a condition must be a bool, such as x != 0, not a number",
    "where(n < 3 and m < 3, s, 0.0)": "write & and |, with comparisons in parentheses",
    "s if n < m else 0.0": "write where(condition, x, y)",
    "where(not n < m, s, 0.0)": "write ~",
    "where(n & 1, s, 0.0)": "a condition must be a bool",
    "s + slopes[0.5 * h]": "tensors are indexed by integers; convert by int()",
    "x = s": "score must end with an expression: 'x = s'",
    "": "score must end with an expression: ''",
    "s.sum()": "'s.sum()' is not part of the score language",
    "s[h]": "unknown tensor 's'; known: real, slopes",
    "s + t0[h]": "unknown tensor 't0'; known: real, slopes",
    "s + z0": "unknown name 'z0'",
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_wrong_in_a_text(text):
    with pytest.raises(ScoreError) as caught:
        attention(*qkv(), score=text, tensors=SLOPES)
    message = str(caught.value)
    assert message.startswith("attention(): ") and TEXTS[text] in message and "\n" not in message.split(": '")[0]


def test_a_long_score():
    text = " + ".join(f"sin({i}.5 * s)" for i in range(200))
    with pytest.raises(ScoreError, match=r"the score has \d+ operations; at most 256"):
        attention(*qkv(), score=text)


q4, k4 = torch.zeros(B, H, M, D), torch.zeros(B, H, N, D)
CALLS = {
    "query no tensor": ((q4.numpy(), k4, k4), {}, TypeError, "query must be a torch.Tensor; got numpy.ndarray"),
    "key no tensor": ((q4, k4.tolist(), k4), {}, TypeError, "key must be a torch.Tensor; got builtins.list"),
    "value no tensor": ((q4, k4, None), {}, TypeError, "value must be a torch.Tensor; got builtins.NoneType"),
    "mask no tensor": ((q4, k4, k4, k4.numpy()), {}, TypeError, "attn_mask must be a torch.Tensor; got numpy.ndarray"),
    "dims": ((q4, torch.zeros(D), k4), {}, ValueError, "attention(): key needs at least the dims [length, dim]; got"),
    "last dim": ((q4[..., :4], k4, k4), {}, ValueError, "query and key must have one last dim, not 4 and 8; got query"),
    "length": ((q4, k4, k4[:, :, :5]), {}, ValueError, "key and value must have one length, not 31 and 5; got query"),
    "heads": ((q4, k4[:, :2], k4), {}, ValueError, "must be as many, or 1, not [4, 2, 4] (see enable_gqa); got query"),
    "grouped heads": ((q4, k4, k4[:, :3]), {"enable_gqa": True}, ValueError,
                      "the 3 heads of value must divide the 4 of query"),
    "batch": ((q4, k4.expand(2, B, H, N, D)[:, :1], torch.zeros(3, B, H, N, D)), {}, ValueError, "do not broadcast"),
    "dtype": ((q4, k4.half(), k4), {}, TypeError, "one dtype; got torch.float32, torch.float16, torch.float32"),
    "float64": ((q4, k4, k4.double()), {}, TypeError, "value must be float16, bfloat16 or float32; got torch.float64"),
    "mask shape": ((q4, k4, k4, torch.ones(M, 3, dtype=torch.bool)), {}, ValueError, "[24, 3] does not broadcast to"),
    "mask of one dim": ((q4, k4, k4, torch.ones(N)), {}, ValueError, "does not broadcast"),
    "mask dtype": ((q4, k4, k4, torch.ones(M, N).long()), {}, TypeError, "attn_mask must be bool, float16"),
    "mask and causal": ((q4, k4, k4, torch.ones(M, N)), {"is_causal": True}, ValueError, "keep='n <= m'"),
    "dropout": ((q4, k4, k4), {"dropout_p": 1.5}, ValueError, "between 0 and 1; got 1.5"),
    "keep of s": ((q4, k4, k4), {"keep": "s > 0"}, ScoreError, "keep must be a condition that does not depend on s"),
    "loose keep": ((q4, k4, k4), {"keep": "n <= m & m - n < 5"}, ScoreError, "keep, line 1, column 1: 'n <= m & m - n"),
    "loose bool": ((q4, k4, k4), {"keep": "n <= m & f[h]", "tensors": {"f": torch.ones(H).bool()}}, ScoreError,
                   "& binds tighter than <=, ==, …; put comparisons in parentheses: (a <= b) & (c <= d)"),
    "float in keep": ((q4, k4, k4), {"keep": "(n <= m) & f[h]", "tensors": {"f": torch.ones(H)}}, ScoreError,
                      "a condition must be a bool, such as x != 0, not a number: '(n <= m) & f[h]'"),
    "no tensors": ((q4, k4, k4), {"score": "s * f[h]"}, ScoreError, "unknown tensor 'f'; pass it as tensors={'f': …}"),
    "unused": ((q4, k4, k4), {"keep": "n <= m", "tensors": {"f": q4, "x": 3}}, ValueError,
               "tensors has 'f', 'x', which neither score nor keep names; leave it out"),
    "unused alone": ((q4, k4, k4), {"tensors": {"attn_mask": q4}}, ValueError, "tensors has 'attn_mask', which"),
    "two masks": ((q4, k4, k4, torch.ones(M, N)), {"tensors": {"attn_mask": q4}}, ScoreError, "choose another name"),
    "keep no bool": ((q4, k4, k4), {"keep": "n - m"}, ScoreError, "keep must be a condition"),
    "name taken": ((q4, k4, k4), {"tensors": {"n": 3}}, ScoreError, "'n' cannot name a tensor or number"),
    "no name": ((q4, k4, k4), {"tensors": {"a b": 3}}, ScoreError, "'a b' cannot name a tensor or number"),
    "neither": ((q4, k4, k4), {"tensors": {"a": "3"}}, TypeError, "'a' must be a tensor or a Python number; got str"),
    "no text": ((q4, k4, k4), {"score": 3}, TypeError, "score must be a text in the score language; got int"),
    "complex": ((q4, k4, k4), {"tensors": {"a": torch.ones(2, dtype=torch.cfloat)}}, TypeError, "'a' is complex"),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_is_wrong_in_a_call(case):
    args, kwargs, error, message = CALLS[case]
    with pytest.raises(error) as caught:
        attention(*args, **kwargs)
    assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_second_derivative_raises():
    q, k, v = qkv()
    (g,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative; to have one, write this attention in plain torch"):
        g.sum().backward()


def test_it_is_public():
    assert "attention" in torchflash.__all__ and torchflash.attention is attention
