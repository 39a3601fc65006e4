"""Qwen2 and Qwen2.5 (bias on query, key and value), and the diffusion models made of them: Dream, Fast-dLLM v2.

Dream and Fast-dLLM v2 predict a token from the position before it: a shift that belongs to sampling and training, not
to the weights (Dream's is --mdlm-shift-logits; Fast-dLLM v2's, within blocks, is not implemented). Sources: Dream 7B
(arXiv:2508.15487), Fast-dLLM v2 (arXiv:2509.26328) and their configuration classes.
"""

from megatron_dllm.models.entries import AllFull, Heads, Only, Rope
from megatron_dllm.models.family import Family
from megatron_dllm.models.llama import SIZES, decoder_weights, qkv_bias

_ENTRIES = (*SIZES, Heads(), Rope(), AllFull(), Only("use_sliding_window", False))
_OLD_ENTRIES = (*SIZES, Heads(size=None), Rope(old_notation=True, scalings=()), Only("use_sliding_window", False))
_HARMLESS = ("sliding_window", "max_window_layers")
_WEIGHTS = (decoder_weights() | qkv_bias(),)

QWEN2 = Family(
    name="qwen2",
    types=("qwen2", "a2d-qwen2"),
    architecture="Qwen2ForCausalLM",
    transformers_config="Qwen2Config",
    entries=_ENTRIES,
    weights=_WEIGHTS,
    arguments=dict(add_qkv_bias=True),
    harmless=_HARMLESS,
)
DREAM = Family(
    name="dream",
    types=("Dream",),
    architecture="DreamModel",
    entries=(*_OLD_ENTRIES, Only("use_mrope", False, written=False)),
    weights=_WEIGHTS,
    arguments=dict(add_qkv_bias=True),
    harmless=_HARMLESS,
    stock="qwen2",
    mode="mdlm",
    mask_token_id=151666,
    suggested=dict(mdlm_shift_logits=True),
)
FAST_DLLM_V2 = Family(
    name="fast_dllm_v2",
    types=("Fast_dLLM_Qwen",),
    architecture="Fast_dLLM_QwenForCausalLM",
    entries=_OLD_ENTRIES,
    weights=_WEIGHTS,
    arguments=dict(add_qkv_bias=True),
    harmless=(*_HARMLESS, "bd_size", "layer_types"),
    stock="qwen2",
    mode="bd3lm",
    mask_token_id=151665,
)
