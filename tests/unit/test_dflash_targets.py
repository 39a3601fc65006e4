"""What is asked of a target that transformers computes, and refused where it does not hold."""

from argparse import Namespace

import pytest
import torch
import transformers

from megatron_dllm.generation import load
from megatron_dllm.models import target as targets
from megatron_dllm.models.targets import hugging_face
from megatron_dllm.models.targets.hugging_face import TransformersTarget
from megatron_dllm.models.targets.megatron import MegatronTarget, causal
from tests import drafts
from tests.hf_models import HYBRID, SHAPE, VOCABULARY, make, randomize, write_tokenizer
from tests.one_process import MOE, attributes_of, one_process, packed, small_config, small_model
from tests.one_process import randomize as randomize_ours


def model(kind: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | dict(head_dim=16) | changes)
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomize(made)
    return made


@pytest.mark.parametrize(("kind", "changes"), [("Qwen3", {}), ("NemotronH", HYBRID)])
def test_layers_are_numbered_as_by_transformers(kind, changes):
    made = model(kind, **changes)
    target = TransformersTarget(made, [3, 0, 2], packed=False)
    tokens_BS = torch.arange(4, 15).view(1, 11)
    theirs = made(input_ids=tokens_BS, output_hidden_states=True).hidden_states
    found = target.run(tokens_BS, None, None)
    torch.testing.assert_close(found.transpose(0, 1), torch.cat([theirs[4], theirs[1], theirs[3]], -1))
    padded = target.run(torch.nn.functional.pad(tokens_BS, (0, 5), value=70), None, None)
    torch.testing.assert_close(padded[:11], found, rtol=1e-5, atol=1e-5)
    hugging_face._try(target, made, kind)


def test_documents_are_apart():
    made = model("Qwen3")
    target = TransformersTarget(made, [1], packed=True)
    hugging_face._try(target, made, "it")
    target._packed = False
    tokens = torch.arange(4, 12).view(1, 8)
    with pytest.raises(AssertionError):  # so the mask is what keeps them apart
        torch.testing.assert_close(target.run(tokens, None, None)[3:], target.run(tokens[:, 3:], None, None))


@pytest.mark.parametrize(
    ("kind", "changes", "packed", "message"),
    [
        ("Gemma2", dict(final_logit_softcapping=2.0), False, "not its hidden states times its head"),
        ("Cohere", dict(logit_scale=0.1), False, "not its hidden states times its head"),
        ("NemotronH", HYBRID, True, "packed documents see each other"),
        ("Mamba", dict(state_size=4), True, "cannot be told position_ids"),
    ],
)
def test_what_is_tried_out(kind, changes, packed, message):
    made = model(kind, **changes)
    with pytest.raises(ValueError, match=message):
        hugging_face._try(TransformersTarget(made, [1], packed), made, "it")


def ran(layers) -> list[int]:
    """A list that the numbers of the layers go to, as they run."""
    found = []
    for place, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, place=place: found.append(place))
    return found


@pytest.mark.parametrize(("kind", "changes"), [("Qwen3", {}), ("NemotronH", HYBRID)])
@pytest.mark.parametrize(("chosen", "deepest"), [([1, 0, 1], 1), ([0, 3], 3)])
def test_transformers_runs_no_layer_that_is_not_read(kind, changes, chosen, deepest):
    made = model(kind, **changes)
    target = TransformersTarget(made, chosen, packed=False)
    tokens_BS = torch.arange(4, 26).view(2, 11)
    places = ran(hugging_face._layers(target._body))
    found = target.run(tokens_BS, None, None)
    assert places == list(range(deepest + 1))
    whole, last = target.run(tokens_BS, None, None, last=True)
    assert places[deepest + 1 :] == [0, 1, 2, 3]
    assert torch.equal(found, whole) and torch.equal(found, target.run(tokens_BS, None, None))
    logits = torch.nn.functional.linear(last.transpose(0, 1), made.get_output_embeddings().weight)
    torch.testing.assert_close(logits, made(input_ids=tokens_BS).logits)


@pytest.mark.parametrize("experts", [{}, MOE])
@pytest.mark.parametrize(("chosen", "deepest"), [([1, 0, 1], 1), ([0, 3], 3)])
def test_ours_runs_no_layer_that_is_not_read(experts, chosen, deepest):
    with one_process():
        made = small_model(small_config(num_layers=4, **experts), rule=causal)
        randomize_ours(made)
        target = MegatronTarget(made, chosen)
        documents_BQ, positions_BQ = packed([[5, 4, 3], [10]], 12)
        inputs = torch.arange(24).view(2, 12), positions_BQ, attributes_of(documents_BQ, positions_BQ)
        places = ran(made.decoder.layers)
        found = target.features(*inputs)
        assert places == list(range(deepest + 1))
        whole, last = target.features(*inputs, last=True)
        assert places[deepest + 1 :] == [0, 1, 2, 3]
        assert found.shape == (12, 2, 40 * len(chosen)) and torch.equal(found, whole)
        with torch.no_grad():
            logits = made.logits(last.flatten(0, 1)).view(12, 2, -1).transpose(0, 1)
            assert torch.equal(logits, made(*inputs))  # the model itself is whole
        assert set(target._outputs) == {*chosen, 3} and target.taken().equal(whole)
        assert torch.equal(target.features(*inputs), found)


def run(path, **changes):
    data = dict(sft_data_path=None, dllm_cross_document_attention=False, dllm_sequence_length=32)
    return Namespace(**dict(dflash_target=str(path), trust_remote_code=False) | data | changes)


def test_short_sighted_layers_cannot_be_packed(tmp_path):
    layers = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16, use_sliding_window=True)
    transformers.Qwen3Config(**SHAPE | layers).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="see 16 tokens"):
        hugging_face.check(str(tmp_path), run(tmp_path))
    hugging_face.check(str(tmp_path), run(tmp_path, dllm_sequence_length=16))
    hugging_face.check(str(tmp_path), run(tmp_path, sft_data_path=["chat"]))


def test_shape_and_what_is_not_ours(tmp_path):
    path = make("nemotron_h", tmp_path)[0]
    write_tokenizer(path, VOCABULARY)
    found = targets.defaults(path, "transformers")
    expected = dict(hidden_size=40, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=48)
    assert expected.items() <= found.items() and found["vocab_size"] == VOCABULARY and "rotary_base" not in found
    assert targets.describe(path, "transformers").args.num_layers == 4
    with pytest.raises(ValueError, match="not decoded with, because what the target remembers"):
        load.plan(hf_model=drafts.make(tmp_path), target=path)
    with pytest.raises(ValueError, match="use --dflash-target-backend transformers"):
        targets.describe(path)
    with pytest.raises(ValueError, match="holds no model"):
        targets.describe(str(tmp_path / "nothing"), "transformers")
