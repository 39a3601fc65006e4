"""The same weights under the same names, whether Megatron's local layers hold them or Transformer Engine's.

Transformer Engine's names are written out here, because its layers cannot be built without a GPU: its linear layers
hold the norm before them, its grouped experts number their weights.
"""

import pytest
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron_dllm.models.weights import local_name
from tests.one_process import MOE, one_process, small_config, small_model

ENDS = "embedding.word_embeddings.weight decoder.final_layernorm.weight output_layer.weight".split()
ATTENTION = """
    self_attention.linear_qkv.layer_norm_weight self_attention.linear_qkv.weight self_attention.linear_qkv.bias
    self_attention.q_layernorm.weight self_attention.k_layernorm.weight self_attention.linear_proj.weight
""".split()
DENSE = "mlp.linear_fc1.layer_norm_weight mlp.linear_fc1.weight mlp.linear_fc2.weight".split()
EXPERTS = """
    pre_mlp_layernorm.weight mlp.router.weight mlp.router.expert_bias
    mlp.shared_experts.linear_fc1.weight mlp.shared_experts.linear_fc2.weight
""".split()
GROUPED = [f"mlp.experts.linear_fc{i}.weight{expert}" for i in (1, 2) for expert in range(4)]
STORED = ["mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"]  # all experts in one
LAYOUTS = {"dense": 1, "experts": 1, "dense, experts": [0, 1]}


@pytest.fixture
def build():
    with one_process():

        def build(kind):
            experts = MOE | dict(
                moe_router_score_function="sigmoid",
                moe_router_enable_expert_bias=True,
                moe_shared_expert_intermediate_size=24,
                moe_layer_freq=LAYOUTS[kind],
            )
            return small_model(small_config(add_qkv_bias=True, **({} if kind == "dense" else experts)))

        yield build


def layers(kind, experts: list[str]) -> list[list[str]]:
    """Names within each layer, under Transformer Engine."""
    return [ATTENTION + (DENSE if part == "dense" else EXPERTS + experts) for part in (kind.split(", ") * 2)[:2]]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_parameters(build, kind):
    model = build(kind)
    held = {name for name, _ in model.named_parameters()}
    held |= {name for name, _ in model.named_buffers() if name.endswith("expert_bias")}
    numbered = [f"decoder.layers.{i}.{name}" for i, names in enumerate(layers(kind, GROUPED)) for name in names]
    assert sorted(map(local_name, [*ENDS, *numbered])) == sorted(held)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_a_checkpoint_calls_them(build, kind):
    state = build(kind).sharded_state_dict()
    apply_factories(state)
    stored = {x.key for x in nested_values(state) if isinstance(x, ShardedTensor)}
    number = lambda i: f"{i}." if kind == "dense, experts" else ""  # layers of one kind are stacked
    inner = {f"decoder.layers.{number(i)}{name}" for i, names in enumerate(layers(kind, STORED)) for name in names}
    assert stored == {*ENDS, *inner}
