"""`torchflash.verify`: every block is compared, on what reaches it; a wrong operator is found, a right one is not
accused."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from forms import FORMS, make
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchflash
from torchflash.backend import torchflash as backend
from torchflash.kernels import reference
from torchflash.verification import compare
from torchflash.verifying import OUTPUT


class Attention(nn.Module):
    """With a learned slope for each head and dropout."""

    def __init__(self, dim: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.slopes = nn.Parameter(torch.rand(heads))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(C, -1))
        i = torch.arange(T, device=x.device)
        w = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) - self.slopes[:, None, None] * (i[:, None] - i).abs()
        w = w.masked_fill(i > i[:, None], float("-inf"))
        if mask is not None:
            w = w.masked_fill(~mask[:, None, None], torch.finfo(w.dtype).min)
        return self.out((self.dropout(F.softmax(w, -1)) @ v).transpose(1, 2).reshape(B, T, C))


class Model(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0, breaks: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(dropout=dropout) for _ in range(layers))
        self.breaks, self.checkpoints = breaks, checkpoints
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = x + (checkpoint(layer, x, mask, use_reentrant=False) if self.checkpoints else layer(x, mask))
        return x


BOTH = ["out", "dq", "dk", "dv", "dt0"]


def names(block: torchflash.Verified) -> list[str]:
    return [c.name for c in block.comparisons]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 24, 32)


def wrong(monkeypatch: pytest.MonkeyPatch, passing: str, change) -> None:
    """Breaks the operator: `change(results)` writes to out and lse, or to dq, dk and dv."""
    original = getattr(reference, passing)

    def run(problem, *args):
        result = original(problem, *args)
        change(args[:2] if passing == "forward" else args[3:6])
        return result

    monkeypatch.setattr(reference, passing, run)


# ------------------------------------------------------------------------------------------------ what is compared


@pytest.mark.parametrize("options", [{}, {"breaks": True}, {"checkpoints": True}, {"dropout": 0.3},
                                     {"checkpoints": True, "dropout": 0.3}], ids=str)  # fmt: skip
def test_every_block_is_compared(x, options):
    report = torchflash.verify(Model(**options))(x)
    assert [block.where for block in report] == [r.where for r in report.report.rewritten]
    assert len(report) == 2 and (options.get("breaks") or [b.module for b in report] == ["layers.0", "layers.1"])
    assert all(names(block) == BOTH and block.calls == 1 for block in report), str(report)
    assert report.ok and report.nonfinite == (), str(report)
    assert all("test_verify.py:" in block.source and "t0[h]" in block.score for block in report)
    assert report.report.graphs == (2 if options.get("breaks") else 1)


def test_keyword_inputs_and_padding(x):
    mask = torch.arange(24) < torch.tensor([[24], [7]])
    report = torchflash.verify(Model())(x=x, mask=mask)
    assert report.ok and len(report) == 2, str(report)


def test_without_gradients_only_the_output_is(x):
    with torch.no_grad():
        report = torchflash.verify(Model())(x)
    assert report.ok and [names(block) for block in report] == [["out"]] * 2
    with torch.inference_mode():
        assert torchflash.verify(Model())(torch.randn(2, 24, 32)).ok


@pytest.mark.parametrize("name", ["nanogpt", "causal_triu_inf_added", "padding_lengths_in_graph"])
def test_dynamic_shapes(name):
    fn, _ = make(FORMS[name])
    run = torchflash.verify(fn, dynamic=True)
    for length in (13, 24, 7):
        _, inputs = make(FORMS[name], S=length)
        report = run(*inputs)
        assert report.ok and len(report) == 1, str(report)
        assert "s" in str(report.report.rewritten[0].q)  # symbolic sizes: one graph for all


def test_autocast(x):
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        report = torchflash.verify(model)(x)
    assert report.ok and all(names(block) == BOTH for block in report), str(report)
    error = report[0].comparisons[0]
    assert error.error > 1e-4 and error.eager_error > 1e-4  # of bfloat16: eager ran under autocast as well


def test_half_precision(x):
    report = torchflash.verify(Model().bfloat16())(x.bfloat16())
    assert report.ok and report[0].comparisons[0].eager_error > 1e-4, str(report)


def test_loss_of_the_output(x):
    seen = []

    def loss(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return output.square().mean()

    report = torchflash.verify(Model(), loss=loss)(x)
    assert report.ok and names(report[0]) == BOTH and seen == [x.shape]


def test_a_function_of_leaves():
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    report = torchflash.verify(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v)
    assert report.ok and names(report[0]) == ["out", "dq", "dk", "dv"]
    shared = torchflash.verify(lambda x: (x @ x.mT).softmax(-1) @ x)(q)
    assert shared.ok and names(shared[0]) == ["out", "dq+dk+dv"]


def test_the_model_is_left_as_it_was(x):
    model = Model(dropout=0.5)
    stepped = []
    model.layers[0].slopes.register_post_accumulate_grad_hook(stepped.append)
    state = torch.get_rng_state()
    torchflash.verify(model)(x)
    assert torch.equal(state, torch.get_rng_state()) and model.calls == 0 and not stepped
    assert all(p.grad is None for p in model.parameters())


# several softmaxes weigh the same values: verify leaves them alone
MIXTURES = ("differential", "differential_lambda_and_gate", "convit_gated_positions",
            "mixture_with_given_weights_and_key_weight", "differential_halves_of_heads", "differential_unbind",
            "differential_pairs_of_grouped_heads", "differential_two_dropouts",
            "differential_halves_of_one_dropout")  # fmt: skip
NOT_COMPARED = ("pieces_with_dropout",)  # the mask is in pieces too
SOME = [
    n for n in FORMS if not FORMS[n].skip and not FORMS[n].skip_training and n not in (*MIXTURES, *NOT_COMPARED)
]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i % 12 == 0 else pytest.mark.slow) for i, n in enumerate(SOME)]
)
def test_forms(name):
    """However attention is written, its block is found again, and as accurate as eager."""
    fn, inputs = make(FORMS[name])
    report = torchflash.verify(fn)(*inputs)
    assert report.ok and len(report) == FORMS[name].blocks, str(report)
    assert all(len(block.comparisons) > 1 for block in report)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_left_alone(name):
    fn, inputs = make(FORMS[name])
    report = torchflash.verify(fn)(*inputs)
    assert not len(report) and "several_softmaxes" in [x.code for x in report.report.skipped], str(report)


@pytest.mark.parametrize("name", ["cache_setitem_gptfast", "graphormer_virtual_token", "input_mask_written_after",
                                  "checkpointed_dropout", "dropout_p1"])  # fmt: skip
def test_forms_that_write_in_place_or_draw(name):
    fn, inputs = make(FORMS[name])
    report = torchflash.verify(fn)(*inputs)
    assert report.ok, str(report)


# --------------------------------------------------------------------------------------------------- what is found


def test_a_wrong_output_is_found(x, monkeypatch, caplog):
    wrong(monkeypatch, "forward", lambda results: results[0].mul_(1.001))
    with caplog.at_level(logging.WARNING, "torchflash"):
        report = torchflash.verify(Model())(x)
    assert not report.ok and not any(block.comparisons[0].ok for block in report)
    assert report[0].comparisons[0].error > 1e-4 > report[0].comparisons[0].budget
    warnings = [r.getMessage() for r in caplog.records if "WORSE than eager" in r.getMessage()]
    assert len([w for w in warnings if ": out " in w]) == 2  # one for each block
    assert "BAD        layers.0 (test_verify.py:" in str(report)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_gradient_is_found(x, monkeypatch, which):
    wrong(monkeypatch, "backward", lambda results: results[which].mul_(1.001))
    report = torchflash.verify(Model())(x)
    bad = [[c.name for c in block.comparisons if not c.ok] for block in report]
    assert bad == [[BOTH[1 + which]]] * 2, str(report)


def test_a_missing_gradient_is_found(x, monkeypatch):
    original = reference.backward
    monkeypatch.setattr(reference, "backward", lambda *args: [torch.zeros_like(g) for g in original(*args)])
    report = torchflash.verify(Model())(x)
    assert [[c.name for c in block.comparisons if not c.ok] for block in report] == [["dt0"]] * 2, str(report)


def test_the_first_block_that_is_not_finite(x, monkeypatch):
    calls = []

    def poison(results):
        calls.append(0)
        if len(calls) == 2:  # the second layer; nothing reaches the first one forward
            results[0][0, 0, 0, 0] = math.nan

    wrong(monkeypatch, "forward", poison)
    report = torchflash.verify(Model(layers=3))(x)
    first = report.nonfinite[0]
    assert (first.passing, first.name, first.count, first.eager) == ("forward", "out", 1, 0)
    assert first.where.startswith("layers.1 (")
    assert "first non-finite forward: layers.1" in str(report) and "eager's own is finite" in str(report)
    # what follows in the model is not finite either, and in eager as well: the third block is not accused
    assert not report[1].ok and report[2].comparisons[0].worse == 0
    assert any(n.eager and n.where.startswith("layers.2") for n in report.nonfinite)


def test_the_first_gradient_that_is_not_finite(x, monkeypatch):
    wrong(monkeypatch, "backward", lambda results: results[1].fill_(math.inf))
    report = torchflash.verify(Model())(x)
    first = next(n for n in report.nonfinite if n.passing == "backward" and not n.eager)
    assert first.where.startswith("layers.1 (") and first.name == "dk"  # backward begins with the last


def test_eager_that_overflows_is_said_and_not_accused():
    q = (torch.randn(1, 1, 8, 4) * 300).half()
    report = torchflash.verify(lambda q: (q @ q.mT).softmax(-1) @ q)(q)
    (block,) = report
    assert block.comparisons[0].eager_nonfinite > 0 and block.comparisons[0].worse == 0
    assert "in eager" in str(report)


def test_what_cannot_be_compared_is_not_ok(x, monkeypatch):
    monkeypatch.setattr(torchflash.verifying.Call, "exact", lambda *args: 1 / 0)
    report = torchflash.verify(Model())(x)
    assert not report.ok and "unknown    layers.0" in str(report)
    assert report[0].problems[0] == "forward: ZeroDivisionError: division by zero"


def test_nothing_rewritten_is_not_ok():
    report = torchflash.verify(lambda x: x.softmax(-1))(torch.randn(3, 4))
    assert not report.ok and len(report) == 0 and len(report.report.skipped) == 1
    assert str(report).startswith("torchflash.verify: nothing was rewritten, so there is nothing to compare, 1 softmax")


def test_what_cannot_be_called_is_an_error():
    with pytest.raises(TypeError, match=r"verify\(\) takes a module or a function; got int 3"):
        torchflash.verify(3)
    with pytest.raises(TypeError, match=r"explain\(\) takes a module or a function; got int 3"):
        torchflash.explain(3)
    with pytest.raises(TypeError, match=r"loss must be a function of the model's output; got int 3"):
        torchflash.verify(nn.Linear(2, 2), loss=3)


def test_budget():
    exact = torch.tensor([1.0, -2.0], dtype=torch.float64)
    ours, eager = torch.tensor([1.0, -2.0 - 3e-6]), torch.tensor([1.0 + 2e-6, -2.0])
    c = compare("out", "", ours, eager, exact, 0.0, OUTPUT, torch.float32)
    assert c.ok and math.isclose(c.error, 3e-6, rel_tol=0.1) and math.isclose(c.relative, c.error / 2)
    assert not compare("out", "", torch.tensor([1.0, -2.0 - 5e-6]), eager, exact, 0.0, OUTPUT, torch.float32).ok
    assert compare("out", "", torch.zeros(0), torch.zeros(0), torch.zeros(0).double(), 0.0, OUTPUT, torch.float32).ok


# -------------------------------------------------------------------------------------------- the option, and text


def test_option_in_training(x, caplog):
    model = Model()
    compiled = torch.compile(model, backend="torchflash", options={"torchflash.verify": True})
    for _ in range(3):
        compiled(x).sum().backward()
    report = backend.verification
    assert report.ok and [block.calls for block in report] == [3, 3] and names(report[0]) == BOTH
    assert report.report is backend.report
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(x).sum() * 3).backward()
    for a, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()
    assert len(backend.verification) == 0


def test_results_are_those_of_the_operator(x):
    """Downstream sees what training sees, bit for bit."""
    model = Model()
    plain = torch.compile(model, backend="torchflash", options={"torchflash.inner": "eager"})(x)
    torch._dynamo.reset()
    assert torch.equal(plain, torch.compile(model, backend="torchflash", options={"torchflash.verify": True})(x))


def test_json(x):
    content = json.loads(torchflash.verify(Model())(x).to_json())
    assert content["ok"] is True and len(content["blocks"]) == 2
    out = content["blocks"][0]["comparisons"][0]
    assert out["name"] == "out" and out["ok"] is True and 0 < out["error"] < 1e-5


def test_rewritten_graph_has_it():
    graphs = []
    torch.compile(lambda x: (x @ x.mT).softmax(-1) @ x, backend=lambda gm, _: graphs.append(gm) or gm.forward)(
        torch.randn(1, 2, 8, 4)
    )
    rewritten, report = torchflash.rewrite(graphs[0], torchflash.Options(verify=True))
    assert len(report.rewritten) == 1
    rewritten(torch.randn(1, 2, 8, 4))
    assert backend.verification.ok


@pytest.mark.parametrize("tell", [torchflash.explain, torchflash.verify], ids=["explain", "verify"])
def test_there_is_no_limit_of_recompiles(tell):
    def attend(q):
        return torch.softmax(q @ q.mT, -1) @ q

    for length in range(4, 14):
        told = tell(attend)(torch.randn(1, 2, length, 4))
        assert len(told) == 1, length
    counters.clear()
    torch.compile(attend, backend="torchflash", options={"torchflash.inner": "aot_eager"})(torch.randn(1, 2, 20, 4))
    assert counters["torchflash"]["rewritten"] == 1
