"""Text from a diffusion language model.

    from megatron_dllm.generation import GenerationConfig, generate
    from megatron_dllm.generation.load import load

    loaded = load("checkpoints/run")
    for completion in generate(loaded.model, loaded.tokenizer, ["Once upon"], GenerationConfig(max_new_tokens=64)):
        print(completion.text)

`stream` yields them a batch at a time. One file per decoding loop (`llada`); a loop asks the mode's `reverse` what to
commit in a step.
"""

from collections.abc import Iterator, Sequence
from itertools import batched

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model
from megatron.training import get_args

from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.generation import llada
from megatron_dllm.generation.config import Completion, GenerationConfig
from megatron_dllm.generation.prompts import Canvas, Prompt, build_canvases
from megatron_dllm.models.weights import target_layers
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM

__all__ = ["Completion", "GenerationConfig", "Prompt", "check_sampler", "generate", "stream"]

# Training mode -> the loop that decodes its models.
DECODERS = {"mdlm": llada.decode, "bd3lm": llada.decode, "hybrid": llada.decode}


def structure_of(args) -> llada.Structure | None:
    """The blocks that a run trained its model in; None if it attends in both directions."""
    if get_mode(args.dllm_mode).FULL_WITHIN_DOCUMENT:
        return None
    return llada.Structure(args.dllm_block_size, args.dllm_block_origin == "response")


def check_sampler(args, config: GenerationConfig, tokenizer: Tokenizer) -> None:
    """ValueError if no decoding loop fits a model trained with `args`, or the loop cannot do what `config` asks."""
    mode = args.dllm_mode
    if target_layers(args) is not None:
        raise ValueError(
            "--load holds a draft, which guesses from the hidden states of its target and has no head of its own: it "
            "cannot be decoded yet."
        )
    if mode not in DECODERS:
        raise ValueError(
            f"a model trained with --dllm-mode {mode} cannot be decoded yet; there are samplers for "
            f"{', '.join(sorted(DECODERS))}."
        )
    structure = structure_of(args)
    if structure is not None:
        what = f"a model trained with --dllm-mode {mode}"
        if config.infill:
            raise ValueError(f"{what} sees no text after the block it writes: --infill needs one trained with mdlm.")
        if config.cfg_scale:
            raise ValueError(f"{what} has never seen masks before the block that it writes: leave out --cfg-scale.")
        if config.gen_block_length not in (None, structure.length):
            raise ValueError(
                f"{what} writes blocks of --dllm-block-size {structure.length} tokens: leave out --gen-block-length."
            )
        if structure.from_answer and mode == "bd3lm":
            raise ValueError(f"{what} and --dllm-block-origin response cannot be decoded yet.")
    if config.stop_at_eos and tokenizer.eos_id is None:
        raise ValueError("--stop-at-eos needs a tokenizer with an EOS token, and this one has none.")


def generate(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig | None = None,
) -> list[Completion]:
    """One completion per prompt; each is what the prompt would get alone.

    model: a whole DiffusionLM (tensor parallel at most), bare or wrapped; its mode, mask token and number of
    positions are those of Megatron's arguments, as at training. Call it on every tensor-parallel rank with
    the same prompts: all return the same.
    Raises ValueError (one sentence) for prompts or options that do not fit the model.
    """
    return list(stream(model, tokenizer, prompts, config))


def stream(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig | None = None,
) -> Iterator[Completion]:
    """The completions of `generate`, in the prompts' order, as soon as their batch of `config.batch_size` is done.

    Every tensor-parallel rank must exhaust it. Raises ValueError as `generate` does, at the call.
    """
    config = config or GenerationConfig()
    args = get_args()
    check_sampler(args, config, tokenizer)
    if args.pipeline_model_parallel_size * args.context_parallel_size > 1 or args.sequence_parallel:
        raise ValueError("generation needs whole sequences and all layers on a rank: no PP, CP or --sequence-parallel.")
    mask_id = args.dllm_mask_token_id
    canvases = build_canvases(prompts, tokenizer, config, mask_id, args.max_position_embeddings)
    return _batches(model, tokenizer, canvases, config, args)


def _batches(
    model: torch.nn.Module, tokenizer: Tokenizer, canvases: list[Canvas], config: GenerationConfig, args
) -> Iterator[Completion]:
    mode, structure = get_mode(args.dllm_mode), structure_of(args)
    decode, mask_id = DECODERS[args.dllm_mode], args.dllm_mask_token_id
    network = _Network(model, structure, tokenizer.vocab_size)
    for batch in batched(canvases, max(1, min(config.batch_size, len(canvases)))):  # it makes room for so many
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                rows = decode(batch, network, mode.reverse, config, mask_id, tokenizer.eos_id, structure)
        finally:
            model.train(was_training)
        yield from (_completion(row, tokenizer, config) for row in rows)


def _completion(row: llada.Row, tokenizer: Tokenizer, config: GenerationConfig) -> Completion:
    ids = row.tokens[row.start :].tolist()
    shown = ids
    if not config.infill and tokenizer.eos_id in ids:
        shown = ids[: ids.index(tokenizer.eos_id)]
    new = int((~row.given).sum())
    return Completion(
        text=tokenizer.decode(shown),
        ids=ids,
        steps=row.steps,
        forwards=row.steps * (2 if config.cfg_scale > 0 else 1),
        tokens_per_second=new / max(row.seconds, 1e-9),
    )


class _Network:
    """The model as a decoding loop calls it (llada.Predict): full logits of a few rows, on every rank."""

    def __init__(self, model: torch.nn.Module, structure: llada.Structure | None, vocab_size: int):
        self._model, self._bare, self._vocab_size = model, unwrap_model(model), vocab_size
        self._structure = structure
        self._inputs: tuple = ()

    def __call__(self, tokens_BQ: torch.Tensor, seen: list[llada.Seen], rows_N: torch.Tensor) -> torch.Tensor:
        device = torch.cuda.current_device()
        key = (seen, tokens_BQ.shape[1])
        if not self._inputs or self._inputs[0] != key:
            # kept between steps: attention caches its mask by the tensor it was made from
            self._inputs = (key, *self._positions_and_attributes(*key, device))
        _, position_ids_BQ, attributes_BQA = self._inputs
        logits = self._model(tokens_BQ.to(device), position_ids_BQ, attributes_BQA, rows_N=rows_N.to(device))
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=self._bare.pg_collection.tp)
        logits = logits[:, : self._bare.true_vocab_size]
        # rows of the head beyond the tokenizer's ids stand for no text; a finite number, as guidance subtracts
        logits[:, self._vocab_size :] = torch.finfo(logits.dtype).min
        return logits

    def _positions_and_attributes(self, seen: list[llada.Seen], longest: int, device):
        positions = torch.arange(longest).expand(len(seen), -1)
        if self._structure is None and all(view.length == longest for view in seen):
            return positions.to(device), None
        of_rows = lambda name: torch.tensor([getattr(view, name) for view in seen])[:, None]
        attributes = torch.zeros(*positions.shape, NUM_ATTRIBUTES, dtype=torch.int32)
        attributes[..., STREAM] = torch.where(positions < of_rows("noisy_from"), CLEAN, NOISY)
        attributes[..., POSITION] = positions
        attributes[..., DOCUMENT] = -(positions >= of_rows("length")).int()
        if self._structure is not None:
            size, start = self._structure.length, of_rows("start")
            attributes[..., BLOCK] = positions // size
            if self._structure.from_answer:
                after = -(-start // size) + (positions - start) // size
                attributes[..., BLOCK] = torch.where(positions < start, positions // size, after)
        return positions.to(device), attributes.to(device)
