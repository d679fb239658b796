"""The backend, `explain` and `rewrite` as a user meets them; what is recognised is the business of other tests.

Here recognition is replaced by one that only reports each torch.softmax, except where a test says otherwise.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torchflash
import torchflash.passes
from torchflash import Options, Report, Rewritten, Skipped, SkippedError
from torchflash.backend import torchflash as backend
from torchflash.report import locate


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.project = nn.Linear(size, size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return nn.functional.dropout(torch.softmax(self.project(x) @ x.mT, -1) @ x, 0.1)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def report_softmaxes(gm, options):
    """The first softmax is said to be rewritten, the others skipped; each graph gets a mark to show it was changed."""
    found = []
    for graph in [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]:
        for node in graph.graph.find_nodes(op="call_function", target=torch.softmax):
            if found:
                found.append(Skipped(**locate(node), code="weights_used", reason="returned"))
            else:
                found.append(Rewritten(**locate(node), score="s"))
            node.meta["seen"] = True
            graph.meta["seen"] = True
    return found


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setattr(torchflash.passes, "rewrite_graph", report_softmaxes, raising=False)
    torch._dynamo.reset()
    counters.clear()


def compiled(function, **options):
    given = {f"torchflash.{key}": value for key, value in {"inner": "eager", **options}.items()}
    return torch.compile(function, backend="torchflash", options=given)


# --------------------------------------------------------------------------------------------------------- the backend


def test_counters_and_report_on_every_compile():
    model = Model(3)
    for size in (2, 3):  # another shape: another graph
        torch._dynamo.reset_code_caches()
        compiled(model)(torch.randn(size, 4, 8))
    assert counters["torchflash"] == {"rewritten": 2, "skipped.weights_used": 4}
    assert [record.graph for record in backend.report] == [0, 0, 0, 1, 1, 1]
    assert [record.module for record in backend.report[:3]] == ["layers.0", "layers.1", "layers.2"]
    torch._dynamo.reset()
    assert backend.report == Report()


@pytest.mark.parametrize("inner", ["inductor", "aot_eager", "eager"])
def test_inner_compilers_train(inner):
    def attention(x):
        return torch.softmax(x @ x.mT, -1) @ x

    x = torch.randn(2, 4, 8, requires_grad=True)
    (got,) = torch.autograd.grad(compiled(attention, inner=inner)(x).square().sum(), x)
    (want,) = torch.autograd.grad(attention(x).square().sum(), x)
    torch.testing.assert_close(got, want)


def test_options_of_inductor_reach_it():
    seen = []
    function = torch.compile(
        lambda x: torch.softmax(x, -1),
        backend="torchflash",
        options={"post_grad_custom_post_pass": seen.append, "torchflash.strict": False},
    )
    function(torch.randn(2, 3))
    assert len(seen) == 1


def test_mode_reaches_inductor(monkeypatch):
    from torchflash import backend as module

    patches = []
    monkeypatch.setattr(module, "compile_by_inductor", lambda gm, inputs, options, p: patches.append(p) or gm.forward)
    torch.compile(lambda x: x + 1, backend="torchflash", mode="max-autotune-no-cudagraphs")(torch.randn(2))
    assert patches == [torch._inductor.list_mode_options("max-autotune-no-cudagraphs")]


def test_the_users_options_are_not_changed():
    options = {"torchflash.inner": "eager", "torchflash.strict": False, "max_autotune": False}
    kept = dict(options)
    torch.compile(Model(), backend="torchflash", options=options)(torch.randn(2, 4, 8))
    assert options == kept


def test_strict_lists_every_skip():
    with pytest.raises(Exception) as caught:
        compiled(Model(3), strict=True)(torch.randn(2, 4, 8))
    error = caught.value.__cause__ or caught.value
    text = str(error)
    assert "torchflash.strict: 2 softmaxes not rewritten" in text
    assert "layers.1" in text and "layers.2" in text and "weights_used: returned" in text


def test_strict_accepts_allowed_codes():
    compiled(Model(3), strict=True, allow="weights_used")(torch.randn(2, 4, 8))
    assert counters["torchflash"]["skipped.weights_used"] == 2


def test_unknown_option_reaches_the_user():
    with pytest.raises(Exception, match=r"unknown option 'torchflash\.foo'; known: .*torchflash\.allow"):
        compiled(Model(), foo=1)(torch.randn(2, 4, 8))


def test_dump_writes_before_after_and_report(tmp_path):
    compiled(Model(), dump=str(tmp_path / "new"))(torch.randn(2, 4, 8))
    folder = tmp_path / "new"
    assert sorted(path.name for path in folder.iterdir()) == [
        "graph_0.after.py",
        "graph_0.before.py",
        "graph_0.report.json",
        "graph_0.report.txt",
    ]
    for moment in ("before", "after"):
        text = (folder / f"graph_0.{moment}.py").read_text()
        assert "torch.softmax" in text
        compile(text, "dump", "exec")
    assert Report.from_json((folder / "graph_0.report.json").read_text()) == backend.report
    assert (folder / "graph_0.report.txt").read_text() == f"{backend.report}\n"


def test_graph_breaks_are_reported():
    def broken(x):
        x = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return torch.softmax(x, -1)

    compiled(broken)(torch.randn(2, 3))
    assert backend.report.graphs == 2 and len(backend.report) == 2
    (why,) = backend.report.graph_breaks
    assert "test_backend.py:" in why


def run(program, **env):
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


SOFTMAX = """
import torch
options = {"torchflash.inner": "eager"}
torch.compile(lambda x: torch.softmax(x, -1), backend="torchflash", options=options)(torch.randn(2, 3))
"""


@pytest.mark.parametrize("setting", ["torchflash", "+torchflash"])
def test_torch_logs(setting):
    text = run(SOFTMAX, TORCH_LOGS=setting).stderr
    assert "torchflash: 0 rewritten, 1 skipped in 1 graph" in text
    assert ("torch.softmax" in text) == (setting == "+torchflash")


def test_quiet_by_default():
    assert "torchflash" not in run(SOFTMAX).stderr


def test_torch_trace(tmp_path):
    run(SOFTMAX, TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.iterdir()
    artifacts = [line[line.index("{") :] for line in log.read_text().splitlines() if '{"artifact"' in line]
    names = [json.loads(artifact)["artifact"]["name"] for artifact in artifacts]
    assert [name for name in names if name.startswith("torchflash")] == [
        "torchflash_before",
        "torchflash_after",
        "torchflash_report",
    ]


# ------------------------------------------------------------------------------------------------------------- explain


def test_explain_reports_without_side_effects():
    model = Model(2).train()
    x = torch.randn(2, 4, 8, requires_grad=True)
    state = torch.get_rng_state()
    report = torchflash.explain(model)(x)
    assert [type(record) for record in report] == [Rewritten, Skipped]
    assert report.graphs == 1 and [record.module for record in report] == ["layers.0", "layers.1"]
    assert torch.equal(torch.get_rng_state(), state)
    assert [float(buffer) for buffer in model.buffers()] == [0.0, 0.0]
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())
    assert counters["torchflash"] == {} and backend.report == Report()


def test_explain_twice_gives_the_same_report():
    model, x = Model(), torch.randn(2, 4, 8)
    with torch.no_grad():
        reports = [torchflash.explain(model)(x) for _ in range(12)]  # more than Dynamo's limit of recompiles
    assert all(report == reports[0] for report in reports) and len(reports[0]) == 2


def test_explain_says_that_dynamo_gave_up(caplog):
    assert torchflash.explain(lambda x: x)(torch.randn(2, 3)) == Report(graphs=0)
    assert "torch._dynamo.reset()" in caplog.text


@pytest.mark.parametrize("how", ["compile", "method", "function"])
def test_explain_does_not_disturb_what_is_compiled(how):
    model, x = Model(), torch.randn(2, 4, 8)
    compiles = []

    def inner(gm, inputs):
        compiles.append(inputs)
        return gm.forward

    if how == "method":
        model.compile(backend=inner)
        function = model
    else:
        function = torch.compile(model if how == "compile" else (lambda x: model(x)), backend=inner)
    function(x)
    assert len(torchflash.explain(function)(x)) == 2
    assert len(torchflash.explain(model)(torch.randn(3, 4, 8))) == 2
    function(x)
    assert len(compiles) == 1
    function(torch.randn(5, 4, 8))
    assert len(compiles) == 2


def test_explain_does_not_make_a_later_compile_dynamic():
    def function(x):
        return torch.softmax(x, -1)

    torchflash.explain(function)(torch.randn(2, 4))
    torchflash.explain(function)(torch.randn(3, 4))
    shapes = []
    torch.compile(function, backend=lambda gm, inputs: shapes.extend(inputs) or gm.forward)(torch.randn(5, 4))
    assert [tuple(value.shape) for value in shapes] == [(5, 4)]


def test_explain_with_options_and_graph_breaks(tmp_path):
    def broken(x):
        x = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return torch.softmax(x, -1)

    report = torchflash.explain(broken, options={"torchflash.dump": str(tmp_path)})(torch.randn(2, 3))
    assert report.graphs == 2 and [record.graph for record in report] == [0, 1] and len(report.graph_breaks) == 1
    assert (tmp_path / "graph_1.after.py").exists()
    with pytest.raises(ValueError, match="unknown option"):
        torchflash.explain(broken, options={"torchflash.foo": 1})


# ------------------------------------------------------------------------------------------------------------- rewrite


def captured(function, *inputs):
    graphs = []
    torch.compile(function, backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(*inputs)
    return graphs[0]


def test_rewrite_works_on_a_copy():
    model, x = Model(), torch.randn(2, 4, 8)
    gm = captured(model, x)
    rewritten, report = torchflash.rewrite(gm)
    assert len(report) == 2 and report.graphs == 1
    assert rewritten is not gm and rewritten.meta.get("seen") and "seen" not in gm.meta
    assert not any("seen" in node.meta for node in gm.graph.nodes)
    assert any("seen" in node.meta for node in rewritten.graph.nodes)


def test_rewrite_copies_nested_graphs():
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 4, 8, requires_grad=True)
    gm = captured(lambda x: checkpoint(lambda x: torch.softmax(x, -1), x, use_reentrant=False), x)
    rewritten, report = torchflash.rewrite(gm)
    assert len(report) == 1
    assert not any("seen" in module.meta for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    torch.testing.assert_close(rewritten(x)[0], torch.softmax(x, -1))


def test_rewrite_of_an_exported_graph():
    class Softmax(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    program = torch.export.export(Softmax(), (torch.randn(2, 3),))
    rewritten, report = torchflash.rewrite(program.module())
    assert report.graphs == 1
    rewritten(torch.randn(2, 3))


def test_rewrite_strict():
    gm = captured(Model(), torch.randn(2, 4, 8))
    with pytest.raises(SkippedError, match="1 softmax not rewritten") as caught:
        torchflash.rewrite(gm, Options(strict=True))
    assert len(caught.value.report) == 2


def test_rewrite_says_what_it_takes():
    with pytest.raises(TypeError, match=r"rewrite\(\) takes a torch.fx.GraphModule, got Model"):
        torchflash.rewrite(Model())
    with pytest.raises(ValueError, match=r"needs a graph whose nodes carry .*'x' has neither"):
        torchflash.rewrite(torch.fx.symbolic_trace(lambda x: x.softmax(-1)))


def test_compiling_is_invisible_to_hooks_on_saved_tensors():
    """The first call compiles inside a checkpoint, which counts what is saved."""

    def attention(q, k, v):
        return ((q @ k.mT) * 0.3).softmax(-1) @ v

    inputs = [torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(attention, backend="torchflash", options={"torchflash.inner": "aot_eager"})
    checkpoint(compiled, *inputs, use_reentrant=False).sum().backward()
    expected = torch.autograd.grad(attention(*inputs).sum(), inputs)
    for x, g in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad, g)


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("import torch, torchflash", store_history=True)
shell.run_cell('''def attend(q, k, v):
    q = 2 * q
    print("a graph break")
    return (q @ k.mT).softmax(-1) @ v

q = torch.randn(1, 1, 8, 4)
report = torchflash.explain(attend)(q, q, q)
''', store_history=True).raise_error()
report = shell.user_ns["report"]
assert [record.source for record in report] == ["In[2]:4"], report
(why,) = report.graph_breaks
assert why.endswith("(In[2]:3)"), why
"""


def test_cells_of_a_notebook_are_named():
    pytest.importorskip("IPython")
    run(NOTEBOOK)
