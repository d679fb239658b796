"""generate() with a static cache: eager's tokens, every block rewritten, nothing compiled after the second token.

The mask comes as a tensor [B, 1, M, L] from outside the graph, keys and values are written into the cache in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from torchflash.backend import torchflash

transformers = pytest.importorskip("transformers")

NEW = 8
OPTIONS = {"torchflash.inner": "aot_eager"}
COMMON = {"vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> Any:
    c = transformers.LlamaConfig(
        **COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(c)


def gpt2() -> Any:
    c = transformers.GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(c)


def bloom() -> Any:
    c = transformers.BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4, attn_implementation="eager")
    return transformers.BloomForCausalLM(c)


def gemma2() -> Any:
    """The window is longer than all tokens: where it starts to slide, transformers takes another way: another graph."""
    c = transformers.Gemma2Config(
        **COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, sliding_window=64,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(c)


def t5() -> Any:
    c = transformers.T5Config(
        **COMMON, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(c)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


class Watch(transformers.StoppingCriteria):
    """Never stops; notes how many graphs have been compiled after each token."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.graphs.append(counters["stats"]["unique_graphs"])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def prompt(seed: int) -> dict[str, Tensor]:
    """Two prompts, the second shorter by four tokens of padding on the left."""
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def model_of(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    for p in model.parameters():  # at the small initial values all tokens are nearly as likely
        if p.ndim > 1:
            p.data.mul_(4)
    return model


def generate(model: Any, seed: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and logits [B, NEW, V], greedily."""
    static = {"cache_implementation": "static", "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    given = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    out = model.generate(**prompt(seed), **static, **given, **more)
    return out.sequences, torch.stack(out.logits, 1)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5 * float(want[1].abs().max()))


def check(model: Any, eager: Any, prefill: int, decode: int, **more: Any) -> None:
    """Two calls; `prefill` and `decode` are how many blocks have to be rewritten for the prompt and for one token."""
    seen = Watch()
    assert_same(generate(model, 1, stopping_criteria=[seen], **more), generate(eager, 1, disable_compile=True))
    assert len(seen.graphs) == NEW
    assert seen.graphs[1] >= 1 and seen.graphs[1:] == [seen.graphs[1]] * (NEW - 1)
    rewritten = [record.q[2] for record in torchflash.report.rewritten]
    assert (len(rewritten) - rewritten.count(1), rewritten.count(1)) == (prefill, decode), str(torchflash.report)
    assert not torchflash.report.skipped and torchflash.report.graphs == counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("fail_on_recompile"):  # another prompt, the same graphs
        assert_same(generate(model, 2, **more), generate(eager, 2, disable_compile=True))


# T5's encoder is called on its own and stays eager; its first token is a step of one row already
@pytest.mark.parametrize(
    ("make", "prefill", "decode"),
    [(llama, 2, 2), (gpt2, 2, 2), (bloom, 2, 2), (gemma2, 2, 2), (t5, 0, 8)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_compiled_model(make: Callable[[], Any], prefill: int, decode: int) -> None:
    model = model_of(make)
    model.compile(backend="torchflash", options=OPTIONS)
    check(model, model_of(make), prefill, decode)


def for_cpu_too(config: Any) -> Any:
    """What transformers asks for on a GPU: to compile decoding without being told."""
    config._compile_all_devices = True
    return config


def test_compile_config() -> None:
    """Decoding alone, as generate() compiles it."""
    config = for_cpu_too(transformers.CompileConfig(backend="torchflash", mode=None, options=OPTIONS))
    check(model_of(llama), model_of(llama), 0, 2, compile_config=config)


def test_compiled_model_keeps_its_backend() -> None:
    """Where generate() compiles decoding by Inductor on its own, a model that was compiled is still ours."""
    model = model_of(llama)
    model.compile(backend="torchflash", options=OPTIONS)
    check(model, model_of(llama), 2, 2, compile_config=for_cpu_too(transformers.CompileConfig()))
