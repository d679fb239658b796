"""Starts Triton kernels at little cost to the host.

Triton works out at every launch what it compiles for: the type, the divisibility and the value 1 of each of some
seventy arguments. Here the first launch goes through Triton, and those that the caller knows to be alike hand the
arguments straight to the function that Triton made to start the kernel: addresses as numbers, and tensor maps of
addresses seen before as they are. An unknown triton gets all of them, by `compiled.run`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from torchflash.kernels import replay

ADDRESSES = 256  # whose tensor maps a kernel remembers
CHANGING = (Tensor, tuple, TensorDescriptor)


class Spilling(Exception):
    """A kernel that needs far more registers than there are: `words` of 4 bytes a thread live in memory."""

    def __init__(self, words: int):
        super().__init__(f"{words} registers of a thread live in memory")
        self.words = words


class Started:
    """A compiled kernel, its grid, and its arguments. Of those that change from call to call only tensors do: alone,
    in tuples, or described, where `again` takes the tensor itself."""

    def __init__(
        self, kernel: Any, compiled: Any, grid: int, arguments: Mapping[str, Any], changing: Mapping[str, Any]
    ):
        self.compiled, self.grid, self.device = compiled, grid, device()
        self.names = kernel.arg_names
        self.fixed = {k: v for k, v in arguments.items() if k not in changing or not isinstance(v, CHANGING)}
        self.direct = direct_launch(compiled)
        self.tensors: list[tuple[int, str]] = []
        self.tuples: list[tuple[int, str]] = []
        self.maps: list[tuple[int, str, TensorMaps]] = []
        self.descriptors = {k: based(v, None) for k, v in changing.items() if isinstance(v, TensorDescriptor)}
        if self.direct is None:
            return
        launcher = compiled.run
        self.arguments: list[Any] = [grid, 1, 1, 0, compiled.function, launcher.launch_cooperative_grid]
        self.arguments += [launcher.launch_pdl, None, None, compiled.packed_metadata, None, None, None]
        descriptions = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for name in self.names:
            value, at = arguments[name], len(self.arguments)
            if isinstance(value, TensorDescriptor):
                maps = TensorMaps(value, next(descriptions, None))
                self.maps.append((at, name, maps))
                self.arguments += maps.arguments
                continue
            self.arguments.append(value)
            if isinstance(value, Tensor):
                self.tensors.append((at, name))
            elif isinstance(value, tuple) and name in changing and value:
                self.tuples.append((at, name))
        for at, _ in self.tensors + self.tuples:
            self.arguments[at] = None  # no tensor lives on here

    @staticmethod
    def watched() -> bool:
        """Whether somebody wants to hear of launches."""
        runtime = knobs.runtime
        return hook(runtime.launch_enter_hook) is not None or hook(runtime.launch_exit_hook) is not None

    def again(self, changing: Mapping[str, Any]) -> None:
        if (recording := replay.current()) is not None:
            recording.launched(self, changing)
        runtime = knobs.runtime
        enter, leave = hook(runtime.launch_enter_hook), hook(runtime.launch_exit_hook)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if self.direct is None or enter is not None or leave is not None:
            self._through_triton(changing, stream, enter, leave)
            return
        arguments = self.arguments.copy()
        arguments[3] = stream
        for i, name in self.tensors:
            arguments[i] = changing[name].data_ptr()
        for i, name in self.tuples:
            arguments[i] = tuple([x.data_ptr() for x in changing[name]])
        for i, name, maps in self.maps:
            arguments[i] = maps.at(changing[name].data_ptr())
        self.direct(*arguments)

    def repeated(self, changing: Mapping[str, Any]) -> Callable[[], None]:
        """What launches again with these very arguments, as `start` took them."""
        tensors = {k: v.base if isinstance(v, TensorDescriptor) else v for k, v in changing.items()}
        return functools.partial(self.again, tensors)

    def _through_triton(self, changing: Mapping[str, Any], stream: int, enter: Any, leave: Any) -> None:
        compiled, grid, metadata = self.compiled, self.grid, None
        described = {name: based(d, changing[name]) for name, d in self.descriptors.items()}
        values = {**changing, **self.fixed, **described}
        arguments = [values[name] for name in self.names]
        if enter is not None:
            metadata = compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *arguments
        )  # fmt: skip


class TensorMaps:
    """The tensor maps of one argument by the address they begin at; all else of them is the same."""

    def __init__(self, first: TensorDescriptor, description: Any):
        self.description = description
        self.known: dict[int, Any] = {}
        self.arguments = self._make(first)
        self.known[first.base.data_ptr()] = self.arguments[0]
        self.template = based(first, None)

    def at(self, address: int) -> Any:
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= ADDRESSES:
                self.known.clear()
            found = self.known[address] = self._make(based(self.template, Address(address)))[0]
        return found

    def _make(self, descriptor: TensorDescriptor) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        made: list[Any] = make_tensordesc_arg(descriptor, self.description)
        return made


class Address(int):
    """In the place of a tensor."""

    def data_ptr(self) -> int:
        return self


def based(descriptor: TensorDescriptor, x: Tensor | Address | None) -> TensorDescriptor:
    """The same of another tensor; not by the constructor, which looks at everything again."""
    other = object.__new__(TensorDescriptor)
    other.__dict__.update(descriptor.__dict__, base=x)
    return other


def direct_launch(compiled: Any) -> Callable[..., Any] | None:
    """What of a compiled kernel takes its arguments flat, with tensor maps in place of descriptors; None where this
    triton is not as we know it, or the kernel wants memory of its own."""
    launcher = compiled.run
    try:
        from triton.backends.nvidia import driver as nvidia

        known = type(launcher) is nvidia.CudaLauncher and nvidia._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
        if not known or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        launch = launcher.launch
        if launch.__name__ == "inner" and "launcher" in launch.__code__.co_freevars:
            if not compiled.metadata.tensordesc_meta:
                return None
            launch = launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents
    except (ImportError, AttributeError):
        return None
    return launch if callable(launch) and launch.__name__ == "launch" else None


def hook(chain: Any) -> Any:
    """None for a chain of hooks with nothing in it, which the launcher would call all the same."""
    return chain if getattr(chain, "calls", chain) else None


def start(
    kernel: Any,
    grid: int,
    changing: Mapping[str, Any],
    others: Callable[[], Mapping[str, Any]],
    spills: int | None = None,
) -> Started | None:
    """Launch `kernel` on a grid of one dimension with `others` (arguments and options) and `changing`; what is returned
    launches it again, as long as grid, `others` and what Triton specialises on in `changing` (types, and whether
    addresses are multiples of 16) stay the same: the caller keeps it under a key that decides those.

    Raises triton.runtime.errors.OutOfResources where the kernel does not fit the device, and Spilling, before it is
    launched, where it spills more than `spills` words.
    """
    if (recording := replay.current()) is not None:
        recording.complete = False
    arguments = {**others(), **changing}
    if spills is not None and isinstance(kernel, triton.JITFunction):
        compiled = kernel.warmup(grid=(grid,), **arguments)
        compiled._init_handles()
        if compiled.n_spills > spills:
            raise Spilling(compiled.n_spills)
    compiled = kernel[(grid,)](**arguments)
    if not hasattr(compiled, "packed_metadata"):  # interpreted, or a stand-in
        return None
    return Started(kernel, compiled, grid, arguments, changing)


def device_guard(device: torch.device) -> Any:
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def device() -> int:
    return int(driver.active.get_current_device())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)
