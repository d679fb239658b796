"""One query over a static cache of keys and values, as in generate(): torchflash beside SDPA over what is filled.

    python benchmarks/decoding.py                      # batch 1 and 32, 8192 and 32768 filled
    python benchmarks/decoding.py --batches 8 --filled 4096 --capacity 2.0
    python benchmarks/decoding.py --queries 512        # the rest of a prompt, every query over all that is filled

The attention is written out as Hugging Face's models write it, with a mask over the whole cache, and compiled with
backend="torchflash". "SDPA" is given the filled part alone, without a mask, which a model with a static cache cannot
do; "masked" is the whole cache and the mask, as these models give it to SDPA by default, compiled by Inductor. "paged"
is torchflash again, on the same keys and values in pages of 16 that lie shuffled in a cache [pages, page, heads, dim]:
the function looks them up in it by a table, and "/ whole" is how much longer it takes than on those that lie together.

Times are those of the device, in microseconds, of one of several layers that have the mask in common, as those of a
model: they are compiled together and replayed from a CUDA graph, as with mode="reduce-overhead", each with queries of
its own and, unless they are very large, a cache of its own. The last column is how much of the bandwidth of a copy the
bytes of the filled keys and values make of torchflash's time.
"""

import argparse

import torch
import torch.nn.functional as F

LAYERS = 8
CACHED = 1 << 28  # bytes of keys and values that do not stay in the L2 cache


def attend(q, k, v, mask):
    """q [B, H, M, D], k, v [B, Hk, N, D], mask [B, 1, 1, N] added to the scores."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    return torch.matmul(torch.softmax(weights, -1, dtype=torch.float32).to(q.dtype), v)


def attend_masked(q, k, v, mask):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_all(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def attend_paged(q, keys, values, table, mask):
    """keys, values [pages, page, Hk, D], table [B, N / page]."""
    k, v = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
    return attend(q, k, v, mask)


def in_pages(cache, table, page):
    """k and v [2, B, Hk, N, D] as [2, pages, page, Hk, D], the pages where `table` [B, N / page] says."""
    _, B, heads, N, D = cache.shape
    pages = cache.new_empty(2, table.numel(), page, heads, D)
    pages[:, table] = cache.view(2, B, heads, N // page, page, D).permute(0, 1, 3, 4, 2, 5)
    return pages


def in_layers(attention):
    """`attention` for the queries of several layers, whose caches may be fewer."""

    def run(queries, caches, *rest):
        return [attention(q, *caches[i % len(caches)], *rest) for i, q in enumerate(queries)]

    return run


def microseconds(run):
    """Of one of the results of `run`, replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(kept))
    return sorted(times)[len(times) // 2]


def bandwidth():
    """Bytes a microsecond, read and written, of a copy: the faster of the copy engine and a kernel."""
    x = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    copies = (lambda: y.copy_(x), lambda: torch.neg(x, out=y))
    return 2 * x.numel() * 4 / min(microseconds(lambda c=copy: [c() for _ in range(4)]) for copy in copies)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--filled", default="8192,32768")
    parser.add_argument("--capacity", type=float, default=1.25, help="length of the cache, in filled lengths")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--page", type=int, default=16)
    o = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decoding.py times a GPU; there is none")
    copied = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy {copied / 1e6:.2f} TB/s")
    titles = zip(("batch", "filled", "cache", "SDPA", "masked", "torchflash", "/ SDPA", "/ masked", "paged", "/ whole",
                  "error", "a copy"), (6, 8, 8, 9, 9, 12, 8, 10, 9, 9, 10, 8), strict=True)  # fmt: skip
    print("".join(f"{title:>{width}}" for title, width in titles))
    compiled, paged = (torch.compile(in_layers(f), backend="torchflash") for f in (attend, attend_paged))
    masked, filled_part = torch.compile(in_layers(attend_masked)), in_layers(attend_all)
    for B in map(int, o.batches.split(",")):
        for filled in map(int, o.filled.split(",")):
            N = -(-int(filled * o.capacity) // o.page) * o.page
            torch.manual_seed(0)
            size = 2 * B * o.kv_heads * N * o.dim * 2
            queries = [
                torch.randn(B, o.heads, o.queries, o.dim, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)
            ]
            caches = [
                torch.randn(2, B, o.kv_heads, N, o.dim, device="cuda", dtype=torch.bfloat16)
                for _ in range(max(1, min(LAYERS, CACHED // size + 1)))
            ]
            mask = torch.zeros(B, 1, 1, N, device="cuda", dtype=torch.bfloat16)
            mask[..., filled:] = torch.finfo(torch.bfloat16).min

            table = torch.randperm(B * N // o.page, device="cuda").view(B, -1)
            pages = [tuple(in_pages(cache, table, o.page)) for cache in caches]
            pairs = [tuple(cache) for cache in caches]
            parts = [tuple(cache[:, :, :, :filled]) for cache in caches]
            ways = [
                lambda q=queries, c=parts: filled_part(q, c),
                lambda q=queries, c=pairs, mask=mask: masked(q, c, mask),
                lambda q=queries, c=pairs, mask=mask: compiled(q, c, mask),
                lambda q=queries, c=pages, table=table, mask=mask: paged(q, c, table, mask),
            ]
            k, v = (x[0].double().repeat_interleave(o.heads // o.kv_heads, 0) for x in parts[0])
            exact = F.scaled_dot_product_attention(queries[0][0].double(), k, v)
            error = max(float((way()[0][0] - exact).norm() / exact.norm()) for way in ways[2:])
            a, b, c, d = map(microseconds, ways)
            share = 2 * B * o.kv_heads * filled * o.dim * 2 / copied / c
            print(f"{B:>6}{filled:>8}{N:>8}{a:>9.1f}{b:>9.1f}{c:>12.1f}{c / a:>8.2f}{c / b:>10.2f}{d:>9.1f}"
                  f"{d / c:>9.2f}{error:>10.1e}{share:>8.0%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
