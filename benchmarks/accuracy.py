"""How far are outputs and gradients from float64, beside eager PyTorch and scaled_dot_product_attention?

    python benchmarks/accuracy.py                          # the CUDA device if there is one, else the CPU
    python benchmarks/accuracy.py --dtypes fp32,tf32 --dims 64 --length 2048 --seed 1

Operands and the upstream gradient are standard normal, rounded to the dtype; the same attention in float64 on the
rounded operands is taken for exact. Each cell is ||x - exact|| / ||exact|| and, behind the slash, the largest absolute
error. "torchflash" is attention written by hand and compiled by the backend, "attention()" torchflash.attention, and
"eager" what is compiled, uncompiled. tf32 is float32 under torch.set_float32_matmul_precision("high"), fp32 under
"highest".

Exit status 1 where a relative error of the output is larger than 1e-3 in fp16 or 1e-6 in fp32.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torchflash

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
LIMITS = {"fp16": 1e-3, "fp32": 1e-6}  # of the relative error of the output
OURS = ("torchflash", "attention()")
WAYS = (*OURS, "eager", "SDPA")
RESULTS = ("out", "dq", "dk", "dv")


class Setup(NamedTuple):
    dtype: str
    dim: int
    causal: bool
    batch: int
    heads: int
    length: int
    seed: int
    device: str


class Error(NamedTuple):
    relative: float
    largest: float

    def __str__(self) -> str:
        return f"{self.relative:.1e} / {self.largest:.1e}"


Errors = dict[tuple[str, str], Error]  # (way, result) -> error


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1) @ v


def step(attend: Callable[..., Tensor], operands: list[Tensor], do: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def measure(setup: Setup) -> Errors:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if setup.dtype == "tf32" else "highest")
    dtype = DTYPES[setup.dtype]
    draw = torch.Generator(setup.device).manual_seed(setup.seed)
    shape = (setup.batch, setup.heads, setup.length, setup.dim)
    q, k, v, do = (torch.randn(shape, device=setup.device, generator=draw).to(dtype) for _ in range(4))
    hand = causal_by_hand if setup.causal else by_hand
    options = {"torchflash.min_seqlen": 0, "torchflash.strict": True}
    ways: dict[str, Callable[..., Tensor]] = {
        "torchflash": torch.compile(hand, backend="torchflash", options=options),
        "attention()": lambda q, k, v: torchflash.attention(q, k, v, is_causal=setup.causal),
        "eager": hand,
        "SDPA": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=setup.causal),
    }
    exact = step(hand, [x.double() for x in (q, k, v)], do.double())
    errors: Errors = {}
    for way, attend in ways.items():
        for result, x, y in zip(RESULTS, step(attend, [q, k, v], do), exact, strict=True):
            difference = x.double() - y
            errors[way, result] = Error((difference.norm() / y.norm()).item(), difference.abs().max().item())
    return errors


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    cells = [[*header], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    )


def worst(found: dict[Setup, Errors], dtype: str, way: str, result: str) -> Error:
    """The largest of each over head dimensions and masks; NaN is larger than any number."""
    errors = [errors[way, result] for setup, errors in found.items() if setup.dtype == dtype]
    return Error(*(math.nan if any(map(math.isnan, column)) else max(column) for column in zip(*errors, strict=True)))


def forward(found: dict[Setup, Errors], dtype: str) -> float:
    """The largest relative error of the output."""
    errors = [worst(found, dtype, way, "out").relative for way in OURS]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def holds(found: dict[Setup, Errors], dtype: str) -> bool:
    return forward(found, dtype) <= LIMITS[dtype]


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtypes", help=f"of {', '.join(DTYPES)}; default: all, on the CPU without tf32")
    parser.add_argument("--dims", default="64,80,96,128", help="head dimensions")
    parser.add_argument("--length", type=int, help="default: 1024, on the CPU 512")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes; most is compilation")
    args = parser.parse_args()
    on_cpu = torch.device(args.device).type == "cpu"
    dtypes = args.dtypes.split(",") if args.dtypes else [x for x in DTYPES if not (on_cpu and x == "tf32")]
    unknown = [x for x in dtypes if x not in DTYPES]
    if unknown:
        parser.error(f"unknown dtype {unknown[0]!r}; known: {', '.join(DTYPES)}")
    length = args.length or (512 if on_cpu else 1024)
    setups = [
        Setup(dtype, int(dim), causal, args.batch, args.heads, length, args.seed, args.device)
        for dtype, dim, causal in itertools.product(dtypes, args.dims.split(","), (False, True))
    ]
    slowest_first = sorted(setups, key=lambda setup: (DTYPES[setup.dtype].itemsize, setup.dim), reverse=True)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(slowest_first, pool.map(measure, slowest_first), strict=True))

    name = "CPU" if on_cpu else torch.cuda.get_device_name(args.device)
    size = f"batch {args.batch}, {args.heads} heads, {length} tokens"
    print(f"{name}, torch {torch.__version__}, {size}, seed {args.seed}")
    print("relative error / largest absolute error, against float64\n")
    rows: list[list[object]] = [
        [s.dtype, s.dim, "causal" if s.causal else "full", result, *(found[s][way, result] for way in WAYS)]
        for s in setups
        for result in RESULTS
    ]
    print(table(["dtype", "dim", "mask", "", *WAYS], rows))
    print("\nThe largest of each dtype\n")
    rows = [
        [dtype, result, *(worst(found, dtype, way, result) for way in WAYS)]
        for dtype in dtypes
        for result in RESULTS
    ]  # fmt: skip
    print(table(["dtype", "", *WAYS], rows))
    print()
    limited = [dtype for dtype in dtypes if dtype in LIMITS]
    for dtype in limited:
        relation = "<=" if holds(found, dtype) else "IS NOT <="
        print(f"{dtype} forward: {forward(found, dtype):.1e} {relation} {LIMITS[dtype]:.0e}")
    return int(not all(holds(found, dtype) for dtype in limited))


if __name__ == "__main__":
    sys.exit(main())
