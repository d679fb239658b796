"""Options: what is accepted, what is refused and in which words, and that the user's dict stays as it was."""

import dataclasses

import pytest
import torch

from torchflash import Options
from torchflash.kernels.tuning import read
from torchflash.options import parse

KNOWN = sorted(f"torchflash.{field.name}" for field in dataclasses.fields(Options))
POWER = "a power of two from 16 to 256"


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
        (
            {"torchflash.min_seq_len": 0},
            ValueError,
            f"unknown option 'torchflash.min_seq_len'; did you mean 'torchflash.min_seqlen'? known: {', '.join(KNOWN)}",
        ),
        (
            {"torchflash.block_m": 64},
            ValueError,
            f"unknown option 'torchflash.block_m'; did you mean 'torchflash.BLOCK_M'? known: {', '.join(KNOWN)}",
        ),
        ({"min_seqlen": 0}, ValueError, "unknown option 'min_seqlen'; did you mean 'torchflash.min_seqlen'?"),
        ({"min-seqlen": 0}, ValueError, "unknown option 'min-seqlen'; did you mean 'torchflash.min_seqlen'?"),
        ({"torchflash.strict": 1}, TypeError, "option 'torchflash.strict' must be bool; got int 1"),
        (
            {"torchflash.allow": ["no_scores"]},
            TypeError,
            "option 'torchflash.allow' must be str, skip codes separated by commas; got list ['no_scores']",
        ),
        (
            {"torchflash.sdpa": True},
            TypeError,
            "option 'torchflash.sdpa' must be str, one of masked, all, none; got bool True",
        ),
        ({"block_m": 64}, ValueError, "unknown option 'block_m'; did you mean 'torchflash.BLOCK_M'?"),
        ({"torchflash.dump": 3}, TypeError, "option 'torchflash.dump' must be str or None, a folder; got int 3"),
        (
            {"torchflash.inner": "nvcc"},
            ValueError,
            "option 'torchflash.inner' is 'nvcc'; known: inductor, aot_eager, eager",
        ),
    ],
    ids=["unknown key", "nearly a key", "other case", "no prefix", "no prefix, with a hyphen", "strict not bool",
         "allow a list", "sdpa not str", "no prefix, other case", "dump not str", "unknown inner"],
)
def test_errors_say_what_is_known(given, error, message):
    with pytest.raises(error) as caught:
        parse(options=given)
    assert str(caught.value) == message


class TestTuning:
    def written(self, **options):
        return Options(**options).tuning().write()

    def test_text(self):
        assert self.written() == ""
        assert self.written(min_seqlen=512, autotune=True) == "min_seqlen=512;autotune"
        assert self.written(num_warps=8) == "forward.num_warps=8;backward_kv.num_warps=8;backward_q.num_warps=8"
        given = {"BLOCK_N": {"backward_q": 32, "forward": 128}, "BLOCK_M": {"forward": 64}}
        assert self.written(**given) == "forward.BLOCK_M=64;forward.BLOCK_N=128;backward_q.BLOCK_N=32"

    @pytest.mark.parametrize(
        "given",
        [{}, {"min_seqlen": 0}, {"autotune": True, "BLOCK_M": 16, "num_stages": {"backward_kv": 8}, "num_warps": 1}],
        ids=str,
    )
    def test_what_is_written_is_read(self, given):
        tuning = Options(**given).tuning()
        assert read(tuning.write()) == tuning

    def test_tile(self):
        tuning = read("forward.BLOCK_M=64;forward.num_warps=4;backward_q.BLOCK_N=32")
        assert tuning.tile("forward") == {"BLOCK_M": 64, "num_warps": 4} and tuning.tile("backward_kv") == {}
        assert tuning.tile("backward_capture") == tuning.tile("backward_q") == {"BLOCK_N": 32}

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ({"min_seqlen": -1}, ValueError, "'torchflash.min_seqlen' is -1; must be 0 or more, or None"),
            ({"min_seqlen": 1.5}, TypeError, "'torchflash.min_seqlen' must be int or None; got float 1.5"),
            ({"min_seqlen": True}, TypeError, "'torchflash.min_seqlen' must be int or None; got bool True"),
            ({"autotune": 1}, TypeError, "'torchflash.autotune' must be bool; got int 1"),
            ({"BLOCK_M": 8}, ValueError, f"'torchflash.BLOCK_M' is 8 for forward; must be {POWER}"),
            ({"num_warps": 3}, ValueError, "'torchflash.num_warps' is 3 for forward; must be one of 1, 2, 4, 8, 16"),
            ({"num_stages": 9}, ValueError, "'torchflash.num_stages' is 9 for forward; must be from 1 to 8"),
            (
                {"BLOCK_N": {"backward_q": 48}},
                ValueError,
                f"'torchflash.BLOCK_N' is 48 for backward_q; must be {POWER}",
            ),
            (
                {"BLOCK_N": "64"},
                TypeError,
                "'torchflash.BLOCK_N' must be int, or a dict of forward, backward_kv, backward_q to int, or None; "
                "got str '64'",
            ),
            (
                {"BLOCK_M": {"forwards": 64}},
                ValueError,
                "unknown kernel 'forwards' in 'torchflash.BLOCK_M'; known: forward, backward_kv, backward_q",
            ),
        ],
        ids=str,
    )
    def test_errors(self, given, error, message):
        with pytest.raises(error) as caught:
            parse(options={f"torchflash.{key}": value for key, value in given.items()})
        assert str(caught.value).removeprefix("option ") == message

    @pytest.mark.parametrize("text", ["min_seqlen", "forward.BLOCK_M=6", "x=3", "autotune=1", "x.num_warps=4", ";"])
    def test_the_op_refuses_what_is_not_a_tuning(self, text):
        q = torch.randn(1, 1, 2, 2)
        with pytest.raises(ValueError, match="is not a tuning: ") as caught:
            torch.ops.torchflash.attention(q, q, q, [], [], "s", "", 0.0, "p", 0.0, None, "bhmd", "", None, text, [])
        assert "\n" not in str(caught.value)

    def test_is_part_of_the_cache_key(self):
        given = [{}, {"min_seqlen": 0}, {"min_seqlen": 64}, {"autotune": True}, {"BLOCK_M": 64}, {"num_warps": 8}]
        assert len({Options(**g).cache_key() for g in given}) == len(given)


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


def test_a_key_that_inductor_has_is_inductors(monkeypatch):
    """Should it ever name an option as we do."""
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["strict"])
    with pytest.raises(RuntimeError, match="strict"):  # from Inductor
        parse(options={"strict": True})


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True
