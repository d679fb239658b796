"""The kernels on a GPU: every program against the oracle, sizes that need 64-bit offsets and long grids, devices,
determinism. Most of the time is compilation: -n 8 helps."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BF16, CASES, F16, F32, Case, build
from few_queries import WAYS as FEW
from few_queries import few
from mathematics import check_bfloat16, check_differences
from oracle import INF, Inputs, check, run_op
from test_even_rows import WAYS, left_padded, masked
from tile_maps import MASKS, check_attention, check_map, inputs

from torchflash.kernels import op, philox, reference, replay

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
BY_NAME = {c.name: c for c in CASES}
CAUSAL = {"score": "where(n <= m, 0.25 * s, -inf)", "keep": "n <= m"}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch, poisoned):
    """The blockwise torch implementation must not step in."""

    def step_in(*args, **kwargs):
        raise AssertionError("fell back to blockwise torch")

    monkeypatch.setattr(reference, "forward", step_in)
    monkeypatch.setattr(reference, "backward", step_in)


@pytest.fixture
def precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_programs(case: Case):
    check(build(case, BF16, device="cuda"), slack=2 * case.slack)


@pytest.mark.parametrize("name", MASKS)
def test_tile_maps(name: str):
    as_good_as_can_be = name not in ("causal_padding", "integers", "heads", "small_blocks")
    for N in (210, 512, 513):
        check_map(inputs(name, 150, N, device="cuda"), as_good_as_can_be)
    check_map(inputs(name, 2, 700, device="cuda"), as_good_as_can_be=False)
    check_attention(inputs(name, 300, 400, 64, BF16, "cuda"), slack=2)
    check_attention(inputs(name, 1, 1000, 128, BF16, "cuda"), slack=2)


FLOAT32 = ["causal", "window_finfo", "nan_to_num", "alibi", "functions", "bias", "relative_bias", "dropout_gate_bias"]


@pytest.mark.parametrize("name", [*FLOAT32, "floors", "buckets", "grouped_apart"])
def test_programs_in_float32(name: str):
    check(build(BY_NAME[name], F32, device="cuda"), slack=2 * BY_NAME[name].slack)


def qkv(B, H, M, N, D, DV=None, heads=None, dtype=BF16):
    torch.manual_seed(0)
    shapes = (B, H, M, D), (B, heads or H, N, D), (B, heads or H, N, DV or D)
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


@pytest.mark.parametrize("name", ["causal", "bias", "dropout", "grouped"])
def test_fp16(name):
    check(build(BY_NAME[name], F16, device="cuda"), slack=2 * BY_NAME[name].slack)


def test_mathematics():
    check_differences("cuda")
    check_bfloat16("cuda")


@pytest.mark.parametrize("D", [1, 3, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512])
def test_head_dimensions(D):
    DV = {40: 24, 192: 128}.get(D, D)
    q, k, v = qkv(2, 4, 300, 333, D, DV, heads=2)
    check(Inputs(q, k, v, score=f"where(n <= m + 33, {D**-0.5} * s, -inf)", keep="n <= m + 33"), slack=2.0)


@pytest.mark.parametrize("D", [64, 128, 256, 300])
def test_head_dimensions_in_float32(D):
    q, k, v = qkv(1, 2, 150, 130, D, dtype=F32)
    check(Inputs(q, k, v, score=f"{D**-0.5} * s"), slack=4.0)


def test_tf32_follows_the_setting(precision):
    x = Inputs(*qkv(1, 2, 300, 300, 64, dtype=F32), score="0.125 * s")
    exact = run_op(Inputs(x.q.double().float(), x.k, x.v, score=x.score))
    precision("high")
    rough = run_op(x)
    precision("highest")
    fine = run_op(x)
    assert torch.equal(fine, exact)
    assert 1e-5 < (rough - fine).abs().max().item() < 1e-2


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 40), (300, 300)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("way", WAYS)
def test_even_rows(way, dtype, dims):
    """Rows of padding, of which there are none in the second batch; the third has no key at all."""
    x = masked(WAYS[way], left_padded(330, 350, (211, 0, 350)), dtype, *dims, H=4, heads=(2, 2))
    x.q, x.k, x.v = (t.cuda() for t in (x.q, x.k, x.v))
    x.captures = [t.cuda() for t in x.captures]
    check(x, slack=2.0)


@pytest.mark.parametrize("shape", [(1, 128, 1), (3, 64, 2), (1, 80, 4), (16, 64, 1)], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_few_queries(name, shape):
    for _ in range(3):  # compiled, recorded, replayed
        check(few(FEW[name], *shape, BF16, "cuda"), slack=4.0)


@pytest.mark.parametrize("name", ["plain", "filled", "added_empty", "softcap"])
def test_few_queries_in_float32(name):
    check(few(FEW[name], 1, 64, 1, F32, "cuda"), slack=4.0)


AGAIN = ["causal", "documents", "dropout", "grouped"]


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("name", AGAIN)
def test_kernels_are_started_again(name, watched, monkeypatch):
    """With other tensors of the same shapes, at addresses known and unknown: first compiled, then recorded, then
    replayed, or by Triton where launches are watched. A backward that sums gradients of captured tensors is not."""
    from torchflash.kernels import operands

    seen, held, replayed = [], [], []
    chain = triton.knobs.runtime.launch_enter_hook
    watch = seen.append
    run = replay.Replay.run
    monkeypatch.setattr(replay.Replay, "run", lambda *args: replayed.append(run(*args)) or replayed[-1])
    for known in (op._known, operands._setups):  # of other tests
        known.clear()
    try:
        for i in range(5):
            x = build(BY_NAME[name], BF16, device="cuda")
            for t in (x.q, x.k, x.v):
                t.copy_(torch.randn_like(t))
            if i == 3 and watched:
                chain.add(watch)
            check(x, slack=2 * BY_NAME[name].slack)
            held += [x] if i % 2 else []  # so that some addresses change
    finally:
        chain.remove(watch)
    replays = 1 if x.captures and len(x.leaves()) > 3 else 2
    assert bool(seen) == watched and replayed == [True] * replays + [not watched] * 2 * replays


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129, 192, 320, 1025])
def test_lengths(length):
    q, k, v = qkv(1, 2, length, length, 64)
    slopes = torch.tensor([0.5, 0.1], device="cuda").to(BF16)
    score, keep = "where(n <= m, 0.125 * s + t0[h] * float(n - m), -inf)", "n <= m"
    check(Inputs(q, k, v, [slopes], score=score, keep=keep), slack=4.0)


def test_far_below_zero():
    q, k, v = qkv(1, 1, 192, 192, 64)
    x = Inputs(torch.full_like(q, 1.0), torch.full_like(k, -1.9), v, score="s")  # every score is near -120
    check(x, slack=2.0)


def test_strides():
    torch.manual_seed(0)
    q = torch.randn(2, 70, 4, 64, device="cuda").transpose(1, 2)
    k = torch.randn(2, 4, 64, 90, device="cuda").mT
    v = torch.randn(2, 4, 180, 128, device="cuda")[:, :, ::2, ::2]
    x = Inputs(q, k, v, [torch.randn(90, 70, device="cuda").t()], score="0.125 * s + t0[m, n]", layout="bmhd")
    for do in (
        None,
        torch.ones((), device="cuda").expand(2, 4, 70, 64),
        torch.randn(2, 4, 70, 128, device="cuda")[..., ::2],
    ):
        check(x, do=do, slack=4.0)


@pytest.mark.parametrize("B,H", [(70000, 1), (1, 70000)])
def test_more_than_65535_heads(B, H):
    q, k, v = qkv(B, H, 4, 4, 16)
    out = run_op(Inputs(q, k, v, **CAUSAL))
    s = (0.25 * (q.float() @ k.float().mT)).masked_fill(torch.ones(4, 4, device="cuda").triu(1).bool(), -INF)
    torch.testing.assert_close(out.float(), s.softmax(-1) @ v.float(), atol=3e-2, rtol=3e-2)


def test_offsets_beyond_32_bits():
    """A mask and operands whose last elements lie more than 2**31 elements in."""
    S, rows = 4, 2**16 + 8
    store = torch.zeros(rows, 2**15 + 64, device="cuda", dtype=torch.float16)
    q, k, v = (torch.randn(1, 1, S, 16, device="cuda").half() for _ in range(3))
    far = store[-S:, -S:]
    far.copy_(torch.randn(S, S))
    bias = store.requires_grad_(False)
    x = Inputs(q, k, v, [bias], [rows - S, store.shape[1] - S], score="0.25 * s + t0[m + z0, n + z1]")
    near = Inputs(q, k, v, [far.clone()], score="0.25 * s + t0[m, n]")
    assert torch.equal(run_op(x), run_op(near))
    strided = torch.zeros(S, 2**29 + 16, device="cuda", dtype=torch.float16)[:, :16][None, None]
    strided.copy_(q)
    assert torch.equal(run_op(Inputs(strided, k, v)), run_op(Inputs(q, k, v)))


def test_dropout_is_that_of_the_torch_implementation():
    B, H, M, N, p = 2, 3, 200, 128, 0.25
    seed = torch.tensor([2**40 + 3], device="cuda")
    q, k = torch.zeros(B, H, M, 64, device="cuda"), torch.zeros(B, H, N, 64, device="cuda")
    x = Inputs(q, k, torch.eye(N, device="cuda").expand(B, H, N, N), score="0.0 * s", dropout_p=p, seed=seed)
    row = torch.arange(B * H * M, device="cuda").view(B, H, M, 1)
    torch.testing.assert_close(run_op(x) * N, philox.scale(p, seed, row, torch.arange(N, device="cuda")))


def test_gradients_are_the_same_bits_every_time():
    x = build(BY_NAME["dropout_gate_bias"], BF16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(5):
            for leaf in x.leaves():
                leaf.requires_grad_()
            runs.append(torch.autograd.grad(run_op(x).float().square().sum(), x.leaves()))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_memory_does_not_grow_with_the_square_of_the_length():
    S = 16384
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, S, S, 64))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_op(Inputs(q, k, v, score="where(n <= m, 0.125 * s, -inf)", keep="n <= m")).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 10 * q.nbytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_not_the_current_one():
    q, k, v = (x.to("cuda:1") for x in qkv(1, 2, 100, 100, 64, dtype=F32))
    assert torch.cuda.current_device() == 0
    check(Inputs(q, k, v, **CAUSAL), slack=4.0)


def test_a_cpu_scalar_may_be_captured():
    q, k, v = qkv(1, 2, 50, 50, 64, dtype=F32)
    scale = torch.tensor(0.1, requires_grad=True)
    out = run_op(Inputs(q, k, v, [scale], score="t0[()] * s"))
    torch.testing.assert_close(out, (0.1 * (q @ k.mT)).softmax(-1) @ v, atol=1e-4, rtol=1e-4)
    out.sum().backward()
    assert scale.grad is not None and scale.grad.device.type == "cpu"


def test_compiled_training():
    def step(q, k, v, t):
        out, _ = torch.ops.torchflash.attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), [t], [],
            "where(n <= m, 0.125 * s + t0[h, n - m + 127], -inf)", "n <= m", -INF, "p", 0.0, None, "bmhd",
            "", None, "", [],
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2).sin().sum()

    torch.manual_seed(0)
    xs = [torch.randn(2, 128, 4, 64, device="cuda", requires_grad=True) for _ in range(3)]
    xs.append(torch.randn(4, 128, device="cuda", requires_grad=True))
    got = torch.autograd.grad(torch.compile(step)(*xs), xs)
    for a, b in zip(got, torch.autograd.grad(step(*xs), xs), strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
