"""Options: what is accepted, what is refused and in which words, and that the user's dict stays as it was."""

import dataclasses

import pytest
import torch

from torchflash import Options
from torchflash.options import parse

KNOWN = sorted(f"torchflash.{field.name}" for field in dataclasses.fields(Options))


def test_defaults():
    options, patches = parse()
    assert options == Options(strict=False, allow="", inner="inductor", dump=None)
    assert patches == {}


def test_ours_are_taken_and_the_rest_is_left_to_inductor():
    given = {"torchflash.strict": True, "torchflash.inner": "eager", "max_autotune": True, "triton.cudagraphs": False}
    kept = dict(given)
    options, patches = parse(options=given)
    assert options == Options(strict=True, inner="eager")
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}
    assert given == kept


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_are_those_of_inductor(mode):
    assert parse(mode)[1] == torch._inductor.list_mode_options(mode)


def test_options_override_the_mode():
    assert parse("reduce-overhead", {"triton.cudagraphs": False})[1] == {"triton.cudagraphs": False}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"torchflash.foo": 1},
            ValueError,
            f"unknown option 'torchflash.foo'; known: {', '.join(KNOWN)}",
        ),
        ({"torchflash.strict": 1}, TypeError, "option 'torchflash.strict' must be bool, got int 1"),
        ({"torchflash.dump": 3}, TypeError, "option 'torchflash.dump' must be str, got int 3"),
        (
            {"torchflash.inner": "nvcc"},
            ValueError,
            "option 'torchflash.inner' is 'nvcc'; known: inductor, aot_eager, eager",
        ),
    ],
    ids=["unknown key", "strict not bool", "dump not str", "unknown inner"],
)
def test_errors_say_what_is_known(given, error, message):
    with pytest.raises(error) as caught:
        parse(options=given)
    assert str(caught.value) == message


def test_unknown_skip_code_in_allow():
    with pytest.raises(ValueError, match=r"unknown skip code 'no_score' in 'torchflash.allow'; known: .*no_scores"):
        Options(allow="no_values, no_score")


def test_unknown_inductor_option_names_the_known_ones():
    with pytest.raises(RuntimeError, match=r"no_such_thing, known options are .*max_autotune"):
        parse(options={"no_such_thing": 1})


def test_unknown_mode():
    with pytest.raises(RuntimeError, match="Unrecognized mode"):
        parse("fastest")


def test_wrong_type_of_an_inductor_option():
    with pytest.raises(RuntimeError, match="max_autotune"):
        parse(options={"max_autotune": "yes"})


def test_allow_is_a_list_of_codes():
    assert Options(allow="no_scores, no_values").allowed == ("no_scores", "no_values")


def test_dump_defaults_to_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHFLASH_DUMP", "there")
    assert Options().dump == "there"
    assert Options(dump=None).dump is None
    assert Options(dump=tmp_path).dump == str(tmp_path)
    monkeypatch.setenv("TORCHFLASH_DUMP", "")
    assert Options().dump is None


def test_cache_key_holds_what_changes_the_code():
    assert Options().cache_key() == Options(strict=True, dump="x", allow="dtype").cache_key()
    assert Options().cache_key() != Options(inner="aot_eager").cache_key()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True
