"""DiffusionGemma's sampler against transformers' `generate` with the same random numbers, in float64 (in fp32 rounding
decides what is drawn; see tests/gemma.py)."""

import contextlib
import functools
from argparse import Namespace

import pytest
import torch

from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.diffusion_gemma import DenoisedRow
from megatron_dllm.generation.network import Network
from megatron_dllm.generation.prompts import BLANK, Canvas
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.generation.selection import RowDraws, draw
from megatron_dllm.modes import block_diffusion
from tests import gemma
from tests.gemma import VOCABULARY, WINDOW, K
from tests.parity.test_diffusion_gemma import ours

pytestmark = pytest.mark.usefixtures("parallel_state")

EOS, SEED = 1, 3
# shorter and longer than the window of 8
PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 71, 72, 73], list(range(3, 3 + WINDOW)), list(range(20, 33)), [7] * 29]
NEW = 4 * K
RULES = {
    "published": dict(),
    "many accepted": dict(entropy_bound=4.0),
    "stops early": dict(entropy_bound=2.0, confidence_threshold=1.5),
    "stops when two steps agree": dict(entropy_bound=8.0, confidence_threshold=3.0, stability_threshold=2),
    "stops at once": dict(confidence_threshold=9.0, stability_threshold=0),
    "hot": dict(t_min=0.9, t_max=3.0, entropy_bound=6.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return gemma.make_folder(str(tmp_path_factory.mktemp("models") / "hf"))


@pytest.fixture(scope="module")
def theirs(folder):
    model = gemma.theirs(folder)
    # its own head casts to fp32; `generate` calls what is set here
    model.forward = lambda **inputs: Namespace(
        logits=gemma.capped(model, model.model(**inputs).last_hidden_state)
    )
    return model


@contextlib.contextmanager
def drawing_from(draws: RowDraws):
    """transformers' sampler takes its random numbers from ours: of a canvas and every step [K] for the noise, and of
    every step [K] for the tokens."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

    originals = EntropyBoundSampler.initialize_canvas, torch.multinomial

    def noise(self, batch_size, device):
        return (draws.uniform("noise", self.canvas_length) * self.vocab_size).long()[None]

    EntropyBoundSampler.initialize_canvas = noise
    torch.multinomial = lambda p, num_samples: draw(p, draws.uniform("tokens", len(p)))[:, None]
    try:
        yield
    finally:
        EntropyBoundSampler.initialize_canvas, torch.multinomial = originals


def their_answer(model, prompt, new, eos=None, steps=6, **rule) -> tuple[list[int], int]:
    """(ids, denoising steps)"""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        DiffusionGemmaGenerationConfig,
        EntropyBoundSamplerConfig,
    )

    rule = dict(t_min=0.4, t_max=0.8, entropy_bound=0.1, stability_threshold=1, confidence_threshold=0.005) | rule
    bound = EntropyBoundSamplerConfig(entropy_bound=rule.pop("entropy_bound"))
    model.generation_config = DiffusionGemmaGenerationConfig()  # the folder's has EOS
    config = DiffusionGemmaGenerationConfig(
        max_new_tokens=new, max_denoising_steps=steps, sampler_config=bound, eos_token_id=eos, pad_token_id=eos, **rule
    )
    with drawing_from(RowDraws(SEED, [*prompt, *[BLANK] * new])):
        out = model.generate(torch.tensor([prompt]), generation_config=config)
    ids = out.sequences[0, len(prompt) :]
    valid = int((ids != eos).sum()) if eos is not None else len(ids)
    return ids[:new].tolist(), round(valid / float(out.tokens_per_forward)) if valid else None


def our_rows(model, prompts, new, steps=6, conditions=0.5, vocabulary=VOCABULARY, positions=256, **options):
    """The finished rows of one batch."""
    args = Namespace(
        dllm_block_size=K,
        block_diffusion_self_conditioning=conditions,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
    )
    config = GenerationConfig(max_new_tokens=new, seed=SEED, steps_per_block=steps, **options)
    decoding = Decoding(config, block_diffusion.reverse, BLANK, EOS, vocabulary, args)
    rows = [DenoisedRow(Canvas([*prompt, *[BLANK] * new], len(prompt)), decoding) for prompt in prompts]
    with torch.inference_mode():
        run(rows, Network(model, vocabulary, full=False))
    return rows


def answers(rows):
    return [row.tokens[row.start :].tolist() for row in rows]


@functools.cache
def our_model(folder):
    return ours(folder, rule=block_diffusion.visible)


@pytest.mark.parametrize("name", RULES)
def test_generate_of_transformers_token_by_token(folder, theirs, name):
    """Also: a batch of unequal prompts is each of them alone, and the cache changes nothing."""
    rule = RULES[name]
    with gemma.float64():
        model = our_model(folder)
        expected = [their_answer(theirs, prompt, NEW, **rule) for prompt in PROMPTS]
        together = our_rows(model, PROMPTS, NEW, **rule)
        alone = [our_rows(model, [prompt], NEW, **rule)[0] for prompt in PROMPTS]
        uncached = our_rows(model, PROMPTS, NEW, cache="none", **rule)
    for (ids, steps), *rows in zip(expected, together, alone, uncached, strict=True):
        assert [row.tokens[row.start :].tolist() for row in rows] == [ids] * 3
        assert [row.steps for row in rows] == [row.forwards for row in rows] == [steps] * 3
    counts = {row.steps for row in together}
    if name in ("published", "many accepted", "hot"):
        assert counts == {4 * 6}
    elif name == "stops at once":
        assert counts == {4}
    else:
        assert max(counts) < 4 * 6 and len(counts) > 1
    assert len(set(sum(answers(together), []))) > 20
