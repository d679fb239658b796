"""The op over keys and values that lie in pages: what it gives over the same ones in their order, whatever the cache
looks like; its gradients, its errors, and that it copies none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from attention_cases import F32
from oracle import INF, check, eager, run_op, within_budget
from paged import PAGE, WAYS, B, gathered, paged
from test_op_contract import LargestTemporary
from torch.utils.flop_counter import FlopCounterMode

OP = torch.ops.torchflash.attention
FUSED, UNFUSED = "min_seqlen=0", "min_seqlen=1000000"


@pytest.mark.parametrize("tuning", [FUSED, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("lengths", [None, (70, 23), (0, 75)], ids=["all", "lengths", "empty"])
@pytest.mark.parametrize("way", WAYS)
def test_values(way, lengths, tuning):
    x = replace(paged(WAYS[way], 5, 75, 16, (4, 2), F32, lengths), tuning=tuning)
    within_budget("out", run_op(x), eager(x, torch.float64), eager(x))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "mqa"])
@pytest.mark.parametrize("way", ["pages", "heads_outside"])
def test_heads(way, heads):
    x = paged(WAYS[way], 3, 40, 8, heads, F32)
    torch.testing.assert_close(run_op(x), run_op(gathered(x)))


@pytest.mark.parametrize("way", ["pages", "heads_outside", "negative", "repeated", "slots"])
def test_gradients_reach_the_cache(way):
    """Of keys and values that are read more than once, too."""
    x = paged(WAYS[way], 5, 40, 16, (4, 2), F32, (40, 11))
    check(replace(x, k=x.k.clone(), v=x.v.clone()))


def test_only_queries_with_a_gradient():
    x = paged(WAYS["pages"], 5, 40, 16, (4, 2), F32)
    x.q.requires_grad_()
    (dq,) = torch.autograd.grad(run_op(x).sum(), x.q)
    torch.testing.assert_close(dq, torch.autograd.grad(run_op(gathered(x)).sum(), x.q)[0])


def arguments(x, rows=None, keys=None):
    texts = (x.score, x.keep, x.fill, x.post)
    return (
        x.q, x.k, x.v, x.captures, x.sizes, *texts, 0.0, None, "bhmd", x.rows if rows is None else rows,
        x.keys if keys is None else keys, FUSED, [],
    )  # fmt: skip


@pytest.mark.parametrize("way", ["pages", "slots"])
def test_opcheck(way):
    x = paged(WAYS[way], 5, 40, 16, (4, 2), F32, (40, 11))
    torch.library.opcheck(OP.default, arguments(x))
    x.q.requires_grad_()
    torch.library.opcheck(OP.default, arguments(x))


@pytest.mark.parametrize("page", [10**6, -(10**6)], ids=str)
@pytest.mark.parametrize("tuning", [FUSED, UNFUSED], ids=["fused", "unfused"])
def test_what_torch_refuses_is_refused(page, tuning):
    x = replace(paged(WAYS["pages"], 5, 40, 16, (4, 2), F32), tuning=tuning)
    x.captures[0][1, 1] = page
    with pytest.raises(IndexError, match="out of bounds"):
        run_op(x)


def test_errors_say_what_and_why_in_one_line():
    x = paged(WAYS["pages"], 5, 40, 16, (4, 2), F32)
    slots = paged(WAYS["slots"], 5, 40, 16, (4, 2), F32)
    empty = replace(x, k=x.k[:, :, :0], v=x.v[:, :, :0])
    together = r"k and v must be \[batch, heads, length, dim\]; got q"
    for kind, match, args in (
        (ValueError, "at one or two indices", arguments(x, "k[n, n, n]")),
        (ValueError, "at one or two indices", arguments(x, "t0[b, n]")),
        (ValueError, "follow from b, n, sizes and captured integers", arguments(x, "k[t0[b, n // 16], m]")),
        (ValueError, "follow from b, n, sizes and captured integers", arguments(x, "k[t0[b, 0], 0]")),
        (ValueError, "loads t1 but there are 1 captures", arguments(x, "k[t1[b, n // 16], n % 16]")),
        (ValueError, together, arguments(x, "k[t0[b, n]]")),
        (ValueError, r"two indices of rows \[batch, heads, pages, page, dim\]", arguments(slots, "k[t0[b, n], 0]")),
        (ValueError, "rows and keys go together", (*arguments(x)[:-3], None, FUSED, [])),
        (ValueError, "rows and keys go together", (*arguments(gathered(x))[:-4], "", 40, FUSED, [])),
        (IndexError, "40 keys in a cache without rows", arguments(empty)),
    ):
        with pytest.raises(kind, match=match) as found:
            OP(*args)
        assert "\n" not in str(found.value)


def test_no_keys():
    x = paged(WAYS["pages"], 5, 40, 16, (4, 2), F32)
    out, lse = OP(*arguments(x, keys=0))
    assert not out.count_nonzero() and torch.equal(lse, torch.full_like(lse, -INF))


def test_no_keys_are_copied():
    """Beyond those of a tile: 4096 keys of which a tile has 512."""
    x = paged(WAYS["pages"], 1, 4096, 16, (4, 2), F32, (4096, 4000))
    with torch.no_grad(), LargestTemporary() as watch:
        run_op(x)
    assert watch.largest <= B * 512 * 2 * 16 < x.keys * 2 * 16


def test_flops_are_those_of_the_keys_there_are():
    x = paged(WAYS["pages"], 5, 40, 16, (4, 2), F32)
    with FlopCounterMode(display=False) as mode:
        run_op(x)
    assert mode.get_total_flops() == 2 * B * 4 * 5 * 40 * (16 + 16)


def test_one_compiled_graph_serves_all_lengths_and_caches():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q, k, v, table, keys):
        return OP(
            q, k, v, [table], [k.shape[3]], "0.25 * s", "", 0.0, "p", 0.0, None, "bhmd",
            "k[t0[b, n // z0], n % z0]", keys, FUSED, [],
        )[0]  # fmt: skip

    compiled = torch.compile(step, backend=counter, dynamic=True)
    for pages in (3, 5, 9):
        x = paged(WAYS["pages"], 5, pages * PAGE, 16, (4, 2), F32)
        args = (x.q, x.k, x.v, x.captures[0], x.keys)
        torch.testing.assert_close(compiled(*args), step(*args))
    assert counter.frame_count == 1
