"""Memory and speed of one training step over the length: eager, Inductor, SDPA written by hand, torchflash.

    python examples/memory_comparison.py                               # 12 layers, 1024 to 8192 tokens on a GPU
    python examples/memory_comparison.py --lengths 8192 --limit-gb 80  # as if the GPU had 80 GB

`eager`, `inductor` and `torchflash` run the same model, whose attention is matmul, mask, softmax, matmul; for `sdpa`
the attention was rewritten by hand to F.scaled_dot_product_attention, and Inductor compiles the model. A step is
forward, loss and backward, without an optimizer. Running out of memory is a row of the table, as any other failure is.

Peak memory is what one step allocates, gradients included, above the parameters and the input: on CUDA by
torch.cuda.max_memory_allocated, on CPU from the allocations that torch.profiler records. Time is the median of repeated
steps after a first one that compiles.

--limit-gb, in 10^9 bytes, is for all that the step and the model need. On CUDA the allocator enforces it (torch.cuda.
set_per_process_memory_fraction). On CPU nothing does: there a step whose measured peak exceeds it counts as out of
memory. Apart from that, on Linux a CPU run takes no more than the machine has free at the start; the profiler's own
record is part of it, and needs gigabytes from about 8192 tokens.

Writes memory_comparison.csv, after each measurement, and memory_comparison.png into --out; Ctrl-C keeps what there is.
"""

import argparse
import csv
import gc
import math
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages

import torch
import torch.nn.functional as F
from quickstart import peak_bytes
from torch import nn
from torch.utils.benchmark import Timer

IMPLS = {
    "eager": lambda model: model,
    "inductor": torch.compile,
    "sdpa": torch.compile,
    # strict: should attention be left alone, the row says so, instead of showing numbers of something else
    "torchflash": lambda model: torch.compile(model, backend="torchflash", options={"torchflash.strict": True}),
}
OUT_OF_MEMORY = "out of memory"


class Attention(nn.Module):
    def __init__(self, hidden, heads, by_hand):
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x, drop):
        b, n, hidden = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)  # [B, H, N, D]
        if self.by_hand:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=drop is not None)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if drop is not None:
                scores = scores.masked_fill(drop, float("-inf"))
            o = scores.softmax(dim=-1) @ v
        return self.out(o.transpose(1, 2).reshape(b, n, hidden))


class Block(nn.Module):
    def __init__(self, hidden, heads, by_hand):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, by_hand)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x, drop):
        x = x + self.attention(self.norm1(x), drop)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers, hidden, heads, causal, by_hand=False):
        super().__init__()
        self.causal = causal
        self.blocks = nn.ModuleList(Block(hidden, heads, by_hand) for _ in range(layers))

    def forward(self, x):
        n = x.shape[1]
        drop = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        for block in self.blocks:
            x = block(x, drop)
        return x


@dataclass(frozen=True)
class Row:
    """What is known of one implementation at one length; numbers are None if it did not run."""

    length: int
    impl: str
    status: str = "ok"
    peak_mib: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None

    def __str__(self):
        numbers = [("-" if x is None else f"{x:.1f}") for x in (self.peak_mib, self.step_ms, self.tokens_per_s)]
        return f"{self.length:>7} {self.impl:<11}" + "".join(f"{x:>14}" for x in numbers) + f"   {self.status}"


HEADER = f"{'length':>7} {'':<11}{'peak, MiB':>14}{'step, ms':>14}{'tokens/s':>14}"


def measure(impl, length, o):
    """One row, measured with the options `o`. Raises whatever the step raises."""
    torch.manual_seed(0)
    device, dtype = torch.device(o.device), getattr(torch, o.dtype)
    model = Transformer(o.layers, o.hidden, o.heads, o.causal, by_hand=impl == "sdpa").to(device, dtype)
    run = IMPLS[impl](model)
    x = torch.randn(o.batch, length, o.hidden, device=device, dtype=dtype)

    def step():
        model.zero_grad(set_to_none=True)
        run(x).float().pow(2).mean().backward()

    step()  # compiles
    model.zero_grad(set_to_none=True)
    try:
        peak = peak_bytes(step, device)
    except Exception as error:
        if device.type == "cpu" and ran_out(error):
            raise RuntimeError("the step fits into memory, the profiler's record of it does not") from None
        raise
    held = sum(t.nbytes for t in (x, *model.parameters()))
    if o.limit_gb and device.type == "cpu" and held + peak > o.limit_gb * 1e9:
        return Row(length, impl, OUT_OF_MEMORY, peak / 2**20)
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    seconds = timer.blocked_autorange(min_run_time=o.seconds).median
    return Row(length, impl, "ok", peak / 2**20, seconds * 1e3, o.batch * length / seconds)


def measure_or_say_why(impl, length, o):
    """One row, whatever happens; nothing of the run stays in memory."""
    try:
        return measure(impl, length, o)
    except Exception as error:
        return Row(length, impl, OUT_OF_MEMORY if ran_out(error) else f"failed: {one_line(error)}")
    finally:
        torch._dynamo.reset()
        gc.collect()
        if o.device.startswith("cuda"):
            torch.cuda.empty_cache()


def ran_out(error):
    """Is it, or was it caused by, a lack of memory? torch has a class for it on CUDA and words on CPU."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in words:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def one_line(error):
    error = getattr(error, "inner_exception", error)  # Dynamo wraps what a backend raises
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def limit_memory(o):
    """Applies --limit-gb, or keeps a CPU run from taking more than there is; says which."""
    if o.device.startswith("cuda"):
        if torch.device(o.device).index is not None:
            torch.cuda.set_device(o.device)  # what follows, and peak_bytes, speak of the current one
        if o.limit_gb:
            total = torch.cuda.get_device_properties(o.device).total_memory
            if o.limit_gb * 1e9 > total:
                raise SystemExit(f"--limit-gb {o.limit_gb:g}: this device has {total / 1e9:.1f} GB; give less")
            torch.cuda.set_per_process_memory_fraction(o.limit_gb * 1e9 / total)
            return f"limited to {o.limit_gb:g} GB of {total / 1e9:.1f} GB by the allocator"
        return "no limit"
    if sys.platform == "linux":
        import resource

        def kib(path, key):
            return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(key))

        most = (kib("/proc/self/status", "VmData:") + kib("/proc/meminfo", "MemAvailable:")) * 1024
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    return f"{o.limit_gb:g} GB: peaks above it count as out of memory" if o.limit_gb else "no limit"


def claims(rows):
    """Lines that compare torchflash with eager at each length where both were tried."""
    by = {(row.length, row.impl): row for row in rows}
    for length in dict.fromkeys(row.length for row in rows):
        eager, ours = by.get((length, "eager")), by.get((length, "torchflash"))
        if eager is None or ours is None:
            continue
        if ours.status == "ok" and eager.status == "ok":
            change = 100 * (ours.peak_mib / eager.peak_mib - 1)
            memory = f"{abs(change):.1f} % {'less' if change < 0 else 'more'} memory than eager"
            yield f"{length:>7} tokens: {memory}, {ours.tokens_per_s / eager.tokens_per_s:.2f} times the tokens/s"
        else:
            yield f"{length:>7} tokens: eager {eager.status}, torchflash {ours.status}"


def write_csv(rows, o, path):
    settings = {name: getattr(o, name) for name in ("batch", "layers", "hidden", "heads", "causal", "dtype", "device")}
    settings |= {"limit_gb": o.limit_gb or "", "torch": torch.__version__}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)] + list(settings))
        writer.writeheader()
        writer.writerows(asdict(row) | settings for row in rows)


def write_plot(rows, title, path):
    """Peak memory and tokens/s over the length, both axes logarithmic; a cross where memory ran out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, speed) = plt.subplots(1, 2, figsize=(11, 4.5))
    lengths = list(dict.fromkeys(row.length for row in rows))
    scale = "log" if any(row.status == "ok" for row in rows) else "linear"  # a logarithmic axis needs something on it
    for i, impl in enumerate(dict.fromkeys(row.impl for row in rows)):
        ran = [row for row in rows if row.impl == impl and row.status == "ok"]
        failed = [row.length for row in rows if row.impl == impl and row.status == OUT_OF_MEMORY]
        for axes, key in ((memory, "peak_mib"), (speed, "tokens_per_s")):
            axes.plot([r.length for r in ran], [getattr(r, key) for r in ran], "o-", color=f"C{i}", label=impl)
        # near the upper edge of the axes, whatever the scale
        upper = [0.97 - 0.03 * i] * len(failed)
        memory.plot(failed, upper, "x", color=f"C{i}", transform=memory.get_xaxis_transform())
    for axes, name in ((memory, "peak memory of a step, MiB (×: out of memory)"), (speed, "tokens/s")):
        axes.set(xscale="log", yscale=scale, xlabel="sequence length", title=name)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def options(arguments=None):
    def several(kind, allowed=None):
        def parse(text):
            values = [kind(x) for x in text.split(",")]
            if unknown := [x for x in values if allowed and x not in allowed]:
                raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(allowed)}")
            return values

        return parse

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--lengths", type=several(int), help="default 1024,2048,4096,8192; on CPU 512,1024,2048")
    p.add_argument("--impls", type=several(str, IMPLS), default=list(IMPLS), help=f"default {','.join(IMPLS)}")
    p.add_argument("--batch", type=int, help="default 4; on CPU 1")
    p.add_argument("--layers", type=int, help="default 12; on CPU 2")
    p.add_argument("--hidden", type=int, default=768)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--causal", action="store_true", help="with a mask that the model makes; default: full attention")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default bfloat16; on CPU float32")
    p.add_argument("--limit-gb", type=float, help="see above")
    p.add_argument("--seconds", type=float, default=1.0, help="how long to repeat each step for its time")
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for CSV and plot; default results")
    o = p.parse_args(arguments)
    cpu = o.device == "cpu"
    o.lengths = o.lengths or ([512, 1024, 2048] if cpu else [1024, 2048, 4096, 8192])
    o.batch = o.batch or (1 if cpu else 4)
    o.layers = o.layers or (2 if cpu else 12)
    o.dtype = o.dtype or ("float32" if cpu else "bfloat16")
    if o.hidden % o.heads:
        p.error(f"--hidden {o.hidden} is not a multiple of --heads {o.heads}")
    if o.limit_gb is not None and o.limit_gb <= 0:
        p.error(f"--limit-gb {o.limit_gb:g} must be positive")
    return o


def main(arguments=None):
    """Prints and writes the comparison; returns the exit status."""
    o = options(arguments)
    o.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name(o.device) if o.device.startswith("cuda") else o.device
    kind = "causal" if o.causal else "full"
    title = f"{o.layers} layers, hidden {o.hidden}, {o.heads} heads, batch {o.batch}, {kind}, {o.dtype}, {device}"
    print(f"{title}; memory: {limit_memory(o)}", flush=True)

    csv_path, png_path = o.out / "memory_comparison.csv", o.out / "memory_comparison.png"
    todo = [(length, impl) for length in o.lengths for impl in o.impls]
    rows, interrupted = [], False
    try:
        for i, (length, impl) in enumerate(todo, 1):
            print(f"[{i}/{len(todo)}] {length} tokens, {impl} ...", file=sys.stderr, flush=True)
            rows.append(measure_or_say_why(impl, length, o))
            write_csv(rows, o, csv_path)
    except KeyboardInterrupt:
        interrupted = True
    print("\n".join([HEADER, *map(str, rows)]))
    if lines := list(claims(rows)):
        print("\n".join(["", *lines]))
    if rows:
        try:
            write_plot(rows, title, png_path)
            print(f"\nwrote {csv_path} and {png_path}")
        except ImportError:
            print(f"\nwrote {csv_path}; for a plot, install matplotlib")
    if interrupted:
        print(f"interrupted: {len(rows)} of {len(todo)} measured")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
