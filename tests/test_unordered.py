"""Keys and values of a paged cache are read where they lie wherever that is the same, and copied elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forms import FORMS, check, make
from forms.registry import Gen
from forms.unordered import _cache
from test_memory import Large
from torch import Tensor

import torchflash
from torchflash import Options, Report, Rewritten
from torchflash.backend import torchflash as backend

PAGED = [name for name in FORMS if name.startswith("paged_")]
COPIED = [name for name in FORMS if name.startswith("unordered_") and name != "unordered_with_gradients"]


def rows(name: str, **options: Any) -> list[str]:
    return [r.rows for r in check(FORMS[name], train=False, **options) if isinstance(r, Rewritten)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PAGED)
def test_read_in_place(name: str, dynamic: bool) -> None:
    assert all(rows(name, dynamic=dynamic))


@pytest.mark.parametrize("name", COPIED)
def test_copied(name: str) -> None:
    assert rows(name) == [""]


@pytest.mark.parametrize("name", ["paged_indexed", "paged_heads_outside", "paged_written_before"])
def test_by_inductor_in_half_precision(name: str) -> None:
    assert all(rows(name, inner="inductor", dtype=torch.bfloat16))


def test_copied_where_a_gradient_is_needed() -> None:
    records = check(FORMS["unordered_with_gradients"], train=True)
    assert [r.rows for r in records if isinstance(r, Rewritten)] == [""]


def test_where_the_rows_are_said_to_lie() -> None:
    assert rows("paged_indexed") == ["k[t1[b, n // 5], n % 5]"]
    assert rows("paged_slots") == ["k[t1[b, n]]"]
    assert rows("paged_beams") == ["k[t0[b], n]"]
    assert rows("paged_indexed", dynamic=True) == ["k[t1[b, n // 5], n % 5]"]


def sdpa(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
    kept = torch.arange(k.shape[2]) < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, kept[:, None, None], enable_gqa=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_scaled_dot_product_attention(dynamic: bool) -> None:
    g = Gen(S=75)
    args = (g.r(g.B, g.H, 3, g.D, grad=False), *_cache(g, 2), torch.tensor([70, 0]))
    torch._dynamo.reset()
    options = {"torchflash.inner": "aot_eager", "torchflash.sdpa": "all"}
    got = torch.compile(sdpa, backend="torchflash", options=options, dynamic=dynamic)(*args)
    (record,) = backend.report
    assert isinstance(record, Rewritten) and record.rows
    torch.testing.assert_close(got, sdpa(*args))


def made(function: Callable[..., Any], args: Any, limit: int) -> list[str]:
    """What is made with `limit` elements or more when the rewritten graph is run as it is."""
    watch = Large(limit)

    def rewritten(gm: Any, example: Any) -> Any:
        gm, report = torchflash.rewrite(gm, Options(sdpa="all"))
        assert [isinstance(r, Rewritten) and bool(r.rows) for r in report] == [True]

        def run(*inputs: Any) -> Any:
            watch.allow(inputs)
            with watch:
                return gm(*inputs)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=rewritten)(*args)
    return watch.made


@pytest.mark.parametrize("name", [*(name for name in PAGED if name != "paged_copy_written_before"), "sdpa"])
def test_no_keys_are_copied(name: str) -> None:
    """Beyond those of a tile: 4096 keys of which a tile has 512, for 16 queries."""
    g = Gen(S=4096)
    if name == "sdpa":
        function, args = sdpa, (g.r(g.B, g.H, 16, g.D, grad=False), *_cache(g, 2), torch.tensor([4000, 0]))
    else:
        function, (q, *args) = make(FORMS[name], S=4096)
        length = q.shape.index(4096) if 4096 in q.shape else 2
        args = (q.narrow(length, 0, min(16, q.shape[length])), *args)
    heads = 1 if name == "paged_slots_of_table" else 2
    assert made(function, args, g.B * 4096 * heads * g.D) == []


def test_the_report_says_so() -> None:
    check(FORMS["paged_indexed"], train=False)
    (record,) = backend.report
    assert isinstance(record, Rewritten)
    assert "GQA 2:1, paged keys" in str(record) and "rows   k[t1[b, n // 5], n % 5]" in str(record)
    assert record.k == (2, 2, 15, 8) and record.v == (2, 2, 15, 8)
    assert Report.from_json(backend.report.to_json()) == backend.report


def test_verify() -> None:
    fn, inputs = make(FORMS["paged_written_before"])
    with torch.no_grad():
        found = torchflash.verify(fn)(*inputs)
    assert found.ok, str(found)
