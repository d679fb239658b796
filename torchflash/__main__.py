"""`python -m torchflash`: versions, devices and what runs on them; meant to be pasted into a bug report.

`python -m torchflash tune` measures tile sizes (torchflash/tune.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial


def environment() -> Iterator[tuple[str, str]]:
    """Pairs (what, how it stands). Nothing here raises: what fails is shown as its error."""
    yield "torchflash", _of(_torchflash)
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in ("torch", "triton", "numpy"):
        yield package, _of(partial(_version, package))
    yield "backend", _of(_entry_point)
    yield "inductor's fuser", _of(_gate)
    yield "cpu", _of(_cpu)
    yield from _cuda()


def _of(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:  # the answer must come, whatever is broken
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    version = getattr(importlib.import_module(package), "__version__", None)
    return str(version or importlib.metadata.version(package))


def _torchflash() -> str:
    import torchflash

    return f"{torchflash.__version__} in {torchflash.__path__[0]}"


def _entry_point() -> str:
    names = [point.name for point in importlib.metadata.entry_points(group="torch_dynamo_backends")]
    if "torchflash" in names:
        return 'registered: torch.compile(model, backend="torchflash")'
    return "not registered: install the package (pip install -e . in a checkout)"


def _gate() -> str:
    from torchflash.inductor import gate_attention_fuser

    if gate_attention_fuser():
        return "kept off what torchflash compiles"
    return "its patterns were not found in this torch; its whole group of passes is switched off instead"


def _cpu() -> str:
    import torch

    return f"blockwise torch, {torch.get_num_threads()} threads; float32, bfloat16, float16"


def _cuda() -> Iterator[tuple[str, str]]:
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        yield "cuda", f"{type(error).__name__}: {error}".splitlines()[0]
        return
    if not count:
        yield "cuda", "no device"
    for index in range(count):
        yield f"cuda:{index}", _of(partial(_gpu, index))


def _gpu(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"
    if importlib.util.find_spec("triton") is None:
        return f"{name}: triton is not installed, so the kernels cannot run"
    if torch.version.hip is not None:
        return f"{name}: ROCm, not tested"
    if (major, minor) < (8, 0):
        return f"{name}: below sm_80, not tested"
    return f"{name}: Triton kernels; float16, bfloat16, float32"


USAGE = "usage: python -m torchflash: versions and devices; python -m torchflash tune --help: tile sizes"


def main(argv: Sequence[str] = ()) -> int:
    if argv and argv[0] == "tune":
        from torchflash import tune

        return tune.main(argv[1:])
    if argv:
        if argv[0] in ("-h", "--help"):
            print(USAGE)
            return 0
        print(f"torchflash: unknown command {argv[0]!r}; {USAGE}", file=sys.stderr)
        return 2
    rows = list(environment())
    width = max(len(what) for what, _ in rows)
    for what, how in rows:
        print(f"{what:<{width}}  {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
