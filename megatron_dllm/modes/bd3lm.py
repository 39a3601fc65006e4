"""Block diffusion (BD3-LM; Arriola et al. 2025, eq. 8; also how LLaDA2.0 is trained).

A text is autoregressive over blocks and diffuses within each. One pass over two streams [x_t | x_0] trains all
blocks at once: a noisy token sees its own noisy block and the clean tokens of earlier blocks; the clean stream is
causal over blocks. Every block b has a noise level of its own, p_b = (1 - eps) u_b + eps:

    loss = Σ_b Σ_{i in b, noised} -log q(x_0,i | x_t of b, x_0 of blocks < b) / p_b  /  N

With one block this is mdlm (bit for bit the same noise); with blocks of one token and everything masked it is the
exact autoregressive likelihood.

`--bd3lm-complementary-masks` adds a third stream that is noised exactly where the first is not (LLaDA2.0): every
supervised token is then scored once in each sample, against the same clean stream. Its rate is 1 - p_b, so levels
come from [eps, 1 - eps) there, and N counts both streams.

`--dllm-block-size-schedule 1:4:32` trains with growing blocks (LLaDA2.0's warm-up from an autoregressive model).
Shapes: Q = 2S, or 3S with complementary masks; logits at position i predict token i (no shift).
"""

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import common
from megatron_dllm.modes.base import (
    BLOCK,
    CLEAN,
    COMPLEMENT,
    NOISY,
    Corrupted,
    LossTerm,
    ModelInput,
    Term,
)
from megatron_dllm.noise import Draws, ValidationDraws

NEEDS_MASK_TOKEN = True
FULL_WITHIN_DOCUMENT = False
USES = {"dllm_eps", "dllm_loss_normalization", "dllm_block_size", "dllm_block_origin"}


def add_args(group) -> None:
    group.add_argument(
        "--bd3lm-complementary-masks",
        action="store_true",
        help="Score each sample under its mask and under the complement of it, in a third stream.",
    )
    group.add_argument(
        "--dllm-block-size-schedule",
        default=None,
        metavar="SIZE:SIZE:...",
        help="Block sizes in turn, for instance 1:4:32, each for --dllm-block-size-schedule-iters iterations; the "
        "last one stays. In place of --dllm-block-size.",
    )
    group.add_argument("--dllm-block-size-schedule-iters", type=int, default=None, metavar="ITERATIONS")


def validate(args) -> None:
    common.validate_eps(args)
    args.dllm_loss_normalization = args.dllm_loss_normalization or "supervised"
    if args.bd3lm_complementary_masks and args.dllm_eps >= 0.5:
        raise ValueError(
            f"--dllm-eps {args.dllm_eps} leaves no level for --bd3lm-complementary-masks, whose rates lie between "
            "eps and 1 - eps: give less than 0.5."
        )
    _validate_schedule(args)
    common.validate_blocks(args, default=32)


def _validate_schedule(args) -> None:
    text, iterations = args.dllm_block_size_schedule, args.dllm_block_size_schedule_iters
    if text is None:
        if iterations is not None:
            raise ValueError("--dllm-block-size-schedule-iters needs --dllm-block-size-schedule: give it, as 1:4:32.")
        args.dllm_block_sizes = None
        return
    sizes = text.split(":")
    if not all(size.isascii() and size.isdigit() and 0 < int(size) <= common.LARGEST_BLOCK for size in sizes):
        raise ValueError(f"--dllm-block-size-schedule {text!r}: give block sizes separated by colons, as 1:4:32.")
    if args.dllm_block_size is not None:
        raise ValueError("give --dllm-block-size or --dllm-block-size-schedule, not both.")
    if iterations is None or iterations < 1:
        raise ValueError(
            "--dllm-block-size-schedule needs --dllm-block-size-schedule-iters: after how many iterations the next "
            "size begins (at least 1)."
        )
    if args.step_batch_size_schedule is not None:
        raise ValueError(
            "--dllm-block-size-schedule counts iterations of one batch size: it cannot be combined with "
            "--step-batch-size-schedule."
        )
    args.dllm_block_sizes = [int(size) for size in sizes]
    args.dllm_block_size = args.dllm_block_sizes[-1]


def block_size(index: int, args) -> int:
    """Block size of training sample `index`: a function of the index, so that resuming continues the schedule."""
    if args.dllm_block_sizes is None:
        return args.dllm_block_size
    stage = index // (args.global_batch_size * args.dllm_block_size_schedule_iters)
    return args.dllm_block_sizes[min(stage, len(args.dllm_block_sizes) - 1)]


def streams(args) -> int:
    return 3 if args.bd3lm_complementary_masks else 2


def corrupt(sample: Sample, draws: Draws, args) -> Corrupted:
    """Uniform masking at one level a block. Draws: u [blocks], then r [S]; with one block the draws of mdlm."""
    common.check_clean(sample, args.dllm_mask_token_id)
    # evaluations always use the last size, so that they can be compared
    size = args.dllm_block_size if isinstance(draws, ValidationDraws) else block_size(draws.index, args)
    block_S, offset_S = common.blocks(sample, size, args.dllm_block_origin)
    g = draws.generator()
    u_N = draws.level(g, (int(block_S[-1]) + 1 if len(sample) else 0,))
    least, greatest = args.dllm_eps, 1 - args.dllm_eps if args.bd3lm_complementary_masks else 1
    p_S = ((greatest - least) * u_N + least)[block_S]
    return common.masked_at_rate(sample, p_S, g, args.dllm_mask_token_id, block_S=block_S, offset_S=offset_S)


def layout(samples: list[Corrupted], length: int, args) -> ModelInput:
    """[x_t | x_0], or [x_t | complement of x_t | x_0]."""
    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    noisy, weights, levels = [(NOISY, rows.x_t_BS)], [rows.weight_BS], [rows.level_BS]
    if args.bd3lm_complementary_masks:
        rest_BS = rows.loss_mask_BS & ~rows.noised_BS
        noisy.append((COMPLEMENT, rows.tokens_BS.masked_fill(rest_BS, args.dllm_mask_token_id)))
        weights.append(rest_BS / (1 - rows.level_BS))
        levels.append(1 - rows.level_BS)
    copies = len(noisy)
    if args.dllm_loss_normalization == "supervised":
        count = copies * float(rows.loss_mask_BS.sum())
    else:
        count = float(sum((weight > 0).sum() for weight in weights))
    term = Term(
        targets_BQ=rows.tokens_BS.repeat(1, copies),
        weights_BQ=torch.cat(weights, dim=1),
        levels_BQ=torch.cat(levels, dim=1),
        offsets_BQ=rows.offset_BS.repeat(1, copies),
        count=count,
    )
    batch = common.streams_side_by_side(rows, [*noisy, (CLEAN, rows.tokens_BS)], {"dllm": term})
    batch.tokens["noised"] = float(sum((weight > 0).sum() for weight in weights))
    return batch


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Noisy: the own block of the own stream, and the clean tokens of earlier blocks. Clean: blocks up to its own."""
    own_block, context, clean = common.seen_between_streams(query, key)
    return own_block | context | (clean & (key[..., BLOCK] <= query[..., BLOCK]))


def loss(score, args) -> list[LossTerm]:
    return [LossTerm("dllm", score.weighted_nll("dllm"))]


reverse = common.most_trusted
