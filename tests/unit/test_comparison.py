"""What is said of a draft's answers: counted and timed by hand."""

import pytest

from megatron_dllm.generation.comparison import Comparison
from megatron_dllm.generation.config import Completion, GenerationConfig
from tests.unit.generate_tool import BYTES

EOS = BYTES.eos_id


def answer(ids, forwards, seconds):
    return Completion("", ids, forwards, forwards, len(ids) / seconds)


DRAFTED = [answer([1, 2, 3, 4, 5, 6], 3, 2.0), answer([1, 2, 3, EOS, EOS, EOS], 2, 1.0), answer([7] * 6, 6, 4.0)]
PLAIN = [answer([1, 2, 3, 4, 5, 6], 6, 4.0), answer([1, 2, 3, EOS, EOS, EOS], 4, 3.0), answer([8] * 6, 6, 2.0)]


@pytest.mark.parametrize(("stops", "tokens", "yields"), [(True, 13, [2.5, 3.0, 1.0]), (False, 15, [2.5, 5.0, 1.0])])
def test_tokens_a_pass(stops, tokens, yields):
    comparison = Comparison(BYTES, GenerationConfig(stop_at_eos=stops, batch_size=2))
    assert [comparison.add(one) for one in DRAFTED] == [dict(tokens_per_pass=value) for value in yields]
    said = f"tokens per pass of the target: {tokens / 8:.2f} ({tokens} tokens, 8 passes)"
    assert comparison.summary() == said


def test_beside_the_target_alone():
    """Two batches: 2 + 4 seconds with the draft, 4 + 2 without."""
    comparison = Comparison(BYTES, GenerationConfig(batch_size=2), PLAIN)
    found = [comparison.add(one) for one in DRAFTED]
    assert found[0] == dict(tokens_per_pass=2.5, plain_tokens_per_second=1.5, speed_up=2.0, same_as_plain=True)
    assert found[2] == dict(tokens_per_pass=1.0, plain_tokens_per_second=3.0, speed_up=0.5, same_as_plain=False)
    said = "; 2.5 tokens a second, 2.5 without the draft: 1.00 times; the same text for 2 of 3 prompts"
    assert comparison.summary().endswith(said)
    comparison = Comparison(BYTES, GenerationConfig(temperature=1.0), PLAIN)
    assert [comparison.add(one) for one in DRAFTED] and comparison.summary().endswith("1.00 times")


def test_an_answer_of_one_token_has_no_other_pass():
    comparison = Comparison(BYTES, GenerationConfig(max_new_tokens=1))
    assert comparison.add(answer([1], 1, 1.0)) == dict(tokens_per_pass=None)
    assert "no (0 tokens, 0 passes)" in comparison.summary()
