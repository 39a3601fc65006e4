"""Measure this code against the usual way, in one run, on the same weights and the same batch.

    python tools/benchmark.py train [--mode mdlm --layers 4 --hidden 256 --vocabulary 32000 --seq-length 512 --batch 16]

`train`: one training step (forward, backward, AdamW). The usual way is a plain `transformers` Llama on the same input
(of a two-stream mode the 2L concatenated tokens) with a full 4-D additive mask, ready-made, logits of all positions
and cross entropy over them, as the reference recipes train.
Each side is a process of its own, so that its peak memory is its own; their steps alternate, so that whatever
else the machine does hits both. Before anything is timed, loss and gradient norm of both must agree.

`generate`: whole answers of a sampler against its published loop (benchmark_generate.py).

`attention`: attention alone under a mode's rule, forward and backward, in tiles against a ready-made dense mask (CPU).
"""

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import benchmark_dflash
import benchmark_gemma
import benchmark_generate
from benchmark_sides import Batches, data_flags, share, shared, start

MODES = ["mdlm", "bd3lm", "hybrid", "idlm", "dflash", "block_diffusion"]
USUAL = dict(dflash="draft in plain torch", block_diffusion="transformers DiffusionGemma, all blocks")
BATCHES = 4  # different ones, taken in turn: the share of scored rows varies with the noise level
# relative, of loss and gradient norm between the two sides, in fp32; DiffusionGemma's network amplifies rounding
TOLERANCE = 1e-4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "command",
        choices=["train", "generate", "attention"],
        help="a training step, or an answer, against a transformers Llama; attention in tiles against a dense mask",
    )
    parser.add_argument("--sampler", choices=sorted(benchmark_generate.MODES), default="llada2", help="Of generate.")
    parser.add_argument("--prompt", type=int, default=32, metavar="TOKENS", help="generate: length of the prompt.")
    parser.add_argument("--new", type=int, default=256, metavar="TOKENS", help="generate: length of the answer.")
    parser.add_argument("--rounds", type=int, default=3, help="generate: answers of each side.")
    parser.add_argument("--no-cache", dest="cache", action="store_false", help="generate: without our cache.")
    parser.add_argument("--document-length", type=int, default=None, help="attention: pack documents of this length.")
    parser.add_argument("--mode", choices=MODES, default="mdlm")
    parser.add_argument("--block-size", type=int, default=32, help="Of the modes that have blocks.")
    parser.add_argument("--draft-layers", type=int, default=5, help="dflash: of the draft; released ones have 5.")
    parser.add_argument("--anchors", type=int, default=32, help="dflash: blocks of a sequence.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=None, help="Sequences at a time; 16, of generate 1.")
    parser.add_argument("--steps", type=int, default=12, help="Timed steps of each side, after two to warm up.")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.batch = options.batch or (1 if options.command == "generate" else 16)
    return options


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(options, folder: Path):
    """This code: the real data path and model on one process. Returns the model, its loss of a step and figures."""
    from megatron_dllm.modes import get_mode

    mode = get_mode(options.mode)
    blocks = f"--dllm-block-size {options.block_size}" if "dllm_block_size" in mode.USES else ""
    args, tokenizer, model = start(
        f"""--dllm-mode {options.mode} {blocks} {data_flags(options, folder)}
        --num-layers {options.layers} --hidden-size {options.hidden} --ffn-hidden-size {options.ffn}
        --num-attention-heads {options.heads} --vocab-size {options.vocabulary}
        --dllm-mask-token-id {options.vocabulary - 2}"""
    )
    batches = Batches(args, tokenizer, BATCHES)
    inputs = [for_the_other_side(mode, rows, options, args) for rows in batches]
    share(dict(weights=model.state_dict(), batches=inputs), folder)
    loss_terms = functools.partial(mode.loss, args=args)

    def loss(step):
        batch = batches[step]
        terms = model(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA, loss=loss_terms, terms=batch.terms)
        return sum(term.weight * term.sum / batch.counts[term.counted] for term in terms)

    return model, loss, batches.figures


def for_the_other_side(mode, rows, options, args) -> tuple:
    """(tokens, positions, additive mask, targets, weights) over Q = streams · L positions, as plain tensors."""
    import torch

    whole = mode.layout(rows, options.seq_length, args)
    attributes = whole.attributes_BQA[:1]  # of full single documents: the same in every row
    allowed = mode.visible(attributes[:, :, None], attributes[:, None])
    mask = torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))[:, None]
    score = types.SimpleNamespace(weighted_nll=lambda name: torch.tensor(0.0))
    targets, weights = torch.zeros_like(whole.tokens_BQ), torch.zeros(whole.tokens_BQ.shape)
    for part in mode.loss(score, args):  # no position is scored by two terms
        term = whole.terms[part.name]
        targets += term.targets_BQ * (term.weights_BQ > 0)
        weights += part.weight * term.weights_BQ / term.count
    return whole.tokens_BQ, whole.position_ids_BQ, mask, targets, weights


def usual(options, folder: Path):
    """A plain transformers Llama, dense mask, all logits, cross entropy, weighted and divided the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given = shared(folder)
    h, n = options.hidden, options.heads
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=h,
            intermediate_size=options.ffn,
            num_hidden_layers=options.layers,
            num_attention_heads=n,
            num_key_value_heads=n,
            max_position_embeddings=4 * options.seq_length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    model.load_state_dict(llama_keys(given["weights"], options.layers, n, h // n))
    batches = given.pop("batches")

    def loss(step):
        tokens, positions, mask, targets, weights = batches[step % BATCHES]
        mask = mask.expand(options.batch, -1, -1, -1)
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (nll * weights.flatten()).sum()

    return model, loss, {}


def llama_keys(weights: dict, layers: int, heads: int, d: int) -> dict:
    """Our parameters under transformers' Llama names (no grouped heads): [q;k;v] per head, [gate;up]."""
    out = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
        "lm_head.weight": weights["output_layer.weight"],
    }
    for i in range(layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        qkv = weights[ours + "self_attention.linear_qkv.weight"].view(heads, 3, d, -1)
        for j, name in enumerate("qkv"):
            out[f"{theirs}self_attn.{name}_proj.weight"] = qkv[:, j].flatten(0, 1)
        out[theirs + "self_attn.o_proj.weight"] = weights[ours + "self_attention.linear_proj.weight"]
        gate, up = weights[ours + "mlp.linear_fc1.weight"].chunk(2)
        out[theirs + "mlp.gate_proj.weight"], out[theirs + "mlp.up_proj.weight"] = gate, up
        out[theirs + "mlp.down_proj.weight"] = weights[ours + "mlp.linear_fc2.weight"]
        out[theirs + "input_layernorm.weight"] = weights[ours + "input_layernorm.weight"]
        out[theirs + "post_attention_layernorm.weight"] = weights[ours + "pre_mlp_layernorm.weight"]
    return out


def side(build, options, folder: Path, pipe) -> None:
    """One side's process: answers every request with the seconds of one step."""
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints its arguments
    import torch

    torch.set_num_threads(options.threads)
    model, loss, extra = build(options, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    start_mib = peak_mib()
    value = loss(0)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    pipe.send(dict(loss=value.item(), norm=norm.item(), **extra))
    while (step := pipe.recv()) is not None:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pipe.send(time.perf_counter() - start)
    pipe.send(dict(start_mib=start_mib, peak_mib=peak_mib()))


def train(options) -> int:
    # spawn: neither side inherits the other's memory
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dllm_benchmark_") as folder:
        pipes, processes = {}, []
        sides = dict(ours=ours, usual=usual)
        if options.mode == "dflash":
            benchmark_dflash.write_target(options, Path(folder))
            sides = dict(ours=benchmark_dflash.ours, usual=benchmark_dflash.usual)
        if options.mode == "block_diffusion":
            benchmark_gemma.write_model(options, Path(folder))
            sides = dict(ours=benchmark_gemma.ours, usual=benchmark_gemma.usual)
        for name, build in sides.items():
            pipes[name], there = context.Pipe()
            processes.append(context.Process(target=side, args=(build, options, Path(folder), there), daemon=True))
            processes[-1].start()
            there.close()
        try:
            first = {name: pipe.recv() for name, pipe in pipes.items()}
            for key in ("loss", "norm"):
                a, b = first["ours"][key], first["usual"][key]
                if abs(a - b) > (10 if options.mode == "block_diffusion" else 1) * TOLERANCE * abs(b):
                    print(f"the two sides disagree: {key} {a} against {b}", file=sys.stderr)
                    return 1
            seconds = {name: [] for name in pipes}
            for step in range(options.steps + 2):
                for name in pipes if step % 2 else reversed(pipes):
                    pipes[name].send(step)
                    seconds[name].append(pipes[name].recv())
            for pipe in pipes.values():
                pipe.send(None)
            memory = {name: pipe.recv() for name, pipe in pipes.items()}
        except EOFError:
            print("a side of the benchmark died; its error is above.", file=sys.stderr)
            return 1
    report(options, first, {name: times[2:] for name, times in seconds.items()}, memory)
    return 0


def attention(options) -> int:
    """Processor time of one attention in tiles and with a dense mask, interleaved, after comparing their gradients."""
    importlib.import_module("megatron_dllm")
    import torch

    from megatron_dllm.models.tiled import make_plan, tiled_attention
    from megatron_dllm.modes import get_mode
    from megatron_dllm.modes.base import BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM

    torch.set_num_threads(options.threads)
    L, d, rule = options.seq_length, options.hidden // options.heads, get_mode(options.mode).visible
    streams = [NOISY] if options.mode == "mdlm" else [NOISY, CLEAN]
    place = torch.arange(L).repeat(len(streams))
    document = place // (options.document_length or L)
    attributes = torch.zeros(1, len(place), NUM_ATTRIBUTES, dtype=torch.int32)
    attributes[0, :, STREAM] = torch.tensor(streams).repeat_interleave(L)
    attributes[0, :, POSITION] = place % (options.document_length or L)
    attributes[0, :, BLOCK] = attributes[0, :, POSITION] // options.block_size
    attributes[0, :, DOCUMENT] = document

    def dense_mask():
        allowed = rule(attributes[:, :, None], attributes[:, None])
        return torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))[:, None]

    def run(attend):
        out = attend(*inputs)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    def processor_ms(work) -> float:
        start = time.process_time()
        work()
        return (time.process_time() - start) * 1e3

    shape = (len(place), options.batch, options.heads, d)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    make = lambda: make_plan(rule, attributes, slice(None), torch.float32)
    plan, mask = make(), dense_mask()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with_mask = lambda *x: sdpa(*(part.permute(1, 2, 0, 3) for part in x), attn_mask=mask).permute(2, 0, 1, 3)
    sides = {
        "dense": lambda: run(with_mask),
        "tiles": lambda: run(lambda *x: tiled_attention(*x, plan)),
        "making the dense mask": dense_mask,
        "making the plan": make,
    }
    worst = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(sides["tiles"](), sides["dense"](), strict=True)
    )
    if worst > TOLERANCE:
        print(f"the two sides disagree by {worst}", file=sys.stderr)
        return 1
    times = {name: [] for name in sides}
    for _ in range(options.steps):
        for name, side in sides.items():
            times[name].append(processor_ms(side))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"attention of {options.mode}: {len(place)} x {options.batch} positions, {options.heads} heads of {d}, fp32, "
        f"{options.threads} threads; processor time in ms, medians of {options.steps} rounds"
    )
    for name, value in medians.items():
        print(f"{name}: {value:.0f}")
    print(f"dense / tiles {medians['dense'] / medians['tiles']:.2f}")
    return 0


def report(options, first, seconds, memory) -> None:
    tokens = options.batch * options.seq_length
    print(
        f"{options.mode} step: {options.layers} layers, width {options.hidden}, vocabulary {options.vocabulary}, "
        f"{options.seq_length} x {options.batch} tokens ({first['ours']['scored']:.0f} scored on average), fp32, "
        f"{options.threads} threads, {options.steps} steps of each side"
    )
    for key, label in (("loss", "loss"), ("norm", "gradient norm")):
        print(f"{label}: this code {first['ours'][key]:.6f}, usual way {first['usual'][key]:.6f}")
    grown = {name: m["peak_mib"] - m["start_mib"] for name, m in memory.items()}
    print("| | ms a step | tokens/s | peak MiB | of it above start |")
    print("|---|---|---|---|---|")
    for name, label in (("usual", USUAL.get(options.mode, "transformers Llama, all logits")), ("ours", "this code")):
        mean = statistics.mean(seconds[name])
        cells = (mean * 1e3, tokens / mean, memory[name]["peak_mib"], grown[name])
        print(f"| {label} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    share = first["ours"]["assembly"] / statistics.mean(seconds["ours"])
    result = dict(
        speedup=sum(seconds["usual"]) / sum(seconds["ours"]),
        memory=memory["ours"]["peak_mib"] / memory["usual"]["peak_mib"],
        memory_above_start=grown["ours"] / grown["usual"],
        batch_assembly=share,
    )
    print(
        f"speed-up {result['speedup']:.2f}, peak memory {result['memory']:.2f} (above start "
        f"{result['memory_above_start']:.2f}), corruption and batch assembly {100 * share:.2f} % of a step"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    options = parse()
    sys.exit(dict(train=train, generate=benchmark_generate.generate, attention=attention)[options.command](options))
