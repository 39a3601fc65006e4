"""Block-sparse attention on a CPU, driven by a mode's `visible` rule alone.

With a dense mask every query pays for every key. Here the rule is evaluated once per micro-batch, one band of query
rows at a time, and the tiles of queries x keys are sorted into empty (no work), full (a product without a mask) and
partial (a product with a small mask). That is the `Plan`, which all layers share. Attention is then a few calls of
PyTorch's own flash-attention kernel, each a softmax over some of the keys, merged by their log-sum-exp:

    L = log Σ_i exp(l_i),    O = Σ_i exp(l_i - L) O_i.

Backward calls the kernel's backward for each part with the merged O and L. With P = exp(S - L) and
dS = P (dO V^T - rowsum(dO O)) that is exactly the part's share of the gradients, and the shares add up.

Shapes: Q query rows (this rank's), S keys (global), b batch, h query heads, g key/value heads, d head size. A call has
T products of equal shape, n query rows by m keys. R plans: 1 for all batch rows, or b where their attributes differ.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from megatron_dllm.modes.base import DOCUMENT, POSITION, STREAM, Rule

TILE = 128
COPIES = 2  # products of equal shape share a call as long as it copies no more than so many times the keys

# What F.scaled_dot_product_attention runs on a CPU, but with the log-sum-exp (which autograd does not follow).
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Span = tuple[int, int]  # start, stop
# Slices and not an index: indexed reads and sums are several parallel loops each, and on a machine that is busy with
# other work every loop waits for its slowest thread.
Rows = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """One call: T products of n query rows with m keys each.

    queries, keys: T·n and T·m rows of the flattened [Q·R, ...] and [S·R, ...] tensors; no query is in a part twice.
    mask: additive [T, 1, n, m] in the queries' dtype; None where all is visible.
    unseen: bool [T, n, 1], queries that see none of these keys; None where there are no such queries.
    """

    count: int
    queries: Rows
    keys: Rows
    mask: torch.Tensor | None = None
    unseen: torch.Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """What is multiplied with what in one micro-batch. separate: R, the number of plans it holds."""

    parts: list[Part]
    separate: int


def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, scale: float | None = None
) -> torch.Tensor:
    """query [Q,b,h,d], key and value [S,b,g,d] -> [Q,b,h,d]: softmax attention under the plan's rule.

    A query that sees nothing gets zeros and gives no gradient. scale: None is 1/sqrt(d).
    """
    return _TiledAttention.apply(query, key, value, plan, scale)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, plan, scale):
        q, k, v = (_flatten(x, plan) for x in (query, key, value))
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=wide)
        results = []
        for part in plan.parts:
            out, lse_part = _forward(*_inputs(part, q, k, v), attn_mask=part.mask, scale=scale)
            out, lse_part = out.transpose(1, 2), lse_part.transpose(1, 2)
            if part.unseen is not None:  # for them the kernel returns 0, as if exp(0) had been seen
                lse_part = lse_part.masked_fill(part.unseen, float("-inf"))
            out, lse_part = out.flatten(0, 1), lse_part.flatten(0, 1)
            for merged, share in _pairs(lse, part.queries, lse_part):
                torch.logaddexp(merged, share, out=merged)
            results.append((out, lse_part))
        # A query without any key: exp(anything - inf) is 0, here and in backward. With -inf it would be NaN.
        lse.masked_fill_(lse == float("-inf"), float("inf"))
        output = torch.zeros(query.shape, dtype=wide)
        for part, (out, lse_part) in zip(plan.parts, results, strict=True):
            weights = (lse_part - _read(lse, part.queries)).exp_()
            _add(output.view(q.shape), part.queries, out * weights[..., None])
        output = output.to(q.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, output, lse = ctx.saved_tensors
        gradient, q, k, v, out = (_flatten(x, ctx.plan) for x in (gradient, query, key, value, output))
        sums = [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        for part in ctx.plan.parts:
            shares = _backward(
                _take(gradient, part.queries, part.count),
                *_inputs(part, q, k, v),
                _take(out, part.queries, part.count),
                _take(lse, part.queries, part.count),
                dropout_p=0.0,
                is_causal=False,
                attn_mask=part.mask,
                scale=ctx.scale,
            )
            for into, rows, share in zip(sums, (part.queries, part.keys, part.keys), shares, strict=True):
                _add(into, rows, share.transpose(1, 2).flatten(0, 1))
        inputs = (query, key, value)
        return *(sum_.to(x.dtype).view(x.shape) for sum_, x in zip(sums, inputs, strict=True)), None, None


def _flatten(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """[S,b,h,d] -> [S·R, b/R·h, d]: batch rows that share a plan are so many more heads."""
    x = x.reshape(x.shape[0] * plan.separate, -1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()  # the kernel takes that for granted


def _inputs(part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [_take(x, rows, part.count) for x, rows in ((q, part.queries), (k, part.keys), (v, part.keys))]


def _read(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[run] for run in rows])


def _take(x: torch.Tensor, rows: Rows, count: int) -> torch.Tensor:
    """T·n rows of [N,h,...] -> [T,h,n,...], as the kernel wants them."""
    return _read(x, rows).unflatten(0, (count, -1)).transpose(1, 2)


def _pairs(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of x at `rows`, each with its share of `values`, which hold one entry for each of these rows."""
    pieces = [x[run] for run in rows]
    return zip(pieces, values.split([len(piece) for piece in pieces]), strict=True)


def _add(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    for piece, share in _pairs(x, rows, values):
        piece += share


# --- the plan ---------------------------------------------------------------------------------------------------------


def make_plan(visible: Rule, attributes: torch.Tensor, own: slice, dtype: torch.dtype, tile: int = TILE) -> Plan:
    """Evaluate the rule for the query rows `own` of attributes [b,S,A], one tile's rows at a time.

    dtype: of the queries, and so of the masks. What is kept grows with the partial tiles, not with Q·S.
    """
    if attributes.shape[0] > 1 and (attributes == attributes[:1]).all():
        attributes = attributes[:1]
    R, S = attributes.shape[:2]
    full, partial = defaultdict(list), defaultdict(list)  # (n, m) -> products of that shape
    for r, keys in enumerate(attributes):
        queries, columns = keys[own], tile_bounds(keys, tile)
        sharing = defaultdict(list)  # tiles of keys -> the tiles of queries that see all of them
        for band in itertools.pairwise(tile_bounds(queries, tile)):
            allowed = visible(queries[slice(*band), None], keys[None]).expand(band[1] - band[0], S)
            whole, some = _classify(allowed, columns)
            sharing[tuple(whole)].append(band)
            if some:
                allowed = torch.cat([allowed[:, slice(*span)] for span in some], dim=1)
                partial[allowed.shape].append((_rows([band], r, R), _rows(some, r, R), allowed))
        sharing.pop((), None)
        for whole, bands in sharing.items():
            full[_size(bands), _size(whole)].append((_rows(bands, r, R), _rows(whole, r, R), None))
    parts = []
    for (_, m), products in [*partial.items(), *full.items()]:
        limit = max(1, COPIES * R * S // m)
        parts += [_part(products[i : i + limit], dtype) for i in range(0, len(products), limit)]
    return Plan(parts, R)


def tile_bounds(attributes: torch.Tensor, tile: int) -> list[int]:
    """0, ..., S: where tiles of [S,A] attributes begin and the last one ends. About `tile` long, and cut where
    visibility is likely to change, which leaves fewer partial tiles: always at a stream's end, and where a document
    ends or positions jump (context parallelism) unless that would leave a piece under half a tile.
    """
    before, after = attributes[:-1], attributes[1:]
    stream = before[:, STREAM] != after[:, STREAM]
    step = after[:, POSITION] - before[:, POSITION]
    seams = stream | (before[:, DOCUMENT] != after[:, DOCUMENT]) | (step < 0) | (step > 1)
    places = seams.nonzero()[:, 0]
    bounds = [0]
    for seam, forced in [*zip((places + 1).tolist(), stream[places].tolist(), strict=True), (len(attributes), True)]:
        if not forced and 2 * (seam - bounds[-1]) < tile:
            continue
        while 2 * (seam - bounds[-1]) > 3 * tile:  # the last piece has between half a tile and one and a half
            bounds.append(bounds[-1] + tile)
        bounds.append(seam)
    return bounds


def _classify(allowed: torch.Tensor, bounds: list[int]) -> tuple[list[Span], list[Span]]:
    """Of the key tiles of a band [n,S]: those that all its rows see, and those that are seen in part."""
    counts = torch.zeros(allowed.shape[1] + 1, dtype=torch.int64)
    torch.cumsum(allowed.sum(0, dtype=torch.int32), 0, out=counts[1:])
    counts = counts[bounds].diff().tolist()
    whole, some = [], []
    for span, count in zip(itertools.pairwise(bounds), counts, strict=True):
        if count == len(allowed) * (span[1] - span[0]):
            whole.append(span)
        elif count:
            some.append(span)
    return whole, some


def _size(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _rows(spans: list[Span], r: int, R: int) -> Rows:
    """Where plan r of R finds these tokens in a flattened [S·R, ...] tensor."""
    runs = []
    for start, stop in spans:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return tuple(slice(start * R + r, stop * R, R) for start, stop in runs)


def _part(products: list[tuple[Rows, Rows, torch.Tensor | None]], dtype: torch.dtype) -> Part:
    """One call for products of equal shape: (queries, keys, bool [n,m] or None) each."""
    queries, keys, allowed = zip(*products, strict=True)
    queries, keys = tuple(itertools.chain(*queries)), tuple(itertools.chain(*keys))
    if allowed[0] is None:
        return Part(len(products), queries, keys)
    allowed = torch.stack(allowed)
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))[:, None]
    unseen = ~allowed.any(-1, keepdim=True)
    return Part(len(products), queries, keys, mask, unseen if unseen.any() else None)
