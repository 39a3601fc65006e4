"""How answers were written, as one self-contained page that plays it: `tools/generate.py --trace`.

The page is made from `Row.commits`. Nothing in it comes from elsewhere, and a policy in its head forbids it; texts
are data of the page, never markup.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any

from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.display import html_page, visible_text
from megatron_dllm.generation.config import GenerationConfig, flag
from megatron_dllm.generation.rows import Commit, Row

_LABEL = 80  # characters of a prompt in the list of prompts


@dataclass(frozen=True)
class Trace:
    """tokens: the canvas before the first step, masks included; start: where the answer begins; steps, forwards: of the
    completion; commits: what was written, in order."""

    tokens: list[int]
    start: int
    mask_id: int
    steps: int
    forwards: int
    commits: list[Commit]

    @classmethod
    def of(cls, row: Row) -> "Trace":
        """Of a row that is done."""
        tokens = row.tokens.masked_fill(~row.given, row.mask_id).tolist()
        return cls(tokens, row.start, row.mask_id, row.steps, row.forwards, list(row.commits))

    def replay(self, steps: int | None = None) -> list[int]:
        """The canvas after so many steps (default all): the page's own rule, restated."""
        tokens = list(self.tokens)
        for commit in self.commits:
            if steps is None or commit.step <= steps:
                for place, id in zip(commit.places, commit.ids, strict=True):
                    tokens[place] = id
        return tokens


class Recorder:
    """`observe` is for `generation.stream`; it remembers all rows, in the order of their prompts."""

    def __init__(self):
        self._rows: dict[int, Row] = {}

    def observe(self, rows: Sequence[Row]) -> None:
        # the first step of a batch has all of its rows
        self._rows |= {id(row): row for row in rows}

    def traces(self) -> list[Trace]:
        """Of all prompts, once they are answered."""
        return [Trace.of(row) for row in self._rows.values()]


def render(traces: Sequence[Trace], tokenizer: Tokenizer, config: GenerationConfig) -> str:
    """The page."""
    page = dict(traces=[_as_data(trace, tokenizer) for trace in traces], pieces={})
    for trace in traces:
        for id in {*trace.tokens, *(id for commit in trace.commits for id in commit.ids)}:
            page["pieces"][id] = [_piece(id, trace.mask_id, tokenizer), _is_special(id, trace.mask_id, tokenizer)]
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    body = _BODY.replace("SETTINGS", escape(", ".join(_settings(config)) or "defaults"))
    # in a script element only `<` could end it
    data = json.dumps(page).replace("<", "\\u003c")
    scripts = f'<script type="application/json" id="data">{data}</script>\n<script>{_SCRIPT}</script>'
    return html_page(
        "Denoising", _STYLE, f"{body}\n{scripts}", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    )


def _as_data(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """A commit becomes [step, place, id, trust or null] for each of its tokens."""
    events = []
    for commit in trace.commits:
        trust = commit.trust or [None] * len(commit.ids)
        for place, id, value in zip(commit.places, commit.ids, trust, strict=True):
            known = value is not None and math.isfinite(value)
            events.append([commit.step, place, id, float(f"{value:.4g}") if known else None])
    given = [id for id in trace.tokens[: trace.start or None] if id != trace.mask_id]
    label = visible_text(tokenizer.decode(given, show_special=True)).replace("·", " ")
    return dict(
        label=label[:_LABEL] + ("…" if len(label) > _LABEL else ""),
        tokens=trace.tokens,
        mask=trace.mask_id,
        start=trace.start,
        steps=trace.steps,
        forwards=trace.forwards,
        events=events,
    )


def _is_special(id: int, mask_id: int, tokenizer: Tokenizer) -> bool:
    return id == mask_id or tokenizer.is_special(id)


def _piece(id: int, mask_id: int, tokenizer: Tokenizer) -> str:
    """What a token looks like: spaces as they are, as tokens are drawn apart."""
    if id == mask_id:
        return "░"
    text = tokenizer.piece(id).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join({" ": " ", "\n": "⏎\n"}.get(c) or visible_text(c) for c in text)


def _settings(config: GenerationConfig) -> list[str]:
    """What differs from the defaults, as flags."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return [f"{flag(name)} {value}" for name, value in values.items() if value != getattr(GenerationConfig, name)]


_STYLE = """
#controls { display: flex; flex-wrap: wrap; gap: .5em; align-items: center; margin: 1em 0; }
#slider { flex: 1; min-width: 12em; }
button { min-width: 2.6em; font: inherit; }
select { font: inherit; max-width: 60ch; }
#text { font: 15px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 110ch;
  padding: .5em; border: 1px solid #bbb; }
#text span { padding: 1px 0; border-bottom: 2px solid transparent; border-radius: 2px; }
#text span.given { color: #666; }
#text span.special { font-size: 80%; font-style: italic; }
#text span.mask { color: #999; font-style: normal; word-break: break-all; }
#text span.filled { background: #eee; }
#text span.fresh { outline: 2px solid #222; }
#text span.edited { border-bottom-color: #c0c; }
#detail { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; min-height: 6em; color: #444; }
#scale { display: inline-block; width: 10em; height: 1em; vertical-align: middle; }
.swatch { padding: 0 .4em; }
"""

_BODY = """<h1>Denoising</h1>
<p>SETTINGS</p>
<p><label>Prompt <select id="prompt"></select></label></p>
<div id="controls">
<button id="first" title="Before the first step">|◀</button><button id="back" title="One step back (←)">◀</button>
<button id="play" title="Play or pause (space)">Play</button>
<button id="next" title="One step on (→)">▶</button><button id="last" title="After the last step">▶|</button>
<input id="slider" type="range" min="0" value="0" aria-label="step">
<label>steps a second <select id="speed"><option>1</option><option>2</option><option selected>5</option>
<option>15</option><option>50</option></select></label>
<label>colour <select id="by"><option value="trust">confidence</option>
<option value="step">step</option></select></label>
</div>
<p id="status" aria-live="polite"></p>
<div id="text"></div>
<p>░ mask; <span style="color: #666">given</span>; <span style="outline: 2px solid #222">written in this step</span>;
<span style="border-bottom: 2px solid #c0c">written over at least once</span>;
<span class="swatch" style="background: #eee">filled after EOS, not predicted</span>;
<span id="least"></span> <span id="scale"></span> <span id="most"></span></p>
<div id="detail"></div>
<noscript>This page needs JavaScript to play.</noscript>"""

_SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const get = id => document.getElementById(id);
let trace, pasts, spans, step = 0, timer = null;

// orange to white to blue: told apart whatever colours one sees
function colour(share) {
  const ends = share < .5 ? [[244, 162, 89], [247, 244, 238]] : [[247, 244, 238], [120, 175, 230]];
  const part = share < .5 ? share * 2 : share * 2 - 1;
  return `rgb(${ends[0].map((from, i) => Math.round(from + (ends[1][i] - from) * part)).join(",")})`;
}
const piece = id => data.pieces[id][0];
const digits = value => Number(value.toPrecision(3));
const quoted = id => JSON.stringify(piece(id));
const upTo = place => pasts[place].filter(event => event[0] <= step);

function choose(index) {
  trace = data.traces[index];
  pasts = trace.tokens.map(() => []);
  for (const [when, place, id, trust] of trace.events) pasts[place].push([when, id, trust]);
  spans = trace.tokens.map((id, place) => {
    const span = document.createElement("span");
    span.dataset.place = place;
    return span;
  });
  get("text").replaceChildren(...spans);
  get("slider").max = trace.steps;
  get("detail").textContent = "";
  show(0);
}

function show(wanted) {
  step = Math.max(0, Math.min(trace.steps, wanted));
  get("slider").value = step;
  let masked = 0, written = 0, over = 0, sum = 0, known = 0;
  const byStep = get("by").value === "step";
  spans.forEach((span, place) => {
    const events = upTo(place), last = events.at(-1);
    const id = last ? last[1] : trace.tokens[place];
    const classes = [];
    if (id === trace.mask) { classes.push("mask"); masked++; }
    if (data.pieces[id][1]) classes.push("special");
    span.style.backgroundColor = "";
    if (!last) {
      if (id !== trace.mask) classes.push("given");
    } else {
      if (byStep) span.style.backgroundColor = colour(1 - last[0] / Math.max(1, trace.steps));
      else if (last[2] === null) classes.push("filled");
      else span.style.backgroundColor = colour(Math.max(0, Math.min(1, last[2])));
      if (events.length > 1) classes.push("edited");
      if (last[0] === step) {
        classes.push("fresh");
        written++;
        if (events.length > 1) over++;
        if (last[2] !== null) { sum += last[2]; known++; }
      }
    }
    if (span.textContent !== piece(id)) span.textContent = piece(id);
    span.className = classes.join(" ");
    span.title = said(place);
  });
  get("status").textContent = `step ${step} of ${trace.steps} (${trace.forwards} forwards in all): ` +
    `${written} written` + (over ? `, ${over} of them over another token` : "") +
    (known ? `, mean confidence ${digits(sum / known)}` : "") + `; ${masked} masked`;
}

function said(place) {
  const lines = [`place ${place}`];
  let before = null;
  for (const [when, id, trust] of upTo(place)) {
    lines.push(`step ${when}: ${quoted(id)} (id ${id}), ` +
      (trust === null ? "not predicted" : `confidence ${digits(trust)}`) +
      (before === null ? "" : `, over ${quoted(before)}`));
    before = id;
  }
  if (before === null) lines.push(trace.tokens[place] === trace.mask ? "still masked" :
    `given: ${quoted(trace.tokens[place])} (id ${trace.tokens[place]})`);
  return lines.join("\n");
}

function pause() {
  clearInterval(timer);
  timer = null;
  get("play").textContent = "Play";
}
function play() {
  if (step >= trace.steps) show(0);
  get("play").textContent = "Pause";
  timer = setInterval(() => step < trace.steps ? show(step + 1) : pause(), 1000 / Number(get("speed").value));
}
const toggle = () => timer === null ? play() : pause();
const go = where => { pause(); show(where); };
function legend() {
  const byStep = get("by").value === "step";
  get("least").textContent = byStep ? "last step" : "confidence 0";
  get("most").textContent = byStep ? "first" : "1";
  get("scale").style.background = `linear-gradient(to right, ${[0, .5, 1].map(colour).join(",")})`;
}

data.traces.forEach((one, index) => get("prompt").add(new Option(`${index + 1}: ${one.label}`, index)));
get("prompt").onchange = () => { pause(); choose(Number(get("prompt").value)); };
get("first").onclick = () => go(0);
get("back").onclick = () => go(step - 1);
get("next").onclick = () => go(step + 1);
get("last").onclick = () => go(trace.steps);
get("play").onclick = toggle;
get("slider").oninput = () => go(Number(get("slider").value));
get("speed").onchange = () => { if (timer !== null) { pause(); play(); } };
get("by").onchange = () => { legend(); show(step); };
get("text").onpointerover = event => {
  if (event.target.dataset.place !== undefined) get("detail").textContent = said(Number(event.target.dataset.place));
};
document.onkeydown = event => {
  if (["SELECT", "INPUT", "BUTTON"].includes(event.target.tagName)) return;
  const action = { " ": toggle, ArrowRight: () => go(step + 1), ArrowLeft: () => go(step - 1) }[event.key];
  if (action) { event.preventDefault(); action(); }
};
legend();
choose(0);
"""
