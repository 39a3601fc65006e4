"""A draft's folder as a network, in plain torch and by the names in its files: what `check` compares with.

transformers has no class for it. Nothing here is shared with models/draft.py or the family's table but the reading of
safetensors, so that a mistake there shows.
"""

import torch
import torch.nn.functional as F


def hidden_states(
    weights: dict[str, torch.Tensor],
    config: dict,
    features_BSF: torch.Tensor,
    embeddings_BQD: torch.Tensor,
    position_ids_BT: torch.Tensor,
    allowed_BQT: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, Q, D] of a draft (DFlashDraftModel), before the target's head.

    weights: a folder's tensors; config: its config.json. T = S + Q: positions and keys of the context, then of the
    blocks. allowed_BQT bool: which keys a query may see; None: all.
    """
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

    settings, S = Qwen3Config(**config), features_BSF.shape[1]
    cosine, sine = (x[:, None] for x in Qwen3RotaryEmbedding(settings)(features_BSF, position_ids_BT))
    mask = None if allowed_BQT is None else allowed_BQT[:, None]
    linear = lambda x, name: F.linear(x, weights[name + ".weight"])
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], settings.rms_norm_eps)
    heads = lambda x, name: linear(x, name).unflatten(-1, (-1, settings.head_dim)).transpose(1, 2)
    rotate = lambda x, start: x * cosine[:, :, start:] + rotate_half(x) * sine[:, :, start:]

    context, x = norm(linear(features_BSF, "fc"), "hidden_norm"), embeddings_BQD
    for number in range(settings.num_hidden_layers):
        layer = f"layers.{number}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        block = norm(x, layer + "input_layernorm")
        both = torch.cat([context, block], 1)
        query = rotate(norm(heads(block, attention + "q_proj"), attention + "q_norm"), S)
        key = rotate(norm(heads(both, attention + "k_proj"), attention + "k_norm"), 0)
        value = heads(both, attention + "v_proj")
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        x = x + linear(seen.transpose(1, 2).flatten(2), attention + "o_proj")
        block = norm(x, layer + "post_attention_layernorm")
        x = x + linear(F.silu(linear(block, mlp + "gate_proj")) * linear(block, mlp + "up_proj"), mlp + "down_proj")
    return norm(x, "norm")
