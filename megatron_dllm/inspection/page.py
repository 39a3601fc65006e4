"""Inspected samples as one self-contained HTML page: no scripts, nothing from elsewhere."""

from html import escape

from megatron_dllm.display import html_page, visible_text
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

_STYLE = """
h2 { border-top: 3px solid #222; padding-top: .5em; margin-top: 2.5em; }
.text, table, svg { font-family: ui-monospace, monospace; font-size: 12px; }
.text { max-width: 110ch; overflow-wrap: anywhere; margin: .2em 0 .6em 1em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { padding: 0 .5em; text-align: left; white-space: pre; }
th { font-weight: 600; background: #eee; }
td.right, th.right { text-align: right; }
.group { border-left: 2px solid #888; }
tr.document td { border-top: 2px solid #222; }
tr.block td { border-top: 1px dashed #999; }
dt { float: left; clear: left; width: 8em; font-weight: 600; }
dd { margin-left: 8.5em; }
.noised { background: #ffd6d1; color: #a00; }
.gets { background: #a00; color: #fff; }
.target { color: #060; }
.special { color: #06c; }
.pad { color: #999; }
i.block { border-left: 2px solid #999; margin: 0 1px; }
"""
_LEGEND = (
    '<p>Marks: <span class="noised">noised: the network sees the mask token</span>, or <span class="noised">a</span>'
    '<span class="gets">b</span> the token b; <span class="special">special token</span>; '
    '<span class="target">target of a scored row</span>; <span class="pad">padding</span>; <i class="block"></i> a '
    "block begins; · space, ⏎ newline, ⇥ tab; S supervised.</p>"
)
PICTURED = 256  # places at most
_CELL = 9  # pixels of the picture
_STROKES = dict(
    stream='stroke="#000" stroke-width="2"',
    document='stroke="#000" stroke-width="1"',
    block='stroke="#999" stroke-width="1"',
)


def render(inspector: Inspector, found: list[Inspection], places: range) -> str:
    """The page: these places of each sample as a table, the first of them as a picture."""
    body = [f"<h1>Samples as {escape(inspector.args.dllm_mode)} sees them</h1>", _LEGEND]
    body += [f"<p>Note: {escape(note)}</p>" for note in inspector.notes]
    for seen in found:
        shown = seen.clip(places.start, places.stop)
        body.append(f"<h2>{escape(title(inspector, seen))}</h2>\n<dl>")
        body += [f"<dt>{escape(label)}</dt><dd>{escape(said)}</dd>" for label, said in summary(inspector, seen)]
        body.append("</dl>")
        for stream, name in enumerate(seen.streams):
            body.append(f"<h3>{escape(name)} as text</h3>")
            if stream and not seen.changed_Q[seen.rows(stream)].any():
                body.append("<p>the data, unchanged</p>")
                continue
            body += _segments(segments(inspector, seen, stream))
        if seen.blocks:
            body += ["<h3>blocks as text</h3>", *_segments(block_segments(inspector, seen))]
        body.append(f"<h3>{interval(shown)} of {len(seen)}</h3>")
        body.append(f'<div class="scroll">{_table(table(inspector, seen, shown), place_borders(seen, shown))}</div>')
        if blocks := seen.blocks_at(shown):
            body.append(f"<h3>blocks that begin at {interval(shown)}</h3>")
            body.append(f'<div class="scroll">{_table(*block_table(inspector, seen, blocks))}</div>')
        if (pictured := shown[:PICTURED]) and len(seen.picture(pictured)[0]):
            body.append(f"<h3>who sees whom, {interval(pictured)}</h3>\n{_picture(inspector, seen, pictured)}")
    return html_page("Samples", _STYLE, "\n".join(body))


def _segments(found: list[Segment]) -> list[str]:
    return [f'{escape(segment.title)}<div class="text">{_flow(segment.spans)}</div>' for segment in found]


def _flow(spans: list[tuple[str, str]]) -> str:
    parts = []
    for text, mark in spans:
        shown = escape(text).replace("⏎", "⏎<br>")
        parts.append('<i class="block"></i>' if mark == "block" else _tag("span", mark, shown))
    return "".join(parts)


def _table(columns: list[Column], borders: list[str]) -> str:
    groups = dict.fromkeys(column.group for column in columns)
    first_of = {group: next(c for c in columns if c.group == group) for group in groups}

    def kind(column: Column, mark: str = "") -> str:
        border = "group" if column is first_of[column.group] and column.group else ""
        return " ".join(filter(None, (border, "right" if column.right else "", mark)))

    spans = {group: sum(c.group == group for c in columns) for group in groups}
    heads = "".join(f'<th class="group" colspan="{n}">{escape(group)}</th>' for group, n in spans.items())
    names = "".join(_tag("th", kind(c), escape(c.name)) for c in columns)
    lines = [f"<tr>{heads}</tr>", f"<tr>{names}</tr>"]
    for i, border in enumerate(borders):
        cells = "".join(_tag("td", kind(c, c.marks[i]), escape(c.cells[i])) for c in columns)
        lines.append(_tag("tr", border, cells))
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _picture(inspector: Inspector, seen: Inspection, places: range) -> str:
    """A row a query, dark where it sees a key; a title on each says which, and how many keys of all it sees."""
    queries_M, keys_P, allowed_MP, sees_M = seen.picture(places)
    left, top, width, height = 150, 20, len(keys_P) * _CELL, len(queries_M) * _CELL
    parts = []
    for n, row in enumerate(queries_M.tolist()):
        token = visible_text(inspector.token(seen.tokens_Q[row].item())[0])
        label, y = escape(f"{' '.join(seen.part(row))} {token[:12]}"), top + n * _CELL
        parts.append(f'<g class="query"><title>{label} sees {sees_M[n]} keys</title>')
        parts.append(
            f'<text x="{left - 4}" y="{y + _CELL - 1}" text-anchor="end" font-size="{_CELL - 1}">{label}</text>'
        )
        for a, b in _runs(allowed_MP[n].tolist()):
            box = f'x="{left + a * _CELL}" y="{y}" width="{(b - a) * _CELL}" height="{_CELL}"'
            parts.append(f'<rect {box} fill="#37c"/>')
        parts.append("</g>")
    for rows, upright in ((keys_P, True), (queries_M, False)):
        for n, border in enumerate(picture_borders(seen, rows)):
            x, y = (left + n * _CELL, top) if upright else (left, top + n * _CELL)
            if upright and (n == 0 or border == "stream"):
                parts.append(f'<text x="{x}" y="{top - 5}">{escape(seen.heading(rows[n].item()))}</text>')
            if n and border:
                ends = f'x1="{x}" y1="{y}" x2="{x if upright else x + width}" y2="{y + height if upright else y}"'
                parts.append(f"<line {ends} {_STROKES[border]}/>")
    frame = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#000"/>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 4}" height="{top + height + 4}">'
    return f'<div class="scroll">{opening}\n' + "\n".join(parts) + f"\n{frame}</svg></div>"


def _runs(cells: list[bool]) -> list[tuple[int, int]]:
    """Where True begins and ends."""
    edges = [n for n in range(len(cells) + 1) if (n > 0 and cells[n - 1]) != (n < len(cells) and cells[n])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _tag(name: str, classes: str, content: str) -> str:
    return f'<{name} class="{classes}">{content}</{name}>' if classes else f"<{name}>{content}</{name}>"
