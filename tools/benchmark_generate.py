"""`benchmark.py generate`: whole answers of this code's samplers against the published loops over a transformers Llama.

The other side recomputes what it is shown in every step and takes the logits of all of it, as the published reference
loops do (LLaDA's generate.py: the whole canvas, softmax in float64; LLaDA2.0's, and an uncached Nemotron loop: all
up to the end of the block, softmax of the block). Same weights, same prompt, greedy, one token a step; each side is a
process of its own, and their answers alternate and must be the same tokens.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmark_sides import share, shared, start

MODES = {"llada": "mdlm", "llada2": "bd3lm", "nemotron": "hybrid"}
WIDE = 0.08  # standard deviation of the weights: at the usual 0.02 all tokens are nearly equally likely


def ours(options, folder: Path):
    """This code's model and sampler. Returns write() -> (ids, forwards)."""
    from benchmark import llama_keys

    mode = MODES[options.sampler]
    blocks = "" if mode == "mdlm" else f"--dllm-block-size {options.block_size}"
    _, tokenizer, model = start(
        f"""--dllm-mode {mode} {blocks}
        --num-layers {options.layers} --hidden-size {options.hidden} --ffn-hidden-size {options.ffn}
        --num-attention-heads {options.heads} --seq-length {options.prompt + options.new} --micro-batch-size 1
        --train-iters 1 --lr 1e-3 --sft-data-path none --tokenizer-type NullTokenizer --init-method-std {WIDE}
        --vocab-size {options.vocabulary} --dllm-mask-token-id {options.vocabulary - 2}
        --make-vocab-size-divisible-by 1"""
    )
    from megatron_dllm.generation import GenerationConfig, generate

    model = model.eval()
    share(llama_keys(model.state_dict(), options.layers, options.heads, options.hidden // options.heads), folder)
    config = GenerationConfig(
        max_new_tokens=options.new,
        gen_block_length=options.block_size,
        batch_size=options.batch,
        cache="auto" if options.cache else "none",
    )

    def write():
        done = generate(model, tokenizer, prompts(options), config)
        return [completion.ids for completion in done], done[0].forwards

    return write


def prompts(options) -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, options.vocabulary - 2, (options.batch, options.prompt), generator=draw).tolist()


def usual(options, folder: Path):
    """The published loop over a transformers Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given = shared(folder)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=options.ffn,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.heads,
            max_position_embeddings=options.prompt + options.new,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).eval()
    model.load_state_dict(given)
    loop = dict(llada=published_llada, llada2=published_llada2, nemotron=uncached_nemotron)[options.sampler]
    mask_id = options.vocabulary - 2

    def write():
        with torch.no_grad():
            answers = [loop(model, prompt, options.new, options.block_size, mask_id) for prompt in prompts(options)]
        return [tokens[options.prompt :].tolist() for tokens, _ in answers], answers[0][1]

    return write


def logits_of(model, tokens, allowed):
    """[n, V] of all tokens shown; allowed [n, n] bool, or None for all."""
    import torch

    n = len(tokens)
    mask = torch.zeros(1, 1, n, n)
    if allowed is not None:
        mask = mask.masked_fill(~allowed, float("-inf"))
    return model(input_ids=tokens[None], attention_mask=mask, use_cache=False).logits[0]


def commit_best(tokens, places, logits, mask_id, double):
    """Write the most probable token of these places, whichever of them is the surest."""
    logits = logits.clone()
    p = (logits.double() if double else logits).softmax(-1)
    logits[:, mask_id] = float("-inf")
    x0 = logits.argmax(-1)
    trust = p.gather(-1, x0[:, None])[:, 0].masked_fill(tokens[places] != mask_id, -1.0)
    best = trust.argmax()
    tokens[places[best]] = x0[best]


def canvas(prompt, new, mask_id):
    import torch

    return torch.tensor(prompt + [mask_id] * new)


def published_llada(model, prompt, new, length, mask_id):
    import torch

    tokens, forwards = canvas(prompt, new, mask_id), 0
    for first in range(len(prompt), len(tokens), length):
        last = min(first + length, len(tokens))
        while (tokens[first:last] == mask_id).any():
            logits, forwards = logits_of(model, tokens, None), forwards + 1
            visible = torch.arange(len(tokens))
            shown = tokens.clone()
            shown[last:] = -1  # later blocks wait
            commit_best(shown, visible, logits, mask_id, double=True)
            tokens[first:last] = shown[first:last]
    return tokens, forwards


def published_llada2(model, prompt, new, length, mask_id):
    import torch

    tokens, forwards = canvas(prompt, new, mask_id), 0
    block = torch.arange(len(tokens)) // length
    for number in range(len(prompt) // length, int(block[-1]) + 1):
        first, last = max(number * length, len(prompt)), min((number + 1) * length, len(tokens))
        allowed = block[:last, None] >= block[None, :last]
        while (tokens[first:last] == mask_id).any():
            logits, forwards = logits_of(model, tokens[:last], allowed), forwards + 1
            commit_best(tokens, torch.arange(first, last), logits[first:last], mask_id, double=False)
    return tokens, forwards


def uncached_nemotron(model, prompt, new, length, mask_id):
    import torch

    tokens, forwards = canvas(prompt, new, mask_id), 0
    for first in range(len(prompt), len(tokens), length):
        last = min(first + length, len(tokens))
        place = torch.arange(last)
        logits = logits_of(model, tokens[:first], place[:first, None] >= place[:first])[-1]
        logits[mask_id] = float("-inf")
        tokens[first] = logits.argmax()
        allowed = (place[:, None] >= place) | (place[:, None] >= first)
        forwards += 1
        while (tokens[first:last] == mask_id).any():
            logits, forwards = logits_of(model, tokens[:last], allowed), forwards + 1
            commit_best(tokens, torch.arange(first, last), logits[first:last], mask_id, double=True)
    return tokens, forwards


def side(build, options, folder: Path, pipe) -> None:
    """One side's process: answers every request with a whole generation."""
    from benchmark import peak_mib

    os.environ["PYTHONWARNINGS"] = "ignore"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import torch

    torch.set_num_threads(options.threads)
    write = build(options, folder)
    start_mib = peak_mib()
    while pipe.recv() is not None:
        start = time.perf_counter()
        ids, forwards = write()
        pipe.send((time.perf_counter() - start, ids, forwards))
    pipe.send(dict(start_mib=start_mib, peak_mib=peak_mib()))


def generate(options) -> int:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dllm_benchmark_") as folder:
        pipes = {}
        for name, build in (("ours", ours), ("usual", usual)):
            pipes[name], there = context.Pipe()
            context.Process(target=side, args=(build, options, Path(folder), there), daemon=True).start()
            there.close()
        seconds, forwards = {name: [] for name in pipes}, {}
        try:
            for turn in range(options.rounds):
                answers = {}
                for name in pipes if turn % 2 else reversed(pipes):
                    pipes[name].send(turn)
                    took, answers[name], forwards[name] = pipes[name].recv()
                    seconds[name].append(took)
                if answers["ours"] != answers["usual"]:
                    print("the two sides write different tokens", file=sys.stderr)
                    return 1
            for pipe in pipes.values():
                pipe.send(None)
            memory = {name: pipe.recv() for name, pipe in pipes.items()}
        except EOFError:
            print("a side of the benchmark died; its error is above.", file=sys.stderr)
            return 1
    report(options, seconds, forwards, memory)
    return 0


def report(options, seconds, forwards, memory) -> None:
    print(
        f"{options.sampler}: {options.batch} prompts of {options.prompt} tokens, {options.new} new, blocks of "
        f"{options.block_size}; {options.layers} layers, width {options.hidden}, vocabulary {options.vocabulary}, "
        f"fp32, {options.threads} threads, medians of {options.rounds}; the same tokens"
    )
    print("| | seconds | tokens/s | forwards | peak MiB | of it above start |")
    print("|---|---|---|---|---|---|")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    grown = {name: m["peak_mib"] - m["start_mib"] for name, m in memory.items()}
    for name, label in (("usual", "published loop, transformers Llama"), ("ours", "this code")):
        speed = options.batch * options.new / median[name]
        cells = f"{median[name]:.1f} | {speed:.1f} | {forwards[name]} | {memory[name]['peak_mib']:.0f}"
        print(f"| {label} | {cells} | {grown[name]:.0f} |")
    result = dict(
        speedup=median["usual"] / median["ours"],
        memory=memory["ours"]["peak_mib"] / memory["usual"]["peak_mib"],
        memory_above_start=grown["ours"] / grown["usual"],
    )
    print(
        f"speed-up {result['speedup']:.2f}, peak memory {result['memory']:.2f} (above start "
        f"{result['memory_above_start']:.2f})"
    )
    print(json.dumps(result))
