"""Autotuning without a GPU: what is measured, what is remembered, what is never run; and a real one where there is a
GPU. What needs the interpreter runs in a process of its own, as in test_triton_interpreter.py."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from torchflash.kernels import autotune, launch, reference
from torchflash.kernels import program as programs
from torchflash.kernels.configs import Tile
from torchflash.kernels.operands import Operands
from torchflash.kernels.tuning import Tuning

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in a process of its own")
USUAL = Tile(64, 64, 4, 2)
FAST = Tile(64, 32, 4, 2)
AUTOTUNE = Tuning(autotune=True)


def operands(length=200, score="0.25 * s", dtype=torch.bfloat16, heads=2, tuning=AUTOTUNE):
    program = programs.read(score, "", -math.inf, "p", ())
    q, k, v = (torch.zeros(1, heads, length, 16, dtype=dtype) for _ in range(3))
    return Operands(reference.Problem(q, k, v, [], [], program, 0.0, None, tuning))


class Timer:
    """Stands in for a GPU: the tile FAST takes 1 ms, the usual one 2, others 3; `broken` ones do not fit."""

    def __init__(self, monkeypatch, folder):
        self.tried, self.broken = [], set()
        monkeypatch.setenv("TORCHFLASH_CACHE_DIR", str(folder))
        monkeypatch.setattr(autotune, "_known", {})
        monkeypatch.setattr(autotune, "measurable", lambda device: True)
        monkeypatch.setattr(autotune, "milliseconds", self.milliseconds)

    def launch(self, tile):
        self.tried.append(tile)
        if tile in self.broken:
            raise OutOfResources(300000, 200000, "shared memory")
        return None, {}

    def milliseconds(self, again):
        again()
        return {FAST: 1.0, USUAL: 2.0}.get(self.tried[-1], 3.0)

    def fastest(self, name="forward", own=(None, ()), **kwargs):
        self.tried.clear()
        return autotune.fastest(name, own, operands(**kwargs), USUAL, self.launch)


@pytest.fixture
def timer(monkeypatch, tmp_path):
    return Timer(monkeypatch, tmp_path)


def files(tmp_path):
    return sorted((tmp_path / "autotune").iterdir())


def test_the_fastest_is_measured_once(timer, tmp_path):
    assert timer.fastest() == (FAST, True)
    assert len(set(timer.tried)) == autotune.TRIED and timer.tried[0] == USUAL
    assert timer.fastest() == (FAST, True) and not timer.tried
    (file,) = files(tmp_path)
    content = json.loads(file.read_text())
    assert content["tile"] == FAST._asdict() and len(content["measured"]) == autotune.TRIED
    assert [m["milliseconds"] for m in content["measured"]][:3] == [1.0, 2.0, 3.0]


def test_another_process_finds_it_on_disk(timer, monkeypatch):
    timer.fastest()
    autotune._known.clear()
    monkeypatch.setattr(autotune, "measurable", lambda device: False)  # as while a CUDA graph is captured
    assert timer.fastest() == (FAST, True) and not timer.tried


def test_where_nothing_can_be_measured_the_table_decides_for_now(timer, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(autotune, "measurable", lambda device: False)
        assert timer.fastest() == (None, False) and not timer.tried
    assert timer.fastest() == (FAST, True)


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({"length": 256}, False),
        ({"length": 257}, True),
        ({"score": "0.5 * s"}, True),
        ({"dtype": torch.float16}, True),
        ({"heads": 8}, True),
        ({"name": "backward_kv", "own": (True, True)}, True),
    ],
    ids=str,
)
def test_kinds_of_problems(timer, changed, measured):
    timer.fastest()
    timer.fastest(**changed)
    assert bool(timer.tried) == measured


def test_variants_of_a_kernel_are_kinds(timer):
    kinds = {autotune.describe("backward_kv", own, operands()) for own in [(True, True), (True, False), (False, True)]}
    kinds |= {autotune.describe("backward_q", (delta, ()), operands()) for delta in (True, False)}
    assert len(kinds) == 5


def test_other_sources_are_measured_again(timer, monkeypatch):
    timer.fastest()
    autotune._known.clear()
    monkeypatch.setattr(autotune, "_versions", lambda: "others")
    timer.fastest()
    assert timer.tried


def test_what_the_user_fixed_stays(timer):
    tuning = Tuning.of(autotune=True, BLOCK_N=64, num_warps=8)
    tile, _ = timer.fastest(tuning=tuning)
    assert tile is not None and {(t.block_n, t.warps) for t in timer.tried} == {(64, 8)}
    whole = Tuning.of(autotune=True, BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2)
    assert timer.fastest(tuning=whole) == (None, True) and not timer.tried


@pytest.mark.parametrize(("name", "own"), [("backward_capture", ("t0[h]",)), ("backward_q", (False, (0,)))])
def test_kernels_that_add_are_never_tried(timer, name, own):
    assert timer.fastest(name, own) == (None, True) and not timer.tried
    assert not autotune.folder().exists()


def test_a_tile_that_does_not_run_is_passed_over(timer, caplog):
    timer.broken = {FAST}
    with caplog.at_level(logging.INFO, "torchflash"):
        assert timer.fastest() == (USUAL, True)
    assert "64 x 32, 4 warps, 2 stages: does not run: OutOfResources" in caplog.text


def test_progress_is_logged(timer, caplog):
    with caplog.at_level(logging.INFO, "torchflash"):
        timer.fastest()
    said = [r.getMessage() for r in caplog.records]
    assert said[0] == "autotuning forward for q [1, 2, 200, 16]: 1/12 64 x 64, 4 warps, 2 stages: 2.000 ms"
    assert said[-1] == "autotuned forward for q [1, 2, 200, 16]: 64 x 32, 4 warps, 2 stages, 1.000 ms"


def test_nothing_runs_or_no_memory_is_left(timer, monkeypatch, caplog):
    def launch(tile):
        raise RuntimeError("broken")

    assert autotune.fastest("forward", (None, ()), operands(), USUAL, launch) == (None, True)
    autotune._known.clear()

    def milliseconds(again):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "milliseconds", milliseconds)
    assert timer.fastest() == (None, True) and len(timer.tried) == 1
    assert "no memory is left to autotune forward" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- disk


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: "{",
        lambda c: "",
        lambda c: "[]",
        lambda c: json.dumps({"tile": c["tile"]}),
        lambda c: json.dumps({**c, "kind": "another"}),
        lambda c: json.dumps({**c, "tile": [64, 64, 4, 2]}),
        lambda c: json.dumps({**c, "tile": {**c["tile"], "block_m": 48}}),
        lambda c: json.dumps({**c, "tile": {**c["tile"], "block_n": 1024}}),
        lambda c: json.dumps({**c, "tile": {**c["tile"], "warps": "4"}}),
        lambda c: json.dumps({**c, "tile": {**c["tile"], "more": 1}}),
        lambda c: b"\xff\xfe\x00",
    ],
    ids=["cut", "empty", "list", "no kind", "another kind", "no names", "48", "1024", "text", "more", "binary"],
)
def test_a_file_that_is_not_ours_is_measured_again(timer, tmp_path, caplog, spoil):
    timer.fastest()
    (file,) = files(tmp_path)
    good = file.read_text()
    bad = spoil(json.loads(good))
    file.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    autotune._known.clear()
    assert timer.fastest() == (FAST, True) and timer.tried
    assert f"ignoring {file}" in caplog.text
    assert file.read_text() == good and files(tmp_path) == [file]


def test_a_folder_that_cannot_be_written(timer, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHFLASH_CACHE_DIR", str(tmp_path / "file"))
    assert timer.fastest() == (FAST, True)
    assert "cannot keep the choice of a tile in" in caplog.text
    assert timer.fastest() == (FAST, True) and not timer.tried


def test_where_the_folder_is(monkeypatch):
    monkeypatch.setenv("TORCHFLASH_CACHE_DIR", "/a")
    assert str(autotune.folder()) == "/a/autotune"
    monkeypatch.delenv("TORCHFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(autotune.folder()) == "/b/torchflash/autotune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert str(autotune.folder()) == "/c/.cache/torchflash/autotune"


WRITER = """
import logging, sys
from torchflash.kernels import autotune
from torchflash.kernels.configs import Tile
from torchflash.kernels.operands import Operands
mine, other = Tile(64, 64, 4, int(sys.argv[1])), Tile(64, 64, 4, 3 - int(sys.argv[1]))
for i in range(100):
    autotune.store("kind", mine, {mine: 1.0, other: 2.0})
    assert autotune.load("kind") in (mine, other)
"""


def test_two_processes_at_once(tmp_path):
    env = {**os.environ, "TORCHFLASH_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    both = [subprocess.Popen([sys.executable, "-c", WRITER, n], env=env, stderr=subprocess.PIPE) for n in ("1", "2")]
    for process in both:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0 and said == b""  # no warning either
    assert len(files(tmp_path)) == 1


# --------------------------------------------------------------------------------------------------------------- when


def test_never_while_capturing_or_on_a_side_stream(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    for capturing, stream, measurable in [(False, "default", True), (True, "default", False), (False, "side", False)]:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, s=stream: s)
        assert autotune.measurable(cuda) == measurable
    assert not autotune.measurable(torch.device("cpu"))


@pytest.mark.skipif(INTERPRETING, reason="this is that process")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-k", "interpreted"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def attention(inputs, tuning):
    *qkv, bias = inputs
    op = torch.ops.torchflash.attention
    score = "where(n <= m, 0.25 * s + t0[n - m + 39], -inf)"
    out, _ = op(*qkv, [bias], [], score, "n <= m", -math.inf, "p", 0.0, None, "bhmd", "", None, tuning, [])
    return out, *torch.autograd.grad(out.sum(), inputs)


@interpreted
def test_interpreted_results_are_those_without(timer, monkeypatch):
    """Trial launches leave no trace, neither in what is overwritten nor in what is added to."""
    monkeypatch.setattr(autotune, "TRIED", 3)
    launched = []
    usual = launch.start

    def start(kernel, *rest):
        launched.append(kernel.__name__)
        return usual(kernel, *rest)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(autotune, "milliseconds", lambda again: (again(), len(launched))[1])
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3)] + [torch.randn(79, requires_grad=True)]
    expected = attention(inputs, "")
    launched.clear()
    for _ in range(2):
        for got, want in zip(attention(inputs, "autotune"), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    counts = {name: launched.count(f"attention_{name}") for name in ("forward", "backward_kv", "backward_q")}
    trials = 2 * autotune.TRIED  # once by itself, once by the timer
    assert counts["forward"] == counts["backward_kv"] == trials + 2
    assert counts["backward_q"] == trials + 2 * 2  # delta is measured; what scatters is not


# ---------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path, caplog):
    """The chosen tile is one that was timed; results are those without; a second process need not measure."""
    monkeypatch.setenv("TORCHFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_known", {})
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def run(tuning):
        op = torch.ops.torchflash.attention
        out, _ = op(q, k, v, [], [], "0.125 * s", "", -math.inf, "p", 0.0, None, "bhmd", "", None, tuning, [])
        return out, *torch.autograd.grad(out.float().sum(), (q, k, v))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run("min_seqlen=0;autotune")
    side.synchronize()
    assert not (tmp_path / "autotune").exists()
    with caplog.at_level(logging.INFO, "torchflash"):
        got = run("min_seqlen=0;autotune")
    assert caplog.text.count("autotuned") == 3
    for a, b in zip(got, run("min_seqlen=0"), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
    for file in files(tmp_path):
        content = json.loads(file.read_text())
        assert content["measured"][0]["milliseconds"] > 0
        assert content["tile"] == {k: content["measured"][0][k] for k in Tile._fields}
    caplog.clear()
    autotune._known.clear()
    with caplog.at_level(logging.INFO, "torchflash"):
        again = run("min_seqlen=0;autotune")
    assert "autotun" not in caplog.text
    assert torch.equal(again[0], got[0])
