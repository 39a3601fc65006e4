"""Batches of prompts: what is answered does not depend on how many are decoded together, and comes in order."""

from argparse import Namespace

import pytest
import torch

from megatron_dllm import generation
from megatron_dllm.data.tokenizer import Null
from megatron_dllm.generation import GenerationConfig, generate, rows, selection, stream
from tests.unit.test_llada_sampler import MASK, VOCABULARY, Toy

PROMPTS = [[1, 2], [3], [1, 2], [], [4, 5, 6], [1, 2], [7]]  # one of them three times
OPTIONS = dict(max_new_tokens=9, gen_block_length=4, steps=6, temperature=1.0, seed=3)


@pytest.fixture
def toy(monkeypatch):
    """The network under `generate`; counts its calls, and the largest batch in `rows_at_once`."""
    toy = Toy()
    toy.rows_at_once = 0

    def network(passes, cache):
        assert not torch.is_grad_enabled()
        toy.rows_at_once = max(toy.rows_at_once, len(passes))
        return toy(passes, cache)

    args = Namespace(
        dllm_mode="mdlm",
        dllm_mask_token_id=MASK,
        max_position_embeddings=100,
        context_parallel_size=1,
        sequence_parallel=False,
        virtual_pipeline_model_parallel_size=None,
    )
    monkeypatch.setattr(generation, "get_args", lambda: args)
    monkeypatch.setattr(generation, "Network", lambda *unused: network)
    return toy


def answers(prompts=PROMPTS, **options):
    config = GenerationConfig(**OPTIONS | options)
    return [completion.ids for completion in generate(torch.nn.Identity(), Null(VOCABULARY, eos_id=0), prompts, config)]


@pytest.mark.parametrize("rule", [dict(), dict(remasking="random"), dict(cfg_scale=0.5)])
def test_the_batch_size_changes_no_answer(toy, rule):
    together = answers(batch_size=len(PROMPTS), **rule)
    assert toy.rows_at_once == len(PROMPTS) * (2 if "cfg_scale" in rule else 1)
    assert len({tuple(ids) for ids in together}) == len(PROMPTS)  # equal prompts are drawn anew, in every batch
    for batch_size in (1, 2, 3, 10**20):
        assert answers(batch_size=batch_size, **rule) == together
    assert answers(**rule) == together
    assert answers(**rule, seed=4) != together


def test_a_batch_holds_no_more_than_asked_for(toy):
    answers(batch_size=3)
    assert toy.rows_at_once == 3
    assert answers([]) == []


def test_answers_come_as_soon_as_their_batch_is_done(toy):
    model = torch.nn.Identity()
    config = GenerationConfig(**OPTIONS, batch_size=2)
    completions = stream(model, Null(VOCABULARY, eos_id=0), PROMPTS, config)
    assert toy.calls == 0
    first, second = next(completions), next(completions)
    calls = toy.calls
    assert calls == first.steps == second.steps
    assert model.training and torch.is_grad_enabled()  # between batches nothing is left changed
    rest = list(completions)
    assert toy.calls == 4 * calls
    assert [c.ids for c in (first, second, *rest)] == answers()


def test_prompts_that_do_not_fit_are_refused_at_the_call(toy):
    with pytest.raises(ValueError, match="prompt 9 with 9 new tokens is 109 tokens long"):
        stream(torch.nn.Identity(), Null(VOCABULARY, eos_id=0), [[1]] * 8 + [[1] * 100], GenerationConfig(**OPTIONS))
    assert toy.calls == 0


def test_more_steps_than_tokens_cost_nothing(toy, monkeypatch):
    planned = []
    quotas = lambda masked, steps: planned.append(steps) or selection.quotas(masked, min(steps, masked))
    monkeypatch.setattr(rows, "quotas", quotas)
    assert answers(steps=10**12) == answers(steps=9 * 9)
    assert max(planned) == OPTIONS["gen_block_length"]
