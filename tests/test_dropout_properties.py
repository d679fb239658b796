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
from dropout_masks import (
    INNERS,
    NAMES,
    STEPS,
    Setting,
    Shape,
    check_arithmetic,
    check_independent,
    check_masks,
    check_rate,
    check_reproducible,
    check_training_steps,
    compiled,
    layers,
    operands,
)

from torchflash.kernels import philox, reference

pytestmark = pytest.mark.usefixtures("poisoned")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
only_on_cpu = pytest.mark.skipif(INTERPRETING, reason="nothing that the interpreter would do otherwise")
F32, BF16 = torch.float32, torch.bfloat16

# ways to run, as tuning texts
KERNELS = {
    "default": "min_seqlen=0",
    "others": "min_seqlen=0;forward.BLOCK_M=32;forward.BLOCK_N=16;backward_kv.BLOCK_M=32;backward_kv.BLOCK_N=16;"
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
@pytest.mark.parametrize("way", [name for name in WAYS if name != "default"])
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


# ------------------------------------------------------------------------------------------ as torch.compile draws it


@only_on_cpu
@pytest.mark.parametrize(("function", "inner"), STEPS, ids=NAMES)
def test_training_steps(function, inner):
    check_training_steps(compiled(function, inner), operands(48, 16))


@only_on_cpu
@pytest.mark.parametrize("inner", INNERS)
def test_reproducible_by_manual_seed(inner):
    check_reproducible(compiled(layers, inner), operands(48, 16))
