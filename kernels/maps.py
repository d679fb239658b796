"""Builds the tile maps of one attention (visits.py) and remembers those that depend on indices alone."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels import even, lower
from torchflash.kernels.forms import Form
from torchflash.kernels.launcher import cdiv, start
from torchflash.kernels.visits import needy_rows, tile_order, tile_states
from torchflash.score import Expr

if TYPE_CHECKING:
    from torchflash.kernels.configs import Tile
    from torchflash.kernels.even import Shape
    from torchflash.kernels.reference import Problem

REMEMBERED = 64
WIDTH = 128  # tiles a program of `tile_states` or `tile_order` looks at together
_known: OrderedDict[Any, dict[str, Any]] = OrderedDict()


class Mask:
    """What of a mask follows from shapes and strides: the axes it varies along, whether it loads, its functions."""

    def __init__(self, form: Form, problem: Problem):
        self.form = form
        keep, plain = form.program.keep, form.plain
        assert keep is not None
        both = [keep] if plain is None else [keep, plain]
        self.loads = bool(sc.loads(*both))
        axes = set().union(*(_axes(e, problem) for e in both))
        self.batches = problem.B if "b" in axes else 1
        self.heads = problem.H if "h" in axes else 1
        self.ranks = tuple(c.dim() for c in problem.captures)

    def functions(self) -> dict[str, Any]:
        plain = self.form.plain is not None
        return {
            "KEEP": lower.value_function(self.form, "keep", self.ranks, False),
            "PLAIN": lower.value_function(self.form, "plain", self.ranks, False) if plain else None,
            "MAY_KEEP": lower.bound_function(self.form, "may_keep"),
            "MUST_BE_PLAIN": lower.bound_function(self.form, "must_be_plain") if plain else None,
            "LOADS": self.loads,
        }


def _axes(e: Expr, problem: Problem) -> set[str]:
    """The indices that `e` varies with; a tensor that is expanded does not vary along that axis."""
    if e.op == "name":
        return {e.value}
    args = e.args
    if e.op == "load":
        steps = problem.captures[int(e.value[1:])].stride()
        args = tuple(a for a, step in zip(args, steps, strict=True) if step)
    return set().union(*(_axes(a, problem) for a in args))


class Maps:
    """The maps of one attention, each made once: `of_rows` and `of_columns` are kernel arguments."""

    def __init__(self, mask: Mask, T: tuple[Tensor, ...], S: tuple[int, ...], sizes: dict[str, int], problem: Problem):
        self.mask, self.T, self.S, self.sizes, self.problem = mask, T, S, sizes, problem
        self.made: dict[Any, Any] = {}
        self.even: Shape | None = None  # whose rows are to be marked
        self.uneven: Tensor | None = None  # [batches, heads, M]
        layouts = tuple((c.dtype, c.data_ptr() % 16 == 0) for c in T)
        self.key = (mask.form, problem.M, problem.N, mask.batches, mask.heads, S, layouts, *sizes.values())

    def of_rows(self, tile: Tile) -> dict[str, Any]:
        """For kernels of query rows: the order of the key tiles of each row of tiles."""
        found = self._order(tile, columns=False)
        return {k: found[k] for k in ("ORDER", "COUNTS", "line_b", "line_h")}

    def of_columns(self, tile: Tile, lse: Tensor, statistics: Tensor) -> dict[str, Any]:
        """For the kernel of keys: the order of the query tiles of each column, and the rows that need all columns."""
        p = self.problem
        lines, tiles = p.B * p.H, cdiv(p.M, tile.block_m)
        needy = torch.empty((lines, tiles), dtype=torch.int32, device=lse.device)
        counts = torch.empty(lines, dtype=torch.int32, device=lse.device)

        def others() -> dict[str, Any]:
            fill, length = self.mask.form.fill, statistics.shape[2]
            return {"M": p.M, "length": length, "fill": fill, "BLOCK_M": tile.block_m, "WIDTH": 16}

        changing = {"LSE": lse, "ROWS": statistics, "NEEDY": needy, "COUNTS": counts}
        start(needy_rows, (self.mask.form, p.M, lines, tile.block_m), lines, changing, others)
        return {**self._order(tile, columns=True), "NEEDY": needy, "NEEDY_COUNTS": counts}

    def _order(self, tile: Tile, columns: bool) -> dict[str, Any]:
        blocks = (tile.block_m, tile.block_n)
        key = (*blocks, columns)
        if key in self.made:
            return self.made[key]
        p, mask = self.problem, self.mask
        device = p.q.device
        # What depends on indices alone is the same at every call. On other streams, where graphs are captured and
        # memory may belong to one, it is made every time.
        lasting = None
        if not mask.loads and (device.type != "cuda" or torch.cuda.current_stream(device).cuda_stream == 0):
            lasting = (self.key, device, key)
            if lasting in _known:
                _known.move_to_end(lasting)
                return _known[lasting]
        states = self._states(blocks)
        rows, cols = states.shape[2:]
        lines, tiles, strides = (cols, rows, (1, cols)) if columns else (rows, cols, (cols, 1))
        order = torch.empty((mask.batches, mask.heads, lines, tiles), dtype=torch.int32, device=device)
        counts = torch.empty((mask.batches, mask.heads, lines, 2), dtype=torch.int32, device=device)

        def others() -> dict[str, Any]:
            whole = p.M // blocks[0] if columns else p.N // blocks[1]
            return {
                "lines": lines, "tiles": tiles, "whole": whole, "to_line": strides[0], "to_tile": strides[1],
                "WIDTH": WIDTH, "num_warps": 1,
            }  # fmt: skip

        changing = {"STATES": states, "ORDER": order, "COUNTS": counts}
        start(tile_order, (self.key, key), mask.batches * mask.heads * lines, changing, others)
        found = self.made[key] = {
            "STATES": states, "ORDER": order, "COUNTS": counts,
            "line_b": lines * mask.heads if mask.batches > 1 else 0, "line_h": lines if mask.heads > 1 else 0,
        }  # fmt: skip
        if lasting is not None:
            _known[lasting] = found
            if len(_known) > REMEMBERED:
                _known.popitem(last=False)
        return found

    def _states(self, blocks: tuple[int, int]) -> Tensor:
        if blocks in self.made:
            return self.made[blocks]
        p, mask = self.problem, self.mask
        rows, cols = cdiv(p.M, blocks[0]), cdiv(p.N, blocks[1])
        states = torch.empty((mask.batches, mask.heads, rows, cols), dtype=torch.int8, device=p.q.device)
        steps = cols if mask.loads else cdiv(cols, WIDTH)
        if self.even is not None and self.uneven is None:
            self.uneven = torch.zeros((mask.batches, mask.heads, p.M), dtype=torch.int8, device=p.q.device)

        def others() -> dict[str, Any]:
            masked = self.even.value if self.even is not None else None
            return {
                "MASKED": None if masked is None else even.value_function(mask.form, masked, mask.ranks),
                "S": self.S, "HEADS": mask.heads, "M": p.M, "N": p.N, **self.sizes, **mask.functions(),
                "BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "ROWS": min(blocks[0], max(16, 2048 // blocks[1])),
                "WIDTH": WIDTH,
            }  # fmt: skip

        grid = mask.batches * mask.heads * rows * steps
        changing = {"STATES": states, "UNEVEN": self.uneven, "T": self.T}
        start(tile_states, (self.key, blocks, self.even), grid, changing, others)
        self.made[blocks] = states
        return states
