"""Calls of scaled_dot_product_attention: which become ours, what they give, and that the others stay calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from torchflash import Options, rewrite
from torchflash.backend import torchflash

INF = float("inf")


def operands(*, q=(2, 4, 40, 16), k=(2, 4, 48, 16), dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in (q, k, k)]


def kept(*shape):
    """A mask with queries that keep nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 3, :] = False
    return mask


def added(*shape):
    return torch.where(kept(*shape), torch.randn(shape), -INF)


def compiled(function, dynamic=None, **options):
    torch._dynamo.reset()
    settings = {"torchflash.inner": "aot_eager", "torchflash.sdpa": "all", **options}
    return torch.compile(function, backend="torchflash", options=settings, dynamic=dynamic)


def counts():
    return torchflash.report.counts()


def check(function, leaves, *rest, rewritten=1, plain=None, **options):
    """Values and gradients are those of torch's math kernel, which gives 0 for a query without keys; `plain` is the
    function without what would recompute them by another one."""
    run = compiled(function, **options)
    out = run(*leaves, *rest)
    with sdpa_kernel(SDPBackend.MATH):
        exact = (plain or function)(*leaves, *rest)
    assert counts().get("rewritten", 0) == rewritten, torchflash.report
    assert out.dtype == exact.dtype and out.shape == exact.shape
    do = torch.randn_like(exact)
    torch.testing.assert_close(out, exact, atol=2e-5, rtol=2e-5)
    for a, b in zip(torch.autograd.grad(out, leaves, do), torch.autograd.grad(exact, leaves, do), strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=5e-5)


MASKS = {
    "bool": kept(2, 4, 40, 48), "shared": kept(40, 48), "padding": kept(2, 1, 1, 48, 48)[:, :, 0, 4:5],
    "no key at all": torch.zeros(2, 1, 1, 48, dtype=torch.bool), "added": added(2, 1, 40, 48),
    "lowest": torch.zeros(2, 1, 40, 48).masked_fill(~kept(2, 1, 40, 48), torch.finfo(torch.float32).min),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check(F.scaled_dot_product_attention, operands(), MASKS[name])


def test_arguments():
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), operands())
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), operands())
    check(
        lambda q, k, v, m: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m, enable_gqa=True),
        operands(k=(2, 2, 48, 16)),
        kept(2, 1, 40, 48),
    )
    check(F.scaled_dot_product_attention, operands(q=(4, 40, 16), k=(4, 48, 16)), kept(4, 40, 48))


def heads_last(x):
    """The same tensor, as it comes from a projection: [B, T, H, D] with heads and positions swapped."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def first_query_last(x):
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


@pytest.mark.parametrize("lie", [heads_last, first_query_last, lambda x: x], ids=["bthd", "tbhd", "bhtd"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mask", [None, "bool", "added"])
def test_the_result_lies_in_memory_as_that_of_the_call(lie, mask, dynamic):
    """A view of it needs no copy, and as_strided finds the same."""

    def function(q, k, v, mask):
        q, k, v = lie(q), lie(k), lie(v)
        o = F.scaled_dot_product_attention(q, k, v, mask)
        step = o.as_strided((2, 3), (o.stride(0), o.stride(1)))
        return o, step, o.transpose(1, 2).view(2, 40, 64) if lie is heads_last else o

    leaves, mask = operands(), None if mask is None else MASKS[mask]
    torch._dynamo.reset()
    options = {"torchflash.inner": "aot_eager", "torchflash.sdpa": "all"}
    found = torch.compile(function, backend="torchflash", options=options, dynamic=dynamic)(*leaves, mask)
    traced = torch.compile(function, backend="aot_eager", dynamic=dynamic)(*leaves, mask)
    assert counts() == {"rewritten": 1}
    for a, b in zip(found, traced, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, check_stride=True)


def test_a_bias_gets_its_gradient():
    q, k, v = operands()
    bias = torch.randn(4, 40, 48, requires_grad=True)
    check(F.scaled_dot_product_attention, [q, k, v, bias])


def test_half_precision():
    q, k, v = operands(dtype=torch.bfloat16)
    mask = kept(2, 1, 40, 48)
    out = compiled(F.scaled_dot_product_attention)(q, k, v, mask)
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    assert counts()["rewritten"] == 1 and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


def under_autocast(q, k, v, mask):
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outside", [False, True])
def test_autocast_rounds_the_mask_too(outside, dtype):
    """To -inf, where it is the lowest float32: a query without keys then gives 0."""
    args = *operands(dtype=dtype), MASKS["lowest"]
    function = F.scaled_dot_product_attention if outside else under_autocast
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        out, exact = compiled(function)(*args), function(*args)
    assert counts() == {"rewritten": 1} and out.dtype == torch.bfloat16
    assert not out[..., 3, :].count_nonzero()
    torch.testing.assert_close(out, exact, atol=2e-2, rtol=2e-2)


def test_autocast_around_a_nested_graph():
    """There the graph of the call does not say whether its mask is rounded."""

    def checkpointed(q, k, v, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(F.scaled_dot_product_attention, q, k, v, mask, use_reentrant=False)

    args = operands(dtype=torch.bfloat16)
    for mask, code in ((MASKS["lowest"], "skipped.sdpa"), (MASKS["bool"], "rewritten")):
        out = compiled(checkpointed)(*args, mask)
        assert counts() == {code: 1}
        torch.testing.assert_close(out, checkpointed(*args, mask), atol=2e-2, rtol=2e-2)


def test_autocast_in_an_exported_graph():
    class Model(nn.Module):
        def forward(self, *args):
            return F.scaled_dot_product_attention(*args) + under_autocast(*args)

    args = *operands(dtype=torch.bfloat16), MASKS["lowest"]
    gm, report = rewrite(torch.export.export(Model(), args).module(), Options(sdpa="all"))
    assert report.counts() == {"rewritten": 1, "skipped.sdpa": 1}
    torch.testing.assert_close(gm(*args), Model()(*args), atol=2e-2, rtol=2e-2)


def test_dropout_keeps_what_it_says():
    q, k, _ = operands()
    v = torch.eye(48).expand(2, 4, 48, 48)
    out = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25))(q, k, v)
    weights = F.scaled_dot_product_attention(q, k, v)
    kept = out != 0
    torch.testing.assert_close(out[kept], weights[kept] / 0.75)
    assert counts()["rewritten"] == 1 and abs(kept.float().mean() - 0.75) < 0.03


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, mask=None, p=0.0):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, mask, p).transpose(1, 2).flatten(2)


def calls_left(function, *args, **options):
    """How many calls the graph holds that goes to what compiles the rest."""
    found = []
    inner = torch._dynamo.lookup_backend("eager")

    def look(gm, inputs):
        found.extend(n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
        found.extend(n for n in gm.graph.nodes if "softmax" in str(n.target))
        return inner(gm, inputs)

    torch._dynamo.reset()
    from torchflash import backend
    from torchflash.options import Options

    def through(gm, inputs):
        backend.rewrite_and_report(gm, Options(**options), 0)
        return look(gm, inputs)

    out = torch.compile(function, backend=through)(*args)
    assert torch.equal(out, function(*args))
    return [str(n.target) for n in found]


@pytest.mark.parametrize(
    ("options", "mask"), [({}, None), ({}, kept(40, 40)), ({"sdpa": "none"}, kept(40, 40))], ids=["", "cpu", "none"]
)
def test_other_calls_stay(options, mask):
    (left,) = calls_left(Layer().eval(), torch.randn(2, 40, 32), mask, **options)
    assert "scaled_dot_product_attention" in left


def test_a_call_that_is_no_attention_for_us_is_closed_again():
    """float64 is none: the graph is as it was."""
    layer, x = Layer().double(), torch.randn(2, 40, 32, dtype=torch.float64)
    (left,) = calls_left(layer, x, kept(40, 40), sdpa="all")
    assert "scaled_dot_product_attention" in left


def test_the_report_says_why():
    run = compiled(Layer(), **{"torchflash.sdpa": "masked", "torchflash.strict": True})
    run(torch.randn(2, 40, 32))
    (record,) = torchflash.report
    assert record.code == "sdpa" and "no mask tensor" in record.reason and "test_sdpa.py" in record.source
    run = compiled(Layer().double())
    run(torch.randn(2, 40, 32, dtype=torch.float64), kept(40, 40))
    (record,) = torchflash.report
    assert record.code == "sdpa" and record.reason.startswith("dtype")


def test_a_call_that_nothing_uses_stays():
    q, k, v = operands()
    (left,) = calls_left(lambda q, k, v: (F.scaled_dot_product_attention(q, k, v), q + 1)[1], q, k, v, sdpa="all")
    assert "scaled_dot_product_attention" in left


def test_a_mask_beside_is_causal_is_left_to_torch():
    """Documented as an error; some of torch's kernels apply both."""
    q, k, v = operands()
    mask = kept(40, 48)
    both = compiled(lambda *args: F.scaled_dot_product_attention(*args, is_causal=True))(q, k, v, mask)
    assert counts() == {"skipped.sdpa": 1}
    exact = F.scaled_dot_product_attention(q, k, v, mask & torch.ones(40, 48, dtype=torch.bool).tril())
    torch.testing.assert_close(both, exact, atol=2e-5, rtol=2e-5)


def test_the_depth_may_be_dynamic():
    run = compiled(F.scaled_dot_product_attention)
    for depth in (16, 24, 8):
        args = operands(q=(2, 4, 40, depth), k=(2, 4, 48, depth))
        for x in args:
            torch._dynamo.mark_dynamic(x, 3)
        torch.testing.assert_close(run(*args), F.scaled_dot_product_attention(*args), atol=2e-5, rtol=2e-5)
    assert counts() == {"rewritten": 1}


def test_masks_made_in_the_graph_are_read():
    """Also in half precision nothing is computed beside the operator, and rows without keys cost no tiles."""

    def run(q, k, v, mask):
        added = torch.zeros(mask.shape).masked_fill(~mask, -INF).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, added)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        compiled(run)(*operands(dtype=dtype), kept(40, 48))
        (record,) = torchflash.report
        assert record.keep == "t0[m, n]" and record.post == "where(t0[m, n], p, 0.0)"


def test_several_calls_in_one_graph():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(), Layer()

        def forward(self, x, mask):
            return self.b(self.a(x, mask) + x, mask)

    x = torch.randn(2, 40, 32, requires_grad=True)
    check(Two(), [x], kept(2, 1, 40, 40), rewritten=2)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("kind", ["attention", "encoder", "decoder"])
def test_modules_of_torch(kind, checkpoints):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    encoder = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
    run = {
        "attention": lambda x, y: attention(x, y, y, need_weights=False)[0],
        "encoder": lambda x, y: encoder(torch.cat([x, y], 1)),
        "decoder": decoder,
    }[kind]
    inside = (lambda *inputs: checkpoint(run, *inputs, use_reentrant=False)) if checkpoints else run
    leaves = [torch.randn(2, n, 16, requires_grad=True) for n in (13, 7)]
    check(inside, leaves, rewritten=2 if kind == "decoder" else 1, plain=run)


PADDED = torch.arange(40) > torch.tensor([[31], [20]])
ENCODERS = {
    "no mask": {}, "padding": {"src_key_padding_mask": PADDED}, "mask": {"src_mask": ~kept(40, 40)},
    "added": {"src_mask": added(40, 40).nan_to_num(neginf=0.0)},
    "both": {"src_mask": torch.ones(40, 40).triu(1) > 0, "src_key_padding_mask": PADDED},
    "no key at all": {"src_key_padding_mask": PADDED | torch.tensor([[True], [False]])},
}  # fmt: skip


@pytest.mark.parametrize(("activation", "norm_first", "dynamic"), [("relu", False, False), ("gelu", True, True)])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoder_layers_in_inference(name, activation, norm_first, dynamic):
    """torch runs these by one operator, by which what a mask adds, too, leaves out all that is not 0."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, activation=activation, norm_first=norm_first, batch_first=True).eval()
    x = torch.randn(2, 40, 16)
    exact = layer(x, **ENCODERS[name])
    out = compiled(layer, dynamic=dynamic)(x, **ENCODERS[name])
    torch.testing.assert_close(out, exact, atol=2e-5, rtol=2e-5, equal_nan=True)
    assert counts() == {"rewritten": 1}


@torch.no_grad()
def test_encoder_layers_without_a_mask_are_in_the_report():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 40, 16)
    torch.testing.assert_close(compiled(layer, **{"torchflash.sdpa": "masked"})(x), layer(x), atol=2e-5, rtol=2e-5)
    assert counts() == {"skipped.sdpa": 1}


def test_a_mask_written_afterwards():
    def write(q, k, v, mask):
        out = F.scaled_dot_product_attention(q, k, v, mask)
        mask.fill_(False)
        return out

    q, k, v = operands()
    mask = kept(2, 1, 40, 48)
    exact = F.scaled_dot_product_attention(q, k, v, mask)
    given = mask.clone()
    torch.testing.assert_close(compiled(write)(q, k, v, given), exact)
    assert not given.any()


@pytest.mark.parametrize("which", ["tensor", 3])
def test_an_unknown_kind_is_an_error(which):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"torchflash\.sdpa"):
        compiled(F.scaled_dot_product_attention, **{"torchflash.sdpa": which})(*operands())


def exact(q, k, v, mask, do):
    """In float64, a query without keys giving 0."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    scores = q @ k.mT / q.shape[-1] ** 0.5
    keep = (mask if mask.dtype == torch.bool else mask > -INF).expand(scores.shape)
    scores = scores.masked_fill(~keep, -INF) if mask.dtype == torch.bool else scores + mask.double()
    some = keep.any(-1, keepdim=True)
    p = torch.where(some, scores, 0.0).softmax(-1) * some
    out = p @ v
    return out, *torch.autograd.grad(out, leaves, do.double())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bool", "float", "padding", "causal and padding"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masks_on_cuda(dtype, dim, kind):
    """By default, several times over: compiled, recorded, replayed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 300, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    if kind in ("bool", "float"):
        mask = kept(2, 1, 300, 300).cuda()
        mask[1, 0, 10:200] = False
        mask = mask if kind == "bool" else torch.where(mask, torch.randn(mask.shape, device="cuda"), -INF).to(dtype)
    else:
        mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
        mask[1, ..., :170] = False
        mask = mask if kind == "padding" else mask & torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    do = torch.randn_like(q)
    run = compiled(F.scaled_dot_product_attention, **{"torchflash.sdpa": "masked"})
    for _ in range(3):
        out = run(q, k, v, mask)
        got = (out, *torch.autograd.grad(out, (q, k, v), do))
    assert counts()["rewritten"] == 1, torchflash.report
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for a, b in zip(got, exact(q, k, v, mask, do), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < limit
