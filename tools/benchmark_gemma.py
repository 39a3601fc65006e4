"""`benchmark.py train --mode block_diffusion`: a training step of a small DiffusionGemma against the published recipe.

The other side is transformers' class used as that recipe does: the encoder reads the text, then the decoder denoises
all blocks of the response at once, under dense masks, twice where ours is self-conditioned (it always runs the first
pass), with the logits of every row; of the response one block is scored. Same weights, noise, blocks, coins and
optimizer. The text is one turn of `--seq-length` / `--block-size` blocks.
"""

import functools
from pathlib import Path

from benchmark_sides import Batches, data_flags, share, shared, start

BATCHES = 4


def write_model(options, folder: Path) -> None:
    """Random weights: two sliding layers, then a full one, and so on; the window is a quarter of the text."""
    import torch
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig

    torch.manual_seed(0)
    d = options.hidden // options.heads
    text = DiffusionGemmaTextConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        head_dim=d,
        global_head_dim=2 * d,
        num_global_key_value_heads=max(1, options.heads // 4),
        sliding_window=options.seq_length // 4,
        max_position_embeddings=2 * options.seq_length,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=options.ffn // 4,
        layer_types=[
            "full_attention" if i % 3 == 2 or i == options.layers - 1 else "sliding_attention"
            for i in range(options.layers)
        ],
        bos_token_id=2,
        pad_token_id=None,  # whose embedding the class keeps at zero, without a gradient
        eos_token_id=1,
    )
    vision = dict(model_type="gemma4_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    vision |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=64)
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=options.block_size)
    DiffusionGemmaForBlockDiffusion(config).save_pretrained(folder / "model")


def ours(options, folder: Path):
    args, tokenizer, model = start(
        f"""--dllm-mode block_diffusion --hf-model {folder}/model --init-from-hf --dllm-train-router
        --no-block-diffusion-eos-fill {data_flags(options, folder)}"""
    )
    from megatron_dllm.modes import get_mode
    from megatron_dllm.self_conditioning import first_pass_of_one_process

    batches = Batches(args, tokenizer, BATCHES)
    facts = lambda row: (row.sample.tokens_S, row.x_t_S, row.places_NK[0], row.self_conditioned)
    share([[facts(row) for row in rows] for rows in batches], folder)
    terms_of = functools.partial(get_mode("block_diffusion").loss, args=args)

    def loss(step):
        batch = batches[step]
        soft = first_pass_of_one_process(model, batch)
        inputs = batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA
        terms = model(*inputs, loss=terms_of, terms=batch.terms, soft=soft)
        return sum(term.weight * term.sum / batch.counts[term.counted] for term in terms)

    return model, loss, batches.figures


def usual(options, folder: Path):
    import torch
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.cache_utils import DynamicCache

    given = shared(folder)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision" not in name)
    S, K, W = options.seq_length, options.block_size, options.seq_length // 4
    place, block = torch.arange(S), torch.arange(S) // K
    context = block[None] < block[:, None]  # text of earlier blocks
    near = context & (place[None] >= block[:, None] * K - W + 1)
    own = block[:, None] == block[None]
    dense = lambda seen: torch.zeros(1, 1, S, 2 * S).masked_fill_(~seen, torch.finfo(torch.float32).min)
    masks = dict(
        full_attention=dense(torch.cat([context, own], 1)), sliding_attention=dense(torch.cat([near, own], 1))
    )
    batches = []
    for rows in given:
        text, noisy, places, coins = zip(*rows, strict=True)
        chosen = torch.zeros(len(rows), S, dtype=torch.bool)
        for b, own_places in enumerate(places):
            chosen[b, own_places[own_places >= 0]] = True
        batches.append((torch.stack(text), torch.stack(noisy), chosen, torch.tensor(coins)))
    entropy = torch.nn.functional.cross_entropy

    def capped(hidden):
        return 30.0 * torch.tanh(model.lm_head(hidden).float() / 30.0)

    def loss(step):
        text, noisy, chosen, coins = batches[step % BATCHES]
        positions = place[None].expand(len(text), -1)
        encoded = model.model.encoder(input_ids=text, cache=KeepsAll(config=None))
        decode = functools.partial(
            model.model.decoder,
            decoder_input_ids=noisy,
            cache=encoded.cache,
            decoder_attention_mask=masks,
            decoder_position_ids=positions,
        )
        with torch.no_grad():
            first = capped(decode().last_hidden_state)
        logits = capped(decode(self_conditioning_logits=first, self_conditioning_mask=coins).last_hidden_state)
        nll = entropy(logits.flatten(0, 1), text.flatten(), reduction="none")
        following = capped(encoded.last_hidden_state)[:, :-1]
        pairs = entropy(following.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
        return (nll * chosen.flatten()).sum() / chosen.sum() + pairs.mean()

    class KeepsAll(DynamicCache):
        """The masks say what sliding layers see: keys and values of all positions stay."""

        def __init__(self, config=None):
            super().__init__()

    return model, loss, {}
