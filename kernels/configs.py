"""Tile sizes: what each kernel tries first for a head dimension and dtype, and what it falls back to."""

from __future__ import annotations

from typing import NamedTuple

# Larger head dimensions are read chunk by chunk instead of held, and the columns of a result are shared out in slices,
# each computing the scores again. By the operands' itemsize: float32 as three tf32 products needs registers.
STREAM_ABOVE = {2: 256, 4: 64}
STREAM_CHUNK, STREAM_SLICE = 64, 128
STREAM_TILES = {2: 256, 4: 128}  # the head dimension whose tiles suit a streaming kernel


class Tile(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int


def chunks(dim: int) -> tuple[int, ...]:
    """Power-of-two chunks that cover `dim`, at most three, none below 16: 80 -> (64, 16), 112 -> (64, 32, 16)."""
    parts: list[int] = []
    rest = dim
    while rest > 0:
        part = 1 << (rest.bit_length() - 1)  # largest power of two that rest fills
        if part < 16 or len(parts) == 2:
            part = max(16, 1 << (rest - 1).bit_length())
        parts.append(part)
        rest -= part
    whole = max(16, 1 << (dim - 1).bit_length())
    return (whole,) if sum(parts) >= whole else tuple(parts)


# kernel -> [(largest head dimension, tiles from the first choice to the last resort)], for 16-bit operands and for
# float32
_LAST = [Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)]
_TABLE: dict[tuple[str, int], list[tuple[int, list[Tile]]]] = {
    ("forward", 2): [
        (64, [Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)]),
        (128, [Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)]),
        (256, [Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)]),
    ],
    ("forward", 4): [
        (64, [Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)]),
        (128, [Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)]),
    ],
    ("backward_kv", 2): [
        (64, [Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)]),
        (128, [Tile(64, 128, 8, 2), Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)]),
        (256, [Tile(32, 64, 8, 1), Tile(32, 32, 4, 1)]),
    ],
    ("backward_kv", 4): [
        (64, [Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)]),
        (128, [Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)]),
    ],
    ("backward_q", 2): [
        (64, [Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)]),
        (128, [Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)]),
        (256, [Tile(64, 32, 8, 1), Tile(32, 32, 4, 1)]),
    ],
    ("backward_q", 4): [
        (64, [Tile(64, 32, 4, 2), Tile(32, 32, 8, 1)]),
        (128, [Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)]),
    ],
}


def tiles(kernel: str, dim: int, itemsize: int) -> list[Tile]:
    """From the first choice to the last resort; `dim` is the larger of the held head dimensions."""
    kernel = "backward_q" if kernel == "backward_capture" else kernel
    for largest, choices in _TABLE[kernel, itemsize]:
        if dim <= largest:
            return [*choices, *_LAST]
    raise ValueError(f"no tiles for head dimension {dim}")
