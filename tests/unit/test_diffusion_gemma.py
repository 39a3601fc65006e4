"""DiffusionGemma's configuration in both directions, its flags, and soft embeddings against a plain product."""

import copy
import sys
from argparse import Namespace

import megatron.training.training as training
import pytest
import torch
import transformers

from megatron_dllm.arguments import parse_arguments
from megatron_dllm.models import get_family, recognise
from megatron_dllm.models.gemma import SoftEmbedding
from megatron_dllm.models.head import WeightedNLL
from tests import gemma
from tests.one_process import OneRank
from tests.parallel.cases import TINY, write_chat

FAMILY = get_family("diffusion_gemma")


def config(**changes) -> dict:
    text = transformers.DiffusionGemmaTextConfig(**gemma.TEXT)
    whole = transformers.DiffusionGemmaConfig(text_config=text, vision_config=gemma.VISION, canvas_length=gemma.K)
    return whole.to_dict() | changes


def with_text(**changes) -> dict:
    found = copy.deepcopy(config())
    found["text_config"] |= changes
    return found


def test_configuration_there_and_back():
    found = recognise(config() | dict(architectures=["DiffusionGemmaForBlockDiffusion"]))
    arguments = found.read(config())
    assert found is FAMILY
    assert arguments["dllm_full_attention_layers"] == [2, 5] and arguments["dllm_window"] == gemma.WINDOW
    assert (arguments["dllm_full_kv_channels"], arguments["dllm_full_query_groups"]) == (16, 1)
    assert (arguments["kv_channels"], arguments["num_query_groups"]) == (8, 2)
    assert arguments["dllm_block_size"] == gemma.K and arguments["dllm_logit_softcap"] == gemma.SOFTCAP
    written = FAMILY.write(Namespace(**arguments))
    assert FAMILY.read(written) == arguments
    settings = transformers.DiffusionGemmaConfig(**written)
    assert FAMILY.read(settings.to_dict()) == arguments


def test_both_notations_of_full_layers_heads():
    older = with_text()
    older["text_config"].pop("per_layer_config")
    older["text_config"] |= dict(global_head_dim=16, num_global_key_value_heads=1)
    assert FAMILY.read(older) == FAMILY.read(config())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(hidden_activation="silu"), "hidden_activation"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (dict(per_layer_config={"0": dict(head_dim=4)}), "per_layer_config"),
        (dict(num_experts=None), "num_experts"),
        (dict(rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e4))), "rope_parameters"),
        (dict(altup_num_inputs=4), "altup_num_inputs"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, named):
    with pytest.raises(ValueError) as error:
        FAMILY.read(with_text(**changes))
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_configuration_without_its_text_part():
    with pytest.raises(ValueError, match="lacks text_config, the text part"):
        FAMILY.read({key: value for key, value in config().items() if key != "text_config"})


MODEL = "--dllm-mode block_diffusion --model-preset tiny-diffusion-gemma"
# flags -> (processes, what the sentence must say)
REFUSED = {
    "--dllm-mode mdlm --model-preset tiny-diffusion-gemma": (1, "use --dllm-mode block_diffusion"),
    "--dllm-window 5": (1, "belongs to --dllm-architecture diffusion_gemma"),
    "--dllm-mode block_diffusion --dllm-architecture diffusion_gemma": (1, "needs --dllm-full-attention-layers"),
    f"{MODEL} --dllm-full-attention-layers 1 4": (1, "name each layer once, from 0 to 3"),
    f"{MODEL} --dllm-window 0": (1, "--dllm-window 0 is out of range"),
    f"{MODEL} --dllm-logit-softcap inf": (1, "--dllm-logit-softcap inf is out of range"),
    f"{MODEL} --dllm-full-rotary-base nan": (1, "--dllm-full-rotary-base nan is out of range"),
    f"{MODEL} --dllm-full-kv-channels 33": (1, "give even --kv-channels"),
    f"{MODEL} --hidden-dropout 0.1": (1, "no --hidden-dropout"),
    f"{MODEL} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2": (
        2,
        "or --expert-tensor-parallel-size",
    ),
    f"{MODEL} --dllm-full-query-groups 3": (1, "does not divide --num-attention-heads 8"),
    f"{MODEL} --rotary-percent 0.5": (1, "leave out --rotary-percent"),
    f"{MODEL} --moe-grouped-gemm": (1, "--moe-grouped-gemm"),
    f"{MODEL} --moe-aux-loss-coeff 0.1": (1, "leave out --moe-aux-loss-coeff"),
    f"{MODEL} --moe-expert-capacity-factor 1.0": (1, "drops tokens"),
    f"{MODEL} --recompute-granularity selective --recompute-modules mlp": (1, "--recompute-modules mlp cannot"),
    f"{MODEL} --block-diffusion-self-conditioning 1.5": (1, "no probability"),
    f"{MODEL} --tensor-model-parallel-size 2": (2, "add --sequence-parallel"),
    f"{MODEL} --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2": (4, "use --cp-comm-type"),
    "--dllm-mode block_diffusion --block-diffusion-self-conditioning 0.5": (1, "has no self-conditioning"),
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_chat(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("flags", REFUSED)
def test_flags(monkeypatch, chat, flags):
    processes, sentence = REFUSED[flags]
    monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *TINY, "--sft-data-path", chat, *flags.split()])
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", "0")
    try:
        with pytest.raises(ValueError) as error:
            parse_arguments()
    finally:
        training.destroy_global_state()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def plain_soft_embedding(hidden_ND, table_VD, vocab: int, cap: float):
    logits_NV = cap * torch.tanh(hidden_ND @ table_VD[:vocab].t() / cap)
    return logits_NV.softmax(-1) @ table_VD[:vocab]


@pytest.mark.parametrize("chunk", (1, 3, 64))
def test_soft_embeddings_and_their_gradient(chunk):
    """The table's gradient goes through the mean, not through the probabilities; hidden states have none."""
    g = torch.Generator().manual_seed(0)
    hidden_ND, table_VD = torch.randn(7, 6, generator=g) * 3, torch.randn(12, 6, generator=g)
    direction_ND = torch.randn(7, 6, generator=g)
    ours_VD, theirs_VD = table_VD.clone().requires_grad_(), table_VD.clone().requires_grad_()
    soft_ND = SoftEmbedding.apply(hidden_ND, ours_VD, 10, 5.0, OneRank(), chunk)
    with torch.no_grad():
        probabilities_NV = (5.0 * torch.tanh(hidden_ND @ theirs_VD[:10].t() / 5.0)).softmax(-1)
    expected_ND = probabilities_NV @ theirs_VD[:10]
    assert torch.allclose(soft_ND, expected_ND, atol=1e-6)
    assert torch.allclose(soft_ND, plain_soft_embedding(hidden_ND, table_VD, 10, 5.0), atol=1e-6)
    (soft_ND * direction_ND).sum().backward()
    (expected_ND * direction_ND).sum().backward()
    assert torch.allclose(ours_VD.grad, theirs_VD.grad, atol=1e-5)
    assert not ours_VD.grad[10:].any()


@pytest.mark.parametrize("chunk", (2, 5, 64))
def test_cross_entropy_of_capped_logits(chunk):
    g = torch.Generator().manual_seed(1)
    hidden_ND, table_VD = torch.randn(9, 6, generator=g) * 2, torch.randn(12, 6, generator=g) * 2
    targets_N, weights_N = torch.randint(0, 10, (9,), generator=g), torch.rand(9, generator=g)
    ours = [tensor.clone().requires_grad_() for tensor in (hidden_ND, table_VD)]
    theirs = [tensor.clone().requires_grad_() for tensor in (hidden_ND, table_VD)]
    total, nll_N, right_N = WeightedNLL.apply(*ours, targets_N, weights_N, OneRank(), 10, chunk, 4.0)
    logits_NV = 4.0 * torch.tanh(theirs[0] @ theirs[1][:10].t() / 4.0)
    expected_N = torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    assert torch.allclose(nll_N, expected_N, atol=1e-5)
    assert torch.equal(right_N, logits_NV.argmax(-1) == targets_N)
    total.backward()
    (expected_N @ weights_N).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)
