"""Score programs in words."""

import pytest

from torchflash import Rewritten
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
    ("where(n // 4 <= m // 4, s, -inf)", "n // 4 <= m // 4", "p"): "blocks of 4",
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
