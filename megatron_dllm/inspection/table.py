"""An inspected sample as sentences, columns and runs of text, which text.py and page.py write down."""

import itertools
from dataclasses import dataclass

import torch

from megatron_dllm.data.sample import PADDING_DOCUMENT
from megatron_dllm.display import visible_text
from megatron_dllm.inspection.samples import Inspection, Inspector, Scored
from megatron_dllm.modes.base import BLOCK, DOCUMENT, POSITION

LEVELS_SHOWN = 12
PLACES_SHOWN = 16  # that draft blocks begin at
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
        sizes.append(count(int(c.block_S[-1]) + 1, "block") + f" of up to {int(c.offset_S.max()) + 1}")
    if padding.any():
        sizes.append(count(int(padding.sum()), "place") + " of padding")
    batch, drafts = f"sample {seen.index} alone", len(seen.blocks_NK) > 0
    if len(seen.batch) > 1:
        batch = f"samples {seen.batch.start} to {seen.batch.stop - 1}"
    parts = f"{' | '.join(seen.streams)}{' | blocks' * drafts}, {S} places{' each' * (len(seen.streams) > 1)}"
    noise = f"{int(c.noised_S.sum())} of {int(sample.loss_mask_S.sum())} supervised tokens, {_levels(seen)}"
    said = [
        ("sample", ", ".join(sizes)),
        ("input", f"{parts}; padded as in the micro-batch of {batch}"),
        ("blocks", _blocks(seen)) if drafts else ("noise", noise),
    ]
    return said + [(f"term {name}", _term(seen, term)) for name, term in seen.terms.items()]


def _blocks(seen: Inspection) -> str:
    """How many draft blocks there are, and where."""
    (N, K), kept_MK = seen.blocks_NK.shape, seen.blocks_at(range(len(seen)))
    said = f"{count(N, 'block')} of {K} tokens laid out, {len(kept_MK)} of this sample"
    if not len(kept_MK):
        return said
    begins = seen.places_Q[kept_MK[:, 0]].tolist()
    shown = " ".join(map(str, begins[:PLACES_SHOWN])) + (" ..." if len(begins) > PLACES_SHOWN else "")
    known = sorted(set(seen.corrupted.prefix_N[: len(kept_MK)].tolist()))
    of = count(known[0], "token") if len(known) == 1 else f"{known[0]} to {known[-1]} tokens"
    return f"{said}, of each {of} known; they begin at places {shown}"


def _levels(seen: Inspection) -> str:
    c = seen.corrupted
    if len(c.level_S.unique()) < 2 or c.block_S is None:
        distinct = [number(level) for level in c.level_S.unique().tolist()]
        return f"level {' '.join(distinct) or '-'}"
    by_block = dict(zip(c.block_S.tolist(), c.level_S.tolist(), strict=True))
    shown = [f"{block}: {number(level)}" for block, level in list(by_block.items())[:LEVELS_SHOWN]]
    return "levels by block " + ", ".join(shown) + (", ..." if len(by_block) > LEVELS_SHOWN else "")


def _term(seen: Inspection, term: Scored) -> str:
    places = []
    for stream, name in enumerate(seen.streams):
        rows = int((term.weights_Q[seen.rows(stream)] != 0).sum())
        if rows:
            places.append(f"{count(rows, 'row')} of {name}")
    if rows := int((term.weights_Q[seen.blocks_NK] != 0).sum()):
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
    if len(seen.blocks_NK):
        begun = {place: ", ".join(map(str, blocks)) for place, blocks in begins(seen).items()}
        add("", "block", (begun.get(place, "") for place in places))
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
    wide, rows = draws_blocks(seen) or len(seen.blocks_NK) > 0, rows.tolist()
    kinds = ["", *(seen.border(before, row) for before, row in itertools.pairwise(rows))]
    return ["" if kind == "block" and not wide else kind for kind in kinds]


def begins(seen: Inspection) -> dict[int, list[int]]:
    """{place: numbers of the draft blocks that begin there}, of those that count."""
    found: dict[int, list[int]] = {}
    for row in seen.blocks_at(range(len(seen)))[:, 0].tolist():
        block = (row - len(seen.streams) * len(seen)) // seen.blocks_NK.shape[1]
        found.setdefault(seen.places_Q[row].item(), []).append(block)
    return found


def block_table(inspector: Inspector, seen: Inspection, blocks_MK: torch.Tensor) -> list[Column]:
    """What there is to say about draft blocks, a row for each of their tokens."""
    columns, rows = _Columns(inspector), blocks_MK.flatten().tolist()
    first, K = len(seen.streams) * len(seen), seen.blocks_NK.shape[1]
    columns.add("", "block", ((row - first) // K for row in rows))
    columns.add("", "in it", ((row - first) % K for row in rows))
    columns.add("", "place", seen.places_Q[rows].tolist())
    columns.add("", "doc", seen.attributes_QA[rows, DOCUMENT].tolist())
    columns.add("", "pos", seen.position_ids_Q[rows].tolist())
    noised = ["noised" if changed else "" for changed in seen.changed_Q[rows].tolist()]
    columns.add_tokens("blocks", "sees", seen.tokens_Q[rows].tolist(), noised)
    columns.add_terms("blocks", seen, slice(first, None), rows)
    return columns


# --- the sample as text -----------------------------------------------------------------------------------------------


@dataclass
class Segment:
    """Neighbours of one document that are all supervised, or all not: (text, mark) one after the other.

    marks: "", "special", "pad", "block" (one begins; no text), "noised" (the text that was there), "gets" (what the
    network sees in place of the token before, where that is not the mask token).
    """

    title: str
    spans: list[tuple[str, str]]


def segments(inspector: Inspector, seen: Inspection, stream: int) -> list[Segment]:
    """The whole sample, as one stream has it."""
    S, mask_id, first = len(seen), inspector.args.dllm_mask_token_id, seen.rows(stream).start
    documents, supervised = seen.attributes_QA[:S, DOCUMENT].tolist(), seen.supervised_S().tolist()
    borders, drafts = seen.borders() if draws_blocks(seen) else {}, dict.fromkeys(begins(seen), "block")
    part = list(zip(documents, supervised, strict=True))
    edges = [0, *(i for i in range(1, S) if part[i] != part[i - 1]), S]
    found = []
    for start, stop in zip(edges, edges[1:], strict=False):
        spans: list[tuple[str, str]] = []
        for i in range(start, stop):
            if (i > start and borders.get(i) == "block") or i in drafts:
                spans.append(("", "block"))
            text, special = inspector.token(seen.data_S[i].item())
            mark = "special" if special else ""
            if documents[i] == PADDING_DOCUMENT:
                mark = "pad"
            if seen.changed_Q[first + i]:
                mark = "noised"
            gets = seen.tokens_Q[first + i].item()
            replaced = mark == "noised" and gets != mask_id
            if spans and spans[-1][1] == mark and not replaced:
                text = spans.pop()[0] + text
            spans.append((text, mark))
            if replaced:
                spans.append((inspector.token(gets)[0], "gets"))
        what = f"document {documents[start]}, {'supervised' if supervised[start] else 'not supervised'}"
        if documents[start] == PADDING_DOCUMENT:
            what = "padding"
            ids = set(seen.tokens_Q[first + start : first + stop].tolist())
            if len(ids) == 1:  # as it should be
                spans = [(f"{inspector.token(ids.pop())[0]}×{stop - start}", "pad")]
        title = f"{what}, {interval(range(start, stop))}"
        found.append(Segment(title, [(visible_text(text), mark) for text, mark in spans]))
    return found


def draws_blocks(seen: Inspection) -> bool:
    """Whether there are blocks, wide enough that borders between them do not hide what is in them."""
    return 0 < sum(kind == "block" for kind in seen.borders().values()) <= len(seen) // 3
