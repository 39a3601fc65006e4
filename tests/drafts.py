"""A tiny DFlash draft as a Hugging Face folder, names and shapes written out, and a batch for it.

Nothing here depends on our tables.
"""

import json
import os

import torch
from safetensors.torch import save_file

from megatron_dllm.models.draft import lay_out
from tests.hf_models import write_tokenizer

WIDTH, LAYERS, HEADS, GROUPS, SIZE, FFN, TARGETS, BLOCK = 40, 3, 4, 2, 16, 48, [1, 3], 4
CONFIG = dict(
    architectures=["DFlashDraftModel"],
    attention_bias=False,
    attention_dropout=0.0,
    auto_map={"AutoModel": "dflash.DFlashDraftModel"},
    block_size=BLOCK,
    dflash_config=dict(mask_token_id=2, target_layer_ids=TARGETS),
    dtype="float32",
    eos_token_id=1,
    head_dim=SIZE,
    hidden_act="silu",
    hidden_size=WIDTH,
    initializer_range=0.02,
    intermediate_size=FFN,
    layer_types=["full_attention"] * LAYERS,
    max_position_embeddings=128,
    max_window_layers=LAYERS,
    model_type="qwen3",
    num_attention_heads=HEADS,
    num_hidden_layers=LAYERS,
    num_key_value_heads=GROUPS,
    num_target_layers=6,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=5000,
    sliding_window=None,
    tie_word_embeddings=False,
    use_cache=True,
    use_sliding_window=False,
    vocab_size=91,
)


def tensors(dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Wide random weights: at the usual 0.02 a wrong position hides below any tolerance."""
    shapes = {"fc": (WIDTH, len(TARGETS) * WIDTH), "hidden_norm": (WIDTH,), "norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (WIDTH,),
                "self_attn.q_proj": (HEADS * SIZE, WIDTH),
                "self_attn.k_proj": (GROUPS * SIZE, WIDTH),
                "self_attn.v_proj": (GROUPS * SIZE, WIDTH),
                "self_attn.o_proj": (WIDTH, HEADS * SIZE),
                "self_attn.q_norm": (SIZE,),
                "self_attn.k_norm": (SIZE,),
                "post_attention_layernorm": (WIDTH,),
                "mlp.gate_proj": (FFN, WIDTH),
                "mlp.up_proj": (FFN, WIDTH),
                "mlp.down_proj": (WIDTH, FFN),
            }.items()
        }
    draw = torch.Generator().manual_seed(7)
    values = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {f"{n}.weight": (1 + 0.3 * x if x.dim() == 1 else 0.2 * x).to(dtype) for n, x in values.items()}


def make(folder, weights: dict | None = None, tokenizer: bool = True, **changes) -> str:
    """Write a draft into `folder`/draft (changes: of its config.json); returns the path."""
    path = os.path.join(folder, "draft")
    os.makedirs(path)
    save_file(tensors() if weights is None else weights, os.path.join(path, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(CONFIG | changes, file)
    if tokenizer:
        write_tokenizer(path, CONFIG["vocab_size"])
    return path


class Batch:
    """Two rows of S = 12 context tokens (two documents; one and padding) and N = 3 blocks, one of which is dropped."""

    def __init__(self, width: int = WIDTH, targets: int = len(TARGETS), seed: int = 3):
        self.positions_BS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [*range(10), 0, 1]])
        self.documents_BS = torch.tensor([[0] * 5 + [1] * 7, [0] * 10 + [-1] * 2])
        self.anchors_BN = torch.tensor([[1, 5, 9], [4, 6, 0]])
        kept_BN = torch.tensor([[True, True, True], [True, True, False]])
        self.position_ids_BT, self.attributes_BTA = lay_out(
            self.anchors_BN, BLOCK, self.positions_BS, self.documents_BS, kept_BN
        )
        draw = torch.Generator().manual_seed(seed)
        B, S = self.positions_BS.shape
        Q = self.anchors_BN.shape[1] * BLOCK
        self.features_BSF = torch.randn(B, S, targets * width, generator=draw)
        self.embeddings_BQD = torch.randn(B, Q, width, generator=draw)
        self.direction_BQD = torch.randn(B, Q, width, generator=draw)  # the loss is the output's projection on it
        self.allowed_BQT = torch.zeros(B, Q, S + Q, dtype=torch.bool)
        for b in range(B):
            for q in range(Q):
                block = q // BLOCK
                anchor = int(self.anchors_BN[b, block])
                for k in range(S):
                    same = self.documents_BS[b, k] == self.documents_BS[b, anchor]
                    self.allowed_BQT[b, q, k] = bool(kept_BN[b, block]) and same and k < anchor
                for k in range(Q):
                    self.allowed_BQT[b, q, S + k] = k // BLOCK == block

    def through(self, model, features_BSF: torch.Tensor | None = None) -> torch.Tensor:
        """[B, Q, D] of our draft in one process."""
        features = self.features_BSF if features_BSF is None else features_BSF
        inputs = (x.transpose(0, 1) for x in (features, self.embeddings_BQD))
        return model(*inputs, self.position_ids_BT, self.attributes_BTA).transpose(0, 1)
