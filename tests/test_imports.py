"""Who may import whom, what importing costs, and that everything but the kernels works without Triton."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchflash

ROOT = Path(torchflash.__file__).resolve().parents[1]


def imports(folder):
    """Pairs (file, absolute name of a module that it imports, also inside functions)."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        package = f"torchflash.{folder}" if folder != "torchflash" else folder
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
                module = base + (node.module or "")
                yield from ((file.name, f"{module}.{alias.name}") for alias in node.names)


def within(name, package):
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("passes", "triton"),
        ("passes", "torchflash.backend"),
        ("passes", "torchflash.inductor"),
        ("kernels", "torchflash.passes"),
        ("kernels", "torchflash.backend"),
        ("kernels", "torchflash.report"),
        ("torchflash", "triton"),
    ],
)
def test_who_may_import_whom(folder, forbidden):
    found = list(imports(folder))
    assert found
    if folder == "torchflash":  # its links lead to the other two
        found = [(file, name) for file, name in found if (ROOT / folder / file).exists()]
    assert [(file, name) for file, name in found if within(name, forbidden)] == []


def run(program, **env):
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap():
    """No Triton beyond what torch itself loads, no CUDA, and neither Dynamo nor the kernels."""
    run("""
import sys, torch
before = set(sys.modules)
import torchflash
assert torchflash.__version__
loaded = set(sys.modules) - before
assert not any(name.split(".")[0] == "triton" for name in loaded), sorted(loaded)
assert "torchflash.kernels" not in loaded and "torchflash.passes" not in loaded, sorted(loaded)
assert "torch._dynamo" not in loaded and "torch._inductor" not in loaded, sorted(loaded)
assert not torch.cuda.is_initialized()
""")


def test_listed_as_a_backend_without_import():
    run("""
import sys, torch
assert "torchflash" in torch._dynamo.list_backends()
assert "torchflash" not in sys.modules
""")


def test_everything_but_the_kernels_works_without_triton():
    """As on macOS and Windows: import, recognition, the op on CPU, forward and backward."""
    run("""
import sys
sys.modules["triton"] = None  # importing it fails
import torch, torchflash, torchflash.kernels, torchflash.passes
from torchflash.backend import torchflash as backend
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v
q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
out = torch.compile(attention, backend="torchflash", options={"torchflash.inner": "aot_eager"})(q, k, v)
assert backend.report.counts() == {"rewritten": 1}, str(backend.report)
torch.testing.assert_close(out, attention(q, k, v))
got, want = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, attention(q, k, v)))
torch.testing.assert_close(got, want)
import runpy
sys.argv = ["torchflash"]
try:
    runpy.run_module("torchflash", run_name="__main__")
except SystemExit as done:
    assert done.code == 0
""")


def test_works_without_numpy():
    """Which torch itself can do without; nothing of ours may load it."""
    run("""
import sys, warnings
sys.modules["numpy"] = None  # importing it fails
warnings.simplefilter("ignore")  # torch says once that there is none
import torch, torchflash, torchflash.kernels, torchflash.passes
from torchflash.backend import torchflash as backend
from torchflash.kernels import forms, program
assert forms.form(program.read("where(n <= m, 0.1 * s, -inf)", "n <= m", -torch.inf, "p", ()), False).factor != 1.0
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v
q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
out = torch.compile(attention, backend="torchflash")(q, k, v)
assert backend.report.counts() == {"rewritten": 1}, str(backend.report)
torch.testing.assert_close(out, attention(q, k, v))
out.sum().backward()
from torchflash.__main__ import main
assert main() == 0
""")


def test_environment_is_printed():
    done = subprocess.run([sys.executable, "-m", "torchflash"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert rows.keys() >= {"torchflash", "python", "torch", "triton", "numpy", "backend", "inductor's fuser", "cpu"}
    assert "c++ compiler" in rows
    assert "registered" in rows["backend"] and "not registered" not in rows["backend"]
    assert "Error" not in done.stdout


def test_environment_survives_what_is_broken(monkeypatch, capsys):
    import torch

    from torchflash import __main__ as main

    def broken(*args):
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(main, "_gate", broken)
    assert main.main() == 1
    printed = capsys.readouterr()
    assert "RuntimeError: driver too old\n" in printed.out
    assert printed.err == "torchflash: needed, but missing or broken: inductor's fuser, cuda\n"


@pytest.mark.parametrize(
    ("prelude", "row"),
    [
        ("sys.modules['torchflash.kernels.op'] = None", "inductor's fuser, cpu"),
        ("os.environ.update(CXX='no-such-compiler', PATH='')", "c++ compiler"),
        ("importlib.metadata.entry_points = lambda **group: importlib.metadata.EntryPoints()", "backend"),
    ],
    ids=["a module does not load", "no compiler", "not registered"],
)
def test_environment_says_what_is_missing(prelude, row):
    program = f"import importlib.metadata, os, sys\n{prelude}\nfrom torchflash.__main__ import main\nsys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert done.stderr == f"torchflash: needed, but missing or broken: {row}\n", done.stdout + done.stderr
