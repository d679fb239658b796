"""FlopCounterMode and the profiler see the operator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import torchflash

B, H, HK, M, N, D, DV = 2, 4, 2, 24, 31, 8, 16
FORWARD = 2 * (D + DV) * B * H * M * N
BACKWARD = 2 * (3 * D + 2 * DV) * B * H * M * N


def inputs():
    shapes = (B, H, M, D), (B, HK, N, D), (B, HK, N, DV)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def by_hand(q, k, v):
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    return torch.softmax(q @ k.mT * 0.3, -1) @ v


def counts(mode: FlopCounterMode) -> dict[str, int]:
    return {str(op): n for op, n in mode.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("masked", [False, True])
def test_counted(masked):
    q, k, v = inputs()
    with FlopCounterMode(display=False) as mode:
        out = torchflash.attention(q, k, v, is_causal=masked, enable_gqa=True)
        assert mode.get_total_flops() == FORWARD
        out.sum().backward()
    assert counts(mode) == {"torchflash.attention": FORWARD, "torchflash.attention_backward": BACKWARD}


def test_as_torch_counts_its_own():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (x.shape for x in inputs())
    assert sdpa_flop_count(q, k, v) == FORWARD
    assert sdpa_backward_flop_count((B, H, M, DV), q, k, v) == BACKWARD
    assert 2 * (3 * D + 2 * D) / (2 * (D + D)) == 2.5


def test_counted_in_a_compiled_model():
    """As the README says: torch runs a compiled function uncompiled under a dispatch mode, unless told not to look."""
    torch._dynamo.reset()
    leaves = inputs()
    compiled = torch.compile(by_hand, backend="torchflash")
    compiled(*leaves).sum().backward()
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True), FlopCounterMode(display=False) as mode:
        compiled(*leaves).sum().backward()
    assert counts(mode) == {"torchflash.attention": FORWARD, "torchflash.attention_backward": BACKWARD}


class Block(torch.nn.Module):
    """One with submodules, which the mode hooks while it counts."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(H * D, 3 * H * D), torch.nn.Linear(H * D, H * D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out((torch.softmax(q @ k.mT * 0.3, -1) @ v).transpose(1, 2).flatten(2))


def test_counted_in_a_compiled_module():
    """By the lines of the README: what is compiled is a function, as the mode puts hooks on modules."""
    readme = Path(torchflash.__file__).resolve().parents[1] / "README.md"
    if not readme.exists():
        pytest.skip("runs from a checkout")
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    (lines,) = (block for block in blocks if "FlopCounterMode" in block)
    torch._dynamo.reset()
    scope = {"model": Block(), "x": torch.randn(B, M, H * D)}
    exec(lines, scope)
    scores = 2 * B * H * M * M * D
    found = counts(scope["mode"])
    assert found.pop("torchflash.attention") == 2 * scores
    assert found.pop("torchflash.attention_backward") == 5 * scores
    linear = 2 * B * M * (H * D) ** 2 * 4
    assert found == {"aten.addmm": linear, "aten.mm": 2 * linear - linear * 3 // 4}  # x needs no gradient


def test_profiler_shows_the_operator_by_name():
    torch._dynamo.reset()
    leaves = inputs()
    compiled = torch.compile(by_hand, backend="torchflash")
    compiled(*leaves).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        compiled(*leaves).sum().backward()
    calls = {e.key: e.count for e in found.key_averages() if e.key.startswith("torchflash::")}
    assert calls == {"torchflash::attention": 1, "torchflash::attention_backward": 1}
