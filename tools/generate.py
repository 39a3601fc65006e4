"""Writes text with a trained diffusion language model.

    python tools/generate.py --load checkpoints/run --prompt "Once upon a time" --max-new-tokens 64
    torchrun --nproc-per-node 2 tools/generate.py --tensor-model-parallel-size 2 --load ... --prompt ...
    python tools/generate.py --load checkpoints/run --infill --prompt "The capital of [MASK:7] is Paris."

The checkpoint may come from any parallel layout. A model trained on chat data answers through its chat
template; any other continues the text, as does every model with --raw. Answers appear in the order of the prompts, a
batch at a time.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.generation.config import REMASKING, GenerationConfig
from megatron_dllm.launch import quiet


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = GenerationConfig()
    add = parser.add_argument_group("model").add_argument
    add("--load", required=True, metavar="DIR", help="a run's folder, or an iter_ folder in it")
    add("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="processes that share the model")
    add("--tokenizer-model", metavar="PATH", help="where the tokenizer is now, if not where it was at training")
    add("--chat-template", metavar="FILE", help="where the chat template is now, or another one")
    add("--dllm-mask-token-id", type=int, metavar="ID", help="must be the id that the model was trained with")
    add("--bf16", action="store_true", help="compute in bf16; default: the precision of training")
    add("--trust-remote-code", action="store_true", help="run the Python code of a tokenizer that comes with some")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--messages-file", metavar="FILE", help='JSONL: a conversation {"messages": [...]} per line')
    add("--raw", action="store_true", help="continue the prompt as text, without a chat template")
    add("--infill", action="store_true", help="fill the gaps [MASK] and [MASK:length] of the prompts (as text)")
    add("--gap-length", type=int, default=default.gap_length, metavar="N", help="tokens of a [MASK] (%(default)s)")
    add = parser.add_argument_group("decoding").add_argument
    add("--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N", help="exactly so many (%(default)s)")
    add("--steps", type=int, default=default.steps, metavar="N", help="at most, over all blocks (%(default)s)")
    add("--gen-block-length", type=int, metavar="N", help="default 128; models trained in blocks write their own")
    add("--temperature", type=float, default=default.temperature, help="0 takes the likeliest token (%(default)s)")
    add("--remasking", choices=REMASKING, default=default.remasking, help="which tokens wait (%(default)s)")
    add("--threshold", type=float, help="also commit tokens at least this probable")
    add("--cfg-scale", type=float, default=default.cfg_scale, help="classifier-free guidance (%(default)s)")
    add("--stop-at-eos", action="store_true", help="finish an answer at its first EOS and fill up with EOS")
    add("--seed", type=int, default=default.seed, help="default %(default)s")
    add("--batch-size", type=int, default=default.batch_size, metavar="N", help="prompts at a time (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one object per prompt: text, ids, steps, ...")
    return parser.parse_args([_with_hyphens(word) for word in argv])


def _with_hyphens(word: str) -> str:
    """`--max_new_tokens=8` is `--max-new-tokens=8`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def read_conversations(path: str) -> list[list[dict]]:
    """ValueError naming the line that holds no conversation."""
    from megatron_dllm.data.messages import check_messages, read_json

    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--messages-file {path} cannot be read ({error}): correct the path.") from error
    conversations = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = read_json(line)
            messages = record.get("messages") if isinstance(record, dict) else record
            check_messages(messages, training=False)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        conversations.append(messages)
    return conversations


def collect_prompts(options: argparse.Namespace, chat: bool) -> list:
    """What `generate` takes, in the order given. chat: the model was trained on conversations."""
    if options.messages_file and (options.raw or options.infill):
        raise ValueError("--messages-file needs the chat template: leave out --raw and --infill.")
    prompts = list(options.prompt)
    if chat and not options.raw and not options.infill:
        prompts = [[dict(role="user", content=text)] for text in prompts]
    if options.messages_file:
        prompts += read_conversations(options.messages_file)
    if not prompts:
        raise ValueError("there is nothing to generate from: give --prompt or --messages-file.")
    return prompts


def quietly(completions: Iterator) -> Iterator:
    """The same ones, each computed in `quiet`."""
    while True:
        with quiet():
            completion = next(completions, None)
        if completion is None:
            return
        yield completion


def main() -> None:
    options = parse_args(sys.argv[1:])
    names = GenerationConfig.__dataclass_fields__
    try:
        config = GenerationConfig(**{name: value for name, value in vars(options).items() if name in names})
        with quiet():
            from megatron_dllm.generation import check_sampler, stream
            from megatron_dllm.generation.load import build, plan
            from megatron_dllm.generation.prompts import build_canvases

            planned = plan(
                options.load,
                step=options.ckpt_step,
                tensor_model_parallel_size=options.tensor_model_parallel_size,
                tokenizer_model=options.tokenizer_model,
                chat_template=options.chat_template,
                mask_token_id=options.dllm_mask_token_id,
                bf16=options.bf16,
                trust_remote_code=options.trust_remote_code,
            )
        args, tokenizer = planned.args, planned.tokenizer
        check_sampler(args, config, tokenizer)
        prompts = collect_prompts(options, chat=args.sft_data_path is not None)
        build_canvases(prompts, tokenizer, config, args.dllm_mask_token_id, args.max_position_embeddings)
    except ValueError as error:
        fail(error)
    with quiet():
        loaded = build(planned)
        completions = stream(loaded.model, tokenizer, prompts, config)
    for number, completion in enumerate(quietly(completions)):
        if int(os.environ.get("RANK", "0")) > 0:
            continue  # but every rank goes through every batch
        if options.json:
            print(json.dumps(vars(completion), ensure_ascii=False), flush=True)
        else:
            print(("\n" if number else "") + completion.text, flush=True)
    import torch

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
