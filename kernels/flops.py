"""What torch.utils.flop_counter counts for the operator and its backward, registered on import.

As torch's formulas for scaled_dot_product_attention do: two products forward, 2 B H M N (D + Dv), and five backward, as
the scores are computed again; what a mask removes is counted, what the score program adds is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]


def forward_flop(
    q: Shape, k: Shape, v: Shape, captures: Any, sizes: Any, score: str, keep: str, fill: float, post: str,
    dropout_p: float, seed: Any, layout: str, rows: str, keys: int | None, *args: Any, out_shape: Any = None,
    **kwargs: Any,
) -> int:  # fmt: skip
    """Of torch.ops.torchflash.attention, from the shapes of its operands and the number of keys."""
    B, H, M, D = q
    return 2 * B * H * M * (k[2] if keys is None else keys) * (D + v[-1])


def backward_flop(do: Shape, q: Shape, k: Shape, v: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of torch.ops.torchflash.attention_backward: s, dq and dk over D, dp and dv over Dv."""
    B, H, M, D = q
    return 2 * B * H * M * k[2] * (3 * D + 2 * v[3])


for _op, _formula in (
    (torch.ops.torchflash.attention, forward_flop),
    (torch.ops.torchflash.attention_backward, backward_flop),
):
    if _op not in flop_registry:
        register_flop_formula(_op)(_formula)
