"""New tensors at little cost to the host."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

listening = threading.local()  # .recording: what is told of temporary tensors (replay.py)
_empty_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty_strided(like: Tensor, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """On the device of `like`; not a view, so that users may write in place."""
    if type(like) is Tensor and like.is_cuda and _empty_cuda is not None:
        if like.get_device() == torch._C._cuda_getDevice():
            found: Tensor = _empty_cuda(size, stride, dtype)  # as code compiled by Inductor does
            return found
    return like.new_empty_strided(size, stride, dtype=dtype)


def empty(like: Tensor, size: tuple[int, ...], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Contiguous, on the device of `like`, for the kernels of one call; uninitialised, or 0."""
    x = empty_strided(like, size, tuple([math.prod(size[i + 1 :]) for i in range(len(size))]), dtype)
    if (recording := getattr(listening, "recording", None)) is not None:
        recording.temporary(x, zero)
    return x.zero_() if zero else x
