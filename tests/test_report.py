"""Records and reports: the text a person reads (goldens), JSON there and back, and the location taken from a graph."""

import functools
import json

import expecttest
import pytest
import torch
from torch import nn

from torchflash import SKIP_CODES, Report, Rewritten, Skipped
from torchflash.report import bytes_of_scores, dims, locate

FULL = Rewritten(
    module="model.layers.0.self_attn",
    source="models/llama.py:12",
    node="attn",
    score="where((n <= m) & t0[b, n], 0.125 * s, -inf)",
    keep="(n <= m) & t0[b, n]",
    post="p * t1[h]",
    dropout_p=0.1,
    q=(2, 8, 64, 32),
    k=(2, 2, 64, 32),
    v=(2, 2, 64, 48),
    dtype="bfloat16",
    bytes_saved=262144,
    note="the row maximum that was subtracted cancels",
)
PLAIN = Rewritten(
    node="softmax", score="0.125 * s", q=(1, 4, "s0", 32), k=(1, 4, "s0", 32), v=(1, 4, "s0", 32), dtype="float32"
)
SKIPPED = Skipped(
    module="layers.1",
    source="model.py:40",
    node="weights",
    code="weights_used",
    reason="the probabilities are returned",
    at="dropout_1",
)
REPORT = Report((FULL, PLAIN, SKIPPED), graphs=2, graph_breaks=("call to print (model.py:7)",))


class TestText(expecttest.TestCase):
    def test_rewritten(self):
        self.assertExpectedInline(
            str(FULL),
            """\
rewritten  model.layers.0.self_attn (models/llama.py:12)
           causal + key padding, weights times a tensor by head, GQA 4:1, dropout 0.1
           q [2, 8, 64, 32], k [2, 2, 64, 32], v [2, 2, 64, 48], bfloat16, heads 8 over 2, saves 256.0 KiB
           score  where((n <= m) & t0[b, n], 0.125 * s, -inf)
           keep   (n <= m) & t0[b, n]
           post   p * t1[h]
           note   the row maximum that was subtracted cancels""",
        )

    def test_rewritten_symbolic(self):
        self.assertExpectedInline(
            str(PLAIN),
            """\
rewritten  softmax
           full attention
           q [1, 4, s0, 32], k [1, 4, s0, 32], v [1, 4, s0, 32], float32
           score  0.125 * s""",
        )

    def test_skipped(self):
        self.assertExpectedInline(
            str(SKIPPED),
            """\
skipped    layers.1 (model.py:40) weights_used: the probabilities are returned [at dropout_1]
           the scores or probabilities are used elsewhere, so they must exist; do not return or log them""",
        )

    def test_report(self):
        self.assertExpectedInline(
            str(Report((PLAIN,), 1, ("call to print (model.py:7)",))),
            """\
torchflash: 1 rewritten, 0 skipped in 1 graph
rewritten  softmax
           full attention
           q [1, 4, s0, 32], k [1, 4, s0, 32], v [1, 4, s0, 32], float32
           score  0.125 * s
graph break  call to print (model.py:7)""",
        )

    def test_nothing(self):
        self.assertExpectedInline(str(Report()), """torchflash: 0 rewritten, 0 skipped in 0 graphs""")


def test_json_round_trip():
    text = REPORT.to_json()
    assert Report.from_json(text) == REPORT
    assert Report.from_json(REPORT.to_json(indent=2)) == REPORT
    assert [record["kind"] for record in json.loads(text)["records"]] == ["rewritten", "rewritten", "skipped"]


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"graphs": 1, "graph_breaks": [], "records": [{"kind": "fused"}]}', "no json"],
    ids=["empty", "list", "unknown kind", "text"],
)
def test_what_is_not_a_report_is_refused(text):
    with pytest.raises(ValueError):
        Report.from_json(text)


def test_sequence_and_counts():
    assert len(REPORT) == 3 and REPORT[2] is SKIPPED and list(REPORT) == [FULL, PLAIN, SKIPPED]
    assert REPORT.rewritten == (FULL, PLAIN) and REPORT.skipped == (SKIPPED,)
    assert REPORT.counts() == {"rewritten": 2, "skipped.weights_used": 1}
    twice = REPORT + REPORT
    assert len(twice) == 6 and twice.graphs == 4 and len(twice.graph_breaks) == 2


def test_of_graph_numbers_the_records():
    report = Report.of_graph(3, [PLAIN, SKIPPED])
    assert [(record.graph, record.index) for record in report] == [(3, 0), (3, 1)]
    assert report.graphs == 1


@pytest.mark.parametrize("code", SKIP_CODES)
def test_each_code_says_what_to_do(code):
    record = Skipped(node="softmax", code=code)
    assert record.advice == SKIP_CODES[code]
    assert "\n" not in record.advice and 20 < len(record.advice) < 120


def test_unknown_code():
    with pytest.raises(ValueError, match="unknown skip code 'weird'; known: "):
        Skipped(code="weird")


def test_bytes_of_scores():
    assert bytes_of_scores((2, 8, 64, 32), (2, 2, 96, 32), 2) == 2 * 2 * 8 * 64 * 96 * 2
    assert bytes_of_scores((2, 8, "s0", 32), (2, 8, "s0", 32), 2) is None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise = nn.Softmax(-1)

    def forward(self, x):
        return self.normalise(x) + torch.softmax(x, -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def located(function, x, **how):
    found = []

    def backend(gm, inputs):
        softmax = {torch.softmax, nn.functional.softmax, "softmax"}
        found.extend(locate(node) for node in gm.graph.nodes if node.target in softmax)
        found.append(dims(next(iter(gm.graph.find_nodes(op="output"))).args[0][0].meta["example_value"]))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, **how)(x)
    return found


@pytest.mark.parametrize("called", ["as the model", "from a function"])
def test_locate(called):
    model = Model()
    function = model if called == "as the model" else lambda x: model(x) * 2
    *records, shape = located(function, torch.randn(2, 3))
    assert [record["module"] for record in records] == [
        "layers.0.normalise",
        "layers.0",
        "layers.1.normalise",
        "layers.1",
    ]
    files, lines = zip(*(record["source"].split(":") for record in records), strict=True)
    assert {file.replace("\\", "/").rsplit("/", 1)[-1] for file in files} == {"test_report.py"}
    assert len(set(lines)) == 1  # nn.Softmax is located at the line that calls it
    assert all(record["node"] for record in records)
    assert shape == (2, 3)


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Model):
    forward = decorated(Model.forward)


class Delegating(nn.Module):
    """Finds its submodules in its own __getattr__, as adapters do."""

    def __init__(self):
        super().__init__()
        self.base = Model()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x):
        return self.base(x)


@pytest.mark.parametrize(("model", "prefix"), [(Decorated, ""), (Delegating, "base.")])
def test_locate_in_wrapped_models(model, prefix):
    *records, _ = located(model(), torch.randn(2, 3))
    assert records[0]["module"] == f"{prefix}layers.0.normalise"


def test_locate_in_a_plain_function():
    (record, _) = located(lambda x: torch.softmax(x, -1), torch.randn(2, 3))
    assert record["module"] == "" and record["source"].startswith("test_report.py:")


def test_dims_of_symbolic_shapes():
    shape = located(lambda x: x.softmax(-1), torch.randn(4, 6), dynamic=True)[-1]
    assert all(isinstance(size, str) for size in shape)


def test_locate_without_metadata():
    graph = torch.fx.Graph()
    assert locate(graph.placeholder("x")) == {"module": "", "source": "", "node": "x"}
