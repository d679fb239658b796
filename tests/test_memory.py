"""No tensor of S × S elements is made, forward or backward, in the graph a rewrite leaves or inside the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from forms import FORMS
from forms.registry import _tensors, make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchflash
from torchflash import Rewritten

LINEAR = [
    "scale_on_query", "softcap", "scale_parameter_heads", "causal_triu_inf_added", "causal_triu_ones_bool",
    "causal_tutorial_subsequent", "causal_annotated_transformer", "causal_fairseq_fill_with_neg_inf",
    "causal_xtransformers", "causal_bottom_right_arange", "causal_one_minus_float", "gpt1_mul_mask_in_graph",
    "padding_bert_extended", "padding_bart_old", "padding_espnet", "padding_and_causal_llama",
    "padding_old_hf_combined_min", "padding_whole_inf_nan", "padding_query_mul_key_float", "sliding_window_gemma",
    "sliding_window_mistral_log", "block_causal_chunks", "dilated", "documents_cumsum_eos", "prefix_or",
    "global_tokens",
    "gqa_repeat_kv", "gqa_grouped_einsum", "mqa_gpt_bigcode", "shared_kv_2d", "einsum_heads_last",
    "transposed_everything", "ddpm_qkv_attention", "qkv_timm", "output_inplace_after", "by_hand_exp_where_zero_causal",
    "deferred_division_max", "log_softmax_exp", "post_mask_again_fill", "post_nan_to_num", "post_decay",
    "alibi_buffer", "alibi_abs_symmetric", "alibi_bloom_build", "kerple_log", "gaussian_distance_bias",
    "forgetting_transformer", "bias_h", "bias_bn", "bias_hm", "t5_buckets", "t5_decoder_buckets_mask",
    "relative_table_clamped", "relative_table_negative_indices", "scores_negative_distance", "dropout_train_module",
    "two_layers", "encoder_decoder", "inplace_chain", "checkpointed", "autocast_bf16_linear", "cache_cat_causal",
    "mask_cat_causal_blocks", "mask_cat_padded", "one_weights_two_values",
]  # fmt: skip
# the form is given, or asks for the gradient of, something of that size: it alone may exist
GIVEN = ["bias_hmn", "bias_mn", "bias_bhmn", "padding_opt_masked_fill_add", "relative_table_gather",
         "post_weights_of_position",
         "graphormer_bias"]  # fmt: skip


class Large(TorchDispatchMode):
    """Collects what is made with `limit` elements or more in storage not seen before."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.known: set[int] = set()
        self.made: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def allow(self, tensors: Any) -> None:
        self.known |= {t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes() // t.element_size() >= self.limit:
                if t.untyped_storage()._cdata not in self.known:
                    self.made.append(f"{func} {tuple(t.shape)}")
                    self.shapes.append(tuple(t.shape))
        return out


def large_tensors(name: str, length: int) -> Large:
    """What a training step of a form makes, on the rewritten graph run eagerly."""
    f = FORMS[name]
    fn, inputs = make(f, B=1, S=length)
    watch = Large(length * length)
    found: list[Rewritten] = []

    def backend(gm: Any, example: Any) -> Any:
        gm, report = torchflash.rewrite(gm)
        found.extend(r for r in report if isinstance(r, Rewritten))

        def run(*args: Any) -> Any:
            watch.allow(args)
            with watch:
                return gm(*args)

        return run

    torch._dynamo.reset()
    if isinstance(fn, nn.Module):
        watch.allow(fn.parameters())
    outputs = _tensors(torch.compile(fn, backend=backend)(*inputs))
    assert len(found) == f.blocks
    loss = sum(x.float().sum() for x in outputs if x.requires_grad)
    with watch:
        loss.backward()  # type: ignore[union-attr]
    return watch


@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LINEAR)
def test_nothing_is_quadratic(name: str, length: int) -> None:
    assert large_tensors(name, length).made == []


@pytest.mark.parametrize("name", [n for n in GIVEN if n in FORMS])
def test_only_gradients_of_what_is_given_are_quadratic(name: str) -> None:
    _, inputs = make(FORMS[name], B=1, S=512)
    given = {tuple(t.shape) for t in inputs if isinstance(t, Tensor) and t.numel() >= 512 * 512}
    assert given
    made = large_tensors(name, 512)
    assert set(made.shapes) <= given, made.made
