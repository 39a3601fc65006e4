"""The DFlash draft network: hidden states and gradients of the published one, and what a block may see."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_dllm.conversion import plain_draft
from megatron_dllm.models import draft
from megatron_dllm.models.draft import BLOCK, DOCUMENT, NOISY, STREAM, DraftAttention, DraftModel, lay_out, visible
from megatron_dllm.models.family import Family
from tests.drafts import CONFIG, GROUPS, HEADS, SIZE, Batch, make, tensors
from tests.one_process import small_config
from tests.parity.loading import build

pytestmark = pytest.mark.usefixtures("parallel_state")
GOLDEN = Path(__file__).parents[1] / "golden"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def golden(name: str) -> list[dict]:
    return json.loads((GOLDEN / name).read_text())["cases"]


def as_is(weights: dict, batch: Batch, **changes) -> torch.Tensor:
    inputs = batch.features_BSF, batch.embeddings_BQD, batch.position_ids_BT, batch.allowed_BQT
    return plain_draft.hidden_states(weights, CONFIG | changes, *inputs)


def published(weights: dict, batch: Batch) -> torch.Tensor:
    """The class of the package `dflash`, where it is installed (pip install --no-deps dflash==0.1.0: that class needs
    nothing of what the package pins)."""
    module = pytest.importorskip("dflash.model")
    from torch.func import functional_call
    from transformers import Qwen3Config

    network = module.DFlashDraftModel(Qwen3Config(**CONFIG)).eval()
    assert set(network.state_dict()) == set(weights)
    mask = torch.zeros(batch.allowed_BQT.shape).masked_fill(~batch.allowed_BQT, float("-inf"))[:, None]
    inputs = dict(target_hidden=batch.features_BSF, noise_embedding=batch.embeddings_BQD)
    return functional_call(
        network, weights, kwargs=dict(inputs, position_ids=batch.position_ids_BT, attention_mask=mask)
    )


def under_our_names(theirs: dict) -> dict:
    """Gradients of a folder's tensors, in Megatron's row order, the naive way."""
    out = {"decoder.final_layernorm.weight": theirs["norm.weight"]}
    out |= {name: theirs[name] for name in ("fc.weight", "hidden_norm.weight")}
    for layer in range(CONFIG["num_hidden_layers"]):
        get = lambda name, layer=layer: theirs[f"layers.{layer}.{name}.weight"]
        ours, share, rows = f"decoder.layers.{layer}.", HEADS // GROUPS * SIZE, []
        for g in range(GROUPS):
            rows += [get("self_attn.q_proj")[g * share : (g + 1) * share]]
            rows += [get(f"self_attn.{x}_proj")[g * SIZE : (g + 1) * SIZE] for x in "kv"]
        out |= {
            ours + "input_layernorm.weight": get("input_layernorm"),
            ours + "self_attention.linear_qkv.weight": torch.cat(rows),
            ours + "self_attention.linear_proj.weight": get("self_attn.o_proj"),
            ours + "self_attention.q_layernorm.weight": get("self_attn.q_norm"),
            ours + "self_attention.k_layernorm.weight": get("self_attn.k_norm"),
            ours + "pre_mlp_layernorm.weight": get("post_attention_layernorm"),
            ours + "mlp.linear_fc1.weight": torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            ours + "mlp.linear_fc2.weight": get("mlp.down_proj"),
        }
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize(
    ("oracle", "flags"),
    (
        (as_is, ""),
        (published, ""),
        (as_is, RECOMPUTE),
        (as_is, "--recompute-granularity selective"),
        (as_is, "--dllm-attention-backend tiled"),
    ),
    ids=("plain", "published", "recompute full", "recompute selective", "tiled"),
)
def test_hidden_states_and_gradients(path, oracle, flags):
    batch, weights = Batch(), {name: x.requires_grad_() for name, x in tensors().items()}
    expected = oracle(weights, batch)
    theirs = torch.autograd.grad((expected * batch.direction_BQD).sum(), list(weights.values()))
    model = build(path, *flags.split()).train()
    hidden = batch.through(model)
    assert (hidden - expected).abs().max() < 1e-5 * expected.abs().max()
    (hidden * batch.direction_BQD).sum().backward()
    wanted = under_our_names(dict(zip(weights, theirs, strict=True)))
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(ours) == set(wanted)
    for name, gradient in wanted.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_scaled_rotary_embeddings(tmp_path):
    """yarn, whose factor on cosine and sine is not 1."""
    scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    batch = Batch()
    with torch.no_grad():
        expected = as_is(tensors(), batch, rope_scaling=scaling)
        assert (as_is(tensors(), batch) - expected).abs().max() > 1e-2
        hidden = batch.through(build(make(tmp_path, rope_scaling=scaling)))
    assert (hidden - expected).abs().max() < 1e-5 * expected.abs().max()


def test_published_numbers(tmp_path):
    """Both networks, on numbers that the published recipe's own draft has computed."""
    (case,) = golden("26_draft_forward.json")
    weights = {}
    for number, (name, shape) in enumerate(case["params"]):
        wave = 0.3 * torch.sin(0.37 * torch.arange(1, math.prod(shape) + 1, dtype=torch.float64) + number)
        weights[name] = (1 + 0.1 * wave if len(shape) == 1 else wave).float().view(shape)
    shape = case["config"]
    config = dict(
        num_hidden_layers=shape["layers"],
        layer_types=None,
        hidden_size=shape["hidden"],
        intermediate_size=shape["inter"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        rope_theta=shape["rope_theta"]["rope_theta"],
        rms_norm_eps=shape["eps"],
        block_size=3,
    )
    S = 5
    positions, attributes = lay_out(torch.tensor(case["anchors"]), 3, torch.arange(S)[None], torch.zeros(1, S).long())
    assert positions.tolist() == case["position_ids"]
    features, embeddings = torch.tensor(case["target_hidden"]), torch.tensor(case["noise_embedding"])
    model = build(make(tmp_path, weights, **config))
    with torch.no_grad():
        ours = model(features.transpose(0, 1), embeddings.transpose(0, 1), positions, attributes).transpose(0, 1)
        allowed = visible(attributes[:, S:, None], attributes[:, None])
        plain = plain_draft.hidden_states(weights, CONFIG | config, features, embeddings, positions, allowed)
    expected = torch.tensor(case["out"])
    assert (plain - expected).abs().max() < 1e-5 and (ours - expected).abs().max() < 1e-5


# --- mistakes ---------------------------------------------------------------------------------------------------------


def context_normed(monkeypatch):
    """As Transformer Engine's fused layers would do it."""
    layer = draft.DraftLayer._forward_attention

    def normed(self, hidden_states, context=None, **options):
        return layer(self, hidden_states, context=self.input_layernorm(context), **options)

    monkeypatch.setattr(draft.DraftLayer, "_forward_attention", normed)


def context_behind_the_block(monkeypatch):
    def swapped(self, hidden, *args, **options):
        q, k, v = original(self, hidden, *args, **options)
        S = len(k) - len(q)
        return q, torch.cat([k[S:], k[:S]]), torch.cat([v[S:], v[:S]])

    original = DraftAttention.get_query_key_value_tensors
    monkeypatch.setattr(DraftAttention, "get_query_key_value_tensors", swapped)


def hidden_norm_left_out(monkeypatch):
    original = DraftModel.__init__

    def without(self, *args, **options):
        original(self, *args, **options)
        self.hidden_norm.forward = lambda x: x

    monkeypatch.setattr(DraftModel, "__init__", without)


def queries_at_the_context_s_positions(monkeypatch):
    angles = draft.angles
    monkeypatch.setattr(draft, "angles", lambda ids, f: angles(torch.cat([ids[:, :12], ids[:, :12]], 1), f))


def anchor_visible(monkeypatch):
    one_more = lambda x: x + torch.tensor([0, 0, 0, 0, 1], dtype=x.dtype)
    original = DraftModel.__init__

    def leaking(self, *args, **options):
        original(self, *args, rule=lambda q, k: visible(one_more(q), k), **options)

    monkeypatch.setattr(DraftModel, "__init__", leaking)


def with_table(change):
    def apply(monkeypatch):
        mapping = Family.mapping

        def changed(family, args, keys=None):
            table = {name: change(name, rule, family.weights[0]) for name, rule in family.weights[0].items()}
            return mapping(dataclasses.replace(family, weights=(table,)), args, keys)

        monkeypatch.setattr(Family, "mapping", changed)

    return apply


def other_norm(name, rule, table):
    pairs = {"q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}
    return next((table[name.replace(a, b)] for a, b in pairs.items() if a in name), rule)


def norms_of_ends(name, rule, table):
    pairs = {"hidden_norm.weight": "decoder.final_layernorm.weight"}
    pairs |= {b: a for a, b in pairs.items()}
    return table[pairs.get(name, name)]


MISTAKES = {
    "the context normed by the layer": context_normed,
    "the context behind the block": context_behind_the_block,
    "no hidden_norm": hidden_norm_left_out,
    "positions of the context for the block": queries_at_the_context_s_positions,
    "the anchor's own state visible": anchor_visible,
    "norms of query and key swapped": with_table(other_norm),
    "first and last norm swapped": with_table(norms_of_ends),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_the_hidden_states(path, monkeypatch, mistake):
    batch = Batch()
    expected = as_is(tensors(), batch)
    MISTAKES[mistake](monkeypatch)
    with torch.no_grad():
        assert (batch.through(build(path)) - expected).abs().max() > 1e-2


# --- what a block sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("sdpa", "tiled"))
def test_context_from_the_anchor_on_moves_nothing(path, backend):
    """Nor does another document's, or that of any other block. For each block and each place of the context."""
    model, batch = build(path, "--dllm-attention-backend", backend), Batch()
    with torch.no_grad():
        before = batch.through(model)
        for place in range(batch.features_BSF.shape[1]):
            features = batch.features_BSF.clone()
            features[:, place] += 1
            moved = (batch.through(model, features) != before).any(-1).unflatten(1, (-1, CONFIG["block_size"]))
            for b, n in [(b, n) for b in range(2) for n in range(3)]:
                seen = bool(batch.allowed_BQT[b, n * CONFIG["block_size"], place])
                assert moved[b, n].all() if seen else not moved[b, n].any(), (place, b, n)


def test_published_masks():
    """Rows are queries of three blocks of three, columns seven of context and the blocks."""
    cases = [case for case in golden("15_mask_dflash.json") if not case["causal"] and not case["sliding"]]
    assert [case["docs"] for case in cases] == [False, True]
    for case in cases:
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1] if case["docs"] else [0] * 7])
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3] if case["docs"] else [*range(7)]])
        kept = torch.tensor(case["keep"]).bool()
        ids, attributes = lay_out(torch.tensor(case["anchors"]), case["block"], positions, documents, kept)
        allowed = visible(attributes[0, 7:, None], attributes[0, None])
        assert ["".join(map(str, row)) for row in allowed.int().tolist()] == case["rows"]
        assert ids[0, 7:].tolist() == [positions[0, a].item() + o for a in case["anchors"][0] for o in range(3)]
        assert (attributes[0, 7:, STREAM] == NOISY).all()
        assert attributes[0, 7:, BLOCK].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert (attributes[0, 13:, DOCUMENT] == -1).all()


def test_two_blocks_at_one_anchor_do_not_see_each_other():
    ids, attributes = lay_out(torch.tensor([[2, 2]]), 2, torch.arange(4)[None], torch.zeros(1, 4).long())
    allowed = visible(attributes[0, 4:, None], attributes[0, None])
    assert allowed[:, 4:].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert ids[0].tolist() == [0, 1, 2, 3, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    (
        (dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32), "--pipeline-model-parallel-size 1"),
        (dict(context_parallel_size=2, cp_comm_type="a2a"), "--cp-comm-type all_gather"),
    ),
)
def test_what_is_refused(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        DraftModel(small_config(**flags), 80)
