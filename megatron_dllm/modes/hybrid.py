"""Diffusion and autoregression in one network (Nemotron-Labs-Diffusion, NVIDIA 2025).

One pass over two streams [x_t | x_0]: a noisy token sees its own noisy block and the clean tokens of earlier
blocks; the clean stream is plainly causal. So the network can be decoded block by block against a causal cache, and
as an autoregressive model (one head for both).

    D    = Σ_{i noised} -log q(x_0,i | x_t of its block, x_0 of earlier blocks) / p_i  /  N_D
    AR   = Σ_i -log q(x_0,i+1 | x_0,<=i)  /  N_AR,     i+1 supervised and of the same document
    loss = diffusion_loss_weight · D + ar_loss_weight · AR

N_AR counts the scored pairs. N_D counts noised tokens by default, as published; that divides by the noise level twice
(the weights 1/p do it already), so short or lightly noised batches dominate: `--dllm-loss-normalization supervised` is
the unbiased bound.

Noise is uniform at one level a sample, or blockwise (`--dllm-corruption blockwise`): a level m per block, and within a
block later tokens are likelier to be noised, the more so the lower the level:

    published   round(m · length) tokens by Gumbel top-k of the log-weights  λ (1 - m) j,  λ = ln 2 / (h · block size);
                weighted by 1/m although a token's inclusion probability depends on its place j, and drawn over all
                tokens of a block, also those that are not supervised and so dropped afterwards
    inclusion   independently with π_j = σ(c + λ (1 - m) j) among the supervised tokens alone, c such that they average
                m, and weighted by 1/π_j: the same odds between neighbours, and unbiased

Shapes: Q = 2S; noisy logits at position i predict token i, clean logits at i predict token i+1.
"""

import dataclasses
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
    Term,
)
from megatron_dllm.noise import Draws

NEEDS_MASK_TOKEN = True
FULL_WITHIN_DOCUMENT = False
USES = {"dllm_eps", "dllm_loss_normalization", "dllm_block_size", "dllm_block_origin", "dllm_compat"}
_GUMBEL_EPS = 1e-9
_BISECTIONS = 40  # each halves an interval of at most some hundred: down to 1e-10


def add_args(group) -> None:
    group.add_argument(
        "--diffusion-loss-weight",
        "--ar-loss-alpha",
        type=float,
        default=1.0,
        help="Weight of the diffusion term. The second name is the published one, in spite of what it says.",
    )
    group.add_argument("--ar-loss-weight", type=float, default=1.0, help="Weight of the autoregressive term.")
    group.add_argument(
        "--dllm-corruption",
        choices=("uniform", "blockwise"),
        default="uniform",
        help="One noise level a sample, or one a block with later tokens noised more often.",
    )
    group.add_argument(
        "--dllm-half-life-ratio",
        type=float,
        default=None,
        help="Blockwise: after this share of a block the odds of being noised have doubled (at low noise). "
        "Default 0.25.",
    )
    group.add_argument(
        "--dllm-blockwise-weights",
        choices=("published", "inclusion"),
        default=None,
        help="Blockwise: as published (default), or sampled among supervised tokens and weighted by the true "
        "inclusion probability.",
    )


def validate(args) -> None:
    common.validate_eps(args)
    common.validate_blocks(args, default=32)
    args.dllm_loss_normalization = args.dllm_loss_normalization or "noise"
    weights = {"--diffusion-loss-weight": args.diffusion_loss_weight, "--ar-loss-weight": args.ar_loss_weight}
    for flag, value in weights.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{flag} {value} is not a weight: give a number of at least 0.")
    if not any(weights.values()):
        raise ValueError("--diffusion-loss-weight and --ar-loss-weight are both 0, which leaves no loss: raise one.")
    if args.dllm_corruption == "uniform":
        for dest in ("dllm_half_life_ratio", "dllm_blockwise_weights"):
            if getattr(args, dest) is not None:
                raise ValueError(f"--{dest.replace('_', '-')} needs --dllm-corruption blockwise: add it.")
        return
    if args.dllm_half_life_ratio is None:
        args.dllm_half_life_ratio = 0.25
    args.dllm_blockwise_weights = args.dllm_blockwise_weights or "published"
    if not 1e-3 <= args.dllm_half_life_ratio <= 1e3:
        raise ValueError(
            f"--dllm-half-life-ratio {args.dllm_half_life_ratio} is a share of a block: give a number like 0.25 "
            "(0.001 to 1000; large ones mean no preference for later tokens)."
        )


def streams(args) -> int:
    return 2


def corrupt(sample: Sample, draws: Draws, args) -> Corrupted:
    """Uniform: draws u [1], r [S], as mdlm. Blockwise: u [blocks], then the block's or the tokens' uniforms."""
    common.check_clean(sample, args.dllm_mask_token_id)
    block_S, offset_S = common.blocks(sample, args.dllm_block_size, args.dllm_block_origin)
    g = draws.generator()
    if args.dllm_corruption == "uniform":
        p_S = (1 - args.dllm_eps) * draws.level(g) + args.dllm_eps
        return common.masked_at_rate(sample, p_S, g, args.dllm_mask_token_id, block_S=block_S, offset_S=offset_S)
    lengths_N = torch.bincount(block_S)
    m_N = args.dllm_eps + (1 - args.dllm_eps) * draws.level(g, (len(lengths_N),))
    m_S, supervised_S = m_N[block_S], sample.loss_mask_S
    rate = math.log(2) / (args.dllm_half_life_ratio * args.dllm_block_size)
    if args.dllm_blockwise_weights == "published":
        chosen_NK = gumbel_blocks(lengths_N, args.dllm_block_size, m_N, rate, g)
        noised_S = chosen_NK[block_S, offset_S] & supervised_S
        return common.masked(sample, noised_S, m_S, args.dllm_mask_token_id, block_S=block_S, offset_S=offset_S)
    pi_S = inclusion(block_S, offset_S, supervised_S, m_N, rate)
    corrupted = common.masked_at_rate(sample, pi_S, g, args.dllm_mask_token_id, block_S=block_S, offset_S=offset_S)
    return dataclasses.replace(corrupted, level_S=m_S)


def gumbel_blocks(
    lengths_N: torch.Tensor, width: int, m_N: torch.Tensor, rate: float, g: torch.Generator, least: int = 0
) -> torch.Tensor:
    """[N, width] bool: in each block round(m · length) of its first `length` places, by Gumbel top-k.

    Published kernel, bit for bit (float32, draws [N, width]). Neighbours' log-weights differ by rate · (1 - m).
    """
    k_N = torch.maximum(torch.round(m_N * lengths_N).long().clamp(min=least), torch.tensor(0)).minimum(lengths_N)
    place = torch.arange(width, dtype=torch.float32)
    log_weights = (rate * (1.0 - m_N))[:, None] * place
    log_weights = log_weights.masked_fill(place >= lengths_N[:, None], float("-inf"))
    return gumbel_top_k(log_weights, k_N, g)


def gumbel_top_k(log_weights_NK: torch.Tensor, k_N: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """[N, K] bool: k of each row, drawn without replacement in proportion to exp(log_weights)."""
    u = torch.rand(log_weights_NK.shape, generator=g, dtype=log_weights_NK.dtype)
    gumbel = -torch.log(-torch.log(u + _GUMBEL_EPS) + _GUMBEL_EPS)
    order = torch.sort(log_weights_NK + gumbel, dim=-1, descending=True).indices
    rank = torch.arange(order.shape[1]).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, rank < k_N[:, None])


def inclusion(block_S, offset_S, supervised_S, m_N, rate: float) -> torch.Tensor:
    """π_S float32: σ(c + rate (1 - m) j), with c of each block such that its supervised tokens average m."""
    m_N, block_S = m_N.double(), block_S.long()
    tilt_S = rate * (1 - m_N[block_S]) * offset_S
    count_N = torch.zeros_like(m_N).index_add_(0, block_S, supervised_S.double())
    low_N = torch.logit(m_N) - rate * (1 - m_N) * offset_S.max()  # all π <= m
    high_N = torch.logit(m_N)  # all π >= m
    for _ in range(_BISECTIONS):
        middle_N = (low_N + high_N) / 2
        pi_S = torch.sigmoid(middle_N[block_S] + tilt_S) * supervised_S
        above_N = torch.zeros_like(m_N).index_add_(0, block_S, pi_S) > m_N * count_N
        low_N, high_N = torch.where(above_N, low_N, middle_N), torch.where(above_N, middle_N, high_N)
    return torch.sigmoid((low_N + high_N)[block_S] / 2 + tilt_S).float()


def layout(samples: list[Corrupted], length: int, args) -> ModelInput:
    """[x_t | x_0]; noisy rows that are noised, and clean rows before a supervised token."""
    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    supervised = float(rows.loss_mask_BS.sum())
    noised = float(rows.noised_BS.sum())
    diffusion = Term(
        targets_BQ=rows.tokens_BS,
        weights_BQ=rows.weight_BS,
        count=supervised if args.dllm_loss_normalization == "supervised" else noised,
        levels_BQ=rows.level_BS,
        offsets_BQ=rows.offset_BS,
    )
    terms = {"dllm": diffusion, "ar": common.next_token_term(rows, before=1, compat=args.dllm_compat)}
    return common.streams_side_by_side(rows, [(NOISY, rows.x_t_BS), (CLEAN, rows.tokens_BS)], terms)


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Noisy: the own noisy block, and the clean tokens of earlier blocks. Clean: causal."""
    own_block, context, clean = common.seen_between_streams(query, key)
    return own_block | context | (clean & (key[..., POSITION] <= query[..., POSITION]))


def loss(score, args) -> list[LossTerm]:
    return [
        LossTerm("dllm", score.weighted_nll("dllm"), args.diffusion_loss_weight),
        LossTerm("ar", score.weighted_nll("ar"), args.ar_loss_weight),
    ]


reverse = common.most_trusted
