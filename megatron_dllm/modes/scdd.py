"""Self-correcting discrete diffusion (SCDD; Wang et al. 2026, arXiv:2603.02230; schedule and draws as in NeMo AutoModel
0.7.0): tokens are absorbed into the mask or replaced by others, and both are learned to be undone.

At level t a token is absorbed (the mask token), uniform (any of the K = V - 1 other tokens, itself included) or clean:

    c(t) = R / (1 - R) · (t / t*)^(g t*) · ((1 - t) / (1 - t*))^(g (1 - t*))        R, g, t*: the flags below
    absorbed a = t / (1 + c),   uniform = c / (1 + c),   clean = (1 - t) / (1 + c),   ρ = clean / (clean + uniform)

A sample gets t = k/T: k = floor(T u) + 1 but at most T - 1, u = (1 - eps) u0 + eps. From the noised z_t the network
predicts the clean token with q (never the mask), at absorbed and at visible places. A supervised token x that became z
costs T times a term of the discrete bound (Austin et al. 2021, eq. 1): the KL divergence of the step back from t to
s = t - 1/T, in nats, from q(z_s | z_t, x) to the model's, which has q(v) in place of 1[v = x]. That is, with
b = (1 - ρ_s) / K, P(v) = b + ρ_s 1[v = x], Q(v) = b + ρ_s q(v):

    z absorbed:  (1 - a_s / a_t) · KL(P || Q)
    z visible:   w · KL(P || Q) + (1 - w) · log P(z) / Q(z) - log D / E
                 D = (1 - ρ_t) / K + ρ_t 1[z = x],  E = (1 - ρ_t) / K + ρ_t q(z),  w = (ρ_s - ρ_t) / (ρ_s K D)

w is the probability that this very step put z there by chance. Published is the part that depends on the model: the
same gradient, but values that may be negative. The whole is at least 0 and compares with mdlm's (which it is at R = 0,
with p = t). The levels are the published ones: k = T is counted as T - 1, and eps >= 1/T leaves out k = 1.
Shapes: one stream, Q = S; logits at position i predict token i (no shift).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import common
from megatron_dllm.modes.base import DOCUMENT, NOISY, Corrupted, LossTerm, ModelInput, Term
from megatron_dllm.noise import Draws

NEEDS_MASK_TOKEN = True
FULL_WITHIN_DOCUMENT = True
USES = {"dllm_eps"}
_LARGEST_RATIO = 1e30  # ρ_s / b is infinite where nothing is uniform; what comes of it is then multiplied by 0
_ROUNDING = 1e-12  # of differences between levels


def add_args(group) -> None:
    group.add_argument(
        "--scdd-max-ratio",
        type=float,
        default=0.1,
        help="Largest share R of tokens that are replaced by random ones, reached at --scdd-peak-time.",
    )
    group.add_argument(
        "--scdd-gamma-shape", type=float, default=1.0, help="How sharply the share of random tokens peaks (g)."
    )
    group.add_argument(
        "--scdd-peak-time", type=float, default=0.5, help="Noise level t* with the most random tokens, in (0, 1)."
    )
    group.add_argument("--scdd-timesteps", type=int, default=1000, help="Steps T of the chain.")
    group.add_argument(
        "--scdd-chunk-size",
        type=int,
        default=256,
        help="Rows of logits that exist at a time. Fewer need less memory; on a CPU 64 to 512 are about equally fast.",
    )


def validate(args) -> None:
    common.validate_eps(args)
    for flag, value, good, what in (
        ("max-ratio", args.scdd_max_ratio, 0 <= args.scdd_max_ratio < 1, "a number in [0, 1)"),
        ("peak-time", args.scdd_peak_time, 0 < args.scdd_peak_time < 1, "a number in (0, 1)"),
        ("gamma-shape", args.scdd_gamma_shape, 0 < args.scdd_gamma_shape < math.inf, "a number above 0"),
        ("timesteps", args.scdd_timesteps, 2 <= args.scdd_timesteps <= 10**6, "2 to 1000000"),
        ("chunk-size", args.scdd_chunk_size, args.scdd_chunk_size >= 1, "at least 1"),
    ):
        if not good:
            raise ValueError(f"--scdd-{flag} {value} is out of range: give {what}.")
    if args.vocab_size < 3:
        raise ValueError(
            f"a vocabulary of {args.vocab_size} has nothing to replace a token by: --dllm-mode scdd needs the mask and "
            "two more tokens."
        )
    # A step absorbs and replaces, it gives nothing back: else some of its probabilities would be negative.
    levels = schedule(torch.arange(args.scdd_timesteps, dtype=torch.float64) / args.scdd_timesteps, args)
    for growth, what, advice in (
        (levels.rho.diff(), "clean tokens among the visible", "--scdd-gamma-shape · (1 - --scdd-peak-time) at most 1"),
        (-levels.absorbed.diff(), "visible tokens", "a smaller --scdd-gamma-shape or --scdd-max-ratio"),
    ):
        if not (growth <= _ROUNDING).all():
            raise ValueError(
                f"--scdd-gamma-shape {args.scdd_gamma_shape}, --scdd-peak-time {args.scdd_peak_time} and "
                f"--scdd-max-ratio {args.scdd_max_ratio} are no diffusion, as more noise would mean more {what}: "
                f"give {advice}."
            )


def streams(args) -> int:
    return 1


class Level(NamedTuple):
    """What becomes of a token at some levels: shares of clean, uniform and absorbed; rho, the clean among the rest."""

    clean: torch.Tensor
    uniform: torch.Tensor
    absorbed: torch.Tensor
    rho: torch.Tensor


def schedule(t: torch.Tensor, args) -> Level:
    """Levels t in [0, 1], float64: a step's change is small against the shares, and T times it is in the loss."""
    peak, shape, R = args.scdd_peak_time, args.scdd_gamma_shape, args.scdd_max_ratio
    c = R / (1 - R) * (t / peak) ** (shape * peak) * ((1 - t) / (1 - peak)) ** (shape * (1 - peak))
    clean, uniform = (1 - t) / (1 + c), c / (1 + c)
    return Level(clean, uniform, t / (1 + c), clean / (clean + uniform).clamp(min=torch.finfo(t.dtype).tiny))


def corrupt(sample: Sample, draws: Draws, args) -> Corrupted:
    """Order and dtype of the draws are the published ones (bit parity): u0 [1], then u [S], then d [S]."""
    common.check_clean(sample, args.dllm_mask_token_id)
    T, V, g = args.scdd_timesteps, args.vocab_size, draws.generator()
    u0 = (1 - args.dllm_eps) * draws.level(g) + args.dllm_eps
    t = (((u0 * T).long().float() + 1) / T).clamp(max=1 - 1 / T)
    level = schedule(t.double(), args)
    replaced = level.uniform * (V - 2) / (V - 1)  # the rest are replaced by themselves
    x_t_S, noised_S = mix(sample, level.absorbed.item(), replaced.item(), args.dllm_mask_token_id, V, g)
    return Corrupted(sample, x_t_S, noised_S, sample.loss_mask_S.float(), t.expand(len(sample)))


def mix(
    sample: Sample, absorbed: float, replaced: float, mask_id: int, vocab_size: int, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_t_S, noised_S): supervised tokens absorbed, or replaced by another token (not the mask), so often."""
    x_S = sample.tokens_S
    u_S = torch.rand(len(sample), generator=g)
    d_S = torch.randint(0, vocab_size - 2, (len(sample),), generator=g)
    absorbed_S = (u_S < absorbed) & sample.loss_mask_S
    replaced_S = (u_S >= absorbed) & (u_S < absorbed + replaced) & sample.loss_mask_S & (x_S != mask_id)
    d_S += d_S >= x_S.clamp(max=mask_id)  # counted over the ids without these two
    d_S += d_S >= x_S.clamp(min=mask_id)
    return x_S.where(~replaced_S, d_S).masked_fill(absorbed_S, mask_id), absorbed_S | replaced_S


def layout(samples: list[Corrupted], length: int, args) -> ModelInput:
    """Pad every sample to `length` and stack: B rows of one stream. All supervised tokens are scored."""
    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    term = Term(
        targets_BQ=rows.tokens_BS,
        weights_BQ=rows.weight_BS,
        count=float(rows.loss_mask_BS.sum()),
        levels_BQ=rows.level_BS,
        inputs_BQ=rows.x_t_BS,
    )
    return common.streams_side_by_side(rows, [(NOISY, rows.x_t_BS)], {"dllm": term})


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Everything within a document sees everything else in it, in both directions."""
    return query[..., DOCUMENT] == key[..., DOCUMENT]


def loss(score, args) -> list[LossTerm]:
    nats = functools.partial(step_back, args=args)
    return [LossTerm("dllm", score.weighted_loss("dllm", nats, args.dllm_mask_token_id, args.scdd_chunk_size))]


def step_back(log_q, rows, args) -> torch.Tensor:
    """[n] float64: T · KL(q(z_s | z_t, x) || p(z_s | z_t)) of each row, in the terms of the docstring above.

    log_q: the model's log-probabilities (models/reductions.py); rows: targets x, inputs z_t and levels t (RankTerm).
    """
    T, K = args.scdd_timesteps, args.vocab_size - 1
    x, z, t = rows.targets_N, rows.inputs_N, rows.levels_N.double()
    s = t - 1 / T
    s = s.where(s * T > 1e-3, 0.0)  # t was rounded to float32: something would be left of the first step's s
    at_s, at_t = schedule(s, args), schedule(t, args)
    absorbed = z == args.dllm_mask_token_id
    z = z.where(~absorbed, x)
    log_q_x, log_q_z = log_q.at(torch.stack([x, z], dim=1)).double().unbind(1)

    b = (1 - at_s.rho) / K
    log_Q_x, log_Q_z = log_mixed(at_s.rho, log_q_x, K), log_mixed(at_s.rho, log_q_z, K)
    log_ratio = (at_s.rho / b).clamp(max=_LARGEST_RATIO).log().float()[:, None]
    excess = log_q.sum(lambda log_q: softplus(log_q + log_ratio)).double()  # Σ_v log Q(v) / b
    kl = xlogx(b + at_s.rho) - xlogx(b) - at_s.rho * log_Q_x - b * excess

    correct = (z == x).double()
    P_z, D = b + at_s.rho * correct, (1 - at_t.rho) / K + at_t.rho * correct
    w = (at_s.rho - at_t.rho) / (at_s.rho * K * D)
    stayed = at_t.rho / (at_s.rho * D) * xlogx(P_z) - (1 - w) * log_Q_z  # (1 - w) log P(z) / Q(z), also for P(z) = 0
    kept = w * kl + stayed - D.log() + log_mixed(at_t.rho, log_q_z, K)
    return T * torch.where(absorbed, (1 - at_s.absorbed / at_t.absorbed) * kl, kept)


def xlogx(p: torch.Tensor) -> torch.Tensor:
    return torch.xlogy(p, p)


def log_mixed(rho: torch.Tensor, log_q: torch.Tensor, K: int) -> torch.Tensor:
    """log of (1 - ρ) / K + ρ q."""
    return torch.logaddexp(((1 - rho) / K).log(), rho.log() + log_q)


def reverse(candidates, quota: int, threshold: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed tokens alone, as mdlm. Correcting visible ones needs their places and the levels t and s: that is
    generation/scdd.py."""
    return common.most_trusted(candidates, quota, threshold)
