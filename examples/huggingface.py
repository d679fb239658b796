"""A Hugging Face model by model.compile(backend="torchflash"): Trainer, LoRA by PEFT, generate() with a static cache.

    python examples/huggingface.py                 # all three, on a GPU or a CPU
    python examples/huggingface.py generate        # any of trainer, lora, generate

The model is a Llama built from a configuration with random parameters, so that nothing is downloaded. It uses the
attention that transformers writes out (attn_implementation="eager"), in float32, and each part runs it both ways.

model.compile() is nn.Module's own: it changes the module in place, and whoever calls the module later runs the compiled
one. That is the way into the Trainer as well: its argument torch_compile_backend goes through accelerate, which has a
list of backends and refuses every other name.

In generate(), the prompt and the single tokens are two shapes, hence two graphs. On a GPU, transformers compiles
decoding with a static cache by itself; a model that was compiled already keeps its backend there. To leave the prompt
eager and put decoding into CUDA graphs (--cuda-graphs), do not compile the model but say so to generate():

    model.generate(..., cache_implementation="static",
                   compile_config=CompileConfig(backend="torchflash", mode="reduce-overhead"))
"""

import argparse
import tempfile

import torch
import transformers
from train import batches, library_text
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria, Trainer, TrainingArguments

from torchflash.backend import torchflash


def llama(o):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=o.hidden,
        intermediate_size=3 * o.hidden,
        num_hidden_layers=o.layers,
        num_attention_heads=o.heads,
        num_key_value_heads=o.heads // 2,
        max_position_embeddings=o.length + o.new_tokens,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(o.device)


def compiled(model, o):
    """The model itself, from now on run by torchflash; the report starts afresh."""
    torch._dynamo.reset()
    model.compile(backend="torchflash", options={"torchflash.inner": o.inner})
    return model


def sequences(o):
    """Text as bytes, [steps, B, N]."""
    return torch.stack([tokens[:, :-1] for tokens in batches(library_text(1_000_000), o)])


def compare(losses):
    """Prints the losses of two runs side by side."""
    print(f"{'step':>6}" + "".join(f"{name:>12}" for name in losses))
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        print(f"{step:>6}" + "".join(f"{value:>12.5f}" for value in values))
    print(f"largest difference: {max(abs(a - b) for a, b in zip(*losses.values(), strict=True)):.1e}")


def by_trainer(o):
    """Trains by transformers' Trainer."""
    data = [{"input_ids": row, "labels": row} for row in sequences(o).flatten(0, 1)]
    losses = {}
    for name in ("eager", "torchflash"):
        model = compiled(llama(o), o) if name == "torchflash" else llama(o)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=o.steps,
                per_device_train_batch_size=o.batch,
                learning_rate=1e-3,
                logging_steps=1,
                use_cpu=o.device == "cpu",
                disable_tqdm=True,
                report_to="none",
                save_strategy="no",
            )
            trainer = Trainer(model, arguments, train_dataset=data)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        losses[name] = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    print(torchflash.report)
    compare(losses)


def by_lora(o):
    """Trains adapters of rank 8 in the projections of queries and values; all else stays as it is."""
    from peft import LoraConfig, get_peft_model

    losses = {}
    for name in ("eager", "torchflash"):
        model = get_peft_model(llama(o), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        if name == "torchflash":
            compiled(model, o)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        losses[name] = []
        for ids in sequences(o).to(o.device):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    print(torchflash.report)
    trained, total = model.get_nb_trainable_parameters()
    print(f"{trained} of {total} parameters are trained")
    compare(losses)


class GraphsCompiled(StoppingCriteria):
    """Stops nothing; notes after each token how many graphs Dynamo has compiled so far."""

    def __init__(self):
        self.counts = []

    def __call__(self, input_ids, scores, **kwargs):
        self.counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def by_generate(o):
    """Generates greedily with a static cache, twice, and compares the tokens with those of eager mode."""
    model = llama(o).eval()
    prompts = sequences(o)[:2].to(o.device)
    greedy = {"max_new_tokens": o.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = {**greedy, "cache_implementation": "static"}
    eager = [model.generate(ids, **static, disable_compile=True) for ids in prompts]

    model = llama(o).eval()
    if o.cuda_graphs:
        torch._dynamo.reset()
        static["compile_config"] = CompileConfig(backend="torchflash", mode="reduce-overhead")
    else:
        compiled(model, o)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seen = GraphsCompiled()
    ours = [model.generate(ids, stopping_criteria=[seen], **static) for ids in prompts]
    graphs = [count - before for count in seen.counts]

    print(torchflash.report)
    blocks = [record.q[2] == 1 for record in torchflash.report.rewritten]
    print(f"blocks rewritten: {blocks.count(False)} for the prompt, {blocks.count(True)} for decoding")
    print(f"graphs compiled: {graphs[0]} by the first token, {graphs[1]} by the second, {graphs[-1]} by the end")
    print(f"recompiled after the second token: {graphs[-1] - graphs[1]}")
    for which, (a, b) in zip(("first", "second"), zip(eager, ours, strict=True), strict=True):
        same = "equal eager's" if torch.equal(a, b) else f"differ from eager's in {(a != b).sum()} places"
        print(f"{which} call: {b.shape[1] - o.length} new tokens for each of {len(b)} prompts, {same}")


PARTS = {"trainer": by_trainer, "lora": by_lora, "generate": by_generate}


def options(arguments=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; default all")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--heads", type=int, default=4, help="of queries; keys and values have half as many")
    p.add_argument("--length", type=int, default=128, help="tokens in a sequence or prompt")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--new-tokens", type=int, default=32)
    p.add_argument("--cuda-graphs", action="store_true", help="let generate() compile decoding, into CUDA graphs")
    p.add_argument("--inner", default="inductor", help="what compiles the rest: inductor, aot_eager or eager")
    o = p.parse_args(arguments)
    if unknown := [part for part in o.parts if part not in PARTS]:
        p.error(f"unknown {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if o.steps < 2 or o.new_tokens < 3:
        p.error("--steps must be at least 2 and --new-tokens at least 3")
    if o.heads % 2 or o.hidden % o.heads:
        p.error(f"--heads {o.heads} must be even and divide --hidden {o.hidden}")
    if o.cuda_graphs and o.device == "cpu":
        p.error("--cuda-graphs needs a GPU; leave it out")
    return o


def main(arguments=None):
    o = options(arguments)
    transformers.logging.set_verbosity_error()
    for i, part in enumerate(o.parts):
        print(f"{'' if i == 0 else chr(10)}== {part}", flush=True)
        PARTS[part](o)


if __name__ == "__main__":
    main()
