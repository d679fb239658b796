"""What the user may set, and how it is told apart from Inductor's own options.

In: the `mode=` and `options=` of torch.compile. Out: a frozen `Options` and the patches for Inductor's config.
Keys `torchflash.*` are ours and checked here; the rest is Inductor's and checked by torch, so that everything that
works with backend="inductor" works here in the same words.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from torchflash.report import SKIP_CODES

if TYPE_CHECKING:
    from torchflash.kernels.tuning import Tuning

PREFIX = "torchflash."
INNER = ("inductor", "aot_eager", "eager")
SDPA = ("masked", "all", "none")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one compile; `Options()` holds the defaults.

    strict: raise if a softmax was left alone, listing each with its reason, instead of reporting it.
    allow: skip codes that `strict` accepts, separated by commas (a mixture-of-experts router is "no_scores").
    inner: what compiles the rest: "inductor", or "aot_eager" / "eager" for quick tests and debugging.
    sdpa: which calls of scaled_dot_product_attention become ours: "masked", those with a mask tensor on CUDA, where
    torch's kernels read all of the mask; "all"; or "none".
    min_seqlen: below this length attention runs unfused, from it on fused; None: as measured on this kind of device.
    autotune: time the tile sizes of each kernel when it first runs, and keep the fastest.
    BLOCK_M, BLOCK_N, num_warps, num_stages: of the kernels; a number for all, or {"forward": 64, …} with the kernels
    forward, backward_kv, backward_q; what is left out is chosen by us.
    verify: run what each block was beside it and compare (`torchflash.verify`); the rest then runs in eager mode,
    whatever `inner` says.
    dump: a folder for each graph before and after, as Python, with its report; default: $TORCHFLASH_DUMP.

    Raises TypeError or ValueError for a value of the wrong type or range.
    """

    strict: bool = False
    allow: str = ""
    inner: str = "inductor"
    sdpa: str = "masked"
    min_seqlen: int | None = None
    autotune: bool = False
    BLOCK_M: int | Mapping[str, int] | None = None
    BLOCK_N: int | Mapping[str, int] | None = None
    num_warps: int | Mapping[str, int] | None = None
    num_stages: int | Mapping[str, int] | None = None
    verify: bool = False
    dump: str | None = field(default_factory=lambda: os.environ.get("TORCHFLASH_DUMP") or None)

    def __post_init__(self) -> None:
        _check_type("strict", self.strict, bool)
        _check_type("allow", self.allow, str, ", skip codes separated by commas")
        _check_type("verify", self.verify, bool)
        if isinstance(self.dump, os.PathLike):
            object.__setattr__(self, "dump", os.fspath(self.dump))
        if self.dump is not None:
            _check_type("dump", self.dump, str, " or None, a folder")
        for name, known in (("inner", INNER), ("sdpa", SDPA)):
            value = getattr(self, name)
            _check_type(name, value, str, f", one of {', '.join(known)}")
            if value not in known:
                raise ValueError(f"option 'torchflash.{name}' is {value!r}; known: {', '.join(known)}")
        for code in self.allowed:
            if code not in SKIP_CODES:
                raise ValueError(f"unknown skip code {code!r} in 'torchflash.allow'; known: {_listed(SKIP_CODES)}")
        self.tuning()  # checks

    @property
    def allowed(self) -> tuple[str, ...]:
        """The codes in `allow`."""
        return tuple(code.strip() for code in self.allow.split(",") if code.strip())

    def cache_key(self) -> str:
        """What of the options changes the code that comes out; the others only change what is said about it."""
        return f"inner={self.inner},sdpa={self.sdpa},tuning={self.tuning().write()}"

    def tuning(self) -> Tuning:
        """What of the options travels with each rewritten attention."""
        from torchflash.kernels.tuning import PARAMETERS, Tuning  # registers the op: not when torchflash is imported

        return Tuning.of(self.min_seqlen, self.autotune, **{name: getattr(self, name) for name in PARAMETERS})


def parse(mode: str | None = None, options: Mapping[str, Any] | None = None) -> tuple[Options, dict[str, Any]]:
    """Splits torch.compile's `mode` and `options` into ours and a new dict of patches for torch._inductor.config.

    The argument is not changed. Raises ValueError for a key we do not know or one of ours without its prefix,
    TypeError for a value of the wrong type, and RuntimeError, as backend="inductor" does, for a mode or key that
    Inductor does not know.
    """
    from torch._inductor import list_options  # not when torchflash is imported

    ours: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    known = [PREFIX + f.name for f in fields(Options)]
    by_name = {name.removeprefix(PREFIX).lower(): name for name in known}
    for key, value in (options or {}).items():
        if key in known:
            ours[key.removeprefix(PREFIX)] = value
        elif key.startswith(PREFIX):
            raise ValueError(f"unknown option {key!r}{_meant(key, known)} known: {_listed(known)}")
        elif (meant := by_name.get(key.replace("-", "_").lower())) and key not in list_options():
            raise ValueError(f"unknown option {key!r}; did you mean {meant!r}?")
        else:
            inductor[key] = value
    return Options(**ours), _inductor_patches(mode, inductor)


def _inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    # the object that torch.compile(backend="inductor") makes: its modes, its checks of names and types
    wrapper: Any = torch._TorchCompileInductorWrapper(mode, options, None)
    return dict(wrapper.config)


def _check_type(name: str, value: object, expected: type, meaning: str = "") -> None:
    if not isinstance(value, expected):
        must = f"{expected.__name__}{meaning}"
        raise TypeError(f"option 'torchflash.{name}' must be {must}; got {type(value).__name__} {value!r}")


def _meant(key: str, known: list[str]) -> str:
    plain = {k.removeprefix(PREFIX).lower(): k for k in known}
    near = difflib.get_close_matches(key.removeprefix(PREFIX).lower(), plain, n=1)
    return f"; did you mean {plain[near[0]]!r}?" if near else ";"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
