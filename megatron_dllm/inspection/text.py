"""An inspected sample for a terminal or a text file."""

from collections.abc import Callable

from megatron_dllm.display import visible_text, width
from megatron_dllm.inspection.samples import Inspection, Inspector
from megatron_dllm.inspection.table import (
    Column,
    Segment,
    block_segments,
    block_table,
    interval,
    picture_borders,
    place_borders,
    segments,
    summary,
    table,
    title,
)

LEGEND = (
    "⟦ab⟧ noised: the network sees the mask token instead, or in ⟦a→b⟧ the token b; │ a block begins; "
    "· space, ⏎ newline, ⇥ tab; S supervised"
)
PICTURED = 128  # places at most
_COLOURS = {"noised": "1;31", "gets": "31", "target": "32", "special": "36", "pad": "2", "block": "2", "title": "1"}
# where the output cannot hold them
ASCII = str.maketrans("⟦⟧→│║┊·⏎⇥█─═┄┼×…", "[]>|#:_$~X-=-+x.")

Paint = Callable[[str, str], str]  # (text, mark) -> text


def coloured(text: str, mark: str) -> str:
    return f"\033[{_COLOURS[mark]}m{text}\033[0m" if mark in _COLOURS and text else text


def plain(text: str, mark: str) -> str:
    return text


def render(inspector: Inspector, seen: Inspection, places: range, paint: Paint) -> str:
    """Everything about one sample: these places of it as a table, the first of them as a picture."""
    places = seen.clip(places.start, places.stop)
    lines = [paint(f"== {title(inspector, seen)}", "title")]
    sentences = summary(inspector, seen)
    longest = max(len(label) for label, _ in sentences)
    lines += [f"{label:<{longest}}  {said}" for label, said in sentences]
    for stream, name in enumerate(seen.streams):
        lines += ["", paint(f"{name} as text", "title")]
        if stream and not seen.changed_Q[seen.rows(stream)].any():
            lines.append("  the data, unchanged")
            continue
        lines += _segments(segments(inspector, seen, stream), paint)
    if seen.blocks:
        lines += ["", paint("blocks as text", "title"), *_segments(block_segments(inspector, seen), paint)]
    lines += ["", paint(f"{interval(places)} of {len(seen)}", "title")]
    borders = place_borders(seen, places)
    lines += _table(table(inspector, seen, places), ["document", *borders[1:]] if places else [], paint)
    if seen.drafted:
        lines += ["", *_blocks(inspector, seen, places, paint)]
    lines += ["", *_picture(inspector, seen, places[:PICTURED], paint)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _segments(found: list[Segment], paint: Paint) -> list[str]:
    return [line for s in found for line in (f"  {s.title}", *(f"    {line}" for line in _flow(s.spans, paint)))]


def _flow(spans: list[tuple[str, str]], paint: Paint) -> list[str]:
    """Spans as lines, which end where the text's own do."""
    line = ""
    for text, mark in spans:
        if mark == "block":
            line += paint("│", mark)
        elif mark == "gets":
            line = line.removesuffix("⟧") + paint(f"→{text}", mark) + "⟧"
        elif mark == "noised":
            line += "⟦" + paint(text, mark) + "⟧"
        else:
            line += paint(text, mark)
    pieces = line.split("⏎")
    return [piece + "⏎" for piece in pieces[:-1]] + pieces[-1:] * bool(pieces[-1])


def _blocks(inspector: Inspector, seen: Inspection, places: range, paint: Paint) -> list[str]:
    """Those beside the text that begin at these places."""
    if not (blocks := seen.blocks_at(places)):
        return [f"no block begins at {interval(places)}"]
    columns, borders = block_table(inspector, seen, blocks)
    lines = [paint(f"blocks that begin at {interval(places)}", "title")]
    return lines + _table(columns, ["document", *borders[1:]], paint)


def _table(columns: list[Column], borders: list[str], paint: Paint) -> list[str]:
    """Groups of columns, parted by │; a line of ─ where a document begins, of ┄ where a block does."""
    groups = dict.fromkeys(column.group for column in columns)
    widths = {id(c): max(map(width, [c.name, *c.cells])) for c in columns}

    def line(cell: Callable[[Column], str]) -> str:
        parts = [" ".join(cell(c) for c in columns if c.group == group) for group in groups]
        return " │ ".join(parts)

    def padded(column: Column, text: str, mark: str = "") -> str:
        space = " " * (widths[id(column)] - width(text))
        return space + paint(text, mark) if column.right else paint(text, mark) + space

    heads = []
    for group in groups:
        own = [c for c in columns if c.group == group]
        heads.append(group.ljust(sum(widths[id(c)] for c in own) + len(own) - 1))
    lines = [paint(" │ ".join(heads).rstrip(), "title"), line(lambda c: padded(c, c.name))]
    rule = "".join("│" if c == "│" else " " for c in " │ ".join(heads))
    for i, border in enumerate(borders):
        if border:
            stroke, cross = ("─", "┼") if border == "document" else ("┄", "│")
            lines.append(paint(rule.replace(" ", stroke).replace("│", cross), "block"))
        lines.append(line(lambda c, i=i: padded(c, c.cells[i], c.marks[i])))
    return lines


def _picture(inspector: Inspector, seen: Inspection, places: range, paint: Paint) -> list[str]:
    """A line a query, █ where it sees a key; ║ between streams, │ between documents, ┊ between blocks."""
    queries_M, keys_P, allowed_MP, sees_M = seen.picture(places)
    if not len(queries_M):
        return []
    strokes = {"": "", "stream": "║", "document": "│", "block": "┊"}
    strokes_between = {"stream": "═", "document": "─", "block": "┄"}
    between = picture_borders(seen, keys_P)
    across = lambda cells: "".join(strokes[kind] + cell for kind, cell in zip(between, cells, strict=False))
    names = [seen.heading(row) for row in keys_P.tolist()]
    digits = [seen.part(row)[1][-1] for row in keys_P.tolist()]
    tokens = [visible_text(inspector.token(id)[0]) for id in seen.tokens_Q[queries_M].tolist()]
    labels = [" ".join(seen.part(row)) for row in queries_M.tolist()]
    name_width, token_width = max(map(width, labels)), min(12, max(map(width, tokens)))
    margin = " " * (name_width + token_width + 2)
    said = f"who sees whom, {interval(places)}: a line is a query, █ the keys it sees, of all streams"
    heads = [name if n == 0 or between[n] == "stream" else None for n, name in enumerate(names)]
    header = across(" " * len(names))
    for n, head in enumerate(heads):
        if head:
            at = len(across(" " * (n + 1))) - 1
            header = header[:at] + head + header[at + len(head) :]
    lines = [paint(said, "title"), margin + header, margin + across(digits)]
    lines[-1] += "  keys seen"
    for n, (label, border) in enumerate(zip(labels, picture_borders(seen, queries_M), strict=True)):
        if border:
            lines.append(margin + paint(strokes_between[border] * len(across(" " * len(names))), "block"))
        token = tokens[n] if width(tokens[n]) <= token_width else tokens[n][: token_width - 1] + "…"
        space = " " * (token_width - width(token) + 1)
        cells = ["█" if allowed else "·" for allowed in allowed_MP[n].tolist()]
        lines.append(f"{label:<{name_width}} {token}{space}{across(cells)}  {sees_M[n]}")
    return lines
