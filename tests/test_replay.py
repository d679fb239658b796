"""What a call launched is launched again on other tensors, or not at all."""

from types import SimpleNamespace

import pytest
import torch

from torchflash.kernels import memory, replay


class Map:
    def at(self, address):
        return ("map", address)


def kernel(got, **attributes):
    """A started kernel that takes X, a tuple T, a described D, a number and what lasts, C."""
    known = {
        "device": -1, "direct": lambda *arguments: got.append(arguments), "watched": lambda: False,
        "arguments": [1, 1, 1, 0, None, None, "map", 7, None],
        "tensors": [(4, "X"), (8, "C")], "tuples": [(5, "T")], "maps": [(6, "D", Map())],
    }  # fmt: skip
    return SimpleNamespace(**known | attributes)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)


LASTING = torch.zeros(3)


def call(started, q, k, result=True, last=None):
    """Launches twice, the second time on what the first wrote."""
    between = memory.empty(q, (4, 2), torch.int32, zero=True)
    recording = replay.current()
    if recording is not None:
        recording.same(LASTING)
        recording.launched(started, {"X": q, "T": (k, q), "D": between, "C": LASTING})
        recording.launched(started, {"X": between, "T": (q, k), "D": k, "C": LASTING if last is None else last})
    return result


def recorded(started, *tensors, **how):
    found = {}
    result = replay.record(found, "key", tensors, lambda: call(started, *tensors, **how))
    return found["key"], result


def test_other_tensors_take_the_places_of_the_first():
    got = []
    plan, result = recorded(kernel(got), torch.randn(2), torch.randn(2))
    assert result is True and isinstance(plan, replay.Replay)
    q, k = torch.randn(2), torch.randn(2)
    a, b, c = q.data_ptr(), k.data_ptr(), LASTING.data_ptr()
    assert plan.run((q, k))
    first, second = got
    between = first[6][1]
    assert first == (1, 1, 1, 5, a, (b, a), ("map", between), 7, c)
    assert second == (1, 1, 1, 5, between, (a, b), ("map", b), 7, c)
    assert between not in (a, b, c)


def test_temporary_tensors_are_made_anew_and_zero(monkeypatch):
    made = []
    plan, _ = recorded(kernel([]), torch.randn(2), torch.randn(2))
    usual = memory.empty_strided

    def empty_strided(*args):
        made.append(usual(*args).fill_(9))
        return made[-1]

    monkeypatch.setattr(memory, "empty_strided", empty_strided)
    assert plan.run((torch.randn(2), torch.randn(2)))
    assert [(tuple(x.shape), x.dtype) for x in made] == [((4, 2), torch.int32)] and not made[0].any()


@pytest.mark.parametrize("how", ["unknown", "direct", "device", "result", "twice", "gradients"])
def test_what_cannot_be_known_is_not_replayed(how):
    q, k = torch.randn(2), torch.randn(2)
    attributes, arguments = {"direct": {"direct": None}, "device": {"device": 1}}.get(how, {}), {}
    if how == "unknown":
        arguments["last"] = torch.randn(2)
    if how in ("result", "gradients"):
        arguments["result"] = None if how == "result" else [torch.randn(2)]
    found, result = recorded(kernel([], **attributes), q, q if how == "twice" else k, **arguments)
    assert found == 1 and result is arguments.get("result", True)


def test_a_call_that_compiles_is_recorded_the_next_time():
    memory_of_problem, tensors, launched = {}, (torch.randn(2), torch.randn(2)), kernel([])

    def compiles():
        replay.current().complete = False
        return call(launched, *tensors)

    replay.record(memory_of_problem, "key", tensors, compiles)
    assert memory_of_problem["key"] == 1
    replay.record(memory_of_problem, "key", tensors, lambda: call(launched, *tensors))
    assert isinstance(memory_of_problem["key"], replay.Replay)


def test_recording_is_given_up():
    found, tensors = {}, (torch.randn(2), torch.randn(2))
    heard = []

    def spoiled():
        heard.append(replay.current())
        if heard[-1] is not None:
            heard[-1].complete = False
        return True

    for _ in range(replay.TRIES + 2):
        assert replay.record(found, "key", tensors, spoiled) is True
    assert [x is not None for x in heard] == [True] * replay.TRIES + [False] * 2 and found["key"] is None


def test_an_error_ends_the_recording():
    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        replay.record({}, "key", (torch.randn(2),), fails)
    assert replay.current() is None


@pytest.mark.parametrize("reason", ["watched", "device"])
def test_nothing_is_launched_where_it_must_not_be(reason, monkeypatch):
    got, seen = [], []
    plan, _ = recorded(kernel(got, watched=lambda: bool(seen)), torch.randn(2), torch.randn(2))
    if reason == "watched":
        seen.append(True)
    else:
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    assert not plan.run((torch.randn(2), torch.randn(2))) and not got
