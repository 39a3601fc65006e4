"""The diffusion language model: Megatron-Core's parts, explicit positions and attributes, rows that are scored.

Parameter names are GPTModel's, so Megatron's tools read our checkpoints. GPTModel itself is deprecated in
megatron-core 0.19 and hard-codes causal masks and implicit positions.
"""

import copy
import functools
from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.models.lora import is_adapter, leave_out
from megatron_dllm.models.norms import HeadRMSNorm, RMSNorm
from megatron_dllm.models.rope import angles, frequencies
from megatron_dllm.models.scoring import Head, ScoreView
from megatron_dllm.modes.base import DOCUMENT, Rule
from megatron_dllm.parallel import RankTerm


def block_spec(
    config, rule: Rule, backend: str, vp_stage: int | None, separate_norms: bool = False
) -> TransformerBlockSubmodules:
    """Megatron's layers for this pipeline stage with our core attention, and our norms in the local spec.

    separate_norms: Transformer Engine's products norm no input themselves, so that something can be beside them."""
    transformer_engine = config.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    core_attention = functools.partial(RuleAttention, visible=rule, backend=backend)
    layers = []
    for layer in spec.layer_specs:
        layer = copy.deepcopy(layer)
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = core_attention
        if not transformer_engine:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            if layer.submodules.mlp.func is MoELayer:
                # before experts the norm is a module of its own in Transformer Engine's layers too, and stored as one
                del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = HeadRMSNorm
        elif separate_norms:
            _separate_norms(layer.submodules, config)
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=spec.layer_norm if transformer_engine else RMSNorm)


def _separate_norms(layer, config) -> None:
    """Norms of their own in place of those in a layer's products, stored where these would be."""
    te = parallel_layers(config)
    layer.input_layernorm = te.layer_norm()
    layer.self_attention.submodules.linear_qkv = te.column_parallel_linear()
    layer.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if layer.mlp.func is not MoELayer:  # before experts the norm is a module of its own anyway
        layer.pre_mlp_layernorm = te.layer_norm()
        layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        layer.mlp.keywords["submodules"].linear_fc1 = te.column_parallel_linear()


def parallel_layers(config):
    """Megatron's provider of the linear layers (and experts of them) that a specification is made of."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return LocalSpecProvider()


def own_shard(x_Q: torch.Tensor, config, group) -> torch.Tensor:
    """This rank's rows under sequence parallelism, of what every tensor-parallel rank has whole (no gradient)."""
    return x_Q.chunk(group.size())[group.rank()] if config.sequence_parallel else x_Q


def own_rows(attributes_BQA: torch.Tensor, config, pg_collection) -> torch.Tensor:
    """[Q, B, A] of the rows that this rank holds in a layer, from those of all ranks, one after the other."""
    own_BQA = attributes_BQA.chunk(pg_collection.cp.size(), 1)[pg_collection.cp.rank()]
    return own_shard(own_BQA.transpose(0, 1), config, pg_collection.tp)


def without_padding(hidden_QBD: torch.Tensor, own_QBA: torch.Tensor) -> torch.Tensor:
    """Zeros for rows that are no token's, which then say nothing about how large numbers are (the scales of FP8)."""
    return hidden_QBD.masked_fill((own_QBA[..., DOCUMENT, None] < 0).contiguous(), 0.0)


class DiffusionLM(LanguageModule):
    """Embedding -> TransformerBlock -> head, any of them absent on a pipeline stage that does not hold it.

    rule: the mode's `visible`; vocab_size: padded rows of the embedding (a multiple of the tensor-parallel
    size), true_vocab_size: those that are tokens; the rest never receives probability; separate_norms: of Transformer
    Engine's layers (`block_spec`).
    adapted: all but adapters is frozen (lora.py); adapters_anew: the checkpoint to be loaded has none.
    """

    adapted = adapters_anew = False

    def __init__(
        self,
        config,
        rule: Rule,
        vocab_size: int,
        true_vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        share_embeddings_and_output_weights: bool = False,
        rotary_base: float = 10000.0,
        rotary_percent: float = 1.0,
        rope_scaling: dict | None = None,
        attention_backend: str = "auto",
        separate_norms: bool = False,
        vp_stage: int | None = None,
        pg_collection=None,
    ):
        super().__init__(config=config, pg_collection=pg_collection)
        self.separate_norms = separate_norms
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.model_type = ModelType.encoder_or_decoder
        self.vocab_size, self.true_vocab_size = vocab_size, true_vocab_size
        self.max_sequence_length = max_sequence_length
        self.fp8 = bool(config.fp8)  # or emulated (fp8_emulation.py)
        tp = self.pg_collection.tp

        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=vocab_size,
                max_sequence_length=max_sequence_length,
                position_embedding_type="rope",
                scatter_to_sequence_parallel=True,
                tp_group=tp,
            )
        # A plain attribute: a buffer would be cast to bf16 with the rest of the model.
        self.inverse_frequencies, rotary_factor = self.rotary_frequencies(rotary_base, rotary_percent, rope_scaling)
        self.decoder = TransformerBlock(
            config=config,
            spec=self.layers_spec(rule, attention_backend, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        for layer in self.decoder.layers:
            layer.self_attention._yarn_concentration_factor = rotary_factor  # Megatron applies it to cosine and sine
        if post_process:
            self.output_layer = Head(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
                disable_grad_reduce=True,  # the reduction happens where the rows are selected
                tp_group=tp,
            )
            self.output_layer.sequence_parallel = False  # its input is gathered already
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    # --- where an architecture may differ (diffusion_gemma.py) ---

    def rotary_frequencies(self, base: float, percent: float, scaling: dict | None) -> tuple[torch.Tensor, float]:
        """Inverse frequencies, fp32, and the factor on cosine and sine."""
        return frequencies(self.config.kv_channels, base, percent, scaling)

    def layers_spec(self, rule: Rule, backend: str, vp_stage: int | None) -> TransformerBlockSubmodules:
        """This stage's layers and the final norm."""
        return block_spec(self.config, rule, backend, vp_stage, self.separate_norms)

    def embed(
        self, tokens_BQ: torch.Tensor, position_ids_BQ: torch.Tensor, attributes_BQA: torch.Tensor | None, soft=None
    ) -> torch.Tensor:
        """[Q, B, D] (a shard of Q under sequence parallelism): what goes into the first layer."""
        return self.embedding(input_ids=tokens_BQ, position_ids=position_ids_BQ)

    def _apply(self, fn, recurse=True):
        """Experts' selection biases stay fp32 when the model is cast: rounded, they would choose other experts."""
        biases = {module: module.expert_bias for module in self.modules() if isinstance(module, TopKRouter)}
        super()._apply(fn, recurse)
        for router, bias in biases.items():
            if bias is not None:
                router.expert_bias = bias.to(router.expert_bias.device)
        return self

    def set_input_tensor(self, input_tensor) -> None:
        """Called by the pipeline schedule with the previous stage's output."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(
        self,
        tokens_BQ: torch.Tensor,
        position_ids_BQ: torch.Tensor,
        attributes_BQA: torch.Tensor | None,
        loss: Callable | None = None,
        terms: dict[str, RankTerm] | None = None,
        rows_N: torch.Tensor | None = None,
        **soft,
    ):
        """Hidden states [Q, B, D] on all but the last stage. On the last one: what `loss(ScoreView)` returns,
        or, without `loss`, this rank's logits in fp32: [N, V/tp] of `rows_N` (index q·B + b), else [B, Q, V/tp].

        Under context parallelism tokens and positions are this rank's, attributes are global (RankBatch). soft: of a
        model that knows more of its input than tokens (diffusion_gemma.py), for `embed`.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embed(tokens_BQ, position_ids_BQ, attributes_BQA, **soft)
            if self.fp8 and attributes_BQA is not None:
                hidden = without_padding(hidden, own_rows(attributes_BQA, self.config, self.pg_collection))
            if self.adapted and self.training and torch.is_grad_enabled() and not hidden.requires_grad:
                # else layers that are recomputed would see nothing to differentiate, and their adapters not learn
                hidden = hidden.requires_grad_().clone()
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=attributes_BQA,
            rotary_pos_emb=self._rotary(position_ids_BQ),
            padding_mask=self._padding(attributes_BQA),
        )
        if not self.post_process:
            return hidden
        if loss is not None:
            return loss(ScoreView(self, hidden, terms))
        if rows_N is not None:
            return self.logits(self.select_rows(hidden, rows_N))
        Q, B = tokens_BQ.shape[1], tokens_BQ.shape[0]
        rows = torch.arange(Q * B, device=tokens_BQ.device)
        return self.logits(self.select_rows(hidden, rows)).view(Q, B, -1).transpose(0, 1)

    def _rotary(self, position_ids_BQ: torch.Tensor) -> torch.Tensor:
        """[Q, B, 1, d] angles of this rank's positions; full-length under sequence parallelism, where
        attention sees the gathered sequence."""
        if self.inverse_frequencies.device != position_ids_BQ.device:  # once
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids_BQ.device)
        return angles(position_ids_BQ, self.inverse_frequencies)

    def _padding(self, attributes_BQA) -> torch.Tensor | None:
        """[B, Q] True at padding, which MoE routers must neither count nor balance; None if there is none."""
        if self.config.num_moe_experts is None or attributes_BQA is None:
            return None
        return (own_rows(attributes_BQA, self.config, self.pg_collection)[..., DOCUMENT] < 0).contiguous().t()

    def select_rows(self, hidden: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        """[N, D] rows (sequence-first index s·B + b), with the gradient reduced over tensor-parallel ranks."""
        tp = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=tp
            )
            return hidden.flatten(0, 1).index_select(0, rows_N)
        selected = hidden.flatten(0, 1).index_select(0, rows_N)
        return tensor_parallel.copy_to_tensor_model_parallel_region(selected, group=tp)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V/tp] fp32 logits of this rank's columns; padding columns hold the lowest float."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer.logits(hidden_ND, weight, self.true_vocab_size)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """GPTModel's keys: it stores no extra state for the output layer."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        if self.adapters_anew:
            leave_out(state)
        return state

    def load_state_dict(self, state_dict, strict=True, **options):
        if self.adapters_anew:
            state_dict = {key: value for key, value in self.state_dict().items() if is_adapter(key)} | state_dict
            self.adapters_anew = False
        return super().load_state_dict(state_dict, strict, **options)
