"""What one call of the op costs on the host, in microseconds, and where it goes.

    python benchmarks/host_cost.py

Operands are tiny. On CUDA nothing waits for the device, so that what is timed is the host alone, launches included.
Without a GPU the kernels are stubs, so that what is timed is everything up to them; the last rows then show how much of
it the parts take.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from torchflash.kernels import op, program, reference, tuning

TEXTS = ("where((n <= m) & t0[b, n], 0.125 * s, -inf)", "(n <= m) & t0[b, n]", -math.inf, "p")
FUSED, UNFUSED = "min_seqlen=0", f"min_seqlen={1 << 30}"


class Stub:
    """In the place of torchflash.kernels.launch."""

    def forward(self, problem: Any, out: Any, lse: Any) -> bool:
        return True

    def backward(self, *args: Any) -> list[Any]:
        return []


def microseconds(step: Callable[[], Any]) -> float:
    """Of the least disturbed calls: the tenth percentile of many, each timed alone."""
    times = []
    for i in range(1000):
        if i % 50 == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()  # so that no launch waits for room in the queue
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    return sorted(times)[100] / 1e3


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        op._kernels_for = lambda q, v: Stub()  # type: ignore[assignment]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, do = (torch.randn(1, 16, 2, 64, device=device, dtype=dtype).transpose(1, 2) for _ in range(4))
    captures = [torch.ones(1, 16, dtype=torch.bool, device=device)]

    def forward(way: str = FUSED) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.torchflash.attention.compiled(
            q, k, v, captures, [16], *TEXTS, 0.0, None, "bmhd", "", None, way, []
        )  # fmt: skip

    out, lse = forward()

    def backward(way: str = FUSED) -> Any:
        return torch.ops.torchflash.attention_backward.compiled(
            do, q, k, v, out, lse, captures, [16], [False], *TEXTS, 0.0, None, way, []
        )  # fmt: skip

    def show(name: str, step: Callable[[], Any]) -> None:
        print(f"{name:44}{microseconds(step):8.1f}", flush=True)

    print(f"{device.type}, torch {torch.__version__}" + ("" if device.type == "cuda" else ", kernels are stubs"))
    with torch.no_grad():
        show("forward, as compiled code calls it", forward)
        show("backward, as compiled code calls it", backward)
        if device.type == "cuda":
            show("forward, unfused", lambda: forward(UNFUSED))
            show("backward, unfused", lambda: backward(UNFUSED))
            mask = captures[0][:, None, None] & torch.ones(16, 16, dtype=torch.bool, device=device).tril()
            sdpa = torch.nn.functional.scaled_dot_product_attention
            show("scaled_dot_product_attention, masked", lambda: sdpa(q, k, v, attn_mask=mask))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def train() -> Any:
        out = torch.ops.torchflash.attention.default(
            *leaves, captures, [16], *TEXTS, 0.0, None, "bmhd", "", None, FUSED, []
        )[0]
        return torch.autograd.grad(out, leaves, do)

    show("forward and backward in eager mode", train)
    kinds = program.kinds_of(captures)
    parsed, tuned = program.read(*TEXTS, kinds), tuning.read(FUSED)
    problem = reference.Problem(q, k, v, captures, [16], parsed, 0.0, None, tuned)
    rest = (captures, [16], *TEXTS, 0.0, None)
    print("parts of a forward")
    how = ("bmhd", "", None, FUSED, [])
    show("  the op's function, without the dispatcher", lambda: op._forward(q, k, v, *rest, *how))
    show("  problem: checks, programs, sizes", lambda: op._like(q, k, v, captures, [16], TEXTS, 0.0, None, FUSED, []))
    show("  which way", lambda: op._unfused(problem))
    show("  results", lambda: (op._empty_out(q, v, "bmhd"), op._empty_lse(q)))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
