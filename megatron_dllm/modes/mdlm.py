"""Masked diffusion (MDLM; Sahoo et al. 2024, eq. 10; LLaDA, Nie et al. 2025, eq. 3).

A noise level t ~ U(0, 1) is drawn per sample, every supervised token becomes the mask token with probability
p = (1 - eps) t + eps, and a bidirectional network predicts the clean tokens:

    loss = Σ_{i noised} -log q(x_0,i | x_t) / p  /  N,      N = supervised tokens of the global batch,

an unbiased estimate of an upper bound on the negative log-likelihood in nats per token.
Shapes: one stream, Q = S; logits at position i predict token i (no shift).
"""

import torch

from megatron_dllm.data.collation import pad_sample
from megatron_dllm.data.sample import Sample
from megatron_dllm.modes.base import (
    BLOCK,
    DOCUMENT,
    NOISY,
    NUM_ATTRIBUTES,
    POSITION,
    STREAM,
    Corrupted,
    LossTerm,
    ModelInput,
    Term,
)
from megatron_dllm.noise import Draws

NEEDS_MASK_TOKEN = True
# `visible` is "same document" and nothing else: a batch of unpadded single documents needs no mask at all.
FULL_WITHIN_DOCUMENT = True
# A model-input row is as long as the sample (one stream).
STREAMS = 1


def add_args(group) -> None:
    """mdlm has no flags beyond the shared ones."""


def validate(args) -> None:
    if not 0 < args.dllm_eps <= 1:
        raise ValueError(f"--dllm-eps {args.dllm_eps} is the smallest masking rate: give a number in (0, 1].")


def corrupt(sample: Sample, draws: Draws, args) -> Corrupted:
    """Uniform masking. Order and dtype of the draws are the published ones (bit parity): u [1], then r [S]."""
    if (sample.tokens_S == args.dllm_mask_token_id).any():
        raise ValueError(
            f"sample {sample.index} holds the mask token {args.dllm_mask_token_id} before any noise: choose an "
            "id that the data never contains with --dllm-mask-token-id."
        )
    g = draws.generator()
    u = draws.level(g)
    p = (1 - args.dllm_eps) * u + args.dllm_eps
    noised_S = (torch.rand(len(sample), generator=g) < p) & sample.loss_mask_S
    return Corrupted(
        sample=sample,
        x_t_S=sample.tokens_S.masked_fill(noised_S, args.dllm_mask_token_id),
        noised_S=noised_S,
        weight_S=noised_S / p,
        level_S=p.expand(len(sample)),
    )


def layout(samples: list[Corrupted], length: int, args) -> ModelInput:
    """Pad every sample to `length` and stack: B rows of one stream."""
    padded = [_padded(c, length, args.dllm_pad_token_id) for c in samples]
    clean = [c.sample for c in padded]
    attributes_BQA = torch.zeros(len(samples), length, NUM_ATTRIBUTES, dtype=torch.int32)
    attributes_BQA[..., STREAM] = NOISY
    attributes_BQA[..., BLOCK] = 0
    attributes_BQA[..., POSITION] = torch.stack([s.position_S for s in clean])
    attributes_BQA[..., DOCUMENT] = torch.stack([s.document_S for s in clean])
    supervised = float(sum(int(s.loss_mask_S.sum()) for s in clean))
    noised = float(sum(int(c.noised_S.sum()) for c in padded))
    term = Term(
        targets_BQ=torch.stack([s.tokens_S for s in clean]),
        weights_BQ=torch.stack([c.weight_S for c in padded]),
        levels_BQ=torch.stack([c.level_S for c in padded]),
        count=supervised if args.dllm_loss_normalization == "supervised" else noised,
    )
    return ModelInput(
        tokens_BQ=torch.stack([c.x_t_S for c in padded]),
        position_ids_BQ=torch.stack([s.position_S for s in clean]),
        attributes_BQA=attributes_BQA,
        terms={"dllm": term},
        streams=STREAMS,
        tokens={
            "supervised": supervised,
            "noised": noised,
            "data": float(sum(len(c.sample) for c in samples)),
            "processed": float(len(samples) * length),
        },
    )


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Everything within a document sees everything else in it, in both directions."""
    return query[..., DOCUMENT] == key[..., DOCUMENT]


def loss(score) -> list[LossTerm]:
    return [LossTerm("dllm", score.weighted_nll("dllm"))]


def reverse(candidates, quota: int, threshold: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `quota` most trusted candidates, and with a `threshold` all others at least so trusted.

    Of equally trusted ones the first. Returns (chosen_K, ids_K), int64: indices of candidates and their tokens.
    """
    ids_C, confidence_C = candidates.propose()
    order = confidence_C.argsort(descending=True, stable=True)
    count = quota if threshold is None else max(quota, int((confidence_C >= threshold).sum()))
    chosen_K = order[:count]
    return chosen_K, ids_C[chosen_K]


def _padded(c: Corrupted, length: int, pad_id: int) -> Corrupted:
    missing = length - len(c.sample)
    if missing == 0:
        return c
    pad = torch.nn.functional.pad
    return Corrupted(
        sample=pad_sample(c.sample, length, pad_id, supervise=False),
        x_t_S=pad(c.x_t_S, (0, missing), value=pad_id),
        noised_S=pad(c.noised_S, (0, missing), value=False),
        weight_S=pad(c.weight_S, (0, missing)),
        level_S=pad(c.level_S, (0, missing)),
    )
