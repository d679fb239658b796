"""Shared by all tests: GPU tests are skipped where there is no GPU, slow ones unless asked for by -m slow; `poisoned`
makes uninitialised memory NaN; Triton's interpreter is repaired where it runs (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchflash.kernels import memory, unfused

unfused.MEASURED.clear()  # fused at every length: a test says itself where attention is to run unfused
torch.set_num_threads(1)  # the tensors are small and the cores few

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.repair()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in (config.option.markexpr or ""):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody wrote reads as NaN: whoever relies on it gives a wrong answer."""

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = original(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and type(x) is torch.Tensor else x

        monkeypatch.setattr(owner, name, allocate)

    patch(torch, "empty")
    patch(torch, "empty_like")
    patch(torch.Tensor, "new_empty")
    patch(torch.Tensor, "new_empty_strided")
    if memory._empty_cuda is not None:
        patch(memory, "_empty_cuda")
    yield
