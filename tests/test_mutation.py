"""Writes in place: eager's values always; rewritten where it can be told what every tensor holds when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import Form, check
from forms.registry import NEG, Gen, sc
from torch import nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from torchflash.passes.writes import written

OPS = torch.ops.torchflash_tests
library = torch.library.Library("torchflash_tests", "FRAGMENT")
library.define("append(Tensor x, Tensor(a!) keys, Tensor(b!) values) -> ()")
library.define("append_all(Tensor x, Tensor(a!)[] caches) -> ()")
library.define("halve(Tensor(a!) x) -> Tensor")


def append_all(x: Any, caches: Any) -> None:
    for cache in caches:
        cache[1] = x


def halve(x: Any) -> Any:
    before = x.clone()
    x.mul_(0.5)
    return before


library.impl("append", lambda x, keys, values: append_all(x, (keys, values)), "CompositeExplicitAutograd")
library.impl("append_all", append_all, "CompositeExplicitAutograd")
library.impl("halve", halve, "CompositeExplicitAutograd")
library.impl("halve", torch.empty_like, "Meta")


def run(fn: Callable[..., Any], *inputs: Any, blocks: int = 1, skip: str = "", train: bool = True) -> None:
    check(Form(fn.__name__, lambda g: (fn, inputs), 0 if skip else blocks, skip), train=train)


def qkv() -> tuple[Any, ...]:
    return Gen().qkv()


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.mul_(0.5),
        lambda s: s.add_(1.0).mul_(0.5),
        lambda s: s.masked_fill_(torch.ones(13, 13).triu(1).bool(), NEG),
        lambda s: s.clamp_(-1.0, 1.0),
        lambda s: s.tanh_(),
    ],
    ids=["mul", "chain", "masked_fill", "clamp", "tanh"],
)
@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
def test_scores_written_by_one_call(write: Callable[[Any], Any], train: bool) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return write(sc(q, k) * 1.0).softmax(-1) @ v

    run(fn, *qkv(), train=train)


def test_statement_spellings() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.mT
        s *= 0.3
        s += 1.0
        s -= 0.5
        s /= 2.0
        return s.softmax(-1) @ v

    run(fn, *qkv())


@pytest.mark.parametrize("clip", [nn.ReLU6(inplace=True), nn.Hardtanh(inplace=True)], ids=["relu6", "hardtanh"])
def test_modules_that_write_in_place(clip: Callable[[Any], Any]) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k) * 4.0
        clip(s)  # as in nn.Dropout, `inplace` is given by position
        return s.softmax(-1) @ v

    run(fn, *qkv())


def test_the_name_from_before_the_write_sees_it() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k)
        t = s
        t.mul_(3.0)
        return s.softmax(-1) @ v

    run(fn, *qkv())


def test_a_copy_from_before_the_write_does_not() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k)
        t = s.clone()
        s.mul_(3.0)
        return t.softmax(-1) @ v + s.sum(-1, keepdim=True)

    run(fn, *qkv(), skip="*")


def test_scores_partly_written_are_left_alone() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k) * 1.0
        s[..., 1:3].mul_(3.0)
        return s.softmax(-1) @ v

    run(fn, *qkv(), skip="*")


def test_scores_written_through_a_view() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k) * 1.0
        s.transpose(-1, -2).masked_fill_(torch.ones(13, 13).tril(-1).bool(), NEG)
        return s.softmax(-1) @ v

    run(fn, *qkv(), skip="*")


def test_scores_written_after_the_softmax() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k) * 1.0
        p = s.softmax(-1)
        s.zero_()
        return p @ v

    run(fn, *qkv())


def test_weights_written() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        p = sc(q, k).softmax(-1) * 1.0
        p.masked_fill_(torch.ones(13, 13).triu(1).bool(), 0.0)
        return p @ v

    run(fn, *qkv())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "float"])
@pytest.mark.parametrize(
    "key", [(..., 2), (slice(None), slice(3, 6)), (slice(-4, -1),), (0,), (slice(None), 0)], ids=str
)
def test_masks_made_by_assignment(dtype: torch.dtype, key: Any) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        mask = torch.zeros(13, 13, dtype=dtype)
        mask[key] = 1
        s = sc(q, k)
        return (s.masked_fill(mask, -5.0) if dtype == torch.bool else s + mask).softmax(-1) @ v

    run(fn, *qkv())


def test_a_given_mask_copied_and_written() -> None:
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        mask = mask.clone()
        mask[..., 2] = False
        mask[:, :, 0] = True
        return sc(q, k).masked_fill(mask, -5.0).softmax(-1) @ v

    run(fn, *qkv(), Gen().keep(2, 1, 13, 13))


def test_a_mask_written_between_two_blocks() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        mask = torch.zeros(13, 13)
        a = (sc(q, k) + mask).softmax(-1) @ v
        mask[:, 3:] = -3.0
        b = (sc(k, q) + mask).softmax(-1) @ v
        mask.fill_(1.0)
        return a, b, mask

    run(fn, *qkv(), blocks=2)


def test_a_given_mask_written_after_its_block() -> None:
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out = (sc(q, k) + mask).softmax(-1) @ v
        mask.add_(1.0)
        return out, mask * 2

    run(fn, *qkv(), Gen().r(13, 13, grad=False))


def test_a_cache_written_before_and_after() -> None:
    def fn(q: Any, k: Any, v: Any, cache: Any) -> Any:
        cache = cache.clone()
        cache[:, :, 4:] = k
        out = sc(q, cache).softmax(-1) @ torch.cat([v, v[:, :, :4]], 2)
        return out, cache

    run(fn, *qkv(), Gen().r(2, 4, 17, 8))


def test_values_written_between_softmax_and_product() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        v = v * 1.0
        p = sc(q, k).softmax(-1)
        v[:, :, 3] = 0.0
        return p @ v

    run(fn, *qkv())


def test_queries_written_between_scores_and_product() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        q = q * 1.0
        s = sc(q, k)
        q.mul_(0.0)
        return s.softmax(-1) @ v, q

    run(fn, *(t.detach() for t in qkv()), skip="mutation", train=False)


def test_outputs_written() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        out = sc(q, k).softmax(-1) @ v
        out[..., 0] = 1.0
        out.mul_(2.0)
        return out

    run(fn, *qkv())


@pytest.mark.parametrize("product", [torch.matmul, torch.ops.aten.matmul.out], ids=["torch", "aten"])
@pytest.mark.parametrize("where", ["made", "given", "view"])
def test_results_written_to_what_is_there(where: str, product: Any) -> None:
    def fn(q: Any, k: Any, v: Any, out: Any) -> Any:
        if where == "made":
            out = torch.zeros_like(q)
        product(sc(q, k).softmax(-1), v, out=out[0] if where == "view" else out)
        return out + 1.0

    q, k, v = (t.detach() for t in qkv())
    run(fn, q, k, v, torch.zeros(2, *q.shape) if where == "view" else torch.zeros_like(q), skip="mutation", train=False)


def test_inputs_written_are_written() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        q.mul_(0.3)
        return (q @ k.mT).softmax(-1) @ v

    inputs = [t.detach() for t in qkv()]
    once, twice = [t.clone() for t in inputs], [t.clone() for t in inputs]
    torch._dynamo.reset()
    out = torch.compile(fn, backend="torchflash", options={"torchflash.inner": "aot_eager"})(*once)
    torch.testing.assert_close(out, fn(*twice))
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
def test_a_bias_made_in_place_is_loaded_as_it_is_in_the_end(train: bool) -> None:
    g = Gen()

    def fn(q: Any, k: Any, v: Any, table: Any, buckets: Any) -> Any:
        bias = table[:, buckets].cumsum(-1).view(1, g.H, g.S, g.S)
        bias.add_(table[:, buckets + 1]).div_(8.0)
        return (sc(q, k) + bias).softmax(-1) @ v

    buckets = torch.randint(0, 6, (g.S, g.S), generator=g.rng)
    run(fn, *g.qkv(), g.r(g.H, 7), buckets, train=train)


def test_a_bias_written_between_its_use_and_the_end() -> None:
    g = Gen()

    def fn(q: Any, k: Any, v: Any, table: Any, buckets: Any) -> Any:
        bias = table[:, buckets].cumsum(-1).view(1, g.H, g.S, g.S)
        p = (sc(q, k) + bias).softmax(-1)
        bias.mul_(2.0)
        return p @ v + bias.sum()

    buckets = torch.randint(0, 6, (g.S, g.S), generator=g.rng)
    run(fn, *g.qkv(), g.r(g.H, 7), buckets, skip="mutation")


def test_queries_written_between_two_pieces_of_the_scores() -> None:
    g = Gen()

    def fn(q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
        s = q @ k.mT
        q.mul_(2.0)
        p = torch.cat([s, q @ a.mT], -1).softmax(-1)
        return p[..., : g.S] @ v + p[..., g.S :] @ b

    inputs = [x.detach() for x in (*g.qkv(), *g.qkv()[1:])]  # torch cannot differentiate this
    run(fn, *inputs, skip="*", train=False)


APPENDS: dict[str, Callable[..., Any]] = {
    "op": lambda x, keys, values: OPS.append.default(x, keys, values),
    "packet": lambda x, keys, values: OPS.append(x, keys, values),
    "keywords": lambda x, keys, values: OPS.append.default(x=x, keys=keys, values=values),
    "list": lambda x, keys, values: OPS.append_all.default(x, [keys, values]),
    "foreach": lambda x, keys, values: torch._foreach_mul_([keys, values], 2.0),
    "checkpoint": lambda x, keys, values: checkpoint(append_all, x, (keys, values), use_reentrant=False),
}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("append", APPENDS)
def test_caches_written_by_one_call(append: str, before: bool) -> None:
    """Before or after they are read: keys and values that are looked up are not read through the lookup then."""

    def fn(q: Any, x: Any, keys: Any, values: Any, table: Any) -> Any:
        if before:
            APPENDS[append](x, keys, values)
        k, v = (t[table].flatten(1, 2).transpose(1, 2) for t in (keys, values))
        if not before:
            APPENDS[append](x, keys, values)
        return sc(q, k).softmax(-1) @ v

    g = Gen()
    table = torch.tensor([[0, 1, 2], [3, 1, 4]])
    run(fn, g.r(2, 3, 5, 8), g.r(4, 3, 8), g.r(5, 4, 3, 8), g.r(5, 4, 3, 8), table, train=False)


def test_what_an_operator_returns_is_not_what_it_writes() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        bias = torch.arange(k.shape[2], device=q.device) * 0.1
        OPS.halve.default(bias)
        return (sc(q, k) + bias).softmax(-1) @ v

    run(fn, *qkv())


def test_scores_written_by_a_call_of_many() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = sc(q, k)
        torch._foreach_mul_([s], 2.0)
        return s.softmax(-1) @ v

    run(fn, *qkv(), skip="*", train=False)


def test_kernels_of_the_user_may_write_to_all_they_are_given() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    kernel = graph.call_function(
        torch.ops.higher_order.triton_kernel_wrapper_mutation,
        kwargs={"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)], "kwargs": {"X": x, "Y": y, "n": 9}},
    )
    assert written(kernel) == (x, y)


def test_what_a_body_writes() -> None:
    found = []

    def body(x: Any, mask: Any, calls: Any) -> Any:
        calls.add_(1)
        mask.view(-1)[:2].neg_()
        return x * 2.0

    def backend(gm: Any, inputs: Any) -> Any:
        found.extend(w.name for n in gm.graph.nodes for w in written(n))
        return gm

    def fn(x: Any, mask: Any, calls: Any) -> Any:
        return checkpoint(body, x, mask, calls, use_reentrant=False) + 1.0

    torch.compile(fn, backend=backend)(torch.ones(2), torch.ones(4), torch.zeros(()))
    assert sorted(found) == ["l_calls_", "l_mask_"]


def test_long_sums() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        x = sc(q, k).softmax(-1) @ v
        for _ in range(1500):
            x = x + x * 1e-4
        return x

    run(fn, *qkv(), train=False)
