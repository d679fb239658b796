"""What the op promises besides its values: shapes and strides (fake and real), empties, errors, derivatives it
refuses, memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from attention_cases import CASES, F16, F32, build
from oracle import INF, Inputs, run_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OP = torch.ops.torchflash.attention
BACKWARD = torch.ops.torchflash.attention_backward
BY_NAME = {c.name: c for c in CASES}
CAUSAL = ("where(n <= m, 0.25 * s, -inf)", "n <= m", -INF, "p")


def tensors(B=2, H=4, M=9, N=11, D=8, DV=8, heads=None, **kwargs):
    torch.manual_seed(0)
    return (
        torch.randn(B, H, M, D, **kwargs),
        torch.randn(B, heads or H, N, D, **kwargs),
        torch.randn(B, heads or H, N, DV, **kwargs),
    )


def transposed(*xs):
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]


LAYOUTS = {
    "contiguous": lambda xs: list(xs),
    "heads_inside": lambda xs: transposed(*xs),
    "mixed": lambda xs: [*transposed(xs[0]), *xs[1:]],
    "columns": lambda xs: [x.mT.contiguous().mT for x in xs],
    "broadcast": lambda xs: [xs[0], *(x[:, :1].expand(x.shape) for x in xs[1:])],
}


@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
@pytest.mark.parametrize("strides", LAYOUTS)
@pytest.mark.parametrize("shape", [{}, {"H": 1}, {"M": 1}, {"B": 1, "DV": 5}], ids=str)
def test_fake_strides_are_the_real_ones(layout, strides, shape):
    def forward_and_backward(q, k, v, t):
        out, lse = OP(q, k, v, [t], [], "0.25 * s + t0[m, n]", "", -INF, "p", 0.0, None, layout, "", None, "", [])
        dq, dk, dv, (dt,) = BACKWARD(
            out, q, k, v, out, lse, [t], [], [True], "0.25 * s + t0[m, n]", "", -INF, "p", 0.0, None, "", []
        )
        return out, lse, dq, dk, dv, dt

    q, k, v = LAYOUTS[strides](tensors(**shape))
    args = (q, k, v, torch.randn(k.shape[2], q.shape[2]).t())
    real = forward_and_backward(*args)
    with FakeTensorMode() as mode:
        fake = forward_and_backward(*(mode.from_tensor(a) for a in args))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_out_layouts():
    q, k, v = tensors()
    assert OP(q, k, v, [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])[0].is_contiguous()
    assert OP(q, k, v, [], [], *CAUSAL, 0.0, None, "bmhd", "", None, "", [])[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", ["causal", "bias", "documents", "grouped", "dropout", "pair_bias", "window"])
def test_opcheck(name):
    x = build(BY_NAME[name])
    for leaf in x.leaves():
        leaf.requires_grad_()
    texts = (x.score, x.keep, x.fill, x.post)
    args = (x.q, x.k, x.v, x.captures, x.sizes, *texts, x.dropout_p, x.seed, "bmhd", "", None, "", [])
    torch.library.opcheck(OP.default, args)
    out, lse = (t.detach() for t in OP(*args))
    need = [c.is_floating_point() for c in x.captures]
    plain = [t.detach() for t in (x.q, x.k, x.v)]
    args = (out, *plain, out, lse, [c.detach() for c in x.captures], x.sizes, need, *args[5:11], "", [])
    torch.library.opcheck(BACKWARD.default, args, test_utils=("test_schema", "test_faketensor"))


def test_compiled_training_with_changing_lengths_is_one_graph():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q, k, v, t):
        out, _ = OP(
            q,
            k,
            v,
            [t],
            [q.shape[2]],
            "where(n <= m, 0.25 * s + t0[h, m], -inf)",
            "n <= m",
            -INF,
            "p",
            0.0,
            None,
            "bmhd",
            "",
            None,
            "",
            [],
        )
        return out.sin().sum()

    compiled = torch.compile(step, backend=counter, dynamic=True)
    for length in (9, 17, 33):
        xs = [x.requires_grad_() for x in (*tensors(M=length, N=length), torch.randn(4, length))]
        got = torch.autograd.grad(compiled(*xs), xs)
        for a, b in zip(got, torch.autograd.grad(step(*xs), xs), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("shape", [{"B": 0}, {"H": 0}, {"M": 0}, {"N": 0}, {"D": 0}, {"DV": 0}], ids=str)
def test_empty(shape):
    q, k, v = (x.requires_grad_() for x in tensors(**shape))
    t = torch.randn(11, requires_grad=True)
    out, lse = OP(q, k, v, [t], [], "0.25 * s + t0[n]", "", -INF, "p", 0.0, None, "bmhd", "", None, "", [])
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (2, *q.shape[:3])
    if "N" in shape:
        assert not out.count_nonzero()
    for g, x in zip(torch.autograd.grad(out.sum(), [q, k, v, t]), [q, k, v, t], strict=True):
        assert g.shape == x.shape and not g.isnan().any()


def test_gradients_only_where_needed():
    q, k, v = tensors()
    q.requires_grad_()
    a, b = torch.randn(4), torch.randn(4, requires_grad=True)
    text = "0.25 * s + (t0[h] + t1[h]) * float(n)"
    out, lse = OP(q, k, v, [a, b], [], text, "", -INF, "p", 0.0, None, "bhmd", "", None, "", [])
    assert not lse.requires_grad
    out.sum().backward()
    assert q.grad is not None and a.grad is None and b.grad is not None


def test_double_backward_raises():
    q, k, v = (x.requires_grad_() for x in tensors())
    out, _ = OP(q, k, v, [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])
    (g,) = torch.autograd.grad(out.sin().sum(), [q], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(g.sum(), [q])


@pytest.mark.parametrize("which", ["dual", "jvp"])
def test_forward_mode_raises(which):
    q, k, v = tensors()

    def attention(x):
        return OP(x, k, v, [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])[0]

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        if which == "jvp":
            torch.func.jvp(attention, (q,), (q,))
        with forward_ad.dual_level():
            attention(forward_ad.make_dual(q, q))
    with forward_ad.dual_level():
        attention(q)  # without a tangent


def test_forward_mode_raises_in_compiled_code():
    """Which calls the op past the dispatcher; compiled before anybody asked for tangents."""
    q, k, v = tensors()
    compiled = torch.compile(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, backend="torchflash")
    compiled(q, k, v)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        compiled(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_raise(transform):
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match=r"transforms of torch.func; write this attention in plain torch"):
        transform(lambda x: OP(x, k, v, [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])[0].sum())(q)


@pytest.mark.parametrize("wanted", ["none", "q", "v", "capture"])
def test_the_tape_is_kept_where_something_needs_it(wanted):
    q, k, v = tensors()
    t = torch.randn(4)
    leaves = {"q": q, "v": v, "capture": t}
    if wanted != "none":
        leaves[wanted].requires_grad_()

    def attention():
        return OP(q, k, v, [t], [], "0.25 * s + t0[h] * float(n)", "", -INF, "p", 0.0, None, "bhmd", "", None, "", [])

    out, lse = attention()
    assert out.requires_grad == (wanted != "none") and not lse.requires_grad
    with torch.no_grad():
        assert not attention()[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(attention()[0], out)
    if wanted != "none":
        (g,) = torch.autograd.grad(out.sum(), [leaves[wanted]])
        assert g.count_nonzero()


@pytest.mark.parametrize("grad", [False, True])
def test_modes_see_the_op_after_plain_calls(grad):
    """Straight to the implementation only where nobody is in between."""
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = (x.requires_grad_(grad) for x in tensors())

    def step():
        out, _ = OP(q, k, v, [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])
        return out, torch.autograd.grad(out.sum(), [q]) if grad else None

    before = step()
    with Look():
        torch.testing.assert_close(step(), before)
    assert OP.default in seen and (BACKWARD.default in seen) == grad
    with FakeTensorMode() as mode:
        out, _ = OP(*(mode.from_tensor(x) for x in (q, k, v)), [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])
        assert type(out) is not torch.Tensor
    out, _ = OP(*(x.to("meta") for x in (q, k, v)), [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])
    assert out.device.type == "meta"
    torch.testing.assert_close(step(), before)


def test_results_may_be_written_in_place():
    q, k, v = (x.requires_grad_() for x in tensors())
    for layout in ("bhmd", "bmhd"):
        out, _ = OP(q, k, v, [], [], *CAUSAL, 0.0, None, layout, "", None, "", [])
        out.mul_(2.0).sum()
        with torch.no_grad():
            OP(q, k, v, [], [], *CAUSAL, 0.0, None, layout, "", None, "", [])[0].mul_(2.0)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_transforms_of_what_is_compiled_run_it_uncompiled(warm):
    """As the README says of torch.func; so does torch with any backend."""
    q, k, v = tensors()

    def attention(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    def hessian(f):
        return torch.func.hessian(lambda x: f(x, k[:, :1], v[:, :1]).sum())(q[:, :1, :3])

    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="torchflash")
    if warm:
        compiled(q, k, v)
    lanes = [torch.stack([x, -x, 2 * x]) for x in (q, k, v)]
    torch.testing.assert_close(torch.vmap(compiled)(*lanes), torch.vmap(attention)(*lanes))
    torch.testing.assert_close(hessian(compiled), hessian(attention))
    got, want = (torch.func.jvp(f, (q, k, v), tuple(lanes[i][1] for i in range(3))) for f in (compiled, attention))
    torch.testing.assert_close(got, want)


def test_vmap_raises():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="vmap over attention is not supported"):
        torch.vmap(lambda x: OP(x, k, v, [], [], *CAUSAL, 0.0, None, "bhmd", "", None, "", [])[0])(q[None])


def refused(kind, match, q, k, v, captures=(), programs=CAUSAL, dropout_p=0.0, seed=None, layout="bhmd"):
    with pytest.raises(kind, match=match) as found:
        OP(q, k, v, list(captures), [], *programs, dropout_p, seed, layout, "", None, "", [])
    assert "\n" not in str(found.value)


def test_errors_say_what_and_why_in_one_line():
    q, k, v = tensors()
    refused(ValueError, r"must be \[batch, heads, length, dim\]; got q \[4, 9, 8\]", q[0], k, v)
    refused(ValueError, "attention: the heads of k must divide those of q; got", q, k[:, :3], v)
    refused(ValueError, "attention: batch sizes must agree, q and k must have one dim; got", q, k[:1, ..., :4], v)
    refused(ValueError, "q and k must have one dim", q, k[..., :4], v)
    refused(ValueError, "k and v must have one length", q, k[:, :, :4], v)
    refused(TypeError, "got torch.float16, torch.float32", q.half(), k, v)
    refused(TypeError, "float64", q.double(), k.double(), v)
    refused(ValueError, "unknown layout 'mbhd'; known: bhmd, bmhd", q, k, v, layout="mbhd")
    refused(ValueError, "needs a seed", q, k, v, dropout_p=0.1)
    refused(ValueError, r"dropout_p must be in \[0, 1\]; got 1.5", q, k, v, dropout_p=1.5)
    refused(ValueError, "not part of the score language", q, k, v, programs=("s + q", "", -INF, "p"))
    refused(ValueError, "loads t0 but there are 0 captures", q, k, v, programs=("s + t0[n]", "", -INF, "p"))


class LargestTemporary(TorchDispatchMode):
    """The most elements of a tensor created inside, apart from views and what is written in place."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t._base is None:
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["fp32", "fp16"])
def test_memory_does_not_grow_with_the_square_of_the_length(heads, dtype):
    S, D = 2048, 16
    q, k, v = (torch.randn(1, h, S, D, dtype=dtype, requires_grad=True) for h in (heads, 1, 1))
    slopes = torch.randn(heads, requires_grad=True)
    programs = ("where(n <= m, 0.25 * s + t0[h] * float(n - m), -inf)", "n <= m", -INF, "p")
    with LargestTemporary() as seen:
        out, _ = OP(q, k, v, [slopes], [], *programs, 0.1, torch.tensor([5]), "bmhd", "", None, "", [])
        out.sum().backward()
    assert seen.largest <= S * S // 4


def test_a_gradient_as_large_as_the_scores_is_the_only_tensor_of_its_size():
    S = 1024
    q, k, v = (torch.randn(2, 2, S, 8).half().requires_grad_() for _ in range(3))
    bias = torch.randn(2, S, S).half().requires_grad_()
    out = OP(q, k, v, [bias], [], "0.25 * s + t0[h, m, n]", "", -INF, "p", 0.0, None, "bhmd", "", None, "", [])[0]

    class Count(LargestTemporary):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            new = [
                t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel() >= S * S
            ]
            self.found += sum(t._base is None and t.dtype == torch.float32 for t in new)
            return out

    with Count() as seen:
        out.backward(torch.ones_like(out))
    assert seen.found == 0 and bias.grad.dtype == torch.float16


def test_without_triton():
    """Importing and running the op on CPU needs no triton."""
    script = """
import sys
sys.modules["triton"] = None
import torch, torchflash.kernels
q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
out, _ = torch.ops.torchflash.attention(q, k, v, [], [], "0.5 * s", "", 0.0, "p", 0.0, None, "bhmd", "", None, "", [])
out.sum().backward()
torch.testing.assert_close(out, (0.5 * (q @ k.mT)).softmax(-1) @ v)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_same_call_gives_the_same_bits():
    x = build(BY_NAME["dropout_gate_bias"])
    assert torch.equal(run_op(x), run_op(x))
    assert isinstance(x, Inputs)


def test_autocast_does_not_reach_inside():
    q, k, v = (torch.randn(2, 2, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    arguments = (q, k, v, [], [], "0.25 * s", "", 0.0, "p", 0.0, None, "bhmd", "", None, "", [])
    expected = torch.ops.torchflash.attention(*arguments)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.ops.torchflash.attention(*arguments)[0], expected)
