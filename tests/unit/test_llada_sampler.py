"""The block-wise sampler on a toy network of a few cosines, against published numbers and by properties.

In the published loop rows shorter than the longest prompt keep masks that no block covers, and a threshold can
use up the steps before a block is full. Here both are filled; where the published rows are whole, ours are equal.
"""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.tokenizer import ByteLevel
from megatron_dllm.generation import llada, prepare
from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.prompts import Canvas, build_canvases, number_copies
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.generation.selection import Candidates, RowDraws, gumbel_argmax, quotas
from megatron_dllm.modes import mdlm

CASES = json.loads((Path(__file__).parents[1] / "golden/23_generation.json").read_text())["cases"]
MASK, VOCABULARY = 8, 9


def kind(name):
    return [case for case in CASES if case["kind"] == name]


class Toy:
    """Logits that depend on the position and the token before it; the mask's are low. Counts its calls."""

    def __init__(self, shift=0):
        self.calls, self.rows, self.shift = 0, 0, shift

    def __call__(self, passes, cache):
        assert cache is None
        self.calls, self.rows = self.calls + 1, self.rows + sum(len(one.wanted) for one in passes)
        return [self.logits(one.tokens)[one.wanted] for one in passes]

    def logits(self, tokens):
        before = torch.cat([tokens[:1], tokens[:-1]])[:, None]
        place = torch.arange(len(tokens))[:, None]
        logits = 3 * torch.cos(0.9 * torch.arange(VOCABULARY) + 0.37 * place + 0.11 * before)
        logits[..., MASK] = -5
        if self.shift:
            logits = torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])
        return logits


def answer(prompts, toy=None, reverse=mdlm.reverse, **options):
    config = GenerationConfig(**options)
    canvases = [Canvas([*prompt, *[MASK] * config.max_new_tokens], len(prompt)) for prompt in prompts]
    return decode(canvases, toy or Toy(), reverse, config)


def decode(canvases, toy, reverse, config):
    args = Namespace(dllm_mode="mdlm")
    decoding = Decoding(config, reverse, MASK, eos_id=0, vocab_size=VOCABULARY, args=args)
    rows = [llada.LLaDARow(canvas, decoding) for canvas in number_copies(canvases)]
    run(rows, toy)
    return rows


def ids(rows):
    return [row.tokens.tolist() for row in rows]


# --- published numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", kind("transfer_schedule"))
def test_published_schedules(case):
    assert [quotas(sum(case["mask"]), case["steps"])] == case["out"]


@pytest.mark.parametrize("case", kind("transfer_index"))
def test_published_choice_of_tokens(case):
    masked = torch.tensor(case["mask"][0]).nonzero()[:, 0]
    logits = torch.tensor(case["logits"][0])[masked]
    logits = torch.nn.functional.pad(logits, (0, 1), value=float("-inf"))  # a mask token beyond the published ids
    candidates = Candidates(logits, mask_id=5, draws=RowDraws(0, []))
    chosen, new = mdlm.reverse(candidates, case["k"], case["threshold"])
    assert sorted(masked[chosen].tolist()) == torch.tensor(case["chosen"][0]).nonzero()[:, 0].tolist()
    assert new.tolist() == torch.tensor(case["x0"][0])[masked[chosen]].tolist()


def sample_options():
    for case in kind("sample"):
        renamed = dict(case["overrides"])
        renamed["gen_block_length"] = renamed.pop("block_size")
        yield case, renamed


@pytest.mark.parametrize("case, config", sample_options())
def test_published_samples(case, config):
    shift = int(case["sampler"] == "IDLMSampler")
    toy = Toy(shift)
    rows = answer(case["inputs"], toy, **config)
    alone = [answer([prompt], Toy(shift), **config)[0] for prompt in case["inputs"]]
    assert ids(rows) == ids(alone)
    assert all(MASK not in row for row in ids(rows))
    assert toy.calls == max(row.steps for row in rows) <= case["model_calls"]
    if not case["stranded_masks"]:
        assert ids(rows) == case["out"]
    elif len(rows) > 1:
        longest = max(range(len(rows)), key=lambda b: len(case["inputs"][b]))  # its blocks are where they belong
        assert ids(rows)[longest] == case["out"][longest]
    else:
        first_block = slice(len(case["inputs"][0]), len(case["inputs"][0]) + config["gen_block_length"])
        ours, theirs = ids(rows)[0][first_block], case["out"][0][first_block]
        assert all(t in (o, MASK) for o, t in zip(ours, theirs, strict=True))


def test_finished_blocks_cost_no_forwards():
    case, config = next((c, o) for c, o in sample_options() if o.get("threshold") == 0.3)
    toy = Toy(shift=1)
    answer(case["inputs"], toy, **config)
    assert (toy.calls, case["model_calls"]) == (2, 8)


def test_published_infilling():
    (case,) = kind("infill")
    config = GenerationConfig(steps=4, gen_block_length=3, infill=True)
    (row,) = decode([Canvas([1, 8, 8, 2, 8], 0)], Toy(), mdlm.reverse, config)
    assert ids([row]) == case["out"]
    assert row.steps == 3 < case["model_calls"]


# --- properties -------------------------------------------------------------------------------------------

PROMPTS = st.lists(st.lists(st.integers(0, MASK - 1), max_size=7), min_size=1, max_size=3)
CONFIGS = st.builds(
    dict,
    max_new_tokens=st.integers(1, 12),
    steps=st.integers(1, 20),
    gen_block_length=st.integers(1, 15),
    temperature=st.sampled_from([0.0, 1.0]),
    cfg_scale=st.sampled_from([0.0, 1.5]),
)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, CONFIGS, st.sampled_from(["low_confidence", "random", 0.0, 0.5, 1.0]), st.integers(0, 3))
def test_exactly_the_tokens_asked_for(prompts, config, rule, seed):
    rule = dict(remasking=rule) if isinstance(rule, str) else dict(threshold=rule)
    toy = Toy()
    rows = answer(prompts, toy, seed=seed, **config, **rule)
    blocks = math.ceil(config["max_new_tokens"] / config["gen_block_length"])
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = row.tokens.tolist()
        assert tokens[: len(prompt)] == prompt
        assert len(tokens) == len(prompt) + config["max_new_tokens"]
        assert MASK not in tokens
        assert blocks <= row.steps <= math.ceil(config["steps"] / blocks) * blocks
        if "threshold" not in rule:  # every step commits at least one token
            length, last = config["gen_block_length"], config["max_new_tokens"] % config["gen_block_length"]
            sizes = [length] * (blocks - (last > 0)) + [last] * (last > 0)
            assert row.steps == sum(min(size, math.ceil(config["steps"] / blocks)) for size in sizes)
    assert toy.calls == max(row.steps for row in rows)
    # a finished row leaves the batch; only masked tokens of current blocks reach the head
    assert toy.rows <= sum(row.steps for row in rows) * config["gen_block_length"] * (2 if config["cfg_scale"] else 1)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, CONFIGS, st.sampled_from([None, 0.4]), st.integers(0, 3))
def test_a_batch_is_each_prompt_alone(prompts, config, threshold, seed):
    config = dict(config, threshold=threshold, seed=seed)
    rows = answer(prompts, **config)
    first = {tuple(prompt): row for prompt, row in reversed(list(zip(prompts, rows, strict=True)))}
    for prompt, row in first.items():  # an equal prompt further on is another draw
        assert row.tokens.tolist() == answer([list(prompt)], **config)[0].tokens.tolist()


def test_an_equal_prompt_is_drawn_anew():
    first, second = ids(answer([[1, 2], [1, 2]], max_new_tokens=24, temperature=1.0))
    assert first != second


def test_every_step_commits_in_the_current_block():
    seen = []

    def reverse(candidates, quota, threshold):
        chosen, new = mdlm.reverse(candidates, quota, threshold)
        seen.append((len(candidates), len(chosen)))
        return chosen, new

    answer([[1]], reverse=reverse, max_new_tokens=64, gen_block_length=16, steps=32)
    assert seen == [(left, 2) for left in range(16, 0, -2)] * 4


def test_a_threshold_out_of_reach_keeps_to_the_schedule():
    committed = []

    def reverse(candidates, quota, threshold):
        chosen, new = mdlm.reverse(candidates, quota, threshold)
        committed.append(len(chosen))
        return chosen, new

    answer([[1]], reverse=reverse, max_new_tokens=10, gen_block_length=10, steps=4, threshold=1.0)
    assert committed == [3, 3, 2, 2]


def test_the_mask_is_never_predicted():
    class Masker(Toy):
        def logits(self, tokens):
            logits = super().logits(tokens)
            logits[:, MASK] = 50.0
            return logits

    assert MASK not in ids(answer([[1, 2]], Masker(), max_new_tokens=8))[0]
    assert MASK not in ids(answer([[1, 2]], Masker(), max_new_tokens=8, temperature=2.0))[0]


def test_random_remasking_is_independent_of_the_logits():
    orders = []

    def reverse(candidates, quota, threshold):
        chosen, new = mdlm.reverse(candidates, quota, threshold)
        orders[-1].append(chosen.tolist())
        return chosen, new

    for factor in (1.0, -0.3):
        orders.append([])
        toy = lambda *inputs, factor=factor: [logits * factor for logits in Toy()(*inputs)]
        answer([[1, 2]], toy, reverse, max_new_tokens=8, steps=8, remasking="random", seed=3)
    assert orders[0] == orders[1]
    assert orders[0] != [[0]] * 8


def test_stop_at_eos_fills_up_and_saves_steps():
    class Ender(Toy):
        """Sure of tokens on the left; the third of the answer is EOS (0)."""

        def logits(self, tokens):
            place = torch.arange(len(tokens))
            logits = torch.zeros(len(tokens), VOCABULARY)
            logits[place, torch.where(place == 4, 0, 1 + place % 7)] = 9 - 0.3 * place
            return logits

    config = dict(max_new_tokens=12, gen_block_length=4, steps=12)
    toy = Ender()
    assert ids(answer([[1, 2]], toy, stop_at_eos=True, **config)) == [[1, 2, 3, 4, *[0] * 10]]
    assert toy.calls == 3
    toy = Ender()
    (whole,) = ids(answer([[1, 2]], toy, **config))
    assert whole == [1, 2, 3, 4, 0, *(1 + place % 7 for place in range(5, 14))]
    assert toy.calls == 12


def test_guidance_contrasts_with_a_canvas_without_the_prompt():
    canvases = []

    class Watch(Toy):
        def __call__(self, passes, cache):
            canvases.append([one.tokens.tolist() for one in passes])
            return super().__call__(passes, cache)

    answer([[1, 2]], Watch(), max_new_tokens=2, steps=1, cfg_scale=1.0)
    assert canvases[0] == [[1, 2, MASK, MASK], [MASK] * 4]


# --- numbers ----------------------------------------------------------------------------------------------


def test_gumbel_is_finite_at_both_ends_and_respects_forbidden_ids():
    logits = torch.tensor([[1.0, float("-inf"), 2.0]], dtype=torch.float64)
    for u in ([0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]):
        chosen = gumbel_argmax(logits, 1.0, torch.tensor([u], dtype=torch.float64))
        assert chosen.item() in (0, 2)


def test_gumbel_draws_from_the_softmax():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    uniform = torch.rand(40_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for temperature in (0.7, 1.0, 2.0):
        drawn = gumbel_argmax(logits.expand(40_000, 4), temperature, uniform)
        frequency = torch.bincount(drawn, minlength=4) / 40_000
        assert torch.allclose(frequency.double(), torch.softmax(logits / temperature, 0), atol=0.01)


def test_temperature_zero_draws_nothing():
    class NoDraws:
        def uniform(self, *args):
            raise AssertionError("temperature 0 needs no random number")

    chosen, confidence = Candidates(torch.tensor([[1.0, 3.0, 2.0]]), mask_id=1, draws=NoDraws()).propose()
    assert chosen.tolist() == [2]
    assert confidence.item() == pytest.approx(torch.softmax(torch.tensor([1.0, 3.0, 2.0]), 0)[2].item())


# --- prompts and options ----------------------------------------------------------------------------------


def canvases(prompt, infill=False, longest=100, **options):
    tokenizer = ByteLevel()
    return build_canvases([prompt], tokenizer, GenerationConfig(infill=infill, **options), tokenizer.mask_id, longest)


def test_gaps_of_a_text():
    (canvas,) = canvases("a[MASK:3]b[MASK]", infill=True, gap_length=2)
    assert canvas == Canvas([97, 258, 258, 258, 98, 258, 258], 0)


def test_prompts_of_every_kind():
    assert canvases("ab", max_new_tokens=1) == [Canvas([97, 98, 258], 2)]
    assert canvases([97], max_new_tokens=2) == [Canvas([97, 258, 258], 1)]
    assert canvases("", max_new_tokens=2) == [Canvas([258, 258], 0)]
    (chat,) = canvases([dict(role="user", content="Hi")], max_new_tokens=1)
    assert ByteLevel().decode(chat.tokens[: chat.start]) == "User:\nHi\n\nAssistant:\n"


def check(**options):
    """`check_sampler` for a model trained with bd3lm; options of its run or of the sampler."""
    run = dict(dllm_mode="bd3lm", dllm_block_size=4, dllm_block_origin="sequence", ar_loss_weight=1.0)
    run |= dict(dllm_mask_token_id=258, max_position_embeddings=200)
    prompt = options.pop("prompt", "a")
    config = {name: value for name, value in options.items() if name not in run}
    args = Namespace(**{name: options.get(name, value) for name, value in run.items()})
    prepare([prompt], ByteLevel(), GenerationConfig(**config), args)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: canvases("abc", max_new_tokens=98), "101 tokens long, but the model has 100"),
        (lambda: canvases([258], max_new_tokens=1), "contains the mask token 258"),
        (lambda: canvases("a", max_new_tokens=10**15), "1000000000000001 tokens long, but the model has 100"),
        (
            lambda: canvases("a[MASK:1000000000000000]", infill=True),
            "1000000000000001 tokens long, but the model has 100",
        ),
        (lambda: canvases("[MASK]" * 2, infill=True, gap_length=10**15), "2000000000000000 tokens long"),
        (lambda: canvases(f"[MASK:{'9' * 5000}]", infill=True), "tokens long, but the model has 100"),
        (lambda: canvases("a[MASK:0]b[MASK:2]", infill=True), "gap of length 0"),
        (lambda: canvases("a\udcff", infill=True), "text of prompt 1 holds"),
        (lambda: canvases([dict(role="critic", content="Hi")]), "prompt 1: Message 0 has the role"),
        (lambda: canvases("whole", infill=True), "no gap to fill"),
        (lambda: canvases("a[MASK:2]b[MASK:x]", infill=True), r"has \[MASK:x\], which is no gap"),
        (lambda: canvases("a[MASK:-1]b[MASK]", infill=True), r"has \[MASK:-1\], which is no gap"),
        (lambda: check(gap_length=3), "--gap-length is the length of a"),
        (lambda: canvases([dict(role="user", content="[MASK]")], infill=True), "is a conversation"),
        (lambda: GenerationConfig(steps=0), "--steps is 0"),
        (lambda: GenerationConfig(batch_size=0), "--batch-size is 0"),
        (lambda: GenerationConfig(temperature=-1.0), "--temperature"),
        (lambda: GenerationConfig(temperature=float("nan")), "--temperature"),
        (lambda: GenerationConfig(remasking="none"), "choose one of low_confidence, random"),
        (lambda: GenerationConfig(threshold=1.5), "give a probability"),
        (lambda: GenerationConfig(threshold=0.5, remasking="random"), "drop one"),
        (lambda: GenerationConfig(infill=True, stop_at_eos=True), "drop one"),
        (lambda: GenerationConfig(steps=4, steps_per_block=2), "give one of them"),
        (lambda: GenerationConfig(threshold=0.5, factor=1.0), "drop one"),
        (lambda: GenerationConfig(top_k=3), "--top-k says what to draw from"),
        (lambda: GenerationConfig(top_p=0.0, temperature=1.0), "--top-p 0 leaves no token"),
        (lambda: GenerationConfig(cache="disk"), "choose one of auto, none, prefix, dual"),
        (lambda: GenerationConfig(mode="train"), "choose one of diffusion, ar, speculative"),
        (lambda: check(dllm_mode="another"), "cannot be decoded yet"),
        (lambda: check(sampler="beam"), "--sampler beam is unknown"),
        (lambda: check(sampler="llada"), "--sampler llada does not fit .* bd3lm: choose llada2"),
        (lambda: check(dllm_mode="mdlm", sampler="nemotron"), "choose llada or dream"),
        (lambda: check(infill=True), "--infill needs a model trained with mdlm"),
        (lambda: check(cfg_scale=1.0), "--cfg-scale means nothing to --sampler llada2"),
        (lambda: check(algorithm="origin"), "--algorithm means nothing to --sampler llada2"),
        (lambda: check(gen_block_length=8), "blocks of --dllm-block-size 4 tokens: leave out"),
        (lambda: check(dllm_block_origin="response"), "cannot be decoded yet"),
        (lambda: check(cache="prefix"), "is an approximation"),
        (lambda: check(max_post_steps=3), "needs --editing-threshold"),
        (lambda: check(editing_threshold=0.5, steps=3), "leave out --steps"),
        (lambda: check(editing_threshold=0.5, remasking="random"), "drop one"),
        (lambda: check(dllm_mode="mdlm", cache="dual", cfg_scale=1.0), "drop one"),
        (lambda: check(dllm_mode="hybrid", mode="ar", threshold=0.5), "--threshold means nothing to --mode ar"),
        (lambda: check(dllm_mode="hybrid", mode="ar", gen_block_length=4), "means nothing to --mode ar"),
        (lambda: check(dllm_mode="idlm", mode="diffusion"), "choose speculative or ar"),
        (lambda: check(dllm_mode="hybrid", ar_loss_weight=0), "choose --sampler llada2"),
        (lambda: check(dllm_mode="scdd", stop_at_eos=True), "means nothing to --sampler scdd"),
        (lambda: check(dllm_mode="idlm", prompt=""), "prompt 1 is empty"),
    ],
)
def test_what_cannot_work_says_so(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
