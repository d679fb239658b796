"""Dropout by its properties, on the CPU: every part of forward and backward applies the one documented mask, which is
as random as it should be. By blockwise torch, unfused, and by the Triton kernels in Triton's interpreter, which run in
a process of their own: TRITON_INTERPRET=1 python -m pytest tests/test_dropout_properties.py does the same by hand.
tests/test_gpu_dropout.py has the same on a GPU, at real sizes."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from dropout_masks import P, Setting, Shape, check_arithmetic, check_independent, check_masks, check_rate
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from torchflash.kernels import philox, reference

pytestmark = pytest.mark.usefixtures("poisoned")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
only_on_cpu = pytest.mark.skipif(INTERPRETING, reason="nothing that the interpreter would do otherwise")
F32, BF16 = torch.float32, torch.bfloat16

# ways to run, as tuning texts
KERNELS = {
    "default": "min_seqlen=0",
    "forward": "min_seqlen=0;forward.BLOCK_M=16;forward.BLOCK_N=32",
    "backward": "min_seqlen=0;forward.BLOCK_M=32;forward.BLOCK_N=16;backward_kv.BLOCK_M=32;backward_kv.BLOCK_N=16;"
    "backward_q.BLOCK_M=16;backward_q.BLOCK_N=64",
}
WAYS = KERNELS if INTERPRETING else {"blockwise": "min_seqlen=0", "unfused": "min_seqlen=1048576"}
SHAPES = {"even": Shape(2, 2, 2, 32, 64), "odd": Shape(1, 3, 3, 31, 33), "grouped": Shape(2, 4, 2, 33, 47)}
if INTERPRETING:  # at a second for each launch
    SHAPES = {"odd": Shape(1, 2, 2, 31, 33), "grouped": Shape(1, 2, 1, 17, 47)}
WIDTH = 64 if INTERPRETING else 16


@pytest.mark.skipif(INTERPRETING, reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def one_way(monkeypatch):
    """In the interpreter blockwise torch must not step in; elsewhere its tiles divide every axis."""
    torch.manual_seed(0)
    if not INTERPRETING:
        monkeypatch.setattr(reference, "BLOCK_M", 16)
        monkeypatch.setattr(reference, "BLOCK_N", 16)
        return

    def step_in(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("fell back to blockwise torch")

    monkeypatch.setattr(reference, "forward", step_in)
    monkeypatch.setattr(reference, "backward", step_in)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_every_kernel_applies_the_documented_mask(way, shape):
    """Whatever the shape and the tiles, those of the backward differing from those of the forward."""
    check_masks(Setting(SHAPES[shape], causal=shape == "grouped", tuning=WAYS[way], width=WIDTH))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", [name for name in WAYS if name != "forward"])
def test_arithmetic(way, shape, dtype):
    check_arithmetic(Setting(SHAPES[shape], causal=shape == "odd", dtype=dtype, tuning=WAYS[way], width=WIDTH))


# ------------------------------------------------------------------------------------------------- the mask as a sample


@only_on_cpu
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate(p):
    B, H, M, N = 2, 5, 1024, 1024
    assert B * H * M * N >= 10**7
    rows = torch.arange(B * H * M).view(B * H, M, 1)
    drawn = [philox.draw(torch.tensor([11]), row, torch.arange(N)) >= philox.threshold(p) for row in rows]
    mask = torch.stack(drawn).view(B, H, M, N)
    check_rate(mask, p)
    for i, j in itertools.combinations(range(B * H), 2):
        check_independent(drawn[i], drawn[j], p)


# --------------------------------------------------------------------------------------- as torch.compile draws it

LENGTH = 48


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dropout(torch.softmax(q @ k.mT * 0.1, -1), P) @ v


def layers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two layers of heads in groups of two."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return attend(q, k, v), attend(q + 1, k, v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = checkpoint(layers, q, k, v, use_reentrant=False)
    return first, second


def operands(grad: bool = True) -> list[Tensor]:
    """q [2, 4, L, 16], k [2, 2, L, 16], v = 1 [2, 2, L, L]."""
    q, k = (torch.randn(2, heads, LENGTH, 16) for heads in (4, 2))
    return [x.requires_grad_(grad) for x in (q, k, torch.eye(LENGTH).expand(2, 2, LENGTH, LENGTH).contiguous())]


@pytest.fixture
def compiled():
    torch._dynamo.reset()

    def compile(function: Any, inner: str) -> Any:
        options = {"torchflash.min_seqlen": 0, "torchflash.inner": inner, "torchflash.strict": True}
        return torch.compile(function, backend="torchflash", options=options)

    return compile


INNERS = ["eager", "aot_eager", "inductor"]
# no "eager": torch's own backend of that name draws anew when a checkpoint computes the forward again
STEPS = [(layers, inner) for inner in INNERS] + [(checkpointed, inner) for inner in INNERS[1:]]


@only_on_cpu
@pytest.mark.parametrize(("function", "inner"), STEPS, ids=[f"{f.__name__}-{inner}" for f, inner in STEPS])
def test_training_steps(compiled, function, inner):
    """A new mask at each step, of its own for each layer, batch and head, also of those that share keys; and the
    backward applies it, also where a checkpoint computes the forward again."""
    step = compiled(function, inner)
    kept: list[Tensor] = []
    for _ in range(3):
        leaves = operands()
        outs = step(*leaves)
        dos = [torch.randn_like(out) for out in outs]
        got = torch.autograd.grad(outs, leaves, dos)
        masks = [out.detach() != 0 for out in outs]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        k, v = (x.repeat_interleave(2, 1) for x in exact[1:])
        by_hand = [
            torch.softmax(q @ k.mT * 0.1, -1) * mask / (1 - P) @ v
            for q, mask in zip((exact[0], exact[0] + 1), masks, strict=True)
        ]
        expected = torch.autograd.grad(by_hand, exact, [do.double() for do in dos])
        for a, b in zip((*outs, *got), (*by_hand, *expected), strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-5)
        kept += [head for mask in masks for head in mask.flatten(0, 1)]
    for first, second in itertools.combinations(kept, 2):
        check_independent(first, second, P)


@only_on_cpu
@pytest.mark.parametrize("inner", INNERS)
def test_reproducible_by_manual_seed(compiled, inner):
    step = compiled(layers, inner)
    args = operands(grad=False)
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append([out for _ in range(2) for out in step(*args)])
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not any(map(torch.equal, runs[0], runs[2]))
    assert len({tuple((out != 0).flatten().tolist()) for out in runs[0]}) == 4
