"""Which of L tokens are masked in which forward pass, and what their negative log-likelihoods then weigh.

With the noise level integrated out, the bound of masked diffusion on -log p(x) (MDLM; Sahoo et al. 2024, eq. 10) is

    E_l E_{M, |M| = l}  L / l · Σ_{i in M} -log q(x_i | x without M),      l uniform on 1..L, M uniform given l

(LLaDA; Nie et al. 2025, eq. 6 and algorithm 3). Drawing l, and masking exactly l tokens, varies much less than drawing
a level and masking each token with that probability. Two more steps, neither of which adds a bias:

* the levels of the n passes are stratified: l_j = 1 + floor(L · frac(u + j / n)), one uniform u for all;
* where all 2^L - 1 choices of M are at most n, they are enumerated, and the bound is exact.
"""

import math

import torch


def passes(length: int, draws: int) -> int:
    """Forward passes for `length` tokens if at most `draws` are wanted."""
    return min(2**length - 1, draws) if length < 63 else draws


def masks(length: int, draws: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked_NL bool, weight_N float64): Σ_n weight_n · (Σ of the nll of the tokens masked in pass n) has the bound as
    its expectation. N = passes(length, draws). Draws u [1] and r [N, L], or nothing if N enumerates the choices."""
    N = passes(length, draws)
    if length < 63 and 2**length - 1 == N:
        masked_NL = (torch.arange(1, N + 1)[:, None] >> torch.arange(length)) & 1 > 0
        choices = torch.tensor([math.comb(length, size) for size in range(length + 1)], dtype=torch.float64)
        size_N = masked_NL.sum(1)
        return masked_NL, 1 / (size_N * choices[size_N])  # (1 / L) (1 / choices) (L / size)
    u = torch.rand(1, generator=g, dtype=torch.float64)
    level_N = (u + torch.arange(N, dtype=torch.float64) / N) % 1.0
    size_N = (1 + (length * level_N).long()).clamp(max=length)
    rank_NL = torch.rand(N, length, generator=g).argsort(1).argsort(1)
    return rank_NL < size_N[:, None], length / (N * size_N.double())


def masks_of_blocks(
    block_S: torch.Tensor, scored_S: torch.Tensor, draws: int, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked_NS bool, weight_NS float32): `masks` of the scored tokens of every block, side by side.

    The bound of block diffusion is a sum over blocks, none of whose noisy tokens another block sees: so one pass masks
    some tokens of every block. With one block these are the draws of `masks`; blocks of one token need one pass.
    A block that needs fewer passes than another is clean, with weight 0, in the rest.
    """
    places = [(scored_S & (block_S == block)).nonzero()[:, 0] for block in block_S[scored_S].unique().tolist()]
    N = max((passes(len(place), draws) for place in places), default=0)
    masked_NS = torch.zeros(N, len(block_S), dtype=torch.bool)
    weight_NS = torch.zeros(N, len(block_S))
    for place in places:
        masked_nL, weight_n = masks(len(place), draws, g)
        masked_NS[: len(masked_nL), place] = masked_nL
        weight_NS[: len(masked_nL), place] = (masked_nL * weight_n[:, None]).float()
    return masked_NS, weight_NS
