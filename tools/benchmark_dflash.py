"""`benchmark.py train --mode dflash`: a training step of a draft, target included, against the usual way.

The other side is the same draft in plain torch (DFlashDraftModel of the package dflash 0.1.0 computes this), with a
ready-made dense mask of N·K queries against S + N·K keys and the logits of all of a block's guesses, beside a
transformers Llama as the target that returns all its hidden states. Same weights, anchors and optimizer.
"""

import functools
import importlib
import os
import statistics
import sys
import time
from pathlib import Path

BATCHES = 2


def write_target(options, folder: Path) -> None:
    """A small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=2 * options.seq_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")


def ours(options, folder: Path):
    importlib.import_module("megatron_dllm")
    import torch
    from benchmark import write_corpus
    from megatron.core.datasets.utils import Split
    from megatron.training.initialize import initialize_megatron

    from megatron_dllm.arguments import parse_arguments
    from megatron_dllm.data.datasets import build_datasets
    from megatron_dllm.data.stream import Collate, CorruptedSamples
    from megatron_dllm.launch import default_to_one_process
    from megatron_dllm.modes import get_mode
    from megatron_dllm.training import install, model_provider

    default_to_one_process()
    sys.argv = [
        "benchmark",
        *f"""--dllm-mode dflash --dflash-target {folder}/target --num-layers {options.draft_layers}
        --dllm-block-size {options.block_size} --dflash-num-anchors {options.anchors}
        --seq-length {options.seq_length} --micro-batch-size {options.batch} --train-iters 1 --lr 1e-3
        --data-path {write_corpus(options, folder)} --split 100,0,0 --tokenizer-type NullTokenizer
        --dllm-verify-peers 0 --dllm-mask-token-id {options.vocabulary - 2}
        --make-vocab-size-divisible-by 1""".split(),
    ]
    args, tokenizer = parse_arguments()
    install()
    initialize_megatron(allow_no_cuda=not torch.cuda.is_available())
    mode, model = get_mode("dflash"), model_provider()
    samples = CorruptedSamples(build_datasets(args, tokenizer).train, args, Split.train)
    collate = Collate(args, 1, 0)
    batches, shared, seconds = [], [], []
    for i in range(BATCHES):
        start = time.perf_counter()
        rows = [samples[i * options.batch + j] for j in range(options.batch)]
        batches.append(collate(rows))
        seconds.append(time.perf_counter() - start)
        whole = mode.layout(rows, options.seq_length, args)
        term = whole.terms["dllm"]
        shared.append(
            (
                whole.tokens_BQ,
                whole.position_ids_BQ,
                whole.attributes_BQA,
                term.targets_BQ,
                term.weights_BQ / term.count,
            )
        )
    weights = draft_keys(model, options)
    torch.save(dict(weights=weights, batches=shared, layers=args.dflash_target_layers), folder / "shared.tmp")
    os.replace(folder / "shared.tmp", folder / "shared")
    terms_of = functools.partial(mode.loss, args=args)

    def loss(step):
        batch = batches[step % BATCHES]
        (term,) = model(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA, loss=terms_of, terms=batch.terms)
        return term.sum / batch.counts["dllm"]

    scored = sum(len(batch.terms["dllm"].rows_N) for batch in batches) / BATCHES
    return model, loss, dict(assembly=statistics.median(seconds), scored=scored)


def draft_keys(model, options) -> dict:
    """The draft's parameters under the names of its folder (no grouped heads): [q;k;v] per head, [gate;up]."""
    weights, d = model.state_dict(), options.hidden // options.heads
    out = {
        "fc.weight": weights["fc.weight"],
        "hidden_norm.weight": weights["hidden_norm.weight"],
        "norm.weight": weights["decoder.final_layernorm.weight"],
    }
    for i in range(options.draft_layers):
        ours, theirs = f"decoder.layers.{i}.", f"layers.{i}."
        attention = ours + "self_attention."
        qkv = weights[attention + "linear_qkv.weight"].view(options.heads, 3, d, -1)
        for j, name in enumerate("qkv"):
            out[f"{theirs}self_attn.{name}_proj.weight"] = qkv[:, j].flatten(0, 1)
        for name in "qk":
            out[f"{theirs}self_attn.{name}_norm.weight"] = weights[f"{attention}{name}_layernorm.weight"]
        out[theirs + "self_attn.o_proj.weight"] = weights[attention + "linear_proj.weight"]
        gate, up = weights[ours + "mlp.linear_fc1.weight"].chunk(2)
        out[theirs + "mlp.gate_proj.weight"], out[theirs + "mlp.up_proj.weight"] = gate, up
        out[theirs + "mlp.down_proj.weight"] = weights[ours + "mlp.linear_fc2.weight"]
        out[theirs + "input_layernorm.weight"] = weights[ours + "input_layernorm.weight"]
        out[theirs + "post_attention_layernorm.weight"] = weights[ours + "pre_mlp_layernorm.weight"]
    return {name: weight.clone() for name, weight in out.items()}


def usual(options, folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_dllm.conversion import plain_draft
    from megatron_dllm.modes import dflash

    while not (folder / "shared").exists():
        time.sleep(0.05)
    shared = torch.load(folder / "shared", weights_only=False)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval().requires_grad_(False)
    names = {name: name.replace(".", "/") for name in shared["weights"]}
    draft = torch.nn.ParameterDict({names[name]: weight for name, weight in shared["weights"].items()})
    heads, S = options.heads, options.seq_length
    config = dict(
        hidden_size=options.hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=options.hidden // heads,
        num_hidden_layers=options.draft_layers,
        rms_norm_eps=1e-5,
        vocab_size=options.vocabulary,
        max_position_embeddings=2 * S,
    )
    batches = []
    for tokens, positions, attributes, targets, weights in shared["batches"]:
        allowed = dflash.visible(attributes[:, S:, None], attributes[:, None])
        guesses = torch.arange(targets.shape[1] - S) % options.block_size > 0
        batches.append((tokens, positions, allowed, targets[:, S:][:, guesses], weights[:, S:][:, guesses], guesses))

    def loss(step):
        tokens, positions, allowed, targets, weights, guesses = batches[step % BATCHES]
        with torch.no_grad():
            hidden = target(input_ids=tokens[:, :S], output_hidden_states=True, use_cache=False).hidden_states
            features = torch.cat([hidden[layer + 1] for layer in shared["layers"]], dim=-1)
            embeddings = target.get_input_embeddings()(tokens[:, S:])
        own = {name: draft[key] for name, key in names.items()}
        out = plain_draft.hidden_states(own, config, features, embeddings, positions, allowed)
        logits = target.lm_head(out[:, guesses])
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (nll * weights.flatten()).sum()

    return draft, loss, {}
