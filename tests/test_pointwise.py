"""Every function that scores may go through: as read, it has torch's values and torch's derivative, at kinks, at ties
and far out too."""

import math

import pytest
import torch
import torch.nn.functional as F

import torchflash
from torchflash import score as sc

POINTS = [-math.inf, -1e9, -100.0, -30.0, -20.0, -6.0, -3.0, -2.0, -1.0, -0.5, -1e-4, 0.0, 1e-4, 0.5, 1.0, 2.0, 3.0]
POINTS += [6.0, 20.0, 30.0, 100.0, 1e9, math.inf]
FUNCTIONS = {
    "abs": torch.abs,
    "addcdiv": lambda x: torch.addcdiv(x, x, torch.full((), 3.0), value=2.0),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "celu": F.celu,
    "celu(2)": lambda x: F.celu(x, 2.0),
    "clamp": lambda x: x.clamp(-3.0, 6.0),
    "clamp above": lambda x: x.clamp(max=0.5),
    "clamp below": lambda x: x.clamp_min(-1.0),
    "clamp the wrong way round": lambda x: 0.0 * x + x.clamp(3.0, -1.0),
    "clamp to itself": lambda x: torch.clamp(x, min=0.5 * x),
    "cos": torch.cos,
    "div": lambda x: 1.0 / (2.0 + x * x),
    "elu": F.elu,
    "elu(0.5)": lambda x: F.elu(x, 0.5),
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "gelu": F.gelu,
    "gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "hardtanh(-3, 6)": lambda x: F.hardtanh(x, -3.0, 6.0),
    "leaky_relu": F.leaky_relu,
    "lerp": lambda x: torch.lerp(x, x * x, 0.25),
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logaddexp": lambda x: torch.logaddexp(x, torch.full((), 0.5)),
    "logaddexp of 1": lambda x: torch.logaddexp(torch.ones(()), x),
    "logaddexp of x": lambda x: torch.logaddexp(x, x + 0.0),
    "logsigmoid": F.logsigmoid,
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
    "maximum of -x": lambda x: torch.maximum(x, -x),
    "minimum": lambda x: torch.minimum(torch.full((), 3.0), x),
    "mish": F.mish,
    "neg": torch.neg,
    "pow(2)": lambda x: x**2,
    "pow(3)": lambda x: x**3.0,
    "pow(0.5)": lambda x: x**0.5,
    "reciprocal": torch.reciprocal,
    "relu": F.relu,
    "relu6": F.relu6,
    "rsqrt": torch.rsqrt,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softplus(2)": lambda x: F.softplus(x, beta=2.0),
    "softplus(0.5, 3)": lambda x: F.softplus(x, beta=0.5, threshold=3.0),
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.5, -2.0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "steps": lambda x: x + x.sign() + x.floor() + x.ceil() + x.trunc() + x.round(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name):
    f = FUNCTIONS[name]
    program = sc.parse(_program(f))
    x = torch.tensor([*POINTS, math.nan])
    rough, exact = (x.to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
    values, finer = f(rough), f(exact)
    (slopes,), (finer_slopes,) = (torch.autograd.grad(y.sum(), t) for y, t in ((values, rough), (finer, exact)))
    slack = name == "exp2"  # exp(log(2) * x): as many units in the last place as x is large
    env = {"s": x, "g": torch.ones(())}
    _same("value", x, sc.evaluate(program, env, ()), values.detach(), finer.detach(), slack)
    gradient = sc.vjp(program, {}).get(sc.name("s"), sc.ZERO)
    finite = slopes.isfinite() & values.isfinite()
    got = torch.as_tensor(sc.evaluate(gradient, env, ())).expand(x.shape)
    _same("derivative", x[finite], got[finite], slopes[finite], finer_slopes[finite], slack)


def _same(what, x, got, rough, exact, slack):
    # gelu(inf) of torch is inf or NaN, depending on how many elements there are
    wrong = (got.isnan() != rough.isnan()) & (exact.isnan() == rough.isnan())
    both = got.isfinite() & rough.isfinite()
    wrong |= ~both & ~got.isnan() & ~rough.isnan() & (got != rough)
    error, own = ((t.double() - exact).abs().where(both, 0.0) for t in (got, rough))
    ulps = torch.finfo(torch.float32).eps * exact.abs().clamp(min=1e-6)
    wrong |= both & (error > 2 * own + 4 * ulps + ulps * slack * x.abs().double())
    assert not wrong.any(), f"{what} at {x[wrong].tolist()}: {got[wrong].tolist()}, torch {rough[wrong].tolist()}"


def _program(f):
    """The score program of attention with `f` of the scores."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    report = torchflash.explain(lambda q, k, v: f(q @ k.mT).softmax(-1) @ v)(q, k, v)
    (block,) = report.records
    assert isinstance(block, torchflash.Rewritten), block
    return block.score
