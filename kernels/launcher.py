"""Starts Triton kernels at little cost to the host.

Triton works out at every launch what it compiles for: the type, the divisibility and the value 1 of each of some
seventy arguments. Here the caller gives a key from which all of that follows; the first launch of a key goes through
Triton, and later ones hand the arguments straight to the compiled kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver

REMEMBERED = 4096
_started: OrderedDict[Any, Started] = OrderedDict()


class Spilling(Exception):
    """A kernel that needs far more registers than there are: `words` of 4 bytes a thread live in memory."""

    def __init__(self, words: int):
        super().__init__(f"{words} registers of a thread live in memory")
        self.words = words


class Started:
    """A compiled kernel, its grid, and its arguments but those that change from call to call."""

    __slots__ = ("arguments", "changing", "compiled", "grid")

    def __init__(
        self, kernel: Any, compiled: Any, grid: int, arguments: Mapping[str, Any], changing: Mapping[str, Any]
    ):
        self.compiled, self.grid = compiled, grid
        self.arguments = [None if name in changing else arguments[name] for name in kernel.arg_names]
        self.changing = [(i, name) for i, name in enumerate(kernel.arg_names) if name in changing]

    def again(self, changing: Mapping[str, Any]) -> None:
        arguments = self.arguments.copy()
        for i, name in self.changing:
            arguments[i] = changing[name]
        compiled, grid = self.compiled, self.grid
        stream = driver.active.get_current_stream(device())
        enter, leave, metadata = hook(knobs.runtime.launch_enter_hook), hook(knobs.runtime.launch_exit_hook), None
        if enter is not None:
            metadata = compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *arguments
        )  # fmt: skip


def hook(chain: Any) -> Any:
    """None for a chain of hooks with nothing in it, which the launcher would call all the same."""
    return chain if getattr(chain, "calls", chain) else None


def start(
    kernel: Any,
    key: Any,
    grid: int,
    changing: Mapping[str, Any],
    others: Callable[[], Mapping[str, Any]],
    spills: int | None = None,
) -> Started | None:
    """Launch `kernel` on a grid of one dimension. `key` decides, together with the kernel, the grid, `others`
    (arguments and options, asked for at the first launch only) and what Triton specialises on in `changing`: types, and
    whether addresses are multiples of 16. With the key None, what is returned is for the caller to keep instead.

    Raises triton.runtime.errors.OutOfResources where the kernel does not fit the device, and Spilling, before it is
    launched, where it spills more than `spills` words.
    """
    if key is not None:  # a compiled kernel belongs to a device
        key = (getattr(kernel, "__name__", None), None if interpreting() else device(), key)
    known = _started.get(key)
    if known is not None:
        known.again(changing)
        return known
    arguments = {**others(), **changing}
    if spills is not None and isinstance(kernel, triton.JITFunction):
        compiled = kernel.warmup(grid=(grid,), **arguments)
        compiled._init_handles()
        if compiled.n_spills > spills:
            raise Spilling(compiled.n_spills)
    compiled = kernel[(grid,)](**arguments)
    if not hasattr(compiled, "packed_metadata"):  # interpreted, or a stand-in
        return None
    started = Started(kernel, compiled, grid, arguments, changing)
    if key is not None:
        _started[key] = started
        if len(_started) > REMEMBERED:
            _started.popitem(last=False)
    return started


def device() -> int:
    return int(driver.active.get_current_device())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)
