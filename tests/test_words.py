"""Score programs in words."""

import functools
import operator
import random
import re

import pytest
import torch

from torchflash import Rewritten
from torchflash import score as sc
from torchflash.words import in_words

LOW = "-3.4028234663852886e+38"
PADDED = "(n <= m) & t0[b, n]"
WORDS = {
    ("0.125 * s", "", "p"): "full attention",
    ("where(n <= m, 0.125 * s, -inf)", "n <= m", "p"): "causal",
    (f"where(n >= m + 1, {LOW}, 0.125 * s)", "n < m + 1", "p"): "causal",
    ("where(n < m, s, -inf)", "n < m", "p"): "strictly causal",
    ("where(n <= m + z0 - z1, s, -inf)", "n <= m + z0 - z1", "p"): "causal",
    (f"where({PADDED}, 0.25 * s, -inf)", PADDED, f"where({PADDED}, p, 0.0)"): "causal + key padding",
    ("where((n <= m) & (m - n < 1024), s, -inf)", "(n <= m) & (m - n < 1024)", "p"): "causal + window of 1024",
    ("where(abs(m - n) <= 64, s, -inf)", "abs(m - n) <= 64", "p"): "window of 64 on both sides",
    ("where(m != n, s, -inf)", "m != n", "p"): "not the query's own key",
    ("where(n // 4 <= m // 4, s, -inf)", "n // 4 <= m // 4", "p"): "causal by blocks of 4",
    ("where(n // 4 == m // 4, s, -inf)", "n // 4 == m // 4", "p"): "blocks of 4",
    ("where(abs(m // 4 - n // 4) <= 1, s, -inf)", "", "p"): "window of 1 blocks of 4 on both sides",
    ("where(n >= 5, s, -inf)", "n >= 5", "p"): "not the first 5 keys",
    ("where(n < 5, s, -inf)", "n < 5", "p"): "the first 5 keys",
    ("where((n < 5) | (n <= m), s, -inf)", "(n < 5) | (n <= m)", "p"): "(the first 5 keys or causal)",
    ("where(n - m >= 0, s, -inf)", "n - m >= 0", "p"): "from the query's own on",
    ("where(m - n < 4, s, -inf)", "m - n < 4", "p"): "from 3 behind on",
    ("where(n - m <= -2, s, -inf)", "n - m <= -2", "p"): "at least 2 keys behind",
    ("where(n == m, s, -inf)", "n == m", "p"): "only the query's own key",
    ("where((n - m) % 4 == 0, s, -inf)", "(n - m) % 4 == 0", "p"): "(n - m) % 4 == 0",
    ("where(maximum(n, 5) <= m, s, -inf)", "", "p"): "maximum(n, 5) <= m",
    ("where(n < z0, s, -inf)", "n < z0", "p"): "n < z0",
    ("where(t0[b, m] != t0[b, n], s, -inf)", "t0[b, m] != t0[b, n]", "p"): "other documents",
    ("where(n >= t0[b], s, -inf)", "n >= t0[b]", "p"): "keys from a position on",
    ("where(~(n + 1 > t0[b, m]), s, -inf)", "", "p"): "keys up to a position by query",
    ("where(t0[b, n] <= m, s, -inf)", "t0[b, n] <= m", "p"): "mask by batch, query, key",
    ("where(n < 13, s, t0[h])", "", "p"): "sink by head",
    ("where(n < 13, 0.5 * s, 0.0)", "", "p"): "sink of 0",
    ("where((t0[b, m] == t0[b, n]) & (n <= m), s, -inf)", "(t0[b, m] == t0[b, n]) & (n <= m)", "p"):
        "causal + documents",
    ("where(n < t0[b], s, -inf)", "n < t0[b]", "p"): "key lengths",
    ("where((n <= m) | t0[b, n], s, -inf)", "(n <= m) | t0[b, n]", "p"): "(causal or key padding)",
    ("0.25 * s + t0[b, 0, m, n]", "~(t0[b, 0, m, n] <= -1e+30)", "p"): "mask by batch, query, key",
    ("50.0 * tanh(0.0025 * s) + t0[b, 0, m, n]", "~(t0[b, 0, m, n] <= -1e+30)", "p"):
        "mask by batch, query, key, softcap 50",
    ("s + t0[h, m, n]", "", "p"): "bias by head, query, key",
    ("s + t0[h, n - m + 31]", "", "p"): "relative position bias by head",
    ("0.25 * s - t0[h] * float(abs(m - n))", "", "p"): "ALiBi",
    ("s * t0[h, 0, 0]", "", "p"): "scale by head",
    ("where(s > 0.0, s, 0.1 * s)", "", "p"): "a function of the score",
    ("abs(s)", "", "0.5 * p"): "abs",
    ("s", "", "p * t0[h]"): "full attention, weights times a tensor by head",
    ("s", "", "nan_to_num(p)"): "full attention, weights changed after the softmax",
}  # fmt: skip


@pytest.mark.parametrize("texts", WORDS, ids=lambda texts: texts[0])
def test_words(texts):
    expected = WORDS[texts].replace("full attention, ", "")  # what else is said says that
    assert in_words(*texts) == expected


@pytest.mark.parametrize(
    ("heads", "words"),
    [((8, 8), "causal"), ((8, 2), "causal, GQA 4:1"), ((8, 1), "causal, MQA"), (("h", 2), "causal, GQA")],
)
def test_heads_and_dropout(heads, words):
    q, k = (2, heads[0], 64, 16), (2, heads[1], 64, 16)
    record = Rewritten(score="where(n <= m, s, -inf)", keep="n <= m", q=q, k=k, v=k)
    assert record.what == words and words in str(record)
    assert Rewritten(score="s", dropout_p=0.1).what == "full attention, dropout 0.1"


def test_what_is_shared_is_looked_at_once():
    levels = "; ".join(f"x{i + 1} = tanh(x{i}) + x{i}" for i in range(40))
    assert in_words(f"x0 = 0.5 * s; {levels}; x40 + 0.0 * x40") == "tanh"


# what the words for positions mean, d being n - m
MEANING = {
    r"full attention|all keys": lambda m, n: n >= 0,
    r"causal": lambda m, n: n <= m,
    r"strictly causal": lambda m, n: n < m,
    r"only the query's own key": lambda m, n: n == m,
    r"not the query's own key": lambda m, n: n != m,
    r"up to (\d+) keys ahead": lambda m, n, a: n <= m + a,
    r"at least (\d+) keys behind": lambda m, n, a: n <= m - a,
    r"window of (\d+)": lambda m, n, a: n > m - a,
    r"only (\d+ .*)": lambda m, n, a: n - m == a,
    r"only (\d+ .*) by blocks of (\d+)": lambda m, n, a, b: n // b - m // b == a,
    r"window of (\d+) on both sides": lambda m, n, a: abs(n - m) <= a,
    r"not the first key": lambda m, n: n > 0,
    r"not the first (\d+) keys": lambda m, n, a: n >= a,
    r"the first key": lambda m, n: n == 0,
    r"the first (\d+) keys": lambda m, n, a: n < a,
    r"from (.*) on": lambda m, n, a: n - m >= a,
    r"from (.*) to (.*)": lambda m, n, a, b: (n - m >= a) & (n - m <= b),
    r"blocks of (\d+)": lambda m, n, a: n // a == m // a,
    r"not the query's own block of (\d+)": lambda m, n, a: n // a != m // a,
    r"causal by blocks of (\d+)": lambda m, n, a: n // a <= m // a,
    r"strictly causal by blocks of (\d+)": lambda m, n, a: n // a < m // a,
    r"up to (\d+) blocks of (\d+) ahead": lambda m, n, a, b: n // b <= m // b + a,
    r"at least (\d+) blocks of (\d+) behind": lambda m, n, a, b: n // b <= m // b - a,
    r"window of (\d+) blocks of (\d+) on both sides": lambda m, n, a, b: abs(n // b - m // b) <= a,
    r"from (.*) on by blocks of (\d+)": lambda m, n, a, b: n // b - m // b >= a,
    r"from (.*) to (.*) by blocks of (\d+)": lambda m, n, a, b, c: (n // c - m // c >= a) & (n // c - m // c <= b),
}


def meaning(words, m, n):
    if " + " in words and not words.startswith("("):
        return functools.reduce(operator.and_, (meaning(w, m, n) for w in words.split(" + ")))
    for pattern, predicate in reversed(MEANING.items()):
        if (found := re.fullmatch(pattern, words)) is not None:
            return predicate(m, n, *map(distance, found.groups()))
    return sc.evaluate(sc.parse(words), {"m": m, "n": n}, ())


def distance(text):
    number, _, where = text.partition(" ")
    return 0 if text == "the query's own" else -int(number) if where == "behind" else int(number)


def conditions():
    rng = random.Random(0)
    for _ in range(600):
        a, b, c = rng.randint(-6, 6), rng.choice((1, 2, 3, 4, 7)), rng.randint(0, 5)
        op, op2 = rng.choice(("<", "<=", ">", ">=", "==", "!=")), rng.choice(("<", "<=", ">", ">="))
        yield rng.choice((
            f"n - m {op} {a}", f"m {op} n + {c}", f"n {op} {c}", f"{c} {op} n", f"abs(n - m) {op} {c}",
            f"n // {b} {op} m // {b}", f"n // {b} - m // {b} {op} {a}", f"abs(m // {b} - n // {b}) {op} {c}",
            f"(n - m {op} {a}) & (n - m {op2} {c})", f"~(n {op} m + {c})", f"2 * n {op} 2 * m + {c}",
            f"(n + {c}) // {b} {op} m // {b}", f"n // {b} {op} m", f"maximum(n, {c}) {op} m",
            f"where(n < {c}, n <= m, n {op} m + {a})", f"(n - m) % {b} {op} {c}", f"n * {b} {op} m",
            f"n // {b} {op} m // {b + 1}", f"(m - n) // {b} {op} {a}",
        ))  # fmt: skip


def test_words_mean_the_condition():
    m, n = torch.arange(40)[:, None], torch.arange(40)
    worded = 0
    for keep in conditions():
        words = in_words(f"where({keep}, s, -inf)")
        kept = torch.as_tensor(sc.evaluate(sc.parse(keep), {"m": m, "n": n}, ())).expand(40, 40)
        if words != str(sc.parse(keep)):
            worded += 1
            assert torch.equal(torch.as_tensor(meaning(words, m, n)).expand(40, 40), kept), f"{keep}: {words}"
    assert worded > 300
