"""Keys and values that are read where they lie, as in a paged cache: rows of a tensor at indices that follow from batch
and key.

    k [B, Hk, pages, page, D], rows k[t0[b, n // 16], n % 16]   ->   key n of batch b is k[b, :, t0[b, n // 16], n % 16]

Indices are those of torch: below 0 they count from the end. One that torch refuses is an IndexError here, while the
Triton kernels read the first or last row in its place (`tiles.places`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.score import Expr


def gather(
    x: Tensor, rows: Sequence[Expr], captures: Sequence[Tensor], sizes: Mapping[str, int], b: slice, h: slice, n: slice
) -> Tensor:
    """[b, h, n, D]: the keys (or values) `n` of the batches `b` and heads `h` of x; a view of x where there are no
    `rows`. Raises IndexError for an index outside of x."""
    if not rows:
        return x[b, h, n]
    batch, key = (torch.arange(i.start, i.stop, device=x.device) for i in (b, n))
    env = {**sizes, "b": batch[:, None], "n": key}
    own = torch.arange(b.stop - b.start, device=x.device)[:, None]
    at = (own, *(sc.evaluate(i, env, captures) for i in rows))
    by_row = x[b, h].movedim(1, -2)  # [b, R, h, D] or [b, pages, page, h, D]
    return by_row[at].transpose(1, 2)


__all__ = ["gather"]
