"""`python -m torchflash tune` without a GPU: candidates, estimates against what is compiled, tables, JSON, and what
goes wrong; with one, times."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time

import expecttest
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, does not interpret", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from torchflash import tune
from torchflash.kernels import compiling, launcher, parallel
from torchflash.kernels.candidates import REGISTERS, SPILLED, Estimate, Work, candidates, estimate, shared_limit
from torchflash.kernels.compiling import Case, Resources
from torchflash.kernels.configs import Tile
from torchflash.kernels.parallel import Done, Task
from torchflash.options import parse as parse_options

KERNELS = ("forward", "backward_kv", "backward_q")
HOPPER = Work(M=4096, N=4096, D=64, DV=64, itemsize=2, capability=90)
AMPERE = dataclasses.replace(HOPPER, capability=80)
CAUSAL = Case(1, 2, 256, 64, 2, 2, 256, 64, torch.bfloat16, "where(n <= m, 0.125 * s, -inf)", "n <= m")


# ----------------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize("D", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_are_possible(kernel, itemsize, D, capability):
    work = Work(4096, 4096, D, D, itemsize, capability, split=itemsize == 4)
    first = Tile(64, 64, 4, 2)
    found = candidates(kernel, work, first)
    assert found[0] == first and len(set(found)) == len(found)
    for tile in found[1:]:
        expected = estimate(kernel, tile, work)
        assert expected.shared <= shared_limit(capability) and expected.registers <= REGISTERS * SPILLED
        assert tile.block_m in (32, 64, 128) and tile.block_n in (32, 64, 128)
        assert capability != 90 or (tile.block_n if kernel == "backward_kv" else tile.block_m) >= 64


def test_there_are_enough_candidates():
    for kernel in KERNELS:
        assert len(candidates(kernel, HOPPER, Tile(64, 64, 4, 2))) >= 24


def test_the_nearest_candidates_come_first():
    found = candidates("forward", HOPPER, Tile(128, 64, 4, 3))
    steps = [sum(abs(math.log2(a / b)) for a, b in zip(t[:3], found[0][:3], strict=True)) for t in found]
    steps = [s + abs(t.stages - 3) for s, t in zip(steps, found, strict=True)]
    assert steps == sorted(steps) and steps[:2] == [0, 1]


@pytest.mark.parametrize(("M", "blocks"), [(1, {16}), (17, {32}), (100, {64, 128}), (4096, {64, 128})])
def test_blocks_are_not_longer_than_the_sequence(M, blocks):
    found = candidates("forward", dataclasses.replace(HOPPER, M=M), Tile(64, 64, 4, 2))[1:]
    assert {t.block_m for t in found} == blocks


def test_what_is_fixed_stays():
    found = candidates("forward", HOPPER, Tile(128, 64, 4, 3), {"BLOCK_M": 64, "num_stages": 2})
    assert found[0] == Tile(64, 64, 4, 2) and {(t.block_m, t.stages) for t in found} == {(64, 2)} and len(found) > 3


# ------------------------------------------------------------------------------------------------------------- estimate


@pytest.mark.parametrize(
    ("kernel", "tile", "work", "shared", "registers"),
    [
        # q, and k and v three times
        ("forward", (128, 64, 4, 3), HOPPER, 128 * 64 * 2 + 3 * 2 * 64 * 64 * 2, 40 + (2 * 128 * 64 + 64 * 64) // 128),
        # one buffer less, and q is in registers as well
        ("forward", (128, 64, 4, 3), AMPERE, 128 * 64 * 2 + 2 * 2 * 64 * 64 * 2, 60 + 160 + 32),
        # k and v in turn
        ("forward", (64, 64, 4, 1), HOPPER, 2 * 64 * 64 * 2, 120),
        # k and v, and q and do twice
        ("backward_kv", (64, 128, 8, 2), HOPPER, 2 * 128 * 64 * 2 + 2 * 2 * 64 * 64 * 2, 200),
        ("backward_q", (64, 64, 4, 2), HOPPER, 2 * 64 * 64 * 2 + 2 * 2 * 64 * 64 * 2, 152),
        # a bias in bfloat16, read one tile ahead
        ("backward_q", (64, 64, 4, 2), dataclasses.replace(HOPPER, bias=2), 49152 + 64 * 64 * 2, 152),
    ],
)
def test_the_formula(kernel, tile, work, shared, registers):
    assert estimate(kernel, Tile(*tile), work) == Estimate(shared, registers)


COMPILED = [
    ("forward", Tile(64, 64, 4, 2), 90),
    ("forward", Tile(64, 64, 4, 1), 90),
    ("forward", Tile(64, 64, 4, 3), 80),
    ("backward_kv", Tile(64, 64, 4, 2), 90),
    ("backward_q", Tile(64, 64, 4, 2), 90),
]


def test_the_estimate_is_close_to_what_is_compiled():
    """Shared memory within 5 % and 2 KiB, for alignment, barriers and row statistics."""
    found = dict(parallel.compile_all([Task(CAUSAL, *task) for task in COMPILED]))
    for i, (kernel, tile, capability) in enumerate(COMPILED):
        assert found[i].error is None
        (resources,) = found[i].resources
        expected = estimate(kernel, tile, compiling.work(CAUSAL, capability)).shared
        said = f"{kernel} {tile} sm_{capability}: estimated {expected}, compiled {resources}"
        assert abs(resources.shared - expected) <= 0.05 * expected + 2048, said


# -------------------------------------------------------------------------------------------------------------- workers


@dataclasses.dataclass(frozen=True)
class Broken(Case):
    """Its compilation ends as `how` says."""

    how: str = ""

    def problem(self, device="meta"):
        if self.how == "crash":
            os._exit(11)
        if self.how == "hang":
            time.sleep(600)
        raise RuntimeError("first line\nsecond line")


def broken(how):
    return Broken(**vars(CAUSAL), how=how)


def test_a_crash_is_a_result():
    tasks = [Task(broken(how), "forward", Tile(64, 64, 4, 2), 90) for how in ("crash", "raise", "crash", "raise")]
    found = dict(parallel.compile_all(tasks, jobs=2))
    said = [found[i].error for i in range(4)]
    assert said == ["the compiler crashed", "RuntimeError: first line"] * 2
    assert not multiprocessing.active_children()


def test_what_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE", 0.5)
    (found,) = parallel.compile_all([Task(broken("hang"), "forward", Tile(64, 64, 4, 2), 90)], jobs=1)
    assert found == (0, Done(Tile(64, 64, 4, 2), error="took more than 0 seconds to compile"))
    assert not multiprocessing.active_children()


def test_no_process_outlives_an_interrupt():
    tasks = [Task(broken(how), "forward", Tile(64, 64, 4, 2), 90) for how in ("raise", "hang", "hang")]
    results = parallel.compile_all(tasks, jobs=2)
    assert next(results)[1].error == "RuntimeError: first line" and multiprocessing.active_children()
    results.close()
    assert not multiprocessing.active_children()


# ------------------------------------------------------------------------------------------------------------ arguments


def case(*argv):
    return tune.parse(argv).case


def test_defaults():
    request = tune.parse(["--shape", "2,8,1024,128"])
    assert request.kernels == KERNELS and request.top == 12
    scale = 1 / math.sqrt(128)
    assert request.case == Case(2, 8, 1024, 128, 8, 8, 1024, 128, torch.bfloat16, f"{scale} * s")


def test_everything_given():
    found = case("--shape", "2,8,1024,64", "--heads-kv", "2", "--length-kv", "512", "--dim-v", "32", "--dtype", "fp16",
                 "--score", "scale * s + slopes[h] * (n - m)", "--keep", "docs[b, m] == docs[b, n]", "--dropout", "0.1",
                 "--tensor", "slopes=H:fp32", "--tensor", "docs=B,1024:int32")  # fmt: skip
    assert (found.Hk, found.Hv, found.N, found.DV, found.dropout_p) == (2, 2, 512, 32, 0.1)
    assert found.captures == (((8,), torch.float32), ((2, 1024), torch.int32))
    problem = found.problem()
    assert problem.k.shape == (2, 2, 512, 64) and problem.k.stride(-1) == 1 and problem.k.device.type == "meta"
    assert problem.program.keep is None or "t1" in str(problem.program.keep)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--shape 1,2", "--shape must be four numbers B,H,N,D; got '1,2'"),
        ("--shape 1,2,0,8", "--shape, --heads-kv, --length-kv and --dim-v must be at least 1"),
        ("--shape 1,3,8,8 --heads-kv 2", "--heads-kv must divide the heads of the queries, 3; got 2"),
        ("--arch sm_70", "--arch: unknown GPU 'sm_70'; known: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
        ("--kernels fwd", "--kernels: unknown kernel 'fwd'; known: forward, backward_kv, backward_q"),
        ("--score s+t[h]", "score, line 1, column 3: unknown tensor 't'; describe it by --tensor t=SHAPE:DTYPE, as in"),
        ("--tensor t=H:fp32", "--tensor gives 't', which neither score nor keep names; leave it out"),
        ("--score s+t[h] --tensor t=X:fp32", "--tensor: sizes are numbers or B, H, M, N; got 't=X:fp32'"),
        ("--tensor t=3", "--tensor must be NAME=SHAPE:DTYPE, as in slopes=H:fp32, of bf16, fp16, fp32, bool, int32, "),
        ("--dropout 1", "--dropout must be at least 0 and less than 1; got 1.0"),
        ("--top -1", "--top must be at least 0; got -1"),
        ("--jobs 0", "--jobs must be at least 1; got 0"),
        ("--dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
        ("--what", "unrecognized arguments: --what"),
    ],
)
def test_bad_arguments_are_one_line(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        tune.main(argv.split())
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"torchflash tune: {said}") and err.endswith("; see python -m torchflash tune --help\n")


def test_without_triton():
    program = "import sys; sys.modules['triton'] = None; from torchflash import tune; sys.exit(tune.main([]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "torchflash tune: needs triton, which compiles the kernels; install it\n"


def test_commands():
    def run(*argv):
        return subprocess.run([sys.executable, "-m", "torchflash", *argv], capture_output=True, text=True)

    unknown, helped = run("tuen"), run("tune", "--help")
    assert unknown.returncode == 2 and unknown.stderr.startswith("torchflash: unknown command 'tuen'; usage:")
    assert helped.returncode == 0 and "--length-kv N" in helped.stdout and "C75xx" in helped.stdout


# --------------------------------------------------------------------------------------------------------------- output


def resources(shared, registers, spills=0, warnings=()):
    return (Resources(registers, spills, spills, shared, 4, 2, 8, 0, warnings),)


def tables(times=()):
    request = tune.Request(CAUSAL, 90, "NVIDIA H200, sm_90" if times else None, ("forward",), 4, None, None)
    found = tune.Tables(request)
    serialized = ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",)
    rows = [
        tune.Row(Tile(64, 128, 4, 2), Estimate(73728, 168), resources(74752, 159), built_in=True),
        tune.Row(Tile(128, 64, 4, 2), Estimate(49152, 200), resources(49184, 255, 1316, serialized)),
        tune.Row(Tile(128, 128, 8, 4), Estimate(147456, 168), (), "the compiler crashed"),
        tune.Row(Tile(64, 64, 4, 2), Estimate(40960, 120), resources(41984, 122)),
    ]
    for row, ms in zip(rows, times, strict=False):
        row.ms = ms
    found.rows = {"forward": rows}
    found.choose()
    return found


class TestOutput(expecttest.TestCase):
    maxDiff = None

    def test_without_times_the_built_in_tile_is_the_choice(self):
        self.assertExpectedInline(str(tables()), """\
torchflash tune for sm_90: q [1, 2, 256, 64], k [1, 2, 256, 64], v [1, 2, 256, 64], bfloat16
device  none of this kind here, so no times
score   where(n <= m, 0.125 * s, -inf)
keep    n <= m

forward
                                        shared memory, KiB       registers  spilled
   BLOCK_M BLOCK_N num_warps num_stages  estimate compiled  est. compiled    bytes        ms
*       64     128         4          2      72.0     73.0   168      159        0         -  built-in
       128      64         4          2      48.0     48.0   200      255     1316         -  C7510
       128     128         8          4     144.0        -   168        -        -         -  the compiler crashed
        64      64         4          2      40.0     41.0   120      122        0         -

options={
    "torchflash.BLOCK_M": {"forward": 64},
    "torchflash.BLOCK_N": {"forward": 128},
    "torchflash.num_warps": {"forward": 4},
    "torchflash.num_stages": {"forward": 2},
}""")

    def test_with_times_the_fastest_is(self):
        self.assertExpectedInline(str(tables((0.5, 0.75, None, 0.25))), """\
torchflash tune for sm_90: q [1, 2, 256, 64], k [1, 2, 256, 64], v [1, 2, 256, 64], bfloat16
device  NVIDIA H200, sm_90
score   where(n <= m, 0.125 * s, -inf)
keep    n <= m

forward
                                        shared memory, KiB       registers  spilled
   BLOCK_M BLOCK_N num_warps num_stages  estimate compiled  est. compiled    bytes        ms
*       64      64         4          2      40.0     41.0   120      122        0     0.250
        64     128         4          2      72.0     73.0   168      159        0     0.500  built-in
       128      64         4          2      48.0     48.0   200      255     1316     0.750  C7510
       128     128         8          4     144.0        -   168        -        -         -  the compiler crashed

options={
    "torchflash.BLOCK_M": {"forward": 64},
    "torchflash.BLOCK_N": {"forward": 64},
    "torchflash.num_warps": {"forward": 4},
    "torchflash.num_stages": {"forward": 2},
}""")


def test_options_are_those_of_torch_compile():
    options, _ = parse_options(options=tables().options())
    assert options.tuning().tile("forward") == {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2}


def test_json():
    content = json.loads(json.dumps(tables((0.5, 0.75, None, 0.25)).as_dict()))
    first, *_, last = content["kernels"]["forward"]
    assert first["choice"] and not first["built_in"] and first["ms"] == 0.25
    assert first["estimate"] == {"shared": 40960, "registers": 120}
    assert first["compiled"] == {"shared": 41984, "registers": 122, "spills": 0, "warnings": []}
    assert last["error"] == "the compiler crashed" and last["compiled"] is None and last["ms"] is None
    assert content["arch"] == "sm_90" and content["case"]["dtype"] == "bfloat16"
    assert content["options"]["torchflash.BLOCK_M"] == {"forward": 64}


def test_the_command(tmp_path):
    """Table on stdout, progress on stderr, JSON in a file."""
    file = tmp_path / "tune.json"
    argv = ["--shape", "1,2,64,16", "--kernels", "forward,backward_q", "--arch", "80", "--top", "2", "--causal"]
    command = [sys.executable, "-m", "torchflash", "tune", *argv, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title, device, score, keep, *rest = done.stdout.splitlines()
    assert title == "torchflash tune for sm_80: q [1, 2, 64, 16], k [1, 2, 64, 16], v [1, 2, 64, 16], bfloat16"
    assert device == "device  none of this kind here, so no times" or torch.cuda.is_available()
    assert score == "score   where(n <= m, 0.25 * s, -inf)" and keep == "keep    n <= m"
    assert [line for line in rest if line in KERNELS] == ["forward", "backward_q"]
    assert sum(line.startswith("*") and line.endswith("built-in") for line in rest) == 2
    assert "compiling 1/2: " in done.stderr
    content = json.loads(file.read_text())
    assert eval("".join(rest[rest.index("options={") :]).removeprefix("options=")) == content["options"]
    for rows in content["kernels"].values():
        assert len(rows) == 2 and all(row["compiled"]["registers"] > 16 and row["error"] is None for row in rows)


def test_what_does_not_fit_is_a_row():
    row = tune.Row(Tile(128, 128, 8, 4), Estimate(200000, 100))
    tune._fill(row, Done(row.tile, resources(200000, 100)), 86)
    assert row.error == "does not fit into 99 KiB"
    assert "195.3" in tune.line(row)


def test_ctrl_c_shows_what_is_known(monkeypatch, capsys):
    def interrupted(request, found, progress):
        found.rows = tables().rows
        progress("compiling 1/4: forward")
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    assert tune.main(["--shape", "1,2,256,64"]) == 130
    out, err = capsys.readouterr()
    assert "64     128" in out and "options={" in out
    assert err == "compiling 1/4: forward\ninterrupted; this much is known:\n"


# ---------------------------------------------------------------------------------------------------------------- times


class Kernel:
    """Stands in for what launcher.start gives."""

    def repeated(self, changing):
        return lambda: None


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_is_timed_with_one_tile(monkeypatch, kernel):
    started, timed = [], []
    tile = Tile(32, 64, 8, 4)

    def start(kernel, grid, changing, others):
        given = others()
        started.append((kernel.__name__, [given.get(k) for k in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]))
        return Kernel()

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(compiling.autotune, "milliseconds", lambda again: timed.append(started[-1]) or 2.0)
    assert compiling.time_tile(CAUSAL.problem("cpu"), kernel, tile) == 2.0
    assert timed == [(f"attention_{kernel}", list(tile))]


def test_a_tile_that_does_not_fit_has_no_time(monkeypatch):
    def start(kernel, grid, changing, others):
        if kernel.__name__ == "attention_backward_kv":
            raise OutOfResources(300000, 200000, "shared memory")
        return Kernel()

    monkeypatch.setattr(launcher, "start", start)
    with pytest.raises(OutOfResources):
        compiling.time_tile(CAUSAL.problem("cpu"), "backward_kv", Tile(128, 128, 8, 4))


@pytest.mark.gpu
def test_times_on_a_gpu(tmp_path):
    file = tmp_path / "tune.json"
    command = [sys.executable, "-m", "torchflash", "tune", "--shape", "4,12,2048,64", "--causal", "--top", "4"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kernel, rows in json.loads(file.read_text())["kernels"].items():
        times = [row["ms"] for row in rows if row["error"] is None]
        assert times and all(0.005 < ms < 50 for ms in times), (kernel, times)
        assert times == sorted(times) and rows[0]["choice"], kernel
        assert any(row["built_in"] and row["ms"] for row in rows), kernel
