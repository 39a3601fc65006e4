"""An inspected sample as sentences, columns and runs of text, which text.py and page.py write down."""

import itertools
from dataclasses import dataclass

import torch

from megatron_dllm.data.sample import PADDING_DOCUMENT
from megatron_dllm.display import visible_text
from megatron_dllm.inspection.samples import Block, Inspection, Inspector, Scored
from megatron_dllm.modes.base import BLOCK, DOCUMENT, POSITION

LEVELS_SHOWN = 12
BLOCKS_SHOWN = 16  # of those beside the text: their places, and as text
_SHIFTS = {0: "the token in its place", 1: "the next token", -1: "the token before"}


# --- sentences ------------------------------------------------------------------------------------------------------


def title(inspector: Inspector, seen: Inspection) -> str:
    again = seen.corrupted.sample.index
    kind = "validation" if inspector.validation else "training"
    return f"{kind} sample {seen.index}" + ("" if again == seen.index else f" (which is sample {again} again)")


def summary(inspector: Inspector, seen: Inspection) -> list[tuple[str, str]]:
    """(what it is about, what there is to say): sizes, noise, terms."""
    c, S = seen.corrupted, len(seen)
    sample, padding = c.sample, seen.padding_S()
    documents = sample.document_S[sample.document_S != PADDING_DOCUMENT].unique()
    sizes = [count(len(sample), "token")]
    if seen.data_tokens < len(sample):
        sizes[0] += f" ({seen.data_tokens} of the data, then supervised padding)"
    sizes += [count(len(documents), "document")]
    if c.block_S is not None and len(sample):
        first = 1 if seen.drafted else 0  # before the first of which some stand beside the text there is none
        sizes.append(count(int(c.block_S[-1]) + 1 - first, "block") + f" of up to {int(c.offset_S.max()) + 1}")
    if padding.any():
        sizes.append(count(int(padding.sum()), "place") + " of padding")
    batch = f"sample {seen.index} alone"
    if len(seen.batch) > 1:
        batch = f"samples {seen.batch.start} to {seen.batch.stop - 1}"
    parts = f"{' | '.join(seen.streams)}{' | blocks' if seen.drafted else ''}, {S} places"
    parts += " each" if len(seen.streams) > 1 else ""
    noise = f"{int(c.noised_S.sum())} of {int(sample.loss_mask_S.sum())} supervised tokens, {_levels(seen)}"
    said = [
        ("sample", ", ".join(sizes)),
        ("input", f"{parts}; padded as in the micro-batch of {batch}"),
        ("blocks", _blocks(seen)) if seen.drafted else ("noise", noise),
    ]
    return said + [(f"term {name}", _term(seen, term)) for name, term in seen.terms.items()]


def _blocks(seen: Inspection) -> str:
    """How many there are beside the text, their noise, and where they begin."""
    longest = max((len(block.rows) for block in seen.blocks), default=0)
    laid_out = f"laid out in {count(seen.drafted, 'place')}"
    if not seen.blocks:
        return f"none of this sample, {laid_out}"
    clean = sorted({int((~seen.changed_Q[list(block.rows)]).sum()) for block in seen.blocks})
    of = count(clean[0], "token") if len(clean) == 1 else f"{clean[0]} to {clean[-1]} tokens"
    said = f"{count(len(seen.blocks), 'block')} of up to {count(longest, 'token')}, {laid_out}; of each {of} not noised"
    first = len(seen.streams) * len(seen)
    levels = [t.levels_Q[first:][t.weights_Q[first:] != 0] for t in seen.terms.values() if t.levels_Q is not None]
    if levels := torch.cat(levels).unique().tolist() if levels else []:
        said += f", level {' '.join(map(number, levels[:LEVELS_SHOWN]))}{' ...' * (len(levels) > LEVELS_SHOWN)}"
    if seen.self_conditioned is not None:
        said += f", {'' if seen.self_conditioned else 'not '}knowing a first prediction"
    shown = " ".join(str(block.place) for block in seen.blocks[:BLOCKS_SHOWN])
    begin = "it begins at place" if len(seen.blocks) == 1 else "they begin at places"
    return f"{said}; {begin} {shown}{' ...' * (len(seen.blocks) > BLOCKS_SHOWN)}"


def _levels(seen: Inspection) -> str:
    c = seen.corrupted
    if len(c.level_S.unique()) < 2 or c.block_S is None:
        distinct = [number(level) for level in c.level_S.unique().tolist()]
        return f"level {' '.join(distinct) or '-'}"
    by_block = dict(zip(c.block_S.tolist(), c.level_S.tolist(), strict=True))
    shown = [f"{block}: {number(level)}" for block, level in list(by_block.items())[:LEVELS_SHOWN]]
    return "levels by block " + ", ".join(shown) + (", ..." if len(by_block) > LEVELS_SHOWN else "")


def _term(seen: Inspection, term: Scored) -> str:
    places, S = [], len(seen)
    for stream, name in enumerate(seen.streams):
        rows = int((term.weights_Q[seen.rows(stream)] != 0).sum())
        if rows:
            places.append(f"{count(rows, 'row')} of {name}")
    if rows := int((term.weights_Q[len(seen.streams) * S :] != 0).sum()):
        places.append(f"{count(rows, 'row')} of blocks")
    denominator = f"counts {number(term.count)} (its micro-batch {number(term.batch_count)})"
    if not places:
        return f"scores nothing here; {denominator}"
    weights = term.weights_Q[term.weights_Q != 0]
    target = " or ".join(_SHIFTS[d] for d in term.shifts) or "another token"
    least, most, total = number(weights.min().item()), number(weights.max().item()), number(weights.sum().item())
    of = f"weight {least}" if least == most else f"weights {least} to {most}"
    return f"scores {' and '.join(places)} for {target}; {of}, sum {total}; {denominator}"


def interval(places: range) -> str:
    if len(places) < 2:
        return f"place {places.start}" if places else "no places"
    return f"places {places.start} to {places.stop - 1}"


def count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


# --- the table of places ----------------------------------------------------------------------------------------------


@dataclass
class Column:
    """group: the stream it belongs to, "" for all; marks: of each cell "", "noised", "target", "special" or "pad"."""

    group: str
    name: str
    cells: list[str]
    marks: list[str]
    right: bool = False  # justified


class _Columns(list):
    """Columns of some rows, made one after the other."""

    def __init__(self, inspector: Inspector):
        super().__init__()
        self._token = inspector.token

    def add(self, group: str, name: str, values, marks=None, right=True) -> None:
        cells = [str(value) for value in values]
        self.append(Column(group, name, cells, marks or [""] * len(cells), right))

    def add_tokens(self, group: str, name: str, ids, marks) -> None:
        tokens = [self._token(id) for id in ids]
        marks = [mark or ("special" if special else "") for mark, (_, special) in zip(marks, tokens, strict=True)]
        self.add(group, name, (visible_text(text) for text, _ in tokens), marks, right=False)

    def add_terms(self, group: str, seen: Inspection, part: slice, rows: list[int]) -> None:
        """What is scored of these rows, of the part of Q that they belong to."""
        for name, term in seen.terms.items():
            scored = term.weights_Q[part] != 0
            if not scored.any():
                continue
            weights = term.weights_Q[rows].tolist()
            only = lambda cells, weights=weights: [
                cell if weight else "" for cell, weight in zip(cells, weights, strict=True)
            ]
            token = lambda id: visible_text(self._token(id)[0])
            targets = map(token, term.targets_Q[rows].tolist())
            self.add(group, name, only(targets), only(["target"] * len(rows)), right=False)
            self.add(group, "weight", only(map(number, weights)))
            if term.levels_Q is not None and len(term.levels_Q[part][scored].unique()) > 1:
                self.add(group, "level", only(map(number, term.levels_Q[rows].tolist())))
            if term.inputs_Q is not None:
                self.add(group, "input", only(map(token, term.inputs_Q[rows].tolist())), right=False)


def table(inspector: Inspector, seen: Inspection, places: range) -> list[Column]:
    """What there is to say about these places of a sample: each column has a cell for each."""
    c, padding, supervised = seen.corrupted, seen.padding_S(), seen.supervised_S()
    columns = _Columns(inspector)
    add, add_tokens = columns.add, columns.add_tokens

    def where(first: int) -> dict[str, list]:
        """Where the tokens of a stream stand, for rotary positions and for the attention rule."""
        column = lambda attribute: [seen.attributes_QA[first + i, attribute].item() for i in places]
        found = {"doc": ["-" if document == PADDING_DOCUMENT else document for document in column(DOCUMENT)]}
        found["pos"] = [seen.position_ids_Q[first + i].item() for i in places]
        found["rule pos"] = column(POSITION)
        if c.block_S is not None:
            found["block"] = column(BLOCK)
        return found

    add("", "place", places)
    common = where(0)
    for name, values in common.items():
        if name != "rule pos" or values != common["pos"]:
            add("", name, values)
    if c.offset_S is not None:
        add("", "in it", (c.offset_S[i].item() if i < len(c.sample) else "" for i in places))
    pad = ["pad" if padding[i] else "" for i in places]
    add("", "sup", ("S" if supervised[i] else "" for i in places), right=False)
    add_tokens("", "data", (seen.data_S[i].item() for i in places), pad)
    if seen.drafted:
        begun = {place: ", ".join(map(str, numbers)) for place, numbers in begins(seen).items()}
        add("", "begins", (begun.get(place, "") for place in places))
    for stream, group in enumerate(seen.streams):
        part = seen.rows(stream)
        rows = [part.start + place for place in places]
        for name, values in where(part.start).items():
            if values != common[name]:
                add(group, name, values)
        changed = seen.changed_Q[rows].tolist()
        noised = ["noised" if changed else mark for changed, mark in zip(changed, pad, strict=True)]
        add_tokens(group, "sees", seen.tokens_Q[rows].tolist(), noised)
        columns.add_terms(group, seen, part, rows)
    return columns


def place_borders(seen: Inspection, places: range) -> list[str]:
    """What begins at each place that a line is drawn before: "document", "block" or ""."""
    kinds, wide = seen.borders(), draws_blocks(seen)
    return [kind if (kind := kinds.get(place, "")) == "document" or wide else "" for place in places]


def picture_borders(seen: Inspection, rows: torch.Tensor) -> list[str]:
    """The same of a picture's rows, and "stream" where another one begins."""
    wide, rows = draws_blocks(seen), rows.tolist()
    kinds = ["", *(seen.border(before, row) for before, row in itertools.pairwise(rows))]
    hidden = lambda kind, row: kind == "block" and not wide and row not in seen.block_of
    return ["" if hidden(kind, row) else kind for kind, row in zip(kinds, rows, strict=False)]


def begins(seen: Inspection) -> dict[int, list[int]]:
    """{place: numbers of the blocks beside the text that begin there}."""
    found: dict[int, list[int]] = {}
    for block in seen.blocks:
        found.setdefault(block.place, []).append(block.number)
    return found


def block_table(inspector: Inspector, seen: Inspection, blocks: list[Block]) -> tuple[list[Column], list[str]]:
    """(what there is to say about blocks beside the text, a row for each of their tokens; "block" where one begins)."""
    columns, members = _Columns(inspector), [(block, k) for block in blocks for k in range(len(block.rows))]
    rows = [block.rows[k] for block, k in members]
    columns.add("", "block", (block.number for block, _ in members))
    columns.add("", "in it", (k for _, k in members))
    columns.add("", "place", (_place(seen, block, k) for block, k in members))
    columns.add("", "doc", seen.attributes_QA[rows, DOCUMENT].tolist())
    columns.add("", "pos", seen.position_ids_Q[rows].tolist())
    noised = ["noised" if changed else "" for changed in seen.changed_Q[rows].tolist()]
    columns.add_tokens("blocks", "sees", seen.tokens_Q[rows].tolist(), noised)
    columns.add_terms("blocks", seen, slice(len(seen.streams) * len(seen), None), rows)
    return columns, ["" if k else "block" for _, k in members]


def _place(seen: Inspection, block: Block, k: int) -> int | str:
    """Of the text, where a token of a block is; "-" if it is scored against a token that the text does not have."""
    place, target = block.place + k, _target(seen, block.rows[k])
    return place if target is None or (place < len(seen) and seen.data_S[place] == target) else "-"


def _target(seen: Inspection, row: int) -> int | None:
    """The token that belongs into a row of a block, as far as a term scores it."""
    return next((int(t.targets_Q[row]) for t in seen.terms.values() if t.weights_Q[row]), None)


# --- the sample as text -----------------------------------------------------------------------------------------------


@dataclass
class Segment:
    """Neighbours of one document that are all supervised, or all not: (text, mark) one after the other.

    marks: "", "special", "pad", "block" (one begins; no text), "noised" (the text that was there), "gets" (what the
    network sees in place of the token before, where that is not the mask token).
    """

    title: str
    spans: list[tuple[str, str]]


class _Spans(list):
    def __init__(self, inspector: Inspector):
        super().__init__()
        self._token, self._mask_id = inspector.token, inspector.args.dllm_mask_token_id

    def token(self, id: int, gets: int, noised: bool, padding: bool = False) -> None:
        """One that is `id` in the data, and of which the network sees `gets`."""
        text, special = self._token(id)
        mark = "noised" if noised else "pad" if padding else "special" if special else ""
        replaced = noised and gets != self._mask_id
        if self and self[-1][1] == mark and not replaced:
            text = self.pop()[0] + text
        self.append((text, mark))
        if replaced:
            self.append((self._token(gets)[0], "gets"))

    def segment(self, title: str) -> Segment:
        return Segment(title, [(visible_text(text), mark) for text, mark in self])


def segments(inspector: Inspector, seen: Inspection, stream: int) -> list[Segment]:
    """The whole sample, as one stream has it."""
    S, first = len(seen), seen.rows(stream).start
    documents, supervised = seen.attributes_QA[:S, DOCUMENT].tolist(), seen.supervised_S().tolist()
    borders, beside = seen.borders() if draws_blocks(seen) else {}, begins(seen)
    part = list(zip(documents, supervised, strict=True))
    edges = [0, *(i for i in range(1, S) if part[i] != part[i - 1]), S]
    found = []
    for start, stop in zip(edges, edges[1:], strict=False):
        padding, spans = documents[start] == PADDING_DOCUMENT, _Spans(inspector)
        for i in range(start, stop):
            if (i > start and borders.get(i) == "block") or i in beside:
                spans.append(("", "block"))
            gets, noised = seen.tokens_Q[first + i].item(), bool(seen.changed_Q[first + i])
            spans.token(seen.data_S[i].item(), gets, noised, padding)
        what = f"document {documents[start]}, {'supervised' if supervised[start] else 'not supervised'}"
        if padding:
            what = "padding"
            ids = set(seen.tokens_Q[first + start : first + stop].tolist())
            if len(ids) == 1:  # as it should be
                spans[:] = [(f"{inspector.token(ids.pop())[0]}×{stop - start}", "pad")]
        found.append(spans.segment(f"{what}, {interval(range(start, stop))}"))
    return found


def block_segments(inspector: Inspector, seen: Inspection) -> list[Segment]:
    """The first blocks beside the text, one each. Of a noised token that no term scores it shows what the network sees:
    what belongs there is not always known."""
    found = []
    for block in seen.blocks[:BLOCKS_SHOWN]:
        spans = _Spans(inspector)
        for row in block.rows:
            gets, target = seen.tokens_Q[row].item(), _target(seen, row)
            spans.token(gets if target is None else target, gets, target is not None and bool(seen.changed_Q[row]))
        found.append(spans.segment(f"block {block.number}, {count(len(block.rows), 'token')} from place {block.place}"))
    if more := len(seen.blocks) - len(found):
        found.append(Segment(f"and {count(more, 'block')} more", []))
    return found


def draws_blocks(seen: Inspection) -> bool:
    """Whether there are blocks, wide enough that borders between them do not hide what is in them."""
    return 0 < sum(kind == "block" for kind in seen.borders().values()) <= len(seen) // 3
