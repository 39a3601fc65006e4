"""A tiny DiffusionGemma with wide random weights, and what transformers computes of it.

Judged in float64: in fp32 this network amplifies rounding so much that transformers differs from itself by 4e-5 between
two ways of calling it.
"""

import contextlib
import functools
from argparse import Namespace

import torch
import torch.nn.functional as F
import transformers

from megatron_dllm.modes.base import ANCHOR, BLOCK, CLEAN, DOCUMENT, NOISY, POSITION, STREAM
from tests.hf_models import write_tokenizer

VOCABULARY, K, WINDOW, SOFTCAP = 91, 8, 8, 30.0
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    sliding_window=WINDOW,
    max_position_embeddings=256,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=12,
    layer_types=LAYERS,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
VISION = dict(
    model_type="gemma4_vision",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    patch_size=4,
    position_embedding_size=64,
    pooling_kernel_size=2,
)


def make_folder(path: str, vision: bool = True, **changes) -> str:
    """A Hugging Face folder as transformers writes it."""
    text = transformers.DiffusionGemmaTextConfig(**(TEXT | changes))
    parts = dict(text_config=text, vision_config=VISION if vision else None)
    config = transformers.DiffusionGemmaConfig(**parts, canvas_length=K)
    model = transformers.DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if parameter.dim() == 1 else 0.2 * drawn)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of encoder and decoder different ones
                buffer.copy_(0.6 + 0.8 * torch.rand(1, generator=generator))
    model.tie_weights()
    model.save_pretrained(path)
    write_tokenizer(path, VOCABULARY)
    return path


@contextlib.contextmanager
def float64():
    """What casts to fp32 casts to float64, in transformers' code and in ours."""
    single, default = torch.Tensor.float, torch.get_default_dtype()
    softmaxes = [(owner, owner.softmax) for owner in (F, torch, torch.Tensor)]

    def widened(softmax):
        wide = lambda dtype: torch.float64 if dtype == torch.float32 else dtype
        return lambda x, dim=-1, _stacklevel=3, dtype=None: softmax(x, dim, dtype=wide(dtype))

    torch.Tensor.float = torch.Tensor.double
    for owner, softmax in softmaxes:
        owner.softmax = widened(softmax)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.Tensor.float = single
        for owner, softmax in softmaxes:
            owner.softmax = softmax
        torch.set_default_dtype(default)


def theirs(path: str) -> torch.nn.Module:
    """In float64; rotations and the embedding's scale as rounded to fp32, as they are used."""
    load = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained
    model = load(path, dtype=torch.float32, attn_implementation="eager").eval().double()
    model.set_experts_implementation("eager")  # the grouped one refuses float64
    return model


def capped(model, hidden: torch.Tensor) -> torch.Tensor:
    return SOFTCAP * torch.tanh(model.lm_head(hidden) / SOFTCAP)


def decode(model, clean_1S, canvas_1K, earlier=None) -> torch.Tensor:
    """[1, K, V] logits of a canvas after clean tokens, by the released code's own masks and cache. (Its StaticCache
    gives other numbers beyond the window: a fault there.)"""
    out = model.model(input_ids=clean_1S, decoder_input_ids=canvas_1K, self_conditioning_logits=earlier)
    return capped(model, out.last_hidden_state)


def encode(model, clean_1S) -> torch.Tensor:
    """[1, S, V] next-token logits of the encoder."""
    return capped(model, model.model.encoder(input_ids=clean_1S).last_hidden_state)


def rule(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Of full layers, in the plainest words."""
    clean_q, clean_k = query[..., STREAM] == CLEAN, key[..., STREAM] == CLEAN
    to_clean = torch.where(clean_q, key[..., POSITION] <= query[..., POSITION], key[..., BLOCK] < query[..., BLOCK])
    own = ~clean_q & ~clean_k & (key[..., BLOCK] == query[..., BLOCK])
    return (query[..., DOCUMENT] == key[..., DOCUMENT]) & ((clean_k & to_clean) | own)


class Batch(Namespace):
    """Rows of [clean | canvas of one block]: tokens_BQ, position_ids_BQ, attributes_BQA; of row b, clean_B[b] tokens
    are there, the response begins at prompts_B[b], and the canvas stands for block chosen_B[b] of it, of sizes_B[b]
    tokens."""


def batch(length: int = 40) -> Batch:
    """Prompts shorter and longer than the window, padding, the last block of one row cut short."""
    g = torch.Generator().manual_seed(1)
    prompts, there, chosen = [9, 13, 17, 11], [40, 38, 40, 31], [1, 0, 2, 2]
    B, Q = len(prompts), length + K
    tokens_BQ = torch.randint(3, VOCABULARY, (B, Q), generator=g)
    positions_BQ = torch.zeros(B, Q, dtype=torch.int64)
    attributes_BQA = torch.zeros(B, Q, ANCHOR + 1, dtype=torch.int32)
    attributes_BQA[..., DOCUMENT] = -1
    attributes_BQA[:, :length, STREAM], attributes_BQA[:, length:, STREAM] = CLEAN, NOISY
    sizes = []
    for b, (prompt, end, block) in enumerate(zip(prompts, there, chosen, strict=True)):
        start = prompt + block * K
        size = min(K, end - start)
        sizes.append(size)
        place = torch.arange(end)
        positions_BQ[b, :end] = place
        positions_BQ[b, length : length + size] = torch.arange(start, start + size)
        row = attributes_BQA[b]
        row[:end, BLOCK] = torch.where(place < prompt, 0, (place - prompt) // K + 1).int()
        row[length:, BLOCK] = block + 1
        row[:end, ANCHOR], row[length:, ANCHOR] = place.int(), start
        row[:end, DOCUMENT] = row[length : length + size, DOCUMENT] = 0
        row[:, POSITION] = positions_BQ[b].int()
    return Batch(
        length=length,
        tokens_BQ=tokens_BQ,
        position_ids_BQ=positions_BQ,
        attributes_BQA=attributes_BQA,
        prompts_B=prompts,
        clean_B=there,
        chosen_B=chosen,
        sizes_B=sizes,
        known_B=torch.tensor([True, False, True, True]),
    )


def expected(model, data: Batch, conditioned: bool) -> tuple[list, list, torch.Tensor]:
    """(canvas logits, encoder logits, loss) of transformers, row by row: every row alone, without padding, only the
    clean tokens before its block. loss: cross entropy of a canvas's tokens against the clean ones, and of the encoder's
    next tokens, each a mean."""
    canvases, encoders, diffusion, causal = [], [], [], []
    for b in range(len(data.prompts_B)):
        start = data.prompts_B[b] + data.chosen_B[b] * K
        clean_1S = data.tokens_BQ[b : b + 1, : data.clean_B[b]]
        canvas_1K = data.tokens_BQ[b : b + 1, data.length : data.length + data.sizes_B[b]]
        run = functools.partial(decode, model, clean_1S[:, :start], canvas_1K)
        earlier = None
        if conditioned and data.known_B[b]:
            with torch.no_grad():
                earlier = run()
        canvases.append(run(earlier=earlier)[0])
        encoders.append(encode(model, clean_1S)[0])
        target = clean_1S[0, start : start + data.sizes_B[b]]
        diffusion.append(F.cross_entropy(canvases[-1], target, reduction="none"))
        causal.append(F.cross_entropy(encoders[-1][:-1], clean_1S[0, 1:], reduction="none"))
    return canvases, encoders, torch.cat(diffusion).mean() + torch.cat(causal).mean()
