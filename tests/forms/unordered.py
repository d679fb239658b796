"""Keys and values that are looked up row by row, as in paged caches. Those in IN_PLACE are read where they lie when no
gradient is needed, those in COPIED are not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forms.registry import NEG, form, sc

PAGE = 5


def _cache(g, heads, *, rows=None, order=(0, 1, 2, 3), grad=False):
    """(keys, values, table [B, P]): pages [pages, page, heads, D], more of them than the table has, in another order of
    dims."""
    pages = -(-g.S // PAGE)
    total = g.B * pages + 3
    shape = [total, PAGE, heads, g.D] if rows is None else [rows, heads, g.D]
    shape = [shape[d] for d in order] if rows is None else shape
    table = torch.randperm(total, generator=g.rng)[: g.B * pages].view(g.B, pages)
    return g.r(*shape, grad=grad), g.r(*shape, grad=grad), table


def _lengths(g):
    return torch.tensor([g.S - 2, g.S // 2] + [g.S] * (g.B - 2))[: g.B]


def _queries(g, M=None):
    return g.r(g.B, g.H, M or g.S, g.D)


def _attend(q, k, v, lengths):
    """k, v [B, Hk, N, D] with grouped heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    kept = torch.arange(k.shape[2]) < lengths[:, None]
    return sc(q, k).masked_fill(~kept[:, None, None], NEG).softmax(-1) @ v


# ------------------------------------------------------------------------------------------------------------ in place


@form()
def paged_indexed(g):
    def f(q, keys, values, table, lengths):
        B, P = table.shape
        k = keys[table].reshape(B, P * PAGE, *keys.shape[2:]).transpose(1, 2)
        v = values[table].reshape(B, P * PAGE, *values.shape[2:]).transpose(1, 2)
        return _attend(q, k, v, lengths)

    return f, (_queries(g), *_cache(g, 2), _lengths(g))


@form()
def paged_flattened_expanded(g):
    def f(q, keys, values, table, lengths):
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
        kept = torch.arange(k.shape[2])[None] < lengths[:, None]
        return (sc(q, k) + torch.where(kept, 0.0, NEG)[:, None, None]).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 2), _lengths(g))


@form()
def paged_index_select(g):
    def f(q, keys, values, table, lengths):
        k, v = (torch.index_select(c, 0, table.flatten()) for c in (keys, values))
        k, v = (x.view(table.shape[0], -1, *keys.shape[2:]).transpose(1, 2) for x in (k, v))
        return _attend(q, k, v, lengths)

    return f, (_queries(g), *_cache(g, 4), _lengths(g))


@form()
def paged_slots(g):
    def f(q, keys, values, slots, lengths):
        k, v = (c.view(-1, *c.shape[2:])[slots].transpose(1, 2) for c in (keys, values))
        return _attend(q, k, v, lengths)

    keys, values, _ = _cache(g, 2)
    slots = torch.randint(keys.shape[0] * PAGE, (g.B, g.S), generator=g.rng)
    return f, (_queries(g), keys, values, slots, _lengths(g))


@form()
def paged_slots_of_table(g):
    def f(q, keys, values, table, lengths):
        n = torch.arange(table.shape[1] * PAGE)
        slots = table[:, n // PAGE] * PAGE + n % PAGE
        k, v = (c.flatten(0, 1)[slots].transpose(1, 2) for c in (keys, values))
        return _attend(q, k, v, lengths)

    return f, (_queries(g), *_cache(g, 1), _lengths(g))


@form()
def paged_embedding(g):
    def f(q, keys, values, slots, lengths):
        k, v = (F.embedding(slots, c.flatten(1)).view(*slots.shape, *c.shape[1:]) for c in (keys, values))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return _attend(q, k, v, lengths)

    keys, values, _ = _cache(g, 2, rows=40)
    return f, (_queries(g), keys, values, torch.randint(40, (g.B, g.S), generator=g.rng), _lengths(g))


@form()
def paged_heads_outside(g):
    def f(q, keys, values, table, lengths):
        B, P = table.shape
        k, v = (c[table].transpose(1, 2).reshape(B, c.shape[1], P * PAGE, c.shape[3]) for c in (keys, values))
        return _attend(q, k, v, lengths)

    return f, (_queries(g), *_cache(g, 2, order=(0, 2, 1, 3)), _lengths(g))


@form()
def paged_keys_beside_values(g):
    def f(q, cache, table, lengths):
        both = cache[table]  # [B, P, 2, page, heads, D]
        k, v = (x.flatten(1, 2).transpose(1, 2) for x in both.unbind(2))
        return _attend(q, k, v, lengths)

    keys, values, table = _cache(g, 2)
    return f, (_queries(g), torch.stack((keys, values), 1), table, _lengths(g))


@form()
def paged_einsum_heads_last(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2) for c in (keys, values))
        p = torch.einsum("bmhd,bnhd->bhmn", q, k).mul(0.3).softmax(-1)
        return torch.einsum("bhmn,bnhd->bmhd", p, v)

    return f, (g.r(g.B, g.S, g.H, g.D), *_cache(g, 4))


@form()
def paged_one_query_negative_pages(g):
    def f(q, keys, values, table, lengths):
        k, v = (c[table - c.shape[0]].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        return _attend(q, k, v, lengths)

    return f, (_queries(g, 1), *_cache(g, 2), _lengths(g))


@form()
def paged_part_of_the_keys(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2)[:, 1:11].transpose(1, 2) for c in (keys, values))
        return sc(q, k).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 4))


@form()
def paged_written_before(g):
    """The new keys go to their places in the cache first, as in decoding."""

    def f(q, keys, values, table, lengths, new):
        at = lengths - 1
        page = table.gather(1, (at // PAGE)[:, None])[:, 0]
        keys[page, at % PAGE] = new
        values.index_put_((page, at % PAGE), new + 1.0)
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        return _attend(q, k, v, lengths)

    return f, (_queries(g, 1), *_cache(g, 2), _lengths(g), g.r(g.B, 2, g.D, grad=False))


@form()
def paged_copy_written_before(g):
    def f(q, keys, values, table, new):
        keys, values = keys.clone(), values.clone()
        keys[1], values[1] = new, new + 1.0
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        return sc(q, k).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 4), g.r(4, g.D, grad=False))


@form()
def paged_latent(g):
    """Keys and values of one cache, the values being some columns of the keys."""

    def f(q, cache, table, lengths):
        k = cache[table].flatten(1, 2)
        kept = torch.arange(k.shape[1]) < lengths[:, None]
        s = torch.einsum("bhmd,bnd->bhmn", q, k) * 0.3
        p = s.masked_fill(~kept[:, None, None], NEG).softmax(-1)
        return torch.einsum("bhmn,bnd->bhmd", p, k[..., :6])

    keys, _, table = _cache(g, 1)
    return f, (_queries(g), keys[:, :, 0], table, _lengths(g))


@form()
def paged_gather(g):
    def f(q, keys, values, order):
        index = order[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        return sc(q, keys.gather(2, index)).softmax(-1) @ torch.take_along_dim(values, index, 2)

    keys, values = (g.r(g.B, g.H, 20, g.D, grad=False) for _ in range(2))
    return f, (_queries(g), keys, values, torch.randint(20, (g.B, g.S), generator=g.rng))


@form()
def paged_beams(g):
    """Whole sequences are looked up, as in a beam search."""

    def f(q, keys, values, beams):
        return sc(q, keys[beams]).softmax(-1) @ values[beams]

    keys, values = (g.r(5, g.H, g.S, g.D, grad=False) for _ in range(2))
    return f, (_queries(g), keys, values, torch.tensor([3, -1] + [0] * (g.B - 2))[: g.B])


# -------------------------------------------------------------------------------------------------------------- copied


@form()
def unordered_by_two_tables(g):
    def f(q, keys, values, table):
        k, v = keys[table].flatten(1, 2).transpose(1, 2), values[table.flip(1)].flatten(1, 2).transpose(1, 2)
        return sc(q, k).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 4))


@form()
def unordered_and_returned(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        return sc(q, k).softmax(-1) @ v, v.sum(2)

    return f, (_queries(g), *_cache(g, 4))


@form()
def unordered_written_between(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        keys[:, 0] = 0.0
        return sc(q, k).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 4))


@form()
def unordered_table_written_between(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        table[:, 0] = 0
        return sc(q, k).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 4))


@form()
def unordered_written_themselves(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        k[:, :, 3] = 0.5
        return sc(q, k).softmax(-1) @ v

    return f, (_queries(g), *_cache(g, 4))


@form()
def unordered_by_head(g):
    def f(q, keys, values, slots):
        h = torch.arange(slots.shape[1])[:, None]
        return sc(q, keys[slots, h]).softmax(-1) @ values[slots, h]

    keys, values, _ = _cache(g, 4, rows=40)
    return f, (_queries(g), keys, values, torch.randint(40, (g.B, g.H, g.S), generator=g.rng))


@form()
def unordered_of_another_dtype(g):
    def f(q, keys, values, table):
        k, v = (c[table].flatten(1, 2).transpose(1, 2).to(q.dtype) for c in (keys, values))
        return sc(q, k).softmax(-1) @ v

    q, (keys, values, table) = _queries(g), _cache(g, 4)
    return f, (q, keys.to(torch.float16), values.to(torch.float16), table)


@form()
def unordered_with_gradients(g):
    def f(q, keys, values, table, lengths):
        k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
        return _attend(q, k, v, lengths)

    return f, (_queries(g), *_cache(g, 2, grad=True), _lengths(g))
