"""A draft and its target write what a loop without any cache writes, guess by guess; at temperature 0 what the target
writes alone; on one process and on tensor-parallel ranks."""

import functools
import json

import pytest
import torch

from megatron_dllm.conversion import plain_draft
from megatron_dllm.generation.nemotron import verify
from megatron_dllm.generation.selection import Candidates, RowDraws
from tests import drafts
from tests.parallel.test_generate import run_tool
from tests.parity import plain_samplers as plain
from tests.parity.plain_samplers import MASK

NEW = 9
PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 71], [80]]
CONFIGS = [dict(), dict(temperature=8.0, top_k=60), dict(mode="ar")]


@pytest.fixture(scope="module")
def written(pool, hf_folder, tmp_path_factory):
    """written(tp): what a random draft and its target write, with each of CONFIGS."""
    draft = drafts.make(tmp_path_factory.mktemp("draft"), tokenizer=False, num_target_layers=4)

    @functools.cache
    def run(tp):
        plan = dict(hf_model=draft, target=hf_folder("qwen3 tied")[0], tensor_model_parallel_size=tp)
        configs = [dict(max_new_tokens=NEW, batch_size=size, **config) for config in CONFIGS for size in (3, 1)]
        ranks = pool.run([], tp, function="tests.parallel.sampling:write", plan=plan, configs=configs, prompts=PROMPTS)
        assert all(rank["ids"] == ranks[0]["ids"] for rank in ranks)
        return ranks[0]

    return run


@torch.no_grad()
def naive(target, prompt, temperature, top_k):
    """(answer, passes of the target): both networks run anew on everything in every turn."""
    weights, K = drafts.tensors(), drafts.BLOCK
    end, passes = len(prompt) + NEW, 0
    draws = RowDraws(1234, prompt + [MASK] * NEW)
    of = lambda logits: Candidates(logits, MASK, temperature, draws=draws, top_k=top_k)
    tokens, ids, q = list(prompt), torch.zeros(0, dtype=torch.int64), None
    while len(tokens) < end:
        everything = torch.tensor([tokens + ids.tolist()])
        n = everything.shape[1]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        out = target(input_ids=everything, attention_mask=mask, output_hidden_states=True, use_cache=False)
        passes += 1
        features = torch.cat([out.hidden_states[layer + 1] for layer in drafts.TARGETS], -1)
        new, _ = verify(ids, q, of(out.logits[0, len(tokens) - 1 :]).distribution(), draws)
        tokens = (tokens + new.tolist())[:end]
        ids, q, count = torch.zeros(0, dtype=torch.int64), None, min(K - 1, end - len(tokens) - 1)
        if count > 0:
            place = len(tokens) - 1
            block = torch.tensor([[tokens[-1]] + [MASK] * count])
            positions = torch.arange(place + count + 1)[None]
            hidden = plain_draft.hidden_states(
                weights, drafts.CONFIG, features[:, :place], target.get_input_embeddings()(block), positions
            )
            candidates = of(target.lm_head(hidden[0, 1:]))
            ids, q = candidates.draw("draft"), candidates.distribution()
    return tokens[len(prompt) :], passes


@pytest.mark.parametrize("tp", [1, 2])
def test_a_loop_without_caches(written, hf_folder, tp):
    target, found = hf_folder("qwen3 tied")[1], written(tp)
    answers = dict(
        zip(
            [(i, size) for i in range(3) for size in (3, 1)],
            zip(found["ids"], found["forwards"], strict=True),
            strict=True,
        )
    )
    for i, config in enumerate(CONFIGS[:2]):
        expected = [naive(target, prompt, config.get("temperature", 0.0), config.get("top_k")) for prompt in PROMPTS]
        for size in (3, 1):
            assert list(zip(*answers[i, size], strict=True)) == expected
    alone = [plain.ar(target, prompt, NEW)[0] for prompt in PROMPTS]
    assert answers[0, 3][0] == answers[2, 3][0] == alone
    assert answers[2, 3][1] == [NEW] * 3
    # some guesses are kept, some refused
    assert NEW // drafts.BLOCK < min(answers[1, 3][1]) < max(answers[1, 3][1]) < NEW


def test_beside_the_target_alone(hf_folder, tmp_path):
    draft = drafts.make(tmp_path, tokenizer=False, num_target_layers=4)
    model = ["--hf-model", draft, "--target", hf_folder("qwen3 tied")[0]]
    prompts = [word for ids in PROMPTS for word in ("--prompt", " ".join(f"w{id}" for id in ids))]
    out = run_tool(*model, *prompts, "--max-new-tokens", NEW, "--json", "--compare-plain")
    answers = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == 3 and all(answer["same_as_plain"] for answer in answers)
    for answer in answers:
        assert answer["tokens_per_pass"] == pytest.approx((NEW - 1) / (answer["forwards"] - 1), abs=1e-4)
        expected = answer["tokens_per_second"] / answer["plain_tokens_per_second"]
        assert answer["speed_up"] == pytest.approx(expected, abs=1e-4)
