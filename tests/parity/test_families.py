"""Every family's logits, loaded by the training program's own path, equal the transformers class's."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file

from tests.hf_models import MODELS, make
from tests.parity.loading import RULES, build, inputs, oracle

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
