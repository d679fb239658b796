"""torch.ops.torchflash.tile_map: what a mask that is made of data keeps of each tile, found out once for all attentions
that have the mask, and for their backward.

    tile_map(captures, sizes, [B, H, M, N], keep, plain, value, rows, order) -> [states, uneven?, order?, counts?]

B and H are 1 where the mask is the same for all batches or heads. `keep` says what is kept and `plain` where a score
is what it is without the mask; both are programs over `captures` and `sizes` (torchflash/score.py); "" is none.

    states [B, H, M / 64, N / 64] int8    0: nothing of the tile is kept, 1: something, 2: it is plain
    uneven [B, H, M] int8    with `rows`: 1 for a row that keeps something, or in which `value`, what is added to the
                             scores, is not one and the same finite number
    order [B, H, 1, N / 128] int32, counts [B, H, 1, 2] int32    with `order`, of at most 64 queries: the tiles of 128
                             keys: plain ones that follow one another first, then all others that keep something,
                             then the rest; how many are in the first two

`rows` and `order` exclude one another. A tile may be said to be less than it is, 1 for 0 or 2, where the ranges of what
the mask loads do not tell.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels.evenness import shape as shape_of_even_rows
from torchflash.kernels.forms import Form, form
from torchflash.kernels.program import Program, fold
from torchflash.score import Expr

ROWS, KEYS = 64, 64  # of a tile of `states`: those of kernels are made of whole ones, or are parts of one
ORDER_KEYS = 128  # of a tile of `order`, as the kernel of few queries has it
QUERIES = 16  # of that kernel, at most
Expanded = tuple[tuple[bool, ...], ...]

library = torch.library.Library("torchflash", "FRAGMENT")
library.define(
    "tile_map(Tensor[] captures, SymInt[] sizes, SymInt[] shape, str keep, str plain, str value, bool rows, "
    "bool order) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclass(frozen=True)
class Mask:
    """What of a program says which tiles are visited."""

    kinds: tuple[str, ...]  # of the captures
    keep: Expr
    plain: Expr | None
    value: Expr | None  # what is added where nothing is kept, if that is data and has to be looked at
    rows: bool  # whether even rows are told from others
    order: bool = False  # whether the order of a single row of tiles is wanted

    @property
    def expressions(self) -> list[Expr]:
        return [e for e in (self.keep, self.plain, self.value) if e is not None]

    @property
    def loads(self) -> bool:
        return bool(sc.loads(*self.expressions))

    def axes(self, expanded: Expanded) -> set[str]:
        """The indices it varies with."""
        return set().union(*(_axes(e, expanded) for e in self.expressions))


@functools.lru_cache(maxsize=4096)
def mask_of(form: Form) -> Mask | None:
    """None where every key is kept."""
    program = form.program
    if program.keep is None:
        return None
    even = shape_of_even_rows(form)
    return Mask(program.kinds, program.keep, form.plain, None if even is None else even.value, even is not None)


def expanded_dims(captures: Sequence[Tensor]) -> Expanded:
    """Which dims of each capture are expanded: it does not vary along them."""
    return tuple([tuple([isinstance(step, int) and step == 0 for step in c.stride()]) for c in captures])


def _axes(e: Expr, expanded: Expanded) -> set[str]:
    if e.op == "name":
        return {e.value}
    args = e.args
    if e.op == "load":
        args = tuple(a for a, same in zip(args, expanded[int(e.value[1:])], strict=True) if not same)
    return set().union(*(_axes(a, expanded) for a in args))


class Request(NamedTuple):
    """The call of tile_map for a program: which captures and sizes of the program it takes, and its other arguments."""

    captures: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: frozenset[str]
    keep: str
    plain: str
    value: str
    rows: bool
    order: bool


@functools.lru_cache(maxsize=4096)
def request(program: Program, exact: bool, expanded: Expanded, few: bool) -> Request | None:
    """What to ask of tile_map for operands of float32 (`exact`) or less, and at most QUERIES queries (`few`) or more;
    None where the mask follows from indices alone, or there is none. Programs with the same mask ask for the same."""
    mask = mask_of(form(program, exact))
    if mask is None or not mask.loads:
        return None
    parts = sc.topological(*mask.expressions)
    captures = tuple(dict.fromkeys(int(x.value[1:]) for x in parts if x.op == "load"))
    sizes = tuple(dict.fromkeys(int(x.value[1:]) for x in parts if _is_size(x)))
    mapping = {f"t{i}": f"t{new}" for new, i in enumerate(captures)}
    mapping |= {f"z{i}": f"z{new}" for new, i in enumerate(sizes)}

    def text(e: Expr | None) -> str:
        return "" if e is None else str(sc.renamed(e, mapping))

    axes = frozenset(mask.axes(expanded) & {"b", "h"})
    rows = mask.rows and not few
    value = text(mask.value) if rows else ""
    return Request(captures, sizes, axes, text(mask.keep), text(mask.plain), value, rows, few)


def _is_size(e: Expr) -> bool:
    return e.op == "name" and e.value.startswith("z")


def wanted_on(device: torch.device) -> bool:
    """Whether kernels that read tile maps run there."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET", "0") != "0"


# -------------------------------------------------------------------------------------------------------------- the op


@functools.lru_cache(maxsize=1024)
def read(kinds: tuple[str, ...], keep: str, plain: str, value: str, rows: bool, order: bool) -> Mask:
    """Raises ScoreError when a text is not a program."""
    kept, spared, added = (fold(sc.parse(x)) if x else None for x in (keep, plain, value))
    if kept is None:
        raise ValueError("torchflash::tile_map: keep is empty; without a mask there is no tile map")
    if rows and order:
        raise ValueError("torchflash::tile_map: rows are marked, or the order of a single row of tiles is given")
    return Mask(kinds, kept, spared, added, rows, order)


def _empty(captures: Sequence[Tensor], shape: Sequence[int], rows: bool, order: bool) -> list[Tensor]:
    B, H, M, N = shape
    like = captures[0]
    found = [like.new_empty((B, H, -(-M // ROWS), -(-N // KEYS)), dtype=torch.int8)]
    if rows:
        found.append(like.new_zeros((B, H, M), dtype=torch.int8))
    if order:
        found += [like.new_empty((B, H, 1, n), dtype=torch.int32) for n in (-(-N // ORDER_KEYS), 2)]
    return found


@torch.library.register_fake("torchflash::tile_map", lib=library)
def _fake(
    captures: list[Tensor], sizes: list[int], shape: list[int], keep: str, plain: str, value: str, rows: bool,
    order: bool,
) -> list[Tensor]:  # fmt: skip
    return _empty(captures, shape, rows, order)


def _tile_map(
    captures: list[Tensor], sizes: list[int], shape: list[int], keep: str, plain: str, value: str, rows: bool,
    order: bool,
) -> list[Tensor]:  # fmt: skip
    kinds = tuple(sc.capture_kinds(captures).values())
    mask = read(kinds, keep, plain, value, rows, order)
    if order and shape[2] > ROWS:
        raise ValueError(f"torchflash::tile_map: the order is that of at most {ROWS} queries; got {shape[2]}")
    found = _empty(captures, shape, rows, order)
    if math.prod(shape):
        if wanted_on(captures[0].device):
            from torchflash.kernels import maps

            maps.fill(mask, captures, sizes, shape, found)
        else:
            by_torch(mask, captures, sizes, shape, found)
    return found


for _key in ("CPU", "CUDA"):
    library.impl("tile_map", _tile_map, _key)


def by_torch(
    mask: Mask, captures: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], found: Sequence[Tensor]
) -> None:
    """Fills what is `found` of a mask, by one row of tiles after the other."""
    states, *rest = found
    uneven = rest[0] if mask.rows else None
    B, H, M, N = shape
    index = functools.partial(torch.arange, device=states.device)
    env: dict[str, Any] = {f"z{i}": int(z) for i, z in enumerate(sizes)}
    env |= {"b": index(B)[:, None, None, None], "h": index(H)[:, None, None], "n": index(N)}
    for row, m in enumerate(index(M).split(ROWS)):

        def of(e: Expr, m: Tensor = m) -> Tensor:
            found = sc.evaluate(e, {**env, "m": m[:, None]}, captures)
            return torch.as_tensor(found, device=states.device).expand(B, H, len(m), N)

        kept = of(mask.keep)
        some = _any_of_tiles(kept)
        every = torch.zeros_like(some) if mask.plain is None else ~_any_of_tiles(~of(mask.plain))
        states[:, :, row] = some + (some & every).to(torch.int8)
        if uneven is not None:
            marks = kept
            if mask.value is not None:
                value = of(mask.value)
                marks = marks | (value != value[..., :1]) | ~(value[..., :1] > -math.inf)
            uneven[:, :, m] = marks.any(-1).to(torch.int8)
    if mask.order:
        order, counts = rest
        padded = torch.nn.functional.pad(states, (0, -states.shape[-1] % (ORDER_KEYS // KEYS)), value=-1)
        parts = padded.unflatten(-1, (-1, ORDER_KEYS // KEYS))
        plain = ((parts == 2) | (parts < 0)).all(-1) & (index(order.shape[-1]) < N // ORDER_KEYS)
        first = plain.to(torch.int8).argmax(-1, keepdim=True)
        tiles = index(order.shape[-1])
        plain &= (tiles >= first) & (plain.cumsum(-1) == tiles - first + 1)
        kept = (parts > 0).any(-1)
        order.copy_((2 - kept.to(torch.int8) - plain.to(torch.int8)).argsort(dim=-1, stable=True))
        counts.copy_(torch.stack([plain.sum(-1), kept.sum(-1)], -1))


def _any_of_tiles(x: Tensor) -> Tensor:
    """[B, H, N / KEYS] of x [B, H, rows, N]."""
    columns = x.any(2)
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % KEYS))
    return padded.unflatten(-1, (-1, KEYS)).any(-1)


__all__ = ["KEYS", "ORDER_KEYS", "QUERIES", "ROWS", "Mask", "Request", "mask_of", "request", "wanted_on"]
