"""Rows that keep no key (kernels/even.py), by the kernels in Triton's interpreter: values and gradients are eager's, no
tile is computed for such rows, and rows that only look like them are computed as ever.

As in test_triton_interpreter.py: in a process of their own, or by hand with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import BF16, F16, F32
from oracle import INF, Inputs, check, run_op
from torch import Tensor

from torchflash.kernels import program as programs

pytest.importorskip("triton")
from torchflash.kernels import even
from torchflash.kernels.forms import form

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in a process of its own")
MIN = torch.finfo(BF16).min
ADDED = "0.25 * s + t0[b, 0, m, n]", "~(t0[b, 0, m, n] <= -1e+30)", -1e30
HALF_ADDED = f"0.25 * s + where(t0[b, 0, m, n], 0.0, {MIN})", "t0[b, 0, m, n]", MIN
FILLED = f"where(t0[b, 0, m, n], 0.25 * s, {MIN})", "t0[b, 0, m, n]", MIN
FILLED_1E9 = "where(t0[b, 0, m, n], 0.25 * s, -1000000000.0)", "t0[b, 0, m, n]", -1e9
FILLED_F16 = "where(t0[b, 0, m, n], 0.25 * s, -65504.0)", "t0[b, 0, m, n]", -65504.0

WAYS = {"added": ADDED, "where_added": HALF_ADDED, "filled": FILLED, "filled_1e9": FILLED_1E9, "filled_f16": FILLED_F16}


def slow(*sizes: int) -> Any:
    return pytest.param(sizes, marks=pytest.mark.slow)


@pytest.mark.skipif(INTERPRETING, reason="this is that process")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch, poisoned):
    if not INTERPRETING:
        return
    from torchflash.kernels import configs, launch, reference

    def step_in(*args, **kwargs):
        raise AssertionError("fell back to blockwise torch")

    monkeypatch.setattr(reference, "forward", step_in)
    monkeypatch.setattr(reference, "backward", step_in)
    monkeypatch.setattr(configs, "tiles", lambda *_: [configs.Tile(16, 32, 4, 1)])
    launch._fitting.clear()


class Masked(Inputs):
    """The mask gets no gradient, as in a model."""

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v]

    def names(self) -> list[str]:
        return ["q", "k", "v"]


def left_padded(M: int, N: int, pads: tuple[int, ...]) -> Tensor:
    """[B, 1, M, N] bool: causal, the last query at the last key, and without the first keys of each batch."""
    m, n = torch.arange(M)[:, None], torch.arange(N)
    return torch.stack([(n <= m + N - M) & (n >= pad) for pad in pads])[:, None]


def masked(
    way: tuple[str, str, float], kept: Tensor, dtype: torch.dtype = F32, D: int = 16, DV: int = 16, H: int = 1,
    heads: tuple[int, int] | None = None, low: float = MIN,
) -> Masked:  # fmt: skip
    torch.manual_seed(0)
    (B, _, M, N), (heads_k, heads_v) = kept.shape, heads or (H, H)
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, heads_k, N, D), torch.randn(B, heads_v, N, DV) + 0.5
    mask = torch.zeros(kept.shape).masked_fill(~kept, low).to(dtype) if way is ADDED else kept
    score, keep, fill = way
    return Masked(q.to(dtype), k.to(dtype), v.to(dtype), [mask], score=score, keep=keep, fill=fill)


def padded(way: tuple[str, str, float], dtype: torch.dtype = F32, **sizes: Any) -> Masked:
    """A batch with 19 rows of nothing but padding, and one that has no key at all."""
    return masked(way, left_padded(34, 34, (19, 34)), dtype, **sizes)


@pytest.fixture
def visits(monkeypatch) -> Callable[[Callable[[], Any]], dict[str, int]]:
    """Counts the tiles that the kernels compute in a call."""
    from torchflash.kernels import backward, forward

    def count(run: Callable[[], Any]) -> dict[str, int]:
        found = dict.fromkeys(("forward", "backward_kv", "backward_q"), 0)

        def counting(name: str, tile: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                found[name] += 1
                return tile(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for module, name in ((forward, "forward"), (backward, "backward_kv"), (backward, "backward_q")):
                patch.setattr(module, f"{name}_tile", counting(name, getattr(module, f"{name}_tile")))
            run()
        return found

    return count


def forward_and_backward(x: Inputs) -> tuple[Tensor, ...]:
    for leaf in x.leaves():
        leaf.requires_grad_()
    out = run_op(x)
    torch.manual_seed(1)
    return out.detach(), *torch.autograd.grad(out, x.leaves(), torch.randn(out.shape).to(out.dtype))


@contextmanager
def without(monkeypatch) -> Iterator[None]:
    """The kernels compute all rows alike."""
    with monkeypatch.context() as patch:
        patch.setattr(even, "shape", lambda form: None)
        yield


# ---------------------------------------------------------------------------------------------------------- eligibility


@pytest.mark.parametrize(
    ("score", "keep", "kinds", "expected"),
    [
        (ADDED[0], ADDED[1], ("f",), (0.25, True)),
        (HALF_ADDED[0], HALF_ADDED[1], ("b",), (0.25, False)),
        (FILLED[0], FILLED[1], ("b",), (0.0, False)),
        ("where(t0[b, n], where(n <= m, s, -1e9), -1e9)", "t0[b, n] & (n <= m)", ("b",), (0.0, False)),
        ("s / 8.0 + 0.1 * float(n - m) + t0[b, n]", "~(t0[b, n] <= -1e+30)", ("f",), (0.125, True)),
        ("where(t0[b, n], where(n <= m, s, -1e8), -1e9)", "t0[b, n] & (n <= m)", ("b",), None),
        ("where(t0[b, n], s, -inf)", "t0[b, n]", ("b",), None),
        ("where(t0[b, n], s, -1e9)", "t0[b, n] & (n <= m)", ("b",), None),
        ("where(n <= m - 5, s, -1e9)", "n <= m - 5", (), None),
        ("s + where(t0[b, n], 0.0, -1e20)", "t0[b, n]", ("b",), None),
        ("s + where(t0[b, n], 0.0, -1e30) + where(n <= m, 0.0, -1e30)", "t0[b, n] & (n <= m)", ("b",), None),
        ("s + t1[h, m, n] + t0[b, n]", "~(t0[b, n] <= -1e+30)", ("f", "f"), None),
        ("tanh(s) + t0[b, n]", "~(t0[b, n] <= -1e+30)", ("f",), None),
    ],
)  # fmt: skip
def test_which_programs_have_even_rows(score: str, keep: str, kinds: tuple[str, ...], expected: Any):
    found = even.shape(form(programs.read(score, keep, -1e8, "p", kinds), True))
    assert (found and (found.slope, found.value is not None)) == expected


# --------------------------------------------------------------------------------------------------------------- values


@interpreted
@pytest.mark.parametrize(
    ("way", "dtype"),
    # float16 does not hold what is so low that scores are lost in it
    [(way, dtype) for way in WAYS for dtype in (F32, BF16, F16) if (way, dtype) != ("added", F16)],
)
def test_left_padding(way: str, dtype: torch.dtype):
    check(padded(WAYS[way], dtype))


@interpreted
@pytest.mark.parametrize("way", ["added", "where_added", "filled_1e9"])
def test_more_queries_than_keys_and_rows_here_and_there(way: str):
    torch.manual_seed(0)
    kept = torch.rand(1, 1, 52, 40) < 0.3
    kept[0, :, 3::5] = False
    kept[0, :, 16:34] = False
    check(masked(WAYS[way], kept))


@interpreted
@pytest.mark.parametrize("heads", [(4, 4), (2, 1), (1, 4), slow(2, 2), slow(1, 1)], ids=str)
@pytest.mark.parametrize("way", ["added", "filled"])
def test_grouped_heads(way: str, heads: tuple[int, int]):
    check(masked(WAYS[way], left_padded(34, 34, (19,)), H=4, heads=heads))


@interpreted
@pytest.mark.parametrize("dims", [(80, 80), (3, 5), (300, 40), slow(40, 24), slow(96, 160)], ids=str)
@pytest.mark.parametrize("way", ["added", "filled"])
def test_head_dimensions(way: str, dims: tuple[int, int]):
    """Held in chunks, or streamed: bfloat16 above 256, float32 above 64."""
    for dtype in (BF16, F32) if dims[0] in (80, 300) else (BF16,):
        check(masked(WAYS[way], left_padded(20, 35, (30,)), dtype, *dims))


@interpreted
@pytest.mark.parametrize("way", ["added", "where_added", "filled"])
def test_masks_that_differ_between_heads_and_lie_anyhow(way: str):
    torch.manual_seed(0)
    x = padded(WAYS[way], H=2)
    kept = left_padded(34, 34, (19, 34)).expand(2, 2, 34, 34).clone()
    kept[:, 1] = kept[:, 1].flip(-2)
    mask = torch.zeros(kept.shape).masked_fill(~kept, MIN) if way == "added" else kept
    x.captures = [mask.transpose(2, 3).contiguous().transpose(2, 3)]
    x.score, x.keep = (t.replace("t0[b, 0", "t0[b, h") for t in (x.score, x.keep))
    x.q, x.k = x.q.transpose(1, 2).contiguous().transpose(1, 2), x.k.mT.contiguous().mT
    x.v = torch.randn(2, 2, 68, 32)[:, :, ::2, ::2]
    check(x, do=torch.randn(2, 34, 2, 16).transpose(1, 2))


@interpreted
def test_a_mask_that_batches_share():
    x = padded(FILLED)
    x.captures = [x.captures[0][:1].expand(2, 1, 34, 34)]
    check(x)


@interpreted
@pytest.mark.parametrize("way", ["added", "filled"])
def test_biases_and_gradients_of_captured_tensors(way: str):
    """A captured tensor that gets a gradient from rows of padding gets it."""
    x = padded(WAYS[way])
    check(Inputs(**vars(x)))  # of the added mask itself
    if way == "filled":
        x.captures.append(torch.randn(1, 34, 34))
        x.score = x.score.replace("0.25 * s", "0.25 * s + t1[h, m, n]")
        check(Inputs(**vars(x)))


# --------------------------------------------------------------------------------------------------------------- visits


@interpreted
@pytest.mark.parametrize("way", ["added", "where_added", "filled_1e9"])
def test_no_tile_is_computed_for_even_rows(way: str, visits, monkeypatch):
    """As many as if padding had been cut off: of 50 rows 37 are even."""
    for pad in (48, 37):
        kept = left_padded(50, 50, (pad,))
        x = masked(WAYS[way], kept, BF16)
        rows, columns = (-(-50 // size) for size in (16, 32))
        kept = torch.nn.functional.pad(kept[0, 0], (0, columns * 32 - 50, 0, rows * 16 - 50))
        tiles = int(kept.view(rows, 16, columns, 32).any(3).any(1).sum())
        assert visits(lambda: forward_and_backward(x)) == dict.fromkeys(  # noqa: B023
            ("forward", "backward_kv", "backward_q"), tiles
        )
        with without(monkeypatch):
            assert visits(lambda: forward_and_backward(x))["forward"] > tiles  # noqa: B023


@interpreted
@pytest.mark.parametrize("way", ["added", "filled"])
def test_sums_end_at_once_where_no_row_is_even(way: str):
    """Nothing is summed: what was never written is not read either."""
    x = masked(WAYS[way], left_padded(50, 50, (0, 0)))
    reads: list[int] = []
    from torchflash.kernels import moments

    usual = moments.load_chunk

    def counting(*args: Any) -> Any:
        reads.append(1)
        return usual(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "load_chunk", counting)
        check(x)
        assert not reads
        check(padded(WAYS[way]))
        assert reads


# ----------------------------------------------------------------------------------------- rows that are not even ones


def uneven(x: Inputs, visits, monkeypatch, batch: int = 0) -> None:
    """As many tiles are computed as if there were no even rows."""
    got = visits(lambda: forward_and_backward(x))
    with without(monkeypatch):
        assert got == visits(lambda: forward_and_backward(x))


@interpreted
def test_masked_values_that_differ_within_a_row(visits, monkeypatch):
    """Softmax weighs the least low one alone, at whatever key: also where no row of tiles keeps anything."""
    x = masked(ADDED, left_padded(50, 50, (37,)))
    (mask,) = x.captures
    mask[0, 0, :37, 40] = MIN / 2
    mask[0, 0, 5] = MIN
    mask[0, 0, 20, 0] = MIN / 4
    check(x)
    mask[0, 0, 5, 40] = MIN / 2
    uneven(x, visits, monkeypatch)


@interpreted
def test_masks_of_infinity_are_nan():
    x = masked(ADDED, left_padded(50, 50, (37,)), low=-INF)
    assert run_op(x)[0, :, :37].isnan().all()
    x = masked(ADDED, left_padded(50, 50, (37,)))
    x.captures[0][0, 0, 7] = -INF
    x.captures[0][0, 0, 8, 3] = -INF
    check(x)


@interpreted
@pytest.mark.parametrize("bad", [float("nan"), 3e18, pytest.param(INF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("way", ["added", "filled", pytest.param("where_added", marks=pytest.mark.slow)])
def test_bad_queries_and_keys(way: str, where: str, bad: float, visits, monkeypatch):
    """They spoil a row where the mask is added, and not where it fills in; 3e18 squared is not lost in the mask."""
    added = "added" in way
    x = masked(WAYS[way], left_padded(50, 50, (37,)))
    if where == "q":
        x.q[0, 0, 5, 3] = bad
        x.k[0, 0, 9, 3] = bad if bad == 3e18 else 1.0
    else:
        x.k[0, 0, 45, 3] = bad
        x.q[0, 0, 5, 3] = -bad if bad == 3e18 else 1.0
    expected = run_without(x, monkeypatch)
    out = run_op(x)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-5, rtol=1e-5)
    spoilt = out[0, 0, :37].isnan().any(-1)
    if added and bad != 3e18 and (where, bad) != ("k", INF):
        assert spoilt.nonzero().flatten().tolist() == ([5] if where == "q" else list(range(37)))
    elif not added:
        assert not spoilt.any()


def run_without(x: Inputs, monkeypatch) -> Tensor:
    with without(monkeypatch):
        return run_op(x)


@interpreted
@pytest.mark.parametrize("way", ["added", "filled"])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_bad_values_reach_every_even_row(way: str, bad: float):
    x = masked(WAYS[way], left_padded(50, 50, (37, 20)))
    x.v[0, 0, 44, 7] = bad
    out = run_op(x)
    assert not out[0, 0, :37, 7].isfinite().any() and out[1].isfinite().all()
    assert out[0, 0, :37, :7].isfinite().all()


@interpreted
@pytest.mark.parametrize("way", ["added", "filled"])
def test_dropout_is_drawn_for_padding_too(way: str):
    x = padded(WAYS[way])
    x.dropout_p, x.seed = 0.3, torch.tensor([7])
    check(x)


@interpreted
@pytest.mark.parametrize("way", WAYS)
def test_statistics_are_those_of_the_scores(way: str):
    x = masked(WAYS[way], left_padded(50, 50, (37,)), BF16)
    _, (row_max, row_sum) = torch.ops.torchflash.attention(
        x.q, x.k, x.v, x.captures, [], x.score, x.keep, x.fill, "p", 0.0, None, x.layout, "", None, x.tuning, []
    )
    low = float(torch.tensor(x.fill if way != "added" else MIN).to(F32))
    torch.testing.assert_close(row_max[0, :, :37], torch.full((1, 37), low))
    torch.testing.assert_close(row_sum[0, :, :37], torch.full((1, 37), 50.0))


@interpreted
def test_a_kept_score_as_low_as_the_fill_has_its_gradient():
    """A row may keep one key whose score is what the mask fills in: it is even, but its score is not a constant."""
    kept = left_padded(50, 50, (37,))
    kept[0, 0, 3, 4] = True
    x = masked(FILLED_F16, kept)
    with torch.no_grad():
        x.q[0, 0, 3], x.k[0, 0, 4] = 0.0, 0.0
        x.q[0, 0, 3, 0], x.k[0, 0, 4, 0] = -4.0, 65504.0
        x.k[0, 0, 37:, 0] = 0.0
    out, dq, dk, _ = forward_and_backward(x)
    torch.testing.assert_close(out[0, 0, 3], x.v[0, 0].mean(0))
    assert dq[0, 0, 3].abs().max() > 1.0 and dk[0, 0, 4].abs().max() > 1e-3
