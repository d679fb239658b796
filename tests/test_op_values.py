"""The op on CPU (blockwise torch) against the oracle: every program, dtype, shape and stride; values and every
gradient."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BF16, CASES, F16, F32, Case, build
from oracle import INF, Inputs, check, run_op

from torchflash.kernels import reference

pytestmark = pytest.mark.usefixtures("poisoned")
IDS = [c.name for c in CASES]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that divide every axis, instead of one that holds everything."""
    monkeypatch.setattr(reference, "BLOCK_M", 16)
    monkeypatch.setattr(reference, "BLOCK_N", 16)
    monkeypatch.setattr(reference, "TILE_ELEMENTS", 2 * 16 * 16)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_programs(case: Case, dtype: torch.dtype):
    check(build(case, dtype), slack=case.slack)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_programs_in_many_tiles(case: Case, small_tiles):
    check(build(case), slack=case.slack)


def test_value_dtype_may_differ():
    check(build(CASES[1], BF16, v_dtype=F32))
    check(build(CASES[1], F32, v_dtype=F16))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 1),
        (1, 1, 1, 40, 8, 8),
        (2, 3, 40, 1, 8, 5),
        (1, 2, 33, 17, 3, 20),
        (70, 1, 4, 4, 4, 4),
        (1, 2, 20, 20, 300, 270),
    ],
    ids=str,
)
def test_shapes(shape):
    B, H, M, N, D, DV = shape
    torch.manual_seed(0)
    check(Inputs(torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, DV), score="0.3 * s"))


@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
def test_strides(layout):
    torch.manual_seed(0)
    q = torch.randn(2, 20, 4, 8).transpose(1, 2)
    k = torch.randn(2, 4, 8, 33).transpose(2, 3)
    v = torch.randn(2, 4, 66, 16)[:, :, ::2, ::2]
    captures = [torch.randn(33, 20).t(), torch.randn(4, 1).expand(4, 33)]
    x = Inputs(q, k, v, captures, score="0.3 * s + t0[m, n] + t1[h, n]", layout=layout)
    x.captures = [c.detach() for c in captures]
    check(x)
    for do in (
        torch.ones(()).expand(2, 4, 20, 8),
        torch.randn(2, 20, 4, 8).transpose(1, 2),
        torch.randn(2, 4, 20, 16)[..., ::2],
    ):
        check(x, do=do)


def test_keys_and_values_broadcast_by_stride_0():
    torch.manual_seed(0)
    check(
        Inputs(
            torch.randn(2, 4, 9, 8),
            torch.randn(2, 1, 9, 8).expand(2, 4, 9, 8),
            torch.randn(1, 4, 9, 8).expand(2, 4, 9, 8),
        )
    )


def test_large_scores():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    check(Inputs(q * 2, k * 2, v, score="s"))
    x = Inputs(torch.full((1, 1, 40, 16), 1e3), torch.full((1, 1, 40, 16), 1e3), v[:, :1], score="s")
    assert torch.allclose(run_op(x), v[:, :1].mean(2, keepdim=True).expand(1, 1, 40, 16), atol=1e-6)


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_bad_score_spoils_its_row_only(bad):
    torch.manual_seed(0)
    bias = torch.zeros(20, 24)
    bias[3, 5] = bad
    q, k, v = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)
    x = Inputs(q, k, v, [bias], score="0.3 * s + t0[m, n]", keep="n < 30")
    out = run_op(x)
    assert out[:, :, 3].isnan().all() and not out[:, :, [0, 1, 2, *range(4, 20)]].isnan().any()
    x.post = "nan_to_num(p)"
    assert (run_op(x)[:, :, 3] == 0).all()
