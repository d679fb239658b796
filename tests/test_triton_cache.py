"""Two score programs never share a compiled kernel, in one process or through one disk cache; one program is loaded
once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, does not interpret", allow_module_level=True)

from torchflash.kernels import forms, generated, lower, program

SCRIPT = """
import torch
from torchflash.kernels.compiling import compile_launches
from torchflash.kernels import program, reference
read = program.read({text!r}, "", float("-inf"), "p", ())
x = [torch.empty(1, 1, 64, 16) for _ in range(3)]
problem = reference.Problem(*x, [], [], read, 0.0, None)
found = compile_launches(problem, [], 90)
for name in found:
    for r in found[name]:
        print(name, "0.25" if "2.500000e-01" in r.source else "0.75" if "7.500000e-01" in r.source else
        "neither")
"""


def score(text):
    form = forms.form(program.read(text, "", float("-inf"), "p", ()), exact=True)  # the factor stays in the program
    return lower.value_function(form, "score", (), False)


def test_functions_are_named_by_their_content_and_loaded_once():
    a = score("0.25 * s")
    b = score("0.5 * s")
    again = score("(0.25 * s)")
    assert a is again and a is not b
    assert a.__name__ != b.__name__ and a.__name__.startswith("score_")
    assert a.cache_key != b.cache_key
    assert "0.25" in a.src and "0.5" in b.src


def test_the_source_is_what_inspect_returns():
    import inspect

    fn = generated.function("probe", "s", ("x0 = s + 1.0",), "x0")
    assert inspect.getsource(fn.fn) == f"@triton.jit\ndef {fn.__name__}(s):\n    x0 = s + 1.0\n    return x0\n"


def test_two_programs_over_one_shared_disk_cache(tmp_path):
    """The same process layout, names and shapes, another constant: the second must not find the first's kernels."""
    seen = []
    for text in ("0.25 * s", "0.75 * s", "0.25 * s"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(text=text)],
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
            cwd=os.path.dirname(os.path.dirname(__file__)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout)
    assert seen[0] == seen[2] == seen[1].replace("0.75", "0.25")
    assert seen[0].count("0.25") == seen[1].count("0.75") >= 3 and "0.25" not in seen[1]
