"""Builds tile maps (visits.py): the states of tiles, and the orders in which the kernels of one attention visit them.

States that depend on data come with the call, from torch.ops.torchflash.tile_map (mask.py), or are found here. Orders
that depend on indices alone are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchflash import score as sc
from torchflash.kernels import lower, mask, replay
from torchflash.kernels.forms import Form, spans
from torchflash.kernels.launcher import Started, cdiv, device_guard, start
from torchflash.kernels.mask import KEYS, ORDER_KEYS, ROWS, Mask
from torchflash.kernels.memory import empty
from torchflash.kernels.visits import SIZES, needy_rows, tile_order, tile_states

if TYPE_CHECKING:
    from torchflash.kernels.configs import Tile
    from torchflash.kernels.operands import Operands
    from torchflash.kernels.reference import Problem

REMEMBERED = 64
WIDTH = 128  # tiles a program of `tile_order` looks at together
TOGETHER = 1024  # keys of a program of `tile_states`
LOOKED_AT = 512  # the same where it looks at the mask
ELEMENTS = 4096  # that it looks at together
_known: OrderedDict[Any, dict[str, Any]] = OrderedDict()
_finders: OrderedDict[Any, States] = OrderedDict()


def strides_and_sizes(captures: Sequence[Tensor]) -> tuple[int, ...]:
    """The S of generated functions."""
    return tuple(x for c in captures for x in c.stride()) + tuple(x for c in captures for x in c.shape)


def pointers(captures: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The T of generated functions: of no elements nothing is read, but Triton wants an address."""
    return tuple([c if c.numel() else c.new_zeros(1) for c in captures])


class Starting:
    """Kernels of the same shapes, strides, dtypes and programs, which a key tells apart."""

    def __init__(self) -> None:
        self.started: dict[Any, Started] = {}

    def start(
        self, kernel: Any, key: Any, grid: int, changing: dict[str, Any], others: Callable[[], dict[str, Any]]
    ) -> None:
        """As launcher.start, for a key that decides all the rest."""
        key = (kernel.__name__, key)
        known = self.started.get(key)
        if known is not None:
            known.again(changing)
        elif (known := start(kernel, grid, changing, others)) is not None:
            self.started[key] = known


class States(Starting):
    """Finds the states of tiles of one mask, for captures of the same shapes, strides and dtypes."""

    def __init__(
        self, mask: Mask, captures: Sequence[Tensor], sizes: dict[str, int], shape: Sequence[int], S: tuple[int, ...]
    ):
        super().__init__()
        self.mask, self.sizes, self.S = mask, sizes, S
        self.batches, self.heads, self.M, self.N = shape
        self.ranks = tuple(c.dim() for c in captures)
        self.loads = mask.loads

    def find(self, blocks: tuple[int, int], T: tuple[Tensor, ...], states: Tensor, uneven: Tensor | None) -> None:
        """Fills `states` [batches, heads, rows, columns] int8 of tiles of `blocks`, and marks rows in `uneven`."""
        rows, columns = states.shape[2:]
        loads = sc.loads(*self.mask.expressions)
        of_rows = spans(loads, blocks)
        width = max(1, (LOOKED_AT if of_rows or uneven is not None else TOGETHER) // blocks[1])
        if not of_rows and uneven is None and not any("n" in sc.names(x) and "m" not in sc.names(x) for x in loads):
            width = WIDTH  # of each tile, nothing is read but for all its keys together

        def others() -> dict[str, Any]:
            keys = width * blocks[1]
            return {
                "S": self.S, "HEADS": self.heads, "M": self.M, "N": self.N, **self.sizes,
                **self._functions(blocks, of_rows, uneven is not None), "TAIL": self.N % keys > 0,
                "BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "ROWS": min(blocks[0], max(1, ELEMENTS // keys)),
                "TILES": width,
            }  # fmt: skip

        grid = self.batches * self.heads * rows * cdiv(columns, width)
        changing = {"STATES": states, "UNEVEN": uneven, "T": T}
        self.start(tile_states, (blocks, uneven is None), grid, changing, others)

    def _functions(self, blocks: tuple[int, int], of_rows: bool, marks: bool) -> dict[str, Any]:
        kinds, keep, plain, ranks = self.mask.kinds, self.mask.keep, self.mask.plain, self.ranks
        value = self.mask.value if marks else None
        ranges = lower.range_function(kinds, keep, plain, value, ranks, blocks)
        exact = of_rows and lower.is_exact(keep)
        looks = ranges is None or (marks and not exact)
        return {
            "RANGES": ranges, "OF_ROWS": of_rows, "EXACT": exact,
            "VALUE": None if value is None else lower.masked_function(kinds, value, ranks),
            "KEEP": lower.condition_function(kinds, keep, ranks) if looks else None,
            "PLAIN": lower.condition_function(kinds, plain, ranks) if looks and plain is not None else None,
            "MAY_KEEP": lower.bound_function(keep) if ranges is None else None,
        }  # fmt: skip


def fill(
    mask: Mask, captures: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], found: Sequence[Tensor]
) -> None:
    """What torch.ops.torchflash.tile_map launches."""
    layouts = tuple([(c.shape, c.stride(), c.dtype, c.data_ptr() % 16) for c in captures])
    key = (mask, captures[0].device, layouts, *sizes, *shape)
    finder = _finders.get(key)
    if finder is None:
        named = dict(zip(SIZES, [*map(int, sizes), *[0] * (len(SIZES) - len(sizes))], strict=True))
        finder = _finders[key] = States(mask, captures, named, shape, strides_and_sizes(captures))
        if len(_finders) > REMEMBERED:
            _finders.popitem(last=False)
    states, *rest = found
    with device_guard(states.device):
        finder.find((ROWS, KEYS), pointers(captures), states, rest[0] if mask.rows else None)
        if mask.order:
            order(finder, None, states, (ROWS, KEYS), (ROWS, ORDER_KEYS), shape[2:], False, True, *rest)


def order(
    starting: Starting, key: Any, states: Tensor, of: tuple[int, int], blocks: tuple[int, int], lengths: Sequence[int],
    columns: bool, run: bool, order: Tensor, counts: Tensor, merged: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `order` [batches, heads, lines, tiles] and `counts` [batches, heads, lines, 2] for tiles of `blocks`, from
    the states `of` tiles of another size, powers of two; lines are rows of tiles, or `columns`."""
    lines, tiles = order.shape[2:]
    given, strides, whole = states.shape[2:], (states.shape[3], 1), lengths[1] // blocks[1]
    (line, tile), (line_of, tile_of) = blocks, of
    if columns:
        given, strides, whole = given[::-1], strides[::-1], lengths[0] // blocks[0]
        line, tile, line_of, tile_of = tile, line, tile_of, line_of

    def others() -> dict[str, Any]:
        return {
            "lines": lines, "tiles": tiles, "whole": whole, "given_lines": given[0], "given_tiles": given[1],
            "to_line": strides[0], "to_tile": strides[1], "LINE_PARTS": max(1, line // line_of),
            "LINE_SPLIT": max(1, line_of // line), "TILE_PARTS": max(1, tile // tile_of),
            "TILE_SPLIT": max(1, tile_of // tile), "RUN": run, "WIDTH": WIDTH, "num_warps": 1,
        }  # fmt: skip

    changing = {"STATES": states, "MERGED": merged, "ORDER": order, "COUNTS": counts}
    starting.start(tile_order, (key, of), counts.numel() // 2, changing, others)


class Maps(Starting):
    """The tile maps of all attentions of the same shapes, strides, dtypes and programs. What follows from those is
    found out once; a call keeps what was made for it in `Operands.made`."""

    def __init__(self, form: Form, p: Problem, S: tuple[int, ...], sizes: dict[str, int]):
        super().__init__()
        found = mask.mask_of(form)
        assert found is not None
        self.form, self.mask = form, found
        self.M, self.N, self.lines, self.device = p.M, p.N, p.B * p.H, p.q.device
        self.loads = found.loads
        if p.tile_map:
            self.batches, self.heads = p.tile_map[0].shape[:2]
        else:
            axes = found.axes(mask.expanded_dims(p.captures))
            self.batches = p.B if "b" in axes else 1
            self.heads = p.H if "h" in axes else 1
        layouts = tuple((c.dtype, c.data_ptr() % 16 == 0) for c in p.captures)
        self.key = (form, self.M, self.N, self.batches, self.heads, S, layouts, *sizes.values())
        self.states = States(found, p.captures, sizes, (self.batches, self.heads, self.M, self.N), S)

    def of_rows(self, tile: Tile, o: Operands) -> dict[str, Any]:
        """For kernels of query rows: the order of the key tiles of each row of tiles."""
        found = self._order((tile.block_m, tile.block_n), False, o)
        return {k: found[k] for k in ("ORDER", "COUNTS", "line_b", "line_h", "RUN")}

    def of_columns(self, tile: Tile, o: Operands, lse: Tensor, statistics: Tensor) -> dict[str, Any]:
        """For the kernel of keys: the order of the query tiles of each column, and the rows that need all columns."""
        tiles = cdiv(self.M, tile.block_m)
        needy = empty(lse, (self.lines, tiles), torch.int32)
        counts = empty(lse, (self.lines,), torch.int32)

        def others() -> dict[str, Any]:
            return {
                "M": self.M, "length": statistics.shape[2], "fill": self.form.fill, "BLOCK_M": tile.block_m,
                "WIDTH": 16,
            }  # fmt: skip

        changing = {"LSE": lse, "ROWS": statistics, "NEEDY": needy, "COUNTS": counts}
        self.start(needy_rows, tile.block_m, self.lines, changing, others)
        return {**self._order((tile.block_m, tile.block_n), True, o), "NEEDY": needy, "NEEDY_COUNTS": counts}

    def _order(self, blocks: tuple[int, int], columns: bool, o: Operands) -> dict[str, Any]:
        given, key = o.problem.tile_map, (*blocks, columns)
        if len(given) == 3 and not columns and self.M <= blocks[0] and blocks[1] == ORDER_KEYS:
            return self._found(*given, run=True)
        if key in o.made:
            found: dict[str, Any] = o.made[key]
            return found
        # What depends on indices alone is the same at every call. On other streams, where graphs are captured and
        # memory may belong to one, it is made every time.
        lasting = None
        if not self.loads and (self.device.type != "cuda" or not torch._C._cuda_getCurrentRawStream(self.device.index)):
            lasting = (self.key, self.device, key)
            if lasting in _known:
                _known.move_to_end(lasting)
                if (recording := replay.current()) is not None:
                    for name in ("STATES", "ORDER", "COUNTS"):
                        recording.same(_known[lasting][name])
                return _known[lasting]
        states, of = self._states(blocks, o)
        rows, cols = cdiv(self.M, blocks[0]), cdiv(self.N, blocks[1])
        lines, tiles = (cols, rows) if columns else (rows, cols)
        visits = empty(o.problem.q, (self.batches, self.heads, lines, tiles), torch.int32)
        counts = empty(o.problem.q, (self.batches, self.heads, lines, 2), torch.int32)
        merged = None
        if columns and of != blocks:
            merged = empty(o.problem.q, (self.batches, self.heads, rows, cols), torch.int8)
        order(self, key, states, of, blocks, (self.M, self.N), columns, not self.loads, visits, counts, merged)
        found = o.made[key] = self._found(states if merged is None else merged, visits, counts, not self.loads)
        if lasting is not None:
            _known[lasting] = found
            if len(_known) > REMEMBERED:
                _known.popitem(last=False)
        return found

    def _found(self, states: Tensor, order: Tensor, counts: Tensor, run: bool) -> dict[str, Any]:
        lines = order.shape[2]
        return {
            "STATES": states, "ORDER": order, "COUNTS": counts, "line_b": lines * self.heads if self.batches > 1 else 0,
            "line_h": lines if self.heads > 1 else 0, "RUN": run,
        }  # fmt: skip

    def _states(self, blocks: tuple[int, int], o: Operands) -> tuple[Tensor, tuple[int, int]]:
        """States of tiles, and the sizes of these tiles. Marks rows that are not even, if asked."""
        given = o.problem.tile_map
        if given:
            if o.even is not None and o.uneven is None and len(given) == 2:
                o.uneven = given[1]
            return given[0], (ROWS, KEYS)
        if blocks not in o.made:
            shape = (self.batches, self.heads, cdiv(self.M, blocks[0]), cdiv(self.N, blocks[1]))
            o.made[blocks] = states = empty(o.problem.q, shape, torch.int8)
            self.states.find(blocks, o.T, states, self._uneven(o))
        found: Tensor = o.made[blocks]
        return found, blocks

    def _uneven(self, o: Operands) -> Tensor | None:
        """[batches, heads, M] int8, for rows that are not even to be marked; None where nobody asks for it."""
        if o.even is None:
            return None
        if o.uneven is None:
            o.uneven = empty(o.problem.q, (self.batches, self.heads, self.M), torch.int8, zero=True)
        return o.uneven

