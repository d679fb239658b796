"""Repairs Triton 3.6's interpreter for bfloat16: `tl.dot` multiplies bit patterns instead of values, and casts from
float32 truncate where the GPU rounds to nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _values(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _rounded(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)


def repair() -> None:
    convert = interpreter._convert_float

    def convert_float(x: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            return _rounded(x)
        return convert(x, source, target, rounding_mode)

    interpreter._convert_float = convert_float
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            product = np.matmul(_values(a), _values(b), dtype=d.data.dtype)
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
        return original(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.create_dot = create_dot
    np.seterr(all="ignore")  # inf - inf is what attention does to masked rows
