"""The contract of a training mode, and the nouns that modes, model and training loop share.

A mode is a module in this folder with these functions, always in this order (see `mdlm.py`):

    add_args(group)                     its private flags
    validate(args)                      raises ValueError with one sentence that says what to do
    corrupt(sample, draws, args)        Sample -> Corrupted; one sample, CPU, pure
    layout(samples, length, args)       [Corrupted] -> ModelInput; what the network sees, and what is scored
    visible(query, key)                 may this query attend to this key? boolean, on attribute vectors
    loss(score)                         ScoreView -> [LossTerm]; never sees layouts, autocast or .backward()
    reverse(candidates, quota, threshold)   one denoising step for the sampler: (chosen_K, ids_K), which of the
                                        candidates (generation/selection.py) to commit, and to which ids

Shapes: B rows, S clean length, Q model length (S for one stream, 2S for two), A attributes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_dllm.data.sample import Sample

# Columns of `attributes_BQA`: all that a visibility rule may look at. An integer tensor, so that it survives
# activation recomputation, pipeline stages and context-parallel slicing.
STREAM, BLOCK, POSITION, DOCUMENT = range(4)
NUM_ATTRIBUTES = 4
NOISY, CLEAN, CONTEXT = range(3)  # values of STREAM

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Corrupted:
    """A sample after noise.

    x_t_S       int64, what replaces the clean ids
    noised_S    bool, where a token was noised; a subset of the supervised tokens
    weight_S    float32, weight of each token's negative log-likelihood; 0 where it is not scored
    level_S     float32 in [0, 1], the noise level t behind each token, for the loss by noise level
    """

    sample: Sample
    x_t_S: torch.Tensor
    noised_S: torch.Tensor
    weight_S: torch.Tensor
    level_S: torch.Tensor


@dataclass
class Term:
    """What one loss term scores. targets_BQ int64; weights_BQ float32, 0 where a row is not scored."""

    targets_BQ: torch.Tensor
    weights_BQ: torch.Tensor
    levels_BQ: torch.Tensor
    count: float  # this micro-batch's share of the term's denominator


@dataclass
class ModelInput:
    """A micro-batch as a mode lays it out, before context-parallel slicing.

    tokens_BQ, position_ids_BQ int64; attributes_BQA int32 (see the column names above).
    streams: into how many equally long streams Q divides; a context-parallel rank owns the same positions
    of each. tokens: counters for the logs (sums over the micro-batch).
    """

    tokens_BQ: torch.Tensor
    position_ids_BQ: torch.Tensor
    attributes_BQA: torch.Tensor
    terms: dict[str, Term]
    streams: int = 1
    tokens: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossTerm:
    """sum: differentiable scalar, Σ weight·nll over this rank's rows. Training divides it once by its count
    over the whole global batch and multiplies it by `weight`."""

    name: str
    sum: torch.Tensor
    weight: float = 1.0
