"""`benchmark.py train --mode dflash`: a training step of a draft, target included, against the usual way.

The other side is the same draft in plain torch (DFlashDraftModel of the package dflash 0.1.0 computes this), with a
ready-made dense mask of N·K queries against S + N·K keys and the logits of all of a block's guesses, beside a
transformers Llama as the target that returns all its hidden states. Same weights, anchors and optimizer.
"""

import functools
from pathlib import Path

from benchmark_sides import Batches, data_flags, share, shared, start

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
    args, tokenizer, model = start(
        f"""--dllm-mode dflash --dflash-target {folder}/target --num-layers {options.draft_layers}
        --dllm-block-size {options.block_size} --dflash-num-anchors {options.anchors} {data_flags(options, folder)}
        --dllm-mask-token-id {options.vocabulary - 2}"""
    )
    from megatron_dllm.modes import get_mode

    mode, batches, inputs = get_mode("dflash"), Batches(args, tokenizer, BATCHES), []
    for rows in batches:
        whole = mode.layout(rows, options.seq_length, args)
        term = whole.terms["dllm"]
        weights = term.weights_BQ / term.count
        inputs.append((whole.tokens_BQ, whole.position_ids_BQ, whole.attributes_BQA, term.targets_BQ, weights))
    share(dict(weights=draft_keys(model, options), batches=inputs, layers=args.dflash_target_layers), folder)
    terms_of = functools.partial(mode.loss, args=args)

    def loss(step):
        batch = batches[step]
        (term,) = model(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA, loss=terms_of, terms=batch.terms)
        return term.sum / batch.counts["dllm"]

    return model, loss, batches.figures


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

    given = shared(folder)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval().requires_grad_(False)
    names = {name: name.replace(".", "/") for name in given["weights"]}
    draft = torch.nn.ParameterDict({names[name]: weight for name, weight in given["weights"].items()})
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
    for tokens, positions, attributes, targets, weights in given["batches"]:
        allowed = dflash.visible(attributes[:, S:, None], attributes[:, None])
        guesses = torch.arange(targets.shape[1] - S) % options.block_size > 0
        batches.append((tokens, positions, allowed, targets[:, S:][:, guesses], weights[:, S:][:, guesses], guesses))

    def loss(step):
        tokens, positions, allowed, targets, weights, guesses = batches[step % BATCHES]
        with torch.no_grad():
            hidden = target(input_ids=tokens[:, :S], output_hidden_states=True, use_cache=False).hidden_states
            features = torch.cat([hidden[layer + 1] for layer in given["layers"]], dim=-1)
            embeddings = target.get_input_embeddings()(tokens[:, S:])
        own = {name: draft[key] for name, key in names.items()}
        out = plain_draft.hidden_states(own, config, features, embeddings, positions, allowed)
        logits = target.lm_head(out[:, guesses])
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (nll * weights.flatten()).sum()

    return draft, loss, {}
