"""Short sequences: the unfused way computes what the fused one does, either may follow the other in a backward, and
which one is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import BF16, CASES, F16, F32, Case, build
from oracle import INF, Inputs, check, run_op
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchflash
from torchflash.kernels import program, reference, unfused
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
        check(replace(build(CASES[1], dtypes[0], v_dtype=dtypes[1]), tuning=UNFUSED))

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
    out, lse = OP(x.q, x.k, x.v, x.captures, x.sizes, *rest, x.layout, "", None, forward, [])
    do = torch.randn(out.shape).to(out.dtype)
    need = [c.is_floating_point() for c in x.captures]
    dq, dk, dv, rest = BACKWARD(do, x.q, x.k, x.v, out, lse, x.captures, x.sizes, need, *rest, backward, [])
    return [out, lse, dq, dk, dv, *rest]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_either_way_may_follow_the_other(case: Case):
    """Also the row statistics and the dropout mask are the same."""
    x = build(case)
    expected = forward_and_backward(x, FUSED, FUSED)
    for ways in ((UNFUSED, FUSED), (FUSED, UNFUSED), (UNFUSED, UNFUSED)):
        torch.testing.assert_close(forward_and_backward(x, *ways), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


class NothingFromTheHost(TorchDispatchMode):
    """Fails where values come from the host or go to it: a copy to wait for, and nothing that a CUDA graph can hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten.lift_fresh,
            torch.ops.aten._local_scalar_dense,
        ), f"{func} waits for the device"
        masks = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor) and t.dtype == torch.bool]
        assert func.overloadpacket is not torch.ops.aten.index or not masks, "a mask as index waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_host_mode_sees():
    ones = torch.ones(2)
    for waits in (lambda: torch.tensor(1.0), lambda: ones.sum().item(), lambda: ones[ones.bool()]):
        with pytest.raises(AssertionError, match="waits for the device"), NothingFromTheHost():
            waits()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_it_never_waits_for_the_device(case: Case):
    x = build(case)
    kinds = program.kinds_of(x.captures)
    rest = (program.read(x.score, x.keep, x.fill, x.post, kinds), x.dropout_p, x.seed)
    problem = reference.Problem(x.q, x.k, x.v, x.captures, x.sizes, *rest)
    need = [c.is_floating_point() for c in x.captures]
    out, lse = OP(
        x.q, x.k, x.v, x.captures, x.sizes, x.score, x.keep, x.fill, x.post, x.dropout_p, x.seed, "bhmd", "", None, "",
        [],
    )
    with NothingFromTheHost():
        unfused.forward(problem, torch.empty_like(out), torch.empty_like(lse))
        unfused.backward(problem, out, out, lse, *(torch.empty_like(t) for t in (x.q, x.k, x.v)), need)


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
        monkeypatch.setattr(unfused, "MEASURED", {"sm_90": {2: "new"}, "sm_80": {2: "old"}})
        found = {name: unfused.measured(name)[2] for name in ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120")}
        assert found == {"sm_75": "old", "sm_80": "old", "sm_86": "old", "sm_90": "new", "sm_120": "new"}
        monkeypatch.setattr(unfused, "MEASURED", {})
        assert unfused.measured("sm_90") == unfused.measured("cpu") == {}


class TestReport:
    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch):
        monkeypatch.setitem(unfused.MEASURED, "cpu", {4: unfused.Limits(256, 1 << 20), 2: unfused.FUSED})
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        torch._dynamo.reset()

    def runs(self, length: int, dtype=F32, dynamic=False, **options):
        def attention(q, k, v):
            return torch.softmax(q @ k.mT / 3, -1) @ v

        q, k, v = (torch.randn(1, 2, length, 8, dtype=dtype) for _ in range(3))
        given = {f"torchflash.{key}": value for key, value in options.items()}
        (record,) = torchflash.explain(attention, options=given, dynamic=dynamic)(q, k, v)
        assert isinstance(record, torchflash.Rewritten)
        shown = [line.strip() for line in str(record).splitlines() if line.strip().startswith("runs")]
        assert shown == ([] if record.runs == "fused" else [f"runs   {record.runs}"])
        assert json.loads(torchflash.Report((record,)).to_json())["records"][0]["runs"] == record.runs
        assert (record.bytes_saved is None) == (dynamic or record.runs != "fused")
        return record.runs

    def test_static_sizes(self):
        assert self.runs(256) == "fused"
        assert self.runs(128) == "unfused, 128 < 256 tokens; its scores take 0.1 MiB"
        assert self.runs(128, BF16) == "fused"

    def test_symbolic_sizes(self):
        assert self.runs(300, dynamic=True) == "unfused below 256 tokens and up to 4 MiB of scores; else fused"
        assert self.runs(300, BF16, dynamic=True) == "fused"

    def test_by_the_user(self):
        assert self.runs(20, min_seqlen=0) == self.runs(20, min_seqlen=20) == "fused"
        assert self.runs(20, dynamic=True, min_seqlen=0) == "fused"
        assert (
            self.runs(512, min_seqlen=513)
            == "unfused, 512 < 513 tokens, by torchflash.min_seqlen; its scores take 2.0 MiB"
        )
        assert (
            self.runs(512, dynamic=True, min_seqlen=100)
            == "unfused below 100 tokens, by torchflash.min_seqlen; else fused"
        )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_option_reaches_the_op(dynamic, monkeypatch):
    """Also in the backward, and at run time: one graph takes both ways as lengths change."""
    taken = []
    for name in ("forward", "backward"):
        way = getattr(unfused, name)
        monkeypatch.setattr(unfused, name, lambda *args, name=name, way=way: taken.append(name) or way(*args))

    def attention(q, k, v):
        return torch.softmax(q @ k.mT / 3, -1) @ v

    torch._dynamo.reset()
    options = {"torchflash.min_seqlen": 40, "torchflash.inner": "aot_eager"}
    compiled = torch.compile(attention, backend="torchflash", options=options, dynamic=dynamic)
    for length in (48, 39, 56, 24):
        q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        got = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
        torch.testing.assert_close(got, torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)))
        assert taken == (["forward", "backward"] if length < 40 else [])
        taken.clear()


def test_what_is_measured_comes_with_the_package():
    """On the CPU: elsewhere in the tests the table is empty."""
    program = """
import torch
from torchflash.kernels import tuning, unfused
for length in (64, 256, 512, 2048):
    for itemsize in (2, 4):
        print(length, unfused.describe((1, 8, length, length), torch.device("cpu"), itemsize, tuning.read("")))
"""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    ways = {tuple(line.split(",")[0].split()) for line in done.stdout.splitlines()}
    assert ways == {("64", "unfused"), ("256", "unfused"), ("512", "fused"), ("2048", "fused")}


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
