"""Which programs after the softmax are nothing but that a row without any key is 0: kernels leave these out."""

import math

import pytest

from torchflash.kernels import program as programs
from torchflash.kernels.forms import form

ZERO = [
    ("where(t0[m, n], 0.25 * s, -inf)", "where(t0[m, n], p, 0.0)", "b"),
    ("where(t0[m, n], s * (-1.0 / sqrt(float(z0))), -inf)", "where(t0[m, n], p, 0.0)", "b"),
    ("x = t0[m, n]; where(x <= -inf, -inf, 0.25 * s + x)", "where(t0[m, n] <= -inf, 0.0, p)", "f"),
    ("0.25 * s + t0[m, n]", "where(t0[m, n] <= -inf, 0.0, p)", "f"),
    ("x = t0[m, n]; where(x, 0.25 * s + where(x, 0.0, -inf), -inf)", "where(t0[m, n], p, 0.0)", "b"),
    ("where((n <= m) & t0[n], 30.0 * tanh(s), -inf)", "where((n <= m) & t0[n], p, 0.0)", "b"),
]
NOT = [  # a row may keep keys and yet have no score above -inf: it is NaN
    ("where(t0[n], where(n <= m, 0.25 * s, -inf), -inf)", "where(t0[n], p, 0.0)", "b"),
    ("where((n <= m) & t0[n], 0.25 * s, -inf)", "where(t0[n], p, 0.0)", "b"),
    ("where(t0[n], 0.25 * s + t1[m, n], -inf)", "where(t0[n], p, 0.0)", "bf"),
    ("0.25 * s + t0[m, n] + t1[m, n]", "where(t0[m, n] <= -inf, 0.0, p)", "ff"),
    ("where(t0[n], 0.25 * s + half(-1e9), -inf)", "where(t0[n], p, 0.0)", "b"),
    ("where(t0[n], 0.25 * s, -1e9)", "where(t0[n], p, 0.0)", "b"),
]


@pytest.mark.parametrize(("score", "post", "kinds", "zero"), [(*x, True) for x in ZERO] + [(*x, False) for x in NOT])
def test_rows_without_keys(score, post, kinds, zero):
    found = form(programs.read(score, "", -math.inf, post, tuple(kinds)), True)
    assert found.zero == zero and (found.post is None) == zero
