"""From which length on is fused attention faster than unfused? Measures both ways of the op, and prints the lines for
MEASURED in torchflash/kernels/unfused.py.

    python benchmarks/short_sequences.py                       # the CUDA device if there is one, else the CPU
    python benchmarks/short_sequences.py --dtypes bfloat16 --lengths 128,256,512 --batches 1,16

Times are per call with what the call costs on the host, as in a model whose kernels are short, on the CPU those of one
thread; "train" is forward and backward. `×` says how many times faster the unfused way is.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer, timer

from torchflash.kernels import unfused  # registers the op

WAYS = {"unfused": f"min_seqlen={1 << 30}", "fused": "min_seqlen=0"}
PROGRAMS = {
    "plain": ("0.125 * s", "", 0.0),
    "causal": ("where(n <= m, 0.125 * s, -inf)", "n <= m", -math.inf),
    "padding": ("where((n <= m) & t0[b, n], 0.125 * s, -inf)", "(n <= m) & t0[b, n]", -math.inf),
}
LARGEST = 64 << 20  # bytes of float32 scores beyond which unfused is not wanted, however fast


class Row(NamedTuple):
    length: int
    scores: int  # elements
    gain: float  # time fused / time unfused


def call(program: str, tensors: list[torch.Tensor], captures: list[torch.Tensor], way: str) -> torch.Tensor:
    score, keep, fill = PROGRAMS[program]
    return torch.ops.torchflash.attention(
        *tensors, captures, [], score, keep, fill, "p", 0.0, None, "bmhd", "", None, WAYS[way], []
    )[0]  # fmt: skip


def milliseconds(what: str, program: str, shape: tuple[int, ...], dtype: torch.dtype, way: str, device: str) -> float:
    B, H, L, D = shape
    torch.manual_seed(0)
    # as a model makes them: columns of a linear layer, heads inside
    tensors = [torch.randn(B, L, H, D, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)]
    captures = [torch.ones(B, L, dtype=torch.bool, device=device)] if program == "padding" else []
    do = torch.randn(B, L, H, D, device=device, dtype=dtype).transpose(1, 2)
    for x in tensors:
        x.requires_grad_(what == "train")

    def forward() -> None:
        call(program, tensors, captures, way)

    def train() -> None:
        torch.autograd.grad(call(program, tensors, captures, way), tensors, do)

    step = forward if what == "forward" else train
    for _ in range(3):
        step()
    clock = time.process_time if device == "cpu" else timer  # the latter waits for the device
    times = Timer("step()", globals={"step": step}, timer=clock).blocked_autorange(min_run_time=0.05).times
    return min(times) * 1e3  # the least disturbed


def best_limits(rows: list[Row]) -> unfused.Limits:
    """The pair of limits under which the chosen rows gain most, as the sum of log(gain)."""
    best, most = unfused.FUSED, 0.0
    lengths = sorted({row.length for row in rows})
    sizes = sorted({row.scores for row in rows if row.scores * 4 <= LARGEST})
    for longest, scores in itertools.product(lengths, sizes):
        gain = sum(math.log(r.gain) for r in rows if r.length <= longest and r.scores <= scores)
        if gain > most + 1e-9:
            following = next((length for length in lengths if length > longest), 2 * longest)
            best, most = unfused.Limits(following, scores), gain
    return best


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--lengths", type=numbers, default=numbers("32,64,128,256,512,1024,2048"))
    parser.add_argument("--batches", type=numbers, default=numbers("1,4,16"))
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--programs", default="plain,causal", help=f"of {', '.join(PROGRAMS)}")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = "one thread" if device.type == "cpu" else torch.cuda.get_device_name()
    print(f"{unfused.device_name(device)}, {name}, torch {torch.__version__}, {args.heads} heads of {args.dim}")
    columns = "".join(f"{what + ' ' + way:>17}" for what in ("forward", "train") for way in WAYS)
    for name in args.dtypes.split(","):
        dtype = getattr(torch, name)
        found: list[Row] = []
        print(f"\n{name:10}{'batch':>6}{'length':>7}{columns}  ms    × forward  train")
        for program, B, L in itertools.product(args.programs.split(","), args.batches, args.lengths):
            scores = B * args.heads * L * L
            if scores * 4 > 4 * LARGEST:
                continue
            times = {
                (what, way): milliseconds(what, program, (B, args.heads, L, args.dim), dtype, way, args.device)
                for what in ("forward", "train")
                for way in WAYS
            }
            gains = [times[what, "fused"] / times[what, "unfused"] for what in ("forward", "train")]
            found += [Row(L, scores, gain) for gain in gains]
            cells = "".join(f"{time:17.3f}" for time in times.values())
            print(f"{program:10}{B:6}{L:7}{cells}       {gains[0]:9.2f}{gains[1]:7.2f}", flush=True)
        print(f'MEASURED["{unfused.device_name(device)}"][{dtype.itemsize}] = {best_limits(found)}')


if __name__ == "__main__":
    main()
