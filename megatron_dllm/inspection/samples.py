"""Single samples as the network sees them, as data.

All of it comes from the path that training takes: build_datasets, CorruptedSamples, Collate.layout (a micro-batch
before context parallelism slices it) and the run's attention rule. Nothing here knows a mode by name.

Shapes: S places of a sample padded as in its micro-batch, A attributes, D tokens of blocks that stand beside the text,
Q = streams · S + D rows; a picture has M queries and P keys.
"""

import contextlib
import logging
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from megatron.core.datasets.utils import Split

from megatron_dllm import data
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.data.sample import PADDING_DOCUMENT
from megatron_dllm.data.stream import Collate, CorruptedSamples
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import (
    ANCHOR,
    BLOCK,
    CLEAN,
    COMPLEMENT,
    CONTEXT,
    DOCUMENT,
    NOISY,
    POSITION,
    STREAM,
    Corrupted,
    Rule,
    Term,
)

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
class Block:
    """One that stands beside the text.

    number: as the attention rule has it; place: of the text, which it begins at; rows: of Q
    """

    number: int
    place: int
    rows: range


@dataclass(frozen=True)
class Inspection:
    """One sample.

    index         as asked for; that of `corrupted.sample` is smaller where an evaluation has begun anew
    data_tokens   its tokens before --dllm-padding supervise adds to them
    batch         indices of its micro-batch, which decides how far it is padded
    streams       their names, in the order of Q
    data_S        clean ids, then the padding of the micro-batch
    changed_Q     True where noise has been, also where it drew the token that was there already
    visible       the run's rule
    drafted       D
    self_conditioned  whether the blocks beside the text know a first prediction; None: they never do
    """

    index: int
    corrupted: Corrupted
    data_tokens: int
    batch: range
    streams: list[str]
    data_S: torch.Tensor
    tokens_Q: torch.Tensor
    changed_Q: torch.Tensor
    position_ids_Q: torch.Tensor
    attributes_QA: torch.Tensor
    terms: dict[str, Scored]
    visible: Rule
    drafted: int
    self_conditioned: bool | None

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

    @cached_property
    def blocks(self) -> list[Block]:
        """Those beside the text that are of a document of it, in the order of their rows."""
        first, found = len(self.streams) * len(self), []
        column = lambda attribute: self.attributes_QA[self.rows(0), attribute]
        attributes, start = self.attributes_QA[first:].tolist(), 0
        key = lambda d: tuple(attributes[d][a] for a in (BLOCK, DOCUMENT, ANCHOR))
        for stop in range(1, self.drafted + 1):
            if stop < self.drafted and key(stop) == key(start):
                continue
            number, document, anchor = key(start)
            if document != PADDING_DOCUMENT:
                place = ((column(DOCUMENT) == document) & (column(POSITION) == anchor)).nonzero()[0, 0]
                found.append(Block(number, int(place), range(first + start, first + stop)))
            start = stop
        return found

    def blocks_at(self, places: range) -> list[Block]:
        """Those that begin at these places."""
        return [block for block in self.blocks if block.place in places]

    @cached_property
    def block_of(self) -> dict[int, Block]:
        """Whose a row is."""
        return {row: block for block in self.blocks for row in block.rows}

    def part(self, row: int) -> tuple[str, str]:
        """(name of the stream or "block" and its number, place in it) of a row."""
        if block := self.block_of.get(row):
            return f"block {block.number}", f"+{row - block.rows.start}"
        stream, place = divmod(row, len(self))
        return self.streams[stream], str(place)

    def heading(self, row: int) -> str:
        """What a picture says above a row and those like it."""
        return "blocks" if row in self.block_of else self.part(row)[0]

    def border(self, before: int, row: int) -> str:
        """What begins with `row` when `before` is shown before it: "stream", "document", "block" or ""."""
        first, S = len(self.streams) * len(self), len(self)
        if min(before, first) // S != min(row, first) // S:
            return "stream"
        if row >= first:
            return "block" if self.block_of.get(before) != self.block_of.get(row) else ""
        return self.borders().get(row % S, "")

    def picture(self, places: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The attention rule between these places of all streams, and the blocks that begin there: (queries_M, keys_P,
        allowed_MP, sees_M).

        queries_M, keys_P: rows; allowed[q, k]: query q sees key k; sees_M: how many of all Q keys a query sees. Rows of
        a CONTEXT have no queries.
        """
        streamed = torch.arange(len(self.streams) * len(self)).view(-1, len(self))
        blocks = torch.tensor([row for block in self.blocks_at(places) for row in block.rows], dtype=torch.int64)
        keys_P = torch.cat([streamed[:, places.start : places.stop].flatten(), blocks])
        queries_M = keys_P[self.attributes_QA[keys_P, STREAM] != CONTEXT]
        allowed_MQ = self.visible(self.attributes_QA[queries_M][:, None], self.attributes_QA[None])
        return queries_M, keys_P, allowed_MQ[:, keys_P], allowed_MQ.sum(1)


class Inspector:
    """inspector(index) -> Inspection, from the arguments of a training command and its tokenizer.

    notes: what the data set had to say while it was read, and what pictures leave out. Raises ValueError, as training
    would.
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
        if args.dllm_window is not None:
            self.notes.append(
                "pictures show what full layers see; of the text in it, sliding layers see a window of "
                f"{args.dllm_window} tokens."
            )
        self._tokens: dict[int, tuple[str, bool]] = {}

    def __call__(self, index: int) -> Inspection:
        first = index // self.micro_batch * self.micro_batch  # as Megatron's sampler cuts the stream
        indices, b = range(first, first + self.micro_batch), index - first
        with self._noting():
            rows = [self.samples[i] for i in indices]
            data_tokens = len(self.samples.samples.sample(rows[b].sample.index))
        batch, mode, c = self.collate.layout(rows), get_mode(self.args.dllm_mode), rows[b]
        tokens_Q, attributes_QA, D = batch.tokens_BQ[b], batch.attributes_BQA[b], batch.drafted
        S = (len(tokens_Q) - D) // batch.streams
        data_S = torch.full((S,), self.args.dllm_pad_token_id)
        data_S[: len(c.sample)] = c.sample.tokens_S
        changed_XS, names = tokens_Q[: batch.streams * S].view(-1, S) != data_S, []
        for changed_S, kinds_S in zip(changed_XS, attributes_QA[:, STREAM].split(S), strict=False):
            kinds = kinds_S.unique().tolist()
            names.append(" and ".join(STREAM_NAMES.get(kind, f"stream {kind}") for kind in kinds))
            if kinds == [NOISY]:
                changed_S[: len(c.sample)] |= c.noised_S
        seen = Inspection(
            index=index,
            corrupted=c,
            data_tokens=data_tokens,
            batch=indices,
            streams=names,
            data_S=data_S,
            tokens_Q=tokens_Q,
            changed_Q=torch.cat([changed_XS.flatten(), batch.noised_BD[b] if D else changed_XS[:0, 0]]),
            position_ids_Q=batch.position_ids_BQ[b],
            attributes_QA=attributes_QA,
            terms={},
            visible=mode.rule(self.args) if hasattr(mode, "rule") else mode.visible,
            drafted=D,
            self_conditioned=None if batch.self_conditioned_B is None else bool(batch.self_conditioned_B[b]),
        )
        alone = mode.layout([c], S, self.args).terms
        scored = {name: self._scored(seen, term, b, alone[name].count) for name, term in batch.terms.items()}
        return replace(seen, terms=scored)

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

    def _scored(self, seen: Inspection, term: Term, b: int, count: float) -> Scored:
        row = lambda tensor: None if tensor is None else tensor[b]
        targets_Q, weights_Q, S = term.targets_BQ[b], term.weights_BQ[b], len(seen)
        scored = weights_Q.nonzero()[:, 0]
        place = scored % S
        for block in seen.blocks:
            here = (scored >= block.rows.start) & (scored < block.rows.stop)
            place[here] = block.place + scored[here] - block.rows.start
        # EOS may stand in a block where the text goes on with something else, or not at all
        eos = -1 if self.args.dllm_eos_token_id is None else self.args.dllm_eos_token_id
        filled = (scored >= len(seen.streams) * S) & (targets_Q[scored] == eos)

        def fits(d: int) -> bool:
            inside = (place + d >= 0) & (place + d < S)
            same = inside & (targets_Q[scored] == seen.data_S[(place + d).clamp(0, S - 1)])
            return bool((same | filled).all())

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
