"""Single samples as the network sees them, as data.

All of it comes from the path that training takes: build_datasets, CorruptedSamples, Collate.layout (a micro-batch
before context parallelism slices it) and the mode's `visible`. Nothing here knows a mode by name.

Shapes: S places of a sample padded as in its micro-batch, A attributes, Q = streams · S rows, or with the draft blocks
that some modes have behind their streams streams · S + N · K; a picture has M queries and P keys.
"""

import contextlib
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.datasets.utils import Split

from megatron_dllm import data
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.data.sample import PADDING_DOCUMENT
from megatron_dllm.data.stream import Collate, CorruptedSamples
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.models import dflash
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import BLOCK, CLEAN, COMPLEMENT, CONTEXT, DOCUMENT, NOISY, STREAM, Corrupted, Rule, Term

STREAM_NAMES = {NOISY: "x_t", CLEAN: "x_0", CONTEXT: "context", COMPLEMENT: "complement"}
PADDING_SHOWN = 2  # places of it
_DATA = Path(data.__file__).parent


@dataclass(frozen=True)
class Scored:
    """What one loss term scores of a sample: its row of a `Term`, and two shares of the term's denominator.

    weights_Q     0 where nothing is scored
    count         of this sample; batch_count: of its micro-batch
    shifts        for which d the target of every scored row is the data d places on (0: no shift, 1: the next token)
    """

    targets_Q: torch.Tensor
    weights_Q: torch.Tensor
    levels_Q: torch.Tensor | None
    offsets_Q: torch.Tensor | None
    inputs_Q: torch.Tensor | None
    count: float
    batch_count: float
    shifts: tuple[int, ...]


@dataclass(frozen=True)
class Inspection:
    """One sample.

    index         as asked for; that of `corrupted.sample` is smaller where an evaluation has begun anew
    data_tokens   its tokens before --dllm-padding supervise adds to them
    batch         indices of its micro-batch, which decides how far it is padded
    streams       their names, in the order of Q
    data_S        clean ids, then the padding of the micro-batch
    places_Q      of which place of the sample a row is; of draft blocks those that come after its end too
    blocks_NK     the rows of draft blocks, [0, 1] without any
    changed_Q     True where noise has been, also where it drew the token that was there already
    visible       the mode's rule
    """

    index: int
    corrupted: Corrupted
    data_tokens: int
    batch: range
    streams: list[str]
    data_S: torch.Tensor
    tokens_Q: torch.Tensor
    places_Q: torch.Tensor
    blocks_NK: torch.Tensor
    changed_Q: torch.Tensor
    position_ids_Q: torch.Tensor
    attributes_QA: torch.Tensor
    terms: dict[str, Scored]
    visible: Rule

    def __len__(self) -> int:
        """S."""
        return len(self.data_S)

    def rows(self, stream: int) -> slice:
        """The places of one stream in Q."""
        return slice(stream * len(self), (stream + 1) * len(self))

    def supervised_S(self) -> torch.Tensor:
        missing = len(self) - len(self.corrupted.sample)
        return torch.nn.functional.pad(self.corrupted.sample.loss_mask_S, (0, missing))

    def padding_S(self) -> torch.Tensor:
        """True at places that belong to no document."""
        return self.attributes_QA[self.rows(0), DOCUMENT] == PADDING_DOCUMENT

    def clip(self, start: int, stop: int) -> range:
        """The places start..stop as far as there are any, without a long tail of padding."""
        real = (~self.padding_S()).nonzero()
        end = int(real[-1]) + 1 if len(real) else 0
        return range(start, max(start, min(stop, len(self), end + PADDING_SHOWN)))

    def borders(self) -> dict[int, str]:
        """Places where something begins: "document" (or the padding) or "block"."""
        attributes = self.attributes_QA[self.rows(0)]
        begins = lambda column: (attributes[1:, column] != attributes[:-1, column]).nonzero()[:, 0] + 1
        return dict.fromkeys(begins(BLOCK).tolist(), "block") | dict.fromkeys(begins(DOCUMENT).tolist(), "document")

    def blocks_at(self, places: range) -> torch.Tensor:
        """[blocks, K] rows of the draft blocks that begin at these places and count."""
        first_N = self.blocks_NK[:, 0]
        begins_N = self.places_Q[first_N]
        kept_N = self.attributes_QA[first_N, DOCUMENT] != PADDING_DOCUMENT
        return self.blocks_NK[kept_N & (begins_N >= places.start) & (begins_N < places.stop)]

    def part(self, row: int) -> tuple[str, str]:
        """(name of the stream or "block" and its number, place in it) of a row."""
        stream, place = divmod(row, len(self))
        if stream < len(self.streams):
            return self.streams[stream], str(place)
        block, offset = divmod(row - len(self.streams) * len(self), self.blocks_NK.shape[1])
        return f"block {block}", f"+{offset}"

    def heading(self, row: int) -> str:
        """What a picture says above a row and those like it."""
        return "blocks" if row >= len(self.streams) * len(self) else self.part(row)[0]

    def border(self, before: int, row: int) -> str:
        """What begins with `row` when `before` is shown before it: "stream", "document", "block" or ""."""
        streams, S = len(self.streams), len(self)
        if min(before // S, streams) != min(row // S, streams):
            return "stream"
        if row >= streams * S:
            return "block" if self.part(before)[0] != self.part(row)[0] else ""
        return self.borders().get(row % S, "")

    def picture(self, places: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The attention rule between these places of all streams: (queries_M, keys_P, allowed_MP, sees_M). With draft
        blocks, of those that begin there: only they have queries.

        queries_M, keys_P: rows; allowed[q, k]: query q sees key k; sees_M: how many of all Q keys a query sees.
        """
        streamed = torch.arange(len(self.streams) * len(self)).view(-1, len(self))
        blocks = self.blocks_at(places).flatten()
        keys_P = torch.cat([streamed[:, places.start : places.stop].flatten(), blocks])
        queries_M = blocks if len(self.blocks_NK) else keys_P
        allowed_MQ = self.visible(self.attributes_QA[queries_M][:, None], self.attributes_QA[None])
        return queries_M, keys_P, allowed_MQ[:, keys_P], allowed_MQ.sum(1)


class Inspector:
    """inspector(index) -> Inspection, from the arguments of a training command and its tokenizer.

    notes: what the data set had to say while it was read. Raises ValueError, as training would.
    """

    def __init__(self, args, tokenizer: Tokenizer, validation: bool = False):
        self.args, self.tokenizer, self.validation = args, tokenizer, validation
        self.notes: list[str] = []
        with self._noting():
            datasets = build_datasets(args, tokenizer)
        source, self.micro_batch, split = datasets.train, args.micro_batch_size, Split.train
        if validation:
            source, self.micro_batch, split = datasets.valid, args.eval_micro_batch_size, Split.valid
            if source is None:
                raise ValueError("there is no validation data: give it a share with --split, or a path of its own.")
            if args.eval_iters < 1:
                raise ValueError("--eval-iters 0 evaluates nothing: give the number that training is given.")
        self.samples, self.collate = CorruptedSamples(source, args, split), Collate(args, 1, 0)
        self._tokens: dict[int, tuple[str, bool]] = {}

    def __call__(self, index: int) -> Inspection:
        first = index // self.micro_batch * self.micro_batch  # as Megatron's sampler cuts the stream
        indices, b = range(first, first + self.micro_batch), index - first
        with self._noting():
            rows = [self.samples[i] for i in indices]
            data_tokens = len(self.samples.samples.sample(rows[b].sample.index))
        batch, mode, c = self.collate.layout(rows), get_mode(self.args.dllm_mode), rows[b]
        tokens_Q, attributes_QA = batch.tokens_BQ[b], batch.attributes_BQA[b]
        streamed = slice(len(tokens_Q) - batch.drafted)
        S = streamed.stop // batch.streams
        data_S = torch.full((S,), self.args.dllm_pad_token_id)
        data_S[: len(c.sample)] = c.sample.tokens_S
        blocks_NK, begins_NK = self._blocks(c, streamed.stop, batch.drafted)
        places_Q = torch.cat([torch.arange(S).repeat(batch.streams), begins_NK.flatten()])
        changed_Q, names = tokens_Q != data_S[places_Q.clamp(max=S - 1)], []
        of_streams = (x[streamed].view(-1, S) for x in (changed_Q, attributes_QA[:, STREAM]))
        for changed_S, kinds_S in zip(*of_streams, strict=True):
            kinds = kinds_S.unique().tolist()
            names.append(" and ".join(STREAM_NAMES.get(kind, f"stream {kind}") for kind in kinds))
            if kinds == [NOISY]:
                changed_S[: len(c.sample)] |= c.noised_S
        alone = mode.layout([c], S, self.args).terms
        return Inspection(
            index=index,
            corrupted=c,
            data_tokens=data_tokens,
            batch=indices,
            streams=names,
            data_S=data_S,
            tokens_Q=tokens_Q,
            places_Q=places_Q,
            blocks_NK=blocks_NK,
            changed_Q=changed_Q,
            position_ids_Q=batch.position_ids_BQ[b],
            attributes_QA=attributes_QA,
            terms={name: _scored(term, b, alone[name].count, data_S, places_Q) for name, term in batch.terms.items()},
            visible=self._draft_rule() if batch.drafted else mode.visible,
        )

    def _draft_rule(self) -> Rule:
        return dflash.rule(self.args.dflash_causal_block, self.args.dflash_window)

    def _blocks(self, c: Corrupted, first: int, drafted: int) -> tuple[torch.Tensor, torch.Tensor]:
        """([N, K] rows of draft blocks, the places that they stand for). first: their first row, drafted: how many."""
        if not drafted:
            return torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
        K = self.args.dllm_block_size
        return torch.arange(first, first + drafted).view(-1, K), c.anchors_N[: drafted // K, None] + torch.arange(K)

    def token(self, id: int) -> tuple[str, bool]:
        """(what the token adds to a text, see `Tokenizer.piece`; whether it is a special one)."""
        if id not in self._tokens:
            known = id < self.tokenizer.vocab_size
            special = not known or self.tokenizer.is_special(id)
            text = self.tokenizer.piece(id) if known else f"<{id}>"
            if id == self.args.dllm_mask_token_id and not (known and special):
                text, special = f"<mask:{id}>", True
            self._tokens[id] = text, special
        return self._tokens[id]

    @contextlib.contextmanager
    def _noting(self):
        """Keeps what the data code warns of, and Megatron's reports off the screen."""
        logging.disable(logging.INFO)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                yield
        finally:
            logging.disable(logging.NOTSET)
        self.notes += [str(w.message) for w in caught if Path(w.filename).is_relative_to(_DATA)]


def _scored(term: Term, b: int, count: float, data_S: torch.Tensor, places_Q: torch.Tensor) -> Scored:
    row = lambda tensor: None if tensor is None else tensor[b]
    targets_Q, weights_Q, S = term.targets_BQ[b], term.weights_BQ[b], len(data_S)
    scored = weights_Q.nonzero()[:, 0]

    def fits(d: int) -> bool:
        place = places_Q[scored] + d
        inside = bool(((place >= 0) & (place < S)).all())
        return inside and torch.equal(targets_Q[scored], data_S[place])

    return Scored(
        targets_Q,
        weights_Q,
        row(term.levels_BQ),
        row(term.offsets_BQ),
        row(term.inputs_BQ),
        count,
        term.count,
        shifts=tuple(d for d in (0, 1, -1) if fits(d)),
    )
