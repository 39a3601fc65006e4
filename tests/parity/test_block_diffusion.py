"""block_diffusion against a transformers model that writes one canvas after the other with a key/value cache."""

import pytest
import torch
from transformers import DynamicCache

from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.modes import block_diffusion
from tests.one_process import one_process
from tests.parity.test_transformers import Pair, V
from tests.unit.block_cases import make_sample
from tests.unit.canvas_cases import flags, laid_out

K = 4


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


@pytest.mark.parametrize("family", ["llama", "qwen3 tied", "qwen3-moe"])
def test_every_canvas_is_what_a_cached_decoder_computes(family):
    """transformers: prompt and the clean tokens of all canvases before go into a cache, causally; then one forward over
    the noisy canvas, every key visible. Text rows are the causal model's."""
    pair = Pair(family)
    for module in pair.ours.modules():
        if isinstance(module, RuleAttention):
            module.visible = block_diffusion.visible
    tokens = torch.randint(V, (20,), generator=torch.Generator().manual_seed(1))
    # a prompt, an answer of two canvases, another prompt, an answer of three; the last of each filled with EOS
    sample = make_sample([0] * 20, [0] * 3 + [1] * 6 + [0] * 2 + [1] * 9, tokens=tokens)
    (corrupted,), batch = laid_out([sample], flags(dllm_block_size=K))
    starts = corrupted.places_NK[:, 0].tolist()
    assert starts == [3, 7, 11, 15, 19] and corrupted.noised_S.any() and len(corrupted.fill_x_t_F) == 5
    with torch.no_grad():
        ours = pair.ours(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA)[0, :, :V]
        causal = pair.hf(batch.tokens_BQ[:, :20]).logits[0]
        assert (ours[:20] - causal).abs().max() < 2e-5
        for number, start in enumerate(starts):
            at = slice(20 + number * K, 20 + (number + 1) * K)
            cache = DynamicCache()
            pair.hf(batch.tokens_BQ[:, :start], past_key_values=cache, use_cache=True)
            theirs = pair.hf(
                input_ids=batch.tokens_BQ[:, at],
                position_ids=torch.arange(start, start + K)[None],
                attention_mask=torch.zeros(1, 1, K, start + K),
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
            assert (ours[at] - theirs).abs().max() < 2e-5, number
