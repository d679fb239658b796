"""Tile sizes: what each kernel tries first for a head dimension and dtype, and what it falls back to."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchflash import score as sc
from torchflash.kernels.forms import Form, spans

# Larger head dimensions are read chunk by chunk instead of held, and the columns of a result are shared out in slices,
# each computing the scores again. By the operands' itemsize: float32 as three tf32 products needs registers.
STREAM_ABOVE = {2: 256, 4: 64}
STREAM_CHUNK, STREAM_SLICE = 64, 128
STREAM_TILES = {2: 256, 4: 128}  # the head dimension whose tiles suit a streaming kernel


LARGEST_BLOCK = 256  # of queries or keys
BLOCK = (64, 64)  # of a mask by blocks: tiles as large are plain or empty


class Tile(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int

    def replaced(self, fixed: Mapping[str, int]) -> Tile:
        """With what the user fixed: BLOCK_M, BLOCK_N, num_warps, num_stages."""
        names = {"BLOCK_M": "block_m", "BLOCK_N": "block_n", "num_warps": "warps", "num_stages": "stages"}
        return self._replace(**{names[k]: v for k, v in fixed.items()})


@functools.cache
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


def kind(form: Form, itemsizes: Sequence[int]) -> str:
    """What a kernel's tiles depend on besides sizes: "full" or "masked" (with a tile map); "vector" where the mask
    loads vectors along the keys, "blocks" where it is a tensor of one element for each BLOCK, "read" or "wide" where it
    is one as large as the scores, of 1 or 2 bytes an element or of more; "bias" where such a tensor is added, "heavy"
    where vectors are loaded into every tile. `itemsizes` are those of the captured tensors."""
    loads = [sc.names(x) for x in sc.loads(form.body)]
    if any({"m", "n"} <= names for names in loads):
        return "bias"
    if any({"m", "n"} & names for names in loads):
        return "heavy"
    keep = form.program.keep
    if keep is None:
        return "full"
    loaded = {x: sc.names(x) for x in sc.loads(keep)}
    tensors = [x for x, names in loaded.items() if {"m", "n"} <= names]
    if tensors and not spans(tensors, BLOCK):
        return "blocks"
    if tensors:
        return "read" if max(itemsizes[int(x.value[1:])] for x in tensors) <= 2 else "wide"
    return "vector" if any("n" in names for names in loaded.values()) else "masked"


# (kernel, itemsize) -> [(largest head dimension, tiles from the first choice to the last resort)]
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
    ("split", 2): [
        (64, [Tile(16, 128, 4, 3), Tile(16, 64, 4, 2)]),
        (128, [Tile(16, 128, 4, 2), Tile(16, 64, 4, 2)]),
        (256, [Tile(16, 32, 4, 3), Tile(16, 32, 4, 2)]),
    ],
    ("split", 4): [
        (64, [Tile(16, 64, 4, 2)]),
        (128, [Tile(16, 32, 4, 2)]),
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
# First choices on sm_90 for 16-bit operands of a power-of-two head dimension, by kind of program; None: any other kind.
# Measured on an H200 (triton 3.6, bf16, 16k tokens in sequences of 4096 and 8192, hidden size 2048).
_HOPPER: dict[str, dict[int, dict[str | None, Tile]]] = {
    "forward": {
        # 128 elements are so many that 4 warps load them in an order of their own, into which the scores then move
        64: {
            None: Tile(64, 128, 4, 2), "bias": Tile(128, 64, 4, 3), "heavy": Tile(64, 64, 4, 2),
            "vector": Tile(64, 64, 4, 2), "blocks": Tile(64, 64, 4, 2),
        },
        128: {
            None: Tile(128, 64, 4, 2), "bias": Tile(128, 128, 8, 2), "heavy": Tile(64, 64, 4, 2),
            "wide": Tile(64, 64, 4, 2), "blocks": Tile(64, 64, 4, 2),
        },
        256: {None: Tile(128, 64, 8, 2)},
    },
    "backward_kv": {
        64: {
            None: Tile(64, 64, 4, 2), "full": Tile(64, 64, 4, 3), "masked": Tile(128, 64, 4, 2),
            "vector": Tile(128, 64, 4, 2),
        },
        128: {None: Tile(64, 64, 4, 2)},
        256: {None: Tile(64, 64, 8, 2)},
    },
    "backward_q": {
        64: {
            None: Tile(64, 64, 4, 2), "full": Tile(128, 64, 4, 3), "bias": Tile(64, 64, 4, 3),
            "wide": Tile(64, 128, 4, 2),
        },
        128: {None: Tile(64, 64, 4, 2), "full": Tile(128, 64, 8, 3), "bias": Tile(128, 64, 8, 3)},
        256: {None: Tile(128, 32, 8, 2)},
    },
    "backward_capture": {64: {None: Tile(64, 64, 4, 3)}, 128: {None: Tile(64, 128, 8, 2)}},
}


def tiles(
    kernel: str, dim: int, itemsize: int, form: Form, itemsizes: Sequence[int], hopper: bool
) -> list[Tile]:
    """From the first choice to the last resort; `dim` is the larger of the held head dimensions, `hopper` whether it is
    read by the tensor memory accelerator of sm_90."""
    table = _TABLE["backward_q" if kernel == "backward_capture" else kernel, itemsize]
    choices = next((c for largest, c in table if dim <= largest), None)
    if choices is None:
        raise ValueError(f"no tiles for head dimension {dim}")
    if hopper and itemsize == 2:
        first = next((t for largest, t in _HOPPER.get(kernel, {}).items() if dim <= largest), None)
        if first is not None:
            choices = [first.get(kind(form, itemsizes), first[None]), *choices]
    return [*choices, *_LAST]
