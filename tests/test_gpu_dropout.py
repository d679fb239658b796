"""Dropout by its properties, in the Triton kernels on a GPU: tests/test_dropout_properties.py at real sizes. Most of
the time is compilation: -n 16 helps."""

from __future__ import annotations

import itertools
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
    documented,
    layers,
    of_forward,
    operands,
)

from torchflash.kernels import reference

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = {"fp32": F32, "bf16": BF16}
SLACK = {F32: 4.0, BF16: 2.0}

TILES = {
    "default": "min_seqlen=0",
    "forward": "min_seqlen=0;forward.BLOCK_M=64;forward.BLOCK_N=32",
    "backward": "min_seqlen=0;forward.BLOCK_M=32;forward.BLOCK_N=64;backward_kv.BLOCK_M=64;backward_kv.BLOCK_N=32;"
    "backward_q.BLOCK_M=16;backward_q.BLOCK_N=64",
}
# name -> shape, causal, seed
CASES = {
    "even": (Shape(2, 3, 3, 512, 1024), False, 2**40 + 3),
    "odd": (Shape(1, 3, 3, 1023, 1025), True, 7),
    "grouped": (Shape(2, 8, 2, 1025, 1023), False, -5),
    "long": (Shape(1, 1, 1, 4097, 4095), True, 2**61 + 1),
}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch, poisoned):
    """The blockwise torch implementation must not step in."""

    def step_in(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("fell back to blockwise torch")

    monkeypatch.setattr(reference, "forward", step_in)
    monkeypatch.setattr(reference, "backward", step_in)
    torch.manual_seed(0)


MASKS = [
    ("bf16", "default", "even"), ("bf16", "default", "odd"), ("bf16", "default", "grouped"),
    ("bf16", "default", "long"),
    ("bf16", "forward", "odd"), ("bf16", "forward", "grouped"), ("bf16", "backward", "odd"),
    ("bf16", "backward", "grouped"), ("fp32", "default", "odd"), ("fp32", "default", "grouped"),
    ("fp32", "backward", "grouped"),
]  # fmt: skip


def setting(dtype: str, tiles: str, case: str) -> Setting:
    shape, causal, seed = CASES[case]
    return Setting(shape, causal, seed=seed, dtype=DTYPES[dtype], device="cuda", tuning=TILES[tiles], width=64)


@pytest.mark.parametrize(("dtype", "tiles", "case"), MASKS)
def test_every_kernel_applies_the_documented_mask(dtype, tiles, case):
    """Whatever the shape and the tiles, those of the backward differing from those of the forward."""
    check_masks(setting(dtype, tiles, case))


@pytest.mark.parametrize("case", ["odd", "grouped"])
@pytest.mark.parametrize(("dtype", "tiles"), [("bf16", "default"), ("bf16", "backward"), ("fp32", "default")])
def test_arithmetic(dtype, tiles, case):
    check_arithmetic(setting(dtype, tiles, case), SLACK[DTYPES[dtype]])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate(p):
    """More than ten million weights, as the kernel drops them."""
    x = Setting(Shape(2, 5, 5, 1024, 1024), p=p, seed=11, dtype=BF16, device="cuda", width=64)
    mask = of_forward(x)
    assert mask.numel() >= 10**7 and torch.equal(mask, documented(x))
    check_rate(mask, p)
    for first, second in itertools.combinations(mask.flatten(0, 1), 2):
        check_independent(first, second, p)


def test_training_steps_in_float32():
    check_training_steps(compiled(layers, "inductor"), operands(128, 64, F32, "cuda"), SLACK[F32])


@pytest.mark.parametrize(("function", "inner"), STEPS, ids=NAMES)
def test_training_steps(function, inner):
    check_training_steps(compiled(function, inner), operands(256, 64, BF16, "cuda"), SLACK[BF16])


@pytest.mark.parametrize("inner", INNERS)
def test_reproducible_by_manual_seed(inner):
    check_reproducible(compiled(layers, inner), operands(256, 64, BF16, "cuda"))
