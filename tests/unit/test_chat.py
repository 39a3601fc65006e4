"""Chat rendering with real tokenizers: what is supervised, and that every turn ends in EOS exactly once."""

from functools import lru_cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dllm.data.chat import PLAIN_TEMPLATE, render, render_prompt
from megatron_dllm.data.tokenizer import ByteLevel, HuggingFace, SentencePiece

SENTENCES = [
    "Hello, how are you?",
    "I am well.",
    "Be brief.",
    "user assistant system\n",
    "What is two and two?",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<mask>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The EOS behind the tags, as many templates have it
EOS_BEHIND_TAGS = (
    "{% for m in messages %}{{ m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ ' ' + eos_token + '\\n' }}"
    "{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + '\\n' + m.content | trim + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
# Renders a turn differently once another follows: as reasoning models, which forget what they thought
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '(thinking) ' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# No assistant header, hence no generation prompt
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": "I am well."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    @lru_cache
    def make(template=None, eos="<|endoftext|>", pad="<pad>"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator(SENTENCES, trainer)
        folder = tmp_path_factory.mktemp("tokenizer")
        fast = PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            eos_token=eos,
            pad_token=pad,
            mask_token="<mask>",
            extra_special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        )
        fast.save_pretrained(folder)
        return HuggingFace(str(folder), template)

    return make


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    import sentencepiece

    prefix = str(tmp_path_factory.mktemp("sentencepiece") / "model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20), model_prefix=prefix, vocab_size=310, byte_fallback=True,
        hard_vocab_limit=False, pad_id=3, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    return SentencePiece(prefix + ".model")


def supervised(tokenizer, ids, mask):
    """Texts of the supervised runs, special tokens written out."""
    assert len(ids) == len(mask) and all(isinstance(value, bool) for value in mask)
    runs, previous = [], False
    for token, is_answer in zip(ids, mask, strict=True):
        if is_answer:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = is_answer
    return [tokenizer.decode(run, show_special=True) for run in runs]


EOS = "<|endoftext|>"
END = "<|im_end|>"
CASES = {
    # template, EOS token -> supervised texts of the two turns in TALK
    "template ends turns with eos": (CHATML, END, ["I am well." + END, "four" + END]),
    "tagged, ends turns with eos": (CHATML_TAGGED, END, ["I am well." + END, "four" + END]),
    "eos behind the tags": (EOS_BEHIND_TAGS, EOS, ["I am well. " + EOS, "four " + EOS]),
    "own end of turn": (CHATML, EOS, ["I am well." + END, "four" + END + EOS]),
    "tagged, own end of turn": (CHATML_TAGGED, EOS, ["I am well." + END, "four" + END + EOS]),
    "no header": (BRACKETS, EOS, [" I am well." + EOS, " four" + EOS]),
    "no end at all": (NO_END, EOS, ["I am well." + EOS, "four" + EOS]),
    "no template": (None, EOS, ["I am well." + EOS, "four" + EOS]),
}


@pytest.mark.parametrize("pad", ["<pad>", "same as eos"])
@pytest.mark.parametrize("name", CASES)
def test_each_assistant_turn_and_its_end(make, name, pad):
    template, eos, expected = CASES[name]
    tokenizer = make(template, eos, eos if pad == "same as eos" else pad)
    ids, mask = render(TALK, tokenizer)
    assert supervised(tokenizer, ids, mask) == expected
    assert ids[-1] == tokenizer.eos_id and mask[-1]  # the last token of a conversation is its EOS, in the loss
    assert sum(i == tokenizer.eos_id for i, m in zip(ids, mask, strict=True) if m) == "".join(expected).count(eos)
    last_ids, last_mask = render(TALK, tokenizer, last_turn_only=True)
    assert last_ids == ids
    assert supervised(tokenizer, last_ids, last_mask) == expected[-1:]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turn", [2, 4])
def test_prompt_is_what_comes_before_the_answer(make, name, turn):
    template, eos, _ = CASES[name]
    tokenizer = make(template, eos)
    ids, mask = render(TALK[: turn + 1], tokenizer, last_turn_only=True)
    assert render_prompt(TALK[:turn], tokenizer) == ids[: mask.index(True)]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED])
def test_agrees_with_transformers(make, template):
    tokenizer = make(template, END)
    ids, mask = render(TALK, tokenizer)
    theirs = tokenizer.hf.apply_chat_template(
        TALK, chat_template=CHATML_TAGGED, return_dict=True, return_assistant_tokens_mask=True
    )
    newline = tokenizer.encode("\n")  # what the template writes behind the last end is cut off
    assert ids + newline == list(theirs["input_ids"])
    assert [int(m) for m in mask] + [0] * len(newline) == theirs["assistant_masks"]


def test_plain_template_reads_plainly(make):
    tokenizer = make()
    ids, _ = render(TALK, tokenizer)
    assert tokenizer.decode(ids, show_special=True) == (
        "System:\nBe brief.\n\nUser:\nHello, how are you?\n\nAssistant:\nI am well.<|endoftext|>"
        "User:\nWhat is two and two?\n\nAssistant:\nfour<|endoftext|>"
    )


def test_eos_that_the_data_brings_is_not_doubled(make):
    tokenizer = make(NO_END)
    by_hand = [*TALK[:-1], {"role": "assistant", "content": "four<|endoftext|>\n"}]
    assert render(by_hand, tokenizer) == render(TALK, tokenizer)


def test_messages_after_the_last_answer_are_left_out(make):
    tokenizer = make(CHATML)
    assert render([*TALK, {"role": "user", "content": "Thanks!"}], tokenizer) == render(TALK, tokenizer)


def test_absent_keys_of_parquet_are_dropped(make):
    tokenizer = make("{% if messages[0].name is defined %}{{ 1 + '' }}{% endif %}" + CHATML)
    assert render([{**message, "name": None} for message in TALK], tokenizer) == render(TALK, tokenizer)


def test_given_template_replaces_the_tokenizers(make):
    assert render(TALK, make(NO_END), CHATML) == render(TALK, make(CHATML))


def test_template_that_forgets(make):
    tokenizer = make(FORGETFUL)
    with pytest.raises(ValueError, match="not prefix-stable.*generation.*--chat-template"):
        render(TALK, tokenizer)
    # one turn alone can be found, and the sampler needs none
    ids, mask = render(TALK, tokenizer, last_turn_only=True)
    assert supervised(tokenizer, ids, mask) == ["(thinking) four<|im_end|><|endoftext|>"]
    assert render_prompt(TALK[:4], tokenizer) == ids[: mask.index(True)]


def test_answer_that_merges_with_the_header_is_an_error(make):
    tokenizer = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    clash = [{"role": "user", "content": "Hel"}, {"role": "assistant", "content": "lo"}]
    with pytest.raises(ValueError, match="not prefix-stable"):
        render(clash, tokenizer)


def test_tags_around_the_wrong_regions(make):
    tokenizer = make("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}")
    with pytest.raises(ValueError, match="mark 1 regions for 2 assistant turns"):
        render(TALK, tokenizer)


@pytest.mark.parametrize("template", [None, CHATML, CHATML_TAGGED, NO_END, EOS_BEHIND_TAGS])
def test_tokenizers_without_templates_of_their_own(pieces, template):
    for tokenizer in (ByteLevel(), pieces):
        ids, mask = render(TALK, tokenizer, template)
        eos = tokenizer.special_text(tokenizer.eos_id)
        texts = [text.removesuffix(eos) for text in supervised(tokenizer, ids, mask)]
        # to these tokenizers <|im_end|> is ordinary text
        inside = END if template == CHATML_TAGGED else " " if template == EOS_BEHIND_TAGS else ""
        assert [text.strip(" ") for text in texts] == [f"I am well.{inside}".strip(), f"four{inside}".strip()]
        assert ids.count(tokenizer.eos_id) == 2 and ids[-1] == tokenizer.eos_id
        for turn in (2, 4):
            ids, mask = render(TALK[: turn + 1], tokenizer, template, last_turn_only=True)
            assert render_prompt(TALK[:turn], tokenizer, template) == ids[: mask.index(True)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=3),
    template=st.sampled_from([None, CHATML, CHATML_TAGGED]),
    last_turn_only=st.booleans(),
    system=st.booleans(),
)
def test_mask_covers_exactly_the_assistant(contents, template, last_turn_only, system):
    tokenizer = ByteLevel()
    messages = [{"role": "system", "content": "Be brief."}] * system
    for content in contents:
        messages += [{"role": "user", "content": "Say:"}, {"role": "assistant", "content": content}]
    ids, mask = render(messages, tokenizer, template, last_turn_only)
    answers = contents[-1:] if last_turn_only else contents
    inside = END if template == CHATML_TAGGED else ""
    assert supervised(tokenizer, ids, mask) == [answer + inside + "<eos>" for answer in answers]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], 'Message 0 must be an object with a "role"'),
        ([{"role": "user"}], "content of message 0 must be a string, but it is None"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "content of message 0 must be a string",
        ),
        ([{"role": "user", "content": "hi"}], "no assistant message"),
        (
            [{"role": "tool", "content": "hi"}, TALK[2]],
            "role 'tool', but the plain template knows only system",
        ),
        ([{"role": "user", "content": "a <mask> here"}, TALK[2]], "spells the mask token '<mask>'"),
    ],
)
def test_malformed_conversations(make, messages, reason):
    with pytest.raises(ValueError, match=reason):
        render(messages, make())


def test_other_errors(make):
    with pytest.raises(ValueError, match="prompt ends with an assistant message"):
        render_prompt(TALK, make())
    with pytest.raises(ValueError, match="rejects the conversation .roles must alternate.*--chat-template"):
        render(TALK, make(), "{{ raise_exception('roles must alternate') }}")
    no_eos = ByteLevel()
    no_eos.eos_id = None
    with pytest.raises(ValueError, match="no EOS token"):
        render(TALK, no_eos)


def test_mask_text_is_only_text_to_bytes():
    ids, _ = render([{"role": "user", "content": "<mask>"}, TALK[2]], ByteLevel(), PLAIN_TEMPLATE)
    assert ByteLevel().mask_id not in ids
