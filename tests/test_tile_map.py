"""torch.ops.torchflash.tile_map: against the mask, by torch and by the kernels; attention that is given one; graphs, in
which blocks with one mask share one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracle import INF, Inputs, check, run_op
from tile_maps import MASKS, check_attention, check_map, inputs, mapped
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchflash
from torchflash.kernels import mask, program
from torchflash.options import Options
from torchflash.passes import replace as replacing
from torchflash.passes import rewrite_graph

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in a process of its own")
by_torch = pytest.mark.skipif(INTERPRETING, reason="runs without the interpreter")
OP = torch.ops.torchflash.tile_map


@by_torch
def test_kernels_in_a_process_of_their_own():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


# ------------------------------------------------------------------------------------------------------------- the map


@by_torch
@pytest.mark.parametrize("name", MASKS)
def test_maps_by_torch(name: str):
    check_map(inputs(name), as_good_as_can_be=True)


@interpreted
@pytest.mark.parametrize("name", MASKS)
def test_maps_by_kernels(name: str):
    check_map(inputs(name), as_good_as_can_be=name != "heads")  # whose ranges do not tell of two conditions together


@pytest.mark.parametrize("name", ["padding", "lengths", "documents", "bool"])
def test_order_of_few_queries(name: str):
    check_map(inputs(name, 2, 300), as_good_as_can_be=True)


@interpreted
@pytest.mark.parametrize("N", [64, 512, 513])
def test_ends_of_the_keys(N: int):
    check_map(inputs("added", 70, N), as_good_as_can_be=True)


@by_torch
def test_fake_and_schema():
    x = inputs("added")
    torch.library.opcheck(OP.default, (x.captures, [], [2, 1, 150, 210], x.keep, "", "t0[b, 0, m, n]", True, False))


@by_torch
def test_it_takes_a_mask():
    with pytest.raises(ValueError, match="keep is empty"):
        OP([torch.ones(4)], [], [1, 1, 4, 4], "", "", "", False, False)
    with pytest.raises(ValueError, match="at most 64 queries; got 65"):
        OP([torch.ones(4)], [], [1, 1, 65, 4], "t0[n] > 0", "", "", False, True)


@by_torch
def test_nothing_is_asked_for_masks_of_indices():
    for keep in ("n <= m", ""):
        known = program.read("where(n <= m, s + t0[n], -inf)", keep, -INF, "p", ("f",))
        assert mask.request(known, False, ((False,),), few=False) is None


# ----------------------------------------------------------------------------------------------- attention with one


@interpreted
@pytest.mark.parametrize("never", [-(2**63), 2**63 - 1])
def test_differences_that_overflow(never: int):
    """Of times, one of which stands for none."""
    times = torch.arange(70)
    times[30] = never
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    score = "where(t0[m] - t0[n] <= 9, 0.25 * s, -1e9)"
    check_map(Inputs(q, k, v, [times], score=score, keep="t0[m] - t0[n] <= 9", fill=-1e9), as_good_as_can_be=False)


@interpreted
@pytest.mark.parametrize("keep", ["t0[n] <= t1[m]", "t0[n] >= -inf"])
def test_nan_is_not_at_most_what_is_infinite(keep: str):
    times = torch.arange(70.0)
    times[30] = float("nan")
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    score, captures = f"where({keep}, 0.25 * s, -1e9)", [times, torch.full((70,), INF)]
    check_map(Inputs(q, k, v, captures, score=score, keep=keep, fill=-1e9), as_good_as_can_be=False)


@interpreted
@pytest.mark.parametrize("name", MASKS)
def test_attention(name: str):
    check_attention(inputs(name, 70, 100))


@interpreted
@pytest.mark.parametrize("tile", [(64, 32), (128, 64), (64, 128), (16, 32), (128, 16)])
def test_tiles_of_other_sizes(tile: tuple[int, int]):
    """Made of several tiles of the map, or of none."""
    tuning = "min_seqlen=0;" + ";".join(
        f"{kernel}.BLOCK_M={tile[0]};{kernel}.BLOCK_N={tile[1]}" for kernel in ("forward", "backward_kv", "backward_q")
    )
    for name in ("added", "documents"):
        check_attention(replace(inputs(name, 140, 150), tuning=tuning))


@interpreted
@pytest.mark.parametrize("tile", [(64, 32), (32, 64), (16, 16)], ids=str)
def test_parts_of_a_tile_of_the_map_that_do_not_exist(tile: tuple[int, int]):
    """Of 130 queries and 65 keys the last tile of the map is there but for a few: smaller ones end before it does."""
    tuning = "min_seqlen=0;" + ";".join(
        f"{kernel}.BLOCK_M={tile[0]};{kernel}.BLOCK_N={tile[1]}" for kernel in ("forward", "backward_kv", "backward_q")
    )
    check_attention(replace(inputs("added", 130, 65), tuning=tuning))


@interpreted
@pytest.mark.parametrize("name", ["padding", "lengths"])
def test_few_queries(name: str, monkeypatch: pytest.MonkeyPatch):
    from torchflash.kernels import launch

    taken = []
    split = launch._forward_split
    monkeypatch.setattr(launch, "_forward_split", lambda *args: taken.append(1) or split(*args))
    check_attention(inputs(name, 2, 520))
    assert taken


@interpreted
def test_states_are_not_found_again(monkeypatch: pytest.MonkeyPatch):
    from torchflash.kernels import maps

    x = mapped(replace(inputs("added", 70, 100), tuning="min_seqlen=0;forward.BLOCK_M=64;forward.BLOCK_N=64"))
    monkeypatch.setattr(maps, "tile_states", None)
    assert run_op(x).isfinite().all()


@pytest.mark.parametrize("wrong", ["queries", "dtype", "heads", "rank"])
def test_another_map_is_refused(wrong: str):
    x = mapped(inputs("added", 70, 100))
    states, marks = x.tile_map
    bad = {
        "queries": [states[:, :, :1], marks], "dtype": [states.int(), marks],
        "heads": [states.expand(-1, 3, -1, -1), marks], "rank": [states[0], marks],
    }  # fmt: skip
    with pytest.raises(ValueError, match="tile_map must be what torchflash::tile_map gives"):
        run_op(replace(x, tile_map=bad[wrong]))


@interpreted
@pytest.mark.parametrize("start", [0, 2**22 - 40, -(2**22) - 40, 2**40])
def test_differences_of_integers_near_and_far(start: int):
    """Plain tiles have those less than 2**22 in size; what is beyond is computed otherwise."""
    torch.manual_seed(0)
    positions = start + torch.arange(100)
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    score = "where(t1[n] <= t1[m], 0.25 * s + t0[h] * float(t1[n] - t1[m]), -inf)"
    captures = [torch.tensor([-0.1, -0.2]), positions]
    check(Inputs(q, k, v, captures, score=score, keep="t1[n] <= t1[m]"))


# -------------------------------------------------------------------------------------------------------------- graphs


class Layers(nn.Module):
    """Attention by hand, with one mask that is made of padding; `between` may write to it."""

    def __init__(self, between=None, layers: int = 3):
        super().__init__()
        self.layers, self.between = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers)), between

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        B, N, D = x.shape
        for layer in self.layers:
            q, k, v = layer(x).view(B, N, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT * 0.3).masked_fill(~padding[:, None, None], float("-inf"))
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, D)
            if self.between is not None:
                self.between(padding)
        return x


def calls(model: nn.Module, monkeypatch: pytest.MonkeyPatch, *given: torch.Tensor, dynamic: bool = False) -> list[int]:
    """How many tile maps and attentions the graph has, checked against eager, with gradients."""
    monkeypatch.setattr(replacing, "wanted_on", lambda device: True)
    torch._dynamo.reset()
    counts = []

    def backend(gm, example_inputs):
        rewrite_graph(gm, Options())
        ops = (OP.default, torch.ops.torchflash.attention.default)
        counts.extend(len(gm.graph.find_nodes(op="call_function", target=op)) for op in ops)
        return gm.forward

    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    results = []
    for f in (model, compiled):
        x, *rest = (t.clone() for t in given)
        x.requires_grad_()
        out = f(x, *rest)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    return counts


def example() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    padding = torch.rand(2, 40) < 0.8
    padding[:, 20:30] = True
    return torch.randn(2, 40, 16), padding


@by_torch
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_share_one(monkeypatch: pytest.MonkeyPatch, dynamic: bool):
    assert calls(Layers(), monkeypatch, *example(), dynamic=dynamic) == [1, 3]


@by_torch
def test_a_mask_that_is_written_is_another(monkeypatch: pytest.MonkeyPatch):
    def between(padding):
        padding[:, :5] = False

    assert calls(Layers(between), monkeypatch, *example()) == [3, 3]


@by_torch
def test_different_masks(monkeypatch: pytest.MonkeyPatch):
    class Model(nn.Module):
        def forward(self, x, padding):
            q = x[:, None]
            a = (0.1 * q @ q.mT).masked_fill(~padding[:, None, None], -1e9).softmax(-1) @ q
            b = (0.1 * q @ q.mT).masked_fill(~padding.flip(0)[:, None, None], -1e9).softmax(-1) @ q
            c = (0.1 * q @ q.mT).masked_fill(padding.logical_not()[:, None, None], -1e9).softmax(-1) @ q
            return a + b + c

    assert calls(Model(), monkeypatch, *example()) == [2, 3]


@by_torch
def test_none_for_masks_of_indices(monkeypatch: pytest.MonkeyPatch):
    class Model(nn.Module):
        def forward(self, x, padding):
            q = x[:, None]
            causal = torch.ones(40, 40, dtype=torch.bool).tril()
            return (0.1 * q @ q.mT).masked_fill(~causal, float("-inf")).softmax(-1) @ q

    assert calls(Model(), monkeypatch, *example()) == [0, 1]


@interpreted
def test_attention_by_hand_makes_one():
    """torchflash.attention, for the forward and the backward."""
    made = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func)
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    bias = torch.rand(40, 40) < 0.5
    bias[:, 0] = True
    with Counting():
        out = torchflash.attention(q, q, q, bias, keep="n <= m")
        (dq,) = torch.autograd.grad(out.square().sum(), q)
    assert made.count(OP.default) == 1
    expected = F.scaled_dot_product_attention(q, q, q, bias.tril())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dq, torch.autograd.grad(expected.square().sum(), q)[0], rtol=1e-5, atol=1e-5)
