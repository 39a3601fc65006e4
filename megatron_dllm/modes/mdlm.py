"""Masked diffusion (MDLM; Sahoo et al. 2024, eq. 10; LLaDA, Nie et al. 2025, eq. 3).

A noise level t ~ U(0, 1) is drawn per sample, every supervised token becomes the mask token with probability
p = (1 - eps) t + eps, and a bidirectional network predicts the clean tokens:

    loss = Σ_{i noised} -log q(x_0,i | x_t) / p  /  N,      N = supervised tokens of the global batch,

an unbiased estimate of an upper bound on the negative log-likelihood in nats per token.
Shapes: one stream, Q = S; logits at position i predict token i, or with `--mdlm-shift-logits` token i + 1, as in
models made of autoregressive ones (Dream, arXiv:2508.15487). A document's first token is then predicted nowhere, so it
is neither scored nor counted.
"""

import argparse

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import common
from megatron_dllm.modes.base import DOCUMENT, NOISY, Corrupted, LossTerm, ModelInput, Term
from megatron_dllm.noise import Draws

NEEDS_MASK_TOKEN = True
# So a batch of unpadded single documents needs no mask at all.
FULL_WITHIN_DOCUMENT = True
USES = {"dllm_eps", "dllm_loss_normalization"}


def add_args(group) -> None:
    group.add_argument(
        "--mdlm-shift-logits",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Predict every token from the position before it; the default for Dream's weights (--hf-model).",
    )


def validate(args) -> None:
    common.validate_eps(args)
    args.dllm_loss_normalization = args.dllm_loss_normalization or "supervised"


def streams(args) -> int:
    return 1


def shifted(args) -> bool:
    """Whether logits predict the next token. Runs from before this flag do not say."""
    return getattr(args, "mdlm_shift_logits", False)


def corrupt(sample: Sample, draws: Draws, args) -> Corrupted:
    """Uniform masking. Order and dtype of the draws are the published ones (bit parity): u [1], then r [S]."""
    common.check_clean(sample, args.dllm_mask_token_id)
    g = draws.generator()
    p = (1 - args.dllm_eps) * draws.level(g) + args.dllm_eps
    return common.masked_at_rate(sample, p, g, args.dllm_mask_token_id)


def layout(samples: list[Corrupted], length: int, args) -> ModelInput:
    """Pad every sample to `length` and stack: B rows of one stream."""
    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    counted_BS = rows.loss_mask_BS if args.dllm_loss_normalization == "supervised" else rows.noised_BS
    targets_BS, weights_BS, levels_BS = rows.tokens_BS, rows.weight_BS, rows.level_BS
    if shifted(args):
        follows_BS = common.follows(rows)
        counted_BS = counted_BS & follows_BS
        weights_BS = weights_BS * follows_BS
        targets_BS, weights_BS, levels_BS = (x.roll(-1, dims=1) for x in (targets_BS, weights_BS, levels_BS))
    term = Term(targets_BS, weights_BS, float(counted_BS.sum()), levels_BQ=levels_BS)
    return common.streams_side_by_side(rows, [(NOISY, rows.x_t_BS)], {"dllm": term})


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Everything within a document sees everything else in it, in both directions."""
    return query[..., DOCUMENT] == key[..., DOCUMENT]


def loss(score, args) -> list[LossTerm]:
    return [LossTerm("dllm", score.weighted_nll("dllm"))]


reverse = common.most_trusted
