"""Text from a diffusion language model.

    from megatron_dllm.generation import GenerationConfig, generate
    from megatron_dllm.generation.load import load

    loaded = load("checkpoints/run")
    for completion in generate(loaded.model, loaded.tokenizer, ["Once upon"], GenerationConfig(max_new_tokens=64)):
        print(completion.text)

`stream` yields them a batch at a time. One file per decoding loop, a kind of row (`rows.py`); a loop asks the mode's
`reverse` what to commit in a step, and `samplers.py` says which loop fits which model.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import batched

import torch
from megatron.training import get_args

from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.generation import dflash
from megatron_dllm.generation.config import Completion, GenerationConfig
from megatron_dllm.generation.network import Network
from megatron_dllm.generation.prompts import BLANK, Canvas, Prompt, build_canvases
from megatron_dllm.generation.rows import Decoding, Row, run
from megatron_dllm.generation.samplers import check_canvases, check_sampler, row_type
from megatron_dllm.generation.streaming import spoken
from megatron_dllm.modes import get_mode

__all__ = ["Completion", "GenerationConfig", "Prompt", "check_sampler", "generate", "stream"]

Observe = Callable[[Sequence[Row]], None]


def generate(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig | None = None,
) -> list[Completion]:
    """One completion per prompt; each is what the prompt would get alone.

    model: a DiffusionLM, or this rank's part of it (tensor and pipeline parallel), bare or wrapped; its mode, mask
    token and number of positions are those of Megatron's arguments, as at training. Call it on every rank with the
    same prompts: all return the same.
    Raises ValueError (one sentence) for prompts or options that do not fit the model.
    """
    return list(stream(model, tokenizer, prompts, config))


def prepare(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, config: GenerationConfig, args, names: Sequence[str] | None = None
) -> list[Canvas]:
    """The canvases of a run with `args`; ValueError as `generate` raises it, before there is a model. names: what it
    calls the prompts."""
    check_sampler(args, config, tokenizer)
    canvases = build_canvases(prompts, tokenizer, config, _mask_id(args), args.max_position_embeddings, names)
    check_canvases(canvases, args, config)
    return canvases


def _mask_id(args) -> int | None:
    """The mask token of a model's noise; None if its noise has none, whatever its tokenizer has."""
    return args.dllm_mask_token_id if get_mode(args.dllm_mode).NEEDS_MASK_TOKEN else None


def stream(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig | None = None,
    observe: Observe | None = None,
) -> Iterator[Completion]:
    """The completions of `generate`, in the prompts' order, as soon as their batch of `config.batch_size` is done.

    observe: called after every step with the rows that took part. Every rank must exhaust the iterator. Raises
    ValueError as `generate` does, at the call.
    """
    config = config or GenerationConfig()
    args = get_args()
    canvases = prepare(prompts, tokenizer, config, args)
    if args.context_parallel_size > 1 or args.sequence_parallel or args.virtual_pipeline_model_parallel_size:
        raise ValueError("generation needs whole sequences: no context parallelism, VPP or --sequence-parallel.")
    return _batches(model, tokenizer, canvases, config, args, observe)


def _batches(
    model: torch.nn.Module, tokenizer: Tokenizer, canvases: list[Canvas], config: GenerationConfig, args, observe
) -> Iterator[Completion]:
    mode = get_mode(args.dllm_mode)
    if args.dllm_mode == "dflash":
        write, network = dflash.run, dflash.Pair(model, tokenizer.vocab_size, args.dllm_mask_token_id)
    else:
        write, network = run, Network(model, tokenizer.vocab_size, mode.FULL_WITHIN_DOCUMENT)
    mask_id = BLANK if _mask_id(args) is None else args.dllm_mask_token_id
    decoding = Decoding(config, mode.reverse, mask_id, tokenizer.eos_id, tokenizer.vocab_size, args)
    make = row_type(args, config)
    for batch in batched(canvases, max(1, min(config.batch_size, len(canvases)))):  # it makes room for so many
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                rows = [make(canvas, decoding) for canvas in batch]
                write(rows, network, observe)
        finally:
            model.train(was_training)
        yield from (completion_of(row, tokenizer, config) for row in rows)


def completion_of(row: Row, tokenizer: Tokenizer, config: GenerationConfig) -> Completion:
    ids = row.tokens[row.start :].tolist()
    return Completion(
        text=tokenizer.decode(spoken(ids, tokenizer.eos_id, config.infill)),
        ids=ids,
        steps=row.steps,
        forwards=row.forwards,
        tokens_per_second=int((~row.given).sum()) / max(row.seconds, 1e-9),
    )
