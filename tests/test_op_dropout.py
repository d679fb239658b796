"""Dropout in the op: which weights, how many, how scaled; one function of (seed, b, h, m, n) whatever the tiles."""

from __future__ import annotations

import pytest
import torch
from oracle import INF, Inputs, check, run_op

from torchflash.kernels import philox, reference

pytestmark = pytest.mark.usefixtures("poisoned")


def mask(p: float, seed: int, B=2, H=3, M=40, N=24) -> torch.Tensor:
    """The factors on the weights, read through uniform scores and v = identity."""
    q, k, v = torch.zeros(B, H, M, 8), torch.zeros(B, H, N, 8), torch.eye(N).expand(B, H, N, N)
    x = Inputs(q, k, v, score="0.0 * s", dropout_p=p, seed=torch.tensor([seed]))
    return run_op(x) * N


def test_weights_are_dropped_or_scaled():
    w = mask(0.25, 7)
    dropped = w == 0
    torch.testing.assert_close(w[~dropped], torch.full_like(w[~dropped], 1 / 0.75))
    assert abs(dropped.float().mean().item() - 0.25) < 4 * (0.25 * 0.75 / w.numel()) ** 0.5


def test_it_is_the_documented_function():
    b, h, m, n = (
        torch.arange(size).view([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate((2, 3, 40, 24))
    )
    expected = philox.scale(0.25, torch.tensor([7]), (b * 3 + h) * 40 + m, n)
    torch.testing.assert_close(mask(0.25, 7), expected)


def test_seeds_rows_heads_and_batches_differ():
    w = mask(0.5, 7)
    assert not torch.equal(w, mask(0.5, 8)) and not torch.equal(w, mask(0.5, 7 + 2**32))
    rows = w.flatten(0, 2)
    assert len(torch.unique(rows, dim=0)) == len(rows)
    agree = (w[0] == w[1]).float().mean().item()
    assert abs(agree - 0.5) < 0.05


def test_known_answer():
    """Philox 4x32-10 has a published vector; with 7 rounds it is checked against Triton's in the interpreter tests."""
    before = philox.ROUNDS
    philox.ROUNDS = 10
    try:
        assert philox.philox(torch.tensor([0]), torch.tensor([0]))[0].item() == 0x6627E8D5
    finally:
        philox.ROUNDS = before


@pytest.mark.parametrize("block", [16, 40])
def test_tiles_do_not_matter(block, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 50, 8) for _ in range(3))
    x = Inputs(q, k, v, score="where(n <= m, 0.3 * s, -inf)", keep="n <= m", dropout_p=0.4, seed=torch.tensor([3]))
    whole = run_op(x)
    monkeypatch.setattr(reference, "BLOCK_M", block)
    monkeypatch.setattr(reference, "BLOCK_N", block)
    torch.testing.assert_close(run_op(x), whole)
    check(x)  # forward and backward drop the same weights


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_dropped(p):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    x = Inputs(q, k, v, score="where(n <= m, 0.3 * s, -inf)", fill=-INF, dropout_p=p, seed=torch.tensor([3]))
    if p:
        out = run_op(x)
        assert not out.count_nonzero()
        assert all(not g.count_nonzero() for g in torch.autograd.grad(out.sum(), [q, k, v]))
    else:
        check(x)


def test_draws_are_uniform_and_independent():
    """Rates of single weights, of pairs at power-of-two distances along keys and rows, and of all pairs of rows."""
    rows, keys = 1024, 2048
    draws = philox.draw(torch.tensor([2026]), torch.arange(rows)[:, None], torch.arange(keys))
    for p in (0.1, 0.5):
        dropped = (draws < philox.threshold(p)).float()
        x = (dropped - p) / (p * (1 - p)) ** 0.5  # mean 0, variance 1
        assert abs(x.sum().item()) < 4 * x.numel() ** 0.5
        for along in (x, x.T):
            for distance in (2**i for i in range(10)):
                pairs = along[:, distance:] * along[:, :-distance]
                assert abs(pairs.sum().item()) < 5 * pairs.numel() ** 0.5, distance
            pairs = along @ along.T / along.shape[1] ** 0.5
            assert pairs.fill_diagonal_(0).abs().max() < 7 and abs(pairs.std().item() - 1) < 0.01
