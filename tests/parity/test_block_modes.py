"""hybrid and bd3lm against a transformers model that is decoded with a key/value cache."""

import pytest
import torch

from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.noise import Draws
from tests.one_process import one_process
from tests.parity.test_transformers import Pair, V
from tests.unit.block_cases import MODES, flags, make_sample

K, S = 4, 16


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


@pytest.mark.parametrize("family", ["llama", "qwen3 tied"])
@pytest.mark.parametrize("mode", ["hybrid", "bd3lm"])
def test_each_noisy_block_is_what_a_cached_decoder_computes(mode, family):
    """transformers: the clean tokens before a block go into a cache (causal for hybrid, a block at a time and
    bidirectional within it for bd3lm); then one forward over the noisy block, every key visible."""
    pair, args = Pair(family), flags(mode, dllm_block_size=K)
    for module in pair.ours.modules():
        if isinstance(module, RuleAttention):
            module.visible = MODES[mode].visible
    tokens = torch.randint(V - 1, (S,), generator=torch.Generator().manual_seed(1))
    corrupted = MODES[mode].corrupt(make_sample([0] * S, tokens=tokens), Draws(2, 0), args)
    batch = MODES[mode].layout([corrupted], S, args)
    with torch.no_grad():
        ours = pair.ours(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA)[0, :S, :V]
        for start in range(0, S, K):
            cache = None
            for place in range(0, start, K):
                clean = batch.tokens_BQ[:, S + place : S + place + K]
                cache = forward(pair.hf, clean, place, cache, causal=mode == "hybrid").past_key_values
            theirs = forward(pair.hf, batch.tokens_BQ[:, start : start + K], start, cache, causal=False).logits[0]
            assert (ours[start : start + K] - theirs).abs().max() < 2e-5, start


def forward(hf, tokens, place, cache, causal: bool):
    mask = torch.zeros(1, 1, K, place + K)
    if causal:
        mask[..., place:] = torch.full((K, K), torch.finfo(torch.float32).min).triu(1)
    return hf(
        input_ids=tokens,
        position_ids=torch.arange(place, place + K)[None],
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    )
