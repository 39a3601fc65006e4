"""Every family's logits, loaded by the training program's own path, equal the transformers class's."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file

from megatron_dllm.modes import MODES
from megatron_dllm.modes.base import BLOCK, CLEAN, NOISY, POSITION, STREAM
from tests.hf_models import MODELS, make
from tests.parity.loading import RULES, B, Q, build, inputs, oracle

pytestmark = pytest.mark.usefixtures("parallel_state")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path, name, rule):
    path, theirs = make(name, tmp_path)
    ours = build(path, rule=RULES[rule])
    tokens, positions, attributes = inputs()
    with torch.no_grad():
        expected = oracle(theirs, tokens, RULES[rule])
        logits = ours(tokens, positions, attributes)
    assert (logits[..., :91] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "cast",
    (
        lambda model: model,
        lambda model: Float16Module(model.config, model),
        lambda model: torch.nn.Sequential(model).to(torch.bfloat16),
        lambda model: model.half().cpu().float(),
    ),
    ids=("built", "wrapped", "inside another", "there and back"),
)
def test_selection_biases_keep_fp32(tmp_path, cast):
    """Rounded to bf16, some would choose another expert."""
    path, _ = make("llada2", tmp_path)
    model = cast(build(path, "--bf16"))
    saved = [value for key, value in sorted(load_file(f"{path}/model.safetensors").items()) if "expert_bias" in key]
    held = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    assert len(held) == len(saved) == 3
    for ours, theirs in zip(held, saved, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
        assert not torch.equal(ours, ours.bfloat16().float())


@pytest.mark.parametrize(("mode", "name"), [("hybrid", "nemotron"), ("bd3lm", "llada2"), ("idlm", "qwen3")])
def test_logits_of_two_streams(tmp_path, mode, name):
    """[x_t | x_0] as these families are trained: positions twice, and a mask written out pair by pair."""
    path, theirs = make(name, tmp_path)
    ours = build(path, rule=MODES[mode].visible)
    tokens, positions, attributes = inputs()
    tokens, positions = torch.cat([tokens % 7 + 4, tokens], 1), positions.repeat(1, 2)
    attributes = attributes.repeat(1, 2, 1)
    attributes[:, :Q, STREAM], attributes[:, Q:, STREAM] = NOISY, CLEAN
    attributes[..., BLOCK] = attributes[..., POSITION] // 5
    mask = torch.full((B, 1, 2 * Q, 2 * Q), torch.finfo(torch.float32).min)
    for q in range(2 * Q):
        for k in range(2 * Q):
            (q_clean, i), (k_clean, j) = divmod(q, Q), divmod(k, Q)
            seen = {
                (0, 0): i // 5 == j // 5 and (mode != "idlm" or j <= i),
                (0, 1): j // 5 < i // 5,
                (1, 0): False,
                (1, 1): j // 5 <= i // 5 if mode == "bd3lm" else j <= i,
            }
            if seen[q_clean, k_clean]:
                mask[:, :, q, k] = 0
    with torch.no_grad():
        expected = theirs(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
        logits = ours(tokens, positions, attributes)
    assert (logits[..., :91] - expected).abs().max() < 1e-5 * expected.abs().max()
