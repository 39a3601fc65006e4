"""LLaDA2.0 and 2.1, mini and flash (arXiv:2512.15745): experts chosen by sigmoid scores within groups, one of them
shared, after dense first layers; half of each head is rotated.

Equal to Glm4MoeForCausalLM. Query, key and value are one tensor [all queries | all keys | all values]. dFactory's
"merged" layout keeps the experts of a layer in one tensor. The selection bias of the experts is a buffer in fp32.
"""

from megatron_dllm.models.entries import Choice, DenseFirst, Entry, Heads, Only, Rope, Same, positive
from megatron_dllm.models.family import Family
from megatron_dllm.models.llama import SIZES, decoder_weights, experts, head_norms, shared_experts
from megatron_dllm.models.weights import ExpertSlice, InterleavedFused, Stacked, Table


class _Groups(Entry):
    """Megatron scores a group of experts by the sum of its best topk // group_topk, these models by its best two."""

    keys = ("n_group", "topk_group")
    arguments = ("moe_router_num_groups", "moe_router_group_topk")

    def __init__(self, experts: str):
        self.experts = experts

    def read(self, config):
        if config.get("n_group", ...) in (None, 1):
            return {}
        groups, chosen = positive(config, "n_group"), positive(config, "topk_group")
        topk, experts = positive(config, "num_experts_per_tok"), positive(config, self.experts)
        if chosen >= groups:
            return {}  # all of them
        if experts % groups:
            raise ValueError(f"config.json has {self.experts} = {experts}, which n_group = {groups} does not divide.")
        if topk // chosen != 2:
            raise ValueError(
                f"config.json chooses {topk} experts from {chosen} groups: Megatron's router agrees with this family "
                "only for two experts a group."
            )
        return dict(moe_router_num_groups=groups, moe_router_group_topk=chosen)

    def write(self, args):
        groups, chosen = args.moe_router_num_groups or 1, args.moe_router_group_topk or 1
        if chosen < groups and args.moe_router_topk // chosen != 2:
            raise ValueError(
                f"--moe-router-topk {args.moe_router_topk} of {chosen} groups (a group is scored by its best two)"
            )
        return dict(n_group=groups, topk_group=chosen)


class _Shared(Entry):
    """Shared experts are one MLP of their joint width."""

    arguments = ("moe_shared_expert_intermediate_size",)

    def __init__(self, key: str):
        self.keys = (key, "moe_shared_expert_intermediate_size")

    def read(self, config):
        expert = positive(config, "moe_intermediate_size")
        width = expert * positive(config, self.keys[0]) if config.get(self.keys[0]) else 0
        given = config.get(self.keys[1])
        if given and given not in (width, expert):
            raise ValueError(f"config.json has {self.keys[1]} = {given}: only {width} is implemented.")
        return dict(moe_shared_expert_intermediate_size=width or None)

    def write(self, args):
        width = args.moe_shared_expert_intermediate_size or 0
        if width % args.moe_ffn_hidden_size:
            raise ValueError(f"--moe-shared-expert-intermediate-size {width} is not a multiple of an expert's width")
        return {self.keys[0]: width // args.moe_ffn_hidden_size}


_ARGUMENTS = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
_NORMS = {True: dict(qk_layernorm=True), False: dict(qk_layernorm=False)}
_ENTRIES = (
    *SIZES,
    Heads(),
    DenseFirst(),
    Same("num_experts_per_tok", "moe_router_topk"),
    Same("moe_intermediate_size", "moe_ffn_hidden_size"),
    Same("routed_scaling_factor", "moe_router_topk_scaling_factor", whole=False, absent=1.0),
    Only("norm_topk_prob", True),
)


def _weights() -> Table:
    """Names of the released checkpoints."""
    ours, theirs = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.attention."
    return (
        decoder_weights()
        | experts()
        | shared_experts()
        | {
            "embedding.word_embeddings.weight": "model.word_embeddings.weight",
            ours + "linear_qkv.weight": InterleavedFused(theirs + "query_key_value.weight"),
            ours + "linear_proj.weight": theirs + "dense.weight",
            ours + "q_layernorm.weight": theirs + "query_layernorm.weight",
            ours + "k_layernorm.weight": theirs + "key_layernorm.weight",
            "decoder.layers.{layer}.mlp.router.expert_bias": "model.layers.{layer}.mlp.gate.expert_bias",
        }
    )


def _merged() -> Table:
    """dFactory's names: gate_proj and up_proj [experts, width, hidden], down_proj [experts, hidden, width]."""
    ours, theirs = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.", "model.layers.{layer}.mlp.experts."
    return _weights() | {
        ours + "linear_fc1.weight": Stacked(ExpertSlice(theirs + "gate_proj"), ExpertSlice(theirs + "up_proj")),
        ours + "linear_fc2.weight": ExpertSlice(theirs + "down_proj"),
    }


LLADA2 = Family(
    name="llada2",
    types=("llada2_moe", "llada2_moe_veomni"),
    architecture="LLaDA2MoeModelLM",
    also_architectures=("LLaDA2MoeModel",),
    entries=(
        *_ENTRIES,
        Rope(partial=0.5, old_notation=True, scalings=()),
        Same("num_experts", "num_experts"),
        _Groups("num_experts"),
        _Shared("num_shared_experts"),
        Choice("use_qk_norm", _NORMS, True),
        Only("use_qkv_bias", False),
        Only("use_bias", False, default=True),
        Only("norm_head", False),
        Only("use_sliding_window", False),
        Only("use_rmsnorm", True, written=False),
        Only("norm_softmax", False, written=False),
        Only("score_function", "sigmoid", written=False),
        Only("moe_router_enable_expert_bias", True, written=False),
        Only("num_nextn_predict_layers", 0, also=(None,), written=False),
    ),
    weights=(_weights(), _merged()),
    arguments=_ARGUMENTS,
    stock="glm4_moe",
    mode="bd3lm",
    mask_token_id=156895,
    suggested=dict(moe_router_dtype="fp32", moe_router_bias_update_rate=0.0),
    harmless=tuple(
        "sliding_window max_window_layers output_router_logits router_dtype rotary_dim "
        "mtp_loss_scaling_factor using_split_qkv_in_self_attention".split()
    ),
)
GLM4_MOE = Family(
    name="glm4_moe",
    types=("glm4_moe",),
    architecture="Glm4MoeForCausalLM",
    transformers_config="Glm4MoeConfig",
    entries=(
        *_ENTRIES,
        Rope(partial=0.5),
        Same("n_routed_experts", "num_experts", alias="num_local_experts"),
        _Groups("n_routed_experts"),
        _Shared("n_shared_experts"),
        Choice("use_qk_norm", _NORMS, False),
        Only("attention_bias", False),
        Only("num_nextn_predict_layers", 0, also=(None,)),
    ),
    weights=(
        decoder_weights()
        | head_norms()
        | experts()
        | shared_experts()
        | {
            "decoder.layers.{layer}.mlp.router.expert_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        },
    ),
    arguments=_ARGUMENTS,
    suggested=dict(moe_router_dtype="fp32", moe_router_bias_update_rate=0.0),
    harmless=("output_router_logits", "num_mtp_layers"),
)
