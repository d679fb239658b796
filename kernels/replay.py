"""Calls that launch what an earlier one launched, on other tensors, without working it out again.

What a call of the op launches follows from a key: shapes, strides, dtypes, programs, whether addresses are multiples
of 16. A `Recording` listens while the kernels of one call are started: which argument of which is the address of an
operand, a result, or a temporary tensor. The `Replay` made of it allocates the temporaries and starts the kernels. A
call is not recorded while a kernel is compiled, nor if it launched with a tensor that the recording has not heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchflash.kernels import memory

if TYPE_CHECKING:
    from torchflash.kernels.launcher import Started

TRIES = 4


class Temporary(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


class Launch(NamedTuple):
    """A kernel with its arguments, and where among them the addresses of tensors go, which are numbered."""

    start: Callable[..., None]
    arguments: list[Any]
    tensors: list[tuple[int, int]]
    tuples: list[tuple[int, list[int]]]
    maps: list[tuple[int, Any, int]]


class Replay:
    def __init__(self, recording: Recording):
        self.device, self.watched = recording.device, recording.watched
        self.temporaries, self.launches = recording.temporaries, recording.launches
        self.kept = list(recording.kept.values())  # their addresses are the same in every call

    def run(self, tensors: Sequence[Tensor]) -> bool:
        """False, and nothing done, where somebody watches launches, or another device is the current one."""
        if self.watched() or torch._C._cuda_getDevice() != self.device:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        addresses = [x.data_ptr() for x in tensors]
        temporaries = []
        for size, stride, dtype, zero in self.temporaries:
            x = memory.empty_strided(tensors[0], size, stride, dtype)
            if zero:
                x.zero_()
            temporaries.append(x)
            addresses.append(x.data_ptr())
        for start, fixed, places, tuples, maps in self.launches:
            arguments = fixed.copy()
            arguments[3] = stream
            for i, number in places:
                arguments[i] = addresses[number]
            for i, numbers in tuples:
                arguments[i] = tuple([addresses[number] for number in numbers])
            for i, known, number in maps:
                arguments[i] = known.at(addresses[number])
            start(*arguments)
        return True


class Recording:
    def __init__(self, tensors: Sequence[Tensor]):
        self.numbers: dict[int, int] = {}  # of tensors, by address
        self.temporaries: list[Temporary] = []
        self.launches: list[Launch] = []
        self.kept: dict[int, Tensor] = {}
        self.held: list[Tensor] = []  # so that no address is used twice
        self.device = tensors[0].get_device()
        self.watched: Any = None
        self.complete = True
        for x in tensors:
            self._number(x)

    def _number(self, x: Tensor) -> None:
        address = x.data_ptr()
        if not address or address in self.numbers or x.get_device() != self.device:
            self.complete = False  # one tensor given twice need not be one the next time
        self.numbers[address] = len(self.numbers)

    def temporary(self, x: Tensor, zero: bool) -> None:
        self.held.append(x)
        self._number(x)
        self.temporaries.append(Temporary(tuple(x.shape), x.stride(), x.dtype, zero))

    def same(self, x: Tensor) -> None:
        """`x` will be the same tensor in every call."""
        self.kept[x.data_ptr()] = x

    def launched(self, started: Started, changing: Mapping[str, Any]) -> None:
        if started.direct is None or started.device != self.device:
            self.complete = False
            return
        self.watched = started.watched
        arguments = started.arguments.copy()
        tensors, tuples, maps = [], [], []
        for i, name in started.tensors:
            address = changing[name].data_ptr()
            if address in self.kept:
                arguments[i] = address
            else:
                tensors.append((i, self._find(address)))
        for i, name in started.tuples:
            tuples.append((i, [self._find(x.data_ptr()) for x in changing[name]]))
        for i, name, known in started.maps:
            maps.append((i, known, self._find(changing[name].data_ptr())))
        self.launches.append(Launch(started.direct, arguments, tensors, tuples, maps))

    def _find(self, address: int) -> int:
        number = self.numbers.get(address)
        if number is None:
            self.complete = False
            return 0
        return number

    def replay(self) -> Replay | None:
        if not self.complete or not self.launches:
            return None
        return Replay(self)


def current() -> Recording | None:
    """The recording that listens to what this thread launches."""
    return getattr(memory.listening, "recording", None)


def record(known: dict[Any, Any], key: Any, tensors: Sequence[Tensor], call: Callable[[], Any]) -> Any:
    """What `call` gives; a replay of it is put under `key`, unless it gives None, False or tensors."""
    tries = known.get(key, 0)
    if tries is None or current() is not None:
        return call()
    recording = Recording(tensors)
    memory.listening.recording = recording
    try:
        result = call()
    finally:
        memory.listening.recording = None
    found = recording.replay() if result is True or result == [] else None
    known[key] = found if found is not None else tries + 1 if tries + 1 < TRIES else None
    return result
