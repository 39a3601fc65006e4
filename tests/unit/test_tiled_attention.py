"""Attention in tiles equals attention with the rule's dense mask: outputs and gradients, for every rule and shape.

The reference is PyTorch's plain "math" attention, not the kernel that the tiles use. Tiles are small, so that short
sequences take every path: full, partial and empty tiles, parts of several products, uneven last tiles.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_dllm.models import attention as attention_module
from megatron_dllm.models.attention import TILED_FROM, RuleAttention, _Masks
from megatron_dllm.models.tiled import Part, make_plan, tile_bounds, tiled_attention
from megatron_dllm.modes import bd3lm, hybrid, idlm, mdlm
from megatron_dllm.modes.base import BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM
from megatron_dllm.parallel import rank_positions
from tests.one_process import OneRank, packed, small_config

EVERYTHING = slice(None)
BLOCK_MODES = dict(hybrid=hybrid.visible, bd3lm=bd3lm.visible, idlm=idlm.visible)
LENGTHS = (1, 5, 37, 130, 257)  # of a stream


def earlier(query, key):
    """Strictly earlier positions: the first token of all sees nothing, not even itself."""
    return (query[..., DOCUMENT] == key[..., DOCUMENT]) & (key[..., POSITION] < query[..., POSITION])


def lopsided(query, key):
    """Neither symmetric nor contiguous, so that a mix-up of queries, keys or tiles shows."""
    same = query[..., DOCUMENT] == key[..., DOCUMENT]
    return same & ((query[..., BLOCK] > key[..., BLOCK]) | (query[..., STREAM] == key[..., STREAM]))


RULES = BLOCK_MODES | dict(mdlm=mdlm.visible, earlier=earlier, lopsided=lopsided)


def one_stream(rows, length):
    """Attributes [b, length, A] of rows that pack documents of the given lengths; the rest is padding."""
    documents, positions = packed(rows, length)
    attributes = torch.zeros(len(rows), length, NUM_ATTRIBUTES, dtype=torch.int32)
    attributes[..., POSITION], attributes[..., DOCUMENT] = positions, documents
    return attributes


def two_streams(rows, length, block):
    """Attributes [b, 2 * length, A] of noisy and clean tokens in blocks, counted from the start of every document."""
    noisy = one_stream(rows, length)
    noisy[..., BLOCK] = noisy[..., POSITION] // block
    clean = noisy.clone()
    noisy[..., STREAM], clean[..., STREAM] = NOISY, CLEAN
    return torch.cat([noisy, clean], dim=1)


def random_inputs(Q, S, b, heads, groups, d, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda length, n: torch.randn(length, b, n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return draw(Q, heads), draw(S, groups), draw(S, groups)


def dense_mask(rule, attributes, own):
    return rule(attributes[:, own, None], attributes[:, None])[:, None]


def dense(rule, attributes, own, query, key, value, scale=None, backend=SDPBackend.MATH):
    mask = torch.zeros(1, dtype=query.dtype).masked_fill(~dense_mask(rule, attributes, own), float("-inf"))
    inputs = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale, enable_gqa=True).permute(2, 0, 1, 3)


def with_gradients(output, inputs):
    g = torch.Generator().manual_seed(1)
    upstream = torch.randn(output.shape, generator=g, dtype=torch.float64).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def errors(ours, theirs):
    """Largest error of each tensor, relative to its largest entry (or to others', should all of it be rounding)."""
    tops = [x.double().abs().max().item() for x in theirs]
    tops = [max(top, 0.1 * max(tops)) or 1.0 for top in tops]
    wrong = [(a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    return [error / top for error, top in zip(wrong, tops, strict=True)]


def check(rule, attributes, own=EVERYTHING, tile=16, heads=(4, 2), d=8, dtype=torch.float64, scale=None):
    Q, S, b = len(range(attributes.shape[1])[own]), attributes.shape[1], len(attributes)
    inputs = random_inputs(Q, S, b, *heads, d, dtype)
    plan = make_plan(rule, attributes, own, dtype, tile)
    ours = with_gradients(tiled_attention(*inputs, plan, scale), inputs)
    theirs = with_gradients(dense(rule, attributes, own, *inputs, scale), inputs)
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    assert all(x.dtype == dtype for x in ours)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}[dtype]
    assert max(errors(ours, theirs)) <= tolerance
    return plan


# --- outputs and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BLOCK_MODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_two_streams_in_blocks(mode, length):
    for block in (1, 3, 4, 16, length):
        check(BLOCK_MODES[mode], two_streams([[length]] * 2, length, block))
    for heads in ((1, 1), (4, 4), (3, 1)):
        check(BLOCK_MODES[mode], two_streams([[length]], length, 16), heads=heads)


@pytest.mark.parametrize("mode", BLOCK_MODES)
@pytest.mark.parametrize("tile", (1, 2, 7, 64, 128, 1000))
def test_any_tile_size(mode, tile):
    check(BLOCK_MODES[mode], two_streams([[130]], 130, 4), tile=tile, dtype=torch.float32)


@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_two_streams_of_packed_documents_and_padding(mode):
    rows = [[40, 3, 1, 70], [130], [1, 1, 1, 64]]
    for tile in (8, 32):
        check(BLOCK_MODES[mode], two_streams(rows, 130, 4), tile=tile)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tile", (4, 16, 128))
def test_packed_documents_and_padding_that_differ_by_row(length, tile):
    rows = [[length], [length // 3 + 1, length // 3], [1] * (length // 2), []]
    check(mdlm.visible, one_stream(rows, length), tile=tile, dtype=torch.float32)
    check(mdlm.visible, one_stream(rows[1:2] * 3, length), tile=tile)


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("name", ("hybrid", "idlm", "mdlm"))
def test_context_parallel_rows(cp, name):
    """Rows of one rank against the global keys, in the order of the concatenated ranks."""
    length, streams = 96, 1 if name == "mdlm" else 2
    rows = [[50, 20], [96]]
    attributes = one_stream(rows, length) if name == "mdlm" else two_streams(rows, length, 4)
    order = torch.cat([rank_positions(length, streams, cp, r) for r in range(cp)])
    attributes = attributes[:, order]
    local = length * streams // cp
    for r in range(cp):
        check(RULES[name], attributes, slice(r * local, (r + 1) * local), tile=8)
    check(RULES[name], attributes, tile=8)  # by all-to-all a rank has all rows, in this order


def test_a_query_that_sees_nothing_is_zero_and_gives_no_gradient():
    for tile in (1, 4, 64):
        attributes = one_stream([[20, 1, 12], [33]], 40)
        check(earlier, attributes, tile=tile)
        inputs = random_inputs(40, 40, 2, 2, 2, 8)
        plan = make_plan(earlier, attributes, EVERYTHING, torch.float64, tile)
        output = tiled_attention(*inputs, plan)
        blind = ~dense_mask(earlier, attributes, EVERYTHING).any(-1)[:, 0].t()
        assert blind.any() and not blind.all()
        gradients = torch.autograd.grad(output[blind].sum(), inputs)
        assert (output[blind] == 0).all() and all((g == 0).all() for g in gradients)


def test_a_rule_that_lets_nobody_see_anything():
    nothing = lambda query, key: query[..., DOCUMENT] > 10 + key[..., DOCUMENT]
    check(nothing, one_stream([[9]], 9))


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40)),
    values=st.integers(1, 4),
    ordered=st.booleans(),
    alike=st.booleans(),
    part=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 3)]),
    tile=st.integers(1, 12),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 999),
)
def test_random_attributes(rule, shape, values, ordered, alike, part, heads, tile, scale, seed):
    g = torch.Generator().manual_seed(seed)
    attributes = torch.randint(values, (*shape, NUM_ATTRIBUTES), generator=g, dtype=torch.int32)
    if ordered:
        attributes = attributes.sort(1).values
    if alike:
        attributes = attributes[:1].repeat(len(attributes), 1, 1)
    start = part[0] % shape[1]
    own = slice(start, min(start + part[1], shape[1]))
    check(RULES[rule], attributes, own, tile, heads, 4, scale=scale)


@pytest.mark.parametrize("tile", (16, 128))
def test_bf16_rounds_no_more_than_dense_attention_does(tile):
    for rule, attributes in (
        (hybrid.visible, two_streams([[257]], 257, 16)),
        (mdlm.visible, one_stream([[90, 40, 100], [257]], 257)),
    ):
        S, b = attributes.shape[1], len(attributes)
        inputs = random_inputs(S, S, b, 4, 2, 16, torch.bfloat16)
        exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
        exact = with_gradients(dense(rule, attributes, EVERYTHING, *exact_inputs), exact_inputs)
        plan = make_plan(rule, attributes, EVERYTHING, torch.bfloat16, tile)
        ours = with_gradients(tiled_attention(*inputs, plan), inputs)
        usual = dense(rule, attributes, EVERYTHING, *inputs, backend=SDPBackend.FLASH_ATTENTION)
        theirs = with_gradients(usual, inputs)
        assert all(x.dtype == torch.bfloat16 for x in ours)
        for a, b, truth in zip(ours, theirs, exact, strict=True):
            assert errors([a], [truth])[0] < max(1.5 * errors([b], [truth])[0], 2**-8)


def test_strided_inputs():
    """Megatron cuts query, key and value out of one tensor; an expanded gradient has strides of 0."""
    attributes = two_streams([[20, 10], [30]], 30, 4)
    mixed = torch.randn(60, 2, 2, 4 * 8, dtype=torch.float64, requires_grad=True)
    for row_attributes in (attributes, attributes[:1].repeat(2, 1, 1)):
        plan = make_plan(hybrid.visible, row_attributes, EVERYTHING, torch.float64, 8)
        query, key, value = mixed.split([16, 8, 8], dim=-1)
        query = query.reshape(60, 2, 4, 8)
        backwards = lambda x: x.transpose(0, 3).contiguous().transpose(0, 3)  # head elements far apart
        for inputs in ((query, key, value), [backwards(x) for x in (query, key, value)]):
            ours = tiled_attention(*inputs, plan).sum()
            (ours,) = torch.autograd.grad(ours, mixed, retain_graph=True)
            theirs = dense(hybrid.visible, row_attributes, EVERYTHING, *inputs).sum()
            (theirs,) = torch.autograd.grad(theirs, mixed, retain_graph=True)
            assert max(errors([ours], [theirs])) < 1e-13


@pytest.mark.parametrize("name", ("hybrid", "bd3lm", "idlm", "mdlm"))
def test_what_a_query_does_not_see_moves_it_by_not_one_bit(name):
    attributes = one_stream([[9, 20, 11]], 44) if name == "mdlm" else two_streams([[9, 20, 11]], 44, 4)
    S = attributes.shape[1]
    query, key, value = random_inputs(S, S, 1, 2, 2, 8, torch.float32)
    plan = make_plan(RULES[name], attributes, EVERYTHING, torch.float32, 8)
    before = tiled_attention(query, key, value, plan)
    allowed = dense_mask(RULES[name], attributes, EVERYTHING)[0, 0]
    for place in range(S):
        other_key, other_value = key.detach().clone(), value.detach().clone()
        other_key[place] += 3
        other_value[place] -= 5
        moved = (tiled_attention(query, other_key, other_value, plan) != before).flatten(1).any(-1)
        assert torch.equal(moved, allowed[:, place])


# --- the plan ---------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The largest tensor that an operator returns; views of expanded tensors count with what they occupy."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_nothing_of_the_size_of_a_dense_mask_is_made():
    rows = [[700, 100, 200], [1024]]
    jumbled = torch.randint(3, (2, 1024, NUM_ATTRIBUTES), dtype=torch.int32)  # every tile is partial
    jumbled[..., STREAM] = NOISY
    for rule, attributes in (
        (hybrid.visible, two_streams(rows[1:] * 2, 1024, 32)),
        (hybrid.visible, two_streams(rows, 1024, 32)),
        (mdlm.visible, one_stream(rows, 1024)),
        (mdlm.visible, jumbled),
    ):
        S = attributes.shape[1]
        inputs = random_inputs(S, S, 2, 1, 1, 8, torch.float32)
        with LargestTensor() as largest:
            plan = make_plan(rule, attributes, EVERYTHING, torch.float32, 64)
            torch.autograd.grad(tiled_attention(*inputs, plan).sum(), inputs)
        assert largest.elements < S * S // 2
        with LargestTensor() as largest:
            dense_mask(rule, attributes, EVERYTHING)
        assert largest.elements >= S * S  # the probe does something


def multiplied(plan) -> int:
    """Query-key pairs that the plan's calls compute."""

    number = lambda rows: sum(len(range(*run.indices(run.stop))) for run in rows)
    return sum(number(part.queries) * number(part.keys) // part.count for part in plan.parts)


def test_work_follows_what_is_visible():
    def share(rule, attributes, tile):
        S = attributes.shape[1]
        plan = make_plan(rule, attributes, EVERYTHING, torch.float32, tile)
        return multiplied(plan) / (plan.separate * S * S)

    # a clean prefix for both streams, and three tiles more for each tile of a stream
    assert share(hybrid.visible, two_streams([[1024]], 1024, 32), 64) == (1024**2 + 2 * 64 * 1024) / 2048**2
    # documents of half a tile and more are multiplied with themselves only
    documents = [200, 33, 90, 300, 77, 300]
    assert share(mdlm.visible, one_stream([documents], 1000), 64) == sum(n * n for n in documents) / 1000**2
    assert share(mdlm.visible, one_stream([[10] * 100], 1000), 64) < 0.08
    # context parallelism shuffles pieces of the streams and adds no work
    order = torch.cat([rank_positions(1024, 2, 4, r) for r in range(4)])
    assert share(hybrid.visible, two_streams([[1024]], 1024, 32)[:, order], 64) == (1024**2 + 2 * 64 * 1024) / 2048**2


def test_where_nothing_is_hidden_there_is_one_call_without_a_mask():
    plan = make_plan(mdlm.visible, one_stream([[300], [300]], 300), EVERYTHING, torch.float32, 32)
    assert plan.parts == [Part(1, (slice(0, 300, 1),), (slice(0, 300, 1),))]


def test_rows_with_equal_attributes_share_a_plan():
    attributes = two_streams([[30]] * 3, 30, 4)
    assert make_plan(hybrid.visible, attributes, EVERYTHING, torch.float32, 8).separate == 1
    attributes[2, 7, DOCUMENT] = 5
    assert make_plan(hybrid.visible, attributes, EVERYTHING, torch.float32, 8).separate == 3


def test_tiles_are_cut_where_streams_and_documents_end():
    assert tile_bounds(one_stream([[300]], 300)[0], 128) == [0, 128, 300]
    assert tile_bounds(one_stream([[321]], 321)[0], 128) == [0, 128, 256, 321]
    assert tile_bounds(one_stream([[70, 10, 60, 100]], 240)[0], 128) == [0, 70, 140, 240]  # 10 is no tile of its own
    assert tile_bounds(two_streams([[8], [8]], 8, 4)[0], 128) == [0, 8, 16]
    assert tile_bounds(one_stream([[1]], 1)[0], 128) == [0, 1]
    padded = one_stream([[100]], 1000)[0]  # every position of padding is 0
    assert tile_bounds(padded, 128) == [0, 100, *range(228, 900, 128), 1000]


# --- PyTorch's kernel -------------------------------------------------------------------------------------------------


def test_what_the_kernel_promises():
    """The private operators may change with PyTorch: this is what tiled.py takes for granted."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert str(forward.default._schema) == (
        f"{name}(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    )
    assert str(backward.default._schema) == (
        f"{name}_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )
    query, key = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 5, 8)  # heads share keys
    mask = torch.zeros(2, 1, 3, 5)  # and all heads a mask
    mask[0, 0, 1] = float("-inf")
    mask[1, 0, 2, 1:] = float("-inf")
    output, lse = forward(query, key, key, attn_mask=mask)
    assert not lse.requires_grad  # so autograd through a merge would be silently wrong
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) / 8**0.5 + mask
    expected = scores.logsumexp(-1)
    expected[0, :, 1] = 0  # not -inf, as no key would have it
    assert torch.allclose(lse, expected, atol=1e-5)
    assert (output[0, :, 1] == 0).all()
    gradient = torch.randn_like(output)
    exact = (torch.softmax(scores.nan_to_num(neginf=-1e9), -1) @ key.repeat_interleave(2, dim=1))[1:]
    (exact,) = torch.autograd.grad(exact, query, gradient[1:])
    with torch.no_grad():
        lse[0] = float("inf")  # exp(score - inf) = 0
        shares = backward(gradient, query, key, key, output, lse, 0.0, False, attn_mask=mask)
    assert torch.allclose(shares[0], exact, atol=1e-5) and (shares[1][0] == 0).all() and (shares[2][0] == 0).all()
    half = forward(*(x.detach().bfloat16() for x in (query, key, key)), attn_mask=mask.bfloat16())
    assert half[0].dtype == torch.bfloat16 and half[1].dtype == torch.float32
    with pytest.raises(RuntimeError):
        forward(query, key, key, attn_mask=mask == 0)


# --- RuleAttention ----------------------------------------------------------------------------------------------------


def module(rule=hybrid.visible, backend="tiled", scale=None, **config):
    groups = SimpleNamespace(cp=OneRank())
    return RuleAttention(
        small_config(**config), 1, None, None, softmax_scale=scale, pg_collection=groups, visible=rule, backend=backend
    )


@pytest.mark.parametrize("scale", (None, 0.3))
def test_rule_attention_in_tiles_equals_dense(scale):
    attributes = two_streams([[50, 20], [257]], 257, 16)
    inputs = random_inputs(514, 514, 2, 4, 2, 16, torch.float32)
    tiled = with_gradients(module(backend="tiled", scale=scale)(*inputs, attributes), inputs)
    dense = with_gradients(module(backend="sdpa", scale=scale)(*inputs, attributes), inputs)
    assert max(errors(tiled, dense)) < 1e-5


def test_auto_takes_tiles_for_long_sequences_on_a_cpu():
    long, short = torch.zeros(TILED_FROM, 1, 1, 1), torch.zeros(TILED_FROM - 1, 1, 1, 1)
    assert module(backend="auto").use_tiled(short, long)
    assert not module(backend="auto").use_tiled(short, short)
    assert not module(backend="sdpa").use_tiled(long, long) and not module(backend="flex").use_tiled(long, long)
    assert module(backend="tiled").use_tiled(short, short)
    assert not module(backend="auto", attention_dropout=0.5).use_tiled(long, long)
    assert module(backend="auto", attention_dropout=0.5).eval().use_tiled(long, long)


def test_dropout_is_refused_instead_of_forgotten():
    attributes, inputs = two_streams([[4]], 4, 2), random_inputs(8, 8, 1, 4, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="--attention-dropout 0"):
        module(attention_dropout=0.5)(*inputs, attributes)
    module(attention_dropout=0.5).eval()(*inputs, attributes)


def test_layers_and_recomputation_share_a_plan(monkeypatch):
    made = []
    count = lambda *args: made.append(args) or make_plan(*args)
    monkeypatch.setattr(attention_module, "make_plan", count)
    attributes, inputs = two_streams([[20]], 20, 4), random_inputs(40, 40, 1, 4, 2, 16, torch.float32)
    for layer in (module(), module()):
        layer(*inputs, attributes)
        torch.utils.checkpoint.checkpoint(layer, *inputs, attributes, use_reentrant=False).sum().backward()
    assert len(made) == 1
    attributes[0, 3, DOCUMENT] = 2
    module()(*inputs, attributes)
    assert len(made) == 2


def test_plans_and_masks_of_one_tensor_are_kept_apart():
    cache, attributes = _Masks(), two_streams([[20]], 20, 4)
    plan = cache.tiled(hybrid.visible, attributes, EVERYTHING, torch.float32)
    assert cache.tiled(hybrid.visible, attributes.detach(), EVERYTHING, torch.float32) is plan
    others = (
        cache.dense(hybrid.visible, attributes, EVERYTHING, torch.float32),
        cache.tiled(idlm.visible, attributes, EVERYTHING, torch.float32),
        cache.tiled(hybrid.visible, attributes, slice(0, 20), torch.float32),
        cache.tiled(hybrid.visible, attributes, EVERYTHING, torch.bfloat16),
    )
    assert all(other is not plan for other in others) and others[3].parts[0].mask.dtype == torch.bfloat16


def test_generation_then_training_on_the_same_tensor():
    attributes, inputs = two_streams([[20]], 20, 4), random_inputs(40, 40, 1, 4, 2, 16, torch.float32)
    with torch.inference_mode():
        first = module()(*inputs, attributes)
    second = module()(*inputs, attributes)
    assert torch.equal(first, second)
    second.sum().backward()
