"""The Dynamo backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def torchflash(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs))
