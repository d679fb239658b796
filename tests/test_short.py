"""Short sequences: the unfused way computes what the fused one does, either may follow the other in a backward, and
which one is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import BF16, CASES, F16, F32, Case, build
from oracle import INF, Inputs, check, run_op
from torch import Tensor

from torchflash.kernels import unfused
from torchflash.kernels.tuning import Tuning

UNFUSED, FUSED = "min_seqlen=1000000", "min_seqlen=0"
IDS = [c.name for c in CASES]
OP, BACKWARD = torch.ops.torchflash.attention, torch.ops.torchflash.attention_backward


@pytest.mark.usefixtures("poisoned")
class TestValues:
    @pytest.mark.parametrize("case", CASES, ids=IDS)
    @pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
    def test_programs(self, case: Case, dtype: torch.dtype):
        check(replace(build(case, dtype), tuning=UNFUSED), slack=case.slack)

    @pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, F16)], ids=str)
    def test_value_dtype_may_differ(self, dtypes):
        check(replace(build(CASES[1], dtypes[0], v_dtype=dtypes[1]), tuning=UNFUSED), slack=2.0)

    @pytest.mark.parametrize(
        "shape", [(1, 1, 1, 1, 1, 1), (1, 1, 1, 40, 8, 8), (2, 3, 40, 1, 8, 5), (1, 2, 33, 17, 3, 20)], ids=str
    )
    def test_shapes(self, shape):
        B, H, M, N, D, DV = shape
        torch.manual_seed(0)
        q, k, v = torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, DV)
        check(Inputs(q, k, v, score="0.3 * s", tuning=UNFUSED))

    @pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
    def test_strides(self, layout):
        torch.manual_seed(0)
        q = torch.randn(2, 20, 4, 8).transpose(1, 2)  # heads inside
        k = torch.randn(8, 33, 2, 2).permute(3, 2, 1, 0)  # every axis reversed, grouped heads
        v = torch.randn(1, 2, 33, 10).expand(2, -1, -1, -1)
        check(Inputs(q, k, v, score="0.3 * s + 0.01 * float(n)", layout=layout, tuning=UNFUSED))

    def test_scores_that_overflow_and_nan(self):
        torch.manual_seed(0)
        q, k, v = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
        k[0, 0, 3] = float("nan")
        k[0, 1, 4] = INF
        x = Inputs(q, k, v, score="0.3 * s", tuning=UNFUSED)
        torch.testing.assert_close(run_op(x), run_op(replace(x, tuning=FUSED)), equal_nan=True)


def forward_and_backward(x: Inputs, forward: str, backward: str) -> list[Tensor]:
    """out and all gradients, each half of the op with a tuning of its own."""
    torch.manual_seed(1)
    rest = (x.score, x.keep, x.fill, x.post, x.dropout_p, x.seed)
    out, lse = OP(x.q, x.k, x.v, x.captures, x.sizes, *rest, x.layout, forward)
    do = torch.randn(out.shape).to(out.dtype)
    need = [c.is_floating_point() for c in x.captures]
    dq, dk, dv, rest = BACKWARD(do, x.q, x.k, x.v, out, lse, x.captures, x.sizes, need, *rest, backward)
    return [out, lse, dq, dk, dv, *rest]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_either_way_may_follow_the_other(case: Case):
    """Also the row statistics and the dropout mask are the same."""
    x = build(case)
    expected = forward_and_backward(x, FUSED, FUSED)
    for ways in ((UNFUSED, FUSED), (FUSED, UNFUSED), (UNFUSED, UNFUSED)):
        torch.testing.assert_close(forward_and_backward(x, *ways), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


class TestChoice:
    SHAPE = (2, 4, 100, 200)
    CPU = torch.device("cpu")

    @pytest.fixture
    def measured(self, monkeypatch):
        monkeypatch.setitem(unfused.MEASURED, "cpu", {4: unfused.Limits(256, 200_000), 2: unfused.FUSED})
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def faster(self, shape=SHAPE, itemsize=4, **tuning):
        return unfused.faster(shape, self.CPU, itemsize, Tuning(**tuning))

    def test_the_longer_of_queries_and_keys_decides(self, measured):
        assert self.faster((1, 1, 100, 255)) and self.faster((1, 1, 255, 100))
        assert not self.faster((1, 1, 100, 256)) and not self.faster((1, 1, 256, 100))

    def test_many_scores_are_never_made(self, measured):
        assert self.faster((2, 5, 100, 200)) and not self.faster((2, 6, 100, 200))

    def test_by_dtype(self, measured):
        assert self.faster() and not self.faster(itemsize=2)

    def test_the_user_decides_alone(self, measured):
        assert not self.faster(min_seqlen=200) and self.faster(min_seqlen=201)
        assert self.faster((64, 64, 999, 999), min_seqlen=1000) and not self.faster((1, 1, 1, 1), min_seqlen=0)

    def test_the_interpreter_runs_the_kernels(self, measured, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert not self.faster() and self.faster(min_seqlen=201)

    def test_unknown_cuda_devices_take_the_nearest_older_one(self, monkeypatch):
        limits = [{2: unfused.Limits(64 * i, 1 << 20)} for i in range(1, 3)]
        monkeypatch.setattr(unfused, "MEASURED", {"sm_80": limits[0], "sm_90": limits[1]})
        for name, expected in (("sm_80", 64), ("sm_86", 64), ("sm_90", 128), ("sm_120", 128), ("sm_75", 64)):
            monkeypatch.setattr(unfused, "device_name", lambda device, name=name: name)
            assert unfused.limits(torch.device("cuda"), 2).length == expected
        assert unfused.limits(torch.device("cuda"), 4) == unfused.FUSED


def test_the_op_takes_the_way_chosen(monkeypatch):
    taken = []
    for name in ("forward", "backward"):
        way = getattr(unfused, name)
        monkeypatch.setattr(unfused, name, lambda *args, name=name, way=way: taken.append(name) or way(*args))
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    run_op(Inputs(q, q, q, tuning="min_seqlen=9")).sum().backward()
    assert taken == []
    run_op(Inputs(q, q, q, tuning="min_seqlen=10")).sum().backward()
    assert taken == ["forward", "backward"]
