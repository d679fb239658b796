"""A small GPT learns the text of Python's standard library, eager and by torchflash: two loss curves in one plot.

    python examples/train.py                                                                     # minutes on a CPU
    python examples/train.py --layers 12 --width 768 --heads 12 --length 2048 --steps 500 --amp  # on a GPU

Both runs start from the same parameters and see the same batches, so that without dropout the losses differ by rounding
alone, which the optimizer amplifies as training goes on. With --dropout they differ by chance as well: torchflash draws
other random numbers, from the same distribution.

The text is what every Python ships with: the sources of its standard library, as bytes, so that 256 tokens are enough.
Writes train.csv and train.png into --out.
"""

import argparse
import copy
import csv
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from torchflash.backend import torchflash

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, width, heads, length, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("causal", torch.ones(length, length).tril()[None, None], persistent=False)

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))  # [B, H, N, D]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.causal[:, :, :n, :n] == 0, float("-inf"))
        weights = self.dropout(F.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, width))


class Block(nn.Module):
    def __init__(self, width, heads, length, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, length, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, length, dropout):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def library_text(size):
    """The first `size` bytes of the standard library's top-level modules, by name, as a tensor of int64."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.tensor(list(text[:size]))


def batches(text, o):
    """Yields [B, N + 1] tokens at random places, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(o.steps):
        starts = torch.randint(len(text) - o.length, (o.batch, 1), generator=generator)
        yield text[starts + torch.arange(o.length + 1)]


def train(model, text, o, name):
    """Trains in place; gives the loss of each step and the seconds that a step takes once compiled."""
    run = model
    if name == "torchflash":
        run = torch.compile(model, backend="torchflash", options={"torchflash.inner": o.inner})
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)
    losses, started = [], time.perf_counter()
    for i, tokens in enumerate(batches(text, o)):
        tokens = tokens.to(o.device)
        with torch.autocast(o.device, torch.bfloat16, enabled=o.amp):
            logits = run(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i == 0:
            print(f"{name}: first step {time.perf_counter() - started:.1f} s", flush=True)
            started = time.perf_counter()
    if run is not model:
        print(str(torchflash.report).splitlines()[0])
    return losses, (time.perf_counter() - started) / max(o.steps - 1, 1)


def write_plot(curves, path):
    """Both losses over the steps, and below them how far they are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=[2, 1])
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        top.plot(losses, style, label=name)
    bottom.plot([abs(a - b) for a, b in zip(*curves.values(), strict=True)], color="black", linewidth=0.8)
    top.set(ylabel="loss, nats per byte")
    bottom.set(ylabel="|difference|", xlabel="step")
    top.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def options(arguments=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--amp", action="store_true", help="autocast to bfloat16; default: float32")
    p.add_argument("--inner", default="inductor", help="what compiles the rest: inductor, aot_eager or eager")
    p.add_argument("--text-kb", type=int, default=1000, help="how much of the standard library to read")
    p.add_argument("--every", type=int, default=10, help="print the loss of every so many steps")
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for CSV and plot; default results")
    o = p.parse_args(arguments)
    o.device = torch.device(o.device).type
    if o.width % o.heads:
        p.error(f"--width {o.width} is not a multiple of --heads {o.heads}")
    if o.text_kb * 1000 <= o.length:
        p.error(f"--text-kb {o.text_kb} holds no sequence of --length {o.length}")
    return o


def main(arguments=None):
    o = options(arguments)
    o.out.mkdir(parents=True, exist_ok=True)
    text = library_text(o.text_kb * 1000)
    torch.manual_seed(0)
    initial = GPT(o.layers, o.width, o.heads, o.length, o.dropout)
    parameters = sum(p.numel() for p in initial.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {len(text) / 1e6:.1f} MB of text, {o.device}", flush=True)

    curves, seconds = {}, {}
    for name in ("eager", "torchflash"):
        torch.manual_seed(2)
        curves[name], seconds[name] = train(copy.deepcopy(initial).to(o.device), text, o, name)

    print(f"\n{'step':>6}{'eager':>12}{'torchflash':>12}")
    rows = list(zip(range(o.steps), *curves.values(), strict=True))
    for step, eager, ours in rows:
        if step % o.every == 0 or step == o.steps - 1:
            print(f"{step:>6}{eager:>12.5f}{ours:>12.5f}")
    largest, where = max((abs(eager - ours), step) for step, eager, ours in rows)
    print(f"largest difference of the losses: {largest:.1e}, at step {where}")
    print("a step, once compiled: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in seconds.items()))

    with (o.out / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        writer.writerows(rows)
    try:
        write_plot(curves, o.out / "train.png")
        print(f"wrote {o.out / 'train.csv'} and {o.out / 'train.png'}")
    except ImportError:
        print(f"wrote {o.out / 'train.csv'}; for a plot, install matplotlib")


if __name__ == "__main__":
    main()
