"""Parts of a block without gradients: the same gradients are missing as in eager mode, and the others are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchflash
from torchflash.backend import torchflash as backend

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(4, -1, x.shape[-1]).view(2, 2, -1, x.shape[-1]),
    "transpose": lambda x: x.transpose(0, 1).transpose(0, 1),
    "slice": lambda x: x[:],
    "chunk": lambda x: x.chunk(1)[0],
    "copy": lambda x: x * 1,
}


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 2, 6, 4), (2, 2, 7, 4), (2, 2, 7, 5), (2, 2, 6, 7), (8, 2))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def gradients(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor | None]:
    out = fn(*given)
    with torch.enable_grad():
        found = torch.autograd.grad(out.square().sum(), given, allow_unused=True) if out.requires_grad else [None]
    return [out.detach(), *found]


def check(fn: Callable[..., Tensor], rewritten: int | None = None) -> None:
    given = inputs()
    torch._dynamo.reset()
    options = {"torchflash.inner": "aot_eager", "torchflash.min_seqlen": 0}
    compare(gradients(torch.compile(fn, backend="torchflash", options=options), given), gradients(fn, given))
    assert rewritten is None or backend.report.counts().get("rewritten", 0) == rewritten, backend.report


def compare(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [x is None for x in got] == [x is None for x in expected]
    for a, b in zip(got, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("where", ["q", "k", "v", "bias", "scores", "weights", "result"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_under_no_grad(name: str, where: str) -> None:
    def fn(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        def at(place: str, x: Any) -> Any:
            with torch.set_grad_enabled(place != where):
                return VIEWS[name](x)

        s = at("scores", at("q", q) @ at("k", k).mT + at("bias", bias))
        return at("result", at("weights", s.softmax(-1)) @ at("v", v)) * table.sum()

    check(fn, int(where not in ("scores", "weights")))


def test_scores_written_in_place_under_no_grad() -> None:
    """Their gradient is that of what they held before."""

    def fn(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        s = q @ k.mT
        with torch.no_grad():
            s.mul_(2.0)
        return s.softmax(-1) @ v

    check(fn, 0)


def test_the_contraction_with_the_values_under_no_grad() -> None:
    def divided(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        e = (q @ k.mT).exp()
        with torch.no_grad():
            o = e @ v
        return o / e.sum(-1, keepdim=True)

    def in_pieces(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        a, b, c = (q @ k.mT).softmax(-1).split([2, 2, 3], -1)
        with torch.no_grad():
            o = a @ v[:, :, :2] + b @ v[:, :, 2:4]
        return o + c @ v[:, :, 4:]

    check(divided, 0)
    check(in_pieces)


def test_products_summed_under_no_grad() -> None:
    def scores(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        product = q[:, :, :, None] * k[:, :, None]
        with torch.no_grad():
            s = product.sum(-1)
        return s.softmax(-1) @ v

    def result(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        product = (q @ k.mT).softmax(-1)[..., None] * v[:, :, None]
        with torch.no_grad():
            o = product.sum(-2)
        return o * q.sum()

    check(scores, 0)
    check(result)


def test_blocks_with_and_without_gradients() -> None:
    """What both read is read with gradients for the one that has them."""

    def fn(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        def attend() -> Any:
            distance = torch.arange(7) - torch.arange(6)[:, None]
            learned = (table.tanh() * 3)[distance.clamp(-4, 3) + 4].permute(2, 0, 1).sigmoid() * 16
            return (q @ k.mT + learned).softmax(-1) @ v

        with torch.no_grad():
            o = attend()
            with torch.enable_grad():
                o = o + attend()
        return o + attend()

    check(fn, 3)


def test_enabled_where_the_caller_has_them_disabled() -> None:
    def body(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT).detach().softmax(-1) @ v

    def fn(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        with torch.enable_grad():
            return torch.utils.checkpoint.checkpoint(body, q, k, v, use_reentrant=False)

    with torch.no_grad():
        check(fn, 0)


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_a_graph_of_export_may_be_trained(train: bool) -> None:
    """In whatever mode it was rewritten."""

    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
            return (q @ k.mT).detach().softmax(-1) @ v + (q.detach().view(2, 2, -1, 4) @ k.mT).softmax(-1) @ v

    given = inputs()
    gm = torch.export.export(Model(), tuple(given)).module()
    with torch.set_grad_enabled(train):
        rewritten, report = torchflash.rewrite(gm)
    assert report.counts()["rewritten"] == 1
    compare(gradients(rewritten, given), gradients(gm, given))
