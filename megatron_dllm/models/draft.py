"""The DFlash draft network (arXiv:2602.06036, section 3) of Megatron-Core's parts.

    c   = RMSNorm(W_fc [target's hidden states of the chosen layers])      once, for all layers
    u   = RMSNorm(x)                                                       x: the block's embeddings, at first
    q   = W_q u;   k, v = W_kv [c | u]                                     the same weights for context and block
    x  += W_o softmax(q k^T / sqrt(d)) v;   x += SwiGLU MLP(RMSNorm(x))

The context goes into every layer as it is: it is neither normed there nor changed. So only the block has queries, and a
layer is Megatron's own but for where its keys and values come from. What comes after the last norm (head, loss) is the
target's, and so are the embeddings.

A block begins with a token that is known, its anchor; it sees the context strictly before that, and all of itself.

Shapes: S context tokens, N blocks of K tokens, Q = N·K, T = S + Q (context, then blocks), F features (chosen layers
times width), D width, B batch rows. Under context parallelism S, Q and T are a rank's.
"""

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dllm.models.dlm import block_spec, parallel_layers, without_padding
from megatron_dllm.models.norms import RMSNorm
from megatron_dllm.models.rope import angles, frequencies
from megatron_dllm.modes.base import ANCHOR, BLOCK, CONTEXT, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM, Rule


def visible(
    query: torch.Tensor, key: torch.Tensor, causal_block: bool = False, window: int | None = None
) -> torch.Tensor:
    """The context strictly before the block's anchor, of the same document, and the own block; nothing else. A block
    outside of all documents (-1, one that is not scored) sees itself alone.

    causal_block: of the own block only what comes before (JetSpec); window: of the context only positions that are
    less than so many before the query's.
    """
    before = (key[..., STREAM] == CONTEXT) & (key[..., POSITION] < query[..., ANCHOR])
    before &= (key[..., DOCUMENT] == query[..., DOCUMENT]) & (query[..., DOCUMENT] >= 0)
    own = (key[..., STREAM] == NOISY) & (key[..., BLOCK] == query[..., BLOCK])
    if window is not None:
        before &= query[..., POSITION] - key[..., POSITION] < window
    if causal_block:
        own &= key[..., POSITION] <= query[..., POSITION]
    return before | own


def lay_out(
    anchors_BN: torch.Tensor,
    length: int,
    position_ids_BS: torch.Tensor,
    documents_BS: torch.Tensor,
    kept_BN: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(position_ids_BT int64, attributes_BTA int32) of a context and blocks of `length` tokens.

    anchors_BN int64: place of each block's first token in the context; position_ids_BS, documents_BS: of the context
    (-1: padding); kept_BN bool: blocks that are scored, default all. A block's positions run on from its anchor's.
    """
    (B, S), N = position_ids_BS.shape, anchors_BN.shape[1]
    of_anchor = lambda x_BS: x_BS.gather(1, anchors_BN).repeat_interleave(length, 1)
    anchor_BQ, document_BQ = of_anchor(position_ids_BS), of_anchor(documents_BS)
    if kept_BN is not None:
        document_BQ = document_BQ.masked_fill(~kept_BN.repeat_interleave(length, 1), -1)
    offsets_Q = torch.arange(length, device=anchors_BN.device).repeat(N)
    position_ids_BT = torch.cat([position_ids_BS, anchor_BQ + offsets_Q], 1)
    attributes_BTA = position_ids_BT.new_full((B, S + N * length, NUM_ATTRIBUTES + 1), -1, dtype=torch.int32)
    attributes_BTA[:, :S, STREAM], attributes_BTA[:, S:, STREAM] = CONTEXT, NOISY
    attributes_BTA[:, S:, BLOCK] = torch.arange(N, device=anchors_BN.device).repeat_interleave(length)
    attributes_BTA[..., POSITION] = position_ids_BT
    attributes_BTA[..., DOCUMENT] = torch.cat([documents_BS, document_BQ], 1)
    attributes_BTA[:, S:, ANCHOR] = anchor_BQ
    return position_ids_BT, attributes_BTA


class DraftAttention(SelfAttention):
    """Self-attention of the block, whose keys and values are those of [context | block]."""

    context: torch.Tensor | None = None  # [S, B, D], or a rank's share of it under sequence parallelism

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._by_parts = isinstance(self.linear_qkv, tensor_parallel.ColumnParallelLinear)
        # ranks that share a key/value group have rows of several kinds, which Megatron deals out after the product
        self._by_parts &= self.config.num_query_groups >= self.linear_qkv.tp_group.size()
        if self._by_parts:
            # a gradient added where it is made, past autograd, would miss what comes through a part of the weight
            self.linear_qkv.gradient_accumulation_fusion = False

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **options):
        """query [Q, B, h, d], key and value [T, B, g, d]."""
        query, key, value = super().get_query_key_value_tensors(hidden_states, **options)
        context_key, context_value = self._key_and_value(self.context)
        return query, torch.cat([context_key, key]), torch.cat([context_value, value])

    def _key_and_value(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, B, g, d] each, by the rows of W_qkv ([queries, key, value] a group) that make no queries."""
        if not self._by_parts:
            return super().get_query_key_value_tensors(context, None)[1:]
        linear, groups, d = self.linear_qkv, self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        if not (linear.allreduce_dgrad or linear.sequence_parallel):
            context = tensor_parallel.copy_to_tensor_model_parallel_region(context, group=linear.tp_group)
        weight = linear.weight.unflatten(0, (groups, -1, d))[:, -2:]
        mixed = linear._forward_impl(
            input=context,
            weight=weight.flatten(0, 2),
            bias=None if linear.bias is None else linear.bias.unflatten(0, (groups, -1, d))[:, -2:].flatten(),
            gradient_accumulation_fusion=False,
            allreduce_dgrad=linear.allreduce_dgrad,
            sequence_parallel=linear.sequence_parallel,
            tp_group=linear.tp_group,
        )
        key, value = mixed.unflatten(-1, (groups, 2, d)).unbind(-2)
        return (key if self.k_layernorm is None else self.k_layernorm(key)), value


class DraftLayer(TransformerLayer):
    """Megatron's layer. It hands `context` to cross-attention only; here self-attention finds it beside itself, for the
    time of the call, in a recomputed one too."""

    def _forward_attention(self, hidden_states, attention_mask=None, context=None, **options):
        self.self_attention.context = context
        try:
            return super()._forward_attention(hidden_states, attention_mask, context, **options)
        finally:
            self.self_attention.context = None


class DraftModel(MegatronModule):
    """W_fc and norm of the context -> layers -> norm, on one pipeline stage.

    rule: `visible`, or another on attributes like `lay_out`'s; num_features: F. Parameters are `fc.weight` [D, F] (rows
    split by tensor parallelism), `hidden_norm.weight` [D], and GPTModel's `decoder.*`.
    Raises ValueError (one sentence) for a configuration that does not compute this network.
    """

    def __init__(
        self,
        config,
        num_features: int,
        rule: Rule = visible,
        rotary_base: float = 10000.0,
        rope_scaling: dict | None = None,
        attention_backend: str = "auto",
        pg_collection=None,
    ):
        super().__init__(config=config)
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.fp8 = bool(config.fp8)  # or emulated (fp8_emulation.py)
        _check(config)
        self.fc = tensor_parallel.ColumnParallelLinear(
            num_features,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=True,
            disable_grad_reduce=True,  # features get no gradient
            tp_group=self.pg_collection.tp,
        )
        self.fc.sequence_parallel = False  # its input is whole on every rank; its output, much narrower, is split
        self.hidden_norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        # A plain attribute: a buffer would be cast to bf16 with the rest of the model.
        self.inverse_frequencies, rotary_factor = frequencies(config.kv_channels, rotary_base, scaling=rope_scaling)
        self.decoder = TransformerBlock(
            config=config, spec=_spec(config, rule, attention_backend), pg_collection=self.pg_collection
        )
        for layer in self.decoder.layers:
            layer.self_attention._yarn_concentration_factor = rotary_factor  # Megatron applies it to cosine and sine

    def forward(
        self,
        features_SBF: torch.Tensor,
        embeddings_QBD: torch.Tensor,
        position_ids_BT: torch.Tensor,
        attributes_BTA: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [Q, B, D] for the target's head; under sequence parallelism a rank's share, as of any block.

        features_SBF: the target's hidden states of the chosen layers side by side, embeddings_QBD: of the blocks'
        tokens; both whole on every tensor-parallel rank. The target is frozen: no gradient flows into the features.
        attributes_BTA: of the global [context | blocks] in the order of the concatenated context-parallel ranks; None:
        everything is visible.
        """
        S, sequence_parallel = len(features_SBF), self.config.sequence_parallel
        if sequence_parallel and (S % (tp := self.pg_collection.tp.size()) or len(embeddings_QBD) % tp):
            raise ValueError(
                f"{S} context and {len(embeddings_QBD)} block tokens cannot be split over {tp} sequence-parallel "
                "ranks: pad them to a multiple."
            )
        context, _ = self.fc(features_SBF.detach())
        hidden = embeddings_QBD
        if self.fp8 and attributes_BTA is not None:
            cp = self.pg_collection.cp
            mine_TBA = attributes_BTA.chunk(cp.size(), 1)[cp.rank()].transpose(0, 1)
            context, hidden = without_padding(context, mine_TBA[:S]), without_padding(hidden, mine_TBA[S:])
        if sequence_parallel:
            context, hidden = (
                tensor_parallel.scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)
                for x in (context, hidden)
            )
        if self.inverse_frequencies.device != position_ids_BT.device:  # once
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids_BT.device)
        rotary = angles(position_ids_BT, self.inverse_frequencies)
        return self.decoder(
            hidden_states=hidden,
            attention_mask=attributes_BTA,
            context=self.hidden_norm(context),
            rotary_pos_emb=(rotary[S:], rotary),  # of queries, of keys
        )


def _spec(config, rule: Rule, backend: str) -> TransformerBlockSubmodules:
    spec = block_spec(config, rule, backend, vp_stage=None)
    for layer in spec.layer_specs:
        layer.module = DraftLayer
        layer.submodules.self_attention.module = DraftAttention
        if config.transformer_impl == "transformer_engine":
            # Its fused layer would norm the context too. A norm of its own is stored where the fused one would be.
            layer.submodules.input_layernorm = RMSNorm
            layer.submodules.self_attention.submodules.linear_qkv = parallel_layers(config).column_parallel_linear()
            layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    return spec


def _check(config) -> None:
    if config.pipeline_model_parallel_size > 1:
        raise ValueError(
            "a draft's few layers all read the same context, which a pipeline would have to pass on: use "
            "--pipeline-model-parallel-size 1."
        )
    if config.context_parallel_size > 1 and "a2a" in config.cp_comm_type:
        raise ValueError(
            "a draft's queries are not as many as its keys, which an exchange of heads cannot do: use --cp-comm-type "
            "all_gather."
        )
