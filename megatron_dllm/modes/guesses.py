"""What the guesses of a draft's blocks cost (flags and weights of modes/dflash.py), and how long right ones run.

Shapes: N scored rows of a rank, which holds its blocks whole; M blocks of K tokens that have any.
"""

import math

import torch

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # by block size, as published; for others half of it, at least 2
LOSSES = ("decay", "variable-prefix", "dpace")


def add_args(group) -> None:
    group.add_argument(
        "--dflash-loss",
        choices=LOSSES,
        default="decay",
        help="All tokens after the anchor are guessed (default), or those after a prefix of a drawn length; dpace: "
        "all, weighted by the draft's own confidence instead of a decay.",
    )
    group.add_argument(
        "--dflash-dpace-alpha",
        type=float,
        default=None,
        metavar="ALPHA",
        help="How much the confidence of dpace is smoothed towards 1, in (0, 1]; default 0.5.",
    )
    group.add_argument(
        "--dflash-kl-weight",
        type=float,
        default=0.0,
        metavar="LAMBDA",
        help="Weight of the divergence from the target's distribution; the text's cross entropy weighs 1 - LAMBDA.",
    )
    group.add_argument(
        "--dflash-kl-temperature",
        type=float,
        default=None,
        metavar="T",
        help="Both distributions are of logits / T, and the divergence weighs T squared; default 1.",
    )
    group.add_argument(
        "--dflash-loss-decay",
        type=float,
        default=None,
        metavar="GAMMA",
        help="Later tokens of a block weigh exp(-(k - 1) / GAMMA); default 7, 5, 4 for blocks of 16, 10, 8, else half; "
        "inf: all weigh the same.",
    )


def validate(args) -> None:
    """Fill in what belongs to the kind of loss; ValueError (one sentence) for what does not, or is out of range."""
    _validate_weights(args)
    _validate_distillation(args)


def _validate_weights(args) -> None:
    if args.dflash_loss == "dpace":
        if args.dflash_loss_decay is not None:
            raise ValueError("--dflash-loss-decay has no effect on --dflash-loss dpace, which has its own: remove it.")
        if args.dllm_compat:
            raise ValueError(
                f"the recipe of --dllm-compat {args.dllm_compat} has no --dflash-loss dpace: leave out one of them."
            )
        if args.dflash_dpace_alpha is None:
            args.dflash_dpace_alpha = 0.5
        if not 0 < args.dflash_dpace_alpha <= 1:
            raise ValueError(f"--dflash-dpace-alpha {args.dflash_dpace_alpha} is no share: give a number in (0, 1].")
        return
    if args.dflash_dpace_alpha is not None:
        raise ValueError("--dflash-dpace-alpha needs --dflash-loss dpace: add it.")
    if args.dflash_loss_decay is None:
        args.dflash_loss_decay = GAMMAS.get(args.dllm_block_size, max(2.0, args.dllm_block_size / 2))
    if not args.dflash_loss_decay > 0:
        raise ValueError(f"--dflash-loss-decay {args.dflash_loss_decay} is out of range: give a number above 0.")


def _validate_distillation(args) -> None:
    if not 0 <= args.dflash_kl_weight <= 1:
        raise ValueError(f"--dflash-kl-weight {args.dflash_kl_weight} is no share: give a number from 0 to 1.")
    if args.dflash_kl_weight == 0:
        if args.dflash_kl_temperature is not None:
            raise ValueError("--dflash-kl-temperature needs --dflash-kl-weight above 0: add it.")
        return
    if args.dflash_features is not None:
        raise ValueError(
            "--dflash-features does not hold what the target predicts, which --dflash-kl-weight needs: leave out one "
            "of them."
        )
    if args.dflash_kl_temperature is None:
        args.dflash_kl_temperature = 1.0
    if not 0 < args.dflash_kl_temperature < math.inf:
        raise ValueError(
            f"--dflash-kl-temperature {args.dflash_kl_temperature} divides logits: give a number above 0, like 1."
        )


def decay(prefix_BN: torch.Tensor, K: int, gamma: float) -> torch.Tensor:
    """[B, N, K] float32: 0 for the l known tokens, then exp(-(k - l) / gamma)."""
    guess_BNK = torch.arange(K) - prefix_BN[..., None]
    return torch.exp(-guess_BNK.clamp(min=0).float() / gamma) * (guess_BNK >= 0)


def dpace(nll_N: torch.Tensor, rows, batch_size: int, K: int, alpha: float) -> torch.Tensor:
    """[N] float32, detached: D-PACE's weights (arXiv:2605.18810, equations 7 and 8) of rows with these costs,

        w_j = Σ_{m >= j} Π_{i <= m} q~_i,    q~_i = (1 - alpha) exp(-nll_i) + alpha

    over the scored places of each block: others do not end a run (q~ = 1) and get no credit. rows: a RankTerm."""
    confidence_N = (1 - alpha) * torch.exp(-nll_N.detach()) + alpha
    run_MK, block_N = runs(confidence_N, rows, batch_size, K)
    return run_MK.flip(1).cumsum(1).flip(1)[block_N, rows.offsets_N.long()]


def runs(kept_N: torch.Tensor, rows, batch_size: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([M, K] Π_{i <= k} kept_i at scored places of the blocks, 0 at others, which do not end a run; [N] each row's
    block). kept_N: float, in [0, 1]; rows: a RankTerm."""
    offsets_N = rows.offsets_N.long()
    # rows are numbered place · B + b: those of a block differ by their offset alone
    starts, block_N = (rows.rows_N - offsets_N * batch_size).unique(return_inverse=True)
    kept_MK = kept_N.new_ones(len(starts), K)
    scored_MK = torch.zeros_like(kept_MK)
    kept_MK[block_N, offsets_N] = kept_N
    scored_MK[block_N, offsets_N] = 1
    return kept_MK.cumprod(1) * scored_MK, block_N
