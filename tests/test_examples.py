"""The examples do what they say; the report of inspect_rewrites.py and what it leaves in the graph are goldens."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest

import torchflash
from torchflash import Report

EXAMPLES = Path(torchflash.__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    env = {**os.environ, "TORCHFLASH_DUMP": str(folder)}
    command = [sys.executable, str(EXAMPLES / "inspect_rewrites.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(folder), "dumps"), folder


class TestInspect(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _inspected(self, inspected):
        self.stdout, self.folder = inspected

    def code(self, moment):
        """The statements of a dump, without comments, indentation and the dels behind the semicolons."""
        text = (self.folder / f"graph_0.{moment}.py").read_text()
        lines = [re.sub(r";  .*", "", line).strip() for line in text.splitlines()]
        return "\n".join(line for line in lines if not line.startswith("#"))

    def test_report(self):
        self.assertExpectedInline(
            self.stdout,
            """\
torchflash: 3 rewritten, 1 skipped in 1 graph
skipped    returns_weights (inspect_rewrites.py:64) weights_used: the scores or weights are returned [at output]
           the scores or probabilities are used elsewhere, so they must exist; do not return or log them
rewritten  padded (inspect_rewrites.py:30)
           q [2, 4, 24, 16], k [2, 4, 24, 16], v [2, 4, 24, 16], float32, saves 36.0 KiB
           score  where((n <= m) & t0[b, n], 0.25 * s, -inf)
           keep   (n <= m) & t0[b, n]
rewritten  alibi (inspect_rewrites.py:45)
           q [2, 4, 24, 16], k [2, 4, 24, 16], v [2, 4, 24, 16], float32, saves 36.0 KiB
           score  0.25 * s - t0[h] * float(abs(m - n))
rewritten  grouped (inspect_rewrites.py:56)
           q [2, 4, 24, 16], k [2, 2, 24, 16], v [2, 2, 24, 16], float32, heads 4 over 2, saves 36.0 KiB
           score  32.0 * tanh(0.03125 * s)

before and after: dumps/graph_0.before.py, graph_0.after.py
""",
        )

    def test_readme_shows_the_report(self):
        report = self.stdout.split("\n\n")[0]
        assert report in (EXAMPLES.parent / "README.md").read_text()

    def test_what_is_left_in_the_graph(self):
        """Everything that has to do with scores: three operators, and the block that returns its weights."""
        kept = ("matmul", "weights", "out:", "attention")
        lines = [line for line in self.code("after").splitlines() if line.startswith(kept)]
        self.assertExpectedInline(
            "\n".join(re.sub(r"(\.default\(|\], \[\],) ?", r"\1\n    ", line) for line in lines),
            """\
matmul: "f32[2, 4, 24, 24]" = q @ transpose_3
weights: "f32[2, 4, 24, 24]" = torch.softmax(matmul, dim = -1)
out: "f32[2, 4, 24, 16]" = weights @ v
attention_default = torch.ops.torchflash.attention.default(
    permute, permute_1, permute_2, [l_present_], [],
    'where((n <= m) & t0[b, n], 0.25 * s, -inf)', '(n <= m) & t0[b, n]', -inf, 'p', 0.0, None, 'bhmd', '')
attention_default_1 = torch.ops.torchflash.attention.default(
    permute_3, permute_4, permute_5, [l_self_modules_alibi_buffers_slopes_], [],
    '0.25 * s - t0[h] * float(abs(m - n))', '', 0.0, 'p', 0.0, None, 'bhmd', '')
attention_default_2 = torch.ops.torchflash.attention.default(
    permute_6, permute_7, permute_8, [], [],
    '32.0 * tanh(0.03125 * s)', '', 0.0, 'p', 0.0, None, 'bhmd', '')""",
        )

    def test_before_holds_what_the_user_wrote(self):
        assert len(re.findall(r"\.softmax\(", self.code("before"))) == 4 and "torchflash" not in self.code("before")
        assert len(re.findall(r"\.softmax\(", self.code("after"))) == 1

    def test_json(self):
        report = Report.from_json((self.folder / "graph_0.report.json").read_text())
        assert report.counts() == {"rewritten": 3, "skipped.weights_used": 1}
        assert self.stdout.startswith(str(report))


def test_quickstart(capsys):
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    quickstart.main(length=1024)
    text = capsys.readouterr().out
    assert text.startswith("torchflash: 3 rewritten, 0 skipped in 1 graph\n")

    def row(name):
        return [float(value) for value in re.search(rf"{name} +(\S+) +(\S+)", text).groups()]

    for name in ("error of the output", "error of the gradients"):
        eager, ours = row(name)
        assert ours < 1e-4 and ours < 4 * eager
    eager, ours = row("peak memory, MiB")
    assert ours < eager
