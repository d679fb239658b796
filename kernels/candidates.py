"""Which tiles are worth trying for a kernel, and what of the chip each will take, before anything is compiled.

A GPU's thread block lives on its multiprocessor's shared memory and registers. What a kernel takes of them follows from
its algorithm: `held` operands stay for its whole loop, `streamed` ones come once an iteration and are read ahead, and
accumulators, scores and their gradients are spread over the threads' registers.

                 held            streamed        accumulators              tiles of scores
    forward      q               k, v            out [BLOCK_M, DV]         s, p
    backward_kv  k, v            q, do           dk, dv [BLOCK_N, D + DV]  s, p, dp, ds
    backward_q   q, do           k, v            dq [BLOCK_M, D]           s, p, dp, ds

    shared memory = held + streamed · buffers + tensors added to scores [BLOCK_M, BLOCK_N] · (num_stages - 1)
        buffers: num_stages with wgmma (sm_90, 64 rows a product), which reads shared memory while it computes, else
        num_stages - 1, at least 1. One stage of the forward holds k and v in turn. With float32 as three products of
        tf32 both parts of what is held are there. Where the head dimension is streamed, instead of all that chunks of
        the two operands of one product.
    registers of a thread = 40 + (accumulators + scores in float32 and in the operands' dtype) / threads
        without wgmma also + 20 + held / threads, for three products of tf32 + 80

The compiler adds alignment, barriers, scratch for changes of layout, and what the score program needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchflash.kernels.configs import STREAM_CHUNK, STREAM_SLICE, Tile

# What a thread block may take of shared memory, in bytes, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability": the maximum of a multiprocessor less 1 KiB).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
REGISTERS = 255  # of a thread, at most
SPILLED = 1.25  # of REGISTERS by the estimate, which is rough, may yet be fastest
BLOCKS, WARPS, STAGES = (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)
LEAST_SCORES = 16  # of a thread: with fewer, threads wait for each other more than they compute


def shared_limit(capability: int) -> int:
    """Bytes of shared memory for a thread block; of an unknown GPU, those of the nearest older known one."""
    older = [c for c in SHARED_LIMIT if c <= capability]
    return SHARED_LIMIT[max(older, default=min(SHARED_LIMIT))]


@dataclass(frozen=True)
class Work:
    """What the estimates depend on besides the tile. D and DV are held head dimensions, multiples of 16; `itemsize` is
    that of the operands in bytes, `bias` that of the tensors that are as large as the scores; `capability` is 90 for
    sm_90; `stream`: head dimensions are read in chunks; `split`: float32 is multiplied in parts."""

    M: int
    N: int
    D: int
    DV: int
    itemsize: int
    capability: int
    bias: int = 0
    stream: bool = False
    split: bool = False

    @property
    def wgmma(self) -> bool:
        return self.capability == 90


class Estimate(NamedTuple):
    shared: int  # bytes of a thread block
    registers: int  # of a thread; above 255 some will be spilled

    def fits(self, capability: int) -> bool:
        return self.shared <= shared_limit(capability)


def estimate(kernel: str, tile: Tile, work: Work) -> Estimate:
    """On-chip memory of `kernel` ("forward", "backward_kv", "backward_q", "backward_capture") by the formula above."""
    m, n = tile.block_m, tile.block_n
    d, dv = work.D, work.DV
    rows = n if kernel == "backward_kv" else m
    wgmma = work.wgmma and rows >= 64
    columns, columns_v = (STREAM_SLICE, STREAM_SLICE) if work.stream else (d, dv)
    # one tile of scores is an operand at a time, but that for dv may wait while the one for dk is being made
    if kernel == "forward":
        held, streamed, accumulators, scores, operands = m * d, n * (d + dv), m * columns_v, 1, 1
        if tile.stages == 1:
            streamed = n * max(d, dv)
    elif kernel == "backward_kv":
        held, streamed, accumulators, scores, operands = n * (d + dv), m * (d + dv), n * (columns + columns_v), 2, 2
    else:
        accumulators = m * (n if kernel == "backward_capture" else columns)
        held, streamed, scores, operands = m * (d + dv), n * (d + dv), 2, 1
    if work.stream:
        held, streamed = 0, (m + n) * STREAM_CHUNK
    buffers = tile.stages if wgmma else max(1, tile.stages - 1)
    shared = (held * (2 if work.split else 1) + streamed * buffers) * work.itemsize
    if kernel != "backward_kv":  # there it is not read ahead
        shared += m * n * work.bias * (tile.stages - 1)
    spread = accumulators + m * n * (scores + operands * work.itemsize / 4)
    base = 120 if work.split else 40
    if not wgmma:
        base, spread = base + 20, spread + held * work.itemsize / 4
    return Estimate(shared, base + math.ceil(spread / (32 * tile.warps)))


def candidates(kernel: str, work: Work, first: Tile, fixed: Mapping[str, int] | None = None) -> list[Tile]:
    """Tiles worth trying, the most promising first: `first` (the built-in choice), then by how many steps they are
    from it. What is `fixed` (BLOCK_M, BLOCK_N, num_warps, num_stages) by the user is so in all.

    Left out: what by its estimate does not fit the GPU or spills many registers, what leaves threads little to do, and
    blocks longer than the sequence or, on sm_90, too short for its matrix instruction.
    """
    fixed = fixed or {}
    first = first.replaced(fixed)

    def values(name: str, usual: tuple[int, ...]) -> tuple[int, ...]:
        return (fixed[name],) if name in fixed else usual

    rows = 64 if work.wgmma else 32
    blocks_m = values("BLOCK_M", _blocks(work.M, 32 if kernel == "backward_kv" else rows))
    blocks_n = values("BLOCK_N", _blocks(work.N, rows if kernel == "backward_kv" else 32))
    found = [
        Tile(m, n, warps, stages)
        for m in blocks_m
        for n in blocks_n
        for warps in values("num_warps", WARPS)
        for stages in values("num_stages", STAGES)
    ]
    found = [tile for tile in found if tile != first and _promising(kernel, tile, work)]
    return [first, *sorted(found, key=lambda tile: (_steps(first, tile), tile))]


def _blocks(length: int, least: int) -> tuple[int, ...]:
    longest = min(BLOCKS[-1], max(BLOCKS[0], 1 << max(0, length - 1).bit_length()))
    return tuple(b for b in BLOCKS if min(least, longest) <= b <= longest)


def _promising(kernel: str, tile: Tile, work: Work) -> bool:
    expected = estimate(kernel, tile, work)
    busy = tile.block_m * tile.block_n >= LEAST_SCORES * 32 * tile.warps or tile.warps == WARPS[0]
    return busy and expected.fits(work.capability) and expected.registers <= REGISTERS * SPILLED


def _steps(a: Tile, b: Tile) -> float:
    """Doublings of blocks and warps and stages from a to b."""
    doublings = sum(abs(math.log2(x / y)) for x, y in zip(a[:3], b[:3], strict=True))
    return doublings + abs(a.stages - b.stages)
