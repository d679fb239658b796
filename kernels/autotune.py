"""Measures which tile of a kernel is fastest for a kind of problem, once, and remembers it: in memory and on disk.

Opt-in (`torchflash.autotune`). launch.run asks for the `fastest` tile before it first launches a kernel for given
shapes. What was measured before, by this or another process, is taken; else candidates.py proposes tiles, each is
compiled and timed on the operands at hand, whose results are the same whatever the tile, and the fastest is written to

    $TORCHFLASH_CACHE_DIR, or $XDG_CACHE_HOME/torchflash, or ~/.cache/torchflash

as one JSON file for each kind of problem, replaced as a whole, so that processes do not disturb each other. A file that
is not what we wrote is measured again. Delete the folder to forget everything.

Nothing is measured while a CUDA graph is captured or on another stream than the default one, where graphs are warmed
up; nor for a kernel that adds to what is there, as those for gradients of captured tensors do. Then the table decides.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

from torchflash import score as sc
from torchflash.kernels import configs
from torchflash.kernels.candidates import Work, candidates
from torchflash.kernels.configs import Tile
from torchflash.kernels.launcher import Started
from torchflash.kernels.tuning import PARAMETERS, Tuning

if TYPE_CHECKING:
    from torchflash.kernels.operands import Operands, Setup

log = logging.getLogger("torchflash")

TRIED = 12  # candidates
MANY_LINES = 256  # batch · heads beyond which a GPU is busy anyway
NEVER = ("backward_capture", "split")  # it adds; what it takes depends on how the keys are shared out
_known: dict[str, Tile | None] = {}  # by `describe`; None: nothing can be measured
_lock = threading.Lock()

# Launches a kernel with a tile; gives what launches it again at little cost to the host (None where it is interpreted),
# and its arguments. Raises OutOfResources.
Launch = Callable[[Tile], tuple[Started | None, dict[str, Any]]]


def fastest(name: str, own: Any, o: Operands, usual: Tile, launch: Launch) -> tuple[Tile | None, bool]:
    """(the tile that was fastest for the kernel `name`, or None; whether asking again would give the same).

    `own` is the kernel's variant, as in launch.run; `usual` its first choice otherwise, with what the user fixed.
    """
    fixed = o.problem.tuning.tile(name)
    if name in NEVER or (name == "backward_q" and own[1]) or len(fixed) == len(PARAMETERS):
        return None, True
    kind = describe(name, own, o)
    with _lock:
        if kind not in _known:
            found = load(kind)
            if found is None:
                if not measurable(o.problem.q.device):
                    return None, False
                tiles = candidates(name, work(o), usual, fixed)[:TRIED]
                found = measure(f"{name} for q {list(o.problem.q.shape)}", kind, tiles, launch)
            _known[kind] = found
        return _known[kind], True


def measure(what: str, kind: str, tiles: Sequence[Tile], launch: Launch) -> Tile | None:
    """The fastest of `tiles`, kept on disk under `kind`; None where none can be timed. `what` is for the log."""
    log.debug("autotuning %s: %s", what, kind)
    times: dict[Tile, float] = {}
    for i, tile in enumerate(tiles, 1):
        try:
            started, given = launch(tile)
            again = functools.partial(launch, tile) if started is None else started.repeated(given)
            times[tile] = milliseconds(again)
            said = f"{times[tile]:.3f} ms"
        except torch.OutOfMemoryError:  # not the tile's fault: the timer needs memory too
            log.warning("torchflash: no memory is left to autotune %s; its tile is that of the table", what)
            return None
        except Exception as e:  # a tile that does not compile or fit is no reason to stop
            said = f"does not run: {type(e).__name__}: {e}".splitlines()[0]
        log.info("autotuning %s: %d/%d %s: %s", what, i, len(tiles), written(tile), said)
    if not times:
        return None
    best = min(times, key=lambda tile: times[tile])
    log.info("autotuned %s: %s, %.3f ms", what, written(best), times[best])
    store(kind, best, times)
    return best


def milliseconds(again: Callable[[], Any]) -> float:
    """Median time of a launch on the GPU, with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(again, warmup=10, rep=50, return_mode="median"))


def measurable(device: torch.device) -> bool:
    """Whether kernels can be timed here and now."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def work(o: Operands, capability: int | None = None) -> Work:
    """What candidates depend on; on the GPU of the operands, or another one of that capability."""
    p, setup = o.problem, o.setup
    if capability is None:
        major, minor = torch.cuda.get_device_capability(p.q.device) if p.q.device.type == "cuda" else (8, 0)
        capability = major * 10 + minor
    return Work(
        M=p.M,
        N=p.N,
        D=sum(configs.chunks(setup.D)),
        DV=sum(configs.chunks(setup.DV)),
        itemsize=setup.itemsize,
        capability=capability,
        bias=sum(p.captures[i].dtype.itemsize for i in _tensors_of_scores(setup)),
        stream=setup.stream,
        split=setup.common["PRECISION"] == "tf32x3",
    )


def _tensors_of_scores(setup: Setup) -> list[int]:
    """Captures that are as large as the scores and added in every tile."""
    return [int(x.value[1:]) for x in sc.loads(setup.form.body) if {"m", "n"} <= sc.names(x)]


def written(tile: Tile) -> str:
    return f"{tile.block_m} x {tile.block_n}, {tile.warps} warps, {tile.stages} stages"


# --------------------------------------------------------------------------------------------------- kinds of problems


def describe(name: str, own: Any, o: Operands) -> str:
    """All that may change which tile is fastest; lengths, and batch times heads, by the next power of two."""
    p, setup = o.problem, o.setup
    program, common = p.program, setup.common
    variant = {"backward_kv": own[:2], "backward_q": own[:1]}.get(name, ())  # of gradients, or delta alone
    captures = ",".join(f"{str(c.dtype).removeprefix('torch.')}{_bucketed(c.shape)}" for c in p.captures)
    values = {
        "kernel": " ".join([name, *map(str, variant)]),
        "device": _device(p.q.device),
        "dtype": f"{p.q.dtype} {p.v.dtype} {common['PRECISION']}".replace("torch.", ""),
        "dims": f"{setup.D} {setup.DV}",
        "lengths": f"{_bucket(p.M)} {_bucket(p.N)}",
        "lines": min(MANY_LINES, _bucket(p.B * p.H)),
        "groups": f"{p.group_k} {p.group_v}",
        "tma": setup.hopper,
        "dropout": p.dropout_p > 0,
        "score": program.score,
        "keep": program.keep,
        "post": program.post,
        "rows": ", ".join(map(str, program.rows)),
        "captures": captures,
        "fixed": sorted(p.tuning.tile(name).items()),
        "versions": _versions(),
    }
    return "; ".join(f"{k} {v}" for k, v in values.items())


def _bucket(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def _bucketed(shape: Sequence[int]) -> list[int]:
    return [_bucket(size) for size in shape]


@functools.cache
def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} sm_{major}{minor}"


@functools.cache
def _versions() -> str:
    """Of triton and of our kernels: other code has other best tiles."""
    content = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"triton {triton.__version__} torchflash {content.hexdigest()[:16]}"


# ---------------------------------------------------------------------------------------------------------------- disk


def folder() -> Path:
    """Where choices are kept, whether it exists or not."""
    if own := os.environ.get("TORCHFLASH_CACHE_DIR"):
        return Path(own) / "autotune"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "torchflash" / "autotune"


def place(kind: str) -> Path:
    return folder() / f"{hashlib.sha256(kind.encode()).hexdigest()[:32]}.json"


def load(kind: str) -> Tile | None:
    """What was chosen for `kind`; None if nothing was, or the file is not one of ours."""
    path = place(kind)
    try:
        content = json.loads(path.read_text())
        if content["kind"] != kind:
            raise ValueError("it is about another kind of problem")
        return Tile(**_checked(content["tile"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.warning("torchflash: ignoring %s, which is no choice of a tile: %s: %s", path, type(e).__name__, e)
        return None


def _checked(tile: dict[str, Any]) -> dict[str, int]:
    """`tile` if kernels can run with it."""
    Tuning.of(**dict(zip(PARAMETERS, (tile[name] for name in Tile._fields), strict=True)))
    return tile


def store(kind: str, tile: Tile, times: dict[Tile, float]) -> None:
    """Writes the choice; a folder that cannot be written to costs a warning."""
    path = place(kind)
    measured = [{**t._asdict(), "milliseconds": ms} for t, ms in sorted(times.items(), key=lambda item: item[1])]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.stem}", delete=False) as f:
            json.dump({"kind": kind, "tile": tile._asdict(), "measured": measured}, f, indent=1)
        os.replace(f.name, path)
    except OSError as e:
        log.warning("torchflash: cannot keep the choice of a tile in %s: %s", path, e)
