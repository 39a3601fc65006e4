"""What a micro-batch holds, as the mode lays it out: rows by kind, rows that are scored, pairs that attention visits.

The training loop counts every micro-batch so, and a plan counts made-up samples so: nothing here knows a mode. Pairs
are counted by the mode's own rule (`visible`), query by query. Long sequences are sampled: of every stretch of rows
one, at places that the golden ratio spreads; a rule changes its counts slowly along a stream, and the places within a
block are met evenly.
"""

import functools
import itertools
from argparse import Namespace
from dataclasses import dataclass, field

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.models.gemma_layers import within_window
from megatron_dllm.models.targets.megatron import causal
from megatron_dllm.models.weights import is_gemma, target_layers
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import NUM_ATTRIBUTES, ModelInput, Rule
from megatron_dllm.noise import ValidationDraws
from megatron_dllm.parallel import first_pass_input

TILE = 128  # of block-sparse attention (flex's default, and tiled.py's)
RULE, WINDOW, TARGET = "rule", "window", "target"  # kinds of pairs: the mode's rule, within a window, a draft's target
_GOLDEN = 0.6180339887498949
SAMPLES = 64  # of a plan: levels of noise are spread evenly over them
PAIRS = 2**26  # of a plan, evaluated for each kind
_AT_ONCE = 2**22
_SEVERAL = 4  # samples of a plan whose pairs are counted, where they differ


@dataclass
class Rows:
    """Numbers of one micro-batch, or means over several.

    samples; data: tokens of text (without padding); processed: rows of the network's input, Q a sample; context: of
    these, in a draft, the text (which has no queries); canvas: a sample's rows of blocks beside the text; scored: by
    loss term, rows that go through the head. pairs: by kind, pairs of a query and a key that it sees; tiled: those in
    tiles of which some pair is seen. first: of a pass without a graph that comes before.
    """

    samples: float = 0.0
    data: float = 0.0
    processed: float = 0.0
    context: float = 0.0
    canvas: float = 0.0
    scored: dict[str, float] = field(default_factory=dict)
    pairs: dict[str, float] = field(default_factory=dict)
    tiled: dict[str, float] = field(default_factory=dict)
    first: "Rows | None" = None

    @property
    def queries(self) -> float:
        """Rows that attention has queries for, and that go through the whole layer."""
        return self.processed - self.context

    def scaled(self, factor: float) -> "Rows":
        """So many times as much."""
        times = lambda numbers: {name: value * factor for name, value in numbers.items()}
        return Rows(
            self.samples * factor,
            self.data * factor,
            self.processed * factor,
            self.context * factor,
            self.canvas,
            times(self.scored),
            times(self.pairs),
            times(self.tiled),
            None if self.first is None else self.first.scaled(factor),
        )

    def __add__(self, other: "Rows") -> "Rows":
        both = lambda a, b: {name: a.get(name, 0.0) + b.get(name, 0.0) for name in a | b}
        firsts = [rows for rows in (self.first, other.first) if rows is not None]
        return Rows(
            self.samples + other.samples,
            self.data + other.data,
            self.processed + other.processed,
            self.context + other.context,
            max(self.canvas, other.canvas),
            both(self.scored, other.scored),
            both(self.pairs, other.pairs),
            both(self.tiled, other.tiled),
            functools.reduce(Rows.__add__, firsts) if firsts else None,
        )


def rules(args: Namespace) -> dict[str, Rule]:
    """By kind: which query sees which key in some layer."""
    mode = get_mode(args.dllm_mode)
    rule = mode.rule(args) if hasattr(mode, "rule") else mode.visible
    kinds = {RULE: rule}
    if is_gemma(args):
        kinds[WINDOW] = functools.partial(within_window, rule=rule, window=args.dllm_window)
    if target_layers(args) is not None:
        kinds[TARGET] = causal
    return kinds


def count_rows(batch: ModelInput, args: Namespace, pairs: int, tiles: bool = False) -> Rows:
    """What a micro-batch holds. pairs: how many may be evaluated of each kind; tiles: whether to count tiles too
    (whole bands of queries are then evaluated)."""
    rows = _without_pairs(batch, args)
    rows.pairs, rows.tiled = _all_pairs(batch, args, pairs, tiles)
    if batch.terms and (needed := first_pass_input(batch, args)) is not None:  # of a first pass there is no other
        rows.first = count_rows(needed, args, pairs, tiles)
    return rows


def _without_pairs(batch: ModelInput, args: Namespace) -> Rows:
    B, Q = batch.tokens_BQ.shape
    return Rows(
        samples=B,
        data=batch.tokens["data"] if batch.terms else 0.0,
        processed=B * Q,
        context=B * (Q - batch.drafted) if target_layers(args) is not None else 0.0,
        canvas=batch.drafted,
        scored={name: float((term.weights_BQ != 0).sum()) for name, term in batch.terms.items()},
    )


def _all_pairs(batch: ModelInput, args: Namespace, pairs: int, tiles: bool) -> tuple[dict, dict]:
    seen, touched = {}, {}
    text = batch.tokens_BQ.shape[1] - batch.drafted
    for kind, rule in rules(args).items():
        attributes, first = batch.attributes_BQA, text if target_layers(args) is not None else 0
        if kind == TARGET:
            attributes, first = attributes[:, :text, :NUM_ATTRIBUTES], 0
        seen[kind], touched[kind] = count_pairs(rule, attributes, first, pairs, tiles)
    return seen, touched


def count_pairs(
    rule: Rule, attributes_BQA: torch.Tensor, first: int = 0, most: int = PAIRS, tiles: bool = False
) -> tuple[float, float]:
    """(pairs of a query and a key that it sees, pairs in tiles of TILE x TILE of which some pair is seen; 0 unless
    `tiles`), summed over batch rows. Queries: the rows from `first` on; keys: all. Exact where the rule need not be
    evaluated more than `most` times, else estimated from some queries (with `tiles`: some bands of TILE queries).
    """
    B, Q = attributes_BQA.shape[:2]
    height = TILE if tiles else 1
    bands = _bands(first, Q, max(1, most // max(1, B * Q)), height)
    seen = touched = 0.0
    for keys_QA in attributes_BQA:
        for some in itertools.batched(bands, max(1, _AT_ONCE // (height * Q))):
            queries_N = torch.cat([torch.arange(start, stop) for start, stop in some])
            allowed_NQ = rule(keys_QA[queries_N, None], keys_QA[None]).expand(len(queries_N), Q)
            seen += float(allowed_NQ.sum())
            for band_NQ in allowed_NQ.split([stop - start for start, stop in some]) if tiles else ():
                columns = torch.nn.functional.pad(band_NQ.any(0), (0, -Q % TILE)).view(-1, TILE).any(1)
                touched += float(columns.sum()) * TILE * len(band_NQ)
    share = sum(stop - start for start, stop in bands) / (Q - first)
    return seen / share, touched / share


def _bands(first: int, last: int, rows: int, height: int) -> list[tuple[int, int]]:
    """(start, stop) of bands of `height` queries: all of them, or of every stretch one, about `rows` queries in all."""
    available = -(-(last - first) // height)
    bands = min(available, max(1, rows // height))
    chosen = []
    for i in range(bands):
        low, high = i * available // bands, (i + 1) * available // bands
        start = first + (low + int((0.5 + i * _GOLDEN) % 1.0 * (high - low))) * height
        chosen.append((start, min(start + height, last)))
    return chosen


# --- made-up samples, for plans ---------------------------------------------------------------------------------------


def expected_rows(args: Namespace, document: int | None = None, answer: float = 1.0) -> Rows:
    """Means of one sample of checked arguments: a text of `--seq-length` tokens in documents of so many (default: one),
    of each of which the last share `answer` is supervised, under noise of evenly spread levels."""
    mode, length = get_mode(args.dllm_mode), args.dllm_sequence_length
    lay_out = lambda index: mode.layout(
        [mode.corrupt(_text(args, length, document, answer, index), ValidationDraws(index), args)], length, args
    )
    total, counted, known = Rows(), [], {}
    probability = getattr(args, "block_diffusion_self_conditioning", None)
    for index in range(SAMPLES):
        batch = lay_out(index)
        total = total + _without_pairs(batch, args)
        key = batch.attributes_BQA.numpy().tobytes()
        if len(known) < _SEVERAL and hash(key) not in known:
            known[hash(key)] = True
            counted.append(batch)
    rows = total.scaled(1 / SAMPLES)
    share = PAIRS // len(counted)
    means = functools.reduce(Rows.__add__, [_pairs_of(batch, args, share) for batch in counted]).scaled(
        1 / len(counted)
    )
    rows.pairs, rows.tiled = means.pairs, means.tiled
    if probability:  # validation noise tosses no coin
        rows.first = means.first.scaled(probability)
    return rows


def _pairs_of(batch: ModelInput, args: Namespace, most: int) -> Rows:
    if batch.self_conditioned_B is not None:
        batch.self_conditioned_B[:] = True
    return count_rows(batch, args, most, tiles=True)


def _text(args: Namespace, length: int, document: int | None, answer: float, index: int) -> Sample:
    """A sample of one token only, that means nothing to the run."""
    special = {args.dllm_mask_token_id, args.dllm_eos_token_id, args.dllm_pad_token_id}
    token = next(i for i in range(args.vocab_size) if i not in special)
    place_S = torch.arange(length)
    document = length if document is None else document
    position_S = place_S % document
    return Sample(
        tokens_S=torch.full((length,), token),
        loss_mask_S=position_S >= round(document * (1 - answer)),
        document_S=(place_S // document).int(),
        position_S=position_S,
        index=index,
    )
