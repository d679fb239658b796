"""Masks made of data, their tile maps by hand, and what both say of tiles: for tests with and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from oracle import INF, Inputs, check
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels import mask, program

MIN = -3.3895313892515355e38
LOW = "~(t0[b, 0, m, n] <= -1e+30)"
M, N = 150, 210


@dataclass(frozen=True)
class Masked:
    """A score with a mask; `captures` makes what it loads for B batches, M queries and N keys."""

    score: str
    keep: str
    fill: float
    captures: Callable[[int, int, int], list[Tensor]]


def padding(B: int, M: int, N: int) -> Tensor:
    """[B, N] bool: the first keys of the first batch are padding, those of others are scattered."""
    kept = torch.rand(B, N) < 0.97
    kept[0], kept[0, : N // 3] = True, False
    return kept


def added(B: int, M: int, N: int) -> Tensor:
    """[B, 1, M, N], causal and padding, with one row that differs within what is masked, and NaN in another."""
    kept = padding(B, M, N)[:, None, None] & (torch.arange(N) <= torch.arange(M)[:, None] + N - M)
    x = torch.zeros(B, 1, M, N).masked_fill(~kept, MIN)
    x[0, 0, 3 % M, 5] = MIN / 2
    x[0, 0, 9 % M, 11] = -INF
    return x


def documents(B: int, M: int, N: int) -> list[Tensor]:
    return [torch.arange(max(M, N)) // torch.arange(37, 37 + 9 * B, 9)[:, None]]


MASKS = {
    "padding": Masked("where(t0[b, n], 0.25 * s, -inf)", "t0[b, n]", -INF, lambda *a: [padding(*a)]),
    "causal_padding": Masked(
        f"0.25 * s + where((n <= m) & t0[b, n], 0.0, {MIN})", "(n <= m) & t0[b, n]", MIN, lambda *a: [padding(*a)]
    ),
    "documents": Masked(
        "where((n <= m) & (t0[b, m] == t0[b, n]), 0.25 * s, -inf)", "(n <= m) & (t0[b, m] == t0[b, n])", -INF, documents
    ),
    "lengths": Masked("where(n < t0[b], 0.25 * s, -1e9)", "n < t0[b]", -1e9, lambda B, M, N: [N - torch.arange(B) * 7]),
    "added": Masked("0.25 * s + t0[b, 0, m, n]", LOW, -1e30, lambda *a: [added(*a)]),
    "added_keys": Masked(
        "0.25 * s + t0[b, n]", "~(t0[b, n] <= -1e+30)", -1e30,
        lambda *a: [torch.zeros(*a[::2]).masked_fill(~padding(*a), MIN)],
    ),
    "bool": Masked(
        "where(t0[b, 0, m, n], 0.25 * s, -1e9)", "t0[b, 0, m, n]", -1e9, lambda *a: [added(*a) > -1]
    ),
    "heads": Masked(
        "where(t0[h, m, n] & (n <= m + 60), 0.25 * s, -inf)", "t0[h, m, n] & (n <= m + 60)", -INF,
        lambda B, M, N: [torch.rand(2, M, N) < 0.01 + (torch.arange(N) < 3)],
    ),
    "blocks": Masked(
        "where(t0[m // 64, n // 64], 0.25 * s, -1e9)", "t0[m // 64, n // 64]", -1e9,
        lambda B, M, N: [torch.rand(-(-M // 64), -(-N // 64)) < 0.5],
    ),
    "small_blocks": Masked(
        "where(t0[m // 16, n // 32] & (n <= m), 0.25 * s, -inf)", "t0[m // 16, n // 32] & (n <= m)", -INF,
        lambda B, M, N: [torch.rand(-(-M // 16), -(-N // 32)) < 0.1 + (torch.arange(-(-N // 32)) < 1)],
    ),
    "integers": Masked(
        "where(t0[m, n] + t1[n] > 0, 0.25 * s, -1e9)", "t0[m, n] + t1[n] > 0", -1e9,
        lambda B, M, N: [torch.randint(-3, 2, (M, N)), torch.randint(0, 2, (N,))],
    ),
    "rounded": Masked(  # what no range tells
        "where(float(t0[m, n]) * t1[n] > 0.3, 0.25 * s, -1e9)", "float(t0[m, n]) * t1[n] > 0.3", -1e9,
        lambda B, M, N: [torch.randint(-3, 2, (M, N)), torch.rand(N)],
    ),
}  # fmt: skip


def inputs(
    name: str, M: int = M, N: int = N, D: int = 16, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Inputs:
    torch.manual_seed(0)
    x, B = MASKS[name], 2
    q = torch.randn(B, M, 2, D, dtype=dtype, device=device).transpose(1, 2)
    k, v = (torch.randn(B, N, 2, D, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    captures = [c.to(device) for c in x.captures(B, M, N)]
    return Inputs(q, k, v, captures, score=x.score, keep=x.keep, fill=x.fill)


def mapped(x: Inputs) -> Inputs:
    """With its tile map."""
    known = program.read(x.score, x.keep, x.fill, x.post, program.kinds_of(x.captures))
    few = x.q.shape[2] <= mask.QUERIES
    wanted = mask.request(known, x.q.dtype.itemsize >= 4, mask.expanded_dims(x.captures), few)
    assert wanted is not None
    lines = [size if axis in wanted.axes else 1 for axis, size in zip("bh", x.q.shape[:2], strict=True)]
    shape = [*lines, x.q.shape[2], x.k.shape[2]]
    mine = [x.captures[i] for i in wanted.captures]
    return replace(x, tile_map=torch.ops.torchflash.tile_map(mine, [], shape, *wanted[3:]))


def check_map(x: Inputs, as_good_as_can_be: bool) -> None:
    """The tile map of `x` against the mask itself."""
    known = program.read(x.score, x.keep, x.fill, x.post, program.kinds_of(x.captures))
    found = mask.mask_of(mask.form(known, x.q.dtype.itemsize >= 4))
    assert found is not None and found.plain is not None
    states, *marks = (t.cpu() for t in mapped(x).tile_map)
    few = len(marks) == 2
    (B, H), (M, N) = states.shape[:2], (x.q.shape[2], x.k.shape[2])
    env = {"b": torch.arange(B)[:, None, None, None], "h": torch.arange(H)[:, None, None]}
    env |= {"m": torch.arange(M)[:, None], "n": torch.arange(N)}
    captures = [c.cpu() for c in x.captures]
    kept, plain = (sc.evaluate(e, env, captures).expand(B, H, M, N) for e in (found.keep, found.plain))

    def by_keys(x: Tensor) -> Tensor:
        return torch.stack([t.flatten(2).any(2) for t in x.split(mask.KEYS, 3)], 2)

    def by_tile(x: Tensor) -> Tensor:
        return torch.stack([by_keys(rows) for rows in x.split(mask.ROWS, 2)], 2)

    some, cut = by_tile(kept), by_tile(~plain)
    assert ((states > 0) | ~some).all() and ((states < 2) | ~cut).all()
    if as_good_as_can_be:
        assert torch.equal(states, some.to(torch.int8) + (some & ~cut).to(torch.int8))
    assert few or bool(marks) == found.rows
    if few:
        order, counts = marks
        whole = torch.tensor([(n + 1) * 128 <= N for n in range(order.shape[-1])])
        some, cut = (torch.stack([t.flatten(2).any(2) for t in x.split(128, 3)], 2) for x in (kept, ~plain))
        by_line = (x.flatten(0, 1) for x in (order[:, :, 0], counts[:, :, 0], some, cut))
        for line, count, keeps, cuts in zip(*by_line, strict=True):
            plain_ones = (~cuts & whole).nonzero().flatten().tolist()
            plain_ones = [n for i, n in enumerate(plain_ones) if n == plain_ones[0] + i]
            kept_ones = keeps.nonzero().flatten().tolist()
            tiles = line.tolist()
            assert count.tolist() == [len(plain_ones), len(kept_ones)] and tiles[: len(plain_ones)] == plain_ones
            assert sorted(tiles[: len(kept_ones)]) == kept_ones and sorted(tiles) == [*range(len(tiles))]
    elif marks:
        uneven = kept
        if found.value is not None:
            value = sc.evaluate(found.value, env, captures).expand(B, H, M, N)
            uneven = kept | (value != value[..., :1]) | ~(value[..., :1] > -INF)
        assert torch.equal(marks[0] > 0, uneven.any(-1))


def check_attention(x: Inputs, slack: float = 1.0) -> None:
    check(mapped(x), slack=slack)
