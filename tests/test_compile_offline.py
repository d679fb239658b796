"""The Triton kernels compiled for every supported architecture, without a GPU: they compile, fit, use tensor cores,
and neither spill more than is known nor make ptxas serialise wgmma."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from attention_cases import BF16, F16, F32
from few_queries import WAYS as FEW
from few_queries import few
from oracle import INF, Inputs
from paged import WAYS as PAGED
from paged import gathered, paged
from tile_maps import inputs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, does not interpret", allow_module_level=True)

from torchflash.kernels import even, maps, mask
from torchflash.kernels import program as programs
from torchflash.kernels import tuning as tunings
from torchflash.kernels.compiling import Resources, compile_kernel, compile_launches, elsewhere, run
from torchflash.kernels.launch import SPILLS as SPILLED_WORDS
from torchflash.kernels.reference import Problem

H, N = 2, 256
CAUSAL = "where(n <= m, 0.125 * s, -inf)"
# name -> (score, keep, post, captures, dropout_p)
PROGRAMS = {
    "causal": (CAUSAL, "n <= m", "p", lambda dtype: [], 0.0),
    "mask": (
        "where((n <= m) & t0[b, n], 0.125 * s, -inf)",
        "(n <= m) & t0[b, n]",
        "p",
        lambda d: [torch.ones(1, N).bool()],
        0.0,
    ),
    "dropout": (CAUSAL, "n <= m", "p", lambda dtype: [], 0.1),
    "bias": ("0.125 * s + t0[h, m, n]", "", "p", lambda dtype: [torch.zeros(H, N, N, dtype=dtype)], 0.0),
    "filled": ("where(t0[b, n], 0.125 * s, -1e9)", "t0[b, n]", "p", lambda d: [torch.ones(1, N).bool()], 0.0),
    "added": ("0.125 * s + where(t0[b, n], 0.0, -1e30)", "t0[b, n]", "p", lambda d: [torch.ones(1, N).bool()], 0.0),
    "relative": ("0.125 * s + t0[n - m + z0, h]", "", "p", lambda dtype: [torch.zeros(2 * N, H, dtype=dtype)], 0.0),
}
FILLS = {"filled": -1e9, "added": -1e30}  # others: -inf
# What of a thread may live in memory, in bytes, where it is more than launch.SPILLS allows: (program, dtype, D,
# capability, kernel). Tuning is to bring these down.
SPILLS: dict[tuple[Any, ...], int] = {}
PRODUCTS = {f"attention_{name}" for name in ("forward", "backward_kv", "backward_q", "backward_capture")}
LOOSE = 8192  # in the sweep over everything, where the point is that all of it compiles and fits
# A bias tile that is read asynchronously makes ptxas serialise wgmma (C7515): known, slower, not wrong.
SERIALIZED = {"bias", "relative"}


def build(name: str, dtype: torch.dtype, D: int, DV: int | None = None, heads: int = H) -> tuple[Problem, list[bool]]:
    score, keep, post, captures, p = PROGRAMS[name]
    tensors = captures(dtype)
    program = programs.read(score, keep, FILLS.get(name, -INF), post, programs.kinds_of(tensors))
    q, k, v = (torch.empty((1, h, N, d), dtype=dtype) for h, d in ((H, D), (heads, D), (heads, DV or D)))
    seed = torch.zeros(1, dtype=torch.int64) if p else None
    return Problem(q, k, v, tensors, [N] if "z0" in score else [], program, p, seed), [
        t.is_floating_point() for t in tensors
    ]


def gate(name: str, dtype: torch.dtype, D: int, capability: int, least: int = 4 * SPILLED_WORDS) -> None:
    problem, need = build(name, dtype, D)
    found = compile_launches(problem, need, capability)
    assert {"attention_forward", "attention_rows", "attention_backward_kv", "attention_backward_q"} <= set(found)
    for kernel, launches in found.items():
        for r in launches:
            said = f"{name} {kernel} sm_{capability}: stack {r.stack} {r}"
            known = SPILLS.get((name, dtype, D, capability, kernel.removeprefix("attention_")), 0)
            assert r.stack <= max(least, known), said
            assert r.registers <= 255, said
            assert r.tensor_core or kernel not in PRODUCTS, said
            assert name in SERIALIZED or not r.warnings, said


@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_causal_on_hopper(D):
    gate("causal", BF16, D, 90)


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_every_architecture(capability):
    gate("causal", BF16, 128, capability)


@pytest.mark.parametrize("name", ["mask", "filled", "added", "dropout", "bias", "relative"])
def test_programs_on_hopper(name):
    gate(name, F16, 64, 90)


@pytest.mark.parametrize(("name", "D"), [("filled", 64), ("added", 128)])
def test_even_rows_on_hopper(name, D, monkeypatch):
    """Their sums cost the kernels of other rows next to no registers."""
    found = compile_launches(*build(name, BF16, D), 90)
    monkeypatch.setattr(even, "shape", lambda form: None)
    usual = compile_launches(*build(name, BF16, D), 90)
    sums = {"value_sums", "even_moments"} | ({"even_keys"} if name == "added" else set())
    assert found.keys() - usual.keys() == sums
    assert not any(r.spills or r.warnings for kernel in sums for r in found[kernel])
    for kernel in PRODUCTS & usual.keys():
        assert found[kernel][-1].stack <= usual[kernel][-1].stack + 96, kernel


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(("name", "dtype", "D"), [("filled", BF16, 128), ("plain", F16, 64), ("added", F32, 64)])
def test_few_queries(name, dtype, D, capability):
    for heads in (1, 4):
        x = few(FEW[name], 1, D, heads, dtype)
        kinds = programs.kinds_of(x.captures)
        program = programs.read(x.score, x.keep, x.fill, x.post, kinds)
        problem = Problem(x.q, x.k, x.v, x.captures, x.sizes, program, 0.0, None)
        found = compile_launches(problem, [False] * len(x.captures), capability)
        assert "attention_forward" not in found
        for kernel in ("attention_split", "attention_combine"):
            for r in found[kernel]:
                assert r.spills <= 64 and not r.warnings, f"{kernel} sm_{capability}: {r}"
        assert all(r.tensor_core for r in found["attention_split"])


def compile_forward(x: Inputs, capability: int, tuning: str = "") -> Resources:
    program = programs.read(x.score, x.keep, x.fill, x.post, programs.kinds_of(x.captures), x.rows)
    problem = Problem(x.q, x.k, x.v, x.captures, x.sizes, program, 0.0, None, tunings.read(tuning), x.keys)
    found = compile_launches(problem, [False] * len(x.captures), capability, "forward")
    return found["attention_split" if x.q.shape[2] == 1 else "attention_forward"][-1]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("M", [1, 256], ids=["few", "many"])
@pytest.mark.parametrize("D", [64, 128])
def test_paged_keys(D, M, capability):
    """They are copied asynchronously, 16 bytes at a time, like those that lie together."""
    for way in ("pages", "heads_outside"):
        x = paged(PAGED[way], M, 512, D, (8, 2), BF16, (512, 100))
        r = compile_forward(x, capability)
        assert not r.spills and not r.warnings and r.tensor_core, f"{way}: {r}"
        alike = "forward.num_stages=2"
        kernels = compile_forward(x, capability, alike), compile_forward(gathered(x), 80, alike)
        copies, usual = (k.asm["ptx"].count("cp.async.cg.shared.global") for k in kernels)
        assert copies == usual > 0, f"{way}: {copies} of {usual}"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["causal_padding", "added", "bool", "documents", "blocks"])
def test_tile_maps(name, capability):
    """What finds the states of tiles and the orders; a mask as large as the scores is read 16 bytes at a time."""
    x = inputs(name, 1024, 1024, 64, BF16)
    captures = [c.to(BF16) if name == "added" else c for c in x.captures]
    program = programs.read(x.score, x.keep, x.fill, x.post, programs.kinds_of(captures))
    tensors = [t.to("meta") for t in (x.q, x.k, x.v)]
    captures = [c.to("meta") for c in captures]
    found = []

    def start(kernel, grid, changing, others, spills=None):
        found.append((kernel.__name__, compile_kernel(kernel, {**others(), **changing}, capability)))

    wanted = mask.request(program, False, mask.expanded_dims(captures), few=False)
    lines = [2 if "b" in wanted.axes else 1, 1]
    made = mask._empty(captures, [*lines, 1024, 1024], wanted.rows, False)
    with elsewhere(start, capability):
        mine = [captures[i] for i in wanted.captures]
        maps.fill(mask.read(programs.kinds_of(mine), *wanted[3:]), mine, [], [*lines, 1024, 1024], made)
        assert run(Problem(*tensors, captures, (), program, 0.0, None, tile_map=made), [False] * len(captures))
    names = [name for name, _ in found]
    assert names.count("tile_states") == 1 and names.count("tile_order") >= 2
    for name_, resources in found:
        if name_.startswith("tile"):
            assert resources.spills <= 64, (name_, resources)
    if name in ("added", "bool"):
        (states,) = (r for name_, r in found if name_ == "tile_states")
        assert "ld.global.v4.b32" in states.asm["ptx"]


def test_float32_on_hopper():
    gate("causal", F32, 64, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("name", PROGRAMS)
def test_everything(name, D, dtype, capability):
    gate(name, dtype, D, capability, least=LOOSE)


@pytest.mark.parametrize("shape", [(512, 512), (192, 128), (40, 300)], ids=str)
def test_large_and_unequal_head_dimensions(shape):
    problem, need = build("causal", BF16, *shape, heads=1)
    for kernel, launches in compile_launches(problem, need, 90).items():
        for r in launches:
            assert not r.warnings and r.stack <= 4 * SPILLED_WORDS, f"{kernel}: stack {r.stack} {r}"


def test_lengths_do_not_make_new_kernels():
    sources = set()
    for length in (200, 201, 256, 1):
        problem, need = build("relative", BF16, 64)
        q, k, v = (torch.empty(1, length, H, 64, dtype=BF16).transpose(1, 2) for _ in range(3))
        problem = Problem(q, k, v, problem.captures, [length], problem.program, 0.0, None)
        sources.add(compile_launches(problem, need, 90)["attention_forward"][0].source)
    assert len(sources) == 1
