"""The Triton kernels themselves, run by Triton's interpreter on small shapes: same programs, same oracle, same budget.

The interpreter must be chosen before the kernels are imported, so the tests run in a process of their own:
TRITON_INTERPRET=1 python -m pytest tests/test_triton_interpreter.py does the same by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import BF16, CASES, F16, F32, Case, build
from few_queries import WAYS, few
from oracle import INF, Inputs, check, eager, run_op, within_budget
from paged import WAYS as PAGED
from paged import paged

from torchflash import score as sc

pytest.importorskip("triton")
F64 = torch.float64
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in a process of its own")
BY_NAME = {c.name: c for c in CASES}


@pytest.mark.skipif(INTERPRETING, reason="this is that process")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def kernels_only(request, monkeypatch, poisoned):
    """The blockwise torch implementation must not step in; and tiles are small, so that every axis has several."""
    if not INTERPRETING:
        yield
        return
    from torchflash.kernels import configs, launch, reference

    def step_in(*args, **kwargs):
        raise AssertionError("fell back to blockwise torch")

    monkeypatch.setattr(reference, "forward", step_in)
    monkeypatch.setattr(reference, "backward", step_in)
    monkeypatch.setattr(configs, "tiles", lambda *_: [configs.Tile(16, 32, 4, 1)])
    launch._fitting.clear()
    yield


@interpreted
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_programs(case: Case):
    check(build(case), slack=case.slack)


@interpreted
def test_mathematics():
    from mathematics import check_differences

    check_differences("cpu")


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "name",
    ["causal", "rows_without_keys_finfo", "masks_added", "mask_added_twice", "masks_of_two_sizes", "bias",
     "relative_bias", "dropout_gate_bias", "grouped"],
)  # fmt: skip
def test_half_precision(name: str, dtype: torch.dtype):
    check(build(BY_NAME[name], dtype), slack=BY_NAME[name].slack)


def finfo_rows(score: str = "0.25 * s + where(n <= m - 5, 0.0, {fill})") -> Inputs:
    """bfloat16, and rows that keep no key."""
    torch.manual_seed(0)
    fill = torch.finfo(BF16).min
    q, k, v = (torch.randn(1, 2, length, 8).to(BF16) for length in (20, 24, 24))
    return Inputs(q, k, v, score=score.format(fill=fill), keep="n <= m - 5", fill=fill)


@interpreted
@pytest.mark.parametrize(
    "score", ["0.25 * s + where(n <= m - 5, 0.0, {fill})", "where(n <= m - 5, 0.25 * s, {fill})", "0.3 * s"]
)
def test_row_statistics_are_those_of_the_scores(score: str):
    """Whatever the kernels put in the place of a huge fill: maximum and sum are the scores' own."""
    x = finfo_rows(score)
    _, (row_max, row_sum) = torch.ops.torchflash.attention(
        x.q, x.k, x.v, [], [], x.score, x.keep if "where" in score else "", x.fill, "p", 0.0, None, x.layout, "",
        None, x.tuning, [],
    )  # fmt: skip
    env = {"s": x.q.float() @ x.k.float().mT, "m": torch.arange(20)[:, None], "n": torch.arange(24)}
    scores = sc.evaluate(sc.parse(x.score), env, [], torch.float32)
    torch.testing.assert_close(row_max, scores.amax(-1))
    torch.testing.assert_close(row_sum, (scores - scores.amax(-1, keepdim=True)).exp().sum(-1), rtol=1e-4, atol=1e-4)


@interpreted
def test_backward_may_be_that_of_torch_after_a_forward_of_the_kernels(monkeypatch):
    from torchflash.kernels import launch

    x = finfo_rows()
    for leaf in x.leaves():
        leaf.requires_grad_()
    out = run_op(x)
    monkeypatch.undo()
    monkeypatch.setattr(launch, "backward", lambda *args: None)
    do = torch.randn(out.shape).to(BF16)
    found = torch.autograd.grad(out, x.leaves(), do)
    exact = torch.autograd.grad(eager(x, F64), x.leaves(), do.double())
    rough = torch.autograd.grad(eager(x), x.leaves(), do)
    for name, a, b, c in zip(x.names(), found, exact, rough, strict=True):
        within_budget(name, a, b, c)


@interpreted
def test_value_dtype_may_differ():
    check(build(BY_NAME["causal"], BF16, v_dtype=F32))
    check(build(BY_NAME["causal"], F32, v_dtype=F16))


@interpreted
@pytest.mark.parametrize("D", [1, 3, 16, 20, 72, 80, 96, 112, 160, 192, 256, 300])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_head_dimensions(D, dtype):
    """Held in chunks, or streamed: float32 above 64, others above 256."""
    torch.manual_seed(0)
    DV = {16: 40, 80: 300, 192: 128, 300: 24}.get(D, D)
    q, k, v = (torch.randn(shape).to(dtype) for shape in ((1, 2, 18, D), (1, 1, 35, D), (1, 1, 35, DV)))
    check(Inputs(q, k, v, score=f"where(n <= m + 17, {D**-0.5} * s, -inf)", keep="n <= m + 17"))


@interpreted
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 1, 1, 40), (2, 3, 40, 1), (1, 2, 33, 17), (9, 1, 4, 4), (1, 2, 16, 32)], ids=str
)
def test_lengths(shape):
    B, H, M, N = shape
    torch.manual_seed(0)
    check(Inputs(torch.randn(B, H, M, 8), torch.randn(B, H, N, 8), torch.randn(B, H, N, 8), score="0.3 * s"))


@interpreted
def test_strides():
    torch.manual_seed(0)
    q, k = torch.randn(1, 20, 2, 8).transpose(1, 2), torch.randn(1, 2, 8, 33).transpose(2, 3)
    v = torch.randn(1, 2, 66, 16)[:, :, ::2, ::2]
    x = Inputs(q, k, v, [torch.randn(33, 20).t()], score="0.3 * s + t0[m, n]", layout="bmhd")
    for do in (None, torch.ones(()).expand(1, 2, 20, 8), torch.randn(1, 2, 20, 16)[..., ::2]):
        check(x, do=do)
    kv = torch.randn(2, 1, 9, 8).expand(2, 4, 9, 8)
    check(Inputs(torch.randn(2, 4, 9, 8), kv, kv.clone()))


@interpreted
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_bad_score_spoils_its_row_only(bad):
    torch.manual_seed(0)
    bias = torch.zeros(20, 24)
    bias[3, 5] = bad
    q, k, v = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)
    x = Inputs(q, k, v, [bias], score="0.3 * s + t0[m, n]")
    out = run_op(x)
    assert out[:, :, 3].isnan().all() and not out[:, :, [0, 1, 2, *range(4, 20)]].isnan().any()
    x.post = "nan_to_num(p)"
    assert (run_op(x)[:, :, 3] == 0).all()


@interpreted
@pytest.mark.parametrize(
    "name", ["bias", "bias_batch", "bias_twice", "alibi", "learned_scale", "weight_after", "dropout_gate_bias"]
)
def test_deterministic_gradients_of_captures(name: str):
    x = build(BY_NAME[name])
    torch.use_deterministic_algorithms(True)
    try:
        check(x, slack=BY_NAME[name].slack)
    finally:
        torch.use_deterministic_algorithms(False)


@interpreted
def test_scattered_gradients_alert_when_determinism_is_asked_for():
    x = build(BY_NAME["relative_bias"])
    x.captures[0].requires_grad_()
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="no deterministic implementation"):
            run_op(x).sum().backward()
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="no deterministic implementation"):
            run_op(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@interpreted
def test_dropout_is_that_of_the_torch_implementation():
    from torchflash.kernels import philox

    B, H, M, N, p = 2, 3, 40, 24, 0.25
    for seed in (7, 2**40 + 3, -5):
        x = Inputs(
            torch.zeros(B, H, M, 8),
            torch.zeros(B, H, N, 8),
            torch.eye(N).expand(B, H, N, N),
            score="0.0 * s",
            dropout_p=p,
            seed=torch.tensor([seed]),
        )
        b, h, m, n = (
            torch.arange(size).view([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate((B, H, M, N))
        )
        torch.testing.assert_close(run_op(x) * N, philox.scale(p, x.seed, (b * H + h) * M + m, n))


@interpreted
@pytest.mark.parametrize("M", [1, 20])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_bad_rows_under_a_mask(M: int, bad: float):
    """All rows of a tile of queries are bad, and their NaN reaches keys that the mask takes from them."""
    torch.manual_seed(0)
    bias = torch.zeros(M, 70)
    bias[:, 0] = bad
    q, k, v = torch.randn(1, 2, M, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    check(Inputs(q, k, v, [bias], score="where(n < 20, 0.3 * s + t0[m, n], -inf)", keep="n < 20"))


@interpreted
def test_tiles_that_are_not_kept_are_not_read():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8)
    x = Inputs(q, k, v, score="where(n < 20, 0.3 * s, -inf)", keep="n < 20")
    expected = run_op(x)
    k[:, :, 32:] = float("nan")  # would spoil everything: NaN is masked, but 0 * NaN in the values is not
    v[:, :, 32:] = float("nan")
    assert torch.equal(run_op(x), expected)


VECTORS = {
    "padding": "t0[b, n]", "causal": "(n <= m) & t0[b, n]", "not": "(n <= m + 40) & ~(~t0[b, n]) & (m - n < 50)",
    "length": "(n < t1[b]) & (n <= m)", "pair": "(n <= m) & (t0[b, n] & (n < t1[b]))",
    "queries": "(n <= m) & t0[b, m]", "documents": "(t2[b, m] == t2[b, n]) & (n <= m)", "prefix": "(n <= m) | t0[b, n]",
    "distance": "(t2[b, m] - t2[b, n] < t3[()]) & (n <= m)", "some": "(t2[b, n] >= t2[b, m] - 1) & t4[m, n]",
    "added": "~(t5[b, n] <= -1e30) & (n <= m)", "alike": "(t0[b, m] == t0[b, n]) & (n <= m)",
    "either": "(t0[b, m] + t0[b, n] > 0) & (n <= m)", "floats": "(t5[b, m] <= t5[b, n]) & (n <= m)",
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", VECTORS)
def test_states_of_tiles(name: str):
    """Against the mask itself, of whose vectors only the ranges are looked at."""
    from torchflash.kernels.operands import Operands
    from torchflash.kernels.program import kinds_of, read
    from torchflash.kernels.reference import Problem

    torch.manual_seed(0)
    M, N, keep = 150, 210, VECTORS[name]
    kept = torch.rand(2, N) < 0.99
    kept[0, :70], kept[1, 60:130] = False, True
    documents = torch.arange(N)[None].expand(2, N) // torch.tensor([[64], [50]])
    captures = [kept, torch.tensor([33, 170]), documents, torch.tensor(2), torch.rand(M, N) < 0.1, ~kept * -1e38]
    program = read(f"where({keep}, s, -inf)", keep, -INF, "p", kinds_of(captures))
    q, k = torch.randn(2, 2, M, 8), torch.randn(2, 2, N, 8)
    o = Operands(Problem(q, k, k, captures, (), program, 0.0, None))
    maps = o.setup.maps
    spans = name == "some"
    assert (maps.states._functions((16, 32), spans, False)["RANGES"] is None) == (name in ("alike", "either"))
    found, _ = maps._states((16, 32), o)
    env = {"b": torch.arange(2)[:, None, None], "m": torch.arange(M)[:, None], "n": torch.arange(N)}
    dense = sc.evaluate(sc.parse(keep), env, captures, torch.float32).expand(2, M, N)
    for b in range(2):
        for i, rows in enumerate(dense[b].split(16)):
            for j, tile in enumerate(rows.split(32, 1)):
                state = int(found[b, 0, i, j])
                assert state or not tile.any()
                assert state != 2 or tile.all()
                if name in ("padding", "causal", "documents", "added"):  # as good as can be
                    assert state == int(tile.any()) + int(tile.all())


@interpreted
@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_order_of_tiles(run: bool, columns: bool):
    """Against a plain sort, for states at random: several runs of plain tiles in a line, or none."""
    from torchflash.kernels.visits import tile_order

    torch.manual_seed(0)
    states = torch.randint(0, 3, (2, 7, 11), dtype=torch.int8)
    states[0, 0], states[0, 1], states[1, 2] = 2, 0, 1
    by_line = states.mT if columns else states
    _, lines, tiles = by_line.shape
    to_line, to_tile = (1, 11) if columns else (11, 1)
    order, counts = (torch.full((2, lines, n), -1, dtype=torch.int32) for n in (tiles, 2))
    whole = tiles - 1
    tile_order[(2 * lines,)](
        states, None, order, counts, lines=lines, tiles=tiles, whole=whole, given_lines=lines, given_tiles=tiles,
        to_line=to_line, to_tile=to_tile, LINE_PARTS=1, LINE_SPLIT=1, TILE_PARTS=1, TILE_SPLIT=1, RUN=run, WIDTH=4,
    )  # fmt: skip
    for b in range(2):
        for line in range(lines):
            found = by_line[b, line].tolist()
            plain = [i for i, state in enumerate(found) if state == 2 and i < whole]
            if run:
                plain = [i for i in plain if i - plain[0] == plain.index(i)]
            cut = [i for i, state in enumerate(found) if state and i not in plain]
            rest = [i for i, state in enumerate(found) if not state]
            assert order[b, line].tolist() == plain + cut + rest
            assert counts[b, line].tolist() == [len(plain), len(plain + cut)]


@interpreted
@pytest.mark.parametrize("keep", ["(n < 70) | (n >= 130)", "(m < 40) | (m >= 90)", "(n % 96 < 64) & (n <= m)"])
def test_masks_with_gaps(keep: str):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 130, 8), torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 8)
    check(Inputs(q, k, v, score=f"where({keep}, 0.3 * s, -1e9)", keep=keep, fill=-1e9))


@interpreted
@pytest.mark.parametrize("name", WAYS)
def test_few_queries(name: str, monkeypatch):
    from torchflash.kernels import launch

    taken = []
    split = launch._forward_split
    monkeypatch.setattr(launch, "_forward_split", lambda *args: taken.append(1) or split(*args))
    shapes = [(1, 16, 1)] if name.startswith("added") else [(3, 24, 2)]
    for M, D, heads in shapes:
        check(few(WAYS[name], M, D, heads, F32), slack=4.0)
    assert len(taken) == len(shapes) * WAYS[name].split


@interpreted
@pytest.mark.parametrize(
    ("way", "kind"),
    [*((way, "lengths") for way in PAGED), ("pages", "all"), ("pages", "empty"), ("pages", "empty_finite")],
)
def test_paged_keys(way: str, kind: str, monkeypatch):
    """By the kernel of few queries, with its combination, and by the usual one."""
    from torchflash.kernels import launch

    taken = []
    split = launch._forward_split
    monkeypatch.setattr(launch, "_forward_split", lambda *args: taken.append(1) or split(*args))
    for M, N, D in ((2, 520, 16), (20, 75, 20)):
        lengths = {"all": None, "lengths": (N - 5, 23), "empty": (0, N), "empty_finite": (0, N)}[kind]
        x = paged(PAGED[way], M, N, D, (4, 2), F32, lengths)
        if kind == "empty_finite":
            x = replace(x, score="where(n < t1[b], 0.25 * s, -1e9)", fill=-1e9)
        within_budget("out", run_op(x), eager(x, F64), eager(x))
    assert len(taken) == 1


@interpreted
@pytest.mark.parametrize(("D", "dtype"), [(80, BF16), (72, F32), (300, BF16)], ids=["chunks", "streamed", "streamed16"])
def test_paged_keys_of_any_dimension(D, dtype):
    x = paged(PAGED["heads_outside"], 18, 70, D, (2, 1), dtype, (70, 50))
    within_budget("out", run_op(x), eager(x, F64), eager(x))


@interpreted
@pytest.mark.parametrize(("M", "N"), [(2, 512), (20, 64)], ids=["few", "many"])
def test_pages_that_do_not_exist_are_not_read(M: int, N: int):
    x = paged(PAGED["pages"], M, N, 16, (4, 2), F32)
    for name in ("k", "v"):
        around = torch.full((3, *getattr(x, name)[0].shape), float("nan"))
        around[1] = getattr(x, name)[0]
        setattr(x, name, around[1][None].expand_as(getattr(x, name)))
    pages = x.k.shape[2]
    x.captures[0][0, :4] = torch.tensor([pages, 2**40, -pages - 1, -(2**40)])
    assert run_op(x).isfinite().all()


@interpreted
def test_a_tile_that_does_not_fit_falls_back(monkeypatch, caplog):
    from triton.runtime.errors import OutOfResources

    from torchflash.kernels import configs, launch, reference

    tried = []
    kernel = launch.attention_forward

    class Small:
        def __getitem__(self, grid):
            def call(**arguments):
                tried.append(arguments["BLOCK_M"])
                if arguments["BLOCK_M"] > limit:
                    raise OutOfResources(1, 0, "shared memory")
                kernel[grid](**arguments)

            return call

    monkeypatch.setattr(launch, "attention_forward", Small())
    monkeypatch.setattr(configs, "tiles", lambda *a: [configs.Tile(m, 16, 4, 1) for m in (64, 32, 16)])
    x = build(BY_NAME["causal"])
    limit = 16
    expected = run_op(x)
    assert tried == [64, 32, 16]
    run_op(x)
    assert tried == [64, 32, 16, 16]  # what fits is remembered
    limit = 0
    launch._fitting.clear()
    monkeypatch.undo()
    monkeypatch.setattr(launch, "attention_forward", Small())
    assert reference.forward
    torch.testing.assert_close(run_op(x), expected)
    assert "running blockwise torch" in caplog.text
