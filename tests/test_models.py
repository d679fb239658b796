"""Unmodified Hugging Face models from tiny configs: every attention block rewritten, outputs and gradients eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchflash.backend import torchflash

transformers = pytest.importorskip("transformers")

LENGTH = 12


def ids(vocabulary: int = 50, length: int = LENGTH) -> Tensor:
    return torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


def padding(left: bool) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    return mask if left else mask.flip(1)


def llama() -> Any:
    c = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaModel, c, {"input_ids": ids(), "attention_mask": padding(left=True), "use_cache": False}, 2


def gpt2() -> Any:
    c = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2Model, c, {"input_ids": ids(), "use_cache": False}, 2


def bert() -> Any:
    c = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertModel, c, {"input_ids": ids(), "attention_mask": padding(left=False)}, 2


def t5() -> Any:
    c = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4
    )
    inputs = {
        "input_ids": ids(),
        "attention_mask": padding(left=False),
        "decoder_input_ids": ids(length=7),
        "use_cache": False,
    }
    return transformers.T5Model, c, inputs, 2 + 4


def gemma2() -> Any:
    c = transformers.Gemma2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=5.0,
    )  # fmt: skip
    return (
        transformers.Gemma2Model,
        c,
        {"input_ids": ids(), "attention_mask": padding(left=True), "use_cache": False},
        2,
    )


def vit() -> Any:
    c = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    return transformers.ViTModel, c, {"pixel_values": torch.randn(2, 3, 16, 16)}, 2


def whisper() -> Any:
    c = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=10, max_target_positions=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids(length=7), "use_cache": False}
    return transformers.WhisperModel, c, inputs, 2 + 4


def bloom() -> Any:
    c = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomModel, c, {"input_ids": ids(), "attention_mask": padding(left=True), "use_cache": False}, 2


def swin() -> Any:
    c = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return transformers.SwinModel, c, {"pixel_values": torch.randn(2, 3, 32, 32)}, 4


MODELS: list[Callable[[], Any]] = [llama, gpt2, bert, t5, gemma2, vit, whisper, bloom, swin]


def model_of(make: Callable[[], Any]) -> tuple[nn.Module, dict[str, Any], int]:
    torch.manual_seed(0)
    cls, config, inputs, blocks = make()
    config._attn_implementation = "eager"
    model = cls(config).eval()  # no dropout, so that values can be compared
    for name, p in model.named_parameters():
        if "bias" in name or "table" in name:  # start as zeros: make them count
            nn.init.normal_(p, std=0.2)
    return model, inputs, blocks


def step(run: Any, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    out = run(**inputs)[0]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    (out * weight).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}


def error(a: Tensor, b: Tensor, scale: float) -> float:
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), scale))


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_trains(make: Callable[[], Any]) -> None:
    model, inputs, blocks = model_of(make)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="torchflash", options={"torchflash.inner": "aot_eager"}, fullgraph=True)
    out, gradients = step(compiled, model, inputs)
    report = torchflash.report
    assert len(report.rewritten) == blocks, str(report)
    assert [r for r in report.skipped if r.code != "no_values"] == [], str(report)
    rough, rough_gradients = step(model, model, inputs)
    reference = copy.deepcopy(model).double()
    exact, exact_gradients = step(reference, reference, double(inputs))
    if exact.isnan().any():  # a mask of float64's smallest number meets a softmax in float32
        exact, exact_gradients = rough, rough_gradients
    assert error(out, exact, 1e-6) <= max(2 * error(rough, exact, 1e-6), 1e-5)
    # where an output is not used, AOTAutograd gives zeros for eager's None
    assert gradients.keys() >= rough_gradients.keys()
    assert not any(gradients[n].count_nonzero() for n in gradients.keys() - rough_gradients.keys())
    largest = max(float(g.norm()) for g in exact_gradients.values())
    for name, g in exact_gradients.items():
        own = error(rough_gradients[name], g, 1e-3 * largest)
        assert error(gradients[name], g, 1e-3 * largest) <= max(2 * own, 2e-5), name


@pytest.mark.parametrize(
    "make", [llama, *(pytest.param(m, marks=pytest.mark.slow) for m in (t5, whisper))], ids=lambda f: f.__name__
)
def test_infers_at_any_length(make: Callable[[], Any]) -> None:
    model, inputs, blocks = model_of(make)
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="torchflash", options={"torchflash.inner": "aot_eager"}, dynamic=True, fullgraph=True
    )
    with torch.no_grad():
        for length in (7, 5):
            part = {
                n: x[:, -length:].contiguous() if n.endswith(("ids", "attention_mask")) else x
                for n, x in inputs.items()
            }
            torch.testing.assert_close(compiled(**part)[0], model(**part)[0], rtol=1e-4, atol=1e-5)
            assert len(torchflash.report.rewritten) == blocks, str(torchflash.report)
    assert torchflash.report.graphs == 1
