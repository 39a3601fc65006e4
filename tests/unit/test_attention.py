"""RuleAttention against softmax attention written as loops over elements; and the cache of masks."""

import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.models import flex
from megatron_dllm.models.attention import RuleAttention, _Masks
from megatron_dllm.modes import mdlm
from megatron_dllm.modes.base import BLOCK, DOCUMENT, NUM_ATTRIBUTES, STREAM
from tests.one_process import OneRank, small_config

GROUP = SimpleNamespace(cp=OneRank())


def lopsided(query, key):
    """A rule that is not symmetric, so that a mix-up of query and key shows; every token sees itself."""
    same = query[..., DOCUMENT] == key[..., DOCUMENT]
    return same & ((query[..., BLOCK] > key[..., BLOCK]) | (query[..., STREAM] == key[..., STREAM]))


RULES = dict(mdlm=mdlm.visible, lopsided=lopsided)


def attention(rule, backend="sdpa", scale=None, **config):
    return RuleAttention(
        small_config(**config), 1, None, None, softmax_scale=scale, pg_collection=GROUP, visible=rule, backend=backend
    )


def random_attributes(B, S, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (B, S, NUM_ATTRIBUTES), generator=g, dtype=torch.int32)


def random_inputs(B, S, heads, groups, d, seed):
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(S, B, n, d, generator=g)
    return draw(heads), draw(groups), draw(groups)


def naive(rule, query, key, value, attributes, scale=None):
    S, B, heads, d = query.shape
    per_group = heads // key.shape[2]
    out = torch.zeros(S, B, heads, d, dtype=torch.float64)
    query, key, value = query.double(), key.double(), value.double()
    for b in range(B):
        for h in range(heads):
            g = h // per_group
            for i in range(S):
                seen = [j for j in range(S) if attributes is None or rule(attributes[b, i], attributes[b, j]).item()]
                scores = [(query[i, b, h] @ key[j, b, g]).item() * (scale or 1 / math.sqrt(d)) for j in seen]
                top = max(scores)
                exponentials = [math.exp(s - top) for s in scores]
                for j, e in zip(seen, exponentials, strict=True):
                    out[i, b, h] += e / sum(exponentials) * value[j, b, g]
    return out.reshape(S, B, heads * d)


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    B=st.integers(1, 2),
    S=st.integers(1, 9),
    heads_groups=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]),
    scale=st.sampled_from([None, 0.3]),  # None: 1 / sqrt(4)
    seed=st.integers(0, 999),
)
def test_dense_attention_element_by_element(rule, B, S, heads_groups, scale, seed):
    inputs = random_inputs(B, S, *heads_groups, 4, seed)
    attributes = random_attributes(B, S, seed)
    out = attention(RULES[rule], scale=scale)(*inputs, attributes)
    assert torch.allclose(out.double(), naive(RULES[rule], *inputs, attributes, scale), atol=1e-5)


def test_without_attributes_everything_is_seen():
    inputs = random_inputs(2, 7, 4, 2, 4, 0)
    out = attention(lopsided)(*inputs, None)
    assert torch.allclose(out.double(), naive(lopsided, *inputs, None), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("S", [1, 5, 127, 128, 130, 300])
def test_flex_equals_dense(rule, S):
    inputs = random_inputs(2, S, 4, 2, 16, S)
    attributes = random_attributes(2, S, S)
    with torch.no_grad():
        dense = attention(RULES[rule])(*inputs, attributes)
        flex = attention(RULES[rule], "flex")(*inputs, attributes)
    assert torch.allclose(dense, flex, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    B=st.integers(1, 2),
    S=st.sampled_from([1, 127, 128, 129, 300, 640]),
    first=st.sampled_from([0, 0.3, 0.8]),
    runs=st.booleans(),
    at_once=st.sampled_from([1, 2 * 256 * 640, 2**26]),
    seed=st.integers(0, 999),
)
def test_a_block_mask_made_in_bands_is_torchs(rule, B, S, first, runs, at_once, seed):
    """Every tensor of it, whatever the bands; runs: of equal attributes, which make blocks that are seen in whole."""
    from torch.nn.attention.flex_attention import create_block_mask

    attributes = random_attributes(B, S, seed)
    if runs:
        attributes = attributes[:, ::160].repeat_interleave(160, dim=1)[:, :S].contiguous()
    own = slice(int(first * S), S)
    queries = attributes[:, own]
    with patch.object(flex, "PAIRS_AT_ONCE", at_once):
        ours = flex.block_mask(RULES[rule], attributes, own)
    visible = lambda b, h, q, k: RULES[rule](queries[b, q], attributes[b, k])
    theirs = create_block_mask(visible, B, None, S - own.start, S, device="cpu")
    plain = lambda mask: [(x.dtype, x.tolist()) if torch.is_tensor(x) else x for x in mask.as_tuple()[:-1]]
    assert plain(ours) == plain(theirs)  # the last is the rule


def test_auto_is_dense_on_a_cpu():
    query = torch.zeros(1, 1, 1, 1)
    assert not attention(lopsided, "auto").use_flex(query)
    assert attention(lopsided, "flex").use_flex(query)


def test_flex_refuses_dropout_instead_of_forgetting_it():
    module = attention(lopsided, "flex", attention_dropout=0.5)
    with pytest.raises(ValueError, match="--attention-dropout 0"):
        module(*random_inputs(1, 4, 4, 2, 4, 0), random_attributes(1, 4, 0))


def test_context_parallelism_refuses_communication_that_ignores_the_rule():
    two = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    for kind in ("p2p", None):
        with pytest.raises(ValueError, match="a2a or all_gather"):
            RuleAttention(small_config(), 1, None, None, pg_collection=two, visible=lopsided, cp_comm_type=kind)


# --- the cache of masks -----------------------------------------------------------------------------------------------


EVERYTHING = slice(None)


def naive_mask(rule, attributes):
    B, S = attributes.shape[:2]
    mask = torch.zeros(B, 1, S, S)
    for b in range(B):
        for q in range(S):
            for k in range(S):
                if not rule(attributes[b, q], attributes[b, k]):
                    mask[b, 0, q, k] = float("-inf")
    return mask


def dense(cache, attributes, rule=lopsided, own=EVERYTHING, dtype=torch.float32):
    return cache.dense(rule, attributes, own, dtype)


def test_layers_and_recomputation_share_one_mask():
    cache, attributes = _Masks(), random_attributes(2, 6, 0)
    mask = dense(cache, attributes)
    assert torch.equal(mask, naive_mask(lopsided, attributes))
    assert dense(cache, attributes) is mask
    assert dense(cache, attributes.detach()) is mask  # what activation recomputation passes


def test_rules_dtypes_and_rows_are_kept_apart():
    cache, attributes = _Masks(), random_attributes(1, 6, 1)
    mask = dense(cache, attributes)
    assert torch.equal(dense(cache, attributes, mdlm.visible), naive_mask(mdlm.visible, attributes))
    assert dense(cache, attributes, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(dense(cache, attributes, own=slice(3, 6)), mask[:, :, 3:])
    assert torch.equal(dense(cache, attributes, own=slice(0, 3)), mask[:, :, :3])


def test_no_two_attribute_tensors_share_a_mask_even_at_one_address():
    """Tensors that are freed and allocated again: without the reference that an entry holds, addresses repeat."""
    cache, addresses = _Masks(), []
    for seed in range(60):
        attributes = random_attributes(2, 5, seed)
        addresses.append(attributes.data_ptr())
        assert torch.equal(dense(cache, attributes), naive_mask(lopsided, attributes))
        del attributes
    assert len(set(addresses)) < len(addresses)  # it did happen, after an eviction
    assert len(cache._entries) == _Masks.CAPACITY


def test_views_of_one_tensor_do_not_share_a_mask():
    cache, attributes = _Masks(), random_attributes(4, 5, 2)
    for view in (attributes[:2], attributes[::2], attributes[:2, :3], attributes[:1].expand(2, -1, -1)):
        assert torch.equal(dense(cache, view), naive_mask(lopsided, view))


def test_a_tensor_that_was_written_to_gets_a_new_mask():
    cache, attributes = _Masks(), random_attributes(1, 5, 3)
    dense(cache, attributes)
    attributes[0, 2, DOCUMENT] = 7
    assert torch.equal(dense(cache, attributes), naive_mask(lopsided, attributes))


def test_generation_under_inference_mode():
    cache = _Masks()
    with torch.inference_mode():
        attributes = random_attributes(1, 5, 4)
        assert dense(cache, attributes) is dense(cache, attributes)


def test_a_pipeline_holds_several_micro_batches():
    cache = _Masks()
    batches = [random_attributes(1, 5, seed) for seed in range(_Masks.CAPACITY)]
    first = [dense(cache, attributes) for attributes in batches]
    assert all(dense(cache, a) is mask for a, mask in zip(batches, first, strict=True))
    dense(cache, random_attributes(1, 5, 99))  # evicts the least recently used
    assert dense(cache, batches[-1]) is first[-1]
    assert dense(cache, batches[0]) is not first[0]
    assert torch.equal(dense(cache, batches[0]), first[0])
