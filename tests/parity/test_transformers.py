"""Logits and every gradient equal the `transformers` classes, under a mask that is written out element by element.

The weights are mapped here the naive way, name by name, so that this test does not depend on our converter.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers

from megatron_dllm.modes import mdlm
from megatron_dllm.parallel import RankTerm
from tests.one_process import MOE, attributes_of, one_process, packed, randomize, small_config, small_model

V, PADDED, Q = 61, 64, 24
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
# head size 16 x 4 heads != width 40, and 2 key heads
SHAPE = dict(
    vocab_size=V,
    hidden_size=40,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    rope_parameters=ROPE,
    attn_implementation="eager",
)
FAMILIES = {
    "llama": ("Llama", dict(), dict(qk_layernorm=False)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True), dict(qk_layernorm=False)),
    "qwen3": ("Qwen3", dict(), dict()),
    "qwen3 tied": ("Qwen3", dict(tie_word_embeddings=True), dict()),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
        MOE,
    ),
}
# two or three documents in a row, each with positions of its own, and padding; a full row; a short one
ROWS = {"packed": [[9, 7, 5], [12, 12], [6]], "one full document": [[Q], [Q]]}


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


class Pair:
    """The same weights in the `transformers` class and in ours."""

    def __init__(self, family: str):
        name, hf_options, our_options = FAMILIES[family]
        hf_config = getattr(transformers, f"{name}Config")(**(SHAPE | dict(tie_word_embeddings=False) | hf_options))
        self.hf = getattr(transformers, f"{name}ForCausalLM")(hf_config)
        randomize(self.hf)
        tied = hf_config.tie_word_embeddings
        self.ours = small_model(
            small_config(**our_options),
            V,
            PADDED,
            rotary_base=ROPE["rope_theta"],
            share_embeddings_and_output_weights=tied,
        )
        target = dict(self.ours.named_parameters())
        mapped = map_names({name: p.detach() for name, p in self.hf.named_parameters()}, hf_config)
        assert set(mapped) == set(target)
        with torch.no_grad():
            for name, value in mapped.items():
                target[name].zero_()
                target[name][: len(value)] = value
        self.config = hf_config

    def gradients(self) -> tuple[dict, dict]:
        """(theirs under our names, ours)."""
        theirs = map_names({name: p.grad for name, p in self.hf.named_parameters()}, self.config)
        return theirs, {name: p.grad for name, p in self.ours.named_parameters()}


def map_names(hf: dict, config) -> dict:
    """Parameters (or their gradients) of the `transformers` class, under Megatron's names and in its row order."""
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        out["output_layer.weight"] = hf["lm_head.weight"]
    groups, d = config.num_key_value_heads, config.head_dim
    heads_per_group = config.num_attention_heads // groups
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        out[ours + "input_layernorm.weight"] = hf[theirs + "input_layernorm.weight"]
        out[ours + "pre_mlp_layernorm.weight"] = hf[theirs + "post_attention_layernorm.weight"]
        q, k, v = (hf[theirs + f"self_attn.{x}_proj.weight"] for x in "qkv")
        rows = []
        for g in range(groups):
            rows += [q[g * heads_per_group * d : (g + 1) * heads_per_group * d]]
            rows += [k[g * d : (g + 1) * d], v[g * d : (g + 1) * d]]
        out[ours + "self_attention.linear_qkv.weight"] = torch.cat(rows)
        out[ours + "self_attention.linear_proj.weight"] = hf[theirs + "self_attn.o_proj.weight"]
        for x in "qk":
            if theirs + f"self_attn.{x}_norm.weight" in hf:
                out[ours + f"self_attention.{x}_layernorm.weight"] = hf[theirs + f"self_attn.{x}_norm.weight"]
        if theirs + "mlp.gate.weight" in hf:
            out[ours + "mlp.router.weight"] = hf[theirs + "mlp.gate.weight"]
            for e in range(config.num_experts):
                expert = ours + f"mlp.experts.local_experts.{e}."
                out[expert + "linear_fc1.weight"] = hf[theirs + "mlp.experts.gate_up_proj"][e]
                out[expert + "linear_fc2.weight"] = hf[theirs + "mlp.experts.down_proj"][e]
        else:
            gate, up = hf[theirs + "mlp.gate_proj.weight"], hf[theirs + "mlp.up_proj.weight"]
            out[ours + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
            out[ours + "mlp.linear_fc2.weight"] = hf[theirs + "mlp.down_proj.weight"]
    return out


def element_wise_mask(documents_BQ) -> torch.Tensor:
    """Additive [B, 1, Q, Q]: 0 within a document, the lowest float elsewhere."""
    B = len(documents_BQ)
    mask = torch.full((B, 1, Q, Q), torch.finfo(torch.float32).min)
    for b in range(B):
        for q in range(Q):
            for k in range(Q):
                if documents_BQ[b, q] == documents_BQ[b, k]:
                    mask[b, 0, q, k] = 0
    return mask


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, rows):
    pair = Pair(family)
    generator = torch.Generator().manual_seed(1)
    documents_BQ, positions_BQ = packed(ROWS[rows], Q)
    B = len(documents_BQ)
    tokens_BQ = torch.randint(V, (B, Q), generator=generator)
    targets_BQ = torch.randint(V, (B, Q), generator=generator)
    weights_BQ = torch.rand(B, Q, generator=generator) * 3 * (torch.rand(B, Q, generator=generator) < 0.5)
    weights_BQ[documents_BQ < 0] = 0
    attributes_BQA = attributes_of(documents_BQ, positions_BQ)

    theirs_BQV = pair.hf(
        input_ids=tokens_BQ,
        position_ids=positions_BQ,
        attention_mask=element_wise_mask(documents_BQ),
        use_cache=False,
    ).logits
    nll = F.cross_entropy(theirs_BQV.flatten(0, 1), targets_BQ.flatten(), reduction="none")
    their_loss = (nll * weights_BQ.flatten()).sum() / 7
    their_loss.backward()

    ours_BQV = pair.ours(tokens_BQ, positions_BQ, attributes_BQA)
    real = documents_BQ >= 0
    assert (ours_BQV[..., :V] - theirs_BQV)[real].abs().max() < 2e-5
    assert (ours_BQV[..., V:] == torch.finfo(torch.float32).min).all()

    rows_N = weights_BQ.t().flatten().nonzero()[:, 0]  # sequence first
    pick = lambda tensor: tensor.t().flatten()[rows_N]
    term = RankTerm(rows_N, pick(targets_BQ), pick(weights_BQ), pick(weights_BQ))
    loss = partial(mdlm.loss, args=None)
    (loss_term,) = pair.ours(tokens_BQ, positions_BQ, attributes_BQA, loss=loss, terms={"dllm": term})
    our_loss = loss_term.sum / 7
    our_loss.backward()
    assert our_loss.item() == pytest.approx(their_loss.item(), rel=1e-6)

    theirs, ours = pair.gradients()
    for name, expected in theirs.items():
        gradient, beyond = ours[name][: len(expected)], ours[name][len(expected) :]
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max(), name
        assert not beyond.any(), name  # padding rows of the vocabulary


def test_a_batch_of_full_documents_needs_no_attributes():
    """What training passes then (`shard`): None, and the same logits."""
    model = small_model()
    randomize(model)
    documents_BQ, positions_BQ = packed([[Q], [Q]], Q)
    tokens_BQ = torch.randint(V, (2, Q), generator=torch.Generator().manual_seed(2))
    masked = model(tokens_BQ, positions_BQ, attributes_of(documents_BQ, positions_BQ))
    unmasked = model(tokens_BQ, positions_BQ, None)
    assert torch.allclose(masked, unmasked, atol=1e-5)
