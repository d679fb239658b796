"""benchmarks/accuracy.py on a small attention: its table, and the exit status that says whether the limits hold."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    arguments = "--device=cpu --dtypes=fp16,fp32 --dims=16 --length=64 --batch=1 --heads=2 --jobs=1"
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments.split()])
    return importlib.import_module("accuracy")


def test_table(accuracy, capsys):
    assert accuracy.main() == 0
    text = capsys.readouterr().out
    cells = r"((?:\| \S+ / \S+ +){4})"
    rows = re.findall(rf"^\| fp(16|32) +\| 16 +\| (full|causal) +\| (out|dq|dk|dv) +{cells}\|$", text, re.M)
    assert len(rows) == 2 * 2 * 4
    for bits, _, _, numbers in rows:
        for relative, largest in re.findall(r"(\S+) / (\S+)", numbers):
            assert 0 < float(relative) < {"16": 2e-3, "32": 1e-6}[bits] and 0 < float(largest) < 1e-2
    assert "fp16 forward" in text and "fp32 forward" in text and "IS NOT" not in text


@pytest.mark.parametrize("way", ["torchflash", "attention()"])
@pytest.mark.parametrize(("error", "holds"), [(9e-4, True), (1.1e-3, False), (float("nan"), False)], ids=str)
def test_exit_status(accuracy, monkeypatch, way, error, holds):
    """Whichever way and setting a large error, or NaN, is found in."""

    def measure(setup: Any) -> Any:
        errors = {(w, r): accuracy.Error(1e-7, 1e-7) for w in accuracy.WAYS for r in accuracy.RESULTS}
        if setup.dtype == "fp16" and setup.causal:
            errors[way, "out"] = accuracy.Error(error, 1.0)
        return errors

    class Pool:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def map(self, _: Any, setups: Any) -> Any:
            return map(measure, setups)

    monkeypatch.setattr(accuracy, "ProcessPoolExecutor", Pool)
    assert accuracy.main() == int(not holds)
