"""Single samples as the network sees them, as data.

All of it comes from the path that training takes: build_datasets, CorruptedSamples, Collate.layout (a micro-batch
before context parallelism slices it) and the mode's `visible`. Nothing here knows a mode by name.

Shapes: S places of a sample padded as in its micro-batch, D places of blocks beside it, Q = streams · S + D, A
attributes, N rows of a picture.
"""

import contextlib
import logging
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.datasets.utils import Split

from megatron_dllm import data
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.data.sample import PADDING_DOCUMENT, Sample
from megatron_dllm.data.stream import Collate, CorruptedSamples
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import (
    BLOCK,
    CLEAN,
    COMPLEMENT,
    CONTEXT,
    DOCUMENT,
    NOISY,
    STREAM,
    Corrupted,
    ModelInput,
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
class Inspection:
    """One sample.

    index         as asked for; that of `corrupted.sample` is smaller where an evaluation has begun anew
    data_tokens   its tokens before --dllm-padding supervise adds to them
    batch         indices of its micro-batch, which decides how far it is padded
    streams       their names, in the order of Q
    data_S        clean ids, then the padding of the micro-batch
    changed_Q     True where noise has been, also where it drew the token that was there already
    visible       the mode's rule
    beside        blocks that stand beside the text, as a sample of their own (Q = S = D; their places in the model's
                  input follow the streams'), or None
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
    beside: "Inspection | None" = None

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

    def parts(self) -> list[tuple[str, "Inspection"]]:
        """The streams, and what stands beside them: (name, whose places they have)."""
        found = [(name, self) for name in self.streams]
        return found if self.beside is None else [*found, (self.beside.streams[0], self.beside)]

    def locate(self, row: int) -> tuple[int, int]:
        """(part, place there) of a place in Q."""
        part = min(row // len(self), len(self.streams))
        return part, row - part * len(self)

    def picture(self, places: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The attention rule between these places of the streams and as many beside: (rows_N, allowed_NN, sees_N).

        rows_N: places in Q; allowed[q, k]: query row q sees key k; sees_N: how many of all Q keys a row sees.
        """
        shown = [self.clip(places.start, places.stop)] * len(self.streams)
        if self.beside is not None:
            shown.append(self.beside.clip(0, len(places)))
        rows_N = torch.cat([torch.tensor(places) + part * len(self) for part, places in enumerate(shown)]).long()
        allowed_NQ = self.visible(self.attributes_QA[rows_N][:, None], self.attributes_QA[None])
        return rows_N, allowed_NQ[:, rows_N], allowed_NQ.sum(1)


class Inspector:
    """inspector(index) -> Inspection, from the arguments of a training command and its tokenizer.

    notes: what the data set had to say while it was read. Raises ValueError, as training would.
    """

    def __init__(self, args, tokenizer: Tokenizer, validation: bool = False):
        if args.dllm_mode == "dflash":
            raise ValueError("blocks of drafts cannot be shown yet: inspect the data under another --dllm-mode.")
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
        D = batch.drafted
        S = (len(tokens_Q) - D) // batch.streams
        data_S = torch.full((S,), self.args.dllm_pad_token_id)
        data_S[: len(c.sample)] = c.sample.tokens_S
        text_Q, beside = data_S.repeat(batch.streams), None
        data_Q = torch.cat([text_Q, _drafted_data(batch, b)])
        changed_Q, names = tokens_Q != data_Q, []
        for stream in range(batch.streams):
            rows = slice(stream * S, (stream + 1) * S)
            kinds = attributes_QA[rows, STREAM].unique().tolist()
            names.append(_name(kinds))
            if kinds == [NOISY]:
                changed_Q[rows][: len(c.sample)] |= c.noised_S
        alone = mode.layout([c], S, self.args).terms
        part_Q = torch.cat([torch.arange(batch.streams).repeat_interleave(S), torch.full((D,), batch.streams)])
        terms = {name: _scored(term, b, alone[name].count, data_Q, part_Q) for name, term in batch.terms.items()}
        if D:
            if batch.noised_BD is not None:
                changed_Q[-D:] |= batch.noised_BD[b]
            beside = self._beside(index, indices, batch, b, changed_Q[-D:], terms)
        return Inspection(
            index=index,
            corrupted=c,
            data_tokens=data_tokens,
            batch=indices,
            streams=names,
            data_S=data_S,
            tokens_Q=tokens_Q,
            changed_Q=changed_Q,
            position_ids_Q=batch.position_ids_BQ[b],
            attributes_QA=attributes_QA,
            terms=terms,
            visible=mode.visible,
            beside=beside,
        )

    def _beside(self, index, indices, batch: ModelInput, b: int, changed_D, terms) -> Inspection:
        """The drafted blocks of row b, as a sample whose data are their own clean tokens."""
        D, data_D = batch.drafted, _drafted_data(batch, b)
        attributes_DA = batch.attributes_BQA[b, -D:]
        own = {name: _last(term, D) for name, term in terms.items() if (term.weights_Q[-D:] != 0).any()}
        first = next(iter(own.values()), None)
        known = lambda values_D: torch.zeros(D) if values_D is None else values_D
        scored_D = first.weights_Q != 0 if first else torch.zeros(D, dtype=torch.bool)
        positions_D, documents_D = batch.position_ids_BQ[b, -D:], attributes_DA[:, DOCUMENT]
        return Inspection(
            index=index,
            corrupted=Corrupted(
                sample=Sample(data_D, scored_D, documents_D, positions_D, index),
                x_t_S=batch.tokens_BQ[b, -D:],
                noised_S=changed_D,
                weight_S=scored_D.float(),
                level_S=known(first and first.levels_Q),
                block_S=attributes_DA[:, BLOCK],
                offset_S=known(first and first.offsets_Q).int(),
            ),
            data_tokens=int(scored_D.sum()),
            batch=indices,
            streams=[_name(attributes_DA[:, STREAM].unique().tolist())],
            data_S=data_D,
            tokens_Q=batch.tokens_BQ[b, -D:],
            changed_Q=changed_D,
            position_ids_Q=positions_D,
            attributes_QA=attributes_DA,
            terms=own,
            visible=get_mode(self.args.dllm_mode).visible,
        )

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


def _name(kinds: list[int]) -> str:
    return " and ".join(STREAM_NAMES.get(kind, f"stream {kind}") for kind in kinds)


def _drafted_data(batch: ModelInput, b: int) -> torch.Tensor:
    """Clean ids of row b's drafted blocks: what the first term, which scores them in their place, has as targets."""
    first = next(iter(batch.terms.values()))
    return first.targets_BQ[b, len(batch.tokens_BQ[b]) - batch.drafted :]


def _last(term: Scored, D: int) -> Scored:
    """Its last D places."""
    cut = {name: value[-D:] for name, value in vars(term).items() if isinstance(value, torch.Tensor)}
    return replace(term, **cut)


def _scored(term: Term, b: int, count: float, data_Q: torch.Tensor, part_Q: torch.Tensor) -> Scored:
    row = lambda tensor: None if tensor is None else tensor[b]
    targets_Q, weights_Q = term.targets_BQ[b], term.weights_BQ[b]
    scored = weights_Q.nonzero()[:, 0]

    def fits(d: int) -> bool:
        place = (scored + d).clamp(0, len(data_Q) - 1)
        inside = bool(((place == scored + d) & (part_Q[place] == part_Q[scored])).all())
        return inside and torch.equal(targets_Q[scored], data_Q[place])

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
