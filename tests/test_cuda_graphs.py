"""Dropout as a graph draws it: the seed is a random number of the graph, new at every run and replay, the same for
forward and backward, reproducible by torch.manual_seed. And mode="reduce-overhead" gives eager's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import torchflash

P, LENGTH = 0.4, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = {"cpu": None, "cuda": "reduce-overhead"}
WAYS = {"fused": 0, "unfused": 1 << 20}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dropout(torch.softmax(q @ k.mT * 0.3, -1), P) @ v


def compiled(function: Callable[..., Any], device: str, way: str, **options: Any) -> Callable[..., Any]:
    """As the user compiles it; with one step of a model and fresh results at every call under CUDA graphs."""
    given = {"torchflash.min_seqlen": WAYS[way], **options}
    if MODES[device] is not None:  # torch.compile takes a mode or options
        given |= torch._inductor.list_mode_options(MODES[device])
    step = torch.compile(function, backend="torchflash", options=given)

    def run(*args: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step(*args)

    return run


def operands(device: str, heads: int = 2, dim: int = 64, **kwargs: Any) -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(0)  # leaves the state that dropout draws from alone
    return [torch.randn(2, heads, LENGTH, dim, device=device, generator=draw, **kwargs) for _ in range(3)]


def identity(device: str) -> Tensor:
    return torch.eye(LENGTH, device=device).expand(2, 2, LENGTH, LENGTH).contiguous()


def weights(step: Callable[..., Tensor], device: str) -> Tensor:
    """What multiplies the values, read off through v = 1."""
    q, k, _ = operands(device)
    return step(q, k, identity(device)).detach().clone()


def keep(weights: Tensor) -> Tensor:
    return weights != 0


def test_the_graph_draws_its_seeds():
    """One draw for each block, and no seed that compilation has fixed."""

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dropped(dropped(q, k, v), k, v)

    kept: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(torchflash.rewrite(gm)[0])
        return gm

    torch.compile(two, backend=backend)(*operands("cpu"))
    (graph,) = (gm.graph for gm in kept)
    blocks = graph.find_nodes(op="call_function", target=torch.ops.torchflash.attention.default)
    seeds = [node.args[10] for node in blocks]
    assert len(set(seeds)) == len(blocks) == 2
    assert all(isinstance(seed, torch.fx.Node) and seed.target is torch.randint for seed in seeds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", DEVICES)
class TestDropout:
    def test_every_call_has_a_mask_of_its_own(self, device, way):
        step = compiled(dropped, device, way)
        masks = [keep(weights(step, device)) for _ in range(5)]
        for i, mask in enumerate(masks):
            sigma = math.sqrt(P * (1 - P) / mask.numel())
            assert abs((~mask).double().mean().item() - P) < 4 * sigma
            for other in masks[:i]:  # independent: they agree in P² + (1 - P)² of the places
                agree = P * P + (1 - P) ** 2
                share = (mask == other).double().mean().item()
                assert abs(share - agree) < 4 * math.sqrt(agree * (1 - agree) / mask.numel())

    def test_every_block_has_a_mask_of_its_own(self, device, way):
        def two(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return dropped(q, k, v), dropped(q, k, v)

        q, k, _ = operands(device)
        first, second = compiled(two, device, way)(q, k, identity(device))
        assert not torch.equal(keep(first), keep(second))

    def test_reproducible_by_seed(self, device, way):
        step = compiled(dropped, device, way)
        runs = []
        for _ in range(2):
            q, k, v = *operands(device)[:2], identity(device)
            torch.manual_seed(7)
            runs.append([step(q, k, v).clone() for _ in range(4)])
        for a, b in zip(*runs, strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(runs[0][2], runs[0][3])

    def test_the_backward_drops_what_the_forward_dropped(self, device, way):
        """dv = Wᵀ do, with the weights W that the forward's output shows, at every step."""
        step = compiled(dropped, device, way)
        q, k, v = [*operands(device)[:2], identity(device)]
        do = torch.randn_like(v)
        before = None
        for _ in range(4):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = step(*inputs)
            shown = out.detach().clone()
            out.backward(do)
            torch.testing.assert_close(inputs[2].grad, shown.mT @ do, atol=1e-5, rtol=1e-4)
            # and dq, dk of the same mask, by autograd in float64
            mask = keep(shown).double() / (1 - P)
            exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
            ((torch.softmax(exact[0] @ exact[1].mT * 0.3, -1) * mask) @ exact[2]).backward(do.double())
            for x, y in zip(inputs[:2], exact[:2], strict=True):
                torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-4, rtol=1e-3)
            assert before is None or not torch.equal(before, keep(shown))
            before = keep(shown)


# ------------------------------------------------------------------------------------------------- mode=reduce-overhead


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).tril()
    return torch.softmax((q @ k.mT / 8).masked_fill(~mask, -math.inf), -1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].repeat_interleave(2, 1) for x in (k, v))
    return torch.softmax(30 * torch.tanh(q @ k.mT / 240), -1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
    scores = q @ k.mT / 8 + bias
    return torch.softmax(torch.where(kept[:, None, None], scores, -1e9), -1) @ v


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i = torch.arange(LENGTH, device=q.device)
    return torch.softmax(q @ k.mT / 8 + table[(i[None] - i[:, None]).clamp(-8, 8) + 8].permute(2, 0, 1), -1) @ v


FORMS = {"causal": causal, "grouped": grouped, "padded": padded, "relative": relative}


def extra(form: str) -> list[Tensor]:
    if form == "padded":
        kept = torch.arange(LENGTH, device="cuda")[None] < torch.tensor([[LENGTH], [40]], device="cuda")
        return [torch.randn(2, LENGTH, LENGTH, device="cuda"), kept]
    return [torch.randn(17, 2, device="cuda")] if form == "relative" else []


def graphs_launched(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.key == "cudaGraphLaunch")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_reduce_overhead_in_inference(form, way):
    step = compiled(FORMS[form], "cuda", way, **{"torchflash.strict": True})
    with torch.no_grad():
        for seed in range(5):  # a warm-up, a recording, then replays: each with other values
            args = [x + 0.1 * seed for x in operands("cuda")] + extra(form)
            torch.testing.assert_close(step(*args), FORMS[form](*args), atol=2e-5, rtol=1e-4)
        assert graphs_launched(lambda: step(*args)) == 1
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_reduce_overhead_in_training(form, way):
    step = compiled(FORMS[form], "cuda", way, **{"torchflash.strict": True})

    def gradients(function: Callable[..., Tensor], args: list[Tensor], do: Tensor) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
        wanted = [x for x in leaves if x.requires_grad]
        return [g.clone() for g in torch.autograd.grad(function(*leaves), wanted, do)]

    for seed in range(5):
        args = [x + 0.1 * seed for x in operands("cuda")] + extra(form)
        do = torch.randn_like(args[0])
        for a, b in zip(gradients(step, args, do), gradients(FORMS[form], args, do), strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    assert graphs_launched(lambda: gradients(step, args, do)) == 2
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
def test_half_precision_replays():
    """Products of half-precision operands take other ways to the same."""
    args = operands("cuda", dtype=torch.bfloat16)
    expected = causal(*(x.double() for x in args))
    own = (causal(*args).double() - expected).abs().max()
    for way in WAYS:
        step = compiled(causal, "cuda", way)
        for _ in range(3):
            assert (step(*args).double() - expected).abs().max() <= 2 * own
