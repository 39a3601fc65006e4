"""An inspected sample as sentences, columns and runs of text, which text.py and page.py write down."""

from dataclasses import dataclass

from megatron_dllm.data.sample import PADDING_DOCUMENT
from megatron_dllm.display import visible_text
from megatron_dllm.inspection.samples import Inspection, Inspector, Scored
from megatron_dllm.modes.base import BLOCK, DOCUMENT, POSITION

LEVELS_SHOWN = 12
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
        first = 0 if seen.beside is None else 1  # before the first of those that stand beside the text is none
        sizes.append(count(int(c.block_S[-1]) + 1 - first, "block") + f" of up to {int(c.offset_S.max()) + 1}")
    if padding.any():
        sizes.append(count(int(padding.sum()), "place") + " of padding")
    batch = f"in the micro-batch of sample {seen.index} alone"
    if len(seen.batch) > 1:
        batch = f"in the micro-batch of samples {seen.batch.start} to {seen.batch.stop - 1}"
    said = [
        ("sample", ", ".join(sizes)),
        ("input", f"{' | '.join(seen.streams)}, {S} places each{_beside(seen)}; padded as {batch}"),
        ("noise", f"{int(c.noised_S.sum())} of {int(sample.loss_mask_S.sum())} supervised tokens, {_levels(seen)}"),
    ]
    return said + [(f"term {name}", _term(seen, term)) for name, term in seen.terms.items()]


def _beside(seen: Inspection) -> str:
    if seen.beside is None:
        return ""
    beside = seen.beside
    blocks = beside.attributes_QA[~beside.padding_S(), BLOCK].unique().tolist()
    which = f"block{'s' * (len(blocks) != 1)} {' '.join(map(str, blocks))}" if blocks else "no block"
    return f", then {beside.streams[0]} of {which}, {len(beside)} places"


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
    parts = {name: term.weights_Q[seen.rows(stream)] for stream, name in enumerate(seen.streams)}
    if seen.beside is not None:
        parts[seen.beside.streams[0]] = term.weights_Q[-len(seen.beside) :]
    for name, weights in parts.items():
        rows = int((weights != 0).sum())
        if rows:
            places.append(f"{count(rows, 'row')} of {name}")
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


def table(inspector: Inspector, seen: Inspection, places: range) -> list[Column]:
    """What there is to say about these places of a sample: each column has a cell for each."""
    c, padding, supervised = seen.corrupted, seen.padding_S(), seen.supervised_S()
    columns: list[Column] = []

    def add(group: str, name: str, values, marks=None, right=True) -> None:
        cells = [str(value) for value in values]
        columns.append(Column(group, name, cells, marks or [""] * len(cells), right))

    def add_tokens(group: str, name: str, ids, marks) -> None:
        tokens = [inspector.token(id) for id in ids]
        marks = [mark or ("special" if special else "") for mark, (_, special) in zip(marks, tokens, strict=True)]
        add(group, name, (visible_text(text) for text, _ in tokens), marks, right=False)

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
    for stream, group in enumerate(seen.streams):
        rows = seen.rows(stream)
        at = lambda values_Q, rows=rows: [value.item() for value in values_Q[rows][places.start : places.stop]]
        for name, values in where(rows.start).items():
            if values != common[name]:
                add(group, name, values)
        noised = ["noised" if changed else mark for changed, mark in zip(at(seen.changed_Q), pad, strict=True)]
        add_tokens(group, "sees", at(seen.tokens_Q), noised)
        for name, term in seen.terms.items():
            scored_S = term.weights_Q[rows] != 0
            if not scored_S.any():
                continue
            weights = at(term.weights_Q)
            only = lambda cells, weights=weights: [
                cell if weight else "" for cell, weight in zip(cells, weights, strict=True)
            ]
            token = lambda id: visible_text(inspector.token(id)[0])
            add(group, name, only(map(token, at(term.targets_Q))), only(["target"] * len(places)), right=False)
            add(group, "weight", only(map(number, weights)))
            if term.levels_Q is not None and len(term.levels_Q[rows][scored_S].unique()) > 1:
                add(group, "level", only(map(number, at(term.levels_Q))))
            if term.inputs_Q is not None:
                add(group, "input", only(map(token, at(term.inputs_Q))), right=False)
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
    borders = seen.borders() if draws_blocks(seen) else {}
    part = list(zip(documents, supervised, strict=True))
    edges = [0, *(i for i in range(1, S) if part[i] != part[i - 1]), S]
    found = []
    for start, stop in zip(edges, edges[1:], strict=False):
        spans: list[tuple[str, str]] = []
        for i in range(start, stop):
            if i > start and borders.get(i) == "block":
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
