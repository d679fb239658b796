"""`verify`: runs what each block was beside the operator that replaced it, and says how far the two are apart.

Three answers for every rewritten block, on the very tensors that reach it in the model: the operator's, eager's in the
model's dtype, and eager's in float64, which is taken for exact. The operator is as accurate as eager where its error is
at most twice eager's own. The model goes on with the operator's results, so that errors add up as they do in use.

`passes.keep` puts `Enter` and `Leave` around the operator; they are modules of the graph and share a `Block`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchflash.explaining import check_callable, graphs_so_far, reporting, reports_of
from torchflash.options import Options, parse
from torchflash.report import Rewritten
from torchflash.verification import Collector, Comparison, Verification, compare, maximum

log = logging.getLogger("torchflash")

# units in the last place that may always be lost, of float32 and of half types: what reaches the scores has passed an
# exponential and a difference, what reaches a captured tensor is a long sum whose terms cancel
OUTPUT, OPERAND, CAPTURE = (8, 2), (32, 2), (32, 8)
_collector: ContextVar[Collector | None] = ContextVar("torchflash_verified", default=None)


# ----------------------------------------------------------------------------------------------------- in the graph


@dataclass(frozen=True)
class Input:
    """A value that enters a block: its name in the graph; its role, such as "q" or "t0", or ""; whether the operator
    reads it (or only the block did); whether the block writes to it in place, and whether the graph does after the
    block, so that a copy is needed."""

    name: str
    role: str
    operand: bool
    written: bool
    written_after: bool

    @property
    def plain_name(self) -> str:
        """As the user knows it: "layers.0.bias.weight" for a parameter, "mask" for an argument."""
        path = re.sub(r"_(modules|parameters|buffers)_", ".", self.name.removeprefix("l_").removesuffix("_"))
        return path.removeprefix("self.").replace("..", ".")


@dataclass(frozen=True)
class DropoutAxes:
    """How the mask of the operator lies in the tensor that eager drops from: the axes that fold into b, h, m and n,
    those that fold into each dim of the tensor, and the sizes that are known."""

    dropout_p: float
    groups: tuple[tuple[str, ...], ...]
    dims: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]

    def mask(self, seed: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
        """True where a weight is kept, in the shape of `like`; `shape` is the operator's [B, H, M, N]. ValueError
        where sizes are not known."""
        from torchflash.kernels import philox

        sizes = dict(self.sizes)
        sizes |= {g[0]: n for g, n in zip(self.groups, shape, strict=True) if len(g) == 1}
        sizes |= {d[0]: n for d, n in zip(self.dims, like.shape, strict=True) if len(d) == 1}
        order = [a for g in self.groups for a in g]
        if missing := [a for a in order if a not in sizes]:
            raise ValueError(f"the size of {missing[0]}, an axis of its dropout, is not known")
        B, H, M, N = shape
        row, n = torch.arange(B * H * M, device=seed.device)[:, None], torch.arange(N, device=seed.device)
        kept = philox.draw(seed, row, n) >= philox.threshold(self.dropout_p)
        folded = [a for d in self.dims for a in d]
        rest = [a for a in order if a not in folded]
        if any(sizes[a] != 1 for a in rest):
            raise ValueError("one number of its dropout serves several weights")
        kept = kept.view([sizes[a] for a in order]).permute([order.index(a) for a in (*rest, *folded)])
        return kept.reshape(like.shape)


class Block:
    """A rewritten block: its record, its inputs, and what it was before as a graph."""

    def __init__(
        self,
        record: Rewritten,
        inputs: tuple[Input, ...],
        eager: GraphModule | None,
        dropout: DropoutAxes | None,
        problem: str,
    ) -> None:
        self.record, self.inputs, self.eager, self.dropout, self.problem = record, inputs, eager, dropout, problem
        self.key = id(self)
        self.dtype: torch.dtype = getattr(torch, record.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        return self  # a copy of the graph is the same block


class Call:
    """One run through a block: what entered, the seed of its dropout, the autocast around it, and later the gradient of
    its output."""

    def __init__(self, block: Block, inputs: tuple[Any, ...], seed: Tensor | None) -> None:
        self.block, self.inputs, self.seed = block, inputs, seed
        self.collector = _collector.get() or _of_the_backend()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
        ]
        self.shape: tuple[int, ...] = ()  # [B, H, M, N] of the operator
        self.do: Tensor | None = None

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield

    def eager(self, inputs: Sequence[Any]) -> Tensor:
        with self.surroundings():
            return _Replay(self, exact=False).run_on(inputs)

    def exact(self, inputs: Sequence[Any]) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return _Replay(self, exact=True).run_on(inputs)

    def doubled(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs in float64, but for constants, which are what they are."""
        return [
            x.double() if _floating(x) and (d.operand or _differentiable(x)) else x
            for x, d in zip(inputs, self.block.inputs, strict=True)
        ]

    def compare_forward(self, out: Tensor) -> None:
        def run() -> list[Comparison]:
            with torch.no_grad():
                eager, exact = self.eager(self.inputs), self.exact(self.doubled(self.inputs))
                return [compare("out", "", out, eager, exact, 0.0, OUTPUT, self.block.dtype)]

        self._compare("forward", run)

    def compare_backward(self, inputs: Sequence[Any], gradients: Sequence[Tensor | None], at: Sequence[int]) -> None:
        """`gradients`: what came back through the operator for each of `inputs`; `at`: which are differentiable."""
        do = self.do
        if do is None:
            return

        def run() -> list[Comparison]:
            rough = [x.detach().requires_grad_() if i in at else x for i, x in enumerate(inputs)]
            fine = [x.detach().requires_grad_() if i in at else x for i, x in enumerate(self.doubled(inputs))]
            found = []
            for f, xs in ((self.eager, rough), (self.exact, fine)):
                with torch.enable_grad():
                    y = f(xs)
                leaves = [xs[i] for i in at]
                grads = torch.autograd.grad(y, leaves, do.to(y.dtype), allow_unused=True, materialize_grads=True)
                found.append(dict(zip(at, grads, strict=True)))
            scale = maximum(do.detach().double().abs(), do.isfinite())
            results = []
            for i in at:
                d, ours = self.block.inputs[i], gradients[i]
                ours = torch.zeros_like(found[0][i]) if ours is None else ours
                name = "+".join(f"d{role}" for role in d.role.split("+")) if d.role else f"d({d.plain_name})"
                ulps = OPERAND if set(d.role.split("+")) & {"q", "k", "v"} else CAPTURE
                results.append(
                    compare(name, d.plain_name, ours, found[0][i], found[1][i], scale, ulps, self.block.dtype)
                )
            return sorted(results, key=lambda c: ("qkv".find(c.name[1:2]) % 4, c.name))

        self._compare("backward", run)

    def _compare(self, passing: str, run: Callable[[], list[Comparison]]) -> None:
        if self.block.problem:
            return self.collector.add(self.block, passing, problem=self.block.problem)
        try:
            with torch.random.fork_rng(devices=[]):
                found = run()
        except Exception as error:  # the model goes on: what cannot be compared is said
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return self.collector.add(self.block, passing, problem=f"{passing}: {text}")
        self.collector.add(self.block, passing, found)


class Enter(nn.Module):
    """(call, inputs …): the inputs as they are; the gradients that come back to them are compared."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    @torch._disable_dynamo
    def forward(self, seed: Tensor | None, *inputs: Any) -> tuple[Any, ...]:
        call = Call(self.block, inputs, seed)
        if not torch.is_grad_enabled() or not any(map(_differentiable, inputs)):
            return (call, *inputs)
        seen = iter(_Gradients.apply(call, seed, *inputs))
        return (call, *(next(seen) if _differentiable(x) else x for x in inputs))


class Leave(nn.Module):
    """The operator's result as it is, compared; q, k and keys are those of the operator."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    @torch._disable_dynamo
    def forward(self, call: Call, out: Tensor, q: Tensor, k: Tensor, keys: int | None) -> Tensor:
        call.shape = (*q.shape[:3], k.shape[2] if keys is None else keys)
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint recomputes it
            call.compare_forward(out)
        call.inputs = ()
        if out.requires_grad:

            def keep_do(do: Tensor) -> None:
                call.do = do

            out.register_hook(keep_do)
        return out


class _Gradients(torch.autograd.Function):
    """The identity on the differentiable ones of its tensors. What it saves passes through the hooks of a checkpoint,
    so that the comparison sees what the operator's own backward sees, the seed included."""

    @staticmethod
    def forward(ctx: Any, call: Call, seed: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        tensors = [
            None if not isinstance(x, Tensor) else x.clone() if d.written_after else x
            for x, d in zip(inputs, call.block.inputs, strict=True)
        ]
        ctx.save_for_backward(seed, *tensors)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.at = [i for i, x in enumerate(inputs) if _differentiable(x)]
        return tuple(inputs[i].view_as(inputs[i]) for i in ctx.at)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_input: list[Tensor | None] = [None] * len(ctx.others)
        for i, g in zip(ctx.at, gradients, strict=True):
            by_input[i] = g
        call: Call = ctx.call
        try:
            call.seed, *saved = ctx.saved_tensors
        except RuntimeError as error:  # the operator may do without what was written since
            call.collector.add(call.block, "backward", problem=f"backward: {error}".splitlines()[0])
        else:
            inputs = [o if t is None else t for t, o in zip(saved, ctx.others, strict=True)]
            call.compare_backward(inputs, by_input, ctx.at)
        call.do = None
        return None, None, *by_input


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _differentiable(x: Any) -> bool:
    return _floating(x) and x.requires_grad


def _of_the_backend() -> Collector:
    from torchflash.backend import torchflash

    return torchflash.verified


# ------------------------------------------------------------------------------------------------------------- replay


class _Replay(Interpreter):
    """Runs the graph of a block. With `exact`, whatever is computed from float64 tensors is computed in float64, casts
    or not; constants (masks and buckets made from indices) are computed in the dtypes that they have."""

    def __init__(self, call: Call, exact: bool) -> None:
        assert call.block.eager is not None
        super().__init__(call.block.eager, garbage_collect_values=True)
        self.call, self.exact = call, exact
        self.entered: list[Any] = []

    def run_on(self, inputs: Sequence[Any]) -> Tensor:
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        values = [x.clone() if d.written else x for x, d in zip(inputs, self.call.block.inputs, strict=True)]
        try:
            return self.run(*values)
        finally:
            for context in reversed(self.entered):  # regions that the block lies in
                context.__exit__(None, None, None)
            if torch.is_inference_mode_enabled() == inference:
                torch._C._set_grad_enabled(grad)

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if "dropout" in n.meta:
            return self._drop(args[0] if args else kwargs["input"], in_place=n.meta["dropout"])
        name = getattr(n.target, "__name__", "")
        if self.exact and name.endswith("_autocast"):
            return None
        if name == "_exit_autocast":
            self.entered.remove(args[0])
        if self.exact and any(_floating(x) and x.dtype == torch.float64 for x in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map(_double, (args, kwargs))
            with _Float64():
                return getattr(self, n.op)(n.target, args, kwargs)
        result = getattr(self, n.op)(n.target, args, kwargs)
        if name == "_enter_autocast":
            self.entered.append(result)
        return result

    def _drop(self, x: Tensor, in_place: bool) -> Tensor:
        dropout, seed = self.call.block.dropout, self.call.seed
        assert dropout is not None and seed is not None
        kept = dropout.mask(seed, self.call.shape, like=x).to(x.dtype)
        scale = kept / (1 - dropout.dropout_p) if dropout.dropout_p < 1 else kept
        return x.mul_(scale) if in_place else x * scale


class _Float64(TorchDispatchMode):
    """Every floating-point tensor and dtype that an operation is given becomes float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_double, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double(x: Any) -> Any:
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.float64
    return x.double() if _floating(x) and x.dtype != torch.float64 else x


# ------------------------------------------------------------------------------------------------------------- verify


def verify(
    model: Callable[..., Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Verification]:
    """`verify(model)(*args, **kwargs)` compares every block that backend="torchflash" rewrites with what it was.

    The model runs once, forward and, under the caller's grad mode, backward, with the operator in the place of each
    block and the rest in eager mode. Beside the operator the block itself runs twice, in the dtypes it has and in
    float64, which takes the memory and time of unfused attention: start small. Dropout of eager uses the operator's
    own mask. Buffers and random states are put back, no gradient is written.

    loss: gives the scalar to differentiate from the model's output; by default `output.loss` where there is one, else
    the sum of all outputs times fixed random numbers. Only what needs a gradient is differentiated: parameters, and
    inputs with requires_grad. `options` and `dynamic` are those of torch.compile. Never raises for a bad block;
    TypeError if `model` or `loss` cannot be called.
    """
    given, _ = parse(options=options)
    check_callable("verify", model)
    if loss is not None and not callable(loss):
        raise TypeError(f"verify(): loss must be a function of the model's output; got {type(loss).__name__} {loss!r}")
    backend = _Verifier(dataclasses.replace(given, verify=True))

    def run(*args: Any, **kwargs: Any) -> Verification:
        collector = Collector()
        token = _collector.set(collector)
        try:
            total = reports_of(model, backend, dynamic, lambda model: _differentiate(model(*args, **kwargs), loss))
        finally:
            _collector.reset(token)
        return collector.result(total)

    return run


@dataclass(frozen=True)
class _Verifier:
    """The backend of `verify`; equal ones share what Dynamo has cached."""

    options: Options
    __name__ = "torchflash_verify"

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torchflash.backend import check_strict, rewrite_and_report

        report = rewrite_and_report(gm, self.options, graph=graphs_so_far())
        check_strict(report, self.options)
        return reporting(gm, report)


def _differentiate(output: Any, loss: Callable[[Any], Tensor] | None) -> None:
    if not torch.is_grad_enabled():
        return
    if loss is not None:
        roots = [loss(output)]
    elif isinstance(found := getattr(output, "loss", None), Tensor) and found.requires_grad:
        roots = [found]
    else:
        roots = [x for x in pytree.tree_leaves(output) if _differentiable(x)]
    roots = [x for x in roots if x.requires_grad]
    leaves = _leaves(roots)
    if leaves:
        generator = torch.Generator().manual_seed(0)
        seeds = [
            torch.ones_like(x) if not x.dim() else torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
            for x in roots
        ]
        torch.autograd.grad(roots, leaves, seeds, allow_unused=True)  # leaves .grad and its hooks alone


def _leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `roots` can be differentiated with respect to."""
    stack: list[Any] = [x.grad_fn for x in roots]
    seen, found = set(), [x for x in roots if x.grad_fn is None]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack += [f for f, _ in node.next_functions]
    return found
