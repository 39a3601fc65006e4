"""The model in this very process: a process group of one, small configurations, batches made by hand."""

import contextlib
import os

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_dllm.models.dlm import DiffusionLM
from megatron_dllm.modes import mdlm
from megatron_dllm.modes.base import BLOCK, DOCUMENT, NUM_ATTRIBUTES, POSITION, STREAM


@contextlib.contextmanager
def one_process():
    """Megatron's parallel state of a single process, for the duration of the block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def once():
    """What runs "once per process" (a conversion, a loaded model), and may run again afterwards."""
    from megatron.training.training import destroy_global_state

    environment = dict(os.environ)
    try:
        yield
    finally:
        destroy_global_state()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


class OneRank:
    """What `WeightedNLL` and `RuleAttention` ask of a group when there is only one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def small_config(**changes) -> TransformerConfig:
    """2 layers; head size times heads is not the width, and heads share keys, so that a mix-up shows."""
    values = dict(
        num_layers=2,
        hidden_size=40,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
    )
    return TransformerConfig(**(values | changes))


MOE = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
)


def small_model(config=None, true_vocab_size: int = 61, padded_vocab_size: int = 64, **options) -> DiffusionLM:
    return DiffusionLM(
        config or small_config(),
        rule=options.pop("rule", mdlm.visible),
        vocab_size=padded_vocab_size,
        true_vocab_size=true_vocab_size,
        max_sequence_length=64,
        **options,
    )


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Wide weights: at the usual 0.02 a wrong mask or position hides below any tolerance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if parameter.dim() == 1 else 0.2 * drawn)


def attributes_of(documents_BQ: torch.Tensor, positions_BQ: torch.Tensor) -> torch.Tensor:
    """One noisy stream with the given documents (-1: padding)."""
    attributes_BQA = torch.zeros(*documents_BQ.shape, NUM_ATTRIBUTES, dtype=torch.int32)
    attributes_BQA[..., STREAM] = 0
    attributes_BQA[..., BLOCK] = 0
    attributes_BQA[..., POSITION] = positions_BQ
    attributes_BQA[..., DOCUMENT] = documents_BQ
    return attributes_BQA


def packed(rows: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """documents_BQ, positions_BQ of rows that pack documents of the given lengths and pad the rest."""
    documents, positions = torch.full((len(rows), length), -1), torch.zeros(len(rows), length, dtype=torch.int64)
    for b, lengths in enumerate(rows):
        start = 0
        for document, n in enumerate(lengths):
            documents[b, start : start + n] = document
            positions[b, start : start + n] = torch.arange(n)
            start += n
    return documents, positions
