"""The inner compile by Inductor: what has to hold around it, and only around it.

What surrounds every compile of our graphs, also with nothing rewritten:
1. Inductor's own attention fuser stays off. It runs after us and takes softmaxes over other axes for attention; a block
   that we leave alone must come out as unfused code. A ContextVar, checked by each of its registered patterns, says
   whether the running compile is ours: other compiles in this process, before, after or in other threads, are as ever.
2. A tag over our sources, version and options is part of every cache key. The AOTAutograd cache hashes the graph it is
   given but not the formulas behind its ops: without the tag an edited backward would be answered from the old cache,
   and a graph compiled without the gate would be served to a compile that needs it.
3. Compiled code calls our ops past the dispatcher (`call_directly`), also code from the cache: the names stand in it.
Besides, graphs that differentiate a maximum in half precision are compiled with eager's rounding: `has_half_extremum`.
The backward is compiled when it first runs, out of our sight and perhaps in another thread, so both are also put around
the function that Inductor keeps for it (`inner_compile`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from torchflash import __version__
from torchflash.options import Options
from torchflash.passes.graph import operation, tensor

log = logging.getLogger("torchflash")
_ours: ContextVar[bool] = ContextVar("torchflash_compiles", default=False)
_lock = threading.Lock()


def compile_by_inductor(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, patches: dict[str, Any]
) -> Any:
    """`torch._inductor.compile_fx.compile_fx` with config patches, inside the gate and the cache tag."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    tag = cache_tag(options)
    call_directly()
    if has_half_extremum(gm):
        device = _device(example_inputs)
        if device is not None and device.type == "cpu" and TorchVersion(torch.__version__) < "2.13":
            # there Inductor's C++ drops the casts again
            return torch._dynamo.lookup_backend("aot_eager")(gm, list(example_inputs))
        patches = {"emulate_precision_casts": True, **patches}
    if trains_attention(gm, example_inputs) and patches.get("cpp_wrapper", _cpp_wrapper()):
        log.warning("torchflash: cpp_wrapper is off for this graph: it cannot call an operator that returns a list")
        patches = {**patches, "cpp_wrapper": False}
    if not gate_attention_fuser(_device(example_inputs)):
        patches = {**patches, **_without_pattern_passes(patches)}

    @functools.wraps(compile_fx_inner)
    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        with _around(tag):
            return compile_fx_inner(*args, **kwargs)

    with _around(tag):
        return compile_fx(gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches)


def trains_attention(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the backward of a rewritten block will be compiled."""
    if not torch.is_grad_enabled():
        return False
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs):
        return False
    ours = torch.ops.torchflash.attention.default
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(node.target is ours for graph in graphs for node in graph.nodes)


def _cpp_wrapper() -> bool:
    from torch._inductor import config

    return bool(config.cpp_wrapper)


def has_half_extremum(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph differentiates amax or amin of float16 or bfloat16, as softmaxes by hand do.

    Their gradient goes to the elements that equal the result. Inductor keeps fused values in float32, where none equals
    the rounded result, and divides by their number: NaN. Such graphs are compiled with eager's rounding; one whose
    attention is all rewritten has none of these left.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            t = tensor(node)
            if t is None or not t.requires_grad or t.dtype not in (torch.float16, torch.bfloat16):
                continue
            whole = operation(node) in ("max", "min") and len(node.args) + len(node.kwargs) == 1
            if whole or operation(node) in ("amax", "amin", "aminmax"):
                return True
    return False


@contextlib.contextmanager
def _around(tag: str) -> Iterator[None]:
    token = _ours.set(True)
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            yield
    finally:
        _ours.reset(token)


# ----------------------------------------------------------------------------------------------------- calls of our ops


def call_directly() -> bool:
    """Makes Inductor write `op.compiled(…)` for our ops instead of `op.default(…)`; once per process.

    False if it cannot: the internals of this torch differ from those we know, and code calls the ops as any other.
    """
    try:
        from torch._inductor import lowering

        with _lock:
            for op in (torch.ops.torchflash.attention.default, torch.ops.torchflash.attention_backward.default):
                if not hasattr(lowering.lowerings.get(op), "_torchflash"):
                    lowering.make_fallback(op)
                    lowering.lowerings[op] = _called_directly(lowering.lowerings[op])
        return True
    except Exception:
        return False


def _called_directly(lower: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        results = lower(*args, **kwargs)
        with contextlib.suppress(AttributeError, IndexError, TypeError):  # else it is called as any other
            kernel = results[0].data.data.inputs[0]  # of the operation whose outputs these are
            name = kernel.python_kernel_name
            if name.endswith(".default") and not V.graph.cpp_wrapper:
                kernel.python_kernel_name = name.removesuffix("default") + "compiled"
        return results

    lowered._torchflash = True  # type: ignore[attr-defined]
    return lowered


# ------------------------------------------------------------------------------------------------------- the cache tag


def cache_tag(options: Options) -> str:
    """The user's `torch.compiler.config.cache_key_tag` followed by ours: version, sources and options."""
    ours = f"torchflash-{__version__}-{source_hash()}-{options.cache_key()}"
    users: str = torch.compiler.config.cache_key_tag
    return users if ours in users else f"{users}|{ours}" if users else ours


@functools.cache
def source_hash() -> str:
    """A hash of all our sources (torchflash, passes, kernels), as they are on disk when first asked for."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    files = source_files()
    return get_hash_for_files(tuple(map(str, files)), extra=",".join(f.name for f in files)).hex()[:32]


def source_files() -> list[Path]:
    """The files whose contents decide what our ops compute."""
    files: set[Path] = set()
    for name in ("torchflash", "torchflash.passes", "torchflash.kernels"):
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            files.update(file.resolve() for file in Path(folder).rglob("*.py"))
    return sorted(files)


# ------------------------------------------------------------------------------------------------------------ the gate


def gate_attention_fuser(device: torch.device | None = None) -> bool:
    """Makes Inductor's attention patterns ask whether the running compile is ours; once per process.

    False if they could not be found: the internals of this torch differ from those we know.
    """
    try:
        from torch._inductor.fx_passes import joint_graph

        with _lock:
            if not hasattr(joint_graph.lazy_init, "_torchflash"):
                joint_graph.lazy_init = _then_gate(joint_graph.lazy_init)
        return joint_graph.lazy_init(device or torch.device("cpu")) > 0
    except Exception:
        return False


def _then_gate(lazy_init: Callable[..., Any]) -> Callable[..., int]:
    # patterns are registered lazily and once per device: gate what is there after each registration
    @functools.wraps(lazy_init)
    def register(*args: Any, **kwargs: Any) -> int:
        lazy_init(*args, **kwargs)
        return _gate_entries()

    register._torchflash = True  # type: ignore[attr-defined]
    return register


def _gate_entries() -> int:
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    gated = 0
    for entries in joint_graph.patterns.patterns.values():
        for entry in entries:
            check: Any = getattr(entry, "extra_check", None)
            if hasattr(check, "_torchflash"):
                gated += 1
            elif getattr(_enclosed(check, "extra_check"), "__module__", None) == fuse_attention.__name__:
                entry.extra_check = _unless_ours(check)
                gated += 1
    return gated


def _unless_ours(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def gated(match: Any) -> bool:
        return False if _ours.get() else check(match)

    gated._torchflash = True  # type: ignore[attr-defined]
    return gated


def _enclosed(function: Any, name: str) -> Any:
    """The value of a variable that a nested function closes over."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _without_pattern_passes(patches: dict[str, Any]) -> dict[str, Any]:
    # cruder: drops the whole group of passes that the attention patterns belong to
    from torch._inductor import config

    disabled = patches.get("disabled_passes", config.disabled_passes)
    return {"disabled_passes": f"{disabled},pass_pattern_0" if disabled else "pass_pattern_0"}


def _device(example_inputs: Sequence[Any]) -> torch.device | None:
    return next((value.device for value in example_inputs if isinstance(value, torch.Tensor)), None)
