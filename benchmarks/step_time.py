"""Training steps of Inductor, SDPA written by hand and torchflash in turn, where the host decides what a step takes.

    python benchmarks/step_time.py                              # 12 layers, 128 to 1024 tokens
    python benchmarks/step_time.py --lengths 128 --rounds 50

The model and its step are those of examples/memory_comparison.py. There one implementation is timed after another, and
what the process has compiled before, and what else the host does, is in the times: of short steps more than what is
compared. Here all are compiled first, then each runs a few steps in every round, in another order each time; a row
shows the median over the rounds, and those of the ratios of torchflash to the others in the same round.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from memory_comparison import IMPLS, Transformer

COMPARED = ("inductor", "sdpa", "torchflash")


def step_of(impl, length, o):
    torch.manual_seed(0)
    model = Transformer(o.layers, o.hidden, o.heads, causal=False, by_hand=impl == "sdpa").to(o.device, torch.bfloat16)
    run = IMPLS[impl](model)
    x = torch.randn(o.batch, length, o.hidden, device=o.device, dtype=torch.bfloat16)

    def step():
        model.zero_grad(set_to_none=True)
        run(x).float().pow(2).mean().backward()

    return step


def milliseconds(step, o):
    """Of one of a few steps."""
    wait = torch.cuda.synchronize if o.device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(o.steps):
        step()
    wait()
    return (time.perf_counter() - start) / o.steps * 1e3


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--lengths", default="128,256,512,1024")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="in each round")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args()
    print(f"{'length':>7} " + "".join(f"{impl + ', ms':>16}" for impl in COMPARED) + "".join(
        f"{'/ ' + impl:>14}" for impl in COMPARED[:2]))  # fmt: skip
    for length in map(int, o.lengths.split(",")):
        torch._dynamo.reset()
        steps = {impl: step_of(impl, length, o) for impl in COMPARED}
        for step in steps.values():
            milliseconds(step, o)  # compiles
        times = {impl: [] for impl in COMPARED}
        for i in range(o.rounds):
            for impl in COMPARED[i % 3 :] + COMPARED[: i % 3]:
                times[impl].append(milliseconds(steps[impl], o))
        ratios = [[a / b for a, b in zip(times["torchflash"], times[rival], strict=True)] for rival in COMPARED[:2]]
        print(f"{length:>7} " + "".join(f"{statistics.median(times[impl]):>16.2f}" for impl in COMPARED) + "".join(
            f"{statistics.median(r):>14.3f}" for r in ratios), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
