"""How many tokens a pass of the target yields with the draft as it is now: decoding of held-out prompts in training."""

from argparse import Namespace

import torch
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from megatron_dllm.data.sample import Sample
from megatron_dllm.generation import dflash
from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding
from megatron_dllm.modes.common import most_trusted


def prompt_of(sample: Sample) -> list[int]:
    """What comes before a sample's first supervised token; of plain text, a quarter of its first document."""
    own = sample.document_S == sample.document_S[0]
    first = int(sample.loss_mask_S.float().argmax())
    length = first if first else max(1, int(own.sum()) // 4)
    return sample.tokens_S[:length].tolist()


def canvas_of(sample: Sample, args: Namespace) -> Canvas:
    """The prompt of a sample and room for the new tokens; of one too long for the target's positions the end, which
    the answer goes on from."""
    prompt = prompt_of(sample)[-(args.max_position_embeddings - args.dflash_eval_tokens) :]
    return Canvas([*prompt, *[args.dllm_mask_token_id] * args.dflash_eval_tokens], len(prompt))


def tokens_per_pass(model: torch.nn.Module, samples, args: Namespace) -> float:
    """Greedy, over the first `--dflash-eval-prompts` samples, each with `--dflash-eval-tokens` new ones. The pass over
    the prompt, and the token that it writes, are not counted: 1 is what the target does alone.

    samples: held-out ones, by index. Data-parallel ranks share the prompts out; collective over all ranks.
    """
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    canvases = [canvas_of(samples.sample(i), args) for i in range(rank, args.dflash_eval_prompts, size)]
    config = GenerationConfig(max_new_tokens=args.dflash_eval_tokens)
    decoding = Decoding(config, most_trusted, args.dllm_mask_token_id, None, args.vocab_size, args)
    bare = unwrap_model(model)
    was_training = bare.training
    bare.eval()
    try:
        with torch.no_grad():
            rows = [dflash.DraftedRow(canvas, decoding) for canvas in canvases]
            dflash.run(rows, dflash.Pair(bare, args.vocab_size, args.dllm_mask_token_id))
    finally:
        bare.train(was_training)
    counts = torch.tensor(
        [len(rows) * (args.dflash_eval_tokens - 1), sum(row.forwards - 1 for row in rows)],
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(counts, group=mpu.get_data_parallel_group())
    tokens, passes = counts.tolist()
    return tokens / max(1.0, passes)
