"""Every sampler writes what its published loop writes over the transformers model: with and without a cache, a batch of
unequal prompts and each alone; and it takes as many forwards as the loop with everything useless left out."""

import functools

import pytest
import torch

from megatron_dllm.data.tokenizer import build_tokenizer
from megatron_dllm.generation import GenerationConfig, generate
from megatron_dllm.generation.prompts import BLANK
from megatron_dllm.generation.selection import RowDraws
from megatron_dllm.training import model_provider
from tests.hf_models import make
from tests.parity import plain_samplers as plain
from tests.parity.loading import command
from tests.parity.plain_samplers import MASK

pytestmark = pytest.mark.usefixtures("parallel_state")

BLOCK, NEW = 4, 10
PROMPTS = [[10, 20, 30], [40, 50, 60, 70], [11, 12, 13, 14, 15, 16, 17], [80]]
BLOCKS = ["--dllm-block-size", str(BLOCK)]


@functools.cache
def oracle(name, folder):
    return make(name, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def canvases(model, prompt, steps, t_min=0.4, t_max=0.8, bound=0.1, stable=1, confident=0.005):
    draws = RowDraws(GenerationConfig.seed, [*prompt, *[BLANK] * NEW])
    return plain.canvases(model, prompt, NEW, BLOCK, steps, t_min, t_max, bound, stable, confident, draws)


CASES = {
    "llada": (
        ("llada", "mdlm", [], dict(gen_block_length=BLOCK, steps_per_block=3)),
        lambda model, prompt: plain.llada(model, prompt, NEW, BLOCK, 3),
    ),
    "llada threshold": (
        ("llada", "mdlm", [], dict(gen_block_length=6, steps_per_block=6, threshold=0.2)),
        lambda model, prompt: plain.llada(model, prompt, NEW, 6, 6, 0.2),
    ),
    **{
        f"fast_dllm {cache}": (
            ("llada", "mdlm", [], dict(gen_block_length=BLOCK, threshold=0.2, cache=cache)),
            lambda model, prompt, cache=cache: plain.fast_dllm(model, prompt, NEW, BLOCK, 0.2, cache == "dual"),
        )
        for cache in ("prefix", "dual")
    },
    **{
        f"dream {algorithm}": (
            ("dream", "mdlm", [], dict(steps=steps, algorithm=algorithm)),
            lambda model, prompt, steps=steps, algorithm=algorithm: plain.dream(model, prompt, NEW, steps, algorithm),
        )
        for algorithm, steps in (("maskgit_plus", 6), ("topk_margin", 7), ("entropy", 40))
    },
    "llada2": (
        ("llada2", "bd3lm", BLOCKS, dict(steps_per_block=3)),
        lambda model, prompt: plain.llada2(model, prompt, NEW, BLOCK, 3),
    ),
    "llada2 threshold": (
        ("llada2", "bd3lm", BLOCKS, dict(threshold=0.15)),
        lambda model, prompt: plain.llada2(model, prompt, NEW, BLOCK, BLOCK, 0.15),
    ),
    "llada2.1": (
        ("llada2", "bd3lm", BLOCKS, dict(threshold=0.3, editing_threshold=0.25)),
        lambda model, prompt: plain.llada2(model, prompt, NEW, BLOCK, BLOCK, 0.3, editing=0.25),
    ),
    "llada2 of hybrid": (
        ("nemotron", "hybrid", BLOCKS, dict(sampler="llada2", steps_per_block=2)),
        lambda model, prompt: plain.llada2(model, prompt, NEW, BLOCK, 2, causal=True),
    ),
    "llada2 of hybrid from the answer": (
        ("nemotron", "hybrid", [*BLOCKS, "--dllm-block-origin", "response"], dict(sampler="llada2")),
        lambda model, prompt: plain.llada2(model, prompt, NEW, BLOCK, BLOCK, causal=True, origin=len(prompt)),
    ),
    "nemotron": (
        ("nemotron", "hybrid", BLOCKS, {}),
        lambda model, prompt: plain.nemotron(model, prompt, NEW, BLOCK),
    ),
    "nemotron threshold": (
        ("nemotron", "hybrid", BLOCKS, dict(threshold=0.2, gen_block_length=6)),
        lambda model, prompt: plain.nemotron(model, prompt, NEW, 6, 0.2),
    ),
    "ar": (("nemotron", "hybrid", BLOCKS, dict(mode="ar")), lambda model, prompt: plain.ar(model, prompt, NEW)),
    "speculative": (
        ("nemotron", "hybrid", BLOCKS, dict(mode="speculative")),
        lambda model, prompt: (plain.ar(model, prompt, NEW)[0], None),
    ),
    "idlm": (("nemotron", "idlm", BLOCKS, {}), lambda model, prompt: (plain.ar(model, prompt, NEW)[0], None)),
    "idlm of single tokens": (
        ("nemotron", "idlm", [], {}),
        lambda model, prompt: (plain.ar(model, prompt, NEW)[0], None),
    ),
    "diffusion_gemma": (
        ("qwen3", "block_diffusion", BLOCKS, dict(steps_per_block=5)),
        lambda model, prompt: canvases(model, prompt, 5),
    ),
    "diffusion_gemma with its own rule": (
        (
            "qwen3 tied",
            "block_diffusion",
            BLOCKS,
            dict(steps=24, entropy_bound=3.0, confidence_threshold=2.0, t_min=0.1),
        ),
        lambda model, prompt: canvases(model, prompt, 8, 0.1, 0.8, 3.0, 1, 2.0),
    ),
    "idlm ar": (("nemotron", "idlm", BLOCKS, dict(mode="ar")), lambda model, prompt: plain.ar(model, prompt, NEW)),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_published_loop(folder, case):
    (name, mode, flags, options), loop = CASES[case]
    path, theirs = oracle(name, folder)
    with command("--dllm-mode", mode, "--hf-model", path, "--init-from-hf", *flags) as args:
        model = model_provider().eval()
        tokenizer = build_tokenizer(args)
        config = GenerationConfig(max_new_tokens=NEW, **options)
        together = generate(model, tokenizer, PROMPTS, config)
        alone = [generate(model, tokenizer, [prompt], config)[0] for prompt in PROMPTS]
        uncached = together
        if mode != "mdlm":
            uncached = generate(
                model, tokenizer, PROMPTS, GenerationConfig(max_new_tokens=NEW, cache="none", **options)
            )
    for prompt, several, one, recomputed in zip(PROMPTS, together, alone, uncached, strict=True):
        expected, forwards = loop(theirs, prompt)
        assert several.ids == one.ids == recomputed.ids == expected
        assert several.forwards == one.forwards == recomputed.forwards == (forwards or several.forwards)
        assert (MASK not in several.ids or mode == "block_diffusion") and len(several.ids) == NEW
