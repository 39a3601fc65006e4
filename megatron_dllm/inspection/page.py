"""Inspected samples as one self-contained HTML page: no scripts, nothing from elsewhere."""

from html import escape

from megatron_dllm.display import html_page, visible_text
from megatron_dllm.inspection.samples import Inspection, Inspector
from megatron_dllm.inspection.table import Column, draws_blocks, interval, segments, summary, table, title

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


def render(inspector: Inspector, found: list[Inspection], places: range) -> str:
    """The page: these places of each sample as a table, the first of them as a picture."""
    body = [f"<h1>Samples as {escape(inspector.args.dllm_mode)} sees them</h1>", _LEGEND]
    body += [f"<p>Note: {escape(note)}</p>" for note in inspector.notes]
    for seen in found:
        shown = seen.clip(places.start, places.stop)
        body.append(f"<h2>{escape(title(inspector, seen))}</h2>\n<dl>")
        body += [f"<dt>{escape(label)}</dt><dd>{escape(said)}</dd>" for label, said in summary(inspector, seen)]
        body.append("</dl>")
        body += _places(inspector, seen, shown)
        if seen.beside is not None:
            body += _places(inspector, seen.beside, seen.beside.clip(0, len(places)))
        if pictured := shown[:PICTURED]:
            body.append(f"<h3>who sees whom, {interval(pictured)}</h3>\n{_picture(inspector, seen, pictured)}")
    return html_page("Samples", _STYLE, "\n".join(body))


def _places(inspector: Inspector, seen: Inspection, shown: range) -> list[str]:
    """The whole of the streams as text, and some places of them as a table."""
    body = []
    for stream, name in enumerate(seen.streams):
        body.append(f"<h3>{escape(name)} as text</h3>")
        if stream and not seen.changed_Q[seen.rows(stream)].any():
            body.append("<p>the data, unchanged</p>")
            continue
        for segment in segments(inspector, seen, stream):
            body.append(f'{escape(segment.title)}<div class="text">{_flow(segment.spans)}</div>')
    body.append(f"<h3>{interval(shown)} of {len(seen)}</h3>")
    return [*body, f'<div class="scroll">{_table(table(inspector, seen, shown), seen, shown)}</div>']


def _flow(spans: list[tuple[str, str]]) -> str:
    parts = []
    for text, mark in spans:
        shown = escape(text).replace("⏎", "⏎<br>")
        parts.append('<i class="block"></i>' if mark == "block" else _tag("span", mark, shown))
    return "".join(parts)


def _table(columns: list[Column], seen: Inspection, places: range) -> str:
    groups = dict.fromkeys(column.group for column in columns)
    first_of = {group: next(c for c in columns if c.group == group) for group in groups}

    def kind(column: Column, mark: str = "") -> str:
        border = "group" if column is first_of[column.group] and column.group else ""
        return " ".join(filter(None, (border, "right" if column.right else "", mark)))

    spans = {group: sum(c.group == group for c in columns) for group in groups}
    heads = "".join(f'<th class="group" colspan="{n}">{escape(group)}</th>' for group, n in spans.items())
    names = "".join(_tag("th", kind(c), escape(c.name)) for c in columns)
    lines, borders = [f"<tr>{heads}</tr>", f"<tr>{names}</tr>"], seen.borders()
    for i, place in enumerate(places):
        border = borders.get(place, "")
        cells = "".join(_tag("td", kind(c, c.marks[i]), escape(c.cells[i])) for c in columns)
        lines.append(_tag("tr", border if border == "document" or draws_blocks(seen) else "", cells))
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _picture(inspector: Inspector, seen: Inspection, places: range) -> str:
    """A row a query, dark where it sees a key; a title on each says which, and how many keys of all it sees."""
    rows_N, allowed_NN, sees_N = seen.picture(places)
    N, parts = len(rows_N), seen.parts()
    borders = [of.borders() for _, of in parts]
    left, top, size = 150, 20, N * _CELL
    pieces = []
    begun = set()
    for n, row in enumerate(rows_N.tolist()):
        part, place = seen.locate(row)
        name, of = parts[part]
        token = visible_text(inspector.token(seen.tokens_Q[row].item())[0])
        label, y = escape(f"{name} {place} {token[:12]}"), top + n * _CELL
        pieces.append(f'<g class="query"><title>{label} sees {sees_N[n]} keys</title>')
        pieces.append(
            f'<text x="{left - 4}" y="{y + _CELL - 1}" text-anchor="end" font-size="{_CELL - 1}">{label}</text>'
        )
        for a, b in _runs(allowed_NN[n].tolist()):
            box = f'x="{left + a * _CELL}" y="{y}" width="{(b - a) * _CELL}" height="{_CELL}"'
            pieces.append(f'<rect {box} fill="#37c"/>')
        pieces.append("</g>")
        if part not in begun:
            begun.add(part)
            pieces.append(f'<text x="{left + n * _CELL}" y="{top - 5}">{escape(name)}</text>')
            stroke = ("#000", 2)
        elif borders[part].get(place) == "document":
            stroke = ("#000", 1)
        elif borders[part].get(place) == "block" and draws_blocks(of):
            stroke = ("#999", 1)
        else:
            continue
        at = n * _CELL
        for x1, y1, x2, y2 in ((at, 0, at, size), (0, at, size, at)):
            ends = f'x1="{left + x1}" y1="{top + y1}" x2="{left + x2}" y2="{top + y2}"'
            pieces.append(f'<line {ends} stroke="{stroke[0]}" stroke-width="{stroke[1]}"/>')
    frame = f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="#000"/>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + size + 4}" height="{top + size + 4}">'
    return f'<div class="scroll">{opening}\n' + "\n".join(pieces) + f"\n{frame}</svg></div>"


def _runs(cells: list[bool]) -> list[tuple[int, int]]:
    """Where True begins and ends."""
    edges = [n for n in range(len(cells) + 1) if (n > 0 and cells[n - 1]) != (n < len(cells) and cells[n])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _tag(name: str, classes: str, content: str) -> str:
    return f'<{name} class="{classes}">{content}</{name}>' if classes else f"<{name}>{content}</{name}>"
