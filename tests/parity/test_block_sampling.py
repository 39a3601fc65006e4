"""Models trained in blocks write the tokens that a plain loop over the transformers model writes."""

import pytest
import torch

from megatron_dllm.data.tokenizer import build_tokenizer
from megatron_dllm.generation import GenerationConfig, generate
from megatron_dllm.training import model_provider
from tests.hf_models import make
from tests.parity.loading import command

pytestmark = pytest.mark.usefixtures("parallel_state")

MASK, BLOCK, NEW, STEPS = 2, 4, 10, 6
PROMPTS = [[10, 20, 30], [40, 50, 60, 70], [11, 12, 13, 14, 15, 16, 17], [80]]
MODELS = {"bd3lm": "llada2", "hybrid": "nemotron"}


def plain(model, mode: str, prompt: list[int], origin: int) -> tuple[list[int], int]:
    """(the answer, how many steps it took), one sequence, one token after the other in every decision."""
    tokens = prompt + [MASK] * NEW
    edges = [place for place in range(len(tokens)) if place > len(prompt) and (place - origin) % BLOCK == 0]
    blocks = list(zip([len(prompt), *edges], [*edges, len(tokens)], strict=True))
    share = -(-STEPS // len(blocks))
    taken = 0
    for first, last in blocks:
        begin = next(place for place in range(first, -1, -1) if (place - origin) % BLOCK == 0)
        block_of = lambda place: (place - origin) // BLOCK
        masked = [place for place in range(first, last) if tokens[place] == MASK]
        rounds = min(share, len(masked))
        for i in range(rounds):
            visible = torch.full((1, 1, last, last), torch.finfo(torch.float32).min)
            for q in range(last):
                for k in range(last):
                    if q >= begin or (k < begin and (block_of(k) <= block_of(q) if mode == "bd3lm" else k <= q)):
                        visible[0, 0, q, k] = 0
            logits = model(input_ids=torch.tensor([tokens[:last]]), attention_mask=visible, use_cache=False).logits[0]
            best = {}
            for place in masked:
                probabilities = logits[place].double().softmax(-1)
                probabilities[MASK] = 0  # never written, but trust is probability among all tokens
                best[place] = (probabilities.max().item(), int(probabilities.argmax()))
            count = len(masked) // (rounds - i) + (len(masked) % (rounds - i) > 0)
            for place in sorted(masked, key=lambda place: -best[place][0])[:count]:
                tokens[place] = best[place][1]
                masked.remove(place)
            taken += 1
    return tokens[len(prompt) :], taken


@pytest.mark.parametrize(("mode", "origin"), [("bd3lm", "sequence"), ("hybrid", "sequence"), ("hybrid", "response")])
@torch.no_grad()
def test_the_plain_loop(tmp_path, mode, origin):
    path, theirs = make(MODELS[mode], tmp_path)
    flags = ["--dllm-block-size", str(BLOCK), "--dllm-block-origin", origin]
    with command("--dllm-mode", mode, "--hf-model", path, "--init-from-hf", *flags) as args:
        model = model_provider().eval()
        tokenizer = build_tokenizer(args)
        config = GenerationConfig(max_new_tokens=NEW, steps=STEPS)
        together = generate(model, tokenizer, PROMPTS, config)
        alone = [generate(model, tokenizer, [prompt], config)[0] for prompt in PROMPTS]
    for prompt, one, several in zip(PROMPTS, alone, together, strict=True):
        expected, steps = plain(theirs, mode, prompt, len(prompt) if origin == "response" else 0)
        assert several.ids == one.ids == expected and several.steps == steps
        assert MASK not in several.ids and len(several.ids) == NEW
