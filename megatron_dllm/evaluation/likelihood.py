"""How likely a model finds given continuations of given contexts: exactly, or by the bound that it was trained with.

    loaded = load("checkpoints/run")
    loglikelihood(loaded, [(context_ids, continuation_ids), ...], num_draws=128)

    exact   log p of the causal (clean) stream of hybrid and idlm, in one pass
    bound   a lower bound on log p, estimated without bias by passes over noised continuations: masked diffusion for
            mdlm, the sum over blocks for bd3lm and hybrid (both with masks of exact counts, masks.py), and the discrete
            bound of its own chain for scdd. With blocks of one token bd3lm's is the autoregressive likelihood; with one
            block it is mdlm's, with the same draws

A continuation is a sample whose context is not supervised: the network's input, visibility and loss are the mode's own
(`layout`, `visible`, `loss`), only the noise is drawn here (estimators.py). It is a function of seed, context and the
continuation's length (without a context: of seed and text), not of order, batch or process, and equally long answers to
one question are compared on equal masks. Differences between batches are those of floating-point sums.

Shapes: S tokens of context and continuation, B rows of a batch, N passes of one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

import torch
from megatron.core.utils import unwrap_model

from megatron_dllm.data.sample import Sample
from megatron_dllm.evaluation import AUTO, BOUND, EXACT, LIKELIHOODS
from megatron_dllm.evaluation.estimators import CLEAN_TERM, estimator_of
from megatron_dllm.evaluation.replicas import share_out
from megatron_dllm.generation.load import Loaded
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import Corrupted
from megatron_dllm.parallel import shard

BOUNDED = ("bd3lm", "hybrid", "mdlm", "scdd")

Request = tuple[Sequence[int], Sequence[int]]


class Score(NamedTuple):
    """nats: log p of the continuation, or the estimated lower bound on it; is_greedy: it is what greedy decoding
    writes."""

    nats: float
    is_greedy: bool


@dataclass
class Statistics:
    """Added up by `loglikelihood`: sequences that went through the network, on all copies together."""

    forwards: int = 0


def has_likelihood(args) -> bool:
    """Whether models trained with `args` offer any."""
    return args.dllm_mode in CLEAN_TERM or args.dllm_mode in BOUNDED


def kind_of(args, likelihood: str = AUTO) -> str:
    """EXACT or BOUND: what models trained with `args` offer. ValueError if it is not what `likelihood` asks for."""
    mode = args.dllm_mode
    if likelihood == AUTO:
        likelihood = EXACT if mode in CLEAN_TERM else BOUND
    offering = {EXACT: sorted(CLEAN_TERM), BOUND: sorted(BOUNDED)}
    if likelihood not in offering:
        raise ValueError(f"--likelihood {likelihood} is unknown: choose one of {', '.join(LIKELIHOODS)}.")
    if mode not in offering[likelihood]:
        raise ValueError(
            f"a model trained with --dllm-mode {mode} has no {likelihood} likelihood: --likelihood {likelihood} is for "
            f"{', '.join(offering[likelihood])}."
        )
    return likelihood


def loglikelihood(
    loaded: Loaded,
    requests: Sequence[Request],
    *,
    likelihood: str = AUTO,
    num_draws: int = 128,
    batch_size: int = 8,
    seed: int = 1234,
    check_greedy: bool = False,
    statistics: Statistics | None = None,
) -> list[Score]:
    """One Score for each (context, continuation), both ids.

    loaded        generation.load.Loaded; tensor parallel at most. Call it on all processes with the same requests:
                  copies of the model share them out, and all return the same
    num_draws     passes for a bound; fewer where fewer make it exact
    batch_size    rows at a time; changes nothing but rounding
    check_greedy  for a bound: also decode every continuation, one token a step, to find out whether it `is_greedy`
                  (costs as many passes as it has tokens); else False. An exact likelihood knows it without: every token
                  is the likeliest one but for the mask, which is never written
    An empty continuation is certain: (0.0, True).
    Raises ValueError (one sentence): a likelihood that the mode does not have, more tokens than positions, a mask token
    or an unknown id in a request, an exact likelihood without any context.
    """
    args = loaded.args
    kind = kind_of(args, likelihood)
    if num_draws < 1 or batch_size < 1:
        raise ValueError(f"num_draws {num_draws} and batch_size {batch_size} must be at least 1.")
    samples = [_sample(number, request, args, kind) for number, request in enumerate(requests, 1)]
    estimator = estimator_of(kind == EXACT, args, num_draws, seed)
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i]), i))  # rows of a batch about equally long
    rows = [(i, n) for i in order for n in range(estimator.passes(samples[i]))]

    def score_batches(batches: list) -> list[tuple[list[float], list[bool]]]:
        return [_score([estimator.corrupt(samples[i])[n] for i, n in batch], loaded, estimator) for batch in batches]

    values, greedy = [0.0] * len(samples), [True] * len(samples)
    batches = list(batched(rows, batch_size))
    for batch, (nll, predicted) in zip(batches, share_out(batches, score_batches), strict=True):
        for (i, _), value, right in zip(batch, nll, predicted, strict=True):
            values[i] += value
            greedy[i] = greedy[i] and right
    if kind == BOUND:
        greedy = _decoded(loaded, requests, batch_size) if check_greedy else [not x for _, x in requests]
    if statistics is not None:
        statistics.forwards += len(rows)
    return [Score(-value if value else 0.0, right) for value, right in zip(values, greedy, strict=True)]


def windows(ids: Sequence[int], longest: int, prefix: Sequence[int] = ()) -> list[Request]:
    """A text of any length as requests of at most `longest` tokens: every token is scored once. The first window begins
    with `prefix`; the others with as many tokens before theirs as fit, but at least one."""
    ids, prefix = list(ids), list(prefix)
    out, start = [], 0
    while start < len(ids):
        scored = longest - (1 if start else len(prefix))
        end = min(len(ids), start + max(1, scored))
        out.append((ids[max(0, end - longest) : start] if start else prefix, ids[start:end]))
        start = end
    return out


# --- requests -------------------------------------------------------------------------------------------------------


def _sample(number: int, request: Request, args, kind: str) -> Sample:
    """The request as a sample of which the continuation is supervised."""
    context, continuation = (list(part) for part in request)
    tokens_S = torch.tensor(context + continuation, dtype=torch.int64)
    where = f"request {number}"
    if len(tokens_S) > args.max_position_embeddings:
        raise ValueError(
            f"{where} is {len(tokens_S)} tokens long, but the model has {args.max_position_embeddings} positions: "
            "shorten its context."
        )
    if len(tokens_S) and not 0 <= int(tokens_S.min()) <= int(tokens_S.max()) < args.vocab_size:
        raise ValueError(f"{where} holds ids outside the model's vocabulary of {args.vocab_size}: correct them.")
    if args.dllm_mask_token_id in context + continuation:
        raise ValueError(f"{where} holds the mask token {args.dllm_mask_token_id}, which is no text: remove it.")
    if kind == EXACT and continuation and not context:
        raise ValueError(f"{where} has no context to predict its first token from: begin it with BOS or EOS.")
    place_S = torch.arange(len(tokens_S))
    return Sample(tokens_S, place_S >= len(context), torch.zeros_like(place_S, dtype=torch.int32), place_S, number)


# --- scores ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _score(samples: list[Corrupted], loaded: Loaded, estimator) -> tuple[list[float], list[bool]]:
    """Of each row of a batch Σ weight · nll, in float64, and whether all its scored tokens are predicted."""
    mode, model = get_mode(loaded.args.dllm_mode), loaded.model
    batch = estimator.layout(samples, max(len(c.sample) for c in samples))
    rank = shard(batch, [], 1, 0, mode.FULL_WITHIN_DOCUMENT).to(torch.cuda.current_device())
    was_training = unwrap_model(model).training
    model.eval()
    try:
        term, nats_N, predicted_N = model(
            rank.tokens_BQ,
            rank.position_ids_BQ,
            rank.attributes_BQA,
            loss=lambda view: estimator.score(view, rank.terms),
            terms=rank.terms,
        )
    finally:
        model.train(was_training)
    row_N = term.rows_N.cpu() % len(samples)  # rows lie sequence first
    weighted_N = nats_N.cpu().double() * term.weights_N.cpu().double()
    missed_B = torch.zeros(len(samples)).index_add_(0, row_N, (~predicted_N.cpu()).float())
    total_B = torch.zeros(len(samples), dtype=torch.float64).index_add_(0, row_N, weighted_N)
    return total_B.tolist(), (missed_B == 0).tolist()


def _decoded(loaded: Loaded, requests: Sequence[Request], batch_size: int) -> list[bool]:
    """Whether the sampler writes each continuation: the likeliest token of all, one a step."""
    from megatron_dllm.generation import GenerationConfig, generate

    answers = {}
    for length in sorted({len(continuation) for _, continuation in requests if len(continuation)}):
        contexts = list(dict.fromkeys(tuple(c) for c, continuation in requests if len(continuation) == length))
        config = GenerationConfig(max_new_tokens=length, steps=length, batch_size=batch_size)
        write = lambda own, config=config: [
            list(answer.ids) for answer in generate(loaded.model, loaded.tokenizer, [list(c) for c in own], config)
        ]
        for context, ids in zip(contexts, share_out(contexts, write), strict=True):
            answers[context, length] = ids
    return [not len(x) or answers[tuple(c), len(x)] == list(x) for c, x in requests]
