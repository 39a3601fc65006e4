"""DiffusionGemma's sampler against transformers' `generate` with the same random numbers, in float64 (in fp32 rounding
decides what is drawn; see tests/gemma.py)."""

import contextlib
import functools
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.diffusion_gemma import DenoisedRow
from megatron_dllm.generation.network import Network
from megatron_dllm.generation.prompts import BLANK, Canvas
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.generation.selection import RowDraws, draw
from megatron_dllm.models.gemma_layers import rms
from megatron_dllm.modes import block_diffusion
from tests import gemma
from tests.gemma import VOCABULARY, WINDOW, K
from tests.parity.test_diffusion_gemma import ours

pytestmark = pytest.mark.usefixtures("parallel_state")

EOS, SEED = 1, 3
# shorter and longer than the window of 8
PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 71, 72, 73], list(range(3, 3 + WINDOW)), list(range(20, 33)), [7] * 29]
NEW = 4 * K
# of which network, the rule, and whether canvases end before their last step
RULES = {
    "published": ("folder", dict(), False),
    "many accepted": ("folder", dict(entropy_bound=4.0), False),
    "hot": ("folder", dict(t_min=0.9, t_max=3.0, entropy_bound=6.0), False),
    "ends when two steps agree": ("calm", dict(entropy_bound=2.0, confidence_threshold=0.3, steps=20), True),
    "ends when three agree": (
        "calm",
        dict(entropy_bound=2.0, confidence_threshold=0.3, stability_threshold=2, steps=20),
        True,
    ),
    "ends when sure": ("calm", dict(t_min=0.1, t_max=1.0, stability_threshold=0, confidence_threshold=0.6), True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return gemma.make_folder(str(tmp_path_factory.mktemp("models") / "hf"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """One whose layers add little to the embedding: its canvases come to rest, as those of the other never do."""
    path = gemma.make_folder(str(tmp_path_factory.mktemp("models") / "calm"))
    file = f"{path}/model.safetensors"
    layers = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    save_file(
        {key: x * 0.1 if key.endswith(layers) else x for key, x in load_file(file).items()}, file, dict(format="pt")
    )
    return path


@functools.cache
def their_model(folder):
    model = gemma.theirs(folder)
    # its own head casts to fp32; `generate` calls what is set here
    model.forward = lambda **inputs: Namespace(logits=gemma.capped(model, model.model(**inputs).last_hidden_state))
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


def our_rows(
    model, prompts, new, steps=6, conditions=0.5, vocabulary=VOCABULARY, positions=256, eos=EOS, network=None, **options
):
    """The finished rows of one batch."""
    args = Namespace(
        dllm_block_size=K,
        block_diffusion_self_conditioning=conditions,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
    )
    config = GenerationConfig(max_new_tokens=new, seed=SEED, steps_per_block=steps, **options)
    decoding = Decoding(config, block_diffusion.reverse, BLANK, eos, vocabulary, args)
    rows = [DenoisedRow(Canvas([*prompt, *[BLANK] * new], len(prompt)), decoding) for prompt in prompts]
    with torch.inference_mode():
        run(rows, network or Network(model, vocabulary, full=False))
    return rows


def answers(rows):
    return [row.tokens[row.start :].tolist() for row in rows]


@functools.cache
def our_model(folder):
    return ours(folder, rule=block_diffusion.visible)


@pytest.mark.parametrize("name", RULES)
def test_generate_of_transformers_token_by_token(request, name):
    """Also: a batch of unequal prompts is each of them alone, and the cache changes nothing."""
    which, rule, early = RULES[name]
    path = request.getfixturevalue(which)
    with gemma.float64():
        model = our_model(path)
        expected = [their_answer(their_model(path), prompt, NEW, **rule) for prompt in PROMPTS]
        together = our_rows(model, PROMPTS, NEW, **rule)
        alone = [our_rows(model, [prompt], NEW, **rule)[0] for prompt in PROMPTS]
        uncached = our_rows(model, PROMPTS, NEW, cache="none", **rule)
    for (ids, steps), *rows in zip(expected, together, alone, uncached, strict=True):
        assert answers(rows) == [ids] * 3
        assert [row.steps for row in rows] == [row.forwards for row in rows] == [steps] * 3
    counts = {row.steps for row in together}
    assert (len(counts) > 1) if early else counts == {4 * 6}, counts
    assert len(set(sum(answers(together), []))) > 20


def test_eos_ends_an_answer_where_transformers_ends_it(folder):
    """Within the second canvas of the first prompt; others have it elsewhere or nowhere."""
    with gemma.float64():
        model = our_model(folder)
        free = answers(our_rows(model, PROMPTS, NEW))
        eos = next(id for place, id in enumerate(free[0]) if K + 2 <= place < 2 * K and id not in free[0][:place])
        rows = our_rows(model, PROMPTS, NEW, eos=eos, stop_at_eos=True)
        expected = [their_answer(their_model(folder), prompt, NEW, eos=eos)[0] for prompt in PROMPTS]
    first = free[0].index(eos)
    assert rows[0].tokens[len(PROMPTS[0]) :].tolist() == free[0][:first] + [eos] * (NEW - first)
    assert rows[0].steps == 2 * 6
    for row, ids in zip(rows, expected, strict=True):
        assert row.tokens[row.start :].tolist() == ids + [eos] * (NEW - len(ids))
    assert len({row.steps for row in rows}) > 1


@pytest.mark.parametrize("new", [1, K - 1, K + 3])
def test_an_answer_of_any_length_is_the_beginning_of_whole_canvases(folder, new):
    with gemma.float64():
        model = our_model(folder)
        expected = [their_answer(their_model(folder), prompt, new)[0] for prompt in PROMPTS]
        assert answers(our_rows(model, PROMPTS, new)) == expected


def test_a_canvas_ends_with_the_model_s_positions(folder):
    """The whole canvas where there is room, else a short one; earlier canvases are the same."""
    new, prompt = K + 3, PROMPTS[1]
    seen = []

    class Watched(Network):
        def __call__(self, passes, cache=None):
            seen.append(int(passes[0].positions.max()))
            return super().__call__(passes, cache)

    with gemma.float64():
        model = our_model(folder)
        free = answers(our_rows(model, [prompt], new))[0]
        network = Watched(model, VOCABULARY, full=False)
        tight = answers(our_rows(model, [prompt], new, positions=len(prompt) + new, network=network))[0]
    assert tight[:K] == free[:K] and len(tight) == new and BLANK not in tight
    assert max(seen) == len(prompt) + new - 1


def test_nothing_to_read_and_ids_without_a_token(folder):
    """An empty prompt is answered; ids that the tokenizer lacks are noise at most."""
    with gemma.float64():
        model = our_model(folder)
        rows = our_rows(model, [[], [5, 6]], NEW, vocabulary=40)
        alone = our_rows(model, [[]], NEW, vocabulary=40, cache="none")
    assert answers(rows)[0] == answers(alone)[0]
    assert all(0 <= id < 40 for ids in answers(rows) for id in ids)


def recorded(model, prompts, new, **options):
    """(rows, [(clean tokens, canvas, what the network was told, logits)] of every step of the only prompt)."""
    steps, clean = [], []

    class Recording(Network):
        def __call__(self, passes, cache=None):
            logits = super().__call__(passes, cache)
            (one,) = passes
            del clean[one.cached :]
            clean.extend(one.tokens[~one.noisy].tolist())
            steps.append((list(clean), one.tokens[one.noisy], one.earlier, logits[0].clone()))
            return logits

    return our_rows(model, prompts, new, network=Recording(model, VOCABULARY, full=False), **options), steps


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[3]])
@torch.inference_mode()
def test_every_step_of_later_canvases_equals_a_fresh_encoding(folder, prompt):
    """Keys and values that were kept are those of prompt and finished canvases encoded at once; what the network is
    told is told by transformers' own arguments."""
    with gemma.float64():
        rows, steps = recorded(our_model(folder), [prompt], NEW)
        assert len(steps) == 4 * 6
        for number, (clean, canvas, earlier, logits) in enumerate(steps):
            assert clean == rows[0].tokens[: len(prompt) + number // 6 * K].tolist()
            assert (earlier is None) == (number % 6 == 0)
            if clean:
                earlier = earlier if earlier is None else earlier[None]
                fresh = gemma.decode(their_model(folder), torch.tensor([clean]), canvas[None], earlier)[0]
                assert (logits - fresh).abs().max() < 1e-9


def test_without_self_conditioning_there_is_no_branch(folder, monkeypatch):
    """Bit-equal to a network that has none: in the first step of a canvas always, and in every step of a model that
    was trained without."""
    with gemma.float64():
        model = our_model(folder)
        _, told = recorded(model, [PROMPTS[0]], NEW)
        _, off = recorded(model, [PROMPTS[0]], NEW, conditions=0.0)
        eps = model.config.layernorm_epsilon
        monkeypatch.setattr(model.self_conditioning, "forward", lambda embedded, soft: rms(embedded, eps))
        _, removed = recorded(model, [PROMPTS[0]], NEW, conditions=0.0)
    assert torch.equal(told[0][-1], removed[0][-1])
    assert not torch.equal(told[1][-1], removed[1][-1])
    assert len(off) == len(removed) == 4 * 6
    assert all(torch.equal(a[-1], b[-1]) and a[2] is None for a, b in zip(off, removed, strict=True))
