"""Keys and values of a paged cache, for the op: caches as models lay them out, and where their rows are said to lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import INF, Inputs
from torch import Tensor

B, PAGE = 2, 16


def spare(pages: int) -> int:
    """How many pages there are for `pages` of each batch: more than are used."""
    return B * pages + 3


def of_pages(pages: int, heads: int, D: int) -> Tensor:
    """[pages, page, heads, D] in memory."""
    return torch.randn(spare(pages), PAGE, heads, D).permute(2, 0, 1, 3)


def heads_outside(pages: int, heads: int, D: int) -> Tensor:
    """[pages, heads, page, D] in memory: pages and rows have no common stride."""
    return torch.randn(spare(pages), heads, PAGE, D).transpose(0, 1)


def columns_outside(pages: int, heads: int, D: int) -> Tensor:
    """[pages, heads, D, page] in memory."""
    return torch.randn(spare(pages), heads, D, PAGE).permute(1, 0, 3, 2)


def slots(pages: int, heads: int, D: int) -> Tensor:
    """[rows, heads, D] in memory."""
    return torch.randn(spare(pages) * PAGE, heads, D).transpose(0, 1)


def shuffled(pages: int) -> Tensor:
    """[B, pages]: no page twice."""
    return torch.randperm(spare(pages))[: B * pages].view(B, pages)


@dataclass(frozen=True)
class Way:
    cache: Callable[[int, int, int], Tensor]  # -> [heads, rows … , D]
    rows: str = "k[t0[b, n // 16], n % 16]"
    table: Callable[[int], Tensor] = shuffled
    sizes: tuple[int, ...] = ()


WAYS = {
    "pages": Way(of_pages),
    "pages_int32": Way(of_pages, table=lambda pages: shuffled(pages).int()),
    "heads_outside": Way(heads_outside),
    "columns_outside": Way(columns_outside),
    "negative": Way(of_pages, table=lambda pages: shuffled(pages) - spare(pages)),
    "repeated": Way(of_pages, table=lambda pages: torch.randint(3, (B, pages))),
    "shared": Way(of_pages, "k[t0[n // z0], n % z0]", lambda pages: torch.randperm(spare(pages)), (PAGE,)),
    "slots": Way(slots, "k[t0[b, n]]", lambda pages: torch.randint(spare(pages) * PAGE, (B, pages * PAGE))),
    "slots_of_pages": Way(slots, "k[t0[b, n // 16] * 16 + n % 16]"),
    "one_row_a_page": Way(lambda pages, heads, D: of_pages(pages, heads, D)[:, :, :1], "k[t0[b, n // 16], 0]"),
    "backwards": Way(of_pages, "k[t0[b, n // 16], -1 - n % 16]"),
}


def paged(
    way: Way, M: int, N: int, D: int, heads: tuple[int, int], dtype: torch.dtype, lengths: tuple[int, int] | None = None
) -> Inputs:
    """Queries of heads[0] heads over N keys of heads[1]; with `lengths`, the keys of each batch that count."""
    torch.manual_seed(0)
    pages = -(-N // PAGE)
    q = torch.randn(B, heads[0], M, D).to(dtype)
    k, v = (way.cache(pages, heads[1], D)[None].to(dtype) for _ in range(2))
    k, v = (x.expand(B, *x.shape[1:]) for x in (k, v))
    table = way.table(pages)
    score, keep, captures = "0.25 * s", "", [table]
    if lengths is not None:
        score, keep = "where(n < t1[b], 0.25 * s, -inf)", "n < t1[b]"
        captures = [table, torch.tensor(lengths)]
    return Inputs(
        q, k, v, captures, list(way.sizes), score=score, keep=keep, fill=-INF, rows=way.rows, keys=N
    )


def gathered(x: Inputs) -> Inputs:
    """The same of keys and values in their order."""
    from oracle import in_order

    return Inputs(
        x.q, in_order(x.k, x), in_order(x.v, x), x.captures, x.sizes, score=x.score, keep=x.keep, fill=x.fill
    )
