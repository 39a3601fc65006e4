"""The contract of a training mode, and the nouns that modes, model and training loop share.

A mode is a module in this folder with these names, always in this order (see `mdlm.py`):

    NEEDS_MASK_TOKEN                    its noise replaces tokens by a mask token
    FULL_WITHIN_DOCUMENT                `visible` is "same document" and nothing else
    USES                                which of the shared flags (arguments.py) it reads; the others are refused
    REQUIRED                            optional: private flag -> the sentence with which a run without it is refused
    add_args(group)                     its private flags
    validate(args)                      raises ValueError with one sentence that says what to do; fills in defaults
    streams(args)                       how many streams of S tokens its model input has
    model_length(args)                  optional: Q, where that is not S times the streams
    corrupt(sample, draws, args)        Sample -> Corrupted; one sample, CPU, pure
    layout(samples, length, args)       [Corrupted] -> ModelInput; what the network sees, and what is scored
    visible(query, key)                 may this query attend to this key? boolean, on attribute vectors
    rule(args)                          optional: what takes its place in a run, where flags change it
    loss(score, args)                   ScoreView -> [LossTerm]; never sees layouts, autocast or .backward()
    reverse(candidates, quota, threshold)   one denoising step for the samplers: (chosen_K, ids_K), which of the
                                        candidates (generation/selection.py) to commit, and to which ids

and, where a step's losses shape the next one, `TERMS`, their names, and `after_step(losses, args)`, which keeps what
it learns in `args.dllm_state` (saved with the checkpoint); and where experts are not the trained model's own,
`experts(args)`, the number that expert parallelism shares out.

Shapes: B rows, S clean length, Q model length (S times the number of streams, and drafted blocks), A attributes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_dllm.data.sample import Sample

# Columns of `attributes_BQA`: all that a visibility rule may look at. An integer tensor, so that it survives
# activation recomputation, pipeline stages and context-parallel slicing.
STREAM, BLOCK, POSITION, DOCUMENT = range(4)
NUM_ATTRIBUTES = 4
# One more, of modes whose blocks stand beside the text (dflash, block_diffusion): the position at which a token's block
# begins. What such a token sees of the text, and a sliding window of it, is counted from there.
ANCHOR = NUM_ATTRIBUTES
# values of STREAM; CONTEXT: keys that another network's hidden states give, without queries; COMPLEMENT: a second
# noisy copy
NOISY, CLEAN, CONTEXT, COMPLEMENT = range(4)

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Corrupted:
    """A sample after noise.

    x_t_S       int64, what replaces the clean ids
    noised_S    bool, where a token was noised; a subset of the supervised tokens
    weight_S    float32, weight of each token's negative log-likelihood; 0 where it is not scored
    level_S     float32 in [0, 1], the noise level t behind each token, for the loss by noise level
    block_S     int32, number of each token's block, where the mode has blocks; never decreasing
    offset_S    int32, place of each token within its block
    """

    sample: Sample
    x_t_S: torch.Tensor
    noised_S: torch.Tensor
    weight_S: torch.Tensor
    level_S: torch.Tensor
    block_S: torch.Tensor | None = None
    offset_S: torch.Tensor | None = None


@dataclass
class Term:
    """What one loss term scores.

    targets_BQ int64; weights_BQ float32, 0 where a row is not scored
    count       this micro-batch's share of the term's denominator
    levels_BQ   float32, the noise level behind each row, if the loss is to be logged by it
    offsets_BQ  int32, place within the block, if the loss is to be logged by it
    inputs_BQ   int64, the id that the network saw for the token that the row predicts, if the loss depends on it
    teacher_BQ  int64, the place of the text at which a teacher predicts the row's token, if the loss depends on it
    """

    targets_BQ: torch.Tensor
    weights_BQ: torch.Tensor
    count: float
    levels_BQ: torch.Tensor | None = None
    offsets_BQ: torch.Tensor | None = None
    inputs_BQ: torch.Tensor | None = None
    teacher_BQ: torch.Tensor | None = None


@dataclass
class ModelInput:
    """A micro-batch as a mode lays it out, before context-parallel slicing.

    tokens_BQ, position_ids_BQ int64; attributes_BQA int32 (see the column names above).
    streams: into how many equally long streams Q divides; a context-parallel rank owns the same positions of each.
    drafted: tokens of blocks after the streams (dflash, block_diffusion). tokens: counters for the logs (sums over the
    micro-batch): supervised, noised, data and processed tokens, and what else a mode counts. self_conditioned_B: bool,
    rows whose blocks are denoised with a first prediction in view; None where there are never any. noised_BD: bool,
    which of the drafted tokens are noised, for tools that show them; given wherever tokens are drafted.
    """

    tokens_BQ: torch.Tensor
    position_ids_BQ: torch.Tensor
    attributes_BQA: torch.Tensor
    terms: dict[str, Term]
    streams: int = 1
    tokens: dict[str, float] = field(default_factory=dict)
    drafted: int = 0
    self_conditioned_B: torch.Tensor | None = None
    noised_BD: torch.Tensor | None = None


@dataclass(frozen=True)
class LossTerm:
    """One part of the loss: weight · sum / count.

    sum: differentiable scalar, Σ over this rank's rows; training divides it once by the term's count over the
    whole global batch. It is reported by name, without its weight.
    of: the term whose rows it is of and whose count divides it, if that has another name.
    """

    name: str
    sum: torch.Tensor
    weight: float = 1.0
    of: str | None = None

    @property
    def counted(self) -> str:
        return self.of or self.name
