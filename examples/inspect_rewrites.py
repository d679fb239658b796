"""Which attention blocks of a model are rewritten, into what, and why one is not.

    python examples/inspect_rewrites.py
    TORCHFLASH_DUMP=dumps python examples/inspect_rewrites.py    # also writes each graph before and after, as Python

Four ways to write attention. The last returns its weights: they must exist, so the block stays as it is.
"""

import argparse
import math
import os

import torch
from torch import nn

import torchflash


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, N, H·D] → [B, H, N, D]


class PaddedCausal(nn.Module):
    """A causal mask and a padding mask, as in most language models."""

    def forward(self, q, k, v, present):
        q, k, v = (split(x, 4) for x in (q, k, v))
        n = q.shape[-2]
        keep = torch.ones(n, n, dtype=torch.bool).tril() & present[:, None, None, :]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return torch.where(keep, scores, float("-inf")).softmax(-1) @ v


class Alibi(nn.Module):
    """A penalty for distance with a slope for each head."""

    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def forward(self, q, k, v):
        q, k, v = (split(x, 4) for x in (q, k, v))
        position = torch.arange(q.shape[-2])
        distance = (position[:, None] - position[None, :]).abs()
        scores = torch.einsum("bhmd,bhnd->bhmn", q, k) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores - self.slopes[:, None, None] * distance, dim=-1)
        return torch.einsum("bhmn,bhnd->bhmd", weights, v)


class SoftcappedGrouped(nn.Module):
    """Two heads of keys and values for four of queries; scores bounded by tanh."""

    def forward(self, q, k, v):
        q, k, v = split(q, 4), split(k, 2), split(v, 2)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = 32.0 * torch.tanh(q @ k.transpose(-2, -1) / 32.0)
        return torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v


class ReturnsWeights(nn.Module):
    """Hands its weights to the caller."""

    def forward(self, q, k, v):
        q, k, v = (split(x, 4) for x in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
        return weights @ v, weights


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.padded, self.alibi = PaddedCausal(), Alibi(4)
        self.grouped, self.returns_weights = SoftcappedGrouped(), ReturnsWeights()

    def forward(self, q, k, v, present):
        out, weights = self.returns_weights(q, k, v)
        fewer_k, fewer_v = k[..., :32], v[..., :32]
        out = out + self.padded(q, k, v, present) + self.alibi(q, k, v) + self.grouped(q, fewer_k, fewer_v)
        return out, weights


def main():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1024, 64) for _ in range(3))
    present = torch.arange(1024) < torch.tensor([1024, 700])[:, None]
    print(torchflash.explain(Model())(q, k, v, present))
    if folder := os.environ.get("TORCHFLASH_DUMP"):
        print(f"\nbefore and after: {os.path.join(folder, 'graph_0.before.py')}, graph_0.after.py")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
