"""The examples do what they say; the report of inspect_rewrites.py and what it leaves in the graph are goldens."""

import csv
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest
import torch

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
skipped    returns_weights (inspect_rewrites.py:65) weights_used: the scores or weights are returned [at output]
           the scores or probabilities are used elsewhere, so they must exist; do not return or log them
rewritten  padded (inspect_rewrites.py:31)
           causal + key padding
           q [2, 4, 1024, 16], k [2, 4, 1024, 16], v [2, 4, 1024, 16], float32, saves 64.0 MiB
           score  where((n <= m) & t0[b, n], 0.25 * s, -inf)
           keep   (n <= m) & t0[b, n]
rewritten  alibi (inspect_rewrites.py:46)
           ALiBi
           q [2, 4, 1024, 16], k [2, 4, 1024, 16], v [2, 4, 1024, 16], float32, saves 64.0 MiB
           score  0.25 * s - t0[h] * float(abs(m - n))
rewritten  grouped (inspect_rewrites.py:57)
           softcap 32, GQA 2:1
           q [2, 4, 1024, 16], k [2, 2, 1024, 16], v [2, 2, 1024, 16], float32, heads 4 over 2, saves 64.0 MiB
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
matmul: "f32[2, 4, 1024, 1024]" = q @ transpose_3
weights: "f32[2, 4, 1024, 1024]" = torch.softmax(matmul, dim = -1)
out: "f32[2, 4, 1024, 16]" = weights @ v
attention_default = torch.ops.torchflash.attention.default(
    permute, permute_1, permute_2, [l_present_], [],
    'where((n <= m) & t0[b, n], 0.25 * s, -inf)', '(n <= m) & t0[b, n]', -inf, 'p', 0.0, None, 'bhmd', '', None, '', [])
attention_default_1 = torch.ops.torchflash.attention.default(
    permute_3, permute_4, permute_5, [l_self_modules_alibi_buffers_slopes_], [],
    '0.25 * s - t0[h] * float(abs(m - n))', '', 0.0, 'p', 0.0, None, 'bhmd', '', None, '', [])
attention_default_2 = torch.ops.torchflash.attention.default(
    permute_6, permute_7, permute_8, [], [],
    '32.0 * tanh(0.03125 * s)', '', 0.0, 'p', 0.0, None, 'bhmd', '', None, '', [])""",
        )

    def test_before_holds_what_the_user_wrote(self):
        assert len(re.findall(r"\.softmax\(", self.code("before"))) == 4 and "torchflash" not in self.code("before")
        assert len(re.findall(r"\.softmax\(", self.code("after"))) == 1

    def test_json(self):
        report = Report.from_json((self.folder / "graph_0.report.json").read_text())
        assert report.counts() == {"rewritten": 3, "skipped.weights_used": 1}
        assert self.stdout.startswith(str(report))


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


def run(name, folder, *arguments):
    """What the example prints to stdout, on the CPU and with one thread; `folder` is where it runs and writes."""
    command = [sys.executable, str(EXAMPLES / name), "--device", "cpu", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n")


def test_quickstart(capsys, monkeypatch):
    quickstart = load("quickstart", monkeypatch)
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


def test_memory_comparison(tmp_path):
    """On a machine of 0.1 GB, eager runs out where torchflash runs. Scores of 8 heads and 1024 tokens are 32 MiB."""
    pytest.importorskip("matplotlib")
    small = ["--lengths", "1024", "--layers", "1", "--hidden", "64", "--heads", "8", "--causal", "--seconds", "0.01"]
    text = run("memory_comparison.py", tmp_path, *small, "--limit-gb", "0.1")
    assert text.startswith("1 layers, hidden 64, 8 heads, batch 1, causal, float32, cpu; memory: 0.1 GB: peaks above")
    rows = {row["impl"]: row for row in read_csv(tmp_path / "results" / "memory_comparison.csv")}
    assert list(rows) == ["eager", "inductor", "sdpa", "torchflash"]
    statuses = {impl: row["status"] for impl, row in rows.items()}
    assert statuses["eager"] == "out of memory" and {statuses["sdpa"], statuses["torchflash"]} == {"ok"}, statuses
    peaks = {impl: float(row["peak_mib"]) for impl, row in rows.items()}
    assert peaks["torchflash"] * 2**20 < 1e8 < peaks["eager"] * 2**20, peaks
    ours = rows["torchflash"]
    assert float(ours["tokens_per_s"]) == pytest.approx(1024 / float(ours["step_ms"]) * 1e3)
    assert ours["causal"] == "True" and ours["limit_gb"] == "0.1"
    assert "   1024 tokens: eager out of memory, torchflash ok\n" in text
    assert is_png(tmp_path / "results" / "memory_comparison.png")


class TestMemoryTable(expecttest.TestCase):
    """What is printed and written, with measurements made up."""

    @pytest.fixture(autouse=True)
    def _fixtures(self, monkeypatch, capsys, tmp_path):
        self.monkeypatch, self.capsys, self.folder = monkeypatch, capsys, tmp_path
        self.comparison = load("memory_comparison", monkeypatch)
        # the real limit would hold for all tests of this process
        monkeypatch.setattr(self.comparison, "limit_memory", lambda o: "no limit")

    def main(self, measure):
        self.monkeypatch.setattr(self.comparison, "measure", measure)
        arguments = ["--device", "cpu", "--lengths", "64,128", "--impls", "eager,inductor,torchflash"]
        status = self.comparison.main([*arguments, "--out", str(self.folder)])
        text = self.capsys.readouterr().out.replace(str(self.folder), "results")
        return status, "\n".join(line.rstrip() for line in text.splitlines()[1:])

    def measured(self, impl, length, o):
        """One failure of each kind among rows that went well."""
        if (impl, length) == ("eager", 128):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if (impl, length) == ("inductor", 64):
            raise ValueError("first line\nsecond line")
        if (impl, length) == ("inductor", 128):
            torch.empty(2**60)  # the CPU's way of running out
        peak, ms = {"eager": (400.0, 10.0), "torchflash": (100.0, 4.0)}[impl]
        return self.comparison.Row(length, impl, "ok", peak, ms, length / ms * 1e3)

    def test_failures_are_rows(self):
        pytest.importorskip("matplotlib")
        status, text = self.main(self.measured)
        self.assertExpectedInline(text, """\
 length                 peak, MiB      step, ms      tokens/s
     64 eager               400.0          10.0        6400.0   ok
     64 inductor                -             -             -   failed: ValueError: first line
     64 torchflash          100.0           4.0       16000.0   ok
    128 eager                   -             -             -   out of memory
    128 inductor                -             -             -   out of memory
    128 torchflash          100.0           4.0       32000.0   ok

     64 tokens: 75.0 % less memory than eager, 2.50 times the tokens/s
    128 tokens: eager out of memory, torchflash ok

wrote results/memory_comparison.csv and results/memory_comparison.png""")
        rows = [(row["length"], row["impl"], row["status"]) for row in read_csv(self.folder / "memory_comparison.csv")]
        assert status == 0 and len(rows) == 6
        assert rows[3] == ("128", "eager", "out of memory") and rows[4] == ("128", "inductor", "out of memory")
        assert is_png(self.folder / "memory_comparison.png")

    def test_nothing_fits(self):
        pytest.importorskip("matplotlib")

        def measure(impl, length, o):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        _, text = self.main(measure)
        assert text.count("out of memory") >= 6 and text.endswith("results/memory_comparison.png")
        assert is_png(self.folder / "memory_comparison.png")

    def test_interrupted(self):
        def measure(impl, length, o):
            if impl == "torchflash":
                raise KeyboardInterrupt
            return self.comparison.Row(length, impl, "ok", 400.0, 10.0, 6400.0)

        status, text = self.main(measure)
        assert status == 130 and "interrupted: 2 of 6 measured" in text
        assert [row["impl"] for row in read_csv(self.folder / "memory_comparison.csv")] == ["eager", "inductor"]

    def test_a_skipped_block_is_a_failure(self):
        """The row of torchflash must not show numbers of a model whose attention was left alone."""

        class ReturnsWeights(self.comparison.Attention):
            def forward(self, x, drop):
                weights = (x @ x.transpose(-2, -1)).softmax(-1)
                return weights @ x + weights.sum()

        self.monkeypatch.setattr(self.comparison, "Attention", ReturnsWeights)
        tiny = ["--device", "cpu", "--layers", "1", "--hidden", "8", "--heads", "2"]
        row = self.comparison.measure_or_say_why("torchflash", 16, self.comparison.options(tiny))
        assert row.status.startswith("failed: ") and "1 softmax not rewritten" in row.status, row


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("memory_comparison", ["--impls", "eager,flash"], "unknown flash; known: eager, inductor, sdpa, torchflash"),
        ("memory_comparison", ["--heads", "5"], "--hidden 768 is not a multiple of --heads 5"),
        ("memory_comparison", ["--limit-gb", "0"], "--limit-gb 0 must be positive"),
        ("train", ["--heads", "3"], "--width 128 is not a multiple of --heads 3"),
        ("train", ["--text-kb", "0"], "--text-kb 0 holds no sequence of --length 128"),
    ],
)
def test_bad_options(name, arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        load(name, monkeypatch).options(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("dropout", "inner"), [(0.0, "inductor"), (0.2, "aot_eager")])
def test_train(dropout, inner, tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--layers", "1", "--width", "32", "--heads", "2", "--length", "48", "--batch", "4", "--steps", "12"]
    text = run("train.py", tmp_path, *small, "--lr=0.01", "--text-kb=50", f"--dropout={dropout}", f"--inner={inner}")
    assert "torchflash: 1 rewritten, 0 skipped in 1 graph\n" in text
    rows = read_csv(tmp_path / "results" / "train.csv")
    eager, ours = ([float(row[name]) for row in rows] for name in ("eager", "torchflash"))
    assert len(rows) == 12 and ours[-1] < ours[0] - 1  # nats per byte: it learns
    largest = max(abs(a - b) for a, b in zip(eager, ours, strict=True))
    assert largest == pytest.approx(float(re.search(r"losses: (\S+), at", text)[1]), rel=0.1, abs=1e-9)
    assert (largest < 1e-4) == (dropout == 0.0), largest  # other random numbers are seen
    assert is_png(tmp_path / "results" / "train.png")


class TestHuggingFace(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        for name in ("transformers", "accelerate", "peft"):
            pytest.importorskip(name)
        small = ["--hidden", "32", "--length", "24", "--batch", "2", "--steps", "3", "--new-tokens", "6"]
        self.small, self.folder = [*small, "--inner", "aot_eager"], tmp_path

    def test_all(self):
        text = run("huggingface.py", self.folder, *self.small)
        parts = dict(re.findall(r"== (\w+)\n(.*?)(?=\n== |\Z)", text, flags=re.S))
        assert list(parts) == ["trainer", "lora", "generate"]
        for name in ("trainer", "lora"):
            assert parts[name].startswith("torchflash: 2 rewritten, 0 skipped in 1 graph\n"), parts[name]
            losses = re.findall(r"^ +\d+ +(\d\.\d+) +(\d\.\d+)$", parts[name], flags=re.M)
            assert len(losses) == 3 and losses[-1][0] < losses[0][0], losses
            assert float(re.search(r"largest difference: (\S+)", parts[name])[1]) < 1e-4, parts[name]
        self.assertExpectedInline(parts["generate"][parts["generate"].index("blocks rewritten") :], """\
blocks rewritten: 2 for the prompt, 2 for decoding
graphs compiled: 1 by the first token, 2 by the second, 2 by the end
recompiled after the second token: 0
first call: 6 new tokens for each of 2 prompts, equal eager's
second call: 6 new tokens for each of 2 prompts, equal eager's
""")
