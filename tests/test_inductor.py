"""Around Inductor: its attention fuser stays off what we compile, and only there; its caches never serve old sources.

The softmaxes here are not over the keys. Inductor's fuser takes them for attention, which is what makes them good
witnesses: if the gate leaks the results are wrong, and if it reaches further than ours the plain compiles change.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

import torchflash.passes
from torchflash import Options, inductor
from torchflash.backend import torchflash as backend

ROOT = Path(inductor.__file__).resolve().parents[1]


def softmax_over_heads(q, k, v):
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(1) @ v


def softmax_over_batch(q, k, v):
    return torch.softmax(q @ k.mT / 3.0, 0) @ v


def joint_softmax(q, k, v):
    scores = q @ k.mT / 3.0
    weights = (scores - scores.amax((-2, -1), keepdim=True)).exp()
    return (weights / weights.sum((-2, -1), keepdim=True)) @ v


def attention(q, k, v):
    return ((q @ k.mT) / 3.0).softmax(-1) @ v


def qkv(grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 16, 8, generator=generator).requires_grad_(grad) for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def nothing_rewritten(monkeypatch):
    monkeypatch.setattr(torchflash.passes, "rewrite_graph", lambda gm, options: [], raising=False)


@pytest.fixture
def no_caches():
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def fused():
    return counters["inductor"]["fuse_attention"]


# ------------------------------------------------------------------------------------------------------------ the gate


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", [softmax_over_heads, softmax_over_batch, joint_softmax])
def test_what_is_not_attention_comes_out_right(function, train):
    torch._dynamo.reset()
    inputs = qkv(train)
    exact = [t.detach().double().requires_grad_(train) for t in inputs]
    out, expected = torch.compile(function, backend="torchflash")(*inputs), function(*exact)
    torch.testing.assert_close(out, expected.float())
    if train:
        cotangent = torch.randn(out.shape)
        for got, want in zip(
            torch.autograd.grad(out, inputs, cotangent),
            torch.autograd.grad(expected, exact, cotangent.double()),
            strict=True,
        ):
            torch.testing.assert_close(got, want.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_maximum_in_half_precision_has_the_gradient_eager_gives(dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in qkv()]
    do = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def gradients(function, tensors):
        return torch.autograd.grad(function(*tensors), tensors, do.to(tensors[0].dtype))

    true = gradients(joint_softmax, [x.detach().double().requires_grad_() for x in inputs])
    eager = gradients(joint_softmax, inputs)
    ours = gradients(torch.compile(joint_softmax, backend="torchflash"), inputs)
    for t, e, o in zip(true, eager, ours, strict=True):
        assert (o.double() - t).norm() <= 2 * (e.double() - t).norm()  # NaN is not


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_plain_inductor_fuses_as_before(nothing_rewritten, no_caches, train):
    counts = []
    for name in ("inductor", "torchflash", "inductor"):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(attention, backend=name)(*qkv(train))
        counts.append(fused())
    assert counts[0] > 0 and counts == [counts[0], 0, counts[0]]


def test_a_warm_cache_does_not_defeat_the_gate(nothing_rewritten):
    for name in ("inductor", "torchflash", "inductor", "torchflash"):
        torch._dynamo.reset()
        inputs = qkv()
        out = torch.compile(softmax_over_heads, backend=name)(*inputs)
        if name == "torchflash":
            torch.testing.assert_close(out, softmax_over_heads(*(t.double() for t in inputs)).float())


def test_the_gate_holds_in_its_own_thread_only(nothing_rewritten):
    inductor.gate_attention_fuser()
    check = inductor._unless_ours(lambda match: True)
    seen = {}
    with inductor._around("tag"):
        thread = threading.Thread(target=lambda: seen.update(other=check(None)))
        thread.start()
        thread.join()
        seen.update(ours=check(None))
    assert seen == {"other": True, "ours": False} and check(None) is True


def test_unknown_internals_switch_the_group_of_passes_off(nothing_rewritten, no_caches, monkeypatch):
    monkeypatch.setattr(inductor, "_gate_entries", lambda: 0)
    assert not inductor.gate_attention_fuser()
    monkeypatch.setattr(inductor, "_ours", threading.local())  # the gate itself must not be what keeps the fuser off
    monkeypatch.setattr(inductor._ours, "get", lambda: False, raising=False)
    monkeypatch.setattr(inductor._ours, "set", lambda value: None, raising=False)
    monkeypatch.setattr(inductor._ours, "reset", lambda token: None, raising=False)
    inputs = qkv()
    out = torch.compile(softmax_over_heads, backend="torchflash")(*inputs)
    assert fused() == 0
    torch.testing.assert_close(out, softmax_over_heads(*(t.double() for t in inputs)).float())


# ------------------------------------------------------------------------------------------------------- the cache tag


def test_tag_follows_sources_and_options(monkeypatch):
    tag = inductor.cache_tag(Options())
    assert inductor.source_hash() in tag and torchflash.__version__ in tag
    assert inductor.cache_tag(Options(inner="aot_eager")) != tag
    assert inductor.cache_tag(Options(strict=True)) == tag
    monkeypatch.setattr(inductor, "source_hash", lambda: "edited")
    assert inductor.cache_tag(Options()) != tag


def test_tag_follows_the_users_tag():
    tag = inductor.cache_tag(Options())
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert inductor.cache_tag(Options()) == f"mine|{tag}"
    with torch.compiler.config.patch(cache_key_tag=tag):
        assert inductor.cache_tag(Options()) == tag


def test_all_our_sources_are_hashed():
    names = {file.relative_to(ROOT).as_posix() for file in inductor.source_files()}
    assert {"torchflash/inductor.py", "passes/__init__.py", "kernels/__init__.py"} <= names
    assert len(names) == len(inductor.source_files())


def test_gate_and_tag_surround_a_backward_compiled_later(nothing_rewritten, no_caches, monkeypatch):
    """The backward is compiled when it first runs, here in another thread."""
    from torch._inductor import compile_fx

    seen = []
    original = compile_fx.compile_fx_inner

    def compile_fx_inner(*args, **kwargs):
        seen.append((bool(kwargs.get("is_backward")), inductor._ours.get(), torch.compiler.config.cache_key_tag))
        return original(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    with torch.compiler.config.patch(cache_key_tag="mine"):
        out = torch.compile(attention, backend="torchflash")(*qkv(True))
    assert [backward for backward, *_ in seen] == [False]
    thread = threading.Thread(target=out.sum().backward)
    thread.start()
    thread.join()
    with torch.compiler.config.patch(cache_key_tag="mine"):
        tag = inductor.cache_tag(Options())
    assert seen == [(False, True, tag), (True, True, tag)]
    assert torch.compiler.config.cache_key_tag == "" and not inductor._ours.get()


# nothing but ops: Inductor then has no C++ to compile, which would take most of the time
PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
out = torch.compile(attention, backend="torchflash")(q, k, v)
out.backward(torch.ones_like(out))
from torchflash.backend import torchflash as backend
import torchflash.kernels
x = torch.ones(3, requires_grad=True)
torch.compile(torch.ops.torchflash_test.scale, backend="torchflash")(x, 2.0).backward(torch.ones(3))
json.dump({
    "report": backend.report.to_json(),
    "counts": dict(counters["torchflash"]),
    "grad": x.grad.tolist(),
    "dq": q.grad.flatten().tolist(),
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
}, sys.stdout)
"""

# an op whose backward formula stands in our sources, as that of torchflash::attention does
TOY = """
import torch as _torch
_toy = _torch.library.Library("torchflash_test", "DEF")
_toy.define("scale(Tensor x, float by) -> Tensor")
_torch.library.impl(_toy, "scale", "CompositeExplicitAutograd")(lambda x, by: x * by)
_torch.library.register_fake("torchflash_test::scale", lambda x, by: x * by, lib=_toy)
_backward = lambda ctx, grad: (_torch.ops.torchflash_test.scale(grad, 2.0), None)
_torch.library.register_autograd("torchflash_test::scale", _backward, lib=_toy)
"""


def test_second_process_is_served_and_an_edited_formula_is_not(tmp_path):
    package = tmp_path / "package" / "torchflash"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchflash", package, symlinks=False, ignore=ignore)
    source = package / "kernels" / "toy.py"
    source.write_text(TOY)
    init = package / "kernels" / "__init__.py"
    init.write_text(init.read_text() + "\nfrom torchflash.kernels import toy\n")

    def run():
        env = {
            **os.environ,
            "PYTHONPATH": str(tmp_path / "package"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        }
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    cold, warm = run(), run()
    assert (cold["hits"], cold["misses"]) == (0, 2) and (warm["hits"], warm["misses"]) == (2, 0)
    assert {**warm, "hits": 0, "misses": 2} == cold
    assert cold["counts"] == {"rewritten": 1} and cold["grad"] == [2.0, 2.0, 2.0]
    source.write_text(TOY.replace("(grad, 2.0)", "(grad, 3.0)"))
    edited = run()
    assert edited["grad"] == [3.0, 3.0, 3.0] and (edited["hits"], edited["misses"]) == (0, 2)
    assert edited["report"] == cold["report"]


def test_backend_is_the_one_of_the_entry_point():
    assert torch._dynamo.lookup_backend("torchflash") is backend


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_calls_pass_the_dispatcher(no_caches, train):
    """Compiled code calls the op's function itself, and gives what it gives by the dispatcher."""
    q, k, v = qkv(train)

    compiled = torch.compile(attention, backend="torchflash")
    out, codes = run_and_get_code(compiled, q, k, v)
    gradients = torch.autograd.grad(out.sum(), (q, k, v)) if train else ()
    calls = re.findall(r"torch\.ops\.torchflash\.(\w+\.\w+)\(", "\n".join(codes))
    assert calls == ["attention.compiled"]
    with FlopCounterMode(display=False) as flops:  # which sees nothing but what is dispatched
        again = compiled(q, k, v)
    assert flops.get_total_flops() == 4 * 2 * 4 * 16 * 16 * 8
    expected = attention(q, k, v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(again, expected)
    for found, wanted in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v)) if train else (), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_cpp_wrapper(train):
    """Which calls no operator that returns a list of tensors, as the backward does."""
    q, k, v = qkv(train)

    compiled = torch.compile(attention, backend="torchflash", options={"cpp_wrapper": True})
    out, expected = compiled(q, k, v), attention(q, k, v)
    torch.testing.assert_close(out, expected)
    if train:
        found, wanted = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
        torch.testing.assert_close(found, wanted)
