"""What the user sets about how an attention runs, as a value and as the text that travels with the graph.

The op's last argument, `tuning`, is that text: "" by default, or settings separated by semicolons, in this order:

    min_seqlen=512;autotune;forward.BLOCK_M=64;forward.num_warps=4;backward_kv.BLOCK_N=32

`Tuning.write` gives it, `read` parses it. It never changes what is computed beyond rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torchflash.kernels.configs import LARGEST_BLOCK

KERNELS = ("forward", "backward_kv", "backward_q")
FOLLOWING = {"split": "forward", "backward_capture": "backward_q"}  # kernels whose tiles are fixed together with others
PARAMETERS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
WARPS, STAGES = (1, 2, 4, 8, 16), range(1, 9)


@dataclass(frozen=True)
class Tuning:
    """min_seqlen: unfused below it, fused from it on, by the longer of queries and keys; None: as measured
    (torchflash.kernels.unfused). autotune: measure tile sizes at the first call. tiles: (kernel, parameter, value),
    what the user fixed.

    Raises TypeError or ValueError, naming the option, for what no kernel can run with.
    """

    min_seqlen: int | None = None
    autotune: bool = False
    tiles: tuple[tuple[str, str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.min_seqlen is not None:
            _check_int("min_seqlen", self.min_seqlen, "int or None")
            if self.min_seqlen < 0:
                raise ValueError(f"option 'torchflash.min_seqlen' is {self.min_seqlen}; must be 0 or more, or None")
        if not isinstance(self.autotune, bool):
            raise TypeError(
                f"option 'torchflash.autotune' must be bool; got {type(self.autotune).__name__} {self.autotune!r}"
            )
        for kernel, parameter, value in self.tiles:
            if kernel not in KERNELS:
                raise ValueError(f"unknown kernel {kernel!r} in 'torchflash.{parameter}'; known: {', '.join(KERNELS)}")
            _check_parameter(kernel, parameter, value)
        order = sorted(set(self.tiles), key=lambda t: (KERNELS.index(t[0]), PARAMETERS.index(t[1])))
        object.__setattr__(self, "tiles", tuple(order))

    @classmethod
    def of(
        cls, min_seqlen: int | None = None, autotune: bool = False, **parameters: int | Mapping[str, int] | None
    ) -> Tuning:
        """From options: each of PARAMETERS is a number for all kernels, or one for each kernel by name, or None."""
        tiles = []
        for parameter, value in parameters.items():
            if value is not None:
                by_kernel = value if isinstance(value, Mapping) else dict.fromkeys(KERNELS, value)
                tiles += [(kernel, parameter, number) for kernel, number in by_kernel.items()]
        return cls(min_seqlen, autotune, tuple(tiles))

    def tile(self, kernel: str) -> dict[str, int]:
        """{"BLOCK_M": 64, …}: what the user fixed for a kernel of KERNELS, or for one that follows it."""
        kernel = FOLLOWING.get(kernel, kernel)
        return {parameter: value for k, parameter, value in self.tiles if k == kernel}

    def write(self) -> str:
        settings = [] if self.min_seqlen is None else [f"min_seqlen={self.min_seqlen}"]
        settings += ["autotune"] if self.autotune else []
        return ";".join(settings + [f"{kernel}.{parameter}={value}" for kernel, parameter, value in self.tiles])


DEFAULT = Tuning()


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Tuning:
    """The settings in `text`. Raises ValueError where it is not what `Tuning.write` writes."""
    min_seqlen, autotune, tiles = None, False, []
    try:
        for setting in text.split(";") if text else ():
            name, _, value = setting.partition("=")
            if setting == "autotune":
                autotune = True
            elif name == "min_seqlen":
                min_seqlen = int(value)
            else:
                kernel, parameter = name.split(".")
                tiles.append((kernel, parameter, int(value)))
        return Tuning(min_seqlen, autotune, tuple(tiles))
    except ValueError as e:
        raise ValueError(f"torchflash::attention: {text!r} is not a tuning: {e}") from None


def _check_parameter(kernel: str, parameter: str, value: int) -> None:
    if parameter not in PARAMETERS:
        raise ValueError(f"unknown parameter {parameter!r}; known: {', '.join(PARAMETERS)}")
    _check_int(parameter, value, f"int, or a dict of {', '.join(KERNELS)} to int, or None")
    if parameter.startswith("BLOCK"):
        fits = 16 <= value <= LARGEST_BLOCK and value & (value - 1) == 0
        must = f"a power of two from 16 to {LARGEST_BLOCK}"
    elif parameter == "num_warps":
        fits, must = value in WARPS, f"one of {', '.join(map(str, WARPS))}"
    else:
        fits, must = value in STAGES, f"from {STAGES[0]} to {STAGES[-1]}"
    if not fits:
        raise ValueError(f"option 'torchflash.{parameter}' is {value} for {kernel}; must be {must}")


def _check_int(name: str, value: object, must: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"option 'torchflash.{name}' must be {must}; got {type(value).__name__} {value!r}")
