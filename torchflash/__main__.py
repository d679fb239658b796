"""`python -m torchflash`: versions, devices and what runs on them; meant to be pasted into a bug report.

Exits with 1, and says what, where something that is needed is missing or does not load. `python -m torchflash tune`
measures tile sizes (torchflash/tune.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

Row = tuple[str, str, bool]


def environment() -> Iterator[Row]:
    """Rows (what, how it stands, whether that will do). Nothing here raises: what fails is shown as its error."""
    yield _row("torchflash", _torchflash)
    yield "python", f"{platform.python_version()} on {platform.platform()}", True
    yield _row("torch", partial(_version, "torch"))
    yield _row("triton", partial(_version, "triton"))  # without it, see _gpu
    yield *_row("numpy", partial(_version, "numpy"))[:2], True  # nothing of ours needs it
    yield _row("backend", _entry_point)
    yield _row("inductor's fuser", _gate)
    yield _row("c++ compiler", _compiler)
    yield _row("cpu", _cpu)
    yield from _cuda()


class Missing(Exception):
    """Needed and not there: the message is the whole of what is shown."""


def _row(what: str, ask: Callable[[], str]) -> Row:
    try:
        return what, ask(), True
    except Missing as error:
        return what, str(error), False
    except Exception as error:  # the answer must come, whatever is broken
        return what, f"{type(error).__name__}: {error}".splitlines()[0], False


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
    raise Missing("not registered: install the package (pip install -e . in a checkout)")


def _gate() -> str:
    from torchflash.inductor import gate_attention_fuser

    if gate_attention_fuser():
        return "kept off what torchflash compiles"
    return "its patterns were not found in this torch; its whole group of passes is switched off instead"


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        raise Missing("not found; Inductor needs one: install g++ or clang++, or name one in $CXX") from None


def _cpu() -> str:
    import torch

    import torchflash.kernels
    import torchflash.passes  # noqa: F401  whether they load

    return f"blockwise torch, {torch.get_num_threads()} threads; float32, bfloat16, float16"


def _cuda() -> Iterator[Row]:
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        yield "cuda", f"{type(error).__name__}: {error}".splitlines()[0], False
        return
    if not count:
        yield "cuda", "no device", True
    for index in range(count):
        yield _row(f"cuda:{index}", partial(_gpu, index))


def _gpu(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"
    if importlib.util.find_spec("triton") is None:
        raise Missing(f"{name}: triton is not installed, so the kernels cannot run")
    if torch.version.hip is not None:
        return f"{name}: ROCm, not tested"
    if (major, minor) < (8, 0):
        return f"{name}: below sm_80, not tested"
    importlib.import_module("torchflash.kernels.launch")  # does it load?
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
    width = max(len(what) for what, _, _ in rows)
    for what, how, _ in rows:
        print(f"{what:<{width}}  {how}")
    broken = [what for what, _, good in rows if not good]
    if broken:
        print(f"torchflash: needed, but missing or broken: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
