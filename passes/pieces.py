"""Keys, or values, that are in pieces: scores put end to end before the softmax, weights taken apart after it.

    p = softmax(cat([q @ k1.T, q @ k2.T], -1))          p = softmax(q @ cat([k1, k2]).T)
    o = p[:, :g] @ v1 + p[:, g:] @ v2             ->    o = p @ cat([v1, v2])

A piece is an operand with zeros where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchflash.passes import index as ix
from torchflash.passes.contraction import Operand
from torchflash.passes.index import Index


def end_to_end(pieces: Sequence[Operand], n: Index) -> tuple[Operand, ...] | None:
    """The pieces in their order along the axis `n`; None where they do not make it up. One alone may leave zeros."""
    if len(pieces) == 1:
        return tuple(pieces)
    size, start = ix.axis_size(n), ix.ZERO
    left, ordered = list(pieces), []
    while left:
        piece = next((o for o in left if ix.sympy.expand(_zeros(o)[0] - start) == 0), None)
        if piece is None:
            return None
        left.remove(piece)
        ordered.append(piece)
        start = ix.sympy.expand(size - _zeros(piece)[1])
    return tuple(ordered) if ix.sympy.expand(start - size) == 0 else None


def _zeros(o: Operand) -> tuple[Index, Index]:
    """How many there are before and behind the piece."""
    return o.pads[0][1:] if o.pads else (ix.ZERO, ix.ZERO)
