"""Nemotron-Labs-Diffusion 3B, 8B and 14B, and Ministral 3, of which they are made: a Llama with yarn.

One head serves both objectives (diffusion_head). Queries are scaled up with their position (llama_4_scaling_beta) from
`original_max_position_embeddings` on; that is not implemented, and longer sequences are refused.
"""

from dataclasses import dataclass

from megatron_dllm.models.entries import Heads, Only, Rope
from megatron_dllm.models.family import Family
from megatron_dllm.models.llama import SIZES, decoder_weights


@dataclass
class _ScaledQueries(Rope):
    """Their code computes the scale of queries in any case, from two keys that other models may not have."""

    def write(self, args):
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            if key not in (args.dllm_rope_scaling or {}):
                raise ValueError(f"--dllm-rope-scaling does not say {key}, which their code needs")
        return super().write(args)


_ENTRIES = (*SIZES, Heads(), _ScaledQueries(), Only("sliding_window", None))

MINISTRAL3 = Family(
    name="ministral3",
    types=("ministral3",),
    architecture="Ministral3ForCausalLM",
    transformers_config="Ministral3Config",
    entries=_ENTRIES,
    weights=(decoder_weights(),),
)
NEMOTRON = Family(
    name="nemotron",
    types=("nemotron_labs_diffusion",),
    architecture="NemotronLabsDiffusionModel",
    entries=(*_ENTRIES, Only("attention_bias", False), Only("mlp_bias", False)),
    weights=(decoder_weights("encoder.", head="diffusion_head.weight"),),
    stock="ministral3",
    mode="hybrid",
    mask_token_id=100,
    suggested=dict(dllm_block_size=32, diffusion_loss_weight=0.3),
    harmless=tuple(
        "dlm_paradigm block_size dlm_loss_weight ar_loss_weight dp_varying_mask_ratio".split()
    ),
)
