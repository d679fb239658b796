"""An ordinary transformer, compiled with backend="torchflash": what was rewritten, the errors, and the memory.

    python examples/quickstart.py

The model knows nothing of torchflash: its attention is matmul, mask, softmax, matmul. Errors of outputs and gradients
are measured against the same model in float64, memory as the peak of one training step above what is held before it:
on CUDA by torch.cuda.max_memory_allocated, on CPU from the allocations that torch.profiler records.
"""

import argparse
import copy
import math
import os
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages

import torch
import torch.nn.functional as F
from torch import nn

import torchflash


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))  # [B, H, N, D]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary=256, width=256, heads=4, layers=3, length=1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_step(model, tokens):
    """Logits and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    return logits.detach(), [p.grad for p in model.parameters()]


def peak_bytes(step, device):
    """Peak of what one call of `step` allocates."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def max_error(got, want):
    """Largest error of any tensor, relative to its largest value."""
    pairs = zip(got, want, strict=True)
    return max(((g.double() - w).abs().max() / w.abs().max().clamp(min=1e-30)).item() for g, w in pairs)


def main(length=None):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = length or (4096 if device.type == "cuda" else 2048)
    torch.manual_seed(0)
    model = Transformer(length=length).to(device)
    tokens = torch.randint(0, 256, (1, length), device=device)

    print(torchflash.explain(model)(tokens), end="\n\n")

    compiled = torch.compile(model, backend="torchflash")
    started = time.perf_counter()
    train_step(compiled, tokens)
    print(f"first step with compilation: {time.perf_counter() - started:.1f} s\n")

    exact_logits, exact_grads = train_step(copy.deepcopy(model).double(), tokens)
    print(f"{'':24}{'eager':>12}{'torchflash':>12}")
    rows = {"error of the output": [], "error of the gradients": [], "peak memory, MiB": []}
    for candidate in (model, compiled):
        logits, grads = train_step(candidate, tokens)
        rows["error of the output"].append(f"{max_error([logits], [exact_logits]):.1e}")
        rows["error of the gradients"].append(f"{max_error(grads, exact_grads):.1e}")
        model.zero_grad(set_to_none=True)
        del logits, grads
        peak = peak_bytes(lambda candidate=candidate: train_step(candidate, tokens), device)
        rows["peak memory, MiB"].append(f"{peak / 2**20:.0f}")
    for name, values in rows.items():
        print(f"{name:24}" + "".join(f"{value:>12}" for value in values))
    print(f"\n{device.type}, float32, {length} tokens; errors against float64, relative to the largest value")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
