"""Introspective diffusion (I-DLM, 2025): every supervised token is masked, and the logits keep their shift by one.

One pass over two streams [x_t | x_0]: x_t has the mask token at every supervised place. A noisy token sees its own
noisy block up to itself and the clean tokens of earlier blocks; the clean stream is plainly causal. In both, the
logits at position i predict token i+1, so an autoregressive model is trained with no change to its head:

    noisy = Σ_i -log q(x_0,i+1 | x_t of i's block up to i, x_0 of earlier blocks)  /  N
    clean = Σ_i -log q(x_0,i+1 | x_0,<=i)  /  N,        i+1 supervised and of the same document; N counts these i
    loss  = noisy + w · clean

w is `--idlm-clean-loss-weight`, or with `--idlm-auto-balance` the ratio noisy / clean of the step before (of sums over
the whole global batch, so it does not depend on the layout; it is saved with the checkpoint).
Blocks have `--dllm-block-size` tokens (default 1), from the beginning of a document or of the response.
Shapes: Q = 2S.
"""

import math

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import common
from megatron_dllm.modes.base import (
    CLEAN,
    NOISY,
    POSITION,
    Corrupted,
    LossTerm,
    ModelInput,
)
from megatron_dllm.noise import Draws

NEEDS_MASK_TOKEN = True
FULL_WITHIN_DOCUMENT = False
USES = {"dllm_block_size", "dllm_block_origin", "dllm_compat"}
TERMS = ("dllm", "clean")
_BALANCE = "idlm clean loss weight"  # in args.dllm_state


def add_args(group) -> None:
    group.add_argument(
        "--idlm-clean-loss-weight", type=float, default=None, help="Weight of the clean stream's loss; default 0.2."
    )
    group.add_argument(
        "--idlm-auto-balance",
        action="store_true",
        help="Weigh the clean stream's loss by the ratio noisy / clean of the step before (the first step: 0.2).",
    )


def validate(args) -> None:
    common.validate_blocks(args, default=1)
    if args.idlm_auto_balance:
        if args.idlm_clean_loss_weight is not None:
            raise ValueError("--idlm-auto-balance sets the weight: remove --idlm-clean-loss-weight.")
        if args.dllm_compat and args.context_parallel_size > 1:
            raise ValueError(
                "--dllm-compat automodel balances each micro-batch on its own, which context parallelism splits: use "
                "--context-parallel-size 1 or leave --dllm-compat out."
            )
    weight = args.idlm_clean_loss_weight = 0.2 if args.idlm_clean_loss_weight is None else args.idlm_clean_loss_weight
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"--idlm-clean-loss-weight {weight} is not a weight: give a number of at least 0.")


def streams(args) -> int:
    return 2


def corrupt(sample: Sample, draws: Draws, args) -> Corrupted:
    """The mask token at every supervised place. Nothing is drawn."""
    common.check_clean(sample, args.dllm_mask_token_id)
    block_S, offset_S = common.blocks(sample, args.dllm_block_size, args.dllm_block_origin)
    certain = torch.ones(1)
    return common.masked(
        sample, sample.loss_mask_S, certain, args.dllm_mask_token_id, block_S=block_S, offset_S=offset_S
    )


def layout(samples: list[Corrupted], length: int, args) -> ModelInput:
    """[x_t | x_0]; in both, the rows before a supervised token are scored."""
    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    terms = {
        "dllm": common.next_token_term(rows, before=0, compat=args.dllm_compat),
        "clean": common.next_token_term(rows, before=1, compat=args.dllm_compat),
    }
    terms["dllm"].offsets_BQ = rows.offset_BS
    return common.streams_side_by_side(rows, [(NOISY, rows.x_t_BS), (CLEAN, rows.tokens_BS)], terms)


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Noisy: the own noisy block up to itself, and the clean tokens of earlier blocks. Clean: causal."""
    own_block, context, clean = common.seen_between_streams(query, key)
    return context | ((own_block | clean) & (key[..., POSITION] <= query[..., POSITION]))


def loss(score, args) -> list[LossTerm]:
    noisy, clean = score.weighted_nll("dllm"), score.weighted_nll("clean")
    weight = args.idlm_clean_loss_weight
    if args.idlm_auto_balance and args.dllm_compat:
        weight = balance(noisy.item(), clean.item())  # of this micro-batch on this rank
    elif args.idlm_auto_balance:
        weight = args.dllm_state.get(_BALANCE, weight)
    return [LossTerm("dllm", noisy), LossTerm("clean", clean, weight)]


def balance(noisy: float, clean: float) -> float:
    """Weight that makes the clean term as large as the noisy one."""
    return noisy / max(clean, 1e-6)


def after_step(losses: dict[str, float], args) -> None:
    """losses: by term, over the global batch."""
    if args.idlm_auto_balance and losses["dllm"] > 0:
        args.dllm_state[_BALANCE] = balance(losses["dllm"], losses["clean"])


reverse = common.most_trusted  # generation/idlm.py verifies drafts instead
