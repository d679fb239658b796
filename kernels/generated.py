"""Loads generated Triton source, so that no two sources can ever be taken for one another.

Triton compiles what `inspect` returns for a function, and keys its caches by the function's name and that source. So
each source lives in linecache under a file name that is its own hash, the hash is part of the function's name, one
text is loaded once, and the source Triton will compile is checked to be ours.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl

from torchflash.kernels import tiles


@functools.cache
def function(stem: str, parameters: str, body: tuple[str, ...], result: str) -> Any:
    """The jitted function `def <stem>_<hash>(<parameters>): <body lines>; return <result>`."""
    lines = "".join(f"    {line}\n" for line in (*body, f"return {result}"))
    digest = hashlib.sha256(f"{stem}({parameters})\n{lines}".encode()).hexdigest()
    name = f"{stem}_{digest[:32]}"
    source = f"@triton.jit\ndef {name}({parameters}):\n{lines}"
    filename = f"<torchflash generated {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # mtime None: never checked
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "torchflash.kernels.generated"}
    scope.update({k: v for k, v in vars(tiles).items() if not k.startswith("__")})
    exec(compile(source, filename, "exec"), scope)
    fn = scope[name]
    compiled = getattr(fn, "src", None)  # an interpreted function has none
    if compiled is not None and compiled.strip() not in source:
        raise AssertionError(f"Triton would compile another source for {name}")
    return fn
