"""What the guesses of a draft's blocks weigh, and how many of them would be accepted (modes/dflash.py).

Shapes: N scored rows of a rank, which holds its blocks whole; M blocks of K tokens that have any.
"""

import torch


def decay(prefix_BN: torch.Tensor, K: int, gamma: float) -> torch.Tensor:
    """[B, N, K] float32: 0 for the l known tokens, then exp(-(k - l) / gamma)."""
    guess_BNK = torch.arange(K) - prefix_BN[..., None]
    return torch.exp(-guess_BNK.clamp(min=0).float() / gamma) * (guess_BNK >= 0)


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
